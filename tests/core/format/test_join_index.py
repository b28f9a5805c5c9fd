"""The index of a join: built in parallel, kept in a file of its own for everything it depends on, rebuilt when that
changes or the file is damaged; and `energon prepare` of a mix."""

from __future__ import annotations

import logging
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from full_disk import no_room
from hypothesis import given, settings, strategies as st
from keyed import join, keyed_dataset, shards, shuffled, write_mix

from energon_bridge.core.errors import EmptyDatasetError, KeyIndexError, StorageError
from energon_bridge.core.format.dataset import open_dataset
from energon_bridge.core.format.join import JoinIndex, JoinPart, open_index
from energon_bridge.tools.cli.main import main

NUMBERS = [f"{number:03d}" for number in range(90)]


def parts_of(folder: Path, split_part: str = "train", nonmatch: Any = "none") -> list[JoinPart]:
    return [
        JoinPart(dataset=open_dataset(folder / "a", split_part=split_part)),
        JoinPart(dataset=open_dataset(folder / "b", split_part=split_part), nonmatch=nonmatch),
    ]


def index_of(folder: Path, split_part: str = "train", nonmatch: Any = "none", **kwargs: Any) -> JoinIndex:
    return open_index(parts_of(folder, split_part, nonmatch), [str(folder / "cache")], **kwargs)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the datasets `a` (keys in order) and `b` (2 of 3 of them, shuffled, and others)."""
    keyed_dataset(tmp_path / "a", train=shards(NUMBERS, 20, 1, 39, 30), val=[["v0", "v1"]])
    others = [*shuffled(NUMBERS)[:60], *(f"x{number}" for number in range(20))]
    keyed_dataset(tmp_path / "b", train=shards(shuffled(others, 2), 50, 30), val=[["v1", "v0"]])
    return tmp_path


def expected_rows(folder: Path) -> list[tuple[int, int]]:
    """Return the rows of the `folder` fixture, found the slow way."""
    others = shuffled([*shuffled(NUMBERS)[:60], *(f"x{number}" for number in range(20))], 2)
    return [(row, others.index(key) if key in others else -1) for row, key in enumerate(NUMBERS)]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_rows_are_places_on_the_lines_of_the_splits(folder: Path, num_workers: int) -> None:
    steps: list[tuple[int, int]] = []
    index = index_of(folder, num_workers=num_workers, progress=lambda done, total: steps.append((done, total)))
    assert [tuple(row) for row in index.rows.tolist()] == expected_rows(folder)
    assert index.shard_counts.tolist() == [20, 1, 39, 30]
    assert steps[-1] == (4, 4)
    assert steps == sorted(set(steps))
    assert index.rows.dtype == np.int64
    again = index_of(folder, num_workers=num_workers, progress=lambda done, total: pytest.fail("built again"))
    assert np.array_equal(again.rows, index.rows)
    assert (again.checksum, again.path) == (index.checksum, index.path)


def test_skipped_rows_shorten_their_shards(folder: Path) -> None:
    index = index_of(folder, nonmatch="skip")
    expected = np.array([row for row in expected_rows(folder) if row[1] >= 0])
    assert np.array_equal(index.rows, expected)
    assert index.shard_counts.tolist() == np.histogram(expected[:, 0], [0, 20, 21, 60, 90])[0].tolist()


ALL = [f"{number}" for number in range(12)]
some_keys = st.lists(st.sampled_from(ALL), unique=True, min_size=1)


@settings(max_examples=30)
@given(
    first=some_keys,
    second=some_keys,
    third=some_keys,
    cuts=st.tuples(*[st.integers(1, 12)] * 3),
    excluded=st.tuples(*[st.sets(st.sampled_from(ALL), max_size=3)] * 3),
    modes=st.tuples(*[st.sampled_from(["skip", "none"])] * 2),
)
def test_rows_are_those_found_one_by_one(
    tmp_path_factory: pytest.TempPathFactory,
    first: list[str],
    second: list[str],
    third: list[str],
    cuts: tuple[int, ...],
    excluded: tuple[set[str], ...],
    modes: tuple[Any, ...],
) -> None:
    folder = tmp_path_factory.mktemp("any")
    lines = [first, second, third]
    parts = []
    for number, (keys, cut, out) in enumerate(zip(lines, cuts, excluded, strict=True)):
        pieces = [keys[:cut], keys[cut:]] if cut < len(keys) else [keys]
        excludes = [f"train/{shard}.tar/{key}" for shard, piece in enumerate(pieces) for key in piece if key in out]
        keyed_dataset(folder / str(number), train=pieces, exclude=sorted(excludes))
        dataset = open_dataset(folder / str(number), split_part="train")
        parts.append(JoinPart(dataset=dataset, nonmatch=("error", *modes)[number]))
    expected = []
    for key in [key for key in first if key not in excluded[0]]:
        row = [
            keys.index(key) if key in keys and key not in out else -1 for keys, out in zip(lines, excluded, strict=True)
        ]
        if not any(place < 0 and mode == "skip" for place, mode in zip(row[1:], modes, strict=True)):
            expected.append(row)
    if not expected:
        with pytest.raises(EmptyDatasetError):
            open_index(parts, [str(folder / "cache")])
        return
    index = open_index(parts, [str(folder / "cache")])
    assert index.rows.tolist() == expected
    ends = np.cumsum(parts[0].dataset.shard_counts)
    places = np.searchsorted(ends, [row[0] for row in expected], side="right")
    assert index.shard_counts.tolist() == np.bincount(places, minlength=ends.size).tolist()


def prepare_again(folder: Path) -> None:
    """Write `b` with its keys in another order, of the same names and sizes."""
    shutil.rmtree(folder / "b")
    others = [*shuffled(NUMBERS)[:60], *(f"x{number}" for number in range(20))]
    keyed_dataset(folder / "b", train=shards(shuffled(others, 3), 50, 30), val=[["v1", "v0"]])


def exclude(folder: Path) -> None:
    change_split(folder / "b", {"exclude": ["train/1.tar"]})


def resplit(folder: Path) -> None:
    change_split(folder / "a", {"split_parts": {"train": ["train/3.tar", "train/0.tar"], "val": ["val/0.tar"]}})


def change_split(dataset: Path, change: dict[str, Any]) -> None:
    path = dataset / ".nv-meta" / "split.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))


@pytest.mark.parametrize("change", [prepare_again, exclude, resplit])
def test_the_index_follows_what_it_depends_on(folder: Path, change: Callable[[Path], None]) -> None:
    before = index_of(folder)
    change(folder)
    after = index_of(folder)
    assert after.path != before.path
    assert after.checksum != before.checksum
    fresh = open_index(parts_of(folder), [str(folder / "elsewhere")])
    assert np.array_equal(after.rows, fresh.rows)


def test_split_parts_and_modes_have_files_of_their_own(folder: Path) -> None:
    indexes = [index_of(folder), index_of(folder, nonmatch="skip"), index_of(folder, "val")]
    assert len({index.path for index in indexes}) == 3
    assert indexes[2].rows.tolist() == [[0, 1], [1, 0]]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda data: data[:-8],
    "empty": lambda data: b"",
    "header only": lambda data: data[:64],
    "a bit": lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
    "another format": lambda data: b"JIDX0001" + data[8:],
    "too many rows": lambda data: data[:48] + (1 << 40).to_bytes(8, "little") + data[56:],
    "longer": lambda data: data + bytes(8),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_built_again(folder: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    before = index_of(folder)
    assert before.path is not None
    rows, path = before.rows.tolist(), Path(before.path)
    whole = path.read_bytes()
    path.unlink()  # not in place: the file is mapped
    path.write_bytes(DAMAGES[damage](whole))
    with caplog.at_level(logging.WARNING):
        assert index_of(folder).rows.tolist() == rows
    assert f"{path}: damaged" in caplog.text
    assert path.read_bytes() == whole


SCRIPT = """
import sys
from energon_bridge.core.format.dataset import open_dataset
from energon_bridge.core.format.join import JoinPart
from energon_bridge.core.format.join import open_index
folder, cache = sys.argv[1:]
parts = [JoinPart(dataset=open_dataset(f"{folder}/{name}", split_part="train"), nonmatch=mode)
         for name, mode in (("a", "error"), ("b", "none"))]
