"""Ray clusters of several nodes on this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from left_behind import descendants

STORE_BYTES = 200 << 20


@contextmanager
def ray_cluster(*cpus: int, own: Sequence[dict[str, Any]] = (), **system: Any) -> Iterator[Any]:
    """Run a cluster whose nodes have so many cores, as they say; the first is the head, with settings of the system.

    `own` are more settings of each node.
    """
    pytest.importorskip("ray", reason="ray is not installed (extra ray)")
    from ray.cluster_utils import Cluster

    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - of 15: beside other tests, actors would hardly run
    nodes = Cluster()
    try:
        lean = {"include_dashboard": False, "no_monitor": True, "include_log_monitor": False}
        for number, more in zip_longest(cpus, own, fillvalue={}):
            head = {} if nodes.head_node else {"_system_config": system}
            nodes.add_node(num_cpus=number, object_store_memory=STORE_BYTES, **lean, **head, **more)
        yield nodes
    finally:
        for pid in descendants():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)  # what a test has stopped could not end
        nodes.global_state.disconnect()  # it has a thread: a fork that collected it later would crash
        nodes.shutdown()


def actor_processes() -> dict[int, list[int]]:
    """Return the actors of this machine that have been given a worker, each with its workers, which are forks of it."""
    found: dict[int, list[int]] = {pid: [] for pid, line in descendants().items() if "WorkerActor" in line}
    for pid in list(found):
        with suppress(OSError):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent in found:
                found[parent].append(pid)
                del found[pid]
    return {pid: workers for pid, workers in found.items() if workers}
