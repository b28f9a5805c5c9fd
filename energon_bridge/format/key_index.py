"""`index.sqlite`: finds a sample by its key. Written when a dataset is prepared; training does not need it.

Tables `samples(tar_file_id, sample_key UNIQUE, sample_index, byte_offset, byte_size)` and `sample_parts(tar_file_id,
sample_index, part_name, content_byte_offset, content_byte_size)` with three indexes; a tar_file_id is the position of
the shard in `.info.json`. Schema and names: reference section 1.5.

The shards that are added to a large index are in a second file with the same tables, its supplement
`index.<index.uuid>.sqlite`. Writing `index.sqlite` again gives `index.uuid` a new value, so that no supplement of an
earlier index is used.
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
from contextlib import closing, contextmanager, suppress
from itertools import pairwise, repeat
from types import TracebackType
from typing import NamedTuple

import numpy as np

from energon_bridge.errors import DuplicateKeyError, KeyIndexError, ShardMissingError, StorageError
from energon_bridge.format.media import create_media_tables, note_filter, write_media_rows
from energon_bridge.format.nvmeta import INDEX_SQLITE, INDEX_UUID, INFO_JSON, meta_path, read_info
from energon_bridge.format.tar_index import ShardScan, other_parts
from energon_bridge.rng import IntArray
from energon_bridge.storage import LocalStore, Store

# ---------------------------------------------------------------------------------------------------------------------
# Reading key indexes, and matching the keys of one dataset with those of another.
#
# Invariant: a key index is opened read-only and as immutable, with one connection per task, so any number of processes
# can share it and nothing stays open. An index at a URL is copied to a local file first, and its supplement into it.


_COPY_BYTES = 64 << 20
_CHECK_EVERY_STEPS = 1_000_000
"""Steps of sqlite's virtual machine between two checks of the time limit; a lookup takes a few dozen."""
_TASK_SECONDS = 3600.0
"""Seconds allowed for one task, such as matching the keys of a shard."""

_MATCHES = """
    SELECT own.sample_index, COALESCE({shards}, -1), COALESCE({numbers}, -1) FROM {own}.samples AS own {joins}
    WHERE own.tar_file_id = ? ORDER BY own.sample_index
"""
_SUPPLEMENT = re.compile(rf"{re.escape(meta_path('index.'))}[0-9a-f]{{8}}(-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}\.sqlite")
_MERGE = (
    "DELETE FROM main.{table} WHERE tar_file_id >= (SELECT min(tar_file_id) FROM old.samples)",
    "INSERT INTO main.{table} SELECT * FROM old.{table} ORDER BY rowid",
)


def key_index_version(store: Store) -> list[str | int]:
    """Return the version of a key index, which changes when it is rewritten: its `index.uuid` and its size in bytes.

    Raises:
        KeyIndexError: The dataset has no key index.
    """
    rel = meta_path(INDEX_SQLITE)
    try:
        return [_uuid_of(store), store.size(rel)]
    except ShardMissingError as error:
        raise _missing(store) from error


def _missing(store: Store) -> KeyIndexError:
    return KeyIndexError(
        f"{store.root}: looking up samples by key needs a key index, which is missing "
        f"({store.url(meta_path(INDEX_SQLITE))}). Run `energon prepare {store.root}` without --no-key-index."
    )


def _uuid_of(store: Store) -> str:
    rel = meta_path(INDEX_UUID)
    return store.read(rel).decode(errors="replace").strip() if store.exists(rel) else ""


class KeyIndex(NamedTuple):
    """A key index as local files, with its dataset; `supplement` is empty if it has none."""

    path: str
    dataset: str
    supplement: str = ""

    def schemas(self, name: str = "main") -> list[str]:
        """Return the names of its files in a connection, where the first is called `name`."""
        return [name, f"{name}_supplement"] if self.supplement else [name]


def supplement_name(uuid: str) -> str:
    """Return the path in the dataset of the supplement for an `index.uuid`."""
    return meta_path(f"index.{uuid}.sqlite")


def find_supplement(store: Store) -> str | None:
    """Return the path in the dataset of its supplement; None if there is none."""
    name = supplement_name(_uuid_of(store))
    return name if _SUPPLEMENT.fullmatch(name) and store.exists(name) else None


def remove_supplements(store: Store, *, keep: Collection[str | None] = ()) -> None:
    """Remove all supplements of a dataset but those with these paths."""
    for name, _ in store.list((".sqlite",)):
        if _SUPPLEMENT.fullmatch(name) and name not in keep:
            store.delete(name)


