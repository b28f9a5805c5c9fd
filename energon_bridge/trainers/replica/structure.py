"""Batches as plain values and tensors, and back, in another process of the same program.

Nothing is pickled. `encode` gives a *node* that JSON can hold and the tensors it refers to; `decode` is its inverse.
None, bools, numbers and strings are nodes themselves; everything else is a list that begins with a tag:

    ["list", node, …]   ["tuple", node, …]   ["named", class, node, …]     lists, tuples, named tuples
    ["dict", [key node, node], …]            ["mapping", class, […], …]    dicts; other mappings made from a dict
    ["record", class, [name, node], …]                                     dataclasses, built without their constructor
    ["tensor", i]  ["array", i]  ["scalar", i]  ["bytes", i]               entry i of the list of tensors

A class is written `module:qualified name`, and the receiver takes it only if it is of the kind that the tag says.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections import UserDict, defaultdict
from collections.abc import Collection
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from energon_bridge.core.errors import ConfigurationError, UnknownArgumentError
from energon_bridge.core.samples import META_FIELDS, field_names

PlainNode = Any
"""A value that JSON can store."""

_PLAIN = (bool, int, float, str, type(None))


def encode(value: Any, where: str = "batch") -> tuple[PlainNode, list[Tensor]]:
    """Write a value down.

    Args:
        value: The value.
        where: Its name in errors.

    Returns:
        The node, and its tensors: without gradient, but otherwise those of the value.

    Raises:
        ConfigurationError: Something in it is neither plain nor a tensor; the message says where.
    """
    tensors: list[Tensor] = []
    return _encode(value, where, tensors), tensors


def _encode(value: Any, where: str, tensors: list[Tensor]) -> PlainNode:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise ConfigurationError(
                f"{where} is a {value.layout} tensor, but only dense ones can be broadcast: convert it"
            )
        return ["tensor", _add(value.detach(), tensors)]
    if isinstance(value, np.ndarray | np.generic):
        return ["array" if isinstance(value, np.ndarray) else "scalar", _add(_from_numpy(value, where), tensors)]
    if isinstance(value, bytes | bytearray):
        raw = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
        return ["bytes", _add(raw, tensors)]
    if is_dataclass(value) and not isinstance(value, type):
        names = field_names(kind)
        return ["record", _name(kind, where)] + [
            [name, _encode(getattr(value, name), f"{where}.{name}", tensors)] for name in names
        ]
    if isinstance(value, list | tuple):
        entries = [_encode(entry, f"{where}[{i}]", tensors) for i, entry in enumerate(value)]
        if hasattr(value, "_fields"):
            return ["named", _name(kind, where), *entries]
        if kind in (list, tuple):
            return [kind.__name__, *entries]
    if isinstance(value, dict | UserDict) and not isinstance(value, defaultdict):
        pairs = [
            [_encode(key, f"a key of {where}", tensors), _encode(entry, f"{where}[{key!r}]", tensors)]
            for key, entry in value.items()
        ]
        return ["dict", *pairs] if kind is dict else ["mapping", _name(kind, where), *pairs]
    raise ConfigurationError(
        f"{where} is of type {kind.__module__}.{kind.__qualname__}, which cannot be broadcast: tensors, numpy arrays, "
        "numbers, strings, bytes, None, lists, tuples, dicts and dataclasses can. Convert it in encode_batch, leave it "
        "out of the batch, or let every rank load (replica_loading='every_rank')"
    )


def decode(node: PlainNode, tensors: list[Tensor]) -> Any:
    """Build the value that a node and its tensors describe.

    Raises:
        ConfigurationError: A class cannot be found in this process.
    """
    if not isinstance(node, list):
        return node
    tag, *rest = node
    if tag in ("tensor", "array", "scalar", "bytes"):
        tensor = tensors[rest[0]]
        if tag == "tensor":
            return tensor
        array = tensor.cpu().numpy()
        return array.tobytes() if tag == "bytes" else array[()] if tag == "scalar" else array
    if tag in ("list", "tuple"):
        entries = [decode(entry, tensors) for entry in rest]
        return entries if tag == "list" else tuple(entries)
    if tag == "dict":
        return {decode(key, tensors): decode(entry, tensors) for key, entry in rest}
    kind = _class(rest[0], tag)
    if tag == "named":
        return kind(*(decode(entry, tensors) for entry in rest[1:]))
    if tag == "mapping":
        return kind({decode(key, tensors): decode(entry, tensors) for key, entry in rest[1:]})
    record = object.__new__(kind)
    for name, entry in rest[1:]:
        object.__setattr__(record, name, decode(entry, tensors))
    return record


_NORM = "pixel_norm"
"""Sent with every batch: without it, receivers would take bytes for pixels."""


def select(batch: Any, keys: Collection[str] | None) -> Any:
    """Return a batch with all fields None except the given ones and the meta fields; with keys=None the batch itself.

    Raises:
        ConfigurationError: The batch has no fields.
    """
    if keys is None:
        return batch
    names = _fields_of(batch)
    if names is None:
        raise ConfigurationError(
            f"stage_keys choose fields of a batch, but a batch of type {type(batch).__name__} has none: return "
            "a dataclass or a dict from encode_batch, or leave out stage_keys"
        )
    chosen = copy.copy(batch)
    for name in names:
        if name in keys or name in META_FIELDS or name == _NORM:
            continue
        if isinstance(chosen, dict | UserDict):
            chosen[name] = None
        else:
            object.__setattr__(chosen, name, None)
    return chosen


def check_keys(batch: Any, keys: Collection[str] | None) -> None:
    """Refuse keys that are no fields of a batch.

    Raises:
        UnknownArgumentError: A key is unknown.
    """
    names = _fields_of(batch)
    unknown = sorted(set(keys or ()) - set(names or ()))
    if names is not None and unknown:
        raise UnknownArgumentError(
            f"stage_keys contain {', '.join(map(repr, unknown))}, but the batch ({type(batch).__name__}) has "
            f"{', '.join(map(str, names))}"
        )


def _fields_of(batch: Any) -> tuple[Any, ...] | None:
    if is_dataclass(batch) and not isinstance(batch, type):
        return field_names(type(batch))
    return tuple(batch) if isinstance(batch, dict | UserDict) else None


def _add(tensor: Tensor, tensors: list[Tensor]) -> int:
    tensors.append(tensor)
    return len(tensors) - 1


def _from_numpy(value: Any, where: str) -> Tensor:
    try:
        return torch.from_numpy(np.array(value))  # a copy: read-only arrays make torch warn
    except TypeError as error:
        raise ConfigurationError(
            f"{where} is a numpy array of dtype {value.dtype}, which torch does not support: convert it in encode_batch"
        ) from error


def _name(kind: type, where: str) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if "<locals>" in name:
        raise ConfigurationError(
            f"{where} is of class {kind.__qualname__}, which is defined inside a function, so the other ranks cannot "
            "find it: define it in a module"
        )
    return name


def _class(name: str, tag: str) -> Any:
    module, _, path = name.partition(":")
    try:
        kind: Any = sys.modules.get(module) or importlib.import_module(module)
        for part in path.split("."):
            kind = getattr(kind, part)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"a batch of class {name} was broadcast, which this rank does not have: run the same program on all ranks"
        ) from error
    fits = {
        "record": is_dataclass(kind),
        "named": isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"),
        "mapping": isinstance(kind, type) and issubclass(kind, dict | UserDict),
    }
    if not (isinstance(kind, type) and fits[tag]):
        raise ConfigurationError(
            f"a batch of class {name} was broadcast, but it is not a {tag} on this rank: run the same program on all "
            "ranks"
        )
    return kind
