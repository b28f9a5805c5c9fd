"""Which ranks form a replica, which of them loads, and which fields of a batch each pipeline stage needs.

The rank that loads, the *source*, is the lowest rank of the replica's first pipeline stage. Each stage has its own
group, the source plus the ranks of that stage: stages ask for the same microbatch at different times, and none must
wait for another. Groups across stages use gloo even if the others use NCCL, whose collectives would couple the stages'
CUDA streams.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from energon_bridge.core.errors import ConfigurationError, DataParallelError
from energon_bridge.core.worker_config import distributed

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageKeys:
    """The batch fields that each pipeline stage needs; None: all. Meta fields (`__key__`, …) are always sent.

    A stage that is both the first and the last, as without pipeline parallelism, gets the fields of both.

    Args:
        first: Fields for the first stage: tokens, images.
        middle: Fields for the stages between: none by default.
        last: Fields for the last stage: labels, loss mask.
    """

    first: Collection[str] | None = None
    middle: Collection[str] | None = ()
    last: Collection[str] | None = None

    def __post_init__(self) -> None:
        for name in ("first", "middle", "last"):
            if isinstance(getattr(self, name), str):
                raise ConfigurationError(f"StageKeys: {name} must be a list of field names, got a string")

    def of(self, stage: int, stages: int) -> frozenset[str] | None:
        """Return the fields for one of several stages."""
        wanted = [self.first] * (stage == 0) + [self.last] * (stage == stages - 1) or [self.middle]
        return None if None in wanted else frozenset().union(*(keys for keys in wanted if keys is not None))


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The source and the ranks of one stage, as one process group."""

    group: Any
    keys: frozenset[str] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """The ranks that train on the same batches, as one of them sees it; `make_replica` makes it.

    Args:
        source: Global rank of the rank that loads.
        is_source: Whether this is that rank.
        keys: The fields of a batch that this rank needs; None: all.
        links: On the source, one for each stage that has other ranks; on other ranks, the one of their stage.
    """

    source: int
    is_source: bool
    keys: frozenset[str] | None
    links: tuple[Link, ...]


def make_replica(
    *, pg_collection: Any = None, stage_keys: StageKeys | None = None, backend: str | None = None
) -> Replica:
    """Find the replica of this process and make the groups of its stages. Every process of the job must call it.

    Examples:
        >>> replica = make_replica()  # on every rank, after torch.distributed is initialised  # doctest: +SKIP
        >>> train = EnergonDataloader(open_loader, replica=replica)  # doctest: +SKIP

    Args:
        pg_collection: megatron-core's `ProcessGroupCollection`: its data-parallel group (see `data_parallel_group`)
            and `pp` are used. Default: the groups of `megatron.core.parallel_state`.
        stage_keys: What each pipeline stage needs of a batch; None: everything.
        backend: `gloo` or `nccl`. Default: that of torch.distributed within a stage, gloo across pipeline stages.

    Raises:
        ConfigurationError: torch.distributed is not initialised, or the backend is neither.
    """
    if backend not in (None, "gloo", "nccl"):
        raise ConfigurationError(f"make_replica: backend must be 'gloo', 'nccl' or None, got {backend!r}")
    if not dist.is_initialized():
        raise ConfigurationError(
            "broadcasting batches needs torch.distributed: initialise it and megatron's parallel_state before "
            "the data, or let every rank load (replica_loading='every_rank')"
        )
    group = data_parallel_group(pg_collection)
    here = (dist.get_rank() if group is None else int(group.rank()), *parallel_place("pp", pg_collection))
    places = gathered(here)
    rank = dist.get_rank()
    stages = max(stages for _, _, stages in places)
    wanted = stage_keys or StageKeys(middle=None)
    replicas: dict[int, list[int]] = {}
    for member, (dp, _, _) in enumerate(places):
        replicas.setdefault(dp, []).append(member)
    own_source = rank
    links = []
    for members in replicas.values():
        source = min(member for member in members if places[member][1] == 0)
        own_source = source if rank in members else own_source
        for stage in range(stages):
            ranks = sorted({source, *(member for member in members if places[member][1] == stage)})
            if len(ranks) > 1:
                # Creating a group is collective: every process takes part, members or not.
                group = dist.new_group(ranks, backend=backend or ("gloo" if stages > 1 else None))
                if rank in ranks:
                    links.append(Link(group=group, keys=wanted.of(stage, stages)))
    keys = wanted.of(here[1], stages)
    return Replica(source=own_source, is_source=rank == own_source, keys=keys, links=tuple(links))


def all_told(own: T, group: Any = None) -> list[T]:
    """Return what the ranks of a group say, by rank; all of them must call it. A process alone says its own."""
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    if ranks == 1:
        return [own]
    told: list[Any] = [None] * ranks
    dist.all_gather_object(told, own, group=group)
    return told


