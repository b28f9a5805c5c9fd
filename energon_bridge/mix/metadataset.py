"""Metadataset files of both versions, and dicts of the same form, read strictly, value by value, into a tree.

Version 1 (the default, and `__class__: Metadataset`)::

    splits: {<split>: {datasets: [{path, weight, split_part, subflavor, subflavors, shuffle_over_epochs_multiplier,
                                   dataset_config, split_config}, ...]}}

Version 2 (`__module__: megatron.energon`, `__class__: MetadatasetV2`): a split is one *item*, and an item is one of::

    {path, split_part, subflavors, shuffle_over_epochs_multiplier, dataset_config, split_config, aux, subset, filter}
    {join: [reference, ...] or {name: reference, ...}, joiner, split_part, subflavors,
     shuffle_over_epochs_multiplier, dataset_config, split_config, subset}
    {blend: [item + weight, ...], subset, unit}
    {blend_epochized: [item + repetitions, ...], subset}
    {concat: [item, ...], subset}                          # an extension of ours, as is nesting items in place

`filter`, which all but a join may have, and `unit`, what the weights of a blend are shares of, are extensions of ours
too: expressions over columns (`mix/expression.py`).

`path` may be another metadataset. Sources: reference sections 1.12 and 1.13.

Invariant: only YAML files are read, never a dataset. Every split of a file is checked; nested files are read only for
the requested split.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field as dataclass_field, replace
from fractions import Fraction
from typing import Any, get_args

from energon_bridge.errors import ConfigurationError, MetadataError, UnknownSplitError, did_you_mean
from energon_bridge.format.documents import expect_keys, expect_mapping, expect_string, wrong_type
from energon_bridge.format.join import Nonmatch
from energon_bridge.mix.expression import checked_expression
from energon_bridge.mix.opener import MixIndex
from energon_bridge.mix.paths import DatasetKind, kind_of_reference, resolve_path, split_path
from energon_bridge.mix.schedule import exact_number, parse_weight
from energon_bridge.mix.tree import (
    AuxRef,
    Blend,
    Concat,
    EpochizedBlend,
    JoinEntry,
    Joiner,
    JoinRef,
    LeafRef,
    Node,
    SubsetRange,
    combine_multipliers,
    parse_subset,
)

# ---------------------------------------------------------------------------------------------------------------------
# The values of a reference, each read strictly: wrong types are errors that name their place.
#
# Formats: reference sections 1.12 and 1.13. An empty value counts as absent where energon has a default for it.


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
    """Return `nonmatch` of a join's entry; the primary has none."""
    value = item.get("nonmatch", "error")
    place = f"{field}.nonmatch"
    if value not in get_args(Nonmatch):
        raise wrong_type(value, "one of error, skip, none", where=where, field=place)
    if is_primary and value != "error":
        raise MetadataError(
            f"{where}, field `{place}`: the first dataset of a join determines its rows, so this can only be "
            f"`error`, found {value!r}."
        )
    return value


def read_aux(item: Mapping[str, Any], *, base: str, where: str, field: str) -> dict[str, AuxRef]:
    """Return `aux`: stores for cookers by name, with absolute paths."""
    value = item.get("aux")
    if value is None:
        return {}
    place = f"{field}.aux"
    stores: dict[str, AuxRef] = {}
    for name, reference in expect_mapping(value, where=where, field=place).items():
        if name in _RESERVED_AUX_NAMES:
            raise MetadataError(f"{where}, field `{place}`: the name `{name}` is reserved. Use another.")
        stores[name] = _aux(reference, base=base, where=where, field=f"{place}.{name}")
    return stores


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


# ---------------------------------------------------------------------------------------------------------------------
# Metadataset files of both versions, and dicts of the same form, read strictly into a tree.


_log = logging.getLogger(__name__)

_V1 = "Metadataset"
_V2 = "MetadatasetV2"
_MAX_DEPTH = 100
_MODULES = ("megatron.energon", "energon_bridge")

