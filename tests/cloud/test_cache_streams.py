"""Streams with cache pools: the same with any of them, on any topology, across resumes and in worker processes."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from caching import files_in, wait_for
from crude import LazyEncoder, LazyPackingEncoder, crude_mix
from engine import config_of, deliver, digest, loaders_of, train_dataset
from made import made_once

from energon_bridge import CachePool, FileStoreCachePool, NoCachePool, get_loader, get_savable_loader
from energon_bridge.core.loader.savable import SavableDataLoader

ENCODERS = {"lazy": (LazyEncoder, {}), "packing": (LazyPackingEncoder, {"packing_buffer_size": 7})}
mix = made_once(crude_mix)


def owners_in(folder: Path) -> set[int]:
    """Return the processes that have a folder for files."""
    return {int(path.name.split("_")[1]) for path in folder.glob("energon_cache_*/v2/*_*")}


def dataset_of(mix: Path, name: str, pool: CachePool | None = None) -> Any:
    encoder, arguments = ENCODERS[name]
    dataset = train_dataset(mix, task_encoder=encoder(), **arguments)
    return get_loader(dataset, cache_pool=pool).spec


@pytest.fixture(scope="module")
def streams(mix: Path) -> dict[str, list[str]]:
    """Return what comes without a pool, by encoder."""
    return {name: deliver(loaders_of(dataset_of(mix, name), 1, 0), 84).digests for name in ENCODERS}


@pytest.mark.parametrize(
    ("name", "limit", "ranks", "workers"), [("packing", 1, 2, 2), ("lazy", 5, 1, 0), ("packing", 1000, 1, 0)]
)
def test_the_stream_does_not_depend_on_the_pool(
    name: str, limit: int, ranks: int, workers: int, mix: Path, streams: dict[str, list[str]], tmp_path: Path
) -> None:
    pool = FileStoreCachePool(parent_cache_dir=tmp_path, max_cache_count=limit)
    found = deliver(loaders_of(dataset_of(mix, name, pool), ranks, workers), 60 // ranks)
    assert found.digests == streams[name][:60]
    gc.collect()
    wait_for(lambda: files_in(tmp_path) == [])
    pool.close()


@pytest.mark.parametrize("name", ["packing"])
def test_a_resume_with_another_pool_goes_on(
    name: str, mix: Path, streams: dict[str, list[str]], tmp_path: Path
) -> None:
    pool = FileStoreCachePool(parent_cache_dir=tmp_path)
    first = deliver(loaders_of(dataset_of(mix, name), 2, 1), 12, save_at=[12])
    middle = deliver(loaders_of(dataset_of(mix, name, pool), 3, 0, state=first.states[12]), 8, save_at=[8])
    last = deliver(loaders_of(dataset_of(mix, name), 1, 2, state=middle.states[8]), 36)
    assert first.digests + middle.digests + last.digests == streams[name]
    pool.close()


@pytest.mark.parametrize("name", ["packing"])
def test_worker_processes_cache_resume_and_restore_batches(
    name: str, mix: Path, streams: dict[str, list[str]], tmp_path: Path
) -> None:
    """In megatron-energon a batch of such a loader cannot be restored."""
    pool = FileStoreCachePool(parent_cache_dir=tmp_path)
    dataset, state, digests, keys = dataset_of(mix, name), None, [], []
    for _ in range(2):
        loader: SavableDataLoader = get_savable_loader(dataset, worker_config=config_of(1, 2), cache_pool=pool)
        if state is not None:
            loader.restore_state_rank(state)
        batches = iter(loader)
        for _ in range(10):
            batch = next(batches)
            digests.append(digest(batch))
            keys.append(batch["__restore_key__"])
        state = loader.save_state_rank()
        assert len(owners_in(tmp_path)) >= 2, "the workers keep nothing"
        assert digest(loader.restore_sample(keys[-1])) == digests[-1]
        loader.close()
    assert digests == streams[name][:20]
    pool.close()
    assert list(tmp_path.iterdir()) == []


def test_hooks_reach_the_pool_of_the_loader_that_runs_them(mix: Path, tmp_path: Path) -> None:
    seen: list[CachePool] = []

    class Encoder(LazyEncoder):
        def encode_sample(self, sample: Any) -> Any:
            seen.append(self.cache)
            return super().encode_sample(sample)

    encoder = Encoder()
    assert isinstance(encoder.cache, NoCachePool)
    pools = [FileStoreCachePool(parent_cache_dir=tmp_path) for _ in range(2)]
    dataset = train_dataset(mix, task_encoder=encoder)
    loaders = [get_loader(dataset, worker_config=config_of(1, 0), cache_pool=pool) for pool in pools]
    iterators = [iter(loader) for loader in loaders]
    for number in (0, 1, 0, 1):
        seen.clear()
        next(iterators[number])
        assert seen
        assert all(pool is pools[number] for pool in seen)
    for loader, pool in zip(loaders, pools, strict=True):
        loader.close()
        pool.close()


@pytest.mark.parametrize("name", ["packing"])
def test_a_worker_that_is_killed_leaves_neither_files_nor_gaps(
    name: str, mix: Path, streams: dict[str, list[str]], tmp_path: Path
) -> None:
    pool = FileStoreCachePool(parent_cache_dir=tmp_path)
    loader = get_savable_loader(dataset_of(mix, name), worker_config=config_of(1, 2), cache_pool=pool)
    batches = iter(loader)
    digests = [digest(next(batches)) for _ in range(4)]
    (killed, *_) = owners_in(tmp_path) - {os.getpid()}
    os.kill(killed, signal.SIGKILL)
    digests += [digest(next(batches)) for _ in range(16)]
    assert digests == streams[name][:20]
    assert killed not in owners_in(tmp_path)
    loader.close()
    pool.close()
    assert list(tmp_path.iterdir()) == []
