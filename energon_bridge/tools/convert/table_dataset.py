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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from energon_bridge.core.errors import (
    CorruptShardError,
    DatasetNotFoundError,
    EmptyDatasetError,
    FieldMapError,
    MetadataError,
    ShardMissingError,
    SkipSample,
    SourceError,
    StorageError,
    UnknownArgumentError,
    UnknownSplitError,
    did_you_mean,
)
from energon_bridge.core.format.dataset_config import DatasetConfigs
from energon_bridge.core.format.foreign import ForeignDataset, ForeignFormat, ForeignRow
from energon_bridge.core.format.nvmeta import DEFAULT_DATASET_CONFIG, meta_path
from energon_bridge.core.order.rng import IntArray
from energon_bridge.core.samples import sample_type_by_name
from energon_bridge.core.storage import OpenFiles, Store, open_store
from energon_bridge.core.storage.forks import PerProcess
from energon_bridge.models.conversations.questions import name_column
from energon_bridge.models.conversations.turns import CONVERSATIONS, find_pair
from energon_bridge.models.conversations.unused import is_filled, name_unused_fields
from energon_bridge.models.conversations.withheld import NESTED, is_held_out, is_rejecting, may_reject, split_columns
from energon_bridge.tools.convert.arrow import (
    ArrowSource,
    is_saved,
    of_log,
    parquet_files,
    parts_of,
    row_of,
    saved_files,
    saved_names,
)
from energon_bridge.tools.convert.conversations import as_source, by_options, check_cut
from energon_bridge.tools.convert.lists import answers_of, check_beside, check_media_meant, check_whole, unused
from energon_bridge.tools.convert.row_groups import (
    TAIL_BYTES,
    Batches,
    Group,
    batch_at,
    batches_of,
    column_of_groups,
    far_groups,
    groups_of,
    hash_of_tail,
    pyarrow_modules,
    read_group,
    read_rows,
    release_tables,
    sizes_of,
    some_of,
)
from energon_bridge.tools.convert.rows import Layout, MediaRoot, Row, check_layout, first_rows, lay_out, located
from energon_bridge.tools.convert.table_values import ValueReader, numbers_or_texts

