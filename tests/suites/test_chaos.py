"""Storms of signals: whatever is sent to workers, the stream is the undisturbed one.

Loaders and processes are real. Workers are found as children of this process, so that it does not matter what started
them. `ENERGON_LONG_TESTS=1` makes the storms long; `ENERGON_CHAOS_SEED` seeds another one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from engine import config_of, deliver, digest, loaders_of, text_dataset, train_dataset
from left_behind import workers

from energon_bridge import get_savable_loader
from energon_bridge.core.loader.savable import SavableDataLoader

LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))
SEED = int(os.environ.get("ENERGON_CHAOS_SEED", "0"))
BATCHES = 6000 if LONG else 60

SIGNALS = [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGSTOP]
HANG_SECONDS = 2.0


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


def loader_of(data: Path, encoder: str) -> SavableDataLoader:
    """Return a loader with two workers, which may die as often as they like."""
    return get_savable_loader(
        train_dataset(data, encoder),
        worker_config=config_of(1, 2, prefetch_factor=2, max_worker_restarts=1 << 20),
        watchdog_timeout_seconds=HANG_SECONDS,
        on_hang="replace",
    )


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
            pids = workers()
            for pid in self._choose.sample(pids, min(len(pids), self._choose.choice([1, 1, 2]))):
                send(pid, self._choose.choice(SIGNALS))
                self.sent += 1
            due = self.delivered + self._choose.randint(6, 16)


@pytest.mark.parametrize("encoder", ["skipping", "packing"])
def test_states_saved_in_a_storm_continue_the_stream(data: Path, encoder: str) -> None:
    choose = random.Random(SEED)
    found: list[str] = []
    state: Any = None
    with Storm(f"{SEED} {encoder}") as storm:
        while len(found) < BATCHES // 2:
            with closing(loader_of(data, encoder)) as loader:
                if state is not None:
                    loader.restore_state_rank(json.loads(json.dumps(state)))
                for batch in islice(loader, choose.randint(5, 40)):
                    found.append(digest(batch))
                    storm.delivered += 1
                state = loader.save_state_rank()
    assert found == expected(data, encoder)[: len(found)], f"seed {SEED}: {storm.sent} signals"
    assert storm.sent >= len(found) // 25
