"""The tree of a mix: references to datasets and joins at the leaves, blends and concatenations above them; subsets.

Invariant: nodes are plain descriptions. They hold absolute paths and settings already merged along the path from the
root, never an open file, an index or anything per sample; a tree can be pickled and compared. `where` is the file and
field in which a node was written; comparisons ignore it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from energon_bridge.core.errors import MetadataError
from energon_bridge.core.format.documents import DocumentValue
from energon_bridge.core.format.join import Nonmatch
from energon_bridge.core.format.nvmeta import DEFAULT_DATASET_CONFIG, DEFAULT_SPLIT_CONFIG
from energon_bridge.core.mix.schedule import WeightSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class SubsetRange:
    """Samples `start` to `stop` (None: all the rest), and of these the part between two ratios.

    Written in a file it is one or the other; merged along a path it can be both.
    """

    start: int = 0
    stop: int | None = None
    ratio: tuple[float, float] = (0.0, 1.0)
    where: str = field(default="", compare=False)

    @property
    def is_absolute(self) -> bool:
        """Whether samples are named by number."""
        return self.start > 0 or self.stop is not None


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
class BlendNode:
    """An endless blend: each child gets weight / sum of weights of the draws, or of an amount.

    `unit` is the amount, a column or an expression of columns; None: draws.
    """

    children: tuple[TreeNode, ...]
    weights: tuple[WeightSchedule, ...]
    unit: str | None = None
    where: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochizedNode:
    """A blend whose epoch has every sample of a child `repetitions` times."""

    children: tuple[TreeNode, ...]
    repetitions: tuple[Fraction, ...]
    where: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Concat:
    """Children in order, as if they were one dataset."""

    children: tuple[TreeNode, ...]
    where: str = field(default="", compare=False)


TreeLeaf = LeafRef | JoinRef
TreeNode = LeafRef | JoinRef | BlendNode | EpochizedNode | Concat


def combine_multipliers(outer: int | None, inner: int | None) -> int | None:
    """Combine two shuffle_over_epochs_multipliers: None (no shuffling) wins, then -1 (no end), else the product."""
    if outer is None or inner is None:
        return None
    return -1 if -1 in (outer, inner) else outer * inner


def filtered(node: TreeNode, text: str) -> TreeNode:
    """Return a tree with all its datasets filtered; raises MetadataError for a join."""
    if isinstance(node, JoinRef):
        raise MetadataError(f"{node.where}: a join cannot be filtered: filter={text!r}. Filter the other datasets.")
    if isinstance(node, LeafRef):
        return replace(node, filters=(*node.filters, text))
    return replace(node, children=tuple(filtered(child, text) for child in node.children))


def data_identity(leaf: TreeLeaf) -> Hashable:
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


# ---------------------------------------------------------------------------------------------------------------------
# Subsets: consecutive ranges of a dataset's samples, by number or in percent, nested along the path of a mix.
#
# Samples are numbered through the split in the order of its shards. A range by number is applied first; only a leaf can
# have one. Percentages follow, each outer one within the inner one: outer (o0, o1) in inner (i0, i1) is
# `i0 + o * (i1 - i0)`. Ratios are floats, and their product with the number of samples is truncated as energon does, so
# that a mix has exactly the same samples here.


_EXPECTED = '["25%", "75%"], [100, 200], ["20%", "end"] or [100, "end"]'


def parse_subset(value: DocumentValue, *, allow_absolute: bool) -> SubsetRange | None:
    """Read `{range: [a, b]}`; `allow_absolute` is False above the leaves. Raises MetadataError."""
    if value.plain is None:
        return None
    value.check_keys(("range",), required=("range",))
    bounds = value.get("range")
    if not isinstance(bounds.plain, list) or len(bounds.plain) != 2:
        raise bounds.wrong(f"two bounds such as {_EXPECTED}")
    first, last = bounds.plain
    if type(first) is int and (type(last) is int or last == "end"):
        stop = None if last == "end" else last
        if not allow_absolute:
            raise MetadataError(
                f"{bounds.at}: numbers of samples are only allowed at a dataset or a join, found {bounds.plain!r} (an "
                "absolute range is only allowed for a leaf dataset). Use percentages here, or move the range to the "
                "dataset."
            )
        if first < 0 or (stop is not None and stop < first):
            raise bounds.wrong("0 <= start <= end")
        return SubsetRange(start=first, stop=stop, where=bounds.at)
    start = _percent(first)
    end = 1.0 if isinstance(last, str) and last.strip() == "end" else _percent(last)
    if start is None or end is None or start > end:
        raise bounds.wrong(f"two percentages or two numbers of samples such as {_EXPECTED}")
    return SubsetRange(ratio=(start, end), where=bounds.at)


_WHOLE = SubsetRange()


def merge_subsets(subsets: Sequence[SubsetRange]) -> SubsetRange:
    """Merge ranges, ordered from the innermost to the outermost, into one.

    Raises MetadataError if any but the innermost names samples by number.
    """
    if not subsets:
        return _WHOLE
    low = 0.0
    high = 1.0
    for subset in reversed(subsets):
        inner_low, inner_high = subset.ratio
        low = inner_low + low * (inner_high - inner_low)
        high = inner_low + high * (inner_high - inner_low)
    for subset in subsets[1:]:
        if subset.is_absolute:
            raise MetadataError(
                f"{subset.where}: numbers of samples are only allowed at a dataset. Use percentages here."
            )
    innermost = subsets[0]
    return SubsetRange(start=innermost.start, stop=innermost.stop, ratio=(low, high), where=innermost.where)


def evaluate_subset(subsets: Sequence[SubsetRange], num_samples: int) -> tuple[int, int]:
    """Return (start, stop) of ranges, from the innermost to the outermost, on a split of `num_samples` samples.

    The result may be empty. Raises MetadataError if a range names samples that do not exist.
    """
    merged = merge_subsets(subsets)
    stop = num_samples if merged.stop is None else merged.stop
    if not merged.start <= stop <= num_samples:
        written = f"[{merged.start}, {'end' if merged.stop is None else merged.stop}]"
        raise MetadataError(
            f"{merged.where}: the range {written} exceeds the dataset, whose split has {num_samples} samples."
        )
    length = stop - merged.start
    low, high = merged.ratio
    return merged.start + int(length * low), merged.start + int(length * high)


def _percent(value: Any) -> float | None:
    """Return `"25%"` as 0.25, None for anything else."""
    if not isinstance(value, str) or not value.strip().endswith("%"):
        return None
    try:
        percent = float(value.strip().removesuffix("%"))
    except ValueError:
        return None
    return percent / 100.0 if math.isfinite(percent) and 0 <= percent <= 100 else None
