"""Preparing: all or nothing, in parallel, restartable, on any storage."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from keyed import ALL_TRAIN, TEXT
from tar_builder import read_all, tars_of, write_tar, write_texts

from energon_bridge.core.errors import (
    ConfigurationError,
    CorruptShardError,
    DatasetNotFoundError,
    DuplicateKeyError,
    EnergonError,
    FieldMapError,
    NoShardsError,
    ShardMissingError,
    StorageError,
    UnknownArgumentError,
    UnsupportedShardError,
)
from energon_bridge.core.format.dataset import open_dataset
from energon_bridge.core.format.parallel import map_shards
from energon_bridge.core.prepare import parse_ratio, prepare_dataset, rebuild_index
from energon_bridge.core.prepare.staging import STAGING_FOLDER
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml


def snapshot(root: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Return a folder with ten tars of three samples each, not prepared."""
    return tars_of(tmp_path / "data")


# --- preparing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 3])
def test_what_is_prepared_can_be_read(tars: Path, num_workers: int):
    seen: list[tuple[int, int]] = []
    prepared = prepare_dataset(
        tars,
        split=parse_ratio("8,1,1"),
        num_workers=num_workers,
        dataset_yaml=TEXT,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert prepared.num_samples == 30
    assert prepared.part_names == ("txt",)
    assert seen == [(n, 10) for n in range(1, 11)]
    train = open_dataset(tars, split_part="train")
    assert train.shard_names == tuple(sorted(prepared.shard_counts)[:8])
    samples = read_all(train)
    assert [key for key, _ in samples[:4]] == ["0-0", "0-1", "0-2", "2-0"]
    assert all(parts == {"txt": f"text of {key}".encode()} for key, parts in samples)
    assert not (tars / STAGING_FOLDER).exists()


def test_a_damaged_key_index_is_named_before_it_is_replaced(tars: Path):
    prepare_dataset(tars, split=ALL_TRAIN)
    index = tars / ".nv-meta/index.sqlite"
    index.write_bytes(index.read_bytes().replace(b"tablesample_parts", b"tablesample_part\xea"))
    before = snapshot(tars)
    with pytest.raises(StorageError, match=r"continues .*index\.sqlite \(delete that to do"):
        prepare_dataset(tars, split=ALL_TRAIN)
    assert snapshot(tars) == before


def test_excluded_tars_are_left_out(tars: Path):
    (tars / "a/s_0.tar").write_bytes(b"garbage")
    (tars / "x.tgz").write_bytes(b"")
    prepared = prepare_dataset(tars, split=ALL_TRAIN, exclude=r"s_0\.tar|tgz$")
    assert "a/s_0.tar" not in prepared.shard_counts
    assert len(prepared.shard_counts) == 9


@pytest.mark.parametrize("name", ["x.tgz", "deep/x.tar.gz", "x.tar.zst"])
def test_compressed_tars_are_refused_before_anything_is_written(tars: Path, name: str):
    path = tars / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"\x1f\x8b")
    with pytest.raises(UnsupportedShardError, match=f"{name}: compressed tars cannot be read by range.*--exclude"):
        prepare_dataset(tars, split=ALL_TRAIN)
    assert not (tars / ".nv-meta").exists()


def test_no_folder_and_no_tars(tmp_path: Path):
    with pytest.raises(DatasetNotFoundError, match="no such folder"):
        prepare_dataset(tmp_path / "nowhere", split=ALL_TRAIN)
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(NoShardsError, match=r"no \.tar files below this folder"):
        prepare_dataset(tmp_path, split=ALL_TRAIN)
    write_texts(tmp_path, {"x.tar": ["a"]})
    with pytest.raises(NoShardsError, match="'x' does not exclude"):
        prepare_dataset(tmp_path, split=ALL_TRAIN, exclude="x")
    with pytest.raises(ConfigurationError, match=r"--exclude '\(' is not a regular expression"):
        prepare_dataset(tmp_path, split=ALL_TRAIN, exclude="(")
    assert sorted(snapshot(tmp_path)) == ["x.tar", "x.txt"]


