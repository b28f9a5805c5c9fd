"""Row groups of parquet and arrow files, local or behind URLs: numbers of rows, and columns. Needs pyarrow.

Local files are mapped into memory. Of files behind URLs, the end of a parquet file is read, and the head of each record
batch of an arrow file; then one row group or record batch at a time, with all its columns in one request.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from energon_bridge.core.errors import ConfigurationError, SourceError
from energon_bridge.core.storage import ByteRange, Store, as_far
from energon_bridge.core.storage.ranges import RangeReader
from energon_bridge.tools.convert.table_values import ValueReader, features_of, readers_of

FileStamp = tuple[int, int]
"""Size and modification time of a file (of a remote one, its version): cached data is valid for this stamp only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A row group of a parquet file, or an arrow file (group -1), with the columns and the label names of some.

    Of a file behind a URL, `store` has the bytes and `metadata` is its footer. If it is an arrow file, its groups are
    its record batches: `metadata` is the schema, and `span` offset and length of the batch.
    """

    path: str
    stamp: FileStamp
    group: int
    num_rows: int
    columns: tuple[str, ...]
    labels: tuple[tuple[str, tuple[str, ...]], ...]
    store: Store | None = field(default=None, compare=False, repr=False)
    metadata: Any = field(default=None, compare=False, repr=False)
    span: tuple[int, int] = (0, 0)

    @property
    def key(self) -> tuple[str, FileStamp, int, tuple[int, int]]:
        """The key of its rows in caches: it has no store in it, whose connections a cache would keep open."""
        return self.path, self.stamp, self.group, self.span


def groups_of(path: Path) -> list[Group]:
    """Return the row groups of a parquet file, or an arrow file as one; raises SourceError."""
    parquet = path.suffix == ".parquet"
    arrow = pyarrow_modules()
    try:
        stat = path.stat()
        stamp = stat.st_size, stat.st_mtime_ns
        if parquet:
            return _parquet_groups(str(path), stamp, parquet_file(str(path), stamp).metadata)
        table = read_table(str(path))
    except (OSError, arrow.ArrowException) as error:
        raise SourceError(f"{path}: cannot be read: {str(error).rstrip('.')}. Was the download cut off?") from error
    return [
        Group(
            path=str(path),
            stamp=stamp,
            group=-1,
            num_rows=table.num_rows,
            columns=tuple(table.schema.names),
            labels=_labels(table.schema.metadata),
        )
    ]


def _parquet_groups(path: str, stamp: FileStamp, metadata: Any, store: Store | None = None) -> list[Group]:
    schema = metadata.schema.to_arrow_schema()
    columns = tuple(schema.names)
    labels = _labels(schema.metadata)
    return [
        Group(
            path=path,
            stamp=stamp,
            group=number,
            num_rows=metadata.row_group(number).num_rows,
            columns=columns,
            labels=labels,
            store=store,
            metadata=None if store is None else metadata,
        )
        for number in range(metadata.num_row_groups)
    ]


def _labels(metadata: Mapping[bytes, bytes] | None) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple(
        (name, tuple(feature["names"]))
        for name, feature in features_of(metadata).items()
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and feature.get("names")
    )


def pyarrow_modules() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigurationError(
            "parquet files and Hugging Face datasets need pyarrow: pip install 'energon-bridge[parquet]'"
        ) from error
    return pyarrow


@lru_cache(maxsize=16)
def parquet_file(path: str, stamp: FileStamp) -> Any:
    """Return an open parquet file."""
    return pyarrow_modules().parquet.ParquetFile(path, memory_map=True, pre_buffer=False)


def read_table(path: str) -> Any:
    """Return the rows of an arrow file, memory-mapped, so that only the used parts are read."""
    arrow = pyarrow_modules()
    with open(path, "rb") as file:
        is_stream = file.read(6) != b"ARROW1"
    mapped = arrow.memory_map(path)
    return (arrow.ipc.open_stream if is_stream else arrow.ipc.open_file)(mapped).read_all()


_TABLES = 2
_tables: dict[tuple[Any, ...], tuple[Any, dict[str, ValueReader]]] = {}
_tables_lock = threading.Lock()


def table_of(group: Group) -> tuple[Any, dict[str, ValueReader]]:
    """Return the rows of a group, and how its columns are read; those of the last two are kept, but not their store."""
    key = group.key
    with _tables_lock:
        kept = _tables.pop(key, None)
    if kept is None:
        table = read_table(group.path) if group.group < 0 else read_group(group, ())
        kept = table, readers_of(table.schema)
    with _tables_lock:
        _tables[key] = kept
        while len(_tables) > _TABLES:
            del _tables[next(iter(_tables))]
    return kept


def release_tables() -> None:
    """Release the rows that are kept."""
    with _tables_lock:
        _tables.clear()


def read_group(group: Group, columns: tuple[str, ...]) -> Any:
    """Return some columns of a row group, all if none is named."""
    if group.span[1]:
        return _read_batch(group, columns)
    return read_row_groups([group], columns)


def read_row_groups(groups: Sequence[Group], columns: tuple[str, ...]) -> Any:
    """Return some columns of row groups of one parquet file, all if none is named."""
    first = groups[0]
    if first.store is None:
        file = parquet_file(first.path, first.stamp)
    else:
        file = _prefetched(first.store, groups, columns)
    numbers = [group.group for group in groups]
    return file.read_row_groups(numbers, columns=list(columns) or None, use_threads=False)


TAIL_BYTES = 64 << 10  # at the end of a parquet file that nearly always hold its metadata
_TAILS = 128  # read at once
_HEAD = 4 << 10  # bytes in which the head of a record batch nearly always ends
_MAGIC = b"ARROW1\0\0"
_SCHEMA, _BATCH = 1, 3  # kinds of messages


# Files behind URLs ----------------------------------------------------------------------------------------------------


def sizes_of(store: Store, names: Sequence[str]) -> list[int]:
    """Return the sizes of files in bytes; raises ShardMissingError."""
    far = as_far(store)
    return [store.size(name) for name in names] if far is None else list(far.sizes(names))


def far_groups(store: Store, names: Sequence[str], stamps: Sequence[FileStamp]) -> list[list[Group]]:
    """Return the groups of files behind URLs; a version 0 becomes a hash of the end of the file. Raises SourceError."""
    groups: list[list[Group]] = []
    for first in range(0, len(names), _TAILS):
        some = slice(first, first + _TAILS)
        tails = _tails(store, names[some], [size for size, _ in stamps[some]])
        for name, stamp, tail in zip(names[some], stamps[some], tails, strict=True):
            path = store.url(name)
            try:
                if not name.endswith(".parquet"):
                    groups.append(_arrow_groups(store, path, stamp))
                    continue
                version = stamp[1] or hash_of_tail(tail)
                whole = ByteRange(store=store, rel=name, offset=0, size=stamp[0])
                file = RangeReader(whole, [(stamp[0] - len(tail), tail)])
                metadata = pyarrow_modules().parquet.ParquetFile(file, pre_buffer=False).metadata
                groups.append(_parquet_groups(path, (stamp[0], version), metadata, store))
            except (pyarrow_modules().ArrowException, struct.error) as error:
                raise SourceError(f"{path}: cannot be read: {error}. Was the upload cut off?") from error
    return groups


def hash_of_tail(tail: bytes) -> int:
    """Return the hash of the end of a parquet file, a version of it."""
    return int.from_bytes(hashlib.blake2b(tail, digest_size=7).digest(), "little")


def _tails(store: Store, names: Sequence[str], sizes: Sequence[int]) -> list[bytes]:
    """Return the ends of parquet files, and nothing of others."""
    lengths = [
        min(TAIL_BYTES, size) if name.endswith(".parquet") else 0 for name, size in zip(names, sizes, strict=True)
    ]
    wanted = [
        (name, [size - length], [length]) for name, size, length in zip(names, sizes, lengths, strict=True) if length
    ]
    far = as_far(store)
    blocks = far.read_all(wanted) if far is not None else [store.read_ranges(*one) for one in wanted]
    tails = iter([bytes(block[0]) for block in blocks])
    return [next(tails) if length else b"" for length in lengths]


def _rel(store: Store, path: str) -> str:
    return path.removeprefix(store.root).lstrip("/")


def _prefetched(store: Store, groups: Sequence[Group], columns: tuple[str, ...]) -> Any:
    """Return an open parquet file, of which some columns of some row groups have been read, all at once."""
    first = groups[0]
    offsets = []
    lengths = []
    for group in groups:
        row_group = first.metadata.row_group(group.group)
        for place in range(row_group.num_columns):
            chunk = row_group.column(place)
            name = chunk.path_in_schema
            if columns and not any(name == column or name.startswith(f"{column}.") for column in columns):
                continue
            starts = (chunk.dictionary_page_offset, chunk.data_page_offset)
            offsets.append(min(start for start in starts if start))
            lengths.append(chunk.total_compressed_size)
    rel = _rel(store, first.path)
    blocks = store.read_ranges(rel, offsets, lengths)
    whole = ByteRange(store=store, rel=rel, offset=0, size=first.stamp[0])
    file = RangeReader(whole, list(zip(offsets, blocks, strict=True)))
    return pyarrow_modules().parquet.ParquetFile(file, metadata=first.metadata, pre_buffer=False)


def _arrow_groups(store: Store, path: str, stamp: FileStamp) -> list[Group]:
    """Return the record batches of an arrow file or stream; raises SourceError.

    Each is a message: four bytes 0xFF, four with the length of its head, the head, the content. (Arrow columnar format,
    "Encapsulated message format".)
    """
    arrow = pyarrow_modules()
    rel = _rel(store, path)
    size = stamp[0]
    start = 0
    schema = None
    groups: list[Group] = []
    columns: tuple[str, ...] = ()
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    while start + 8 <= size:
        head = store.read_range(rel, start, min(_HEAD, size - start))
        if not start and head.startswith(_MAGIC):
            start = len(_MAGIC)
            continue
        mark, length = struct.unpack_from("<II", head)
        if mark != 0xFFFFFFFF or start + 8 + length > size:
            raise SourceError(f"{path}: is no arrow file from byte {start} on. Was the upload cut off?")
        if not length:
            break  # the end of the batches
        if 8 + length > len(head):
            head = store.read_range(rel, start, 8 + length)
        kind, rows, content = _message(head[8 : 8 + length])
        if kind == _SCHEMA:
            schema = arrow.ipc.read_schema(arrow.py_buffer(head[: 8 + length]))
            columns = tuple(schema.names)
            labels = _labels(schema.metadata)
        elif kind == _BATCH:
            span = start, 8 + length + content
            if sum(span) > size:
                raise SourceError(f"{path}: ends in the middle of a record batch. Was the upload cut off?")
            groups.append(
                Group(
                    path=path,
                    stamp=stamp,
                    group=len(groups),
                    num_rows=rows,
                    columns=columns,
                    labels=labels,
                    store=store,
                    metadata=schema,
                    span=span,
                )
            )
        else:
            raise SourceError(f"{path}: has columns with dictionaries, which are read from local disks only: copy it.")
        start += 8 + length + content
    if schema is None:
        raise SourceError(f"{path}: has no schema. Was the upload cut off?")
    return groups


def _message(data: bytes) -> tuple[int, int, int]:
    """Return kind, rows and bytes of content of the head of a message, a flatbuffer."""
    root = struct.unpack_from("<I", data)[0]

    def place(table: int, number: int) -> int:
        entries = table - struct.unpack_from("<i", data, table)[0]
        inside = 4 + 2 * number < struct.unpack_from("<H", data, entries)[0]
        offset = struct.unpack_from("<H", data, entries + 4 + 2 * number)[0] if inside else 0
        return table + offset if offset else 0

    kind, header, content = (place(root, number) for number in (1, 2, 3))
    table = header + struct.unpack_from("<I", data, header)[0]
    rows = place(table, 0)
    return (
        data[kind],
        struct.unpack_from("<q", data, rows)[0] if rows else 0,
        struct.unpack_from("<q", data, content)[0] if content else 0,
    )


def _read_batch(group: Group, columns: tuple[str, ...]) -> Any:
    arrow = pyarrow_modules()
    assert group.store is not None
    data = group.store.read_range(_rel(group.store, group.path), *group.span)
    batch = arrow.ipc.read_record_batch(arrow.py_buffer(data), group.metadata)
    table = arrow.Table.from_batches([batch])
    return table.select(list(columns)) if columns else table
