"""Counters of this process: requests to object stores and web servers, and stalled reads."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Requests:
    """Requests; retries; hedges of slow requests; bytes received; seconds that reads waited.

    Files: attempts to read that took longer than `read_timeout_seconds`. Node cache: hits (blocks on the disk, or
    fetched by another process meanwhile) and their bytes; misses (blocks that this process fetched) and their bytes.
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
"""The counters of this process; use differences only, since a fork continues its parent's counts."""
