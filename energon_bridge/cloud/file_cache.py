"""`FileStoreCachePool`: copies files that are needed later to a local disk, in the background.

What is kept are values of the process in the cache of the node (`node_cache`), or in one like it below a folder
of your choice: the store's bytes, which are decoded on `get`. A requested file waits in a queue; threads read it from
its store and keep it while there is room. A caller that needs it sooner, or that finds no room, reads the store.
Invariant: a file counts as kept only when it is completely written; the last caller that releases it deletes it.
"""

from __future__ import annotations

import io
import logging
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from multiprocessing.util import Finalize
from typing import Any, Literal

import numpy as np

from energon_bridge.cloud.kept_values import KeptValues
from energon_bridge.cloud.node_cache import NodeCache, node_cache
from energon_bridge.core.errors import ConfigurationError, LoaderError, StorageError, check_number
from energon_bridge.core.samples import SourceInfo
from energon_bridge.core.storage.forks import Threads
from energon_bridge.core.stores.cache import CachePool, EncodedFile, HeldLazy, Lazy, NoCachePool
from energon_bridge.core.stores.file_store import FileStore

_log = logging.getLogger(__name__)
_PATIENCE_SECONDS = 0.5
"""How often a caller that waits for a file checks whether the cache was closed."""


class FileStoreCachePool(CachePool):
    """Keeps files in a folder until the samples that need them are gone.

    Examples:
        >>> pool = FileStoreCachePool(parent_cache_dir=".", max_cache_size_gbytes=100)
        >>> loader = get_savable_loader(get_train_dataset("data/captions", batch_size=4), cache_pool=pool)
        >>> pool.close()

    You may create it before the worker processes start; each of them then keeps its own files.

    Args:
        parent_cache_dir: Folder below which they are kept; default: the cache of the node (`use_node_cache`), whose
            limit holds, too, or else the folder for temporary files.
        num_workers: Threads that copy, in each process.
        max_cache_size_gbytes: Limit in 10^9 bytes, shared by all processes of the user on this host that keep files
            there. A file that does not fit is read on `get`.
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
            check_number(f"FileStoreCachePool: {name}", value, 1)
        if not max_cache_size_gbytes > 0:
            raise ConfigurationError(
                f"FileStoreCachePool: max_cache_size_gbytes must be above 0, got {max_cache_size_gbytes!r}"
            )
        self._parent = None if parent_cache_dir is None else os.path.abspath(os.fspath(parent_cache_dir))
        self._num_workers = num_workers
        self._limits: dict[str, Any] = {"max_bytes": int(max_cache_size_gbytes * 1e9), "max_count": max_cache_count}
        self._plain = NoCachePool()
        self._pid = -1
        self._files: KeptFiles | None = None
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
        self._files = None
        self._pid = -1
        if files is not None:
            files.close()
            files.join()

    def _here(self) -> KeptFiles | None:
        """Return the cache of this process, or None if its folder cannot be made."""
        if self._pid == os.getpid():
            return self._files
        if self._pid != -1:  # a fork may have copied the lock while a thread of the parent held it
            self._lock = threading.Lock()
        with self._lock:
            if self._pid != os.getpid():
                if self._files is not None:
                    self._files.values.close(remove=False)
                self._files = files = self._made()
                self._pid = os.getpid()
                if files is not None:
                    # Worker processes end without running `atexit` functions, but they do run this.
                    Finalize(self, files.close, exitpriority=10)
        return self._files

    def _made(self) -> KeptFiles | None:
        """Return a new cache of this process; None, with a warning, if its folder cannot be made."""
        cache = node_cache() if self._parent is None else None
        user = os.getuid() if hasattr(os, "getuid") else 0
        folder = os.path.join(self._parent or tempfile.gettempdir(), f"energon_cache_{user}")
        try:
            if cache is not None:
                return KeptFiles(KeptValues(cache, **self._limits), self._num_workers)
            values = KeptValues(NodeCache(folder, None), **self._limits, whole=True)
        except StorageError as error:
            _log.warning("caching is off: %s", error)
            return None
        if os.stat(folder).st_uid != user:  # where others may write, too, and change what is kept
            values.close()
            _log.warning("caching is off: %s belongs to somebody else; set parent_cache_dir to another folder", folder)
            return None
        return KeptFiles(values, self._num_workers)


class _KeptLazy(Lazy):
    """A lazy with a kept file, which it releases when it is collected."""

    def __init__(self, pool: FileStoreCachePool, files: KeptFiles, entry: KeptFile) -> None:
        self._pool = pool  # a pool closes when nothing refers to it any more
        self._files = files
        self._entry = entry

    def __del__(self, process: Callable[[], int] = os.getpid) -> None:  # at the interpreter's end `os` may be gone
        if self._files.pid == process():
            self._files.release(self._entry)


class _FileLazy(_KeptLazy):
    """A file of a store, from its copy if there is one."""

    def __init__(self, pool: FileStoreCachePool, files: KeptFiles, entry: KeptFile, ds: FileStore, fname: str) -> None:
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

    def __init__(self, pool: FileStoreCachePool, files: KeptFiles, entry: KeptFile, shell: EncodedFile | None) -> None:
        super().__init__(pool, files, entry)
        self._shell = shell

    def read(self) -> tuple[Any, SourceInfo | None]:
        data = self._files.read(self._entry) if self._files.pid == os.getpid() else None
        if data is None:
            raise LoaderError(
                f"{self._entry.name}: the data passed to to_cache is gone: the pool was closed, its folder "
                f"{self._files.values.folder} was deleted, or this is another process"
            )
        return from_bytes(data) if self._shell is None else self._shell.with_data(data).when_got(), None


# ---------------------------------------------------------------------------------------------------------------------
# The files of a process.


class _State(Enum):
    WAITING = 1
    RUNNING = 2
    KEPT = 3
    DIRECT = 4  # to be read from its store


@dataclass(slots=True, eq=False)
class KeptFile:
    """One requested file; `store` is None if data was given instead of a file."""

    store: FileStore | None
    name: str
    key: tuple[str, str] = ("", "")
    references: int = 1
    state: _State = _State.WAITING
    path: str = ""
    size: int = 0
    source: SourceInfo | None = None


class KeptFiles:
    """The kept files of this process.

    Attributes:
        pid: The process that they belong to.
        values: Their bytes on the disk.
    """

    def __init__(self, values: KeptValues, num_workers: int) -> None:
        self.pid = os.getpid()
        self.values = values
        self._num_workers = num_workers
        self._threads = Threads(num_workers, "energon-cache")
        self._running = 0  # threads at work, and files that they read
        self._reading = 0
        self._closed = False
        self._changed = threading.Condition(threading.Lock())
        self._table: dict[tuple[str, str], KeptFile] = {}
        self._waiting: deque[KeptFile] = deque()
        self._released: deque[KeptFile] = deque()

    def ask(self, store: FileStore, name: str) -> KeptFile:
        """Request a file that is needed later, until `release`."""
        key = store.get_path(), store.full_key(name)
        with self._changed:
            self._let_go()
            entry = self._table.get(key)
            if entry is None:
                entry = self._table[key] = KeptFile(store, name, key)
                self._waiting.append(entry)
            else:
                entry.references += 1
                if entry.state is _State.DIRECT:  # it found no room before; try again
                    entry.state = _State.WAITING
                    self._waiting.append(entry)
            self._start()
        return entry

    def put(self, data: bytes, name: str) -> KeptFile | None:
        """Keep data; None if there is no room."""
        entry = KeptFile(None, name)
        entry.state = _State.RUNNING
        with self._changed:
            self._let_go()
        return entry if self._write(entry, data) else None

    def read(self, entry: KeptFile) -> bytes | None:
        """Return the bytes of a file, or None if it must be read from its store."""
        with self._changed:
            self._let_go()
            if entry.state is _State.WAITING:
                entry.state = _State.DIRECT
            while entry.state is _State.RUNNING and not self._closed:
                self._changed.wait(_PATIENCE_SECONDS)
            if entry.state is not _State.KEPT or self._closed:
                return None
        try:
            with open(entry.path, "rb") as file:
                data = file.read()
        except OSError as error:
            _log.warning("%s: cannot read a cached file; reading %s again: %s", entry.path, entry.name, error)
            return None
        return data if len(data) == entry.size else None

    def release(self, entry: KeptFile) -> None:
        """Give up one request for a file.

        The garbage collector may call this anywhere, even while this thread holds the lock, so it never waits.
        """
        self._released.append(entry)
        if self._changed.acquire(blocking=False):
            try:
                self._let_go()
            finally:
                self._changed.release()

    def close(self) -> None:
        """Delete all files and the folder, at once or with the last fetch; later requests are read from their stores.

        Takes no lock and waits for no thread: the garbage collector may call this anywhere, even while this thread
        holds the lock.
        """
        self._closed = True
        self._waiting.clear()
        self._threads.shutdown(wait=False)
        if not self._running:
            self.values.close()

    def join(self) -> None:
        """Wait for the last fetch after `close`."""
        self._threads.shutdown()

    # With the lock held ----------------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        """Apply the queued releases; delete files without a request."""
        while self._released:
            entry = self._released.popleft()
            entry.references -= 1
            if entry.references:
                continue
            if entry.store is not None:
                del self._table[entry.key]
            if entry.state is _State.KEPT:
                self._delete(entry)
                self._start()

    def _delete(self, entry: KeptFile) -> None:
        entry.state = _State.DIRECT
        if not self._closed:
            self.values.drop(entry.path, entry.size)

    def _start(self) -> None:
        """Let threads fetch waiting files while there is room."""
        while self._waiting and not (self._waiting[0].references and self._waiting[0].state is _State.WAITING):
            self._waiting.popleft()  # fetched or released meanwhile; in a pool that stays full they would pile up
        while (
            self._waiting
            and not self._closed
            and self._running < self._num_workers
            and self.values.may_fit(self._running)
        ):
            entry = self._waiting.popleft()
            if entry.references and entry.state is _State.WAITING:
                self._running += 1
                self._threads.submit(self._fetch, entry)

    # Without the lock ------------------------------------------------------------------------------------------------

    def _fetch(self, entry: KeptFile) -> None:
        """Read a file from its store and keep it (on a thread of the pool)."""
        assert entry.store is not None
        fits = begins = False
        try:
            fits = self.values.fits()  # which may take some time: whoever needs the file meanwhile reads it
            with self._changed:
                fits = fits and self.values.has_room(1 + self._reading)  # beside those that are being read
                begins = fits and not self._closed and entry.references > 0 and entry.state is _State.WAITING
                if begins:
                    entry.state = _State.RUNNING
                    self._reading += 1
            if begins:
                data, entry.source = entry.store.read(entry.name)
                self._write(entry, data)
        except Exception as error:  # the reader meets the same error and can handle it
            _log.debug("%s: cannot read %s ahead: %s", entry.store.get_path(), entry.name, error)
        finally:
            with self._changed:
                self._running -= 1
                self._reading -= begins
                if entry.state is _State.RUNNING:
                    entry.state = _State.DIRECT
                elif entry.state is _State.WAITING and not fits:
                    self._waiting.appendleft(entry)
                self._start()
                self._changed.notify_all()
            if self._closed and not self._running:
                self.values.close()

    def _write(self, entry: KeptFile, data: bytes) -> bool:
        """Write a file if there is room; return whether it is kept."""
        path = None if self._closed or not entry.references else self.values.put(data)
        with self._changed:
            self._let_go()
            if path is None:
                return False
            entry.path = path
            entry.size = len(data)
            entry.state = _State.KEPT
            if not entry.references:  # nobody waits for it any more
                self._delete(entry)
            return entry.state is _State.KEPT


# ---------------------------------------------------------------------------------------------------------------------
# Data as bytes, as `to_cache` writes them: numbers, strings, bytes, tensors, arrays, and lists, tuples and dicts of
# them. No pickle that could run code. Format: torch's file format, read with `weights_only=True`; a container is a list
# that begins with a letter (`l`, `t`, `d`), an array is `["a", npy bytes]`.


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
