"""`group_by` with packs: all packs of a global batch come from one bucket (with pictures or without), on any ranks."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from engine import PackingEncoder, PrePostEncoder, comparable, config_of, digest, loaders_of, text_dataset

from energon_bridge import Blender, DefaultTaskEncoder, Packer, SkipSample, TextSample, add_column, get_train_dataset
from energon_bridge.core.errors import ConfigurationError, SettingMismatchError, StateFormatError
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.fits import merge
from energon_bridge.core.loader.saved_run import read_leaves
from energon_bridge.core.stream.conventions import Conventions

LANES = 4
SAMPLES = 1000
BUFFER = 16
ROOM = 128
BY_PICTURES = "images > 0"
BY_ROOM = f"{ROOM} / tokens"


def images_of(number: int) -> int:
    return (1, 3, 0, 0, 0)[number % 5]


def tokens_of(number: int) -> int:
    return 40 + number * 53 % 60 if images_of(number) else 4 + number * 37 % 40


def number_of(sample: Any) -> int:
    return int(sample.__key__.rpartition("/")[2])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bucket_packs")
    for name, counts in {"a": [600, 400], "b": [90, 60]}.items():
        path = str(text_dataset(folder / name, train=counts))
        add_column(path, "images", lambda sample: images_of(number_of(sample)), made_of="images")
        add_column(path, "tokens", lambda sample: tokens_of(number_of(sample)), made_of="tokens")
    return folder


class Packs(DefaultTaskEncoder):
    """Packs samples into rows of 128 tokens; a pack's key names its samples."""

    packer: Packer[Any] = Packer(limits={"tokens": ROOM}, size_of=lambda sample: tokens_of(number_of(sample)))

    def encode_sample(self, sample: TextSample) -> Any:
        return self.packer.admitted(sample)

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return self.packer.select(samples)

    def pack_selected_samples(self, pack: list[Any]) -> TextSample:
        return TextSample(__key__=" ".join(one.__key__ for one in pack), text=" ".join(one.text for one in pack))


