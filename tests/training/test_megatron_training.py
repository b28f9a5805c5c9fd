"""`trainer: megatron`: tensor-, pipeline- and data-parallel runs that stop and go on, on these ranks or others."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import no_room
from made import made_once
from torch import Tensor

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

from megatron_runs import configuration, train
from run_outputs import hexes, read_losses, read_predictions

from energon_bridge.models.conversations.multimodal import MultiModalBatch
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.training.config import RunConfig
from energon_bridge.training.config_file import load_config
from energon_bridge.training.megatron import loop as run_module
from energon_bridge.training.megatron.step import Training

pytestmark = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="megatron-core's optimizer cannot load its state with torch 2.6"
)
MAX_STEPS, SAVED = 4, 2
NUM_VAL = 5
WHOLE = ("parallel.tp=2",)


dataset = made_once(create_captioning_test_dataset, num_train=24, num_val=NUM_VAL)


@pytest.fixture(scope="module")
def uninterrupted(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, list[list[str]]]:
    """Return a run at tp2 x dp2 that nobody disturbed, and its global batches."""
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    settings = ("data.global_batch_size=8", f"train.max_steps={MAX_STEPS}", f"checkpoint.interval={SAVED}")
    config = configuration(dataset, run_dir, *settings, *WHOLE)
    results, batches = train(config, 4)
    assert [(result.step, result.stopped) for result in results] == [(MAX_STEPS, False)] * 4
    assert [result.main_rank for result in results] == [True] + [False] * 3
    assert len({(result.validation_loss, result.read) for result in results}) == 1
    return config, batches


def continued(run: RunConfig, folder: Path, step: int, dataset: Path, *overrides: str) -> RunConfig:
    """Return the configuration of a copy of a run that has only one of its checkpoints."""
    source, target = Path(run.run_dir), folder / "run"
    (target / "checkpoints").mkdir(parents=True)
    shutil.copytree(source / "model", target / "model")
    shutil.copytree(source / "checkpoints" / f"step-{step:07d}", target / "checkpoints" / f"step-{step:07d}")
    settings = ["data.global_batch_size=8", f"train.max_steps={MAX_STEPS}", "checkpoint.interval=0", *overrides]
    return configuration(dataset, target, *settings)


@pytest.mark.parametrize(
    ("count", "layout"),
    [
        (4, WHOLE),
        (4, ("parallel.tp=2", "parallel.pp=2", "parallel.replica_loading=one_rank")),
        (2, ("parallel.tp=1", "parallel.pp=1")),
        (2, ("parallel.cp=2",)),
    ],
    ids=["tp2-dp2", "tp2-pp2-broadcast", "dp2", "cp2"],
)
def test_a_run_goes_on_as_it_would_have(
    dataset: Path,
    tmp_path: Path,
    uninterrupted: tuple[RunConfig, list[list[str]]],
    count: int,
    layout: tuple[str, ...],
) -> None:
    run, batches = uninterrupted
    own = ("validation.generate=false", "validation.limit_batches=1", *layout)
    config = continued(run, tmp_path, SAVED, dataset, *own)
    _, following = train(config, count, resume=True)
    assert following == batches[SAVED:]
    losses, expected = hexes(config.run_dir), hexes(run.run_dir)
    assert list(losses) == list(range(SAVED + 1, MAX_STEPS + 1))
    if layout == WHOLE:
        assert losses == {step: expected[step] for step in losses}
    # Other groups add up in another order.
    values, wanted = (read_losses(c.run_dir) for c in (config, run))
    assert values == pytest.approx({step: wanted[step] for step in values}, rel=1e-4)
    highest, expected_highest = highest_losses(config, values), highest_losses(run, wanted)
    assert highest == pytest.approx({one: expected_highest[one] for one in highest}, rel=1e-4)
    assert sorted(step for step, _ in highest) == [SAVED + 1] * 4 + [MAX_STEPS] * 4


@pytest.mark.parametrize(("loading", "layout"), [("every_rank", "parallel.tp=1"), ("one_rank", "parallel.tp=2")])
def test_samples_are_withdrawn_where_a_run_goes_on(
    dataset: Path, tmp_path: Path, uninterrupted: tuple[RunConfig, list[list[str]]], loading: str, layout: str
) -> None:
    run, batches = uninterrupted
    gone = batches[SAVED][::3]
    (tmp_path / "gone.txt").write_text("\n".join(gone))
    own = ("validation.limit_batches=0", f"data.ban={tmp_path / 'gone.txt'}", f"parallel.replica_loading={loading}")
    config = continued(run, tmp_path, SAVED, dataset, *own, layout)
    _, following = train(config, 2, resume=True)
    seen = [key for batch in following for key in batch]
    assert len(seen) == 8 * (MAX_STEPS - SAVED)
    assert not {*seen} & {*gone}
    assert {*seen} > {key for batch in batches[SAVED:] for key in batch} - {*gone}


def highest_losses(config: RunConfig, losses: dict[int, float]) -> dict[tuple[int, str], float]:
    """Return what a report says are the highest losses, by step and first key; each step's loss is between its own."""
    text = (Path(config.run_dir) / "report.html").read_text()
    (data,) = re.findall(r'preview\.take\("meta",null,(.*)\);\n</script>', text)
    rows = dict(json.loads(data)["run"]["sections"])["Highest losses, and their samples"][0]["rows"]
    found = {(int(step), cell["keys"][0]): float(loss) for loss, step, _, _, cell in rows}
    for step, loss in losses.items():
        own = [value for (one, _), value in found.items() if one == step]
        assert min(own) - 1e-3 <= loss <= max(own) + 1e-3
    for *_, cell in rows:
        folder, _, page = cell["links"][0][1].partition("/index.html#/sample/")
        assert (Path(config.run_dir) / folder / "data" / f"samples-{int(page) // 60}.js").is_file()
    return found


