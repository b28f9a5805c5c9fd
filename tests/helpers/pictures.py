"""Encoded images of every mode and shape, for tests of what becomes of pixels."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import numpy as np
import PIL
from PIL import Image, ImageCms

OPAQUE = ("jpeg", "grey", "cmyk", "16 bit", "turned", "progressive", "webp", "bits", "floats", "lab", "32 bit")
if int(PIL.__version__.partition(".")[0]) >= 12:  # before, Pillow does not read the YCbCr that it writes
    OPAQUE += ("ycc",)
TRANSPARENT = (
    *("palette", "rgba", "grey alpha", "palette of alphas", "key", "grey key", "16 bit key", "webp alpha", "gif"),
    *("moving gif", "moving webp", "moving png", "tiff alpha", "avif alpha", "jp2 alpha", "16 bit alpha", "profile"),
)
KINDS = tuple(kind for pair in zip_longest(OPAQUE, TRANSPARENT) for kind in pair if kind is not None)


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
    elif kind == "palette of alphas":
        image.quantize(17).save(out, "PNG", transparency=bytes(range(0, 255, 15)))
    elif kind == "key":
        image.save(out, "PNG", transparency=image.getpixel((0, 0)))
    elif kind == "grey key":
        image.convert("L").save(out, "PNG", transparency=image.convert("L").getpixel((0, 0)))
    elif kind in ("16 bit key", "16 bit alpha"):
        _save_deep(image, out, alpha=kind == "16 bit alpha")
    elif kind in _WITH_ALPHA:
        form, settings = _WITH_ALPHA[kind]
        clear = image.copy()
        clear.putalpha(image.convert("L"))
        if kind.startswith("moving"):
            other = noise(width, height, seed + 1).convert("RGBA")
            settings = {"save_all": True, "append_images": [other, clear]}
        elif kind == "profile":
            settings = {"icc_profile": ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()}
        (clear.convert("LA") if kind == "grey alpha" else clear).save(out, form, **settings)
    elif kind in ("floats", "32 bit"):
        grey = np.asarray(image.convert("L"))
        Image.fromarray(grey * np.float32(1.7) if kind == "floats" else grey * np.int32(3)).save(out, "TIFF")
    elif kind in ("ycc", "lab"):
        image.convert("YCbCr" if kind == "ycc" else "LAB").save(out, "TIFF")
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


_WITH_ALPHA: dict[str, tuple[str, dict[str, Any]]] = {
    "rgba": ("PNG", {}),
    "grey alpha": ("PNG", {}),
    "profile": ("PNG", {}),
    "webp alpha": ("WEBP", {"lossless": True}),
    "gif": ("GIF", {}),
    "moving gif": ("GIF", {}),
    "moving webp": ("WEBP", {}),
    "moving png": ("PNG", {}),
    "tiff alpha": ("TIFF", {}),
    "avif alpha": ("AVIF", {}),
    "jp2 alpha": ("JPEG2000", {}),
}


def _save_deep(image: Image.Image, out: io.BytesIO, *, alpha: bool) -> None:
    """Write a PNG of 16 bits a channel, with alpha or with a transparent colour, and with a gamma."""
    pixels = np.asarray(image).astype(np.uint16) * 250
    if alpha:
        pixels = np.concatenate([pixels, pixels[..., :1]], axis=2)
    header = struct.pack(">IIBBBBB", image.width, image.height, 16, 6 if alpha else 2, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    key = b"" if alpha else _chunk(b"tRNS", pixels[0, 0].astype(">u2").tobytes())
    gamma = _chunk(b"gAMA", struct.pack(">I", 45455))
    out.write(b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + gamma + key)
    out.write(_chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b""))


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def sizes(count: int, largest: int) -> Iterator[tuple[int, int]]:
    """Yield widths and heights: the smallest, narrow ones, and any in between."""
    yield from ((1, 1), (1, 9), (largest, max(1, largest // 16)), (3, 450))
    rng = np.random.default_rng(11)
    for _ in range(count - 4):
        width, height = (int(side) for side in np.exp(rng.uniform(np.log(2), np.log(min(largest, 1200)), 2)))
        # Scaled by their shorter sides, narrower ones become too large.
        yield min(width, 20 * height), min(height, 20 * width)