def gathered(values: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the integers of all ranks, by rank."""
    device = torch.device("cuda", torch.cuda.current_device()) if str(dist.get_backend()) == "nccl" else "cpu"
    own = torch.tensor(values, dtype=torch.int64, device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [tuple(entry.tolist()) for entry in found]


# ---------------------------------------------------------------------------------------------------------------------
# The groups that megatron-core has made, or is given.


def _parallel_state() -> Any:
    """Return megatron-core's module of global groups, or None if they are not made."""
    # What was never imported cannot be initialised, and importing megatron-core takes seconds.
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    initialised = parallel_state is not None and parallel_state.model_parallel_is_initialized()
    return parallel_state if initialised else None


def data_parallel_group(pg_collection: Any = None) -> Any:
    """Return the group of ranks with microbatches of their own; None if all of torch.distributed (or nothing) is it.

    Without context parallelism; with the peers of generalised tensor parallelism (`gtp_remat` of megatron-core 0.19),
    which share weights and not data, and which a collection's `dp` leaves out.

    Args:
        pg_collection: megatron-core's `ProcessGroupCollection`, which goes before `megatron.core.parallel_state`.

    Raises:
        DataParallelError: The collection has such peers, but no group of all ranks with microbatches of their own.
    """
    parallel_state = _parallel_state()
    # megatron-core's own default group includes the gtp_remat peers: they read data of their own.
    known = None if parallel_state is None else parallel_state.get_data_parallel_group(with_context_parallel=False)
    replicas, with_peers = (_group(pg_collection, name) for name in ("dp", "dp_gtp_remat"))
    if replicas is None:
        if pg_collection is not None and with_peers is None:
            logger.debug("pg_collection has no dp group; using megatron's parallel_state or torch.distributed")
        return known if with_peers is None else with_peers
    context = parallel_place("cp", pg_collection)[1]
    in_contexts = _group(pg_collection, "dp_cp_gtp_remat")
    size = int(replicas.size())
    peers = _peers(pg_collection, context)
    if peers == 1:
        return replicas
    groups = (with_peers, in_contexts if context == 1 else None, known)
    group = next((group for group in groups if group is not None and int(group.size()) == size * peers), None)
    if group is None:
        raise DataParallelError(
            f"pg_collection has data parallelism {size} (dp), context parallelism {context} (cp) and generalised "
            f"tensor parallelism {peers} (gtp_remat), whose peers get different microbatches, but no group of these "
            f"{size * peers} ranks: set its dp_gtp_remat, to what parallel_state.get_data_parallel_group() of "
            "megatron-core 0.19 returns"
        )
    return group


def _group(pg_collection: Any, name: str) -> Any:
    return getattr(pg_collection, name, None)  # a field that was never set, or is not known, raises AttributeError


def _peers(pg_collection: Any, context: int) -> int:
    """Return the ranks that share each weight of a tensor-parallel rank and not their data (`gtp_remat`); 1 without."""
    replicas = int(_group(pg_collection, "dp").size())
    groups = {"gtp_remat": 1, "dp_gtp_remat": replicas, "dp_cp_gtp_remat": replicas * context}
    given = ((_group(pg_collection, name), others) for name, others in groups.items())
    return max([1, *(int(group.size()) // others for group, others in given if group is not None)])


def parallel_place(kind: Literal["tp", "cp", "pp"], pg_collection: Any = None) -> tuple[int, int]:
    """Return rank and size of this process in its tensor-, context- or pipeline-parallel group; (0, 1) without one.

    Args:
        kind: Which group.
        pg_collection: megatron-core's `ProcessGroupCollection`, which goes before `megatron.core.parallel_state`.
    """
    group = _group(pg_collection, kind)
    if group is not None:
        return int(group.rank()), int(group.size())
    parallel_state = _parallel_state()
    if parallel_state is None:
        return 0, 1
    name = {"tp": "tensor_model", "cp": "context", "pp": "pipeline_model"}[kind]
    rank, size = (getattr(parallel_state, f"get_{name}_parallel_{what}")() for what in ("rank", "world_size"))
    return int(rank), int(size)


def check_data_parallel(rank: int, size: int, *, by_group: bool, pg_collection: Any = None) -> None:
    """Raise for a loader with which the ranks of a replica would train on different data.

    Looked at are megatron's groups, where they are made: there cannot be more data-parallel ranks than replicas, and
    where there are as many, a rank given as a number must be the data-parallel one. A loader for fewer ranks than get
    data of their own would give some of them the same; only one that is not shared out at all is taken at its word.

    Args:
        rank, size: The data-parallel rank that the loader is for, and the number of them.
        by_group: Whether they are those of a process group, not given as numbers.
        pg_collection: megatron-core's `ProcessGroupCollection`, which goes before `megatron.core.parallel_state`.

    Raises:
        DataParallelError: The loader does not fit them.
    """
    kinds: dict[str, Literal["tp", "cp", "pp"]] = {"tensor": "tp", "context": "cp", "pipeline": "pp"}
    sizes = {name: parallel_place(kind, pg_collection)[1] for name, kind in kinds.items()}
    group = data_parallel_group(pg_collection)
    world = distributed()
    if group is None or world is None:
        return
    own = int(group.rank())
    ranks = int(group.size())
    replicas = world.get_world_size() // math.prod(sizes.values())
    other_rank = not by_group and size == ranks and rank != own
    alone = not by_group and size == 1
    if size < ranks and not alone:
        raise DataParallelError(
            f"the loader is for rank {rank} of {size}, but {ranks} ranks get microbatches of their "
            f"own, of which this process is rank {own}: {ranks // size} of them would train on the same "
            "data. With generalised tensor parallelism (gtp_remat), the dp group of megatron-core's "
            "ProcessGroupCollection leaves peers out. Pass WorkerConfig "
            "data_parallel_group=parallel_state.get_data_parallel_group() (dp_gtp_remat of a collection), or use "
            "EnergonMultiModalDataModule, which does"
        )
    if size <= max(1, replicas) and not other_rank:
        return
    parallel = ", ".join(f"{name} parallelism {size}" for name, size in sizes.items() if size > 1)
    raise DataParallelError(
        f"the loader is for rank {rank} of {size}, but with {parallel or 'no model parallelism'} "
        f"this process is data-parallel rank {own} of {ranks}: the ranks of a replica would train on different data. "
        "Pass WorkerConfig data_parallel_group=parallel_state.get_data_parallel_group() (without context parallelism), "
        "or use EnergonMultiModalDataModule, which does"
    )
