"""The files that one process keeps in its cache folder, within limits on bytes and number.

Three parts, from the ground up: `OwnFolder`, a folder that disappears with its process; `SharedQuota`, limits that the
processes of a host share; and `DiskCache`, the files themselves.

A requested file waits in a queue; threads read it from its store and write it to the folder while the quota allows. A
caller that needs it sooner, or that finds no room, reads the store directly. Invariants: a file counts as kept only
when it is completely written; room is reserved before it is used, and returned once the last caller has released the
file, which also deletes it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import re
import secrets
import shutil
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from enum import Enum

from energon_bridge.errors import StorageError
from energon_bridge.samples import SourceInfo
from energon_bridge.storage.helpers import Threads
from energon_bridge.stores.base import FileStore

# Own folder -----------------------------------------------------------------------------------------------------------
#
# The folder of a process below a shared one; it is removed after the process has ended, even by a kill.
#
# Next to each folder `energon_cache_HOST_PID_RANDOM` is a file of that name plus `.lock`, which its process keeps
# locked; the kernel releases the lock when the process dies. Before a process makes its folder, it removes those of its
# own host whose lock is free. The lock file is created first and removed last, so no folder is ever without one.


try:
    import fcntl
except ImportError:  # not on Windows, where folders of dead processes stay
    fcntl = None  # type: ignore[assignment]

_PREFIX = "energon_cache_"
_LOCK = ".lock"


class OwnFolder:
    """A new folder below `parent`; raises StorageError if none can be made there.

    Attributes:
        path: The folder.
        prefix: Start of the paths of all such folders on this host.
        descriptor: Of the lock file, whose content belongs to `SharedQuota`.
    """

    def __init__(self, parent: str) -> None:
        self.prefix = os.path.join(parent, f"{_PREFIX}{re.sub('[^A-Za-z0-9.-]', '-', socket.gethostname())}_")
        try:
            os.makedirs(parent, exist_ok=True)
            remove_stale(self.prefix)
            while True:
                self.path = f"{self.prefix}{os.getpid()}_{secrets.token_hex(8)}"
                flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
                self.descriptor = os.open(self.path + _LOCK, flags, 0o600)
                if _lock(self.descriptor) is not False and is_still(self.descriptor, self.path + _LOCK):
                    break
                os.close(self.descriptor)  # another process took the new file for that of a dead one
            os.mkdir(self.path, 0o700)
        except OSError as error:
            raise StorageError(f"{parent}: cannot make a folder for cached files: {error}") from error

    def remove(self) -> None:
        """Remove the folder and its content."""
        _remove(self.path)
        os.close(self.descriptor)

    def leave(self) -> None:
        """Release the folder in a forked child; it still belongs to its owner."""
        os.close(self.descriptor)


def lock_files(prefix: str) -> list[str]:
    """Return the lock files of this host's processes."""
    parent, start = os.path.split(prefix)
    with os.scandir(parent) as entries:
        return [entry.path for entry in entries if entry.name.startswith(start) and entry.name.endswith(_LOCK)]


def remove_stale(prefix: str) -> None:
    """Remove the folders of this host's dead processes."""
    for path in lock_files(prefix):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # gone meanwhile, or another user's
        try:
            if _lock(descriptor) and is_still(descriptor, path):
                _remove(path[: -len(_LOCK)])
        finally:
            os.close(descriptor)


