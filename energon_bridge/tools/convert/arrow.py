"""Parquet files, and datasets that Hugging Face's library saved to disk (arrow streams). Needs pyarrow.

Rows are read where they are written, in the process that writes them; the one that plans reads metadata only, and the
rows that it shows. Labels of Hugging Face's `ClassLabel` come with their names.
"""

from __future__ import annotations

import json
import logging
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, repeat
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from energon_bridge.core.errors import SampleError, ShardMissingError, SourceError, StorageError
from energon_bridge.core.storage import Store, open_store
from energon_bridge.models.conversations.questions import columns_of, name_column, template_columns
from energon_bridge.models.conversations.turns import CONVERSATIONS, SEVERAL, find_pair
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
from energon_bridge.tools.convert.lists import CAPTIONS, propose_layout
from energon_bridge.tools.convert.row_groups import (
    FileStamp,
    Group,
    column_of_groups,
    far_groups,
    first_filled,
    groups_of,
    read_rows,
    table_of,
)
from energon_bridge.tools.convert.rows import (
    FEW,
    LOOKED_AT,
    Content,
    Layout,
    MediaRoot,
    Row,
    first_rows,
    is_filled,
    key_of_row,
    lay_out,
    located,
    media_folder,
)
from energon_bridge.tools.convert.splits import check_card_in, named_parts, part_order, split_files

_JUDGED_BY = 20
"""Number of first rows by which columns with media, and the kind of the rows, are recognised."""
_logger = logging.getLogger(__name__)

SAVED = ("dataset_dict.json", "state.json")
SAVED_META = (*SAVED, "dataset_info.json")
"""Files beside tables that the `datasets` library saved."""


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
    if group.group < 0:
        ((_, columns),) = read_rows(group, [at], ())
        return {name: read(column[0]) for name, column, read in columns}
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
        values = dict(known_form(_with_names(values, labels) if labels else values))
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
        return Row(where=where, values=values, files=files)


def _with_names(values: dict[str, Any], labels: Sequence[tuple[str, tuple[str, ...]]]) -> dict[str, Any]:
    """Return values with names of classes: in columns of their own, and instead of numbers in what is said as text."""
    named = values
    for path, names in labels:
        column, *keys = path.split(".")
        if values.get(column) is not None:
            named = {**named, column: _named(named[column], keys, names)}
    said = {*CONVERSATIONS, *SEVERAL, *CAPTIONS, "answers", *(find_pair(named) or ())}
    with suppress(SampleError):  # its sample says so
        said.update(columns_of(named))
    own = {name: named[name] for name, _ in labels if isinstance(values.get(name), int) and named[name] != values[name]}
    return {
        **{name: named[name] if name in said else value for name, value in values.items()},
        **{name_column(name): value for name, value in own.items()},
    }


def _named(value: Any, keys: Sequence[str], names: Sequence[str]) -> Any:
    """Return a value with the names of its classes, which stand under some keys, or in lists."""
    if isinstance(value, list):
        return [_named(one, keys, names) for one in value]
    if keys:
        is_there = isinstance(value, dict) and value.get(keys[0]) is not None
        return {**value, keys[0]: _named(value[keys[0]], keys[1:], names)} if is_there else value
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else value


