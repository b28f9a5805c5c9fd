"""The order of a mix whose weights move from draw to draw (linear and cosine schedules).

Constant weights are followed by `WeightedBlend` without memory. Weights that move would bring that rule out of step:
where their slope meets the spacing of its points, whole stretches of draws go to one side. So the line of global draws
is cut into blocks, and what a block has of each leaf is settled first. With K_i(g) the sum of leaf i's shares before
global draw g, lane l has `ceil(K_i(g)/L - phase(i, l))` draws of leaf i before a block that begins at g: within one of
what the shares ask for, however long the run. Inside a block of n draws the order is like that of `WeightedBlend`:
the draws are ranked by its `u`, with `B = floor(2^64 (sqrt3 - 1))` for any number of lanes, and the leaves, in order of
identity, take as many ranks each as they have draws.

Shares are taken exactly at *knots* and in straight lines between them, so that K_i is a closed form, and a bisection
over the blocks finds a draw. A block is the shorter the faster the shares move: at most 256 draws of a lane, and so few
that no share moves by more than the block has draws per draw. Only the four basic operations on float64 decide counts;
IEEE 754 prescribes their bits.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np

from energon_bridge.rng import MASK64, FloatArray, IntArray, fold

_A = 0x9E3779B97F4A7C15
_B = 0xBB67AE8584CAA73B
_PHASE, _ORDER = 7, 8
_MAX_BLOCK = 256
_MAX_KNOTS, _MAX_KNOT_VALUES = 1024, 1 << 18


class MovingWeights(Protocol):
    """Weights of leaves over the global draws of a run."""

    def at(self, global_draw: int) -> Sequence[float | Fraction]:
        """Return the weights of a global draw: non-negative, not all zero, in order of the leaves' identities."""
        ...

    def next_change(self, global_draw: int) -> int | None:
        """Return the first later global draw whose weights may differ, None if there is none."""
        ...

    def points(self) -> Sequence[int]:
        """Return the global draws between which the weights move evenly, ascending."""
        ...


