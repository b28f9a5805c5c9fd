"""How well a shuffled stream mixes: distinct classes in its microbatches, of data that is sorted by class.

    python benchmarks/mixing.py                       everything, about a quarter of an hour on two cores
    python benchmarks/mixing.py --samples 600 6000 --workers 0 --json mixing.json

Every system delivers microbatches of 32 from the same tars of numbered samples; which class a number has is decided
afterwards, so that one stream answers for all labels: 10 or 100 classes, one after the other (*sorted*) or in runs of
random length, a hundredth of the data long on average (*runs*). A figure is the mean number of distinct classes in a
microbatch, divided by what independent draws from the whole data would have: 1.00 is a perfect shuffle. (Draws without
replacement from small data have a little more.) Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # so that it runs by its path, here and in the rival's environment

BATCH = 32
MICROBATCHES = 200
SAMPLES = (100, 600, 6_000, 60_000, 600_000)
BUFFERS = (100, 1_000)
CAPS = (None, 100, 10_000)
ITERS = (1, 16)
LABELS = tuple(product(("sorted", "runs"), (10, 100)))
PACKAGES = {"ours": "energon_bridge", "energon": "megatron.energon"}

Integers = npt.NDArray[np.int64]
Setting = dict[str, Any]


def labels(count: int, kind: str, classes: int) -> Integers:
    """Return the class of each sample, shape (count,)."""
    if kind == "sorted":
        return np.arange(count, dtype=np.int64) * classes // count
    generator = np.random.default_rng(classes)
    lengths = generator.geometric(min(1.0, 100 / count), size=count)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), count)) + 1]
    return np.repeat(generator.integers(0, classes, lengths.size), lengths)[:count]


def mixing(batches: Integers, of: Integers) -> float:
    """Return the distinct classes of microbatches, shape (microbatches, BATCH), as a share of the ideal."""
    distinct = np.mean([np.unique(of[batch]).size for batch in batches])
    shares = np.bincount(of) / of.size
    return float(distinct / (1 - (1 - shares) ** BATCH).sum())


def settings(options: argparse.Namespace) -> Iterator[Setting]:
    """Give every setting of the table, and, of ours only, the defaults (`parallel_shard_iters` None)."""
    for samples, ranks in product(options.samples, options.ranks):
        for buffer, cap, iters in product(BUFFERS, CAPS, (*ITERS, None)):
            yield {"samples": samples, "ranks": ranks, "buffer": buffer, "cap": cap, "iters": iters}


def stream(package: str, folder: str, setting: Setting, workers: int) -> Integers:
    """Return the samples of the first microbatches of rank 0, shape (MICROBATCHES, BATCH)."""
    import importlib

    energon = importlib.import_module(package)
    dataset = energon.get_train_dataset(
        folder,
        batch_size=BATCH,
        shuffle_buffer_size=setting["buffer"],
        max_samples_per_sequence=setting["cap"],
        parallel_shard_iters=setting["iters"],
        worker_config=energon.WorkerConfig(rank=0, world_size=setting["ranks"], num_workers=workers),
        task_encoder=type("Encoder", (energon.DefaultTaskEncoder,), {"decoder": None})(),
    )
    batches = iter(energon.get_loader(dataset))
    return np.array([[int(key.rsplit("/")[-1]) for key in next(batches).__key__] for _ in range(MICROBATCHES)])


def child(job: dict[str, Any]) -> None:
    """Deliver the streams of one system and write them to one file."""
    found: dict[str, Any] = {}
    for number, setting in job["settings"]:
        folder = f"{job['data']}/{setting['samples']}"
        found[str(number)] = stream(PACKAGES[job["system"]], folder, setting, job["workers"])
    np.savez(job["out"], **found)


def make_data(folder: Path, count: int) -> None:
    """Write numbered samples into shards of 100 (1,000 from 6,000 samples on) and prepare them."""
    import webdataset

    from benchmarks.data import Kind
    from benchmarks.processes import ensure_prepared, systems

    kind = Kind(
        name="text",
        sample_type="TextSample",
        field_map={"text": "txt"},
        part="txt",
        image_size=None,
        samples_per_shard=100 if count < 6_000 else 1_000,
    )
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        unfinished.mkdir(parents=True, exist_ok=True)
        for first in range(0, count, kind.samples_per_shard):
            with webdataset.TarWriter(str(unfinished / f"{first:08d}.tar"), mtime=0) as out:
                for index in range(first, min(count, first + kind.samples_per_shard)):
                    out.write({"__key__": f"{index:08d}", "txt": str(index)})
        unfinished.rename(folder)
    ensure_prepared(systems(sys.executable, "")["ours"], folder, kind)


def run(options: argparse.Namespace, pythons: dict[str, str]) -> list[dict[str, Any]]:
    """Deliver all streams; return a record for each system, setting and number of workers."""
    numbered = list(enumerate(settings(options)))
    records = []
    for system, workers in product(pythons, options.workers):
        chosen = [(n, s) for n, s in numbered if s["iters"] is not None or system == "ours"]
        with tempfile.TemporaryDirectory() as folder:
            out = f"{folder}/streams.npz"
            job = {
                **{"system": system, "workers": workers, "data": str(options.cache)},
                **{"settings": chosen, "out": out},
            }
            command = [pythons[system], __file__, "--child", json.dumps(job)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, cwd=REPOSITORY)
            with np.load(out) as streams:
                for number, setting in chosen:
                    of = {f"{kind} {k}": labels(setting["samples"], kind, k) for kind, k in LABELS}
                    row = {name: mixing(streams[str(number)], known) for name, known in of.items()}
                    records.append({"system": system, "workers": workers} | setting | row)
    return records


def table(records: list[dict[str, Any]]) -> str:
    """Return the table: for each setting ours, and the better one of the rival's by its numbers of workers."""
    names = [f"{kind} {classes}" for kind, classes in LABELS]
    lines = [
        "| samples | ranks | buffer | cap | parallel | "
        + " | ".join(f"{name}: ours, energon" for name in names)
        + " |",
        "|" + " --- |" * (5 + len(names)),
    ]
    keys = ("samples", "ranks", "buffer", "cap", "iters")
    for setting in dict.fromkeys(tuple(record[key] for key in keys) for record in records):
        of = [record for record in records if tuple(record[key] for key in keys) == setting]
        cells = []
        for name in names:
            ours = min((r[name] for r in of if r["system"] == "ours"), default=float("nan"))
            theirs = [r[name] for r in of if r["system"] == "energon"]
            cells.append(f"{ours:.2f}, {max(theirs):.2f}" if theirs else f"{ours:.2f}")
        given = [f"{value:,}" if value is not None else "None" for value in setting]
        given[4] = "default" if setting[4] is None else given[4]
        lines.append("| " + " | ".join([*given, *cells]) + " |")
    return "\n".join(lines)


