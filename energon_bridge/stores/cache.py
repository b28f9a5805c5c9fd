"""Files that are needed later: a cooker asks for a `Lazy`, and a later hook gets what it stands for.

The intended use: cook with lazies, let samples wait to be packed holding nothing else, and get the contents in
`postencode_sample`. A pool may keep the files near meanwhile. Invariant: which pool is used, and what it holds at the
moment, never changes what a lazy gives; only when and from where it is read.
"""

from __future__ import annotations

from types import GenericAlias
from typing import Any, ClassVar, NoReturn, Protocol, runtime_checkable

from energon_bridge.errors import ConfigurationError
from energon_bridge.samples import SourceInfo
from energon_bridge.stores.base import FileStore, note_source


class Lazy:
    """Stands for a file of a store, or for data, that is got when it is needed; as often as wanted.

    It belongs to the process that made it, and cannot be sent to another one.
    """

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # annotations of energon users give it type arguments

    def read(self) -> tuple[Any, SourceInfo | None]:
        """Return the value, and the file it came from, if any."""
        raise NotImplementedError

    def get(self, sample: Any = None) -> Any:
        """Return the value, and note in the sample, if one is given, where it came from."""
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
            "a lazy file was left in a batch or sample that leaves the process: get it before, in postencode_sample or "
            "encode_sample"
        )


@runtime_checkable
class Encoded(Protocol):
    """Data that is encoded and can say what it is got as, such as a deferred image."""

    data: bytes

    def with_data(self, data: bytes) -> Encoded:
        """Return the same of other bytes."""
        ...

    def when_got(self) -> Any:
        """Return what stands for it where it is got: itself, or what it is decoded to."""
        ...


class CachePool(Protocol):
    """Keeps files that are needed later."""

    def get(self, ds: FileStore, fname: str, sample: Any = None) -> Any:
        """Return the value of a file now, as `ds.get(fname, sample)` does."""
        ...

    def get_lazy(self, ds: FileStore, fname: str) -> Lazy:
        """Return what stands for a file of a store."""
        ...

    def to_cache(self, data: Any, name: str) -> Lazy:
        """Return what stands for data, which nobody may change from now on; `name` is for messages."""
        ...

    def close(self) -> None:
        """Let go of all that is kept in this process; lazy files can still be got, data given to `to_cache` cannot."""
        ...


class DirectLazy(Lazy):
    """A file that is read when it is got."""

    def __init__(self, ds: FileStore, fname: str) -> None:
        self._ds = ds
        self._fname = fname

    def read(self) -> tuple[Any, SourceInfo | None]:
        """Read the file and decode it as its store does."""
        return self._ds[self._fname]


class HeldLazy(Lazy):
    """Data that is kept in memory."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def read(self) -> tuple[Any, SourceInfo | None]:
        """Return the data."""
        return self._data.when_got() if isinstance(self._data, Encoded) else self._data, None


class NoCachePool(CachePool):
    """Keeps nothing: files are read when they are got, data stays in memory."""

    def get(self, ds: FileStore, fname: str, sample: Any = None) -> Any:
        """Return the value of a file."""
        return ds.get(fname, sample)

    def get_lazy(self, ds: FileStore, fname: str) -> Lazy:
        """Return a lazy that reads the file when it is got."""
        return DirectLazy(ds, fname)

    def to_cache(self, data: Any, name: str) -> Lazy:
        """Return a lazy that holds the data."""
        return HeldLazy(data)

    def close(self) -> None:
        """Do nothing."""
