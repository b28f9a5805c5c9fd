"""Joins shuffle, blend, save and restore like any dataset, on every topology."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import ENCODERS, NEEDED, config_of, deliver, digest, loaders_of
from keyed import join, keyed_dataset, shards, shuffled, write_mix

from energon_bridge import (
    DefaultTaskEncoder,
    TextSample,
    get_loader,
    get_savable_loader,
    get_train_dataset,
)
from energon_bridge.errors import DatasetMismatchError
from energon_bridge.loader.document import read_lanes


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


def held_back(source: Path, encoder: str) -> Any:
    """Open a mix with an encoder that lets samples wait: in a packing buffer, in groups, between batches."""
    return trained(source, task_encoder=ENCODERS[encoder](), **NEEDED.get(encoder, {}))


RESUMES = [((1, 0), 7, (4, 2)), ((4, 1), 3, (3, 0)), ((3, 2), 5, (8, 1)), ((2, 3), 2, (1, 0))]
"""Ranks and workers that save, after how many steps, and ranks and workers that go on."""


@pytest.mark.parametrize("name", MIXES)
def test_every_topology_gives_the_same_stream_and_resumes(larger: Path, name: str) -> None:
    dataset = trained(larger / f"{name}.yaml")
    whole = deliver(loaders_of(dataset, 1, 0), 96).digests
    assert len(set(whole)) > 90
    for (ranks, workers), steps, (new_ranks, new_workers) in RESUMES:
        before = deliver(loaders_of(dataset, ranks, workers), steps, save_at=[steps])
        loaders = loaders_of(dataset, new_ranks, new_workers, state=before.states[steps])
        after = deliver(loaders, 24 // new_ranks)
        found = before.digests + after.digests
        assert found == whole[: len(found)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_a_join_are_restored_by_their_keys(larger: Path, num_workers: int) -> None:
    config = config_of(1, num_workers)
    with closing(get_savable_loader(trained(larger / "join.yaml"), worker_config=config)) as loader:
        batches = list(islice(loader, 12))
        assert [digest(loader.restore_sample(batch.__restore_key__)) for batch in batches] == [*map(digest, batches)]
    assert len({source.dataset_path for source in batches[0].__sources__}) == 2


HOLDING = ["packing", "prepost", "grouping", "batches"]


@pytest.mark.parametrize("encoder", HOLDING)
@pytest.mark.parametrize("name", ["join", "blend"])
def test_joined_samples_wait_to_be_packed_grouped_or_batched_through_a_resume(
    larger: Path, name: str, encoder: str
) -> None:
    dataset = held_back(larger / f"{name}.yaml", encoder)
    whole = deliver(loaders_of(dataset, 1, 0), 96).digests
    for (ranks, workers), steps, (new_ranks, new_workers) in RESUMES:
        before = deliver(loaders_of(dataset, ranks, workers), steps, save_at=[steps])
        state = before.states[steps]
        assert any(lane.held.rows.size for part in state for lane in read_lanes(part).values())
        after = deliver(loaders_of(dataset, new_ranks, new_workers, state=state), 48 // new_ranks)
        found = before.digests + after.digests
        assert found == whole[: len(found)]


@pytest.mark.parametrize("encoder", HOLDING)
def test_packs_groups_and_batches_of_a_join_are_restored_by_their_keys(larger: Path, encoder: str) -> None:
    (loader,) = loaders_of(held_back(larger / "join.yaml", encoder), 1, 2)
    for batch in islice(loader, 30):
        assert digest(loader.restore_sample(json.loads(json.dumps(batch.__restore_key__)))) == digest(batch)


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
