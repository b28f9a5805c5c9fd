"""The savable loader: delivers the microbatches of one rank and always knows the state of what it delivered.

Only the loader is stateful. Its `Position` has the number of microbatches the whole run has delivered and, for each
lane of its rank, the state that came along with the lane's last delivered microbatch. What workers or threads have made
ahead is not part of it, so saving asks nobody anything and restoring replays nothing.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from types import GenericAlias
from typing import Any, ClassVar, NoReturn, get_args

import torch
import torch.utils.data

from energon_bridge.core.errors import ConfigurationError, ForkedLoaderError, WrongUseError, check_choice
from energon_bridge.core.loader import document as doc
from energon_bridge.core.loader.copies import Copies
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.fits import read_all
from energon_bridge.core.loader.metrics import AT_ANY_TIME, AT_END, AT_EPOCH, check_rates, flat_metrics, name_losses
from energon_bridge.core.loader.no_dataloader import DATASET_IS_NO_LOADER, NotForDataLoader
from energon_bridge.core.loader.opening import open_pipeline
from energon_bridge.core.loader.pool import Engine, WorkerPool
from energon_bridge.core.loader.position import EndlessRun, FinitePass, OnMismatch, Position
from energon_bridge.core.loader.ranks import merged_state
from energon_bridge.core.loader.run_data import epochs_by_leaf
from energon_bridge.core.loader.run_plan import IN_BUFFERS, plan_run
from energon_bridge.core.loader.workers import LocalProcesses, Work, keep_freed_memory
from energon_bridge.core.order.topology import Ownership
from energon_bridge.core.registry import load
from energon_bridge.core.samples.showing import counted, described
from energon_bridge.core.storage.store import REQUESTS
from energon_bridge.core.stream.again import describe, restore
from energon_bridge.core.stream.conventions import attach
from energon_bridge.core.stream.finite import mask_loss
from energon_bridge.core.stream.lane import Production
from energon_bridge.core.stream.leaf import Leaf
from energon_bridge.core.stream.pipeline import Pipeline
from energon_bridge.core.stream.state import LaneBatch
from energon_bridge.core.stream.watchdog import WatchdogSettings
from energon_bridge.core.worker_config import WorkerConfig, available_cores, trainer_groups

logger = logging.getLogger(__name__)

LOADER_IS_NO_DATASET = (
    "a loader of energon_bridge gives whole batches, in an order of its own, and starts the workers itself: iterate it "
    "as it is, `for batch in loader`, and not through torch.utils.data.DataLoader(loader). The number of samples in a "
    "batch goes to get_train_dataset(batch_size=…), that of workers to WorkerConfig(num_workers=…)"
)


class SavableDataLoader(NotForDataLoader, torch.utils.data.DataLoader[Any]):
    """Loads the microbatches of one data-parallel rank; its position can be saved and restored.

    Examples:
        >>> loader = get_savable_loader(get_train_dataset("data/captions", batch_size=4))
        >>> for step, batch in zip(range(3), loader):
        ...     pass
        >>> loader.metrics()["samples"]
        12
        >>> loader.seek(1000)  # at once: the order is arithmetic

    A training stream is endless, and every `iter()` continues where the last one stopped; with `repeat=False` it ends
    after each pass, and with a virtual epoch after so many steps. A validation stream is finite; every `iter()` starts
    it again (the first one after a restore continues from there).

    Args:
        dataset: From `get_train_dataset` or `get_val_dataset`.
        worker_config: Default: the one the dataset was made with.
        on_mismatch: What becomes of a state of another mix: "refuse" it, or "adapt" to it.
        watchdog: How long a microbatch may take; None: as long as it likes.
    """

    _refusal: ClassVar[str] = LOADER_IS_NO_DATASET
    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # annotations of energon users give it type arguments

    def __init__(
        self,
        dataset: DatasetSpec,
        *,
        worker_config: WorkerConfig | None = None,
        on_mismatch: OnMismatch = "refuse",
        watchdog: WatchdogSettings | None = None,
    ) -> None:
        self.watchdog = watchdog
        self.spec = dataset
        self.config = config = worker_config or dataset.worker_config
        self.on_mismatch = on_mismatch
        check_choice("on_mismatch", on_mismatch, get_args(OnMismatch))
        for groups in trainer_groups():
            groups.check_data_parallel(config.dp_rank, config.dp_size, by_group=config.data_parallel_group is not None)
        dataset.check_types()
        self._position: Position = (FinitePass if dataset.ends else EndlessRun)(plan_run(dataset, config))
        workers = config.num_workers
        with warnings.catch_warnings():
            # DataLoader would say of every loader that the machine has fewer cores; `_say_what_is_idle` does, once.
            warnings.filterwarnings("ignore", message="This DataLoader will create .* worker processes")
            # Trainers ask whether a loader is a DataLoader, and of one for these. Nothing of DataLoader's ever runs.
            super().__init__(
                _NoSamples(),
                batch_size=None,
                num_workers=workers,
                prefetch_factor=config.prefetch_factor if workers else None,
                persistent_workers=bool(workers and dataset.ends and config.persistent_workers),
            )
        self._pool = self._new_pool()
        self._began = 0
        self._process = 0
        self._pin = torch.cuda.is_available() if config.pin_memory is None else config.pin_memory
        self._copies = Copies(self._pin, config.device) if self._pin or config.device is not None else None
        self._source: Iterator[LaneBatch] | None = None
        self._held: deque[LaneBatch] = deque()
        self._last: Any = None
        self._resumed = False
        self._pass = 0
        self._used_last: object = None  # the mark of an iterator, which itself would form a circle
        self._seconds = [0.0] * (3 + len(REQUESTS))
        self._steps = 0
        self._epoch_length = dataset.epoch_length(config.dp_size)
        # Runs that nobody closes end with the loader or with the process; a worker's copy of the loader is no run.
        weakref.finalize(self, _name_losses, dataset, self._position, os.getpid())
        self._say_what_is_idle()

    # Delivering ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its own iterator type
        self._check_process()
        position = self._position
        if isinstance(position, FinitePass):
            in_order = not self.spec.shuffled  # validation starts again, training continues
            if position.is_over or (in_order and not self._resumed):
                position.rewind()
                # Workers that run on have the listing of the pass that they were started in.
                listed = self.spec.shuffled and self.spec.listed
                self._began = 0
                if listed or not (self.persistent_workers and self._pool.again(self._due())):
                    self._stop()
            self._resumed = False
            self._pass += 1
        virtual = self.spec.settings.virtual_epoch_length
        if virtual is not None and position.epoch_steps >= virtual:
            position.epoch_steps = 0
        return _Iterator(self)

    def __len__(self) -> int:
        """Return the steps of a finite stream or virtual epoch, or this rank's microbatches in an epoch of the data."""
        known = self.spec.settings.conventions.listing_has_length or not self.spec.listed

        def end() -> int:
            position = self._position
            if known and isinstance(position, FinitePass):
                return position.end
            return plan_run(self.spec, self.config).end_of_pass(0)

        return self.spec.num_batches(self.config.dp_size, end)

    def __reduce__(self) -> NoReturn:
        raise WrongUseError(
            "a loader cannot be pickled or copied, because it has workers and open files. Send its path, settings and "
            "WorkerConfig, and call get_savable_loader there. To send its position too, send the plain dict of "
            "loader.save_state_rank() and pass it to loader.restore_state_rank"
        )

    def __repr__(self) -> str:
        config = self.config
        position = self._position
        done = f"{counted(position.microbatches, 'microbatch', 'microbatches')} delivered by the run"
        lanes = "" if self.spec.ends else f", {counted(position.plan.num_lanes, 'lane')}"
        return described(
            f"{type(self).__name__} of rank {config.dp_rank} of {config.dp_size}, "
            f"{counted(config.num_workers, 'worker')}{lanes}, {done}",
            [repr(self.spec)],
        )

    def deliver(self) -> Any:
        """Return the next microbatch of this rank."""
        self._check_process()
        position = self._position
        virtual = self.spec.settings.virtual_epoch_length
        if virtual is not None and position.epoch_steps >= virtual:
            raise StopIteration
        while not position.is_over:
            if position.is_masked:
                position.advance()
                return self._masked()
            item = self._taken()
            position.take(item)
            position.advance()
            position.counts.add(item.counts)
            if not position.ownership.even:
                self._last = item.batch
            self._steps += 1
            if self._ends_an_epoch():
                self._name_losses(AT_EPOCH)
                if not self.spec.ends and virtual is None and not self.config.dp_rank:
                    _say_endless()
            if item.rows or self.spec.settings.conventions.masks:
                if self._copies is not None:
                    self._copy_ahead()
                return item.batch
        raise StopIteration

    def _ends_an_epoch(self) -> bool:
        """Whether the pass, the virtual epoch, or the epoch of the data is over with the microbatch just delivered."""
        position = self._position
        virtual = self.spec.settings.virtual_epoch_length
        if virtual is not None:
            return position.epoch_steps >= virtual
        return position.is_over if self.spec.ends else not self._steps % self._epoch_length

    def _pull(self) -> LaneBatch:
        try:
            if self._source is None:
                self._source = self._opened()
            item = next(self._source)
        except BaseException:
            self._stop()  # whatever comes next starts from the delivered state
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
            self._finish_copy(item)
        except BaseException:
            self._stop()
            raise
        for number, more in enumerate(item.seconds):
            self._seconds[number] += more
        return self._held.popleft()

    def _finish_copy(self, item: LaneBatch) -> None:
        if self._copies is not None and isinstance(item.batch, Future):
            item.batch = self._copies.end(item.batch)

    def _copy_ahead(self) -> None:
        """Begin to copy the next microbatch if a worker has made it, while the trainer has the one before."""
        if self.spec.ends or self._held or self._source is not self._pool:
            return
        # What it raises is met again, and raised, when that microbatch is due: the one before is delivered.
        with contextlib.suppress(Exception):
            if self._pool.next_is_ready():
                self._held.append(self._pull())

    def _report(self, item: LaneBatch) -> None:
        """Say which samples failed on the way to a microbatch, and judge whether they are too many."""
        spec = self.spec
        config = self.config
        position = self._position
        spec.failure_log.write(item.reports, config.dp_rank, config.dp_size)
        check_rates(position, item, spec.settings.error_policy, spec.failure_log)

    def _name_losses(self, least: int) -> None:
        """Warn of datasets that have lost much, each once."""
        name_losses(self._position, self.spec.failure_log, least=least)

    def _masked(self) -> Any:
        """Return a microbatch that does not exist: real rows with the mask all false."""
        if self._last is None and not self._held:
            self._held.append(self._pull())
        if self._held:
            self._finish_copy(self._held[-1])
        batch = copy.copy(self._last if self._last is not None else self._held[-1].batch)
        valid = batch.get("__valid__") if isinstance(batch, dict) else getattr(batch, "__valid__", None)
        if valid is None:
            raise ConfigurationError(
                f"{self.config.dp_size} ranks do not divide {self._position.plan.num_lanes} lanes, so some "
                f"microbatches must be masked, but a batch of type {type(batch).__name__} cannot carry __valid__: "
                "return a Batch, dataclass or dict from encode_batch, or use a number of ranks that divides num_lanes"
            )
        attach(batch, "__valid__", torch.zeros_like(valid))
        mask_loss(batch)
        return batch

    @property
    def ownership(self) -> Ownership:
        """Which rank delivers which lane, for the run as it was started or last restored."""
        return self._position.ownership

    @property
    def microbatches(self) -> int:
        """Microbatches that the whole run has delivered; of a finite stream, in this pass."""
        return self._position.microbatches

    @property
    def make_seconds(self) -> float:
        """Time that all processes took for the microbatches delivered since this loader was made."""
        return self._seconds[0]

    @property
    def pins(self) -> bool:
        """Whether batches are copied to pinned memory."""
        return self._pin

    # Processes -------------------------------------------------------------------------------------------------------

    def _say_what_is_idle(self) -> None:
        """Warn of ranks and workers that the lanes of the run, or the cores of the machine, cannot keep busy."""
        if self.config.dp_rank == 0:
            _say_crowded(self.config.num_workers, available_cores())
        if self.spec.ends:
            return
        ownership = self._position.ownership
        workers = self.config.num_workers
        lanes = ownership.num_lanes
        ranks = ownership.world_size
        nearest = ownership.nearest_even_world_size()
        self.spec.settings.conventions.check_ranks(ownership)
        if not ownership.even and self.config.dp_rank == 0:
            logger.warning(
                "%d data-parallel ranks do not divide %d lanes, so %.0f %% of the microbatches are masked (the others "
                "do not change); %d ranks would waste none",
                *(ranks, lanes, 100 * ownership.masked_share, nearest),
            )
        if self.spec.buckets is not None and self.config.dp_rank == 0:
            _say_repeated(self.spec.buckets.smaller(self.config.microbatches_per_global_batch or lanes))
        buffer = self.spec.settings.packing_buffer_size
        if buffer is not None and self.config.dp_rank == 0 and self._position.plan.packs_by_epoch:
            shortest, leaf = min(epochs_by_leaf(self.spec), key=lambda each: each[0])
            if lanes > 1 and IN_BUFFERS * lanes * buffer > shortest:
                streams = self._position.plan.streams
                mixed = len(self.spec.ordered) > 1
                _say_small(leaf.dataset.path, int(shortest), lanes, streams, buffer, mixed)
        busy = len(self._position.own_lanes)
        if workers > busy:
            shared = counted(lanes, "lane"), counted(ranks, "rank")
            logger.warning("only %d of %d workers have a lane to load: %s, %s", busy, workers, *shared)

    def _due(self) -> Iterator[tuple[int, int]]:
        """Give the units of this rank from the delivered position on, each with the number of its worker."""
        return self._position.units(self._began)

    def _opened(self) -> Iterator[LaneBatch]:
        """Start making the units from the delivered position on, here or in workers."""
        self._held.clear()
        self._process = os.getpid()
        self._began = self._position.microbatches
        if self.config.num_workers:
            self._pool.begin(self._due())
            return self._pool
        keep_freed_memory()
        units = (unit for unit, _ in self._due())
        stream = self._position.stream(self.watchdog)
        return Production(stream, units, self.config.prefetch_factor)

    def _new_pool(self) -> WorkerPool:
        config = self.config
        pool = WorkerPool
        engine: Engine = LocalProcesses(config.start_method)
        if config.worker_engine != "process":
            workers = load("workers", str(config.worker_engine))
            engine, pool = workers(config, self.watchdog, finite=self.spec.ends)
        return pool(
            self,
            config.num_workers,
            engine=engine,
            max_restarts=config.max_worker_restarts,
            watchdog=self.watchdog,
            where=f"rank {config.dp_rank}",
        )

    def work(self, worker: int, barred: frozenset[tuple[int, int]], careful: bool) -> Work:
        position = self._position.for_worker()
        for item, (lane, _) in zip(self._held, self._due(), strict=False):
            assert item.state is not None  # only endless streams hold something back
            position.lanes[lane] = item.state
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
        return self._position.plan.leaves

    @property
    def _is_foreign(self) -> bool:
        """Whether another process, of which this one is a fork, has started what makes the units."""
        return self._source is not None and self._process != os.getpid()

    def _check_process(self) -> None:
        if self._is_foreign:
            raise ForkedLoaderError(
                f"this loader delivers in process {self._process}; this is process {os.getpid()}, a fork without its "
                "workers and threads. Make a loader in this process and restore the state of the other, or call "
                "close() on this copy, which then starts its own workers from its current position"
            )

    def _stop(self) -> None:
        if isinstance(self._source, Production) and not self._is_foreign:
            self._source.close()
        self._stop_workers()
        self._source = None
        self._held.clear()

    def _stop_workers(self) -> None:
        if self._is_foreign:  # nothing of it is this process's to stop
            self._pool.forget()
        elif self.config.num_workers:
            self._pool.stop()

    def close(self) -> None:
        """Stop workers and threads; the next batch starts them again."""
        self._stop()
        if self._copies is not None:
            self._copies.close()
        self._name_losses(AT_END)

    def __del__(self) -> None:
        # Threads end with their `Production`; the garbage collector may call this on one that must not wait for them.
        # At the interpreter's end no workers are left (`pool` has stopped them), and modules may be gone already.
        if "_source" in self.__dict__ and self._pool.has_workers:
            self._stop_workers()

    # State -----------------------------------------------------------------------------------------------------------

    def save_state_rank(self) -> doc.State:
        """Return the state of this rank: its lanes as delivered. Takes no communication."""
        return self._position.document()

    def snapshot(self) -> Callable[[], doc.State]:
        """Return a function that returns the state of this rank as it is now; it costs little until it is called."""
        return self._position.copied().document

    def counters(self) -> list[doc.State]:
        """Return what each leaf gave to this rank since the run began: a row of plain values for each.

        A sample counts when its microbatch is delivered, not when a worker has made it. A state keeps the counters, and
        `seek` clears them. From a state of all ranks rank 0 continues the sum of their counters, the other ranks begin
        at 0: so sums over the ranks are those of the run. `draws` and `epochs` are of the lanes of this rank.

        Returns:
            Per leaf: `path`, `num_samples`; `draws`, `epochs` (draws / num_samples); `samples` delivered; `skipped`,
            `errors`, `excluded`, `banned`; `bytes` of the samples drawn; too long for a pack: `dropped`, `truncated`,
            `split`, `pieces`; `encoded_again`, of this loader alone; and what `leaf_rows` names besides.
        """
        return self._position.rows()

    def metrics(self) -> dict[str, float]:
        """Return what this rank did so far as plain numbers by name; `flat_metrics` describes the others.

        Returns:
            Samples: `samples` delivered, `skipped` (SkipSample), `errors`, `excluded`, `banned`; too long for a pack:
            `dropped` (also skipped), `truncated`, `split`, and the `pieces` of the split ones. `bytes` of the samples
            drawn. `ready`: microbatches made and not yet taken. Times end in `_seconds`, sizes in `_bytes`.
        """
        self._name_losses(AT_ANY_TIME)
        return flat_metrics(self.counters(), self._pool, self._seconds)

    def restore_state_rank(
        self, state: doc.State | Sequence[doc.State], *, on_mismatch: OnMismatch | None = None
    ) -> None:
        """Continue from a state: that of this rank, a global one, or a list of states of several ranks.

        The number of ranks and workers may differ from those that saved it.

        Args:
            state: The state, or the states.
            on_mismatch: "refuse" a state of another mix, or "adapt": leaves that are in both continue exactly, new
                ones start, and those that are gone are kept in the state and continue if they return; a blend by
                repetitions begins an epoch. Default: what the loader was made with.

        Raises:
            StateError: One of its subclasses, saying what does not fit.
        """
        if on_mismatch is not None:
            check_choice("on_mismatch", on_mismatch, get_args(OnMismatch))
        saved = read_all(state if isinstance(state, (list, tuple)) else [state])
        before = self._position.plan.num_lanes
        self._position.go_on_from(saved, on_mismatch or self.on_mismatch)
        self._stop()
        self._last = None
        self._resumed = True
        if self._position.plan.num_lanes != before:
            self._say_what_is_idle()

    def seek(self, step: int) -> None:
        """Go to a step of the run, as if no sample before it had been skipped; only arithmetic, nothing is read."""
        self._position.seek(step)
        self._stop()
        self._last = None
        self._resumed = True

    def set_weights(self, weights: Mapping[str, Any] | Sequence[Any], *, from_draw: int | None = None) -> int:
        """Change the weights of a blend while it runs; the change is part of the state. All ranks must call it alike.

        Args:
            weights: A weight (a number or a `WeightSchedule`) for each dataset, by path, or a list in order of the mix.
            from_draw: Global draw from which they hold, until a later change that was set before; default: the first
                one that no rank has made. What was drawn for packs and groups counts as made; how far that goes
                depends on the microbatches delivered, and not on stops.

        Returns:
            The global draw from which they hold.

        Raises:
            ConfigurationError: That draw has been made, the stream has no weights, or a dataset has none.
        """
        start = self._position.set_weights(weights, from_draw)
        self._stop()  # batches made ahead used the old weights
        return start

    def ban(
        self,
        keys: Iterable[str],
        *,
        from_draw: int | None = None,
        dataset: str | None = None,
        ignore_unknown: bool = False,
    ) -> int:
        """Withdraw samples during the run; the state records it. All ranks must call it alike.

        Draws whose samples are banned are made and counted (`banned`), but nothing is read for them, and no other draw
        moves. What was drawn before, and waits in a pack buffer or a group, still comes. Keys that are banned already
        are no mistake. A state that is restored brings its own bans.

        Args:
            keys: Keys of samples as they are in the dataset; of a JSONL file the numbers of lines, of a join the keys
                of its primary. `load_keys` reads them from a file.
            from_draw: Global draw from which they are banned (of draws that were made, nothing is taken back, and a
                warning names the first one left); default: the first one that some lane has not made. Passes that are
                packed or grouped: from the next pass on. Validation takes none: there they are banned at once.
            dataset: Path of the only dataset in which they are banned; default: all.
            ignore_unknown: Warn of keys that no dataset has, and record them, instead of refusing all.

        Returns:
            The global draw from which they are banned.

        Raises:
            ConfigurationError: A key is unknown, or the ranks cannot agree on a draw.
            EmptyDatasetError: Nothing would be left.
        """
        before = self._position.plan
        start = self._position.ban(keys, from_draw, dataset, ignore_unknown)
        if self._position.plan is not before:
            self._stop()  # batches made ahead contain them, and so does the one that a masked microbatch would repeat
            self._last = None
        return start

    def save_state_global(self, global_dst_rank: int | None = None) -> doc.State | None:
        """Return the state of the whole run; every rank must call it.

        Args:
            global_dst_rank: Only this global rank gets the state (others None); default: every rank gets it.
        """
        return merged_state(
            self.save_state_rank(), self.config.dp_size, self.config.data_parallel_group, global_dst_rank
        )

    def restore_state_global(self, state: doc.State | None, *, src_rank: int | None = None) -> None:
        """Continue from the state of a whole run.

        Args:
            state: The state; with `src_rank` needed on that global rank only.
            src_rank: Global rank that sends the state to the other ranks of the data-parallel group.
        """
        if src_rank is not None and self.config.dp_size > 1:
            box = [state]
            torch.distributed.broadcast_object_list(box, src=src_rank, group=self.config.data_parallel_group)
            state = box[0]
        if state is None:
            raise ConfigurationError("restore_state_global: pass a state, or the src_rank that sends one")
        self.restore_state_rank(state)

    def state_dict(self) -> doc.State:
        """Return the state of the whole run if the ranks can reach each other, else of this rank."""
        if self.config.dp_size > 1 and not torch.distributed.is_initialized():
            return self.save_state_rank()
        state = self.save_state_global()
        assert state is not None
        return state

    def load_state_dict(self, state: doc.State) -> None:
        """Continue from what `state_dict` returned, on any number of ranks."""
        self.restore_state_rank(state)

    # Samples ---------------------------------------------------------------------------------------------------------

    def can_restore_sample(self) -> bool:
        """Whether `restore_sample` works: always."""
        return True

    def restore_sample(self, restore_key: tuple[Any, ...]) -> Any:
        """Return the batch or sample with a `__restore_key__`, encoded again: the identical one."""
        return restore(self._pipeline(), tuple(restore_key))

    def describe_restore_key(self, restore_key: tuple[Any, ...]) -> str:
        """Name the samples of the `__restore_key__` of a batch or sample: dataset, shard and key of each."""
        return describe(self._pipeline(), tuple(restore_key))

    def _pipeline(self) -> Pipeline:
        plan = self._position.plan
        return open_pipeline(plan, threads=0, delivered=range(len(plan.leaves)))


