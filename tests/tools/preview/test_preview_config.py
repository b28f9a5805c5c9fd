"""`energon preview --config`: batches and steps of the script's own runs, as their models get them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import answer, energon, output_of, refusal_of
from made import made_once
from paths import CONFIGS

pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")

from conversations import conversations_dataset

from energon_bridge.training import run as training
from energon_bridge.training.callbacks import list_checkpoints
from energon_bridge.training.config_file import load_config
from energon_bridge.training.module import VisionLanguageModule

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*")


conversations = made_once(conversations_dataset, num_train=30, num_val=3)


def test_a_step_of_a_run_is_what_its_model_was_given(
    conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    train = VisionLanguageModule.training_step

    def spy(module: Any, batch: Any, *args: Any) -> Any:
        seen.append((batch.sample_keys, batch.tokens.tolist(), batch.loss_mask.tolist()))
        return train(module, batch, *args)

    monkeypatch.setattr(VisionLanguageModule, "training_step", spy)
    settings = (f"data.path={conversations}", f"run_dir={tmp_path / 'run'}", "data.trust_remote_code=true")
    short = ("train.max_steps=7", "checkpoint.interval=4", "validation.generate=false", "validation.limit_batches=0")
    training.run(load_config(CONFIGS / "packed.yaml", [*settings, *short]))
    assert len(seen) == 14  # two microbatches in a step
    (checkpoint, *_) = list_checkpoints(tmp_path / "run" / "checkpoints")
    for sources, steps in (((), (0, 5)), ((checkpoint,), (4, 6))):
        for step in steps:
            found = answer("preview", *sources, "--config", tmp_path / "run" / "config.yaml", "--step", step)
            assert [one["step"] for one in found["batches"]] == [step, step]
            for batch, (keys, tokens, losses) in zip(found["batches"], seen[2 * step : 2 * step + 2], strict=True):
                segments = [one for row in batch["rows"] for one in row["segments"]]
                assert [one["key"] for one in segments] == keys
                assert [row["length"] for row in batch["rows"]] == [len(row) for row in tokens]
                learned = [
                    [token["label"] for token in one["tokens"] if token["label"] is not None] for one in segments
                ]
                assert sum(map(len, learned)) == sum(map(sum, losses))
            assert {one["key"] for one in found["samples"]} == {
                key for pair in seen[2 * step : 2 * step + 2] for key in pair[0]
            }
    run = tmp_path / "run"  # by its folder: the configuration, and the latest checkpoint before the step
    for step, state in ((0, ()), (5, (checkpoint,))):
        explicit = answer("preview", *state, "--config", run / "config.yaml", "--step", step)
        assert answer("preview", run, "--step", step)["batches"] == explicit["batches"]
    early = energon("preview", checkpoint, "--config", tmp_path / "run" / "config.yaml", "--step", 3)
    assert "step 3 is before the state, which is at step 4" in early.output
    late = energon("preview", tmp_path / "run", "--step", 7)
    assert "the run has the steps 0 to 6 (train.max_steps=7); there is no step 7. For a longer run" in late.output
    key = found["samples"][0]["key"]
    assert [one["key"] for one in answer("preview", run, "--key", key, "--trust-remote-code")["samples"]] == [key]
    both = energon("preview", run, "--step", 5, "--batches", 2)
    assert "--batches counts steps from where a run is: leave it out, or give it without --step" in both.output
    output_of("preview", tmp_path / "run", "train.max_steps=8", "--step", 7)


def test_steps_after_the_data_grew_are_what_the_model_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint before them is of the data as it was."""
    seen: list[Any] = []
    train = VisionLanguageModule.training_step

    def spy(module: Any, batch: Any, *args: Any) -> Any:
        seen.append([key for row in batch.sample_keys for key in ([row] if isinstance(row, str) else row)])
        return train(module, batch, *args)

    monkeypatch.setattr(VisionLanguageModule, "training_step", spy)
    settings = [f"data.path={tmp_path / 'grown'}", f"run_dir={tmp_path / 'run'}", "data.trust_remote_code=true"]
    settings += ["checkpoint.interval=4", "validation.generate=false", "validation.limit_batches=0"]
    for size, more in ((30, ["train.max_steps=4"]), (50, ["train.max_steps=8", "data.on_mismatch=adapt"])):
        shutil.rmtree(tmp_path / "grown", ignore_errors=True)
        conversations_dataset(tmp_path / "grown", num_train=size, num_val=3)
        training.run(load_config(CONFIGS / "packed.yaml", [*settings, *more]), resume=size == 50)
    found = answer("preview", tmp_path / "run", "--step", 6)["batches"]
    shown = [[one["key"] for row in batch["rows"] for one in row["segments"]] for batch in found]
    assert shown == seen[12:14]
    shutil.rmtree(tmp_path / "grown")
    conversations_dataset(tmp_path / "grown", num_train=60, num_val=3)  # and the run has not gone on with these
    assert "different data" in refusal_of("preview", tmp_path / "run", "--step", 6)


def test_batches_are_shown_before_anything_was_trained(conversations: Path, tmp_path: Path) -> None:
    config = CONFIGS / "packed.yaml"
    settings = (f"data.path={conversations}", "data.trust_remote_code=true", f"run_dir={tmp_path / 'run'}")
    output = output_of("preview", "--config", config, *settings, "--batches", 1, "--html", tmp_path / "out")
    assert "in 2 batches: open" in output
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_configuration_without_data_is_refused(tmp_path: Path) -> None:
    config = CONFIGS / "packed.yaml"
    assert str(tmp_path / "none") in refusal_of("preview", "--config", config, f"data.path={tmp_path / 'none'}")
