"""Print how the public callables of the installed megatron-energon are called, as JSON.

{name: [[parameter, kind, needed]]}; a name is `module:function`, `module:Class` (its constructor) or
`module:Class.method`, in the module that defines it. Run by an interpreter that has megatron-energon; modules that need
what it lacks are left out.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import sys
from typing import Any

import megatron.energon

PACKAGE = "megatron.energon"


def parameters(function: Any, *, bound: bool) -> list[list[Any]] | None:
    """Return the parameters of a function, without the first one if it is bound."""
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    return [[one.name, one.kind.name, one.default is one.empty] for one in found[1 if bound else 0 :]]


def methods(kind: type) -> dict[str, Any]:
    """Return the public methods that a class defines itself, and whether they get an object first."""
    found = {}
    for name, value in vars(kind).items():
        if name.startswith("_") or (
            not isinstance(value, (staticmethod, classmethod)) and not inspect.isfunction(value)
        ):
            continue
        function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        found[name] = parameters(function, bound=not isinstance(value, staticmethod))
    return found


def main() -> None:
    out = {}
    for info in pkgutil.walk_packages(megatron.energon.__path__, f"{PACKAGE}."):
        try:
            module = importlib.import_module(info.name)
        except ImportError:
            continue
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", None) != info.name:
                continue
            where = f"{info.name.removeprefix(PACKAGE).lstrip('.')}:{name}"
            if inspect.isclass(value):
                out[where] = parameters(value, bound=False)
                out |= {f"{where}.{method}": found for method, found in methods(value).items()}
            elif inspect.isfunction(value):
                out[where] = parameters(value, bound=False)
    json.dump({name: found for name, found in sorted(out.items()) if found is not None}, sys.stdout, sort_keys=True)


if __name__ == "__main__":
    main()
