"""Training that is killed goes on as if nothing had happened, on as many processes as there are then."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import output_of, refusal_of
from forked import Program, become_rank, free_port, import_for_training, run_forked, run_program, start_forked
from made import made_once
from paths import CONFIGS, REPOSITORY

pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")

from run_outputs import hexes, read_losses

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.training import run as training
from energon_bridge.training.callbacks import list_checkpoints
from energon_bridge.training.config import RunConfig
from energon_bridge.training.config_file import load_config, write_config
from energon_bridge.training.module import VisionLanguageModule
from energon_bridge.training.run_folder import prepare_run_dir

MAX_STEPS = 40
NUM_TRAIN = 60  # 15 steps of 4 are an epoch

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*")


dataset = made_once(create_captioning_test_dataset, num_train=NUM_TRAIN, num_val=3)


@pytest.fixture(scope="module")
def uninterrupted(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Return the losses of a run that nobody disturbs, as hex, by step."""
    config = configuration(dataset, tmp_path_factory.mktemp("uninterrupted"))
    training.run(config)
    return hexes(config.run_dir)


def configuration(dataset: Path, run_dir: Path, *overrides: str) -> RunConfig:
    settings = [f"data.path={dataset}", f"run_dir={run_dir}", f"train.max_steps={MAX_STEPS}", "train.log_interval=1"]
    settings += ["checkpoint.interval=5", "validation.generate=false"]
    return load_config(CONFIGS / "smoke.yaml", [*settings, *overrides])


def steps_done(config: RunConfig) -> int:
    path = Path(config.run_dir) / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def slow_down() -> None:
    """Let steps take a while, so that a kill from outside hits the one it is meant for, or a neighbour."""
    original = VisionLanguageModule.training_step

    def training_step(self: VisionLanguageModule, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.002)
        return original(self, batch, batch_idx)

    VisionLanguageModule.training_step = training_step  # type: ignore[method-assign]


def test_losses_after_a_kill_are_those_of_the_uninterrupted_run(
    dataset: Path, tmp_path: Path, uninterrupted: dict[int, str]
) -> None:
    config = configuration(dataset, tmp_path / "run", "data.num_workers=2")
    kill_at = random.Random(1).randrange(6, MAX_STEPS - 6)

    def train() -> None:
        slow_down()
        training.run(config)

    child = start_forked(train)
    while steps_done(config) < kill_at:
        time.sleep(0.001)
    child.kill()
    assert child.result() == (False, f"no result, exit status {-signal.SIGKILL}")
    killed_after = steps_done(config)
    assert kill_at <= killed_after < MAX_STEPS
    resumed_from = int(list_checkpoints(tmp_path / "run" / "checkpoints")[-1].stem[5:])
    assert 5 <= resumed_from <= killed_after
    assert training.run(config, resume=True).step == MAX_STEPS
    assert hexes(config.run_dir) == uninterrupted


