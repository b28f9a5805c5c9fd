"""Chains of stops with balance and without, against an uninterrupted run.

A chain is drawn from a seed and a number. Its legs have ranks, workers and balance, or none, of their own; the state
passes from one to the next. Every global batch must have the microbatches of the run on one rank; where a leg is run
again from the same state on the same ranks, every rank must run the same. All ranks are in this process: those that
exchange are threads. `ENERGON_CHAINS` sets how many, `ENERGON_CHAIN_SEED` which.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chains import CODECS
from engine import InProcessDelivery, InProcessLoader, digest, loaders_of
from mixing import metadataset
from sized import Sized, sets_of, write_sized

from energon_bridge import EnergonError, get_train_dataset
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.fits import merge
from energon_bridge.core.loader.saved_run import read_lanes
from energon_bridge.trainers.replica import balance as balance_module, balanced as balanced_module
from energon_bridge.trainers.replica.balance import Balance, balanced
from energon_bridge.trainers.replica.exchange import Move, unpack

CHAINS = int(os.environ.get("ENERGON_CHAINS") or (300 if os.environ.get("ENERGON_LONG_TESTS") else 8))
SEED = int(os.environ.get("ENERGON_CHAIN_SEED", "0"))
PARTS = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    logger = logging.getLogger("energon_bridge")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balance_module, "Peers", ThreadPeers)
        patch.setattr(balanced_module, "Peers", ThreadPeers)
        yield write_sized(tmp_path_factory.mktemp("sized"))
    logger.setLevel(level)


# Ranks that are threads ----------------------------------------------------------------------------------------------


class Meeting:
    """Where the ranks of a leg meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._told: list[Any] = [None] * size

    def told(self, rank: int, value: Any) -> list[Any]:
        self._told[rank] = value
        self._barrier.wait()
        found = list(self._told)
        self._barrier.wait()
        return found


class LockedDelivery(InProcessDelivery):
    """Makes a microbatch at a time: workers in this process share its random generators."""

    lock = threading.RLock()

    def _pull(self) -> Any:
        with self.lock:
            return super()._pull()


class LockedLoader(InProcessLoader):
    _delivery_kind = LockedDelivery


class ThreadPeers:
    """`Peers` of ranks that are threads of this process; a group is a meeting and a rank."""

    def __init__(self, group: tuple[Meeting, int] | None) -> None:
        self._meeting, self.rank = group or (Meeting(1), 0)
        self.size = self._meeting.size

    def gather(self, values: Sequence[float]) -> Any:
        return np.array(self._meeting.told(self.rank, [float(value) for value in values]))

    def tell(self, text: str) -> list[str]:
        return self._meeting.told(self.rank, text)

    def exchange(self, moves: Sequence[Move], parcels: Any, sizes: Any) -> dict[int, Any]:
        found = self._meeting.told(self.rank, dict(parcels))
        wanted = [move for move in moves if move.target == self.rank]
        assert all(len(found[move.source][move.number]) == sizes[move.number] for move in wanted)
        return {move.number: unpack(found[move.source][move.number].clone()) for move in wanted}


# A chain -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    balanced: bool
    ranks: int
    workers: int
    steps: int
    prefetch: int
    codec: str
    merged: bool
    change: tuple[str, int] | None
    again: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    tree: dict[str, Any]
    settings: dict[str, Any]
    group: int
    lanes: int
    seed: int
    legs: tuple[Leg, ...]


def drawn_tree(rng: random.Random) -> tuple[dict[str, Any], bool]:
    """Return what is trained on, and whether its weights can change."""

    def leaf(name: str) -> dict[str, Any]:
        more = rng.choice([{}, {}, {"filter": "size > 3"}, {"filter": "size % 3 != 0"}, {"subset": {"range": [3, 50]}}])
        return {"path": f"./{name}"} | more

    kind = rng.choice(["one", "blend", "blend", "epochized", "concat", "same"])
    if kind == "one":
        return leaf(rng.choice("ab")), False
    leaves = [leaf("a"), leaf("a" if kind == "same" else "b")]
    if kind == "concat":
        return {"concat": leaves}, False
    if kind == "epochized":
        return {"blend_epochized": [one | {"repetitions": rng.choice([1, 2, 0.5])} for one in leaves]}, False
    unit = {"unit": "size"} if rng.random() < 0.4 else {}
    return {"blend": [one | {"weight": rng.choice([1, 3, 0.7])} for one in leaves]} | unit, True


def drawn(seed: int, number: int) -> Chain:
    rng = random.Random(f"{seed} {number}")
    tree, weighs = drawn_tree(rng)
    group, lanes = rng.choice([(4, 8), (8, 24), (12, 24), (8, 12), (12, 12), (8, 4)])
    sizes = [size for size in range(1, 13) if group % size == 0 and lanes % size == 0]
    packs = rng.random() < 0.4
    legs = []
    for place in range(rng.randint(2, 4)):
        kind = rng.choice(["weights", "ban"]) if weighs else "ban"
        legs.append(
            Leg(
                balanced=rng.random() < 0.7,
                ranks=rng.choice(sizes),
                workers=rng.randint(0, 3),
                steps=rng.randint(1, 4),
                prefetch=rng.randint(1, 3),
                codec=rng.choice(list(CODECS)),
                merged=rng.random() < 0.5,
                change=(kind, rng.randrange(40)) if place and rng.random() < 0.3 else None,
                again=rng.random() < 0.3,
            )
        )
    settings = {
        "batch_size": rng.randint(1, 4),
        "shuffle_buffer_size": rng.choice([0, 5, 30]),
        "max_samples_per_sequence": rng.choice([None, 4]),
        "parallel_shard_iters": rng.choice([None, 3]),
    }
    settings |= {"packing_buffer_size": rng.choice([5, 12])} if packs else {}
    return Chain(
        tree=tree,
        settings=settings,
        group=group,
        lanes=lanes,
        seed=rng.randrange(9),
        legs=tuple(legs),
    )