def test_a_checkpoint_of_another_model_is_refused(
    dataset: Path, tmp_path: Path, uninterrupted: tuple[RunConfig, list[list[str]]]
) -> None:
    config = continued(uninterrupted[0], tmp_path, SAVED, dataset, "model.hidden_size=32", "model.num_layers=4")
    with pytest.raises(AssertionError, match=r"ConfigurationError: .*model\.hidden_size=32 \(there: 16\)"):
        train(config, 1, resume=True)


def test_half_precision_goes_on_as_it_would_have_and_a_refused_resume_leaves_its_description(
    dataset: Path, tmp_path: Path
) -> None:
    settings = ("train.precision=bf16-mixed", "validation.generate=false", "checkpoint.interval=2", "train.max_steps=3")
    config = configuration(dataset, tmp_path / "run", *settings)
    train(config, 1)
    expected = hexes(config.run_dir)
    other = configuration(dataset, tmp_path / "run", *settings, "data.micro_batch_size=1", "train.max_steps=4")
    with pytest.raises(AssertionError, match="BatchSizeMismatchError"):
        train(other, 1, resume=True)
    assert load_config(tmp_path / "run" / "config.yaml") == config
    text = (tmp_path / "run" / "report.html").read_text()
    assert "steps 1 to 3" in text
    assert "100.0 %" in text
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-0000003")
    metrics = tmp_path / "run" / "metrics.jsonl"
    *kept, last, validated = metrics.read_text().splitlines(keepends=True)
    assert json.loads(validated).keys() == {"step", "validation_loss"}
    metrics.write_text("".join([*kept, last.replace('"loss": ', '"loss": 1')]))  # runs again, so it is replaced
    assert hexes(config.run_dir) != expected
    train(config, 1, resume=True)
    assert metrics.read_text().splitlines(keepends=True)[3:] == [validated]
    assert hexes(config.run_dir) == expected


def test_the_answers_are_those_of_any_layout(
    dataset: Path, tmp_path: Path, uninterrupted: tuple[RunConfig, list[list[str]]]
) -> None:
    run, _ = uninterrupted
    config = continued(run, tmp_path, MAX_STEPS, dataset)
    results, batches = train(config, 1, resume=True)
    assert (results[0].step, batches) == (MAX_STEPS, [])
    answers, expected = (read_predictions(c.run_dir) for c in (config, run))
    assert [answer.key for answer in answers] == [f"val-{number:05d}" for number in range(NUM_VAL)]
    assert answers == expected
    assert all(answer.expected for answer in answers)


