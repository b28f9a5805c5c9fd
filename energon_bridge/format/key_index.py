"""`index.sqlite`: finds a sample by its key. Written when a dataset is prepared; training does not need it.

Tables `samples(tar_file_id, sample_key UNIQUE, sample_index, byte_offset, byte_size)` and `sample_parts(tar_file_id,
sample_index, part_name, content_byte_offset, content_byte_size)` with three indexes; a tar_file_id is the position of
the shard in `.info.json`. Schema and names: reference section 1.5.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sqlite3
import time
import urllib.parse
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import pairwise, repeat
from types import TracebackType
from typing import NamedTuple

import numpy as np

from energon_bridge.errors import DuplicateKeyError, KeyIndexError, ShardMissingError, StorageError
from energon_bridge.format.media import create_media_tables, note_filter, write_media_rows
from energon_bridge.format.nvmeta import INDEX_SQLITE, INDEX_UUID, meta_path
from energon_bridge.format.tar_index import ShardScan
from energon_bridge.rng import IntArray
from energon_bridge.storage import LocalStore, Store

# ---------------------------------------------------------------------------------------------------------------------
# Reading key indexes, and matching the keys of one dataset with those of another.
#
# Invariant: a key index is opened read-only and as immutable, with one connection per task, so any number of processes
# can share it and nothing stays open. An index at a URL is copied to a local file first.


_COPY_BYTES = 64 << 20
_STEPS = 1_000_000
"""Steps of sqlite's virtual machine between two checks of the time limit; a lookup takes a few dozen."""
_PIECE_SECONDS = 3600.0
"""Seconds allowed for one task, such as matching the keys of a shard."""

_MATCHES = """
    SELECT own.sample_index, COALESCE(other.tar_file_id, -1), COALESCE(other.sample_index, -1)
    FROM main.samples AS own LEFT JOIN other.samples AS other ON other.sample_key = own.sample_key
    WHERE own.tar_file_id = ? ORDER BY own.sample_index
"""


def key_index_version(store: Store) -> list[str | int]:
    """Return the version of a key index, which changes when it is rewritten: its `index.uuid` and its size in bytes.

    Raises:
        KeyIndexError: The dataset has no key index.
    """
    rel = meta_path(INDEX_SQLITE)
    try:
        size = store.size(rel)
    except ShardMissingError as error:
        raise KeyIndexError(
            f"{store.root}: looking up samples by key needs a key index, which is missing ({store.url(rel)}). "
            f"Run `energon prepare {store.root}` without --no-key-index."
        ) from error
    uuid = meta_path(INDEX_UUID)
    return [store.read(uuid).decode(errors="replace").strip() if store.exists(uuid) else "", size]


class KeyIndex(NamedTuple):
    """A key index as a local file, with its dataset."""

    path: str
    dataset: str


