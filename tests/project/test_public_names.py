"""The public names and how they are called are written down: what users call changes on purpose only.

python tests/project/test_public_names.py        writes tests/fixtures/public-names.json again
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from enum import Enum
from pathlib import Path
from typing import Any

import energon_bridge

FIXTURE = Path(__file__).resolve().parent.parent / "fixtures" / "public-names.json"


def default_of(value: Any) -> str:
    """Return a default as text, without what differs between processes."""
    if isinstance(value, bool | int | float | str | type(None) | tuple | Enum):
        return repr(value)
    return f"<{type(value).__name__}>"


def called(value: Any) -> list[str] | None:
    """Return how something is called: its arguments, with their defaults; None: it is not."""
    if not callable(value):
        return None
    if getattr(getattr(value, "__init__", None), "__module__", None) == "typing":
        return []  # that of a Protocol, which goes with the first object
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    keyword = inspect.Parameter.KEYWORD_ONLY
    shown = []
    for one in parameters:
        text = marks.get(one.kind, "") + one.name + (" (keyword)" if one.kind is keyword else "")
        shown.append(text if one.default is inspect.Parameter.empty else f"{text} = {default_of(one.default)}")
    return shown


def public_names() -> dict[str, Any]:
    """Return each public name with how it is called, and its public methods likewise."""
    names = {}
    for name in sorted({*energon_bridge.__all__, "EnergonMultiModalDataModule"} - {"__version__"}):
        value = getattr(energon_bridge, name)
        entry: dict[str, Any] = {"called": called(value)}
        if inspect.isclass(value) and not issubclass(value, Exception):
            fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
            own = {key for base in value.__mro__ if base.__module__.startswith("energon_bridge") for key in vars(base)}
            methods = {key: getattr(value, key) for key in own - fields if not key.startswith("_")}
            entry["methods"] = {key: called(one) for key, one in sorted(methods.items()) if inspect.isroutine(one)}
        names[name] = entry
    return names


def test_public_names_are_called_as_written_down() -> None:
    assert public_names() == json.loads(FIXTURE.read_text())


if __name__ == "__main__":
    FIXTURE.write_text(json.dumps(public_names(), indent=1) + "\n")
