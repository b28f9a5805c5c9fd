"""Prompts in flight when a run is killed: `keep_until_done`, and torchdata's StatefulDataLoader.

    python -m benchmarks.prompts        # needs torchdata

A loop draws prompts one at a time and keeps so many in flight; their rollouts end in any order. In the middle it saves
a state, and is killed. Printed are what a state costs, what a prompt costs (drawn, and said to be done), and what the
loop that is resumed never gets, or gets twice.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from energon_bridge import WorkerConfig, get_savable_loader, get_train_dataset

PROMPTS = 20_000
IN_FLIGHT = [0, 256, 4096]
SAVES = 50


class Prompts(Dataset[Any]):
    """The prompts, as a dataset of torch."""

    def __init__(self, path: Path) -> None:
        self._lines = path.read_text().splitlines()

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Any:
        return json.loads(self._lines[index])


def ours(path: Path, workers: int, *, keep: bool = True) -> Any:
    """Return a loader of this package."""
    config = WorkerConfig(num_workers=workers)
    return get_savable_loader(
        get_train_dataset(path, batch_size=None, repeat=False, worker_config=config), keep_until_done=keep
    )


def theirs(path: Path, workers: int) -> Any:
    """Return a loader of torchdata."""
    torchdata = import_module("torchdata.stateful_dataloader")
    return torchdata.StatefulDataLoader(Prompts(path), batch_size=None, shuffle=True, num_workers=workers)


def number_of(sample: Any) -> int:
    """Return the number of a prompt."""
    found: int = sample["json"]["number"] if "json" in sample else sample["number"]
    return found


def run(open_loader: Callable[[], Any], in_flight: int, *, done: bool) -> dict[str, float]:
    """Draw half of the prompts with so many in flight, save, kill, resume, and draw the others."""
    throw = random.Random(1)
    loader = open_loader()
    stream = iter(loader)
    next(iter(open_loader()))  # what is imported and read once
    flying: list[Any] = []
    learned: list[int] = []
    began = time.process_time()
    for _ in range(PROMPTS // 2):
        flying.append(next(stream))
        if len(flying) > in_flight:
            place = throw.randrange(len(flying))
            flying[place], flying[-1] = flying[-1], flying[place]
            sample = flying.pop()
            learned.append(number_of(sample))
            if done:
                loader.done(sample["__restore_key__"])
    seconds = time.process_time() - began
    saves = []
    for _ in range(SAVES):
        before = time.perf_counter()
        state = loader.state_dict()
        saves.append(time.perf_counter() - before)
    size = len(json.dumps(state, default=lambda value: value.tolist()))
    del stream, loader
    resumed = open_loader()
    resumed.load_state_dict(state)
    before = time.perf_counter()
    rest: Iterator[Any] = iter(resumed)
    learned.append(number_of(next(rest)))
    first = time.perf_counter() - before
    learned += map(number_of, rest)
    counts = Counter(learned)
    return {
        "state, KB": size / 1000,
        "save, ms": 1000 * statistics.median(saves),
        "CPU a prompt, us": 1e6 * seconds / (PROMPTS // 2),
        "first after the kill, ms": 1000 * first,
        "lost": PROMPTS - len(counts),
        "twice": sum(count > 1 for count in counts.values()),
    }


def main() -> None:
    """Measure and print a table."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "prompts.jsonl")
        text = "What is the sum of these numbers, and why? " * 8
        path.write_text("".join(json.dumps({"number": n, "prompt": f"{text}{n}"}) + "\n" for n in range(PROMPTS)))
        for workers in (0, 2):
            for in_flight in IN_FLIGHT:
                for name, open_loader, done in (
                    ("energon_bridge", lambda: ours(path, workers), True),  # noqa: B023
                    ("the same without", lambda: ours(path, workers, keep=False), False),  # noqa: B023
                    ("StatefulDataLoader", lambda: theirs(path, workers), False),  # noqa: B023
                ):
                    found = run(open_loader, in_flight, done=done)
                    figures = ", ".join(f"{what}: {value:.4g}" for what, value in found.items())
                    print(f"{workers} workers, {in_flight} in flight, {name}: {figures}", flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
