"""The order of a mix whose weights are shares of an amount, such as tokens, and not of samples (`unit` of a blend).

Every sample has an amount, known from a column. A lane draws from the leaf for which *drawn amount / weight* is least;
of several, from the first. So over any stretch of a lane the amount of a leaf is within `max_i + p_i sum_j max_j` of
its share p_i, where max_j is the largest amount of a sample of leaf j: a bound that does not grow with the stretch.
What the lane has drawn is known from the order alone, so nobody else is asked, and ranks and workers do not matter.

A lane keeps one whole number for each leaf, its *sum*, from which it continues: the amount drawn since the weights last
changed, and what it was ahead then of the leaf that was to come next. Lanes begin apart, each leaf with a sum between 0
and its mean amount, a part of it that is spread over the lanes as the draws of a weighted mix are
(`core/order/blend.py`). A leaf without a weight keeps its sum. Banned draws count nothing; every other draw counts its
amount, whatever becomes of the sample later. So a leaf of which all that counts is banned, or all that the lane comes
to (`core/order/leaf_order.py`), could never reach its share: from then on it is one without a weight.

Amounts are whole multiples of 1/1024 and sums exact; only *sum / weight* is a float, the quotient of two numbers, which
IEEE 754 rounds alike everywhere. So neither the machine nor how many draws are looked up at once changes the order.
"""

from __future__ import annotations

import dataclasses
import hashlib
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.mix.leaves import OpenLeaf
from energon_bridge.core.order.blend import lane_step
from energon_bridge.core.order.changes import WeightParts
from energon_bridge.core.order.choose import BlendPosition, OrderedLeaf
from energon_bridge.core.order.leaf_order import Memo
from energon_bridge.core.order.rng import MASK64, IntArray, fold
from energon_bridge.tools.columns.expression import numbers_of_samples

_PHASE = 7
_FEWEST, _MOST = 32, 512
"""Draws chosen at a time: few at first, since there are many lanes, then twice as many each time."""
_LOOKED_UP = 32
"""Fewest draws of a leaf whose amounts are looked up at once."""
_MOST_AMOUNT = 2.0**50
"""The largest sum of the amounts of a leaf; so no run reaches 2^63 of the parts below."""


