"""`megatron.energon` served by energon_bridge: code written for megatron-energon runs unchanged.

It imports core, models, cloud and tools. Begin with `install()`, which adds an import hook: from then on, `import
megatron.energon` returns objects of this package. `surface` lists the public names of megatron-energon by module,
`table` decides what each of them is here: our own object, an adapter, or a name that raises and says what to use.
Adapters: `loading`, `factories`, `preparing`, `decoders`, `epath`; wrappers of datasets: `wrapped` describes them,
`composed` makes a task encoder of them, `build_hooks` reads those of `build_…` hooks. `conventions` has the order of
validation and the numbers that hooks see. `python -m energon_bridge.compat SCRIPT` runs a program without changing it.
"""

from __future__ import annotations

import logging
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any

from energon_bridge.compat import table
from energon_bridge.compat.surface import VERSION, modules
from energon_bridge.compat.table import PACKAGE
from energon_bridge.core.errors import ConfigurationError

__all__ = ["install"]

logger = logging.getLogger(__name__)


def install(*, trust_remote_code: bool = False) -> None:
    """Make `import megatron.energon` return the objects of energon_bridge, in this process and its forks.

    Call it before anything imports `megatron.energon`; a second call only changes `trust_remote_code`. Other parts of
    the namespace package, such as `megatron.core`, are found as before. An installed megatron-energon is ignored, with
    a warning.

    Args:
        trust_remote_code: Run `sample_loader.py`, part filters and classes that datasets name, as megatron-energon
            always does, unless the code passes `trust_remote_code=` itself.

    Raises:
        ConfigurationError: The real megatron-energon has already been imported.
    """
    finder = installed()
    if finder is not None:
        finder.trust_remote_code = trust_remote_code
        return
    imported = sys.modules.get(PACKAGE)
    if imported is not None:
        raise ConfigurationError(
            f"{PACKAGE} is already imported, from {imported.__file__}: call energon_bridge.compat.install() before "
            "anything imports it, or run the program with `python -m energon_bridge.compat SCRIPT`"
        )
    other = other_package()
    if other is not None:
        logger.warning("megatron-energon is installed (%s); energon_bridge replaces it in this process", other)
    sys.meta_path.insert(0, Finder(trust_remote_code=trust_remote_code))
    sys.meta_path.append(NamespaceFinder())


# ---------------------------------------------------------------------------------------------------------------------
# The import hook.
#
# Builds `megatron.energon` and its modules from the names in `surface`, resolved by `table`. Invariants: the hook
# handles only `megatron.energon` and its submodules; every other part of the namespace package `megatron`
# (megatron-core) is found as before, even if it is installed later. Names are resolved on first use, so importing
# `megatron.energon` imports no more than `energon_bridge`.


NAMESPACE = PACKAGE.partition(".")[0]
DISTRIBUTION = "megatron-energon"


class Finder(MetaPathFinder):
    """Handles imports of `megatron.energon`; comes before all other finders.

    Attributes:
        trust_remote_code: Whether code that comes with datasets may run, unless the caller says otherwise.
    """

    def __init__(self, *, trust_remote_code: bool) -> None:
        self.trust_remote_code = trust_remote_code
        self._modules = modules()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a module of megatron-energon, None for any other."""
        name = module_of(fullname)
        if name is None or name not in self._modules:
            return None
        is_package = any(other.startswith(f"{name}." if name else "") for other in self._modules if other != name)
        return ModuleSpec(fullname, _Maker(self._modules), is_package=is_package, origin="energon_bridge.compat")

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        """Yield megatron-energon's metadata for `importlib.metadata`, with the version that `__version__` has."""
        name = None if context is None else context.name
        if name is None or re.sub(r"[-_.]+", "-", name).lower() == DISTRIBUTION:
            yield _Installed()


class _Installed(Distribution):
    """The metadata of megatron-energon, as far as programs ask for it."""

    def read_text(self, filename: str) -> str | None:
        """Return the text of METADATA; there is no other file."""
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {table.resolve('__version__', '')}\n"

    def locate_file(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Return where a file of the distribution would be: in this folder."""
        return pathlib.Path(__file__).parent / path


class NamespaceFinder(MetaPathFinder):
    """Handles `import megatron` if no installed package provides a part of it; comes after all other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of an empty namespace package."""
        if fullname != NAMESPACE:
            return None
        spec = ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = _Portions()  # type: ignore[assignment]  # any iterable of paths will do
        return spec


class _Portions:
    """The current folders of the namespace package: others may be added to `sys.path` later."""

    def __iter__(self) -> Iterator[str]:
        spec = PathFinder.find_spec(NAMESPACE)
        return iter(() if spec is None else spec.submodule_search_locations or ())


class _Maker(Loader):
    """Gives a module the names of its counterpart in megatron-energon, resolved on first use."""

    def __init__(self, modules: dict[str, tuple[str, ...]]) -> None:
        self._modules = modules

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave creating the module to the import system."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Give a module its `__getattr__`, `__dir__` and `__all__`."""
        name = module_of(module.__name__)
        assert name is not None
        public = set(self._modules[name])
        names = set(public)
        if not name:  # our own names are found as well, for code that uses both
            names |= table.OURS
        below = f"{name}." if name else ""
        elsewhere = {entry: other for other, entries in reversed(self._modules.items()) for entry in entries}
        commands = {
            other.rpartition(".")[2]: other
            for other, entries in self._modules.items()
            if name == "cli.main" and other.startswith("tools.") and "command" in entries
        }
        children = {other.removeprefix(below) for other in self._modules if other.startswith(below) and other != name}

        def look_up(attribute: str) -> Any:
            if attribute in names:
                value = table.resolve(attribute, name)
            elif attribute in children:
                value = import_module(f"{module.__name__}.{attribute}")
            elif attribute in elsewhere:  # modules also have the names that they import from each other
                value = table.resolve(attribute, elsewhere[attribute])
            elif attribute.removesuffix("_command") in commands:
                value = table.resolve("command", commands[attribute.removesuffix("_command")])
            elif attribute in table.OLDER:
                value = table.older(attribute)
            else:
                raise AttributeError(f"{module.__name__} of energon_bridge.compat has no {attribute!r}: {_HINT}")
            setattr(module, attribute, value)
            return value

        module.__doc__ = f"`{module.__name__}` as energon_bridge provides it: see docs/reference/compat.md."
        module.__dict__["__all__"] = sorted(public)
        module.__dict__["__getattr__"] = look_up
        module.__dict__["__dir__"] = lambda: sorted({*module.__dict__, *names, *children})


_HINT = f"megatron-energon {VERSION} has no public name like that either"


def module_of(fullname: str) -> str | None:
    """Return the name of a module relative to `megatron.energon`; None for other modules."""
    if fullname == PACKAGE:
        return ""
    return fullname.removeprefix(f"{PACKAGE}.") if fullname.startswith(f"{PACKAGE}.") else None


def installed() -> Finder | None:
    """Return the finder that `install` added, None without one."""
    return next((finder for finder in sys.meta_path if isinstance(finder, Finder)), None)


def trusted() -> bool:
    """Whether `install` allowed code that comes with datasets."""
    finder = installed()
    return finder is not None and finder.trust_remote_code


def other_package() -> str | None:
    """Return where the real megatron-energon is installed, None if it is not."""
    namespace = PathFinder.find_spec(NAMESPACE)
    if namespace is None or namespace.submodule_search_locations is None:
        return None
    spec = PathFinder.find_spec(PACKAGE, namespace.submodule_search_locations)
    return None if spec is None else spec.origin
