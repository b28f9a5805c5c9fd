"""The plan of a run: its data cut into lanes for some ranks, so that every draw is arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from typing import Any, cast

import numpy as np

from energon_bridge.core.encoder.task_encoder import decoder_of
from energon_bridge.core.format.foreign import ForeignDataset
from energon_bridge.core.loader.ranks import first_told
from energon_bridge.core.loader.run_data import RunData, epochs_by_leaf
from energon_bridge.core.mix.leaves import OpenLeaf
from energon_bridge.core.mix.weights import ChangedWeights
from energon_bridge.core.order.blend import EpochizedBlend, InTurns, WeightedBlend
from energon_bridge.core.order.changes import LeafBans, LeafWeights
from energon_bridge.core.order.choose import AnyBlend, BlendOfBuckets, PassDraws
from energon_bridge.core.order.leaf_order import LeafOrder, slice_length
from energon_bridge.core.order.rng import key_of
from energon_bridge.core.order.topology import default_num_lanes
from energon_bridge.core.registry import load
from energon_bridge.core.stream.conventions import PassOrder
from energon_bridge.core.stream.finite import Listing
from energon_bridge.core.stream.leaf import Leaf
from energon_bridge.core.stream.pack_buffer import LEAST_SHARE
from energon_bridge.core.worker_config import WorkerConfig, distributed

_FEWEST_GROUPS = 4
"""Row groups of a parquet file per lane and epoch, at least, for slices as long as a row group."""


PACKING_BUFFERS = "packing_buffers"
"""The number of packing buffers of a run: of small data there are fewer than lanes (`stream/dealt_packs.py`)."""
PACK_LIMITS = "pack_limits"
"""What the packs of the encoder's `Packer` hold at most, as a text."""
ORDER_SETTINGS = frozenset(
    (
        *("seed", "batch_size", "batch_drop_last", "grouped", "packing_buffer_size", PACKING_BUFFERS),
        *("max_tokens_per_microbatch", "max_samples_per_sequence", "shuffle_buffer_size", "parallel_shard_iters"),
        *("shuffle", "mode", "buckets", "bucket_batch_size", "schedule", "unit", "unit_values"),
        *("first_packs", PACK_LIMITS),
    )
)
"""What `plan_run` records of the order; the other settings of states say what samples become (pixels, the day)."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A dataset cut into lanes (finite passes have one lane), and the ranks that it is for.

    `recorded` has everything that the order depends on besides the leaves, as states have it; `changes` are those of
    weights during the run; `day` is the one that the task encoder writes into texts (`RunDay` of its templates), or
    None.
    """

    data: RunData
    config: WorkerConfig
    num_lanes: int
    leaves: tuple[Leaf, ...]
    blend: AnyBlend | None
    changes: ChangedWeights
    recorded: dict[str, Any]
    day: Any

    @property
    def settings(self) -> dict[str, Any]:
        """What states record: all that the order depends on, and the day that samples were encoded on."""
        return self.recorded | ({} if self.day is None else {"today": self.day.today.isoformat()})

    @cached_property
    def table(self) -> list[dict[str, Any]]:
        """The leaves, in order, for the state."""
        return [row | {"mark": mark} for row, mark in zip(self.rows, self.data.marks, strict=True)]

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The leaves, in order, as plain values: all that `table` has but the marks of content, which take reads."""
        shared = self.data.kind != "finite" and len(self.leaves) > 1
        return [
            {
                "identity": leaf.identity,
                "path": leaf.dataset.path,
                "split_part": leaf.dataset.split_part,
                "num_samples": leaf.order.num_samples,
                "subset": opened.part,
                "share": str(opened.weight) if shared else "",
                "block": leaf.order.block,
            }
            for opened, leaf in zip(self.data.ordered, self.leaves, strict=True)
        ]

    @property
    def packs_by_epoch(self) -> bool:
        """Whether packing buffers end with epochs; runs that 0.1.0 began go on without."""
        return PACKING_BUFFERS in self.recorded

    @property
    def streams(self) -> int:
        """How many streams of draws the run has: one for each lane or, where lanes share them, each packing buffer."""
        return self.leaves[0].order.num_lanes

    def global_draw(self, lane: int, draw: int) -> int:
        """Return the number of a lane's draw among those of the run."""
        return draw * self.streams + lane % self.streams

    @property
    def banned(self) -> dict[str, LeafBans]:
        """The banned samples of each leaf that has any, by identity."""
        return {leaf.identity: leaf.bans for leaf in self.leaves if leaf.bans is not None}

    def with_banned(self, banned: Mapping[str, LeafBans]) -> RunPlan:
        """Return the plan with exactly these bans, given by identity."""
        if not banned and not self.banned:
            return self
        leaves = tuple(replace(leaf, bans=banned.get(leaf.identity)) for leaf in self.leaves)
        blend = self.blend
        if blend is None or self.data.buckets is not None:
            leaves = tuple(replace(leaf, order=leaf.order.without(leaf.bans)) for leaf in leaves)
        if self.data.buckets is not None:
            gone = frozenset(number for number, leaf in enumerate(leaves) if leaf.all_banned)
            blend = cast(BlendOfBuckets, blend).without(gone)
        return replace(self, leaves=leaves, blend=blend)

    def without_group(self) -> RunPlan:
        """Return the plan for a worker process, which cannot reach the other ranks."""
        return replace(self, config=replace(self.config, data_parallel_group=None))

    def recut(
        self,
        num_lanes: int,
        changes: ChangedWeights,
        blocks: Mapping[str, int] | None = None,
        buffers: int | None = None,
    ) -> RunPlan:
        """Return the plan for other lanes, weights, blocks and buffers (None: the same); settings and bans stay."""
        own = {leaf.identity: leaf.order.block for leaf in self.leaves if leaf.order.shuffle}
        blocks = own if blocks is None else blocks
        other = self.data.block if own.keys() - blocks.keys() else 0
        given = {identity: blocks.get(identity, other) for identity in own}
        had = self.recorded.get(PACKING_BUFFERS, 0)
        buffers = had if buffers is None else buffers
        if (num_lanes, changes, given, buffers) == (self.num_lanes, self.changes, own, had):
            return self
        plan = plan_run(self.data, self.config, num_lanes, changes, blocks, buffers)
        recorded = {name: value for name, value in self.recorded.items() if name != PACKING_BUFFERS}
        recorded |= {name: value for name, value in plan.recorded.items() if name == PACKING_BUFFERS}
        return replace(plan, recorded=recorded).with_banned(self.banned)

    def draws_of_pass(self, epoch: int) -> PassDraws:
        """Return pass number `epoch` of a finite stream: which samples its draws are.

        Validation begins each pass anew; training that ends goes on in its one lane.
        """
        blend = self.blend
        if isinstance(blend, EpochizedBlend):
            first, end = (int(blend.drawn(0, number).sum()) for number in (epoch, epoch + 1))
        else:
            samples = sum(self.data.epoch_samples)  # if they are a fraction, passes differ
            passes = (epoch, epoch + 1) if self.data.shuffled else (0, 1)
            first, end = (int(samples * number) for number in passes)
        return PassDraws(leaves=self.leaves, blend=blend, first=first, num_draws=end - first)

    @cached_property
    def order_of_pass(self) -> PassOrder | None:
        """The order of a validation pass by the conventions of another loader; None: ours."""
        data = self.data
        run = self.data.settings
        if data.kind != "finite" or data.listed:
            return None
        return run.conventions.order_of_pass(
            self.leaves,
            ranks=self.config.dp_size,
            workers=self.config.processes,
            rows=data.rows,
            drop_last=run.batch_drop_last,
            limit=run.limit,
        )

    def end_of_pass(self, epoch: int, listing: Listing | None = None) -> int:
        """Return the microbatch at which a pass ends for this rank; without a listing, each sample counts as a row."""
        data = self.data
        config = self.config
        order = self.order_of_pass
        if order is not None:
            return order.steps(config.dp_rank) * config.dp_size
        rows = self.draws_of_pass(epoch).num_draws if listing is None else len(listing.rows)
        batches = None if listing is None or listing.ends is None else len(listing.ends)
        end = data.end(rows, config.dp_size, batches)
        limit = data.settings.limit
        return data.settings.conventions.end(end, rank=config.dp_rank, ranks=config.dp_size, limit=limit)


