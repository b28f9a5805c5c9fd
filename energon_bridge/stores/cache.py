"""Files that are needed later: a cooker asks for a `Lazy`, a later hook gets its content; the pool that keeps them.

Intended use: cook with lazies, so that samples in the pack buffer hold nothing else, and get the contents in
`postencode_sample`. Meanwhile a pool may keep the files close by. Invariant: the pool and what it currently holds never
change what a lazy returns, only when and from where it is read.
"""

from __future__ import annotations

import io
import logging
import os
import tempfile
import threading
from multiprocessing.util import Finalize
from types import GenericAlias
from typing import Any, ClassVar, Literal, NoReturn, Protocol, runtime_checkable

import numpy as np

from energon_bridge.errors import ConfigurationError, LoaderError
from energon_bridge.samples import SourceInfo
from energon_bridge.stores.base import FileStore, note_source
from energon_bridge.stores.disk_cache import DiskCache, KeptFile, own_files


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
        ...

    def when_got(self) -> Any:
        """Return what `Lazy.get` hands out: the object itself, or what it decodes to."""
        ...


class CachePool(Protocol):
    """Keeps files that are needed later.

    Examples:
        >>> with_files = FileStoreCachePool(parent_cache_dir=".")
        >>> loader = get_savable_loader(get_train_dataset("data/captions", batch_size=4), cache_pool=with_files)
        >>> with_files.close()
    """

    def get(self, ds: FileStore, fname: str, sample: Any = None) -> Any:
        """Return the value of a file now, as `ds.get(fname, sample)` does."""
        ...

    def get_lazy(self, ds: FileStore, fname: str) -> Lazy:
        """Return a lazy for a file of a store."""
        ...

    def to_cache(self, data: Any, name: str) -> Lazy:
        """Return a lazy for data, which must not change from now on; `name` is for messages."""
        ...

    def close(self) -> None:
        """Release everything kept in this process. Lazy files can still be read; data passed to `to_cache` is gone."""
        ...


class DirectLazy(Lazy):
    """A file that is read on `get`."""

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
        return self._data.when_got() if isinstance(self._data, EncodedFile) else self._data, None


class NoCachePool(CachePool):
    """Keeps nothing: files are read on `get`, data stays in memory.

    Examples:
        >>> lazy = NoCachePool().get_lazy(SystemFileStore("data"), "words.txt")
        >>> lazy.get(None)
        b'red green blue'
    """

    def get(self, ds: FileStore, fname: str, sample: Any = None) -> Any:
        """Return the value of a file."""
        return ds.get(fname, sample)

    def get_lazy(self, ds: FileStore, fname: str) -> Lazy:
        """Return a lazy that reads the file on `get`."""
        return DirectLazy(ds, fname)

    def to_cache(self, data: Any, name: str) -> Lazy:
        """Return a lazy that holds the data."""
        return HeldLazy(data)

    def close(self) -> None:
        """Do nothing."""


# ---------------------------------------------------------------------------------------------------------------------
# `FileStoreCachePool`: copies files that are needed later to a local folder, in the background.
#
# Each process has its own folder below the pool's (`disk_cache`). Processes share no files, so what a killed process
# leaves is never read; the next process to start removes it. The folder holds the store's bytes, which are decoded on
# `get`. Limits hold for all processes of the host together.


_log = logging.getLogger(__name__)


