"""What becomes of decoded pixels: resized as Pillow or torch does it, and looked up as values in the layout of a model.

    resample(pixels, (height, width), "bicubic")          the bytes of `Image.resize`, to the last bit
    resample_as_torch(pixels, (height, width), "bicubic") those of `interpolate` of torch, with antialiasing
    look_up(pixels, table, layout, out)                   values of bytes, written where the model wants them

Pixels are uint8 of shape (height, width, 3). All release the interpreter lock. `core/samples/_pixels.c` has them, since
Pillow takes ten times as long to resize (one pixel of four bytes after the other, and back), torch three times, and
numpy needs a copy for each step from bytes to patches. Where it is not there (no C compiler when the package was
installed), Pillow, torch and numpy give the same values.

Invariants: both resize in integers, along each row and then along each column, both times rounded to bytes; a side that
stays as long is left out. Pillow's coefficients have 22 bits behind the point, torch's as many as leave the largest one
below 2^15. Which side comes first depends on the release of Pillow, so it is tried out once; where no order gives the
bytes of the Pillow that is installed, Pillow itself resizes, and likewise torch. A value is a function of a byte and
its channel, so a table of 256 values for each channel is all that rescaling and normalising are, whatever their type.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from energon_bridge.core.samples.stacking import UNALIGNED

__all__ = [
    "COMPILED",
    "FILTERS",
    "Filter",
    "PixelLayout",
    "bits_of",
    "look_up",
    "resample",
    "resample_as_torch",
    "thread_buffer",
    "values_in",
]

Filter = Literal["box", "bilinear", "hamming", "bicubic", "lanczos"]

_BITS = 22
_LOW_BITS = 15
_TAPS = 4
_PIECES = 3
_CHANNELS = 3
_SPARE = 128
_NEAR, _FAR = float(np.float32(0.54)), float(np.float32(0.46))  # single precision in Pillow, too
_OF_THREAD = threading.local()  # no context variable: threads may share a context, and must not share memory

try:
    from energon_bridge.core.samples import _pixels
except ImportError:
    _compiled: Any = None
else:
    _compiled = _pixels if hasattr(_pixels, "LINES") else None  # else, built of an older source
COMPILED = _compiled is not None
"""Whether the C extension is built, and fits this source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PixelLayout:
    """Memory layout of an image's values: patches row by row; in a patch, channel by channel; in a channel, by frame.

    Attributes:
        patch: Height and width of a patch; None: the whole image is one, which gives (channels, height, width).
        merge: Patches along each side of a group; the patches of a group are adjacent.
        times: Frames of a patch. An image is repeated in all of them.
        order: `pixels`: in a patch, pixel by pixel instead, with the values of the channels side by side; one frame.
    """

    patch: tuple[int, int] | None = None
    merge: int = 1
    times: int = 1
    order: Literal["channels", "pixels"] = "channels"


def resample(pixels: np.ndarray, size: tuple[int, int], by: Filter) -> np.ndarray:
    """Return pixels, uint8 of shape (…, …, 3), in the height and width given, as Pillow resizes an image."""
    height, width, _ = pixels.shape
    if (height, width) == size:
        return pixels
    order = order_of_pillow()
    if order is None:
        image = Image.fromarray(np.ascontiguousarray(pixels))
        return np.asarray(image.resize(size[::-1], Image.Resampling[by.upper()]))
    pixels = np.ascontiguousarray(pixels)
    if size[1] != width and order((height, width), size):
        pixels = _resample(pixels, (size[0], width), by, coefficients)
    return _resample(pixels, size, by, coefficients)


def resample_as_torch(pixels: np.ndarray, size: tuple[int, int], by: Filter) -> np.ndarray:
    """Return pixels, uint8 of shape (…, …, 3), in a height and width, as torch's `interpolate` with antialiasing.

    `by` is one of `torch_filters()`.
    """
    if pixels.shape[:2] == size:
        return pixels
    if as_torch():
        return _resample(np.ascontiguousarray(pixels), size, by, torch_coefficients)
    return _by_torch(pixels, size, by)


