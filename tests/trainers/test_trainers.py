"""Checkpoints and loops of other trainers: torch.distributed.checkpoint, torchtitan's loop, torchdata, TRL."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.utils.data
from forked import become_rank, free_port, run_forked, start_forked
from made import made_once
from paths import EXAMPLES
from torch.distributed.checkpoint.stateful import Stateful

from energon_bridge import DefaultTaskEncoder, EnergonDataloader, WorkerConfig, get_savable_loader, get_train_dataset
from energon_bridge.tools.testing import create_captioning_test_dataset

NUM_TRAIN, LANES = 30, 4

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*TypedStorage is deprecated", "ignore:.*torch.distributed is disabled", "ignore:.*assuming the intent"
)
dataset = made_once(create_captioning_test_dataset, num_train=NUM_TRAIN, num_val=4)


class ByLength(DefaultTaskEncoder):
    """Groups samples, so that some always wait in the state."""

    def batch_group_criterion(self, sample: Any) -> tuple[int, int]:
        return len(sample.caption) % 3, 2


def loader(dataset: Path, kind: str = "plain") -> Any:
    grouped = kind == "grouped"
    spec = get_train_dataset(
        dataset,
        batch_size=None if grouped else 2,
        task_encoder=ByLength() if grouped else DefaultTaskEncoder(),
        worker_config=WorkerConfig(num_workers=1 if kind == "workers" else 0, num_lanes=LANES),
    )
    made = get_savable_loader(spec)
    return EnergonDataloader(made) if kind == "dataloader" else made


def keys(batches: Any, count: int) -> list[list[str]]:
    return [batch.__key__ for batch in islice(batches, count)]


@pytest.mark.parametrize(
    ("kind", "asynchronous"),
    [("plain", True), ("grouped", False), ("workers", True), ("workers", False), ("dataloader", False)],
)
@pytest.mark.filterwarnings("ignore")  # of torch's, on one process
def test_distributed_checkpoint_goes_on_exactly(dataset: Path, tmp_path: Path, kind: str, asynchronous: bool) -> None:
    """An asynchronous checkpoint is that of the call, although the loader goes on before it is written."""
    data = loader(dataset, kind)
    assert isinstance(data, Stateful)
    batches = iter(data)
    keys(batches, 7)
    state = {"data": data, "step": 7}
    if asynchronous:
        written = dcp.async_save(state, checkpoint_id=str(tmp_path))
        expected = keys(batches, 20)
        written.result()
    else:
        dcp.save(state, checkpoint_id=str(tmp_path))
        expected = keys(batches, 20)
    again = loader(dataset, kind)
    dcp.load({"data": again, "step": 0}, checkpoint_id=str(tmp_path))
    assert keys(iter(again), 20) == expected
    dcp.load({"data": data, "step": 0}, checkpoint_id=str(tmp_path))  # one that is in use goes back
    assert keys(iter(data), 20) == expected
    for used in (data, again):
        used.close()


class Titan:
    """torchtitan's loop as far as data goes: one iterator, a checkpoint of everything that is Stateful."""

    def __init__(self, dataloader: Any) -> None:
        self.dataloader, self.step = dataloader, 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])

    def train(self, steps: int) -> list[list[str]]:
        batches: Iterator[Any] = iter(self.dataloader)
        seen = []
        while self.step < steps:
            self.step += 1
            seen.append(next(batches).__key__)
        return seen

    @property
    def states(self) -> dict[str, Any]:
        return {"train_state": self, "dataloader": self.dataloader}


@pytest.mark.filterwarnings("ignore")
def test_a_loop_like_torchtitans_goes_on_on_another_number_of_ranks(dataset: Path, tmp_path: Path) -> None:
    def run(steps: int, save: bool, load: bool) -> Any:
        def rank_of(rank: int) -> list[list[str]]:
            torch.set_num_threads(1)
            dist.init_process_group("gloo")
            loop = Titan(loader(dataset))
            if load:
                dcp.load(loop.states, checkpoint_id=str(tmp_path / "step-4"))
            seen = loop.train(steps)
            if save:
                dcp.async_save(loop.states, checkpoint_id=str(tmp_path / "step-4")).result()
            dist.destroy_process_group()
            return seen

        return rank_of

    def on(ranks: int, steps: int, *, save: bool = False, load: bool = False) -> list[list[str]]:
        port = free_port()

        def start(rank: int) -> list[list[str]]:
            become_rank(rank, ranks, port)
            return run(steps, save, load)(rank)  # type: ignore[no-any-return]

        return [key for step in zip(*run_forked(ranks, start), strict=True) for key in step]

    whole = keys(iter(loader(dataset)), 8 + 4)
    assert on(2, 4, save=True) == whole[:8]
    assert on(1, 8, load=True) == whole[8:12]


class Batches(torch.utils.data.IterableDataset[Any]):
    """A loader as the dataset of torchdata's StatefulDataLoader."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.data.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data.load_state_dict(state)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["plain", "grouped", "workers"])
def test_a_stateful_dataloader_around_a_loader_goes_on_exactly(dataset: Path, kind: str) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")

    def around() -> Any:
        return torchdata.StatefulDataLoader(Batches(loader(dataset, kind)), batch_size=None, num_workers=0)

    data = around()
    batches = iter(data)
    keys(batches, 5)
    state = data.state_dict()
    expected = keys(batches, 20)
    again = around()
    again.load_state_dict(state)
    assert keys(iter(again), 20) == expected
    for used in (data, again):
        used.dataset.data.close()


@pytest.mark.filterwarnings("ignore")
def test_sft_of_trl_goes_on_exactly(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", reason="needs trl")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("trl_sft", EXAMPLES / "trl_sft.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    def train(folder: str, steps: int, *options: str) -> list[float]:
        arguments = ["--data", str(dataset), "--output", str(tmp_path / folder), "--max-steps", str(steps)]
        losses: list[float] = example.main([*arguments, *options])
        return losses

    whole = train("whole", 6)
    assert train("run", 4) == whole[:4]
    assert train("run", 6, "--resume") == whole
    sys.modules.pop("huggingface_trainer", None)


@pytest.mark.parametrize("seed", range(4, 12) if os.environ.get("ENERGON_LONG_TESTS") else [4])
@pytest.mark.filterwarnings("ignore")
def test_grpo_of_trl_learns_from_each_prompt_once_however_often_it_is_killed(tmp_path: Path, seed: int) -> None:
    """It kills itself while rollouts are made, after a step, and before and after the state of the data is written."""
    pytest.importorskip("trl", reason="needs trl")
    spec = importlib.util.spec_from_file_location("trl_grpo", EXAMPLES / "trl_grpo.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    lines = [json.dumps({"prompt": f"{number} + 1 =", "answer": str(number + 1)}) for number in range(18)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))

    def life(fuse: int) -> Any:
        left = iter(range(fuse))

        def fused(function: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                burn()
                result = function(*args, **kwargs)
                burn()
                return result

            return call

        def burn() -> None:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        example.reward = fused(example.reward)
        example.Prompts.on_save = fused(example.Prompts.on_save)
        example.Prompts.on_step_end = fused(example.Prompts.on_step_end)
        torch.set_num_threads(1)
        return example.main(["--data", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "run")])

    throw = random.Random(seed)
    kills = 0
    while True:
        fuse = throw.randrange(4, 40)
        done, found = start_forked(lambda fuse=fuse: life(fuse)).result()  # type: ignore[misc]
        if done:
            break
        assert "exit status -9" in found, found
        kills += 1
    assert kills
    assert sorted(key[1] for key in found) == list(range(18))
