"""The split that a list itself tells: by a column of its rows (`split`, `phase`, `is_test`, …), else by its name.

Rows go to the split that their column says, if it says one of each row. A list of one split is of that split as a
whole. What says nothing is dealt out by ratios.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from energon_bridge.core.errors import SourceError
from energon_bridge.models.conversations.withheld import held_out_by, says_held_out
from energon_bridge.tools.convert.lists import TableSource
from energon_bridge.tools.convert.rows import Layout, Row, Source, SourceSample, first_rows
from energon_bridge.tools.convert.splits import SPLIT_ORDER, name_split, splits_in


class SplitRows:
    """The rows of a list, split by split; their keys are those of the list."""

    def __init__(self, source: TableSource, parts: Mapping[str, Sequence[int]]) -> None:
        self.kind = source.kind
        self.where = source.where
        self.left_out = source.left_out
        self.prompt = getattr(source, "prompt", None)
        self.split_parts = tuple((part, len(parts[part])) for part in SPLIT_ORDER if part in parts)
        self._source = source
        self._order = np.concatenate([parts[part] for part, _ in self.split_parts])

    def __len__(self) -> int:
        return len(self._source)

    def row(self, number: int) -> Row:
        """Return a row of the list."""
        return self._source.row(int(self._order[number]))

    def entry(self, number: int) -> Mapping[str, Any]:
        """Return a row as the list has it; raises SourceError."""
        return self._source.entry(int(self._order[number]))

    def sample(self, number: int, layout: Layout) -> SourceSample:
        """Return a sample, not read yet, whose key is its number in the list."""
        return self._source.sample(int(self._order[number]), layout)

    def propose(self) -> Layout:
        """Propose a layout from the first rows of the list."""
        return self._source.propose()


@dataclass(frozen=True, slots=True)
class _Told:
    """What a row says of its split: by which column, which (None: in words that are not known), if it is held out."""

    column: str
    part: str | None
    held_out: bool
    by_name: bool


def by_own_split(source: Source, path: Path, taken: Collection[str]) -> tuple[Source, str | None]:
    """Return a source by the splits that it tells, and what tells them; the source itself and None if nothing does.

    Columns that are `taken` otherwise, or ignored, tell no split. Of tables that are no lists only the first rows are
    looked at, and only a table that is held out as a whole is of that split. The name of a folder counts if it is one
    of Kaldi. Raises SourceError for a source that is held out in words that do not say whether for validation or for
    tests.
    """
    told = [_told(row.values, taken) for row in first_rows(source)]
    if any(told):
        if isinstance(source, TableSource):
            told = list(_told_by_all(source, taken))
        return _by_column(source, told)
    name = f"the name {path.name}"
    is_held_out = says_held_out(path.stem)
    part = name_split(path.stem)
    if not (path.is_file() or (path / "wav.scp").is_file()) or (
        "train" in splits_in(path.stem.lower()) if is_held_out else part is None
    ):
        return source, None
    if part is None:
        raise _doubtful(source, name)
    return _whole(source, part), name


def _by_column(source: Source, told: Sequence[_Told | None]) -> tuple[Source, str | None]:
    said = [one for one in told if one is not None]
    parts = {one.part for one in said}
    why = f"the column {', '.join(sorted({one.column for one in said}))}"
    is_held_out = all(one.held_out for one in said)
    if is_held_out and len(parts) == 1 and (part := said[0].part) is not None:
        return _whole(source, part), why
    is_told = len(said) == len(told) and None not in parts and all(one.by_name for one in said)
    if isinstance(source, TableSource) and is_told:
        rows: dict[str, list[int]] = {}
        for number, one in enumerate(said):
            rows.setdefault(str(one.part), []).append(number)
        return SplitRows(source, rows), why
    if is_held_out:
        raise _doubtful(source, why)
    return source, None


def _told(entry: Mapping[str, Any], taken: Collection[str]) -> _Told | None:
    said = held_out_by({name: value for name, value in entry.items() if name not in taken})
    if said is None:
        return None
    column, value, held_out = said
    part = name_split(value) if isinstance(value, str) else None
    if part is not None:
        return _Told(column, part, held_out, True)
    return _Told(column, name_split(column) if held_out else None, held_out, False)


def _told_by_all(source: TableSource, taken: Collection[str]) -> Iterator[_Told | None]:
    """Yield what each row says; one that cannot be read says what the one before it does."""
    before: _Told | None = None
    for number in range(len(source)):
        with suppress(SourceError):
            before = _told(source.entry(number), taken)
        yield before


def _whole(source: Source, part: str) -> Source:
    source.split_parts = ((part, len(source)),)
    return source


def _doubtful(source: Source, why: str) -> SourceError:
    return SourceError(
        f"{source.where}: {why} says that it is held out, but not whether for validation or for tests: say it with "
        "--split-ratio 0,1,0 (val) or 0,0,1 (test), or take it for training: --split-ratio 1,0,0."
    )
