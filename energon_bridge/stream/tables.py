"""Reading parquet files and Hugging Face datasets as leaves: rows by index, and the samples that they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from energon_bridge.errors import CorruptShardError, ShardMissingError
from energon_bridge.rng import IntArray
from energon_bridge.rows.dataset import TableDataset, TableRows, compiled
from energon_bridge.samples import SourceInfo
from energon_bridge.stream.reader import Unreadable
from energon_bridge.stream.values import RestoreKey, SampleParser

_FIELDS = "__fields__"


class TableReader:
    """Reads rows of a table by index; safe to use from several threads.

    Args:
        dataset: The dataset.
        tolerant: Put `Unreadable` in the place of rows of files that are damaged or gone.

    Attributes:
        bytes_read: Bytes of the parts of samples so far.
        slow: Never: files are local, and a group is read for many samples.
    """

    slow = False

    def __init__(self, dataset: TableDataset, *, tolerant: bool = False) -> None:
        self.dataset = dataset
        self.bytes_read = 0
        self._tolerant = tolerant
        self._rows = TableRows(dataset)
        self._ends = np.cumsum(dataset.shard_counts)

    def shards_of(self, indices: IntArray) -> IntArray:
        """Return the number of the file of each index, shape as given."""
        return np.searchsorted(self._ends, indices, side="right")

    def place_of(self, index: int) -> tuple[str, int]:
        """Return file and row within the file of a sample."""
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return self.dataset.shard_names[shard], index - int(self._ends[shard] - self.dataset.shard_counts[shard])

    def read(self, indices: IntArray) -> Sequence[Any]:
        """Return rows in the order given, `Unreadable` in the place of those that are no samples.

        Raises:
            ShardMissingError, CorruptShardError: A file is gone or damaged, and the reader is not tolerant.
        """
        try:
            found = self._rows.read(indices)
        except (ShardMissingError, CorruptShardError) as error:
            if not self._tolerant:
                raise
            if indices.size == 1:
                return [Unreadable(error)]
            return [self.read(indices[place : place + 1])[0] for place in range(indices.size)]
        rows = [Unreadable(row) if isinstance(row, Exception) else row for row in found]
        self.bytes_read += sum(map(len, rows))
        return rows


class TableParser(SampleParser):
    """Makes the samples of rows, each by the accesses of its own fields: one may have a PNG where others have JPEGs."""

    def _parse(self, raw: Any, wanted: frozenset[str] | None) -> tuple[str, dict[str, Any]]:
        if type(raw) is Unreadable:
            raise raw.error
        return raw.key, _Parts(raw.parts, raw.fields)

    def _values(self, parts: dict[str, Any], image: tuple[str, Any] | None) -> dict[str, Any]:
        return {**super()._values(parts, image), _FIELDS: parts.fields}  # type: ignore[attr-defined]

    def _sample(self, key: str, restore_key: RestoreKey, source: SourceInfo, values: dict[str, Any]) -> Any:
        fields = values.pop(_FIELDS)
        dataset = self._dataset
        if dataset.layout.is_crude:
            return super()._sample(key, restore_key, source, values)
        return dataset.sample_type(
            __key__=key,
            __restore_key__=restore_key,
            __subflavors__=dict(dataset.subflavors),
            __sources__=(source,),
            **compiled(tuple(fields.items()))(values),
        )


class _Parts(dict[str, Any]):
    """The parts of a row, and what its fields are made of."""

    def __init__(self, parts: dict[str, Any], fields: Any) -> None:
        super().__init__(parts)
        self.fields = fields
