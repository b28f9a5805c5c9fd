"""Keys of samples by their place, from the key index of a dataset, where there is one on a local disk."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from energon_bridge.format.nvmeta import INDEX_SQLITE, meta_path, read_info
from energon_bridge.storage import Store


class KeyNames:
    """Looks keys up; what it has learnt of a dataset it keeps."""

    def __init__(self) -> None:
        self._indices: dict[str, tuple[str, dict[str, int]] | None] = {}

    def key_of(self, store: Store, shard: str, index: int) -> str | None:
        """Return the key of a sample, None where no local key index tells it."""
        if store.root not in self._indices:
            self._indices[store.root] = _index_of(store)
        known = self._indices[store.root]
        if known is None:
            return None
        uri, numbers = known
        query = "SELECT sample_key FROM samples WHERE tar_file_id = ? AND sample_index = ?"
        try:
            # Immutable: a folder that cannot be written needs no lock and no journal.
            with closing(sqlite3.connect(uri, uri=True)) as connection:
                row = connection.execute(query, (numbers[shard], index)).fetchone()
        except sqlite3.Error:  # a name is a courtesy: shard and index say it as well
            return None
        return None if row is None else str(row[0])


def _index_of(store: Store) -> tuple[str, dict[str, int]] | None:
    """Return how to open a dataset's key index, and the numbers of its shards in it."""
    path = Path(store.url(meta_path(INDEX_SQLITE)))
    if "://" in store.root or not path.is_file():
        return None
    shards = {shard: number for number, shard in enumerate(read_info(store).shard_counts)}
    return f"{path.absolute().as_uri()}?mode=ro&immutable=1", shards
