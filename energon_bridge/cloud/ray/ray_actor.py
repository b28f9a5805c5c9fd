"""What runs on the nodes of a Ray cluster: an actor with worker processes, which are as any loader has.

A worker makes microbatches as it would beside the trainer (`workers.run_worker`), in a fork of the actor. The actor
outlives it, and so knows how it ended and in which hook. Ray places the actor, starts it, sends it its work and tells
of its end. The microbatches go over a connection of their own to the relay of the trainer (`ray_relay`), from the
memory that the worker wrote them into: through Ray's object store, one of 6 MB took four times the CPU of making it.

The relay connects, and sends a token and the line. On the trainer's own machine the descriptors of link, board, stacks
and arena come along, by a Unix socket: the worker talks to the trainer as its worker processes do. Otherwise commands
for the worker follow, a byte each, and the relay gets frames: `<QQ`, the bytes of what follows, and of that the pickle
in front: the number of the pass, whether the message is an error, and the message with the length of each place instead
of the place. Then come the bytes of the places, one after the other.
"""

from __future__ import annotations

import contextlib
import hmac
import mmap
import os
import pickle
import platform
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from energon_bridge.core import __version__
from energon_bridge.core.loader.pool import Worker
from energon_bridge.core.loader.processes import BEGUN, ENDED, SENT, SINCE, Board, SharedMemory, StackFile
from energon_bridge.core.loader.transport import HEADER, Arena, BatchMessage, MemoryFile, Outbox, Place, opened
from energon_bridge.core.loader.workers import LocalProcesses, Work

_LOOK_SECONDS = 0.05
_WAIT_SECONDS = 1.0
_END_SECONDS = 2.0
_CONNECT_SECONDS = 60.0
FRAME = struct.Struct("<QQ")
LINE = struct.Struct("<Q")

Said = tuple[bytes, int]
"""The words of a board, and when they were read."""
Ending = tuple[int | None, str, Said]
"""Exit code of a worker, its end in words, and the last words of its board."""


class TrainersWorker(Worker):
    """A worker whose link and memory are a trainer's on this machine."""

    def __init__(self, work: Work, link: int, board: int, stacks: int, arena: int = -1) -> None:
        self.number = work.number
        self._engine = LocalProcesses("fork")
        self.board = board_at(board)
        self._stacks = StackFile(stacks)
        self.arena = None if arena < 0 else arena_at(arena)
        with socket.socket(fileno=link) as theirs:
            self._process = self._engine.start(work, theirs, self.arena, self.board, self._stacks)
        self.sentinel: int = self._process.sentinel

    def ask_to_end(self) -> None:
        """Do nothing: the trainer closes the link."""