_SUFFIXES = (".parquet", ".arrow")
_VERSION = 1
_LEFT_OUT = (
    "Convert the table (energon convert) with --ignore COLUMN, or with the text of the question (--question), or name "
    "the type and its columns in .nv-meta/dataset.yaml."
)
_KEPT_BYTES = 1 << 30
"""Bytes of row groups that a process keeps; a single large group may exceed it."""
_REPEATED_ROWS, _REPEATED_GROUPS = 8, 16
"""Rows decoded again for each row used, and groups decoded again, that trigger a warning."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDataset(ForeignDataset):
    """The rows of some files.

    Attributes:
        layout: How rows become samples.
        wanted: The columns to read; empty: all.
        media_columns: Columns that contain media.
    """

    layout: Layout
    wanted: tuple[str, ...]
    media_columns: tuple[str, ...]

    def open_rows(self) -> TableRows:
        """Return a new reader of the rows; row groups that were read last are shared."""
        return TableRows(self)

    def read_values(self, column: str) -> np.ndarray:
        return _read_values(self, column)


def is_table(path: str | os.PathLike[str]) -> bool:
    """Return whether a path names a parquet or arrow file, judging by its name."""
    return os.fspath(path).endswith(_SUFFIXES)


def has_tables(path: str | os.PathLike[str]) -> bool:
    """Return whether a path or URL is such a file, or a folder of parquet files or of a saved dataset.

    A web server cannot list its files: there, parquet files are found by their own names only. Parquet files of the
    names of tars, as img2dataset writes them, are no tables: they say what is in the tars.
    """
    if _is_far(path):
        if is_table(path):
            return True
        store = open_store(path)
        try:
            if is_saved(store):
                return True
            names = [name for name, _ in store.list(".parquet")]
            return bool(names) and not store.exists(f"{names[0].removesuffix('.parquet')}.tar")
        except (StorageError, DatasetNotFoundError):
            return False
    here = Path(_local(path))
    if here.is_file():
        return is_table(path)
    if not here.is_dir():
        return False
    first = next(here.rglob("*.parquet"), None)
    return is_saved(open_store(here)) or (first is not None and not first.with_suffix(".tar").exists())


def _wanted_columns(layout: Layout, columns: Sequence[str], labels: Collection[str], here: str) -> set[str]:
    """Return the columns that fields come from, none if all are needed; raises FieldMapError for a missing one."""
    wanted = [access.partition("[")[0] for access in layout.fields.values()]
    for column in wanted:
        if column not in columns and column not in labels:
            mistake = f"has no column {column!r}, which a field is to come from.{did_you_mean(column, columns)}"
            raise FieldMapError(f"{here}: {mistake} It has {', '.join(columns)}.")
    if any(name in columns for name in CONVERSATIONS) or not {*wanted} <= {*columns}:
        return set()  # labels have names of their own, and conversations name their media
    return {*wanted}


def _name_unused(here: str, rows: Sequence[Row], layout: Layout) -> None:
    """Warn of columns that the type has no fields for; what conversations do not use is named when they are read."""
    if not layout.is_crude:
        filled = {name: value for row in rows for name, value in row.values.items() if is_filled(value)}
        left = {name: filled[name] for _, names in unused(rows, layout) for name in names if name in filled}
        name_unused_fields(here, layout.sample_type, left)


def open_tables(
    path: str | os.PathLike[str],
    *,
    split_part: str,
    dataset_config: str = DEFAULT_DATASET_CONFIG,
    open_files: OpenFiles | None = None,
) -> TableDataset:
    """Open a parquet or arrow file, or a folder of them; without its own splits, any part means all rows.

    `path` may be a URL. `open_files` has the time limit of its reads.

    Raises:
        DatasetNotFoundError: There is none.
        UnknownSplitError, EmptyDatasetError: There is no such part, or it is empty.
        SourceError: A file is damaged, or its rows cannot become samples.
        MetadataError, FieldMapError: The dataset.yaml is wrong.
    """
    here, store, files = _files(path, open_files)
    known = list(dict.fromkeys(part for part, _ in files))
    names = [name for part, name in files if part in ("", split_part)]
    if not names:
        raise UnknownSplitError(f"{here}: no split part {split_part!r}. Known split parts: {', '.join(known)}.")
    groups, sizes = _groups_at(store, names)
    source = ArrowSource(
        store.root, [("", of_file) for of_file in groups], store if _is_far(store.root) else None, "table"
    )
    counts = [sum(group.num_rows for group in of_file) for of_file in groups]
    if not sum(counts):
        raise EmptyDatasetError(f"{here}: the files of the split part {split_part!r} have no rows.")
    layout, subflavors = _layout_beside(store, dataset_config)
    if layout is None:
        meant = "name the columns that are taken in the field map of .nv-meta/dataset.yaml."
        rows = first_rows(source)
        check_media_meant(rows, f"take the rows without them: {meant}")
        check_whole(rows, f"learn the texts alone: {meant}")
        layout = replace(source.propose(), answers_as=answers_of(rows))
        check_beside(rows, layout, _LEFT_OUT)
        _name_unused(here, rows, layout)
        for row in () if layout.is_crude else rows:
            with located(row.where), as_source():
                check_cut(row, layout)
    layout = replace(layout, in_place=True)
    check_layout(layout)
    columns = _column_names(groups)
    wanted = _wanted_columns(layout, columns, _labelled(next(filter(None, groups))), here)
    chosen = [layout.sample_type, sorted(layout.fields.items()), sorted(layout.bare), list(source.columns)]
    questions = [layout.answers_as] * (layout.answers_as is not None)
    content = json.dumps([_VERSION, "table", names, counts, sizes, [*chosen, *questions]], separators=(",", ":"))
    sample_type = sample_type_by_name(layout.sample_type)
    nested = _nested_splits(next(filter(None, groups)), columns) if "" in known else ()
    splits = (*split_columns(columns), *nested) if "" in known else ()
    withheld = _withheld(here, columns, splits, groups, wanted)
    release_tables()  # that were looked at
    return TableDataset(
        path=here,
        store=store,
        split_part=split_part if "" not in known else "",
        shard_names=tuple(names),
        shard_counts=np.array(counts, dtype=np.int64),
        shard_sizes=np.array(sizes, dtype=np.int64),
        sample_type=sample_type,
        subflavors=subflavors,
        fingerprint=hashlib.sha256(content.encode()).hexdigest(),
        num_samples=sum(counts),
        layout=layout,
        seen_ends=tuple(_seen_end(store, of_file) for of_file in groups),
        withheld=withheld,
        fields=layout.fields,
        columns=(*columns, *nested),
        wanted=tuple(name for name in columns if name in wanted),
        media_columns=source.columns,
        group_rows=max(group.num_rows if group.group >= 0 else 0 for of_file in groups for group in of_file),
    )


def _nested_splits(groups: Sequence[Group], columns: Sequence[str]) -> tuple[str, ...]:
    """Return the columns inside of metadata, such as `metadata.split`, that may say of which split a row is."""
    found: list[str] = []
    for name in (name for name in NESTED if name in columns):
        kinds = [chunk.type for chunk in column_of_groups(groups[:1], name)]
        inner = tuple(str(field.name) for kind in kinds[:1] if str(kind).startswith("struct") for field in kind)
        found += [f"{name}.{column}" for column in split_columns(inner)]
    return (*found,)


def _withheld(
    here: str, columns: Sequence[str], splits: Sequence[str], files: Sequence[Sequence[Group]], wanted: Collection[str]
) -> dict[str, str]:
    """Return the columns that say that some rows are held out or rejected, each with the complaint about it.

    `splits` are those that may say of which split a row is.
    """
    taken = {*wanted, *(find_pair(dict.fromkeys(columns, "text")) or ())}
    faults: dict[str, str] = {}
    for column in splits:
        values = {} if column in taken else _seen_values(files, column)
        said = {value: is_held_out(column.rpartition(".")[2], name) for value, name in values.items()}
        if {True, False} <= {*said.values()}:
            shown = ", ".join(sorted(str(name) for name in values.values())[:5])
            held_out, learned = ([value for value in values if said[value] is one] for one in (True, False))
            rule = f"== {learned[0]!r}" if len(learned) == 1 else _none_of(held_out)
            faults[column] = _unfiltered(here, column, f"says that rows are of several splits ({shown})", rule)
            break
    for column in filter(may_reject, columns):
        values = {} if column in taken else _seen_values(files, column)
        if rejected := [value for value, name in values.items() if is_rejecting(column, name, columns)]:
            what = f"says that annotators rejected rows ({values[rejected[0]]})"
            faults[column] = _unfiltered(here, column, what, _none_of(rejected))
    return faults


def _none_of(values: Sequence[Any]) -> str:
    return f"!= {values[0]!r}" if len(values) == 1 else f"not in {[*values]!r}"


def _unfiltered(here: str, column: str, what: str, rule: str) -> str:
    name = column if column.isidentifier() else f"`{column}`"
    return (
        f"{here}: the column `{column}` {what}, and all rows would be taken. Say which, by a filter that names the "
        f'column (in a mix, `filter:` beside the path): filter="{name} {rule}" takes those to be learned, '
        f'filter="{name} == {name}" all.'
    )


def _seen_values(files: Sequence[Sequence[Group]], column: str) -> dict[Any, Any]:
    """Return the values of a column, each with its name if it is a label; of texts that are no names, nothing.

    All groups of local files are looked at; of parquet files behind URLs some, of arrow files there the first and last.
    """
    groups = [group for of_file in files for group in of_file if group.num_rows]
    if _is_far(groups[0].path):
        groups = [groups[at] for at in some_of(len(groups), is_arrow=bool(groups[0].span[1]))]
    names = dict(groups[0].labels).get(column, ())
    seen: dict[Any, Any] = {}
    for some in _read_together(groups):
        if column.partition(".")[0] not in some[0].columns:
            continue
        chunks = pyarrow_modules().chunked_array(column_of_groups(some, column))
        kind = str(chunks.type)
        kind = str(chunks.type.value_type) if kind.startswith("dictionary") else kind
        first = chunks.slice(0, 100).to_pylist()
        if not kind.startswith(_NAMES) or any(isinstance(one, str) and len(one) > _LONGEST_NAME for one in first):
            return {}
        unique = (chunks.cast("string") if kind == "string_view" else chunks).unique()
        if len(unique) > _MOST_NAMES:
            return {}
        for value in unique.to_pylist():
            seen[value] = names[value] if isinstance(value, int) and 0 <= value < len(names) else value
    return seen


_LONGEST_NAME = 60
_MOST_NAMES = 10_000
_NAMES = ("bool", "int", "uint", "float", "double", "string", "large_string")
_ROWS_AT_ONCE = 1 << 20


def _read_together(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Yield groups of one file, of about a million rows at once; arrow files one by one."""
    some: list[Group] = []
    for group in groups:
        is_next = some and some[0].path == group.path and group.path.endswith(".parquet")
        if some and (not is_next or sum(one.num_rows for one in some) > _ROWS_AT_ONCE):
            yield some
            some = []
        some.append(group)
    if some:
        yield some


