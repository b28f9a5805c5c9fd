"""Images decoded by torchcodec, for `SampleDecoder(image_backend="torchcodec")`: what `images` asks of it."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from PIL import Image

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.format.media import HEAD_BYTES, missing_package
from energon_bridge.models.images.images import ImageForm, check_size, guess_image_extension, is_heic, on_white


@cache
def library() -> Callable[..., torch.Tensor]:
    """Return torchcodec's function for images. Raises ConfigurationError if it is not installed or does not load."""
    try:
        from torchcodec.decoders import decode_image as decode
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigurationError(
            "image_backend='torchcodec' needs torchcodec 0.17 or later: pip install 'energon-bridge[torchcodec]'. Its "
            "wheels on PyPI need the CUDA build of torch; for a CPU build take the one of "
            f"https://download.pytorch.org/whl/cpu that fits torch ({type(error).__name__}: {error})"
        ) from error
    function: Callable[..., torch.Tensor] = decode
    return function


_MODES = {"L": "GRAY", "RGB": "RGB", "RGBA": "RGB_ALPHA"}
_FORMATS = ("jpg", "png", "webp", "gif", "avif", "heic")


def kind_of(data: bytes | bytearray | memoryview) -> str:
    """Return the extension of an image; raises ValueError if torchcodec does not decode it."""
    kind = "heic" if is_heic(data) else guess_image_extension(data)
    if kind not in _FORMATS:
        raise ValueError(
            f"torchcodec decodes JPEG, PNG, WebP, GIF, AVIF and HEIC, but this is {kind or 'none of them'}: leave out "
            "image_backend='torchcodec' for such data"
        )
    return kind


def pixels_of(data: bytes | bytearray | memoryview, form: ImageForm) -> np.ndarray:
    """Return the pixels of an image, shape (height, width) or (height, width, channels)."""
    kind = kind_of(data)
    if missing_package(bytes(data[:HEAD_BYTES])) is None:  # a few bytes can ask for any amount of memory
        with Image.open(io.BytesIO(data)) as image:
            check_size(image.size, form)
    flattens = form.alpha != "drop" and form.mode != "RGBA" and kind != "jpg"
    decoded = library()(bytes(data), mode=_MODES["RGBA" if flattens else form.mode])
    if decoded.ndim == 4:  # an animation: take the first frame
        decoded = decoded[0]
    pixels: np.ndarray = decoded.permute(1, 2, 0).numpy()
    check_size((pixels.shape[1], pixels.shape[0]), form)
    if flattens:
        return np.array(on_white(Image.fromarray(pixels)).convert(form.mode))
    return pixels[..., 0] if form.mode == "L" else pixels
