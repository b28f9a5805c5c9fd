"""Every loader in one table: `python -m benchmarks.peers`, after `scripts/peers-env`.

Texts of 400 bytes, photographs of 256 px as the bytes of their files, and decoded to uint8 and to float32, in batches
of 50: each library with the format and the number of workers that suits it best, in turns, each measurement a fresh
process. Cells: samples/s, and of the same run the microseconds of CPU of a sample and the MiB of all its processes (Pss
without files). Figures are the best of the repetitions.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import sys
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import data, report
from benchmarks.processes import REPOSITORY, System, call, ensure_prepared, measure, systems
from benchmarks.systems.measure import Job

ROWS = {"text/raw": 150_000, "caption/raw": 20_000, "caption/uint8": 20_000, "caption/float": 20_000}
"""What is measured, and of how many samples."""
PEERS = ("litdata", "streaming", "grain", "datasets", "lancedb")
BATCH = 50


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--libraries", nargs="+", default=["ours", *PEERS, "energon", "webdataset"])
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--peers-python", default=os.environ.get("ENERGON_PEERS_PYTHON", ".cache/peers/bin/python"))
    parser.add_argument("--rival-python", default=os.environ.get("ENERGON_RIVAL_PYTHON", ".cache/rival/bin/python"))
    parser.add_argument("--cache", type=Path, default=REPOSITORY / ".cache" / "bench")
    return parser.parse_args()


class Table:
    """The chosen libraries and settings."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.known = systems(sys.executable, options.rival_python)
        self.peers = System(name="peers", python=options.peers_python, runner="benchmarks.systems.peers")

    def job(self, row: str, library: str, workers: int) -> tuple[System, Job]:
        kind, form = row.split("/")
        folder = data.make(self.options.cache, data.KINDS[kind], ROWS[row])
        settings: dict[str, Any] = {"part": data.KINDS[kind].part, "batch_size": BATCH, "workers": workers}
        settings |= {"shuffle_buffer_size": 100, "slice_size": 100, "seconds": self.options.seconds}
        settings |= {"task": "throughput", "warmup_seconds": 1.0, "warmup_batches": 100}
        if library in self.known:
            ensure_prepared(self.known["ours"], folder, data.KINDS[kind])
            return self.known[library], Job(path=str(folder), mode=form, **settings)
        written = call([self.peers.python, "-m", self.peers.runner, "write", library, str(folder)])
        return self.peers, Job(path=written.splitlines()[-1], mode=f"{library}/{form}", **settings)

    def measured(self) -> dict[tuple[str, str], list[dict[str, Any]]]:
        """Return the measurements of each row and library."""
        options = self.options
        points = list(product(options.rows, options.libraries, options.workers))
        jobs = {point: self.job(*point) for point in points}
        found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for _ in range(options.repetitions):
            random.Random(data.SEED).shuffle(points)
            for row, library, workers in points:
                result = measure(*jobs[row, library, workers]) | {"workers": workers}
                print(json.dumps([row, library, result]), file=sys.stderr, flush=True)
                found.setdefault((row, library), []).append(result)
        return found


def cell(results: list[dict[str, Any]]) -> str:
    """Return the figures of the best number of workers."""
    best = max(results, key=lambda one: float(one["samples_per_s"]))
    alike = [one for one in results if one["workers"] == best["workers"]]
    cpu, memory = (min(one[name] for one in alike) for name in ("cpu_us_per_sample", "memory_kib"))
    return f"{best['samples_per_s']:,.0f} ({cpu:,.1f} us, {memory / 1024:,.0f} MiB, {best['workers']})"


def main() -> None:
    """Print the table."""
    options = arguments()
    found = Table(options).measured()
    print(f"{datetime.date.today().isoformat()}, {report.machine()}, load {os.getloadavg()[0]:.1f}")
    print("samples/s (CPU of a sample, memory, workers)\n")
    header = ["library", *(row.replace("/", ", ") for row in options.rows)]
    print(report.table(header, [[one, *(cell(found[row, one]) for row in options.rows)] for one in options.libraries]))


if __name__ == "__main__":
    main()
