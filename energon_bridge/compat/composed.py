"""One task encoder of the functions that wrappers hold, so that the engine runs them as it runs any hook.

A function becomes part of a hook by what it gets: samples after `encode_sample`, packs after `pack_selected_samples`,
batches after `encode_batch`. Invariant: what a wrapped dataset delivers follows from seed and position alone, as of any
dataset, so it is saved and restored exactly, on other ranks and workers too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from types import GeneratorType
from typing import Any

from energon_bridge.compat.conventions import EnergonConventions
from energon_bridge.compat.table import not_provided
from energon_bridge.compat.wrapped import (
    BatchDataset,
    BlendDataset,
    ConcatDataset,
    EpochizeDataset,
    FilterDataset,
    GcDataset,
    GroupBatchDataset,
    IterMapDataset,
    LimitDataset,
    LogSampleDataset,
    MapDataset,
    PackingDataset,
    RepeatDataset,
    ShuffleBufferDataset,
    WatchdogDataset,
    Wrapper,
)
from energon_bridge.core import datasets
from energon_bridge.core.encoder.deferred import decode_deferred
from energon_bridge.core.encoder.hooks import Hook, hook_of, is_overridden
from energon_bridge.core.encoder.task_encoder import AugmentTaskEncoder, TaskEncoder
from energon_bridge.core.errors import ConfigurationError, FatalSampleError, SkipSample
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.core.mix.flatten import flatten
from energon_bridge.core.mix.leaves import number_leaves
from energon_bridge.core.mix.schedule import WeightSchedule
from energon_bridge.core.mix.tree import BlendNode, Concat
from energon_bridge.core.samples.sample import meta_field
from energon_bridge.core.stream.policy import DEFAULT_TOLERANCE
from energon_bridge.core.stream.user_code import OwnHooks

FUNCTIONS = (MapDataset, FilterDataset, IterMapDataset)
UserStep = Callable[[Any], Any]
"""A function of a sample, a pack or a batch; a generator has several outputs, or none."""


def make_loader(dataset: Any, **kwargs: Any) -> SavableDataLoader:
    """Return a loader for a wrapped dataset; `kwargs` are those of `get_savable_loader`.

    Raises:
        NotProvidedError: The combination of wrappers has no equivalent, such as epochs of validation data.
    """
    limit: int | None = None
    repeated = False
    while isinstance(dataset, LimitDataset | EpochizeDataset | RepeatDataset | WatchdogDataset):
        if isinstance(dataset, WatchdogDataset):
            kwargs = dataset.watched | kwargs
        elif isinstance(dataset, RepeatDataset):
            if dataset.repeats is not None:
                raise not_provided(
                    f"RepeatDataset(repeats={dataset.repeats})", "use `blend_epochized` with repetitions"
                )
            repeated = True
        elif isinstance(dataset, LimitDataset) and not repeated:
            limit = dataset.length if limit is None else min(limit, dataset.length)
        elif isinstance(dataset, EpochizeDataset) and not repeated and not _is_finite(dataset.dataset):
            limit = dataset.length
        else:
            raise not_provided(
                f"{type(dataset).__name__} in this place",
                "pass limit= to get_val_dataset, virtual_epoch_length= to get_train_dataset",
            )
        dataset = dataset.dataset
    if isinstance(dataset, Wrapper):
        dataset = compose(dataset)
    if not isinstance(dataset, DatasetSpec) or (limit is None and not repeated):
        return datasets.get_savable_loader(dataset, **kwargs)
    if not dataset.ends:  # an endless stream repeats by itself; limiting it makes an epoch
        return datasets.get_savable_loader(dataset.with_settings(virtual_epoch_length=limit), **kwargs)
    if repeated and dataset.settings.limit is not None:
        raise not_provided("RepeatDataset of a dataset with limit=", "limit the repeated dataset by LimitDataset")
    if limit is not None and dataset.settings.limit is not None:
        limit = min(limit, dataset.settings.limit)
    repeats = {"conventions": EnergonConventions(repeats=True)} if repeated else {}
    return datasets.get_savable_loader(dataset.with_settings(limit=limit, **repeats), **kwargs)


def compose(dataset: Wrapper | DatasetSpec) -> DatasetSpec:
    """Return a wrapped dataset as one whose task encoder does what the wrappers say.

    Raises:
        NotProvidedError: A wrapper stands where the engine has nothing like it.
        ConfigurationError: The datasets of a blend cannot be read as one.
    """
    match dataset:
        case DatasetSpec():
            return dataset
        case GcDataset() | LogSampleDataset():
            return compose(dataset.dataset)
        case MapDataset() | FilterDataset() | IterMapDataset():
            return mapped(compose(dataset.dataset), dataset)
        case PackingDataset():
            return _packed(compose(dataset.dataset), dataset)
        case BatchDataset() | GroupBatchDataset():
            return _batched(compose(dataset.dataset), dataset)
        case ShuffleBufferDataset():
            return _shuffled(compose(dataset.dataset), dataset)
        case BlendDataset() | ConcatDataset():
            return _joined(dataset)
    raise not_provided(
        f"{type(dataset).__name__} inside of another wrapper",
        "its length is in steps: put it outermost, around the dataset that the loader gets",
    )


def _is_finite(dataset: Any) -> bool:
    while isinstance(dataset, Wrapper):
        dataset = dataset.dataset
    return bool(dataset.ends)


class ComposedEncoder(AugmentTaskEncoder):
    """A task encoder with some hooks replaced by functions; None: by the package's own."""

    def __init__(self, task_encoder: Any, hooks: dict[Hook, Any]) -> None:
        super().__init__(task_encoder)
        for hook, function in hooks.items():
            own = getattr(TaskEncoder, hook.title).__get__(self)
            setattr(self, hook.title, own if function is None else function)


