"""JSONL files: samples, index, order and resume, and what is refused."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from click.testing import CliRunner
from engine import config_of, deliver, loaders_of
from hypothesis import given, strategies as st
from rival_fixtures import EXPECTED, validation

from energon_bridge import CrudeSample, DefaultTaskEncoder, TextSample, get_loader, get_train_dataset, get_val_dataset
from energon_bridge.core.errors import (
    CorruptShardError,
    DatasetMismatchError,
    EmptyDatasetError,
    NotPreparedError,
    StorageError,
)
from energon_bridge.core.format import jsonl
from energon_bridge.core.format.jsonl import index_jsonl, open_jsonl
from energon_bridge.core.storage import LocalStore
from energon_bridge.tools.cli.main import main
from energon_bridge.tools.cli.output import format_bytes


def write_lines(path: Path, count: int) -> Path:
    path.write_text("".join(f'{{"text": "line {number}"}}\n' for number in range(count)))
    return path


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "lines.jsonl", 40)


def read(source: Any, **kwargs: Any) -> list[Any]:
    dataset = get_val_dataset(source, batch_size=None, worker_config=config_of(1, 0, num_lanes=None), **kwargs)
    with closing(get_loader(dataset)) as loader:
        return list(loader)


def run(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(main, [*map(str, arguments)])
    return result.exit_code, result.output


# Samples -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_are_those_of_megatron_energon(fixtures: Path, num_workers: int) -> None:
    """But for `__subflavors__`, which it leaves at None, so that a cooker that asks for some fails."""
    expected = [sample | {"__subflavors__": {}} for sample in EXPECTED["lines.jsonl:train"]]
    assert validation(fixtures / "lines.jsonl", "train", num_workers) == expected


def test_a_sample_has_the_names_of_crude_samples(lines: Path) -> None:
    sample = read(lines)[3]
    assert isinstance(sample, CrudeSample)
    assert sample["__shard__"] == "lines.jsonl"
    assert sample["__sources__"] == ((str(lines), 3, "lines.jsonl", ("3.json",)),)
    assert (sample["__key__"], sample["json"]) == ("3", {"text": "line 3"})


@pytest.mark.parametrize("split_part", ["train", "val", "anything"])
def test_every_split_part_is_all_of_it(lines: Path, split_part: str) -> None:
    assert [sample["__key__"] for sample in read(lines, split_part=split_part)] == [str(key) for key in range(40)]


def test_a_reference_gives_subset_and_subflavors(lines: Path) -> None:
    item = {"path": str(lines), "subset": {"range": ["25%", "50%"]}, "subflavors": {"of": "lines"}}
    found = read({"__class__": "MetadatasetV2", "splits": {"val": item}})
    assert [sample["__key__"] for sample in found] == [str(key) for key in range(10, 20)]
    assert found[0]["__subflavors__"] == {"of": "lines"}


def test_a_file_behind_a_url(lines: Path) -> None:
    files = fsspec.filesystem("memory")
    try:
        files.pipe_file("/jsonl/lines.jsonl", lines.read_bytes())
        assert [sample["json"] for sample in read("memory://jsonl/lines.jsonl")] == [s["json"] for s in read(lines)]
        assert files.cat_file("/jsonl/lines.jsonl.idx") == lines.with_suffix(".jsonl.idx").read_bytes()
    finally:
        files.rm("/jsonl", recursive=True)


def test_a_line_that_is_no_json_is_skipped_and_named(lines: Path, caplog: pytest.LogCaptureFixture) -> None:
    index_jsonl(lines)
    lines.write_bytes(lines.read_bytes().replace(b'"line 7"', b'"line 7}'))
    dataset = get_val_dataset(lines, batch_size=40, worker_config=config_of(1, 0, num_lanes=None))
    with closing(get_loader(dataset)) as loader:
        (batch,) = loader
    assert batch["__key__"] == [str(key) for key in range(40) if key != 7]
    assert f"{lines}: shard lines.jsonl, sample 7, key '7' (parts json): DecodeError: not valid JSON" in caplog.text


# The index -----------------------------------------------------------------------------------------------------------


def test_the_index_is_that_of_megatron_energon(fixtures: Path) -> None:
    path = fixtures / "lines.jsonl.idx"
    written = path.read_bytes()
    path.unlink()
    assert run("prepare", fixtures / "lines.jsonl") == (
        0,
        f"Found {len(written) // 8 - 1} samples.\nDone: wrote {path}.\n",
    )
    assert path.read_bytes() == written


blank = st.sampled_from(["\n", "  \n", "\r\n", "\t \n"])
documents = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=30), max_size=3)


@given(
    before=st.lists(blank, max_size=2),
    samples=st.lists(st.tuples(documents, st.sampled_from(["\n", " \r\n"]), st.lists(blank, max_size=2)), min_size=1),
    ends=st.booleans(),
    chunk=st.sampled_from([1, 7, 64, 1 << 20]),
)
def test_every_object_is_a_sample_wherever_reads_and_blank_lines_cut(
    tmp_path_factory: pytest.TempPathFactory,
    before: list[str],
    samples: list[tuple[dict[str, Any], str, list[str]]],
    ends: bool,
    chunk: int,
) -> None:
    path = tmp_path_factory.mktemp("any") / "any.jsonl"
    text = "".join([*before, *("".join([json.dumps(value), end, *after]) for value, end, after in samples)])
    path.write_bytes((text if ends else text.rstrip()).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_CHUNK_BYTES", chunk)
        assert index_jsonl(path) == len(samples)
    offsets = np.fromfile(path.with_suffix(".jsonl.idx"), dtype="<u8").tolist()
    data = path.read_bytes()
    assert (offsets[0], offsets[-1]) == (0, len(data))
    cuts = itertools.pairwise(offsets)
    assert [json.loads(data[low:high]) for low, high in cuts] == [value for value, _, _ in samples]


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("", EmptyDatasetError, "the file has no samples"),
        ("\n \n", EmptyDatasetError, "the file has no samples"),
        ('{"a": 1}\n\n[1, 2]\n', CorruptShardError, r"line 3 is not a JSON object: '\[1, 2\]'"),
        ('{"a":\n1}\n', CorruptShardError, "line 1 is not a JSON object"),
    ],
)
def test_files_that_are_no_jsonl_are_refused_by_name(
    tmp_path: Path, content: str, error: type[Exception], message: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(error, match=message):
        read(path)
    assert os.listdir(tmp_path) == ["x.jsonl"]


CHANGES: dict[str, Callable[[Path], object]] = {
    "longer": lambda path: path.write_bytes(path.read_bytes() + b'{"text": "more"}\n'),
    "shorter": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "half an index": lambda path: index(path).write_bytes(index(path).read_bytes()[:100]),
    "an empty index": lambda path: index(path).write_bytes(b""),
}


def index(path: Path) -> Path:
    return path.with_suffix(".jsonl.idx")


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changed_is_refused_until_it_is_indexed_again(lines: Path, change: str) -> None:
    index_jsonl(lines)
    CHANGES[change](lines)
    with pytest.raises(CorruptShardError, match=r"lines\.jsonl: has .*energon prepare .*lines\.jsonl"):
        read(lines)
    assert run("prepare", lines)[0] == 0
    assert len(read(lines)) == len(lines.read_text().splitlines())


def test_an_index_out_of_order_is_refused_with_its_remedy(lines: Path) -> None:
    index_jsonl(lines)
    offsets = np.fromfile(index(lines), dtype="<u8")
    offsets[[3, 4]] = offsets[[4, 3]]
    offsets.tofile(index(lines))
    with pytest.raises(CorruptShardError, match=r"sample 3 starts at.*Rebuild it with `energon prepare .*lines"):
        read(lines)


def test_without_a_place_for_the_index_the_remedy_is_named(lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: LocalStore, rel: str, data: bytes) -> None:
        raise StorageError(f"{rel}: read-only")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "write", refuse)
        with pytest.raises(NotPreparedError, match=r"no index, and cannot write one beside it.*energon prepare"):
            open_jsonl(lines)
        code, output = run("prepare", lines)
    assert code == 1
    (target,) = re.findall(r"`ln -s (\S+) FOLDER`", output)
    (lines.parent / "elsewhere").mkdir()
    (linked := lines.parent / "elsewhere" / lines.name).symlink_to(target)
    assert [sample["json"] for sample in read(linked)] == [json.loads(line) for line in lines.read_text().splitlines()]
    assert not index(lines).exists()


# Commands ------------------------------------------------------------------------------------------------------------


def test_lint_and_info(lines: Path) -> None:
    assert run("lint", lines, "--no-progress") == (0, "All 40 samples load.\n")
    code, output = run("info", lines)
    assert code == 0
    size, unit = format_bytes(lines.stat().st_size).split()
    words = [line.split() for line in output.splitlines()[1:]]
    assert words == [["holds:", "40", "samples", "in", "1", "shard,", size, unit], ["sample", "type:", "CrudeSample"]]
    lines.write_bytes(lines.read_bytes().replace(b'"line 7"', b'"line 7}'))
    code, output = run("lint", lines, "--no-progress")
    assert code == 1
    assert f"{lines}: shard 'lines.jsonl', key '7', part 'json': DecodeError" in output


def test_prepare_takes_no_options_of_a_dataset(lines: Path) -> None:
    code, output = run("prepare", lines, "--split-ratio", "8,1,1")
    assert code == 1
    assert "is a JSONL file: these options are for the folder of a dataset" in output


# Order and resume ----------------------------------------------------------------------------------------------------


class Cooked(DefaultTaskEncoder):
    """Makes texts of lines."""

    def encode_sample(self, sample: Any) -> Any:
        if isinstance(sample, CrudeSample):
            return TextSample.derive_from(sample, text=sample["json"]["text"])
        return sample


def trained(source: Any, **kwargs: Any) -> Any:
    settings: dict[str, Any] = {"batch_size": 2, "shuffle_buffer_size": 7, "max_samples_per_sequence": 3}
    return get_train_dataset(source, worker_config=config_of(1, 0), task_encoder=Cooked(), **(settings | kwargs))


def test_a_state_does_not_go_on_with_more_lines(lines: Path) -> None:
    state = deliver(loaders_of(trained(lines), 1, 0), 3, save_at=[3]).states[3]
    index_jsonl(write_lines(lines, 41))
    with pytest.raises(DatasetMismatchError):
        loaders_of(trained(lines), 1, 0, state=state)
