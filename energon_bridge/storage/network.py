"""What this process has asked of object stores and web servers, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Requests:
    """Requests; those made again after a failure; rivals of slow ones; bytes that came; seconds that reads waited."""

    requests: int = 0
    request_retries: int = 0
    request_hedges: int = 0
    request_bytes: int = 0
    request_seconds: float = 0.0

    def values(self) -> tuple[float, ...]:
        """Return the numbers in the order of `REQUESTS`."""
        return self.requests, self.request_retries, self.request_hedges, self.request_bytes, self.request_seconds


REQUESTS = tuple(each.name for each in fields(Requests))
MADE = Requests()
"""Of this process; only differences mean anything, since a fork goes on from its parent's."""
