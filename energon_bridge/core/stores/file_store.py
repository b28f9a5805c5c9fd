"""File stores: their interface, and stores over prepared datasets, folders and JSONL files.

A custom store derives from `FileStore` and overrides `read`, `get_path` and, if it has media metadata,
`get_media_metadata`. Invariant: a read never depends on earlier reads, and any thread of any process may read.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from types import GenericAlias
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from energon_bridge.core.errors import (
    CorruptShardError,
    DecodeError,
    FileNotInStoreError,
    KeyIndexError,
    MediaMetadataError,
    ShardMissingError,
)
from energon_bridge.core.format.jsonl import PART, JsonlDataset, open_jsonl
from energon_bridge.core.format.key_index import (
    KeyIndex,
    check_complete,
    check_table,
    connect_key_index,
    damaged_key_index,
    find_key_index,
    limit_time,
    missing_key_index,
)
from energon_bridge.core.format.media import MediaMetadata, read_metadata
from energon_bridge.core.format.nvmeta import read_info
from energon_bridge.core.format.tar import Follow, Member, parse_sample, split_member_name
from energon_bridge.core.format.tar_index import index_name
from energon_bridge.core.samples import SourceInfo, add_source_info
from energon_bridge.core.storage import ByteRange, LocalStore, Store, open_store

T = TypeVar("T")


class Decoder(Protocol):
    """Turns the bytes of a file into a value, by the extension of its name."""

    def decode(self, part_name: str, data: Any) -> Any: ...


class FileStore(Protocol):
    """Files by key.

    Examples:
        >>> store = SystemFileStore("data")
        >>> store["words.txt"]
        (b'red green blue', ...)
    """

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # annotations of energon users give it type arguments

    def read(self, key: str) -> tuple[bytes, SourceInfo]:
        """Return the bytes of a file as stored; raises FileNotInStoreError or StorageError.

        The default calls `__getitem__`, which stores written for megatron-energon override instead.
        """
        if type(self).__getitem__ is FileStore.__getitem__:
            raise NotImplementedError(f"{type(self).__name__} derives from FileStore and must override `read`")
        return self[key]

    def get_path(self) -> str:
        """Return the path or URL of the store; stores with the same path have the same files."""

    def locate(self, key: str) -> tuple[ByteRange, SourceInfo] | None:
        """Return the location of a file's bytes, for decoders that need only some of them; None by default."""
        return None

    def decode(self, key: str, data: bytes) -> Any:
        """Return the value that `get` returns for a file's bytes; by default the bytes themselves."""
        return data

    def full_key(self, key: str) -> str:
        """Return the key under which the store itself knows a file; by default the key unchanged."""
        return key

    def get_media_metadata(self, key: str) -> MediaMetadata:
        """Return the metadata of a media file, without decoding it.

        Raises MediaMetadataError if the store has no media metadata, FileNotInStoreError if it has none for this file.
        """
        raise MediaMetadataError(f"{self.get_path()}: a {type(self).__name__} has no media metadata.")

    def __getitem__(self, key: str) -> tuple[Any, SourceInfo]:
        """Return the value of a file and where it came from."""
        data, source = self.read(key)
        return self.decode(key, data), source

    def get(self, key: str, sample: Any = None) -> Any:
        """Return the value of a file, and record its source in the sample, if one is given."""
        value, source = self[key]
        note_source(sample, source)
        return value


class StoreAround(FileStore):
    """A store that does something with the files of another one, and is that one otherwise."""

    def __init__(self, inner: FileStore) -> None:
        self._inner = inner

    def _key(self, key: str) -> str:
        """Return the key by which the inner store is asked for a file."""
        return key

    def read(self, key: str) -> tuple[bytes, SourceInfo]:
        return self._inner.read(self._key(key))

    def get_path(self) -> str:
        return self._inner.get_path()

    def locate(self, key: str) -> tuple[ByteRange, SourceInfo] | None:
        return self._inner.locate(self._key(key))

    def full_key(self, key: str) -> str:
        return self._inner.full_key(self._key(key))

    def get_media_metadata(self, key: str) -> MediaMetadata:
        return self._inner.get_media_metadata(self._key(key))


