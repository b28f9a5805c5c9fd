"""Random chains of stops against uninterrupted runs (`chains.py`): a few here, any number by `ENERGON_CHAINS`."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chain_cases import Event, Leg, drawn_chain, write_data
from chains import DifferenceError, run_chain, tried
from engine import deliver, loaders_of
from mixing import mix_data, mixed

from energon_bridge.core.loader.fits import merge
from energon_bridge.core.loader.saved_run import read_leaves

CHAINS = int(os.environ.get("ENERGON_CHAINS") or (300 if os.environ.get("ENERGON_LONG_TESTS") else 16))
SEED = int(os.environ.get("ENERGON_CHAIN_SEED", "31"))
"""By default one whose first chains have every encoder and event, and take little time."""
PARTS = 8


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("chains")
    logger = logging.getLogger("energon_bridge")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # each of hundreds of loaders would warn of uneven ranks and idle workers
    yield write_data(folder)
    logger.setLevel(level)


@pytest.mark.parametrize("part", range(PARTS))
def test_a_chain_of_stops_is_the_uninterrupted_run(data: Path, part: int) -> None:
    reports = [report for number in range(part, CHAINS, PARTS) if (report := tried(data, SEED, number)[2])]
    assert not reports, "\n\n".join(reports)


def test_a_chain_that_differs_is_found(data: Path) -> None:
    """A stop that loses a microbatch, a state that is of another run, and counters that are wrong."""
    chain = next(chain for chain in (drawn_chain(1, n) for n in range(100)) if not chain.finite and chain.run["seed"])
    plain: dict[str, Any] = {"threads": 1, "prefetch": 1, "buffer_bytes": 1 << 30, "peeks": False, "order": 0}
    legs = tuple(Leg(ranks=2, workers=0, steps=3, passing="list", codec="plain", **plain) for _ in range(2))
    chain = dataclasses.replace(chain, legs=legs)
    assert run_chain(data, chain) == "same"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chains.passed_on", lambda leg, states, own: [])
        with pytest.raises(DifferenceError, match=r"microbatch 6 .* 12 delivered, 6 expected"):
            run_chain(data, chain)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chains.counted", lambda states: {"leaf": {"samples": len(states)}})
        with pytest.raises(DifferenceError, match="samples"):
            run_chain(data, chain)


def test_a_ban_of_draws_that_some_lanes_have_made_splits_no_shared_buffer(data: Path) -> None:
    """Lanes that saw a shared buffer before the ban and after it had drawn as much, but not the same."""
    plain: dict[str, Any] = {"threads": 1, "prefetch": 1, "buffer_bytes": 1 << 30, "peeks": False, "order": 0}
    ban = Event(after=7, kind="ban", given=["2", "00002", "15", "00015"], later=-1)
    few = {"concat": [{"path": "./three", "filter": "number < 9 or number % 7 == 2"}, {"path": "./few"}]}
    chain = dataclasses.replace(
        drawn_chain(20261301, 365),
        tree={"blend": [few | {"weight": 0.1}], "unit": "number + 1"},
        settings={
            "batch_size": 1,
            "max_samples_per_sequence": None,
            "shuffle_buffer_size": 0,
            "packing_buffer_size": 5,
        },
        legs=(
            Leg(ranks=4, workers=0, steps=7, passing="list", codec="plain", events=(ban,), **plain),
            Leg(ranks=2, workers=0, steps=13, passing="list", codec="plain", **plain),
        ),
    )
    assert run_chain(data, chain) == "same"


def counts(states: list[Any]) -> list[Any]:
    return [row["counts"] for row in read_leaves(merge(states))]


@pytest.mark.parametrize("passing", ["list", "merged", "own"])
def test_counters_of_passes_are_not_multiplied_by_ranks(tmp_path: Path, passing: str) -> None:
    """Each rank took over the counters of all of them, since a pass has no lanes that say whose they are."""
    dataset = mixed(mix_data(tmp_path), tmp_path / "b", repeat=False)
    (expected,) = deliver(loaders_of(dataset, 1, 0), 12, [12]).states[12]
    states = deliver(loaders_of(dataset, 3, 0), 2, [2]).states[2]
    resumed = loaders_of(dataset, 3, 0)
    for loader, own in zip(resumed, states, strict=True):
        loader.restore_state_rank({"list": states, "merged": merge(states), "own": own}[passing])
    assert counts([loader.save_state_rank() for loader in resumed]) == counts(states)
    assert counts(deliver(resumed, 2, [2]).states[2]) == counts([expected])
