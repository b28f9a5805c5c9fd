"""Weights that may change over a run: a plain number, or points on the line of global draws.

Grammar, in YAML and as a Python dict::

    weight: 2.5
    weight: {schedule: constant, value: 2.5}
    weight: {schedule: steps,  points: [[0, 1], [10000, 3]]}     # 1 up to draw 9999, then 3
    weight: {schedule: linear, points: [[0, 1], [10000, 3]]}     # a straight line between the points
    weight: {schedule: cosine, points: [[0, 1], [10000, 3]]}     # half a cosine wave between the points

A point is [global draw, weight]; before the first and after the last point the weight is constant. A global draw is one
choice of the mix, numbered over all lanes. Only the ratio of the weights of one blend matters.

Invariant: `at` gives the same bits on every machine. It uses only the four basic operations, whose results IEEE 754
prescribes, and its own cosine, because libraries differ in the last bit.
"""

from __future__ import annotations

import math
import numbers
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, Self, get_args

from energon_bridge.core.errors import ConfigurationError, MetadataError, check_choice
from energon_bridge.core.format.documents import DocumentValue

ScheduleKind = Literal["constant", "steps", "linear", "cosine"]
_KINDS = get_args(ScheduleKind)
_QUARTER_PI = math.pi / 4
# 1/3!, 1/5!, ... of sin x = x - x^3/3! + ...; up to pi/4 the first term left out is below 1e-19.
_SINE_TERMS = tuple((-1.0) ** k / math.factorial(2 * k + 1) for k in range(9))


