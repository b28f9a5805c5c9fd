"""The order of one leaf: from a lane and the number of its draw to a sample index, without any table to rebuild.

A leaf has N samples on one line (its shards laid end to end), cut into slices. In every epoch the slices are put in the
order of a keyed permutation and laid end to end again: the *epoch line*. Each of the L lanes owns a stretch of it:

- Lane l has the rank `l' = (l + key) mod L` in this leaf and owns `floor(((e+1)N + l')/L) - floor((eN + l')/L)`
  consecutive positions of epoch e, stretches laid in the order of l'. Before epoch e it has drawn
  `floor((eN + l')/L)` times, so its draw k lies in epoch `ceil(((k+1)L - l')/N) - 1`.
- A stretch that touches P slices is worked through in `max(1, P div K)` *windows*, with
  `K = parallel_shard_iters + ceil(2 shuffle_buffer_size / slice length)` slices each.
- A window of n samples in k pieces is dealt in `T = max(1, n div max(shuffle_buffer_size, k))` *rounds*. Round t
  takes from piece j, of n_j samples, the positions `floor((t n_j + f_j)/T)` up to `floor(((t+1) n_j + f_j)/T)`, with
  f_j a key below T, and is shuffled by key. So every slice is read from front to back, one run of consecutive
  samples a round.

Shuffled over E epochs at once, the line is E copies of the dataset, cut, permuted and shared out as if it were one: a
sample comes E times in E epochs, not once in each.

Without shuffling the lanes deal the line out in blocks of one microbatch, which gives the dataset's own order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from energon_bridge.rng import IntArray, Permutation, below, fold, shuffled

ORDER_VERSION = 2
"""Raised with every change of a rule in this package that changes which sample comes when.

