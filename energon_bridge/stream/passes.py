"""Which samples the draws of one pass over the data are.

Validation goes through its leaves `InOrder`; training that ends goes through them `Shuffled`, anew in every pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from energon_bridge.plan.blend import EpochizedBlend
from energon_bridge.plan.leaf import Round
from energon_bridge.rng import IntArray
from energon_bridge.stream.leaf import Leaf


class FinitePlan(Protocol):
    """Which samples the draws of a pass are."""

    @property
    def first(self) -> int:
        """The global draw with which the pass begins; each pass over validation data begins with 0."""
        ...

    @property
    def num_draws(self) -> int:
        """Draws in the pass."""
        ...

    def runs(self, start: int, stop: int) -> list[tuple[int, Round, IntArray]]:
        """Return draws [start, stop) by leaf: its number, the samples, and their places among these draws."""
        ...


class InOrder:
    """The leaves one after the other, each in its own order."""

    first = 0

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._leaves = leaves
        self._ends = np.cumsum([leaf.order.num_samples for leaf in leaves])
        self.num_draws = int(self._ends[-1])

    def runs(self, start: int, stop: int) -> list[tuple[int, Round, IntArray]]:
        """Return draws [start, stop) by leaf."""
        runs = []
        at = start
        while at < stop:
            leaf = int(np.searchsorted(self._ends, at, side="right"))
            end = min(stop, int(self._ends[leaf]))
            order = self._leaves[leaf].order
            first = at - (int(self._ends[leaf]) - order.num_samples)
            indices = order.samples(np.arange(first, first + end - at, dtype=np.int64))
            runs.append((leaf, Round(first, indices, np.zeros_like(indices)), np.arange(at - start, end - start)))
            at = end
        return runs


class Shuffled:
    """One pass over the leaves as their orders and the blend lay them out for a single lane.

    Args:
        leaves: The leaves, cut for one lane.
        blend: How they are merged; None where there is one.
        epoch: Number of the pass.
    """

    def __init__(self, leaves: Sequence[Leaf], blend: EpochizedBlend | None, epoch: int) -> None:
        self._leaves = leaves
        self._blend = blend
        if blend is None:
            ends = [leaves[0].order.num_samples * number for number in (epoch, epoch + 1)]
        else:
            ends = [int(blend.drawn(0, number).sum()) for number in (epoch, epoch + 1)]
        self.first = ends[0]
        self.num_draws = ends[1] - ends[0]
        self._rounds: dict[int, Round] = {}

    def runs(self, start: int, stop: int) -> list[tuple[int, Round, IntArray]]:
        """Return draws [start, stop) by leaf."""
        first, count = self.first + start, stop - start
        if self._blend is None:
            return [(0, self._draws(0, first, count), np.arange(count))]
        leaves = self._blend.leaves(0, first, count)
        before = self._blend.counts(0, first)
        runs = []
        for leaf in np.flatnonzero(np.bincount(leaves)).tolist():
            places = np.flatnonzero(leaves == leaf)
            runs.append((leaf, self._draws(leaf, int(before[leaf]), places.size), places))
        return runs

    def _draws(self, leaf: int, first: int, count: int) -> Round:
        """Return consecutive draws of a leaf."""
        order = self._leaves[leaf].order
        indices: list[IntArray] = []
        epochs: list[IntArray] = []
        at = first
        while at < first + count:
            part = self._rounds.get(leaf)
            if part is None or not part.first <= at < part.first + part.indices.size:
                part = self._rounds[leaf] = order.round_at(0, at)
            low, high = at - part.first, min(first + count - part.first, part.indices.size)
            indices.append(part.indices[low:high])
            epochs.append(part.epochs[low:high])
            at += high - low
        return Round(first, np.concatenate(indices), np.concatenate(epochs))
