"""What verifying checksums costs: `python -m benchmarks.checksums`. One process without workers, warm page cache.

Two loaders of the same mode differ by several percent, by where their memory happens to lie. Each measurement is a
process of its own, therefore, which begins with objects of random sizes, and the modes take turns, "never" twice: what
these two are apart is the error of the others. All deliver the same batches. Of each batch counts the least that any
process of a mode took for it, so that other work on the machine disturbs little. Behind that, what verifying adds to
the reads alone: the least of many reads of neighbours, as training reads them.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import random
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.data import KINDS, make
from energon_bridge import DefaultTaskEncoder, SampleDecoder, WorkerConfig, get_savable_loader, get_train_dataset
from energon_bridge.core.format.checksums import Checksums
from energon_bridge.core.format.dataset import open_dataset
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.core.stream.reader import LeafReader
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml

POINTS = {"text": ("text", None), "caption/raw": ("caption", None), "caption/images": ("caption", "torchrgb8")}
ARMS: dict[str, Checksums] = {"never": "never", "sampled": "sampled", "always": "always", "never again": "never"}
BATCH = 32


class Encoder(DefaultTaskEncoder):
    """Gives bytes, or decoded images."""

    def __init__(self, form: str | None) -> None:
        super().__init__()
        self.decoder = None if form is None else SampleDecoder(image_decode=form)


def seconds(path: Path, form: str | None, mode: Checksums, batches: int, seed: int) -> list[float]:
    """Return the processor time of each batch of a loader, after as many that warm it up."""
    logging.disable(logging.WARNING)  # epochs end
    rng = random.Random(seed)
    objects = [bytes(rng.randrange(1 << rng.randrange(1, 16))) for _ in range(rng.randrange(2_000))]
    del objects[::2]  # the rest stays, so that what the loader allocates lies somewhere else in each process
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    spec = get_train_dataset(path, batch_size=BATCH, worker_config=config, task_encoder=Encoder(form), checksums=mode)
    stream, times = iter(get_savable_loader(spec)), []
    for _ in range(2 * batches):
        start = time.process_time()
        next(stream)
        times.append(time.process_time() - start)
    return times[batches:]


def alone(path: Path, count: int = 128, repetitions: int = 3_000) -> dict[str, float]:
    """Return the microseconds that a sample takes to read in each mode."""
    dataset = open_dataset(path, split_part="train")
    readers = {arm: LeafReader(dataset, checksums=mode) for arm, mode in ARMS.items()}
    indices, epochs = np.random.default_rng(1).permutation(count), np.zeros(count, np.int64)
    least = dict.fromkeys(ARMS, float("inf"))
    for _ in range(repetitions):
        for arm, reader in readers.items():
            start = time.perf_counter()
            reader.read(indices, epochs)
            least[arm] = min(least[arm], time.perf_counter() - start)
    return {arm: 1e6 * spent / count for arm, spent in least.items()}


def main() -> None:
    """Print a line for each point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="+", choices=POINTS, default=list(POINTS))
    parser.add_argument("--samples", type=int, default=4_000)
    parser.add_argument("--processes", type=int, default=24, help="of each mode")
    parser.add_argument("--batches", type=int, default=1_000, help="by each process, without decoding; else a tenth")
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")
    gc.freeze()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.points:
            kind, form = POINTS[name]
            path = make(Path(folder), KINDS[kind], options.samples)
            yaml = render_dataset_yaml(KINDS[kind].sample_type, KINDS[kind].field_map)
            prepare_dataset(path, split=parse_patterns(["train:.*"]), dataset_yaml=yaml, checksums=True)
            batches = options.batches // (1 if form is None else 10)
            seen: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
            for number in range(options.processes * len(ARMS)):
                arm = list(ARMS)[(number + number // len(ARMS)) % len(ARMS)]  # each is the first as often as the others
                with context.Pool(1) as pool:
                    seen[arm].append(pool.apply(seconds, (path, form, ARMS[arm], batches, number)))
            least = {arm: sum(map(min, zip(*times, strict=True))) for arm, times in seen.items()}
            base = (least["never"] + least["never again"]) / 2
            costs = ", ".join(f"{arm} {100 * (spent / base - 1):+.1f} %" for arm, spent in least.items())
            read = ", ".join(f"{arm} {spent:.2f}" for arm, spent in alone(path).items())
            print(f"{name}: {batches * BATCH / base:,.0f} samples/s; {costs}; us to read: {read}", flush=True)


if __name__ == "__main__":
    main()
