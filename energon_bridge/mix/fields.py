"""The values that a reference of a mix can carry, each read strictly: wrong types are errors that name their place.

Formats: reference sections 1.12 and 1.13. An empty value counts as absent where energon has a default for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, get_args

from energon_bridge.errors import MetadataError
from energon_bridge.format.documents import expect_keys, expect_mapping, expect_string, wrong_type
from energon_bridge.format.join import Nonmatch
from energon_bridge.mix.paths import resolve_path
from energon_bridge.mix.schedule import exact_number
from energon_bridge.mix.tree import AuxRef, Joiner

_RESERVED_AUX_NAMES = ("primary", "cache")
_FILESYSTEM = re.compile(r"filesystem(?:\+([a-z][a-z0-9.-]*))?://", re.IGNORECASE)


def read_text(item: Mapping[str, Any], key: str, *, where: str, field: str) -> str | None:
    """Return an optional string."""
    value = item.get(key)
    return None if value is None else expect_string(value, where=where, field=f"{field}.{key}")


def read_path(item: Mapping[str, Any], *, base: str, where: str, field: str) -> str:
    """Return `path` as an absolute path or URL."""
    place = f"{field}.path"
    text = expect_string(item["path"], where=where, field=place)
    return resolve_path(text, base=base, where=f"{where}, field `{place}`")


def read_subflavors(item: Mapping[str, Any], *, where: str, field: str) -> dict[str, Any]:
    """Return `subflavors`, with the old `subflavor: x` as `{__subflavor__: x}` below them."""
    value = item.get("subflavors")
    subflavors = {} if value is None else expect_mapping(value, where=where, field=f"{field}.subflavors")
    old = read_text(item, "subflavor", where=where, field=field)
    return subflavors if old is None else {"__subflavor__": old, **subflavors}


def read_multiplier(item: Mapping[str, Any], *, where: str, field: str) -> int | None:
    """Return `shuffle_over_epochs_multiplier`: 1 or more, -1, or None."""
    value = item.get("shuffle_over_epochs_multiplier", 1)
    if value is None or (type(value) is int and (value == -1 or value >= 1)):
        return value
    place = f"{field}.shuffle_over_epochs_multiplier"
    raise wrong_type(value, "a whole number of epochs, -1 or null", where=where, field=place)


def read_repetitions(item: Mapping[str, Any], *, where: str, field: str) -> Fraction:
    """Return `repetitions` exactly as its digits say: 0.1 is 1/10."""
    value = item.get("repetitions", 1)
    number = exact_number(value)
    if number is None or number < 0:
        raise wrong_type(value, "a number of at least 0", where=where, field=f"{field}.repetitions")
    return number


def read_nonmatch(item: Mapping[str, Any], *, is_primary: bool, where: str, field: str) -> Nonmatch:
    """Return `nonmatch` of a join's entry; the primary has nothing to match."""
    value = item.get("nonmatch", "error")
    place = f"{field}.nonmatch"
    if value not in get_args(Nonmatch):
        raise wrong_type(value, "one of error, skip, none", where=where, field=place)
    if is_primary and value != "error":
        raise MetadataError(
            f"{where}, field `{place}`: the first dataset of a join says which rows there are, so it can only be "
            f"`error`, found {value!r}."
        )
    return value


def read_aux(item: Mapping[str, Any], *, base: str, where: str, field: str) -> dict[str, AuxRef]:
    """Return `aux`: stores for cookers by name, with absolute paths."""
    value = item.get("aux")
    if value is None:
        return {}
    place = f"{field}.aux"
    found: dict[str, AuxRef] = {}
    for name, reference in expect_mapping(value, where=where, field=place).items():
        if name in _RESERVED_AUX_NAMES:
            raise MetadataError(f"{where}, field `{place}`: the name `{name}` is reserved. Use another.")
        found[name] = _aux(reference, base=base, where=where, field=f"{place}.{name}")
    return found


def _aux(value: Any, *, base: str, where: str, field: str) -> AuxRef:
    at = f"{where}, field `{field}`"
    is_filesystem = False
    if isinstance(value, dict):  # the long form: {path: ...} or {fs_path: ...}
        expect_keys(value, allowed=("path", "fs_path"), where=where, field=field)
        if len(value) != 1:
            raise wrong_type(value, "either `path` or `fs_path`", where=where, field=field)
        key, value = next(iter(value.items()))
        is_filesystem = key == "fs_path"
    text = expect_string(value, where=where, field=field)
    match = None if is_filesystem else _FILESYSTEM.match(text)
    if match:
        is_filesystem = True
        text = text[match.end() :]
        text = f"{match[1]}://{text}" if match[1] else text
    path = resolve_path(text, base=base, where=at)
    if not is_filesystem and path.endswith((".yaml", ".yml")):
        raise MetadataError(f"{at}: expected the folder of a prepared dataset, found the mix {path}.")
    return AuxRef(path=path, is_filesystem=is_filesystem)


def read_joiner(item: Mapping[str, Any], *, where: str, field: str) -> Joiner:
    """Return `joiner`, by name; nothing is imported. Python code may give the type or function itself."""
    value = item["joiner"]
    place = f"{field}.joiner"
    if callable(value):
        is_function = not isinstance(value, type)
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return Joiner(module=value.__module__, name=name, is_function=is_function, target=value)
    joiner = expect_mapping(value, where=where, field=place)
    kind = "__function__" if "__function__" in joiner else "__class__"
    expect_keys(joiner, allowed=("__module__", kind), required=("__module__", kind), where=where, field=place)
    return Joiner(
        module=expect_string(joiner["__module__"], where=where, field=f"{place}.__module__"),
        name=expect_string(joiner[kind], where=where, field=f"{place}.{kind}"),
        is_function=kind == "__function__",
    )
