"""The order of one leaf: maps a lane and the number of its draw to a sample index, without tables to rebuild.

A leaf has N samples on one line, its shards laid end to end, cut into slices of one length. In every epoch the slices
are put in the order of a keyed permutation and laid end to end again: the *epoch line*. L lanes divide it.

*Slice length* (`slice_length`). A slice is read from front to back; the more slices a lane has, the better it mixes. So
a slice is as long as possible while each lane's share of an epoch has 64 of them: `N div 64 L`, at most the user's cap,
at least 1. If a lane gets fewer than 8 microbatches or fewer than 128 samples an epoch, slices have 1 sample.

*Slices of one sample are dealt like cards.* The epoch line is then a permutation of all samples, and the lanes take it
in turn, a block of draws at a time: draw k of lane l is place `((k div b) L + q) b + k mod b` of all epoch lines laid
end to end. Alone, a leaf has blocks of one microbatch and q = l: microbatch m holds the places [m b, (m + 1) b), so
that an epoch ends as it does for any sampler without replacement, whatever L is. In a mix, b = 1 and
q = (l - key) mod L: lanes never differ by more than one draw, and which of them is ahead differs from leaf to leaf.
Without shuffling, every leaf is dealt in blocks of one microbatch, from its own line. Where L b and N have a common
divisor, a lane then comes to a part of the samples only, and bans may leave it nothing. It takes the places of another
lane from then on: of the first after it that has something left.

*Longer slices are divided in stretches.*

- Lane l has the rank `l' = (key - 1 - l) mod L` in this leaf and owns `floor(((e+1)N + l')/L) - floor((eN + l')/L)`
  consecutive positions of epoch e, stretches laid in the order of l'. Before epoch e it has drawn
  `floor((eN + l')/L)` times, so its draw k lies in epoch `ceil(((k+1)L - l')/N) - 1`.
- A stretch that touches P slices is worked through in `max(1, P div K)` *stripes*: slices that are read side by side,
  `K = 4 parallel_shard_iters + ceil(3 shuffle_buffer_size / slice length)` of them.
- A stripe of n samples in k pieces is dealt in `T = max(1, n div max(shuffle_buffer_size, k))` *rounds*. Round t
  takes from piece j, of n_j samples, the positions `floor((t n_j + f_j)/T)` up to `floor(((t+1) n_j + f_j)/T)`, with
  f_j a key below T. So every slice is read from front to back, one run of consecutive samples a round.
- The samples of a round are spread: those of piece j, c_j of them, are shuffled by key, and the i-th comes at a keyed
  moment between `i / c_j` and `(i+1) / c_j` of the round. So every stretch of a round has its share of every slice.

Shuffled over E epochs at once, the line is E copies of the dataset, cut, permuted and divided as if it were one: a
sample comes E times in E epochs, not once in each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from energon_bridge.core.order.changes import LeafBans
from energon_bridge.core.order.rng import IntArray, Permutation, below, below_at, draws_at, fold, shuffled

ORDER_VERSION = 1
"""The version of the order: raised with every change, here or in `stream/pack_buffer.py`, of which sample comes when.

