"""What the package looks like in numbers: modules, importers, types of one name, and the files of a sample and a state.

    python scripts/house.py            # the numbers
    python scripts/house.py --list     # also: modules with one importer, types of one name, and the files of each way

A module with one importer is one that only one other module imports (commands, which are found by name, are none).
The way of a sample is every file of the package in which a function runs, on loading threads too, while some
microbatches are delivered, once the loader has opened all its lanes; the way of a state likewise, while it is saved and
while a new loader takes it, without the threads, which may still load ahead.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent / "energon_bridge"


def module_name(path: Path) -> str:
    """Return a file's dotted name."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.Module, names: set[str]) -> Iterator[str]:
    """Yield the modules of the package that a module imports, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in names else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def importers_of(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Return for each module which others import it."""
    importers = defaultdict(set)
    names = {*trees, *map(module_name, PACKAGE.rglob("*.c"))}
    for name, tree in trees.items():
        for other in imported(tree, names):
            if other in trees and other != name:
                importers[other].add(name)
    return importers


def head_lines(tree: ast.Module) -> int:
    """Return the lines of a module before its first definition that are docstring or imports."""
    lines = 0
    for place, node in enumerate(tree.body):
        docstring = place == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if docstring or isinstance(node, ast.Import | ast.ImportFrom):
            lines += (node.end_lineno or node.lineno) - node.lineno + 1
    return lines


def types_of_one_name(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Return the names that classes and aliases of types in several modules have, but for those of the drop-in."""
    places = defaultdict(list)
    for module, tree in trees.items():
        for node in tree.body if not module.startswith(f"{PACKAGE.name}.compat") else ():
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp | ast.Name):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
                for name in names:
                    if name[:1].isupper() and not name.isupper():
                        places[name].append(module)
    return {name: modules for name, modules in places.items() if len(modules) > 1}


def noting(seen: set[str]) -> Callable[[FrameType, str, Any], None]:
    """Return a profiler that notes the files of the package in which a function runs."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)) and frame.f_code.co_name != "<module>":
            seen.add(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    return note


def files_of(act: Callable[[], Any]) -> list[str]:
    """Return the files of the package in which a function runs in this thread during `act`."""
    seen: set[str] = set()
    sys.setprofile(noting(seen))
    try:
        act()
    finally:
        sys.setprofile(None)
    return sorted(seen)


def ways() -> dict[str, list[str]]:
    """Return the files that a sample and a state pass, in a loader without workers."""
    from energon_bridge import WorkerConfig, get_savable_loader, get_train_dataset
    from energon_bridge.tools.testing import create_captioning_test_dataset

    with tempfile.TemporaryDirectory() as folder:
        path = create_captioning_test_dataset(Path(folder) / "data", num_train=800)  # no epoch ends meanwhile
        config = WorkerConfig(rank=0, world_size=1, num_workers=0, seed=1)

        def loader() -> Any:
            spec = get_train_dataset(path, batch_size=2, worker_config=config, shuffle_buffer_size=8)
            return get_savable_loader(spec)

        first, second = loader(), loader()
        on_threads: set[str] = set()
        threading.setprofile(noting(on_threads))  # for the loading threads, which start now
        batches = iter(first)
        laps = 2 * first.ownership.num_lanes
        for _ in islice(batches, laps):
            pass
        threading.setprofile(None)
        on_threads.clear()
        here = files_of(lambda: [next(batches) for _ in range(laps)])  # long enough that each lane reads a round
        found = {"a sample": sorted({*here, *on_threads}), "a state out": files_of(first.save_state_rank)}
        state = first.save_state_rank()
        found["a state back"] = files_of(lambda: second.restore_state_rank(state))
        return found


def main() -> None:
    """Print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    listed = parser.parse_args().list
    texts = {module_name(path): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    lines = sum(text.count("\n") for text in texts.values())
    importers = importers_of(trees)
    single = {name: next(iter(who)) for name, who in importers.items() if len(who) == 1}
    head = sum(map(head_lines, trees.values()))
    print(f"{len(trees)} modules, {lines} lines, {100 * head / lines:.1f} % docstrings and imports of modules")
    print(f"{len(single)} modules with one importer")
    for name, who in sorted(single.items()) if listed else ():
        print(f"    {texts[name].count(chr(10)):4d} {name.partition('.')[2]:40} <- {who.partition('.')[2]}")
    types = types_of_one_name(trees)
    print(f"{len(types)} names of several types")
    for name, modules in sorted(types.items()) if listed else ():
        print(f"    {name:20} {', '.join(module.partition('.')[2] for module in modules)}")
    carriers = [name for name in trees if "WorkerConfig" in texts[name] and takes_config(trees[name])]
    for what, files in {**ways(), "a WorkerConfig": carriers}.items():
        print(f"{what}: {len(files)} files")
        for file in files if listed else ():
            print(f"    {file}")


def takes_config(tree: ast.Module) -> bool:
    """Return whether a function of a module takes a WorkerConfig."""
    return any(
        isinstance(node, ast.arg) and node.annotation and "WorkerConfig" in ast.unparse(node.annotation)
        for node in ast.walk(tree)
    )


if __name__ == "__main__":
    main()
