"""What runs on the nodes of a Ray cluster: an actor with a worker process, which is one as any loader has.

The worker makes microbatches as it would beside the trainer (`workers.run_worker`), in a fork of the actor. The actor
outlives it, and so knows how it ended and in which hook. It is asked by the relay of a trainer (`ray_relay`): `take` in
one thread, in order, and what must be answered at any time in others. Batches leave it as bytes, in one copy.
"""

from __future__ import annotations

import os
import pickle
import platform
import socket
import sys
import time
from typing import Any

import torch

from energon_bridge import __version__
from energon_bridge.loader.pool import Worker
from energon_bridge.loader.transport import BatchMessage, lifted
from energon_bridge.loader.workers import AGAIN, CREDIT, LocalProcesses

_LOOK_SECONDS = 0.05
_END_SECONDS = 2.0

Ending = tuple[int | None, str, tuple[bytes, int]]
"""Exit code of a worker, what is said of its end, and what its board said."""


class WorkerActor:
    """One actor: it has a worker at a time, of the line that it was started for.

    Args:
        label: What the dashboard calls it.
        environment: Variables of the trainer that hold here too.
        folder: Where the trainer runs: relative paths mean the same here, if there is such a folder.
        path: Where the trainer finds modules: so does the actor, of those folders that there are here too.
    """

    def __init__(self, label: str, environment: dict[str, str], folder: str, path: list[str]) -> None:
        self._label = label
        self._worker: Worker | None = None
        self._line = self._current = self._granted = self._taken = self._ahead = 0
        os.environ.update(environment)
        if os.path.isdir(folder):
            os.chdir(folder)
        sys.path += [one for one in path if one not in sys.path and os.path.exists(one)]

    def __repr__(self) -> str:
        return f"WorkerActor({self._label})"

    def place(self) -> tuple[str, str, dict[str, str]]:
        """Return the name of the machine, Ray's of the node, and what has to be the same here and at the trainer."""
        import ray

        return socket.gethostname(), ray.get_runtime_context().get_node_id(), versions()

    def start(self, line: int, work: bytes) -> str | None:
        """Start the worker; return why that cannot be, as what is missing here, or None."""
        self.stop(self._line)
        try:
            unpickled = pickle.loads(work)
        except (ImportError, AttributeError) as error:
            return f"{type(error).__name__}: {error}"
        self._line, self._current, self._taken = line, 0, 0
        self._granted = self._ahead = unpickled.ahead
        self._worker = Worker(unpickled, LocalProcesses("fork"), _LOOK_SECONDS)
        return None

    def take(self, line: int, current: int, granted: int) -> list[tuple[bool, BatchMessage]] | Ending:
        """Return the microbatches of a pass that are ready: failed or not, and the bytes; or how the worker ended.

        It waits for one, if it may have been made and no earlier call has returned it.

        Args:
            line: Of which line.
            current: The pass.
            granted: Microbatches of the pass that may have been made until now.
        """
        while line == self._line and current >= self._current and (worker := self._worker) is not None:
            if current > self._current:  # `again` comes in another thread
                time.sleep(0.001)
                continue
            try:
                if (answers := self._next(worker, current, granted)) is not None:
                    return answers
            except OSError:
                if worker is not self._worker:
                    break  # stopped in another thread
                if not worker.ends_within(_END_SECONDS):
                    raise
                return self._ended(worker)  # it took a memory file along
        return []

    def _next(self, worker: Worker, current: int, granted: int) -> list[tuple[bool, BatchMessage]] | Ending | None:
        """Return what the worker has sent, or its end; None: nothing for a while."""
        for _ in range(self._granted, granted):
            worker.send(CREDIT)
        self._granted = max(granted, self._granted)
        if self._taken >= granted:
            return []  # an earlier call had them
        data = worker.receive()
        if data is None and worker.is_gone:
            data = worker.receive(socket.MSG_DONTWAIT) or b""
        answers = []
        while data:
            number, failed, *message = pickle.loads(data)
            if number == current:
                answers.append((failed, lifted(BatchMessage(*message), worker.arena)))
            data = worker.receive(socket.MSG_DONTWAIT)
        if answers:
            self._taken += len(answers)
            return answers
        return self._ended(worker) if data == b"" and worker is self._worker else None

    def _ended(self, worker: Worker) -> Ending:
        self._worker = None
        said = worker.board.copied()
        code, how = worker.end(_END_SECONDS)
        worker.close()
        return code, f"{how} on {socket.gethostname()}", said

    # At any time -----------------------------------------------------------------------------------------------------

    def again(self, line: int, current: int) -> None:
        """Let the worker begin the next pass."""
        if line == self._line and (worker := self._worker) is not None:
            worker.send(AGAIN)
            self._granted, self._taken = self._ahead, 0
            self._current = current

    def status(self, line: int) -> tuple[bytes, int] | None:
        """Return what the worker's board says."""
        worker = self._worker
        return worker.board.copied() if worker is not None and line == self._line else None

    def state(self, line: int) -> str:
        """Return the stacks of the worker."""
        worker = self._worker
        return worker.state() if worker is not None and line == self._line else "  it has ended"

    def kill(self, line: int) -> None:
        """End the worker; `take` says so."""
        if line == self._line and (worker := self._worker) is not None:
            worker.kill()

    def stop(self, line: int) -> None:
        """End the worker, if it is of this line; nobody waits for what it makes."""
        worker = self._worker
        if line == self._line and worker is not None:
            self._worker, self._line = None, 0
            worker.kill()
            worker.end(_END_SECONDS)
            worker.close()


def versions() -> dict[str, str]:
    """Return what has to be the same on all machines, for their streams to be."""
    python = ".".join(platform.python_version_tuple()[:2])
    numpy = sys.modules["numpy"].__version__
    torch_ = torch.__version__.partition("+")[0]
    return {"energon_bridge": __version__, "Python": python, "torch": torch_, "numpy": numpy}


def dumped(value: Any) -> bytes:
    """Pickle what a worker is to do, also classes of the training script and functions in functions."""
    from ray import cloudpickle

    data: bytes = cloudpickle.dumps(value)
    return data
