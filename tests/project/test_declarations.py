"""A setting is declared in three places: its record, the builder with its words, and the data module.

So `git grep` of its name shows its whole way. What else a program may set by name goes through `dataset_kwargs` or the
`settings` of a file; configurations have fields of their own only where these have other words, checks or defaults.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

from paths import REPOSITORY

from energon_bridge import WorkerConfig
from energon_bridge.core.stream.settings import RunSettings

RECORDS = ("core/stream/settings.py", "core/worker_config.py")
BUILDERS, DATA_MODULE = "core/datasets.py", "trainers/datamodule.py"
BRIDGE, TRAINING = "trainers/bridge.py", "training/config.py"
MORE = {
    "max_samples_per_sequence": {BRIDGE},
    "max_tokens_per_microbatch": {BRIDGE, TRAINING},
    "num_lanes": {BRIDGE},
    "num_workers": {BRIDGE, TRAINING},
    "packing_buffer_size": {BRIDGE, TRAINING},
    "pin_memory": {BRIDGE},
    "persistent_workers": {BRIDGE},
    "seed": {BRIDGE, TRAINING},
    "shuffle_buffer_size": {BRIDGE},
    "task_encoder": {BRIDGE},
    "trust_remote_code": {BRIDGE, TRAINING},
    "error_policy": {TRAINING},
}
"""Further places of settings: fields with which Megatron-Bridge's programs and files of training are written.

Take away what has gone; a setting that is new needs none.
"""


def declared(text: str) -> set[str]:
    """Return the fields of public classes, and the arguments of their constructors and of builders (`get_…`)."""
    names: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("get_"):
            names |= arguments(node)
        for entry in node.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_") else ():
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                names.add(entry.target.id)
            elif isinstance(entry, ast.FunctionDef) and entry.name == "__init__":
                names |= arguments(entry)
    return names


def arguments(function: ast.FunctionDef) -> set[str]:
    return {one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}


def places_of_settings(package: Path) -> dict[str, set[str]]:
    """Return the files that declare each setting: of configurations and data modules, and of the core's own records."""
    settings = {field.name for record in (RunSettings, WorkerConfig) for field in fields(record)}
    places = defaultdict(set)
    for name in (*RECORDS, BUILDERS, DATA_MODULE, BRIDGE, TRAINING):
        for setting in declared((package / name).read_text()) & settings:
            places[setting].add(name)
    return dict(places)


def test_settings_have_a_record_a_builder_and_a_data_module() -> None:
    usual = {*RECORDS, BUILDERS, DATA_MODULE}
    places = places_of_settings(REPOSITORY / "energon_bridge")
    assert {name: more for name, files in places.items() if (more := files - usual)} == MORE
    assert {name: files for name, files in places.items() if len(files & usual) > 3} == {}


def test_what_is_a_declaration() -> None:
    text = """
class Config:
    seed: int = 0
    other = 1

    def __init__(self, *, batch_size: int) -> None:
        rank: int = 0

    def method(self, limit: int) -> None: ...

class _Own:
    device: str

def get_data(path: str, /, *, checksums: bool) -> None: ...

def passed_on(filter: str) -> None: ...
"""
    assert declared(text) == {"seed", "self", "batch_size", "path", "checksums"}
