"""What megatron-core's groups and Megatron-LM's loop expect of the data, on eight gloo ranks without a GPU."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import on_gloo

pytest.importorskip("megatron.core")

from made import made_once
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunMode,
    destroy_rerun_state_machine,
    initialize_rerun_state_machine,
)

from energon_bridge import EnergonMultiModalDataModule
from energon_bridge.task_encoder.base import DefaultTaskEncoder
from energon_bridge.testing import create_captioning_test_dataset

WORLD = 8
NUM_TRAIN, MICRO_BATCH = 48, 2
dataset = made_once(create_captioning_test_dataset, num_train=NUM_TRAIN, num_val=7)


@dataclasses.dataclass
class Rank:
    """The groups of this process, and a data module for them."""

    data: EnergonMultiModalDataModule
    groups: ProcessGroupCollection


def on_all_ranks(dataset: Path, function: Callable[[Rank], Any]) -> list[Any]:
    """Call a function on eight ranks with tp2 x cp2 x dp2; return its results and the data-parallel rank of each."""

    def start(rank: int) -> tuple[int, Any]:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, context_parallel_size=2)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        data = module(dataset, groups)
        result = function(Rank(data, groups))
        data.close()
        dist.barrier()
        return groups.dp.rank(), result

    return on_gloo(WORLD, start)


def module(dataset: Path, groups: Any, **kwargs: Any) -> EnergonMultiModalDataModule:
    settings: dict[str, Any] = {"micro_batch_size": MICRO_BATCH, "num_workers": 0, "num_val_workers": 0}
    settings |= {"task_encoder": DefaultTaskEncoder(), "pg_collection": groups}
    return EnergonMultiModalDataModule(str(dataset), None, None, **(settings | kwargs))


def digests(batches: Iterator[Any], count: int) -> list[tuple[tuple[str, ...], str]]:
    """Return keys and a hash of the pixels of the next microbatches."""
    return [
        (tuple(batch.__key__), hashlib.blake2b(batch.image.numpy().tobytes(), digest_size=8).hexdigest())
        for batch in islice(iter(lambda: next(batches), None), count)
    ]


def by_replica(results: list[tuple[int, Any]]) -> dict[int, Any]:
    """Check that all ranks of a replica have the same result, and return it by data-parallel rank."""
    replicas = dict(results)
    for dp, result in results:
        assert result == replicas[dp]
    return replicas


def test_megatrons_iterator_saves_and_restores_the_stream(dataset: Path, tmp_path: Path) -> None:
    """Re-enact `maybe_save_dataloader_state` and what a provider does to resume, context-parallel race included."""

    def run(rank: Rank) -> Any:
        dp = rank.groups.dp.rank()
        path = tmp_path / f"train_dataloader_dprank{dp:03d}.pt"
        iterator = RerunDataIterator(rank.data.train_dataloader())
        digests(iterator, 7)
        if parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0:
            torch.save({"dataloader_state_dict": iterator.iterable.save_state()}, path)
        dist.barrier()
        # All context-parallel ranks of a replica would write to one file, so what they write must be the same.
        assert torch.load(path)["dataloader_state_dict"] == iterator.iterable.save_state()
        expected = digests(iterator, 10)
        resumed = module(dataset, rank.groups, num_workers=1)
        resumed.train_dataloader().restore_state(torch.load(path)["dataloader_state_dict"])
        following = digests(RerunDataIterator(resumed.train_dataloader()), 10)
        resumed.close()
        return following == expected, expected

    replicas = by_replica(on_all_ranks(dataset, run))
    assert [replicas[dp][0] for dp in (0, 1)] == [True, True]
    # The same files on one rank: the microbatches of the two, in turn.
    data = module(dataset, None)
    states = [torch.load(tmp_path / f"train_dataloader_dprank{dp:03d}.pt")["dataloader_state_dict"] for dp in (0, 1)]
    data.train_dataloader().restore_state(states)
    alone = digests(data.train_dataloader(), 20)
    assert alone == [digest for pair in zip(replicas[0][1], replicas[1][1], strict=True) for digest in pair]


def test_the_state_of_the_whole_run_is_the_same_on_every_rank(dataset: Path) -> None:
    def run(rank: Rank) -> Any:
        train = rank.data.train_dataloader()
        digests(train, 5)
        return train.state_dict(), digests(train, 6)

    results = on_all_ranks(dataset, run)
    state = results[0][1][0]
    assert all(result[0] == state for _, result in results)
    data = module(dataset, None)
    data.train_dataloader().load_state_dict(state)
    replicas = by_replica(results)
    both = [digest for pair in zip(replicas[0][1], replicas[1][1], strict=True) for digest in pair]
    assert digests(data.train_dataloader(), 12) == both


@pytest.fixture
def rerun_state_machine() -> Iterator[None]:
    destroy_rerun_state_machine()  # one that another test has left
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    yield
    destroy_rerun_state_machine()


@pytest.mark.usefixtures("rerun_state_machine")
def test_a_rerun_replays_the_same_batches(dataset: Path) -> None:
    iterator = RerunDataIterator(module(dataset, None).train_dataloader())
    first = digests(iterator, 4)
    iterator.rewind()
    assert digests(iterator, 4) == first
    iterator.advance()
    assert digests(iterator, 1) != first[:1]


def test_what_megatron_asks_of_a_loader(dataset: Path) -> None:
    """Training has no length, validation never has length 0, test is None: see `build_pretraining_data_loader`."""
    data = module(dataset, None)
    train, val = data.build()
    with pytest.raises(TypeError):
        len(train)
    assert len(val) == 4
    assert data.test_dataloader() is None
    eval_iters = digests(val, 9)
    assert eval_iters[4:8] == eval_iters[:4]
