"""Parquet files, and datasets that Hugging Face's library saved to disk (arrow streams). Needs pyarrow.

Rows are read where they are written, in the process that writes them; the one that plans reads metadata only, and the
rows that it shows. Labels of Hugging Face's `ClassLabel` come with their names.

Local files are mapped into memory. Of files behind URLs, the end of a parquet file is read, and the head of each record
batch of an arrow file; then one row group or record batch at a time, with all its columns in one request.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
import threading
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from energon_bridge.core.errors import ConfigurationError, ShardMissingError, SourceError, StorageError
from energon_bridge.core.storage import ByteRange, Store, as_far, open_store
from energon_bridge.core.storage.ranges import RangeReader
from energon_bridge.models.conversations.turns import CONVERSATIONS
from energon_bridge.tools.convert.conversations import (
    as_files,
    conversation_row,
    file_columns,
    is_conversation,
    known_form,
    learnable,
    media_columns,
    of_table,
    only_preferred,
    raw_bytes,
)
from energon_bridge.tools.convert.lists import propose_layout
from energon_bridge.tools.convert.rows import LOOKED_AT, Content, Layout, MediaRoot, Row, first_rows, lay_out, located
from energon_bridge.tools.convert.splits import named_parts, part_order, split_files
from energon_bridge.tools.convert.values import ValueReader, features_of, readers_of

_JUDGED_BY = 20
"""Rows that say which columns hold media and what the rows are."""
_logger = logging.getLogger(__name__)

SAVED = ("dataset_dict.json", "state.json")
SAVED_META = (*SAVED, "dataset_info.json")
"""Files beside tables that the `datasets` library saved."""

Stamp = tuple[int, int]
"""Size and modification time of a file (of a remote one, its version): cached data is valid for this stamp only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A row group of a parquet file, or an arrow file (group -1), with the columns and the label names of some.

    Of a file behind a URL, `store` has the bytes and `metadata` is its footer. If it is an arrow file, its groups are
    its record batches: `metadata` is the schema, and `span` offset and length of the batch.
    """

    path: str
    stamp: Stamp
    group: int
    num_rows: int
    columns: tuple[str, ...]
    labels: tuple[tuple[str, tuple[str, ...]], ...]
    store: Store | None = field(default=None, compare=False, repr=False)
    metadata: Any = field(default=None, compare=False, repr=False)
    span: tuple[int, int] = (0, 0)

    @property
    def key(self) -> tuple[str, Stamp, int, tuple[int, int]]:
        """What names its rows in caches, which must not keep a store and its connections open."""
        return self.path, self.stamp, self.group, self.span


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowSample:
    """A row that has not been read yet."""

    key: str
    where: str
    group: Group
    at: int
    number: int
    media: MediaRoot
    columns: tuple[str, ...]
    layout: Layout
    is_chat: bool

    @property
    def num_rejected(self) -> int:
        """Return how many answers are left out; reads the row if any may be."""
        return only_preferred(values_at(self.group, self.at), self.layout)[1] if self.layout.preferred else 0

    def sizes(self) -> list[tuple[str, int]]:
        """Return its parts with their sizes; reads the row."""
        return [(name, len(data)) for name, data in self.read()[0]]

    def mark(self) -> str:
        """Return a text that changes if the file does."""
        size, version = self.group.stamp
        return f"{self.key}\0{self.group.path} {size} {version} {self.group.group} {self.at}"

    def read(self) -> tuple[list[tuple[str, bytes]], Mapping[str, str]]:
        """Return its parts, and the accesses of its fields."""
        with located(self.where):
            values, _ = only_preferred(values_at(self.group, self.at), self.layout)
            row = row_of(dict(values), self.where, self.media, self.columns, self.group.labels)
            return lay_out(learnable(row, self.layout, self.is_chat), self.layout, self.number).read()


def values_at(group: Group, at: int) -> dict[str, Any]:
    """Return the values of a row by column; raises SourceError."""
    table, readers = table_of(group)
    return {name: read(column[at]) for (name, read), column in zip(readers.items(), table.columns, strict=True)}


def row_of(
    values: dict[str, Any],
    where: str,
    media: MediaRoot,
    columns: tuple[str, ...],
    labels: tuple[tuple[str, tuple[str, ...]], ...],
) -> Row:
    """Return values as a row; `columns` hold media and `labels` name classes. Raises SourceError."""
    with located(where):
        values = dict(known_form(values))
        if any(name in values for name in CONVERSATIONS):
            return conversation_row(of_table(values), where, media)
        files: dict[str, Content | tuple[Content, ...]] = {}
        for column in list(media_columns(values, columns)):
            value = values.pop(column, None)
            if value:
                files[column] = as_files(value, media, column)
        for column, value in [*values.items()]:
            if (raw := raw_bytes(value)) is not None:
                files[column] = raw
                del values[column]
        for column, names in labels:
            value = values.get(column)
            if isinstance(value, int) and 0 <= value < len(names):
                values["label_name" if column == "label" else f"{column}_name"] = names[value]
        return Row(where=where, values=values, files=files)


class ArrowSource:
    """The rows of some files, in their order."""

    left_out: tuple[str, ...] = ()

    def __init__(
        self, root: Path | str, files: Sequence[tuple[str, Sequence[Group]]], media: MediaRoot | None, kind: str
    ) -> None:
        self.kind = kind
        self.where = str(root)
        media = Path(root) if media is None else media
        self._media = media.absolute() if isinstance(media, Path) else media
        self._groups: list[Group] = []
        self._starts = [0]
        self._seen: dict[int, Mapping[str, Any]] = {}
        counts: dict[str, int] = {}
        for part, groups in files:
            for group in groups:
                self._groups.append(group)
                self._starts.append(self._starts[-1] + group.num_rows)
            counts[part] = counts.get(part, 0) + sum(group.num_rows for group in groups)
        self.split_parts = tuple(counts.items()) if "" not in counts else ()

    def __len__(self) -> int:
        return self._starts[-1]

    @cached_property
    def paths(self) -> frozenset[str]:
        """Return the paths of its files."""
        return frozenset(group.path for group in self._groups)

    def row(self, number: int) -> Row:
        group, _, where = self._place(number)
        return row_of(dict(self._values(number)), where, self._media, self.columns, group.labels)

    def sample(self, number: int, layout: Layout) -> ArrowSample:
        """Return a sample, not read yet."""
        group, at, where = self._place(number)
        return ArrowSample(
            key=f"{number:09d}",
            where=where,
            group=group,
            at=at,
            number=number,
            media=self._media,
            columns=self.columns,
            layout=layout,
            is_chat=self._is_chat,
        )

    def propose(self) -> Layout:
        """Say what the rows seem to be."""
        return propose_layout(first_rows(self, _JUDGED_BY))

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Return the columns with media, judging by the first rows."""
        return file_columns(self._first, self._media, self.where)

    @cached_property
    def _is_chat(self) -> bool:
        return any(is_conversation(values) for values in self._first)

    @cached_property
    def _first(self) -> list[Mapping[str, Any]]:
        first = []
        for number in range(min(_JUDGED_BY, len(self))):
            with suppress(SourceError):  # said when it is read
                first.append(self._values(number))
        return first

    def _values(self, number: int) -> Mapping[str, Any]:
        """Return the values of a row; the first rows, which are looked at again and again, are read once."""
        values = self._seen.get(number)
        if values is None:
            group, at, where = self._place(number)
            with located(where):
                values = values_at(group, at)
            if number < LOOKED_AT:
                self._seen[number] = values
        return values

    def _place(self, number: int) -> tuple[Group, int, str]:
        place = bisect_right(self._starts, number) - 1
        group = self._groups[place]
        at = number - self._starts[place]
        inside = f", row group {group.group}" if group.group >= 0 else ""
        return group, at, f"{group.path}{inside}, row {at}"


