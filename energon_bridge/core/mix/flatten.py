"""Flattens the tree of a mix to a list of leaves, each with its share of the draws; of these a run is planned.

The rules are those of Megatron Energon 7.4: in a blend a leaf gets its own weight times `w / sum(w)` of every blend
around it; in a blend by repetitions the repetitions multiply; the two cannot be nested in one another. A concatenation
inside a blend is one dataset to it: its leaves form a group, which has one weight, divided by their numbers of samples.
Inside a blend by repetitions its leaves simply take the repetitions around them.

Invariant: constant weights are fractions, so that neither a factor common to all weights nor the order of the leaves
changes the last bit of any of them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from energon_bridge.core.errors import MetadataError
from energon_bridge.core.mix.schedule import WeightSchedule
from energon_bridge.core.mix.tree import (
    BlendNode,
    Concat,
    EpochizedNode,
    JoinRef,
    LeafRef,
    TreeLeaf,
    TreeNode,
    data_identity,
)

MixMode = Literal["single", "weights", "repetitions", "concat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixLeaf:
    """One leaf of a mix.

    Attributes:
        leaf: The dataset or join.
        occurrence: Its number (0, 1, ...) among the leaves of this mix that read the same samples.
        weight: Effective weight at global draw 0; all add up to 1. In a group, the weight of the whole group. None in
            other modes.
        repetitions: How often an epoch of the mix contains each sample; None in other modes.
        size_group: Number of the group whose leaves divide `weight` by numbers of samples; None for a leaf on its own.
    """

    leaf: TreeLeaf
    occurrence: int = 0
    weight: Fraction | None = None
    repetitions: Fraction | None = None
    size_group: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """All leaves of a mix in the order of its tree, and how they are combined."""

    mode: MixMode
    leaves: tuple[MixLeaf, ...]
    root: TreeNode
    is_scheduled: bool = False

    @property
    def unit(self) -> str | None:
        """What the weights are shares of: an expression of columns, such as `tokens`; None: draws."""
        return self.root.unit if isinstance(self.root, BlendNode) else None

    @property
    def needs_sizes(self) -> bool:
        """Whether weights depend on the numbers of samples of the leaves."""
        return any(leaf.size_group is not None for leaf in self.leaves)

    def weights_at(self, global_draw: int, sizes: Sequence[int] | None = None) -> tuple[float, ...]:
        """Return the effective weights of all leaves at a global draw; they add up to 1.

        `sizes` are the numbers of samples of the leaves, or with a `unit` their amounts; only a mix with `needs_sizes`
        asks for them. Raises ValueError in a mode that has no weights.
        """
        if self.mode != "weights":
            raise ValueError(f"a mix of mode {self.mode!r} has no weights")
        if self.is_scheduled:
            weights = _weights(self.root, global_draw)
        else:
            weights = [float(leaf.weight or 0) for leaf in self.leaves]
        if not self.needs_sizes:
            return tuple(weights)
        if sizes is None:
            raise ValueError("the weights of this mix depend on the numbers of samples of its leaves; pass sizes")
        totals: Counter[int | None] = Counter()
        for leaf, size in zip(self.leaves, sizes, strict=True):
            totals[leaf.size_group] += size
        return tuple(
            weight if leaf.size_group is None else weight * (size / max(totals[leaf.size_group], 1))
            for weight, leaf, size in zip(weights, self.leaves, sizes, strict=True)
        )

    @property
    def moves(self) -> bool:
        """Whether any weight changes from draw to draw, not only at points of its schedule."""
        return any(schedule.moves for schedule in _schedules(self.root))

    def schedule_points(self) -> list[int]:
        """Return the global draws at which a schedule of the mix has a point, ascending."""
        return sorted({draw for schedule in _schedules(self.root) for draw, _ in schedule.points})


def flatten(root: TreeNode) -> Mix:
    """List the leaves of a tree with their effective weights or repetitions.

    Raises MetadataError, naming both places, if blends by weight and by repetitions or endless blends in a
    concatenation are nested, if no leaf of a blend can ever be drawn, and if a blend counts something else than the one
    around it.
    """
    _check_units(root, root.unit if isinstance(root, BlendNode) else None)
    mode, leaves = _flatten(root, groups=itertools.count())
    seen: Counter[Hashable] = Counter()
    numbered: list[MixLeaf] = []
    for leaf in leaves:
        identity = data_identity(leaf.leaf)
        numbered.append(replace(leaf, occurrence=seen[identity]) if seen[identity] else leaf)
        seen[identity] += 1
    is_scheduled = any(not schedule.is_constant for schedule in _schedules(root))
    return Mix(mode=mode, leaves=tuple(numbered), root=root, is_scheduled=is_scheduled)


def _check_units(node: TreeNode, unit: str | None) -> None:
    """Raise unless all blends below a node count what the outermost one does."""
    if isinstance(node, (LeafRef, JoinRef)):
        return
    if isinstance(node, BlendNode) and node.unit not in (None, unit):
        around = "draws" if unit is None else f"`{unit}`"
        raise MetadataError(
            f"{node.where}: its weights are shares of `{node.unit}`, but those of the blend around it are shares of "
            f"{around}. Write `unit: {node.unit}` at the outermost blend: it holds for all blends inside."
        )
    for child in node.children:
        _check_units(child, unit)


def _flatten(node: TreeNode, *, groups: Iterator[int]) -> tuple[MixMode, list[MixLeaf]]:
    """Return the mode of a subtree, and its leaves; `groups` yields the numbers for the groups that share a weight."""
    if isinstance(node, (LeafRef, JoinRef)):
        return "single", [MixLeaf(leaf=node)]
    if not node.children:
        raise MetadataError(f"{node.where}: is empty. Expected at least one dataset.")
    if isinstance(node, Concat):
        leaves = []
        for child in node.children:
            leaves += _nested(node, child, allowed=("single", "concat"), groups=groups)
        return "concat", leaves
    if isinstance(node, EpochizedNode):
        return "repetitions", _flatten_epochized(node, groups=groups)
    return "weights", _flatten_blend(node, groups=groups)


def _flatten_blend(node: BlendNode, *, groups: Iterator[int]) -> list[MixLeaf]:
    """Return the leaves below a blend with their weights in it, at global draw 0; these add up to 1."""
    _check_drawable(node)
    weights = [schedule.exact_at(0) for schedule in node.weights]
    total = sum(weights, Fraction(0)) or Fraction(1)  # all may be 0 now, in a blend whose schedules begin later
    leaves: list[MixLeaf] = []
    for child, weight in zip(node.children, weights, strict=True):
        inner = _nested(node, child, allowed=("single", "weights", "concat"), groups=groups)
        relative = weight / total
        group = None
        if isinstance(child, Concat) and len(inner) > 1:
            group = next(groups)
        for leaf in inner:
            effective = relative if leaf.weight is None else relative * leaf.weight
            size_group = leaf.size_group if group is None else group
            leaves.append(MixLeaf(leaf=leaf.leaf, weight=effective, size_group=size_group))
    return leaves


def _flatten_epochized(node: EpochizedNode, *, groups: Iterator[int]) -> list[MixLeaf]:
    if not any(node.repetitions):
        raise MetadataError(f"{node.where}: all repetitions are 0, so there is nothing to read.")
    leaves: list[MixLeaf] = []
    for child, repetitions in zip(node.children, node.repetitions, strict=True):
        for leaf in _nested(node, child, allowed=("single", "repetitions", "concat"), groups=groups):
            product = repetitions * (1 if leaf.repetitions is None else leaf.repetitions)
            leaves.append(MixLeaf(leaf=leaf.leaf, repetitions=product))
    return leaves


_NAMES: dict[type, str] = {BlendNode: "`blend`", EpochizedNode: "`blend_epochized`", Concat: "`concat`"}
_REMEDIES: dict[type, str] = {
    BlendNode: "Give both weights (`blend`) or both repetitions (`blend_epochized`).",
    EpochizedNode: "Give both weights (`blend`) or both repetitions (`blend_epochized`).",
    Concat: "Use `blend_epochized` with `repetitions: 1` for it, or list its datasets one by one.",
}


def _nested(node: TreeNode, child: TreeNode, *, allowed: tuple[str, ...], groups: Iterator[int]) -> list[MixLeaf]:
    """Return the leaves of a child; raises MetadataError if its mode is none of those that its parent can hold."""
    mode, leaves = _flatten(child, groups=groups)
    if mode not in allowed:
        raise MetadataError(
            f"{node.where}: {_NAMES[type(node)]} cannot hold the {_NAMES[type(child)]} at {child.where}. "
            f"{_REMEDIES[type(node)]}"
        )
    return leaves


def _check_drawable(node: BlendNode) -> None:
    """Raise if all weights of a blend are 0 at some draw.

    Checking the points of the schedules is enough: between two points a weight is 0 only if it is 0 at both.
    """
    if any(all(weight for _, weight in schedule.points) for schedule in node.weights):
        return
    draws = {0, *(draw for schedule in node.weights for draw, _ in schedule.points)}
    for draw in sorted(draws):
        if not any(schedule.exact_at(draw) for schedule in node.weights):
            when = "" if len(draws) == 1 else f" at global draw {draw}"
            raise MetadataError(f"{node.where}: all weights are 0{when}, so there is nothing to draw.")


def _weights(node: TreeNode, global_draw: int) -> list[float]:
    """Return the weights of the leaves of a subtree at a global draw; sums are rounded once, whatever the order.

    The leaves of a concatenation have 1 each here: `Mix.weights_at` divides the weight of their group by sizes.
    """
    if isinstance(node, Concat):
        return [1.0 for child in node.children for _ in _weights(child, global_draw)]
    if not isinstance(node, BlendNode):
        return [1.0]
    own = [schedule.at(global_draw) for schedule in node.weights]
    total = math.fsum(own)
    return [
        weight / total * inner
        for child, weight in zip(node.children, own, strict=True)
        for inner in _weights(child, global_draw)
    ]


def _schedules(node: TreeNode) -> list[WeightSchedule]:
    if isinstance(node, (LeafRef, JoinRef)):
        return []
    own = list(node.weights) if isinstance(node, BlendNode) else []
    return own + [schedule for child in node.children for schedule in _schedules(child)]
