"""Worker processes: killed ones change nothing, and batches cross whole and stay whole."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from engine import (
    Numbers,
    SkippingEncoder,
    TensorEncoder,
    config_of,
    deliver,
    digest,
    loaders_of,
    text_dataset,
    train_dataset,
)
from made import made_once
from workers import loader_of, worker_pids

from energon_bridge import ErrorPolicy, SavableDataLoader, get_savable_loader
from energon_bridge.cloud.ray.ray_engine import MovingPool
from energon_bridge.core.errors import FatalSampleError, LoaderError, WorkerDiedError
from energon_bridge.core.loader.workers import LocalProcesses

SHARDS = [5, 9, 1, 14, 8]

data = made_once(text_dataset, train=SHARDS, val=SHARDS)


# Dying and moving ----------------------------------------------------------------------------------------------------


class Restless(LocalProcesses):
    """Has a better place for a worker, as often as it is asked, from some microbatch on."""

    hedge_seconds = None

    def __init__(self, after: int) -> None:
        super().__init__("fork")
        self.started, self.asked, self.after = 0, 0, after
        self.draw = random.Random(5)

    def settle(self, *, wait: bool = True) -> None:
        """All have started."""

    def move(self, ready: Callable[[], int]) -> int | None:
        assert 0 <= ready() <= 8  # two workers, each some ahead
        self.asked += 1
        return self.draw.randrange(2) if self.asked > self.after else None

    def start(self, work: Any, *arguments: Any) -> Any:
        self.started += 1
        return super().start(work, *arguments)


def restless(loader: SavableDataLoader, after: int = 0) -> Restless:
    engine, config = Restless(after), loader.config
    restarts = config.max_worker_restarts
    loader._delivery.pool = MovingPool(
        loader._delivery,
        config.num_workers,
        engine=engine,
        max_restarts=restarts,
        watchdog=loader.watchdog,
        where="rank 0",
    )
    return engine


@pytest.mark.parametrize("prefetch", [2])
def test_workers_go_on_elsewhere_and_do_not_change_the_stream(
    data: Path, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("energon_bridge.cloud.ray.ray_engine._MOVE_SECONDS", 0.05)  # where the one that moves is killed
    monkeypatch.setattr("energon_bridge.cloud.ray.ray_engine._CATCH_UP_SECONDS", 0.1)
    settings = {"prefetch_factor": prefetch, "max_worker_restarts": 1000}
    with closing(loader_of(data, 2, SkippingEncoder(), **settings)) as loader:
        engine, found, kills = restless(loader), list[str](), 0
        pool: Any = loader._delivery.pool
        while pool.moves < 4:
            found += [digest(batch) for batch in islice(loader, 5)]
            if pool.moves > kills:
                os.kill(random.Random(kills).choice(worker_pids()), signal.SIGKILL)
                kills += 1
            assert len(found) < 5000
            time.sleep(0.02)
        counted = loader.metrics()
        assert counted["worker_moves"] == pool.moves  # two may be within the last five batches
        assert engine.started >= 2 + counted["worker_moves"] + counted["worker_restarts"]
        assert len(worker_pids()) <= 3  # those that were left have ended
    assert found == deliver(loaders_of(train_dataset(data, "skipping"), 1, 0), len(found)).digests
    assert not worker_pids()


class NotThere(TensorEncoder):
    """Fails in all processes but those that were started first."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def encode_sample(self, sample: Any) -> Any:
        (self.folder / str(os.getpid())).mkdir(exist_ok=True)
        processes = sorted(self.folder.iterdir(), key=lambda folder: folder.stat().st_mtime_ns)
        if str(os.getpid()) not in {folder.name for folder in processes[:2]}:
            raise RuntimeError("nothing is mounted here")
        return super().encode_sample(sample)


