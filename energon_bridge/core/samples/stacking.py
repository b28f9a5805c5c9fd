"""Joins the fields of several samples: tensors stacked or zero-padded, in memory that is lent where they need no copy.

Decoded images are views: shape (channels, height, width) over memory in the order (height, width, channels). Stacking
such views directly would gather every row one element at a time (16 times slower for 256 px images). So rows are
stacked in the order of their memory, and the *result* is viewed in the requested order: values and shapes are those of
`torch.stack`, the copy runs at the speed of memcpy, and a batch of images is channels-last in torch's terms. Rows that
were decoded side by side, in a slab (below), are not copied at all. In a worker process the result is written straight
to memory shared with the training process.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import torch

from energon_bridge.core.errors import ConfigurationError, UnfitSampleError
from energon_bridge.core.samples import streaming

_LARGE_ROW = 4096
"""Bytes of a row from which a separate copy per row pays off."""
_MUCH_PADDING = 128 << 20
"""Bytes of padding in a batch from which a warning pays off, if one row is that much larger than the median row:"""
_FAR_ABOVE = 8
_FEW, _MUCH_TO_PIN = 1 << 15, 32 << 20
"""Bytes that torch copies on this thread, and those from which on its threads pay off for a copy."""
_NUMPY_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    dtype: torch.empty(0, dtype=dtype).numpy().dtype
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64, torch.bool)
} | {torch.bfloat16: np.dtype(np.int16)}
"""The types of numpy's views of tensors; of bfloat16, which numpy lacks, the bits."""


def batch_meta(name: str, column: list[Any]) -> Any:
    """Join one meta field of the rows of a batch; what each holds there, `sample.py` says."""
    if name == "__sources__":
        present = [sources for sources in column if sources is not None]
        return tuple(itertools.chain.from_iterable(present)) if present else None
    if name == "__valid__":  # rows do not know whether they are real or masked: the caller sets it
        return None
    return tuple(column) if name == "__restore_key__" else list(column)


def is_tensor_column(values: Sequence[Any]) -> bool:
    """Return whether a field holds a tensor in every row."""
    return bool(values) and all(isinstance(value, torch.Tensor) for value in values)


def stacks(values: Sequence[Any]) -> bool:
    """Return whether the rows of a field are tensors. Raises UnfitSampleError if some are; None is a missing row."""
    types = {*map(type, values)}
    tensors = [kind for kind in types if issubclass(kind, torch.Tensor)]
    if not tensors or len(tensors) == len(types):
        return bool(tensors)
    kinds = {isinstance(value, torch.Tensor): type(value).__name__ for value in values if value is not None}
    if len(kinds) == 2:
        other = [row for row, one in enumerate(values) if not isinstance(one, torch.Tensor) and one is not None]
        undecoded = " (a part that no decoder takes, by its extension)" if kinds[False] == "bytes" else ""
        raise UnfitSampleError(
            f"the rows of a batch have different types: some hold a tensor, some a {kinds[False]}{undecoded}, such as "
            f"row {other[0]}; make them equal in encode_sample, or collate them in batch"
        )
    return False


