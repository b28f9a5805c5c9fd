"""What a training run writes into its folder, read back."""

from __future__ import annotations

import json
from pathlib import Path

from energon_bridge.training.generation import Prediction


def read_losses(metrics_path: Path) -> dict[int, float]:
    """Return the loss of each optimizer step; of a step that was run again after a resume, the later one."""
    rows = [json.loads(line) for line in metrics_path.read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "validation_loss" not in row}


def read_predictions(path: Path) -> list[Prediction]:
    """Return the predictions of `predictions.jsonl`."""
    return [Prediction(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]
