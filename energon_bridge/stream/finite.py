"""A finite stream: a pass over all samples, with the same step count on every rank.

Microbatch m is rows `[mB, (m+1)B)` of the pass; nothing depends on what was delivered before, so there is no state but
m and the number of the pass. Rows are draws, or the packs of a list that all ranks have agreed on before the pass.
Every rank makes `ceil(ceil(N/B)/R)` steps. A microbatch beyond the end does not exist: it repeats real rows, with the
mask all false.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from energon_bridge.errors import EmptyDatasetError, FatalSampleError
from energon_bridge.stream.packing import pack_rows, select_packs
from energon_bridge.stream.passes import FinitePlan
from energon_bridge.stream.pipeline import Ahead, Pipeline, Segment, attach
from energon_bridge.stream.reader import RoundBuffer
from energon_bridge.stream.rows import SAMPLE, Row, make_again
from energon_bridge.stream.state import COUNTERS, Counts, Produced, Ref

_SKIPPED = COUNTERS.index("skipped")


def num_microbatches(num_rows: int, batch_size: int, *, drop_last: bool) -> int:
    """Return the microbatches of a finite stream, all ranks together."""
    return num_rows // batch_size if drop_last else math.ceil(num_rows / batch_size)


def num_steps(num_rows: int, batch_size: int, world_size: int, *, drop_last: bool, limit: int | None) -> int:
    """Return the steps that every rank makes over a finite stream; `limit` is a number of steps."""
    steps = math.ceil(num_microbatches(num_rows, batch_size, drop_last=drop_last) / world_size)
    return steps if limit is None else min(steps, limit)


class PassRows(Protocol):
    """The rows of a pass."""

    count: int

    def prepare(self, start: int, stop: int) -> None:
        """Start loading rows [start, stop)."""
        ...

    def take(self, start: int, stop: int, counts: Counts) -> list[Row]:
        """Return rows [start, stop) without those that hooks leave out, which are counted."""
        ...


class DrawnRows:
    """Rows that are the samples of a plan, encoded."""

    def __init__(self, pipeline: Pipeline, plan: FinitePlan) -> None:
        self._pipeline = pipeline
        self._plan = plan
        self.count = plan.num_draws
        self._ahead: dict[int, Ahead] = {}

    def prepare(self, start: int, stop: int) -> None:
        """Start loading draws [start, stop)."""
        if start in self._ahead:
            return
        ahead = self._ahead[start] = Ahead(self._pipeline)
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

    def take(self, start: int, stop: int, counts: Counts) -> list[Row]:
        """Return the encoded samples of draws [start, stop)."""
        self.prepare(start, stop)
        ahead = self._ahead.pop(start)
        rows = []
        while len(ahead):
            loaded = ahead.take()
            columns = zip(loaded.leaves, loaded.samples, loaded.keys, loaded.sizes, strict=True)
            for leaf, sample, key, size in columns:
                counts.of(leaf)[COUNTERS.index("bytes")] += size
                for (_, index, epoch, output), encoded in self._pipeline.encode(leaf, sample, key, counts):
                    rows.append(Row((Ref(leaf, index, epoch, output),), SAMPLE, encoded, 0))
        return rows


class PackedRows:
    """Rows that are the packs of a list, encoded when they are needed."""

    def __init__(self, pipeline: Pipeline, packs: Sequence[Sequence[Ref]]) -> None:
        self._pipeline = pipeline
        self._packs = packs
        self.count = len(packs)

    def prepare(self, start: int, stop: int) -> None:
        """Do nothing: packs are read when they are needed."""

    def take(self, start: int, stop: int, counts: Counts) -> list[Row]:
        """Return the outputs of packs [start, stop)."""
        packs = [[Row((ref,), SAMPLE, None, 0) for ref in pack] for pack in self._packs[start:stop]]
        make_again(self._pipeline, [row for pack in packs for row in pack], counts)
        whole = ([row for row in pack if row.content is not None] for pack in packs)
        return [row for pack in whole for row in pack_rows(self._pipeline, pack, counts)]


def packs_of(pipeline: Pipeline, plan: FinitePlan, start: int, stop: int, counts: Counts) -> list[list[Ref]]:
    """Return the packs that the encoder makes of draws [start, stop); what it never selects is counted as skipped."""
    packs: list[list[Ref]] = []
    with pipeline.user_code():
        rows = DrawnRows(pipeline, plan).take(start, stop, counts)
        while rows:
            try:
                selected = select_packs(pipeline, rows)
            except Exception as error:  # the policy decides
                pipeline.failed(error, [row.members[0][:2] for row in rows], counts)
                return packs
            if not selected:
                break
            packs += [[row.members[0] for row in pack] for pack in selected]
            gone = {id(row) for pack in selected for row in pack}
            rows = [row for row in rows if id(row) not in gone]
    for row in rows:
        counts.of(row.members[0].leaf)[_SKIPPED] += 1
    return packs


class FiniteStream:
    """The microbatches of one pass, by number.

    Args:
        pipeline: Loads and encodes.
        rows: The rows of the pass.
        drop_last: Leave out a last microbatch that is not full.
    """

    def __init__(self, pipeline: Pipeline, rows: PassRows, *, drop_last: bool) -> None:
        self._pipeline = pipeline
        self._rows = rows
        self._microbatches = num_microbatches(rows.count, pipeline.rows, drop_last=drop_last)

    def _span(self, number: int) -> tuple[int, int]:
        start = number * self._pipeline.rows
        return start, min(start + self._pipeline.rows, self._rows.count)

    def prepare(self, number: int) -> None:
        """Start loading a microbatch."""
        self._rows.prepare(*self._span(number % self._microbatches))

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
            with self._pipeline.user_code():
                rows = self._rows.take(*self._span(unit), counted)
                batches = self._batched(rows, unit, counted) if rows else []
            if len(batches) > 1:
                raise FatalSampleError(
                    f"{rows[0].key(self._pipeline)}: batch or encode_batch yields {len(batches)} batches of one; where "
                    "all ranks make the same number of steps it must return one"
                )
            if batches:
                if self._pipeline.settings.batch_size is None and len(rows) > 1:
                    raise FatalSampleError(
                        f"{rows[0].key(self._pipeline)}: encode_sample yields {len(rows)} samples where a "
                        "pass without batches delivers one a step: give a batch_size"
                    )
                break
        else:
            paths = ", ".join(leaf.dataset.path for leaf in self._pipeline.leaves[:3])
            what = "packs" if isinstance(self._rows, PackedRows) else "samples"
            raise EmptyDatasetError(f"{paths}: every one of the {self._rows.count} {what} of the split was skipped")
        exists = real and not attempt
        if not exists:
            attach(batches[0], "__valid__", torch.zeros(len(rows), dtype=torch.bool))
            mask_loss(batches[0])
        return Produced(batches[0], len(rows) if exists else 0, None, counts)

    def _batched(self, rows: list[Row], number: int, counts: Counts) -> list[Any]:
        samples = [row.content for row in rows]
        keys = [row.key(self._pipeline) for row in rows]
        leaves = [ref.leaf for row in rows for ref in row.members]
        return self._pipeline.batches(samples, keys, leaves, -1, number, counts)


def mask_loss(batch: Any) -> None:
    """Set the `loss_mask` of a batch to zero, where it has one."""
    loss_mask = batch.get("loss_mask") if isinstance(batch, dict) else getattr(batch, "loss_mask", None)
    if isinstance(loss_mask, torch.Tensor):
        attach(batch, "loss_mask", torch.zeros_like(loss_mask))
