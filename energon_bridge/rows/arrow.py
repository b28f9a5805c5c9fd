"""Parquet files, and datasets that Hugging Face's library saved to disk (arrow streams). Needs pyarrow.

The process that writes a row also reads it; the planning process reads only metadata and the rows that it shows.
Labels of Hugging Face's `ClassLabel` come with their names.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from energon_bridge.errors import ConfigurationError, SourceError
from energon_bridge.rows.base import (
    SPLIT_NAMES,
    SPLIT_ORDER,
    Layout,
    Row,
    first_rows,
    lay_out,
    located,
)
from energon_bridge.rows.lists import CONVERSATIONS, as_files, conversation_row, holds_media, propose_layout

_SPLIT = re.compile(r"(train|validation|valid|val|dev|test)(?=[-_.]|$)")


Stamp = tuple[int, int]
"""Size and modification time of a file (of a remote one, its version): cached data is valid for this stamp only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A row group of a parquet file, or an arrow file (group -1), with the label names of its columns."""

    path: str
    stamp: Stamp
    group: int
    num_rows: int
    labels: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowSample:
    """A row that has not been read yet."""

    key: str
    where: str
    group: Group
    at: int
    number: int
    media: Path
    columns: tuple[str, ...]
    layout: Layout

    def sizes(self) -> list[tuple[str, int]]:
        """Return its parts with their sizes; reads the row."""
        return [(name, len(data)) for name, data in self.read()[0]]

    def mark(self) -> str:
        """Return a text that changes if the file does."""
        size, version = self.group.stamp
        return f"{self.key}\0{self.group.path} {size} {version} {self.group.group} {self.at}"

    def read(self) -> tuple[list[tuple[str, bytes]], Mapping[str, str]]:
        """Return its parts, and the accesses of its fields."""
        row = read_row(self.group, self.at, self.where, self.media, self.columns)
        return lay_out(row, self.layout, self.number).read()


def read_row(group: Group, at: int, where: str, media: Path, columns: tuple[str, ...]) -> Row:
    """Return a row; raises SourceError."""
    values: dict[str, Any] = table_of(group).slice(at, 1).to_pylist()[0]
    return row_of(values, where, media, columns, group.labels)


def row_of(
    values: dict[str, Any],
    where: str,
    media: Path,
    columns: tuple[str, ...],
    labels: tuple[tuple[str, tuple[str, ...]], ...],
) -> Row:
    """Return values as a row; `columns` hold media and `labels` name classes. Raises SourceError."""
    with located(where):
        if any(name in values for name in CONVERSATIONS):
            return conversation_row(values, where, media)
        files = {}
        for column in columns:
            value = values.pop(column, None)
            if value:
                files[column] = as_files(value, media, column)
        for column, names in labels:
            value = values.get(column)
            if isinstance(value, int) and 0 <= value < len(names):
                values["label_name" if column == "label" else f"{column}_name"] = names[value]
        return Row(where=where, values=values, files=files)


class ArrowSource:
    """The rows of some files, in their order."""

    def __init__(
        self, root: Path | str, files: Sequence[tuple[str, Sequence[Group]]], media: Path | None, kind: str
    ) -> None:
        self.kind = kind
        self.where = str(root)
        self._media = (Path(root) if media is None else media).absolute()
        self._groups: list[Group] = []
        self._starts = [0]
        counts: dict[str, int] = {}
        for part, groups in files:
            for group in groups:
                self._groups.append(group)
                self._starts.append(self._starts[-1] + group.num_rows)
            counts[part] = counts.get(part, 0) + sum(group.num_rows for group in groups)
        self.split_parts = tuple(counts.items()) if "" not in counts else ()

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, number: int) -> Row:
        """Return a row."""
        group, at, where = self._place(number)
        return read_row(group, at, where, self._media, self.columns)

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
        )

    def propose(self) -> Layout:
        """Propose a layout from the first rows."""
        return propose_layout(first_rows(self, 20))

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Return the columns with media, judging by the first rows."""
        seen: dict[str, list[bool]] = {}
        for number in range(min(20, len(self))):
            group, at, _ = self._place(number)
            for name, value in table_of(group).slice(at, 1).to_pylist()[0].items():
                if value:
                    seen.setdefault(name, []).append(holds_media(value))
        return tuple(name for name, found in seen.items() if sum(found) * 2 > len(found))

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


def open_remote(where: str, root: str, files: Mapping[str, Stamp]) -> ArrowSource:
    """Open parquet files by names below an fsspec URL, with their stamps; only the rows requested are read."""
    named = [(_split_of(PurePosixPath(name)), name) for name in sorted(files)]
    is_split = len(named) > 1 and all(part is not None for part, _ in named)
    if is_split:
        named.sort(key=lambda item: (SPLIT_ORDER.index(item[0] or ""), item[1]))
    groups = [(part or "" if is_split else "", _parquet_groups(f"{root}/{name}", files[name])) for part, name in named]
    return ArrowSource(where, groups, None, "parquet")


