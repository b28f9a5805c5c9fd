"""The direction of the arrows: imports point down the layers, in no circle, and from the core into no other room.

Layers and rooms below are those that CONTRIBUTING.md draws. Every import counts, also one inside a function (that is
where knots of modules hide), and one under `if TYPE_CHECKING`: who reads a module has to know what it names.
"""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from paths import REPOSITORY

from energon_bridge.core.registry import load

PACKAGE = "energon_bridge"

# From the ground up: a layer imports only from itself and from the layers before it.
LAYERS = (
    "errors",
    "registry",
    "rng",
    "topology",
    "worker_config",
    "samples",
    "transforms",
    "storage",
    "format",
    "rows",
    "av",
    "stores",
    "mix",
    "plan",
    "task_encoder",
    "stream",
    "loader",
    "datasets",
    "forecast",
    "preview",
    "replica",
    "dataloader",
    "verify",
    "datamodule",
    "integrations",
    "training",
    "prepare",
    "cli",
    "testing",
    "__init__",  # the public names: on top of everything
    "compat",  # which only gives these names under another one
)
# The products in this wheel. What no other room names is the core, so a new module of a layer of its own joins it; the
# longest name counts.
ROOMS = {
    "models": """
        transforms av format.jpeg samples.devices samples.pixels task_encoder.families task_encoder.arrays
        task_encoder.conversation task_encoder.grouping task_encoder.images task_encoder.inputs task_encoder.joining
        task_encoder.layout task_encoder.multimodal task_encoder.packed_sequences task_encoder.packing
        task_encoder.pickled task_encoder.pixels task_encoder.resize task_encoder.sample_encoders
        task_encoder.sequences task_encoder.templates task_encoder.texts task_encoder.torchcodec_images
        task_encoder.visual
    """,
    "trainers": "integrations replica plan.balance stream.planned loader.shares task_encoder.costs",
    "cloud": """
        loader.ray_actor loader.ray_engine loader.ray_relay
        storage.answers storage.buckets storage.fsspec_store storage.http storage.node_cache storage.ranges
        storage.remote stores.file_cache
    """,
    "tools": """
        rows forecast preview verify cli testing format.columns mix.expression plan.amounts plan.buckets
        loader.quarantine loader.summary prepare.columns prepare.convert prepare.dataset_yaml prepare.duplicates
        prepare.engines prepare.hub prepare.joins prepare.left_out prepare.lint prepare.media prepare.shard_writer
        prepare.shards prepare.sources prepare.speech prepare.summary
    """,
    "drop-in": "compat",
    "training": "training",
}
# Lines of each room at most. Raise one on purpose only: what the room gives must be worth what it costs.
BUDGETS = {
    "core": 25_985,
    "models": 11_710,
    "trainers": 7_450,
    "cloud": 4_820,
    "tools": 17_080,
    "drop-in": 3_950,
    "training": 4_880,
}
MAX_LINES = 1000  # of one file: the budgets keep rooms small, this keeps a file one idea
RUN_AS_COMMAND = 'if __name__ == "__main__":\n    sys.exit(main())\n'


def python_files(root: Path) -> list[Path]:
    return sorted(path for path in (root / PACKAGE).rglob("*.py"))