class DecodeFileStore(StoreAround):
    """A store whose files are decoded, by a `SampleDecoder` for example.

    Examples:
        >>> store = DecodeFileStore(SystemFileStore("data"), decoder=SampleDecoder())
        >>> store["words.txt"][0]
        'red green blue'
    """

    def __init__(self, inner: FileStore, *, decoder: Decoder) -> None:
        super().__init__(inner)
        self._decoder = decoder

    def __getitem__(self, key: str) -> tuple[Any, SourceInfo]:
        """Return the value of a file and its source; video and sound are not read yet."""
        keeps = getattr(self._decoder, "keeps_unread", None)
        if keeps is not None and keeps(self.full_key(key)) and (located := self.locate(key)) is not None:
            return self._decoder.decode(self.full_key(key), located[0]), located[1]
        return super().__getitem__(key)

    def decode(self, key: str, data: bytes) -> Any:
        try:
            decode = getattr(self._decoder, "decode_file", self._decoder.decode)
            return decode(self.full_key(key), self._inner.decode(key, data))
        except DecodeError as error:
            raise DecodeError(f"{self.get_path()}: {error}") from error


class PrimaryFileStore(StoreAround):
    """The dataset of a sample itself: keys that begin with a dot are parts of that sample.

    Examples:
        >>> @cooker(need_primary=True)
        ... def cook(sample: dict, primary: FileStore) -> TextSample:
        ...     text, source = primary.get("txt", sample)
        ...     return TextSample(**basic_sample_keys(sample), text=text)
    """

    def __init__(self, inner: FileStore, current_key: str) -> None:
        super().__init__(inner)
        self._current_key = current_key

    def __getitem__(self, key: str) -> tuple[Any, SourceInfo]:
        """Return the value of a file and its source, from the inner store."""
        return self._inner[self._key(key)]

    def decode(self, key: str, data: bytes) -> Any:
        return self._inner.decode(self._key(key), data)

    def _key(self, key: str) -> str:
        return self._current_key + key if key.startswith(".") else key


def note_source(sample: Any, source: SourceInfo) -> None:
    """Record the source of a file in a sample, if it has a field for that."""
    if isinstance(sample, dict) or hasattr(sample, "__sources__"):
        add_source_info(sample, source)


# ---------------------------------------------------------------------------------------------------------------------
# Looking up single parts by key in `index.sqlite`: the location of their bytes, and their media metadata.
#
# Invariant: an index is opened by the first lookup in each process; lookups of all threads of the process share that
# connection under a lock. They take no lock of the file, which many processes would queue for: what is found so is
# right, and only what is missing is looked up again with locks (see `connect_key_index`). An index at a URL is first
# copied to a local file, which is unlinked once it is open, so that nothing is left behind however the process ends.
# Format: `key_index`, `media`.


_PART = """
    SELECT samples.tar_file_id, content_byte_offset, content_byte_size
    FROM samples JOIN sample_parts
    ON sample_parts.tar_file_id = samples.tar_file_id AND sample_parts.sample_index = samples.sample_index
    WHERE sample_key = ? AND part_name = ?
"""
_SAMPLE = "SELECT tar_file_id, byte_offset, byte_size FROM samples WHERE sample_key = ?"
_MEDIA = "SELECT metadata_type, metadata_json FROM media_metadata WHERE entry_key = ?"

_TABLES = frozenset({"samples", "sample_parts", "media_metadata"})
_LOOKUP_SECONDS = 60.0

_INHERITED: list[sqlite3.Connection] = []
"""Connections of the parent process: after a fork, sqlite allows neither using nor closing them."""