def count_supplemented(index: KeyIndex, num_shards: int) -> int:
    """Return how many of a dataset's shards are in the supplement."""
    if not index.supplement:
        return 0
    with _connected(index) as connection:
        first = connection.execute("SELECT min(tar_file_id) FROM main_supplement.samples").fetchone()[0]
    return 0 if first is None else num_shards - int(first)


def find_key_index(store: Store, scratch: str) -> KeyIndex:
    """Return the key index of a dataset, copied to the file `scratch` if it is at a URL.

    Raises ShardMissingError if there is none, and KeyIndexError if its supplement is damaged and has to be copied.
    """
    rel = meta_path(INDEX_SQLITE)
    if not isinstance(store, LocalStore):
        copy_key_index(store, scratch)
        return KeyIndex(scratch, store.root)
    if not store.exists(rel):
        raise ShardMissingError(f"{store.url(rel)} does not exist.")
    supplement = find_supplement(store)
    return KeyIndex(store.url(rel), store.root, store.url(supplement) if supplement else "")


def local_key_index(store: Store, scratch: str) -> KeyIndex:
    """Return the key index of a dataset as `find_key_index` does, after checks.

    Raises:
        KeyIndexError: It is missing or damaged, lacks shards, or is of an old release that allowed equal keys.
    """
    try:
        index = find_key_index(store, scratch)
    except ShardMissingError as error:
        raise _missing(store) from error
    with _connected(index) as connection:
        for schema in index.schemas():
            if not any(is_unique for _, _, is_unique, *_ in connection.execute(f"PRAGMA {schema}.index_list(samples)")):
                raise sqlite3.DatabaseError("it has no table of samples with unique keys")
        check_complete(connection, index, store)
    return index


def check_complete(connection: sqlite3.Connection, index: KeyIndex, store: Store) -> None:
    """Raise sqlite3.DatabaseError if an index ends before the last shard of a prepared dataset: a file is missing."""
    if not store.exists(meta_path(INFO_JSON)):
        return
    counts = read_info(store).shard_counts
    queries = (f"SELECT max(tar_file_id) FROM {schema}.samples" for schema in index.schemas())
    ends = [connection.execute(query).fetchone()[0] for query in queries]
    end = max((end for end in ends if isinstance(end, int)), default=-1)
    lacking = next((shard for number, (shard, count) in enumerate(counts.items()) if number > end and count), None)
    if lacking is not None:
        raise sqlite3.DatabaseError(
            f"it ends before {lacking}, which `.info.json` lists. Was {supplement_name(_uuid_of(store))} "
            "left out of a copy of the dataset?"
        )


def copy_key_index(store: Store, path: str) -> None:
    """Copy the key index of a dataset to one local file, in pieces of bounded size, its supplement included."""
    _copy(store, meta_path(INDEX_SQLITE), path)
    name = find_supplement(store)
    if name is None:
        return
    supplement = f"{path}-supplement"
    try:
        _copy(store, name, supplement)
        with _naming(store.root), closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = OFF")
            connection.execute("ATTACH ? AS old", (supplement,))
            connection.execute("BEGIN")
            merge_supplement(connection)
            connection.execute("COMMIT")
    finally:
        with suppress(FileNotFoundError):
            os.unlink(supplement)


def _copy(store: Store, rel: str, path: str) -> None:
    size = store.size(rel)
    with open(path, "wb") as file:
        for start in range(0, size, _COPY_BYTES):
            file.write(store.read_range(rel, start, min(_COPY_BYTES, size - start)))


def merge_supplement(connection: sqlite3.Connection) -> None:
    """Add the rows of a supplement, attached as `old`, to the index."""
    for table in ("sample_parts", "samples"):
        check_table(connection, "old", table)
        for statement in _MERGE:
            connection.execute(statement.format(table=table))


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
    others = other.schemas("other")
    shards = ", ".join(f"{name}.tar_file_id" for name in others)
    numbers = ", ".join(f"{name}.sample_index" for name in others)
    joins = " ".join(f"LEFT JOIN {name}.samples AS {name} ON {name}.sample_key = own.sample_key" for name in others)
    with _connected(own, other) as connection:
        query = _MATCHES.format(own=_home(connection, own, shard), shards=shards, numbers=numbers, joins=joins)
        rows = connection.execute(query, (shard,))
        return np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int64).reshape(-1, 3)


