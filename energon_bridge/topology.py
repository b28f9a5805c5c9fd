"""Who delivers which lane: ranks, workers, and the worker configuration.

A run has `num_lanes` lanes (L). Microbatch m of the global sequence comes from lane `m mod L`. The functions here say,
for a run that stands at microbatch m0 on R ranks, which rank and which worker own a lane and what each rank delivers in
each step. They are pure integers: nothing in a lane depends on them, so changing R or the number of workers W changes
who delivers a microbatch and nothing else.

Ownership is fixed when a loader starts. If R divides L, lane l belongs to rank `(l - m0) mod R`, so that rank 0 is
always the next to deliver; otherwise to rank `l mod R`. A step delivers the next R microbatches of the global sequence.
If R does not divide L, it stops at the end of each lap, once round the L lanes, and ranks without a microbatch deliver
a masked one. Of the lanes of a rank, in ascending order, lane j belongs to worker `j mod W`.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from energon_bridge.errors import ConfigurationError, TooManyRanksError, check_number
from energon_bridge.registry import load, registered

logger = logging.getLogger(__name__)

_LANE_UNIT = 24
"""Divides the default number of lanes: it is shared evenly by 1, 2, 3, 4, 6, 8, 12 and 24 ranks."""
_FEWEST_LANES, _MANY_LANES = 48, 1024


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
        optional = {"num_lanes": 1, "decode_threads": 1, "microbatches_per_global_batch": 1}
        for name, least in (minima | optional).items():
            number = check_number(f"WorkerConfig: {name}", getattr(self, name), least, optional=name in optional)
            object.__setattr__(self, name, number)
        if self.start_method not in ("fork", "forkserver", "spawn"):
            raise ConfigurationError(
                f"WorkerConfig: start_method must be 'fork', 'forkserver' or 'spawn', got {self.start_method!r}"
            )
        named = self.worker_engine or os.environ.get("ENERGON_WORKER_ENGINE") or "process"
        if named not in ("process", "ray"):
            where = "worker_engine" if self.worker_engine else "the environment variable ENERGON_WORKER_ENGINE"
            raise ConfigurationError(f"WorkerConfig: {where} must be 'process' or 'ray', got {named!r}")
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


def default_num_lanes(world_size: int, group_size: int | None = None) -> int:
    """Choose L for a new run.

    Neither the workers nor the size of the data matter, so that runs which differ in them only are one sequence.

    Args:
        world_size: Data-parallel size R; it matters only if no global batch size is known.
        group_size: Microbatches per global batch G, or None.

    Returns:
        With G: the smallest multiple of G that is at least `max(48, min(4 G, 1024))`, the same for every R that
        divides G. Without: the smallest multiple of lcm(24, R) that is at least 48, or 4 R if R does not divide 24.
        So each rank has lanes for 4 workers or more, but for R > 12 without G (2 at R = 24) and for G > 256.
    """
    if group_size is not None:
        return group_size * math.ceil(max(_FEWEST_LANES, min(4 * group_size, _MANY_LANES)) / group_size)
    unit = math.lcm(_LANE_UNIT, world_size)
    fewest = _FEWEST_LANES if unit == _LANE_UNIT else max(_FEWEST_LANES, 4 * world_size)
    return unit * math.ceil(fewest / unit)


@dataclass(frozen=True, slots=True)
class Ownership:
    """Which rank delivers which lane, for a run that starts or resumes at microbatch `start` (m0)."""

    num_lanes: int
    world_size: int
    start: int
    even: bool = field(init=False, repr=False, compare=False)  # every rank delivers a real microbatch in every step
    offset: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.world_size > self.num_lanes:
            raise TooManyRanksError(
                f"{self.world_size} data-parallel ranks cannot share {self.num_lanes} lanes (num_lanes is fixed when a "
                f"run starts): resume with at most {self.num_lanes} ranks, or start a new run with a larger num_lanes"
            )
        object.__setattr__(self, "even", self.num_lanes % self.world_size == 0)
        object.__setattr__(self, "offset", self.start % self.world_size if self.even else 0)

    def lanes_of(self, rank: int) -> range:
        """Return the lanes of a rank, ascending."""
        return range((rank + self.offset) % self.world_size, self.num_lanes, self.world_size)

    def step_size(self, m: int) -> int:
        """Return how many real microbatches the step delivers that starts at microbatch m."""
        if self.even:
            return self.world_size
        place = m % self.num_lanes
        return min(self.world_size - place % self.world_size, self.num_lanes - place)

    def lane_in_step(self, rank: int, m: int) -> int | None:
        """Return the lane that a rank delivers in the step that starts at microbatch m, or None for a masked one."""
        ahead = (rank + self.offset - m % self.num_lanes) % self.world_size
        return (m + ahead) % self.num_lanes if ahead < self.step_size(m) else None

    @property
    def masked_share(self) -> float:
        """Share of delivered microbatches that are masked: `1 - L / (R ceil(L/R))`."""
        return 1 - self.num_lanes / (self.world_size * math.ceil(self.num_lanes / self.world_size))

    def nearest_even_world_size(self) -> int:
        """Return the divisor of L that is nearest to the world size (the smaller one of two)."""
        divisors = [d for d in range(1, self.num_lanes + 1) if self.num_lanes % d == 0]
        return min(divisors, key=lambda d: (abs(d - self.world_size), d))


def first_microbatch(step: int, *, num_lanes: int, world_size: int) -> int:
    """Return the microbatch of the run at which a step begins, on one number of ranks from the beginning."""
    laps, rest = divmod(step, -(-num_lanes // world_size))
    return laps * num_lanes + min(rest * world_size, num_lanes)


def step_of(m: int, *, num_lanes: int, world_size: int) -> int:
    """Return the step in which microbatch m is delivered, on one number of ranks from the beginning."""
    laps, place = divmod(m, num_lanes)
    return laps * -(-num_lanes // world_size) + place // world_size


def microbatches_before(lane: int, m: int, num_lanes: int) -> int:
    """Return how many of the first m microbatches of a run are of a lane."""
    return max(0, -((lane - m) // num_lanes))


def lane_units(ownership: Ownership, rank: int, m: int, num_workers: int) -> Iterator[tuple[int, int]]:
    """Give the lanes that a rank delivers from microbatch m on, without end, each with the number of its worker."""
    lanes = ownership.lanes_of(rank)
    lane = None
    while lane is None:
        lane = ownership.lane_in_step(rank, m)
        m += ownership.step_size(m)
    for place in itertools.count(lanes.index(lane)):
        yield lanes[place % len(lanes)], place % len(lanes) % num_workers


def step_units(steps: range, rank: int, num_workers: int) -> Iterator[tuple[int, int]]:
    """Give the microbatches of a finite stream that a rank delivers, each with the number of its worker.

    `steps` has the first microbatch of each step.
    """
    for number, first in enumerate(steps):
        yield first + rank, number % num_workers
