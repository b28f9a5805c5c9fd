"""Tars added to a dataset whose key index is large: their keys go to a supplement, and it reads as one index.

The limit of "large" is set to nothing here. And moves that a kill cut off: the next run completes them.
"""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tar_builder import read_all, tar_bytes, write_texts

from energon_bridge.errors import DuplicateKeyError, KeyIndexError, MetadataError, NotPreparedError, StorageError
from energon_bridge.format import open_dataset
from energon_bridge.format.join import JoinPart, find_rows
from energon_bridge.format.key_index import find_keys, keys_at, keys_of_shard, local_key_index
from energon_bridge.format.media import MediaFilter
from energon_bridge.format.nvmeta import read_info
from energon_bridge.loader.bans import samples_by_key
from energon_bridge.prepare import (
    parse_ratio,
    prepare_dataset,
    rebuild_index,
    render_dataset_yaml,
    run as preparing,
    summarize_dataset,
)
from energon_bridge.prepare.media import prepare_media
from energon_bridge.prepare.staging import STAGING_FOLDER, Staging
from energon_bridge.storage import open_store
from energon_bridge.stores import WebdatasetFileStore

TEXT_YAML = render_dataset_yaml("TextSample", {"text": "txt"})
ALL_TRAIN = parse_ratio("1,0,0")
FIRST = {f"{number:02d}.tar": [f"{number}-{sample}" for sample in range(3)] for number in range(16)}


