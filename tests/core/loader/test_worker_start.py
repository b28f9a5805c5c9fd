"""Workers that never begin: killed, replaced, and nothing is lost."""

from __future__ import annotations

import logging
import mmap
import os
import re
import signal
import threading
import time
import types
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from engine import config_of, deliver, digest, loaders_of, text_dataset, train_dataset
from forked import run_forked
from workers import worker_pids

from energon_bridge import DefaultTaskEncoder, TextSample, get_savable_loader, get_train_dataset
from energon_bridge.core.errors import LoaderError, WorkerDiedError
from energon_bridge.core.loader import workers
from energon_bridge.core.loader.workers import Work


def stick(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Let worker 1 be stuck in its fork, deaf to SIGTERM, so many times."""
    stuck = mmap.mmap(-1, 1)
    original = workers.set_up_worker

    def set_up(work: Work, *rest: Any) -> None:
        if work.number == 1 and stuck[0] < times:
            stuck[0] += 1
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        original(work, *rest)

    monkeypatch.setattr("energon_bridge.core.loader.workers.set_up_worker", set_up)


def test_a_worker_that_never_begins_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = train_dataset(text_dataset(tmp_path / "text", train=[20, 17]))
    expected = deliver(loaders_of(dataset, 1, 0), 30).digests
    stick(monkeypatch, times=1)
    monkeypatch.setattr("energon_bridge.core.loader.pool._BEGIN_SECONDS", 1.0)
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
    monkeypatch.setattr("energon_bridge.core.loader.workers.set_up_worker", lambda *_: time.sleep(1000))
    monkeypatch.setattr("energon_bridge.core.loader.pool._BEGIN_SECONDS", 0.6)
    monkeypatch.setattr("energon_bridge.core.loader.pool._RESTARTS_WITHOUT_A_BATCH", 1)
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
        self.tools: dict[str, Any] = {"well": 1, "ill": types.SimpleNamespace(lock=threading.Lock(), back=self)}


@pytest.mark.parametrize(
    ("method", "encoder", "part"),
    [
        ("spawn", Locked(), "task_encoder.tools['ill'].lock (lock)"),
        ("forkserver", type("Local", (DefaultTaskEncoder,), {"__module__": __name__})(), "task_encoder (Local)"),
    ],
)
def test_what_cannot_be_pickled_is_named(tmp_path: Path, method: Any, encoder: Any, part: str) -> None:
    """It was a raw TypeError of pickle."""
    dataset = get_train_dataset(text_dataset(tmp_path / "text", train=[20]), batch_size=2, task_encoder=encoder)
    start = re.escape(f"worker 0 of 1 cannot start by {method}, because pickle refuses {part}: ")
    with (
        closing(get_savable_loader(dataset, worker_config=config_of(1, 1, start_method=method))) as loader,
        pytest.raises(LoaderError, match=rf'{start}.*start_method="fork"'),
    ):
        next(iter(loader))


class Surrounded(DefaultTaskEncoder):
    """Delivers what the environment says where it works, and when it is unpickled."""

    def __init__(self) -> None:
        self.unpickled = ""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.unpickled = os.environ.get("ENERGON_TEST_WORD", "")

    def encode_sample(self, sample: Any) -> Any:
        words = f"{os.environ['ENERGON_TEST_WORD']} {self.unpickled}{os.environ.get('TOKENIZERS_PARALLELISM', '')}"
        return TextSample.derive_from(sample, text=words)


class SlowToLoad(DefaultTaskEncoder):
    def __setstate__(self, state: dict[str, Any]) -> None:
        time.sleep(2.5)
        self.__dict__.update(state)


def test_a_worker_that_imports_first_is_given_its_time_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = train_dataset(text_dataset(tmp_path / "text", train=[20, 17]), task_encoder=SlowToLoad())
    monkeypatch.setattr("energon_bridge.core.loader.pool._BEGIN_SECONDS", 0.05)
    monkeypatch.setattr("energon_bridge.core.loader.pool._IMPORT_FACTOR", 10_000)
    with (
        caplog.at_level(logging.INFO),
        closing(get_savable_loader(dataset, worker_config=config_of(1, 1, start_method="forkserver"))) as loader,
    ):
        next(iter(loader))
    said = [record.levelname for record in caplog.records if "worker 0" in record.getMessage()]
    assert re.search(r"worker 0 still starts after \d seconds, as it may: it imports packages", caplog.text)
    assert set(said) == {"INFO"}


def test_workers_of_the_forkserver_have_the_environment_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = train_dataset(text_dataset(tmp_path / "text", train=[20]), task_encoder=Surrounded())
    for word in ("first", "second"):
        monkeypatch.setenv("ENERGON_TEST_WORD", word)
        with closing(get_savable_loader(dataset, worker_config=config_of(1, 1, start_method="forkserver"))) as loader:
            assert set(next(iter(loader)).text) == {f"{word} {word}{os.environ.get('TOKENIZERS_PARALLELISM', '')}"}
        monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)  # the server keeps it


def test_a_fork_of_a_process_with_a_forkserver_has_workers_too(tmp_path: Path) -> None:
    """Its parent's forkserver serves it not: multiprocessing raised ChildProcessError."""
    dataset = train_dataset(text_dataset(tmp_path / "text", train=[20]))

    def first() -> str:
        with closing(get_savable_loader(dataset, worker_config=config_of(1, 1, start_method="forkserver"))) as loader:
            return digest(next(iter(loader)))

    expected = first()
    assert run_forked(1, lambda _: first()) == [expected]
    assert first() == expected  # the parent's still runs


def test_a_worker_that_never_begins_is_gone_when_the_loader_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = train_dataset(text_dataset(tmp_path / "text", train=[20, 17]))
    stick(monkeypatch, times=100)
    monkeypatch.setattr("energon_bridge.core.loader.pool.END_SECONDS", 0.2)
    loader = get_savable_loader(dataset, worker_config=config_of(1, 2))
    next(iter(loader))  # of worker 0
    assert len(worker_pids()) == 2
    loader.close()
    assert not worker_pids()
