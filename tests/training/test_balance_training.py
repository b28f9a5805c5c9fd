"""Training on unequal microbatches: losses and gradients do not depend on how a global batch is cut and shared out.

With balance, and with microbatches within a budget of tokens, they are those of the whole global batch in one process,
within the rounding of sums.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

pytest.importorskip("megatron.core")
pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")

from forked import become_rank, free_port, run_forked, start_forked
from keyed import write_mix
from megatron_runs import configuration, train
from run_outputs import read_losses

from energon_bridge.core.dataloader import EnergonDataloader
from energon_bridge.core.datasets import get_loader, get_train_dataset
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.core.worker_config import WorkerConfig
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.testing import create_captioning_test_dataset, write_shard
from energon_bridge.trainers.replica.warmup import CostWarmup
from energon_bridge.training import run as training
from energon_bridge.training.encoder import training_task_encoder
from energon_bridge.training.module import VisionLanguageModule
from energon_bridge.training.run_data import build_feedback
from energon_bridge.training.run_model import load_bundle

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*")

BALANCED = ("data.balance=global_batch", "data.balance_attention=0.01", "data.balance_patches=0.1")
GLOBAL = ("data.micro_batch_size=1", "data.global_batch_size=8", "train.max_steps=3", "validation.limit_batches=1")
GLOBAL += ("train.time_microbatches=4",)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_captioning_test_dataset(tmp_path_factory.mktemp("captioning"), num_train=24, num_val=5)


def losses(config: Any) -> list[float]:
    return [loss for _, loss in sorted(read_losses(config.run_dir).items())]


def test_megatron_core_learns_the_same(dataset: Path, tmp_path: Path) -> None:
    plain = configuration(dataset, tmp_path / "plain", *GLOBAL)
    balanced = configuration(dataset, tmp_path / "balanced", *GLOBAL, *BALANCED)
    (_, before), (_, after) = train(plain, 2), train(balanced, 2)
    assert before == after
    assert losses(balanced) == pytest.approx(losses(plain), rel=1e-5)
    assert len(losses(plain)) == 3
    reports = [(tmp_path / name / "report.html").read_text() for name in ("plain", "balanced")]
    assert ["Balance of the ranks" in report for report in reports] == [False, True]
    assert times(plain) == 1  # of a step, after two


def test_lightning_learns_the_same(dataset: Path, tmp_path: Path) -> None:
    def configured(name: str, *overrides: str) -> Any:
        return configuration(dataset, tmp_path / name, *GLOBAL, *overrides, "trainer=lightning")

    configs = (configured("plain"), configured("balanced", *BALANCED))
    before, after = (run_on_two_ranks(config) for config in configs)
    assert before != after  # the ranks have exchanged something
    assert whole(before) == whole(after)
    plain, balanced = map(losses, configs)
    assert balanced == pytest.approx(plain, rel=1e-5)
    assert len(plain) == 3
    assert times(configs[0]) == 1  # after ten, and not the last one of a step


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data.balance_warmup=2",), "data.balance_warmup is set, but nothing is balanced"),
        ((*BALANCED, "data.balance_warmup=-1"), "data.balance_warmup must be at least 0, got -1"),
        ((*BALANCED, "data.balance_warmup=2", "trainer=megatron"), "does not go with trainer=megatron"),
    ],
)
def test_settings_that_make_no_sense(overrides: tuple[str, ...], message: str, dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        configuration(dataset, tmp_path / "run", *GLOBAL, *overrides)


def test_costs_that_fit_themselves_outlive_a_kill(uneven: Path, tmp_path: Path) -> None:
    """In the warm-up, and after it: the ranks share out as in the run that was not killed."""
    own = ("trainer=lightning", "train.max_steps=10", "checkpoint.interval=3", "validation.generate=false")
    own += ("checkpoint.keep=0", "data.balance=global_batch", "data.balance_warmup=2")

    def run(name: str, *, killed_at: int | None = None, resume: bool = False) -> list[Any]:
        config = configuration(uneven, tmp_path / name, *GLOBAL, *own)
        port = free_port()

        def start(rank: int) -> list[list[str]]:
            become_rank(rank, 2, port)
            keys = record_training_keys()
            record, step = CostWarmup.record, CostWarmup.step

            def recorded(self: CostWarmup, batch: Any, seconds: float) -> None:
                assert seconds > 0
                record(self, batch, 0.1 + 0.001 * batch.tokens.numel() ** 2)  # alike in both runs

            def stepped(self: CostWarmup) -> bool:
                changed = step(self)
                if self._done == killed_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return changed

            CostWarmup.record, CostWarmup.step = recorded, stepped  # type: ignore[method-assign]
            training.run(config, resume=resume)
            return keys

        children = [start_forked(partial(start, rank)) for rank in range(2)]
        return [child.result() for child in children]

    expected = [keys for ok, keys in run("whole") if ok]
    assert [len(keys) for keys in expected] == [40, 40]
    (saved,) = (tmp_path / "whole" / "checkpoints").glob("*6.ckpt")
    assert not run("killed", killed_at=7)[0][0]
    again = run("killed", resume=True)
    assert [keys for ok, keys in again if ok] == [keys[24:] for keys in expected]
    states = [
        torch.load(sorted((tmp_path / name / "checkpoints").iterdir())[-1], weights_only=False)["callbacks"]
        for name in ("whole", "killed")
    ]
    first, second = (state["CostWarmupCallback"] for state in states)
    assert first == second
    assert first["fitted"] is not None
    assert torch.load(saved, weights_only=False)["callbacks"]["CostWarmupCallback"]["times"] != []


def whole(ranks: list[list[str]]) -> list[list[str]]:
    """Return the sorted keys of each global batch."""
    return [sorted(key for keys in ranks for key in keys[start : start + 4]) for start in range(0, 12, 4)]


def times(config: Any) -> int:
    """Return the number of microbatches, or steps, that were timed."""
    lines = [json.loads(line) for line in (Path(config.run_dir) / "microbatches.jsonl").read_text().splitlines()]
    assert all(line["seconds"] > 0 and line["tokens"] > 0 for line in lines)
    return len(lines)


def record_training_keys() -> list[list[str]]:
    """Return a list that gets the keys of each microbatch that this process trains on."""
    keys: list[list[str]] = []
    original = EnergonDataloader._next_of

    def recorded(self: EnergonDataloader, stream: Any) -> Any:
        batch = original(self, stream)
        if self.endless:
            keys.append(list(batch.__key__))
        return batch

    EnergonDataloader._next_of = recorded  # type: ignore[method-assign]
    return keys


def run_on_two_ranks(config: Any) -> list[list[str]]:
    """Train; return the keys that each rank got."""
    port = free_port()

    def start(rank: int) -> list[str]:
        become_rank(rank, 2, port)
        keys = record_training_keys()
        training.run(config)
        return [key for batch in keys for key in batch]

    return run_forked(2, start)


# A budget of tokens ---------------------------------------------------------------------------------------------------

TOKENS = ("data.micro_batch_size=1", "data.global_batch_size=4", "data.max_tokens_per_microbatch=128")
TOKENS += ("data.packing_buffer_size=24", "train.max_steps=2", "validation.limit_batches=1", "optimizer.clip_norm=0")


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return pictures with captions of 1 to 30 words."""
    folder = tmp_path_factory.mktemp("uneven")
    for split, count in (("train", 60), ("val", 5)):
        samples = {}
        for number in range(count):
            file = io.BytesIO()
            Image.new("RGB", (16, 16), (4 * number, 255 - 4 * number, 128)).save(file, "png")
            words = " ".join(f"w{number * word % 7}" for word in range(1 + number * 7 % 30))
            samples[f"{split}{number:03d}"] = {"png": file.getvalue(), "txt": words.encode()}
        (folder / split).mkdir()
        write_shard(folder / split / "0.tar", samples)
    split = parse_patterns(["train:train/.*", "val:val/.*"])
    dataset_yaml = render_dataset_yaml("CaptioningSample", {"image": "png", "caption": "txt"})
    prepare_dataset(folder, split=split, dataset_yaml=dataset_yaml)
    return folder


