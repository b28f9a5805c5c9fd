"""Reading key indexes: which samples of one dataset have the keys of another's.

Invariant: a key index is opened read-only and as immutable, by one connection for each piece of work, so any number of
processes can share it and nothing is left open. One behind a URL is copied to a local file first. Format: `key_index`.
"""

from __future__ import annotations

import itertools
import re
import sqlite3
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import NamedTuple

import numpy as np

from energon_bridge.errors import KeyIndexError, ShardMissingError
from energon_bridge.format.nvmeta import INDEX_SQLITE, INDEX_UUID, meta_path
from energon_bridge.rng import IntArray
from energon_bridge.storage import LocalStore, Store

_COPY_BYTES = 64 << 20
_STEPS = 1_000_000
"""Steps of sqlite's machine between two looks at the clock; a lookup takes some dozens."""
_PIECE_SECONDS = 3600.0
"""Time for one piece of work, such as matching the keys of a shard."""

_MATCHES = """
    SELECT own.sample_index, COALESCE(other.tar_file_id, -1), COALESCE(other.sample_index, -1)
    FROM main.samples AS own LEFT JOIN other.samples AS other ON other.sample_key = own.sample_key
    WHERE own.tar_file_id = ? ORDER BY own.sample_index
"""


def key_index_version(store: Store) -> list[str | int]:
    """Return what changes when the key index of a dataset is written again: its `index.uuid` and its size in bytes.

    Raises:
        KeyIndexError: The dataset has no key index.
    """
    rel = meta_path(INDEX_SQLITE)
    try:
        size = store.size(rel)
    except ShardMissingError as error:
        raise KeyIndexError(
            f"{store.root}: samples of this dataset are looked up by key, but it has no key index ({store.url(rel)}). "
            f"Run `energon prepare {store.root}` without --no-key-index."
        ) from error
    uuid = meta_path(INDEX_UUID)
    return [store.read(uuid).decode(errors="replace").strip() if store.exists(uuid) else "", size]


class KeyIndex(NamedTuple):
    """A key index as a local file, and the dataset that it belongs to."""

    path: str
    dataset: str


def local_key_index(store: Store, scratch: str) -> KeyIndex:
    """Return the key index of a dataset, copied to the file `scratch` if it lies behind a URL.

    Raises:
        KeyIndexError: It is damaged, or of an old release that did not check that keys are unique.
    """
    rel = meta_path(INDEX_SQLITE)
    if isinstance(store, LocalStore):
        index = KeyIndex(store.url(rel), store.root)
    else:
        index = KeyIndex(scratch, store.root)
        copy_key_index(store, scratch)
    with _connected(index) as connection:
        if not any(is_unique for _, _, is_unique, *_ in connection.execute("PRAGMA index_list(samples)")):
            raise sqlite3.DatabaseError("there is no table of samples with unique keys")
    return index


def copy_key_index(store: Store, path: str) -> None:
    """Copy the key index of a dataset to a local file, a bounded part at a time."""
    rel = meta_path(INDEX_SQLITE)
    size = store.size(rel)
    with open(path, "wb") as file:
        for start in range(0, size, _COPY_BYTES):
            file.write(store.read_range(rel, start, min(_COPY_BYTES, size - start)))


def matches(own: KeyIndex, other: KeyIndex, shard: int) -> IntArray:
    """Look the keys of a shard up in another key index.

    Args:
        own, other: The two key indexes.
        shard: Number of the shard in the `.info.json` of `own`.

    Returns:
        For each sample of the shard, in its order: its number in the shard, and shard number and number in the shard
        of the sample with its key, or -1 and -1. Shape (samples, 3).

    Raises:
        KeyIndexError: One of the two cannot be read.
    """
    with _connected(own, other) as connection:
        rows = connection.execute(_MATCHES, (shard,))
        return np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int64).reshape(-1, 3)


def find_keys(index: KeyIndex, keys: Sequence[str]) -> list[tuple[int, int] | None]:
    """Return (shard number, number in the shard) of each key, None for one that is not there."""
    query = "SELECT tar_file_id, sample_index FROM samples WHERE sample_key = ?"
    with _connected(index) as connection:
        return [connection.execute(query, (key,)).fetchone() for key in keys]


def keys_at(index: KeyIndex, shard: int, indices: Sequence[int]) -> list[str]:
    """Return the keys of some samples of a shard."""
    query = "SELECT sample_key FROM samples WHERE tar_file_id = ? AND sample_index = ?"
    with _connected(index) as connection:
        return [str(connection.execute(query, (shard, number)).fetchone()[0]) for number in indices]


def keys_of_shard(index: KeyIndex, shard: int) -> list[str]:
    """Return the keys of all samples of a shard, in its order."""
    query = "SELECT sample_key FROM samples WHERE tar_file_id = ? ORDER BY sample_index"
    with _connected(index) as connection:
        return [str(key) for (key,) in connection.execute(query, (shard,))]


@contextmanager
def _connected(own: KeyIndex, other: KeyIndex | None = None) -> Iterator[sqlite3.Connection]:
    """Open a key index, with another attached as `other`; what goes wrong inside is a KeyIndexError."""
    try:
        with closing(sqlite3.connect(sqlite_uri(own.path), uri=True)) as connection:
            limit_time(connection, _PIECE_SECONDS)
            check_table(connection, "main", "samples")
            if other is not None:
                connection.execute("ATTACH ? AS other", (sqlite_uri(other.path),))
                check_table(connection, "other", "samples")
            yield connection
    except (sqlite3.Error, ValueError, TypeError) as error:
        datasets = own.dataset if other is None else f"{own.dataset} or {other.dataset}"
        raise KeyIndexError(
            f"{datasets}: cannot read the key index {meta_path(INDEX_SQLITE)}: {error}. Write it again with `energon "
            f"prepare --tar-index-only {own.dataset if other is None else 'PATH'}`."
        ) from error


def check_table(connection: sqlite3.Connection, schema: str, name: str) -> None:
    """Raise sqlite3.DatabaseError unless a name is that of a table of stored values: a view may never end."""
    query = f"SELECT sql FROM {schema}.sqlite_master WHERE type = 'table' AND name = ?"
    row = connection.execute(query, (name,)).fetchone()
    if row is None or not re.match(r"CREATE TABLE\b", str(row[0]), re.IGNORECASE):
        raise sqlite3.DatabaseError(f"there is no table {name!r} in it")
    if any(hidden for *_, hidden in connection.execute(f"PRAGMA {schema}.table_xinfo({name})")):
        raise sqlite3.DatabaseError(f"the table {name!r} has columns that are computed")


def limit_time(connection: sqlite3.Connection, seconds: float) -> None:
    """Let what a connection runs from now on end in sqlite3.OperationalError ("interrupted") after some time."""
    deadline = time.monotonic() + seconds
    connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)


def sqlite_uri(path: str) -> str:
    """Return the URI under which sqlite opens a local file read-only, without looking for locks or journals."""
    return f"file:{urllib.parse.quote(path)}?mode=ro&immutable=1"
