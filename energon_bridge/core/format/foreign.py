"""Datasets in formats that are not ours, such as tables: their samples are rows, read by number.

The formats are other products' (`tools/convert/`): each is a `dataset` in `registry.toml`, by the ends of its files'
names.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import numpy as np

from energon_bridge.core.format.dataset import PreparedDataset
from energon_bridge.core.format.field_map import FieldMap
from energon_bridge.core.format.nvmeta import DEFAULT_DATASET_CONFIG, is_prepared
from energon_bridge.core.order.rng import IntArray
from energon_bridge.core.registry import load, registered
from energon_bridge.core.storage import OpenFiles, open_store

Location = str | os.PathLike[str]


@dataclass(slots=True, eq=False)
class ForeignRow:
    """A row that was read: its key; its parts, of which a memoryview is to be decoded; fields, as in a field map."""

    key: str
    parts: dict[str, Any]
    fields: Mapping[str, str]

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))


class RowReader(Protocol):
    """Reads rows by number; thread-safe."""

    def read(self, indices: IntArray) -> Sequence[ForeignRow | Exception]:
        """Return rows in the order given, or the error of a bad one.

        Raises:
            ShardMissingError, CorruptShardError: A file is gone or damaged.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignDataset(PreparedDataset):
    """The rows of some files.

    Attributes:
        columns: The names of all columns.
        group_rows: Rows of the largest row group, which is read as a whole; 0 if rows can be read one by one.
        fields: The access (`field_map`) of each field, as far as all rows agree.
        seen_ends: A hash of the end of each shard, if opening read it; 0 or nothing: it did not.
        withheld: Columns that say that some rows are not to be learned, each with the complaint about their being read
            without a filter that names it.
    """

    key_format: ClassVar[str | None] = "{:09d}"

    columns: tuple[str, ...]
    group_rows: int
    fields: Mapping[str, str]
    seen_ends: tuple[int, ...] = ()
    withheld: Mapping[str, str] = field(default_factory=dict)

    @property
    def index_names(self) -> tuple[str, ...]:
        """Files beside the shards that say where samples are."""
        return ()

    @property
    def index_remedy(self) -> str:
        """The remedy for a wrong index: there is none, so write the file again."""
        return "Write the file again."

    def open_rows(self) -> RowReader:
        """Return a new reader of the rows."""
        raise NotImplementedError

    def read_values(self, column: str) -> np.ndarray:
        """Return a column of numbers or texts, for a filter, shape (samples,).

        Raises:
            ConfigurationError: It has other values, or none in some rows.
        """
        raise NotImplementedError


class ForeignFormat(Protocol):
    """A format of datasets: finds them, and opens them."""

    def is_named(self, path: Location) -> bool:
        """Return whether a path names a file of the format, judging by its name and local files beside it."""

    def is_at(self, path: Location) -> bool:
        """Return whether a path or URL is such a file, or a folder of them."""

    def split_parts(self, path: Location) -> list[str]:
        """Return the split parts of a dataset; one empty name without splits."""

    def open(
        self,
        path: Location,
        *,
        split_part: str,
        dataset_config: str = DEFAULT_DATASET_CONFIG,
        open_files: OpenFiles | None = None,
    ) -> ForeignDataset:
        """Open a dataset; without its own splits, any part means all rows. `open_files` has the limit of its reads.

        Raises:
            DatasetNotFoundError: There is none.
            UnknownSplitError, EmptyDatasetError: There is no such part, or it is empty.
            SourceError: A file is damaged, or its rows cannot become samples.
            MetadataError, FieldMapError: The dataset.yaml is wrong.
        """


def format_named(path: Location) -> ForeignFormat | None:
    """Return the format that a path names, if any; one is imported only for a name, or a prefix, of its files."""
    name = os.fspath(path)
    base = os.path.expanduser(name.partition("?")[0])
    may_be_prefix = not os.path.isdir(base)
    ends = [
        end
        for end in registered("dataset")
        if name.endswith(end) or base.endswith(end) or (may_be_prefix and os.path.isfile(base + end))
    ]
    return next((each for each in _formats(ends) if each.is_named(path)), None)


def format_at(path: Location) -> ForeignFormat | None:
    """Return the format of what is at a path or URL, if any."""
    return next((each for each in _formats(registered("dataset")) if each.is_at(path)), None)


def _formats(ends: Iterable[str]) -> Iterable[ForeignFormat]:
    return dict.fromkeys(load("dataset", end) for end in ends)


def format_of_unprepared(path: Location) -> ForeignFormat | None:
    """Return the format of what is at a path or URL, unless it is a prepared dataset as well."""
    store = open_store(path)
    if not format_named(path) and is_prepared(store):
        return None
    return format_at(path)


@lru_cache(maxsize=256)
def field_map_of(fields: tuple[tuple[str, str], ...]) -> FieldMap:
    """Return the field map for the accesses of a row; cached, since the rows of a file share few maps."""
    return FieldMap(dict(fields))
