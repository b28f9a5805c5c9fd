"""The examples run: stopped and resumed, with the losses of a run that was not (the Trainer's: test_huggingface.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # optimizers import it: once here, not in every process that is forked
from forked import become_rank, free_port, run_forked
from paths import EXAMPLES
from transformers import CLIPImageProcessorPil, LlavaForConditionalGeneration  # noqa: F401  - for the same reason

from energon_bridge.testing import create_captioning_test_dataset


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain_loop(folder: Path, steps: int, *options: str, processes: int = 1) -> list[float]:
    port = free_port()
    data = folder.parent / "captions"
    if not data.exists():
        create_captioning_test_dataset(data)

    def process(rank: int) -> list[float]:
        torch.set_num_threads(1)
        if processes > 1:
            become_rank(rank, processes, port)
        return load("plain_loop").main(
            ["--data", str(data), "--output", str(folder), "--max-steps", str(steps), *options]
        )

    return run_forked(processes, process)[0]


def test_the_plain_loop_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = plain_loop(tmp_path / "whole", 6)
    assert whole[-1] < whole[0]
    assert plain_loop(tmp_path / "run", 3) == whole[:3]
    assert plain_loop(tmp_path / "run", 6, "--resume") == whole[3:]


def test_the_plain_loop_on_other_numbers_of_processes(tmp_path: Path) -> None:
    whole = plain_loop(tmp_path / "whole", 6)
    assert plain_loop(tmp_path / "run", 3, processes=2) == pytest.approx(whole[:3], rel=1e-4)
    assert plain_loop(tmp_path / "run", 6, "--resume", processes=4) == pytest.approx(whole[3:], rel=1e-4)


def test_moving_over_begins_at_the_step(tmp_path: Path) -> None:
    data = create_captioning_test_dataset(tmp_path)

    def keys(rank: int) -> list[list[list[str]]]:
        example = load("migrate_from_megatron_energon")
        return [example.main(["--data", str(data), "--steps-done", str(step)]) for step in (0, 2, 1000)]

    start, later, far = run_forked(1, keys)[0]
    assert start[2] == later[0]
    assert [len(row) for row in far] == [4, 4, 4]
