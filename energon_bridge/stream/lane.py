"""A lane: one of the L endless streams of a run, from its order to its microbatches.

A lane depends on nothing but its number, its state and the pipeline; whoever owns it gets the same microbatches.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from energon_bridge.stream.pipeline import Ahead, Pipeline
from energon_bridge.stream.reader import RoundBuffer
from energon_bridge.stream.state import COUNTERS, LaneState, Produced


class Lane:
    """One lane, continued from a state.

    Args:
        number: Lane number, below L.
        pipeline: Shared by all lanes of the process.
        state: Where to continue.
    """

    def __init__(self, number: int, pipeline: Pipeline, state: LaneState) -> None:
        self.number = number
        self._pipeline = pipeline
        self._microbatches = state.microbatches
        self._draw = state.draw
        self._skip = state.taken
        self._scheduled = state.draw
        self._buffer: RoundBuffer | None = None
        self._ahead = Ahead(pipeline)
        self._loaded: deque[tuple[Any, int, int]] = deque()
        self._outputs: deque[tuple[Any, tuple[Any, ...]]] = deque()
        # The first microbatch reads its own draws only, so that a resume costs no more than a fresh start.
        self._read_ahead = False

    def prepare(self, microbatches: int) -> None:
        """Start loading the draws that the next microbatches need if no sample is skipped."""
        self._schedule_up_to(self._draw + microbatches * self._pipeline.rows)

    def produce(self) -> Produced:
        """Return the next microbatch and the state of the lane after it."""
        pipeline, rows = self._pipeline, self._pipeline.rows
        counts = [0] * len(COUNTERS)
        samples: list[Any] = []
        keys: list[tuple[Any, ...]] = []
        with pipeline.user_code():
            while len(samples) < rows:
                if not self._outputs:
                    self._next_draw(rows - len(samples), counts)
                    continue
                sample, key = self._outputs.popleft()
                samples.append(sample)
                keys.append(key)
                if not self._outputs:
                    self._draw += 1
                    self._skip = 0
                else:
                    self._skip += 1
            batch = pipeline.collate(samples, keys, self.number, self._microbatches)
        counts[0] += rows
        self._microbatches += 1
        self._read_ahead = True
        state = LaneState(self._microbatches, self._draw, self._skip, (self._draw,))
        return Produced(batch, rows, state, [[*counts, pipeline.bytes_since()]])

    def _next_draw(self, wanted: int, counts: list[int]) -> None:
        """Encode the next draw; its outputs, if any, are left in `_outputs`."""
        if not self._loaded:
            if not len(self._ahead):
                self._schedule_up_to(self._draw + wanted)
            loaded, buffer, low = self._ahead.take()
            high = low + len(loaded)
            epochs = buffer.epochs[low:high].tolist()
            self._loaded.extend(zip(loaded, buffer.indices[low:high].tolist(), epochs, strict=True))
        self._outputs.extend(self._pipeline.encode(*self._loaded.popleft(), counts))
        for _ in range(min(self._skip, len(self._outputs))):
            self._outputs.popleft()
        if not self._outputs:
            self._draw += 1
            self._skip = 0

    def _schedule_up_to(self, draw: int) -> None:
        while self._scheduled < draw:
            if self._buffer is None or self._scheduled >= self._buffer.first + len(self._buffer):
                order = self._pipeline.leaf.order
                self._buffer = self._pipeline.buffer(order.round_at(self.number, self._scheduled))
            low = self._scheduled - self._buffer.first
            high = min(len(self._buffer), low + min(self._pipeline.chunk, draw - self._scheduled))
            self._ahead.schedule(self._buffer, low, high, ahead=self._read_ahead)
            self._scheduled += high - low
