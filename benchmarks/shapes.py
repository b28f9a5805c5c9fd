"""Buckets of one shape, by arithmetic alone: proportion, epochs, mixing, and what planning costs.

    python -m benchmarks.shapes

200,000 images whose ratios of sides are spread around 1 (as logarithms, normally with 0.35), sorted into 100 classes,
in the 13 tiers of 1024 x 1024 pixels; 64 microbatches of a global batch, of as many rows as fit into 8 x 1024 x 1024
pixels. Mixing is the number of classes in a microbatch, divided by what as many independent samples of the bucket have.
"""

from __future__ import annotations

import argparse
import time
from fractions import Fraction

import numpy as np

from energon_bridge import AspectTiers
from energon_bridge.core.order.choose import BlendPosition, Chooser, plain_rounds
from energon_bridge.core.order.leaf_order import LeafOrder, Round, slice_length
from energon_bridge.core.stream.leaf import Leaf
from energon_bridge.tools.columns.buckets import BucketBlend

SAMPLES, CLASSES, LANES, LAPS = 200_000, 100, 64, 1200


def main() -> None:
    rng = np.random.default_rng(0)
    tiers = AspectTiers(area=1024 * 1024)
    ratios = np.exp(rng.normal(0, 0.35, SAMPLES))
    sizes = [tiers.size_of(round(1000 * ratio), 1000) for ratio in ratios.tolist()]
    names = sorted(set(sizes))
    bucket_of = np.array([names.index(size) for size in sizes])
    kept = [np.flatnonzero(bucket_of == bucket) for bucket in range(len(names))]
    rows = tuple(8 * 1024 * 1024 // (width * height) for width, height in names)
    leaves = []
    for bucket, samples in enumerate(kept):
        length = slice_length(samples.size, LANES, rows[bucket], None)
        order = LeafOrder(
            num_samples=samples.size,
            num_lanes=LANES,
            key=100 + bucket,
            slice_length=length,
            shuffle_buffer_size=100,
            parallel_shard_iters=16,
            block=rows[bucket],
            kept=samples,
        )
        leaves.append(Leaf(identity=str(bucket), dataset=None, order=order))  # type: ignore[arg-type]
    weights = tuple(Fraction(samples.size, SAMPLES) for samples in kept)
    of_leaf = tuple(range(len(names)))
    blend = BucketBlend(
        names=tuple(map(str, names)),
        rows=rows,
        takes=tuple(map(Fraction, rows)),
        of_leaf=of_leaf,
        weights=weights,
        num_lanes=LANES,
        key=1,
    )
    start = time.perf_counter()
    laps = [blend.bucket(lap) for lap in range(LAPS)]
    choosing = (time.perf_counter() - start) / LAPS
    shares = np.array([float(weight) / row for weight, row in zip(weights, rows, strict=True)])
    shares /= shares.sum()
    done = np.cumsum(np.array(laps)[:, None] == np.arange(len(names)), axis=0)
    off = np.abs(done - shares * np.arange(1, LAPS + 1)[:, None]).max()
    round_cache, seen, distinct, ideal = plain_rounds(leaves), np.zeros(SAMPLES, dtype=np.int64), 0.0, 0.0
    choosers: dict[tuple[int, int], Chooser[Round]] = {}
    start, count = time.perf_counter(), 0
    for bucket in laps:
        shares_of = np.bincount(kept[bucket] * CLASSES // SAMPLES, minlength=CLASSES) / kept[bucket].size
        for lane in range(LANES):
            chooser = choosers.get((lane, bucket))
            if chooser is None:
                chooser = Chooser(round_cache, blend.blends[bucket], lane, BlendPosition(0, [0] * len(names)))
                choosers[lane, bucket] = chooser
            members = chooser.picks(rows[bucket]).members[:, 1]
            np.add.at(seen, members, 1)
            distinct += len(set((members * CLASSES // SAMPLES).tolist()))
            ideal += float((1 - (1 - shares_of) ** rows[bucket]).sum())
            count += 1
    planning = (time.perf_counter() - start) / count
    spread = max(int(np.ptp(seen[samples])) for samples in kept)
    epochs = seen.sum() / SAMPLES
    few, many = min(map(len, kept)), max(map(len, kept))
    print(f"{len(names)} buckets of {few} to {many} samples, {min(rows)} to {max(rows)} rows")
    print(f"{LAPS} global batches, {epochs:.2f} epochs: a bucket is at most {off:.2f} global batches off its share")
    print(f"a sample of a bucket comes at most {spread} times more often than another of it")
    print(f"mixing {distinct / ideal:.3f}; bucket of a global batch {1e6 * choosing:.0f} us, ", end="")
    print(f"samples of a microbatch {1e6 * planning:.0f} us")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
