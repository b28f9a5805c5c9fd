"""What threads and forks need of each other: pools that rest while a worker is forked, and values of one process.

Invariant: no job of a `Threads` runs in the block of `at_rest`, which forks, unless its warning says so. A fork has the
locks that a job holds, also those inside libraries (SQLite's allocator has one), and no thread that releases them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
logger = logging.getLogger(__name__)

_REST_SECONDS = 10.0
_rest = threading.Condition(threading.Lock())
_running = 0


_process = os.getpid()


def process_id() -> int:
    """Return the id of this process, without a call of the system, which costs microseconds in some containers."""
    return _process


class PerProcess(Generic[_T]):
    """A value that each process makes when it first asks for it, such as a lock.

    A fork copies locks that threads of its parent hold, and values that these are changing, but no threads, so such a
    lock is never released. The fork therefore drops the copy and makes its own.
    """

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make
        self._made: dict[int, _T] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return PerProcess, (self._make,)

    def __call__(self) -> _T:
        """Return the value of this process."""
        process = process_id()
        try:
            return self._made[process]
        except KeyError:
            value = self._made.setdefault(process, self._make())  # if threads ask at once, the first's
            self._made = {process: value}
            return value


class Threads(ThreadPoolExecutor):
    """A pool of threads whose jobs count as running, for `at_rest`."""

    def shutdown(
        self, wait: bool = True, *, cancel_futures: bool = False, ending: Callable[[], bool] = sys.is_finalizing
    ) -> None:
        """Stop the threads. At the interpreter's end they have stopped, and modules that this needs may be gone."""
        if not ending():
            super().shutdown(wait, cancel_futures=cancel_futures)

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Run a function on a thread."""
        job: list[Callable[[], _T]] = [functools.partial(fn, *args, **kwargs)]
        return super().submit(_counted, job)


def _counted(job: list[Callable[[], _T]]) -> _T:
    global _running
    with _rest:
        _running += 1
    try:
        return job.pop()()  # destroys what only the job referred to, while it still counts as running
    finally:
        with _rest:
            _running -= 1
            _rest.notify_all()


@contextlib.contextmanager
def at_rest(seconds: float = _REST_SECONDS) -> Iterator[None]:
    """Wait until no job runs, and let none begin in the block; after some seconds go on anyway, with a warning."""
    with _rest:
        if not _rest.wait_for(lambda: not _running, seconds):
            logger.warning(
                "a worker is forked while threads of this process have been loading for %g s: it may wait in vain for "
                'a lock that one of them holds. If it hangs, use start_method="forkserver"',
                seconds,
            )
        yield


def _after_fork() -> None:
    global _process, _rest, _running
    _process = os.getpid()
    _rest = threading.Condition(threading.Lock())
    _running = 0


os.register_at_fork(after_in_child=_after_fork)
