"""Values of arrow columns as Python has them, for rows and for filters.

Rows get what `load_dataset` gives: content of the type Json (the extension `arrow.json`, or a text column that the
features of the `datasets` library call so) is parsed. All else is what pyarrow gives, with two differences: times that
Python's types cannot hold, because of their nanoseconds, year or time zone, become texts; and a list, struct or other
nested value is read item by item, so that this holds inside it, too. Neither needs pandas.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np

from energon_bridge.core.errors import ConfigurationError, SourceError

ValueReader = Callable[[Any], Any]
"""Turns a scalar of pyarrow into a value."""

_plain: ValueReader = methodcaller("as_py")


def features_of(metadata: Mapping[bytes, bytes] | None) -> dict[str, Any]:
    """Return the features by column that the `datasets` library wrote into a schema; empty if there are none."""
    text = (metadata or {}).get(b"huggingface")
    try:
        features = (json.loads(text).get("info") or {}).get("features") if text else None
    except (ValueError, AttributeError):
        return {}  # of another library
    return features if isinstance(features, dict) else {}


def readers_of(schema: Any) -> dict[str, ValueReader]:
    """Return how the values of each column are read; each raises SourceError for a value that cannot be.

    Raises SourceError if two columns have one name.
    """
    if twice := next((name for name in schema.names if schema.names.count(name) > 1), None):
        raise SourceError(f"has the column {twice!r} twice. Give one of them another name.")
    features = features_of(schema.metadata)
    return {
        column.name: partial(_checked, column.name, _reader(column.type, features.get(column.name), column.metadata))
        for column in schema
    }


def _checked(column: str, read: ValueReader, scalar: Any) -> Any:
    try:
        return read(scalar)
    except (ValueError, OverflowError, TypeError, KeyError, RecursionError) as error:  # of pyarrow, too
        raise SourceError(
            f"`{column}` ({scalar.type}): the value cannot be read: {error}. Write the row again."
        ) from error


def _reader(kind: Any, feature: Any = None, metadata: Mapping[bytes, bytes] | None = None) -> ValueReader:
    """Return how a value of an arrow type is read.

    Args:
        feature: What the `datasets` library calls it.
        metadata: That of the field, which names the extension where pyarrow does not know it.
    """
    import pyarrow

    types = pyarrow.types
    extension = getattr(kind, "extension_name", None) or (metadata or {}).get(b"ARROW:extension:name", b"").decode()
    if isinstance(kind, pyarrow.BaseExtensionType):
        kind = kind.storage_type
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        kind = kind.value_type
    if extension == "arrow.json" or (_named(feature) == "Json" and is_text(kind)):
        return _json
    if types.is_timestamp(kind) or types.is_duration(kind) or types.is_time(kind) or types.is_date(kind):
        return _time
    inner: list[ValueReader] = []
    whole: ValueReader = _plain
    if types.is_struct(kind):
        inner = [_reader(one.type, _inside(feature, one.name), one.metadata) for one in kind]
        whole = partial(_struct, tuple(one.name for one in kind), inner)
    elif types.is_map(kind):
        inner = [_reader(kind.key_type), _reader(kind.item_type)]
        whole = partial(_map, inner)
    elif types.is_nested(kind) and not types.is_union(kind):
        inner = [_reader(kind.value_type, _inside(feature), kind.value_field.metadata)]
        whole = partial(_list, inner[0])
    return whole if any(read is not _plain for read in inner) else _plain


def is_text(kind: Any) -> bool:
    """Whether a type of pyarrow is one of texts."""
    return str(kind) in ("string", "large_string", "string_view")


def _named(feature: Any) -> str | None:
    name = feature.get("_type") if isinstance(feature, dict) else None
    return name if isinstance(name, str) else None


def _inside(feature: Any, name: str | None = None) -> Any:
    """Return the feature of a field of a struct, or of the items of a list.

    An old `Sequence` of a dictionary is stored as a struct of lists.
    """
    if name is None:
        return feature[0] if isinstance(feature, list) and feature else (feature or {}).get("feature")
    if _named(feature) == "Sequence":
        fields = feature["feature"]
        return {"_type": "List", "feature": fields.get(name)} if isinstance(fields, dict) else None
    return feature.get(name) if isinstance(feature, dict) else None


def _stored(scalar: Any) -> Any:
    """Return the scalar inside of one of an extension, a dictionary or runs; None for null."""
    while scalar is not None and scalar.is_valid and hasattr(scalar, "value") and hasattr(scalar.value, "as_py"):
        scalar = scalar.value
    return scalar if scalar is not None and scalar.is_valid else None


def _json(scalar: Any) -> Any:
    inside = _stored(scalar)
    return None if inside is None else json.loads(inside.as_py())


def _struct(names: Sequence[str], inner: Sequence[ValueReader], scalar: Any) -> dict[str, Any] | None:
    inside = _stored(scalar)
    if inside is None:
        return None
    return {name: read(inside[place]) for place, (name, read) in enumerate(zip(names, inner, strict=True))}


def _list(read: ValueReader, scalar: Any) -> list[Any] | None:
    inside = _stored(scalar)
    return None if inside is None else [read(one) for one in inside.values]


def _map(inner: Sequence[ValueReader], scalar: Any) -> list[tuple[Any, Any]] | None:
    inside = _stored(scalar)
    key, item = inner
    return None if inside is None else [(key(pair[0]), item(pair[1])) for pair in inside.values]


def _time(scalar: Any) -> Any:
    """Return a time as Python has it, or as a text if Python cannot hold it."""
    import pyarrow

    inside = _stored(scalar)
    if inside is None:
        return None
    kind = inside.type
    below = 0
    text = ""
    try:
        if getattr(kind, "unit", "") == "ns":
            micro, below = divmod(inside.value, 1000)
            inside = pyarrow.scalar(micro, _in_microseconds(kind))
        value = inside.as_py()
        if not below:
            return value
        text = value.isoformat(timespec="microseconds") if hasattr(value, "isoformat") else _long(value)
    except (ValueError, OverflowError, KeyError):  # a year of more than four digits, a time zone that is not known
        return str(inside.value if inside.type == kind else scalar.value)
    clock = text.index(".") + 7
    return f"{text[:clock]}{below:03d}{text[clock:]}"


def _in_microseconds(kind: Any) -> Any:
    import pyarrow

    if pyarrow.types.is_timestamp(kind):
        return pyarrow.timestamp("us", kind.tz)
    return pyarrow.duration("us") if pyarrow.types.is_duration(kind) else pyarrow.time64("us")


def _long(value: Any) -> str:
    """Return a duration as a text with microseconds."""
    return str(value) if value.microseconds else f"{value}.000000"


# Filters --------------------------------------------------------------------------------------------------------------


def numbers_or_texts(chunks: Sequence[Any], where: str) -> np.ndarray:
    """Return the values of a column, shape (rows,), of chunks whose types may differ; masked where there is none.

    Texts may be of any type that stores them, numbers of any size: one with fractions makes all of them floats, one of
    type null has no values. Dates and timestamps are datetime64, those with a time zone in UTC.

    Raises:
        ConfigurationError: It is none of numbers, texts and dates, or its types are of several kinds.
    """
    import pyarrow

    plain = [_decoded(chunk) for chunk in chunks]
    found = {_filtered_as(chunk.type): str(chunk.type) for chunk in plain}
    found.pop(None, None)
    if len(found) > 1 or "" in found:
        raise ConfigurationError(
            f"{where} is {' and '.join(found.values())}, but filters take numbers, texts and dates. Write what the "
            "filter needs as a column of its own, of one of these types."
        )
    arrays = [np.empty(0, bool)]
    masks = [np.empty(0, bool)]
    for chunk in plain:
        masks.append(np.asarray(chunk.is_null().to_numpy(zero_copy_only=False), bool))
        if "text" in found:
            arrays.append(np.array([text or "" for text in chunk.to_pylist()], np.str_))
        elif "date" in found:
            arrays.append(np.asarray(chunk.to_numpy(zero_copy_only=False)).astype("datetime64[us]"))
        else:
            is_null = pyarrow.types.is_null(chunk.type)
            arrays.append(np.ones(len(chunk), bool) if is_null else _numbers(chunk))
    if found and "number" not in found:
        del arrays[0]
    values = np.concatenate(arrays)
    mask = np.concatenate(masks)
    return np.ma.masked_array(values, mask) if mask.any() else values


def has_values(chunk: Any) -> np.ndarray:
    """Return which rows of a column have something: no null, no empty text or list, no NaN. Shape (rows,), bool."""
    import pyarrow
    from pyarrow import compute

    types = pyarrow.types
    chunk = _decoded(chunk)
    kind = chunk.type
    if types.is_string_view(kind) or types.is_binary_view(kind):
        chunk = chunk.cast(pyarrow.large_binary())
    valid = chunk.is_valid()
    if is_text(kind) or types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        valid = compute.and_(valid, compute.greater(compute.binary_length(chunk), 0))
    elif types.is_list(kind) or types.is_large_list(kind):
        valid = compute.and_(valid, compute.greater(compute.list_value_length(chunk), 0))
    elif types.is_floating(kind):
        valid = compute.and_(valid, compute.invert(compute.is_nan(chunk)))
    return np.asarray(valid.fill_null(False).to_numpy(zero_copy_only=False), bool)


def _decoded(chunk: Any) -> Any:
    """Return an array without dictionaries, runs and extensions."""
    import pyarrow
    import pyarrow.compute

    while True:
        if pyarrow.types.is_dictionary(chunk.type):
            chunk = chunk.dictionary_decode()
        elif pyarrow.types.is_run_end_encoded(chunk.type):
            chunk = pyarrow.compute.run_end_decode(chunk)
        elif isinstance(chunk.type, pyarrow.BaseExtensionType):
            chunk = chunk.storage
        else:
            return chunk


def _filtered_as(kind: Any) -> str | None:
    """Return what the values of a type are to a filter: text, date or number, None if there are none, "" for others."""
    import pyarrow

    types = pyarrow.types
    if types.is_null(kind):
        return None
    if is_text(kind):
        return "text"
    if types.is_date(kind) or types.is_timestamp(kind):
        return "date"
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)
    return "number" if is_number else ""


def _numbers(chunk: Any) -> np.ndarray:
    """Return an array of numbers as filters compute with them (signed, or floats), with 1 where there is none."""
    import pyarrow

    types = pyarrow.types
    kind = chunk.type
    if types.is_decimal(kind):
        chunk = chunk.cast(pyarrow.float64())
    elif types.is_float16(kind):
        chunk = chunk.cast(pyarrow.float32())
    values = np.asarray(chunk.fill_null(True if types.is_boolean(kind) else 1).to_numpy(zero_copy_only=False))
    if values.dtype.kind == "u":
        fits = values.dtype.itemsize < 8 or not values.size or int(values.max()) <= np.iinfo(np.int64).max
        values = values.astype(np.int64 if fits else np.float64)
    return values