def table_parts(path: str | os.PathLike[str]) -> list[str]:
    """Return the split parts of a parquet or arrow file or a folder of them; one empty name without splits."""
    return list(dict.fromkeys(part for part, _ in _files(path)[2]))


def open_far_source(url: str) -> ArrowSource:
    """Open a parquet or arrow file behind a URL, or a folder of them, row by row; raises what `open_tables` raises."""
    here, store, files = _files(url)
    groups, _ = _groups_at(store, [name for _, name in files])
    parts = [part for part, _ in files]
    return ArrowSource(here, list(zip(parts, groups, strict=True)), store, "table")


def _is_far(path: str | os.PathLike[str]) -> bool:
    return "://" in os.fspath(path) and not os.fspath(path).startswith("file://")


def _local(path: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.path.expanduser(os.fspath(path).removeprefix("file://")))


def _files(
    path: str | os.PathLike[str], open_files: OpenFiles | None = None
) -> tuple[str, Store, list[tuple[str, str]]]:
    """Return the full path or URL, the store of its folder, and split part and name of each file."""
    if _is_far(path):
        here = os.fspath(path).rstrip("/")
        folder, _, name = here.rpartition("/")
        if is_table(here) and open_store(folder, files=open_files).exists(name):
            return here, open_store(folder, files=open_files), [("", name)]
        store = open_store(here, files=open_files)
        if is_saved(store):
            return here, store, saved_names(store)
        if is_table(here):
            store.check_root()  # says that neither is there
        if any(store.exists(f"_delta_log/{name}") for name in ("_last_checkpoint", f"{0:020}.json")):
            raise of_log(here, "Delta")
        parts = parts_of([PurePosixPath(name) for name, _ in store.list(".parquet")], here)
        return here, store, [(part, str(name)) for part, name in parts]
    local = Path(_local(path))
    if not local.exists():
        raise DatasetNotFoundError(f"{local}: no such file or folder. Check the path.")
    root = local.parent if local.is_file() else local
    if local.suffix == ".arrow":
        files = [("", local)]
    else:
        files = saved_files(local) if local.is_dir() and is_saved(open_store(local)) else parquet_files(local)
    return str(local), open_store(root, files=open_files), [(part, str(file.relative_to(root))) for part, file in files]


