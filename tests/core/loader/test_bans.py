"""Bans: withdrawn samples do not come from their draw on and are not read, and nothing else changes on any topology."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import signal
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from commands import answer
from engine import (
    ENCODERS,
    NEEDED,
    NUM_LANES,
    TensorEncoder,
    config_of,
    deliver,
    digest,
    is_masked,
    loaders_of,
    numbers_of,
    text_dataset,
    train_dataset,
)
from keyed import BOTH, keyed_dataset, shards, shuffled
from mixing import metadataset, mix_data, mixed
from workers import worker_pids

from energon_bridge import (
    CrudeSample,
    EnergonDataloader,
    EnergonMultiModalDataModule,
    SkipSample,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    load_keys,
)
from energon_bridge.core.errors import ConfigurationError, EmptyDatasetError, StateFormatError, StorageError
from energon_bridge.core.loader.bans import samples_by_key
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.fits import merge
from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.core.loader.saved_run import read
from energon_bridge.core.stream.reader import LeafReader
from energon_bridge.tools.columns.making import add_column

SHARDS = [5, 9, 1, 14, 8]
KEYS = ["00003", "00011", "00012", "00036"]
NUMBERS = set(map(int, KEYS))
STEPS = 8 * NUM_LANES
"""Microbatches of a whole run."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = mix_data(tmp_path_factory.mktemp("bans"))
    text_dataset(root / "text", train=SHARDS, val=SHARDS)
    add_column(root / "text", "number", lambda sample: int(sample.__key__))
    return root


def without(encoder: str, keys: Sequence[str] = KEYS) -> Any:
    """Return an encoder that skips some keys, and is else as one of `ENCODERS`."""
    base = ENCODERS[encoder]
    hook = "preencode_sample" if "preencode_sample" in vars(base) else "encode_sample"

    def skip(self: Any, sample: Any) -> Any:
        if sample.__key__ in keys:
            raise SkipSample
        return getattr(super(made, self), hook)(sample)

    made: Any = type(base.__name__, (base,), {hook: skip})
    return made()


def drawn(dataset: DatasetSpec, microbatches: int) -> dict[int, list[tuple[str, int, int]]]:
    """Return identity, index and epoch of the draws of each lane of a run without bans and hooks, in order."""
    lanes: dict[int, list[tuple[str, int, int]]] = {}
    (loader,) = loaders_of(dataset, 1, 0)
    for batch in islice(loader, microbatches):
        _, lane, _, keys = batch.__restore_key__
        lanes.setdefault(lane, []).extend(key[:3] for key in keys)
    return lanes


MIXES: dict[str, Any] = {
    "one": lambda data: data / "text",
    "weights": lambda data: [(data / "text", 3), (data / "b", 2)],
    "repetitions": lambda data: metadataset(
        data, train={"blend_epochized": [{"path": "./text", "repetitions": 2}, {"path": "./b", "repetitions": 0.5}]}
    ),
    "filter": lambda data: metadataset(data, train={"path": "./text", "filter": "number % 3 == 0"}),
    "subset": lambda data: metadataset(data, train={"path": "./text", "subset": {"range": [3, 30]}}),
}


