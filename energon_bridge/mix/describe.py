"""A mix in words: its tree, one line per node, with the effective weight of every leaf."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from energon_bridge.mix.flatten import Mix, MixLeaf
from energon_bridge.mix.schedule import plain_number
from energon_bridge.mix.subset import SubsetRange, merge_subsets
from energon_bridge.mix.tree import Blend, Concat, EpochizedBlend, JoinRef, LeafRef, Node


def describe(mix: Mix) -> list[str]:
    """Draw the tree of a mix, one line per node.

    Leaves show their share of all draws, or their repetitions; scheduled weights are those at global draw 0.
    """
    return list(_lines(mix.root, leaves=iter(mix.leaves), head="", tail="", note=""))


def _lines(node: Node, *, leaves: Iterator[MixLeaf], head: str, tail: str, note: str) -> Iterator[str]:
    """Yield the lines of a subtree; `head` stands before its first line, `tail` before the others."""
    if isinstance(node, (LeafRef, JoinRef)):
        yield f"{head}{_leaf(next(leaves))}{note}"
        return
    name = {Blend: "blend", EpochizedBlend: "blend_epochized", Concat: "concat"}[type(node)]
    yield f"{head}{name}{note}  ({node.where})"
    for position, child in enumerate(node.children):
        is_last = position == len(node.children) - 1
        inner = _note(node, position)
        yield from _lines(
            child,
            leaves=leaves,
            head=tail + ("└── " if is_last else "├── "),
            tail=tail + ("    " if is_last else "│   "),
            note=inner,
        )


def _note(node: Blend | EpochizedBlend | Concat, position: int) -> str:
    if isinstance(node, Blend):
        return f"  [weight {node.weights[position]}]"
    if isinstance(node, EpochizedBlend):
        return f"  [repetitions {plain_number(node.repetitions[position])}]"
    return ""


def _leaf(leaf: MixLeaf) -> str:
    words = [*_share(leaf), *_source(leaf.leaf)]
    if leaf.occurrence:
        words.append(f"again, stream {leaf.occurrence}")
    return "  ".join(words)


def _share(leaf: MixLeaf) -> list[str]:
    if leaf.repetitions is not None:
        return [f"× {_number(leaf.repetitions)}"]
    if leaf.weight is None:
        return []
    share = f"{float(leaf.weight) * 100:6.2f} %"
    return [share] if leaf.size_group is None else [f"{share} shared by size in group {leaf.size_group}"]


def _number(value: Fraction) -> str:
    return f"{float(value):g}"


def _source(leaf: LeafRef | JoinRef) -> list[str]:
    subset = _subset(merge_subsets(leaf.subsets))
    if isinstance(leaf, JoinRef):
        names = " + ".join(
            f"{entry.name}={entry.leaf.path}" if entry.name else entry.leaf.path for entry in leaf.entries
        )
        return [f"join {names}", f"by {leaf.joiner.module}.{leaf.joiner.name}", *subset]
    where = [f"where {text}" for text in leaf.filters]
    return [leaf.path, *([] if leaf.is_jsonl else [leaf.split_part]), *subset, *where]


def _subset(subset: SubsetRange) -> list[str]:
    words = []
    if subset.is_absolute:
        words.append(f"samples {subset.start} to {'the end' if subset.stop is None else subset.stop}")
    if subset.ratio != (0.0, 1.0):
        words.append(f"{subset.ratio[0] * 100:g}% to {subset.ratio[1] * 100:g}%")
    return [" of ".join(reversed(words))] if words else []
