"""The Trainer of transformers over our datasets: exact resume, on other numbers of processes too, and refusals."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paths import EXAMPLES

pytest.importorskip("accelerate")
from forked import become_rank, free_port, run_forked
from made import made_once

from energon_bridge import (
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    make_balance,
)
from energon_bridge.core.errors import ConfigurationError, MaskedMicrobatchesError, StateFormatError
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.trainers.huggingface import STATE_FILE, Described, EnergonTrainer, model_inputs

EXAMPLE = EXAMPLES / "huggingface_trainer.py"
STEPS, STOP = 6, 3
data = made_once(create_captioning_test_dataset, num_train=20, num_val=7)


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("huggingface_trainer_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(
    data: Path,
    output: Path,
    steps: int,
    *,
    processes: int = 1,
    resume: bool = False,
    microbatches: int = 2,
    balance: Callable[[Any], float] | None = None,
) -> list[dict[str, float]]:
    """Run the example with a global batch of some microbatches; return what the first process logged."""
    example, port = load_example(), free_port()
    arguments = ["--data", data, "--output", output, "--max-steps", steps, "--accumulate", microbatches // processes]

    def process(rank: int) -> Any:
        torch.set_num_threads(1)
        if processes > 1:
            become_rank(rank, processes, port)
        if balance is None:
            return example.main([*map(str, arguments), *["--resume"] * resume])
        trainers: list[Any] = []

        class Balancing(EnergonTrainer):
            def __init__(self, **kwargs: Any) -> None:
                super().__init__(balance=make_balance(balance), **kwargs)
                trainers.append(self)

        example.EnergonTrainer = Balancing
        history = example.main([*map(str, arguments), *["--resume"] * resume])
        return [*history, trainers[0]._train_batches.dataloader.metrics()]

    return run_forked(processes, process)[0]


def losses(history: list[dict[str, float]]) -> dict[str, float]:
    """Return the losses by step, those of training and of validation, and the epochs."""
    found = {}
    for entry in history:
        for name in ("loss", "eval_loss"):
            if name in entry:
                found[f"{name} {entry['step']}"] = entry[name]
                found[f"epoch {entry['step']}"] = entry["epoch"]
    return found


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Return the losses of a run that is not stopped; an epoch of 20 samples has 5 steps of 2 x 2."""
    history = train(data, tmp_path_factory.mktemp("whole"), STEPS)
    of_run = history[-1]
    assert of_run["train_samples_per_second"] == pytest.approx(4 * of_run["train_steps_per_second"], rel=0.1)
    found = losses(history)
    assert set(found) >= {"loss 1", "loss 6", "eval_loss 3", "eval_loss 6"}
    assert found["epoch 5"] == 1
    assert found["loss 6"] < found["loss 1"]
    return found


def test_a_resumed_run_goes_on_exactly(whole: dict[str, float], data: Path, tmp_path: Path) -> None:
    train(data, tmp_path, STOP)
    states = json.loads((tmp_path / f"checkpoint-{STOP}" / STATE_FILE).read_text())
    assert [state["microbatches"] for state in states] == [2 * STOP]
    history = train(data, tmp_path, STEPS, resume=True)
    assert losses(history) == whole


def test_a_run_on_two_processes_is_resumed_on_one(whole: dict[str, float], data: Path, tmp_path: Path) -> None:
    first = losses(train(data, tmp_path, STOP, processes=2))
    assert first == pytest.approx({name: whole[name] for name in first}, rel=1e-3)
    assert len(json.loads((tmp_path / f"checkpoint-{STOP}" / STATE_FILE).read_text())) == 2
    history = train(data, tmp_path, STEPS, resume=True)
    assert losses(history) == pytest.approx(whole, rel=1e-3)


def test_balanced_processes_learn_the_same(data: Path, tmp_path: Path) -> None:
    """Also after a resume, in the long mode."""
    steps = STEPS if os.environ.get("ENERGON_LONG_TESTS") else STOP
    plain = losses(train(data, tmp_path / "plain", steps, microbatches=4))

    def run(steps: int, **kwargs: Any) -> tuple[dict[str, float], dict[str, float]]:
        cost = lambda batch: float(sum(int(key[-3:]) for key in batch.__key__))  # noqa: E731
        *history, metrics = train(
            data, tmp_path / "balanced", steps, processes=2, microbatches=4, balance=cost, **kwargs
        )
        return losses(history), metrics

    found, metrics = run(STOP)
    if steps > STOP:
        found, metrics = run(STEPS, resume=True)
    assert found == pytest.approx(plain, rel=1e-3)
    assert metrics["balance_moved"] > 0
    assert 1 <= metrics["balance_step"] < metrics["balance_step_before"]


def trainer_on(rank: int, size: int, **attributes: Any) -> EnergonTrainer:
    """Return a trainer without a model, of one process among several."""
    trainer = EnergonTrainer.__new__(EnergonTrainer)
    arguments = SimpleNamespace(gradient_accumulation_steps=1, output_dir="nowhere")
    state = {
        "_balance": None,
        "args": arguments,
        "_loader_arguments": {},
        "_resume_from": None,
        "_model_inputs": model_inputs,
    }
    for name, value in (state | attributes).items():
        setattr(trainer, name, value)
    trainer.accelerator = SimpleNamespace(process_index=rank, num_processes=size, parallelism_config=None)
    return trainer


def train_spec(data: Path, **kwargs: Any) -> Any:
    return get_train_dataset(data, batch_size=2, worker_config=kwargs.pop("config", None), **kwargs)