def open_parquet(path: Path, media: Path | None) -> ArrowSource:
    """Open a parquet file, or all below a folder; names like `train-00000-of-00004.parquet` are a split."""
    root = path.parent if path.is_file() else path
    return ArrowSource(root, [(part, groups_of(file)) for part, file in parquet_files(path)], media, "parquet")


def open_saved(path: Path, media: Path | None) -> ArrowSource:
    """Open what `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    files = [(part, groups_of(file)) for part, file in saved_files(path)]
    return ArrowSource(path, files, media, "Hugging Face dataset")


def open_remote(where: str, root: str, files: Mapping[str, Stamp], folder: str = "") -> ArrowSource:
    """Open parquet files by names below a URL, with their stamps; only the rows requested are read.

    Names tell the split below `folder`.
    """
    below = [PurePosixPath(name).relative_to(folder) for name in files]
    named = [(part, str(folder / name)) for part, name in parts_of(below, where)]
    store = open_store(root)
    groups = far_groups(store, [name for _, name in named], [files[name] for _, name in named])
    return ArrowSource(where, list(zip((part for part, _ in named), groups, strict=True)), store, "parquet")


def parquet_files(path: Path) -> list[tuple[str, Path]]:
    """Return split part (empty without splits) and path of a parquet file, or of those below a folder.

    Raises SourceError if names tell no clear split.
    """
    if path.is_file():
        return [("", path)]
    names = [one.relative_to(path) for one in path.rglob("*.parquet") if one.is_file()]
    return [(part, path / name) for part, name in parts_of(names, str(path))]


def parts_of(names: Iterable[PurePath], where: str) -> list[tuple[str, PurePath]]:
    """Return split part (empty without splits) and name of the files that are taken; raises what `split_files` does."""
    found = split_files(names, where)
    if found.left_out:
        _warn_of_left_out(where, len(found.left_out), len(found.left_out) + len(found.files), str(found.left_out[0]))
    return found.files


@cache
def _warn_of_left_out(where: str, count: int, total: int, first: str) -> None:
    _logger.warning(
        "%s: %d of %d parquet files %s not taken, such as %s: hidden, or not named for a split, as others are",
        *(where, count, total, "is" if count == 1 else "are", first),
    )


def is_saved(store: Store) -> bool:
    """Return whether Hugging Face's library saved a dataset below the root of a store.

    Others call files `state.json`, too: it is one of the library if it says so, or if arrow files lie beside it.
    """
    there = [(name, said) for name, said in zip(SAVED, ("splits", "_data_files"), strict=True) if store.exists(name)]
    for name, said in there:
        with suppress(ValueError):
            content = json.loads(store.read(name))
            if isinstance(content, dict) and isinstance(content.get(said), list):
                return True
    with suppress(StorageError):  # a web server cannot list
        return bool(there) and bool(store.list(".arrow"))
    return False


def saved_files(path: Path) -> list[tuple[str, Path]]:
    """Return split part (empty without splits) and path of the files that `save_to_disk` wrote."""
    return [(part, path / name) for part, name in saved_names(open_store(path))]


def saved_names(store: Store) -> list[tuple[str, str]]:
    """Return split part and name of the files that `save_to_disk` wrote below the root of a store.

    Raises SourceError if they say that in no way that is known.
    """
    splits = {"": ""}
    if store.exists(SAVED[0]):
        names = _saved_list(store, SAVED[0], "splits")
        splits = {part: f"{name}/" for name, part in named_parts(names).items()}
    files = []
    for part in sorted(splits, key=part_order):
        state = f"{splits[part]}{SAVED[1]}"
        taken = [splits[part] + name for name in _saved_list(store, state, "_data_files")]
        if json.loads(store.read(state)).get("_indices_data_files"):
            where = store.url(splits[part].rstrip("/"))
            raise SourceError(f"{where}: has indices; call `flatten_indices()` before `save_to_disk`.")
        files += [(part, name) for name in taken]
    return files


def _saved_list(store: Store, name: str, said: str) -> list[str]:
    """Return the names that a file of `save_to_disk` lists; raises SourceError."""
    try:
        listed = json.loads(store.read(name))[said]
        names = [one["filename"] if isinstance(one, dict) else one for one in listed]
        if isinstance(listed, list) and all(isinstance(one, str) for one in names):
            return names
    except (ValueError, TypeError, KeyError, ShardMissingError):
        pass
    raise SourceError(
        f"{store.url(name)}: has no `{said}` as `save_to_disk` writes them. If another program wrote the file, move it "
        "away; else save the dataset again."
    )


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


def _parquet_groups(path: str, stamp: Stamp, metadata: Any, store: Store | None = None) -> list[Group]:
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
def parquet_file(path: str, stamp: Stamp) -> Any:
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


# Files behind URLs ----------------------------------------------------------------------------------------------------

TAIL_BYTES = 64 << 10  # at the end of a parquet file that nearly always hold its metadata
_TAILS = 128  # read at once
_HEAD = 4 << 10  # bytes in which the head of a record batch nearly always ends
_MAGIC = b"ARROW1\0\0"
_SCHEMA, _BATCH = 1, 3  # kinds of messages


def sizes_of(store: Store, names: Sequence[str]) -> list[int]:
    """Return the sizes of files in bytes; raises ShardMissingError."""
    far = as_far(store)
    return [store.size(name) for name in names] if far is None else list(far.sizes(names))


def far_groups(store: Store, names: Sequence[str], stamps: Sequence[Stamp]) -> list[list[Group]]:
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


def _arrow_groups(store: Store, path: str, stamp: Stamp) -> list[Group]:
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
        window = store.read_range(rel, start, min(_HEAD, size - start))
        if not start and window.startswith(_MAGIC):
            start = len(_MAGIC)
            continue
        mark, length = struct.unpack_from("<II", window)
        if mark != 0xFFFFFFFF or start + 8 + length > size:
            raise SourceError(f"{path}: is no arrow file from byte {start} on. Was the upload cut off?")
        if not length:
            break  # the end of the batches
        if 8 + length > len(window):
            window = store.read_range(rel, start, 8 + length)
        kind, rows, content = _message(window[8 : 8 + length])
        if kind == _SCHEMA:
            schema = arrow.ipc.read_schema(arrow.py_buffer(window[: 8 + length]))
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
