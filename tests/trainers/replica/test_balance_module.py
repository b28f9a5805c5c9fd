"""Balance through the data module and the Megatron-LM provider, with tensor-, context- and pipeline-parallel ranks."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from made import made_once
from replicas import digest, module, on_ranks, place

from energon_bridge.core.errors import ConfigurationError, WrongUseError
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.trainers.megatron_lm import train_valid_test_dataloaders_provider
from energon_bridge.trainers.replica import StageKeys

ROUNDS, STEPS = 4, 3
dataset = made_once(create_captioning_test_dataset, num_train=48, num_val=7)


def letters(batch: Any) -> float:
    """Return a cost of captions, very uneven."""
    return float(sum(int(key[-3:]) ** 2 % 7 for key in batch.__key__))


def balancing(dataset: Path, ranks: int, **kwargs: Any) -> Any:
    settings = {"balance": "global_batch", "balance_cost": letters, "global_batch_size": 2 * ranks * ROUNDS}
    return module(dataset, **(settings | kwargs))


def delivered(train: Any) -> list[tuple[str, str, float]]:
    found = [next(train) for _ in range(ROUNDS)]
    return [(",".join(batch.__key__), digest(batch), letters(batch)) for batch in found]


@pytest.mark.parametrize(("replica_loading", "parallel"), [("every_rank", {"tp": 2}), ("one_rank", {"pp": 2})])
def test_a_replica_gets_what_its_data_parallel_rank_runs(
    replica_loading: str, parallel: dict[str, int], dataset: Path
) -> None:
    def load(rank: int) -> Any:
        plain = module(dataset, global_batch_size=16).train_dataloader()
        before = [delivered(plain) for _ in range(STEPS)]
        data = balancing(dataset, 2, replica_loading=replica_loading)
        train = data.train_dataloader()
        after = [delivered(train) for _ in range(STEPS)]
        state = train.save_state()
        assert data.consumed_samples == 16 * STEPS
        assert data.state_dict()["train"]["microbatches"] == 8 * STEPS
        next(train)
        with pytest.raises(WrongUseError, match="1 of the 4 microbatches"):
            train.save_state()
        numbers = train.metrics()
        validation = [",".join(batch.__key__) for batch in data.val_dataloader().one_pass()]
        train.close()
        return place()["dp"], before, after, state, validation, numbers

    results = on_ranks(4, load, **parallel)
    by_rank = [[result for result in results if result[0] == rank] for rank in range(2)]
    for members in by_rank:
        assert len(members) == 2
        assert members[0][2:5] == members[1][2:5]
    spread = []
    for step in range(STEPS):
        before, after = ([members[0][which][step] for members in by_rank] for which in (1, 2))
        assert sorted(chain.from_iterable(before)) == sorted(chain.from_iterable(after))
        sums = [[sum(cost for *_, cost in rank) for rank in ranks] for ranks in (before, after)]
        spread.append([abs(first - second) for first, second in sums])
    assert sum(after for _, after in spread) <= 3
    assert sum(before for before, _ in spread) > 10
    assert max(result[5].get("balance_step_before", 0.0) for result in results) > 1


def test_the_provider_of_megatron_lm_hands_out_balanced_data(dataset: Path) -> None:
    arguments = SimpleNamespace(
        iteration=0, micro_batch_size=2, global_batch_size=16, data_parallel_size=2, consumed_train_samples=0
    )

    def load(rank: int) -> Any:
        provider = train_valid_test_dataloaders_provider(lambda: balancing(dataset, 2), arguments=lambda: arguments)
        train, valid, _ = provider([100, 10, 0])
        assert valid is not None
        found = delivered(train)
        metrics = train.metrics()  # type: ignore[union-attr]
        train.close()  # type: ignore[union-attr]
        return sum(cost for *_, cost in found), metrics["balance_step"], train.save_state()  # type: ignore[union-attr]

    results = on_ranks(2, load)
    assert abs(results[0][0] - results[1][0]) <= 1
    assert all(state["microbatches"] == 8 for *_, state in results)


def test_ranks_without_an_iterator_are_refused(dataset: Path) -> None:
    provider = train_valid_test_dataloaders_provider(
        lambda: balancing(dataset, 1), loader_ranks="tp0_pp_edges", arguments=lambda: SimpleNamespace()
    )
    with pytest.raises(ConfigurationError, match="balance='global_batch' all processes must read"):
        provider([100, 10, 0])


def test_stages_get_their_fields_of_what_was_exchanged(dataset: Path) -> None:
    def load(rank: int) -> Any:
        keys = StageKeys(first=["image"], last=["caption"])
        train = balancing(dataset, 2, replica_loading="one_rank", stage_keys=keys).train_dataloader()
        batches = [next(train) for _ in range(ROUNDS)]
        train.close()
        return place()["dp"], place()["pp"], [b.__key__ for b in batches], [b.image is None for b in batches]

    results = on_ranks(4, load, pp=2)
    for replica in range(2):
        (first, second) = sorted(result[1:] for result in results if result[0] == replica)
        assert first[1] == second[1]
        assert not any(first[2])
        assert all(second[2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"balance": "ranks"}, "balance must be 'none' or 'global_batch', got 'ranks'"),
        ({"balance_cost": 3}, "balance_cost must be a function of a batch, such as BatchCost"),
    ],
)
def test_settings_that_are_none(settings: dict[str, Any], message: str, dataset: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        balancing(dataset, 1, **settings)