2: the lanes of a weighted mix stand apart by a step chosen for their number (`plan/lane_step.py`).
"""

_SLICES, _WINDOW, _ROUND = 1, 2, 3
_ENDLESS, _ENDLESS_SHARDS = 1 << 16, 1 << 20


@dataclass(frozen=True, slots=True)
class Round:
    """A run of consecutive draws of one lane in one leaf: draw `first + i` gives `indices[i]` in `epochs[i]`."""

    first: int
    indices: IntArray
    epochs: IntArray


@dataclass(frozen=True, kw_only=True)
class LeafOrder:
    """The order of one leaf; a pure function of its fields.

    Args:
        shard_counts: Samples of each shard, shape (shards,).
        num_lanes: L.
        key: Key of the leaf; everything keyed below derives from it.
        slice_length: Samples in a slice; None: a slice is a shard.
        shuffle_buffer_size: About how many samples are mixed at a time; 0 or 1: only the slices are.
        parallel_shard_iters: Slices that are read side by side.
        block: Draws in a microbatch, for the unshuffled order.
        shuffle: False gives the dataset's own order.
        first_sample: Index of the first sample, where the leaf is a part of a dataset.
        epochs_per_shuffle: E, epochs that are shuffled as one; -1: so many that their end does not matter.
    """

    shard_counts: IntArray
    num_lanes: int
    key: int
    slice_length: int | None
    shuffle_buffer_size: int
    parallel_shard_iters: int
    block: int = 1
    shuffle: bool = True
    first_sample: int = 0
    epochs_per_shuffle: int = 1

    @cached_property
    def num_samples(self) -> int:
        return int(self.shard_counts.sum())

    @cached_property
    def _copies(self) -> int:
        if self.epochs_per_shuffle > 0:
            return self.epochs_per_shuffle
        # Where a slice is a shard, a table has a row per copy and shard.
        return _ENDLESS if self.slice_length else max(2, min(_ENDLESS, _ENDLESS_SHARDS // self.shard_counts.size))

    @cached_property
    def _line_length(self) -> int:
        return self.num_samples * self._copies

    def epoch_of(self, lane: int, draw: int) -> int:
        """Return the epoch (of E epochs that are shuffled as one: their number) in which a lane's draw lies."""
        if not self.shuffle:
            return self._in_file_order(lane, draw) // self.num_samples
        return -((self._place(lane) - (draw + 1) * self.num_lanes) // self._line_length) - 1

    def round_at(self, lane: int, draw: int) -> Round:
        """Return the round that holds a draw of a lane."""
        if not self.shuffle:
            first = draw - draw % self.block
            line = self._in_file_order(lane, first) + np.arange(self.block, dtype=np.int64)
            return Round(first, self.first_sample + line % self.num_samples, line // self.num_samples)
        n, lanes, place = self._line_length, self.num_lanes, self._place(lane)
        epoch = self.epoch_of(lane, draw)
        first = (epoch * n + place) // lanes
        share = ((epoch + 1) * n + place) // lanes - first
        start = _sum_of_floors(place, (epoch + 1) * n, lanes) - _sum_of_floors(place, epoch * n, lanes)
        window = self._window_at(epoch, place, start, start + share, draw - first)
        t, taken, indices = window.deal(draw - first - window.before)
        places = indices[shuffled(fold(window.key, _ROUND, t), indices.size)]
        copy, indices = np.divmod(places, self.num_samples) if self._copies > 1 else (0, places)
        epochs = np.full(indices.size, epoch * self._copies, dtype=np.int64) + copy
        return Round(first + window.before + taken, self.first_sample + indices, epochs)

    def _place(self, lane: int) -> int:
        return (lane + self.key) % self.num_lanes

    def _in_file_order(self, lane: int, draw: int) -> int:
        return (draw // self.block * self.num_lanes + lane) * self.block + draw % self.block

    def _window_at(self, epoch: int, place: int, start: int, stop: int, draw: int) -> _Window:
        """Return the window that holds a draw of the stretch [start, stop) of an epoch line, counted in the stretch."""
        line = self._epoch_line(epoch)
        first_slot, last_slot = line.slot_of(start), line.slot_of(stop - 1)
        slots = last_slot - first_slot + 1
        windows = max(1, slots // self._slices_per_window)
        number = ((line.slot_of(start + draw) - first_slot + 1) * windows - 1) // slots
        cached = self._windows.get((epoch, place, number))
        if cached is None:
            low, high = first_slot + number * slots // windows, first_slot + (number + 1) * slots // windows
            edges = line.starts(np.arange(low, high + 1, dtype=np.int64))
            inside = np.clip(edges, start, stop)
            base = line.first_samples(low, high) + inside[:-1] - edges[:-1]
            key = fold(self.key, _WINDOW, epoch, place, number)
            cached = _Window(int(inside[0]) - start, base, np.diff(inside), self.shuffle_buffer_size, key)
            if (
                cached.rounds > 1
            ):  # nobody comes back to the window of a single round; a thousand small leaves have many
                if len(self._windows) > 2 * self.num_lanes:
                    self._windows.clear()
                self._windows[epoch, place, number] = cached
        return cached

    @cached_property
    def _windows(self) -> dict[tuple[int, int, int], _Window]:
        return {}

    @cached_property
    def _slices_per_window(self) -> int:
        length = self.slice_length or self.num_samples / max(1, int(np.count_nonzero(self.shard_counts)))
        return self.parallel_shard_iters + math.ceil(2 * self.shuffle_buffer_size / length)

    def _epoch_line(self, epoch: int) -> _EqualSlices | _ShardSlices:
        line = self._lines.get(epoch)
        if line is None:
            key = fold(self.key, _SLICES, epoch)
            if self.slice_length is None:
                line = _ShardSlices(np.tile(self.shard_counts, self._copies), key)
            else:
                line = _EqualSlices(self._line_length, self.slice_length, key)
            if len(self._lines) > 3:
                self._lines.clear()
            self._lines[epoch] = line
        return line

    @cached_property
    def _lines(self) -> dict[int, _EqualSlices | _ShardSlices]:
        return {}


def _sum_of_floors(count: int, numerator: int, lanes: int) -> int:
    """Return `sum(floor((numerator + j) / lanes) for j in range(count))` for count <= lanes."""
    whole, rest = divmod(numerator, lanes)
    return count * whole + max(0, count - (lanes - rest))


class _Window:
    """A few slices that are read side by side and dealt out in rounds; `base` and `lengths` have shape (pieces,)."""

    __slots__ = ("_base", "_lengths", "_phase", "_total", "before", "key", "rounds")

    def __init__(self, before: int, base: IntArray, lengths: IntArray, buffer: int, key: int) -> None:
        self.before, self._base, self._lengths, self.key = before, base, lengths, key
        self._total = int(lengths.sum())
        self.rounds = max(1, self._total // max(buffer, lengths.size))
        self._phase = below(key, lengths.size, self.rounds)

    def deal(self, draw: int) -> tuple[int, int, IntArray]:
        """Return number, first draw and (unshuffled) indices of the round that holds a draw of the window."""
        t = min(draw * self.rounds // self._total, self.rounds - 1)
        low, high = self._dealt(t), self._dealt(t + 1)
        while int(low.sum()) > draw:
            t -= 1
            low, high = self._dealt(t), low
        while int(high.sum()) <= draw:
            t += 1
            low, high = high, self._dealt(t + 1)
        sizes = high - low
        ends = np.cumsum(sizes)
        indices = np.arange(int(ends[-1]), dtype=np.int64) + np.repeat(self._base + low - (ends - sizes), sizes)
        return t, int(low.sum()), indices

    def _dealt(self, rounds: int) -> IntArray:
        """Return how many samples of each piece the first rounds have taken, shape (pieces,)."""
        return (rounds * self._lengths + self._phase) // self.rounds


class _EqualSlices:
    """An epoch line of slices that are equal but for the last one, whose place the permutation tells."""

    def __init__(self, num_samples: int, length: int, key: int) -> None:
        self._length = length
        slices = -(-num_samples // length)
        self._order = Permutation(slices, key)
        self._missing = slices * length - num_samples
        self._short = self._order.place_of(slices - 1)

    def slot_of(self, position: int) -> int:
        slot = position // self._length
        return slot if slot < self._short else max(self._short, (position + self._missing) // self._length)

    def starts(self, slots: IntArray) -> IntArray:
        return slots * self._length - np.where(slots > self._short, self._missing, 0)

    def first_samples(self, low: int, high: int) -> IntArray:
        return self._order.at_many(np.arange(low, high, dtype=np.int64)) * self._length


class _ShardSlices:
    """An epoch line whose slices are whole shards: the one case that keeps prefix sums."""

    def __init__(self, shard_counts: IntArray, key: int) -> None:
        filled = np.flatnonzero(shard_counts)
        order = filled[shuffled(key, filled.size)]
        self._starts = np.concatenate(([0], np.cumsum(shard_counts[order])))
        self._first = (np.cumsum(shard_counts) - shard_counts)[order]

    def slot_of(self, position: int) -> int:
        return int(np.searchsorted(self._starts, position, side="right")) - 1

    def starts(self, slots: IntArray) -> IntArray:
        return self._starts[slots]

    def first_samples(self, low: int, high: int) -> IntArray:
        return self._first[low:high]
