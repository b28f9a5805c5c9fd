"""One stream on any number of ranks and workers, through any stop: the elastic matrix.

Each encoder saves on some topologies and resumes on others, in this process; `ENERGON_LONG_TESTS=1` runs the whole
matrix of (save topology, resume topology). Sampled pairs run with real worker processes. What mixes, filters, bans,
passes, codecs and several stops add to it is drawn by the chains (`suites/chains.py`).
"""

from __future__ import annotations

import contextvars
import itertools
import json
import os
import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engine import (
    NUM_LANES,
    InProcessLoader,
    comparable,
    config_of,
    deliver,
    digest,
    is_masked,
    loaders_of,
    text_dataset,
    train_dataset,
)

from energon_bridge import AugmentTaskEncoder, get_savable_loader, get_train_dataset
from energon_bridge.errors import ConfigurationError
from energon_bridge.loader.fits import merge
from energon_bridge.loader.run_plan import DatasetSpec
from energon_bridge.loader.savable import SavableDataLoader
from energon_bridge.testing import create_captioning_test_dataset

LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))
TOPOLOGIES = list(itertools.product([1, 2, 3, 4, 6, 8], range(4)))
SHARDS = [5, 9, 1, 14, 8]  # 37 samples, 24 lanes: an epoch ends in nearly every step
LARGE = [1500, 1, 1600]  # each lane has a stretch of 129 samples, in slices of two: enough for windows and rounds
ENCODERS = ["default", "tensors", "skipping", "several", "refusing", "images"]
ENCODERS += ["packing", "prepost", "grouping", "batches", "stretches", "lengths"]
CASES = [
    (encoder, *topology)
    for encoder in ENCODERS
    for topology in (TOPOLOGIES if LONG else random.Random(encoder).sample(TOPOLOGIES, 3))
]

# DataLoader counts the cores and warns of more workers than these; here their number is the point.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elastic")
    text_dataset(folder / "text", train=SHARDS)
    text_dataset(folder / "other", train=[4, 13, 6])
    text_dataset(folder / "large", train=LARGE)
    create_captioning_test_dataset(folder / "images", num_train=37, num_val=0, image_size=4)
    return folder


@cache
def dataset_of(data: Path, encoder: str) -> DatasetSpec:
    if encoder == "images":
        return train_dataset(data / "images", "default")
    if encoder == "stretches":
        return train_dataset(data / "large", "skipping", batch_size=8)
    return train_dataset(data / "text", encoder)


@cache
def uninterrupted(data: Path, encoder: str) -> tuple[list[str], list[Any]]:
    """Return the digests of the first microbatches of a run on one rank without workers, and the state at each."""
    steps = 12 * NUM_LANES
    whole = deliver(loaders_of(dataset_of(data, encoder), 1, 0), steps, range(steps + 1))
    return whole.digests, [comparable(state) for (state,) in whole.states.values()]


def reference(data: Path, encoder: str) -> list[str]:
    return uninterrupted(data, encoder)[0]


def check_states(data: Path, encoder: str, states: dict[int, list[Any]]) -> None:
    """Check that states are those of the uninterrupted run after the same microbatch, with the counters."""
    for of_step in states.values():
        state = merge(of_step)
        assert comparable(state) == uninterrupted(data, encoder)[1][state["microbatches"]]


def check_topology(
    data: Path, encoder: str, world_size: int, num_workers: int, steps: int, save_at: Any = (), **kwargs: Any
) -> dict[int, tuple[int, Any]]:
    """Run a topology from the start; return the number of delivered microbatches and the states by step."""
    delivered = deliver(loaders_of(dataset_of(data, encoder), world_size, num_workers, **kwargs), steps, save_at)
    assert delivered.digests == reference(data, encoder)[: len(delivered.digests)]
    check_states(data, encoder, delivered.states)
    return {step: (states[0]["microbatches"], states) for step, states in delivered.states.items()}


def check_resume(
    data: Path, encoder: str, saved: tuple[int, Any], world_size: int, num_workers: int, steps: int, **kwargs: Any
) -> None:
    """Resume on a topology and compare what follows."""
    m, state = saved
    loaders = loaders_of(dataset_of(data, encoder), world_size, num_workers, state=state, **kwargs)
    delivered = deliver(loaders, steps, [steps])
    assert delivered.digests == reference(data, encoder)[m : m + len(delivered.digests)]
    check_states(data, encoder, delivered.states)
    assert delivered.masked == 0
    assert len(delivered.digests) == world_size * steps


