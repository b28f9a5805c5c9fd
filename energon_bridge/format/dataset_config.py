"""`dataset.yaml`: which sample type a dataset has and how its parts become fields.

Form A names a `sample_type: {__module__, __class__}`, form B a dataset class of energon by `__module__` and `__class__`
(`CrudeWebdataset`, `StandardWebdatasetFactory`, the old `CaptioningWebdataset` and its like). Both take exactly one of
`field_map` and `sample_loader` (with `part_filter`), and `subflavors`. Source: reference section 1.8.

Invariant: names of `megatron.energon` and `energon_bridge` resolve through the registry of sample types; nothing is
imported unless the caller trusts the dataset. What came from code is never shared between datasets.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import Any

from energon_bridge.errors import EnergonError, FieldMapError, MetadataError, ShardMissingError
from energon_bridge.format.code import import_class, load_function
from energon_bridge.format.documents import (
    expect_keys,
    expect_mapping,
    expect_string,
    expect_strings,
    parse_document,
)
from energon_bridge.format.field_map import FieldMap, check_fields
from energon_bridge.format.nvmeta import meta_path
from energon_bridge.samples import CrudeSample, sample_type_by_name, sample_type_names
from energon_bridge.storage import Store

PartFilter = frozenset[str] | Callable[[str], bool]

_STANDARD_CLASS = "StandardWebdatasetFactory"
_CODE_KEYS = ("field_map", "sample_loader", "part_filter", "subflavors")
OWN_PACKAGES = ("megatron.energon", "energon_bridge")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleForm:
    """How the parts of a sample become a sample: all that a dataset.yaml says but the subflavors.

    `has_code` tells that it came from the dataset's own code, or from a package other than ours.
    """

    sample_type: type
    field_map: FieldMap | None
    sample_loader: Callable[[dict[str, Any]], dict[str, Any]] | None
    part_filter: PartFilter | None
    has_code: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetConfig:
    """What a dataset.yaml says; `text` is its content as JSON, `canonical` the same with sorted keys, for the hash."""

    form: SampleForm
    subflavors: dict[str, Any]
    text: str
    canonical: str


class DatasetConfigs:
    """Reads the dataset.yaml of many datasets; what they have in common is read and kept once.

    A thousand datasets of a mix often have the same, or one that differs in its subflavors.
    """

    def __init__(self, *, trust_remote_code: bool = False) -> None:
        self._trust = trust_remote_code
        self._by_content: dict[tuple[bytes, bool], DatasetConfig] = {}
        self._forms: dict[str, SampleForm] = {}

    def read(self, store: Store, name: str) -> DatasetConfig:
        """Read a file of `.nv-meta`; raises MetadataError, FieldMapError or UntrustedCodeError."""
        rel = meta_path(name)
        where = store.url(rel)
        try:
            data = store.read(rel)
        except ShardMissingError as error:
            raise MetadataError(
                f"{where}: no such file. Run `energon prepare {store.root}`, or write it: it names the sample type "
                f"and the field map."
            ) from error
        content = (data, name.endswith(".json"))
        config = self._by_content.get(content)
        if config is None:
            config = self.build(parse_document(data, where=where), store=store, where=where)
            if not config.form.has_code:  # the code of each dataset is its own
                self._by_content[content] = config
        return config

    def build(self, value: Any, *, store: Store, where: str) -> DatasetConfig:
        """Check the content of a dataset.yaml; errors are those of `read`."""
        document = expect_mapping(value, where=where)
        shape = json.dumps({key: entry for key, entry in document.items() if key != "subflavors"})
        form = self._forms.get(shape)
        if form is None:
            form = _read_form(document, store=store, where=where, trust=self._trust)
            if not form.has_code:
                self._forms[shape] = form
        subflavors = document.get("subflavors")
        return DatasetConfig(
            form=form,
            subflavors={} if subflavors is None else expect_mapping(subflavors, where=where, field="subflavors"),
            text=json.dumps(document, separators=(",", ":")),
            canonical=json.dumps(document, sort_keys=True, separators=(",", ":")),
        )


def _read_form(document: dict[str, Any], *, store: Store, where: str, trust: bool) -> SampleForm:
    sample_type = _sample_type(document, store=store, where=where, trust=trust)
    crude = issubclass(sample_type, CrudeSample)
    field_map = _field_map(document, sample_type, crude=crude, where=where)
    loader, part_filter = _code(document, store=store, crude=crude, where=where, trust=trust)
    if field_map is not None:
        part_filter = field_map.parts
    named = document.get("sample_type", document)
    return SampleForm(
        sample_type=sample_type,
        field_map=field_map,
        sample_loader=loader,
        part_filter=part_filter,
        has_code=loader is not None or callable(part_filter) or not _is_own(named["__module__"]),
    )


def _is_own(module: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in OWN_PACKAGES)


def _sample_type(document: dict[str, Any], *, store: Store, where: str, trust: bool) -> type:
    class_name = document.get("__class__", _STANDARD_CLASS)
    if class_name == _STANDARD_CLASS:
        allowed = ("__module__", "__class__", "sample_type", *_CODE_KEYS)
        expect_keys(document, allowed=allowed, required=("sample_type",), where=where)
        named = expect_mapping(document["sample_type"], where=where, field="sample_type")
        keys = ("__module__", "__class__")
        expect_keys(named, allowed=keys, required=keys, where=where, field="sample_type")
        return _resolve(named, store=store, where=where, field="sample_type", trust=trust)
    keys = ("__module__", "__class__")
    expect_keys(document, allowed=(*keys, *_CODE_KEYS), required=keys, where=where)
    return _resolve(document, store=store, where=where, field="", trust=trust)


def _resolve(named: dict[str, Any], *, store: Store, where: str, field: str, trust: bool) -> type:
    dot = f"{field}." if field else ""
    module = expect_string(named["__module__"], where=where, field=f"{dot}__module__")
    name = expect_string(named["__class__"], where=where, field=f"{dot}__class__")
    if _is_own(module):
        try:
            return sample_type_by_name(name)
        except (EnergonError, KeyError) as error:
            raise MetadataError(
                f"{where}, field `{dot}__class__`: no sample type {name!r}; known are {', '.join(sample_type_names())}."
            ) from error
    imported = import_class(module, name, root=store.root, where=where, trust=trust)
    # Dataset classes written for energon say which samples they have; a class of samples is named as it is.
    imported = getattr(imported, "__sample_type__", imported)
    if not isinstance(imported, type) or not (is_dataclass(imported) or issubclass(imported, CrudeSample)):
        raise MetadataError(f"{where}, field `{dot}__class__`: {module}.{name} is no sample type.")
    return imported


def _field_map(document: dict[str, Any], sample_type: type, *, crude: bool, where: str) -> FieldMap | None:
    entries = document.get("field_map")
    choices = [key for key in ("field_map", "sample_loader") if document.get(key) is not None]
    if crude:
        if choices:
            raise FieldMapError(f"{where}, field `{choices[0]}`: a crude dataset has none; cookers read its parts.")
        return None
    if len(choices) != 1:
        found = "both" if choices else "neither"
        raise FieldMapError(f"{where}: expected exactly one of `field_map` and `sample_loader`, found {found}.")
    if entries is None:
        return None
    if document.get("part_filter") is not None:
        raise FieldMapError(f"{where}, field `part_filter`: not with a field map, which says itself what is needed.")
    fields = expect_mapping(entries, where=where, field="field_map")
    field_map = FieldMap(fields, where=f"{where}, field_map")
    check_fields(field_map, sample_type, where=f"{where}, field_map")
    return field_map


def _code(
    document: dict[str, Any], *, store: Store, crude: bool, where: str, trust: bool
) -> tuple[Callable[[dict[str, Any]], dict[str, Any]] | None, PartFilter | None]:
    loader = document.get("sample_loader")
    part_filter = document.get("part_filter")
    function = None
    if loader is not None and not crude:
        reference = expect_string(loader, where=where, field="sample_loader")
        function = load_function(store, reference, default_name="sample_loader", trust=trust)
    if part_filter is None:
        return function, None
    if isinstance(part_filter, list):
        return function, frozenset(expect_strings(part_filter, where=where, field="part_filter"))
    reference = expect_string(part_filter, where=where, field="part_filter")
    return function, load_function(store, reference, default_name="part_filter", trust=trust)
