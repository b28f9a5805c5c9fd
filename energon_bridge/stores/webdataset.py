"""The parts of a prepared dataset as files: `<sample key>.<part>`, looked up in its key index, read by range."""

from __future__ import annotations

import os

from energon_bridge.errors import FileNotInStoreError, KeyIndexError
from energon_bridge.format.media import MediaMetadata
from energon_bridge.format.names import split_member_name
from energon_bridge.format.nvmeta import read_info
from energon_bridge.format.part_index import PartIndex, Place
from energon_bridge.format.tar import parse_sample
from energon_bridge.samples import SourceInfo
from energon_bridge.storage import open_store
from energon_bridge.storage.ranges import ByteRange
from energon_bridge.stores.base import FileStore


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

    def _find(self, key: str) -> tuple[tuple[str, str], Place]:
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
