"""The launch files: what they start, and with what. Under SLURM the commands of the cluster are stood in for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """Return a folder of commands that write down how they were called; `srun` ends as $SRUN_CODE says."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in {
        "python": 'echo "python $*" >>"$LOG"',
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
        ["bash", str(ROOT / "scripts" / "launch" / script), *arguments],
        env={"PATH": f"{commands}:{os.environ['PATH']}", "LOG": str(log)} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return result.returncode, result.stderr, log.read_text().splitlines()


def test_torchrun_starts_a_process_for_each_gpu(commands: Path) -> None:
    code, _, (call,) = launch(commands, "torchrun.sh", "configs/smoke.yaml", "train.max_steps=3")
    assert code == 0
    assert "--standalone --nnodes=1 --nproc-per-node=4 --max-restarts=3" in call
    assert call.endswith(f"{ROOT}/scripts/pretrain_vlm.py --config configs/smoke.yaml --resume train.max_steps=3")


def test_torchrun_lets_nodes_meet(commands: Path) -> None:
    code, error, calls = launch(commands, "torchrun.sh", "configs/smoke.yaml", NNODES="1:4")
    assert (code, calls) == (1, [])
    assert "NNODES=1:4 needs RDZV=host:port" in error
    settings = {"NNODES": "1:4", "RDZV": "first:29500", "NPROC": "8", "MAX_RESTARTS": "9"}
    _, _, (call,) = launch(commands, "torchrun.sh", "configs/smoke.yaml", **settings)
    assert "--rdzv-backend=c10d --rdzv-endpoint=first:29500 --rdzv-id=smoke.yaml" in call
    assert "--nnodes=1:4 --nproc-per-node=8 --max-restarts=9" in call


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
