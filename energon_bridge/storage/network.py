"""What this process has asked of object stores and web servers, and how often a read stalled, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Requests:
    """Requests; those made again after a failure; rivals of slow ones; bytes that came; seconds that reads waited.

    And of files: tries of a read that took longer than `read_timeout_seconds`.
    """

    requests: int = 0
    request_retries: int = 0
    request_hedges: int = 0
    request_bytes: int = 0
    request_seconds: float = 0.0
    stalled_reads: int = 0

    def values(self) -> tuple[float, ...]:
        """Return the numbers in the order of `REQUESTS`."""
        return tuple(getattr(self, name) for name in REQUESTS)


REQUESTS = tuple(each.name for each in fields(Requests))
MADE = Requests()
"""Of this process; only differences mean anything, since a fork goes on from its parent's."""
