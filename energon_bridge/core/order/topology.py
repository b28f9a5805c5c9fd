"""Who delivers which lane: ranks and workers.

A run has `num_lanes` lanes (L). Microbatch m of the global sequence comes from lane `m mod L`. The functions here say,
for a run that stands at microbatch m0 on R ranks, which rank and which worker own a lane and what each rank delivers in
each step. They are pure integers: nothing in a lane depends on them, so changing R or the number of workers W changes
who delivers a microbatch and nothing else.

Ownership is fixed when a loader starts. If R divides L, lane l belongs to rank `(l - m0) mod R`, so that rank 0 is
always the next to deliver; otherwise to rank `l mod R`. A step delivers the next R microbatches of the global sequence.
If R does not divide L, it stops at the end of each lap, once round the L lanes, and ranks without a microbatch deliver
a masked one. Of the lanes of a rank, in ascending order, lane j belongs to worker `j mod W`.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from energon_bridge.core.errors import TooManyRanksError

logger = logging.getLogger(__name__)

_LANE_UNIT = 24
"""Divides the default number of lanes: it is shared evenly by 1, 2, 3, 4, 6, 8, 12 and 24 ranks."""
_FEWEST_LANES = 48
_MANY_LANES = 1024


def default_num_lanes(world_size: int, group_size: int | None = None) -> int:
    """Choose L for a new run.

    Neither the workers nor the size of the data matter, so that runs which differ in them only are one sequence.

    Args:
        world_size: Data-parallel size R; it matters only if no global batch size is known.
        group_size: Microbatches per global batch G, or None.

    Returns:
        With G: the smallest multiple of G that is at least `max(48, min(4 G, 1024))`, the same for every R that
        divides G. Without: the smallest multiple of lcm(24, R) that is at least 48, or 4 R if R does not divide 24.
        So each rank has lanes for 4 workers or more, but for R > 12 without G (2 at R = 24) and for G > 256.
    """
    if group_size is not None:
        return group_size * math.ceil(max(_FEWEST_LANES, min(4 * group_size, _MANY_LANES)) / group_size)
    unit = math.lcm(_LANE_UNIT, world_size)
    fewest = _FEWEST_LANES if unit == _LANE_UNIT else max(_FEWEST_LANES, 4 * world_size)
    return unit * math.ceil(fewest / unit)


@dataclass(frozen=True, slots=True)
class Ownership:
    """Which rank delivers which lane, for a run that starts or resumes at microbatch `start` (m0)."""

    num_lanes: int
    world_size: int
    start: int
    even: bool = field(init=False, repr=False, compare=False)  # every rank delivers a real microbatch in every step
    offset: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.world_size > self.num_lanes:
            raise TooManyRanksError(
                f"{self.world_size} data-parallel ranks cannot share {self.num_lanes} lanes (num_lanes is fixed when a "
                f"run starts): resume with at most {self.num_lanes} ranks, or start a new run with a larger num_lanes"
            )
        object.__setattr__(self, "even", self.num_lanes % self.world_size == 0)
        object.__setattr__(self, "offset", self.start % self.world_size if self.even else 0)

    def lanes_of(self, rank: int, ranks: int = 1) -> Sequence[int]:
        """Return the lanes of a rank, or of some ranks from it on, ascending."""
        own = [
            range((one + self.offset) % self.world_size, self.num_lanes, self.world_size)
            for one in range(rank, rank + ranks)
        ]
        return own[0] if ranks == 1 else sorted(itertools.chain(*own))

    def step_size(self, m: int) -> int:
        """Return how many real microbatches the step delivers that starts at microbatch m."""
        if self.even:
            return self.world_size
        place = m % self.num_lanes
        return min(self.world_size - place % self.world_size, self.num_lanes - place)

    def lane_in_step(self, rank: int, m: int) -> int | None:
        """Return the lane that a rank delivers in the step that starts at microbatch m, or None for a masked one."""
        ahead = (rank + self.offset - m % self.num_lanes) % self.world_size
        return (m + ahead) % self.num_lanes if ahead < self.step_size(m) else None

    @property
    def masked_share(self) -> float:
        """Share of delivered microbatches that are masked: `1 - L / (R ceil(L/R))`."""
        return 1 - self.num_lanes / (self.world_size * math.ceil(self.num_lanes / self.world_size))

    def nearest_even_world_size(self) -> int:
        """Return the divisor of L that is nearest to the world size (the smaller one of two)."""
        divisors = [d for d in range(1, self.num_lanes + 1) if self.num_lanes % d == 0]
        return min(divisors, key=lambda d: (abs(d - self.world_size), d))


def first_microbatch(step: int, *, num_lanes: int, world_size: int) -> int:
    """Return the microbatch of the run at which a step begins, on one number of ranks from the beginning."""
    laps, rest = divmod(step, -(-num_lanes // world_size))
    return laps * num_lanes + min(rest * world_size, num_lanes)


def step_of(m: int, *, num_lanes: int, world_size: int) -> int:
    """Return the step in which microbatch m is delivered, on one number of ranks from the beginning."""
    laps, place = divmod(m, num_lanes)
    return laps * -(-num_lanes // world_size) + place // world_size


def microbatches_before(lane: int, m: int, num_lanes: int) -> int:
    """Return how many of the first m microbatches of a run are of a lane."""
    # The number of k >= 0 with k L + lane < m: ceil((m - lane) / L).
    return max(0, -((lane - m) // num_lanes))


def lane_units(
    ownership: Ownership, rank: int, m: int, num_workers: int, *, ranks: int = 1, turn: int = 0
) -> Iterator[tuple[int, int]]:
    """Give the lanes that a rank delivers from microbatch m on, without end, each with the number of its worker.

    Those of `ranks` ranks, from that one on, come in turn; of the step at m, the first `turn` have been delivered.
    """
    worker = {lane: place % num_workers for place, lane in enumerate(ownership.lanes_of(rank, ranks))}
    of_ranks = []
    for one in range(rank, rank + ranks):
        lanes = ownership.lanes_of(one)
        lane = None
        step = m
        while lane is None:  # in the steps until the rank delivers a real microbatch
            lane = ownership.lane_in_step(one, step)
            step += ownership.step_size(step)
        first = lanes.index(lane)
        of_ranks.append([*lanes[first:], *lanes[:first]])
    units = [(lane, worker[lane]) for step in zip(*of_ranks, strict=True) for lane in step]
    return itertools.cycle(units[turn:] + units[:turn])


def step_units(
    steps: range, rank: int, num_workers: int, *, ranks: int = 1, turn: int = 0
) -> Iterator[tuple[int, int]]:
    """Give the microbatches of a finite stream that a rank delivers, each with the number of its worker.

    `steps` has the first microbatch of each step; `ranks` and `turn` are those of `lane_units`.
    """
    units = (first + one for first in steps for one in range(rank, rank + ranks))
    for number, unit in enumerate(itertools.islice(units, turn, None), turn):
        yield unit, number % num_workers
