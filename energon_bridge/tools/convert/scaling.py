"""Scaling images down and encoding them again, which only happens on request."""

from __future__ import annotations

import io
import math
import warnings
from typing import Any

from energon_bridge.core.errors import SourceError
from energon_bridge.core.format.media import HEAD_BYTES, missing_package
from energon_bridge.models.images.jpeg import ORIENTATION, can_scale, loaded_size
from energon_bridge.tools.check.media import MediaFilter
from energon_bridge.tools.convert.options import ConvertOptions

_QUALITY = 90  # of images that are scaled down
_LOSSY = ("JPEG", "WEBP")
_KEPT = ("exif", "xmp", "icc_profile")
_IMAGES = MediaFilter(strategy="EXTENSION")


def reencoded(part: str, data: bytes, options: ConvertOptions) -> bytes:
    """Return an image scaled down to `max_pixels` and encoded with `quality`; return anything else unchanged.

    The format, the colour profile, the EXIF data and the XMP stay. Images are never scaled up, and
    animations are left alone. Raises SourceError if the part has the name of an image but is not one.
    """
    if _IMAGES.kind_of(f"x.{part}", data[:HEAD_BYTES]) != "image":
        return data
    from PIL import Image, UnidentifiedImageError  # the command line starts without it

    if (remedy := missing_package(data[:HEAD_BYTES])) is not None:
        raise SourceError(f"cannot scale down the part {part!r}: {remedy}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # large images are expected here, not decompression bombs
            with Image.open(io.BytesIO(data)) as image:
                form = image.format or ""
                whole = loaded_size(image)
                size = _scaled_size(whole, options.max_pixels)
                fits = size == whole
                if getattr(image, "n_frames", 1) > 1 or (fits and (options.quality is None or form not in _LOSSY)):
                    return data
                made = image if fits else _scaled(image, size, data)
                settings: dict[str, Any] = {key: image.info[key] for key in _KEPT if key in image.info}
                if "exif" not in settings and ORIENTATION in image.getexif():  # from where it would not be kept
                    settings["exif"] = image.getexif()
                if form in _LOSSY:
                    settings["quality"] = options.quality or _QUALITY
                out = io.BytesIO()
                made.save(out, form, **settings)
    except UnidentifiedImageError as error:  # whose message is the place of a Python object
        raise SourceError(
            f"cannot scale down the part {part!r}: {type(error).__name__}: its {len(data):,} bytes are no image that "
            "can be opened. Repair the file, or download it again."
        ) from error
    except Exception as error:  # codecs raise anything
        raise SourceError(f"cannot scale down the part {part!r}: {type(error).__name__}: {error}") from error
    encoded = out.getvalue()
    return data if fits and len(encoded) >= len(data) else encoded


def _scaled_size(size: tuple[int, int], max_pixels: int | None) -> tuple[int, int]:
    """Return the largest size of the same aspect ratio with at most `max_pixels`."""
    width, height = size
    if max_pixels is None or width * height <= max_pixels:
        return size
    factor = math.sqrt(max_pixels / (width * height))
    return max(1, int(width * factor)), max(1, int(height * factor))


def _scaled(image: Any, size: tuple[int, int], data: bytes) -> Any:
    from PIL import Image

    if can_scale(data):
        image.draft(None, (2 * size[0], 2 * size[1]))  # decodes JPEGs of more than twice the size at a smaller scale
    if image.mode in ("P", "1"):
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")
    return image.resize(size, Image.Resampling.LANCZOS)
