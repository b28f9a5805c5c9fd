"""The plan of a conversion: the name of each shard, and the numbers of its samples.

A source has segments that each may grow at their end: one, or one for each list or split part. `runs` has how many
samples of each there were when a run found more than the one before it, and what a run found is in shards of its own.
So a source that grows leaves all shards before as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import overload

import numpy as np

from energon_bridge.core.errors import SampleError, SkipSample, SourceError
from energon_bridge.core.order.rng import Permutation, draws, key_of
from energon_bridge.core.prepare.split import SplitRule
from energon_bridge.tools.convert.group_splits import groups_in, split_groups
from energon_bridge.tools.convert.options import ConvertOptions
from energon_bridge.tools.convert.rows import Layout, Source, SourceSample
from energon_bridge.tools.convert.shards import (
    END_BYTES,
    member_size,
)

_PROPOSED_BYTES = 512 << 20
_MOST_PER_SHARD = 10_000


@dataclass(frozen=True, slots=True)
class _FailedSample:
    """A sample that could not even be named; it fails when it is read, or is left out then."""

    where: str
    error: SourceError | SampleError | SkipSample
    key: str = ""
    num_rejected: int = 0

    def sizes(self) -> list[tuple[str, int]]:
        raise self.error

    def mark(self) -> str:
        return str(self.error)

    def read(self) -> tuple[list[tuple[str, bytes]], Mapping[str, str]]:
        raise self.error


@dataclass(frozen=True, slots=True)
class ShardJob:
    """A shard and its samples, which may be all of the source."""

    shard: str
    samples: list[SourceSample] = field(repr=False)
    is_all: bool


def propose_samples_per_shard(source: Source, layout: Layout) -> int:
    """Propose samples per shard for about 512 MiB, judging by the first ones: 1, 2 or 5 times a power of ten."""
    sizes = []
    for number in range(min(20, len(source))):
        try:
            sizes.append(sum(size for _, size in source.sample(number, layout).sizes()))
        except (SourceError, SampleError, SkipSample):
            continue
    wanted = min(_MOST_PER_SHARD, max(1, _PROPOSED_BYTES * len(sizes) // max(1, sum(sizes)))) if sizes else 1000
    power = 10 ** int(math.log10(wanted))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= wanted)


Runs = Sequence[Mapping[str, int]]
"""The samples of each segment by its name, in each run that found more than the one before."""


def segments_of(source: Source) -> tuple[tuple[str, str, int], ...]:
    """Return the segments of a source in their order: split part ("" if ratios deal them out), name, and samples."""
    given = getattr(source, "segments", None)
    if given is not None:
        return tuple(given)
    return tuple((part, part, count) for part, count in source.split_parts or (("", len(source)),))


def split_numbers(count: int, rule: SplitRule, segment: str = "") -> dict[str, np.ndarray]:
    """Assign sample numbers of a segment to split parts by ratio; a number stays in its part when the source grows.

    With 9,1,0, of every ten numbers in a row nine go to train and one, chosen by a fixed key, to val.
    """
    shares = [(name, share) for name, share in rule.ratios if share]
    total = sum(share for _, share in shares)
    period = math.lcm(*((share / total).denominator for _, share in shares))
    period = min(period, 1000)
    blocks = -(-count // period)
    ranks = np.argsort(
        draws(key_of("convert split", *[segment] * bool(segment)), blocks * period).reshape(blocks, period), axis=1
    )
    places = np.argsort(ranks, axis=1).reshape(-1)[:count]
    parts = {}
    so_far = Fraction(0)
    for name, share in shares:
        start = round(so_far * period)
        so_far += share / total
        parts[name] = np.flatnonzero((places >= start) & (places < round(so_far * period)))
    return parts


def shards_of_plan(source: Source, options: ConvertOptions, runs: Runs = ()) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name of each shard and the numbers of its samples; without `runs`, all are found in one."""
    segments = segments_of(source)
    now = {name: count for _, name, count in segments}
    rule = options.split if options.split is not None and options.split.ratios else None
    is_dealt = rule is not None and sum(bool(share) for _, share in rule.ratios) > 1
    groups = groups_in(source, options.split_by) if is_dealt else None
    ends = {name: [run.get(name, 0) for run in runs or (now,)] for _, name, _ in segments}
    grouped = {}
    if groups is not None and rule is not None:
        found = [np.searchsorted(ends[name], np.arange(count), side="right") for _, name, count in segments]
        grouped = split_groups(groups, rule, np.concatenate(found))
    dealt: dict[str, list[list[np.ndarray]]] = {}
    start = 0
    for part, name, count in segments:
        by_part = split_numbers(count, rule, name) if rule else {part or "train": np.arange(count)}
        if grouped:
            by_part = {to: of[(of >= start) & (of < start + count)] - start for to, of in grouped.items()}
        for to, numbers in by_part.items():
            of_runs = dealt.setdefault(to, [[] for _ in runs or (now,)])
            places = np.searchsorted(numbers, ends[name]).tolist()
            for pieces, begin, end in zip(of_runs, [0, *places], places, strict=False):
                pieces.append(numbers[begin:end] + start)
        start += count
    for part, of_runs in dealt.items():
        shards = (
            chosen for run, pieces in enumerate(of_runs) for chosen in _shards_of(source, options, part, run, pieces)
        )
        for shard, chosen in enumerate(shards):
            yield f"{part}/{shard:05d}.tar", chosen


