"""`index.sqlite`: finds a sample by its key. Written when a dataset is prepared; training does not need it.

Tables `samples(tar_file_id, sample_key UNIQUE, sample_index, byte_offset, byte_size)` and `sample_parts(tar_file_id,
sample_index, part_name, content_byte_offset, content_byte_size)` with three indexes; a tar_file_id is the position of
the shard in `.info.json`. Schema and names are those of Megatron Energon 7.4.

Invariant: whoever reads a local index finds the state before or after a run that adds keys to it in place (one
transaction of sqlite). Readers open it with sqlite's locks; one that was killed in its transaction leaves a journal
beside it, which the next connection that may write rolls back. Rows of shards that `.info.json` does not list are
those of a run that was killed after it: they count as missing, and the next run replaces them.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sqlite3
import time
import urllib.parse
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import pairwise, repeat
from types import TracebackType
from typing import NamedTuple

import numpy as np

from energon_bridge.core.errors import DuplicateKeyError, KeyIndexError, ShardMissingError, StorageError
from energon_bridge.core.format.nvmeta import INDEX_SQLITE, INDEX_UUID, INFO_JSON, meta_path, read_info
from energon_bridge.core.format.tar_index import ShardScan, other_parts
from energon_bridge.core.order.rng import IntArray
from energon_bridge.core.storage import LocalStore, Store, cannot_write

# ---------------------------------------------------------------------------------------------------------------------
# Reading key indexes, and matching the keys of one dataset with those of another.
#
# Invariant: a key index is opened with one connection per task, so any number of processes can share it and nothing
# stays open. An index at a URL is copied to a local file first.


NEW_KEYS = "energon convert SOURCE OUT --keys number"
"""The command that writes samples with equal keys again, all of them, with keys of their own."""
_COPY_BYTES = 64 << 20
_CHECK_EVERY_STEPS = 1_000_000
"""Steps of sqlite's virtual machine between two checks of the time limit; a lookup takes a few dozen."""
_TASK_SECONDS = 3600.0
"""Seconds allowed for one task, such as matching the keys of a shard."""

_MATCHES = """
    SELECT own.sample_index, COALESCE(other.tar_file_id, -1), COALESCE(other.sample_index, -1) FROM samples AS own
    LEFT JOIN other.samples AS other ON other.sample_key = own.sample_key
    WHERE own.tar_file_id = ? ORDER BY own.sample_index
"""
_WAIT_SECONDS = 60.0
"""How long a reader waits for a run that writes its keys, which takes about a second."""
_NO_LOCKS = frozenset({sqlite3.SQLITE_IOERR_LOCK, sqlite3.SQLITE_IOERR_RDLOCK, sqlite3.SQLITE_PERM})


def key_index_version(store: Store) -> list[str | int]:
    """Return the version of a key index, which changes when it is rewritten: its `index.uuid` and its size in bytes.

    Raises:
        KeyIndexError: The dataset has no key index.
    """
    rel = meta_path(INDEX_SQLITE)
    try:
        return [_uuid(store), store.size(rel)]
    except ShardMissingError as error:
        raise missing_key_index(store) from error


def missing_key_index(store: Store) -> KeyIndexError:
    """Return the error for a dataset without a key index."""
    return KeyIndexError(
        f"{store.root}: looking up samples by key needs a key index, which is missing "
        f"({store.url(meta_path(INDEX_SQLITE))}). Run `energon prepare {store.root}` without --no-key-index."
    )


def damaged_key_index(dataset: str, why: object, other: str | None = None) -> KeyIndexError:
    """Return the error for a key index that cannot be read; if there is an `other` dataset, for one of the two."""
    datasets, path = (dataset, dataset) if other is None else (f"{dataset} or {other}", "PATH")
    return KeyIndexError(
        f"{datasets}: cannot read the key index {meta_path(INDEX_SQLITE)}: {why}. Rebuild it with `energon prepare "
        f"--tar-index-only {path}`."
    )


