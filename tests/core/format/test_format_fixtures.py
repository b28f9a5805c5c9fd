"""Datasets that megatron-energon 7.4.1 prepared, prepared again: the same files."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from paths import FIXTURES

import energon_bridge
from energon_bridge.core.format.dataset import open_dataset
from energon_bridge.core.prepare import parse_patterns, parse_ratio, prepare_dataset, rebuild_index

PLAIN = ["captioning", "vqa", "captioning_extra", "crude", "aux_images"]
SPLITS = {
    "captioning": parse_ratio("2,1,1"),
    "vqa": parse_patterns(["train:train/.*", "val:val/.*"]),
    "captioning_extra": parse_ratio("1,0,0"),
    "crude": parse_ratio("1,0,0"),
    "aux_images": parse_ratio("1,0,0"),
}


def sqlite_rows(path: Path, table: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
        rows = connection.execute(f"SELECT * FROM {table}").fetchall()
    connection.close()
    return sorted(rows)


def sqlite_schema(path: Path) -> list[tuple[str, str, str]]:
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
        query = "SELECT type, name, tbl_name, sql FROM sqlite_master"
        rows = [
            (kind, name, table, " ".join((sql or "").split())) for kind, name, table, sql in connection.execute(query)
        ]
    connection.close()
    return sorted(
        (kind, name, sql.replace(" (", "(").replace("( ", "(").replace(" )", ")")) for kind, name, _, sql in rows
    )


def alike(path: Path) -> bytes:
    """Return a file as megatron-energon writes it: ours also says that this package did."""
    data = path.read_bytes()
    if path.name != ".info.json":
        return data
    version = f"7.4.1+energon-bridge.{energon_bridge.__version__}".encode()
    assert data.count(version) == 1
    return data.replace(version, b"7.4.1")


@pytest.mark.parametrize("name", PLAIN)
def test_preparing_again_gives_the_same_files(tmp_path: Path, name: str):
    original = FIXTURES / name
    copy = Path(shutil.copytree(original, tmp_path / name, ignore=shutil.ignore_patterns("*.idx", ".nv-meta")))
    prepare_dataset(copy, split=SPLITS[name], num_workers=2)
    (copy / ".nv-meta/tars.json").unlink()  # of this package alone: which tars need not be read again
    written = sorted(str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file())
    assert written == sorted(
        str(path.relative_to(original))
        for path in original.rglob("*")
        if path.is_file() and path.name != "dataset.yaml"
    )
    for file in written:
        if not file.endswith((".sqlite", ".uuid")):
            assert alike(copy / file) == (original / file).read_bytes(), file
    ours, theirs = copy / ".nv-meta/index.sqlite", original / ".nv-meta/index.sqlite"
    for table in ("samples", "sample_parts"):
        assert sqlite_rows(ours, table) == sqlite_rows(theirs, table)
    media = ("media_metadata", "media_filters", "sqlite_sequence", "sqlite_autoindex_media")
    assert sqlite_schema(ours) == [row for row in sqlite_schema(theirs) if not row[1].startswith(media)]


def test_preparing_over_an_old_preparation_keeps_media_metadata_excludes_and_dataset_yaml(fixtures: Path):
    dataset = fixtures / "captioning"
    split = dataset / ".nv-meta/split.yaml"
    split.write_text(split.read_text().replace("exclude: []", "exclude:\n- parts/shard_000.tar/{00001,00002}\n"))
    before = {
        table: sqlite_rows(dataset / ".nv-meta/index.sqlite", table) for table in ("media_metadata", "media_filters")
    }
    yaml = (dataset / ".nv-meta/dataset.yaml").read_bytes()
    uuid = (dataset / ".nv-meta/index.uuid").read_text()
    prepare_dataset(dataset, split=SPLITS["captioning"])
    assert before["media_metadata"]
    assert {table: sqlite_rows(dataset / ".nv-meta/index.sqlite", table) for table in before} == before
    assert (dataset / ".nv-meta/dataset.yaml").read_bytes() == yaml
    assert (dataset / ".nv-meta/index.uuid").read_text() != uuid
    assert {key for _, key in open_dataset(dataset, split_part="train").excluded} == {"00001", "00002"}


def test_only_the_indexes_are_rebuilt_on_request(fixtures: Path):
    dataset = fixtures / "vqa"
    for path in dataset.rglob("*.idx"):
        path.unlink()
    (dataset / ".nv-meta/index.sqlite").unlink()
    prepared = rebuild_index(dataset)
    assert prepared.num_samples == 12
    for path in (FIXTURES / "vqa").rglob("*"):
        if path.is_file() and path.suffix not in (".sqlite", ".uuid"):
            assert alike(dataset / path.relative_to(FIXTURES / "vqa")) == path.read_bytes()
    assert sqlite_rows(dataset / ".nv-meta/index.sqlite", "samples") == sqlite_rows(
        FIXTURES / "vqa/.nv-meta/index.sqlite", "samples"
    )
