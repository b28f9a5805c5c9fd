"""One iterator for the model chunks of a process.

With virtual pipeline parallelism, one process has several model chunks. All must see the same microbatches, and each
calls `next()` itself. They share one loader: the chunk that is ahead reads, and its batches wait for the others. A
chunk that never asks (its stage needs no data) would let that queue grow forever, so a chunk that falls `LIMIT`
microbatches behind is cut off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from energon_bridge.core.dataloader import EnergonDataloader
from energon_bridge.core.errors import LoaderError

LIMIT = 256
"""Maximum microbatches waiting for one chunk. The schedule lets chunks differ by about the number of pipeline
stages."""


class SharedStream:
    """Hands the batches of one dataloader to several readers."""

    def __init__(self, dataloader: EnergonDataloader) -> None:
        self.dataloader = dataloader
        self._waiting: list[deque[Any] | None] = []

    def reader(self) -> Chunk:
        """Return a reader that begins with the next batch."""
        self._waiting.append(deque())
        return Chunk(self, len(self._waiting) - 1)

    def take(self, number: int) -> Any:
        """Return the next batch of a reader."""
        own = self._waiting[number]
        if own is None:
            raise LoaderError(
                f"model chunk {number} is {LIMIT} microbatches behind the others: every chunk that needs data must "
                "call next() once per microbatch"
            )
        if own:
            return own.popleft()
        batch = next(self.dataloader)
        for other, waiting in enumerate(self._waiting):
            if other != number and waiting is not None:
                waiting.append(batch)
                if len(waiting) > LIMIT:
                    self._waiting[other] = None
        return batch

    def forget(self) -> None:
        """Drop waiting batches: the stream continues elsewhere."""
        self._waiting = [deque() for _ in self._waiting]


class Chunk:
    """The stream as one model chunk sees it, with the methods of `EnergonDataloader` that Megatron-LM looks for."""

    def __init__(self, stream: SharedStream, number: int) -> None:
        self._stream = stream
        self._number = number

    def __iter__(self) -> Iterator[Any]:
        """Return the chunk itself: passes are those of the shared stream, which starts over at its end."""
        return self

    def __next__(self) -> Any:
        return self._stream.take(self._number)

    def __len__(self) -> int:
        return len(self._stream.dataloader)

    def save_state(self) -> Any:
        """Return the state of the shared stream: between steps, when all chunks have had the same batches."""
        return self._stream.dataloader.save_state()

    def restore_state(self, state: Any) -> None:
        """Continue all chunks from a state."""
        self._stream.dataloader.restore_state(state)
        self._stream.forget()