# The whole matrix in process -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("encoder", "world_size", "num_workers"), CASES)
def test_saved_anywhere_resumed_anywhere(data: Path, encoder: str, world_size: int, num_workers: int) -> None:
    steps = range(96 // world_size)
    saved = check_topology(data, encoder, world_size, num_workers, len(steps), steps)
    choose = random.Random(f"{world_size} {num_workers} {encoder}")
    for other, workers in TOPOLOGIES if LONG else choose.sample(TOPOLOGIES, 4):
        # Where there are such, a step that is no multiple of the number of ranks that resume.
        odd = [step for step in steps if saved[step][0] % other] or steps
        check_resume(data, encoder, saved[choose.choice(odd)], other, workers, -(-24 // other))


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


@pytest.mark.parametrize(
    "encoder", [name for name in ENCODERS if name not in ("images", "prepost", "several", "stretches", "lengths")]
)
def test_an_encoder_around_an_encoder_changes_nothing(data: Path, encoder: str) -> None:
    inner = dataset_of(data, encoder)
    dataset = inner.with_settings(task_encoder=Outer(inner.settings.task_encoder))
    expected = reference(data, encoder)[:60]
    numbers.clear()
    draws.clear()
    assert deliver(loaders_of(dataset, 1, 0), 60).digests == expected
    assert len(set(draws)) == len(draws)
    if encoder in ("default", "tensors", "grouping"):
        assert numbers == list(range(60))
    with pytest.raises(ConfigurationError, match="inside a hook"):
        contextvars.Context().run(lambda: dataset.settings.task_encoder.current_sample_index)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_restore_sample_gives_the_identical_batch(data: Path, encoder: str) -> None:
    (loader,) = loaders_of(dataset_of(data, encoder), 1, 2)
    other = get_savable_loader(dataset_of(data, encoder))
    for batch in itertools.islice(loader, 40):
        key = json.loads(json.dumps(batch.__restore_key__))  # as a log would have it
        assert digest(other.restore_sample(key)) == digest(batch)


def test_batches_do_not_depend_on_threads_or_prefetching(data: Path) -> None:
    for threads, prefetch in [(1, 1), (2, 1), (3, 4), (1, 7)]:
        check_topology(data, "images", 1, 0, 60, decode_threads=threads, prefetch_factor=prefetch)
        check_topology(data, "images", 2, 2, 30, decode_threads=threads, prefetch_factor=prefetch)
    saved = check_topology(data, "images", 2, 0, 30, [17], decode_threads=3, prefetch_factor=4)[17]
    check_resume(data, "images", saved, 3, 0, 20, decode_threads=2, prefetch_factor=3)


@pytest.mark.parametrize("encoder", ["tensors", "several"])
def test_every_lane_count_resumes(data: Path, encoder: str) -> None:
    """N < L, L = 1, and a state whose number of lanes the configuration does not name."""
    for num_lanes in (1, 5, 48):
        expected = deliver(loaders_of(dataset_of(data, encoder), 1, 0, num_lanes=num_lanes), 60).digests
        saved = deliver(loaders_of(dataset_of(data, encoder), 1, 2, num_lanes=num_lanes), 23, [23]).states[23]
        loaders = loaders_of(dataset_of(data, encoder), 1, 3, state=saved, num_lanes=None)
        assert deliver(loaders, 37).digests == expected[23:]


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


@pytest.mark.parametrize("group_size", [None, 4, 24])
@pytest.mark.parametrize("part", ["tiny", "text", "large"])
def test_fresh_runs_are_one_sequence_on_any_ranks_and_workers(
    data: Path, part: str, group_size: int | None, tmp_path: Path
) -> None:
    """The default number of lanes depends on neither, however small the data is."""
    folder = text_dataset(tmp_path / "tiny", train=[60]) if part == "tiny" else data / part
    dataset = get_train_dataset(folder, batch_size=2, worker_config=config_of(1, 0))
    options = {"num_lanes": None, "microbatches_per_global_batch": group_size}
    streams = {
        tuple(deliver(loaders_of(dataset, ranks, workers, **options), 48 // ranks).digests)
        for ranks, workers in [(1, 0), (1, 4), (2, 2), (4, 1), (4, 3)]
    }
    assert len(streams) == 1
    (stream,) = streams
    assert len(stream) == 48


def test_a_small_dataset_alone_is_one_sequence_on_any_number_of_lanes(data: Path) -> None:
    dataset = train_dataset(data / "text")
    streams = [
        [batch.__key__ for batch in itertools.islice(loaders_of(dataset, 1, 0, num_lanes=lanes)[0], 60)]
        for lanes in (1, 5, 24, 48)
    ]
    assert all(stream == streams[0] for stream in streams)


@pytest.mark.parametrize("counts", [[1], [1, 1], [23], [25]])
def test_fewer_samples_than_lanes(tmp_path: Path, counts: list[int]) -> None:
    dataset = train_dataset(text_dataset(tmp_path / "few", train=counts))
    batches = [next_ for _, next_ in zip(range(48 * sum(counts)), loaders_of(dataset, 1, 0)[0], strict=False)]
    drawn = Counter((key[1], key[2]) for batch in batches for key in batch["__restore_key__"][3])
    assert set(drawn.values()) == {1}  # no sample comes twice in an epoch
    expected = [digest(batch) for batch in batches]
    saved = deliver(loaders_of(dataset, 2, 2), 9, [9]).states[9]
    assert deliver(loaders_of(dataset, 3, 1, state=saved), 10).digests == expected[18:48]


# With worker processes -----------------------------------------------------------------------------------------------


def sampled_pairs(saves: int, resumes: int) -> list[tuple[tuple[int, int], list[tuple[int, int]]]]:
    """Choose pairs in which every number of ranks and of workers saves and resumes."""
    choose = random.Random(3)
    with_workers = [topology for topology in TOPOLOGIES if topology[1]]
    first = [choose.choice([t for t in with_workers if t[0] == ranks]) for ranks in (1, 2, 3, 4, 6, 8)]
    first += choose.sample(sorted(set(with_workers) - set(first)), saves - len(first))
    return [(topology, choose.sample(TOPOLOGIES, resumes)) for topology in first]


PAIRS = sampled_pairs(8, 6)


def test_the_sampled_pairs_are_enough() -> None:
    pairs = [(saved, resumed) for saved, others in PAIRS for resumed in others]
    assert len(pairs) >= 40
    for topologies in zip(*pairs, strict=True):
        assert {ranks for ranks, _ in topologies} == {1, 2, 3, 4, 6, 8}
        assert {1, 2, 3} <= {workers for _, workers in topologies}


@pytest.mark.parametrize(("saved_on", "resumed_on"), PAIRS)
def test_pairs_with_worker_processes(
    data: Path, saved_on: tuple[int, int], resumed_on: list[tuple[int, int]], request: pytest.FixtureRequest
) -> None:
    choose = random.Random(str(saved_on))
    encoder = choose.choice(["skipping", "several", "refusing"])
    steps = range(-(-20 // saved_on[0]) + 1)
    saved = check_topology(data, encoder, *saved_on, len(steps), steps, kind=SavableDataLoader)
    for topology in resumed_on:
        odd = [step for step in steps if saved[step][0] % topology[0]] or steps
        step = choose.choice(odd)
        check_resume(data, encoder, saved[step], *topology, -(-12 // topology[0]) + 1, kind=SavableDataLoader)


def test_in_process_workers_are_what_worker_processes_are(data: Path) -> None:
    """The stand-in of these tests and worker processes deliver the same."""
    for kind in (InProcessLoader, SavableDataLoader):
        check_topology(data, "images", 1, 3, 30, kind=kind)


def test_what_lanes_cannot_keep_busy_is_said_once(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = dataset_of(data, "default")
    for world_size, num_workers in ((4, 2), (5, 0), (12, 3)):
        get_savable_loader(dataset, worker_config=config_of(world_size, num_workers, num_lanes=NUM_LANES))
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "5 data-parallel ranks do not divide 24 lanes, so 4 % of the microbatches are masked (the others do not "
        "change); 4 ranks would waste none",
        "only 2 of 3 workers have a lane to load: 24 lanes, 12 ranks",
    ]
