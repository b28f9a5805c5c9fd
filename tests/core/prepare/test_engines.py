"""Shards made by tasks of a scheduler or of a Ray cluster: the bytes of one process, killed and repeated too."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import energon, output_of, refusal_of
from keyed import TEXT
from paths import HELPERS, REPOSITORY
from ray_cluster import ray_cluster
from sources import content, converted, llava
from tar_builder import tars_of, write_texts
from test_killed import KILLS, LONG, WORK, check_kills

from energon_bridge.core.errors import ConfigurationError, CorruptShardError
from energon_bridge.core.format.parallel import Task
from energon_bridge.core.prepare import indexing as preparing, parse_ratio, prepare_dataset
from energon_bridge.tools.check.engines import RayShardEngine
from energon_bridge.tools.cli.prepare_options import chosen_task

RULE = parse_ratio("8,1,1")
CHANGING = (".nv-meta/index.uuid", ".nv-meta/tars.json")


def rows_of(root: Path) -> list[list[Any]]:
    """Return the key index, table by table."""
    with closing(sqlite3.connect(root / ".nv-meta/index.sqlite")) as index:
        samples = "SELECT * FROM samples ORDER BY tar_file_id, sample_index"
        parts = "SELECT * FROM sample_parts ORDER BY tar_file_id, sample_index, content_byte_offset"
        names = "SELECT type, name, sql FROM sqlite_master ORDER BY name"
        return [index.execute(query).fetchall() for query in (samples, parts, names)]


def prepared(root: Path, **options: Any) -> dict[str, Any]:
    """Prepare, and return all that it wrote, the key index as rows."""
    prepare_dataset(root, split=RULE, dataset_yaml=TEXT, **options)
    return {
        name: rows_of(root) if name == ".nv-meta/index.sqlite" else data
        for name, data in content(root).items()
        if name not in CHANGING
    }


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which every tar that is walked through is added."""
    seen: list[str] = []
    scan = preparing.scan_tar

    def noted(store: Any, shard: str, *more: Any) -> Any:
        seen.append(shard)
        return scan(store, shard, *more)

    monkeypatch.setattr(preparing, "scan_tar", noted)
    return seen


# --- preparing again ----------------------------------------------------------------------------------------------


def test_only_new_and_changed_tars_are_read_again(tmp_path: Path, walked: list[str]) -> None:
    """Added at the end, added in the middle, changed, and gone: what is written is what a fresh start writes."""
    root = tars_of(tmp_path / "data")
    prepared(root)
    for change, expected in (
        (lambda: write_texts(root, {"c/last.tar": ["new-0", "new-1"]}), ["c/last.tar"]),
        (lambda: write_texts(root, {"a/middle.tar": ["mid-0"]}), ["a/middle.tar"]),
        (lambda: write_texts(root, {"b/s_3.tar": ["changed-0", "changed-1"]}), ["b/s_3.tar"]),
        (lambda: (root / "b/s_5.tar").unlink(), []),
        (lambda: (root / "b/s_7.tar.idx").unlink(), ["b/s_7.tar"]),
        (lambda: None, []),
    ):
        change()
        walked.clear()
        again = prepared(root)
        assert walked == expected
        (root / ".nv-meta/tars.json").unlink()
        walked.clear()
        assert prepared(root) == again
        assert len(walked) == len(list(root.rglob("*.tar")))


def test_an_index_of_another_length_is_made_again(tmp_path: Path, walked: list[str]) -> None:
    root = tars_of(tmp_path / "data")
    whole = prepared(root)
    (root / "a/s_2.tar.idx").write_bytes(b"12345678")
    walked.clear()
    assert prepared(root) == whole
    assert walked == ["a/s_2.tar"]


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"versions": 3, "part_names": []}', b"\xff"])
def test_a_damaged_list_of_tars_is_not_believed(tmp_path: Path, walked: list[str], damage: bytes) -> None:
    root = tars_of(tmp_path / "data")
    whole = prepared(root)
    (root / ".nv-meta/tars.json").write_bytes(damage)
    walked.clear()
    assert prepared(root) == whole
    assert len(walked) == 10


