"""This package, with bytes fetched by fsspec (s3fs for `s3://`) and not by its own client."""

from __future__ import annotations

import energon_bridge
from benchmarks.systems.same_api import run
from energon_bridge.core.registry import registered

if __name__ == "__main__":
    stores = registered("store")
    for scheme in stores.keys() - {"any"}:
        del stores[scheme]
    run(energon_bridge)
