"""What a thousand datasets, or a billion samples, may cost: open files, bytes of state, memory, and work for a seek."""

from __future__ import annotations

import itertools
import json
import os
import random
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine import text_dataset
from mixes import SAMPLES, many_datasets

from energon_bridge import WorkerConfig, get_savable_loader, get_train_dataset, get_val_dataset
from energon_bridge.core.format.dataset import PreparedDataset
from energon_bridge.core.loader import opening
from energon_bridge.core.order import leaf_order as leaf
from energon_bridge.core.order.leaf_order import LeafOrder
from energon_bridge.core.order.rng import IntArray, shuffled
from energon_bridge.core.samples import TextSample
from energon_bridge.core.storage import open_store
from energon_bridge.core.stream import reader as readers
from energon_bridge.core.stream.reader import LeafReader, RoundBuffer

DATASETS = 1000


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a mix of a thousand datasets."""
    return many_datasets(tmp_path_factory.mktemp("thousand"), DATASETS)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_training_and_validation_of_many_datasets_keep_few_files_open(thousand: Path):
    before = open_files()
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    train = get_savable_loader(get_train_dataset(thousand, batch_size=8, worker_config=config))
    val = get_savable_loader(get_val_dataset(thousand, split_part="train", batch_size=8, worker_config=config))
    drawn: set[str] = set()
    for batch in itertools.islice(train, 150):
        drawn.update(key.partition("_")[0] for key in batch.__key__)
    assert len(drawn) > 300
    assert sum(1 for _ in val) == DATASETS * SAMPLES // 8
    assert open_files() - before <= 200
    train.close()
    val.close()
    del train, val
    assert open_files() <= before + 2


def test_the_state_of_many_datasets_is_small(thousand: Path):
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_lanes=8)
    loader = get_savable_loader(get_train_dataset(thousand, batch_size=8, worker_config=config))
    batches = iter(loader)
    for _ in range(250):
        next(batches)
    state = loader.save_state_rank()
    assert len(json.dumps(state)) < 100_000
    expected = [next(batches).__key__ for _ in range(10)]
    again = get_savable_loader(get_train_dataset(thousand, batch_size=8, worker_config=config))
    again.restore_state_rank(json.loads(json.dumps(state)))
    assert [batch.__key__ for batch in itertools.islice(again, 10)] == expected


SHARDS, PER_SHARD = 100_000, 10_000
LANES = 64


def order(shards: int, slice_length: int = 100) -> LeafOrder:
    return LeafOrder(
        num_samples=shards * PER_SHARD,
        num_lanes=LANES,
        key=7,
        slice_length=slice_length,
        shuffle_buffer_size=1000,
        parallel_shard_iters=16,
    )


def dataset(shards: int) -> PreparedDataset:
    """Return a dataset of which there is no byte; nothing of it is read here."""
    counts = PER_SHARD + np.arange(shards, dtype=np.int64) * 7919 % 4001 - 2000
    counts[-1] += shards * PER_SHARD - counts.sum()
    return PreparedDataset(
        path="/nowhere",
        store=open_store("/nowhere"),
        split_part="train",
        shard_names=tuple(f"shard_{number:06d}.tar" for number in range(shards)),
        shard_counts=counts,
        shard_sizes=np.full(shards, 10 << 20, dtype=np.int64),
        excluded=frozenset(),
        sample_type=TextSample,
        field_map=None,
        sample_loader=None,
        part_filter=None,
        subflavors={},
        fingerprint="0" * 64,
        num_samples=shards * PER_SHARD,
    )


def positions(shards: int, count: int) -> list[tuple[int, int]]:
    """Return random lanes and draws of the first ten epochs."""
    chooser = random.Random(1)
    last = 10 * shards * PER_SHARD // LANES
    return [(chooser.randrange(LANES), chooser.randrange(last)) for _ in range(count)]


def seek(reader: LeafReader, of: LeafOrder, lane: int, draw: int) -> None:
    """Go from the number of a draw to its sample, shard and place in the shard."""
    buffer = RoundBuffer(reader, of.rounds_at(lane, draw, 1))
    index = int(buffer.indices[draw - buffer.first])
    _, place = reader.place_of(index)
    assert buffer.first <= draw < buffer.first + len(buffer)
    assert 0 <= index < of.num_samples
    assert 0 <= place < 12_001


@pytest.mark.parametrize("slice_length", [1, 100, 650_000])
def test_a_billion_samples_take_little_memory_and_any_position_is_near(
    slice_length: int, monkeypatch: pytest.MonkeyPatch
):
    """Most of the positions are in an epoch that nobody has asked for before."""
    numbers: list[int] = []  # of the slices and samples that are put in order
    monkeypatch.setattr(leaf, "shuffled", lambda key, n: numbers.append(n) or shuffled(key, n))
    large = order(SHARDS, slice_length)
    reader = LeafReader(dataset(SHARDS), tolerant=False)
    tracemalloc.start()
    try:
        seek(reader, large, 0, 0)  # finds out where the shards begin
        for lane, draw in positions(SHARDS, 200):
            numbers.clear()
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            seek(reader, large, lane, draw)
            held, peak = tracemalloc.get_traced_memory()
            assert sum(numbers) < 4000
            assert peak - before < 2 << 20  # an array of one number for each shard takes 0.8 MB
    finally:
        tracemalloc.stop()
    assert held < 20 << 20


def test_every_sample_of_a_billion_is_somewhere_once():
    """A stretch of a lane holds no sample twice, and neighbouring lanes none of each other's."""
    large = order(SHARDS)
    seen: set[int] = set()
    total = 0
    for lane, first in itertools.product((0, 1, 63), (0, 15_000_000)):
        draw = first
        for _ in range(20):
            found = large.rounds_at(lane, draw, 1)
            assert (found.epochs == 0).all()
            draw = found.first + found.indices.size
            seen.update(found.indices.tolist())
            total += found.indices.size
    assert len(seen) == total > 60_000


def test_lanes_do_not_all_read_in_the_same_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Long reads are spread over the turns; a lane reads the rest of a first round of its own, and then a part."""
    lanes = 8
    read: list[int] = []
    one_read = LeafReader._read

    def counted(self: LeafReader, indices: IntArray, epochs: IntArray | None) -> Sequence[Any]:
        read.append(indices.size)
        return one_read(self, indices, epochs)

    monkeypatch.setattr(LeafReader, "_read", counted)
    monkeypatch.setattr(readers, "_SLOW_READ_SECONDS", 1e9)  # a busy machine would read some ahead
    monkeypatch.setattr(opening, "_TOGETHER", 400)
    root = text_dataset(tmp_path / "text", train=[1000] * lanes)
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_lanes=lanes)
    data = get_train_dataset(
        root, batch_size=4, shuffle_buffer_size=8, max_samples_per_sequence=8, worker_config=config
    )
    batches = iter(get_savable_loader(data))
    turns = []
    for _ in range(200):
        read.clear()
        for _ in range(lanes):
            next(batches)
        turns.append(read[:])
    assert max(map(len, turns[:2])) == lanes
    longest = max(max(turn, default=0) for turn in turns)
    assert longest >= 400
    assert max(map(sum, turns)) <= lanes * longest / 2
