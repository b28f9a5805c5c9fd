"""Wrappers around built datasets: what they refuse, and that what they describe resumes on other workers and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from made import made_once

from energon_bridge.compat import build_hooks as hooks, loading
from energon_bridge.compat.encoders import DefaultTaskEncoder
from energon_bridge.compat.loading import WorkerConfig
from energon_bridge.compat.wrapped import (
    BatchDataset,
    BlendDataset,
    ConcatDataset,
    FilterDataset,
    GroupBatchDataset,
    IterMapDataset,
    LimitDataset,
    MapDataset,
    PackingDataset,
    ShuffleBufferDataset,
    WatchdogDataset,
)
from energon_bridge.core.errors import ConfigurationError, FatalSampleError, NotProvidedError, SkipSample
from energon_bridge.tools.testing import create_captioning_test_dataset

path = made_once(create_captioning_test_dataset, num_train=40, num_val=10)


def config(rank: int = 0, ranks: int = 1, workers: int = 0, **settings: Any) -> WorkerConfig:
    return WorkerConfig(rank=rank, world_size=ranks, num_workers=workers, num_lanes=4, **settings)


def train(path: Path, own: WorkerConfig | None = None, **settings: Any) -> Any:
    settings = {"batch_size": None, "shuffle_buffer_size": None, "max_samples_per_sequence": None} | settings
    return loading.get_train_dataset(path, worker_config=own or config(), **settings)


def val(path: Path, **settings: Any) -> Any:
    return loading.get_val_dataset(path, worker_config=config(), **{"batch_size": None} | settings)


def keys_of(samples: list[Any]) -> dict[str, Any]:
    return {"keys": [sample["key"] for sample in samples]}


def noisy(sample: Any) -> Iterator[dict[str, Any]]:
    for number in range(1 + len(sample.caption) % 2):
        yield {"key": sample.__key__, "number": number, "noise": torch.rand(()).item()}


def everything(path: Path, own: WorkerConfig) -> Any:
    """Return a dataset with a wrapper of most kinds: mixed, mapped, filtered, packed, batched and mapped again."""
    both = [MapDataset(train(path, own), noisy), MapDataset(train(path, own), lambda one: next(noisy(one)))]
    mixed = FilterDataset(BlendDataset((both[0], 2), (both[1], 1)), filter_fn=lambda one: one["noise"] < 0.9)
    packs = PackingDataset(mixed, 7, lambda waiting: [waiting[:3], waiting[3:5]], list)
    batches = BatchDataset(packs, 2, lambda rows: {"rows": rows})
    return MapDataset(batches, lambda batch: batch | {"last": torch.rand(()).item()})


def stream(path: Path, states: Any, ranks: int, workers: int, steps: int) -> tuple[list[Any], list[Any]]:
    """Return the microbatches of all ranks, step by step, and the states after them."""
    seen, after = [], []
    for rank in range(ranks):
        own = config(rank, ranks, workers)
        loader = loading.get_savable_loader(everything(path, own))
        if states:
            loader.restore_state_rank(states)
        seen.append([(batch["rows"], batch["last"]) for batch in islice(iter(loader), steps)])
        after.append(loader.save_state_rank())
    return [microbatch for step in zip(*seen, strict=True) for microbatch in step], after


def test_a_wrapped_dataset_resumes_on_other_ranks_and_workers(path: Path) -> None:
    whole, _ = stream(path, None, 1, 0, 40)
    first, states = stream(path, None, 2, 1, 6)
    second, states = stream(path, states, 1, 0, 8)
    third, _ = stream(path, states, 4, 2, 5)
    assert first + second + third == whole


def test_a_map_alone_is_as_the_hook(path: Path) -> None:
    """The same numbers are drawn as in `encode_sample` of an encoder, and the same samples come."""

    class Encoder(DefaultTaskEncoder[Any, Any, Any, Any]):
        def encode_sample(self, sample: Any) -> Any:
            return noisy(sample)

    wrapped = loading.get_savable_loader(MapDataset(train(path), noisy))
    hooked = loading.get_savable_loader(train(path, task_encoder=Encoder()))
    assert list(islice(iter(wrapped), 30)) == list(islice(iter(hooked), 30))


def test_functions_may_come_in_hooks_that_build(path: Path) -> None:
    class Built(DefaultTaskEncoder[Any, Any, Any, Any]):
        def build_encode_sample(self, dataset: Any, *, worker_config: Any) -> Any:
            encoded = super().build_encode_sample(dataset, worker_config=worker_config)
            short = FilterDataset(encoded, filter_fn=lambda one: one.__key__ < "train-00020")
            return MapDataset(short, lambda one: {"key": one.__key__})

        def build_batch(self, dataset: Any, **settings: Any) -> Any:
            return MapDataset(super().build_batch(dataset, **settings), lambda batch: {"all": list(batch["key"])})

    dataset = hooks.get_train_dataset(path, batch_size=5, task_encoder=Built(), worker_config=config())
    batches = list(islice(iter(loading.get_savable_loader(dataset)), 16))
    assert {key for batch in batches for key in batch["all"]} == {f"train-{n:05d}" for n in range(20)}
    assert {len(batch["all"]) for batch in batches} == {5}


def test_groups_have_their_own_batch_size(path: Path) -> None:
    keyed = MapDataset(train(path), lambda one: {"key": one.__key__, "odd": int(one.__key__[-1]) % 2})
    groups = GroupBatchDataset(keyed, None, lambda one: (one["odd"], 2 + one["odd"]), keys_of)
    for batch in islice(iter(loading.get_savable_loader(groups)), 12):
        odd = {int(key[-1]) % 2 for key in batch["keys"]}
        assert len(odd) == 1
        assert len(batch["keys"]) == 2 + odd.pop()


def test_skipped_values_leave_their_sample_whole(path: Path) -> None:
    """A function behind a generator leaves out one of its values, not all of them."""

    def first(one: dict[str, Any]) -> dict[str, Any]:
        if one["number"]:
            raise SkipSample
        return one

    samples = islice(iter(loading.get_savable_loader(MapDataset(MapDataset(train(path), noisy), first))), 80)
    assert {sample["key"] for sample in samples} == {f"train-{n:05d}" for n in range(40)}


def test_validation_is_concatenated_in_its_order(path: Path) -> None:
    marked = [MapDataset(val(path), lambda one, mark=mark: {"key": f"{mark}{one.__key__}"}) for mark in "ab"]
    loader = loading.get_loader(BatchDataset(ConcatDataset(*marked), 4, keys_of))
    expected = [f"{mark}val-{n:05d}" for mark in "ab" for n in range(10)]
    for _ in range(2):
        assert [key for batch in loader for key in batch["keys"]] == expected


def test_the_watchdog_and_lengths(path: Path) -> None:
    batches = BatchDataset(val(path), 4, list, drop_last=True)
    assert (len(BatchDataset(val(path), 4, list)), len(batches), len(LimitDataset(batches, 1))) == (3, 2, 1)
    assert len(IterMapDataset(val(path), iter, len_map_fn=lambda n: 3 * n, stateless_iter_fn=True)) == 30
    loader = loading.get_loader(WatchdogDataset(batches, timeout_seconds=7, fail_on_timeout=True))
    assert (loader.watchdog.timeout, loader.watchdog.fail) == (7, True)
    assert WatchdogDataset(batches).worker_config is batches.worker_config


def test_tolerances_are_those_of_the_wrappers(path: Path) -> None:
    def wrong(one: Any) -> Any:
        raise ValueError("no")

    loader = loading.get_loader(MapDataset(train(path), wrong, failure_tolerance=3))
    with pytest.raises(FatalSampleError, match="3 samples failed in a row"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("wrap", "match"),
    [
        (lambda path: BatchDataset(train(path, batch_size=2), 2, list), "BatchDataset around batches"),
        (
            lambda path: PackingDataset(train(path, batch_size=2), 2, list, list),
            "PackingDataset around packs or batches",
        ),
        (lambda path: ShuffleBufferDataset(val(path), 4), "ShuffleBufferDataset around batches, packs or validation"),
        (lambda path: BatchDataset(LimitDataset(train(path), 3), 2, list), "LimitDataset inside of another wrapper"),
        (lambda path: BlendDataset((val(path), 1), (val(path), 1)), "ConcatDataset reads datasets that end"),
        (lambda path: ConcatDataset(train(path), train(path)), "BlendDataset mixes endless ones"),
        (lambda path: BlendDataset((train(path, batch_size=2), 1)), "BlendDataset of packs or batches"),
    ],
)
def test_wrappers_in_places_without_a_counterpart_are_refused(wrap: Any, match: str, path: Path) -> None:
    with pytest.raises(NotProvidedError, match=match):
        loading.get_loader(wrap(path))


def test_functions_that_keep_state_are_refused(path: Path) -> None:
    with pytest.raises(NotProvidedError, match="stateless_iter_fn=True if each output follows from one sample"):
        IterMapDataset(train(path), iter)

    class Counting(MapDataset):
        def __iter__(self) -> Any:
            yield 1

    with pytest.raises(NotProvidedError, match=r"Counting.__iter__ of"):
        Counting(train(path), list)


def test_datasets_that_are_no_single_run_are_refused(path: Path) -> None:
    with pytest.raises(ConfigurationError, match="one dataset has shuffle_buffer_size=0, another 7"):
        loading.get_loader(BlendDataset((train(path), 1), (train(path, shuffle_buffer_size=7), 1)))
    with pytest.raises(ConfigurationError, match="different decoder"):
        loading.get_loader(BlendDataset((train(path), 1), (train(path, image_decode="pil"), 1)))


def test_a_map_that_returns_nothing_is_named(path: Path) -> None:
    with pytest.raises(FatalSampleError, match=r"MapDataset: .*returned None"):
        next(iter(loading.get_loader(MapDataset(train(path), lambda one: None))))
