"""Importing the package is cheap, and every public name is there."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from forked import run_afresh
from paths import REPOSITORY

import energon_bridge
import energon_bridge.core.errors

HEAVY = ("torch", "lightning", "pytorch_lightning", "transformers", "megatron", "webdataset", "sklearn")

PROBE = """
import json, sys, time
start = time.perf_counter()
import {module}
seconds = time.perf_counter() - start
print(json.dumps([seconds, sorted(name for name in {heavy!r} if name in sys.modules)]))
"""


def probe(module: str) -> tuple[float, list[str]]:
    """Import a module in a fresh interpreter; return the seconds and which heavy packages came along."""
    code = PROBE.format(module=module, heavy=HEAVY)
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    seconds, heavy = json.loads(result.stdout)
    return seconds, heavy


def test_import_time():
    runs = [probe("energon_bridge") for _ in range(3)]
    assert min(seconds for seconds, _ in runs) < 0.150
    assert runs[0][1] == []


def test_modules_that_start_without_torch():
    modules = ("core.samples", "core.storage", "core.format", "core.prepare", "tools.cli.main")
    assert probe(", ".join(f"energon_bridge.{module}" for module in modules))[1] == []


NEEDED = {
    "trainers.lightning": ("lightning", "lightning,hf"),
    "trainers.huggingface": ("transformers", "hf"),
    "training.run": ("lightning", "lightning,hf"),
    "training.megatron.loop": ("megatron", "megatron"),
}
WITHOUT = """
import importlib, sys
sys.modules |= dict.fromkeys(["lightning", "transformers", "megatron"])
for module in sys.argv[1:]:
    try:
        importlib.import_module(f"energon_bridge.{module}")
    except ImportError as error:
        print(type(error).__name__, error)
"""


def test_modules_that_need_an_extra_name_it():
    result = run_afresh(WITHOUT, REPOSITORY, "lightning", "transformers", "megatron", arguments=[*NEEDED])
    assert result.stdout.splitlines() == [
        f"MissingPackageError this needs {package}, which is not installed: pip install 'energon-bridge[{extra}]'"
        for package, extra in NEEDED.values()
    ]


def test_public_names_resolve():
    names = set(energon_bridge.__all__)
    assert names <= set(dir(energon_bridge))
    assert [name for name in names if getattr(energon_bridge, name) is None] == []
    with pytest.raises(AttributeError, match="get_trian_dataset"):
        energon_bridge.get_trian_dataset  # noqa: B018


def test_every_name_is_listed_once():
    """In the stub, which type checkers and `lazy_loader` read, from the module that a wheel has."""
    tree = ast.parse(Path(energon_bridge.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = [alias.asname for node in imports for alias in node.names]
    assert sorted(names) == sorted({*energon_bridge.__all__, "EnergonMultiModalDataModule"} - {"__version__"})
    assert len({node.module for node in imports}) == len(imports)


def test_every_error_is_public():
    values = [value for value in vars(energon_bridge.core.errors).values() if isinstance(value, type)]
    errors = {value.__name__ for value in values if value.__module__ == energon_bridge.core.errors.__name__}
    assert errors <= set(energon_bridge.__all__)
