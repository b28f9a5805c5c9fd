"""The order of a mix: which leaf each draw of a lane comes from.

Both orders are integer arithmetic on the number of the draw, so a resume rebuilds nothing.

*Weights* (`WeightedBlend`). Draw k of lane l takes the leaf in whose interval of cumulative weights
`u = (phase + l*B + k*A) mod 2^64` falls, with `A = floor(2^64 (sqrt5 - 1)/2)`, B chosen for the number of lanes
(`lane_step`; up to order version 1 it was `floor(2^64 (sqrt3 - 1))` for all), the weights as 64-bit thresholds and the
leaves in order of identity. Multiples of such numbers fill every interval evenly: a lane stays within a few draws of
weight x prefix, and in any 240 consecutive draws of the global order each leaf is within 5 draws of its share. The rule
is memoryless, so weights may change from any draw on. Weights that move between two points of their schedules, n draws
apart, do so in `min(256, floor(sqrt(n)/4) + 1)` equal steps of the global order, each with the weights of its middle
draw: up to 10^6 draws, that is never more than two draws off a straight line. Steps of five leaves in 1 to 480 lanes
kept each lane within 9 draws of its sum of shares, after any draw, and any 240 draws of the global order within 6.

*Repetitions* (`EpochizedBlend`). In mix epoch E leaf i of N samples, repeated r times, gives `floor((E+1)Nr) -
floor(ENr)` draws over all lanes together, divided like the samples of a leaf. A lane spreads its q draws of a leaf
evenly, draw j at place `(j + phase)/q`, and merges the draws of all leaves in the order of these places, which are
32-bit fixed-point numbers. So all leaves of a mix epoch end at about the same time, each exactly.

A pass over validation data takes its leaves one after the other (`InTurns`).
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Protocol

import numpy as np

from energon_bridge.core.order.changes import WeightParts
from energon_bridge.core.order.leaf_order import Memo
from energon_bridge.core.order.rng import GOLDEN, MASK64, IntArray, UIntArray, below, fold

# ---------------------------------------------------------------------------------------------------------------------
# The step between the lanes of a weighted mix, chosen so that consecutive draws of all lanes together are even.
#
# Draw k of lane l lies at `l*B + k*A` on a circle of 2^64, `A = floor(2^64 (sqrt5 - 1)/2)`, and a leaf is an arc of the
# circle (`order/blend.py`). B is chosen for the number of lanes L, so that L lanes add up to one step of a lane:
# `B = floor((A + j 2^64) / L)` for a whole number j. The L lanes, draw by draw in turn, are then multiples of the one
# number B, wherever a stretch of them begins; within 240 draws rounding moves none by `240 + L` of 2^64 or more.
#
# - Candidates are `j = floor(i L / n)` for `i < n = min(L, 256)`.
# - The *miss* of n points is the most by which any arc holds more or fewer of them than n times its length. Of 240
#   consecutive draws it must be at most 5: whatever the weights and the phase are, no leaf is further from its share.
# - Of the candidates that keep to this the one is taken whose continued fraction `B / 2^64` has the least sum of
#   partial quotients, up to the first convergent with a denominator above 2^20: the smaller they are, the more even
#   are stretches of any length. Ties go to the smaller j, and where none kept to it the least miss would win.
#
# Everything is decided by integers, so every machine chooses the same B. A change of this choice is a change of
# order. Source of both measures: L. Kuipers and H. Niederreiter, "Uniform Distribution of Sequences", 1974, chapter
# 2, where the miss by n is called discrepancy.


DRAW_STEP = GOLDEN
_DRAWS = 240
_MOST = 5
_CANDIDATES = 256
_LARGEST_DENOMINATOR = 1 << 20
_BITS = 48
"""Bits of a point that are used: 240 times as much fits an int64, and the rest is far below `_MARGIN`."""
_MARGIN = 1 << (_BITS - 20)


@functools.cache
def lane_step(num_lanes: int) -> int:
    """Return B, the step from a lane's draw to the same draw of the next lane, in 2^64ths of the circle.

    Cost: up to some milliseconds for the first call of a process with this number of lanes.
    """
    count = min(num_lanes, _CANDIDATES)
    steps = [(DRAW_STEP + ((i * num_lanes // count) << 64)) // num_lanes for i in range(count)]
    points: UIntArray = np.outer(np.array(steps, dtype=np.uint64), np.arange(_DRAWS, dtype=np.uint64))
    misses = np.maximum(_misses(points), (_MOST << _BITS) - _MARGIN).tolist()
    return min(zip(misses, map(_quotients, steps), steps, strict=True))[-1]


def _misses(points: UIntArray) -> IntArray:
    """Return the miss of each row of points in 2^-48 draws, shape (rows,)."""
    # An arc from the i-th point to the j-th holds j - i + 1 of n points with its ends and j - i - 1 without them. Both
    # are furthest from n times its length where number - n * point is largest at one end and smallest at the other.
    ordered = np.sort(points >> np.uint64(64 - _BITS), axis=1).astype(np.int64)
    number = np.arange(points.shape[1], dtype=np.int64) << _BITS
    ahead = number - points.shape[1] * ordered
    return ahead.max(axis=1) - ahead.min(axis=1) + (1 << _BITS)


def _quotients(step: int) -> int:
    """Return the sum of the partial quotients of `step / 2^64` that stretches of some million draws notice."""
    total = 0
    over = 1 << 64
    under = step
    before = 0
    denominator = 1
    while under and denominator <= _LARGEST_DENOMINATOR:
        quotient, rest = divmod(over, under)
        total += quotient
        over = under
        under = rest
        before, denominator = denominator, quotient * denominator + before
    return total


# ---------------------------------------------------------------------------------------------------------------------
# The order of a mix: which leaf each draw of a lane comes from.


_PHASE = 5
_EPOCH = 6
_PLACES = 1 << 32
_COUNTED = 16
"""Draws per leaf up to which drawing them is cheaper than counting by arithmetic."""


class Blend(Protocol):
    """Says which leaf each draw of a lane comes from."""

    def leaves(self, lane: int, draw: int, count: int) -> IntArray:
        """Return the leaves of up to `count` consecutive draws, at least of one, shape (draws,)."""

    def counts(self, lane: int, draw: int) -> IntArray:
        """Return how many of a lane's draws before `draw` come from each leaf, shape (leaves,)."""


