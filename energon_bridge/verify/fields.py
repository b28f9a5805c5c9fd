"""The fields of a batch as digests: what two batches are compared by, without keeping either.

A field is an entry of a dict or dataclass at any depth, named by its path (`image`, `meta.size`); lists and tuples
belong to the field that holds them. Every bit counts: the type, the shape and the bytes of a tensor, the sign of a
zero, the order of a dict. What has no bytes of its own (an open file, a decoder, an object of some class) is *opaque*:
it is named and not compared.
"""

from __future__ import annotations

import hashlib
import reprlib
import struct
import sys
from collections.abc import Iterator, Mapping, Set as AbstractSet
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

_PLAIN = (str, int, bool, complex, type(None), Fraction, PurePath, torch.dtype, torch.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of a batch.

    Attributes:
        digest: Hash of its value, without the opaque parts.
        shown: What an error message says of the value.
        opaque: Types of the parts that are not compared.
    """

    digest: bytes
    shown: str
    opaque: tuple[str, ...]


def fields_of(batch: Any) -> dict[str, Field]:
    """Return the fields of a batch by their paths."""
    return dict(_walk("", batch))


def differing(expected: Mapping[str, Field], found: Mapping[str, Field]) -> list[str]:
    """Return the paths of the fields that only one has, or that differ, in the order of the expected ones."""
    paths = dict.fromkeys([*expected, *found])
    return [path for path in paths if _digest(expected.get(path)) != _digest(found.get(path))]


def _digest(field: Field | None) -> bytes | None:
    return None if field is None else field.digest


def _walk(path: str, value: Any) -> Iterator[tuple[str, Field]]:
    entries = _entries(value)
    if entries is None:
        yield path or "the batch", _field(value)
        return
    # The container itself: its type and the names in it, in their order.
    names = [name for name, _ in entries]
    shown = f"{type(value).__name__} of {', '.join(map(str, names))}"
    yield path or "the batch", replace(_field([_type_name(value), names]), shown=shown)
    for name, entry in entries:
        step = name if isinstance(name, str) else f"[{name!r}]"
        yield from _walk(f"{path}.{step}" if path else step, entry)


def _entries(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the named entries of a dict or dataclass, of which a batch may have more than its fields; else None."""
    if isinstance(value, Mapping):
        return list(value.items())
    if is_dataclass(value) and not isinstance(value, type):
        names = [entry.name for entry in fields(value)]
        extra = [name for name in getattr(value, "__dict__", {}) if name not in names]
        return [(name, getattr(value, name)) for name in [*names, *sorted(extra)]]
    return None


def _field(value: Any) -> Field:
    state = hashlib.blake2b(digest_size=16)
    opaque: dict[str, None] = {}
    _feed(state, value, opaque)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        shown = f"{value.dtype} {tuple(value.shape)} #{state.hexdigest()[:8]}"
    else:
        shown = reprlib.repr(value)
    return Field(digest=state.digest(), shown=shown, opaque=tuple(opaque))


def _feed(state: Any, value: Any, opaque: dict[str, None]) -> None:
    """Add a value to a hash; parts that cannot be added are noted."""
    name = _type_name(value)
    entries = _entries(value)
    if entries is not None:
        state.update(f"{name} {len(entries)}{{".encode())
        for key, entry in entries:
            _feed(state, key, opaque)
            _feed(state, entry, opaque)
    elif isinstance(value, (list, tuple)):
        state.update(f"{name} {len(value)}[".encode())
        for entry in value:
            _feed(state, entry, opaque)
    elif isinstance(value, AbstractSet):
        digests = []
        for entry in value:
            own = hashlib.blake2b(digest_size=16)
            _feed(own, entry, opaque)
            digests.append(own.digest())
        state.update(f"{name} {len(value)}(".encode() + b"".join(sorted(digests)))  # a set has no order to compare
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        state.update(f"{name} {value.dtype} {value.shape}".encode())
        _feed(state, value.tolist(), opaque)
    else:
        data = _bytes_of(value)
        if data is None:
            opaque[name] = None
            data = b""
        state.update(f"{name} {len(data)}:".encode())
        state.update(data)


def _bytes_of(value: Any) -> bytes | None:
    """Return bytes that stand for a value without parts, None for an opaque one."""
    if isinstance(value, torch.Tensor):
        return _tensor_bytes(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{value.dtype} {value.shape} ".encode() + value.tobytes()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, Enum):
        return value.name.encode()
    if isinstance(value, _PLAIN):
        return str(value).encode("utf-8", "surrogatepass")
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(value, pillow.Image):
        return f"{value.mode} {value.size} ".encode() + value.tobytes()
    return None


def _tensor_bytes(tensor: torch.Tensor) -> bytes | None:
    try:
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data: bytes = flat.view(torch.uint8).numpy().tobytes()
    except (RuntimeError, NotImplementedError):  # sparse, nested, quantised: they have no plain bytes
        return None
    return f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + data


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
