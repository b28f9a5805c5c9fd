"""Weights of costs that are fitted to the first steps: the same on all ranks, kept by states, new only if asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import digest
from forked import on_gloo
from test_balance import G, data, global_batches, open_data, take  # noqa: F401 - data is a fixture

from energon_bridge import BatchCost
from energon_bridge.core.errors import ConfigurationError, StateError
from energon_bridge.trainers.replica.costs import attention_pairs, fit_cost
from energon_bridge.trainers.replica.warmup import CostWarmup


def batch_of(length: int, rows: int = 2) -> dict[str, Any]:
    return {"tokens": torch.zeros(rows, length)}


def seconds_of(batch: dict[str, Any], slower: float = 1.0) -> float:
    return slower * (0.02 + 1e-4 * batch["tokens"].numel() + 3e-6 * attention_pairs(batch))


def stepped(cost: CostWarmup, steps: range, rank: int = 0, ranks: int = 1, slower: float = 1.0) -> None:
    for step in steps:
        for number in range(rank, 12, ranks):
            batch = batch_of(10 + (7 * step + 11 * number) % 50, rows=1 + number % 3)
            cost.record(batch, seconds_of(batch, slower))
        cost.step()


def same(one: BatchCost, other: BatchCost) -> bool:
    names = ("tokens", "attention", "patches")
    return all(getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-6) for name in names)


def test_the_weights_are_those_of_the_times() -> None:
    cost = CostWarmup(BatchCost(tokens=3.0), steps=4, skip=2)
    batch = batch_of(40)
    stepped(cost, range(5))
    assert not cost.finished
    assert cost(batch) == BatchCost(tokens=3.0)(batch)
    stepped(cost, range(5, 6))
    assert cost.finished
    assert cost.fitted is not None
    assert same(cost.fitted.cost, BatchCost(tokens=1e-4, attention=3e-6))
    assert cost.fitted.constant == pytest.approx(0.02)
    assert cost.weights.attention / cost.weights.tokens == pytest.approx(0.03)
    total = sum(cost(batch_of(length)) for length in range(10, 60))
    assert total == pytest.approx(sum(3.0 * 2 * length for length in range(10, 60)), rel=0.3)
    kept = cost.weights
    stepped(cost, range(6, 40), slower=9)  # later steps do not matter
    assert cost.weights is kept


def test_all_ranks_have_the_weights_of_one_rank_after_stops() -> None:
    alone = CostWarmup(steps=6, skip=1)
    stepped(alone, range(7))

    def run(rank: int, ranks: int, steps: range, state: Any) -> Any:
        cost = CostWarmup(steps=6, skip=1)
        if state is not None:
            cost.load_state_dict(json.loads(json.dumps(state)))
        stepped(cost, steps, rank, ranks)
        return cost.state_dict()

    state = None
    for ranks, steps in ((2, range(3)), (3, range(3, 5)), (2, range(5, 7))):
        states = on_gloo(ranks, lambda rank, r=ranks, s=steps, before=state: run(rank, r, s, before))
        assert all(one == states[0] for one in states)
        state = states[0]
    later = CostWarmup()
    later.load_state_dict(state)
    assert later.finished
    assert same(later.weights, alone.weights)
    assert same(later.fitted.cost, alone.fitted.cost)  # type: ignore[union-attr]
    other = CostWarmup(steps=3, skip=0)
    other.load_state_dict(state, refit=True)
    assert not other.finished
    assert other.weights == later.weights
    stepped(other, range(3), slower=2)
    assert other.fitted is not None
    assert same(other.fitted.cost, BatchCost(tokens=2e-4, attention=6e-6))


def test_the_clock_is_read_around_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([float(number**2) for number in range(1000)])
    monkeypatch.setattr("energon_bridge.trainers.replica.warmup.time.perf_counter", lambda: next(now))
    cost = CostWarmup(steps=2, skip=0)
    batches = [batch_of(10 + number) for number in range(8)]
    for batch in batches:
        with cost.timed(batch):
            pass
    cost.step()
    cost.step()
    times = [float((2 * number + 1) ** 2 - (2 * number) ** 2) for number in range(8)]
    assert cost.fitted == fit_cost(zip(batches, times, strict=True))
    with cost.timed(batches[0]):
        pass
    assert cost.state_dict()["times"] == []
    assert next(now) == 16.0**2  # nothing is timed any more


def test_times_that_say_nothing_leave_the_weights_and_mistakes_are_named(caplog: pytest.LogCaptureFixture) -> None:
    for steps, lengths in ((2, range(10, 60)), (1, range(3, 4))):
        cost = CostWarmup(steps=steps, skip=0)
        for _ in range(steps):
            for length in lengths:
                cost.record(batch_of(length), 0.1)
            cost.step()
        assert cost.finished
        assert cost.weights == BatchCost()
    assert "stay" in caplog.text
    assert "at least 8" in caplog.text
    for wrong in ({"steps": 0}, {"skip": -1}):
        with pytest.raises(ConfigurationError, match="CostWarmup"):
            CostWarmup(**wrong)  # type: ignore[arg-type]
    for state in ({}, {"weights": {"tokens": -1}}, CostWarmup().state_dict() | {"weights": {"words": 1}}):
        with pytest.raises((StateError, ConfigurationError)):
            CostWarmup().load_state_dict(state)


def test_ranks_that_exchange_go_over_to_the_fitted_weights(data: Path) -> None:  # noqa: F811
    """The global batches stay those without balance, before and after."""
    alone = open_data(data, 1, 0, kind="packed", balance=False)
    expected = global_batches([take(alone, 6, 1)], 1)
    alone.close()

    def run(rank: int) -> Any:
        cost = CostWarmup(steps=2, skip=1)
        loader = open_data(data, 2, rank, kind="packed", cost=cost)
        found = []
        for _ in range(6):
            for _ in range(G // 2):
                batch = next(loader)
                cost.record(batch, 0.01 + 1e-5 * attention_pairs(batch))
                found.append((digest(batch), BatchCost(tokens=1.0, attention=0.2)(batch)))
            cost.step()
        loader.close()
        return found, cost.weights, cost.fitted

    results = on_gloo(2, run)
    assert global_batches([found for found, *_ in results], 2) == expected
    assert results[0][1:] == results[1][1:]
    assert results[0][2].cost.attention == pytest.approx(1e-5, rel=1e-3)