def below(records: list[dict[str, Any]]) -> list[str]:
    """Name the settings in which ours mixes less than the rival at its better number of workers, beyond noise."""
    keys = ("samples", "ranks", "buffer", "cap", "iters")
    worse = []
    for record in (r for r in records if r["system"] == "ours"):
        for name in (f"{kind} {classes}" for kind, classes in LABELS):
            same = [r for r in records if r["system"] == "energon" and all(r[k] == record[k] for k in keys)]
            best = max((r[name] for r in same), default=0.0)
            if record[name] < best - 0.01:
                worse.append(f"{ {k: record[k] for k in keys} } {name}: {record[name]:.3f} < {best:.3f}")
    return worse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", nargs="+", type=int, default=SAMPLES)
    parser.add_argument("--ranks", nargs="+", type=int, default=(1, 8))
    parser.add_argument("--workers", nargs="+", type=int, default=(0, 2))
    parser.add_argument("--systems", nargs="+", choices=list(PACKAGES), default=list(PACKAGES))
    parser.add_argument("--cache", type=Path, default=REPOSITORY / ".cache" / "mixing")
    parser.add_argument("--rival-python", help="an interpreter with megatron-energon; made if not given")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(json.loads(options.child))
        return
    pythons = {}
    if "ours" in options.systems:
        pythons["ours"] = sys.executable
    if "energon" in options.systems:
        from benchmarks.run import find_rival

        pythons["energon"] = find_rival(options.rival_python)
    for count in options.samples:
        make_data(options.cache / str(count), count)
    records = run(options, pythons)
    if options.json:
        options.json.write_text(json.dumps(records))
    print(table(records))
    for line in below(records):
        print("below:", line)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