class WorkerActor:
    """One actor: it has workers, each of the line that it was started for.

    Args:
        label: What the dashboard calls it.
        environment: Variables of the trainer that hold here too.
        folder: Where the trainer runs: relative paths mean the same here, if there is such a folder.
        path: Where the trainer finds modules: so does the actor, of those folders that there are here too.
    """

    def __init__(self, label: str, environment: dict[str, str], folder: str, path: list[str]) -> None:
        self._label = label
        self._token = os.urandom(16)
        self._asked: dict[int, tuple[Work, list[socket.socket]]] = {}  # what was asked for, and where it is connected
        self._workers: dict[int, Worker] = {}
        os.environ.update(environment)
        if os.path.isdir(folder):
            os.chdir(folder)
        sys.path += [one for one in path if one not in sys.path and os.path.exists(one)]

    def __repr__(self) -> str:
        return f"WorkerActor({self._label})"

    def node_facts(self) -> tuple[str, str, tuple[str, bytes, str], dict[str, str]]:
        """Return facts of the node, for the relay.

        They are the name of the host, Ray's id of the node, (address, token, `machine()`), and `versions()`.
        """
        import ray

        address = ray.util.get_node_ip_address(), self._token, machine()
        return socket.gethostname(), ray.get_runtime_context().get_node_id(), address, versions()

    def start(self, line: int, work: bytes) -> str | int:
        """Prepare a worker; return the port of `serve`, or why there cannot be one, as what is missing here."""
        try:
            unpickled = pickle.loads(work)
        except (ImportError, AttributeError) as error:
            return f"{type(error).__name__}: {error}"
        server = socket.create_server(("", 0), family=socket.AF_INET)
        here = socket.socket(socket.AF_UNIX)
        here.bind(name_here(self._token, line))
        here.listen()
        self._asked[line] = unpickled, [server, here]
        port: int = server.getsockname()[1]
        return port

    def serve(self, line: int) -> Ending | None:
        """Run the worker of a line for the relay that connects, or the trainer; return how it ended.

        None: the relay is gone, or wants nothing of this line any more.
        """
        work, servers = self._asked.get(line) or (None, [])
        link, files = self._accepted(line, servers)
        for server in servers:
            server.close()
        if work is None or link is None or self._asked.pop(line, None) is None:
            return None
        with link:
            worker = TrainersWorker(work, *files) if files else Worker(work, LocalProcesses("fork"), _LOOK_SECONDS)
            self._workers[line] = worker
            ended = _served(link, worker, lambda: line in self._workers)
        ended &= self._workers.pop(line, None) is not None
        if not ended:
            worker.kill()
        said = said_by(worker.board)
        code, how = worker.end(_END_SECONDS)
        worker.close()
        return (code, f"{how} on {socket.gethostname()}", said) if ended else None

    def _accepted(self, line: int, servers: list[socket.socket]) -> tuple[socket.socket | None, list[int]]:
        """Return a connection with the token, and what it brings; None if none comes, or the line is not wanted."""
        expected = self._token + LINE.pack(line)
        deadline = time.monotonic() + _CONNECT_SECONDS
        while line in self._asked and time.monotonic() < deadline:
            for server in cast(list[socket.socket], connection.wait(servers, _LOOK_SECONDS)):
                link, _ = server.accept()
                link.settimeout(_END_SECONDS)
                data = b""
                files = list[int]()
                with contextlib.suppress(OSError):
                    data, files, *_ = socket.recv_fds(link, len(expected), 4, socket.MSG_WAITALL)
                if hmac.compare_digest(data, expected):
                    link.settimeout(None)
                    return link, files
                for file in files:
                    os.close(file)
                link.close()
        return None, []

    # At any time -----------------------------------------------------------------------------------------------------

    def status(self, line: int) -> Said | None:
        """Return the words of the worker's board."""
        worker = self._workers.get(line)
        return None if worker is None else said_by(worker.board)

    def state(self, line: int) -> str:
        """Return the stacks of the worker."""
        worker = self._workers.get(line)
        return "  it has ended" if worker is None else worker.state()

    def stop(self, line: int) -> None:
        """End a worker, if there is one; nobody waits for what it makes."""
        self._asked.pop(line, None)
        worker = self._workers.pop(line, None)
        if worker is not None:
            with contextlib.suppress(ValueError):  # it has just ended
                worker.kill()


def _served(link: socket.socket, worker: Worker, wanted: Callable[[], bool]) -> bool:
    """Serve a worker until it or the relay ends; return whether it was the worker.

    The relay is handed what it makes, and it what the relay says, but for one that talks to the trainer.
    """
    apart = isinstance(worker, TrainersWorker)
    if not apart:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    both: list[Any] = [link, worker.sentinel if isinstance(worker, TrainersWorker) else worker]
    while wanted():
        try:
            ready: list[Any] = connection.wait(both, _WAIT_SECONDS if apart else _LOOK_SECONDS)
            if link in ready:
                commands = link.recv(4096)
                for command in commands:
                    worker.send(bytes([command]))
                if not commands:
                    break
            data = worker.receive(socket.MSG_DONTWAIT) if worker in ready else None
            if data == b"" or (data is None and worker not in ready and worker.is_gone):
                return True
            if data:
                _send(link, data, worker)
        except (OSError, ValueError):  # the relay, the worker, or its descriptor is gone
            return wanted() and worker.ends_within(_END_SECONDS)
    return False


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


