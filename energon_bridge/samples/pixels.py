"""What becomes of decoded pixels: resized as Pillow does it, and looked up as values in the layout of a model.

    resample(pixels, (height, width), "bicubic")      the bytes of `Image.resize`, to the last bit
    look_up(pixels, table, layout, out)               values of bytes, written where the model wants them

Pixels are uint8 of shape (height, width, 3). Both release the interpreter lock. `_pixels.c` has them, since Pillow
takes ten times as long to resize (one pixel of four bytes after the other, and back), and numpy needs a copy for each
step from bytes to patches. Where it is not there (no C compiler when the package was installed), Pillow and numpy give
the same values.

Invariants: `resample` is the integer arithmetic of Pillow's `Resample.c`: coefficients with 22 bits behind the point,
along each row and along each column, both times rounded to bytes; a side that stays as long is left out. Which side
comes first depends on the release of Pillow, so it is tried out once; where no order gives the bytes of the Pillow that
is installed, Pillow itself resizes. A value is a function of a byte and its channel, so a table of 256 values for each
channel is all that rescaling and normalising are, whatever the type of the values.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from PIL import Image

__all__ = ["COMPILED", "FILTERS", "Filter", "Layout", "look_up", "resample"]

Filter = Literal["box", "bilinear", "hamming", "bicubic", "lanczos"]

_BITS = 22
_CHANNELS = 3
_SPARE = 16
_NEAR, _FAR = float(np.float32(0.54)), float(np.float32(0.46))  # single precision in Pillow, too
_OF_THREAD = threading.local()  # no context variable: threads may share a context, and must not share memory

try:
    from energon_bridge.samples import _pixels
except ImportError:
    _compiled: Any = None
else:
    _compiled = _pixels
COMPILED = _compiled is not None
"""Whether the compiled part is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How the values of an image lie: its patches row by row, each channel by channel, and each channel by frame.

    Attributes:
        patch: Height and width of a patch; None: the whole image is one, which gives (channels, height, width).
        merge: Patches along each side of a group; the patches of a group stand next to each other.
        times: Frames of a patch. An image stands in all of them.
    """

    patch: tuple[int, int] | None = None
    merge: int = 1
    times: int = 1


def resample(pixels: np.ndarray, size: tuple[int, int], by: Filter) -> np.ndarray:
    """Return pixels, uint8 of shape (…, …, 3), in the height and width given, as Pillow resizes an image."""
    height, width, _ = pixels.shape
    if (height, width) == size:
        return pixels
    order = _order_of_pillow()
    if order is None:
        image = Image.fromarray(np.ascontiguousarray(pixels))
        return np.asarray(image.resize(size[::-1], Image.Resampling[by.upper()]))
    pixels = np.ascontiguousarray(pixels)
    if size[1] != width and order((height, width), size):
        pixels = _resample(pixels, (size[0], width), by)
    return _resample(pixels, size, by)


def _resample(pixels: np.ndarray, size: tuple[int, int], by: Filter) -> np.ndarray:
    """Resize along the rows first."""
    height, width, _ = pixels.shape
    out = np.empty((*size, _CHANNELS), np.uint8)
    scratch = _scratch((height * size[1] + width) * _CHANNELS + _SPARE)
    across, down = coefficients(width, size[1], by), coefficients(height, size[0], by)
    _compiled.resample(pixels, height, width, out, scratch, *across, *down)
    return out


# Whether columns come first, by the size of an image and that which it gets; what each release of Pillow does.
_ORDERS: tuple[Callable[[tuple[int, int], tuple[int, int]], bool], ...] = (
    lambda old, new: 0 < old[0] - new[0] > 2 * (old[1] - new[1]),  # from 13 on
    lambda old, new: new[0] < old[0] > 100 * old[1],
    lambda old, new: False,
)
_TRIED = (((40, 40), (10, 36)), ((303, 3), (20, 2)), ((30, 50), (40, 9)), ((9, 7), (31, 40)))


@cache
def _order_of_pillow() -> Callable[[tuple[int, int], tuple[int, int]], bool] | None:
    """Return the order by which the bytes are those of the Pillow that is installed; None: no order, or no C."""
    if _compiled is None or not COMPILED:
        return None
    noise = np.random.default_rng(0).integers(0, 2, (303, 50, 3), np.uint8) * np.uint8(255)
    for order in _ORDERS:
        for (height, width), new in _TRIED:
            pixels = np.ascontiguousarray(noise[:height, :width])
            between = _resample(pixels, (new[0], width), "bicubic") if order((height, width), new) else pixels
            expected = Image.fromarray(pixels).resize(new[::-1], Image.Resampling.BICUBIC)
            if not np.array_equal(_resample(between, new, "bicubic"), np.asarray(expected)):
                break
        else:
            return order
    return None


def look_up(pixels: np.ndarray, table: np.ndarray, layout: Layout, out: np.ndarray) -> None:
    """Write the values of pixels in a layout.

    Args:
        pixels: uint8 of shape (height, width, 3), or (frames, height, width, 3) with as many frames as `times`.
        table: The value of each byte in each channel, shape (3, 256).
        layout: How the values lie.
        out: Where they go, contiguous, as many items of the table's type.
    """
    times = layout.times
    frames, (height, width) = (len(pixels) if pixels.ndim == 4 else 1), pixels.shape[-3:-1]
    patch_height, patch_width = layout.patch or (height, width)
    if _compiled is not None and COMPILED:
        patch = (patch_height, patch_width, layout.merge, times)
        _compiled.look_up(np.ascontiguousarray(pixels), out, table, frames, height, width, *patch)
        return
    merge, rows, columns = layout.merge, height // patch_height, width // patch_width
    shape = (frames, rows // merge, merge, patch_height, columns // merge, merge, patch_width, _CHANNELS)
    ordered = pixels.reshape(shape).transpose(1, 4, 2, 5, 7, 0, 3, 6)
    target = out.reshape(*ordered.shape[:5], times, patch_height, patch_width)
    for channel in range(_CHANNELS):
        target[:, :, :, :, channel] = table[channel][ordered[:, :, :, :, channel]]


def _scratch(size: int) -> np.ndarray:
    """Return memory of this thread for at least that many bytes, warm from its last image."""
    memory: np.ndarray | None = getattr(_OF_THREAD, "scratch", None)
    if memory is None or memory.size < size:
        memory = _OF_THREAD.scratch = np.empty(size, dtype=np.uint8)
    return memory


def _bicubic(x: np.ndarray) -> np.ndarray:
    x, a = np.abs(x), -0.5
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _bilinear(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    return np.where(x < 1.0, 1.0 - x, 0.0)


def _box(x: np.ndarray) -> np.ndarray:
    return np.where((x > -0.5) & (x <= 0.5), 1.0, 0.0)


def _hamming_at(x: float) -> float:
    x = abs(x)
    if x == 0.0 or x >= 1.0:
        return float(x == 0.0)
    x = x * math.pi
    return math.sin(x) / x * (_NEAR + _FAR * math.cos(x))


def _sinc(x: float) -> float:
    if x == 0.0:
        return 1.0
    x = x * math.pi
    return math.sin(x) / x


def _lanczos_at(x: float) -> float:
    return _sinc(x) * _sinc(x / 3) if -3.0 <= x < 3.0 else 0.0


_hamming = np.vectorize(_hamming_at, otypes=[np.float64])
_lanczos = np.vectorize(_lanczos_at, otypes=[np.float64])

FILTERS: Mapping[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = MappingProxyType(
    {
        "box": (_box, 0.5),
        "bilinear": (_bilinear, 1.0),
        "hamming": (_hamming, 1.0),
        "bicubic": (_bicubic, 2.0),
        "lanczos": (_lanczos, 3.0),
    }
)
"""Pillow's filters by their names, each with how far it reaches."""


