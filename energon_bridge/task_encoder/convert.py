"""Records of one kind as records of another, by the names of their fields.

A record is a dataclass (a sample, a batch), a named tuple or a dict. What the target does not have is left behind;
what it requires and the source lacks is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, cast

from energon_bridge.errors import ConfigurationError, UnfitSampleError
from energon_bridge.samples import field_names, init_field_names, required_field_names
from energon_bridge.samples.base import once_per_class


def is_record_type(cls: type) -> bool:
    """Tell whether objects of a class are records: dict, dataclass or named tuple."""
    return issubclass(cls, dict) or is_dataclass(cls) or _is_named_tuple(cls)


def read_fields(record: Any) -> dict[str, Any]:
    """Return the fields of a record by name. Raises ConfigurationError if it is none."""
    cls = type(record)
    if issubclass(cls, dict):
        return dict(record)
    if is_dataclass(cls):
        return {name: getattr(record, name) for name in field_names(cls)}
    if _is_named_tuple(cls):
        return record._asdict()
    raise ConfigurationError(f"a {cls.__name__} has no fields to convert; use a dataclass, a named tuple or a dict")


@once_per_class
def target_fields(target: type) -> frozenset[str] | None:
    """Return the names that a record type can take, or None if it takes any (a dict)."""
    if issubclass(target, dict):
        return None
    if is_dataclass(target):
        return frozenset(init_field_names(target))
    if _is_named_tuple(target):
        return frozenset(target._fields)  # type: ignore[attr-defined]
    raise ConfigurationError(
        f"cannot make a {target.__name__} by field names; use a dataclass, a named tuple or a dict"
    )


def make_record(fields: Mapping[str, Any], target: type, wrong: type[ConfigurationError] = ConfigurationError) -> Any:
    """Make a record of type `target`. Raises an error of type `wrong` if the fields lack one that it requires."""
    known = target_fields(target)
    if known is None:
        # The mask is there for whoever sets it, and None says nothing.
        return target({name: value for name, value in fields.items() if name != "__valid__" or value is not None})
    taken = fields if fields.keys() <= known else {name: value for name, value in fields.items() if name in known}
    if not (required := _required_fields(target)) <= taken.keys():
        missing = sorted(required - taken.keys())
        raise wrong(
            f"cannot make a {target.__name__} without {', '.join(missing)}, of the fields {', '.join(fields)}; give "
            f"the missing fields a default in {target.__name__}, or convert in the hook"
        )
    return target(**taken)


def convert_record(record: Any, target: type) -> Any:
    """Return a record as one of type `target`, the record itself if it is one already."""
    if isinstance(record, target):
        return record
    # What a dict lacks, others of the dataset may have.
    wrong = UnfitSampleError if isinstance(record, dict) else ConfigurationError
    return make_record(read_fields(record), target, wrong)


@once_per_class
def _required_fields(target: Any) -> frozenset[str]:
    if is_dataclass(target):
        return required_field_names(cast(type, target))
    return frozenset(target._fields) - target._field_defaults.keys()


def _is_named_tuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")
