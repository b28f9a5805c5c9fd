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
too: expressions over columns (`tools/columns/expression.py`).

`path` may be another metadataset. Whatever is not an extension is read as Megatron Energon 7.4 reads it.

Invariant: only YAML files are read, never a dataset. Every split of a file is checked; nested files are read only for
the requested split.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, get_args

from energon_bridge.core.errors import ConfigurationError, MetadataError, UnknownSplitError, did_you_mean
from energon_bridge.core.format.dataset_config import OWN_PACKAGES, is_own
from energon_bridge.core.format.documents import DocumentValue
from energon_bridge.core.format.join import Nonmatch
from energon_bridge.core.mix.opener import MixIndex
from energon_bridge.core.mix.paths import DatasetKind, kind_of_reference, resolve_path, split_path
from energon_bridge.core.mix.schedule import WeightSchedule, exact_number, parse_weight
from energon_bridge.core.mix.tree import (
    AuxRef,
    BlendNode,
    Concat,
    EpochizedNode,
    JoinEntry,
    Joiner,
    JoinRef,
    LeafRef,
    SubsetRange,
    TreeNode,
    combine_multipliers,
    parse_subset,
)
from energon_bridge.core.registry import load

# ---------------------------------------------------------------------------------------------------------------------
# The values of a reference to a dataset, each read strictly: wrong types are errors that name file and field.
#
# An empty value counts as absent where energon has a default for it.


_RESERVED_AUX_NAMES = ("primary", "cache")
_FILESYSTEM = re.compile(r"filesystem(?:\+([a-z][a-z0-9.-]*))?://", re.IGNORECASE)


def _read_path(item: DocumentValue, *, base: str) -> str:
    """Return `path` as an absolute path or URL."""
    path = item.get("path")
    return resolve_path(path.string(), base=base, where=path.at)


def _read_subflavors(item: DocumentValue, scope: Scope) -> dict[str, Any]:
    """Return the subflavors of an item: those of the references around it win over its own.

    The old `subflavor: x` stands for `{__subflavor__: x}`, over which all others win.
    """
    value = item.get("subflavors")
    subflavors = {} if value.plain is None else value.mapping()
    old = item.text("subflavor")
    return {**({} if old is None else {"__subflavor__": old}), **subflavors, **scope.subflavors}


def _read_multiplier(item: DocumentValue, scope: Scope) -> int | None:
    """Return `shuffle_over_epochs_multiplier` (1 or more, -1, or None), combined with what is around it."""
    value = item.get("shuffle_over_epochs_multiplier", 1)
    epochs = value.plain
    if epochs is None or (type(epochs) is int and (epochs == -1 or epochs >= 1)):
        return combine_multipliers(scope.multiplier, epochs)
    raise value.wrong("a whole number of epochs, -1 or null")


def _read_repetitions(item: DocumentValue) -> Fraction:
    """Return `repetitions` exactly as its digits say: 0.1 is 1/10."""
    value = item.get("repetitions", 1)
    number = exact_number(value.plain)
    if number is None or number < 0:
        raise value.wrong("a number of at least 0")
    return number


def _read_weight(item: DocumentValue) -> WeightSchedule:
    value = item.get("weight", 1)
    return parse_weight(value.plain, where=value.where, field=value.field)


def _read_nonmatch(item: DocumentValue, *, is_primary: bool) -> Nonmatch:
    """Return `nonmatch` of a join's entry; the primary has none."""
    value = item.get("nonmatch", "error")
    nonmatch: Nonmatch = value.plain
    if nonmatch not in get_args(Nonmatch):
        raise value.wrong("one of error, skip, none")
    if is_primary and nonmatch != "error":
        raise MetadataError(
            f"{value.at}: the first dataset of a join determines its rows, so this can only be `error`, found "
            f"{nonmatch!r}."
        )
    return nonmatch


def _read_aux(item: DocumentValue, *, base: str) -> dict[str, AuxRef]:
    """Return `aux`: stores for cookers by name, with absolute paths."""
    value = item.get("aux")
    if value.plain is None:
        return {}
    for name in value.mapping():
        if name in _RESERVED_AUX_NAMES:
            raise MetadataError(f"{value.at}: the name `{name}` is reserved. Use another.")
    return {name: _aux(value.get(name), base=base) for name in value.plain}


