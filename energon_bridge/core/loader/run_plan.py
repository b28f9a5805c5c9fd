"""What a run loads: the dataset that users hold (leaves and settings, checked; nothing is open), and its plan.

The plan is the dataset cut into lanes for some ranks, so that every draw is arithmetic.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from fractions import Fraction
from functools import cached_property
from types import GenericAlias
from typing import Any, ClassVar, NoReturn, Self, cast

import numpy as np

from energon_bridge.core.encoder.base import decoder_of
from energon_bridge.core.encoder.collate import REMEDY_FOR_TYPES
from energon_bridge.core.encoder.hooks import Hook, is_overridden
from energon_bridge.core.errors import ConfigurationError, WrongUseError
from energon_bridge.core.format.dataset import PreparedDataset
from energon_bridge.core.format.foreign import ForeignDataset
from energon_bridge.core.format.join import JoinedDataset
from energon_bridge.core.format.jsonl import JsonlDataset
from energon_bridge.core.format.marks import marks_of
from energon_bridge.core.format.media import IMAGE_EXTENSIONS
from energon_bridge.core.mix import Mix
from energon_bridge.core.mix.leaves import OpenLeaf
from energon_bridge.core.mix.weights import ChangedWeights, MixWeights
from energon_bridge.core.order.blend import EpochizedBlend, InTurns, WeightedBlend
from energon_bridge.core.order.changes import LeafBans, LeafWeights
from energon_bridge.core.order.choose import AnyBlend, BlendOfBuckets, PassDraws
from energon_bridge.core.order.leaf import LeafOrder, slice_length
from energon_bridge.core.order.rng import key_of
from energon_bridge.core.order.topology import default_num_lanes
from energon_bridge.core.registry import load
from energon_bridge.core.samples import CrudeSample, field_names
from energon_bridge.core.samples.showing import counted, described
from energon_bridge.core.stream.conventions import PassOrder
from energon_bridge.core.stream.failures import FailureLog
from energon_bridge.core.stream.finite import Listing, num_microbatches
from energon_bridge.core.stream.leaf import Leaf, check_cooker, cooker_of
from energon_bridge.core.stream.pipeline import Pipeline
from energon_bridge.core.stream.settings import RunSettings, StreamKind, StreamSettings, WorkerFacts
from energon_bridge.core.stream.user_code import OwnHooks
from energon_bridge.core.stream.watchdog import WatchdogSettings
from energon_bridge.core.worker_config import WorkerConfig, distributed

DATASET_IS_NO_LOADER = (
    "a dataset of energon_bridge describes what to load and gives no samples by itself. Make a loader of it and "
    "iterate that: `for batch in get_loader(dataset)`. It takes the place of torch.utils.data.DataLoader and starts "
    "the workers itself. For the Trainer of transformers use energon_bridge.trainers.huggingface.EnergonTrainer, "
    "for Lightning EnergonMultiModalDataModule"
)
_KINDS = {"train": "training", "passes": "training, pass by pass", "finite": "validation"}
_MOST_SHOWN = 6
"""Datasets named in the text of a mix."""


class NotForDataLoader:
    """What `torch.utils.data.DataLoader` is refused, with what to do instead, when it is made around it.

    All that a DataLoader asks of a dataset when it is made is its class, by `isinstance`.
    """

    _refusal: ClassVar[str] = DATASET_IS_NO_LOADER

    @property  # type: ignore[misc]
    def __class__(self) -> type[Self]:
        frame = sys._getframe(1)
        for _ in range(3):  # `isinstance` may be that of a metaclass in Python
            code = frame.f_code
            if code.co_qualname == "DataLoader.__init__" and frame.f_locals.get("dataset") is self:
                raise WrongUseError(self._refusal)
            frame = frame.f_back or frame
        return type(self)

    def __getitem__(self, index: Any) -> NoReturn:
        raise WrongUseError(self._refusal)


@dataclass(frozen=True, kw_only=True)
class DatasetSpec(NotForDataLoader):
    """What `get_train_dataset` and `get_val_dataset` return, for `get_loader` and `get_savable_loader`.

    It is a description: before a loader is iterated, only the metadata of the datasets is read. `len()` is the number
    of batches of a rank in a pass, or in an epoch of an endless stream, as for its loader. (If samples are packed or
    grouped, each counts as a row; only the loader of a pass knows the number.)

    Args:
        leaves: The datasets, in the order of the mix.
        mix: How they are combined.
        settings: How they are ordered and made into microbatches.
        worker_config: Who loads what, unless a loader is given another.
        buckets: The buckets of its leaves, if microbatches come from buckets (`tools/columns/buckets.py`).
    """

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # annotations of energon users give it type arguments

    leaves: tuple[OpenLeaf, ...]
    mix: Mix
    settings: RunSettings
    worker_config: WorkerConfig
    buckets: Any = None

    def __post_init__(self) -> None:
        if self.grouped and self.buckets is not None:  # asking raises if hooks exclude each other
            raise ConfigurationError("group_by and batch_group_criterion both choose the samples of a microbatch")
        for leaf in self.leaves:
            check_cooker(self.settings.task_encoder, leaf.dataset, leaf.aux)
        if self.kind != "passes":
            return
        if self.mix.mode == "weights" and len(self.leaves) > 1:
            raise ConfigurationError(
                "repeat=False: a blend by weights never ends; use `blend_epochized` with repetitions, `concat`, or a "
                "single dataset"
            )
        for leaf in self.leaves:
            if leaf.shuffle_epochs not in (None, 1):
                raise ConfigurationError(
                    f"repeat=False: {leaf.dataset.path} is shuffled over {leaf.shuffle_epochs} epochs, so one pass "
                    "would not contain every sample; set shuffle_over_epochs_multiplier to 1 or None"
                )

    @cached_property
    def marks(self) -> list[str]:
        """What tells other content of the same names, counts and sizes, of each leaf (`format/marks.py`)."""
        return marks_of([leaf.dataset for leaf in self.ordered])

    def check_types(self) -> None:
        """Raise if the leaves' sample types cannot share microbatches; loaders check this, forecasts need not."""
        together = self.rows > 1 and self.settings.packing_buffer_size is None and not self.grouped
        if together or self.settings.max_tokens_per_microbatch is not None:
            _check_types(self.leaves, self.settings.task_encoder)

    def with_settings(self, **changes: Any) -> Self:
        """Return the same data with other settings."""
        return replace(self, settings=replace(self.settings, **changes))

    @property
    def kind(self) -> StreamKind:
        """The kind of its states: `train` (endless), `passes` (training that ends) or `finite` (validation)."""
        return self.settings.kind

    @property
    def ends(self) -> bool:
        """Whether it comes one pass at a time (validation, or training with `repeat=False`)."""
        return self.settings.kind != "train"

    @property
    def shuffled(self) -> bool:
        """Whether it is training data; validation comes in the order of the datasets."""
        return self.settings.kind != "finite"

    @property
    def rows(self) -> int:
        """Samples in a full microbatch."""
        return self.settings.rows

    @property
    def block(self) -> int:
        """Draws in which the lanes take turns on a leaf, if no state says otherwise (`LeafOrder.block`)."""
        return self.rows if self.mode == "single" else 0

    @property
    def num_samples(self) -> int:
        """Samples of all leaves, each counted once."""
        return sum(leaf.num_samples for leaf in self.leaves)

    @cached_property
    def epoch_samples(self) -> tuple[Fraction, ...]:
        """Samples of each leaf in an epoch of the data, in the order of the counters: as often as repetitions say.

        If they are fractions, epochs differ, and this is the mean. Validation has each sample once.
        """
        repeats = self.mix.mode == "repetitions" and self.kind != "finite"
        return tuple(leaf.num_samples * (leaf.share if repeats else Fraction(1)) for leaf in self.ordered)

    @cached_property
    def grouped(self) -> bool:
        """Whether the encoder batches rows by groups."""
        return OwnHooks(self.settings.task_encoder, selects=self.settings.selects).groups

    @property
    def listed(self) -> bool:
        """Whether all ranks agree on the rows of a pass before it begins, since it is packed or grouped."""
        return self.ends and (self.settings.packing_buffer_size is not None or self.grouped)

    def end(self, num_rows: int, world_size: int, num_batches: int | None = None) -> int:
        """Return the microbatch at which a pass of so many rows (grouped: batches) ends, after `ceil(end/R)` steps."""
        end = num_microbatches(num_rows, self.rows, drop_last=self.settings.batch_drop_last)
        end = end if num_batches is None else num_batches
        return end if self.settings.limit is None else min(end, self.settings.limit * world_size)

    @cached_property
    def ordered(self) -> tuple[OpenLeaf, ...]:
        """The leaves in the order of the counters: by identity, or for validation as given."""
        return self.leaves if self.kind == "finite" else tuple(sorted(self.leaves, key=lambda leaf: leaf.identity))

    def epoch_length(self, world_size: int) -> int:
        """Return the microbatches of one rank in an epoch of an endless stream; at least 1."""
        if self.buckets is not None:
            return max(1, int(self.buckets.batches / world_size))
        samples = self.settings.conventions.epoch_samples(self.epoch_samples)
        return max(1, int(samples // (self.rows * world_size)))

    @property
    def mode(self) -> str:
        """How the leaves are combined: `single`, `weights`, `repetitions` or `concat`."""
        return self.mix.mode if len(self.leaves) > 1 else "single"

    @property
    def unit(self) -> str | None:
        """What the weights of an endless blend are shares of, an expression of columns; None: of draws."""
        return self.mix.unit if self.kind == "train" and self.mode == "weights" else None

    @cached_property
    def weights(self) -> MixWeights:
        """The weights of the mix, in order of the leaves' identities."""
        place = {leaf.identity: number for number, leaf in enumerate(self.leaves)}
        return MixWeights(
            mix=self.mix,
            sizes=tuple(leaf.num_samples if leaf.amounts is None else leaf.amounts.total for leaf in self.leaves),
            order=tuple(place[leaf.identity] for leaf in self.ordered),
        )

    @cached_property
    def failure_log(self) -> FailureLog:
        """The log of failures; one for all loaders of this dataset in the process."""
        policy = self.settings.error_policy
        return FailureLog(messages=policy.messages, quarantine=policy.quarantine)

    def __iter__(self) -> NoReturn:
        raise WrongUseError(DATASET_IS_NO_LOADER)

    def __len__(self) -> int:
        return self.num_batches(self.worker_config)

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
        if self.settings.max_tokens_per_microbatch is not None:
            return f"up to {counted(self.settings.max_tokens_per_microbatch, 'token')}"
        if self.settings.batch_size is None:
            return "one sample"
        return counted(self.settings.batch_size, "sample" if self.settings.packing_buffer_size is None else "pack")

    def num_batches(self, config: WorkerConfig, end: int | None = None) -> int:
        """Return the batches of one rank in a pass or virtual epoch, or in an epoch of an endless stream.

        Args:
            end: The microbatch at which the pass of a finite stream ends, if known.
        """
        if self.settings.virtual_epoch_length is not None:
            return self.settings.virtual_epoch_length
        if not self.ends:
            return self.epoch_length(config.dp_size)
        if end is None:
            end = plan_run(self, config).end_of_pass(0)
        return -(-end // config.dp_size)


def _check_types(leaves: Sequence[OpenLeaf], encoder: Any) -> None:
    """Raise if leaves would share microbatches although the default hooks cannot batch their types together.

    If user code sees the samples first, nothing is checked: hooks, cookers and joiners may turn all into one type.

    Raises:
        ConfigurationError: The types have different fields.
    """
    if is_overridden(encoder, Hook.ENCODE, Hook.PREENCODE, Hook.POSTENCODE, Hook.BATCH):
        return
    by_fields: dict[tuple[str, ...], tuple[str, list[str]]] = {}
    for leaf in leaves:
        if isinstance(leaf.dataset, JoinedDataset) or cooker_of(encoder, leaf.dataset) is not None:
            continue
        kind = leaf.dataset.sample_type
        fields = () if issubclass(kind, CrudeSample) else field_names(kind)
        by_fields.setdefault(fields, (kind.__name__, []))[1].append(leaf.dataset.path)
    if len(by_fields) > 1:
        types = "; ".join(f"{kind}: {', '.join(paths[:3])}" for kind, paths in by_fields.values())
        raise ConfigurationError(
            f"the datasets of the mix have different sample types ({types}), which {type(encoder).__name__} cannot "
            f"put into one microbatch: {REMEDY_FOR_TYPES}. For validation, get_val_datasets keeps them apart"
        )


# ---------------------------------------------------------------------------------------------------------------------
# The plan.


_FEWEST_GROUPS = 4
"""Row groups of a parquet file per lane and epoch, at least, for slices as long as a row group."""


PACKING_BUFFERS = "packing_buffers"
"""The number of packing buffers of a run: of small data there are fewer than lanes (`stream/dealt_packs.py`)."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A dataset cut into lanes (finite passes have one lane), and the ranks that it is for.

    `recorded` has everything that the order depends on besides the leaves, as states have it; `changes` are those of
    weights during the run.
    """

    data: DatasetSpec
    config: WorkerConfig
    num_lanes: int
    leaves: tuple[Leaf, ...]
    blend: AnyBlend | None
    changes: ChangedWeights
    recorded: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """What states record: all that the order depends on, and the day that samples were encoded on."""
        day = run_day_of(self.data)
        return self.recorded | ({} if day is None else {"today": day.today.isoformat()})

    @cached_property
    def table(self) -> list[dict[str, Any]]:
        """The leaves, in order, for the state."""
        return [row | {"mark": mark} for row, mark in zip(self.rows, self.data.marks, strict=True)]

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The leaves, in order, by what is known without reading an index of samples."""
        shared = self.data.kind != "finite" and len(self.leaves) > 1
        return [
            {
                "identity": leaf.identity,
                "path": leaf.dataset.path,
                "split_part": leaf.dataset.split_part,
                "num_samples": leaf.order.num_samples,
                "subset": opened.part,
                "share": str(opened.share) if shared else "",
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
        """The streams of draws: one for each lane, or for each packing buffer."""
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
        given = {identity: blocks.get(identity, self.data.block) for identity in own}
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
    data: DatasetSpec,
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
        if not data.ends:
            buffers = packing_buffers(data, lanes) if buffers is None else buffers
            settings |= {PACKING_BUFFERS: buffers} if buffers else {}
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
    _agree_on_day(run_day_of(data))
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
    )


def run_day_of(data: DatasetSpec) -> Any:
    """Return the day that a task encoder writes into texts (`RunDay` of its templates), or None."""
    return getattr(data.settings.task_encoder, "run_day", None)


def _agree_on_day(day: Any) -> None:
    """Give all ranks of a new run the day of the first one that asks: at midnight, their clocks differ."""
    ranks = distributed()
    if day is None or day.settled or ranks is None:
        return
    # No collective: ranks plan when they like, some more often than others, and some not at all.
    store_of = getattr(ranks.group.WORLD, "get_group_store", None)  # older torch and MPI have none
    store = None if store_of is None else store_of()
    first = b"" if store is None else store.compare_set("energon_bridge/today", "", day.today.isoformat())
    day.settle(date.fromisoformat(first.decode()) if first else day.today)


_LEAST_SHARE = 64
"""Samples of an epoch in a packing buffer's share, at least: with fewer, buffers would leave it far apart."""
IN_BUFFERS = 8
"""A mix has at most an eighth of an epoch of each dataset in all buffers, if few enough lanes share each."""
_SHARED_IN_MIXES = 768
"""Lanes times those that share a buffer in a mix, at most: each process of theirs encodes all of it, and many lanes are
for many processes. 48 lanes share by 16 at most, 192 by 4."""


def epochs_by_leaf(data: DatasetSpec) -> list[tuple[Fraction, OpenLeaf]]:
    """Return the draws of all lanes in an epoch of each dataset that has a weight at the start of an endless run."""
    shares = [Fraction(leaf.num_samples) for leaf in data.ordered]
    if data.mode == "weights":
        shares = [Fraction(weight) for weight in data.weights.at(0)]
    elif data.mode == "repetitions":
        shares = [size * leaf.share for size, leaf in zip(shares, data.ordered, strict=True)]
    total = sum(shares)
    each = zip(shares, data.ordered, strict=True)
    return [(leaf.num_samples * total / share, leaf) for share, leaf in each if share]


def packing_buffers(data: DatasetSpec, lanes: int) -> int:
    """Return the packing buffers of an endless run: as many as lanes, or the largest divisor of it that is few enough.

    A run of one dataset has a buffer for each full one in an epoch, since buffers end with epochs, and for 64 samples.
    In a mix, all buffers together have at most an eighth of an epoch of each dataset, unless too many lanes would
    have to share one; a mix that is eight times as large as all buffers of its lanes keeps these: sharing costs work.
    """
    size = data.settings.packing_buffer_size or 1
    alone = data.mode == "single" and data.ordered[0].shuffle_epochs in (None, 1)
    if len(data.ordered) > 1 and data.num_samples >= IN_BUFFERS * lanes * size:
        return lanes
    share = max(size, _LEAST_SHARE) if alone else IN_BUFFERS * size
    most = int(min(epoch for epoch, _ in epochs_by_leaf(data)) / share)
    divisors = [divisor for divisor in range(1, lanes + 1) if lanes % divisor == 0]
    least = (
        1
        if len(data.ordered) == 1
        else min(one for one in divisors if one * max(1, _SHARED_IN_MIXES // lanes) >= lanes)
    )
    return max(least, *(divisor for divisor in divisors if divisor <= max(1, most)))


def _leaf(data: DatasetSpec, leaf: OpenLeaf, lanes: int, seed: int, *, block: int) -> Leaf:
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


def _blend(
    data: DatasetSpec, leaves: Sequence[Leaf], lanes: int, seed: int, changes: ChangedWeights
) -> AnyBlend | None:
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
        repetitions=tuple(leaf.share for leaf in data.ordered),
        num_lanes=lanes,
        key=key_of("run", seed),
        rotations=tuple(leaf.order.rotation for leaf in leaves),
        blocks=tuple(leaf.order.dealt_block for leaf in leaves),
        sequence=sequence,
    )


def _shuffle_setting(epochs: int | None) -> bool | int:
    """Return how a leaf is shuffled, as states have it: False, True (each epoch), or the epochs shuffled as one."""
    return epochs is not None if epochs in (None, 1) else epochs


def leaf_line(leaf: OpenLeaf) -> str:
    """Describe a leaf in one line."""
    dataset = leaf.dataset
    kind = getattr(getattr(dataset, "sample_type", None), "__name__", "joined samples")
    subset = "" if leaf.is_whole else f", samples {leaf.part.replace(':', ' to ', 1)}"
    shards = counted(leaf.num_shards, "shard")
    part = f" [{dataset.split_part}]" if dataset.split_part else ""
    return f"{dataset.path}{part}{subset}: {counted(leaf.num_samples, kind)} in {shards}"


# ---------------------------------------------------------------------------------------------------------------------
# The pipeline of one process, as the plan of its run wants it.


_READ_BYTES = 256 << 20
"""Bytes allowed for the rounds of all lanes of a process; beyond that, draws are read one microbatch at a time."""
_FAR_READERS = 16
"""Rounds read ahead at the same time if storage answers slowly."""
_LEAST_AHEAD = 4
"""Draws of a lane read ahead, at least, if rounds are too large."""
_TOGETHER_BYTES, _TOGETHER = 64 << 20, 1024
"""A lane reads several rounds of a leaf together, up to so many bytes and samples."""


def open_pipeline(
    plan: RunPlan,
    threads: int | None = None,
    delivered: Collection[int] = (),
    watchdog: WatchdogSettings | None = None,
    worker: WorkerFacts | None = None,
) -> Pipeline:
    """Build what loads, encodes and batches in one process.

    Args:
        threads: Overrides the number of threads in the configuration.
    """
    data = plan.data
    config = plan.config
    run = data.settings
    decodes = run.task_encoder.decoder is not None and any(_decodes_media(leaf.dataset) for leaf in data.leaves)
    if worker is not None and worker.careful:
        threads = 0
    elif threads is None:
        threads = config.threads if decodes else 0
        # A single loading thread would only pass the interpreter lock back and forth with the worker's own thread.
        threads = 0 if config.num_workers and threads == 1 else threads
    lanes = -(-plan.num_lanes // (config.dp_size * config.processes))
    # Approximate bytes if every lane holds one sample of every leaf.
    unit = lanes * sum(max(1, int(leaf.dataset.shard_sizes.sum()) // leaf.dataset.num_samples) for leaf in data.leaves)
    is_far = any(leaf.is_far for leaf in data.leaves)
    settings = StreamSettings(
        run=run,
        config=config,
        lanes=lanes,
        num_lanes=plan.num_lanes,
        threads=threads,
        reads_rounds=unit * max(run.shuffle_buffer_size, 4 * run.parallel_shard_iters) <= _READ_BYTES,
        read_together=min(_TOGETHER, _TOGETHER_BYTES // unit),
        background_reads=_FAR_READERS if is_far else int(not config.num_workers),
        draws_ahead=min(_TOGETHER, max(_LEAST_AHEAD, _TOGETHER_BYTES // unit)) if is_far else 0,
        failure_log=data.failure_log,
        delivered=delivered,
        packs_by_epoch=plan.packs_by_epoch,
        watchdog=watchdog,
        worker=worker,
    )
    return Pipeline(plan.leaves, settings)


def _decodes_media(dataset: PreparedDataset | JoinedDataset) -> bool:
    """Return whether decoding pays for threads: image decoders release the interpreter lock."""
    if isinstance(dataset, JoinedDataset):
        return any(_decodes_media(part.dataset) for part in dataset.parts)
    if isinstance(dataset, JsonlDataset):
        return False
    field_map = dataset.field_map
    return field_map is None or any(p.rpartition(".")[2].lower() in IMAGE_EXTENSIONS for p in field_map.parts)