class PartLocation(NamedTuple):
    """Location of a part: shard number in `.info.json`, and bytes of the shard.

    `is_sample`: the bytes are those of the whole sample, from an index without parts.
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
        self._local: tuple[KeyIndex, os.stat_result] | None = None  # others may add keys to it, or replace it

    def __reduce__(self) -> tuple[Any, ...]:
        return PartIndex, (self._store,)

    def __del__(self) -> None:
        self._let_go()

    def find(self, key: str, part: str) -> PartLocation | None:
        """Return the location of a part of a sample, None if there is no such part.

        An index without parts gives the location of the whole sample. Raises KeyIndexError if the index is missing or
        damaged.
        """
        if not self._has("samples"):
            raise self._damaged("it has no table 'samples'")
        by_part = "sample_parts" in self._tables
        rows = self._ask(*((_PART, (key, part)) if by_part else (_SAMPLE, (key,))))
        if not rows:
            return None
        if not all(type(value) is int and 0 <= value < 1 << 62 for value in rows[0]):
            raise self._damaged(f"its shard, byte and size of {key!r} are {str(rows[0])[:200]}")
        return PartLocation._make((*rows[0], not by_part))

    def media(self, key: str) -> MediaMetadata:
        """Return the metadata of a media file.

        Raises MediaMetadataError if the dataset or folder has no media metadata at all, or some that cannot be read,
        and FileNotInStoreError if it has none of this file.
        """
        root = self._store.root
        remedy = f"Run `energon prepare-media {root}` with one of its filters."
        try:
            has_media = self._has("media_metadata")
        except KeyIndexError as error:
            raise MediaMetadataError(f"{root}: no media metadata: {error} {remedy}") from error
        if not has_media:
            raise MediaMetadataError(f"{root}: no media metadata. {remedy}")
        rows = self._ask(_MEDIA, (key,))
        if not rows:
            raise FileNotInStoreError(
                f"{root}: no media metadata of {key!r}. Run `energon prepare-media {root}` with a filter that the file "
                "passes"
            )
        return read_metadata(*rows[0], where=f"{root}: media metadata of {key!r}")

    def _has(self, table: str) -> bool:
        with self._current_lock():
            self._open()
            return table in self._tables

    def _ask(self, query: str, values: Sequence[object]) -> list[Any]:
        try:
            with self._current_lock():
                connection = self._open()
                with contextlib.suppress(sqlite3.Error):
                    if rows := _fetch(connection, query, values):
                        return rows
                if self._local is None or not _is_there(*self._local):
                    return _fetch(connection, query, values)  # it does not change
                self._let_go()  # what it has read may be of before keys were added
                with contextlib.closing(connect_key_index(self._local[0])) as connection:
                    return _fetch(connection, query, values)
        except (sqlite3.Error, ValueError) as error:
            raise self._damaged(error) from error

    def _current_lock(self) -> threading.Lock:
        if self._pid != os.getpid():
            # A fork copied a connection that is not ours, and perhaps a lock that a thread of the parent held.
            self._let_go()
            self._lock = threading.Lock()
            self._pid = os.getpid()
        return self._lock

    def _let_go(
        self,
        process: Callable[[], int] = os.getpid,  # at the interpreter's end `os` may be gone
        inherited: list[sqlite3.Connection] = _INHERITED,
    ) -> None:
        connection = self._connection
        self._connection = None
        if connection is None:
            return
        if self._pid == process():
            connection.close()
        else:
            inherited.append(connection)

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            scratch = ""
            if not isinstance(self._store, LocalStore):
                descriptor, scratch = tempfile.mkstemp(prefix="energon-index-")
                os.close(descriptor)
            try:
                index = find_key_index(self._store, scratch)
                with contextlib.closing(connect_key_index(index)) as connection:
                    self._tables = self._check(connection)
                self._local = None if scratch else (index, os.stat(index.path))
                self._connection = connect_key_index(index, locks=False, any_thread=True)
            except ShardMissingError as error:
                raise missing_key_index(self._store) from error
            except (sqlite3.Error, ValueError) as error:  # ValueError: names that are not UTF-8
                raise self._damaged(error) from error
            finally:
                if scratch:
                    os.unlink(scratch)
        return self._connection

    def _check(self, connection: sqlite3.Connection) -> frozenset[str]:
        """Return the tables of an index that has those of all shards."""
        rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        tables = frozenset(name for (name,) in rows)
        for name in _TABLES & tables:
            check_table(connection, "main", name)  # a view is not accepted: its query may never end
        if "samples" in tables:
            check_complete(connection, self._store)
        return tables

    def _damaged(self, why: object) -> KeyIndexError:
        return damaged_key_index(self._store.root, why)


def _is_there(index: KeyIndex, opened: os.stat_result) -> bool:
    """Return whether an index is still the file that was opened."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(index.path), opened)
    return False


