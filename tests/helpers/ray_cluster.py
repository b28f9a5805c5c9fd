"""Ray clusters of several nodes on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

STORE_BYTES = 200 << 20


@contextmanager
def ray_cluster(*cpus: int) -> Iterator[Any]:
    """Run a cluster whose nodes have so many cores, as they say; the first is the head."""
    pytest.importorskip("ray", reason="ray is not installed (extra ray)")
    from ray.cluster_utils import Cluster

    nodes = Cluster()
    try:
        for number in cpus:
            nodes.add_node(num_cpus=number, object_store_memory=STORE_BYTES, include_dashboard=False)
        yield nodes
    finally:
        nodes.shutdown()
