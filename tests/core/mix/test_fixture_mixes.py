"""Training on the metadatasets that megatron-energon 7.4.1 read: the fractions and epochs that they ask for."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from engine import config_of, is_masked, loaders_of
from rival_fixtures import Encoder, join_caption_and_text

from energon_bridge import get_savable_loader, get_train_dataset
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.run_plan import plan_run
from energon_bridge.core.loader.savable import SavableDataLoader

Draw = tuple[str, int, int]
"""Leaf, sample and epoch."""

SHARES = {
    "mix_v1.yaml:train": {"captioning:train": 2 / 3, "vqa:train": 1 / 3},
    "mix_v1.yaml:val": {"captioning:val": 1},
    "mix_v2.yaml:train": {"captioning:train": 5 / 8, "vqa:train": 2 / 8, "captioning:val": 3 / 32, "vqa:val": 1 / 32},
    "mix_v2.yaml:val": {"captioning:val": 1},
    "mix_v2.yaml:test": {"captioning:test": 1},
    "nested.yaml:train": {"captioning:val": 3 / 4, "vqa:val": 1 / 4},
    "joined.yaml:train": {"captioning_extra:train": 1},  # what the path of the join ends in
}
SIZES = {"captioning:train": 12, "captioning:val": 6, "captioning:test": 6, "vqa:train": 9, "vqa:val": 3}
SIZES["captioning_extra:train"] = 12  # rows of the join


def opened(fixtures: Path, mix: str, **kwargs: Any) -> DatasetSpec:
    name, _, split_part = mix.partition(":")
    settings: dict[str, Any] = {"shuffle_buffer_size": 4, "max_samples_per_sequence": 3, "task_encoder": Encoder()}
    return get_train_dataset(
        fixtures / name, split_part=split_part, batch_size=None, worker_config=config_of(1, 0), **(settings | kwargs)
    )


def names_of(dataset: DatasetSpec) -> dict[str, str]:
    return {leaf.identity: f"{Path(leaf.dataset.path).name}:{leaf.dataset.split_part}" for leaf in dataset.leaves}


def draws_of(dataset: DatasetSpec, samples: list[Any]) -> list[Draw]:
    names = names_of(dataset)
    return [(names[identity], index, epoch) for identity, index, epoch, _ in (s.__restore_key__ for s in samples)]


@pytest.mark.parametrize("mix", SHARES)
def test_fractions_and_epochs(fixtures: Path, mix: str) -> None:
    dataset = opened(fixtures, mix)
    with closing(get_savable_loader(dataset)) as loader:
        draws = draws_of(dataset, list(islice(loader, 24 * (130 if len(SHARES[mix]) > 2 else 60))))
    for first in range(0, len(draws), 240):
        found = Counter(name for name, _, _ in draws[first : first + 240])
        assert found.keys() <= SHARES[mix].keys()
        assert all(abs(found[name] - 240 * share) <= 5 for name, share in SHARES[mix].items())
    lanes: dict[str, dict[int, int]] = defaultdict(dict)
    epochs: dict[tuple[str, int], Counter[int]] = defaultdict(Counter)
    for number, (name, index, epoch) in enumerate(draws):
        lanes[name][number % 24] = epoch
        epochs[name, epoch][index] += 1
    for name in SHARES[mix]:
        size = 6 if (mix, name) == ("mix_v2.yaml:train", "captioning:train") else SIZES[name]  # 25 % to 75 %
        done = min(lanes[name].values())
        assert len(lanes[name]) == 24
        assert done >= 10
        for epoch in range(done):  # the epochs that no lane is still in
            assert len(epochs[name, epoch]) == size
            assert set(epochs[name, epoch].values()) == {1}


def passes(loaders: list[SavableDataLoader], count: int) -> list[list[Any]]:
    """Return the real samples of some passes, all ranks together."""
    found = []
    for _ in range(count):
        columns = [list(loader) for loader in loaders]
        found.append([sample for step in zip(*columns, strict=True) for sample in step if not is_masked(sample)])
    return found


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2), (4, 1), (5, 0)])
def test_passes_over_repetitions_end_exactly(fixtures: Path, ranks: int, workers: int) -> None:
    """Two passes over 12 samples and half a pass over 9: 24 and, by turns, 4 and 5 draws."""
    dataset = opened(fixtures, "mix_epochized.yaml:train", repeat=False)
    drawn = Counter[tuple[str, int]]()
    for number, samples in enumerate(passes(loaders_of(dataset, ranks, workers), 4), start=1):
        draws = draws_of(dataset, samples)
        assert Counter(name for name, _, _ in draws) in (
            {"captioning:train": 24, "vqa:train": 4},
            {"captioning:train": 24, "vqa:train": 5},
        )
        drawn.update((name, index) for name, index, _ in draws)
        assert {drawn["captioning:train", index] for index in range(12)} == {2 * number}
        if number % 2 == 0:
            assert {drawn["vqa:train", index] for index in range(9)} == {number // 2}


def test_repetitions_are_exact_in_endless_training(fixtures: Path) -> None:
    dataset = opened(fixtures, "mix_epochized.yaml:train")
    drawn: dict[int, Counter[tuple[str, int]]] = {}
    for epochs in (2, 6):
        drawn[epochs] = Counter()
        for lane, loader in enumerate(loaders_of(dataset, 24, 0)):
            quota = int(plan_run(loader.spec, loader.config).blend.drawn(lane, epochs).sum())  # type: ignore[union-attr]
            drawn[epochs].update(draw[:2] for draw in draws_of(dataset, list(islice(loader, quota))))
            loader.close()
        assert sum(drawn[epochs].values()) == epochs * 24 + epochs // 2 * 9
        for name, size, times in (("captioning:train", 12, 2 * epochs), ("vqa:train", 9, epochs // 2)):
            assert [drawn[epochs][name, index] for index in range(size)] == [times] * size


def test_a_join_has_every_row_in_a_pass(fixtures: Path) -> None:
    dataset = opened(fixtures, "joined.yaml:train", repeat=False)
    assert join_caption_and_text.__name__ == "join_caption_and_text"  # importing it registers it
    for samples in passes(loaders_of(dataset, 2, 1), 2):
        assert sorted(sample.__restore_key__[1] for sample in samples) == list(range(12))
        assert all(" + " in sample.text for sample in samples)
