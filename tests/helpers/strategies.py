"""Hypothesis strategies of the engine's tests, in one place."""

from __future__ import annotations

from hypothesis import strategies as st

from energon_bridge.core.order.leaf_order import LeafOrder

keys = st.integers(0, 2**64 - 1)
lane_counts = st.sampled_from([1, 2, 3, 5, 8, 24, 48])


@st.composite
def leaf_orders(draw: st.DrawFn) -> LeafOrder:
    """Draw a shuffled order of a small leaf: dealt singly or in blocks, or in stretches of longer slices."""
    return LeafOrder(
        num_samples=draw(st.integers(1, 400)),
        num_lanes=draw(lane_counts),
        key=draw(keys),
        slice_length=draw(st.integers(1, 60) | st.just(1)),
        shuffle_buffer_size=draw(st.sampled_from([0, 1, 2, 7, 30, 1000])),
        parallel_shard_iters=draw(st.sampled_from([1, 2, 5, 16])),
        block=draw(st.sampled_from([0, 1, 3, 32])),
    )


@st.composite
def rank_chains(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """Draw a number of lanes and a run over them as (ranks, steps) between its stops."""
    num_lanes = draw(st.sampled_from([1, 2, 6, 24, 48, 240]))
    parts = st.tuples(st.integers(1, min(64, num_lanes)), st.integers(0, 40))
    return num_lanes, draw(st.lists(parts, min_size=1, max_size=6))
