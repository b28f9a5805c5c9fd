"""What is seen of the data under Lightning: numbers for loggers, and figures behind the progress bar."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

from lightning.pytorch.loggers import CSVLogger, Logger
from lightning_runs import Plain, quiet_trainer
from made import made_once

from energon_bridge import (
    Blender,
    DefaultTaskEncoder,
    EnergonDataloader,
    EnergonMultiModalDataModule,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.loader.run_data import dataset_names
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.trainers.lightning import DataMonitor, EnergonProgressBar

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*")
dataset = made_once(create_captioning_test_dataset, num_train=24, num_val=4)


class Kept(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, dict[str, float]]] = []

    name = version = "kept"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if any(name.startswith("data/") for name in metrics):
            self.lines.append((-1 if step is None else step, metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


def fit(data: EnergonMultiModalDataModule, folder: Path, **settings: Any) -> None:
    quiet_trainer(folder, **({"enable_progress_bar": True} | settings)).fit(Plain(), datamodule=data)
    data.close()


def data_of(path: Any) -> EnergonMultiModalDataModule:
    return EnergonMultiModalDataModule(
        path, None, None, micro_batch_size=2, num_workers=0, num_lanes=4, task_encoder=DefaultTaskEncoder()
    )


def test_loggers_get_the_counters(dataset: Path, tmp_path: Path) -> None:
    kept = Kept()
    monitor = DataMonitor(every_n_steps=3)
    fit(
        data_of(str(dataset)),
        tmp_path,
        max_steps=7,
        accumulate_grad_batches=2,
        logger=kept,
        callbacks=[monitor],
        log_every_n_steps=1,
        enable_progress_bar=False,
    )
    assert [step for step, _ in kept.lines] == [3, 6]
    for step, found in kept.lines:
        assert found["data/batches"] == 2 * step
        assert found["data/samples"] == 4 * step
        assert found["data/epochs"] == pytest.approx(4 * step / 24)
        assert found["data/wait_seconds"] > 0
        assert 0 <= found["data/wait_share"] <= 1
        assert found["data/skipped"] == found["data/errors"] == 0


def test_the_loggers_of_lightning_take_the_counters_and_they_are_exported(dataset: Path, tmp_path: Path) -> None:
    kept, exported = Kept(), list[dict[str, float]]()
    monitor = DataMonitor(every_n_steps=2, export=lambda found: exported.append(dict(found)))
    loggers = [CSVLogger(tmp_path, "csv", version=""), kept]
    settings: dict[str, Any] = {"logger": loggers, "callbacks": [monitor], "enable_progress_bar": False}
    fit(data_of(str(dataset)), tmp_path, max_steps=4, log_every_n_steps=2, **settings)
    rows = list(csv.DictReader((tmp_path / "csv" / "metrics.csv").read_text().splitlines()))
    found = {int(row["step"]): float(row["data/samples"]) for row in rows if row["data/samples"]}
    assert found == {2: 4.0, 4: 8.0}
    assert [found["samples"] for found in exported] == [4, 8]
    assert [{f"data/{name}": value for name, value in one.items()} for one in exported] == [m for _, m in kept.lines]
    with pytest.raises(ConfigurationError, match="every_n_steps"):
        DataMonitor(every_n_steps=0)


def test_tensorboard_takes_the_counters(dataset: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed (extra dev)")
    from lightning.pytorch.loggers import TensorBoardLogger

    logger = TensorBoardLogger(tmp_path, "board", version="")
    settings: dict[str, Any] = {"logger": logger, "callbacks": [DataMonitor()], "enable_progress_bar": False}
    fit(data_of(str(dataset)), tmp_path, max_steps=4, log_every_n_steps=2, **settings)
    logger.experiment.close()
    (events,) = (tmp_path / "board").glob("events.out.tfevents.*")
    written = events.read_bytes()
    for name in (b"data/samples", b"data/epochs", b"data/wait_share"):
        assert name in written


def test_the_progress_bar_shows_epochs_and_waiting(dataset: Path, tmp_path: Path, capsys: Any) -> None:
    fit(data_of(str(dataset)), tmp_path, max_steps=6, logger=False, callbacks=[EnergonProgressBar(refresh_rate=1)])
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert "data_epochs=0.50" in text
    assert "waiting=" in text


def test_of_a_mix_each_dataset_is_counted(dataset: Path) -> None:
    other = create_captioning_test_dataset(dataset.parent / "more", num_train=12, num_val=0)
    mix = Blender([(str(dataset), 0.75), (str(other), 0.25)])
    loader = data_of(mix).train_dataloader()
    for _ in range(40):
        next(loader)
    found = loader.metrics()
    own = found[f"samples/{dataset.name}"]
    assert own + found["samples/more"] == found["samples"] == 80
    assert own == pytest.approx(60, abs=5)
    assert found["epochs/more"] == pytest.approx(found["samples/more"] / 12)
    loader.close()


def test_counters_go_on_from_a_state_waiting_does_not_and_validation_has_no_epochs(dataset: Path) -> None:
    loader = data_of(str(dataset)).train_dataloader()
    for _ in range(5):
        next(loader)
    other = data_of(str(dataset)).train_dataloader()
    other.restore_state(loader.save_state())
    assert other.metrics()["samples"] == 10
    assert other.metrics()["batches"] == other.metrics()["wait_seconds"] == 0
    loader.close()
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    val = get_val_dataset(dataset, batch_size=2, task_encoder=DefaultTaskEncoder(), worker_config=config)
    loader = EnergonDataloader(get_savable_loader(val))
    assert len(list(loader)) == 2
    found = loader.metrics()
    assert (found["samples"], found["batches"]) == (4, 2)
    assert "epochs" not in found
    loader = EnergonDataloader([1, 2])
    assert [next(loader) for _ in range(3)] == [1, 2, 1]
    assert loader.metrics().keys() == {"batches", "wait_seconds"}


@pytest.mark.parametrize("workers", [0, 2])
def test_making_microbatches_is_timed_by_stage(dataset: Path, workers: int) -> None:
    class Slow(DefaultTaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            time.sleep(0.02)
            return sample

        def batch(self, samples: Any) -> Any:
            time.sleep(0.03)
            return super().batch(samples)

    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    settings: dict[str, Any] = {"shuffle_buffer_size": 10, "max_samples_per_sequence": 10, "worker_config": config}
    loader = get_savable_loader(get_train_dataset(dataset, batch_size=2, task_encoder=Slow(), **settings))
    stream = iter(loader)
    for _ in range(4):
        next(stream)
    found = loader.metrics()
    assert found["encode_seconds"] >= 4 * 2 * 0.02
    assert found["batch_seconds"] >= 4 * 0.03
    assert found["load_seconds"] > 0
    parts = sum(found[f"{stage}_seconds"] for stage in ("load", "encode", "batch"))
    assert parts == pytest.approx(found["make_seconds"])
    loader.close()


@pytest.mark.parametrize(
    ("paths", "parts", "names"),
    [
        (["/a/b/c", "/a/x/c", "/q"], ["train"] * 3, ["b/c", "x/c", "q"]),
        (["/q", "/q", "/b"], ["train", "val", "train"], ["q:train", "q:val", "b"]),
        (["/q", "/q"], ["train", "train"], ["q#1", "q#2"]),
        (["s3://x/c", "/c"], ["train", "train"], ["x/c", "c"]),
        (["/"], ["train"], ["/"]),
        (["join of /a/c and /a/d", "/a/d", "/x and y"], ["train"] * 3, ["c", "d", "x and y"]),
        (["join of /a/c and /a/d", "/a/c"], ["train"] * 2, ["a/c#1", "a/c#2"]),
    ],
)
def test_names_tell_datasets_apart(paths: list[str], parts: list[str], names: list[str]) -> None:
    assert dataset_names(paths, parts) == names
