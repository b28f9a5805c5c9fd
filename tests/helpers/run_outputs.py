"""What a training run writes into its folder, read back, and a run that is stopped on the way."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from energon_bridge.training.config import RunConfig
from energon_bridge.training.generation import Prediction


def read_losses(run_dir: str | Path) -> dict[int, float]:
    """Return the loss of each optimizer step; of a step that was run again after a resume, the later one."""
    rows = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "validation_loss" not in row}


def hexes(run_dir: str | Path) -> dict[int, str]:
    """Return the losses, exactly."""
    return {step: loss.hex() for step, loss in read_losses(run_dir).items()}


def read_predictions(run_dir: str | Path) -> list[Prediction]:
    """Return the predictions of the validation after the last step."""
    lines = Path(run_dir, "predictions.jsonl").read_text("utf-8").splitlines()
    return [Prediction(**json.loads(line)) for line in lines]


def run_with_a_stop(config: RunConfig, monkeypatch: pytest.MonkeyPatch, *, at: int) -> Any:
    """Run, stop by SIGTERM in the middle of a global batch of two microbatches, go on; return the result."""
    from energon_bridge.training import run as training
    from energon_bridge.training.module import VisionLanguageModule

    original = VisionLanguageModule.training_step

    def training_step(self: VisionLanguageModule, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == at - 1 and batch_idx % 2 == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(VisionLanguageModule, "training_step", training_step)
        stopped = training.run(config)
    assert (stopped.step, stopped.stopped, stopped.read) == (at, True, None)
    assert Path(config.run_dir, "checkpoints", f"step-{at:07d}.ckpt").is_file()
    return training.run(config, resume=True)
