"""The end of worker processes: neither they nor their memory are left behind, however the training process ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from engine import config_of, text_dataset
from left_behind import descendants, left_shared_memory, shared_memory
from made import made_once
from paths import HELPERS, REPOSITORY
from recipes import captions_dataset
from workers import loader_of, wait_until, worker_pids

from energon_bridge import DefaultTaskEncoder, SavableDataLoader, TextSample, get_savable_loader, get_train_dataset
from energon_bridge.core.loader import pool
from energon_bridge.core.storage.forks import Threads, at_rest
from energon_bridge.core.stream.loading import Loading

data = made_once(text_dataset, train=[5, 9, 1, 14, 8])


def loader_with_threads(folder: Path) -> SavableDataLoader:
    """Return a loader with two loading threads, as images have them, and a watchdog, all in this process."""
    config = config_of(1, 0, decode_threads=2)
    dataset = get_train_dataset(captions_dataset(folder), batch_size=None, worker_config=config)
    return get_savable_loader(dataset, watchdog_timeout_seconds=3600)


def test_closing_leaves_nothing(data: Path) -> None:
    before, files = shared_memory(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        loader = loader_of(data, 3)
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        assert len(worker_pids()) == 3
        loader.close()
        loader.close()  # twice does no harm
        assert not worker_pids()
    del batches, loader
    gc.collect()
    assert wait_until(lambda: not left_shared_memory(before))  # other tests of this machine come and go
    assert len(os.listdir("/proc/self/fd")) <= files + 5


def test_workers_without_a_lane_wait_and_end_when_they_are_told(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They used to look for a unit of their own for ever, with a core each, and were killed after seconds."""
    codes, end = [], pool.Worker.end

    def noted(worker: pool.Worker, seconds: float) -> tuple[int | None, str]:
        ended = end(worker, seconds)
        codes.append(ended[0])
        return ended

    monkeypatch.setattr(pool.Worker, "end", noted)
    with closing(loader_of(data, 3, num_lanes=1)) as loader:
        next(iter(loader))
    assert codes == [0, 0, 0]


def test_dropping_a_loader_stops_its_workers(data: Path) -> None:
    loader = loader_of(data, 2)
    batches = iter(loader)
    next(batches)
    assert len(worker_pids()) == 2
    del batches, loader
    gc.collect()
    assert wait_until(lambda: not worker_pids())


