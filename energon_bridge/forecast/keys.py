"""Keys of samples by their place, from the key index of a dataset, where there is one on a local disk."""

from __future__ import annotations

from collections import Counter

from energon_bridge.errors import KeyIndexError
from energon_bridge.format.dataset import PreparedDataset
from energon_bridge.format.jsonl import JsonlDataset
from energon_bridge.format.key_lookup import KeyIndex, keys_at, keys_of_shard, local_key_index
from energon_bridge.format.nvmeta import INDEX_SQLITE, meta_path, read_info
from energon_bridge.storage import LocalStore

_FEW = 8
"""Lookups in a shard before all of its keys are read."""
_SHARDS = 256
"""Shards whose keys are kept."""


class KeyNames:
    """Looks keys up; what it has learnt of a dataset it keeps, and the keys of shards that it is asked for often."""

    def __init__(self) -> None:
        self._indices: dict[str, tuple[KeyIndex, dict[str, int]] | None] = {}
        self._asked: Counter[tuple[str, str]] = Counter()
        self._shards: dict[tuple[str, str], list[str]] = {}

    def key_of(self, dataset: PreparedDataset, shard: str, index: int) -> str | None:
        """Return the key of a sample, None where no local key index tells it: shard and index say it as well."""
        place = dataset.path, shard
        keys = self._shards.get(place)
        if keys is not None:
            return keys[index] if index < len(keys) else None
        try:
            if dataset.path not in self._indices:
                self._indices[dataset.path] = None
                self._indices[dataset.path] = _index_of(dataset)
            known = self._indices[dataset.path]
            if known is None:
                return None
            self._asked[place] += 1
            if self._asked[place] <= _FEW:
                return keys_at(known[0], known[1][shard], [index])[0]
            if len(self._shards) == _SHARDS:
                del self._shards[next(iter(self._shards))]
            keys = self._shards[place] = keys_of_shard(known[0], known[1][shard])
            return keys[index] if index < len(keys) else None
        except KeyIndexError:
            return None


def _index_of(dataset: PreparedDataset) -> tuple[KeyIndex, dict[str, int]] | None:
    """Return a dataset's key index and the numbers of its shards in it."""
    store = dataset.store
    if isinstance(dataset, JsonlDataset) or not isinstance(store, LocalStore):
        return None
    if not store.exists(meta_path(INDEX_SQLITE)):
        return None
    numbers = {shard: number for number, shard in enumerate(read_info(store).shard_counts)}
    return local_key_index(store, scratch=""), numbers