def find_keys(index: KeyIndex, keys: Sequence[str]) -> list[tuple[int, int] | None]:
    """Return (shard number, number in the shard) of each key; None for a missing key."""
    with _connected(index) as connection:
        rows_by_key: dict[str, tuple[int, int]] = {}
        for schema in index.schemas():
            query = f"SELECT tar_file_id, sample_index FROM {schema}.samples WHERE sample_key = ?"
            rows = ((key, connection.execute(query, (key,)).fetchone()) for key in keys if key not in rows_by_key)
            rows_by_key.update((key, row) for key, row in rows if row is not None)
        return [rows_by_key.get(key) for key in keys]


def keys_at(index: KeyIndex, shard: int, indices: Sequence[int]) -> list[str]:
    """Return the keys of some samples of a shard."""
    with _connected(index) as connection:
        home = _home(connection, index, shard)
        query = f"SELECT sample_key FROM {home}.samples WHERE tar_file_id = ? AND sample_index = ?"
        return [str(connection.execute(query, (shard, number)).fetchone()[0]) for number in indices]


def keys_of_shard(index: KeyIndex, shard: int) -> list[str]:
    """Return the keys of all samples of a shard, in its order."""
    with _connected(index) as connection:
        home = _home(connection, index, shard)
        query = f"SELECT sample_key FROM {home}.samples WHERE tar_file_id = ? ORDER BY sample_index"
        return [str(key) for (key,) in connection.execute(query, (shard,))]


def _home(connection: sqlite3.Connection, index: KeyIndex, shard: int) -> str:
    """Return the name of the file that has a shard."""
    main, *supplements = index.schemas()
    for schema in supplements:
        if connection.execute(f"SELECT 1 FROM {schema}.samples WHERE tar_file_id = ? LIMIT 1", (shard,)).fetchone():
            return schema
    return main


@contextmanager
def _connected(own: KeyIndex, other: KeyIndex | None = None) -> Iterator[sqlite3.Connection]:
    """Open a key index, with another one attached as `other`; errors inside the block become KeyIndexErrors."""
    with _naming(own.dataset, other.dataset if other else None), closing(connect_key_index(own)) as connection:
        limit_time(connection, _TASK_SECONDS)
        schemas = own.schemas()
        if other is not None:
            _attach(connection, other, "other")
            schemas += other.schemas("other")
        for schema in schemas:
            check_table(connection, schema, "samples")
        yield connection


@contextmanager
def _naming(own: str, other: str | None = None) -> Iterator[None]:
    """Turn errors of sqlite into KeyIndexErrors that name the dataset, or both."""
    try:
        yield
    except (sqlite3.Error, ValueError, TypeError) as error:  # the last two: values of other types than expected
        datasets = own if other is None else f"{own} or {other}"
        raise KeyIndexError(
            f"{datasets}: cannot read the key index {meta_path(INDEX_SQLITE)}: {error}. Rebuild it with `energon "
            f"prepare --tar-index-only {own if other is None else 'PATH'}`."
        ) from error


