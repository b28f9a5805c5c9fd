"""Collating: what becomes of the rows of a batch.

`batch_samples` makes one record of many: the meta fields in their own way (`samples.base`), each other field by its
action. The default action, `generic_batch`, pads and stacks tensors, goes into dicts, dataclasses and named tuples,
and leaves everything else (numbers, strings, lists, arrays, Pillow images) a list with one entry per row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from energon_bridge.errors import ConfigurationError, UnfitSampleError
from energon_bridge.samples import META_FIELDS, batch_meta, field_names
from energon_bridge.samples.stacking import batch_pad_stack, batch_stack, is_tensor_column
from energon_bridge.task_encoder.convert import is_record_type, make_record, read_fields, target_fields

__all__ = [
    "REMEDY_FOR_TYPES",
    "Action",
    "batch_list",
    "batch_pad_stack",
    "batch_samples",
    "batch_stack",
    "generic_batch",
]

Action = Callable[[list[Any]], Any]

REMEDY_FOR_TYPES = (
    "let encode_sample of your task encoder make one type of all samples, collate the types in its batch, or keep them "
    "apart with batch_group_criterion"
)


def batch_list(values: Sequence[Any]) -> list[Any]:
    """Return the values as they are, one entry per row."""
    return list(values)


def generic_batch(values: Sequence[Any]) -> Any:
    """Collate one column of a batch by what it holds (see the module).

    A dataclass with a `from_samples` of its own collates itself. Raises ConfigurationError if tensors differ in rank or
    dicts in their keys.
    """
    if is_tensor_column(values):
        return batch_pad_stack(values)
    kinds = {type(value) for value in values}
    if len(kinds) != 1 or not is_record_type(kind := kinds.pop()):
        return list(values)
    if (from_samples := getattr(kind, "from_samples", None)) is not None:
        return from_samples(values)
    return batch_samples(values, kind)


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
    kinds = set(map(type, samples))
    if len(kinds) == 1 and is_dataclass(kind := kinds.pop()):
        return {name: [getattr(sample, name) for sample in samples] for name in field_names(kind)}
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
        raise ConfigurationError(f"cannot make a {result_type.__name__} of no samples; a batch needs at least one row")
    first = rows[0].keys()
    for number, row in enumerate(rows):
        if row.keys() == first:
            continue
        names = ", ".join(sorted(row.keys() ^ first))
        kinds = [type(samples[0]), type(samples[number])]
        if all(issubclass(kind, dict) for kind in kinds):
            raise UnfitSampleError(
                f"the rows of a batch have different fields: {names} is in row 0 or in row {number}, not in both; make "
                "them equal in encode_sample, or collate them in batch"
            )
        raise ConfigurationError(
            f"the rows of a batch have different fields: {names} is not in all of them (row 0 is a "
            f"{kinds[0].__name__}, row {number} a {kinds[1].__name__}); {REMEDY_FOR_TYPES}"
        )
