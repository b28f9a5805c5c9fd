"""The description of a run's data: its leaves and all settings that the order depends on, checked; nothing is open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from energon_bridge.errors import ConfigurationError
from energon_bridge.format.join import JoinedDataset
from energon_bridge.mix import Mix
from energon_bridge.mix.leaves import OpenLeaf
from energon_bridge.plan.leaf import DEFAULT_PARALLEL_SHARD_ITERS
from energon_bridge.plan.weights import MixWeights
from energon_bridge.samples import CrudeSample, field_names
from energon_bridge.stores import CachePool, NoCachePool
from energon_bridge.stream.cooking import check_cooker, cooker_of
from energon_bridge.stream.dealt import ENDLESS
from energon_bridge.stream.failure_log import FailureLog
from energon_bridge.stream.finite import num_microbatches
from energon_bridge.stream.policy import ErrorPolicy
from energon_bridge.stream.user_code import HookRunner, is_default, selection_of
from energon_bridge.task_encoder.collate import REMEDY_FOR_TYPES


@dataclass(frozen=True, kw_only=True)
class Description:
    """The data of a run and the settings of its stream: frozen, checked, and without anything open.

    Args:
        leaves: The leaves, in the order of the mix.
        mix: How they are combined.
        finite: One pass at a time (validation, or training with `repeat=False`) instead of an endless stream.
        shuffled: Whether a finite pass is shuffled (training) or in dataset order (validation).
        virtual_epoch_length: Steps after which an iterator over training data ends; the next one continues.
        limit: Steps after which a pass over validation data ends.
        cache_pool: Where files that are needed later are cached.
        error_policy: Decides about samples that fail.
        as_energon: Behave as megatron-energon does, for programs written for it: validation in the order of its ranks
            and workers (`stream.dealt`), microbatches and samples numbered by rank, and no masked rows.
        repeats: With `as_energon`: a pass starts over until its limit, or without end.

    The other arguments are those of `get_train_dataset`.
    """

    leaves: tuple[OpenLeaf, ...]
    mix: Mix
    finite: bool
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
    max_tokens_per_microbatch: int | None = None
    cache_pool: CachePool = field(default_factory=NoCachePool)
    error_policy: ErrorPolicy = field(default_factory=ErrorPolicy)
    as_energon: bool = False
    repeats: bool = False

    def __post_init__(self) -> None:
        _ = self.grouped  # raises if hooks exclude each other
        for leaf in self.leaves:
            check_cooker(self.task_encoder, leaf.dataset, leaf.aux)
        if not (self.finite and self.shuffled):
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

    def check_types(self) -> None:
        """Raise if the leaves' sample types cannot share microbatches; loaders check this, forecasts need not."""
        together = self.rows > 1 and self.packing_buffer_size is None and not self.grouped
        if together or self.max_tokens_per_microbatch is not None:
            _check_types(self.leaves, self.task_encoder)

    @property
    def kind(self) -> str:
        """The kind of its states: `train` (endless), `passes` (training that ends) or `finite` (validation)."""
        if not self.finite:
            return "train"
        return "passes" if self.shuffled else "finite"

    @property
    def rows(self) -> int:
        """Samples in a full microbatch."""
        return self.batch_size or 1

    @property
    def num_samples(self) -> int:
        """Samples of all leaves, each counted once."""
        return sum(leaf.num_samples for leaf in self.leaves)

    @cached_property
    def grouped(self) -> bool:
        """Whether the encoder batches rows by groups."""
        selects = selection_of(self.packing_buffer_size, self.max_tokens_per_microbatch)
        return HookRunner(self.task_encoder, selects=selects).groups

    @property
    def listed(self) -> bool:
        """Whether all ranks agree on the rows of a pass before it begins, since it is packed or grouped."""
        return self.finite and (self.packing_buffer_size is not None or self.grouped)

    def end(self, num_rows: int, world_size: int, num_batches: int | None = None) -> int:
        """Return the microbatch at which a pass of so many rows (grouped: batches) ends for every rank."""
        end = num_microbatches(num_rows, self.rows, drop_last=self.batch_drop_last)
        end = end if num_batches is None else num_batches
        return end if self.limit is None else min(end, self.limit * world_size)

    def end_of(self, rank: int, num_rows: int, world_size: int, num_batches: int | None = None) -> int:
        """Return the microbatch at which a pass ends for one rank; as a drop-in, a rank stops when it has none left."""
        if self.repeats:
            return ENDLESS if self.limit is None else self.limit * world_size
        end = self.end(num_rows, world_size, num_batches)
        return max(0, end - rank) if self.as_energon else end

    @cached_property
    def ordered(self) -> tuple[OpenLeaf, ...]:
        """The leaves in the order of the counters: by identity, or for validation as given."""
        return self.leaves if self.kind == "finite" else tuple(sorted(self.leaves, key=lambda leaf: leaf.identity))

    def epoch_length(self, world_size: int) -> int:
        """Return the microbatches of one rank in an epoch of an endless stream; at least 1."""
        samples = self.num_samples
        if self.as_energon and self.mode == "repetitions":
            samples = sum(int(leaf.num_samples * leaf.share) for leaf in self.leaves)
        return max(1, samples // (self.rows * world_size))

    @property
    def mode(self) -> str:
        """How the leaves are combined: `single`, `weights`, `repetitions` or `concat`."""
        return self.mix.mode if len(self.leaves) > 1 else "single"

    @cached_property
    def weights(self) -> MixWeights:
        """The weights of the mix, in order of the leaves' identities."""
        place = {leaf.identity: number for number, leaf in enumerate(self.leaves)}
        return MixWeights(
            mix=self.mix,
            sizes=tuple(leaf.num_samples for leaf in self.leaves),
            order=tuple(place[leaf.identity] for leaf in self.ordered),
        )

    @cached_property
    def failure_log(self) -> FailureLog:
        """The log of failures; one for all loaders of this dataset in the process."""
        return FailureLog(self.error_policy)


def _check_types(leaves: Sequence[OpenLeaf], encoder: Any) -> None:
    """Raise if leaves would share microbatches although the default hooks cannot batch their types together.

    If user code sees the samples first, nothing is checked: hooks, cookers and joiners may turn all into one type.

    Raises:
        ConfigurationError: The types have different fields.
    """
    hooks = ("encode_sample", "preencode_sample", "postencode_sample", "batch")
    if not all(is_default(getattr(encoder, name, None)) for name in hooks if hasattr(encoder, name)):
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
