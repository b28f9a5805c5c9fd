"""The order of one leaf: from a lane and the number of its draw to a sample index, without any table to rebuild.

A leaf has N samples on one line (its shards laid end to end), cut into slices. In every epoch the slices are put in the
order of a keyed permutation and laid end to end again: the *epoch line*. (Slices of one length are permuted in closed
form. Whole shards differ, and a place on the line is found by adding them up: where they are many, by groups of them,
so that a seek into another epoch of 100,000 shards still takes less than a millisecond.) Each of the L lanes owns a
stretch of the line:

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

from energon_bridge.rng import FloatArray, IntArray, Permutation, below, draws, fold, shuffled

ORDER_VERSION = 4
"""Raised with every change of a rule, here or in `stream/packing.py`, that changes which sample comes when.

2: the lanes of a weighted mix stand apart by a step chosen for their number (`plan/lane_step.py`).
3: many whole shards are shuffled in groups; weights that move keep the global order even too (`plan/scheduled.py`).
4: the buffers from which lanes select packs grow to their size over several selections (`stream/packing.py`).
"""

_SLICES, _WINDOW, _ROUND = 1, 2, 3
_ENDLESS = 1 << 16
_GROUP_BITS = 9


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
        # Where a slice is a shard, every copy of it is looked at for a new epoch line.
        return _ENDLESS if self.slice_length else max(2, _ENDLESS // self.shard_counts.size)

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
            edges, first_samples = line.slices(low, high)
            inside = np.clip(edges, start, stop)
            base = first_samples + inside[:-1] - edges[:-1]
            key = fold(self.key, _WINDOW, epoch, place, number)
            cached = _Window(int(inside[0]) - start, base, np.diff(inside), self.shuffle_buffer_size, key)
            # Nobody comes back to the window of a single round, of which a thousand small leaves have many.
            if cached.rounds > 1:
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

    def _epoch_line(self, epoch: int) -> _EqualSlices | _ShardSlices | _GroupedShards:
        line = self._lines.get(epoch)
        if line is None:
            key = fold(self.key, _SLICES, epoch)
            if self.slice_length is not None:
                line = _EqualSlices(self._line_length, self.slice_length, key)
            elif self._shards[0].size < 1 << _GROUP_BITS:
                line = _ShardSlices(*self._shards, shuffled(key, self._shards[0].size))
            else:
                line = _GroupedShards(*self._shards, key)
            if len(self._lines) > 3:
                self._lines.clear()
            self._lines[epoch] = line
        return line

    @cached_property
    def _shards(self) -> tuple[IntArray, FloatArray]:
        """First sample and number of samples (exact: they are small) of each shard that has any, copy after copy."""
        filled = np.flatnonzero(self.shard_counts)
        first = (np.cumsum(self.shard_counts) - self.shard_counts)[filled]
        copies = np.arange(self._copies, dtype=np.int64)[:, None] * self.num_samples
        return (copies + first).ravel(), np.tile(self.shard_counts[filled].astype(np.float64), self._copies)

    @cached_property
    def _lines(self) -> dict[int, _EqualSlices | _ShardSlices | _GroupedShards]:
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

    def slices(self, low: int, high: int) -> tuple[IntArray, IntArray]:
        slots = np.arange(low, high + 1, dtype=np.int64)
        edges = slots * self._length - np.where(slots > self._short, self._missing, 0)
        return edges, self._order.at_many(slots[:-1]) * self._length


class _ShardSlices:
    """An epoch line whose slices are whole shards, in a given order."""

    def __init__(self, first: IntArray, counts: FloatArray, order: IntArray) -> None:
        self._first = first[order]
        self._edges = np.concatenate(([0.0], np.cumsum(counts[order]))).astype(np.int64)

    def slot_of(self, position: int) -> int:
        return int(self._edges.searchsorted(position, side="right")) - 1

    def slices(self, low: int, high: int) -> tuple[IntArray, IntArray]:
        return self._edges[low : high + 1], self._first[low:high]


class _GroupedShards:
    """An epoch line of many whole shards: groups of them, each put in order when somebody comes to it.

    Of every G shards in a row each goes to a group of its own, shard j to `(j * step + turn) mod G` with an odd step
    and a turn that are keys of the row; a group is in keyed order. So a seek adds up groups and sorts a few of them.
    """

    def __init__(self, first: IntArray, counts: FloatArray, key: int) -> None:
        self._first, self._counts, self._key = first, counts, key
        groups = 1 << min(16, counts.size.bit_length() - _GROUP_BITS)
        keys = draws(key, -(-counts.size // groups))[:, None]
        step, turn = (keys >> np.uint64(48) | np.uint64(1)).astype(np.uint16), keys.astype(np.uint16)
        dealt = (np.arange(groups, dtype=np.uint16) * step + turn) & np.uint16(groups - 1)
        self._group_of = dealt.ravel()[: counts.size]
        rows, rest = divmod(counts.size, groups)
        slots = rows + np.bincount(self._group_of[counts.size - rest :], minlength=groups)
        samples = np.bincount(self._group_of.astype(np.int64), counts, groups).astype(np.int64)
        self._slots, self._starts = (np.concatenate(([0], np.cumsum(part))) for part in (slots, samples))
        self._groups: dict[int, _ShardSlices] = {}

    def slot_of(self, position: int) -> int:
        group = int(self._starts.searchsorted(position, side="right")) - 1
        return int(self._slots[group]) + self._group(group).slot_of(position - int(self._starts[group]))

    def slices(self, low: int, high: int) -> tuple[IntArray, IntArray]:
        first, last = (self._slots.searchsorted((low, high - 1), side="right") - 1).tolist()
        parts = []
        for group in range(first, last + 1):
            slot = int(self._slots[group])
            edges, first_samples = self._group(group).slices(max(low - slot, 0), high - slot)
            parts.append((self._starts[group] + edges, first_samples))
        inner = [edges[:-1] for edges, _ in parts]  # where a group ends the next one starts
        return np.concatenate([*inner, parts[-1][0][-1:]]), np.concatenate([found for _, found in parts])

    def _group(self, number: int) -> _ShardSlices:
        group = self._groups.get(number)
        if group is None:
            shards = np.flatnonzero(self._group_of == number)
            shards = shards[shuffled(fold(self._key, number), shards.size)]
            group = self._groups[number] = _ShardSlices(self._first, self._counts, shards)
        return group
