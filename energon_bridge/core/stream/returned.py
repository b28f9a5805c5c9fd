"""What hooks return, as plain values: groups, whole numbers, and lists of samples.

A group is kept as a plain value, so that equal groups are one: `3`, `np.int64(3)` and `torch.tensor(3)`, or a list and
an array of the same numbers. What has no value that a copy of it would have, too, is an error that names the hook.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import index as index_of
from types import NoneType
from typing import Any

import numpy as np
import torch

from energon_bridge.core.errors import FatalSampleError, SampleError

_AS_THEY_ARE = frozenset({int, str, bytes, bool, NoneType})
_EQUAL = tuple.__eq__
_MOST_VALUES = 1024
"""Values of an array that is a group; every waiting row would keep more of them."""


def group_key(value: Any, hook: str) -> Hashable:
    """Return a group as a plain value: equal groups are equal and have one hash, here and in other processes.

    Args:
        value: What the hook returned.
        hook: Its name and that of its class.

    Raises:
        SampleError: It is NaN, or contains it: that belongs to the sample.
        FatalSampleError: It cannot be compared by value.
    """
    try:
        return _plain(value)
    except _NotEqualToItselfError:
        raise SampleError(
            f"{hook} returned the group {shown(value)}: NaN is equal to no other group, so the sample would never be "
            "in a batch. Return a group of its own for such samples"
        ) from None
    except _NoValueError as error:
        raise FatalSampleError(
            f"{hook} returned a {type(value).__name__} as the group ({shown(value)}): {error}. Return what the samples "
            "of a batch share, as numbers, strings, or tuples of them"
        ) from error.__cause__


class _NotEqualToItselfError(Exception):
    """NaN, NaT and the like."""


class _NoValueError(Exception):
    """An object that is equal only to itself, or that cannot be compared."""


def _plain(value: Any) -> Hashable:
    kind = type(value)
    # There is one object of each class and each member of an enumeration.
    if kind in _AS_THEY_ARE or (isinstance(value, (type, Enum)) and kind.__hash__ is not None):
        return value
    if isinstance(value, list) or (isinstance(value, tuple) and vars(kind).get("__eq__", _EQUAL) == _EQUAL):
        return tuple([_plain(one) for one in value])
    if isinstance(value, Set):
        return frozenset([_plain(one) for one in value])
    if isinstance(value, Mapping):
        return frozenset([(_plain(name), _plain(one)) for name, one in value.items()])
    if isinstance(value, bytearray):
        return bytes(value)
    if callable(getattr(value, "tolist", None)):  # arrays, tensors and their scalars
        return _array_values(value)
    try:
        return _compared(value)
    except _NoValueError:
        if not (is_dataclass(value) and kind.__dataclass_params__.eq):
            raise
    return kind, *(_plain(getattr(value, field.name)) for field in fields(value) if field.compare)


def _array_values(value: Any) -> Hashable:
    if (size := math.prod(getattr(value, "shape", ()))) > _MOST_VALUES:
        raise _NoValueError(f"it has {size} values, and a group has at most {_MOST_VALUES}")
    if isinstance(value, (np.datetime64, np.timedelta64)):  # their units would be lost
        return _compared(value)
    try:
        values = value.tolist()
    except Exception as error:  # tensors without values
        raise _NoValueError(f"its values cannot be read ({type(error).__name__}: {error})") from error
    return _compared(values) if type(values) in (type(value), float, complex) else _plain(values)


def _compared(value: Any) -> Hashable:
    """Return a value that is equal to itself and to its copy."""
    try:
        if not value == value:  # NaN
            raise _NotEqualToItselfError
        if type(value) is not float:
            other = _copied(value)
            if not (other == value and hash(other) == hash(value)):
                raise _NoValueError("it is equal only to itself, so no two samples would share a group")
    except (_NotEqualToItselfError, _NoValueError):
        raise
    except Exception as error:
        raise _NoValueError(f"it cannot be compared ({type(error).__name__}: {error})") from error
    return value


def _copied(value: Any) -> Any:
    try:
        return pickle.loads(pickle.dumps(value))  # as other ranks get it
    except Exception:  # of a class within a function
        other = copy.deepcopy(value)
    if other is value:
        raise _NoValueError("it is equal only to itself, so no two samples would share a group")
    return other


def shown(value: Any) -> str:
    """Return the beginning of a value's text in one line, for messages."""
    return " ".join(f"{value!r:.300}".split())[:100]


def whole_number(value: Any) -> int | None:
    """Return a whole number that is an integer of any kind, or a tensor or an array of one; else None."""
    if isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool:
        return None
    try:
        return int(index_of(value))
    except (TypeError, ValueError, RuntimeError):
        return None


def selected_lists(value: Any, samples: Sequence[Any], hook: str) -> list[Iterable[Any]]:
    """Return what a hook selected of some samples as lists, one for each pack.

    Raises:
        FatalSampleError: It is something else.
    """
    own = {id(sample) for sample in samples}
    selected: list[Any] = list(value) if _is_list(value) else []
    wrong = [one for one in selected if id(one) in own or not _is_list(one)] if _is_list(value) else [value]
    if wrong:
        among = "a list with " if selected else ""
        got = "None" if wrong[0] is None else f"a {type(wrong[0]).__name__}"
        raise FatalSampleError(f"{hook} returned {among}{got}: return lists of its samples, one for each pack")
    return selected


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
