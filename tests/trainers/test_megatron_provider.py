"""The provider under a loop that does what Megatron-LM's does: who is called, what is saved, what comes back."""

from __future__ import annotations

import functools
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from engine import GroupingEncoder
from keyed import write_mix
from made import made_once
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunDataIterator
from rank_states import rank_file
from replicas import digests, module, on_ranks, place, save_files

from energon_bridge.core.errors import ConfigurationError, LoaderError, StepMismatchError
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.trainers.megatron_lm import train_valid_test_dataloaders_provider
from energon_bridge.trainers.shared_stream import LIMIT

GLOBAL_BATCH, MICRO_BATCH, EVAL_ITERS = 8, 2, 2
COUNTS = (40 * GLOBAL_BATCH, EVAL_ITERS * GLOBAL_BATCH, EVAL_ITERS * GLOBAL_BATCH)
dataset = made_once(create_captioning_test_dataset, num_train=48, num_val=7)


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


@pytest.fixture(scope="module")
def whole(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[str, str]]]:
    """Return the global batches of one rank that nobody stops."""
    folder = tmp_path_factory.mktemp("alone")
    return global_batches(on_ranks(1, lambda rank: train(dataset, folder, steps=6)))


@pytest.mark.parametrize(
    ("way", "before", "after"),
    [
        ("all", {"tp": 2, "cp": 2}, {"tp": 2, "pp": 2, "world": 4}),
        ("tp0_pp_edges", {"tp": 2, "pp": 2}, {"world": 4}),
        ("broadcast", {"tp": 2, "pp": 2}, {"tp": 2, "cp": 2, "world": 4}),
    ],
)
def test_runs_go_on_with_other_groups(
    before: dict[str, int], after: dict[str, int], way: str, dataset: Path, tmp_path: Path, whole: Any
) -> None:
    kwargs: dict[str, Any] = {"replica_loading": "one_rank"} if way == "broadcast" else {"loader_ranks": way}
    save = tmp_path / "data"
    first = on_ranks(8, lambda rank: train(dataset, save, steps=3, **kwargs), **before)
    after = dict(after)
    world = after.pop("world")
    second = on_ranks(world, lambda rank: train(dataset, save, steps=3, iteration=3, **kwargs), **after)
    assert global_batches(first) + global_batches(second) == whole
    # Validation begins at its beginning in both.
    evaluated = [results[0][2] for results in (first, second)]
    assert evaluated[0][0][0].split(",")[0] == evaluated[1][0][0].split(",")[0] == "val-00000"


def test_who_gets_an_iterator(dataset: Path) -> None:
    def roles(rank: int) -> Any:
        provider = train_valid_test_dataloaders_provider(
            lambda: module(dataset), loader_ranks="tp0_pp_edges", arguments=lambda: None
        )
        train, valid, test = provider(COUNTS)
        assert test is None
        return place()["tp"], place()["pp"], train is not None, valid is not None

    results = on_ranks(6, roles, tp=2, pp=3)
    assert all(train == valid == (tp == 0 and pp != 1) for tp, pp, train, valid in results)


def test_model_chunks_share_a_stream(dataset: Path, tmp_path: Path) -> None:
    def run(rank: int) -> Any:
        data = module(dataset, replica_loading="one_rank")
        arguments = loop_arguments(tmp_path / "nowhere")
        arguments.global_batch_size = None
        loop = Loop(train_valid_test_dataloaders_provider(lambda: data, arguments=lambda: arguments), arguments, 2)
        first, second = loop.train
        # The interleaved schedule: as many microbatches of a chunk in turn as there are stages.
        seen: tuple[list[Any], list[Any]] = ([], [])
        for _ in range(3):
            seen[0].extend(digests(first, 2))
            seen[1].extend(digests(second, 2))
        state = second.iterable.save_state()
        assert state == first.iterable.save_state()
        following = digests(first, 2)
        second.iterable.restore_state(state)
        assert digests(second, 2) == digests(first, 2) == following
        assert digests(loop.valid[0], 2) == digests(loop.valid[1], 2)
        return seen[0] == seen[1], seen[0]

    results = on_ranks(4, run, pp=2, vp=2, tp=2)
    assert all(result == results[0] for result in results)
    assert results[0][0]


def test_a_chunk_that_never_asks_is_cut_off(dataset: Path) -> None:
    provider = train_valid_test_dataloaders_provider(lambda: module(dataset), arguments=lambda: None)
    (first, _, _), (second, _, _) = (provider(COUNTS, vp_stage=stage) for stage in (0, 1))
    digests(first, LIMIT + 2)
    with pytest.raises(LoaderError, match="model chunk 1 is 256 microbatches behind"):
        next(second)  # type: ignore[arg-type]
    digests(first, 1)


@pytest.mark.parametrize("replica_loading", ["every_rank", "one_rank"])
def test_an_iterator_for_each_validation_set(replica_loading: str, dataset: Path, tmp_path: Path) -> None:
    blend = {"blend": [{"path": str(dataset), "weight": 1, "subflavors": {"part": n}} for n in range(2)]}
    mix = write_mix(tmp_path / "mix.yaml", train=blend, val=blend)

    def run(rank: int) -> Any:
        provider = train_valid_test_dataloaders_provider(
            lambda: module(mix, replica_loading=replica_loading), validation_sets="each", arguments=lambda: None
        )
        _, valid, _ = provider((1, None, 0))  # None: --full-validation
        assert isinstance(valid, list)
        lengths = [len(one) for one in valid]
        flavors = [next(one).__subflavors__[0] for one in wrapped(valid)]
        return lengths, flavors, provider((1, 0, 0))[1]

    results = on_ranks(2, run, tp=2)
    assert results == [([4, 4], [{"part": 0}, {"part": 1}], None)] * 2


