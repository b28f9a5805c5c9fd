"""The protocol of file stores: bytes or decoded values by key, with a note of where they came from.

A store of one's own derives from `FileStore` and gives `read`, `get_path` and, if it knows any, `get_media_metadata`.
Invariant: reading keeps no state that the next read depends on, and any thread of any process may read.
"""

from __future__ import annotations

from types import GenericAlias
from typing import Any, ClassVar, Protocol

from energon_bridge.errors import DecodeError, MediaMetadataError
from energon_bridge.format.media import MediaMetadata
from energon_bridge.samples import SourceInfo, add_source_info
from energon_bridge.storage.ranges import ByteRange


class Decoder(Protocol):
    """Turns the bytes of a file into a value, by the extension of its name."""

    def decode(self, part_name: str, data: Any) -> Any: ...


class FileStore(Protocol):
    """Files by key."""

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # annotations of energon users give it type arguments

    def read(self, key: str) -> tuple[bytes, SourceInfo]:
        """Return the bytes of a file as it is stored; raises FileNotInStoreError or StorageError.

        A store that gives `__getitem__` instead, as code for megatron-energon does, is asked by it.
        """
        if type(self).__getitem__ is FileStore.__getitem__:
            raise NotImplementedError(f"{type(self).__name__} derives from FileStore and must override `read`")
        return self[key]

    def get_path(self) -> str:
        """Return the path or URL of the store; two stores of one path have the same files."""
        ...

    def locate(self, key: str) -> tuple[ByteRange, SourceInfo] | None:
        """Return where the bytes of a file lie, for decoders that need few of them; None, unless overridden."""
        return None

    def decode(self, key: str, data: bytes) -> Any:
        """Return what `get` makes of the bytes of a file: the bytes themselves, unless overridden."""
        return data

    def full_key(self, key: str) -> str:
        """Return the key by which the store's path is asked for a file: the key itself, unless overridden."""
        return key

    def get_media_metadata(self, key: str) -> MediaMetadata:
        """Return what is known of a media file without decoding it.

        Raises MediaMetadataError if the store knows nothing of any file, FileNotInStoreError if nothing of this one.
        """
        raise MediaMetadataError(f"{self.get_path()}: a store of this kind has no media metadata.")

    def __getitem__(self, key: str) -> tuple[Any, SourceInfo]:
        """Return the value of a file and where it came from."""
        data, source = self.read(key)
        return self.decode(key, data), source

    def get(self, key: str, sample: Any = None) -> Any:
        """Return the value of a file, and note in the sample, if one is given, where it came from."""
        value, source = self[key]
        note_source(sample, source)
        return value


class DecodeFileStore(FileStore):
    """A store whose files are decoded, by a `SampleDecoder` for example."""

    def __init__(self, inner: FileStore, *, decoder: Decoder) -> None:
        self._inner = inner
        self._decoder = decoder

    def read(self, key: str) -> tuple[bytes, SourceInfo]:
        """Return the bytes of a file, not decoded."""
        return self._inner.read(key)

    def get_path(self) -> str:
        """Return the path of the inner store."""
        return self._inner.get_path()

    def locate(self, key: str) -> tuple[ByteRange, SourceInfo] | None:
        """Return where the bytes of a file lie."""
        return self._inner.locate(key)

    def __getitem__(self, key: str) -> tuple[Any, SourceInfo]:
        """Return the value of a file and where it came from; a video or sound is not read here."""
        keeps = getattr(self._decoder, "keeps_unread", None)
        if keeps is not None and keeps(self.full_key(key)) and (found := self.locate(key)) is not None:
            return self._decoder.decode(self.full_key(key), found[0]), found[1]
        return super().__getitem__(key)

    def decode(self, key: str, data: bytes) -> Any:
        """Decode the bytes of a file; raises DecodeError."""
        full_key = self.full_key(key)
        try:
            return self._decoder.decode(full_key, self._inner.decode(key, data))
        except DecodeError as error:
            raise DecodeError(f"{self.get_path()}: {error}") from error

    def full_key(self, key: str) -> str:
        """Return the key of the inner store."""
        return self._inner.full_key(key)

    def get_media_metadata(self, key: str) -> MediaMetadata:
        """Return what the inner store knows of a media file."""
        return self._inner.get_media_metadata(key)


class PrimaryFileStore(FileStore):
    """The dataset of a sample itself: keys that begin with a dot are parts of that sample."""

    def __init__(self, inner: FileStore, current_key: str) -> None:
        self._inner = inner
        self._current_key = current_key

    def read(self, key: str) -> tuple[bytes, SourceInfo]:
        """Return the bytes of a file, not decoded."""
        return self._inner.read(self.full_key(key))

    def get_path(self) -> str:
        """Return the path of the dataset."""
        return self._inner.get_path()

    def locate(self, key: str) -> tuple[ByteRange, SourceInfo] | None:
        """Return where the bytes of a file lie."""
        return self._inner.locate(self.full_key(key))

    def __getitem__(self, key: str) -> tuple[Any, SourceInfo]:
        """Return the value of a file and where it came from, as the inner store gives it."""
        return self._inner[self.full_key(key)]

    def decode(self, key: str, data: bytes) -> Any:
        """Decode the bytes of a file as the inner store does."""
        return self._inner.decode(self.full_key(key), data)

    def full_key(self, key: str) -> str:
        """Return the key with the sample's in front, if it is a part's name."""
        return self._inner.full_key(self._current_key + key if key.startswith(".") else key)

    def get_media_metadata(self, key: str) -> MediaMetadata:
        """Return what the dataset knows of a media file."""
        return self._inner.get_media_metadata(self.full_key(key))


def note_source(sample: Any, source: SourceInfo) -> None:
    """Note in a sample that can take it where a file came from."""
    if isinstance(sample, dict) or hasattr(sample, "__sources__"):
        add_source_info(sample, source)