def _groups_at(store: Store, names: Sequence[str]) -> tuple[list[list[Group]], list[int]]:
    """Return groups and bytes of files; raises SourceError."""
    if _is_far(store.root):
        sizes = sizes_of(store, names)
        return far_groups(store, names, [(size, 0) for size in sizes]), sizes
    paths = [Path(store.root) / name for name in names]
    return [groups_of(path, store) for path in paths], [path.stat().st_size for path in paths]


def _seen_end(store: Store, groups: Sequence[Group]) -> int:
    """Return the hash of the end of a parquet file, which opening a remote one reads anyway; 0 for others."""
    if not groups or groups[0].group < 0 or groups[0].span[1]:
        return 0
    size, version = groups[0].stamp
    if groups[0].store is not None:
        return version
    length = min(TAIL_BYTES, size)
    return hash_of_tail(store.read_range(os.path.relpath(groups[0].path, store.root), size - length, length))


def _layout_beside(store: Store, name: str) -> tuple[Layout | None, dict[str, Any]]:
    """Return the layout and subflavors from a dataset.yaml beside the files."""
    if not store.exists(meta_path(name)):
        return None, {}
    config = DatasetConfigs().read(store, name)
    kind = config.form.sample_type
    where = store.url(meta_path(name))
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


def _column_names(files: Sequence[Sequence[Group]]) -> tuple[str, ...]:
    """Return the columns of files by their groups; all must have the same, in whatever order."""
    filled = [groups for groups in files if groups]
    first = filled[0][0]
    for group, *_ in filled:
        if {*group.columns} != {*first.columns}:
            names = (", ".join(columns) for columns in (group.columns, first.columns))
            raise SourceError(
                f"{group.path}: has the columns {next(names)}, and {first.path} {next(names)}. Write them with the "
                "same columns, null where there is no value, or train on each as a dataset of a mix."
            )
    return first.columns


