"""Words for people: counts with their nouns, and headings with what is below them."""

from __future__ import annotations

from collections.abc import Iterable


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun: `1 shard`, `1,000 shards`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def described(head: str, lines: Iterable[str]) -> str:
    """Return a heading with its parts below, indented."""
    return "\n  ".join([head, *(line.replace("\n", "\n  ") for line in lines)])
