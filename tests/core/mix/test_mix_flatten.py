"""From trees to leaves: effective weights, repetitions, groups by size, occurrences, and what cannot be nested."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from energon_bridge.core.errors import MetadataError
from energon_bridge.core.mix import (
    BlendNode,
    Concat,
    EpochizedNode,
    LeafRef,
    Mix,
    SubsetRange,
    TreeNode,
    WeightSchedule,
)
from energon_bridge.core.mix.flatten import flatten


def leaf(name: str, **settings: object) -> LeafRef:
    return LeafRef(path=f"/{name}", split_part="train", **settings)  # type: ignore[arg-type]


def blend(*pairs: tuple[TreeNode, object], where: str = "a blend") -> BlendNode:
    weights = [weight if isinstance(weight, WeightSchedule) else WeightSchedule.constant(weight) for _, weight in pairs]
    return BlendNode(children=tuple(node for node, _ in pairs), weights=tuple(weights), where=where)


def epochized(*pairs: tuple[TreeNode, object], where: str = "an epochized") -> EpochizedNode:
    repetitions = tuple(Fraction(str(number)) for _, number in pairs)
    return EpochizedNode(children=tuple(node for node, _ in pairs), repetitions=repetitions, where=where)


def concat(*nodes: TreeNode, where: str = "a concat") -> Concat:
    return Concat(children=nodes, where=where)


def weights_of(mix: Mix) -> dict[str, Fraction | None]:
    return {entry.leaf.path: entry.weight for entry in mix.leaves}  # type: ignore[union-attr]


decimals = st.integers(1, 9999).map(lambda number: number / 100)


@st.composite
def blends(draw: st.DrawFn, depth: int = 3) -> TreeNode:
    """Draw a tree of blends; leaves may come twice."""
    if depth == 0 or draw(st.booleans()):
        return leaf(draw(st.sampled_from("abcdef")))
    pairs = draw(st.lists(st.tuples(blends(depth=depth - 1), decimals), min_size=1, max_size=4))
    return blend(*pairs)


def shares(node: TreeNode) -> list[tuple[TreeNode, float]]:
    """Effective weights by the definition, in floats."""
    if not isinstance(node, BlendNode):
        return [(node, 1.0)]
    values = [schedule.at(0) for schedule in node.weights]
    return [
        (found, value / sum(values) * share)
        for child, value in zip(node.children, values, strict=True)
        for found, share in shares(child)
    ]


@given(blends(), st.integers(0, 10**9))
def test_nested_weights_multiply(node, draw):
    mix = flatten(node)
    expected = shares(node)
    assert [entry.leaf for entry in mix.leaves] == [found for found, _ in expected]
    if mix.mode == "single":
        return
    assert sum(entry.weight or 0 for entry in mix.leaves) == 1
    assert mix.weights_at(draw) == pytest.approx([share for _, share in expected], rel=1e-12)
    assert not mix.is_scheduled


@given(st.lists(decimals, min_size=1, max_size=8), st.integers(1, 1000), st.randoms())
def test_neither_unit_nor_order_changes_a_bit(values, unit, random):
    named = [(leaf(str(number)), value) for number, value in enumerate(values)]
    scaled = [(node, Fraction(str(value)) * unit) for node, value in named]
    scaled = [(node, WeightSchedule(kind="constant", points=((0, value),))) for node, value in scaled]
    random.shuffle(scaled)
    one, other = flatten(blend(*named)), flatten(blend(*scaled))
    assert weights_of(one) == weights_of(other)
    by_path = dict(zip(weights_of(other), other.weights_at(0), strict=True))
    assert dict(zip(weights_of(one), one.weights_at(0), strict=True)) == by_path


def test_decimals_are_exact():
    mix = flatten(blend((leaf("a"), 0.6), (leaf("b"), 0.3), (leaf("c"), 0.1)))
    assert [entry.weight for entry in mix.leaves] == [Fraction(6, 10), Fraction(3, 10), Fraction(1, 10)]
    assert mix.weights_at(0) == (0.6, 0.3, 0.1)


def test_repetitions_multiply():
    mix = flatten(epochized((leaf("a"), 2), (epochized((leaf("b"), "0.1"), (leaf("c"), 3)), "0.5")))
    assert mix.mode == "repetitions"
    assert [entry.repetitions for entry in mix.leaves] == [Fraction(2), Fraction(1, 20), Fraction(3, 2)]
    assert all(entry.weight is None for entry in mix.leaves)


def test_modes():
    assert flatten(leaf("a")).mode == "single"
    assert flatten(blend((leaf("a"), 3))).mode == "weights"
    nested = flatten(concat(leaf("a"), concat(leaf("b"), leaf("c"))))
    assert (nested.mode, [entry.leaf.path for entry in nested.leaves]) == ("concat", ["/a", "/b", "/c"])
    assert flatten(epochized((concat(leaf("a"), leaf("b")), 2))).leaves[1].repetitions == 2


def test_a_concatenation_in_a_blend_shares_one_weight_by_size():
    mix = flatten(blend((leaf("a"), 1), (concat(leaf("b"), concat(leaf("c"))), 2), (concat(leaf("d")), 1)))
    assert [entry.size_group for entry in mix.leaves] == [None, 0, 0, None]
    assert mix.needs_sizes
    assert mix.weights_at(0, sizes=[999, 10, 30, 7]) == (0.25, 0.125, 0.375, 0.25)
    with pytest.raises(ValueError, match="pass sizes"):
        mix.weights_at(0)


def test_groups_of_nested_blends_are_told_apart():
    pair = concat(leaf("b"), leaf("c"))
    mix = flatten(blend((blend((pair, 1)), 1), (pair, 1)))
    assert [entry.size_group for entry in mix.leaves] == [0, 0, 1, 1]
    assert [entry.occurrence for entry in mix.leaves] == [0, 0, 1, 1]
    assert sum(mix.weights_at(3, sizes=[1, 2, 1, 2])) == pytest.approx(1)


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (
            blend((epochized((leaf("a"), 1), where="HERE"), 1), where="THERE"),
            "`blend` cannot hold.*`blend_epochized` at HERE",
        ),
        (
            epochized((blend((leaf("a"), 1), where="HERE"), 1), where="THERE"),
            "`blend_epochized` cannot hold.*`blend` at HERE",
        ),
        (concat(blend((leaf("a"), 1), where="HERE"), where="THERE"), "`concat` cannot hold.*`blend` at HERE"),
        (concat(epochized((leaf("a"), 1), where="HERE"), where="THERE"), "`concat` cannot.*`blend_epochized` at HERE"),
        (blend((blend((leaf("a"), 0), where="THERE"), 1)), "all weights are 0"),
        (epochized((leaf("a"), 0), where="THERE"), "all repetitions are 0"),
        (concat(where="THERE"), "is empty"),
        (
            blend(
                (leaf("a"), WeightSchedule.steps([(0, 1), (5, 0)])),
                (leaf("b"), WeightSchedule.linear([(3, 1), (7, 0)])),
                where="THERE",
            ),
            "all weights are 0 at global draw 7",
        ),
    ],
)
def test_what_cannot_be(node, words):
    with pytest.raises(MetadataError, match=f"THERE: .*{words}"):
        flatten(node)


def test_a_leaf_of_weight_zero_stays_in_the_list():
    mix = flatten(blend((leaf("a"), 0), (leaf("b"), 2)))
    assert mix.weights_at(0) == (0.0, 1.0)


def test_the_same_samples_get_occurrence_numbers():
    half = SubsetRange(ratio=(0.0, 0.5), where="here")
    nodes = [
        leaf("a"),
        leaf("b"),
        leaf("a", subflavors={"k": 1}, where="elsewhere"),
        leaf("a", subsets=(half,)),
        leaf("a", subsets=(SubsetRange(), half)),
        leaf("a", split_config="other.yaml"),
        leaf("a", dataset_config="dataset.yaml", split_config="split.yaml"),
        LeafRef(path="/a", split_part="val"),
        LeafRef(path="/x.jsonl", split_part="train", is_jsonl=True),
        LeafRef(path="/x.jsonl", split_part="val", is_jsonl=True),
    ]
    mix = flatten(blend(*((node, 1) for node in nodes)))
    assert [entry.occurrence for entry in mix.leaves] == [0, 0, 1, 0, 1, 0, 2, 0, 0, 1]


def test_scheduled_weights_follow_the_draws():
    ramp = WeightSchedule.linear([(0, 0), (100, 3)])
    mix = flatten(blend((leaf("a"), 1), (blend((leaf("b"), ramp), (leaf("c"), 1)), 3)))
    assert mix.is_scheduled
    assert [entry.weight for entry in mix.leaves] == [Fraction(1, 4), Fraction(0), Fraction(3, 4)]
    assert mix.weights_at(0) == (0.25, 0.0, 0.75)
    assert mix.weights_at(100) == (0.25, 0.5625, 0.1875)
    assert mix.schedule_points() == [0, 100]
    grouped = flatten(blend((leaf("a"), ramp), (concat(leaf("b"), leaf("c")), 3)))
    assert grouped.weights_at(100, sizes=[5, 1, 3]) == (0.5, 0.125, 0.375)


@given(st.lists(st.tuples(decimals, decimals), min_size=1, max_size=6), st.integers(0, 200), st.randoms())
def test_scheduled_weights_do_not_depend_on_the_order(pairs, draw, random):
    named = [
        (leaf(str(number)), WeightSchedule.cosine([(10, first), (150, last)]))
        for number, (first, last) in enumerate(pairs)
    ]
    shuffled = random.sample(named, len(named))
    one, other = flatten(blend(*named)), flatten(blend(*shuffled))
    by_path = dict(zip(weights_of(other), other.weights_at(draw), strict=True))
    assert dict(zip(weights_of(one), one.weights_at(draw), strict=True)) == by_path
    assert math.fsum(one.weights_at(draw)) == pytest.approx(1, rel=1e-12)


def test_a_mix_without_weights_has_none():
    with pytest.raises(ValueError, match="has no weights"):
        flatten(leaf("a")).weights_at(0)


def test_a_mix_travels_to_other_processes():
    mix = flatten(blend((leaf("a"), 1), (leaf("b"), WeightSchedule.steps([(0, 1), (9, 2)]))))
    assert pickle.loads(pickle.dumps(mix)) == mix
