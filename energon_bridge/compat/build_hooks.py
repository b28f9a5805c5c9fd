"""Runs the `build_…` hooks that a task encoder overrides, and builds what they describe.

A hook wraps datasets. The wrappers are read from the outside in, and compared with what megatron-energon's own hooks
would build. Other batch sizes, buffers, lengths and limits are accepted, and functions (`MapDataset` and its like) of
samples before and after they are encoded, or in place of that, and of batches; other weights, another order, or an
unknown wrapper raises an error that names it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from energon_bridge.compat import factories, installed, loading
from energon_bridge.compat.composed import FUNCTIONS, encoded_by, mapped
from energon_bridge.compat.encoders import HOOKS, BatchedDataset, DefaultTaskEncoder, EncodedDataset
from energon_bridge.compat.factories import OpenedDataset
from energon_bridge.compat.wrapped import (
    BlendDataset,
    ConcatDataset,
    EpochizeDataset,
    LimitDataset,
    RepeatDataset,
    ShuffleBufferDataset,
    Wrapper,
)
from energon_bridge.core.errors import NotProvidedError
from energon_bridge.core.loader.dataset_spec import DatasetSpec


def get_train_dataset(path: Any, **kwargs: Any) -> DatasetSpec:
    """Open a dataset for training: `energon_bridge.get_train_dataset` with megatron-energon's arguments."""
    return _as_built(loading.get_train_dataset(path, **kwargs), kwargs.get("task_encoder"), "build_train_datasets")


def get_val_dataset(path: Any, **kwargs: Any) -> DatasetSpec:
    """Open a dataset for validation: `energon_bridge.get_val_dataset` with megatron-energon's arguments."""
    return _as_built(loading.get_val_dataset(path, **kwargs), kwargs.get("task_encoder"), "build_val_datasets")


def get_val_datasets(path: Any, **kwargs: Any) -> list[tuple[DatasetSpec, OpenedDataset]]:
    """Open the datasets of a mix for validation one by one, each with its paths and subflavors."""
    encoder = kwargs.get("task_encoder")
    pairs = factories.get_val_datasets(path, **kwargs)
    return [(_as_built(dataset, encoder, "build_val_datasets"), opened) for dataset, opened in pairs]


def as_programs_have_it(dataset: DatasetSpec) -> DatasetSpec:
    """Return a dataset that a command has opened as our builders here open it; without `install()`, unchanged."""
    if installed() is None:
        return dataset
    encoder = dataset.settings.task_encoder
    hook = "build_val_datasets" if dataset.kind == "finite" else "build_train_datasets"
    return _as_built(loading.as_opened_here(dataset), encoder, hook)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Built:
    """The pipeline that a `build_…` hook has put together out of wrappers.

    Attributes:
        sources: Of each dataset its number in the mix, its repetitions (None: forever), and its weight, 1 in all.
        joined: How the datasets are combined.
        cycled: Whether it repeats without end.
        settings: Fields of `RunSettings`.
        of_cooked: Wrappers with functions of samples before they are encoded, the innermost first.
        encodes: Whether the encoder's own hook encodes samples; if not, functions do.
        of_samples, of_batches: Wrappers with functions of encoded samples, and of batches, the innermost first.
    """

    sources: tuple[tuple[int, float | None, float], ...]
    joined: str
    cycled: bool
    settings: dict[str, Any]
    of_cooked: list[Any]
    encodes: bool
    of_samples: list[Any]
    of_batches: list[Any]


def _as_built(spec: DatasetSpec, encoder: Any, hook: str) -> DatasetSpec:
    """Return the dataset with what the encoder's overridden hooks change; raises for what the engine cannot do."""
    encoder = DefaultTaskEncoder() if encoder is None else encoder
    if not isinstance(encoder, DefaultTaskEncoder) or not _overridden(encoder):
        return spec
    loaded = factories.loaded_datasets(spec.with_settings(batch_size=None, packing_buffer_size=None))
    arguments: dict[str, Any] = {
        "datasets": loaded.datasets,
        "worker_config": spec.worker_config,
        "batch_size": spec.settings.batch_size,
        "batch_drop_last": spec.settings.batch_drop_last,
        "packing_buffer_size": spec.settings.packing_buffer_size,
    }
    if hook == "build_val_datasets":
        arguments["limit"] = spec.settings.limit
    else:
        arguments["virtual_epoch_length"] = spec.settings.virtual_epoch_length or 0
        arguments["shuffle_buffer_size"] = spec.settings.shuffle_buffer_size or None
        arguments |= {"blend_mode": loaded.blend_mode, "repeat": not spec.ends}
    built = _read(getattr(encoder, hook)(**arguments), spec, encoder)
    expected = _read(getattr(_Unchanged(), hook)(**arguments), spec, encoder)
    for name in ("sources", "joined", "cycled"):
        there = getattr(built, name)
        here = getattr(expected, name)
        if not _same(there, here):
            raise _refused(encoder, f"its datasets are {_told(built)}, but the mix has {_told(expected)}")
    changed = {name: value for name, value in built.settings.items() if value != expected.settings[name]}
    spec = spec.with_settings(**changed) if changed else spec
    if built.of_cooked or not built.encodes:
        spec = encoded_by(spec, built.of_cooked, built.of_samples, own=built.encodes)
    else:
        for wrapper in built.of_samples:
            spec = mapped(spec, wrapper, of_samples=True)
    for wrapper in built.of_batches:
        spec = mapped(spec, wrapper)
    return spec


