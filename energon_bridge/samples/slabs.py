"""Memory for the decoded images of a microbatch, in one piece: a batch of them is then there without a copy.

Copying decoded pixels into a batch costs a third of what decoding a small JPEG does, and fresh memory for every batch
costs page faults on top. So the images of a microbatch are decoded side by side into a *slab*, each into the row of its
draw, and `batch_stack` finds that its rows already lie as the batch would. Slabs come from a pool and go back to it
when nobody has a tensor over them any more. In a worker process they lie in the memory that it shares with the training
process, so that a batch is not copied on its way there either.

Invariant: values are those of separate memory. A row is given out once; a slab is used again only when the pool holds
the last reference to it, and rows are taken for a batch only where they lie in a slab of that pool, in order and
without a gap. What does not fit (an image of another size, rows that a hook replaced or left out) is copied as ever.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Protocol

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
# What the pool's list, the loop over it and the call itself hold.
_UNUSED = 3


class Lender(Protocol):
    """Memory that knows by itself when it is not used any more."""

    def lend(self, size: int) -> np.ndarray | None:
        """Return that many bytes, shape (size,), or None if there is no room."""
        ...

    def lent_at(self, address: int, size: int) -> tuple[int, np.ndarray] | None:
        """Return address and array of the lent memory that holds so many bytes from an address on."""
        ...


class SlabPool:
    """The slabs of one process.

    Attributes:
        lender: Where their memory comes from; None, or where it has no room: the process's own.
    """

    def __init__(self) -> None:
        self.lender: Lender | None = None
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
        if self.lender is not None and (lent := self.lender.lend(size)) is not None:
            return lent
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
        size, start = first.nbytes, first.data_ptr()
        found = self._memory_at(start, len(rows) * size) if size and first.device.type == "cpu" else None
        if found is None:
            return None
        shape, stride, dtype = first.shape, first.stride(), first.dtype
        order = memory_order(first)
        dense = first.permute(order)
        if not dense.is_contiguous():
            return None
        at = start
        for row in rows:
            if row.data_ptr() != at or row.shape != shape or row.stride() != stride or row.dtype != dtype:
                return None
            if row.requires_grad:
                return None
            at += size
        address, base = found
        memory = torch.from_numpy(base[start - address : at - address]).view(dtype)
        return memory.view(len(rows), *dense.shape).permute(undo(order))

    def _memory_at(self, start: int, size: int) -> tuple[int, np.ndarray] | None:
        if self.lender is not None and (lent := self.lender.lent_at(start, size)) is not None:
            return lent
        with self._lock:
            return next(((at, base) for at, base in self._bases if 0 <= start - at <= base.size - size), None)


class Slab:
    """Memory for the images of the draws of one microbatch; the first image says how large the rows are."""

    __slots__ = ("_lock", "_memory", "_pool", "_rows")

    def __init__(self, pool: SlabPool, rows: int) -> None:
        self._pool = pool
        self._rows = rows
        self._lock = threading.Lock()
        self._memory: np.ndarray | None = None

    def row(self, number: int, shape: tuple[int, ...], dtype: type[np.uint8 | np.float32]) -> np.ndarray | None:
        """Return the memory of a row; None if it has another shape."""
        with self._lock:
            if self._memory is None:
                size = self._rows * math.prod(shape) * np.dtype(dtype).itemsize
                self._memory = self._pool.memory(size).view(dtype).reshape(self._rows, *shape)
        row: np.ndarray = self._memory[number]
        fits = row.shape == shape and row.dtype == dtype
        self._pool.fitted(fits)
        return row if fits else None


def row_for(shape: tuple[int, ...], dtype: type[np.uint8 | np.float32]) -> np.ndarray | None:
    """Return the memory that an image of this shape may be decoded into, or None where there is none for it."""
    slot = SLOT.get()
    if slot is None:
        return None
    SLOT.set(None)
    slab, number = slot
    return slab.row(number, shape, dtype)


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions of a tensor from the one with the widest step in memory to the one with the narrowest."""
    strides = tensor.stride()
    return sorted(range(tensor.ndim), key=lambda dim: -strides[dim])


def undo(order: Sequence[int]) -> list[int]:
    """Return the permutation that puts a batch of rows laid out by `order` back, the row number first."""
    return [0, *(1 + order.index(dim) for dim in range(len(order)))]
