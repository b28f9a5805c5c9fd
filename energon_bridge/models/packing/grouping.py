"""Grouping by length: samples of similar length share a batch, so that little of it is padding.

A `LengthGrouper` implements the hook `batch_group_criterion`: it returns the group of a sample and the batch size of
that group. Group b holds the lengths above boundary b-1 up to boundary b, and is named by the latter, so a batch may be
padded to its group's name and the model sees as many shapes as there are groups. With boundaries that grow by a factor
g a row, above the first group, is padded to less than g times its length; more groups mean less padding, and more
samples that wait in each lane for their batch to fill.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, Self, TypeVar

from energon_bridge.core.errors import ConfigurationError, OverLongSampleError, UnfitSampleError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthGrouper(Generic[T]):
    """Groups of samples by length.

    Examples:
        >>> class Grouped(DefaultTaskEncoder):
        ...     grouper = LengthGrouper(length_of=lambda sample: len(sample.caption), boundaries=(15,), batch_size=4)
        ...     def batch_group_criterion(self, sample):
        ...         return self.grouper.group(sample)

    Args:
        length_of: The length of a sample.
        boundaries: The longest length of each group, ascending. No sample may be longer than the last.
        max_tokens: Give each group the largest batch size at which a batch of its longest samples has at most this many
            tokens, padding included. None: every group has `batch_size`.
        batch_size: The batch size of every group; None: that of the run. Not together with `max_tokens`.
        batch_multiple: Make batch sizes from `max_tokens` multiples of this, if the group's batch is large enough.

    Raises:
        ConfigurationError: The boundaries do not ascend, both sizes are given, or a batch cannot hold one sample.
    """

    length_of: Callable[[T], int]
    boundaries: tuple[int, ...]
    max_tokens: int | None = None
    batch_size: int | None = None
    batch_multiple: int = 1

    def __post_init__(self) -> None:
        lengths = self.boundaries
        if not lengths or lengths[0] < 1 or any(shorter >= longer for shorter, longer in pairwise(lengths)):
            raise ConfigurationError(f"LengthGrouper: boundaries must be positive and ascending, got {lengths}")
        if self.max_tokens is not None and self.batch_size is not None:
            raise ConfigurationError(
                f"a LengthGrouper takes max_tokens={self.max_tokens} or batch_size={self.batch_size}, not both"
            )
        if self.max_tokens is not None and self.max_tokens < lengths[-1]:
            raise ConfigurationError(
                f"LengthGrouper: max_tokens={self.max_tokens} has no room for a sample of the longest group "
                f"({lengths[-1]}): raise max_tokens, or shorten the samples and lower the last boundary"
            )
        if self.batch_multiple < 1 or (self.batch_size is not None and self.batch_size < 1):
            raise ConfigurationError(
                f"LengthGrouper: batch_size and batch_multiple must be at least 1, got {self.batch_size} and "
                f"{self.batch_multiple}"
            )

    @classmethod
    def geometric(
        cls, *, longest: int, shortest: int = 32, growth: float = 1.25, multiple_of: int = 1, **values: Any
    ) -> Self:
        """Make groups whose boundaries grow by a factor, from `shortest` up to `longest`, each a multiple of a number.

        `values` are the other arguments of the class. Raises ConfigurationError if the numbers make no groups.
        """
        if not (0 < shortest <= longest and growth > 1 and multiple_of > 0):
            raise ConfigurationError(
                f"a LengthGrouper needs 0 < shortest <= longest, growth > 1 and multiple_of > 0; got {shortest=}, "
                f"{longest=}, {growth=}, {multiple_of=}"
            )
        boundaries: list[int] = []
        length = shortest
        while not boundaries or boundaries[-1] < longest:
            rounded = min(length, longest)
            boundaries.append(rounded + -rounded % multiple_of)
            length = max(boundaries[-1] + 1, int(boundaries[-1] * growth))
        return cls(boundaries=tuple(boundaries), **values)

    @classmethod
    def of_equal_size(cls, lengths: Iterable[int], *, groups: int, longest: int | None = None, **values: Any) -> Self:
        """Make groups with equally many of some example lengths each; fewer groups if lengths repeat.

        `longest` adds a last boundary for samples longer than any example. Raises ConfigurationError if there are no
        examples or no groups.
        """
        ordered = sorted(lengths)
        if not ordered or groups < 1:
            raise ConfigurationError(f"of_equal_size needs example lengths and at least one group; got {groups} groups")
        boundaries = {ordered[-(-number * len(ordered) // groups) - 1] for number in range(1, groups + 1)}
        if longest is not None:
            boundaries = {length for length in boundaries if length < longest} | {longest}
        return cls(boundaries=tuple(sorted(boundaries)), **values)

    def group(self, sample: T) -> tuple[int, int | None]:
        """Return the group of a sample, named by its longest length, and the group's batch size.

        Raises OverLongSampleError if the sample is longer than the last boundary, UnfitSampleError if its length is NaN
        or negative.
        """
        length = self.length_of(sample)
        if not length >= 0:
            raise UnfitSampleError(
                f"length_of of the LengthGrouper returned {length!r} for sample {getattr(sample, '__key__', '?')!r}; "
                "expected a number of at least 0"
            )
        at = bisect_left(self.boundaries, length)
        if at == len(self.boundaries):
            raise OverLongSampleError(
                f"sample {getattr(sample, '__key__', '?')!r} has length {length}, but the last group of the "
                f"LengthGrouper ends at {self.boundaries[-1]}: add a boundary, or shorten or skip the sample in "
                "encode_sample"
            )
        return self.boundaries[at], self._batch_size(self.boundaries[at])

    def _batch_size(self, longest: int) -> int | None:
        if self.max_tokens is None:
            return self.batch_size
        fits = self.max_tokens // longest
        return fits - fits % self.batch_multiple or fits
