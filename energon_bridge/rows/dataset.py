"""Parquet files and Hugging Face datasets on disk as datasets, read sample by sample without conversion.

A row becomes the same sample as after `energon convert` with the same layout: the same fields, decoded in the same
way, with the row number as its key. The layout is proposed from the columns of the first rows, or given by a
`.nv-meta/dataset.yaml` in the folder of the files, whose field map names columns:

    sample_type: {__module__: megatron.energon, __class__: CaptioningSample}
    field_map: {image: image, caption: "captions[0]"}

A file is a shard. The fingerprint hashes names, rows and bytes of the files, and the layout. Samples of a parquet file
are in *row groups*, which can only be read whole. So slices have the size of a group (`group_rows`), few of them are
open at a time, and a process keeps the groups that it read last.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from energon_bridge.errors import (
    ConfigurationError,
    CorruptShardError,
    DatasetNotFoundError,
    EmptyDatasetError,
    FieldMapError,
    MetadataError,
    ShardMissingError,
    SourceError,
    UnknownArgumentError,
    UnknownSplitError,
    did_you_mean,
)
from energon_bridge.format.dataset import PreparedDataset
from energon_bridge.format.dataset_config import DatasetConfigs
from energon_bridge.format.field_map import FieldMap
from energon_bridge.format.nvmeta import DEFAULT_DATASET_CONFIG, INFO_JSON, INFO_YAML, meta_path
from energon_bridge.rng import IntArray
from energon_bridge.rows.arrow import (
    ArrowSource,
    Group,
    groups_of,
    is_saved,
    parquet_file,
    parquet_files,
    pyarrow_modules,
    read_table,
    row_of,
    saved_files,
    stamp_of,
    table_of,
)
from energon_bridge.rows.base import Layout, check_layout, lay_out
from energon_bridge.rows.lists import CONVERSATIONS
from energon_bridge.samples import sample_type_by_name
from energon_bridge.storage import Store, open_store

_SUFFIXES = (".parquet", ".arrow")
_VERSION = 1
_AT_ONCE = 64
_KEPT_BYTES = 1 << 30
"""Bytes of row groups that a process keeps; a single large group may exceed it."""
_AGAIN_ROWS, _AGAIN_TIMES = 8, 16
"""Rows decoded again for each row used, and groups decoded again, that trigger a warning."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDataset(PreparedDataset):
    """The rows of some files.

    Attributes:
        layout: How rows become samples.
        columns: All columns.
        wanted: The columns to read; empty: all.
        media_columns: Columns that contain media.
        group_rows: Rows of the largest row group; 0 for arrow files, whose rows can be read one by one.
    """

    key_format: ClassVar[str | None] = "{:09d}"

    layout: Layout
    columns: tuple[str, ...]
    wanted: tuple[str, ...]
    media_columns: tuple[str, ...]
    group_rows: int

    @property
    def index_remedy(self) -> str:
        """The remedy for a wrong index: a table has none, so write the file again."""
        return "Write the file again."


def is_table(path: str | os.PathLike[str]) -> bool:
    """Return whether a path names a parquet or arrow file, judging by its name."""
    return os.fspath(path).endswith(_SUFFIXES)


def has_tables(path: str | os.PathLike[str]) -> bool:
    """Return whether a local path is a parquet or arrow file, a folder of parquet files, or a saved dataset."""
    here = Path(os.fspath(path))
    if "://" in str(path):
        return False
    if here.is_file():
        return is_table(path)
    return here.is_dir() and (is_saved(here) or next(here.rglob("*.parquet"), None) is not None)


def is_unprepared_table(path: str | os.PathLike[str]) -> bool:
    """Return whether a local path has tables and is not a prepared dataset."""
    meta = Path(os.fspath(path)) / ".nv-meta"
    return has_tables(path) and not any((meta / name).exists() for name in (INFO_JSON, INFO_YAML))


