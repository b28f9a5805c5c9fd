"""Bad data while training: skipped, counted and named, or refused by name; and nothing else changes."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from energon_bridge import (
    DefaultTaskEncoder,
    SkipSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from energon_bridge.errors import (
    CorruptShardError,
    DatasetNotFoundError,
    EmptyDatasetError,
    FatalSampleError,
    NotPreparedError,
    ShardMissingError,
    ShortReadError,
    UnknownSplitError,
)
from energon_bridge.loader.savable import SavableDataLoader
from energon_bridge.testing import create_captioning_test_dataset

NUM_TRAIN, PER_SHARD = 24, 8
SHARD = "train/shard_001.tar"
KEY = "train-00011"  # in the middle of that shard
EPOCHS = 3


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("intact")
    return create_captioning_test_dataset(
        folder, num_train=NUM_TRAIN, num_val=5, samples_per_shard=PER_SHARD, image_format="jpg"
    )


@pytest.fixture
def damaged(intact: Path, tmp_path: Path) -> Path:
    """Return a copy to damage."""
    return Path(shutil.copytree(intact, tmp_path / "damaged"))


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


def counts(loader: SavableDataLoader) -> dict[str, int]:
    (leaf,) = loader.save_state_rank()["leaves"]
    return {name: leaf["counts"][name] for name in ("samples", "skipped", "errors", "excluded")}


# Samples that cannot be read -----------------------------------------------------------------------------------------


def overwrite(path: Path, found: bytes, replacement: bytes) -> None:
    """Replace bytes that occur once in a file, and change nothing else about it."""
    data = path.read_bytes()
    assert data.count(found) == 1
    assert len(found) == len(replacement)
    path.write_bytes(data.replace(found, replacement))


def break_jpeg(folder: Path) -> None:
    """Keep the first bytes of the image, as an upload that was cut off does, and lose the rest."""
    shard = folder / SHARD
    data = bytearray(shard.read_bytes())
    start = data.index(f"{KEY}.jpg".encode()) + 512
    size = int(data[start - 512 + 124 : start - 512 + 135], 8)
    data[start + 20 : start + size] = bytes(size - 20)
    shard.write_bytes(data)


def break_text(folder: Path) -> None:
    shard = folder / SHARD
    data = bytearray(shard.read_bytes())
    start = data.index(f"{KEY}.txt".encode()) + 512
    data[start : start + 2] = b"\xff\xfe"
    shard.write_bytes(data)


def lose_part(folder: Path) -> None:
    overwrite(folder / SHARD, f"{KEY}.txt".encode(), f"{KEY}.tzt".encode())


def lose_header(folder: Path) -> None:
    """Overwrite the first block of a sample, as a disk that lost a sector does."""
    shard = folder / SHARD
    data = bytearray(shard.read_bytes())
    start = data.index(f"{KEY}.jpg".encode())
    data[start : start + 512] = b"\xaa" * 512
    shard.write_bytes(data)


def swap_key(folder: Path) -> None:
    """Give a member of the sample the name of another one, as a tar that was rewritten below its index has it."""
    overwrite(folder / SHARD, f"{KEY}.txt".encode(), b"other-00011.txt")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "broken JPEG": (break_jpeg, r"DecodeError: part 'jpg' \(\d+ bytes\)"),
    "wrong UTF-8": (break_text, r"DecodeError: part 'txt' \(\d+ bytes\) cannot be decoded as txt: UnicodeDecodeError"),
    "missing part": (lose_part, r"FieldAccessError: field `caption`: nothing at 'txt'; the sample has the parts jpg\."),
    "no header": (lose_header, r"CorruptShardError: .*no tar header at byte 0"),
    "index of another tar": (swap_key, r"CorruptShardError: .*the index does not fit the tar"),
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_sample_is_skipped_and_the_rest_of_the_stream_is_the_same(
    damage: str, num_workers: int, intact: Path, damaged: Path
) -> None:
    DAMAGES[damage][0](damaged)
    expected = [[key for key in lane if key != KEY] for lane in lanes(loader_of(intact))]
    loader = loader_of(damaged, num_workers)
    assert list(lanes(loader, without=1)) == expected
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_bad_samples_are_counted_as_they_are_passed(num_workers: int, batch_size: int | None, damaged: Path) -> None:
    break_jpeg(damaged)
    loader = loader_of(damaged, num_workers, batch_size=batch_size)
    steps = 4 * (NUM_TRAIN - 1) // (batch_size or 1)
    for _ in islice(loader, steps):
        pass
    counted = counts(loader)
    assert counted["samples"] == 4 * (NUM_TRAIN - 1)
    assert 3 <= counted["errors"] <= 5  # the lanes need not be at the end of an epoch both
    assert (counted["skipped"], counted["excluded"]) == (0, 0)
    loader.close()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_skip_is_logged_with_its_place_and_reason(
    damage: str, damaged: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaging, complaint = DAMAGES[damage]
    damaging(damaged)
    with caplog.at_level(logging.WARNING, logger="energon_bridge"):
        lanes(loader_of(damaged), 1, without=1)
    where = rf"skipped a sample that failed: {damaged}: shard {SHARD}, sample 11, (key '{KEY}'|unreadable key): "
    assert caplog.messages
    for message in caplog.messages:
        assert pytest.approx(1) == 1
        import re

        assert re.search(where + complaint, message), message
