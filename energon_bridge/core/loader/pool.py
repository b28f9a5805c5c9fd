"""The worker processes of a loader: asked in the order of delivery, watched over while they are waited for, replaced.

The schedule says whose microbatch is due, so the training process reads the link of exactly that worker. A worker makes
`prefetch_factor` microbatches ahead: it begins with that many credits and gets one for each microbatch that is taken.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import pickle
import select
import socket
import struct
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

from torch.autograd.profiler import record_function

from energon_bridge.core.errors import HookTimeoutError, LoaderError, NotProvidedError, WorkerDiedError
from energon_bridge.core.loader.processes import Board, StackFile, refused_part
from energon_bridge.core.loader.transport import Arena, BatchMessage, unpack
from energon_bridge.core.loader.workers import AGAIN, CREDIT, MESSAGE_BYTES, LocalProcesses, Work, raised_by_worker
from energon_bridge.core.stream.lane_state import LaneBatch
from energon_bridge.core.stream.leaf import Leaf, user_key_of
from energon_bridge.core.stream.watchdog import EXIT_CODE, GRACE_SECONDS, Activity, WatchdogSettings

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
"""Seconds between two looks at a worker whose microbatch is due."""
_BEGIN_SECONDS = 30.0
"""Seconds that a forked worker may take to begin; doubled after each attempt that failed."""
_IMPORT_FACTOR = 10
"""That time is so many times longer for workers that import everything first, on nodes that are busy with it."""
END_SECONDS = 5.0
_RESTARTS_WITHOUT_A_BATCH = 3
_DEATHS_OF_A_SAMPLE = 3
_SHORT_WAIT_MILLISECONDS = 1
"""Seconds of waiting up to which profilers are not called: a call costs 15 us, with or without a profiler."""
_RANGE = "enumerate(DataLoader)#SavableDataLoader.__next__"
"""What profilers call the time spent waiting for any DataLoader."""


class WorkSource(Protocol):
    """Gives the workers their work: the loader."""

    def work(self, worker: int, barred: frozenset[tuple[int, int]], careful: bool) -> Work:
        """Return the work of a worker from the delivered position on."""

    def leaves(self) -> Sequence[Leaf]:
        """Return the leaves, to name samples."""


class Engine(Protocol):
    """Starts workers, and knows what became of them: `LocalProcesses`, or what another room registers ("workers").

    What it returns for a worker has the methods of a process of multiprocessing: `is_alive`, `join`, `kill`, `close`.

    Attributes:
        name: What it is called in messages.
        forks: Whether a worker takes over the memory of this process, so that nothing of it is sent.
        advice: What to do about a worker that never begins.
        refusal: What to do about work that cannot be sent, and the function that must be able to pickle it.
    """

    name: str
    forks: bool
    advice: str
    refusal: tuple[str, Callable[[Any], bytes]]

    def start(self, work: Work, link: socket.socket, arena: Arena | None, board: Board, stacks: StackFile) -> Any:
        """Start a worker; it is there when `settle` returns."""

    def settle(self) -> None:
        """Wait for the workers that were started. Raises LoaderError if one cannot be started."""

    def ending(self, process: Any) -> tuple[int | None, str]:
        """Return the exit code of a worker that has ended, and how that is said."""

    def state(self, process: Any, stacks: StackFile) -> str:
        """Return what a worker is doing: the stacks of its threads, or that it is stopped."""

    def metrics(self) -> dict[str, float]:
        """Return further counters of the workers, by name."""


class Worker:
    """One worker, as the training process sees it.

    Attributes:
        number: Which of the workers of its rank it is.
        current: The pass that it has been asked for.
        taken: Microbatches that it sent in this pass and that were taken.
        started: When it was started.
    """

    def __init__(self, work: Work, engine: Engine, look_seconds: float) -> None:
        if not hasattr(os, "memfd_create"):
            raise NotProvidedError(
                "worker processes hand batches over in memory that only Linux has: WorkerConfig(num_workers=0) loads "
                "in this process, on threads, and delivers the same batches"
            )
        self.number = work.number
        self.current = self.taken = 0
        self._engine = engine
        self.arena = new_arena(sendable=not engine.forks)
        self.board = Board(sendable=not engine.forks)
        self._stacks = StackFile()
        self._link, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        seconds, rest = divmod(look_seconds, 1)
        # Reading is one system call, which returns after some seconds.
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6)))
        self._poll = select.poll()
        self._poll.register(self._link, select.POLLIN)
        self.started = time.monotonic()
        with other:
            try:
                self._process = engine.start(work, other, self.arena, self.board, self._stacks)
            except BaseException:
                self._link.close()
                raise

    def has_sent(self, milliseconds: int) -> bool:
        """Wait some seconds for a message or the end of the worker; return whether either came."""
        return bool(self._poll.poll(milliseconds))

    def fileno(self) -> int:
        """Return the descriptor of its link."""
        return self._link.fileno()

    def receive(self, flags: int = 0) -> bytes | None:
        """Return the next message; b"" if the worker is gone, None if there is none for a while."""
        try:
            return self._link.recv(MESSAGE_BYTES, flags)
        except BlockingIOError:
            return None
        except ConnectionError:
            return b""

    def send(self, command: bytes) -> None:
        """Send a command; if the worker has ended, do nothing."""
        with contextlib.suppress(ConnectionError):
            self._link.send(command)

    def credit(self) -> None:
        """Allow the worker to make one more microbatch."""
        self.send(CREDIT)

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        return not self._process.is_alive()

    def ends_within(self, seconds: float) -> bool:
        """Wait some seconds for the process to end; return whether it did."""
        self._process.join(seconds)
        return self.is_gone

    def ask_to_end(self) -> None:
        """Close the link, for every process that has this end of it."""
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()

    def kill(self) -> None:
        """End the process, also one that is stopped."""
        self._process.kill()

    def end(self, seconds: float) -> tuple[int | None, str]:
        """Wait for the process, kill it after some seconds, and return its exit code, and how that is said."""
        self.ask_to_end()
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        return self._engine.ending(self._process)

    def close(self) -> None:
        """Free the descriptors and memory that this process has of a worker that has ended."""
        self._process.close()
        self._stacks.close()

    def state(self) -> str:
        """Return what the process is doing."""
        return self._engine.state(self._process, self._stacks)


class WorkerPool:
    """The workers of one loader.

    A worker holds nothing that is needed to go on. One that is gone while a microbatch of it is due, however it
    ended, is replaced by one that starts from what was delivered; what the others have made stays. The training
    process notices:

    - a worker that ended, because its end of the link is closed (or, where a fork of this process has that end too,
      because it is looked for every now and then);
    - one that never begins: a fork can catch a lock that another thread holds at that moment, for which it waits in
      vain;
    - one that takes longer than its watchdog allows without a word of that watchdog, which is a thread of the
      worker: it is stopped, or a call keeps its interpreter lock. What it does stands in its `Board`, and
      faulthandler says where.

    A sample that ends its worker three times in a row, with no microbatch in between, is barred: it counts as one
    that failed, and the error policy decides. The third attempt is made by a worker that does one thing at a time,
    so that what is barred is the sample and not its neighbour.

    Args:
        source: What they are to do; referred to weakly, so that a loader that is dropped takes its workers along.
        max_restarts: How often workers are replaced in all.
        watchdog: How long a microbatch may take.
        where: Names the training process, such as "rank 0".

    Attributes:
        restarts: How often workers were replaced.
    """

    worker_type: ClassVar[type[Worker]] = Worker

    def __init__(
        self,
        source: WorkSource,
        number: int,
        *,
        engine: Engine | None = None,
        max_restarts: int,
        watchdog: WatchdogSettings | None,
        where: str,
    ) -> None:
        self._source = weakref.ref(source)
        self._number = number
        self._engine: Engine = engine or LocalProcesses("fork")
        self._left = max_restarts
        self._watchdog = watchdog
        self._where = where
        self._look = min(_LOOK_SECONDS, watchdog.interval) if watchdog is not None else _LOOK_SECONDS
        self._workers: list[Worker] = []
        self._due: Iterator[tuple[int, int]] = iter(())
        self._next: tuple[int, int] | None = None  # of those, where it was looked at
        self._barred: frozenset[tuple[int, int]] = frozenset()
        self.bars = True
        # Of each worker, since it last sent a microbatch:
        self._deaths = [0] * number
        self._suspects = [Counter[tuple[int, int]]() for _ in range(number)]
        self.restarts = 0
        _pools.add(self)

    # Delivering -------------------------------------------------------------------------------------------------------

    def begin(self, due: Iterator[tuple[int, int]]) -> None:
        """Start the workers; `due` has the units in the order of delivery, each with its worker."""
        self._due = due
        self._next = None
        try:
            for number in range(self._number):
                self._workers.append(self._started(number))
            self._engine.settle()
        except BaseException:
            self.stop()
            raise

    @property
    def has_workers(self) -> bool:
        """Whether there are workers to stop."""
        return bool(self._workers)

    def again(self, due: Iterator[tuple[int, int]]) -> bool:
        """Let running workers begin the next pass; say whether there are any."""
        self._due = due
        self._next = None
        for worker in self._workers:
            worker.current += 1
            worker.taken = 0
            worker.send(AGAIN)
        return bool(self._workers)

    def __iter__(self) -> Iterator[LaneBatch]:
        return self

    def __next__(self) -> LaneBatch:
        unit, number = self._next or next(self._due)
        self._next = None
        while True:
            worker = self._workers[number]
            if worker.has_sent(_SHORT_WAIT_MILLISECONDS):
                data = worker.receive() or b""
            else:
                with record_function(_RANGE):
                    data = self._waited_for(worker, unit)
                worker = self._workers[number]
            if not data:
                self._replace(worker)
                continue
            try:
                value = self._unpacked(worker, data)
            except OSError:
                if not worker.ends_within(_LOOK_SECONDS):
                    raise
                self._replace(worker)  # it took a memory file along
                continue
            if value is None:
                continue
            if self._deaths[number]:
                self._deaths[number] = 0
                self._suspects[number].clear()
            return LaneBatch.of_plain(value)

    def _unpacked(self, worker: Worker, data: bytes) -> Any:
        """Return what is in a message; None: it is not wanted any more. Raises the error that it is."""
        current, failed, *message = pickle.loads(data)
        if current != worker.current:
            return None  # of a pass that was broken off
        worker.credit()  # at once: the worker makes its next microbatch while this one is unpacked
        value = unpack(BatchMessage(*message), worker.arena)
        if failed:
            raise raised_by_worker(value)
        worker.taken += 1
        return value

    def next_is_ready(self) -> bool:
        """Whether the next microbatch is made, or its worker lost."""
        self._next = self._next or next(self._due, None)
        return self._next is not None and self._workers[self._next[1]].has_sent(0)

    def ready(self) -> int:
        """Return the microbatches that workers have made and nobody has taken."""
        return sum(max(0, worker.board.num_sent - worker.taken) for worker in list(self._workers))

    def metrics(self) -> dict[str, float]:
        """Return what is to be counted of the workers, by name (`metrics.flat_metrics`)."""
        return {"ready": self.ready(), "worker_restarts": self.restarts, **self._engine.metrics()}

    # Watching over ----------------------------------------------------------------------------------------------------

    def _waited_for(self, worker: Worker, unit: int) -> bytes:
        """Return the next message of a worker, b"" if it is gone; if configured, end it when it takes too long.

        Raises:
            HookTimeoutError: It takes too long, and the run is to end then.
        """
        since = time.monotonic()
        reported = 0
        unbegun = False
        number = worker.number
        while True:
            if (data := self._received(number, since)) is not None:
                return data
            worker = self._workers[number]
            if worker.is_gone:
                last = worker.receive(socket.MSG_DONTWAIT)  # it may have sent something on its way out
                return last or b""
            if not worker.board.has_begun:
                unbegun = self._judge_beginning(worker, unbegun)
            elif self._watchdog is not None:
                reported = self._judge(worker, unit, self._watchdog, since, reported)

    def _received(self, number: int, since: float) -> bytes | None:
        """Return the next message of a worker that is waited for since some time; None if there is none for a while."""
        return self._workers[number].receive()

    def _judge_beginning(self, worker: Worker, reported: bool) -> bool:
        """Kill a worker that has not started in time; return whether it was logged."""
        took = time.monotonic() - worker.started
        number = worker.number
        factor = 1 if self._engine.forks else _IMPORT_FACTOR
        allowed = _BEGIN_SECONDS * factor * 2 ** self._deaths[number]
        if took > allowed:
            logger.warning("worker %d has not started after %.0f seconds; killing it", number, allowed)
            worker.kill()
        elif took > _BEGIN_SECONDS and not reported and self._engine.forks:
            logger.warning("worker %d has not started after %.0f seconds; it has %.0f in all", number, took, allowed)
        elif took > _BEGIN_SECONDS and not reported:
            why = "it imports packages, or its node prepares them"
            logger.info("worker %d still starts after %.0f seconds, as it may: %s", number, took, why)
        return took > _BEGIN_SECONDS

    def _judge(self, worker: Worker, unit: int, settings: WatchdogSettings, since: float, reported: int) -> int:
        """Log that a worker whose microbatch is due is late; kill it if it hangs. Return how often it was logged."""
        board = worker.board
        making_since = board.making_since
        took = time.monotonic() - (since if making_since is None else making_since)
        allowed = settings.allowed(board.num_made)
        # The worker's own watchdog goes first, if it can.
        patience = allowed + 2 * settings.interval
        if settings.fail and board.has_said:
            patience += min(GRACE_SECONDS, settings.timeout) + 2 * settings.interval
        if took < patience * 2**reported:
            return reported
        acts = settings.fail or settings.replace
        if acts or not board.has_said:
            message = self._description(worker, unit, took, allowed)
            if settings.fail:
                worker.kill()
                raise HookTimeoutError(message)
            logger.error("%s", message)
        if settings.replace:
            worker.kill()
        return reported + 1

    def _description(self, worker: Worker, unit: int, took: float, allowed: float) -> str:
        lines = [
            f"{self._where}, worker {worker.number}, unit {unit}: a microbatch has been in the making for {took:.1f} s "
            f"(watchdog_timeout_seconds allows {allowed:g})"
        ]
        if not worker.board.has_said:
            lines[0] += "; the worker cannot say so itself: it is stopped, or a call keeps its interpreter lock"
        lines += [f"  {what}" for what in self._running(worker)]
        return "\n".join([*lines, worker.state()])

    def _running(self, worker: Worker) -> list[str]:
        """Name the hooks that run in a worker, or ran when it ended, and their samples."""
        source = self._source()
        leaves = {} if source is None else {user_key_of(leaf): leaf for leaf in source.leaves()}
        named = []
        for hook, key, index in worker.board.running():
            activity = Activity()
            activity.hook = hook
            activity.index = index
            activity.dataset = leaves[key].dataset if key in leaves else None
            named.append(str(activity))
        return named

    # Replacing --------------------------------------------------------------------------------------------------------

    def _started(self, number: int) -> Worker:
        source = self._source()
        assert source is not None, "the loader is gone"
        work = source.work(number, self._barred, self._deaths[number] >= _DEATHS_OF_A_SAMPLE - 1)
        try:
            return self.worker_type(work, self._engine, self._look)
        except OSError as error:
            remedy = _REMEDIES.get(error.errno or 0, "Lower num_workers")
            raise LoaderError(f"worker {number} of {self._number} cannot start: {error}. {remedy}.") from error
        except (pickle.PicklingError, AttributeError, TypeError) as error:  # which of them, Python's version decides
            if self._engine.forks:
                raise
            data, (remedy, dumps) = work.position.plan.data, self._engine.refusal
            part = refused_part(data.settings, dumps) or refused_part(data, dumps)
            raise LoaderError(
                f"worker {number} of {self._number} cannot start by {self._engine.name}, because pickle refuses "
                f"{part or 'what it is to do'}: {error}. {remedy}"
            ) from error

    def _replace(self, worker: Worker) -> None:
        """Restart a worker that is gone, from the delivered position.

        Raises:
            HookTimeoutError: Its watchdog ended it, to end the run.
            WorkerDiedError: That has happened too often.
        """
        number = worker.number
        running = self._running(worker)
        samples = {(key, index) for _, key, index in worker.board.running() if key}
        code, how = worker.end(END_SECONDS)
        what = f"worker {number} ({how})"
        if code == EXIT_CODE:
            raise HookTimeoutError(
                f"{what} was ended by its watchdog (fail_on_timeout): a microbatch took too long, in a call that "
                "cannot be interrupted. The watchdog's log names the hook, the sample and the line of code"
            )
        during = f" during {', '.join(running)}" if running else ""
        advice = (
            "Out of memory? Lower num_workers, prefetch_factor or the batch size. To find a crash in a decoder or "
            "hook, run with num_workers=0"
        )
        if not worker.board.has_begun:
            during = " before it started"
            advice = self._engine.advice
        if self._left <= 0 or self._deaths[number] >= _RESTARTS_WITHOUT_A_BATCH:
            raise WorkerDiedError(
                f"{what} died{during} and is not restarted: {self._deaths[number]} restarts in a row produced no "
                f"batch, and {self._left} of max_worker_restarts are left. {advice}"
            )
        self._left -= 1
        self.restarts += 1
        self._deaths[number] += 1
        self._suspects[number].update(samples)
        logger.warning("%s died%s; restarting it from the last delivered batch, no sample is lost", what, during)
        guilty = {sample for sample in samples if self._suspects[number][sample] >= _DEATHS_OF_A_SAMPLE}
        if guilty - self._barred:
            if not self.bars:
                raise WorkerDiedError(
                    f"{what} died {_DEATHS_OF_A_SAMPLE} times in a row{during}. Other processes have this sample, too, "
                    "and must leave out the same ones: take it out of the data (exclude in split.yaml)"
                )
            self._barred |= guilty
            logger.error(
                "%s killed its worker %d times in a row and is not tried again", ", ".join(running), _DEATHS_OF_A_SAMPLE
            )
        self._workers[number] = self._successor(number)
        worker.close()
        self._engine.settle()

    def _successor(self, number: int) -> Worker:
        """Return the worker that takes the place of one that is gone."""
        return self._started(number)

    def stop(self) -> None:
        """Stop the workers. A busy worker gets some seconds to finish."""
        workers = self._workers
        self._workers = []
        for worker in workers:
            worker.ask_to_end()
        deadline = time.monotonic() + END_SECONDS
        for worker in workers:
            worker.end(max(0.0, deadline - time.monotonic()))
            worker.close()
        self._deaths = [0] * self._number
        for suspects in self._suspects:
            suspects.clear()

    def forget(self) -> None:
        """Forget the workers, in a fork of the process that started them, without ending them."""
        self._workers = []


_OPEN_FILES = "The process has as many files open as it may: raise the limit (`ulimit -n`), or lower num_workers"
_REMEDIES = {
    errno.EMFILE: _OPEN_FILES,
    errno.ENFILE: _OPEN_FILES.replace("process", "system").replace("`ulimit -n`", "`sysctl fs.file-max`"),
    errno.EAGAIN: "There are as many processes as there may be: raise the limit (`ulimit -u`), or lower num_workers",
    errno.ENOMEM: "There is not enough memory for another process: lower num_workers",
}


def new_arena(*, sendable: bool = False) -> Arena | None:
    """Return shared memory for a worker, or None if there is no address space to spare: batches cross as files."""
    try:
        return Arena(sendable=sendable)
    except OSError:
        return None


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop the remaining workers when the interpreter ends; multiprocessing would wait forever for a stopped one."""
    for pool in list(_pools):
        for worker in pool._workers:
            if worker._process._started_by == os.getpid():
                worker.kill()
        pool.forget()  # what workers hold here goes now: later, modules that give it back may be gone
