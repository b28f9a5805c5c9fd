"""The listing of a pass that ends, where the encoder packs or groups: all ranks agree on it before its first step.

*Packs*: the draws of the pass are cut into blocks of `packing_buffer_size`, whatever the number of ranks. Each rank
encodes the blocks that are its share and lets the encoder select packs; the lists of references are gathered.

*Groups*: the rows (samples, or what the encoder makes of each pack) are cut into blocks in the same way, each rank asks
the encoder for the groups of its share, and the answers are gathered. A group that is full is a microbatch. What waits
at the end of the pass follows as smaller microbatches, the group first whose oldest row came first; `batch_drop_last`
leaves it out. Groups that ranks tell each other must be equal when they are pickled: numbers, strings, tuples of them.

From then on a row is named by references, every topology sees the same microbatches, and every rank makes the same
number of steps. It costs that each sample is encoded once more than it is delivered, and each pack made once more.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import torch

from energon_bridge.errors import EmptyDatasetError
from energon_bridge.loader.description import Description
from energon_bridge.loader.run_plan import RunPlan, draws_of_pass
from energon_bridge.loader.streams import open_pipeline
from energon_bridge.stream.finite import (
    WHOLE_PACK,
    DrawnRows,
    Grouped,
    ListedRow,
    ListedRows,
    Listing,
    groups_of,
    packs_of,
)
from energon_bridge.stream.grouping import Groups
from energon_bridge.stream.passes import FinitePlan
from energon_bridge.stream.pipeline import Pipeline
from energon_bridge.stream.state import BufferedRefs, Counts, Stage
from energon_bridge.topology import WorkerConfig

T = TypeVar("T")

logger = logging.getLogger(__name__)

_BLOCK = 256
"""Rows whose contents a rank holds at a time while it asks for their groups."""


def listing_of_pass(
    data: Description, plan: RunPlan, config: WorkerConfig, epoch: int, delivered: Collection[int]
) -> tuple[Listing, Counts]:
    """Return the rows of a pass in order, and what this rank counted in listing them.

    `delivered` are the leaves of which the run has delivered something.

    All ranks must call it where torch.distributed is initialised; where it is not, each makes the whole list itself.

    Raises:
        EmptyDatasetError: There are draws, and every one of them was left out.
    """
    draws = draws_of_pass(data, plan, epoch)
    enough = math.inf if data.limit is None else data.limit * config.dp_size
    logger.info("%s %d samples before the pass begins", "grouping" if data.grouped else "packing", draws.num_draws)
    counts = Counts()
    pipeline = open_pipeline(data, plan, config, delivered=delivered)
    try:
        listing = Listing(rows=(), ends=None)
        if data.packing_buffer_size is not None:
            most = math.inf if data.grouped else enough * data.rows
            listing = _packs(pipeline, draws, data.packing_buffer_size, config, most, counts)
        if data.grouped:
            packs = data.packing_buffer_size is not None
            rows = ListedRows(pipeline, listing) if packs else DrawnRows(pipeline, draws)
            listing = _groups(pipeline, rows, data, config, enough, counts)
    finally:
        pipeline.flush_reports()
        pipeline.close()
    if draws.num_draws and not listing.rows and not data.batch_drop_last:
        raise EmptyDatasetError(
            f"{pipeline.paths}: every one of the {draws.num_draws} samples of the split was skipped, or packed by none"
        )
    return listing, counts


def _packs(
    pipeline: Pipeline, plan: FinitePlan, buffer: int, config: WorkerConfig, enough: float, counts: Counts
) -> Listing:
    """Return the packs of a pass, at least `enough` of them, made of `buffer` draws at a time."""

    def select(start: int, stop: int, counted: Counts) -> BufferedRefs:
        return BufferedRefs.of((Stage.PACK, pack, 0) for pack in packs_of(pipeline, plan, start, stop, counted))

    rows: list[ListedRow] = []
    for found in _blocks(select, plan.num_draws, buffer, config, counts):
        rows += [(refs, WHOLE_PACK) for _, refs, _ in found.entries()]
        if len(rows) >= enough:
            break
    return Listing(rows=rows, ends=None)


def _groups(
    pipeline: Pipeline,
    rows: DrawnRows | ListedRows,
    data: Description,
    config: WorkerConfig,
    enough: float,
    counts: Counts,
) -> Listing:
    """Return the rows of a pass group by group, at least `enough` microbatches."""

    def ask(start: int, stop: int, counted: Counts) -> list[Grouped]:
        return groups_of(pipeline, rows, start, stop, counted)

    groups: Groups[ListedRow] = Groups(data.batch_size)
    batches: list[list[ListedRow]] = []
    for found in _blocks(ask, rows.count, _BLOCK, config, counts):
        batches += [full for full in (groups.add(row, key, size) for row, key, size in found) if full]
        if len(batches) >= enough:
            break
    else:
        batches += [] if data.batch_drop_last else groups.left()
    ends: list[int] = []
    for batch in batches:
        ends.append(len(batch) + (ends[-1] if ends else 0))
    return Listing(rows=[row for batch in batches for row in batch], ends=ends)


def _blocks(
    make: Callable[[int, int, Counts], T], total: int, block: int, config: WorkerConfig, counts: Counts
) -> Iterator[T]:
    """Yield what is made of each block of [0, total), in order; ranks that can reach each other share the work."""
    shared = config.dp_size > 1 and torch.distributed.is_initialized()
    ranks, rank = (config.dp_size, config.dp_rank) if shared else (1, 0)
    for first in range(0, total, block * ranks):
        start = first + rank * block
        own: T | None = None
        if start < total:
            counted = Counts()
            own = make(start, min(start + block, total), counted)
            # Of several ranks that each make the whole list, one counts it.
            if shared or config.dp_rank == 0:
                counts.add(counted)
        found: list[Any] = [own]
        if shared:
            found = [None] * ranks
            torch.distributed.all_gather_object(found, own, group=config.data_parallel_group)
        yield from (one for one in found if one is not None)
