"""Which rank runs which microbatch: a permutation of every global batch, never less even than as it came."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, strategies as st

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.trainers.replica.assignment import (
    Imbalance,
    _exchanged,
    _freely_exchanged,
    assign_microbatches,
    imbalance,
)

COSTS = st.one_of(
    st.integers(0, 5).map(float), st.floats(0, 1e12, allow_subnormal=False), st.floats(1e-3, 1e-2), st.just(1.0)
)
SLACK = 1 + 1e-9  # costs are rounded to multiples of 2^-40 of the largest


@st.composite
def global_batches(draw: st.DrawFn) -> tuple[list[float], int]:
    ranks, rounds = draw(st.integers(1, 9)), draw(st.integers(1, 7))
    return draw(st.lists(COSTS, min_size=ranks * rounds, max_size=ranks * rounds)), ranks


def as_it_comes(count: int, ranks: int) -> np.ndarray:
    return np.arange(count).reshape(-1, ranks)


def check(costs: list[float], ranks: int) -> np.ndarray:
    """Check what holds for every global batch."""
    found = assign_microbatches(costs, ranks)
    assert found.shape == (len(costs) // ranks, ranks)  # equal counts
    assert sorted(found.ravel().tolist()) == list(range(len(costs)))
    before, after = imbalance(costs, as_it_comes(len(costs), ranks)), imbalance(costs, found)
    assert 1 / SLACK <= after.step <= before.step * SLACK
    assert after.step <= after.round * SLACK
    assert after.round <= before.round * SLACK
    return found


@given(global_batches())
def test_any_costs(batch: tuple[list[float], int]) -> None:
    check(*batch)


@pytest.mark.parametrize(("ranks", "rounds", "highest"), [(2, 2, 4), (2, 3, 2), (3, 2, 2), (2, 4, 2)])
def test_every_small_global_batch(ranks: int, rounds: int, highest: int) -> None:
    """All costs of a few values; with two rounds no other step can be lower."""
    for costs in itertools.product(map(float, range(highest)), repeat=ranks * rounds):
        found = check(list(costs), ranks)
        if rounds == 2:
            line = sorted(costs)
            best = max(low + high for low, high in zip(line, reversed(line), strict=True))
            assert np.array(costs)[found].sum(0).max() == best


@pytest.mark.parametrize("exchanged", [_exchanged, _freely_exchanged])
def test_exchanges_end_where_none_helps(exchanged: Callable[..., np.ndarray]) -> None:
    for seed in range(20):
        costs = np.random.default_rng(seed).integers(1, 1000, 24)
        once = exchanged(costs, as_it_comes(24, 6))
        assert costs[once].sum(0).max() < costs[as_it_comes(24, 6)].sum(0).max()
        assert np.array_equal(exchanged(costs, once), once)


@pytest.mark.parametrize("seed", range(2))
def test_loads_do_not_depend_on_which_microbatch_came_first(seed: int) -> None:
    """Neither where costs are all different nor where most are equal."""
    rng = np.random.default_rng(seed)
    for costs in (rng.lognormal(0, 0.5, 128), rng.integers(1, 4, 128).astype(float)):
        other = rng.permutation(costs)
        loads = [np.sort(line[assign_microbatches(line, 16)].sum(0)).tolist() for line in (costs, other)]
        assert loads[0] == pytest.approx(loads[1], rel=1e-12)


@given(global_batches(), st.integers(-8, 8))
def test_the_unit_of_the_costs_does_not_matter(batch: tuple[list[float], int], power: int) -> None:
    costs, ranks = batch
    scaled = [cost * 2.0**power for cost in costs]
    assert assign_microbatches(costs, ranks).tolist() == assign_microbatches(scaled, ranks).tolist()


@pytest.mark.parametrize(("ranks", "rounds"), [(8, 2), (8, 8), (64, 4)])
def test_what_ranks_have_loaded_stays_where_it_costs_nothing(ranks: int, rounds: int) -> None:
    """Without exchanging whole ranks one in R would stay by chance."""
    rng = np.random.default_rng(ranks + rounds)
    found = assign_microbatches(rng.lognormal(0, 0.5, ranks * rounds), ranks)
    stays = (found % ranks == np.arange(ranks)).sum()
    assert stays >= 0.9 * ranks


def test_one_round_and_equal_costs_move_nothing() -> None:
    assert assign_microbatches([3.0, 1.0, 2.0], 3).tolist() == [[0, 1, 2]]
    assert assign_microbatches([0.0] * 4, 2).tolist() == [[0, 1], [2, 3]]
    found = assign_microbatches([2.0] * 64, 8)
    assert (found % 8 == np.arange(8)).all()


def test_a_spread_is_evened_out() -> None:
    costs = np.random.default_rng(1).normal(10, 1.5, 256)
    before, after = imbalance(costs, as_it_comes(256, 64)), imbalance(costs, assign_microbatches(costs, 64))
    assert before.step > 1.1
    assert before.round > 1.25
    assert after.step < 1.005
    assert after.round < 1.12
    assert imbalance([0.0, 0.0], as_it_comes(2, 2)) == Imbalance(step=1.0, round=1.0)


@pytest.mark.parametrize(
    ("costs", "ranks", "message"),
    [
        ([1.0, 2.0, 3.0], 2, r"shape \(3,\) cannot be divided between 2 ranks"),
        ([], 1, r"shape \(0,\) cannot be divided between 1 ranks"),
        ([1.0, -2.0], 2, "microbatch 1 of the global batch has cost -2.0"),
        ([float("nan"), 1.0], 2, "microbatch 0 of the global batch has cost nan"),
        ([1.0, float("inf")], 1, "microbatch 1 of the global batch has cost inf"),
    ],
)
def test_costs_that_are_none(costs: list[float], ranks: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        assign_microbatches(costs, ranks)
