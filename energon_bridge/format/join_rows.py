"""Finding the rows of a join: the samples of a primary, with what the other datasets have under the same keys.

The shards of the primary are shared out in runs, to any number of processes; only arrays of whole numbers leave them.
Excluded samples and shards outside of the split part give no row in the primary, and count as missing in the others.
Rows that a `nonmatch: skip` drops are dropped before a `nonmatch: error` looks at the rest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

import numpy as np

from energon_bridge.errors import KeyIndexError, UnmatchedKeyError
from energon_bridge.format.dataset import PreparedDataset
from energon_bridge.format.join import JoinPart, Nonmatch
from energon_bridge.format.key_lookup import KeyIndex, find_keys, keys_at, local_key_index, matches
from energon_bridge.format.nvmeta import read_info
from energon_bridge.format.parallel import map_shards
from energon_bridge.rng import IntArray

_NAMED_KEYS = 5
_RUN_SAMPLES = 1 << 18
"""Samples of the primary in a piece of work: what a result takes, against what it costs to send out the work."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """Where the samples of one dataset lie on the line of its split part.

    Attributes:
        index: Its key index.
        nonmatch: What becomes of rows that it has no sample for.
        numbers: For each shard of the line its number in `.info.json`, which is that of the key index.
        firsts: For each shard of the line its place on it.
        starts: For each shard of `.info.json` its place on the line, -1 if it is not in the split part.
        counts: For each shard of `.info.json` its number of samples.
        excluded: Places of the excluded samples, sorted.
    """

    index: KeyIndex
    nonmatch: Nonmatch
    numbers: IntArray
    firsts: IntArray
    starts: IntArray
    counts: IntArray
    excluded: IntArray

    def places(self, shards: IntArray, locals_: IntArray) -> IntArray:
        """Return the places of samples, -1 for those that are not there (-1, -1), excluded or in another part."""
        if shards.size and (shards.max() >= self.counts.size or (locals_ >= self.counts[shards]).any()):
            raise _stale(self.index)
        found = np.where((shards >= 0) & (self.starts[shards] >= 0), self.starts[shards] + locals_, -1)
        return np.where(np.isin(found, self.excluded), -1, found) if self.excluded.size else found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The rows of some shards of the primary, and for each dataset how many keys it lacks, with some of them."""

    rows: IntArray
    missing: list[int]
    keys: list[list[str]]


def find_rows(
    parts: Sequence[JoinPart], *, num_workers: int = 1, progress: Progress = lambda done, total: None
) -> Iterator[IntArray]:
    """Yield the rows of a join, in order, shape (some rows, datasets) each.

    `progress` gets the numbers of shards of the primary that are done and in all.

    Raises:
        KeyIndexError: A key index is damaged or older than its dataset.
        UnmatchedKeyError: A dataset with `nonmatch: error` lacks keys; some of them are named.
    """
    missing = [0] * len(parts)
    keys: list[list[str]] = [[] for _ in parts]
    with tempfile.TemporaryDirectory(prefix="energon-join-") as scratch:
        lines = [_line(part, str(Path(scratch) / f"{number}.sqlite")) for number, part in enumerate(parts)]
        runs = _runs(parts[0].dataset.shard_counts, num_workers)
        with closing(map_shards(partial(_join_shards, lines), runs, num_workers=num_workers)) as results:
            for run, found in zip(runs, results, strict=True):
                for place, count in enumerate(found.missing):
                    missing[place] += count
                    keys[place] += found.keys[place][: _NAMED_KEYS - len(keys[place])]
                yield found.rows
                progress(run.stop, runs[-1].stop)
    for part, count, some in zip(parts, missing, keys, strict=True):
        if count:
            named = ", ".join(map(repr, some)) + (", …" if count > len(some) else "")
            raise UnmatchedKeyError(
                f"{part.dataset.path}, {part.dataset.split_part!r}: {count:,} samples of {parts[0].dataset.path} have "
                f"no match in it: {named}. Write `nonmatch: skip` at this dataset of the join to leave such samples "
                f"out, or `nonmatch: none` to give the joiner None in its place."
            )


