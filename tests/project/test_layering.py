"""The direction of the arrows: imports point down the products and the layers of the core, in no circle.

The products are the folders of the package; CONTRIBUTING.md draws them. Every import counts, also one inside a function
(that is where knots of modules hide), and one under `if TYPE_CHECKING`: who reads a module has to know what it names.
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

# From the ground up: a product imports only from itself and from those before it.
PRODUCTS = ("core", "cloud", "models", "trainers", "tools", "compat", "training")
# The core from the ground up, likewise.
LAYERS = (
    "errors",
    "registry",
    "order",
    "worker_config",
    "samples",
    "storage",
    "format",
    "stores",
    "mix",
    "encoder",
    "stream",
    "loader",
    "datasets",
    "dataloader",
    "prepare",
)
# Lines of code of each product at most, without blank lines, comments, docstrings and imports: a comment costs nothing.
# Raise one on purpose only: what the product gives must be worth what it costs.
BUDGETS = {
    "core": 17_610,
    "cloud": 3_450,
    "models": 12_255,
    "trainers": 4_691,
    "tools": 15_645,
    "compat": 2_560,
    "training": 3_150,
}
MAX_LINES = 1000  # of one file: the budgets keep rooms small, this keeps a file one idea
RUN_AS_COMMAND = 'if __name__ == "__main__":\n    sys.exit(main())\n'


def python_files(root: Path) -> list[Path]:
    return sorted(path for path in (root / PACKAGE).rglob("*.py"))


def module_name(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def product_of(module: str) -> str:
    """Return the folder of a module; the package itself, which gives the public names, is on top of all."""
    return module.split(".")[1] if "." in module else "__init__"


def floor_of(module: str) -> tuple[int, int]:
    """Return how far up a module is: its product's place, and in the core its layer's; unknown ones are on top."""
    product = product_of(module)
    if product not in PRODUCTS:
        return len(PRODUCTS), 0
    parts = module.split(".")
    layered = product == "core" and len(parts) > 2
    return PRODUCTS.index(product), (LAYERS.index(parts[2]) if parts[2] in LAYERS else len(LAYERS)) if layered else -1


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
                if name.split(".")[0] != PACKAGE:
                    continue
                name = lazy.get(name, name)
                # the longest prefix that is a module: what is behind it is a name inside that module
                while name not in files:
                    name = name.rpartition(".")[0]
                targets.add(name)
        graph[module] = targets - {module}
    return graph


def unknown_places(root: Path) -> list[str]:
    """Return the modules outside of the products, and those of the core outside of its layers."""
    found = []
    for module in imports(root):
        parts = module.split(".")
        known = len(parts) == 1 or parts[1] in PRODUCTS
        if not known or (parts[1:2] == ["core"] and len(parts) > 2 and parts[2] not in LAYERS):
            found.append(module)
    return sorted(found)


def upward_arrows(root: Path) -> list[str]:
    arrows = []
    for module, targets in imports(root).items():
        for target in targets:
            gives_names = module == PACKAGE or module == f"{PACKAGE}.compat.table"  # all of them, under another name
            if floor_of(target) > floor_of(module) and not gives_names:
                arrows.append(f"{module} -> {target}")
    return sorted(arrows)


def arrows_between_products(root: Path) -> set[tuple[str, str]]:
    arrows = {(product_of(module), product_of(other)) for module, others in imports(root).items() for other in others}
    return {(one, other) for one, other in arrows if one != other}


def lines_of_code(path: Path) -> int:
    """Count the lines of a file that hold code: no blank lines, comments, docstrings or imports."""
    text = path.read_text()
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        text_only = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if text_only or isinstance(node, ast.Import | ast.ImportFrom):
            skipped |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and line.strip()[0] != "#" and number not in skipped for number, line in lines)


def lines_of_products(root: Path) -> Counter[str]:
    lines: Counter[str] = Counter()
    for path in python_files(root):
        lines[product_of(module_name(root, path))] += lines_of_code(path)
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
        if "tools/cli/" in path.as_posix() or path.read_text().endswith(RUN_AS_COMMAND):
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


def test_every_module_has_its_place():
    assert unknown_places(REPOSITORY) == []


def test_imports_point_down():
    assert upward_arrows(REPOSITORY) == []


def test_products_have_few_arrows():
    assert len(arrows_between_products(REPOSITORY)) <= 30


def test_what_is_registered_exists():
    """And lies outside the core, or the core could import it."""
    table = tomllib.loads((REPOSITORY / PACKAGE / "core/registry.toml").read_text())
    for kind, names in table.items():
        for name, place in names.items():
            assert product_of(place.partition(":")[0]) != "core", (kind, name)
            assert load(kind, name) is not None


def test_products_keep_to_their_budgets():
    lines = lines_of_products(REPOSITORY)
    assert {name: (lines[name], budget) for name, budget in BUDGETS.items() if lines[name] > budget} == {}
    assert lines.keys() == {*BUDGETS, "__init__"}


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


def stale_pointers(root: Path) -> list[str]:
    """Return the files that comments and docstrings name as `folder/file.py`, and that are not there."""
    found = []
    for path in python_files(root):
        product = root / PACKAGE / product_of(module_name(root, path))
        near = (path.parent, path.parent.parent, product, root / PACKAGE, root)
        for named in re.findall(r"`((?:[a-z_]+/)*[a-z_0-9]+\.(?:py|c|toml))`", path.read_text()):
            if named != "sample_loader.py" and not any((folder / named).exists() for folder in near):
                found.append(f"{path.relative_to(root)}: {named}")
    return found


def test_files_that_are_named_exist(tmp_path):
    assert stale_pointers(REPOSITORY) == []
    root = write_tree(tmp_path, {"core/__init__.py": "", "core/a.py": "# `b.py`, `core/a.py`, `a.py`, `order/c.py`"})
    assert stale_pointers(root) == [f"{PACKAGE}/core/a.py: b.py", f"{PACKAGE}/core/a.py: order/c.py"]


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
        "from energon_bridge.core import loader",
        "from ..loader import x",
        "from .. import loader",
        "def f():\n    from energon_bridge.core.loader import x",
        "if TYPE_CHECKING:\n    pass\nelse:\n    from energon_bridge.core.loader import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from energon_bridge.core.loader import x",
        "try:\n    import energon_bridge.core.loader.workers\nexcept ImportError:\n    pass",
        "from energon_bridge import tools",
        "def f():\n    import energon_bridge.tools.cli",
    ],
)
def test_an_upward_arrow_is_found_however_it_is_written(tmp_path, statement):
    empty = ("core/__init__.py", "core/storage/__init__.py", "core/loader/__init__.py", "core/loader/workers.py")
    files = dict.fromkeys([*empty, "tools/__init__.py", "tools/cli.py"], "")
    root = write_tree(tmp_path, {**files, "core/storage/a.py": statement})
    (arrow,) = upward_arrows(root)
    module, _, target = arrow.partition(" -> ")
    assert module == "energon_bridge.core.storage.a"
    assert target.startswith(("energon_bridge.core.loader", "energon_bridge.tools"))


@pytest.mark.parametrize(
    "statement",
    ["import numpy.loader", "from energon_bridge.core import __version__", "from energon_bridge.core.order import rng"],
)
def test_what_is_no_arrow(tmp_path, statement):
    empty = dict.fromkeys(("core/__init__.py", "core/order/__init__.py", "core/order/rng.py", "core/loader.py"), "")
    root = write_tree(tmp_path, {**empty, "core/storage/__init__.py": statement})
    assert upward_arrows(root) == []


def test_a_package_that_imports_its_names_on_first_use_is_no_way_around(tmp_path):
    stub, asked = "from .http import x as x", "from energon_bridge.cloud import x"
    files = {"cloud/__init__.py": "", "cloud/__init__.pyi": stub, "cloud/http.py": "", "core/mix.py": asked}
    assert upward_arrows(write_tree(tmp_path, {"core/__init__.py": "", **files})) == [
        "energon_bridge.core.mix -> energon_bridge.cloud.http"
    ]


def test_the_public_names_are_no_way_around(tmp_path):
    root = write_tree(tmp_path, {"core/__init__.py": "", "core/loader.py": "from energon_bridge import get_loader"})
    assert upward_arrows(root) == ["energon_bridge.core.loader -> energon_bridge"]


def test_lines_of_code_are_counted_alone(tmp_path):
    head = '"""Says\nwhat."""\n\nimport a\nfrom b import (\n    c,\n)\n\n# why\n'
    text = head + 'x = """\ntext\n"""\n\n\ndef f():\n    """Do."""\n    return x  # so\n'
    root = write_tree(tmp_path, {"core/__init__.py": "", "core/errors.py": text})
    assert lines_of_products(root)["core"] == 5


def test_a_cycle_is_found(tmp_path):
    root = write_tree(
        tmp_path,
        {
            "core/__init__.py": "",
            "core/order/__init__.py": "",
            "core/order/a.py": "from energon_bridge.core.order.b import x",
            "core/order/b.py": "def f():\n    from . import c",
            "core/order/c.py": "import energon_bridge.core.order.a",
        },
    )
    assert cycle(root) == [f"energon_bridge.core.order.{name}" for name in "abca"]


def test_other_offences_are_found(tmp_path):
    too_long = "\n" * (MAX_LINES + 1)
    files = {"rng.py": "print(1)", "tools/cli/main.py": '"""Doc."""\nprint(1)', "core/nowhere.py": too_long}
    root = write_tree(tmp_path, files)
    assert prints(root) == ["energon_bridge/rng.py:1"]
    assert long_files(python_files(root)) == [f"nowhere.py: {MAX_LINES + 1} lines"]
    assert unknown_places(root) == ["energon_bridge.core.nowhere", "energon_bridge.rng"]
    assert "energon_bridge/rng.py" in missing_docstrings(root)
    assert "energon_bridge/tools/cli/main.py" not in missing_docstrings(root)


PICKING = {"leaves": 3, "counts": 2, "rounds_at": 3}
"""What turns a draw into a leaf and a sample (`Blend`, `LeafOrder`), and with how many arguments."""
CHOOSES = f"{PACKAGE}.core.order.choose"


def pickers(root: Path) -> list[str]:
    """Return where draws are turned into leaves and samples, outside of the order's own modules."""
    own = {f"{PACKAGE}.core.order.{name}" for name in ("blend", "leaf")} | {CHOOSES}
    own |= {f"{PACKAGE}.tools.columns.{name}" for name in ("amounts", "buckets")}
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
    root = write_tree(tmp_path, {"core/stream/again.py": again, "core/order/choose.py": again})
    assert pickers(root) == [f"{PACKAGE}/core/stream/again.py:1", f"{PACKAGE}/core/stream/again.py:2"]


