"""Keys of samples by their place, from the key index of a dataset, where there is one on a local disk."""

from __future__ import annotations

from energon_bridge.errors import KeyIndexError
from energon_bridge.format.dataset import PreparedDataset
from energon_bridge.format.jsonl import JsonlDataset
from energon_bridge.format.key_lookup import KeyIndex, keys_at, local_key_index
from energon_bridge.format.nvmeta import INDEX_SQLITE, meta_path, read_info
from energon_bridge.storage import LocalStore


class KeyNames:
    """Looks keys up; what it has learnt of a dataset it keeps."""

    def __init__(self) -> None:
        self._indices: dict[str, tuple[KeyIndex, dict[str, int]] | None] = {}

    def key_of(self, dataset: PreparedDataset, shard: str, index: int) -> str | None:
        """Return the key of a sample, None where no local key index tells it: shard and index say it as well."""
        try:
            if dataset.path not in self._indices:
                self._indices[dataset.path] = None
                self._indices[dataset.path] = _index_of(dataset)
            known = self._indices[dataset.path]
            return None if known is None else keys_at(known[0], known[1][shard], [index])[0]
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
