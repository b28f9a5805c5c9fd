"""The savable loader: delivers the microbatches of one rank and always knows the state of what it delivered.

Only the loader is stateful. It keeps the number of microbatches the whole run has delivered and, for each lane of its
rank, the state that came along with the lane's last delivered microbatch. What workers or threads have made ahead is
not part of it, so saving asks nobody anything and restoring replays nothing.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.data

from energon_bridge.errors import ConfigurationError, LoaderError
from energon_bridge.loader import document as doc
from energon_bridge.loader.processes import WorkerIterator, WorkerSource
from energon_bridge.loader.transport import Arena
from energon_bridge.loader.workers import Stream, WorkerTicks, identity, produced, set_up_worker, weak
from energon_bridge.plan.leaf import ORDER_VERSION
from energon_bridge.stream.finite import mask_loss
from energon_bridge.stream.pipeline import attach
from energon_bridge.stream.state import COUNTERS, LaneState, Produced
from energon_bridge.topology import Ownership, WorkerConfig, lane_units, step_units

if TYPE_CHECKING:
    from energon_bridge.loader.spec import DatasetSpec

logger = logging.getLogger(__name__)


class SavableDataLoader(torch.utils.data.DataLoader[Any]):
    """Loads the microbatches of one data-parallel rank; its position can be saved and restored.

    A training stream is endless, and every `iter()` goes on where the last one stopped. A validation stream is finite;
    every `iter()` starts it again (the first one after a restore goes on from there).

    Args:
        dataset: From `get_train_dataset` or `get_val_dataset`.
        worker_config: Default: the one the dataset was made with.
    """

    def __init__(self, dataset: DatasetSpec, *, worker_config: WorkerConfig | None = None) -> None:
        self.spec = dataset
        self.config = config = worker_config or dataset.worker_config
        self._units = dataset.units(config)
        workers = config.num_workers
        self._arenas: list[Arena | None] = [None] * workers
        ahead = config.prefetch_factor
        # Weak, so that a loader that is dropped goes at once, and its workers with it.
        stream, schedule, rewind = weak(self._stream), weak(self._schedule), weak(self._rewind)
        ticks = WorkerTicks(stream, schedule, rewind, max(1, workers), ahead, self._arenas)
        self._workers = WorkerSource(weak(self._start_workers), self._arenas, config.max_worker_restarts)
        super().__init__(
            ticks,
            batch_size=None,
            num_workers=workers,
            collate_fn=identity,
            prefetch_factor=ahead if workers else None,
            persistent_workers=bool(workers and dataset.finite and config.persistent_workers),
            multiprocessing_context="fork" if workers else None,
            generator=torch.Generator(),  # DataLoader draws a seed from it instead of the training loop's generator
        )
        self._pin = torch.cuda.is_available() if config.pin_memory is None else config.pin_memory
        self._microbatches = 0
        self._lanes: dict[int, LaneState] = {}
        self._counts = [[0] * len(COUNTERS) for _ in self._units.leaves]
        self._source: Iterator[Produced | None] | None = None
        self._held: deque[Produced] = deque()
        self._last: Any = None
        self._resumed = False
        self._pass = 0
        self._ownership = Ownership(self._units.num_lanes, config.dp_size, 0)
        self._say_what_is_idle()

    # Delivering ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its own iterator type
        if self.spec.finite:
            if not self._resumed or self._microbatches >= self.spec.num_microbatches:
                self._rewind()
                if not self._workers.another_pass(self):
                    self._stop()
            self._resumed = False
            self._pass += 1
        return _Iterator(self)

    def __len__(self) -> int:
        """Return the steps of a finite stream, or this rank's microbatches in an epoch of an endless one."""
        return self._units.steps if self.spec.finite else self.spec.epoch_length(self.config.dp_size)

    def deliver(self) -> Any:
        """Return the next microbatch of this rank."""
        if self.spec.finite:
            if self._microbatches >= self._units.steps * self.config.dp_size:
                raise StopIteration
            item = self._pull()
            step = self.config.dp_size
        else:
            lane = self._ownership.lane_in_step(self.config.dp_rank, self._microbatches)
            step = self._ownership.step_size(self._microbatches)
            if lane is None:
                self._microbatches += step
                return self._masked()
            item = self._held.popleft() if self._held else self._pull()
            assert item.state is not None
            self._lanes[lane] = item.state
        self._microbatches += step
        for leaf, counts in item.counts.items():
            self._counts[leaf] = [a + b for a, b in zip(self._counts[leaf], counts, strict=True)]
        if not self._ownership.even:
            self._last = item.batch
        return item.batch

    def _pull(self) -> Produced:
        if self._source is None:
            if self.config.num_workers:
                self._source = self._workers
            else:
                units = (unit for unit, _ in self._schedule())
                self._source = produced(self._stream(), units, self.config.prefetch_factor)
        assert self._source is not None
        try:
            item = next(self._source)
        except BaseException:
            self._stop()  # whatever comes next starts from the delivered state
            raise
        assert item is not None  # empty ticks are for DataLoader's round robin
        if self._pin:
            item.batch = torch.utils.data._utils.pin_memory.pin_memory(item.batch)
        return item

    def _masked(self) -> Any:
        """Return a microbatch that does not exist: real rows with the mask all false."""
        if self._last is None and not self._held:
            self._held.append(self._pull())
        batch = copy.copy(self._last if self._last is not None else self._held[-1].batch)
        valid = batch.get("__valid__") if isinstance(batch, dict) else getattr(batch, "__valid__", None)
        if valid is None:
            raise ConfigurationError(
                f"{self.config.dp_size} ranks do not divide {self._ownership.num_lanes} lanes, so some microbatches "
                f"must be masked, but a batch of type {type(batch).__name__} cannot carry __valid__: let encode_batch "
                "return a Batch, a dataclass or a dict, or use a number of ranks that divides num_lanes"
            )
        attach(batch, "__valid__", torch.zeros_like(valid))
        mask_loss(batch)
        return batch

    # Processes -------------------------------------------------------------------------------------------------------

    def _say_what_is_idle(self) -> None:
        """Warn of ranks and workers that the lanes of the run cannot keep busy."""
        if self.spec.finite:
            return
        lanes, ranks, workers = self._units.num_lanes, self.config.dp_size, self.config.num_workers
        if not self._ownership.even and self.config.dp_rank == 0:
            logger.warning(
                "%d data-parallel ranks do not divide %d lanes: %.0f %% of the microbatches are masked (the others are "
                "those of any number of ranks); %d ranks would waste none",
                ranks,
                lanes,
                100 * self._ownership.masked_share,
                self._ownership.nearest_even_world_size(),
            )
        busy = len(self._ownership.lanes_of(self.config.dp_rank))
        if workers > busy:
            logger.warning("only %d of %d workers have a lane: %d lanes, %d ranks", busy, workers, lanes, ranks)

    def _schedule(self) -> Iterator[tuple[int, int]]:
        """Give the units of this rank from the delivered position on, each with the number of its worker."""
        config = self.config
        if self.spec.finite:
            steps = range(self._microbatches, self._units.steps * config.dp_size, config.dp_size)
            return step_units(steps, config.dp_rank, max(1, config.num_workers))
        return lane_units(self._ownership, config.dp_rank, self._microbatches, max(1, config.num_workers))

    def _stream(self) -> Stream:
        """Build what makes the units in this process."""
        return self.spec.stream(self._units, self.config, self._lanes)

    def _rewind(self) -> None:
        """Go back to the beginning of a finite stream."""
        self._microbatches = 0

    def _start_workers(self) -> WorkerIterator:
        self._held.clear()
        # Fresh ones: new workers cannot know which blocks of the old arenas the trainer still holds.
        self._arenas[:] = [_arena() for _ in self._arenas]
        # The kernel ends the workers with the thread that forks them, which must live as long as this process.
        lasting = threading.current_thread() is threading.main_thread()
        self.worker_init_fn = functools.partial(set_up_worker, die_with_parent=lasting)
        return WorkerIterator(self)

    def _stop(self) -> None:
        self._workers.stop()
        if self._source is not None and self._source is not self._workers:
            self._source.close()  # type: ignore[attr-defined]  # a generator
        self._source = None
        self._held.clear()

    def close(self) -> None:
        """Stop workers and threads; the next batch starts them again."""
        self._stop()

    def __del__(self) -> None:
        if "_source" in self.__dict__:
            self._stop()

    # State -----------------------------------------------------------------------------------------------------------

    def save_state_rank(self) -> doc.State:
        """Return the state of this rank: its lanes as delivered. Takes no communication."""
        lanes = [] if self.spec.finite else self._ownership.lanes_of(self.config.dp_rank)
        states = {lane: self._lanes.get(lane) or LaneState.fresh(len(self._counts)) for lane in lanes}
        return {
            "format": doc.FORMAT,
            "format_version": doc.FORMAT_VERSION,
            "order_version": ORDER_VERSION,
            "kind": self.spec.kind,
            "num_lanes": self._units.num_lanes,
            "microbatches": self._microbatches,
            "settings": dict(self._units.settings),
            "leaves": doc.write_leaves(self._units.table, self._counts),
            "lanes": doc.write_lanes(states),
        }

    def restore_state_rank(self, state: doc.State | Sequence[doc.State]) -> None:
        """Continue from a state: that of this rank, a global one, or a list of states of several ranks.

        The number of ranks and workers may differ from those that saved it.

        Raises:
            StateError: One of its subclasses, saying what does not fit.
        """
        document = doc.merge(state) if isinstance(state, (list, tuple)) else doc.check_format(state)
        saved_lanes = document["num_lanes"]
        if self.spec.finite:  # has no lanes: its microbatches are numbered alike on every number of ranks
            saved_lanes = self._units.num_lanes
        units = self._units if saved_lanes == self._units.num_lanes else self.spec.units(self.config, saved_lanes)
        doc.check_fits(document, self.spec.kind, units.settings, units.table)
        microbatches = document["microbatches"]
        ownership = Ownership(saved_lanes, self.config.dp_size, microbatches)
        lanes = doc.read_lanes(document)
        if not self.spec.finite:
            doc.check_lanes(lanes, ownership.lanes_of(self.config.dp_rank), microbatches, saved_lanes)
        if self.config.num_lanes not in (None, saved_lanes):
            logger.info(
                "num_lanes=%d comes from the state; the configuration says %s", saved_lanes, self.config.num_lanes
            )
        self._stop()
        resized = units.num_lanes != self._units.num_lanes
        self._units, self._ownership, self._lanes = units, ownership, lanes
        if resized:
            self._say_what_is_idle()
        self._microbatches, self._last, self._resumed = microbatches, None, True
        # Counts belong to the run: one rank carries what several had counted.
        whole = len(lanes) == len(ownership.lanes_of(self.config.dp_rank))
        keep = whole or self.config.dp_rank == 0
        if keep:
            self._counts = [list(leaf["counts"].values()) for leaf in doc.read_leaves(document)]
        else:
            self._counts = [[0] * len(COUNTERS) for _ in units.leaves]

    def save_state_global(self, global_dst_rank: int | None = None) -> doc.State | None:
        """Return the state of the whole run; every rank must call it.

        Args:
            global_dst_rank: Only this global rank gets the state (others None); default: every rank gets it.
        """
        own = self.save_state_rank()
        if self.config.dp_size == 1:
            return own
        if not torch.distributed.is_initialized():
            raise LoaderError(
                f"save_state_global needs torch.distributed to reach the other {self.config.dp_size - 1} ranks: save "
                "save_state_rank() of every rank and give the list of them to restore_state_rank"
            )
        states: list[Any] = [None] * self.config.dp_size
        torch.distributed.all_gather_object(states, own, group=self.config.data_parallel_group)
        if global_dst_rank is not None and torch.distributed.get_rank() != global_dst_rank:
            return None
        return doc.merge(states)

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
            raise ConfigurationError("restore_state_global: no state given, and no src_rank that would send one")
        self.restore_state_rank(state)

    def state_dict(self) -> doc.State:
        """Return the state of the whole run where the ranks can reach each other, else of this rank."""
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
        pipeline = self.spec.pipeline(self._units, self.config, threads=0)
        return pipeline.restore(tuple(restore_key))


class _Iterator:
    """What `iter(loader)` returns; a finite one ends when a later pass begins."""

    def __init__(self, loader: SavableDataLoader) -> None:
        self._loader = loader
        self._pass = loader._pass

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._loader._pass != self._pass:
            raise StopIteration
        return self._loader.deliver()


def _arena() -> Arena | None:
    try:
        return Arena()
    except OSError:  # no address space to spare: batches cross as memory files
        return None
