"""Anything a training loop may do with a loader, in any order: the stream is always the one of an undisturbed run.

The machine holds the loaders of all ranks and knows how many microbatches of the reference stream were delivered. The
leaf is small, so that runs cross many epochs, and its encoder skips samples and yields several.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from engine import InProcessLoader, digest, is_masked, loaders_of, text_dataset, train_dataset
from hypothesis import settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from energon_bridge.loader.run_plan import DatasetSpec
from energon_bridge.topology import Ownership

LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))
NUM_LANES = 6
SHARDS = [4, 7]
SAMPLES, ROWS = sum(SHARDS), 2

topologies = st.tuples(st.integers(1, NUM_LANES), st.sampled_from([0, 0, 0, 1, 2, 3]))


class Reference:
    """The microbatches of a run that nobody disturbs, made as far as they are asked for."""

    def __init__(self, dataset: DatasetSpec) -> None:
        self._batches = iter(loaders_of(dataset, 1, 0, num_lanes=NUM_LANES)[0])
        self._digests: list[str] = []

    def __getitem__(self, m: int) -> str:
        while len(self._digests) <= m:
            self._digests.append(digest(next(self._batches)))
        return self._digests[m]


class TrainingLoop(RuleBasedStateMachine):
    """What a training loop does: step, save, stop, resume, on this or another number of ranks."""

    saved: Bundle[tuple[int, Any]] = Bundle("saved")
    datasets: ClassVar[dict[str, tuple[DatasetSpec, Reference]]] = {}

    @initialize(encoder=st.sampled_from(["tensors", "skipping", "several", "refusing"]), topology=topologies)
    def start(self, encoder: str, topology: tuple[int, int]) -> None:
        self.dataset, self.reference = self.datasets[encoder]
        self.start_on(topology)

    def start_on(self, topology: tuple[int, int], state: Any = None, m: int = 0) -> None:
        self.topology, self.m = topology, m
        self.loaders = loaders_of(self.dataset, *topology, num_lanes=NUM_LANES, state=state)
        self.begin(m)

    def begin(self, m: int) -> None:
        self.m = m
        self.owned = Ownership(NUM_LANES, self.topology[0], m)
        self.iterators: list[Iterator[Any]] = [iter(loader) for loader in self.loaders]

    def step(self) -> None:
        real = []
        for iterator in self.iterators:
            batch = next(iterator)
            assert len(batch["__key__"]) == len(batch["__valid__"]) == ROWS
            if not is_masked(batch):
                real.append(digest(batch))
        assert real == [self.reference[self.m + i] for i in range(self.owned.step_size(self.m))]
        self.m += len(real)

    def states(self) -> list[Any]:
        return [loader.save_state_rank() for loader in self.loaders]

    @rule(steps=st.integers(1, 3))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    @rule()
    def step_to_the_end_of_an_epoch(self) -> None:
        target = -(-(self.m + 1) * ROWS // SAMPLES) * SAMPLES // ROWS
        while self.m < target:
            self.step()

    @rule(target=saved)
    def save(self) -> tuple[int, Any]:
        return self.m, self.states()

    @rule(target=saved)
    def save_twice(self) -> Any:
        first, second = self.states(), self.states()
        assert first == second
        return multiple((self.m, first), (self.m, second))

    @rule(target=saved, state=saved)
    def keep_a_state_as_json(self, state: tuple[int, Any]) -> tuple[int, Any]:
        return state[0], json.loads(json.dumps(state[1]))

    @rule(state=saved, topology=topologies)
    def resume_in_new_loaders(self, state: tuple[int, Any], topology: tuple[int, int]) -> None:
        self.close()
        self.start_on(topology, state[1], state[0])

    @rule(target=saved, state=saved, topology=topologies)
    def resume_and_save_at_once(self, state: tuple[int, Any], topology: tuple[int, int]) -> tuple[int, Any]:
        self.resume_in_new_loaders(state, topology)
        return self.save()

    @rule(state=consumes(saved))
    def restore_into_the_same_loaders(self, state: tuple[int, Any]) -> None:
        for loader in self.loaders:
            loader.restore_state_rank(state[1])
        self.begin(state[0])

    @rule(state=saved)
    def restore_below_a_running_iterator(self, state: tuple[int, Any]) -> None:
        running = self.iterators
        self.restore_into_the_same_loaders(state)
        self.iterators = running

    @rule()
    def iterate_again(self) -> None:
        self.iterators = [iter(loader) for loader in self.loaders]

    @rule()
    def stop_the_workers(self) -> None:
        for loader in self.loaders:
            loader.close()

    @rule()
    def draw_from_the_global_generators(self) -> None:
        random.random()
        torch.rand(3)

    @invariant()
    def the_state_names_the_position(self) -> None:
        # States cost nothing and disturb nothing, so looking at them is allowed at any time.
        assert all(loader.save_state_rank()["microbatches"] == self.m for loader in getattr(self, "loaders", ()))

    def close(self) -> None:
        for loader in getattr(self, "loaders", ()):
            assert isinstance(loader, InProcessLoader)
            loader.close()

    def teardown(self) -> None:
        self.close()


@pytest.fixture(autouse=True, scope="module")
def _datasets(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = text_dataset(tmp_path_factory.mktemp("state_machine"), train=SHARDS)
    for encoder in ("tensors", "skipping", "several", "refusing"):
        dataset = train_dataset(path, encoder)
        TrainingLoop.datasets[encoder] = dataset, Reference(dataset)


TestTrainingLoop = TrainingLoop.TestCase
TestTrainingLoop.settings = settings(stateful_step_count=30, max_examples=100 if LONG else 30)
