"""The iterator that training loops hold, over loaders that are as simple as can be."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine import DefaultTaskEncoder, config_of, text_dataset

from energon_bridge import get_savable_loader, get_train_dataset
from energon_bridge.core.dataloader import EnergonDataloader, cyclic_iter
from energon_bridge.core.errors import ConfigurationError, EmptyDatasetError, WrongUseError


class CountingLoader:
    """Delivers 0, 1, 2, … and knows how far it got; a finite one starts again at every `iter()`."""

    def __init__(self, size: int | None = None) -> None:
        self.spec = SimpleNamespace(ends=size is not None)
        self.size = size
        self.position = 0
        self.closed = False

    def __iter__(self) -> Iterator[int]:
        if self.size is not None:
            self.position = 0
        return self._generate()

    def _generate(self) -> Iterator[int]:
        while self.size is None or self.position < self.size:
            self.position += 1
            yield self.position - 1

    def __len__(self) -> int:
        return self.size if self.size is not None else 7

    def save_state_rank(self) -> dict[str, Any]:
        return {"position": self.position}

    def restore_state_rank(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def state_dict(self) -> dict[str, Any]:
        return {"whole": self.save_state_rank()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restore_state_rank(state["whole"])

    def close(self) -> None:
        self.closed = True


def test_an_endless_loader_is_one_stream() -> None:
    dataloader = EnergonDataloader(CountingLoader())
    assert iter(dataloader) is dataloader
    assert [next(dataloader) for _ in range(3)] == [0, 1, 2]
    assert list(islice(iter(dataloader), 2)) == [3, 4]
    assert next(dataloader) == 5
    with pytest.raises(TypeError, match="endless"):
        len(dataloader)
    with pytest.raises(WrongUseError, match="one_pass"):
        dataloader.one_pass()
    assert len(EnergonDataloader(CountingLoader(), length=12)) == 12
    with pytest.raises(ConfigurationError, match="length must be at least 1"):
        EnergonDataloader(CountingLoader(), length=0)


def test_a_finite_loader_gives_the_same_pass_every_time_and_next_cycles() -> None:
    loader = CountingLoader(3)
    dataloader = EnergonDataloader(loader)
    assert len(dataloader) == 3
    assert [list(dataloader), list(dataloader)] == [[0, 1, 2], [0, 1, 2]]
    assert [next(dataloader) for _ in range(5)] == [0, 1, 2, 0, 1]
    assert list(dataloader) == [0, 1, 2]
    assert next(dataloader) == 0
    dataloader.close()
    assert loader.closed


def test_any_iterable_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(EnergonDataloader(["a", "b"])) == ["a", "b"]
    stream = EnergonDataloader(iter([1]))
    assert stream.endless
    clock = iter([1.0, 3.5, 3.5, 3.5])
    monkeypatch.setattr("energon_bridge.core.dataloader.time.perf_counter", lambda: next(clock))
    assert next(stream) == 1
    assert stream.wait_seconds == 2.5
    with pytest.raises(EmptyDatasetError):
        next(stream)
    stream.close()


@pytest.mark.parametrize("save", ["save_state", "state_dict"])
def test_a_state_is_that_of_what_was_delivered(save: str) -> None:
    restore = {"save_state": "restore_state", "state_dict": "load_state_dict"}[save]
    dataloader = EnergonDataloader(CountingLoader())
    for _ in range(4):
        next(dataloader)
    state = getattr(dataloader, save)()
    following = [next(dataloader) for _ in range(3)]
    fresh = EnergonDataloader(CountingLoader())
    getattr(fresh, restore)(state)
    getattr(fresh, restore)(state)
    assert [next(fresh) for _ in range(3)] == following == [4, 5, 6]
    getattr(fresh, restore)(state)  # in the middle of a stream
    assert next(fresh) == 4


def test_no_loader_is_no_dataloader(tmp_path: Path) -> None:
    dataset = get_train_dataset(text_dataset(tmp_path, train=[3]), batch_size=2)
    with pytest.raises(WrongUseError, match=r"not a dataset: EnergonDataloader\(get_loader\(dataset\)\)"):
        EnergonDataloader(dataset)
    with pytest.raises(ConfigurationError, match="for a split without data, use None itself"):
        EnergonDataloader(None)


@pytest.mark.parametrize("make", [lambda: next(cyclic_iter([])), lambda: next(EnergonDataloader([]))])
def test_an_empty_dataset_raises_and_does_not_spin(make: Any) -> None:
    with pytest.raises(EmptyDatasetError, match="a pass over it yields nothing"):
        make()


class Interrupted(DefaultTaskEncoder):
    """Is interrupted once, by something that has nothing to do with the data."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def encode_batch(self, batch: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return batch


