"""The draws of a lane whose microbatches come from buckets: each microbatch is drawn in the bucket of its number.

A bucket has draws of its own, which go on from one of its microbatches to the next, and packs of its own if the run
packs. All of the draws follow from those in each leaf, so the state of the lane holds no more than these, and what
waits to be packed, bucket after bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from energon_bridge.core.errors import FatalSampleError
from energon_bridge.core.order.choose import BlendOfBuckets
from energon_bridge.core.stream.draws import Draws
from energon_bridge.core.stream.lane_state import NOTHING_HELD, BufferedRefs, Counts, LaneState, Stage
from energon_bridge.core.stream.pack_buffer import LEAST_SHARE, LaneEpochs, Packing, PackRules
from energon_bridge.core.stream.pipeline import Pipeline
from energon_bridge.core.stream.rows import BatchRow, Taken


class _Bucket(NamedTuple):
    """A bucket of one lane: its draws, and the stage that gives its rows, which are these or packs of them."""

    draws: Draws
    last: Draws | Packing


class BucketDraws:
    """The draws of one lane in all buckets, continued from a state.

    Args:
        blend: Says which bucket a microbatch comes from, and holds the blend of each bucket.
    """

    def __init__(self, number: int, pipeline: Pipeline, blend: BlendOfBuckets, state: LaneState) -> None:
        self._number = number
        self._pipeline = pipeline
        self._blend = blend
        self._microbatch = state.microbatches
        self._leaf_draws = list(state.leaf_draws)
        self._waiting = _by_bucket(state.held, blend.of_leaf)  # in buckets that are not open yet
        self._buckets: dict[int, _Bucket] = {}
        self._now = self._of(self._microbatch)

    @property
    def rows(self) -> int:
        """Rows of the current microbatch."""
        return self._now.draws.rows

    def _of(self, microbatch: int) -> _Bucket:
        """Return the bucket of a microbatch."""
        number = self._blend.bucket(microbatch)
        if number not in self._buckets:
            self._buckets[number] = self._opened(number)
        return self._buckets[number]

    def _opened(self, number: int) -> _Bucket:
        blend = self._blend
        pipeline = self._pipeline
        size = pipeline.settings.run.packing_buffer_size
        at = tuple(self._leaf_draws)
        held = self._waiting.pop(number, NOTHING_HELD)
        state = LaneState(0, blend.draws_in(number, at), 0, at, held=held, buffer=size or 0)
        own = blend.blends[number]
        draws = Draws(self._number, pipeline, own, state, blend.rows[number], blend.names[number])
        if size is None:
            return _Bucket(draws, draws)
        return _Bucket(draws, Packing(draws, pipeline, state, self._rules(number, size)))

    def _rules(self, bucket: int, size: int) -> PackRules:
        """Return what ends the buffer of a bucket besides its size."""
        own = [leaf for leaf, of in enumerate(self._blend.of_leaf) if of == bucket]
        epochs = LaneEpochs(self._pipeline.leaves[own[0]].order, self._number, own[0])
        ends = len(own) == 1 and epochs.order.epochs_per_shuffle == 1 and epochs.holds(1, max(size, LEAST_SHARE))
        return PackRules(epochs if ends else None, distinct=True, whole_draws=True)

    def prepare(self, microbatches: int) -> None:
        """Start loading the draws that the next microbatches need."""
        coming = Counter(self._of(self._microbatch + number) for number in range(microbatches))
        for bucket, count in coming.items():
            bucket.draws.prepare(count)

    def take(self, counts: Counts) -> Taken:
        self._now = self._of(self._microbatch)
        return self._now.last.take(counts)._replace(rows=self._refuse_several)

    def made_again(self, rows: list[BatchRow], counts: Counts) -> list[BatchRow]:
        return self._now.last.made_again(rows, counts)

    def waiting(self) -> BufferedRefs:
        waiting = self._waiting | {number: bucket.last.waiting() for number, bucket in self._buckets.items()}
        return BufferedRefs.joined([waiting[number] for number in sorted(waiting)])

    def fields(self) -> dict[str, Any]:
        if self._now.draws.taken:
            self._refuse_several()
        for leaf, number in enumerate(self._blend.of_leaf):
            if number in self._buckets:
                self._leaf_draws[leaf] = self._buckets[number].draws.leaf_draws[leaf]
        return {"draw": sum(self._leaf_draws), "taken": 0, "leaf_draws": tuple(self._leaf_draws)}

    def settle(self, counts: Counts) -> None:
        draws, last = self._now
        if last is not draws:
            last.settle(counts)
        draws.settle(counts)
        self._microbatch += 1

    def give_up_if_barren(self) -> None:
        """Raise if the draws since the last microbatch of the bucket gave nothing."""
        self._now.draws.give_up_if_barren()

    def _refuse_several(self) -> NoReturn:
        raise FatalSampleError(
            f"{type(self._pipeline.code.encoder).__name__} makes several samples or batches of one, so "
            "microbatches of one bucket (group_by) cannot follow from their numbers: make one of each"
        )


def _by_bucket(held: BufferedRefs, of_leaf: Sequence[int]) -> dict[int, BufferedRefs]:
    """Return what waits to be packed, by bucket."""
    if not len(held.rows):
        return {}
    stages, lengths, _ = held.rows.T
    buckets = np.array(of_leaf)[held.members[np.cumsum(lengths) - lengths, 0]]  # a pack is of one bucket
    buckets[(stages != Stage.PACK) & (stages != Stage.BUFFER)] = -1
    return {number: held.part(buckets == number) for number in {*buckets.tolist()} - {-1}}