class _Iterator:
    """What `iter(loader)` returns; a finite one ends when a later pass begins.

    Several over one endless stream share its microbatches. With a virtual epoch each takes those that its epoch had
    left when it was first used, as with megatron-energon; the state has the epoch of the one that was used last.
    """

    def __init__(self, loader: SavableDataLoader) -> None:
        self._loader = loader
        self._pass = loader._pass
        self._mark = object()
        self._epoch_steps: int | None = None  # of its virtual epoch; None: not used yet

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        loader = self._loader
        if loader._pass != self._pass:
            raise StopIteration
        virtual = loader.spec.settings.virtual_epoch_length
        position = loader._position
        if virtual is None or loader.spec.ends:
            return loader.deliver()
        if self._epoch_steps is None:
            position.epoch_steps %= virtual
        elif loader._used_last is not self._mark:
            position.epoch_steps = self._epoch_steps
        loader._used_last = self._mark
        try:
            return loader.deliver()
        finally:
            self._epoch_steps = position.epoch_steps


def _name_losses(spec: DatasetSpec, position: Position, process: int) -> None:
    if os.getpid() == process:
        name_losses(position, spec.failure_log, least=AT_END)


class _NoSamples(torch.utils.data.IterableDataset[Any]):
    """The `dataset` of a loader, for trainers that ask: no sampler can be put in its place, and it has no samples."""

    def __iter__(self) -> NoReturn:
        raise WrongUseError(DATASET_IS_NO_LOADER)


