"""megatron-energon. Runs in the environment of scripts/rival-env."""

from __future__ import annotations

from itertools import islice
from typing import Any

import megatron.energon

from benchmarks.systems.same_api import run

COUNTERS = ("_sample_count", "_sample_index", "_epoch_count", "sample_index")


def count(value: Any, samples: int) -> None:
    """Raise the counters in a state."""
    if isinstance(value, list | tuple):
        for inner in value:
            count(inner, samples)
    entries = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    for name, inner in entries.items():
        if name in COUNTERS and isinstance(inner, int):
            entries[name] = inner + samples
        else:
            count(inner, samples)


def state_at(loader: Any, samples: int) -> Any:
    """Return a state in which all that waits is full, with the counters of a later one."""
    for _ in islice(loader, 100):
        pass
    state = loader.save_state_rank()
    count(state, samples)
    return state


if __name__ == "__main__":
    run(megatron.energon, state_at)
