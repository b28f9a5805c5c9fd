"""Reading: sample indices of a leaf become the bytes of the samples, with one ranged read per run of consecutive ones.

`LeafReader` reads; `RoundBuffer` holds the bytes of one round until its draws are taken. Reading never decides order.
"""

from __future__ import annotations

import itertools
import operator
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from energon_bridge.core.errors import CorruptShardError, ShardMissingError, ShortReadError
from energon_bridge.core.format.checksums import Checksums, Verifier
from energon_bridge.core.format.dataset import PreparedDataset, expect_shard, read_index
from energon_bridge.core.format.tar import Follow, open_sample, parse_sample
from energon_bridge.core.order.choose import Span
from energon_bridge.core.order.leaf_order import Round
from energon_bridge.core.order.rng import IntArray, UIntArray
from energon_bridge.core.storage import ByteRange, as_far
from energon_bridge.core.stores.file_store import follow_links

_INDEX_CACHE_BYTES = 64 << 20
_SLOW_READ_SECONDS = 0.005
_MOST_IN_VAIN = 16
"""Large samples in a row of which all parts were read after all; later ones are then read at once."""
_INDEXES_AT_ONCE = 16
_DAMAGED = (ShortReadError, CorruptShardError, ShardMissingError)

Ranges = tuple[str, list[int], list[int]]
"""A shard, and the offsets and lengths of ranges in it."""


@dataclass(slots=True, eq=False)
class Unreadable:
    """Stands for the bytes of a sample that a damaged shard no longer has."""

    error: Exception

    def __len__(self) -> int:
        return 0


class Unread:
    """Stands for the bytes of a sample so large that its parts are read one by one, or not at all.

    Its length is the number of bytes that parsing will read: those of all parts except the ones left in place.
    """

    __slots__ = ("_index", "_length", "_reader", "sample")

    def __init__(self, sample: ByteRange, reader: LeafReader, index: int) -> None:
        self.sample = sample
        self._reader = reader
        self._index = index
        self._length = sample.size

    def __len__(self) -> int:
        return self._length

    def parts(
        self, wanted: frozenset[str] | None, keep: Callable[[str], bool], follow: Follow
    ) -> tuple[str, dict[str, Any]]:
        """Return key and parts (a range instead of bytes if `keep` accepts one); CorruptShardError, StorageError.

        Of parts that are read here, the checksums are compared.
        """
        key, found = open_sample(self.sample, parts=wanted, keep=keep, follow=follow)
        self._reader.check_parts(self._index, key, found, complete=wanted is None)
        kept = sum(part.size for part in found.values() if isinstance(part, ByteRange))
        self._length = max(0, self.sample.size - kept)  # the target of a link is outside of the sample
        self._reader.note_large(kept > 0)
        return key, found


class Stored(Sequence[Any]):
    """Samples as they are stored: a view of the bytes of each, or what stands for them, made when it is asked for.

    The collector of garbage goes through every view that waits, and through all else the more often: it takes a fifth
    of the time of small samples. It leaves out bytes.

    Attributes:
        blocks: The bytes that were read at once for each sample, and for others; or the object that stands for it.
        ranges: Where the sample begins and ends in its block, shape (2, samples); -1 as its end: the block is all.
    """

    __slots__ = ("blocks", "ranges")

    def __init__(self, blocks: list[Any], ranges: IntArray) -> None:
        self.blocks = blocks
        self.ranges = ranges

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[Any]:
        begins, ends = self.ranges.tolist()
        if -1 in ends:
            return (self[place] for place in range(len(self)))
        view: Any = memoryview
        return map(operator.getitem, map(view, self.blocks), map(slice, begins, ends))

    def __getitem__(self, place: Any) -> Any:
        begin, end = self.ranges[:, place].tolist()
        block = self.blocks[place]
        return block if end < 0 else memoryview(block)[begin:end]

    def __setitem__(self, place: int, value: Any) -> None:
        self.blocks[place] = value
        self.ranges[:, place] = -1

    @classmethod
    def of(cls, samples: Sequence[Any]) -> Stored:
        """Return samples, or what stands for them, as such."""
        return samples if type(samples) is cls else cls(list(samples), np.full((2, len(samples)), -1))

    def sizes(self) -> list[int]:
        """Return the bytes of each."""
        begins, ends = self.ranges
        sizes: list[int] = (ends - begins).tolist()
        return list(map(len, self)) if (ends < 0).any() else sizes