def plan_run(
    data: RunData,
    config: WorkerConfig,
    num_lanes: int | None = None,
    changes: ChangedWeights = (),
    blocks: Mapping[str, int] | None = None,
    buffers: int | None = None,
) -> RunPlan:
    """Return the plan of a run on some ranks.

    Args:
        num_lanes: The number of lanes in a state; it overrides the configured one.
        changes: Changes of weights during the run.
        blocks: `LeafOrder.block` of a state's leaves by identity: a leaf keeps its block when the mix changes.
        buffers: The packing buffers of a state; 0: each lane has its own, by the rules of 0.1.0.
    """
    ranks = config.dp_size
    seed = config.run_seed
    lanes = num_lanes or config.num_lanes
    if data.ends:  # a pass has no lanes, so any number of ranks can share it
        lanes = max(lanes or ranks, ranks)
    if data.buckets is not None:
        lanes = data.buckets.num_lanes(lanes, ranks=ranks, group=config.microbatches_per_global_batch)
    lanes = lanes or default_num_lanes(ranks, config.microbatches_per_global_batch)
    settings: dict[str, Any] = {"seed": seed, "batch_size": data.settings.batch_size}
    if data.ends:
        settings |= {"batch_drop_last": data.settings.batch_drop_last}
        settings |= {"grouped": True} if data.grouped else {}
        if data.kind == "finite" and not data.listed:
            limit = data.settings.limit
            settings |= data.settings.conventions.recorded(ranks=ranks, workers=config.processes, limit=limit)
    if data.settings.packing_buffer_size is not None:
        settings |= {"packing_buffer_size": data.settings.packing_buffer_size}
        settings |= {"first_packs": data.settings.conventions.first_packs}
        if not data.ends:
            buffers = packing_buffers(data, lanes) if buffers is None else buffers
            settings |= {PACKING_BUFFERS: buffers} if buffers else {}
            limits = getattr(getattr(data.settings.task_encoder, "packer", None), "limits", None)
            settings |= {PACK_LIMITS: ", ".join(f"{limits[name]} {name}" for name in sorted(limits))} if limits else {}
    if data.settings.max_tokens_per_microbatch is not None:
        settings |= {"max_tokens_per_microbatch": data.settings.max_tokens_per_microbatch}
    if data.kind != "finite":
        shuffle = [_shuffle_setting(leaf.shuffle_epochs) for leaf in data.ordered]
        settings |= {
            "max_samples_per_sequence": data.settings.max_samples_per_sequence,
            "shuffle_buffer_size": data.settings.shuffle_buffer_size,
            "parallel_shard_iters": data.settings.parallel_shard_iters,
            "shuffle": shuffle[0] if len(set(shuffle)) == 1 else shuffle,
            "mode": data.mode,
        }
        if data.buckets is not None:
            settings |= {"buckets": data.buckets.recorded()}
            if (takes := data.buckets.recorded_takes(data.ordered)) is not None:
                settings |= {"bucket_batch_size": takes}
        if data.mode == "weights" and data.mix.is_scheduled:
            settings["schedule"] = data.weights.fingerprint()
        if data.unit is not None:
            amounts = [leaf.amounts.fingerprint for leaf in data.ordered if leaf.amounts is not None]
            settings |= {"unit": data.unit, "unit_values": f"{key_of(*amounts):016x}"}
    decoder = decoder_of(data.settings.task_encoder)  # what changes pixels, not the order, and nobody would see
    if (target := getattr(decoder, "image_target", None)) is not None:
        settings["image_target"] = list(target)
    if (backend := getattr(decoder, "image_backend", "auto")) != "auto":
        settings["image_backend"] = backend
    if getattr(decoder, "autorotate", False):
        settings["autorotate"] = True
    settings |= getattr(data.settings.task_encoder, "pixel_settings", {})
    day = getattr(data.settings.task_encoder, "run_day", None)
    _agree_on_day(day)
    # A pass has the same order whoever delivers it.
    cut = 1 if data.ends else settings.get(PACKING_BUFFERS, lanes)
    leaves = tuple(
        _leaf(data, leaf, cut, seed, block=(blocks or {}).get(leaf.identity, data.block)) for leaf in data.ordered
    )
    return RunPlan(
        data=data,
        config=config,
        num_lanes=lanes,
        leaves=leaves,
        blend=_blend(data, leaves, cut, seed, changes),
        changes=changes,
        recorded=settings,
        day=day,
    )


