"""Datasets joined by sample key: the joined dataset, finding its rows, and the file that keeps them.

The rows are the samples of the primary (the first dataset) in the order of its split, without excluded ones and
without those that a `nonmatch: skip` skips. `rows[r, p]` is the sample of dataset p in row r, as its place on the line
of its split (its shards laid end to end); -1 if it has none.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import struct
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from energon_bridge.core.errors import EmptyDatasetError, StorageError, UnmatchedKeyError
from energon_bridge.core.format.dataset import PreparedDataset
from energon_bridge.core.format.key_index import (
    KeyIndex,
    find_keys,
    key_index_version,
    keys_at,
    local_key_index,
    matches,
    stale_key_index,
)
from energon_bridge.core.format.nvmeta import read_info
from energon_bridge.core.format.parallel import Progress, map_shards, unseen
from energon_bridge.core.order.rng import IntArray

Nonmatch = Literal["error", "skip", "none"]
JOIN_OF = "join of "
"""Begins the path of a join; those of its datasets follow, the primary's first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinPart:
    """One dataset of a join; `name` is None in a join written as a list."""

    dataset: PreparedDataset
    name: str | None = None
    nonmatch: Nonmatch = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedDataset:
    """Datasets joined by key; the arrays per shard count rows by the shard of the primary's sample."""

    path: str
    split_part: str
    parts: tuple[JoinPart, ...]
    joiner: Callable[..., Any]
    rows: IntArray = field(repr=False, compare=False)
    shard_counts: IntArray = field(repr=False, compare=False)
    shard_sizes: IntArray = field(repr=False, compare=False)
    fingerprint: str

    @property
    def datasets(self) -> tuple[PreparedDataset, ...]:
        """The datasets that it joins; the first is the primary."""
        return tuple(part.dataset for part in self.parts)

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The shards of the primary."""
        return self.parts[0].dataset.shard_names

    @property
    def is_crude(self) -> bool:
        """Whether one of its datasets is crude, so that the joiner's result may be crude."""
        return any(dataset.is_crude for dataset in self.datasets)

    @property
    def subflavors(self) -> dict[str, Any]:
        """Those of the primary, by which cookers are chosen."""
        return self.parts[0].dataset.subflavors

    @property
    def num_samples(self) -> int:
        """Rows of the join."""
        return self.rows.shape[0]

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names by which the joiner takes its samples; None if it takes them by position."""
        names = tuple(part.name for part in self.parts if part.name is not None)
        return names or None


def joined_dataset(
    parts: Sequence[JoinPart],
    rows: IntArray,
    *,
    split_part: str,
    joiner: Callable[..., Any],
    joiner_name: str,
    shard_counts: IntArray,
    checksum: int,
) -> JoinedDataset:
    """Describe a join as one dataset; `checksum` is that of its rows, for the fingerprint."""
    mean = sum(int(part.dataset.shard_sizes.sum()) // part.dataset.num_samples for part in parts)
    named = [[part.dataset.fingerprint, part.dataset.split_part, part.name, part.nonmatch] for part in parts]
    content = json.dumps([1, named, joiner_name, checksum], separators=(",", ":"))
    return JoinedDataset(
        path=JOIN_OF + " and ".join(part.dataset.path for part in parts),
        split_part=split_part,
        parts=tuple(parts),
        joiner=joiner,
        rows=rows,
        shard_counts=shard_counts,
        shard_sizes=np.asarray(shard_counts * mean, dtype=np.int64),
        fingerprint=hashlib.sha256(content.encode()).hexdigest(),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Finding the rows of a join: the samples of the primary, with the samples of the same keys in the other datasets.
#
# The shards of the primary are divided among processes in runs; only arrays of integers come back.
# Excluded samples and shards outside of the split part give no row in the primary, and count as missing in the others.
# Rows that a `nonmatch: skip` skips are gone before a `nonmatch: error` looks at the rest.


_NAMED_KEYS = 5
_RUN_SAMPLES = 1 << 18
"""Samples of the primary per task, a balance between the memory of a result and the cost of a task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """The places of one dataset's samples on the line of its split part.

    Attributes:
        index: Its key index.
        nonmatch: What to do with rows that it has no sample for.
        numbers: For each shard of the line: its number in `.info.json` and in the key index.
        firsts: For each shard of the line: the place of its first sample.
        starts: For each shard of `.info.json`: the place of its first sample, -1 if it is not in the split part.
        counts: For each shard of `.info.json`: its number of samples.
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
        """Return the places of samples, given by shard number and number in the shard.

        -1 for those that are missing (given as -1, -1), excluded or in another split part. Shape (samples,), all three.
        """
        shards = np.where(shards < self.counts.size, shards, -1)  # rows of an unfinished run count as missing
        if ((shards >= 0) & (locals_ >= self.counts[shards])).any():
            raise stale_key_index(self.index.dataset)
        numbers = np.where((shards >= 0) & (self.starts[shards] >= 0), self.starts[shards] + locals_, -1)
        return np.where(np.isin(numbers, self.excluded), -1, numbers) if self.excluded.size else numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class _JoinedRows:
    """The rows of a shard of the primary, shape (rows, datasets); of each dataset, how many keys it lacks, and some."""

    rows: IntArray
    missing: list[int]
    keys: list[list[str]]


def find_rows(parts: Sequence[JoinPart], *, num_workers: int = 1, progress: Progress = unseen) -> Iterator[IntArray]:
    """Yield the rows of a join, in order, shape (some rows, datasets) each.

    `progress` is called with the number of finished shards of the primary, and of all.

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
            for run, shards in zip(runs, results, strict=True):
                for shard in shards:
                    for number, count in enumerate(shard.missing):
                        missing[number] += count
                        keys[number] += shard.keys[number][: _NAMED_KEYS - len(keys[number])]
                yield np.concatenate([shard.rows for shard in shards])
                progress(run.stop, runs[-1].stop)
    for part, count, some in zip(parts, missing, keys, strict=True):
        if count:
            named = ", ".join(map(repr, some)) + (", …" if count > len(some) else "")
            raise UnmatchedKeyError(
                f"{part.dataset.path}, {part.dataset.split_part!r}: {count:,} samples of {parts[0].dataset.path} have "
                f"no match in it: {named}. Add `nonmatch: skip` to this dataset of the join to leave such samples "
                f"out, or `nonmatch: none` to pass the joiner None instead."
            )


