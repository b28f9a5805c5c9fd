"""Ready-made packing: bin packing under several limits, and what happens to samples that are too long.

    packer = Packer(limits={"tokens": 4096, "images": 16}, size_of=lambda s: {"tokens": len(s.tokens), "images": …})

`packer.select` is the hook `select_samples_to_pack`: it returns groups of the buffer to deliver; every sample in no
group stays in the buffer, before the samples that come next. `packer.admit` drops, cuts or refuses what no pack can
hold. A limit on `cost` (`costs.cost_limit`) makes packs cost the same: attention grows with the squares of lengths.

Three rules decide which packs leave; all of them depend on the sizes in the buffer and their order alone, so that a
resumed run repeats them:

1. a pack that is full enough: at least `min_fill` of the binding limit;
2. the best-filled packs, until a third of the buffer leaves: reading goes on whatever the sizes are;
3. a pack with one of the first `ceil(buffer / max_wait)` samples: those have waited longest, and are placed first, so
   that they choose their company. In a buffer of constant size a sample therefore leaves after at most `max_wait`
   selections, and every selection delivers a pack.

At the end of a pass or epoch all packs leave, with nobody placed before the largest. Packs leave in the order of their
oldest sample, and keep the order of the buffer inside, so that what training sees is not sorted by length.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import cache
from math import ceil
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from energon_bridge.core.encoder.hooks import LONGEST_WAIT, MAX_LIMIT, count_over_long, current_buffer_is_last
from energon_bridge.core.errors import (
    ConfigurationError,
    OverLongSampleError,
    SkipSample,
    UnfitSampleError,
    check_choice,
    is_whole,
)
from energon_bridge.core.order.rng import IntArray

# ---------------------------------------------------------------------------------------------------------------------
# Bin packing under several limits at once: which samples share a pack.
#
# Both algorithms take the samples largest first and put each into an open pack: first fit into the oldest pack that has
# room under every limit, best fit into the one with the least room left under the limit that binds (the one that the
# samples as a whole fill most often). A sample's size, for the order, is its largest share of a limit: ordered by the
# binding limit alone, the last packs hold only small samples, which then run into another limit (measured on images of
# many sizes: 97.1 % full instead of 99.5 %).
#
# All arithmetic is on integers and ties are decided by the sizes under all limits, then by position. So equal input
# gives equal packs everywhere, and samples in another order give packs of the same sizes. Placing 1,000 samples takes
# some one to four milliseconds by best fit (a bisection per sample), three to five by first fit.


Packs = list[list[int]]

_UNIT = 31  # a size in units of 1/2^31 of its limit is exact in 64 bits


def binding_limit(sizes: IntArray, limits: Sequence[int]) -> int:
    """Return the number of the limit that sizes of shape (samples, limits) fill most often; the first among equals."""
    if len(limits) == 1:
        return 0
    totals = [int(total) for total in sizes.sum(axis=0)]
    return max(range(len(limits)), key=lambda limit: Fraction(totals[limit], limits[limit]))


def best_fit(sizes: IntArray, limits: Sequence[int], first: int = 0) -> Packs:
    """Pack samples, largest first, each into the pack with the least room left under the binding limit.

    `sizes` has shape (samples, limits), none above its limit; the `first` samples are placed before all others.
    Returns the positions of each pack's samples.
    """
    if len(limits) == 1:
        return _best_fit_one(sizes[:, 0], limits[0], first)
    binding = binding_limit(sizes, limits)
    others = [limit for limit in range(len(limits)) if limit != binding]
    # By limit: a list for each sample would set off the garbage collector, over all that waits in buffers.
    columns: list[list[int]] = sizes.T.tolist()
    least = [min(column, default=0) for column in columns]
    packs: Packs = []
    rooms: list[list[int]] = []
    # The packs that can still take something, in the order of their room under the binding limit.
    open_rooms: list[int] = []
    open_packs: list[int] = []
    for sample in _largest_first(sizes, limits, first).tolist():
        at = bisect_left(open_rooms, columns[binding][sample])
        while at < len(open_packs):
            room = rooms[open_packs[at]]
            for limit in others:
                if columns[limit][sample] > room[limit]:
                    break
            else:
                break
            at += 1
        if at < len(open_packs):
            del open_rooms[at]
            pack = open_packs.pop(at)
            packs[pack].append(sample)
        else:
            pack = len(packs)
            packs.append([sample])
            rooms.append(room := list(limits))
        stays_open = True
        for limit, column in enumerate(columns):
            room[limit] -= column[sample]
            stays_open &= room[limit] >= least[limit]
        if stays_open:
            at = bisect_left(open_rooms, room[binding])
            open_rooms.insert(at, room[binding])
            open_packs.insert(at, pack)
    return packs


def _best_fit_one(sizes: IntArray, limit: int, first: int) -> Packs:
    """Do what `best_fit` does under a single limit: three times as fast, and every rank plans all packs of a run."""
    order = _largest_first(sizes[:, None], (limit,), first)
    least = int(sizes.min()) if len(sizes) else 0
    packs: Packs = []
    rooms: list[int] = []
    open_packs: Packs = []
    for sample, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        at = bisect_left(rooms, size)
        if at < len(rooms):
            pack = open_packs.pop(at)
            pack.append(sample)
            room = rooms.pop(at) - size
        else:
            packs.append(pack := [sample])
            room = limit - size
        if room >= least:
            at = bisect_left(rooms, room)
            rooms.insert(at, room)
            open_packs.insert(at, pack)
    return packs


def first_fit_decreasing(sizes: IntArray, limits: Sequence[int], first: int = 0) -> Packs:
    """Pack samples, largest first, each into the oldest pack with room under every limit.

    `sizes` has shape (samples, limits), none above its limit; the `first` samples are placed before all others.
    Returns the positions of each pack's samples.
    """
    packs: Packs = []
    room = np.empty((len(limits), len(sizes)), dtype=np.int64)
    for sample in _largest_first(sizes, limits, first).tolist():
        size = sizes[sample].tolist()
        fits = room[0, : len(packs)] >= size[0]
        for limit in range(1, len(limits)):
            fits &= room[limit, : len(packs)] >= size[limit]
        pack = int(fits.argmax()) if len(packs) else 0
        if pack == len(packs) or not fits[pack]:
            pack = len(packs)
            packs.append([])
            room[:, pack] = limits
        packs[pack].append(sample)
        room[:, pack] -= sizes[sample]
    return packs


def _largest_first(sizes: IntArray, limits: Sequence[int], first: int) -> IntArray:
    """Return the positions of samples by their largest share of a limit, descending; then by all sizes and position."""
    positions = np.arange(len(sizes))
    if len(limits) == 1:
        # One number orders samples: those placed first below all others, then larger ones below smaller ones.
        return np.argsort(np.where(positions < first, -(2**_UNIT), 0) - sizes[:, 0], kind="stable")
    share = ((sizes << _UNIT) // np.asarray(limits, dtype=np.int64)).max(axis=1, initial=0)
    columns = [-sizes[:, limit] for limit in reversed(range(len(limits)))]
    return np.lexsort((positions, *columns, -share, positions >= first)).astype(np.int64)


def padded_rows(sizes: IntArray, limits: Sequence[int], first: int = 0) -> Packs:
    """Make microbatches of samples of similar length: as many rows, padded to the longest, as the first limit holds.

    The samples are taken longest first, so no other choice has fewer microbatches; under the other limits sizes add up.
    `first` changes nothing here: rules 2 and 3 choose among the same microbatches.
    """
    microbatches: Packs = []
    left = list(limits[1:])
    longest = 0
    columns: list[list[int]] = sizes.T.tolist()
    for sample in _largest_first(sizes[:, :1], limits[:1], 0).tolist():
        rest = [column[sample] for column in columns[1:]]
        full = not microbatches or (len(microbatches[-1]) + 1) * longest > limits[0]
        if full or any(size > room for size, room in zip(rest, left, strict=True)):
            microbatches.append([])
            longest = columns[0][sample]
            left = list(limits[1:])
        microbatches[-1].append(sample)
        left = [room - size for size, room in zip(rest, left, strict=True)]
    return microbatches


ALGORITHMS: dict[str, Callable[[IntArray, Sequence[int], int], Packs]] = {
    "best_fit": best_fit,
    "first_fit_decreasing": first_fit_decreasing,
    "padded_rows": padded_rows,
}


# ---------------------------------------------------------------------------------------------------------------------
# Ready-made packing: which samples of a buffer leave it as packs now, and what becomes of samples that are too long.


T = TypeVar("T")

Sizes = Mapping[str, int]
SAMPLES = "samples"
"""The limit under which every sample counts one; `size_of` need not say so."""

_LEAST_SHARE = 3
"""A selection takes at least a third of the buffer: one sample in three (rule 2)."""


class OverLong(StrEnum):
    """What becomes of a sample that exceeds a limit by itself.

    Examples:
        >>> packer = Packer(limits={"tokens": 8192}, size_of=len, over_long=OverLong.DROP)
    """

    DROP = "drop"
    """Leave it out as `SkipSample` does."""
    TRUNCATE = "truncate"
    """Replace it by the sample that `cut` returns."""
    SPLIT = "split"
    """Replace it by the samples that `cut` returns."""
    RAISE = "raise"
    """Stop the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packer(Generic[T]):
    """A choice of packs under several limits.

    Examples:
        >>> packer = Packer(limits={"tokens": 10}, size_of=len)
        >>> [sorted(map(len, pack)) for pack in packer.select(["a" * n for n in (7, 6, 3, 4)])]
        [[3, 7], [4, 6]]

    Args:
        limits: The most that a pack holds, by name. Under `samples` every sample counts one.
        size_of: The size of a sample under each limit; with one limit besides `samples`, a number will do.
        method: `best_fit` or `first_fit_decreasing`; both take the largest samples first. Or `padded_rows`, whose packs
            are microbatches of rows that are padded to the longest; the first limit then counts padding, too.
        min_fill: A pack is full enough with this share of the binding limit, from 0 (deliver everything) to 1.
        max_wait: Selections after which a sample leaves whatever pack it is in, at most 32.
        over_long: What `admit` does with a sample that exceeds a limit by itself.
        cut: Makes of an over-long sample, and the limits, what fits: one sample to truncate, several to split.

    Raises:
        ConfigurationError: A limit is no integer from 1 to 2^31 - 1, another value makes no sense, or `cut` is missing.
    """

    limits: Mapping[str, int]
    size_of: Callable[[T], Sizes | int]
    method: Literal["best_fit", "first_fit_decreasing", "padded_rows"] = "best_fit"
    min_fill: float = 0.99
    max_wait: int = LONGEST_WAIT
    over_long: OverLong | Literal["drop", "truncate", "split", "raise"] = OverLong.RAISE
    cut: Callable[[T, Mapping[str, int]], T | Iterable[T]] | None = None

    def __post_init__(self) -> None:
        if not self.limits:
            raise ConfigurationError("Packer: needs at least one limit, for example limits={'tokens': 4096}")
        for name, limit in self.limits.items():
            if not is_whole(limit) or not 0 < limit <= MAX_LIMIT:
                raise ConfigurationError(
                    f"Packer: the limit {name!r} must be an integer from 1 to 2^31 - 1, got {limit!r}"
                )
        object.__setattr__(self, "limits", {name: int(limit) for name, limit in self.limits.items()})
        check_choice("Packer: method", self.method, tuple(ALGORITHMS))
        if not 0 <= self.min_fill <= 1:
            raise ConfigurationError(f"Packer: min_fill must be between 0 and 1, got {self.min_fill}")
        if not 1 <= self.max_wait <= LONGEST_WAIT:
            raise ConfigurationError(
                f"Packer: max_wait must be 1 to {LONGEST_WAIT} selections, got {self.max_wait}: samples that wait "
                "longer are dropped"
            )
        if self.over_long not in list(OverLong):
            raise ConfigurationError(f"Packer: over_long must be one of {', '.join(OverLong)}, got {self.over_long!r}")
        if self.cut is None and self.over_long in (OverLong.TRUNCATE, OverLong.SPLIT):
            raise ConfigurationError(
                f"Packer: over_long={str(self.over_long)!r} needs `cut`, a function of a sample and the limits that "
                f"returns {'one sample' if self.over_long == OverLong.TRUNCATE else 'several samples'} within them"
            )

    def admit(self, sample: T) -> list[T]:
        """Return what goes into the buffer: the sample if it fits into a pack, else what `over_long` says.

        What was dropped, truncated or split is counted for the dataset, in the state and in `loader.counters()`, where
        a hook that has one sample calls this (`encode_sample`, `preencode_sample`, `postencode_sample`).

        Raises:
            SkipSample: It is too long and the policy is to drop it.
            OverLongSampleError: It is too long and the policy is to raise, or what `cut` returned is still too long.
        """
        if (exceeded := self._exceeded(sample)) is None:
            return [sample]
        name, size = exceeded
        if self.over_long == OverLong.DROP:
            count_over_long("dropped")
            raise SkipSample(f"sample {_key(sample)} has {size} {name}, but a pack holds at most {self.limits[name]}")
        if self.over_long == OverLong.RAISE or self.cut is None:
            raise OverLongSampleError(self._complaint(sample, name, size))
        made = self.cut(sample, self.limits)
        pieces: list[T] = list(made) if self.over_long == OverLong.SPLIT else [made]  # type: ignore[arg-type,list-item]
        for piece in pieces:
            if (exceeded := self._exceeded(piece)) is not None:
                raise OverLongSampleError(
                    f"after `cut` (over_long={str(self.over_long)!r}) " + self._complaint(piece, *exceeded)
                )
        if self.over_long == OverLong.SPLIT:
            count_over_long("split")
            count_over_long("pieces", len(pieces))
        else:
            count_over_long("truncated")
        return pieces

    def admitted(self, sample: T) -> T | Iterator[T]:
        """Return what `admit` does as an encode hook hands it over: one sample, or a generator of several."""
        pieces = self.admit(sample)
        return pieces[0] if len(pieces) == 1 else (piece for piece in pieces)

    def select(self, samples: Sequence[T], *, flush: bool | None = None) -> list[list[T]]:
        """Return the packs that leave the buffer now, oldest samples first; `flush` delivers all of them.

        By default it is flushed where a pass or an epoch ends (`current_buffer_is_last`).

        Raises OverLongSampleError if a sample exceeds a limit by itself: `admit` must come before the buffer.
        """
        packs = self.pack(self.sizes(samples), flush=current_buffer_is_last() if flush is None else flush)
        return [[samples[position] for position in pack] for pack in packs]

    def sizes(self, samples: Sequence[T]) -> IntArray:
        """Return the sizes of samples, of shape (samples, limits), in the order of `limits`.

        Raises OverLongSampleError, naming the sample, if one exceeds a limit by itself.
        """
        measured = list(map(self.size_of, samples))
        columns = self._columns(measured)
        if columns is None:
            columns = list(zip(*map(self._row, measured, samples), strict=True)) or [[] for _ in self.limits]
        sizes = np.array(columns, dtype=np.int64).T
        too_large = sizes > np.fromiter(self.limits.values(), dtype=np.int64)
        if too_large.any():
            row, column = np.argwhere(too_large)[0].tolist()
            raise OverLongSampleError(self._complaint(samples[row], list(self.limits)[column], int(sizes[row, column])))
        return sizes

    def pack(self, sizes: IntArray, *, flush: bool = False) -> Packs:
        """Return the positions of the samples of each pack that leaves now, for sizes of shape (samples, limits).

        Raises ConfigurationError if sizes are negative, above a limit, or of another shape.
        """
        limits = list(self.limits.values())
        sizes = np.asarray(sizes, dtype=np.int64)
        if sizes.ndim != 2 or sizes.shape[1] != len(limits):
            raise ConfigurationError(f"sizes must have shape (samples, {len(limits)}), got {sizes.shape}")
        if ((sizes < 0) | (sizes > np.array(limits))).any():
            raise ConfigurationError("every size must lie between 0 and its limit; pass samples through `admit` first")
        if not len(sizes):
            return []
        must_leave = 0 if flush else -(-len(sizes) // self.max_wait)
        packs = [sorted(pack) for pack in ALGORITHMS[self.method](sizes, limits, must_leave)]
        binding = 0 if self.method == "padded_rows" else binding_limit(sizes, limits)
        return sorted(packs if flush else self._leaving(packs, sizes[:, binding].tolist(), limits[binding], must_leave))

    def _leaving(self, packs: Packs, sizes: list[int], limit: int, must_leave: int) -> Packs:
        """Apply the three rules of the module; `sizes` and `limit` are those of the binding limit."""
        full_enough = _full_enough(self.min_fill, limit)
        filled = sorted((-sum([sizes[sample] for sample in pack]), pack) for pack in packs)
        leaving: Packs = []
        delivered = 0
        for fill, pack in filled:
            # The samples of a pack are in order: its first is its oldest.
            if -fill >= full_enough or delivered * _LEAST_SHARE < len(sizes) or pack[0] < must_leave:
                leaving.append(pack)
                delivered += len(pack)
        return leaving

    def _columns(self, sizes: list[Any]) -> Sequence[Sequence[int]] | None:
        """Return what `size_of` found, by limit, if all of it has the usual form: dicts of integers, or integers."""
        kinds = set(map(type, sizes))
        if kinds == {int} and len(self._named) == 1:
            return [sizes if name == self._named[0] else [1] * len(sizes) for name in self.limits]
        if kinds != {dict}:
            return None
        columns = [[size.get(name, 1 if name == SAMPLES else None) for size in sizes] for name in self.limits]
        return columns if all(set(map(type, column)) == {int} for column in columns) else None

    @property
    def _named(self) -> list[str]:
        """The limits that `size_of` must name, or may leave out if there is only one."""
        return [name for name in self.limits if name != SAMPLES] or [SAMPLES]

    def _row(self, size: Sizes | int, sample: T) -> list[int]:
        """Return what `size_of` found for a sample, under each limit."""
        if not isinstance(size, Mapping):
            named = self._named
            if len(named) != 1:
                raise ConfigurationError(
                    f"size_of returned {size!r} for sample {_key(sample)}; with several limits it must return a size "
                    f"for each of {', '.join(named)}"
                )
            size = {named[0]: size}
        try:
            return [1 if name == SAMPLES and name not in size else _whole(size[name], sample) for name in self.limits]
        except KeyError as error:
            raise ConfigurationError(
                f"size_of returned no size under {error.args[0]!r} for sample {_key(sample)}, only {', '.join(size)}"
            ) from error

    def _exceeded(self, sample: T) -> tuple[str, int] | None:
        """Return the first limit that a sample exceeds by itself, and its size there."""
        for (name, limit), size in zip(self.limits.items(), self._row(self.size_of(sample), sample), strict=True):
            if size > limit:
                return name, size
        return None

    def _complaint(self, sample: T, name: str, size: int) -> str:
        return (
            f"sample {_key(sample)} has {size} {name}, but a pack holds at most {self.limits[name]}: raise the limit "
            f"{name!r}, shorten the sample in encode_sample, or give the Packer another policy (over_long='drop', "
            "'truncate' or 'split') and pass every sample through `admit`"
        )


@cache
def _full_enough(min_fill: float, limit: int) -> int:
    """Return the least size under the binding limit of a pack that is full enough (rule 1)."""
    return ceil(Fraction(min_fill) * limit)


def _whole(size: Any, sample: Any) -> int:
    """Return a size as an integer; rounded down, packs would exceed their limits."""
    try:
        whole = int(size)
        exact = bool(whole == size)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # NaN, or no number
        exact = False
    if not exact:
        raise UnfitSampleError(
            f"size_of returned {size!r:.100} for sample {_key(sample)}; expected a whole number: round sizes up"
        )
    return whole


def _key(sample: Any) -> str:
    return repr(sample.get("__key__", "?") if isinstance(sample, dict) else getattr(sample, "__key__", "?"))