class SplitSample:
    """Stands for the bytes of a sample that were split when they were read."""

    __slots__ = ("_size", "key", "parts")

    def __init__(self, key: str, parts: dict[str, Any], size: int) -> None:
        self.key = key
        self.parts = parts
        self._size = size

    def __len__(self) -> int:
        return self._size


class Split:
    """Samples split while their bytes were in the processor's caches: keys, the bytes of each part, bytes read."""

    __slots__ = ("_sizes", "keys", "parts")

    def __init__(self, keys: list[str], parts: dict[str, list[Any]], sizes: list[int]) -> None:
        self.keys = keys
        self.parts = parts
        self._sizes = sizes

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, at: int) -> SplitSample:
        return SplitSample(self.keys[at], {name: column[at] for name, column in self.parts.items()}, self._sizes[at])

    def sizes(self) -> list[int]:
        """Return the bytes of each."""
        return self._sizes

    def take(self, low: int, high: int) -> Split:
        """Return some of the samples, which are dropped here."""
        parts = {name: column[low:high] for name, column in self.parts.items()}
        for column in self.parts.values():
            column[low:high] = [None] * (high - low)
        return Split(self.keys[low:high], parts, self._sizes[low:high])

    def put(self, places: list[int], others: Split) -> bool:
        """Put others at some places, and return True, if they have the same parts."""
        if others.parts.keys() != self.parts.keys():
            return False
        _put(self.keys, places, others.keys)
        _put(self._sizes, places, others.sizes())
        for name, column in self.parts.items():
            _put(column, places, others.parts[name])
        return True


def _put(column: list[Any], places: list[int], values: list[Any]) -> None:
    if places[-1] - places[0] == len(places) - 1:
        column[places[0] : places[-1] + 1] = values
        return
    for place, value in zip(places, values, strict=True):
        column[place] = value


class Reader(Protocol):
    """Reads a leaf by the indices of its samples, whatever it is made of."""

    @property
    def slow(self) -> bool: ...
    def shards_of(self, indices: IntArray) -> IntArray: ...
    def place_of(self, index: int) -> tuple[str, int]: ...
    def read(self, indices: IntArray, epochs: IntArray | None = None) -> Sequence[Any]: ...


