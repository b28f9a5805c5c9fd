"""The order of a leaf: every sample once an epoch, wherever the lanes are cut; and the very order, by golden values."""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from strategies import keys, lane_counts, leaf_orders

from energon_bridge.core.order.changes import LeafBans
from energon_bridge.core.order.leaf_order import ORDER_VERSION, LeafOrder, slice_length
from energon_bridge.core.order.rng import Permutation, below, draws, fold, shuffled

EPOCHS = 3


def order_of(num_samples: int, **kwargs: Any) -> LeafOrder:
    settings = {"num_lanes": 4, "key": 1, "slice_length": 10, "shuffle_buffer_size": 8, "parallel_shard_iters": 2}
    return LeafOrder(num_samples=num_samples, **(settings | kwargs))


def epochs_of(order: LeafOrder, lane: int, epochs: int = EPOCHS) -> list[list[int]]:
    """Return the indices that a lane draws in each of the first epochs, in its order."""
    found: list[list[int]] = [[] for _ in range(epochs)]
    draw = 0
    while order.epoch_of(lane, draw) < epochs:
        part = order.rounds_at(lane, draw, 1)
        assert part.first == draw
        for index, epoch in zip(part.indices.tolist(), part.epochs.tolist(), strict=True):
            assert order.epoch_of(lane, draw) == epoch
            if epoch < epochs:
                found[epoch].append(index)
            draw += 1
    return found