PARTS = 1024
"""Amounts are stored as whole numbers of 1/1024, so that sums are exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """How much each sample of a leaf counts in a blend by amounts.

    Attributes:
        of_samples: By number in the dataset, in parts of 1/1024, shape (dataset.num_samples,).
        total: The sum over the samples of the leaf.
        fingerprint: A hash of the amounts of these samples.
    """

    of_samples: np.ndarray
    total: int
    fingerprint: str

    def mean(self, num_samples: int) -> float:
        """Return the mean amount of the samples of a leaf that has so many."""
        return self.total / PARTS / num_samples


def counting(leaf: OpenLeaf, unit: str, *, where: str) -> OpenLeaf:
    """Return a leaf with the amounts of its samples; `unit` is the expression of columns that gives them.

    Raises ConfigurationError for a wrong expression or column, MetadataError for a dataset that can have none.
    """
    path = leaf.dataset.path
    own_samples = np.arange(leaf.start, leaf.stop) if leaf.kept is None else leaf.kept
    every = numbers_of_samples(leaf.dataset, unit, where=where, samples=own_samples, use="counted by them", counts=True)
    whole = np.rint(every * PARTS)
    own = whole[leaf.start : leaf.stop] if leaf.kept is None else whole[leaf.kept]
    total = float(own.sum())
    if not 0 < total <= _MOST_AMOUNT * PARTS:
        raise ConfigurationError(
            f"{path}: its {leaf.num_samples} samples have {total / PARTS:g} `{unit}` together, and the weights of the "
            f"blend are shares of it: expected more than 0, and at most {_MOST_AMOUNT:g}"
        )
    small = np.int32 if float(whole.max()) <= np.iinfo(np.int32).max else np.int64
    own = own.astype(np.int64)
    whole = whole.astype(small)
    digest = hashlib.blake2b(own.tobytes(), digest_size=8).hexdigest()
    amounts = Amounts(of_samples=whole, total=int(own.sum()), fingerprint=digest)
    return dataclasses.replace(leaf, amounts=amounts)


class AmountBlend(WeightParts):
    """The weights of a mix by amounts."""

    def draws(self, leaves: Sequence[OrderedLeaf], lane: int, at: BlendPosition) -> AmountDraws:
        """Return the draws of a lane, from a position on."""
        return AmountDraws(self, leaves, lane, at)

    @cached_property
    def shares(self) -> Memo[int, list[Fraction]]:
        """The shares of the leaves in each piece; they add up to 1."""
        return Memo(self._shares, len(self.starts))

    def _shares(self, piece: int) -> list[Fraction]:
        exact = [Fraction(weight) for weight in self.weights_of(piece)]
        total = sum(exact)
        return [weight / total for weight in exact]

    def first_sum(self, lane: int, leaf: OrderedLeaf) -> int:
        """Return the sum of a leaf with which a lane begins."""
        phase = (fold(self.key, _PHASE, leaf.order.key) + lane * lane_step(self.num_lanes)) & MASK64
        return phase * leaf.amounts.total // leaf.order.num_samples >> 64


class _Chosen(NamedTuple):
    """Consecutive draws: the first one, the leaf and amount of each, and the sums before them."""

    first: int
    leaves: IntArray
    amounts: IntArray
    sums: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.first + self.leaves.size


class AmountDraws:
    """The leaves of the draws of one lane, from a position on.

    Args:
        blend: The weights.
        leaves: The leaves, with their amounts and bans.
        lane: Number of the lane.
        at: The draw to begin with, and what each leaf has drawn before it.
    """

    def __init__(self, blend: AmountBlend, leaves: Sequence[OrderedLeaf], lane: int, at: BlendPosition) -> None:
        self._blend = blend
        self._leaves = leaves
        self._lane = lane
        self._origin = at.origin
        self._draw = at.draw
        self._leaf_draws = list(at.leaf_draws)
        self._given = tuple(at.sums) or (0,) * len(leaves)
        self._sums = list(self._given)
        if at.draw == at.origin:
            self._sums = [blend.first_sum(lane, leaf) for leaf in leaves]
        self._chosen: deque[_Chosen] = deque()
        self._ahead: list[IntArray] = [np.zeros(0, dtype=np.int64)] * len(leaves)  # amounts of the next draws
        self._size = _FEWEST
        self._at = at.draw
        self._bans = sorted({start for leaf in leaves if leaf.bans is not None for start in leaf.bans.starts.tolist()})
        self._banned_from = -1
        self._spent: dict[int, list[bool]] = {-1: [False] * len(leaves)}  # by the start of the bans that hold

    def take(self, count: int) -> IntArray:
        """Return the leaves of the next draws, shape (count,)."""
        parts = []
        while count:
            if self._at == self._draw:
                self._chosen.append(self._choose())
            last = self._chosen[-1]
            part = last.leaves[self._at - last.first : self._at - last.first + count]
            parts.append(part)
            self._at += part.size
            count -= part.size
        return parts[0] if len(parts) == 1 else np.concatenate([*parts, np.zeros(0, dtype=np.int64)])

    def sums(self, draw: int) -> tuple[int, ...]:
        """Return the sum of amounts of each leaf before a draw. Draws must be asked about in ascending order."""
        chosen = self._chosen
        while chosen and chosen[0].end < draw:
            chosen.popleft()
        if not chosen or draw <= max(chosen[0].first, self._origin):
            return self._given if draw != self._origin else (0,) * len(self._leaves)
        first = chosen[0]
        sums = np.array(first.sums, dtype=np.int64)
        np.add.at(sums, first.leaves[: draw - first.first], first.amounts[: draw - first.first])
        return tuple(sums.tolist())

    def _choose(self) -> _Chosen:
        """Choose some draws, all with the same weights and bans.

        Each leaf has the sum of the amounts that it has delivered so far; the next draw goes to the leaf whose sum,
        divided by its share, is smallest. So the draws of all leaves, sorted by that key, are the order.
        """
        draw = self._draw
        lanes = self._blend.num_lanes
        now = draw * lanes + self._lane
        shares = self._shares(now)
        # When shares change, sums are counted anew from the point that the slowest leaf has reached under the old ones:
        # a leaf keeps what it is ahead, and none has to catch up what its new share would have given it before.
        if draw > self._origin and (old := self._shares(now - lanes)) != shares:
            reached = min(one / share for one, share in zip(self._sums, old, strict=True) if share)
            self._sums = [round(one - share * reached) for one, share in zip(self._sums, old, strict=True)]
        count = min([self._size, *(-((self._lane - end) // lanes) - draw for end in self._next_changes(now))])
        self._size = min(_MOST, 2 * self._size)
        active = [number for number, share in enumerate(shares) if share]
        weights = [float(shares[number]) for number in active]
        wanted = self._guesses(active, weights, count)
        while True:
            starts, amounts = self._starts(active, wanted)
            keys = np.concatenate([one / weight for one, weight in zip(starts, weights, strict=True)])
            ends = np.cumsum([one.size for one in starts]) - 1
            order = np.argsort(keys, kind="stable")  # ties in order of the leaves, and of their draws
            places = np.empty_like(order)
            places[order] = np.arange(order.size)
            # The order is certain up to where the first of the leaves runs out of looked-up draws.
            num_certain = int(places[ends].min())
            if 2 * num_certain >= count:
                break
            slowest = int(places[ends].argmin())
            wanted[slowest] = 2 * wanted[slowest] + count
        order = order[: min(num_certain, count)]
        sizes = [one.size for one in starts]
        leaves = np.repeat(np.array(active), sizes)[order]
        amounts = amounts[order]
        chosen = _Chosen(draw, leaves, amounts, tuple(self._sums))
        for leaf, number in zip(active, np.bincount(leaves, minlength=len(shares))[active].tolist(), strict=True):
            self._sums[leaf] += int(self._ahead[leaf][:number].sum())
            self._ahead[leaf] = self._ahead[leaf][number:]
            self._leaf_draws[leaf] += number
        self._draw += order.size
        return chosen

    def _shares(self, now: int) -> list[Fraction]:
        """Return the shares at a global draw: 0 of leaves that have nothing left, unless all are such."""
        shares = self._blend.shares[self._blend.piece(now)]
        if (start := self._bans_at(now)[1]) not in self._spent:
            self._spent[start] = [leaf.bans is not None and not _left(leaf, self._lane, start) for leaf in self._leaves]
        if not any(spent := self._spent[start]):
            return shares
        left = [Fraction(0) if gone else share for share, gone in zip(shares, spent, strict=True)]
        return left if any(left) else shares

    def _bans_at(self, now: int) -> tuple[int, int]:
        """Return how many bans hold at a global draw, and the draw from which the last of them holds; -1: none."""
        num_bans = bisect_right(self._bans, now)
        return num_bans, self._bans[num_bans - 1] if num_bans else -1

    def _next_changes(self, now: int) -> list[int]:
        """Return the next global draws at which weights or bans change; forget amounts if bans have."""
        num_bans, banned_from = self._bans_at(now)
        if banned_from != self._banned_from:
            self._banned_from = banned_from
            self._ahead = [one[:0] for one in self._ahead]
        piece = self._blend.piece(now) + 1
        return [*self._bans[num_bans : num_bans + 1], *self._blend.starts[piece : piece + 1]]

    def _guesses(self, active: Sequence[int], weights: Sequence[float], count: int) -> list[int]:
        """Return an upper guess of how many of the next `count` draws come from each leaf."""
        rates = []
        for leaf, weight in zip(active, weights, strict=True):
            amounts = self._leaves[leaf].amounts
            rates.append(weight * self._leaves[leaf].order.num_samples / amounts.total)
        total = sum(rates)
        return [int(count * rate / total * 1.1) + 4 for rate in rates]

    def _starts(self, active: Sequence[int], wanted: Sequence[int]) -> tuple[list[IntArray], IntArray]:
        """Return the sums of some leaves before each of their next draws and after the last, and the amounts."""
        starts = []
        amounts = []
        for leaf, count in zip(active, wanted, strict=True):
            while self._ahead[leaf].size < count:
                self._look_up(leaf, count - self._ahead[leaf].size)
            ahead = self._ahead[leaf][:count]
            sums = np.empty(count + 1, dtype=np.int64)
            sums[0] = self._sums[leaf]
            np.cumsum(ahead, out=sums[1:])
            sums[1:] += self._sums[leaf]
            starts.append(sums)
            amounts += [ahead, _NONE]
        return starts, np.concatenate(amounts)

    def _look_up(self, number: int, count: int) -> None:
        """Look up the amounts of further draws of a leaf."""
        leaf = self._leaves[number]
        ahead = self._ahead[number]
        first = self._leaf_draws[number] + ahead.size
        rounds = leaf.order.rounds_at(self._lane, first, max(count, _LOOKED_UP))
        samples = rounds.indices[first - rounds.first :]
        amounts = leaf.amounts.of_samples[samples].astype(np.int64)
        if leaf.bans is not None:
            amounts[leaf.bans.at(samples, np.full(samples.size, self._banned_from))] = 0
        self._ahead[number] = np.concatenate((ahead, amounts))


def _left(leaf: OrderedLeaf, lane: int, start: int) -> int:
    """Return the amount of a leaf that a lane comes to and that is not banned at a global draw."""
    assert leaf.bans is not None
    banned = leaf.bans.samples[leaf.bans.starts <= start]
    total = leaf.amounts.total
    if leaf.order.classes > 1:
        own = leaf.order.samples(np.arange(leaf.order.num_samples))
        total = int(leaf.amounts.of_samples[own[leaf.order.comes_to(lane, own)]].sum(dtype=np.int64))
        banned = banned[leaf.order.comes_to(lane, banned)]
    return total - int(leaf.amounts.of_samples[banned].sum(dtype=np.int64))


_NONE: IntArray = np.zeros(1, dtype=np.int64)
"""In place of the amount of a draw that is not looked up yet."""
