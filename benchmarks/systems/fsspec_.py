"""This package, with bytes fetched by fsspec (s3fs for `s3://`) and not by its own client."""

from __future__ import annotations

import energon_bridge
from benchmarks.systems.same_api import run
from energon_bridge import storage

if __name__ == "__main__":
    storage._OVER_HTTP.clear()
    run(energon_bridge)
