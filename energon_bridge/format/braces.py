"""Brace expressions in lists of shard names: `part_{000..009}.tar`, `{a,b}/x.tar`.

Expansion is bash's: numeric ranges (padded where a bound has a leading zero), letter ranges, an optional step, nested
alternatives, a backslash before a character that is meant literally. Collapsing is its inverse for runs of names that
count up by one in a single number, and keeps the order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_RANGE = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)(?:\.\.(-?[0-9]+))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?[0-9]+))?")
_NUMBER = re.compile(r"([0-9]+)")
_MAX_NAMES = 2_000_000  # more shards than anyone has; a few characters can ask for any number
_MAX_CHARACTERS = 200_000_000
_PLAIN = re.compile(r"[^{},\\]+")
_SPECIAL = re.compile(r"([{},\\])")


def expand_braces(pattern: str) -> list[str]:
    """Expand a brace expression into all names; raises ValueError if braces do not match or stand for too many."""
    if "{" not in pattern and "}" not in pattern and "\\" not in pattern:
        return [pattern]
    try:
        names, position = _expand(pattern, 0, inside=False)
    except RecursionError as error:
        raise ValueError(f"{pattern[:80]!r}… has braces in too many braces") from error
    if position < len(pattern):
        raise ValueError(f"unmatched `}}` at character {position} of {pattern!r}")
    return names


def _expand(text: str, position: int, *, inside: bool) -> tuple[list[str], int]:
    """Expand up to the end, or inside braces up to the `,` or `}` that ends this alternative."""
    names = [""]
    while position < len(text):
        character = text[position]
        if character == "\\" and position + 1 < len(text):
            _check_size(names, 1, text)
            names = [name + text[position + 1] for name in names]
            position += 2
        elif character == "{":
            choices, position = _expand_braced(text, position)
            if len(names) * len(choices) > _MAX_NAMES:
                raise ValueError(f"{text[:200]!r} stands for more than {_MAX_NAMES:,} names")
            names = [name + choice for name in names for choice in choices]
        elif character == "}" or (inside and character == ","):
            break
        else:
            found = _PLAIN.match(text, position)
            run = found[0] if found else character
            _check_size(names, len(run), text)
            names = [name + run for name in names]
            position += len(run)
    return names, position


def _check_size(names: list[str], more: int, text: str) -> None:
    if len(names) * (len(names[-1]) + more) > _MAX_CHARACTERS:
        raise ValueError(f"{text[:80]!r}… stands for names of more than {_MAX_CHARACTERS:,} characters")


def _expand_braced(text: str, opening: int) -> tuple[list[str], int]:
    """Expand the braces that open at `opening`; returns the choices and the position after the closing brace."""
    closing = text.find("}", opening)
    body = text[opening + 1 : closing] if closing >= 0 else ""
    if match := _RANGE.fullmatch(body):
        return _numbers(*match.groups()), closing + 1
    if match := _LETTERS.fullmatch(body):
        first, last, step = match.groups()
        return [chr(code) for code in _span(ord(first), ord(last), step)], closing + 1
    alternatives: list[list[str]] = []
    position = opening
    while True:
        names, position = _expand(text, position + 1, inside=True)
        alternatives.append(names)
        if position >= len(text):
            raise ValueError(f"unmatched `{{` at character {opening} of {text!r}")
        if text[position] == "}":
            break
    if len(alternatives) == 1:  # braces around a single word are literal
        return [f"{{{name}}}" for name in alternatives[0]], position + 1
    return [name for names in alternatives for name in names], position + 1


def _numbers(first: str, last: str, step: str | None) -> list[str]:
    padded = any(len(bound.lstrip("-")) > 1 and bound.lstrip("-").startswith("0") for bound in (first, last))
    width = max(len(first), len(last)) if padded else 0
    return [f"{number:0{width}d}" for number in _span(int(first), int(last), step)]


def _span(first: int, last: int, step: str | None) -> range:
    stride = abs(int(step or 1)) or 1
    if abs(last - first) // stride >= _MAX_NAMES:
        raise ValueError(f"{first}..{last} stands for more than {_MAX_NAMES:,} names")
    return range(first, last + 1, stride) if first <= last else range(first, last - 1, -stride)


def collapse_braces(names: Iterable[str]) -> list[str]:
    """Write runs of consecutive names that count up by one, in one number of constant width, as brace expressions."""
    collapsed: list[str] = []
    run: list[list[str]] = []
    slot = -1
    for name in names:
        pieces = _NUMBER.split(_SPECIAL.sub(r"\\\1", name))
        changed = _counted_up(run[-1], pieces) if run else None
        if changed is not None and (len(run) == 1 or changed == slot):
            slot = changed
        elif run:
            collapsed.append(_expression(run, slot))
            run = []
        run.append(pieces)
    if run:
        collapsed.append(_expression(run, slot))
    return collapsed


def _counted_up(before: list[str], after: list[str]) -> int | None:
    """Return the only piece that differs, if it is a number that goes up by one and keeps its width."""
    if len(before) != len(after):
        return None
    different = [position for position, piece in enumerate(after) if piece != before[position]]
    if len(different) != 1 or different[0] % 2 == 0:
        return None
    old, new = before[different[0]], after[different[0]]
    return different[0] if len(old) == len(new) and int(new) == int(old) + 1 else None


def _expression(run: list[list[str]], slot: int) -> str:
    first, last = run[0], run[-1]
    if len(run) == 1:
        return "".join(first)
    return "".join([*first[:slot], f"{{{first[slot]}..{last[slot]}}}", *first[slot + 1 :]])
