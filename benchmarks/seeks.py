"""What a leaf of a billion samples costs: `python -m benchmarks.seeks`. Only its numbers exist, nothing is read.

For slices of 100 samples and for whole shards: the time from a lane and a draw to a sample, in epochs of which most
have not been asked for before, and the memory held afterwards.
"""

from __future__ import annotations

import random
import time
import tracemalloc

import numpy as np

from energon_bridge.plan.leaf import LeafOrder

SHARDS, LANES, SEEKS, EPOCHS = 100_000, 24, 2_000, 1_000


def leaf(slice_length: int | None) -> LeafOrder:
    """Return the order of shards of 5,000 to 15,000 samples, with the default buffers."""
    counts = np.random.default_rng(1).integers(5_000, 15_001, SHARDS)
    return LeafOrder(
        shard_counts=counts,
        num_lanes=LANES,
        key=7,
        slice_length=slice_length,
        shuffle_buffer_size=100,
        parallel_shard_iters=16,
    )


def seek(order: LeafOrder, chooser: random.Random) -> float:
    """Return the seconds of one seek to any position of any of the epochs."""
    lane, draw = chooser.randrange(LANES), chooser.randrange(EPOCHS * order.num_samples // LANES)
    start = time.perf_counter()
    found = order.round_at(lane, draw)
    sample = found.indices[draw - found.first]
    passed = time.perf_counter() - start
    assert 0 <= sample < order.num_samples
    return passed


def main() -> None:
    """Print a line for each kind of slices."""
    for slice_length in (100, None):
        order, chooser = leaf(slice_length), random.Random(1)
        first = seek(order, chooser)
        seconds = sorted(seek(order, chooser) for _ in range(SEEKS))
        tracemalloc.start()
        order = leaf(slice_length)
        for _ in range(50):
            seek(order, chooser)
        held, peak = (size / 1e6 for size in tracemalloc.get_traced_memory())
        tracemalloc.stop()
        print(
            f"{f'slices of {slice_length}' if slice_length else 'whole shards'}: first seek {first * 1e3:.2f} ms, "
            f"later ones {seconds[SEEKS // 2] * 1e3:.2f} ms (99 of 100 within {seconds[SEEKS * 99 // 100] * 1e3:.2f}, "
            f"longest {seconds[-1] * 1e3:.2f}); {held:.1f} MB held, at most {peak:.1f}"
        )


if __name__ == "__main__":
    main()
