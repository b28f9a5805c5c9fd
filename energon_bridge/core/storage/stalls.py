"""Reads with a deadline: a stalled read is tried again beside the first; after the last try, an error names it.

A read that hangs in the kernel or in a library cannot be cancelled, so it must not block the caller's thread: reads
that may stall run on helper threads, and the caller waits for the first result. Every try returns the same bytes, so
the order does not change.

A helper costs 15 us, as much as a small read from the page cache. So only reads that leave the page cache use one:
always on a network file system; on others if the kernel reports that the last byte is not in memory (`RWF_NOWAIT`, 1
us, checked for reads of 32 KiB and more). File systems in memory are read directly.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Literal, TypeVar

from energon_bridge.core.errors import StorageError
from energon_bridge.core.storage.store import MADE

logger = logging.getLogger(__name__)

T = TypeVar("T")

READ_TIMEOUT_SECONDS = 60.0
TRIES = 3

Answer = tuple[T, None] | tuple[None, BaseException]
Answers = queue.SimpleQueue[Answer[T]]
Way = Literal["direct", "probe", "helper"]

_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "ceph", "gpfs", "beegfs", "afs", "9p", "glusterfs"}
_NETWORK |= {"wekafs", "orangefs", "pvfs2", "ocfs2", "gfs2", "virtiofs", "panfs", "quobyte", "fuse"}


class Stalls:
    """Runs reads with a deadline; thread-safe, and usable after a fork.

    Args:
        seconds: Time after which a read is tried again beside the running ones; None: wait forever.

    Attributes:
        count: Tries that took longer, in this process.
    """

    def __init__(self, seconds: float | None = READ_TIMEOUT_SECONDS) -> None:
        self.seconds = seconds
        self.count = 0
        self._helpers = DaemonThreads("energon-read")

    def __reduce__(self) -> tuple[object, ...]:
        return Stalls, (self.seconds,)

    def run(self, read: Callable[[], T], where: Callable[[], str]) -> T:
        """Return the result of a read, or raise its error.

        Args:
            read: May run several times at once.
            where: Describes the read, for messages.

        Raises:
            StorageError: All tries take too long.
        """
        if self.seconds is None:
            return read()
        answers: Answers[T] = queue.SimpleQueue()
        for number in range(1, TRIES + 1):
            self._start(read, answers)
            try:
                value, error = answers.get(timeout=self.seconds)
            except queue.Empty:
                self.count += 1
                MADE.stalled_reads += 1
                logger.warning(
                    "%s: reading has taken longer than %g s%s (stalled reads of this process so far: %d)",
                    where(),
                    self.seconds,
                    f"; starting try {number + 1} of {TRIES}" if number < TRIES else "",
                    self.count,
                )
                continue
            if error is not None:
                raise error
            return value  # type: ignore[return-value]  # None only if the read returned it
        raise StorageError(
            f"{where()}: not read after {TRIES} tries, {self.seconds:g} s apart: the storage hangs. Check the mount "
            "or the server, or allow more time with read_timeout_seconds=... in error_policy"
        )

    def _start(self, read: Callable[[], T], answers: Answers[T]) -> None:
        """Run a read on a helper thread, which puts the result into a queue."""
        answer: list[Answer[T]] = []

        def job() -> None:
            try:
                answer.append((read(), None))
            except BaseException as error:
                answer.append((None, error))

        self._helpers.start(job, lambda: answers.put(answer.pop()))


def way_to(path: str) -> Way:
    """Return how to read files below a folder: "direct", on a "helper" thread, or "probe": as the page cache says."""
    kind = _file_system(path)
    if kind in _NETWORK or kind.startswith("fuse."):
        return "helper"
    return "direct" if not kind or kind in _IN_MEMORY or not hasattr(os, "RWF_NOWAIT") else "probe"


_PROBE = (bytearray(1),)
"""Where the byte goes that is looked at; nobody reads it."""


def is_in_memory(descriptor: int, offset: int) -> bool:
    """Return whether a byte of a file is in the page cache; True also if the kernel cannot tell."""
    try:
        os.preadv(descriptor, _PROBE, offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except (OSError, OverflowError):  # a file system that cannot tell, or an offset outside of files
        return True
    return True


def _file_system(path: str) -> str:
    """Return the type of the file system of a path as Linux names it, or "" if it is unknown."""
    try:
        device = os.stat(path).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                mount, _, rest = line.partition(" - ")
                if mount.split()[2] == number:
                    return rest.split()[0]
    except (OSError, IndexError):
        pass
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# The threads that reads run on.


Jobs = queue.SimpleQueue[Callable[[], None] | None]


class DaemonThreads:
    """Runs jobs, which may block for ever, on idle threads or, if all are busy, new ones; they end with this object."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._idle: list[Jobs] = []
        weakref.finalize(self, _end, self._idle).atexit = False

    def start(self, job: Callable[[], None], done: Callable[[], None]) -> None:
        """Run a job, which must not raise, then `done`; after that the thread is idle."""
        if self._pid != os.getpid():
            self._begin()
        idle = self._idle
        try:
            jobs = idle.pop()
        except IndexError:
            jobs = queue.SimpleQueue()
            threading.Thread(target=_work, args=(jobs,), name=self._name, daemon=True).start()

        def run() -> None:
            job()
            idle.append(jobs)
            done()

        jobs.put(run)


def _work(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # release the memory of the last read before waiting for the next


def _end(idle: list[Jobs]) -> None:
    for jobs in idle:
        jobs.put(None)