def gradients_on_two_ranks(config: Any) -> tuple[list[list[list[str]]], dict[str, torch.Tensor]]:
    """Train; return the keys of each rank's microbatches and the gradients of the first step."""
    port = free_port()

    def start(rank: int) -> Any:
        become_rank(rank, 2, port)
        keys = record_training_keys()
        steps: list[dict[str, torch.Tensor]] = []
        rescaled = VisionLanguageModule.on_before_optimizer_step

        def kept(self: VisionLanguageModule, optimizer: Any) -> None:
            rescaled(self, optimizer)
            named = self.model.named_parameters()
            steps.append({name: value.grad.clone() for name, value in named if value.grad is not None})

        VisionLanguageModule.on_before_optimizer_step = kept  # type: ignore[method-assign]
        training.run(config)
        return keys, {name: value.numpy() for name, value in steps[0].items()}

    found = run_forked(2, start)
    return [keys for keys, _ in found], {name: torch.from_numpy(value) for name, value in found[0][1].items()}


def gradients_of_whole(config: Any, keys: list[str]) -> dict[str, torch.Tensor]:
    """Return the gradients of the mean loss over the tokens of these samples, run one by one in one process."""

    def start(rank: int) -> Any:
        bundle = load_bundle(config, Path(config.run_dir) / "model")
        encoder = training_task_encoder(config.data, bundle)
        world = WorkerConfig(rank=0, world_size=1, num_workers=0)
        dataset = get_train_dataset(
            config.data.path, batch_size=1, repeat=False, worker_config=world, task_encoder=encoder
        )
        with torch.no_grad():
            batches = {batch.__key__[0]: batch for batch in get_loader(dataset)}
        module = VisionLanguageModule(bundle, config)
        module.train()
        pairs = [module.token_losses(batches[key]) for key in keys]
        total = sum((losses * mask).sum() for losses, mask in pairs)
        (total / sum(mask.sum() for _, mask in pairs)).backward()
        named = module.model.named_parameters()
        return {name: value.grad.numpy() for name, value in named if value.grad is not None}

    (found,) = run_forked(1, start)
    return {name: torch.from_numpy(value) for name, value in found.items()}


