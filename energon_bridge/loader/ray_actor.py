"""What runs on the nodes of a Ray cluster: an actor with a worker process, which is one as any loader has.

The worker makes microbatches as it would beside the trainer (`workers.run_worker`), in a fork of the actor. The actor
outlives it, and so knows how it ended and in which hook. Ray places the actor, starts it, sends it its work and tells
of its end. The microbatches go over a connection of their own to the relay of the trainer (`ray_relay`), from the
memory that the worker wrote them into: through Ray's object store, one of 6 MB took four times the CPU of making it.

The relay sends a token and the line, then the commands for the worker, a byte each. It gets frames: `<QQ`, the bytes of
what follows, and of that the pickle in front: the number of the pass, whether the message is an error, and the message
with the length of each place instead of the place. Then come the bytes of the places, one after the other.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import pickle
import platform
import select
import socket
import struct
import sys
import time
from typing import Any

import torch

from energon_bridge import __version__
from energon_bridge.loader.pool import Worker
from energon_bridge.loader.transport import BatchMessage, lifted
from energon_bridge.loader.workers import LocalProcesses

_LOOK_SECONDS = 0.05
_END_SECONDS = 2.0
_CONNECT_SECONDS = 60.0
FRAME, LINE = struct.Struct("<QQ"), struct.Struct("<Q")

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
        self._line, self._token = 0, b""
        self._server = socket.create_server(("", 0), family=socket.AF_INET)
        os.environ.update(environment)
        if os.path.isdir(folder):
            os.chdir(folder)
        sys.path += [one for one in path if one not in sys.path and os.path.exists(one)]

    def __repr__(self) -> str:
        return f"WorkerActor({self._label})"

    def place(self) -> tuple[str, str, tuple[str, int, bytes], dict[str, str]]:
        """Return the name of the machine, Ray's of the node, where it is connected to, and `versions`."""
        import ray

        self._token = os.urandom(16)
        address = ray.util.get_node_ip_address(), self._server.getsockname()[1], self._token
        return socket.gethostname(), ray.get_runtime_context().get_node_id(), address, versions()

    def start(self, line: int, work: bytes) -> str | None:
        """Start the worker; return why that cannot be, as what is missing here, or None."""
        self.stop(self._line)
        try:
            unpickled = pickle.loads(work)
        except (ImportError, AttributeError) as error:
            return f"{type(error).__name__}: {error}"
        self._line = line
        self._worker = Worker(unpickled, LocalProcesses("fork"), _LOOK_SECONDS)
        return None

    def serve(self, line: int) -> Ending | None:
        """Hand the relay what the worker makes, and the worker what the relay says; return how the worker ended.

        None: the relay is gone, or wants nothing of this line any more.
        """
        worker = self._worker
        if worker is None or line != self._line:
            return None
        link = self._accepted(line, worker)
        if link is None:
            self.stop(line)
            return None
        link.settimeout(None)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with link:
            while worker is self._worker:
                try:
                    both: list[Any] = [link, worker]
                    ready = select.select(both, [], [], _LOOK_SECONDS)[0]
                    if link in ready:
                        commands = link.recv(4096)
                        for command in commands:
                            worker.send(bytes([command]))
                        if not commands:
                            break
                    data = worker.receive(socket.MSG_DONTWAIT) if worker in ready else None
                    if data == b"" or (data is None and worker not in ready and worker.is_gone):
                        return self._ended(worker) if worker is self._worker else None
                    if data:
                        _send(link, data, worker)
                except (OSError, ValueError):  # the relay, the worker, or its descriptor is gone
                    if worker is self._worker and worker.ends_within(_END_SECONDS):
                        return self._ended(worker)
                    break
        self.stop(line)
        return None

    def _accepted(self, line: int, worker: Worker) -> socket.socket | None:
        """Return the connection of a relay for a line; None if none comes, or the line is not wanted any more."""
        expected, deadline = self._token + LINE.pack(line), time.monotonic() + _CONNECT_SECONDS
        self._server.settimeout(_LOOK_SECONDS)
        while worker is self._worker and time.monotonic() < deadline:
            try:
                link, _ = self._server.accept()
            except TimeoutError:
                continue
            link.settimeout(_END_SECONDS)
            with contextlib.suppress(OSError):
                if hmac.compare_digest(link.recv(len(expected), socket.MSG_WAITALL), expected):
                    return link
            link.close()  # of another line, which has ended
        return None

    def _ended(self, worker: Worker) -> Ending:
        self._worker = None
        said = worker.board.copied()
        code, how = worker.end(_END_SECONDS)
        worker.close()
        return code, f"{how} on {socket.gethostname()}", said

    # At any time -----------------------------------------------------------------------------------------------------

    def status(self, line: int) -> tuple[bytes, int] | None:
        """Return what the worker's board says."""
        worker = self._worker
        return worker.board.copied() if worker is not None and line == self._line else None

    def state(self, line: int) -> str:
        """Return the stacks of the worker."""
        worker = self._worker
        return worker.state() if worker is not None and line == self._line else "  it has ended"

    def kill(self, line: int) -> None:
        """End the worker; `serve` says so."""
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


def _send(link: socket.socket, data: bytes, worker: Worker) -> None:
    """Send a message of a worker with the bytes that it has in shared memory, which is free after that."""
    current, failed, *parts = pickle.loads(data)
    message = lifted(BatchMessage(*parts), worker.arena)
    buffers: list[Any] = []
    if not isinstance(message.place, bytes):
        buffers = [message.place, *(place for _, place in message.elsewhere)]
        lengths = [len(buffer) for buffer in buffers]
        numbers = [number for number, _ in message.elsewhere]
        message = BatchMessage(lengths[0], tuple(zip(numbers, lengths[1:], strict=True)))  # type: ignore[arg-type]
    head = pickle.dumps((current, failed, *message), pickle.HIGHEST_PROTOCOL)
    front = FRAME.pack(sum(map(len, buffers)) + len(head), len(head)) + head
    waiting = [memoryview(one) for one in (front, *buffers)]
    while waiting:
        sent = link.sendmsg(waiting)
        while waiting and sent >= len(waiting[0]):
            sent -= len(waiting.pop(0))
        if waiting:
            waiting[0] = waiting[0][sent:]


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
