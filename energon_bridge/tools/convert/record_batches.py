"""Arrow files and streams, of which any rows are read alone. Needs pyarrow.

No file is mapped into memory: truncating a mapped file kills every process that touches what is gone. Instead, the
heads of the messages (Arrow columnar format, "Encapsulated message format") are copied to their places in empty memory
as long as the file. Arrow arrays over it say where each buffer lies in the file, and only the bytes of the rows are
read from there.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from energon_bridge.core.errors import CorruptShardError, SourceError
from energon_bridge.core.storage import Store

ArraySlice = tuple[Any, int, int]
"""Some items of an array: the array, the first of them and their number."""
ReadSteps = Generator[list[tuple[int, int]], list[bytes], Any]
"""Yields the ranges that it needs next, offset and length, is sent their bytes, and returns an array."""

SCHEMA, DICTIONARY, BATCH = 1, 2, 3  # kinds of messages
_HEAD = 4 << 10  # bytes in which the head of a record batch nearly always ends
_MAGIC = b"ARROW1"
_CONTINUES = 0xFFFFFFFF  # stands before the length of a head, but for files from before 2019
_INLINE = 12  # bytes of a text that are in its view
_OFFSETS = {
    **dict.fromkeys(("BinaryArray", "StringArray", "ListArray", "MapArray"), "i"),
    **dict.fromkeys(("LargeBinaryArray", "LargeStringArray", "LargeListArray"), "q"),
}
_VIEWS = ("BinaryViewArray", "StringViewArray")
_RARE = ("DictionaryArray", "UnionArray", "RunEndEncodedArray", "ListViewArray", "LargeListViewArray")


class Message(NamedTuple):
    """A message in an arrow file: its place, its head with the length before it, and the bytes of its content.

    `is_encoded` says that the content is compressed, or of a schema, that all contents have the other endianness.
    """

    start: int
    head: bytes
    kind: int
    rows: int
    content: int
    is_encoded: bool


def messages_of(store: Store, rel: str, size: int) -> Iterator[Message]:
    """Yield the messages of an arrow file or stream of so many bytes; raises SourceError."""
    path = store.url(rel)
    start = 0
    while start + 8 <= size:
        head = store.read_range(rel, start, min(_HEAD, size - start))
        if not start and head.startswith(_MAGIC):
            if store.read_range(rel, size - len(_MAGIC), len(_MAGIC)) != _MAGIC:
                raise SourceError(f"{path}: has no end. Was it cut off?")
            start = 8
            continue
        mark, length = struct.unpack_from("<II", head)
        before, length = (8, length) if mark == _CONTINUES else (4, mark)
        if not length:
            break  # the end of the batches
        end = start + before + length
        if end > size:
            raise SourceError(f"{path}: is no arrow file from byte {start} on. Was it cut off?")
        head = head[: end - start] if end - start <= len(head) else store.read_range(rel, start, end - start)
        try:
            message = Message(start, head, *_parsed(head[before:]))
        except (struct.error, IndexError) as error:
            raise SourceError(f"{path}: is no arrow file from byte {start} on. Was it cut off?") from error
        if not 0 <= message.content <= size - end:
            raise SourceError(f"{path}: ends in the middle of a record batch. Was it cut off?")
        yield message
        start = end + message.content


def _parsed(data: bytes) -> tuple[int, int, int, bool]:
    """Return kind, rows and bytes of content of the head of a message, a flatbuffer, and whether it is encoded."""
    root = struct.unpack_from("<I", data)[0]

    def place(table: int, number: int) -> int:
        entries = table - struct.unpack_from("<i", data, table)[0]
        inside = 4 + 2 * number < struct.unpack_from("<H", data, entries)[0]
        offset = struct.unpack_from("<H", data, entries + 4 + 2 * number)[0] if inside else 0
        return table + offset if offset else 0

    kind, header, content = (place(root, number) for number in (1, 2, 3))
    table = header + struct.unpack_from("<I", data, header)[0]
    first = place(table, 0)  # of a schema, its endianness; of a record batch, its rows
    is_schema = data[kind] == SCHEMA
    return (
        data[kind],
        struct.unpack_from("<q", data, first)[0] if first and data[kind] == BATCH else 0,
        struct.unpack_from("<q", data, content)[0] if content else 0,
        bool(first and data[first]) if is_schema else data[kind] == BATCH and place(table, 3) > 0,
    )


def open_arrow(store: Store, rel: str, size: int) -> ArrowFile:
    """Open a local arrow file or stream of so many bytes; raises SourceError, ArrowException."""
    import pyarrow

    messages = [*messages_of(store, rel, size)]
    if not messages or messages[0].kind != SCHEMA:
        raise SourceError(f"{store.url(rel)}: has no schema. Was it cut off?")
    start = messages[0].start
    if any(message.is_encoded for message in messages):
        with pyarrow.OSFile(store.url(rel)) as file:
            file.seek(start)
            return ArrowFile(rows=pyarrow.ipc.open_stream(file).read_all())
    memory = _empty(size)
    has_dictionaries = False
    for one in messages:
        end = one.start + len(one.head)
        memory[one.start : end] = one.head
        if one.kind == DICTIONARY:
            has_dictionaries = True
            memory[end : end + one.content] = store.read_range(rel, end, one.content)
    whole = pyarrow.py_buffer(memory)
    rows = pyarrow.ipc.open_stream(whole.slice(start)).read_all()
    if not has_dictionaries:
        with suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_REMOVE)  # the heads have been read
    return ArrowFile(rows=rows, memory=memory, base=whole.address)


def _empty(size: int) -> mmap.mmap:
    """Return that many bytes of memory; a page takes up room only once it is written to."""
    if not hasattr(os, "memfd_create"):
        return mmap.mmap(-1, size)
    number = os.memfd_create("energon-arrow")  # unlike other memory, it is not counted before it is used
    try:
        os.truncate(number, size)
        return mmap.mmap(number, size)
    finally:
        os.close(number)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrowFile:
    """The rows of a local arrow file, whose buffers have their places in a memory, but are not there.

    Encoded rows have been read, and are there: they have no `memory`. `base` is its address.
    """

    rows: Any
    memory: mmap.mmap | None = None
    base: int = 0
    there: set[int] = field(default_factory=set)
    """Addresses of the buffers that have been read into the memory."""

    def take(self, store: Store, rel: str, pieces: Sequence[ArraySlice]) -> list[Any]:
        """Return pieces of columns as arrays; raises CorruptShardError if the file has changed, or is damaged."""
        if self.memory is None:
            return [array.slice(first, count) for array, first, count in pieces]
        reads = _together([self._taken(*piece) for piece in pieces])
        blocks: Any = None
        try:
            while True:
                wanted = reads.send(blocks)
                blocks = store.read_ranges(rel, [offset for offset, _ in wanted], [length for _, length in wanted])
        except StopIteration as done:
            return list(done.value)
        except ValueError as error:
            raise CorruptShardError(f"{store.url(rel)}: is damaged: {error}. Copy or write it again.") from error

    def _range(self, buffer: Any, low: int, length: int) -> tuple[int, int]:
        """Return a range of a buffer as one of the file."""
        assert self.memory is not None
        place = buffer.address - self.base + low if length else 0
        if low < 0 or length < 0 or low + length > buffer.size or not 0 <= place <= len(self.memory) - length:
            raise ValueError(f"a buffer of {buffer.size} bytes is to have {length} at {low}")
        return place, length

    def _taken(self, array: Any, first: int, count: int) -> ReadSteps:
        """Return some items of an array, which must start with its buffers."""
        import pyarrow

        kind = array.type
        name = type(array).__name__
        if isinstance(kind, pyarrow.BaseExtensionType):
            return kind.wrap_array((yield from self._taken(array.storage, first, count)))
        if first < 0 or first + count > len(array):
            raise ValueError(f"an array of {len(array)} is to have {count} at {first}")
        if name in _RARE:
            yield from self._filled(array)
            return array.slice(first, count)
        if name == "NullArray" or not count:
            return pyarrow.nulls(count, kind)
        validity, *buffers = array.buffers()
        offsets = _OFFSETS.get(name)
        bits = first // 8, (first + count + 7) // 8 - first // 8
        wanted = [] if validity is None else [self._range(validity, *bits)]
        if name == "BooleanArray":
            wanted.append(self._range(buffers[0], *bits))
        elif offsets:
            width = struct.calcsize(offsets)
            wanted.append(self._range(buffers[0], first * width, (count + 1) * width))
        elif name not in ("StructArray", "FixedSizeListArray"):
            width = 16 if name in _VIEWS else kind.bit_width // 8
            wanted.append(self._range(buffers[0], first * width, count * width))
        data = (yield wanted) if wanted else []
        valid = None if validity is None else _shifted(data.pop(0), first)
        children = []
        if name == "BooleanArray":
            data = [_shifted(data[0], first)]
        elif name in _VIEWS:
            data = yield from self._viewed(data[0], buffers[1:], valid)
        elif offsets:
            span, data[0] = _offsets(data[0], offsets)
            if kind.num_fields:
                children = [(yield from self._taken(array.values, *span))]
            else:
                data += yield [self._range(buffers[1], *span)]
        elif name == "StructArray":
            children = yield from _together([self._taken(array.field(n), first, count) for n in range(kind.num_fields)])
        elif name == "FixedSizeListArray":
            children = [(yield from self._taken(array.values, first * kind.list_size, count * kind.list_size))]
        blocks = [None if block is None else pyarrow.py_buffer(block) for block in (valid, *data)]
        return pyarrow.Array.from_buffers(kind, count, blocks, children=children)

    def _filled(self, array: Any) -> ReadSteps:
        """Read the whole buffers of an array to their places."""
        assert self.memory is not None
        buffers = [one for one in array.buffers() if one is not None and one.address not in self.there]
        ranges = [self._range(one, 0, one.size) for one in buffers]
        blocks = (yield ranges) if ranges else []
        for buffer, (place, length), block in zip(buffers, ranges, blocks, strict=True):
            self.memory[place : place + length] = block
            self.there.add(buffer.address)

    def _viewed(self, block: bytes, buffers: Sequence[Any], valid: bytes | None) -> ReadSteps:
        """Return the buffers of views: each has the length of a text, and the text or its buffer and offset."""
        views = np.frombuffer(block, "<i4").reshape(-1, 4).copy()
        if valid is not None:
            views[np.unpackbits(np.frombuffer(valid, np.uint8), count=len(views), bitorder="little") == 0] = 0
        long = views[:, 0] > _INLINE
        rows = views[long].tolist()
        if any(not 0 <= number < len(buffers) for _, _, number, _ in rows):
            raise ValueError("a text is to be in a buffer that is not there")
        texts = yield [self._range(buffers[number], offset, length) for length, _, number, offset in rows]
        views[long, 2] = 0
        views[long, 3] = np.cumsum([0, *map(len, texts)])[:-1]
        return [views.tobytes(), b"".join(texts)]


def _together(parts: Sequence[ReadSteps]) -> ReadSteps:
    """Return what each of them returns; what they need next is read at once."""
    results: list[Any] = [None] * len(parts)
    blocks: dict[int, Any] = dict.fromkeys(range(len(parts)))
    while blocks:
        wanted = {}
        for number, block in blocks.items():
            try:
                wanted[number] = parts[number].send(block)
            except StopIteration as done:
                results[number] = done.value
        got = iter((yield [one for ranges in wanted.values() for one in ranges]) if wanted else ())
        blocks = {number: [*islice(got, len(ranges))] for number, ranges in wanted.items()}
    return results


def _shifted(block: bytes, first: int) -> bytes:
    """Return bits from the one of item `first` on, of bytes from the one that has it on."""
    return (int.from_bytes(block, "little") >> first % 8).to_bytes(len(block), "little")


def _offsets(block: bytes, form: str) -> tuple[tuple[int, int], bytes]:
    """Return first and number of what some offsets lead to, and the offsets from there."""
    form = f"<{len(block) // struct.calcsize(form)}{form}"
    first, *others = struct.unpack(form, block)
    offsets = [0, *(other - first for other in others)]
    if offsets != sorted(offsets):
        raise ValueError("offsets go back")
    return (first, offsets[-1]), struct.pack(form, *offsets)