@pytest.mark.parametrize("balance", [(), BALANCED])
def test_gradients_of_unequal_microbatches_are_those_of_the_whole_global_batch(
    uneven: Path, tmp_path: Path, balance: tuple[str, ...]
) -> None:
    config = configuration(uneven, tmp_path / "run", *TOKENS, *balance, "trainer=lightning")
    ranks, found = gradients_on_two_ranks(config)
    first = [keys for rank in ranks for keys in rank[:2]]
    assert len({len(keys) for keys in first}) > 1, "the microbatches are unequal"
    whole = gradients_of_whole(config, [key for keys in first for key in keys])
    assert set(whole) == set(found)
    for name, expected in whole.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6, msg=name)
    assert max(float(value.abs().max()) for value in whole.values()) > 1e-2


def test_megatron_core_trains_on_a_budget_of_tokens_alike_on_any_ranks(uneven: Path, tmp_path: Path) -> None:
    def run(name: str, ranks: int, *overrides: str) -> tuple[list[list[str]], list[float]]:
        config = configuration(uneven, tmp_path / name, *TOKENS, *overrides)
        return train(config, ranks)[1], losses(config)

    keys, expected = run("one", 1)
    assert len({len(step) for step in keys}) > 1
    for name, ranks, overrides in (
        ("two", 2, BALANCED),
        ("stages", 2, ("parallel.pp=2",)),
        ("contexts", 2, ("parallel.cp=2",)),
    ):
        others, found = run(name, ranks, *overrides)
        assert others == keys
        if name != "stages":  # which begin with other weights
            assert found == pytest.approx(expected, rel=1e-5), name


# Weights that follow the losses ---------------------------------------------------------------------------------------


def changes_in(checkpoint: Path) -> list[Any]:
    """Return the changes of the weights, each with its global draw, that a checkpoint has."""
    if checkpoint.is_dir():
        return torch.load(checkpoint / "run.pt", weights_only=True)["feedback"]["changes"]
    return torch.load(checkpoint, weights_only=False)["callbacks"]["MixFeedbackCallback"]["changes"]


@pytest.mark.parametrize("trainer", ["lightning", "megatron"])
def test_feedback_of_the_script_moves_the_weights_and_resumes_exactly(
    trainer: str, uneven: Path, dataset: Path, tmp_path: Path
) -> None:
    blend = [{"weight": 0.5, "path": str(path)} for path in (uneven, dataset)]
    mix = write_mix(tmp_path / "mix.yaml", train={"blend": blend}, val={"path": str(uneven)})
    reference = tmp_path / "reference.json"
    reference.write_text(json.dumps({str(uneven): 0.0, str(dataset): 100.0}))  # the second is learned already
    config = configuration(
        mix,
        tmp_path / "run",
        f"trainer={trainer}",
        "train.max_steps=4",
        "checkpoint.interval=2",
        "validation.limit_batches=1",
        f"feedback.reference={reference}",
        "feedback.every=1",
        "feedback.step_size=0.2",
    )

    def run(resume: bool) -> list[list[str]]:
        if trainer == "megatron":
            return train(config, 1, resume=resume)[1]

        def start(rank: int) -> list[list[str]]:
            keys = record_training_keys()
            training.run(config, resume=resume)
            return keys

        return run_forked(1, start)[0]

    whole = run(False)
    found = losses(config)
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    saved = checkpoints.pop()
    changed = changes_in(saved)
    assert len(changed) == 4
    assert 0.5 < changed[0][1][str(uneven)] < changed[-1][1][str(uneven)]
    shutil.rmtree(saved) if saved.is_dir() else saved.unlink()
    assert checkpoints
    assert run(True) == whole[len(whole) // 2 :]
    assert losses(config) == found
    reference.write_text(json.dumps({str(uneven): 1.0}))
    with pytest.raises(ConfigurationError, match=f"has no loss for {dataset}"):
        build_feedback(config)
