"""Workers that are actors on a Ray cluster: `WorkerConfig(worker_engine="ray")`.

An actor makes what a worker process would, from the same work, and its microbatches come with the same states, so the
stream is the same to the last bit and any state goes on with any workers. The training process talks to a relay beside
it (`ray_relay`), one for all loaders of a process, as it would to worker processes; the relay talks to Ray.

Where the cluster has no room for an actor, its worker is a process beside the trainer; so are all of them once the
cluster is lost, if the options say so.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import pickle
import select
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from typing import Any, ClassVar, Protocol

from energon_bridge.cloud.ray.ray_actor import dumped, ending_of, note_end, versions
from energon_bridge.cloud.ray.ray_relay import PACKET_BYTES
from energon_bridge.core.errors import ConfigurationError, LoaderError, check_choice, did_you_mean, is_whole
from energon_bridge.core.loader.pool import END_SECONDS, Engine, Worker, WorkerPool
from energon_bridge.core.loader.processes import Board, StackFile
from energon_bridge.core.loader.transport import Arena
from energon_bridge.core.loader.workers import LocalProcesses, Work
from energon_bridge.core.stream.lane_state import LaneBatch
from energon_bridge.core.stream.watchdog import WatchdogSettings
from energon_bridge.core.worker_config import WorkerConfig

logger = logging.getLogger(__name__)

DEFAULTS: dict[str, Any] = {
    "address": None,
    "num_cpus": 1,
    "memory": None,
    "resources": None,
    "label_selector": None,
    "runtime_env": None,
    "strategy": "pack",
    "placement_timeout_seconds": 60.0,
    "hedge_after_seconds": None,
    "silence_seconds": 15.0,
    "idle_seconds": 10.0,
    "on_cluster_loss": "local",
    "min_actors": None,
    "max_actors": None,
    "scale_seconds": 5.0,
    "shared_memory": True,
}
"""The options, in words in docs/how-to/cpu-nodes.md."""
_CHOICES = {"strategy": ("pack", "spread", "cache"), "on_cluster_loss": ("local", "raise")}
_STATE_SECONDS = 3.0
_KILL_SECONDS = 5.0
_LOOK_SECONDS = 0.5
_REPLACE_SECONDS = 2.0
"""Seconds to wait for an actor that replaces one or takes over from one, before a process beside the trainer does."""
_UNPLACED = {
    "none": "No node is as large as they ask for: ask for less (num_cpus, memory, resources), or give it such nodes",
    "full": "Its nodes are full: give it more, or ask for less (num_cpus, memory, resources)",
    "slow": "It has room, so it only starts slowly: wait longer (ray_options placement_timeout_seconds)",
}
_SERVE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from energon_bridge.cloud.ray.ray_relay import main; main(int(sys.argv[2]))"
)


def options_of(given: dict[str, Any] | None) -> dict[str, Any]:
    """Return all options; raises ConfigurationError."""
    for name, value in (given or {}).items():
        if name not in DEFAULTS:
            raise ConfigurationError(f"ray_options: there is no option {name!r}{did_you_mean(name, DEFAULTS)}")
        if name in _CHOICES:
            check_choice(f"ray_options: {name}", value, _CHOICES[name])
        if name.endswith("_actors") and value is not None and not (is_whole(value) and value > 0):
            raise ConfigurationError(f"ray_options: {name} must be an integer above 0, got {value!r}")
        if name.endswith("_seconds") and value is not None and not (isinstance(value, int | float) and value > 0):
            raise ConfigurationError(f"ray_options: {name} must be a number of seconds above 0, got {value!r}")
    if given and given.get("strategy") == "cache" and given.get("label_selector"):
        raise ConfigurationError("ray_options: strategy='cache' chooses nodes by resources, not by label_selector")
    options = DEFAULTS | (given or {})
    if options["max_actors"] is not None:
        options["min_actors"] = options["min_actors"] or 1
        if options["min_actors"] > options["max_actors"]:
            raise ConfigurationError(
                f"ray_options: min_actors ({options['min_actors']}) is more than max_actors ({options['max_actors']})"
            )
    return options


def no_cluster(address: str | None, reason: str) -> str:
    """Return what is said if no Ray cluster answers at an address, or at RAY_ADDRESS."""
    where = address or os.environ.get("RAY_ADDRESS") or "RAY_ADDRESS, which is not set"
    return (
        f"no Ray cluster at {where}: {reason}. If one runs there, and `ray start` said that token authentication is "
        "on, set RAY_AUTH_MODE=token"
    )


class RelayProcess:
    """The relay of this process, as it sees it.

    Attributes:
        lost: Whether it has ended: the cluster is gone, or it was not needed for a while.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.lost = False
        self.process_id = os.getpid()
        self._answers: dict[tuple[str, int], tuple[Any, ...]] = {}
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict(os.environ)
        # Without its head a process of Ray waits so long before it ends.
        environment.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "10")
        environment.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        path = json.dumps([os.path.abspath(one) for one in sys.path])
        with other:
            command = [sys.executable, "-c", _SERVE, path, str(other.fileno())]
            self._process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the trainer
            )
        self._control.send(pickle.dumps(options))
        answer = self._next(None)
        if answer is None or answer[0] == "failed":
            self.close()
            reason = f"exit code {self._process.wait()}" if answer is None else answer[1]
            raise ConfigurationError(f"worker_engine='ray': {no_cluster(options['address'], reason)}")

    def _next(self, seconds: float | None) -> tuple[Any, ...] | None:
        """Return the next answer; None if there is none within some seconds, or no relay any more."""
        if not self.lost and (seconds is None or connection.wait([self._control], seconds)):
            with contextlib.suppress(ConnectionError):
                if data := self._control.recv(PACKET_BYTES):
                    answer: tuple[Any, ...] = pickle.loads(data)
                    return answer
            self.lost = True
        return None

    def request(self, *request: Any, files: tuple[int, ...] = ()) -> None:
        """Send a request; if the relay has ended, do nothing."""
        if not self.lost:
            try:
                socket.send_fds(self._control, [pickle.dumps(request)], files)
            except ConnectionError:
                self.lost = True

    def answer(self, kind: str, number: int, seconds: float | None = None) -> tuple[Any, ...] | None:
        """Return the answer to the request about a line; None if there is none within some seconds."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while (answer := self._answers.pop((kind, number), None)) is None:
            answer = self._next(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if answer is None:
                return None
            self._answers[answer[0], answer[1]] = answer[2:]
        return answer

    @property
    def moves(self) -> Sequence[int]:
        """Return the lines that should go on on another actor."""
        while (answer := self._next(0.0)) is not None:
            self._answers[answer[0], answer[1]] = answer[2:]
        numbers: Sequence[int] = self._answers.get(("moves", 0), ((),))[0]
        return numbers

    @property
    def failed(self) -> bool:
        """Whether it has ended though it was needed."""
        return self._process.wait() != 0

    @property
    def is_alive(self) -> bool:
        """Whether the relay runs and its socket is open; False in a fork of this process."""
        if not self.lost:
            heard = select.poll()
            heard.register(self._control, 0)  # 0: POLLHUP is reported without being asked for
            self.lost = self.process_id != os.getpid() or self._process.poll() is not None or bool(heard.poll(0))
        return not self.lost

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()
        self.lost = True

    def close(self) -> None:
        """Let it end, with all actors."""
        self._control.close()
        self.lost = True

    def end(self) -> None:
        """Ask the relay to end; kill it if it does not."""
        self.close()
        try:
            self._process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()


class ActorProcess:
    """A worker on the cluster, or beside the trainer if there is no room: what the pool knows of its process."""

    def __init__(
        self, relay: RelayProcess | None, number: int, worker: int, link: socket.socket, board: Board, stacks: StackFile
    ) -> None:
        self.relay = relay
        self.number = number
        self.worker = worker
        self.board = board
        self.stacks = stacks
        self.local: Any = None
        self.node = ""
        self.settled = self.closed = False
        self._release = weakref.finalize(self, link.close)  # also if the answer is an error, or never waited for
        self._started_by = os.getpid()

    def is_alive(self) -> bool:
        """Whether it runs, as far as is known here."""
        if self.local is not None:
            return bool(self.local.is_alive())
        return not ending_of(self.board)[0] and self.relay is not None and self.relay.is_alive

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, some seconds at most."""
        if self.local is not None:
            self.local.join(timeout)
            return
        deadline = time.monotonic() + (_KILL_SECONDS if timeout is None else timeout)
        while self.is_alive():
            if time.monotonic() > deadline:
                if timeout is None and self.relay is not None:
                    self.relay.kill()  # it does not even do what it is told
                return
            time.sleep(0.002)

    def kill(self) -> None:
        """End it at once."""
        if self.local is not None:
            self.local.kill()
        elif self.relay is not None:
            self.relay.request("kill", self.number)

    def close(self) -> None:
        """Free the descriptors and memory that this process has of it."""
        self.closed = True
        self._release()
        if self.local is not None:
            self.local.close()
            if self.relay is not None:
                self.relay.request("gone", self.number)


