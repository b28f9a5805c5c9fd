"""Buckets: a run whose global batches each come from one group of samples, such as images of one size.

Every leaf of the mix is cut into one leaf for each bucket that it has samples of (`mix/leaves.py`). Microbatch m of
*every* lane comes from the same bucket, a function of m alone; a global batch is a lap over the lanes, or part of one,
so all ranks of all its steps have one bucket, on any number of ranks. Of a lap, a bucket of N samples in microbatches
of r gets `N / r` divided by the sum over all buckets, in the order of a weighted mix of one lane (`plan/blend.py`). So
buckets are mixed all along in proportion to their samples, and a bucket stays within a few global batches of its share.

Within a bucket a lane draws as in a run that has only this bucket: its draws there are counted by themselves, from leaf
to leaf and from epoch to epoch. So nothing is dropped at the end of an epoch: the microbatch goes on with the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from energon_bridge.plan.blend import WeightedBlend
from energon_bridge.rng import IntArray, fold

_BUCKETS, _LEAVES = 8, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantWeights:
    """Weights that never change."""

    weights: tuple[Fraction, ...]

    def at(self, global_draw: int) -> Sequence[Fraction]:
        """Return the weights of a global draw."""
        return self.weights

    def points(self) -> Sequence[int]:
        """Return no draws: nothing changes."""
        return ()

    @property
    def moves(self) -> bool:
        """Whether any weight changes from draw to draw."""
        return False


@dataclass(frozen=True, kw_only=True)
class BucketBlend:
    """Says which bucket a microbatch comes from, and of a bucket which leaf a draw comes from.

    Args:
        rows: Samples in a microbatch of each bucket.
        of_leaf: The bucket of each leaf.
        weights: The weight of each leaf among all, as a share of samples; they add up to 1.
        num_lanes: L.
        key: Key of the run.
    """

    rows: tuple[int, ...]
    of_leaf: tuple[int, ...]
    weights: tuple[Fraction, ...]
    num_lanes: int
    key: int

    def bucket(self, microbatch: int) -> int:
        """Return the bucket of a lane's microbatch, for any lane."""
        return int(self._laps.leaves(0, microbatch, 1)[0])

    def microbatches(self, microbatch: int) -> IntArray:
        """Return how many of a lane's microbatches before one come from each bucket, shape (buckets,)."""
        return self._laps.counts(0, microbatch)

    def draws(self, bucket: int, leaf_draws: Sequence[int]) -> int:
        """Return a lane's draws in a bucket, from those in all leaves."""
        return sum(count for count, of in zip(leaf_draws, self.of_leaf, strict=True) if of == bucket)

    def leaf_draws(self, lane: int, microbatch: int) -> list[int]:
        """Return a lane's draws of each leaf before a microbatch."""
        draws = (self.microbatches(microbatch) * np.array(self.rows)).tolist()
        total = np.zeros(len(self.of_leaf), dtype=np.int64)
        for blend, draw in zip(self.blends, draws, strict=True):
            total += blend.counts(lane, draw) if draw else 0
        return total.tolist()

    @cached_property
    def blends(self) -> tuple[WeightedBlend, ...]:
        """For each bucket: which leaf, of all leaves, a draw in it comes from."""
        found = []
        for bucket in range(len(self.rows)):
            own = [
                weight if of == bucket else Fraction(0) for weight, of in zip(self.weights, self.of_leaf, strict=True)
            ]
            weights, key = ConstantWeights(weights=tuple(own)), fold(self.key, _LEAVES, bucket)
            found.append(WeightedBlend(weights=weights, num_lanes=self.num_lanes, key=key))
        return tuple(found)

    @cached_property
    def _laps(self) -> WeightedBlend:
        shares = [Fraction(0)] * len(self.rows)
        for weight, bucket in zip(self.weights, self.of_leaf, strict=True):
            shares[bucket] += weight / self.rows[bucket]
        return WeightedBlend(weights=ConstantWeights(weights=tuple(shares)), num_lanes=1, key=fold(self.key, _BUCKETS))
