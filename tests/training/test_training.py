"""A training run from the inside: what it writes, how it stops and goes on, what it refuses."""

from __future__ import annotations

import importlib
import json
import logging
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import no_room
from keyed import write_mix
from made import made_once
from paths import CONFIGS, REPOSITORY

pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")

from forked import become_rank, free_port, run_afresh, run_forked
from run_outputs import hexes, read_losses, read_predictions, run_with_a_stop

from energon_bridge import read_quarantine
from energon_bridge.core.errors import (
    BatchSizeMismatchError,
    ConfigurationError,
    DatasetNotFoundError,
    EnergonError,
    StorageError,
)
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.training import run as training
from energon_bridge.training.callbacks import AtomicCheckpointIO, append_metrics, list_checkpoints, rate
from energon_bridge.training.config import RunConfig
from energon_bridge.training.config_file import load_config
from energon_bridge.training.generation import Prediction, exact_match, write_predictions
from energon_bridge.training.module import VisionLanguageModule
from energon_bridge.training.run import main_rank_first
from energon_bridge.training.run_folder import prepare_run_dir, restore_replaced
from energon_bridge.training.run_model import dataset_captions, write_model_of_run

NUM_VAL = 5

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*")


dataset = made_once(create_captioning_test_dataset, num_train=12, num_val=NUM_VAL)


@pytest.fixture
def smoke(dataset: Path, tmp_path: Path) -> RunConfig:
    return configuration(dataset, tmp_path / "run")


def configuration(dataset: Path, run_dir: Path, *overrides: str) -> RunConfig:
    return load_config(CONFIGS / "smoke.yaml", [f"data.path={dataset}", f"run_dir={run_dir}", *overrides])


@pytest.fixture(scope="module")
def finished(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Any]:
    """Return the configuration and the result of one whole run."""
    config = configuration(dataset, tmp_path_factory.mktemp("finished") / "run")
    return config, training.run(config)


# What a run leaves ---------------------------------------------------------------------------------------------------


def test_what_a_run_leaves(finished: tuple[RunConfig, Any]) -> None:
    config, result = finished
    assert (result.step, result.stopped, result.main_rank) == (6, False, True)
    assert result.validation_loss > 0
    run_dir = Path(config.run_dir)
    names = ["checkpoints", "config.yaml", "metrics.jsonl", "model", "predictions.jsonl"]
    names += ["report-samples", "report.html"]
    assert sorted(path.name for path in run_dir.iterdir()) == names
    assert load_config(run_dir / "config.yaml") == config
    losses = read_losses(run_dir)
    assert list(losses) == [1, 2, 3, 4, 5, 6]
    assert losses[6] < losses[1]
    predictions = read_predictions(run_dir)
    assert [p.key for p in predictions] == [f"val-{i:05d}" for i in range(NUM_VAL)]
    assert all(p.expected.startswith("a ") for p in predictions)
    assert exact_match(predictions) == result.read
    checkpoints = list_checkpoints(run_dir / "checkpoints")
    assert [path.name for path in checkpoints] == ["step-0000004.ckpt", "step-0000006.ckpt"]
    state = torch.load(checkpoints[-1], weights_only=True)
    assert state["global_step"] == state["EnergonMultiModalDataModule"]["global_step"] == 6
    assert len(state["loops"]["fit_loop"]["state_dict"]["combined_loader"]) == 1


