"""How far the lanes of a weighted mix stand apart, so that consecutive draws of all lanes together are even.

Draw k of lane l lies at `l*B + k*A` on a circle of 2^64, `A = floor(2^64 (sqrt5 - 1)/2)`, and a leaf is an arc of the
circle (`plan/blend.py`). B is chosen for the number of lanes L, so that L lanes add up to one step of a lane:
`B = floor((A + j 2^64) / L)` for a whole number j. The L lanes, draw by draw in turn, are then multiples of the one
number B, wherever a stretch of them begins; within 240 draws rounding moves none by `240 + L` of 2^64 or more.

- Candidates are `j = floor(i L / n)` for `i < n = min(L, 256)`.
- The *miss* of n points is the most by which any arc holds more or fewer of them than n times its length. Of 240
  consecutive draws it must be at most 5: whatever the weights and the phase are, no leaf is further from its share.
- Of the candidates that keep to this the one is taken whose continued fraction `B / 2^64` has the least sum of partial
  quotients, up to the first convergent with a denominator above 2^20: the smaller they are, the more even are stretches
  of any length. Ties go to the smaller j, and where none kept to it the least miss would win.

Everything is decided by integers, so every machine chooses the same B. A change of this choice is a change of order.
Source of both measures: L. Kuipers and H. Niederreiter, "Uniform Distribution of Sequences", 1974, chapter 2, where the
miss by n is called discrepancy.
"""

from __future__ import annotations

import functools

import numpy as np

from energon_bridge.rng import IntArray, UIntArray

DRAW_STEP = 0x9E3779B97F4A7C15
_WINDOW, _MOST = 240, 5
_CANDIDATES = 256
_LARGEST_DENOMINATOR = 1 << 20
_PLACES = 48
"""Bits of a point that are looked at: 240 times as many fit an int64. What is cut off is far below `_MARGIN`."""
_MARGIN = 1 << (_PLACES - 20)


@functools.cache
def lane_step(num_lanes: int) -> int:
    """Return B, the step from a lane's draw to the same draw of the next lane, in 2^64ths of the circle.

    Cost: up to some milliseconds for the first call of a process with this number of lanes.
    """
    count = min(num_lanes, _CANDIDATES)
    steps = [(DRAW_STEP + ((i * num_lanes // count) << 64)) // num_lanes for i in range(count)]
    points: UIntArray = np.outer(np.array(steps, dtype=np.uint64), np.arange(_WINDOW, dtype=np.uint64))
    misses = np.maximum(_misses(points), (_MOST << _PLACES) - _MARGIN).tolist()
    return min(zip(misses, map(_quotients, steps), steps, strict=True))[-1]


def _misses(points: UIntArray) -> IntArray:
    """Return the miss of each row of points in 2^-48 draws, shape (rows,)."""
    # An arc from the i-th point to the j-th holds j - i + 1 of n points with its ends and j - i - 1 without them.
    ordered = np.sort(points >> np.uint64(64 - _PLACES), axis=1).astype(np.int64)
    number = np.arange(points.shape[1], dtype=np.int64) << _PLACES
    ahead = number - points.shape[1] * ordered
    return ahead.max(axis=1) - ahead.min(axis=1) + (1 << _PLACES)


def _quotients(step: int) -> int:
    """Return the sum of the partial quotients of `step / 2^64` that stretches of some million draws notice."""
    total, over, under = 0, 1 << 64, step
    before, denominator = 0, 1
    while under and denominator <= _LARGEST_DENOMINATOR:
        quotient, rest = divmod(over, under)
        total, over, under = total + quotient, under, rest
        before, denominator = denominator, quotient * denominator + before
    return total
