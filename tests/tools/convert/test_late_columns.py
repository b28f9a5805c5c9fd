"""Columns that the first rows leave empty: what later rows have in them is learned, or refused by its name."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from delivered import delivered
from sources import convert, picture, refused, write_pictures

from energon_bridge.core.errors import SourceError
from energon_bridge.tools.convert import row_groups
from energon_bridge.tools.convert.rows import late_rows

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ALL = ("--split-ratio", "1,0,0")
COUNT, LATE = 130, 120  # behind the first rows that are looked at


def rows_with(column: str, value: Any, empty: Any = None, **base: Any) -> list[dict[str, Any]]:
    asked = base or {"question": "What is it?", "answer": "x"}
    return [{**asked, column: value if number >= LATE else empty} for number in range(COUNT)]


def written(folder: Path, form: str, rows: list[dict[str, Any]], group: int = 40) -> Path:
    """Write rows, each with a picture, as a list of paths or a table of bytes."""
    write_pictures(folder, ["a.png", "b.png"])
    path = folder / f"rows.{form}"
    listed = [{"image": "a.png", **row} for row in rows]
    if form == "json":
        path.write_text(json.dumps(listed))
    elif form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in listed))
    elif form == "csv":
        with path.open("w", newline="") as file:
            out = csv.DictWriter(file, listed[0].keys())
            out.writeheader()
            out.writerows(listed)
    else:
        table = arrow.Table.from_pylist([{"image": {"bytes": picture(0), "path": None}, **row} for row in rows])
        if form == "parquet":
            parquet.write_table(table, path, row_group_size=group)
        else:
            with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_stream(file, table.schema) as out:
                out.write_table(table, max_chunksize=group)
    return path


@pytest.mark.parametrize("form", ["json", "jsonl", "csv", "parquet", "arrow"])
@pytest.mark.parametrize("empty", [None, ""])
def test_a_hint_that_only_late_rows_have_is_learned(form: str, empty: Any, tmp_path: Path) -> None:
    """ScienceQA in the order of its sources: most rows have no hint."""
    path = written(tmp_path, form, rows_with("hint", "It barks.", empty))
    if form != "arrow":
        convert(path, tmp_path / "out", *ALL)
    for source in [tmp_path / "out"] * (form != "arrow") + [path] * (form in ("parquet", "arrow")):
        texts = [one.messages[0]["content"] for one in delivered(source)]
        assert texts == ["What is it?"] * LATE + ["It barks.\nWhat is it?"] * (COUNT - LATE)


REFUSED: list[tuple[str, Any, str]] = [
    ("remark", "It was taken in the dark.", "the column `remark` beside `question` has a text"),
    ("rejected", "y", "has preferences (rejected)"),
    ("crop", [1, 2, 3, 4], "`crop` is [1, 2, 3, 4], which seems to be a region"),
]


@pytest.mark.parametrize("form", ["json", "jsonl", "parquet"])
@pytest.mark.parametrize(("column", "value", "told"), REFUSED)
def test_late_columns_that_cannot_be_learned_are_refused(
    column: str, value: Any, told: str, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, form, rows_with(column, value))
    assert told in refused(path, tmp_path / "out", *ALL)
    if form == "parquet" and column != "rejected":
        with pytest.raises(SourceError, match=f"`{column}`"):
            delivered(path)
    elif form == "parquet":
        assert len({one.__key__ for one in delivered(path)}) == LATE
        assert told in caplog.text
    convert(path, tmp_path / "all", *ALL, "--ignore", column)


def test_late_pictures_are_shown(tmp_path: Path) -> None:
    path = written(tmp_path, "json", rows_with("image_2", "b.png"))
    convert(path, tmp_path / "out", *ALL)
    assert [len(one.images) for one in delivered(tmp_path / "out")] == [1] * LATE + [2] * (COUNT - LATE)


def test_a_late_crop_of_captions_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "parquet", rows_with("crop", [1, 2, 3, 4], caption="A dog."))
    with pytest.raises(SourceError, match=r"row group 3, row 0: `crop` is \[1, 2, 3, 4\]"):
        delivered(path)


def test_lines_between_those_that_are_looked_at_are_refused(tmp_path: Path) -> None:
    """Of a JSONL file 1,000 lines are looked at; this one is not among them."""
    write_pictures(tmp_path, ["a.png"])
    rows: list[dict[str, Any]] = [{"image": "a.png", "question": "What is it?", "answer": "x"} for _ in range(3_000)]
    rows[2_003] |= {"hint": "It barks.", "reviewer": "Bo", "score": 3}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = refused(path, tmp_path / "out", *ALL)
    assert "line 2004: `hint` is 'It barks.', and empty in the lines that were looked at" in told
    assert "--sample-type CrudeSample" in told
    convert(path, tmp_path / "out", *ALL, "--sample-type", "CrudeSample")
    texts = [one.messages[0]["content"] for one in delivered(tmp_path / "out")]
    assert (texts[2_002], texts[2_003], texts[2_004]) == ("What is it?", "It barks.\nWhat is it?", "What is it?")
    del rows[2_003]["hint"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    convert(path, tmp_path / "others", *ALL)


def test_short_remarks_of_few_late_rows_need_no_flag(tmp_path: Path) -> None:
    path = written(tmp_path, "parquet", rows_with("remark", "ok"))
    assert len(delivered(path)) == COUNT


# Which rows these are -------------------------------------------------------------------------------------------------

TYPES: list[tuple[Any, list[Any]]] = [
    ("string", [None, "", "a"]),
    ("large_string", [None, "", "a"]),
    ("string_view", [None, "", "a"]),
    ("binary", [None, b"", b"a"]),
    (arrow.list_(arrow.string()), [None, [], ["a"]]),
    (arrow.large_list(arrow.int64()), [None, [], [0]]),
    (arrow.dictionary(arrow.int32(), arrow.string()), [None, "", "a"]),
    (arrow.struct([("bytes", arrow.binary())]), [None, None, {"bytes": b"a"}]),
    ("float64", [None, float("nan"), 0.0]),
    ("int64", [None, None, 0]),
    ("bool", [None, None, False]),
]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize(("kind", "values"), TYPES)
def test_the_first_rows_with_something_in_a_column_are_found(
    kind: Any, values: list[Any], suffix: str, tmp_path: Path
) -> None:
    if suffix == "parquet" and kind == "string_view":
        pytest.skip("parquet files have no views")
    nothing, empty, something = values
    column = [nothing] * 5 + [empty] * 5 + [something] * 3
    table = arrow.table({"a": arrow.array(column, kind)})
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        parquet.write_table(table, path, row_group_size=4)
    else:
        with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_stream(file, table.schema) as out:
            out.write_table(table, max_chunksize=4)
    groups = row_groups.groups_of(path)
    assert row_groups.first_filled(groups, "a", 1) == [10]
    assert row_groups.first_filled(groups, "a", 8) == [10, 11]  # those of one chunk
    assert row_groups.first_filled(groups, "b", 8) == []


def test_groups_that_are_empty_by_their_footer_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.parquet"
    texts = [None] * 100 + [""] * 100 + ["a"] + [""] * 99
    parquet.write_table(arrow.table({"a": texts}), path, row_group_size=50)
    read: list[int] = []
    real = row_groups.chunks_of
    monkeypatch.setattr(row_groups, "chunks_of", lambda group, name: read.append(group.group) or real(group, name))
    assert row_groups.first_filled(row_groups.groups_of(path), "a", 8) == [200]
    assert read == [4]


def test_entries_are_counted_for_each_column() -> None:
    entries = [(0, {"a": 1, "b": ""})] + [(number, {"a": 1, "b": "x", "c": [0]}) for number in range(200, 220)]
    assert late_rows(iter(entries)) == tuple(range(200, 208))
    assert late_rows(iter(entries[:1])) == ()
