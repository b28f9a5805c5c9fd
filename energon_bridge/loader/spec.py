"""What a loader delivers: the leaves of a dataset or mix, with everything that their order depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from energon_bridge.loader.leaves import MixWeights, OpenLeaf
from energon_bridge.loader.workers import FiniteStreams, LaneStreams, Stream
from energon_bridge.mix import Mix
from energon_bridge.plan.blend import Blend, EpochizedBlend, WeightedBlend
from energon_bridge.plan.leaf import LeafOrder
from energon_bridge.rng import key_of
from energon_bridge.stream.finite import num_steps
from energon_bridge.stream.leaf import Leaf
from energon_bridge.stream.pipeline import Pipeline, StreamSettings
from energon_bridge.stream.state import LaneState
from energon_bridge.topology import WorkerConfig, default_num_lanes

_READ_BYTES = 256 << 20
"""Bytes that the rounds of all lanes of one process may take; beyond it draws are read one microbatch at a time."""


@dataclass(frozen=True, kw_only=True)
class Units:
    """A mix cut into lanes (or, finite, into microbatches), for one number of lanes.

    `table` describes the leaves, in order, for people and for the state; `settings` is all else the order depends on.
    """

    num_lanes: int
    steps: int
    leaves: tuple[Leaf, ...]
    blend: Blend | None
    table: list[dict[str, Any]]
    settings: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """A dataset as `get_train_dataset` and `get_val_dataset` return it, for `get_loader` and `get_savable_loader`.

    It is a description; nothing is read before a loader is iterated but the metadata of the datasets.
    """

    leaves: tuple[OpenLeaf, ...]
    mix: Mix
    finite: bool
    worker_config: WorkerConfig
    batch_size: int | None
    task_encoder: Any
    batch_drop_last: bool = False
    shuffle_buffer_size: int = 0
    max_samples_per_sequence: int | None = None
    parallel_shard_iters: int = 16
    limit: int | None = None

    @property
    def kind(self) -> str:
        return "finite" if self.finite else "train"

    @property
    def rows(self) -> int:
        """Samples in a full microbatch."""
        return self.batch_size or 1

    @property
    def num_samples(self) -> int:
        """Samples of all leaves, each once."""
        return sum(leaf.num_samples for leaf in self.leaves)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a finite stream, all ranks together."""
        full, rest = divmod(self.num_samples, self.rows)
        return full if self.batch_drop_last or not rest else full + 1

    @cached_property
    def ordered(self) -> tuple[OpenLeaf, ...]:
        """The leaves in the order in which counters are kept: by identity, or, finite, as given."""
        return self.leaves if self.finite else tuple(sorted(self.leaves, key=lambda leaf: leaf.identity))

    def epoch_length(self, world_size: int) -> int:
        """Return the microbatches of one rank in an epoch of an endless stream; at least 1."""
        return max(1, self.num_samples // (self.rows * world_size))

    def units(self, config: WorkerConfig, num_lanes: int | None = None) -> Units:
        """Cut the mix for a worker configuration; `num_lanes` (of a state) goes before the configuration's."""
        lanes = num_lanes or config.num_lanes or self._default_lanes(config)
        seed = config.seed + config.seed_offset
        steps = 0
        settings: dict[str, Any] = {"seed": seed, "batch_size": self.batch_size}
        if self.finite:
            steps = num_steps(
                self.num_samples, self.rows, config.dp_size, drop_last=self.batch_drop_last, limit=self.limit
            )
            settings |= {"batch_drop_last": self.batch_drop_last}
        else:
            shuffle = [leaf.shuffle for leaf in self.ordered]
            settings |= {
                "max_samples_per_sequence": self.max_samples_per_sequence,
                "shuffle_buffer_size": self.shuffle_buffer_size,
                "parallel_shard_iters": self.parallel_shard_iters,
                "shuffle": shuffle[0] if len(set(shuffle)) == 1 else shuffle,
                "mode": self.mix.mode if len(self.leaves) > 1 else "single",
            }
            if self.mix.is_scheduled and len(self.leaves) > 1:
                settings["schedule"] = self._weights().fingerprint()
        leaves = tuple(self._leaf(leaf, lanes, seed) for leaf in self.ordered)
        return Units(
            num_lanes=lanes,
            steps=steps,
            leaves=leaves,
            blend=self._blend(leaves, lanes, seed),
            table=[self._row(leaf) for leaf in self.ordered],
            settings=settings,
        )

    def _leaf(self, leaf: OpenLeaf, lanes: int, seed: int) -> Leaf:
        order = LeafOrder(
            shard_counts=leaf.shard_counts,
            num_lanes=lanes,
            key=key_of("leaf", seed, leaf.identity),
            slice_length=self.max_samples_per_sequence,
            shuffle_buffer_size=self.shuffle_buffer_size,
            parallel_shard_iters=self.parallel_shard_iters,
            block=self.rows,
            shuffle=leaf.shuffle and not self.finite,
            first_sample=leaf.start,
        )
        return Leaf(identity=leaf.identity, dataset=leaf.dataset, order=order)

    def _blend(self, leaves: Sequence[Leaf], lanes: int, seed: int) -> Blend | None:
        if self.finite or len(leaves) == 1:
            return None
        if self.mix.mode == "weights":
            return WeightedBlend(weights=self._weights(), num_lanes=lanes, key=key_of("run", seed))
        rank = {leaf.identity: number for number, leaf in enumerate(self.ordered)}
        sequence = tuple(rank[leaf.identity] for leaf in self.leaves) if self.mix.mode == "concat" else None
        return EpochizedBlend(
            samples=tuple(leaf.num_samples for leaf in self.ordered),
            repetitions=tuple(leaf.share for leaf in self.ordered),
            num_lanes=lanes,
            key=key_of("run", seed),
            leaf_keys=tuple(leaf.order.key for leaf in leaves),
            sequence=sequence,
        )

    def _weights(self) -> MixWeights:
        place = {leaf.identity: number for number, leaf in enumerate(self.leaves)}
        return MixWeights(
            mix=self.mix,
            sizes=tuple(leaf.num_samples for leaf in self.leaves),
            order=tuple(place[leaf.identity] for leaf in self.ordered),
        )

    def _row(self, leaf: OpenLeaf) -> dict[str, Any]:
        return {
            "identity": leaf.identity,
            "path": leaf.dataset.path,
            "split_part": leaf.dataset.split_part,
            "num_samples": leaf.num_samples,
            "share": str(leaf.share) if not self.finite and len(self.leaves) > 1 else "",
        }

    def _default_lanes(self, config: WorkerConfig) -> int:
        if self.finite:
            return config.dp_size
        return default_num_lanes(
            config.dp_size,
            config.num_workers,
            group_size=config.microbatches_per_global_batch,
            epoch_microbatches=-(-self.num_samples // self.rows),
        )

    def pipeline(self, units: Units, config: WorkerConfig, threads: int | None = None) -> Pipeline:
        """Build what loads, encodes and batches in one process; `threads` overrides the configuration's."""
        decodes = self.task_encoder.decoder is not None and any(leaf.decodes_media for leaf in self.leaves)
        if threads is None:
            threads = config.threads_per_process(max(1, config.num_workers)) if decodes else 0
            # One thread beside a worker's own would only pass the interpreter lock to and fro.
            threads = 0 if config.num_workers and threads == 1 else threads
        lanes = -(-units.num_lanes // (config.dp_size * max(1, config.num_workers)))
        settings = StreamSettings(
            batch_size=self.batch_size,
            encoder=self.task_encoder,
            threads=threads,
            reads_rounds=self._round_bytes() * lanes <= _READ_BYTES,
            background_reads=not config.num_workers,
            restore_generators=not config.num_workers,
        )
        return Pipeline(units.leaves, settings)

    def _round_bytes(self) -> int:
        """About how many bytes a round of every leaf has, all leaves together."""
        rows = max(self.shuffle_buffer_size, self.parallel_shard_iters)
        means = (int(leaf.dataset.shard_sizes.sum()) // leaf.dataset.num_samples for leaf in self.leaves)
        return sum(mean * rows for mean in means)

    def stream(self, units: Units, config: WorkerConfig, lanes: dict[int, LaneState]) -> Stream:
        """Build what makes the units of one process."""
        pipeline = self.pipeline(units, config)
        if self.finite:
            return FiniteStreams(pipeline, drop_last=self.batch_drop_last)
        return LaneStreams(pipeline, units.blend, lanes)
