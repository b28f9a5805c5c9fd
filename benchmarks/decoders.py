"""What decoding an image costs, by format and by library: `python -m benchmarks.decoders`. CPU of one thread, in ms.

A photograph of 640 x 480 pixels in each format, as RGB bytes (RGBA where it has alpha). All libraries that are
installed take turns; a line has their medians, each with the largest difference of its pixels from Pillow's. `-`: it
does not decode the format, or is not installed.

Then: how far pixels are from those of the full decoding if `SampleDecoder(image_target=...)` lets JPEGs be decoded at a
half, a quarter or an eighth, after both are resized to the target (bicubic, with antialiasing), in steps of a byte.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.data import SEED, jpeg, painted
from energon_bridge.core.encoder.decoder import SampleDecoder
from energon_bridge.models.images.resampling import resample_as_torch

SIZE, ROUNDS = (640, 480), 41
LIBRARIES = ("default", "pillow", "torchcodec", "imagecodecs", "pyav")


def files() -> dict[str, tuple[bytes, str]]:
    """Return the photograph in each format that can be written here, and the mode in which it is wanted."""
    generator = np.random.default_rng(SEED)
    grain = generator.normal(0, 5, (SIZE[1], SIZE[0], 1))
    exact = (painted(generator, SIZE) + grain + 128.0).clip(0, 255)
    photo = Image.fromarray(exact.astype(np.uint8))
    alpha = photo.convert("RGBA")
    alpha.putalpha(photo.convert("L"))
    grey = Image.fromarray((exact[..., 0] * 257).astype(np.uint16))
    made: dict[str, tuple[bytes, str]] = {}

    def add(name: str, image: Image.Image, kind: str, mode: str = "RGB", **options: Any) -> None:
        out = io.BytesIO()
        try:
            image.save(out, kind, **options)
        except (KeyError, OSError, ValueError):  # this Pillow does not write it
            return
        made[name] = out.getvalue(), mode

    add("JPEG", photo, "JPEG", quality=88)
    add("JPEG, progressive", photo, "JPEG", quality=88, progressive=True)
    add("PNG", photo, "PNG")
    add("PNG, palette", photo.quantize(256), "PNG")
    add("PNG, RGBA", alpha, "PNG", "RGBA")
    add("PNG, 16 bit grey", grey, "PNG", "L")
    add("WebP", photo, "WEBP", quality=85)
    add("WebP, lossless", photo, "WEBP", lossless=True)
    add("AVIF", photo, "AVIF", quality=75)
    try:
        import_module("pillow_heif").register_heif_opener()
    except ImportError:
        return made
    add("HEIC", photo, "HEIF", quality=75)
    return made


def by_pillow(data: bytes, mode: str) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert(mode))


def by_torchcodec(data: bytes, mode: str) -> np.ndarray:
    wanted = {"RGB": "RGB", "RGBA": "RGB_ALPHA", "L": "GRAY"}[mode]
    found = import_module("torchcodec.decoders").decode_image(data, mode=wanted)
    pixels: np.ndarray = found.permute(1, 2, 0).numpy()
    return pixels[..., 0] if mode == "L" else pixels


def by_imagecodecs(data: bytes, mode: str) -> np.ndarray:
    pixels: Any = import_module("imagecodecs").imread(data)
    if isinstance(pixels, bytes):
        raise ValueError("it does not know the format")
    if pixels.dtype != np.uint8:
        pixels = (pixels >> 8).astype(np.uint8)
    return np.asarray(pixels)


def by_pyav(data: bytes, mode: str) -> np.ndarray:
    with import_module("av").open(io.BytesIO(data)) as container:
        container.streams.video[0].codec_context.thread_count = 1
        frame = next(container.decode(video=0))
        form = {"RGB": "rgb24", "RGBA": "rgba", "L": "gray"}[mode]
        pixels: np.ndarray = frame.to_ndarray(format=form)
        return pixels


def by_default(data: bytes, mode: str) -> np.ndarray:
    decoder = SampleDecoder(image_decode=f"{mode.lower()}8", guess_content=True)
    pixels: np.ndarray = decoder.decode("file", data)
    return pixels


DECODERS: Mapping[str, Callable[[bytes, str], np.ndarray]] = {
    "default": by_default,
    "pillow": by_pillow,
    "torchcodec": by_torchcodec,
    "imagecodecs": by_imagecodecs,
    "pyav": by_pyav,
}


def measured(functions: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the median milliseconds of CPU of each function; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            start = time.process_time()
            function()
            times[name].append(time.process_time() - start)
    return {name: 1e3 * statistics.median(values[1:]) for name, values in times.items()}


def pictures() -> dict[str, bytes]:
    """Return JPEGs by name: the picture of the benchmarks, and the photographs of scikit-learn if it is there."""
    found = {"painted": jpeg(np.random.default_rng(SEED), SIZE)}
    if find_spec("sklearn") is not None:
        folder = Path(str(import_module("sklearn").__file__)).parent / "datasets" / "images"
        found |= {path.stem: path.read_bytes() for path in sorted(folder.glob("*.jpg"))}
    return found


def scaled(target: int) -> list[str]:
    """Return a row for each picture: what declaring a target does to its pixels, and to the CPU of decoding it."""
    rows = []
    for name, data in pictures().items():
        made, times = [], []
        for more in ({}, {"image_target": target}):
            decoder = SampleDecoder(image_decode="rgb8", **more)  # type: ignore[arg-type]
            pixels = decoder.decode("jpg", data)
            times.append(measured({"": partial(decoder.decode, "jpg", data)})[""])
            made.append(resample_as_torch(np.ascontiguousarray(pixels), (target, target), "bicubic").astype(int))
        far = np.abs(made[0] - made[1])
        scale = f"{pixels.shape[1]} x {pixels.shape[0]}"
        off = f"{far.mean():.2f} | {np.percentile(far, 99):.0f} | {far.max()}"
        rows.append(f"| {name} | {target} | {scale} | {off} | {times[0]:.2f} | {times[1]:.2f} |")
    return rows


def main() -> None:
    """Print a line for each format, and what scaled decoding does."""
    import torch

    torch.set_num_threads(1)
    print("| format | kB | " + " | ".join(LIBRARIES) + " |\n|" + "---|" * (2 + len(LIBRARIES)))
    for name, (data, mode) in files().items():
        expected = by_pillow(data, mode).astype(int)
        functions: dict[str, Callable[[], Any]] = {}
        differences: dict[str, int] = {}
        for library, decode in DECODERS.items():
            try:
                found = decode(data, mode)
            except Exception:  # libraries raise what they like, and this is how one says that it cannot
                continue
            if found.shape == expected.shape:
                functions[library] = partial(decode, data, mode)
                differences[library] = int(np.abs(found - expected).max())
        times = measured(functions)
        cells = [
            f"{times[library]:.2f}" + (f" (±{differences[library]})" if differences[library] else "")
            if library in times
            else "-"
            for library in LIBRARIES
        ]
        print(f"| {name} | {len(data) / 1e3:.0f} | " + " | ".join(cells) + " |", flush=True)
    print("\n| picture | target | decoded at | mean | 99th percentile | largest | ms | ms, scaled |\n|" + "---|" * 8)
    for target in (200, 100, 50):
        print("\n".join(scaled(target)), flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
