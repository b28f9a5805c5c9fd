"""Moving a batch from a worker process to the training process through memory that both share.

Every worker has an *arena*: anonymous shared memory mapped before the fork. It has no name and no file, so nothing can
be left behind and the size of /dev/shm does not matter; its pages are used again, so a batch costs one copy and no page
faults. A batch is pickled with its tensors and arrays (but the smallest) out of band: all of it goes into one block of
the arena, and the message is a few bytes, sent in one piece, so that a killed worker cannot leave half a message. The
training process rebuilds tensors as views of the block and gives it back when the last is gone. A pickle of up to
32 KiB with nothing out of band, as of a batch of texts, is the message itself.

Layout of a block: `<Q` number of buffers (the pickle stream is buffer 0), `<Q` length of each, then the buffers, each
at a multiple of 64 bytes; of a buffer that lies in a block of its own the length here is 0.
"""

from __future__ import annotations

import copyreg
import io
import mmap
import os
import pickle
import struct
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from energon_bridge.core.loader.processes import SharedMemory
from energon_bridge.core.samples import streaming
from energon_bridge.core.samples.stacking import Block, block_over

_ALIGN = 64
_SMALL = 1024
"""Bytes of a tensor up to which it stays in the pickle: handing a buffer over costs more than copying those."""
_INLINE = 1 << 15
"""Bytes of a pickle without buffers up to which it is sent in the message: a block costs more than copying those."""
_SLOTS = 256
HEADER = _SLOTS
"""Bytes in front of an arena: one flag per slot, not 0 while its block is in use."""

_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WRITTEN = 1
_OPENED = 2
_LENT = 3

DEFAULT_ARENA_BYTES = 1 << 30
"""Address space per worker; memory is used only for what is under way."""


class _Lent(NamedTuple):
    """A block lent inside the worker: its offsets in the arena, and a weak reference to the block."""

    offset: int
    end: int
    block: weakref.ref[Block]


