"""A finite stream: every sample once, in the dataset's own order, with the same step count on every rank.

Microbatch m is draws `[mB, (m+1)B)`; nothing depends on what was delivered before, so there is no state but m. Every
rank makes `ceil(ceil(N/B)/R)` steps. A microbatch beyond the end does not exist: it repeats real rows, with the mask
all false.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from energon_bridge.errors import EmptyDatasetError
from energon_bridge.plan.leaf import Round
from energon_bridge.stream.pipeline import Ahead, Pipeline, attach
from energon_bridge.stream.state import COUNTERS, Produced
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
        self._samples = pipeline.leaf.order.num_samples
        rows = pipeline.rows
        self._microbatches = self._samples // rows if drop_last else math.ceil(self._samples / rows)
        self._ahead: dict[int, Ahead] = {}

    def prepare(self, number: int) -> None:
        """Start loading a microbatch."""
        number %= self._microbatches
        if number in self._ahead:
            return
        rows = self._pipeline.rows
        indices = np.arange(number * rows, min((number + 1) * rows, self._samples), dtype=np.int64)
        buffer = self._pipeline.buffer(Round(int(indices[0]), indices, np.zeros(indices.size, dtype=np.int64)))
        ahead = self._ahead[number] = Ahead(self._pipeline)
        for low in range(0, indices.size, self._pipeline.chunk):
            ahead.schedule(buffer, low, min(indices.size, low + self._pipeline.chunk), ahead=True)

    def produce(self, number: int) -> Produced:
        """Return microbatch `number`; one that does not exist, or has no sample left, is masked.

        Raises:
            EmptyDatasetError: Every sample of the dataset was skipped.
        """
        counts = [0] * len(COUNTERS)
        real = number < self._microbatches
        for attempt in range(self._microbatches):
            counted = counts if real and not attempt else [0] * len(COUNTERS)
            # Two numbers that fall on one microbatch differ in their mask only.
            unit = (number + attempt) % self._microbatches
            samples, keys = self._encoded(unit, counted)
            with self._pipeline.user_code():
                batches = self._pipeline.batches(samples, keys, -1, unit, counted) if samples else []
            if batches:
                break
        else:
            path = self._pipeline.leaf.dataset.path
            raise EmptyDatasetError(f"{path}: every one of the {self._samples} samples of the split was skipped")
        (batch,) = batches
        exists = real and not attempt
        if not exists:
            attach(batch, "__valid__", torch.zeros(len(samples), dtype=torch.bool))
            mask_loss(batch)
        else:
            counts[0] += len(samples)
        return Produced(batch, len(samples) if exists else 0, None, [[*counts, self._pipeline.bytes_since()]])

    def _encoded(self, number: int, counts: list[int]) -> tuple[list[Any], list[RestoreKey]]:
        self.prepare(number)
        ahead = self._ahead.pop(number)
        outputs: list[tuple[RestoreKey, Any]] = []
        with self._pipeline.user_code():
            while len(ahead):
                for key, loaded in zip(*ahead.take(), strict=True):
                    outputs.extend(self._pipeline.encode(loaded, key, counts))
        return [sample for _, sample in outputs], [key for key, _ in outputs]


def mask_loss(batch: Any) -> None:
    """Set the `loss_mask` of a batch to zero, where it has one."""
    loss_mask = batch.get("loss_mask") if isinstance(batch, dict) else getattr(batch, "loss_mask", None)
    if isinstance(loss_mask, torch.Tensor):
        attach(batch, "loss_mask", torch.zeros_like(loss_mask))
