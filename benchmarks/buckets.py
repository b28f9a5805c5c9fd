"""Requests and rates of reading a dataset from a server at a distance, by shards, slices, workers and the node's cache.

    python benchmarks/buckets.py --samples 2000 --bytes 50000 --latency 0.03

The server is a process of its own, which waits so long before each answer. It and the readers share the cores:
requests depend on nothing but the settings, rates compare within one run only.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # so that it runs by its path

from energon_bridge import DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset  # noqa: E402
from energon_bridge.prepare import parse_patterns, prepare_dataset, render_dataset_yaml  # noqa: E402
from energon_bridge.testing import write_shard  # noqa: E402

_SERVE = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from object_server import ObjectServer
server = ObjectServer(Path(sys.argv[2]))
server.latency = float(sys.argv[3])
print(server.url, flush=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdin.read()
"""
_BATCH = 32


class Bytes(DefaultTaskEncoder):
    """Leaves the parts as they are."""

    decoder = None


def write(folder: Path, samples: int, size: int, shards: int) -> None:
    """Write a dataset of so many samples of so many bytes."""
    folder.mkdir()
    rng, each = random.Random(0), samples // shards
    for shard in range(shards):
        parts = {f"{shard:03d}_{number:06d}": {"bin": rng.randbytes(size)} for number in range(each)}
        write_shard(folder / f"{shard:04d}.tar", parts)
    yaml = render_dataset_yaml("TextSample", {"text": "bin"})
    prepare_dataset(folder, split=parse_patterns(["train:.*"]), dataset_yaml=yaml)


def measure(
    place: Any, workers: int, samples: int, slices: int | None = None, warm_up: int = 0
) -> tuple[float, float, float]:
    """Return requests and fetched bytes of a sample over so many samples, and samples per second.

    Reading is ahead by some rounds of all lanes: without a warm-up these count, too.
    """
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    dataset = get_train_dataset(
        place, batch_size=_BATCH, worker_config=config, task_encoder=Bytes(), max_samples_per_sequence=slices
    )
    with closing(get_savable_loader(dataset)) as loader:
        stream = iter(loader)
        for _ in islice(stream, 1 + warm_up // _BATCH):
            pass
        before = loader.metrics() if warm_up else {"samples": 0}
        began = time.perf_counter()
        for _ in islice(stream, samples // _BATCH):
            pass
        took, found = time.perf_counter() - began, loader.metrics()
    made = found["samples"] - before["samples"]
    asked, fetched = (found.get(name, 0) - before.get(name, 0) for name in ("requests", "request_bytes"))
    return asked / made, fetched / made, samples // _BATCH * _BATCH / took


def main() -> None:
    """Print a row for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--bytes", type=int, default=50_000)
    parser.add_argument("--latency", type=float, default=0.03)
    options = parser.parse_args()
    samples = options.samples
    print("| shards | longest slice | workers | node cache | requests a sample | fetched bytes by bytes | samples/s |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for shards in (1, 8, 64):
            write(Path(folder, str(shards)), samples, options.bytes, shards)
        command = [sys.executable, "-c", _SERVE, str(REPOSITORY / "tests" / "helpers"), folder, str(options.latency)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            cases: list[tuple[int, int | None, int, str]] = [(shards, None, 2, "") for shards in (1, 8, 64)]
            cases += [(8, 1, 2, ""), (8, None, 0, "")]
            cases += [(8, None, 2, "empty"), (8, None, 2, "full")]
            for shards, slices, workers, cache in cases:
                if cache:
                    os.environ["ENERGON_CACHE_DIR"] = f"{folder}/cache"
                asked, fetched, rate = measure(
                    f"{url}/{shards}", workers, samples, slices, 0 if cache else samples // 2
                )
                where = f"{shards} | {slices or 'any'} | {workers} | {cache or 'none'}"
                print(f"| {where} | {asked:.3f} | {fetched / options.bytes:.2f} | {rate:,.0f} |", flush=True)
            _, rate = measure(Path(folder, "8"), 2, samples)[1:]
            print(f"| 8 | any | 2 | on this disk | 0 | 0 | {rate:,.0f} |")
            assert server.stdin is not None
            server.stdin.close()


if __name__ == "__main__":
    main()
