"""The delivery of a loader: the microbatches of one rank, made here or by workers, handed out one after the other.

Its position says what has been handed out; what was made ahead is not part of it, and is dropped (`Delivery.stop`)
when the position changes otherwise.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any

import torch

from energon_bridge.core.errors import ConfigurationError, ForkedLoaderError, called
from energon_bridge.core.loader.advice import say_masked, say_more_rows
from energon_bridge.core.loader.copies import Copies
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.metrics import AT_END, AT_EPOCH, check_rates, name_losses, name_shares
from energon_bridge.core.loader.opening import open_pipeline
from energon_bridge.core.loader.outstanding import AgainStream, Outstanding
from energon_bridge.core.loader.pool import Engine, WorkerPool
from energon_bridge.core.loader.position import EndlessRun, FinitePass, Position
from energon_bridge.core.loader.run_plan import plan_run
from energon_bridge.core.loader.workers import LocalProcesses, Work, keep_freed_memory
from energon_bridge.core.registry import load
from energon_bridge.core.samples.sample import meta_field
from energon_bridge.core.samples.sample_place import pass_on
from energon_bridge.core.storage.forks import process_id
from energon_bridge.core.storage.store import REQUESTS
from energon_bridge.core.stream.finite import mask_loss
from energon_bridge.core.stream.lane import Production, reported
from energon_bridge.core.stream.lane_state import LaneBatch, LaneState
from energon_bridge.core.stream.leaf import Leaf
from energon_bridge.core.stream.pipeline import attach
from energon_bridge.core.stream.watchdog import WatchdogSettings
from energon_bridge.core.worker_config import WorkerConfig

logger = logging.getLogger(__name__)


class Delivery:
    """Hands out the microbatches of one rank.

    Args:
        spec: What is loaded.
        config: Ranks and workers.
        watchdog: How long a microbatch may take; None: as long as it likes.

    Attributes:
        position: What has been handed out.
        pool: The workers; started with the first microbatch.
        passes: Times that a pass began: iterators over earlier ones have ended.
        resumed: Whether the position was changed since the last microbatch, and the next pass goes on from there.
        last: What a masked microbatch repeats.
        seconds: Time that all processes took for the microbatches handed out.
        pins: Whether batches are copied to pinned memory.
        used_last: A mark of the iterator that was used last; the iterator itself would make a reference cycle.
    """

    def __init__(self, spec: DatasetSpec, config: WorkerConfig, watchdog: WatchdogSettings | None) -> None:
        self.spec = spec
        self.config = config
        self.watchdog = watchdog
        self.position: Position = (FinitePass if spec.ends else EndlessRun)(plan_run(spec, config))
        self.pool = self._new_pool()
        self.passes = 0
        self.resumed = False
        self.last: Any = None
        self.seconds = [0.0] * (3 + len(REQUESTS))
        self.pins = torch.cuda.is_available() if config.pin_memory is None else config.pin_memory
        self.used_last: object = None
        self._again: AgainStream | None = None
        self._copies = Copies(self.pins, config.device) if self.pins or config.device is not None else None
        self._source: Iterator[LaneBatch] | None = None
        self._held: deque[LaneBatch] = deque()
        self._began = 0
        self._first: dict[int, LaneState] = {}  # where lanes were when the position was changed last
        self._process = 0
        self._steps = 0
        self._epoch_length = None if spec.ends else spec.epoch_length(config.dp_size)  # None: each pass is one
        # Runs that nobody closes end with the loader or with the process; a worker's copy of the loader is no run.
        weakref.finalize(self, _name_losses, spec, self.position, os.getpid())

    def begin(self, *, persistent: bool) -> None:
        """Begin to iterate. A pass that is over begins again, and so does any pass of validation; others go on.

        Args:
            persistent: Workers go on with the next pass.
        """
        self.check_process()
        position = self.position
        if isinstance(position, FinitePass):
            in_order = not self.spec.shuffled  # validation starts again, training continues
            out = position.out
            ended = position.is_over and (out is None or not (out.due or (self.resumed and not out.ended)))
            if out is not None and ended:
                out.ended = False
            if ended or (in_order and not self.resumed):
                position.rewind()
                # Workers that run on have the listing of the pass that they were started in.
                listed = self.spec.shuffled and self.spec.listed
                self._began = 0
                if listed or not (persistent and self.pool.again(self._due())):
                    self.stop()
            self.resumed = False
            self.passes += 1
        virtual = self.spec.settings.virtual_epoch_length
        if virtual is not None and position.epoch_steps >= virtual:
            position.epoch_steps = 0

    def moved(self) -> None:
        """Drop what was made ahead and go on from the position, which the caller has changed."""
        self.stop()
        self.last = None
        self.resumed = True
        self._first = dict(self.position.lanes)

    def next(self) -> Any:
        """Return the next microbatch of this rank."""
        self.check_process()
        position = self.position
        virtual = self.spec.settings.virtual_epoch_length
        if virtual is not None and position.epoch_steps >= virtual:
            raise StopIteration
        while position.out is not None and position.out.due:
            if (batch := self._delivered_again(position.out)) is not None:
                return batch
        while not position.is_over:
            if position.is_masked:
                position.advance()
                return self._masked()
            item = self._taken()
            position.take(item)
            position.advance()
            position.counts.add(item.counts)
            if isinstance(position, FinitePass):
                say_more_rows(position, item.rows, self.spec.failure_log)
                if not item.rows and self.spec.settings.conventions.masks:
                    say_masked(position, item, self.spec.failure_log)
            if not position.ownership.even:
                self.last = item.batch
            self._steps += 1
            if self._ends_an_epoch():
                name_losses(position, self.spec.failure_log, least=AT_EPOCH)
                name_shares(position, self._first, self.spec.failure_log)
                if not self.spec.ends and virtual is None and not self.config.dp_rank:
                    _say_endless()
            if item.rows or self.spec.settings.conventions.masks:
                if self._copies is not None:
                    self._copy_ahead()
                return item.batch
        if position.out is not None:
            position.out.ended = True
        raise StopIteration

    def _delivered_again(self, out: Outstanding) -> Any:
        """Return the next microbatch of samples that come again; None if nothing is left of it."""
        position = self.position
        if self._again is None:
            plan = position.plan
            pipeline = open_pipeline(plan, 0, range(len(plan.leaves)), self.watchdog)
            self._again = AgainStream(pipeline, out, plan.banned)
        item = reported(self._again, 0)
        if self._copies is not None:
            item.batch = self._copies.end(self._copies.begin(item.batch))
        if item.reports:
            self._report(item)
        if not item.rows and item.batch is not None:
            _check_masked(item.batch)
        position.counts.add(item.counts)
        out.due.popleft()
        if not out.due:
            self._stop_again()
        return item.batch

    def _stop_again(self) -> None:
        if self._again is not None:
            self._again.pipeline.close()
            self._again = None

    def _ends_an_epoch(self) -> bool:
        """Whether the pass, the virtual epoch, or the epoch of the data is over with the microbatch just delivered."""
        position = self.position
        virtual = self.spec.settings.virtual_epoch_length
        if virtual is not None:
            return position.epoch_steps >= virtual
        return position.is_over if self._epoch_length is None else not self._steps % self._epoch_length

    def _pull(self) -> LaneBatch:
        try:
            if self._source is None:
                self._source = self._opened()
            item = next(self._source)
        except BaseException:
            self.stop()  # whatever comes next starts from the delivered state
            raise
        if self._copies is not None:
            item.batch = self._copies.begin(item.batch)
        return item

    def _taken(self) -> LaneBatch:
        """Return what is delivered next."""
        if not self._held:
            self._held.append(self._pull())
        try:
            item = self._held[0]
            if item.reports:
                self._report(item)
            for logger, name, text in item.warned:
                pass_on((logger, name, f"rank {self.config.dp_rank}: {text}" if self.config.dp_size > 1 else text))
            self._finish_copy(item)
            if (out := self.position.out) is not None:
                if item.rows:
                    out.deliver(item.batch, self.position.epoch, self.position.microbatches + self.config.dp_rank)
                else:
                    _check_masked(item.batch)
        except BaseException:
            self.stop()
            raise
        for number, more in enumerate(item.seconds):
            self.seconds[number] += more
        return self._held.popleft()

    def _finish_copy(self, item: LaneBatch) -> None:
        if self._copies is not None and isinstance(item.batch, Future):
            item.batch = self._copies.end(item.batch)

    def _copy_ahead(self) -> None:
        """Begin to copy the next microbatch if a worker has made it, while the trainer has the one before."""
        if self.spec.ends or self._held or self._source is not self.pool:
            return
        # An error here is raised when that microbatch is due; the one before it is delivered first.
        with contextlib.suppress(Exception):
            if self.pool.next_is_ready():
                self._held.append(self._pull())

    def _report(self, item: LaneBatch) -> None:
        """Log the samples that failed on the way to a microbatch; raise if there are too many."""
        spec = self.spec
        config = self.config
        position = self.position
        spec.failure_log.write(item.reports, config.dp_rank, config.dp_size)
        check_rates(position, item, spec.settings.error_policy, spec.failure_log)

    def _masked(self) -> Any:
        """Return a masked microbatch: the rows of the last real one, or the next, with `__valid__` all false."""
        if self.last is None and not self._held:
            self._held.append(self._pull())
        if self._held:
            self._finish_copy(self._held[-1])
        batch = copy.copy(self.last if self.last is not None else self._held[-1].batch)
        valid = _valid_of(
            batch,
            f"{self.config.dp_size} ranks do not divide {self.position.plan.num_lanes} lanes",
            "or use a number of ranks that divides num_lanes",
        )
        attach(batch, "__valid__", torch.zeros_like(valid))
        mask_loss(batch)
        return batch

    def _due(self) -> Iterator[tuple[int, int]]:
        """Give the units (see `position.py`) that this rank delivers next, each with the number of its worker."""
        return self.position.units(self._began)

    def _opened(self) -> Iterator[LaneBatch]:
        """Start making the units from the delivered position on, here or in workers."""
        self._held.clear()
        self._process = os.getpid()
        self._began = self.position.microbatches
        if self.config.num_workers:
            self.pool.begin(self._due())
            return self.pool
        keep_freed_memory()
        units = (unit for unit, _ in self._due())
        stream = self.position.stream(self.watchdog)
        return Production(stream, units, self.config.prefetch_factor)

    def _new_pool(self) -> WorkerPool:
        config = self.config
        pool = WorkerPool
        engine: Engine = LocalProcesses(config.start_method)
        if config.worker_engine != "process":
            workers = load("workers", str(config.worker_engine))
            engine, pool = workers(config, self.watchdog, finite=self.spec.ends)
        made = pool(
            self,
            config.num_workers,
            engine=engine,
            max_restarts=config.max_worker_restarts,
            watchdog=self.watchdog,
            where=f"rank {config.dp_rank}",
        )
        made.bars = not getattr(self.spec.settings.task_encoder, "runs_elsewhere", False)
        return made

    def work(self, worker: int, barred: frozenset[tuple[int, int]], careful: bool) -> Work:
        position = self.position.for_worker()
        for item in self._held:
            assert item.state is not None  # only endless streams hold something back
            position.lanes[item.unit] = item.state
        return Work(
            number=worker,
            position=position,
            ahead=self.config.prefetch_factor,
            held_back=len(self._held),
            began=self._began,
            watchdog=self.watchdog,
            barred=barred,
            careful=careful,
        )

    def leaves(self) -> Sequence[Leaf]:
        """Return the leaves of the mix, in the order of the run."""
        return self.position.plan.leaves

    @property
    def _is_foreign(self) -> bool:
        """Whether this process is a fork of the one that started the workers or threads."""
        return self._source is not None and self._process != process_id()

    def check_process(self) -> None:
        """Raise in a fork of the process that delivers."""
        if self._is_foreign:
            raise ForkedLoaderError(
                f"this loader delivers in process {self._process}; this is process {os.getpid()}, a fork without its "
                "workers and threads. Make a loader in this process and restore the state of the other, or call "
                "close() on this copy, which then starts its own workers from its current position"
            )

    def stop(self) -> None:
        """Stop workers and threads and drop what they made ahead; the next microbatch is made from the position on."""
        if isinstance(self._source, Production) and not self._is_foreign:
            self._source.close()
        self._stop_workers()
        self._stop_again()
        self._source = None
        self._held.clear()

    def _stop_workers(self) -> None:
        if self._is_foreign:  # nothing of it is this process's to stop
            self.pool.forget()
        elif self.config.num_workers:
            self.pool.stop()

    def close(self) -> None:
        """Stop workers and threads; the next microbatch starts them again."""
        self.stop()
        if self._copies is not None:
            self._copies.close()
        name_losses(self.position, self.spec.failure_log, least=AT_END)

    def __del__(self) -> None:
        # Threads end with their `Production`; the garbage collector may call this on one that must not wait for them.
        # At the interpreter's end no workers are left (`pool` has stopped them), and modules may be gone already.
        if "_source" in self.__dict__ and self.pool.has_workers:
            self._stop_workers()


class Iteration:
    """What `iter(loader)` returns; a finite one ends when a later pass begins.

    Several over one endless stream share its microbatches. With a virtual epoch each takes those that its epoch had
    left when it was first used, as with megatron-energon; the state has the epoch of the one that was used last.
    """

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._pass = delivery.passes
        self._mark = object()
        self._epoch_steps: int | None = None  # of its virtual epoch; None: not used yet

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        delivery = self._delivery
        if delivery.passes != self._pass:
            raise StopIteration
        virtual = delivery.spec.settings.virtual_epoch_length
        position = delivery.position
        if virtual is None or delivery.spec.ends:
            return delivery.next()
        if self._epoch_steps is None:
            position.epoch_steps %= virtual
        elif delivery.used_last is not self._mark:
            position.epoch_steps = self._epoch_steps
        delivery.used_last = self._mark
        try:
            return delivery.next()
        finally:
            self._epoch_steps = position.epoch_steps


def _valid_of(batch: Any, why: str, instead: str) -> Any:
    """Return the mask of a batch that is to be masked. Raises ConfigurationError if it carries none."""
    valid = meta_field(batch, "__valid__")
    if valid is None:
        raise ConfigurationError(
            f"{why}, so some microbatches must be masked, but a batch of type {type(batch).__name__} cannot carry "
            f"__valid__: return a Batch, dataclass or dict from encode_batch, {instead}"
        )
    return valid


def _check_masked(batch: Any) -> None:
    """Raise if a program cannot tell a masked microbatch from samples that it is to say are done."""
    _valid_of(batch, "keep_until_done: a step has fewer samples than the run has ranks", "or use one rank")


def _name_losses(spec: DatasetSpec, position: Position, process: int) -> None:
    if os.getpid() == process:
        name_losses(position, spec.failure_log, least=AT_END)


@cache
def _say_endless() -> None:
    """Say once that a loop over a training stream does not end by itself."""
    logger.warning(
        "an epoch of the data is over, and the stream goes on: a trainer ends at its last step%s; repeat=False or "
        "virtual_epoch_length=… of get_train_dataset end an iterator",
        called("max_steps"),
    )
