"""The pipeline of one process, and the listing of a pass that is packed or grouped."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch

from energon_bridge.errors import EmptyDatasetError
from energon_bridge.format.dataset import PreparedDataset
from energon_bridge.format.join import JoinedDataset
from energon_bridge.format.jsonl import JsonlDataset
from energon_bridge.loader.run_plan import RunPlan
from energon_bridge.plan.choose import PassDraws
from energon_bridge.stream.draws import SAMPLE
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
from energon_bridge.stream.pipeline import Pipeline
from energon_bridge.stream.settings import StreamSettings
from energon_bridge.stream.state import BufferedRefs, Counts, SampleRef, Stage
from energon_bridge.stream.watchdog import WatchdogSettings
from energon_bridge.task_encoder.images import IMAGE_EXTENSIONS
from energon_bridge.topology import WorkerConfig

_READ_BYTES = 256 << 20
"""Bytes allowed for the rounds of all lanes of a process; beyond that, draws are read one microbatch at a time."""
_FAR_READERS = 16
"""Rounds read ahead at the same time if storage answers slowly."""
_LEAST_AHEAD = 4
"""Draws of a lane read ahead, at least, if rounds are too large."""
_TOGETHER_BYTES, _TOGETHER = 64 << 20, 1024
"""A lane reads several rounds of a leaf together, up to so many bytes and samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a worker process knows about itself.

    Attributes:
        number: Its number among the workers of its rank.
        words: Where its threads write what they are doing (`Board.activities`).
        said: Called after each message of its watchdog.
        barred: Samples that must not be tried again, by `user_key` of their leaf and index.
        careful: Whether it does one thing at a time, so that it is certain what kills it.
    """

    number: int
    words: Sequence[memoryview]
    said: Callable[[], None]
    barred: frozenset[tuple[int, int]]
    careful: bool


def open_pipeline(
    plan: RunPlan,
    threads: int | None = None,
    delivered: Collection[int] = (),
    watchdog: WatchdogSettings | None = None,
    worker: WorkerFacts | None = None,
) -> Pipeline:
    """Build what loads, encodes and batches in one process.

    Args:
        plan: The plan of the run.
        threads: Overrides the number of threads in the configuration.
        delivered: Leaves that the run has delivered samples of.
        watchdog: How long a microbatch may take; None: as long as it likes.
        worker: What a worker process knows about itself; None: this is the training process.
    """
    data, config = plan.data, plan.config
    run = data.settings
    decodes = run.task_encoder.decoder is not None and any(_decodes_media(leaf.dataset) for leaf in data.leaves)
    if worker is not None and worker.careful:
        threads = 0
    elif threads is None:
        threads = config.threads if decodes else 0
        # A single loading thread would only pass the interpreter lock back and forth with the worker's own thread.
        threads = 0 if config.num_workers and threads == 1 else threads
    lanes = -(-plan.num_lanes // (config.dp_size * config.processes))
    # Approximate bytes if every lane holds one sample of every leaf.
    unit = lanes * sum(max(1, int(leaf.dataset.shard_sizes.sum()) // leaf.dataset.num_samples) for leaf in data.leaves)
    is_far = any(leaf.is_far for leaf in data.leaves)
    settings = StreamSettings(
        run=run,
        config=config,
        lanes=lanes,
        threads=threads,
        reads_rounds=unit * max(run.shuffle_buffer_size, 4 * run.parallel_shard_iters) <= _READ_BYTES,
        read_together=min(_TOGETHER, _TOGETHER_BYTES // unit),
        background_reads=_FAR_READERS if is_far else int(not config.num_workers),
        draws_ahead=min(_TOGETHER, max(_LEAST_AHEAD, _TOGETHER_BYTES // unit)) if is_far else 0,
        failure_log=data.failure_log,
        delivered=delivered,
        words=() if worker is None else worker.words,
        barred=frozenset() if worker is None else worker.barred,
        in_worker=worker is not None,
    )
    pipeline = Pipeline(plan.leaves, settings)
    if watchdog is not None and worker is None:
        pipeline.watch(watchdog, f"rank {config.dp_rank}")
    elif watchdog is not None and worker is not None:
        pipeline.watch(watchdog, f"rank {config.dp_rank}, worker {worker.number}", worker.said)
    return pipeline


def _decodes_media(dataset: PreparedDataset | JoinedDataset) -> bool:
    """Return whether decoding pays for threads: image decoders release the interpreter lock."""
    if isinstance(dataset, JoinedDataset):
        return any(_decodes_media(part.dataset) for part in dataset.parts)
    if isinstance(dataset, JsonlDataset):
        return False
    field_map = dataset.field_map
    return field_map is None or any(p.rpartition(".")[2].lower() in IMAGE_EXTENSIONS for p in field_map.parts)


# ---------------------------------------------------------------------------------------------------------------------
# The listing of a finite pass whose encoder packs or groups: all ranks agree on it before the first step.
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


def listing_of_pass(plan: RunPlan, epoch: int, delivered: Collection[int]) -> tuple[Listing, Counts]:
    """Return the rows of a pass in order, and the counts of this rank from listing them.

    `delivered` are the leaves that the run has delivered samples of. If torch.distributed is initialised, all ranks
    must call this; otherwise each makes the whole list by itself.

    Raises:
        EmptyDatasetError: There are draws, but every one of them was left out.
    """
    data, config, draws = plan.data, plan.config, plan.draws_of_pass(epoch)
    run = data.settings
    enough = math.inf if run.limit is None else run.limit * config.dp_size
    logger.info("%s %d samples before the pass starts", "grouping" if data.grouped else "packing", draws.num_draws)
    counts = Counts()
    pipeline = open_pipeline(plan, delivered=delivered)
    try:
        listing = Listing(rows=(), ends=None)
        if run.packing_buffer_size is not None:
            most = math.inf if data.grouped else enough * run.rows
            listing = _packs(pipeline, draws, run.packing_buffer_size, config, most, counts)
        if data.grouped:
            packs = run.packing_buffer_size is not None
            rows = ListedRows(pipeline, listing) if packs else DrawnRows(pipeline, draws)
            listing = _groups(pipeline, rows, plan, enough, counts)
    finally:
        pipeline.flush_reports()
        pipeline.close()
    if draws.num_draws and not listing.rows and not run.batch_drop_last:
        raise EmptyDatasetError(
            f"{pipeline.paths}: every one of the {draws.num_draws} samples of the split was skipped or left out of "
            "packs"
        )
    return listing, counts


def _packs(
    pipeline: Pipeline, draws: PassDraws, buffer: int, config: WorkerConfig, enough: float, counts: Counts
) -> Listing:
    """Return the packs of a pass, at least `enough` of them, selected from `buffer` draws at a time."""

    def select(start: int, stop: int, counted: Counts) -> BufferedRefs:
        return BufferedRefs.of((Stage.PACK, pack, 0) for pack in packs_of(pipeline, draws, start, stop, counted))

    packs: list[list[SampleRef]] = []
    for found in _sections(select, draws.num_draws, buffer, config, counts):
        packs += [refs for _, refs, _ in found.entries()]
        if len(packs) >= enough:
            break
    if pipeline.own.by_length:
        rows = [((ref,), SAMPLE) for refs in packs for ref in refs]
        return Listing(rows=rows, ends=list(accumulate(map(len, packs))))
    return Listing(rows=[(refs, WHOLE_PACK) for refs in packs], ends=None)


def _groups(pipeline: Pipeline, rows: DrawnRows | ListedRows, plan: RunPlan, enough: float, counts: Counts) -> Listing:
    """Return the rows of a pass group by group, at least `enough` microbatches."""

    def ask(start: int, stop: int, counted: Counts) -> list[Grouped]:
        return groups_of(pipeline, rows, start, stop, counted)

    groups: Groups[ListedRow] = Groups(plan.data.settings.batch_size)
    batches: list[list[ListedRow]] = []
    for found in _sections(ask, rows.count, _SECTION, plan.config, counts):
        batches += [full for full in (groups.add(row, key, size) for row, key, size in found) if full]
        if len(batches) >= enough:
            break
    else:
        drop = plan.data.settings.batch_drop_last
        batches += [] if drop else groups.left()
        if drop and plan.config.dp_rank == 0 and groups.num_rows > _NOTABLE * rows.count:
            logger.warning("%s: batch_drop_last drops %s, of %d of a pass", pipeline.paths, groups, rows.count)
    ends: list[int] = []
    for batch in batches:
        ends.append(len(batch) + (ends[-1] if ends else 0))
    return Listing(rows=[row for batch in batches for row in batch], ends=ends)


def _sections(
    make: Callable[[int, int, Counts], T], total: int, section: int, config: WorkerConfig, counts: Counts
) -> Iterator[T]:
    """Yield the result for each section of [0, total), in order; ranks that can reach each other share the work."""
    shared = config.dp_size > 1 and torch.distributed.is_initialized()
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
            torch.distributed.all_gather_object(found, own, group=config.data_parallel_group)
        yield from (one for one in found if one is not None)
