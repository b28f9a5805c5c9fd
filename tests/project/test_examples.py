"""The examples run: stopped and resumed, with the losses of a run that was not (the Trainer's: test_huggingface.py)."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # optimizers import it: once here, not in every process that is forked
from forked import become_rank, free_port, run_forked
from paths import EXAMPLES
from titan import stand_in
from transformers import CLIPImageProcessorPil, LlavaForConditionalGeneration  # noqa: F401  - for the same reason

from energon_bridge.tools.testing import create_captioning_test_dataset


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells, one after the other in one process; values of last lines are shown as a notebook shows them."""
    path = EXAMPLES / "first_run.ipynb"
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            links = re.findall(r"\]\(([^)]+)\)", source)
            assert [link for link in links if not (EXAMPLES / link).exists()] == []
            continue
        assert (cell["outputs"], cell["execution_count"]) == ([], None), "clear the outputs"
        body = ast.parse(source).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), str(path), "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), str(path), "eval"), namespace)
            shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
    namespace["loader"].close()
    assert any(re.search(r"<table.*a (red|green|blue) (circle|square)", text, re.DOTALL) for text in shown)


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


@pytest.mark.parametrize("name", ["nemo_rl_sft", "megatron_bridge", "torchtitan_loader"])
@pytest.mark.filterwarnings("ignore:.*torch.distributed is", "ignore:.*assuming the intent", "ignore:.*TypedStorage")
def test_a_recipe_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of other trainers, in their manner: over the end of an epoch, with the losses of a run that was not stopped."""
    stand_in(monkeypatch)
    data = create_captioning_test_dataset(tmp_path / "captions", num_train=10, num_val=2)

    def train(folder: str, steps: int, *options: str) -> list[float]:
        arguments = ["--data", str(data), "--output", str(tmp_path / folder), "--max-steps", str(steps)]
        losses: list[float] = run_forked(1, lambda _: load(name).main([*arguments, *options]))[0]
        return losses

    whole = train("whole", 7)
    assert len({*whole}) == 7
    assert whole[-1] < whole[0]
    assert train("run", 3) == whole[:3]
    assert train("run", 7, "--resume") == whole[3:]


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`", "ignore:.*TypedStorage")
def test_lightning_with_a_model_of_each_group_goes_on_with_others(tmp_path: Path) -> None:
    """Two language ranks with one encoder rank, then with two: the losses of one and one."""
    data = create_captioning_test_dataset(tmp_path / "captions", num_train=24)

    def train(folder: str, steps: int, language: int, vision: int, *options: str) -> list[float]:
        port = free_port()
        arguments = ["--data", str(data), "--output", str(tmp_path / folder), "--max-steps", str(steps)]

        def process(rank: int) -> list[float]:
            torch.set_num_threads(1)
            become_rank(rank, language + vision, port)
            return load("lightning_two_groups").main([*arguments, "--language", str(language), *options])

        first, *others = run_forked(language + vision, process)
        assert others == [first] * len(others)
        return first

    whole = train("whole", 6, 1, 1)
    assert whole[-1] < whole[0]
    assert train("run", 3, 2, 1) == pytest.approx(whole[:3], rel=1e-4)
    assert train("run", 6, 2, 2, "--resume") == pytest.approx(whole[3:], rel=1e-4)
