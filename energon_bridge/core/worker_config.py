"""`WorkerConfig`: how a rank loads its share of the data, and what it finds of ranks and cores where it runs."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, fields
from typing import Any, Literal

from energon_bridge.core.errors import ConfigurationError, check_choice, check_number
from energon_bridge.core.registry import load, registered


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WorkerConfig:
    """How one data-parallel rank loads its share of the data.

    Examples:
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0, seed=42)
        >>> dataset = get_train_dataset("data/captions", batch_size=4, worker_config=config)

    Args:
        rank: *Data-parallel* rank; tensor-, context- and pipeline-parallel ranks of one replica share it. Default: the
            rank in `data_parallel_group`, else in torch.distributed if that is initialised, else 0.
        world_size: Data-parallel size; defaults as for `rank`.
        num_workers: Worker processes of this rank; 0 loads in the calling process, with threads.
        data_parallel_group: A `torch.distributed` process group; used to gather the state of all ranks.
        seed: Seed of the run: the same on all ranks.
        seed_offset: Added to `seed`; kept for code that was written for energon.
        prefetch_factor: Microbatches made ahead, per worker (with 0 workers: in all).
        persistent_workers: Keep the workers between validation passes.
        num_lanes: Logical streams of the run (L); default: `default_num_lanes`. A resumed run keeps that of its state.
        decode_threads: Threads that read and decode, per process; default: cores divided among the local processes.
        microbatches_per_global_batch: `global_batch_size / micro_batch_size`; makes L fit every legal number of ranks.
        pin_memory: Copy batches to pinned memory; default: where CUDA is available.
        device: Copy batches to this device as well, such as "cuda", while the step before runs. Default: they stay in
            host memory, for the trainer to copy.
        buffer_bytes: Bytes that the contents of samples waiting to be packed or grouped may take, per process. What is
            beyond is dropped and encoded again when it is needed; the stream stays the same.
        max_worker_restarts: How often dead workers are started again in one run before `WorkerDiedError`.
        start_method: How workers are started: "fork"; or "forkserver", which takes seconds once, or "spawn", seconds
            per worker: both need a task encoder that can be pickled, but take over no lock of a thread of this process.
        worker_engine: What workers are: a "process" of this machine, or "ray", an actor on a Ray cluster. Default: what
            the environment variable ENERGON_WORKER_ENGINE says, else "process".
        ray_options: Of the actors, by name; see "CPU nodes" among the guides.
        serves: For a process that is no data-parallel rank, but works for some, as an encoder on a grid of its own does
            (`make_roles`): how many, from `rank` on. In each step it gets their microbatches, one after the other. It
            talks to no other process, and its state is theirs.
    """

    rank: int | None = None
    world_size: int | None = None
    num_workers: int = 4
    data_parallel_group: Any = None
    seed: int = 0
    seed_offset: int = 0
    prefetch_factor: int = 2
    persistent_workers: bool = True
    num_lanes: int | None = None
    decode_threads: int | None = None
    microbatches_per_global_batch: int | None = None
    pin_memory: bool | None = None
    device: Any = None
    buffer_bytes: int = 1 << 30
    max_worker_restarts: int = 100
    start_method: Literal["fork", "forkserver", "spawn"] = "fork"
    worker_engine: str | None = None
    ray_options: dict[str, Any] | None = None
    serves: int | None = None

    def __post_init__(self) -> None:
        rank, world_size = _rank_and_size(self.data_parallel_group)
        if (self.rank is None) != (self.world_size is None):
            raise ConfigurationError("WorkerConfig: give rank and world_size together, or neither")
        # Frozen for everyone else: whoever holds a configuration can rely on resolved numbers.
        object.__setattr__(self, "rank", rank if self.rank is None else self.rank)
        object.__setattr__(self, "world_size", world_size if self.world_size is None else self.world_size)
        for name in ("rank", "world_size", "seed", "seed_offset"):
            object.__setattr__(self, name, check_number(f"WorkerConfig: {name}", getattr(self, name), None))
        if not 0 <= self.dp_rank < self.dp_size:
            raise ConfigurationError(f"WorkerConfig: rank {self.rank} is not in range({self.world_size})")
        minima = {"num_workers": 0, "prefetch_factor": 1, "buffer_bytes": 0, "max_worker_restarts": 0}
        optional = {"num_lanes": 1, "decode_threads": 1, "microbatches_per_global_batch": 1, "serves": 1}
        for name, least in (minima | optional).items():
            number = check_number(f"WorkerConfig: {name}", getattr(self, name), least, optional=name in optional)
            object.__setattr__(self, name, number)
        if self.dp_rank + self.in_a_row > self.dp_size:
            raise ConfigurationError(
                f"WorkerConfig: serves={self.serves} ranks from rank {self.rank} on, but there are {self.world_size}"
            )
        check_choice("WorkerConfig: start_method", self.start_method, ("fork", "forkserver", "spawn"))
        named = self.worker_engine or os.environ.get("ENERGON_WORKER_ENGINE") or "process"
        where = "worker_engine" if self.worker_engine else "the environment variable ENERGON_WORKER_ENGINE"
        check_choice(f"WorkerConfig: {where}", named, ("process", "ray"))
        object.__setattr__(self, "worker_engine", named)

    @classmethod
    def default_worker_config(
        cls, num_workers: int = 4, data_parallel_group: Any = None, **kwargs: Any
    ) -> WorkerConfig:
        """Return a configuration for the current process: its rank from torch.distributed where that is initialised."""
        return cls(num_workers=num_workers, data_parallel_group=data_parallel_group, **kwargs)

    @property
    def dp_rank(self) -> int:
        """The data-parallel rank, resolved."""
        assert self.rank is not None
        return self.rank

    @property
    def dp_size(self) -> int:
        """The data-parallel world size, resolved."""
        assert self.world_size is not None
        return self.world_size

    @property
    def processes(self) -> int:
        """The processes that make the microbatches of this rank."""
        return max(1, self.num_workers)

    @property
    def in_a_row(self) -> int:
        """Microbatches of a step that this process gets."""
        return self.serves or 1

    @property
    def run_seed(self) -> int:
        """The seed of the order."""
        return self.seed + self.seed_offset

    @property
    def threads(self) -> int:
        """The decode threads of one of these processes."""
        if self.decode_threads is not None:
            return self.decode_threads
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return max(1, available_cores() // max(1, local_ranks * self.processes))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WorkerConfig):
            return NotImplemented
        return all(getattr(self, f.name) == getattr(other, f.name) for f in fields(self))

    __hash__ = None  # type: ignore[assignment]


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def distributed() -> Any:
    """Return torch.distributed where it is initialised, else None."""
    # Asking must not import torch: where it was never imported, nothing can be initialised.
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() and module.is_initialized() else None


def trainer_groups() -> list[Any]:
    """Return what knows the process groups of the trainers that this process has imported (`registry.toml`, ranks)."""
    # What was never imported cannot be initialised, and importing megatron-core takes seconds.
    return [load("ranks", name) for name in registered("ranks") if name in sys.modules]


def _rank_and_size(group: Any) -> tuple[int, int]:
    if group is not None:
        return int(group.rank()), int(group.size())
    group = distributed()
    return (0, 1) if group is None else (group.get_rank(), group.get_world_size())
