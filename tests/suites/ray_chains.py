"""Random chains of stops in which workers are processes, threads or actors of a Ray cluster that is disturbed.

Each stop has other ranks, workers and engines, and goes on from the states of the one before. Between batches workers
and actors are killed or stopped, and nodes are killed, added, or cut off for a while. Every microbatch must be that of
an undisturbed run without workers. Some chains in a row have the same options, and so their relay and actors.

    python tests/suites/ray_chains.py --chains 1000 --seed 7
    python tests/suites/ray_chains.py --seed 7 --first 123 --chains 1

It prints a line for each chain, and what was done to the cluster at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from engine import config_of, deliver, digest, is_masked, loaders_of, text_dataset, train_dataset
from left_behind import descendants
from ray_cluster import STORE_BYTES, actor_processes, ray_cluster

from energon_bridge import SavableDataLoader, get_savable_loader

ENCODERS = ("tensors", "skipping", "packing", "grouping", "several")
ENGINES = ("ray", "ray", "process", "thread")
MOST = 400
"""Microbatches of a chain."""
MOST_NODES = 3
GROUP = 25
"""Chains with the same options: a relay and the first actors take as long as two of them."""
HEALTH = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_timeout_ms": 2000}
"""Of Ray, which else waits 15 s before it gives up a node that is cut off."""


@cache
def expected(data: Path, encoder: str) -> list[str]:
    """Return the digests of a run that nobody disturbs."""
    return deliver(loaders_of(train_dataset(data, encoder), 1, 0), MOST).digests


class Disturbances:
    """What is done to a cluster and its actors; counted."""

    def __init__(self, cluster: Any, draw: random.Random) -> None:
        self.cluster, self.draw = cluster, draw
        self.counts = Counter[str]()

    def any(self, nodes: bool) -> None:
        """Do one thing, of those to nodes only if they are meant too."""
        acts: list[Callable[[], bool]] = [self.kill_worker, self.kill_worker, self.kill_actor, self.stop_worker]
        acts += [self.kill_node, self.add_node, self.cut_node_off, self.stop_actor] if nodes else []
        act = self.draw.choice(acts)
        with contextlib.suppress(ProcessLookupError):
            if act():
                self.counts[act.__name__] += 1

    def _signal(self, pids: list[int], number: int) -> bool:
        if pids:
            os.kill(self.draw.choice(pids), number)
        return bool(pids)

    def kill_worker(self) -> bool:
        return self._signal([pid for pids in actor_processes().values() for pid in pids], signal.SIGKILL)

    def stop_worker(self) -> bool:
        return self._signal([pid for pids in actor_processes().values() for pid in pids], signal.SIGSTOP)

    def kill_actor(self) -> bool:
        return self._signal([*actor_processes()], signal.SIGKILL)

    def stop_actor(self) -> bool:
        return self._signal([*actor_processes()], signal.SIGSTOP)

    def add_node(self) -> bool:
        if len(self.cluster.worker_nodes) < MOST_NODES:
            self.cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
            return True
        return False

    def kill_node(self) -> bool:
        nodes = sorted(self.cluster.worker_nodes, key=str)
        if len(nodes) > 1:
            self.cluster.remove_node(self.draw.choice(nodes), allow_graceful=False)
        return len(nodes) > 1

    def cut_node_off(self) -> bool:
        """Stop a node with all that runs on it, which comes back later."""
        raylets = [pid for pid, line in descendants().items() if "raylet/raylet" in line]
        if len(raylets) < 3:
            return False
        pids = [(raylet := self.draw.choice(raylets[1:])), *descendants(raylet)]
        for number, seconds in ((signal.SIGSTOP, 0.0), (signal.SIGCONT, self.draw.uniform(1, 6))):
            threading.Timer(seconds, _signal_all, (pids, number)).start()
        return True


def _signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def run_chain(data: Path, cluster: Any, seed: int, number: int, counts: Counter[str]) -> None:
    """Run a chain; raises AssertionError if a microbatch is another one."""
    draw = random.Random(f"{seed} {number}")
    disturbances = Disturbances(cluster, draw)
    encoder, states, found = draw.choice(ENCODERS), None, list[str]()
    group, with_nodes = number // GROUP, number % 8 == 0
    options = {"address": cluster.address, "num_cpus": 0.2, "silence_seconds": 2.0, "idle_seconds": 60.0}
    options |= {"placement_timeout_seconds": 120, "hedge_after_seconds": 2.0 if group % 2 else None}
    options |= {"shared_memory": group % 3 == 0}
    options |= {"min_actors": 1, "max_actors": 3, "scale_seconds": 0.3} if group % 4 == 2 else {}
    for _ in range(draw.randint(2, 5)):
        ranks, steps = draw.choice((1, 1, 2, 3)), draw.randint(4, 30)
        loaders: list[SavableDataLoader] = []
        for rank in range(ranks):
            engine = draw.choice(ENGINES)
            settings: dict[str, Any] = {"worker_engine": "ray", "ray_options": options} if engine == "ray" else {}
            workers = 0 if engine == "thread" else draw.randint(1, 3)
            config = config_of(
                ranks, workers, rank, prefetch_factor=draw.choice((1, 2, 5)), max_worker_restarts=10_000, **settings
            )
            loaders.append(
                get_savable_loader(
                    train_dataset(data, encoder), worker_config=config, watchdog_timeout_seconds=3, on_hang="replace"
                )
            )
            counts[f"{engine} loaders"] += 1
        for loader in loaders if states is not None else ():
            loader.restore_state_rank(states)
        columns: list[list[Any]] = []
        for loader in loaders:
            at = {draw.randrange(steps) for _ in range(draw.choice((0, 0, 1, 2)))}
            column = columns.append([]) or columns[-1]  # type: ignore[func-returns-value]
            for step in range(steps):
                if step in at:
                    disturbances.any(with_nodes)
                column.append(next(iter(loader)))
                column[-1] = digest(column[-1]), is_masked(column[-1])
            counts["restarts"] += int(loader.metrics()["worker_restarts"])
            counts["moves"] += int(loader.metrics().get("worker_moves", 0))
            counts["hedges"] += int(loader.metrics().get("worker_hedges", 0))
        states = [loader.save_state_rank() for loader in loaders]
        for loader in loaders:
            loader.close()
        found += [one for row in zip(*columns, strict=True) for one, masked in row if not masked]
    counts.update(disturbances.counts)
    counts["microbatches"] += len(found)
    assert found == expected(data, encoder)[: len(found)], f"chain {number} of seed {seed} differs"


def main() -> int:
    """Run the chains that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chains", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--verbose", action="store_true", help="print what the loaders warn of")
    arguments = parser.parse_args()
    logging.getLogger("energon_bridge").setLevel(logging.WARNING if arguments.verbose else logging.CRITICAL)
    logging.basicConfig(format="%(asctime)s %(message)s")
    counts, failed, began = Counter[str](), 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ray_cluster(0, 2, 2, **HEALTH) as cluster:
        data = text_dataset(Path(folder), train=[5, 9, 1, 14, 80])
        for number in range(arguments.first, arguments.first + arguments.chains):
            if time.monotonic() - began > 60 * arguments.minutes:
                break
            since = time.monotonic()
            try:
                run_chain(data, cluster, arguments.seed, number, counts)
                said = "same"
            except Exception as error:
                failed += 1
                said = f"FAILED: {error!r}"[:2000]
            counts["chains"] += 1
            print(f"chain {number}: {said} ({time.monotonic() - since:.1f} s)", flush=True)
            if not counts["chains"] % 20:
                print(dict(counts), flush=True)
    print(f"seed {arguments.seed}: {dict(counts)}, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