def stale_key_index(dataset: str) -> KeyIndexError:
    """Return the error for a key index of other samples than `.info.json` counts."""
    return KeyIndexError(
        f"{dataset}: the key index and `.info.json` list different samples. Rebuild both: "
        f"`energon prepare --tar-index-only {dataset}`."
    )


def _uuid(store: Store) -> str:
    rel = meta_path(INDEX_UUID)
    return store.read(rel).decode(errors="replace").strip() if store.exists(rel) else ""


class KeyIndex(NamedTuple):
    """A key index as a local file, with its dataset."""

    path: str
    dataset: str


def find_key_index(store: Store, scratch: str) -> KeyIndex:
    """Return the key index of a dataset, copied to the file `scratch` if it is at a URL.

    Raises ShardMissingError if there is none.
    """
    rel = meta_path(INDEX_SQLITE)
    if not isinstance(store, LocalStore):
        copy_key_index(store, scratch)
        return KeyIndex(scratch, store.root)
    if not store.exists(rel):
        raise ShardMissingError(f"{store.url(rel)} does not exist.")
    return KeyIndex(store.url(rel), store.root)


def local_key_index(store: Store, scratch: str) -> KeyIndex:
    """Return the key index of a dataset as `find_key_index` does, after checks.

    Raises:
        KeyIndexError: It is missing or damaged, lacks shards, or is of an old release that allowed equal keys.
    """
    try:
        index = find_key_index(store, scratch)
    except ShardMissingError as error:
        raise missing_key_index(store) from error
    with _connected(index) as connection:
        if not any(is_unique for _, _, is_unique, *_ in connection.execute("PRAGMA index_list(samples)")):
            raise sqlite3.DatabaseError("it has no table of samples with unique keys")
        check_complete(connection, store)
    return index


def check_complete(connection: sqlite3.Connection, store: Store) -> None:
    """Raise sqlite3.DatabaseError if an index ends before the last shard of a prepared dataset."""
    if not store.exists(meta_path(INFO_JSON)):
        return
    counts = read_info(store).shard_counts
    end = connection.execute("SELECT max(tar_file_id) FROM samples").fetchone()[0]
    end = end if isinstance(end, int) else -1
    lacking = next((shard for number, (shard, count) in enumerate(counts.items()) if number > end and count), None)
    if lacking is not None:
        raise sqlite3.DatabaseError(f"it ends before {lacking}, which `.info.json` lists: it is of an earlier state")


def copy_key_index(store: Store, path: str) -> None:
    """Copy the key index of a dataset to a local file, in pieces of bounded size."""
    rel = meta_path(INDEX_SQLITE)
    if store.exists(f"{rel}-journal"):
        raise KeyIndexError(
            f"{store.root}: {rel} is being changed, or was when it was copied here: {rel}-journal lies beside it. Wait "
            "for the `energon prepare` that adds its keys, or run it again if it was killed, and copy both again."
        )
    size = store.size(rel)
    try:
        with open(path, "wb") as file:
            for start in range(0, size, _COPY_BYTES):
                file.write(store.read_range(rel, start, min(_COPY_BYTES, size - start)))
    except OSError as error:
        elsewhere = "" if path.startswith(store.root) else ", or name another folder: TMPDIR=FOLDER"
        raise StorageError(
            f"{path}: cannot write the {size:,} bytes of {store.url(rel)}: {error}. Make room{elsewhere}."
        ) from error


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
    """Return (shard number, number in the shard) of each key; None if the index lacks it."""
    with _connected(index) as connection:
        query = "SELECT tar_file_id, sample_index FROM samples WHERE sample_key = ?"
        return [connection.execute(query, (key,)).fetchone() for key in keys]


def keys_at(index: KeyIndex, shard: int, indices: Sequence[int]) -> list[str]:
    """Return the keys of some samples of a shard."""
    with _connected(index) as connection:
        query = "SELECT sample_key FROM samples WHERE tar_file_id = ? AND sample_index = ?"
        return [str(connection.execute(query, (shard, number)).fetchone()[0]) for number in indices]