def _fetch(connection: sqlite3.Connection, query: str, values: Sequence[object]) -> list[Any]:
    limit_time(connection, _LOOKUP_SECONDS)
    return connection.execute(query, values).fetchmany(1)


# ---------------------------------------------------------------------------------------------------------------------
# The files of a folder by their paths in it, and the lines of a JSONL file as files.
#
# Invariant: a key never leads out of the folder, by `..` or by a symbolic link: keys come from data, and data must not
# choose other files of the machine. Links to files in the folder are followed; only regular files are read.


class SystemFileStore(FileStore):
    """Random access to the files below a folder or URL; any thread may read.

    Examples:
        >>> content, source = SystemFileStore("data")["words.txt"]
        >>> content
        b'red green blue'

    Args:
        base_dir: The folder; None: the current directory of the process that makes the store.
    """

    def __init__(self, base_dir: str | os.PathLike[str] | None = None) -> None:
        self._store = open_store(os.getcwd() if base_dir is None else base_dir, confined=True)
        self._index = PartIndex(self._store)

    def read(self, key: str) -> tuple[bytes, SourceInfo]:
        """Return the bytes of a file by its path in the folder; raises FileNotInStoreError."""
        return self._asked(self._store.read, key), self._source(key)

    def locate(self, key: str) -> tuple[ByteRange, SourceInfo] | None:
        """Return the location of a file's bytes, which is the whole file; raises FileNotInStoreError."""
        size = self._asked(self._store.size, key)
        return ByteRange(store=self._store, rel=key, offset=0, size=size), self._source(key)

    def _source(self, key: str) -> SourceInfo:
        return SourceInfo(self._store.root, key, self._store.root, (key,))

    def _asked(self, ask: Callable[[str], T], key: str) -> T:
        """Ask the store for something of a file; raises FileNotInStoreError for keys that lead out or are not there."""
        parts = key.split("/")
        if not key or not parts[0] or ".." in parts or "\0" in key:
            raise FileNotInStoreError(
                f"{self._store.root}: {key!r} leads out of the folder; expected the path of a file below it, without .."
            )
        try:
            return ask(key)
        except ShardMissingError as error:
            raise FileNotInStoreError(f"{self._store.root}: no file {key!r}") from error

    def get_path(self) -> str:
        return self._store.root

    def get_media_metadata(self, key: str) -> MediaMetadata:
        return self._index.media(key)


