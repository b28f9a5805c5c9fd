"""The order of a mix whose weights move from draw to draw (linear and cosine schedules).

Constant weights are followed by `WeightedBlend` without memory. Weights that move bring that rule out of step: where
their slope meets the spacing of its points, a lane gets whole stretches of draws of one leaf too many. So a lane's
draws are cut into blocks of about 128, and what it has of each leaf before a block is *settled*. With K the sum of the
leaf's shares over the lane's first 128 b draws, K_1 that of its first 128, and n the draws that it gets of those, it
has `n + ceil(K - K_1 - phase)` before block b: never further than three from K, however long the run. (These add up to
a few more or fewer than 128 b; their sum is where the block begins. The phase is a key of leaf and lane, moved a
quarter of `n - K_1` against that.)

Shares are taken exactly at *knots* and in straight lines between them, so that K is a closed form, and a bisection over
the blocks finds a draw. Only the four basic operations on float64 decide; IEEE 754 prescribes their bits.

Measured with schedules of five leaves in 1 to 480 lanes: after any draw a lane is within 5 of the sum of its shares,
and any 240 consecutive draws of the global order are within 9 of theirs with up to 48 lanes, within 13 with more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

import numpy as np

from energon_bridge.plan.blend import DRAW_STEP, LeafWeights, lane_step
from energon_bridge.rng import MASK64, FloatArray, IntArray, UIntArray, draws, fold

_LANE_PHASE = 0x6A09E667F3BCC908  # sqrt2 - 1: what is settled must not go with the order of the lanes
_PHASE, _ORDER, _HAND_OVER = 7, 8, 9
_BLOCK, _NEAR, _PULL = 128, 1.5, 0.25
_MAX_KNOTS, _MAX_KNOT_VALUES = 1024, 1 << 18


Moment = tuple[IntArray, FloatArray]
"""Where draws are on the line of shares: the last knot before each and how far it is from there."""


@dataclass(frozen=True, kw_only=True)
class ScheduledBlend:
    """Leaves chosen by moving weights, without end.

    Inside a block every draw first takes the leaf that `WeightedBlend` would give it, with the shares of that very
    draw: that keeps the global order even. Then leaves with too many draws hand single ones over to leaves with too
    few, until the counts are the settled ones; in a mix of five leaves that is one draw or two in a block. Which
    draw: where the share of a leaf with too few, divided by a keyed number, is largest. So draws are given away
    where they could as well have been taken, and over all lanes the two even out. Where no leaf with too few has a
    share at any draw of a leaf with too many, a third leaf stands between them. Nothing is handed over in the first
    block unless n would be more than 1.5 off, so that many lanes follow a short schedule evenly too.

    Args:
        weights: The weights.
        num_lanes: L.
        key: Key of the run.
        start: Global draw at which these weights take over.
    """

    weights: LeafWeights
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
        leaves = self._counts(lane, 0).size
        # A settled count is less than three off its sum of shares.
        low, high = max(0, (number - 3 * leaves) // _BLOCK), (number + 3 * leaves) // _BLOCK + 1
        while high - low > 1:
            middle = (low + high) // 2
            if int(self._counts(lane, middle).sum()) <= number:
                low = middle
            else:
                high = middle
        return low

    def _counts(self, lane: int, block: int) -> IntArray:
        """Return a lane's draws of each leaf before a block, shape (leaves,)."""
        known, found = self._last_counts.get(lane, (-1, None))
        if found is None or known != block:  # one block's end is the next one's beginning
            offsets, counts = self._first_block(lane)
            found = (
                counts + np.ceil(self._sums(lane, block) - offsets).clip(0).astype(np.int64) if block else 0 * counts
            )
            self._last_counts[lane] = block, found
        return found

    @cached_property
    def _last_counts(self) -> dict[int, tuple[int, IntArray]]:
        return {}

    def _first_block(self, lane: int) -> tuple[FloatArray, IntArray]:
        """Return a lane's sum of shares plus its phase, and its draws, of each leaf in its first block."""
        found = self._first_blocks.get(lane)
        if found is None:
            sums = self._sums(lane, 1)
            counts = np.bincount(self._unsettled(lane, 0, _BLOCK)[0], minlength=sums.size)
            counts = np.clip(counts, np.ceil(sums - _NEAR), np.floor(sums + _NEAR)).astype(np.int64)
            leaves = np.arange(counts.size, dtype=np.uint64)
            keys = np.uint64((fold(self.key, _PHASE) + lane * _LANE_PHASE) & MASK64) + leaves * np.uint64(DRAW_STEP)
            phases = ((keys >> np.uint64(32)).astype(np.float64) + 0.5) / 2.0**32
            phases = np.clip(phases + _PULL * (counts - sums), 2.0**-32, 1.0 - 2.0**-32)
            found = self._first_blocks[lane] = sums + phases, counts
        return found

    @cached_property
    def _first_blocks(self) -> dict[int, tuple[FloatArray, IntArray]]:
        return {}

    def _sums(self, lane: int, block: int) -> FloatArray:
        return self._line.sums((lane - self.start) % self.num_lanes, self.num_lanes, block * _BLOCK)

    def _ordered(self, lane: int, block: int, first: int) -> IntArray:
        """Return the leaves of the draws of a block, which begins at draw `first`."""
        before = self._counts(lane, block)
        sizes = np.maximum(self._counts(lane, block + 1) - before, 0)
        leaves, moment = self._unsettled(lane, first, int(sizes.sum()))
        luck = (draws(fold(self.key, _HAND_OVER, lane, block), leaves.size) >> np.uint64(12)).astype(np.float64) + 0.5
        extra = np.bincount(leaves, minlength=sizes.size) - sizes
        _hand_over(leaves, extra, lambda short: self._line.shares(moment, short), luck)
        return leaves

    def _unsettled(self, lane: int, first: int, count: int) -> tuple[IntArray, Moment]:
        """Return the leaves that some draws fall to by their shares alone, and where the draws are."""
        place = (lane - self.start) % self.num_lanes
        origin = (fold(self.key, _ORDER) + place * lane_step(self.num_lanes) + first * DRAW_STEP) & MASK64
        u: UIntArray = np.uint64(origin) + np.arange(count, dtype=np.uint64) * np.uint64(DRAW_STEP)
        moment = self._line.moment((first + np.arange(count, dtype=np.int64)) * self.num_lanes + place)
        return self._line.leaves(moment, (u >> np.uint64(11)).astype(np.float64) / 2.0**53), moment

    @cached_property
    def _line(self) -> _ShareLine:
        return _ShareLine(self.weights, self.start)


