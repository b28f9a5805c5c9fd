"""Writes to memory past the processor's caches, if the compiled part of the package is available.

An ordinary store first reads the cache line that it overwrites, and evicts what the processor needs next. For batches
on their way to a trainer, which are larger than the caches and not read soon, streaming stores take a third of the
time. Neither numpy nor torch has them, so `_pixels.c` does. Without it (no C compiler at installation, or a
processor other than x86-64 with AVX2), numpy writes the same values.

    divide(pixels, out)   writes uint8 pixels, divided by 255 exactly, to float32 memory
    copy(source, out)     copies numbers of any one type

Both take C-contiguous arrays of equal size (`copy` also memoryviews, and bytes as source), release the interpreter
lock, and raise ValueError for arguments that do not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["LARGE", "STREAMS", "copy", "divide"]

LARGE = 1 << 20
"""Bytes from which on data is better written past the caches."""

_FULL = np.float32(255)
_BUFFER = 1 << 16
"""Numbers that numpy converts at a time; its default, an eighth of this, is a tenth slower for an image."""


def divide_with_numpy(pixels: np.ndarray, out: np.ndarray) -> None:
    """Divide as `divide` does, without the compiled part."""
    before = np.setbufsize(_BUFFER)
    try:
        np.divide(pixels, _FULL, out=out)
    finally:
        np.setbufsize(before)


def copy_with_numpy(source: Any, out: Any) -> None:
    """Copy as `copy` does, without the compiled part."""
    np.copyto(np.asarray(out), np.asarray(memoryview(source)))  # np.asarray of bytes would be an array of one string


divide: Callable[[np.ndarray, np.ndarray], None] = divide_with_numpy
copy: Callable[[Any, Any], None] = copy_with_numpy
STREAMS = False
"""Whether the compiled part is available."""

try:
    from energon_bridge.core.samples._pixels import copy as _copy, divide as _divide
except ImportError:
    pass
else:
    divide = _divide
    copy = _copy
    STREAMS = True
