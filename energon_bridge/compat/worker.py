"""`WorkerConfig` and the error handlers of megatron-energon.

Its settings for errors and logs become an `ErrorPolicy` here. Worker numbers are those of the running processes. In
energon_bridge no delivered data depends on them: code that uses them to choose data or seeds should use
`current_sample_index` instead.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NoReturn

import torch.utils.data

from energon_bridge import topology
from energon_bridge.compat.epath import EPath
from energon_bridge.compat.refused import NoSuchPart, not_provided
from energon_bridge.errors import SampleError
from energon_bridge.format.jsonl import is_jsonl
from energon_bridge.samples import SourceInfo
from energon_bridge.stream.policy import ErrorPolicy
from energon_bridge.task_encoder import current

logger = logging.getLogger(__name__)

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


class SampleException(SampleError, ValueError):  # noqa: N818 - the name that energon users know
    """User code says that a sample is bad."""

    @classmethod
    def from_sample_key(cls, sample_key: str) -> SampleException:
        """Return the exception for the sample with a key."""
        return cls(f"Sample {sample_key} failed")

    @classmethod
    def from_sample(cls, sample: Any, message: str = "") -> SampleException:
        """Return the exception for a sample, with a message."""
        key = sample.get("__key__") if isinstance(sample, dict) else getattr(sample, "__key__", None)
        return cls(f"Sample {key} failed{f': {message}' if message else ''}")


def log_exception(e: Exception, sample: Any, sources: Sequence[SourceInfo] | None = None) -> None:
    """Log a failed sample: the default of a worker configuration."""
    key = sample.get("__key__") if isinstance(sample, dict) else getattr(sample, "__key__", None)
    logger.error("sample %s (%s) failed: %r", key, "; ".join(map(str, sources or ())), e, exc_info=e)


def reraise_exception(e: Exception, _sample: Any, _sources: Sequence[SourceInfo] | None = None) -> None:
    """Raise the exception again, which stops the run."""
    raise e


class _Active:
    """The configuration of the loader whose hooks run, None outside of hooks."""

    def __get__(self, instance: Any, owner: type) -> Any:
        return current.CONFIG.get()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WorkerConfig(topology.WorkerConfig):
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
        topology.WorkerConfig.__post_init__(self)
        if self.worker_debug_path is not None or self.worker_log_level:
            raise not_provided(
                f"WorkerConfig(worker_debug_path={self.worker_debug_path!r}, worker_log_level={self.worker_log_level})",
                "no debug files are written. `energon which` names the samples of any step, and "
                "`energon analyze-debug` draws what is read when",
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
        return current.current_sample_index()

    @property
    def active_worker_batch_index(self) -> int:
        """The index of the microbatch that the current batch hook makes."""
        return current.current_batch_index()

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
        if not isinstance(other, topology.WorkerConfig):
            return NotImplemented
        return all(getattr(self, f.name) == getattr(other, f.name) for f in fields(topology.WorkerConfig))

    __hash__ = None


def _named_by_epath(source: SourceInfo) -> SourceInfo:
    if not isinstance(source.dataset_path, str) or is_jsonl(source.dataset_path):
        return source
    return source._replace(dataset_path=EPath(source.dataset_path))  # type: ignore[arg-type]  # as there


def error_policy(config: Any) -> ErrorPolicy | None:
    """Return the error policy that a worker configuration asks for; None for the default."""
    handler = getattr(config, "global_error_handler", log_exception)
    if handler is log_exception:
        return None
    if handler is reraise_exception:
        return ErrorPolicy(on_error="raise")

    def on_error(error: Exception) -> bool:
        sample, sources = current.FAILED.get()
        handler(error, sample, [_named_by_epath(source) for source in sources])
        return True

    return ErrorPolicy(on_error=on_error)