@dataclass(frozen=True, kw_only=True)
class ScheduledBlend:
    """Leaves chosen by moving weights, without end.

    Args:
        weights: The weights.
        num_lanes: L.
        key: Key of the run.
        start: Global draw at which these weights take over.
    """

    weights: MovingWeights
    num_lanes: int
    key: int
    start: int = 0

    def leaves(self, lane: int, draw: int, count: int) -> IntArray:
        """Return the leaf of each of up to `count` consecutive draws of a lane, at least of one."""
        before = self._before(lane)
        first, block = self._block_at(lane, draw - before)
        low = draw - before - first
        return block[low : low + count]

    def counts(self, lane: int, draw: int) -> IntArray:
        """Return a lane's draws of each leaf from where these weights take over up to a draw, shape (leaves,)."""
        number = draw - self._before(lane)
        first, block = self._block_at(lane, number)
        counts = self._counts(lane, self._cached[lane][0])
        return counts + np.bincount(block[: number - first], minlength=counts.size)

    def _before(self, lane: int) -> int:
        """Return the draws of a lane before these weights take over."""
        return max(0, -((lane - self.start) // self.num_lanes))

    @cached_property
    def _cached(self) -> dict[int, tuple[int, int, IntArray]]:
        """For each lane the block that it is in: its number, its first draw and its leaves."""
        return {}

    def _block_at(self, lane: int, number: int) -> tuple[int, IntArray]:
        """Return the first draw and the leaves of the block that holds a draw."""
        block, first, leaves = self._cached.get(lane, (-1, 0, np.empty(0, dtype=np.int64)))
        if block < 0 or not first <= number <= first + leaves.size:
            block = self._block_before(lane, number)
            first = int(self._counts(lane, block).sum())
            leaves = self._ordered(lane, block, first)
        while number == first + leaves.size:  # the usual case, of the blocks in turn; a block may be empty
            block, first = block + 1, first + leaves.size
            leaves = self._ordered(lane, block, first)
        self._cached[lane] = block, first, leaves
        return first, leaves

    def _block_before(self, lane: int, number: int) -> int:
        """Return the last block before which a lane has at most `number` draws."""
        low, high = 0, 1
        while int(self._counts(lane, high).sum()) <= number:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if int(self._counts(lane, middle).sum()) <= number:
                low = middle
            else:
                high = middle
        return low

    def _counts(self, lane: int, block: int) -> IntArray:
        """Return a lane's draws of each leaf before a block, shape (leaves,)."""
        sums = self._line.sums(self._line.start_of(block)) / self.num_lanes
        leaves = np.arange(sums.size, dtype=np.uint64)
        keys = np.uint64((fold(self.key, _PHASE) + lane * _B) & MASK64) + leaves * np.uint64(_A)
        phases = ((keys >> np.uint64(32)).astype(np.float64) + 0.5) / 2.0**32
        return np.ceil(sums - phases).clip(0).astype(np.int64)

    def _ordered(self, lane: int, block: int, first: int) -> IntArray:
        """Return the leaves of the draws of a block, which begins at draw `first`."""
        sizes = np.maximum(self._counts(lane, block + 1) - self._counts(lane, block), 0)
        in_order = np.repeat(np.arange(sizes.size), sizes)
        u = np.uint64((fold(self.key, _ORDER) + lane * _B + first * _A) & MASK64) + np.arange(
            in_order.size, dtype=np.uint64
        ) * np.uint64(_A)
        out = np.empty_like(in_order)
        out[np.argsort(u, kind="stable")] = in_order
        return out

    @cached_property
    def _line(self) -> _ShareLine:
        return _ShareLine(self.weights, self.start, self.num_lanes)


class _ShareLine:
    """Shares of leaves in straight lines between knots, their sums, and the blocks; draws count from `start`."""

    def __init__(self, weights: MovingWeights, start: int, num_lanes: int) -> None:
        points = [0, *(point - start for point in weights.points() if point > start)]
        stretches = [_knots(weights, start, low, high) for low, high in pairwise(points)]
        knots = [knot for stretch in stretches for knot in stretch] + [points[-1]]
        self._knots = np.array(knots, dtype=np.int64)
        self._shares = np.array([_shares(weights.at(start + knot)) for knot in knots], dtype=np.float64)
        lengths = np.diff(self._knots).astype(np.float64)[:, None]
        # From the last draw before a point on the shares stay, so that they may jump at the point.
        moving = ~np.isin(self._knots[1:], points)
        ends = np.where(moving[:, None], self._shares[1:], self._shares[:-1])
        self._slopes = np.zeros_like(self._shares)
        self._slopes[:-1] = (ends - self._shares[:-1]) / lengths
        areas = lengths * (self._shares[:-1] + ends) * 0.5
        self._sums = np.concatenate((np.zeros((1, self._shares.shape[1])), np.cumsum(areas, axis=0)))
        steepest = np.abs(self._slopes).max(axis=1) * num_lanes
        self._stretches, self._widths, self._blocks = points, [], [0]
        place = 0
        for knots_inside, (low, high) in zip(stretches, pairwise(points), strict=True):
            steep = float(steepest[place : place + len(knots_inside)].max())
            place += len(knots_inside)
            draws = _MAX_BLOCK if steep == 0 else max(1, min(_MAX_BLOCK, math.isqrt(int(1 / steep))))
            self._widths.append(draws * num_lanes)
            self._blocks.append(self._blocks[-1] + -(-(high - low) // self._widths[-1]))
        self._widths.append(_MAX_BLOCK * num_lanes)

    def start_of(self, block: int) -> int:
        """Return the global draw at which a block begins."""
        stretch = bisect_right(self._blocks, block) - 1
        return self._stretches[stretch] + (block - self._blocks[stretch]) * self._widths[stretch]

    def sums(self, draw: int) -> FloatArray:
        """Return the sum of each leaf's shares before a draw, shape (leaves,)."""
        piece = int(np.searchsorted(self._knots, draw, side="right")) - 1
        passed = float(draw - int(self._knots[piece]))
        return self._sums[piece] + passed * (self._shares[piece] + (0.5 * passed) * self._slopes[piece])


def _knots(weights: MovingWeights, start: int, low: int, high: int) -> list[int]:
    """Return the knots of the stretch [low, high) between two points of the schedules."""
    change = weights.next_change(start + low)
    if change is None or change >= start + high:
        return [low]
    length = high - 1 - low
    leaves = len(weights.at(start + low))
    wanted = min(_MAX_KNOTS, math.isqrt(length) + 1, max(64, _MAX_KNOT_VALUES // leaves))
    return sorted({low + length * number // wanted for number in range(wanted + 1)})


def _shares(weights: Sequence[float | Fraction]) -> list[float]:
    values = [float(weight) for weight in weights]
    total = math.fsum(values)
    return [value / total for value in values]
