"""What runs in one process of a loader: the units of a rank, in order, each made by a stream.

A *unit* is a lane (of an endless run) or the number of a microbatch (of a finite one). The same generator runs in a
worker process, in the training process with `num_workers=0`, and in tests, which is why no order can depend on where
it runs.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import mmap
import os
import signal
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch.utils.data

from energon_bridge.errors import HookTimeoutError
from energon_bridge.loader.transport import Arena, Outbox
from energon_bridge.plan.blend import Blend
from energon_bridge.samples.slabs import Lender
from energon_bridge.stream.finite import FiniteStream, PassRows
from energon_bridge.stream.lane import Lane
from energon_bridge.stream.pipeline import Pipeline
from energon_bridge.stream.state import LaneState, Produced
from energon_bridge.topology import ticks

T = TypeVar("T")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


class Stream(Protocol):
    """Makes the microbatches of units."""

    @property
    def threaded(self) -> bool:
        """Whether `prepare` starts anything."""
        ...

    def prepare(self, unit: int, count: int) -> None: ...
    def produce(self, unit: int) -> Produced: ...
    def write_into(self, memory: Lender) -> None: ...
    def close(self) -> None: ...


class LaneStreams:
    """The lanes of one process, each opened when it is first asked for."""

    def __init__(self, pipeline: Pipeline, blend: Blend | None, states: dict[int, LaneState]) -> None:
        self._pipeline = pipeline
        self._blend = blend
        self._states = states
        self._lanes: dict[int, Lane] = {}

    def _lane(self, number: int) -> Lane:
        lane = self._lanes.get(number)
        if lane is None:
            state = self._states.get(number) or LaneState.fresh(len(self._pipeline.leaves))
            lane = self._lanes[number] = Lane(number, self._pipeline, self._blend, state)
        return lane

    @property
    def threaded(self) -> bool:
        return self._pipeline.threaded

    def prepare(self, unit: int, count: int) -> None:
        self._lane(unit).prepare(count)

    def produce(self, unit: int) -> Produced:
        return _reported(self._pipeline, unit, self._lane(unit).produce)

    def write_into(self, memory: Lender) -> None:
        self._pipeline.write_into(memory)

    def close(self) -> None:
        self._pipeline.close()


class FiniteStreams:
    """The microbatches of one pass of a finite stream in one process."""

    def __init__(self, pipeline: Pipeline, rows: PassRows, *, drop_last: bool) -> None:
        self._pipeline = pipeline
        self._stream = FiniteStream(pipeline, rows, drop_last=drop_last)

    @property
    def threaded(self) -> bool:
        return self._pipeline.threaded

    def prepare(self, unit: int, count: int) -> None:
        self._stream.prepare(unit)

    def produce(self, unit: int) -> Produced:
        return _reported(self._pipeline, unit, lambda: self._stream.produce(unit))

    def write_into(self, memory: Lender) -> None:
        self._pipeline.write_into(memory)

    def close(self) -> None:
        self._pipeline.close()


def _reported(pipeline: Pipeline, unit: int, make: Callable[[], Produced]) -> Produced:
    """Return the next microbatch of a unit with what failed on the way, under the eyes of the watchdog."""
    watchdog, start = pipeline.watchdog, time.perf_counter()
    try:
        if watchdog is None:
            item = make()
        else:
            watchdog.arm(unit)
            try:
                item = make()
            finally:
                watchdog.disarm()
    except HookTimeoutError as error:
        pipeline.say_pending()
        raise HookTimeoutError(watchdog.message if watchdog is not None else str(error)) from None
    except Exception:
        pipeline.say_pending()  # no microbatch takes it along
        raise
    if pipeline.judge.pending:
        item.reports = pipeline.judge.taken()
    item.seconds = pipeline.seconds_since(start)
    return item


def produced(stream: Stream, units: Iterator[int | None], ahead: int) -> Iterator[Produced | None]:
    """Make units in order, loading up to `ahead` further ones beside if the stream has threads; None is an empty tick.

    The first unit is made before anything is loaded ahead, so that the first batch comes as soon as it can.
    """
    upcoming: deque[int | None] = deque()

    def look_ahead(length: int) -> None:
        upcoming.extend(itertools.islice(units, length - len(upcoming)))
        for unit, count in Counter(unit for unit in upcoming if unit is not None).items():
            stream.prepare(unit, count)

    try:
        if not stream.threaded:
            for unit in units:
                yield None if unit is None else stream.produce(unit)
            return
        look_ahead(1)
        while upcoming:
            unit = upcoming.popleft()
            item = None if unit is None else stream.produce(unit)
            look_ahead(max(1, ahead))
            yield item
    finally:
        stream.close()


def outgoing(item: Produced, worker: int, outbox: Outbox) -> tuple[Any, ...]:
    """Return what a worker sends for an item: its number and a message, of plain values, which pickle fastest."""
    message = outbox.pack(item.plain())
    item.batch = None
    return worker, *outbox.unshared(message)


class WorkerTicks(torch.utils.data.IterableDataset[Any]):
    """The dataset that DataLoader's workers iterate: packed microbatches, and None for empty ticks.

    Args:
        make_stream: Builds the stream, in the worker.
        schedule: Gives the units of the rank, in order, with the worker of each.
        rewind: Called, in the worker, before every pass but the first.
        num_workers: W.
        ahead: Units loaded ahead by threads of the worker, if it has any.
        arenas: Shared memory, one per worker.
    """

    def __init__(
        self,
        make_stream: Callable[[], Stream],
        schedule: Callable[[], Iterator[tuple[int, int]]],
        rewind: Callable[[], None],
        num_workers: int,
        ahead: int,
        arenas: list[Arena | None],
    ) -> None:
        self._make_stream = make_stream
        self._schedule = schedule
        self._rewind = rewind
        self._num_workers = num_workers
        self._ahead = ahead
        self._arenas = arenas
        self._passes = 0
        self._outbox: Outbox | None = None

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        assert info is not None, "iterated by DataLoader's workers only"
        arena = self._arenas[info.id]
        if self._outbox is None:
            self._outbox = Outbox(arena, kept=2 + 2 * self._ahead)
        if self._passes:
            self._rewind()
            if arena is not None:
                arena.forget()
        self._passes += 1
        units = ticks(self._schedule(), self._num_workers, info.id)
        stream = self._make_stream()
        if arena is not None:
            stream.write_into(arena)
        for item in produced(stream, units, self._ahead):
            yield None if item is None else outgoing(item, info.id, self._outbox)


def weak(method: Callable[[], T]) -> Callable[[], T]:
    """Return a call of a bound method that does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def call() -> T:
        bound = reference()
        assert bound is not None, "the loader is gone"
        return bound()

    return call


def identity(item: Any) -> Any:
    """Collate nothing: items are whole microbatches."""
    return item


def set_up_worker(worker: int, *, begun: mmap.mmap, die_with_parent: bool) -> None:
    """Set a worker up: say that it has begun; Ctrl-C is for the training process, which then stops its workers.

    Without `die_with_parent`, a worker notices the end of the training process by DataLoader's watchdog, some seconds
    later. What the training process had made before is kept from the garbage collector, which would write to all of it
    and so end the sharing of its memory.
    """
    gc.freeze()
    keep_freed_memory()
    begun[worker] = 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked in the fork
    if die_with_parent and sys.platform == "linux":
        # A worker must not outlive a training process that was killed: 1 is PR_SET_PDEATHSIG.
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)


def keep_freed_memory() -> None:
    """Keep memory that is freed, up to 128 MiB, for the next samples; does nothing where glibc's malloc is not there.

    glibc gives memory back when twice the largest block freed so far is free. The arrays of one batch are more than
    that, so they would come as fresh pages again and again, which takes longer than most of what is done with them.
    Settings of the user's own, in the environment, are left alone.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest that there can be
        mallopt(_M_TRIM_THRESHOLD, 128 << 20)
