"""Data that the tests of one file only read: it is made once for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def made_once(make: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Return a fixture of the module: what `make` writes into a folder of its own."""

    @pytest.fixture(scope="module")
    def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
        path: Path = make(tmp_path_factory.mktemp("data"), *arguments, **settings)
        return path

    return made