index = open_index(parts, [cache], num_workers=2, progress=lambda done, total: print("built", done))
print(index.path, index.checksum)
"""


def start(folder: Path, cache: Path, seed: int) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONHASHSEED": str(seed)}
    command = [sys.executable, "-c", SCRIPT, str(folder), str(cache)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_processes_that_start_together_share_one_index(folder: Path) -> None:
    """Excludes are sets, whose order differs from process to process; the file must not."""
    some = random.Random(3).sample(NUMBERS[:20], 6)
    change_split(folder / "a", {"exclude": [f"train/0.tar/{key}" for key in some]})
    processes = [start(folder, folder / "cache", seed) for seed in range(4)]
    lines = [process.communicate(timeout=60)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert len({found[-1] for found in lines}) == 1
    assert sum(len(found) > 1 for found in lines) == 1  # one of them built it, the others waited
    assert [str(path) for path in (folder / "cache").iterdir()] == [lines[0][-1].split()[0]]
    assert len(index_of(folder).rows) == len(NUMBERS) - len(some)


def test_without_a_folder_to_write_to_the_rows_are_in_memory(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        index = open_index(parts_of(folder), [str(folder / "file" / "a"), str(folder / "file" / "b")])
    assert index.path is None
    assert [tuple(row) for row in index.rows.tolist()] == expected_rows(folder)
    assert "Make one of them writable" in caplog.text


def test_the_first_folder_that_can_be_written_to_is_used(folder: Path) -> None:
    (folder / "file").write_text("")
    index = open_index(parts_of(folder), [str(folder / "file" / "a"), str(folder / "second")])
    assert index.path is not None
    assert Path(index.path).parent == folder / "second"


def test_a_folder_on_a_full_disk_is_passed_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_full_disk(path: Any, mode: str = "r") -> Any:
        inside = str(path).startswith(str(folder / "full"))
        return open("/dev/full" if inside and str(path).endswith(".tmp") else path, mode)

    monkeypatch.setattr("energon_bridge.core.format.join.open", on_full_disk, raising=False)
    index = open_index(parts_of(folder), [str(folder / "full"), str(folder / "second")])
    assert index.path is not None
    assert Path(index.path).parent == folder / "second"
    assert [tuple(row) for row in index.rows.tolist()] == expected_rows(folder)
    assert list((folder / "full").iterdir()) == []


def test_where_no_disk_has_room_other_folders_are_named(folder: Path) -> None:
    with no_room(), pytest.raises(StorageError, match=r"File too large.*XDG_CACHE_HOME=FOLDER, or TMPDIR=FOLDER"):
        index_of(folder)
    assert list((folder / "cache").iterdir()) == []


def without_unique_keys(data: bytes) -> bytes:
    """Return a key index as releases wrote it that did not look for keys that stand twice."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute("CREATE TABLE samples (tar_file_id INTEGER, sample_key TEXT, sample_index INTEGER)")
        return database.serialize()


