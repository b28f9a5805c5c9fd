"""The weights of a run's leaves: those of its mix, and those set while it runs.

Both are `LeafWeights` of the order (`order/changes.py`). In a state, a change is `[global draw, [weight, ...]]`, in the
order of the leaves' identities; each weight is a number or a schedule in the form used in files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from energon_bridge.core.mix.flatten import Mix
from energon_bridge.core.mix.schedule import WeightSchedule
from energon_bridge.core.order.rng import key_of

ChangedWeights = Sequence[tuple[int, "GivenWeights"]]
"""Weights that take over at global draws, in rising order."""


@dataclass(frozen=True, kw_only=True)
class MixWeights:
    """The weights of a mix.

    Args:
        sizes: Samples of each leaf (in a blend with a `unit`: the sum of their amounts), in the order of the mix.
        order: For each leaf in the order of identities, its place in the mix. Weights are returned in this order.
    """

    mix: Mix
    sizes: tuple[int, ...]
    order: tuple[int, ...]

    def at(self, global_draw: int) -> Sequence[float | Fraction]:
        weights: Sequence[float | Fraction]
        if self.mix.is_scheduled or self.mix.needs_sizes:
            weights = self.mix.weights_at(global_draw, self.sizes)
        else:
            weights = [leaf.weight or Fraction(0) for leaf in self.mix.leaves]
        return [weights[place] for place in self.order]

    def points(self) -> list[int]:
        return self.mix.schedule_points()

    @property
    def moves(self) -> bool:
        return self.mix.moves

    def fingerprint(self) -> str:
        """Return a hash of the weights over the whole run: at the points of all schedules and thrice between them."""
        points = [0, *self.points()]
        between = [low + (high - low) * quarter // 4 for low, high in pairwise(points) for quarter in (1, 2, 3)]
        weights = ((draw, *(float(weight) for weight in self.at(draw))) for draw in sorted({*points, *between}))
        return f"{key_of(*(repr(row) for row in weights)):016x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenWeights:
    """Weights set during the run, one schedule per leaf, in the order of identities."""

    schedules: tuple[WeightSchedule, ...]

    def at(self, global_draw: int) -> Sequence[float | Fraction]:
        return [schedule.exact_at(global_draw) for schedule in self.schedules]

    def points(self) -> list[int]:
        return sorted({draw for schedule in self.schedules for draw, _ in schedule.points})

    @property
    def moves(self) -> bool:
        return any(schedule.moves for schedule in self.schedules)