_COMMON_KEYS = frozenset(
    {"split_part", "subflavors", "shuffle_over_epochs_multiplier", "dataset_config", "split_config"}
)
_REFERENCE_KEYS = _COMMON_KEYS | {"path", "aux", "subset", "filter"}
_JOIN_KEYS = _COMMON_KEYS | {"join", "joiner", "subset"}
_V1_KEYS = _COMMON_KEYS | {"path", "weight", "subflavor"}
_ENTRY_KEYS = (_REFERENCE_KEYS - {"filter"}) | {"nonmatch"}
_WITHOUT_EFFECT = ("subset", "shuffle_over_epochs_multiplier")  # in an entry of a join
_STRUCTURE_KEYS = {
    "path": _REFERENCE_KEYS,
    "join": _JOIN_KEYS,
    "blend": frozenset({"blend", "subset", "filter", "unit"}),
    "blend_epochized": frozenset({"blend_epochized", "subset", "filter"}),
    "concat": frozenset({"concat", "subset", "filter"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The surroundings of an item: its file, and the settings of the references that lead to it.

    Attributes:
        where: The file, for messages.
        base: The folder that its paths are relative to.
        split_part: The split asked for.
        index: Reads the files.
        subflavors, multiplier, subsets, filters: Merged so far; subsets from the innermost to the outermost.
        chain: The (file, split) that are being read, from the outermost on.
        is_read: False if a split is only checked; its nested files are then not read.
    """

    where: str
    base: str
    split_part: str
    index: MixIndex
    subflavors: dict[str, Any] = dataclass_field(default_factory=dict)
    multiplier: int | None = 1
    subsets: tuple[SubsetRange, ...] = ()
    filters: tuple[str, ...] = ()
    chain: tuple[tuple[str, str], ...] = ()
    is_read: bool = True


def read_metadataset_file(path: str, *, split_part: str, index: MixIndex) -> Node:
    """Read one split of the metadataset at an absolute path or URL, and of those it refers to.

    Raises UnknownSplitError, DatasetNotFoundError or MetadataError.
    """
    return _read_file(path, split_part=split_part, outer=Scope(where="", base="", split_part=split_part, index=index))


def _read_file(path: str, *, split_part: str, outer: Scope) -> Node:
    """Read a metadataset; `outer` is what surrounds the reference to it."""
    step = (path, split_part)
    if step in outer.chain:
        circle = [*outer.chain[outer.chain.index(step) :], step]
        names = " → ".join(f"{file} ({split})" for file, split in circle)
        raise MetadataError(f"{outer.where}: metadatasets refer to each other in a circle: {names}.")
    if len(outer.chain) >= _MAX_DEPTH:
        raise MetadataError(f"{outer.where}: metadatasets are nested more than {_MAX_DEPTH} deep.")
    inner = replace(outer, where=path, base=split_path(path)[0], split_part=split_part, chain=(*outer.chain, step))
    return _read_document(outer.index.document(path), scope=inner)


def read_metadataset_dict(document: Mapping[str, Any], *, split_part: str, base: str, index: MixIndex) -> Node:
    """Read one split of a metadataset given as a dict; `base` is the folder that its paths are relative to."""
    scope = Scope(where="mix given as a dict", base=base, split_part=split_part, index=index)
    return _read_document(dict(document), scope=scope)


def metadataset_splits(path: str) -> list[str]:
    """Return the names of the splits of the metadataset at an absolute path or URL."""
    document = expect_mapping(MixIndex().document(path), where=path)
    return list(expect_mapping(document.get("splits"), where=path, field="splits"))


def _read_document(document: Any, *, scope: Scope) -> Node:
    mapping = expect_mapping(document, where=scope.where)
    is_v2 = _is_v2(mapping, where=scope.where)
    allowed = ("__module__", "__class__", "splits")
    expect_keys(mapping, allowed=allowed, required=("splits",), where=scope.where)
    splits = expect_mapping(mapping["splits"], where=scope.where, field="splits")
    if scope.split_part not in splits:
        known = ", ".join(splits) or "none"
        raise UnknownSplitError(f"{scope.where}: no split part {scope.split_part!r}. Known split parts: {known}.")
    read = _read_item if is_v2 else _read_v1
    checked = replace(scope, is_read=False)
    for name, split in splits.items():
        if name != scope.split_part:
            read(split, field=f"splits.{name}", scope=checked)
    return read(splits[scope.split_part], field=f"splits.{scope.split_part}", scope=scope)


def _is_v2(document: dict[str, Any], *, where: str) -> bool:
    module = document.get("__module__", _MODULES[0])
    if not isinstance(module, str) or not any(module == own or module.startswith(f"{own}.") for own in _MODULES):
        raise wrong_type(module, f"one of {', '.join(_MODULES)}", where=where, field="__module__")
    name = document.get("__class__", _V1)
    if name not in (_V1, _V2):
        hint = did_you_mean(name, (_V1, _V2))
        raise MetadataError(f"{where}, field `__class__`: expected {_V1} or {_V2}, found {name!r}.{hint}")
    return name == _V2


def _read_v1(value: Any, *, field: str, scope: Scope) -> Blend:
    split = expect_mapping(value, where=scope.where, field=field)
    if "datasets" not in split and split.keys() & _STRUCTURE_KEYS.keys():
        raise MetadataError(
            f"{scope.where}, field `{field}`: this is the syntax of version 2, but the file says version 1. Add "
            f"`__module__: megatron.energon` and `__class__: {_V2}` at its top."
        )
    expect_keys(split, allowed=("datasets",), required=("datasets",), where=scope.where, field=field)
    children, weights = [], []
    for item, place in _items(split["datasets"], field=f"{field}.datasets", scope=scope):
        reference = expect_mapping(item, where=scope.where, field=place)
        expect_keys(reference, allowed=_V1_KEYS, required=("path",), where=scope.where, field=place)
        children.append(_read_reference(reference, field=place, scope=scope))
        weights.append(parse_weight(reference.get("weight", 1), where=scope.where, field=f"{place}.weight"))
    at = f"{scope.where}, field `{field}.datasets`"
    return Blend(children=tuple(children), weights=tuple(weights), where=at)


def _read_item(value: Any, *, field: str, scope: Scope, extra: str | None = None) -> Node:
    """Read an item of version 2; `extra` is the key that the structure around it adds to each item."""
    item = expect_mapping(value, where=scope.where, field=field)
    structures = [key for key in _STRUCTURE_KEYS if key in item]
    extras = {extra} if extra else frozenset[str]()
    if len(structures) != 1:
        allowed = frozenset().union(*_STRUCTURE_KEYS.values(), extras)
        expect_keys(item, allowed=allowed, where=scope.where, field=field)  # a misspelt key is named first
        given = " and ".join(f"`{key}`" for key in structures) or "none of them"
        names = ", ".join(f"`{key}`" for key in _STRUCTURE_KEYS)
        raise MetadataError(f"{scope.where}, field `{field}`: expected one of {names}, found {given}.")
    structure = structures[0]
    required = ("joiner",) if structure == "join" else ()
    allowed = _STRUCTURE_KEYS[structure] | extras
    expect_keys(item, allowed=allowed, required=required, where=scope.where, field=field)
    if structure == "path":
        return _read_reference(item, field=field, scope=scope)
    if structure == "join":
        return _read_join(item, field=field, scope=scope)
    subset = parse_subset(item.get("subset"), where=scope.where, field=f"{field}.subset", allow_absolute=False)
    inner = replace(_within(scope, subset), filters=_filters(item, field=field, scope=scope))
    at = f"{scope.where}, field `{field}.{structure}`"
    children: list[Node] = []
    if structure == "concat":
        for child, place in _items(item["concat"], field=f"{field}.concat", scope=scope):
            children.append(_read_item(child, field=place, scope=inner))
        return Concat(children=tuple(children), where=at)
    if structure == "blend":
        weights = []
        for child, place in _items(item["blend"], field=f"{field}.blend", scope=scope):
            children.append(_read_item(child, field=place, scope=inner, extra="weight"))
            weights.append(parse_weight(child.get("weight", 1), where=scope.where, field=f"{place}.weight"))
        unit = _expression(item, "unit", field=field, scope=scope)
        return Blend(children=tuple(children), weights=tuple(weights), unit=unit, where=at)
    repetitions = []
    for child, place in _items(item["blend_epochized"], field=f"{field}.blend_epochized", scope=scope):
        children.append(_read_item(child, field=place, scope=inner, extra="repetitions"))
        repetitions.append(read_repetitions(child, where=scope.where, field=place))
    return EpochizedBlend(children=tuple(children), repetitions=tuple(repetitions), where=at)


def _items(value: Any, *, field: str, scope: Scope) -> Iterator[tuple[Any, str]]:
    """Yield the items of a list that must not be empty, each with its place."""
    if not isinstance(value, list) or not value:
        raise wrong_type(value, "a list of at least one dataset", where=scope.where, field=field)
    for position, item in enumerate(value):
        yield item, f"{field}[{position}]"


def _within(scope: Scope, subset: SubsetRange | None) -> Scope:
    return scope if subset is None else replace(scope, subsets=(subset, *scope.subsets))


def _filters(item: dict[str, Any], *, field: str, scope: Scope) -> tuple[str, ...]:
    """Return the filters around an item and its own."""
    text = _expression(item, "filter", field=field, scope=scope)
    return scope.filters if text is None else (text, *scope.filters)


def _expression(item: dict[str, Any], key: str, *, field: str, scope: Scope) -> str | None:
    """Return an optional expression of columns."""
    text = read_text(item, key, where=scope.where, field=field)
    try:
        return text if text is None else checked_expression(text)
    except ConfigurationError as error:
        raise MetadataError(f"{scope.where}, field `{field}.{key}`: {error}") from error


def _read_reference(item: dict[str, Any], *, field: str, scope: Scope) -> Node:
    at = f"{scope.where}, field `{field}`"
    path = read_path(item, base=scope.base, where=scope.where, field=field)
    if scope.is_read:
        kind = kind_of_reference(path, where=at)
    else:
        kind = DatasetKind.METADATASET if path.endswith(".yaml") else DatasetKind.PREPARED
    leaf = _leaf(item, path=path, kind=kind, field=field, scope=scope)
    if kind is not DatasetKind.METADATASET or not scope.is_read:
        return leaf
    inner = replace(
        scope,
        where=at,
        subflavors=leaf.subflavors,
        multiplier=leaf.shuffle_over_epochs_multiplier,
        subsets=leaf.subsets,
        filters=leaf.filters,
    )
    return _read_file(path, split_part=leaf.split_part, outer=inner)


def _leaf(item: dict[str, Any], *, path: str, kind: DatasetKind, field: str, scope: Scope) -> LeafRef:
    """Read the settings of a reference and merge them with those around it."""
    where = scope.where
    nested = kind is DatasetKind.METADATASET
    refused = {DatasetKind.METADATASET: ("dataset_config", "split_config", "aux"), DatasetKind.PREPARED: ()}
    for key in refused.get(kind, ("dataset_config", "split_config")):
        if item.get(key) is not None:
            what = "a metadataset says this for each of its datasets" if nested else "a JSONL file has none"
            raise MetadataError(f"{where}, field `{field}.{key}`: not allowed for {path}: {what}.")
    subset = parse_subset(item.get("subset"), where=where, field=f"{field}.subset", allow_absolute=not nested)
    multiplier = read_multiplier(item, where=where, field=field)
    return LeafRef(
        path=path,
        split_part=read_text(item, "split_part", where=where, field=field) or scope.split_part,
        is_jsonl=kind is DatasetKind.JSONL,
        subflavors={**read_subflavors(item, where=where, field=field), **scope.subflavors},
        dataset_config=read_text(item, "dataset_config", where=where, field=field),
        split_config=read_text(item, "split_config", where=where, field=field),
        shuffle_over_epochs_multiplier=combine_multipliers(scope.multiplier, multiplier),
        aux=read_aux(item, base=scope.base, where=where, field=field),
        subsets=_within(scope, subset).subsets,
        filters=_filters(item, field=field, scope=scope),
        where=f"{where}, field `{field}`",
    )


def _read_join(item: dict[str, Any], *, field: str, scope: Scope) -> JoinRef:
    where = scope.where
    if scope.filters:
        raise MetadataError(
            f"{where}, field `{field}`: a join cannot be filtered, but `filter: {scope.filters[0]}` contains it. "
            "Put the filter on the other datasets."
        )
    subset = parse_subset(item.get("subset"), where=where, field=f"{field}.subset", allow_absolute=True)
    join = JoinRef(
        entries=(),
        joiner=read_joiner(item, where=where, field=field),
        split_part=read_text(item, "split_part", where=where, field=field) or scope.split_part,
        subflavors={**read_subflavors(item, where=where, field=field), **scope.subflavors},
        shuffle_over_epochs_multiplier=combine_multipliers(
            scope.multiplier, read_multiplier(item, where=where, field=field)
        ),
        subsets=_within(scope, subset).subsets,
        file=scope.chain[-1][0] if scope.chain else "",
        where=f"{where}, field `{field}`",
    )
    # Defaults for entries without their own.
    defaults = {key: read_text(item, key, where=where, field=field) for key in ("dataset_config", "split_config")}
    entries = item["join"]
    if isinstance(entries, dict) and entries:
        named = [(name, entry, f"{field}.join.{name}") for name, entry in entries.items()]
    else:
        named = [(None, entry, place) for entry, place in _items(entries, field=f"{field}.join", scope=scope)]
    read = [
        _read_entry(entry, name=name, is_primary=number == 0, defaults=defaults, join=join, field=place, scope=scope)
        for number, (name, entry, place) in enumerate(named)
    ]
    return replace(join, entries=tuple(read))


def _read_entry(
    value: Any,
    *,
    name: str | None,
    is_primary: bool,
    defaults: dict[str, str | None],
    join: JoinRef,
    field: str,
    scope: Scope,
) -> JoinEntry:
    where = scope.where
    item = expect_mapping(value, where=where, field=field)
    expect_keys(item, allowed=_ENTRY_KEYS, required=("path",), where=where, field=field)
    path = read_path(item, base=scope.base, where=where, field=field)
    if path.endswith((".yaml", ".yml", ".jsonl")):
        raise MetadataError(f"{where}, field `{field}.path`: only prepared datasets can be joined, found {path}.")
    for key in _WITHOUT_EFFECT:
        if scope.is_read and item.get(key, 1) != 1:
            # Energon accepts and ignores these.
            _log.warning(
                "%s, field `%s.%s`: has no effect inside a join; put it on the join itself.", where, field, key
            )
    reference = {key: entry for key, entry in item.items() if key not in _WITHOUT_EFFECT and entry is not None}
    inner = replace(
        scope,
        split_part=join.split_part,
        subflavors=join.subflavors,
        multiplier=join.shuffle_over_epochs_multiplier,
        subsets=(),
    )
    leaf = _leaf({**defaults, **reference}, path=path, kind=DatasetKind.PREPARED, field=field, scope=inner)
    nonmatch = read_nonmatch(item, is_primary=is_primary, where=where, field=field)
    return JoinEntry(leaf=leaf, name=name, nonmatch=nonmatch)