def by_the_book(order: LeafOrder, lane: int, epoch: int) -> list[int]:
    """Return what a lane draws in an epoch, with every table of the rules written out."""
    n, lanes, length = order.num_samples, order.num_lanes, order.slice_length
    if length == 1:
        return dealt_by_the_book(order, lane, epoch)
    slices = [list(range(a, min(n, a + length))) for a in range(0, n, length)]
    permutation = Permutation(len(slices), fold(order.key, 1, epoch))
    places = [permutation.at(place) for place in range(len(slices))]
    line = [(slot, index) for slot, number in enumerate(places) for index in slices[number]]
    share = [((epoch + 1) * n + p) // lanes - (epoch * n + p) // lanes for p in range(lanes)]
    rank = (order.key - 1 - lane) % lanes
    start = sum(share[:rank])
    pieces = [
        [index for _, index in piece]
        for _, piece in itertools.groupby(line[start : start + share[rank]], key=lambda entry: entry[0])
    ]
    per_stripe = 4 * order.parallel_shard_iters + -(-3 * order.shuffle_buffer_size // length)
    stripes = int(max(1, len(pieces) // per_stripe))
    drawn: list[int] = []
    for number in range(stripes if pieces else 0):
        stripe = pieces[number * len(pieces) // stripes : (number + 1) * len(pieces) // stripes]
        rounds = max(1, sum(map(len, stripe)) // max(order.shuffle_buffer_size, len(stripe)))
        key = fold(order.key, 2, epoch, rank, number)
        phases = below(key, len(stripe), rounds).tolist()
        for t in range(rounds):
            parts = [
                piece[(t * len(piece) + phase) // rounds : ((t + 1) * len(piece) + phase) // rounds]
                for piece, phase in zip(stripe, phases, strict=True)
            ]
            drawn += spread_by_the_book(parts, fold(key, 3, t))
    return drawn


def spread_by_the_book(parts: list[list[int]], key: int) -> list[int]:
    """Return the samples of a round in the order of their moments in it."""
    total = sum(map(len, parts))
    keyed, moments = draws(key, total).tolist(), below(fold(key, 0), total, 2**32 - 1).tolist()
    timed: list[tuple[int, int, int]] = []
    for part in parts:
        first = len(timed)
        in_order = sorted(range(len(part)), key=lambda i, first=first: keyed[first + i])
        for number, i in enumerate(in_order):
            timed.append(((number * 2**32 + moments[first + number]) // len(part), first + number, part[i]))
    return [sample for _, _, sample in sorted(timed)]


def dealt_by_the_book(order: LeafOrder, lane: int, epoch: int) -> list[int]:
    """Return what a lane draws in an epoch whose samples are dealt: every L-th block of the epoch lines."""
    n, block = order.num_samples, order.block or 1
    first = (lane - (0 if order.block else order.key)) % order.num_lanes
    line = shuffled(fold(order.key, 1, epoch), n).tolist()  # all of these leaves are small
    places = range(epoch * n, (epoch + 1) * n)
    return [line[place - epoch * n] for place in places if place // block % order.num_lanes == first]


@given(leaf_orders())
def test_every_epoch_covers_every_sample_once(order: LeafOrder) -> None:
    lanes = [epochs_of(order, lane) for lane in range(order.num_lanes)]
    for epoch in range(EPOCHS):
        assert sorted(itertools.chain(*(lane[epoch] for lane in lanes))) == list(range(order.num_samples))
        so_far = [sum(map(len, lane[: epoch + 1])) for lane in lanes]
        assert max(so_far) - min(so_far) <= order.dealt_block


@pytest.mark.parametrize("num_lanes", [1, 5, 24])
@pytest.mark.parametrize("num_samples", [1, 7, 24, 30])
@pytest.mark.parametrize(("slice_length", "block"), [(1, 0), (1, 8), (3, 0)])
def test_small_leaves_are_covered_too(num_samples: int, num_lanes: int, slice_length: int, block: int) -> None:
    order = order_of(num_samples, num_lanes=num_lanes, slice_length=slice_length, block=block)
    epochs = 2 + 2 * num_lanes * max(1, block) // num_samples
    lanes = [epochs_of(order, lane, epochs) for lane in range(num_lanes)]
    for epoch in range(epochs):
        assert sorted(itertools.chain(*(lane[epoch] for lane in lanes))) == list(range(num_samples))
    # If a leaf has fewer samples than there are lanes, every lane still gets its turn.
    assert all(any(lane) for lane in lanes)


@given(st.integers(1, 3000), st.integers(1, 64), lane_counts, keys)
def test_a_small_leaf_alone_is_one_sequence_on_any_number_of_lanes(n: int, rows: int, num_lanes: int, key: int) -> None:
    """Microbatch m holds the draws [m rows, (m + 1) rows) of one epoch after the other, whoever delivers it."""
    order = order_of(n, num_lanes=num_lanes, key=key, slice_length=1, block=rows)
    drawn: list[int] = []
    for m in range(2 + 2 * n // rows):
        lane, first = m % num_lanes, m // num_lanes * rows
        part = order.rounds_at(lane, first, 1)
        drawn += part.indices[first - part.first :][:rows].tolist()
    for epoch in range(2):
        assert drawn[epoch * n : (epoch + 1) * n] == shuffled(fold(key, 1, epoch), n).tolist()


@pytest.mark.parametrize("rows", [1, 256])
@pytest.mark.parametrize("num_lanes", [1, 24])
@pytest.mark.parametrize("cap", [None, 7])
def test_slices_are_as_long_as_they_can_be(rows: int, num_lanes: int, cap: int | None) -> None:
    small = 8 * num_lanes * max(rows, 16)
    assert slice_length(small - 1, num_lanes, rows, cap) == 1
    for n in (small, 3 * small + 5, 10**9, 10**12):
        length = slice_length(n, num_lanes, rows, cap)
        assert length == min(cap or n, n // (64 * num_lanes)) >= 1
        assert n // num_lanes // length >= 64


@given(leaf_orders())
def test_the_order_is_the_one_of_the_rules(order: LeafOrder) -> None:
    for lane in range(min(order.num_lanes, 4)):
        expected = [by_the_book(order, lane, epoch) for epoch in range(EPOCHS)]
        assert epochs_of(order, lane) == expected


@pytest.mark.parametrize(("n", "slice_length"), [(6000, 1), (60_000, 10)])
def test_epochs_keep_no_slices_together(n: int, slice_length: int) -> None:
    """Slices near each other in one epoch are near each other in the next as often as chance has it."""
    slices, near = 6000, 20
    order = order_of(n, num_lanes=1, slice_length=slice_length, shuffle_buffer_size=0, parallel_shard_iters=1)
    drawn = order.rounds_at(0, 0, 4 * n).indices[: 4 * n].reshape(4, n) // slice_length
    epochs = np.array([epoch[np.sort(np.unique(epoch, return_index=True)[1])] for epoch in drawn])
    places = np.argsort(epochs, axis=1)
    together = 0
    for epoch, later in itertools.permutations(range(4), 2):
        follow = places[later][epochs[epoch]]
        together += sum(int((np.abs(follow[d:] - follow[:-d]) <= near).sum()) for d in range(1, near + 1))
    expected = 12 * near * 2 * near
    assert abs(together / expected - 1) < 0.05
    # Any slice may come first, and the dataset's own neighbours are no neighbours.
    assert len(set(epochs[:, 0].tolist())) == 4
    assert int((np.abs(np.diff(places, axis=1)) == 1).sum()) <= 16
    # Every part of the dataset is spread over the epoch: of 600 slices in a row every tenth of an epoch has about 60.
    spread = [np.histogram2d(place, np.arange(slices), bins=10)[0] for place in places]
    assert all(each.min() > 35 and each.max() < 85 for each in spread)


@given(leaf_orders(), st.integers(0, 10**6), st.data())
def test_a_round_is_the_same_from_any_of_its_draws(order: LeafOrder, draw: int, data: st.DataObject) -> None:
    lane = data.draw(st.integers(0, order.num_lanes - 1))
    part = order.rounds_at(lane, draw, 1)
    size = part.indices.size
    assert part.first <= draw < part.first + size
    for other in {part.first, part.first + size - 1, part.first + size // 2}:
        fresh = replace(order).rounds_at(lane, other, 1)  # a copy has cached nothing
        assert fresh.first == part.first
        assert fresh.indices.tolist() == part.indices.tolist()
        assert fresh.epochs.tolist() == part.epochs.tolist()


@given(leaf_orders(), st.integers(0, 10**6), st.integers(1, 500), st.data())
def test_rounds_together_are_the_rounds_one_by_one(
    order: LeafOrder, draw: int, fewest: int, data: st.DataObject
) -> None:
    lane = data.draw(st.integers(0, order.num_lanes - 1))
    together = order.rounds_at(lane, draw, fewest)
    assert together.first <= draw
    assert together.indices.size >= fewest
    at = together.first
    while at < together.first + together.indices.size:  # whole rounds, and not only so many draws
        one = order.rounds_at(lane, at, 1)
        here = slice(at - together.first, at - together.first + one.indices.size)
        assert one.first == at
        assert one.indices.tolist() == together.indices[here].tolist()
        assert one.epochs.tolist() == together.epochs[here].tolist()
        at += one.indices.size
    assert at - one.indices.size - together.first < fewest + one.indices.size


@given(st.integers(1, 300), lane_counts, keys, st.integers(1, 7))
def test_without_shuffling_the_lanes_give_the_datasets_own_order(n: int, num_lanes: int, key: int, block: int) -> None:
    order = order_of(n, num_lanes=num_lanes, key=key, block=block, shuffle=False)
    for m in range(3 * num_lanes):
        lane, first = m % num_lanes, m // num_lanes * block
        part = order.rounds_at(lane, first + block - 1, 1)
        assert part.first == first
        assert part.indices.tolist() == [(m * block + i) % n for i in range(block)]
        assert part.epochs.tolist() == [(m * block + i) // n for i in range(block)]
        assert [order.epoch_of(lane, first + i) for i in range(block)] == part.epochs.tolist()


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4), st.sampled_from([None, 3]), st.data())
def test_without_shuffling_a_lane_of_which_all_is_banned_takes_what_another_has(
    n: int, num_lanes: int, block: int, each: int | None, data: st.DataObject
) -> None:
    kept = None if each is None else np.arange(n) * each
    order = order_of(n, num_lanes=num_lanes, block=block, shuffle=False, first_sample=0 if each else 5, kept=kept)
    samples = order.samples(np.arange(n)).tolist()
    starts = data.draw(st.dictionaries(st.sampled_from(samples), st.integers(0, 60), max_size=n))
    banned = np.array(sorted(starts), dtype=np.int64)
    from_draws = np.array([starts[sample] for sample in banned.tolist()], dtype=np.int64)
    after = order.without(LeafBans(samples=banned, starts=from_draws))
    draws, moved = 3 * n * block, []
    for lane in range(num_lanes):
        before, now = (each.rounds_at(lane, 0, draws).indices[:draws].tolist() for each in (order, after))
        if not {*before} <= starts.keys() or starts.keys() == {*samples}:
            assert now == before
            continue
        moved.append(lane)
        first = next(d for d in range(draws) if d * num_lanes + lane >= max(starts[sample] for sample in before))
        others = [(lane + step) % num_lanes for step in range(num_lanes)]
        found = [order.rounds_at(other, 0, draws).indices[:draws].tolist() for other in others]
        other = next(one for one in found if not {*one} <= starts.keys())
        assert now == before[:first] + other[first:]
        assert after.rounds_at(lane, draws // 2, 1).indices[0] in now
    assert [*after.moved] == moved


@pytest.mark.parametrize(("num_lanes", "most"), [(1, 0.06), (8, 0.008)])
def test_batches_mix_slices(num_lanes: int, most: float) -> None:
    """Share of the pairs of a batch of 256 that come from one slice of 100, with a buffer of 100."""
    batch, batches, n = 256, 20, 200_000
    order = order_of(n, num_lanes=num_lanes, slice_length=100, shuffle_buffer_size=100, parallel_shard_iters=4)
    columns = []
    for lane in range(num_lanes):
        drawn: list[int] = []
        while len(drawn) < batches * batch // num_lanes:
            drawn += order.rounds_at(lane, len(drawn), 1).indices.tolist()
        slices = np.array(drawn[: batches * batch // num_lanes]) // 100
        columns.append(slices.reshape(batches, -1))
    same = 0
    for row in np.concatenate(columns, axis=1):
        _, counts = np.unique(row, return_counts=True)
        same += int((counts * (counts - 1)).sum())
    assert 0 < same / (batches * batch * (batch - 1)) <= most


@settings(max_examples=20)
@given(st.integers(0, 23), st.integers(0, 10**13))
def test_a_leaf_of_a_billion_samples_is_sought_in_little_memory(lane: int, draw: int) -> None:
    tracemalloc.start()
    order = order_of(10**9, num_lanes=24, slice_length=100, shuffle_buffer_size=100, parallel_shard_iters=16)
    part = order.rounds_at(lane, draw, 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert part.first <= draw < part.first + part.indices.size
    assert peak < 32 << 20


GOLDEN: list[tuple[dict[str, Any], int, int, list[int]]] = [
    ({}, 100, 0, [60, 50, 51, 62, 70, 61, 52, 53, 64, 54, 71, 63, 56, 72, 65, 55, 59, 66, 68, 73, 57, 69]),
    ({}, 100, 3, [10, 75, 31, 30, 12, 11, 32, 76, 33, 13, 77, 15, 36, 14, 35, 16, 34, 78, 37, 19, 79, 39]),
    (
        {"num_lanes": 1, "key": 9223372036854775813},
        100,
        0,
        [50, 80, 0, 40, 30, 20, 10, 90, 60, 70, 81, 71, 21, 41, 31, 91],
    ),
    ({"slice_length": 1}, 100, 2, [84, 47, 65, 16, 94, 50, 76, 57, 38, 12, 28, 74, 92, 82]),
    ({"slice_length": 1, "block": 0}, 100, 2, [40, 4, 89, 6, 80, 37, 19, 23, 2, 15, 31, 64, 88, 34]),
    ({"slice_length": 1, "block": 8, "num_lanes": 24}, 7, 3, [2, 5, 4, 0, 4, 6, 5, 1, 4, 3, 5, 6]),
    ({"slice_length": 1, "block": 0, "num_lanes": 24}, 7, 3, [2, 4, 1, 3, 0, 2, 3, 6, 4, 5, 4, 3]),
    ({"slice_length": 1, "num_lanes": 2}, 10000, 1, [9565, 7344, 6690, 1231, 1125, 3019, 6591, 8367]),
    ({"epochs_per_shuffle": 3}, 40, 1, [23, 10, 3, 11, 20, 1, 0, 12, 22, 21, 2, 24, 13, 4]),
    ({"shuffle": False, "block": 3}, 100, 2, [6, 7, 8, 18, 19, 20, 30, 31]),
]


@pytest.mark.parametrize(("kwargs", "num_samples", "lane", "expected"), GOLDEN)
def test_the_order_of_a_leaf_since_version_5(
    kwargs: dict[str, Any], num_samples: int, lane: int, expected: list[int]
) -> None:
    """A change here breaks every saved state: raise ORDER_VERSION, and keep these values for the old one."""
    assert ORDER_VERSION == 1
    order = order_of(num_samples, **kwargs)
    drawn: list[int] = []
    while len(drawn) < len(expected):
        drawn += order.rounds_at(lane, len(drawn), 1).indices.tolist()
    assert drawn[: len(expected)] == expected


def test_the_order_of_a_leaf_since_version_5_far_out() -> None:
    order = order_of(10**9, num_lanes=24, key=99, slice_length=100, shuffle_buffer_size=100, parallel_shard_iters=16)
    part = order.rounds_at(5, 123_456_789_012, 1)
    assert part.first == 123_456_788_970
    assert part.indices[:5].tolist() == [724813354, 151784753, 552218954, 963836755, 48575254]
    assert (part.indices.size, set(part.epochs.tolist())) == (104, {2962})
