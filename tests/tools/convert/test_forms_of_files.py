"""Upper and lower case, Unicode forms, files without extensions, byte-order marks, UTF-16, separators of CSV files.

Each is taken as what it is, or refused by name: in `convert`, in JSONL files that train as they are, and in tars.
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from commands import energon, output_of
from crude import parts_of
from keyed import CRUDE
from sources import convert, converted, members, picture, refused
from tar_builder import write_tar

from energon_bridge import DefaultTaskEncoder
from energon_bridge.core.errors import CorruptShardError
from energon_bridge.core.format.jsonl import open_jsonl
from energon_bridge.core.prepare import parse_ratio, prepare_dataset

NFC, NFD = "k\u00e9", "ke\u0301"
BOM = b"\xef\xbb\xbf"
ALL = ["--split-ratio", "0,1,0"]


def files(root: Path, **contents: bytes) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        (root / name).write_bytes(data)
    return root


# --- folders ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "text", "key"),
    [
        ("A.PNG", "A.TXT", "A"),
        ("a.Png", "a.Caption", "a"),
        (f"{NFC}.png", f"{NFD}.txt", NFC),
        (f"{NFD}.PNG", f"{NFC}.TXT", NFD),
        ("photo", "photo.txt", "photo"),
    ],
)
def test_pairs_in_any_case_and_form(tmp_path: Path, image: str, text: str, key: str) -> None:
    source = files(tmp_path / "in", **{image: picture(1, "PNG"), text: b"a cat"})
    out = converted(source, tmp_path / "out", *ALL)
    assert members(out) == {f"{key}.png": picture(1, "PNG"), f"{key}.txt": b"a cat"}
    assert "CaptioningSample" in (out / ".nv-meta/dataset.yaml").read_text()


def test_captions_of_their_own_form_come_first(tmp_path: Path) -> None:
    pairs = {
        f"{NFC}.png": picture(1, "PNG"),
        f"{NFC}.txt": b"one",
        f"{NFD}.png": picture(2, "PNG"),
        f"{NFD}.txt": b"two",
    }
    assert members(converted(files(tmp_path / "in", **pairs), tmp_path / "out", *ALL)) == pairs


@pytest.mark.parametrize("second", ["a.TXT", "a.Txt"])
def test_two_captions_are_named(tmp_path: Path, second: str) -> None:
    source = files(tmp_path / "in", **{"a.png": picture(1, "PNG"), "a.txt": b"one", second: b"two"})
    assert f"a.png: has two captions, {second} and a.txt. Move one of them away." in refused(source, tmp_path / "out")


def test_pictures_without_extension(tmp_path: Path) -> None:
    """Known by their first bytes; a README is none."""
    source = files(tmp_path / "in", one=picture(1), two=picture(2, "PNG"), README=b"text", jpg=b"no picture", empty=b"")
    assert members(converted(source, tmp_path / "out", *ALL)) == {"one.jpg": picture(1), "two.png": picture(2, "PNG")}


def test_files_without_extension_in_lists(tmp_path: Path) -> None:
    folder = files(tmp_path / "in", one=picture(1), two=b"no picture at all")
    turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "a cat"}]
    source = folder / "list.json"
    source.write_text(json.dumps([{"image": "one", "conversations": turns}]))
    assert members(converted(source, tmp_path / "out", *ALL))["000000000.0.jpg"] == picture(1)
    source.write_text(json.dumps([{"image": "two", "conversations": turns}]))
    message = refused(source, tmp_path / "out2")
    assert (
        "two: has no extension, and its first bytes are not those of an image, video or sound. Give it one." in message
    )


# --- JSONL --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [b"", b"\n", b"  \r\n"])
def test_a_byte_order_mark_is_no_part_of_jsonl(tmp_path: Path, before: bytes) -> None:
    source = tmp_path / "x.jsonl"
    source.write_bytes(BOM + before + b'{"text": "one"}\r\n{"text": "two"}\n')
    output_of("prepare", source)
    assert [*parts_of(source, DefaultTaskEncoder()).values()] == [{"json": {"text": "one"}}, {"json": {"text": "two"}}]
    assert "All 2 samples load." in energon("lint", source, "--no-progress").output
    if not before:
        out = converted(source, tmp_path / "out", *ALL)
        assert list(members(out).values()) == [b'{"text":"one"}', b'{"text":"two"}']


def test_utf16_lines_are_refused_by_name(tmp_path: Path) -> None:
    source = tmp_path / "x.jsonl"
    source.write_text('{"text": "one"}\n{"text": "two"}\n', encoding="utf-16")
    message = f"{source}: is UTF-16, expected UTF-8. Write it as such: iconv -f UTF-16 -t UTF-8 {source} -o NEW"
    with pytest.raises(CorruptShardError) as caught:
        open_jsonl(source)
    assert message in str(caught.value)
    assert message in refused(source, tmp_path / "out")


# --- CSV ----------------------------------------------------------------------------------------------------------

ROWS = [["image", "caption"], ["1.png", 'a "red"; cat, with\nlines | and\ttabs'], ["2.png", "größe"]]


def table(path: Path, rows: list[list[str]], delimiter: str, encoding: str = "utf-8") -> Path:
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter).writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.getvalue(), encoding=encoding, newline="")
    for number in (1, 2):
        (path.parent / f"{number}.png").write_bytes(picture(number, "PNG"))
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize(
    ("suffix", "delimiter"), [(".csv", mark) for mark in ",;\t|"] + [(".tsv", mark) for mark in ",;\t|"]
)
def test_tables_with_each_separator(tmp_path: Path, suffix: str, delimiter: str, encoding: str) -> None:
    source = table(tmp_path / f"in/x{suffix}", ROWS, delimiter, encoding)
    output = convert(source, tmp_path / "out", *ALL)
    found = members(tmp_path / "out")
    texts = [json.loads(data)["caption"] for name, data in found.items() if name.endswith("json")]
    assert texts == [caption for _, caption in ROWS[1:]]
    assert sum(name.endswith("png") for name in found) == 2
    assert ("between fields" in output) == (delimiter != {".csv": ",", ".tsv": "\t"}[suffix])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a;b|c\n1;2|3\n", "the header has no ',', but ';' and '|'. Write the table with ',' between the fields."),
        ("a,b,a\n1,2,3\n", "the header has the column 'a' twice. Give one of them another name."),
        ("a;b\n1;2;3\n", "line 2: has more fields than the 2 columns of the header (a, b)."),
        ("a,b\n1,2,3\n", "line 2: has more fields than the 2 columns of the header (a, b)."),
        ("a,b\n1,2\n3\n", "line 3: has fewer fields than the 2 columns of the header (a, b)."),
        ('a,b\n1,"never closed\n2,x\n', "line 2: cannot be read as ','-separated text: unexpected end of data."),
        ('a,b\n1,"one" and more\n', "line 2: cannot be read as ','-separated text: ',' expected after '\"'."),
        ("a,b\n1,\0\n", "has zero bytes. Is it UTF-16? Write it as UTF-8"),
    ],
)
def test_tables_that_would_lose_something(tmp_path: Path, text: str, message: str) -> None:
    files(tmp_path / "in", **{"x.csv": text.encode()})
    assert message in " ".join(refused(tmp_path / "in/x.csv", tmp_path / "out").split())
    files(tmp_path / "in", **{"x.csv": "größe,b\n1,2\n".encode("latin-1")})
    assert r"x.csv, header: 'gr\xf6\xdfe,b' is not UTF-8" in refused(tmp_path / "in/x.csv", tmp_path / "out")


def test_columns_are_read_as_they_stand(tmp_path: Path) -> None:
    """One column, a column of numbers without a name (as pandas writes), blanks beside names, blank lines."""
    cases = {
        "text\nlong text\n\nmore\n": [{"text": "long text"}, {"text": "more"}],
        ",text\n0,x\n1,y\n": [{"": "0", "text": "x"}, {"": "1", "text": "y"}],
        "\n id , text\n0, x\n": [{"id": "0", "text": " x"}],
    }
    for number, (text, expected) in enumerate(cases.items()):
        source = files(tmp_path / f"in{number}", **{"x.csv": text.encode()}) / "x.csv"
        found = members(converted(source, tmp_path / f"out{number}", *ALL))
        assert [json.loads(data) for data in found.values()] == expected


# --- tars ---------------------------------------------------------------------------------------------------------


def test_parts_are_decoded_in_any_case(tmp_path: Path) -> None:
    array = io.BytesIO()
    np.save(array, np.arange(3))
    parts = {
        "1.JPG": picture(1),
        "1.TXT": BOM + b"one",
        "1.Json": BOM + b'{"a": 1}',
        "1.NPY": array.getvalue(),
        "1.CLS": b"7",
    }
    write_tar(tmp_path / "s.tar", parts.items())
    prepare_dataset(tmp_path, split=parse_ratio("0,1,0"), dataset_yaml=CRUDE)
    assert "The one sample loads." in energon("lint", tmp_path, "--no-progress").output
    (sample,) = parts_of(tmp_path, DefaultTaskEncoder()).values()
    assert (sample["TXT"], sample["Json"], sample["CLS"]) == ("one", {"a": 1}, 7)
    assert sample["NPY"].tolist() == [0, 1, 2]
    assert sample["JPG"].shape == (3, 17, 16)