def keys_of_shard(index: KeyIndex, shard: int) -> list[str]:
    """Return the keys of all samples of a shard, in its order."""
    with _connected(index) as connection:
        query = "SELECT sample_key FROM samples WHERE tar_file_id = ? ORDER BY sample_index"
        return [str(key) for (key,) in connection.execute(query, (shard,))]


@contextmanager
def _connected(own: KeyIndex, other: KeyIndex | None = None) -> Iterator[sqlite3.Connection]:
    """Open a key index, with another one attached as `other`; errors inside the block become KeyIndexErrors."""
    try:
        with closing(connect_key_index(own)) as connection:
            limit_time(connection, _TASK_SECONDS)
            check_table(connection, "main", "samples")
            if other is not None:
                connection.execute("ATTACH ? AS other", (_locked_uri(other),))
                check_table(connection, "other", "samples")
            yield connection
    except (sqlite3.Error, ValueError, TypeError) as error:  # the last two: values of other types than expected
        raise damaged_key_index(own.dataset, error, other.dataset if other else None) from error


def connect_key_index(index: KeyIndex, *, locks: bool = True, any_thread: bool = False) -> sqlite3.Connection:
    """Open a key index for reading; raises sqlite3.Error.

    Raises KeyIndexError if it must be rolled back by someone who may write there.

    With `locks=False` a row that is found is right, but one may be missed, or unreadable, while a run adds keys.
    """
    uri = _locked_uri(index) if locks else sqlite_uri(index.path)
    connection = sqlite3.connect(uri, timeout=_WAIT_SECONDS, uri=True, check_same_thread=not any_thread)
    try:
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA schema_version")  # opens the file, which may be unlinked from then on
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _locked_uri(index: KeyIndex) -> str:
    """Return the URI under which sqlite reads an index, with locks if its file system has them."""
    uri = _uri(index.path)
    try:
        with closing(sqlite3.connect(uri, timeout=_WAIT_SECONDS, uri=True)) as connection:
            connection.execute("PRAGMA schema_version")
    except sqlite3.Error as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_READONLY_ROLLBACK:
            raise KeyIndexError(
                f"{index.dataset}: an `energon prepare` that added keys was killed and left {index.path}-journal, "
                "which is rolled back by whoever may write there; this user may not. As one who may, run `energon "
                f"prepare --tar-index-only {index.dataset}`."
            ) from error
        if error.sqlite_errorcode not in _NO_LOCKS or os.path.exists(f"{index.path}-journal"):
            raise
        return sqlite_uri(index.path)
    return uri


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
    connection.set_progress_handler(lambda: time.monotonic() > deadline, _CHECK_EVERY_STEPS)


def sqlite_uri(path: str) -> str:
    """Return the URI under which sqlite opens a local file read-only, without looking for locks or journals."""
    return f"{_uri(path, 'ro')}&immutable=1"


def _uri(path: str, mode: str = "rw") -> str:
    """Return the URI of a local file; with "rw" sqlite opens it for reading if its user may not write."""
    return f"file:{urllib.parse.quote(path)}?mode={mode}"


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
# A new file is built under a temporary name and thrown away after a crash: no journal, no waiting for the disk.
_NEW = ("PRAGMA journal_mode = OFF", "PRAGMA synchronous = OFF", "PRAGMA locking_mode = EXCLUSIVE")
_IN_PLACE = ("PRAGMA journal_mode = DELETE", "PRAGMA synchronous = FULL")
_CACHE_KIB = 256 << 10
"""Changed pages are held until the transaction ends, up to this size; while they are written, readers wait."""


