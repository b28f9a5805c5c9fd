"""Records what each thread is doing; the watchdog names the hook and sample that hang.

The watchdog is one daemon thread in each process that makes microbatches, armed while a microbatch is being made. If
that takes too long, it logs rank, worker and unit (a lane, or a microbatch of a pass), the running hook, its sample,
and where in the code its thread is, as file, line and function. Further messages come at doubling intervals.

A call that keeps the interpreter lock, or SIGSTOP, silences this thread. Then the training process, which is waiting
for the worker, takes over (`loader.pool`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from energon_bridge.core.encoder.hooks import Hook
from energon_bridge.core.errors import ConfigurationError, HookTimeoutError
from energon_bridge.core.format.dataset import PreparedDataset
from energon_bridge.core.samples.sample import Records
from energon_bridge.core.samples.sample_place import here, place_in

# ---------------------------------------------------------------------------------------------------------------------
# What a thread of the loader is doing: a few attributes that it sets and others may read at any time.
#
# They name the running hook and its sample for messages about failures and hangs. Setting them is the only cost.
#
# Hook and sample are also written as three integers, `words`. A worker's words lie in memory shared with the training
# process, which thus knows what a worker was doing when it was killed or while it holds the interpreter lock.


HOOK, LEAF, INDEX = range(3)
"""The words of an activity: the hook's code, 0 for none; `LeafSource.user_key`; and the sample's index."""
WORDS = 3

Words = MutableSequence[int] | memoryview


class Activity:
    """What one thread is doing.

    Args:
        words: Where to write hook and sample as integers (`HOOK`, `LEAF`, `INDEX`).

    Attributes:
        hook: The hook or step of loading that is running; None: none is.
        sample: The sample, or the list of samples, passed to the hook.
        dataset, index, key: While loading: the dataset, the number of the sample and its key.
    """

    __slots__ = ("_hook", "dataset", "index", "key", "sample", "words")

    def __init__(self, words: Words | None = None) -> None:
        self.words: Words = [0] * WORDS if words is None else words
        self.hook = None
        self.sample: Any = None
        self.dataset: Any = None
        self.index = -1
        self.key = ""

    @property
    def hook(self) -> Hook | None:
        return self._hook

    @hook.setter
    def hook(self, hook: Hook | None) -> None:
        self._hook = hook
        self.words[HOOK] = 0 if hook is None else hook.code
        here.at = None if hook is None else self

    def at(self, leaf: int, index: int) -> None:
        """Record in the words which sample of which leaf the next hooks are for."""
        words = self.words
        words[LEAF], words[INDEX] = leaf, index

    def rest(self) -> None:
        """Clear the current hook and drop its sample."""
        self.hook = self.sample = self.dataset = None
        self.key = ""
        self.index = -1

    def __str__(self) -> str:
        """Name hook and sample, without reading a file or showing content."""
        sample = self.sample
        dataset = self.dataset
        if self.hook is None:
            return "no hook"
        hook = self.hook.title
        if isinstance(sample, list | Records):
            first = place_in(sample[0]) if sample else None
            return f"{hook} of {len(sample)} samples" + (f", the first one {first}" if first else "")
        place = None if sample is None else place_in(sample)
        if place is not None:
            return f"{hook} of {place}"
        if dataset is None:
            return hook
        shard = ""
        if isinstance(dataset, PreparedDataset):
            shard = f"shard {dataset.place_of(self.index)[0]}, "
        key = f", key {self.key!r}" if self.key else ""
        return f"{hook} of {dataset.path}: {shard}sample {self.index}{key}"


class Activities:
    """The activities of the threads of one process, by thread.

    Args:
        words: Words for the threads, in order of appearance; further threads get private ones.
    """

    def __init__(self, words: Sequence[Words] = ()) -> None:
        self._by_thread: dict[int, Activity] = {}
        self._words = iter(words)

    def mine(self) -> Activity:
        """Return the calling thread's activity."""
        thread = threading.get_ident()
        found = self._by_thread.get(thread)
        if found is None:
            found = self._by_thread[thread] = Activity(next(self._words, None))
        return found

    def all(self) -> list[tuple[int, Activity]]:
        """Return all threads with their activities."""
        return list(self._by_thread.items())


# ---------------------------------------------------------------------------------------------------------------------
# The watchdog.


logger = logging.getLogger(__name__)