@pytest.mark.parametrize(
    ("dp", "peers", "whole", "length"),
    [(1, 1, 8, 1), (1, 1, 6, 2), (2, 1, 8, 2), (2, 1, 4, 4), (1, 2, 8, 2), (2, 2, 8, 4)],
)
def test_full_validation_counts_in_iterations(dp: int, peers: int, whole: int, length: int, dataset: Path) -> None:
    arguments = SimpleNamespace(full_validation=True, eval_micro_batch_size=MICRO_BATCH, eval_global_batch_size=whole)
    arguments.data_parallel_size = dp  # without the peers of generalised tensor parallelism, as 0.19 has it
    arguments.gtp_weight_remat_size = peers
    provider = train_valid_test_dataloaders_provider(lambda: module(dataset), arguments=lambda: arguments)
    _, valid, _ = provider((1, None, 0))
    assert len(valid) == length  # type: ignore[arg-type]
    # A pass is whole all the same.
    assert len(list(valid.one_pass())) == 4  # type: ignore[union-attr]


def test_runs_without_files_go_on_by_arithmetic(dataset: Path, tmp_path: Path, whole: Any) -> None:
    def run(iteration: int, peers: int) -> Any:
        arguments = loop_arguments(tmp_path / "nothing is there", iteration)
        arguments.data_parallel_size = dist.get_world_size() // peers
        arguments.gtp_weight_remat_size = peers
        provider = train_valid_test_dataloaders_provider(
            lambda: module(dataset, global_batch_size=GLOBAL_BATCH), resume="seek", arguments=lambda: arguments
        )
        return place()["dp"], [Loop(provider, arguments).iteration()], []

    for world, peers in ((1, 1), (2, 1), (2, 2)):
        assert global_batches(on_ranks(world, lambda rank, peers=peers: run(3, peers))) == whole[3:4]


def test_saving_with_virtual_stages_is_refused(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The check is for Megatron-LM's own loop, which gives its own arguments.
    real = SimpleNamespace(get_args=lambda: SimpleNamespace(dataloader_save=str(tmp_path)))
    monkeypatch.setitem(sys.modules, "megatron.training", real)  # type: ignore[arg-type]
    provider = train_valid_test_dataloaders_provider(lambda: module(dataset))
    provider(COUNTS)
    with pytest.raises(ConfigurationError, match="pass the provider resume='seek'"):
        provider(COUNTS, vp_stage=0)


def test_what_the_loop_asks_of_an_iterator(dataset: Path) -> None:
    provider = train_valid_test_dataloaders_provider(lambda: module(dataset), arguments=lambda: None)
    train, valid, _ = provider(COUNTS)
    assert provider.is_distributed
    assert len(train) > 0  # type: ignore[arg-type]
    assert len(valid) == 4  # type: ignore[arg-type]
    assert len(list(valid.one_pass())) == 4  # type: ignore[union-attr]
    assert provider((0, 0, 0)) == (None, None, None)


def test_files_of_another_run_are_refused(dataset: Path, tmp_path: Path) -> None:
    save_files(dataset, tmp_path / "data", 2, 2)
    arguments = loop_arguments(tmp_path / "data", 1)
    arguments.consumed_train_samples = 16
    arguments.global_batch_size = None
    provider = train_valid_test_dataloaders_provider(lambda: module(dataset), arguments=lambda: arguments)
    with pytest.raises(StepMismatchError, match="after 4 microbatches of 2 samples, but the model has seen 16"):
        provider(COUNTS)


@pytest.mark.parametrize(
    ("options", "arguments", "text"),
    [
        ({"loader_ranks": "some"}, {}, "loader_ranks must be 'all' or 'tp0_pp_edges'"),
        ({"validation_sets": "some"}, {}, "validation_sets must be"),
        ({"resume": "some"}, {}, "resume must be"),
        ({"resume": "seek", "packing_buffer_size": 4}, {}, "packs them, so their number differs"),
        ({"resume": "seek", "task_encoder": GroupingEncoder()}, {}, "groups them, so their number differs"),
        ({}, {"eval_micro_batch_size": 4}, "eval_micro_batch_size is 4 in the arguments of Megatron-LM but 2"),
        ({}, {"micro_batch_size": 4}, "micro_batch_size is 4 in the arguments of Megatron-LM but 2"),
        ({"loader_ranks": "tp0_pp_edges", "replica_loading": "one_rank"}, {}, "leaves ranks without an iterator"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: dict[str, Any], arguments: dict[str, Any], text: str, dataset: Path
) -> None:
    of_data = {
        name: options.pop(name)
        for name in ("replica_loading", "packing_buffer_size", "task_encoder")
        if name in options
    }
    with pytest.raises(ConfigurationError, match=text):
        train_valid_test_dataloaders_provider(
            lambda: module(dataset, **of_data), arguments=lambda: SimpleNamespace(**arguments), **options
        )(COUNTS)
