"""The data module: which data a process loads, its iterators, its state, and what it refuses."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine import worker_config_of
from forked import run_afresh
from made import made_once
from paths import REPOSITORY

from energon_bridge import EnergonMultiModalDataModule, NoCachePool, WorkerConfig
from energon_bridge.core.dataloader import EnergonDataloader
from energon_bridge.core.encoder.task_encoder import DefaultTaskEncoder
from energon_bridge.core.errors import BatchSizeMismatchError, ConfigurationError, UnknownArgumentError
from energon_bridge.tools.testing import create_captioning_test_dataset

NUM_TRAIN, NUM_VAL = 30, 7
dataset = made_once(create_captioning_test_dataset, num_train=NUM_TRAIN, num_val=NUM_VAL, samples_per_shard=5)


def module(dataset: Path, **kwargs: Any) -> EnergonMultiModalDataModule:
    settings: dict[str, Any] = {"micro_batch_size": 2, "num_workers": 0, "task_encoder": DefaultTaskEncoder()}
    return EnergonMultiModalDataModule(str(dataset), None, None, **(settings | kwargs))


def keys(batches: Any) -> list[list[str]]:
    return [batch.__key__ for batch in batches]


class FakeGroup:
    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class UnsetFields:
    """Like megatron-core's ProcessGroupCollection: a field that was never set raises AttributeError."""

    def __init__(self, **groups: Any) -> None:
        self.__dict__.update(groups)


# Which data ----------------------------------------------------------------------------------------------------------


def test_the_pure_data_parallel_group_says_what_to_load(dataset: Path) -> None:
    config = worker_config_of(module(dataset), 3)
    assert (config.rank, config.world_size, config.num_workers) == (0, 1, 3)
    groups = UnsetFields(dp=FakeGroup(1, 2), dp_cp=FakeGroup(3, 4))
    config = worker_config_of(module(dataset, pg_collection=groups))
    assert (config.rank, config.world_size, config.data_parallel_group) == (1, 2, groups.dp)
    for without in (UnsetFields(), UnsetFields(dp=None), UnsetFields(cp=FakeGroup(1, 2))):
        config = worker_config_of(module(dataset, pg_collection=without))
        assert (config.rank, config.world_size) == (0, 1)


