"""Joins tensors of several samples: stacked if their shapes agree, zero-padded if they differ.

Decoded images are views: shape (channels, height, width) over memory in the order (height, width, channels). Stacking
such views directly would gather every row one element at a time (16 times slower for 256 px images). So rows are
stacked in the order of their memory, and the *result* is viewed in the requested order: values and shapes are those of
`torch.stack`, the copy runs at the speed of memcpy, and a batch of images is channels-last in torch's terms. Rows that
were decoded side by side (`slabs`) are not copied at all. In a worker process the result is written straight to memory
shared with the training process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch

from energon_bridge.errors import ConfigurationError, UnfitSampleError
from energon_bridge.samples import streaming
from energon_bridge.samples.slabs import SLABS, lent

_PAGE = 4096
"""Bytes of a row from which a separate copy per row pays off."""
_NUMPY_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    dtype: torch.empty(0, dtype=dtype).numpy().dtype
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64, torch.bool)
}


def is_tensor_column(values: Sequence[Any]) -> bool:
    """Return whether a field holds a tensor in every row."""
    return bool(values) and all(isinstance(value, torch.Tensor) for value in values)


def batch_stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack n tensors of one shape (…) into (n, …). Raises UnfitSampleError if the shapes differ.

    Examples:
        >>> batch_stack([torch.zeros(3), torch.ones(3)]).shape
        torch.Size([2, 3])
    """
    _check_not_empty(tensors)
    if (adopted := _adopted(tensors)) is not None:
        return adopted
    shape = tensors[0].shape
    for row, tensor in enumerate(tensors):
        if tensor.shape != shape:
            raise UnfitSampleError(
                f"batch_stack needs tensors of one shape, but row 0 has {tuple(shape)} and row {row} has "
                f"{tuple(tensor.shape)}; use batch_pad_stack, or make them equal in encode_sample"
            )
    return _stack(tensors)


def batch_pad_stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack n tensors of one rank into (n, …), each dimension as large as its largest, the rest zero.

    Examples:
        >>> batch_pad_stack([torch.tensor([1, 2, 3]), torch.tensor([4])])
        tensor([[1, 2, 3],
                [4, 0, 0]])

    Rows of different dtypes are promoted as torch promotes them. Raises UnfitSampleError if the ranks differ.
    """
    _check_not_empty(tensors)
    if (adopted := _adopted(tensors)) is not None:
        return adopted
    first = tensors[0]
    if all(tensor.shape == first.shape for tensor in tensors):
        return _stack(tensors)
    for row, tensor in enumerate(tensors):
        if tensor.ndim != first.ndim:
            raise UnfitSampleError(
                f"batch_pad_stack needs tensors of one rank, but row 0 has shape {tuple(first.shape)} and row {row} "
                f"has {tuple(tensor.shape)}; make them equal in encode_sample, or collate this field in batch"
            )
    largest = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
    order = _memory_order(first)
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    memory = _zeros([len(tensors), *(largest[dim] for dim in order)], dtype, first.device)
    batch = memory.permute(_undo(order))
    for row, tensor in zip(batch, tensors, strict=True):
        row[tuple(slice(size) for size in tensor.shape)] = tensor
    return batch


def concat_pad(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join tensors of one rank along dimension 0, each other dimension as large as its largest, the rest zero.

    Examples:
        >>> concat_pad([torch.tensor([[1, 2]]), torch.tensor([[3]])])
        tensor([[1, 2],
                [3, 0]])

    Rows of different dtypes are promoted as torch promotes them. Raises UnfitSampleError if ranks differ or are 0.
    """
    _check_not_empty(tensors)
    first = tensors[0]
    for row, tensor in enumerate(tensors):
        if tensor.ndim != first.ndim or not tensor.ndim:
            raise UnfitSampleError(
                f"concat_pad needs tensors of one rank, at least 1, but number 0 has shape {tuple(first.shape)} and "
                f"number {row} has {tuple(tensor.shape)}; make them equal before joining batches"
            )
    slabs = SLABS.get()
    if slabs is not None and (adopted := slabs.adopt_joined(tensors)) is not None:
        return adopted
    if len({tensor.shape[1:] for tensor in tensors}) == 1:
        return _cat(tensors)
    largest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    joined = _zeros([sum(map(len, tensors)), *largest], dtype, first.device)
    start = 0
    for tensor in tensors:
        joined[(slice(start, start + len(tensor)), *map(slice, tensor.shape[1:]))] = tensor
        start += len(tensor)
    return joined


def _adopted(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    slabs = SLABS.get()
    return None if slabs is None else slabs.adopt(tensors)


def _stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    first = tensors[0]
    order = None if first.is_contiguous() else _memory_order(first)
    rows = tensors if order is None else [tensor.permute(*order) for tensor in tensors]
    if all(map(_is_plain, rows)):
        # numpy copies on this thread; torch would start threads that compete with the decoding threads
        batch = torch.from_numpy(_stack_arrays([row.numpy() for row in rows]))
    else:
        batch = torch.stack(list(rows))
    return batch if order is None else batch.permute(_undo(order))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether numpy can handle a tensor as torch would."""
    usual = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    return usual and tensor.dtype in _NUMPY_DTYPES and not tensor.requires_grad


def _stack_arrays(rows: list[np.ndarray]) -> np.ndarray:
    first = rows[0]
    large = first.nbytes >= _PAGE and len(rows) * first.nbytes >= streaming.LARGE
    if not large or any(row.dtype != first.dtype or not row.flags.c_contiguous for row in rows):
        return np.stack(rows)
    batch = lent((len(rows), *first.shape), first.dtype)
    for place, row in zip(batch, rows, strict=True):
        streaming.copy(row, place)
    return batch


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu" or dtype not in _NUMPY_DTYPES or math.prod(shape) * dtype.itemsize < streaming.LARGE:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = lent(shape, _NUMPY_DTYPES[dtype])
    memory.fill(0)
    return torch.from_numpy(memory)


def _cat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    alike = all(_is_plain(one) and one.is_contiguous() and one.dtype == tensors[0].dtype for one in tensors)
    if not alike or sum(tensor.nbytes for tensor in tensors) < streaming.LARGE:
        return torch.cat(list(tensors))
    rows = [tensor.numpy() for tensor in tensors]
    memory = lent((sum(map(len, rows)), *rows[0].shape[1:]), rows[0].dtype)
    if min(row.nbytes for row in rows) < _PAGE:
        return torch.from_numpy(np.concatenate(rows, out=memory))
    start = 0
    for row in rows:
        streaming.copy(row, memory[start : start + len(row)])
        start += len(row)
    return torch.from_numpy(memory)


def _memory_order(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions of a tensor, from the largest stride to the smallest."""
    strides = tensor.stride()
    return sorted(range(tensor.ndim), key=lambda dim: -strides[dim])


def _undo(order: Sequence[int]) -> list[int]:
    """Return the permutation that restores the dimensions of a batch of rows laid out by `order`, the row first."""
    return [0, *(1 + order.index(dim) for dim in range(len(order)))]


def _check_not_empty(tensors: Sequence[torch.Tensor]) -> None:
    if not tensors:
        raise ConfigurationError("nothing to stack: a batch needs at least one row")