_relays: dict[str, RelayProcess] = {}


@atexit.register
def _end_relays() -> None:
    """Let the relays of this process end with it."""
    for relay in _relays.values():
        if relay.process_id == os.getpid():
            relay.end()


_lines = iter(range(1, 1 << 62))


class RayEngine:
    """Workers that are actors (`pool.Engine`).

    Args:
        config: Of the loader.
        watchdog: How long a microbatch may take.
        finite: Whether the loader is one of passes, which names its actors.

    Raises:
        ConfigurationError: Ray is not installed, or an option is wrong.
    """

    name = "ray"
    forks = False
    advice = "Its node may lack what the encoder needs: the log of the actor, in Ray's dashboard, says what failed"
    refusal: tuple[str, Callable[[Any], bytes]] = (
        "A task encoder must make locks, open files and the like where they are first used (__getstate__ leaves them "
        'out); or use worker_engine="process", which pickles nothing',
        dumped,
    )

    def __init__(self, config: WorkerConfig, watchdog: WatchdogSettings | None, *, finite: bool) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigurationError(
                f"worker_engine='ray' needs Ray: pip install 'energon-bridge[ray]' ({error})"
            ) from error
        self._options = options_of(config.ray_options)
        if self._options["address"] is None and ray.is_initialized():  # this process is of Ray Train
            self._options["address"] = ray.get_runtime_context().gcs_address
        self.hedge_seconds = self._options["hedge_after_seconds"]
        self._config, self._finite, self._key = config, finite, f"{id(self)}"
        self._interval = 1.0 if watchdog is None else watchdog.interval
        self._local = LocalProcesses("fork")
        self._starting: list[tuple[ActorProcess, socket.socket, Callable[[], None]]] = []
        self._relay: RelayProcess | None = None
        self._said = self._gone = False
        self._processes: dict[int, ActorProcess] = {}
        self._look_again = 0.0

    def _connected(self) -> RelayProcess | None:
        """Return the relay; None if the cluster was lost, and the run goes on without it."""
        before = self._relay
        if before is not None and not before.is_alive and before.failed and self._options["on_cluster_loss"] == "raise":
            self._relay = None
            raise LoaderError(
                "the Ray cluster is lost: its head, or the node of this process, has ended. Nothing delivered is lost: "
                "save the state of the loader (loader.save_state_rank()), or take the last checkpoint, and resume when "
                "there is a cluster, or with worker_engine='process'. With ray_options on_cluster_loss='local' a run "
                "goes on with worker processes beside the trainer"
            )
        if before is not None and not before.is_alive and before.failed:
            if not self._gone:
                logger.warning(
                    "the Ray cluster is lost; %d worker processes beside the trainer go on, and no sample is lost. A "
                    "loader that is made later looks for a cluster again",
                    self._config.num_workers,
                )
            self._gone = True
        if self._gone:
            return None
        if before is None or not before.is_alive:
            options = self._options | {
                "environment": {key: value for key, value in os.environ.items() if key.startswith("ENERGON_")},
                "folder": os.getcwd(),
            }
            key = f"{os.getpid()} {json.dumps(options, sort_keys=True, default=repr)}"
            relay = _relays.get(key)
            if relay is None or not relay.is_alive:
                if relay is not None:
                    relay.close()
                relay = _relays[key] = RelayProcess(options)
            self._relay = relay
        return self._relay

    def start(self, work: Work, link: socket.socket, arena: Arena | None, board: Board, stacks: StackFile) -> Any:
        """Ask for an actor; `settle` waits for it."""
        relay = self._connected()
        here = link.dup()
        process = ActorProcess(relay, next(_lines), work.number, here, board, stacks)
        self._processes = {number: one for number, one in self._processes.items() if not one.closed}
        self._processes[process.number] = process

        def start_here() -> None:
            with here:
                process.local = self._local.start(work, here, arena, board, stacks)

        if relay is None:
            start_here()
            return process
        kind = "passes, " if self._finite else ""
        name = f"rank {self._config.dp_rank}, {kind}worker {work.number} of {self._config.num_workers}"
        lanes: list[int | str] = [*work.position.own_lanes[work.number :: self._config.processes]]
        lanes = lanes or [name]
        facts = {"name": name, "lanes": lanes, "ahead": work.ahead}
        facts |= {"interval": self._interval, "patience": self._patience}
        with os.fdopen(os.memfd_create("energon-work"), "wb") as file:
            file.write(dumped(work))
            file.flush()
            shared = (link, board, stacks, file) if arena is None else (link, board, stacks, file, arena)
            files = tuple(one.fileno() for one in shared)
            relay.request("start", process.number, facts, files=files)
        self._starting.append((process, here, start_here))
        return process

    @property
    def _runs(self) -> bool:
        """Whether workers of the loader run, which one that starts now joins."""
        return any(process.settled and not process.closed for process in self._processes.values())

    @property
    def _patience(self) -> float:
        seconds: float = self._options["placement_timeout_seconds"]
        return min(seconds, _REPLACE_SECONDS) if self._runs else seconds

    def settle(self, *, wait: bool = True) -> None:
        """Wait for the actors that were asked for, and start those workers here that the cluster has no room for.

        Raises:
            LoaderError: A node lacks what the work needs.
        """
        starting = self._starting
        self._starting = []
        unplaced = []
        why = ""
        runs = self._runs
        patience = self._patience
        for process, here, start_here in starting:
            assert process.relay is not None
            answer = process.relay.answer("start", process.number, None if wait else 0.0)
            if answer is None and process.relay.is_alive and not process.closed:
                self._starting.append((process, here, start_here))
                continue
            process.settled = True
            if answer is None:  # which the pool sees
                here.close()
            elif answer[0] == "unplaced":
                unplaced.append(process.worker)
                why = str(answer[1])
                start_here()
            else:
                here.close()
                reason = answer[1] if answer[0] == "refused" else self._difference(*answer[1][:2])
                if reason and not runs:
                    raise LoaderError(_REFUSED.format(number=process.worker, reason=reason))
                if reason:
                    logger.warning(_REFUSED.format(number=process.worker, reason=reason))
                    process.kill()
                    note_end(process.board, None)
                else:
                    process.node = answer[1][2]  # names of hosts are not unique: several nodes may be on one
        if unplaced:
            logger.warning(
                "the Ray cluster had no place for %d of %d workers (%s) within %g s: until they run there, these are "
                "processes beside the trainer, and nothing is lost. %s",
                *(len(unplaced), self._config.num_workers, ", ".join(map(str, unplaced)), patience, _UNPLACED[why]),
            )

    def move(self, ready: Callable[[], int]) -> int | None:
        """Return a worker that the cluster would have on a better node; None: none."""
        relay = self._relay
        if relay is None or time.monotonic() < self._look_again or not relay.is_alive:
            return None
        self._look_again = time.monotonic() + _LOOK_SECONDS
        self.settle(wait=False)
        if self._options["min_actors"] is not None:
            most = self._config.num_workers * self._config.prefetch_factor
            relay.request("depth", self._key, ready() / most)
        moves = [self._processes[number] for number in relay.moves if number in self._processes]
        return next((process.worker for process in moves if not process.closed), None)

    def _difference(self, node: str, theirs: dict[str, str]) -> str | None:
        """Return what would change the stream on a node: another version of this package; warn of other differences."""
        ours = versions()
        other = [f"{name} {theirs[name]} instead of {ours[name]}" for name in ours if theirs[name] != ours[name]]
        if theirs["energon_bridge"] != ours["energon_bridge"]:
            return f"the Ray node {node} has {', '.join(other)}: its stream may be another one"
        if other and not self._said:
            self._said = True
            logger.warning("the Ray node %s has %s: tensors may differ from those made here", node, ", ".join(other))
        return None

    def ending(self, process: ActorProcess) -> tuple[int | None, str]:
        """Return the exit code of a worker, as far as it is known, and how it ended."""
        if process.local is not None:
            return self._local.ending(process.local)
        ended, code = ending_of(process.board)
        return code, process.stacks.read() if ended else "its relay ended"

    def state(self, process: ActorProcess, stacks: StackFile) -> str:
        """Return the stacks of a worker, from its node."""
        if process.local is not None:
            return self._local.state(process.local, stacks)
        answer = None
        if process.relay is not None:
            process.relay.request("state", process.number)
            answer = process.relay.answer("state", process.number, _STATE_SECONDS)
        return answer[0] if answer else "  its stack is not available: its actor does not answer"

    def metrics(self) -> dict[str, float]:
        """Return how many workers are actors, on how many nodes, and how many are processes beside the trainer."""
        there = [process for process in [*self._processes.values()] if not process.closed]
        local = {process.worker for process in there if process.local is not None}  # also one that is taken over from
        nodes = {process.worker: process.node for process in there if process.node and process.worker not in local}
        return {"worker_actors": len(nodes), "worker_nodes": len({*nodes.values()}), "local_workers": len(local)}