def _runs(counts: IntArray, num_workers: int) -> list[range]:
    """Cut shards into runs of about equal numbers of samples, several for each process."""
    ends = np.cumsum(counts)
    pieces = max(4 * num_workers, int(ends[-1]) // _RUN_SAMPLES)
    # The shard at which each piece ends, counted in samples; large shards may end several pieces at once.
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
    for (shard, _), located in zip(excluded, find_keys(index, [key for _, key in excluded]), strict=True):
        if located is None:
            continue
        for on_line in np.flatnonzero(numbers == located[0]).tolist():  # several only if the split lists a shard twice
            if dataset.shard_names[on_line] == shard:
                places.append(int(firsts[on_line]) + located[1])
    return np.array(sorted(places), dtype=np.int64)


def _join_shards(lines: Sequence[_Line], shards: range) -> list[_JoinedRows]:
    """Find the rows of some shards of the primary's line; runs in any process."""
    return [_join_shard(lines, shard) for shard in shards]


def _join_shard(lines: Sequence[_Line], shard: int) -> _JoinedRows:
    primary = lines[0]
    number = int(primary.numbers[shard])
    count = int(primary.counts[number])
    start = int(primary.firsts[shard])
    rows = np.empty((count, len(lines)), dtype=np.int64)
    rows[:, 0] = np.arange(start, start + count)
    for column, line in enumerate(lines[1:], start=1):
        matched = matches(primary.index, line.index, number)
        if not np.array_equal(matched[:, 0], np.arange(count)):
            raise stale_key_index(primary.index.dataset)
        rows[:, column] = line.places(matched[:, 1], matched[:, 2])
    kept = ~np.isin(rows[:, 0], primary.excluded)
    for column, line in enumerate(lines):
        if line.nonmatch == "skip":
            kept &= rows[:, column] >= 0
    missing = [0] * len(lines)
    keys: list[list[str]] = [[] for _ in lines]
    for column, line in enumerate(lines):
        if line.nonmatch == "error":
            bad = np.flatnonzero(kept & (rows[:, column] < 0))
            missing[column] = bad.size
            if bad.size:
                keys[column] = keys_at(primary.index, number, bad[:_NAMED_KEYS].tolist())
    return _JoinedRows(rows=rows[kept], missing=missing, keys=keys)


# ---------------------------------------------------------------------------------------------------------------------
# The file that keeps the rows of a join, so that they are found once.
#
# Format, little-endian: a header of 64 bytes (magic `EBJOIN01`, the 32 bytes of the key, then as int64 the number of
# datasets, the number of rows and the CRC-32 of what follows), then the rows, int64, shape (rows, datasets): what
# `rows` in `format.join` is. The name of the file has the key: a hash over everything that the rows depend on
# (content, split part and key index of each dataset in turn, and its nonmatch). So a join in another split, or of
# data that changed, has a file of its own.
#
# Invariant: a file gets its final name only when it is complete, and it is checked before it is used; a damaged one is
# written again. Processes that need the same file wait for the first one if the file system has locks, and otherwise do
# the work twice. The file is memory-mapped: the processes of a machine share its pages.


_MAGIC = b"EBJOIN01"
_HEADER = struct.Struct("<8s32sqqq")
_ROW = np.dtype("<i8")
_CHUNK = 1 << 20
JOIN_PREFIX = "join_rows_"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinIndex:
    """The rows of a join, how many of them each shard of the primary has, and the checksum of the rows.

    `path` is the file that holds them, None if no folder could be written to.
    """

    rows: IntArray
    shard_counts: IntArray
    checksum: int
    path: str | None


def open_index(
    parts: Sequence[JoinPart],
    folders: Sequence[str],
    *,
    num_workers: int = 1,
    progress: Progress = unseen,
) -> JoinIndex:
    """Return the rows of a join: from a file in one of the folders, or found now and written to the first writable one.

    Raises:
        EmptyDatasetError: No row is left.
        KeyIndexError, UnmatchedKeyError: The rows cannot be found.
        StorageError: No disk has room for them.
    """
    key = _key(parts)
    name = f"{JOIN_PREFIX}{key.hex()[:32]}.bin"
    for folder in folders:
        index = _load(os.path.join(folder, name), key, parts)
        if index is not None:
            return index
    write = partial(_write, key=key, parts=parts, num_workers=num_workers, progress=progress)
    for folder in folders:
        try:
            return _made(os.path.join(folder, name), key, parts, write)
        except OSError as error:
            _log.info("%s: cannot write here (%s)", folder, error)
    _log.warning(
        "cannot write the rows of a join to any of %s, so every process looks them up. Make one of them writable",
        ", ".join(folders),
    )
    try:
        with tempfile.TemporaryFile() as file:
            write(file)
            index = _mapped(file, key, parts, path=None)
    except OSError as error:
        raise StorageError(
            f"cannot write the rows of a join ({error}): not to {', '.join(folders)}, and not to "
            f"{tempfile.gettempdir()}. Make room, or name another folder: XDG_CACHE_HOME=FOLDER, or TMPDIR=FOLDER."
        ) from error
    if index is None:
        raise StorageError("a temporary file with the rows of a join is damaged. Check the disk.")
    return index


def _made(path: str, key: bytes, parts: Sequence[JoinPart], write: Callable[[BinaryIO], None]) -> JoinIndex:
    """Write the rows to a file, or wait for the process that does; raises OSError if the disk does not take them."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_locked(f"{path}.lock"))
        temporary = f"{path}.{os.getpid()}.{threading.get_ident()}.tmp"
        stack.callback(_unlink, temporary)
        with open(temporary, "w+b") as file:
            index = _load(path, key, parts)
            if index is not None:
                return index
            write(file)
        os.replace(temporary, path)
        index = _load(path, key, parts)
        if index is None:
            raise StorageError(f"{path}: is damaged right after writing it. Check the disk.")
        return index


def _key(parts: Sequence[JoinPart]) -> bytes:
    content = [
        [part.dataset.fingerprint, part.dataset.split_part, part.nonmatch, *key_index_version(part.dataset.store)]
        for part in parts
    ]
    return hashlib.sha256(_MAGIC + json.dumps(content, separators=(",", ":")).encode()).digest()


def _write(file: BinaryIO, key: bytes, parts: Sequence[JoinPart], *, num_workers: int, progress: Progress) -> None:
    file.write(bytes(_HEADER.size))
    checksum = count = 0
    for rows in find_rows(parts, num_workers=num_workers, progress=progress):
        data = np.ascontiguousarray(rows, dtype=_ROW).tobytes()
        checksum = zlib.crc32(data, checksum)
        count += len(rows)
        file.write(data)
    if not count:
        names = " and ".join(f"{part.dataset.path} ({part.dataset.split_part})" for part in parts)
        raise EmptyDatasetError(f"the join of {names} has no rows, because no key is in all of them. Check the keys.")
    file.seek(0)
    file.write(_HEADER.pack(_MAGIC, key, len(parts), count, checksum))
    file.flush()


def _load(path: str, key: bytes, parts: Sequence[JoinPart]) -> JoinIndex | None:
    """Return the rows in a file; None if it is missing or damaged."""
    try:
        with open(path, "rb") as file:
            index = _mapped(file, key, parts, path=path)
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("%s: cannot read it (%s); looking up the rows of the join again", path, error)
        return None
    if index is None:
        _log.warning("%s: damaged; looking up the rows of the join again", path)
    return index


def _mapped(file: BinaryIO, key: bytes, parts: Sequence[JoinPart], *, path: str | None) -> JoinIndex | None:
    """Map the rows of an open file into memory, after a check of all of it; None if it is damaged or of other data."""
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    header = file.read(_HEADER.size)
    if len(header) != _HEADER.size:
        return None
    magic, its_key, width, count, checksum = _HEADER.unpack(header)
    if (magic, its_key, width) != (_MAGIC, key, len(parts)):
        return None
    if count < 1 or size != _HEADER.size + count * width * _ROW.itemsize:
        return None
    mapped = np.memmap(file, dtype=_ROW, mode="r", offset=_HEADER.size, shape=(count, width))
    rows = mapped.view(np.ndarray)
    ends = np.cumsum(parts[0].dataset.shard_counts)
    counts = np.zeros(ends.size, dtype=np.int64)
    computed = 0
    for start in range(0, count, _CHUNK):  # one pass, without a copy of the whole
        chunk = rows[start : start + _CHUNK]
        computed = zlib.crc32(chunk.data, computed)
        counts += np.bincount(np.searchsorted(ends, chunk[:, 0], side="right"), minlength=ends.size)[: ends.size]
    return JoinIndex(rows=rows, shard_counts=counts, checksum=checksum, path=path) if computed == checksum else None


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold a lock on a lock file; without locks in the file system, hold nothing."""
    with open(path, "wb") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            _unlink(path)


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
