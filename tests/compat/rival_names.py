"""Print the public names of the installed megatron-energon as JSON: {module: [name]}.

Reads its source and imports nothing of it, so that modules count whose dependencies are missing. A name is public that
a module defines at its top (or lists in `__all__`), and in a package also what it imports from its own modules.
With the argument `all`, what other modules import from each other counts as well. Run by an interpreter that has
megatron-energon.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path

NOT_THEIRS = ("logger", "filetype")


def skipped(node: ast.AST) -> bool:
    """Tell whether what stands under an `if` is not there at run time, or only in a program."""
    test = ast.dump(node.test) if isinstance(node, ast.If) else ""
    return "TYPE_CHECKING" in test or "__name__" in test


def names_of(body: list[ast.stmt], is_package: bool) -> tuple[set[str], list[str] | None]:
    """Return the names that statements define, and `__all__` if they do."""
    found: set[str] = set()
    listed: list[str] | None = None
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            stored = {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
            found |= stored
            if "__all__" in stored:
                listed = [entry.value for entry in node.value.elts]
        elif isinstance(node, ast.ImportFrom) and is_package and (node.module or "").startswith("megatron.energon"):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.If | ast.Try) and not skipped(node):
            handlers = [statement for handler in getattr(node, "handlers", []) for statement in handler.body]
            inner, inner_listed = names_of([*node.body, *node.orelse, *handlers], is_package)
            found |= inner
            listed = listed or inner_listed
    return found, listed


def main() -> None:
    root = Path(importlib.util.find_spec("megatron.energon").origin).parent
    surface = {}
    for file in sorted(root.rglob("*.py")):
        is_package = file.name == "__init__.py"
        parts = file.relative_to(root).with_suffix("").parts
        found, listed = names_of(ast.parse(file.read_text()).body, is_package or sys.argv[1:] == ["all"])
        named = found if sys.argv[1:] == ["all"] else listed or found
        public = {name for name in named if name == "__version__" or not name.startswith("_")}
        surface[".".join(parts[:-1] if is_package else parts)] = sorted(public - set(NOT_THEIRS))
    json.dump(surface, sys.stdout)


if __name__ == "__main__":
    main()
