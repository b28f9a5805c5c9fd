"""Bans: samples withdrawn from a run from some global draw on, while everything else stays in place.

A draw of a banned sample still happens and is counted, but gives nothing and moves no other draw. Global draw g is draw
`g div L` of lane `g mod L`; training by passes has no lanes and numbers its draws through all passes. So what is left
out follows from the order alone, on any ranks and workers.

In a state a ban is `[global draw, [key, ...]]`, or `[global draw, [key, ...], path of the only dataset]`. The samples
found for the keys are kept beside it, so that a resume need not search for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from energon_bridge.rng import IntArray


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
    """Return bans with one more, as states have them: by draw and dataset, each key where its ban begins first.

    The order in which bans were given leaves no trace.
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
        samples, starts = np.concatenate((banned.samples, samples)), np.concatenate((banned.starts, starts))
    order = np.lexsort((starts, samples))
    samples, starts = samples[order], starts[order]
    first = np.concatenate(([True], np.diff(samples) > 0))  # the earliest draw of each sample
    return LeafBans(samples=samples[first], starts=starts[first])
