"""How commands print: tables that fold long paths, JSON, and readable numbers."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDE = 200


def print_json(value: Any) -> None:
    """Print plain values as indented JSON."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def json_option(command: Callable[..., dict[str, Any] | None]) -> Callable[..., None]:
    """Add `--json` to a command that returns its result: only that goes to stdout then."""

    @click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON; all else goes to stderr.")
    @functools.wraps(command)
    def run(*, as_json: bool, **options: Any) -> None:
        if not as_json:
            command(**options)
            return
        with contextlib.redirect_stdout(sys.stderr):
            done = command(**options)
        print_json(done or {})

    return run


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Print names and values, one pair per line."""
    rows = list(pairs)
    width = max((len(name) for name, _ in rows), default=0) + 2
    for name, value in rows:
        click.echo(f"{name + ':':<{width}}{value}")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> None:
    """Print a table: the first `left` columns are text, which folds, the others numbers."""
    table = Table()
    for number, column in enumerate(columns):
        is_text = number < left
        table.add_column(column, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # paths may hold what rich takes for markup
    Console(width=width_of_output(), highlight=False).print(table)


def width_of_output() -> int:
    """Return the columns of the terminal; without one, lines are as long as they need to be."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDE


def first(names: Sequence[object], most: int) -> str:
    """Return the first of some names, with an ellipsis if there are more."""
    return ", ".join(map(str, names[:most])) + (", …" if len(names) > most else "")


def number(value: int | None) -> str:
    """Format a count with separators; None is a dash."""
    return "-" if value is None else f"{value:,}"


def listed(names: Sequence[str]) -> str:
    """Return names as in a sentence: `a, b and c`."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def count_of(value: int, noun: str) -> str:
    """Format a count with its noun: `1 shard`, `1,000 shards`."""
    return f"{value:,} {noun}{'' if value == 1 else 's'}"


def epochs(value: float | None) -> str:
    """Format a number of epochs, with enough digits to tell an unfinished epoch from a whole one."""
    if value is None:
        return "-"
    for digits in (2, 3, 4, 6):
        text = f"{value:,.{digits}f}"
        if value == round(value) or round(value, digits) != round(value):
            break
    return text


def leaf_name(row: dict[str, Any]) -> str:
    """Name a leaf: path, split part and subset."""
    subset = f" samples {row['subset'].replace(':', ' to ', 1)}" if row.get("subset") else ""
    part = f" [{row['split_part']}]" if row["split_part"] else ""
    return f"{row['path']}{part}{subset}"


def format_bytes(count: int) -> str:
    """Format a number of bytes with a binary unit."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} PiB"