def test_a_stopped_preparation_goes_on(tmp_path: Path, walked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "_MANY", 5)
    root = tars_of(tmp_path / "data")
    expected = prepared(tars_of(tmp_path / "other"))

    def stop(done: int, _total: int) -> None:
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared(root, progress=stop)
    assert not (root / ".nv-meta").exists()
    walked.clear()
    assert prepared(root) == expected
    assert len(walked) == 4
    assert not list(root.rglob("*.rec"))


# --- tasks --------------------------------------------------------------------------------------------------------


def test_tasks_share_the_tars_out(tmp_path: Path, walked: list[str]) -> None:
    root, expected = tars_of(tmp_path / "data"), prepared(tars_of(tmp_path / "other"))
    flags = ["--split-ratio", "8,1,1", "--sample-type", "TextSample", "--field-map", '{"text": "txt"}']
    for number in (2, 0):
        output_of("prepare", root, "--task", f"{number}/3", "--num-workers", 1)
    assert not (root / ".nv-meta").exists()
    output = refusal_of("prepare", root, "--finish", *flags, "--num-workers", 1)
    assert "3 of 10 tars were not scanned by any task" in output
    assert "the first is a/s_2.tar" in output
    energon("prepare", root, "--task", "1/3", "--num-workers", 1)
    os.utime(root / "b/s_9.tar")
    assert "1 of 10 tars were not scanned by any task, or changed since; the first is b/s_9.tar" in energon(
        "prepare", root, "--finish", *flags
    ).output.replace("\n", " ")
    energon("prepare", root, "--task", "0/3", "--num-workers", 1)
    energon("prepare", root, "--task", "2/3", "--num-workers", 1)
    energon("prepare", root, "--task", "1/3", "--num-workers", 1)
    walked.clear()
    output_of("prepare", root, "--finish", *flags, "--num-workers", 1)
    assert not walked
    found = {name: data for name, data in content(root).items() if name not in CHANGING}
    found[".nv-meta/index.sqlite"] = rows_of(root)  # type: ignore[assignment]
    assert found == expected


def test_a_task_names_a_damaged_tar(tmp_path: Path) -> None:
    root = tars_of(tmp_path / "data")
    (root / "a/s_4.tar").write_bytes(b"x" * 2000)
    with pytest.raises(CorruptShardError, match=r"s_4\.tar"):
        preparing.scan_task(root, Task(2, 5))
    seen: list[tuple[int, int]] = []
    assert preparing.scan_task(root, Task(0, 5), progress=lambda *done: seen.append(done)) == 2
    assert seen == [(1, 2), (2, 2)]


def test_tasks_convert_what_one_process_converts(tmp_path: Path) -> None:
    source, flags, _ = llava(tmp_path / "in", 23)
    flags = [*flags, "--samples-per-shard", 3, "--shuffle", 5, "--num-workers", 1]
    whole = content(converted(source, tmp_path / "whole", *flags))
    out = tmp_path / "out"
    for task in ("1/3", "0/3", "1/3"):
        assert f"Task {task}: 3 shards done" in output_of("convert", source, out, *flags, "--task", task)
    assert f"{out}: 2 of 8 shards are missing" in refusal_of("convert", source, out, *flags, "--finish")
    assert not (out / ".nv-meta").exists()
    # Nothing is finished: other options may begin anew.
    output_of("convert", source, out, *flags, "--task", "2/3", "--no-media-metadata")
    missing = refusal_of("convert", source, out, *flags, "--finish").replace("\n", " ")
    assert "2 of 8 shards are missing, or were made from another source" in missing
    energon("convert", source, out, *flags, "--task", "2/3")
    output_of("convert", source, out, *flags, "--finish")
    assert content(out) == whole


