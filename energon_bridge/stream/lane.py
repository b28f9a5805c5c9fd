"""A lane: one of the L endless streams of a run, from its order to its microbatches.

A lane depends on nothing but its number, its state and the pipeline; whoever owns it gets the same microbatches.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from energon_bridge.errors import EmptyDatasetError
from energon_bridge.stream.pipeline import Ahead, Pipeline
from energon_bridge.stream.reader import RoundBuffer
from energon_bridge.stream.state import COUNTERS, LaneState, Produced
from energon_bridge.stream.values import Loaded, Problem, RestoreKey

_BARREN = 1000
"""Fewer draws (or microbatches) without a result than this are no sign of anything."""


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
        self._loaded: Loaded = ([], [])
        self._at = 0  # of the next draw in `_loaded`
        self._outputs: deque[tuple[RestoreKey, Any]] = deque()
        self._next_buffer: RoundBuffer | None = None
        # The first microbatch reads its own draws only, so that a resume costs no more than a fresh start.
        self._started = False

    def prepare(self, microbatches: int) -> None:
        """Start loading the draws that the next microbatches need if no sample is skipped."""
        self._schedule_up_to(self._draw + microbatches * self._pipeline.rows)

    def produce(self) -> Produced:
        """Return the next microbatch and the state of the lane after it."""
        pipeline, rows = self._pipeline, self._pipeline.rows
        counts = [0] * len(COUNTERS)
        batches: list[Any] = []
        first, attempts = self._draw, 0
        with pipeline.user_code():
            while not batches:
                if attempts > _BARREN:
                    self._give_up_if_barren(first)
                samples, keys = self._collect(counts)
                batches = pipeline.batches(samples, keys, self.number, self._microbatches, counts)
                attempts += 1
        (batch,) = batches
        counts[0] += rows
        self._microbatches += 1
        self._started = True
        state = LaneState(self._microbatches, self._draw, self._skip, (self._draw,))
        return Produced(batch, rows, state, [[*counts, pipeline.bytes_since()]])

    def _collect(self, counts: list[int]) -> tuple[list[Any], list[RestoreKey]]:
        """Return the encoded samples of a microbatch and their restore keys; count the draws that give none."""
        rows = self._pipeline.rows
        samples: list[Any] = []
        keys: list[RestoreKey] = []
        first = self._draw
        while len(samples) < rows:
            if self._outputs:
                key, sample = self._outputs.popleft()
                samples.append(sample)
                keys.append(key)
                self._drawn(left=bool(self._outputs))
                continue
            if self._at == len(self._loaded[0]):
                if not samples:
                    self._give_up_if_barren(first)
                self._load(rows - len(samples))
            if self._pipeline.code.encodes:
                self._encode_draw(counts)
            else:
                self._take(rows - len(samples), keys, samples, counts)
        return samples, keys

    def _give_up_if_barren(self, since: int) -> None:
        """Raise where so many draws gave nothing that going on would never end."""
        leaf = self._pipeline.leaf
        draws = self._draw - since
        if draws > max(_BARREN, 10 * leaf.order.num_samples):
            raise EmptyDatasetError(
                f"{leaf.dataset.path}: {draws} samples in a row, of a split of {leaf.order.num_samples}, were skipped, "
                "excluded or failed: nothing is left to train on. Check `exclude` and what encode_sample and batch skip"
            )

    def _load(self, draws: int) -> None:
        """Wait for the next loaded draws; load them now if nothing is under way."""
        if not len(self._ahead):
            self._schedule_up_to(self._draw + draws)
        self._loaded, self._at = self._ahead.take(), 0

    def _encode_draw(self, counts: list[int]) -> None:
        """Encode the next draw; its outputs, if any, are left in `_outputs`."""
        keys, loaded = self._loaded
        self._outputs.extend(self._pipeline.encode(loaded[self._at], keys[self._at], counts))
        self._at += 1
        for _ in range(min(self._skip, len(self._outputs))):
            self._outputs.popleft()
        if not self._outputs:
            self._drawn(left=False)

    def _drawn(self, *, left: bool) -> None:
        """Count an output of the current draw as taken; go on to the next draw if none is left."""
        self._draw, self._skip = (self._draw, self._skip + 1) if left else (self._draw + 1, 0)

    def _take(self, wanted: int, keys: list[RestoreKey], samples: list[Any], counts: list[int]) -> None:
        """Take up to `wanted` draws as they are: no code of the user's sees single samples."""
        taken_keys, taken = self._loaded[0][self._at : self._at + wanted], self._loaded[1][self._at : self._at + wanted]
        self._at += len(taken)
        self._draw += len(taken)
        before = len(samples)
        for key, sample in zip(taken_keys, taken, strict=True):
            if type(sample) is not Problem:
                keys.append(key)
                samples.append(sample)
                continue
            self._note_successes(len(samples) - before)
            before = len(samples)
            self._pipeline.encode(sample, key, counts)
        self._note_successes(len(samples) - before)

    def _note_successes(self, count: int) -> None:
        if count:
            self._pipeline.code.succeeded()

    def _schedule_up_to(self, draw: int) -> None:
        while self._scheduled < draw:
            buffer = self._buffer
            if buffer is None or self._scheduled >= buffer.first + len(buffer):
                buffer = self._buffer = self._next_buffer or self._buffer_at(self._scheduled)
                self._next_buffer = None
            low = self._scheduled - buffer.first
            high = min(len(buffer), low + min(self._pipeline.chunk, draw - self._scheduled))
            rounds = self._started and self._pipeline.settings.reads_rounds
            self._ahead.schedule(buffer, low, high, ahead=rounds)
            self._scheduled += high - low
            if rounds and self._next_buffer is None and 2 * high > len(buffer):
                self._next_buffer = self._buffer_at(buffer.first + len(buffer))
                self._pipeline.read_ahead(self._next_buffer)

    def _buffer_at(self, draw: int) -> RoundBuffer:
        return self._pipeline.buffer(self._pipeline.leaf.order.round_at(self.number, draw))
