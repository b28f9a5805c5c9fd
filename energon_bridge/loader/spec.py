"""What a loader delivers: a dataset opened for training or validation, with everything its order depends on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from energon_bridge.format.dataset import PreparedDataset
from energon_bridge.loader.workers import FiniteStreams, LaneStreams, Stream
from energon_bridge.plan.leaf import LeafOrder
from energon_bridge.rng import key_of
from energon_bridge.stream.finite import num_steps
from energon_bridge.stream.pipeline import Leaf, Pipeline, StreamSettings
from energon_bridge.stream.state import LaneState
from energon_bridge.task_encoder.images import IMAGE_EXTENSIONS
from energon_bridge.topology import WorkerConfig, default_num_lanes

_READ_BYTES = 256 << 20
"""Bytes that the rounds of all lanes of one process may take; beyond it draws are read one microbatch at a time."""


@dataclass(frozen=True, kw_only=True)
class Units:
    """A dataset cut into lanes (or, finite, into microbatches), for one number of lanes."""

    num_lanes: int
    steps: int
    leaf: Leaf
    leaves: list[dict[str, Any]]
    settings: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """A dataset as `get_train_dataset` and `get_val_dataset` return it, for `get_loader` and `get_savable_loader`.

    It is a description; nothing is read before a loader is iterated but the metadata of the dataset.
    """

    dataset: PreparedDataset
    finite: bool
    worker_config: WorkerConfig
    batch_size: int | None
    task_encoder: Any
    batch_drop_last: bool = False
    shuffle_buffer_size: int = 0
    max_samples_per_sequence: int | None = None
    parallel_shard_iters: int = 16
    shuffle: bool = True
    limit: int | None = None
    num_leaves: int = field(default=1, init=False)

    @property
    def kind(self) -> str:
        return "finite" if self.finite else "train"

    @property
    def rows(self) -> int:
        """Samples in a full microbatch."""
        return self.batch_size or 1

    def epoch_length(self, world_size: int) -> int:
        """Return the microbatches of one rank in an epoch of an endless stream; at least 1."""
        return max(1, self.dataset.num_samples // (self.rows * world_size))

    def units(self, config: WorkerConfig, num_lanes: int | None = None) -> Units:
        """Cut the dataset for a worker configuration; `num_lanes` (of a state) goes before the configuration's."""
        dataset = self.dataset
        lanes = num_lanes or config.num_lanes or self._default_lanes(config)
        seed = config.seed + config.seed_offset
        identity = hashlib.blake2b(
            f"{dataset.fingerprint}\0{dataset.split_part}\0\0000".encode(), digest_size=8
        ).hexdigest()
        order = LeafOrder(
            shard_counts=dataset.shard_counts,
            num_lanes=lanes,
            key=key_of("leaf", seed, identity),
            slice_length=self.max_samples_per_sequence,
            shuffle_buffer_size=self.shuffle_buffer_size,
            parallel_shard_iters=self.parallel_shard_iters,
            block=self.rows,
            shuffle=self.shuffle,
        )
        steps = 0
        settings: dict[str, Any] = {"seed": seed, "batch_size": self.batch_size}
        if self.finite:
            steps = num_steps(
                dataset.num_samples, self.rows, config.dp_size, drop_last=self.batch_drop_last, limit=self.limit
            )
            settings |= {"batch_drop_last": self.batch_drop_last}
        else:
            settings |= {
                "max_samples_per_sequence": self.max_samples_per_sequence,
                "shuffle_buffer_size": self.shuffle_buffer_size,
                "parallel_shard_iters": self.parallel_shard_iters,
                "shuffle": self.shuffle,
            }
        described = {
            "identity": identity,
            "fingerprint": dataset.fingerprint,
            "path": dataset.path,
            "split_part": dataset.split_part,
            "num_samples": dataset.num_samples,
            "num_shards": len(dataset.shard_names),
        }
        leaf = Leaf(identity=identity, dataset=dataset, order=order)
        return Units(num_lanes=lanes, steps=steps, leaf=leaf, leaves=[described], settings=settings)

    def _default_lanes(self, config: WorkerConfig) -> int:
        if self.finite:
            return config.dp_size
        return default_num_lanes(
            config.dp_size,
            config.num_workers,
            group_size=config.microbatches_per_global_batch,
            epoch_microbatches=-(-self.dataset.num_samples // self.rows),
        )

    def pipeline(self, units: Units, config: WorkerConfig, threads: int | None = None) -> Pipeline:
        """Build what loads, encodes and batches in one process; `threads` overrides the configuration's."""
        if threads is None:
            threads = config.threads_per_process(max(1, config.num_workers)) if self._decodes_media() else 0
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
        return Pipeline(units.leaf, settings)

    def _round_bytes(self) -> int:
        """About how many bytes a round has."""
        mean = int(self.dataset.shard_sizes.sum()) // self.dataset.num_samples
        return mean * max(self.shuffle_buffer_size, self.parallel_shard_iters)

    def _decodes_media(self) -> bool:
        """Whether decoding is worth threads of its own: its decoders release the interpreter lock."""
        decoder, field_map = self.task_encoder.decoder, self.dataset.field_map
        if decoder is None or field_map is None:
            return decoder is not None
        return any(part.rpartition(".")[2].lower() in IMAGE_EXTENSIONS for part in field_map.parts)

    def stream(self, units: Units, config: WorkerConfig, lanes: dict[int, LaneState]) -> Stream:
        """Build what makes the units of one process."""
        pipeline = self.pipeline(units, config)
        if self.finite:
            return FiniteStreams(pipeline, drop_last=self.batch_drop_last)
        return LaneStreams(pipeline, lanes)
