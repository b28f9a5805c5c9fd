"""Megatron-LM's real `pretrain` with our provider: it trains, validates, saves, and a new process goes on.

Optional: `megatron.training` comes with megatron-core from 0.17 on, which needs Python 3.12, so these tests start
`megatron_pretrain.py` in the interpreter that ENERGON_MEGATRON_PYTHON names, or else in this one, and are skipped where
it cannot import it (docs/measured/programs.md says how to make one). The summary of the tests names what ran.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import free_port
from keyed import write_mix
from made import made_once
from paths import REPOSITORY

from energon_bridge.tools.testing import create_captioning_test_dataset

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("megatron_pretrain.py")
PROBE = """
import megatron.training.training
import energon_bridge.trainers.megatron_lm
import argparse, json, torch
from megatron.core.package_info import __version__
from megatron.training.arguments import add_megatron_arguments
add_megatron_arguments(argparse.ArgumentParser())  # that of 0.19.2 raises TypeError on Python 3.14
print(json.dumps([__version__, torch.cuda.device_count()]))
"""
TIMEOUT = 240.0

ITERATIONS, SAVED_AT, MICROBATCHES = 4, 2, 4
ARGUMENTS = shlex.split("""
    --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32
    --position-embedding-type learned_absolute --untie-embeddings-and-output-weights
    --tokenizer-type NullTokenizer --vocab-size 143 --dataloader-type external
    --micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-2 --log-interval 1
    --eval-iters 1 --eval-interval 2 --save-interval 2 --ckpt-format torch
    --transformer-impl local --attention-backend unfused --use-cpu-initialization
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm
""")
dataset = made_once(create_captioning_test_dataset, num_train=48, num_val=8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """What the ranks of a run are for, and how they get their data."""

    world: int = 1
    replicas: int = 1
    chunks: int = 1
    arguments: str = ""
    replica_loading: str = "every_rank"
    workers: int = 0
    resume: str = "files"


LAYOUTS = {
    "one rank": Layout(workers=1),
    "two replicas": Layout(world=2, replicas=2),
    "two tensor ranks": Layout(world=2, arguments="--tensor-model-parallel-size 2", replica_loading="one_rank"),
    "two pipeline stages": Layout(world=2, arguments="--pipeline-model-parallel-size 2"),
    "virtual pipeline stages": Layout(
        world=2,
        chunks=2,
        arguments="--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1",
        resume="seek",
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Megatron:
    """An interpreter that can import `megatron.training`."""

    python: str
    version: str
    devices: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What the model of a run saw, in global order: step, keys, digest and loss of each microbatch."""

    folder: Path
    training: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    exact: bool
    """Whether the same run gives the same losses to the bit: on the CPU."""


@pytest.fixture(scope="module")
def interpreter() -> Megatron:
    python = os.environ.get("ENERGON_MEGATRON_PYTHON") or sys.executable
    probe = subprocess.run(
        [python, "-W", "ignore", "-c", PROBE], capture_output=True, text=True, env=environment(), check=False
    )
    if probe.returncode:
        reason = (probe.stderr.strip().splitlines() or [f"exit status {probe.returncode}"])[-1]
        pytest.skip(
            f"{python} cannot run megatron.training ({reason}): with Python 3.12, pip install torch, then "
            "pip install -e '.[megatron]' six, and name that interpreter in ENERGON_MEGATRON_PYTHON"
        )
    version, devices = json.loads(probe.stdout.splitlines()[-1])
    return Megatron(python=python, version=version, devices=devices)


@pytest.fixture
def megatron(interpreter: Megatron, record_property: Callable[[str, object], None]) -> Megatron:
    record_property("megatron.training", interpreter.version)
    return interpreter