class FileStoreCachePool(CachePool):
    """Keeps files in a folder until the samples that need them are gone.

    Examples:
        >>> pool = FileStoreCachePool(parent_cache_dir=".", max_cache_size_gbytes=100)
        >>> loader = get_savable_loader(get_train_dataset("data/captions", batch_size=4), cache_pool=pool)
        >>> pool.close()

    You may create it before the worker processes start; each of them then keeps its own files.

    Args:
        parent_cache_dir: Folder below which each process makes its own; default: the folder for temporary files.
        num_workers: Threads that copy, in each process.
        max_cache_size_gbytes: Limit in 10^9 bytes, shared by all processes of the user on this host that cache below
            the folder. A file that does not fit is read on `get`.
        max_cache_count: Limit on the number of files, shared in the same way.
        method: "raw", the bytes as they are stored. (megatron-energon's "pickle" is refused: reading a pickle runs the
            code in it.)

    Raises:
        ConfigurationError: An argument is wrong.
    """

    def __init__(
        self,
        *,
        parent_cache_dir: str | os.PathLike[str] | None = None,
        num_workers: int = 8,
        max_cache_size_gbytes: float = 1024,
        max_cache_count: int = 10_000_000,
        method: Literal["raw"] = "raw",
    ) -> None:
        if method != "raw":
            raise ConfigurationError(
                f"FileStoreCachePool: method must be 'raw', got {method!r}: the pool keeps the bytes of files and "
                "decodes them on get(); it never reads a pickle"
            )
        for name, value in (("num_workers", num_workers), ("max_cache_count", max_cache_count)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"FileStoreCachePool: {name} must be an integer of at least 1, got {value!r}")
        if not max_cache_size_gbytes > 0:
            raise ConfigurationError(
                f"FileStoreCachePool: max_cache_size_gbytes must be above 0, got {max_cache_size_gbytes!r}"
            )
        self._parent = os.path.abspath(os.fspath(parent_cache_dir or tempfile.gettempdir()))
        self._limits = {
            "num_workers": num_workers,
            "max_bytes": int(max_cache_size_gbytes * 1e9),
            "max_count": max_cache_count,
        }
        self._plain = NoCachePool()
        self._pid = -1
        self._files: DiskCache | None = None
        self._lock = threading.Lock()
        self._said: set[str] = set()

    def get(self, ds: FileStore, fname: str, sample: Any = None) -> Any:
        """Return the value of a file now; it is not cached."""
        return self._plain.get(ds, fname, sample)

    def get_lazy(self, ds: FileStore, fname: str) -> Lazy:
        """Return a lazy for a file, and start copying the file if there is room."""
        files = self._here()
        if files is None:
            return self._plain.get_lazy(ds, fname)
        return _FileLazy(self, files, files.ask(ds, fname), ds, fname)

    def to_cache(self, data: Any, name: str) -> Lazy:
        """Write data to disk and return a lazy for it; without room, the data stays in memory.

        Numbers, strings, bytes, tensors, arrays, lists, tuples and dicts of these, and deferred images are written.
        Anything else stays in memory, with one warning per type.
        """
        files = self._here()
        try:
            plain = data.data if isinstance(data, EncodedFile) else to_bytes(data)
            entry = None if files is None else files.put(plain, name)
        except TypeError as error:
            entry = None
            if str(error) not in self._said:
                self._said.add(str(error))
                _log.warning(
                    "to_cache(%r): %s cannot be written without pickle and stays in memory; pass bytes, strings, "
                    "numbers, tensors or arrays",
                    name,
                    error,
                )
        if files is None or entry is None:
            return HeldLazy(data)
        return _DataLazy(self, files, entry, data.with_data(b"") if isinstance(data, EncodedFile) else None)

    def close(self) -> None:
        """Delete this process's files; later requests are cached again."""
        files = self._files if self._pid == os.getpid() else None
        self._files, self._pid = None, -1
        if files is not None:
            files.close()
            files.join()

    def _here(self) -> DiskCache | None:
        """Return this process's cache, or None if it cannot have one."""
        if self._pid == os.getpid():
            return self._files
        if self._pid != -1:  # a fork may have copied the lock while a thread of the parent held it
            self._lock = threading.Lock()
        with self._lock:
            if self._pid != os.getpid():
                if self._files is not None:
                    self._files.quota.leave()
                self._files = files = own_files(self._parent, **self._limits)
                self._pid = os.getpid()
                if files is not None:
                    # Worker processes end without running `atexit` functions, but they do run this.
                    Finalize(self, files.close, exitpriority=10)
        return self._files


