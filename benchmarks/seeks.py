"""What a leaf of a billion samples costs: `python -m benchmarks.seeks`. Only its numbers exist, nothing is read.

For slices of one sample, of 100 and as long as they can be: the time from a lane and a draw to a sample, in epochs of
which most have not been asked for before, and the memory held afterwards.
"""

from __future__ import annotations

import argparse
import random
import time
import tracemalloc

from energon_bridge.core.order.leaf_order import LeafOrder, slice_length

SAMPLES, LANES, SEEKS, EPOCHS = 10**9, 48, 2_000, 1_000


def leaf(cap: int | None) -> LeafOrder:
    """Return an order with the default buffers."""
    return LeafOrder(
        num_samples=SAMPLES,
        num_lanes=LANES,
        key=7,
        slice_length=slice_length(SAMPLES, LANES, 32, cap),
        shuffle_buffer_size=100,
        parallel_shard_iters=16,
    )


def seek(order: LeafOrder, chooser: random.Random) -> float:
    """Return the seconds of one seek to any position of any of the epochs."""
    lane, draw = chooser.randrange(LANES), chooser.randrange(EPOCHS * order.num_samples // LANES)
    start = time.perf_counter()
    found = order.rounds_at(lane, draw, 1)
    sample = found.indices[draw - found.first]
    passed = time.perf_counter() - start
    assert 0 <= sample < order.num_samples
    return passed


def main() -> None:
    """Print a line for each kind of slices."""
    for cap in (1, 100, None):
        order, chooser = leaf(cap), random.Random(1)
        first = seek(order, chooser)
        seconds = sorted(seek(order, chooser) for _ in range(SEEKS))
        tracemalloc.start()
        order = leaf(cap)
        for _ in range(50):
            seek(order, chooser)
        held, peak = (size / 1e6 for size in tracemalloc.get_traced_memory())
        tracemalloc.stop()
        print(
            f"slices of {order.slice_length:,}: first seek {first * 1e3:.2f} ms, "
            f"later ones {seconds[SEEKS // 2] * 1e3:.2f} ms (99 of 100 within {seconds[SEEKS * 99 // 100] * 1e3:.2f}, "
            f"longest {seconds[-1] * 1e3:.2f}); {held:.1f} MB held, at most {peak:.1f}"
        )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
