"""Where units are made: in the calling process, or in worker processes that are started again when they die.

Both sources give the same items. A source holds nothing that is needed to go on: the loader starts a new one from what
was delivered.
"""

from __future__ import annotations

import functools
import logging
import mmap
import multiprocessing.connection
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.data
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from energon_bridge.errors import HookTimeoutError, WorkerDiedError
from energon_bridge.loader.transport import Arena, Message, unpack
from energon_bridge.loader.workers import set_up_worker
from energon_bridge.stream.state import Produced
from energon_bridge.stream.watchdog import EXIT_CODE

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_BEGIN_SECONDS = 30.0
_RESTARTS_WITHOUT_A_BATCH = 3


class WorkerIterator(_MultiProcessingDataLoaderIter):
    """DataLoader's iterator over worker processes, which notices a dead worker soon and only when asked.

    DataLoader raises from its SIGCHLD handler, that is in the middle of whatever the training process does; here a dead
    worker is seen when its next item is fetched, so that it can be replaced.

    A worker that has not begun after half a minute is killed, and replaced like any that died: a fork can catch a lock
    of the interpreter that another thread holds at that moment, for which the child then waits in vain.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: torch.utils.data.DataLoader[Any]) -> None:
        # A byte for each worker, which the worker sets when it begins.
        self._begun: mmap.mmap | None = mmap.mmap(-1, loader.num_workers)
        # The kernel ends the workers with the thread that forks them, which must live as long as this process.
        lasting = threading.current_thread() is threading.main_thread()
        loader.worker_init_fn = functools.partial(set_up_worker, begun=self._begun, die_with_parent=lasting)
        self._deadline = time.monotonic() + _BEGIN_SECONDS
        # An interrupt while they start must not reach them before they ignore it; this process gets it afterwards.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            super().__init__(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if self._worker_pids_set:
            torch._C._remove_worker_pids(id(self))
            self._worker_pids_set = False

    def __next__(self) -> Any:
        """Return the next item; DataLoader's own opens a range for the profiler first, which costs 50 us a batch."""
        return super().__next__() if torch.autograd._profiler_enabled() else self._next_data()  # type: ignore[attr-defined]

    def _try_get_data(self, timeout: float = _POLL_SECONDS) -> Any:
        found = super()._try_get_data(timeout)
        if not found[0] and self._begun is not None and time.monotonic() > self._deadline:
            for number, worker in enumerate(self._workers):
                if not self._begun[number]:
                    logger.warning("worker %d has not begun after %.0f seconds and is killed", number, _BEGIN_SECONDS)
                    worker.kill()
            self._begun = None
        return found

    def dead(self, seconds: float = 0.0) -> list[tuple[int, int | None]]:
        """Return worker number and exit code of every worker that has died, waiting some seconds for the first."""
        ended = multiprocessing.connection.wait([worker.sentinel for worker in self._workers], seconds)
        for worker in self._workers:
            if worker.sentinel in ended:
                worker.join()  # its files are closed a little before it can be reaped
        gone = [(i, w) for i, w in enumerate(self._workers) if not w.is_alive()]
        return [(number, worker.exitcode) for number, worker in gone if worker.exitcode != 0]

    @property
    def ready(self) -> int:
        """Items that have been made and not been taken: those that came out of turn, and those in the queue."""
        out_of_turn = sum(len(entry) > 1 for entry in self._task_info.values())
        return out_of_turn + int(self._worker_result_queue.qsize())

    def stop(self) -> None:
        """Stop all workers and wait for them."""
        self._shutdown_workers()
        for worker in self._workers:
            if worker.is_alive():  # it does not listen
                worker.kill()
                worker.join()


class WorkerSource:
    """Items from worker processes.

    Args:
        start: Starts the workers from what was delivered and returns their iterator.
        arenas: The shared memory of each worker.
        max_restarts: How often workers are started again in all.

    Attributes:
        restarts: How often workers were started again.
    """

    def __init__(self, start: Callable[[], WorkerIterator], arenas: list[Arena | None], max_restarts: int) -> None:
        self._start = start
        self._arenas = arenas
        self._left = max_restarts
        self.restarts = 0
        self._in_a_row = 0
        self._iterator: WorkerIterator | None = None

    def __iter__(self) -> Iterator[Produced]:
        return self

    def __next__(self) -> Produced:
        while True:
            if self._iterator is None:
                self._iterator = self._start()
            try:
                item = next(self._iterator)
                if item is None:
                    continue
                worker, *message = item
                produced = Produced.of_plain(unpack(Message(*message), self._arenas[worker]))
            except StopIteration:
                raise
            except (RuntimeError, OSError, EOFError) as error:  # how torch reports a worker that is gone
                # A worker's connection breaks a little before the worker counts as dead.
                dead = self._iterator.dead(0.0 if isinstance(error, RuntimeError) else _POLL_SECONDS)
                self.stop()
                if not dead:
                    raise
                self._replace(dead, error)
                continue
            except BaseException:
                self.stop()
                raise
            self._in_a_row = 0
            return produced

    def _replace(self, dead: list[tuple[int, int | None]], error: Exception) -> None:
        what = ", ".join(f"worker {number} ({_how(code)})" for number, code in dead)
        if any(code == EXIT_CODE for _, code in dead):
            raise HookTimeoutError(
                f"{what} was ended by its watchdog (fail_on_timeout): a microbatch took too long, in a call that "
                "nothing interrupts. What the watchdog logged names the hook, the sample and the place in the code"
            ) from error
        if self._left <= 0 or self._in_a_row >= _RESTARTS_WITHOUT_A_BATCH:
            raise WorkerDiedError(
                f"{what} died and is not started again: {self._in_a_row} restarts in a row gave no batch, {self._left} "
                "of max_worker_restarts are left. Out of memory? Lower num_workers, prefetch_factor or the batch size. "
                "A crash in a decoder or hook shows itself with num_workers=0"
            ) from error
        self._left -= 1
        self.restarts += 1
        self._in_a_row += 1
        logger.warning("%s died; all workers start again from the last delivered batch, no sample is lost", what)

    @property
    def ready(self) -> int:
        """Microbatches that workers have made and nobody has taken."""
        return 0 if self._iterator is None else self._iterator.ready

    def another_pass(self, loader: torch.utils.data.DataLoader[Any]) -> bool:
        """Let running workers start a finite stream again; say whether there are any that could."""
        if self._iterator is None or not loader.persistent_workers or self._iterator.dead():
            return False
        try:
            self._iterator._reset(loader)
        except (RuntimeError, OSError, EOFError):  # one died just now; new workers do as well
            return False
        return True

    def stop(self) -> None:
        """Stop the workers; the next item starts new ones."""
        if self._iterator is not None:
            self._iterator.stop()
            self._iterator = None


def _how(code: int | None) -> str:
    return f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
