"""The order of a leaf: every sample once an epoch, wherever the lanes are cut; and the very order, by golden values."""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from strategies import keys, lane_counts, leaf_orders, shard_layouts

from energon_bridge.plan.leaf import ORDER_VERSION, LeafOrder
from energon_bridge.rng import Permutation, below, draws, fold, shuffled

EPOCHS = 3


def order_of(counts: list[int], **kwargs: Any) -> LeafOrder:
    settings = {"num_lanes": 4, "key": 1, "slice_length": 10, "shuffle_buffer_size": 8, "parallel_shard_iters": 2}
    return LeafOrder(shard_counts=np.array(counts, dtype=np.int64), **(settings | kwargs))


def epochs_of(order: LeafOrder, lane: int, epochs: int = EPOCHS) -> list[list[int]]:
    """Return the indices that a lane draws in each of the first epochs, in its order."""
    found: list[list[int]] = [[] for _ in range(epochs)]
    draw = 0
    while order.epoch_of(lane, draw) < epochs:
        part = order.round_at(lane, draw)
        assert part.first == draw
        for index, epoch in zip(part.indices.tolist(), part.epochs.tolist(), strict=True):
            assert order.epoch_of(lane, draw) == epoch
            if epoch < epochs:
                found[epoch].append(index)
            draw += 1
    return found


