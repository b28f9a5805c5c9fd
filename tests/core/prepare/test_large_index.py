"""Tars added to a dataset whose key index is large: their keys are added to it in place.

The limit of "large" is set to nothing here. And moves that a kill cut off: the next run completes them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from forked import run_program
from keyed import ALL_TRAIN, TEXT
from PIL import Image
from tar_builder import read_all, tar_bytes, write_texts

from energon_bridge.core.errors import (
    DuplicateKeyError,
    FileNotInStoreError,
    KeyIndexError,
    MetadataError,
    NotPreparedError,
    StorageError,
)
from energon_bridge.core.format import key_index
from energon_bridge.core.format.dataset import open_dataset
from energon_bridge.core.format.join import JoinPart, find_rows
from energon_bridge.core.format.key_index import find_keys, keys_at, keys_of_shard, local_key_index
from energon_bridge.core.format.nvmeta import read_info
from energon_bridge.core.loader.bans import samples_by_key
from energon_bridge.core.prepare import indexing as preparing, prepare_dataset, rebuild_index
from energon_bridge.core.prepare.staging import STAGING_FOLDER, Staging
from energon_bridge.core.storage import open_store
from energon_bridge.core.stores import WebdatasetFileStore
from energon_bridge.tools.check.dataset_summary import summarize_dataset
from energon_bridge.tools.check.media import MediaFilter, prepare_media

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
    prepare_dataset(root, split=ALL_TRAIN, dataset_yaml=TEXT, **options)  # type: ignore[arg-type]


def added(root: Path, *names: str) -> list[str]:
    """Add tars with two samples each, prepare, and return the keys."""
    shards = {f"{name}.tar": [f"{name}-{sample}" for sample in range(2)] for name in names}
    write_texts(root, shards)
    prepare(root)
    return [key for keys in shards.values() for key in keys]


def identity(root: Path) -> int:
    return (root / ".nv-meta/index.sqlite").stat().st_ino


def leftovers(root: Path) -> list[str]:
    return sorted(path.name for path in (root / ".nv-meta").glob("index.sqlite-*"))


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


def test_keys_of_added_tars_are_added_to_a_large_index(tars: Path) -> None:
    before = identity(tars)
    added(tars, "05a")
    assert identity(tars) == before
    assert list(read_info(open_store(tars)).shard_counts) == [*FIRST, "05a.tar"]  # no shard has a new number
    check(tars)
    added(tars, "00a", "99")
    assert identity(tars) == before
    assert leftovers(tars) == []
    check(tars)


def test_many_tars_at_once_are_added_to_a_copy(tars: Path) -> None:
    before = identity(tars)
    added(tars, "05a", "05b", "05c")
    assert identity(tars) != before
    check(tars)


def test_preparing_again_leaves_the_index_alone(tars: Path) -> None:
    added(tars, "05a")
    index = tars / ".nv-meta/index.sqlite"
    before = (identity(tars), index.stat().st_mtime_ns)
    prepare(tars)
    assert (identity(tars), index.stat().st_mtime_ns) == before
    check(tars)


def test_megatron_energon_reads_added_keys(tars: Path, run_rival: Callable[..., str]) -> None:
    keys = added(tars, "05a")
    expected = [f"{key}:{number}" for key, number in zip([*keys, "3-1"], [16, 16, 3], strict=True)]
    assert run_rival("-c", THEIRS, tars, *keys, "3-1").split() == expected


THEIRS = """
import sys
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.indexing import SqliteIndexReader
reader = SqliteIndexReader(EPath(sys.argv[1]) / ".nv-meta/index.sqlite")
for key in sys.argv[2:]:
    print(f"{key}:{reader.get_sample_pointer_by_key(key).tar_file_id}")
