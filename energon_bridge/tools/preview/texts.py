"""Shows samples and batches to people, as a text of a few lines (in notebooks as a table: `notebook.py`).

The text is bounded in size, whatever a batch holds, and never raises: properties of users' classes may raise anything,
so every `except` here is broad.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from energon_bridge.core.samples.sample import meta_field
from energon_bridge.core.samples.showing import counted, described

_WIDTH = 120
MOST_FIELDS = 24
_MOST_TEXT = 60


def text_of(record: Any, names: Iterable[str]) -> str:
    """Return the text of a sample or batch with those fields, without meta fields."""
    title = title_of(record)
    parts = []
    for name, value in shown_fields(record, names):
        if value is not None:
            parts.append(f"{name} {value_text(value)}")
    more = [f"and {len(parts) - MOST_FIELDS} more fields"] if len(parts) > MOST_FIELDS else []
    parts = parts[:MOST_FIELDS] + more
    kind = type(record).__name__
    if not parts:
        return f"{kind}({title})"
    line = f"{kind}({title}: {', '.join(parts)})"
    return line if len(line) <= _WIDTH else described(f"{kind}({title}:", [",\n".join(parts)]) + ")"


def value_text(value: Any) -> str:
    """Describe a value: dtype and shape of arrays, the beginning of a text, types and number of anything else."""
    try:
        return _value_text(value)
    except Exception:  # a property of a user's class
        return type(value).__name__


def title_of(record: Any) -> str:
    """Return the title: the key of a sample, or the number of rows and of real rows of a batch."""
    keys = meta_field(record, "__key__")
    if not isinstance(keys, list):
        return value_text(keys) if isinstance(keys, str) else "no key"
    valid = meta_field(record, "__valid__")
    real = len(keys)
    try:
        if valid is not None and str(getattr(valid, "device", "cpu")) == "cpu":
            real = int(valid.sum())
    except Exception:  # a hook may have put anything there, and what is shown in a debugger or a log must not raise
        real = len(keys)
    return f"batch of {len(keys)}" + (f", {real} of them valid" if real != len(keys) else "")


def shown_fields(record: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the fields with these names, without meta fields and those that are not set."""
    for name in names:
        if not (name.startswith("__") and name.endswith("__")):
            try:
                yield name, record[name] if isinstance(record, dict) else getattr(record, name)
            except AttributeError:  # an unset slot
                continue


def _value_text(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, complex)):
        return repr(value)
    if isinstance(value, str):
        return repr(shortened(value, _MOST_TEXT))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return counted(len(value), "byte")
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return _array_text(value)
    kind = type(value).__name__
    if isinstance(value, dict):
        return f"{kind} of {shortened(', '.join(map(str, list(value)[:8])), _MOST_TEXT)}" if value else f"empty {kind}"
    if isinstance(value, (list, tuple, set, frozenset)):
        kinds = {type(entry).__name__ for entry in value}
        if not kinds:
            return f"empty {kind}"
        return f"{len(value)} x {kinds.pop() if len(kinds) == 1 else '(' + ', '.join(sorted(kinds)[:4]) + ')'}"
    if hasattr(value, "mode") and hasattr(value, "size") and hasattr(value, "convert"):
        return f"{value.mode} image {value.size[0]} x {value.size[1]}"
    return str(kind)


def _array_text(value: Any) -> str:
    device = str(getattr(value, "device", "cpu"))
    where = "" if device == "cpu" else f" on {device}"
    return f"{str(value.dtype).rpartition('.')[2]}[{', '.join(map(str, value.shape))}]{where}"


def shortened(text: str, length: int) -> str:
    """Return a text cut to a number of characters."""
    return text if len(text) <= length else f"{text[:length]}…"
