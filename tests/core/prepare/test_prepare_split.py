"""How shards are dealt out to split parts."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from tar_builder import write_texts

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.prepare import SplitRule, parse_patterns, parse_ratio, prepare_dataset
from energon_bridge.core.prepare.split import split_shards


@given(
    count=st.integers(0, 60),
    shares=st.lists(st.decimals(0, 10, places=2), min_size=3, max_size=3).filter(any),
    shuffle=st.booleans(),
)
def test_ratio_splits_hold_every_shard_once_within_one_of_their_share(count, shares, shuffle):
    shards = [f"{n:03d}.tar" for n in range(count)]
    parts = split_shards(shards, parse_ratio(",".join(map(str, shares)), shuffle=shuffle))
    assert list(parts) == ["train", "val", "test"]
    dealt = [shard for part in parts.values() for shard in part]
    assert sorted(dealt) == shards
    assert shuffle or dealt == shards
    total = sum(Fraction(share) for share in shares)
    for part, share in zip(parts.values(), shares, strict=True):
        assert abs(len(part) - count * Fraction(share) / total) < 1


def test_shuffled_splits_are_the_same_every_time():
    shards = [f"{n}.tar" for n in range(20)]
    rule = parse_ratio("8,1,1", shuffle=True)
    assert split_shards(shards, rule) == split_shards(shards, rule) != split_shards(shards, parse_ratio("8,1,1"))


@pytest.mark.parametrize("text", ["", "1", "1,2", "1,2,3,4", "a,b,c", "0,0,0", "1,-1,1", "1/0,1,1"])
def test_senseless_ratios_are_refused(text: str):
    with pytest.raises(ConfigurationError, match="expected three numbers"):
        parse_ratio(text)


def test_pattern_splits_may_overlap_and_leave_shards_out():
    rule = parse_patterns(["train:a/.*", "few:{a,b}/s_[01]\\.tar", "train2:b/s_9"])
    shards = ["a/s_0.tar", "a/s_2.tar", "b/s_1.tar", "b/s_9.tar"]
    assert split_shards(shards, rule) == {
        "train": ["a/s_0.tar", "a/s_2.tar"],
        "few": ["a/s_0.tar", "b/s_1.tar"],
        "train2": ["b/s_9.tar"],
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train", "expected NAME:PATTERN"),
        (":x", "expected NAME:PATTERN"),
        ("train:", "expected NAME:PATTERN"),
        ("train:(", "not a regular expression"),
        ("train:{a", "unmatched"),
    ],
)
def test_senseless_patterns_are_refused(text: str, message: str):
    with pytest.raises(ConfigurationError, match=message):
        parse_patterns([text])


def test_a_pattern_that_matches_nothing_is_refused(tmp_path: Path):
    tars = write_texts(tmp_path, {f"a/{number}.tar": [str(number)] for number in range(10)})
    with pytest.raises(ConfigurationError, match=r"--split-parts val:nope.*matches none of the 10 shards"):
        prepare_dataset(tars, split=parse_patterns(["train:a", "val:nope.*"]))
    assert not (tars / ".nv-meta").exists()


def test_an_empty_rule_is_all_nothing():
    assert split_shards(["a.tar"], SplitRule(ratios=(("train", Fraction(1)),))) == {"train": ["a.tar"]}