class _KeptLazy(Lazy):
    """A lazy with a kept file, which it releases when it is collected."""

    def __init__(self, pool: FileStoreCachePool, files: DiskCache, entry: KeptFile) -> None:
        self._pool = pool  # which closes when nothing needs it any more
        self._files = files
        self._entry = entry

    def __del__(self) -> None:
        if self._files.pid == os.getpid():
            self._files.release(self._entry)


class _FileLazy(_KeptLazy):
    """A file of a store, from its copy if there is one."""

    def __init__(self, pool: FileStoreCachePool, files: DiskCache, entry: KeptFile, ds: FileStore, fname: str) -> None:
        super().__init__(pool, files, entry)
        self._ds = ds
        self._fname = fname

    def read(self) -> tuple[Any, SourceInfo | None]:
        data = self._files.read(self._entry) if self._files.pid == os.getpid() else None
        if data is None:
            return self._ds[self._fname]
        return self._ds.decode(self._fname, data), self._entry.source


class _DataLazy(_KeptLazy):
    """Data written to disk; `shell` is the encoded object without its bytes, if it was one."""

    def __init__(self, pool: FileStoreCachePool, files: DiskCache, entry: KeptFile, shell: EncodedFile | None) -> None:
        super().__init__(pool, files, entry)
        self._shell = shell

    def read(self) -> tuple[Any, SourceInfo | None]:
        data = self._files.read(self._entry) if self._files.pid == os.getpid() else None
        if data is None:
            raise LoaderError(
                f"{self._entry.name}: the data passed to to_cache is gone: the pool was closed, its folder "
                f"{self._files.quota.folder.path} was deleted, or this is another process"
            )
        return from_bytes(data) if self._shell is None else self._shell.with_data(data).when_got(), None


# Data as bytes --------------------------------------------------------------------------------------------------------
#
# What `to_cache` writes: numbers, strings, bytes, tensors, arrays, and lists, tuples and dicts of them. No pickle that
# could run code. Format: torch's file format, read with `weights_only=True`; a container is a list that begins with a
# letter (`l`, `t`, `d`), an array is `["a", npy bytes]`.


_PLAIN = (type(None), bool, int, float, str, bytes)


def to_bytes(data: Any) -> bytes:
    """Return data as bytes; raises TypeError, naming the type, for what cannot be written like this."""
    import torch  # `energon prepare` imports this module and runs without torch

    file = io.BytesIO()
    torch.save(_tagged(data), file)
    return file.getvalue()


def from_bytes(data: bytes) -> Any:
    """Return a new copy of what `to_bytes` was given."""
    import torch

    return _untagged(torch.load(io.BytesIO(data), weights_only=True))


def _tagged(data: Any) -> Any:
    import torch

    kind = type(data)
    if kind in _PLAIN:
        return data
    if kind is torch.Tensor and data.device.type == "cpu" and not data.requires_grad:
        return data if data.untyped_storage().nbytes() == data.nbytes else data.clone()
    if kind is np.ndarray and not data.dtype.hasobject:
        file = io.BytesIO()
        np.lib.format.write_array(file, data, allow_pickle=False)
        return ["a", file.getvalue()]
    if kind is dict:
        return ["d", [[_tagged(key), _tagged(value)] for key, value in data.items()]]
    if kind is list or kind is tuple:
        return ["l" if kind is list else "t", *(_tagged(item) for item in data)]
    raise TypeError(f"{kind.__module__}.{kind.__qualname__}")


def _untagged(data: Any) -> Any:
    if type(data) is not list:
        return data
    tag, *items = data
    if tag == "a":
        return np.lib.format.read_array(io.BytesIO(items[0]), allow_pickle=False)
    if tag == "d":
        return {_untagged(key): _untagged(value) for key, value in items[0]}
    untagged = [_untagged(item) for item in items]
    return untagged if tag == "l" else tuple(untagged)
