"""Storms of signals: whatever is sent to workers, the stream is the undisturbed one; nothing outlives its trainer.

Loaders and processes are real. Workers are found as children of this process, so that it does not matter what started
them. `ENERGON_LONG_TESTS=1` makes the storms long; `ENERGON_CHAOS_SEED` seeds another one.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from engine import ENCODERS, config_of, deliver, digest, loaders_of, text_dataset, train_dataset
from forked import start_forked
from left_behind import descendants, left_shared_memory, shared_memory
from workers import wait_until

from energon_bridge import get_savable_loader
from energon_bridge.loader.savable import SavableDataLoader

LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))
SEED = int(os.environ.get("ENERGON_CHAOS_SEED", "0"))
BATCHES, TRAINERS = (6000, 100) if LONG else (60, 2)

SIGNALS = [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGSTOP]
ORDERS = ["crash", "exit", "hang"]
"""What a hook does when it is told to."""
HANG_SECONDS = 2.0

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    logger = logging.getLogger("energon_bridge")
    level = logger.level
    logger.setLevel(logging.ERROR)  # every death is a warning
    yield text_dataset(tmp_path_factory.mktemp("chaos"), train=[5, 9, 1, 14, 80])
    logger.setLevel(level)


@cache
def expected(data: Path, encoder: str) -> list[str]:
    """Return the digests of a run that nobody disturbs."""
    return deliver(loaders_of(train_dataset(data, encoder), 1, 0), BATCHES).digests


def loader_of(data: Path, encoder: Any, **kwargs: Any) -> SavableDataLoader:
    """Return a loader with two workers, which may die as often as they like."""
    name, encoder = (encoder, ENCODERS[encoder]()) if isinstance(encoder, str) else ("skipping", encoder)
    config = config_of(1, 2, prefetch_factor=2, max_worker_restarts=1 << 20, **kwargs)
    return get_savable_loader(
        train_dataset(data, name, task_encoder=encoder),
        worker_config=config,
        watchdog_timeout_seconds=HANG_SECONDS,
        on_hang="replace",
    )


def worker_processes() -> list[int]:
    servants = ("resource_tracker", "forkserver")
    return [pid for pid, line in descendants().items() if not any(name in line for name in servants)]


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may have gone a moment ago
        os.kill(pid, number)


class Storm:
    """A thread that sends signals to workers at moments of its own, at times to all at once.

    It waits for some batches after each: a worker that dies again and again before it delivers anything is given up,
    and should be.
    """

    def __init__(self, seed: str) -> None:
        self.delivered = 0
        self.sent = 0
        self._choose = random.Random(seed)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Storm:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        due = self._choose.randint(0, 6)
        while not self._ends.wait(0.0005):
            if self.delivered < due:
                continue
            time.sleep(self._choose.random() * 0.01)
            pids = worker_processes()
            for pid in self._choose.sample(pids, min(len(pids), self._choose.choice([1, 1, 2]))):
                send(pid, self._choose.choice(SIGNALS))
                self.sent += 1
            due = self.delivered + self._choose.randint(6, 16)


@pytest.mark.parametrize("encoder", ["skipping", "packing"])
def test_a_storm_of_signals_does_not_change_the_stream(data: Path, encoder: str) -> None:
    found: list[str] = []
    with closing(loader_of(data, encoder)) as loader, Storm(f"{SEED} {encoder}") as storm:
        for batch in islice(loader, BATCHES):
            found.append(digest(batch))
            storm.delivered += 1
    assert found == expected(data, encoder), f"seed {SEED}: {storm.sent} signals"
    assert storm.sent >= BATCHES // 25


def test_states_saved_in_a_storm_continue_the_stream(data: Path) -> None:
    choose = random.Random(SEED)
    found: list[str] = []
    state: Any = None
    with Storm(f"{SEED} states") as storm:
        while len(found) < BATCHES // 2:
            with closing(loader_of(data, "skipping")) as loader:
                if state is not None:
                    loader.restore_state_rank(json.loads(json.dumps(state)))
                for batch in islice(loader, choose.randint(5, 40)):
                    found.append(digest(batch))
                    storm.delivered += 1
                state = loader.save_state_rank()
    assert found == expected(data, "skipping")[: len(found)], f"seed {SEED}"


# Workers that end by themselves --------------------------------------------------------------------------------------


class Obedient(ENCODERS["skipping"]):  # type: ignore[misc,name-defined]
    """Does once what a file says, whichever worker finds it first."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def encode_sample(self, sample: Any) -> Any:
        for order in ORDERS:
            try:
                (self.folder / order).unlink()
            except FileNotFoundError:
                continue
            if order == "exit":
                os._exit(0)
            if order == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            re.match(r"(a+)+$", "a" * 64 + "b")  # keeps the interpreter lock for longer than anyone waits
        return super().encode_sample(sample)


