"""Columns: a number or text per sample of a dataset, stored beside its indexes, so that no sample must be read for it.

    .nv-meta/columns/index.json    {"format": 1, "columns": {name: {"made_of": text, "shards": [[name, samples, bytes]],
                                    "values": [text] (of texts only)}}}
    .nv-meta/columns/<name>.npy    an entry per sample of these shards, in their order: int64, float64 or bool; of
                                   texts int64 numbers of their values

Invariant: a column is only used with shards of the sizes and numbers of samples that it was made from.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from energon_bridge.core.errors import MetadataError
from energon_bridge.core.format.dataset import PreparedDataset
from energon_bridge.core.format.nvmeta import meta_path
from energon_bridge.core.storage import LocalStore, Store

COLUMNS_INDEX = meta_path("columns/index.json")
_FORMAT = 1
SIZE_MADE_OF = "width and height of the content"
TURNED_SIZE_MADE_OF = f"{SIZE_MADE_OF}, turned as it says"
"""How `energon columns add --image-size` makes `width` and `height`, without and with `--autorotate`."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """An entry in the list of columns.

    Attributes:
        made_of: What it was computed by, as a text for people.
        shards: Name, number of samples and bytes of each shard that it covers.
        values: The texts that its numbers encode; None: it contains numbers.
    """

    made_of: str
    shards: tuple[tuple[str, int, int], ...] = field(repr=False)
    values: tuple[str, ...] | None = None

    @property
    def num_samples(self) -> int:
        return sum(count for _, count, _ in self.shards)


def column_path(name: str) -> str:
    """Return the path of a column in a dataset; raises MetadataError for a name that no expression could use."""
    if not _NAME.fullmatch(name):
        raise MetadataError(f"column {name!r}: a name has only letters, digits and _, and does not start with a digit.")
    return meta_path(f"columns/{name}.npy")


def read_columns(store: Store) -> dict[str, Column]:
    """Return the columns of a dataset by name; raises MetadataError for a damaged list."""
    if not store.exists(COLUMNS_INDEX):
        return {}
    where = store.url(COLUMNS_INDEX)
    try:
        index = json.loads(store.read(COLUMNS_INDEX))
        if index["format"] != _FORMAT:
            raise MetadataError(f"{where}: has format {index['format']!r}, expected {_FORMAT}. Upgrade energon_bridge.")
        return {name: _column(entry) for name, entry in index["columns"].items() if column_path(name)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MetadataError(f"{where}: damaged: {error!r}. Delete it and add the columns again.") from error


def encode_columns(columns: Mapping[str, Column]) -> bytes:
    """Encode the list of columns, as `read_columns` reads it."""
    plain = {
        name: {"made_of": column.made_of, "shards": column.shards}
        | ({} if column.values is None else {"values": column.values})
        for name, column in sorted(columns.items())
    }
    return json.dumps({"format": _FORMAT, "columns": plain}).encode()


def read_numbers(store: Store, name: str, column: Column) -> np.ndarray:
    """Return the numbers of a column, shape (its samples,), memory-mapped if the dataset is a local folder."""
    path = column_path(name)
    where = store.url(path)
    try:
        if isinstance(store, LocalStore):
            numbers = np.load(where, mmap_mode="r", allow_pickle=False)
        else:
            numbers = np.load(io.BytesIO(store.read(path)), allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise MetadataError(f"{where}: cannot be read: {error}. Add the column again.") from error
    if numbers.shape != (column.num_samples,) or numbers.dtype not in (np.int64, np.float64, np.bool_):
        raise MetadataError(
            f"{where}: contains {numbers.dtype} of shape {numbers.shape}, expected {column.num_samples} numbers. Add "
            "the column again."
        )
    return numbers


def column_of(dataset: PreparedDataset, name: str, columns: Mapping[str, Column]) -> np.ndarray:
    """Return a column for the samples of one split part, in its order: shape (dataset.num_samples,).

    Raises MetadataError if the column was made from other shards.
    """
    column = columns[name]
    numbers = read_numbers(dataset.store, name, column)
    starts = np.cumsum([0, *(count for _, count, _ in column.shards)])
    numbers_of = {shard: number for number, (shard, _, _) in enumerate(column.shards)}
    pieces: list[np.ndarray] = []
    sizes = zip(dataset.shard_names, dataset.shard_counts.tolist(), dataset.shard_sizes.tolist(), strict=True)
    for shard, count, size in sizes:
        number = numbers_of.get(shard)
        if number is None or column.shards[number] != (shard, count, size):
            covered = "nothing" if number is None else "{1} samples in {2} bytes".format(*column.shards[number])
            raise MetadataError(
                f"{dataset.path}: the column {name!r} covers {covered} of the shard {shard!r}, which has {count} "
                f"samples in {size} bytes. Add the column again: only new and changed shards are read."
            )
        pieces.append(numbers[starts[number] : starts[number + 1]])
    own = np.concatenate(pieces)
    if column.values is None:
        return own
    if not column.values or not 0 <= own.min() <= own.max() < len(column.values):
        raise MetadataError(
            f"{dataset.store.url(column_path(name))}: has numbers without a text. Add the column again."
        )
    return np.asarray(column.values)[own]


def _column(entry: Mapping[str, Any]) -> Column:
    shards: Sequence[Any] = entry["shards"]
    values = entry.get("values")
    return Column(
        made_of=str(entry["made_of"]),
        shards=tuple((str(name), int(count), int(size)) for name, count, size in shards),
        values=None if values is None else tuple(map(str, values)),
    )