def by_the_book(order: LeafOrder, lane: int, epoch: int) -> list[int]:
    """Return what a lane draws in an epoch, with every table of the rules written out."""
    n, lanes = order.num_samples, order.num_lanes
    if order.slice_length is None:
        edges = np.cumsum([0, *order.shard_counts]).tolist()
        slices = [list(range(a, b)) for a, b in itertools.pairwise(edges) if a < b]
        places = shards_by_the_book(len(slices), fold(order.key, 1, epoch))
        length = n / len(slices)
    else:
        length = order.slice_length
        slices = [list(range(a, min(n, a + length))) for a in range(0, n, length)]
        permutation = Permutation(len(slices), fold(order.key, 1, epoch))
        places = [permutation.at(place) for place in range(len(slices))]
    line = [(slot, index) for slot, number in enumerate(places) for index in slices[number]]
    share = [((epoch + 1) * n + p) // lanes - (epoch * n + p) // lanes for p in range(lanes)]
    place = (lane + order.key) % lanes
    start = sum(share[:place])
    pieces = [
        [index for _, index in piece]
        for _, piece in itertools.groupby(line[start : start + share[place]], key=lambda entry: entry[0])
    ]
    per_window = order.parallel_shard_iters + -(-2 * order.shuffle_buffer_size // length)
    windows = int(max(1, len(pieces) // per_window))
    drawn: list[int] = []
    for number in range(windows if pieces else 0):
        window = pieces[number * len(pieces) // windows : (number + 1) * len(pieces) // windows]
        rounds = max(1, sum(map(len, window)) // max(order.shuffle_buffer_size, len(window)))
        key = fold(order.key, 2, epoch, place, number)
        phases = below(key, len(window), rounds).tolist()
        for t in range(rounds):
            taken: list[int] = []
            for piece, phase in zip(window, phases, strict=True):
                taken += piece[(t * len(piece) + phase) // rounds : ((t + 1) * len(piece) + phase) // rounds]
            drawn += [taken[i] for i in shuffled(fold(key, 3, t), len(taken)).tolist()]
    return drawn


def shards_by_the_book(shards: int, key: int) -> list[int]:
    """Return the order of whole shards in an epoch, by hand where they are dealt into groups."""
    if shards < 512:
        return shuffled(key, shards).tolist()
    groups: list[list[int]] = [[] for _ in range(2 ** (shards.bit_length() - 9))]
    row_keys = draws(key, -(-shards // len(groups))).tolist()
    for shard in range(shards):
        row, number = divmod(shard, len(groups))
        step, turn = row_keys[row] >> 48 | 1, row_keys[row] % 2**16
        groups[(number * step + turn) % len(groups)].append(shard)
    return [group[i] for number, group in enumerate(groups) for i in shuffled(fold(key, number), len(group)).tolist()]


@given(leaf_orders())
def test_every_epoch_covers_every_sample_once(order: LeafOrder) -> None:
    lanes = [epochs_of(order, lane) for lane in range(order.num_lanes)]
    for epoch in range(EPOCHS):
        assert sorted(itertools.chain(*(lane[epoch] for lane in lanes))) == list(range(order.num_samples))
        sizes = [len(lane[epoch]) for lane in lanes]
        assert max(sizes) - min(sizes) <= 1
        so_far = [sum(map(len, lane[: epoch + 1])) for lane in lanes]
        assert max(so_far) - min(so_far) <= 1


@pytest.mark.parametrize("num_lanes", [1, 2, 5, 24])
@pytest.mark.parametrize("counts", [[1], [0, 1, 0], [2], [3, 4], [23], [24], [25], [1] * 30])
@pytest.mark.parametrize("slice_length", [None, 1, 3, 100])
def test_small_leaves_are_covered_too(counts: list[int], num_lanes: int, slice_length: int | None) -> None:
    order = order_of(counts, num_lanes=num_lanes, slice_length=slice_length)
    epochs = 2 * num_lanes + 1
    lanes = [epochs_of(order, lane, epochs) for lane in range(num_lanes)]
    for epoch in range(epochs):
        assert sorted(itertools.chain(*(lane[epoch] for lane in lanes))) == list(range(sum(counts)))
    # Where a leaf has fewer samples than there are lanes, every lane still gets its turn.
    assert all(any(lane) for lane in lanes)


@given(leaf_orders())
def test_the_order_is_the_one_of_the_rules(order: LeafOrder) -> None:
    for lane in range(min(order.num_lanes, 4)):
        expected = [by_the_book(order, lane, epoch) for epoch in range(EPOCHS)]
        assert epochs_of(order, lane) == expected


@pytest.mark.parametrize("shards", [511, 512, 1023, 1024, 2500])
@pytest.mark.parametrize(("num_lanes", "buffer"), [(1, 0), (3, 7), (24, 2000)])
def test_many_whole_shards_are_dealt_by_the_rules(shards: int, num_lanes: int, buffer: int) -> None:
    counts = [(number * 7) % 5 for number in range(shards * 5 // 4)]  # some of which are empty
    order = order_of(counts, num_lanes=num_lanes, key=shards, slice_length=None, shuffle_buffer_size=buffer)
    lanes = [epochs_of(order, lane, 2) for lane in range(num_lanes)]
    for epoch in range(2):
        assert [lane[epoch] for lane in lanes] == [by_the_book(order, lane, epoch) for lane in range(num_lanes)]
        assert sorted(itertools.chain(*(lane[epoch] for lane in lanes))) == list(range(sum(counts)))
    far = lanes[-1][1][-1]
    assert replace(order).round_at(num_lanes - 1, len(lanes[-1][0]) + len(lanes[-1][1]) - 1).indices.tolist()[-1] == far


def test_epochs_keep_no_shards_together() -> None:
    """Shards near each other in one epoch are near each other in the next as often as chance has it."""
    shards, near = 6000, 20
    order = order_of([1] * shards, num_lanes=1, slice_length=None, shuffle_buffer_size=0, parallel_shard_iters=1)
    epochs = np.array(epochs_of(order, 0, 4))
    places = np.argsort(epochs, axis=1)
    together = 0
    for epoch, later in itertools.permutations(range(4), 2):
        follow = places[later][epochs[epoch]]
        together += sum(int((np.abs(follow[d:] - follow[:-d]) <= near).sum()) for d in range(1, near + 1))
    expected = 12 * near * 2 * near
    assert abs(together / expected - 1) < 0.05
    # Any shard may come first, and the dataset's own neighbours are no neighbours.
    assert len(set(epochs[:, 0].tolist())) == 4
    assert int((np.abs(np.diff(places, axis=1)) == 1).sum()) <= 4
    # Every part of the dataset is spread over the epoch: of 600 shards in a row every tenth of an epoch has about 60.
    spread = [np.histogram2d(place, np.arange(shards), bins=10)[0] for place in places]
    assert all(each.min() > 40 and each.max() < 80 for each in spread)


@given(leaf_orders(), st.integers(0, 10**6), st.data())
def test_a_round_is_the_same_from_any_of_its_draws(order: LeafOrder, draw: int, data: st.DataObject) -> None:
    lane = data.draw(st.integers(0, order.num_lanes - 1))
    part = order.round_at(lane, draw)
    size = part.indices.size
    assert part.first <= draw < part.first + size
    for other in {part.first, part.first + size - 1, part.first + size // 2}:
        fresh = replace(order).round_at(lane, other)  # a copy has cached nothing
        assert fresh.first == part.first
        assert fresh.indices.tolist() == part.indices.tolist()
        assert fresh.epochs.tolist() == part.epochs.tolist()


@given(shard_layouts(), lane_counts, keys, st.integers(1, 7))
def test_without_shuffling_the_lanes_give_the_datasets_own_order(
    counts: list[int], num_lanes: int, key: int, block: int
) -> None:
    order = order_of(counts, num_lanes=num_lanes, key=key, block=block, shuffle=False)
    n = order.num_samples
    for m in range(3 * num_lanes):
        lane, first = m % num_lanes, m // num_lanes * block
        part = order.round_at(lane, first + block - 1)
        assert part.first == first
        assert part.indices.tolist() == [(m * block + i) % n for i in range(block)]
        assert part.epochs.tolist() == [(m * block + i) // n for i in range(block)]
        assert [order.epoch_of(lane, first + i) for i in range(block)] == part.epochs.tolist()


@pytest.mark.parametrize(("num_lanes", "most"), [(1, 0.06), (8, 0.008)])
def test_batches_mix_slices(num_lanes: int, most: float) -> None:
    """Share of the pairs of a batch of 256 that come from one slice of 100, with a buffer of 100."""
    batch, batches, n = 256, 20, 200_000
    order = order_of(
        [1000] * (n // 1000),
        num_lanes=num_lanes,
        slice_length=100,
        shuffle_buffer_size=100,
        parallel_shard_iters=16,
    )
    columns = []
    for lane in range(num_lanes):
        drawn: list[int] = []
        while len(drawn) < batches * batch // num_lanes:
            drawn += order.round_at(lane, len(drawn)).indices.tolist()
        slices = np.array(drawn[: batches * batch // num_lanes]) // 100
        columns.append(slices.reshape(batches, -1))
    same = 0
    for row in np.concatenate(columns, axis=1):
        _, counts = np.unique(row, return_counts=True)
        same += int((counts * (counts - 1)).sum())
    assert 0 < same / (batches * batch * (batch - 1)) <= most


def test_epochs_and_keys_change_the_order_and_nothing_else_does() -> None:
    order = order_of([30, 50, 20])
    first, second, third = epochs_of(order, 0)
    assert first != second != third != first
    assert epochs_of(order_of([30, 50, 20], key=2), 0) != [first, second, third]
    # Where shards end does not matter, nor whether other lanes have been asked before.
    assert epochs_of(order_of([100]), 0) == [first, second, third]
    order = order_of([30, 50, 20])
    for lane in (3, 1, 2):
        epochs_of(order, lane)
    assert epochs_of(order, 0) == [first, second, third]


def test_slices_are_read_from_front_to_back() -> None:
    """Every round takes one run of consecutive samples of a slice, and the runs of a slice follow each other."""
    order = order_of([997], num_lanes=3, slice_length=50, shuffle_buffer_size=40, parallel_shard_iters=4)
    for lane in range(3):
        reached: dict[tuple[int, int], int] = {}
        draw = 0
        while order.epoch_of(lane, draw) < 2:
            part = order.round_at(lane, draw)
            for number, run in itertools.groupby(sorted(part.indices.tolist()), key=lambda index: index // 50):
                indices = list(run)
                assert indices == list(range(indices[0], indices[-1] + 1))
                before = reached.get((int(part.epochs[0]), number))
                assert before is None or before + 1 == indices[0]
                reached[int(part.epochs[0]), number] = indices[-1]
            draw += part.indices.size


@settings(max_examples=20)
@given(st.integers(0, 23), st.integers(0, 10**13))
def test_a_leaf_of_a_billion_samples_is_sought_in_little_memory(lane: int, draw: int) -> None:
    tracemalloc.start()
    order = order_of(
        [10_000] * 100_000, num_lanes=24, slice_length=100, shuffle_buffer_size=100, parallel_shard_iters=16
    )
    part = order.round_at(lane, draw)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert part.first <= draw < part.first + part.indices.size
    assert peak < 32 << 20


GOLDEN: list[tuple[dict[str, Any], list[int], int, list[int]]] = [
    ({}, [30, 50, 20], 0, [10, 12, 51, 50, 11, 95, 96, 13, 52, 53, 15, 56, 55, 14, 16, 97, 98, 54, 99, 19, 17, 57]),
    ({}, [30, 50, 20], 3, [80, 81, 30, 82, 32, 90, 31, 91, 34, 33, 83, 92, 84, 35, 86, 85, 93, 36, 89, 87, 38, 94]),
    ({"slice_length": None}, [30, 50, 20], 0, [37, 39, 42, 41, 38, 35, 36, 40, 43, 47, 51, 50, 46, 48, 44, 45, 49]),
    ({"num_lanes": 1, "key": 2**63 + 5}, [100], 0, [80, 40, 81, 20, 11, 30, 10, 41, 12, 22, 42, 31, 32, 82, 21, 13]),
    ({"num_lanes": 24}, [7], 3, [1, 4, 2, 4, 3, 0, 4, 1, 4, 2, 4, 3]),
    ({"shuffle": False, "block": 3}, [30, 50, 20], 2, [6, 7, 8, 18, 19, 20, 30, 31]),
]


@pytest.mark.parametrize(("kwargs", "counts", "lane", "expected"), GOLDEN)
def test_the_order_of_a_leaf_since_version_1(
    kwargs: dict[str, Any], counts: list[int], lane: int, expected: list[int]
) -> None:
    """A change here breaks every saved state: raise ORDER_VERSION, and keep these values for the old one."""
    assert ORDER_VERSION == 4
    order = order_of(counts, **kwargs)
    drawn: list[int] = []
    while len(drawn) < len(expected):
        drawn += order.round_at(lane, len(drawn)).indices.tolist()
    assert drawn[: len(expected)] == expected


def test_the_order_of_a_leaf_since_version_1_far_out() -> None:
    order = order_of(
        [10_000] * 100_000, num_lanes=24, key=99, slice_length=100, shuffle_buffer_size=100, parallel_shard_iters=16
    )
    part = order.round_at(5, 123_456_789_012)
    assert part.first == 123_456_788_931
    assert part.indices[:5].tolist() == [704489903, 567325002, 623650704, 202530402, 977768605]
    assert (part.indices.size, set(part.epochs.tolist())) == (100, {2962})