class Arena:
    """Shared memory of one worker. The worker writes, lends and claims slots; the training process reads and frees.

    A block is free when the last view of it is gone. That is a promise of the language: views refer to the `Block`
    that they are views of, and a weak reference to it calls back when it goes. Nothing here counts references.

    Blocks are also lent inside the worker, as memory to decode images into (`SlabPool`) and to stack batches
    in. A batch that lies in such a block crosses without being copied: whoever gets it may write into it. What the
    worker itself still refers to by then, such as a batch that its encoder keeps, is copied. The worker uses the
    block again when neither process has anything of it.

    Where the arena is full (batches kept by the trainer, or a batch larger than the arena), the block is a memory
    file (memfd) of the worker instead, which has no name either. Blocks of an arena are found first fit, so its
    resident size is what is under way at a time.
    """

    def __init__(
        self, size: int = DEFAULT_ARENA_BYTES, *, sendable: bool = False, memory: SharedMemory | None = None
    ) -> None:
        self.size = size
        self._map = SharedMemory(HEADER + size, sendable=sendable) if memory is None else memory
        self._address = _address(np.frombuffer(self._map, np.uint8, 1, HEADER))
        # Of the worker, whose threads may all decode:
        self._lock = threading.Lock()
        self._used: dict[int, tuple[int, int]] = {}  # slot -> (offset, end)
        self._lent: dict[int, _Lent] = {}
        # Of the training process:
        self._open: dict[int, weakref.ref[Block]] = {}
        self._process = os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Arena, self.size, memory=self._map), ()

    def fileno(self) -> int:
        """Return the descriptor by which another process maps it."""
        return self._map.fileno()

    def write(self, chunks: Sequence[memoryview | bytes], total: int) -> tuple[int, int, int] | None:
        """Copy chunks into a free block and return its (slot, offset, length), or None if there is no room."""
        reserved = self.reserve(total)
        if reserved is None:
            return None
        place, view = reserved
        _copy(chunks, view)
        return place

    def reserve(self, total: int) -> tuple[tuple[int, int, int], memoryview] | None:
        """Return a free block as (slot, offset, length), with its memory, or None if there is no room."""
        with self._lock:
            found = self._claim(total, _WRITTEN)
        if found is None:
            return None
        slot, offset = found
        return (slot, offset, total), memoryview(self._map)[HEADER + offset : HEADER + offset + total]

    def lend(self, size: int) -> Block | None:
        """Return a block for the worker to write into, given back when nothing refers to it; None: there is no room."""
        with self._lock:
            place = self._claim(size, _LENT)
            if place is None:
                return None
            slot, offset = place
            block = block_over(np.frombuffer(self._map, np.uint8, size, HEADER + offset))
            self._lent[slot] = _Lent(offset, offset + size, weakref.ref(block))
        return block

    def lent_at(self, address: int, size: int) -> tuple[int, Block] | None:
        """Return address and block of the lent memory that holds so many bytes from an address on, if there is one."""
        offset = address - self._address
        for lent in list(self._lent.values()):
            if lent.offset <= offset and offset + size <= lent.end and (block := lent.block()) is not None:
                return self._address + lent.offset, block
        return None

    def hand_over(self, buffer: memoryview) -> tuple[int, int, int] | None:
        """Return (slot, offset, length) of a buffer in a lent block, which is sent with it.

        None if it is in no such block, or if the block has been sent before.
        """
        if not self._lent:
            return None
        offset = _address(np.frombuffer(buffer, np.uint8)) - self._address
        for slot, lent in list(self._lent.items()):
            if lent.offset <= offset < lent.end:
                if self._map[slot] != _LENT:
                    return None
                self._map[slot] = _WRITTEN
                return slot, offset, buffer.nbytes
        return None

    def is_kept(self, slot: int) -> bool:
        """Return whether the worker still refers to a block that it lent."""
        lent = self._lent.get(slot)
        return lent is not None and lent.block() is not None

    def take_back(self, slot: int, offset: int, length: int) -> memoryview:
        """Return the bytes of a block that is not sent after all; it is freed when the worker drops its last view."""
        self._map[slot] = _LENT
        return memoryview(self._map)[HEADER + offset : HEADER + offset + length]

    def _claim(self, size: int, state: int) -> tuple[int, int] | None:
        """Return slot and offset of a free block of that size, first fit, which is now in use."""
        for slot, lent in list(self._lent.items()):
            if lent.block() is None:
                del self._lent[slot]
                if self._map[slot] == _LENT:
                    self._map[slot] = 0
        self._used = {slot: place for slot, place in self._used.items() if self._map[slot] or slot in self._lent}
        free = next((slot for slot in range(_SLOTS) if slot not in self._used), None)
        offset = 0
        for low, high in sorted(self._used.values()):
            if low - offset >= size:
                break
            offset = high
        if free is None or offset + size > self.size:
            return None
        self._map[free] = state
        self._used[free] = (offset, _aligned(offset + size))
        return free, offset

    def forget(self) -> None:
        """Free the blocks of messages that the training process dropped unread, in an earlier pass."""
        for slot in self._used:
            if self._map[slot] == _WRITTEN:
                self._map[slot] = 0

    def open(self, slot: int, offset: int, length: int) -> Block:
        """Return the bytes of a block, which is given back when nothing refers to them any more."""
        block = block_over(np.frombuffer(self._map, np.uint8, length, HEADER + offset))
        self._map[slot] = _OPENED
        self._open[slot] = weakref.ref(block, lambda _: self._free(slot))
        return block

    def _free(self, slot: int) -> None:
        del self._open[slot]
        if os.getpid() == self._process:  # and not a fork of it, which has the same memory
            self._map[slot] = 0  # from now on the worker may use it again


