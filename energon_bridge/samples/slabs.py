"""Memory for the decoded images of a microbatch, in one piece: a batch of them is then there without a copy.

Copying decoded pixels into a batch costs a third of what decoding a small JPEG does, and fresh memory for every batch
costs page faults on top. So the images of a microbatch are decoded side by side into a *slab*, each into the row of its
draw, and `batch_stack` finds that its rows already lie as the batch would. Slabs come from a pool and go back to it
when nobody has a tensor over them any more.

Invariant: values are those of separate memory. A row is given out once; a slab is used again only when the pool holds
the last reference to it, and rows are taken for a batch only where they lie in a slab of that pool, in order and
without a gap. What does not fit (an image of another size, rows that a hook replaced or left out) is copied as ever.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextvars import ContextVar

import numpy as np
import torch

SLOT: ContextVar[tuple[Slab, int] | None] = ContextVar("energon_bridge_slot", default=None)
"""Where the next image of a sample goes, while a thread of the engine decodes it."""
SLABS: ContextVar[SlabPool | None] = ContextVar("energon_bridge_slabs", default=None)
"""The pool whose rows may become batches, while the engine collates."""

_KEPT = 4
"""Unused slabs that are kept."""
_PAUSE = 256
_MISFITS = 8
_TORCH: dict[type, torch.dtype] = {np.uint8: torch.uint8, np.float32: torch.float32}
# What the pool's list, the loop over it and the call itself hold.
_UNUSED = 3


class SlabPool:
    """The slabs of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bases: list[tuple[int, np.ndarray]] = []  # with their addresses
        self._fits = self._misfits = self._pause = 0

    def slab(self, rows: int) -> Slab | None:
        """Return a slab for the images of a microbatch; None for a while where sizes differ inside microbatches."""
        if self._pause:
            self._pause -= 1
            return None
        return Slab(self, rows)

    def memory(self, size: int) -> np.ndarray:
        """Return uninitialised memory of that many bytes, shape (size,), used again where that is possible."""
        with self._lock:
            found: np.ndarray | None = None
            kept, unused = [], 0
            for address, base in self._bases:
                if sys.getrefcount(base) <= _UNUSED:
                    if found is None and base.size == size:
                        found = base
                    elif unused == _KEPT:
                        continue
                    else:
                        unused += 1
                kept.append((address, base))
            if found is None:
                found = np.empty(size, dtype=np.uint8)
                kept.append((found.ctypes.data, found))
            self._bases = kept
            return found

    def fitted(self, fits: bool) -> None:
        """Note whether an image fitted its slab; where too many do not, no slab is given out for a while."""
        if fits:
            self._fits += 1
            return
        self._misfits += 1
        if self._misfits > max(_MISFITS, self._fits // 8):
            self._fits = self._misfits = 0
            self._pause = _PAUSE

    def adopt(self, rows: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return n rows of shape (…) as one tensor (n, …) over their own memory, or None where it must be copied."""
        first = rows[0]
        step = first.nbytes
        start = first.data_ptr()
        if not step or first.requires_grad or not self._holds(start, len(rows) * step):
            return None
        for number, row in enumerate(rows):
            if row.data_ptr() != start + number * step or row.dtype != first.dtype or not row.is_contiguous():
                return None
        return first.as_strided((len(rows), *first.shape), (first.numel(), *first.stride()))

    def _holds(self, start: int, size: int) -> bool:
        with self._lock:
            return any(0 <= start - address <= base.size - size for address, base in self._bases)


class Slab:
    """Memory for the images of the draws of one microbatch; the first image says how large the rows are."""

    __slots__ = ("_lock", "_memory", "_pool", "_rows")

    def __init__(self, pool: SlabPool, rows: int) -> None:
        self._pool = pool
        self._rows = rows
        self._lock = threading.Lock()
        self._memory: torch.Tensor | None = None

    def row(self, number: int, shape: tuple[int, ...], dtype: type[np.uint8 | np.float32]) -> torch.Tensor | None:
        """Return the memory of a row; None if it has another shape."""
        with self._lock:
            if self._memory is None:
                size = self._rows * int(np.prod(shape)) * np.dtype(dtype).itemsize
                memory = self._pool.memory(size).view(dtype).reshape(self._rows, *shape)
                self._memory = torch.from_numpy(memory)
        row = self._memory[number]
        fits = row.shape == shape and row.dtype == _TORCH[dtype]
        self._pool.fitted(fits)
        return row if fits else None


def row_for(shape: tuple[int, ...], dtype: type[np.uint8 | np.float32]) -> torch.Tensor | None:
    """Return the memory that an image of this shape may be decoded into, or None where there is none for it."""
    slot = SLOT.get()
    if slot is None:
        return None
    SLOT.set(None)
    slab, number = slot
    return slab.row(number, shape, dtype)