def test_a_link_that_leads_nowhere_is_named(tars: Path):
    (tars / "a/s_99.tar").symlink_to(tars / "gone.tar")
    (tars / "a/readme.md").symlink_to(tars / "gone.md")
    with pytest.raises(ShardMissingError, match=r"a/s_99\.tar: no such file"):
        prepare_dataset(tars, split=ALL_TRAIN)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1500])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1024] ^= 1
    path.write_bytes(data)


def repeat_a_key(path: Path) -> None:
    write_tar(path, [("0-1.txt", b"again")])


def repeat_a_key_inside(path: Path) -> None:
    write_tar(path, [("k.txt", b"1"), ("l.txt", b"2"), ("k.jpg", b"3")])


BREAKAGES: dict[str, tuple[Callable[[Path], object], type[EnergonError], str]] = {
    "truncated": (cut_off, CorruptShardError, r"a/s_4\.tar: cut off at byte 1024: 476 bytes"),
    "header": (flip_a_bit, CorruptShardError, r"a/s_4\.tar: no tar header at byte 1024"),
    "empty": (lambda path: path.write_bytes(b""), CorruptShardError, r"a/s_4\.tar: cut off at byte 0"),
    "no samples": (lambda path: path.write_bytes(bytes(1024)), CorruptShardError, r"a/s_4\.tar: no samples"),
    "duplicate": (repeat_a_key, DuplicateKeyError, r"'0-1' is in 'a/s_0\.tar' and again in 'a/s_4\.tar'"),
    "torn": (repeat_a_key_inside, DuplicateKeyError, r"s_4\.tar: the parts of the sample 'k' are not adjacent"),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
@pytest.mark.parametrize(("num_workers", "before"), [(1, "fresh"), (2, "prepared")])
def test_a_bad_shard_is_named_and_nothing_changes(tars: Path, breakage: str, num_workers: int, before: str):
    if before == "prepared":
        prepare_dataset(tars, split=parse_ratio("8,1,1"), dataset_yaml=TEXT)
    damage, error, message = BREAKAGES[breakage]
    damage(tars / "a/s_4.tar")
    files = snapshot(tars)
    with pytest.raises(error, match=message):
        prepare_dataset(tars, split=ALL_TRAIN, num_workers=num_workers, dataset_yaml=b"other: 1\n")
    assert snapshot(tars) == files
    assert not (tars / STAGING_FOLDER).exists()


def test_equal_keys_are_allowed_without_a_key_index(tars: Path):
    repeat_a_key(tars / "a/s_4.tar")
    assert prepare_dataset(tars, split=ALL_TRAIN, key_index=False).num_samples == 28


def test_a_failing_move_leaves_no_dataset_that_claims_to_be_prepared(tars: Path):
    (tars / ".nv-meta").mkdir()
    (tars / ".nv-meta/.info.json").mkdir()  # the last file to be moved cannot go there
    with pytest.raises(StorageError, match=r"\.info\.json: cannot write"):
        prepare_dataset(tars, split=ALL_TRAIN)
    (tars / ".nv-meta/.info.json").rmdir()
    prepare_dataset(tars, split=ALL_TRAIN, dataset_yaml=TEXT)
    assert open_dataset(tars, split_part="train").num_samples == 30
    assert not (tars / STAGING_FOLDER).exists()


KILLED = """
import sys, time
from energon_bridge.core.prepare import parse_ratio, prepare_dataset
def stop(done, total):
    if done == 4:
        print("half", flush=True)
        time.sleep(60)
prepare_dataset(sys.argv[1], split=parse_ratio("1,0,0"), num_workers=2, progress=stop)
"""


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_killed_run_can_be_repeated(tars: Path):
    prepare_dataset(tars, split=parse_ratio("8,1,1"), dataset_yaml=TEXT)
    files = snapshot(tars)
    for tar in tars.rglob("*.tar"):
        os.utime(tar)  # all of them are read again
    command = [sys.executable, "-c", KILLED, str(tars)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        with pytest.raises(ConfigurationError, match=r"another `energon prepare` is running"):
            prepare_dataset(tars, split=ALL_TRAIN)
        workers = children_of(process.pid)
        assert len(workers) == 2
        process.kill()
    assert (tars / STAGING_FOLDER).exists()
    assert {name: data for name, data in snapshot(tars).items() if STAGING_FOLDER not in name} == files
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "worker processes outlive the process that started them"
        time.sleep(0.01)
    prepare_dataset(tars, split=parse_ratio("8,1,1"), dataset_yaml=TEXT)
    again = snapshot(tars)
    for changing in (".nv-meta/index.uuid", ".nv-meta/index.sqlite", ".nv-meta/tars.json"):
        del files[changing], again[changing]
    assert again == files


def test_rebuilding_follows_the_tars(tars: Path):
    prepare_dataset(tars, split=ALL_TRAIN, dataset_yaml=TEXT)
    split = (tars / ".nv-meta/split.yaml").read_bytes()
    write_texts(tars, {"a/s_0.tar": ["n1", "n2", "n3", "n4"], "new.tar": ["x"]})
    rebuild_index(tars, num_workers=2)
    assert (tars / ".nv-meta/split.yaml").read_bytes() == split
    assert [key for key, _ in read_all(open_dataset(tars, split_part="train"))[:5]] == ["n1", "n2", "n3", "n4", "2-0"]


def test_an_old_info_yaml_is_kept_in_step(tars: Path):
    (tars / ".nv-meta").mkdir()
    (tars / ".nv-meta/.info.yaml").write_text("shard_counts: {old.tar: 3}\n")
    prepare_dataset(tars, split=ALL_TRAIN, dataset_yaml=TEXT)
    (tars / ".nv-meta/.info.json").unlink()
    assert open_dataset(tars, split_part="train").num_samples == 30


def test_the_permissions_are_the_users(tars: Path):
    old = os.umask(0o022)
    try:
        prepare_dataset(tars, split=ALL_TRAIN)
    finally:
        os.umask(old)
    for path in [*(tars / ".nv-meta").iterdir(), tars / "a/s_0.tar.idx"]:
        assert path.stat().st_mode & 0o777 == 0o644, path


# --- dataset.yaml -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sample_type", "field_map", "error", "message"),
    [
        ("CaptionSample", {"image": "jpg"}, UnknownArgumentError, "CaptioningSample"),
        ("CaptioningSample", None, FieldMapError, 'needs a field map.*"image".*"caption"'),
        ("CaptioningSample", {"image": "jpg"}, FieldMapError, "requires the field `caption`"),
        ("CaptioningSample", {"image": "jpg", "caption": "txt", "x": "y"}, FieldMapError, "no such field"),
        ("CrudeWebdataset", {"image": "jpg"}, FieldMapError, "takes no field map"),
    ],
)
def test_a_dataset_yaml_that_could_not_be_read_is_not_written(sample_type, field_map, error, message):
    with pytest.raises(error, match=message):
        render_dataset_yaml(sample_type, field_map)


@pytest.mark.parametrize("name", ["sub/x.yaml", "x.txt", "../x.yaml"])
def test_the_name_of_dataset_yaml_stays_in_nv_meta(tars: Path, name: str):
    with pytest.raises(ConfigurationError, match="--dataset-yaml-name"):
        prepare_dataset(tars, split=ALL_TRAIN, dataset_yaml=TEXT, dataset_yaml_name=name)


# --- work in processes --------------------------------------------------------------------------------------------


def slow_square(number: int) -> int:
    time.sleep(0.02 * (number % 3))
    return number * number


def kind_of_process(_: int) -> str:
    return type(multiprocessing.current_process()).__name__


def die_at_seven(number: int) -> int:
    if number == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def fail_at_four(number: int) -> int:
    if number >= 4:
        raise CorruptShardError(f"shard {number}")
    return number


def test_results_come_in_order():
    assert list(map_shards(slow_square, range(20), num_workers=3)) == [n * n for n in range(20)]


def test_beside_a_thread_processes_are_new_interpreters():
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert list(map_shards(kind_of_process, range(2), num_workers=2)) == ["SpawnProcess"] * 2
    finally:
        end.set()
        thread.join()
    assert list(map_shards(kind_of_process, range(2), num_workers=2)) == ["ForkProcess"] * 2


def test_a_killed_process_is_an_error_and_not_a_hang():
    with pytest.raises(EnergonError, match="killed"):
        list(map_shards(die_at_seven, range(20), num_workers=2))


def test_the_first_error_in_order_is_raised():
    with pytest.raises(CorruptShardError, match=r"^shard 4$"):
        list(map_shards(fail_at_four, range(20), num_workers=3))
