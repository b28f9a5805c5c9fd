"""The tree of a mix: references to datasets and joins at the leaves, blends and concatenations above them.

Invariant: nodes are plain descriptions. They hold absolute paths and settings already merged along the path from the
root, never an open file, an index or anything per sample; a tree can be pickled and compared. `where` is the place a
node was written at; comparisons ignore it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from energon_bridge.errors import MetadataError
from energon_bridge.format.join import Nonmatch
from energon_bridge.format.nvmeta import DEFAULT_DATASET_CONFIG, DEFAULT_SPLIT_CONFIG
from energon_bridge.mix.schedule import WeightSchedule
from energon_bridge.mix.subset import SubsetRange, merge_subsets


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxRef:
    """A store that cookers read: the folder of a prepared dataset, or any folder of a file system."""

    path: str
    is_filesystem: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafRef:
    """One split part of one dataset.

    Attributes:
        path: Absolute path or URL of the folder of a prepared dataset, or of a JSONL file.
        split_part: Part of the split to read (a JSONL file has none; all of it is read).
        is_jsonl: Whether `path` is a JSONL file.
        subflavors: Those of all references along the path, the outermost winning; the opener merges them over those
            of dataset.yaml.
        dataset_config, split_config: Names of the files in `.nv-meta`; None: the usual ones.
        shuffle_over_epochs_multiplier: Combined along the path (`combine_multipliers`).
        aux: Stores for cookers by name.
        subsets: Ranges from the innermost to the outermost (`evaluate_subset`).
        filters: Expressions over columns that all must hold; they are applied after the subsets.
    """

    path: str
    split_part: str
    is_jsonl: bool = False
    subflavors: dict[str, Any] = field(default_factory=dict)
    dataset_config: str | None = None
    split_config: str | None = None
    shuffle_over_epochs_multiplier: int | None = 1
    aux: dict[str, AuxRef] = field(default_factory=dict)
    subsets: tuple[SubsetRange, ...] = ()
    filters: tuple[str, ...] = ()
    where: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joiner:
    """The function that makes one sample of several: `from_joined` of a sample type, or any function.

    `target` is the type or function itself if Python code gave it; a file can only name it.
    """

    module: str
    name: str
    is_function: bool
    target: Callable[..., Any] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinEntry:
    """One dataset of a join; `name` is None in a join written as a list."""

    leaf: LeafRef
    name: str | None = None
    nonmatch: Nonmatch = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRef:
    """Several datasets joined by sample key; the first is the primary, whose samples are the rows.

    `subflavors` and the multiplier are those of the join and of what is around it; subsets count rows of the join.
    The entries' leaves carry their own settings, with the join's and the outer subflavors already over them. `file` is
    the metadataset that has the join, empty if it was given as a dict.
    """

    entries: tuple[JoinEntry, ...]
    joiner: Joiner
    split_part: str
    subflavors: dict[str, Any] = field(default_factory=dict)
    shuffle_over_epochs_multiplier: int | None = 1
    subsets: tuple[SubsetRange, ...] = ()
    file: str = field(default="", compare=False)
    where: str = field(default="", compare=False)

    @property
    def is_named(self) -> bool:
        """Whether the joiner takes its samples by name."""
        return self.entries[0].name is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """An endless blend: each child gets weight / sum of weights of the draws, or of an amount.

    `unit` is the amount, a column or an expression of columns; None: draws.
    """

    children: tuple[Node, ...]
    weights: tuple[WeightSchedule, ...]
    unit: str | None = None
    where: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochizedBlend:
    """A blend whose epoch has every sample of a child `repetitions` times."""

    children: tuple[Node, ...]
    repetitions: tuple[Fraction, ...]
    where: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Concat:
    """Children in order, as if they were one dataset."""

    children: tuple[Node, ...]
    where: str = field(default="", compare=False)


Leaf = LeafRef | JoinRef
Node = LeafRef | JoinRef | Blend | EpochizedBlend | Concat


def combine_multipliers(outer: int | None, inner: int | None) -> int | None:
    """Combine two shuffle_over_epochs_multipliers: None (no shuffling) wins, then -1 (no end), else the product."""
    if outer is None or inner is None:
        return None
    return -1 if -1 in (outer, inner) else outer * inner


def filtered(node: Node, text: str) -> Node:
    """Return a tree with all its datasets filtered; raises MetadataError for a join."""
    if isinstance(node, JoinRef):
        raise MetadataError(f"{node.where}: a join cannot be filtered: filter={text!r}. Filter the other datasets.")
    if isinstance(node, LeafRef):
        return replace(node, filters=(*node.filters, text))
    return replace(node, children=tuple(filtered(child, text) for child in node.children))


def data_identity(leaf: Leaf) -> Hashable:
    """Return a value that is equal for leaves that read the same samples, as far as paths and settings can tell."""
    subset = merge_subsets(leaf.subsets)
    if isinstance(leaf, JoinRef):
        entries = tuple((entry.name, entry.nonmatch, data_identity(entry.leaf)) for entry in leaf.entries)
        return entries, leaf.joiner, subset
    return (
        leaf.path,
        None if leaf.is_jsonl else leaf.split_part,
        leaf.dataset_config or DEFAULT_DATASET_CONFIG,
        leaf.split_config or DEFAULT_SPLIT_CONFIG,
        subset,
        leaf.filters,
    )