def test_megatrons_parallel_state_is_used_where_it_is_initialised(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def group(*, with_context_parallel: bool) -> FakeGroup:
        return FakeGroup(3, 4) if with_context_parallel else FakeGroup(1, 2)

    fake = SimpleNamespace(model_parallel_is_initialized=lambda: True, get_data_parallel_group=group)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", fake)
    config = worker_config_of(module(dataset))
    assert (config.rank, config.world_size) == (1, 2)
    fake.model_parallel_is_initialized = lambda: False
    assert worker_config_of(module(dataset)).world_size == 1


def test_settings_reach_the_worker_config(dataset: Path) -> None:
    data = module(
        dataset, global_batch_size=8, seed=5, num_lanes=12, prefetch_factor=3, decode_threads=2, pin_memory=False
    )
    config = worker_config_of(data, 1)
    assert config == WorkerConfig(
        rank=0,
        world_size=1,
        num_workers=1,
        seed=5,
        num_lanes=12,
        prefetch_factor=3,
        decode_threads=2,
        microbatches_per_global_batch=4,
        pin_memory=False,
    )


def test_a_global_batch_is_shared_by_the_ranks_or_refused(dataset: Path) -> None:
    groups = UnsetFields(dp=FakeGroup(0, 8))
    config = worker_config_of(module(dataset, pg_collection=groups))
    assert config.microbatches_per_global_batch is None
    for size, ranks in ((5, 1), (6, 2), (2, 2)):
        data = module(dataset, pg_collection=UnsetFields(dp=FakeGroup(0, ranks)), global_batch_size=size)
        with pytest.raises(ConfigurationError, match=f"global_batch_size={size}.*multiple of"):
            worker_config_of(data)


# Iterators -----------------------------------------------------------------------------------------------------------


def test_build_gives_what_a_megatron_loop_takes_and_asking_twice_gives_the_same(dataset: Path) -> None:
    data = module(dataset)
    assert data.train_dataloader_object is None
    train, val = data.build()
    assert isinstance(train, EnergonDataloader)
    assert isinstance(val, EnergonDataloader)
    assert train is data.train_dataloader() is data.train_dataloader_object
    assert val is data.val_dataloader() is data.val_dataloader_object
    assert data.test_dataloader() is None
    assert len(next(train).__key__) == 2
    with pytest.raises(TypeError, match="endless"):
        len(train)


EXPECTED_VAL = [[f"val-{i:05d}" for i in range(first, min(first + 2, NUM_VAL))] for first in range(0, NUM_VAL, 2)]


@pytest.mark.parametrize("workers", [0, 1])
def test_iterators_of_validation_cycle_and_keep_their_own_positions(dataset: Path, workers: int) -> None:
    """Megatron-Bridge takes an iterator, sometimes two, and calls next() on it in every evaluation of the run."""
    data = module(dataset, num_val_workers=workers)
    first, second = iter(data.val_dataloader()), iter(data.val_dataloader())
    turns = [(first, 3), (second, 1), (first, 4), (second, 4), (first, 1)]
    got: dict[int, list[list[str]]] = {id(first): [], id(second): []}
    for stream, count in turns:
        got[id(stream)] += keys(next(stream) for _ in range(count))
    assert got[id(first)] == [*EXPECTED_VAL, *EXPECTED_VAL]
    assert got[id(second)] == [*EXPECTED_VAL, EXPECTED_VAL[0]]
    assert data.val_dataloader().batches == 13
    data.close()


def test_under_lightning_an_iterator_of_validation_is_one_pass(dataset: Path) -> None:
    data = module(dataset)
    with attached(data):
        assert keys(data.val_dataloader()) == EXPECTED_VAL
        assert keys(data.val_dataloader()) == EXPECTED_VAL


def test_training_arguments_do_not_change_what_is_validated(dataset: Path) -> None:
    data = module(dataset, batch_drop_last=True, parallel_shard_iters=2, image_decode="torchrgb8")
    assert len(list(data.val_dataloader().one_pass())) == 4
    assert next(data.val_dataloader()).image.dtype == next(data.train_dataloader()).image.dtype == torch.uint8


def test_validation_has_its_own_encoder_and_workers(dataset: Path) -> None:
    own = DefaultTaskEncoder()
    data = module(dataset, validation_task_encoder=own, num_workers=2, num_val_workers=0)
    assert data.datasets_provider(WorkerConfig(num_workers=0)).settings.task_encoder is own
    assert (data.num_workers, data.num_val_workers) == (2, 0)
    assert module(dataset, num_workers=2).num_val_workers == 2


class SeesCache(DefaultTaskEncoder):
    """Notes which pool its hooks see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def encode_sample(self, sample: Any) -> Any:
        self.seen.add(id(self.cache))
        return sample


@pytest.mark.parametrize("loader", ["train_dataloader", "val_dataloader"])
def test_the_cache_pool_reaches_the_hooks_of_both_loaders(dataset: Path, loader: str) -> None:
    pool, encoder = NoCachePool(), SeesCache()
    next(iter(getattr(module(dataset, task_encoder=encoder, cache_pool=pool), loader)()))
    assert encoder.seen == {id(pool)}


@pytest.mark.parametrize(
    ("name", "value", "nearest"),
    [
        ("paralel_shard_iters", 4, "parallel_shard_iters"),
        ("batch_size", 4, "micro_batch_size"),
        ("num_worker", 4, "num_workers"),
        ("cache_pol", NoCachePool(), "cache_pool"),
    ],
)
def test_unknown_arguments_are_refused_with_the_nearest_name(
    dataset: Path, name: str, value: Any, nearest: str
) -> None:
    with pytest.raises(UnknownArgumentError, match=f"Did you mean '{nearest}'"):
        module(dataset, **{name: value})


def test_what_does_not_go_together_is_refused(dataset: Path) -> None:
    with pytest.raises(ConfigurationError, match="needs a tokenizer and, for images, an image processor"):
        EnergonMultiModalDataModule(str(dataset), None, None)
    with pytest.raises(ConfigurationError, match="'train' or 'val', got 'test'"):
        module(dataset).datasets_provider(WorkerConfig(num_workers=0), "test")  # type: ignore[arg-type]
    for arguments in ((2048, 4), (2048, 4, 2), (2048,), ("processor",)):  # in the place of the image processor
        with pytest.raises(ConfigurationError, match=rf"image_processor={arguments[0]!r} is a (int|str).*by keyword"):
            EnergonMultiModalDataModule(str(dataset), None, *arguments, task_encoder=DefaultTaskEncoder())  # type: ignore[arg-type]
    packing = module(dataset, packing_buffer_size=10)
    for opened in (packing.train_dataloader, packing.val_dataloader):
        with pytest.raises(ConfigurationError, match="does not override select_samples_to_pack"):
            opened()


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        *((name, 0, 1) for name in ("seq_length", "micro_batch_size", "global_batch_size", "packing_buffer_size")),
        *(("micro_batch_size", value, 1) for value in (None, True, 2.0)),
        *((name, -1, 0) for name in ("num_workers", "num_val_workers", "shuffle_buffer_size")),
        *((name, 0, 1) for name in ("max_samples_per_sequence", "decoder_seq_length")),
    ],
)
def test_sizes_that_cannot_be_are_refused(dataset: Path, name: str, value: Any, least: int) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be an integer of at least {least}.*got {value!r}"):
        module(dataset, **{name: value})


def test_a_virtual_epoch_of_no_steps_is_an_endless_stream(dataset: Path) -> None:
    train = module(dataset, virtual_epoch_length=0).train_dataloader()
    assert len(keys(islice(train, 50))) == 50


# Refusals ------------------------------------------------------------------------------------------------------------


def test_both_constructors_of_megatron_bridge_work_by_keyword(dataset: Path) -> None:
    common: dict[str, Any] = {"path": str(dataset), "tokenizer": None, "task_encoder": DefaultTaskEncoder()}
    common |= {"seq_length": 16, "micro_batch_size": 2, "num_workers": 0, "multimodal_sample_config": None}
    newer = EnergonMultiModalDataModule(**common)
    older = EnergonMultiModalDataModule(**common, image_processor=None, global_batch_size=4)
    assert (newer.image_processor, newer.global_batch_size, older.global_batch_size) == (None, 1, 4)
    assert [len(next(data.train_dataloader()).__key__) for data in (newer, older)] == [2, 2]


# State ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loaded", ["before", "after", "both", "both and the loader's own"])
def test_a_state_continues_the_stream_however_it_is_loaded(dataset: Path, loaded: str) -> None:
    data = module(dataset)
    train = data.train_dataloader()
    keys(islice(train, 5))
    state, own = data.state_dict(), train.state_dict()
    expected = keys(islice(train, 20))
    fresh = module(dataset)
    if loaded != "after":
        fresh.load_state_dict(state)
    train = fresh.train_dataloader()
    if loaded != "before":
        fresh.load_state_dict(state)
    if loaded.endswith("own"):
        train.load_state_dict(own)
    assert keys(islice(train, 20)) == expected


@pytest.mark.parametrize("opened", [False, True])
def test_a_state_from_before_the_first_batch_is_the_beginning(dataset: Path, opened: bool) -> None:
    data = module(dataset)
    if opened:
        data.train_dataloader()
    state = data.state_dict()
    assert state["consumed_samples"] == 0
    first = keys(islice(data.train_dataloader(), 5))
    data.load_state_dict(state)
    assert keys(islice(data.train_dataloader(), 5)) == first
    fresh = module(dataset)
    fresh.load_state_dict(state)
    assert keys(islice(fresh.train_dataloader(), 5)) == first
    fresh.load_state_dict({})  # of a checkpoint without data
    assert keys(islice(fresh.train_dataloader(), 1)) != first[:1]


def test_a_restored_module_saves_what_it_restored_before_it_is_used(dataset: Path) -> None:
    data = module(dataset)
    keys(islice(data.train_dataloader(), 3))
    state, expected = data.state_dict(), keys(islice(data.train_dataloader(), 3))
    between = module(dataset)
    between.load_state_dict(state)
    assert between.consumed_samples == 6
    last = module(dataset)
    last.load_state_dict(between.state_dict())
    assert keys(islice(last.train_dataloader(), 3)) == expected


def test_the_micro_batch_size_can_change_until_the_first_batch(dataset: Path) -> None:
    data = module(dataset)
    data.train_dataloader()
    assert len(next(data.val_dataloader()).__key__) == 2
    data.micro_batch_size = 3
    assert len(next(data.train_dataloader()).__key__) == 3
    assert len(next(data.val_dataloader()).__key__) == 3
    data.micro_batch_size = 2
    for late in (data.train_dataloader, data.state_dict):
        with pytest.raises(ConfigurationError, match="micro_batch_size was changed from 3 to 2 after 1 step"):
            late()
    data.close()


def test_a_changed_size_does_not_lose_a_restored_state(dataset: Path) -> None:
    data = module(dataset)
    next(data.train_dataloader())
    restored = module(dataset)
    restored.train_dataloader()
    restored.load_state_dict(data.state_dict())
    restored.micro_batch_size = 3
    with pytest.raises(BatchSizeMismatchError):
        restored.train_dataloader()


# Lightning -----------------------------------------------------------------------------------------------------------


@contextmanager
def attached(data: EnergonMultiModalDataModule, **values: Any) -> Iterator[None]:
    data.trainer = SimpleNamespace(**({"global_step": 3, "accumulate_grad_batches": 1} | values))
    yield
    data.trainer = None


@pytest.mark.parametrize(("accumulate", "length"), [(1, 15), (4, 16), (20, 20)])
def test_under_a_trainer_an_epoch_has_a_length_of_whole_steps(dataset: Path, accumulate: int, length: int) -> None:
    data = module(dataset)
    with attached(data, accumulate_grad_batches=accumulate):
        train = data.train_dataloader()
        assert len(train) == length
        assert len(keys(islice(train, length + 3))) == length + 3
        assert data.state_dict()["global_step"] == 3
    restored = module(dataset)
    restored.load_state_dict(data.state_dict() | {"global_step": 3})
    assert restored.init_global_step == 3


def test_only_tensors_are_moved_to_a_device(dataset: Path) -> None:
    data = module(dataset)
    batch = next(data.train_dataloader())
    assert data.transfer_batch_to_device(batch, torch.device("cpu"), 0) is batch
    moved = data.transfer_batch_to_device(batch, torch.device("meta"), 0)
    assert moved.image.device.type == "meta"
    assert moved.__key__ is batch.__key__
    assert batch.image.device.type == "cpu"


def test_it_works_without_lightning(dataset: Path) -> None:
    program = f"""
    import sys
    sys.modules["lightning"] = None
    sys.modules["lightning.pytorch"] = None
    from energon_bridge import EnergonMultiModalDataModule
    from energon_bridge.core.encoder.task_encoder import DefaultTaskEncoder
    data = EnergonMultiModalDataModule({str(dataset)!r}, None, None, num_workers=0, task_encoder=DefaultTaskEncoder())
    assert EnergonMultiModalDataModule.__mro__[1] is object
    next(data.train_dataloader())
    print(sorted(data.state_dict()))
    """
    result = run_afresh(textwrap.dedent(program), REPOSITORY, "lightning")
    assert result.stdout.strip() == "['consumed_samples', 'global_step', 'train']", result.stderr
