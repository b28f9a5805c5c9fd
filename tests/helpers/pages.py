"""The pages of the documentation, and the blocks of code that stand in them."""

from __future__ import annotations

import re
from pathlib import Path

from paths import REPOSITORY

README = REPOSITORY / "README.md"
DOCS = REPOSITORY / "docs"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]


def name_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def blocks(language: str, page: Path) -> list[tuple[int, str]]:
    """Return the fenced blocks of a language (a regular expression) with the line each one starts at."""
    text = page.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: match.start(1)].count("\n") + 1, match.group(1)) for match in found]
