"""Datasets that deliver nothing, or lose more than a few per cent, are named once, with counts and reasons."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from engine import text_dataset

from energon_bridge import (
    DefaultTaskEncoder,
    ErrorPolicy,
    SkipSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from energon_bridge.core.encoder.hooks import count_over_long
from energon_bridge.core.loader.savable import SavableDataLoader

SAMPLES = 40
Losses = Callable[[], list[str]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("losses")
    text_dataset(folder / "good", train=[20, 20], val=[20])
    text_dataset(folder / "poor", train=[20, 20], val=[20])
    return folder


@pytest.fixture
def losses(caplog: pytest.LogCaptureFixture) -> Iterator[Losses]:
    """Return a function that gives what has been said of losses."""
    gc.collect()  # loaders of other tests
    with caplog.at_level(logging.WARNING, logger="energon_bridge"):
        yield lambda: [r.getMessage() for r in caplog.records if r.name == "energon_bridge.core.loader.metrics"]


class Losing(DefaultTaskEncoder):
    """Loses samples of the dataset `poor` by their numbers."""

    def __init__(self, lost: Callable[[int], bool], error: type[Exception] = ValueError) -> None:
        super().__init__()
        self.lost, self.error = lost, error

    def encode_sample(self, sample: Any) -> Any:
        if sample.__sources__[0].dataset_path.endswith("poor") and self.lost(int(sample.__key__)):
            raise self.error("as the test wants it")
        return sample


def loader_of(source: Any, encoder: Any, workers: int = 0, opened: Any = get_train_dataset, **kwargs: Any) -> Any:
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers, num_lanes=2)
    policy = ErrorPolicy(messages=0, tolerance=0)
    settings = {"batch_size": 2, "worker_config": config, "task_encoder": encoder, "error_policy": policy}
    return get_savable_loader(opened(source, **(settings | kwargs)))


def deliver(loader: SavableDataLoader, steps: int) -> None:
    assert len(list(islice(loader, steps))) == steps


def mix_of(data: Path) -> list[tuple[str, int]]:
    return [(str(data / "good"), 1), (str(data / "poor"), 1)]


@pytest.mark.parametrize("workers", [2])
def test_losses_are_named_once_at_the_end_of_an_epoch(workers: int, data: Path, losses: Losses) -> None:
    loader = loader_of(data / "poor", Losing(lambda number: number % 4 == 0), workers)
    deliver(loader, SAMPLES // 2 - 1)
    assert losses() == []
    deliver(loader, 1)
    (said,) = losses()
    row = loader.counters()[0]
    drawn = row["samples"] + row["errors"]
    assert said == (
        f"{data}/poor: {100 * row['errors'] / drawn:.0f} % of this dataset's samples are left out: of {drawn} "
        f"drawn on rank 0, {row['errors']} failed (different samples: 10 in encode_sample with ValueError). "
        "In error_policy, quarantine=FILE lists what fails; max_error_rate=… stops a run that loses more."
    )
    deliver(loader, 3 * SAMPLES)
    loader.close()
    del loader
    gc.collect()
    assert losses() == [said]


def test_each_cause_is_named(data: Path, losses: Losses) -> None:
    encoder = Losing(lambda number: number % 4 == 0)
    loader = loader_of(data / "poor", encoder)
    deliver(loader, SAMPLES)
    encoder.error, encoder.lost = SkipSample, lambda number: number % 4 != 0
    deliver(loader, SAMPLES)
    first, second = losses()
    assert "skipped" not in first
    assert "failed (different samples: 10 in encode_sample with ValueError); " in second
    assert second.endswith(
        "were skipped by hooks. In error_policy, quarantine=FILE lists what fails; max_error_rate=… "
        "stops a run that loses more. To keep them, check which hook raises SkipSample."
    )


class LosingPacks(Losing):
    """Packs two samples."""

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[at : at + 2] for at in range(0, len(samples), 2)]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return samples[0]


@pytest.mark.parametrize("workers", [0])
def test_samples_that_wait_for_a_pack_are_not_lost(workers: int, data: Path, losses: Losses) -> None:
    # The lanes share a buffer of 40 samples, of which one fails: the dataset has as many, and all packs of 15 epochs.
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers, num_lanes=24)
    policy = ErrorPolicy(messages=0, tolerance=0, max_error_rate=0.1, min_draws=20)
    loader = loader_of(
        data / "poor",
        LosingPacks(lambda number: number == 7),
        batch_size=1,
        worker_config=config,
        error_policy=policy,
        packing_buffer_size=SAMPLES,
    )
    deliver(loader, 15 * SAMPLES // 2)
    assert loader.counters()[0]["errors"] >= 14
    loader.close()
    assert losses() == []


@pytest.mark.parametrize("error", [SkipSample, ValueError])
def test_losses_of_a_shared_buffer_are_of_all_that_it_drew(tmp_path: Path, losses: Losses, error: Any) -> None:
    """A 24th is lost: of the packs for 48 lanes that the first lanes have drawn, few are delivered yet."""
    folder = tmp_path / "poor"
    text_dataset(folder, train=[480])
    encoder = LosingPacks(lambda number: number % 24 == 3, error)
    loader = loader_of(
        folder,
        encoder,
        batch_size=1,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0, num_lanes=48),
        error_policy=ErrorPolicy(messages=0, tolerance=0, max_error_rate=0.1, min_draws=20),
        packing_buffer_size=20,
    )
    deliver(loader, 8)
    row = loader.counters()[0]
    lost = row["errors"] + row["skipped"]
    assert lost > 0.05 * (row["samples"] + lost)
    assert lost >= 5
    loader.close()
    assert losses() == []


@pytest.mark.parametrize(("ending", "error"), [("close", ValueError), ("drop", SkipSample)])
def test_a_dataset_that_delivers_nothing_is_named_at_the_end_of_a_run(
    ending: str, error: type[Exception], data: Path, losses: Losses
) -> None:
    loader = loader_of(mix_of(data), Losing(lambda number: True, error))
    deliver(loader, 5)
    assert losses() == []
    by_path = {row["path"]: row for row in loader.counters()}
    lost = by_path[str(data / "poor")]["errors" if error is ValueError else "skipped"]
    assert lost > 0
    if ending == "close":
        loader.close()
    del loader
    gc.collect()
    (said,) = losses()
    assert said.startswith(
        f"{data}/poor: no sample of this dataset has been delivered: of {lost} drawn on rank 0, {lost} "
    )


def test_metrics_name_losses_and_give_them_as_numbers(data: Path, losses: Losses) -> None:
    loader = loader_of(mix_of(data), Losing(lambda number: number % 2 == 0, SkipSample), virtual_epoch_length=10_000)
    deliver(loader, 20)
    assert loader.metrics()["skipped/poor"] > 5
    assert losses() == []  # too few samples to speak of
    deliver(loader, 100)
    found = loader.metrics()
    loader.metrics()
    (said,) = losses()
    assert f"{found['skipped/poor']} were skipped by hooks" in said
    assert not found.keys() & {"skipped/good", "errors/good", "errors/poor"}


def test_validation_names_losses_at_the_end_of_a_pass(data: Path, losses: Losses) -> None:
    loader = loader_of(data / "poor", Losing(lambda number: number < 8), opened=get_val_dataset)
    for _ in range(2):
        list(loader)
    (said,) = losses()
    assert "40 % of this dataset's samples are left out: of 20 drawn on rank 0, 8 failed" in said


def test_a_virtual_epoch_names_losses_at_its_end(data: Path, losses: Losses) -> None:
    loader = loader_of(data / "poor", Losing(lambda number: number % 2 == 0), virtual_epoch_length=10)
    assert len(list(loader)) == 10
    assert len(losses()) == 1


def test_excluded_samples_are_no_loss_unless_they_are_all(tmp_path: Path, data: Path, losses: Losses) -> None:
    folder = text_dataset(tmp_path / "listed", train=[10])
    split = folder / ".nv-meta" / "split.yaml"
    keys = "".join(f"- train/shard_000.tar/{number:05d}\n" for number in range(10))
    split.write_text(split.read_text().replace("exclude: []", f"exclude:\n{keys}"))
    assert "00003" in split.read_text()
    loader = loader_of([(str(data / "good"), 1), (str(folder), 1)], DefaultTaskEncoder())
    deliver(loader, 20)
    loader.close()
    (said,) = losses()
    assert f"{folder}: no sample of this dataset has been delivered: of " in said
    assert said.endswith("are listed in `exclude`. To keep them, remove them from `exclude` in split.yaml.")


class TooLong(DefaultTaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        if int(sample.__key__) % 2:
            count_over_long("dropped")
            raise SkipSample
        return sample


def test_samples_that_are_too_long_are_said_to_be(data: Path, losses: Losses) -> None:
    loader = loader_of(data / "poor", TooLong())
    deliver(loader, SAMPLES // 2)
    (said,) = losses()
    skipped = loader.counters()[0]["skipped"]
    assert f"{skipped} were skipped by hooks ({skipped} of them as too long)" in said


PROGRAM = """
import logging, sys
from energon_bridge import DefaultTaskEncoder, SkipSample, WorkerConfig, get_savable_loader, get_train_dataset

class Encoder(DefaultTaskEncoder):
    def encode_sample(self, sample):
        if sample.__sources__[0].dataset_path.endswith("poor"):
            raise SkipSample
        return sample

logging.basicConfig()
config = WorkerConfig(rank=0, world_size=1, num_workers=2)
mix = [(path, 1) for path in sys.argv[1:]]
loader = get_savable_loader(get_train_dataset(mix, batch_size=2, task_encoder=Encoder(), worker_config=config))
for _, batch in zip(range(8), loader):
    pass
"""


def test_a_program_that_ends_without_closing_names_them_once(data: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(data / "good"), str(data / "poor")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr.count("no sample of this dataset has been delivered") == 1
    assert "Traceback" not in done.stderr
