"""What `batch_group_criterion` and other hooks may return: equal values are one group, the rest is refused by name."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import fractions
import pickle
import random
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from engine import (
    InProcessLoader,
    LengthsEncoder,
    PackingEncoder,
    TensorEncoder,
    config_of,
    digest,
    is_masked,
    loaders_of,
    numbers_of,
    text_dataset,
    train_dataset,
)
from made import made_once

from energon_bridge import LengthGrouper, Packer, get_val_dataset
from energon_bridge.core.errors import FatalSampleError, SampleError, UnfitSampleError
from energon_bridge.core.stream.grouping import Groups, most_waiting
from energon_bridge.core.stream.returned import group_key

SAMPLES = 40
data = made_once(text_dataset, train=[15, 25], val=[15, 25])


class Grouped(TensorEncoder):
    """Groups by a function of the number of a sample."""

    def __init__(self, group: Callable[[int], Any], size: Any = None) -> None:
        super().__init__()
        self.group, self.size = group, size

    def batch_group_criterion(self, sample: Any) -> tuple[Any, Any]:
        return self.group(int(sample.__key__)), self.size


def loader_of(data: Path, group: Callable[[int], Any], num_lanes: int = 24, **kwargs: Any) -> InProcessLoader:
    spec = train_dataset(data, task_encoder=Grouped(group), **{"batch_size": 3} | kwargs)
    return InProcessLoader(spec, worker_config=config_of(1, 0, num_lanes=num_lanes))


class Kind(enum.Enum):
    A = "a"
    B = (1, [])  # not hashable


class Pair(NamedTuple):
    x: int
    y: Any


@dataclasses.dataclass
class Plain:
    x: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any


class Value:
    """Compares by value."""

    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and other.x == self.x

    def __hash__(self) -> int:
        return hash(self.x)


class Identity:
    """Equal only to itself."""


WRITTEN: dict[str, list[Callable[[int], Any]]] = {
    "integers": [int, np.int64, np.uint8, torch.tensor, lambda n: torch.tensor(float(n)), float, np.float32, np.array],
    "booleans": [lambda n: n > 1, lambda n: np.bool_(n > 1), lambda n: torch.tensor(n > 1)],
    "strings": [str, np.str_, lambda n: np.array(str(n))],
    "bytes": [lambda n: b"%d" % n, lambda n: bytearray(b"%d" % n)],
    "shapes": [
        lambda n: (n, 2),
        lambda n: [n, 2],
        lambda n: torch.Size([n, 2]),
        lambda n: torch.tensor([n, 2]),
        lambda n: np.array([n, 2], dtype=np.int16),
        lambda n: np.array([n, 2.0]),
        lambda n: (np.int32(n), torch.tensor(2)),
        lambda n: Pair(n, 2),
    ],
    "nested": [
        lambda n: [[n, 1], [2, 3]],
        lambda n: torch.tensor([[n, 1], [2, 3]]),
        lambda n: ((n, 1), np.array([2, 3])),
    ],
    "dicts": [lambda n: {"n": n, "m": [1]}, lambda n: {"m": torch.tensor([1]), "n": np.int8(n)}],
    "sets": [lambda n: {n, 9}, lambda n: frozenset((9, np.int64(n)))],
    "enums": [lambda n: list(Kind)[n % 2], lambda n: pickle.loads(pickle.dumps(list(Kind)[n % 2]))],
    "records": [lambda n: Plain(n), lambda n: Plain(torch.tensor(n))],
    "frozen": [lambda n: Frozen(n), lambda n: Frozen(np.int64(n))],
    "frozen tensors": [lambda n: Frozen(torch.tensor([n]))],
    "classes": [lambda n: (int, str, Value)[n % 3]],
    "types of tensors": [lambda n: (torch.float32, torch.bfloat16, np.dtype("int8"))[n % 3]],
    "dates": [lambda n: datetime.date(2020, 1, 1 + n), lambda n: datetime.date.fromordinal(737425 + n)],
    "numpy dates": [lambda n: np.datetime64("2020-01-01", "ns") + np.timedelta64(n, "D")],
    "fractions": [lambda n: fractions.Fraction(n, 7), lambda n: fractions.Fraction(2 * n, 14)],
    "values": [Value, lambda n: Value(n + 0)],
    "nothing": [lambda n: None],
}
"""How a group may be written; the ways of a line give the same groups."""


@pytest.mark.parametrize("name", ["integers", "shapes", "enums"])
def test_equal_values_are_one_group_however_they_are_written(name: str, data: Path) -> None:
    ways = WRITTEN[name]
    # The groups by integers that Python itself compares.
    groups = {"booleans": lambda n: n > 1, "enums": lambda n: n % 2, "nothing": lambda n: 0}.get(name, lambda n: n)
    plain = list(islice(loader_of(data, lambda n: groups(n % 3)), 12))
    turns = count()
    found = list(islice(loader_of(data, lambda n: ways[next(turns) % len(ways)](n % 3)), 12))
    assert [batch.__key__ for batch in found] == [batch.__key__ for batch in plain]


def test_values_of_one_group_and_of_others() -> None:
    for name, ways in WRITTEN.items():
        for n in (0, 1):
            keys = {group_key(way(n), "the hook") for way in ways for _ in range(2)}
            assert len(keys) == 1, name
        zero, one = (group_key(ways[0](n), "the hook") for n in (0, 1))
        assert zero != one or ways[0](0) == ways[0](1)
    for one, other in (
        ((1, 2), (2, 1)),
        ({"a": 1}, {"a": 2}),
        (torch.zeros(1, 2), torch.zeros(2)),
        ("1", 1),
        (b"1", "1"),
    ):
        assert group_key(one, "the hook") != group_key(other, "the hook")


NANS: list[Any] = [
    float("nan"),
    np.float32("nan"),
    torch.tensor(float("nan")),
    (1, float("nan")),
    [torch.tensor([1.0, float("nan")])],
    {"a": np.nan},
    Frozen(float("nan")),
    np.datetime64("NaT", "s"),
    complex(0, float("nan")),
]


def test_nan_is_an_error_of_its_sample_and_counted(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of(data, lambda n: (1, float("nan")) if n % 4 == 0 else 1)
    for batch in islice(loader, 30):
        assert all(number % 4 for number in numbers_of(batch))
    found = loader.metrics()
    assert found["errors"] > 10
    assert found["draws"] == found["samples"] + found["errors"]
    assert "NaN is equal to no other group" in caplog.text
    for nan in NANS:
        with pytest.raises(SampleError, match="NaN"):
            group_key(nan, "the hook")


class Uncomparable:
    def __eq__(self, other: object) -> bool:
        raise TypeError("as the test wants it")

    def __hash__(self) -> int:
        return 1


class Unhashable(enum.Enum):
    A = 1

    def __eq__(self, other: object) -> bool:
        return self is other


WITHOUT_VALUE: dict[str, tuple[Callable[[int], Any], str]] = {
    "object": (lambda n: object(), "returned a object as the group .*equal only to itself"),
    "identity": (lambda n: Identity(), "returned a Identity as the group .*equal only to itself"),
    "in a tuple": (lambda n: (1, Identity()), "returned a tuple as the group .*Identity.*equal only to itself"),
    "in a record": (lambda n: Frozen(Identity()), "returned a Frozen as the group .*equal only to itself"),
    "function": (lambda n: lambda: n, "returned a function as the group .*equal only to itself"),
    "generator": (lambda n: (x for x in ()), "returned a generator as the group .*cannot be compared"),
    "large tensor": (lambda n: torch.zeros(3, 400), r"returned a Tensor .*it has 1200 values, .*at most 1024"),
    "meta tensor": (lambda n: torch.zeros(3, device="meta"), "returned a Tensor .*its values cannot be read"),
    "uncomparable": (lambda n: Uncomparable(), "returned a Uncomparable .*cannot be compared .TypeError: as the test"),
    "an enumeration without hashes": (lambda n: Unhashable.A, "returned a Unhashable .*unhashable type: 'Unhashable'"),
}


def test_what_has_no_value_is_refused() -> None:
    for group, complaint in WITHOUT_VALUE.values():
        with pytest.raises(FatalSampleError, match=f"the hook {complaint}"):
            group_key(group(1), "the hook")


@pytest.mark.parametrize("kind", ["train", "val"])
def test_the_run_stops_at_the_first_sample_whose_group_has_no_value(kind: str, data: Path) -> None:
    calls = count()
    loader = loader_of(data, lambda number: (next(calls), Identity()))
    if kind == "val":
        encoder = Grouped(lambda number: (next(calls), Identity()))
        loader = InProcessLoader(
            get_val_dataset(data, batch_size=3, task_encoder=encoder, worker_config=config_of(1, 0))
        )
    with pytest.raises(FatalSampleError, match=r"^batch_group_criterion: .* of Grouped returned a tuple .*Identity"):
        next(iter(loader))
    assert next(calls) == 1


@pytest.mark.parametrize("size", [np.int64(2), torch.tensor([2])], ids=repr)
def test_batch_sizes_are_whole_numbers_of_any_kind(size: Any, data: Path) -> None:
    spec = train_dataset(data, task_encoder=Grouped(lambda n: n % 2, size), batch_size=None)
    batch = next(iter(InProcessLoader(spec, worker_config=config_of(1, 0))))
    assert len(batch.__key__) == 2


@pytest.mark.parametrize("size", [2.0, True, 0, torch.tensor([2, 2]), torch.tensor(True)], ids=repr)
def test_other_batch_sizes_are_refused_by_name(size: Any, data: Path) -> None:
    spec = train_dataset(data, task_encoder=Grouped(lambda n: n % 2, size), batch_size=None)
    with pytest.raises(
        FatalSampleError, match=r"batch_group_criterion of Grouped returned batch size .* for the group"
    ):
        next(iter(InProcessLoader(spec, worker_config=config_of(1, 0))))


def test_the_largest_batch_that_is_waited_for() -> None:
    groups: Groups[list[int]] = Groups(None)
    largest = []
    for size in (2, 3, 3, 3, 2):
        groups.add([size], size, size)
        largest.append(groups.largest)
    assert largest == [2, 3, 3, 2, 1]


def test_a_group_has_one_batch_size(data: Path) -> None:
    class Fickle(Grouped):
        def batch_group_criterion(self, sample: Any) -> tuple[Any, Any]:
            return "all", 20 + int(sample.__key__) % 2

    spec = train_dataset(data, task_encoder=Fickle(int), batch_size=None)
    with pytest.raises(FatalSampleError, match=r"returned batch size 2[01] for the group 'all', but 2[01] before"):
        next(iter(InProcessLoader(spec, worker_config=config_of(1, 0))))


# Groups that never fill ----------------------------------------------------------------------------------------------


def leaking(number: int) -> Any:
    """A group of its own for every fourth sample, every time; the others fill their groups."""
    return random.random() if number % 4 == 0 else number % 2


@pytest.mark.parametrize("workers", [1])
def test_a_run_whose_groups_never_fill_stops(workers: int, data: Path) -> None:
    settings: dict[str, Any] = {"task_encoder": Grouped(lambda n: random.random()), "batch_size": 3}
    (loader,) = loaders_of(train_dataset(data, **settings), 1, workers)
    start = time.monotonic()
    with pytest.raises(FatalSampleError) as caught:
        next(iter(loader))
    assert time.monotonic() - start < 60
    text = str(caught.value)
    assert f"{data}: batch_group_criterion of Grouped keeps 1,001 rows in 1,001 groups that are not full" in text
    assert "such as 0." in text


def test_what_waits_is_named_and_counted(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of(data, leaking, num_lanes=2)
    for batch in loader:
        found = loader.metrics()
        # What was drawn was delivered, or waits: by the keys of the batches, and by the draws of the lanes.
        assert found["waiting_in_groups"] == found["draws"] - found["samples"]
        assert len(batch.__key__) == 3
        if "waiting in one lane" in caplog.text:
            break
    (record,) = [record for record in caplog.records if "waiting in one lane" in record.message]
    assert "batch_group_criterion of Grouped keeps 251 rows in 2" in record.message
    assert "`waiting_in_groups` in loader.metrics()" in record.message
    assert "With more than 1,000 the run stops" in record.message
    assert str(data) in record.message
    for _ in islice(loader, 50):
        pass
    assert len([record for record in caplog.records if "waiting in one lane" in record.message]) == 1


def first_epoch(tmp_path: Path, samples: int, lanes: int) -> set[str]:
    """Return which samples came as the first so many, in eight groups of eight."""
    folder = text_dataset(tmp_path / f"{samples}", train=[samples // 2, samples // 2])
    loader = loader_of(folder, lambda n: n * 37 % 8, num_lanes=lanes, batch_size=8)
    return {key for batch in islice(loader, samples // 8) for key in batch.__key__}


def test_groups_that_keep_an_eighth_of_an_epoch_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def warnings() -> list[str]:
        found = [record.message for record in caplog.records if "is small for batch_group_criterion" in record.message]
        caplog.clear()
        return found

    assert len(first_epoch(tmp_path, 960, 1)) > 0.95 * 960
    assert not warnings()
    assert len(first_epoch(tmp_path / "large", 19_200, 48)) > 0.95 * 19_200
    assert not warnings()
    assert len(first_epoch(tmp_path / "small", 960, 48)) < 0.85 * 960
    (text,) = warnings()
    assert f"{tmp_path / 'small' / '960'} is small for batch_group_criterion of Grouped: each of 48 lanes" in text
    assert "an eighth of its epoch of 960 samples" in text
    assert "Fewer lanes (num_lanes of WorkerConfig or the data module" in text


def until_it_stops(loaders: list[Any]) -> Iterator[str]:
    streams = [iter(loader) for loader in loaders]
    for stream in (stream for _ in count() for stream in streams):
        try:
            batch = next(stream)
        except FatalSampleError as error:
            yield str(error)
            return
        if not is_masked(batch):
            yield digest(batch)


def test_it_stops_at_the_same_microbatch_on_every_topology_and_after_every_stop(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("energon_bridge.core.stream.grouping._FEWEST", 16)
    monkeypatch.setattr("energon_bridge.core.stream.grouping._MOST", 20)
    spec = train_dataset(data, task_encoder=Grouped(leaking), batch_size=3)
    (loader,) = loaders_of(spec, 1, 0)
    *expected, complaint = until_it_stops([loader])
    assert len(expected) > 120
    assert "keeps 21 rows" in complaint
    for ranks, workers, step, later in ((3, 1, 35, 2), (1, 0, len(expected), 1)):
        loaders = loaders_of(spec, ranks, workers)
        streams = [iter(loader) for loader in loaders]
        head = [digest(next(stream)) for _ in range(step) for stream in streams]
        states = [loader.save_state_rank() for loader in loaders]
        *tail, same = until_it_stops(loaders_of(spec, later, 0, state=states))
        assert [*head, *tail] == expected
        assert same == complaint


def test_a_pass_says_how_many_rows_batch_drop_last_drops(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"batch_size": 3, "repeat": False}
    (whole,) = loaders_of(train_dataset(data, task_encoder=Grouped(lambda n: n), **settings), 1, 0)
    assert len(list(whole)) == SAMPLES
    assert "batch_drop_last" not in caplog.text
    spec = train_dataset(data, task_encoder=Grouped(lambda n: n), batch_drop_last=True, **settings)
    (loader,) = loaders_of(spec, 1, 0)
    assert not list(loader)
    assert f"{data}: batch_drop_last drops 40 rows in 40 groups that are not full, such as" in caplog.text


def test_many_groups_that_fill_may_wait(data: Path) -> None:
    """Each sample has a group of its own: a lane has each of them five times before the first group of six is full."""
    loader = loader_of(data, lambda n: n, batch_size=6)
    for batch in islice(loader, 120):
        assert len(set(batch.__key__)) == 1
    assert loader.metrics()["waiting_in_groups"] > 100


def test_the_bound_grows_with_the_mix_and_the_batches() -> None:
    assert most_waiting(40, 3) == 1000
    assert most_waiting(2000, 8) == 32_000
    assert most_waiting(10**9, 8) == most_waiting(10**9, 1) == 65_536


# Other hooks ---------------------------------------------------------------------------------------------------------


def with_hook(base: type[Any], name: str, function: Callable[..., Any]) -> Any:
    return type("Mistaken", (base,), {name: lambda self, given: function(given)})()


@pytest.mark.parametrize("length", [np.int64(2), torch.tensor([2])], ids=repr)
def test_lengths_are_whole_numbers_of_any_kind(length: Any, data: Path) -> None:
    settings: dict[str, Any] = {"packing_buffer_size": 11, "max_tokens_per_microbatch": 6, "batch_size": None}
    for value in (length, 2):
        encoder = with_hook(LengthsEncoder, "sample_length", lambda sample, value=value: value)
        encoder.encode_batch = TensorEncoder().encode_batch
        (loader,) = loaders_of(train_dataset(data, task_encoder=encoder, **settings), 1, 0)
        assert {len(batch.__key__) for batch in islice(loader, 5)} <= {1, 2, 3}


@pytest.mark.parametrize(
    ("length", "complaint"),
    [
        (2.0, "returned float 2.0: return the length of the sample, a whole number"),
        (torch.tensor([1, 2]), "returned Tensor .*: return the length"),
        (torch.tensor(True), "returned Tensor .*: return the length"),
        (None, "returned NoneType None: return the length"),
        (-3, "returned the length -3; expected at least 0"),
    ],
    ids=repr,
)
def test_other_lengths_are_refused_by_name(length: Any, complaint: str, data: Path) -> None:
    settings: dict[str, Any] = {"packing_buffer_size": 11, "max_tokens_per_microbatch": 6, "batch_size": None}
    encoder = with_hook(LengthsEncoder, "sample_length", lambda sample: length)
    with pytest.raises(FatalSampleError, match=f"^sample_length: .*sample_length of Mistaken {complaint}"):
        next(iter(InProcessLoader(train_dataset(data, task_encoder=encoder, **settings))))


@pytest.mark.parametrize(
    ("selected", "got"),
    [
        (lambda samples: samples, "a list with a Numbers"),
        (lambda samples: samples[0], "a Numbers"),
        (lambda samples: 3, "a int"),
        (lambda samples: "ab", "a str"),
        (lambda samples: {0: samples}, "a dict"),
        (lambda samples: [samples[:1], None], "a list with None"),
        (lambda samples: [0, 1], "a list with a int"),
        (lambda samples: [["ab"]], "a str that it did not get"),
        (lambda samples: [[dataclasses.replace(samples[0])]], "a Numbers that it did not get"),
        (lambda samples: [samples[:1], samples[:1]], "a Numbers that it did not get, or returned one twice"),
    ],
)
def test_what_is_not_lists_of_samples_is_refused_by_name(selected: Any, got: str, data: Path) -> None:
    encoder = with_hook(PackingEncoder, "select_samples_to_pack", selected)
    with pytest.raises(
        FatalSampleError, match=f"^select_samples_to_pack.* of Mistaken returned {got}.*: return lists of"
    ):
        next(iter(InProcessLoader(train_dataset(data, task_encoder=encoder, packing_buffer_size=11))))


@pytest.mark.parametrize(
    "selected",
    [
        lambda samples: tuple((sample,) for sample in samples),
        lambda samples: (iter([sample]) for sample in samples),
        lambda samples: [np.array([sample], dtype=object) for sample in samples],
    ],
)
def test_lists_of_samples_of_any_kind_are_packs(selected: Any, data: Path) -> None:
    encoder = with_hook(PackingEncoder, "select_samples_to_pack", selected)
    batch = next(iter(InProcessLoader(train_dataset(data, task_encoder=encoder, packing_buffer_size=11))))
    assert len(batch.number) == 2


@pytest.mark.parametrize("size", [3.5, float("nan"), None, "3", torch.tensor(2.5)], ids=repr)
def test_sizes_of_a_packer_are_whole_numbers(size: Any) -> None:
    packer: Packer[Any] = Packer(limits={"tokens": 10}, size_of=lambda sample: size)
    with pytest.raises(UnfitSampleError, match=r"size_of returned .* for sample .*: round sizes up"):
        packer.admit({"__key__": "one"})
    whole: Packer[Any] = Packer(limits={"tokens": 10}, size_of=lambda sample: torch.tensor(sample))
    assert whole.select([7, 3, 6, 4], flush=True) == [[7, 3], [6, 4]]


@pytest.mark.parametrize("length", [float("nan"), -1, torch.tensor(float("nan"))], ids=repr)
def test_a_length_grouper_refuses_what_is_no_length(length: Any) -> None:
    grouper: LengthGrouper[Any] = LengthGrouper(length_of=lambda sample: length, boundaries=(8, 16), batch_size=2)
    with pytest.raises(UnfitSampleError, match=r"LengthGrouper returned .* for sample .*; expected a number"):
        grouper.group(object())