@pytest.mark.parametrize("text", ["3", "3/3", "-1/3", "a/b", "0/0", "1/"])
def test_tasks_that_are_none(text: str) -> None:
    with pytest.raises(ConfigurationError, match="task"):
        chosen_task(text, finish=False)


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    root = tars_of(tmp_path / "data", 3)
    for flags, message in (
        (["--task", "0/2", "--finish"], "--task and --finish exclude each other"),
        (["--task", "0/2", "--split-ratio", "1,0,0"], "--task only scans tars"),
        (["--address", "auto"], "add --engine ray"),
        (["--tar-index-only", "--finish"], "leave out --finish"),
    ):
        assert message in refusal_of("prepare", root, *flags).replace("\n", " ")
    output = refusal_of("convert", root, tmp_path / "out", "--task", "0/2", "--overwrite")
    assert "--overwrite cannot be used with --task" in output.replace("\n", " ")


# --- a cluster ----------------------------------------------------------------------------------------------------


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    output = refusal_of("prepare", tars_of(tmp_path / "data", 2), "--engine", "ray", "--split-ratio", "1,0,0")
    assert "pip install 'energon-bridge[ray]'" in output


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Return a Ray cluster of two nodes on this machine."""
    patient = {"health_check_timeout_ms": 600_000, "health_check_failure_threshold": 100}  # on a busy machine
    with ray_cluster(1, 1, **patient) as nodes:
        import ray

        environment = {"env_vars": {"PYTHONPATH": f"{REPOSITORY}:{HELPERS}"}}
        ray.init(address=nodes.address, log_to_driver=False, runtime_env=environment)
        yield nodes
        ray.shutdown()


@pytest.mark.filterwarnings("ignore")  # Ray's own
@pytest.mark.usefixtures("cluster")
def test_a_cluster_makes_the_same_bytes(tmp_path: Path) -> None:
    source, flags, _ = llava(tmp_path / "in", 23)
    flags = [*flags, "--samples-per-shard", 3]
    whole = content(converted(source, tmp_path / "whole", *flags))
    assert content(converted(source, tmp_path / "out", *flags, "--engine", "ray")) == whole
    root, expected = tars_of(tmp_path / "data"), prepared(tars_of(tmp_path / "other"))
    output_of("prepare", root, "--engine", "ray", "--split-ratio", "8,1,1", "--skip-dataset-yaml")
    assert rows_of(root) == expected[".nv-meta/index.sqlite"]
    output_of("lint", tmp_path / "out", "--engine", "ray")
    for name, engine in (("whole", "processes"), ("out", "ray")):
        output_of("columns", "add", tmp_path / name, "--hash", "--engine", engine)
    columns = ".nv-meta/columns"
    assert content(tmp_path / "out" / columns) == content(tmp_path / "whole" / columns)
    (tmp_path / "data/a/s_4.tar").write_bytes(b"x" * 2000)
    assert "s_4.tar" in refusal_of("prepare", root, "--engine", "ray", "--tar-index-only")


def square(folder: Path, number: int) -> int:
    """Return the square of a number, from a process that is killed at the first try."""
    tried = folder / str(number)
    if not tried.exists():
        tried.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 7:
        raise CorruptShardError("seven")
    return number * number


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("cluster")
def test_a_process_that_is_killed_changes_nothing(tmp_path: Path) -> None:
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # its processes do not find this module
    engine = RayShardEngine()
    assert list(engine.map_shards(partial(square, tmp_path), range(6))) == [0, 1, 4, 9, 16, 25]
    with pytest.raises(CorruptShardError, match="seven"):
        list(engine.map_shards(partial(square, tmp_path), range(6, 9)))


# All commands are shared out in the same way: one of them in the gate, where each start imports Ray.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("command", WORK if LONG else ["prepare"])
def test_killed_at_random_moments(command: str, tmp_path: Path, cluster: Any) -> None:
    check_kills(command, "ray", tmp_path, KILLS if LONG else 1, cluster.address)