def test_no_private_name_of_torch_is_used() -> None:
    """They change without notice between the versions that users have."""
    private = re.compile(r"\btorch\b[\w.]*\._[a-z]|from torch[\w.]* import .*\b_[a-z]|\btorch\._C\b", re.MULTILINE)
    assert private.search("torch.utils.data._utils.pin_memory")
    assert private.search("from torch.utils import a, _b")
    assert not [str(path) for path in python_files(REPOSITORY) if private.search(path.read_text())]


FOREIGN = {
    "_asdict": "named tuples: public",
    "_field_defaults": "named tuples: public",
    "_slotnames": "copyreg: public in the documentation of pickle",
    "_Environ": "os",
    "_current_frames": "sys: public",
    "_exit": "os: public",
    "_forkserver": "multiprocessing",
    "_getframe": "sys: public",
    "_thread_local": "PyAV, if it has it",
    "_worker_info": "torch, where `get_worker_info` is defined, as its own workers do",
    "_credentials": "botocore",
    "_attn_implementation": "transformers",
    "_check_special_mm_tokens": "transformers, if it has it",
    "_compile_jinja_template": "transformers",
    "_get_num_multimodal_tokens": "transformers",
    "_merge_kwargs": "transformers",
    "_model_mapping": "transformers",
    "_replace_state_dict_keys_with_sharded_keys": "megatron-core",
    "_standardize_kwargs": "transformers, the rule by which image processors read the arguments of a call",
    "_set_main_param_and_optimizer_states": "megatron-core",
}
"""Private names of other libraries that the package uses, each looked at."""


def foreign_private_names(root: Path) -> set[str]:
    """Return the private names that modules import from elsewhere or ask objects for, and that none of them defines."""
    used, defined = set(), set()
    for path in python_files(root):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.ImportFrom(names=names):
                    used |= {alias.name for alias in names}
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                    defined.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                    defined.add(name)
                case ast.Attribute(attr=name):
                    used.add(name)
    return {name for name in used - defined if re.match(r"_[A-Za-z]", name)}


def test_private_names_of_other_libraries_are_known(tmp_path: Path) -> None:
    """Also those behind another name: `ranks = distributed()`, `ranks.distributed_c10d._get_default_store()`."""
    assert foreign_private_names(REPOSITORY) == set(FOREIGN)
    behind = "ranks = distributed()\nstore = ranks.distributed_c10d._get_default_store()\nself._own = 1\nstore._own"
    root = write_tree(tmp_path, {"core/stream/a.py": behind, "core/stream/b.py": "from torch.x import a, _b as c"})
    assert foreign_private_names(root) == {"_get_default_store", "_b"}