"""


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_tars_that_change_make_a_new_index(tars: Path, change: str) -> None:
    added(tars, "05a")
    if change == "removed":
        for name in ("03.tar", "03.tar.idx"):
            (tars / name).unlink()
    else:
        write_texts(tars, {"05a.tar": ["new", "05a-1"], "03.tar": ["3-1"]})
    added(tars, "99")
    check(tars)


def test_without_a_key_index_there_is_none(tars: Path) -> None:
    added(tars, "05a")
    prepare(tars, key_index=False)
    assert not (tars / ".nv-meta/index.sqlite").exists()
    prepare(tars)
    check(tars)


@pytest.mark.parametrize(
    ("keys", "other"),
    [(["3-1"], "03.tar"), (["x", "05a-1"], "05a.tar"), (["x", "y", "x"], "99.tar"), (["x", "15-2"], "15.tar")],
)
def test_a_key_that_the_index_has_is_refused_and_nothing_changes(tars: Path, keys: list[str], other: str) -> None:
    added(tars, "05a")
    before = {path.name: path.read_bytes() for path in (tars / ".nv-meta").iterdir()}
    write_texts(tars, {"99.tar": keys})
    with pytest.raises(DuplicateKeyError, match=rf"is in '{other}' and again in '99\.tar'"):
        prepare(tars)
    assert {path.name: path.read_bytes() for path in (tars / ".nv-meta").iterdir()} == before


def test_an_index_of_an_earlier_state_is_refused_by_name(tars: Path) -> None:
    index = tars / ".nv-meta/index.sqlite"
    earlier = index.read_bytes()
    added(tars, "05a")
    index.write_bytes(earlier)
    for look in (
        lambda: local_key_index(open_store(tars), ""),
        lambda: WebdatasetFileStore(tars)["3-1.txt"],
        lambda: added(tars, "99"),
    ):
        with pytest.raises(KeyIndexError, match=r"ends before 05a\.tar, which `\.info\.json` lists.*--tar-index-only"):
            look()
    rebuild_index(tars)
    added(tars, "98")
    check(tars)


def test_a_disk_without_locks_gets_a_new_index(tars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "can_add_keys", lambda path: False)
    before = identity(tars)
    added(tars, "05a")
    assert identity(tars) != before
    check(tars)


@pytest.mark.parametrize("look_before", [True, False])
def test_a_store_that_is_open_finds_old_keys_and_then_new_ones(tars: Path, look_before: bool) -> None:
    store = WebdatasetFileStore(tars)
    if look_before:
        assert store["3-1.txt"][0] == b"text of 3-1"
        with pytest.raises(FileNotInStoreError):
            store["05a-1.txt"]
    for name in ("05a", "98"):
        for key in added(tars, name):
            assert store[f"{key}.txt"][0] == f"text of {key}".encode()
            assert store["3-1.txt"][0] == b"text of 3-1"


# A transaction that is under way, or was killed -----------------------------------------------------------------------

STOPPED = """
import os, sys
from energon_bridge.core.format import key_index
from energon_bridge.core.format.key_index import KeyIndexWriter
from energon_bridge.core.prepare import parse_ratio, prepare_dataset, indexing as preparing
preparing._LARGE_BYTES, key_index._CACHE_KIB = 0, 1  # pages are written before the transaction ends
def stop(self):
    print("writing", flush=True)
    sys.stdin.readline()
    os._exit(9)
KeyIndexWriter.finish = stop
prepare_dataset(sys.argv[1], split=parse_ratio("1,0,0"))
"""


@pytest.fixture
def half(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A dataset whose key index is being written, by a process that dies when it reads a line."""
    root = write_texts(tmp_path / "half", FIRST)
    prepare(root)
    write_texts(root, {"99.tar": [f"{number}-new" for number in range(2000)]})
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        assert leftovers(root) == ["index.sqlite-journal"]
        yield root, process
        process.kill()


