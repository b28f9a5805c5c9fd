"""What other rooms give to the core, by kind and name: stores by scheme, formats of datasets, decoders, ways to load.

The core imports no other room (see Layers in CONTRIBUTING.md). What a room adds is a line of `registry.toml`, and is
imported when the core first asks for it: whoever reads local shards pays for no HTTP, no tables and no video.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


@cache
def _table() -> dict[str, dict[str, str]]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def registered(kind: str) -> dict[str, str]:
    """Return what there is of a kind: `module`, or `module:attribute`, by name."""
    return _table()[kind]


@cache
def load(kind: str, name: str) -> Any:
    """Import what has this kind and name."""
    place, _, attribute = registered(kind)[name].partition(":")
    module = import_module(place)
    return getattr(module, attribute) if attribute else module
