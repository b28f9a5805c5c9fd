"""Functions that come with a dataset: `sample_loader.py:function`, run only when the caller trusts the dataset.

Invariant: no line of such a file runs without `trust_remote_code=True`. A loaded function is sent to other processes as
source text, because its file is not an importable module.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from energon_bridge.errors import MetadataError, UntrustedCodeError
from energon_bridge.format.nvmeta import meta_path
from energon_bridge.storage import Store


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
