"""Lanes: the L endless streams of a run, each from its order to its microbatches; and how a process makes them.

A lane depends only on its number, its state and the pipeline, so whoever owns it gets the same microbatches; and its
state after microbatch m is a function of m, wherever the run was stopped. A lane is a list of stages (`stages_of`):
draws (`draws.py`) become encoded samples; samples become packs, or microbatches by length
(`pack_buffer.py`, `dealt_packs.py` where lanes share a buffer); and samples or packs become groups (`grouping.py`).
With buckets, `bucket_draws.py` has draws and packs of each in one stage.
What the last stage gives becomes batches here.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from typing import Any, Protocol

from energon_bridge.core.errors import HookTimeoutError
from energon_bridge.core.order.choose import AnyBlend, has_buckets
from energon_bridge.core.samples.sample_place import kept
from energon_bridge.core.stream.bucket_draws import BucketDraws
from energon_bridge.core.stream.dealt_packs import SharedBuffers, dealt_stages
from energon_bridge.core.stream.draws import Draws
from energon_bridge.core.stream.grouping import Grouping
from energon_bridge.core.stream.lane_state import BufferedRefs, Counts, LaneBatch, LaneState, Stage
from energon_bridge.core.stream.pack_buffer import ByLength, Packing, pack_rules
from energon_bridge.core.stream.pipeline import Pipeline
from energon_bridge.core.stream.rows import BatchRow, Taken, taken_of, waiting_rows

_BARREN = 1000
"""Microbatches in a row that hooks may skip or fail on before the stream counts as barren."""


class LaneStage(Protocol):
    """One stage of a lane: `stages_of` says which there are."""

    def take(self, counts: Counts) -> Taken:
        """Return the samples or packs of the next microbatch."""

    def made_again(self, rows: list[BatchRow], counts: Counts) -> list[BatchRow]:
        """Encode rows of a restored state again; return them without those that no longer encode."""

    def waiting(self) -> BufferedRefs:
        """Return the rows that wait here, as references."""

    def fields(self) -> Mapping[str, Any]:
        """Return the values of this stage in the state of the lane, by field of `LaneState`."""

    def settle(self, counts: Counts) -> None:
        """Get ready for the next microbatch, after one was delivered and before the state is taken."""


def stages_of(
    number: int, pipeline: Pipeline, blend: AnyBlend | None, state: LaneState, buffers: SharedBuffers | None
) -> tuple[Draws | BucketDraws, Sequence[LaneStage]]:
    """Return the draws of a lane, and all its stages in order, beginning with these: each takes from the one before."""
    if has_buckets(blend):
        of_buckets = BucketDraws(number, pipeline, blend, state)
        return of_buckets, [of_buckets]  # settings refuse groups beside them
    draws: Draws
    if buffers is not None:
        draws, packing = dealt_stages(number, pipeline, blend, state, buffers)
        stages: list[Draws | Packing] = [draws, packing]
    else:
        draws = Draws(number, pipeline, blend, state)
        stages = [draws]
        if pipeline.settings.run.packing_buffer_size:
            rules = pack_rules(pipeline.leaves, blend, number, by_epoch=pipeline.settings.packs_by_epoch)
            stages.append((ByLength if pipeline.own.by_length else Packing)(draws, pipeline, state, rules))
    if pipeline.own.groups:
        return draws, [*stages, Grouping(stages[-1], pipeline, waiting_rows(state, Stage.GROUP))]
    return draws, stages


class Lane:
    """One lane, continued from a state.

    Args:
        number: Lane number, below L.
        pipeline: Shared by all lanes of the process.
        blend: Says which leaf a draw comes from; None if there is one leaf.
        state: Where to continue.
        buffers: Those that lanes share, if they do.
    """

    def __init__(
        self,
        number: int,
        pipeline: Pipeline,
        blend: AnyBlend | None,
        state: LaneState,
        buffers: SharedBuffers | None = None,
    ) -> None:
        self.number = number
        self._pipeline = pipeline
        self._microbatches = state.microbatches
        self._draws, self._stages = stages_of(number, pipeline, blend, state, buffers)
        # Batches that the hooks made from `_batched`, until all of them are delivered.
        self._batches: deque[Any] = deque()
        self._batches_taken = state.batches_taken
        self._batched = waiting_rows(state, Stage.BATCH)

    def prepare(self, microbatches: int) -> None:
        """Start loading the draws that the next microbatches will probably need."""
        self._draws.prepare(microbatches)

    def produce(self) -> LaneBatch:
        """Return the next microbatch and the state of the lane after it."""
        counts = Counts()
        with self._pipeline.user_code():
            attempts = 0
            while not self._batches:
                if attempts > _BARREN:
                    self._draws.give_up_if_barren()
                self._make(counts)
                attempts += 1
            batch = self._batches.popleft()
            self._batches_taken += 1
            if not self._batches:
                self._batched = []
                self._batches_taken = 0
            self._microbatches += 1
            for stage in reversed(self._stages):
                stage.settle(counts)
        return LaneBatch(batch, self._draws.rows, self._state(), counts)

    def _make(self, counts: Counts) -> None:
        """Make the next batches; none if a hook skips the rows or fails."""
        pipeline = self._pipeline
        last = self._stages[-1]
        skip = self._batches_taken if self._batched else 0
        number = self._microbatches - skip
        pipeline.begin(self.number, number)
        if self._batched:  # restored: batches that were delivered are not made again, and were counted
            taken = taken_of(pipeline, last.made_again(self._batched, counts))
            counts = Counts()
        else:
            taken = last.take(counts)
        batches = pipeline.batches(taken.samples, taken.keys, taken.leaves, self.number, number, counts)
        self._batches.extend(batches[skip:])
        self._batched = taken.rows() if len(self._batches) > 1 else []
        self._batches_taken = skip if self._batches else 0
        for row in self._batched:
            row.content = None

    def _state(self) -> LaneState:
        held = [stage.waiting() for stage in self._stages]
        if self._batched:
            held.insert(0, BufferedRefs.of((Stage.BATCH, row.members, row.output) for row in self._batched))
        fields: dict[str, Any] = {}
        for stage in self._stages:
            fields |= stage.fields()
        return LaneState(
            microbatches=self._microbatches,
            held=BufferedRefs.joined(held),
            batches_taken=self._batches_taken,
            **fields,
        )


# ---------------------------------------------------------------------------------------------------------------------
# The streams of a process, and what makes its units in order: the same generator runs in a worker process, in the
# training process with `num_workers=0`, and in tests, so no order can depend on where it runs.


class Stream(Protocol):
    """Makes the microbatches of units.

    Attributes:
        pipeline: Loads samples, and is closed with the stream.
    """

    pipeline: Pipeline

    def prepare(self, unit: int, count: int) -> None:
        """Start loading the next `count` microbatches of a unit, on threads."""

    def produce(self, unit: int) -> LaneBatch:
        """Return the next microbatch of a unit."""


class LaneStreams:
    """The lanes of one process, each opened on first use.

    Args:
        lanes: Their numbers; only buffers that lanes share need them.
    """

    def __init__(
        self, pipeline: Pipeline, blend: AnyBlend | None, states: Mapping[int, LaneState], lanes: Collection[int] = ()
    ) -> None:
        self.pipeline = pipeline
        self._blend = blend
        self._states = states
        shares = bool(pipeline.settings.run.packing_buffer_size) and pipeline.shares_buffers
        self._buffers = SharedBuffers(pipeline, blend, lanes, states) if shares else None
        self._lanes: dict[int, Lane] = {}

    def _lane(self, number: int) -> Lane:
        lane = self._lanes.get(number)
        if lane is None:
            state = self._states.get(number) or LaneState.fresh(len(self.pipeline.leaves))
            lane = self._lanes[number] = Lane(number, self.pipeline, self._blend, state, self._buffers)
        return lane

    def prepare(self, unit: int, count: int) -> None:
        self._lane(unit).prepare(count)

    def produce(self, unit: int) -> LaneBatch:
        return self._lane(unit).produce()


def reported(stream: Stream, unit: int) -> LaneBatch:
    """Return the next microbatch of a unit with the failures on its way, watched by the watchdog."""
    pipeline = stream.pipeline
    start = time.perf_counter()
    watchdog = pipeline.watchdog
    try:
        if watchdog is None:
            item = stream.produce(unit)
        else:
            watchdog.arm(unit)
            try:
                item = stream.produce(unit)
            finally:
                watchdog.disarm()
    except HookTimeoutError as error:
        pipeline.flush_reports()
        raise HookTimeoutError(watchdog.message if watchdog is not None else str(error)) from None
    except Exception as error:
        pipeline.flush_reports()  # no microbatch will carry it
        run = pipeline.settings.run
        raised = run.conventions.raised(error, run.error_policy.on_error)
        if raised is not error:
            raise raised from None
        raise
    item.unit = unit
    if pipeline.judge.pending:
        item.reports = pipeline.judge.taken()
    item.warned = tuple(kept.pop(0) for _ in kept[:])
    item.seconds = pipeline.seconds_since(start)
    return item


class Production:
    """Makes units in order, and loads up to `ahead` further ones beside if the stream has threads."""

    def __init__(self, stream: Stream, units: Iterator[int], ahead: int) -> None:
        self._pipeline = stream.pipeline
        self._items = _produced(stream, units, ahead)

    def __iter__(self) -> Iterator[LaneBatch]:
        return self

    def __next__(self) -> LaneBatch:
        return next(self._items)

    def close(self) -> None:
        """End the stream and wait for its threads; if it is only garbage collected, they end by themselves."""
        self._items.close()
        self._pipeline.close()


def _produced(stream: Stream, units: Iterator[int], ahead: int) -> Generator[LaneBatch]:
    # The first unit is made before anything is loaded ahead, so that the first batch comes as soon as it can.
    upcoming: deque[int] = deque()

    def look_ahead(length: int) -> None:
        upcoming.extend(itertools.islice(units, length - len(upcoming)))
        for unit, count in Counter(upcoming).items():
            stream.prepare(unit, count)

    try:
        if not stream.pipeline.loading.threads:
            for unit in units:
                yield reported(stream, unit)
            return
        look_ahead(1)
        while upcoming:
            unit = upcoming.popleft()
            item = reported(stream, unit)
            look_ahead(max(1, ahead))
            yield item
    finally:
        stream.pipeline.close(wait=False)  # the garbage collector may end this generator
