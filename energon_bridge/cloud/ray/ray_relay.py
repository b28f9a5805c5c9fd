"""The process beside a trainer that relays between it and its actors on a Ray cluster.

The trainer knows of no Ray: it has links, boards and arenas as it has of worker processes, at the other end of which is
this process instead. What befalls the cluster (its head ends, and with it every process that is connected) ends this
process and not the training.

A *line* is what the trainer sees as one worker. Its *seat* is an actor, whose microbatches come over a connection, in
frames (`ray_actor`), and are read from it into the arena of the line; on this machine, an actor gets the line itself.
What Ray says comes as events from its threads.

A line has a seat of its own, or shares one of so many as the depth of the queues asks for (`_scale`). Lines that would
better be elsewhere are named to the trainer, which starts them again there and then ends them here.

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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from energon_bridge.cloud.ray.ray_actor import (
    FRAME,
    LINE,
    Ending,
    RelayOutbox,
    WorkerActor,
    arena_at,
    board_at,
    machine,
    name_here,
    note_end,
    show,
)
from energon_bridge.core.loader.processes import Board, StackFile
from energon_bridge.core.loader.transport import Arena, BatchMessage
from energon_bridge.core.loader.workers import AGAIN
from energon_bridge.core.order.rng import key_of

PACKET_BYTES = 1 << 16
_LOOK_SECONDS = 0.2
_AT_ONCE_BYTES = 1 << 20
_CONNECT_SECONDS = 10.0
_AVOIDED_SECONDS, _STUCK_SECONDS = 60.0, 20.0  # of a node that lost an actor; of an actor with no place elsewhere
_ASK_SECONDS = 5.0
_MOST_LINES = 256
_DEPTH_SECONDS, _LOW, _HIGH, _SLOWER = 3.0, 0.25, 0.75, 6
"""How long a depth holds; of queues that are nearly empty or full; how much slower actors are given up than added."""
_NODE_LABEL = "ray.io/node-id"


@dataclass(kw_only=True, slots=True, eq=False)
class Seat:
    """An actor: Ray's handle, its node and what that says of itself, and the lines that it has.

    `since` is when it was asked for; `leaving`: it gets no further line; `avoids`: it was asked for on other nodes than
    those that lost an actor.
    """

    actor: Any
    name: str
    since: float
    node: str = ""
    node_id: str = ""
    address: tuple[str, bytes, str] = ("", b"", "")
    versions: dict[str, str] | None = None
    lines: list[Line] = field(default_factory=list)
    leaving: bool = False
    avoids: bool = False


@dataclass(kw_only=True, slots=True, eq=False)
class Line:
    """What the trainer sees as one worker.

    Attributes:
        patience: Seconds to wait for a seat.
        tcp: The connection to its actor; of one on this machine nothing comes over it.
        front: The bytes received of a frame, until its pickle is complete.
        message: The message of a frame whose bytes are coming, with the places for these that are not full.
        owed: Credits: microbatches that the trainer asked for and has not got.
        since: When the last one came.
        watched: When the actor was asked for its board, which it has not answered yet.
        direct: Whether its worker talks to the trainer itself.
    """

    number: int
    name: str
    lanes: Sequence[Any]
    link: socket.socket
    outbox: RelayOutbox
    arena: Arena | None
    board: Board
    stacks: StackFile
    work: bytes
    ahead: int
    interval: float
    patience: float
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
    direct: bool = False


class Relay:
    """The loop of this process: it waits for requests, commands, frames and events, and does what they ask for."""

    def __init__(self, control: socket.socket, options: dict[str, Any]) -> None:
        import ray

        self._ray: Any = ray
        self._control = control
        self._machine = machine()
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
        self._waiting: dict[int, Line] = {}  # lines that the trainer makes itself until there is a seat
        self._moves: list[int] = []
        self._wanted = options["min_actors"]  # actors to share; None: each line has its own
        self._depths: dict[str, tuple[float, float]] = {}  # by loader, how full its queues are (0 to 1), and since when
        self._scaled = [time.monotonic()] * 2  # since when all queues have been nearly empty, and full
        self._busy = time.monotonic()
        self._looked = 0.0
        self._ask_again = 0.0
        self._ended = False
        try:
            ray.remote(label_selector={_NODE_LABEL: "!in(none)"})(WorkerActor)
            self._selects = True
        except ValueError as error:  # an older Ray, which may only learn itself that a node has gone
            self._selects = False
            if options["label_selector"]:
                raise ValueError(f"Ray {ray.__version__} has no label_selector") from error
        ray.init(address=options["address"], log_to_driver=False, logging_level=logging.ERROR)

    def run(self) -> None:
        """Relay until the trainer is gone, or has had no line for a while."""
        parent = os.getppid()
        while not self._ended and os.getppid() == parent:
            for key, _ in self._selector.select(_LOOK_SECONDS):
                key.data()
            self._look()
        self._control.close()  # at once: a loader that comes while Ray ends needs another relay
        for seat in self._seats:
            self._ray.kill(seat.actor)
        self._ray.shutdown()

    def _when(self, call: Any, done: Callable[[Any], None], failed: Callable[[Exception], None]) -> None:
        """Call a function on the loop with the result of a call to Ray, or with its error."""

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
            data = b""
            files = []
        if not data:
            self._ended = True
            return
        kind, *arguments = pickle.loads(data)
        requests: dict[str, Callable[..., Any]] = {
            "start": self._start,
            "kill": self._kill,
            "state": self._state,
            "gone": lambda number: self._waiting.pop(number, None),
            "depth": self._note_depth,
        }
        requests[kind](*arguments, *files)

    def _answer(self, *answer: Any) -> None:
        with contextlib.suppress(OSError):
            self._control.send(pickle.dumps(answer))

    def _start(
        self, number: int, facts: dict[str, Any], link: int, board: int, stacks: int, work: int, arena: int = -1
    ) -> None:
        """Start a line, on an actor that has room or on a new one; it is answered when that is there, or is not."""
        with os.fdopen(work, "rb") as file:
            file.seek(0)
            blob = file.read()
        mapped = None if arena < 0 else arena_at(arena)
        line = self._lines[number] = Line(
            number=number,
            link=socket.socket(fileno=link),
            outbox=RelayOutbox(mapped, kept=2 + 2 * facts["ahead"]),
            arena=mapped,
            board=board_at(board),
            stacks=StackFile(stacks),
            work=blob,
            owed=facts["ahead"],
            deadline=time.monotonic() + facts["patience"],
            **facts,
        )
        self._sit(line)

    def _sit(self, line: Line) -> None:
        """Give a line a seat: of its own, or, if actors are shared, where there are the fewest lines."""
        seats = [seat for seat in self._seats if not seat.leaving]
        if self._wanted is None:
            seats = [seat for seat in seats if not seat.lines]
        elif len(seats) < self._wanted:
            seats.append(self._new_seat(line))
        home = self._home(line.lanes) if self._options["strategy"] == "cache" else None

        def cost(seat: Seat) -> tuple[int, ...]:
            same = any(other.name == line.name for other in seat.lines)  # which this one takes over from
            return same, seat.versions is None, seat.node_id != home, len(seat.lines), seat.name != line.name

        seat = min(seats, key=cost, default=None) or self._new_seat(line)
        seat.lines.append(line)
        line.seat = seat
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

    def _note_depth(self, loader: str, depth: float) -> None:
        self._depths[loader] = depth, time.monotonic()

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
        avoided = self._avoided()
        wanted = {key: options[key] for key in ("num_cpus", "memory", "resources", "label_selector", "runtime_env")}
        wanted = {key: value for key, value in wanted.items() if value is not None}
        if options["strategy"] == "spread":
            wanted["scheduling_strategy"] = "SPREAD"
        elif options["strategy"] == "cache":
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            home = self._home(line.lanes)
            wanted["scheduling_strategy"] = (
                "DEFAULT" if home is None else NodeAffinitySchedulingStrategy(home, soft=True)
            )
        elif avoided and self._selects:
            wanted["label_selector"] = (options["label_selector"] or {}) | {_NODE_LABEL: f"!in({','.join(avoided)})"}
        name = f"energon {line.name} #{next(self._numbers)}"
        groups = {"watch": 2, "serve": _MOST_LINES}
        make = self._ray.remote(max_restarts=0, concurrency_groups=groups, **wanted)(WorkerActor)
        actor = make.options(name=name).remote(line.name, options["environment"], options["folder"], sys.path)
        seat = Seat(actor=actor, name=line.name, since=time.monotonic(), avoids=bool(avoided))
        self._seats.append(seat)

        def there(facts: tuple[Any, ...]) -> None:
            seat.node, seat.node_id, seat.address, seat.versions = facts
            seat.since = time.monotonic()
            for line in list(seat.lines):
                self._begin(seat, line)

        self._when(actor.node_facts.remote(), there, lambda error: self._lose(seat, error))
        return seat

    def _nodes(self) -> list[dict[str, Any]]:
        """Return the nodes that are up and large enough for an actor, without those that lost one."""
        now = time.monotonic()
        alive = [node for node in self._ray.nodes() if node["Alive"] and self._bad.get(node["NodeID"], 0.0) < now]
        return [node for node in alive if self._fits_in(node["Resources"])]

    def _fits_in(self, there: Mapping[str, float]) -> bool:
        """Return whether an actor has room in some resources."""
        options = self._options
        asked = {"CPU": options["num_cpus"] or 0, "memory": options["memory"] or 0} | (options["resources"] or {})
        return all(there.get(name, 0) >= asked[name] for name in asked)

    def _why_unplaced(self) -> str:
        """Return why an actor is not there yet, as the engine calls it; what is free is known of all nodes together."""
        if not self._nodes():
            return "none"
        return "slow" if self._fits_in(self._ray.available_resources()) else "full"

    def _avoided(self) -> list[str]:
        """Return the nodes on which an actor was lost a moment ago, if there are others: Ray may not know it yet."""
        bad = [node for node, until in self._bad.items() if until > time.monotonic()]
        return bad if bad and self._nodes() else []

    def _home(self, lanes: Sequence[Any]) -> str | None:
        """Return the node whose cache has what lanes read before; None: there is no node yet."""
        identities = {node["NodeName"]: node["NodeID"] for node in self._nodes()}
        return identities[home_of(lanes, identities)] if identities else None

    def _begin(self, seat: Seat, line: Line) -> None:
        """Start the worker of a line on its actor."""

        def started(port: str | int) -> None:
            if self._lines.get(line.number) is not line:
                seat.actor.stop.options(concurrency_group="watch").remote(line.number)  # it was not there before
                return
            if isinstance(port, str):
                self._refuse(line, seat, f"{port} (on {seat.node})")
                return
            call = seat.actor.serve.options(concurrency_group="serve").remote(line.number)
            self._when(call, ended, lambda error: self._lose(seat, error))
            try:
                self._connect(line, seat, port)
            except OSError as error:
                self._lose(seat, ConnectionError(f"no connection to {seat.address[0]}:{port}: {error}"))
                return
            line.work = b""
            self._answer("start", line.number, "there", (seat.node, seat.versions, seat.node_id))

        def ended(ending: Ending | None) -> None:
            if line.number in self._lines and ending is not None:
                code, how, said = ending
                if not line.direct:
                    self._read(line)  # what it had sent before
                    show(line.board, said)
                self._end(line, code, how)

        call = seat.actor.start.remote(line.number, line.work)
        line.deadline = float("inf")
        line.since = time.monotonic()
        line.watched = 0.0
        self._when(call, started, lambda error: self._lose(seat, error))

    def _connect(self, line: Line, seat: Seat, port: int) -> None:
        """Connect to a worker, or hand it the line, if it is on this machine.

        From here on it counts as begun: its actor has imported all, and what the worker takes is for the watchdog.
        """
        host, token, where = seat.address
        if self._options["shared_memory"] and where == self._machine:
            line.direct = True
            line.tcp = socket.socket(socket.AF_UNIX)
            line.tcp.connect(name_here(token, line.number))
            shared: list[Any] = [line.link, line.board, line.stacks, *([] if line.arena is None else [line.arena])]
            socket.send_fds(line.tcp, [token + LINE.pack(line.number)], [one.fileno() for one in shared])
            line.link.close()
            line.arena = None
            line.since = 0.0
            line.outbox.close()
            line.board.begin()
            return
        line.tcp = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
        line.tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.tcp.sendall(token + LINE.pack(line.number))
        line.tcp.setblocking(False)
        line.board.begin()
        line.since = time.monotonic()
        self._selector.register(line.link, selectors.EVENT_READ, lambda: self._hear_link(line))
        self._selector.register(line.tcp, selectors.EVENT_READ, lambda: self._read(line))

    def _read(self, line: Line) -> None:
        """Read the bytes received from an actor; hand each frame to the trainer when it is complete."""
        while line.number in self._lines and line.tcp is not None and not line.direct:
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
            if not got:  # the connection broke; an event of Ray tells why
                self._selector.unregister(line.tcp)
                line.tcp.close()
                line.tcp = None
            elif line.message is not None and not line.waiting:
                self._forward(line)

    def _open_frame(self, line: Line) -> None:
        """Take the pickle of a frame, whose front is complete, and reserve places in the arena for its bytes."""
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
        """Give up an actor that has ended, or whose node has."""
        if seat not in self._seats:
            return
        self._seats.remove(seat)
        lines = seat.lines
        seat.lines = []
        with contextlib.suppress(Exception):  # it may be a call that failed, not the actor
            self._ray.kill(seat.actor)
        text = " ".join(str(error).split())
        setup = self._ray.exceptions.RuntimeEnvSetupError
        if seat.node_id:
            self._bad[seat.node_id] = time.monotonic() + _AVOIDED_SECONDS
        for line in lines:
            if seat.versions is None and (isinstance(error, setup) or "creation task" in text):
                self._refuse(line, seat, text)
            elif line.work:  # before it had begun
                line.since = line.watched = 0.0
                line.deadline = min(line.deadline, time.monotonic() + line.patience)
                self._sit(line)
            else:
                self._end(line, None, f"its actor was lost on {seat.node}: {text}")

    def _refuse(self, line: Line, seat: Seat, reason: str) -> None:
        """Say that a node cannot do the work, and leave it alone for a while."""
        self._bad[seat.node_id] = time.monotonic() + _AVOIDED_SECONDS
        self._answer("start", line.number, "refused", reason)
        self._forget(line)
        if not seat.lines:
            self._give_up(seat)

    def _give_up(self, seat: Seat) -> None:
        if seat in self._seats:
            self._seats.remove(seat)
            self._ray.kill(seat.actor)

    def _end(self, line: Line, code: int | None, how: str, *, keep: bool = True) -> None:
        """Let the trainer see that a worker has ended; keep its actor for another one, or not."""
        os.pwrite(line.stacks.number, how.encode(), os.fstat(line.stacks.number).st_size)
        note_end(line.board, code)
        seat = line.seat
        self._forget(line)
        if seat is None or seat not in self._seats:
            return
        if keep or seat.lines:
            seat.actor.stop.options(concurrency_group="watch").remote(line.number)
        else:
            self._give_up(seat)

    def _forget(self, line: Line) -> None:
        """Free the descriptors and memory that this process has of a line."""
        del self._lines[line.number]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line.link)
        if line.seat is not None and line in line.seat.lines:
            line.seat.lines.remove(line)
            line.seat.since = time.monotonic()
        if line.tcp is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(line.tcp)
            line.tcp.close()
        line.link.close()
        line.outbox.close()
        line.stacks.close()
        line.seat = line.arena = None

    # Every 0.2 seconds -----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Look after lines without an actor or with a silent one, and after actors without a line."""
        now = time.monotonic()
        options = self._options
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        for line in list(self._lines.values()):
            seat = line.seat
            if now > line.deadline and seat is not None:
                self._answer("start", line.number, "unplaced", self._why_unplaced())
                self._waiting[line.number] = line
                self._forget(line)  # but not its seat, which may come
            elif line.watched and now - line.watched > options["silence_seconds"] and seat is not None:
                self._lose(seat, TimeoutError(f"it did not answer for {now - line.watched:.0f} s"))
            elif line.since and line.owed > 0 and not line.watched and now - line.since > line.interval:
                self._watch(line)
        self._look_at_seats(now)
        self._scale(now)
        if (moves := self._better_elsewhere()) != self._moves:
            self._moves = moves
            self._answer("moves", 0, moves)
        if self._lines or self._waiting:
            self._busy = now
        if now - self._busy > options["idle_seconds"]:
            self._ended |= not connection.wait([self._control], 0)  # a loader may just have come

    def _look_at_seats(self, now: float) -> None:
        """End actors that have no line and are not waited for; ask for those that lines wait for."""
        empty = sorted((seat for seat in self._seats if not seat.lines), key=lambda seat: seat.versions is None)
        shared = self._wanted is not None and bool(self._lines)
        kept = empty if shared else empty[: len(self._waiting)]
        for seat in empty:
            if seat.leaving or (seat not in kept and now - seat.since > self._options["idle_seconds"]):
                self._give_up(seat)
        for seat in [*self._seats]:
            if seat.avoids and seat.versions is None and now - seat.since > _STUCK_SECONDS:
                self._bad.clear()  # by now Ray itself knows which of them are gone
                self._lose(seat, TimeoutError("no other node has a place for it"))
        seats = [seat for seat in self._seats if not seat.leaving and (shared or not seat.lines)]
        missing = (self._wanted if shared else len(self._waiting)) - len(seats)
        if missing > 0 and now > self._ask_again:
            self._ask_again = now + _ASK_SECONDS
            self._new_seat(next(iter((self._waiting or self._lines).values())))

    def _better_elsewhere(self) -> list[int]:
        """Return the lines that would better be on another seat, and those that wait for one if there is any."""
        there = [len(seat.lines) for seat in self._seats if seat.versions is not None and not seat.leaving]
        if not there:
            return []
        moves = sorted(self._waiting) if self._wanted is not None or not min(there) else []
        for seat in self._seats:
            if seat.lines and (seat.leaving or len(seat.lines) > min(there) + 1):
                moves.append(seat.lines[-1].number)
        return moves

    def _scale(self, now: float) -> None:
        """Have one actor more where training waits for batches, and one less where they lie ready for long."""
        options = self._options
        seats = [seat for seat in self._seats if not seat.leaving]
        depths = [depth for depth, at in self._depths.values() if now - at < _DEPTH_SECONDS]
        if self._wanted is None or not depths or not self._lines:
            self._scaled = [now, now]
            return
        if min(depths) > _LOW or any(seat.versions is None for seat in seats):
            self._scaled[0] = now
        if min(depths) < _HIGH:
            self._scaled[1] = now
        low, high = (now - since for since in self._scaled)
        if low > options["scale_seconds"] and len(seats) < (options["max_actors"] or len(self._lines)):
            self._wanted = len(seats) + 1
            self._scaled = [now, now]
            self._new_seat(next(iter(self._lines.values())))
        elif high > _SLOWER * options["scale_seconds"] and len(seats) > options["min_actors"]:
            self._wanted = len(seats) - 1
            self._scaled = [now, now]
            min(seats, key=lambda seat: len(seat.lines)).leaving = True

    def _watch(self, line: Line) -> None:
        """Ask an actor for the board of its worker, and copy it to the board of the line."""
        seat = line.seat
        assert seat is not None
        line.watched = time.monotonic()

        def answered(said: tuple[bytes, int] | None) -> None:
            line.watched = 0.0
            line.since = time.monotonic()
            if said is not None and self._lines.get(line.number) is line:
                show(line.board, said)

        call = seat.actor.status.options(concurrency_group="watch").remote(line.number)
        self._when(call, answered, lambda error: self._lose(seat, error))


def home_of(lanes: Sequence[Any], nodes: Iterable[str]) -> str:
    """Return the node on which most of some lanes are at home.

    Each lane has its node by rendezvous: when nodes come and go, or lanes come to other workers, no other lane moves.
    """
    nodes = sorted(nodes)
    homes = Counter(max(nodes, key=lambda node: key_of("home", node, str(lane))) for lane in lanes)
    return max(nodes, key=lambda node: (homes[node], key_of("home", node, str(lanes[0]))))


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