def test_the_script_goes_on_after_a_kill(dataset: Path, tmp_path: Path, uninterrupted: dict[int, str]) -> None:
    config = configuration(dataset, tmp_path / "run")
    write_config(config, tmp_path / "config.yaml")
    command = [str(REPOSITORY / "scripts" / "pretrain_vlm.py"), f"--config={tmp_path / 'config.yaml'}"]
    import_for_training()
    program = Program(command, tmp_path)
    while steps_done(config) < 7:
        time.sleep(0.001)
    program.kill()
    assert program.wait() == -signal.SIGKILL
    resumed = run_program([*command, "--resume"], tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert hexes(config.run_dir) == uninterrupted


VALIDATED = ("train.max_steps=6", "checkpoint.interval=2", "validation.interval=2")


@pytest.fixture(scope="module")
def validated(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl of a run that nobody disturbs, with validations."""
    config = configuration(dataset, tmp_path_factory.mktemp("validated"), *VALIDATED)
    training.run(config)
    assert validations_in_report(config) == [2, 4, 6]
    return rows_of(config)


def rows_of(config: RunConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()]


def validations_in_report(config: RunConfig) -> list[int]:
    (data,) = re.findall(
        r'preview\.take\("meta",null,(.*)\);\n</script>', Path(config.run_dir, "report.html").read_text()
    )
    (chart,) = dict(json.loads(data)["run"]["sections"])["Validation"]
    return [step for step, _ in chart["lines"][0]["points"]]


@pytest.mark.parametrize("killed_in", ["validation", "step"])
def test_a_validation_that_a_kill_prevented_comes_after_the_resume(
    dataset: Path, tmp_path: Path, validated: list[dict[str, Any]], killed_in: str
) -> None:
    """Killed between the checkpoint of step 4 and its validation, or after that, when it must not come twice."""
    config = configuration(dataset, tmp_path / "run", *VALIDATED)

    def train() -> None:
        hook = "on_validation_epoch_start" if killed_in == "validation" else "on_before_optimizer_step"
        original = getattr(VisionLanguageModule, hook)

        def dying(self: VisionLanguageModule, *arguments: Any) -> None:
            if self.trainer.global_step == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            original(self, *arguments)

        setattr(VisionLanguageModule, hook, dying)
        training.run(config)

    assert start_forked(train).result() == (False, f"no result, exit status {-signal.SIGKILL}")
    assert ({"validation_loss"} & rows_of(config)[-1].keys() == set()) == (killed_in == "validation")
    training.run(config, resume=True)
    assert rows_of(config) == validated
    assert validations_in_report(config) == [2, 4, 6]


def test_the_first_line_after_a_resume_is_of_all_its_steps(
    dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The mean is that of the losses in metrics.jsonl since the line before, also where a checkpoint lies between."""
    settings = ("train.log_interval=4", "checkpoint.interval=3", "validation.limit_batches=0")
    with caplog.at_level("INFO"):
        training.run(configuration(dataset, tmp_path / "run", *settings, "train.max_steps=6"))
        caplog.clear()
        training.run(configuration(dataset, tmp_path / "run", *settings, "train.max_steps=8"), resume=True)
    losses = read_losses(tmp_path / "run")
    lines = re.findall(r"step 8/8  loss (\S+)", caplog.text)
    assert lines == [f"{sum(losses[step] for step in (5, 6, 7, 8)) / 4:.4f}"]
    assert lines != [f"{sum(losses[step] for step in (7, 8)) / 2:.4f}"]


def test_a_run_that_is_asked_to_stop_leaves_without_a_validation(
    dataset: Path, tmp_path: Path, validated: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(dataset, tmp_path / "run", *VALIDATED)
    original = VisionLanguageModule.training_step

    def training_step(self: VisionLanguageModule, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(VisionLanguageModule, "training_step", training_step)
        assert training.run(config).step == 4  # a validation is due after this step
    assert [row["step"] for row in rows_of(config) if "validation_loss" in row] == [2]
    assert {path.name for path in Path(config.run_dir).iterdir() if path.name.startswith("report")} == {"report.html"}
    assert "SIGTERM" in Path(config.run_dir, "report.html").read_text()
    training.run(config, resume=True)
    assert rows_of(config) == validated


# Several processes ---------------------------------------------------------------------------------------------------


def record_keys(folder: Path, stop_at: int | None) -> None:
    """Let every microbatch be written down with its step; die at one, all ranks together."""
    original = VisionLanguageModule.training_step

    def training_step(self: VisionLanguageModule, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == stop_at:
            os._exit(9)
        assert batch.__valid__ is None or bool(batch.__valid__.all())
        with (folder / f"rank{self.global_rank}.txt").open("a") as file:
            file.write(f"{self.trainer.global_step} {','.join(batch.__key__)}\n")
        return original(self, batch, batch_idx)

    VisionLanguageModule.training_step = training_step  # type: ignore[method-assign]


def train_on(ranks: int, config: RunConfig, folder: Path, *, resume: bool = False, stop_at: int | None = None) -> Any:
    """Train on some ranks and return, by step, the set of microbatches that all of them together trained on."""
    folder.mkdir()
    port = free_port()

    def train(rank: int) -> None:
        if ranks > 1:
            become_rank(rank, ranks, port)
        record_keys(folder, stop_at)
        training.run(config, resume=resume)

    if stop_at is None:
        run_forked(ranks, train)
    else:
        with pytest.raises(AssertionError, match="exit status 9"):
            run_forked(ranks, train)
    steps: dict[int, set[str]] = {}
    for path in folder.glob("rank*.txt"):
        for line in path.read_text().splitlines():
            step, keys = line.split()
            assert keys not in steps.setdefault(int(step), set())
            steps[int(step)].add(keys)
    return steps


EPOCH = ["train.max_steps=20", "data.global_batch_size=4", "checkpoint.interval=5", "data.num_workers=1"]


@pytest.fixture(scope="module")
def whole(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[int, float]]:
    """Return what one process trains on, and its losses, by step."""
    folder = tmp_path_factory.mktemp("whole")
    steps = train_on(1, configuration(dataset, folder / "run", *EPOCH), folder / "keys")
    assert {len(microbatches) for microbatches in steps.values()} == {2}
    return steps, read_losses(folder / "run")


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_ddp_stopped_in_an_epoch_goes_on_exactly(
    dataset: Path, tmp_path: Path, whole: tuple[Any, dict[int, float]], before: int, after: int
) -> None:
    steps, expected = whole
    config = configuration(dataset, tmp_path / "run", *EPOCH)
    first = train_on(before, config, tmp_path / "keys before", stop_at=8)
    assert first == {step: steps[step] for step in range(8)}
    second = train_on(after, config, tmp_path / "keys after", resume=True)
    assert second == {step: steps[step] for step in range(5, 20)}
    losses = read_losses(config.run_dir)
    assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_samples_are_withdrawn_where_a_run_goes_on_and_stay_so(
    dataset: Path, tmp_path: Path, whole: tuple[Any, dict[int, float]], ranks: int
) -> None:
    """By `data.ban`; the checkpoints remember, so a later resume does without it."""
    steps, _ = whole
    later = sorted({key for step in range(5, 20) for keys in steps[step] for key in keys.split(",")})
    gone = later[::7]
    (tmp_path / "gone.txt").write_text("\n".join(["# by request", *gone]))
    run_dir = tmp_path / "run"
    first = train_on(1, configuration(dataset, run_dir, *EPOCH), tmp_path / "first", stop_at=8)
    assert first == {step: steps[step] for step in range(8)}
    banning = configuration(
        dataset, run_dir, *EPOCH, f"data.ban={tmp_path / 'gone.txt'}", f"data.ban_dataset={dataset}"
    )
    second = train_on(ranks, banning, tmp_path / "second", resume=True, stop_at=13)
    third = train_on(1, configuration(dataset, run_dir, *EPOCH), tmp_path / "third", resume=True)
    assert [*second, *third] == [*range(5, 13), *range(10, 20)]
    seen = {key for some in (second, third) for each in some.values() for keys in each for key in keys.split(",")}
    assert seen >= {*later} - {*gone}
    assert not seen & {*gone}
    elsewhere = configuration(
        dataset, run_dir, *EPOCH, f"data.ban={tmp_path / 'gone.txt'}", "data.ban_dataset=/elsewhere"
    )
    with pytest.raises(ConfigurationError, match="'/elsewhere' is not the path of a dataset of the mix"):
        training.dry_run(elsewhere)
    (tmp_path / "gone.txt").write_text("nobody\n")
    with pytest.raises(ConfigurationError, match=r"ban: 1 of 1 keys are not in .*: 'nobody'"):
        training.dry_run(banning)


def test_another_global_batch_size_is_said_and_steps_are_not_named_wrongly(
    dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ["train.max_steps=10", *EPOCH[1:]]
    config = configuration(dataset, tmp_path / "run", *settings)
    training.run(config)
    shown = ["preview", config.run_dir, "--step"]
    output_of(*shown, 9)
    assert "global_batch_size" not in caplog.text
    changed = ["data.global_batch_size=8", "train.max_steps=20"]
    training.run(configuration(dataset, tmp_path / "run", *settings, *changed), resume=True)
    assert "data.global_batch_size was 4, and is 8 from here on" in caplog.text
    output = refusal_of(*shown, 19)
    assert "is at step 15 of its run, but" in output
    assert "that of step 10:" in output  # 10 steps of 4 and 5 of 8
    output_of(*shown[:-1])


def test_other_settings_of_samples_are_said(dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    prepare_run_dir(configuration(dataset, run), run, resume=False, overwrite=False)
    prepare_run_dir(configuration(dataset, run), run, resume=True, overwrite=False)
    assert "from here on" not in caplog.text
    prepare_run_dir(configuration(dataset, run, "data.max_num_images=3"), run, resume=True, overwrite=False)
    assert "data.max_num_images was None, and is 3 from here on" in caplog.text


def mixed(folder: Path, dataset: Path) -> Path:
    """Write a mix of a dataset and another one."""
    more = create_captioning_test_dataset(folder / "more", num_train=12, num_val=2)
    blend = f"blend: [{{path: {dataset}}}, {{path: {more}}}]"
    (folder / "mix.yaml").write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\n"
        f"splits: {{train: {{{blend}}}, val: {{path: {dataset}}}}}\n"
    )
    return folder / "mix.yaml"


def test_steps_before_the_last_checkpoint_of_a_packed_mix_are_shown(dataset: Path, tmp_path: Path) -> None:
    """Lanes share the buffers of small data, and have drawn what their buffer has."""
    settings = ["train.max_steps=10", "data.packing_buffer_size=4", *EPOCH[1:], "checkpoint.keep=1"]
    config = configuration(mixed(tmp_path, dataset), tmp_path / "run", *settings)
    training.run(config)
    assert "step 3" in output_of("preview", config.run_dir, "--step", 3)


def test_steps_before_the_mix_changed_are_not_shown_by_the_mix_of_today(dataset: Path, tmp_path: Path) -> None:
    settings = ["train.max_steps=10", *EPOCH[1:], "checkpoint.keep=1"]
    config = configuration(dataset, tmp_path / "run", *settings)
    training.run(config)
    output_of("preview", config.run_dir, "--step", 3)
    changed = ["data.on_mismatch=adapt", "train.max_steps=15"]
    training.run(configuration(mixed(tmp_path, dataset), tmp_path / "run", *settings, *changed), resume=True)
    assert "changed before" in refusal_of("preview", config.run_dir, "--step", 12)


def test_another_schedule_of_the_learning_rate_is_said(
    dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A cosine from 0.01 to 0.001, which halfway is 0.0055."""
    settings = ["optimizer.lr=0.01", "optimizer.min_lr=0.001", "optimizer.warmup_steps=0", "validation.generate=false"]
    run = tmp_path / "run"
    training.run(configuration(dataset, run, *settings, "train.max_steps=2"))
    training.run(configuration(dataset, run, *settings, "train.max_steps=2"), resume=True)
    assert "learning rate" not in caplog.text
    training.run(configuration(dataset, run, *settings, "train.max_steps=4"), resume=True)
    assert re.search(
        r"the learning rate of step 2 was to be 0\.001 \(lr=0\.01, .* at step 2\), and is 0\.0055 \(.* at step 4\) "
        r"from here on: .*run/config\.yaml",
        caplog.text,
    )
