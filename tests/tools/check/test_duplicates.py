"""Keys that stand twice: renamed in the headers of the tars and nowhere else, killed or not."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from commands import energon, output_of
from keyed import ALL_TRAIN
from paths import REPOSITORY
from sources import content
from tar_builder import GNU, PAX, USTAR, read_all, write_tar, write_texts

from energon_bridge.core.errors import ConfigurationError, DuplicateKeyError, MetadataError
from energon_bridge.core.format.dataset import open_dataset
from energon_bridge.core.prepare import prepare_dataset
from energon_bridge.tools.check import duplicates
from energon_bridge.tools.check.duplicates import rename_duplicates

LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))
DEEP = "folder/" * 12 + "x" * 40
FLAGS = ["--split-ratio", "1,0,0", "--sample-type", "TextSample", "--field-map", '{"text": "txt"}']
FLAGS += ["--no-progress", "--num-workers", "1"]


def tars(root: Path, tar_format: int = USTAR) -> Path:
    return write_texts(
        root,
        {"s_0.tar": ["a", "b/c", DEEP], "s_1.tar": ["a", "d", "b/c", DEEP], "t/s_2.tar": ["e", "a", "a~2"]},
        tar_format=tar_format,
    )


def only_tars(root: Path) -> dict[str, bytes]:
    return {name: data for name, data in content(root).items() if name.endswith(".tar")}


def members(path: Path) -> list[tuple[str, bytes]]:
    with tarfile.open(path) as tar:
        return [(info.name, tar.extractfile(info).read()) for info in tar if info.isfile()]  # type: ignore[union-attr]


@pytest.mark.parametrize("tar_format", [USTAR, GNU, PAX])
def test_the_next_samples_get_new_keys(tmp_path: Path, tar_format: int) -> None:
    """`a~2` is taken, so it is passed over; texts stay where they are; long names of every kind are renamed."""
    root = tars(tmp_path / "data", tar_format)
    before = only_tars(root)
    assert "--fix-duplicates" in energon("prepare", root, *FLAGS).output
    output = output_of("prepare", root, *FLAGS, "--fix-duplicates")
    assert "s_1.tar: a is now a~3." in output
    assert "Renamed 4 samples" in output
    wanted = ["a", "b/c", DEEP, "a~3", "d", "b/c~2", f"{DEEP}~2", "e", "a~4", "a~2"]
    old = ["a", "b/c", DEEP, "a", "d", "b/c", DEEP, "e", "a", "a~2"]
    assert read_all(open_dataset(root, split_part="train")) == [
        (key, {"txt": f"text of {was}".encode()}) for key, was in zip(wanted, old, strict=True)
    ]
    found = [member for tar in sorted(root.rglob("*.tar")) for member in members(tar)]
    assert found == [(f"{key}.txt", f"text of {was}".encode()) for key, was in zip(wanted, old, strict=True)]
    after = only_tars(root)
    assert after["s_0.tar"] == before["s_0.tar"]
    assert {name: len(data) for name, data in after.items()} == {name: len(data) for name, data in before.items()}
    assert "No duplicate keys" in energon("prepare", root, *FLAGS, "--fix-duplicates", "--force-overwrite").output
    assert not (root / ".nv-meta" / duplicates.RENAMING).exists()


def test_a_name_that_becomes_too_long_is_split_in_two(tmp_path: Path) -> None:
    """Of ustar headers, whose names of more than 100 bytes are a prefix and the rest."""
    key = "folder/" * 12 + "x" * 11
    root = write_texts(tmp_path / "data", {"s_0.tar": [key], "s_1.tar": [key]})
    rename_duplicates(root)
    assert members(root / "s_1.tar") == [(f"{key}~2.txt", f"text of {key}".encode())]


def test_prepared_tars_keep_their_keys(tmp_path: Path) -> None:
    """A tar that comes later is the one that changes, wherever its name stands."""
    root = write_texts(tmp_path / "data", {"m.tar": ["a", "b"]})
    prepare_dataset(root, split=ALL_TRAIN)
    before = only_tars(root)
    write_texts(root, {"c.tar": ["b", "x"]})
    assert [(one.shard, one.key, one.new_key) for one in rename_duplicates(root)] == [("c.tar", "b", "b~2")]
    assert only_tars(root)["m.tar"] == before["m.tar"]
    write_texts(root, {"d.tar": ["b"]})
    assert [(one.shard, one.new_key) for one in rename_duplicates(root)] == [("d.tar", "b~3")]
    write_texts(root, {"c.tar": ["new"]})
    write_texts(root, {"e.tar": ["a"]})
    assert [(one.shard, one.new_key) for one in rename_duplicates(root, num_workers=2)] == [("e.tar", "a~2")]
    assert members(root / "c.tar") == [("new.txt", b"text of new")]


def test_what_cannot_be_renamed_changes_nothing(tmp_path: Path) -> None:
    apart = write_tar(tmp_path / "apart/s.tar", [("a.jpg", b"1"), ("b.jpg", b"2"), ("a.txt", b"3")]).parent
    with pytest.raises(DuplicateKeyError, match=r"parts of the sample 'a' are not adjacent: jpg, and .* txt"):
        rename_duplicates(apart)
    tight = write_texts(tmp_path / "tight", {"s_0.tar": ["a", "y" * 96], "s_1.tar": ["a", "y" * 96]})
    before = content(tight)
    with pytest.raises(DuplicateKeyError, match="has no room for the name"):
        rename_duplicates(tight)
    assert content(tight) == before
    with pytest.raises(ConfigurationError, match="can only be renamed in a local folder"):
        rename_duplicates("memory://twice")
    for flags in (["--task", "0/2"], ["--finish"], ["--tar-index-only"]):
        assert "without --task" in energon("prepare", tight, "--fix-duplicates", *flags).output


def killed(root: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Leave a folder as a run leaves it that is killed before it has changed a tar; return the tars of now and then."""
    before = only_tars(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "_complete", lambda store: None)
        rename_duplicates(root)
    log = (root / ".nv-meta" / duplicates.RENAMING).read_bytes()
    rename_duplicates(root)
    after = only_tars(root)
    for name, data in before.items():
        (root / name).write_bytes(data)
    (root / ".nv-meta" / duplicates.RENAMING).write_bytes(log)
    return before, after