def test_the_same_seed_gives_the_same_losses_whatever_is_validated_kept_and_logged(
    finished: tuple[RunConfig, Any], dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = configuration(dataset, tmp_path / "same", "validation.interval=2", "checkpoint.keep=0")
    with caplog.at_level(logging.INFO, logger="energon_bridge.training"):
        result = training.run(config)
    assert (result.read, result.validation_loss) == (finished[1].read, finished[1].validation_loss)
    assert hexes(config.run_dir) == hexes(finished[0].run_dir)
    for run, steps in ((config, [2, 4, 6]), (finished[0], [6])):
        rows = [json.loads(line) for line in (Path(run.run_dir) / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if "validation_loss" in row] == steps
        assert rows[-1] == {"step": 6, "validation_loss": result.validation_loss}
        assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    assert [int(p.name[5:12]) for p in list_checkpoints(tmp_path / "same" / "checkpoints")] == [2, 4, 6]
    lines = [record.message for record in caplog.records if record.message.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["2/6", "4/6", "6/6"]
    assert all(word in line for line in lines for word in ("loss ", "samples/s", "waiting for data "))
    other = configuration(dataset, tmp_path / "other", "seed=1", "validation.generate=false")
    assert training.run(other).read is None
    assert not (tmp_path / "other" / "predictions.jsonl").exists()
    assert hexes(other.run_dir) != hexes(finished[0].run_dir)


# Stopping and going on -----------------------------------------------------------------------------------------------


def test_a_finished_run_can_be_resumed_and_gives_the_same_result(
    finished: tuple[RunConfig, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config, result = finished
    before = (Path(config.run_dir) / "predictions.jsonl").read_bytes()
    assert training.run(config, resume=True) == result
    assert (Path(config.run_dir) / "predictions.jsonl").read_bytes() == before
    assert f"the run is complete at step {result.step}: to go on, raise train.max_steps" in caplog.text


@pytest.mark.parametrize("room", [10, 300, 5_000, 30_000, 200_000])
def test_a_full_disk_is_said(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], room: int) -> None:
    """By the description of the run, its tokenizer, its model, or the checkpoint."""
    run_dir = tmp_path / "run"
    settings = ["train.max_steps=1", "checkpoint.interval=1", "validation.generate=false"]
    command = ["--config", str(CONFIGS / "smoke.yaml"), f"data.path={dataset}", f"run_dir={run_dir}", *settings]
    with no_room(room):
        assert importlib.import_module("energon_bridge.training.__main__").main(command) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(rf"StorageError: .*File too large.*{tmp_path}\S* has [\d,]+ bytes free: make room.*\n", said)


def test_a_report_that_does_not_fit_is_said_and_the_run_is_done(
    dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(dataset, tmp_path / "run", "train.max_steps=1")
    written = "energon_bridge.tools.report.page.write_run"
    before = importlib.import_module(written.rpartition(".")[0]).write_run

    def without_room(*arguments: Any) -> None:
        with no_room():
            before(*arguments)

    monkeypatch.setattr(written, without_room)
    training.run(config)
    assert re.search(rf"its report is missing: {tmp_path}/run/report.html: cannot write: .*File too large", caplog.text)
    assert not (tmp_path / "run/report.html").exists()
    assert list_checkpoints(tmp_path / "run/checkpoints")


def test_resume_without_a_checkpoint_starts_the_run_and_says_so(
    smoke: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    beside = Path(f"{smoke.run_dir}s")
    (beside / "checkpoints" / "step-0000200.ckpt").mkdir(parents=True)
    config = replace(smoke, train=replace(smoke.train, max_steps=1))
    assert training.run(config, resume=True).step == 1
    assert f"no checkpoint in {smoke.run_dir}: starting at step 0. Did you mean '{beside.name}'?" in caplog.text


def test_steps_that_run_again_replace_their_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "metrics.jsonl"
    append_metrics(path, [(1, 0.1), (2, 0.1)], [5.0, 4.0])
    append_metrics(path, [(3, 0.1)], [3.0])
    assert not caplog.text
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # where the process was killed
    append_metrics(path, [(2, 0.2)], [4.5])
    append_metrics(path, [(3, 0.2)], [3.5])
    assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == [5.0, 4.5, 3.5]
    assert "the earlier lines from step 2 on are replaced" in caplog.text
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_checkpoint_of_another_model_is_refused(smoke: RunConfig, dataset: Path, tmp_path: Path) -> None:
    config = replace(smoke, train=replace(smoke.train, max_steps=1))
    training.run(config)
    other = tmp_path / "other"
    write_model_of_run(replace(config, model=replace(config.model, hidden_size=32)), other)
    for changed, complaint in (
        (
            "model.hidden_size=32",
            r"RUN cannot go on with model\.hidden_size=32 \(there: 16\): .*config\.yaml.*run_dir",
        ),
        ("model.freeze=[lm_head]", r"model\.freeze=\('lm_head',\) \(there: \(\)\)"),
        ("trainer=megatron", r"trainer=megatron \(there: lightning\)"),
        (
            f"model.name_or_path={other}",
            r"checkpoint RUN/checkpoints/step-0000001\.ckpt belongs to another model than \w+ of this run: \d+ of \d+ "
            r"tensors differ, the first \(shapes\): \S+ \([\d, ]+\), here \([\d, ]+\); .*Set model\.\* as when",
        ),
    ):
        again = configuration(dataset, Path(config.run_dir), "train.max_steps=1", "model.init=random", changed)
        with pytest.raises(ConfigurationError, match=complaint.replace("RUN", re.escape(config.run_dir))):
            training.run(again, resume=True)
        assert load_config(Path(config.run_dir) / "config.yaml") == config
    assert training.run(config, resume=True).step == 1


def test_a_run_in_a_folder_stays_unless_it_is_to_be_replaced(smoke: RunConfig) -> None:
    config = replace(smoke, train=replace(smoke.train, max_steps=1))
    run_dir = Path(config.run_dir)

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}

    no_data, no_workers, no_model, no_rate = (
        replace(config, data=replace(config.data, path="/nowhere/data")),
        replace(config, data=replace(config.data, num_workers=-1)),
        replace(config, model=replace(config.model, preset="no such preset")),
        replace(config, data=replace(config.data, error_policy={"max_error_rate": "1%"})),
    )
    for wrong, error in ((no_data, DatasetNotFoundError), (no_workers, ConfigurationError)):
        with pytest.raises(error):
            training.run(wrong)
        assert not run_dir.exists()
    assert training.run(config).step == 1
    before = files()
    with pytest.raises(ConfigurationError, match=r"already contains a run.*--resume.*--overwrite"):
        training.run(config)
    for left in (["config.yaml", "checkpoints"], []):  # a replacement is killed while it moves the parts, or later
        prepare_run_dir(config, run_dir, resume=False, overwrite=True)
        aside = run_dir / ".replaced"
        assert {path.name for path in aside.iterdir()} >= {"config.yaml", "checkpoints", "metrics.jsonl"}
        if left:
            shutil.rmtree(run_dir / "model")
            aside = aside.rename(run_dir / ".moving")
            for name in left:
                (aside / name).replace(run_dir / name)
        restore_replaced(run_dir)
        assert files() == before
    for wrong in (no_data, no_workers, no_model, no_rate):
        with pytest.raises(EnergonError):
            training.run(wrong, overwrite=True)
        assert files() == before
    longer = replace(smoke, train=replace(smoke.train, max_steps=2))
    assert training.run(longer, overwrite=True).step == 2
    assert list(read_losses(run_dir)) == [1, 2]
    assert not [path for path in run_dir.iterdir() if path.name.startswith(".")]
    with pytest.raises(BatchSizeMismatchError, match=r"set batch_size=\d+ \(data.micro_batch_size\) to resume"):
        training.run(replace(longer, data=replace(longer.data, micro_batch_size=1)), resume=True)
    assert load_config(run_dir / "config.yaml") == longer


def test_sigterm_saves_and_leaves_and_the_run_goes_on(
    finished: tuple[RunConfig, Any], smoke: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    assert run_with_a_stop(smoke, monkeypatch, at=3).step == 6
    assert signal.getsignal(signal.SIGTERM) == handler
    assert hexes(smoke.run_dir) == hexes(finished[0].run_dir)


def test_the_report_has_the_losses_of_single_samples(tmp_path: Path) -> None:
    """They are those of microbatches of one sample, of a model that does not change."""
    few = create_captioning_test_dataset(tmp_path / "few", num_train=6, num_val=3)
    of_each: list[dict[str, float]] = []
    for size in (1, 2):
        own = (f"data.micro_batch_size={size}", "optimizer.lr=1e-12", "train.max_steps=3", "validation.limit_batches=0")
        config = configuration(few, tmp_path / f"run{size}", *own)
        training.run(config)
        text = Path(config.run_dir, "report.html").read_text()
        (data,) = re.findall(r'preview\.take\("meta",null,(.*)\);\n</script>', text)
        rows = dict(json.loads(data)["run"]["sections"])["Highest losses, and their samples"][0]["rows"]
        assert all(len(row[-1]["keys"]) == len(row[-1]["links"]) == 1 for row in rows)
        of_each.append({row[-1]["keys"][0]: float(row[0]) for row in rows})
    alone, together = of_each
    assert len(alone) == 6
    assert together == pytest.approx(alone, abs=2e-4)
    assert len(set(together.values())) > 1


def test_a_mix_has_a_validation_loss_for_each_dataset(
    dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_captioning_test_dataset(tmp_path / "more", num_train=4, num_val=3)
    both = {"blend_epochized": [{"repetitions": 1, "path": str(path)} for path in (dataset, tmp_path / "more")]}
    write_mix(tmp_path / "mix.yaml", train=both, val=both)
    modules = []
    step_end = VisionLanguageModule.on_validation_epoch_end
    monkeypatch.setattr(
        VisionLanguageModule, "on_validation_epoch_end", lambda module: (step_end(module), modules.append(module))
    )
    config = configuration(tmp_path / "mix.yaml", tmp_path / "run", "validation.each_dataset=true", "train.max_steps=2")
    with caplog.at_level(logging.INFO):
        result = training.run(config)
    first, second = modules[-1].validation_losses
    assert first != second
    assert min(first, second) < result.validation_loss < max(first, second)
    assert f"{dataset.name} {first:.4f}, more {second:.4f}" in caplog.text
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["validation_losses"] == {dataset.name: first, "more": second}
    predictions = read_predictions(tmp_path / "run")
    assert [p.key for p in predictions] == [f"val-{i:05d}" for i in (0, 1, 2, 3, 4, 0, 1, 2)]


def test_a_checkpoint_is_whole_or_not_there(tmp_path: Path) -> None:
    target = tmp_path / "checkpoints" / "step-0000001.ckpt"
    AtomicCheckpointIO().save_checkpoint({"a": 1}, target)
    (target.parent / ".step-0000002.ckpt.part").write_bytes(b"half")

    class Unwritable:
        def __reduce__(self) -> Any:
            raise RuntimeError("cannot be written")

    with pytest.raises(RuntimeError, match="cannot be written"):
        AtomicCheckpointIO().save_checkpoint({"a": Unwritable()}, target)
    full = target.with_name("step-0000003.ckpt")
    with (
        no_room(30_000),
        pytest.raises(StorageError, match=rf"{target.parent}/\.{full.name}\.part: cannot write: .*File"),
    ):
        AtomicCheckpointIO().save_checkpoint({"a": torch.zeros(100_000)}, full)
    assert list(target.parent.iterdir()) == [target], "what did not fit takes no room"
    assert torch.load(target, weights_only=True) == {"a": 1}
    AtomicCheckpointIO().save_checkpoint({"a": 2}, target)
    assert [path.name for path in target.parent.iterdir()] == [target.name]


# Log, dry run, presets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("package", "extra"), [("lightning", "lightning,hf"), ("transformers", "hf")])
def test_a_package_that_is_missing_is_named_with_its_extra(
    package: str, extra: str, dataset: Path, tmp_path: Path
) -> None:
    code = (
        f"sys.modules[{package!r}] = None; from energon_bridge.training.__main__ import main; "
        f"sys.exit(main(['--config', 'configs/smoke.yaml', 'data.path={dataset}', '--dry-run']))"
    )
    done = run_afresh(code, tmp_path, package)
    assert done.returncode == 2, done.stderr
    assert f"{package}, which is not installed: pip install 'energon-bridge[{extra}]'" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_accelerator_that_is_not_there_is_named(smoke: RunConfig) -> None:
    with pytest.raises(ConfigurationError, match=r"train\.accelerator=gpu: "):
        training.run(replace(smoke, train=replace(smoke.train, accelerator="gpu")))


def test_a_dry_run_describes_and_leaves_nothing(smoke: RunConfig) -> None:
    text = training.dry_run(smoke)
    assert "model: LlavaForConditionalGeneration" in text
    assert re.search(r"microbatch:\n  tokens:\n  - 2\n", text)
    assert not Path(smoke.run_dir).exists()


def test_a_setting_without_effect_on_the_samples_is_named(smoke: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    training.dry_run(replace(smoke, data=replace(smoke.data, chat_template="llava")))
    named = [r.message for r in caplog.records if r.message.startswith("data.chat_template='llava' has no effect: ")]
    assert len(named) == 1
    assert f"{smoke.data.path} has samples of type CaptioningSample" in named[0]


def test_a_dry_run_looks_for_what_is_validated(dataset: Path, tmp_path: Path) -> None:
    splits = (dataset / ".nv-meta/split.yaml").read_text()
    (dataset / ".nv-meta/train_only.yaml").write_text(splits.replace("val:", "held_out:"))
    config = configuration(dataset, tmp_path / "run", "data.split_config=train_only.yaml")
    with pytest.raises(ConfigurationError, match=r"^validation: .*no split part 'val'.*validation\.limit_batches=0$"):
        training.dry_run(config)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [("train.max_stepps=3", "train.max_steps"), ("optimizer.lr=0", "optimizer.lr must"), ("data.seq_length=x", "int")],
)
def test_a_dry_run_with_wrong_settings_still_looks_at_data_and_model(
    wrong: str, named: str, dataset: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says of data and model is what it says without the wrong settings."""
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    main = importlib.import_module("pretrain_vlm").main
    inputs = {"data.path": "/nowhere/data", "model.name_or_path": "/nowhere/model"}

    def said(*overrides: str, **inputs: str) -> str:
        given = [f"{name}={value}" for name, value in inputs.items()]
        assert main(["--config", str(CONFIGS / "smoke.yaml"), "--dry-run", *given, *overrides]) == 2
        return capsys.readouterr().err.partition("\n\nWhat ")[0].partition(": ")[2]

    both = said(**inputs)
    assert both.count("/nowhere/data") == both.count("/nowhere/model") == 1, both
    complaint, _, rest = said(wrong, **inputs).partition("\n")
    assert named in complaint
    assert rest == both
    for complaint in (said(wrong, **{"data.path": str(dataset)}), said(wrong)):
        assert named in complaint


def test_failed_samples_are_listed_as_a_configuration_says(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "a red one"}, {"role": "assistant", "content": "yes, red"}]
    lines = [{"messages": said[:1] if number == 3 else said} for number in range(8)]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = ["validation.limit_batches=0", "data.micro_batch_size=8", "data.global_batch_size=8"]
    config = configuration(
        path, tmp_path / "run", *settings, f"data.error_policy.quarantine={tmp_path / 'failed.jsonl'}"
    )
    training.dry_run(config)
    assert {failed.key for failed in read_quarantine(tmp_path / "failed.jsonl")} == {"3"}
    with pytest.raises(ConfigurationError, match=r"no key 'quarantin'. Did you mean 'quarantine'"):
        training.dry_run(configuration(path, tmp_path / "run", *settings, "data.error_policy.quarantin=x"))
    with pytest.raises(ConfigurationError, match="max_error_rate must be a number between 0 and 1"):
        training.dry_run(configuration(path, tmp_path / "run", *settings, "data.error_policy.max_error_rate=2"))


def test_the_script_says_what_is_missing_and_how_it_is_made(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    main = importlib.import_module("pretrain_vlm").main
    arguments = ["data.path=/nowhere/data", "model.name_or_path=/nowhere/model", "--dry-run"]
    assert main(["--config", str(CONFIGS / "llava15_pretrain.yaml"), *arguments]) == 2
    out, error = capsys.readouterr()
    assert "path: /nowhere/data" in out
    assert main(["--config", str(CONFIGS / "smoke.yaml"), "data.paht=x"]) == 2
    assert "Did you mean 'data.path'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--config", str(CONFIGS / "llava15_pretrain.yaml"), "--run-dir", "x"])
    assert "--run-dir. Settings have no dashes: section.key=value. Did you mean 'run_dir'?" in capsys.readouterr().err
    assert "data: /nowhere/data: no such folder" in error
    assert "model: model.name_or_path='/nowhere/model': no such folder" in error
    assert "#   energon convert blip_laion_cc_sbu_558k.json" in error


@pytest.mark.parametrize("path", sorted((CONFIGS).rglob("*.yaml")), ids=lambda path: path.name)
def test_a_configuration_says_where_its_data_and_model_come_from(path: Path) -> None:
    head = re.match(r"(#.*\n)+", path.read_text()).group()  # type: ignore[union-attr]
    if path.parent.name == "data":
        assert "docs/how-to/recipes.md" in head
        return
    assert "\n# Data" in head
    assert re.search(r"(Model|Data and model): ", head)


def test_captions_are_those_of_the_split(dataset: Path, caplog: pytest.LogCaptureFixture) -> None:
    captions = dataset_captions(str(dataset), limit=1000)
    with ThreadPoolExecutor(1) as pool:  # a tokenizer that is trained on them has a thread
        assert len(pool.submit(list, captions).result()) == 12
    assert "run in thread" not in caplog.text
    assert len(list(dataset_captions(str(dataset), limit=1000, split_part="val"))) == NUM_VAL


@pytest.mark.parametrize(("texts", "share"), [([], 0.0), ([("a", "a")], 1.0), ([("a", " a\n"), ("a", "b")], 0.5)])
def test_exact_match_is_the_share_of_right_answers(texts: list[tuple[str, str]], share: float, tmp_path: Path) -> None:
    predictions = [Prediction(key=str(i), expected=e, generated=g) for i, (e, g) in enumerate(texts)]
    assert exact_match(predictions) == share
    write_predictions(predictions, tmp_path / "predictions.jsonl")
    assert read_predictions(tmp_path) == predictions


# The script ----------------------------------------------------------------------------------------------------------


def test_a_refusal_of_the_main_rank_reaches_the_ranks_that_wait() -> None:
    port = free_port()

    def refused(rank: int) -> str:
        become_rank(rank, 2, port)
        torch.distributed.init_process_group("gloo")

        def prepare() -> None:
            raise ConfigurationError("the folder holds a run")

        with pytest.raises(ConfigurationError) as error:
            main_rank_first(prepare, rank == 0)
        torch.distributed.destroy_process_group()
        return str(error.value)

    assert run_forked(2, refused) == ["the folder holds a run"] * 2


@pytest.mark.parametrize(
    ("seen", "said"), [(0.0421, "0.042"), (0.6, "0.6"), (9.94, "9.9"), (10.4, "10"), (5432.1, "5432")]
)
def test_slow_steps_are_not_said_to_be_none(seen, said):
    assert rate(seen) == said
