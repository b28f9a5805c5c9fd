"""The state of a lane and what one microbatch of it brings along: plain integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LaneState:
    """Where a lane stands: everything that is needed to continue it.

    Attributes:
        microbatches: Microbatches delivered by the lane.
        draw: Number of the next draw (of the current one, while `taken` is not 0).
        taken: Samples already taken of the current draw, whose encoder yields several.
        leaf_draws: Draws made so far in each leaf, in the order of the leaves.
        origin: Draw at which the first epoch of a blend by repetitions began (0 but where the mix has been changed).
    """

    microbatches: int
    draw: int
    taken: int
    leaf_draws: tuple[int, ...]
    origin: int = 0

    @classmethod
    def fresh(cls, leaves: int) -> LaneState:
        """Return the state of a lane that has delivered nothing."""
        return cls(0, 0, 0, (0,) * leaves)


COUNTERS = ("samples", "skipped", "errors", "excluded", "bytes")
"""What is counted per leaf: samples delivered, left out by `SkipSample`, left out by an error, listed in `exclude`; and
bytes of the samples drawn."""


class Counts(dict[int, list[int]]):
    """Increments of `COUNTERS`, by leaf."""

    def of(self, leaf: int) -> list[int]:
        """Return the increments of a leaf, to be added to."""
        counted = self.get(leaf)
        if counted is None:
            counted = self[leaf] = [0] * len(COUNTERS)
        return counted


@dataclass(slots=True)
class Produced:
    """One microbatch with the state of its unit after it.

    Attributes:
        batch: What the encoder made.
        rows: Real rows in it.
        state: State of the lane after it; None in finite streams, which have none.
        counts: What it adds to the counters.
    """

    batch: Any
    rows: int
    state: LaneState | None
    counts: Counts
