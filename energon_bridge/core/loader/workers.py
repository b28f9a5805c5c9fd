"""What runs in one process of a loader: the units of a rank, in order, each made by a stream.

A worker talks to the training process (`pool`) by a pair of connected sockets that keep messages apart. It is sent
`CREDIT`, for a microbatch that it may make, and `AGAIN`, to begin the next pass. It sends, pickled, the number of the
pass, whether what follows is an error, and the message of its outbox. It ends when the other end is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import itertools
import os
import pickle
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data

from energon_bridge.core.errors import LoaderError
from energon_bridge.core.loader.position import FinitePass, Position
from energon_bridge.core.loader.processes import Board, StackFile, StartMethod, start_process
from energon_bridge.core.loader.transport import Arena, BatchMessage, Outbox
from energon_bridge.core.order.rng import key_of
from energon_bridge.core.samples.sample_place import keep_warnings
from energon_bridge.core.stream.lane import Production
from energon_bridge.core.stream.lane_state import LaneBatch
from energon_bridge.core.stream.settings import WorkerFacts
from energon_bridge.core.stream.watchdog import WatchdogSettings

CREDIT = b"+"
AGAIN = b"p"
MESSAGE_BYTES = 1 << 16
"""More bytes than any message has, even one that names every block of an arena."""
DUMP_SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
"""Makes a worker write down the stacks of its threads; faulthandler does so at once, without the interpreter lock."""

_STACK_SECONDS = 1.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_PR_SET_PDEATHSIG = 1  # of sys/prctl.h


def outgoing(item: LaneBatch, outbox: Outbox) -> BatchMessage:
    """Return the message for an item: of plain values, which pickle fastest.

    Raises:
        LoaderError: The batch cannot be pickled.
    """
    try:
        message = outbox.pack(item.plain())
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # which of them, Python's version decides
        raise LoaderError(
            f"a batch ({type(item.batch).__name__}) cannot be sent from the worker to the training process: "
            f"pickle fails with {error}. Return tensors, arrays, or objects of classes defined at the top of a module "
            "from the task encoder (no lambdas, open files or generators), or set num_workers=0"
        ) from error
    item.batch = None
    return outbox.unshared(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one worker process, which inherits it by the fork or gets it pickled.

    Attributes:
        number: Which of the workers of its rank it is.
        position: A copy of the delivered position, whose plan says what is loaded.
        ahead: Microbatches that it may make ahead.
        held_back: Units at the beginning that the training process has already (`SavableDataLoader._masked`).
        began: Microbatch at which the pass was divided (`Position.units`).
        barred, careful: As in `WorkerFacts`.
    """

    number: int
    position: Position
    ahead: int
    held_back: int
    began: int
    watchdog: WatchdogSettings | None
    barred: frozenset[tuple[int, int]]
    careful: bool

    def items(self, arena: Arena | None, board: Board, *, again: bool) -> Production:
        """Make this worker's microbatches of the pass; with `again`, of the next pass."""
        position = self.position
        began = self.began
        held_back = self.held_back
        if again:
            assert isinstance(position, FinitePass)
            position.rewind()
            began = held_back = 0
        facts = WorkerFacts(
            number=self.number,
            words=board.activities(),
            said=board.said,
            barred=self.barred,
            careful=self.careful,
        )
        due = itertools.islice(position.units(began), held_back, None)
        idle = position.by_lane and self.number >= len(position.own_lanes)  # else it would look for ever
        units = iter(()) if idle else (unit for unit, worker in due if worker == self.number)
        stream = position.stream(self.watchdog, facts)
        if arena is not None:
            stream.pipeline.loading.write_into(arena)
        return Production(stream, units, self.ahead)


def run_worker(
    work: Work, link: socket.socket, arena: Arena | None, board: Board, stacks: StackFile, parent: int
) -> None:
    """Run a worker: make the requested units until the training process closes its end of the link."""
    set_up_worker(work, board, stacks, parent)
    outbox = Outbox(arena, kept=2 + 2 * work.ahead)
    number = 0
    try:
        while _one_pass(work, number, link, outbox, arena, board) == AGAIN:
            number += 1
            if arena is not None:
                arena.forget()
    except _LinkClosedError:
        return


class _LinkClosedError(BaseException):
    """The other end was closed while this one was sending; a class of its own, since hooks may break pipes too."""


def _one_pass(
    work: Work, number: int, link: socket.socket, outbox: Outbox, arena: Arena | None, board: Board
) -> bytes | None:
    """Send the requested units of a pass; return the command that ends it."""

    def send(failed: bool, message: BatchMessage) -> None:
        data = pickle.dumps((number, failed, *message), pickle.HIGHEST_PROTOCOL)
        try:
            link.send(data)
        except ConnectionError:
            raise _LinkClosedError from None
        board.sent()

    board.start_pass()
    may_make = work.ahead
    command = None
    try:
        with contextlib.closing(work.items(arena, board, again=number > 0)) as items:
            while True:
                while not may_make and command is None:
                    may_make, command = _heard(link)
                if command is not None:
                    return command
                board.start_item()
                item = next(items, None)
                board.end_item()
                if item is None:
                    break
                may_make -= 1
                send(False, outgoing(item, outbox))
                item = None  # its memory may be used again
    except Exception as error:
        send(True, outbox.pack(_described(error)))
    while command is None:
        _, command = _heard(link)
    return command


