"""What a loader delivers: the leaves of a dataset or mix, with everything that their order depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import GenericAlias
from typing import TYPE_CHECKING, Any, ClassVar

import torch.utils.data

from energon_bridge.errors import ConfigurationError
from energon_bridge.loader.leaves import OpenLeaf
from energon_bridge.loader.weights import ChangedWeights, LeafWeights, MixWeights
from energon_bridge.loader.workers import FiniteStreams, LaneStreams, Stream, WorkerFacts
from energon_bridge.mix import Mix
from energon_bridge.plan.blend import Blend, ChangedBlend, EpochizedBlend, WeightedBlend
from energon_bridge.plan.leaf import LeafOrder
from energon_bridge.plan.scheduled import ScheduledBlend
from energon_bridge.rng import key_of
from energon_bridge.stores import CachePool, NoCachePool
from energon_bridge.stream.cooking import check_cooker
from energon_bridge.stream.finite import DrawnRows, ListedRows, num_microbatches
from energon_bridge.stream.journal import Journal
from energon_bridge.stream.leaf import Leaf
from energon_bridge.stream.passes import FinitePlan, InOrder, Shuffled
from energon_bridge.stream.pipeline import Pipeline
from energon_bridge.stream.policy import ErrorPolicy
from energon_bridge.stream.settings import StreamSettings
from energon_bridge.stream.user_code import UserCode
from energon_bridge.stream.watchdog import WatchdogSettings
from energon_bridge.topology import WorkerConfig, default_num_lanes

if TYPE_CHECKING:
    from energon_bridge.loader.position import Position

_READ_BYTES = 256 << 20
"""Bytes that the rounds of all lanes of one process may take; beyond it draws are read one microbatch at a time."""


@dataclass(frozen=True, kw_only=True)
class Units:
    """A mix cut into lanes (or, finite, for passes of one lane), for one number of lanes.

    `table` describes the leaves, in order, for people and for the state; `rows` makes it when it is first asked for.
    `settings` is all else the order depends on.
    """

    num_lanes: int
    leaves: tuple[Leaf, ...]
    blend: Blend | None
    rows: Callable[[], list[dict[str, Any]]]
    settings: dict[str, Any]

    @cached_property
    def table(self) -> list[dict[str, Any]]:
        return self.rows()


@dataclass(frozen=True, kw_only=True)
class DatasetSpec(torch.utils.data.IterableDataset[Any]):
    """A dataset as `get_train_dataset` and `get_val_dataset` return it, for `get_loader` and `get_savable_loader`.

    It is a description; nothing is read before a loader is iterated but the metadata of the datasets.

    Args:
        leaves: The opened leaves, in order of the mix.
        mix: How they are combined.
        finite: One pass at a time (validation, or training with `repeat=False`) instead of an endless stream.
        shuffled: Whether a pass of a finite stream has an order of its own (training) or the datasets' (validation).
        virtual_epoch_length: Steps after which an iterator over training data ends; the next one goes on.
        limit: Steps after which a pass over validation data ends.
        cache_pool: Where files that are needed later are kept.
        error_policy: What becomes of samples that fail.

    The others are those of `get_train_dataset`.
    """

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # annotations of energon users give it type arguments

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
    shuffled: bool = True
    virtual_epoch_length: int | None = None
    packing_buffer_size: int | None = None
    cache_pool: CachePool = field(default_factory=NoCachePool)
    error_policy: ErrorPolicy = field(default_factory=ErrorPolicy)

    def __iter__(self) -> Iterator[Any]:
        raise ConfigurationError(
            "a dataset of energon_bridge is a description and is not iterated: give it to get_savable_loader or "
            "get_loader, and iterate what they return (not a DataLoader over the dataset: trainers that make one anew "
            "of a loader's dataset, such as accelerate, must be given the batches as they are)"
        )

    def __post_init__(self) -> None:
        _ = self.grouped  # refuses hooks that cannot be
        for leaf in self.leaves:
            check_cooker(self.task_encoder, leaf.dataset, leaf.aux)
        if not (self.finite and self.shuffled):
            return
        if self.mix.mode == "weights" and len(self.leaves) > 1:
            raise ConfigurationError(
                "repeat=False: a blend by weights has no end; use `blend_epochized` with repetitions, `concat`, or one "
                "dataset"
            )
        for leaf in self.leaves:
            if leaf.shuffle_epochs not in (None, 1):
                raise ConfigurationError(
                    f"repeat=False: {leaf.dataset.path} is shuffled over {leaf.shuffle_epochs} epochs, so that a pass "
                    "would not have every sample; set shuffle_over_epochs_multiplier to 1 or None"
                )

    @property
    def kind(self) -> str:
        """What a state of it says: `train` (endless), `passes` (training that ends), `finite` (validation)."""
        if not self.finite:
            return "train"
        return "passes" if self.shuffled else "finite"

    @property
    def rows(self) -> int:
        """Samples in a full microbatch."""
        return self.batch_size or 1

    @property
    def num_samples(self) -> int:
        """Samples of all leaves, each once."""
        return sum(leaf.num_samples for leaf in self.leaves)

    def plan(self, units: Units, epoch: int) -> FinitePlan:
        """Return which samples the draws of pass number `epoch` of a finite stream are."""
        if not self.shuffled:
            return InOrder(units.leaves)
        assert units.blend is None or isinstance(units.blend, EpochizedBlend)
        return Shuffled(units.leaves, units.blend, epoch)

    @cached_property
    def grouped(self) -> bool:
        """Whether the encoder batches rows by groups."""
        return UserCode(self.task_encoder, packs=self.packing_buffer_size is not None).groups

    @property
    def listed(self) -> bool:
        """Whether all ranks agree on the rows of a pass before it begins: where it is packed or grouped."""
        return self.finite and (self.packing_buffer_size is not None or self.grouped)

    def end(self, num_rows: int, world_size: int, num_batches: int | None = None) -> int:
        """Return the microbatch at which a pass ends for every rank: of so many rows, or batches, if it is grouped."""
        end = num_microbatches(num_rows, self.rows, drop_last=self.batch_drop_last)
        end = end if num_batches is None else num_batches
        return end if self.limit is None else min(end, self.limit * world_size)

    @cached_property
    def ordered(self) -> tuple[OpenLeaf, ...]:
        """The leaves in the order in which counters are kept: by identity, or, for validation, as given."""
        return self.leaves if self.kind == "finite" else tuple(sorted(self.leaves, key=lambda leaf: leaf.identity))

    def epoch_length(self, world_size: int) -> int:
        """Return the microbatches of one rank in an epoch of an endless stream; at least 1."""
        return max(1, self.num_samples // (self.rows * world_size))

    def units(self, config: WorkerConfig, num_lanes: int | None = None, changes: ChangedWeights = ()) -> Units:
        """Cut the mix for a worker configuration.

        Args:
            config: Who loads what.
            num_lanes: Of a state; goes before the configuration's.
            changes: Weights that were changed during the run.
        """
        lanes = num_lanes or config.num_lanes or self._default_lanes(config)
        seed = config.seed + config.seed_offset
        settings: dict[str, Any] = {"seed": seed, "batch_size": self.batch_size}
        if self.finite:
            settings |= {"batch_drop_last": self.batch_drop_last}
            settings |= {"grouped": True} if self.grouped else {}
        if self.packing_buffer_size is not None:
            settings |= {"packing_buffer_size": self.packing_buffer_size}
        if self.kind != "finite":
            shuffle = [_shuffle_setting(leaf.shuffle_epochs) for leaf in self.ordered]
            settings |= {
                "max_samples_per_sequence": self.max_samples_per_sequence,
                "shuffle_buffer_size": self.shuffle_buffer_size,
                "parallel_shard_iters": self.parallel_shard_iters,
                "shuffle": shuffle[0] if len(set(shuffle)) == 1 else shuffle,
                "mode": self.mode,
            }
            if self.mode == "weights" and self.mix.is_scheduled:
                settings["schedule"] = self.weights.fingerprint()
        target = getattr(self.task_encoder.decoder, "image_target", None)
        if target is not None:  # no matter of order but of pixels, which nobody would see change
            settings["image_target"] = list(target)
        # A pass has one order, whoever delivers it.
        cut = 1 if self.finite else lanes
        leaves = tuple(self._leaf(leaf, cut, seed) for leaf in self.ordered)
        return Units(
            num_lanes=lanes,
            leaves=leaves,
            blend=self._blend(leaves, cut, seed, changes),
            rows=self._rows,
            settings=settings,
        )

    @property
    def mode(self) -> str:
        """How the leaves are combined: `single`, `weights`, `repetitions` or `concat`."""
        return self.mix.mode if len(self.leaves) > 1 else "single"

    def _leaf(self, leaf: OpenLeaf, lanes: int, seed: int) -> Leaf:
        order = LeafOrder(
            shard_counts=leaf.shard_counts,
            num_lanes=lanes,
            key=key_of("leaf", seed, leaf.identity),
            slice_length=self.max_samples_per_sequence,
            shuffle_buffer_size=self.shuffle_buffer_size,
            parallel_shard_iters=self.parallel_shard_iters,
            block=self.rows,
            shuffle=leaf.shuffle_epochs is not None,
            first_sample=leaf.start,
            epochs_per_shuffle=leaf.shuffle_epochs or 1,
        )
        return Leaf(identity=leaf.identity, dataset=leaf.dataset, order=order, aux=leaf.aux)

    def _blend(self, leaves: Sequence[Leaf], lanes: int, seed: int, changes: ChangedWeights) -> Blend | None:
        if self.kind == "finite" or self.mode == "single":
            return None
        if self.mode == "weights":
            parts: list[tuple[int, LeafWeights]] = [(0, self.weights), *changes]
            blends = tuple(
                (start, _weighted_blend(weights, start, lanes, key_of("run", seed))) for start, weights in parts
            )
            return ChangedBlend(parts=blends, num_lanes=lanes) if changes else blends[0][1]
        rank = {leaf.identity: number for number, leaf in enumerate(self.ordered)}
        sequence = tuple(rank[leaf.identity] for leaf in self.leaves) if self.mode == "concat" else None
        return EpochizedBlend(
            samples=tuple(leaf.num_samples for leaf in self.ordered),
            repetitions=tuple(leaf.share for leaf in self.ordered),
            num_lanes=lanes,
            key=key_of("run", seed),
            leaf_keys=tuple(leaf.order.key for leaf in leaves),
            sequence=sequence,
        )

    @cached_property
    def weights(self) -> MixWeights:
        """The weights of the mix, in order of the leaves' identities."""
        place = {leaf.identity: number for number, leaf in enumerate(self.leaves)}
        return MixWeights(
            mix=self.mix,
            sizes=tuple(leaf.num_samples for leaf in self.leaves),
            order=tuple(place[leaf.identity] for leaf in self.ordered),
        )

    def _rows(self) -> list[dict[str, Any]]:
        return [self._row(leaf) for leaf in self.ordered]

    def _row(self, leaf: OpenLeaf) -> dict[str, Any]:
        return {
            "identity": leaf.identity,
            "path": leaf.dataset.path,
            "split_part": leaf.dataset.split_part,
            "num_samples": leaf.num_samples,
            "subset": "" if leaf.num_samples == leaf.dataset.num_samples else f"{leaf.start}:{leaf.stop}",
            "share": str(leaf.share) if self.kind != "finite" and len(self.leaves) > 1 else "",
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

    def pipeline(
        self, units: Units, config: WorkerConfig, threads: int | None = None, worker: WorkerFacts | None = None
    ) -> Pipeline:
        """Build what loads, encodes and batches in one process.

        `threads` overrides the configuration's; `worker` is what a worker process knows of itself.
        """
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
            packing_buffer_size=self.packing_buffer_size,
            held_bytes=config.held_bytes,
            lanes=lanes,
            cache=self.cache_pool,
            policy=self.error_policy,
            journal=self.journal,
            rank=config.dp_rank,
            ranks=config.dp_size,
            words=() if worker is None else worker.words,
            barred=frozenset() if worker is None else worker.barred,
        )
        return Pipeline(units.leaves, settings)

    def _round_bytes(self) -> int:
        """About how many bytes a round of every leaf has, all leaves together."""
        rows = max(self.shuffle_buffer_size, self.parallel_shard_iters)
        means = (int(leaf.dataset.shard_sizes.sum()) // leaf.dataset.num_samples for leaf in self.leaves)
        return sum(mean * rows for mean in means)

    @cached_property
    def journal(self) -> Journal:
        """What names the samples that fail, once in this process."""
        return Journal(self.error_policy)

    def stream(
        self,
        config: WorkerConfig,
        position: Position,
        watchdog: WatchdogSettings | None = None,
        worker: WorkerFacts | None = None,
    ) -> Stream:
        """Build what makes the units of one process from a position on: the lanes, or the microbatches of a pass."""
        units = position.units
        pipeline = self.pipeline(units, config, 0 if worker is not None and worker.careful else None, worker)
        if watchdog is not None and worker is None:
            pipeline.watch(watchdog, f"rank {config.dp_rank}")
        elif watchdog is not None and worker is not None:
            pipeline.watch(watchdog, f"rank {config.dp_rank}, worker {worker.number}", worker.said)
        if not self.finite:
            return LaneStreams(pipeline, units.blend, position.lanes)
        listing = position.listing
        plan = self.plan(units, position.epoch)
        rows = DrawnRows(pipeline, plan) if listing is None else ListedRows(pipeline, listing)
        return FiniteStreams(pipeline, rows, drop_last=self.batch_drop_last)


def _weighted_blend(weights: LeafWeights, start: int, lanes: int, key: int) -> Blend:
    if weights.moves:
        return ScheduledBlend(weights=weights, num_lanes=lanes, key=key, start=start)
    return WeightedBlend(weights=weights, num_lanes=lanes, key=key)


def _shuffle_setting(epochs: int | None) -> bool | int:
    """Return how a leaf is shuffled as states have it: False, True (each epoch), or the epochs shuffled as one."""
    return epochs is not None if epochs in (None, 1) else epochs
