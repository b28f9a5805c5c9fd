"""`dataset.yaml`: the sample type of a dataset, and how its parts become fields.

Form A names a `sample_type: {__module__, __class__}`, form B a dataset class of energon by `__module__` and `__class__`
(`CrudeWebdataset`, `StandardWebdatasetFactory`, the old `CaptioningWebdataset` and its like). Both take exactly one of
`field_map` and `sample_loader` (with `part_filter`), `subflavors`, and `split_config`, the split file in `.nv-meta`
that goes with it, whatever a caller asks for. Both forms are those of Megatron Energon 7.4.

Invariant: names of `megatron.energon` and `energon_bridge` resolve through the registry of sample types; nothing is
imported unless the caller trusts the dataset. What came from code is never shared between datasets.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, is_dataclass
from types import ModuleType
from typing import Any

from energon_bridge.core.errors import (
    EnergonError,
    FieldMapError,
    MetadataError,
    ShardMissingError,
    UntrustedCodeError,
    called,
    did_you_mean,
)
from energon_bridge.core.format.documents import DocumentValue, parse_document
from energon_bridge.core.format.field_map import FieldMap, check_fields
from energon_bridge.core.format.nvmeta import meta_path
from energon_bridge.core.samples import ChatMLSample, CrudeSample, Sample, sample_type_by_name, sample_type_names
from energon_bridge.core.storage import Store

PartFilter = frozenset[str] | Callable[[str], bool]

_STANDARD_CLASS = "StandardWebdatasetFactory"
_CLASS_KEYS = ("__module__", "__class__")
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
            config = self.build(DocumentValue(parse_document(data, where=where), where), store=store)
            if not config.form.has_code:  # the code of each dataset is its own
                self._by_content[content] = config
        return config

    def build(self, document: DocumentValue, *, store: Store) -> DatasetConfig:
        """Check the content of a dataset.yaml; errors are those of `read`."""
        plain = document.mapping()
        shape = json.dumps({key: entry for key, entry in plain.items() if key not in ("subflavors", _SPLIT)})
        form = self._forms.get(shape)
        if form is None:
            described = {key: entry for key, entry in plain.items() if key != _SPLIT}
            form = _read_form(DocumentValue(described, document.where), store=store, trust=self._trust)
            if not form.has_code:
                self._forms[shape] = form
        given = getattr(form.sample_loader, "subflavors", plain.get("subflavors"))
        subflavors = DocumentValue(given, document.where, "subflavors")
        return DatasetConfig(
            form=form,
            subflavors={} if subflavors.plain is None else subflavors.mapping(),
            split_config=document.text(_SPLIT),
            text=json.dumps(plain, separators=(",", ":")),
            canonical=json.dumps(plain, sort_keys=True, separators=(",", ":")),
        )


def is_own(module: str) -> bool:
    """Whether a module is named as one of this package, or of the one whose formats it reads."""
    return any(module == package or module.startswith(f"{package}.") for package in OWN_PACKAGES)


def _read_form(document: DocumentValue, *, store: Store, trust: bool) -> SampleForm:
    code = _class_code(document, store=store, trust=trust)
    if code is not None:
        return SampleForm(
            sample_type=code.sample_type,
            field_map=None,
            sample_loader=code,
            part_filter=code.part_filter,
            has_code=True,
        )
    named = _named_type(document)
    sample_type = _resolve(named, store=store, trust=trust)
    crude = issubclass(sample_type, CrudeSample)
    field_map = _field_map(document, sample_type, crude=crude)
    loader, part_filter = _code(document, store=store, crude=crude, trust=trust)
    if field_map is not None:
        part_filter = field_map.parts
    if sample_type is ChatMLSample and field_map is not None:
        _refuse_sound(field_map, at=document.get("field_map").at)
    return SampleForm(
        sample_type=sample_type,
        field_map=field_map,
        sample_loader=loader,
        part_filter=part_filter,
        has_code=loader is not None
        or callable(part_filter)
        or not (is_own(named.plain["__module__"]) or sample_type is ChatMLSample),
    )


def _class_code(document: DocumentValue, *, store: Store, trust: bool) -> Any:
    """Return the sample loader of a dataset class that brings code of its own; None for any other dataset.

    Only classes written for `megatron.energon` as this package provides it (`compat`) have such code.
    """
    module, name = (document.plain.get(key) for key in _CLASS_KEYS)
    if not isinstance(module, str) or not isinstance(name, str) or is_own(module):
        return None
    if not trust and name in _CHATML and module.startswith(_BRIDGE):
        return None
    cls = import_class(module, name, root=store.root, where=document.where, trust=trust)
    hook = getattr(cls, "__dataset_code__", None)
    if hook is not None:
        return hook(store.root, document.plain)
    own = [method for method in ("load_sample", "_decoder") if hasattr(cls, method)]
    if hasattr(cls, "__sample_type__") and own:
        raise MetadataError(
            f"{document.get('__class__').at}: {module}.{name} is a dataset class of megatron-energon, whose code "
            f"(`{own[0]}`) only runs under the drop-in: `python -m energon_bridge.compat`."
        )
    return None


def _refuse_sound(field_map: FieldMap, *, at: str) -> None:
    sound = sorted(part for part in field_map.parts if part.rpartition(".")[2].lower() in _CHATML_SOUND)
    if sound:
        raise MetadataError(
            f"{at}: Megatron-Bridge's own class turns the part {sound[0]!r} of a ChatML dataset into a waveform of 16 "
            "kHz, which this package does not do. Use that class: install Megatron-Bridge, run the program under the "
            "drop-in of megatron-energon (`python -m energon_bridge.compat`), and pass trust_remote_code=True."
        )


def _named_type(document: DocumentValue) -> DocumentValue:
    """Return the mapping that names the sample type or dataset class, after a check of all keys."""
    if document.plain.get("__class__", _STANDARD_CLASS) != _STANDARD_CLASS:
        document.check_keys((*_CLASS_KEYS, *_CODE_KEYS), required=_CLASS_KEYS)
        return document
    document.check_keys((*_CLASS_KEYS, "sample_type", *_CODE_KEYS), required=("sample_type",))
    named = document.get("sample_type")
    named.check_keys(_CLASS_KEYS, required=_CLASS_KEYS)
    return named


def _resolve(named: DocumentValue, *, store: Store, trust: bool) -> type:
    module = named.get("__module__").string()
    name = named.get("__class__").string()
    at = named.get("__class__").at
    if is_own(module):
        try:
            return sample_type_by_name(name)
        except (EnergonError, KeyError) as error:
            known = ", ".join(sample_type_names())
            raise MetadataError(f"{at}: unknown sample type {name!r}; known are {known}.") from error
    if name in _CHATML and module.startswith(_BRIDGE) and not trust:
        return ChatMLSample
    imported = import_class(module, name, root=store.root, where=named.where, trust=trust)
    # Dataset classes written for energon name their sample type; a sample class is used as it is.
    imported = getattr(imported, "__sample_type__", imported)
    if not isinstance(imported, type) or not (is_dataclass(imported) or issubclass(imported, CrudeSample)):
        raise MetadataError(f"{at}: {module}.{name} is not a sample type.")
    return imported


def _field_map(document: DocumentValue, sample_type: type, *, crude: bool) -> FieldMap | None:
    choices = [key for key in ("field_map", "sample_loader") if document.plain.get(key) is not None]
    if crude:
        if choices:
            raise FieldMapError(
                f"{document.get(choices[0]).at}: a crude dataset has none, since cookers read its parts. Remove it."
            )
        return None
    if len(choices) != 1:
        found = "both" if choices else "neither"
        raise FieldMapError(f"{document.at}: expected exactly one of `field_map` and `sample_loader`, found {found}.")
    if choices == ["sample_loader"]:
        return None
    if document.plain.get("part_filter") is not None:
        raise FieldMapError(
            f"{document.get('part_filter').at}: not allowed with a field map, which names the parts itself. Remove it."
        )
    where = f"{document.where}, field_map"
    field_map = FieldMap(document.get("field_map").mapping(), where=where)
    check_fields(field_map, sample_type, where=where)
    return field_map


def _code(
    document: DocumentValue, *, store: Store, crude: bool, trust: bool
) -> tuple[Callable[[dict[str, Any]], dict[str, Any]] | None, PartFilter | None]:
    """Return the `sample_loader` and the `part_filter` of a dataset.yaml, loaded if they are functions."""
    function = None
    loader = None if crude else document.text("sample_loader")
    if loader is not None:
        function = load_function(store, loader, default_name="sample_loader", trust=trust)
    part_filter = document.get("part_filter")
    if part_filter.plain is None:
        return function, None
    if isinstance(part_filter.plain, list):
        return function, frozenset(part_filter.strings())
    return function, load_function(store, part_filter.string(), default_name="part_filter", trust=trust)


# ---------------------------------------------------------------------------------------------------------------------
# Functions that come with a dataset: `sample_loader.py:function`, run only when the caller trusts the dataset.
#
# Invariant: no line of such a file runs without `trust_remote_code=True`. A loaded function is sent to other processes
# as source text, because its file is not an importable module.


class DatasetFunction:
    """One function of a file in `.nv-meta`; callable and picklable."""

    __slots__ = ("_function", "name", "source", "where")

    def __init__(self, source: str, name: str, where: str) -> None:
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
        return DatasetFunction, (self.source, self.name, self.where)

    def __repr__(self) -> str:
        return f"DatasetFunction({self.where}:{self.name})"


_NAMES_ONLY: ContextVar[bool] = ContextVar("energon_bridge_names_only", default=False)


@contextmanager
def names_only() -> Iterator[None]:
    """Open datasets whose samples are named and never read: their functions are not loaded, and need no trust."""
    token = _NAMES_ONLY.set(True)
    try:
        yield
    finally:
        _NAMES_ONLY.reset(token)


def never_called() -> Callable[..., Any] | None:
    """Return what stands for a function of datasets that are opened for names only; None where they are read."""
    return _never_called if _NAMES_ONLY.get() else None


def _never_called(*_: Any, **__: Any) -> Any:
    raise AssertionError("a sample of a dataset that was opened for names only was read")


def load_function(store: Store, reference: str, *, default_name: str, trust: bool) -> Callable[..., Any]:
    """Load `file.py:function` of `.nv-meta`; raises UntrustedCodeError without trust, MetadataError if missing."""
    if (instead := never_called()) is not None:
        return instead
    file_name, _, function_name = reference.partition(":")
    rel = meta_path(file_name)
    where = store.url(rel)
    if not trust:
        raise untrusted(store.root, f"the {default_name} in {where}")
    if not store.exists(rel):
        raise MetadataError(
            f"{where}: no such file, but dataset.yaml names it as {default_name}. Add it, or remove the entry."
        )
    return DatasetFunction(store.read(rel).decode("utf-8-sig"), function_name or default_name, where)


def import_class(module: str, name: str, *, root: str, where: str, trust: bool) -> Any:
    """Import a class of a module outside this package; raises UntrustedCodeError without trust.

    A sample type of a module that the program itself has imported needs none; a function there may do anything.
    """
    imported = getattr(sys.modules.get(module), name, None)
    if isinstance(imported, type) and issubclass(imported, Sample):
        return imported
    if not trust:
        hint = did_you_mean(module, ("energon_bridge", "megatron.energon"), cutoff=0.8)
        raise untrusted(root, f"the class {module}.{name}, named in {where}", hint)
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise MetadataError(f"{where}: cannot import {module}.{name}: {error}") from error


def how_to_trust() -> str:
    """Return how a caller trusts code."""
    commands = "commands and python -m energon_bridge.compat: --trust-remote-code"
    return f"trust_remote_code=True{called('trust_remote_code')} ({commands})"


def untrusted(root: str, what: str, hint: str = "") -> UntrustedCodeError:
    """Build the error for code that a dataset contains or names and that the caller does not trust."""
    return UntrustedCodeError(
        f"{root}: the dataset wants to run code: {what}.{hint} If you trust it, pass {how_to_trust()}."
    )


def fields_of(made: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields made by a sample loader, without those that the reader sets (some loaders return them, too)."""
    return {name: value for name, value in made.items() if name not in _SET_BY_READER}


_SET_BY_READER = frozenset({"__restore_key__", "__sources__", "__subflavors__"})
