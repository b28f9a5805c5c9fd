"""What holds from a global draw on: the weights of the leaves, and the bans of samples.

*Weights* are in the order of the leaves' identities; `mix/weights.py` has those of a mix and those set during a run.

*Bans* leave samples out of a run, while everything else stays in place. A draw of a banned sample still happens and is
counted, but gives nothing and moves no other draw. Global draw g is draw `g div L` of lane `g mod L`; training by
passes has no lanes and numbers its draws through all passes. So what is banned follows from the order alone, on any
ranks and workers. In a state a ban is `[global draw, [key, ...]]`, or `[global draw, [key, ...], path of the only
dataset]`. The samples found for the keys are kept beside it, so that a resume need not search for them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from energon_bridge.core.order.rng import IntArray

_MOST_PIECES = 256


class LeafWeights(Protocol):
    """Weights over the global draws of a run: draw g is draw `g div L` of lane `g mod L`."""

    def at(self, global_draw: int) -> Sequence[float | Fraction]:
        """Return the weights of a global draw: non-negative, not all zero, in order of the leaves' identities."""

    def points(self) -> Sequence[int]:
        """Return the global draws between which the weights stay, or move evenly, ascending."""

    @property
    def moves(self) -> bool:
        """Whether any weight changes from draw to draw, not only at points."""


@dataclass(frozen=True, kw_only=True)
class WeightParts:
    """The weights of a run, cut into pieces in which they are constant: the base of the blends by weight.

    Args:
        parts: Weights, each from a global draw on, in rising order; the first from 0 on.
        num_lanes: L.
        key: Key of the run.
    """

    parts: tuple[tuple[int, LeafWeights], ...]
    num_lanes: int
    key: int

    @cached_property
    def _pieces(self) -> list[tuple[int, LeafWeights, int]]:
        """Of each piece: its first global draw, the weights that hold in it, and the draw to ask them for."""
        found = []
        ends = [start for start, _ in self.parts[1:]]
        for number, (first, weights) in enumerate(self.parts):
            last = ends[number] if number < len(ends) else None
            pieces = _pieces_of(weights)
            for (start, at), end in zip(pieces, [*(start for start, _ in pieces[1:]), None], strict=True):
                if (last is None or start < last) and (end is None or end > first):
                    found.append((max(start, first), weights, at))
        return found

    @cached_property
    def starts(self) -> list[int]:
        """The global draws from which on weights are constant, ascending."""
        return [start for start, _, _ in self._pieces]

    def piece(self, global_draw: int) -> int:
        """Return the number of the piece of constant weights that a global draw is in."""
        return bisect_right(self.starts, global_draw) - 1

    def weights_of(self, piece: int) -> Sequence[float | Fraction]:
        """Return the weights of a piece."""
        _, weights, at = self._pieces[piece]
        return weights.at(at)


def _pieces_of(weights: LeafWeights) -> list[tuple[int, int]]:
    """Return the global draws from which on weights are constant, each with the draw whose weights hold there."""
    points = [0, *(point for point in weights.points() if point > 0)]
    starts = []
    # Weights that move between two points do so in equal steps, of which each has the weights of its middle draw.
    for low, high in pairwise(points):
        pieces = min(_MOST_PIECES, math.isqrt(high - low) // 4 + 1) if weights.moves else 1
        starts += [low + (high - low) * number // pieces for number in range(pieces)]
    starts.append(points[-1])
    return [*((start, (start + later - 1) // 2) for start, later in pairwise(starts)), (starts[-1], starts[-1])]


# Bans ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ban:
    """Keys banned from a global draw on: in all datasets, or in the one at `path`."""

    start: int
    keys: tuple[str, ...]
    dataset: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafBans:
    """The banned samples of one leaf: ascending indices, and the global draw from which each is banned."""

    samples: IntArray
    starts: IntArray

    def among(self, samples: IntArray) -> NDArray[np.bool_]:
        """Return which samples are banned from some draw on."""
        places = np.minimum(np.searchsorted(self.samples, samples), self.samples.size - 1)
        return self.samples[places] == samples

    def at(self, samples: IntArray, global_draws: IntArray) -> NDArray[np.bool_]:
        """Return which samples are banned at the global draws that select them."""
        places = np.minimum(np.searchsorted(self.samples, samples), self.samples.size - 1)
        return (self.samples[places] == samples) & (self.starts[places] <= global_draws)


def new_keys(bans: Sequence[Ban], ban: Ban) -> list[str]:
    """Return the distinct keys of a ban that no earlier ban covers by then."""
    known = {key for old in bans if old.start <= ban.start and old.dataset in ("", ban.dataset) for key in old.keys}
    return [key for key in dict.fromkeys(ban.keys) if key not in known]


def with_ban(bans: Sequence[Ban], ban: Ban) -> tuple[Ban, ...]:
    """Return bans with one more, as states have them: sorted by draw and dataset, each key in its earliest ban.

    The result does not depend on the order in which the bans were given.
    """
    merged: list[Ban] = []
    for one in sorted([*bans, ban], key=lambda one: (one.start, one.dataset)):
        keys = new_keys(merged, one)
        if keys and merged and (merged[-1].start, merged[-1].dataset) == (one.start, one.dataset):
            merged[-1] = replace(merged[-1], keys=tuple(sorted({*merged[-1].keys, *keys})))
        elif keys:
            merged.append(replace(one, keys=tuple(sorted(keys))))
    return tuple(merged)


def with_samples(banned: LeafBans | None, samples: IntArray, start: int) -> LeafBans | None:
    """Return the bans of a leaf with further samples banned from a global draw on."""
    if not samples.size:
        return banned
    starts = np.full(samples.size, start, dtype=np.int64)
    if banned is not None:
        samples = np.concatenate((banned.samples, samples))
        starts = np.concatenate((banned.starts, starts))
    order = np.lexsort((starts, samples))
    samples = samples[order]
    starts = starts[order]
    first = np.concatenate(([True], np.diff(samples) > 0))  # the earliest draw of each sample
    return LeafBans(samples=samples[first], starts=starts[first])
