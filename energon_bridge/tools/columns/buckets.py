"""Buckets: a run whose global batches each come from one group of samples, such as images of one size.

Every leaf of the mix is cut into one leaf for each bucket that it has samples of (`cut_into_buckets`). Microbatch m of
*every* lane comes from the same bucket, a function of m alone; a global batch is a lap over the lanes, or part of
one, so all ranks of all its steps have one bucket, on any number of ranks. Of a lap, a bucket of N samples in
microbatches of r gets `N / r` divided by the sum over all buckets, in the order of a weighted mix of one lane. So
buckets are mixed all along in proportion to their samples, and each stays within a few global batches of its share.

With packs nobody knows how many samples a microbatch takes before it is made, and all lanes must know the bucket of
the next one. So `bucket_batch_size` says about how many, for each sample as if all were like it: such as the room of a
pack divided by the tokens. Then r is the harmonic mean over the samples of a leaf, and shares are as good as that: a
bucket whose microbatches take 2 % more than it says is 2 % ahead in its epochs.

Within a bucket a lane draws as in a run that has only this bucket: its draws there are counted by themselves, from
leaf to leaf and from epoch to epoch. So nothing is dropped at the end of an epoch: the microbatch goes on with the
next one.

A bucket is *spent* when all its samples that have a weight are banned. The laps that fall to spent buckets go to the
others, in proportion to theirs: the k-th of them to the bucket that has lap k of a mix of the others alone. No other
lap moves. Which buckets are spent follows from the bans, which with buckets hold for the whole run, so it is still a
function of m. Where all are spent, nothing is left to go to, and the rule does not apply.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np

from energon_bridge.core.errors import ConfigurationError, called
from energon_bridge.core.format.dataset import PreparedDataset
from energon_bridge.core.format.foreign import ForeignDataset
from energon_bridge.core.mix import Mix, WeightSchedule
from energon_bridge.core.mix.leaves import OpenLeaf, number_leaves
from energon_bridge.core.mix.weights import GivenWeights
from energon_bridge.core.order.blend import WeightedBlend
from energon_bridge.core.order.changes import LeafWeights
from energon_bridge.core.order.leaf_order import Memo
from energon_bridge.core.order.rng import IntArray, fold
from energon_bridge.core.samples.showing import counted
from energon_bridge.core.stream.lane_state import LaneState
from energon_bridge.tools.columns.expression import column_names, values_of_samples
from energon_bridge.tools.columns.stored import SIZE_MADE_OF, TURNED_SIZE_MADE_OF, read_columns

_BUCKETS = 8
_LEAVES = 9
_SPENT = 10
_TURNS = 4096
"""Microbatches whose buckets are looked up at once: counting those before is slow where there are many buckets."""
_MOST_BUCKETS = 1000
_OFF = 0.05
"""How much more or less often than by their share samples of a bucket may come without a warning."""
_ENOUGH = 30
"""Microbatches of a lane in each bucket before there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """The buckets of a run.

    Attributes:
        group_by: The expressions of columns whose values are the names.
        names: Of each bucket, such as `1152x896`.
        rows: Samples, or packs, in a microbatch of each bucket.
        samples: Samples of each bucket.
        of_leaf: The bucket of each leaf, by identity.
        takes: How many samples of each leaf, by identity, a microbatch of it has; of packs, about.
        packs: Whether rows are packs.
        batches: Microbatches in an epoch of all buckets.
    """

    group_by: tuple[str, ...]
    names: tuple[str, ...]
    rows: tuple[int, ...]
    samples: tuple[int, ...]
    of_leaf: Mapping[str, int]
    takes: Mapping[str, Fraction]
    packs: bool
    batches: Fraction

    def smaller(self, microbatches: int, buffers: int) -> tuple[str, ...]:
        """Return a warning for each bucket with fewer samples than a global batch, or all its buffers, take.

        Args:
            microbatches: Those of a global batch.
            buffers: Samples in the packing buffers that all lanes have of a bucket.
        """
        buckets = zip(self.names, self.rows, self.samples, strict=True)
        taken = [(name, buffers or rows * microbatches, samples) for name, rows, samples in buckets]
        what = "its packing buffers" if buffers else "a global batch"
        return tuple(
            f"bucket {name} has {counted(samples, 'sample')}, fewer than the {most:,} of {what}"
            for name, most, samples in taken
            if samples < most
        )

    def rows_of(self, leaf: OpenLeaf) -> int:
        """Return the samples in a microbatch of a leaf's bucket."""
        return self.rows[self.of_leaf[leaf.identity]]

    def recorded(self) -> list[str]:
        """Return what the order depends on, as states record it."""
        return [f"{name}: {rows}" for name, rows in zip(self.names, self.rows, strict=True)]

    def recorded_takes(self, leaves: Iterable[OpenLeaf]) -> list[str] | None:
        """Return the samples in a microbatch of packs of each leaf, as states record them; None: nothing is packed."""
        if not self.packs:
            return None
        identities = [leaf.identity for leaf in leaves]
        return [f"{self.names[self.of_leaf[one]]}: {float(self.takes[one])}" for one in identities]

    def off(self, blend: BucketBlend, spans: Collection[tuple[LaneState, LaneState]]) -> str:
        """Return a complaint if packs took other numbers of samples than `takes` says, so that shares are off.

        Args:
            spans: From where to where some lanes went.
        """
        if not self.packs:
            return ""
        numbers = range(len(self.names))
        microbatches, drawn, due = np.zeros((3, len(numbers)))
        for first, last in spans:
            for sign, state in ((-1, first), (1, last)):
                microbatches += sign * blend.microbatches(state.microbatches)
                waiting = np.bincount(state.held.members[:, 0], minlength=len(blend.of_leaf))
                np.add.at(drawn, list(blend.of_leaf), sign * (np.array(state.leaf_draws) - waiting))
        if min(microbatches) < _ENOUGH * len(spans):
            return ""
        np.add.at(due, list(blend.of_leaf), np.array(blend.weights, dtype=np.float64))
        often = drawn / drawn.sum() / due
        if abs(often - 1).max() <= _OFF:
            return ""
        said = ", ".join(f"those of {self.names[one]} {often[one]:.2f} times as often" for one in numbers[:5])
        better = {self.names[one]: round(float(drawn[one] / microbatches[one]), 2) for one in numbers}
        return (
            f"group_by: packs take other numbers of samples than bucket_batch_size says, so samples come more or less "
            f"often than their share of the data: {said}. To correct that, set bucket_batch_size={better} in a new "
            f"run, or resume this one with it and on_mismatch='adapt'{called('on_mismatch')}"
        )

    def num_lanes(self, lanes: int | None, *, ranks: int, group: int | None) -> int:
        """Return the number of lanes of the run, such that a lap over them is one or several global batches.

        `group` is the microbatches of a global batch; by default there are as many lanes, or else as ranks.
        """
        lanes = lanes or group or ranks
        if group is not None and lanes % group:
            raise ConfigurationError(
                f"group_by: {lanes} lanes are no multiple of the {group} microbatches of a global batch, so some "
                "global batches would have two buckets: keep the global batch that the run began with, or leave out "
                "num_lanes"
            )
        return lanes

    def blend(self, leaves: Sequence[OpenLeaf], num_lanes: int, key: int) -> BucketBlend:
        """Return the order of the buckets for some lanes, and of their leaves, given in the order of the counters."""
        total = sum(leaf.weight for leaf in leaves)
        return BucketBlend(
            names=self.names,
            rows=self.rows,
            takes=tuple(self.takes[leaf.identity] for leaf in leaves),
            of_leaf=tuple(self.of_leaf[leaf.identity] for leaf in leaves),
            weights=tuple(leaf.weight / total for leaf in leaves),
            num_lanes=num_lanes,
            key=key,
        )


