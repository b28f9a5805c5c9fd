"""What the engine is working on while it calls a hook, for hooks that ask.

A context variable, so that encoders that wrap one another see the same, and lanes in threads of their own each theirs.
"""

from __future__ import annotations

from contextvars import ContextVar

from energon_bridge.errors import ConfigurationError
from energon_bridge.rng import fold
from energon_bridge.stores import CachePool, NoCachePool

SAMPLE: ContextVar[tuple[int, ...]] = ContextVar("energon_bridge_sample")
"""Keys of the draw whose sample a hook has."""
BATCH: ContextVar[int] = ContextVar("energon_bridge_batch")
"""Number of the microbatch in the global sequence."""
DELIVERING: ContextVar[bool] = ContextVar("energon_bridge_delivering", default=False)
"""Whether samples are about to be delivered, after which nothing stays deferred."""
CACHE: ContextVar[CachePool] = ContextVar("energon_bridge_cache")
"""The cache pool of the loader."""


def current_sample_index() -> int:
    """Return a number of 63 bits that stands for the draw whose sample a hook has, the same whenever it is encoded.

    Raises:
        ConfigurationError: No hook that has a sample is running.
    """
    keys = SAMPLE.get(())
    if not keys:
        raise ConfigurationError("current_sample_index can only be asked for inside a hook that has one sample")
    return fold(*keys) >> 1


def current_batch_index() -> int:
    """Return the number of the microbatch that `batch` or `encode_batch` makes, counted over the whole run.

    Raises:
        ConfigurationError: Neither of them is running.
    """
    number = BATCH.get(-1)
    if number < 0:
        raise ConfigurationError("current_batch_index can only be asked for inside batch and encode_batch")
    return number


def current_cache() -> CachePool:
    """Return the cache pool of the loader whose hook is running; outside of hooks, one that keeps nothing."""
    return CACHE.get(None) or NoCachePool()
