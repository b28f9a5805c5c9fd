"""This package."""

from __future__ import annotations

from typing import Any

import energon_bridge
from benchmarks.systems.same_api import run


def state_at(loader: Any, samples: int) -> Any:
    loader.seek(samples // 50)
    return loader.save_state_rank()


if __name__ == "__main__":
    run(energon_bridge, state_at)
