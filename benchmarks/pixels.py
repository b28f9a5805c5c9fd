"""What pixels cost: `python -m benchmarks.pixels`. CPU time of one thread for an image of 640 x 480 pixels.

`--use 1`: with AVX2 only, `--use 0`: plain C; `--least`: the least of each instead of medians, for a busy machine.

For each family: decoding the JPEG, the image processor of transformers on the decoded image, and the native path in
its place, in both profiles and in other types. All of them take turns, and a line has the medians, in milliseconds,
with the whole way (decoding and pixels) in times of decoding alone.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    Qwen2VLImageProcessorPil,
    Siglip2ImageProcessorPil,
    SiglipImageProcessorPil,
)

from energon_bridge.core.encoder.decoder import SampleDecoder
from energon_bridge.core.loader.workers import keep_freed_memory
from energon_bridge.core.samples import _pixels
from energon_bridge.models.images.pixels import pixel_path

WIDTH, HEIGHT, ROUNDS = 640, 480, 41

PROCESSORS: Mapping[str, Callable[[], Any]] = {
    "llava-1.5, clip 336": lambda: CLIPImageProcessorPil(
        size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}
    ),
    "siglip 384": lambda: SiglipImageProcessorPil(size={"height": 384, "width": 384}),
    "siglip2, 256 patches": Siglip2ImageProcessorPil,
    "qwen2.5-vl": Qwen2VLImageProcessorPil,
    "qwen3-vl": lambda: Qwen2VLImageProcessorPil(patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3),
}


def photograph() -> bytes:
    """Return a JPEG with about as much in it as a photograph: large shapes, and grain."""
    rng = np.random.default_rng(20261123)
    shapes = Image.fromarray(rng.integers(0, 256, (HEIGHT // 20, WIDTH // 20, 3), dtype=np.uint8))
    pixels = np.asarray(shapes.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)) + rng.normal(0, 6, (HEIGHT, WIDTH, 3))
    out = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=85)
    return out.getvalue()


def measured(functions: Mapping[str, Callable[[], Any]], typical: Callable[[list[float]], float]) -> dict[str, float]:
    """Return the typical milliseconds of CPU of each function; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            start = time.thread_time()
            function()
            times[name].append(time.thread_time() - start)
    return {name: 1e3 * typical(values[1:] or values) for name, values in times.items()}


def main(*arguments: str) -> None:
    """Print a line for each family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--use", type=int, choices=(0, 1, 2), default=2)
    parser.add_argument("--least", action="store_true")
    options = parser.parse_args(arguments)
    _pixels.use(options.use)
    torch.set_num_threads(1)
    keep_freed_memory()  # as in a worker
    data, decoder = photograph(), SampleDecoder(image_decode="fastrgb")
    image = decoder.decode("jpg", data)
    pillow = Image.fromarray(image)
    print(f"{len(data):,} bytes of JPEG, {WIDTH} x {HEIGHT}; ms of CPU, in brackets: with decoding, in times of it")
    for name, make in PROCESSORS.items():
        processor = make()
        functions: dict[str, Callable[[], Any]] = {
            "decode": partial(decoder.decode, "jpg", data),
            "processor": partial(processor, images=[pillow], return_tensors="pt"),
        }
        for label, choice in {
            "pillow": ("pillow", "float32"),
            "torch": ("torch", "float32"),
            "pillow bf16": ("pillow", "bfloat16"),
            "pillow uint8": ("pillow", "uint8"),
        }.items():
            path: Any = pixel_path(processor, *choice)  # type: ignore[arg-type]
            functions[label] = partial(path.image, image)
        found = measured(functions, min if options.least else statistics.median)
        decode = found.pop("decode")
        parts = [f"{part} {ms:.2f} ({(ms + decode) / decode:.1f}x)" for part, ms in found.items()]
        times = found["processor"] / found["pillow"]
        print(f"{name:21} decode {decode:.2f}; {'; '.join(parts)}; processor / pillow {times:.1f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