def _with_hooks(spec: DatasetSpec, hooks: dict[Hook, Any], **settings: Any) -> DatasetSpec:
    return spec.with_settings(task_encoder=ComposedEncoder(spec.settings.task_encoder, hooks), **settings)


def _delivers(spec: DatasetSpec) -> Hook:
    """Return the last hook of a dataset, whose output it delivers: samples, packs or batches."""
    run = spec.settings
    if run.batch_size is not None or spec.grouped:
        return Hook.ENCODE_BATCH
    return Hook.ENCODE if run.packing_buffer_size is None else Hook.PACK


def _encoding(spec: DatasetSpec) -> list[UserStep]:
    """Return the function that encodes the samples of a dataset which delivers samples, not batches."""
    encoder = spec.settings.task_encoder
    own = OwnHooks(encoder)
    steps: list[UserStep] = [hook_of(encoder, own.first)] if own.pre else []
    if own.posts:
        steps += [_decoded, encoder.postencode_sample]
    return steps


def _decoded(sample: Any) -> Any:
    decode_deferred([sample])
    return sample


def mapped(
    spec: DatasetSpec, wrapper: MapDataset | FilterDataset | IterMapDataset, *, of_samples: bool = False
) -> DatasetSpec:
    """Return a dataset whose output, or whose encoded samples, go through the function of a wrapper."""
    encoder = spec.settings.task_encoder
    whole = _delivers(spec) is Hook.ENCODE
    tolerance = wrapper.failure_tolerance if isinstance(wrapper, MapDataset) else DEFAULT_TOLERANCE
    if of_samples and not whole:  # they may be packed or grouped next: `postencode_sample` comes later
        hook = Hook.PREENCODE if is_overridden(encoder, Hook.PREENCODE, Hook.POSTENCODE) else Hook.ENCODE
    else:
        hook = _delivers(spec)
    before = _encoding(spec) if whole else [hook_of(encoder, hook)] * is_overridden(encoder, hook)
    hooks = {Hook.PREENCODE: None, Hook.POSTENCODE: None} if whole else {}
    return _with_hooks(spec, {**hooks, hook: chained([*before, step_of(wrapper)], tolerance)})


