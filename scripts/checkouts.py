"""Modules of another project's checkout, imported without all that the packages around them import.

`scripts/bridge-encoders` and `scripts/nemo-tests` run files of Megatron-Bridge and NeMo unchanged, in an environment
that has a few of their dependencies. A `Checkout` on `sys.meta_path` finds the files; packages are empty but for their
folder, and modules that only lend a name to an annotation or a base class are made up.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Collection
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


class Checkout:
    """Finds the modules of a package of a checkout.

    Args:
        source: Folder that the package is in.
        package: Its name.
        made_up: Modules without files: each has a class of every name that is asked for.
        whole: Packages of which `__init__` is run.
    """

    def __init__(self, source: Path, package: str, made_up: Collection[str], whole: Collection[str] = ()) -> None:
        self.source, self.package = source, package
        self.made_up, self.whole = frozenset(made_up), frozenset(whole)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return how to make a package or a made-up module, None for what Python finds itself."""
        if name in self.made_up:
            return ModuleSpec(name, self)  # type: ignore[arg-type]
        folder = self.source.joinpath(*name.split("."))
        if not f"{name}.".startswith(f"{self.package}.") or name in self.whole or not folder.is_dir():
            return None
        spec = ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        spec.submodule_search_locations = [str(folder)]
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """Let the import system make the module."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Give a made-up module a class of every name."""
        if module.__name__ in self.made_up:
            module.__dict__["__getattr__"] = _named


def _named(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__class_getitem__": classmethod(lambda kind, _: kind)})


def digest(tensor: Any) -> str:
    """Return what only an equal tensor has, type and shape included."""
    tensor = tensor.contiguous()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha1(tensor.numpy().tobytes()).hexdigest()}"
