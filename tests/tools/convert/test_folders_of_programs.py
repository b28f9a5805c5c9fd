"""Folders and lists as other programs leave them: of img2dataset, with an empty tar, with a malformed row."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from pathlib import Path

import pytest
from PIL import Image
from sources import convert, members, meta, refused

from energon_bridge import WorkerConfig, get_train_dataset
from energon_bridge.core.errors import NotPreparedError

ALL = ("--split-ratio", "1,0,0")


def pictures(folder: Path, count: int) -> Path:
    """What `img2dataset --output_format files` writes: a picture, its caption and a JSON for each, and statistics."""
    (folder / "00000").mkdir(parents=True)
    for number in range(count):
        stem = folder / f"00000/{number:09d}"
        Image.new("RGB", (8, 8), (number, 0, 0)).save(stem.with_suffix(".jpg"))
        stem.with_suffix(".txt").write_text(f"caption {number}")
        stem.with_suffix(".json").write_text(json.dumps({"key": stem.name, "caption": "of the JSON"}))
    (folder / "00000_stats.json").write_text("{}")
    return folder


@pytest.mark.parametrize("kind", [(), ("--kind", "pairs")])
def test_captions_beside_json_are_the_captions(kind: tuple[str, ...], tmp_path: Path) -> None:
    said = convert(pictures(tmp_path / "in", 3), tmp_path / "out", *ALL, *kind)
    assert "Left out: 3 .json (.txt beside it is taken), 1 .json (no media beside it)." in said
    found = members(tmp_path / "out")
    assert meta(tmp_path / "out")["field_map"] == {"image": "jpg", "caption": "txt"}
    captions = [data.decode() for name, data in found.items() if name.endswith("txt")]
    assert captions == [path.read_text() for path in sorted((tmp_path / "in/00000").glob("*.txt"))]


def test_captions_that_only_json_has_are_taken_from_it(tmp_path: Path) -> None:
    for caption in pictures(tmp_path / "in", 3).glob("*/*.txt"):
        caption.unlink()
    convert(tmp_path / "in", tmp_path / "out", *ALL)
    assert meta(tmp_path / "out")["field_map"] == {"image": "jpg", "caption": "json[caption]"}


def tar(path: Path, *names: str) -> None:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 1
            archive.addfile(info, io.BytesIO(b"x"))


def test_tars_with_the_tables_of_img2dataset_are_to_be_prepared(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tar(tmp_path / "data/00000.tar", "0.jpg", "0.txt")
    rows = {"url": ["https://a.b/c.jpg"], "caption": ["x"], "status": ["success"]}
    parquet.write_table(arrow.table(rows), tmp_path / "data/00000.parquet")
    with pytest.raises(NotPreparedError, match="Run `energon prepare"):
        get_train_dataset(tmp_path / "data", batch_size=1, worker_config=WorkerConfig(num_workers=0))


def test_empty_tars_are_left_out_and_counted(tmp_path: Path) -> None:
    tar(tmp_path / "in/a.tar")
    tar(tmp_path / "in/b.tar", "0.txt", "1.txt")
    said = convert(tmp_path / "in", tmp_path / "out", *ALL)
    assert "WebDataset, 2 samples" in said
    assert "Left out: 1 .tar (no samples)." in said
    tar(tmp_path / "files/a.tar", "README")  # which has a file, though no sample
    assert "no samples before the end" in refused(tmp_path / "files", tmp_path / "other")


CSV = """image,caption
0.png,one
1.png,two,more

1.png,"three
lines"
2.png,"four" and more
2.png
3.png,five
"""
READ = [("0.png", "one"), ("1.png", "three\nlines"), ("3.png", "five")]
BAD = ["line 3: has more fields", "line 7: cannot be read as ','-separated text", "line 8: has fewer fields"]


@pytest.mark.parametrize("lead", ["", "\n\n"])
def test_malformed_rows_are_skipped_counted_and_named(lead: str, tmp_path: Path) -> None:
    good = [row for row in csv.reader(io.StringIO(CSV)) if len(row) == 2 and "and more" not in row[1]][1:]
    assert [tuple(row) for row in good] == READ
    for number in range(4):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
    (tmp_path / "x.csv").write_text(lead + CSV)
    said = convert(tmp_path / "x.csv", tmp_path / "out", *ALL, "--on-error", "skip")
    captions = [
        json.loads(data)["caption"] for name, data in members(tmp_path / "out").items() if name.endswith("json")
    ]
    assert captions == [caption for _, caption in READ]
    assert "Skipped 3 samples" in said
    for bad in BAD:
        line = int(bad[5]) + len(lead)
        assert f"x.csv, line {line}{bad[6:]}" in said
    (tmp_path / "again").mkdir()
    assert f"line {3 + len(lead)}: has more fields" in refused(tmp_path / "x.csv", tmp_path / "again/out", *ALL)
