"""`WorkerConfig`, error handlers, builders and loaders with megatron-energon's arguments, translated to ours.

Arguments without an equivalent raise an error; those without effect are logged once. The order of samples is ours.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NoReturn

import torch.utils.data

from energon_bridge.compat import decoders, encoders, trusted
from energon_bridge.compat.composed import make_loader
from energon_bridge.compat.conventions import EnergonConventions
from energon_bridge.compat.dataset_classes import IMAGE_DECODE
from energon_bridge.compat.epath import EPath
from energon_bridge.compat.table import NoSuchPart, not_provided
from energon_bridge.core import datasets, worker_config
from energon_bridge.core.encoder import SampleDecoder, hooks
from energon_bridge.core.encoder.checks import check_encoder
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.format.dataset import PreparedDataset
from energon_bridge.core.format.join import JoinedDataset
from energon_bridge.core.format.jsonl import JsonlDataset, is_jsonl
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.core.mix.leaves import OpenLeaf
from energon_bridge.core.samples import SourceInfo
from energon_bridge.core.samples.sample import meta_field
from energon_bridge.core.stream.policy import ErrorPolicy

# ---------------------------------------------------------------------------------------------------------------------
# `WorkerConfig` and the error handlers of megatron-energon.
#
# Its settings for errors and logs become an `ErrorPolicy` here. Worker numbers are those of the running processes. In
# energon_bridge no delivered data depends on them: code that uses them to choose data or seeds should use
# `current_sample_index` instead.


ErrorHandler = Callable[[Exception, Any, Sequence[SourceInfo] | None], None]


_LOADERS_DO = "loaders run hooks, and say by themselves what is active"
_CALLED_BY_WRAPPERS = {
    "assert_worker": "hooks run in worker processes, or in the training process without any",
    "worker_activate": _LOADERS_DO,
    "worker_deactivate": _LOADERS_DO,
    "worker_id_offset": "workers are numbered from 0",
    "worker_log": "no debug files are written. Use the standard logging module",
    "worker_pop_sample_index": _LOADERS_DO,
    "worker_push_sample_index": _LOADERS_DO,
}


def log_exception(e: Exception, sample: Any, sources: Sequence[SourceInfo] | None = None) -> None:
    """Log a failed sample: the default of a worker configuration."""
    key = meta_field(sample, "__key__")
    logger.error("sample %s (%s) failed: %r", key, "; ".join(map(str, sources or ())), e, exc_info=e)


def reraise_exception(e: Exception, _sample: Any, _sources: Sequence[SourceInfo] | None = None) -> None:
    """Raise the exception again, which stops the run."""
    raise e


class _Active:
    """The configuration of the loader whose hooks run, None outside of hooks."""

    def __get__(self, instance: Any, owner: type) -> Any:
        return hooks.CONFIG.get()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WorkerConfig(worker_config.WorkerConfig):
    """A worker configuration that also accepts megatron-energon's arguments.

    Args:
        worker_debug_path, worker_log_level: Raise NotProvidedError: `energon which` tells what a step reads.
        global_error_handler: Called for each failure with the exception, the input of the hook (for a sample that
            cannot be read, a dict with its key) and its sources. The sample is skipped unless the handler raises.
            Default: log the failure.
        restore_error_handler: No effect: restoring reads no sample.
    """

    active_worker_config: ClassVar[Any] = _Active()

    worker_debug_path: str | None = None
    worker_log_level: int = 0
    global_error_handler: ErrorHandler = log_exception
    restore_error_handler: ErrorHandler = reraise_exception

    def __post_init__(self) -> None:
        worker_config.WorkerConfig.__post_init__(self)
        if self.worker_debug_path is not None or self.worker_log_level:
            raise not_provided(
                f"WorkerConfig(worker_debug_path={self.worker_debug_path!r}, worker_log_level={self.worker_log_level})",
                "this package writes no debug files. `energon which` names the samples of any step, and "
                "`energon analyze-debug` draws which samples are read when",
            )

    def global_rank(self) -> int:
        """Return the rank in torch.distributed; without a data-parallel group, the rank of this configuration."""
        if self.data_parallel_group is None:
            return self.dp_rank
        return torch.distributed.get_global_rank(self.data_parallel_group, self.dp_rank)

    def config(self) -> dict[str, Any]:
        """Return the ranks and sizes that determine who loads what."""
        group = self.data_parallel_group
        return {
            "rank": self.dp_rank,
            "world_size": self.dp_size,
            "num_workers": self.num_workers,
            "data_parallel_group": None if group is None else group.size(),
        }

    def should_log(self, level: int) -> bool:
        """Return whether a level is 0: higher levels write no logs."""
        return level <= 0

    @property
    def active_worker_sample_index(self) -> int:
        """The index of the sample that the current hook processes."""
        return hooks.current_sample_index()

    @property
    def active_worker_batch_index(self) -> int:
        """The index of the microbatch that the current batch hook makes."""
        return hooks.current_batch_index()

    def rank_worker_id(self) -> int:
        """Return the number of this worker process on its rank; 0 in the training process."""
        info = torch.utils.data.get_worker_info()
        return 0 if info is None else info.id

    def global_worker_id(self, override_local_worker_id: int | None = None) -> int:
        """Return the number of this (or another) worker of the rank among those of all ranks."""
        local = self.rank_worker_id() if override_local_worker_id is None else override_local_worker_id
        return self.dp_rank * self.num_workers + local

    def worker_seed(self, override_local_worker_id: int | None = None) -> int:
        """Return the seed that megatron-energon gives this worker, of 32 bits."""
        number = self.global_worker_id(override_local_worker_id) if self.num_workers else self.dp_rank
        return int.from_bytes(hashlib.sha1(f"{number},{self.seed_offset}".encode()).digest()) & 0xFFFFFFFF

    def __getattr__(self, name: str) -> NoReturn:
        """Raise an error that explains the methods megatron-energon's wrappers call."""
        if name in _CALLED_BY_WRAPPERS:
            raise NoSuchPart(str(not_provided(f"WorkerConfig.{name}", _CALLED_BY_WRAPPERS[name])))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, worker_config.WorkerConfig):
            return NotImplemented
        return all(getattr(self, f.name) == getattr(other, f.name) for f in fields(worker_config.WorkerConfig))

    __hash__ = None


