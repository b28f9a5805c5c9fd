"""`FileStoreCachePool` with megatron-energon's `method="pickle"`, and lazies for tests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from energon_bridge.cloud import file_cache
from energon_bridge.core.samples import SourceInfo
from energon_bridge.core.stores.cache import Lazy

logger = logging.getLogger(__name__)


class MockLazy(Lazy):
    """A lazy that gets its value from a function, for testing encoders."""

    def __init__(self, fname: str, get_fn: Callable[[str], Any]) -> None:
        self.fname = fname
        self._get_fn = get_fn

    def read(self) -> tuple[Any, SourceInfo | None]:
        """Make the value."""
        return self._get_fn(self.fname), None


class FileStoreCachePool(file_cache.FileStoreCachePool):
    """A cache pool that also takes `method="pickle"`: the values are the same, decoded each time they are got.

    The other arguments are those of `energon_bridge.FileStoreCachePool`.
    """

    def __init__(self, *, method: str = "raw", **kwargs: Any) -> None:
        if method == "pickle":
            logger.warning(
                "FileStoreCachePool(method='pickle') works like 'raw', which keeps files as they are, without pickle"
            )
            method = "raw"
        super().__init__(method=method, **kwargs)  # type: ignore[arg-type]  # refuses any other
