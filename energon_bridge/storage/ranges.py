"""A seekable stream over a file, or over a part of one such as a member of a tar.

Invariant: nothing is read before it is requested, and a range can be pickled: it names bytes without holding them.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from energon_bridge.storage.base import Store

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


_GAP = 32 << 10
"""Gaps up to this size between two ranges are read along, since they cost far less than a request."""


def merged(offsets: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    """Return the spans to read for some ranges, in file order: (low, high, numbers of the ranges in it)."""
    spans: list[tuple[int, int, list[int]]] = []
    for number in sorted(range(len(offsets)), key=offsets.__getitem__):
        low, high = offsets[number], offsets[number] + lengths[number]
        if low == high:
            continue
        if spans and low - spans[-1][1] <= _GAP:
            first, last, members = spans[-1]
            members.append(number)
            spans[-1] = first, max(last, high), members
        else:
            spans.append((low, high, [number]))
    return spans


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """`size` bytes from byte `offset` of the file `rel` of a store."""

    store: Store
    rel: str
    offset: int
    size: int

    @property
    def url(self) -> str:
        """Return the path or URL of the file."""
        return self.store.url(self.rel)

    def read(self, size: int | None = None) -> bytes:
        """Return its bytes, or the first `size` of them. Raises StorageError."""
        return self.store.read_range(self.rel, self.offset, self.size if size is None else min(size, self.size))


class RangeReader(io.RawIOBase):
    """A seekable stream over a `ByteRange`, or over bytes in memory.

    Args:
        source: What to read.
        known: Parts of a `ByteRange` that are in memory already, each with its position.

    Attributes:
        bytes_read: Bytes handed out so far.
    """

    def __init__(self, source: ByteRange | bytes, known: Sequence[tuple[int, bytes]] = ()) -> None:
        self._source = source
        self._known = [(start, memoryview(data)) for start, data in known]
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
        for start, data in self._known:
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