def batch_stack(batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack n tensors of one shape (…) into (n, …). Raises UnfitSampleError if the shapes differ.

    Examples:
        >>> batch_stack([torch.zeros(3), torch.ones(3)]).shape
        torch.Size([2, 3])
    """
    _check_not_empty(batch)
    if (adopted := _adopted(batch)) is not None:
        return adopted
    shape = batch[0].shape
    for row, tensor in enumerate(batch):
        if tensor.shape != shape:
            raise UnfitSampleError(
                f"batch_stack needs tensors of one shape, but row 0 has {tuple(shape)} and row {row} has "
                f"{tuple(tensor.shape)}; use batch_pad_stack, or make them equal in encode_sample"
            )
    return _stack(batch)


def batch_pad_stack(batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack n tensors of one rank into (n, …), each dimension as large as its largest, the rest zero.

    Examples:
        >>> batch_pad_stack([torch.tensor([1, 2, 3]), torch.tensor([4])])
        tensor([[1, 2, 3],
                [4, 0, 0]])

    Rows of different dtypes are promoted as torch promotes them. Raises UnfitSampleError if the ranks differ.
    """
    _check_not_empty(batch)
    if (adopted := _adopted(batch)) is not None:
        return adopted
    first = batch[0]
    if all(tensor.shape == first.shape for tensor in batch):
        return _stack(batch)
    for row, tensor in enumerate(batch):
        if tensor.ndim != first.ndim:
            raise UnfitSampleError(
                f"batch_pad_stack needs tensors of one rank, but row 0 has shape {tuple(first.shape)} and row {row} "
                f"has {tuple(tensor.shape)}; make them equal in encode_sample, or collate this field in batch"
            )
    largest = [max(sizes) for sizes in zip(*(tensor.shape for tensor in batch), strict=True)]
    order = _memory_order(first)
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in batch))
    _note_padded(batch, len(batch) * math.prod(largest), dtype)
    memory = zeros([len(batch), *(largest[dim] for dim in order)], dtype, first.device)
    stacked = memory.permute(_undo(order))
    for row, tensor in zip(stacked, batch, strict=True):
        copy_numbers(tensor, row[tuple(slice(size) for size in tensor.shape)])
    return stacked