class Outbox:
    """What one worker sends its batches with: its arena, and memory files where that is full.

    Args:
        arena: None if there was no address space for one.
        kept: Memory files kept open until the training process has surely opened them: more than messages can be under
            way to it.
    """

    def __init__(self, arena: Arena | None, kept: int) -> None:
        self._arena = arena
        self._kept = kept
        self._files: deque[list[int]] = deque()  # of each of the last messages

    def pack(self, item: Any) -> BatchMessage:
        """Pickle an item into a block of the arena or a memory file, a small one into its message; return that."""
        buffers: list[memoryview] = []

        def stays(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes > _SMALL:
                buffers.append(raw)
                return False
            return True

        stream = io.BytesIO()
        pickler = pickle.Pickler(stream, protocol=5, buffer_callback=stays)
        # Tensors by `_reduced`, subclasses of theirs as they wish.
        pickler.dispatch_table = copyreg.dispatch_table | {torch.Tensor: _reduced}
        pickler.dump(item)
        if not buffers and stream.tell() <= _INLINE:
            return BatchMessage(stream.getvalue())
        self._files.append([])
        parts = [stream.getbuffer(), *buffers]
        elsewhere: list[tuple[int, Place]] = []
        if self._arena is not None:
            for number, buffer in enumerate(buffers, 1):
                if (found := self._arena.hand_over(buffer)) is not None:
                    elsewhere.append((number, found))
                    parts[number] = buffer[:0]
        header = struct.pack(f"<{1 + len(parts)}Q", len(parts), *(part.nbytes for part in parts))
        chunks: list[memoryview | bytes] = [header, *parts]
        total = sum(_aligned(len(chunk)) for chunk in chunks)
        place = None if self._arena is None else self._arena.write(chunks, total)
        message = BatchMessage(place or self._file(chunks, total), tuple(elsewhere))
        if len(self._files) > self._kept:
            self._close_oldest()
        return message

    def unshared(self, message: BatchMessage) -> BatchMessage:
        """Return a message with copies of blocks that the worker still refers to: the trainer may write into its own.

        To be called when the worker has let go of the item as far as it knows, and before the message is sent.
        """
        if self._arena is None or not any(self._arena.is_kept(slot) for _, (slot, *_) in message.elsewhere):
            return message
        return BatchMessage(message.place, tuple(map(self._alone, message.elsewhere)))

    def _alone(self, buffer: tuple[int, Place]) -> tuple[int, Place]:
        number, place = buffer
        assert self._arena is not None
        assert not isinstance(place, MemoryFile)  # of a message that was just packed
        if not self._arena.is_kept(place[0]):
            return buffer
        data = self._arena.take_back(*place)
        return number, self._placed(data)

    def _placed(self, data: memoryview) -> Place:
        return (self._arena and self._arena.write([data], len(data))) or self._file([data], len(data))

    def close(self) -> None:
        """Close the memory files; those not opened by then cannot be any more."""
        while self._files:
            self._close_oldest()

    def _close_oldest(self) -> None:
        for file in self._files.popleft():
            os.close(file)

    def _file(self, chunks: Sequence[memoryview | bytes], total: int) -> MemoryFile:
        file = self._new_file(total)
        with mmap.mmap(file, total) as mapped, memoryview(mapped) as view:
            _copy(chunks, view)
        return MemoryFile(os.getpid(), file, total)

    def _new_file(self, total: int) -> int:
        file = os.memfd_create("energon-batch")
        self._files[-1].append(file)
        os.ftruncate(file, total)
        return file


class MemoryFile(NamedTuple):
    """A file of a worker that has no name; others reach it through its number, while the worker lives."""

    process: int
    number: int
    length: int

    def open(self) -> np.ndarray[Any, Any]:
        """Return the bytes of the file. Raises OSError if the worker is gone."""
        file = os.open(f"/proc/{self.process}/fd/{self.number}", os.O_RDWR)
        try:
            return np.frombuffer(mmap.mmap(file, self.length), np.uint8)
        finally:
            os.close(file)


Place = tuple[int, int, int] | MemoryFile
"""Where bytes are: (slot, offset, length) in the arena, or a file."""


class BatchMessage(NamedTuple):
    """The place of a packed item, or its pickle; `elsewhere` has number and place of each buffer in another block."""

    place: Place | bytes
    elsewhere: tuple[tuple[int, Place], ...] = ()


def unpack(message: BatchMessage, arena: Arena | None) -> Any:
    """Return the item in a message of an outbox; its tensors are views of shared memory."""
    if isinstance(message.place, bytes):
        return pickle.loads(message.place)
    view = opened(message.place, arena)
    (count,) = struct.unpack_from("<Q", view, 0)
    lengths = struct.unpack_from(f"<{count}Q", view, 8)
    offset = _aligned(8 * (1 + count))
    parts = []
    for length in lengths:
        parts.append(view[offset : offset + length])
        offset += _aligned(length)
    for number, place in message.elsewhere:
        parts[number] = opened(place, arena)
    return pickle.loads(parts[0], buffers=[pickle.PickleBuffer(part) for part in parts[1:]])


def opened(place: Place, arena: Arena | None) -> memoryview:
    """Return the bytes at a place, which is free when nothing refers to them any more."""
    if isinstance(place, MemoryFile):
        block = place.open()
    else:
        assert arena is not None
        block = arena.open(*place)
    return memoryview(block)  # type: ignore[arg-type]  # numpy 2.1 does not say that an array is a buffer


def _address(array: np.ndarray[Any, Any]) -> int:
    address: int = array.__array_interface__["data"][0]  # a quarter of what `array.ctypes` costs
    return address


def _aligned(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN


def _copy(chunks: Sequence[memoryview | bytes], target: memoryview) -> None:
    offset = 0
    large = len(target) >= streaming.LARGE
    for chunk in chunks:
        part = target[offset : offset + len(chunk)]
        if large and len(chunk) > _SMALL:
            streaming.copy(chunk, part)
        else:
            part[:] = chunk
        offset += _aligned(len(chunk))


def _reduced(tensor: torch.Tensor) -> Any:
    """Pickle a dense CPU tensor out of band, with its memory layout (a CHW view over HWC memory stays one)."""
    try:
        array = tensor.numpy()
        dtype = None
    except (TypeError, RuntimeError):  # numpy has no such dtype, or this is more than numbers in memory
        if not _is_plain(tensor):
            reduced = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return (_rebuild_sparse, reduced[1]) if tensor.layout in _SPARSE else reduced
        dtype = tensor.dtype
        array = tensor.view(_BITS[tensor.itemsize]).numpy()
    dense = array
    inverse = None
    if not array.flags.c_contiguous:
        # Of numpy's, because a call into torch costs several times as much.
        order = sorted(range(array.ndim), key=array.strides.__getitem__, reverse=True)
        dense = array.transpose(order)
        if dense.flags.c_contiguous:
            inverse = tuple(map(order.index, range(array.ndim)))
        else:
            dense = np.ascontiguousarray(array)
    buffer = pickle.PickleBuffer(dense)  # type: ignore[arg-type]  # numpy 2.1 does not say that an array is a buffer
    return _rebuild, (buffer, dense.dtype.str, dense.shape, inverse, dtype)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor consists of numbers in the memory of this process alone."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    return not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _rebuild_sparse(layout: torch.layout, parts: tuple[Any, ...]) -> torch.Tensor:
    """Make a sparse tensor: torch's own function keeps each of them, and so its block, until the next `torch.load`."""
    if layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(*parts[:3], is_coalesced=parts[3], check_invariants=False)
    return torch.sparse_compressed_tensor(*parts, layout=layout, check_invariants=False)


def _rebuild(
    buffer: Any, kind: str, shape: tuple[int, ...], inverse: tuple[int, ...] | None, dtype: torch.dtype | None
) -> torch.Tensor:
    array = np.ndarray(shape, kind, buffer)
    tensor = torch.from_numpy(array if inverse is None else array.transpose(inverse))
    return tensor if dtype is None else tensor.view(dtype)
