"""Rows of CSV and TSV files. A row that cannot be read ends before the next line that is a row by itself.

Common Voice has no quotes around fields: one at the beginning of a text would join all rows up to the next quote.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from energon_bridge.core.errors import SourceError

LinesAndRow = tuple[str, list[str] | SourceError]
"""The lines of a row, and its fields or error."""


def csv_rows(path: Path, text: str, delimiter: str) -> tuple[list[LinesAndRow], bool]:
    """Return each row that is not blank, the header first, and whether quotes stand around fields.

    With tabs between fields they are text if one joins lines that are rows by themselves, or ends before its field
    does, and no other field needs those around it: it has no tab, line end or quote written twice.
    """
    lines = list(io.StringIO(text, ""))
    header = next((line for line in lines if line.strip("\r\n")), "")
    columns = len(next(filter(None, csv.reader(lines, delimiter=delimiter)), []))
    is_quoted = delimiter != "\t" or '"' in header
    is_bare = False
    rows: list[LinesAndRow] = []
    for first, end, row in _parsed(lines, delimiter, columns, header):
        place = f"line {end}" if first + 1 >= end else f"lines {first + 1} to {end}"
        if isinstance(row, str):
            is_bare = is_bare or lines[first].count(delimiter) == columns - 1
            rows.append((place, SourceError(f"{path}, {place}: {row}")))
        elif row:
            is_quoted = is_quoted or (len(row) == columns and _needs_quotes(row, "".join(lines[first:end])))
            rows.append((place, row))
    if is_quoted or not is_bare:
        return rows, True
    reader = csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE)
    return [(f"line {reader.line_num}", row) for row in reader if row], False


def _parsed(
    lines: Sequence[str], delimiter: str, columns: int, header: str
) -> Iterator[tuple[int, int, list[str] | str]]:
    """Yield the place of the first line of each row, of the one after its last, and its fields or what is wrong."""
    names = header.split("|")[1:]
    is_spaced = delimiter == "|" and all(name.startswith(" ") for name in names)  # `image| comment`, of Flickr30k
    first = 0
    while first < len(lines):
        start = first
        rest = (lines[at] for at in range(start, len(lines)))
        reader = csv.reader(rest, delimiter=delimiter, strict=True, skipinitialspace=is_spaced)
        while first == start + reader.line_num:  # until a fault ends before the reader does
            row: list[str] | str | None
            try:
                row = next(reader, None)
            except csv.Error as error:
                row = (
                    f"cannot be read as {delimiter!r}-separated text: {error}. A field with a quote is between quotes, "
                    'and has the quote twice: "a ""b"" c".'
                )
            if row is None:
                return
            end = start + reader.line_num
            more = range(first + 1, end)
            are_rows = [at for at in more if _is_row(lines[at], delimiter, columns)]
            is_one = columns < 3 and ('""' in "".join(lines[first:end]) or columns < 2)  # a text may well have one tab
            if delimiter == "\t" and not is_one and more and len(are_rows) == len(more):
                row = (
                    f"a field begins with a quote that ends in line {end}, but each of these lines is a row by itself. "
                    'Write quotes in such fields twice, and one more around them: """Hello"" she said".'
                )
            if isinstance(row, str) and are_rows:
                end = are_rows[0]
            yield first, end, row
            first = end


def _is_row(line: str, delimiter: str, columns: int) -> bool:
    """Return whether a line has as many fields as the header; one that begins with a tab may be an indented text."""
    if delimiter == "\t":
        return line.count("\t") == columns - 1 and not line.startswith("\t")
    with suppress(csv.Error):
        return [len(row) for row in csv.reader([line], delimiter=delimiter, strict=True)] == [columns]
    return False


def _needs_quotes(row: Sequence[str], text: str) -> bool:
    """Return whether a field of a row with tabs would not be what it is without the quotes around it."""
    fields = text.rstrip("\r\n").split("\t")
    return len(fields) != len(row) or any(
        value != field and not set(value).isdisjoint('"\r\n') for value, field in zip(row, fields, strict=True)
    )
