"""The process beside a trainer that relays between it and its actors on a Ray cluster.

The trainer knows of no Ray: it has links, boards and arenas as it has of worker processes, at the other end of which is
this process instead. What befalls the cluster (its head ends, and with it every process that is connected) ends this
process and not the training.

A *line* is what the trainer sees as one worker. Its *seat* is an actor, whose microbatches come over a connection, in
frames (`ray_actor`), and are read from it into the arena of the line. What Ray says comes as events from its threads.

The trainer sends pickled requests with descriptors over a control socket, a packet each; answers go back there. This
process ends when that socket is closed, and when it has had no line for a while.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import queue
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from energon_bridge.loader.processes import Board, StackFile
from energon_bridge.loader.ray_actor import FRAME, LINE, Ending, WorkerActor
from energon_bridge.loader.transport import Arena, BatchMessage, Outbox
from energon_bridge.loader.workers import AGAIN
from energon_bridge.rng import key_of

PACKET_BYTES = 1 << 16
_LOOK_SECONDS = 0.25
_AT_ONCE_BYTES = 1 << 18
_CONNECT_SECONDS = 10.0
_AVOIDED_SECONDS = 60.0
_NODE_LABEL = "ray.io/node-id"


@dataclass(kw_only=True, slots=True, eq=False)
class Seat:
    """An actor."""

    actor: Any
    name: str
    since: float
    node: str = ""
    node_id: str = ""
    address: tuple[str, int, bytes] = ("", 0, b"")
    versions: dict[str, str] | None = None
    line: Line | None = None


@dataclass(kw_only=True, slots=True, eq=False)
class Line:
    """What the trainer sees as one worker.

    Attributes:
        tcp: The connection to its actor.
        front: What has come of a frame, until its pickle is there.
        message: The message of a frame whose bytes are coming, with the places for these that are not full.
        owed: Microbatches that it may have and has not.
        since: When the last one came.
        watched: When the actor was asked for its board, which it has not answered yet.
    """

    number: int
    name: str
    link: socket.socket
    outbox: Outbox
    arena: Arena | None
    board: Board
    stacks: StackFile
    work: bytes
    ahead: int
    interval: float
    deadline: float
    owed: int
    tcp: socket.socket | None = None
    front: bytearray = field(default_factory=bytearray)
    message: tuple[Any, ...] | None = None
    waiting: list[memoryview] = field(default_factory=list)
    current: int = 0
    since: float = 0.0
    watched: float = 0.0
    seat: Seat | None = None


class Relay:
    """The loop of this process."""

    def __init__(self, control: socket.socket, options: dict[str, Any]) -> None:
        import ray

        self._ray: Any = ray
        self._control = control
        self._options = options
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, self._hear_trainer)
        self._selector.register(self._woken, selectors.EVENT_READ, self._hear_actors)
        self._lines: dict[int, Line] = {}
        self._seats: list[Seat] = []
        self._numbers = itertools.count()
        self._bad: dict[str, float] = {}  # nodes that lost an actor, each avoided until then
        self._busy = time.monotonic()
        self._ended = False
        ray.init(address=options["address"], log_to_driver=False, logging_level=logging.ERROR)

    def run(self) -> None:
        """Relay until the trainer is gone, or has had no line for a while."""
        parent = os.getppid()
        while not self._ended and os.getppid() == parent:
            for key, _ in self._selector.select(_LOOK_SECONDS):
                key.data()
            self._look()
        for seat in self._seats:
            self._ray.kill(seat.actor)
        self._ray.shutdown()

    def _when(self, call: Any, done: Callable[[Any], None], failed: Callable[[Exception], None]) -> None:
        """Have the loop do something with the result of a call, or its error."""

        def came(future: Any) -> None:
            error = future.exception()
            if error is not None:
                self._events.put(lambda: failed(error))
            else:
                value = future.result()
                self._events.put(lambda: done(value))
            with contextlib.suppress(BlockingIOError):
                self._wake.send(b"!")

        call.future().add_done_callback(came)

    def _hear_actors(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        with contextlib.suppress(queue.Empty):
            while True:
                self._events.get_nowait()()

    # The trainer -----------------------------------------------------------------------------------------------------

    def _hear_trainer(self) -> None:
        try:
            data, files, *_ = socket.recv_fds(self._control, PACKET_BYTES, 8)
        except ConnectionError:
            data, files = b"", []
        if not data:
            self._ended = True
            return
        kind, *arguments = pickle.loads(data)
        requests: dict[str, Callable[..., None]] = {"start": self._start, "kill": self._kill, "state": self._state}
        requests[kind](*arguments, *files)

    def _answer(self, *answer: Any) -> None:
        with contextlib.suppress(OSError):
            self._control.send(pickle.dumps(answer))

    def _start(
        self, number: int, facts: dict[str, Any], link: int, board: int, stacks: int, work: int, arena: int = -1
    ) -> None:
        """Start a line, on an actor that is free or on a new one; it is answered when that is there, or is not."""
        with os.fdopen(work, "rb") as file:
            file.seek(0)
            blob = file.read()
        mapped = None if arena < 0 else Arena.at(arena)
        line = self._lines[number] = Line(
            number=number,
            link=socket.socket(fileno=link),
            outbox=Outbox(mapped, kept=2 + 2 * facts["ahead"]),
            arena=mapped,
            board=Board.at(board),
            stacks=StackFile(stacks),
            work=blob,
            owed=facts["ahead"],
            deadline=time.monotonic() + self._options["placement_timeout_seconds"],
            **facts,
        )
        free = [seat for seat in self._seats if seat.line is None]
        seat = min(free, key=lambda seat: (seat.versions is None, seat.name != line.name), default=None)
        seat = seat or self._new_seat(line)
        seat.line, line.seat = line, seat
        if seat.versions is not None:
            self._begin(seat, line)

    def _kill(self, number: int) -> None:
        """End a line at once: its actor may be on a node that does not answer."""
        if (line := self._lines.get(number)) is not None:
            self._end(line, -9, "killed by signal 9, by the watchdog", keep=False)

    def _state(self, number: int) -> None:
        line = self._lines.get(number)
        if line is None or line.seat is None:
            self._answer("state", number, "  it has ended")
            return
        call = line.seat.actor.state.options(concurrency_group="watch").remote(number)
        self._when(call, lambda text: self._answer("state", number, text), lambda error: None)

    def _hear_link(self, line: Line) -> None:
        """Pass the commands on that the trainer has sent to one of its workers."""
        if line.number not in self._lines:
            return  # it has just ended, in this round
        commands = b""
        while True:
            try:
                command = line.link.recv(1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionError:
                command = b""
            if not command:
                self._end(line, 0, "was told to end")
                return
            commands += command
            line.owed = line.ahead if command == AGAIN else line.owed + 1
        line.since = max(line.since, time.monotonic() - line.interval / 2)
        if line.tcp is not None:
            with contextlib.suppress(OSError):  # Ray says what became of the actor
                line.tcp.send(commands)

    # Actors ----------------------------------------------------------------------------------------------------------

    def _new_seat(self, line: Line) -> Seat:
        """Ask the cluster for an actor."""
        options = self._options
        wanted = {key: options[key] for key in ("num_cpus", "memory", "resources", "label_selector", "runtime_env")}
        wanted = {key: value for key, value in wanted.items() if value is not None}
        if options["strategy"] == "spread":
            wanted["scheduling_strategy"] = "SPREAD"
        elif options["strategy"] == "cache":
            wanted["scheduling_strategy"] = self._home(line)
        elif avoided := self._avoided():
            wanted["label_selector"] = (options["label_selector"] or {}) | {_NODE_LABEL: f"!in({','.join(avoided)})"}
        name = f"energon {line.name} #{next(self._numbers)}"
        make = self._ray.remote(max_restarts=0, concurrency_groups={"watch": 2}, **wanted)(WorkerActor)
        actor = make.options(name=name).remote(line.name, options["environment"], options["folder"], sys.path)
        seat = Seat(actor=actor, name=line.name, since=time.monotonic())
        self._seats.append(seat)

        def there(place: tuple[Any, ...]) -> None:
            seat.node, seat.node_id, seat.address, seat.versions = place
            if seat.line is not None:
                self._begin(seat, seat.line)

        self._when(actor.place.remote(), there, lambda error: self._lose(seat, error))
        return seat

    def _nodes(self) -> list[dict[str, Any]]:
        """Return the nodes that are up and have what an actor asks for beside cores, without those that lost one."""
        asked = set(self._options["resources"] or ())
        alive = [node for node in self._ray.nodes() if node["Alive"] and asked <= set(node["Resources"])]
        return [node for node in alive if self._bad.get(node["NodeID"], 0.0) < time.monotonic()]

    def _avoided(self) -> list[str]:
        """Return the nodes on which an actor was lost a moment ago, if there are others: Ray may not know it yet."""
        bad = [node for node, until in self._bad.items() if until > time.monotonic()]
        return bad if bad and self._nodes() else []

    def _home(self, line: Line) -> Any:
        """Let a worker be on the same node each time, if that has room: the ranges of its lanes are in its cache."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = self._nodes()
        if not nodes:
            return "DEFAULT"
        identities = {node["NodeName"]: node["NodeID"] for node in nodes}
        return NodeAffinitySchedulingStrategy(identities[home_of(line.name, identities)], soft=True)

    def _begin(self, seat: Seat, line: Line) -> None:
        """Start the worker of a line on its actor."""

        def started(missing: str | None) -> None:
            if self._lines.get(line.number) is not line:
                seat.actor.stop.options(concurrency_group="watch").remote(line.number)  # it was not there before
                return
            if missing is not None:
                self._answer("start", line.number, "refused", f"{missing} (on {seat.node})")
                self._forget(line)
                return
            try:
                line.tcp = socket.create_connection(seat.address[:2], timeout=_CONNECT_SECONDS)
                line.tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                line.tcp.sendall(seat.address[2] + LINE.pack(line.number))
                line.tcp.setblocking(False)
            except OSError as error:
                self._lose(seat, ConnectionError(f"no connection to {seat.address[0]}:{seat.address[1]}: {error}"))
                return
            line.board.begin()
            line.work, line.since = b"", time.monotonic()
            self._answer("start", line.number, "there", (seat.node, seat.versions))
            self._selector.register(line.link, selectors.EVENT_READ, lambda: self._hear_link(line))
            self._selector.register(line.tcp, selectors.EVENT_READ, lambda: self._read(line))

        def ended(ending: Ending | None) -> None:
            if line.number in self._lines and ending is not None:
                code, how, said = ending
                self._read(line)  # what it had sent before
                line.board.show(said)
                self._end(line, code, how)

        call = seat.actor.start.remote(line.number, line.work)
        line.deadline, line.since, line.watched = float("inf"), time.monotonic(), 0.0
        self._when(call, started, lambda error: self._lose(seat, error))
        self._when(seat.actor.serve.remote(line.number), ended, lambda error: self._lose(seat, error))

    def _read(self, line: Line) -> None:
        """Read what has come from an actor, frame by frame, and hand each to the trainer when it is complete."""
        while line.number in self._lines and line.tcp is not None:
            try:
                if line.waiting:
                    got = line.tcp.recv_into(line.waiting[0])
                    line.waiting[0] = line.waiting[0][got:]
                    if not len(line.waiting[0]):
                        line.waiting.pop(0)
                    # A packet at a time would wake this loop a hundred times for a megabyte.
                    least = min(_AT_ONCE_BYTES, len(line.waiting[0])) if line.waiting else 1
                    line.tcp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
                else:
                    missing = FRAME.size - len(line.front)
                    if missing <= 0:
                        missing = FRAME.size + FRAME.unpack_from(line.front)[1] - len(line.front)
                    data = line.tcp.recv(missing)
                    line.front += data
                    got = len(data)
                    if got == missing and len(line.front) > FRAME.size:
                        self._open_frame(line)
            except BlockingIOError:
                return
            except OSError:
                got = 0
            if not got:  # Ray says why
                self._selector.unregister(line.tcp)
                line.tcp.close()
                line.tcp = None
            elif line.message is not None and not line.waiting:
                self._forward(line)

    def _open_frame(self, line: Line) -> None:
        """Find places for the bytes of a frame that has begun."""
        current, failed, *parts = pickle.loads(line.front[FRAME.size :])
        line.front.clear()
        if current > line.current:
            line.current = current
            line.board.start_pass()
            if line.arena is not None:
                line.arena.forget()
        message = BatchMessage(*parts)
        if not isinstance(message.place, bytes):
            lengths: list[Any] = [message.place, *(length for _, length in message.elsewhere)]
            (first, _), *others = reserved = line.outbox.reserve(lengths)
            line.waiting = [view for _, view in reserved if len(view)]
            numbers = [number for number, _ in message.elsewhere]
            message = BatchMessage(first, tuple(zip(numbers, (place for place, _ in others), strict=True)))
        line.message = current, failed, *message

    def _forward(self, line: Line) -> None:
        """Hand a microbatch to the trainer."""
        with contextlib.suppress(ConnectionError):  # the end of the link is heard of as of any command
            line.link.send(pickle.dumps(line.message, pickle.HIGHEST_PROTOCOL))
        line.message = None
        line.board.sent()
        line.owed -= 1
        line.since = time.monotonic()

    def _lose(self, seat: Seat, error: Exception) -> None:
        """Give an actor up that has ended, or whose node has."""
        if seat not in self._seats:
            return
        self._seats.remove(seat)
        line, seat.line = seat.line, None
        with contextlib.suppress(Exception):  # it may be a call that failed, not the actor
            self._ray.kill(seat.actor)
        if line is None:
            return
        text = " ".join(str(error).split())
        setup = self._ray.exceptions.RuntimeEnvSetupError
        if seat.node_id:
            self._bad[seat.node_id] = time.monotonic() + _AVOIDED_SECONDS
        if seat.versions is None and (isinstance(error, setup) or "creation task" in text):
            self._answer("start", line.number, "refused", text)
            self._forget(line)
        elif line.work:  # before it had begun
            line.since = line.watched = 0.0
            line.deadline = time.monotonic() + self._options["placement_timeout_seconds"]
            line.seat = self._new_seat(line)
            line.seat.line = line
        else:
            self._end(line, None, f"its actor was lost on {seat.node}: {text}")

    def _end(self, line: Line, code: int | None, how: str, *, keep: bool = True) -> None:
        """Let the trainer see that a worker has ended; keep its actor for another one, or not."""
        line.stacks.write(how)
        line.board.end(code)
        seat = line.seat
        self._forget(line)
        if seat is None or seat not in self._seats:
            return
        if keep:
            seat.actor.stop.options(concurrency_group="watch").remote(line.number)
        else:
            self._seats.remove(seat)
            self._ray.kill(seat.actor)

    def _forget(self, line: Line) -> None:
        """Give back what there is of a line in this process."""
        del self._lines[line.number]
        with contextlib.suppress(KeyError):
            self._selector.unregister(line.link)
        if line.seat is not None:
            line.seat.line, line.seat.since = None, time.monotonic()
        if line.tcp is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(line.tcp)
            line.tcp.close()
        line.link.close()
        line.outbox.close()
        line.stacks.close()
        line.seat = line.arena = None

    # Now and then ----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """See to lines that have no actor, or whose actor says nothing, and to actors that have no line."""
        now, options = time.monotonic(), self._options
        for line in list(self._lines.values()):
            seat = line.seat
            if now > line.deadline and seat is not None:
                self._seats.remove(seat)
                self._ray.kill(seat.actor)
                self._answer("start", line.number, "unplaced", "")
                self._forget(line)
            elif line.watched and now - line.watched > options["silence_seconds"] and seat is not None:
                self._lose(seat, TimeoutError(f"it did not answer for {now - line.watched:.0f} s"))
            elif line.since and line.owed > 0 and not line.watched and now - line.since > line.interval:
                self._watch(line)
        for seat in [seat for seat in self._seats if seat.line is None]:
            if now - seat.since > options["idle_seconds"]:
                self._seats.remove(seat)
                self._ray.kill(seat.actor)
        if self._lines:
            self._busy = now
        self._ended |= now - self._busy > options["idle_seconds"]

    def _watch(self, line: Line) -> None:
        """Ask an actor what its worker is doing, and say it on the board of the line."""
        seat = line.seat
        assert seat is not None
        line.watched = time.monotonic()

        def answered(said: tuple[bytes, int] | None) -> None:
            line.watched, line.since = 0.0, time.monotonic()
            if said is not None and self._lines.get(line.number) is line:
                line.board.show(said)

        call = seat.actor.status.options(concurrency_group="watch").remote(line.number)
        self._when(call, answered, lambda error: self._lose(seat, error))


def home_of(worker: str, nodes: Iterable[str]) -> str:
    """Return the node of a worker, by rendezvous: when nodes come and go, only the workers of those move."""
    return max(nodes, key=lambda node: key_of("home", node, worker))


def main(descriptor: int) -> None:
    """Run the relay of the process at the other end of a socket, which first sends the options."""
    control = socket.socket(fileno=descriptor)
    options = pickle.loads(control.recv(PACKET_BYTES))
    try:
        relay = Relay(control, options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        control.send(pickle.dumps(("failed", f"{type(error).__name__}: {error}")))
        return
    control.send(pickle.dumps(("connected",)))
    relay.run()