def test_readers_of_an_index_that_is_being_written_find_the_old_state(
    half: tuple[Path, subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for the writer, and what it left when it was killed is rolled back."""
    root, process = half
    store, keys = open_store(root), [key for keys in FIRST.values() for key in keys]
    with monkeypatch.context() as patch:
        patch.setattr(key_index, "_WAIT_SECONDS", 0.1)
        with pytest.raises(KeyIndexError, match="database is locked"):
            local_key_index(store, "")
    killer = threading.Timer(0.5, lambda: process.communicate("die\n"))
    killer.start()
    index = local_key_index(store, "")
    assert None not in find_keys(index, keys)
    killer.join()
    assert leftovers(root) == []
    check(root)
    prepare(root)
    check(root)
    assert find_keys(index, ["1999-new"]) == [(16, 1999)]


def test_the_next_run_rolls_back_what_was_killed(half: tuple[Path, subprocess.Popen[str]]) -> None:
    root, process = half
    process.communicate("die\n")
    copied = open_store("memory://half-written")
    for path in filter(Path.is_file, root.rglob("*")):
        copied.write(path.relative_to(root).as_posix(), path.read_bytes())
    with pytest.raises(KeyIndexError, match=r"index\.sqlite-journal lies beside it"):
        WebdatasetFileStore("memory://half-written")["3-1.txt"]
    for name, _ in [*copied.list()]:
        copied.delete(name)
    (root / "99.tar").unlink()
    prepare(root)
    assert leftovers(root) == []
    check(root)


def test_a_reader_who_may_not_roll_back_says_who_must(
    half: tuple[Path, subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, process = half
    process.communicate("die\n")
    message = (
        rf"^{root}: an `energon prepare` that added keys was killed and left {root}/\.nv-meta/index\.sqlite-journal, "
        rf".* run `energon prepare --tar-index-only {root}`\.$"
    )
    with monkeypatch.context() as patch:
        plain = key_index._uri
        patch.setattr(key_index, "_uri", lambda path, mode="ro": plain(path, mode))  # as for one who may not write
        for read in (lambda: local_key_index(open_store(root), ""), lambda: WebdatasetFileStore(root)["3-1.txt"]):
            with pytest.raises(KeyIndexError, match=message):
                read()
        assert not summarize_dataset(root).media  # which is shown without the index
    (root / "99.tar").unlink()
    rebuild_index(root)
    assert leftovers(root) == []
    assert WebdatasetFileStore(root)["3-1.txt"][0] == b"text of 3-1"


def test_a_journal_is_not_rolled_back_into_another_index(half: tuple[Path, subprocess.Popen[str]]) -> None:
    root, process = half
    process.communicate("die\n")
    rebuild_index(root)
    assert leftovers(root) == []
    (root / ".nv-meta/index.sqlite-journal").write_bytes(b"of nothing")
    (root / ".nv-meta/index.sqlite").write_bytes(b"no database" * 500)
    with pytest.raises(StorageError, match=r"index\.sqlite: a run was killed .* Delete this file and index\.sqlite-j"):
        prepare(root)


def test_a_dataset_at_a_url_is_prepared_as_a_whole(tars: Path, tmp_path: Path) -> None:
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
    assert [WebdatasetFileStore(root).get_media_metadata(f"k{number}.png").width for number in range(8)] == [
        10 + number for number in range(8)
    ]
    prepare_media(root, MediaFilter(strategy="EXTENSION"))
    assert WebdatasetFileStore(root).get_media_metadata("k8.png").width == 18
    assert summarize_dataset(root).part_types["png"].count == 9


# Moves that were cut off ---------------------------------------------------------------------------------------------

KILLED = """
import os, sys
from energon_bridge.core.prepare import parse_ratio, prepare_dataset, indexing as preparing
from energon_bridge.core.storage import LocalStore
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


@pytest.mark.parametrize(("change", "limit"), [("added", 0), ("removed", 1 << 40), ("twice", 0)])
def test_no_reader_finds_files_of_two_states_and_the_next_run_completes_them(
    tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, limit: int
) -> None:
    """Killed before each move: readers find the old state, the new one or none; the next run makes the new one."""
    monkeypatch.setattr(preparing, "_LARGE_BYTES", limit)
    keys_of = {**FIRST, "05a.tar": ["05a-0", "05a-1"], "99.tar": ["99-0", "99-1"]}
    if change == "twice":
        added(tars, "05a")
        write_texts(tars, {"99.tar": keys_of["99.tar"]})
    elif change == "removed":
        for name in ("03.tar", "03.tar.idx"):
            (tars / name).unlink()
    else:
        write_texts(tars, {"99.tar": keys_of["99.tar"]})
    old = (tars / ".nv-meta/index.uuid").read_text()
    found = []
    for at in range(40):
        copy = tmp_path / f"copy{at}"
        shutil.copytree(tars, copy)
        process = run_program(["-c", KILLED, str(copy), str(limit), str(at)], tmp_path)
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
    assert ("unprepared" in found) == (change == "removed")


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
