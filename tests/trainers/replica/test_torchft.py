"""Replicas that come and go between steps: every committed global batch is that of one rank, none lost or doubled."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine import InProcessLoader, config_of, deliver, digest, is_masked, loaders_of, text_dataset, train_dataset
from made import made_once
from torch.distributed import HashStore, ProcessGroupGloo

from energon_bridge import get_val_dataset
from energon_bridge.core.errors import ConfigurationError, WrongUseError
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.trainers.torchft import ReplicaDataloader, gather_states

LANES = 6
data = made_once(text_dataset, train=[5, 9, 1, 14, 8], val=[7])


def opened(dataset: DatasetSpec, workers: int = 0) -> Callable[[int, int], Any]:
    return lambda rank, ranks: InProcessLoader(dataset, worker_config=config_of(ranks, workers, rank, num_lanes=LANES))


class Quorum:
    """Stands in for torchft's managers: who takes part in a step, whether it fails, and who heals from whom."""

    def __init__(self, dataset: DatasetSpec, workers: int) -> None:
        self.dataset, self.workers = dataset, workers
        self.replicas: list[ReplicaDataloader] = []
        self.committed: list[str] = []

    def join(self) -> None:
        replica = ReplicaDataloader(opened(self.dataset, self.workers))
        if self.replicas:
            replica.load_state_dict(self.replicas[0].state_dict())
        self.replicas.append(replica)

    def leave(self, number: int) -> None:
        self.replicas.pop(number).close()

    def step(self, outcome: str) -> None:
        """Run a step that is committed, or fails on all, or is committed by the first replica only."""
        ranks = len(self.replicas)
        parts = [replica.step(rank, ranks) for rank, replica in enumerate(self.replicas)]
        assert {len(part) for part in parts} == {-(-LANES // ranks)}
        states = [replica.rank_state() for replica in self.replicas]
        for number, replica in enumerate(self.replicas):
            if outcome == "all" or (outcome == "first" and number == 0):
                replica.commit(states)
            elif outcome == "first":  # behind the first one, so torchft heals it
                replica.load_state_dict({"states": states})
        if outcome != "none":
            batches = [batch for turn in zip(*parts, strict=True) for batch in turn]
            real = [digest(batch) for batch in batches if not is_masked(batch)]
            assert len(real) == LANES
            self.committed += real


@pytest.mark.parametrize(("encoder", "workers"), [("skipping", 2), ("packing", 0), ("grouping", 0)])
def test_every_global_batch_is_that_of_one_rank_whoever_is_there(data: Path, encoder: str, workers: int) -> None:
    dataset, rng = train_dataset(data, encoder), random.Random(f"{encoder} {workers}")
    quorum = Quorum(dataset, workers)
    quorum.join()
    for _ in range(16):
        if rng.random() < 0.4 and len(quorum.replicas) < LANES:
            quorum.join()
        if rng.random() < 0.4 and len(quorum.replicas) > 1:
            quorum.leave(rng.randrange(len(quorum.replicas)))
        quorum.step(rng.choice(["all", "all", "none", "first"]))
    reference = deliver(loaders_of(dataset, 1, 0, num_lanes=LANES), len(quorum.committed)).digests
    assert len(reference) > 6 * LANES
    assert quorum.committed == reference
    while quorum.replicas:
        quorum.leave(0)


def test_a_replica_that_stays_opens_its_loader_once_and_a_spare_none(data: Path) -> None:
    asked = []
    dataset = train_dataset(data)

    def open_loader(rank: int, ranks: int) -> Any:
        asked.append((rank, ranks))
        return opened(dataset)(rank, ranks)

    replica, spare = ReplicaDataloader(open_loader), ReplicaDataloader(open_loader)
    for _ in range(3):
        assert (len(replica.step(0, 1)), spare.step(None, 1)) == (LANES, [])
        states = [replica.rank_state(), spare.rank_state()]
        replica.commit(states)
        spare.commit(states)
    assert asked == [(0, 1)]
    expected = [digest(batch) for batch in replica.step(0, 1)]
    assert [digest(batch) for batch in spare.step(0, 1)] == expected
    assert [digest(batch) for batch in replica.step(0, 1)] == expected  # it was not committed
    replica.close()
    spare.close()


def test_states_that_are_not_those_of_the_step_are_refused(data: Path) -> None:
    dataset = train_dataset(data)
    one, other = (ReplicaDataloader(opened(dataset)) for _ in range(2))
    with pytest.raises(WrongUseError, match="no step was taken"):
        one.commit([])
    one.step(0, 2)
    early = one.rank_state()
    other.step(1, 2)
    with pytest.raises(WrongUseError, match=r"got 1 states, after 6 microbatches; expected those of all 2 replicas"):
        one.commit([early])
    one.commit([early, other.rank_state()])
    one.step(0, 2)
    with pytest.raises(WrongUseError, match=r"got 2 states, after 6 microbatches"):
        one.commit([early, other.rank_state()])
    one.close()
    other.close()


def test_loaders_of_another_rank_and_finite_ones_are_refused(data: Path) -> None:
    training = opened(train_dataset(data))
    with pytest.raises(
        ConfigurationError, match="called open_loader for rank 1 of 2, but it returned a loader of rank 0 of 1"
    ):
        ReplicaDataloader(lambda _rank, _ranks: training(0, 1)).step(1, 2)
    finite = get_val_dataset(data, batch_size=2, worker_config=config_of(1, 0))
    with pytest.raises(ConfigurationError, match="rank 0 of 1, which ends"):
        ReplicaDataloader(opened(finite)).step(0, 1)


def test_states_of_any_length_are_gathered() -> None:
    store = HashStore()
    states = [{"microbatches": 6, "of": "x" * 50}, None, {"microbatches": 6}]

    def member(rank: int) -> Any:
        return gather_states(ProcessGroupGloo(store, rank, 3), states[rank])

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(member, range(3))) == [states] * 3
