"""From which groups the data module takes its rank, and what Megatron-LM's loop expects of it, on eight gloo ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import on_gloo

pytest.importorskip("megatron.core")

from engine import worker_config_of
from made import made_once
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunMode,
    destroy_rerun_state_machine,
    initialize_rerun_state_machine,
)

from energon_bridge import (
    DefaultTaskEncoder,
    EnergonMultiModalDataModule,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
)
from energon_bridge.core.errors import DataParallelError
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.trainers.replica import check_data_parallel

WORLD = 8
MICRO_BATCH, NUM_LANES = 2, 8
dataset = made_once(create_captioning_test_dataset, num_train=48, num_val=0)


def on_ranks(function: Callable[[int], Any], **parallel: Any) -> list[Any]:
    """Call a function on eight ranks, where megatron's groups are made if sizes for them are given."""

    def start(rank: int) -> Any:
        if parallel:
            parallel_state.initialize_model_parallel(**parallel)
        result = function(rank)
        dist.barrier()
        return result

    return on_gloo(WORLD, start)


def module(dataset: Path, **kwargs: Any) -> EnergonMultiModalDataModule:
    settings: dict[str, Any] = {"micro_batch_size": MICRO_BATCH, "num_workers": 0, "num_lanes": NUM_LANES}
    return EnergonMultiModalDataModule(
        str(dataset), None, None, **(settings | {"task_encoder": DefaultTaskEncoder()} | kwargs)
    )


def rank_and_size(data: EnergonMultiModalDataModule) -> tuple[int | None, int | None]:
    config = worker_config_of(data)
    return config.rank, config.world_size


def keys(batches: Any, count: int) -> list[str]:
    """Return the keys of the next microbatches, as a loop that only calls `next()` sees them."""
    return [",".join(next(batches).__key__) for _ in range(count)]


# Which group ---------------------------------------------------------------------------------------------------------


def test_without_megatron_every_process_is_a_data_parallel_rank(dataset: Path) -> None:
    def load(rank: int) -> Any:
        data = module(dataset)
        return rank_and_size(data), keys(data.train_dataloader(), 3)

    results = on_ranks(load)
    assert [found for found, _ in results] == [(rank, WORLD) for rank in range(WORLD)]
    epoch = [key for _, microbatches in results for key in ",".join(microbatches).split(",")]
    assert sorted(epoch) == [f"train-{number:05d}" for number in range(48)]


LAYOUTS: list[tuple[dict[str, Any], list[tuple[int, int]]]] = [
    ({"tensor_model_parallel_size": 2, "context_parallel_size": 2}, [(0, 2)] * 4 + [(1, 2)] * 4),
    ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, [(0, 2)] * 2 + [(1, 2)] * 2),
    ({"context_parallel_size": 2}, [(0, 4)] * 2 + [(1, 4)] * 2 + [(2, 4)] * 2 + [(3, 4)] * 2),
    ({"tensor_model_parallel_size": 4, "order": "dp-cp-tp-ep-pp"}, [(0, 2), (1, 2)]),
    ({"tensor_model_parallel_size": 8}, [(0, 1)] * 8),
]


