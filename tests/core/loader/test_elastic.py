"""One stream on any number of ranks and workers: lanes, defaults, masked twins, an encoder around an encoder.

That a stop changes nothing, whatever the data, the encoder and the topologies are, is what the chains show
(`suites/chains.py`).
"""

from __future__ import annotations

import contextvars
import logging
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from engine import NUM_LANES, config_of, deliver, is_masked, loaders_of, text_dataset, train_dataset
from forked import on_gloo
from made import made_once

from energon_bridge import AugmentTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.loader.dataset_spec import DatasetSpec

SHARDS = [5, 9, 1, 14, 8]  # 37 samples, 24 lanes: an epoch ends in nearly every step
ENCODERS = ["tensors", "packing", "grouping", "batches"]
data = made_once(text_dataset, train=SHARDS)


@cache
def dataset_of(data: Path, encoder: str) -> DatasetSpec:
    return train_dataset(data, encoder)


@cache
def reference(data: Path, encoder: str) -> list[str]:
    """Return the digests of the first microbatches of a run on one rank without workers."""
    return deliver(loaders_of(dataset_of(data, encoder), 1, 0), 60).digests


class Outer(AugmentTaskEncoder):
    """Adds nothing but its own name for the draw and the batch."""

    def encode_batch(self, batch: Any) -> Any:
        numbers.append(self.current_batch_index)
        return super().encode_batch(batch)

    def encode_sample(self, sample: Any) -> Any:
        draws.append(self.task_encoder.current_sample_index)
        return super().encode_sample(sample)


numbers: list[int] = []
draws: list[int] = []


@pytest.mark.parametrize("encoder", ENCODERS)
def test_an_encoder_around_an_encoder_changes_nothing(data: Path, encoder: str) -> None:
    inner = dataset_of(data, encoder)
    dataset = inner.with_settings(task_encoder=Outer(inner.settings.task_encoder))
    expected = reference(data, encoder)[:60]
    numbers.clear()
    draws.clear()
    assert deliver(loaders_of(dataset, 1, 0), 60).digests == expected
    assert len(set(draws)) == len(draws)
    if encoder in ("tensors", "grouping"):
        assert numbers == list(range(60))
    with pytest.raises(ConfigurationError, match="inside a hook"):
        contextvars.Context().run(lambda: dataset.settings.task_encoder.current_sample_index)


def test_a_batch_held_back_for_its_masked_twin_is_forgotten_by_a_restore(data: Path) -> None:
    """On 10 ranks from microbatch 13 on, ranks 0 to 2 begin with masked microbatches, made of their next real ones."""
    dataset, expected = dataset_of(data, "tensors"), reference(data, "tensors")
    states = deliver(loaders_of(dataset, 1, 0), 40, [13, 33]).states
    for num_workers in (0, 2):
        loaders = loaders_of(dataset, 10, num_workers, state=states[13])
        first = [next(iter(loader)) for loader in loaders]
        assert [is_masked(batch) for batch in first] == [True] * 3 + [False] * 7
        for loader in loaders:
            loader.restore_state_rank(states[33])
        assert deliver(loaders, 4).digests == expected[33:58]


@pytest.mark.parametrize("group_size", [24, None])
def test_fresh_runs_are_one_sequence_on_any_ranks_and_workers(data: Path, group_size: int | None) -> None:
    """The default number of lanes depends on neither, however small the data is."""
    options = {"num_lanes": None, "microbatches_per_global_batch": group_size}
    runs = [(1, 0), (2, 3), (4, 1)]
    loaders = (loaders_of(dataset_of(data, "packing"), *one, **options) for one in runs)
    assert len({tuple(deliver(of_run, 120 // len(of_run)).digests) for of_run in loaders}) == 1


def test_what_lanes_cannot_keep_busy_is_said_once(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = dataset_of(data, "default")
    for world_size, num_workers in ((4, 2), (5, 0), (12, 3)):
        for rank in range(min(2, world_size)):
            config = config_of(world_size, num_workers, rank, num_lanes=NUM_LANES)
            get_savable_loader(dataset, worker_config=config)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text for text in said if "cores" not in text] == [
        "5 data-parallel ranks do not divide 24 lanes, so 4 % of the microbatches are masked (the others do not "
        "change); 4 ranks would waste none",
        "only 2 of 3 workers have a lane to load: 24 lanes, 12 ranks",
    ]


@pytest.mark.parametrize("both", [True, False])
def test_ranks_that_begin_at_different_places_are_told(both: bool, tmp_path: Path) -> None:
    """One rank has the state, the other starts anew, as programs do that go on without a file that is missing."""
    path = text_dataset(tmp_path / "data", train=[40])

    def loader(rank: int, ranks: int) -> Any:
        run = WorkerConfig(rank=rank, world_size=ranks, num_workers=0, num_lanes=4)
        return get_savable_loader(get_train_dataset(path, batch_size=2, worker_config=run))

    alone = loader(0, 1)
    for _ in islice(alone, 4):
        pass
    state = alone.save_state_rank()

    def start(rank: int) -> list[str]:
        told: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("energon_bridge.core.loader.ranks").addHandler(handler)
        for _ in range(2):  # a program may open several, also of the same data
            own = loader(rank, 2)
            if both or rank == 0:
                own.restore_state_rank(state)
            next(iter(own))
        return told

    told = [message for of_rank in on_gloo(2, start) for message in of_rank]
    assert len(told) == (0 if both else 2)
    assert all("begins at microbatch" in message and "another one at" in message for message in told)
