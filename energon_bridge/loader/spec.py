"""What a loader delivers: the leaves of a dataset or mix, with everything that their order depends on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import GenericAlias
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from energon_bridge.errors import ConfigurationError, WrongUseError
from energon_bridge.loader.leaves import OpenLeaf, check_types
from energon_bridge.loader.weights import ChangedWeights, LeafWeights, MixWeights
from energon_bridge.loader.workers import FiniteStreams, LaneStreams, Stream, WorkerFacts
from energon_bridge.mix import Mix
from energon_bridge.plan.blend import Blend, ChangedBlend, EpochizedBlend, WeightedBlend
from energon_bridge.plan.leaf import DEFAULT_PARALLEL_SHARD_ITERS, LeafOrder, slice_length
from energon_bridge.plan.scheduled import ScheduledBlend
from energon_bridge.rng import key_of
from energon_bridge.samples.showing import counted, described
from energon_bridge.stores import CachePool, NoCachePool
from energon_bridge.stream.cooking import check_cooker
from energon_bridge.stream.dealt import ENDLESS, Deal, Dealt
from energon_bridge.stream.failure_log import FailureLog
from energon_bridge.stream.finite import DrawnRows, ListedRows, num_microbatches
from energon_bridge.stream.leaf import Leaf
from energon_bridge.stream.passes import FinitePlan, InOrder, Shuffled
from energon_bridge.stream.pipeline import Pipeline
from energon_bridge.stream.policy import ErrorPolicy
from energon_bridge.stream.settings import StreamSettings
from energon_bridge.stream.user_code import HookRunner
from energon_bridge.stream.watchdog import WatchdogSettings
from energon_bridge.topology import WorkerConfig, default_num_lanes

if TYPE_CHECKING:
    from energon_bridge.loader.position import Position

_READ_BYTES = 256 << 20
"""Bytes that the rounds of all lanes of one process may take; beyond it draws are read one microbatch at a time."""
_FAR_READERS = 8
"""Rounds that are read ahead at the same time where answers take long."""
_LEAST_AHEAD = 4
"""Draws of a lane that are read ahead at least where rounds take too much."""
_TOGETHER_BYTES, _TOGETHER = 64 << 20, 1024
"""Bytes and samples up to which a lane reads several rounds of a leaf together."""


DATASET_IS_NO_LOADER = (
    "a dataset of energon_bridge describes what to load and gives no samples by itself. Make a loader of it and "
    "iterate that: `for batch in get_loader(dataset)`. It takes the place of torch.utils.data.DataLoader and starts "
    "the workers itself. For the Trainer of transformers use energon_bridge.integrations.huggingface.EnergonTrainer, "
    "for Lightning EnergonMultiModalDataModule"
)
_KINDS = {"train": "training", "passes": "training, pass by pass", "finite": "validation"}
_MOST_SHOWN = 6
"""Datasets that the text of a mix names."""


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
class DatasetSpec:
    """A dataset as `get_train_dataset` and `get_val_dataset` return it, for `get_loader` and `get_savable_loader`.

    It is a description; nothing is read before a loader is iterated but the metadata of the datasets. `len()` is the
    number of batches of a rank in a pass, or in an epoch of an endless stream: that of its loader. (Of a pass that is
    packed or grouped, which only the loader knows, as if each sample were a row.)

    Args:
        leaves: The opened leaves, in order of the mix.
        mix: How they are combined.
        finite: One pass at a time (validation, or training with `repeat=False`) instead of an endless stream.
        shuffled: Whether a pass of a finite stream has an order of its own (training) or the datasets' (validation).
        virtual_epoch_length: Steps after which an iterator over training data ends; the next one goes on.
        limit: Steps after which a pass over validation data ends.
        cache_pool: Where files that are needed later are kept.
        error_policy: What becomes of samples that fail.
        as_energon: Validate, count microbatches and end passes as megatron-energon does, for programs that were written
            for it: validation in the order of its ranks and workers (`stream.dealt`), numbers of microbatches and
            samples by rank, and no masked rows.
        repeats: With `as_energon`: a pass begins again until its limit, or without an end.

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
    parallel_shard_iters: int = DEFAULT_PARALLEL_SHARD_ITERS
    limit: int | None = None
    shuffled: bool = True
    virtual_epoch_length: int | None = None
    packing_buffer_size: int | None = None
    cache_pool: CachePool = field(default_factory=NoCachePool)
    error_policy: ErrorPolicy = field(default_factory=ErrorPolicy)
    as_energon: bool = False
    repeats: bool = False

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

    def check_types(self) -> None:
        """Refuse a mix of types that cannot be put into microbatches; a loader asks, a forecast need not."""
        if self.rows > 1 and self.packing_buffer_size is None and not self.grouped:
            check_types(self.leaves, self.task_encoder)

    def __iter__(self) -> NoReturn:
        raise WrongUseError(DATASET_IS_NO_LOADER)

    def __getitem__(self, index: Any) -> NoReturn:
        raise WrongUseError(DATASET_IS_NO_LOADER)

    def __len__(self) -> int:
        return self.num_batches(self.worker_config.dp_size)

    def __repr__(self) -> str:
        return described(
            f"{type(self).__name__} for {_KINDS[self.kind]}",
            [
                f"{counted(self.num_samples, 'sample')} of {counted(len(self.leaves), 'dataset')}, "
                f"{counted(len(self), 'batch', 'batches')} of {self._what_batches_have()}",
                *(leaf_line(leaf) for leaf in self.leaves[:_MOST_SHOWN]),
                *([f"and {len(self.leaves) - _MOST_SHOWN:,} more"] if len(self.leaves) > _MOST_SHOWN else []),
            ],
        )

    def _what_batches_have(self) -> str:
        if self.batch_size is None:
            return "one sample"
        return counted(self.batch_size, "sample" if self.packing_buffer_size is None else "pack")

    def num_batches(self, world_size: int, end: int | None = None) -> int:
        """Return the batches of one rank in a pass or virtual epoch, or in an epoch of an endless stream.

        Args:
            world_size: Data-parallel ranks.
            end: The microbatch at which the pass of a finite stream ends, where that is known.
        """
        if self.virtual_epoch_length is not None:
            return self.virtual_epoch_length
        if not self.finite:
            return self.epoch_length(world_size)
        if end is None:
            config = self.worker_config
            dealt = self.dealt(self.units(config), config)
            if dealt is not None:
                return dealt.steps(config.dp_rank)
            end = self.end_of(config.dp_rank, self._rows_of_a_pass, world_size)
        return -(-end // world_size)

    @cached_property
    def _rows_of_a_pass(self) -> int:
        return self.plan(self.units(self.worker_config), 0).num_draws

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

    def dealt(self, units: Units, config: WorkerConfig) -> Dealt | None:
        """Return how megatron-energon deals out a pass over validation data, None where it is not to be as there."""
        if not self.as_energon or self.kind != "finite" or self.listed:
            return None
        deal = Deal(
            ranks=config.dp_size,
            workers=max(1, config.num_workers),
            batch_size=self.rows,
            drop_last=self.batch_drop_last,
            limit=self.limit,
            repeats=self.repeats,
        )
        return Dealt(units.leaves, [leaf.dataset.num_samples for leaf in self.ordered], deal)

    @cached_property
    def grouped(self) -> bool:
        """Whether the encoder batches rows by groups."""
        return HookRunner(self.task_encoder, packs=self.packing_buffer_size is not None).groups

    @property
    def listed(self) -> bool:
        """Whether all ranks agree on the rows of a pass before it begins: where it is packed or grouped."""
        return self.finite and (self.packing_buffer_size is not None or self.grouped)

    def end(self, num_rows: int, world_size: int, num_batches: int | None = None) -> int:
        """Return the microbatch at which a pass ends for every rank: of so many rows, or batches, if it is grouped."""
        end = num_microbatches(num_rows, self.rows, drop_last=self.batch_drop_last)
        end = end if num_batches is None else num_batches
        return end if self.limit is None else min(end, self.limit * world_size)

    def end_of(self, rank: int, num_rows: int, world_size: int, num_batches: int | None = None) -> int:
        """Return the microbatch at which a pass ends for one rank; as drop-in, a rank stops where none is left."""
        if self.repeats:
            return ENDLESS if self.limit is None else self.limit * world_size
        end = self.end(num_rows, world_size, num_batches)
        return max(0, end - rank) if self.as_energon else end

    @cached_property
    def ordered(self) -> tuple[OpenLeaf, ...]:
        """The leaves in the order in which counters are kept: by identity, or, for validation, as given."""
        return self.leaves if self.kind == "finite" else tuple(sorted(self.leaves, key=lambda leaf: leaf.identity))

    def epoch_length(self, world_size: int) -> int:
        """Return the microbatches of one rank in an epoch of an endless stream; at least 1."""
        samples = self.num_samples
        if self.as_energon and self.mode == "repetitions":
            samples = sum(int(leaf.num_samples * leaf.share) for leaf in self.leaves)
        return max(1, samples // (self.rows * world_size))

    def units(
        self,
        config: WorkerConfig,
        num_lanes: int | None = None,
        changes: ChangedWeights = (),
        blocks: Mapping[str, int] | None = None,
    ) -> Units:
        """Cut the mix for a worker configuration.

        Args:
            config: Who loads what.
            num_lanes: Of a state; goes before the configuration's.
            changes: Weights that were changed during the run.
            blocks: `LeafOrder.block` of the leaves of a state by identity: a leaf keeps it when the mix changes.
        """
        lanes = num_lanes or config.num_lanes or self._default_lanes(config)
        if self.finite:  # a pass has no lanes, so any number of ranks may share it
            lanes = max(lanes, config.dp_size)
        seed = config.seed + config.seed_offset
        settings: dict[str, Any] = {"seed": seed, "batch_size": self.batch_size}
        if self.finite:
            settings |= {"batch_drop_last": self.batch_drop_last}
            settings |= {"grouped": True} if self.grouped else {}
            if self.as_energon and self.kind == "finite" and not self.listed:
                settings |= {"dp_size": config.dp_size, "num_workers": max(1, config.num_workers), "limit": self.limit}
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
        settings |= getattr(self.task_encoder, "pixel_settings", {})
        # A pass has one order, whoever delivers it.
        cut = 1 if self.finite else lanes
        block = self.rows if self.mode == "single" else 0
        leaves = tuple(
            self._leaf(leaf, cut, seed, block=(blocks or {}).get(leaf.identity, block)) for leaf in self.ordered
        )
        return Units(
            num_lanes=lanes,
            leaves=leaves,
            blend=self._blend(leaves, cut, seed, changes),
            rows=partial(self._rows, leaves),
            settings=settings,
        )

    @property
    def mode(self) -> str:
        """How the leaves are combined: `single`, `weights`, `repetitions` or `concat`."""
        return self.mix.mode if len(self.leaves) > 1 else "single"

    def _leaf(self, leaf: OpenLeaf, lanes: int, seed: int, *, block: int) -> Leaf:
        shuffle = leaf.shuffle_epochs is not None
        # A pass has one lane, and slices as a run has them.
        cut = default_num_lanes(1) if self.finite else lanes
        order = LeafOrder(
            num_samples=leaf.num_samples,
            num_lanes=lanes,
            key=key_of("leaf", seed, leaf.identity),
            slice_length=slice_length(leaf.num_samples, cut, self.rows, self.max_samples_per_sequence),
            shuffle_buffer_size=self.shuffle_buffer_size,
            parallel_shard_iters=self.parallel_shard_iters,
            block=block if shuffle else self.rows,
            shuffle=shuffle,
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
            rotations=tuple(leaf.order.rotation for leaf in leaves),
            blocks=tuple(leaf.order.dealt_block for leaf in leaves),
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

    def _rows(self, leaves: Sequence[Leaf]) -> list[dict[str, Any]]:
        return [self._row(opened, leaf.order.block) for opened, leaf in zip(self.ordered, leaves, strict=True)]

    def _row(self, leaf: OpenLeaf, block: int) -> dict[str, Any]:
        return {
            "identity": leaf.identity,
            "path": leaf.dataset.path,
            "split_part": leaf.dataset.split_part,
            "num_samples": leaf.num_samples,
            "subset": "" if leaf.num_samples == leaf.dataset.num_samples else f"{leaf.start}:{leaf.stop}",
            "share": str(leaf.share) if self.kind != "finite" and len(self.leaves) > 1 else "",
            "block": block,
        }

    def _default_lanes(self, config: WorkerConfig) -> int:
        if self.finite:
            return config.dp_size
        return default_num_lanes(config.dp_size, config.microbatches_per_global_batch)

    def pipeline(
        self,
        units: Units,
        config: WorkerConfig,
        threads: int | None = None,
        delivered: Collection[int] = (),
        worker: WorkerFacts | None = None,
    ) -> Pipeline:
        """Build what loads, encodes and batches in one process.

        Args:
            units: The mix, cut into lanes.
            config: Who loads what.
            threads: Overrides the configuration's.
            delivered: Leaves of which the run has delivered something.
            worker: What a worker process knows of itself.
        """
        decodes = self.task_encoder.decoder is not None and any(leaf.decodes_media for leaf in self.leaves)
        if threads is None:
            threads = config.threads_per_process(max(1, config.num_workers)) if decodes else 0
            # One thread beside a worker's own would only pass the interpreter lock to and fro.
            threads = 0 if config.num_workers and threads == 1 else threads
        lanes = -(-units.num_lanes // (config.dp_size * max(1, config.num_workers)))
        # About how many bytes a sample of every leaf has, all leaves and lanes together.
        unit = lanes * sum(
            max(1, int(leaf.dataset.shard_sizes.sum()) // leaf.dataset.num_samples) for leaf in self.leaves
        )
        is_far = any(leaf.is_far for leaf in self.leaves)
        settings = StreamSettings(
            batch_size=self.batch_size,
            encoder=self.task_encoder,
            threads=threads,
            reads_rounds=unit * max(self.shuffle_buffer_size, 4 * self.parallel_shard_iters) <= _READ_BYTES,
            read_together=min(_TOGETHER, _TOGETHER_BYTES // unit),
            background_reads=_FAR_READERS if is_far else int(not config.num_workers),
            draws_ahead=min(_TOGETHER, max(_LEAST_AHEAD, _TOGETHER_BYTES // unit)) if is_far else 0,
            restore_generators=not config.num_workers,
            packing_buffer_size=self.packing_buffer_size,
            held_bytes=config.held_bytes,
            lanes=lanes,
            cache=self.cache_pool,
            policy=self.error_policy,
            failure_log=self.failure_log,
            delivered=delivered,
            rank=config.dp_rank,
            ranks=config.dp_size,
            energon_ranks=config.dp_size if self.as_energon else 0,
            energon_workers=max(1, config.num_workers),
            config=config if self.as_energon else None,
            words=() if worker is None else worker.words,
            barred=frozenset() if worker is None else worker.barred,
        )
        return Pipeline(units.leaves, settings)

    @cached_property
    def failure_log(self) -> FailureLog:
        """What names the samples that fail, once in this process."""
        return FailureLog(self.error_policy)

    def stream(
        self,
        config: WorkerConfig,
        position: Position,
        watchdog: WatchdogSettings | None = None,
        worker: WorkerFacts | None = None,
    ) -> Stream:
        """Build what makes the units of one process from a position on: the lanes, or the microbatches of a pass."""
        units = position.units
        threads = 0 if worker is not None and worker.careful else None
        pipeline = self.pipeline(units, config, threads, position.delivered, worker)
        if watchdog is not None and worker is None:
            pipeline.watch(watchdog, f"rank {config.dp_rank}")
        elif watchdog is not None and worker is not None:
            pipeline.watch(watchdog, f"rank {config.dp_rank}, worker {worker.number}", worker.said)
        if not self.finite:
            return LaneStreams(pipeline, units.blend, position.lanes)
        listing = position.listing
        dealt = self.dealt(units, config)
        plan = dealt or self.plan(units, position.epoch)
        rows = DrawnRows(pipeline, plan) if listing is None else ListedRows(pipeline, listing)
        return FiniteStreams(pipeline, rows, drop_last=self.batch_drop_last, dealt=dealt)


def leaf_line(leaf: OpenLeaf) -> str:
    """Name a leaf for people, in one line."""
    dataset = leaf.dataset
    kind = getattr(getattr(dataset, "sample_type", None), "__name__", "joined samples")
    subset = "" if leaf.is_whole else f", samples {leaf.start} to {leaf.stop}"
    shards = counted(leaf.num_shards, "shard")
    part = f" [{dataset.split_part}]" if dataset.split_part else ""
    return f"{dataset.path}{part}{subset}: {counted(leaf.num_samples, kind)} in {shards}"


def _weighted_blend(weights: LeafWeights, start: int, lanes: int, key: int) -> Blend:
    if weights.moves:
        return ScheduledBlend(weights=weights, num_lanes=lanes, key=key, start=start)
    return WeightedBlend(weights=weights, num_lanes=lanes, key=key)


def _shuffle_setting(epochs: int | None) -> bool | int:
    """Return how a leaf is shuffled as states have it: False, True (each epoch), or the epochs shuffled as one."""
    return epochs is not None if epochs in (None, 1) else epochs