EXIT_CODE = 86
"""Exit code of a process whose hook cannot be interrupted."""
GRACE_SECONDS = 10.0
"""Seconds that an interrupted hook gets to end."""
_FRAMES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogSettings:
    """How long a microbatch may take.

    Args:
        timeout: Seconds for a microbatch.
        initial_timeout: Seconds for the first one of a process; None: as for the others.
        fail: End the run with HookTimeoutError instead of waiting on.
        replace: Kill a worker process that takes longer and start it again; has no effect without workers.
    """

    timeout: float
    initial_timeout: float | None = None
    fail: bool = False
    replace: bool = False

    def __post_init__(self) -> None:
        for name in ("timeout", "initial_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(f"watchdog: {name} must be a number of seconds above 0, got {value!r}")
        if self.fail and self.replace:
            raise ConfigurationError(
                "watchdog: fail_on_timeout ends the run, but on_hang='replace' continues it: set only one"
            )

    @property
    def interval(self) -> float:
        """Seconds between two looks."""
        return min(1.0, min(self.timeout, self.initial_timeout or self.timeout) / 4)

    def allowed(self, made: int) -> float:
        """Return the seconds allowed for the next microbatch of a process that has made `made`."""
        return self.timeout if made or self.initial_timeout is None else self.initial_timeout


class Watchdog:
    """Watches over one process.

    Args:
        settings: How long a microbatch may take.
        now: The activity of the thread that makes microbatches.
        activities: The activities of the loading threads.
        where: Names the process, such as "rank 0, worker 1".
        said: Called after each logged message.
    """

    def __init__(
        self,
        settings: WatchdogSettings,
        now: Activity,
        activities: Activities,
        where: str,
        said: Callable[[], None] = lambda: None,
    ) -> None:
        self.message = ""
        self._said = said
        self._settings = settings
        self._now = now
        self._activities = activities
        self._where = where
        self._lock = threading.Lock()
        self._stop: queue.SimpleQueue[None] = queue.SimpleQueue()  # an event's lock could be held by this very thread
        self._thread: threading.Thread | None = None
        self._made = 0
        self._unit = self._maker = 0
        self._since: float | None = None

    def arm(self, unit: int) -> None:
        """Start watching: the calling thread is making a microbatch of a unit."""
        self._unit = unit
        self._maker = threading.get_ident()
        self._since = time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="energon-watchdog", daemon=True)
            self._thread.start()

    def disarm(self) -> None:
        """Stop watching: the microbatch was made or has failed."""
        with self._lock:
            self._since = None
            self._made += 1

    def close(self, *, wait: bool = True) -> None:
        """Stop watching; `wait` for the end of the thread unless the garbage collector may call this."""
        self._stop.put(None)
        thread = self._thread
        # While the interpreter shuts down, daemon threads stop, and joining one would never end (Python 3.13).
        if thread is not None and wait and not sys.is_finalizing():
            thread.join()

    def _is_stopped_within(self, seconds: float) -> bool:
        try:
            self._stop.get(timeout=seconds)
        except queue.Empty:
            return False
        self._stop.put(None)
        return True

    def _watch(self) -> None:
        settings = self._settings
        watched = -1
        reported = 0
        while not self._is_stopped_within(settings.interval):
            with self._lock:
                since = self._since
                made = self._made
                if made != watched:
                    watched = made
                    reported = 0
                if since is None:
                    continue
                allowed = settings.allowed(made)
                took = time.monotonic() - since
                if took < allowed * 2**reported:
                    continue
                reported += 1
                self.message = self._describe(took, allowed)
                if settings.fail:
                    # Under the lock, so that the message comes before the microbatch counts as made.
                    _raise_in(self._maker, HookTimeoutError)
            logger.error("%s", self.message)
            self._said()
            if settings.fail:
                self._end(made)
                return

    def _end(self, made: int) -> None:
        """Interrupt the hook; end the process if that fails, as in a blocking call."""
        deadline = time.monotonic() + min(GRACE_SECONDS, self._settings.timeout)
        while time.monotonic() < deadline:
            if self._is_stopped_within(0.01) or self._made != made:
                return
        logger.critical("%s: cannot interrupt the hook; ending the process with exit code %d", self._where, EXIT_CODE)
        for handler in logging.getLogger().handlers:
            handler.flush()
        os._exit(EXIT_CODE)

    def _describe(self, took: float, allowed: float) -> str:
        frames = sys._current_frames()
        busy = [(self._maker, self._now), *((t, a) for t, a in self._activities.all() if a.hook)]
        lines = [
            f"{self._where}, unit {self._unit}: a microbatch has been in the making for {took:.1f} s "
            f"(watchdog_timeout_seconds allows {allowed:g})"
        ]
        for thread, activity in busy:
            if thread == self._maker and activity is self._now and not activity.hook and len(busy) > 1:
                continue  # it is waiting for a loading thread
            lines.append(f"  {activity}")
            lines += [f"    {line}" for line in _stack(frames.get(thread))]
        return "\n".join(lines)


def _stack(frame: FrameType | None) -> list[str]:
    """Return file:line:function of the innermost frames of a thread, the innermost last."""
    lines: list[str] = []
    while frame is not None and len(lines) < _FRAMES:
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}:{frame.f_code.co_name}")
        frame = frame.f_back
    return lines[::-1]


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """Raise in another thread, as soon as it runs Python code again."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