1: that of 0.1.0.
"""

DEFAULT_PARALLEL_SHARD_ITERS = 16
_SLICES_OF_A_LANE = 64
_SLICES_PER_ITER = 4
"""Slices in a stripe per `parallel_shard_iters`. A default stripe has all 64 slices of a lane, so that a microbatch of
32 samples comes from 29 of them."""
_FEWEST_MICROBATCHES = 8
"""Microbatches of a lane per epoch below which slices have one sample; it would otherwise mix several epochs."""
_SLICES = 1
_STRIPE = 2
_ROUND = 3
_NEVER = np.iinfo(np.int64).max
_ENDLESS = 1 << 16
"""Copies of the dataset on one line if the end of an epoch does not matter."""
_LARGEST_TABLE = 4096
"""Samples up to which a permutation is kept as an array; a longer one is cheaper to evaluate sample by sample."""
_TABLES = 1 << 16
"""Samples in all permutations of a leaf that are kept as arrays."""
_DEALT = 128
"""Draws of a lane looked up at once, and epochs they may span; both bound the cost of a seek."""
_EPOCHS_AT_ONCE = 32

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Memo(dict[Key, Value]):
    """Values by key, each made when it is first asked for; before there are more than `most`, all are dropped."""

    def __init__(self, make: Callable[[Key], Value], most: int) -> None:
        super().__init__()
        self._make = make
        self._most = most

    def __missing__(self, key: Key) -> Value:
        if len(self) >= self._most:
            self.clear()
        value = self[key] = self._make(key)
        return value


def slice_length(num_samples: int, num_lanes: int, rows: int, cap: int | None) -> int:
    """Return the samples in a slice.

    Args:
        num_samples: N.
        num_lanes: L.
        rows: Draws in a microbatch.
        cap: The most; None: no cap (`max_samples_per_sequence`).
    """
    fewest = _FEWEST_MICROBATCHES * max(rows, 2 * _SLICES_OF_A_LANE // _FEWEST_MICROBATCHES)
    if num_samples < fewest * num_lanes:
        return 1
    length = num_samples // (_SLICES_OF_A_LANE * num_lanes)
    return length if cap is None else min(cap, length)


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
        num_samples: N.
        num_lanes: L.
        key: Key of the leaf; everything keyed below derives from it.
        slice_length: Samples in a slice; see the function of that name.
        shuffle_buffer_size: Samples mixed at a time, about; with 0 or 1 only the slices are mixed.
        parallel_shard_iters: A quarter of the slices that are read side by side.
        block: Draws in a microbatch, for a leaf dealt in microbatches; 0: the leaf is in a mix and dealt singly.
        shuffle: False keeps the dataset's own order.
        first_sample: Index of the first sample, if the leaf is a part of a dataset.
        kept: Indices of the samples of a filtered leaf, ascending, shape (N,); None: N samples from the first on.
        epochs_per_shuffle: E, the epochs shuffled as one; -1: their end does not matter.
        moved: Of each lane of which all is banned: the lane whose places it takes, and from which draw on.
    """

    num_samples: int
    num_lanes: int
    key: int
    slice_length: int
    shuffle_buffer_size: int
    parallel_shard_iters: int
    block: int = 1
    shuffle: bool = True
    first_sample: int = 0
    kept: IntArray | None = field(default=None, repr=False, compare=False)
    epochs_per_shuffle: int = 1
    moved: Mapping[int, tuple[int, int]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def classes(self) -> int:
        """The modulus c of the places p that a lane comes to: `(p - its first place) mod c < b`; 1: all places."""
        common = math.gcd(self.num_lanes * self.dealt_block, self.num_samples)
        return 1 if self.shuffle or common <= self.dealt_block else common

    def comes_to(self, lane: int, samples: IntArray) -> NDArray[np.bool_]:
        """Return which of some samples of the leaf a lane ever draws."""
        return (self._places_of(samples) - self._place(lane, 0)) % self.classes < self.dealt_block

    def without(self, bans: LeafBans | None) -> LeafOrder:
        """Return the order with some samples banned; for a leaf that is alone, or in a bucket."""
        common = self.classes
        if bans is None or common == 1:
            return replace(self, moved={}) if self.moved else self
        # The draw from which on each place is banned, then the same of each class (all its places), of each lane (all
        # its classes); never, if anything of it is left.
        gone = np.full(self.num_samples, _NEVER)
        gone[self._places_of(bans.samples)] = bans.starts
        firsts = np.array([self._place(lane, 0) for lane in range(self.num_lanes)])
        of_class = gone.reshape(-1, common).max(axis=0)  # a lane comes to all places of a class or to none
        ends = of_class[(firsts[:, None] + np.arange(self.dealt_block)) % common].max(axis=1)
        left = np.flatnonzero(ends == _NEVER)
        # Each lane that ends takes the places of the next one that does not, round the lanes, from the first of its own
        # draws at or after the global draw at which it ends.
        moved = {}
        for lane in np.flatnonzero(ends != _NEVER).tolist() if left.size else ():
            other = int(left[np.searchsorted(left, lane) % left.size])
            moved[lane] = other, max(0, -((lane - int(ends[lane])) // self.num_lanes))
        return replace(self, moved=moved)

    @property
    def is_dealt(self) -> bool:
        """Whether the lanes take turns on the epoch line; otherwise each owns a stretch of it."""
        return not self.shuffle or self.slice_length == 1

    @property
    def dealt_block(self) -> int:
        """Draws that a lane takes in one turn (b)."""
        return self.block if self.is_dealt and self.block else 1

    @property
    def rotation(self) -> int:
        """The lane that comes first in this leaf."""
        return 0 if self.is_dealt and self.block else self.key % self.num_lanes

    @cached_property
    def _copies(self) -> int:
        return self.epochs_per_shuffle if self.epochs_per_shuffle > 0 else _ENDLESS

    @cached_property
    def _line_length(self) -> int:
        return self.num_samples * self._copies if self.shuffle else self.num_samples

    def samples(self, places: IntArray) -> IntArray:
        """Return the samples at some places of the leaf: their indices in the dataset."""
        return self.first_sample + places if self.kept is None else self.kept[places].astype(np.int64)

    def _places_of(self, samples: IntArray) -> IntArray:
        return samples - self.first_sample if self.kept is None else np.searchsorted(self.kept, samples)

    def epoch_of(self, lane: int, draw: int) -> int:
        """Return the epoch of a lane's draw (for E epochs shuffled as one, their number)."""
        if self.is_dealt:
            return self._place(lane, draw) // self._line_length
        # ceil(((k+1) L - l') / N) - 1, as above; -(x // n) of the negated numerator rounds up.
        return -((self._rank(lane) - (draw + 1) * self.num_lanes) // self._line_length) - 1

    def epoch_end(self, lane: int, draw: int) -> int:
        """Return the first draw of a lane after the epoch of a draw."""
        end = (self.epoch_of(lane, draw) + 1) * self._line_length
        if not self.is_dealt:
            return (end + self._rank(lane)) // self.num_lanes
        # The epoch ends `inside` draws into a block, which is that of the lane at `place` of the turn. Lanes before it
        # have taken their block of the turn, lanes after it have not.
        block, inside = divmod(end, self.dealt_block)
        turn, place = divmod(block, self.num_lanes)
        ahead = (lane - self.rotation) % self.num_lanes - place
        return (turn + (ahead < 0)) * self.dealt_block + (0 if ahead else inside)

    def rounds_at(self, lane: int, draw: int, fewest: int) -> Round:
        """Return the round that holds a draw of a lane, with those after it, until there are `fewest` draws.

        Together they cost little more than one alone.
        """
        if self.is_dealt:
            return self._dealt_rounds(lane, draw, fewest)
        parts = [self._stripe_rounds(lane, draw, fewest)]
        count = parts[0].indices.size
        while count < fewest:
            parts.append(self._stripe_rounds(lane, parts[0].first + count, fewest - count))
            count += parts[-1].indices.size
        if len(parts) == 1:
            return parts[0]
        columns = ([part.indices for part in parts], [part.epochs for part in parts])
        return Round(parts[0].first, *map(np.concatenate, columns))

    def _stripe_rounds(self, lane: int, draw: int, fewest: int) -> Round:
        """Return the round that holds a draw, with those after it in its stripe until there are `fewest` draws."""
        n = self._line_length
        lanes = self.num_lanes
        rank = self._rank(lane)
        epoch = self.epoch_of(lane, draw)
        first = (epoch * n + rank) // lanes
        share = ((epoch + 1) * n + rank) // lanes - first
        # The stretches of the lanes of lower rank come before this one on the epoch line: the sum of their lengths.
        start = _sum_of_floors(rank, (epoch + 1) * n, lanes) - _sum_of_floors(rank, epoch * n, lanes)
        stripe = self._stripe_at(epoch, rank, start, start + share, draw - first)
        taken, places = stripe.deal(draw - first - stripe.before, fewest)
        return self._round(first + stripe.before + taken, np.full(places.size, epoch, dtype=np.int64), places)

    def _round(self, first: int, lines: IntArray, places: IntArray) -> Round:
        """Return a round of samples, given by epoch line and place among the E copies on it."""
        if self._copies > 1:
            copies, places = np.divmod(places, self.num_samples)
            lines = lines * self._copies + copies
        return Round(first, self.samples(places), lines)

    # Dealt: slices of one sample, or no shuffling -------------------------------------------------------------------

    def _place(self, lane: int, draw: int) -> int:
        """Return a draw's place on all epoch lines laid end to end."""
        turn, inside = divmod(draw, self.dealt_block)
        return (turn * self.num_lanes + (lane - self.rotation) % self.num_lanes) * self.dealt_block + inside

    @cached_property
    def _draws_at_once(self) -> int:
        block = self.dealt_block
        if not self.shuffle:
            return block
        few = min(_DEALT, _EPOCHS_AT_ONCE * self._line_length // self.num_lanes)
        return max(1, few // block) * block

    def _dealt_rounds(self, lane: int, draw: int, fewest: int) -> Round:
        """Return the draws of a dealt leaf around a draw: a multiple of `_draws_at_once`, at least `fewest`.

        They are the places of `count / block` turns, shape (count,), permuted one epoch line after the other.
        """
        block = self.dealt_block
        once = self._draws_at_once
        first = draw - draw % once
        count = -(-fewest // once) * once  # rounded up
        turns = np.arange(count // block, dtype=np.int64) * (self.num_lanes * block)
        further = (turns[:, None] + np.arange(block, dtype=np.int64)).ravel()
        places = self._place(lane, first) + further
        if lane in self.moved:
            other, begin = self.moved[lane]
            places = np.where(first + np.arange(count) < begin, places, self._place(other, first) + further)
        lines, places = np.divmod(places, self._line_length)
        if not self.shuffle:
            return Round(first, self.samples(places), lines)
        # Each epoch line has a permutation of its own, so places are permuted one stretch of equal lines at a time.
        edges = [0, *(np.flatnonzero(np.diff(lines)) + 1).tolist(), count]
        for low, high in itertools.pairwise(edges):
            places[low:high] = self._permuted(int(lines[low]), places[low:high])
        return self._round(first, lines, places)

    def _permuted(self, line: int, places: IntArray) -> IntArray:
        """Return the samples at some places of an epoch line."""
        if self._line_length > _LARGEST_TABLE:
            return self._permutations[line].at_many(places)
        return self._tables[line][places]

    @cached_property
    def _permutations(self) -> Memo[int, Permutation]:
        """The permutations of epoch lines, of `_line_length` places each."""
        return Memo(self._permutation, _EPOCHS_AT_ONCE + 1)

    def _permutation(self, line: int) -> Permutation:
        return Permutation(self._line_length, fold(self.key, _SLICES, line))

    @cached_property
    def _tables(self) -> Memo[int, IntArray]:
        """The same permutations as arrays of shape (line length,), for short lines."""
        return Memo(self._table, _TABLES // self._line_length)

    def _table(self, line: int) -> IntArray:
        return shuffled(fold(self.key, _SLICES, line), self._line_length)

    # Stretches: longer slices ---------------------------------------------------------------------------------------

    def _rank(self, lane: int) -> int:
        return (self.key - 1 - lane) % self.num_lanes

    def _stripe_at(self, epoch: int, rank: int, start: int, stop: int, draw: int) -> _Stripe:
        """Return the stripe of a draw of the stretch [start, stop) of an epoch line; `draw` counts in the stretch."""
        line = self._lines[epoch]
        first_slot = line.slot_of(start)
        last_slot = line.slot_of(stop - 1)
        slots = last_slot - first_slot + 1
        stripes = max(1, slots // self._slices_per_stripe)
        # Stripe i has the slots from floor(i slots / stripes) on (`low`, `high`); solved for the i of the draw's slot.
        number = ((line.slot_of(start + draw) - first_slot + 1) * stripes - 1) // slots
        cached = self._stripes.get((epoch, rank, number))
        if cached is None:
            low = first_slot + number * slots // stripes
            high = first_slot + (number + 1) * slots // stripes
            edges, first_samples = line.slices(low, high)
            # The first and the last slice may belong to neighbouring lanes too: only their part inside is of this one.
            inside = np.clip(edges, start, stop)
            base = first_samples + inside[:-1] - edges[:-1]
            key = fold(self.key, _STRIPE, epoch, rank, number)
            cached = _Stripe(int(inside[0]) - start, base, np.diff(inside), self.shuffle_buffer_size, key)
            if len(self._stripes) > 2 * self.num_lanes:
                self._stripes.clear()
            self._stripes[epoch, rank, number] = cached
        return cached

    @cached_property
    def _stripes(self) -> dict[tuple[int, int, int], _Stripe]:
        return {}

    @cached_property
    def _slices_per_stripe(self) -> int:
        return _SLICES_PER_ITER * self.parallel_shard_iters + math.ceil(
            3 * self.shuffle_buffer_size / self.slice_length
        )

    @cached_property
    def _lines(self) -> Memo[int, _EpochLine]:
        return Memo(self._epoch_line, 4)

    def _epoch_line(self, epoch: int) -> _EpochLine:
        return _EpochLine(self._line_length, self.slice_length, fold(self.key, _SLICES, epoch))


def _sum_of_floors(count: int, numerator: int, lanes: int) -> int:
    """Return `sum(floor((numerator + j) / lanes) for j in range(count))` for count <= lanes."""
    # The quotient is `whole` up to j = lanes - rest, and one more from there on.
    whole, rest = divmod(numerator, lanes)
    return count * whole + max(0, count - (lanes - rest))


def _spread(sizes: IntArray, keys: Sequence[int]) -> IntArray:
    """Return the order of the samples of some rounds, shape (samples,): sample `result[i]` comes i-th.

    Samples are numbered round after round, in a round piece by piece.

    Args:
        sizes: Samples that each round has of each piece, shape (rounds, pieces).
        keys: The key of each round.
    """
    totals = sizes.sum(axis=1)
    of_round = np.repeat(np.arange(totals.size), totals)
    flat = sizes.ravel()
    piece = np.repeat(np.arange(flat.size), flat)
    firsts = np.cumsum(flat) - flat
    place = np.arange(piece.size)
    # Every array from here on has one entry per sample; `steps` is the number of a sample in its round.
    steps = place - (np.cumsum(totals) - totals)[of_round]
    # Sorted by piece first, then by draw: pieces stay where they are, each is shuffled in itself. No two draws of a
    # piece are equal, so any way of sorting them gives the same; 16 bits are sorted stably without comparing.
    shuffled_pieces = np.argsort(draws_at(keys, of_round, steps))
    few = piece.astype(np.uint16) if flat.size <= 1 << 16 else piece
    shuffled_pieces = shuffled_pieces[np.argsort(few[shuffled_pieces], kind="stable")]
    number = place - firsts[piece]
    chances = below_at([fold(key, 0) for key in keys], of_round, steps, (1 << 32) - 1)
    # The moment of the i-th of c samples of a piece, in 2^-32 of the round: between i / c and (i + 1) / c.
    moments = ((number << 32) + chances) // flat[piece]
    return shuffled_pieces[np.argsort((of_round << 32) + moments, kind="stable")]


class _Stripe:
    """A few slices that are read side by side and dealt out in rounds.

    Args:
        before: Draws of the lane's stretch before this stripe.
        base: Place of the first sample of each piece, shape (pieces,).
        lengths: Samples in each piece, shape (pieces,).
        buffer: Samples in a round, about.
    """

    __slots__ = ("_base", "_lengths", "_phase", "_total", "before", "key", "rounds")

    def __init__(self, before: int, base: IntArray, lengths: IntArray, buffer: int, key: int) -> None:
        self.before = before
        self._base = base
        self._lengths = lengths
        self.key = key
        self._total = int(lengths.sum())
        self.rounds = max(1, self._total // max(buffer, lengths.size))
        self._phase = below(key, lengths.size, self.rounds)

    def deal(self, draw: int, fewest: int) -> tuple[int, IntArray]:
        """Return the round that holds a draw of the stripe, with those after it until there are `fewest` draws.

        Fewer if the stripe ends. Returns the first draw of the first round, and the places of all samples, in order.
        """
        # A guess by the average, then corrected. `taken` has the samples of each piece dealt before each round, shape
        # (rounds + 1, pieces); `firsts` their sums: the first draw of each round.
        t = min(draw * self.rounds // self._total, self.rounds - 1)
        while True:
            last = min(self.rounds, t + 1 + (fewest - 1) * self.rounds // self._total)
            taken = (np.arange(t, last + 1)[:, None] * self._lengths + self._phase) // self.rounds
            firsts = taken.sum(axis=1).tolist()
            if firsts[0] <= draw < firsts[1]:
                break
            t += 1 if firsts[0] <= draw else -1
        sizes = np.diff(taken, axis=0)
        flat = sizes.ravel()
        # The ranges base + taken ... of all pieces, one after the other, without a loop: a running number and, repeated
        # for each sample of a piece, how far the piece's places are ahead of that number.
        starts = (self._base + taken[:-1]).ravel() - (np.cumsum(flat) - flat)
        places = np.arange(int(flat.sum()), dtype=np.int64) + np.repeat(starts, flat)
        return firsts[0], places[_spread(sizes, [fold(self.key, _ROUND, each) for each in range(t, last)])]


class _EpochLine:
    """An epoch line: the slices of the dataset in keyed order, each in its *slot*.

    All slices have one length, but the dataset's last one may be shorter; the permutation says in which slot that is.
    """

    def __init__(self, num_samples: int, length: int, key: int) -> None:
        self._length = length
        slices = -(-num_samples // length)
        self._order = Permutation(slices, key)
        self._missing = slices * length - num_samples
        self._short = self._order.place_of(slices - 1)

    def slot_of(self, position: int) -> int:
        """Return the slot that a position of the line is in."""
        slot = position // self._length
        return slot if slot < self._short else max(self._short, (position + self._missing) // self._length)

    def slices(self, low: int, high: int) -> tuple[IntArray, IntArray]:
        """Return the positions where slots [low, high) begin and the last ends, and the first place of each slice."""
        slots = np.arange(low, high + 1, dtype=np.int64)
        edges = slots * self._length - np.where(slots > self._short, self._missing, 0)
        return edges, self._order.at_many(slots[:-1]) * self._length
