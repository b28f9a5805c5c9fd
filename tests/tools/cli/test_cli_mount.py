"""`energon mount`: the tree has the bytes of the tars, hostile names stay in it, and it cannot be written to."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import energon
from made import made_once
from previews import CRUDE

from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.core.storage import open_store
from energon_bridge.tools.preview.mount import DatasetTree, MountedPart
from energon_bridge.tools.testing import create_captioning_test_dataset, write_shard

captions = made_once(create_captioning_test_dataset, num_train=20, num_val=4)


def crude(folder: Path, samples: dict[str, dict[str, bytes]]) -> Path:
    folder.mkdir()
    write_shard(folder / "0.tar", samples)
    prepare_dataset(folder, split=parse_patterns(["train:.*"]), dataset_yaml=CRUDE)
    return folder


def files_of(tree: DatasetTree, path: str = "") -> Iterator[tuple[str, bytes]]:
    """Yield the path and content of every file."""
    found = tree.find(path)
    if isinstance(found, MountedPart):
        yield path.removeprefix("/"), tree.read(found, 0, 1 << 20)
        return
    assert found is not None
    for name in found:
        assert name not in ("", ".", "..")
        assert "/" not in name
        yield from files_of(tree, f"{path}/{name}")


def members_of(dataset: Path) -> dict[str, bytes]:
    """Return what Python's tarfile finds in the shards, by `SHARD/NAME`."""
    found = {}
    for shard in sorted(dataset.rglob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar.getmembers():
                content = tar.extractfile(member)
                assert content is not None
                found[f"{shard.relative_to(dataset)}/{member.name}"] = content.read()
    return found


def test_the_tree_is_what_is_in_the_tars(captions: Path) -> None:
    members = members_of(captions)
    assert dict(files_of(DatasetTree(open_store(captions)))) == members
    in_folders = {path.replace(".png", "/png").replace(".txt", "/txt"): data for path, data in members.items()}
    assert dict(files_of(DatasetTree(open_store(captions), sample_folders=True))) == in_folders


def test_ranges_of_a_file(captions: Path) -> None:
    tree = DatasetTree(open_store(captions))
    path, content = next(files_of(tree))
    part = tree.find(path)
    assert isinstance(part, MountedPart)
    for offset, length in ((0, 5), (3, 10**9), (len(content) - 1, 1), (len(content), 9), (10**6, 9)):
        assert tree.read(part, offset, length) == content[offset : offset + length]
    for missing in ("/nothing", "/train", f"/{path}/below", "/train/shard_000.tar/nothing"):
        assert (tree.find(missing) is None) is (missing != "/train")


def test_hostile_names_stay_in_the_tree(tmp_path: Path) -> None:
    keys = ("../../up", "/abs", "a//b", "./here", "in/side", "<script>", "x\u202ey")
    data = crude(tmp_path / "data", {key: {"txt": key.encode()} for key in keys})
    for folders in (False, True):
        found = dict(files_of(DatasetTree(open_store(data), sample_folders=folders)))
        assert sorted(found.values()) == sorted(key.encode() for key in keys)
        assert all(".." not in path.split("/") and path.startswith("0.tar/") for path in found)


def test_names_that_occur_twice_are_told_apart(tmp_path: Path) -> None:
    samples = {"a": {"b": b"file"}, "a.b/c": {"txt": b"below"}}
    found = dict(files_of(DatasetTree(open_store(crude(tmp_path / "data", samples)))))
    assert found == {"0.tar/a.b": b"file", "0.tar/a.b~2/c.txt": b"below"}


def test_what_cannot_be_mounted_is_named(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    assert "energon convert" in energon("mount", tmp_path / "plain", tmp_path).output
    assert "takes the folder of one" in energon("mount", "mix.yaml", tmp_path).output


# With the kernel ------------------------------------------------------------------------------------------------------


@contextmanager
def mounted(dataset: Path, at: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Mount in a process of its own, and unmount."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK) or shutil.which("fusermount3") is None:
        pytest.skip("no FUSE here: apt-get install fuse3, and /dev/fuse")
    pytest.importorskip("mfusepy", reason="mfusepy is not installed (extra mount)", exc_type=ImportError)
    command = [sys.executable, "-m", "energon_bridge.tools.cli.main", "mount", *options, str(dataset), str(at)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not os.path.ismount(at):
            if process.poll() is not None:
                said = process.communicate()[1]
                if "cannot mount the dataset here" in said:
                    pytest.skip(f"mounting is not allowed here: {said}")
                raise AssertionError(said)
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        if os.path.ismount(at):
            subprocess.run(["fusermount3", "-u", str(at)], check=True)


@pytest.mark.parametrize("folders", [False, True])
def test_a_mounted_dataset_is_read_like_any_folder(captions: Path, tmp_path: Path, folders: bool) -> None:
    with mounted(captions, tmp_path, *(["-s"] if folders else [])) as process:
        read = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert read == dict(files_of(DatasetTree(open_store(captions), sample_folders=folders)))
        first = tmp_path / next(iter(read))
        with pytest.raises(OSError, match="Read-only") as refused:
            first.write_bytes(b"changed")
        assert refused.value.errno == errno.EROFS
        with pytest.raises(OSError, match="Read-only"):
            (tmp_path / "new").mkdir()
        with pytest.raises(FileNotFoundError):
            (tmp_path / "nothing").stat()
        with first.open("rb") as file:
            file.seek(3)
            assert file.read(4) == read[str(first.relative_to(tmp_path))][3:7]
    assert process.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_shard_is_an_error_of_reading(tmp_path: Path) -> None:
    data, at = crude(tmp_path / "data", {"a": {"txt": b"a"}}), tmp_path / "at"
    at.mkdir()
    (data / "0.tar").write_bytes(b"no tar" * 1000)
    with mounted(data, at):
        assert [path.name for path in at.iterdir()] == ["0.tar"]
        with pytest.raises(OSError, match="Input/output error"):
            list((at / "0.tar").iterdir())
