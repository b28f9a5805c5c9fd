"""Subset ranges: percent and absolute, merged along a path and evaluated as energon 7.4 does."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from energon_bridge.core.errors import MetadataError
from energon_bridge.core.format.documents import DocumentValue
from energon_bridge.core.mix.tree import SubsetRange, evaluate_subset, merge_subsets, parse_subset


def parse(bounds: object, *, allow_absolute: bool = True) -> SubsetRange:
    subset = parse_subset(DocumentValue({"range": bounds}, "mix.yaml", "subset"), allow_absolute=allow_absolute)
    assert subset is not None
    return subset


percents = st.integers(0, 100) | st.integers(0, 1000).map(lambda tenths: tenths / 10)


@st.composite
def percent_ranges(draw: st.DrawFn) -> list[str]:
    return [f"{bound}%" for bound in sorted([draw(percents), draw(percents)])]


@pytest.mark.parametrize(
    ("bounds", "num_samples", "expected"),
    [
        (["0%", "100%"], 7, (0, 7)),
        (["25%", "75%"], 12, (3, 9)),
        (["0%", "50%"], 7, (0, 3)),
        (["50%", "100%"], 7, (3, 7)),
        (["20%", "end"], 10, (2, 10)),
        (["12.5%", "25%"], 16, (2, 4)),
        (["29%", "100%"], 100, (28, 100)),  # 100 * 0.29 is 28.999..., and energon truncates
        (["40%", "40%"], 10, (4, 4)),
        ([3, 5], 10, (3, 5)),
        ([3, "end"], 10, (3, 10)),
        ([0, 10], 10, (0, 10)),
        ([10, "end"], 10, (10, 10)),
    ],
)
def test_one_range(bounds, num_samples, expected):
    assert evaluate_subset([parse(bounds)], num_samples) == expected


def test_no_range_is_everything():
    assert evaluate_subset([], 9) == (0, 9)
    assert parse_subset(DocumentValue(None, "w", "f"), allow_absolute=True) is None


def test_absolute_first_then_percent():
    assert evaluate_subset([parse([10, 30]), parse(["50%", "end"])], 100) == (20, 30)
    assert evaluate_subset([parse([10, "end"]), parse(["0%", "50%"]), parse(["50%", "100%"])], 50) == (20, 30)


def test_percent_within_percent():
    merged = merge_subsets([parse(["25%", "75%"]), parse(["0%", "50%"])])
    assert merged.ratio == (0.25, 0.5)


@pytest.mark.parametrize(
    ("bounds", "words"),
    [([5, 11], r"mix\.yaml, field `subset\.range`.*\[5, 11\].*10 samples"), ([11, "end"], r"\[11, end\].*10 samples")],
)
def test_samples_that_do_not_exist(bounds, words):
    with pytest.raises(MetadataError, match=words):
        evaluate_subset([parse(bounds)], 10)


@pytest.mark.parametrize(
    "bounds",
    [
        ["0%", 100],
        [10, "50%"],
        ["75%", "25%"],
        ["-1%", "10%"],
        ["0%", "101%"],
        ["nan%", "100%"],
        ["x%", "100%"],
        ["end", "end"],
        ["0", "50"],
        [0.1, 0.5],
        [-1, 5],
        [5, 4],
        [True, 5],
        [0],
        [0, 1, 2],
        "0%-50%",
        None,
    ],
)
def test_wrong_bounds_name_the_place(bounds):
    with pytest.raises(MetadataError, match=r"mix\.yaml, field `subset\.range`"):
        parse(bounds)


@pytest.mark.parametrize("value", [["0%", "50%"], "half", {}, {"rnge": ["0%", "50%"]}])
def test_what_is_no_subset(value):
    with pytest.raises(MetadataError, match=r"mix\.yaml, field `subset`"):
        parse_subset(DocumentValue(value, "mix.yaml", "subset"), allow_absolute=True)


def test_numbers_of_samples_only_at_a_leaf():
    with pytest.raises(MetadataError, match="only allowed at a dataset"):
        parse([1, 2], allow_absolute=False)
    with pytest.raises(MetadataError, match="only allowed at a dataset"):
        merge_subsets([parse(["0%", "50%"]), parse([1, 2])])


@given(st.lists(percent_ranges(), max_size=4), st.integers(0, 10**9))
def test_merging_stays_within_one_sample_of_exact_arithmetic(ranges, num_samples):
    start, stop = evaluate_subset([parse(bounds) for bounds in ranges], num_samples)
    assert 0 <= start <= stop <= num_samples
    low, high = Fraction(0), Fraction(1)
    for inner_low, inner_high in reversed([[Fraction(text.rstrip("%")) / 100 for text in bounds] for bounds in ranges]):
        low, high = inner_low + low * (inner_high - inner_low), inner_low + high * (inner_high - inner_low)
    assert abs(start - num_samples * low) <= 1
    assert abs(stop - num_samples * high) <= 1


@given(percent_ranges(), st.lists(percents, max_size=3), st.integers(0, 1000))
def test_neighbouring_parts_leave_no_gap_and_do_not_overlap(inner, cuts, num_samples):
    bounds = [0, *sorted(cuts), 100]
    parts = [
        evaluate_subset([parse(inner), parse([f"{low}%", f"{high}%"])], num_samples) for low, high in pairwise(bounds)
    ]
    whole = evaluate_subset([parse(inner)], num_samples)
    assert parts[0][0] == whole[0]
    assert parts[-1][1] == whole[1]
    assert all(left[1] == right[0] for left, right in pairwise(parts))


@given(st.integers(0, 50), st.integers(0, 50), st.lists(percent_ranges(), max_size=3), st.integers(0, 20))
def test_percentages_apply_to_what_the_numbers_leave(first, length, outer, beyond):
    stop = first + length
    percent = [parse(bounds) for bounds in outer]
    start, end = evaluate_subset([parse([first, stop]), *percent], stop + beyond)
    on_its_own = evaluate_subset(percent, length)
    assert (start - first, end - first) == on_its_own


_RIVAL = """
import json, sys
from megatron.energon.metadataset.metadataset_v2 import Subset
answers = []
for ranges, num_samples in json.loads(sys.argv[1]):
    merged = None
    for bounds in reversed(ranges):
        merged = Subset(range=tuple(bounds)).merge(merged)
    answers.append(merged.compute_subset(num_samples))
print(json.dumps(answers))
"""


@pytest.mark.rival
def test_every_range_is_the_one_of_energon(run_rival):
    cases = [
        ([[f"{low}%", f"{high}%"] for low, high in ranges], num_samples)
        for num_samples in (1, 7, 10, 100, 12345)
        for a in range(0, 97, 7)
        for ranges in ([(a, 100)], [(a, a + 1)], [(a, 97), (3, 71)], [(11, 93), (a, 99), (1, 57)])
    ]
    cases += [([[2, 7], ["29%", "58%"]], 10), ([[3, "end"], ["0%", "100%"]], 10)]
    ours = [list(evaluate_subset([parse(bounds) for bounds in ranges], count)) for ranges, count in cases]
    assert ours == json.loads(run_rival("-c", _RIVAL, json.dumps(cases)).splitlines()[-1])
