"""Bans: samples that are withdrawn from a run from a global draw on, while everything else stays in place.

A draw whose sample is banned is made and counted, gives nothing, and moves no other draw. Global draw g is draw
`g div L` of lane `g mod L`; in training by passes, which have no lanes, draws are counted through all passes. So what
is left out follows from the order alone, on any ranks and workers.

In a state a ban is `[global draw, [key, ...]]`, or `[global draw, [key, ...], path of the only dataset]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_bridge.rng import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Ban:
    """Keys that do not come from a global draw on: those of all datasets, or of the one with a path."""

    start: int
    keys: tuple[str, ...]
    dataset: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafBans:
    """The banned samples of one leaf: their rising indices, and the global draw from which each is banned."""

    samples: IntArray
    starts: IntArray

    def among(self, samples: IntArray) -> NDArray[np.bool_]:
        """Tell which samples are banned from some draw on."""
        places = np.minimum(np.searchsorted(self.samples, samples), self.samples.size - 1)
        return self.samples[places] == samples

    def at(self, samples: IntArray, global_draws: IntArray) -> NDArray[np.bool_]:
        """Tell which samples are banned at the global draws that give them."""
        places = np.minimum(np.searchsorted(self.samples, samples), self.samples.size - 1)
        return (self.samples[places] == samples) & (self.starts[places] <= global_draws)


def write_bans(bans: Iterable[Ban]) -> list[Any]:
    """Return bans as built-in values."""
    return [[ban.start, list(ban.keys), *([ban.dataset] if ban.dataset else [])] for ban in bans]


def with_ban(bans: Sequence[Ban], new: Ban) -> tuple[Ban, ...]:
    """Return bans with one more, in the order of states: of its keys those that are not banned by then already."""
    known = {key for ban in bans if ban.start <= new.start and ban.dataset in ("", new.dataset) for key in ban.keys}
    keys = tuple(sorted({*new.keys} - known))
    if not keys:
        return tuple(bans)
    place = (new.start, new.dataset)
    same = next((ban.keys for ban in bans if (ban.start, ban.dataset) == place), ())
    rest = [ban for ban in bans if (ban.start, ban.dataset) != place]
    more = Ban(start=new.start, keys=tuple(sorted({*same, *keys})), dataset=new.dataset)
    return tuple(sorted([*rest, more], key=lambda ban: (ban.start, ban.dataset)))