def test_a_number_of_processes_that_masks_microbatches_is_refused(data: Path) -> None:
    spec = train_spec(data, config=WorkerConfig(num_workers=0, num_lanes=4))
    with pytest.raises(MaskedMicrobatchesError, match="3 data-parallel ranks do not divide the 4 lanes"):
        trainer_on(1, 3, train_dataset=Described(spec)).get_train_dataloader()


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({"config": WorkerConfig(rank=0, world_size=4)}, 2, "made for 4 data-parallel ranks, but there are 2"),
        ({"repeat": False}, 2, "with repeat=False, some processes"),
        ({"virtual_epoch_length": 5}, 1, "virtual_epoch_length=5 must be a multiple of gradient_accumulation_steps=2"),
    ],
)
def test_datasets_that_do_not_fit_are_refused(options: dict[str, Any], size: int, message: str, data: Path) -> None:
    trainer = trainer_on(0, size, train_dataset=Described(train_spec(data, **options)))
    trainer.args.gradient_accumulation_steps = 2
    with pytest.raises(ConfigurationError, match=message):
        trainer.get_train_dataloader()


def test_a_checkpoint_without_data_is_refused(data: Path, tmp_path: Path) -> None:
    trainer = trainer_on(0, 1, train_dataset=Described(train_spec(data)), _resume_from=str(tmp_path))
    with pytest.raises(StateFormatError, match=f"no state of the data in {STATE_FILE}"):
        trainer.get_train_dataloader()
    (tmp_path / STATE_FILE).write_text("{}")
    with pytest.raises(StateFormatError, match="expected a list of the states of all ranks"):
        trainer.get_train_dataloader()


@pytest.mark.parametrize(
    ("processes", "accumulate", "said"),
    [
        (1, 2, None),
        (2, 1, None),
        (2, 2, r"had 4 samples, and .* have 8 \(batch size 2 .*=2 x 2 .*\)\. .* gradient_accumulation_steps=1$"),
        (4, 1, r"had 4 samples, and .* have 8 \(batch size 2 .*=1 x 4 .*\)\. .* a number of processes that divides 2$"),
    ],
)
def test_other_steps_after_a_resume_are_said(
    processes: int, accumulate: int, said: str | None, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint is that of one process with two microbatches of two samples a step."""
    spec = train_spec(data, config=WorkerConfig(num_workers=0, num_lanes=4))
    loader = get_savable_loader(spec)
    for _ in islice(loader, 2 * STOP):
        pass
    (tmp_path / STATE_FILE).write_text(json.dumps([loader.save_state_rank()]))
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": STOP}))
    trainer = trainer_on(0, processes, train_dataset=Described(spec), _resume_from=str(tmp_path))
    trainer.args.gradient_accumulation_steps = accumulate
    trainer.get_train_dataloader()
    messages = [record.getMessage() for record in caplog.records if "optimizer steps" in record.getMessage()]
    assert [bool(re.search(said, one)) for one in messages] == [True] if said else not messages, messages


def test_processes_that_share_a_replica_load_the_same(data: Path) -> None:
    trainer = trainer_on(5, 8)
    places = {"dp_replicate": 1, "dp_shard": 0}
    mesh = SimpleNamespace(mesh_dim_names=("dp_replicate", "dp_shard", "tp"), get_local_rank=places.__getitem__)

    class Mesh(SimpleNamespace):
        def __getitem__(self, name: str) -> Any:
            return SimpleNamespace(size=lambda: 2)

    trainer.accelerator.parallelism_config = SimpleNamespace(tp_size=2, cp_size=None, sp_size=1)
    trainer.accelerator.torch_device_mesh = Mesh(**vars(mesh))
    config = trainer._of_this_process(train_spec(data)).worker_config
    assert (config.rank, config.world_size) == (2, 4)


def test_several_datasets_for_evaluation(data: Path) -> None:
    specs = {name: Described(get_val_dataset(data, batch_size=size)) for name, size in (("a", 2), ("b", 7))}
    trainer = trainer_on(0, 1, eval_dataset=specs, _eval_loaders={})
    assert {name: len(trainer.get_eval_dataloader(name)) for name in specs} == {"a": 4, "b": 1}
    with pytest.raises(ConfigurationError, match="eval_dataset from get_val_dataset"):
        trainer.get_eval_dataloader(Described(train_spec(data)))
    with pytest.raises(ConfigurationError, match="expected a dataset from get_train_dataset"):
        Described([1, 2])


def test_batches_become_arguments_of_a_model(data: Path) -> None:
    config = WorkerConfig(num_workers=0)
    spec = get_val_dataset(data, batch_size=4, task_encoder=load_example().make_encoder(), worker_config=config)
    batch = next(iter(get_loader(spec)))
    inputs = model_inputs(batch)
    assert set(inputs) == {"input_ids", "labels", "attention_mask", "pixel_values"}
    length = batch.tokens.shape[1]
    assert inputs["labels"].shape == inputs["attention_mask"].shape == (4, length + 1)  # the last row's end is learned
    learned = batch.loss_mask > 0
    assert torch.equal(inputs["labels"][:, 1:][learned], batch.labels[learned])
    assert (inputs["labels"][:, 1:][~learned] == -100).all()
    assert torch.equal(inputs["labels"][:, 1:][learned], inputs["input_ids"][:, 1:][learned])
    assert (inputs["attention_mask"][:, 1:][learned] == 1).all()
    last = inputs["attention_mask"].sum(dim=1) - 1
    assert inputs["labels"].gather(1, last[:, None]).flatten().tolist() == [257] * 4
    batch.__valid__ = torch.tensor([True, False, True, True])
    masked = model_inputs(batch)["labels"]
    assert (masked[1] == -100).all()
    assert torch.equal(masked[0], inputs["labels"][0])
    assert model_inputs({"x": 1, "__key__": ["a"]}) == {"x": 1}
    with pytest.raises(ConfigurationError, match="model_inputs="):
        model_inputs(7)