def open_tables(
    path: str | os.PathLike[str], *, split_part: str, dataset_config: str = DEFAULT_DATASET_CONFIG
) -> TableDataset:
    """Open a parquet or arrow file, or a folder of them; without its own splits, any part means all rows.

    Raises:
        DatasetNotFoundError: There is none.
        UnknownSplitError, EmptyDatasetError: There is no such part, or it is empty.
        SourceError: A file is damaged, or its rows cannot become samples.
        MetadataError, FieldMapError: The dataset.yaml is wrong.
    """
    text = os.fspath(path)
    if "://" in text:
        raise DatasetNotFoundError(
            f"{text}: parquet and arrow files can only be read from local disks. Copy the file, or convert it to "
            "shards with `energon convert`."
        )
    here = Path(os.path.abspath(os.path.expanduser(text)))
    if not here.exists():
        raise DatasetNotFoundError(f"{here}: no such file or folder. Check the path.")
    files = _files(here)
    known = list(dict.fromkeys(part for part, _ in files))
    chosen = [file for part, file in files if part in ("", split_part)]
    if not chosen:
        raise UnknownSplitError(f"{here}: no split part {split_part!r}. Known split parts: {', '.join(known)}.")
    root = here.parent if here.is_file() else here
    groups = [groups_of(file) for file in chosen]
    source = ArrowSource(root, [("", of_file) for of_file in groups], None, "table")
    counts = [sum(group.num_rows for group in of_file) for of_file in groups]
    if not sum(counts):
        raise EmptyDatasetError(f"{here}: the files of the split part {split_part!r} have no rows.")
    store = open_store(str(root))
    layout, subflavors = _said(store, dataset_config)
    layout = layout or source.propose()
    check_layout(layout)
    names = [str(file.relative_to(root)) for file in chosen]
    columns = _columns_of(chosen)
    for access in layout.fields.values():
        column = access.partition("[")[0]
        if column not in {*columns, *_labelled(groups[0])}:
            found = f"has no column {column!r}, which the layout maps to a field.{did_you_mean(column, columns)}"
            raise FieldMapError(f"{here}: {found} It has {', '.join(columns)}.")
    wanted = {access.partition("[")[0] for access in layout.fields.values()}
    if any(name in columns for name in CONVERSATIONS) or not wanted <= {*columns}:
        wanted = set()  # labels come with names, and conversations name their media
    sizes = [file.stat().st_size for file in chosen]
    said = [layout.sample_type, sorted(layout.fields.items()), sorted(layout.bare), list(source.columns)]
    content = json.dumps([_VERSION, "table", names, counts, sizes, said], separators=(",", ":"))
    sample_type = sample_type_by_name(layout.sample_type)
    table_of.cache_clear()  # release the rows that were looked at
    return TableDataset(
        path=str(here),
        store=store,
        split_part=split_part if "" not in known else "",
        shard_names=tuple(names),
        shard_counts=np.array(counts, dtype=np.int64),
        shard_sizes=np.array(sizes, dtype=np.int64),
        excluded=frozenset(),
        sample_type=sample_type,
        field_map=None,
        sample_loader=None,
        part_filter=None,
        subflavors=subflavors,
        fingerprint=hashlib.sha256(content.encode()).hexdigest(),
        num_samples=sum(counts),
        layout=layout,
        columns=columns,
        wanted=tuple(name for name in columns if name in wanted),
        media_columns=source.columns,
        group_rows=max(group.num_rows if group.group >= 0 else 0 for of_file in groups for group in of_file),
    )


def table_parts(path: str | os.PathLike[str]) -> list[str]:
    """Return the split parts of a parquet or arrow file or a folder of them; one empty name without splits."""
    here = Path(os.path.abspath(os.path.expanduser(os.fspath(path))))
    return list(dict.fromkeys(part for part, _ in _files(here)))


def _files(here: Path) -> list[tuple[str, Path]]:
    if here.suffix == ".arrow":
        return [("", here)]
    return saved_files(here) if is_saved(here) else parquet_files(here)


def _said(store: Store, name: str) -> tuple[Layout | None, dict[str, Any]]:
    """Return the layout and subflavors from a dataset.yaml beside the files."""
    if not store.exists(meta_path(name)):
        return None, {}
    config = DatasetConfigs().read(store, name)
    kind, where = config.form.sample_type, store.url(meta_path(name))
    if config.form.sample_loader is not None or (config.form.part_filter is not None and not config.form.field_map):
        raise MetadataError(f"{where}: a sample_loader needs parts, but a table has columns: use a field_map.")
    try:
        known = sample_type_by_name(kind.__name__)
    except UnknownArgumentError:
        known = None
    if known is not kind:
        raise MetadataError(
            f"{where}: {kind.__name__} is not a sample type of energon_bridge. Remove the file and turn crude "
            "samples into yours with a cooker of the task encoder."
        )
    fields = {} if config.form.field_map is None else config.form.field_map.fields
    return Layout(sample_type=kind.__name__, fields=fields), config.subflavors


def _columns_of(files: Sequence[Path]) -> tuple[str, ...]:
    """Return the columns of files; raises SourceError if they differ."""
    found: tuple[str, ...] = ()
    for file in files:
        schema = (
            parquet_file(str(file), stamp_of(file)).schema_arrow if _is_parquet(file) else read_table(str(file)).schema
        )
        if found and tuple(schema.names) != found:
            raise SourceError(
                f"{file}: has the columns {', '.join(schema.names)}, but {files[0]} has {', '.join(found)}."
            )
        found = tuple(schema.names)
    return found