def test_the_rank_is_that_of_the_pure_data_parallel_group(dataset: Path) -> None:
    def load(rank: int) -> Any:
        taken = []
        for parallel, _ in LAYOUTS:
            parallel_state.initialize_model_parallel(**parallel)
            whole = ProcessGroupCollection.use_mpu_process_groups()
            without = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp", "tp"])
            collections = [whole, without, ProcessGroupCollection(), ProcessGroupCollection(dp=whole.dp), None]
            taken.append([rank_and_size(module(dataset, pg_collection=groups)) for groups in collections])
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        pairs = [dist.new_group([first, first + 1]) for first in range(0, WORLD, 2)]
        own = ProcessGroupCollection(dp=pairs[rank // 2])  # goes before the global groups
        assert rank_and_size(module(dataset, pg_collection=own)) == (rank % 2, 2)
        return taken

    for (_, expected), of_layout in zip(LAYOUTS, zip(*on_ranks(load), strict=True), strict=True):
        assert all(len(set(of_one)) == 1 for of_one in of_layout)
        assert [of_one[0] for of_one in of_layout] == expected * (WORLD // len(expected))


# Generalised tensor parallelism --------------------------------------------------------------------------------------
#
# Of megatron-core 0.19: peers of a `gtp_remat` group share weights and not data, and a collection's `dp` lacks them.


def group_of(rank: int, key: Callable[[int], Any]) -> Any:
    """Return the group of the ranks with the key of this one; every rank must call it."""
    keys = list(map(key, range(WORLD)))
    made = {one: dist.new_group([r for r in range(WORLD) if keys[r] == one]) for one in sorted(set(keys))}
    return made[key(rank)]


def with_peers(rank: int, inner: str) -> dict[str, Any]:
    """Return groups of two replicas, two peers each, and two inner ranks (`tp` or `cp`), in megatron-core's order."""
    axes = {"tp": (1, 2, 4), "cp": (2, 1, 4)}[inner]

    def place(r: int, axis: int) -> int:
        return r // axes[axis] % 2

    inner_of, peer_of, replica_of = ((lambda r, axis=axis: place(r, axis)) for axis in range(3))
    alone, contexts = group_of(rank, lambda r: r), group_of(rank, lambda r: (peer_of(r), replica_of(r)))
    of_data = group_of(rank, inner_of)
    return {
        "tp": contexts if inner == "tp" else alone,
        "cp": contexts if inner == "cp" else alone,
        "pp": alone,
        "dp": group_of(rank, lambda r: (inner_of(r), peer_of(r))),
        "gtp_remat": group_of(rank, lambda r: (inner_of(r), replica_of(r))),
        "dp_gtp_remat": of_data,
        "dp_cp_gtp_remat": of_data if inner == "tp" else group_of(rank, lambda r: 0),
    }


WITH_PEERS = [("gtp_remat", "dp_cp_gtp_remat"), ("dp_cp_gtp_remat",), ("gtp_remat", "dp_gtp_remat"), ("dp_gtp_remat",)]


@pytest.mark.parametrize("inner", ["tp", "cp"])
def test_peers_that_share_weights_get_microbatches_of_their_own(inner: str, dataset: Path) -> None:
    def load(rank: int) -> Any:
        groups = with_peers(rank, inner)
        taken = []
        for names in WITH_PEERS:
            names = (*names, "dp_gtp_remat") if inner == "cp" else names
            given = SimpleNamespace(**{name: groups[name] for name in ("tp", "cp", "pp", "dp", *names)})
            assert rank_and_size(module(dataset, pg_collection=given)) == (groups["dp_gtp_remat"].rank(), 4)
            for loading in ("every_rank", "one_rank"):
                data = module(dataset, pg_collection=given, replica_loading=loading, global_batch_size=16)
                taken.append(keys(data.train_dataloader(), 2))
            dp = groups["dp"]
            with pytest.raises(DataParallelError, match=r"rank \d of 2, but 4 ranks get microbatches .*gtp_remat"):
                check_data_parallel(dp.rank(), dp.size(), by_group=True, pg_collection=given)
        return groups["dp_gtp_remat"].rank(), taken

    results = on_ranks(load)
    by_rank = dict(results)
    assert len({str(taken[0]) for taken in by_rank.values()}) == 4
    for place, taken in results:
        assert all(one == by_rank[place][0] for one in taken)


def test_a_collection_that_cannot_tell_who_gets_data_is_refused(dataset: Path) -> None:
    def load(rank: int) -> None:
        groups = with_peers(rank, "cp")
        del groups["dp_gtp_remat"]
        with pytest.raises(DataParallelError, match=r"context parallelism 2 \(cp\).*set its dp_gtp_remat"):
            worker_config_of(module(dataset, pg_collection=SimpleNamespace(**groups)))

    on_ranks(load)


def test_fewer_loaders_than_data_parallel_ranks_are_refused(dataset: Path) -> None:
    def load(rank: int) -> None:
        pair = group_of(rank, lambda r: r // 2)
        for config in (WorkerConfig(data_parallel_group=pair), WorkerConfig(rank=rank // 4, world_size=2)):
            with pytest.raises(DataParallelError, match=r"rank \d of 2, but 8 ranks get .* 4 of them would"):
                get_savable_loader(get_train_dataset(dataset, batch_size=2, worker_config=config))

    on_ranks(load, tensor_model_parallel_size=1)


needs_gtp = pytest.mark.skipif(
    "gtp_remat_size" not in inspect.signature(parallel_state.initialize_model_parallel).parameters,
    reason="megatron-core 0.19 has generalised tensor parallelism",
)


@needs_gtp
@pytest.mark.parametrize("inner", ["tensor_model_parallel_size", "context_parallel_size"])
def test_megatrons_own_peers_get_microbatches_of_their_own(inner: str, dataset: Path) -> None:
    def load(rank: int) -> Any:
        taken = []
        for groups in (None, ProcessGroupCollection.use_mpu_process_groups()):
            for loading in ("every_rank", "one_rank"):
                data = module(dataset, pg_collection=groups, replica_loading=loading)
                taken.append(keys(data.train_dataloader(), 2))
        return parallel_state.get_data_parallel_rank(), taken

    results = on_ranks(load, gtp_remat_size=2, **{inner: 2})
    by_rank = dict(results)
    assert len({str(taken[0]) for taken in by_rank.values()}) == 4
    for place, taken in results:
        assert all(one == by_rank[place][0] for one in taken)


GTP_LEGS = [(4, 1, 2), (8, 2, 2), (4, 1, 1), (8, 2, 4), (8, 1, 2), (4, 1, 4)]
"""Ranks, tensor-parallel size and size of generalised tensor parallelism of runs, each from the state of the last."""


@needs_gtp
def test_an_epoch_has_each_sample_once_over_resumes_on_other_sizes_of_peers(dataset: Path) -> None:
    each = 8
    whole = keys(module(dataset).train_dataloader(), each * len(GTP_LEGS))

    def load(_: int, tensor: int, peers: int, state: Any) -> Any:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor, gtp_remat_size=peers)
        loading = "one_rank" if tensor > 1 else "every_rank"
        data = module(dataset, replica_loading=loading)
        train = data.train_dataloader()
        if state is not None:
            train.load_state_dict(state)
        place, size = rank_and_size(data)
        assert size == dist.get_world_size() // tensor
        taken = keys(train, each // size)
        found = place, parallel_state.get_tensor_model_parallel_rank(), taken, train.state_dict()
        dist.barrier()
        return found

    state = None
    seen: list[str] = []
    for ranks, tensor, peers in GTP_LEGS:
        results = on_gloo(ranks, lambda rank, leg=(tensor, peers, state): load(rank, *leg))
        by_place = {place: taken for place, _, taken, _ in results}
        assert {(place, inner) for place, inner, _, _ in results} == {
            (place, inner) for place in range(ranks // tensor) for inner in range(tensor)
        }
        assert all(taken == by_place[place] for place, _, taken, _ in results)
        seen += [key for step in zip(*(by_place[place] for place in sorted(by_place)), strict=True) for key in step]
        state = results[-1][3]
    assert seen == whole
    for epoch in (seen[:24], seen[24:]):
        samples = [sample for microbatch in epoch for sample in microbatch.split(",")]
        assert sorted(samples) == [f"train-{number:05d}" for number in range(48)]


# What the loop relies on ---------------------------------------------------------------------------------------------


def test_the_first_and_the_last_stage_load_alike_and_save_alike(dataset: Path) -> None:
    """Re-enact the multimodal example: loaders on tensor rank 0 of the first and the last pipeline stage only."""

    def load(rank: int) -> Any:
        if parallel_state.get_tensor_model_parallel_rank() != 0:
            return None  # such a rank takes no part in anything that the loaders do
        iterator = RerunDataIterator(module(dataset).train_dataloader())
        seen = keys(iterator, 5)
        return parallel_state.get_data_parallel_rank(), seen, iterator.iterable.save_state()

    results = on_ranks(load, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert [result is None for result in results] == [False, True] * 4
    first, last = results[:4:2], results[4::2]
    assert first == last
    assert [dp for dp, _, _ in first] == [0, 1]
    assert not set(first[0][1]) & set(first[1][1])


def of_replicas(run: Callable[[Any, EnergonMultiModalDataModule], Any], dataset: Path) -> list[Any]:
    """Return what a function of groups and data returns on tp2 x cp2 x dp2, by data-parallel rank; alike in each."""

    def on_rank(rank: int) -> tuple[int, Any]:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        data = module(dataset, pg_collection=groups)
        result = run(groups, data)
        data.close()
        return groups.dp.rank(), result

    results = on_ranks(on_rank, tensor_model_parallel_size=2, context_parallel_size=2)
    replicas = dict(results)
    assert all(result == replicas[dp] for dp, result in results)
    return [replicas[0], replicas[1]]


def in_turn(first: list[str], second: list[str]) -> list[str]:
    return [key for pair in zip(first, second, strict=True) for key in pair]


def test_megatrons_iterator_saves_and_restores_the_stream(dataset: Path, tmp_path: Path) -> None:
    """Re-enact `maybe_save_dataloader_state` and what a provider does to resume, context-parallel race included."""

    def run(groups: Any, data: EnergonMultiModalDataModule) -> Any:
        path = tmp_path / f"train_dataloader_dprank{groups.dp.rank():03d}.pt"
        iterator = RerunDataIterator(data.train_dataloader())
        keys(iterator, 7)
        if parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0:
            torch.save({"dataloader_state_dict": iterator.iterable.save_state()}, path)
        dist.barrier()
        # All context-parallel ranks of a replica would write to one file, so what they write must be the same.
        assert torch.load(path)["dataloader_state_dict"] == iterator.iterable.save_state()
        expected = keys(iterator, 10)
        resumed = module(dataset, pg_collection=groups, num_workers=1)
        resumed.train_dataloader().restore_state(torch.load(path)["dataloader_state_dict"])
        following = keys(RerunDataIterator(resumed.train_dataloader()), 10)
        resumed.close()
        assert following == expected
        return expected

    expected = of_replicas(run, dataset)
    # The same files on one rank: the microbatches of the two, in turn.
    train = module(dataset).train_dataloader()
    files = sorted(tmp_path.iterdir())
    train.restore_state([torch.load(file)["dataloader_state_dict"] for file in files])
    assert keys(train, 20) == in_turn(*expected)


def test_the_state_of_the_whole_run_is_the_same_on_every_rank(dataset: Path) -> None:
    def run(groups: Any, data: EnergonMultiModalDataModule) -> Any:
        train = data.train_dataloader()
        keys(train, 5)
        return train.state_dict(), keys(train, 6)

    (state, first), (same, second) = of_replicas(run, dataset)
    assert state == same
    train = module(dataset).train_dataloader()
    train.load_state_dict(state)
    assert keys(train, 12) == in_turn(first, second)


@pytest.fixture
def rerun_state_machine() -> Iterator[None]:
    destroy_rerun_state_machine()  # one that another test has left
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    yield
    destroy_rerun_state_machine()


@pytest.mark.usefixtures("rerun_state_machine")
def test_a_rerun_replays_the_same_batches(dataset: Path) -> None:
    iterator = RerunDataIterator(module(dataset).train_dataloader())
    first = keys(iterator, 4)
    iterator.rewind()
    assert keys(iterator, 4) == first
    iterator.advance()
    assert keys(iterator, 1) != first[:1]
