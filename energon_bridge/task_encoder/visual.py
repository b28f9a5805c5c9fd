"""Convert decoded images for image processors of transformers.

Whatever the form of a decoded image, the processor gets a PIL image in RGB: a float tensor in [0, 1] would be rescaled
a second time, and for a CHW array with few rows, a processor has to guess which axis has the channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from energon_bridge.errors import SampleError
from energon_bridge.samples.stacking import concat_pad
from energon_bridge.task_encoder.deferred import DeferredImage


def as_pil(image: Any) -> Image.Image:
    """Return an image as PIL RGB.

    Takes PIL images and torch or numpy arrays, CHW for torch and HWC for numpy, uint8 or float in [0, 1].

    Raises:
        SampleError: The value is not an image in one of these forms.
    """
    if isinstance(image, Image.Image):
        return image if image.mode == "RGB" else image.convert("RGB")
    if isinstance(image, Tensor) and image.ndim == 3:
        pixels = image.permute(1, 2, 0).cpu().numpy()
    elif isinstance(image, np.ndarray) and image.ndim == 3:
        pixels = image
    else:
        shape = getattr(image, "shape", None)
        raise SampleError(
            f"an image must be a PIL image, a CHW tensor or an HWC array, got {type(image).__name__} of shape {shape}; "
            "choose another form with the task encoder's decoder or image_decode"
        )
    if np.issubdtype(pixels.dtype, np.floating):
        pixels = np.rint(pixels.clip(0.0, 1.0) * 255.0)
    pixels = pixels.astype(np.uint8)[..., :3]
    if pixels.shape[-1] < 3:
        pixels = pixels[..., :1].repeat(3, axis=-1)
    return Image.fromarray(np.ascontiguousarray(pixels))


def as_rgb(image: Any, *, white: bool = False) -> np.ndarray:
    """Return an image as contiguous RGB bytes of shape (height, width, 3): as `as_pil`, without a copy if possible.

    `white`: replace the transparent colour of a Pillow image by white, as processors do.

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
    made = as_pil(image)
    if white and made.info.get("transparency") is not None:
        made = made.convert("RGBA")
        made = Image.alpha_composite(Image.new("RGBA", made.size, (255, 255, 255, 255)), made).convert("RGB")
    return np.array(made)  # Pillow's memory is read-only, which torch would warn about


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
    return {name: concat_pad([row[name] for row in rows if name in row]) for name in names}
