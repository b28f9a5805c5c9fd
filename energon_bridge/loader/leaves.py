"""From a described mix to opened leaves: what each dataset has, which samples of it are read, and its identity."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

import numpy as np

from energon_bridge.errors import ConfigurationError, EmptyDatasetError
from energon_bridge.format.dataset import PreparedDataset, open_dataset
from energon_bridge.format.nvmeta import DEFAULT_DATASET_CONFIG, DEFAULT_SPLIT_CONFIG
from energon_bridge.mix import LeafRef, Mix, evaluate_subset
from energon_bridge.rng import IntArray, key_of
from energon_bridge.task_encoder.images import IMAGE_EXTENSIONS

_NOT_YET = "cannot be read yet by this version of energon_bridge; leave it out of the mix"


@dataclass(frozen=True, kw_only=True)
class OpenLeaf:
    """One dataset, or a part of one, in a mix.

    Args:
        dataset: The opened dataset.
        start, stop: The samples of it that the leaf has.
        share: Its weight (mode "weights"), or how often a mix epoch goes through it.
        occurrence: Number among the leaves of the mix that have the same content.
        shuffle: False keeps the dataset's own order.
    """

    dataset: PreparedDataset
    start: int
    stop: int
    share: Fraction = Fraction(1)
    occurrence: int = 0
    shuffle: bool = True

    @cached_property
    def identity(self) -> str:
        """A hash of what the leaf contains, wherever it lies: 16 hex digits."""
        whole = self.start == 0 and self.stop == self.dataset.num_samples
        subset = "" if whole else f"{self.start}:{self.stop}"
        parts = (self.dataset.fingerprint, self.dataset.split_part, subset, str(self.occurrence))
        return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()

    @property
    def num_samples(self) -> int:
        return self.stop - self.start

    @property
    def shard_counts(self) -> IntArray:
        """Samples of the leaf in each shard, shape (shards,)."""
        ends = np.cumsum(self.dataset.shard_counts)
        starts = ends - self.dataset.shard_counts
        return np.clip(np.minimum(ends, self.stop) - np.maximum(starts, self.start), 0, None)

    @property
    def decodes_media(self) -> bool:
        """Whether decoding it is worth threads of its own: image decoders release the interpreter lock."""
        field_map = self.dataset.field_map
        return field_map is None or any(p.rpartition(".")[2].lower() in IMAGE_EXTENSIONS for p in field_map.parts)


def open_leaves(mix: Mix, *, trust_remote_code: bool, shuffle: bool) -> tuple[OpenLeaf, ...]:
    """Open the leaves of a mix, in its order; a dataset that is reached twice is opened once.

    Raises:
        DatasetError: One of them cannot be used, by a class of its own for each reason.
    """
    opened: dict[tuple[str, str, str, str], PreparedDataset] = {}
    leaves: list[OpenLeaf] = []
    for entry in mix.leaves:
        ref = entry.leaf
        if not isinstance(ref, LeafRef):
            raise ConfigurationError(f"{ref.where}: a join {_NOT_YET}")
        if ref.is_jsonl or ref.aux:
            what = f"the JSONL file {ref.path}" if ref.is_jsonl else "an aux store"
            raise ConfigurationError(f"{ref.where}: {what} {_NOT_YET}")
        if ref.shuffle_over_epochs_multiplier not in (None, 1):
            raise ConfigurationError(
                f"{ref.where}: shuffle_over_epochs_multiplier must be 1 (shuffle each epoch) or null (keep the "
                f"dataset's order), got {ref.shuffle_over_epochs_multiplier}"
            )
        dataset_config = ref.dataset_config or DEFAULT_DATASET_CONFIG
        split_config = ref.split_config or DEFAULT_SPLIT_CONFIG
        place = (ref.path, ref.split_part, dataset_config, split_config)
        if place not in opened:
            opened[place] = open_dataset(
                ref.path,
                split_part=ref.split_part,
                dataset_config=dataset_config,
                split_config=split_config,
                trust_remote_code=trust_remote_code,
            )
        dataset = opened[place]
        start, stop = evaluate_subset(ref.subsets, dataset.num_samples)
        if start == stop:
            raise EmptyDatasetError(
                f"{ref.where}: the subset of {ref.path} has none of its {dataset.num_samples} samples"
            )
        if ref.subflavors:
            dataset = dataclasses.replace(dataset, subflavors=dataset.subflavors | ref.subflavors)
        share = entry.weight if entry.repetitions is None else entry.repetitions
        leaves.append(
            OpenLeaf(
                dataset=dataset,
                start=start,
                stop=stop,
                share=Fraction(1) if share is None else share,
                shuffle=shuffle and ref.shuffle_over_epochs_multiplier is not None,
            )
        )
    return _numbered(leaves)


def _numbered(leaves: Sequence[OpenLeaf]) -> tuple[OpenLeaf, ...]:
    """Give leaves of equal content occurrence numbers, so that each has an order of its own."""
    seen: Counter[str] = Counter()
    numbered = []
    for leaf in leaves:
        numbered.append(dataclasses.replace(leaf, occurrence=seen[leaf.identity]))
        seen[leaf.identity] += 1
    return tuple(numbered)


@dataclass(frozen=True, kw_only=True)
class MixWeights:
    """The weights of a mix over its global draws, in order of the leaves' identities.

    Args:
        mix: The mix.
        sizes: Samples of each leaf, in order of the mix.
        order: For each identity in turn, the place of its leaf in the mix.
    """

    mix: Mix
    sizes: tuple[int, ...]
    order: tuple[int, ...]

    def at(self, global_draw: int) -> Sequence[float | Fraction]:
        """Return the weights of a global draw."""
        weights: Sequence[float | Fraction]
        if self.mix.is_scheduled or self.mix.needs_sizes:
            weights = self.mix.weights_at(global_draw, self.sizes)
        else:
            weights = [leaf.weight or Fraction(0) for leaf in self.mix.leaves]
        return [weights[place] for place in self.order]

    def next_change(self, global_draw: int) -> int | None:
        """Return the first later global draw whose weights may differ."""
        return self.mix.next_change(global_draw)

    def fingerprint(self) -> str:
        """Return a hash of the weights over the whole run: at the points of all schedules and thrice between them."""
        points = [0, *self.mix.schedule_points()]
        between = [low + (high - low) * quarter // 4 for low, high in pairwise(points) for quarter in (1, 2, 3)]
        weights = ((draw, *(float(weight) for weight in self.at(draw))) for draw in sorted({*points, *between}))
        return f"{key_of(*(repr(row) for row in weights)):016x}"
