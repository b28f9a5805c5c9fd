"""Training that ends: passes with `repeat=False`, virtual epochs, several epochs shuffled as one, few samples."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from engine import digest, is_masked, loaders_of, numbers_of
from made import made_once
from mixing import metadataset, mix_data, mixed

from energon_bridge import EnergonDataloader, get_savable_loader
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.loader.savable import SavableDataLoader

data = made_once(mix_data)


def epochized(data: Path) -> dict[str, Any]:
    return metadataset(
        data, train={"blend_epochized": [{"path": "./a", "repetitions": 1.25}, {"path": "./b", "repetitions": 0.5}]}
    )


SOURCES: dict[str, Any] = {
    "one": lambda data: data / "b",
    "repetitions": epochized,
    "concat": lambda data: metadataset(data, train={"concat": [{"path": "./b"}, {"path": "./a"}]}),
}


def passes(loaders: list[SavableDataLoader], count: int) -> list[list[Any]]:
    """Return the real microbatches of some passes, all ranks together, in global order."""
    found = []
    for _ in range(count):
        columns = [list(loader) for loader in loaders]
        assert len({len(column) for column in columns}) == 1, "every rank makes the same number of steps"
        found.append([batch for step in zip(*columns, strict=True) for batch in step if not is_masked(batch)])
    return found


@pytest.mark.parametrize("source", SOURCES)
def test_a_pass_has_every_sample_and_the_next_another_order(data: Path, source: str) -> None:
    first, second, third, fourth = passes(loaders_of(mixed(data, SOURCES[source], repeat=False), 1, 0), 4)
    assert [numbers_of(batch) for batch in first] != [numbers_of(batch) for batch in second]
    for epoch, batches in enumerate((first, second, third, fourth)):
        drawn = Counter(key[:2] for batch in batches for key in batch.__restore_key__[3])
        if source == "repetitions":
            assert sum(drawn.values()) == 15 + 15
        else:
            assert set(drawn.values()) == {1}
            assert {key[2] for batch in batches for key in batch.__restore_key__[3]} == {epoch}
            assert len(drawn) == (30 if source == "one" else 42)


def test_a_virtual_epoch_ends_and_goes_on(data: Path) -> None:
    dataset = mixed(data, [(data / "a", 1), (data / "b", 1)])
    expected = [digest(batch) for batch in islice(get_savable_loader(dataset), 30)]
    (loader,) = loaders_of(mixed(data, [(data / "a", 1), (data / "b", 1)], virtual_epoch_length=7), 1, 2)
    assert len(loader) == 7
    epochs = [[digest(batch) for batch in loader] for _ in range(2)]
    assert [len(epoch) for epoch in epochs] == [7, 7]
    part = [digest(batch) for batch in islice(loader, 3)]
    (resumed,) = loaders_of(loader.spec, 1, 0, state=loader.save_state_rank())
    rest = [[digest(batch) for batch in resumed] for _ in range(2)]
    assert [len(epoch) for epoch in rest] == [4, 7]
    assert [*chain(*epochs), *part, *chain(*rest)] == expected[:28]


def test_virtual_epochs_over_passes_never_come_empty(data: Path) -> None:
    """Megatron Energon's iterator stays empty for ever after the data are exhausted."""
    (loader,) = loaders_of(mixed(data, data / "a", repeat=False, virtual_epoch_length=4), 1, 0)
    sizes = [len(list(loader)) for _ in range(6)]
    assert sizes == [4, 2, 4, 2, 4, 2]
    endless = iter(EnergonDataloader(loader))
    assert len(list(islice(endless, 3))) == 3


def test_drop_last_leaves_out_what_is_not_full(data: Path) -> None:
    for dropped in (True, False):
        (loader,) = loaders_of(mixed(data, data / "b", repeat=False, batch_size=4, batch_drop_last=dropped), 1, 0)
        assert [len(batch["__key__"]) for batch in loader] == [4] * 7 + [2] * (not dropped)


def test_passes_without_a_microbatch_end_a_seek(data: Path) -> None:
    """They used to be counted for ever, also to rewind."""
    (loader,) = loaders_of(mixed(data, data / "b", repeat=False, batch_size=40, batch_drop_last=True), 1, 0)
    loader.seek(0)
    state = loader.save_state_rank()
    assert list(loader) == []
    with pytest.raises(ConfigurationError, match="the run has no 3 steps more: 100 passes in a row have no microbatch"):
        loader.seek(3)
    assert loader.save_state_rank() == state
    assert list(loader) == []


def test_a_blend_by_weights_has_no_end(data: Path) -> None:
    with pytest.raises(ConfigurationError, match="blend_epochized"):
        mixed(data, [(data / "a", 1), (data / "b", 1)], repeat=False)
    with pytest.raises(ConfigurationError, match="shuffled over 3 epochs"):
        mixed(data, data / "a", repeat=False, shuffle_over_epochs_multiplier=3)


@pytest.mark.parametrize("slices", [3, None])
def test_epochs_shuffled_as_one_have_every_sample_as_often(data: Path, slices: int | None) -> None:
    settings = {"shuffle_over_epochs_multiplier": 3, "batch_size": 1, "max_samples_per_sequence": slices}
    loaders = loaders_of(mixed(data, data / "a", **settings), 4, 0)
    drawn = [batch.__restore_key__[3][0] for loader in loaders for batch in islice(loader, 2 * 3 * 12 // 4)]
    assert Counter(key[1] for key in drawn) == dict.fromkeys(range(12), 6)
    assert len(set(drawn)) == 72, "each coming has an epoch of its own, which keys its randomness"
    first = [batch.__restore_key__[3][0] for batch in islice(get_savable_loader(loaders[0].spec), 12)]
    assert len({key[1] for key in first}) < 12, "an epoch by itself need not be complete"


@pytest.mark.parametrize("slices", [3, None])
def test_shuffled_without_an_end(data: Path, slices: int | None) -> None:
    settings = {"shuffle_over_epochs_multiplier": -1, "batch_size": 1, "max_samples_per_sequence": slices}
    with closing(get_savable_loader(mixed(data, data / "c", **settings))) as loader:
        drawn = Counter(batch.__restore_key__[3][0][1] for batch in islice(loader, 480))
    assert set(drawn) == set(range(12))
    assert min(drawn.values()) >= 20