def encoded_by(spec: DatasetSpec, before: Sequence[Any], after: Sequence[Any], *, own: bool) -> DatasetSpec:
    """Return a dataset whose samples are encoded by the functions of wrappers, around the encoder's own hook if `own`.

    `postencode_sample` comes later, as it belongs to batching.
    """
    encoder = spec.settings.task_encoder
    hook = Hook.PREENCODE if is_overridden(encoder, Hook.PREENCODE, Hook.POSTENCODE) else Hook.ENCODE
    encoding = [hook_of(encoder, hook)] * (own and is_overridden(encoder, hook))
    steps = [*map(step_of, before), *encoding, *map(step_of, after)]
    tolerances = [one.failure_tolerance for one in (*before, *after) if isinstance(one, MapDataset)]
    tolerance = min((one for one in tolerances if one), default=0) if tolerances else DEFAULT_TOLERANCE
    return _with_hooks(spec, {Hook.PREENCODE: None, Hook.ENCODE: None, hook: chained(steps, tolerance)})


def _packed(spec: DatasetSpec, wrapper: PackingDataset) -> DatasetSpec:
    if _delivers(spec) is not Hook.ENCODE:
        raise not_provided("PackingDataset around packs or batches", "put it around a dataset with batch_size=None")
    encoding = _encoding(spec)
    post = wrapper.sample_encoder
    hooks = {
        Hook.ENCODE: None,
        Hook.PREENCODE: chained(encoding) if encoding else None,
        Hook.POSTENCODE: None if post is None else chained([post], wrapper.sample_encoder_failure_tolerance),
        Hook.SELECT: chained([wrapper.pre_packer], wrapper.pre_packer_failure_tolerance),
        Hook.PACK: chained([wrapper.final_packer], wrapper.final_packer_failure_tolerance),
    }
    return _with_hooks(spec, hooks, packing_buffer_size=wrapper.buffer_size)


def _batched(spec: DatasetSpec, wrapper: BatchDataset | GroupBatchDataset) -> DatasetSpec:
    if _delivers(spec) is Hook.ENCODE_BATCH:
        raise not_provided(
            f"{type(wrapper).__name__} around batches", "pass batch_size=None to get_train_dataset, and batch once"
        )
    hooks = {Hook.BATCH: chained([wrapper.batcher], wrapper.failure_tolerance), Hook.ENCODE_BATCH: None}
    if isinstance(wrapper, BatchDataset):
        size: int | None = wrapper.batch_size
    else:
        size = wrapper.fixed_batch_size
        hooks[Hook.GROUP] = chained([wrapper.sample_group_key], wrapper.failure_tolerance)
    return _with_hooks(spec, hooks, batch_size=size, batch_drop_last=wrapper.drop_last)


def _shuffled(spec: DatasetSpec, wrapper: ShuffleBufferDataset) -> DatasetSpec:
    if _delivers(spec) is not Hook.ENCODE or not spec.shuffled:
        raise not_provided(
            "ShuffleBufferDataset around batches, packs or validation data",
            "pass shuffle_buffer_size= to get_train_dataset",
        )
    return spec.with_settings(shuffle_buffer_size=spec.settings.shuffle_buffer_size + wrapper.size)


# ---------------------------------------------------------------------------------------------------------------------
# Functions of wrappers, and several of them as one.


def step_of(wrapper: MapDataset | FilterDataset | IterMapDataset) -> UserStep:
    """Return the function of a wrapper."""
    if isinstance(wrapper, FilterDataset):
        keeps = wrapper.filter_fn

        def kept(value: Any) -> Any:
            if not keeps(value):
                raise SkipSample
            return value

        return kept
    if isinstance(wrapper, IterMapDataset):
        through = wrapper.iter_map_fn

        def each(value: Any) -> Generator[Any]:
            yield from through(iter((value,)))

        return each
    map_fn = wrapper.map_fn

    def mapped(value: Any) -> Any:
        made = map_fn(value)
        if made is None:
            raise FatalSampleError(f"MapDataset: {map_fn} returned None: return the sample, or raise SkipSample")
        return made

    return mapped


def chained(steps: Sequence[UserStep], tolerance: int = DEFAULT_TOLERANCE) -> UserStep:
    """Return one step of several; a tolerance other than the default counts for it."""

    def run(value: Any) -> Any:
        for place, step in enumerate(steps):
            value = step(value)
            if isinstance(value, GeneratorType):
                return _each(value, steps[place + 1 :]) if place + 1 < len(steps) else value
        return value

    if tolerance != DEFAULT_TOLERANCE:
        run.__failure_tolerance__ = tolerance  # type: ignore[attr-defined]
    return run


