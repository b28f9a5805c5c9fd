"""Data as bytes and back, without pickling anything that could run code: what `to_cache` writes.

Numbers, texts, bytes, tensors, arrays, and lists, tuples and dicts of them. Format: torch's file format, read with
`weights_only=True`; containers are lists that begin with a letter (`l`, `t`, `d`), an array is `["a", npy bytes]`.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch

_PLAIN = (type(None), bool, int, float, str, bytes)


def to_bytes(data: Any) -> bytes:
    """Return data as bytes; raises TypeError, naming the type, for what cannot be written like this."""
    file = io.BytesIO()
    torch.save(_tagged(data), file)
    return file.getvalue()


def from_bytes(data: bytes) -> Any:
    """Return what `to_bytes` was given, made anew."""
    return _untagged(torch.load(io.BytesIO(data), weights_only=True))


def _tagged(data: Any) -> Any:
    kind = type(data)
    if kind in _PLAIN:
        return data
    if kind is torch.Tensor and data.device.type == "cpu" and not data.requires_grad:
        return data if data.untyped_storage().nbytes() == data.nbytes else data.clone()
    if kind is np.ndarray and not data.dtype.hasobject:
        file = io.BytesIO()
        np.lib.format.write_array(file, data, allow_pickle=False)
        return ["a", file.getvalue()]
    if kind is dict:
        return ["d", [[_tagged(key), _tagged(value)] for key, value in data.items()]]
    if kind is list or kind is tuple:
        return ["l" if kind is list else "t", *(_tagged(item) for item in data)]
    raise TypeError(f"{kind.__module__}.{kind.__qualname__}")


def _untagged(data: Any) -> Any:
    if type(data) is not list:
        return data
    tag, *items = data
    if tag == "a":
        return np.lib.format.read_array(io.BytesIO(items[0]), allow_pickle=False)
    if tag == "d":
        return {_untagged(key): _untagged(value) for key, value in items[0]}
    untagged = [_untagged(item) for item in items]
    return untagged if tag == "l" else tuple(untagged)
