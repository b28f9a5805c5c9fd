"""Values that a process keeps in a cache on the node's disk until it drops them, within one quota of all processes.

They are `<number>.kept` in `<folder>/v2/<host>_<process>_<random>/`, a folder of the process (`process_folders.py`).

Invariant: nobody evicts what a living process keeps, and all processes together never keep more than the limits.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence

from energon_bridge.cloud.node_cache import BLOCK, NodeCache
from energon_bridge.cloud.process_folders import KEPT, alone, kept_in, own_folder
from energon_bridge.core.errors import StorageError

_log = logging.getLogger(__name__)

_LEASED_PART = 40
"""All processes together may add this part of the limits (a fortieth) between two looks. Twice that is set aside, since
further processes may start meanwhile."""
_LEASED_COUNT = 64
"""Leases are multiples of this number of values, and of a block of bytes; with smaller limits there are none."""
_LOOKS = 20
"""A process that found no room looks again after so many times the time that its look took, times the processes."""


class KeptValues:
    """The values that this process keeps in a cache until it drops them, in a folder that goes with the process.

    A *look* counts what all processes keep, under the lock of the cache; its result stays until the next one. Adding a
    value takes a look. Where the limits are large, a process may add a few values between two looks (a *lease*), and
    room for these is set aside. `drop` and `close` take no lock: the garbage collector may call them anywhere.

    Args:
        cache: Where they are kept.
        max_bytes, max_count: Limits on what all processes keep there.
        whole: The last process out removes the folder of the cache.

    Attributes:
        folder: That of this process.

    Raises:
        StorageError: It cannot be made.
    """

    def __init__(self, cache: NodeCache, *, max_bytes: int, max_count: int, whole: bool = False) -> None:
        self._cache = cache
        self._whole = whole
        self._limits = max_bytes, max_count
        # Bytes and number of values: the most that all processes may keep, by the last look (-1: none was taken); what
        # this one may add until the next; what the others keep; what this one has added, had at the last look, dropped.
        self._most = -1, 0
        self._leased = self._others = 0, 0
        self._added = (0, 0)
        self._seen = (0, 0)
        self._dropped = (0, 0)
        self._due = 0.0
        self._numbers = itertools.count()
        self._putting = threading.Lock()
        try:
            self.folder, descriptor = own_folder(cache.folder)
        except OSError as error:
            raise StorageError(f"cannot make a folder for cached files: {error}") from error
        self._descriptors = [descriptor]

    def may_fit(self, more: int = 0) -> bool:
        """Whether there may be room for a value beside `more` others: by the last look, or since a new one is due."""
        return self._fits(1, 1 + more) or time.monotonic() >= self._due

    def has_room(self, count: int) -> bool:
        """Whether there was room for so many values by the last look."""
        return self._fits(1, count)

    def fits(self) -> bool:
        """Whether there is room for a value by the last look; if there was none and a new one is due, by that."""
        with self._putting, contextlib.suppress(OSError):
            if not self._fits(1) and time.monotonic() >= self._due:
                with self._looking(1):
                    pass
        return self._fits(1)

    def put(self, data: bytes) -> str | None:
        """Write a value and return its path; None if there is no room, or the disk refuses it."""
        size = len(data)
        path = f"{self.folder}/{next(self._numbers)}{KEPT}"
        try:
            with self._putting:
                unseen, fits = _sum(self._added, self._seen, -1), self._fits(size)
                if not self._descriptors or not (fits or time.monotonic() >= self._due):
                    return None
                # Within its lease a process adds values without a look.
                takes_look = not fits or unseen[0] + size > self._leased[0] or unseen[1] + 1 > self._leased[1]
                with self._looking(size) if takes_look else contextlib.nullcontext():
                    if not self._fits(size):
                        return None
                    with open(path, "xb") as file:
                        self._added = _sum(self._added, (size, 1))
                        file.truncate(size)  # others count it from now on
            with open(path, "r+b") as file:
                file.write(data)
        except OSError as error:
            if self._descriptors:
                _log.warning("%s: cannot cache a file, so it will be read again: %s", path, error)
            with self._putting, contextlib.suppress(OSError):
                os.unlink(path)
                self._added = _sum(self._added, (size, 1), -1)
            return None
        return path

    def drop(self, path: str, size: int) -> None:
        """Delete a value; not by two threads at once."""
        with contextlib.suppress(OSError):
            os.unlink(path)
        self._dropped = _sum(self._dropped, (size, 1))

    def close(self, *, remove: bool = True) -> None:
        """Delete all values and the folder, but in a forked child, whose parent has them."""
        with contextlib.suppress(IndexError):
            descriptor = self._descriptors.pop()
            if remove:
                shutil.rmtree(self.folder, ignore_errors=True)
            os.close(descriptor)
            with contextlib.suppress(OSError):  # there is more
                os.rmdir(parent := os.path.dirname(self.folder))
                if self._whole:
                    os.rmdir(os.path.dirname(parent))

    def _fits(self, size: int, count: int = 1) -> bool:
        used = _sum(_sum(self._others, self._added), self._dropped, -1)
        return used[0] + size <= self._most[0] and used[1] + count <= self._most[1]

    @contextlib.contextmanager
    def _looking(self, size: int) -> Iterator[None]:
        """Count what all processes keep, after making room for some bytes; no other one adds a value in the block."""
        began, (max_bytes, max_count) = time.monotonic(), self._limits
        left = self._cache.make_room(size)
        with alone(self._cache.folder):
            kept_bytes, kept_count, processes = kept_in(self._cache.folder)
            own = _sum(self._added, self._dropped, -1)
            self._seen = self._added
            self._others = _sum((kept_bytes, kept_count), own, -1)
            # All leases together are 1/40 of the limits; each process has its part of that, in whole blocks.
            parts = _LEASED_PART * max(1, processes)
            leased = min(max_bytes, left) // parts // BLOCK * BLOCK, max_count // parts // _LEASED_COUNT * _LEASED_COUNT
            self._leased = leased if min(leased) > 0 else (0, 0)
            self._most = _sum(self._limits, self._leased, -2 * processes) if left >= size else (-1, 0)
            now = time.monotonic()
            # So that at most a twentieth of the time goes into looks, however many processes take turns at them.
            self._due = now + (now - began) * _LOOKS * processes
            yield


def _sum(first: Sequence[int], second: Sequence[int], times: int = 1) -> tuple[int, int]:
    return first[0] + times * second[0], first[1] + times * second[1]