def _heard(link: socket.socket) -> tuple[int, bytes | None]:
    """Return the credits that the training process sent, or another command; b"" if it closed the link."""
    try:
        command = link.recv(1)
    except ConnectionResetError:  # the other end closed the link before it had read all that was sent
        command = b""
    return (1, None) if command == CREDIT else (0, command)


def _described(error: Exception) -> tuple[bytes | None, str, str]:
    """Return an exception, pickled if that is possible, its type with its text, and its traceback."""
    text = "".join(traceback.format_exception(error))
    name = f"{type(error).__name__}: {error}"
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # of a type that pickle cannot make again
        return None, name, text
    return pickled, name, text


class WorkerTraceback(Exception):  # noqa: N818 - shown as the cause of an error, never raised
    """The traceback that an error had in its worker."""

    def __str__(self) -> str:
        return f"\n\nin the worker:\n{self.args[0]}"


def raised_by_worker(described: tuple[bytes | None, str, str]) -> Exception:
    """Return the exception that a worker has sent, with its traceback there as the cause."""
    pickled, name, text = described
    error: Exception = LoaderError(f"a worker failed: {name}") if pickled is None else pickle.loads(pickled)
    error.__cause__ = WorkerTraceback(text)
    return error


_UNBEGUN = (
    "A fork can wait in vain for a lock that a thread of this process holds: make the loader before threads are "
    'started, or use start_method="forkserver"',
    "It imports the training script and unpickles the task encoder. What failed there stands above, on standard error; "
    'the script must start its work under `if __name__ == "__main__":`, and the encoder be a class of a module',
)
"""The advice about workers that never begin: for forks, and for those that import everything."""


class LocalProcesses:
    """Workers that are processes of this machine (`pool.Engine`)."""

    refusal: tuple[str, Callable[[Any], bytes]] = (
        "A task encoder must be of a class at the top of a module, and make locks, open files and the like where they "
        "are first used (__getstate__ leaves them out), lambdas functions at the top of a module; or use "
        'start_method="fork", which pickles nothing',
        pickle.dumps,
    )

    def __init__(self, method: StartMethod) -> None:
        self.name: str = method
        self._method: StartMethod = method
        self.forks = method == "fork"
        self.advice = _UNBEGUN[not self.forks]

    def start(self, work: Work, link: socket.socket, arena: Arena | None, board: Board, stacks: StackFile) -> Any:
        arguments = work, link, arena, board, stacks, os.getpid() if self.forks else 0
        return start_process(self._method, f"energon-worker-{work.number}", run_worker, arguments)

    def settle(self) -> None:
        """Wait for nothing: a process that does not begin is noticed when its microbatch is due."""

    def ending(self, process: Any) -> tuple[int | None, str]:
        """Return the exit code, and how that is said."""
        code = process.exitcode
        return code, f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"

    def state(self, process: Any, stacks: StackFile) -> str:
        """Return the stacks of the threads of a process, or that it is stopped."""
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT":
                return "  the process is stopped (SIGSTOP, a debugger): its stack is not available"
        before = len(stacks.read())
        deadline = time.monotonic() + _STACK_SECONDS
        with contextlib.suppress(OSError):
            os.kill(process.pid, DUMP_SIGNAL)
        while time.monotonic() < deadline:
            time.sleep(0.05)
            text = stacks.read()[before:]
            if text and text == stacks.read()[before:]:
                return "\n".join(f"    {line}" for line in text.splitlines())
        return "  its stack is not available: it does not take signals"

    def metrics(self) -> dict[str, float]:
        """Nothing beside what the pool counts."""
        return {}


def set_up_worker(work: Work, board: Board, stacks: StackFile, parent: int) -> None:
    """Set a worker process up, then note on its board that it has begun.

    Ctrl-C is for the training process, which then stops its workers; what that does at SIGTERM is its own affair, too.
    What the training process had made before is kept from the garbage collector, which would write to all of it and so
    end the sharing of its memory, and would destroy what owns threads that are not here (FFmpeg's decoders: forever).
    What the worker makes is collected, also where the training process collects by hand.

    Args:
        stacks: File in which it writes down where its threads are, at `DUMP_SIGNAL`.
        parent: The training process, or 0 if another one starts the workers for it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked in the fork
    if sys.platform == "linux":
        # It must not outlive whoever started it: the kernel sees to that, whatever the worker is doing.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent and os.getppid() != parent:  # gone before
            os._exit(1)
    gc.freeze()
    gc.enable()
    keep_freed_memory()
    keep_warnings()
    faulthandler.register(DUMP_SIGNAL, file=stacks.number, all_threads=True, chain=False)
    torch.set_num_threads(1)
    # Code that nobody seeds, such as threads of a hook, must not draw the same numbers in every worker.
    plan = work.position.plan
    seed = key_of("worker", plan.config.run_seed, plan.config.dp_rank, work.number)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed >> 1)
    # As torch's own workers do: where `get_worker_info` is defined stands what it returns in this process.
    theirs: Any = sys.modules[torch.utils.data.get_worker_info.__module__]
    theirs._worker_info = theirs.WorkerInfo(
        id=work.number, num_workers=plan.config.num_workers, seed=seed >> 1, dataset=plan.data
    )
    board.begin()


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
