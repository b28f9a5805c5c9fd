"""Resize, crop, flip and normalise decoded images, with torchvision's names and values and without torchvision.

    image = random_resized_crop(sample.image, 224)                  # uint8, (3, 224, 224)
    pixels = normalise(image, mean=[0.48, 0.46, 0.41], std=0.27)    # float32, (3, 224, 224)

Every function takes an image or several of one size, a list of images of any sizes, or a Pillow image. Tensors have the
shape (…, channels, height, width), arrays (…, height, width, channels), as decoders give them; what comes out is of the
same kind, and a list of a list. Pillow images become RGB arrays.

None of it calls torchvision: its wheel fits one build of torch (beside another, transformers cannot be imported), and
where it is installed, transformers takes other image processors by default, whose values differ.

Random functions draw what torchvision draws, in its order, from `generator`, by default torch's global one. The loader
seeds that one before every hook with a key of the sample and its epoch, so the same sample gets the same crop on any
rank, with any number of workers, and after a resume. All images of one tensor get the same crop or flip, as in
torchvision; those of a list get their own.

Invariant: the bytes are those of `torch.nn.functional.interpolate`, of whatever memory layout the image has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from numbers import Integral
from typing import Any, Literal, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from energon_bridge.core.errors import ConfigurationError, SampleError, check_choice, is_whole
from energon_bridge.core.samples.stacking import lent
from energon_bridge.core.samples.streaming import LARGE
from energon_bridge.models.images.resampling import PixelLayout, bits_of, look_up, resample_as_torch, values_in

__all__ = ["center_crop", "horizontal_flip", "normalise", "random_horizontal_flip", "random_resized_crop", "resize"]

Interpolation = Literal["nearest", "nearest-exact", "bilinear", "bicubic"]
_SMOOTH = ("bilinear", "bicubic")
_TRIES = 10
_WHOLE = PixelLayout()
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def resize(
    image: Any,
    size: int | Sequence[int],
    interpolation: Interpolation = "bilinear",
    max_size: int | None = None,
    antialias: bool = True,
) -> Any:
    """Return images in another size, by `torch.nn.functional.interpolate`.

    Args:
        image: uint8 or floats.
        size: Height and width; or the length of the shorter side, the other one keeping the aspect ratio.
        interpolation: `bilinear` or `bicubic`, or `nearest` or `nearest-exact` for masks and labels.
        max_size: With one length, the most that the longer side may become; the shorter one then becomes shorter.
        antialias: Whether `bilinear` and `bicubic` average over all pixels where they shrink.

    Raises:
        ConfigurationError: Arguments that do not fit together.
        SampleError: The value is not an image.
    """
    check_choice("interpolation", interpolation, ("bilinear", "bicubic", "nearest", "nearest-exact"))
    sides = _sides_of("size", size)
    if max_size is not None and (len(sides) == 2 or max_size <= sides[0]):
        raise ConfigurationError(
            f"max_size={max_size} needs a single smaller size, the length of the shorter side; got size={size!r}"
        )

    def resized(pixels: Tensor) -> Tensor:
        height, width = pixels.shape[-2:]
        return _scaled(pixels, _size_for(height, width, sides, max_size), interpolation, antialias)

    return _applied(resized, image)


def center_crop(image: Any, output_size: int | Sequence[int]) -> Any:
    """Return the middle of images, with zeros around it if they are smaller.

    Args:
        image: uint8 or floats.
        output_size: Height and width, or both at once.

    Raises:
        ConfigurationError: The size is none.
        SampleError: The value is not an image.
    """
    height, width = _both("output_size", output_size)

    def cropped(pixels: Tensor) -> Tensor:
        rows, columns = pixels.shape[-2:]
        if rows < height or columns < width:
            missing = max(0, height - rows), max(0, width - columns)
            before = missing[1] // 2, missing[0] // 2
            around = before[0], missing[1] - before[0], before[1], missing[0] - before[1]
            pixels = torch.nn.functional.pad(pixels, around)
            rows, columns = pixels.shape[-2:]
        top = round((rows - height) / 2.0)
        left = round((columns - width) / 2.0)
        return pixels[..., top : top + height, left : left + width]

    return _applied(cropped, image)


def random_resized_crop(
    image: Any,
    size: int | Sequence[int],
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3.0 / 4.0, 4.0 / 3.0),
    interpolation: Interpolation = "bilinear",
    antialias: bool = True,
    generator: torch.Generator | None = None,
) -> Any:
    """Return a random part of images, resized.

    Args:
        image: uint8 or floats.
        size: Height and width of what comes out, or both at once.
        scale: Least and largest share of the area that is cut out.
        ratio: Least and largest ratio of width to height that is cut out.
        interpolation: As in `resize`.
        antialias: As in `resize`.
        generator: Draws; None: torch's global one, which the loader seeds for each sample.

    Raises:
        ConfigurationError: Arguments that do not fit together.
        SampleError: The value is not an image.
    """
    wanted = _both("size", size)
    for name, (low, high) in (("scale", scale), ("ratio", ratio)):
        if not 0.0 < low <= high:
            raise ConfigurationError(f"{name} must be a positive range, lower bound first, got {(low, high)!r}")

    def cropped(pixels: Tensor) -> Tensor:
        height, width = pixels.shape[-2:]
        top, left, rows, columns = _random_part(height, width, scale, ratio, generator)
        part = pixels[..., top : top + rows, left : left + columns]
        return _scaled(part, wanted, interpolation, antialias)

    return _applied(cropped, image)


def horizontal_flip(image: Any) -> Any:
    """Flip images horizontally. Raises SampleError if the value is not an image."""
    return _applied(_flipped, image)


def random_horizontal_flip(image: Any, p: float = 0.5, generator: torch.Generator | None = None) -> Any:
    """Return images flipped with probability `p`, else as they are.

    Raises:
        ConfigurationError: `p` is no probability.
        SampleError: The value is not an image.
    """
    if not 0.0 <= p <= 1.0:
        raise ConfigurationError(f"p must be a probability, from 0 to 1, got {p!r}")

    def flipped(pixels: Tensor) -> Tensor:
        return _flipped(pixels) if float(torch.rand(1, generator=generator)) < p else pixels

    return _applied(flipped, image)


def normalise(
    image: Any, mean: float | Sequence[float], std: float | Sequence[float], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return `(bytes / 255 - mean) / std` as a contiguous tensor of shape (…, channels, height, width).

    A list of images of one size becomes one tensor (images, channels, height, width). Floats are taken to be divided
    by 255 already.

    Args:
        image: uint8 or floats.
        mean: Of all channels, or of each.
        std: Deviation, likewise.
        dtype: Of the values, which are computed in float32 and rounded once.

    Raises:
        ConfigurationError: A deviation is 0, or there are not as many numbers as channels.
        SampleError: The value is not an image, or the images of a list have different shapes.
    """
    means = _numbers("mean", mean)
    stds = _numbers("std", std)
    if 0.0 in stds:
        raise ConfigurationError(f"std must not be 0, since values are divided by it; got {std!r}")
    if not isinstance(image, list | tuple):
        pixels = _as_chw(image)
        return _normalised(pixels, means, stds, torch.empty(pixels.shape, dtype=dtype, device=pixels.device))
    images = [_as_chw(one) for one in image]
    if len(shapes := {tuple(pixels.shape) for pixels in images}) != 1:
        raise SampleError(
            f"normalise stacks a list of images, which must have one shape, got {sorted(shapes)}: resize or crop them "
            "first, or call it for each"
        )
    out = _room((len(images), *images[0].shape), dtype, images[0].device)
    for pixels, row in zip(images, out, strict=True):
        _normalised(pixels, means, stds, row)
    return out