def _is_parquet(file: Path) -> bool:
    return file.suffix == ".parquet"


def _labelled(groups: Sequence[Group]) -> set[str]:
    """Return the columns whose labels have names."""
    return {"label_name" if name == "label" else f"{name}_name" for group in groups for name, _ in group.labels}


def read_values(dataset: TableDataset, column: str) -> np.ndarray:
    """Return a column of numbers or texts, for a filter, shape (samples,).

    Raises:
        ConfigurationError: It has other values, or none in some rows.
    """
    arrow = pyarrow_modules()
    chunks: list[Any] = []
    for name in dataset.shard_names:
        path = Path(dataset.store.root) / name
        if _is_parquet(path):
            table = parquet_file(str(path), stamp_of(path)).read(columns=[column], use_threads=False)
        else:
            table = read_table(str(path))
        chunks += table.column(column).chunks
    values = arrow.chunked_array(chunks)
    types, kind = arrow.types, values.type
    text = types.is_string(kind) or types.is_large_string(kind)
    if not (text or types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise ConfigurationError(
            f"{dataset.path}: the column {column!r} is {kind}, but filters take numbers and texts."
        )
    if values.null_count:
        raise ConfigurationError(
            f"{dataset.path}: the column {column!r} has no value in {values.null_count} of {len(values)} rows, so "
            "it cannot be used in a filter."
        )
    return np.array(values.to_pylist()) if text else np.asarray(values.to_numpy())


# Reading --------------------------------------------------------------------------------------------------------------


class TableRow:
    """A row that has been read: its key, its parts, and the accesses of its fields."""

    __slots__ = ("fields", "key", "parts")

    def __init__(self, key: str, parts: dict[str, Any], fields: Mapping[str, str]) -> None:
        self.key = key
        self.parts = parts
        self.fields = fields

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))


class TableRows:
    """Reads rows by number; thread-safe."""

    def __init__(self, dataset: TableDataset) -> None:
        self._dataset = dataset
        self._ends = np.cumsum(dataset.shard_counts)
        self._media = Path(dataset.store.root)
        self._groups: dict[int, tuple[list[Group], list[int]]] = {}
        self._lock = threading.Lock()

    def read(self, indices: IntArray) -> list[TableRow | Exception]:
        """Return rows in the order given, or the error of a bad one; each group is read once.

        Raises:
            ShardMissingError, CorruptShardError: A file is gone or damaged.
        """
        out: list[TableRow | Exception] = [SourceError("not read")] * indices.size
        wanted: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for place, index in enumerate(indices.tolist()):
            shard = int(np.searchsorted(self._ends, index, side="right"))
            local = index - int(self._ends[shard] - self._dataset.shard_counts[shard])
            _, firsts = self._groups_of(shard)
            number = bisect_right(firsts, local) - 1
            wanted.setdefault((shard, number), []).append((place, local - firsts[number]))
        for (shard, number), rows in wanted.items():
            group = self._groups_of(shard)[0][number]
            batches = _read(group, self._dataset.wanted, len(rows))
            for place, at in rows:
                first, columns = batches[bisect_right(batches, at, key=_first) - 1]
                values = {name: column[at - first].as_py() for name, column in columns}
                where = f"{group.path}{f', row group {group.group}' if group.group >= 0 else ''}, row {at}"
                out[place] = self._row(values, where, int(indices[place]), group)
        return out

    def _row(self, values: dict[str, Any], where: str, number: int, group: Group) -> TableRow | Exception:
        dataset = self._dataset
        try:
            row = row_of(values, where, self._media, dataset.media_columns, group.labels)
            sample = lay_out(row, dataset.layout, number)
            parts, fields = sample.read()
        except SourceError as error:
            return error
        return TableRow(sample.key, {name: memoryview(data) for name, data in parts}, fields)

    def _groups_of(self, shard: int) -> tuple[list[Group], list[int]]:
        with self._lock:
            found = self._groups.get(shard)
            if found is None:
                path = self._media / self._dataset.shard_names[shard]
                if not path.exists():
                    raise ShardMissingError(f"{path}: the file is gone. Put it back.")
                groups = _groups_at(path)
                if groups and groups[0].stamp[0] != self._dataset.shard_sizes[shard]:
                    raise CorruptShardError(f"{path}: the file changed after it was opened. Open the dataset again.")
                counts = [group.num_rows for group in groups]
                if sum(counts) != self._dataset.shard_counts[shard]:
                    raise CorruptShardError(f"{path}: its rows changed after it was opened. Open the dataset again.")
                firsts = (np.cumsum(counts) - counts).tolist()
                found = self._groups[shard] = groups, firsts
            return found


