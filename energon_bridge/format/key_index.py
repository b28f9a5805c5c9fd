"""`index.sqlite`: which shard and bytes a sample key has, for looking samples up by key. Training does not need it.

Tables `samples(tar_file_id, sample_key UNIQUE, sample_index, byte_offset, byte_size)` and `sample_parts(tar_file_id,
sample_index, part_name, content_byte_offset, content_byte_size)` with three indexes; a tar_file_id is the position of
the shard in `.info.json`. Schema and names: reference section 1.5.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise, repeat
from types import TracebackType

from energon_bridge.errors import DuplicateKeyError, StorageError
from energon_bridge.format.key_lookup import check_table
from energon_bridge.format.media import create_media_tables, note_filter, write_media_rows
from energon_bridge.format.tar_scan import ShardScan

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
        """Take over the rows of some shards from an earlier key index, before anything is added.

        Args:
            old: Path of that index, which stays as it is.
            shards: Its shards, in their order.
            kept: Names of those that have not changed.
            media: Whether the media metadata may come along; else there is none afterwards.
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
        """Take over the media metadata of the key index that this one replaces, as preparing again does not make it."""
        if self._continued:
            return  # they are in the copy
        query = "SELECT name, sql FROM old.sqlite_master WHERE type = 'table' AND name IN (?, ?)"
        with self._reading(os.fspath(old)):
            for name, create in self._connection.execute(query, _MEDIA_TABLES).fetchall():
                check_table(self._connection, "old", name)
                self._connection.execute(create)
                self._connection.execute(f"INSERT INTO main.{name} SELECT * FROM old.{name}")

    def add_media(self, rows: Iterable[Sequence[str]]) -> None:
        """Add media metadata as rows of (key, type, JSON); `energon prepare-media` would note the time, this does not.

        The same rows then give the same file.
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
        """Turn what sqlite complains of into a StorageError."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError, OSError) as error:  # names in a damaged file need not be text
            raise StorageError(
                f"{self._path}: cannot write the key index{doing or self._continued}: {error}. Is there room on the "
                "disk, and a limit on the size of files?"
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
                    f"the sample key {key!r} stands in {other!r} and again in {self._shards[shard]!r}. Keys must be "
                    f"unique in a dataset, and the members of a sample must follow one another. Rename them with "
                    f"--fix-duplicates, leave a shard out with --exclude, or prepare with --no-key-index if nothing "
                    f"looks samples up by key."
                )
            seen.add(key)
        return DuplicateKeyError(f"a sample key of {self._shards[shard]!r} stands twice in the dataset.")
