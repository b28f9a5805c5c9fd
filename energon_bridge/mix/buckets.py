"""Cuts the leaves of a mix into buckets, by the values that expressions of columns give for their samples."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from energon_bridge.errors import ConfigurationError
from energon_bridge.mix.flatten import Mix
from energon_bridge.mix.leaves import OpenLeaf, number_leaves, values_of_samples

_MOST_BUCKETS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """The buckets of a run.

    Attributes:
        group_by: The expressions of columns whose values are the names.
        names: Of each bucket, such as `1152x896`.
        rows: Samples in a microbatch of each.
        samples: Samples of each.
        of_leaf: The bucket of each leaf, by identity.
    """

    group_by: tuple[str, ...]
    names: tuple[str, ...]
    rows: tuple[int, ...]
    samples: tuple[int, ...]
    of_leaf: Mapping[str, int]


def with_shares(mix: Mix, leaves: Sequence[OpenLeaf]) -> list[OpenLeaf]:
    """Return leaves with their own weights: those of a group divided by numbers of samples."""
    groups = Counter[int | None]()
    for entry, leaf in zip(mix.leaves, leaves, strict=True):
        groups[entry.size_group] += leaf.num_samples
    parts = [
        Fraction(1) if entry.size_group is None else Fraction(leaf.num_samples, groups[entry.size_group])
        for entry, leaf in zip(mix.leaves, leaves, strict=True)
    ]
    return [dataclasses.replace(leaf, share=leaf.share * part) for leaf, part in zip(leaves, parts, strict=True)]


def cut_into_buckets(
    leaves: Sequence[OpenLeaf], group_by: Sequence[str], batch_size: int, sizes: str | Mapping[str, int] | None
) -> tuple[tuple[OpenLeaf, ...], Buckets]:
    """Return a leaf for each bucket of each leaf, and the buckets.

    Args:
        leaves: The leaves.
        group_by: Expressions of columns; samples for which all give the same are a bucket.
        batch_size: Samples in a microbatch, where `sizes` does not say it.
        sizes: Samples in a microbatch of each bucket: by its name, or an expression of columns, of whose values in the
            bucket the least counts.

    Raises:
        ConfigurationError, MetadataError: An expression is wrong, or there are too many buckets.
    """
    found: dict[str, list[tuple[OpenLeaf, np.ndarray]]] = {}
    rows: dict[str, int] = {}
    for leaf in leaves:
        own = np.arange(leaf.start, leaf.stop) if leaf.kept is None else leaf.kept
        number, names = np.zeros(own.size, dtype=np.int64), [""]
        for text in group_by:
            values, places = np.unique(values_of_samples(leaf.dataset, text)[own], return_inverse=True)
            number, names = (
                number * values.size + places,
                [f"{name}x{value}".removeprefix("x") for name in names for value in map(_name, values.tolist())],
            )
        if isinstance(sizes, str):
            wanted = np.floor(values_of_samples(leaf.dataset, sizes)[own].astype(np.float64))
        else:
            wanted = np.full(own.size, batch_size)
        for one in np.unique(number).tolist():
            here, name = number == one, names[one]
            found.setdefault(name, []).append((leaf, own[here]))
            rows[name] = min(rows.get(name, 1 << 30), int(wanted[here].min()))
        if len(found) > _MOST_BUCKETS:
            raise ConfigurationError(
                f"group_by={[*group_by]} gives more than {_MOST_BUCKETS} buckets ({', '.join([*found][:3])}, …): round "
                "the values, as in `width // 64` or `aspect_width(width, height, 1048576, 64)`"
            )
    if isinstance(sizes, Mapping):
        if unknown := sorted(sizes.keys() - found.keys()):
            raise ConfigurationError(
                f"bucket_batch_size names no bucket with {', '.join(unknown[:5])}. Buckets: {', '.join(sorted(found))}"
            )
        rows |= sizes
    order = sorted(found, key=lambda name: [(len(part), part) for part in name.split("x")])
    for name in order:
        if type(rows[name]) is not int or not 1 <= rows[name] < 1 << 30:
            raise ConfigurationError(f"bucket {name}: a microbatch has {rows[name]!r} samples, expected at least 1")
    parts = [(bucket, leaf, numbers) for bucket, name in enumerate(order) for leaf, numbers in found[name]]
    # Parts of two leaves may have the same samples.
    cut = number_leaves([_part(leaf, numbers, order[bucket]) for bucket, leaf, numbers in parts])
    return cut, Buckets(
        group_by=tuple(group_by),
        names=tuple(order),
        rows=tuple(rows[name] for name in order),
        samples=tuple(sum(numbers.size for _, numbers in found[name]) for name in order),
        of_leaf={leaf.identity: bucket for leaf, (bucket, _, _) in zip(cut, parts, strict=True)},
    )


def _part(leaf: OpenLeaf, numbers: np.ndarray, name: str) -> OpenLeaf:
    small = np.int32 if leaf.stop <= np.iinfo(np.int32).max else np.int64
    return dataclasses.replace(
        leaf,
        occurrence=0,
        filter=f"{leaf.filter}, bucket {name}".removeprefix(", "),
        kept=numbers.astype(small),
        share=leaf.share * Fraction(numbers.size, leaf.num_samples),
    )


def _name(value: object) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
