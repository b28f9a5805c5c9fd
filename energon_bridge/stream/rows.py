"""Rows of microbatches to be: encoded samples, or packs of them, with the references that make them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from energon_bridge.stream.draws import Encoded
from energon_bridge.stream.pipeline import PendingLoads, Pipeline
from energon_bridge.stream.reencode import encode_again
from energon_bridge.stream.state import Counts, SampleRef
from energon_bridge.stream.values import RestoreKey
from energon_bridge.task_encoder.deferred import DeferredImage, sample_parser

_AT_A_TIME = 64
"""Samples that are read at a time to be encoded again."""
_NUMBER = 32
"""Bytes of a number in a list."""
SAMPLE = -1
"""Stands for the output of a pack where a row is a sample by itself."""


@dataclass(slots=True)
class Row:
    """One row.

    Attributes:
        members: The sample, or the samples of the pack.
        output: Which of the outputs of its pack it is; `SAMPLE` for a sample.
        content: What goes into the batch; None while it has to be made again.
        size: About its bytes.
    """

    members: tuple[SampleRef, ...]
    output: int
    content: Any
    size: int

    def key(self, pipeline: Pipeline) -> tuple[Any, ...]:
        """Return its restore key."""
        keys = tuple(restore_key(pipeline, ref) for ref in self.members)
        return keys[0] if self.output == SAMPLE else ("Pack", self.output, keys)


def restore_key(pipeline: Pipeline, ref: SampleRef) -> RestoreKey:
    """Return the restore key of a sample."""
    return (pipeline.leaves[ref.leaf].identity, ref.sample, ref.epoch, ref.output)


def rows_of(encoded: Encoded) -> list[Row]:
    """Return encoded samples as rows."""
    columns = zip(encoded.samples, encoded.keys, encoded.leaves, encoded.sizes, strict=True)
    return [
        Row((SampleRef(leaf, index, epoch, output),), SAMPLE, sample, size_of(sample, size))
        for sample, (_, index, epoch, output), leaf, size in columns
    ]


def size_of(sample: Any, read: int) -> int:
    """Return about how many bytes an encoded sample holds, those of its meta fields aside; at least what was read."""
    if isinstance(sample, torch.Tensor):
        return max(sample.nbytes, read)
    return max(sum([_bytes_in(value) for name, value in sample_parser(sample) if not name.startswith("__")]), read)


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
            return _NUMBER * len(value)
        return sum(map(_bytes_in, value))
    if isinstance(value, DeferredImage):
        return len(value.data)
    if isinstance(value, Image.Image):
        return value.width * value.height * len(value.getbands())
    return sum(_bytes_in(one) for _, one in sample_parser(value)) if is_dataclass(value) else 0


def reencode(pipeline: Pipeline, rows: Sequence[Row], counts: Counts, loading: PendingLoads | None = None) -> list[Row]:
    """Encode the samples of rows whose content is gone; return the rows without those that no longer encode.

    A sample that no longer encodes is named in the log and counted for its leaf. `loading` is what was started for
    these samples before, by `load_again`.
    """
    gone = [row for row in rows if row.content is None]
    some = len(gone) if loading is not None else _AT_A_TIME
    for low in range(0, len(gone), max(1, some)):
        part = gone[low : low + some]
        samples = encode_again(pipeline, [row.members[0] for row in part], counts, loading)
        for row, sample in zip(part, samples, strict=True):
            row.content = sample
            row.size = 0 if sample is None else size_of(sample, 0)
    return [row for row in rows if row.content is not None]
