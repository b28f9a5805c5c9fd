"""`dataset.yaml`: the sample type of a dataset, and how its parts become fields.

Form A names a `sample_type: {__module__, __class__}`, form B a dataset class of energon by `__module__` and `__class__`
(`CrudeWebdataset`, `StandardWebdatasetFactory`, the old `CaptioningWebdataset` and its like). Both take exactly one of
`field_map` and `sample_loader` (with `part_filter`), `subflavors`, and `split_config`, the split file in `.nv-meta`
that goes with it, whatever a caller asks for. Source: reference section 1.8.

Invariant: names of `megatron.energon` and `energon_bridge` resolve through the registry of sample types; nothing is
imported unless the caller trusts the dataset. What came from code is never shared between datasets.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from types import ModuleType
from typing import Any

from energon_bridge.errors import EnergonError, FieldMapError, MetadataError, ShardMissingError, UntrustedCodeError
from energon_bridge.format.documents import expect_keys, expect_mapping, expect_string, expect_strings, parse_document
from energon_bridge.format.field_map import FieldMap, check_fields
from energon_bridge.format.nvmeta import meta_path
from energon_bridge.samples import ChatMLSample, CrudeSample, sample_type_by_name, sample_type_names
from energon_bridge.storage import Store

PartFilter = frozenset[str] | Callable[[str], bool]

_STANDARD_CLASS = "StandardWebdatasetFactory"
_CODE_KEYS = ("field_map", "sample_loader", "part_filter", "subflavors")
_SPLIT = "split_config"
_BRIDGE = "megatron.bridge."
_CHATML = ("ChatMLSample", "ChatMLWebdataset")
_CHATML_SOUND = ("wav", "flac", "mp3", "audio")
OWN_PACKAGES = ("megatron.energon", "energon_bridge")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleForm:
    """How the parts of a sample become a sample: everything in a dataset.yaml but the subflavors.

    `has_code`: it came from the dataset's own code, or from another package than this one.
    """

    sample_type: type
    field_map: FieldMap | None
    sample_loader: Callable[[dict[str, Any]], dict[str, Any]] | None
    part_filter: PartFilter | None
    has_code: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetConfig:
    """The content of a dataset.yaml; `text` is it as JSON, `canonical` the same with sorted keys, for the hash.

    `split_config` is the split file that it names, if any.
    """

    form: SampleForm
    subflavors: dict[str, Any]
    split_config: str | None
    text: str
    canonical: str


class DatasetConfigs:
    """Reads the dataset.yaml of many datasets; equal parts are parsed and kept once.

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
                f"{where}: no such file. Run `energon prepare {store.root}`, or write it, with the sample type "
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
        shape = json.dumps({key: entry for key, entry in document.items() if key not in ("subflavors", _SPLIT)})
        form = self._forms.get(shape)
        if form is None:
            described = {key: entry for key, entry in document.items() if key != _SPLIT}
            form = _read_form(described, store=store, where=where, trust=self._trust)
            if not form.has_code:
                self._forms[shape] = form
        subflavors = getattr(form.sample_loader, "subflavors", document.get("subflavors"))
        split = document.get(_SPLIT)
        return DatasetConfig(
            form=form,
            subflavors={} if subflavors is None else expect_mapping(subflavors, where=where, field="subflavors"),
            split_config=None if split is None else expect_string(split, where=where, field=_SPLIT),
            text=json.dumps(document, separators=(",", ":")),
            canonical=json.dumps(document, sort_keys=True, separators=(",", ":")),
        )


def _read_form(document: dict[str, Any], *, store: Store, where: str, trust: bool) -> SampleForm:
    code = _class_code(document, store=store, where=where, trust=trust)
    if code is not None:
        return SampleForm(
            sample_type=code.sample_type,
            field_map=None,
            sample_loader=code,
            part_filter=code.part_filter,
            has_code=True,
        )
    sample_type = _sample_type(document, store=store, where=where, trust=trust)
    crude = issubclass(sample_type, CrudeSample)
    field_map = _field_map(document, sample_type, crude=crude, where=where)
    loader, part_filter = _code(document, store=store, crude=crude, where=where, trust=trust)
    if field_map is not None:
        part_filter = field_map.parts
    if sample_type is ChatMLSample and field_map is not None:
        _refuse_sound(field_map, where=where)
    named = document.get("sample_type", document)
    return SampleForm(
        sample_type=sample_type,
        field_map=field_map,
        sample_loader=loader,
        part_filter=part_filter,
        has_code=loader is not None
        or callable(part_filter)
        or not (_is_own(named["__module__"]) or sample_type is ChatMLSample),
    )


def _class_code(document: dict[str, Any], *, store: Store, where: str, trust: bool) -> Any:
    """Return the code of a dataset class that has its own; None for any other dataset.

    Only classes written for `megatron.energon` as this package provides it (`compat`) have such code.
    """
    module, name = document.get("__module__"), document.get("__class__")
    if not isinstance(module, str) or not isinstance(name, str) or _is_own(module):
        return None
    if not trust and name in _CHATML and module.startswith(_BRIDGE):
        return None
    cls = import_class(module, name, root=store.root, where=where, trust=trust)
    hook = getattr(cls, "__dataset_code__", None)
    if hook is not None:
        return hook(store.root, document)
    own = [method for method in ("load_sample", "_decoder") if hasattr(cls, method)]
    if hasattr(cls, "__sample_type__") and own:
        raise MetadataError(
            f"{where}, field `__class__`: {module}.{name} is a dataset class of megatron-energon, whose code "
            f"(`{own[0]}`) only runs under the drop-in: `python -m energon_bridge.compat`."
        )
    return None


