"""Queues between the training process and its workers: a pipe each, without threads and without locks.

A `multiprocessing.Queue` gives every item to a thread of the sender, which writes it: two thread switches for each
batch, in both processes, one more thread whose locks a fork can catch, and a lock that a killed writer takes along.
What is sent here is a few bytes (batches cross in shared memory, `transport`). The kernel writes up to PIPE_BUF bytes
in one piece; what is longer, such as a worker's error, is sent in several, which the reader puts together by writer.

Layout of a piece: `<H` its length without this header, `<I` the writer's process, `<?` whether it is the last of its
item, then bytes of the pickled item.

DataLoader makes its queues and events through the context that it is given, so `PIPES` is all that it takes. A queue
has one reader and any number of writers.
"""

from __future__ import annotations

import mmap
import os
import pickle
import queue
import select
import struct
import threading
from collections import deque
from multiprocessing.connection import Pipe
from multiprocessing.context import ForkContext
from typing import Any

_HEAD = struct.Struct("<HI?")
_PIECE = select.PIPE_BUF - _HEAD.size
"""Bytes of an item in a piece."""
_AT_ONCE = 1 << 16
"""What a pipe holds, if nobody has changed it."""


class PipeQueue:
    """What DataLoader uses of a `multiprocessing.Queue`."""

    def __init__(self) -> None:
        self._reader, self._writer = Pipe(duplex=False)
        os.set_blocking(self._reader.fileno(), False)
        self._read: deque[Any] = deque()
        self._rest = b""
        self._parts: dict[int, bytes] = {}
        self._reading = threading.Lock()

    def put(self, item: Any) -> None:
        """Send an item; waits while the pipe is full."""
        data = pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
        for low in range(0, len(data), _PIECE):
            piece = data[low : low + _PIECE]
            os.write(self._writer.fileno(), _HEAD.pack(len(piece), os.getpid(), low + _PIECE >= len(data)) + piece)

    def get(self, timeout: float | None = None) -> Any:
        """Return the oldest item. Raises queue.Empty if nothing comes for so many seconds."""
        self._take_in()
        while not self._read:
            if not self._arrived(timeout):
                raise queue.Empty
            self._take_in()
        return self._read.popleft()

    def qsize(self) -> int:
        """Return how many items the reader, which asks, could get without waiting."""
        self._take_in()
        return len(self._read)

    def close(self) -> None:
        """Let go of the pipe in this process."""
        self._reader.close()
        self._writer.close()

    def cancel_join_thread(self) -> None:
        """Do nothing: there is no thread."""

    join_thread = cancel_join_thread

    def _take_in(self) -> None:
        """Take in what has arrived; the loader's metrics may be asked for on another thread."""
        with self._reading:
            if self._reader.closed:
                return
            try:
                stream = self._rest + os.read(self._reader.fileno(), _AT_ONCE)
            except BlockingIOError:
                return
            at, head = 0, _HEAD.size
            while len(stream) - at >= head:
                size, writer, last = _HEAD.unpack_from(stream, at)
                if len(stream) - at < head + size:
                    break
                data = self._parts.pop(writer, b"") + stream[at + head : at + head + size]
                if last:
                    self._read.append(pickle.loads(data))
                else:
                    self._parts[writer] = data
                at += head + size
            self._rest = stream[at:]

    def _arrived(self, timeout: float | None) -> bool:
        poll = select.poll()
        poll.register(self._reader.fileno(), select.POLLIN)
        return bool(poll.poll(None if timeout is None else 1000 * timeout))


class SharedFlag:
    """What DataLoader uses of a `multiprocessing.Event`: a byte of shared memory.

    An Event has a lock, taken even to look at it: a worker that is killed while it looks takes the lock along, and the
    training process would wait for it when it stops the other workers.
    """

    def __init__(self) -> None:
        self._byte = mmap.mmap(-1, 1)

    def set(self) -> None:
        """Raise the flag, for all processes that have it."""
        self._byte[0] = 1

    def is_set(self) -> bool:
        """Return whether any process has raised it."""
        return self._byte[0] != 0


class PipeContext(ForkContext):
    """Forks, with queues that are pipes and events that are flags: nothing that a killed process could lock."""

    def Queue(self, maxsize: int = 0) -> PipeQueue:  # type: ignore[override]  # noqa: N802  # its name there
        """Return a queue. What bounds it is that DataLoader asks for a few items at a time."""
        return PipeQueue()

    def Event(self) -> SharedFlag:  # type: ignore[override]  # noqa: N802  # its name there
        """Return a flag that is not raised."""
        return SharedFlag()


PIPES = PipeContext()
