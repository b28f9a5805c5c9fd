"""Reading: sample indices of a leaf become the bytes of the samples, with one ranged read per run of consecutive ones.

`LeafReader` reads; `RoundBuffer` holds the bytes of one round until its draws are taken. Reading never decides order.
"""

from __future__ import annotations

import itertools
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
        return np.searchsorted(self._ends, indices, side="right")

    def place_of(self, index: int) -> tuple[str, int]:
        """Return shard name and index within the shard of a sample."""
        shard, local = self._place(index)
        return self.dataset.shard_names[shard], local

    def _place(self, index: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, index - int(self._ends[shard] - self.dataset.shard_counts[shard])

    def read(self, indices: IntArray, epochs: IntArray | None = None) -> list[Any]:
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

    def _read(self, indices: IntArray, epochs: IntArray | None) -> list[Any]:
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

    def _read(self, indices: IntArray, epochs: IntArray | None) -> list[Any]:
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
            offsets = self._index(int(shards[low]))
            begins[low:high], ends[low:high] = offsets[local[low:high]], offsets[local[low:high] + 1]
        large = self._large(ends - begins)
        # A run is read as one range: consecutive samples of one shard. Run r has the samples edges[r] to edges[r + 1].
        new_run = (np.diff(ordered) != 1) | (np.diff(shards) != 0) | large[1:] | large[:-1]
        edges = np.concatenate(([0], np.flatnonzero(new_run) + 1, [ordered.size]))
        firsts = edges[:-1]
        starts = begins[firsts]
        lengths = ends[edges[1:] - 1] - starts
        out: list[Any] = [memoryview(b"")] * ordered.size
        places = by_place.tolist()
        begin_list = begins.tolist()
        end_list = ends.tolist()
        edge_list = edges.tolist()
        wanted = [
            (runs.tolist(), (name, starts[runs].tolist(), lengths[runs].tolist()))
            for name, runs in self._by_shard(shards[firsts], large[firsts])
        ]
        for runs, (_, run_starts, _), contents in self._contents(wanted):
            for run, start, content in zip(runs, run_starts, contents, strict=True):
                data = memoryview(content)
                low = edge_list[run]
                high = edge_list[run + 1]
                if high - low == 1:
                    out[places[low]] = data
                    continue
                for place, begin, end in zip(places[low:high], begin_list[low:high], end_list[low:high], strict=True):
                    out[place] = data[begin - start : end - start]
        for row in np.flatnonzero(large).tolist():
            name = self.dataset.shard_names[shards[row]]
            size = end_list[row] - begin_list[row]
            sample = ByteRange(store=self.dataset.store, rel=name, offset=begin_list[row], size=size)
            out[places[row]] = Unread(sample, self, int(ordered[row]))
        if self._verifier is not None:
            rows = self._verifier.chosen(ordered, None if epochs is None else epochs[by_place])
            rows = rows[~large[rows]]
            raws = [out[place] for place in by_place[rows].tolist()]
            for row, error in self._verifier.verify(raws, shards[rows].tolist(), local[rows]):
                out[places[rows[row]]] = Unreadable(error)
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
        if self._unread_from is None or self._in_vain >= _MOST_IN_VAIN:
            return np.zeros(sizes.size, dtype=bool)
        return sizes >= self._unread_from

    def _by_shard(self, shards: IntArray, large: NDArray[np.bool_]) -> Iterator[tuple[str, IntArray]]:
        """Yield the runs to read from each shard, by number; `shards` and `large` have shape (runs,)."""
        runs = np.flatnonzero(~large)
        for of_shard in np.split(runs, np.flatnonzero(np.diff(shards[runs])) + 1):
            if of_shard.size:
                yield self.dataset.shard_names[shards[of_shard[0]]], of_shard

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


class RoundBuffer:
    """The bytes of one round of one leaf, read as a unit (or, without `ahead`, only the draws asked for).

    Bytes are dropped as they are fetched, so memory falls as a round is worked through.

    Args:
        banned: Draws that are read only when they are fetched, shape (draws,): their samples are banned now or later,
            and a banned sample is never fetched.

    Attributes:
        asked: Number of draws, from the first one, that are read or being read ahead.
    """

    __slots__ = ("_banned", "_lock", "_raw", "_was_read", "asked", "epochs", "first", "indices", "reader")

    def __init__(self, reader: Reader, of: Round, banned: NDArray[np.bool_] | None = None) -> None:
        self.reader = reader
        self.first = of.first
        self.asked = 0
        self.indices = of.indices
        self.epochs = of.epochs
        self._raw: list[Any] = [None] * of.indices.size
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

    def fetch(self, low: int, high: int, *, ahead: bool) -> list[Any]:
        """Return the bytes of the draws [low, high) of the round; with `ahead`, also read the rest of the round."""
        with self._lock:
            if self._banned:
                for place in self._banned.intersection(range(low, high)):
                    self._banned.remove(place)
                    self._was_read[place] = 0
            if 0 in self._was_read[low:high]:
                self._read(low, len(self) if ahead else high)
            out = self._raw[low:high]
            self._raw[low:high] = [None] * (high - low)
        return out

    def read_ahead(self, low: int = 0, high: int | None = None) -> None:
        """Read those of the draws [low, high) that have not been read yet."""
        with self._lock:
            self._read(low, len(self) if high is None else min(high, len(self)))

    def _read(self, low: int, high: int) -> None:
        was_read = np.frombuffer(self._was_read, dtype=bool)
        unread = low + np.flatnonzero(~was_read[low:high])
        if unread.size:
            raws = self.reader.read(self.indices[unread], self.epochs[unread])
            for place, raw in zip(unread.tolist(), raws, strict=True):
                self._raw[place] = raw
            was_read[unread] = True


DrawSpan = Span[RoundBuffer]
"""Draws of a leaf to load, with the bytes of their rounds."""
