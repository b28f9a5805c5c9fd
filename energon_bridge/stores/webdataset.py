"""The parts of a prepared dataset as files: `<sample key>.<part>`, looked up in its key index, read by range."""

from __future__ import annotations

import os
import struct

from energon_bridge.errors import FileNotInStoreError, KeyIndexError, ShardMissingError
from energon_bridge.format.jsonl import PART, JsonlDataset, open_jsonl
from energon_bridge.format.media import MediaMetadata
from energon_bridge.format.nvmeta import read_info
from energon_bridge.format.part_index import PartIndex, PartLocation
from energon_bridge.format.tar import parse_sample, split_member_name
from energon_bridge.format.tar_index import index_name
from energon_bridge.samples import SourceInfo
from energon_bridge.storage import open_store
from energon_bridge.storage.ranges import ByteRange
from energon_bridge.stores.base import FileStore

# ---------------------------------------------------------------------------------------------------------------------
# The files of a folder by their paths in it, and the lines of a JSONL file as files.
#
# Invariant: a key never leaves the folder, by `..` or by a symbolic link. What is written in a sample is data, and data
# must not choose other files of the machine. Links to files in the folder are followed; only regular files are read.


class SystemFileStore(FileStore):
    """Random access to the files below a folder or URL; any thread may read.

    Args:
        base_dir: The folder; None: the current directory of the process that makes the store.
    """

    def __init__(self, base_dir: str | os.PathLike[str] | None = None) -> None:
        self._store = open_store(os.getcwd() if base_dir is None else base_dir, confined=True)
        self._index = PartIndex(self._store)

    def read(self, key: str) -> tuple[bytes, SourceInfo]:
        """Return the bytes of a file by its path in the folder; raises FileNotInStoreError."""
        self._check(key)
        try:
            data = self._store.read(key)
        except ShardMissingError as error:
            raise FileNotInStoreError(f"{self._store.root}: no file {key!r}") from error
        return data, self._source(key)

    def locate(self, key: str) -> tuple[ByteRange, SourceInfo] | None:
        """Return where the bytes of a file lie: all of a file; raises FileNotInStoreError."""
        self._check(key)
        try:
            size = self._store.size(key)
        except ShardMissingError as error:
            raise FileNotInStoreError(f"{self._store.root}: no file {key!r}") from error
        return ByteRange(store=self._store, rel=key, offset=0, size=size), self._source(key)

    def _source(self, key: str) -> SourceInfo:
        return SourceInfo(self._store.root, key, self._store.root, (key,))

    def _check(self, key: str) -> None:
        parts = key.split("/")
        if not key or not parts[0] or ".." in parts or "\0" in key:
            raise FileNotInStoreError(
                f"{self._store.root}: {key!r} leads out of the folder; expected the path of a file below it, without .."
            )

    def get_path(self) -> str:
        """Return the folder or URL."""
        return self._store.root

    def get_media_metadata(self, key: str) -> MediaMetadata:
        """Return what the folder's media index knows of a file."""
        return known_media(self._index.media(key), self._store.root, key)


class JsonlFileStore(FileStore):
    """The lines of a JSONL file as files `0.json`, `1.json` and so on, found by its index; any thread may read.

    Raises the errors of `open_jsonl` when the first line is asked for.

    Args:
        path: Path or URL of the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._dataset: JsonlDataset | None = None

    def read(self, key: str) -> tuple[bytes, SourceInfo]:
        """Return the line `<number>.json` as bytes, without the line's end; raises FileNotInStoreError."""
        dataset = self._opened()
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
        """Return the path or URL of the file."""
        return self._opened().path

    def _opened(self) -> JsonlDataset:
        if self._dataset is None:
            self._dataset = open_jsonl(self._path)
        return self._dataset


# ---------------------------------------------------------------------------------------------------------------------
# The parts of a prepared dataset as files: `<sample key>.<part>`, looked up in its key index, read by range.


class WebdatasetFileStore(FileStore):
    """Random access to the parts of all samples of a prepared dataset, whatever their split; any thread may read.

    Nothing is opened before the first file is asked for. Raises KeyIndexError and NotPreparedError then.

    Args:
        path: Folder or URL of the dataset.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._store = open_store(path)
        self._index = PartIndex(self._store)
        self._shards: tuple[str, ...] = ()

    def read(self, key: str) -> tuple[bytes, SourceInfo]:
        """Return the bytes of the part `<sample key>.<part>`; raises FileNotInStoreError."""
        names, place = self._find(key)
        shard = self._shard(place.shard)
        data = self._store.read_range(shard, place.offset, place.size)
        if place.is_sample:
            _, parts = parse_sample(data, where=f"{self._store.url(shard)}: {key!r}")
            if names[1] not in parts:
                raise FileNotInStoreError(f"{self._store.root}: the sample {names[0]!r} has no part {names[1]!r}")
            data = bytes(parts[names[1]])
        return data, SourceInfo(self._store.root, key, shard, (key,))

    def locate(self, key: str) -> tuple[ByteRange, SourceInfo] | None:
        """Return where the bytes of a part lie, None if the index does not know; raises FileNotInStoreError."""
        _, place = self._find(key)
        if place.is_sample:
            return None
        shard = self._shard(place.shard)
        found = ByteRange(store=self._store, rel=shard, offset=place.offset, size=place.size)
        return found, SourceInfo(self._store.root, key, shard, (key,))

    def _find(self, key: str) -> tuple[tuple[str, str], PartLocation]:
        names = split_member_name(key)
        if names is None:
            raise FileNotInStoreError(
                f"{self._store.root}: {key!r} names no part of a sample; expected <sample key>.<part>, like 000017.jpg"
            )
        place = self._index.find(*names)
        if place is None:
            raise FileNotInStoreError(f"{self._store.root}: no sample has the part {key!r}")
        return names, place

    def get_path(self) -> str:
        """Return the folder or URL of the dataset."""
        return self._store.root

    def get_media_metadata(self, key: str) -> MediaMetadata:
        """Return what the dataset's index knows of the part `<sample key>.<part>`."""
        return known_media(self._index.media(key), self._store.root, key)

    def _shard(self, number: int) -> str:
        if not self._shards:
            self._shards = tuple(read_info(self._store).shard_counts)
        if not 0 <= number < len(self._shards):
            raise KeyIndexError(
                f"{self._store.root}: the key index names shard number {number}, the dataset has {len(self._shards)}. "
                f"Write it again with `energon prepare --tar-index-only {self._store.root}`."
            )
        return self._shards[number]


def known_media(metadata: MediaMetadata | None, path: str, key: str) -> MediaMetadata:
    """Return metadata that was looked up; raises FileNotInStoreError if there was none."""
    if metadata is None:
        raise FileNotInStoreError(
            f"{path}: the media metadata has nothing about {key!r}. Run `energon prepare-media {path}` with a filter "
            "that the file passes"
        )
    return metadata