def opened(data: Path, chain: Chain, leg: Leg, dataset: DatasetSpec) -> list[Any]:
    """Open the loaders of all ranks of a leg."""
    config = {"num_lanes": chain.lanes, "microbatches_per_global_batch": chain.group, "seed": chain.seed}
    loaders = loaders_of(dataset, leg.ranks, leg.workers, kind=LockedLoader, prefetch_factor=leg.prefetch, **config)
    if not leg.balanced:
        return loaders
    meeting = Meeting(leg.ranks)
    return [balanced(loader, Balance(cost=seen_cost, group=(meeting, rank))) for rank, loader in enumerate(loaders)]


def seen_cost(batch: Any) -> float:
    return float(sum(len(noise) ** 2 for noise in batch.noise))


def delivered(loaders: list[Any], group: int, steps: int) -> list[list[list[str]]]:
    """Let all ranks run some global batches, each in a thread of its own; shape (global batches, ranks, rounds)."""
    count = group // len(loaders)

    def run(loader: Any) -> list[str]:
        return [digest(loader.deliver()) for _ in range(steps * count)]

    with ThreadPoolExecutor(len(loaders)) as pool:
        columns = list(pool.map(run, loaders))
    return [[column[step * count : (step + 1) * count] for column in columns] for step in range(steps)]


def change(loaders: list[Any], kind: str, start: int) -> None:
    for loader in loaders:
        if kind == "weights":
            loader.set_weights([1, 9], from_draw=start)
        else:
            loader.ban([f"{n:05d}" for n in range(start % 5, 60, 4)], from_draw=start, ignore_unknown=True)


def run_chain(data: Path, chain: Chain) -> None:
    """Run a chain and its reference, and compare them."""
    mix = metadataset(data, train=chain.tree)
    dataset = get_train_dataset(mix, task_encoder=Sized(), **chain.settings)
    found: list[list[str]] = []
    changes: dict[int, tuple[str, int, int]] = {}
    ends: dict[int, Any] = {}
    state: Any = None
    for leg in chain.legs:
        loaders = opened(data, chain, leg, dataset)
        codec = CODECS[leg.codec]
        states = [] if state is None else [codec(one) for one in ([merge(state)] if leg.merged else state)]
        for loader in loaders if states else ():
            loader.restore_state_rank(states)
        if leg.change is not None and state is not None:
            kind, later = leg.change
            changes[len(found)] = kind, later, earliest(state, chain.lanes) + later
            change(loaders, kind, changes[len(found)][2])
            states = [loader.save_state_rank() for loader in loaders]
        ran = delivered(loaders, chain.group, leg.steps)
        state = [loader.save_state_rank() for loader in loaders]
        if leg.again:
            others = opened(data, chain, leg, dataset)
            for loader in others if states else ():
                loader.restore_state_rank(states)
            assert delivered(others, chain.group, leg.steps) == ran
            for loader in others:
                loader.close()
        for loader in loaders:
            loader.close()
        found += sets_of(ran)
        ends[len(found)] = read_lanes(merge(state))
    one = Leg(
        balanced=False, ranks=1, workers=0, prefetch=1, steps=len(found),
        codec="plain", merged=False, change=None, again=False,
    )  # fmt: skip
    reference = opened(data, chain, one, dataset)
    expected: list[list[str]] = []
    for number, one_set in enumerate([*found, None]):
        state = [loader.save_state_rank() for loader in reference]
        if number in ends:
            assert ends[number] == read_lanes(state[0]), f"lanes after global batch {number}"
        if number in changes:
            kind, later, start = changes[number]
            assert start == earliest(state, chain.lanes) + later, f"{kind} after global batch {number}"
            change(reference, kind, start)
        if one_set is not None:
            expected += sets_of(delivered(reference, chain.group, 1))
            assert one_set == expected[-1], f"global batch {number}"
    reference[0].close()


def earliest(states: list[Any], lanes: int) -> int:
    """Return the first global draw that no lane has made."""
    made = {number: lane.draw for state in states for number, lane in read_lanes(state).items()}
    buffers = states[0]["settings"].get("packing_buffers") or lanes  # lanes that share one draw together
    return max((draw - 1) * buffers + number % buffers + 1 for number, draw in made.items())


@pytest.mark.parametrize("part", range(PARTS))
def test_a_chain_of_stops_has_the_global_batches_of_the_uninterrupted_run(part: int, data: Path) -> None:
    for number in range(part, CHAINS, PARTS):
        chain = drawn(SEED, number)
        try:
            run_chain(data, chain)
        except (AssertionError, EnergonError) as error:
            raise AssertionError(f"ENERGON_CHAIN_SEED={SEED}, chain {number}: {error!r}\n{chain}") from error
