"""The files that one process keeps in its cache folder, within limits of bytes and number.

A file that is asked for waits in a queue; threads read it from its store and write it to the folder, as long as there
is room (`quota`: the limits are those of all processes of the host). Who needs it earlier, or finds no room, reads the
store directly. Invariants: no file is in the table before all of it is written; room is taken before it is used and
given back after the last one who asked for the file has let go of it, which also deletes it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from enum import Enum

from energon_bridge.errors import StorageError
from energon_bridge.samples import SourceInfo
from energon_bridge.stores.base import FileStore
from energon_bridge.stores.quota import SharedQuota

_THREADS = "energon-cache"
_PATIENCE_SECONDS = 0.5
"""After so long, who waits for a file looks whether the files were closed meanwhile."""

_log = logging.getLogger(__name__)


class _State(Enum):
    WAITING = 1
    RUNNING = 2
    KEPT = 3
    DIRECT = 4  # to be read from its store


class KeptFile:
    """One file that was asked for; `store` is None where data was given instead of a file."""

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
        quota: What they take of the limits, and their folder.
    """

    def __init__(self, parent: str, *, num_workers: int, max_bytes: int, max_count: int) -> None:
        self.pid = os.getpid()
        self.quota = SharedQuota(parent, max_bytes=max_bytes, max_count=max_count)
        self._num_workers = num_workers
        self._threads = ThreadPoolExecutor(num_workers, _THREADS)
        self._running = 0
        self._closed = False
        self._changed = threading.Condition(threading.Lock())
        self._numbers = itertools.count()
        self._table: dict[tuple[str, str], KeptFile] = {}
        self._waiting: deque[KeptFile] = deque()
        self._released: deque[KeptFile] = deque()

    def ask(self, store: FileStore, name: str) -> KeptFile:
        """Note that a file is needed later; `release` says that it is not any more."""
        key = store.get_path(), store.full_key(name)
        with self._changed:
            self._let_go()
            entry = self._table.get(key)
            if entry is None:
                entry = self._table[key] = KeptFile(store, name, key)
                self._waiting.append(entry)
            else:
                entry.references += 1
                if entry.state is _State.DIRECT:  # it found no room, perhaps there is some now
                    entry.state = _State.WAITING
                    self._waiting.append(entry)
            self._start()
        return entry

    def put(self, data: bytes, name: str) -> KeptFile | None:
        """Keep data, None if there is no room for it."""
        entry = KeptFile(None, name)
        entry.state = _State.RUNNING
        with self._changed:
            self._let_go()
        return entry if self._write(entry, data) else None

    def read(self, entry: KeptFile) -> bytes | None:
        """Return the bytes of a file, None if it is not kept and must be read from its store."""
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
            _log.warning("%s: a cached file cannot be read, reading %s again: %s", entry.path, entry.name, error)
            return None
        return data if len(data) == entry.size else None

    def release(self, entry: KeptFile) -> None:
        """Note that somebody who asked for a file needs it no longer.

        The garbage collector calls this anywhere, also where this very thread has the lock, so it never waits.
        """
        self._released.append(entry)
        if self._changed.acquire(blocking=False):
            try:
                self._let_go()
            finally:
                self._changed.release()

    def close(self) -> None:
        """Delete all files and the folder; what is asked for later is read from its store.

        Takes no lock: the garbage collector may call this anywhere, also where this very thread has the lock.
        """
        if self._closed:
            return
        self._closed = True
        self._waiting.clear()
        # On one of the threads themselves it cannot wait for its own end.
        wait = not threading.current_thread().name.startswith(_THREADS)
        self._threads.shutdown(wait=wait, cancel_futures=True)
        self.quota.close()

    # With the lock held ----------------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        """Count those who have released files, and delete files that nobody needs."""
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
            self._waiting.popleft()  # got or let go meanwhile: a pool that stays full must not gather them
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
            data, entry.source = entry.store.read(entry.name)
            kept = self._write(entry, data)
        except Exception as error:  # whoever gets the file meets the error himself, where it can be answered
            _log.debug("%s: %s cannot be read ahead: %s", entry.store.get_path(), entry.name, error)
        finally:
            with self._changed:
                self._running -= 1
                if not kept:
                    entry.state = _State.DIRECT
                self._start()
                self._changed.notify_all()

    def _write(self, entry: KeptFile, data: bytes) -> bool:
        """Reserve room for a file and write it; say whether it is kept."""
        with self._changed:
            if self._closed or not entry.references or not self.quota.take(len(data)):
                return False
            entry.size = len(data)
            entry.path = os.path.join(self.quota.folder.path, str(next(self._numbers)))
        try:
            with open(entry.path, "wb") as file:
                file.write(data)
        except OSError as error:
            _log.warning("%s: a file cannot be cached, it will be read again: %s", entry.path, error)
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
    """Make the kept files of this process; None, with a warning, where the folder cannot be written."""
    try:
        return DiskCache(parent, num_workers=num_workers, max_bytes=max_bytes, max_count=max_count)
    except StorageError as error:
        _log.warning("nothing is cached: %s", error)
        return None
