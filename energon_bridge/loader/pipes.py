"""Queues between the training process and its workers: a pipe each, and no threads.

A `multiprocessing.Queue` gives every item to a thread of the sender, which writes it: two thread switches for each
batch, in both processes, and one more thread whose locks a fork can catch. What is sent here is a few bytes (batches
cross in shared memory, `transport`), which a pipe takes at once.

DataLoader makes its queues through the context that it is given, so `PIPES` is all that it takes. A queue has one
reader and any number of writers.
"""

from __future__ import annotations

import mmap
import queue
import select
from multiprocessing.connection import Pipe
from multiprocessing.context import ForkContext
from multiprocessing.reduction import ForkingPickler
from typing import Any


class PipeQueue:
    """What DataLoader uses of a `multiprocessing.Queue`."""

    def __init__(self, context: ForkContext) -> None:
        self._reader, self._writer = Pipe(duplex=False)
        self._lock = context.Lock()  # for items that a pipe does not take in one piece, such as a worker's error
        self._poll = select.poll()
        self._poll.register(self._reader.fileno(), select.POLLIN)
        self._sent = mmap.mmap(-1, 8)  # all writers together; changed with the lock held
        self._received = 0

    def put(self, item: Any) -> None:
        """Send an item; waits while the pipe is full."""
        data = ForkingPickler.dumps(item)
        with self._lock:
            self._sent[:] = (int.from_bytes(self._sent[:]) + 1).to_bytes(8)
            self._writer.send_bytes(data)

    def get(self, timeout: float | None = None) -> Any:
        """Return the oldest item. Raises queue.Empty if none comes within so many seconds."""
        if not self._poll.poll(None if timeout is None else 1000 * timeout):
            raise queue.Empty
        item = ForkingPickler.loads(self._reader.recv_bytes())
        self._received += 1
        return item

    def qsize(self) -> int:
        """Return how many items are under way to the reader, which asks."""
        return int.from_bytes(self._sent[:]) - self._received

    def close(self) -> None:
        """Let go of the pipe in this process."""
        self._reader.close()
        self._writer.close()

    def cancel_join_thread(self) -> None:
        """Do nothing: there is no thread."""

    join_thread = cancel_join_thread


class PipeContext(ForkContext):
    """Forks, with queues that are pipes."""

    def Queue(self, maxsize: int = 0) -> PipeQueue:  # type: ignore[override]  # noqa: N802  # its name there
        """Return a queue. What bounds it is that DataLoader asks for a few items at a time."""
        return PipeQueue(self)


PIPES = PipeContext()