@pytest.mark.parametrize(
    "damage", [lambda data: b"no database" * 500, lambda data: data[:5000], lambda data: b"", without_unique_keys]
)
def test_a_damaged_key_index_is_refused_by_name(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    path = folder / "b" / ".nv-meta" / "index.sqlite"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(
        KeyIndexError, match=r"/b: cannot read the key index \.nv-meta/index\.sqlite: .*energon prepare"
    ):
        index_of(folder)


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_key_index_of_other_shards_is_refused_by_name(folder: Path, name: str, tmp_path: Path) -> None:
    other = keyed_dataset(tmp_path / "other", train=shards(NUMBERS, 60, 5, 5, 10, 10))
    shutil.copy(other / ".nv-meta" / "index.sqlite", folder / name / ".nv-meta" / "index.sqlite")
    with pytest.raises(KeyIndexError, match=rf"/{name}: the key index and `.info.json` list different samples"):
        index_of(folder)


# energon prepare -----------------------------------------------------------------------------------------------------


def prepare(*arguments: Any) -> str:
    result = CliRunner().invoke(main, ["prepare", *map(str, arguments), "--no-progress"])
    return result.output if result.exit_code == 0 else f"{result.exit_code}: {result.output}"


def test_prepare_builds_the_joins_of_all_splits(folder: Path) -> None:
    stranger = {"__module__": "nobody.knows", "__function__": "this"}
    skip = join(None, {"nonmatch": "skip"}, joiner=stranger)
    mix = write_mix(folder / "mix.yaml", train={"blend": [skip, {"path": "./a"}]}, val=skip)
    assert prepare(mix, "--num-workers", 2) == (
        f"train: Joined 60 of 90 samples of {folder}/a.\nval: Joined 2 of 2 samples of {folder}/a.\n"
    )
    cache = folder / "mix.yaml.cache"
    assert len(list(cache.iterdir())) == 2
    (cache / "join_index_of_megatron.bin").write_bytes(b"")
    gone = cache / "join_rows_0123.bin"
    gone.write_bytes(b"")
    assert f"Removed {gone.name}, which no split uses." in prepare(mix)
    assert len(list(cache.iterdir())) == 3
    write_mix(mix, val=skip)
    assert prepare(mix).count("Removed join_rows_") == 1


def test_prepare_writes_beside_the_file_that_has_the_join(folder: Path) -> None:
    (folder / "inner").mkdir()
    skip = {"join": [{"path": "../a"}, {"path": "../b", "nonmatch": "skip"}], "joiner": join()["joiner"]}
    inner = write_mix(folder / "inner" / "mix.yaml", val=skip)
    outer = write_mix(folder / "mix.yaml", train={"path": "inner/mix.yaml", "split_part": "val"})
    assert "train: Joined 2 of 2" in prepare(outer)
    assert [path.parent for path in folder.rglob("join_rows_*")] == [Path(f"{inner}.cache")]


def test_prepare_of_a_mix_without_joins(folder: Path) -> None:
    mix = write_mix(folder / "mix.yaml", train={"path": "./a"})
    assert prepare(mix) == f"{mix} has no joins: nothing to prepare.\n"


def test_prepare_of_a_mix_takes_no_options_of_a_dataset(folder: Path) -> None:
    mix = write_mix(folder / "mix.yaml", train={"path": "./a"})
    assert "is a mix: these options are for" in prepare(mix, "--split-ratio", "8,1,1")


def test_prepare_names_what_does_not_match(folder: Path) -> None:
    mix = write_mix(folder / "mix.yaml", train=join())
    assert "30 samples of" in prepare(mix)
    assert not list((folder / "mix.yaml.cache").iterdir())
