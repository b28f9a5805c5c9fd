"""Stores: exact reads, bounded descriptors, forks, threads, pickles, and errors that name the file."""

from __future__ import annotations

import errno
import io
import itertools
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from energon_bridge.core.errors import (
    ConfigurationError,
    DatasetNotFoundError,
    ShardMissingError,
    ShortReadError,
    StorageError,
)
from energon_bridge.core.storage import ByteRange, LocalStore, OpenFiles, Store, no_room, open_store
from energon_bridge.core.storage.ranges import RangeReader


@pytest.fixture(params=["local", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """Return an existing, almost empty store of each kind."""
    if request.param == "memory":
        root = f"memory://{tmp_path.name}"
        opened = open_store(root)
        opened.write("a/first.bin", bytes(range(200)))
        yield opened
        fsspec.filesystem("memory").rm(tmp_path.name, recursive=True)
        return
    opened = open_store(f"file://{tmp_path}" if request.param == "file" else tmp_path)
    opened.write("a/first.bin", bytes(range(200)))
    yield opened


def test_reads_give_exactly_the_range(store: Store):
    assert store.read_range("a/first.bin", 10, 5) == bytes(range(10, 15))
    assert store.read_range("a/first.bin", 0, 200) == store.read("a/first.bin") == bytes(range(200))
    assert store.read_range("a/first.bin", 200, 0) == b""
    assert store.size("a/first.bin") == 200


def test_several_ranges_come_in_the_order_given(store: Store):
    whole = store.read("a/first.bin")
    assert store.read_ranges("a/first.bin", [150, 0, 7, 200], [50, 3, 100, 0]) == [
        whole[150:],
        whole[:3],
        whole[7:107],
        b"",
    ]
    with pytest.raises(ShortReadError, match=r"first\.bin: expected 20 bytes at offset 190, got 10"):
        store.read_ranges("a/first.bin", [0, 190], [10, 20])


def test_near_ranges_of_any_file_system_are_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = open_store(f"memory://{tmp_path.name}")
    data = bytes(range(256)) * 1000
    store.write("x", data)
    asked, read = [], type(store).read_range
    monkeypatch.setattr(
        type(store), "read_range", lambda self, *range_: asked.append(range_[1:]) or read(self, *range_)
    )
    offsets, lengths = [100_000, 0, 50, 140_000, 30, 100_000], [50, 30, 20, 9, 20, 4]
    expected = [data[low : low + length] for low, length in zip(offsets, lengths, strict=True)]
    assert store.read_ranges("x", offsets, lengths) == expected
    assert asked == [(0, 70), (100_000, 50), (140_000, 9)]


def test_a_short_range_is_an_error_with_the_numbers(store: Store):
    with pytest.raises(ShortReadError, match=r"first\.bin: expected 20 bytes at offset 190, got 10"):
        store.read_range("a/first.bin", 190, 20)


@pytest.mark.parametrize("call", ["size", "read", "read_range"])
def test_a_missing_file_is_named(store: Store, call: str):
    arguments = ("a/none.bin", 0, 1) if call == "read_range" else ("a/none.bin",)
    with pytest.raises(ShardMissingError, match=r"a/none\.bin: no such file"):
        getattr(store, call)(*arguments)
    assert not store.exists("a/none.bin")
    assert not store.exists("a")


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_missing_root_is_named(kind: str, tmp_path: Path):
    store = open_store(tmp_path / "nowhere" if kind == "local" else "memory://nowhere-at-all")
    for call in (store.check_root, store.list, lambda: store.read("x")):
        with pytest.raises(DatasetNotFoundError, match=r"nowhere.*no such folder"):
            call()


def test_listing_is_recursive_sorted_and_relative(store: Store):
    store.write("b.tar", b"12")
    store.write("a/c.tar", b"123")
    assert store.list() == [("a/c.tar", 3), ("a/first.bin", 200), ("b.tar", 2)]
    assert store.list(".tar") == [("a/c.tar", 3), ("b.tar", 2)]


def test_writing_replaces_and_deleting_forgives(store: Store, tmp_path: Path):
    store.write("a/first.bin", b"new")
    assert store.read("a/first.bin") == b"new"
    local = tmp_path / "outside"
    local.write_bytes(b"moved")
    store.put_file(str(local), "x/y.bin")
    assert store.read("x/y.bin") == b"moved"
    store.delete("x/y.bin")
    store.delete("x/y.bin")
    assert not store.exists("x/y.bin")


def test_pickles_and_forks(store: Store):
    copy = pickle.loads(pickle.dumps(store))
    assert copy.root == store.root
    assert copy.read_range("a/first.bin", 1, 2) == b"\x01\x02"
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, store.read_range("a/first.bin", 3, 4))
        os._exit(0)
    os.close(write_end)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(read_end, 10) == b"\x03\x04\x05\x06"
    os.close(read_end)


def test_a_fork_does_not_inherit_a_held_lock(tmp_path: Path):
    (tmp_path / "f").write_bytes(b"content")
    files = OpenFiles()
    store = LocalStore(tmp_path, files=files)
    assert store.read_range("f", 0, 3) == b"con"
    lock = files._lock()
    lock.acquire()  # as a thread of the parent could at the moment of the fork
    child = os.fork()
    if child == 0:
        os._exit(0 if store.read_range("f", 3, 4) == b"tent" else 1)
    assert os.waitpid(child, 0)[1] == 0
    lock.release()


def open_descriptors(folder: Path) -> int:
    """Count this process's descriptors of files below a folder."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            count += str(entry.resolve()).startswith(str(folder.resolve()))
        except OSError:
            continue
    return count


@pytest.mark.parametrize("folders", [1, 5])
def test_descriptors_are_bounded_and_threads_get_their_own_bytes(tmp_path: Path, folders: int):
    for number in range(40):
        folder = tmp_path / str(number % folders)
        folder.mkdir(exist_ok=True)
        (folder / str(number)).write_bytes(bytes([number]) * 1000)

    def read(step: int) -> bool:
        number = step * 7 % 40
        return stores[number % folders].read_range(str(number), step % 900, 100) == bytes([number]) * 100

    files = OpenFiles(4)
    stores = [open_store(tmp_path / str(folder), files=files) for folder in range(folders)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(4000)))
    assert open_descriptors(tmp_path) == len(files) == 4
    stores.clear()
    del files
    assert open_descriptors(tmp_path) == 0


def test_the_descriptor_used_last_is_kept(tmp_path: Path):
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode())
    store = LocalStore(tmp_path, files=OpenFiles(2))
    for name in "abac":  # b is the one that was not used for longest
        store.read_range(name, 0, 1)
    assert [name for name in "abc" if open_descriptors(tmp_path / name)] == ["a", "c"]


def test_stores_that_share_a_pool_share_it_after_pickling_too(tmp_path: Path):
    for name in "abcd":
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(name.encode())
    files = OpenFiles(2)
    copies = pickle.loads(pickle.dumps([LocalStore(tmp_path / name, files=files) for name in "abcd"]))
    assert [copy.read_range("file", 0, 1) for copy in copies] == [b"a", b"b", b"c", b"d"]
    assert open_descriptors(tmp_path) == 2


def test_a_write_that_fails_says_so_and_leaves_nothing(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    store = open_store(tmp_path)
    with pytest.raises(StorageError, match="cannot write 3 bytes"):
        store.write("file/below", b"abc")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_links_in_a_circle_end(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.tar").write_bytes(b"1")
    (tmp_path / "folder" / "up").symlink_to(tmp_path)
    assert open_store(tmp_path).list(".tar") == [("folder/x.tar", 1)]


def test_an_unknown_protocol_is_a_configuration_error():
    with pytest.raises(ConfigurationError, match="no storage backend for this kind of URL"):
        open_store("nosuchprotocol://bucket/path")


@pytest.mark.parametrize("size", [0, 1, 700, 1024, 5000])
@given(asked=st.lists(st.one_of(st.none(), st.integers(1, 6000)), max_size=4))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_beginning_of_a_range_is_read_once(tmp_path: Path, size: int, asked: list[int | None]) -> None:
    data = bytes(number % 251 for number in range(size))
    (tmp_path / "file").write_bytes(b"before" + data)
    read: set[int] = set()
    twice: set[int] = set()

    class Counting(LocalStore):
        def read_range(self, rel: str, offset: int, length: int) -> bytes:
            now = {*range(offset - 6, offset - 6 + length)}
            twice.update(read & now)
            read.update(now)
            return super().read_range(rel, offset, length)

    part = ByteRange(store=Counting(tmp_path), rel="file", offset=6, size=size)
    for most in asked:
        assert part.read(most) == data[:most]
    assert len(part.head) <= 1024
    if asked:  # what was read first, if it is little, is not read again
        assert not twice & {*range((asked[0] or size) if (asked[0] or size) <= 1024 else 0)}
    assert part == ByteRange(store=part.store, rel="file", offset=6, size=size)


def test_a_stream_reads_what_it_knows_from_memory(tmp_path: Path) -> None:
    """The file is changed behind its back: only bytes that nobody had yet come from it."""
    data = bytes(range(100))
    (tmp_path / "file").write_bytes(bytes(100))
    part = ByteRange(store=open_store(tmp_path), rel="file", offset=10, size=80)
    stream = RangeReader(part, [(0, data[:20]), (60, data[60:])])
    assert stream.read(20) == data[:20]
    assert stream.read(5) == bytes(5)
    assert stream.seek(-20, io.SEEK_END) == 60
    assert stream.read() == data[60:80]
    assert (stream.tell(), stream.read(), stream.bytes_read) == (80, b"", 45)
    stream.seek(15)
    assert stream.read(10) == bytes(10)  # partly known: read as a whole


def test_of_folders_on_one_disk_the_first_is_said_to_be_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others write meanwhile, so that each look finds less room."""
    looks = itertools.count()
    real = os.statvfs

    def less(path: str) -> os.statvfs_result:
        values = [*real(path)]
        values[4] = 1000 - next(looks)  # f_bavail
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", less)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    said = str(no_room(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), [first / "out", second / "out"]))
    assert said.startswith(f"{first}/out: cannot write")
    assert f" {first} has " in said