def concat_pad(batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join tensors of one rank along dimension 0, each other dimension as large as its largest, the rest zero.

    Examples:
        >>> concat_pad([torch.tensor([[1, 2]]), torch.tensor([[3]])])
        tensor([[1, 2],
                [3, 0]])

    Rows of different dtypes are promoted as torch promotes them. Raises UnfitSampleError if ranks differ or are 0.
    """
    _check_not_empty(batch)
    first = batch[0]
    for row, tensor in enumerate(batch):
        if tensor.ndim != first.ndim or not tensor.ndim:
            raise UnfitSampleError(
                f"concat_pad needs tensors of one rank, at least 1, but number 0 has shape {tuple(first.shape)} and "
                f"number {row} has {tuple(tensor.shape)}; make them equal before joining batches"
            )
    slabs = SLABS.get()
    if slabs is not None and (adopted := slabs.adopt_joined(batch)) is not None:
        return adopted
    if len({tensor.shape[1:] for tensor in batch}) == 1:
        return _cat(batch)
    largest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in batch), strict=True)]
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in batch))
    _note_padded(batch, sum(map(len, batch)) * math.prod(largest), dtype)
    joined = zeros([sum(map(len, batch)), *largest], dtype, first.device)
    start = 0
    for tensor in batch:
        copy_numbers(tensor, joined[(slice(start, start + len(tensor)), *map(slice, tensor.shape[1:]))])
        start += len(tensor)
    return joined


def _note_padded(rows: Sequence[torch.Tensor], numbers: int, dtype: torch.dtype) -> None:
    """Note for the engine, while it collates, that much memory is padding, because of one row far above the others."""
    slabs = SLABS.get()
    size = numbers * dtype.itemsize
    if slabs is None or size < _MUCH_PADDING:
        return
    sizes = [row.numel() for row in rows]
    largest = max(sizes)
    usual = sorted(sizes)[(len(sizes) - 1) // 2]
    if largest >= _FAR_ABOVE * usual and size - sum(sizes) * dtype.itemsize >= _MUCH_PADDING:
        shapes = [tuple(row.shape) for row in rows]
        row = sizes.index(largest)
        slabs.padded = Padded(row=row, rows=len(rows), shape=shapes[row], usual=shapes[sizes.index(usual)], size=size)


def _adopted(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    slabs = SLABS.get()
    return None if slabs is None else slabs.adopt(tensors)


def _stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    first = tensors[0]
    order = None if first.is_contiguous() else _memory_order(first)
    rows = tensors if order is None else [tensor.permute(*order) for tensor in tensors]
    if _are_plain(rows):
        batch = _tensor(_stack_arrays(list(map(_array, rows))), first.dtype)
    else:
        batch = torch.stack(list(rows))
    return batch if order is None else batch.permute(_undo(order))


# What torch copies, fills or joins in 32,768 numbers and more, it does on threads of its own: they compete with those
# that decode, and spin while they wait for work of microseconds. So numpy does it, on this thread.


def _are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether numpy joins tensors as torch does: without gradients, in the processor's memory, of one type."""
    dtype = tensors[0].dtype
    return dtype in _NUMPY_DTYPES and all(_is_plain(tensor) and tensor.dtype == dtype for tensor in tensors)


def _is_plain(tensor: torch.Tensor) -> bool:
    usual = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    return usual and tensor.dtype in _NUMPY_DTYPES and not tensor.requires_grad


def _array(tensor: torch.Tensor) -> np.ndarray:
    """Return numpy's view of a plain tensor."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor whose view by `_array` an array is."""
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def copy_numbers(tensor: torch.Tensor, place: torch.Tensor) -> None:
    """Copy the numbers of a tensor into another one of its shape."""
    if _are_plain([tensor, place]):
        np.copyto(_array(place), _array(tensor))
    else:
        place.copy_(tensor)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in pinned memory, the same one if it is there."""
    if not _is_plain(tensor) or not _FEW < tensor.nbytes <= _MUCH_TO_PIN or tensor.is_pinned():
        return tensor.pin_memory()
    copy = torch.empty_like(tensor, pin_memory=True)
    copy_numbers(tensor, copy)
    return copy


def _stack_arrays(rows: list[np.ndarray]) -> np.ndarray:
    first = rows[0]
    large = first.nbytes >= _LARGE_ROW and len(rows) * first.nbytes >= streaming.LARGE
    # Streaming stores pay off for long rows of a large batch; numpy does the rest.
    if not large or not all(row.flags.c_contiguous for row in rows):
        return np.stack(rows)
    batch = lent((len(rows), *first.shape), first.dtype)
    for place, row in zip(batch, rows, strict=True):
        streaming.copy(row, place)
    return batch


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu" or dtype not in _NUMPY_DTYPES:
        return torch.zeros(shape, dtype=dtype, device=device)
    kind = _NUMPY_DTYPES[dtype]
    if math.prod(shape) * dtype.itemsize < streaming.LARGE:
        return _tensor(np.zeros(shape, kind), dtype)
    memory = lent(shape, kind)
    memory.fill(0)
    return _tensor(memory, dtype)


def _cat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if not _are_plain(tensors):
        return torch.cat(list(tensors))
    rows = list(map(_array, tensors))
    if sum(tensor.nbytes for tensor in tensors) < streaming.LARGE:
        return _tensor(np.concatenate(rows), tensors[0].dtype)
    memory = lent((sum(map(len, rows)), *rows[0].shape[1:]), rows[0].dtype)
    if min(row.nbytes for row in rows) < _LARGE_ROW or not all(row.flags.c_contiguous for row in rows):
        return _tensor(np.concatenate(rows, out=memory), tensors[0].dtype)
    start = 0
    for row in rows:
        streaming.copy(row, memory[start : start + len(row)])
        start += len(row)
    return _tensor(memory, tensors[0].dtype)


def _memory_order(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions of a tensor, from the largest stride to the smallest."""
    strides = tensor.stride()
    return sorted(range(tensor.ndim), key=lambda dim: -strides[dim])


def _undo(order: Sequence[int]) -> list[int]:
    """Return the permutation that undoes `order` for a batch of rows, whose dimension 0 is the row."""
    return [0, *(1 + order.index(dim) for dim in range(len(order)))]


def _check_not_empty(tensors: Sequence[torch.Tensor]) -> None:
    if not tensors:
        raise ConfigurationError("nothing to stack: a batch needs at least one row")


# ---------------------------------------------------------------------------------------------------------------------
# Slabs: memory for the decoded images of a microbatch, in one piece, so that a batch of them is there without a copy.
#
# Copying decoded pixels into a batch costs a third of what decoding a small JPEG does, and fresh memory for every batch
# costs page faults on top. So the images of a microbatch are decoded side by side into a *slab*, each into the row of
# its draw (floats and small images by way of `streaming`), and `batch_stack` finds that its rows already lie as the
# batch would. Slabs come from a pool and go back to it when nobody has a tensor over them any more. In a worker process
# they lie in the memory that it shares with the training process, so that a batch is not copied on its way there.
#
# Invariant: values are those of separate memory. A row is given out once; a slab is used again only when its last view
# is freed, which a weak reference to the `Block` that all views refer to reports; and rows become a batch without a
# copy only if they lie in a slab of that pool, in order and without a gap. What does not fit (an image of another size,
# rows that a hook replaced or skipped) is copied.
#
# Pixels for models go the same way: the engine decodes the images of a microbatch into memory of one piece, each as
# what the model takes (`DeferredImage.made`), and `concat_pad` finds the rows adjacent (`SlabPool.adopt_joined`).


SLABS: ContextVar[SlabPool | None] = ContextVar("energon_bridge_slabs", default=None)
"""The pool whose rows may become batches, while the engine collates."""
LENDER: ContextVar[Lender | None] = ContextVar("energon_bridge_lender", default=None)
"""Gives the memory for stacked batches, while the engine collates."""
UNALIGNED = 8
"""Bytes to leave free in front of pixels. Where their address is a multiple of the width of a register, libjpeg-turbo
writes them past the caches: whoever reads them next waits for them, and decoding itself takes up to a tenth longer.
(Memory begins at a multiple of 16.)"""

_KEPT, _KEPT_BYTES = 5, 256 << 20
"""Unused slabs that are kept, and their bytes; the one that was used last is kept however large it is."""
_PAUSE = 256
"""Microbatches without a slab after too many images did not fit theirs."""
_MISFITS = 8
"""Images that may always be of another size than their slab's rows."""
_MOST_SPARE = 8
"""Memory is used again for something smaller if at most this fraction of it, 1/8, is left over."""
_DTYPES: dict[torch.dtype, np.dtype[Any]] = {torch.uint8: np.dtype(np.uint8), torch.float32: np.dtype(np.float32)}
_BITS: dict[torch.dtype, np.dtype[Any]] = {
    torch.bfloat16: np.dtype(np.int16),
    torch.float16: np.dtype(np.float16),
    **_DTYPES,
}
_TRAITS: tuple[Callable[[Any], Any], ...] = (*map(attrgetter, ("shape", "dtype", "requires_grad")), torch.Tensor.stride)


class _Memory(np.ndarray[Any, Any]):
    """The array that a `Block` is a view of; a type of its own, so that views of a block refer to the block."""


class Block(np.ndarray[Any, Any]):
    """Bytes that are used again when no view of them is left: every view, of any kind, refers to the block.

    numpy sets the `base` of a view not to its original but to the original's own base, as long as that has the type of
    the view. So a view of a view of a block has the block as its base, and goes no further: the block's own base is a
    `_Memory`, a type that no view has.
    """


def block_over(memory: np.ndarray[Any, Any]) -> Block:
    """Return bytes as a block. A weak reference to the block calls back when its last view is freed."""
    return memory.view(_Memory).view(Block)


class Lender(Protocol):
    """Memory that is used again by itself, as soon as no array refers to it."""

    def lend(self, size: int) -> np.ndarray | None:
        """Return that many bytes, shape (size,), or None if there is no room."""

    def lent_at(self, address: int, size: int) -> tuple[int, np.ndarray] | None:
        """Return address and array of the lent memory that holds `size` bytes from an address on."""


def lent(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
    """Return an uninitialised array for a batch: while the engine collates, in memory that is used again.

    In a worker that is memory shared with the training process, if it has room, so that the batch is not copied there.
    """
    lender = LENDER.get()
    base = None if lender is None else lender.lend(math.prod(shape) * dtype.itemsize)
    # The view must have the lender's type (see `Block`): only then does it keep the memory from being used again.
    return np.empty(shape, dtype) if base is None else type(base)(tuple(shape), dtype, base)


@dataclass(frozen=True, kw_only=True, slots=True)
class Padded:
    """A row that others of a batch, `rows` in all, are padded to: its number, shapes, and the bytes of the batch."""

    row: int
    rows: int
    shape: tuple[int, ...]
    usual: tuple[int, ...]
    size: int


class SlabPool:
    """The slabs of one process.

    Attributes:
        lender: Where their memory comes from; None, or if it has no room: the process's own.
        padded: What made a batch large, noted while it is stacked; `forget_padded` clears it.
    """

    def __init__(self) -> None:
        self.lender: Lender | None = None
        self.padded: Padded | None = None
        self._lock = threading.Lock()
        self._used: dict[int, weakref.ref[Block]] = {}  # by address
        self._gone: deque[tuple[int, np.ndarray]] = deque()  # freed, not yet in `_free`: address and memory
        self._free: dict[int, np.ndarray] = {}  # by address, the one that was used last at the end
        self._fits = self._misfits = self._pause = 0

    def forget_padded(self) -> None:
        """Begin another batch, of which nothing is noted yet."""
        self.padded = None

    def slab(self, rows: int) -> Slab | None:
        """Return a slab for the images of a microbatch; None for a while where sizes differ inside microbatches."""
        if self._pause:
            self._pause -= 1
            return None
        return Slab(self, rows)

    def lend(self, size: int) -> np.ndarray:
        """Return uninitialised memory of that many bytes, shape (size,), used again if that is possible."""
        if self.lender is not None and (lent := self.lender.lend(size)) is not None:
            return lent
        with self._lock:
            self._take_back()
            fitting = [at for at, memory in self._free.items() if size <= memory.size <= size + size // _MOST_SPARE]
            memory = self._free.pop(fitting[-1]) if fitting else np.empty(size, dtype=np.uint8)
            block = block_over(memory)
            address = memory.ctypes.data
            # The last reference to a block may be dropped anywhere, even by a thread that has this lock: so the
            # callback takes no lock, and only notes the memory (appending to a deque is atomic).
            self._used[address] = weakref.ref(block, lambda _: self._gone.append((address, memory)))
            return block[:size]

    def _take_back(self) -> None:
        while self._gone:
            address, memory = self._gone.popleft()
            del self._used[address]
            self._free[address] = memory
            kept = sum(one.size for one in self._free.values())
            while len(self._free) > 1 and (len(self._free) > _KEPT or kept > _KEPT_BYTES):
                kept -= self._free.pop(next(iter(self._free))).size  # the one that has not been used for longest

    def fitted(self, fits: int, misfits: int) -> None:
        """Note how many images fitted their slabs; if too many do not, no slab is handed out for a while."""
        self._fits += fits
        self._misfits += misfits
        if self._misfits > max(_MISFITS, self._fits // 8):
            self._fits = self._misfits = 0
            self._pause = _PAUSE

    def adopt(self, rows: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return n rows of shape (…) as one tensor (n, …) over their own memory, or None if they must be copied.

        It calls into torch seldom: between decoded images each call costs far more than its own work.
        """
        first = rows[0]
        if first.dtype not in _DTYPES or not first.is_cpu or first.layout is not torch.strided:
            return None
        size = first.nbytes
        start = first.data_ptr()
        end = start + len(rows) * size
        if not size or list(map(torch.Tensor.data_ptr, rows)) != list(range(start, end, size)):
            return None  # not side by side, in order
        lent = self.lent_at(start, end - start)
        if lent is None or first.requires_grad or any(len(set(map(trait, rows))) > 1 for trait in _TRAITS):
            return None
        address, base = lent
        shape = first.shape
        item = first.itemsize
        strides = [item * step for step in first.stride()]
        # The last element of a row must end where the row's bytes end: then its elements fill them, in any order.
        if sum((length - 1) * step for length, step in zip(shape, strides, strict=True)) + item != size:
            return None  # a piece of an image: a batch would have gaps
        # A view of the lender's type, which is what keeps its memory.
        view = type(base)((len(rows), *shape), _DTYPES[first.dtype], base, start - address, (size, *strides))
        return torch.from_numpy(view)

    def adopt_joined(self, rows: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return tensors (n, …), adjacent in memory of this pool, as one; None: they must be copied."""
        first = rows[0]
        bits = _BITS.get(first.dtype)
        start = first.data_ptr()
        if bits is None or not first.is_cpu or first.requires_grad or not first.nbytes:
            return None
        end = start
        for row in rows:
            same = row.dtype == first.dtype and row.shape[1:] == first.shape[1:] and not row.requires_grad
            if not same or row.data_ptr() != end or not row.is_contiguous():
                return None
            end += row.nbytes
        lent = self.lent_at(start, end - start)
        if lent is None:
            return None
        address, base = lent
        # A view of the lender's type, which is what keeps its memory.
        view = type(base)((sum(row.shape[0] for row in rows), *first.shape[1:]), bits, base, start - address)
        return torch.from_numpy(view).view(first.dtype)

    def lent_at(self, start: int, size: int) -> tuple[int, np.ndarray] | None:
        """Return address and array of the memory that holds `size` bytes from `start` on, if it is of the pool."""
        if self.lender is not None and (lent := self.lender.lent_at(start, size)) is not None:
            return lent
        with self._lock:
            all_used = list(self._used.items())
        for address, used in all_used:
            block = used()
            if block is not None and 0 <= start - address <= block.size - size:
                return address, block
        return None


class Slab:
    """Memory for the images of the draws of one microbatch; the first image says how large the rows are."""

    __slots__ = ("_arrays", "_lock", "_number", "_pool", "_tensors")

    def __init__(self, pool: SlabPool, rows: int) -> None:
        self._pool = pool
        self._number = rows
        self._lock = threading.Lock()
        self._arrays: list[np.ndarray] = []
        self._tensors: list[torch.Tensor] = []

    def rows(
        self, shape: tuple[int, int, int], dtype: type[np.uint8 | np.float32]
    ) -> tuple[list[np.ndarray], list[torch.Tensor]] | None:
        """Return arrays (height, width, channels) and tensors (channels, height, width) over the memory of all rows.

        None if the rows have another shape. The caller must use each row for one image only.
        """
        with self._lock:
            if not self._arrays:
                free = UNALIGNED if dtype is np.uint8 else 0
                memory = self._pool.lend(free + self._number * math.prod(shape) * np.dtype(dtype).itemsize)
                images = memory[free:].view(dtype).reshape(self._number, *shape)
                self._tensors = list(map(torch.from_numpy, images.transpose(0, 3, 1, 2)))
                self._arrays = list(images)
        first = self._arrays[0]
        return (self._arrays, self._tensors) if first.shape == shape and first.dtype == dtype else None

    def fitted(self, fits: int, misfits: int) -> None:
        """Note how many images fitted; where too many do not, the pool gives out no slab for a while."""
        self._pool.fitted(fits, misfits)


class Stacking:
    """``with Stacking(slabs, lends=True):`` rows that lie side by side in a slab become a batch without a copy.

    With `lends`, other rows are stacked in memory of the pool's lender, or of the pool if it has none.
    """

    __slots__ = ("_lends", "_lent", "_slabs", "_token")

    def __init__(self, slabs: SlabPool, *, lends: bool) -> None:
        self._slabs = slabs
        self._lends = lends

    def __enter__(self) -> None:
        slabs = self._slabs
        self._token = SLABS.set(slabs)
        if self._lends:
            self._lent = LENDER.set(slabs if slabs.lender is None else slabs.lender)

    def __exit__(self, *error: object) -> None:
        SLABS.reset(self._token)
        if self._lends:
            LENDER.reset(self._lent)