def local_key_index(store: Store, scratch: str) -> KeyIndex:
    """Return the key index of a dataset, copied to the file `scratch` if it is at a URL.

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
            raise sqlite3.DatabaseError("it has no table of samples with unique keys")
    return index


def copy_key_index(store: Store, path: str) -> None:
    """Copy the key index of a dataset to a local file, in pieces of bounded size."""
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
    """Return (shard number, number in the shard) of each key; None for a missing key."""
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
    """Open a key index, with another one attached as `other`; errors inside the block become KeyIndexErrors."""
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
            f"{datasets}: cannot read the key index {meta_path(INDEX_SQLITE)}: {error}. Rebuild it with `energon "
            f"prepare --tar-index-only {own.dataset if other is None else 'PATH'}`."
        ) from error


def check_table(connection: sqlite3.Connection, schema: str, name: str) -> None:
    """Raise sqlite3.DatabaseError unless a name is that of a plain table: querying a view might never end."""
    query = f"SELECT sql FROM {schema}.sqlite_master WHERE type = 'table' AND name = ?"
    row = connection.execute(query, (name,)).fetchone()
    if row is None or not re.match(r"CREATE TABLE\b", str(row[0]), re.IGNORECASE):
        raise sqlite3.DatabaseError(f"it has no table {name!r}")
    if any(hidden for *_, hidden in connection.execute(f"PRAGMA {schema}.table_xinfo({name})")):
        raise sqlite3.DatabaseError(f"the table {name!r} has computed columns")


def limit_time(connection: sqlite3.Connection, seconds: float) -> None:
    """Make queries of a connection raise sqlite3.OperationalError ("interrupted") after some time."""
    deadline = time.monotonic() + seconds
    connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)


def sqlite_uri(path: str) -> str:
    """Return the URI under which sqlite opens a local file read-only, without looking for locks or journals."""
    return f"file:{urllib.parse.quote(path)}?mode=ro&immutable=1"


# ---------------------------------------------------------------------------------------------------------------------
# Writing `index.sqlite`.


_TABLES = (
    """CREATE TABLE samples (
        tar_file_id INTEGER NOT NULL,
        sample_key TEXT NOT NULL UNIQUE,
        sample_index INTEGER NOT NULL,
        byte_offset INTEGER,
        byte_size INTEGER
    )""",
    """CREATE TABLE sample_parts (
        tar_file_id INTEGER,
        sample_index INTEGER,
        part_name TEXT,
        content_byte_offset INTEGER,
        content_byte_size INTEGER
    )""",
)
_INDEXES = (
    "CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index)",
    "CREATE INDEX idx_sample_parts_seq ON sample_parts(tar_file_id, sample_index, content_byte_offset)",
    "CREATE INDEX idx_sample_parts_full ON sample_parts"
    "(tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size)",
)
_MEDIA_TABLES = ("media_metadata", "media_filters")
# The file is built under a temporary name and thrown away after a crash: no journal, no waiting for the disk.
_PRAGMAS = (
    "PRAGMA journal_mode = OFF",
    "PRAGMA synchronous = OFF",
    "PRAGMA locking_mode = EXCLUSIVE",
    "PRAGMA cache_size = -262144",
)


class KeyIndexWriter:
    """Writes a new key index to a local file, one shard after the other; a context manager.

    `shards` are the names of all shards in the order of `.info.json`, for errors.
    """

    def __init__(self, path: str | os.PathLike[str], shards: Sequence[str]) -> None:
        self._shards = shards
        self._path = os.fspath(path)
        self._continued = ""
        self._connect(*_TABLES)

    def _connect(self, *statements: str) -> None:
        with self._writing():
            self._connection = sqlite3.connect(self._path, isolation_level=None)
            for statement in (*_PRAGMAS, *statements, "BEGIN"):
                self._connection.execute(statement)

    def take_over(self, old: str, shards: Sequence[str], kept: Collection[str], *, media: bool) -> None:
        """Copy the rows of some shards from an earlier key index, before anything is added.

        Args:
            old: Path of that index, which stays as it is.
            shards: Its shards, in their order.
            kept: Names of those that have not changed.
            media: Copy the media metadata, too; otherwise the new index has none.
        """
        if list(self._shards[: len(shards)]) == list(shards) and len(kept) == len(shards):
            self._connection.close()
            with self._writing(f", copying {old}"):
                shutil.copyfile(old, self._path)
            self._continued = f", which continues {old} (delete that to do without)"
            self._connect(*(f"DROP TABLE IF EXISTS {name}" for name in _MEDIA_TABLES if not media))
            return
        places = {shard: number for number, shard in enumerate(self._shards)}
        moves = [(number, places[shard]) for number, shard in enumerate(shards) if shard in kept]
        with self._reading(old):
            self._connection.execute("CREATE TEMP TABLE moves(old INTEGER PRIMARY KEY, new INTEGER)")
            self._connection.executemany("INSERT INTO moves VALUES (?, ?)", moves)
            for table, columns, order in (
                ("samples", "sample_key, sample_index, byte_offset, byte_size", "sample_index"),
                (
                    "sample_parts",
                    "sample_index, part_name, content_byte_offset, content_byte_size",
                    "sample_index, content_byte_offset",
                ),
            ):
                self._connection.execute(
                    f"INSERT INTO main.{table} SELECT new, {columns} FROM moves JOIN old.{table} ON tar_file_id = old "
                    f"ORDER BY new, {order}"
                )
            self._connection.execute("DROP TABLE moves")

    def add(self, shard: int, scan: ShardScan) -> None:
        """Add the samples of shard number `shard`; raises DuplicateKeyError naming both shards."""
        sizes = [end - start for start, end in pairwise(scan.offsets)]
        rows = zip(repeat(shard), scan.keys, range(len(sizes)), scan.offsets, sizes, strict=False)
        parts = zip(repeat(shard), scan.part_samples, scan.part_names, scan.part_offsets, scan.part_sizes, strict=False)
        with self._writing():
            try:
                self._connection.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", rows)
                self._connection.executemany("INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", parts)
            except sqlite3.IntegrityError as error:
                raise self._duplicate(shard, scan) from error

    def keep_media_tables(self, old: str | os.PathLike[str]) -> None:
        """Copy the media metadata of the index that this one replaces, since preparing again does not make it."""
        if self._continued:
            return  # they were copied with it
        query = "SELECT name, sql FROM old.sqlite_master WHERE type = 'table' AND name IN (?, ?)"
        with self._reading(os.fspath(old)):
            for name, create in self._connection.execute(query, _MEDIA_TABLES).fetchall():
                check_table(self._connection, "old", name)
                self._connection.execute(create)
                self._connection.execute(f"INSERT INTO main.{name} SELECT * FROM old.{name}")

    def add_media(self, rows: Iterable[Sequence[str]]) -> None:
        """Add media metadata as rows of (key, type, JSON).

        Unlike `energon prepare-media`, this records no time, so that the same rows give the same file.
        """
        with self._writing():
            create_media_tables(self._connection)
            note_filter(self._connection, "EXTENSION", "", created_at_utc="1970-01-01 00:00:00")
            write_media_rows(self._connection, rows)

    def finish(self) -> None:
        """Create the indexes and write everything to disk."""
        with self._writing():
            for statement in ("COMMIT",) if self._continued else (*_INDEXES, "COMMIT"):
                self._connection.execute(statement)
            self._connection.close()

    @contextmanager
    def _reading(self, old: str) -> Iterator[None]:
        """Attach an earlier key index as `old`."""
        with self._writing(f", taking over what is in {old} (delete it to do without)"):
            self._connection.execute("COMMIT")
            self._connection.execute("ATTACH ? AS old", (old,))
            yield
            self._connection.execute("DETACH old")
            self._connection.execute("BEGIN")

    @contextmanager
    def _writing(self, doing: str = "") -> Iterator[None]:
        """Turn errors of sqlite into a StorageError."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError, OSError) as error:  # names in a damaged file need not be text
            raise StorageError(
                f"{self._path}: cannot write the key index{doing or self._continued}: {error}. Is the disk full, or "
                "is there a limit on file sizes?"
            ) from error

    def __enter__(self) -> KeyIndexWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._connection.close()

    def _duplicate(self, shard: int, scan: ShardScan) -> DuplicateKeyError:
        """Find the key that made the insertion fail; rows of this shard before it may be in the table."""
        seen: set[str] = set()
        for key in scan.keys:
            query = "SELECT tar_file_id FROM samples WHERE sample_key = ? AND tar_file_id != ?"
            row = self._connection.execute(query, (key, shard)).fetchone()
            if row is not None or key in seen:
                other = self._shards[row[0]] if row is not None else self._shards[shard]
                return DuplicateKeyError(
                    f"the sample key {key!r} is in {other!r} and again in {self._shards[shard]!r}. Keys must be "
                    f"unique in a dataset, and the members of a sample must be adjacent. Rename keys with "
                    f"--fix-duplicates, leave a shard out with --exclude, or prepare with --no-key-index if nothing "
                    f"looks samples up by key."
                )
            seen.add(key)
        return DuplicateKeyError(f"a sample key of {self._shards[shard]!r} occurs twice in the dataset.")