def _runs(counts: IntArray, num_workers: int) -> list[range]:
    """Cut shards into runs of about equal numbers of samples, several for each process."""
    ends = np.cumsum(counts)
    pieces = max(4 * num_workers, int(ends[-1]) // _RUN_SAMPLES)
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, pieces) / pieces, side="left") + 1
    edges = np.unique([0, *cuts.tolist(), ends.size])
    return [range(low, high) for low, high in pairwise(edges.tolist())]


def _line(part: JoinPart, scratch: str) -> _Line:
    dataset = part.dataset
    info = read_info(dataset.store).shard_counts
    number_of = {shard: number for number, shard in enumerate(info)}
    numbers = np.array([number_of[shard] for shard in dataset.shard_names], dtype=np.int64)
    firsts = np.cumsum(dataset.shard_counts) - dataset.shard_counts
    starts = np.full(len(info), -1, dtype=np.int64)
    starts[numbers[::-1]] = firsts[::-1]  # backwards, so that of a shard that is listed twice the first place counts
    index = local_key_index(dataset.store, scratch)
    return _Line(
        index=index,
        nonmatch=part.nonmatch,
        numbers=numbers,
        firsts=firsts,
        starts=starts,
        counts=np.array(list(info.values()), dtype=np.int64),
        excluded=_excluded(dataset, index, numbers, firsts),
    )


def _excluded(dataset: PreparedDataset, index: KeyIndex, numbers: IntArray, firsts: IntArray) -> IntArray:
    if not dataset.excluded:
        return np.empty(0, dtype=np.int64)
    excluded = sorted(dataset.excluded)
    places: list[int] = []
    for (shard, _), found in zip(excluded, find_keys(index, [key for _, key in excluded]), strict=True):
        if found is None:
            continue
        for position in np.flatnonzero(numbers == found[0]).tolist():  # several only if the split lists a shard twice
            if dataset.shard_names[position] == shard:
                places.append(int(firsts[position]) + found[1])
    return np.array(sorted(places), dtype=np.int64)


def _join_shards(lines: Sequence[_Line], shards: range) -> _Found:
    """Find the rows of some shards of the primary's line; runs in any process."""
    found = [_join_shard(lines, shard) for shard in shards]
    return _Found(
        rows=np.concatenate([one.rows for one in found]),
        missing=[sum(counts) for counts in zip(*(one.missing for one in found), strict=True)],
        keys=[list(chain.from_iterable(keys)) for keys in zip(*(one.keys for one in found), strict=True)],
    )


def _join_shard(lines: Sequence[_Line], shard: int) -> _Found:
    primary = lines[0]
    number = int(primary.numbers[shard])
    count = int(primary.counts[number])
    start = int(primary.firsts[shard])
    rows = np.empty((count, len(lines)), dtype=np.int64)
    rows[:, 0] = np.arange(start, start + count)
    for place, line in enumerate(lines[1:], start=1):
        found = matches(primary.index, line.index, number)
        if not np.array_equal(found[:, 0], np.arange(count)):
            raise _stale(primary.index)
        rows[:, place] = line.places(found[:, 1], found[:, 2])
    kept = ~np.isin(rows[:, 0], primary.excluded)
    for place, line in enumerate(lines):
        if line.nonmatch == "skip":
            kept &= rows[:, place] >= 0
    missing = [0] * len(lines)
    keys: list[list[str]] = [[] for _ in lines]
    for place, line in enumerate(lines):
        if line.nonmatch == "error":
            bad = np.flatnonzero(kept & (rows[:, place] < 0))
            missing[place] = bad.size
            if bad.size:
                keys[place] = keys_at(primary.index, number, bad[:_NAMED_KEYS].tolist())
    return _Found(rows=rows[kept], missing=missing, keys=keys)


def _stale(index: KeyIndex) -> KeyIndexError:
    return KeyIndexError(
        f"{index.dataset}: the key index has other samples than `.info.json` counts. Write both again: "
        f"`energon prepare --tar-index-only {index.dataset}`."
    )
