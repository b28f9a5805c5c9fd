"""A finite stream: a pass over all samples, in its order, with the same step count on every rank.

Microbatch m is rows `[mB, (m+1)B)` of the pass; nothing depends on what was delivered before, so there is no state but
m and the number of the pass. Rows are draws, or, where the encoder packs or groups, those of a list that all ranks have
agreed on before the pass (see below); where it groups, the list says at which row each microbatch ends.
All ranks make the same number of steps. A microbatch beyond the end does not exist: it repeats real rows, with the mask
all false.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, TypeVar

import torch

from energon_bridge.core.errors import EmptyDatasetError, FatalSampleError
from energon_bridge.core.order.choose import PassDraws, Picks
from energon_bridge.core.samples.sample import meta_field
from energon_bridge.core.stream.again import reencode
from energon_bridge.core.stream.conventions import PassOrder
from energon_bridge.core.stream.grouping import Groups
from energon_bridge.core.stream.lane_state import (
    COUNTERS,
    BufferedRefs,
    Counts,
    LaneBatch,
    SampleRef,
    Stage,
    as_members,
)
from energon_bridge.core.stream.loading import PendingLoads, load_picks
from energon_bridge.core.stream.pack_buffer import pack_rows, post_encoded, select_packs
from energon_bridge.core.stream.pipeline import Pipeline, attach
from energon_bridge.core.stream.rows import SAMPLE, BatchRow, batch_rows, encode_rows

_SKIPPED = COUNTERS.index("skipped")
WHOLE_PACK = -2
"""The `output` of a row that means all outputs of its pack."""

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


class PassRows:
    """The rows of a pass, in the order of delivery.

    Args:
        picks: Returns the samples of rows [start, stop).
        make: Encodes the loads of these samples as rows; counts and leaves out those that hooks skip or fail on.

    Attributes:
        count: How many there are.
        what: What the rows are, in words for messages.
        ends: The row at which each microbatch ends; None: each has `batch_size` rows, the last one perhaps fewer.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        count: int,
        picks: Callable[[int, int], Picks],
        make: Callable[[int, int, PendingLoads, Counts], list[BatchRow]],
        what: str = "samples",
        ends: Sequence[int] | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._picks = picks
        self._make = make
        self.count = count
        self.what = what
        self.ends = ends
        self._ahead: dict[int, PendingLoads] = {}

    def prepare(self, start: int, stop: int) -> None:
        """Start loading rows [start, stop)."""
        if start not in self._ahead:
            self._ahead[start] = load_picks(self._pipeline.loading, self._picks(start, stop))

    def take(self, start: int, stop: int, counts: Counts) -> list[BatchRow]:
        """Return rows [start, stop) without those that hooks skip or fail on, which are counted."""
        self.prepare(start, stop)
        return self._make(start, stop, self._ahead.pop(start), counts)


def drawn_rows(pipeline: Pipeline, draws: PassDraws, number_of: Callable[[int], int] | None = None) -> PassRows:
    """Return rows that are the samples of a pass, encoded."""

    def make(start: int, stop: int, loads: PendingLoads, counts: Counts) -> list[BatchRow]:
        numbers = None if number_of is None else map(number_of, range(start, stop))
        return list(chain.from_iterable(encode_rows(pipeline, loads, counts, numbers)))

    return PassRows(pipeline, draws.num_draws, draws.picks, make)


def listed_rows(pipeline: Pipeline, listing: Listing) -> PassRows:
    """Return the rows of a listing; of a pack listed as a whole, all outputs of the encoder."""

    def picks(start: int, stop: int) -> Picks:
        return Picks(as_members([ref for refs, _ in listing.rows[start:stop] for ref in refs]))

    def make(start: int, stop: int, loads: PendingLoads, counts: Counts) -> list[BatchRow]:
        listed = [([BatchRow((ref,)) for ref in refs], output) for refs, output in listing.rows[start:stop]]
        reencode(pipeline, [row for rows, _ in listed for row in rows], counts, loads)
        out = []
        for rows, output in listed:
            whole = [row for row in rows if row.content is not None]
            if output == SAMPLE:
                out += post_encoded(pipeline, whole, counts) if pipeline.own.by_length else whole
            elif output == WHOLE_PACK:
                out += pack_rows(pipeline, whole, counts)
            else:  # what its hooks skip or fail on was counted when the pass was listed
                out += pack_rows(pipeline, whole, Counts())[output : output + 1]
        return out

    return PassRows(pipeline, len(listing.rows), picks, make, "rows", listing.ends)