def exact_number(value: Any) -> Fraction | None:
    """Return a number exactly as its decimal digits say (0.1 is 1/10); None for anything but a finite number."""
    if type(value) is int:  # the abstract types below take their time
        return Fraction(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    if isinstance(value, numbers.Integral):
        return Fraction(int(value))
    number = float(value)
    return Fraction(repr(number)) if math.isfinite(number) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSchedule:
    """A weight as a function of the global draw; `points` are (draw, weight), a constant has one at draw 0.

    Examples:
        >>> weight = WeightSchedule.linear([(0, 1), (1000, 3)])
        >>> weight.at(500)
        2.0

    Raises ConfigurationError if the points are not in rising order or a weight is negative.
    """

    kind: ScheduleKind
    points: tuple[tuple[int, Fraction], ...]

    def __post_init__(self) -> None:
        check_choice("a schedule", self.kind, _KINDS)
        if not self.points:
            raise ConfigurationError(f"a {self.kind} schedule needs at least one point [draw, weight], got none")
        if self.kind == "constant" and len(self.points) > 1:
            raise ConfigurationError("a constant schedule has one weight; use steps for several")
        previous = -1
        for draw, weight in self.points:
            if draw <= previous:
                raise ConfigurationError(f"the draws of a schedule must be at least 0 and increase, got {draw}")
            if weight < 0:
                raise ConfigurationError(f"a weight must not be negative, got {float(weight)!r}")
            previous = draw

    @classmethod
    def constant(cls, value: Any) -> Self:
        """Make a weight that never changes."""
        return cls(kind="constant", points=((0, _weight(value)),))

    @classmethod
    def steps(cls, points: Iterable[tuple[int, Any]]) -> Self:
        """Make a weight that jumps at each point (draw, weight) and then stays."""
        return cls(kind="steps", points=_points(points))

    @classmethod
    def linear(cls, points: Iterable[tuple[int, Any]]) -> Self:
        """Make a weight on straight lines between points (draw, weight)."""
        return cls(kind="linear", points=_points(points))

    @classmethod
    def cosine(cls, points: Iterable[tuple[int, Any]]) -> Self:
        """Make a weight on half cosine waves between points (draw, weight)."""
        return cls(kind="cosine", points=_points(points))

    @property
    def is_constant(self) -> bool:
        """Whether the weight never changes."""
        return len(self.points) == 1 or all(weight == self.points[0][1] for _, weight in self.points)

    @property
    def moves(self) -> bool:
        """Whether the weight changes from draw to draw, not only at points."""
        return self.kind in ("linear", "cosine") and not self.is_constant

    def at(self, global_draw: int) -> float:
        """Return the weight of a global draw."""
        after = bisect_right(self.points, global_draw, key=_draw)
        if after == 0 or after == len(self.points) or self.kind == "steps":
            return float(self.points[max(after - 1, 0)][1])
        (start, first), (end, last) = self.points[after - 1], self.points[after]
        passed = (global_draw - start) / (end - start)
        if self.kind == "cosine":
            passed = _half_wave(passed)
        return float(first) + (float(last) - float(first)) * passed

    def exact_at(self, global_draw: int) -> Fraction:
        """Return the weight of a global draw as a fraction: exact at a point, that of the float between points."""
        after = bisect_right(self.points, global_draw, key=_draw)
        before = self.points[max(after - 1, 0)]
        if after == 0 or after == len(self.points) or self.kind == "steps" or before[0] == global_draw:
            return before[1]
        return Fraction(self.at(global_draw))

    def to_plain(self) -> dict[str, Any]:
        """Return built-in values that `parse_weight` reads back to an equal schedule."""
        if self.kind == "constant":
            return {"schedule": "constant", "value": plain_number(self.points[0][1])}
        return {"schedule": self.kind, "points": [[draw, plain_number(weight)] for draw, weight in self.points]}

    def __str__(self) -> str:
        if self.kind == "constant":
            return str(plain_number(self.points[0][1]))
        return f"{self.kind} " + " → ".join(f"{draw}: {plain_number(weight)}" for draw, weight in self.points)


def parse_weight(value: Any, *, where: str, field: str) -> WeightSchedule:
    """Read a weight: a number, a schedule in the grammar above, or a WeightSchedule. Raises MetadataError."""
    if isinstance(value, WeightSchedule):
        return value
    weight = DocumentValue(value, where, field)
    try:
        if isinstance(value, dict):
            return _parse_schedule(weight)
        if exact_number(value) is None:
            raise weight.wrong("a number or a schedule, as {schedule: linear, points: [[0, 1], [10000, 3]]}")
        return WeightSchedule.constant(value)
    except ConfigurationError as error:
        raise MetadataError(f"{weight.at}: {error}.") from error


def plain_number(value: Fraction) -> int | float:
    """Return a fraction as the number it was written as."""
    return int(value) if value.denominator == 1 else float(value)


def _parse_schedule(weight: DocumentValue) -> WeightSchedule:
    value = weight.mapping()
    keys = ("schedule", "value") if value.get("schedule") == "constant" else ("schedule", "points")
    known = {*keys} if "schedule" in value else {"schedule", "points", "value"}
    weight.check_keys(known, required=("schedule",))
    kind = value["schedule"]
    if kind not in _KINDS:
        raise weight.get("schedule").wrong(f"one of {', '.join(_KINDS)}")
    weight.check_keys(keys, required=keys)
    if kind == "constant":
        return WeightSchedule.constant(value["value"])
    points = value["points"]
    if not isinstance(points, list):
        raise weight.get("points").wrong("a list of points [draw, weight]")
    return WeightSchedule(kind=kind, points=_points(points))


def _points(points: Iterable[Any]) -> tuple[tuple[int, Fraction], ...]:
    parsed: list[tuple[int, Fraction]] = []
    for point in points:
        if not isinstance(point, (list, tuple)) or len(point) != 2:
            raise ConfigurationError(f"a point of a schedule is [draw, weight], got {point!r}")
        draw, weight = point
        number = exact_number(draw)  # 1e5 is a whole number, too
        if number is None or number.denominator != 1:
            raise ConfigurationError(f"the draw of a point must be a whole number, got {draw!r}")
        parsed.append((int(number), _weight(weight)))
    return tuple(parsed)


def _weight(value: Any) -> Fraction:
    number = exact_number(value)
    if number is None:
        raise ConfigurationError(f"a weight must be a finite number, got {value!r} ({type(value).__name__})")
    return number


def _draw(point: tuple[int, Fraction]) -> int:
    return point[0]


def _half_wave(passed: float) -> float:
    """Return (1 - cos(pi x)) / 2 = sin(pi x / 2)^2 for x in [0, 1]."""
    if passed > 0.5:  # the wave is symmetric; small arguments keep the series short
        return 1.0 - _half_wave(1.0 - passed)
    angle = passed * 2 * _QUARTER_PI
    square = angle * angle
    total = 0.0
    for term in reversed(_SINE_TERMS):
        total = total * square + term
    sine = angle * total
    return sine * sine