def connect_key_index(index: KeyIndex, *, any_thread: bool = False) -> sqlite3.Connection:
    """Open the files of a key index, under the names of `KeyIndex.schemas`; raises sqlite3.Error."""
    connection = sqlite3.connect(sqlite_uri(index.path), uri=True, check_same_thread=not any_thread)
    try:
        connection.execute("PRAGMA schema_version")  # opens the file, which may be unlinked from then on
        if index.supplement:
            connection.execute("ATTACH ? AS main_supplement", (sqlite_uri(index.supplement),))
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _attach(connection: sqlite3.Connection, index: KeyIndex, name: str) -> None:
    for path, schema in zip((index.path, index.supplement), index.schemas(name), strict=False):
        connection.execute(f"ATTACH ? AS {schema}", (sqlite_uri(path),))


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
_TAKEN = (
    "SELECT 1 FROM main.samples WHERE tar_file_id = ? "
    "AND EXISTS (SELECT 1 FROM base.samples AS earlier WHERE earlier.sample_key = main.samples.sample_key) LIMIT 1"
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

    Args:
        path: The file.
        shards: Names of all shards in the order of `.info.json`.
        supplements: Write a supplement to this index instead, for the shards that it and its supplement lack.
    """

    def __init__(
        self, path: str | os.PathLike[str], shards: Sequence[str], *, supplements: KeyIndex | None = None
    ) -> None:
        self._shards = shards
        self._path = os.fspath(path)
        self._continued = ""
        self._base = supplements
        if supplements is not None and supplements.supplement:
            self._continue(supplements.supplement)
        else:
            self._connect(*_TABLES)

    def _connect(self, *statements: str) -> None:
        with self._writing():
            self._connection = sqlite3.connect(f"file:{urllib.parse.quote(self._path)}", uri=True, isolation_level=None)
            for pragma in _PRAGMAS:
                self._connection.execute(pragma)
            if self._base is not None:
                self._connection.execute("ATTACH ? AS base", (sqlite_uri(self._base.path),))
            for statement in (*statements, "BEGIN"):
                self._connection.execute(statement)

    def _continue(self, old: str, *statements: str) -> None:
        with self._writing(f", copying {old}"):
            shutil.copyfile(old, self._path)
        self._continued = f", which continues {old} (delete that to do without)"
        self._connect(*statements)

    def take_over(self, old: KeyIndex, shards: Sequence[str], kept: Collection[str], *, media: bool) -> None:
        """Copy the rows of some shards from an earlier key index, before anything is added.

        Args:
            old: That index, which stays as it is.
            shards: Its shards, in their order.
            kept: Names of those that have not changed.
            media: Copy the media metadata, too; otherwise the new index has none.
        """
        if list(self._shards[: len(shards)]) == list(shards) and len(kept) == len(shards):
            self._connection.close()
            self._continue(old.path, *(f"DROP TABLE IF EXISTS {name}" for name in _MEDIA_TABLES if not media))
            if old.supplement:
                with self._reading(old.supplement):
                    merge_supplement(self._connection)
            return
        places = {shard: number for number, shard in enumerate(self._shards)}
        moves = [(number, places[shard]) for number, shard in enumerate(shards) if shard in kept]
        self._connection.execute("CREATE TEMP TABLE moves(old INTEGER PRIMARY KEY, new INTEGER)")
        self._connection.executemany("INSERT INTO moves VALUES (?, ?)", moves)
        for path in filter(None, (old.supplement, old.path)):  # a shard that both have comes from the supplement
            with self._reading(path):
                for table, columns, order in (
                    ("samples", "sample_key, sample_index, byte_offset, byte_size", "sample_index"),
                    (
                        "sample_parts",
                        "sample_index, part_name, content_byte_offset, content_byte_size",
                        "sample_index, content_byte_offset",
                    ),
                ):
                    self._connection.execute(
                        f"INSERT INTO main.{table} SELECT new, {columns} FROM moves JOIN old.{table} "
                        f"ON tar_file_id = old ORDER BY new, {order}"
                    )
                self._connection.execute("DELETE FROM moves WHERE old >= (SELECT min(tar_file_id) FROM old.samples)")
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
            if self._base is not None and self._connection.execute(_TAKEN, (shard,)).fetchone():
                raise self._duplicate(shard, scan)

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
        query = "SELECT tar_file_id FROM {}.samples WHERE sample_key = ? AND tar_file_id != ?"
        queries = [query.format(schema) for schema in (("main",) if self._base is None else ("base", "main"))]
        for key in scan.keys:
            rows = (self._connection.execute(query, (key, shard)).fetchone() for query in queries)
            row = next(filter(None, rows), None)
            if row is not None or key in seen:
                other = self._shards[row[0]] if row is not None else self._shards[shard]
                there, here = self._parts_of(key), scan.parts_of(scan.keys.index(key))
                if row is not None and there and there.isdisjoint(here):
                    return other_parts(other, key, there, self._shards[shard], here)
                return DuplicateKeyError(
                    f"the sample key {key!r} is in {other!r} and again in {self._shards[shard]!r}. Keys must be unique "
                    f"in a dataset. Rename keys with --fix-duplicates, leave a shard out with --exclude, or prepare "
                    f"with --no-key-index if nothing looks samples up by key."
                )
            seen.add(key)
        return DuplicateKeyError(f"a sample key of {self._shards[shard]!r} occurs twice in the dataset.")

    def _parts_of(self, key: str) -> set[str]:
        """Return the names of the parts of the earlier sample with a key."""
        query = (
            "SELECT part_name FROM {0}.sample_parts JOIN {0}.samples USING (tar_file_id, sample_index) "
            "WHERE sample_key = ?"
        )
        names: set[str] = set()
        for schema in ("main",) if self._base is None else ("base", "main"):
            with suppress(sqlite3.Error):  # an index of another tool may lack the table
                check_table(self._connection, schema, "sample_parts")
                names |= {str(name) for (name,) in self._connection.execute(query.format(schema), (key,))}
        return names