class ShardReader:
    """Reads a leaf of shards; safe to use from several threads.

    Args:
        tolerant: Read what is left of damaged shards, with `Unreadable` for the samples that are gone.

    Attributes:
        slow: Whether recent reads were slow enough for reading ahead on a thread to pay off. (It does not pay from the
            page cache, since the interpreter lock changes hands for every range.) Never decides order.
    """

    def __init__(self, dataset: PreparedDataset, *, tolerant: bool = False) -> None:
        self.dataset = dataset
        self._tolerant = tolerant
        self._far = as_far(dataset.store)
        self.slow = self._far is not None
        self._ends = np.cumsum(dataset.shard_counts)

    def shards_of(self, indices: IntArray) -> IntArray:
        """Return the shard number of each sample index, shape as given."""
        return self._ends.searchsorted(indices, side="right")

    def place_of(self, index: int) -> tuple[str, int]:
        """Return shard name and index within the shard of a sample."""
        shard, local = self._place(index)
        return self.dataset.shard_names[shard], local

    def _place(self, index: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, index - int(self._ends[shard] - self.dataset.shard_counts[shard])

    def read(self, indices: IntArray, epochs: IntArray | None = None) -> Sequence[Any]:
        """Return each sample as it is stored, in the order given; `epochs` say which of them are verified.

        Raises:
            ShortReadError, CorruptShardError, ShardMissingError: A shard or its index is damaged or missing, and the
                reader is not tolerant.
        """
        try:
            return self._read(indices, epochs)
        except _DAMAGED as error:
            if not self._tolerant:
                raise
            if indices.size == 1:
                return [Unreadable(error)]
        ones = (slice(place, place + 1) for place in range(indices.size))
        return [self.read(indices[one], None if epochs is None else epochs[one])[0] for one in ones]

    def _read(self, indices: IntArray, epochs: IntArray | None) -> Sequence[Any]:
        raise NotImplementedError


class LeafReader(ShardReader):
    """Reads the bytes of samples (memoryviews) of one prepared dataset.

    Args:
        dataset, tolerant: Those of any reader of shards.
        unread_from: Return `Unread` for samples of so many bytes or more; None: read all.
        checksums: Which samples are compared with their checksums, if the dataset has any. `Unreadable` stands for one
            that differs.
    """

    def __init__(
        self,
        dataset: PreparedDataset,
        *,
        tolerant: bool = False,
        unread_from: int | None = None,
        checksums: Checksums = "never",
    ) -> None:
        super().__init__(dataset, tolerant=tolerant)
        self._verifier = None
        if dataset.has_checksums and checksums != "never":
            follow = follow_links(dataset.path)
            self._verifier = Verifier(dataset, checksums, lambda raw: parse_sample(raw, follow=follow))
        self._unread_from = unread_from
        self._in_vain = 0
        self._indices: dict[int, UIntArray] = {}
        self._cached = 0
        self._lock = threading.Lock()

    def check_parts(self, index: int, key: str, parts: dict[str, Any], *, complete: bool) -> None:
        """Raise CorruptShardError if parts of a sample that was not read at once differ from their checksums."""
        if self._verifier is None:
            return
        shard, local = self._place(index)
        error = self._verifier.error(shard, local, key, parts, complete=complete)
        if error is not None:
            raise error

    def _read(self, indices: IntArray, epochs: IntArray | None) -> Stored:
        started = time.perf_counter()
        # From here on arrays are in order of the samples; `by_place[i]` is the place of the i-th in the answer.
        by_place = np.argsort(indices, kind="stable")
        ordered = indices[by_place]
        shards = self.shards_of(ordered)
        if self._far is not None:
            self._read_indices(shards)
        local = ordered - (self._ends[shards] - self.dataset.shard_counts[shards])  # numbers within their shards
        begins = np.empty_like(ordered)
        ends = np.empty_like(ordered)
        new_shards = np.flatnonzero(np.diff(shards)) + 1
        for low, high in itertools.pairwise([0, *new_shards.tolist(), ordered.size]):
            index = self._index(int(shards[low]))
            begins[low:high] = index[local[low:high]]
            ends[low:high] = index[local[low:high] + 1]
        large = self._large(ends - begins)
        # A run is read as one range: consecutive samples of one shard. Run r has the samples edges[r] to edges[r + 1].
        new_run = (np.diff(ordered) != 1) | (np.diff(shards) != 0) | large[1:] | large[:-1]
        edges = np.concatenate(([0], np.flatnonzero(new_run) + 1, [ordered.size]))
        firsts = edges[:-1]
        starts = begins[firsts]
        lengths = ends[edges[1:] - 1] - starts
        blocks: list[Any] = [None] * firsts.size
        runs = np.flatnonzero(~large[firsts])
        of_shard = shards[firsts[runs]]
        read = [column.tolist() for column in (runs, starts[runs], lengths[runs])]
        wanted: list[tuple[list[int], Ranges]] = []
        for low, high in itertools.pairwise([0, *(np.flatnonzero(np.diff(of_shard)) + 1).tolist(), runs.size]):
            if high > low:
                of_runs, offsets, sizes = (column[low:high] for column in read)
                wanted.append((of_runs, (self.dataset.shard_names[of_shard[low]], offsets, sizes)))
        for of_runs, _, contents in self._contents(wanted):
            for run, content in zip(of_runs, contents, strict=True):
                blocks[run] = content
        # From here on in the order asked for: where each sample is among the ordered ones, and its run.
        at = np.empty_like(by_place)
        at[by_place] = np.arange(by_place.size)
        run_of = np.repeat(np.arange(firsts.size), np.diff(edges))
        ranges = np.stack((begins, ends)) - starts[run_of]
        out = Stored(list(map(blocks.__getitem__, run_of[at].tolist())), ranges[:, at])
        for row in np.flatnonzero(large).tolist():
            name = self.dataset.shard_names[shards[row]]
            begin = int(begins[row])
            sample = ByteRange(store=self.dataset.store, rel=name, offset=begin, size=int(ends[row]) - begin)
            out[by_place[row]] = Unread(sample, self, int(ordered[row]))
        if self._verifier is not None:
            rows = self._verifier.chosen(ordered, None if epochs is None else epochs[by_place])
            rows = rows[~large[rows]]
            raws = [out[place] for place in by_place[rows].tolist()]
            for row, error in self._verifier.verify(raws, shards[rows].tolist(), local[rows]):
                out[by_place[rows[row]]] = Unreadable(error)
        self.slow = self._far is not None or time.perf_counter() - started > _SLOW_READ_SECONDS
        return out

    def _contents(self, wanted: list[tuple[list[int], Ranges]]) -> Iterator[tuple[list[int], Ranges, Sequence[bytes]]]:
        """Read the ranges of each shard, all at once if storage answers slowly."""
        if self._far is not None:
            contents = self._far.read_all([ranges for _, ranges in wanted])
            return ((*one, of_shard) for one, of_shard in zip(wanted, contents, strict=True))
        return ((runs, ranges, self.dataset.store.read_ranges(*ranges)) for runs, ranges in wanted)

    def _read_indices(self, shards: IntArray) -> None:
        """Read the shard indexes that are not in memory yet, several at once."""
        missing = [shard for shard in dict.fromkeys(shards.tolist()) if shard not in self._indices]
        if len(missing) < 2:
            return
        with ThreadPoolExecutor(min(_INDEXES_AT_ONCE, len(missing)), "energon-index") as pool:
            found = list(pool.map(self._read_index, missing))
        with self._lock:
            for shard, index in zip(missing, found, strict=True):
                self._keep(shard, index)

    def _large(self, sizes: IntArray) -> NDArray[np.bool_]:
        """Return which samples are large enough to be left unread."""
        if self._unread_from is None or (self._unread_from and self._in_vain >= _MOST_IN_VAIN):
            return np.zeros(sizes.size, dtype=bool)
        return sizes >= self._unread_from

    def note_large(self, was_worth_it: bool) -> None:
        """Record whether an unread sample kept parts unread; if none does, all samples are read at once later."""
        self._in_vain = 0 if was_worth_it else self._in_vain + 1

    def _index(self, shard: int) -> UIntArray:
        index = self._indices.get(shard)
        if index is not None:
            return index
        with self._lock:
            index = self._indices.get(shard)
            if index is None:
                index = self._read_index(shard)
                self._keep(shard, index)
            return index

    def _read_index(self, shard: int) -> UIntArray:
        expect_shard(self.dataset, shard)
        return read_index(self.dataset, shard, cut_off=self._tolerant)

    def _keep(self, shard: int, index: UIntArray) -> None:
        """Keep an index in memory; drop the oldest if there are too many."""
        if shard in self._indices:
            return
        self._indices[shard] = index
        self._cached += index.nbytes
        while self._cached > _INDEX_CACHE_BYTES and len(self._indices) > 1:
            self._cached -= self._indices.pop(next(iter(self._indices))).nbytes


_SPLIT = object()
"""Stands among the blocks of a round for a sample that was split."""


class RoundBuffer:
    """The bytes of one round of one leaf, read as a unit (or, without `ahead`, only the draws asked for).

    Bytes are dropped as they are fetched, so memory falls as a round is worked through.

    Args:
        split: Splits samples that were read, if they are plain.
        banned: Draws that are read only when they are fetched, shape (draws,): their samples are banned now or later,
            and a banned sample is never fetched.

    Attributes:
        asked: Number of draws, from the first one, that are read or being read ahead.
    """

    __slots__ = (
        "_banned",
        "_lock",
        "_split",
        "_splits",
        "_stored",
        "_was_read",
        "asked",
        "epochs",
        "first",
        "indices",
        "reader",
    )

    def __init__(
        self,
        reader: Reader,
        of: Round,
        banned: NDArray[np.bool_] | None = None,
        split: Callable[[Stored], Split | None] | None = None,
    ) -> None:
        self.reader = reader
        self._splits = split
        self._split: Split | None = None
        self.first = of.first
        self.asked = 0
        self.indices = of.indices
        self.epochs = of.epochs
        self._stored: Stored | None = None  # until something is read; and while all draws are in `_split`
        self._was_read = bytearray(of.indices.size)  # a mix has thousands of small rounds, and an array object is large
        self._lock = threading.Lock()
        self._banned: set[int] = set()
        if banned is not None and banned.any():
            self._banned = {*np.flatnonzero(banned).tolist()}
            np.frombuffer(self._was_read, dtype=bool)[banned] = True  # by reading ahead

    def __len__(self) -> int:
        return self.indices.size

    def is_unread(self, low: int, high: int) -> bool:
        """Return whether any of the draws [low, high), which are not fetched yet, must be read."""
        return 0 in self._was_read[low:high]

    def fetch(self, low: int, high: int, *, ahead: bool) -> Stored | Split:
        """Return the bytes of the draws [low, high) of the round; with `ahead`, also read the rest of the round."""
        with self._lock:
            if self._banned:
                for place in self._banned.intersection(range(low, high)):
                    self._banned.remove(place)
                    self._was_read[place] = 0
            if 0 in self._was_read[low:high]:
                self._read(low, len(self) if ahead else high)
            split = self._split
            if (stored := self._stored) is None:
                assert split is not None
                return split.take(low, high)
            blocks = stored.blocks
            found = Stored(blocks[low:high], stored.ranges[:, low:high])
            blocks[low:high] = [None] * (high - low)
            if split is None:
                return found
            whole = [place for place, block in enumerate(found.blocks) if block is _SPLIT]
            if len(whole) == high - low:
                return split.take(low, high)
            for place in whole:
                found.blocks[place] = split[low + place]
        return found

    def read_ahead(self, low: int = 0, high: int | None = None) -> None:
        """Read those of the draws [low, high) that have not been read yet."""
        with self._lock:
            self._read(low, len(self) if high is None else min(high, len(self)))

    def _read(self, low: int, high: int) -> None:
        was_read = np.frombuffer(self._was_read, dtype=bool)
        unread = low + np.flatnonzero(~was_read[low:high])
        if unread.size:
            stored = Stored.of(self.reader.read(self.indices[unread], self.epochs[unread]))
            places = unread.tolist()
            split = None if self._splits is None else self._splits(stored)
            count = len(self)
            was_read[unread] = True
            if split is not None and len(places) == count:
                self._split = split
                return
            if self._stored is None:
                self._stored = Stored.of([None] * count)
            if split is not None:
                if self._split is None:
                    self._split = Split([""] * count, {name: [None] * count for name in split.parts}, [0] * count)
                if self._split.put(places, split):
                    stored = Stored.of([_SPLIT] * len(places))
            self._stored.ranges[:, unread] = stored.ranges
            _put(self._stored.blocks, places, stored.blocks)


DrawSpan = Span[RoundBuffer]
"""Draws of a leaf to load, with the bytes of their rounds."""
