"""Folders of processes in a cache on the node's disk, which their processes keep locked.

The kernel releases the lock of a process that dies, and whoever makes room on its host removes its folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator

try:
    import fcntl
except ImportError:  # not on Windows, where folders of dead processes stay
    fcntl = None  # type: ignore[assignment]

KEPT = ".kept"
"""How the names of files end that nobody but their process removes."""


def own_folder(folder: str) -> tuple[str, int]:
    """Make a folder for this process in that of a cache; return its path, and a descriptor that keeps it locked.

    Raises OSError.
    """
    while True:
        path = f"{folder}/{_prefix()}{os.getpid()}_{secrets.token_hex(8)}"
        try:
            os.makedirs(path, 0o700)
            remove_dead(folder, but=path)
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another process removed it, or an empty folder above it
        with contextlib.suppress(OSError):
            if _lock(descriptor) and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return path, descriptor
        os.close(descriptor)


def remove_dead(folder: str, but: str = "") -> int:
    """Remove the folders of dead processes; return the number of living ones."""
    living = 0
    for own in os.scandir(folder):
        if "_" not in own.name or own.path == but:
            continue
        living += 1
        if not own.name.startswith(_prefix()):
            continue  # not every file system shows the locks of another host
        with contextlib.suppress(OSError):  # it has gone, or is another user's
            descriptor = os.open(own.path, os.O_RDONLY | os.O_CLOEXEC)
            if _lock(descriptor, without=False):
                shutil.rmtree(own.path, ignore_errors=True)
                living -= 1
            os.close(descriptor)
    return living


def kept_in(folder: str) -> tuple[int, int, int]:
    """Return bytes and number of the values that processes keep, and how many processes there are."""
    living = remove_dead(folder)
    sizes = [stat.st_size for path, stat in files_below(folder, "_") if path.endswith(KEPT)]
    return sum(sizes), len(sizes), living


@contextlib.contextmanager
def alone(folder: str) -> Iterator[None]:
    """Hold the lock of a cache, where the file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for a fork that has copied the descriptor
        os.close(descriptor)


def _prefix() -> str:
    """Return how the names of folders of this host's processes start."""
    return f"{re.sub('[^A-Za-z0-9.-]', '-', socket.gethostname())}_"


def _lock(descriptor: int, *, without: bool = True) -> bool:
    """Take the lock of a folder if it is free; return whether it is ours now, or `without` where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return without
    return True


def files_below(folder: str, mark: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files in the folders of a cache (those with a mark in their names) and what is known of them."""
    for part in (part for part in os.scandir(folder) if mark in part.name):
        with contextlib.suppress(OSError):  # it may disappear meanwhile
            for entry in os.scandir(part.path):
                with contextlib.suppress(FileNotFoundError):
                    yield entry.path, entry.stat()
