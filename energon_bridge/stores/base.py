"""The interface of file stores: bytes or decoded values by key, with their sources.

A custom store derives from `FileStore` and overrides `read`, `get_path` and, if it has media metadata,
`get_media_metadata`. Invariant: a read never depends on earlier reads, and any thread of any process may read.
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
        ...

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


class DecodeFileStore(FileStore):
    """A store whose files are decoded, by a `SampleDecoder` for example.

    Examples:
        >>> store = DecodeFileStore(SystemFileStore("data"), decoder=SampleDecoder())
        >>> store["words.txt"][0]
        'red green blue'
    """

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
        """Return the value of a file and its source; video and sound are not read yet."""
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
        """Return the inner store's metadata of a media file."""
        return self._inner.get_media_metadata(key)


class PrimaryFileStore(FileStore):
    """The dataset of a sample itself: keys that begin with a dot are parts of that sample.

    Examples:
        >>> @cooker(need_primary=True)
        ... def cook(sample: dict, primary: FileStore) -> TextSample:
        ...     text, source = primary.get("txt", sample)
        ...     return TextSample(**basic_sample_keys(sample), text=text)
    """

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
        """Return the value of a file and its source, from the inner store."""
        return self._inner[self.full_key(key)]

    def decode(self, key: str, data: bytes) -> Any:
        """Decode the bytes of a file as the inner store does."""
        return self._inner.decode(self.full_key(key), data)

    def full_key(self, key: str) -> str:
        """Return the key, prefixed with the sample's key if it names a part."""
        return self._inner.full_key(self._current_key + key if key.startswith(".") else key)

    def get_media_metadata(self, key: str) -> MediaMetadata:
        """Return the dataset's metadata of a media file."""
        return self._inner.get_media_metadata(self.full_key(key))


def note_source(sample: Any, source: SourceInfo) -> None:
    """Record the source of a file in a sample, if it has a place for that."""
    if isinstance(sample, dict) or hasattr(sample, "__sources__"):
        add_source_info(sample, source)