class FiniteStream:
    """The microbatches of one pass, by number.

    Args:
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
        counts = Counts()
        others = range(number, number + self._microbatches)
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
        """Return the batch of a microbatch and its number of rows; (None, 0) if no row is left."""
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
    """Set the `loss_mask` of a batch to zero, if it has one, and its `labels` to -100 if those not learned are that."""
    loss_mask = meta_field(batch, "loss_mask")
    labels = meta_field(batch, "labels")
    if isinstance(loss_mask, torch.Tensor):
        attach(batch, "loss_mask", torch.zeros_like(loss_mask))
        if isinstance(labels, torch.Tensor) and labels.shape == loss_mask.shape:
            not_learned = labels[loss_mask == 0]
            if len(not_learned) and (not_learned == -100).all():
                attach(batch, "labels", torch.full_like(labels, -100))


# ---------------------------------------------------------------------------------------------------------------------
# The listing of a pass whose encoder packs or groups: all ranks agree on it before the first step.
#
# *Packs*: the draws of the pass are cut into sections of `packing_buffer_size`, whatever the number of ranks. Each rank
# encodes its share of the sections and lets the encoder select packs; the lists of references are gathered. With
# `max_tokens_per_microbatch` the packs are the microbatches.
#
# *Groups*: the rows (samples, or the outputs of each pack) are cut into sections in the same way; each rank asks the
# encoder for the groups of its share, and the answers are gathered. A full group is a microbatch. Rows left at the end
# of the pass follow as smaller microbatches, groups ordered by their oldest row; `batch_drop_last` drops them. Group
# keys must be equal after pickling: numbers, strings, tuples of them.
#
# After that a row is named by references, every topology sees the same microbatches, and every rank makes the same
# number of steps. The price: each sample is encoded, and each pack made, once more than it is delivered.


T = TypeVar("T")

logger = logging.getLogger(__name__)

_NOTABLE = 0.05
"""Share of the rows of a pass; a warning comes if more are dropped."""
_SECTION = 256
"""Rows that a rank holds in memory at a time while it asks for their groups."""


def listing_of_pass(pipeline: Pipeline, draws: PassDraws) -> tuple[Listing, Counts]:
    """Return the rows of a pass in order, and the counts of this rank from listing them; close the pipeline.

    If torch.distributed is initialised, all ranks must call this; otherwise each makes the whole list by itself.

    Raises:
        EmptyDatasetError: There are draws, but every one of them was left out.
    """
    run = pipeline.settings.run
    groups = pipeline.own.groups
    enough = math.inf if run.limit is None else run.limit * pipeline.settings.config.dp_size
    logger.info("%s %d samples before the pass starts", "grouping" if groups else "packing", draws.num_draws)
    counts = Counts()
    listing = Listing(rows=(), ends=None)
    try:
        if run.packing_buffer_size is not None:
            most = math.inf if groups else enough * run.rows
            listing = _list_packs(pipeline, draws, run.packing_buffer_size, most, counts)
        if groups:
            packs = run.packing_buffer_size is not None
            rows = listed_rows(pipeline, listing) if packs else drawn_rows(pipeline, draws)
            listing = _list_groups(pipeline, rows, enough, counts)
    finally:
        pipeline.flush_reports()
        pipeline.close()
    if draws.num_draws and not listing.rows and not run.batch_drop_last:
        raise EmptyDatasetError(
            f"{pipeline.paths}: every one of the {draws.num_draws} samples of the split was skipped or left out of "
            "packs"
        )
    return listing, counts


def _list_packs(pipeline: Pipeline, draws: PassDraws, buffer: int, enough: float, counts: Counts) -> Listing:
    """Return the packs of a pass, at least `enough` of them, selected from `buffer` draws at a time."""

    def select(start: int, stop: int, counted: Counts) -> BufferedRefs:
        return BufferedRefs.of((Stage.PACK, pack, 0) for pack in _packs_of(pipeline, draws, start, stop, counted))

    packs: list[list[SampleRef]] = []
    for found in _sections(select, draws.num_draws, buffer, pipeline, counts):
        packs += [refs for _, refs, _ in found.entries()]
        if len(packs) >= enough:
            break
    if pipeline.own.by_length:
        rows = [((ref,), SAMPLE) for refs in packs for ref in refs]
        return Listing(rows=rows, ends=list(accumulate(map(len, packs))))
    return Listing(rows=[(refs, WHOLE_PACK) for refs in packs], ends=None)


def _packs_of(pipeline: Pipeline, draws: PassDraws, start: int, stop: int, counts: Counts) -> list[list[SampleRef]]:
    """Return the packs, or microbatches, of draws [start, stop); what is never selected is counted as skipped."""
    packs: list[list[SampleRef]] = []
    with pipeline.user_code():
        rows = drawn_rows(pipeline, draws).take(start, stop, counts)
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


def _list_groups(pipeline: Pipeline, rows: PassRows, enough: float, counts: Counts) -> Listing:
    """Return the rows of a pass group by group, at least `enough` microbatches."""

    def ask(start: int, stop: int, counted: Counts) -> list[Grouped]:
        """Return rows [start, stop) with the groups that the encoder puts them into."""
        grouped: list[Grouped] = []
        with pipeline.user_code():
            for row in rows.take(start, stop, counted):
                found = pipeline.code.group(row.content, row.members, counted)
                if found is not None:
                    grouped.append(((row.members, row.output), *found))
        return grouped

    run = pipeline.settings.run
    groups: Groups[ListedRow] = Groups(run.batch_size)
    batches: list[list[ListedRow]] = []
    for found in _sections(ask, rows.count, _SECTION, pipeline, counts):
        batches += [full for full in (groups.add(row, key, size) for row, key, size in found) if full]
        if len(batches) >= enough:
            break
    else:
        drop = run.batch_drop_last
        rank = pipeline.settings.config.dp_rank
        batches += [] if drop else groups.left()
        if drop and rank == 0 and groups.num_rows > _NOTABLE * rows.count:
            logger.warning("%s: batch_drop_last drops %s, of %d of a pass", pipeline.paths, groups, rows.count)
    return Listing(rows=[row for batch in batches for row in batch], ends=list(accumulate(map(len, batches))))


def _sections(
    make: Callable[[int, int, Counts], T], total: int, section: int, pipeline: Pipeline, counts: Counts
) -> Iterator[T]:
    """Yield the result for each section of [0, total), in order; ranks that can reach each other share the work."""
    config = pipeline.settings.config
    group = config.data_parallel_group
    shared = config.dp_size > 1 and config.serves is None and torch.distributed.is_initialized()
    # Ranks given as numbers may be some of the job's alone, and no group reaches just them.
    shared = shared and torch.distributed.get_world_size(group) == config.dp_size
    ranks, rank = (config.dp_size, config.dp_rank) if shared else (1, 0)
    for first in range(0, total, section * ranks):
        start = first + rank * section
        own: T | None = None
        if start < total:
            counted = Counts()
            own = make(start, min(start + section, total), counted)
            # If several ranks each make the whole list, only one counts it.
            if shared or config.dp_rank == 0:
                counts.add(counted)
        found: list[Any] = [own]
        if shared:
            found = [None] * ranks
            torch.distributed.all_gather_object(found, own, group=group)
        yield from (one for one in found if one is not None)
