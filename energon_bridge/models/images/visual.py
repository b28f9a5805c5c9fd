"""Convert decoded images for image processors of transformers.

Whatever the form of a decoded image, the processor gets a PIL image in RGB, or RGBA if it is transparent: a float
tensor in [0, 1] would be rescaled a second time, and for a CHW array with few rows, a processor has to guess which axis
has the channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from energon_bridge.core.errors import SampleError
from energon_bridge.core.samples.stacking import concat_pad
from energon_bridge.models.images.images import Alpha, DeferredImage, as_alpha_says


def as_pil(image: Any, alpha: Alpha = "white") -> Image.Image:
    """Return an image as PIL RGB, with white behind what is transparent, or as `alpha` says.

    Takes PIL images and torch or numpy arrays, CHW for torch and HWC for numpy, uint8 or float in [0, 1]. Arrays have
    one channel, three, or alpha besides.

    Raises:
        SampleError: The value is not an image in one of these forms.
    """
    if isinstance(image, Image.Image):
        return as_alpha_says(image, alpha)
    if isinstance(image, Tensor) and image.ndim == 3:
        pixels = image.permute(1, 2, 0).cpu().numpy()
    elif isinstance(image, np.ndarray) and image.ndim == 3:
        pixels = image
    else:
        pixels = np.empty(0)
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 2, 3, 4):
        shape = getattr(image, "shape", None)
        raise SampleError(
            "an image must be a PIL image, a CHW tensor or an HWC array of 1 to 4 channels, got "
            f"{type(image).__name__} of shape {shape}; choose another form with the task encoder's decoder or "
            "image_decode"
        )
    _check_range(pixels)
    if np.issubdtype(pixels.dtype, np.floating):
        pixels = np.rint(pixels.clip(0.0, 1.0) * 255.0)
    pixels = np.ascontiguousarray(pixels.astype(np.uint8))
    made = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)  # L, LA, RGB or RGBA
    return as_alpha_says(made, alpha)


_OVERSHOOT = 0.5
"""How far floats may leave [0, 1]: resizing goes a little beyond, normalised or 8-bit values much farther."""


def _check_range(pixels: np.ndarray) -> None:
    """Raise SampleError for values that would be clipped or wrap around."""
    if pixels.dtype == np.uint8 or not pixels.size:
        return
    low = float(pixels.min())
    high = float(pixels.max())
    is_float = np.issubdtype(pixels.dtype, np.floating)
    least, most = (-_OVERSHOOT, 1 + _OVERSHOOT) if is_float else (0, 255)
    if not (least <= low and high <= most):
        raise SampleError(
            f"an image of {pixels.dtype} has values from {low:g} to {high:g}, expected 0 to {1 if is_float else 255}: "
            "scale them, and leave normalising to the task encoder"
        )


def as_rgb(image: Any, alpha: Alpha = "white") -> np.ndarray:
    """Return an image as contiguous RGB bytes of shape (height, width, 3): as `as_pil`, without a copy if possible.

    Raises:
        SampleError: The value is not an image in one of its forms.
    """
    pixels: Any = None
    if isinstance(image, Tensor) and image.ndim == 3 and image.dtype == torch.uint8 and image.shape[0] == 3:
        pixels = image.permute(1, 2, 0).cpu().numpy()
    elif isinstance(image, np.ndarray) and image.ndim == 3 and image.dtype == np.uint8 and image.shape[2] == 3:
        pixels = image
    if pixels is not None:
        return np.ascontiguousarray(pixels)
    return np.array(as_pil(image, alpha))  # Pillow's memory is read-only, which torch would warn about


def size_of(image: Any) -> tuple[int, int]:
    """Return width and height of an image in pixels, without decoding one that is deferred.

    Raises:
        SampleError: The value is not an image in a form that `as_pil` takes, or its header cannot be read.
    """
    if isinstance(image, Tensor) and image.ndim == 3:
        return int(image.shape[2]), int(image.shape[1])
    if isinstance(image, np.ndarray) and image.ndim == 3:
        return int(image.shape[1]), int(image.shape[0])
    if isinstance(image, Image.Image | DeferredImage):
        return image.size
    return as_pil(image).size  # raises the error for other values


def concat_visual(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the processor's results for each row along dimension 0, padding the other dimensions with zeros.

    Rows without an image add nothing; without any image the result is empty.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    joined = {name: [row[name] for row in rows if name in row] for name in names}
    for name in _NUMBERS.keys() & names.keys():
        patches = accumulate((one.shape[0] * one.shape[1] for one in joined[_NUMBERS[name]]), initial=0)
        joined[name] = [
            torch.where(one >= 0, one + first, one) for one, first in zip(joined[name], patches, strict=False)
        ]
    return {name: concat_pad(values) for name, values in joined.items()}


_NUMBERS = {"image_token_pooling": "pixel_values", "video_token_pooling": "pixel_values_videos"}
"""Results that are numbers of patches, from 0 on in each row (below 0: none), and what has these: (n, patches, …)."""