def _aux(value: DocumentValue, *, base: str) -> AuxRef:
    """Return one store of `aux`, written as a path, as `filesystem://PATH`, or as `{path: ...}` or `{fs_path: ...}`."""
    is_filesystem = False
    named = value
    if isinstance(value.plain, dict):  # the long form: {path: ...} or {fs_path: ...}
        value.check_keys(("path", "fs_path"))
        if len(value.plain) != 1:
            raise value.wrong("either `path` or `fs_path`")
        key, text = next(iter(value.plain.items()))
        is_filesystem = key == "fs_path"
        named = DocumentValue(text, value.where, value.field)
    text = named.string()
    match = None if is_filesystem else _FILESYSTEM.match(text)
    if match:
        is_filesystem = True
        text = text[match.end() :]
        text = f"{match[1]}://{text}" if match[1] else text
    path = resolve_path(text, base=base, where=value.at)
    if not is_filesystem and path.endswith((".yaml", ".yml")):
        raise MetadataError(f"{value.at}: expected the folder of a prepared dataset, found the mix {path}.")
    return AuxRef(path=path, is_filesystem=is_filesystem)


def _read_joiner(item: DocumentValue) -> Joiner:
    """Return `joiner`, by name; nothing is imported. Python code may give the type or function itself."""
    joiner = item.get("joiner")
    target = joiner.plain
    if callable(target):
        is_function = not isinstance(target, type)
        name = getattr(target, "__qualname__", type(target).__qualname__)
        return Joiner(module=target.__module__, name=name, is_function=is_function, target=target)
    kind = "__function__" if "__function__" in joiner.mapping() else "__class__"
    joiner.check_keys(("__module__", kind), required=("__module__", kind))
    return Joiner(
        module=joiner.get("__module__").string(),
        name=joiner.get(kind).string(),
        is_function=kind == "__function__",
    )


# ---------------------------------------------------------------------------------------------------------------------
# Metadataset files of both versions, and dicts of the same form, read strictly into a tree.


_log = logging.getLogger(__name__)

