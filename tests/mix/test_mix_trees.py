"""Any mix, on any chain of topologies, with saves anywhere, is the stream of an uninterrupted run on one rank.

Mixes are random trees of blends, blends by repetitions, concatenations, joins, subsets and schedules; encoders skip,
refuse, yield several, pack and group. `ENERGON_LONG_TESTS=1` tries many of them, new ones each time
(`--hypothesis-seed` repeats a run).
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import ENCODERS, deliver, loaders_of
from hypothesis import given, settings
from trees import Case, Change, cases, write_datasets

from energon_bridge.loader.document import read_lanes, read_leaves
from energon_bridge.loader.fits import merge
from energon_bridge.loader.savable import SavableDataLoader

LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))

# DataLoader counts the cores and warns of more workers than these; here their number is the point.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("trees")
    logger = logging.getLogger("energon_bridge")
    level = logger.level
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))  # of joins
        logger.setLevel(logging.ERROR)  # each of hundreds of loaders would warn of uneven ranks and idle workers
        yield write_datasets(folder)
        logger.setLevel(level)


def change_weights(loaders: list[SavableDataLoader], change: Change) -> int:
    """Set weights on all ranks; return the global draw from which they hold."""
    if change.later is None:
        return loaders[0].set_weights(change.weights)
    states = [loader.save_state_rank() for loader in loaders]
    drawn = max(lane.draw + (lane.taken > 0) for state in states for lane in read_lanes(state).values())
    start = drawn * states[0]["num_lanes"] + change.later
    assert {loader.set_weights(change.weights, from_draw=start) for loader in loaders} == {start}
    return start


def counted(states: list[Any]) -> dict[str, dict[str, int]]:
    return {row["identity"]: row["counts"] for row in read_leaves(merge(states))}


def check_counts(encoder: str, state: Any, expected: Any) -> None:
    """Compare the counters of a chain with those of an uninterrupted run."""
    found, uninterrupted = counted(state), counted(expected)
    if encoder not in ("packing", "prepost", "lengths"):
        assert found == uninterrupted
        return
    # How far a packing buffer is filled, and so what has been drawn and skipped, depends on where a chain is cut.
    for identity, counts in found.items():
        assert counts["samples"] == uninterrupted[identity]["samples"]
    if encoder != "packing":
        return
    drawn = Counter[int]()
    for lane in read_lanes(merge(state)).values():
        drawn.update(dict(enumerate(lane.leaf_draws)))
        drawn.subtract(lane.held.members[:, 0].tolist())
    for leaf, counts in enumerate(found.values()):
        assert counts["samples"] + counts["skipped"] == drawn[leaf]


@pytest.mark.parametrize("encoder", ENCODERS)
@given(case=cases())
@settings(max_examples=70 if LONG else 6, derandomize=not LONG)
def test_any_chain_of_topologies_gives_the_stream_of_any_mix(data: Path, encoder: str, case: Case) -> None:
    dataset = case.open(data, encoder)
    found: list[str] = []
    changes: list[tuple[int, list[Any]]] = []
    state: Any = None
    for leg in case.legs:
        config = {"num_lanes": case.num_lanes, "prefetch_factor": leg.prefetch}
        loaders = loaders_of(dataset, leg.ranks, leg.workers, state=state, **config)
        before, rest, masked = len(found), leg.steps, 0
        if leg.change is not None:
            delivered = deliver(loaders, leg.change.after)
            found, masked, rest = found + delivered.digests, delivered.masked, leg.steps - leg.change.after
            changes.append((change_weights(loaders, leg.change), leg.change.weights))
        delivered = deliver(loaders, rest, [rest])
        found, masked = found + delivered.digests, masked + delivered.masked
        assert len(found) - before + masked == leg.ranks * leg.steps
        state = [delivered.states[rest][rank] for rank in leg.order]
        state = json.loads(json.dumps(state)) if leg.as_json else state
        assert {part["microbatches"] for part in state} == {len(found)}
    whole = loaders_of(dataset, 1, 0, num_lanes=case.num_lanes)
    for start, weights in changes:
        whole[0].set_weights(weights, from_draw=start)
    expected = deliver(whole, len(found), [len(found)])
    assert found == expected.digests
    check_counts(encoder, state, expected.states[len(found)])
