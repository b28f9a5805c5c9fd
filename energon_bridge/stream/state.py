"""The state of a lane and what one microbatch of it brings along: plain integers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class LaneState:
    """Where a lane stands: everything that is needed to continue it.

    Attributes:
        microbatches: Microbatches delivered by the lane.
        draw: Number of the next draw (of the current one, while `taken` is not 0).
        taken: Samples already taken of the current draw, whose encoder yields several.
        leaf_draws: Draws made so far in each leaf, in the order of the leaves.
    """

    microbatches: int = 0
    draw: int = 0
    taken: int = 0
    leaf_draws: tuple[int, ...] = (0,)


COUNTERS = ("samples", "skipped", "errors", "excluded")
"""What is counted per leaf: samples delivered, left out by `SkipSample`, left out by an error, listed in `exclude`."""


@dataclass(slots=True)
class Produced:
    """One microbatch with the state of its unit after it.

    Attributes:
        batch: What the encoder made; None where every sample of a block of a finite stream was skipped.
        rows: Real rows in it.
        state: State of the lane after it; None in finite streams, which have none.
        counts: Per leaf the increments of `COUNTERS`, and `bytes` read since the last microbatch, last.
    """

    batch: Any
    rows: int
    state: LaneState | None
    counts: list[list[int]] = field(default_factory=list)