# ---------------------------------------------------------------------------------------------------------------------
# What samples say of their sources.


def _named_by_epath(source: SourceInfo) -> SourceInfo:
    if not isinstance(source.dataset_path, str) or is_jsonl(source.dataset_path):
        return source
    return source._replace(dataset_path=EPath(source.dataset_path))  # type: ignore[arg-type]  # as there


def error_policy(config: Any) -> ErrorPolicy | None:
    """Return the error policy that a worker configuration asks for; None for the default."""
    handler = getattr(config, "global_error_handler", log_exception)
    if handler is log_exception:
        return None
    return ErrorPolicy(on_error="raise" if handler is reraise_exception else _Handler(handler))


@dataclass(frozen=True, slots=True)
class _Handler:
    """Calls the handler of a worker configuration; equal for equal handlers, so that datasets can be blended."""

    handler: ErrorHandler

    def __call__(self, error: Exception) -> bool:
        sample, sources = hooks.FAILED.get()
        self.handler(error, sample, [_named_by_epath(source) for source in sources])
        return True


# ---------------------------------------------------------------------------------------------------------------------
# The builders and loaders with megatron-energon's arguments, translated to ours.


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
    pairs = datasets.get_val_datasets(_source(path), **_validation(kwargs))
    return [(_as_energon(dataset, **said), source) for dataset, source in pairs]


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
        loaded_type = getattr(leaf.dataset, "sample_type", None)
        if sample_type is not None and not (isinstance(loaded_type, type) and issubclass(loaded_type, sample_type)):
            name = getattr(loaded_type, "__name__", "joined")
            raise ConfigurationError(
                f"{leaf.dataset.path}: its samples are {name}, but sample_type= requests {sample_type.__name__}"
            )
    if subflavors:
        leaves = tuple(dataclasses.replace(leaf, dataset=_flavored(leaf.dataset, subflavors)) for leaf in leaves)
    leaves = tuple(dataclasses.replace(leaf, dataset=_with_epath(leaf.dataset)) for leaf in leaves)
    return dataclasses.replace(dataset.with_settings(conventions=EnergonConventions()), leaves=leaves)


