"""Under the drop-in validation, numbers and ends are megatron-energon's; `test_dropin` compares them with it."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from made import made_once

import energon_bridge
from energon_bridge.compat import loading
from energon_bridge.compat.loading import WorkerConfig
from energon_bridge.compat.wrapped import LimitDataset, RepeatDataset
from energon_bridge.core.encoder import DefaultTaskEncoder
from energon_bridge.core.errors import (
    ConfigurationError,
    EmptyDatasetError,
    FatalSampleError,
    SettingMismatchError,
    SkipSample,
)
from energon_bridge.core.loader.saved_run import sign
from energon_bridge.tools.testing import create_captioning_test_dataset

path = made_once(create_captioning_test_dataset, num_train=24, num_val=10)


def config(rank: int = 0, ranks: int = 1, workers: int = 0, **settings: Any) -> WorkerConfig:
    return WorkerConfig(rank=rank, world_size=ranks, num_workers=workers, **settings)


class Numbered(DefaultTaskEncoder):
    """Writes down the numbers that it is given."""

    def __init__(self, skips: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.skips = skips

    def encode_sample(self, sample: Any) -> Any:
        if sample.__key__ in self.skips:
            raise SkipSample
        sample.caption = (self.current_batch_index, self.current_sample_index)
        return sample

    def encode_batch(self, batch: Any) -> Any:
        return {"keys": batch.__key__, "numbers": batch.caption, "batch": self.current_batch_index}


def numbers(batches: Any) -> list[Any]:
    return [[batch["batch"], [tuple(pair) for pair in batch["numbers"]]] for batch in batches]


def test_no_row_of_a_pass_is_there_twice(path: Path) -> None:
    """Ten samples, four a batch: the ranks make one and two steps, and a program need not know `__valid__`."""
    seen = []
    for rank in range(3):
        dataset = loading.get_val_dataset(path, batch_size=3, worker_config=config(rank, 3))
        loader = loading.get_loader(dataset)
        passes = [[batch.__key__ for batch in loader] for _ in range(2)]
        assert passes[0] == passes[1]
        assert len(passes[0]) == len(loader) == len(dataset)
        seen.append(passes[0])
    assert [list(map(len, batches)) for batches in seen] == [[3, 1], [3], [3]]
    assert [key for batches in seen for keys in batches for key in keys] == [f"val-{n:05d}" for n in range(10)]


def test_a_batch_of_which_nothing_is_left_is_left_out(path: Path) -> None:
    gone = tuple(f"val-{n:05d}" for n in (2, 3, 8, 9))
    dataset = loading.get_val_dataset(path, batch_size=2, task_encoder=Numbered(gone), worker_config=config())
    loader = loading.get_savable_loader(dataset)
    assert [batch["keys"] for batch in loader] == [[f"val-{n:05d}" for n in (k, k + 1)] for k in (0, 4, 6)]
    assert [row["skipped"] for row in loader.counters()] == [4]
    everything = tuple(f"val-{n:05d}" for n in range(10))
    nothing = loading.get_val_dataset(path, batch_size=2, task_encoder=Numbered(everything), worker_config=config())
    assert list(loading.get_loader(nothing)) == []


def test_training_that_ends_has_no_masked_rows(path: Path) -> None:
    seen = []
    for rank in range(2):
        settings = {"shuffle_buffer_size": None, "max_samples_per_sequence": None, "repeat": False}
        dataset = loading.get_train_dataset(path, batch_size=5, worker_config=config(rank, 2), **settings)
        loader = loading.get_loader(dataset)
        for _ in range(2):
            seen.append([key for batch in loader for key in batch.__key__])
    assert [len(keys) for keys in seen] == [14, 14, 10, 10]
    assert sorted(seen[0] + seen[2]) == sorted(seen[1] + seen[3]) == [f"train-{n:05d}" for n in range(24)]


def test_ranks_that_would_need_masks_are_refused(path: Path) -> None:
    settings = {"batch_size": 2, "shuffle_buffer_size": None, "max_samples_per_sequence": None}
    dataset = loading.get_train_dataset(path, worker_config=config(0, 3, num_lanes=8), **settings)
    with pytest.raises(ConfigurationError, match="3 data-parallel ranks do not divide the 8 lanes"):
        loading.get_loader(dataset)


def train(path: Path, encoder: Any, **settings: Any) -> Any:
    settings = {"worker_config": config(), "batch_size": 2, "shuffle_buffer_size": None} | settings
    return loading.get_train_dataset(path, task_encoder=encoder, max_samples_per_sequence=None, **settings)


def test_numbers_run_on_and_are_those_of_the_loader_that_asks(path: Path) -> None:
    first = loading.get_savable_loader(train(path, Numbered()))
    second = loading.get_savable_loader(train(path, Numbered()))
    expected = [[n, [(n, 2 * n), (n, 2 * n + 1)]] for n in range(12)]
    one, other = iter(first), iter(second)
    both = [(next(one), next(other)) for _ in range(4)]
    assert numbers(a for a, _ in both) == numbers(b for _, b in both) == expected[:4]
    assert numbers(islice(one, 3)) == expected[4:7]
    assert numbers(islice(other, 2)) == expected[4:6]
    resumed = loading.get_savable_loader(train(path, Numbered()))
    resumed.restore_state_rank(first.save_state_rank())
    assert numbers(islice(resumed, 5)) == expected[7:]


def test_numbers_can_only_be_asked_for_where_they_are_known(path: Path) -> None:
    encoder = Numbered()
    next(iter(loading.get_loader(train(path, encoder))))
    for name in ("current_batch_index", "current_sample_index"):
        with pytest.raises(ConfigurationError, match="inside a hook"):
            getattr(encoder, name)


class Yields(Numbered):
    def encode_sample(self, sample: Any) -> Any:
        yield super().encode_sample(sample)


class Packs(Numbered):
    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[:2], samples[2:]]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return samples[0]


class PacksByNumber(Packs):
    def encode_sample(self, sample: Any) -> Any:
        sample.caption = self.current_sample_index
        return sample


@pytest.mark.parametrize(
    ("encoder", "settings", "message"),
    [
        (Yields, {}, "current_batch_index: this hook may run"),
        (Packs, {"packing_buffer_size": 4}, "current_batch_index: this hook may run"),
        (PacksByNumber, {"packing_buffer_size": 4}, "current_sample_index: a sample that is encoded again"),
    ],
)
def test_numbers_that_a_resume_would_change_are_refused(
    encoder: type, settings: dict[str, Any], message: str, path: Path
) -> None:
    with pytest.raises(FatalSampleError, match=message):
        next(iter(loading.get_loader(train(path, encoder(), **settings))))


def test_a_state_of_validation_belongs_to_its_ranks_and_workers(path: Path) -> None:
    def loader(ranks: int, limit: int | None = 5) -> Any:
        dataset = loading.get_val_dataset(path, batch_size=2, limit=limit, worker_config=config(0, ranks))
        return loading.get_savable_loader(dataset)

    whole = [batch.__key__ for batch in loader(1)]
    started = loader(1)
    head = [batch.__key__ for batch in islice(started, 2)]
    resumed = loader(1)
    resumed.restore_state_rank(started.save_state_rank())
    assert head + [batch.__key__ for batch in resumed] == whole
    with pytest.raises(SettingMismatchError, match="dp_size=1"):
        loader(2).restore_state_rank(started.save_state_rank())


def test_a_repeated_pass_needs_a_batch_for_each_worker(path: Path) -> None:
    few = config(0, 11)
    repeated = RepeatDataset(loading.get_val_dataset(path, batch_size=2, worker_config=few), worker_config=few)
    loaders = [
        loading.get_loader(LimitDataset(repeated, 3, worker_config=few), worker_config=config(r, 11)) for r in (0, 1)
    ]
    assert [len(batch.__key__) for batch in loaders[0]] == [1, 1, 1]
    empty = config(10, 11)
    with pytest.raises(EmptyDatasetError, match="worker 0 of rank 10 has no batch to repeat"):
        list(loading.get_loader(repeated, worker_config=empty))


class Pairs(DefaultTaskEncoder):
    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[first : first + 2] for first in range(0, len(samples), 2)]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return {"keys": [sample.__key__ for sample in samples]}


@pytest.mark.parametrize("packed", [True, False])
def test_states_with_packs_stay_with_their_kind_of_program(packed: bool, path: Path) -> None:
    """Packs of lanes that have not begun are others; without packs, and from before this was recorded, all fit."""

    def loader(of: Any, **arguments: Any) -> Any:
        packing = {"packing_buffer_size": 8, "task_encoder": Pairs()} if packed else {}
        run = WorkerConfig(rank=0, world_size=1, num_workers=0, num_lanes=2)
        dataset = of.get_train_dataset(path, batch_size=1, worker_config=run, **packing)
        return of.get_savable_loader(dataset, **arguments)

    def keys(batches: Any) -> list[Any]:
        return [batch["keys"] if packed else batch.__key__ for batch in batches]

    for own, other in ((energon_bridge, loading), (loading, energon_bridge)):
        started, resumed, crossing = loader(own), loader(own), loader(other)
        whole = keys(islice(loader(own), 12))
        assert keys(islice(started, 3)) == whole[:3]
        state = started.save_state_rank()
        resumed.restore_state_rank(state)
        assert keys(islice(resumed, 9)) == whole[3:]
        if packed:
            with pytest.raises(SettingMismatchError, match=r"packs its first samples differently.*start_at=STEP"):
                crossing.restore_state_rank(state)
            assert len(keys(islice(loader(other, start_at=3), 3))) == 3
            assert state["settings"].pop("first_packs")
            loader(own).restore_state_rank(sign(state))
        else:
            crossing.restore_state_rank(state)
            assert keys(islice(crossing, 9)) == whole[3:]


def test_a_class_in_place_of_an_encoder_is_named_and_left_alone(path: Path) -> None:
    decoder = Numbered.decoder
    for arguments in ({}, {"image_decode": "pil"}, {"auto_decode": False}):
        for builder in (loading.get_train_dataset, loading.get_val_dataset):
            with pytest.raises(ConfigurationError, match=r"is the class Numbered; .* task_encoder=Numbered\(…\)"):
                builder(path, batch_size=1, worker_config=config(), task_encoder=Numbered, **arguments)
    assert Numbered.decoder is decoder
