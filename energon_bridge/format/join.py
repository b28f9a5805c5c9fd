"""Several prepared datasets joined by sample key: what the engine sees of them as one dataset of rows.

The rows are the samples of the primary (the first dataset) in the order of its split, without excluded ones and
without those that a `nonmatch: skip` drops. `rows[r, p]` is the place of the sample that dataset p gives to row r on
the line of its split (its shards laid end to end), -1 where it has none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from energon_bridge.format.dataset import PreparedDataset
from energon_bridge.rng import IntArray
from energon_bridge.samples import CrudeSample

Nonmatch = Literal["error", "skip", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinPart:
    """One dataset of a join; `name` is None in a join written as a list."""

    dataset: PreparedDataset
    name: str | None = None
    nonmatch: Nonmatch = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedDataset:
    """Datasets joined by key; the arrays per shard count rows by the shard of the primary's sample."""

    path: str
    split_part: str
    parts: tuple[JoinPart, ...]
    joiner: Callable[..., Any]
    rows: IntArray = field(repr=False, compare=False)
    shard_counts: IntArray = field(repr=False, compare=False)
    shard_sizes: IntArray = field(repr=False, compare=False)
    fingerprint: str

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The shards of the primary."""
        return self.parts[0].dataset.shard_names

    @property
    def is_crude(self) -> bool:
        """Whether a sample of one of its datasets has no type, so that what the joiner makes may have none."""
        return any(issubclass(part.dataset.sample_type, CrudeSample) for part in self.parts)

    @property
    def subflavors(self) -> dict[str, Any]:
        """Those of the primary, by which cookers are chosen."""
        return self.parts[0].dataset.subflavors

    @property
    def num_samples(self) -> int:
        """Rows of the join."""
        return self.rows.shape[0]

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names under which the joiner takes its samples; None if it takes them by position."""
        names = tuple(part.name for part in self.parts if part.name is not None)
        return names or None


def joined_dataset(
    parts: Sequence[JoinPart],
    rows: IntArray,
    *,
    split_part: str,
    joiner: Callable[..., Any],
    joiner_name: str,
    shard_counts: IntArray,
    checksum: int,
) -> JoinedDataset:
    """Describe a join as one dataset; `checksum` is that of its rows, for the fingerprint."""
    mean = sum(int(part.dataset.shard_sizes.sum()) // part.dataset.num_samples for part in parts)
    named = [[part.dataset.fingerprint, part.dataset.split_part, part.name, part.nonmatch] for part in parts]
    content = json.dumps([1, named, joiner_name, checksum], separators=(",", ":"))
    return JoinedDataset(
        path="join of " + " and ".join(part.dataset.path for part in parts),
        split_part=split_part,
        parts=tuple(parts),
        joiner=joiner,
        rows=rows,
        shard_counts=shard_counts,
        shard_sizes=np.asarray(shard_counts * mean, dtype=np.int64),
        fingerprint=hashlib.sha256(content.encode()).hexdigest(),
    )
