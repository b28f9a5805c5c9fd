"""Weights as shares of an amount: the choice of each draw, recounted one by one, and the shares that come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from energon_bridge.core.order.blend import lane_step
from energon_bridge.core.order.changes import LeafBans
from energon_bridge.core.order.choose import BlendPosition, Chooser, blend_position, plain_rounds
from energon_bridge.core.order.leaf_order import LeafOrder, slice_length
from energon_bridge.core.order.rng import fold
from energon_bridge.tools.columns.amounts import AmountBlend, AmountDraws, Amounts
from energon_bridge.tools.forecast.epochs import expected_draws


@dataclass(frozen=True)
class PlanLeaf:
    order: LeafOrder
    amounts: Amounts
    bans: LeafBans | None = None


@dataclass(frozen=True)
class Steps:
    """Weights that change at points."""

    weights: Sequence[Sequence[Any]]
    at_draws: tuple[int, ...] = ()
    moves: bool = False

    def at(self, global_draw: int) -> Sequence[Any]:
        return self.weights[sum(point <= global_draw for point in self.at_draws)]

    def points(self) -> Sequence[int]:
        return self.at_draws


def plan_leaf(number: int, amounts: Sequence[float], lanes: int, bans: LeafBans | None = None) -> PlanLeaf:
    parts = np.rint(np.array(amounts) * 1024).astype(np.int64)
    order = LeafOrder(
        num_samples=parts.size,
        num_lanes=lanes,
        key=fold(11, number),
        slice_length=slice_length(parts.size, lanes, 1, None),
        shuffle_buffer_size=0,
        parallel_shard_iters=16,
        block=0,
    )
    return PlanLeaf(order, Amounts(of_samples=parts, total=int(parts.sum()), fingerprint=str(number)), bans)


def lengths(rng: np.random.Generator, mean: float, count: int) -> np.ndarray:
    return np.rint(mean * rng.uniform(0.5, 1.5, count)).clip(1)


def has_left(leaf: PlanLeaf, now: int) -> bool:
    samples = np.arange(leaf.order.num_samples)
    banned = samples < 0 if leaf.bans is None else leaf.bans.at(samples, np.full(samples.size, now))
    return bool(leaf.amounts.of_samples[~banned].sum())


def recounted(
    blend: AmountBlend, leaves: Sequence[PlanLeaf], lane: int, draws: int
) -> list[tuple[int, tuple[int, ...]]]:
    """Choose one draw after the other, as the docstring of `amounts.py` says; give the leaf and the sums after."""
    sums = []
    for leaf in leaves:
        phase = (fold(blend.key, 7, leaf.order.key) + lane * lane_step(blend.num_lanes)) % 2**64
        sums.append(int(Fraction(phase * leaf.amounts.total, leaf.order.num_samples * 2**64)))
    made, found, before = [0] * len(leaves), [], None
    for draw in range(draws):
        now = draw * blend.num_lanes + lane
        weights = next(weights for start, weights in reversed(blend.parts) if start <= now).at(now)
        total = sum(map(Fraction, weights))
        shares = [Fraction(weight) / total for weight in weights]
        left = [share if has_left(leaf, now) else Fraction(0) for share, leaf in zip(shares, leaves, strict=True)]
        shares = left if any(left) else shares
        if before not in (None, shares):
            assert before is not None
            next_key = min(Fraction(one) / share for one, share in zip(sums, before, strict=True) if share)
            sums = [round(one - share * next_key) for one, share in zip(sums, before, strict=True)]
        before = shares
        leaf = min((n for n in range(len(leaves)) if shares[n]), key=lambda n: (sums[n] / float(shares[n]), n))
        rounds = leaves[leaf].order.rounds_at(lane, made[leaf], 1)
        sample = rounds.indices[made[leaf] - rounds.first]
        bans = leaves[leaf].bans
        if bans is None or not bans.at(np.array([sample]), np.array([now]))[0]:
            sums[leaf] += int(leaves[leaf].amounts.of_samples[sample])
        made[leaf] += 1
        found.append((leaf, tuple(sums)))
    return found


def all_banned(count: int, starts: np.ndarray) -> LeafBans:
    return LeafBans(samples=np.arange(count), starts=np.resize(starts, count))


DRAWS = 500
weights = st.lists(st.sampled_from([0, 1, 2, 7, Fraction(1, 3), 0.1, 2.5]), min_size=3, max_size=3).filter(any)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(weights, min_size=3, max_size=3),
    st.lists(st.integers(1, 1500), min_size=2, max_size=2, unique=True),
    st.integers(0, 1500),
    st.integers(1, 5),
    st.sets(st.integers(0, 2), max_size=3),
    st.integers(0, 1 << 30),
)
def test_each_draw_comes_from_the_leaf_that_is_furthest_behind(
    given_weights: list[list[Any]], points: list[int], changed: int, lanes: int, gone: set[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    some = LeafBans(samples=np.arange(0, 40, 3), starts=np.sort(rng.integers(0, DRAWS * lanes, 14)))
    kinds = [np.ones(30), lengths(rng, 5, 41), np.where(rng.random(60) < 0.3, 0, rng.random(60))]
    bans = {1: some} | {n: all_banned(len(kinds[n]), rng.integers(0, DRAWS * lanes, 2)) for n in gone}
    leaves = [plan_leaf(n, amounts, lanes, bans.get(n)) for n, amounts in enumerate(kinds)]
    steps = Steps(given_weights, tuple(sorted(points)))
    parts = ((0, steps), (changed, Steps([given_weights[0]]))) if changed else ((0, steps),)
    blend, lane = AmountBlend(parts=parts, num_lanes=lanes, key=seed), lanes // 2
    expected = recounted(blend, leaves, lane, DRAWS)
    draws = AmountDraws(blend, leaves, lane, BlendPosition(0, [0] * 3))
    stops = sorted({1, 2, *rng.integers(1, DRAWS, 8).tolist(), DRAWS})
    found, sums = [], {}
    for low, high in pairwise([0, *stops]):
        found += draws.take(high - low).tolist()
        sums[high] = draws.sums(high)
    assert found == [leaf for leaf, _ in expected]
    assert sums == {stop: expected[stop - 1][1] for stop in stops}
    for stop in stops[:-1]:  # continued from the state there
        counts = np.bincount(found[:stop], minlength=3).tolist()
        again = AmountDraws(blend, leaves, lane, BlendPosition(stop, counts, sums[stop]))
        assert again.sums(stop) == sums[stop]
        assert again.take(DRAWS - stop).tolist() == found[stop:]
        assert again.sums(DRAWS) == sums[DRAWS]
    assert blend_position(leaves, blend, lane, stops[-2]) == (stops[-2], counts, sums[stops[-2]], 0)


def drawn(leaves: Sequence[PlanLeaf], blend: AmountBlend, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Return leaf and amount of each global draw, in ones."""
    round_cache = plain_rounds(leaves)
    columns = []
    for lane in range(blend.num_lanes):
        chooser = Chooser(round_cache, blend, lane, BlendPosition(0, [0] * len(leaves)))
        columns.append(
            np.concatenate([chooser.picks(2000).members[:, :2] for _ in range(draws // blend.num_lanes // 2000)])
        )
    members = np.stack(columns, axis=1).reshape(-1, 2)
    amounts = np.zeros(len(members))
    for number, leaf in enumerate(leaves):
        here = members[:, 0] == number
        amounts[here] = leaf.amounts.of_samples[members[here, 1]] / 1024
    return members[:, 0], amounts


def test_the_shares_of_ten_datasets_whose_lengths_differ_by_a_hundred() -> None:
    """In every window of a million tokens, over half a million draws; exact in the whole."""
    rng, lanes = np.random.default_rng(5), 24
    means = 4 * 100 ** (np.arange(10) / 9)
    leaves = [plan_leaf(n, lengths(rng, mean, 20_000), lanes) for n, mean in enumerate(means)]
    given_weights = [Fraction(weight) for weight in (1, 1, 1, 2, 1, 3, 1, 1, 2, 1)]
    blend = AmountBlend(parts=((0, Steps([given_weights])),), num_lanes=lanes, key=3)
    of, amounts = drawn(leaves, blend, 528_000)
    total = np.cumsum(amounts)
    begin = np.arange(0, total.size, 89)
    end = np.searchsorted(total, total[begin] + 1e6)
    begin, end = begin[end < total.size], end[end < total.size]
    assert begin.size > 5000
    for number, weight in enumerate(given_weights):
        share = float(weight / sum(given_weights))
        own = np.cumsum(np.where(of == number, amounts, 0))
        windows = (own[end] - own[begin]) / (total[end] - total[begin])
        assert np.abs(windows - share).max() < 0.005
        assert abs(own[-1] / total[-1] - share) < 0.00005
        # By samples the same weights would be shares of draws, and those of tokens up to 100 times off.
        assert number not in (0, 9) or not 0.3 < (np.count_nonzero(of == number) / of.size) / share < 3


def test_no_stretch_of_a_lane_is_further_off_than_the_bound() -> None:
    rng = np.random.default_rng(6)
    leaves = [plan_leaf(n, lengths(rng, mean, 900), 2) for n, mean in enumerate((2, 90, 1500))]
    blend = AmountBlend(parts=((0, Steps([[5, 2, 1]])),), num_lanes=2, key=1)
    of, amounts = drawn(leaves, blend, 20_000)
    of, amounts = of[::2], amounts[::2]
    largest = [float(leaf.amounts.of_samples.max()) / 1024 for leaf in leaves]
    for number, share in enumerate((0.625, 0.25, 0.125)):
        ahead = np.concatenate(([0], np.cumsum(np.where(of == number, amounts, 0) - share * amounts)))
        assert ahead.max() - ahead.min() <= largest[number] + share * sum(largest)


def test_many_lanes_do_not_begin_with_the_same_dataset() -> None:
    leaves = [plan_leaf(n, np.full(1000, mean), 64) for n, mean in enumerate((10, 1000))]
    blend = AmountBlend(parts=((0, Steps([[1, 1]])),), num_lanes=64, key=9)
    of, amounts = drawn(leaves, blend, 64 * 2000)
    first = slice(0, 64 * 101)  # 101 draws of a lane have 1,000 tokens of each
    assert abs(amounts[first][of[first] == 1].sum() / amounts[first].sum() - 0.5) < 0.01
    assert np.diff(np.flatnonzero(of == 1)).max() < 64 * 8


def test_expected_draws_are_about_those_that_are_made() -> None:
    rng = np.random.default_rng(8)
    leaves = [plan_leaf(n, lengths(rng, mean, 3000), 6) for n, mean in enumerate((3, 30, 200))]
    blend = AmountBlend(parts=((0, Steps([[1, 1, 1], [0, 1, 3]], (6000,))),), num_lanes=6, key=2)
    made = sum(np.array(blend_position(leaves, blend, lane, 4000).leaf_draws) for lane in range(6))
    assert made.sum() == 24_000
    assert expected_draws(blend, leaves, 24_000) == pytest.approx(made, abs=150)


def test_rounding_of_large_sums_stays_that_of_whole_numbers() -> None:
    leaves = [plan_leaf(0, [2.0**30], 1), plan_leaf(1, [2.0**30 - 1, 2.0**30 + 1], 1)]
    blend = AmountBlend(parts=((0, Steps([[1, 1]])),), num_lanes=1, key=4)
    assert [leaf for leaf, _ in recounted(blend, leaves, 0, 3000)] == AmountDraws(
        blend, leaves, 0, BlendPosition(0, [0, 0])
    ).take(3000).tolist()


def test_a_dataset_whose_samples_are_all_banned_leaves_the_others_their_shares() -> None:
    first = 2400
    leaves = [
        plan_leaf(0, [3.0] * 50, 4),
        plan_leaf(1, [7.0] * 9, 4, all_banned(9, np.array([first]))),
        plan_leaf(2, [30.0] * 40, 4),
    ]
    blend = AmountBlend(parts=((0, Steps([[1, 5, 2]])),), num_lanes=4, key=3)
    found, amounts = drawn(leaves, blend, 16_000)
    assert (found[:first] == 1).any()
    assert not (found[first:] == 1).any()
    shares = np.bincount(found[first:], amounts[first:]) / amounts[first:].sum()
    assert shares == pytest.approx([1 / 3, 0, 2 / 3], abs=0.005)


def test_lanes_that_bans_leave_nothing_of_an_unshuffled_dataset_draw_from_the_others() -> None:
    """Each of 8 lanes comes to one of the 8 samples."""
    few, rest = plan_leaf(0, [3.0] * 8, 8), plan_leaf(1, [7.0] * 90, 8)
    order = replace(few.order, shuffle=False, block=1)
    first = 800
    bans = LeafBans(samples=np.array([2, 5]), starts=np.array([0, first]))
    blend = AmountBlend(parts=((0, Steps([[5, 1]])),), num_lanes=8, key=3)
    for lane in range(8):
        drawn_from = AmountDraws(
            blend, [replace(few, order=order, bans=bans), rest], lane, BlendPosition(0, [0, 0])
        ).take(900)
        before, after = drawn_from[: first // 8], drawn_from[first // 8 + 1 :]
        assert (before == 0).any() == (lane != 2)
        assert (after == 0).any() == (lane not in (2, 5))
