"""Thousands of ranks fed by thousands of data nodes, simulated: waits, messages, bytes by link, and lost nodes.

Who makes what and when it is due is the product's own arithmetic (`topology.lane_units`), and so is the node that each
worker prefers (`ray_relay.home_of`). Simulated are the times: making a microbatch takes a lognormal time, sending it
takes its bytes over a share of the node's network, and a worker makes as many ahead as it has credits. All ranks take a
step together, when each has its microbatch. In the middle some nodes are lost: their workers are noticed after some
seconds, begin anew elsewhere, and make again what they had ahead.

    python -m benchmarks.ray_scale [--ranks 4096] [--nodes 2000] [--lanes 12288] [--workers 3] [--ahead 2] [--steps 300]
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter

import numpy as np

from energon_bridge.cloud.ray.ray_relay import home_of
from energon_bridge.core.order.topology import Ownership, lane_units

STEP_SECONDS, MAKE_SECONDS, SPREAD = 1.0, 1.5, 0.5
"""A step of training; the mean time of making a microbatch, and the sigma of its logarithm."""
BATCH_BYTES, NODE_BYTES_PER_SECOND = 20e6, 1.25e9
PLACES = 8
"""Actors that a node has room for."""
_ARGUMENTS = {"ranks": 4096, "nodes": 2000, "lanes": 12288, "workers": 3, "steps": 300, "ahead": 2}
NOTICED_SECONDS, STARTED_SECONDS = 15.0, 5.0
LOST = 0.05


def homes(ranks: int, workers: int, nodes: int) -> np.ndarray:
    """Return the node of each worker: the one that it prefers while that has room, else the emptiest one."""
    names = {f"node-{number}": number for number in range(nodes)}
    load, found = np.zeros(nodes, int), np.empty((ranks, workers), int)
    for rank, worker in itertools.product(range(ranks), range(workers)):
        chosen = names[home_of([f"rank {rank}, worker {worker} of {workers}"], names)]
        chosen = chosen if load[chosen] < PLACES else int(load.argmin())
        load[chosen] += 1
        found[rank, worker] = chosen
    return found


def main() -> None:
    """Simulate, and print what happens."""
    parser = argparse.ArgumentParser(description="Ranks and data nodes, simulated")
    for name, default in _ARGUMENTS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    draw = np.random.default_rng(0)
    ownership = Ownership(a.lanes, a.ranks, 0)
    due = np.array(
        [[w for _, w in itertools.islice(lane_units(ownership, r, 0, a.workers), a.steps)] for r in range(a.ranks)]
    )
    node = homes(a.ranks, a.workers, a.nodes)
    load = np.bincount(node.ravel(), minlength=a.nodes)
    print(f"workers of a node: mean {load.mean():.1f}, most {load.max()}, none on {np.sum(load == 0)} nodes")
    sending = BATCH_BYTES / (NODE_BYTES_PER_SECOND / np.maximum(load[node], 1))
    everyone = np.arange(a.ranks)
    # Of each worker: when it is free; when its microbatches that are not taken arrive, the next first.
    free = np.zeros((a.ranks, a.workers))
    arrives = np.zeros((a.ranks, a.workers, a.ahead))
    scale = MAKE_SECONDS / np.exp(SPREAD**2 / 2)

    def make(rank: np.ndarray, worker: np.ndarray, may_begin: np.ndarray | float) -> np.ndarray:
        took = scale * np.exp(draw.normal(0, SPREAD, len(rank)))
        free[rank, worker] = np.maximum(free[rank, worker], may_begin) + took
        return np.asarray(free[rank, worker] + sending[rank, worker])

    every = np.divmod(np.arange(a.ranks * a.workers), a.workers)
    for place in range(a.ahead):
        arrives[every[0], every[1], place] = make(*every, 0.0)
    now, lost_at, ends, waits = 0.0, a.steps // 2, [], []
    sent = Counter[int]()
    for step in range(a.steps):
        worker = due[:, step]
        if step == lost_at:
            gone = np.isin(node, draw.choice(a.nodes, int(LOST * a.nodes), replace=False))
            rank, its = np.nonzero(gone)
            free[rank, its] = now + NOTICED_SECONDS + STARTED_SECONDS
            for place in range(a.ahead):
                arrives[rank, its, place] = make(rank, its, 0.0)
            print(f"{len(rank)} of {node.size} workers are lost at step {step}")
        there = arrives[everyone, worker, 0]
        waits.append(np.maximum(0.0, there - now))
        begins = max(now, float(there.max()))
        arrives[everyone, worker, :-1] = arrives[everyone, worker, 1:]
        arrives[everyone, worker, -1] = make(everyone, worker, begins)
        sent.update(node[everyone, worker].tolist())
        now = begins + STEP_SECONDS
        ends.append(now)
    took = np.diff(ends)
    usual = np.concatenate([took[20 : lost_at - 1], took[lost_at + 20 :]])
    print(f"a step: {usual.mean():.3f} s, of which training {STEP_SECONDS} s; the slowest {usual.max():.2f} s")
    print(f"a rank waits {np.mean(waits[20:lost_at]):.4f} s a step for its own microbatch")
    after = took[lost_at - 1 : lost_at + 20] - usual.mean()
    print(f"the loss of {LOST:.0%} of the nodes: {after.sum():.1f} s in all, {after.max():.1f} s in one step")
    busiest = max(sent.values()) / now
    print(f"microbatches and credits: {a.ranks / usual.mean():,.0f} a second each, {busiest:.1f} of the busiest node")
    print(
        f"bytes: {BATCH_BYTES / usual.mean() / 1e6:,.0f} MB/s into a rank, {busiest * BATCH_BYTES / 1e6:,.0f} MB/s out "
        f"of the busiest node, {a.ranks * BATCH_BYTES / usual.mean() / 1e9:,.1f} GB/s in all"
    )


if __name__ == "__main__":
    main()