def cut_into_buckets(
    mix: Mix,
    leaves: Sequence[OpenLeaf],
    group_by: Sequence[str],
    batch_size: int,
    sizes: str | Mapping[str, float] | None,
    *,
    endless: bool,
    packs: bool = False,
    turns: bool | None = None,
) -> tuple[tuple[OpenLeaf, ...], Buckets]:
    """Return a leaf for each bucket of each leaf, and the buckets.

    Args:
        group_by: Expressions of columns; samples for which all give the same are a bucket.
        batch_size: Samples in a microbatch, where `sizes` does not say it.
        sizes: Samples in a microbatch of each bucket: by its name, or an expression of columns, of whose values in the
            bucket the least counts.
        packs: Whether `batch_size` counts packs, and `sizes` says about how many samples they have: as an expression,
            if all were like the sample.
        turns: Whether the decoder turns images as EXIF says; None: unknown.

    Raises:
        ConfigurationError, MetadataError: An expression is wrong, there are too many buckets, or the mix cannot have
            any.
    """
    _check_mix(mix, endless)
    named: dict[str, list[_Part]] = {}
    for leaf in _with_shares(mix, leaves):
        _check_turned(leaf, [*group_by, *([sizes] if isinstance(sizes, str) else [])], turns)
        own = np.arange(leaf.start, leaf.stop) if leaf.kept is None else leaf.kept
        if isinstance(sizes, str):
            wanted = values_of_samples(leaf.dataset, sizes, own).astype(np.float64)
        else:
            wanted = np.full(own.size, float(batch_size))
        for name, here in _by_bucket(leaf, own, group_by):
            named.setdefault(name, []).append(_Part(leaf, own[here], wanted[here]))
        if len(named) > _MOST_BUCKETS:
            raise ConfigurationError(
                f"group_by={[*group_by]} gives more than {_MOST_BUCKETS} buckets ({', '.join([*named][:3])}, …): round "
                "the values, as in `width // 64` or `aspect_width(width, height, 1048576, 64)`"
            )
    given = sizes if isinstance(sizes, Mapping) else {}
    if unknown := sorted(given.keys() - named.keys()):
        raise ConfigurationError(
            f"bucket_batch_size names no bucket with {', '.join(unknown[:5])}. Buckets: {', '.join(sorted(named))}"
        )
    order = sorted(named, key=lambda name: [(len(part), part) for part in name.split("x")])
    rows = {}
    for name in order:
        least = given.get(name, math.floor(min(part.wanted.min() for part in named[name])))
        if packs:
            rows[name] = batch_size
            named[name] = [part.of_packs(name, given) for part in named[name]]
        elif type(least) is int and 1 <= least < 1 << 30:
            rows[name] = least
        else:
            raise ConfigurationError(f"bucket {name}: a microbatch has {least!r} samples, expected at least 1")
    parts = [(bucket, part) for bucket, name in enumerate(order) for part in named[name]]
    # Parts of two leaves may have the same samples.
    cut = number_leaves([_part(part.leaf, part.numbers, order[bucket]) for bucket, part in parts])
    takes = [part.takes or Fraction(rows[order[bucket]]) for bucket, part in parts]
    return cut, Buckets(
        group_by=tuple(group_by),
        names=tuple(order),
        rows=tuple(rows[name] for name in order),
        samples=tuple(sum(part.numbers.size for part in named[name]) for name in order),
        of_leaf={leaf.identity: bucket for leaf, (bucket, _) in zip(cut, parts, strict=True)},
        takes={leaf.identity: take for leaf, take in zip(cut, takes, strict=True)},
        packs=packs,
        batches=sum((part.numbers.size / take for (_, part), take in zip(parts, takes, strict=True)), Fraction(0)),
    )