def as_opened_here(dataset: DatasetSpec) -> DatasetSpec:
    """Return a dataset that a command has opened as the builders here open it, with the default arguments."""
    encoder = _translated({"task_encoder": dataset.settings.task_encoder})["task_encoder"]
    names = (field.name for field in fields(worker_config.WorkerConfig))
    config = WorkerConfig(**{name: getattr(dataset.worker_config, name) for name in names})
    dataset = dataclasses.replace(dataset.with_settings(task_encoder=encoder), worker_config=config)
    return _as_energon(dataset, None, None).with_settings(conventions=EnergonConventions(shown=True))


def _with_epath(dataset: Any) -> Any:
    """Return a dataset whose samples name it by an EPath as their source; JSONL files keep a string, as there."""
    if isinstance(dataset, JoinedDataset):
        parts = (dataclasses.replace(part, dataset=_with_epath(part.dataset)) for part in dataset.parts)
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
    return get_savable_loader(dataset, **kwargs)


def _flavored(dataset: Any, subflavors: Mapping[str, Any]) -> Any:
    if not isinstance(dataset, PreparedDataset):
        raise not_provided("subflavors= of a join", "set subflavors in the metadataset")
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
    if isinstance(encoder, type):  # before its hooks are looked at, or its decoder is set
        check_encoder(encoder)
    _refuse_pipeline_hooks(encoder)
    if ours.pop("handler", None) is not None:
        logger.warning("handler= has no effect, as in megatron-energon; use WorkerConfig(global_error_handler=…)")
    decoder = {name: ours.pop(name) for name in _DECODER_ARGUMENTS if name in ours}
    IMAGE_DECODE.set(decoder.get("image_decode", "torchrgb"))
    if not ours.pop("auto_decode", True):
        ours["task_encoder"] = with_decoder(encoder, None)
    elif decoder:
        ours["task_encoder"] = with_decoder(encoder, decoders.SampleDecoder(**decoder))
    # megatron-energon reads any pickle; here only those of plain values are read. Sound has its own type.
    encoder = ours.get("task_encoder")
    read = encoders.DefaultTaskEncoder.decoder if encoder is None else getattr(encoder, "decoder", None)
    if type(read) is SampleDecoder:
        ours["task_encoder"] = with_decoder(
            encoder, dataclasses.replace(read, read_pickles=True, av_class=decoders.AVDecoder)
        )
    ours.setdefault("trust_remote_code", trusted())
    if "error_policy" not in ours:
        ours["error_policy"] = error_policy(ours.get("worker_config"))
    return ours


def with_decoder(encoder: Any, decoder: Any) -> Any:
    """Return a copy of an encoder with another decoder; without one, the default encoder with it."""
    encoder = encoders.DefaultTaskEncoder() if encoder is None else copy.copy(encoder)  # do not change the caller's
    encoder.decoder = decoder
    return encoder


def _refuse_pipeline_hooks(encoder: Any) -> None:
    if isinstance(encoder, encoders.DefaultTaskEncoder):
        return  # `build_hooks` runs them
    for name in encoders.HOOKS:
        if getattr(encoder, name, None) is not None:
            raise not_provided(
                f"overriding {name} ({type(encoder).__qualname__})",
                "there are no dataset wrappers to combine. Describe a mix with a metadataset, a Blender or a dict, and "
                "process samples in the other hooks of the task encoder",
            )
