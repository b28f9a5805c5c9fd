"""Workers that never begin: killed, replaced, and nothing is lost."""

from __future__ import annotations

import logging
import mmap
import threading
import time
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from engine import config_of, deliver, digest, loaders_of, text_dataset, train_dataset
from workers import worker_pids

from energon_bridge import DefaultTaskEncoder, get_savable_loader, get_train_dataset
from energon_bridge.errors import LoaderError, WorkerDiedError
from energon_bridge.loader import workers
from energon_bridge.loader.workers import Work


def test_a_worker_that_never_begins_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = train_dataset(text_dataset(tmp_path / "text", train=[20, 17]))
    expected = deliver(loaders_of(dataset, 1, 0), 30).digests
    hung = mmap.mmap(-1, 1)
    original = workers.set_up_worker

    def set_up(work: Work, *rest: Any) -> None:
        if work.number == 1 and not hung[0]:  # as a child that is stuck in its fork
            hung[0] = 1
            time.sleep(1000)
        original(work, *rest)

    monkeypatch.setattr("energon_bridge.loader.workers.set_up_worker", set_up)
    monkeypatch.setattr("energon_bridge.loader.pool._BEGIN_SECONDS", 1.0)
    with (
        closing(get_savable_loader(dataset, worker_config=config_of(1, 2))) as loader,
        caplog.at_level(logging.WARNING),
    ):
        assert [digest(batch) for batch in islice(loader, 30)] == expected
    assert "worker 1 has not started after 1 seconds; killing it" in caplog.text
    assert "worker 1 (killed by signal 9) died before it started; restarting it" in caplog.text


def test_a_worker_that_never_begins_ends_the_run_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = train_dataset(text_dataset(tmp_path / "text", train=[20, 17]))
    monkeypatch.setattr("energon_bridge.loader.workers.set_up_worker", lambda *_: time.sleep(1000))
    monkeypatch.setattr("energon_bridge.loader.pool._BEGIN_SECONDS", 0.6)
    monkeypatch.setattr("energon_bridge.loader.pool._RESTARTS_WITHOUT_A_BATCH", 1)
    with (
        closing(get_savable_loader(dataset, worker_config=config_of(1, 1))) as loader,
        caplog.at_level(logging.WARNING),
        pytest.raises(WorkerDiedError, match=r"before it started .* 1 restarts .* lock .* start_method=\"forkserver"),
    ):
        next(iter(loader))
    said = [record.getMessage() for record in caplog.records if "has not started" in record.getMessage()]
    assert said[0] == "worker 0 has not started after 1 seconds; killing it"
    assert said[1:] == [
        "worker 0 has not started after 1 seconds; it has 1 in all",  # twice as long
        "worker 0 has not started after 1 seconds; killing it",
    ]


class Locked(DefaultTaskEncoder):
    """Cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_an_encoder_that_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    """It was a raw TypeError of pickle."""
    dataset = get_train_dataset(text_dataset(tmp_path / "text", train=[20]), batch_size=2, task_encoder=Locked())
    with (
        closing(get_savable_loader(dataset, worker_config=config_of(1, 1, start_method="spawn"))) as loader,
        pytest.raises(LoaderError, match=r"worker 0 of 1 cannot start by spawn, because pickle refuses .*lock"),
    ):
        next(iter(loader))


def test_a_worker_that_never_begins_is_gone_when_the_loader_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = train_dataset(text_dataset(tmp_path / "text", train=[20, 17]))
    original = workers.set_up_worker

    def set_up(work: Work, *rest: Any) -> None:
        if work.number == 1:
            import signal

            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        original(work, *rest)

    monkeypatch.setattr("energon_bridge.loader.workers.set_up_worker", set_up)
    monkeypatch.setattr("energon_bridge.loader.pool._END_SECONDS", 0.2)
    loader = get_savable_loader(dataset, worker_config=config_of(1, 2))
    next(iter(loader))  # of worker 0
    assert len(worker_pids()) == 2
    loader.close()
    assert not worker_pids()
