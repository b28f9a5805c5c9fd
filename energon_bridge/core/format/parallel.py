"""Runs a function over many shards, in processes of this machine or by an engine; results keep the order."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import spawn
from numbers import Integral
from typing import Any, Protocol, TypeVar

from energon_bridge.core.errors import ConfigurationError, EnergonError

Item = TypeVar("Item")
Result = TypeVar("Result")


class ShardEngine(Protocol):
    """Anything else that can work on shards, such as a cluster."""

    def map_shards(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Generator[Result, None, None]:
        """Yield `function(item)` for every item, in their order; raise what it raises for the first such item."""


Workers = int | ShardEngine
"""A number of processes, or an engine."""
Progress = Callable[[int, int], object]
"""Called with the number of items that are done, and of all."""

_AHEAD = 3  # items per worker that are submitted or done before the oldest result is taken: bounds memory


def map_shards(
    function: Callable[[Item], Result], items: Sequence[Item], *, num_workers: Workers
) -> Generator[Result, None, None]:
    """Yield `function(item)` for every item, in their order, working on `num_workers` of them at a time.

    Raises what the function raises, for the first such item in their order, and EnergonError if a worker was killed.
    Close the generator to stop the workers.
    """
    if not isinstance(num_workers, int | Integral):
        yield from num_workers.map_shards(function, items)
        return
    num_workers = min(num_workers, len(items))
    if num_workers <= 1:
        yield from map(function, items)
        return
    # Forking is fastest, but unsafe in a process with threads, such as a notebook's.
    method = "fork" if threading.active_count() == 1 and "fork" in multiprocessing.get_all_start_methods() else "spawn"
    pool = ProcessPoolExecutor(
        num_workers, mp_context=multiprocessing.get_context(method), initializer=_end_with_parent
    )
    needs_program = b"__main__" in pickle.dumps((function, items[0]))
    try:
        waiting: deque[Future[Result]] = deque()
        for number, item in enumerate(items):
            with contextlib.nullcontext() if needs_program else _without_the_program():
                waiting.append(pool.submit(function, item))
            if number + 1 >= num_workers * _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise EnergonError(
            "a worker process was killed (out of memory?). Try again with fewer workers."
            if method == "fork" or not needs_program
            else "a worker process ended. Workers of a program with threads import it, for functions that it defines: "
            'put what it runs under `if __name__ == "__main__":`. If it has that, try again with fewer workers.'
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def work_off(
    function: Callable[[Item], object], items: Sequence[Item], *, num_workers: Workers, progress: Progress
) -> int:
    """Call a function with every item, for its side effects; return their number. Raises as `map_shards` does."""
    with contextlib.closing(map_shards(function, items, num_workers=num_workers)) as done:
        for number, _ in enumerate(done, start=1):
            progress(number, len(items))
    return len(items)


def unseen(done: int, total: int) -> None:
    """Show no progress."""


@contextlib.contextmanager
def _without_the_program() -> Generator[None]:
    """Let processes that this thread spawns begin without running the program as `__mp_main__` again."""
    # `spawn` has no option for it: the function that tells a new process what to run is replaced, for this thread only.
    prepare = spawn.get_preparation_data
    thread = threading.get_ident()

    def prepared(name: str) -> dict[str, Any]:
        given = prepare(name)
        if threading.get_ident() == thread:
            given = {key: value for key, value in given.items() if not key.startswith("init_main_from")}
        return given

    spawn.get_preparation_data = prepared
    try:
        yield
    finally:
        spawn.get_preparation_data = prepare


def _end_with_parent() -> None:
    """Make a worker end when the process that started it is killed, instead of waiting for work forever."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ---------------------------------------------------------------------------------------------------------------------
# Tasks: parts of the work that a scheduler starts, such as the jobs of a SLURM array.


@dataclass(frozen=True, slots=True)
class Task:
    """One of `count` parts of the work: every `count`th shard, from shard `number` on."""

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise ConfigurationError(
                f"task {self}: tasks are numbered from 0/{self.count} to {self.count - 1}/{self.count}."
            )

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def of(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return the items of this task."""
        return items[self.number :: self.count]
