"""Moving a batch from a worker process to the training process through memory that both share.

Every worker has an *arena*: anonymous shared memory mapped before the fork. It has no name and no file, so nothing can
be left behind and the size of /dev/shm does not matter; its pages are used again, so a batch costs one copy and no page
faults. A batch is pickled with its tensors and arrays out of band: all of it goes into one block of the arena, and the
message in DataLoader's queue is a few bytes, which a pipe writes in one piece, so that a killed worker cannot leave
half a message. The training process rebuilds tensors as views of the block and gives it back when the last is gone.

Where the arena is full (batches kept by the trainer, or a batch larger than the arena), the block is a memory file
(memfd) of the worker instead, which has no name either. Blocks of an arena are found first fit, so its resident size is
what is under way at a time.

Layout of a block: `<Q` number of buffers (the pickle stream is buffer 0), `<Q` length of each, then the buffers, each
at a multiple of 64 bytes.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

_ALIGN = 64
_SLOTS = 256
_HEADER = _SLOTS
"""Bytes in front of an arena: one flag per slot, not 0 while its block is in use."""

_WRITTEN, _OPENED = 1, 2

DEFAULT_ARENA_BYTES = 1 << 30
"""Address space per worker; memory is used only for what is under way."""


class Block(np.ndarray[Any, Any]):
    """The bytes of a received message: every view of it keeps it alive, and a finaliser runs when the last is gone.

    A type of its own because numpy makes a view of a plain array refer to the array's owner instead.
    """


class Arena:
    """Shared memory of one worker. The worker writes and claims slots; the training process reads and frees them."""

    def __init__(self, size: int = DEFAULT_ARENA_BYTES) -> None:
        self.size = size
        self._map = mmap.mmap(-1, _HEADER + size)
        self._used: dict[int, tuple[int, int]] = {}  # of the worker: slot -> (offset, end)

    def write(self, chunks: Sequence[memoryview | bytes], total: int) -> tuple[int, int, int] | None:
        """Copy chunks into a free block and return its (slot, offset, length), or None where there is no room."""
        self._used = {slot: place for slot, place in self._used.items() if self._map[slot]}
        slot = next((slot for slot in range(_SLOTS) if slot not in self._used), None)
        offset = 0
        for low, high in sorted(self._used.values()):
            if low - offset >= total:
                break
            offset = high
        if slot is None or offset + total > self.size:
            return None
        self._map[slot] = _WRITTEN
        self._used[slot] = (offset, _aligned(offset + total))
        view = memoryview(self._map)
        _copy(chunks, view[_HEADER + offset : _HEADER + offset + total])
        return slot, offset, total

    def forget(self) -> None:
        """Free the blocks that were never opened: the training process dropped their messages, in an earlier pass."""
        for slot in self._used:
            if self._map[slot] == _WRITTEN:
                self._map[slot] = 0

    def open(self, slot: int, offset: int, length: int) -> Block:
        """Return the bytes of a block, which is given back when nothing refers to them any more."""
        block = np.frombuffer(self._map, np.uint8, length, _HEADER + offset).view(Block)
        self._map[slot] = _OPENED
        weakref.finalize(block, self._free, slot).atexit = False
        return block

    def _free(self, slot: int) -> None:
        self._map[slot] = 0


class Outbox:
    """What one worker sends its batches with: its arena, and memory files where that is full.

    Args:
        arena: None where there was no address space for one.
        kept: Memory files kept open until the training process has surely opened them: more than messages can be under
            way to it.
    """

    def __init__(self, arena: Arena | None, kept: int) -> None:
        self._arena = arena
        self._kept = kept
        self._files: deque[int] = deque()

    def pack(self, item: Any) -> Message:
        """Pickle an item into a block of the arena or into a memory file; return the message that finds it."""
        buffers: list[memoryview] = []
        stream = io.BytesIO()
        _Pickler(stream, protocol=5, buffer_callback=lambda b: buffers.append(b.raw())).dump(item)
        parts = [stream.getbuffer(), *buffers]
        header = struct.pack(f"<{1 + len(parts)}Q", len(parts), *(part.nbytes for part in parts))
        chunks: list[memoryview | bytes] = [header, *parts]
        total = sum(_aligned(len(chunk)) for chunk in chunks)
        place = None if self._arena is None else self._arena.write(chunks, total)
        return place or self._file(chunks, total)

    def close(self) -> None:
        """Close the memory files; those not opened by then cannot be any more."""
        while self._files:
            os.close(self._files.popleft())

    def _file(self, chunks: Sequence[memoryview | bytes], total: int) -> MemoryFile:
        file = os.memfd_create("energon-batch")
        os.ftruncate(file, total)
        with mmap.mmap(file, total) as mapped, memoryview(mapped) as view:
            _copy(chunks, view)
        self._files.append(file)
        if len(self._files) > self._kept:
            os.close(self._files.popleft())
        return MemoryFile(os.getpid(), file, total)


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


Message = tuple[int, int, int] | MemoryFile


def unpack(message: Message, arena: Arena | None) -> Any:
    """Return the item that a message of an outbox stands for; its tensors are views of shared memory."""
    if isinstance(message, MemoryFile):
        block = message.open()
    else:
        assert arena is not None
        block = arena.open(*message)
    view = memoryview(block)  # type: ignore[arg-type]  # numpy 2.1 does not say that an array is a buffer
    (count,) = struct.unpack_from("<Q", view, 0)
    lengths = struct.unpack_from(f"<{count}Q", view, 8)
    offset = _aligned(8 * (1 + count))
    parts = []
    for length in lengths:
        parts.append(view[offset : offset + length])
        offset += _aligned(length)
    return pickle.loads(parts[0], buffers=[pickle.PickleBuffer(part) for part in parts[1:]])


def _aligned(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN


def _copy(chunks: Sequence[memoryview | bytes], target: memoryview) -> None:
    offset = 0
    for chunk in chunks:
        target[offset : offset + len(chunk)] = chunk
        offset += _aligned(len(chunk))


class _Pickler(pickle.Pickler):
    """Pickles dense CPU tensors out of band, with their memory layout (a CHW view over HWC memory stays one)."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided or obj.device.type != "cpu":
            return NotImplemented
        if obj.requires_grad or obj.is_quantized or obj.is_conj() or obj.is_neg():
            return NotImplemented
        order = sorted(range(obj.dim()), key=obj.stride, reverse=True)
        dense = obj.permute(order)
        if not dense.is_contiguous():
            order, dense = list(range(obj.dim())), obj.contiguous()
        flat: Any = dense.reshape(-1).view(torch.uint8).numpy()
        inverse = tuple(order.index(d) for d in range(obj.dim()))
        return _rebuild, (pickle.PickleBuffer(flat), obj.dtype, tuple(dense.shape), inverse)


def _rebuild(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], inverse: tuple[int, ...]) -> torch.Tensor:
    data = np.asarray(buffer)
    if data.size == 0:
        return torch.empty(shape, dtype=dtype).permute(inverse)
    return torch.from_numpy(data).view(dtype).view(shape).permute(inverse)