@pytest.mark.parametrize("order", ORDERS)
def test_workers_that_end_or_hang_in_a_hook_do_not_change_the_stream(data: Path, tmp_path: Path, order: str) -> None:
    count = BATCHES // 2 if order != "hang" or not LONG else 60
    choose = random.Random(f"{SEED} {order}")
    found: list[str] = []
    with closing(loader_of(data, Obedient(tmp_path))) as loader:
        due = 3
        for batch in islice(loader, count):
            found.append(digest(batch))
            if len(found) == due:
                (tmp_path / order).touch()
                due += choose.randint(8, 20)
    assert found == expected(data, "skipping")[:count]


# The end of the trainer ----------------------------------------------------------------------------------------------


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def train(data: Path, pipe: int, in_thread: bool) -> None:
    """Train for ever; tell the workers' pids."""

    def loop() -> None:
        with closing(loader_of(data, "skipping")) as loader:
            for number, _ in enumerate(loader):
                if number == 1:
                    os.write(pipe, (json.dumps(worker_processes()) + "\n").encode())

    if in_thread:
        thread = threading.Thread(target=loop)
        thread.start()
        thread.join()
    else:
        loop()


@pytest.mark.parametrize("in_thread", [False, True])
def test_nothing_outlives_a_killed_trainer(data: Path, in_thread: bool) -> None:
    choose = random.Random(f"{SEED} {in_thread}")
    before = shared_memory()
    for _ in range(TRAINERS):
        reading, writing = os.pipe()
        trainer = start_forked(lambda pipe=writing: train(data, pipe, in_thread))  # type: ignore[misc]
        os.close(writing)
        with open(reading, encoding="utf-8") as lines:
            workers = json.loads(lines.readline())
        assert len(workers) == 2
        time.sleep(choose.random() * 0.05)
        trainer.kill()
        trainer.result()
        assert wait_until(lambda left=workers: not any(map(runs, left)), 3), f"{workers} outlive the trainer"
    assert wait_until(lambda: not left_shared_memory(before))  # other tests of this machine come and go


# Forks ---------------------------------------------------------------------------------------------------------------


def leave(action: Callable[[], Any]) -> None:
    """Do something in a forked child, which then ends."""
    worked, answer = start_forked(action).result()
    assert worked, answer


def test_a_forked_child_that_drops_its_copy_of_a_loader_does_no_harm(data: Path) -> None:
    holder: list[Any] = [loader_of(data, "skipping")]
    holder.append(iter(holder[0]))  # no other name holds either, so that the child's copies go with the list

    def drop() -> None:
        holder.clear()
        gc.collect()

    found: list[str] = []
    try:
        while len(found) < 60:
            found.append(digest(next(holder[1])))
            if len(found) % 20 == 3:
                before = worker_processes()
                leave(drop)
                assert worker_processes() == before
    finally:
        holder[0].close()
    assert found == expected(data, "skipping")[:60]
