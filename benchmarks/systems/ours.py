"""This package."""

from __future__ import annotations

import energon_bridge
from benchmarks.systems.same_api import run

if __name__ == "__main__":
    run(energon_bridge)
