"""Samples to show: those of a dataset or mix in order, or those that a run draws at some steps.

Samples are loaded as a run loads them, but no task encoder sees them, and one that fails is shown with its error
instead of being left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

from energon_bridge.core.encoder.decoder import SampleDecoder
from energon_bridge.core.encoder.hooks import Hook
from energon_bridge.core.encoder.task_encoder import DefaultTaskEncoder, decoder_of
from energon_bridge.core.errors import ConfigurationError, EnergonError
from energon_bridge.core.format.join import JoinedDataset
from energon_bridge.core.loader.bans import look_up
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.opening import open_pipeline
from energon_bridge.core.loader.run_plan import RunPlan, plan_run
from energon_bridge.core.order.choose import Picks
from energon_bridge.core.samples.sample_place import SamplePlace
from energon_bridge.core.stream.lane_state import SampleKey, SampleRef, as_members
from energon_bridge.core.stream.loading import load_picks
from energon_bridge.core.stream.pipeline import Pipeline
from energon_bridge.core.stream.user_code import PendingSample
from energon_bridge.core.stream.values import FailedSample, has_code
from energon_bridge.core.worker_config import available_cores
from energon_bridge.tools.forecast.planned_run import Run
from energon_bridge.tools.forecast.samples import name_steps
from energon_bridge.tools.preview.records import SampleRecord, asked_and_said, fields_of

T = TypeVar("T")

_MOST_KEY = 1000
_AT_A_TIME = 64
"""Number of samples loaded together."""


_WHEN_SHOWN = SampleDecoder(image_decode="pilrgb", defer_images=True, image_target=320)
"""Decodes images when they are shown, at a fraction of their size if possible."""


class _AsTheyAre(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Leaves samples as they are; images lie, and are transparent, as the task encoder of the run sees them.

    Args:
        encoder: That of the run; with the default one, which says nothing, images are on white, as viewers show them.
        coded: Decode as training does, for datasets with their own code, which may rely on it.
    """

    def __init__(self, encoder: Any, *, coded: bool) -> None:
        super().__init__()
        self.decoder = SampleDecoder() if coded else _WHEN_SHOWN
        self.autorotate = bool(getattr(decoder_of(encoder), "turns_images", False))
        said = "keep" if type(encoder) is DefaultTaskEncoder else getattr(encoder, "image_alpha", "drop")
        self._alpha = "white" if said == "keep" else said  # kept for a processor, which has a rule of its own

    @property
    def image_alpha(self) -> str:
        return self._alpha


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnSample:
    """A sample that a run draws: its restore key, and its position in the run."""

    key: SampleKey
    facts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetShare:
    """One dataset of a mix: its path, number of samples, and share of the draws, from 0 to 1."""

    name: str
    num_samples: int
    share: float


