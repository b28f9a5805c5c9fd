"""Pixels against transformers' processors that go by torchvision: `python -m benchmarks.torchvision_values`.

Needs an environment of its own with torch, torchvision, transformers and this package: torchvision must not be where
the package is tested. `--images N` random images (default 500), 1 x 1 to 1,200 x 1,200 and one of 8,000 x 500, in
colour, grey, with a palette, CMYK and with 16 bits, all with hard edges, go through the torch-backed image processor of
each family and through the native path, profile `torch`. A line for each family: images compared and refused by both,
images with all values equal, the largest difference in steps of a byte, and whether grids, masks and sizes are equal.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from energon_bridge.core.errors import SampleError
from energon_bridge.models.families import llava_next_family, qwen_family
from energon_bridge.models.images.pixels import pixel_path
from energon_bridge.models.images.programs import Program

MODES = ("RGB", "RGB", "L", "P", "CMYK", "I;16")
LARGEST = 1200


def processors() -> Mapping[str, Callable[[], Any]]:
    """Return the torch-backed image processors of the families. Raises ImportError without torchvision."""
    from transformers import (
        CLIPImageProcessor,
        LlavaNextImageProcessor,
        Qwen2VLImageProcessor,
        Siglip2ImageProcessor,
        SiglipImageProcessor,
    )

    clip = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
    return {
        "llava-1.5, clip 336": lambda: CLIPImageProcessor(**clip),
        "llava-next 336": lambda: LlavaNextImageProcessor(**clip),
        "siglip 384": lambda: SiglipImageProcessor(size={"height": 384, "width": 384}),
        "siglip2, 256 patches": Siglip2ImageProcessor,
        "qwen2.5-vl": Qwen2VLImageProcessor,
        "qwen3-vl": lambda: Qwen2VLImageProcessor(patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3),
    }


def image(number: int) -> Image.Image:
    """Return an image of a mode and size of its own, as a task encoder gets it: decoded, in RGB."""
    rng = np.random.default_rng(number)
    width, height = (int(side) for side in np.exp(rng.uniform(0.0, np.log(LARGEST), 2)))
    width, height = min(width, 20 * height), min(height, 20 * width)
    if number < 2:
        width, height = ((1, 1), (8000, 500))[number]
    small = rng.integers(0, 256, (-(-height // 8), -(-width // 8), 3), np.uint8)
    pixels = np.array(Image.fromarray(small).resize((width, height), Image.Resampling.BILINEAR))
    pixels[: height // 2, width // 3 :: 7] = rng.integers(0, 2, 3) * 255
    made = Image.fromarray(pixels)
    mode = MODES[number % len(MODES)]
    if mode == "I;16":
        made = Image.fromarray(np.asarray(made.convert("L")).astype(np.uint16) * 257)
    return made.convert(mode).convert("RGB") if mode != "I;16" else made.convert("RGB")


def steps(path: Program, found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of pixels in steps of a byte."""
    least = float((path.norm[1]).max())  # the deviation in steps: a step is 1 / that
    return float((found.double() - expected.double()).abs().max()) * least


def main() -> None:
    """Compare all families."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, make in processors().items():
        processor = make()
        path = pixel_path(processor)
        assert path is not None, name
        assert path.profile == "torch", name
        compared = refused = same = 0
        largest, alike = 0.0, True
        for number in range(options.images):
            pixels = image(number)
            try:
                expected = processor(images=[pixels], return_tensors="pt")
            except ValueError:
                expected = None
            try:
                found = path.image(pixels)
            except SampleError:
                assert expected is None, (name, number)
                refused += 1
                continue
            assert expected is not None, (name, number)
            compared += 1
            same += torch.equal(found["pixel_values"], expected["pixel_values"])
            largest = max(largest, steps(path, found["pixel_values"], expected["pixel_values"]))
            alike &= all(torch.equal(found[key], expected[key]) for key in expected if key != "pixel_values")
            alike &= planned(name, processor, pixels, expected)
        print(
            f"{name:21} compared {compared}, refused {refused}; equal {same}, largest difference {largest:.3g} steps; "
            f"grids, masks, sizes and tokens {'equal' if alike else 'DIFFER'}",
            flush=True,
        )


def planned(name: str, processor: Any, pixels: Image.Image, expected: Mapping[str, Tensor]) -> bool:
    """Tell whether what is planned for an image, from its size alone, is what the processor has made."""
    if name.startswith("qwen"):
        plan = qwen_family("qwen3_vl" if "3" in name else "qwen2_5_vl", processor).plan_image(*pixels.size)
        return plan.grid == tuple(expected["image_grid_thw"][0].tolist())
    if name.startswith("llava-next"):
        family = llava_next_family(processor, patch_size=14)
        return family.plan_image(*pixels.size).tokens > family.image_tokens
    return True


if __name__ == "__main__":
    main()