def _each(values: Generator[Any], steps: Sequence[UserStep]) -> Generator[Any]:
    """Yield the outputs of some steps on each of several values; SkipSample leaves out the one value."""
    for value in values:
        try:
            made = chained(steps)(value)
        except SkipSample:
            continue
        if isinstance(made, GeneratorType):
            yield from made
        else:
            yield made


# ---------------------------------------------------------------------------------------------------------------------
# Mixes of built datasets.


def _check_joinable(wrapper: BlendDataset | ConcatDataset, spec: DatasetSpec, first: Any) -> None:
    """Raise NotProvidedError for a dataset that cannot be part of a blend whose first one has these settings."""
    name = type(wrapper).__name__
    if _delivers(spec) is not Hook.ENCODE:
        raise not_provided(f"{name} of packs or batches", "mix samples, then put PackingDataset or BatchDataset around")
    if isinstance(wrapper, BlendDataset) is spec.ends:
        advice = "ConcatDataset reads datasets that end" if spec.ends else "BlendDataset mixes endless ones"
        raise not_provided(f"{name} of datasets for {spec.kind!r}", advice)
    _check_alike(name, first, spec.settings)


def _joined(wrapper: BlendDataset | ConcatDataset) -> DatasetSpec:
    """Return the datasets of a blend as one mix, each of whose samples goes through the functions of its own."""
    name = type(wrapper).__name__
    specs = [compose(dataset) for dataset, _ in wrapper.parts]
    first = specs[0].settings
    for spec in specs:
        _check_joinable(wrapper, spec, first)
    nodes = tuple(spec.mix.root for spec in specs)
    if isinstance(wrapper, BlendDataset):
        weights = tuple(WeightSchedule.constant(weight) for _, weight in wrapper.parts)
        mix = flatten(BlendNode(children=nodes, weights=weights, where=name))
    else:
        mix = flatten(Concat(children=nodes, where=name))
    opened = [dataclasses.replace(leaf, occurrence=0) for spec in specs for leaf in spec.leaves]
    leaves = number_leaves(
        [
            leaf if entry.weight is None else dataclasses.replace(leaf, weight=entry.weight)
            for leaf, entry in zip(opened, mix.leaves, strict=True)
        ]
    )
    owners = [place for place, spec in enumerate(specs) for _ in spec.leaves]
    encodings = [chained(_encoding(spec)) for spec in specs]
    of_leaf = {leaf.identity: encodings[place] for leaf, place in zip(leaves, owners, strict=True)}

    def encode(sample: Any) -> Any:
        key = meta_field(sample, "__restore_key__")
        own = of_leaf.get(key[0]) if key else None
        if own is None:
            raise FatalSampleError(f"{name}: a sample has lost its __restore_key__: leave it as it is when cooking")
        return own(sample)

    hooks = {Hook.ENCODE: encode, Hook.PREENCODE: None, Hook.POSTENCODE: None}
    same = all(spec.settings.task_encoder is first.task_encoder for spec in specs)
    whole = dataclasses.replace(specs[0], leaves=leaves, mix=mix)
    return whole if same else _with_hooks(whole, hooks)


def _check_alike(name: str, first: Any, other: Any) -> None:
    """Raise if the datasets of a blend were built with settings that one run cannot both have."""
    for field in dataclasses.fields(first):
        if field.name in ("task_encoder", "split_part", "filter", "conventions", "cache_pool"):
            continue
        one = getattr(first, field.name)
        two = getattr(other, field.name)
        if one != two:
            raise ConfigurationError(
                f"{name}: one dataset has {field.name}={one!r}, another {two!r}; expected the same"
            )
    for attribute in ("decoder", "cookers", "image_alpha"):
        one, two = (getattr(settings.task_encoder, attribute, None) for settings in (first, other))
        if one != two:
            raise ConfigurationError(
                f"{name}: the task encoders of its datasets have different {attribute}: give them the same, or mix "
                "the datasets by a metadataset"
            )