def thresholds(weights: Sequence[float | Fraction]) -> UIntArray:
    """Return where each leaf's interval of [0, 2^64) ends, shape (leaves,).

    Fractions are taken exactly, floats to 62 binary places of their sum. A leaf of weight 0 has an empty interval; the
    last other one ends at 2^64 - 1, inclusive.
    """
    exact = [weight for weight in weights if isinstance(weight, Fraction)]
    if len(exact) == len(weights):
        unit = math.lcm(*(weight.denominator for weight in exact))
        parts = [weight.numerator * (unit // weight.denominator) for weight in exact]
    else:
        unit_float = 2.0 ** (62 - math.frexp(float(max(weights)))[1])
        parts = [int(weight * unit_float) for weight in weights]
    total = sum(parts)
    return np.array([min(MASK64, (end << 64) // total) for end in itertools.accumulate(parts)], dtype=np.uint64)


class WeightedBlend(WeightParts):
    """Leaves chosen by weight, without end."""

    def leaves(self, lane: int, draw: int, count: int) -> IntArray:
        """Return the leaf of each of up to `count` consecutive draws of a lane, up to where the weights change."""
        piece = self.piece(draw * self.num_lanes + lane)
        end = self._end(lane, piece)
        if end is not None:
            count = min(count, end - draw)
        ends, last = self._intervals[piece]
        # uint64 wraps at 2^64, which is the circle. `last` takes what rounding leaves above the last threshold.
        u = np.uint64(self._place(lane, draw)) + np.arange(count, dtype=np.uint64) * np.uint64(DRAW_STEP)
        return np.minimum(np.searchsorted(ends, u, side="right"), last)

    def counts(self, lane: int, draw: int) -> IntArray:
        """Return how many of a lane's draws before `draw` come from each leaf, shape (leaves,).

        Cost: a few microseconds per leaf and piece of constant weights, however many draws.
        """
        total = np.zeros(len(self._intervals[0][0]), dtype=np.int64)
        at = 0
        for piece in range(len(self.starts)):
            end = self._end(lane, piece)
            stop = draw if end is None else min(draw, end)
            if stop - at <= _COUNTED * total.size:
                total += np.bincount(self.leaves(lane, at, stop - at), minlength=total.size) if stop > at else 0
            else:
                ends, last = self._intervals[piece]
                first = self._place(lane, at)
                # The last leaf's threshold is 2^64 - 1, inclusive (`thresholds`); its interval ends exactly at 2^64.
                exact = [*ends[:last].tolist(), *[1 << 64] * (len(ends) - last)]
                total += np.diff([_below(first, stop - at, end) for end in exact], prepend=0)
            at = max(at, stop)
        return total

    def _end(self, lane: int, piece: int) -> int | None:
        """Return the first draw of a lane after a piece; None for the last one."""
        if piece + 1 == len(self.starts):
            return None
        # The smallest k with k L + lane >= start: the quotient rounded up, as -(-x // L) does.
        return max(0, -((lane - self.starts[piece + 1]) // self.num_lanes))

    @cached_property
    def _intervals(self) -> Memo[int, tuple[UIntArray, int]]:
        """By piece: the thresholds of the leaves, and the last leaf that has a weight."""
        return Memo(self._interval, len(self.starts))

    def _interval(self, piece: int) -> tuple[UIntArray, int]:
        weights = self.weights_of(piece)
        return thresholds(weights), max(leaf for leaf, one in enumerate(weights) if one > 0)

    def _place(self, lane: int, draw: int) -> int:
        return (self._phase + lane * lane_step(self.num_lanes) + draw * DRAW_STEP) & MASK64

    @cached_property
    def _phase(self) -> int:
        return fold(self.key, _PHASE)


@dataclass(frozen=True, kw_only=True)
class EpochizedBlend:
    """Leaves repeated a number of times in each mix epoch, one mix epoch after the other.

    Args:
        samples: Samples of each leaf, in order of their identities.
        repetitions: How often a mix epoch goes through each.
        num_lanes: L.
        key: Key of the run.
        rotations: The lane that comes first in each leaf (`LeafOrder.rotation`).
        blocks: Draws of each leaf that a lane takes in one turn (`LeafOrder.dealt_block`).
        sequence: Leaves one after the other, in this order, instead of merged.
    """

    samples: tuple[int, ...]
    repetitions: tuple[Fraction, ...]
    num_lanes: int
    key: int
    rotations: tuple[int, ...]
    blocks: tuple[int, ...]
    sequence: tuple[int, ...] | None = None

    def drawn(self, lane: int, epoch: int) -> IntArray:
        """Return a lane's draws of each leaf before a mix epoch, shape (leaves,)."""
        return self._drawn[lane, epoch]

    @cached_property
    def _drawn(self) -> Memo[tuple[int, int], IntArray]:
        return Memo(self._count, 4 * self.num_lanes)

    def _count(self, place: tuple[int, int]) -> IntArray:
        lane, epoch = place
        blocks = np.array(self.blocks, dtype=np.int64)
        # A turn gives each lane one block. In the last, unfinished turn the `ahead` lanes before this one come first.
        turns, rest = np.divmod(self._totals[epoch], blocks * self.num_lanes)
        ahead = (lane - np.array(self.rotations, dtype=np.int64)) % self.num_lanes
        return turns * blocks + np.clip(rest - ahead * blocks, 0, blocks)

    @cached_property
    def _totals(self) -> Memo[int, IntArray]:
        """By mix epoch: the draws of each leaf before it, all lanes together, shape (leaves,)."""
        return Memo(self._total, 4)

    def _total(self, epoch: int) -> IntArray:
        return np.array([int(epoch * n) for n in self._per_epoch], dtype=np.int64)

    @cached_property
    def _per_epoch(self) -> list[Fraction]:
        """Draws of each leaf in a mix epoch, over all lanes and as a fraction."""
        return [n * r for n, r in zip(self.samples, self.repetitions, strict=True)]

    def epoch_of(self, lane: int, draw: int) -> int:
        """Return the mix epoch of a lane's draw."""
        # A guess by the average, then corrected: lanes differ by a block of each leaf at most.
        epoch = int(draw * self.num_lanes / sum(self._per_epoch))
        while epoch and int(self.drawn(lane, epoch).sum()) > draw:
            epoch -= 1
        while int(self.drawn(lane, epoch + 1).sum()) <= draw:
            epoch += 1
        return epoch

    def leaves(self, lane: int, draw: int, count: int) -> IntArray:
        """Return the leaf of each of up to `count` consecutive draws of a lane; it stops at the end of a mix epoch."""
        epoch = self.epoch_of(lane, draw)
        before = self.drawn(lane, epoch)
        quotas = self.drawn(lane, epoch + 1) - before
        if self.sequence is not None:
            ordered = np.repeat(np.array(self.sequence), quotas[list(self.sequence)])
            low = draw - int(before.sum())
            return ordered[low : low + count]
        phases = below(fold(self.key, _EPOCH, lane, epoch), quotas.size, _PLACES - 1)
        start = draw - int(before.sum())
        stop = min(start + count, int(quotas.sum()))
        # Only draws whose places lie between those of the first and the last one asked for are merged: `sizes` of each
        # leaf, after the `first` ones. All arrays after `leaf` have one entry per such draw.
        place = _place_of(quotas, phases, start)
        first = _taken(quotas, phases, place)
        sizes = _taken(quotas, phases, _place_of(quotas, phases, stop - 1) + 1) - first
        leaf = np.repeat(np.arange(quotas.size), sizes)
        number = np.arange(leaf.size) + np.repeat(first - (np.cumsum(sizes) - sizes), sizes)
        places = ((number << 32) + phases[leaf]) // quotas[leaf]
        merged = leaf[np.lexsort((leaf, places))]
        earlier = start - int(first.sum())  # they share the place of the first draw asked for
        return merged[earlier : earlier + stop - start]

    def counts(self, lane: int, draw: int) -> IntArray:
        epoch = self.epoch_of(lane, draw)
        before = self.drawn(lane, epoch)
        number = draw - int(before.sum())
        quotas = self.drawn(lane, epoch + 1) - before
        if self.sequence is not None:
            order = list(self.sequence)
            inside = np.zeros_like(quotas)
            ends = np.cumsum(quotas[order])
            inside[order] = np.clip(number - (ends - quotas[order]), 0, quotas[order])
            return before + inside
        phases = below(fold(self.key, _EPOCH, lane, epoch), quotas.size, _PLACES - 1)
        whole = _taken(quotas, phases, _place_of(quotas, phases, number))
        rest = number - int(whole.sum())  # of several that share one place
        if rest:
            whole = whole + np.bincount(self.leaves(lane, draw - rest, rest), minlength=whole.size)
        return before + whole


@dataclass(frozen=True, kw_only=True, eq=False)
class InTurns:
    """Leaves one after the other, in turns; for streams of one lane.

    Args:
        sizes: Draws of each leaf in each turn, shape (turns, leaves).
    """

    sizes: IntArray

    @cached_property
    def _ends(self) -> list[int]:
        return np.cumsum(self.sizes).tolist()

    @cached_property
    def _before(self) -> IntArray:
        """Draws of each leaf before each turn, shape (turns, leaves)."""
        return np.cumsum(self.sizes, axis=0) - self.sizes

    def leaves(self, lane: int, draw: int, count: int) -> IntArray:
        """Return the leaf of each of `count` consecutive draws."""
        piece = bisect_right(self._ends, draw)
        leaves = self.sizes.shape[1]
        if draw + count <= self._ends[piece]:  # nearly always, and many times faster
            return np.full(count, piece % leaves)
        return np.searchsorted(self._ends, np.arange(draw, draw + count), side="right") % leaves

    def counts(self, lane: int, draw: int) -> IntArray:
        """Return how many of the draws before `draw`, which is no end, come from each leaf, shape (leaves,)."""
        piece = bisect_right(self._ends, draw)
        turn, leaf = divmod(piece, self.sizes.shape[1])
        counts = self._before[turn].copy()
        counts[:leaf] += self.sizes[turn, :leaf]
        counts[leaf] += draw - self._ends[piece] + self.sizes[turn, leaf]
        return counts


def _below(first: int, count: int, end: int) -> int:
    """Return how many of `(first + k A) mod 2^64`, k < count, are below `end`."""
    # x mod M < end  <=>  floor(x / M) - floor((x - end) / M) = 1, for 0 < end <= M
    if end == 0:
        return 0
    modulus = 1 << 64
    passed = floor_sum(count, modulus, DRAW_STEP, first)
    return passed - floor_sum(count, modulus, DRAW_STEP, first + modulus - end) + count


def floor_sum(count: int, modulus: int, step: int, first: int) -> int:
    """Return `sum((k * step + first) // modulus for k in range(count))`, all non-negative, in O(log modulus)."""
    total = 0
    while count:
        total += count * (count - 1) // 2 * (step // modulus) + count * (first // modulus)
        step = step % modulus
        first = first % modulus
        top = step * count + first
        if top < modulus:
            break
        count, first = divmod(top, modulus)
        modulus, step = step, modulus
    return total


def _taken(quotas: IntArray, phases: IntArray, place: int) -> IntArray:
    """Return how many draws of each leaf have a place below `place`, shape (leaves,)."""
    # floor((j 2^32 + phase) / q) < place  <=>  j 2^32 + phase < place q
    ends = -((phases - place * quotas) >> 32)
    return np.minimum(np.maximum(ends, 0), quotas)  # np.clip takes five times as long for so few


def _place_of(quotas: IntArray, phases: IntArray, number: int) -> int:
    """Return the place of a draw of the merge, by bisection."""
    low = 0
    high = _PLACES
    while high - low > 1:
        middle = (low + high) // 2
        if int(_taken(quotas, phases, middle).sum()) > number:
            high = middle
        else:
            low = middle
    return low
