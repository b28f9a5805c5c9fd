"""Loaders in several threads of the training process: each gives what it gives alone, and says what it cannot help."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine import Numbers, TensorEncoder, digest, text_dataset
from made import made_once
from workers import loader_of

from energon_bridge import DefaultTaskEncoder

STEPS = 40
data = made_once(text_dataset, train=[5, 9, 1, 14, 8])


class Drawing(TensorEncoder):
    """Draws from every global generator, in two steps with room for other threads between them."""

    def encode_sample(self, sample: Any) -> Any:
        drawn = [random.random(), np.random.rand(), float(torch.rand(()))]
        sum(range(2000))
        drawn += [random.random(), np.random.rand(), float(torch.rand(()))]
        return Numbers.derive_from(sample, text="", number=torch.tensor(drawn), noise=torch.rand(1))


@pytest.fixture(autouse=True)
def quick_switches() -> Iterator[None]:
    """Let threads change places all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def stream(data: Path) -> list[str]:
    with closing(loader_of(data, 0, Drawing())) as loader:
        return [digest(batch) for batch in islice(loader, STEPS)]


def test_loaders_in_several_threads_give_what_each_gives_alone(data: Path) -> None:
    alone = stream(data)
    found: dict[int, list[str]] = {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: stream(data)})) for n in range(2)]
    for thread in threads:
        thread.start()
    found[2] = stream(data)  # and this thread as well
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(3), alone)


def test_the_generators_are_put_back_after_loaders_in_several_threads(data: Path) -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.default_generator.get_state()
    threads = [threading.Thread(target=stream, args=(data,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with closing(loader_of(data, 1, Drawing())) as loader:
        key = next(iter(loader)).__restore_key__
        for one in (key, key[3][0]):  # a batch, and a sample of it
            loader.restore_sample(one)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[:2]
    assert torch.equal(torch.default_generator.get_state(), before[2])


def test_a_sample_is_restored_while_another_thread_delivers(data: Path) -> None:
    with closing(loader_of(data, 0, Drawing())) as loader:
        batches = list(islice(loader, 5))
        other = threading.Thread(target=stream, args=(data,))
        other.start()
        again = [loader.restore_sample(batch.__restore_key__) for batch in batches]
        other.join()
    assert [digest(batch) for batch in again] == [digest(batch) for batch in batches]


@pytest.mark.parametrize(("num_workers", "encoder"), [(0, Drawing), (1, Drawing), (0, DefaultTaskEncoder)])
def test_draws_that_cannot_be_kept_apart_are_warned_of_once(
    data: Path, num_workers: int, encoder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def deliver() -> None:
        with closing(loader_of(data, num_workers, encoder())) as loader:
            next(iter(loader))

    deliver()
    assert not caplog.messages  # hooks in the main thread keep nobody else from drawing
    for _ in range(2):
        thread = threading.Thread(target=deliver, name="prefetcher")
        thread.start()
        thread.join()
    said = [message for message in caplog.messages if "run in thread 'prefetcher'" in message]
    assert len(said) == (num_workers == 0 and encoder is Drawing)
    assert all("Use worker processes" in message for message in said)
