"""The builders and loaders with megatron-energon's arguments, translated to ours.

Arguments without an equivalent raise an error; those without effect are logged once. The order of samples is ours.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any

from energon_bridge import datasets
from energon_bridge.compat import av, encoders
from energon_bridge.compat.dataset_classes import IMAGE_DECODE
from energon_bridge.compat.epath import EPath
from energon_bridge.compat.finder import trusted
from energon_bridge.compat.refused import not_provided
from energon_bridge.compat.worker import error_policy
from energon_bridge.compat.wrapped import make_loader
from energon_bridge.errors import ConfigurationError
from energon_bridge.format.dataset import PreparedDataset
from energon_bridge.format.join import JoinedDataset
from energon_bridge.format.jsonl import JsonlDataset
from energon_bridge.loader.savable import SavableDataLoader
from energon_bridge.loader.spec import DatasetSpec
from energon_bridge.mix.leaves import OpenLeaf
from energon_bridge.task_encoder import DefaultTaskEncoder, SampleDecoder

logger = logging.getLogger(__name__)

_DECODER_ARGUMENTS = ("image_decode", "av_decode", "video_decode_audio")


def get_train_dataset(path: Any, **kwargs: Any) -> DatasetSpec:
    """Open a dataset for training: `energon_bridge.get_train_dataset` with megatron-energon's arguments."""
    said = _said_of_samples(kwargs)
    return _as_energon(datasets.get_train_dataset(_source(path), **_translated(kwargs)), **said)


def get_val_dataset(path: Any, **kwargs: Any) -> DatasetSpec:
    """Open a dataset for validation: `energon_bridge.get_val_dataset` with megatron-energon's arguments."""
    said = _said_of_samples(kwargs)
    return _as_energon(datasets.get_val_dataset(_source(path), **_validation(kwargs)), **said)


def get_val_datasets(path: Any, **kwargs: Any) -> list[tuple[DatasetSpec, OpenLeaf]]:
    """Open the datasets of a mix for validation, one by one."""
    said = _said_of_samples(kwargs)
    found = datasets.get_val_datasets(_source(path), **_validation(kwargs))
    return [(_as_energon(dataset, **said), source) for dataset, source in found]


def _said_of_samples(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Take the arguments that describe the samples out of the keyword arguments."""
    return {name: kwargs.pop(name, None) for name in ("sample_type", "subflavors")}


def _as_energon(dataset: DatasetSpec, sample_type: type | None, subflavors: Mapping[str, Any] | None) -> DatasetSpec:
    """Return a dataset that validates, counts and ends as in megatron-energon.

    Args:
        dataset: From one of our builders.
        sample_type: Required type of all samples; None: any.
        subflavors: Added to those of each sample.
    """
    leaves = dataset.leaves
    for leaf in leaves:
        found = getattr(leaf.dataset, "sample_type", None)
        if sample_type is not None and not (isinstance(found, type) and issubclass(found, sample_type)):
            name = getattr(found, "__name__", "joined")
            raise ConfigurationError(
                f"{leaf.dataset.path}: its samples are {name}, and sample_type= asks for {sample_type.__name__}"
            )
    if subflavors:
        leaves = tuple(dataclasses.replace(leaf, dataset=_flavored(leaf.dataset, subflavors)) for leaf in leaves)
    leaves = tuple(dataclasses.replace(leaf, dataset=_named_by_epath(leaf.dataset)) for leaf in leaves)
    return dataclasses.replace(dataset, leaves=leaves, as_energon=True)


def _named_by_epath(dataset: Any) -> Any:
    """Return a dataset whose samples name it by an EPath as their source; JSONL files keep a string, as there."""
    if isinstance(dataset, JoinedDataset):
        parts = (dataclasses.replace(part, dataset=_named_by_epath(part.dataset)) for part in dataset.parts)
        return dataclasses.replace(dataset, parts=tuple(parts))
    if isinstance(dataset, JsonlDataset):
        return dataset
    return dataclasses.replace(dataset, source_path=EPath(dataset.path))


def get_savable_loader(dataset: Any, **kwargs: Any) -> SavableDataLoader:
    """Return a loader whose position can be saved and restored."""
    source = _source(dataset)
    if isinstance(source, str):
        source = get_train_dataset(source, batch_size=1, worker_config=kwargs.get("worker_config"))
    return make_loader(source, **kwargs)


def get_loader(dataset: Any, **kwargs: Any) -> SavableDataLoader:
    """Return a loader."""
    source = _source(dataset)
    if isinstance(source, str):
        source = get_train_dataset(source, batch_size=1, worker_config=kwargs.get("worker_config"))
    return make_loader(source, **kwargs)


def _flavored(dataset: Any, subflavors: Mapping[str, Any]) -> Any:
    if not isinstance(dataset, PreparedDataset):
        raise not_provided("subflavors= of a join", "name subflavors in the metadataset")
    return dataclasses.replace(dataset, subflavors={**dataset.subflavors, **subflavors})


def _source(path: Any) -> Any:
    """Return a path object (`EPath`, for example) as a string; anything else unchanged."""
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def _validation(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    # Used in training only; megatron-energon accepts it everywhere.
    return _translated({name: value for name, value in kwargs.items() if name != "parallel_shard_iters"})


def _translated(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the keyword arguments of megatron-energon's builders to ours."""
    ours = dict(kwargs)
    encoder = ours.get("task_encoder")
    _refuse_pipeline_hooks(encoder)
    if ours.pop("handler", None) is not None:
        logger.warning("handler= has no effect in megatron-energon either; use WorkerConfig(global_error_handler=…)")
    decoder = {name: ours.pop(name) for name in _DECODER_ARGUMENTS if name in ours}
    IMAGE_DECODE.set(decoder.get("image_decode", "torchrgb"))
    if not ours.pop("auto_decode", True):
        ours["task_encoder"] = with_decoder(encoder, None)
    elif decoder:
        ours["task_encoder"] = with_decoder(encoder, av.SampleDecoder(**decoder))
    # megatron-energon reads any pickle; here only those of plain values are read. Sound has its own type.
    encoder = ours.get("task_encoder")
    read = DefaultTaskEncoder.decoder if encoder is None else getattr(encoder, "decoder", None)
    if type(read) is SampleDecoder:
        ours["task_encoder"] = with_decoder(
            encoder, dataclasses.replace(read, read_pickles=True, av_class=av.AVDecoder)
        )
    ours.setdefault("trust_remote_code", trusted())
    if "error_policy" not in ours:
        ours["error_policy"] = error_policy(ours.get("worker_config"))
    return ours


def with_decoder(encoder: Any, decoder: Any) -> Any:
    """Return a copy of an encoder with another decoder; without one, the default encoder with it."""
    encoder = DefaultTaskEncoder() if encoder is None else copy.copy(encoder)  # do not change the caller's
    encoder.decoder = decoder
    return encoder


def _refuse_pipeline_hooks(encoder: Any) -> None:
    if isinstance(encoder, encoders.DefaultTaskEncoder):
        return  # `hooks` runs them
    for name in encoders.HOOKS:
        if getattr(encoder, name, None) is not None:
            raise not_provided(
                f"overriding {name} ({type(encoder).__qualname__})",
                "there are no dataset wrappers to put together. Say a mix by a metadataset, a Blender or a dict, and "
                "what becomes of samples by the other hooks of the task encoder",
            )
