"""The plan of a run: a description cut into lanes for some ranks; every draw is arithmetic. Also `DatasetSpec`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import GenericAlias
from typing import Any, ClassVar, NoReturn

from energon_bridge.errors import WrongUseError
from energon_bridge.loader.description import Description
from energon_bridge.mix.leaves import OpenLeaf
from energon_bridge.plan.bans import LeafBans
from energon_bridge.plan.blend import Blend, ChangedBlend, EpochizedBlend, WeightedBlend
from energon_bridge.plan.leaf import LeafOrder, slice_length
from energon_bridge.plan.scheduled import ScheduledBlend
from energon_bridge.plan.weights import ChangedWeights, LeafWeights
from energon_bridge.rng import key_of
from energon_bridge.rows.dataset import TableDataset
from energon_bridge.samples.showing import counted, described
from energon_bridge.stream.dealt import Deal, Dealt
from energon_bridge.stream.finite import FinitePlan, InOrder, Shuffled
from energon_bridge.stream.leaf import Leaf
from energon_bridge.topology import RankFacts, WorkerConfig, default_num_lanes

_FEWEST_GROUPS = 4
"""Row groups of a parquet file per lane and epoch, at least, for slices as long as a row group."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A description cut into lanes (finite passes have one lane), and the ranks that it is for.

    `table` describes the leaves, in order, for people and for the state; `rows` makes it on first use. `settings` has
    everything else that the order depends on.
    """

    data: Description
    facts: RankFacts
    num_lanes: int
    leaves: tuple[Leaf, ...]
    blend: Blend | None
    rows: Callable[[], list[dict[str, Any]]]
    settings: dict[str, Any]

    @cached_property
    def table(self) -> list[dict[str, Any]]:
        return self.rows()

    def draws_of_pass(self, epoch: int) -> FinitePlan:
        """Return the plan of pass number `epoch` of a finite stream: which samples its draws are."""
        if not self.data.shuffled:
            return InOrder(self.leaves)
        assert self.blend is None or isinstance(self.blend, EpochizedBlend)
        return Shuffled(self.leaves, self.blend, epoch)

    @property
    def dealt(self) -> Dealt | None:
        """How megatron-energon divides a validation pass; None unless its order is requested."""
        data = self.data
        if not data.as_energon or data.kind != "finite" or data.listed:
            return None
        deal = Deal(
            ranks=self.facts.world_size,
            workers=self.facts.processes,
            batch_size=data.rows,
            drop_last=data.batch_drop_last,
            limit=data.limit,
            repeats=data.repeats,
        )
        return Dealt(self.leaves, [leaf.dataset.num_samples for leaf in data.ordered], deal)


def plan_run(
    data: Description,
    facts: RankFacts,
    num_lanes: int | None = None,
    changes: ChangedWeights = (),
    blocks: Mapping[str, int] | None = None,
) -> RunPlan:
    """Return the plan of a run on some ranks.

    Args:
        data: The leaves and settings.
        facts: The ranks and their workers (`WorkerConfig.facts`).
        num_lanes: The number of lanes in a state; it overrides the configured one.
        changes: Changes of weights during the run.
        blocks: `LeafOrder.block` of a state's leaves by identity: a leaf keeps its block when the mix changes.
    """
    ranks, seed = facts.world_size, facts.seed
    lanes = num_lanes or facts.num_lanes
    if data.finite:  # a pass has no lanes, so any number of ranks can share it
        lanes = max(lanes or ranks, ranks)
    lanes = lanes or default_num_lanes(ranks, facts.microbatches_per_global_batch)
    settings: dict[str, Any] = {"seed": seed, "batch_size": data.batch_size}
    if data.finite:
        settings |= {"batch_drop_last": data.batch_drop_last}
        settings |= {"grouped": True} if data.grouped else {}
        if data.as_energon and data.kind == "finite" and not data.listed:
            settings |= {"dp_size": ranks, "num_workers": facts.processes, "limit": data.limit}
    if data.packing_buffer_size is not None:
        settings |= {"packing_buffer_size": data.packing_buffer_size}
    if data.max_tokens_per_microbatch is not None:
        settings |= {"max_tokens_per_microbatch": data.max_tokens_per_microbatch}
    if data.kind != "finite":
        shuffle = [_shuffle_setting(leaf.shuffle_epochs) for leaf in data.ordered]
        settings |= {
            "max_samples_per_sequence": data.max_samples_per_sequence,
            "shuffle_buffer_size": data.shuffle_buffer_size,
            "parallel_shard_iters": data.parallel_shard_iters,
            "shuffle": shuffle[0] if len(set(shuffle)) == 1 else shuffle,
            "mode": data.mode,
        }
        if data.mode == "weights" and data.mix.is_scheduled:
            settings["schedule"] = data.weights.fingerprint()
    target = getattr(data.task_encoder.decoder, "image_target", None)
    if target is not None:  # this changes pixels, not the order, and nobody would see it
        settings["image_target"] = list(target)
    if getattr(data.task_encoder.decoder, "image_backend", "auto") != "auto":
        settings["image_backend"] = data.task_encoder.decoder.image_backend
    settings |= getattr(data.task_encoder, "pixel_settings", {})
    # A pass has the same order whoever delivers it.
    cut = 1 if data.finite else lanes
    block = data.rows if data.mode == "single" else 0
    leaves = tuple(
        _leaf(data, leaf, cut, seed, block=(blocks or {}).get(leaf.identity, block)) for leaf in data.ordered
    )
    return RunPlan(
        data=data,
        facts=facts,
        num_lanes=lanes,
        leaves=leaves,
        blend=_blend(data, leaves, cut, seed, changes),
        rows=partial(_rows, data, leaves),
        settings=settings,
    )


def without_banned(plan: RunPlan, bans: Mapping[str, LeafBans]) -> RunPlan:
    """Return the plan with exactly these bans, given by identity."""
    leaves = tuple(replace(leaf, bans=bans.get(leaf.identity)) for leaf in plan.leaves)
    return replace(plan, leaves=leaves)


def _leaf(data: Description, leaf: OpenLeaf, lanes: int, seed: int, *, block: int) -> Leaf:
    shuffle = leaf.shuffle_epochs is not None
    # A pass has one lane, but slices as long as a run's.
    cut = default_num_lanes(1) if data.finite else lanes
    length = slice_length(leaf.num_samples, cut, data.rows, data.max_samples_per_sequence)
    iters = data.parallel_shard_iters
    group = leaf.dataset.group_rows if isinstance(leaf.dataset, TableDataset) else 0
    if length < group and leaf.num_samples >= _FEWEST_GROUPS * group * cut:
        length, iters = group, 1  # a group is read as a whole, and few at a time
    order = LeafOrder(
        num_samples=leaf.num_samples,
        num_lanes=lanes,
        key=key_of("leaf", seed, leaf.identity),
        slice_length=length,
        shuffle_buffer_size=data.shuffle_buffer_size,
        parallel_shard_iters=iters,
        block=block if shuffle else data.rows,
        shuffle=shuffle,
        first_sample=leaf.start,
        kept=leaf.kept,
        epochs_per_shuffle=leaf.shuffle_epochs or 1,
    )
    return Leaf(identity=leaf.identity, dataset=leaf.dataset, order=order, aux=leaf.aux)


def _blend(data: Description, leaves: Sequence[Leaf], lanes: int, seed: int, changes: ChangedWeights) -> Blend | None:
    if data.kind == "finite" or data.mode == "single":
        return None
    if data.mode == "weights":
        parts: list[tuple[int, LeafWeights]] = [(0, data.weights), *changes]
        blends = tuple((start, _weighted_blend(weights, start, lanes, key_of("run", seed))) for start, weights in parts)
        return ChangedBlend(parts=blends, num_lanes=lanes) if changes else blends[0][1]
    rank = {leaf.identity: number for number, leaf in enumerate(data.ordered)}
    sequence = tuple(rank[leaf.identity] for leaf in data.leaves) if data.mode == "concat" else None
    return EpochizedBlend(
        samples=tuple(leaf.num_samples for leaf in data.ordered),
        repetitions=tuple(leaf.share for leaf in data.ordered),
        num_lanes=lanes,
        key=key_of("run", seed),
        rotations=tuple(leaf.order.rotation for leaf in leaves),
        blocks=tuple(leaf.order.dealt_block for leaf in leaves),
        sequence=sequence,
    )


def _rows(data: Description, leaves: Sequence[Leaf]) -> list[dict[str, Any]]:
    return [_row(data, opened, leaf.order.block) for opened, leaf in zip(data.ordered, leaves, strict=True)]


def _row(data: Description, leaf: OpenLeaf, block: int) -> dict[str, Any]:
    return {
        "identity": leaf.identity,
        "path": leaf.dataset.path,
        "split_part": leaf.dataset.split_part,
        "num_samples": leaf.num_samples,
        "subset": leaf.part,
        "share": str(leaf.share) if data.kind != "finite" and len(data.leaves) > 1 else "",
        "block": block,
    }


def _weighted_blend(weights: LeafWeights, start: int, lanes: int, key: int) -> Blend:
    if weights.moves:
        return ScheduledBlend(weights=weights, num_lanes=lanes, key=key, start=start)
    return WeightedBlend(weights=weights, num_lanes=lanes, key=key)


def _shuffle_setting(epochs: int | None) -> bool | int:
    """Return how a leaf is shuffled, as states have it: False, True (each epoch), or the epochs shuffled as one."""
    return epochs is not None if epochs in (None, 1) else epochs


# ---------------------------------------------------------------------------------------------------------------------
# The dataset object that users get: the description, its length, and its text.


DATASET_IS_NO_LOADER = (
    "a dataset of energon_bridge describes what to load and gives no samples by itself. Make a loader of it and "
    "iterate that: `for batch in get_loader(dataset)`. It takes the place of torch.utils.data.DataLoader and starts "
    "the workers itself. For the Trainer of transformers use energon_bridge.integrations.huggingface.EnergonTrainer, "
    "for Lightning EnergonMultiModalDataModule"
)
_KINDS = {"train": "training", "passes": "training, pass by pass", "finite": "validation"}
_MOST_SHOWN = 6
"""Datasets named in the text of a mix."""


@dataclass(frozen=True, kw_only=True)
class DatasetSpec(Description):
    """What `get_train_dataset` and `get_val_dataset` return, for `get_loader` and `get_savable_loader`.

    It is a description: before a loader is iterated, only the metadata of the datasets is read. `len()` is the number
    of batches of a rank in a pass, or in an epoch of an endless stream, as for its loader. (Only the loader knows the
    number for a packed or grouped pass; here each sample counts as a row.)
    """

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # annotations of energon users give it type arguments

    worker_config: WorkerConfig

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
        if self.max_tokens_per_microbatch is not None:
            return f"up to {counted(self.max_tokens_per_microbatch, 'token')}"
        if self.batch_size is None:
            return "one sample"
        return counted(self.batch_size, "sample" if self.packing_buffer_size is None else "pack")

    def num_batches(self, world_size: int, end: int | None = None) -> int:
        """Return the batches of one rank in a pass or virtual epoch, or in an epoch of an endless stream.

        Args:
            world_size: Data-parallel ranks.
            end: The microbatch at which the pass of a finite stream ends, if known.
        """
        if self.virtual_epoch_length is not None:
            return self.virtual_epoch_length
        if not self.finite:
            return self.epoch_length(world_size)
        if end is None:
            rank, dealt = self.worker_config.dp_rank, self._plan.dealt
            if dealt is not None:
                return dealt.steps(rank)
            end = self.end_of(rank, self._rows_of_a_pass, world_size)
        return -(-end // world_size)

    @property
    def _plan(self) -> RunPlan:
        return plan_run(self, self.worker_config.facts)

    @cached_property
    def _rows_of_a_pass(self) -> int:
        return self._plan.draws_of_pass(0).num_draws


def leaf_line(leaf: OpenLeaf) -> str:
    """Describe a leaf in one line."""
    dataset = leaf.dataset
    kind = getattr(getattr(dataset, "sample_type", None), "__name__", "joined samples")
    subset = "" if leaf.is_whole else f", samples {leaf.part.replace(':', ' to ', 1)}"
    shards = counted(leaf.num_shards, "shard")
    part = f" [{dataset.split_part}]" if dataset.split_part else ""
    return f"{dataset.path}{part}{subset}: {counted(leaf.num_samples, kind)} in {shards}"