class _Part(NamedTuple):
    """The samples of a leaf that are in one bucket.

    Attributes:
        numbers: Which they are, shape (samples,).
        wanted: Of each, how many samples a microbatch has, shape (samples,).
        takes: How many samples of the part a microbatch of packs has, in the mean.
    """

    leaf: OpenLeaf
    numbers: np.ndarray
    wanted: np.ndarray
    takes: Fraction | None = None

    def of_packs(self, name: str, given: Mapping[str, float]) -> _Part:
        """Return the part with `takes`: the number given for the bucket, or the harmonic mean of `wanted`."""
        if given and name not in given:
            raise ConfigurationError(
                f"bucket_batch_size says nothing of bucket {name}: with packs, each needs a number"
            )
        wanted = np.array([given[name]], dtype=np.float64) if given else self.wanted
        if not (np.isfinite(wanted).all() and wanted.min() > 0):
            raise ConfigurationError(
                f"bucket {name}: bucket_batch_size gives {wanted.min()} samples in a microbatch, expected more than 0"
            )
        return self._replace(takes=Fraction(round(1000 * wanted.size / (1 / wanted).sum()) or 1, 1000))


def _check_mix(mix: Mix, endless: bool) -> None:
    """Raise ConfigurationError for a mix that cannot have buckets."""
    if mix.unit or mix.is_scheduled or mix.mode not in ("single", "weights") or not endless:
        mixed = "schedules" if mix.is_scheduled else f"`unit: {mix.unit}`" if mix.unit else f"mode {mix.mode!r}"
        raise ConfigurationError(
            "group_by is for endless training on one dataset, or on a blend whose weights are constant shares of "
            f"samples, but here is {mixed if endless else 'repeat=False'}"
        )