class ArrowSource:
    """The rows of some files, in their order."""

    left_out: tuple[str, ...] = ()

    def __init__(
        self, root: Path | str, files: Sequence[tuple[str, Sequence[Group]]], media: MediaRoot | None, kind: str
    ) -> None:
        self.kind = kind
        self.where = str(root)
        self._media = media_folder(Path(root), media) if media is None or isinstance(media, Path) else media
        self._groups: list[Group] = []
        self._starts = [0]
        self._seen: dict[int, Mapping[str, Any]] = {}
        self._kept: dict[str, list[object]] = {}
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
        names = template_columns(layout.key or "")
        row = Row(where=where, values={name: self._whole(name)[number] for name in names}, files={})
        return ArrowSample(
            key=key_of_row(row, layout, number),
            where=where,
            group=group,
            at=at,
            number=number,
            media=self._media,
            columns=self.columns,
            layout=layout,
            is_chat=self._is_chat,
        )

    def column(self, name: str) -> Iterator[object]:
        """Yield the value of a column in each row; None where a file has none."""
        for group in self._groups:
            chunks = column_of_groups([group], name) if name in group.columns else ()
            yield from (
                chain.from_iterable(one.to_pylist() for one in chunks) if chunks else repeat(None, group.num_rows)
            )

    def propose(self) -> Layout:
        """Propose a layout, judging by the first rows."""
        return propose_layout(first_rows(self, _JUDGED_BY))

    def _whole(self, name: str) -> list[object]:
        """Return a column, kept: keys are made of it."""
        if name not in self._kept:
            self._kept[name] = list(self.column(name))
        return self._kept[name]

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Return the columns with media, judging by the first rows."""
        return file_columns(self._first, self._media, self.where)

    @cached_property
    def _is_chat(self) -> bool:
        return any(is_conversation(values) for values in self._first)

    @cached_property
    def _first(self) -> list[Mapping[str, Any]]:
        return self._readable((*range(min(_JUDGED_BY, len(self))), *self.late))

    def _readable(self, numbers: Iterable[int]) -> list[Mapping[str, Any]]:
        first = []
        for number in numbers:
            with suppress(SourceError):  # said when it is read
                first.append(self._values(number))
        return first

    @cached_property
    def late(self) -> tuple[int, ...]:
        """Return the first few rows that have something in each column which the first rows leave empty."""
        first = self._readable(range(min(_JUDGED_BY, len(self))))
        if not first:
            return ()
        seen = {name for values in first for name, value in values.items() if is_filled(value)}
        columns = dict.fromkeys(name for group in self._groups for name in group.columns if name not in seen)
        found = (first_filled(self._groups, column, FEW) for column in columns)
        return tuple(sorted({number for numbers in found for number in numbers}))

    def _values(self, number: int) -> Mapping[str, Any]:
        """Return the values of a row; the first rows, which are looked at again and again, are read once."""
        values = self._seen.get(number)
        if values is None:
            group, at, where = self._place(number)
            with located(where):
                values = values_at(group, at)
            if len(self._seen) < 2 * LOOKED_AT:
                self._seen[number] = values
        return values

    def _place(self, number: int) -> tuple[Group, int, str]:
        place = bisect_right(self._starts, number) - 1
        group = self._groups[place]
        at = number - self._starts[place]
        inside = f", row group {group.group}" if group.group >= 0 else ""
        return group, at, f"{group.path}{inside}, row {at}"


def open_parquet(path: Path, media: Path | None) -> ArrowSource:
    """Open a parquet or arrow file, or all parquet files below a folder; `train-00000-of-00004.parquet` is a split."""
    root = path.parent if path.is_file() else path
    kind = "arrow" if path.suffix.lower() == ".arrow" else "parquet"
    return ArrowSource(root, [(part, groups_of(file)) for part, file in parquet_files(path)], media, kind)


def open_saved(path: Path, media: Path | None) -> ArrowSource:
    """Open what `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    files = [(part, groups_of(file)) for part, file in saved_files(path)]
    return ArrowSource(path, files, media, "Hugging Face dataset")


def open_remote(where: str, root: str, files: Mapping[str, FileStamp], folder: str = "") -> ArrowSource:
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

    Raises SourceError if names tell no clear split, or a log of changes belongs to the files.
    """
    if path.is_file():
        return [("", path)]
    for log, kind in (("_delta_log", "Delta"), (".hoodie", "Hudi"), ("metadata/*.metadata.json", "Iceberg")):
        if next(path.rglob(log), None) is not None:
            raise of_log(str(path), kind)
    for folder, _, listed in os.walk(path):
        check_format(folder, listed)
    names = [one.relative_to(path) for one in path.rglob("*.parquet") if one.is_file()]
    found = parts_of(names, str(path))
    if configs := check_card_in(path, found):
        _warn_of_configs(str(path), len(configs), ", ".join([*configs[:5], *["…"] * (len(configs) > 5)]))
    return [(part, path / name) for part, name in found]


def of_log(where: str, kind: str) -> SourceError:
    """Return the error for a table whose log says which of its parquet files count."""
    return SourceError(
        f"{where}: is a table of {kind}: its log says which of its parquet files are current, and others have rows "
        "that were deleted or changed. Write the current rows as parquet files into another folder, by the library of "
        f"{kind}."
    )


def check_format(folder: str, names: Sequence[str]) -> None:
    """Raise SourceError if the names in a folder are those of a set that its own library reads, not this one."""
    kind = None
    if os.path.basename(folder) == "_versions" and any(name.endswith(".manifest") for name in names):
        kind, folder = "Lance (lance.dataset)", os.path.dirname(folder)
    elif (os.path.basename(folder) == "meta" and "info.json" in names) or "index.json" in names:
        with suppress(ValueError, OSError):
            said = json.loads(Path(folder, "index.json" if "index.json" in names else "info.json").read_bytes())
            kind = next((kind for kind, keys in _OWN.items() if isinstance(said, dict) and keys <= said.keys()), None)
    if kind is not None:
        raise SourceError(
            f"{folder}: is of {kind}, whose rows and media only its library puts together: loop over its dataset, and "
            "write each sample with ShardWriter."
        )


_OWN = {
    "LeRobot (LeRobotDataset)": {"codebase_version"},
    "litdata (StreamingDataset)": {"chunks", "config"},
    "MosaicML Streaming (StreamingDataset)": {"shards", "version"},
}
"""Sets by the keys of their index, each with the class that reads it."""


def parts_of(names: Iterable[PurePath], where: str) -> list[tuple[str, PurePath]]:
    """Return split part (empty without splits) and name of the files that are taken; raises what `split_files` does."""
    found = split_files(names, where)
    if found.left_out:
        _warn_of_left_out(where, len(found.left_out), len(found.left_out) + len(found.files), str(found.left_out[0]))
    folders = (folder for _, name in found.files for folder in name.parts[:-1])
    if partitions := dict.fromkeys(folder.partition("=")[0] for folder in folders if "=" in folder):
        _warn_of_partitions(where, ", ".join(partitions), next(iter(partitions)))
    return found.files


@cache
def _warn_of_partitions(where: str, names: str, first: str) -> None:
    _logger.warning(
        "%s: folders are partitions (%s), and rows do not have these as columns: where a sample needs `%s`, write it "
        "into a column of its file; for one partition, give its folder",
        *(where, names, first),
    )


@cache
def _warn_of_left_out(where: str, count: int, total: int, first: str) -> None:
    _logger.warning(
        "%s: %d of %d parquet files %s not taken, such as %s: hidden, or not named for a split, as others are",
        *(where, count, total, "is" if count == 1 else "are", first),
    )


@cache
def _warn_of_configs(where: str, count: int, names: str) -> None:
    what = "%s: its README.md has %d configurations (%s), and the files of all are taken: for one, give its folder"
    _logger.warning(what, where, count, names)


def is_saved(store: Store) -> bool:
    """Return whether Hugging Face's library saved a dataset below the root of a store.

    Others call files `state.json`, too: it is one of the library if it says so, or if arrow files lie beside it.
    """
    there = [(name, item) for name, item in zip(SAVED, ("splits", "_data_files"), strict=True) if store.exists(name)]
    for name, item in there:
        with suppress(ValueError):
            content = json.loads(store.read(name))
            if isinstance(content, dict) and isinstance(content.get(item), list):
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


def _saved_list(store: Store, name: str, item: str) -> list[str]:
    """Return the names that a file of `save_to_disk` lists; raises SourceError."""
    try:
        listed = json.loads(store.read(name))[item]
        names = [one["filename"] if isinstance(one, dict) else one for one in listed]
        if isinstance(listed, list) and all(isinstance(one, str) for one in names):
            return names
    except (ValueError, TypeError, KeyError, ShardMissingError):
        pass
    raise SourceError(
        f"{store.url(name)}: has no `{item}` as `save_to_disk` writes them. If another program wrote the file, move it "
        "away; else save the dataset again."
    )
