"""Figures beside other loaders: `python -m benchmarks.figures`, in an environment that has all of them.

    resume   texts: bytes of a state and the time to the first batch, after 10^3, 10^6 and 10^9 samples
    memory   texts: host memory of all processes over a run
    models   conversations about photographs, up to the tensors of twelve models
    images   CPU of an image in a batch, beside decoding it with the loader's own decoder

Every measurement is a fresh process, libraries in turns; times are the least of the repetitions, CPU is that of all
processes. A state after 10^9 samples is made and not reached: `start_at` of ours, counters put forward elsewhere.
States are kept in --cache. megatron-energon takes minutes to 10^6; run `--parts resume memory` first, on any machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import data, models, report
from benchmarks.processes import REPOSITORY, System, ensure_prepared, measure, systems
from benchmarks.systems import texts
from benchmarks.systems.measure import MEMORY_AFTER, Job

PARTS = ("resume", "memory", "models", "images")
PACKAGES = {
    "ours": "energon_bridge",
    "energon": "megatron-energon",
    "streaming": "mosaicml-streaming",
    **{name: name for name in ("litdata", "grain", "torchdata", "webdataset")},
}
TEXTS, BATCH, CONVERSATIONS, ROWS = 150_000, 50, 1_000, 8
CONSUMED = (10**3, 10**6, 10**9)
REACHED = 10**6
"""States of more samples are made."""
ENDS = ("torchdata",)
"""A state of it is one of an epoch."""
REPLAYS = ("webdataset",)
IMAGES, TURNS = 200, 6


def system(library: str, runner: str) -> System:
    return System(name=library, python=sys.executable, runner=f"benchmarks.systems.{runner}")


class Figures:
    """The chosen libraries and settings."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.random = options, random.Random(data.SEED)
        self.ours = systems(sys.executable, "")["ours"]

    def folder(self, kind: str, count: int) -> Path:
        folder = data.make(self.options.cache, data.KINDS[kind], count)
        ensure_prepared(self.ours, folder, data.KINDS[kind])
        return folder

    def job(self, task: str, path: Path, mode: str, workers: int, **more: Any) -> Job:
        settings: dict[str, Any] = {"part": "jpg", "batch_size": BATCH, "shuffle_buffer_size": 100, "slice_size": 100}
        settings |= {"seconds": self.options.seconds, "warmup_seconds": 1.0} | more
        return Job(task=task, path=str(path), mode=mode, workers=workers, **settings)

    def best(self, points: list[Any], run: Callable[[Any], dict[str, Any]]) -> dict[Any, dict[str, float]]:
        """Measure all points in turns; return the least of each number, of rates the largest."""
        found: dict[Any, dict[str, float]] = {}
        for _ in range(self.options.repetitions):
            self.random.shuffle(points)
            for point in points:
                new = run(point)
                print(json.dumps([point, new], default=str), file=sys.stderr, flush=True)
                old = found.setdefault(point, new)
                for name, value in new.items():
                    old[name] = (max if name == "samples_per_s" else min)(value, old[name])
        return found

    def texts(self, library: str) -> tuple[System, Path, str]:
        """Return what runs a library on texts, its folder and its mode."""
        tars = self.folder("text", TEXTS)
        if library in ("ours", "energon"):
            return system(library, library), tars, "raw"
        return system(library, "texts"), texts.ready(library, tars), library

    def state(self, library: str, workers: int, consumed: int) -> tuple[Path, dict[str, Any]]:
        """Return the file of a state, saved now if it is not there, and what was measured then."""
        consumed = min(consumed, REACHED) if library in ENDS else consumed
        file = self.options.cache / f"state-{library}-{workers}-{consumed}"
        about = file.with_name(f"{file.name}.json")
        if not about.exists():
            runner, path, mode = self.texts(library)
            task = "forward" if consumed > REACHED else "save"
            where = {"state_file": str(file), "consumed_batches": consumed // BATCH}
            about.write_text(json.dumps(measure(runner, self.job(task, path, mode, workers, **where))))
        return file, json.loads(about.read_text())

    def resume(self) -> Iterator[list[str]]:
        after = [f"after {consumed:,}" for consumed in CONSUMED]
        yield ["library", "workers", *(f"bytes {one}" for one in after), "first batch, ms (CPU)", *after]
        points = [
            point
            for point in product(self.options.libraries, self.options.workers, (0, *CONSUMED))
            if not (point[0] in REPLAYS and point[2] > REACHED)
        ]
        states = {point: self.state(*point) for point in points if point[2]}

        def run(point: tuple[str, int, int]) -> dict[str, Any]:
            runner, path, mode = self.texts(point[0])
            where = {"state_file": str(states[point][0])} if point[2] else {}
            return measure(runner, self.job("restore", path, mode, point[1], **where))

        found = self.best(points, run)
        for library, workers in product(self.options.libraries, self.options.workers):
            row = [(library, workers, consumed) for consumed in (0, *CONSUMED)]
            sizes = [f"{states[one][1]['state_bytes']:,}" if one in states else "" for one in row]
            times = [
                f"{1e3 * found[one]['restore_to_first_batch_s']:,.0f} ({1e3 * found[one]['cpu_s']:,.0f})"
                + ("" if found[one]["exact"] else ", other samples")
                if one in found
                else ""
                for one in row
            ]
            yield [PACKAGES[library], str(workers), *sizes[1:], *times]

    def memory(self) -> Iterator[list[str]]:
        steps = [1, *(round(share * self.options.steps) for share in MEMORY_AFTER)]
        yield ["library", "workers", *(f"MiB after {step:,}" for step in steps)]
        for library, workers in product(self.options.libraries, self.options.memory_workers):
            runner, path, mode = self.texts(library)
            more = {"batch_size": 2, "consumed_batches": self.options.steps}
            found = measure(runner, self.job("memory", path, mode, workers, **more))
            print(json.dumps([library, workers, found]), file=sys.stderr, flush=True)
            yield [PACKAGES[library], str(workers), *(f"{kib / 1024:,.0f}" for kib in found["pss_kib"])]

    def models(self) -> Iterator[list[str]]:
        folder = self.options.cache / f"figures-{CONVERSATIONS}"
        if not folder.exists():
            models.write(folder, CONVERSATIONS, 100)
        ensure_prepared(self.ours, folder / "data", models.KIND)
        libraries = ("webdataset", "energon", "ours")
        yield ["model", *(f"{name}, {PACKAGES[one]}" for name in ("samples/s a core", "CPU ms") for one in libraries)]

        def run(point: tuple[str, str]) -> dict[str, Any]:
            more = {"batch_size": ROWS, "warmup_batches": 4}
            job = self.job("throughput", folder / "data", "/".join(point), self.options.cores, **more)
            return measure(system(point[1], "models"), job)

        found = self.best(list(product(models.MODELS, libraries)), run)
        for model in models.MODELS:
            rates = [found[model, one]["samples_per_s"] / self.options.cores for one in libraries]
            costs = [found[model, one]["cpu_us_per_sample"] / 1e3 for one in libraries]
            yield [model, *(f"{rate:,.0f}" for rate in rates), *(f"{cost:.1f}" for cost in costs)]

    def images(self) -> Iterator[list[str]]:
        libraries = ("webdataset", "energon", "ours")
        kinds = {"caption": 4_000, "large": 1_000}
        folders = {kind: self.folder(kind, count) for kind, count in kinds.items()}
        yield ["images", "library", "us of CPU to decode", "in a batch", "beside decoding"]

        def run(point: tuple[str, str]) -> dict[str, Any]:
            runner = systems(sys.executable, sys.executable)[point[1]]
            return measure(runner, self.job("throughput", folders[point[0]], "uint8", 1, batch_size=32))

        found = self.best(list(product(kinds, libraries)), run)
        for kind, library in product(kinds, libraries):
            alone, whole = decoding(library, folders[kind]), found[kind, library]["cpu_us_per_sample"]
            size = {"caption": "256 x 256", "large": "640 x 480"}[kind]
            yield [size, PACKAGES[library], f"{alone:,.0f}", f"{whole:,.0f}", f"{whole - alone:,.0f}"]


def decoding(library: str, folder: Path) -> float:
    """Return the microseconds of CPU that the decoder of a library takes for an image: the least of some turns each."""
    import torch

    from benchmarks.systems.simplejpeg_ import load

    torch.set_num_threads(1)
    if library == "webdataset":
        from webdataset.autodecode import imagehandler

        decode: Callable[[str, bytes], Any] = imagehandler("torchrgb8")
    else:
        module = "energon_bridge" if library == "ours" else "megatron.energon"
        decode = import_module(module).SampleDecoder(image_decode="torchrgb8").decode
    total, images = 0.0, load(folder, "jpg")[:IMAGES]
    for image in images:
        least = float("inf")
        for _ in range(TURNS):
            start = time.process_time()
            decode("one.jpg", image)
            least = min(least, time.process_time() - start)
        total += least
    return 1e6 * total / len(images)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--libraries", nargs="+", choices=PACKAGES, default=list(PACKAGES), help="of texts")
    parser.add_argument("--workers", nargs="+", type=int, default=[2], help="of resumed loaders")
    parser.add_argument("--memory-workers", nargs="+", type=int, default=[0, 8])
    parser.add_argument("--steps", type=int, default=60_000, help="of 2 texts, for the memory")
    parser.add_argument("--cores", type=int, default=2, help="workers for models")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=REPOSITORY / ".cache" / "bench")
    return parser.parse_args()


def main() -> None:
    """Print a table for each part."""
    options = arguments()
    options.cache.mkdir(parents=True, exist_ok=True)
    names = ("torch", "transformers", "torchvision", *list(PACKAGES.values())[1:])
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    print(f"{datetime.date.today().isoformat()}, {report.machine()}, load {os.getloadavg()[0]:.1f}; {versions}")
    for part in options.parts:
        header, *rows = getattr(Figures(options), part)()
        print("\n" + report.table(header, rows), flush=True)


if __name__ == "__main__":
    main()
