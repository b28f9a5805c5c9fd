"""Lanes: the L endless streams of a run, each from its order to its microbatches; and how a process makes them.

A lane depends only on its number, its state and the pipeline, so whoever owns it gets the same microbatches; and its
state after microbatch m is a function of m, wherever the run was stopped. The stages in order: draws (`draws.py`)
become encoded samples; samples become packs (`pack_buffer.py`, if the encoder packs); samples or packs are the rows of
microbatches, `batch_size` at a time, by group (`grouping.py`, if the encoder groups), or by length (`pack_buffer.py`,
with `max_tokens_per_microbatch`).
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Collection, Generator, Iterator, Mapping
from typing import Any, Protocol, cast

from energon_bridge.core.errors import FatalSampleError, HookTimeoutError
from energon_bridge.core.order.choose import AnyBlend, BucketBlend
from energon_bridge.core.stream.dealt_packs import DealtPacking, FollowedDraws, SharedBuffers
from energon_bridge.core.stream.draws import BatchRow, Draws, batch_rows, reencode, rows_of
from energon_bridge.core.stream.grouping import Grouping
from energon_bridge.core.stream.pack_buffer import Packing, pack_rules
from energon_bridge.core.stream.pipeline import Pipeline
from energon_bridge.core.stream.state import BufferedRefs, Counts, LaneBatch, LaneState, Stage

_BARREN = 1000
"""Microbatches in a row that hooks may refuse before the stream counts as barren."""


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
        self._turns = cast(BucketBlend, blend) if pipeline.settings.run.group_by else None
        self._leaf_draws = list(state.leaf_draws)
        self._buckets: dict[int, Draws] = {}
        self._packing: Packing | None = None
        self._draws: Draws
        if buffers is not None:
            self._draws, self._packing = self._dealt(buffers, blend, state)
        else:
            self._draws = self._bucket(state.microbatches) or Draws(number, pipeline, blend, state)
        self._first_draw = state.draw
        self._first_microbatch = state.microbatches
        held = state.held.entries()
        if buffers is None and pipeline.settings.run.packing_buffer_size:
            rules = pack_rules(pipeline.leaves, blend, number, by_epoch=pipeline.settings.packs_by_epoch)
            self._packing = Packing(self._draws, pipeline, state, rules)
        waiting = [BatchRow(tuple(refs), output) for stage, refs, output in held if stage is Stage.GROUP]
        self._grouping = Grouping(pipeline, pipeline.settings.run.batch_size, waiting) if pipeline.own.groups else None
        # Batches that the hooks made from `_batched`, until all of them are delivered.
        self._batches: deque[Any] = deque()
        self._batches_taken = state.batches_taken
        self._batched = [BatchRow(tuple(refs), output) for stage, refs, output in held if stage is Stage.BATCH]

    def _dealt(
        self, buffers: SharedBuffers, blend: AnyBlend | None, state: LaneState
    ) -> tuple[FollowedDraws, DealtPacking]:
        """Return where the lane's buffer is, and its packs, of a buffer that lanes share."""
        pipeline = self._pipeline
        stream = self.number % pipeline.leaves[0].order.num_lanes
        draws = FollowedDraws(pipeline, stream, state)
        rules = pack_rules(pipeline.leaves, blend, stream, by_epoch=True)
        return draws, DealtPacking(draws, pipeline, state, rules, self.number, buffers)

    def _bucket(self, microbatch: int) -> Draws | None:
        """Return the draws in the bucket that a microbatch comes from; None without buckets."""
        blend = self._turns
        if blend is None:
            return None
        bucket = blend.bucket(microbatch)
        draws = self._buckets.get(bucket)
        if draws is None:
            state = LaneState(0, blend.draws_in(bucket, self._leaf_draws), 0, tuple(self._leaf_draws))
            draws = Draws(
                self.number, self._pipeline, blend.blends[bucket], state, blend.rows[bucket], blend.names[bucket]
            )
            self._buckets[bucket] = draws
        return draws

    def prepare(self, microbatches: int) -> None:
        """Start loading the draws that the next microbatches will probably need."""
        if self._buckets:
            coming = Counter(self._bucket(self._microbatches + number) for number in range(microbatches))
            for bucket, count in coming.items():
                assert bucket is not None
                bucket.prepare(count * bucket.rows)
            return
        made = self._microbatches - self._first_microbatch
        draws = self._pipeline.rows
        if made and (self._packing or self._grouping):
            draws = max(1, (self._draws.draw - self._first_draw) // made)
        self._draws.prepare(microbatches * draws)

    def produce(self) -> LaneBatch:
        """Return the next microbatch and the state of the lane after it."""
        counts = Counts()
        if self._buckets:
            self._draws = self._bucket(self._microbatches) or self._draws
        with self._pipeline.user_code():
            first = self._draws.draw
            attempts = 0
            while not self._batches:
                if attempts > _BARREN:
                    self._draws.give_up_if_barren(first)
                self._batch(counts)
                attempts += 1
            batch = self._batches.popleft()
            self._batches_taken += 1
            if not self._batches:
                self._batched = []
                self._batches_taken = 0
            self._microbatches += 1
            if self._packing is not None:
                self._packing.settle(self._pipeline.rows, counts)
        self._draws.ahead = True
        return LaneBatch(batch, self._draws.rows, self._state(), counts)

    def _state(self) -> LaneState:
        draws = self._draws
        if self._turns is not None:
            if draws.taken or self._batches:
                raise FatalSampleError(
                    f"{type(self._pipeline.code.encoder).__name__} makes several samples or batches of one, so "
                    "microbatches of one bucket (group_by) cannot follow from their numbers: make one of each"
                )
            for leaf, bucket in enumerate(self._turns.of_leaf):
                if bucket in self._buckets:
                    self._leaf_draws[leaf] = self._buckets[bucket].leaf_draws[leaf]
            return LaneState(self._microbatches, sum(self._leaf_draws), 0, tuple(self._leaf_draws))
        parts = [stage.waiting() for stage in (self._packing, self._grouping) if stage is not None]
        if self._batched:
            parts.insert(0, BufferedRefs.of((Stage.BATCH, row.members, row.output) for row in self._batched))
        return LaneState(
            self._microbatches,
            draws.draw,
            draws.taken,
            tuple(draws.leaf_draws),
            draws.origin,
            BufferedRefs.joined(parts),
            self._batches_taken,
            0 if self._packing is None else self._packing.target,
            draws.sums(),
            0 if self._packing is None else self._packing.dealt,
        )

    def _batch(self, counts: Counts) -> None:
        """Make the next batches; none if a hook refuses the rows."""
        pipeline = self._pipeline
        skip = 0
        pipeline.begin(self.number, self._microbatches - (self._batches_taken if self._batched else 0))
        if self._batched:  # restored: leave out what was delivered
            rows = self._made_again(self._batched, counts)
            skip = self._batches_taken
            counts = Counts()
            self._batches_taken = 0
        elif self._grouping is not None:
            rows = self._grouping.take(lambda: self._next_row(counts), lambda r: self._made_again(r, counts), counts)
        elif self._packing is not None and pipeline.own.by_length:
            rows = self._packing.take_microbatch(counts)
        elif self._packing is not None:
            rows = [self._packing.take(counts) for _ in range(pipeline.rows)]
        else:
            drawn = self._draws.collect(self._draws.rows, counts)
            batches = pipeline.batches(drawn.samples, drawn.keys, drawn.leaves, self.number, self._microbatches, counts)
            self._batches.extend(batches)
            if len(batches) > 1:
                self._batched = rows_of(drawn)
            return
        self._batches.extend(batch_rows(pipeline, rows, self.number, self._microbatches - skip, counts)[skip:])
        self._batched = rows if self._batches else []
        self._batches_taken = skip if self._batches else 0
        for row in rows:
            row.content = None

    def _next_row(self, counts: Counts) -> BatchRow:
        if self._packing is not None:
            return self._packing.take(counts)
        return rows_of(self._draws.collect(1, counts))[0]

    def _made_again(self, rows: list[BatchRow], counts: Counts) -> list[BatchRow]:
        """Encode the rows of a restored state again."""
        if self._packing is None:
            return reencode(self._pipeline, rows, counts)
        return self._packing.made_again(rows, counts)


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
    if pipeline.judge.pending:
        item.reports = pipeline.judge.taken()
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
        """End it, and wait for the threads; those of one that is only dropped end by themselves."""
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
        if not stream.pipeline.threaded:
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
