"""The provider under a loop that does with it what Megatron-LM's does: who is called, what is saved, what comes back."""

from __future__ import annotations

import functools
import inspect
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunDataIterator
from replicas import digests, module, on_ranks, place

from energon_bridge import StateError
from energon_bridge.errors import ConfigurationError, MissingRankError, StateFormatError, StepMismatchError
from energon_bridge.integrations.chunks import LIMIT
from energon_bridge.integrations.megatron_lm import train_valid_test_dataloaders_provider
from energon_bridge.integrations.rank_files import rank_file, read_rank_files, write_rank_file
from energon_bridge.testing import create_captioning_test_dataset

GLOBAL_BATCH, MICRO_BATCH, EVAL_ITERS = 8, 2, 2
COUNTS = (40 * GLOBAL_BATCH, EVAL_ITERS * GLOBAL_BATCH, EVAL_ITERS * GLOBAL_BATCH)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_captioning_test_dataset(tmp_path_factory.mktemp("captioning"), num_train=48, num_val=7)


def loop_arguments(save: Path, iteration: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        iteration=iteration,
        consumed_train_samples=iteration * GLOBAL_BATCH,
        dataloader_save=str(save),
        micro_batch_size=MICRO_BATCH,
        global_batch_size=GLOBAL_BATCH,
    )


def wrapped(loader: Any) -> Any:
    """Wrap what a provider returned, as `build_train_valid_test_data_iterators` does."""
    if loader is None or (not isinstance(loader, list) and len(loader) == 0):
        return None
    return [RerunDataIterator(one) for one in loader] if isinstance(loader, list) else RerunDataIterator(loader)


class Loop:
    """What Megatron-LM's `pretrain` does with a provider, on one rank."""

    def __init__(self, provider: Any, arguments: SimpleNamespace, chunks: int | None = None) -> None:
        self.arguments = arguments
        self.chunks = chunks
        if not getattr(provider, "is_distributed", False) and place()["tp"]:
            self.train = self.valid = None
        elif chunks is None:
            train, valid, test = provider(COUNTS)
            assert test is None
            self.train, self.valid = wrapped(train), wrapped(valid)
        else:
            assert "vp_stage" in inspect.signature(provider).parameters
            each = [functools.partial(provider, vp_stage=i)(COUNTS) for i in range(chunks)]
            self.train, self.valid = [wrapped(e[0]) for e in each], [wrapped(e[1]) for e in each]
        # Rank 0 decides what is done.
        flags = torch.tensor([self.train is not None, self.valid is not None], dtype=torch.int64)
        dist.broadcast(flags, 0)
        self.do_train, self.do_valid = (bool(flag) for flag in flags)

    def iteration(self) -> list[tuple[str, str]]:
        """Take the microbatches of one step, and save."""
        dp = parallel_state.get_data_parallel_world_size()
        taken = []
        if self.train is not None:
            taken = digests(self.train, GLOBAL_BATCH // MICRO_BATCH // dp)
        self.arguments.iteration += 1
        self.arguments.consumed_train_samples += GLOBAL_BATCH
        return taken

    def evaluate(self) -> list[tuple[str, str]]:
        dp = parallel_state.get_data_parallel_world_size()
        return [] if self.valid is None else digests(self.valid, EVAL_ITERS * GLOBAL_BATCH // MICRO_BATCH // dp)

    def save(self) -> None:
        """Do what `maybe_save_dataloader_state` does."""
        here = place()
        if self.train is None or here["pp"] or here["tp"]:
            return
        state = self.train.iterable.save_state()
        group = parallel_state.get_data_parallel_group()
        dist.barrier(group)
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        path = rank_file(self.arguments.dataloader_save, self.arguments.iteration, here["dp"], pipelines=stages > 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Both context-parallel ranks write the file, as they do there.
        torch.save({"dataloader_state_dict": state}, path)
        dist.barrier(group)


def train(
    dataset: Path, save: Path, *, steps: int, iteration: int = 0, loader_ranks: Any = "all", **kwargs: Any
) -> Any:
    """Run some steps and an evaluation, and save; for use on every rank."""
    arguments = loop_arguments(save, iteration)
    provider = train_valid_test_dataloaders_provider(
        lambda: module(dataset, global_batch_size=GLOBAL_BATCH, **kwargs),
        loader_ranks=loader_ranks,
        arguments=lambda: arguments,
    )
    loop = Loop(provider, arguments)
    assert loop.do_train
    assert loop.do_valid
    seen = [loop.iteration() for _ in range(steps)]
    evaluated = loop.evaluate()
    loop.save()
    return place()["dp"], seen, evaluated


def global_batches(results: list[Any]) -> list[list[tuple[str, str]]]:
    """Check that the loading ranks of each replica agree, and return the microbatches of each step in their order."""
    replicas: dict[int, Any] = {}
    for dp, seen, _ in results:
        if any(seen):
            assert replicas.setdefault(dp, seen) == seen
    ranks = [replicas[dp] for dp in sorted(replicas)]
    assert len(ranks) == 1 + max(dp for dp, _, _ in results)
    return [[batch for turn in zip(*step, strict=True) for batch in turn] for step in zip(*ranks, strict=True)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"tp": 2, "pp": 2}, {"world": 4}),
        ({"tp": 2, "cp": 2}, {"tp": 2, "pp": 2, "world": 4}),
    ],
    ids=["tp2 pp2 dp2 to dp4", "tp2 cp2 dp2 to tp2 pp2 dp1"],
)
@pytest.mark.parametrize("way", ["all", "tp0_pp_edges", "broadcast"])
def test_runs_go_on_with_other_groups(
    before: dict[str, int], after: dict[str, int], way: str, dataset: Path, tmp_path: Path
) -> None:
    kwargs: dict[str, Any] = {"feeding": "broadcast"} if way == "broadcast" else {"loader_ranks": way}
    save = tmp_path / "data"
    whole = on_ranks(tmp_path, 1, lambda rank: train(dataset, tmp_path / "alone", steps=6))
    first = on_ranks(tmp_path, 8, lambda rank: train(dataset, save, steps=3, **kwargs), **before)
    after = dict(after)
    world = after.pop("world")
    second = on_ranks(tmp_path, world, lambda rank: train(dataset, save, steps=3, iteration=3, **kwargs), **after)
    assert global_batches(first) + global_batches(second) == global_batches(whole)
    # Validation begins at its beginning in both.
    evaluated = [results[0][2] for results in (first, second)]
    assert evaluated[0][0][0].split(",")[0] == evaluated[1][0][0].split(",")[0] == "val-00000"