def test_a_run_that_is_asked_to_leave_saves_and_goes_on_with_fewer_ranks(
    dataset: Path, tmp_path: Path, uninterrupted: tuple[RunConfig, list[list[str]]]
) -> None:
    settings = ("data.global_batch_size=8", f"train.max_steps={MAX_STEPS}", "validation.generate=false")
    config = configuration(dataset, tmp_path / "run", "checkpoint.interval=0", *settings)
    results, first = train(config, 2, disturb=after_step(1, 1, signal.SIGTERM))
    assert {(result.step, result.stopped) for result in results} == {(1, True)}
    results, second = train(config, 1, resume=True)
    assert {(result.step, result.stopped) for result in results} == {(MAX_STEPS, False)}
    assert first + second == uninterrupted[1]
    assert list(read_losses(tmp_path / "run")) == list(range(1, MAX_STEPS + 1))


def test_a_validation_that_a_stop_prevented_comes_after_the_resume(dataset: Path, tmp_path: Path) -> None:
    settings = ("train.max_steps=3", "validation.generate=false", "validation.interval=2", "checkpoint.interval=0")
    undisturbed = configuration(dataset, tmp_path / "undisturbed", *settings)
    train(undisturbed, 1)
    config = configuration(dataset, tmp_path / "run", *settings)
    results, _ = train(config, 1, disturb=after_step(2, 0, signal.SIGTERM))
    assert results[0].stopped
    metrics, expected = (Path(one.run_dir, "metrics.jsonl") for one in (config, undisturbed))
    assert "validation_loss" not in metrics.read_text()
    assert not Path(config.run_dir, "report-samples").exists()
    train(config, 1, resume=True)
    assert metrics.read_text() == expected.read_text()
    assert expected.read_text().count("validation_loss") == 2


@pytest.mark.parametrize("room", [300, 30_000])
def test_a_full_disk_is_said_and_keeps_no_part_of_a_checkpoint(dataset: Path, tmp_path: Path, room: int) -> None:
    """Of the first small file, which C++ writes and fails without a reason, and of the tensors."""
    config = configuration(dataset, tmp_path / "run", "train.max_steps=1", "validation.limit_batches=0")

    def fill(rank: int) -> None:
        save = run_module.save_checkpoint

        def without_room(*arguments: Any, **kwargs: Any) -> None:
            with no_room(room):
                save(*arguments, **kwargs)

        run_module.save_checkpoint = without_room

    part = rf"{tmp_path}/run/checkpoints/\.step-0000001\.part"
    what = "the checkpoint" if room == 300 else r"[\d,]{6,} bytes of the checkpoint"
    with pytest.raises(Exception, match=rf"StorageError: {part}.*: cannot write {what}: .*File too large.*: make room"):
        train(config, 1, disturb=fill)
    assert not list((tmp_path / "run/checkpoints").iterdir())


def test_a_run_that_loses_a_rank_goes_on_from_its_last_checkpoint(
    dataset: Path, tmp_path: Path, uninterrupted: tuple[RunConfig, list[list[str]]]
) -> None:
    settings = ("data.global_batch_size=8", f"train.max_steps={MAX_STEPS}", "validation.generate=false")
    config = configuration(dataset, tmp_path / "run", f"checkpoint.interval={SAVED}", *settings)
    with pytest.raises(AssertionError, match=rf"rank 1: no result, exit status -{int(signal.SIGKILL)}"):
        train(config, 2, disturb=after_step(SAVED + 1, 1, signal.SIGKILL))
    results, batches = train(config, 1, resume=True)
    assert [result.step for result in results] == [MAX_STEPS]
    assert batches == uninterrupted[1][SAVED:]


def after_step(step: int, disturbed: int, number: signal.Signals) -> Callable[[int], None]:
    """Return what lets one rank get a signal after a step, as a scheduler sends it: not to all ranks at once."""

    def disturb(rank: int) -> None:
        original = run_module.train_step

        def train_step(
            training: Training, batches: Sequence[MultiModalBatch], before: int, *others: Any
        ) -> tuple[Tensor, float]:
            answer = original(training, batches, before, *others)
            if (rank, before + 1) == (disturbed, step):
                os.kill(os.getpid(), number)
            return answer

        run_module.train_step = train_step

    return disturb