_REFUSED = (
    "worker {number} cannot start on the Ray cluster: {reason}. If a node lacks the code of the task encoder or a "
    "package, send it along: ray_options runtime_env={{'working_dir': '.'}} or {{'py_modules': [...]}}, "
    "{{'pip': [...]}}; or install it on all nodes"
)


# ---------------------------------------------------------------------------------------------------------------------
# Pools whose workers go on elsewhere: where the engine has a better node for one, and beside one that is slow.


_CATCH_UP_SECONDS = 5.0
"""Seconds for a worker to catch up with the one that it takes over from, before that one must wait."""
_MOVE_SECONDS = 60.0
"""Seconds before a worker that could not go on elsewhere tries again."""


class MovingEngine(Engine, Protocol):
    """An engine that may have a better node for a running worker.

    Attributes:
        hedge_seconds: Waiting time after which a second worker makes the same; None: never.
    """

    hedge_seconds: float | None

    def settle(self, *, wait: bool = True) -> None:
        """Wait for the workers that were started, or look after them. Raises LoaderError if one cannot be started."""

    def move(self, ready: Callable[[], int]) -> int | None:
        """Return a worker that should be started elsewhere, and take over there; asked before each microbatch.

        Args:
            ready: Tells the microbatches that are made and not taken.
        """