class JsonlFileStore(FileStore):
    """The lines of a JSONL file as files `0.json`, `1.json` and so on, found by its index; any thread may read.

    The first read raises the errors of `open_jsonl`.

    Args:
        jsonl_path: Path or URL of the file.
    """

    def __init__(self, jsonl_path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(jsonl_path)

    def read(self, key: str) -> tuple[bytes, SourceInfo]:
        """Return the line `<number>.json` as bytes, without the line's end; raises FileNotInStoreError."""
        dataset = self._dataset
        number, _, part = key.partition(".")
        if part != PART or not (number.isascii() and number.isdigit()) or int(number) >= dataset.num_samples:
            raise FileNotInStoreError(
                f"{dataset.path}: no line {key!r}; expected one of 0.{PART} to {dataset.num_samples - 1}.{PART}"
            )
        (name,) = dataset.shard_names
        start, end = struct.unpack("<2Q", dataset.store.read_range(index_name(name), 8 * int(number), 16))
        data = dataset.store.read_range(name, start, end - start).strip()
        return data, SourceInfo(dataset.path, key, name, (key,))

    def get_path(self) -> str:
        return self._dataset.path

    @cached_property
    def _dataset(self) -> JsonlDataset:
        return open_jsonl(self._path)


# ---------------------------------------------------------------------------------------------------------------------
# The parts of a prepared dataset as files: `<sample key>.<part>`, looked up in its key index, read by range.


class WebdatasetFileStore(FileStore):
    """Random access to the parts of all samples of a prepared dataset, whatever their split; any thread may read.

    The first read opens the dataset; it may raise KeyIndexError and NotPreparedError.

    Args:
        dataset_path: Folder or URL of the dataset.
    """

    def __init__(self, dataset_path: str | os.PathLike[str]) -> None:
        self._store = open_store(dataset_path)
        self._index = PartIndex(self._store)
        self._shards: tuple[str, ...] = ()

    def read(self, key: str) -> tuple[bytes, SourceInfo]:
        """Return the bytes of the part `<sample key>.<part>`; raises FileNotInStoreError."""
        names, shard, location = self._find(key)
        data = self._store.read_range(shard, location.offset, location.size)
        if location.is_sample:
            _, parts = parse_sample(data, where=f"{self._store.url(shard)}: {key!r}")
            if names[1] not in parts:
                raise FileNotInStoreError(f"{self._store.root}: the sample {names[0]!r} has no part {names[1]!r}")
            data = bytes(parts[names[1]])
        return data, SourceInfo(self._store.root, key, shard, (key,))

    def locate(self, key: str) -> tuple[ByteRange, SourceInfo] | None:
        """Return the location of a part's bytes, None if the index has no parts; raises FileNotInStoreError."""
        _, shard, location = self._find(key)
        if location.is_sample:
            return None
        content = ByteRange(store=self._store, rel=shard, offset=location.offset, size=location.size)
        return content, SourceInfo(self._store.root, key, shard, (key,))

    def _find(self, key: str) -> tuple[tuple[str, str], str, PartLocation]:
        """Return key and part name, the name of the shard, and the location of the part in the shard."""
        names = split_member_name(key)
        if names is None:
            raise FileNotInStoreError(
                f"{self._store.root}: {key!r} is not the key of a part; expected <sample key>.<part>, like 000017.jpg"
            )
        location = self._index.find(*names)
        if location is not None and location.shard >= len(self._shards):  # it may have been added since
            self._shards = tuple(read_info(self._store).shard_counts)
        if location is None:
            raise FileNotInStoreError(f"{self._store.root}: no sample has the part {key!r}")
        if location.shard >= len(self._shards):
            raise KeyIndexError(
                f"{self._store.root}: the key index names shard number {location.shard}, but the dataset has "
                f"{len(self._shards)}. If an `energon prepare` was killed, run it again; else rebuild the index with "
                f"`energon prepare --tar-index-only {self._store.root}`."
            )
        return names, self._shards[location.shard], location

    def get_path(self) -> str:
        return self._store.root

    def get_media_metadata(self, key: str) -> MediaMetadata:
        return self._index.media(key)


def follow_links(path: str | os.PathLike[str]) -> Follow:
    """Return what finds the content of hard links in the tars of a prepared dataset, in its key index.

    Nothing is opened before the first one. It raises CorruptShardError for a link that the index does not have.
    """
    opened = cache(lambda: WebdatasetFileStore(path))

    def follow(member: Member) -> ByteRange:
        with contextlib.suppress(FileNotInStoreError):
            if (located := opened().locate(member.name)) is not None:
                return located[0]
        raise CorruptShardError(
            f"{path}: {member.name!r} is a hard link to {member.target!r}, and the key index does not have it. Write "
            f"the index again: energon prepare --tar-index-only {path}"
        )

    return follow