def test_a_worker_that_fails_elsewhere_stays(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = train_dataset(data, task_encoder=NotThere(tmp_path), error_policy=ErrorPolicy(on_error="raise"))
    with closing(get_savable_loader(dataset, worker_config=config_of(1, 2))) as loader:
        engine = restless(loader, after=10)
        stream, pool = iter(loader), cast(Any, loader._delivery.pool)
        found = [digest(next(stream)) for _ in range(10)]
        while engine.started < 3 or pool._rivals:
            found.append(digest(next(stream)))
            assert len(found) < 2000
        assert "worker_moves" not in loader.metrics()
        assert loader.metrics()["worker_restarts"] == 0
    assert "cannot go on elsewhere" in caplog.text
    assert found == deliver(loaders_of(train_dataset(data), 1, 0), len(found)).digests


def test_kills_do_not_change_batches_that_cross_as_memory_files(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a batch goes with its worker."""
    monkeypatch.setattr("energon_bridge.core.loader.pool.new_arena", lambda **_: None)
    expected = deliver(loaders_of(train_dataset(data), 1, 0), 80).digests
    choose = random.Random(5)
    with closing(loader_of(data, 3, prefetch_factor=3)) as loader:
        batches = iter(loader)
        found = []
        for number in range(80):
            found.append(digest(next(batches)))
            if number % 7 == 3:
                time.sleep(choose.random() * 0.003)
                os.kill(choose.choice(worker_pids()), signal.SIGKILL)
    assert found == expected


class Crashing(TensorEncoder):
    """Notes each process that encodes in a file, then ends it."""

    def __init__(self, notes: Path, end: Callable[[], Any]) -> None:
        super().__init__()
        self.notes, self.end = notes, end

    def encode_sample(self, sample: Any) -> Any:
        with self.notes.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return self.end()


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), r"worker \d \(killed by signal 11\)"),
        (lambda: os._exit(3), r"worker \d \(exit code 3\)"),
    ],
)
def test_workers_that_always_die_are_given_up(data: Path, tmp_path: Path, end: Callable[[], Any], message: str) -> None:
    encoder = Crashing(tmp_path / "notes", end)
    with closing(loader_of(data, 2, encoder)) as loader, pytest.raises(WorkerDiedError, match=message):
        next(iter(loader))
    starts = set((tmp_path / "notes").read_text().split())
    assert len(starts) <= 2 * 4  # two workers, started once and again three times


def test_restarts_are_counted_over_the_run(data: Path) -> None:
    with closing(loader_of(data, 2, max_worker_restarts=2)) as loader:
        batches = iter(loader)

        def step_and_kill() -> None:
            next(batches)
            os.kill(worker_pids()[0], signal.SIGKILL)

        with pytest.raises(WorkerDiedError, match="0 of max_worker_restarts are left"):
            deque(step_and_kill() for _ in range(100))


def test_workers_outlive_the_thread_that_started_them(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(loader_of(data, 2)) as loader:
        batches = iter(loader)
        thread = threading.Thread(target=lambda: next(batches))
        thread.start()
        thread.join()
        before = worker_pids()
        for _ in range(30):
            next(batches)
        assert worker_pids() == before
    assert "died" not in caplog.text


class Garbage:
    """A cycle that writes down which process destroys it."""

    def __init__(self, path: Path) -> None:
        self.path, self.itself = path, self

    def __del__(self) -> None:
        self.path.write_text(str(os.getpid()))


_collect_in_forks = False
os.register_at_fork(after_in_child=lambda: gc.set_threshold(1) if _collect_in_forks else None)


def test_what_the_training_process_threw_away_is_not_destroyed_in_workers(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may own threads, as decoders of FFmpeg do, and would wait for them."""
    monkeypatch.setattr(f"{__name__}._collect_in_forks", True)
    gc.collect()
    Garbage(tmp_path / "destroyed")
    with closing(loader_of(data, 1)) as loader:
        next(iter(loader))
        destroyed = tmp_path / "destroyed"
        assert not destroyed.exists() or destroyed.read_text() == str(os.getpid())


class CollectingEncoder(TensorEncoder):
    """Says whether garbage is collected where it runs."""

    def encode_sample(self, sample: Any) -> Any:
        if not gc.isenabled():
            raise FatalSampleError("nothing collects garbage here")
        return super().encode_sample(sample)


def test_workers_collect_garbage_where_the_training_process_does_it_by_hand(data: Path) -> None:
    gc.disable()
    try:
        with closing(loader_of(data, 1, CollectingEncoder())) as loader:
            next(iter(loader))
            assert not gc.isenabled()
    finally:
        gc.enable()


class LookingForScalers(TensorEncoder):
    def encode_sample(self, sample: Any) -> Any:
        frames: Any = sys.modules["av.video.frame"]
        if hasattr(frames._thread_local, "reformatter"):
            raise FatalSampleError("scalers of the training process")
        return super().encode_sample(sample)


def test_no_worker_has_the_scalers_of_this_process(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyAV 19 keeps them, whichever version is here. Forks that are no workers keep them."""
    frames = pytest.importorskip("av.video.frame")
    monkeypatch.setattr(frames, "_thread_local", threading.local(), raising=False)
    frames._thread_local.reformatter = "one with threads"
    if (pid := os.fork()) == 0:
        os._exit(not hasattr(frames._thread_local, "reformatter"))
    assert os.waitpid(pid, 0)[1] == 0
    with closing(loader_of(data, 1, LookingForScalers())) as loader:
        next(iter(loader))


def test_an_interrupt_is_for_the_training_process(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A loop that survives Ctrl-C (in a notebook) finds its workers as they were."""
    with closing(loader_of(data, 2)) as loader:
        batches = iter(loader)
        next(batches)
        before = worker_pids()
        for _ in range(20):
            for pid in before:
                os.kill(pid, signal.SIGINT)
            next(batches)
        assert worker_pids() == before
    assert "died" not in caplog.text


# Errors --------------------------------------------------------------------------------------------------------------


class Failing(TensorEncoder):
    """Raises a given error for each sample, or for each batch."""

    def __init__(self, error: Exception, hook: str) -> None:
        super().__init__()
        self.error, self.hook = error, hook

    def encode_sample(self, sample: Any) -> Any:
        if self.hook == "encode_sample":
            raise self.error
        return super().encode_sample(sample)

    def encode_batch(self, batch: Any) -> Any:
        if self.hook == "encode_batch":
            raise self.error
        return super().encode_batch(batch)


@pytest.mark.parametrize(
    ("error", "hook", "message"),
    [
        (ValueError("upside down"), "encode_sample", "failed in a row, .*ValueError: upside down"),
        (OSError(5, "the disk is gone"), "encode_batch", "failed in a row, .*the disk is gone"),
        (FatalSampleError("stop here"), "encode_sample", "stop here"),
    ],
)
def test_errors_of_user_code_reach_the_training_process(data: Path, hook: str, error: Exception, message: str) -> None:
    with (
        closing(loader_of(data, 2, Failing(error, hook))) as loader,
        pytest.raises(FatalSampleError, match=message) as raised,
    ):
        next(iter(loader))
    # Where it happened: the dataset, and whose samples.
    assert str(data) in str(raised.value)
    assert not worker_pids()


def test_after_an_error_the_loader_goes_on_where_it_stood(data: Path, tmp_path: Path) -> None:
    """A hook that is mended (here by a file) sees the same samples again."""
    switch = tmp_path / "broken"

    class Breakable(TensorEncoder):
        def encode_sample(self, sample: Any) -> Any:
            if switch.exists():
                raise MemoryError("for now")
            return super().encode_sample(sample)

    expected = deliver(loaders_of(train_dataset(data), 1, 0), 40).digests
    for num_workers in (0, 2):
        with closing(loader_of(data, num_workers, Breakable())) as loader:
            found = [digest(batch) for _, batch in zip(range(9), loader, strict=False)]
            loader.close()
            switch.touch()
            with pytest.raises(FatalSampleError, match="for now"):
                next(iter(loader))
            switch.unlink()
            found += [digest(batch) for _, batch in zip(range(31), loader, strict=False)]
        assert found == expected


def test_a_batch_that_cannot_cross_is_an_error(data: Path) -> None:
    class Unpicklable(TensorEncoder):
        def encode_batch(self, batch: Any) -> Any:
            return {"function": lambda: batch}

    refusal = r"a batch \(dict\) cannot be sent from the worker .* pickle fails with .*<lambda>.*num_workers=0"
    with closing(loader_of(data, 1, Unpicklable())) as loader, pytest.raises(LoaderError, match=refusal):
        next(iter(loader))


def test_a_profiler_sees_the_waiting_as_that_of_any_dataloader(data: Path) -> None:
    class Slow(TensorEncoder):
        def encode_batch(self, batch: Any) -> Any:
            time.sleep(0.2)
            return super().encode_batch(batch)

    with closing(loader_of(data, 1, Slow())) as loader:
        batches = iter(loader)
        next(batches)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(5):  # starting to profile takes long enough for the first ones
                next(batches)
    assert any(event.key.startswith("enumerate(DataLoader)") for event in profile.key_averages())


def private_kib() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))


def test_collecting_garbage_in_a_worker_copies_no_memory_of_the_training_process(data: Path) -> None:
    kept = [[] for _ in range(500_000)]  # objects that a collection would look at, about 30 MiB of them

    class Collecting(TensorEncoder):
        def encode_sample(self, sample: Any) -> Any:
            before = private_kib()
            gc.collect()
            return Numbers.derive_from(
                sample, text="", number=torch.tensor([private_kib() - before]), noise=torch.zeros(1)
            )

    with closing(loader_of(data, 1, Collecting())) as loader:
        assert int(next(iter(loader)).number.max()) < 4 * 1024
    assert len(kept) == 500_000


# Beside the stream ---------------------------------------------------------------------------------------------------


def test_saving_asks_no_worker(data: Path) -> None:
    with closing(loader_of(data, 2)) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        state = loader.save_state_rank()
        pids = worker_pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            assert loader.save_state_rank() == state
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
