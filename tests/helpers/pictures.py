"""Encoded images of every mode and shape, for tests of what becomes of pixels."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
from PIL import Image

KINDS = ("jpeg", "grey", "palette", "rgba", "cmyk", "16 bit", "turned", "progressive", "webp", "bits")


def noise(width: int, height: int, seed: int) -> Image.Image:
    """Return smooth noise with hard edges in it."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (max(1, height // 8), max(1, width // 8), 3), dtype=np.uint8)
    pixels = np.array(Image.fromarray(small).resize((width, height), Image.Resampling.BILINEAR))
    pixels[: height // 2, width // 3 :: 7] = rng.integers(0, 2, 3) * 255
    return Image.fromarray(pixels)


def encoded(kind: str, width: int, height: int, seed: int = 0) -> bytes:
    """Return the bytes of an image of a kind."""
    image, out = noise(width, height, seed), io.BytesIO()
    if kind in ("jpeg", "progressive"):
        image.save(out, "JPEG", quality=90, progressive=kind == "progressive")
    elif kind == "grey":
        image.convert("L").save(out, "JPEG")
    elif kind == "palette":
        image.quantize(17).save(out, "PNG", transparency=3)
    elif kind == "rgba":
        image.putalpha(image.convert("L"))
        image.save(out, "PNG")
    elif kind == "cmyk":
        image.convert("CMYK").save(out, "JPEG")
    elif kind == "16 bit":
        wide = np.asarray(image.convert("L")).astype(np.uint16) * 257
        Image.fromarray(wide).save(out, "PNG")
    elif kind == "turned":
        exif = Image.Exif()
        exif[0x0112] = 6
        image.save(out, "JPEG", exif=exif)
    elif kind == "webp":
        image.save(out, "WEBP")
    else:
        image.convert("1").save(out, "PNG")
    return out.getvalue()


def sizes(count: int, largest: int) -> Iterator[tuple[int, int]]:
    """Yield widths and heights: the smallest, narrow ones, and any in between."""
    yield from ((1, 1), (1, 9), (largest, max(1, largest // 16)), (3, 450))
    rng = np.random.default_rng(11)
    for _ in range(count - 4):
        width, height = (int(side) for side in np.exp(rng.uniform(np.log(2), np.log(min(largest, 1200)), 2)))
        # Scaled by their shorter sides, narrower ones become too large.
        yield min(width, 20 * height), min(height, 20 * width)
