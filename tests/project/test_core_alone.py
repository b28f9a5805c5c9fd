"""The core runs without the rest: its files, copied to an empty folder, load and resume a dataset there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from forked import run_afresh
from paths import HELPERS, REPOSITORY
from test_layering import PACKAGE, module_name, python_files, room_of


def copy_of_the_core(folder: Path) -> Path:
    """Copy what belongs to the core, the files that only name things, the registry, and what was compiled."""
    package = REPOSITORY / PACKAGE
    modules = [path for path in python_files(REPOSITORY) if room_of(module_name(REPOSITORY, path)) == "core"]
    names = [path for path in package.rglob("__init__.pyi") if path.with_suffix(".py") in modules]
    compiled = [path for path in package.rglob("*.so") if path.parent / "__init__.py" in modules]
    for path in [*modules, *names, *compiled, package / "core/registry.toml"]:
        copy = folder / path.relative_to(REPOSITORY)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return folder


def test_the_core_prepares_loads_packs_groups_saves_and_restores_alone(tmp_path: Path) -> None:
    folder = copy_of_the_core(tmp_path / "core")
    code = f"""
import runpy, sys
sys.path = [{str(folder)!r}] + [path for path in sys.path if path not in ("", {str(REPOSITORY)!r})]
runpy.run_path({str(HELPERS / "core_alone.py")!r}, run_name="__main__")
import energon_bridge
print(energon_bridge.__file__)
"""
    ended = run_afresh(code, tmp_path, arguments=[str(tmp_path)])
    assert ended.returncode == 0, ended.stderr
    loaded, place = ended.stdout.splitlines()
    assert Path(place) == folder / PACKAGE / "__init__.py"
    assert len(json.loads(loaded)) > 50


def test_the_order_stands_on_errors_and_random_numbers_alone(tmp_path: Path) -> None:
    code = """
import sys, energon_bridge.core.order.choose, energon_bridge.core.order.blend, energon_bridge.core.order.topology
print(*sorted(name for name in sys.modules if name.startswith("energon_bridge.")), "torch" in sys.modules)
"""
    ended = run_afresh(code, tmp_path, "torch")
    assert ended.returncode == 0, ended.stderr
    *loaded, torch = ended.stdout.split()
    order = {f"{PACKAGE}.plan", *(f"{PACKAGE}.plan.{name}" for name in ("blend", "changes", "choose", "leaf"))}
    assert {*loaded} - order <= {f"{PACKAGE}.{name}" for name in ("errors", "rng", "topology")}
    assert torch == "False"
