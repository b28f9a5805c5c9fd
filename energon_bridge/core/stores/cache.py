"""Files that are needed later: a cooker asks for a `Lazy`, a later hook gets its content; a pool may keep them.

Intended use: cook with lazies, so that samples in the pack buffer hold nothing else, and get the contents in
`postencode_sample`. Meanwhile a pool may keep the files close by. Invariant: the pool and what it currently holds never
change what a lazy returns, only when and from where it is read.
"""

from __future__ import annotations

from types import GenericAlias
from typing import Any, ClassVar, NoReturn, Protocol, runtime_checkable

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.samples import SourceInfo
from energon_bridge.core.stores.file_store import FileStore, note_source


class Lazy:
    """A file of a store, or data, that is fetched on `get`, as often as you call it.

    Examples:
        >>> lazy = NoCachePool().get_lazy(SystemFileStore("data"), "words.txt")  # nothing is read yet
        >>> lazy.get(None)
        b'red green blue'

    It belongs to the process that made it and cannot be sent to another one.
    """

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # annotations of energon users give it type arguments

    def read(self) -> tuple[Any, SourceInfo | None]:
        """Return the value, and the file it came from, if any."""
        raise NotImplementedError

    def get(self, sample: Any = None) -> Any:
        """Return the value, and record its source in the sample, if one is given."""
        value, source = self.read()
        if source is not None:
            note_source(sample, source)
        return value

    def __copy__(self) -> Lazy:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Lazy:
        return self

    def __reduce__(self) -> NoReturn:
        raise ConfigurationError(
            "a batch or sample that leaves the process still contains a lazy file: call its get() in encode_sample "
            "or postencode_sample"
        )


@runtime_checkable
class EncodedFile(Protocol):
    """Encoded data that knows what to decode to, such as a deferred image."""

    data: bytes

    def with_data(self, data: bytes) -> EncodedFile:
        """Return a copy with other bytes."""

    def when_got(self) -> Any:
        """Return what `Lazy.get` hands out: the object itself, or what it decodes to."""


class CachePool(Protocol):
    """Keeps files that are needed later.

    Examples:
        >>> with_files = FileStoreCachePool(parent_cache_dir=".")
        >>> loader = get_savable_loader(get_train_dataset("data/captions", batch_size=4), cache_pool=with_files)
        >>> with_files.close()
    """

    def get(self, ds: FileStore, fname: str, sample: Any = None) -> Any:
        """Return the value of a file now, as `ds.get(fname, sample)` does."""

    def get_lazy(self, ds: FileStore, fname: str) -> Lazy:
        """Return a lazy for a file of a store."""

    def to_cache(self, data: Any, name: str) -> Lazy:
        """Return a lazy for data, which must not change from now on; `name` is for messages."""

    def close(self) -> None:
        """Release everything kept in this process. Lazy files can still be read; data passed to `to_cache` is gone."""


class DirectLazy(Lazy):
    """A file of a store that is read on `get`."""

    def __init__(self, ds: FileStore, fname: str) -> None:
        self._ds = ds
        self._fname = fname

    def read(self) -> tuple[Any, SourceInfo | None]:
        return self._ds[self._fname]


class HeldLazy(Lazy):
    """Data that is kept in memory."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def read(self) -> tuple[Any, SourceInfo | None]:
        return self._data.when_got() if isinstance(self._data, EncodedFile) else self._data, None


class NoCachePool(CachePool):
    """Keeps nothing: files are read on `get`, data stays in memory.

    Examples:
        >>> lazy = NoCachePool().get_lazy(SystemFileStore("data"), "words.txt")
        >>> lazy.get(None)
        b'red green blue'
    """

    def get(self, ds: FileStore, fname: str, sample: Any = None) -> Any:
        return ds.get(fname, sample)

    def get_lazy(self, ds: FileStore, fname: str) -> Lazy:
        return DirectLazy(ds, fname)

    def to_cache(self, data: Any, name: str) -> Lazy:
        """Return a lazy that holds the data."""
        return HeldLazy(data)

    def close(self) -> None:
        """Do nothing."""