def _by_torch(pixels: np.ndarray, size: tuple[int, int], by: str) -> np.ndarray:
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    if 1 in (*pixels.shape[:2], *size):
        # torch 2.13 fails on layouts that are both of its own where a side is 1: an image of one channel has one.
        made = torch.cat(
            [torch.nn.functional.interpolate(one, size, mode=by, antialias=True) for one in image.split(1, 1)], 1
        )
    else:
        made = torch.nn.functional.interpolate(image, size, mode=by, antialias=True)
    return np.ascontiguousarray(made[0].permute(1, 2, 0).numpy())


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """The fixed-point weights by which pixels along one side are made of input pixels.

    Attributes:
        where: For each output, its first input and the number of inputs: int32 of shape (2, outputs).
        parts: The weights, int16 of shape (1, outputs, most inputs), or split into (low bits, rest) along axis 0.
        bits: Fractional bits of a weight: its value is the integer / 2^bits.
        memory: For C: `parts`, then the weights in pieces of 8 bits, four inputs of each output side by side.
    """

    where: np.ndarray
    parts: np.ndarray
    bits: int
    memory: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rest = self.parts[0].astype(np.int32)
        if len(self.parts) > 1:
            rest += self.parts[1].astype(np.int32) << _LOW_BITS
        pieces = []
        for _ in range(_PIECES):
            pieces.append(rest.astype(np.int8))  # the low bits, as a number with a sign
            rest = (rest - pieces[-1]) >> 8
        _, outputs, most = self.parts.shape
        fours = np.stack(pieces).reshape(_PIECES, outputs, most // _TAPS, _TAPS).transpose(0, 2, 1, 3)
        object.__setattr__(self, "memory", self.parts.tobytes() + fours.tobytes())


def _resample(
    pixels: np.ndarray, size: tuple[int, int], by: Filter, coefficients_of: Callable[[int, int, Filter], Coefficients]
) -> np.ndarray:
    """Resize first the width, then the height. The order matters for bytes: each step rounds."""
    height, width, _ = pixels.shape
    out = np.empty((*size, _CHANNELS), np.uint8)
    scratch = thread_buffer((height * size[1] + width) * _CHANNELS + _SPARE)
    across = coefficients_of(width, size[1], by)
    down = coefficients_of(height, size[0], by)
    sides = (across.where, across.memory, down.where, down.memory, len(across.parts), across.bits, down.bits)
    _compiled.resample(pixels, height, width, out, scratch, *sides)
    return out


# Whether columns come first, by the size of an image and that which it gets; what each release of Pillow does.
_ORDERS: tuple[Callable[[tuple[int, int], tuple[int, int]], bool], ...] = (
    lambda old, new: 0 < old[0] - new[0] > 2 * (old[1] - new[1]),  # from 13 on
    lambda old, new: new[0] < old[0] > 100 * old[1],
    lambda old, new: False,
)
_TRIED = (((40, 40), (10, 36)), ((303, 3), (20, 2)), ((30, 50), (40, 9)), ((9, 7), (31, 40)))


@cache
def order_of_pillow() -> Callable[[tuple[int, int], tuple[int, int]], bool] | None:
    """Return when the installed Pillow resizes the height first, found by comparing bytes; None: unknown, or no C.

    The function takes an image's (height, width) and that which it gets.
    """
    if _compiled is None or not COMPILED:
        return None
    noise = np.random.default_rng(0).integers(0, 2, (303, 50, 3), np.uint8) * np.uint8(255)
    for order in _ORDERS:
        for (height, width), new in _TRIED:
            pixels = np.ascontiguousarray(noise[:height, :width])
            first = order((height, width), new)
            between = _resample(pixels, (new[0], width), "bicubic", coefficients) if first else pixels
            expected = Image.fromarray(pixels).resize(new[::-1], Image.Resampling.BICUBIC)
            if not np.array_equal(_resample(between, new, "bicubic", coefficients), np.asarray(expected)):
                break
        else:
            return order
    return None


@cache
def as_torch() -> bool:
    """Return whether the compiled part gives the bytes of the torch that is installed."""
    if _compiled is None or not COMPILED:
        return False
    noise = np.random.default_rng(0).integers(0, 2, (303, 50, 3), np.uint8) * np.uint8(255)
    return all(
        np.array_equal(_resample(pixels, new, by, torch_coefficients), _by_torch(pixels, new, by))
        for (height, width), new in _TRIED
        for pixels in (np.ascontiguousarray(noise[:height, :width]),)
        for by in torch_filters()
    )


@cache
def torch_filters() -> tuple[Filter, ...]:
    """Return the filters of the installed torch, which knows lanczos from 2.14 on."""
    try:
        _by_torch(np.zeros((2, 2, 3), np.uint8), (3, 3), "lanczos")
    except (NotImplementedError, RuntimeError, ValueError):
        return ("bilinear", "bicubic")
    return ("bilinear", "bicubic", "lanczos")


def look_up(pixels: np.ndarray, table: np.ndarray, layout: PixelLayout, out: np.ndarray) -> None:
    """Write the values of pixels in a layout.

    Args:
        pixels: uint8 of shape (height, width, 3), or (frames, height, width, 3) with as many frames as `times`.
        table: The value of each byte in each channel, shape (3, 256).
        layout: The layout of the values.
        out: Where they go, contiguous, as many items of the table's type.
    """
    times = layout.times
    frames, (height, width) = (len(pixels) if pixels.ndim == 4 else 1), pixels.shape[-3:-1]
    patch_height, patch_width = layout.patch or (height, width)
    if _compiled is not None and COMPILED:
        patch = (patch_height, patch_width, layout.merge, times, layout.order == "pixels")
        lines = _lines(table.tobytes()) if table.itemsize == 2 else b""
        _compiled.look_up(np.ascontiguousarray(pixels), out, table, frames, height, width, *patch, lines)
        return
    merge = layout.merge
    rows = height // patch_height
    columns = width // patch_width
    shape = (frames, rows // merge, merge, patch_height, columns // merge, merge, patch_width, _CHANNELS)
    if layout.order == "pixels":
        ordered = pixels.reshape(shape)[0].transpose(0, 3, 1, 4, 2, 5, 6)
        out.reshape(ordered.shape)[:] = table[np.arange(_CHANNELS), ordered]
        return
    ordered = pixels.reshape(shape).transpose(1, 4, 2, 5, 7, 0, 3, 6)
    target = out.reshape(*ordered.shape[:5], times, patch_height, patch_width)
    for channel in range(_CHANNELS):
        target[:, :, :, :, channel] = table[channel][ordered[:, :, :, :, channel]]


@lru_cache(maxsize=64)
def _lines(table: bytes) -> bytes:
    """Return slope and start of a line for each channel of a table of bfloat16, float32: the one amid its values.

    A value stands for all numbers that are rounded to it. Between them a slope leaves a band, which grows with the
    slope and then shrinks; the slopes with the widest one are found by halving. The values may have no line: the
    compiled part takes one only if it gives all of them.
    """
    bits = np.frombuffer(table, np.uint16).reshape(_CHANNELS, 256).astype(np.uint32) << 16
    half = np.where(bits, np.uint32(0x8000), np.uint32(0))
    ends = np.array([(bits - half).view(np.float32), (bits + half).view(np.float32)], np.float64)
    at, lines = np.arange(256), []
    with np.errstate(all="ignore"):
        for low, high in zip(ends.min(axis=0), ends.max(axis=0), strict=True):
            slopes = []
            for last in (0, 1):  # of those that are as good
                least, most = (low[255] - high[0]) / 255, (high[255] - low[0]) / 255
                for _ in range(30):
                    slope = (least + most) / 2
                    smaller = np.argmin(high - slope * at) >= np.argmax(low - slope * at) + last
                    least, most = (least, slope) if smaller else (slope, most)
                slopes.append(slope)
            slope = sum(slopes) / 2
            lines += [slope, ((low - slope * at).max() + (high - slope * at).min()) / 2]
    return np.array(lines, np.float32).tobytes()


def bits_of(values: torch.Tensor) -> np.ndarray:
    """Return the memory of values as an array, of integers where numpy has no such type."""
    made: np.ndarray = (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()
    return made


def values_in(memory: np.ndarray, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return memory, uint8 of shape (bytes,), as values of a shape and type."""
    bits = np.int16 if dtype == torch.bfloat16 else torch.empty(0, dtype=dtype).numpy().dtype
    return torch.from_numpy(memory.view(bits).reshape(shape)).view(dtype)


def thread_buffer(size: int) -> np.ndarray:
    """Return this thread's buffer of at least `size` bytes, which its last image has left in the cache."""
    memory: np.ndarray | None = getattr(_OF_THREAD, "scratch", None)
    if memory is None or memory.size < size:
        memory = _OF_THREAD.scratch = np.empty(UNALIGNED + size, dtype=np.uint8)[UNALIGNED:]
    return memory


def _bicubic(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    a = -0.5
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _torch_bicubic(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    a = -0.5
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a
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
"""Pillow's filters by name: the function of the distance, and its support, in output pixels."""


@lru_cache(maxsize=1024)  # sides of images repeat, and those that they are scaled to even more
def coefficients(inputs: int, outputs: int, by: Filter) -> Coefficients:
    """Return Pillow's coefficients.

    Source: `precompute_coeffs` and `normalize_coeffs_8bpc` of Pillow's Resample.c, in its order of operations.
    """
    weight, reach = FILTERS[by]
    where, weights = _weights(inputs, outputs, weight, reach)
    fixed = (np.where(weights < 0, -0.5, 0.5) + weights * (1 << _BITS)).astype(np.int32)
    parts = np.stack([fixed & ((1 << _LOW_BITS) - 1), fixed >> _LOW_BITS]).astype(np.int16)
    return Coefficients(where=where, parts=parts, bits=_BITS)


@lru_cache(maxsize=1024)
def torch_coefficients(inputs: int, outputs: int, by: Filter) -> Coefficients:
    """Return torch's coefficients.

    Source: `_compute_index_ranges_int16_weights` of torch's UpSampleKernel.cpp, in its order of operations.
    """
    weight, reach = (_torch_bicubic, 2.0) if by == "bicubic" else FILTERS[by]
    where, weights = _weights(inputs, outputs, weight, reach)
    largest = float(weights.max())
    bits = next((bits for bits in range(_BITS) if int(0.5 + largest * (1 << (bits + 1))) >= 1 << 15), _BITS)
    fixed = (np.where(weights < 0, -0.5, 0.5) + weights * (1 << bits)).astype(np.int16)
    return Coefficients(where=where, parts=fixed[None], bits=bits)


def _weights(
    inputs: int, outputs: int, weight: Callable[[np.ndarray], np.ndarray], reach: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return `Coefficients.where`, and the weights, float64 (outputs, most inputs), padded with zeros."""
    scale = inputs / outputs
    stretch = max(scale, 1.0)
    support = reach * stretch
    center = (np.arange(outputs) + 0.5) * scale
    first = np.maximum((center - support + 0.5).astype(np.int64), 0)
    count = np.minimum((center + support + 0.5).astype(np.int64), inputs) - first
    taps = np.arange(-(-int(count.max()) // _TAPS) * _TAPS)
    used = taps < count[:, None]
    weights = np.where(used, weight((taps + first[:, None] - center[:, None] + 0.5) * (1.0 / stretch)), 0.0)
    total = np.zeros(outputs)
    for tap in taps:  # summed one after the other, as in C: another order rounds differently
        total += weights[:, tap]
    weights = np.divide(weights, total[:, None], out=weights, where=total[:, None] != 0.0)
    return np.stack([first, count]).astype(np.int32), weights