_V1 = "Metadataset"
_V2 = "MetadatasetV2"
_MAX_DEPTH = 100

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
        base: The folder that the paths of its file are relative to.
        split_part: The split asked for.
        index: Reads the YAML files, and keeps them for the next start.
        subflavors, multiplier, subsets, filters: Merged so far; subsets from the innermost to the outermost.
        chain: The (file, split) that are being read, from the outermost on.
        is_read: False if a split is only checked; its nested files are then not read.
    """

    base: str
    split_part: str
    index: MixIndex
    subflavors: dict[str, Any] = field(default_factory=dict)
    multiplier: int | None = 1
    subsets: tuple[SubsetRange, ...] = ()
    filters: tuple[str, ...] = ()
    chain: tuple[tuple[str, str], ...] = ()
    is_read: bool = True


def read_metadataset_file(path: str, *, split_part: str, index: MixIndex) -> TreeNode:
    """Read one split of the metadataset at an absolute path or URL, and of those it refers to.

    Raises UnknownSplitError, DatasetNotFoundError or MetadataError.
    """
    return _read_file(path, at="", split_part=split_part, outer=Scope(base="", split_part=split_part, index=index))


def _read_file(path: str, *, at: str, split_part: str, outer: Scope) -> TreeNode:
    """Read a metadataset; `at` is the file and field that refer to it, and `outer` the surroundings of that field."""
    step = (path, split_part)
    if step in outer.chain:
        circle = [*outer.chain[outer.chain.index(step) :], step]
        names = " → ".join(f"{file} ({split})" for file, split in circle)
        raise MetadataError(f"{at}: metadatasets refer to each other in a circle: {names}.")
    if len(outer.chain) >= _MAX_DEPTH:
        raise MetadataError(f"{at}: metadatasets are nested more than {_MAX_DEPTH} deep.")
    inner = replace(outer, base=split_path(path)[0], split_part=split_part, chain=(*outer.chain, step))
    return _read_document(DocumentValue(outer.index.document(path), path), scope=inner)


def read_metadataset_dict(document: Mapping[str, Any], *, split_part: str, base: str, index: MixIndex) -> TreeNode:
    """Read one split of a metadataset given as a dict; `base` is the folder that its paths are relative to."""
    scope = Scope(base=base, split_part=split_part, index=index)
    return _read_document(DocumentValue(dict(document), "mix given as a dict"), scope=scope)


def metadataset_splits(path: str) -> list[str]:
    """Return the names of the splits of the metadataset at an absolute path or URL."""
    document = DocumentValue(MixIndex().document(path), path)
    document.mapping()
    return list(document.get("splits").mapping())


def _read_document(document: DocumentValue, *, scope: Scope) -> TreeNode:
    document.mapping()
    read = _read_item if _is_v2(document) else _read_v1
    document.check_keys(("__module__", "__class__", "splits"), required=("splits",))
    splits = document.get("splits")
    if scope.split_part not in splits.mapping():
        known = ", ".join(splits.plain) or "none"
        raise UnknownSplitError(f"{document.at}: no split part {scope.split_part!r}. Known split parts: {known}.")
    checked = replace(scope, is_read=False)
    for name in splits.plain:
        if name != scope.split_part:
            read(splits.get(name), scope=checked)
    return read(splits.get(scope.split_part), scope=scope)


def _is_v2(document: DocumentValue) -> bool:
    module = document.get("__module__", OWN_PACKAGES[0])
    if not isinstance(module.plain, str) or not is_own(module.plain):
        raise module.wrong(f"one of {', '.join(OWN_PACKAGES)}")
    name = document.get("__class__", _V1)
    if name.plain not in (_V1, _V2):
        hint = did_you_mean(name.plain, (_V1, _V2))
        raise MetadataError(f"{name.at}: expected {_V1} or {_V2}, found {name.plain!r}.{hint}")
    return bool(name.plain == _V2)


def _read_v1(split: DocumentValue, *, scope: Scope) -> BlendNode:
    if "datasets" not in split.mapping() and split.plain.keys() & _STRUCTURE_KEYS.keys():
        raise MetadataError(
            f"{split.at}: this is the syntax of version 2, but the file says version 1. Add "
            f"`__module__: megatron.energon` and `__class__: {_V2}` at its top."
        )
    split.check_keys(("datasets",), required=("datasets",))
    children = []
    weights = []
    datasets = split.get("datasets")
    for reference in _items(datasets):
        reference.check_keys(_V1_KEYS, required=("path",))
        children.append(_read_reference(reference, scope=scope))
        weights.append(_read_weight(reference))
    return BlendNode(children=tuple(children), weights=tuple(weights), where=datasets.at)


def _read_item(item: DocumentValue, *, scope: Scope, extra: str | None = None) -> TreeNode:
    """Read an item of version 2; `extra` is the key that the structure around it adds to each item."""
    structures = [key for key in _STRUCTURE_KEYS if key in item.mapping()]
    extras = {extra} if extra else frozenset[str]()
    if len(structures) != 1:
        item.check_keys(frozenset().union(*_STRUCTURE_KEYS.values(), extras))  # a misspelt key is named first
        given = " and ".join(f"`{key}`" for key in structures) or "none of them"
        names = ", ".join(f"`{key}`" for key in _STRUCTURE_KEYS)
        raise MetadataError(f"{item.at}: expected one of {names}, found {given}.")
    structure = structures[0]
    if structure == "join":
        _refuse_filter(item)
    item.check_keys(_STRUCTURE_KEYS[structure] | extras, required=("joiner",) if structure == "join" else ())
    if structure == "path":
        return _read_reference(item, scope=scope)
    if structure == "join":
        return _read_join(item, scope=scope)
    subset = parse_subset(item.get("subset"), allow_absolute=False)
    inner = replace(_within(scope, subset), filters=_filters(item, scope=scope))
    listed = item.get(structure)
    own = {"blend": "weight", "blend_epochized": "repetitions"}.get(structure)
    items = list(_items(listed))
    children = tuple([_read_item(child, scope=inner, extra=own) for child in items])
    if structure == "blend":
        weights = tuple(map(_read_weight, items))
        return BlendNode(children=children, weights=weights, unit=_expression(item, "unit"), where=listed.at)
    if structure == "blend_epochized":
        return EpochizedNode(children=children, repetitions=tuple(map(_read_repetitions, items)), where=listed.at)
    return Concat(children=children, where=listed.at)


def _items(value: DocumentValue) -> Iterator[DocumentValue]:
    """Yield the items of a list that must not be empty."""
    if not isinstance(value.plain, list) or not value.plain:
        raise value.wrong("a list of at least one dataset")
    yield from value


def _within(scope: Scope, subset: SubsetRange | None) -> Scope:
    return scope if subset is None else replace(scope, subsets=(subset, *scope.subsets))


def _filters(item: DocumentValue, *, scope: Scope) -> tuple[str, ...]:
    """Return the filters around an item and its own."""
    text = _expression(item, "filter")
    return scope.filters if text is None else (text, *scope.filters)


def _expression(item: DocumentValue, key: str) -> str | None:
    """Return an optional expression of columns."""
    text = item.text(key)
    try:
        return text if text is None else load("columns", "expressions").checked_expression(text)
    except ConfigurationError as error:
        raise MetadataError(f"{item.get(key).at}: {error}") from error


def _read_reference(item: DocumentValue, *, scope: Scope) -> TreeNode:
    path = _read_path(item, base=scope.base)
    if scope.is_read:
        kind = kind_of_reference(path, where=item.at)
    else:
        kind = DatasetKind.METADATASET if path.endswith(".yaml") else DatasetKind.PREPARED
    leaf = _leaf(item, path=path, kind=kind, scope=scope)
    if kind is not DatasetKind.METADATASET or not scope.is_read:
        return leaf
    inner = replace(
        scope,
        subflavors=leaf.subflavors,
        multiplier=leaf.shuffle_over_epochs_multiplier,
        subsets=leaf.subsets,
        filters=leaf.filters,
    )
    return _read_file(path, at=item.at, split_part=leaf.split_part, outer=inner)


def _leaf(item: DocumentValue, *, path: str, kind: DatasetKind, scope: Scope) -> LeafRef:
    """Read the settings of a reference and merge them with those around it."""
    nested = kind is DatasetKind.METADATASET
    refused = {DatasetKind.METADATASET: ("dataset_config", "split_config", "aux"), DatasetKind.PREPARED: ()}
    for key in refused.get(kind, ("dataset_config", "split_config")):
        if item.plain.get(key) is not None:
            what = "a metadataset says this for each of its datasets" if nested else "a JSONL file has none"
            raise MetadataError(f"{item.get(key).at}: not allowed for {path}: {what}.")
    subset = parse_subset(item.get("subset"), allow_absolute=not nested)
    return LeafRef(
        path=path,
        split_part=item.text("split_part") or scope.split_part,
        is_jsonl=kind is DatasetKind.JSONL,
        subflavors=_read_subflavors(item, scope),
        dataset_config=item.text("dataset_config"),
        split_config=item.text("split_config"),
        shuffle_over_epochs_multiplier=_read_multiplier(item, scope),
        aux=_read_aux(item, base=scope.base),
        subsets=_within(scope, subset).subsets,
        filters=_filters(item, scope=scope),
        where=item.at,
    )


def _read_join(item: DocumentValue, *, scope: Scope) -> JoinRef:
    if scope.filters:
        raise MetadataError(
            f"{item.at}: a join cannot be filtered, but `filter: {scope.filters[0]}` contains it. "
            "Put the filter on the other datasets."
        )
    subset = parse_subset(item.get("subset"), allow_absolute=True)
    join = JoinRef(
        entries=(),
        joiner=_read_joiner(item),
        split_part=item.text("split_part") or scope.split_part,
        subflavors=_read_subflavors(item, scope),
        shuffle_over_epochs_multiplier=_read_multiplier(item, scope),
        subsets=_within(scope, subset).subsets,
        file=scope.chain[-1][0] if scope.chain else "",
        where=item.at,
    )
    # Defaults for entries without their own.
    defaults = {key: item.text(key) for key in ("dataset_config", "split_config")}
    entries = item.get("join")
    if isinstance(entries.plain, dict) and entries.plain:
        named = [(name, entries.get(name)) for name in entries.plain]
    else:
        named = [(None, entry) for entry in _items(entries)]
    inner = replace(
        scope,
        split_part=join.split_part,
        subflavors=join.subflavors,
        multiplier=join.shuffle_over_epochs_multiplier,
        subsets=(),
    )
    read = [
        _read_entry(entry, name=name, is_primary=number == 0, defaults=defaults, scope=inner)
        for number, (name, entry) in enumerate(named)
    ]
    return replace(join, entries=tuple(read))


def _refuse_filter(item: DocumentValue) -> None:
    """Raise for a filter of a join, or of an entry of one."""
    if "filter" in item.mapping():
        raise MetadataError(
            f"{item.at}: a join cannot be filtered: leave out `filter`, and let the joiner raise SkipSample."
        )


def _read_entry(
    item: DocumentValue, *, name: str | None, is_primary: bool, defaults: dict[str, str | None], scope: Scope
) -> JoinEntry:
    _refuse_filter(item)
    item.check_keys(_ENTRY_KEYS, required=("path",))
    path = _read_path(item, base=scope.base)
    if path.endswith((".yaml", ".yml", ".jsonl")):
        raise MetadataError(f"{item.get('path').at}: only prepared datasets can be joined, found {path}.")
    for key in _WITHOUT_EFFECT:
        if scope.is_read and item.plain.get(key, 1) != 1:
            # Energon accepts and ignores these.
            _log.warning("%s: has no effect inside a join; put it on the join itself.", item.get(key).at)
    reference = {key: entry for key, entry in item.plain.items() if key not in _WITHOUT_EFFECT and entry is not None}
    merged = DocumentValue({**defaults, **reference}, item.where, item.field)
    leaf = _leaf(merged, path=path, kind=DatasetKind.PREPARED, scope=scope)
    return JoinEntry(leaf=leaf, name=name, nonmatch=_read_nonmatch(item, is_primary=is_primary))