def _agree_on_day(day: Any) -> None:
    """Give all ranks of a new run the day of the first one that asks: at midnight, their clocks differ."""
    if day is None or day.settled or distributed() is None:
        return
    day.settle(date.fromisoformat(first_told("today", day.today.isoformat())))


IN_BUFFERS = 8
"""A mix has at most an eighth of an epoch of each dataset in all buffers, if few enough lanes share each."""
_SHARED_IN_MIXES = 768
"""Lanes times those that share a buffer in a mix, at most: each process of theirs encodes all of it, and many lanes are
for many processes. 48 lanes share by 16 at most, 192 by 4."""


def packing_buffers(data: RunData, lanes: int) -> int:
    """Return the packing buffers of an endless run: as many as lanes, or the largest divisor of it that is few enough.

    A run of one dataset has a buffer for each full one in an epoch, since buffers end with epochs, and for 64 samples.
    In a mix, all buffers together have at most an eighth of an epoch of each dataset, unless too many lanes would
    have to share one; a mix that is eight times as large as all buffers of its lanes keeps these: sharing costs work.
    With buckets, each lane has a buffer of its own in each bucket.
    """
    if data.buckets is not None:
        return lanes
    size = data.settings.packing_buffer_size or 1
    alone = data.mode == "single" and data.ordered[0].shuffle_epochs in (None, 1)
    if len(data.ordered) > 1 and data.num_samples >= IN_BUFFERS * lanes * size:
        return lanes
    share = max(size, LEAST_SHARE) if alone else IN_BUFFERS * size
    most = int(min(epoch for epoch, _ in epochs_by_leaf(data)) / share)
    divisors = [divisor for divisor in range(1, lanes + 1) if lanes % divisor == 0]
    least = (
        1
        if len(data.ordered) == 1
        else min(one for one in divisors if one * max(1, _SHARED_IN_MIXES // lanes) >= lanes)
    )
    return max(least, *(divisor for divisor in divisors if divisor <= max(1, most)))


def _leaf(data: RunData, leaf: OpenLeaf, lanes: int, seed: int, *, block: int) -> Leaf:
    shuffle = leaf.shuffle_epochs is not None
    # A pass has one lane, but slices as long as a run's.
    cut = default_num_lanes(1) if data.ends else lanes
    rows = data.rows if data.buckets is None else data.buckets.rows_of(leaf)
    block = rows if block and data.buckets is not None else block
    length = slice_length(leaf.num_samples, cut, rows, data.settings.max_samples_per_sequence)
    iters = data.settings.parallel_shard_iters
    group = leaf.dataset.group_rows if isinstance(leaf.dataset, ForeignDataset) else 0
    if length < group and leaf.num_samples >= _FEWEST_GROUPS * group * cut:
        length, iters = group, 1  # a group is read as a whole, and few at a time
    order = LeafOrder(
        num_samples=leaf.num_samples,
        num_lanes=lanes,
        key=key_of("leaf", seed, leaf.identity),
        slice_length=length,
        shuffle_buffer_size=data.settings.shuffle_buffer_size,
        parallel_shard_iters=iters,
        block=block if shuffle else rows,
        shuffle=shuffle,
        first_sample=leaf.start,
        kept=leaf.kept,
        epochs_per_shuffle=leaf.shuffle_epochs or 1,
    )
    return Leaf(identity=leaf.identity, dataset=leaf.dataset, order=order, aux=leaf.aux, amounts=leaf.amounts)


def _blend(data: RunData, leaves: Sequence[Leaf], lanes: int, seed: int, changes: ChangedWeights) -> AnyBlend | None:
    if data.buckets is not None:
        of_buckets: BlendOfBuckets = data.buckets.blend(data.ordered, lanes, key_of("run", seed))
        return of_buckets
    if len(leaves) == 1 and (data.kind == "finite" or data.mode == "single"):
        return None
    if data.kind == "finite":
        return InTurns(sizes=np.array([[leaf.num_samples for leaf in data.ordered]], dtype=np.int64))
    if data.mode == "weights":
        parts: list[tuple[int, LeafWeights]] = [(0, data.weights), *changes]
        kind: Any = WeightedBlend if data.unit is None else load("columns", "amounts").AmountBlend
        blend: AnyBlend = kind(parts=tuple(parts), num_lanes=lanes, key=key_of("run", seed))
        return blend
    rank = {leaf.identity: number for number, leaf in enumerate(data.ordered)}
    sequence = tuple(rank[leaf.identity] for leaf in data.leaves) if data.mode == "concat" else None
    return EpochizedBlend(
        samples=tuple(leaf.num_samples for leaf in data.ordered),
        repetitions=tuple(leaf.weight for leaf in data.ordered),
        num_lanes=lanes,
        key=key_of("run", seed),
        rotations=tuple(leaf.order.rotation for leaf in leaves),
        blocks=tuple(leaf.order.dealt_block for leaf in leaves),
        sequence=sequence,
    )


def _shuffle_setting(epochs: int | None) -> bool | int:
    """Return how a leaf is shuffled, as states have it: False, True (each epoch), or the epochs shuffled as one."""
    return epochs is not None if epochs in (None, 1) else epochs
