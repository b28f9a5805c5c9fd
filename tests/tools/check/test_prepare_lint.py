"""Linting and summarizing prepared datasets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import output_of
from keyed import ALL_TRAIN, CRUDE, TEXT, write_mix
from tar_builder import tars_of, write_tar

from energon_bridge.core.errors import EmptyDatasetError, UnknownSplitError
from energon_bridge.core.prepare import parse_patterns, parse_ratio, prepare_dataset
from energon_bridge.tools.check.dataset_summary import summarize_dataset
from energon_bridge.tools.check.lint import lint_dataset, lint_parts
from energon_bridge.tools.columns.making import add_column
from energon_bridge.tools.testing import write_shard


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Return a folder with ten tars of three samples each, not prepared."""
    return tars_of(tmp_path / "data")


def problems_of(path: Path, **options: Any) -> tuple[int, list[str]]:
    num_workers = options.pop("num_workers", 1)
    datasets, _ = lint_parts(path, **options)
    reports = [report for dataset in datasets for report in lint_dataset(dataset, num_workers=num_workers)]
    return sum(report.num_checked for report in reports), [
        str(problem) for report in reports for problem in report.problems
    ]


def test_parts_that_no_field_takes_are_not_decoded(tmp_path: Path):
    write_shard(tmp_path / "s.tar", {"a": {"txt": b"a text", "json": b"{", "jpg": b"no picture"}})
    prepare_dataset(tmp_path, split=ALL_TRAIN, dataset_yaml=TEXT)
    assert problems_of(tmp_path) == (1, [])
    add_column(tmp_path, "length", lambda sample: len(sample.text))


def test_lint_finds_nothing_in_good_datasets(fixtures: Path):
    for name, count in [("captioning", 24), ("vqa", 12), ("captioning_extra", 24), ("crude", 7), ("aux_images", 7)]:
        assert problems_of(fixtures / name) == (count, [])


@pytest.fixture
def broken(fixtures: Path) -> Path:
    """Return the captioning fixture with a broken image, broken JSON, and JSON without the caption."""
    dataset = fixtures / "captioning"
    tar = dataset / "parts/shard_001.tar"
    data = bytearray(tar.read_bytes())
    data[512 + 300 : 512 + 800] = bytes(500)  # in the JPEG of 00006
    data[512:520] = b"no image"
    place = data.index(b'{"caption"', 3584)
    data[place] = ord("[")  # the JSON of 00007
    place = data.index(b'"caption"', 2 * 3584)
    data[place : place + 9] = b'"captien"'  # of 00008
    tar.write_bytes(data)
    return dataset


def test_lint_names_dataset_shard_key_and_part_and_goes_on(broken: Path):
    checked, problems = problems_of(broken, num_workers=2)
    assert checked == 24
    assert len(problems) == 3
    for problem, key, part in zip(problems, ["00006", "00007", "00008"], ["jpg", "json", None], strict=True):
        assert problem.startswith(f"{broken}, train: shard 'parts/shard_001.tar', key '{key}'")
        assert (f", part '{part}'" in problem) == (part is not None)
    assert "DecodeError" in problems[0]
    assert "field `caption`: nothing at 'json[caption]'" in problems[2]


def test_lint_leaves_excluded_samples_out(broken: Path):
    split = broken / ".nv-meta/split.yaml"
    split.write_text(split.read_text().replace("exclude: []", "exclude: ['parts/shard_001.tar/{00006,00007,00008}']"))
    assert problems_of(broken) == (21, [])


def test_lint_compares_index_and_info_and_goes_on(fixtures: Path):
    dataset = fixtures / "captioning"
    index = dataset / "parts/shard_000.tar.idx"
    index.write_bytes(index.read_bytes()[:-8])
    (dataset / "parts/shard_002.tar.idx").unlink()
    checked, problems = problems_of(dataset)
    assert checked == 12
    assert len(problems) == 2
    assert "shard 'parts/shard_000.tar': CorruptShardError" in problems[0]
    assert "shard 'parts/shard_002.tar': ShardMissingError" in problems[1]