def _room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return room for a batch, if the engine is collating one in memory that it lends."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < LARGE or dtype not in _DTYPES:
        return torch.empty(shape, dtype=dtype, device=device)
    return values_in(lent((size,), np.dtype(np.uint8)), shape, dtype)


def _normalised(pixels: Tensor, means: tuple[float, ...], stds: tuple[float, ...], out: Tensor) -> Tensor:
    channels = pixels.shape[-3]
    if {len(means), len(stds)} - {1, channels}:
        raise ConfigurationError(
            f"mean has {len(means)} numbers and std {len(stds)}; an image of {channels} channels needs 1 or {channels}"
        )
    if not _is_rgb(pixels):
        floats = pixels.float() / 255.0 if pixels.dtype == torch.uint8 else pixels
        mean, std = (torch.tensor(values, device=pixels.device)[:, None, None] for values in (means, stds))
        return out.copy_(floats.sub(mean).div_(std))
    table = _table(means, stds, out.dtype)
    height, width = pixels.shape[-2:]
    for one, row in zip(pixels.reshape(-1, 3, height, width), out.view(-1, 3, height, width), strict=True):
        look_up(_hwc(one), table, _WHOLE, bits_of(row))
    return out


@lru_cache(maxsize=64)
def _table(means: tuple[float, ...], stds: tuple[float, ...], dtype: torch.dtype) -> np.ndarray:
    """Return the value of each byte in each of three channels, by the operations of torch: shape (3, 256)."""
    values = torch.arange(256, dtype=torch.float32).repeat(3, 1) / 255.0
    values = values.sub(torch.tensor(means)[:, None]).div(torch.tensor(stds)[:, None])
    return bits_of(values.to(dtype))


def _applied(function: Callable[[Tensor], Tensor], image: Any) -> Any:
    """Apply a function of tensors (…, channels, height, width) to images of any kind."""
    if isinstance(image, list | tuple):
        return [_applied(function, one) for one in image]
    pixels = _as_chw(image)
    made = function(pixels)
    return made if isinstance(image, Tensor) else made.movedim(-3, -1).numpy()