def _remove(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if not os.path.exists(folder):
        with contextlib.suppress(OSError):
            os.unlink(folder + _LOCK)


def _lock(descriptor: int) -> bool | None:
    """Take the lock of a file: True if it is ours now, False if another has it, None without locks."""
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        except OSError:
            pass  # a file system without locks
    return None


@contextlib.contextmanager
def locked(descriptor: int) -> Iterator[None]:
    """Wait for the lock of a file and hold it. Raises OSError if the file system has no locks."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def can_lock(descriptor: int) -> bool:
    """Whether the file system of a file supports locks; a lock that is held stays held."""
    return _lock(descriptor) is not None


def is_still(descriptor: int, path: str) -> bool:
    """Whether the path still refers to the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


# Quota ---------------------------------------------------------------------------------------------------------------
#
# Limits that all processes of a host share, for what they keep below one folder.
#
# `energon_cache_HOST.USER.total` holds two little-endian integers of 8 bytes: the bytes and the files of all processes.
# The lock file of each process's own folder holds its share in the same form. Both change only under the lock of the
# total, which the kernel releases when a process dies. Invariants: a process never keeps more than its share; the total
# is the sum of the shares. Only a process killed between its two writes breaks the second one, until the shares are
# added up again: whenever a process starts, ends, or removes the folder of a dead one.
#
# The files of a dead process use up room until the next process that starts, or one that finds no room, removes them.
# On a file system without locks, each process counts only its own files.


_SHARE = struct.Struct("<qq")
_TOTAL = "total"
_CLEARING_SECONDS = 2.0
"""How often a process without room looks for the folders of dead processes."""


class SharedQuota:
    """This process's share of the limits, and its folder, a new one below `parent`.

    Any thread may call the methods; the garbage collector may call `close` in the middle of another one.

    Raises:
        StorageError: The folder cannot be made.
    """

    def __init__(self, parent: str, *, max_bytes: int, max_count: int) -> None:
        self.folder = OwnFolder(parent)
        self._max_bytes = max_bytes
        self._max_count = max_count
        self._share = (0, 0)
        self._lock = threading.RLock()
        self._inside = self._closing = self._closed = False
        self._cleared = -math.inf
        user = os.getuid() if hasattr(os, "getuid") else 0  # files of others can be neither read nor cleared away
        self._path = f"{self.folder.prefix.removesuffix('_')}.{user}.{_TOTAL}"
        self._descriptor = -1
        try:
            if can_lock(self.folder.descriptor):
                self._open()
        except OSError as error:
            self.folder.remove()
            raise StorageError(f"{self._path}: cannot write the shared limits of cached files: {error}") from error

    def take(self, size: int) -> bool:
        """Reserve room for one file; False if there is none."""
        for attempt in range(2):
            with self._exclusively():
                total, count = self._total()
                if self._closed:
                    return False
                if total + size <= self._max_bytes and count < self._max_count:
                    self._change(size, 1)
                    return True
            if attempt or not self._clear():
                break
        return False

    def give_back(self, size: int) -> None:
        """Return the room of one file."""
        with self._exclusively():
            if not self._closed:
                self._change(-size, -1)

    def has_room(self, files: int) -> bool:
        """Whether that many more files might fit, judging by their number and the bytes in use."""
        with self._lock:
            total, count = self._total()
        return count + files < self._max_count and total < self._max_bytes

    def close(self) -> None:
        """Give everything back and remove the folder."""
        with self._lock:
            if self._inside:  # called by the garbage collector, in the middle of one of the above
                self._closing = True
            if self._inside or self._closed:
                return
            self._closed, descriptor = True, self._descriptor
            if descriptor < 0:
                self.folder.remove()
                return
            with locked(descriptor):
                self.folder.remove()
                if not self._add_up():
                    with contextlib.suppress(OSError):
                        os.unlink(self._path)
            self._descriptor = -1
            os.close(descriptor)

    def leave(self) -> None:
        """Release everything in a forked child; it still belongs to its owner."""
        self.folder.leave()
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def _open(self) -> None:
        """Open the file of the total, again if the last process to close it has just unlinked it."""
        while True:
            descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            with locked(descriptor):
                if is_still(descriptor, self._path):
                    self._descriptor = descriptor
                    self._add_up()
                    return
            os.close(descriptor)

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[None]:
        with self._lock:
            self._inside = True
            try:
                with locked(self._descriptor) if self._descriptor >= 0 else contextlib.nullcontext():
                    yield
            finally:
                self._inside = False
                if self._closing:
                    self.close()

    def _total(self) -> tuple[int, int]:
        return self._share if self._descriptor < 0 else _read(self._descriptor)

    def _change(self, size: int, count: int) -> None:
        """Add to this process's share, and then to the total (with the locks held)."""
        total, files = self._total()
        self._share = self._share[0] + size, self._share[1] + count
        if self._descriptor >= 0:
            os.pwrite(self.folder.descriptor, _SHARE.pack(*self._share), 0)
            os.pwrite(self._descriptor, _SHARE.pack(total + size, files + count), 0)

    def _add_up(self) -> int:
        """Recompute the total from all shares (with its lock held); return the number of processes."""
        total = count = processes = 0
        for path in lock_files(self.folder.prefix):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue  # gone meanwhile, or another user's
            size, files = _read(descriptor)
            os.close(descriptor)
            total, count, processes = total + size, count + files, processes + 1
        os.pwrite(self._descriptor, _SHARE.pack(total, count), 0)
        return processes

    def _clear(self) -> bool:
        """Remove the folders of dead processes, unless this was done recently; return whether it looked."""
        if self._closed or self._descriptor < 0 or time.monotonic() < self._cleared + _CLEARING_SECONDS:
            return False
        self._cleared = time.monotonic()
        remove_stale(self.folder.prefix)
        with self._exclusively():
            if not self._closed:
                self._add_up()
        return True


def _read(descriptor: int) -> tuple[int, int]:
    data = os.pread(descriptor, _SHARE.size, 0)
    if len(data) < _SHARE.size:
        return 0, 0  # the process has just started
    size, count = _SHARE.unpack(data)
    return size, count


_PATIENCE_SECONDS = 0.5
"""How often a caller that waits for a file checks whether the cache was closed."""

_log = logging.getLogger(__name__)


# Files ----------------------------------------------------------------------------------------------------------------


class _State(Enum):
    WAITING = 1
    RUNNING = 2
    KEPT = 3
    DIRECT = 4  # to be read from its store


class KeptFile:
    """One requested file; `store` is None if data was given instead of a file."""

    __slots__ = ("key", "name", "path", "references", "size", "source", "state", "store")

    def __init__(self, store: FileStore | None, name: str, key: tuple[str, str] = ("", "")) -> None:
        self.store = store
        self.name = name
        self.key = key
        self.references = 1
        self.state = _State.WAITING
        self.path = ""
        self.size = 0
        self.source: SourceInfo | None = None


class DiskCache:
    """The kept files of this process, in a folder below `parent`.

    Attributes:
        pid: The process that they belong to.
        quota: Their share of the limits, and their folder.
    """

    def __init__(self, parent: str, *, num_workers: int, max_bytes: int, max_count: int) -> None:
        self.pid = os.getpid()
        self.quota = SharedQuota(parent, max_bytes=max_bytes, max_count=max_count)
        self._num_workers = num_workers
        self._threads = Threads(num_workers, "energon-cache")
        self._running = 0
        self._closed = False
        self._changed = threading.Condition(threading.Lock())
        self._numbers = itertools.count()
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
            self.quota.close()

    def join(self) -> None:
        """Wait for the last fetch after `close`."""
        self._threads.shutdown()

    # With the lock held ----------------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        """Apply queued releases, and delete files that nobody needs any more."""
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
        if self._closed:
            return
        with contextlib.suppress(FileNotFoundError):  # one that could not be written
            os.unlink(entry.path)
        self.quota.give_back(entry.size)

    def _start(self) -> None:
        """Let threads fetch waiting files while there is room."""
        while self._waiting and not (self._waiting[0].references and self._waiting[0].state is _State.WAITING):
            self._waiting.popleft()  # fetched or released meanwhile; in a pool that stays full they would pile up
        while (
            self._waiting
            and not self._closed
            and self._running < self._num_workers
            and self.quota.has_room(self._running)
        ):
            entry = self._waiting.popleft()
            if entry.references and entry.state is _State.WAITING:
                entry.state = _State.RUNNING
                self._running += 1
                self._threads.submit(self._fetch, entry)

    # Without the lock ------------------------------------------------------------------------------------------------

    def _fetch(self, entry: KeptFile) -> None:
        """Read a file from its store and keep it (on a thread of the pool)."""
        assert entry.store is not None
        kept = False
        try:
            if not self._closed:
                data, entry.source = entry.store.read(entry.name)
                kept = self._write(entry, data)
        except Exception as error:  # the reader meets the same error and can handle it
            _log.debug("%s: cannot read %s ahead: %s", entry.store.get_path(), entry.name, error)
        finally:
            with self._changed:
                self._running -= 1
                if not kept:
                    entry.state = _State.DIRECT
                self._start()
                self._changed.notify_all()
            if self._closed and not self._running:
                self.quota.close()

    def _write(self, entry: KeptFile, data: bytes) -> bool:
        """Reserve room for a file and write it; return whether it is kept."""
        with self._changed:
            if self._closed or not entry.references or not self.quota.take(len(data)):
                return False
            entry.size = len(data)
            entry.path = os.path.join(self.quota.folder.path, str(next(self._numbers)))
        try:
            with open(entry.path, "wb") as file:
                file.write(data)
        except OSError as error:
            _log.warning("%s: cannot cache a file, so it will be read again: %s", entry.path, error)
            written = False
        else:
            written = True
        with self._changed:
            self._let_go()
            entry.state = _State.KEPT
            if not written or not entry.references:  # nobody waits for it any more
                self._delete(entry)
            return entry.state is _State.KEPT


def own_files(parent: str, *, num_workers: int, max_bytes: int, max_count: int) -> DiskCache | None:
    """Create the cache of this process; None, with a warning, if the folder cannot be written."""
    try:
        return DiskCache(parent, num_workers=num_workers, max_bytes=max_bytes, max_count=max_count)
    except StorageError as error:
        _log.warning("caching is off: %s", error)
        return None
