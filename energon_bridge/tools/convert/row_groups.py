"""Row groups of parquet and arrow files, local or behind URLs: numbers of rows, and columns. Needs pyarrow.

Of local arrow files any row is read alone (`record_batches.py`). Of files behind URLs, the end of a parquet file is
read, and the head of each record batch of an arrow file; then one row group or record batch at a time, with all its
columns in one request.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from energon_bridge.core.errors import ConfigurationError, SourceError
from energon_bridge.core.storage import ByteRange, Store, as_far, open_store
from energon_bridge.core.storage.ranges import RangeReader
from energon_bridge.tools.convert.record_batches import BATCH, SCHEMA, ArrowFile, messages_of, open_arrow
from energon_bridge.tools.convert.table_values import ValueReader, features_of, has_values, readers_of

FileStamp = tuple[int, int]
"""Size and modification time of a file (of a remote one, its version): cached data is valid for this stamp only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A row group of a parquet file, or an arrow file (group -1), with the columns and the label names of some.

    Of an arrow file, or one behind a URL, `store` has the bytes. Behind a URL, `metadata` is the footer; if it is an
    arrow file, its groups are its record batches: `metadata` is the schema, and `span` offset and length of the batch.
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


def groups_of(path: Path, store: Store | None = None) -> list[Group]:
    """Return the row groups of a parquet file, or an arrow file as one; raises SourceError.

    `store`, of its folder or one above, reads the rows of an arrow file.
    """
    parquet = path.suffix == ".parquet"
    arrow = pyarrow_modules()
    try:
        stat = path.stat()
        stamp = stat.st_size, stat.st_mtime_ns
        if parquet:
            return _parquet_groups(str(path), stamp, parquet_file(str(path), stamp).metadata)
        file, _ = arrow_file(str(path), stamp)
    except (OSError, arrow.ArrowException) as error:
        raise SourceError(f"{path}: cannot be read: {str(error).rstrip('.')}. Was the download cut off?") from error
    return [
        Group(
            path=str(path),
            stamp=stamp,
            group=-1,
            num_rows=file.rows.num_rows,
            columns=tuple(file.rows.schema.names),
            labels=_labels(file.rows.schema.metadata),
            store=open_store(path.parent) if store is None else store,
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
    return tuple(label for name, feature in features_of(metadata).items() for label in _labels_of(feature, name))


def _labels_of(feature: Any, path: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the columns, or keys within them (`qa.answer`), that are a `ClassLabel` or a list of such."""
    if isinstance(feature, list):  # as older versions of `datasets` write lists
        yield from _labels_of(feature[0] if feature else None, path)
    elif isinstance(feature, dict):
        if not isinstance(kind := feature.get("_type"), str):
            for name, inner in feature.items():
                yield from _labels_of(inner, f"{path}.{name}")
        elif kind == "ClassLabel" and feature.get("names"):
            yield path, tuple(feature["names"])
        else:
            yield from _labels_of(feature.get("feature"), path)


def pyarrow_modules() -> Any:
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigurationError(
            "parquet files and Hugging Face datasets need pyarrow: pip install 'energon-bridge[parquet]'"
        ) from error
    return pyarrow


@lru_cache(maxsize=16)
def parquet_file(path: str, stamp: FileStamp) -> Any:
    """Return an open parquet file."""
    return pyarrow_modules().parquet.ParquetFile(path, pre_buffer=False)


Columns = list[tuple[str, Any, ValueReader]]
"""Columns of some rows, with their names and how they are read."""
Batches = list[tuple[int, Columns]]
"""Rows in order: the number of the first of each run or record batch, and its columns."""


def batches_of(table: Any) -> Batches:
    """Return the record batches of a table."""
    batches: Batches = []
    first = 0
    readers = readers_of(table.schema)
    for batch in table.to_batches():
        batches.append((first, list(zip(readers, batch.columns, readers.values(), strict=True))))
        first += batch.num_rows
    return batches


def batch_at(batches: Batches, row: int) -> tuple[int, Columns]:
    """Return the one that has a row."""
    return batches[bisect_right(batches, row, key=itemgetter(0)) - 1]


@lru_cache(maxsize=64)
def arrow_file(path: str, stamp: FileStamp) -> tuple[ArrowFile, Batches]:
    """Return a local arrow file and its record batches; raises CorruptShardError if it has another stamp by now."""
    store = open_store(os.path.dirname(path))  # none that keeps the file open
    store.expect(os.path.basename(path), *stamp)
    file = open_arrow(store, os.path.basename(path), stamp[0])
    return file, batches_of(file.rows)


def read_rows(group: Group, rows: Collection[int], columns: tuple[str, ...]) -> Batches:
    """Return rows of a local arrow file, with all columns if none is named; raises CorruptShardError."""
    assert group.store is not None
    file, batches = arrow_file(group.path, group.stamp)
    runs: list[tuple[int, int, tuple[int, Columns]]] = []
    for row in sorted(set(rows)):
        batch = batch_at(batches, row)
        if runs and runs[-1][2] is batch and sum(runs[-1][:2]) == row:
            runs[-1] = runs[-1][0], runs[-1][1] + 1, batch
        else:
            runs.append((row, 1, batch))
    wanted = columns or group.columns
    pieces = [
        (array, first - before, count)
        for first, count, (before, found) in runs
        for name, array, _ in found
        if name in wanted
    ]
    taken = iter(file.take(group.store, _rel(group.store, os.path.abspath(group.path)), pieces))
    return [
        (first, [(name, next(taken), read) for name, _, read in found if name in wanted])
        for first, _, (_, found) in runs
    ]


def chunks_of(group: Group, column: str) -> list[Any]:
    """Return a column as arrays; raises CorruptShardError."""
    if group.group >= 0:
        table = table_of(group)[0] if group.span[1] else read_row_groups([group], (column,))
        return list(table.column(column).chunks)
    assert group.store is not None
    file, _ = arrow_file(group.path, group.stamp)
    pieces = [(chunk, 0, len(chunk)) for chunk in file.rows.column(column).chunks]
    return file.take(group.store, _rel(group.store, group.path), pieces)


def column_of_groups(groups: Sequence[Group], column: str) -> list[Any]:
    """Return a column of groups of one file as arrays; `metadata.split` is one inside of another, as a struct has it.

    Raises CorruptShardError.
    """
    arrow = pyarrow_modules()
    outer, _, inner = column.partition(".") if column not in groups[0].columns else (column, "", "")
    if groups[0].path.endswith(".parquet"):
        chunks = list(read_row_groups(groups, (outer,)).column(outer).chunks)
    else:
        chunks = [chunk for group in groups for chunk in chunks_of(group, outer)]
    if not inner:
        return chunks
    there = [
        chunk.type.get_field_index(inner) >= 0 if hasattr(chunk.type, "get_field_index") else False for chunk in chunks
    ]
    return [
        arrow.compute.struct_field(chunk, inner) if has else arrow.nulls(len(chunk))
        for chunk, has in zip(chunks, there, strict=True)
    ]


_TABLES = 2
_tables: dict[tuple[Any, ...], tuple[Any, dict[str, ValueReader]]] = {}
_tables_lock = threading.Lock()


def table_of(group: Group) -> tuple[Any, dict[str, ValueReader]]:
    """Return the rows of a group, and how its columns are read; those of the last two are kept, but not their store."""
    key = group.key
    with _tables_lock:
        kept = _tables.pop(key, None)
    if kept is None:
        table = read_group(group, ())
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


# Columns that the first rows leave empty ------------------------------------------------------------------------------


def first_filled(groups: Sequence[Group], column: str, count: int) -> list[int]:
    """Return the numbers of the first few rows that have something in a column, all of one chunk of it.

    Row groups whose footer says that theirs is empty are not read, and of files behind URLs only some are looked at.
    """
    starts = np.cumsum([0, *(group.num_rows for group in groups)])
    places = [at for at, group in enumerate(groups) if group.num_rows and column in group.columns]
    if places and "://" in groups[places[0]].path:
        places = [places[at] for at in some_of(len(places), is_arrow=bool(groups[places[0]].span[1]))]
    for at in places:
        if _is_empty_by_footer(groups[at], column):
            continue
        first = int(starts[at])
        for chunk in chunks_of(groups[at], column):
            if len(filled := np.flatnonzero(has_values(chunk))):
                return [first + int(row) for row in filled[:count]]
            first += len(chunk)
    return []


def some_of(count: int, *, is_arrow: bool) -> list[int]:
    """Return which of some row groups behind a URL are looked at."""
    return sorted({*np.linspace(0, count - 1, 2 if is_arrow else _FAR_GROUPS, dtype=int).tolist()})


_FAR_GROUPS = 16


def _is_empty_by_footer(group: Group, column: str) -> bool:
    """Return whether the footer of a parquet file says that a row group has nothing in a column but nulls and ""."""
    if group.group < 0 or group.span[1]:
        return False
    metadata = group.metadata if group.metadata is not None else parquet_file(group.path, group.stamp).metadata
    row_group = metadata.row_group(group.group)
    chunks = [row_group.column(place) for place in range(row_group.num_columns)]
    chunks = [one for one in chunks if one.path_in_schema == column or one.path_in_schema.startswith(f"{column}.")]
    return bool(chunks) and all(
        (known := one.statistics) is not None
        and (
            (known.has_null_count and known.null_count == one.num_values)
            or (known.has_min_max and known.max in ("", b""))
        )
        for one in chunks
    )


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
    """Return the record batches of an arrow file or stream; raises SourceError."""
    arrow = pyarrow_modules()
    schema = None
    groups: list[Group] = []
    columns: tuple[str, ...] = ()
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    for message in messages_of(store, _rel(store, path), stamp[0]):
        if message.kind == SCHEMA:
            schema = arrow.ipc.read_schema(arrow.py_buffer(message.head))
            columns = tuple(schema.names)
            labels = _labels(schema.metadata)
        elif message.kind == BATCH:
            groups.append(
                Group(
                    path=path,
                    stamp=stamp,
                    group=len(groups),
                    num_rows=message.rows,
                    columns=columns,
                    labels=labels,
                    store=store,
                    metadata=schema,
                    span=(message.start, len(message.head) + message.content),
                )
            )
        else:
            raise SourceError(f"{path}: has columns with dictionaries, which are read from local disks only: copy it.")
    if schema is None:
        raise SourceError(f"{path}: has no schema. Was the upload cut off?")
    return groups


def _read_batch(group: Group, columns: tuple[str, ...]) -> Any:
    arrow = pyarrow_modules()
    assert group.store is not None
    data = group.store.read_range(_rel(group.store, group.path), *group.span)
    batch = arrow.ipc.read_record_batch(arrow.py_buffer(data), group.metadata)
    table = arrow.Table.from_batches([batch])
    return table.select(list(columns)) if columns else table
