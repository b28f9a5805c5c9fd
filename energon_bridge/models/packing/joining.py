"""Joining batches: several of one type as one batch with the rows of all.

Tensors are joined along dimension 0 and zero-padded in the others, lists are joined; dicts, dataclasses and named
tuples are joined field by field; anything else stays a list with one entry for each batch. The meta fields of a batch
keep their meaning: one key, restore key and mask entry for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, TypeVar

import torch

from energon_bridge.core.encoder.collate import is_record_type, make_record, read_fields
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.samples import Batch
from energon_bridge.core.samples.stacking import concat_pad, is_tensor_column

BatchT = TypeVar("BatchT")


def generic_concat(batch: Sequence[Any]) -> Any:
    """Join the values of one field of several batches by what they are (see the module).

    Examples:
        >>> generic_concat([{"tokens": torch.tensor([[1, 2]])}, {"tokens": torch.tensor([[3]])}])
        {'tokens': tensor([[1, 2],
                [3, 0]])}

    Raises ConfigurationError if tensors differ in rank or dicts in their keys.
    """
    if is_tensor_column(batch):
        return concat_pad(batch)
    kinds = {type(value) for value in batch}
    kind = kinds.pop() if len(kinds) == 1 else object
    if issubclass(kind, list):
        return list(chain.from_iterable(batch))
    if kind is type(None):
        return None
    if not is_record_type(kind):
        return list(batch)
    records = [read_fields(value) for value in batch]
    if any(record.keys() != records[0].keys() for record in records):
        names = sorted(set().union(*records) - set(records[0]).intersection(*records))
        raise ConfigurationError(f"batches can only be joined if all have the same fields, but not all have {names}")
    joined = {name: generic_concat([record[name] for record in records]) for name in records[0]}
    if issubclass(kind, Batch):
        joined |= _joined_meta(batch)
    return make_record(joined, kind)


def homogeneous_concat_mix(samples: Sequence[BatchT]) -> BatchT:
    """Join batches of one type into one batch. Raises ConfigurationError if they differ in type or there are none.

    Examples:
        >>> one, two = (Batch.from_samples([TextSample(__key__=key, text=key)]) for key in "ab")
        >>> homogeneous_concat_mix([one, two]).__key__
        ['a', 'b']
    """
    kinds = sorted({type(sample).__name__ for sample in samples})
    if len(kinds) != 1:
        raise ConfigurationError(f"batches can only be joined if all have one type, got {', '.join(kinds) or 'none'}")
    joined: BatchT = generic_concat(samples)
    return joined


def _joined_meta(batches: Sequence[Batch]) -> dict[str, Any]:
    sources = [batch.__sources__ for batch in batches if batch.__sources__ is not None]
    # A batch without a mask has only real rows; one without subflavors has none in any row.
    rows = [len(batch.__key__) for batch in batches]
    masked = any(batch.__valid__ is not None for batch in batches)
    labelled = any(batch.__subflavors__ is not None for batch in batches)
    masks = [
        torch.ones(count, dtype=torch.bool) if batch.__valid__ is None else batch.__valid__
        for batch, count in zip(batches, rows, strict=True)
    ]
    labels = [batch.__subflavors__ or [None] * count for batch, count in zip(batches, rows, strict=True)]
    return {
        "__restore_key__": tuple(chain.from_iterable(batch.__restore_key__ for batch in batches)),
        "__sources__": tuple(chain.from_iterable(sources)) if sources else None,
        "__subflavors__": list(chain.from_iterable(labels)) if labelled else None,
        "__valid__": torch.cat(masks) if masked else None,
    }