def test_lint_sees_an_index_of_another_tar(fixtures: Path):
    dataset = fixtures / "captioning"
    write_tar(dataset / "parts/shard_000.tar", [("x.jpg", b"1" * 40_000)])
    checked, problems = problems_of(dataset, split_parts=("train",))
    assert checked == 12
    assert len([problem for problem in problems if "shard_000" in problem]) == 6


def test_lint_of_parts(tars: Path):
    prepare_dataset(tars, split=ALL_TRAIN, dataset_yaml=TEXT)
    datasets, empty = lint_parts(tars)
    assert ([dataset.split_part for dataset in datasets], empty) == (["train"], ["val", "test"])
    with pytest.raises(EmptyDatasetError, match=r"no samples in the split parts val"):
        lint_parts(tars, split_parts=("val",))
    with pytest.raises(UnknownSplitError, match=r"'valid'.*train, val, test"):
        lint_parts(tars, split_parts=("valid",))


def test_lint_runs_a_trusted_sample_loader(tars: Path):
    prepare_dataset(tars, split=ALL_TRAIN, dataset_yaml=TEXT)
    (tars / ".nv-meta/sample_loader.py").write_text(
        "def sample_loader(raw):\n"
        "    if raw['__key__'] == '3-1':\n"
        "        raise KeyError('x')\n"
        "    return {'text': raw['txt']}\n"
    )
    (tars / ".nv-meta/dataset.yaml").write_text(
        "sample_type: {__module__: megatron.energon, __class__: TextSample}\nsample_loader: sample_loader.py\n"
    )
    checked, problems = problems_of(tars, trust_remote_code=True)
    assert checked == 30
    assert len(problems) == 1
    assert "key '3-1': KeyError: 'x'" in problems[0]


def test_the_summary_counts_what_is_there(tars: Path):
    prepare_dataset(tars, split=parse_ratio("8,1,1"), key_index=False)
    (tars / "a/s_0.tar").unlink()
    summary = summarize_dataset(tars)
    assert (summary.num_samples, summary.num_shards, summary.num_bytes) == (30, 10, 9 * 10240)
    assert summary.missing_shards == ("a/s_0.tar",)
    assert [(part.name, part.num_samples) for part in summary.parts] == [("train", 24), ("val", 3), ("test", 3)]
    assert not summary.has_key_index
    assert summary.sample_type == "none (no dataset.yaml)"


def talks(folder: Path, **speakers: list[str]) -> Path:
    """Write a dataset with a tar for each split part, whose samples are of these speakers."""
    for part, names in speakers.items():
        said = [{"speaker": name, "id": n, "subject": "maths", "text": name} for n, name in enumerate(names)]
        folder.mkdir(exist_ok=True)
        samples = {f"{part}{n}": {"json": json.dumps(one).encode()} for n, one in enumerate(said)}
        write_shard(folder / f"{part}.tar", samples)
    prepare_dataset(folder, split=parse_patterns([f"{part}:{part}.tar" for part in speakers]), dataset_yaml=CRUDE)
    return folder


def test_speakers_of_several_splits_are_told(tmp_path: Path):
    """Of a dataset, and of a mix by its own splits; numbers of rows and kinds are equal anywhere, and say nothing."""
    one = talks(tmp_path / "one", train=["anna", "bert", "carl"], val=["carl", "bert"])
    talks(tmp_path / "other", train=["anna", "dora"])
    remedy = "To have none in both, convert all of it at once, with --split-ratio 9,1,0 --split-by speaker."
    assert f"2 values of speaker in train and in val, such as 'bert'. {remedy}" in output_of("lint", one)
    mix = tmp_path / "mix.yaml"
    for train, val, said in [
        ({"path": "one", "split_part": "train"}, {"path": "other", "split_part": "train"}, "1 value of speaker"),
        ({"path": "one", "split_part": "val"}, {"path": "other", "split_part": "train"}, ""),
    ]:
        write_mix(mix, train=train, val=val)
        told = output_of("lint", mix)
        assert f"{said} in train and in val, such as 'anna'. {remedy}" in told if said else "in val" not in told
        assert " of id " not in told
        assert " of subject " not in told