@pytest.fixture(autouse=True)
def every_index_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "_LARGE_BYTES", 0)


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Return a prepared folder with 16 tars of three samples each."""
    root = write_texts(tmp_path / "data", FIRST)
    prepare(root)
    return root


def prepare(root: Path, **options: object) -> None:
    prepare_dataset(root, split=ALL_TRAIN, dataset_yaml=TEXT_YAML, **options)  # type: ignore[arg-type]


def added(root: Path, *names: str) -> list[str]:
    """Add tars with two samples each, prepare, and return the keys."""
    shards = {f"{name}.tar": [f"{name}-{sample}" for sample in range(2)] for name in names}
    write_texts(root, shards)
    prepare(root)
    return [key for keys in shards.values() for key in keys]


def supplements(root: Path) -> list[str]:
    return sorted(path.name for path in (root / ".nv-meta").glob("index.*.sqlite"))


def valid(root: Path) -> str:
    """Return the name of the supplement that the dataset has now."""
    return f"index.{(root / '.nv-meta/index.uuid').read_text()}.sqlite"


def check(root: Path, scratch: str = "") -> None:
    """Every way of looking something up by key gives what is in the tars."""
    store = open_store(root)
    shards = list(read_info(store).shard_counts)
    dataset = open_dataset(root, split_part="train")
    assert sorted(shards) == list(dataset.shard_names)
    in_order = [key for key, _ in read_all(dataset)]
    assert len(set(in_order)) == dataset.num_samples
    index = local_key_index(store, scratch)
    places = dict(zip(in_order, find_keys(index, in_order), strict=True))
    assert find_keys(index, ["nobody", in_order[-1], "nobody"]) == [None, places[in_order[-1]], None]
    files = WebdatasetFileStore(root)
    for number, shard in enumerate(shards):
        keys = keys_of_shard(index, number)
        assert keys_at(index, number, range(len(keys))) == keys
        assert [places[key] for key in keys] == [(number, local) for local in range(len(keys))]
        assert all(files[f"{key}.txt"] == (f"text of {key}".encode(), files[f"{key}.txt"][1]) for key in keys)
        assert all(files[f"{key}.txt"][1].shard_name == shard for key in keys)
    rows = np.concatenate(list(find_rows([JoinPart(dataset=dataset), JoinPart(dataset=dataset)])))
    assert rows.tolist() == [[place, place] for place in range(dataset.num_samples)]
    found = samples_by_key(dataset, in_order)
    assert {key: places.tolist() for key, places in found.items()} == {key: [n] for n, key in enumerate(in_order)}
    parts = summarize_dataset(root).part_types
    assert isinstance(root, str) or parts["txt"].count == dataset.num_samples


def test_added_tars_leave_a_large_index_as_it_is(tars: Path) -> None:
    index = tars / ".nv-meta/index.sqlite"
    before = index.stat()
    added(tars, "05a")
    assert (index.stat().st_ino, index.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert supplements(tars) == [valid(tars)]
    assert list(read_info(open_store(tars)).shard_counts) == [*FIRST, "05a.tar"]  # no shard has a new number
    check(tars)
    first = valid(tars)
    added(tars, "00a")
    assert index.stat().st_ino == before.st_ino
    assert supplements(tars) == sorted([first, valid(tars)])  # the one before may just be being opened
    check(tars)


def test_a_supplement_that_is_no_longer_small_is_merged(tars: Path) -> None:
    added(tars, "05a")
    added(tars, "98")
    before = (tars / ".nv-meta/index.sqlite").stat().st_ino
    added(tars, "07b")
    assert (tars / ".nv-meta/index.sqlite").stat().st_ino != before
    assert valid(tars) not in supplements(tars)
    check(tars)
    added(tars, "00a")  # 19 shards and one
    assert valid(tars) in supplements(tars)
    check(tars)


def test_many_tars_at_once_make_no_supplement(tars: Path) -> None:
    added(tars, "05a", "05b", "05c")
    assert supplements(tars) == []
    check(tars)


def test_preparing_again_merges_and_then_leaves_the_index_alone(tars: Path) -> None:
    index = tars / ".nv-meta/index.sqlite"
    added(tars, "05a")
    merged = index.stat().st_ino
    prepare(tars)
    assert index.stat().st_ino != merged
    assert valid(tars) not in supplements(tars)
    check(tars)
    merged = index.stat().st_ino
    prepare(tars)
    assert index.stat().st_ino == merged
    assert supplements(tars) == []
    check(tars)


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_tars_that_change_make_a_new_index(tars: Path, change: str) -> None:
    added(tars, "05a")
    if change == "removed":
        for name in ("03.tar", "03.tar.idx"):
            (tars / name).unlink()
    else:
        write_texts(tars, {"05a.tar": ["new", "05a-1"], "03.tar": ["3-1"]})
    added(tars, "99")
    assert valid(tars) not in supplements(tars)
    check(tars)


def test_rebuilding_makes_one_index(tars: Path) -> None:
    added(tars, "05a")
    rebuild_index(tars)
    assert valid(tars) not in supplements(tars)
    check(tars)


def test_without_a_key_index_there_is_no_supplement(tars: Path) -> None:
    added(tars, "05a")
    prepare(tars, key_index=False)
    assert supplements(tars) == []
    assert not (tars / ".nv-meta/index.sqlite").exists()
    prepare(tars)
    check(tars)


@pytest.mark.parametrize(
    ("keys", "other"),
    [(["3-1"], "03.tar"), (["x", "05a-1"], "05a.tar"), (["x", "y", "x"], "99.tar"), (["x", "15-2"], "15.tar")],
)
def test_a_key_that_the_index_or_the_supplement_has_is_refused(tars: Path, keys: list[str], other: str) -> None:
    added(tars, "05a")
    before = {path.name: path.read_bytes() for path in (tars / ".nv-meta").iterdir()}
    write_texts(tars, {"99.tar": keys})
    with pytest.raises(DuplicateKeyError, match=rf"is in '{other}' and again in '99\.tar'"):
        prepare(tars)
    assert {path.name: path.read_bytes() for path in (tars / ".nv-meta").iterdir()} == before


def test_a_supplement_that_was_left_out_of_a_copy_is_named(tars: Path) -> None:
    added(tars, "05a")
    name = valid(tars)
    (tars / ".nv-meta" / name).unlink()
    message = rf"ends before 05a\.tar, which `\.info\.json` lists\. Was \.nv-meta/{name} left out.*--tar-index-only"
    for look in (
        lambda: local_key_index(open_store(tars), ""),
        lambda: WebdatasetFileStore(tars)["3-1.txt"],
        lambda: added(tars, "99"),
    ):
        with pytest.raises(KeyIndexError, match=message):
            look()
    rebuild_index(tars)
    added(tars, "98")
    check(tars)


ENDLESS = "CREATE VIEW sample_parts AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT i FROM n"


@pytest.mark.parametrize("damage", ["garbage", "view"])
@pytest.mark.parametrize("where", ["local", "memory"])
def test_a_damaged_supplement_is_refused_by_name(tars: Path, tmp_path: Path, damage: str, where: str) -> None:
    added(tars, "05a")
    supplement = tars / ".nv-meta" / valid(tars)
    if damage == "garbage":
        supplement.write_bytes(b"no database" * 500)
    else:
        with closing(sqlite3.connect(supplement)) as connection:
            connection.execute("DROP TABLE sample_parts")
            connection.execute(ENDLESS)
    root = "memory://damaged" if where == "memory" else str(tars)
    store = open_store(root)
    if where == "memory":
        for path in filter(Path.is_file, tars.rglob("*")):
            store.write(path.relative_to(tars).as_posix(), path.read_bytes())
    looks = [lambda: WebdatasetFileStore(root)["3-1.txt"]]
    if damage == "garbage" or where == "memory":  # joins and bans read no parts
        looks.append(lambda: local_key_index(store, str(tmp_path / "scratch")))
    try:
        for look in looks:
            with pytest.raises(KeyIndexError, match=rf"{root}: cannot read the key index .*energon prepare"):
                look()
    finally:
        for name, _ in [*store.list()] if where == "memory" else ():
            store.delete(name)


def test_a_dataset_at_a_url_has_its_supplement_there(tars: Path, tmp_path: Path) -> None:
    added(tars, "05a")
    root = "memory://large-index"
    store = open_store(root)
    try:
        for path in filter(Path.is_file, tars.rglob("*")):
            store.write(path.relative_to(tars).as_posix(), path.read_bytes())
        check(root, str(tmp_path / "scratch"))  # type: ignore[arg-type]
        write_texts(tmp_path / "more", {"99.tar": ["99-0"]})
        store.write("99.tar", (tmp_path / "more/99.tar").read_bytes())
        prepare(root)  # type: ignore[arg-type]
        uuid = store.read(".nv-meta/index.uuid").decode()
        assert f".nv-meta/index.{uuid}.sqlite" not in [name for name, _ in store.list((".sqlite",))]
        check(root, str(tmp_path / "scratch"))  # type: ignore[arg-type]
    finally:
        store.delete(".nv-meta/.info.json")
        for name, _ in [*store.list()]:
            store.delete(name)


def test_media_metadata_stays_and_is_added(tmp_path: Path) -> None:
    root = tmp_path / "pictures"
    root.mkdir()
    for number in range(9):
        Image.new("RGB", (10 + number, 5)).save(tmp_path / "one.png")
        picture = (tmp_path / "one.png").read_bytes()
        (root / f"{number}.tar").write_bytes(tar_bytes([(f"k{number}.png", picture)]))
        if number == 7:
            prepare_dataset(root, split=ALL_TRAIN, media=MediaFilter(strategy="EXTENSION"))
    prepare_dataset(root, split=ALL_TRAIN)
    assert supplements(root) == [valid(root)]
    assert [WebdatasetFileStore(root).get_media_metadata(f"k{number}.png").width for number in range(8)] == [
        10 + number for number in range(8)
    ]
    prepare_media(root, MediaFilter(strategy="EXTENSION"))
    assert supplements(root) == []
    assert WebdatasetFileStore(root).get_media_metadata("k8.png").width == 18
    assert summarize_dataset(root).part_types["png"].count == 9


# Moves that were cut off ---------------------------------------------------------------------------------------------

KILLED = """
import os, sys
from energon_bridge.prepare import parse_ratio, prepare_dataset, run as preparing
from energon_bridge.storage import LocalStore
preparing._LARGE_BYTES, left = int(sys.argv[2]), [int(sys.argv[3])]
put_file, delete = LocalStore.put_file, LocalStore.delete
def cut(plain):
    def one(self, *names):
        left[0] -= 1
        if left[0] < 0:
            os._exit(9)
        plain(self, *names)
    return one
