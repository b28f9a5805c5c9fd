"""The core runs without the rest: its files, copied to an empty folder, load and resume a dataset there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from forked import run_afresh
from paths import HELPERS, REPOSITORY
from test_layering import PACKAGE


def copy_of_the_core(folder: Path) -> Path:
    """Copy the folder of the core and what was compiled in it, and nothing else of the package."""
    copy = folder / PACKAGE / "core"
    shutil.copytree(REPOSITORY / PACKAGE / "core", copy, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_the_core_prepares_loads_packs_groups_saves_and_restores_alone(tmp_path: Path) -> None:
    folder = copy_of_the_core(tmp_path / "core")
    code = f"""
import pathlib, runpy, sys
sys.path = [{str(folder)!r}] + [path for path in sys.path if path and not pathlib.Path(path, {PACKAGE!r}).exists()]
runpy.run_path({str(HELPERS / "core_alone.py")!r}, run_name="__main__")
import energon_bridge.core
print(energon_bridge.core.__file__)
"""
    ended = run_afresh(code, tmp_path, "megatron", arguments=[str(tmp_path)])  # whose groups the trainers know
    assert ended.returncode == 0, ended.stderr
    loaded, place = ended.stdout.splitlines()
    assert Path(place) == folder / PACKAGE / "core" / "__init__.py"
    assert len(json.loads(loaded)) > 50


def test_the_order_stands_on_errors_and_random_numbers_alone(tmp_path: Path) -> None:
    code = """
import sys, energon_bridge.core.order.choose, energon_bridge.core.order.blend, energon_bridge.core.order.topology
print(*sorted(name for name in sys.modules if name.startswith("energon_bridge.")), "torch" in sys.modules)
"""
    ended = run_afresh(code, tmp_path, "torch")
    assert ended.returncode == 0, ended.stderr
    *loaded, torch = ended.stdout.split()
    order = f"{PACKAGE}.core.order"
    assert {name for name in loaded if not name.startswith(order)} <= {f"{PACKAGE}.core", f"{PACKAGE}.core.errors"}
    assert torch == "False"
