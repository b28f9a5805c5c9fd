"""Bans: samples that are withdrawn from a run from a global draw on, while everything else stays in place.

A draw whose sample is banned is made and counted, gives nothing, and moves no other draw. Global draw g is draw
`g div L` of lane `g mod L`; in training by passes, which have no lanes, draws are counted through all passes. So what
is left out follows from the order alone, on any ranks and workers.

In a state a ban is `[global draw, [key, ...]]`, or `[global draw, [key, ...], path of the only dataset]`. What has been
found of the keys stands beside it, so that a resume looks nothing up.
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


def new_keys(bans: Sequence[Ban], ban: Ban) -> list[str]:
    """Return the keys of a ban that earlier ones do not ban by then, each once."""
    known = {key for old in bans if old.start <= ban.start and old.dataset in ("", ban.dataset) for key in old.keys}
    return [key for key in dict.fromkeys(ban.keys) if key not in known]


def with_ban(bans: Sequence[Ban], ban: Ban) -> tuple[Ban, ...]:
    """Return bans with one more, in the order of states; what of it is new is put together with its like."""
    keys = new_keys(bans, ban)
    if not keys:
        return tuple(bans)
    place = (ban.start, ban.dataset)
    same = next((old.keys for old in bans if (old.start, old.dataset) == place), ())
    rest = [old for old in bans if (old.start, old.dataset) != place]
    more = Ban(start=ban.start, keys=tuple(sorted({*same, *keys})), dataset=ban.dataset)
    return tuple(sorted([*rest, more], key=lambda old: (old.start, old.dataset)))


def with_samples(banned: LeafBans | None, samples: IntArray, start: int) -> LeafBans | None:
    """Return what is banned of a leaf with some samples more, from a global draw on."""
    if not samples.size:
        return banned
    starts = np.full(samples.size, start, dtype=np.int64)
    if banned is not None:
        samples, starts = np.concatenate((banned.samples, samples)), np.concatenate((banned.starts, starts))
    order = np.lexsort((starts, samples))
    samples, starts = samples[order], starts[order]
    first = np.concatenate(([True], np.diff(samples) > 0))  # of each sample the earliest
    return LeafBans(samples=samples[first], starts=starts[first])
