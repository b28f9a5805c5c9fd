"""Subsets: consecutive ranges of a dataset's samples, by number or in percent, nested along the path of a mix.

Semantics: samples are numbered through the split in the order of its shards. A range by number is applied first; only a
leaf can have one. Percentages follow, each outer one within the inner one: outer (o0, o1) in inner (i0, i1) is
`i0 + o * (i1 - i0)`. Ratios are floats, and their product with the number of samples is truncated as energon does, so
that a mix has exactly the same samples here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field as dataclass_field
from typing import Any

from energon_bridge.errors import MetadataError
from energon_bridge.format.documents import expect_keys, expect_mapping, wrong_type

_EXPECTED = '["25%", "75%"], [100, 200], ["20%", "end"] or [100, "end"]'


@dataclass(frozen=True, slots=True, kw_only=True)
class SubsetRange:
    """Samples `start` to `stop` (None: all the rest), and of these the part between two ratios.

    Written in a file it is one or the other; merged along a path it can be both.
    """

    start: int = 0
    stop: int | None = None
    ratio: tuple[float, float] = (0.0, 1.0)
    where: str = dataclass_field(default="", compare=False)

    @property
    def is_absolute(self) -> bool:
        """Whether samples are named by number."""
        return self.start > 0 or self.stop is not None


def parse_subset(value: Any, *, where: str, field: str, allow_absolute: bool) -> SubsetRange | None:
    """Read `{range: [a, b]}`; `allow_absolute` is False above the leaves. Raises MetadataError naming the place."""
    if value is None:
        return None
    subset = expect_mapping(value, where=where, field=field)
    expect_keys(subset, allowed=("range",), required=("range",), where=where, field=field)
    place = f"{field}.range"
    bounds = subset["range"]
    if not isinstance(bounds, list) or len(bounds) != 2:
        raise wrong_type(bounds, f"two bounds such as {_EXPECTED}", where=where, field=place)
    first, last = bounds
    at = f"{where}, field `{place}`"
    if type(first) is int and (type(last) is int or last == "end"):
        stop = None if last == "end" else last
        if not allow_absolute:
            raise MetadataError(
                f"{at}: numbers of samples are only allowed at a dataset or a join, found {bounds!r} (an absolute "
                "range is only allowed for a leaf dataset). Use percentages here, or move the range to the dataset."
            )
        if first < 0 or (stop is not None and stop < first):
            raise wrong_type(bounds, "0 <= start <= end", where=where, field=place)
        return SubsetRange(start=first, stop=stop, where=at)
    start = _percent(first)
    end = 1.0 if isinstance(last, str) and last.strip() == "end" else _percent(last)
    if start is None or end is None or start > end:
        raise wrong_type(
            bounds, f"two percentages or two numbers of samples such as {_EXPECTED}", where=where, field=place
        )
    return SubsetRange(ratio=(start, end), where=at)


_WHOLE = SubsetRange()


def merge_subsets(subsets: Sequence[SubsetRange]) -> SubsetRange:
    """Merge ranges, ordered from the innermost to the outermost, into one.

    Raises MetadataError if any but the innermost names samples by number.
    """
    if not subsets:
        return _WHOLE
    low, high = 0.0, 1.0
    for subset in reversed(subsets):
        inner_low, inner_high = subset.ratio
        low, high = inner_low + low * (inner_high - inner_low), inner_low + high * (inner_high - inner_low)
    for subset in subsets[1:]:
        if subset.is_absolute:
            raise MetadataError(
                f"{subset.where}: numbers of samples are only allowed at a dataset. Use percentages here."
            )
    innermost = subsets[0]
    return SubsetRange(start=innermost.start, stop=innermost.stop, ratio=(low, high), where=innermost.where)


def evaluate_subset(subsets: Sequence[SubsetRange], num_samples: int) -> tuple[int, int]:
    """Return (start, stop) of ranges, from the innermost to the outermost, on a split of `num_samples` samples.

    The result may be empty. Raises MetadataError if a range names samples that do not exist.
    """
    merged = merge_subsets(subsets)
    stop = num_samples if merged.stop is None else merged.stop
    if not merged.start <= stop <= num_samples:
        written = f"[{merged.start}, {'end' if merged.stop is None else merged.stop}]"
        raise MetadataError(
            f"{merged.where}: the range {written} exceeds the dataset, whose split has {num_samples} samples."
        )
    length = stop - merged.start
    low, high = merged.ratio
    return merged.start + int(length * low), merged.start + int(length * high)


def _percent(value: Any) -> float | None:
    """Return `"25%"` as 0.25, None for anything else."""
    if not isinstance(value, str) or not value.strip().endswith("%"):
        return None
    try:
        percent = float(value.strip().removesuffix("%"))
    except ValueError:
        return None
    return percent / 100.0 if math.isfinite(percent) and 0 <= percent <= 100 else None
