"""States: small, plain, cheap to write and to resume from, and refused by name where they do not fit."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine import (
    NUM_LANES,
    InProcessLoader,
    TensorEncoder,
    config_of,
    deliver,
    loaders_of,
    text_dataset,
    train_dataset,
    with_prepared,
)
from hypothesis import given, strategies as st
from made import made_once

from energon_bridge import get_savable_loader, get_val_dataset
from energon_bridge.core.errors import (
    BatchSizeMismatchError,
    ConfigurationError,
    DatasetMismatchError,
    LoaderError,
    MissingRankError,
    OrderVersionError,
    SeedMismatchError,
    SettingMismatchError,
    SliceSizeMismatchError,
    SplitMismatchError,
    StateError,
    StateFormatError,
    StateVersionError,
    StepMismatchError,
    TooManyRanksError,
)
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.saved_run import FORMAT_VERSION, decode_column, encode_column, sign, write_lanes
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.core.stream.lane_state import LaneState
from energon_bridge.tools.check.state_summary import rank_of
from energon_bridge.tools.testing import write_shard

SHARDS = [5, 9, 1, 14, 8]
data = made_once(text_dataset, train=SHARDS, val=SHARDS)


def states_after(dataset: DatasetSpec, steps: int, world_size: int = 1, **kwargs: Any) -> list[Any]:
    return deliver(loaders_of(dataset, world_size, 0, **kwargs), steps, [steps]).states[steps]


class CountingStore:
    """A store that counts the bytes that are read through it."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, rel: str) -> bytes:
        return self._count(self._store.read(rel))

    def read_range(self, rel: str, offset: int, length: int) -> bytes:
        return self._count(self._store.read_range(rel, offset, length))

    def read_ranges(self, rel: str, offsets: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
        return [self._count(data) for data in self._store.read_ranges(rel, offsets, lengths)]

    def _count(self, data: bytes) -> bytes:
        self.bytes += len(data)
        return data


def counted(dataset: DatasetSpec) -> tuple[DatasetSpec, CountingStore]:
    """Return the dataset over a store that counts."""
    store = CountingStore(dataset.leaves[0].dataset.store)
    return with_prepared(dataset, store=store), store


# Refusals ------------------------------------------------------------------------------------------------------------


def edited(**entries: Any) -> Callable[[Any], Any]:
    return lambda state: sign(state | entries)


REFUSED: list[tuple[str, dict[str, Any], Callable[[Any], Any], type[StateError], str]] = [
    ("seed", {"worker_config": {"seed": 1}}, edited(), SeedMismatchError, "seed=0, this run has seed=1"),
    ("batch", {"batch_size": 3}, edited(), BatchSizeMismatchError, "batch_size=2, this run has batch_size=3"),
    (
        "remedy",
        {"batch_size": 3},
        edited(),
        BatchSizeMismatchError,
        r"; set batch_size=2 (\(data\.micro_batch_size\) )?to resume",
    ),
    ("slice", {"max_samples_per_sequence": 5}, edited(), SliceSizeMismatchError, "max_samples_per_sequence=4"),
    ("shard", {"max_samples_per_sequence": None}, edited(), SliceSizeMismatchError, "max_samples_per_sequence=None"),
    ("buffer", {"shuffle_buffer_size": 6}, edited(), SettingMismatchError, "shuffle_buffer_size=5, this run has"),
    ("order", {"shuffle_over_epochs_multiplier": None}, edited(), SettingMismatchError, "shuffle=True"),
    (
        "split",
        {"split_part": "val"},
        edited(),
        SplitMismatchError,
        "split 'train' of .* reads split 'val' .*set split_part='train'",
    ),
    ("order version", {}, edited(order_version=2), OrderVersionError, "order version 2.* by version 1"),
    ("old order version", {}, edited(order_version=0), OrderVersionError, "order version 0.* by version 1"),
    (
        "newer format",
        {},
        edited(format_version=FORMAT_VERSION + 1),
        StateVersionError,
        "version 2, .* reads version 1: upgrade",
    ),
    ("other format", {}, edited(format="other"), StateFormatError, "expected format .* found 'other'"),
    ("no dictionary", {}, lambda state: 7, StateFormatError, "found 'int'"),
    ("none", {}, lambda state: None, StateFormatError, "found 'NoneType'. Pass what save_state_rank, .* no state yet"),
    ("empty", {}, lambda state: {}, StateFormatError, "found None. Pass what save_state_rank, save_state_global or"),
    ("inside", {}, lambda state: {"step": 5, "loader": state}, StateFormatError, "Its key 'loader' holds one"),
    ("path", {}, lambda state: "runs/5.pt", StateFormatError, r"For a path, give what torch\.load\(path\)"),
    ("finite", {}, edited(kind="finite"), StateFormatError, "a finite stream, but .* a train one: restore it into a"),
    (
        "truncated",
        {},
        lambda state: {name: value for name, value in state.items() if name != "lanes"},
        StateFormatError,
        "it has no lanes",
    ),
    (
        "without bans",
        {},
        lambda state: sign({name: value for name, value in state.items() if name not in ("bans", "banned")}),
        StateFormatError,
        "it has no banned, bans",
    ),
    (
        "moved",
        {},
        edited(microbatches=8),
        StateFormatError,
        "lane 7 has delivered 0 microbatches, .* should have delivered 1",
    ),
]


@pytest.mark.parametrize(
    ("kwargs", "edit", "error", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_a_foreign_state_is_refused_by_name(
    data: Path, kwargs: dict[str, Any], edit: Callable[[Any], Any], error: type[StateError], message: str
) -> None:
    (state,) = states_after(train_dataset(data), 7)
    config = kwargs.get("worker_config", {})
    dataset = train_dataset(data, **(kwargs | {"worker_config": config_of(1, 0, **config)}))
    loader = get_savable_loader(dataset)
    kept = loader.save_state_rank()
    with pytest.raises(StateError, match=message) as raised:
        loader.restore_state_rank(edit(copy.deepcopy(state)))
    assert type(raised.value) is error
    assert loader.save_state_rank() == kept  # a refused state changes nothing


@pytest.mark.parametrize("change", ["more samples", "another size", "fewer shards", "another order", "an exclude"])
def test_a_state_of_other_data_is_refused(data: Path, tmp_path: Path, change: str) -> None:
    (state,) = states_after(train_dataset(data), 7)
    counts = {"more samples": [*SHARDS[:-1], 9], "fewer shards": SHARDS[:-1], "another order": SHARDS[::-1]}
    other = text_dataset(tmp_path / "other", train=counts.get(change, SHARDS))
    if change == "another size":
        write_shard(other / "train" / "shard_002.tar", {"00014": {"txt": b"x" * 20_000}})
    if change == "an exclude":
        split = other / ".nv-meta" / "split.yaml"
        text = split.read_text().replace("exclude: []", "exclude: [train/shard_000.tar/00003]")
        assert "00003" in text
        split.write_text(text)
    loader = get_savable_loader(train_dataset(other))
    with pytest.raises(DatasetMismatchError) as raised:
        loader.restore_state_rank(state)
    lines = str(raised.value).splitlines()
    assert lines[1].startswith(f"  - {data} [train], 37 samples, identity ")
    assert lines[2].startswith(f"  + {other} [train], {sum(counts.get(change, SHARDS))} samples, identity ")
    assert lines[1].split("identity ")[1] != lines[2].split("identity ")[1]


def test_missing_ranks_and_different_steps_are_refused(data: Path, tmp_path: Path) -> None:
    dataset = train_dataset(data)
    states = deliver(loaders_of(dataset, 4, 0), 6, [5, 6]).states
    (loader,) = loaders_of(dataset, 1, 0)
    for missing in (states[5][1:], [states[5][2]], states[5][2]):
        with pytest.raises(MissingRankError, match=r"the state holds \d+ of 24 lanes; this rank needs lanes \["):
            loader.restore_state_rank(missing)
    with pytest.raises(StepMismatchError, match=r"state 0 after 20 microbatches .* state 3 after 24"):
        loader.restore_state_rank([*states[5][:3], states[6][3]])
    with pytest.raises(StateFormatError, match=r"no state given\. Pass what save_state_rank,"):
        loader.restore_state_rank([])
    with pytest.raises(MissingRankError):  # the state of another rank
        loaders_of(dataset, 4, 0)[1].restore_state_rank(states[5][0])
    other = states_after(train_dataset(data, worker_config=config_of(1, 0, seed=3)), 20, seed=3)
    with pytest.raises(StateFormatError, match="state 1 belongs to another run than state 0: seed: 0 and 3"):
        loader.restore_state_rank([states[5][0], *other])
    other = states_after(train_dataset(text_dataset(tmp_path / "other", train=[71])), 20)
    with pytest.raises(StateFormatError, match="state 1 belongs to another run than state 0: leaves"):
        loader.restore_state_rank([states[5][0], *other])


@pytest.mark.parametrize("ranks", [4, 5])
def test_a_state_tells_its_rank(data: Path, ranks: int) -> None:
    dataset = train_dataset(data)
    for before in (0, 3):  # microbatches that one rank delivered
        loaders = loaders_of(dataset, ranks, 0, state=states_after(dataset, before))
        states = deliver(loaders, 2, [2]).states[2]
        assert [rank_of(state) for state in states] == [(rank, ranks) for rank in range(ranks)]


def test_more_ranks_than_lanes_are_refused(data: Path) -> None:
    dataset = train_dataset(data)
    states = states_after(dataset, 3, num_lanes=2)
    loaders = loaders_of(dataset, 3, 0, num_lanes=None)
    for loader in loaders:
        with pytest.raises(TooManyRanksError, match=r"3 data-parallel ranks cannot share 2 lanes .* at most 2 ranks"):
            loader.restore_state_rank(states)


def test_a_validation_state_does_not_fit_a_training_stream(data: Path) -> None:
    validation = get_savable_loader(get_val_dataset(data, batch_size=2, worker_config=config_of(1, 0)))
    training = get_savable_loader(train_dataset(data))
    with pytest.raises(StateFormatError, match="to a finite stream"):
        training.restore_state_rank(validation.save_state_rank())
    with pytest.raises(StateFormatError, match="to a train stream"):
        validation.restore_state_rank(training.save_state_rank())


def test_a_global_state_needs_to_reach_the_ranks(data: Path) -> None:
    loader = loaders_of(train_dataset(data), 2, 0)[1]
    with pytest.raises(LoaderError, match=r"save_state_global needs torch\.distributed"):
        loader.save_state_global()
    with pytest.raises(ConfigurationError, match="pass a state, or the src_rank"):
        loader.restore_state_global(None)
    assert loader.state_dict() == loader.save_state_rank()


# Content -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-(2**62), 2**62), max_size=300))
def test_columns_round_trip(numbers: list[int]) -> None:
    assert decode_column(encode_column(numbers), len(numbers)).tolist() == numbers


@pytest.mark.parametrize(("num_samples", "buffer"), [(37, 0), (10**9, 10**6)])
def test_a_state_of_24_lanes_is_small(data: Path, num_samples: int, buffer: int) -> None:
    dataset = train_dataset(data, shuffle_buffer_size=buffer, max_samples_per_sequence=100)
    shards = np.full(max(1, num_samples // 10_000), min(num_samples, 10_000), dtype=np.int64)
    loader = get_savable_loader(with_prepared(dataset, shard_counts=shards, num_samples=num_samples))
    # After 10^10 microbatches, in lanes whose draws have spread as skips would spread them.
    choose, m = random.Random(0), 10**10
    lanes = {}
    for lane in range(NUM_LANES):
        count, draw = -((lane - m) // NUM_LANES), 9 * 10**8 + choose.randrange(10**7)
        lanes[lane] = LaneState(count, draw, choose.randrange(4), (draw,))
    state = sign(loader.save_state_rank() | {"microbatches": m, "lanes": write_lanes(lanes)})
    loader.restore_state_rank(state)
    assert loader.save_state_rank() == state
    assert len(json.dumps(state)) < 4096


def test_saving_reads_and_encodes_nothing(data: Path) -> None:
    encoder = CountingEncoder()
    dataset, store = counted(train_dataset(data, task_encoder=encoder))
    loader = InProcessLoader(dataset, worker_config=config_of(1, 2))
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    before = store.bytes, encoder.calls
    state = loader.save_state_rank()
    assert all(loader.save_state_rank() == state for _ in range(10))
    assert (store.bytes, encoder.calls) == before
    assert before > (0, 0)


# Resuming ------------------------------------------------------------------------------------------------------------


class CountingEncoder(TensorEncoder):
    """Counts the samples that are encoded."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def encode_sample(self, sample: Any) -> Any:
        self.calls += 1
        return super().encode_sample(sample)


class CountingThriceEncoder(CountingEncoder):
    """Yields three samples of each, so that a state may stand inside a draw."""

    def encode_sample(self, sample: Any) -> Any:
        encoded = super().encode_sample(sample)
        yield from (encoded, encoded, encoded)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples of several kilobytes, so that they and not the index decide how much is read."""
    folder = tmp_path_factory.mktemp("large")
    text_dataset(folder, train=[1])  # writes the metadata's form
    for shard in range(8):
        samples = {f"{n:05d}": {"txt": b"%06d " % n * 600} for n in range(50 * shard, 50 * shard + 50)}
        write_shard(folder / "train" / f"shard_{shard:03d}.tar", samples)
    prepare_dataset(folder, split=parse_patterns(["train:train/.*"]), key_index=False)
    return folder


@pytest.mark.parametrize(
    ("encoder", "world_size", "num_lanes"), [(CountingEncoder, 1, 1), (CountingThriceEncoder, 3, 4)]
)
def test_a_resume_costs_no_more_than_a_fresh_start(
    large: Path, encoder: type[CountingEncoder], world_size: int, num_lanes: int
) -> None:
    """Bytes read and samples encoded before the first batch, whatever was consumed before."""
    settings = {"batch_size": 16, "shuffle_buffer_size": 100, "max_samples_per_sequence": 25}

    def cost(state: Any, rank: int) -> tuple[int, int]:
        counting = encoder()
        dataset, store = counted(train_dataset(large, task_encoder=counting, **settings))
        loader = loaders_of(dataset, world_size, 0, num_lanes=num_lanes, state=state)[rank]
        next(iter(loader))
        return store.bytes, counting.calls

    dataset = train_dataset(large, task_encoder=encoder(), **settings)
    fresh = np.mean([cost(None, rank) for rank in range(world_size)], axis=0)
    saved = deliver(loaders_of(dataset, 1, 0, num_lanes=num_lanes), 90, range(1, 90, 22)).states
    for states in saved.values():
        resumed = np.mean([cost(states, rank) for rank in range(world_size)], axis=0)
        assert (resumed <= 1.3 * fresh).all(), (states[0]["microbatches"], resumed / fresh)
