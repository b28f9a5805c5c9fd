"""Ready-made grouping by length: little padding, batches within their tokens, every length in exactly one group."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from energon_bridge.core.errors import ConfigurationError, OverLongSampleError
from energon_bridge.core.samples import TextSample
from energon_bridge.models.packing.grouping import LengthGrouper

LONGEST = 4096
LANES = 24


def grouper(**values: Any) -> LengthGrouper[int]:
    return LengthGrouper.geometric(**{"longest": LONGEST, "length_of": int, **values})


def log_normal(count: int, seed: int = 3) -> list[int]:
    lengths = np.random.default_rng(seed).lognormal(6.2, 0.9, count)
    return np.clip(lengths, 1, LONGEST).astype(int).tolist()


def grouped_batches(lengths: list[int], grouping: LengthGrouper[int], default: int = 8) -> list[list[int]]:
    """What lanes make of a stream: each lane fills its own group's batches; what is left at the end still waits."""
    batches: list[list[int]] = []
    for lane in range(LANES):
        waiting: defaultdict[int, list[int]] = defaultdict(list)
        for length in lengths[lane::LANES]:
            name, size = grouping.group(length)
            waiting[name].append(length)
            if len(waiting[name]) == (size or default):
                batches.append(waiting.pop(name))
    return batches


def padding(batches: list[list[int]]) -> float:
    """Tokens of padding for each token of content."""
    padded = sum(len(batch) * max(batch) for batch in batches)
    return padded / sum(map(sum, batches)) - 1


@pytest.mark.parametrize("batch_size", [4, 8, 32])
def test_grouping_leaves_a_third_of_the_padding_at_most(batch_size: int) -> None:
    lengths = log_normal(LANES * 2000)
    plain = padding([lengths[start : start + batch_size] for start in range(0, len(lengths), batch_size)])
    grouped = grouped_batches(lengths, grouper(batch_size=batch_size))
    assert padding(grouped) <= plain / 3
    assert sum(map(len, grouped)) > 0.8 * len(lengths)


def test_groups_of_equal_size_pad_as_little() -> None:
    lengths = log_normal(LANES * 2000)
    plain = padding([lengths[start : start + 8] for start in range(0, len(lengths), 8)])
    grouping = LengthGrouper.of_equal_size(log_normal(1000, seed=4), groups=16, longest=LONGEST, length_of=int)
    assert len(grouping.boundaries) <= 17
    assert padding(grouped_batches(lengths, grouping)) <= plain / 3


def test_batches_hold_their_tokens_and_use_most_of_them() -> None:
    lengths = log_normal(LANES * 2000)
    batches = grouped_batches(lengths, grouper(max_tokens=16384))
    held = [len(batch) * max(batch) for batch in batches]
    assert max(held) <= 16384
    assert sum(held) / len(held) > 0.8 * 16384


@given(st.integers(1, 500), st.integers(1, 4096), st.floats(1.01, 4.0), st.integers(1, 64))
def test_geometric_groups_cover_every_length_and_grow_by_the_factor(shortest, longest, growth, multiple):
    if shortest > longest:
        shortest, longest = longest, shortest
    grouping = grouper(shortest=shortest, longest=longest, growth=growth, multiple_of=multiple)
    names = grouping.boundaries
    assert all(name % multiple == 0 for name in names)
    assert longest <= names[-1] < longest + multiple
    assert all(longer <= max(shorter + 1, shorter * growth) + multiple for shorter, longer in pairwise(names))
    for length in {1, shortest, longest, *names}:
        name, size = grouping.group(length)
        assert length <= name
        assert size is None
        assert not any(length <= other < name for other in names)


@given(st.lists(st.integers(1, 99), min_size=1, max_size=50), st.integers(1, 9))
def test_groups_of_equal_size_hold_every_example(lengths, groups):
    grouping = LengthGrouper.of_equal_size(lengths, groups=groups, length_of=int)
    assert len(grouping.boundaries) <= groups
    assert grouping.boundaries[-1] == max(lengths)
    if len(set(lengths)) == len(lengths):
        members = [sum(grouping.group(length)[0] == name for length in lengths) for name in grouping.boundaries]
        assert max(members) - min(members) <= 1


@pytest.mark.parametrize(
    ("max_tokens", "multiple", "expected"),
    [(400, 1, [4, 2, 1]), (1000, 4, [8, 4, 2]), (1000, 1, [10, 5, 2]), (1700, 4, [16, 8, 4])],
)
def test_the_batch_size_of_a_group_follows_from_its_tokens(max_tokens: int, multiple: int, expected: list[int]) -> None:
    grouping = LengthGrouper(length_of=int, boundaries=(100, 200, 400), max_tokens=max_tokens, batch_multiple=multiple)
    assert [grouping.group(length)[1] for length in (100, 101, 400)] == expected


def test_a_sample_longer_than_the_last_group_is_named() -> None:
    grouping = LengthGrouper(length_of=lambda sample: len(sample.text), boundaries=(10,))
    with pytest.raises(OverLongSampleError, match=r"sample 'long' has length 11, but the last group .* ends at 10"):
        grouping.group(TextSample(__key__="long", text="x" * 11))


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"boundaries": ()}, "must be positive and ascending"),
        ({"boundaries": (5, 5)}, "must be positive and ascending"),
        ({"boundaries": (0, 5)}, "must be positive and ascending"),
        ({"max_tokens": 10, "batch_size": 1}, "not both"),
        ({"max_tokens": 9}, "has no room for a sample of the longest group .10."),
        ({"batch_size": 0}, "at least 1"),
        ({"batch_multiple": 0}, "at least 1"),
    ],
)
def test_settings_without_sense_are_refused(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        LengthGrouper(**{"length_of": int, "boundaries": (10,), **values})


@pytest.mark.parametrize("values", [{"growth": 1.0}, {"shortest": 0}, {"shortest": 9999}, {"multiple_of": 0}])
def test_growth_without_sense_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="a LengthGrouper needs 0 < shortest <= longest, growth > 1"):
        grouper(**values)


@pytest.mark.parametrize(("lengths", "groups"), [([], 3), ([1, 2], 0)])
def test_groups_of_nothing_are_refused(lengths: list[int], groups: int) -> None:
    with pytest.raises(ConfigurationError, match="of_equal_size needs example lengths"):
        LengthGrouper.of_equal_size(lengths, groups=groups, length_of=int)