def module_name(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def imported_names(node: ast.AST, module: str, is_package: bool) -> list[str]:
    """Return the dotted names that an import statement asks for: `from a.b import c` asks for `a.b.c`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        package = module.split(".") if is_package else module.split(".")[:-1]
        package = package[: len(package) - (node.level - 1)]
        base = ".".join([*package, *([node.module] if node.module else [])])
    return [f"{base}.{alias.name}" for alias in node.names]


def lazy_names(root: Path) -> dict[str, str]:
    """Return where the names of packages come from that import them on first use, as their stub says."""
    found = {}
    for stub in sorted((root / PACKAGE).glob("*/**/__init__.pyi")):
        package = module_name(root, stub)
        for node in ast.walk(ast.parse(stub.read_text())):
            for name in imported_names(node, package, True):
                found[f"{package}.{name.rpartition('.')[2]}"] = name
    return found


@functools.cache
def imports(root: Path) -> dict[str, set[str]]:
    """Return, for each module of the package, the modules of the package that it imports."""
    compiled = [path for path in (root / PACKAGE).rglob("*.pyi") if not path.with_suffix(".py").exists()]
    files = {module_name(root, path): path for path in [*python_files(root), *compiled]}
    lazy = lazy_names(root)
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        targets: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
            for name in imported_names(node, module, path.name == "__init__.py"):
                if name == f"{PACKAGE}.__version__" or name.split(".")[0] != PACKAGE:
                    continue  # the version is a constant of the root, everyone may read it
                name = lazy.get(name, name)
                # the longest prefix that is a module: what is behind it is a name inside that module
                while name not in files:
                    name = name.rpartition(".")[0]
                targets.add(name)
        graph[module] = targets - {module}
    return graph


def unknown_layers(root: Path) -> list[str]:
    return sorted({module for module in imports(root) if layer_of(module) not in LAYERS})


def upward_arrows(root: Path) -> list[str]:
    arrows = []
    for module, targets in imports(root).items():
        for target in targets:
            if LAYERS.index(layer_of(target)) > LAYERS.index(layer_of(module)):
                arrows.append(f"{module} -> {target}")
    return sorted(arrows)


def room_of(module: str) -> str:
    """Return the room of a module: that of its longest name in ROOMS, or the core."""
    rooms = {name: room for room, names in ROOMS.items() for name in names.split()}
    name = module.removeprefix(f"{PACKAGE}.")
    while name and name not in rooms:
        name = name.rpartition(".")[0]
    return rooms.get(name, "core")


def crossings(root: Path) -> list[str]:
    """Return the imports from the core into other rooms."""
    return sorted(
        f"{module} -> {target}".replace(f"{PACKAGE}.", "")
        for module, targets in imports(root).items()
        for target in targets
        if room_of(module) == "core" != room_of(target)
    )


def lines_of_rooms(root: Path) -> Counter[str]:
    lines: Counter[str] = Counter()
    for path in python_files(root):
        lines[room_of(module_name(root, path))] += path.read_text().count("\n")
    return lines


def cycle(root: Path) -> list[str]:
    """Return the modules along one import cycle, or nothing."""
    graph = imports(root)
    done: set[str] = set()
    path: list[str] = []

    def walk(module: str) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        path.append(module)
        for target in sorted(graph[module]):
            if found := walk(target):
                return found
        done.add(path.pop())
        return []

    return next((found for module in sorted(graph) if (found := walk(module))), [])


def prints(root: Path) -> list[str]:
    found = []
    for path in python_files(root):
        if layer_of(module_name(root, path)) == "cli" or path.read_text().endswith(RUN_AS_COMMAND):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                found.append(f"{path.relative_to(root)}:{node.lineno}")
    return found


def long_files(files: list[Path]) -> list[str]:
    counts = {path: path.read_text().count("\n") for path in files}
    return [f"{path.name}: {count} lines" for path, count in counts.items() if count > MAX_LINES]


def missing_docstrings(root: Path) -> list[str]:
    return [
        str(path.relative_to(root)) for path in python_files(root) if not ast.get_docstring(ast.parse(path.read_text()))
    ]


def test_every_module_belongs_to_a_layer():
    assert unknown_layers(REPOSITORY) == []


def test_imports_point_down():
    assert upward_arrows(REPOSITORY) == []


def test_the_core_imports_no_other_room():
    assert crossings(REPOSITORY) == []


def test_rooms_name_what_exists():
    modules = {module.removeprefix(f"{PACKAGE}.") for module in imports(REPOSITORY)}
    assert {name for names in ROOMS.values() for name in names.split()} <= modules


def test_what_is_registered_exists():
    """And lies outside the core, or the core could import it."""
    table = tomllib.loads((REPOSITORY / PACKAGE / "core/registry.toml").read_text())
    for kind, names in table.items():
        for name, place in names.items():
            assert room_of(place.partition(":")[0]) != "core", (kind, name)
            assert load(kind, name) is not None


def test_rooms_keep_to_their_budgets():
    lines = lines_of_rooms(REPOSITORY)
    assert {room: (lines[room], budget) for room, budget in BUDGETS.items() if lines[room] > budget} == {}
    assert lines.keys() == BUDGETS.keys()


def test_no_import_cycles():
    assert cycle(REPOSITORY) == []


def test_only_the_command_line_prints():
    assert prints(REPOSITORY) == []


def test_no_file_is_huge():
    ours = [
        path for folder in (PACKAGE, "scripts", "benchmarks", "tests") for path in (REPOSITORY / folder).rglob("*.py")
    ]
    assert long_files(ours) == []


def test_every_file_says_what_it_is():
    assert missing_docstrings(REPOSITORY) == []


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"__init__.py": "", **files}.items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    "statement",
    [
        "from energon_bridge.core.loader import x",
        "import energon_bridge.core.loader",
        "from energon_bridge import loader",
        "from ..loader import x",
        "from .. import loader",
        "def f():\n    from energon_bridge.core.loader import x",
        "if TYPE_CHECKING:\n    pass\nelse:\n    from energon_bridge.core.loader import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from energon_bridge.core.loader import x",
        "try:\n    import energon_bridge.core.loader.workers\nexcept ImportError:\n    pass",
    ],
)
def test_an_upward_arrow_is_found_however_it_is_written(tmp_path, statement):
    root = write_tree(
        tmp_path,
        {
            "core/storage/__init__.py": "",
            "storage/a.py": statement,
            "core/loader/__init__.py": "",
            "core/loader/workers.py": "",
        },
    )
    assert [arrow.split(".loader")[0] for arrow in upward_arrows(root)] == [
        "energon_bridge.core.storage.a -> energon_bridge"
    ]


@pytest.mark.parametrize("statement", ["from energon_bridge import __version__", "import numpy.loader"])
def test_what_is_no_arrow(tmp_path, statement):
    root = write_tree(tmp_path, {"core/storage/__init__.py": statement, "core/loader/__init__.py": ""})
    assert upward_arrows(root) == []


def test_a_package_that_imports_its_names_on_first_use_is_no_way_around(tmp_path):
    stub, asked = "from .http import x as x", "from energon_bridge.core.storage import x"
    files = {"core/storage/__init__.py": "", "storage/__init__.pyi": stub, "cloud/http.py": "", "mix.py": asked}
    assert crossings(write_tree(tmp_path, files)) == ["mix -> storage.http"]


def test_the_public_names_are_no_way_around(tmp_path):
    root = write_tree(tmp_path, {"loader.py": "from energon_bridge import get_loader"})
    assert upward_arrows(root) == ["energon_bridge.core.loader -> energon_bridge"]


@pytest.mark.parametrize("statement", ["import {}", "def f():\n    import {}", "if TYPE_CHECKING:\n    import {}"])
def test_a_crossing_is_found_in_functions_and_for_types_too(tmp_path, statement):
    outside = "energon_bridge.cloud.http"
    files = {
        "core/storage/__init__.py": statement.format(outside),
        "cloud/http.py": "import energon_bridge.core.storage.local",
    }
    root = write_tree(tmp_path, {**files, "core/storage/local.py": "", "av.py": f"import {outside}"})
    assert crossings(root) == ["storage -> storage.http"]
    assert [room_of(f"energon_bridge.{name}") for name in ("storage", "av.media", "cli")] == ["core", "models", "tools"]
    assert lines_of_rooms(write_tree(root, {"av.py": "\n\n"}))["models"] == 2


def test_a_cycle_is_found(tmp_path):
    root = write_tree(
        tmp_path,
        {
            "core/order/__init__.py": "",
            "plan/a.py": "from energon_bridge.core.order.b import x",
            "plan/b.py": "def f():\n    from . import c",
            "plan/c.py": "import energon_bridge.core.order.a",
        },
    )
    assert cycle(root) == [f"energon_bridge.core.order.{name}" for name in "abca"]


def test_other_offences_are_found(tmp_path):
    too_long = "\n" * (MAX_LINES + 1)
    root = write_tree(
        tmp_path, {"core/order/rng.py": "print(1)", "tools/cli/main.py": '"""Doc."""\nprint(1)', "nowhere.py": too_long}
    )
    assert prints(root) == ["energon_bridge/core/order/rng.py:1"]
    assert long_files(python_files(root)) == [f"nowhere.py: {MAX_LINES + 1} lines"]
    assert unknown_layers(root) == ["energon_bridge.nowhere"]
    assert "energon_bridge/core/order/rng.py" in missing_docstrings(root)
    assert "energon_bridge/tools/cli/main.py" not in missing_docstrings(root)


PICKING = {"leaves": 3, "counts": 2, "rounds_at": 3}
"""What turns a draw into a leaf and a sample (`Blend`, `LeafOrder`), and with how many arguments."""
CHOOSES = f"{PACKAGE}.plan.choose"


def pickers(root: Path) -> list[str]:
    """Return where draws are turned into leaves and samples, outside of the order's own modules."""
    own = {*(f"{PACKAGE}.plan.{name}" for name in ("amounts", "blend", "buckets", "leaf")), CHOOSES}
    return [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in python_files(root)
        if module_name(root, path) not in own
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and PICKING.get(node.func.attr) == len(node.args) + len(node.keywords)
    ]


def test_samples_are_chosen_in_one_place(tmp_path: Path) -> None:
    assert pickers(REPOSITORY) == []
    again = "leaf = blend.leaves(lane, draw, 1)[0]\nindex = order.rounds_at(lane, number, fewest=1).indices[0]"
    root = write_tree(tmp_path, {"stream/again.py": again, "core/order/choose.py": again})
    assert pickers(root) == [f"{PACKAGE}/stream/again.py:1", f"{PACKAGE}/stream/again.py:2"]


def test_no_private_name_of_torch_is_used() -> None:
    """They change without notice between the versions that users have."""
    private = re.compile(r"\btorch\b[\w.]*\._[a-z]|from torch[\w.]* import .*\b_[a-z]|\btorch\._C\b", re.MULTILINE)
    assert private.search("torch.utils.data._utils.pin_memory")
    assert private.search("from torch.utils import a, _b")
    assert not [str(path) for path in python_files(REPOSITORY) if private.search(path.read_text())]
