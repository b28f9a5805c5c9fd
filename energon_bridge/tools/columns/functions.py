"""The functions of expressions: tiers of sizes, as recipes of diffusion models have them, and the same for encoders.

*Aspect ratios.* An image goes to the size, of all with sides that are multiples of `step`, whose ratio of sides is
nearest to its own, as ratios. The sizes are, for each width, the one with the largest height that does not exceed the
area, upright and lying; no side is more than `most` times the other. With area 1024 * 1024 and step 64 these are
sizes such as 1024x1024, 1152x896 and 832x1216.

*Tiers.* A number goes to the largest of some tiers that is not above it: `tier(frames, 1, 17, 33, 65)`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from energon_bridge.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class AspectTiers:
    """Sizes of about one area with many ratios of sides, and the expressions that group images by them.

    Examples:
        >>> tiers = AspectTiers(area=1024 * 1024, step=64)
        >>> tiers.size_of(4000, 3000)
        (1152, 896)
        >>> len(tiers.sizes), tiers.sizes[0]
        (13, (704, 1408))

    Attributes:
        area: The most pixels.
        step: Sides are multiples of it.
        most: The largest ratio of sides.
    """

    area: int
    step: int = 64
    most: float = 2.0

    def __post_init__(self) -> None:
        if self.step < 1 or self.area < self.step**2 or not self.most >= 1:
            raise ConfigurationError(
                f"AspectTiers(area={self.area}, step={self.step}, most={self.most}): expected a step of at least 1, an "
                "area of at least a square of it, and a ratio of at least 1"
            )

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """The sizes, (width, height), from the narrowest to the widest."""
        return _sizes(self.area, self.step, self.most)

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Return the size, (width, height), to which an image of a size goes."""
        number = int(_nearest(np.asarray([width]), np.asarray([height]), self.area, self.step, self.most)[0])
        return self.sizes[number]

    @property
    def group_by(self) -> tuple[str, str]:
        """The expressions of `width` and `height` by which images are grouped (`group_by` of `get_train_dataset`)."""
        rest = f"(width, height, {self.area}, {self.step}, {self.most})"
        return f"aspect_width{rest}", f"aspect_height{rest}"


@functools.cache
def _sizes(area: int, step: int, most: float) -> tuple[tuple[int, int], ...]:
    sizes = set()
    for width in range(step, area // step + 1, step):
        height = area // width // step * step
        if height and max(width, height) <= most * min(width, height):
            sizes |= {(width, height), (height, width)}
    return tuple(sorted(sizes, key=lambda size: (Fraction(*size), size)))


def _nearest(width: Any, height: Any, area: int, step: int, most: float) -> np.ndarray:
    """Return the number of the nearest size for each image."""
    sizes = np.array(_sizes(area, step, most), dtype=np.int64)
    if not sizes.size:
        raise ValueError(f"no size with sides of {step} has an area of {area} and a ratio of at most {most}")
    if (width <= 0).any() or (height <= 0).any():
        raise ValueError("a width or height is not positive")
    ratios = sizes[:, 0] / sizes[:, 1]
    edges = np.sqrt(ratios[:-1] * ratios[1:])  # of neighbours the geometric mean; rounded alike everywhere
    return np.searchsorted(edges, width / height)


def _aspect(side: int) -> Callable[..., np.ndarray]:
    def aspect(width: Any, height: Any, area: Any, step: Any, most: Any = None) -> np.ndarray:
        most = np.asarray(2.0) if most is None else most
        numbers = (area, step, most)
        if any(number.ndim for number in numbers) or min(area, step) < 1 or not math.isfinite(float(most)):
            raise ValueError("area, step and ratio must be numbers above 0")
        sizes = np.array(_sizes(int(area), int(step), float(most)), dtype=np.int64)
        result: np.ndarray = sizes[_nearest(width, height, int(area), int(step), float(most)), side]
        return result

    return aspect


def _tier(value: Any, *tiers: Any) -> np.ndarray:
    if not tiers or any(tier.ndim for tier in tiers):
        raise ValueError("tier needs a value and some numbers")
    ordered = np.sort(np.array([tier.item() for tier in tiers]))
    result: np.ndarray = ordered[np.maximum(np.searchsorted(ordered, value, side="right") - 1, 0)]
    return result


FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "aspect_width": _aspect(0),
    "aspect_height": _aspect(1),
    "tier": _tier,
}
"""Functions of expressions, of arrays and numbers."""
