"""Bad data while training: skipped, counted and named, or refused by name; and nothing else changes."""

from __future__ import annotations

import os
import re
import shutil
import tarfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml
from made import made_once
from tar_builder import write_tar
from two_lanes import EPOCHS, KEY, KEYS, NUM_TRAIN, PER_SHARD, SHARD, counts, lanes, loader_of, write_dataset

from energon_bridge.core.errors import (
    CorruptShardError,
    DatasetNotFoundError,
    EmptyDatasetError,
    FatalSampleError,
    NotPreparedError,
    ShardMissingError,
    ShortReadError,
    UnknownSplitError,
)

intact = made_once(write_dataset)


@pytest.fixture
def damaged(intact: Path, tmp_path: Path) -> Path:
    """Return a copy to damage."""
    return Path(shutil.copytree(intact, tmp_path / "damaged"))


def test_an_index_of_another_tar_never_mixes_samples(intact: Path, damaged: Path) -> None:
    """Begin the tar with the second member: a range of the index then holds the text of one sample and an image."""
    expected = {s.__key__: (s.caption, s.image.tolist()) for s in islice(loader_of(intact), 2 * NUM_TRAIN)}
    with tarfile.open(intact / SHARD) as tar:
        members = [(member.name, tar.extractfile(member).read()) for member in tar.getmembers()]  # type: ignore[union-attr]
    write_tar(damaged / SHARD, members[1:] + members[:1])
    assert (damaged / SHARD).stat().st_size == (intact / SHARD).stat().st_size
    loader = loader_of(damaged)
    delivered = {s.__key__: (s.caption, s.image.tolist()) for s in islice(loader, 2 * NUM_TRAIN)}
    assert delivered == {key: expected[key] for key in delivered}
    assert len(delivered) == NUM_TRAIN - PER_SHARD
    assert counts(loader.save_state_rank())["errors"] >= PER_SHARD


def change_split(folder: Path, **values: Any) -> None:
    path = folder / ".nv-meta" / "split.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | values))


def empty_split(folder: Path) -> None:
    change_split(folder, split_parts={"train": [], "val": []})


def lose_split(folder: Path) -> None:
    change_split(folder, split_parts={"training": [SHARD], "val": []})


REFUSED_AT_ONCE: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "no folder": (shutil.rmtree, DatasetNotFoundError, "no such folder"),
    "not prepared": (lambda folder: shutil.rmtree(folder / ".nv-meta"), NotPreparedError, "energon prepare"),
    "missing shard": (lambda folder: (folder / SHARD).unlink(), ShardMissingError, f"{SHARD}: no such shard"),
    "empty split": (empty_split, EmptyDatasetError, "split.yaml: the split part 'train' of .* has no samples"),
    "no such split": (lose_split, UnknownSplitError, r"split.yaml.*'train'.*training, val"),
}


@pytest.mark.parametrize("damage", REFUSED_AT_ONCE)
def test_a_broken_dataset_is_refused_when_it_is_opened(damage: str, damaged: Path) -> None:
    damaging, error, complaint = REFUSED_AT_ONCE[damage]
    damaging(damaged)
    with pytest.raises(error, match=f"{damaged}(.|\n)*") as caught:
        loader_of(damaged)
    assert re.search(complaint, str(caught.value))


@pytest.mark.parametrize("num_workers", [2])
def test_a_shard_cut_off_below_a_run_stops_it_until_it_is_whole_again(
    num_workers: int, intact: Path, damaged: Path
) -> None:
    expected = [sample.__key__ for sample in islice(loader_of(intact), 3 * NUM_TRAIN)]
    loader = loader_of(damaged, num_workers)
    content = (damaged / SHARD).read_bytes()
    status = (damaged / SHARD).stat()
    os.truncate(damaged / SHARD, 1000)
    seen: list[str] = []
    batches = iter(loader)
    for _ in range(2):
        with pytest.raises((ShortReadError, CorruptShardError), match=SHARD):
            seen += (sample.__key__ for sample in batches)
        assert len(seen) < NUM_TRAIN
    (damaged / SHARD).write_bytes(content)
    os.utime(damaged / SHARD, ns=(status.st_atime_ns, status.st_mtime_ns))  # as `rsync -t` and `cp -p` do
    seen += [next(batches).__key__ for _ in range(3 * NUM_TRAIN - len(seen))]
    assert seen == expected
    loader.close()


@pytest.mark.parametrize("num_workers", [2])
def test_excluded_samples_are_left_out_and_counted(num_workers: int, damaged: Path) -> None:
    change_split(damaged, exclude=[f"{SHARD}/{KEY}", f"{SHARD}/train-00012"])
    loader = loader_of(damaged, num_workers)
    keys = lanes(loader, without=2)
    for epoch in range(EPOCHS):
        assert not {KEY, "train-00012"} & set(keys[epoch % 2])
    counted = counts(loader.save_state_rank())
    assert 2 * EPOCHS <= counted["excluded"] <= 2 * EPOCHS + 4
    assert (counted["errors"], counted["skipped"]) == (0, 0)
    loader.close()


def test_an_excluded_shard_is_no_part_of_the_dataset(damaged: Path) -> None:
    change_split(damaged, exclude=[SHARD])
    loader = loader_of(damaged)
    keys = {sample.__key__ for sample in islice(loader, 2 * (NUM_TRAIN - PER_SHARD))}
    assert len(keys) == NUM_TRAIN - PER_SHARD
    assert KEY not in keys
    assert counts(loader.save_state_rank())["excluded"] == 0


def test_a_split_whose_samples_are_all_excluded_is_an_error(damaged: Path) -> None:
    change_split(
        damaged, exclude=[f"train/shard_{number // PER_SHARD:03d}.tar/{key}" for number, key in enumerate(KEYS)]
    )
    with pytest.raises(EmptyDatasetError, match=f"{damaged}: \\d+ samples in a row, of a split of 24, were"):
        next(iter(loader_of(damaged)))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bad_samples_in_a_row_stop_the_run(num_workers: int, damaged: Path) -> None:
    for shard in (damaged / "train").glob("*.tar"):
        shard.write_bytes(shard.read_bytes().replace(b"\xff\xd8\xff\xe0", b"nope"))
    loader = loader_of(damaged, num_workers)
    with pytest.raises(
        FatalSampleError, match=r"100 samples failed in a row, the last one .*key 'train-000\d\d' .*: DecodeError"
    ):
        next(iter(loader))
    loader.close()
