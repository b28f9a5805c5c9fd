"""torchtitan's real trainer with our loader: killed and resumed, on other ranks too, with the same losses.

Optional: it starts `titan_pretrain.py` in the interpreter that ENERGON_TITAN_PYTHON names, which needs torchtitan of
August 2026 or later (docs/measured/programs.md says how to make one); without it, it is skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import free_port
from paths import REPOSITORY

from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.training.config import ModelConfig
from energon_bridge.training.presets import write_preset

PROGRAM = Path(__file__).with_name("titan_pretrain.py")
PYTHON = os.environ.get("ENERGON_TITAN_PYTHON")
STEPS, KILLED = 6, -9

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PYTHON is None, reason="ENERGON_TITAN_PYTHON is not set")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("titan")
    create_captioning_test_dataset(folder / "captions")
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 400, "image_size": 32}
    write_preset(
        ModelConfig(preset="tiny-qwen2.5-vl", patch_size=8, **sizes), folder / "model", lambda: ["a red circle"]
    )
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, 300, 200).astype(np.int32)
    rng.integers(1, 2000, lengths.sum()).astype(np.int32).tofile(folder / "corpus.bin")
    starts = 4 * (np.cumsum(lengths) - lengths)
    parts = (lengths, starts.astype(np.int64), np.arange(201))
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, 200, 201)
    (folder / "corpus.idx").write_bytes(head + b"".join(part.tobytes() for part in parts))
    return folder


def train(data: Path, out: Path, ranks: int, *options: str, kind: str) -> None:
    """Train, or go on, up to `STEPS`; with `--die-after`, the processes end by a signal."""
    out.mkdir(exist_ok=True)
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    command = [str(PYTHON), str(PROGRAM), str(data), str(out), str(STEPS), "--kind", kind, *options]
    environments = [os.environ | place | {"RANK": str(rank), "PYTHONPATH": path} for rank in range(ranks)]
    processes = [
        subprocess.Popen(command, env=one, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for one in environments
    ]
    outputs = [process.communicate(timeout=1200)[0] for process in processes]
    expected = KILLED if options else 0
    assert [process.returncode for process in processes] == [expected] * ranks, outputs[0][-3000:]


def records(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(out: Path) -> dict[int, float]:
    return dict(records(out / "losses"))


def batches(out: Path, ranks: int, first: int) -> list[Any]:
    """Return step and digest of all microbatches from a step on, of the last run."""
    found = [tuple(line) for rank in range(ranks) for line in records(out / f"batches-{rank}") if line[0] >= first]
    return sorted(set(found))


@pytest.mark.parametrize("kind", ["images", "text"])
def test_killed_and_resumed_it_trains_on_the_same(data: Path, tmp_path: Path, kind: str) -> None:
    whole, again, more = tmp_path / "whole", tmp_path / "again", tmp_path / "more"
    train(data, whole, 1, kind=kind)
    assert len(losses(whole)) == STEPS
    assert any(line[2] for line in records(whole / "batches-0")) == (kind == "images")
    train(data, again, 1, "--die-after", "3", kind=kind)  # saved after step 2
    shutil.copytree(again, more)
    for name in ("losses", "batches-0"):
        assert records(again / name) == records(whole / name)[: len(records(again / name))]
        (again / name).unlink()
        (more / name).unlink()
    train(data, again, 1, kind=kind)
    assert losses(again) == {step: loss for step, loss in losses(whole).items() if step > 2}
    assert batches(again, 1, 3) == batches(whole, 1, 3)
    train(data, more, 2, kind=kind)
    assert batches(more, 2, 3) == batches(whole, 1, 3)
    assert losses(more) == pytest.approx(losses(again), rel=1e-5)  # sums of two ranks are rounded otherwise
