"""The launch files: what they start, and with what. Under SLURM the commands of the cluster are stood in for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paths import CONFIGS, REPOSITORY

from energon_bridge.tools.testing import create_captioning_test_dataset

LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """Return a folder of commands that write down how they were called; `srun` ends as $SRUN_CODE says."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in {
        "python": 'echo "python $*" >>"$LOG"; exit "$(cut -d" " -f"$(wc -l <"$LOG")" <<<"${CODES:-0}")"',
        "srun": 'echo "srun $* at $MASTER_ADDR:$MASTER_PORT" >>"$LOG"; exit "${SRUN_CODE:-0}"',
        "scontrol": 'echo "scontrol $*" >>"$LOG"; if [ "$1" = show ]; then printf "first\\nsecond\\n"; fi',
        "nvidia-smi": 'for gpu in 0 1 2 3; do echo "GPU $gpu"; done',
    }.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    return folder


def launch(commands: Path, script: str, *arguments: str, **environment: str) -> tuple[int, str, list[str]]:
    log = commands.parent / "log"
    log.write_text("")
    result = subprocess.run(
        ["bash", str(REPOSITORY / "scripts" / "launch" / script), *arguments],
        env={"PATH": f"{commands}:{os.environ['PATH']}", "LOG": str(log)} | environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return result.returncode, result.stderr, log.read_text().splitlines()


def test_torchrun_starts_a_process_for_each_gpu(commands: Path) -> None:
    code, _, (call,) = launch(commands, "torchrun.sh", "configs/smoke.yaml", "train.max_steps=3")
    assert code == 0
    assert "--standalone --nproc-per-node=4" in call
    assert call.endswith(f"{REPOSITORY}/scripts/pretrain_vlm.py --config configs/smoke.yaml --resume train.max_steps=3")


def test_torchrun_lets_nodes_meet(commands: Path) -> None:
    code, error, calls = launch(commands, "torchrun.sh", "configs/smoke.yaml", NNODES="4")
    assert (code, calls) == (1, [])
    assert "NNODES=4 needs MASTER_ADDR" in error
    settings = {"NNODES": "4", "NODE_RANK": "2", "MASTER_ADDR": "first", "NPROC": "8"}
    _, _, (call,) = launch(commands, "torchrun.sh", "configs/smoke.yaml", **settings)
    assert "--nnodes=4 --node-rank=2 --master-addr=first --master-port=29500 --nproc-per-node=8" in call


@pytest.mark.parametrize(("codes", "code", "tried"), [("1 0", 0, [4, 2]), ("1 3 3", 3, [4, 2, 1]), ("0", 0, [4])])
def test_torchrun_goes_on_with_fewer_processes(commands: Path, codes: str, code: int, tried: list[int]) -> None:
    ended, error, calls = launch(commands, "torchrun.sh", "configs/smoke.yaml", NPROC="4 2 1", CODES=codes)
    assert ended == code
    assert [int(call.split("--nproc-per-node=")[1].split()[0]) for call in calls] == tried
    assert error.count("the run failed with") == len(tried) - (code == 0)


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (143, True)])
def test_slurm_queues_a_run_again_that_was_asked_to_leave(commands: Path, code: int, requeued: bool) -> None:
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "1234567", "SRUN_CODE": str(code)}
    ended, _, calls = launch(commands, "slurm.sbatch", "configs/smoke.yaml", "seed=1", **job)
    assert ended == code
    assert calls[:2] == [
        "scontrol show hostnames node[1-2]",
        "srun --kill-on-bad-exit=1 python scripts/pretrain_vlm.py --config configs/smoke.yaml --resume seed=1 "
        "at first:24567",
    ]
    assert calls[2:] == (["scontrol requeue 1234567"] if requeued else [])


@pytest.mark.parametrize("script", ["torchrun.sh", "slurm.sbatch"])
def test_without_a_configuration_they_say_how_they_are_used(commands: Path, script: str) -> None:
    code, error, calls = launch(commands, script)
    assert (code, calls) == (2, [])
    assert f"scripts/launch/{script} " in error


@pytest.mark.skipif(not LONG, reason="ENERGON_LONG_TESTS=1 starts six processes of torchrun")
def test_a_run_that_loses_a_process_goes_on_with_half_as_many(tmp_path: Path) -> None:
    dataset = create_captioning_test_dataset(tmp_path / "data", num_train=24, num_val=4)
    settings = ["trainer=megatron", f"data.path={dataset}", f"run_dir={tmp_path / 'run'}", "data.global_batch_size=8"]
    settings += ["train.max_steps=20", "train.log_interval=1", "checkpoint.interval=5", "validation.generate=false"]
    command = ["bash", str(REPOSITORY / "scripts" / "launch" / "torchrun.sh"), str(CONFIGS / "smoke.yaml"), *settings]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with subprocess.Popen(
        command,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(REPOSITORY), "NPROC": "4 2"},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not (tmp_path / "run" / "checkpoints" / "step-0000005").exists():
            assert process.poll() is None
            time.sleep(0.05)
        os.kill(process_of_rank(3, str(tmp_path / "run")), signal.SIGKILL)
        _, log = process.communicate(timeout=200)
    assert process.returncode == 0, log
    assert "the run failed with 4 processes" in log
    assert "data-parallel rank 0 of 2" in log
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if "validation_loss" not in line]
    assert sorted(set(steps)) == list(range(1, 21))
    assert len(steps) <= 20 + 20 - 5  # it did not begin again


def process_of_rank(rank: int, run_dir: str) -> int:
    """Return the id of the process that is a rank of a run."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = ((folder / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
        except OSError:
            continue
        if f"run_dir={run_dir}".encode() in command and f"RANK={rank}".encode() in environment:
            return int(folder.name)
    raise AssertionError(f"no process is rank {rank} of {run_dir}")
