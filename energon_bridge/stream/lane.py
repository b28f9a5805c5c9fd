"""A lane: one of the L endless streams of a run, from its order to its microbatches.

A lane depends on nothing but its number, its state and the pipeline; whoever owns it gets the same microbatches.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from energon_bridge.errors import EmptyDatasetError
from energon_bridge.plan.blend import Blend
from energon_bridge.stream.pipeline import Ahead, Loaded, Pipeline, Segment
from energon_bridge.stream.state import COUNTERS, Counts, LaneState, Produced
from energon_bridge.stream.values import Problem, RestoreKey

_BYTES = COUNTERS.index("bytes")
_BARREN = 1000
"""Fewer draws (or microbatches) without a result than this are no sign of anything."""


class Lane:
    """One lane, continued from a state.

    Args:
        number: Lane number, below L.
        pipeline: Shared by all lanes of the process.
        blend: Says which leaf a draw comes from; None where there is one leaf.
        state: Where to continue.
    """

    def __init__(self, number: int, pipeline: Pipeline, blend: Blend | None, state: LaneState) -> None:
        self.number = number
        self._pipeline = pipeline
        self._blend = blend
        self._microbatches = state.microbatches
        self._draw = state.draw
        self._skip = state.taken
        self._origin = state.origin
        self._leaf_draws = list(state.leaf_draws)
        self._scheduled = state.draw
        self._leaf_scheduled = list(state.leaf_draws)
        self._ahead = Ahead(pipeline)
        self._loaded = Loaded([], [], [], [])
        self._at = 0  # of the next draw in `_loaded`
        self._outputs: deque[tuple[RestoreKey, Any]] = deque()
        self._outputs_of = 0
        # The first microbatch reads its own draws only, so that a resume costs no more than a fresh start.
        self._started = False

    def prepare(self, microbatches: int) -> None:
        """Start loading the draws that the next microbatches need if no sample is skipped."""
        self._schedule_up_to(self._draw + microbatches * self._pipeline.rows)

    def produce(self) -> Produced:
        """Return the next microbatch and the state of the lane after it."""
        pipeline = self._pipeline
        counts = Counts()
        batches: list[Any] = []
        first, attempts = self._draw, 0
        with pipeline.user_code():
            while not batches:
                if attempts > _BARREN:
                    self._give_up_if_barren(first)
                samples, keys, leaves = self._collect(counts)
                batches = pipeline.batches(samples, keys, leaves, self.number, self._microbatches, counts)
                attempts += 1
        self._microbatches += 1
        self._started = True
        state = LaneState(self._microbatches, self._draw, self._skip, tuple(self._leaf_draws), self._origin)
        return Produced(batches[0], pipeline.rows, state, counts)

    def _collect(self, counts: Counts) -> tuple[list[Any], list[RestoreKey], list[int]]:
        """Return the encoded samples of a microbatch with restore keys and leaves; count the draws that give none."""
        rows = self._pipeline.rows
        samples: list[Any] = []
        keys: list[RestoreKey] = []
        leaves: list[int] = []
        first = self._draw
        while len(samples) < rows:
            if self._outputs:
                key, sample = self._outputs.popleft()
                samples.append(sample)
                keys.append(key)
                leaves.append(self._outputs_of)
                self._drawn(self._outputs_of, left=bool(self._outputs))
                continue
            if self._at == len(self._loaded.keys):
                if not samples:
                    self._give_up_if_barren(first)
                self._load(rows - len(samples))
            if self._pipeline.code.encodes:
                self._encode_draw(counts)
            else:
                self._take(rows - len(samples), keys, samples, leaves, counts)
        return samples, keys, leaves

    def _give_up_if_barren(self, since: int) -> None:
        """Raise where so many draws gave nothing that going on would never end."""
        leaves = self._pipeline.leaves
        size = sum(leaf.order.num_samples for leaf in leaves)
        draws = self._draw - since
        if draws > max(_BARREN, 10 * size):
            paths = ", ".join(leaf.dataset.path for leaf in leaves[:3])
            raise EmptyDatasetError(
                f"{paths}: {draws} samples in a row, of a split of {size}, were skipped, excluded or failed: nothing "
                "is left to train on. Check `exclude` and what encode_sample and batch skip"
            )

    def _load(self, draws: int) -> None:
        """Wait for the next loaded draws; load them now if nothing is under way."""
        if not len(self._ahead):
            self._schedule_up_to(self._draw + draws)
        self._loaded, self._at = self._ahead.take(), 0

    def _encode_draw(self, counts: Counts) -> None:
        """Encode the next draw; its outputs, if any, are left in `_outputs`."""
        loaded, at = self._loaded, self._at
        self._at += 1
        leaf = self._outputs_of = loaded.leaves[at]
        counts.of(leaf)[_BYTES] += loaded.sizes[at]
        self._outputs.extend(self._pipeline.encode(leaf, loaded.samples[at], loaded.keys[at], counts))
        for _ in range(min(self._skip, len(self._outputs))):
            self._outputs.popleft()
        if not self._outputs:
            self._drawn(leaf, left=False)

    def _drawn(self, leaf: int, *, left: bool) -> None:
        """Count an output of the current draw as taken; go on to the next draw if none is left."""
        if left:
            self._skip += 1
            return
        self._draw, self._skip = self._draw + 1, 0
        self._leaf_draws[leaf] += 1

    def _take(self, wanted: int, keys: list[RestoreKey], samples: list[Any], leaves: list[int], counts: Counts) -> None:
        """Take up to `wanted` draws as they are: no code of the user's sees single samples."""
        loaded, low = self._loaded, self._at
        high = min(low + wanted, len(loaded.keys))
        self._at = high
        self._draw += high - low
        drawn = loaded.leaves[low:high]
        for leaf in set(drawn):
            self._leaf_draws[leaf] += drawn.count(leaf)
        for leaf, size in zip(drawn, loaded.sizes[low:high], strict=True):
            counts.of(leaf)[_BYTES] += size
        for key, sample, leaf in zip(loaded.keys[low:high], loaded.samples[low:high], drawn, strict=True):
            if type(sample) is Problem:
                self._pipeline.encode(leaf, sample, key, counts)
                continue
            keys.append(key)
            samples.append(sample)
            leaves.append(leaf)
            self._pipeline.code.succeeded()

    # Scheduling ------------------------------------------------------------------------------------------------------

    def _schedule_up_to(self, draw: int) -> None:
        while self._scheduled < draw:
            count = min(self._pipeline.chunk, draw - self._scheduled)
            segments = self._segments(count) if self._blend is None else self._mixed_segments(count)
            rounds = self._started and self._pipeline.settings.reads_rounds
            self._ahead.schedule(segments, ahead=rounds)
            if rounds:
                self._read_ahead(segments)

    def _segments(self, count: int) -> list[Segment]:
        """Return up to `count` next draws of the only leaf, as far as one round goes."""
        buffer, low = self._pipeline.cursor(self.number, 0).at(self._leaf_scheduled[0])
        high = min(len(buffer), low + count)
        self._scheduled += high - low
        self._leaf_scheduled[0] += high - low
        return [Segment(0, buffer, low, high, range(high - low))]

    def _mixed_segments(self, count: int) -> list[Segment]:
        """Return the `count` next draws of a mix."""
        assert self._blend is not None
        first = self._scheduled - self._origin
        leaves = self._blend.leaves(self.number, first, count)
        while leaves.size < count:  # where weights change or a mix epoch ends
            more = self._blend.leaves(self.number, first + leaves.size, count - leaves.size)
            leaves = np.concatenate((leaves, more))
        segments = []
        for leaf in np.unique(leaves).tolist():
            places = np.flatnonzero(leaves == leaf).tolist()
            cursor = self._pipeline.cursor(self.number, leaf)
            while places:
                buffer, low = cursor.at(self._leaf_scheduled[leaf])
                high = min(len(buffer), low + len(places))
                segments.append(Segment(leaf, buffer, low, high, places[: high - low]))
                self._leaf_scheduled[leaf] += high - low
                places = places[high - low :]
        self._scheduled += leaves.size
        return segments

    def _read_ahead(self, segments: list[Segment]) -> None:
        for segment in segments:
            cursor = self._pipeline.cursor(self.number, segment.leaf)
            current = cursor.buffer is segment.buffer and cursor.next_buffer is None
            if current and 2 * segment.high > len(segment.buffer):
                self._pipeline.read_ahead(cursor.following())
