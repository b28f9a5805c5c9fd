"""A pool of daemon threads for blocking calls; a fork starts without any."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable

Jobs = queue.SimpleQueue[Callable[[], None] | None]


class Helpers:
    """Run jobs on idle threads, or on new ones if all are busy; the threads end with this object."""

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
            threading.Thread(target=_help, args=(jobs,), name=self._name, daemon=True).start()

        def run() -> None:
            job()
            idle.append(jobs)
            done()

        jobs.put(run)


def _help(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # release the memory of the last read before waiting for the next


def _end(idle: list[Jobs]) -> None:
    for jobs in idle:
        jobs.put(None)
