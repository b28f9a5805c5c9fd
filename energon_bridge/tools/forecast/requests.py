"""What a run asks a store for: requests and bytes, by going through its order and reading nothing but indexes.

A lane reads a round of a leaf at a time, or several together, and neighbouring samples in one request. The rounds and
requests counted here are those of `core/stream/reader.py` and `cloud/remote.py`. Each process reads the index of each
shard once. Retries, opening the datasets, and large samples of which only parts are read (videos) are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from energon_bridge.cloud.remote import PIECE
from energon_bridge.core.format.dataset import PreparedDataset, read_index
from energon_bridge.core.loader.opening import open_pipeline
from energon_bridge.core.order.choose import Chooser, RoundCache, blend_position
from energon_bridge.core.order.rng import IntArray
from energon_bridge.core.order.topology import microbatches_before
from energon_bridge.core.storage.ranges import GAP
from energon_bridge.tools.forecast.planned_run import Run

_DRAWS = 1 << 18
"""Draws that are gone through; those of a longer run are taken to be like these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreForecast:
    """What all processes of a run ask stores for.

    Attributes:
        requests, bytes: For samples.
        index_requests, index_bytes: For indexes of shards.
    """

    requests: float
    bytes: float
    index_requests: int
    index_bytes: int


def store_forecast(run: Run, microbatches: int) -> StoreForecast | None:
    """Return what a run asks stores for in its first microbatches; None if none of its shards is in one.

    Datasets that are not in a store (`is_far`) ask for nothing; `not_counted` are left out. Raises StorageError.
    """
    far = {number: leaf.dataset for number, leaf in enumerate(run.spec.ordered) if leaf.is_far}
    tars = {number: dataset for number, dataset in far.items() if type(dataset) is PreparedDataset}
    if not tars:
        return None
    config = run.plan.config
    processes = config.dp_size * config.processes
    lanes = run.num_lanes
    draws = [round(microbatches_before(lane, microbatches, lanes) * run.samples_per_batch) for lane in range(lanes)]
    reads = _Reads(run, tars)
    seen = 0
    indexes: list[tuple[int, int]] = []
    for process in range(min(processes, lanes)):  # of each, all of its lanes, for what they have read of indexes
        before = seen
        for lane in range(process, lanes, processes):
            count = min(draws[lane], _DRAWS - seen)
            reads.read(lane, count)
            seen += count
        indexes.append(reads.indexes())
        if seen in (_DRAWS, before):
            break
    reads.close()
    scale = sum(draws) / seen if seen else 0.0
    more = min(processes, lanes) / len(indexes)
    return StoreForecast(
        requests=reads.requests * scale,
        bytes=reads.bytes * scale,
        index_requests=round(sum(count for count, _ in indexes) * more),
        index_bytes=round(sum(size for _, size in indexes) * more),
    )


def not_counted(run: Run) -> list[str]:
    """Return the paths of datasets in stores, such as tables, whose requests do not follow from indexes."""
    far = (leaf.dataset for leaf in run.spec.ordered if leaf.is_far)
    return [dataset.path for dataset in far if type(dataset) is not PreparedDataset]


@dataclass(slots=True, eq=False)
class _Open:
    """A round of a leaf: sample and epoch of each draw, which draws are read, and how many were asked for."""

    leaf: int
    first: int
    indices: IntArray
    epochs: IntArray
    read: NDArray[np.bool_]
    asked: int = 0


class _Reads:
    """Counts the requests of lanes, as they choose their draws."""

    def __init__(self, run: Run, far: Mapping[int, PreparedDataset]) -> None:
        self._far = far
        self._rows = run.spec.rows
        self._blend = run.plan.blend
        self._leaves = run.plan.leaves
        self._pipeline = open_pipeline(run.plan, 0)
        together = max(1, self._pipeline.settings.read_together)
        self._rounds = RoundCache(
            self._leaves,
            lambda leaf, loaded: _Open(
                leaf, loaded.first, loaded.indices, loaded.epochs, np.zeros(loaded.indices.size, dtype=bool)
            ),
            together=lambda order: 1 if order.is_dealt else together,
        )
        self._offsets: dict[tuple[int, int], IntArray] = {}
        self._touched: dict[tuple[int, int], int] = {}
        self.requests = 0
        self.bytes = 0

    def close(self) -> None:
        """Close what was opened."""
        self._pipeline.close()

    def indexes(self) -> tuple[int, int]:
        """Return how many indexes the lanes since the last call have read, and their bytes."""
        counts = len(self._touched), sum(self._touched.values())
        self._touched = {}
        return counts

    def read(self, lane: int, draws: int) -> None:
        """Go through the first draws of a lane."""
        settings = self._pipeline.settings
        chooser = Chooser(self._rounds, self._blend, lane, blend_position(self._leaves, self._blend, lane, 0))
        for drawn in range(0, draws, self._rows):
            for span in chooser.spans(min(self._rows, draws - drawn)):
                opened = span.round
                if not drawn:  # the first microbatch reads only its own draws
                    self._read(opened, span.low, span.high)
                elif settings.reads_rounds:
                    self._read(opened, span.low, len(opened.indices))
                    upcoming = self._rounds.of(lane, span.leaf)
                    if upcoming.current is opened and upcoming.upcoming is None:
                        following = upcoming.following()
                        self._read(following, 0, len(following.indices))
                elif settings.draws_ahead:
                    self._read_some(opened, span.low, settings.draws_ahead)
                    upcoming = self._rounds.of(lane, span.leaf)
                    if upcoming.current is opened and opened.asked >= len(opened.indices):
                        self._read_some(upcoming.upcoming or upcoming.following(), 0, settings.draws_ahead)
                self._read(opened, span.low, span.high)
        self._rounds.drop(lane)

    def _read_some(self, opened: _Open, low: int, some: int) -> None:
        if opened.asked < min(low + some // 2, len(opened.indices)):
            start = max(low, opened.asked)
            opened.asked = low + some
            self._read(opened, start, opened.asked)

    def _read(self, opened: _Open, low: int, high: int) -> None:
        """Count what reading some draws of a round asks for."""
        unread = low + np.flatnonzero(~opened.read[low:high])
        if not unread.size or opened.leaf not in self._far:
            return
        opened.read[unread] = True
        dataset = self._far[opened.leaf]
        samples = np.sort(opened.indices[unread])
        ends = np.cumsum(dataset.shard_counts)
        shards = np.searchsorted(ends, samples, side="right")
        local = samples - (ends[shards] - dataset.shard_counts[shards])
        for shard in np.unique(shards).tolist():
            offsets = self._index(opened.leaf, shard)
            here = local[shards == shard]
            begins = offsets[here].astype(np.int64)
            stops = offsets[here + 1].astype(np.int64)
            new = np.flatnonzero(begins[1:] - stops[:-1] > GAP)
            lengths = stops[np.append(new, len(here) - 1)] - begins[np.append(0, new + 1)]
            self.requests += int((-(-lengths // PIECE)).sum())
            self.bytes += int(lengths.sum())

    def _index(self, leaf: int, shard: int) -> IntArray:
        key = leaf, shard
        if key not in self._offsets:
            self._offsets[key] = read_index(self._far[leaf], shard)
        self._touched[key] = self._offsets[key].nbytes
        return self._offsets[key]