LocalStore.put_file, LocalStore.delete = cut(put_file), cut(delete)
prepare_dataset(sys.argv[1], split=parse_ratio("1,0,0"))
"""


@pytest.mark.parametrize(("change", "limit"), [("added", 0), ("middle", 1 << 40), ("removed", 1 << 40), ("merged", 0)])
def test_no_reader_finds_files_of_two_states_and_the_next_run_completes_them(
    tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, limit: int
) -> None:
    """Killed before each move: readers find the old state, the new one or none; the next run makes the new one."""
    monkeypatch.setattr(preparing, "_LARGE_BYTES", limit)
    keys_of = {**FIRST, "05a.tar": ["05a-0", "05a-1"], "99.tar": ["99-0", "99-1"]}
    if change == "merged":
        added(tars, "05a")
    elif change == "removed":
        for name in ("03.tar", "03.tar.idx"):
            (tars / name).unlink()
    else:
        name = "05a.tar" if change == "middle" else "99.tar"
        write_texts(tars, {name: keys_of[name]})
    old = (tars / ".nv-meta/index.uuid").read_text()
    found = []
    for at in range(40):
        copy = tmp_path / f"copy{at}"
        shutil.copytree(tars, copy)
        process = subprocess.run([sys.executable, "-c", KILLED, copy, str(limit), str(at)], check=False)
        assert process.returncode in (0, 9)
        found.append("old" if (copy / ".nv-meta/index.uuid").read_text() == old else "new")
        try:
            counts = read_info(open_store(copy)).shard_counts
            index = local_key_index(open_store(copy), "")
            for number, shard in enumerate(counts):
                if (copy / shard).exists():  # else no reader gets as far as that
                    assert keys_of_shard(index, number) == keys_of[shard]
        except NotPreparedError:
            found[-1] = "unprepared"
        prepare(copy)
        check(copy)
        assert not (copy / STAGING_FOLDER).exists()
        if process.returncode == 0:
            break
    assert found[-1] == "new"
    assert "old" in found
    assert ("unprepared" in found) == (change in ("middle", "removed"))


@pytest.mark.parametrize(
    "moves", [b"[]", b"{", b'{"withdraw": [], "moves": [["0", "../x"]]}', b'{"withdraw": [], "moves": [["../0", "x"]]}']
)
def test_a_list_of_moves_from_elsewhere_moves_nothing_out_of_the_dataset(tars: Path, moves: bytes) -> None:
    folder = tars / STAGING_FOLDER
    folder.mkdir()
    (folder / "moves.json").write_bytes(moves)
    (folder / "0").write_bytes(b"x")
    (tars / "0").write_bytes(b"x")
    with pytest.raises(MetadataError, match=r"moves\.json: not a list of moves .*Delete it"):
        prepare(tars)
    assert not (tars.parent / "x").exists()
    assert (tars / "0").exists()
    (folder / "moves.json").unlink()
    prepare(tars)


def test_moves_that_fail_are_completed_by_the_next_run(tars: Path) -> None:
    with Staging(open_store(tars)) as staging:
        staging.add(".nv-meta/one", b"1")
        staging.add(".nv-meta/full/two", b"2")
        (tars / ".nv-meta/full").write_bytes(b"in the way")
        with pytest.raises(StorageError, match=r"full/two: cannot write"):
            staging.commit()
    (tars / ".nv-meta/full").unlink()
    with Staging(open_store(tars)):
        pass
    assert (tars / ".nv-meta/full/two").read_bytes() == b"2"
    assert (tars / ".nv-meta/one").read_bytes() == b"1"
    assert not (tars / STAGING_FOLDER).exists()