class Parts(Packs):
    """Makes two samples of some."""

    def encode_sample(self, sample: TextSample) -> Iterator[Any]:
        yield sample
        if number_of(sample) % 3 == 0:
            yield sample

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[place : place + 3] for place in range(0, len(samples) * 2 // 3, 3)]


def opened(source: Any, encoder: Any = None, **kwargs: Any) -> DatasetSpec:
    settings: dict[str, Any] = {
        "batch_size": 1,
        "packing_buffer_size": BUFFER,
        "group_by": BY_PICTURES,
        "bucket_batch_size": BY_ROOM,
        "worker_config": config_of(1, 0),
    }
    source = str(source) if isinstance(source, Path) else source
    return get_train_dataset(source, task_encoder=encoder or Packs(), **(settings | kwargs))


def ranks_of(dataset: DatasetSpec, ranks: int = 1, workers: int = 0, **kwargs: Any) -> list[Any]:
    return loaders_of(dataset, ranks, workers, num_lanes=None, microbatches_per_global_batch=LANES, **kwargs)


def members(batch: Any) -> list[tuple[str, int]]:
    """Return the dataset and the sample of all samples in a microbatch."""
    return [sample[:2] for _, _, pack in batch.__restore_key__[3] for sample in pack]


def has_pictures(batch: Any) -> bool:
    (found,) = {images_of(number) > 0 for _, number in members(batch)}
    return found


def test_all_or_none_of_a_global_batch_have_pictures_and_samples_come_equally_often(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A pack of 128 tokens holds two pictures and has room left, so by tokens alone they come more seldom."""
    sizes: Any = BY_ROOM
    state = None
    for tolerance in (0.15, 0.04):
        caplog.clear()
        dataset = opened(data / "a", bucket_batch_size=sizes)
        assert dataset.buckets.names == ("True", "False")
        (loader,) = ranks_of(dataset)
        if state is not None:
            loader.restore_state_rank(state, on_mismatch="adapt")
        stream = iter(loader)
        seen: Counter[int] = Counter()
        taken: dict[str, list[int]] = {"False": [], "True": []}
        while seen.total() < 8 * SAMPLES:
            batches = [next(stream) for _ in range(LANES)]
            (pictures,) = {has_pictures(batch) for batch in batches}
            for batch in batches:
                numbers = [number for _, number in members(batch)]
                assert len(set(numbers)) == len(numbers)
                assert sum(map(tokens_of, numbers)) <= ROOM
                seen.update(numbers)
                taken[str(pictures)].append(len(numbers))
        epochs = {}
        for name in taken:
            times = [seen[number] for number in range(SAMPLES) if str(images_of(number) > 0) == name]
            assert max(times) - min(times) <= 2  # lanes leave an epoch at different times
            epochs[name] = sum(times) / len(times)
        assert epochs["True"] == pytest.approx(epochs["False"], rel=tolerance)
        said = [text for record in caplog.records if "group_by" in (text := record.getMessage())]
        assert len(said) == (sizes is BY_ROOM)
        if said:
            shown = {row["subset"].rpartition(" ")[2]: row["epochs"] for row in loader._position.rows()}
            assert shown == {name: pytest.approx(number, rel=0.02) for name, number in epochs.items()}
            state = loader.save_state_rank()
            (better,) = re.findall(r"set bucket_batch_size=(\{.*\}) in a new run", said[0])
            sizes = json.loads(better.replace("'", '"'))
            assert sizes == {name: pytest.approx(sum(counts) / len(counts), rel=0.02) for name, counts in taken.items()}
            (often,) = re.findall(r"those of True ([0-9.]+) times as often", said[0])
            assert float(often) == pytest.approx(epochs["True"] / (seen.total() / SAMPLES), rel=0.02)


def test_a_bucket_is_the_packs_of_its_samples_alone(data: Path) -> None:
    """With buffers that begin whole, as where an epoch holds few of them."""
    dataset = opened(data / "a", batch_size=2)
    (loader,) = ranks_of(dataset)
    batches = list(islice(loader, 400))
    for name in dataset.buckets.names:
        chosen = BY_PICTURES if name == "True" else f"not ({BY_PICTURES})"
        alone = opened(data / "a", filter=chosen, group_by=None, bucket_batch_size=None, batch_size=2)
        alone = alone.with_settings(conventions=Whole())
        own = [batch for batch in batches if str(has_pictures(batch)) == name]
        assert len(own) > 100
        found = islice(loaders_of(alone, 1, 0, num_lanes=LANES)[0], len(own))
        assert [members(batch) for batch in own] == [members(batch) for batch in found]


class Whole(Conventions):
    first_packs = "full"


@pytest.mark.parametrize("encoder", [PackingEncoder, PrePostEncoder, Parts])
def test_the_same_global_batches_on_any_ranks_and_after_stops(data: Path, encoder: type[Any]) -> None:
    blend = Blender([(data / "a", 2), (data / "b", 1)])
    dataset = opened(blend, encoder(), batch_size=2, bucket_batch_size={"False": 3.5, "True": 2})
    (alone,) = ranks_of(dataset)
    stream = iter(alone)
    expected, after = [], {}
    for microbatch in range(1, 41 * LANES):
        expected.append(digest(next(stream)))
        if microbatch % LANES == 0:
            after[microbatch] = comparable(alone.save_state_rank())
    found: list[str] = []
    states: list[Any] = []
    for ranks, workers, laps in ((1, 0, 3), (2, 2, 9), (4, 0, 5), (4, 2, 4), (1, 2, 8), (2, 0, 7), (1, 0, 4)):
        loaders = ranks_of(dataset, ranks, workers)
        for loader in loaders if states else ():
            loader.restore_state_rank(json.loads(json.dumps(states)))
        streams = [iter(loader) for loader in loaders]
        for _ in range(laps):
            lap = [next(stream) for _ in range(LANES // ranks) for stream in streams]
            assert len({has_pictures(batch) for batch in lap}) == 1
            found += [digest(batch) for batch in lap]
        states = [loader.save_state_rank() for loader in loaders]
        assert comparable(merge(states)) == after[len(found)]
        for loader in loaders:
            loader.close()
    assert len(found) == 40 * LANES
    assert found == expected[: len(found)]


class Losing(Packs):
    """Drops what is too long for a pack, and skips some."""

    packer: Packer[Any] = Packer(
        limits={"tokens": 90}, size_of=lambda sample: tokens_of(number_of(sample)), over_long="drop"
    )

    def encode_sample(self, sample: TextSample) -> Any:
        if number_of(sample) % 11 == 0:
            raise SkipSample
        return super().encode_sample(sample)


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (4, 2)])
def test_counters_are_those_of_all_draws(data: Path, ranks: int, workers: int) -> None:
    loaders = ranks_of(opened(data / "a", Losing()), ranks, workers)
    streams = [iter(loader) for loader in loaders]
    seen: Counter[str] = Counter()
    for _ in range(400 // ranks):
        seen.update(identity for stream in streams for identity, _ in members(next(stream)))
    state = merge([loader.save_state_rank() for loader in loaders])
    waiting = sum((loader._position.waiting() for loader in loaders), Counter())
    for number, row in enumerate(read_leaves(state)):
        counts = row["counts"]
        assert counts["samples"] == seen[row["identity"]] > 0
        draws = sum(
            loader._position.lane_state(lane).leaf_draws[number]
            for loader in loaders
            for lane in loader._position.own_lanes
        )
        assert draws == counts["samples"] + counts["skipped"] + waiting[number]
        assert 0 <= counts["dropped"] < counts["skipped"]
    assert sum(row["counts"]["dropped"] for row in read_leaves(state)) > 0


def test_a_pack_comes_again_by_its_key_and_bans_hold(data: Path) -> None:
    dataset = opened(data / "a", batch_size=2)
    (loader,) = ranks_of(dataset)
    stream = iter(loader)
    for batch in islice(stream, 9):
        assert digest(loader.restore_sample(json.loads(json.dumps(batch.__restore_key__)))) == digest(batch)
    pictures = [number for number in range(SAMPLES) if images_of(number)]
    loader.ban([f"{number:05d}" for number in pictures[::2]])
    later = list(islice(iter(loader), 900))
    drawn = [number for batch in later[300:] for _, number in members(batch)]  # behind what waits in buffers
    assert not {*pictures[::2]} & {*drawn}
    assert {*pictures[1::2]} <= {*drawn}
    loader.ban([f"{number:05d}" for number in pictures])
    assert not any(has_pictures(batch) for batch in islice(iter(loader), 100))


def test_states_belong_to_buckets_packs_and_shares(data: Path) -> None:
    (loader,) = ranks_of(opened(data / "a"))
    list(islice(loader, 8))
    state = loader.save_state_rank()
    for name, value in (
        ("bucket_batch_size", f"{ROOM} / (tokens + 1)"),
        ("bucket_batch_size", {"False": 6, "True": 2}),
        ("packing_buffer_size", BUFFER + 1),
    ):
        with pytest.raises(SettingMismatchError, match=f"saved with (the {name}: |{name}=)"):
            ranks_of(opened(data / "a", **{name: value}))[0].restore_state_rank(state)
    other = opened(data / "a", bucket_batch_size={"False": 6, "True": 2})
    (adapted,) = ranks_of(other)
    adapted.restore_state_rank(state, on_mismatch="adapt")
    later = [members(batch) for batch in islice(adapted, 100)]
    again = adapted.save_state_rank()
    (restored,) = ranks_of(other)
    restored.restore_state_rank(again)
    assert [members(batch) for batch in islice(restored, 9)] == [members(batch) for batch in islice(adapted, 9)]
    (beginning,) = ranks_of(opened(data / "a"))
    first = [sample for batch in islice(beginning, 8) for sample in members(batch)]
    assert len({*first} & {sample for pack in later[:30] for sample in pack}) == 0  # it goes on where it was
    damaged = json.loads(json.dumps(state))
    damaged["settings"]["packing_buffers"] = 2
    damaged.pop("checksum", None)
    with pytest.raises(StateFormatError):
        ranks_of(opened(data / "a"))[0].restore_state_rank(damaged)


def test_a_run_goes_on_with_more_data(data: Path) -> None:
    (loader,) = ranks_of(opened(Blender([(data / "a", 1)])))
    first = [number for batch in islice(loader, 200) for _, number in members(batch)]
    state = loader.save_state_rank()
    (more,) = ranks_of(opened(Blender([(data / "a", 1), (data / "b", 1)])))
    more.restore_state_rank(state, on_mismatch="adapt")
    batches = list(islice(more, 400))
    for lap in range(100):
        assert len({has_pictures(batch) for batch in batches[lap * LANES : lap * LANES + LANES]}) == 1
    own = {leaf.identity for leaf in more.spec.leaves if leaf.dataset.path == str(data / "a")}
    drawn = [sample for batch in batches for sample in members(batch)]
    assert {identity in own for identity, _ in drawn} == {True, False}
    times = Counter(first + [number for identity, number in drawn if identity in own])
    assert max(times.values()) - min(times[number] for number in range(SAMPLES)) <= 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bucket_batch_size": None}, "needs bucket_batch_size, about how many samples"),
        ({"bucket_batch_size": {"True": 2}}, "says nothing of bucket False"),
        ({"bucket_batch_size": {"True": 2, "False": 0}}, "bucket False: .* more than 0"),
        ({"bucket_batch_size": "images"}, "bucket False: .* more than 0"),
        ({"bucket_batch_size": "128 / images"}, "divisor"),
        ({"max_tokens_per_microbatch": 90}, "max_tokens_per_microbatch"),
        ({"repeat": False}, "repeat=False"),
    ],
)
def test_mistakes_are_named(data: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        opened(data / "a", **settings)


def test_buckets_smaller_than_their_buffers_are_named(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    for loader in ranks_of(opened(data / "b", packing_buffer_size=20), 2):
        loader.close()
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "group_by: bucket True has 60 samples, fewer than the 80 of its packing buffers: their epochs mix there. Lower "
        "packing_buffer_size or num_lanes, or leave them out by a filter"
    ]
