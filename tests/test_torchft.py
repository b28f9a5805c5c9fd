"""Replicas that come and go: the global batches of a run on one replica, none lost, none twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from energon_bridge import (
    DefaultTaskEncoder,
    SkipSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from energon_bridge.errors import ConfigurationError, TooManyRanksError, WrongUseError
from energon_bridge.integrations.torchft import QuorumData, gather_by
from energon_bridge.testing import create_captioning_test_dataset

MICROBATCHES = 6  # of a global batch
BATCHES = 5


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_captioning_test_dataset(tmp_path_factory.mktemp("captioning"), num_train=30, num_val=4)


class Skipping(DefaultTaskEncoder):
    """Skips samples, so that arithmetic alone does not say where a lane stands."""

    def encode_sample(self, sample: Any) -> Any:
        if sample.__key__.endswith("3"):
            raise SkipSample
        return sample


def opened(dataset: Path, rank: int, replicas: int) -> Any:
    config = WorkerConfig(rank=rank, world_size=replicas, num_workers=0, num_lanes=MICROBATCHES)
    return get_savable_loader(
        get_train_dataset(dataset, batch_size=2, task_encoder=Skipping(), worker_config=config, shuffle_buffer_size=5)
    )


@pytest.fixture(scope="module")
def whole(dataset: Path) -> list[list[tuple[str, ...]]]:
    """Return the global batches of a run on one replica."""
    keys = [tuple(batch.__key__) for batch in islice(opened(dataset, 0, 1), BATCHES * MICROBATCHES)]
    return [sorted(keys[at : at + MICROBATCHES]) for at in range(0, len(keys), MICROBATCHES)]


class Job:
    """Replicas in threads, with what torchft's manager does: a quorum for each batch, and healing of who joins."""

    def __init__(self, dataset: Path) -> None:
        self.dataset = dataset
        self.replicas: list[QuorumData] = []
        self.trained: list[list[tuple[str, ...]]] = []
        self._states: dict[int, Any] = {}
        self._barrier = threading.Barrier(1)
        self._rank = threading.local()

    def _gather(self, own: Any) -> list[Any]:
        self._states[self._rank.value] = own
        self._barrier.wait(20)
        return [self._states[rank] for rank in range(self._barrier.parties)]

    def join(self) -> None:
        joined = QuorumData(lambda rank, replicas: opened(self.dataset, rank, replicas), self._gather)
        if self.replicas:
            joined.load_state_dict(self.replicas[0].state_dict())
        self.replicas.append(joined)

    def leave(self, number: int) -> None:
        self.replicas.pop(number).close()

    def train(self, failing: int | None = None) -> None:
        """Train a global batch; a replica that fails does so in the middle of it, so that nobody commits."""
        size = len(self.replicas)
        self._barrier, self._states = threading.Barrier(size), {}

        def step(rank: int) -> list[tuple[str, ...]]:
            self._rank.value = rank
            batches = self.replicas[rank].global_batch(rank, size)
            taken = list(islice(batches, 1) if rank == failing else batches)
            if failing is None:
                self.replicas[rank].share()
            return [tuple(batch.__key__) for batch in taken if batch.__valid__.all()]

        with ThreadPoolExecutor(size) as threads:
            taken = list(threads.map(step, range(size)))
        if failing is None:
            for replica in self.replicas:
                replica.commit()
            self.trained.append(sorted(key for keys in taken for key in keys))

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_the_global_batches_do_not_depend_on_who_is_there(dataset: Path, whole: Any, data: st.DataObject) -> None:
    job = Job(dataset)
    for _ in range(data.draw(st.integers(1, 4), "replicas")):
        job.join()
    while len(job.trained) < BATCHES:
        event = data.draw(st.sampled_from(["train", "train", "join", "leave", "fail", "fail and leave"]))
        one = data.draw(st.integers(0, len(job.replicas) - 1))
        if event == "join" and len(job.replicas) < MICROBATCHES:
            job.join()
        if event.startswith("fail"):
            job.train(failing=one)
        if event.endswith("leave") and len(job.replicas) > 1:
            job.leave(one)
        if event == "train":
            job.train()
    job.close()
    assert job.trained == whole


def test_each_replica_keeps_the_state_of_the_whole_run(dataset: Path, whole: Any) -> None:
    job = Job(dataset)
    for _ in range(4):
        job.join()
    job.train()
    states = [replica.state_dict() for replica in job.replicas]
    assert states == [states[0]] * 4
    assert states[0]["batches"] == 1
    for number in (3, 2, 1):  # one is left, and has the lanes of all
        job.leave(number)
    job.train()
    job.close()
    assert job.trained == whole[:2]


def test_a_replica_that_does_not_take_part_gets_nothing(dataset: Path) -> None:
    data = QuorumData(lambda rank, replicas: opened(dataset, rank, replicas), list)
    assert list(data.global_batch(None, 2)) == []
    with pytest.raises(WrongUseError, match="share"):
        data.share()


def mistakes(dataset: Path) -> Iterator[tuple[Callable[[int, int], Any], type[Exception], str]]:
    yield lambda rank, replicas: opened(dataset, 0, 1), ConfigurationError, "returned rank 0 of 1"
    yield lambda rank, replicas: opened(dataset, rank, MICROBATCHES + 1), TooManyRanksError, "7 data-parallel ranks"
    validation = WorkerConfig(rank=1, world_size=2, num_workers=0)
    yield (
        lambda rank, replicas: get_savable_loader(
            get_val_dataset(dataset, batch_size=2, task_encoder=DefaultTaskEncoder(), worker_config=validation)
        ),
        ConfigurationError,
        "validation data",
    )


def test_mistakes(dataset: Path) -> None:
    for open_loader, kind, message in mistakes(dataset):
        with pytest.raises(kind, match=message):
            next(QuorumData(open_loader, list).global_batch(1, 2))
    data = QuorumData(lambda rank, replicas: opened(dataset, rank, replicas), list)
    next(data.global_batch(0, 1))
    with pytest.raises(WrongUseError, match="all microbatches"):
        data.share()
    with pytest.raises(WrongUseError, match="share first"):
        data.commit()
    data.close()


class Group:
    """A process group of two, the other of which sends a longer state."""

    def size(self) -> int:
        return 2

    def allgather(
        self,
        rows: list[list[torch.Tensor]],
        mine: list[torch.Tensor],
        opts: torch.distributed.distributed_c10d.AllgatherOptions,
    ) -> Any:
        other = b'{"microbatches": 1234567}'
        content = torch.tensor([len(other)]) if mine[0].dtype == torch.int64 else torch.tensor(list(other)).byte()
        rows[0][0].copy_(mine[0])
        rows[0][1].copy_(content)
        return type("Work", (), {"wait": lambda self: None})()


def test_states_go_over_a_process_group() -> None:
    assert gather_by(Group())({"microbatches": 1}) == [{"microbatches": 1}, {"microbatches": 1234567}]
