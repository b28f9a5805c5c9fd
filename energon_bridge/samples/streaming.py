"""Writing to memory past the caches, where the compiled part of the package is there.

An ordinary store first reads the line of memory that it overwrites, and drives what the processor needs next out of
its caches. For the batches under way to a trainer, which are larger than the caches and not read soon, streaming stores
take a third of that time. Neither numpy nor torch has them, so `_streaming.c` does. Where it is not there (no C
compiler when the package was installed, or another processor than x86-64 with AVX2), numpy writes the same values.

    divide(pixels, out)   writes uint8 pixels, divided by 255 exactly, to float32 memory
    copy(source, out)     copies numbers of any one type

Both take C-contiguous arrays with as many entries (`copy` also memoryviews, and bytes to read), release the interpreter
lock, and raise ValueError for what does not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["LARGE", "STREAMS", "copy", "divide"]

LARGE = 1 << 20
"""Bytes from which on something new is better written past the caches than into them."""

_FULL = np.float32(255)
_BUFFER = 1 << 16
"""Numbers that numpy converts at a time: its default, an eighth of this, takes a tenth longer for an image."""


def _divide(pixels: np.ndarray, out: np.ndarray) -> None:
    before = np.setbufsize(_BUFFER)
    try:
        np.divide(pixels, _FULL, out=out)
    finally:
        np.setbufsize(before)


def _copy(source: Any, out: Any) -> None:
    np.copyto(np.asarray(out), np.asarray(memoryview(source)))  # bytes would become a string


divide: Callable[[np.ndarray, np.ndarray], None] = _divide
copy: Callable[[Any, Any], None] = _copy
STREAMS = False
"""Whether writing goes past the caches."""

try:
    from energon_bridge.samples import _streaming
except ImportError:
    pass
else:
    divide, copy, STREAMS = _streaming.divide, _streaming.copy, True
