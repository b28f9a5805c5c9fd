"""Grouping in streams that end: the same batches on every topology, leftovers last, nothing lost."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import (
    GroupingEncoder,
    InProcessLoader,
    PackingEncoder,
    TensorEncoder,
    config_of,
    counts_of,
    digest,
    is_masked,
    loaders_of,
    text_dataset,
    train_dataset,
)
from forked import on_gloo
from made import made_once

from energon_bridge import SkipSample, get_val_dataset
from energon_bridge.core.errors import EmptyDatasetError, SettingMismatchError
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.savable import SavableDataLoader

SAMPLES = 61
data = made_once(text_dataset, train=[20, 31, 10], val=[20, 31, 10])


class ByLength(TensorEncoder):
    """Batches of 2, 3 and 4 samples by the length of their noise, by a hook that refuses some and draws."""

    def batch_group_criterion(self, sample: Any) -> tuple[Any, int | None]:
        if int(sample.__key__) % 19 == 7:
            raise SkipSample
        return ("length", len(sample.noise)), 1 + len(sample.noise)


class PacksByLength(PackingEncoder):
    """Makes one or two rows of each pack, and batches those of similar length."""

    def pack_selected_samples(self, samples: list[Any]) -> Iterator[Any]:
        yield super().pack_selected_samples(samples)
        if random.random() < 0.4:
            yield super().pack_selected_samples(samples[:1])

    def batch_group_criterion(self, sample: Any) -> tuple[Any, int | None]:
        return len(sample.noise) // 3, None


ENCODERS: dict[str, dict[str, Any]] = {
    "plain": {"task_encoder": ByLength(), "batch_size": None},
    "several": {"task_encoder": GroupingEncoder(), "batch_size": None},
    "packs": {"task_encoder": PacksByLength(), "batch_size": 2, "packing_buffer_size": 11},
}


def opened(data: Path, kind: str, encoder: str, **kwargs: Any) -> DatasetSpec:
    settings = ENCODERS[encoder] | kwargs
    if kind == "val":
        return get_val_dataset(data, worker_config=config_of(1, 0), **settings)
    return train_dataset(data, repeat=False, **settings)


def one_pass(spec: DatasetSpec, ranks: int, workers: int = 0, **kwargs: Any) -> list[Any]:
    """Return the real microbatches of a pass in global order."""
    loaders = loaders_of(spec, ranks, workers, **kwargs)
    columns = [list(loader) for loader in loaders]
    assert {len(column) for column in columns} == {len(loader) for loader in loaders}
    for loader in loaders:
        loader.close()
    return [batch for step in zip(*columns, strict=True) for batch in step if not is_masked(batch)]


def model(keys: list[int]) -> list[list[int]]:
    """What `ByLength` makes of samples in order, said again in other words."""
    waiting: dict[int, list[int]] = {}
    batches = []
    for key in keys:
        length = 1 + key % 3
        if key % 19 == 7:
            continue
        waiting.setdefault(length, []).append(key)
        if len(waiting[length]) == 1 + length:
            batches.append(waiting.pop(length))
    return batches + sorted(waiting.values(), key=lambda group: keys.index(group[0]))


@pytest.mark.parametrize("kind", ["val", "passes"])
def test_groups_are_those_of_the_rows_in_order_and_what_is_left_comes_last(data: Path, kind: str) -> None:
    plain = opened(data, kind, "plain", task_encoder=TensorEncoder(), batch_size=1)
    order = [int(batch.__key__[0]) for batch in one_pass(plain, 1)]
    assert sorted(order) == list(range(SAMPLES))
    spec = opened(data, kind, "plain")
    (loader,) = loaders_of(spec, 1, 0)
    found = [[int(key) for key in batch.__key__] for batch in loader]
    assert found == model(order)
    assert any(len(batch) < 2 + batch[0] % 3 for batch in found[-3:]), "there are leftovers"
    counts = counts_of(loader.save_state_rank())
    assert (counts["samples"], counts["skipped"]) == (SAMPLES - 3, 3)
    whole = [batch for batch in found if len(batch) == 2 + batch[0] % 3]
    dropped = one_pass(opened(data, "passes", "plain", batch_drop_last=True), 2)
    if kind == "passes":
        assert [[int(key) for key in batch.__key__] for batch in dropped] == whole


def test_rows_of_packs_are_each_delivered_once(data: Path) -> None:
    grouped = one_pass(opened(data, "val", "packs"), 2)
    ungrouped = one_pass(opened(data, "val", "packs", task_encoder=PackingEncoder(), batch_size=1), 1)
    rows = Counter(row[1:] for batch in grouped for row in batch.__restore_key__[3])
    assert set(rows.values()) == {1}
    firsts = sorted(row[1:] for batch in ungrouped for row in batch.__restore_key__[3])
    assert sorted(row for row in rows if row[0] == 0) == firsts
    assert len(rows) > len(firsts)
    for batch in grouped:
        assert len({len(noise[noise != 0]) // 3 for noise in batch.noise}) == 1


def test_a_limit_ends_the_pass_and_its_listing(data: Path) -> None:
    whole = [digest(batch) for batch in one_pass(opened(data, "val", "plain"), 1)]
    for ranks in (1, 2):
        limited = one_pass(opened(data, "val", "plain", limit=3), ranks)
        assert [digest(batch) for batch in limited] == whole[: 3 * ranks]


def test_worker_processes_get_each_pass_its_groups(data: Path) -> None:
    spec = opened(data, "passes", "several")
    (here,) = loaders_of(spec, 1, 0)
    expected = [[digest(batch) for batch in here] for _ in range(3)]
    (loader,) = loaders_of(spec, 1, 2, kind=SavableDataLoader, persistent_workers=True)
    assert [[digest(batch) for batch in loader] for _ in range(3)] == expected
    loader.close()


def test_ranks_share_the_work_of_grouping(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("energon_bridge.core.stream.finite._SECTION", 7)
    spec = opened(data, "val", "packs")

    def rank_main(rank: int) -> tuple[list[str], dict[str, int], int]:
        loader = InProcessLoader(spec, worker_config=config_of(2, 0, rank))
        batches = [digest(batch) for batch in loader if not is_masked(batch)]
        torch.distributed.destroy_process_group()
        return batches, counts_of(loader.save_state_rank()), len(loader)

    (one, first, steps), (other, second, same) = on_gloo(2, rank_main)
    (alone,) = loaders_of(spec, 1, 0)
    whole = [digest(batch) for batch in alone]
    found = [entry for step in range(steps) for column in (one, other) for entry in column[step : step + 1]]
    assert found == whole
    assert steps == same == -(-len(whole) // 2)
    assert {name: first[name] + second[name] for name in first} == counts_of(alone.save_state_rank())


class Barren(TensorEncoder):
    def batch_group_criterion(self, sample: Any) -> tuple[Any, int | None]:
        raise SkipSample


def test_a_pass_of_which_nothing_is_left_is_refused_by_name(data: Path) -> None:
    (loader,) = loaders_of(opened(data, "val", "plain", task_encoder=Barren()), 1, 0)
    with pytest.raises(EmptyDatasetError, match="every one of the 61 samples of the split was skipped"):
        next(iter(loader))


def test_a_state_of_ungrouped_passes_is_refused(data: Path) -> None:
    (plain,) = loaders_of(opened(data, "val", "plain", task_encoder=TensorEncoder()), 1, 0)
    (grouped,) = loaders_of(opened(data, "val", "plain"), 1, 0)
    with pytest.raises(SettingMismatchError, match="grouped"):
        grouped.restore_state_rank(plain.save_state_rank())