def name_here(token: bytes, line: int) -> str:
    """Return the name of a Unix socket, in no folder, by which an actor is reached on its own machine."""
    return f"\0energon-{token.hex()}-{line}"


def machine() -> str:
    """Return a name that is equal only for processes of one user that can share memory and see one another."""
    names = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "mnt", "user")]
    return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *names, str(os.getuid())])


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all machines, so that their streams are equal."""
    python = ".".join(platform.python_version_tuple()[:2])
    numpy = sys.modules["numpy"].__version__
    torch_ = torch.__version__.partition("+")[0]
    return {"energon_bridge": __version__, "Python": python, "torch": torch_, "numpy": numpy}


def dumped(value: Any) -> bytes:
    """Pickle the work of a worker, also classes of the training script and functions in functions."""
    from ray import cloudpickle

    data: bytes = cloudpickle.dumps(value)
    return data


# ---------------------------------------------------------------------------------------------------------------------
# The memory of a worker, mapped by relays and actors from its descriptors.


def board_at(file: int) -> Board:
    """Map the board of a descriptor."""
    return Board(memory=SharedMemory(os.fstat(file).st_size, file=file))


def said_by(board: Board) -> Said:
    """Return the words of a board, and the time by the clock of its machine."""
    return board.memory[:], time.monotonic_ns()


def show(board: Board, said: Said) -> None:
    """Copy the words of another board, but those on sending, beginning and end, which are known better here."""
    content, now = said
    words = board.words
    later = time.monotonic_ns() - now
    own = [words[at] for at in (BEGUN, SENT, ENDED)]
    board.memory[:] = content
    words[BEGUN], words[SENT], words[ENDED] = own
    if words[SINCE]:
        words[SINCE] = max(1, words[SINCE] + later)


def note_end(board: Board, code: int | None) -> None:
    """Note on a board that the worker has ended."""
    board.words[ENDED] = 1 if code is None else 1000 + code


def ending_of(board: Board) -> tuple[bool, int | None]:
    """Return whether the worker has ended, as far as its board says, and its exit code if that is known."""
    word = board.words[ENDED]
    return bool(word), None if word <= 1 else word - 1000


def arena_at(file: int) -> Arena:
    """Map the arena of a descriptor."""
    size = os.fstat(file).st_size
    return Arena(size - HEADER, memory=SharedMemory(size, file=file))


class RelayOutbox(Outbox):
    """The outbox of a worker on another machine, whose messages arrive ahead of their bytes."""

    def reserve(self, lengths: Sequence[int]) -> list[tuple[Place, memoryview]]:
        """Return places for the bytes of a message, and where to write them."""
        self._files.append([])
        places = [self._reserved(length) for length in lengths]
        if len(self._files) > self._kept:
            self._close_oldest()
        return places

    def _reserved(self, length: int) -> tuple[Place, memoryview]:
        if self._arena is not None and (reserved := self._arena.reserve(length)) is not None:
            return reserved
        file = self._new_file(length)
        return MemoryFile(os.getpid(), file, length), memoryview(mmap.mmap(file, length))


def lifted(message: BatchMessage, arena: Arena | None) -> BatchMessage:
    """Return a message with the bytes of each place (arrays, which free it when they go) instead of the place."""
    if isinstance(message.place, bytes):
        return message
    places = (message.place, *(place for _, place in message.elsewhere))
    first, *others = (np.frombuffer(opened(place, arena), np.uint8) for place in places)
    return BatchMessage(first, tuple(zip((number for number, _ in message.elsewhere), others, strict=True)))  # type: ignore[arg-type]
