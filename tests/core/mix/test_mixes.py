"""Mixes through the loader: fractions, exact repetitions, elasticity, refusals, megatron-energon's fixtures."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from engine import config_of, counts_of, digest, loaders_of
from made import made_once
from mixing import metadataset, mix_data, mixed
from rival_fixtures import Encoder, rendered

from energon_bridge import WeightSchedule, get_loader, get_savable_loader, get_val_dataset, get_val_datasets
from energon_bridge.core.errors import DatasetMismatchError, SettingMismatchError
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.saved_run import read_leaves

data = made_once(mix_data)


MIXES: dict[str, Any] = {
    "weights": lambda data: [(data / "a", 5), (data / "b", 2), (data / "c", 1)],
    "repetitions": lambda data: metadataset(
        data, train={"blend_epochized": [{"path": "./a", "repetitions": 2}, {"path": "./b", "repetitions": 0.5}]}
    ),
}


def share(dataset: DatasetSpec, microbatches: int) -> dict[str, int]:
    """Return how many samples of each folder come in the first microbatches."""
    names = {leaf.identity: Path(leaf.dataset.path).name for leaf in dataset.leaves}
    with closing(get_savable_loader(dataset)) as loader:
        batches = list(islice(loader, microbatches))
    return Counter(names[key[0]] for batch in batches for key in batch.__restore_key__[3])


def test_the_same_leaf_twice_is_read_in_two_orders(data: Path) -> None:
    dataset = mixed(data, [(data / "b", 1), (data / "b", 1)])
    assert len({leaf.identity for leaf in dataset.leaves}) == 2
    with closing(get_savable_loader(dataset)) as loader:
        keys = [key for batch in islice(loader, 24) for key in batch.__restore_key__[3]]
    first, second = ([key[1] for key in keys if key[0] == leaf.identity] for leaf in dataset.leaves)
    assert first[:8] != second[:8]


def test_subflavors_of_the_reference_go_before_those_of_the_dataset(fixtures: Path) -> None:
    dataset = get_val_dataset(
        fixtures / "mix_v2.yaml", split_part="train", batch_size=None, worker_config=config_of(1, 0)
    )
    loader = get_loader(dataset)
    flavors = [sample.__subflavors__ for sample in loader]
    assert flavors.count({"source": "cap"}) == 6
    assert flavors.count({}) == 18


@pytest.mark.parametrize("name", ["mix_v1.yaml", "mix_v2.yaml", "mix_epochized.yaml", "nested.yaml"])
def test_metadatasets_of_megatron_energon_give_its_samples(fixtures: Path, name: str) -> None:
    expected = json.loads((fixtures / "expected.json").read_text())
    parts = [entry.partition(":")[2] for entry in expected if entry.startswith(f"{name}:")]
    assert parts
    for part in parts:
        dataset = get_val_dataset(
            fixtures / name, split_part=part, batch_size=None, task_encoder=Encoder(), worker_config=config_of(1, 0)
        )
        assert [rendered(sample) for sample in get_loader(dataset)] == expected[f"{name}:{part}"]


def test_a_changed_mix_is_refused_with_what_changed(data: Path) -> None:
    state = get_savable_loader(mixed(data, [(data / "a", 1), (data / "b", 2)])).save_state_rank()
    loader = get_savable_loader(mixed(data, [(data / "a", 1), (data / "b", 3)]))
    with pytest.raises(DatasetMismatchError, match="weight 2/3 is 3/4 now"):
        loader.restore_state_rank(state)
    loader = get_savable_loader(mixed(data, [(data / "a", 1), (data / "c", 2)]))
    with pytest.raises(DatasetMismatchError) as raised:
        loader.restore_state_rank(state)
    assert f"- {data / 'b'} [train], 30 samples" in str(raised.value)
    assert f"+ {data / 'c'} [train], 12 samples" in str(raised.value)
    schedules = [WeightSchedule.linear([(0, 1), (100, end)]) for end in (2, 3)]
    first, second = (
        get_savable_loader(mixed(data, [(data / "a", schedule), (data / "b", 1)])) for schedule in schedules
    )
    with pytest.raises(SettingMismatchError, match="schedule="):
        second.restore_state_rank(first.save_state_rank())
    of_one = mixed(data, data / "a")
    alone = get_savable_loader(of_one).save_state_rank()
    with pytest.raises(DatasetMismatchError, match=r"weight 1 .the only dataset. is 1/3 now"):
        get_savable_loader(mixed(data, [(data / "a", 1), (data / "b", 2)])).restore_state_rank(alone)
    moved = get_savable_loader(mixed(data, [(data / "b", 4), (data / "a", 2)]))
    moved.restore_state_rank(state)  # neither the order nor the unit of the weights counts


def test_counters_stand_once_per_leaf(data: Path) -> None:
    dataset = mixed(data, MIXES["weights"])
    with closing(get_savable_loader(dataset)) as loader:
        sum(1 for _ in islice(loader, 60))
        leaves = {Path(leaf["path"]).name: leaf["counts"] for leaf in read_leaves(loader.save_state_rank())}
    assert {name: counts["samples"] for name, counts in leaves.items()} == share(dataset, 60)
    assert all(counts["bytes"] == 1024 * counts["samples"] for counts in leaves.values())


def test_validation_of_each_leaf_on_its_own(data: Path) -> None:
    parts = get_val_datasets(data / "val.yaml", batch_size=4, worker_config=config_of(1, 0))
    sizes = {
        Path(leaf.dataset.path).name: sum(int(b.__valid__.sum()) for b in get_loader(part)) for part, leaf in parts
    }
    assert sizes == {"a": 12, "c": 12}


def test_one_leaf_is_no_mix(data: Path) -> None:
    alone, mix = mixed(data, data / "b"), mixed(data, [(data / "b", 7)])
    (a,), (b,) = loaders_of(alone, 1, 0), loaders_of(mix, 1, 0)
    assert [digest(next(iter(a))) for _ in range(3)] == [digest(next(iter(b))) for _ in range(3)]
    assert counts_of(a.save_state_rank())["samples"] == 6
    assert mix.leaves[0].weight == Fraction(1)