def samples_of_tables(dataset: TableDataset, shard: int) -> Iterator[TableRow | Exception]:
    """Yield all rows of a file, or the error of a bad one; raises the errors of `TableRows.read`."""
    rows = TableRows(dataset)
    first = int(dataset.shard_counts[:shard].sum())
    numbers = np.arange(first, first + int(dataset.shard_counts[shard]))
    for start in range(0, numbers.size, _AT_ONCE):
        yield from rows.read(numbers[start : start + _AT_ONCE])


def _groups_at(path: Path) -> list[Group]:
    try:
        return groups_of(path)
    except SourceError as error:
        raise CorruptShardError(str(error)) from error


Batches = list[tuple[int, list[tuple[str, Any]]]]
"""The record batches of a group: number of the first row, and the columns with their names."""


def _first(batch: tuple[int, Any]) -> int:
    return batch[0]


class _Kept:
    """The row groups that a process read last, across all its datasets."""

    def __init__(self) -> None:
        self._groups: OrderedDict[tuple[Group, tuple[str, ...]], tuple[Batches, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._seen: set[int] = set()
        self._rows = self._rows_again = self._times_again = 0
        self._has_warned = False

    def get(self, group: Group, columns: tuple[str, ...], rows: int) -> Batches:
        """Return some columns of a group; the caller uses `rows` of its rows."""
        place = group, columns
        with self._lock:
            self._rows += rows
            found = self._groups.get(place)
            if found is not None:
                self._groups.move_to_end(place)
                return found[0]
        file = parquet_file(group.path, group.stamp)
        table = file.read_row_group(group.group, columns=list(columns) or None, use_threads=False)
        batches = _batches(table)
        with self._lock:
            self._count(group, hash(place), table.nbytes)
            if place not in self._groups:
                self._groups[place] = batches, table.nbytes
                self._bytes += table.nbytes
                while self._bytes > _KEPT_BYTES and len(self._groups) > 1:
                    self._bytes -= self._groups.popitem(last=False)[1][1]
        return batches

    def _count(self, group: Group, place: int, size: int) -> None:
        """Count what is decoded again, and warn once if that is most of the work."""
        if place not in self._seen:
            self._seen.add(place)
            return
        self._rows_again += group.num_rows
        self._times_again += 1
        if self._has_warned or self._times_again < _AGAIN_TIMES or self._rows_again < _AGAIN_ROWS * self._rows:
            return
        self._has_warned = True
        _logger.warning(
            "%s: %d rows are decoded again for each row used, because a process keeps %d MiB of row groups, but one "
            "of these has %.0f. Save the rows as an arrow dataset (datasets' save_to_disk), convert them to shards "
            "(energon convert %s OUT), or write the files with smaller row groups (row_group_size=100).",
            group.path,
            self._rows_again // self._rows,
            _KEPT_BYTES >> 20,
            size / 2**20,
            os.path.dirname(group.path),
        )

    def forget(self) -> None:
        """Forget everything: for a forked process, whose parent may hold the lock."""
        self.__init__()  # type: ignore[misc]


_KEPT = _Kept()
os.register_at_fork(after_in_child=_KEPT.forget)


def _read(group: Group, columns: tuple[str, ...], rows: int) -> Batches:
    """Return some columns of a group (all if none is named) to use `rows` rows of; raises CorruptShardError."""
    arrow = pyarrow_modules()
    try:
        return _KEPT.get(group, columns, rows) if group.group >= 0 else _mapped(group, columns)
    except (OSError, arrow.ArrowException) as error:
        raise CorruptShardError(f"{group.path}: cannot be read: {error}") from error


@lru_cache(maxsize=64)
def _mapped(group: Group, columns: tuple[str, ...]) -> Batches:
    table = read_table(group.path)
    return _batches(table.select(columns) if columns else table)


def _batches(table: Any) -> Batches:
    found: Batches = []
    first = 0
    for batch in table.to_batches():
        found.append((first, list(zip(batch.schema.names, batch.columns, strict=True))))
        first += batch.num_rows
    return found


@lru_cache(maxsize=256)
def compiled(fields: tuple[tuple[str, str], ...]) -> FieldMap:
    """Return the field map for the accesses of a row; cached, since the rows of a file share few maps."""
    return FieldMap(dict(fields))
