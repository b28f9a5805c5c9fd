"""How much the processes of a host keep below one folder, all together: who asks gets room while a limit allows it.

`energon_cache_HOST.USER.total` holds two integers of 8 bytes, little-endian: bytes and files of all processes. The
lock file of each process's own folder (`own_folder`) holds its share in the same form. Both change only under the
lock of the total, which the kernel frees when a process dies. Invariant: the share of a process is never less than
what it keeps; the total is that of all shares, but for a process that was killed between its two writes, until the
shares are next added up, which happens whenever a process comes, goes, or clears away the folder of a dead one.

The files of a dead process take room until somebody clears them away: the next process that comes, or one that finds no
room. Where the file system knows no locks, each process counts its own only.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import threading
import time
from collections.abc import Iterator

from energon_bridge.errors import StorageError
from energon_bridge.stores.own_folder import OwnFolder, can_lock, is_still, lock_files, locked, remove_stale

_SHARE = struct.Struct("<qq")
_TOTAL = "total"
_CLEARING_SECONDS = 2.0
"""So often a process that finds no room looks for the folders of dead ones."""


class SharedQuota:
    """The room that this process has taken, in a new folder of its own below `parent`.

    Methods may be called from any thread, `close` also by the garbage collector in the middle of another.

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
            raise StorageError(f"{self._path}: cannot share the room of cached files: {error}") from error

    def take(self, size: int) -> bool:
        """Take room for one file, if there is any."""
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
        """Give back the room of one file."""
        with self._exclusively():
            if not self._closed:
                self._change(-size, -1)

    def has_room(self, files: int) -> bool:
        """Whether that many files more might fit, as far as their number and the bytes in use tell."""
        with self._lock:
            total, count = self._total()
        return count + files < self._max_count and total < self._max_bytes

    def close(self) -> None:
        """Give everything back and remove the folder."""
        with self._lock:
            if self._inside:  # the garbage collector, in the middle of one of the above
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
        """Let go of everything in a child process, which was forked with it; it stays its owner's."""
        self.folder.leave()
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def _open(self) -> None:
        """Open the file of the total; the last process that closes it may just have unlinked it."""
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
        """Make the total that of all shares (with its lock held); return the number of processes."""
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
        """Clear away the folders of dead processes, if nobody looked for them lately; say whether it looked."""
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
        return 0, 0  # of a process that has just begun
    size, count = _SHARE.unpack(data)
    return size, count
