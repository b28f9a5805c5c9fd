"""What a worker process says of itself, in a few integers of memory that it shares with the training process.

The worker writes them as it goes; the training process looks at them only when a batch does not come. So they can be
read of a worker that is stopped, that holds the interpreter lock in a call, or that is gone.

Layout, in words of 8 bytes: whether it has begun; CLOCK_MONOTONIC in ns when it began the current microbatch, 0 between
two; microbatches made and sent in this pass; messages of its own watchdog on the current microbatch; then
`Activity.words` of the thread that runs hooks and of those that load.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from multiprocessing.reduction import DupFd
from typing import Any

from energon_bridge.stream.watchdog import HOOK, HOOKS, INDEX, LEAF, SAMPLE_HOOKS, WORDS

_BEGUN, _SINCE, _MADE, _SENT, _SAID = range(5)
_FACTS = 5
_THREADS = 32
"""Threads that load whose work is told; further ones are not."""
_SAMPLE_CODES = range(1, 1 + len(SAMPLE_HOOKS))


class SharedMemory(mmap.mmap):
    """Memory that a worker shares with the training process, without a name that anything could leave behind.

    Forked workers have it anyway. To others it is sent as a file descriptor, for which it must be made `sendable`.
    """

    _file: int | None
    _owner: int

    def __new__(cls, size: int, *, sendable: bool = False, file: int | None = None) -> SharedMemory:
        """Map so many bytes, of the file if one is given."""
        if sendable and file is None:
            file = os.memfd_create("energon-shared")
            os.ftruncate(file, size)
        self = super().__new__(cls, -1 if file is None else file, size)
        self._file, self._owner = file, os.getpid()
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        assert self._file is not None, "sendable"
        return _attached, (DupFd(self._file), len(self))

    def __del__(self) -> None:
        if getattr(self, "_owner", None) != os.getpid():
            return
        if self._file is not None:
            os.close(self._file)
        # Workers that were forked later have it too, without using it: the pages go at once, not when they end.
        if hasattr(mmap, "MADV_REMOVE"):
            self.madvise(mmap.MADV_REMOVE)


def _attached(descriptor: Any, size: int) -> SharedMemory:
    return SharedMemory(size, file=descriptor.detach())


class StackFile:
    """A file without a name into which a worker writes where its threads are, when it is asked by a signal."""

    number = -1  # for `__del__`, where there is no descriptor left for the file

    def __init__(self, file: int | None = None) -> None:
        self.number = os.memfd_create("energon-stack") if file is None else file

    def __reduce__(self) -> tuple[Any, ...]:
        return _stack_file_of, (DupFd(self.number),)

    def read(self) -> str:
        """Return what has been written so far."""
        return os.pread(self.number, 1 << 16, 0).decode(errors="replace")

    def close(self) -> None:
        """Close the file in this process."""
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)

    __del__ = close


def _stack_file_of(descriptor: Any) -> StackFile:
    return StackFile(descriptor.detach())


class Board:
    """The words of one worker."""

    def __init__(self, *, sendable: bool = False) -> None:
        self._memory = SharedMemory(8 * (_FACTS + WORDS * (1 + _THREADS)), sendable=sendable)
        self._words = memoryview(self._memory).cast("Q")

    def __reduce__(self) -> tuple[Any, ...]:
        return _board_of, (self._memory,)

    # Written by the worker --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Say that the worker runs."""
        self._words[_BEGUN] = 1

    def start_pass(self) -> None:
        """Begin to count anew."""
        self._words[_MADE] = self._words[_SENT] = self._words[_SINCE] = 0

    def start_item(self) -> None:
        """Say that a microbatch is being made from now on."""
        words = self._words
        words[_SAID] = 0
        words[_SINCE] = time.monotonic_ns()

    def end_item(self) -> None:
        """Say that the microbatch has been made."""
        words = self._words
        words[_SINCE] = 0
        words[_MADE] += 1

    def sent(self) -> None:
        """Say that the microbatch has been sent."""
        self._words[_SENT] += 1

    def said(self) -> None:
        """Say that the worker's own watchdog has named what it does."""
        self._words[_SAID] += 1

    def activities(self) -> Sequence[memoryview]:
        """Return where the thread that runs hooks, and each of those that load, writes what it does."""
        starts = range(_FACTS, len(self._words), WORDS)
        return [self._words[start : start + WORDS] for start in starts]

    # Read by the training process -------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether the worker runs."""
        return bool(self._words[_BEGUN])

    @property
    def making_since(self) -> float | None:
        """When the worker began what it is making, by `time.monotonic`; None: it makes nothing."""
        since = self._words[_SINCE]
        return since / 1e9 if since else None

    @property
    def num_made(self) -> int:
        """Microbatches that it has made in this pass."""
        return self._words[_MADE]

    @property
    def num_sent(self) -> int:
        """Microbatches that it has sent in this pass."""
        return self._words[_SENT]

    @property
    def has_said(self) -> bool:
        """Whether the worker's own watchdog has named what it is making."""
        return bool(self._words[_SAID])

    def running(self) -> list[tuple[str, int, int]]:
        """Return the hooks that run, each with user key and index of its sample; key 0 where it has more than one."""
        found = []
        for words in self.activities():
            code = words[HOOK]
            if code and code < len(HOOKS):
                one = code in _SAMPLE_CODES
                found.append((HOOKS[code], words[LEAF] if one else 0, words[INDEX] if one else -1))
        return found


def _board_of(memory: SharedMemory) -> Board:
    board = Board.__new__(Board)
    board._memory = memory
    board._words = memoryview(memory).cast("Q")
    return board
