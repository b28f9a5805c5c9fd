"""What actors cost against worker processes: CPU per batch, of the trainer and of each kind of process beside it.

The same stream of decoded JPEGs, in batches of 6 MB and of 100 kB, from two worker processes and from two actors on the
second node of a cluster on this machine, which write into the trainer's memory, or use a connection as from elsewhere.
In turns; of each figure the least of some rounds counts. "all" is trainer, workers, actors and relay together.

    python -m benchmarks.ray_workers [--rounds 3] [--batches 300]
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import jpeg
from energon_bridge import (
    DefaultTaskEncoder,
    SampleDecoder,
    SavableDataLoader,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
)
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.testing import write_shard

SIZES = {"6 MB": (512, 512), "100 kB": (64, 64)}
ROWS, WORKERS, IMAGES = 8, 2, 256
TICKS = os.sysconf("SC_CLK_TCK")
ROLES = {"ray_relay": "relay", "gcs_server": "gcs", "raylet/raylet": "raylets", "WorkerActor": "actors"}
"""Of a process, by what is in its command line; a worker is a fork of the trainer or of an actor."""


class BytesEncoder(DefaultTaskEncoder):
    """Pictures as uint8: 8 of 512 x 512 are 6.3 MB, of 64 x 64 98 kB."""

    decoder = SampleDecoder(image_decode="torchrgb8")


def written(folder: Path, size: tuple[int, int]) -> Path:
    """Write a dataset of pictures with captions."""
    generator = np.random.default_rng(0)
    samples = {f"{n:05d}": {"jpg": jpeg(generator, size), "txt": b"a picture"} for n in range(IMAGES)}
    (folder / "train").mkdir(parents=True)
    write_shard(folder / "train/shard_000.tar", samples)
    yaml = render_dataset_yaml("CaptioningSample", {"image": "jpg", "caption": "txt"})
    prepare_dataset(folder, split=parse_patterns(["train:train/.*"]), dataset_yaml=yaml, key_index=False)
    return folder


def cpu_by_role() -> dict[str, float]:
    """Return the CPU seconds of this process and of those that it started, however far, by role."""
    stats: dict[int, tuple[list[str], str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                stats[int(entry.name)] = fields, (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
    found: dict[str, float] = defaultdict(float)
    waiting = [(os.getpid(), "trainer")]
    while waiting:
        pid, role = waiting.pop()
        found[role] += (int(stats[pid][0][11]) + int(stats[pid][0][12])) / TICKS
        for child, (fields, line) in stats.items():
            if int(fields[1]) == pid:
                named = next((name for mark, name in ROLES.items() if mark in line), "other")
                forked = line == stats[pid][1] or (role == named == "actors")
                waiting.append((child, "workers" if forked else named))
    return found


def loader_of(data: Path, **settings: Any) -> SavableDataLoader:
    """Return a loader of two workers."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=WORKERS, decode_threads=1, pin_memory=False, **settings)
    dataset = get_train_dataset(data, batch_size=ROWS, worker_config=config, task_encoder=BytesEncoder())
    return get_savable_loader(dataset)


def measured(data: Path, batches: int, **settings: Any) -> dict[str, float]:
    """Return the milliseconds of a batch, and of CPU by role."""
    with closing(loader_of(data, **settings)) as loader:
        stream = iter(loader)
        for _ in range(30):
            next(stream)
        began, before = time.perf_counter(), cpu_by_role()
        for _ in range(batches):
            next(stream)
        took, after = time.perf_counter() - began, cpu_by_role()
    while "relay" in cpu_by_role():  # it takes its actors along
        time.sleep(0.2)
    spent = {role: after[role] - before[role] for role in after if after[role] - before[role] > 0}
    spent["all"] = sum(spent.get(role, 0.0) for role in ("trainer", "workers", "actors", "relay"))
    return {name: 1e3 * seconds / batches for name, seconds in {"wall": took, **spent}.items()}


def main() -> None:
    """Measure, and print a line for each size, round and kind: the least so far."""
    parser = argparse.ArgumentParser(description="CPU of actors beside that of worker processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=300)
    arguments = parser.parse_args()
    logging.getLogger("energon_bridge").setLevel(logging.ERROR)
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for cpus in (0, WORKERS):
        cluster.add_node(num_cpus=cpus, object_store_memory=200 << 20, include_dashboard=False)
    options = {"address": cluster.address, "placement_timeout_seconds": 300, "idle_seconds": 1}
    kinds: dict[str, dict[str, Any]] = {"processes": {}} | {
        name: {"worker_engine": "ray", "ray_options": options | {"shared_memory": name == "actors here"}}
        for name in ("actors here", "actors by connection")
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, size in SIZES.items():
            data = written(Path(folder) / name, size)
            least: dict[str, dict[str, float]] = {kind: {} for kind in kinds}
            for _ in range(arguments.rounds):
                for kind, settings in kinds.items():
                    for key, value in measured(data, arguments.batches, **settings).items():
                        least[kind][key] = min(value, least[kind].get(key, value))
                    print(name, kind, {key: round(value, 2) for key, value in least[kind].items()}, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
