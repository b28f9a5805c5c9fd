"""Weights over global draws: grammar, values, and the same bits on every machine."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, strategies as st

from energon_bridge.core.errors import ConfigurationError, MetadataError
from energon_bridge.core.mix.schedule import WeightSchedule, exact_number, parse_weight


def parse(value: object) -> WeightSchedule:
    return parse_weight(value, where="mix.yaml", field="blend[0].weight")


weights = st.integers(0, 100) | st.floats(0, 100, allow_subnormal=False).filter(
    lambda value: value == 0 or value > 1e-9
)
points = st.dictionaries(st.integers(0, 10**6), weights, min_size=1, max_size=5).map(
    lambda found: sorted(found.items())
)
schedules = st.one_of(
    weights.map(WeightSchedule.constant),
    st.tuples(st.sampled_from([WeightSchedule.steps, WeightSchedule.linear, WeightSchedule.cosine]), points).map(
        lambda pair: pair[0](pair[1])
    ),
)


@pytest.mark.parametrize(
    ("value", "draws", "expected"),
    [
        (2.5, [0, 10**12], [2.5, 2.5]),
        ({"schedule": "constant", "value": 3}, [0, 5], [3.0, 3.0]),
        ({"schedule": "steps", "points": [[0, 1], [10, 3], [20, 0]]}, [0, 9, 10, 19, 20, 99], [1, 1, 3, 3, 0, 0]),
        ({"schedule": "steps", "points": [[5, 1], [1e1, 3]]}, [0, 5, 9, 10], [1, 1, 1, 3]),
        ({"schedule": "linear", "points": [[10, 1], [20, 3]]}, [0, 10, 15, 20, 99], [1, 1, 2, 3, 3]),
        ({"schedule": "linear", "points": [[0, 0], [4, 4], [8, 0]]}, [1, 4, 6, 8], [1, 4, 2, 0]),
        ({"schedule": "cosine", "points": [[0, 2], [100, 0]]}, [0, 50, 100, 101], [2, 1, 0, 0]),
    ],
)
def test_values(value, draws, expected):
    assert [parse(value).at(draw) for draw in draws] == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (True, "expected a number or a schedule"),
        (None, "empty value"),
        ("0.5", "expected a number or a schedule"),
        (float("nan"), "expected a number"),
        (float("inf"), "expected a number"),
        (-1, "must not be negative"),
        ({}, "`schedule` is missing"),
        ({"schedul": "linear"}, "Did you mean 'schedule'"),
        ({"schedule": "lineer", "points": [[0, 1]]}, r"weight\.schedule`: expected one of constant, steps"),
        ({"schedule": "linear"}, "`points` is missing"),
        ({"schedule": "constant", "points": [[0, 1]]}, "unknown key `points`"),
        ({"schedule": "steps", "value": 1}, "unknown key `value`"),
        ({"schedule": "steps", "points": []}, "at least one point"),
        ({"schedule": "steps", "points": 3}, r"weight\.points`: expected a list"),
        ({"schedule": "steps", "points": [[0, 1], 3]}, r"a point of a schedule is \[draw, weight\]"),
        ({"schedule": "steps", "points": [[0, 1], [0, 2]]}, "increase"),
        ({"schedule": "steps", "points": [[-1, 1]]}, "at least 0"),
        ({"schedule": "steps", "points": [[0.5, 1]]}, "whole number"),
        ({"schedule": "steps", "points": [[0, "1"]]}, "finite number"),
        ({"schedule": "linear", "points": [[0, 1], [9, -1]]}, "must not be negative"),
    ],
)
def test_mistakes_name_the_place(value, words):
    with pytest.raises(MetadataError, match=words) as caught:
        parse(value)
    assert "mix.yaml, field `blend[0].weight" in str(caught.value)


def test_python_code_gets_its_own_error():
    with pytest.raises(ConfigurationError, match="increase"):
        WeightSchedule.linear([(5, 1), (5, 2)])
    with pytest.raises(ConfigurationError, match="constant, steps"):
        WeightSchedule(kind="other", points=((0, Fraction(1)),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.1, Fraction(1, 10)),
        (1e-05, Fraction(1, 100000)),
        (7, Fraction(7)),
        (np.float64(0.3), Fraction(3, 10)),
        (np.int64(3), Fraction(3)),
        (True, None),
        ("1", None),
        (math.inf, None),
    ],
)
def test_numbers_are_read_as_their_digits(value, expected):
    assert exact_number(value) == expected


def test_the_wave_has_the_same_bits_everywhere():
    """Golden values: a weight that differs in its last bit can change the order of a run."""
    schedule = WeightSchedule.cosine([(0, 1), (1000, 3)])
    assert [schedule.at(draw).hex() for draw in (1, 250, 333, 500, 999)] == [
        "0x1.000052cacbf01p+0",
        "0x1.4afb0ccc0621ap+0",
        "0x1.7fc49559b9dcep+0",
        "0x1.fffffffffffffp+0",
        "0x1.7fffd69a9a080p+1",
    ]


@given(schedules, st.integers(0, 2 * 10**6))
def test_a_schedule_stays_between_its_points(schedule, draw):
    values = [float(weight) for _, weight in schedule.points]
    slack = 1e-12 * max(values)
    assert min(values) - slack <= schedule.at(draw) <= max(values) + slack
    assert schedule.at(draw) >= 0
    assert float(schedule.exact_at(draw)) == schedule.at(draw)


@given(points, st.integers(0, 10**6))
def test_the_wave_is_that_of_the_library(points, draw):
    wave, line = WeightSchedule.cosine(points), WeightSchedule.linear(points)
    after = next((number for number, (point, _) in enumerate(points) if point > draw), None)
    if after is None or after == 0:
        assert wave.at(draw) == line.at(draw)
        return
    (start, first), (end, last) = points[after - 1], points[after]
    passed = (1 - math.cos(math.pi * (draw - start) / (end - start))) / 2
    assert wave.at(draw) == pytest.approx(first + (last - first) * passed, rel=1e-9, abs=1e-12 * max(first, last, 1))


def test_a_weight_that_stays_is_constant():
    assert WeightSchedule.linear([(0, 2), (9, 2)]).is_constant


@given(schedules)
def test_plain_values_read_back_equal(schedule):
    assert parse(schedule.to_plain()) == schedule
    assert parse(schedule) is schedule


def test_in_words():
    assert str(WeightSchedule.constant(0.5)) == "0.5"
    assert str(WeightSchedule.linear([(0, 1), (100, 2.5)])) == "linear 0: 1 → 100: 2.5"
