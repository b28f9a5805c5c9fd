"""Multimodal training data with one order on any number of ranks and workers, resumable anywhere.

The public names are those of `__init__.pyi`. Each is imported on first use: importing the package imports none of its
modules, so the command line starts at once and a program that only reads metadata never pays for torch.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
_homes = {name.name: node.module for node in _stub.body if isinstance(node, ast.ImportFrom) for name in node.names}

# `from energon_bridge import *` asks for each of these; the data module would bring Lightning along, for many seconds.
__all__ = ["__version__", *sorted({*_homes} - {"EnergonMultiModalDataModule"})]


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in _homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_homes[name]}"), name)
    return value


def __dir__() -> list[str]:
    """List the public names as well, whether or not they have been used."""
    return sorted({*globals(), *_homes})
