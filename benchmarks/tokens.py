"""Weights in tokens, by arithmetic alone: how near shares of tokens are in every window, and what a choice costs.

    python -m benchmarks.tokens

Datasets have 20,000 samples, of which a filter keeps four fifths; lengths are uniform from half to one and a half of a
mean, and the means of ten datasets rise evenly (as ratios) from the shortest to the longest. The weights are equal. A
window has a million tokens; the share of a dataset in it is compared with its weight, in percent of the window. Beside
it, the same weights divided by the mean lengths as shares of samples: right on average only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from energon_bridge.core.order.blend import WeightedBlend
from energon_bridge.core.order.changes import LeafBans
from energon_bridge.core.order.choose import AnyBlend, BlendPosition, Chooser, plain_rounds
from energon_bridge.core.order.leaf_order import LeafOrder, slice_length
from energon_bridge.core.stream.conventions import Conventions
from energon_bridge.core.stream.lane_state import NOTHING_HELD
from energon_bridge.core.stream.pack_buffer import PackBuffer, PackRules
from energon_bridge.models.packing.packing import Packer
from energon_bridge.tools.columns.amounts import AmountBlend, Amounts

DATASETS, SAMPLES, WINDOW, DRAWS = 10, 20_000, 1_000_000, 1_000_000
BUFFER = 64


@dataclass(frozen=True)
class PlanLeaf:
    """A leaf of which only the plan is needed."""

    order: LeafOrder
    amounts: Amounts
    bans: LeafBans | None = None


@dataclass(frozen=True)
class Constant:
    """Weights that never change."""

    weights: list[Fraction]
    moves: bool = False

    def at(self, global_draw: int) -> list[Fraction]:
        return self.weights

    def points(self) -> list[int]:
        return []


def leaves_of(lanes: int, shortest: int) -> list[PlanLeaf]:
    """Return ten leaves; the longest has samples a hundred times as long as the shortest."""
    rng, leaves = np.random.default_rng(1), []
    for number, mean in enumerate(shortest * 100 ** (np.arange(DATASETS) / (DATASETS - 1))):
        parts = np.rint(mean * rng.uniform(0.5, 1.5, SAMPLES)).clip(1).astype(np.int64) * 1024
        kept = np.flatnonzero(np.arange(SAMPLES) % 5 != 2)
        order = LeafOrder(
            num_samples=kept.size,
            num_lanes=lanes,
            key=1000 + number,
            slice_length=slice_length(kept.size, lanes, 1, None),
            shuffle_buffer_size=100,
            parallel_shard_iters=16,
            block=0,
            kept=kept,
        )
        leaves.append(PlanLeaf(order, Amounts(of_samples=parts, total=int(parts[kept].sum()), fingerprint="")))
    return leaves


def blend_of(leaves: list[PlanLeaf], lanes: int, *, tokens: bool) -> AnyBlend:
    """Return a blend of equal shares of tokens, exact or on average."""
    if tokens:
        return AmountBlend(parts=((0, Constant([Fraction(1, DATASETS)] * DATASETS)),), num_lanes=lanes, key=5)
    weights = [Fraction(leaf.order.num_samples, leaf.amounts.total) for leaf in leaves]
    return WeightedBlend(parts=((0, Constant([weight / sum(weights) for weight in weights])),), num_lanes=lanes, key=5)


def drawn(leaves: list[PlanLeaf], blend: AnyBlend, lanes: int) -> Iterator[np.ndarray]:
    """Give leaf and sample of the draws, in the global order, lap by lap."""
    round_cache = plain_rounds(leaves)
    choosers = [Chooser(round_cache, blend, lane, BlendPosition(0, [0] * DATASETS)) for lane in range(lanes)]
    while True:
        yield np.stack([chooser.picks(500).members[:, :2] for chooser in choosers], axis=1).reshape(-1, 2)


def packed(leaves: list[PlanLeaf], blend: AnyBlend, lanes: int, limit: int) -> Iterator[np.ndarray]:
    """Give leaf and sample of the packs of all lanes, pack by pack."""
    packer: Packer[Any] = Packer(limits={"tokens": limit}, size_of=lambda sample: sample)
    round_cache = plain_rounds(leaves)
    choosers = [Chooser(round_cache, blend, lane, BlendPosition(0, [0] * DATASETS)) for lane in range(lanes)]
    packs = [packs_of_lane(leaves, chooser, packer, lane) for lane, chooser in enumerate(choosers)]
    while True:
        yield from map(next, packs)


def packs_of_lane(
    leaves: list[PlanLeaf], chooser: Chooser[Any], packer: Packer[Any], lane: int
) -> Iterator[np.ndarray]:
    """Give leaf and sample of the packs of a lane, selected as the engine does (`pack_buffer.py`)."""
    tokens = np.stack([leaf.amounts.of_samples // 1024 for leaf in leaves])
    rules = PackRules()
    buffer = PackBuffer(BUFFER, NOTHING_HELD, rules.first_target(Conventions(), lane, BUFFER), rules)
    while True:
        while not len(buffer.sizes):
            if missing := buffer.missing(0, 0):
                buffer.add(chooser.picks(missing).members)
            sizes = tokens[buffer.members[:, 0], buffer.members[:, 1]]
            buffer.keep(~buffer.select(packer.pack(sizes[:, None])))
        _, members = buffer.take(1)
        yield members[:, :2]
        if more := buffer.share(1, 0):
            buffer.add(chooser.picks(more).members)


def worst(leaves: list[PlanLeaf], stream: Iterator[np.ndarray], draws: int) -> tuple[float, float]:
    """Return the largest difference of a share from its weight in any window, and over all, in percent."""
    parts, count = [], 0
    while count < draws:
        parts.append(next(stream))
        count += len(parts[-1])
    members = np.concatenate(parts)
    tokens = np.zeros(count)
    for number, leaf in enumerate(leaves):
        here = members[:, 0] == number
        tokens[here] = leaf.amounts.of_samples[members[here, 1]] / 1024
    total = np.cumsum(tokens)
    begin = np.arange(0, count, 50)
    end = np.searchsorted(total, total[begin] + WINDOW)
    begin, end = begin[end < count], end[end < count]
    most, whole = 0.0, 0.0
    for number in range(DATASETS):
        own = np.cumsum(np.where(members[:, 0] == number, tokens, 0))
        shares = (own[end] - own[begin]) / (total[end] - total[begin])
        most = max(most, float(np.abs(shares - 1 / DATASETS).max()))
        whole = max(whole, abs(float(own[-1] / total[-1]) - 1 / DATASETS))
    return 100 * most, 100 * whole


def microseconds(make: Callable[[], Chooser[Any]], at_once: int) -> float:
    """Return the least time of a draw in several runs of one process."""
    best = float("inf")
    for _ in range(5):
        chooser = make()
        for _ in islice(iter(int, 1), 20):
            chooser.picks(at_once)
        start = time.perf_counter()
        for _ in range(4000 // at_once):
            chooser.picks(at_once)
        best = min(best, (time.perf_counter() - start) / (4000 // at_once * at_once))
    return 1e6 * best


def main() -> None:
    print("| lanes | mean lengths | in tokens: worst window, whole | packed | by means: worst window, whole |")
    print("|---|---|---|---|---|")
    for lanes, shortest in ((8, 4), (24, 4), (1, 20), (2, 20), (4, 20), (24, 20), (96, 4)):
        leaves = leaves_of(lanes, shortest)
        exact, means = (blend_of(leaves, lanes, tokens=tokens) for tokens in (True, False))
        one = worst(leaves, drawn(leaves, exact, lanes), DRAWS)
        packs = worst(leaves, packed(leaves, exact, lanes, 200 * shortest), DRAWS // 4)
        other = worst(leaves, drawn(leaves, means, lanes), DRAWS)
        cells = [f"{most:.2f} %, {whole:.4f} %" for most, whole in (one, packs, other)]
        print(f"| {lanes} | {shortest} to {100 * shortest} | " + " | ".join(cells) + " |", flush=True)
    print("\n| draws at once | in tokens | by samples |")
    print("|---|---|---|")
    leaves = leaves_of(24, 8)
    for at_once in (8, 64, 256):
        cells = []
        for tokens in (True, False):
            round_cache, blend = plain_rounds(leaves), blend_of(leaves, 24, tokens=tokens)
            make = partial(Chooser, round_cache, blend, 3, BlendPosition(0, [0] * DATASETS))
            cells.append(f"{microseconds(make, at_once):.1f} us")
        print(f"| {at_once} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