def _labelled(groups: Sequence[Group]) -> set[str]:
    """Return the columns whose labels have names."""
    return {name_column(name) for group in groups for name, _ in group.labels}


def _read_values(dataset: TableDataset, column: str) -> np.ndarray:
    pyarrow_modules()
    of_files = _groups_at(dataset.store, dataset.shard_names)[0]
    chunks = [chunk for groups in of_files if groups for chunk in column_of_groups(groups, column)]
    return numbers_or_texts(chunks, f"{dataset.path}: the column {column!r}")


# Reading --------------------------------------------------------------------------------------------------------------


class TableRows:
    """Reads rows by number; thread-safe."""

    def __init__(self, dataset: TableDataset) -> None:
        self._dataset = dataset
        self._ends = np.cumsum(dataset.shard_counts)
        self._media: MediaRoot = dataset.store if _is_far(dataset.store.root) else Path(dataset.store.root)
        self._groups: dict[int, tuple[list[Group], list[int]]] = {}
        self._lock = threading.Lock()

    def read(self, indices: IntArray) -> list[ForeignRow | Exception]:
        """Return rows in the order given, or the error of a bad one; each group is read once.

        Raises:
            ShardMissingError, CorruptShardError: A file is gone or damaged.
        """
        out: list[ForeignRow | Exception] = [SourceError("not read")] * indices.size
        wanted: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for place, index in enumerate(indices.tolist()):
            shard = int(np.searchsorted(self._ends, index, side="right"))
            local = index - int(self._ends[shard] - self._dataset.shard_counts[shard])
            _, firsts = self._shard_groups(shard)
            number = bisect_right(firsts, local) - 1
            wanted.setdefault((shard, number), []).append((place, local - firsts[number]))
        for (shard, number), rows in wanted.items():
            group = self._shard_groups(shard)[0][number]
            batches = _read(group, self._dataset.wanted, [at for _, at in rows])
            for place, at in rows:
                first, columns = batch_at(batches, at)
                where = f"{group.path}{f', row group {group.group}' if group.group >= 0 else ''}, row {at}"
                scalars = [(name, column[at - first], read) for name, column, read in columns]
                out[place] = self._row(scalars, where, int(indices[place]), group)
        return out

    def _row(
        self, scalars: Sequence[tuple[str, Any, ValueReader]], where: str, number: int, group: Group
    ) -> ForeignRow | Exception:
        dataset = self._dataset
        try:
            with located(where):
                values = {name: read(scalar) for name, scalar, read in scalars}
            row = row_of(values, where, self._media, dataset.media_columns, group.labels)
            sample = lay_out(by_options(row, dataset.layout), dataset.layout, number)
            parts, fields = sample.read()
        except (SourceError, SkipSample) as error:
            return error
        return ForeignRow(sample.key, {name: memoryview(data) for name, data in parts}, fields)

    def _shard_groups(self, shard: int) -> tuple[list[Group], list[int]]:
        with self._lock:
            known = self._groups.get(shard)
            if known is None:
                name = self._dataset.shard_names[shard]
                path = self._dataset.store.url(name)
                if not self._dataset.store.exists(name):
                    raise ShardMissingError(f"{path}: the file is gone.")
                try:
                    (groups,), (size,) = _groups_at(self._dataset.store, [name])
                except SourceError as error:
                    raise CorruptShardError(str(error)) from error
                if size != self._dataset.shard_sizes[shard]:
                    raise CorruptShardError(f"{path}: has other bytes than when it was opened. Open it again.")
                counts = [group.num_rows for group in groups]
                if sum(counts) != self._dataset.shard_counts[shard]:
                    raise CorruptShardError(f"{path}: its rows changed after it was opened. Open the dataset again.")
                firsts = (np.cumsum(counts) - counts).tolist()
                known = self._groups[shard] = groups, firsts
            return known


