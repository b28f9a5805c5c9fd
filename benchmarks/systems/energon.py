"""megatron-energon. Runs in the environment of scripts/rival-env."""

from __future__ import annotations

import megatron.energon

from benchmarks.systems.same_api import run

if __name__ == "__main__":
    run(megatron.energon)
