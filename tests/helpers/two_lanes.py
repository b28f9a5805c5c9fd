"""A small captioning dataset, read in two lanes, sample by sample: what the tests of bad data and bad hooks share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine import counts_of

from energon_bridge import WorkerConfig, get_savable_loader, get_train_dataset
from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.tools.testing import create_captioning_test_dataset

NUM_TRAIN, PER_SHARD = 24, 8
KEYS = [f"train-{number:05d}" for number in range(NUM_TRAIN)]
SHARD, KEY = "train/shard_001.tar", "train-00011"  # the sample that is bad, in the middle of its shard
EPOCHS = 3


def write_dataset(folder: Path) -> Path:
    return create_captioning_test_dataset(
        folder, num_train=NUM_TRAIN, num_val=5, samples_per_shard=PER_SHARD, image_format="jpg"
    )


def loader_of(path: Path, num_workers: int = 0, **kwargs: Any) -> SavableDataLoader:
    """Return a loader of single samples in two lanes."""
    settings: dict[str, Any] = {"batch_size": None, "shuffle_buffer_size": 6, "max_samples_per_sequence": 4}
    config = WorkerConfig(rank=0, world_size=1, num_workers=num_workers, num_lanes=2, prefetch_factor=1)
    return get_savable_loader(get_train_dataset(path, worker_config=config, **(settings | kwargs)))


def lanes(loader: SavableDataLoader, epochs: int = EPOCHS, *, without: int = 0) -> tuple[list[str], list[str]]:
    """Return the keys that each of the two lanes delivers in some epochs, if an epoch lacks some samples."""
    # The samples of an epoch are not shared out evenly between the lanes once some are left out.
    keys: tuple[list[str], list[str]] = ([], [])
    epoch_of: list[int] = [0, 0]
    batches = iter(loader)
    for number in range(2 * epochs * NUM_TRAIN):
        sample = next(batches)
        epoch_of[number % 2] = sample.__restore_key__[2]
        if epoch_of[number % 2] < epochs:
            keys[number % 2].append(sample.__key__)
        if min(epoch_of) >= epochs:
            break
    assert sum(map(len, keys)) == epochs * (NUM_TRAIN - without)
    return keys


def counts(state: dict[str, Any]) -> dict[str, int]:
    return {name: counts_of(state)[name] for name in ("samples", "skipped", "errors", "excluded")}
