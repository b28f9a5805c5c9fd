"""A long run on a Ray cluster whose actors are killed a hundred times, and its nodes twenty times.

Every batch must be that of a local run, and come in time; nothing may grow, or be left behind.

    python tests/suites/ray_faults.py
    python tests/suites/ray_faults.py --batches 300 --actors 2 --nodes 1

It prints the longest waits, and what there was after so many batches.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import torch
from engine import Numbers, TensorEncoder, digest, text_dataset
from left_behind import descendants
from ray_cluster import STORE_BYTES, actor_processes, ray_cluster
from workers import loader_of, wait_until

SILENCE_SECONDS = 3.0
"""The deadline of an actor that does not answer."""
MOST_SECONDS = 5.0 + SILENCE_SECONDS
_STORE = "object_store_memory"
LOOKS = 20
"""How often a run is looked at."""


class MiddleEncoder(TensorEncoder):
    """Samples of 32 kB: 20,000 batches are six times what the object stores of a cluster hold."""

    def encode_sample(self, sample: Any) -> Any:
        noise = torch.rand(1 << 13)
        return Numbers.derive_from(sample, text=sample.text, number=torch.tensor([int(sample.__key__)]), noise=noise)


class Watched:
    """A cluster, what is killed of it, and what there is of a loader on it."""

    def __init__(self, cluster: Any, draw: random.Random) -> None:
        self.cluster, self.draw = cluster, draw

    def kill_actor(self) -> int:
        """Kill an actor; return the number of workers that it had."""
        actors = actor_processes()
        actor = self.draw.choice(sorted(actors))
        os.kill(actor, signal.SIGKILL)
        return len(actors[actor])

    def kill_node(self) -> int:
        """Kill a node that has actors; return the number of workers that it had."""
        actors = actor_processes()
        there = {node: descendants(raylet_of(node)).keys() & actors for node in self.cluster.worker_nodes}
        node = self.draw.choice(sorted((node for node, pids in there.items() if pids), key=raylet_of))
        for pid in (raylet_of(node), *descendants(raylet_of(node))):
            os.kill(pid, signal.SIGKILL)
        self.cluster.remove_node(node, allow_graceful=False)
        return sum(len(actors[pid]) for pid in there[node])

    def stored(self) -> int:
        """Return the bytes in the object stores, as their nodes tell the head."""
        state = self.cluster.global_state
        total, free = state.total_resources_per_node(), state.available_resources_per_node()
        return int(sum(total[node][_STORE] - free[node][_STORE] for node in total.keys() & free))

    def actors(self) -> int:
        """Return the number of actors that have not ended, as the head knows."""
        return sum(actor["State"] != "DEAD" for actor in self.cluster.global_state.actor_table(None).values())

    def look(self) -> dict[str, int]:
        """Return what there is of the object stores, the actors and the relay."""
        (relay,) = (pid for pid, line in descendants().items() if "ray_relay" in line)
        resident = int(Path(f"/proc/{relay}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20
        files = len(os.listdir(f"/proc/{relay}/fd")) + len(os.listdir("/proc/self/fd"))
        return {"bytes": self.stored(), "actors": self.actors(), "MiB of the relay": resident, "files": files}


def raylet_of(node: Any) -> int:
    """Return the process of a node, from which all others of it come."""
    pid: int = node.all_processes["raylet"][0].process.pid
    return pid


def run(folder: Path, watched: Watched, batches: int, kinds: list[str]) -> None:
    """Run through the faults; raises AssertionError if anything is not as it must be."""
    data = text_dataset(folder, train=[5, 9, 1, 14, 80])
    options = {"address": watched.cluster.address, "num_cpus": 0.5, "strategy": "spread", "shared_memory": False}
    options |= {"placement_timeout_seconds": 200, "silence_seconds": SILENCE_SECONDS, "idle_seconds": 2.0}
    settings: dict[str, Any] = {"worker_engine": "ray", "ray_options": options, "max_worker_restarts": 10_000}
    acts = {"an actor killed": watched.kill_actor, "a node killed": watched.kill_node}
    waits, looks, done, lost = dict.fromkeys(["begun", *acts], 0.0), list[dict[str, int]](), 0, 0
    kind, since = "begun", time.monotonic()
    with (
        closing(loader_of(data, 2, MiddleEncoder(), **settings)) as loader,
        closing(loader_of(data, 0, MiddleEncoder())) as local,
    ):
        both = zip(loader, local, strict=True)
        for number in itertools.count(1):
            batch, same = next(both)
            waits[kind] = max(waits[kind], time.monotonic() - since)
            assert digest(batch) == digest(same), f"batch {number} differs"
            if not number % (batches // LOOKS):
                looks.append(watched.look())
                print(f"{number} batches, {done} faults: {looks[-1]}; longest waits: {waits}", flush=True)
            counted = loader.metrics()
            recovered = (
                counted["worker_restarts"] >= lost
                and not counted["local_workers"]
                and not loader._delivery.pool._rivals
            )
            if recovered and done == len(kinds) and number >= batches:
                break
            if not recovered:
                if len(watched.cluster.worker_nodes) < 2 and counted["worker_restarts"] >= lost:
                    watched.cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
                time.sleep(0.05)  # a step of training
            since = time.monotonic()
            if recovered and done < len(kinds) * number / batches:
                kind = kinds[done]
                lost += acts[kind]()
                done += 1
        looks.append(watched.look())
    names = ("worker_restarts", "worker_moves", "local_workers", "errors")
    print(f"{lost} workers lost: { {name: int(counted.get(name, 0)) for name in names} }; longest waits: {waits}")
    assert max(waits[kind] for kind in acts) < MOST_SECONDS
    assert wait_until(lambda: not actor_processes() and not watched.actors(), 20), "actors are left"
    assert wait_until(lambda: "ray_relay" not in str(descendants()), 20), "the relay is left"
    assert wait_until(lambda: not watched.stored(), 20), "objects are left"
    assert max(look["bytes"] for look in looks) < STORE_BYTES / 10
    assert looks[-1]["files"] <= looks[0]["files"] + 20  # fewer than there are faults
    print("as undisturbed; nothing left")


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=20_000)
    parser.add_argument("--actors", type=int, default=100)
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=42)
    arguments = parser.parse_args()
    logging.getLogger("energon_bridge").setLevel(logging.ERROR)
    draw = random.Random(arguments.seed)
    kinds = ["an actor killed"] * arguments.actors + ["a node killed"] * arguments.nodes
    draw.shuffle(kinds)
    with tempfile.TemporaryDirectory() as folder, ray_cluster(0, 2, 2) as cluster:
        run(Path(folder), Watched(cluster, draw), arguments.batches, kinds)


if __name__ == "__main__":
    main()