_OWN = {name: vars(DefaultTaskEncoder)[name] for name in HOOKS}
_Unchanged: type[DefaultTaskEncoder] = type("DefaultTaskEncoder", (DefaultTaskEncoder,), _OWN)
"""A task encoder with megatron-energon's own hooks, also if a program has replaced those of the class."""


def _overridden(encoder: DefaultTaskEncoder) -> list[str]:
    return [name for name in HOOKS if getattr(type(encoder), name) is not _OWN[name] or name in vars(encoder)]


def _read(made: Any, spec: DatasetSpec, encoder: Any) -> _Built:
    """Return the pipeline that wrappers describe, reading them from the outermost inwards."""
    settings = {"virtual_epoch_length": None, "limit": None, "shuffle_buffer_size": 0}
    while isinstance(made, EpochizeDataset | LimitDataset):
        settings["virtual_epoch_length" if isinstance(made, EpochizeDataset) else "limit"] = made.length
        made = made.dataset
    of_batches, made = _functions(made)
    batched = _expect(made, BatchedDataset, encoder)
    settings |= {"batch_size": batched.batch_size, "batch_drop_last": batched.drop_last}
    settings["packing_buffer_size"] = batched.packing_buffer_size
    of_samples, made = _functions(batched.dataset)
    encodes = isinstance(made, EncodedDataset) or not of_samples
    of_cooked: list[Any] = []
    if encodes:
        of_cooked, made = _functions(_expect(made, EncodedDataset, encoder).dataset)
    if isinstance(made, ShuffleBufferDataset):
        settings["shuffle_buffer_size"], made = made.size, made.dataset
    cycled = isinstance(made, RepeatDataset) and isinstance(made.dataset, BlendDataset | RepeatDataset)
    if cycled:
        made = made.dataset
    parts = list(made.parts) if isinstance(made, BlendDataset | ConcatDataset) else [(made, 1.0)]
    total = math.fsum(weight for _, weight in parts)
    sources = []
    for part, weight in parts:
        repeats: float | None = 1
        if isinstance(part, RepeatDataset):
            repeats = part.repeats
            part = part.dataset
        number = _number_in_mix(part, spec)
        if number is None:
            raise _refused(encoder, f"it put {type(part).__name__} where a dataset of the mix is expected")
        sources.append((number, repeats, weight / total if total else 0.0))
    joined = type(made).__name__ if len(parts) > 1 else ""
    return _Built(
        sources=tuple(sources),
        joined=joined,
        cycled=cycled,
        settings=settings,
        of_cooked=of_cooked,
        encodes=encodes,
        of_samples=of_samples,
        of_batches=of_batches,
    )


def _functions(made: Any) -> tuple[list[Any], Any]:
    """Return the wrappers with functions around a dataset, the innermost first, and what is within."""
    wrappers: list[Any] = []
    while isinstance(made, FUNCTIONS):
        wrappers.insert(0, made)
        made = made.dataset
    return wrappers, made


def _number_in_mix(part: Any, spec: DatasetSpec) -> int | None:
    """Return the number of a dataset in the mix, None if it is not part of it."""
    if not isinstance(part, DatasetSpec) or len(part.leaves) != 1:
        return None
    return next((place for place, leaf in enumerate(spec.leaves) if leaf is part.leaves[0]), None)


def _expect(made: Any, kind: type[Wrapper], encoder: Any) -> Any:
    if not isinstance(made, kind):
        verb = "batched by build_batch" if kind is BatchedDataset else "encoded by build_encode_sample"
        raise _refused(encoder, f"it put {type(made).__name__} where samples {verb} are expected")
    return made


def _same(there: Any, here: Any) -> bool:
    if not isinstance(there, tuple):
        return bool(there == here)
    return len(there) == len(here) and all(
        one[:2] == other[:2] and math.isclose(one[2], other[2], rel_tol=1e-6, abs_tol=1e-12)
        for one, other in zip(there, here, strict=True)
    )


def _told(built: _Built) -> str:
    times: dict[float | None, str] = {None: "forever", 1: "once"}
    return ", ".join(
        f"number {place} {times.get(repeats, f'{repeats} times')} with weight {weight:.4g}"
        for place, repeats, weight in built.sources
    ) + (f" ({built.joined}{', repeated' if built.cycled else ''})" if built.joined else "")


def _refused(encoder: Any, complaint: str) -> Exception:
    return NotProvidedError(
        f"{type(encoder).__qualname__} overrides {' and '.join(_overridden(encoder))} in a way that has no counterpart "
        f"in energon_bridge: {complaint}. Describe a mix with a metadataset, a Blender or a dict, and process samples "
        "in the other hooks of the task encoder."
    )
