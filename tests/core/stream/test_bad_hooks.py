"""Hooks that raise: their samples are skipped, counted and named, or the run stops; and nothing else changes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from made import made_once
from two_lanes import EPOCHS, KEY, KEYS, NUM_TRAIN, SHARD, counts, lanes, loader_of, write_dataset

from energon_bridge import (
    DefaultTaskEncoder,
    ErrorPolicy,
    SkipSample,
    WorkerConfig,
    get_savable_loader,
    get_val_dataset,
)
from energon_bridge.core.errors import EmptyDatasetError, FatalSampleError
from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.core.loader.saved_run import read_lanes

dataset = made_once(write_dataset)


class Failing(DefaultTaskEncoder):
    """Raises an error in `encode_sample` for some keys."""

    def __init__(self, error: type[Exception], *keys: str) -> None:
        super().__init__()
        self.error = error
        self.keys = keys

    def encode_sample(self, sample: Any) -> Any:
        if sample.__key__ in self.keys:
            raise self.error("as the test wants it")
        return sample


class FailingGenerator(Failing):
    """The same, after it has yielded the sample."""

    def encode_sample(self, sample: Any) -> Iterator[Any]:
        yield sample
        super().encode_sample(sample)


class Awkward(Exception):  # noqa: N818 - what users do
    """Cannot be made again from its text, as it would have to be to cross a process."""

    def __init__(self, text: str) -> None:
        super().__init__(text, self)
        self.pipe = open(os.devnull)  # noqa: SIM115

    def __del__(self) -> None:
        self.pipe.close()


@pytest.mark.parametrize(
    ("error", "counter", "encoder", "num_workers"),
    [
        (KeyError, "errors", FailingGenerator, 0),
        (Awkward, "errors", Failing, 2),
        (SkipSample, "skipped", FailingGenerator, 2),
    ],
)
def test_a_hook_that_fails_costs_its_sample_and_nothing_else(
    error: type[Exception], counter: str, encoder: type[Failing], num_workers: int, dataset: Path
) -> None:
    expected = [[key for key in lane if key != KEY] for lane in lanes(loader_of(dataset))]
    loader = loader_of(dataset, num_workers, task_encoder=encoder(error, KEY))
    assert list(lanes(loader, without=1)) == expected
    counted = counts(loader.save_state_rank())
    assert counted.pop(counter) >= EPOCHS
    assert counted.pop("samples") > 0
    assert set(counted.values()) == {0}
    loader.close()


@pytest.mark.parametrize(
    ("error", "num_workers"),
    [
        *((error, 0) for error in (NameError, ImportError, MemoryError, RecursionError, SystemError, FatalSampleError)),
        (StopIteration, 2),
    ],
)
def test_errors_that_are_no_fault_of_the_data_are_fatal(
    error: type[Exception], num_workers: int, dataset: Path
) -> None:
    loader = loader_of(dataset, num_workers, task_encoder=Failing(error, KEY))
    for _ in range(2):  # it does not go away by asking again
        with pytest.raises(
            FatalSampleError, match=f"encode_sample: .*{SHARD}, sample 11, .*{error.__name__}: as the test wants it"
        ):
            lanes(loader)
    loader.close()


class FailingBatch(DefaultTaskEncoder):
    """Raises an error in `batch` or `encode_batch` for a batch that holds a sample."""

    def __init__(self, hook: str, error: type[Exception], key: str) -> None:
        super().__init__()
        self.hook = hook
        self.error = error
        self.key = key

    def batch(self, samples: list[Any]) -> Any:
        self._fail("batch", [sample.__key__ for sample in samples])
        return super().batch(samples)

    def encode_batch(self, batch: Any) -> Any:
        self._fail("encode_batch", batch.__key__)
        return super().encode_batch(batch)

    def _fail(self, hook: str, keys: list[str]) -> None:
        if hook == self.hook and (self.key in keys or not self.key):
            raise self.error("as the test wants it")


@pytest.mark.parametrize(
    ("error", "counter", "hook", "num_workers"),
    [
        (ValueError, "errors", "batch", 0),
        (ValueError, "errors", "encode_batch", 2),
        (SkipSample, "skipped", "batch", 2),
        (SkipSample, "skipped", "encode_batch", 0),
    ],
)
def test_a_hook_that_fails_on_a_batch_costs_its_samples_and_nothing_else(
    error: type[Exception], counter: str, hook: str, num_workers: int, dataset: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = 3 * NUM_TRAIN // 3
    lenient = {"error_policy": ErrorPolicy(tolerance=3)}  # failures that are not in a row do not add up
    by_lane: list[list[list[str]]] = [[], []]
    for number, batch in enumerate(islice(loader_of(dataset, batch_size=3), 2 * steps)):
        by_lane[number % 2].append(batch.__key__)
    loader = loader_of(dataset, num_workers, batch_size=3, task_encoder=FailingBatch(hook, error, KEY), **lenient)
    seen: list[list[list[str]]] = [[], []]
    for number, batch in enumerate(islice(loader, steps)):
        seen[number % 2].append(batch.__key__)
    for lane, whole in zip(seen, by_lane, strict=True):
        assert lane == [keys for keys in whole if KEY not in keys][: len(lane)]
    state = loader.save_state_rank()
    refused = sum(lane.draw for lane in read_lanes(state).values()) - 3 * steps
    expected = {"samples": 3 * steps, "errors": 0, "skipped": 0, "excluded": 0} | {counter: refused}
    assert counts(state) == expected
    assert refused >= 6
    if (hook, num_workers) == ("batch", 0):
        where = rf"skipped a microbatch that failed in batch: {dataset}: .*sample 11, key '{KEY}'.*: ValueError: .*"
        assert re.fullmatch(where, next(message for message in caplog.messages if message.startswith("skipped")))
    loader.close()


LETTERS = str.maketrans("0123456789", "abcdefghij")


class Complaining(DefaultTaskEncoder):
    """Refuses all microbatches, each with a text of its own."""

    def encode_batch(self, batch: Any) -> Any:
        raise ValueError(f"not {batch.__key__[0].translate(LETTERS)}")


def test_a_hook_whose_first_failures_differ_is_not_taken_for_broken(dataset: Path) -> None:
    class Mixed(DefaultTaskEncoder):
        calls = 0

        def encode_sample(self, sample: Any) -> Any:
            self.calls += 1
            if self.calls < 8:
                raise (KeyError if self.calls == 2 else ValueError)("as the test wants it")
            return sample

    assert len(next(iter(loader_of(dataset, batch_size=3, task_encoder=Mixed()))).__key__) == 3


def test_a_hundred_different_failures_in_a_row_stop_the_run(dataset: Path) -> None:
    loader = loader_of(dataset, 1, batch_size=2, task_encoder=Complaining())
    with pytest.raises(FatalSampleError, match=r"100 microbatches failed in a row, the last one .*: not train-a"):
        next(iter(loader))
    loader.close()


@pytest.mark.parametrize(("hook", "num_workers"), [("encode_sample", 0), ("batch", 1)])
def test_hooks_that_skip_everything_end_with_an_error(hook: str, num_workers: int, dataset: Path) -> None:
    encoder = Failing(SkipSample, *KEYS) if hook == "encode_sample" else FailingBatch(hook, SkipSample, "")
    loader = loader_of(dataset, num_workers, batch_size=4, task_encoder=encoder)
    with pytest.raises(EmptyDatasetError, match=f"{dataset}: \\d+ samples in a row, of a split of {NUM_TRAIN}, were"):
        next(iter(loader))
    loader.close()


class GivesOne(DefaultTaskEncoder):
    """Encodes the first sample, and skips all others, as where all else is banned from some draw on."""

    def __init__(self) -> None:
        self.given = False

    def encode_sample(self, sample: Any) -> Any:
        if self.given:
            raise SkipSample("no more")
        self.given = True
        return sample


@pytest.mark.parametrize("settings", [{"batch_size": 4}, {"batch_size": 1, "packing_buffer_size": 4}])
def test_a_sample_that_waits_for_others_does_not_wait_for_ever(settings: dict[str, int], dataset: Path) -> None:
    encoder = GivesOne()
    if "packing_buffer_size" in settings:
        encoder.select_samples_to_pack = lambda samples: [samples]
        encoder.pack_selected_samples = lambda samples: samples[0]
    loader = loader_of(dataset, task_encoder=encoder, **settings)
    with pytest.raises(EmptyDatasetError, match=f"{dataset}: \\d+ samples in a row, of a split of {NUM_TRAIN}, were"):
        next(iter(loader))
    loader.close()


def validation(path: Path, encoder: Any, **kwargs: Any) -> SavableDataLoader:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    settings: dict[str, Any] = {"batch_size": 2, "worker_config": config, "task_encoder": encoder}
    return get_savable_loader(get_val_dataset(path, **(settings | kwargs)))


def rows(loader: SavableDataLoader) -> list[list[str]]:
    """Return the keys of the real rows, step by step."""
    return [[key for key, real in zip(b.__key__, b.__valid__, strict=True) if real] for b in loader]


def test_validation_leaves_a_bad_sample_out_of_its_batch(dataset: Path) -> None:
    loader = validation(dataset, Failing(ValueError, "val-00001"))
    for passes in range(1, 3):
        assert rows(loader) == [["val-00000"], ["val-00002", "val-00003"], ["val-00004"]]
        assert counts(loader.save_state_rank())["errors"] == passes


def test_validation_masks_a_batch_that_a_hook_refuses(dataset: Path) -> None:
    loader = validation(dataset, FailingBatch("encode_batch", ValueError, "val-00002"))
    assert rows(loader) == [["val-00000", "val-00001"], [], ["val-00004"]]
    assert counts(loader.save_state_rank()) == {"samples": 3, "errors": 2, "skipped": 0, "excluded": 0}


class Several(DefaultTaskEncoder):
    def encode_sample(self, sample: Any) -> Iterator[Any]:
        yield from (sample, sample)


def test_validation_without_batches_loses_no_output_of_a_generator(dataset: Path) -> None:
    assert sum(len(keys) for keys in rows(validation(dataset, Several()))) == 2 * sum(
        len(keys) for keys in rows(validation(dataset, DefaultTaskEncoder()))
    )
    with pytest.raises(FatalSampleError, match="yields 2 samples, but a pass without batches delivers one"):
        list(validation(dataset, Several(), batch_size=None))


class GeneratorBatch(DefaultTaskEncoder):
    def batch(self, samples: list[Any]) -> Any:
        yield super().batch(samples[:1])
        yield super().batch(samples[1:])


def test_several_batches_of_one_are_refused_where_all_ranks_make_the_same_steps(dataset: Path) -> None:
    with pytest.raises(FatalSampleError, match="batch or encode_batch yields 2 batches from one"):
        list(validation(dataset, GeneratorBatch()))