# What comes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mix", MIXES)
def test_what_comes_is_all_draws_but_the_banned_ones(data: Path, mix: str) -> None:
    """Each lane delivers its draws without the banned ones, from the global draw on, in whole batches."""
    dataset = mixed(data, MIXES[mix], ENCODERS["default"]())
    banned = {leaf.identity: NUMBERS for leaf in dataset.leaves}
    start = 11 * NUM_LANES + 5
    loaders = loaders_of(dataset, 2, 2)
    for loader in loaders:
        assert loader.ban(KEYS, from_draw=start) == start
    found: dict[int, list[tuple[str, int, int]]] = {}
    for batches in zip(*(islice(loader, STEPS // 2) for loader in loaders), strict=True):
        for batch in batches:
            _, lane, _, keys = batch.__restore_key__
            assert len(keys) == 2
            found.setdefault(lane, []).extend(key[:3] for key in keys)
    for lane, draws in drawn(dataset, 2 * STEPS).items():
        expected = [
            draw
            for number, draw in enumerate(draws)
            if number * NUM_LANES + lane < start or draw[1] not in banned[draw[0]]
        ]
        assert found[lane] == expected[: len(found[lane])]
    assert sum(row["banned"] for loader in loaders for row in loader.counters()) > 5


@pytest.mark.parametrize("encoder", ["several", "prepost", "grouping", "refusing"])
def test_a_ban_from_the_beginning_is_a_hook_that_skips(data: Path, encoder: str) -> None:
    expected = deliver(
        loaders_of(train_dataset(data / "text", task_encoder=without(encoder), **NEEDED.get(encoder, {})), 1, 0), 60
    )
    loaders = loaders_of(train_dataset(data / "text", encoder), 1, 2)
    assert loaders[0].ban(KEYS) == 0
    assert deliver(loaders, 60).digests == expected.digests


def test_real_workers_take_back_what_they_made_ahead(data: Path) -> None:
    """Those that take the place of killed ones know the bans, too."""
    dataset = train_dataset(data / "text", "skipping")
    (whole,) = loaders_of(dataset, 1, 0)
    (loader,) = loaders_of(dataset, 1, 2, kind=SavableDataLoader, prefetch_factor=3)
    runs = []
    for one in (whole, loader):
        found = [digest(batch) for batch in islice(one, 50)]
        start = one.ban(KEYS)
        found += [digest(batch) for batch in islice(one, 20)]
        for worker in worker_pids():
            os.kill(worker, signal.SIGKILL)
        found += [digest(batch) for batch in islice(one, 80)]
        runs.append((start, found))
    assert loader.metrics()["worker_restarts"] > 0
    loader.close()
    assert runs[0] == runs[1]
    copied = pickle.loads(pickle.dumps(loader.work(0, frozenset(), False)))  # as spawned workers get it
    assert copied.position.plan.leaves[0].bans.samples.tolist() == sorted(NUMBERS)


@pytest.mark.parametrize("encoder", ["several", "refusing"])
def test_from_the_moment_of_the_call_on_they_do_not_come(data: Path, encoder: str) -> None:
    """Wherever the lanes stand: not one draw later, nor what is left of a draw; also from a draw of long ago."""
    (loader,) = loaders_of(train_dataset(data / "text", encoder), 1, 2)
    sum(1 for _ in islice(loader, 47))
    (other,) = loaders_of(train_dataset(data / "text", encoder), 1, 0, state=loader.save_state_rank())
    loader.ban(KEYS)
    other.ban(KEYS, from_draw=0)
    batches = list(islice(loader, 80))
    assert not any(NUMBERS & {*numbers_of(batch)} for batch in batches)
    assert [digest(batch) for batch in islice(other, 80)] == [digest(batch) for batch in batches]


def test_nothing_of_a_banned_sample_is_read(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not ahead either; one that is banned later is read until then."""
    read_indices: Counter[int] = Counter()
    read_samples = LeafReader.read

    def counted(self: LeafReader, indices: Any, *more: Any) -> list[Any]:
        read_indices.update(indices.tolist())
        return read_samples(self, indices, *more)

    monkeypatch.setattr(LeafReader, "read", counted)
    (loader,) = loaders_of(train_dataset(data / "text", batch_size=4), 1, 0)
    loader.ban(["00003", "00011"])
    loader.ban(["00012"], from_draw=20 * NUM_LANES)
    numbers = [number for batch in islice(loader, 4 * NUM_LANES) for number in numbers_of(batch)]
    assert 12 in numbers
    assert read_indices[12] == numbers.count(12)
    more = [number for batch in islice(loader, 4 * NUM_LANES) for number in numbers_of(batch)]
    assert read_indices[12] == (numbers + more).count(12)
    assert not read_indices.keys() & {3, 11}
    assert read_indices.keys() == {*range(37)} - {3, 11}
    (row,) = loader.counters()
    assert row["banned"] == loader.metrics()["banned"] == row["draws"] - row["samples"]
    assert row["skipped"] == row["excluded"] == 0


def test_what_waits_in_a_pack_buffer_still_comes_and_then_no_more(data: Path) -> None:
    (loader,) = loaders_of(train_dataset(data / "text", "packing"), 1, 0)
    sum(1 for _ in islice(loader, 2 * NUM_LANES))
    state = loader.save_state_rank()
    waiting = {(lane, ref) for lane, one in read(state).lanes.items() for ref in one.held.members[:, 1].tolist()}
    assert waiting & {(lane, number) for lane in range(NUM_LANES) for number in NUMBERS}
    start = loader.ban(KEYS)
    late = []
    for batch in islice(loader, 20 * NUM_LANES):
        _, _, _, rows = batch.__restore_key__
        late.append({index for _, _, members in rows for _, index, _, _ in members} & NUMBERS)
    assert any(late[: 3 * NUM_LANES])
    assert not any(late[10 * NUM_LANES :])
    # All lanes share one buffer, which has made the draws of the lane that has seen most.
    assert start == max(one.draw + (one.taken > 0) for one in read(state).lanes.values())


# Mixes, joins, lines -------------------------------------------------------------------------------------------------


def test_a_key_is_banned_in_all_datasets_or_in_one(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    mix = [(data / "text", 1), (data / "b", 1)]
    for dataset, gone in ((None, {"text", "b"}), (str(data / "b"), {"b"})):
        (loader,) = loaders_of(mixed(data, mix), 1, 0)
        caplog.clear()
        loader.ban(["00003"], dataset=dataset)
        assert ("1 of 1 keys are in several datasets" in caplog.text) == (dataset is None)
        names = {leaf.identity: Path(leaf.dataset.path).name for leaf in loader.spec.leaves}
        keys = (key for batch in islice(loader, 200) for key in batch.__restore_key__[3])
        kept = {names[identity] for identity, index, _, _ in keys if index == 3}
        assert kept == {"text", "b"} - gone


def test_a_dataset_is_named_as_when_it_is_opened(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)
    (loader,) = loaders_of(mixed(data, [(data / "text", 1), (data / "b", 1)]), 1, 0)
    loader.ban(["00003"], dataset="./b/")
    assert loader.save_state_rank()["bans"] == [[0, ["00003"], str(data / "b")]]


def test_a_dataset_that_was_moved_keeps_its_bans(tmp_path: Path) -> None:
    for name in "ab":
        text_dataset(tmp_path / name, train=[9, 11 + (name == "b")])
    (loader,) = loaders_of(mixed(tmp_path, [(tmp_path / "a", 1), (tmp_path / "b", 1)]), 1, 0)
    loader.ban(["00003"], dataset=str(tmp_path / "a"))
    state = loader.save_state_rank()
    shutil.move(tmp_path / "a", tmp_path / "elsewhere")
    dataset = mixed(tmp_path, [(tmp_path / "elsewhere", 1), (tmp_path / "b", 1)])
    (moved,) = loaders_of(dataset, 1, 0, state=state)
    assert moved.save_state_rank()["bans"] == [[0, ["00003"], str(tmp_path / "elsewhere")]]
    (again,) = loaders_of(dataset, 1, 0, state=moved.save_state_rank())
    assert deliver([again], 30).digests == deliver([moved], 30).digests
    assert moved.metrics()["banned"] > 0
    assert {name for name in moved.metrics() if name.startswith("banned/")} == {"banned/elsewhere"}


@pytest.mark.parametrize("key_index", [True, False])
def test_keys_of_any_dataset_are_found(tmp_path: Path, key_index: bool) -> None:
    keys = [f"dir/k_{number}" for number in range(26)]
    one = keyed_dataset(tmp_path / "one", key_index=key_index, train=shards(keys[6:], 3, 17), val=[keys[:6]])
    (tmp_path / "lines.jsonl").write_text("".join(f'{{"number": {number}}}\n' for number in range(30)))
    gone = ["dir/k_8", "dir/k_25"]
    (loader,) = loaders_of(get_train_dataset(one, batch_size=3, worker_config=config_of(1, 0)), 1, 0)
    loader.ban(gone)
    assert {key for batch in islice(loader, 100) for key in batch["__key__"]} == {*keys[6:]} - {*gone}
    said = (
        rf"1 of 2 keys are not in what this loader reads, {one} \(train\): 'dir/k_0'.*ignore_unknown=True, which bans"
    )
    with pytest.raises(ConfigurationError, match=said):
        loader.ban(["dir/k_9", keys[0]])  # it is in another part of the split
    dataset = get_train_dataset(tmp_path / "lines.jsonl", batch_size=3, worker_config=config_of(1, 0))
    (lines,) = loaders_of(dataset, 1, 0)
    with pytest.raises(ConfigurationError, match=r"3 of 3 keys are not in .*: '30', '07', '-1'"):
        lines.ban(["30", "07", "-1"])
    lines.ban(["0", "7", "29"])
    assert {key for batch in islice(lines, 200) for key in batch["__key__"]} == {*map(str, range(1, 29))} - {"7"}
    assert isinstance(next(iter(lines)), (dict, CrudeSample))


def test_keys_that_a_dataset_has_twice_are_both_banned(tmp_path: Path) -> None:
    twice = keyed_dataset(tmp_path / "twice", key_index=False, train=[["a", "b", "c"], ["d", "b", "e"]])
    (loader,) = loaders_of(get_train_dataset(twice, batch_size=2, worker_config=config_of(1, 0)), 1, 0)
    loader.ban(["b"])
    assert {key for batch in islice(loader, 100) for key in batch["__key__"]} == {*"acde"}


def test_a_row_of_a_join_is_banned_by_the_key_of_its_primary(tmp_path: Path) -> None:
    keys = [f"k{number:02d}" for number in range(20)]
    keyed_dataset(tmp_path / "a", train=shards(keys, 7, 13))
    keyed_dataset(tmp_path / "b", train=shards(shuffled(keys[4:]), 5, 11))
    mix = metadataset(tmp_path, train={"join": [{"path": "./a"}, {"path": "./b", "nonmatch": "skip"}], "joiner": BOTH})
    dataset = get_train_dataset(mix, batch_size=2, worker_config=config_of(1, 0))
    (whole,) = loaders_of(dataset, 1, 0)
    with pytest.raises(ConfigurationError, match="'k00'"):  # dropped by the join
        whole.ban(["k00"])
    whole.ban(["k05", "k19"])
    assert {key for batch in islice(whole, 60) for key in batch["__key__"]} == {*keys[4:]} - {"k05", "k19"}


# Passes --------------------------------------------------------------------------------------------------------------


def delivered(loaders: Sequence[SavableDataLoader], steps: int | None = None) -> list[list[int]]:
    """Return the numbers of the valid rows of each microbatch of a pass, or of some steps of it."""
    columns = zip(*(islice(loader, steps) for loader in loaders), strict=True)
    return [numbers_of(batch) for row in columns for batch in row if not is_masked(batch)]


def validation(data: Path, **kwargs: Any) -> DatasetSpec:
    return get_val_dataset(data / "text", batch_size=4, worker_config=config_of(1, 0), **kwargs)


@pytest.mark.parametrize(("ranks", "workers"), [(2, 2), (4, 0)])
def test_validation_leaves_them_out_at_once(data: Path, ranks: int, workers: int) -> None:
    """The other rows stay in their microbatches, in this pass and those that follow."""
    whole = [list(range(first, min(first + 4, 37))) for first in range(0, 37, 4)]
    banned = [[number for number in numbers if number not in NUMBERS] for numbers in whole]
    assert [] in banned  # that of the last sample: masked
    banned = [numbers for numbers in banned if numbers]
    loaders = loaders_of(validation(data), ranks, workers)
    steps = 1 if ranks == 4 else 2
    head = delivered(loaders, steps)
    assert head == whole[: steps * ranks]
    states = [loader.save_state_rank() for loader in loaders]
    for loader in loaders:
        assert loader.ban(KEYS) == 0
    assert delivered(loaders) == banned
    (resumed,) = loaders_of(validation(data), 1, 0, state=states)
    resumed.ban(KEYS)
    (other,) = loaders_of(validation(data), 1, 0, state=resumed.save_state_rank())
    assert delivered([resumed]) == delivered([other]) == banned[steps * ranks :]
    with pytest.raises(ConfigurationError, match="leave it out for validation"):
        resumed.ban(["00001"], from_draw=3)


@pytest.mark.parametrize("encoder", ["packing", "grouping"])
def test_validation_in_packs_or_groups_is_put_together_without_them(data: Path, encoder: str) -> None:
    settings = {"packing_buffer_size": 11} if encoder == "packing" else {}
    dataset = validation(data, task_encoder=grouping() if encoder == "grouping" else ENCODERS[encoder](), **settings)
    skips = validation(data, task_encoder=grouping(KEYS) if encoder == "grouping" else without(encoder), **settings)
    expected = [digest(batch) for batch in loaders_of(skips, 1, 0)[0]]
    (loader,) = loaders_of(dataset, 1, 2)
    batches = iter(loader)
    next(batches)
    with pytest.raises(ConfigurationError, match="a packed or grouped pass fixes its rows"):
        loader.ban(KEYS)
    sum(1 for _ in batches)
    loader.ban(KEYS)
    state = loader.save_state_rank()
    assert [digest(batch) for batch in loader] == expected
    assert [digest(batch) for batch in loaders_of(dataset, 1, 0, state=state)[0]] == expected


def grouping(keys: Sequence[str] = ()) -> Any:
    """Return an encoder that groups by length, in batches of one size, without some keys."""

    class Groups(TensorEncoder):
        def encode_sample(self, sample: Any) -> Any:
            if sample.__key__ in keys:
                raise SkipSample
            return super().encode_sample(sample)

        def batch_group_criterion(self, sample: Any) -> tuple[Any, int | None]:
            return len(sample.noise), None

    return Groups()


@pytest.mark.parametrize("encoder", ["default", "packing"])
def test_training_by_passes(data: Path, encoder: str) -> None:
    """From the first undelivered draw on; of passes that are packed, from the next pass on. The state knows."""
    dataset = train_dataset(data / "text", encoder, repeat=False)
    (loader,) = loaders_of(dataset, 1, 0)
    head = [digest(batch) for batch in islice(loader, 3)]
    start = loader.ban(KEYS)
    assert start == (37 if encoder == "packing" else 6)
    state = loader.save_state_rank()
    (other,) = loaders_of(dataset, 1, 2, state=state)
    passes = [[digest(batch) for batch in one] for one in (loader, loader)]
    assert [[digest(batch) for batch in one] for one in (other, other)] == passes
    (first,) = loaders_of(dataset, 1, 0)
    first.ban(KEYS, from_draw=start)
    assert [digest(batch) for batch in first] == head + passes[0]
    assert passes[0] != passes[1]


# States --------------------------------------------------------------------------------------------------------------


def banned_state(data: Path) -> dict[str, Any]:
    (loader,) = loaders_of(mixed(data, [(data / "a", 1), (data / "b", 1)]), 1, 0)
    sum(1 for _ in islice(loader, 30))
    loader.ban(["00007", "00003"])
    loader.ban(["00005"], from_draw=1000, dataset=str(data / "b"))
    loader.ban(["00001"], from_draw=1000)
    return loader.save_state_rank()


def test_the_state_says_which_keys_from_which_draw_on(data: Path) -> None:
    state = banned_state(data)
    assert state["bans"] == [[54, ["00003", "00007"]], [1000, ["00001"]], [1000, ["00005"], str(data / "b")]]
    assert state["format_version"] == 1
    (loader,) = loaders_of(mixed(data, [(data / "a", 1), (data / "b", 1)]), 1, 0, state=state)
    assert loader.save_state_rank() == state
    loader.restore_state_rank(merge([state]))
    assert loader.ban(["00003"], from_draw=500) == 500
    assert loader.ban(["00005"], from_draw=1200, dataset=str(data / "b")) == 1200
    assert loader.save_state_rank() == state, "they are banned by then already"
    loader.ban(["00005"])
    assert loader.save_state_rank()["bans"][0] == [54, ["00003", "00005", "00007"]]


def test_a_resume_looks_no_key_up(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The state says which samples they are; only what is new in the mix is searched for them."""
    state = banned_state(data)
    (tmp_path / "state.json").write_text(json.dumps(state))
    searched: list[str] = []

    def search(dataset: Any, keys: Any) -> Any:
        searched.append(Path(dataset.path).name)
        return samples_by_key(dataset, keys)

    monkeypatch.setattr("energon_bridge.core.loader.bans.samples_by_key", search)
    (loader,) = loaders_of(mixed(data, [(data / "a", 1), (data / "b", 1)]), 1, 0, state=state)
    loader.ban(["00003"])
    answer("which", tmp_path / "state.json", "--step", 40)
    assert searched == []
    (loader,) = loaders_of(mixed(data, [(data / "b", 1), (data / "c", 1)]), 1, 0)
    loader.restore_state_rank(state, on_mismatch="adapt")
    assert {*searched} == {"c"}
    assert f"{data / 'c'}: 3 of its samples are banned, too" in caplog.text
    assert caplog.text.count("banned, too") == 1, "those of b were known"
    assert not any({3, 7} & {*numbers_of(batch)} for batch in islice(loader, 100))


def test_ranks_that_ban_differently_are_found_out(data: Path) -> None:
    loaders = loaders_of(train_dataset(data / "text"), 2, 0)
    loaders[1].ban(["00003"], from_draw=0)
    with pytest.raises(StateFormatError, match="state 1 belongs to another run than state 0: bans"):
        merge([loader.save_state_rank() for loader in loaders])


# What is refused -----------------------------------------------------------------------------------------------------


def test_bans_that_cannot_be(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    (loader,) = loaders_of(train_dataset(data / "text"), 1, 0)
    for _ in islice(loader, 30):
        pass
    state = loader.save_state_rank()
    unknown = ["x", "00003", "y", "z", "u", "v", "w"]
    with pytest.raises(ConfigurationError, match=r"6 of 7 keys are not in .*: 'x', 'y', 'z', 'u', 'v' and 1 more"):
        loader.ban(unknown)
    with pytest.raises(ConfigurationError, match=r"dataset='/nowhere' is not the path of a dataset .* has .*text"):
        loader.ban(["00003"], dataset="/nowhere")
    for keys, message in (
        ("00003", "keys must be a list of sample keys"),
        ([3], "a sample key must be a non-empty string, got 3"),
        ([""], "got ''"),
        (7, "keys must be a list"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            loader.ban(keys)  # type: ignore[arg-type]
    for draw in (1.5, -1, True, 2**60):
        with pytest.raises(ConfigurationError, match=f"from_draw must be an integer of at least 0, got {draw}"):
            loader.ban(["00003"], from_draw=draw)  # type: ignore[arg-type]
    with pytest.raises(EmptyDatasetError, match=r"nothing would be left of .*text: all 37 samples would be banned"):
        loader.ban([f"{number:05d}" for number in range(37)])
    (ranked, _) = loaders_of(train_dataset(data / "text"), 2, 0)
    with pytest.raises(ConfigurationError, match="ban: pass the same from_draw on every rank"):
        ranked.ban(["00003"])
    assert loader.ban([]) == 54
    assert loader.save_state_rank() == state, "nothing of it has changed anything"
    with caplog.at_level(logging.WARNING):
        loader.ban(unknown, ignore_unknown=True)
    assert f"6 of 7 keys are not in what this loader reads, {data / 'text'} (train): 'x', 'y'" in caplog.text
    assert loader.save_state_rank()["bans"] == [[54, sorted(unknown)]]


@pytest.mark.parametrize("num_lanes", [4, 48])
def test_a_ban_in_a_small_dataset_that_is_not_shuffled_ends_no_lane(data: Path, num_lanes: int) -> None:
    """Each of its lanes comes to some of the 12 samples only."""
    dataset = train_dataset(data / "a", batch_size=1, shuffle_over_epochs_multiplier=None)
    gone = {3, 7, 11}
    runs = []
    for legs in ([(1, 96)], [(1, 8), (2, 20), (4, 12)]):
        found: list[int] = []
        states: list[Any] = []
        for ranks, steps in legs:
            loaders = loaders_of(dataset, ranks, 0, num_lanes=num_lanes)
            for loader in loaders:
                if states:
                    loader.restore_state_rank(states)
                loader.ban([f"{number:05d}" for number in gone], from_draw=5)
            streams = [iter(loader) for loader in loaders]
            found += [number for _ in range(steps) for stream in streams for number in numbers_of(next(stream))]
            states = [loader.save_state_rank() for loader in loaders]
        runs.append(found)
    assert runs[0][:5] == [0, 1, 2, 3, 4]
    assert {*runs[0][5:]} == {*range(12)} - gone
    assert runs[1] == runs[0]


def test_a_run_of_which_nothing_is_left_ends(data: Path) -> None:
    """A dataset may be banned as a whole beside others; where the others are never drawn from, the run says so."""
    (loader,) = loaders_of(mixed(data, [(data / "a", 1), (data / "b", 0)]), 1, 0)
    loader.ban([f"{number:05d}" for number in range(12)], dataset=str(data / "a"))
    with pytest.raises(EmptyDatasetError, match="were skipped, excluded, banned or failed"):
        next(iter(loader))
    (loader,) = loaders_of(mixed(data, [(data / "a", 1), (data / "b", 1)]), 1, 0)
    loader.ban([f"{number:05d}" for number in range(12)], dataset=str(data / "a"))
    assert {identity for batch in islice(loader, 50) for identity, *_ in batch.__restore_key__[3]} == {
        leaf.identity for leaf in loader.spec.leaves if leaf.dataset.path == str(data / "b")
    }


# Files, other loaders --------------------------------------------------------------------------------------


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "notepad.txt").write_bytes(b"\xef\xbb\xbf00003\r\n00007\r\n")
    assert load_keys(tmp_path / "notepad.txt") == ["00003", "00007"]
    path = tmp_path / "withdrawn.txt"
    path.write_text("# asked for on Monday\n\n00003\n  dir/00011.x \r\n#00005\n00003\nsmile-ü\n", encoding="utf-8")
    assert load_keys(path) == load_keys(str(path)) == ["00003", "dir/00011.x", "smile-ü"]
    path.write_text("00003 # blurred face\n00004\t#\na#1\nphoto #2\n  # only a note # and more\n")
    assert load_keys(path) == ["00003", "00004", "a#1", "photo #2"]
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(StorageError, match="expected UTF-8 text with one key per line"):
        load_keys(path)
    with pytest.raises(Exception, match=r"gone\.txt"):
        load_keys(tmp_path / "gone.txt")


def test_through_the_dataloader_and_the_data_module(data: Path) -> None:
    dataset = train_dataset(data / "text", "default")
    (whole,) = loaders_of(dataset, 1, 0)
    whole.ban(KEYS, from_draw=50 * 2)
    expected = [numbers_of(batch) for batch in islice(whole, 120)]
    loader = EnergonDataloader(get_savable_loader(dataset))
    found = [numbers_of(next(loader)) for _ in range(20)]
    assert loader.ban(KEYS, from_draw=100) == 100
    found += [numbers_of(next(loader)) for _ in range(100)]
    assert found == expected
    settings: dict[str, Any] = {"num_workers": 0, "seed": 3, "task_encoder": ENCODERS["default"]()}
    module, again = (
        EnergonMultiModalDataModule(str(data / "text"), None, None, micro_batch_size=2, **settings) for _ in range(2)
    )
    stream = iter(module.train_dataloader())
    next(stream)
    module.ban(KEYS)
    again.load_state_dict(json.loads(json.dumps(module.state_dict())))
    rest = [numbers_of(next(stream)) for _ in range(60)]
    assert [numbers_of(batch) for batch in islice(again.train_dataloader(), 60)] == rest
    assert not NUMBERS & {number for numbers in rest for number in numbers}
    module.close()
    again.close()


def test_iterators_that_share_a_loader_all_know_a_ban(data: Path) -> None:
    loader = EnergonDataloader(get_savable_loader(validation(data)), cycle=True)
    first, second = iter(loader), iter(loader)
    assert numbers_of(next(first)) == numbers_of(next(second)) == [0, 1, 2, 3]
    loader.ban([*KEYS, "00005"])
    assert numbers_of(next(first)) == numbers_of(next(second)) == [4, 6, 7]
    assert numbers_of(next(first)) == [8, 9, 10]