class MovableWorker(Worker):
    """A worker that may take over from another one, or hand over to it.

    Attributes:
        behind: Microbatches that it sends first, and that another worker has delivered meanwhile.
        postponed: Credits that it is not given, since the one that takes over from it must catch up.
    """

    behind = 0
    postponed: int | None = None

    def credit(self) -> None:
        if self.postponed is None:
            super().credit()
        else:
            self.postponed += 1


class MovingPool(WorkerPool):
    """Workers of an engine that may have better nodes for some.

    Attributes:
        hedges: How often a second worker was started for a slow one.
        moves: How often a worker went on elsewhere.
    """

    worker_type: ClassVar[type[Worker]] = MovableWorker
    _engine: MovingEngine
    _workers: list[Any]

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._rivals: dict[int, Any] = {}  # second workers of slow ones, or of the one that moves
        self._moving: int | None = None
        self._move_again = 0.0
        self._hedge: float | None = None
        self.hedges = self.moves = 0

    def again(self, due: Iterator[tuple[int, int]]) -> bool:
        self._stay()
        return super().again(due)

    def __next__(self) -> LaneBatch:
        self._next = self._next or next(self._due)
        if (better := self._engine.move(self.ready)) is not None or self._moving is not None:
            self._move(better)
        return super().__next__()

    def _unpacked(self, worker: Any, data: bytes) -> Any:
        number = worker.number
        if number in self._rivals and number != self._moving:
            self._drop(self._rivals.pop(number))  # of two that make the same, it was not the first
        value = self._unless_behind(worker, data)
        if value is not None and number == self._moving:
            self._rivals[number].behind += 1
        return value

    def _unless_behind(self, worker: Any, data: bytes) -> Any:
        value = super()._unpacked(worker, data)
        if value is not None and worker.behind:
            worker.behind -= 1
            return None
        return value

    def metrics(self) -> dict[str, float]:
        hedges = {} if self._engine.hedge_seconds is None else {"worker_hedges": self.hedges}
        return super().metrics() | hedges | ({"worker_moves": self.moves} if self.moves else {})

    def _waited_for(self, worker: Worker, unit: int) -> bytes:
        self._hedge = self._engine.hedge_seconds
        return super()._waited_for(worker, unit)

    def _received(self, number: int, since: float) -> bytes | None:
        data = self._next_of_both(number)
        worker = self._workers[number]
        hedge = self._hedge
        if data is not None or hedge is None or time.monotonic() - since <= hedge:
            return data
        if number not in self._rivals and worker.board.has_begun:
            logger.warning("%s, worker %d is slow: a second worker makes the same", self._where, number)
            self._rivals[number] = self._started(number)
            self.hedges += 1
        return None

    def _next_of_both(self, number: int) -> bytes | None:
        """Return the next message of a worker, or of the second one, which then comes first."""
        while True:
            self._catch_up()
            worker = self._workers[number]
            rival = self._rivals.get(number)
            if rival is None:
                return super()._received(number, 0.0)
            self._engine.settle(wait=False)
            moves = number == self._moving
            both = [worker] if moves and not (rival.taken or rival.behind) else [worker, rival]
            sent = connection.wait(both, self._look)
            if rival in sent and worker not in sent:
                if moves:
                    continue
                if data := rival.receive(socket.MSG_DONTWAIT):
                    self._workers[number], self._rivals[number] = rival, worker
                    return bytes(data)
                self._drop(self._rivals.pop(number))  # it is gone itself
                self._hedge = None
            return worker.receive(socket.MSG_DONTWAIT) if worker in sent else None

    def _drop(self, worker: Worker) -> None:
        worker.kill()
        worker.end(END_SECONDS)
        worker.close()

    def _move(self, number: int | None) -> None:
        """Start a worker where the engine has a better node, beside the one that goes on until then."""
        if number is not None and not self._rivals and time.monotonic() > self._move_again:
            self._rivals[number], self._moving = self._started(number), number
        self._catch_up()

    def _catch_up(self) -> None:
        """Let the worker that was started elsewhere take over when it makes what comes next, and has shown that it can.

        Until then it makes again what the other one has delivered since, which is dropped.
        """
        if (number := self._moving) is None:
            return
        rival = self._rivals[number]
        worker = self._workers[number]
        error = None
        try:
            while rival.behind and (data := rival.receive(socket.MSG_DONTWAIT)) is not None:
                if not data:
                    raise ConnectionError("it has ended")
                self._unless_behind(rival, data)
        except Exception as failure:
            error = failure
        if error is not None or rival.is_gone:
            logger.warning("%s, worker %d cannot go on elsewhere: %s", self._where, number, error or "it has ended")
            self._move_again = time.monotonic() + _MOVE_SECONDS
            self._stay()
        elif rival.taken and worker.postponed is None and time.monotonic() - rival.started > _CATCH_UP_SECONDS:
            worker.postponed = 0
        elif not rival.behind and (rival.taken > 1 or (rival.taken and rival.has_sent(0))):
            self._workers[number], self._rivals[number] = rival, worker
            self.moves += 1
            self._stay()

    def _stay(self) -> None:
        """Drop the second worker of the one that moves."""
        if self._moving is not None:
            self._drop(self._rivals.pop(self._moving))
            stays = self._workers[self._moving]
            self._moving = None
            postponed = stays.postponed or 0
            stays.postponed = None
            for _ in range(postponed):
                stays.credit()

    def _successor(self, number: int) -> Worker:
        self._moving = None if number == self._moving else self._moving
        return self._rivals.pop(number) if number in self._rivals else super()._successor(number)

    def stop(self) -> None:
        self._workers += self._rivals.values()
        self._rivals = {}
        self._moving = None
        super().stop()

    def forget(self) -> None:
        self._rivals = {}
        self._moving = None
        super().forget()


def workers_on_ray(
    config: WorkerConfig, watchdog: WatchdogSettings | None, *, finite: bool
) -> tuple[Engine, type[WorkerPool]]:
    """Return the engine that starts the workers of a loader on a Ray cluster, and the class of their pool."""
    return RayEngine(config, watchdog, finite=finite), MovingPool
