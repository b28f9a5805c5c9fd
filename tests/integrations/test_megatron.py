"""From which groups the data module takes its rank, on eight gloo ranks; and runs that come back on other groups."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
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
from megatron.core.rerun_state_machine import RerunDataIterator

from energon_bridge import DefaultTaskEncoder, EnergonMultiModalDataModule
from energon_bridge.errors import EmptyDatasetError, MissingRankError, UnknownSplitError
from energon_bridge.testing import create_captioning_test_dataset

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


# Loaders on some ranks only, and other groups after a restart --------------------------------------------------------


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


def test_a_run_comes_back_on_another_data_parallel_size(dataset: Path, tmp_path: Path) -> None:
    """Save as Megatron-LM does, one file per data-parallel rank, and give all files to the ranks that come back."""
    path = "train_dataloader_dprank{:03d}.pt"

    def save(rank: int) -> Any:
        data = module(dataset)
        train = data.train_dataloader()
        dp, size = rank_and_size(data)
        seen = keys(train, 16 // size)
        torch.save({"dataloader_state_dict": train.save_state()}, tmp_path / f"{rank}.part")
        (tmp_path / f"{rank}.part").replace(tmp_path / path.format(dp))
        return dp, seen

    def restore(rank: int) -> Any:
        data = module(dataset)
        dp, size = rank_and_size(data)
        files = sorted(tmp_path.glob("train_dataloader_dprank*.pt"))
        states = [torch.load(file)["dataloader_state_dict"] for file in files]
        train = data.train_dataloader()
        with pytest.raises(MissingRankError, match="The states of some ranks are missing"):
            train.restore_state(states[(dp + 1) % len(states)])
        train.restore_state(states)
        return dp, keys(train, 16 // size)

    uninterrupted = keys(module(dataset).train_dataloader(), 32)
    assert in_turn(on_ranks(save)) == uninterrupted[:16]
    assert in_turn(on_ranks(restore, tensor_model_parallel_size=8)) == uninterrupted[16:]


def in_turn(results: list[tuple[int, list[str]]]) -> list[str]:
    """Return the microbatches of all data-parallel ranks in the order of the run."""
    by_rank = dict(results)
    return [key for step in zip(*(by_rank[dp] for dp in sorted(by_rank)), strict=True) for key in step]


# What the loop relies on ---------------------------------------------------------------------------------------------


def test_the_loop_gets_an_endless_iterator_without_asking_for_one(dataset: Path) -> None:
    train = module(dataset).train_dataloader()
    assert iter(train) is train
    assert keys(train, 1) != keys(RerunDataIterator(train), 1)
    assert len(list(islice(train, 100))) == 100
    with pytest.raises((UnknownSplitError, EmptyDatasetError), match="'val'"):
        module(dataset).val_dataloader()
