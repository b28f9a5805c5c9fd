"""Loaders with workers, and what is there of their processes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import TensorEncoder, config_of, deliver, loaders_of, train_dataset

from energon_bridge import SavableDataLoader, get_savable_loader


def loader_of(data: Path, num_workers: int = 2, encoder: Any = None, **kwargs: Any) -> SavableDataLoader:
    dataset = train_dataset(data, task_encoder=encoder or TensorEncoder())
    return get_savable_loader(dataset, worker_config=config_of(1, num_workers, **kwargs))


def expected_of(data: Path, number: int, **kwargs: Any) -> list[str]:
    """Return the digests of the first microbatches without workers."""
    return deliver(loaders_of(train_dataset(data, **kwargs), 1, 0), number).digests


def worker_pids() -> list[int]:
    return [process.pid for process in multiprocessing.active_children() if process.pid is not None]


def wait_until(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    """Poll a condition; return what it says in the end."""
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return met
