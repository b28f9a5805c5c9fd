"""The draws of a lane whose microbatches come from buckets: each microbatch is drawn in the bucket of its number.

A bucket has draws of its own, which go on from one of its microbatches to the next. All of them follow from the draws
in each leaf, so the state of the lane holds no more than these.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NoReturn

from energon_bridge.core.errors import FatalSampleError
from energon_bridge.core.order.choose import BlendOfBuckets
from energon_bridge.core.stream.draws import Draws
from energon_bridge.core.stream.pipeline import Pipeline
from energon_bridge.core.stream.rows import BatchRow, Taken
from energon_bridge.core.stream.state import BufferedRefs, Counts, LaneState


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
        self._buckets: dict[int, Draws] = {}
        self._now = self._of(self._microbatch)

    @property
    def rows(self) -> int:
        """Rows of the current microbatch."""
        return self._now.rows

    def _of(self, microbatch: int) -> Draws:
        """Return the draws in the bucket of a microbatch."""
        blend = self._blend
        bucket = blend.bucket(microbatch)
        draws = self._buckets.get(bucket)
        if draws is None:
            state = LaneState(0, blend.draws_in(bucket, self._leaf_draws), 0, tuple(self._leaf_draws))
            own = blend.blends[bucket]
            draws = Draws(self._number, self._pipeline, own, state, blend.rows[bucket], blend.names[bucket])
            self._buckets[bucket] = draws
        return draws

    def prepare(self, microbatches: int) -> None:
        """Start loading the draws that the next microbatches need."""
        coming = Counter(self._of(self._microbatch + number) for number in range(microbatches))
        for bucket, count in coming.items():
            bucket.prepare(count)

    def take(self, counts: Counts) -> Taken:
        self._now = self._of(self._microbatch)
        return self._now.take(counts)._replace(rows=self._refuse_several)

    def made_again(self, rows: list[BatchRow], counts: Counts) -> list[BatchRow]:
        return self._now.made_again(rows, counts)

    def waiting(self) -> BufferedRefs:
        return self._now.waiting()

    def fields(self) -> dict[str, Any]:
        if self._now.taken:
            self._refuse_several()
        for leaf, bucket in enumerate(self._blend.of_leaf):
            if bucket in self._buckets:
                self._leaf_draws[leaf] = self._buckets[bucket].leaf_draws[leaf]
        return {"draw": sum(self._leaf_draws), "taken": 0, "leaf_draws": tuple(self._leaf_draws)}

    def settle(self, counts: Counts) -> None:
        self._now.settle(counts)
        self._microbatch += 1

    def give_up_if_barren(self) -> None:
        """Raise if the draws since the last microbatch of the bucket gave nothing."""
        self._now.give_up_if_barren()

    def _refuse_several(self) -> NoReturn:
        raise FatalSampleError(
            f"{type(self._pipeline.code.encoder).__name__} makes several samples or batches of one, so "
            "microbatches of one bucket (group_by) cannot follow from their numbers: make one of each"
        )
