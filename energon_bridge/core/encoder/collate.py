"""Collating: how rows become a batch, and records of one type become another.

`batch_samples` makes one record of many: the meta fields in their own way, each other field by its
action. The default action, `generic_batch`, pads and stacks tensors, goes into dicts, dataclasses and named tuples,
and leaves everything else (numbers, strings, lists, arrays, Pillow images) a list with one entry per row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from operator import attrgetter
from typing import Any, cast

from energon_bridge.core.errors import ConfigurationError, UnfitSampleError
from energon_bridge.core.samples import META_FIELDS, field_names, init_field_names, required_field_names
from energon_bridge.core.samples.sample import Records, once_per_class
from energon_bridge.core.samples.stacking import (
    batch_meta,
    batch_pad_stack as batch_pad_stack,
    batch_stack as batch_stack,
    concat_pad as concat_pad,
    stacks,
)

# ---------------------------------------------------------------------------------------------------------------------
# Records of one kind as records of another, by the names of their fields.
#
# A record is a dataclass (a sample, a batch), a named tuple or a dict. Fields that the target lacks are dropped;
# what it requires and the source lacks is an error.


@once_per_class
def is_record_type(cls: type) -> bool:
    """Return whether objects of a class are records: dict, dataclass or named tuple."""
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
        f"cannot fill a {target.__name__} by field names; use a dataclass, a named tuple or a dict"
    )


def make_record(fields: Mapping[str, Any], target: type, wrong: type[ConfigurationError] = ConfigurationError) -> Any:
    """Make a record of type `target`. Raises an error of type `wrong` if the fields lack one that it requires."""
    names = target_fields(target)
    if names is None:
        # The mask is there for whoever sets it, and None says nothing.
        return target({name: value for name, value in fields.items() if name != "__valid__" or value is not None})
    taken = fields if fields.keys() <= names else {name: value for name, value in fields.items() if name in names}
    if not (required := _required_fields(target)) <= taken.keys():
        missing = sorted(required - taken.keys())
        raise wrong(
            f"cannot make a {target.__name__} from the fields {', '.join(fields)}: {', '.join(missing)} is missing; "
            f"give the missing fields a default in {target.__name__}, or convert in the hook"
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


def records_of(kind: type, columns: Mapping[str, list[Any]]) -> Records:
    """Return records of a dataclass, with its defaults for fields without a column. Raises KeyError for others."""
    size = len(columns["__key__"])
    taken = dict(columns)
    for name, default in _defaults(kind).items():
        if name not in columns:
            taken[name] = [default] * size
    if taken.keys() != target_fields(kind):
        raise KeyError
    return Records(kind, taken)


@once_per_class
def _defaults(kind: type) -> dict[str, Any]:
    return {entry.name: entry.default for entry in fields(kind) if entry.default is not MISSING}


# ---------------------------------------------------------------------------------------------------------------------
# Collating: what becomes of the rows of a batch.


Action = Callable[[list[Any]], Any]

REMEDY_FOR_TYPES = (
    "let encode_sample of your task encoder make one type of all samples, collate the types in its batch, or keep them "
    "apart with batch_group_criterion"
)


def batch_list(batch: Sequence[Any]) -> list[Any]:
    """Return the values as they are, one entry per row.

    Examples:
        >>> batch_list(["a", "b"])
        ['a', 'b']
    """
    return list(batch)


def generic_batch(batch: Sequence[Any]) -> Any:
    """Collate one column of a batch, depending on its values (see the module).

    Examples:
        >>> generic_batch([{"tokens": torch.tensor([1, 2]), "name": "a"}, {"tokens": torch.tensor([3]), "name": "b"}])
        {'tokens': tensor([[1, 2],
                [3, 0]]), 'name': ['a', 'b']}

    A dataclass with a `from_samples` of its own collates itself. Raises UnfitSampleError if tensors differ in rank, or
    are beside other values than None, or dicts differ in their keys.
    """
    if stacks(batch):
        return batch_pad_stack(batch)
    kinds = {type(value) for value in batch}
    if len(kinds) != 1 or not is_record_type(kind := kinds.pop()):
        return list(batch)
    if (from_samples := getattr(kind, "from_samples", None)) is not None:
        return from_samples(batch)
    return batch_samples(batch, kind)


def batch_of(samples: Sequence[Any]) -> Any:
    """Collate samples into a record of their own type, tensors padded and stacked; what are no records, as a column."""
    kind = samples.kind if type(samples) is Records else type(samples[0])
    return batch_samples(samples, kind) if is_record_type(kind) else generic_batch(samples)


def batch_samples(
    samples: Sequence[Any],
    result_type: type,
    *,
    actions: Mapping[str, Action] | None = None,
    default_action: Action = generic_batch,
) -> Any:
    """Collate records of one kind into one `result_type`, field by field by name.

    `actions` say how for single fields, `default_action` for the rest. Fields that the result does not have are not
    collated at all. Raises ConfigurationError, naming the field, if rows do not fit together: as UnfitSampleError where
    they have one type, so that a single sample may be to blame.
    """
    wanted = target_fields(result_type)
    columns = _columns(samples, result_type)
    is_sample = "__key__" in columns
    collated: dict[str, Any] = {}
    for name, column in columns.items():
        if wanted is not None and name not in wanted:
            continue
        if actions is not None and name in actions:
            collated[name] = actions[name](column)
        elif is_sample and name in META_FIELDS:
            collated[name] = batch_meta(name, column)
        else:
            collated[name] = _collate(name, column, default_action)
    return make_record(collated, result_type)


def _columns(samples: Sequence[Any], result_type: type) -> dict[str, list[Any]]:
    """Return the fields of records of one kind, each with one entry per row."""
    if type(samples) is Records:
        return samples.columns
    kinds = set(map(type, samples))
    if len(kinds) == 1 and is_dataclass(kind := kinds.pop()):
        return {name: list(map(attrgetter(name), samples)) for name in field_names(kind)}
    rows = [read_fields(sample) for sample in samples]
    _check_same_fields(samples, rows, result_type)
    return {name: [row[name] for row in rows] for name in rows[0]}


def _collate(name: str, column: list[Any], action: Action) -> Any:
    try:
        return action(column)
    except ConfigurationError as error:
        raise type(error)(f"field {name!r}: {error}") from error


def _check_same_fields(samples: Sequence[Any], rows: list[dict[str, Any]], result_type: type) -> None:
    if not rows:
        raise ConfigurationError(f"cannot make a {result_type.__name__} of 0 samples; a batch needs at least one row")
    first = rows[0].keys()
    for number, row in enumerate(rows):
        if row.keys() == first:
            continue
        names = ", ".join(sorted(row.keys() ^ first))
        kinds = [type(samples[0]), type(samples[number])]
        if all(issubclass(kind, dict) for kind in kinds):
            raise UnfitSampleError(
                f"the rows of a batch have different fields: {names} is in row 0 or in row {number}, not in both; make "
                "them equal in encode_sample, collate them in batch, or load single samples (batch_size=1)"
            )
        raise ConfigurationError(
            f"the rows of a batch have different fields: {names} is not in all of them (row 0 is a "
            f"{kinds[0].__name__}, row {number} a {kinds[1].__name__}); {REMEDY_FOR_TYPES}"
        )
