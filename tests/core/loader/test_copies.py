"""Microbatches are copied to pinned memory and to a device while the trainer has the one before, and none is lost."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import TensorEncoder, config_of, deliver, digest, loaders_of, text_dataset, train_dataset
from made import made_once
from workers import wait_until, worker_pids

from energon_bridge import EnergonDataloader, SavableDataLoader, get_savable_loader
from energon_bridge.core.errors import ConfigurationError, FatalSampleError
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.core.samples.base import over_tensors, to_device
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.testing import write_shard
from energon_bridge.trainers.replica import make_balance
from energon_bridge.trainers.replica.costs import BatchCost

data = made_once(text_dataset, train=[5, 9, 1, 14, 8], val=[3])


def copying(data: Path, workers: int, device: str = "cpu", **settings: Any) -> SavableDataLoader:
    return get_savable_loader(train_dataset(data, **settings), worker_config=config_of(1, workers, device=device))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("energon-copies")]


def test_the_next_microbatch_is_on_its_way_and_not_in_the_state(data: Path) -> None:
    [plain] = loaders_of(train_dataset(data), 1, 2)
    with closing(plain), closing(copying(data, 2)) as loader:
        ahead = 0
        for expected, batch in islice(zip(plain, loader, strict=True), 60):
            assert digest(batch) == digest(expected)
            assert loader.save_state_rank() == plain.save_state_rank()
            ahead += len(loader._delivery._held)
        assert ahead > 40
        state = loader.save_state_rank()
        expected_next = digest(next(iter(plain)))
    assert not threads()
    with closing(copying(data, 1)) as resumed:
        resumed.restore_state_rank(state)
        assert digest(next(iter(resumed))) == expected_next


def test_workers_that_die_while_one_is_on_its_way_are_replaced(data: Path) -> None:
    expected = deliver(loaders_of(train_dataset(data), 1, 0), 40).digests
    found = []
    with closing(copying(data, 2)) as loader:
        for number, batch in enumerate(islice(loader, 40)):
            found.append(digest(batch))
            if number % 10 == 5:
                for pid in worker_pids():
                    os.kill(pid, signal.SIGKILL)
        assert loader.metrics()["worker_restarts"] >= 4
    assert found == expected


class Unlucky(TensorEncoder):
    """Cannot go on at one sample."""

    def encode_sample(self, sample: Any) -> Any:
        if sample.__key__ == "unlucky":
            raise FatalSampleError("cannot go on")
        return super().encode_sample(sample)


def test_an_error_comes_when_its_microbatch_is_due(tmp_path: Path) -> None:
    """And not when the one before it is delivered."""
    keys = [f"{number:02d}" if number != 17 else "unlucky" for number in range(20)]
    (tmp_path / "train").mkdir()
    write_shard(tmp_path / "train" / "0.tar", {key: {"txt": b"a text"} for key in keys})
    prepare_dataset(
        tmp_path,
        split=parse_patterns(["train:train/.*"]),
        dataset_yaml=render_dataset_yaml("TextSample", {"text": "txt"}),
    )
    assert 0 < len(until_the_error(tmp_path, None)[0]) < 20
    assert until_the_error(tmp_path, "cpu") == until_the_error(tmp_path, None)


def until_the_error(data: Path, device: str | None) -> tuple[list[str], Any]:
    dataset = train_dataset(data, batch_size=1, shuffle_buffer_size=0, task_encoder=Unlucky())
    found = []
    with closing(get_savable_loader(dataset, worker_config=config_of(1, 1, device=device))) as loader:

        def run() -> None:
            for batch in loader:
                found.append(digest(batch))
                # Without workers, the error has come while it looked ahead.
                wait_until(
                    lambda: (
                        bool(loader._delivery._held)
                        or not loader._delivery.pool._workers
                        or loader._delivery.pool.next_is_ready()
                    )
                )

        with pytest.raises(FatalSampleError, match="cannot go on"):
            run()
        return found, loader.save_state_rank()


class Moved:
    """A batch of another library, which moves itself."""

    def __init__(self) -> None:
        self.device = "cpu"

    def to(self, device: Any) -> Moved:
        self.device = str(device)
        return self


def test_everything_with_tensors_moves(data: Path) -> None:
    moved = to_device({"own": Moved(), "pair": (torch.ones(1), [torch.ones(2)])}, "meta")
    assert moved["own"].device == "meta"
    assert moved["pair"][0].is_meta
    assert moved["pair"][1][0].is_meta
    with closing(copying(data, 2, "meta")) as loader, closing(copying(data, 0, "meta")) as here:
        batches = [*islice(loader, 5), *islice(here, 1)]
    tensors: list[torch.Tensor] = []
    over_tensors(batches, tensors.append, "data_ptr")
    assert len(tensors) > 5
    assert all(tensor.is_meta for tensor in tensors)


def test_ranks_that_exchange_microbatches_keep_them_in_host_memory(data: Path) -> None:
    loader = copying(data, 0)
    with closing(loader), pytest.raises(ConfigurationError, match=r"device='cpu'.*before ranks exchange"):
        EnergonDataloader(loader, balance=make_balance(BatchCost(), data_group=None))
