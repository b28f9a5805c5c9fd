"""Defective inputs: each is reported once, with its exact place, and the stream is that of an encoder that skips it."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from defects import (
    BAD,
    CONTENT,
    KEY,
    PARTS,
    PER_SHARD,
    SHARD,
    TAR,
    Careful,
    Skipping,
    content_of,
    damage_shard,
    write_dataset as write,
)
from engine import counts_of, digest, loaders_of, train_dataset, with_prepared
from keyed import keyed_dataset
from made import made_once

from energon_bridge import ErrorPolicy, read_quarantine
from energon_bridge.core.errors import CorruptShardError, DuplicateKeyError, ShardMissingError
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.savable import SavableDataLoader

STEPS = 24
LANES = 4
intact = made_once(write)


def open_dataset(path: Path, encoder: Any, **kwargs: Any) -> DatasetSpec:
    return train_dataset(path, task_encoder=encoder, **kwargs)


def twin(intact: Path, of: DatasetSpec, *keys: str) -> DatasetSpec:
    """Open the intact dataset in the place of a defective one, with an encoder that skips some keys."""
    claimed = of.leaves[0].dataset
    return with_prepared(open_dataset(intact, Skipping(*keys)), fingerprint=claimed.fingerprint, path=claimed.path)


@dataclass(frozen=True, kw_only=True)
class Delivered:
    digests: list[str]
    counts: dict[str, int]


def deliver(make: Callable[[], DatasetSpec], workers: tuple[int, ...]) -> Delivered:
    """Deliver the steps in equal parts, each by a loader of its own that continues from the state of the last."""
    digests: list[str] = []
    state = None
    for number in workers:
        (loader,) = loaders_of(make(), 1, number, state=state, num_lanes=LANES)
        batches = iter(loader)
        digests += [digest(next(batches)) for _ in range(STEPS // len(workers))]
        state = loader.save_state_rank()
        loader.close()
    return Delivered(digests=digests, counts=counts_of(state))


def same_but_reported(found: Delivered, expected: Delivered) -> None:
    assert found.digests == expected.digests
    assert found.counts["errors"] == expected.counts["skipped"] > 0
    assert (found.counts["samples"], found.counts["skipped"]) == (expected.counts["samples"], 0)


@pytest.mark.parametrize("workers", [(2, 0)])
@pytest.mark.parametrize("defect", [*CONTENT, *TAR])
def test_a_defective_sample_is_reported_once_and_costs_nothing_else(
    defect: str, workers: tuple[int, ...], intact: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if defect in CONTENT:
        _, _, hook, complaint = CONTENT[defect]
        damaged = write(tmp_path / "damaged", content_of(defect))
    else:
        _, hook, complaint = TAR[defect]
        damaged = write(tmp_path / "damaged")
        damage_shard(damaged, defect)
    policy = ErrorPolicy(quarantine=tmp_path / "bad.jsonl")
    plain = open_dataset(damaged, Careful())
    with caplog.at_level(logging.WARNING, logger="energon_bridge"):
        found = deliver(lambda: open_dataset(damaged, Careful(), error_policy=policy), workers)
    same_but_reported(found, deliver(lambda: twin(intact, plain, KEY), workers))

    (line,) = (tmp_path / "bad.jsonl").read_text().splitlines()
    (sample,) = read_quarantine(tmp_path / "bad.jsonl")
    assert (sample.dataset, sample.shard, sample.index, sample.hook) == (str(damaged), SHARD, BAD, hook)
    assert json.loads(line)["message"] == sample.message
    assert re.search(complaint, f"{sample.error}: {sample.message}", re.DOTALL)
    if hook != "read":
        assert sample.key == KEY
        renamed = {"tzt"} if defect == "part under another name" else set()
        assert set(sample.parts) == (set(content_of(defect)) if defect in CONTENT else {*PARTS} - {"txt"} | renamed)
    messages = [message for message in caplog.messages if "skipped a sample" in message]
    assert 1 <= len(messages) <= len(workers)  # once in each of the processes that the loaders stand for
    for message in messages:
        assert re.search(rf"failed in {hook}: {re.escape(str(damaged))}: shard {SHARD}, sample {BAD}[,:] ", message)
        assert (f"key '{KEY}' (parts " in message) == (hook != "read")


WHOLE_SHARD = [f"s{number:02d}" for number in range(PER_SHARD, 2 * PER_SHARD)]


def cut(folder: Path) -> None:
    shard = folder / SHARD
    os.truncate(shard, shard.read_bytes().index(f"{KEY}.txt".encode()) + 100)


def lose_index(folder: Path) -> None:
    (folder / f"{SHARD}.idx").unlink()


def shorten_index(folder: Path) -> None:
    os.truncate(folder / f"{SHARD}.idx", 8 * PER_SHARD)


def zero_index(folder: Path) -> None:
    (folder / f"{SHARD}.idx").write_bytes(bytes(8 * (PER_SHARD + 1)))


def empty(folder: Path) -> None:
    os.truncate(folder / SHARD, 0)


def lose_shard(folder: Path) -> None:
    (folder / SHARD).unlink()


SHARD_DAMAGES: dict[str, tuple[Callable[[Path], None], list[str], type[Exception]]] = {
    "truncated": (cut, WHOLE_SHARD, CorruptShardError),
    "empty": (empty, WHOLE_SHARD, CorruptShardError),
    "gone": (lose_shard, WHOLE_SHARD, ShardMissingError),
    "index gone": (lose_index, WHOLE_SHARD, ShardMissingError),
    "index short": (shorten_index, WHOLE_SHARD, CorruptShardError),
    "index of zeros": (zero_index, WHOLE_SHARD, CorruptShardError),
}


@pytest.mark.parametrize("workers", [(2, 0)])
@pytest.mark.parametrize("damage", SHARD_DAMAGES)
def test_a_damaged_shard_can_count_sample_by_sample(
    damage: str, workers: tuple[int, ...], intact: Path, tmp_path: Path
) -> None:
    damaging, lost, error = SHARD_DAMAGES[damage]
    damaged = write(tmp_path / "damaged")
    policy = ErrorPolicy(quarantine=tmp_path / "bad.jsonl", damaged_shards="skip", tolerance=0)
    specs = [open_dataset(damaged, Careful(), error_policy=policy) for _ in workers]
    expected = deliver(lambda: twin(intact, specs[0], *lost), workers)
    damaging(damaged)
    remaining = iter(specs)
    same_but_reported(deliver(lambda: next(remaining), workers), expected)
    samples = read_quarantine(tmp_path / "bad.jsonl")
    assert [sample.index for sample in samples] == [int(key[1:]) for key in lost]
    assert len((tmp_path / "bad.jsonl").read_text().splitlines()) == len(lost)
    assert {(sample.shard, sample.hook, sample.error) for sample in samples} == {(SHARD, "read", error.__name__)}


@pytest.mark.parametrize("damage", SHARD_DAMAGES)
def test_a_damaged_shard_stops_the_run_unless_told_otherwise(damage: str, tmp_path: Path) -> None:
    damaging, _, error = SHARD_DAMAGES[damage]
    damaged = write(tmp_path / "damaged")
    (loader,) = loaders_of(open_dataset(damaged, Careful()), 1, 0, num_lanes=LANES)
    damaging(damaged)
    with pytest.raises(error, match=re.escape(SHARD)) as caught:
        read(loader)
    if damage in ("truncated", "empty"):  # after the dataset was opened
        assert "written to since the run began" in str(caught.value)
    elif damage.startswith("index"):
        assert "energon prepare --tar-index-only" in str(caught.value)


def read(loader: SavableDataLoader) -> None:
    batches = iter(loader)
    for _ in range(STEPS):
        next(batches)


def test_a_key_that_stands_twice_is_refused_when_the_dataset_is_prepared(tmp_path: Path) -> None:
    with pytest.raises(DuplicateKeyError, match=r"(?s)'k1'.*train/0\.tar.*train/1\.tar|train/0\.tar.*'k1'"):
        keyed_dataset(tmp_path / "twice", train=[["k0", "k1"], ["k1", "k2"]])