def _refuse_sound(field_map: FieldMap, *, where: str) -> None:
    sound = sorted(part for part in field_map.parts if part.rpartition(".")[2].lower() in _CHATML_SOUND)
    if sound:
        raise MetadataError(
            f"{where}, field `field_map`: Megatron-Bridge's own class turns the part {sound[0]!r} of a ChatML dataset "
            "into a waveform of 16 kHz, which this package does not do. Use that class: install Megatron-Bridge, run "
            "the program under the drop-in of megatron-energon (`python -m energon_bridge.compat`), and pass "
            "trust_remote_code=True."
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
                f"{where}, field `{dot}__class__`: unknown sample type {name!r}; known are "
                f"{', '.join(sample_type_names())}."
            ) from error
    if name in _CHATML and module.startswith(_BRIDGE) and not trust:
        return ChatMLSample
    imported = import_class(module, name, root=store.root, where=where, trust=trust)
    # Dataset classes written for energon name their sample type; a sample class is used as it is.
    imported = getattr(imported, "__sample_type__", imported)
    if not isinstance(imported, type) or not (is_dataclass(imported) or issubclass(imported, CrudeSample)):
        raise MetadataError(f"{where}, field `{dot}__class__`: {module}.{name} is not a sample type.")
    return imported


def _field_map(document: dict[str, Any], sample_type: type, *, crude: bool, where: str) -> FieldMap | None:
    entries = document.get("field_map")
    choices = [key for key in ("field_map", "sample_loader") if document.get(key) is not None]
    if crude:
        if choices:
            raise FieldMapError(
                f"{where}, field `{choices[0]}`: a crude dataset has none, since cookers read its parts. Remove it."
            )
        return None
    if len(choices) != 1:
        found = "both" if choices else "neither"
        raise FieldMapError(f"{where}: expected exactly one of `field_map` and `sample_loader`, found {found}.")
    if entries is None:
        return None
    if document.get("part_filter") is not None:
        raise FieldMapError(
            f"{where}, field `part_filter`: not allowed with a field map, which names the parts itself. Remove it."
        )
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


# ---------------------------------------------------------------------------------------------------------------------
# Functions that come with a dataset: `sample_loader.py:function`, run only when the caller trusts the dataset.
#
# Invariant: no line of such a file runs without `trust_remote_code=True`. A loaded function is sent to other processes
# as source text, because its file is not an importable module.


class DatasetFunction:
    """One function of a file in `.nv-meta`; callable and picklable."""

    __slots__ = ("_function", "name", "source", "where")

    def __init__(self, *, source: str, name: str, where: str) -> None:
        self.source = source
        self.name = name
        self.where = where
        module = ModuleType("energon_dataset_code")
        module.__file__ = where
        try:
            exec(compile(source, where, "exec"), module.__dict__)  # the caller trusts the dataset
            self._function: Callable[..., Any] = getattr(module, name)
        except Exception as error:
            raise MetadataError(f"{where}: cannot load the function `{name}`: {error!r}") from error

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self.source, self.name, self.where)

    def __repr__(self) -> str:
        return f"DatasetFunction({self.where}:{self.name})"


def _load(source: str, name: str, where: str) -> DatasetFunction:
    return DatasetFunction(source=source, name=name, where=where)


def load_function(store: Store, reference: str, *, default_name: str, trust: bool) -> DatasetFunction:
    """Load `file.py:function` of `.nv-meta`; raises UntrustedCodeError without trust, MetadataError if missing."""
    file_name, _, function_name = reference.partition(":")
    rel = meta_path(file_name)
    where = store.url(rel)
    if not trust:
        raise untrusted(store.root, f"the {default_name} in {where}")
    if not store.exists(rel):
        raise MetadataError(
            f"{where}: no such file, but dataset.yaml names it as {default_name}. Add it, or remove the entry."
        )
    return DatasetFunction(source=store.read(rel).decode("utf-8-sig"), name=function_name or default_name, where=where)


def import_class(module: str, name: str, *, root: str, where: str, trust: bool) -> Any:
    """Import a class of a module outside this package; raises UntrustedCodeError without trust."""
    if not trust:
        raise untrusted(root, f"the class {module}.{name}, named in {where},")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise MetadataError(f"{where}: cannot import {module}.{name}: {error}") from error


def untrusted(root: str, what: str) -> UntrustedCodeError:
    """Build the error for code that a dataset contains or names and that the caller does not trust."""
    return UntrustedCodeError(
        f"{root}: the dataset wants to run code: {what}. If you trust it, pass trust_remote_code=True."
    )


def fields_of(made: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields made by a sample loader, without those that the reader sets (some loaders return them, too)."""
    return {name: value for name, value in made.items() if name not in _SET_BY_READER}


_SET_BY_READER = frozenset({"__restore_key__", "__sources__", "__subflavors__"})
