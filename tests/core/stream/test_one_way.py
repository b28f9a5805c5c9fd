"""There is one way to run a hook: `core/stream/user_code.py`, by the table of `core/encoder/hooks.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import energon_bridge
from energon_bridge.core.encoder.hooks import ENCODER_HOOKS, Hook

PACKAGE = Path(energon_bridge.__file__).parent
CATCHES = {
    "failures.py: text_of": "the text of an exception",
    "lane.py: reported": "reports are flushed, and the error goes on",
    "policy.py: _ask": "the user's handler of errors",
    "returned.py: _array_values": "reading what a hook returned",
    "returned.py: _compared": "comparing it",
    "returned.py: _copied": "copying it",
}
"""Functions of the engine that catch every exception, and what for."""
ASKS = {"succeeded", "alert"}
SEEDS = {"seed_everything", "manual_seed", "seed"}


def modules(*rooms: str) -> Iterator[tuple[Path, ast.Module]]:
    for room in rooms:
        for path in sorted((PACKAGE / room).glob("*.py")):
            yield path, ast.parse(path.read_text())


def caught(handler: ast.ExceptHandler) -> set[str]:
    return {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} if handler.type else {""}


def test_only_steps_catch_what_hooks_raise() -> None:
    catching, leaving = set(), set()
    for path, tree in modules("core/stream"):
        handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for handler in handlers:
            around = [one.name for one in functions if any(node is handler for node in ast.walk(one))]
            if caught(handler) & {"", "Exception", "BaseException"}:
                catching.add(f"{path.name}: {around[-1] if around else ''}")
        leaving |= {path.name for one in functions if one.name == "__exit__"}
    assert catching == CATCHES.keys()
    assert leaving == {"user_code.py"}


def test_only_steps_ask_the_policy_and_seed() -> None:
    asking, seeding = set(), set()
    for path, tree in modules("core/stream"):
        for node in ast.walk(tree):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            owner = node.value.id if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else ""
            if name in ASKS and owner != "self":
                asking.add(path.name)
            if name in SEEDS and (name != "seed" or owner in ("random", "np")):
                seeding.add(path.name)
    assert asking == {"user_code.py"}
    assert seeding == {"user_code.py"}


def test_only_the_table_names_hooks() -> None:
    """(Messages and docstrings name them within sentences.)"""
    named = {
        f"{path.name}: {node.value}"
        for path, tree in modules("core/stream", "core/loader", "core/encoder")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in ENCODER_HOOKS.keys() - {"batch"} and path.name != "hooks.py"
    }
    assert named == set()


def test_a_hook_is_a_method_with_a_key_of_its_own() -> None:
    keys = [hook.key for hook in Hook if hook.key and hook not in (Hook.PREENCODE, Hook.SAMPLE_LOADER)]
    assert len(set(keys)) == len(keys)
    assert len({hook.code for hook in Hook}) == len(Hook)
