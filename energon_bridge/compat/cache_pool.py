"""`FileStoreCachePool` with megatron-energon's `method="pickle"`, which keeps decoded files there."""

from __future__ import annotations

import logging
from typing import Any

from energon_bridge import stores

logger = logging.getLogger(__name__)


class FileStoreCachePool(stores.FileStoreCachePool):
    """A cache pool that also takes `method="pickle"`: the values are the same, decoded each time they are got.

    The other arguments are those of `energon_bridge.FileStoreCachePool`.
    """

    def __init__(self, *, method: str = "raw", **kwargs: Any) -> None:
        if method == "pickle":
            logger.warning(
                "FileStoreCachePool(method='pickle') keeps files as they are, as 'raw' does: no pickles here"
            )
            method = "raw"
        super().__init__(method=method, **kwargs)  # type: ignore[arg-type]  # refuses any other