@pytest.fixture(scope="module")
def whole(interpreter: Megatron, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Return the uninterrupted run of a layout, which has saved in the middle and at its end."""
    runs: dict[str, Run] = {}

    def run(layout: str) -> Run:
        if layout not in runs:
            runs[layout] = pretrain(interpreter, dataset, tmp_path_factory.mktemp("run"), LAYOUTS[layout])
        return runs[layout]

    return run


def environment(**variables: str) -> dict[str, str]:
    # What PYTHONPATH names stays: it may be a checkout of Megatron-LM.
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"} | variables


def pretrain(megatron: Megatron, dataset: Path, folder: Path, layout: Layout, *arguments: str) -> Run:
    """Run `pretrain` in new processes, one for each rank."""
    cuda = megatron.devices >= layout.world
    command = [megatron.python, "-W", "ignore", str(PROGRAM), *ARGUMENTS, *layout.arguments.split(), *arguments]
    command += ["--distributed-backend", "nccl" if cuda else "gloo", "--num-workers", str(layout.workers)]
    command += [
        "--energon-path",
        str(dataset),
        "--energon-replica-loading",
        layout.replica_loading,
        "--record",
        str(folder),
    ]
    command += ["--save", str(folder / "model"), "--energon-resume", layout.resume]
    command += ["--dataloader-save", str(folder / "data")] if layout.resume == "files" else []
    shared = {"WORLD_SIZE": str(layout.world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {} if cuda else {"CUDA_VISIBLE_DEVICES": ""}
    logs = [folder / f"rank{rank}.log" for rank in range(layout.world)]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            variables = environment(**shared, RANK=str(rank), LOCAL_RANK=str(rank))
            with log.open("wb") as output:
                ranks.append(subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT))
        for rank in ranks:
            rank.wait(TIMEOUT)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    failed = [log.read_text()[-3000:] for rank, log in zip(ranks, logs, strict=True) if rank.returncode]
    assert not failed, "\n\n".join(failed)
    return read_run(folder, layout, exact=not cuda)


def read_run(folder: Path, layout: Layout, *, exact: bool) -> Run:
    """Read what the ranks recorded, and check that those of a replica saw the same."""
    replicas = []
    for replica in range(layout.replicas):
        ranks = [read_lines(path) for path in sorted(folder.glob(f"dp{replica}-*.jsonl"))]
        assert len(ranks) == layout.chunks * layout.world // layout.replicas
        seen = [[without_loss(line) for line in lines] for lines in ranks]
        assert all(lines == seen[0] for lines in seen)
        with_loss = [lines for lines in ranks if "loss" in lines[0]]  # of the last pipeline stage
        assert all(lines == with_loss[0] for lines in with_loss)
        replicas.append(with_loss[0])
    lines = [line for turn in zip(*replicas, strict=True) for line in turn]
    return Run(
        folder=folder,
        training=[line for line in lines if line["training"]],
        validation=[line for line in lines if not line["training"]],
        exact=exact,
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_loss(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "loss"}


def batches(lines: list[dict[str, Any]], first_step: int = 0) -> list[dict[str, Any]]:
    return [without_loss(line) for line in lines if line["step"] >= first_step]


def losses(lines: list[dict[str, Any]], first_step: int = 0) -> list[float]:
    return [line["loss"] for line in lines if line["step"] >= first_step]


def resumed(megatron: Megatron, dataset: Path, folder: Path, layout: str, before: Run) -> Run:
    """Go on from the checkpoint in the middle of another run."""
    arguments = ["--load", str(before.folder / "model"), "--ckpt-step", str(SAVED_AT)]
    arguments += ["--dataloader-load", str(before.folder / "data")] if LAYOUTS[layout].resume == "files" else []
    return pretrain(megatron, dataset, folder, LAYOUTS[layout], *arguments)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pretrain_trains_and_validates(layout: str, megatron: Megatron, whole: Callable[[str], Run]) -> None:
    run = whole(layout)
    assert [line["step"] for line in run.training] == sorted(list(range(ITERATIONS)) * MICROBATCHES)
    assert len({key for line in run.training for key in line["keys"]}) == 2 * len(run.training)
    # After steps 2 and 4, and when training is done; each evaluation takes all the samples in their order.
    assert [line["step"] for line in run.validation] == [1] * 4 + [3] * 8
    assert [key for line in run.validation for key in line["keys"]] == [f"val-{n:05d}" for n in range(8)] * 3
    assert losses(run.training)[-1] < losses(run.training)[0] - 0.2
    if layout != "one rank":
        alone = whole("one rank")
        assert batches(run.training) == batches(alone.training)
        assert batches(run.validation) == batches(alone.validation)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pretrain_goes_on_from_its_checkpoint(
    layout: str, megatron: Megatron, dataset: Path, whole: Callable[[str], Run], tmp_path: Path
) -> None:
    before = whole(layout)
    after = resumed(megatron, dataset, tmp_path, layout, before)
    assert batches(after.training) == batches(before.training, SAVED_AT)
    assert batches(after.validation) == batches(before.validation, SAVED_AT)
    tolerance = {"abs": 0.0, "rel": 0.0} if before.exact else {"rel": 1e-4}
    assert losses(after.training) == pytest.approx(losses(before.training, SAVED_AT), **tolerance)
    assert losses(after.validation) == pytest.approx(losses(before.validation, SAVED_AT), **tolerance)


@pytest.mark.parametrize(("saved", "loaded"), [("one rank", "two replicas"), ("two replicas", "one rank")])
def test_pretrain_goes_on_with_other_ranks(
    saved: str, loaded: str, megatron: Megatron, dataset: Path, whole: Callable[[str], Run], tmp_path: Path
) -> None:
    before = whole(saved)
    after = resumed(megatron, dataset, tmp_path, loaded, before)
    assert batches(after.training) == batches(before.training, SAVED_AT)
    assert batches(after.validation) == batches(before.validation, SAVED_AT)


@pytest.mark.parametrize("layout", ["one rank", "two replicas"])
def test_full_validation_takes_every_sample_of_every_dataset_once(
    layout: str, megatron: Megatron, dataset: Path, tmp_path: Path
) -> None:
    larger = create_captioning_test_dataset(tmp_path / "larger", num_train=8, num_val=16)
    blend = {"blend": [{"path": str(path), "weight": 1} for path in (dataset, larger)]}
    mix = write_mix(tmp_path / "mix.yaml", train=blend, val=blend)
    options = ["--energon-validation", "each", "--multiple-validation-sets", "--full-validation"]
    run = pretrain(megatron, mix, tmp_path, LAYOUTS[layout], *options, "--train-iters", "2")
    once = [f"val-{number:05d}" for number in [*range(8), *range(16)]]
    # After step 2, and when training is done.
    assert [key for line in run.validation for key in line["keys"]] == once * 2
