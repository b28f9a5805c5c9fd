"""Long runs and many loaders: memory, descriptors, maps and states stay where they are after the first batches.

300 batches and 20 loaders; 20,000 and 200 with `ENERGON_LONG_TESTS=1`.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from chain_cases import encoder_of, write_data
from engine import config_of
from left_behind import descendants, workers
from mixing import metadataset
from workers import wait_until

from energon_bridge import get_savable_loader, get_train_dataset
from energon_bridge.core.loader.dataset_spec import DatasetSpec

LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))
BATCHES, LOADERS = (20_000, 200) if LONG else (300, 20)
LOOKS = 12
"""How often a run is looked at; the first quarter of them is the warm-up."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What the processes of a run have: this one and its workers, the most that one of them has."""

    rss: int
    descriptors: int
    maps: int
    threads: int


def look() -> Look:
    """Look at this process and those that it started."""
    gc.collect()
    looks = []
    for pid in (os.getpid(), *descendants()):
        folder = Path(f"/proc/{pid}")
        pages = int((folder / "statm").read_text().split()[1])
        threads = len(os.listdir(folder / "task"))
        maps = len((folder / "maps").read_text().splitlines())
        looks.append((pages * os.sysconf("SC_PAGESIZE"), len(os.listdir(folder / "fd")), maps, threads))
    rss, descriptors, maps, threads = map(max, zip(*looks, strict=True))
    return Look(rss=rss, descriptors=descriptors, maps=maps, threads=threads)


def check_steady(first: Look, last: Look) -> None:
    """The last look may show no more than the first, but for what allocators and the interpreter do."""
    assert last.rss - first.rss < 24 * MIB, (first, last)
    assert last.descriptors <= first.descriptors + 2, (first, last)
    assert last.maps <= first.maps + 40, (first, last)
    assert last.threads <= first.threads + 1, (first, last)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    logger = logging.getLogger("energon_bridge")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield write_data(tmp_path_factory.mktemp("soak"))
    logger.setLevel(level)


def mix_of(data: Path, base: str, features: tuple[str, ...] = ()) -> DatasetSpec:
    """Open a blend of shards, lines, joins and cooked samples."""
    talk: dict[str, Any] = {"path": "./talk", "subflavors": {"of": "talk"}}
    talk["aux"] = {"blobs": "./blobs", "notes": "filesystem://./notes"}
    parts = [{"path": "./large"}, {"path": "./long.jsonl"}, talk, {"join": [{"path": "./left"}, {"path": "./right"}]}]
    parts[3]["joiner"] = {"__module__": "keyed", "__function__": "both"}
    parts[3]["join"][1]["nonmatch"] = "skip"
    blend = [part | {"weight": 4 - number} for number, part in enumerate(parts)]
    return get_train_dataset(
        metadataset(data, train={"blend": blend}),
        batch_size=None if "groups" in features else 2,
        packing_buffer_size=12 if base in ("packing", "prepost") else None,
        task_encoder=encoder_of(base, features),
        worker_config=config_of(1, 0),
    )


@pytest.mark.parametrize(
    ("base", "features", "num_workers"), [("tensors", (), 2), ("packing", (), 0), ("skipping", ("groups",), 0)]
)
def test_a_long_run_takes_no_more_than_its_beginning(
    data: Path, base: str, features: tuple[str, ...], num_workers: int
) -> None:
    looks: list[Look] = []
    sizes: list[int] = []
    config = config_of(1, num_workers, num_lanes=4, prefetch_factor=2)
    with closing(get_savable_loader(mix_of(data, base, features), worker_config=config)) as loader:
        batches = iter(loader)
        for _ in range(LOOKS):
            for _batch in islice(batches, BATCHES // LOOKS):
                pass
            looks.append(look())
            sizes.append(len(json.dumps(loader.save_state_rank())))
    warm = LOOKS // 4
    check_steady(looks[warm], looks[-1])
    # Counters get longer, and what waits to be packed or grouped is now more and now less.
    assert max(sizes[-warm:]) < 1.3 * max(sizes[:-warm]) + 200, sizes


def test_loaders_that_were_made_and_dropped_leave_nothing(data: Path) -> None:
    """With and without workers, closed or only dropped, with batches of theirs still held or not."""
    datasets = [mix_of(data, "tensors"), mix_of(data, "packing")]
    choose = random.Random(11)
    for dataset in datasets:  # they keep the files open that were read
        deque(islice(get_savable_loader(dataset), 40), maxlen=0)
    held: list[Any] = []
    before: Look | None = None
    for number in range(LOADERS):
        config = config_of(1, choose.choice([0, 1, 2]), num_lanes=4, prefetch_factor=2)
        loader = get_savable_loader(choose.choice(datasets), worker_config=config)
        held = list(islice(loader, choose.randrange(1, 8)))[: choose.randrange(3)]
        if choose.random() < 0.5:
            loader.close()
        del loader
        if number == LOADERS // 4:
            held.clear()
            assert wait_until(lambda: gc.collect() >= 0 and not workers())
            before = look()
    held.clear()
    assert wait_until(lambda: gc.collect() >= 0 and not workers())
    assert before is not None
    check_steady(before, look())
    assert threading.active_count() <= before.threads