class _ShareLine:
    """Shares of leaves in straight lines between knots, and their sums; draws count from `start`."""

    def __init__(self, weights: LeafWeights, start: int) -> None:
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
        # For each first draw the whole pieces passed, and their sum.
        self._passed: dict[int, tuple[int, FloatArray]] = {}
        self._bounds, self._bound_slopes = np.cumsum(self._shares, axis=1), np.cumsum(self._slopes, axis=1)

    def sums(self, first: int, step: int, count: int) -> FloatArray:
        """Return the sum of each leaf's shares at `count` draws, `step` apart from `first` on, shape (leaves,)."""
        last = max(0, int(np.searchsorted(self._knots, first + (count - 1) * step, side="right")) - 1)
        passed, total = self._passed.get(first, (0, np.zeros(self._shares.shape[1])))
        if passed > last:
            passed, total = 0, np.zeros_like(total)
        pieces = slice(passed, last + 1)
        before = np.clip(-((first - self._knots[pieces]) // step), 0, count)
        inside = np.diff(before, append=count).astype(np.float64)[:, None]
        ahead = (before * step + first - self._knots[pieces]).astype(np.float64)[:, None]
        parts = inside * (self._shares[pieces] + (ahead + (inside - 1.0) * (0.5 * step)) * self._slopes[pieces])
        # One after the other, from the first piece on, so that every way of asking rounds alike.
        totals = np.cumsum(np.concatenate((total[None], parts)), axis=0)
        self._passed[first] = last, totals[-2]
        return totals[-1]

    def moment(self, draws: IntArray) -> Moment:
        """Return for each draw the last knot before it and how far it is from there, shape (draws,) each."""
        piece = np.searchsorted(self._knots, draws, side="right") - 1
        return piece, (draws - self._knots[piece]).astype(np.float64)

    def shares(self, moment: Moment, leaves: IntArray) -> FloatArray:
        """Return the shares of some leaves, shape (draws, leaves)."""
        piece, passed = moment[0][:, None], moment[1][:, None]
        return self._shares[piece, leaves] + passed * self._slopes[piece, leaves]

    def leaves(self, moment: Moment, u: FloatArray) -> IntArray:
        """Return the leaf in whose interval of the shares each of `u` in [0, 1) falls, shape (draws,)."""
        piece, passed = moment
        total = self._bounds[piece, -1] + passed * self._bound_slopes[piece, -1]
        u = np.minimum(u * total, np.nextafter(total, 0.0))
        low = np.zeros(u.size, dtype=np.int64)
        high = np.full(u.size, self._bounds.shape[1] - 1)
        for _ in range((self._bounds.shape[1] - 1).bit_length()):
            middle = (low + high) // 2
            above = self._bounds[piece, middle] + passed * self._bound_slopes[piece, middle] > u
            low, high = np.where(above, low, middle + 1), np.where(above, middle, high)
        return np.minimum(low, high)


def _hand_over(leaves: IntArray, extra: IntArray, shares: Callable[[IntArray], FloatArray], luck: FloatArray) -> None:
    """Give draws of leaves with too many (`extra` > 0) to leaves with too few, in place, until none has either.

    Args:
        leaves: The leaf of each draw, shape (draws,).
        extra: How many draws too many each leaf has, shape (leaves,); they add up to 0.
        shares: Returns the shares of some leaves at each draw, shape (draws, some).
        luck: A positive number for each draw: the smaller, the sooner it is given away. No draw is given away twice
            while there is another.
    """
    rows = np.arange(leaves.size)
    wanting = 0
    while extra.any():
        if not wanting:
            short = np.flatnonzero(extra < 0)
            wanting, pull = short.size, shares(short)
            best = pull.argmax(axis=1)
            score = pull[rows, best] / luck
        has = extra[leaves]
        choice = np.where(has > 0, score, 0.0)
        if choice.max() <= 0:
            choice = np.where(has == 0, score, 0.0)
        row = int(choice.argmax())
        column = int(best[row])
        if choice[row] <= 0:  # no leaf with too few has a share in this block
            row, column = int(has.argmax()), int(extra[short].argmin())
        old, new = leaves[row], short[column]
        leaves[row], luck[row], score[row] = new, np.inf, 0.0
        extra[old] -= 1
        extra[new] += 1
        if extra[old] < 0:
            wanting = 0
        elif extra[new] == 0:
            wanting -= 1
            pull[:, column] = 0.0
            stale = np.flatnonzero(best == column)
            best[stale] = pull[stale].argmax(axis=1)
            score[stale] = pull[stale, best[stale]] / luck[stale]


def _knots(weights: LeafWeights, start: int, low: int, high: int) -> list[int]:
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
