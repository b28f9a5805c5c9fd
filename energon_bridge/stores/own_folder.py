"""A folder of one process below a shared one, which goes when the process has gone, however it went.

Beside each folder `energon_cache_HOST_PID_RANDOM` lies a file of that name and `.lock`, which its process holds locked;
the kernel frees the lock when the process dies. A process that makes a folder first removes those of its own host whose
lock is free. The lock file comes first and goes last, so no folder is ever without one.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator

from energon_bridge.errors import StorageError

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
        prefix: Path with which those of all processes of this host begin.
        descriptor: Of the lock file, whose content is others' (`quota`).
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
        """Remove the folder with all that is in it."""
        _remove(self.path)
        os.close(self.descriptor)

    def leave(self) -> None:
        """Let go of the folder in a child process, which was forked with it; it stays its owner's."""
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
    """Take the lock of a file: True if it is ours now, False if another has it, None where there are no locks."""
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
    """Hold the lock of a file, once it is free. Raises OSError where the file system has no locks."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def can_lock(descriptor: int) -> bool:
    """Whether there are locks on the file system of a file; one that is locked already stays so."""
    return _lock(descriptor) is not None


def is_still(descriptor: int, path: str) -> bool:
    """Whether the path still names the file that is open."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False
