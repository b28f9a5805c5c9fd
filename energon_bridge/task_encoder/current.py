"""What the engine is working on while it calls a hook, for hooks that ask.

A context variable, so that encoders that wrap one another see the same, and lanes in threads of their own each theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
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
LAST: ContextVar[bool] = ContextVar("energon_bridge_last_buffer", default=False)
"""Whether the buffer that is selected from will not be filled again."""
TALLY: ContextVar[Counter[str]] = ContextVar("energon_bridge_tally")
"""What `count_over_long` has counted since the engine last took it."""


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


def count_over_long(what: str, number: int = 1) -> None:
    """Count what became of a sample that no pack can hold, for its dataset; outside of hooks, do nothing.

    Args:
        what: One of `dropped`, `truncated`, `split` and `pieces`, as `loader.counters()` names them.
        number: How many.
    """
    tally = TALLY.get(None)
    if tally is not None:
        tally[what] += number


@contextmanager
def tallying(tally: Counter[str]) -> Iterator[None]:
    """Let `count_over_long` add to a tally."""
    token = TALLY.set(tally)
    try:
        yield
    finally:
        TALLY.reset(token)


def current_buffer_is_last() -> bool:
    """Whether nothing joins what `select_samples_to_pack` leaves over: True in passes that end, False in endless runs.

    A selection that leaves samples over is then asked again with these alone; what it never selects is skipped.
    """
    return LAST.get()


def current_cache() -> CachePool:
    """Return the cache pool of the loader whose hook is running; outside of hooks, one that keeps nothing."""
    return CACHE.get(None) or NoCachePool()