class SampleSource:
    """Loads samples of a mix by their restore keys.

    Args:
        spec: The mix; of its task encoder, only how it decodes images is used.
        plan: The plan of the run whose samples are shown; default: that of a run of one rank.
    """

    def __init__(self, spec: DatasetSpec, plan: RunPlan | None = None) -> None:
        coded = any(has_code(leaf.dataset) for leaf in spec.leaves)
        encoder = _AsTheyAre(spec.settings.task_encoder, coded=coded)
        self._spec = spec.with_settings(task_encoder=encoder, batch_size=None, packing_buffer_size=None)
        config = replace(spec.worker_config, num_workers=0, data_parallel_group=None)
        self._plan = replace(plan, data=self._spec, config=config) if plan else plan_run(self._spec, config)
        self._pipeline: Pipeline = open_pipeline(self._plan, threads=0)
        self._leaves = {leaf.identity: number for number, leaf in enumerate(self._plan.leaves)}

    def in_order(self, limit: int | None) -> Iterator[DrawnSample]:
        """Yield the first samples of each dataset, at most `limit` in all, in equal numbers if limited."""
        leaves = self._spec.leaves
        for leaf, count in zip(leaves, shared_out(limit, [leaf.num_samples for leaf in leaves]), strict=True):
            for index in leaf.numbers(count):
                yield DrawnSample(key=(leaf.identity, index, 0, 0))

    def by_key(self, keys: Sequence[str]) -> Iterator[DrawnSample]:
        """Yield the samples with some keys; raises ConfigurationError for a key that none has."""
        leaves = self._spec.leaves
        by_leaf = look_up(leaves, keys)
        for key in dict.fromkeys(keys):
            holders = [(leaf, numbers[key]) for leaf, numbers in zip(leaves, by_leaf, strict=True) if key in numbers]
            drawn = [
                (leaf.identity, index) for leaf, numbers in holders for index in numbers[leaf.has(numbers)].tolist()
            ]
            if not drawn:
                raise ConfigurationError(
                    f"no sample has the key {key!r}. --split-part reads another part of the split; "
                    f"`energon which MIX --find {key!r}` searches file names, ids and texts"
                )
            yield from (DrawnSample(key=(identity, index, 0, 0)) for identity, index in drawn)

    def parts(self) -> list[DatasetShare]:
        """Return the datasets of the mix, in its order."""
        leaves = self._spec.leaves
        weighs = self._spec.mode in ("weights", "single")
        total = sum(leaf.weight if weighs else leaf.weight * leaf.num_samples for leaf in leaves) or 1
        return [
            DatasetShare(
                name=leaf.dataset.path,
                num_samples=leaf.num_samples,
                share=float((leaf.weight if weighs else leaf.weight * leaf.num_samples) / total),
            )
            for leaf in leaves
        ]

    def records(self, drawn: Iterable[DrawnSample], finish: Callable[[SampleRecord], T]) -> Iterator[T]:
        """Load samples and yield `finish(record)` of each, in order, using all cores."""
        with ThreadPoolExecutor(available_cores(), "energon-preview") as pool:
            waiting = iter(drawn)
            while some := list(islice(waiting, _AT_A_TIME)):
                loaded = self._loaded([one.key for one in some])
                yield from pool.map(lambda pair: finish(self._record(*pair)), zip(some, loaded, strict=True))

    def _loaded(self, keys: Sequence[SampleKey]) -> list[tuple[Any, int]]:
        """Return samples (or `FailedSample`s) and their sizes; a broken shard only fails its own samples."""
        try:
            return self._load(keys)
        except EnergonError as error:
            if len(keys) > 1:
                half = len(keys) // 2
                return self._loaded(keys[:half]) + self._loaded(keys[half:])
            ((_, index, _, _),) = keys
            return [(FailedSample(error, Hook.READ, SamplePlace("", "", index)), 0)]

    def _load(self, keys: Sequence[SampleKey]) -> list[tuple[Any, int]]:
        pipeline = self._pipeline
        refs = [SampleRef(self._leaves[identity], index, epoch, 0) for identity, index, epoch, _ in keys]
        loading = load_picks(pipeline.loading, Picks(as_members(refs)))
        loaded: list[tuple[Any, int]] = []
        while len(loading):
            part = loading.take()
            loaded += zip(part.samples, part.sizes, strict=True)
        if any(type(sample) is PendingSample for sample, _ in loaded):
            with pipeline.user_code(restoring=True):
                loaded = [(self._made(ref, sample), size) for ref, (sample, size) in zip(refs, loaded, strict=True)]
        return loaded

    def _made(self, ref: SampleRef, sample: Any) -> Any:
        """Apply a dataset's own code to a sample."""
        if type(sample) is not PendingSample:
            return sample
        return self._pipeline.code.made(sample, ref, None)

    def _record(self, drawn: DrawnSample, loaded: tuple[Any, int]) -> SampleRecord:
        sample, size = loaded
        identity, index, epoch, _ = drawn.key
        dataset = self._plan.leaves[self._leaves[identity]].dataset
        facts = {**drawn.facts} | ({"epoch": epoch} if drawn.facts else {})
        if type(sample) is FailedSample:
            error = sample.error
            return SampleRecord(
                dataset=dataset.path,
                key=sample.place.key[:_MOST_KEY] or f"sample {index}",
                shard=sample.place.shard,
                index=index,
                size=size,
                facts=facts,
                error=f"{sample.hook.title}: {type(error).__name__}: {error}" if error else "listed in `exclude`",
            )
        get = sample.get if isinstance(sample, dict) else lambda name: getattr(sample, name, None)
        sources = get("__sources__") or ()
        fields = fields_of(sample)
        asked, said = asked_and_said(sample, fields)
        return SampleRecord(
            dataset=dataset.path,
            key=str(get("__key__"))[:_MOST_KEY],
            shard=sources[0].shard_name if sources else "",
            index=index,
            size=size if not isinstance(dataset, JoinedDataset) else 0,
            facts=facts,
            fields=fields,
            asked=asked,
            said=said,
        )


def shared_out(limit: int | None, sizes: Sequence[int]) -> list[int]:
    """Return how many samples of each dataset to show: equal numbers, as far as each has enough."""
    if limit is None or limit >= sum(sizes):
        return list(sizes)
    counts = [0] * len(sizes)
    left = limit
    open_ones = list(range(len(sizes)))
    while left and open_ones:
        each, rest = divmod(left, len(open_ones))
        for position, number in enumerate(open_ones):
            taken = min(sizes[number] - counts[number], each + (position < rest))
            counts[number] += taken
            left -= taken
        open_ones = [number for number in open_ones if counts[number] < sizes[number]]
    return counts


def drawn_in(run: Run, steps: Sequence[int], rank: int | None = None) -> Iterator[DrawnSample]:
    """Yield the samples of steps of a run, computed without reading; see `forecast.samples.name_steps`."""
    for step, microbatches in zip(steps, name_steps(run, steps), strict=True):
        for microbatch in microbatches:
            if rank is not None and microbatch.rank != rank:
                continue
            for sample in microbatch.samples:
                facts = {"step": step, "rank": microbatch.rank, "row": sample.row}
                if microbatch.microbatch is not None:
                    facts["microbatch"] = microbatch.microbatch
                yield DrawnSample(key=sample.restore_key, facts=facts)
