"""Ray Train: its workers load with the actors of the same cluster, and a worker that is killed resumes."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from engine import NUM_LANES, deliver, digest, loaders_of, text_dataset, train_dataset
from ray_cluster import ray_cluster

from energon_bridge import WorkerConfig, get_savable_loader

LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))
STEPS, SAVED, KILLED_AT, RANKS = 24, 10, 13, 2

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Ray's own
    pytest.mark.skipif(not LONG, reason="starts a cluster and trains on it: set ENERGON_LONG_TESTS=1"),
]


def train_of(data: Path, records: Path) -> Any:
    """Return what each worker of Ray Train runs."""

    def train() -> None:
        import torch
        from ray import train

        rank = train.get_context().get_world_rank()
        options = {"num_cpus": 0.2, "placement_timeout_seconds": 200}
        config = WorkerConfig(num_workers=2, num_lanes=NUM_LANES, worker_engine="ray", ray_options=options)
        assert (config.rank, config.world_size) == (rank, RANKS)
        loader, begun = get_savable_loader(train_dataset(data, worker_config=config)), 0
        if (checkpoint := train.get_checkpoint()) is not None:
            with checkpoint.as_directory() as folder:
                saved = torch.load(Path(folder) / "state.pt", weights_only=False)
            loader.load_state_dict(saved["loader"])
            begun = saved["step"]
        batches = iter(loader)
        for step in range(begun, STEPS):
            seen = digest(next(batches))
            with (records / f"{rank}").open("a") as file:
                file.write(f"{begun} {step} {seen} {loader.metrics()['worker_actors']:.0f}\n")
            if step == KILLED_AT and rank == 1 and not begun:
                train.get_all_reported_checkpoints()  # waits until Ray Train has the one before
                os.kill(os.getpid(), signal.SIGKILL)
            if step + 1 == SAVED:
                with tempfile.TemporaryDirectory() as folder:
                    torch.save({"loader": loader.state_dict(), "step": step + 1}, Path(folder) / "state.pt")
                    train.report({}, checkpoint=train.Checkpoint.from_directory(folder) if rank == 0 else None)
        loader.close()

    return train


def test_a_killed_worker_of_ray_train_resumes_with_the_batches_of_one_run(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed (extra ray)")
    pytest.importorskip("pandas", reason='ray.train needs pandas: pip install "ray[train]"')
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    data, records = text_dataset(tmp_path / "data", train=[5, 9, 1, 14, 8]), tmp_path / "records"
    records.mkdir()
    expected = deliver(loaders_of(train_dataset(data), 1, 0), STEPS * RANKS).digests
    with ray_cluster(2, 2) as cluster:
        environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
        ray.init(address=cluster.address, runtime_env={"env_vars": environment}, log_to_driver=False)
        try:
            trainer = TorchTrainer(
                train_of(data, records),
                scaling_config=ScalingConfig(num_workers=RANKS),
                run_config=RunConfig(storage_path=str(tmp_path / "runs"), failure_config=FailureConfig(max_failures=1)),
            )
            trainer.fit()
        finally:
            ray.shutdown()
    for rank in range(RANKS):
        lines = [line.split() for line in (records / f"{rank}").read_text().splitlines()]
        first, resumed = ([int(step) for begun, step, *_ in lines if begun == at] for at in ("0", str(SAVED)))
        assert (first, resumed) == ([*range(len(first))], [*range(SAVED, STEPS)])
        assert len(first) == KILLED_AT + 1 or not rank
        assert [seen for *_, seen, _ in lines] == [expected[RANKS * step + rank] for step in (*first, *resumed)]
        assert {actors for *_, actors in lines} == {"2"}