def _as_chw(image: Any) -> Tensor:
    """Return an image as a tensor (…, channels, height, width), a view wherever it can be. Raises SampleError."""
    if isinstance(image, Tensor) and image.ndim >= 3:
        return image
    if isinstance(image, Image.Image):
        image = np.array(image if image.mode == "RGB" else image.convert("RGB"))  # what Pillow lends is read-only
    if isinstance(image, np.ndarray) and image.ndim >= 3:
        plain = image.flags.writeable and min(image.strides) >= 0  # else torch takes a copy only
        return torch.from_numpy(image if plain else image.copy()).movedim(-1, -3)
    raise SampleError(
        "an image must be a tensor of shape (…, channels, height, width), an array (…, height, width, channels) or a "
        f"Pillow image, got {type(image).__name__} of shape {getattr(image, 'shape', None)}; choose a form with the "
        "task encoder's decoder, as SampleDecoder(image_decode='torchrgb8')"
    )


def _is_rgb(pixels: Tensor) -> bool:
    """Return whether the compiled part can do with an image what torch does."""
    return pixels.dtype == torch.uint8 and pixels.shape[-3] == 3 and pixels.device.type == "cpu"


def _hwc(pixels: Tensor) -> np.ndarray:
    """Return an image of (channels, height, width) as a contiguous array (height, width, channels)."""
    made: np.ndarray = pixels.permute(1, 2, 0).contiguous().numpy()
    return made


def _scaled(pixels: Tensor, size: tuple[int, int], by: Interpolation, antialias: bool) -> Tensor:
    if tuple(pixels.shape[-2:]) == size:
        return pixels
    if _is_rgb(pixels) and antialias and by in _SMOOTH:
        return _scaled_bytes(pixels, size, cast(Literal["bilinear", "bicubic"], by))
    flat = pixels.reshape(-1, *pixels.shape[-3:])
    made = torch.nn.functional.interpolate(flat, size, mode=by, antialias=antialias and by in _SMOOTH)
    return made.reshape(*pixels.shape[:-2], *size)


def _scaled_bytes(pixels: Tensor, size: tuple[int, int], by: Literal["bilinear", "bicubic"]) -> Tensor:
    if pixels.ndim == 3:
        return torch.from_numpy(resample_as_torch(_hwc(pixels), size, by)).permute(2, 0, 1)
    rows = [resample_as_torch(_hwc(one), size, by) for one in pixels.reshape(-1, *pixels.shape[-3:])]
    made = torch.from_numpy(np.stack(rows)).permute(0, 3, 1, 2)
    return made.reshape(*pixels.shape[:-2], *size)


def _flipped(pixels: Tensor) -> Tensor:
    return pixels.flip(-1)


def _random_part(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], generator: torch.Generator | None
) -> tuple[int, int, int, int]:
    """Return top, left, height and width of a random part. Source: torchvision's `RandomResizedCrop`."""
    low = math.log(ratio[0])
    high = math.log(ratio[1])
    for _ in range(_TRIES):
        area = height * width * _uniform(scale[0], scale[1], generator)
        aspect = math.exp(_uniform(low, high, generator))
        columns = round(math.sqrt(area * aspect))
        rows = round(math.sqrt(area / aspect))
        if 0 < columns <= width and 0 < rows <= height:
            top = int(torch.randint(0, height - rows + 1, (1,), generator=generator))
            return top, int(torch.randint(0, width - columns + 1, (1,), generator=generator)), rows, columns
    # No part of such a shape: the largest in the middle whose ratio is as near as may be.
    rows = height
    columns = width
    if width / height < min(ratio):
        rows = round(width / min(ratio))
    elif width / height > max(ratio):
        columns = round(height * max(ratio))
    rows = max(1, min(rows, height))
    columns = max(1, min(columns, width))
    return (height - rows) // 2, (width - columns) // 2, rows, columns


def _uniform(low: float, high: float, generator: torch.Generator | None) -> float:
    return float(torch.empty(1).uniform_(low, high, generator=generator))


def _size_for(height: int, width: int, sides: tuple[int, ...], max_size: int | None) -> tuple[int, int]:
    """Return the size to which an image is scaled. Source: torchvision's `_compute_resized_output_size`."""
    if len(sides) == 2:
        return sides[0], sides[1]
    short, long = sorted((height, width))
    new_short = sides[0]
    new_long = max(1, int(sides[0] * long / short))
    if max_size is not None and new_long > max_size:
        new_short = max(1, int(max_size * new_short / new_long))
        new_long = max_size
    return (new_long, new_short) if width <= height else (new_short, new_long)


def _sides_of(name: str, size: Any) -> tuple[int, ...]:
    sides = (size,) if isinstance(size, Integral) else tuple(size)
    fits = all(is_whole(side) and side > 0 for side in sides)
    if not fits or len(sides) not in (1, 2):
        raise ConfigurationError(
            f"{name} must be a number of pixels, or (height, width), both at least 1, got {size!r}"
        )
    return tuple(map(int, sides))


def _both(name: str, size: Any) -> tuple[int, int]:
    sides = _sides_of(name, size)
    return sides[0], sides[-1]


def _numbers(name: str, value: Any) -> tuple[float, ...]:
    try:
        return (float(value),) if isinstance(value, int | float) else tuple(float(one) for one in value)
    except (TypeError, ValueError):
        raise ConfigurationError(f"{name} must be a number, or one per channel, got {value!r}") from None