@cache
def _say_endless() -> None:
    """Say once that a loop over a training stream does not end by itself."""
    logger.warning(
        "an epoch of the data is over, and the stream goes on: a trainer ends at its last step (train.max_steps of a "
        "configuration); repeat=False or virtual_epoch_length=… of get_train_dataset end an iterator"
    )


@cache
def _say_repeated(small: tuple[str, ...]) -> None:
    """Warn once of buckets smaller than a global batch."""
    if small:
        logger.warning(
            "group_by: %s: a global batch repeats their samples. Make the tiers wider, lower bucket_batch_size, or "
            "leave them out by a filter",
            "; ".join(small[:3]) + f"; and {len(small) - 3} more" * (len(small) > 3),
        )


@cache
def _say_small(path: str, draws: int, lanes: int, buffers: int, size: int, mixed: bool) -> None:
    """Warn once of buffers that together hold much of an epoch of a dataset, `draws` samples of the run."""
    consequence = (
        f"So the lanes share {counted(buffers, 'buffer')}, and a process encodes all samples of its lanes' buffers: "
        f"with more than {counted(buffers, 'process', 'processes')}, some do the same work"
        + "; samples of later epochs still come early"
        * (mixed and IN_BUFFERS * buffers * size > draws)
        if buffers < lanes
        else "Packs are filled from small parts of an epoch, and in a mix samples of later epochs come early"
    )
    logger.warning(
        "%s is small for packing: %d lanes with packing_buffer_size=%d are more than an eighth of its epoch of %s. %s. "
        "Fewer lanes (num_lanes of WorkerConfig or the data module, at least one for each rank) or a smaller buffer "
        "avoid it",
        *(path, lanes, size, counted(draws, "sample"), consequence),
    )


@cache
def _say_crowded(workers: int, cores: int) -> None:
    """Warn once of more workers than there are cores."""
    if workers > cores:
        logger.warning(
            "num_workers=%d, but this process may use %s: more workers only slow each other down. Set num_workers "
            "to %d or less, or give the process more cores (--cpus-per-task of SLURM, the limits of a container)",
            workers,
            counted(cores, "core"),
            cores,
        )
