"""Joins shuffle, blend, save and restore like any dataset, on every topology."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import config_of, deliver, loaders_of
from keyed import join, keyed_dataset, shards, shuffled, write_mix

from energon_bridge import DefaultTaskEncoder, TextSample, get_loader, get_train_dataset
from energon_bridge.core.errors import DatasetMismatchError


class Noisy(DefaultTaskEncoder):
    """Adds noise, so that a wrong seed shows."""

    def encode_sample(self, sample: Any) -> Any:
        return TextSample.derive_from(sample, text=f"{sample.text} {torch.rand(())}")


MIXES = {
    "join": lambda: join(None, {"nonmatch": "none"}),
    "subset": lambda: join(None, {"nonmatch": "skip"}, subset={"range": ["10%", "80%"]}, named=True),
    "blend": lambda: {"blend": [join(None, {"nonmatch": "skip"}) | {"weight": 2}, {"path": "./a", "weight": 1}]},
    "twice": lambda: {"blend": [join(None, {"nonmatch": "skip"}), join(None, {"nonmatch": "skip"})]},
}


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("larger")
    keys = [f"{number:03d}" for number in range(60)]
    keyed_dataset(folder / "a", train=shards(keys, 11, 29, 20), exclude=["train/0.tar/004"])
    keyed_dataset(folder / "b", train=shards(shuffled(keys[:50]), 25, 25))
    for name, make in MIXES.items():
        write_mix(folder / f"{name}.yaml", train=make())
    return folder


def trained(source: Path, **kwargs: Any) -> Any:
    settings: dict[str, Any] = {"batch_size": 2, "shuffle_buffer_size": 7, "max_samples_per_sequence": 3}
    settings |= {"worker_config": config_of(1, 0), "task_encoder": Noisy()}
    return get_train_dataset(source, **(settings | kwargs))


def test_a_state_does_not_go_on_with_other_matches(larger: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(larger, tmp_path / "copy"))
    (before,) = loaders_of(trained(folder / "join.yaml"), 1, 0)
    state = deliver([before], 5, save_at=[5]).states[5]
    deliver(loaders_of(trained(folder / "join.yaml"), 1, 0, state=state), 2)
    shutil.rmtree(folder / "b")
    keys = shards(shuffled([f"{number:03d}" for number in range(50)], seed=2), 25, 25)
    keyed_dataset(folder / "b", train=keys)  # of the same names and sizes
    with pytest.raises(DatasetMismatchError):
        loaders_of(trained(folder / "join.yaml"), 1, 0, state=state)


def test_every_row_once_in_an_epoch(larger: Path) -> None:
    dataset = trained(larger / "join.yaml", batch_size=None)
    with closing(get_loader(dataset)) as loader:
        found: Iterator[Any] = iter(loader)
        keys = [next(found).__key__ for _ in range(59 * 4)]
    assert {keys.count(key) for key in set(keys)} <= {2, 3, 4, 5, 6}
    assert len(set(keys)) == 59
