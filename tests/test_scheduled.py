"""Weights that move from draw to draw: every lane keeps to their sum, at every speed, asked for in any way."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from test_blend import drawn

from energon_bridge.loader.weights import GivenWeights
from energon_bridge.mix import WeightSchedule
from energon_bridge.plan.blend import ChangedBlend, WeightedBlend
from energon_bridge.plan.scheduled import ScheduledBlend

LANES = 24
GOLDEN = [[0, 0, 0, 1, 0, 0, 1, 0, 1, 1, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]]


def line(length: int) -> GivenWeights:
    """One weight rises from 0 to 1 over `length` draws while the other falls."""
    return GivenWeights(
        schedules=(WeightSchedule.linear([(0, 1), (length, 0)]), WeightSchedule.linear([(0, 0), (length, 1)]))
    )


def random_weights(seed: int, length: int) -> GivenWeights:
    """Five schedules of all kinds, some of which fall to 0, and a constant."""
    choose = random.Random(seed)
    schedules = [WeightSchedule.constant(0.1)]
    for kind in ("linear", "cosine", "steps", "linear", "cosine"):
        draws = sorted({0, *(choose.randrange(1, length) for _ in range(3))})
        weights = [choose.random() * (choose.random() > 0.3) for _ in draws]
        make = {"linear": WeightSchedule.linear, "cosine": WeightSchedule.cosine, "steps": WeightSchedule.steps}[kind]
        schedules.append(make(list(zip(draws, weights, strict=True))))
    return GivenWeights(schedules=tuple(schedules))


def shares(weights: GivenWeights, draws: range) -> np.ndarray:
    """Return the shares of the leaves at some global draws, shape (draws, leaves)."""
    values = np.array([[float(weight) for weight in weights.at(draw)] for draw in draws])
    return values / values.sum(axis=1, keepdims=True)


def off(leaves: np.ndarray, expected: np.ndarray) -> float:
    """Return how far the counts are from the summed shares, after the draw where they are farthest."""
    counts = np.cumsum(leaves[:, None] == np.arange(expected.shape[1]), axis=0)
    return float(np.abs(counts - np.cumsum(expected, axis=0)).max())


# The fourth is where a rule without memory is 17 draws off: its slope meets the spacing of that rule's points.
@pytest.mark.parametrize("length", [10, 100, 2_400, 24_000, 100_000, 1_000_000])
def test_lanes_keep_to_the_sum_of_moving_weights(length: int) -> None:
    draws = length // LANES + 100
    blend = ScheduledBlend(weights=line(length), num_lanes=LANES, key=0)
    for lane in (0, 5, 11):
        expected = shares(line(length), range(lane, draws * LANES, LANES))
        assert off(drawn(blend, lane, draws), expected) <= 5


@pytest.mark.parametrize("seed", range(8))
def test_any_schedules_in_any_number_of_lanes(seed: int) -> None:
    lanes, length = ((1, 500), (6, 20_000), (24, 300), (24, 40_000))[seed % 4]
    weights = random_weights(seed, length)
    draws = length // lanes + 300
    blend = ScheduledBlend(weights=weights, num_lanes=lanes, key=seed)
    streams = [drawn(blend, lane, draws) for lane in range(lanes)]
    for lane in range(0, lanes, 5):
        assert off(streams[lane], shares(weights, range(lane, draws * lanes, lanes))) <= 5
    order = np.stack(streams, axis=1).reshape(-1)
    expected = shares(weights, range(order.size))
    beyond = np.cumsum((order[:, None] == np.arange(6)) - expected, axis=0)
    assert np.abs(beyond[240:] - beyond[:-240]).max() <= 12, "in 240 consecutive draws of the global order"


def test_golden_draws() -> None:
    blend = ScheduledBlend(weights=line(400), num_lanes=LANES, key=7)
    assert [drawn(blend, 3, 30).tolist()] == GOLDEN


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 20),
    lane=st.integers(0, 5),
    draw=st.integers(0, 3000),
    step=st.integers(1, 50),
    start=st.sampled_from([0, 1, 777]),
)
def test_draws_do_not_depend_on_how_they_are_asked_for(seed: int, lane: int, draw: int, step: int, start: int) -> None:
    weights = random_weights(seed, 5000)
    whole = ScheduledBlend(weights=weights, num_lanes=6, key=seed, start=start)
    parts = ScheduledBlend(weights=weights, num_lanes=6, key=seed, start=start)
    first = max(0, -((lane - start) // 6))
    every = np.concatenate([whole.leaves(lane, first + at, 1) for at in range(draw + 60)])
    found: list[int] = []
    while len(found) < 60:
        found += parts.leaves(lane, first + draw + len(found), step).tolist()
    assert found[:60] == every[draw : draw + 60].tolist()
    assert parts.counts(lane, first + draw).tolist() == np.bincount(every[:draw], minlength=6).tolist()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 50),
    lane=st.integers(0, 5),
    draw=st.integers(0, 900),
    changes=st.lists(st.integers(1, 3000), max_size=3),
)
def test_changed_weights_take_over_at_their_draw(seed: int, lane: int, draw: int, changes: list[int]) -> None:
    starts = [0, *sorted(set(changes))]
    weights = [random_weights(seed + number, 2000) for number in range(len(starts))]
    constant = GivenWeights(schedules=tuple(WeightSchedule.constant(n) for n in (1, 2, 0, 3, 1, 1)))
    parts = [
        ScheduledBlend(weights=w, num_lanes=6, key=seed, start=start)
        if number % 2
        else WeightedBlend(weights=constant, num_lanes=6, key=seed)
        for number, (start, w) in enumerate(zip(starts, weights, strict=True))
    ]
    blend = ChangedBlend(parts=tuple(zip(starts, parts, strict=True)), num_lanes=6)
    every = drawn(blend, lane, draw + 1)  # type: ignore[arg-type]
    assert blend.counts(lane, draw).tolist() == np.bincount(every[:draw], minlength=6).tolist()
    current = sum(start <= draw * 6 + lane for start in starts) - 1
    assert every[draw] == parts[current].leaves(lane, draw, 1)[0]
