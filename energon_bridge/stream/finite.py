"""A finite stream: a pass over all samples, with the same step count on every rank.

Microbatch m is draws `[mB, (m+1)B)` of the pass; nothing depends on what was delivered before, so there is no state but
m and the number of the pass. Every rank makes `ceil(ceil(N/B)/R)` steps. A microbatch beyond the end does not exist: it
repeats real rows, with the mask all false.

Validation goes through its leaves `InOrder`; training that ends goes through them `Shuffled`, anew in every pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from energon_bridge.errors import EmptyDatasetError, FatalSampleError
from energon_bridge.plan.blend import EpochizedBlend
from energon_bridge.plan.leaf import Round
from energon_bridge.rng import IntArray
from energon_bridge.stream.leaf import Leaf
from energon_bridge.stream.pipeline import Ahead, Pipeline, Segment, attach
from energon_bridge.stream.reader import RoundBuffer
from energon_bridge.stream.state import COUNTERS, Counts, Produced
from energon_bridge.stream.values import RestoreKey


def num_microbatches(num_samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Return the microbatches of a finite stream, all ranks together."""
    return num_samples // batch_size if drop_last else math.ceil(num_samples / batch_size)


def num_steps(num_samples: int, batch_size: int, world_size: int, *, drop_last: bool, limit: int | None) -> int:
    """Return the steps that every rank makes over a finite stream; `limit` is a number of steps."""
    steps = math.ceil(num_microbatches(num_samples, batch_size, drop_last=drop_last) / world_size)
    return steps if limit is None else min(steps, limit)


class FinitePlan(Protocol):
    """Which samples the draws of a pass are."""

    @property
    def num_draws(self) -> int:
        """Draws in the pass."""
        ...

    def runs(self, start: int, stop: int) -> list[tuple[int, Round, IntArray]]:
        """Return draws [start, stop) by leaf: its number, the samples, and their places among these draws."""
        ...


class InOrder:
    """The leaves one after the other, each in its own order."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._leaves = leaves
        self._ends = np.cumsum([leaf.order.num_samples for leaf in leaves])
        self.num_draws = int(self._ends[-1])

    def runs(self, start: int, stop: int) -> list[tuple[int, Round, IntArray]]:
        """Return draws [start, stop) by leaf."""
        runs = []
        at = start
        while at < stop:
            leaf = int(np.searchsorted(self._ends, at, side="right"))
            end = min(stop, int(self._ends[leaf]))
            order = self._leaves[leaf].order
            first = order.first_sample + at - (int(self._ends[leaf]) - order.num_samples)
            indices = np.arange(first, first + end - at, dtype=np.int64)
            runs.append((leaf, Round(first, indices, np.zeros_like(indices)), np.arange(at - start, end - start)))
            at = end
        return runs


class Shuffled:
    """One pass over the leaves as their orders and the blend lay them out for a single lane.

    Args:
        leaves: The leaves, cut for one lane.
        blend: How they are merged; None where there is one.
        epoch: Number of the pass.
    """

    def __init__(self, leaves: Sequence[Leaf], blend: EpochizedBlend | None, epoch: int) -> None:
        self._leaves = leaves
        self._blend = blend
        if blend is None:
            ends = [leaves[0].order.num_samples * number for number in (epoch, epoch + 1)]
        else:
            ends = [int(blend.drawn(0, number).sum()) for number in (epoch, epoch + 1)]
        self._first = ends[0]
        self.num_draws = ends[1] - ends[0]
        self._rounds: dict[int, Round] = {}

    def runs(self, start: int, stop: int) -> list[tuple[int, Round, IntArray]]:
        """Return draws [start, stop) by leaf."""
        first, count = self._first + start, stop - start
        if self._blend is None:
            return [(0, self._draws(0, first, count), np.arange(count))]
        leaves = self._blend.leaves(0, first, count)
        before = self._blend.counts(0, first)
        runs = []
        for leaf in np.unique(leaves).tolist():
            places = np.flatnonzero(leaves == leaf)
            runs.append((leaf, self._draws(leaf, int(before[leaf]), places.size), places))
        return runs

    def _draws(self, leaf: int, first: int, count: int) -> Round:
        """Return consecutive draws of a leaf."""
        order = self._leaves[leaf].order
        indices: list[IntArray] = []
        epochs: list[IntArray] = []
        at = first
        while at < first + count:
            part = self._rounds.get(leaf)
            if part is None or not part.first <= at < part.first + part.indices.size:
                part = self._rounds[leaf] = order.round_at(0, at)
            low, high = at - part.first, min(first + count - part.first, part.indices.size)
            indices.append(part.indices[low:high])
            epochs.append(part.epochs[low:high])
            at += high - low
        return Round(first, np.concatenate(indices), np.concatenate(epochs))


class FiniteStream:
    """The microbatches of one pass, by number.

    Args:
        pipeline: Loads and encodes.
        plan: Which samples the draws are.
        drop_last: Leave out a last microbatch that is not full.
    """

    def __init__(self, pipeline: Pipeline, plan: FinitePlan, *, drop_last: bool) -> None:
        self._pipeline = pipeline
        self._plan = plan
        self._microbatches = num_microbatches(plan.num_draws, pipeline.rows, drop_last=drop_last)
        self._ahead: dict[int, Ahead] = {}

    def prepare(self, number: int) -> None:
        """Start loading a microbatch."""
        number %= self._microbatches
        if number in self._ahead:
            return
        ahead = self._ahead[number] = Ahead(self._pipeline)
        start = number * self._pipeline.rows
        stop = min(start + self._pipeline.rows, self._plan.num_draws)
        runs = [
            (leaf, RoundBuffer(self._pipeline.source(leaf).reader, draws), places)
            for leaf, draws, places in self._plan.runs(start, stop)
        ]
        for low in range(0, stop - start, self._pipeline.chunk):
            segments = []
            for leaf, buffer, places in runs:
                begin, end = np.searchsorted(places, (low, low + self._pipeline.chunk)).tolist()
                if begin < end:
                    segments.append(Segment(leaf, buffer, begin, end, (places[begin:end] - low).tolist()))
            ahead.schedule(segments, ahead=True)

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
            if len(batches) > 1:
                raise FatalSampleError(
                    f"{keys[0]}: batch or encode_batch yields {len(batches)} batches of one; where all ranks make the "
                    "same number of steps it must return one"
                )
            if batches:
                if self._pipeline.settings.batch_size is None and len(samples) > 1:
                    raise FatalSampleError(
                        f"{keys[0]}: encode_sample yields {len(samples)} samples where a pass without batches "
                        "delivers one a step: give a batch_size"
                    )
                break
        else:
            paths = ", ".join(leaf.dataset.path for leaf in self._pipeline.leaves[:3])
            draws = self._plan.num_draws
            raise EmptyDatasetError(f"{paths}: every one of the {draws} samples of the split was skipped")
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