def parquet_files(path: Path) -> list[tuple[str, Path]]:
    """Return split part (empty without splits) and path of a parquet file, or of all below a folder."""
    paths = [path] if path.is_file() else sorted(path.rglob("*.parquet"))
    root = path.parent if path.is_file() else path
    named = [(_split_of(one.relative_to(root)), one) for one in paths]
    if len(paths) == 1 or any(part is None for part, _ in named):
        return [("", one) for one in paths]
    return sorted(((part or "", one) for part, one in named), key=lambda item: (SPLIT_ORDER.index(item[0]), item[1]))


def is_saved(path: Path) -> bool:
    """Return whether Hugging Face's library saved a dataset in a folder."""
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def saved_files(path: Path) -> list[tuple[str, Path]]:
    """Return split part (empty without splits) and path of the files that `save_to_disk` wrote."""
    splits = {"": path}
    if (path / "dataset_dict.json").exists():
        names = json.loads((path / "dataset_dict.json").read_bytes())["splits"]
        unknown = [name for name in names if name not in SPLIT_NAMES]
        if unknown:
            raise SourceError(
                f"{path}: unknown split {unknown[0]!r}; known are train, validation and test. Convert its folder "
                f"separately: {path / unknown[0]}"
            )
        splits = {SPLIT_NAMES[name]: path / name for name in names}
    files = []
    for part in sorted(splits, key=lambda name: (*SPLIT_ORDER, "").index(name)):
        state = json.loads((splits[part] / "state.json").read_bytes())
        if state.get("_indices_data_files"):
            raise SourceError(
                f"{splits[part]}: the dataset has indices; call `flatten_indices()` before `save_to_disk`."
            )
        files += [(part, splits[part] / file["filename"]) for file in state["_data_files"]]
    return files


def _split_of(path: PurePath) -> str | None:
    for name in reversed(path.parts):
        match = _SPLIT.match(name)
        if match is not None:
            return SPLIT_NAMES[match[1]]
    return None


def groups_of(path: Path) -> list[Group]:
    """Return the row groups of a parquet file, or an arrow file as one; raises SourceError."""
    parquet = path.suffix == ".parquet"
    arrow = pyarrow_modules()
    try:
        stamp = stamp_of(path)
        if parquet:
            return _parquet_groups(str(path), stamp)
        table = read_table(str(path))
    except (OSError, arrow.ArrowException) as error:
        raise SourceError(f"{path}: cannot be read: {error}. Was the download cut off?") from error
    return [
        Group(path=str(path), stamp=stamp, group=-1, num_rows=table.num_rows, labels=_labels(table.schema.metadata))
    ]


def _parquet_groups(path: str, stamp: Stamp) -> list[Group]:
    file = parquet_file(path, stamp)
    labels = _labels(file.schema_arrow.metadata)
    counts = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
    return [
        Group(path=path, stamp=stamp, group=number, num_rows=count, labels=labels)
        for number, count in enumerate(counts)
    ]


def _labels(metadata: Mapping[bytes, bytes] | None) -> tuple[tuple[str, tuple[str, ...]], ...]:
    text = (metadata or {}).get(b"huggingface")
    features = json.loads(text).get("info", {}).get("features", {}) if text else {}
    return tuple(
        (name, tuple(feature["names"]))
        for name, feature in features.items()
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


def stamp_of(path: Path) -> Stamp:
    """Return the current stamp of a file."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


@lru_cache(maxsize=16)
def parquet_file(path: str, stamp: Stamp) -> Any:
    """Return an open parquet file; from a URL, each column of a row group takes one request."""
    if "://" in path:
        from fsspec.core import url_to_fs

        system, name = url_to_fs(path)
        return pyarrow_modules().parquet.ParquetFile(system.open(name, cache_type="none"), pre_buffer=False)
    return pyarrow_modules().parquet.ParquetFile(path, memory_map=True, pre_buffer=False)


def read_table(path: str) -> Any:
    """Return the rows of an arrow file, memory-mapped, so that only the used parts are read."""
    arrow = pyarrow_modules()
    with open(path, "rb") as file:
        is_stream = file.read(6) != b"ARROW1"
    mapped = arrow.memory_map(path)
    return (arrow.ipc.open_stream if is_stream else arrow.ipc.open_file)(mapped).read_all()


@lru_cache(maxsize=2)
def table_of(group: Group) -> Any:
    """Return the rows of a group."""
    if group.group < 0:
        return read_table(group.path)
    return parquet_file(group.path, group.stamp).read_row_group(group.group, use_threads=False)
