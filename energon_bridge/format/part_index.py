"""Looking up single parts by key in `index.sqlite`: where their bytes lie, and what is known of the media in them.

Invariant: an index is opened read-only and as immutable, by the first lookup in each process; lookups of all threads of
the process share that connection under a lock. One behind a URL is copied to a local file first, which has no name any
more once it is open, so that nothing is left behind however the process ends. Format: `key_index`, `media`.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from energon_bridge.errors import KeyIndexError, MediaMetadataError, ShardMissingError
from energon_bridge.format.key_index import check_table, copy_key_index, limit_time, sqlite_uri
from energon_bridge.format.media import MediaMetadata, read_metadata
from energon_bridge.format.nvmeta import INDEX_SQLITE, meta_path
from energon_bridge.storage import LocalStore, Store

_PART = """
    SELECT samples.tar_file_id, content_byte_offset, content_byte_size FROM samples JOIN sample_parts
    ON sample_parts.tar_file_id = samples.tar_file_id AND sample_parts.sample_index = samples.sample_index
    WHERE sample_key = ? AND part_name = ?
"""
_SAMPLE = "SELECT tar_file_id, byte_offset, byte_size FROM samples WHERE sample_key = ?"
_MEDIA = "SELECT metadata_type, metadata_json FROM media_metadata WHERE entry_key = ?"

_TABLES = frozenset({"samples", "sample_parts", "media_metadata"})
_LOOKUP_SECONDS = 60.0

_INHERITED: list[sqlite3.Connection] = []
"""Connections of the process that forked this one: sqlite wants them neither used nor closed here."""


class PartLocation(NamedTuple):
    """Where a part lies: shard number in `.info.json`, and bytes of the shard.

    `is_sample` says that the bytes are those of the whole sample, from an index that does not know its parts.
    """

    shard: int
    offset: int
    size: int
    is_sample: bool


class PartIndex:
    """The `index.sqlite` of one dataset or folder, for lookups; thread-safe, fork-safe and picklable."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._connection: sqlite3.Connection | None = None
        self._tables: frozenset[str] = frozenset()

    def __reduce__(self) -> tuple[Any, ...]:
        return PartIndex, (self._store,)

    def __del__(self) -> None:
        self._let_go()

    def find(self, key: str, part: str) -> PartLocation | None:
        """Return where a part of a sample lies, None if there is no such part.

        (Of an index that does not know parts, where the sample lies.) Raises KeyIndexError if there is no index, or a
        damaged one.
        """
        if not self._has("samples"):
            raise self._damaged("there is no table 'samples' in it")
        by_part = self._has("sample_parts")
        rows = self._ask(_PART, (key, part)) if by_part else self._ask(_SAMPLE, (key,))
        if not rows:
            return None
        if not all(type(value) is int and 0 <= value < 1 << 62 for value in rows[0]):
            raise self._damaged(f"it says that {key!r} is in shard, at byte, of size {str(rows[0])[:200]}")
        return PartLocation._make((*rows[0], not by_part))

    def media(self, key: str) -> MediaMetadata | None:
        """Return what is known of a media file, None if nothing is.

        Raises MediaMetadataError if the dataset or folder has no media metadata at all, or some that cannot be read.
        """
        remedy = f"Run `energon prepare-media {self._store.root}` with one of its filters."
        try:
            has_media = self._has("media_metadata")
        except KeyIndexError as error:
            raise MediaMetadataError(f"{self._store.root}: has no media metadata: {error} {remedy}") from error
        if not has_media:
            raise MediaMetadataError(f"{self._store.root}: has no media metadata. {remedy}")
        rows = self._ask(_MEDIA, (key,))
        return read_metadata(*rows[0], where=f"{self._store.root}: media metadata of {key!r}") if rows else None

    def _has(self, table: str) -> bool:
        with self._current_lock():
            self._open()
            return table in self._tables

    def _ask(self, query: str, values: Sequence[object]) -> list[Any]:
        try:
            with self._current_lock():
                connection = self._open()
                limit_time(connection, _LOOKUP_SECONDS)
                return connection.execute(query, values).fetchmany(1)
        except (sqlite3.Error, ValueError) as error:
            raise self._damaged(str(error)) from error

    def _current_lock(self) -> threading.Lock:
        if self._pid != os.getpid():
            # A fork copied the lock, perhaps held by a thread that is not here, and a connection that is not ours.
            self._let_go()
            self._lock, self._pid = threading.Lock(), os.getpid()
        return self._lock

    def _let_go(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._pid == os.getpid():
            connection.close()
        else:
            _INHERITED.append(connection)

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            connection = self._connect()
            try:
                rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
                # Views, which may never end, are no tables.
                for name in _TABLES.intersection(name for (name,) in rows):
                    check_table(connection, "main", name)
            except (sqlite3.Error, ValueError) as error:  # ValueError: of names that are not UTF-8
                connection.close()
                raise self._damaged(str(error)) from error
            self._connection, self._tables = connection, frozenset(name for (name,) in rows)
        return self._connection

    def _connect(self) -> sqlite3.Connection:
        rel = meta_path(INDEX_SQLITE)
        if isinstance(self._store, LocalStore):
            if not self._store.exists(rel):
                raise self._missing()
            return self._connect_to(self._store.url(rel))
        descriptor, scratch = tempfile.mkstemp(prefix="energon-index-")
        os.close(descriptor)
        try:
            copy_key_index(self._store, scratch)
            return self._connect_to(scratch)
        except ShardMissingError as error:
            raise self._missing() from error
        finally:
            os.unlink(scratch)

    def _connect_to(self, path: str) -> sqlite3.Connection:
        try:
            connection = sqlite3.connect(sqlite_uri(path), uri=True, check_same_thread=False)
            try:
                connection.execute("PRAGMA schema_version")  # opens the file, which may be unlinked from then on
            except sqlite3.Error:
                connection.close()
                raise
        except sqlite3.Error as error:
            raise self._damaged(str(error)) from error
        return connection

    def _missing(self) -> KeyIndexError:
        return KeyIndexError(
            f"{self._store.root}: files are looked up by key, but there is no key index "
            f"({self._store.url(meta_path(INDEX_SQLITE))}). Run `energon prepare {self._store.root}` without "
            "--no-key-index."
        )

    def _damaged(self, why: str) -> KeyIndexError:
        return KeyIndexError(
            f"{self._store.root}: cannot read the key index {meta_path(INDEX_SQLITE)}: {why}. Write it again with "
            f"`energon prepare --tar-index-only {self._store.root}`."
        )
