"""Rows of microbatches that are still to come: encoded samples or packs, with the references to encode them again.

A microbatch of draws alone is never made into rows: it keeps the columns that it was drawn in (`Taken`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from energon_bridge.core.encoder.deferred import Deferred, field_items
from energon_bridge.core.encoder.hooks import NUMBER
from energon_bridge.core.stream.lane_state import COLUMNS, Counts, LaneState, PlainKey, SampleRef, Stage, pack_key
from energon_bridge.core.stream.loading import PendingLoads, SampleColumns
from energon_bridge.core.stream.pipeline import Pipeline

_BYTES = COLUMNS.index("bytes")
_BYTES_OF_NUMBER = 32
"""Bytes of a Python number in a list, about."""
SAMPLE = -1
"""The `output` of a row that is a single sample, not a pack."""


@dataclass(slots=True)
class BatchRow:
    """One row.

    Attributes:
        members: The sample, or the samples of the pack.
        output: The number of this row among the outputs of its pack; `SAMPLE` for a single sample.
        content: What goes into the batch; None if it must be encoded again.
        size: Its bytes, about.
        read: Of a sample that waits to be packed: the bytes read for it, which are not counted yet.
    """

    members: tuple[SampleRef, ...]
    output: int = SAMPLE
    content: Any = None
    size: int = 0
    read: int = 0

    def key(self, pipeline: Pipeline) -> PlainKey:
        """Return its restore key."""
        keys = [(pipeline.leaves[ref.leaf].identity, ref.sample, ref.epoch, ref.output) for ref in self.members]
        return keys[0] if self.output == SAMPLE else pack_key(self.output, keys)


def encode_rows(
    pipeline: Pipeline, loads: PendingLoads, counts: Counts, numbers: Iterator[int] | None = None
) -> Iterator[list[BatchRow]]:
    """Encode the loads of some picks, and yield the rows of each; `numbers` are the picks' numbers that hooks see."""
    while len(loads):
        loaded = loads.take()
        for leaf, sample, key, size in zip(loaded.leaves, loaded.samples, loaded.keys, loaded.sizes, strict=True):
            counts.of(leaf)[_BYTES] += size
            if numbers is not None:
                NUMBER.set(next(numbers))
            outputs = pipeline.encode(leaf, sample, key, counts)
            yield [BatchRow((SampleRef(leaf, *each[1:]),), SAMPLE, encoded) for each, encoded in outputs]


class Taken(NamedTuple):
    """What a microbatch is made of: the samples or packs, their restore keys, the leaves of all samples in them.

    `rows` gives them as rows, for the state of a lane, where hooks make several batches of them.
    """

    samples: Sequence[Any]
    keys: Sequence[PlainKey]
    leaves: list[int]
    rows: Callable[[], list[BatchRow]]


def taken_of(pipeline: Pipeline, rows: list[BatchRow]) -> Taken:
    """Return the samples, restore keys and leaves of a microbatch of some rows."""
    samples = [row.content for row in rows]
    keys = [row.key(pipeline) for row in rows]
    leaves = [ref.leaf for row in rows for ref in row.members]
    return Taken(samples, keys, leaves, lambda: rows)


def batch_rows(pipeline: Pipeline, rows: list[BatchRow], lane: int, number: int, counts: Counts) -> list[Any]:
    """Return the microbatches of some rows (see `Pipeline.batches`); none of no rows."""
    return pipeline.batches(*taken_of(pipeline, rows)[:3], lane, number, counts)


def count_read(pipeline: Pipeline, rows: Sequence[BatchRow], counts: Counts) -> None:
    """Count the bytes read for samples that have waited and leave now."""
    if len(pipeline.leaves) == 1:
        counts.of(0)[_BYTES] += sum([row.read for row in rows])
        return
    for row in rows:
        counts.of(row.members[0].leaf)[_BYTES] += row.read


def rows_of(encoded: SampleColumns) -> list[BatchRow]:
    """Return encoded samples as rows."""
    columns = zip(encoded.samples, encoded.keys, encoded.leaves, encoded.sizes, strict=True)
    return [
        BatchRow((SampleRef(leaf, index, epoch, output),), SAMPLE, sample, size_of(sample, size), 0 if output else size)
        for sample, (_, index, epoch, output), leaf, size in columns
    ]


def size_of(sample: Any, read: int) -> int:
    """Return the approximate bytes of an encoded sample without its meta fields; at least the bytes read for it."""
    if isinstance(sample, torch.Tensor):
        return max(sample.nbytes, read)
    return max(sum([_bytes_in(value) for name, value in field_items(sample) if not name.startswith("__")]), read)


def _bytes_in(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.nbytes
    if isinstance(value, (bytes, bytearray, str)):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_bytes_in, value.values()))
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], (int, float)):
            return _BYTES_OF_NUMBER * len(value)
        return sum(map(_bytes_in, value))
    if isinstance(value, Deferred) and hasattr(value, "data"):  # an image
        return len(value.data) if isinstance(value.data, bytes) else 0  # or in storage
    if isinstance(value, Image.Image):
        return value.width * value.height * len(value.getbands())
    return sum(_bytes_in(one) for _, one in field_items(value)) if is_dataclass(value) else 0


def waiting_rows(state: LaneState, stage: Stage) -> list[BatchRow]:
    """Return the rows that wait in a stage, by the state of a lane."""
    return [BatchRow(tuple(refs), output) for _, refs, output in state.held.only(stage).entries()]