@lru_cache(maxsize=1024)  # sides of images repeat, and those that they are scaled to even more
def coefficients(inputs: int, outputs: int, by: Filter) -> tuple[np.ndarray, np.ndarray]:
    """Return of which inputs each output is made, and how much of each.

    Source: `precompute_coeffs` and `normalize_coeffs_8bpc` of Pillow's Resample.c, in its order of operations.

    Returns:
        First input and number of inputs, int32 of shape (2, outputs), and coefficients, int32 (outputs, most inputs).
    """
    weight, reach = FILTERS[by]
    scale = inputs / outputs
    stretch = max(scale, 1.0)
    support = reach * stretch
    center = (np.arange(outputs) + 0.5) * scale
    first = np.maximum((center - support + 0.5).astype(np.int64), 0)
    count = np.minimum((center + support + 0.5).astype(np.int64), inputs) - first
    taps = np.arange(int(count.max()) + int(count.max()) % 2)  # an even number: they are read in pairs
    used = taps < count[:, None]
    weights = np.where(used, weight((taps + first[:, None] - center[:, None] + 0.5) * (1.0 / stretch)), 0.0)
    total = np.zeros(outputs)
    for tap in taps:  # one after the other, as it is rounded there
        total += weights[:, tap]
    weights = np.divide(weights, total[:, None], out=weights, where=total[:, None] != 0.0)
    fixed = (np.where(weights < 0, -0.5, 0.5) + weights * (1 << _BITS)).astype(np.int32)
    where = np.stack([first, count]).astype(np.int32)
    return where, np.ascontiguousarray(fixed)
