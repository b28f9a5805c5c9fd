"""A finite stream: every sample once, in the dataset's own order, with the same step count on every rank.

Microbatch m is draws `[mB, (m+1)B)` of the leaves laid end to end; nothing depends on what was delivered before, so
there is no state but m. Every rank makes `ceil(ceil(N/B)/R)` steps. A microbatch beyond the end does not exist: it
repeats real rows, with the mask all false.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from energon_bridge.errors import EmptyDatasetError, FatalSampleError
from energon_bridge.plan.leaf import Round
from energon_bridge.stream.pipeline import Ahead, Pipeline, Segment, attach
from energon_bridge.stream.reader import RoundBuffer
from energon_bridge.stream.state import COUNTERS, Counts, Produced
from energon_bridge.stream.values import RestoreKey


def num_steps(num_samples: int, batch_size: int, world_size: int, *, drop_last: bool, limit: int | None) -> int:
    """Return the steps that every rank makes over a finite stream; `limit` is a number of steps."""
    microbatches = num_samples // batch_size if drop_last else math.ceil(num_samples / batch_size)
    steps = math.ceil(microbatches / world_size)
    return steps if limit is None else min(steps, limit)


class FiniteStream:
    """The microbatches of a finite stream, by number.

    Args:
        pipeline: Loads and encodes.
        drop_last: Leave out a last microbatch that is not full.
    """

    def __init__(self, pipeline: Pipeline, *, drop_last: bool) -> None:
        self._pipeline = pipeline
        self._ends = np.cumsum([leaf.order.num_samples for leaf in pipeline.leaves])
        self._samples = int(self._ends[-1])
        rows = pipeline.rows
        self._microbatches = self._samples // rows if drop_last else math.ceil(self._samples / rows)
        self._ahead: dict[int, Ahead] = {}

    def prepare(self, number: int) -> None:
        """Start loading a microbatch."""
        number %= self._microbatches
        if number in self._ahead:
            return
        ahead = self._ahead[number] = Ahead(self._pipeline)
        start = number * self._pipeline.rows
        stop = min(start + self._pipeline.rows, self._samples)
        while start < stop:
            leaf = int(np.searchsorted(self._ends, start, side="right"))
            end = min(stop, int(self._ends[leaf]))
            order = self._pipeline.leaves[leaf].order
            first = order.first_sample + start - (int(self._ends[leaf]) - order.num_samples)
            indices = np.arange(first, first + end - start, dtype=np.int64)
            buffer = RoundBuffer(self._pipeline.source(leaf).reader, Round(first, indices, np.zeros_like(indices)))
            for low in range(0, indices.size, self._pipeline.chunk):
                high = min(indices.size, low + self._pipeline.chunk)
                ahead.schedule([Segment(leaf, buffer, low, high, range(high - low))], ahead=True)
            start = end

    def produce(self, number: int) -> Produced:
        """Return microbatch `number`; one that does not exist, or has no sample left, is masked.

        Raises:
            EmptyDatasetError: Every sample of the dataset was skipped.
        """
        counts = Counts()
        real = number < self._microbatches
        for attempt in range(self._microbatches):
            counted = counts if real and not attempt else Counts()
            # Two numbers that fall on one microbatch differ in their mask only.
            unit = (number + attempt) % self._microbatches
            samples, keys, leaves = self._encoded(unit, counted)
            with self._pipeline.user_code():
                batches = self._pipeline.batches(samples, keys, leaves, -1, unit, counted) if samples else []
            if batches:
                if self._pipeline.settings.batch_size is None and len(samples) > 1:
                    raise FatalSampleError(
                        f"{keys[0]}: encode_sample yields {len(samples)} samples where a validation without batches "
                        "delivers one a step: give a batch_size"
                    )
                break
        else:
            paths = ", ".join(leaf.dataset.path for leaf in self._pipeline.leaves[:3])
            raise EmptyDatasetError(f"{paths}: every one of the {self._samples} samples of the split was skipped")
        exists = real and not attempt
        if not exists:
            attach(batches[0], "__valid__", torch.zeros(len(samples), dtype=torch.bool))
            mask_loss(batches[0])
        return Produced(batches[0], len(samples) if exists else 0, None, counts)

    def _encoded(self, number: int, counts: Counts) -> tuple[list[Any], list[RestoreKey], list[int]]:
        self.prepare(number)
        ahead = self._ahead.pop(number)
        samples: list[Any] = []
        keys: list[RestoreKey] = []
        leaves: list[int] = []
        with self._pipeline.user_code():
            while len(ahead):
                loaded = ahead.take()
                columns = zip(loaded.leaves, loaded.samples, loaded.keys, loaded.sizes, strict=True)
                for leaf, sample, key, size in columns:
                    counts.of(leaf)[COUNTERS.index("bytes")] += size
                    for output_key, encoded in self._pipeline.encode(leaf, sample, key, counts):
                        samples.append(encoded)
                        keys.append(output_key)
                        leaves.append(leaf)
        return samples, keys, leaves


def mask_loss(batch: Any) -> None:
    """Set the `loss_mask` of a batch to zero, where it has one."""
    loss_mask = batch.get("loss_mask") if isinstance(batch, dict) else getattr(batch, "loss_mask", None)
    if isinstance(loss_mask, torch.Tensor):
        attach(batch, "loss_mask", torch.zeros_like(loss_mask))