def _by_bucket(leaf: OpenLeaf, own: np.ndarray, group_by: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name of each bucket of a leaf, and which of its samples are in it (bool, of the shape of `own`)."""
    number = np.zeros(own.size, dtype=np.int64)
    names = [""]
    for text in group_by:
        values, places = np.unique(values_of_samples(leaf.dataset, text, own), return_inverse=True)
        number = number * values.size + places
        names = [f"{name}x{value}".removeprefix("x") for name in names for value in map(_name, values.tolist())]
    for one in np.unique(number).tolist():
        yield names[one], number == one


def _check_turned(leaf: OpenLeaf, texts: Iterable[str], turns: bool | None) -> None:
    """Raise ConfigurationError if sizes of images are not those that the decoder gives them."""
    if turns is None or not isinstance(leaf.dataset, PreparedDataset) or isinstance(leaf.dataset, ForeignDataset):
        return
    path = leaf.dataset.path
    columns = read_columns(leaf.dataset.store)
    named = {name for text in texts for name in column_names(text)}
    for name in sorted({"width", "height"} & named & columns.keys()):
        made_of = columns[name].made_of.partition(", else ")[0]
        if made_of in (_TURNED if not turns else _AS_THEY_LIE):
            there, does = ("as they lie in their files", "turns") if turns else ("turned", "does not turn")
            raise ConfigurationError(
                f"{path}: the column {name!r} has sizes of images {there}, but the decoder {does} them as their EXIF "
                f"says (autorotate={turns}), so a bucket would have several shapes. Make the column again: energon "
                f"columns add {path} --image-size{' --autorotate' * turns}"
            )


_AS_THEY_LIE = (SIZE_MADE_OF, "energon_bridge.tools.columns.making.image_size")
_TURNED = (TURNED_SIZE_MADE_OF, "energon_bridge.tools.columns.making.turned_image_size")


def _part(leaf: OpenLeaf, numbers: np.ndarray, name: str) -> OpenLeaf:
    """Return the part of a leaf that is in the bucket of that name: the samples with these numbers."""
    small = np.int32 if leaf.stop <= np.iinfo(np.int32).max else np.int64
    return dataclasses.replace(
        leaf,
        occurrence=0,
        filter=f"{leaf.filter}, bucket {name}".removeprefix(", "),
        kept=numbers.astype(small),
        weight=leaf.weight * Fraction(numbers.size, leaf.num_samples),
    )


def _name(value: object) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _with_shares(mix: Mix, leaves: Sequence[OpenLeaf]) -> list[OpenLeaf]:
    """Return leaves with weights of their own: the weight of a size group is divided by numbers of samples."""
    groups = Counter[int | None]()
    for entry, leaf in zip(mix.leaves, leaves, strict=True):
        groups[entry.size_group] += leaf.num_samples
    parts = [
        Fraction(1) if entry.size_group is None else Fraction(leaf.num_samples, groups[entry.size_group])
        for entry, leaf in zip(mix.leaves, leaves, strict=True)
    ]
    return [dataclasses.replace(leaf, weight=leaf.weight * part) for leaf, part in zip(leaves, parts, strict=True)]


@dataclass(frozen=True, kw_only=True)
class BucketBlend:
    """The order of a run with buckets: which bucket a microbatch comes from, and in it, which leaf a draw comes from.

    Args:
        names: Name of each bucket.
        rows: Samples, or packs, in a microbatch of each bucket.
        takes: Samples of each leaf that a microbatch of it has; of packs, about.
        of_leaf: The bucket of each leaf.
        weights: The weight of each leaf among all, as a share of samples; they add up to 1.
        num_lanes: Lanes of the run.
        key: Key of the run's random numbers.
        gone: The leaves of which every sample is banned.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    takes: tuple[Fraction, ...]
    of_leaf: tuple[int, ...]
    weights: tuple[Fraction, ...]
    num_lanes: int
    key: int
    gone: frozenset[int] = frozenset()

    def without(self, gone: frozenset[int]) -> BucketBlend:
        """Return the order where every sample of exactly these leaves is banned."""
        return dataclasses.replace(self, gone=gone)

    def bucket(self, microbatch: int) -> int:
        """Return the bucket of microbatch `microbatch` of a lane; the same for all lanes, so that ranks agree."""
        return self._turns[microbatch // _TURNS][microbatch % _TURNS]

    @cached_property
    def _turns(self) -> Memo[int, list[int]]:
        """The buckets of microbatches, `_TURNS` of them at once."""
        return Memo(self._next_turns, 4)

    def _next_turns(self, number: int) -> list[int]:
        buckets = self._laps.leaves(0, number * _TURNS, _TURNS)
        if self._instead is not None:
            is_spent = np.zeros(len(self.rows), dtype=np.bool_)
            is_spent[self._spent] = True
            moved = is_spent[buckets]
            before = int(self._laps.counts(0, number * _TURNS)[self._spent].sum())
            buckets[moved] = self._instead.leaves(0, before, int(moved.sum()))
        return buckets.tolist()

    def microbatches(self, microbatch: int) -> IntArray:
        """Return how many of a lane's microbatches before one come from each bucket, shape (buckets,)."""
        counts = self._laps.counts(0, microbatch)
        if self._instead is not None:
            before = int(counts[self._spent].sum())
            counts[self._spent] = 0
            counts += self._instead.counts(0, before)
        return counts

    def draws_in(self, bucket: int, leaf_draws: Sequence[int]) -> int:
        """Return a lane's draws in a bucket, from those in all leaves."""
        return sum(count for count, of in zip(leaf_draws, self.of_leaf, strict=True) if of == bucket)

    def leaf_draws(self, lane: int, microbatch: int) -> list[int]:
        """Return a lane's draws of each leaf before a microbatch."""
        draws = (self.microbatches(microbatch) * np.array(self.rows)).tolist()
        total = np.zeros(len(self.of_leaf), dtype=np.int64)
        for blend, draw in zip(self.blends, draws, strict=True):
            total += blend.counts(lane, draw) if draw else 0
        return total.tolist()

    @cached_property
    def blends(self) -> tuple[WeightedBlend, ...]:
        """For each bucket: which leaf, of all leaves, a draw in it comes from."""
        blends = []
        schedules = [WeightSchedule.constant(weight) for weight in self.weights]
        for bucket in range(len(self.rows)):
            own = [one if of == bucket else _NEVER for one, of in zip(schedules, self.of_leaf, strict=True)]
            key = fold(self.key, _LEAVES, bucket)
            blends.append(WeightedBlend(parts=_constant(own), num_lanes=self.num_lanes, key=key))
        return tuple(blends)

    @cached_property
    def _shares(self) -> list[Fraction]:
        """The share of each bucket in the microbatches, not normalised: its share of the samples / samples in one."""
        shares = [Fraction(0)] * len(self.rows)
        for weight, takes, bucket in zip(self.weights, self.takes, self.of_leaf, strict=True):
            shares[bucket] += weight / takes
        return shares

    @cached_property
    def _laps(self) -> WeightedBlend:
        return self._mix(self._shares, _BUCKETS)

    @cached_property
    def _spent(self) -> list[int]:
        """The buckets without a sample left: all of those with a weight are banned."""
        leaves = enumerate(zip(self.weights, self.of_leaf, strict=True))
        left = {bucket for leaf, (weight, bucket) in leaves if weight and leaf not in self.gone}
        return [bucket for bucket, share in enumerate(self._shares) if share and bucket not in left]

    @cached_property
    def _instead(self) -> WeightedBlend | None:
        """The buckets that take the microbatches of spent ones; None: no bucket is spent, or all are."""
        left = [Fraction(0) if bucket in self._spent else share for bucket, share in enumerate(self._shares)]
        return self._mix(left, _SPENT) if self._spent and any(left) else None

    def _mix(self, shares: Sequence[Fraction], domain: int) -> WeightedBlend:
        parts = _constant(map(WeightSchedule.constant, shares))
        return WeightedBlend(parts=parts, num_lanes=1, key=fold(self.key, domain))


_NEVER = WeightSchedule.constant(Fraction(0))
"""The weight of a leaf in every bucket but its own: one object, since there are buckets times leaves such pairs."""


def _constant(schedules: Iterable[WeightSchedule]) -> tuple[tuple[int, LeafWeights]]:
    return ((0, GivenWeights(schedules=tuple(schedules))),)