def can_add_keys(path: str) -> bool:
    """Whether keys can be added to an index in place: its user may write it, and its file system has locks."""
    try:
        with closing(sqlite3.connect(_uri(path), uri=True, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            return True
    except sqlite3.Error:
        return False


def settle_key_index(path: str) -> None:
    """Roll back the unfinished transaction of a run that was killed while it added keys; raises StorageError."""
    if not os.path.exists(f"{path}-journal"):
        return
    try:
        if os.path.exists(path):
            # Opening the file and reading anything makes sqlite roll the journal back.
            with closing(sqlite3.connect(_uri(path), timeout=_WAIT_SECONDS, uri=True)) as connection:
                connection.execute("PRAGMA schema_version")
        with suppress(FileNotFoundError):
            os.unlink(f"{path}-journal")  # it would be rolled back into the next index of this name
    except (sqlite3.Error, OSError) as error:
        raise StorageError(
            f"{path}: a run was killed while it added keys, which cannot be rolled back: {error}. Delete this file and "
            f"{os.path.basename(path)}-journal, and prepare the dataset again."
        ) from error


class KeyIndexWriter:
    """Writes a key index to a local file, one shard after the other; a context manager.

    Args:
        shards: Names of all shards in the order of `.info.json`.
        in_place: Add to the index in this file, which has the first `in_place` shards, in one transaction. Whatever it
            has of later shards is of a run that was killed and is removed. None: write a new file.

    Attributes:
        connection: Writes the file; what others add goes within `writing`.
    """

    def __init__(self, path: str | os.PathLike[str], shards: Sequence[str], *, in_place: int | None = None) -> None:
        self._shards = shards
        self._path = os.fspath(path)
        self._continued = ""
        if in_place is None:
            self._connect(_NEW, *_TABLES)
        else:
            self._continue(self._path, in_place, _IN_PLACE)

    def _connect(self, pragmas: Sequence[str], *statements: str) -> None:
        with self.writing():
            self.connection = sqlite3.connect(_uri(self._path, "rwc"), uri=True, isolation_level=None, timeout=600)
            for statement in (*pragmas, f"PRAGMA cache_size = -{_CACHE_KIB}", "BEGIN IMMEDIATE", *statements):
                self.connection.execute(statement)

    def _continue(self, old: str | os.PathLike[str], num_shards: int, pragmas: Sequence[str], *statements: str) -> None:
        self._continued = f", which continues {os.fspath(old)} (delete that to do without)"
        removed = (f"DELETE FROM {table} WHERE tar_file_id >= {num_shards}" for table in ("sample_parts", "samples"))
        self._connect(pragmas, *removed, *statements)

    def take_over(self, old: KeyIndex, shards: Sequence[str], kept: Collection[str], *, media: bool) -> None:
        """Copy the rows of some shards from an earlier key index, before anything is added.

        Args:
            old: That index, which stays as it is.
            shards: Its shards, in their order.
            kept: Names of those that have not changed.
            media: Copy the media metadata, too; otherwise the new index has none.
        """
        if list(self._shards[: len(shards)]) == list(shards) and len(kept) == len(shards):
            self.connection.close()
            with self.writing(f", copying {old.path}"):
                shutil.copyfile(old.path, self._path)
            dropped = (f"DROP TABLE IF EXISTS {name}" for name in _MEDIA_TABLES if not media)
            self._continue(old.path, len(shards), _NEW, *dropped)
            return
        new_numbers = {shard: number for number, shard in enumerate(self._shards)}
        moves = [(number, new_numbers[shard]) for number, shard in enumerate(shards) if shard in kept]
        self.connection.execute("CREATE TEMP TABLE moves(old INTEGER PRIMARY KEY, new INTEGER)")
        self.connection.executemany("INSERT INTO moves VALUES (?, ?)", moves)
        with self._reading(old.path):
            for table, columns, order in (
                ("samples", "sample_key, sample_index, byte_offset, byte_size", "sample_index"),
                (
                    "sample_parts",
                    "sample_index, part_name, content_byte_offset, content_byte_size",
                    "sample_index, content_byte_offset",
                ),
            ):
                self.connection.execute(
                    f"INSERT INTO main.{table} SELECT new, {columns} FROM moves JOIN old.{table} "
                    f"ON tar_file_id = old ORDER BY new, {order}"
                )
        self.connection.execute("DROP TABLE moves")

    def add(self, shard: int, scan: ShardScan) -> None:
        """Add the samples of shard number `shard`; raises DuplicateKeyError naming both shards."""
        sizes = [end - start for start, end in pairwise(scan.offsets)]
        rows = zip(repeat(shard), scan.keys, range(len(sizes)), scan.offsets, sizes, strict=False)
        parts = zip(repeat(shard), scan.part_samples, scan.part_names, scan.part_offsets, scan.part_sizes, strict=False)
        with self.writing():
            try:
                self.connection.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", rows)
                self.connection.executemany("INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", parts)
            except sqlite3.IntegrityError as error:
                raise self._duplicate(shard, scan) from error

    def keep_media_tables(self, old: str | os.PathLike[str]) -> None:
        """Copy the media metadata of the index that this one replaces, since preparing again does not make it."""
        if self._continued:
            return  # they were copied with it
        query = "SELECT name, sql FROM old.sqlite_master WHERE type = 'table' AND name IN (?, ?)"
        with self._reading(os.fspath(old)):
            for name, create in self.connection.execute(query, _MEDIA_TABLES).fetchall():
                check_table(self.connection, "old", name)
                self.connection.execute(create)
                self.connection.execute(f"INSERT INTO main.{name} SELECT * FROM old.{name}")

    def finish(self) -> None:
        """Create the indexes and write everything to disk."""
        with self.writing():
            for statement in ("COMMIT",) if self._continued else (*_INDEXES, "COMMIT"):
                self.connection.execute(statement)
            self.connection.close()

    @contextmanager
    def _reading(self, old: str) -> Iterator[None]:
        """Attach an earlier key index as `old`."""
        with self.writing(f", taking over what is in {old} (delete it to do without)"):
            self.connection.execute("COMMIT")
            self.connection.execute("ATTACH ? AS old", (old,))
            yield
            self.connection.execute("DETACH old")
            self.connection.execute("BEGIN")

    @contextmanager
    def writing(self, doing: str = "") -> Iterator[None]:
        """Turn errors of sqlite into a StorageError."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError, OSError) as error:  # names in a damaged file need not be text
            raise cannot_write(self._path, error, f" the key index{doing or self._continued}") from error

    def __enter__(self) -> KeyIndexWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.connection.close()

    def _duplicate(self, shard: int, scan: ShardScan) -> DuplicateKeyError:
        """Find the keys that made the insertion fail; rows of this shard before them may be in the table."""
        seen: set[str] = set()
        twice: dict[str, str] = {}  # by key: the other shard that has it
        query = "SELECT tar_file_id FROM samples WHERE sample_key = ? AND tar_file_id != ?"
        for key in scan.keys:
            row = self.connection.execute(query, (key, shard)).fetchone()
            if row is not None or key in seen:
                twice.setdefault(key, self._shards[shard if row is None else row[0]])
            seen.add(key)
        if not twice:  # an index of another tool may have other constraints
            return DuplicateKeyError(f"a sample key of {self._shards[shard]!r} occurs twice in the dataset.")
        key, other = next(iter(twice.items()))
        there = self._part_names(key)
        here = scan.parts_of(scan.keys.index(key))
        if other != self._shards[shard] and there and there.isdisjoint(here):
            return other_parts(other, key, there, self._shards[shard], here)
        more = f", and so with {len(twice) - 1} more of its keys" if len(twice) > 1 else ""
        return DuplicateKeyError(
            f"the sample key {key!r} is in {other!r} and again in {self._shards[shard]!r}{more}. Keys must be unique "
            f"in a dataset. Write the samples again, numbered: {NEW_KEYS}; or prepare with --no-key-index if nothing "
            "looks samples up by key."
        )

    def _part_names(self, key: str) -> set[str]:
        """Return the names of the parts of the earlier sample with a key."""
        query = "SELECT part_name FROM sample_parts JOIN samples USING (tar_file_id, sample_index) WHERE sample_key = ?"
        names: set[str] = set()
        with suppress(sqlite3.Error):  # an index of another tool may lack the table
            check_table(self.connection, "main", "sample_parts")
            names |= {str(name) for (name,) in self.connection.execute(query, (key,))}
        return names