def test_a_tar_that_was_replaced_is_not_touched(tmp_path: Path) -> None:
    root = write_texts(tmp_path / "data", {"s_0.tar": ["a"], "s_1.tar": ["a"], "s_2.tar": ["a"]})
    killed(root)
    write_texts(root, {"s_2.tar": ["other"]})
    before = only_tars(root)
    with pytest.raises(MetadataError, match=r"s_2\.tar: was replaced while keys"):
        rename_duplicates(root)
    assert only_tars(root) == before
    (root / ".nv-meta" / duplicates.RENAMING).write_text("[]")
    with pytest.raises(MetadataError, match="damaged"):
        rename_duplicates(root)


def test_a_header_that_was_half_written_is_completed(tmp_path: Path) -> None:
    root = write_texts(tmp_path / "data", {"s_0.tar": ["a"], "s_1.tar": ["a"]})
    before, after = killed(root)
    (root / "s_1.tar").write_bytes(after["s_1.tar"][:3] + before["s_1.tar"][3:])
    rename_duplicates(root)
    assert only_tars(root) == after


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Run after run is killed; then all names are new."""
    seed = int(os.environ.get("ENERGON_TEST_SEED", "0").replace("random", "") or random.randrange(1 << 30))
    print(f"ENERGON_TEST_SEED={seed}")  # noqa: T201
    rng = random.Random(seed)
    shards = {f"s_{n:02d}.tar": [f"{n % 10}-{k}" for k in range(150)] for n in range(30)}
    expected = write_texts(tmp_path / "whole", shards)
    old = only_tars(expected)
    start = time.perf_counter()
    assert len(rename_duplicates(expected)) == 3000
    seconds = time.perf_counter() - start
    new = only_tars(expected)
    root = write_texts(tmp_path / "data", shards)
    call = (
        "import sys; from energon_bridge.tools.check.duplicates import rename_duplicates as rename\n"
        "print('go', flush=True); rename(sys.argv[1])"
    )
    kills = 0
    for turn in range(50 if LONG else 3):
        with subprocess.Popen(
            [sys.executable, "-c", call, str(root)], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"go\n"
            try:
                process.wait(rng.uniform(0, seconds) if turn else seconds / 10)
            except subprocess.TimeoutExpired:
                process.kill()
                kills += 1
        for shard, data in only_tars(root).items():  # a tar is old, new or on the way: headers alone differ
            assert len(data) == len(old[shard])
    assert kills
    rename_duplicates(root)
    assert only_tars(root) == new
