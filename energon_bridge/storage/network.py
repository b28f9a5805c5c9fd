"""What this process has asked of object stores and web servers, and how often a read stalled, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Requests:
    """Requests; those made again after a failure; rivals of slow ones; bytes that came; seconds that reads waited.

    Of files: tries of a read that took longer than `read_timeout_seconds`. Of the node's cache: blocks that lay on the
    disk, or that another process fetched meanwhile, and their bytes; blocks that this process fetched, and theirs.
    """

    requests: int = 0
    request_retries: int = 0
    request_hedges: int = 0
    request_bytes: int = 0
    request_seconds: float = 0.0
    stalled_reads: int = 0
    cache_hits: int = 0
    cache_hit_bytes: int = 0
    cache_misses: int = 0
    cache_miss_bytes: int = 0

    def values(self) -> tuple[float, ...]:
        """Return the numbers in the order of `REQUESTS`."""
        return tuple(getattr(self, name) for name in REQUESTS)


REQUESTS = tuple(each.name for each in fields(Requests))
MADE = Requests()
"""Of this process; only differences mean anything, since a fork goes on from its parent's."""