def test_collecting_a_loader_waits_for_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is being started holds a lock that others need to end, and it may be the one that collects."""
    submit, started, go_on = Loading.submit, threading.Event(), threading.Event()
    told: list[bool] = []
    before = set(threading.enumerate())

    def stall() -> None:
        started.set()
        told.append(go_on.wait(30))

    def submit_and_stall(self: Loading, *args: Any, **kwargs: Any) -> Any:
        if not started.is_set() and self._pool is not None:
            self._pool.submit(stall)  # one of the two loading threads
            assert started.wait(60)
        return submit(self, *args, **kwargs)

    monkeypatch.setattr(Loading, "submit", submit_and_stall)
    loader = loader_with_threads(tmp_path)
    batches = iter(loader)
    next(batches)
    threads = set(threading.enumerate()) - before
    assert {thread.name for thread in threads} >= {"energon-load_0", "energon-watchdog"}
    cycle = [loader, batches]
    cycle.append(cycle)
    del cycle, loader, batches
    gc.collect()
    go_on.set()
    assert wait_until(lambda: not threads & set(threading.enumerate()))
    assert told == [True]


class LockedEncoder(DefaultTaskEncoder):
    """Needs a lock, as one inside of a library."""

    lock = threading.Lock()

    def encode_sample(self, sample: TextSample) -> Any:
        with self.lock:
            return sample


def test_no_worker_is_forked_while_a_thread_of_a_dropped_loader_holds_a_lock(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, started, released = Loading.submit, threading.Event(), threading.Event()

    def hold() -> None:
        with LockedEncoder.lock:
            started.set()
            released.wait(60)

    def submit_and_hold(self: Loading, *args: Any, **kwargs: Any) -> Any:
        if not started.is_set() and self._pool is not None:
            self._pool.submit(hold)
            assert started.wait(60)
        return submit(self, *args, **kwargs)

    monkeypatch.setattr(Loading, "submit", submit_and_hold)
    next(iter(loader_with_threads(tmp_path)))
    gc.collect()
    with closing(loader_of(data, 2, LockedEncoder(), start_method="fork")) as loader:
        assert LockedEncoder.lock.locked()
        threading.Timer(1, released.set).start()
        next(iter(loader))


def test_a_fork_waits_only_so_long_for_threads(caplog: pytest.LogCaptureFixture) -> None:
    go_on = threading.Event()
    with Threads(1) as threads:
        threads.submit(go_on.wait, 60)
        with at_rest(0.01):
            pass
        go_on.set()
        threads.submit(int).result()
        with at_rest(60):
            pass
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "a worker is forked while threads of this process have been loading for 0.01 s"
    ]


def test_closing_a_loader_waits_for_its_threads(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    loader = loader_with_threads(tmp_path)
    next(iter(loader))
    assert set(threading.enumerate()) - before
    loader.close()
    assert not set(threading.enumerate()) - before


def test_a_loader_that_was_never_iterated_starts_nothing(data: Path) -> None:
    loader = loader_of(data, 3)
    loader.save_state_rank()
    iter(loader)
    assert not worker_pids()


TRAINING = """
    import signal, sys
    from pathlib import Path
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
    sys.path.insert(0, {helpers!r})
    from engine import config_of, train_dataset
    from energon_bridge import get_savable_loader

    loader = get_savable_loader(train_dataset(Path({data!r}), {encoder!r}), worker_config=config_of(1, 2))
    for number, batch in enumerate(loader):
        if number == 5:
            print("under way", flush=True)
"""


@pytest.fixture
def training(data: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a training process in a session of its own; yield it when its workers run."""
    program = textwrap.dedent(TRAINING).format(helpers=str(HELPERS), data=str(data), encoder="tensors")
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=REPOSITORY,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "under way\n"
    with process:
        yield process
        process.kill()


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM"])
def test_workers_go_with_the_training_process(training: subprocess.Popen[str], how: str) -> None:
    before = shared_memory()
    workers = [pid for pid, name in descendants(training.pid).items() if "resource_tracker" not in name]
    assert len(workers) >= 2
    if how == "SIGINT":
        os.killpg(training.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    else:
        training.send_signal(signal.Signals[how])
    _, errors = training.communicate(timeout=30)
    assert training.returncode == -signal.Signals[how]
    # Quietly: of all processes only the training process has something to say.
    assert errors.count("Traceback") == (1 if how == "SIGINT" else 0)
    assert wait_until(lambda: not any(is_running(pid) for pid in workers), 10)
    assert wait_until(lambda: not left_shared_memory(before))  # other tests of this machine come and go


PROGRAM = """
import sys
from energon_bridge import WorkerConfig, get_savable_loader, get_train_dataset

if __name__ == "__main__":
    config = WorkerConfig(num_workers=int(sys.argv[2]), num_lanes=2, start_method=sys.argv[3])
    dataset = get_train_dataset(sys.argv[1], batch_size=2, worker_config=config)
    first, second = get_savable_loader(dataset), get_savable_loader(dataset)
    batches = [next(iter(first)), next(iter(second))]
    if sys.argv[4] == "closed":
        first.close()
        second.close()
"""


@pytest.mark.parametrize("end", ["closed", "open"])
@pytest.mark.parametrize(("workers", "method"), [(0, "fork"), (2, "fork"), (1, "spawn")])
def test_a_program_that_ends_with_its_loaders_says_nothing(
    data: Path, tmp_path: Path, workers: int, method: str, end: str
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-W", "ignore", str(tmp_path / "program.py"), str(data), str(workers), method, end]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
