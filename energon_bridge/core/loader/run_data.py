"""What a run loads: the leaves of its mix and its settings, checked, and all that follows from these alone.

It is a description: it holds no open file and no thread, and is the same on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Self

from energon_bridge.core.encoder.collate import REMEDY_FOR_TYPES
from energon_bridge.core.encoder.hooks import Hook, is_overridden
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.format.join import JOIN_OF, JoinedDataset
from energon_bridge.core.format.marks import marks_of
from energon_bridge.core.mix import Mix
from energon_bridge.core.mix.leaves import OpenLeaf
from energon_bridge.core.mix.weights import MixWeights
from energon_bridge.core.samples import CrudeSample, field_names
from energon_bridge.core.stream.failures import FailureLog
from energon_bridge.core.stream.finite import num_microbatches
from energon_bridge.core.stream.leaf import check_cooker, cooker_of
from energon_bridge.core.stream.settings import RunSettings, StreamKind
from energon_bridge.core.stream.user_code import OwnHooks


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The data of a run, whatever ranks it is for.

    Args:
        leaves: The datasets, in the order of the mix.
        mix: How they are combined.
        settings: How they are ordered and made into microbatches.
        buckets: The buckets of its leaves, if microbatches come from buckets (`tools/columns/buckets.py`).
    """

    leaves: tuple[OpenLeaf, ...]
    mix: Mix
    settings: RunSettings
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
        """How many draws of a leaf a lane makes before it is the next lane's turn, unless a state says otherwise.

        A microbatch where there is one leaf; 0 in a mix, where the lanes take single draws in turn (`LeafOrder.block`).
        """
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
        return tuple(leaf.num_samples * (leaf.weight if repeats else Fraction(1)) for leaf in self.ordered)

    @cached_property
    def grouped(self) -> bool:
        """Whether the encoder batches rows by groups."""
        return OwnHooks(self.settings.task_encoder, selects=self.settings.selects).groups

    @property
    def joins_samples(self) -> str:
        """How rows are made of several samples, so that a step does not tell how many; empty: they are not."""
        if self.settings.max_tokens_per_microbatch is not None:
            return "selects samples by max_tokens_per_microbatch"
        packs = self.settings.packing_buffer_size is not None
        return "packs samples" if packs else "groups samples" if self.grouped else ""

    @property
    def listed(self) -> bool:
        """Whether all ranks agree on the rows of a pass before it begins, since it is packed or grouped."""
        return self.ends and (self.settings.packing_buffer_size is not None or self.grouped)

    def end(self, num_rows: int, world_size: int, num_batches: int | None = None) -> int:
        """Return the microbatches of a pass of so many rows, all ranks together, up to the limit of steps.

        `num_batches` are those of a grouped pass, whose batches differ in size. Each rank makes `ceil(end/R)` steps.
        """
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

    def num_batches(self, ranks: int, end: Callable[[], int]) -> int:
        """Return the batches of one rank in a pass or virtual epoch, or in an epoch of an endless stream.

        Args:
            end: Returns the microbatch at which the pass of a finite stream ends.
        """
        if self.settings.virtual_epoch_length is not None:
            return self.settings.virtual_epoch_length
        return -(-end() // ranks) if self.ends else self.epoch_length(ranks)

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


def epochs_by_leaf(data: RunData) -> list[tuple[Fraction, OpenLeaf]]:
    """Return how many draws an endless run makes, at its first weights, until it has gone once through each dataset.

    Draws are those of all lanes and datasets together; each comes with its leaf. Datasets of weight 0 are left out.
    """
    shares = [Fraction(leaf.num_samples) for leaf in data.ordered]
    if data.mode == "weights":
        shares = [Fraction(weight) for weight in data.weights.at(0)]
    elif data.mode == "repetitions":
        shares = [size * leaf.weight for size, leaf in zip(shares, data.ordered, strict=True)]
    total = sum(shares)
    each = zip(shares, data.ordered, strict=True)
    return [(leaf.num_samples * total / share, leaf) for share, leaf in each if share]


def dataset_names(paths: Sequence[str], parts: Sequence[str]) -> list[str]:
    """Return a short, unique name for each dataset of a mix: the last folders of its path, as many as it takes.

    If paths are equal, the split part is added, and then a number. A join is called as its primary.
    """
    paths = [path.removeprefix(JOIN_OF).split(" and ")[0] if path.startswith(JOIN_OF) else path for path in paths]
    split = [[piece for piece in path.split("/") if piece] or [path] for path in paths]
    names = list(paths)
    for depth in range(1, max(map(len, split), default=0) + 1):
        tails = ["/".join(pieces[-depth:]) for pieces in split]
        shared = Counter(tails)
        names = [
            tail if name == path and (shared[tail] == 1 or depth >= len(pieces)) else name
            for name, path, tail, pieces in zip(names, paths, tails, split, strict=True)
        ]
    both = Counter(zip(names, parts, strict=True))
    shared = Counter(name for name, _ in both)
    names = [f"{name}:{part}" if shared[name] > 1 else name for name, part in zip(names, parts, strict=True)]
    shared = Counter(names)
    seen = Counter[str]()
    for number, name in enumerate(names):
        seen[name] += 1
        if shared[name] > 1:
            names[number] = f"{name}#{seen[name]}"
    return names