class _Kept:
    """The row groups that a process read last, across all its datasets."""

    def __init__(self) -> None:
        self._groups: OrderedDict[tuple[Any, tuple[str, ...]], tuple[Batches, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._seen: set[int] = set()
        self._rows = self._rows_again = self._times_again = 0
        self._has_warned = False

    def get(self, group: Group, columns: tuple[str, ...], rows: int) -> Batches:
        """Return some columns of a group; the caller uses `rows` of its rows."""
        place = group.key, columns
        with self._lock:
            self._rows += rows
            kept = self._groups.get(place)
            if kept is not None:
                self._groups.move_to_end(place)
                return kept[0]
        table = read_group(group, columns)
        batches = batches_of(table)
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
        if self._has_warned or self._times_again < _REPEATED_GROUPS or self._rows_again < _REPEATED_ROWS * self._rows:
            return
        self._has_warned = True
        remedy = "Copy the files to a local disk"
        if group.store is None:
            remedy = (
                "Save the rows as an arrow dataset (datasets' save_to_disk), make shards of them (energon convert "
                f"{os.path.dirname(group.path)} OUT)"
            )
        _logger.warning(
            "%s: for each row that is used, %d are decoded again, because a process keeps %d MiB of row groups and one "
            "of these has %.0f. %s, or write the files with smaller row groups (row_group_size=100).",
            group.path,
            self._rows_again // self._rows,
            _KEPT_BYTES >> 20,
            size / 2**20,
            remedy,
        )


_KEPT = PerProcess(_Kept)


def _read(group: Group, columns: tuple[str, ...], rows: Sequence[int]) -> Batches:
    """Return some columns of a group (all if none is named) that have some of its rows; raises CorruptShardError."""
    arrow = pyarrow_modules()
    try:
        return _KEPT().get(group, columns, len(rows)) if group.group >= 0 else read_rows(group, rows, columns)
    except StorageError:
        raise
    except (OSError, arrow.ArrowException) as error:
        raise CorruptShardError(f"{group.path}: cannot be read: {error}") from error


class _Tables:
    """The format, as the core asks for it."""

    is_named = staticmethod(is_table)
    is_at = staticmethod(has_tables)
    split_parts = staticmethod(table_parts)
    open = staticmethod(open_tables)


TABLES: ForeignFormat = _Tables()