def _shards_of(
    source: Source, options: ConvertOptions, part: str, run: int, pieces: Sequence[np.ndarray]
) -> Iterator[np.ndarray]:
    """Yield the numbers of each shard that a run adds to a split part."""
    numbers = np.concatenate(pieces)
    if options.shuffle is not None and len(numbers):
        places = Permutation(len(numbers), key_of("convert", options.shuffle, part, *[run] * bool(run)))
        numbers = numbers[places.at_many(np.arange(len(numbers)))]
    yield from _cut(source, numbers, options)


def _cut(source: Source, numbers: np.ndarray, options: ConvertOptions) -> Iterator[np.ndarray]:
    most = options.samples_per_shard or _MOST_PER_SHARD
    if options.bytes_per_shard is None:
        yield from (numbers[at : at + most] for at in range(0, len(numbers), most))
        return
    start = 0
    size = END_BYTES
    for at, number in enumerate(numbers.tolist()):
        sample = sample_at(source, options.layout, number)
        try:
            more = sum(member_size(f"{sample.key}.{part}", length) for part, length in sample.sizes())
        except (SourceError, SampleError, SkipSample):
            more = 0  # it fails, or is skipped, when it is read
        full = options.samples_per_shard is not None and at - start >= options.samples_per_shard
        if at > start and (full or size + more > options.bytes_per_shard):
            yield numbers[start:at]
            start = at
            size = END_BYTES
        size += more
    if start < len(numbers):
        yield numbers[start:]


class ShardJobs(Sequence[ShardJob]):
    """The shards of a plan as jobs, each assembled when it is due."""

    def __init__(self, source: Source, layout: Layout, plan: Sequence[tuple[str, np.ndarray]]) -> None:
        self._source = source
        self._layout = layout
        self._plan = plan

    def __len__(self) -> int:
        return len(self._plan)

    @overload
    def __getitem__(self, at: int) -> ShardJob: ...
    @overload
    def __getitem__(self, at: slice) -> list[ShardJob]: ...
    def __getitem__(self, at: int | slice) -> ShardJob | list[ShardJob]:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        shard, numbers = self._plan[at]
        samples = [sample_at(self._source, self._layout, number) for number in numbers.tolist()]
        return ShardJob(shard, samples, len(samples) == len(self._source))


def sample_at(source: Source, layout: Layout, number: int) -> SourceSample:
    """Return a sample, not read yet; one that cannot be made fails when it is read."""
    try:
        if number in layout.repeated:
            raise SourceError(layout.repeated[number])
        return source.sample(number, layout)
    except (SourceError, SampleError, SkipSample) as error:
        named = str(error).startswith(source.where)
        return _FailedSample(source.where if named else f"{source.where}, sample {number}", error)
