"""Ranges of files: those that are read together, and a seekable stream over one, such as a member of a tar.

Invariant: the stream reads nothing before it is requested.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from energon_bridge.core.storage.store import ByteRange

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


GAP = 32 << 10
"""Gaps up to this size between two ranges are read along, since they cost far less than a request."""


def merged(offsets: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    """Return the reads for some ranges, in file order: (low, high, numbers of the ranges in it), bytes `[low, high)`.

    Neighbours with at most `GAP` bytes between them are read together; empty ranges are in no read.
    """
    reads: list[tuple[int, int, list[int]]] = []
    for number in sorted(range(len(offsets)), key=offsets.__getitem__):
        low = offsets[number]
        high = offsets[number] + lengths[number]
        if low == high:
            continue
        if reads and low - reads[-1][1] <= GAP:
            first, last, members = reads[-1]
            members.append(number)
            reads[-1] = first, max(last, high), members
        else:
            reads.append((low, high, [number]))
    return reads


class RangeReader(io.RawIOBase):
    """A seekable stream over a `ByteRange`, or over bytes in memory.

    Args:
        source: What to read.
        in_memory: Parts of a `ByteRange` that were read already: (position in the range, bytes) each.

    Attributes:
        bytes_read: Bytes handed out so far.
    """

    def __init__(self, source: ByteRange | bytes, in_memory: Sequence[tuple[int, bytes]] = ()) -> None:
        self._source = source
        self._in_memory = [(start, memoryview(data)) for start, data in in_memory]
        self._size = source.size if isinstance(source, ByteRange) else len(source)
        self._at = 0
        self.bytes_read = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        """Return up to `size` bytes, the whole rest if it is negative; b"" at the end. Raises StorageError."""
        left = max(0, self._size - self._at)
        size = left if size is None or size < 0 else min(size, left)
        if not size:
            return b""
        data = self._bytes(self._at, size)
        self._at += size
        self.bytes_read += size
        return data

    def _bytes(self, at: int, size: int) -> bytes:
        source = self._source
        if not isinstance(source, ByteRange):
            return source[at : at + size]
        for start, data in self._in_memory:
            if start <= at and at + size <= start + len(data):
                return bytes(data[at - start : at - start + size])
        return source.store.read_range(source.rel, source.offset + at, size)

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill a buffer with the next bytes; return how many."""
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to a position; return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at