def test_an_error_is_not_the_end_of_the_data(tmp_path: Path) -> None:
    path = text_dataset(tmp_path / "text", train=[20, 17])

    def opened(at: int) -> EnergonDataloader:
        dataset = get_train_dataset(
            path,
            batch_size=3,
            shuffle_buffer_size=5,
            max_samples_per_sequence=5,
            task_encoder=Interrupted(at),
            worker_config=config_of(1, 0),
        )
        return EnergonDataloader(get_savable_loader(dataset))

    expected = [batch.__key__ for batch in islice(opened(-1), 12)]
    dataloader = opened(6)
    found = [next(dataloader).__key__ for _ in range(5)]
    with pytest.raises(KeyboardInterrupt):
        next(dataloader)
    found += [next(dataloader).__key__ for _ in range(7)]
    assert found == expected


class SeekingLoader(CountingLoader):
    """One whose first pass after a restore goes on from there, as a real one's does."""

    restored = False

    def __iter__(self) -> Iterator[int]:
        if self.size is not None and (not self.restored or self.position >= self.size):
            self.position = 0
        self.restored = False
        return self._generate()

    def restore_state_rank(self, state: dict[str, Any]) -> None:
        self.position, self.restored = state["position"], True

    def seek(self, step: int) -> None:
        self.restore_state_rank({"position": step})


def test_iterators_that_cycle_keep_their_own_positions() -> None:
    dataloader = EnergonDataloader(SeekingLoader(3), cycle=True)
    first, second = iter(dataloader), iter(dataloader)
    assert [next(first), next(first)] == [0, 1]
    assert [next(second)] == [0]
    assert [next(dataloader), next(dataloader)] == [0, 1]
    assert [next(first), next(first)] == [2, 0]
    assert list(dataloader.one_pass()) == [0, 1, 2]
    assert [next(second) for _ in range(3)] == [1, 2, 0]
    assert next(first) == 1
    dataloader.close()
    assert next(first) == 2
    assert dataloader.batches == 15


def test_of_other_iterables_every_cycle_has_an_iterator_of_its_own() -> None:
    dataloader = EnergonDataloader(["a", "b"], cycle=True)
    first, second = iter(dataloader), iter(dataloader)
    assert [next(first), next(second), next(first), next(first), next(second)] == ["a", "a", "b", "a", "b"]


def test_a_restored_place_is_that_of_the_iterator_in_use() -> None:
    dataloader = EnergonDataloader(SeekingLoader(3), cycle=True)
    stream = iter(dataloader)
    next(stream)
    state = dataloader.save_state()
    assert [next(stream), next(stream)] == [1, 2]
    dataloader.restore_state(state)
    assert [next(stream) for _ in range(3)] == [1, 2, 0]


def test_a_cycle_goes_on_after_an_error() -> None:
    class Failing(SeekingLoader):
        def _generate(self) -> Iterator[int]:
            for item in super()._generate():
                if item == 1:
                    raise OSError("once")
                yield item

    stream = iter(EnergonDataloader(Failing(3), cycle=True))
    assert next(stream) == 0
    with pytest.raises(OSError, match="once"):
        next(stream)
    assert next(stream) == 0


def test_a_dataloader_and_its_cycles_leave_nothing_to_the_garbage_collector() -> None:
    loader = SeekingLoader(3)
    gone = weakref.ref(loader)
    dataloader = EnergonDataloader(loader, cycle=True)
    stream = iter(dataloader)
    next(stream), next(dataloader), next(stream)
    del loader, dataloader, stream
    assert gone() is None


def test_every_epoch_can_repeat_the_first() -> None:
    dataloader = EnergonDataloader(SeekingLoader(), repeat_epoch=True)
    iter(dataloader)
    assert list(islice(iter(dataloader), 2)) == [0, 1]
    state = dataloader.state_dict()
    assert list(islice(iter(dataloader), 2)) == [0, 1]
    dataloader.load_state_dict({"whole": {"position": 1}})
    assert list(islice(iter(dataloader), 1)) == [1]  # the rest of the epoch that was restored
    dataloader.load_state_dict(state)
    iter(dataloader)
    assert next(iter(dataloader)) == 2
