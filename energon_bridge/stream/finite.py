"""A finite stream: a pass over all samples, in its order, with the same step count on every rank.

Microbatch m is rows `[mB, (m+1)B)` of the pass; nothing depends on what was delivered before, so there is no state but
m and the number of the pass. Rows are draws, or, where the encoder packs or groups, those of a list that all ranks have
agreed on before the pass (`loader/streams.py`); where it groups, the list says at which row each microbatch ends.
All ranks make the same number of steps. A microbatch beyond the end does not exist: it repeats real rows, with the mask
all false.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch

from energon_bridge.errors import EmptyDatasetError, FatalSampleError
from energon_bridge.plan.choose import PassDraws, Picks
from energon_bridge.stream.conventions import PassOrder, attach
from energon_bridge.stream.draws import SAMPLE, BatchRow, batch_rows, encode_rows, reencode
from energon_bridge.stream.packing import pack_rows, post_encoded, select_packs
from energon_bridge.stream.pipeline import PendingLoads, PickedLoad, Pipeline
from energon_bridge.stream.state import COUNTERS, Counts, LaneBatch, SampleRef, as_members

_SKIPPED = COUNTERS.index("skipped")
WHOLE_PACK = -2
"""Stands for the output of a pack where all outputs of it are meant."""

ListedRow = tuple[Sequence[SampleRef], int]
"""A row by its members and output: that of its pack, `SAMPLE` or `WHOLE_PACK`."""
Grouped = tuple[ListedRow, Any, Any]
"""A row with its group and the batch size that the encoder gives the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The rows of a pass that all ranks have agreed on, and the row at which each microbatch ends.

    `ends` is None if every microbatch has `batch_size` rows.
    """

    rows: Sequence[ListedRow]
    ends: Sequence[int] | None


def num_microbatches(num_rows: int, batch_size: int, *, drop_last: bool) -> int:
    """Return the microbatches of a finite stream, all ranks together."""
    return num_rows // batch_size if drop_last else math.ceil(num_rows / batch_size)


class PassRows(Protocol):
    """The rows of a pass, in the order of delivery."""

    @property
    def count(self) -> int: ...
    @property
    def what(self) -> str:
        """What the rows are, for people."""
        ...

    @property
    def ends(self) -> Sequence[int] | None:
        """The row at which each microbatch ends; None: each has `batch_size` rows, the last one perhaps fewer."""
        ...

    def prepare(self, start: int, stop: int) -> None:
        """Start loading rows [start, stop)."""
        ...

    def take(self, start: int, stop: int, counts: Counts) -> list[BatchRow]:
        """Return rows [start, stop) without those that hooks leave out, which are counted."""
        ...


class DrawnRows:
    """Rows that are the samples of a pass, encoded.

    Args:
        pipeline: Loads and encodes.
        draws: The samples.
        number_of: Numbers draws for hooks.
    """

    ends = None
    what = "samples"

    def __init__(self, pipeline: Pipeline, draws: PassDraws, number_of: Callable[[int], int] | None = None) -> None:
        self._pipeline = pipeline
        self._draws = draws
        self._number_of = number_of
        self.count = draws.num_draws
        self._ahead: dict[int, PendingLoads] = {}

    def prepare(self, start: int, stop: int) -> None:
        """Start loading draws [start, stop)."""
        if start not in self._ahead:
            self._ahead[start] = PickedLoad(self._pipeline, self._draws.picks(start, stop)).start()

    def take(self, start: int, stop: int, counts: Counts) -> list[BatchRow]:
        """Return the encoded samples of draws [start, stop)."""
        self.prepare(start, stop)
        numbers = None if self._number_of is None else map(self._number_of, range(start, stop))
        return list(chain.from_iterable(encode_rows(self._pipeline, self._ahead.pop(start), counts, numbers)))


class ListedRows:
    """Rows that a listing names, made when they are needed."""

    what = "rows"

    def __init__(self, pipeline: Pipeline, listing: Listing) -> None:
        self._pipeline = pipeline
        self._rows = listing.rows
        self.count = len(listing.rows)
        self.ends = listing.ends
        self._ahead: dict[int, PendingLoads] = {}

    def prepare(self, start: int, stop: int) -> None:
        """Start loading the samples of rows [start, stop)."""
        if start not in self._ahead:
            refs = as_members([ref for refs, _ in self._rows[start:stop] for ref in refs])
            self._ahead[start] = PickedLoad(self._pipeline, Picks(refs)).start()

    def take(self, start: int, stop: int, counts: Counts) -> list[BatchRow]:
        """Return rows [start, stop); for a pack listed as a whole, all outputs of the encoder."""
        self.prepare(start, stop)
        listed = [
            ([BatchRow((ref,), SAMPLE, None, 0) for ref in refs], output) for refs, output in self._rows[start:stop]
        ]
        members = [row for rows, _ in listed for row in rows]
        reencode(self._pipeline, members, counts, self._ahead.pop(start))
        out = []
        for rows, output in listed:
            whole = [row for row in rows if row.content is not None]
            if output == SAMPLE:
                out += post_encoded(self._pipeline, whole, counts) if self._pipeline.own.by_length else whole
            elif output == WHOLE_PACK:
                out += pack_rows(self._pipeline, whole, counts)
            else:  # what its hooks leave out was counted when the pass was listed
                out += pack_rows(self._pipeline, whole, Counts())[output : output + 1]
        return out


def packs_of(pipeline: Pipeline, draws: PassDraws, start: int, stop: int, counts: Counts) -> list[list[SampleRef]]:
    """Return the packs, or microbatches, of draws [start, stop); what is never selected is counted as skipped."""
    packs: list[list[SampleRef]] = []
    with pipeline.user_code():
        rows = DrawnRows(pipeline, draws).take(start, stop, counts)
        while rows:
            selected = select_packs(pipeline, rows, counts, last=True)
            if selected is None:
                return packs
            some, rows = selected
            if not some:
                break
            packs += [[row.members[0] for row in pack] for pack in some]
    for row in rows:
        counts.of(row.members[0].leaf)[_SKIPPED] += 1
    return packs


def groups_of(pipeline: Pipeline, rows: PassRows, start: int, stop: int, counts: Counts) -> list[Grouped]:
    """Return rows [start, stop) with the groups that the encoder puts them into."""
    grouped: list[Grouped] = []
    with pipeline.user_code():
        for row in rows.take(start, stop, counts):
            found = pipeline.code.group(row.content, row.members, counts)
            if found is not None:
                grouped.append(((row.members, row.output), *found))
    return grouped


class FiniteStream:
    """The microbatches of one pass, by number.

    Args:
        pipeline: Loads and encodes.
        rows: The rows of the pass.
        drop_last: Leave out a last microbatch that is not full.
        order: The rows of each microbatch; None: the next ones.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        rows: PassRows,
        *,
        drop_last: bool,
        order: PassOrder | None = None,
    ) -> None:
        self.pipeline = pipeline
        self._rows = rows
        self._order = order
        ends = rows.ends
        self._microbatches = (
            num_microbatches(rows.count, pipeline.rows, drop_last=drop_last) if ends is None else len(ends)
        )

    def _span(self, number: int) -> tuple[int, int]:
        if self._order is not None:
            return self._order.span(number)
        number %= self._microbatches
        ends = self._rows.ends
        if ends is not None:
            return ends[number - 1] if number else 0, ends[number]
        start = number * self.pipeline.rows
        return start, min(start + self.pipeline.rows, self._rows.count)

    def prepare(self, number: int, count: int) -> None:
        """Start loading a microbatch; there is one of each number."""
        self._rows.prepare(*self._span(number))

    def produce(self, number: int) -> LaneBatch:
        """Return microbatch `number`; one that does not exist, or has no sample left, is masked, or has no batch.

        Raises:
            EmptyDatasetError: Every sample of the dataset was skipped.
        """
        counts, others = Counts(), range(number, number + self._microbatches)
        masks = self.pipeline.conventions.masks
        if number < self._microbatches or not masks:
            batch, rows = self._made(number, counts)
            if rows or not masks:
                return LaneBatch(batch, rows, None, counts)
            others = others[1:]
        for other in others:  # two numbers that fall on one microbatch differ in their mask only
            batch, rows = self._made(other % self._microbatches, Counts())
            if rows:
                attach(batch, "__valid__", torch.zeros(rows, dtype=torch.bool))
                mask_loss(batch)
                return LaneBatch(batch, 0, None, counts)
        all_rows = f"every one of the {self._rows.count} {self._rows.what} of the split"
        raise EmptyDatasetError(f"{self.pipeline.paths}: {all_rows} was skipped")

    def _made(self, number: int, counts: Counts) -> tuple[Any, int]:
        """Return the batch of a microbatch and its rows; (None, 0) if hooks leave nothing of it."""
        pipeline = self.pipeline
        with pipeline.user_code():
            pipeline.begin(-1, number)
            rows = self._rows.take(*self._span(number), counts)
            batches = batch_rows(pipeline, rows, -1, number, counts)
        if len(batches) > 1:
            raise FatalSampleError(
                f"{rows[0].key(pipeline)}: batch or encode_batch yields {len(batches)} batches from one; "
                "return one, so that all ranks make the same number of steps"
            )
        if not batches:
            return None, 0
        if pipeline.settings.run.batch_size is None and self._rows.ends is None and len(rows) > 1:
            raise FatalSampleError(
                f"{rows[0].key(pipeline)}: encode_sample yields {len(rows)} samples, but a "
                "pass without batches delivers one per step: set batch_size"
            )
        return batches[0], len(rows)


def mask_loss(batch: Any) -> None:
    """Set the `loss_mask` of a batch to zero, if it has one."""
    loss_mask = batch.get("loss_mask") if isinstance(batch, dict) else getattr(batch, "loss_mask", None)
    if isinstance(loss_mask, torch.Tensor):
        attach(batch, "loss_mask", torch.zeros_like(loss_mask))
