"""Runs the benchmarks: `python benchmarks/run.py`, or `scripts/bench`, which also makes the environment.

It writes its data once (about 1.3 GB below --cache), makes the environment of the rivals with scripts/rival-env,
measures every system at every point in fresh processes, the systems in random order within a repetition, and prints
tables.

    python benchmarks/run.py                         everything, about half an hour on two cores
    python benchmarks/run.py --seconds 1 --repetitions 1 --scale 0.05        does it work?
    python benchmarks/run.py --parts throughput --points text/raw caption/uint8 --workers 0 2 --systems ours energon
    python benchmarks/run.py --json results.json > tables.md
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(
    0, str(REPOSITORY)
)  # so that it runs by its path in any environment that has the package's dependencies

from benchmarks import data, mixes, report, videos  # noqa: E402
from benchmarks.processes import System, call, ensure_prepared, measure, systems, time_prepare  # noqa: E402
from benchmarks.systems.measure import Job  # noqa: E402
from benchmarks.systems.same_api import PACKING_BUFFER  # noqa: E402

COUNTS = {"caption": 20_000, "large": 4_000, "text": 200_000, "interleaved": 4_000, "png": 4_000, "webp": 4_000}
POINTS = (
    *("text/raw", "caption/raw", "caption/uint8", "caption/float", "caption/packed", "interleaved/cooked"),
    *("large/uint8", "large/float", "large/resized", "large/scaled"),
    *("png/uint8", "webp/uint8"),
)
JPEGS_ONLY = ("webdataset", "simplejpeg")
"""Systems whose runners know no other images."""
CHECKPOINT_POINTS = ("text/raw", "caption/uint8")
PARTS = ("throughput", "checkpoint", "prepare", "mixes", "video")
FRAMES = 8
PREPARED_KINDS = ("caption", "text")
SYSTEMS = ("ours", "energon", "webdataset", "simplejpeg")
MODES = {
    "energon": ("raw", "uint8", "float", "packed", "cooked", "resized"),
    "webdataset": ("raw", "uint8", "float"),
    "simplejpeg": ("uint8", "float"),
}
"""What a system can do, of those that cannot do all; the codec alone has no workers, its threads use all cores."""
SAVABLE = ("ours", "energon")
LANES = 24
"""Of a run of ours, unless it is told otherwise."""
VERSIONS = {
    "ours": (
        "import energon_bridge as e, torch as t; from energon_bridge.core.samples.streaming import STREAMS; "
        "print('energon_bridge', e.__version__, '(compiled part in use)' if STREAMS else '(without compiled part)'); "
        "print('torch', t.__version__)"
    ),
    "energon": "from importlib.metadata import version; print('megatron-energon', version('megatron-energon'))",
    "webdataset": "from importlib.metadata import version; print('webdataset', version('webdataset'))",
    "simplejpeg": "from importlib.metadata import version; print('simplejpeg', version('simplejpeg'))",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--points", nargs="+", choices=POINTS, default=POINTS, help="data/mode pairs of the throughput part"
    )
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS)
    parser.add_argument("--prepared", nargs="+", choices=PREPARED_KINDS, default=PREPARED_KINDS, help="data to prepare")
    parser.add_argument("--seconds", type=float, default=5.0, help="at least this long a point")
    parser.add_argument("--warmup", type=float, default=1.0, help="seconds before the measured ones")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help=f"times {COUNTS} samples")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--buffer", type=int, default=100, help="shuffle_buffer_size")
    parser.add_argument("--slice", type=int, default=100, help="max_samples_per_sequence")
    parser.add_argument("--consumed", type=int, default=300, help="batches before a state is saved")
    parser.add_argument("--datasets", nargs="+", type=int, default=[1, 50, 200, 1000], help="in the mixes; 1 is needed")
    parser.add_argument("--cache", type=Path, default=REPOSITORY / ".cache" / "bench")
    parser.add_argument("--rival-python", help="an interpreter with megatron-energon and webdataset; made if not given")
    parser.add_argument("--json", type=Path, help="write all measurements here")
    options = parser.parse_args()
    options.systems = options.systems or list(SYSTEMS)
    return options


def find_rival(given: str | None) -> str:
    if given:
        return given
    output = subprocess.run([str(REPOSITORY / "scripts" / "rival-env")], stdout=subprocess.PIPE, text=True, check=True)
    return output.stdout.splitlines()[-1]


def versions(chosen: dict[str, System]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, system in chosen.items():
        for line in call([system.python, "-c", VERSIONS[name]]).splitlines():
            package, version = line.split(maxsplit=1)
            found[package] = version
    return found


def command(options: argparse.Namespace) -> str:
    """Return the command line that repeats this run elsewhere: without the paths of this machine."""
    parts = ["python", "benchmarks/run.py"]
    for name in ("parts", "points", "prepared", "workers", "systems", "datasets"):
        parts += [f"--{name}", *map(str, getattr(options, name))]
    for name in ("seconds", "warmup", "repetitions", "scale", "batch_size", "buffer", "slice", "consumed"):
        parts += [f"--{name.replace('_', '-')}", f"{getattr(options, name):g}"]
    return shlex.join(parts)


class Bench:
    """The chosen systems and settings, and the folders of the data that they read."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        rival = "" if not {"energon", "webdataset"} & set(options.systems) else find_rival(options.rival_python)
        self.systems = {
            name: system for name, system in systems(sys.executable, rival).items() if name in options.systems
        }
        self.random = random.Random(data.SEED)

    def count(self, kind_name: str) -> int:
        return max(64, int(COUNTS[kind_name] * self.options.scale))

    def tars(self, kind_name: str) -> Path:
        return data.make(self.options.cache, data.KINDS[kind_name], self.count(kind_name))

    def prepared(self, kind_name: str) -> Path:
        """Return a dataset that every system reads; the rival prepares it if it takes part."""
        folder = self.tars(kind_name)
        by = self.systems.get("energon") or self.systems.get("ours") or systems(sys.executable, "")["ours"]
        ensure_prepared(by, folder, data.KINDS[kind_name])
        return folder

    def job(self, task: str, point: str, workers: int, **more: Any) -> Job:
        kind_name, mode = point.split("/")
        path = more.pop("path", None) or str(self.prepared(kind_name))
        return Job(
            task=task,
            path=path,
            mode=mode,
            part=data.KINDS[kind_name].part,
            workers=workers,
            batch_size=self.options.batch_size,
            shuffle_buffer_size=self.options.buffer,
            slice_size=self.options.slice,
            seconds=self.options.seconds,
            warmup_seconds=self.options.warmup,
            warmup_batches=warmup_batches(mode, self.options.batch_size),
            **more,
        )

    def mixes(self) -> Iterator[report.Record]:
        """Start each mix twice: as nobody has started it before, and once more."""
        options = self.options
        paths = mixes.make_all(options.cache, sorted({1, *options.datasets}))
        savable = [name for name in self.systems if name in SAVABLE]
        for datasets, workers, name in self.rounds(paths, [w for w in options.workers if w != 1], savable):
            path = paths[datasets]
            shutil.rmtree(f"{path}.cache", ignore_errors=True)
            job = self.job("start", "text/raw", workers, path=str(path), consumed_batches=options.consumed)
            for start in ("first", "later"):
                result = measure(self.systems[name], job)
                yield {"datasets": datasets, "workers": workers, "system": name, "start": start} | result

    def rounds(self, *choices: Any) -> Iterator[tuple[Any, ...]]:
        """Yield every combination in every repetition, in an order that changes."""
        combinations = list(product(*choices))
        for _ in range(self.options.repetitions):
            self.random.shuffle(combinations)
            yield from combinations

    def throughput(self) -> Iterator[report.Record]:
        for point, workers, name in self.rounds(self.options.points, self.options.workers, self.systems):
            mode = point.partition("/")[2]
            if mode not in MODES.get(name, (mode,)) or (name == "simplejpeg" and workers != min(self.options.workers)):
                continue
            if name in JPEGS_ONLY and point.startswith(("png/", "webp/")):
                continue
            result = measure(self.systems[name], self.job("throughput", point, workers))
            yield record(point, workers, name) | result

    def checkpoint(self) -> Iterator[report.Record]:
        savable = [name for name in self.systems if name in SAVABLE]
        for point, workers, name in self.rounds(
            CHECKPOINT_POINTS, [w for w in self.options.workers if w != 1], savable
        ):
            with tempfile.TemporaryDirectory() as folder:
                where = {"state_file": str(Path(folder) / "state"), "consumed_batches": self.options.consumed}
                saved = measure(self.systems[name], self.job("save", point, workers, **where))
                restored = measure(self.systems[name], self.job("restore", point, workers, **where))
            yield record(point, workers, name) | saved | restored

    def prepare(self) -> Iterator[report.Record]:
        """Time the command; `.tar.idx` and `split.yaml` of all systems must have the same bytes."""
        able = [(name, True) for name, system in self.systems.items() if system.cli]
        able += [("ours", False)] * ("ours" in self.systems)  # the other system has no way to leave the key index out
        digests: dict[str, str] = {}
        for kind_name, (name, key_index) in self.rounds(self.options.prepared, able):
            count, tars, kind = self.count(kind_name), self.tars(kind_name), data.KINDS[kind_name]
            seconds, cpu, digest = time_prepare(
                self.systems[name], tars, kind, count, os.cpu_count() or 1, key_index=key_index
            )
            if digests.setdefault(kind_name, digest) != digest:
                raise SystemExit(f"{kind_name}: {name} wrote other .tar.idx files or another split.yaml.")
            system = name if key_index else f"{name}, no key index"
            yield {"kind": kind_name, "samples": count, "system": system, "seconds": seconds, "cpu_s": cpu}

    def video(self) -> Iterator[report.Record]:
        """Take frames of videos; webdataset has no decoder of its own."""
        packages = {"ours": "energon_bridge", "energon": "megatron.energon"}
        for name, system in self.rounds(videos.SECONDS, [one for one in self.systems if one in packages]):
            path = videos.make(self.options.cache, name, self.options.scale)
            what = {"package": packages[system], "path": str(path), "frames": FRAMES, "seconds": self.options.seconds}
            output = call([self.systems[system].python, "-m", "benchmarks.systems.video", json.dumps(what)])
            yield {"video": path.name, "system": system} | json.loads(output.splitlines()[-1])


def warmup_batches(mode: str, batch_size: int) -> int:
    """Return the batches to be taken before the measured ones, beside the seconds.

    Every lane of ours fills a packing buffer before it first delivers: at first 2 to 3 images are decoded for each that
    is delivered, then as little as 0.4, while all buffers are emptied; after four of its buffers a lane decodes one for
    one.
    """
    return 4 * LANES * -(-PACKING_BUFFER // batch_size) if mode == "packed" else 0


def record(point: str, workers: int, system: str) -> report.Record:
    kind, mode = point.split("/")
    return {"kind": kind, "mode": mode, "workers": workers, "system": system}


def main() -> None:
    options = arguments()
    bench = Bench(options)
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": command(options),
        "machine": report.machine(),
        "versions": versions(bench.systems),
        "settings": {
            name: getattr(options, name) for name in ("batch_size", "buffer", "slice", "seconds", "repetitions")
        },
        **{part: [] for part in PARTS},
    }
    for part in options.parts:
        for found in getattr(bench, part)():
            print(json.dumps({"part": part} | found), file=sys.stderr, flush=True)
            results[part].append(found)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))
    print(report.document(results))


if __name__ == "__main__":
    main()
