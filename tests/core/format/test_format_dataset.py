"""Opening datasets: strictness, excludes, indexes, fingerprints, code, and one named error for each defect."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from tar_builder import write_texts

from energon_bridge.core.errors import (
    CorruptShardError,
    DatasetNotFoundError,
    EmptyDatasetError,
    FieldMapError,
    MetadataError,
    NotPreparedError,
    ShardMissingError,
    UnknownSplitError,
    UntrustedCodeError,
)
from energon_bridge.core.format.dataset import open_dataset, read_index
from energon_bridge.core.prepare import parse_ratio, prepare_dataset
from energon_bridge.core.samples import CaptioningSample, CrudeSample, TextSample
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Return a prepared dataset of two shards with three and two samples, all in train."""
    root = write_texts(tmp_path / "data", {"s/x_0.tar": ["a", "b", "c"], "s/x_1.tar": ["d", "e"]})
    prepare_dataset(root, split=parse_ratio("1,0,0"), dataset_yaml=render_dataset_yaml("TextSample", {"text": "txt"}))
    return root


def meta(dataset: Path, name: str, content: str) -> None:
    (dataset / ".nv-meta" / name).write_text(content)


# --- opening a dataset --------------------------------------------------------------------------------------------


def test_opening_reads_no_tar_no_index_and_no_sqlite(dataset: Path):
    sizes = [(dataset / f"s/x_{number}.tar").stat().st_size for number in range(2)]
    for number in range(2):
        (dataset / f"s/x_{number}.tar").write_bytes(bytes(sizes[number]))
        (dataset / f"s/x_{number}.tar.idx").unlink()
    (dataset / ".nv-meta/index.sqlite").unlink()
    opened = open_dataset(dataset, split_part="train")
    assert opened.path == str(dataset)
    assert opened.shard_names == ("s/x_0.tar", "s/x_1.tar")
    assert opened.shard_counts.tolist() == [3, 2]
    assert opened.shard_counts.dtype == opened.shard_sizes.dtype == np.int64
    assert opened.shard_sizes.tolist() == sizes
    assert (opened.num_samples, opened.sample_type, opened.excluded) == (5, TextSample, frozenset())
    assert opened.part_filter == frozenset({"txt"})
    assert pickle.loads(pickle.dumps(opened)).fingerprint == opened.fingerprint


def test_legacy_files_open(dataset: Path):
    info = json.loads((dataset / ".nv-meta/.info.json").read_text())
    (dataset / ".nv-meta/.info.json").unlink()
    meta(dataset, ".info.yaml", "shard_counts:\n" + "".join(f"  {k}: {v}\n" for k, v in info["shard_counts"].items()))
    (dataset / ".nv-meta/split.yaml").unlink()
    meta(dataset, "split.json", json.dumps({"split_parts": {"train": ["s/x_{0..1}.tar"]}}))
    meta(
        dataset,
        "dataset.yaml",
        "__module__: megatron.energon\n__class__: CaptioningWebdataset\nfield_map: {image: jpg, caption: txt}\n",
    )
    opened = open_dataset(dataset, split_part="train")
    assert opened.shard_counts.tolist() == [3, 2]
    assert opened.sample_type is CaptioningSample


def test_other_file_names_and_any_split_name(dataset: Path):
    meta(dataset, "mine.yaml", "split_parts: {my part: [s/x_1.tar], later: }\n")
    meta(
        dataset,
        "crude.yaml",
        "__module__: megatron.energon\n__class__: CrudeWebdataset\nsubflavors: {source: &s web, again: *s}\n",
    )
    opened = open_dataset(dataset, split_part="my part", split_config="mine.yaml", dataset_config="crude.yaml")
    assert (opened.num_samples, opened.sample_type) == (2, CrudeSample)
    assert (opened.field_map, opened.part_filter) == (None, None)
    assert opened.subflavors == {"source": "web", "again": "web"}
    with pytest.raises(EmptyDatasetError, match="'later'"):
        open_dataset(dataset, split_part="later", split_config="mine.yaml")


def test_excludes_remove_shards_and_name_samples(dataset: Path):
    meta(
        dataset,
        "split.yaml",
        "split_parts: {train: ['s/x_{0..1}.tar'], other: [s/x_0.tar]}\n"
        "exclude: [s/x_1.tar, 's/x_0.tar/{a,c}', gone.tar/k]\n",
    )
    opened = open_dataset(dataset, split_part="train")
    assert opened.shard_names == ("s/x_0.tar",)
    assert opened.excluded == {("s/x_0.tar", "a"), ("s/x_0.tar", "c")}
    assert opened.num_samples == 3  # excluded samples keep their places


TEXT = "sample_type: {__module__: megatron.energon, __class__: TextSample}\n"
CRUDE = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
DEFECTS = {
    "missing folder": (None, None, DatasetNotFoundError, "nowhere: no such folder"),
    "file": (None, None, DatasetNotFoundError, "is a file, not a folder. Give one that `energon prep"),
    "not prepared": (".info.json", None, NotPreparedError, "energon prepare"),
    "no split file": ("split.yaml", None, MetadataError, r"split\.yaml: no such split file"),
    "no dataset.yaml": ("dataset.yaml", None, MetadataError, r"dataset\.yaml: no such file"),
    "empty info": (".info.json", "", MetadataError, r"\.info\.json: cannot be parsed"),
    "info list": (".info.json", "[]", MetadataError, r"\.info\.json: expected a mapping, found \[\]"),
    "info key": (".info.json", '{"shard_count": {}}', MetadataError, r"`shard_count`.*Did you mean 'shard_counts'"),
    "info without counts": (".info.json", "{}", MetadataError, "`shard_counts` is missing"),
    "info count": (".info.json", '{"shard_counts": {"x.tar": "3"}}', MetadataError, r"`shard_counts\.x\.tar`.*'3'"),
    "info huge count": (
        ".info.json",
        '{"shard_counts": {"x.tar": ' + "1" * 400 + "}}",
        MetadataError,
        r"`shard_counts\.x\.tar`: expected a number of samples, found 1{77}\.\.\.",
    ),
    "info version": (".info.json", '{"shard_counts": {}, "energon_version": 7}', MetadataError, "`energon_version`"),
    "empty split file": ("split.yaml", "", MetadataError, r"split\.yaml: the file is empty"),
    "split key": ("split.yaml", "split_part: {}", MetadataError, "Did you mean 'split_parts'"),
    "split type": ("split.yaml", "split_parts: [a]", MetadataError, "field `split_parts`: expected a mapping"),
    "split entry": ("split.yaml", "split_parts: {train: [1]}", MetadataError, r"field `split_parts\.train\[0\]`"),
    "split braces": ("split.yaml", "split_parts: {train: ['x{']}", MetadataError, r"`split_parts\.train`: unmatched"),
    "split outside": ("split.yaml", "split_parts: {train: [../x.tar]}", MetadataError, "outside of the dataset"),
    "unknown part": ("split.yaml", "split_parts: {val: []}", UnknownSplitError, "'train'.*Known split parts: val"),
    "empty part": ("split.yaml", "split_parts: {train: }", EmptyDatasetError, "'train'.*no samples"),
    "shard not counted": (
        "split.yaml",
        "split_parts: {train: [z.tar]}",
        MetadataError,
        r"'z\.tar' is not in .*\.info\.json.*--non-interactive --split-ratio 8,1,1 --force-overwrite",
    ),
    "shard misspelt": ("split.yaml", "split_parts: {train: [s/y_0.tar]}", MetadataError, r"Did you mean 's/x_0\.tar'"),
    "empty dataset.yaml": ("dataset.yaml", "", MetadataError, r"dataset\.yaml: the file is empty"),
    "no class": ("dataset.yaml", "field_map: {text: txt}", MetadataError, "`sample_type` is missing"),
    "empty field map": (
        "dataset.yaml",
        TEXT + "field_map:\n",
        FieldMapError,
        "exactly one of `field_map` and `sample_loader`, found neither",
    ),
    "unknown class": (
        "dataset.yaml",
        "sample_type: {__module__: megatron.energon, __class__: TextSampel}\nfield_map: {text: txt}\n",
        MetadataError,
        r"field `sample_type\.__class__`: unknown sample type 'TextSampel'; known are .*TextSample",
    ),
    "unknown field": (
        "dataset.yaml",
        TEXT + "field_map: {text: txt, txet: txt}\n",
        FieldMapError,
        r"dataset\.yaml, field_map, field `txet`: TextSample has no such field.*Did you mean 'text'",
    ),
    "missing required field": (
        "dataset.yaml",
        "sample_type: {__module__: megatron.energon, __class__: CaptioningSample}\nfield_map: {image: jpg}\n",
        FieldMapError,
        r"dataset\.yaml, field_map: CaptioningSample requires the field `caption`",
    ),
    "access": (
        "dataset.yaml",
        TEXT + "field_map: {text: 'json[a'}\n",
        FieldMapError,
        r"field `text`: cannot read the access 'json\[a'",
    ),
    "access type": ("dataset.yaml", TEXT + "field_map: {text: 3}\n", FieldMapError, "field `text`: expected an access"),
    "subflavors": (
        "dataset.yaml",
        CRUDE + "subflavors: web\n",
        MetadataError,
        "field `subflavors`: expected a mapping, found 'web'",
    ),
    "unknown key": (
        "dataset.yaml",
        CRUDE + "subflavor: web\n",
        MetadataError,
        "unknown key `subflavor`.*Did you mean 'subflavors'",
    ),
    "foreign class": (
        "dataset.yaml",
        "sample_type: {__module__: os, __class__: TextSample}\nfield_map: {text: txt}\n",
        UntrustedCodeError,
        "os.TextSample.*trust_remote_code=True",
    ),
    "misspelt module": (
        "dataset.yaml",
        "sample_type: {__module__: energon_brigde, __class__: TextSample}\nfield_map: {text: txt}\n",
        UntrustedCodeError,
        r"energon_brigde.TextSample, named in .*\. Did you mean 'energon_bridge'\? If you trust it",
    ),
    "crude with a field map": (
        "dataset.yaml",
        CRUDE + "field_map: {text: txt}\n",
        FieldMapError,
        "field `field_map`: a crude dataset has none",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_every_defect_has_its_error_with_file_and_field(dataset: Path, defect: str):
    name, content, error, message = DEFECTS[defect]
    path = dataset
    if defect == "missing folder":
        path = dataset / "nowhere"
    elif defect == "file":
        path = dataset / "s/x_0.tar"
    elif content is None:
        (dataset / ".nv-meta" / str(name)).unlink()
    else:
        meta(dataset, str(name), content)
    with pytest.raises(error, match=message) as caught:
        open_dataset(path, split_part="train")
    assert type(caught.value) is error
    assert str(path) in str(caught.value)


def test_a_shard_that_is_gone_is_named(dataset: Path):
    (dataset / "s/x_1.tar").unlink()
    with pytest.raises(ShardMissingError, match=r"x_1\.tar: no such shard, but .*split\.yaml lists it in 'train'"):
        open_dataset(dataset, split_part="train")


# --- the index ----------------------------------------------------------------------------------------------------


def test_the_index_is_read_and_checked(dataset: Path):
    opened = open_dataset(dataset, split_part="train")
    offsets = read_index(opened, 0)
    assert offsets.dtype == np.uint64
    assert offsets.tolist() == [0, 1024, 2048, 3072]


@pytest.mark.parametrize(
    ("offsets", "error", "message"),
    [
        (None, ShardMissingError, "index of shard 's/x_0.tar' is missing"),
        ([0, 1024, 3072], CorruptShardError, "24 bytes, expected 32 for the 3 samples"),
        ([0, 1024, 1024, 3072], CorruptShardError, "sample 1 starts at byte 1024 and ends at 1024"),
        ([0, 2048, 1024, 3072], CorruptShardError, "sample 1 starts at byte 2048"),
        ([0, 1024, 2048, 20000], CorruptShardError, "ends at byte 20000, but .* has 10240 bytes"),
        ([0, 1024, 2048, 2**63 + 5], CorruptShardError, "has 10240 bytes"),
    ],
)
def test_an_index_that_does_not_fit_is_named_with_the_remedy(dataset: Path, offsets, error, message):
    path = dataset / "s/x_0.tar.idx"
    path.unlink() if offsets is None else path.write_bytes(np.asarray(offsets, dtype="<u8").tobytes())
    with pytest.raises(error, match=message) as caught:
        read_index(open_dataset(dataset, split_part="train"), 0)
    assert "energon prepare --tar-index-only" in str(caught.value)
    assert str(path) in str(caught.value)


# --- the fingerprint ----------------------------------------------------------------------------------------------


def test_the_fingerprint_follows_the_content_and_not_the_place(dataset: Path, tmp_path: Path):
    before = open_dataset(dataset, split_part="train").fingerprint
    moved = dataset.rename(tmp_path / "moved")
    meta(
        moved,
        "dataset.yaml",
        "# a remark\nfield_map:\n  text: 'txt'\nsample_type: {__class__: TextSample, __module__: megatron.energon}\n",
    )
    (moved / "s/x_0.tar.idx").unlink()
    assert open_dataset(moved, split_part="train").fingerprint == before


@pytest.mark.parametrize("change", ["order", "exclude", "size", "count", "field", "subset", "name"])
def test_the_fingerprint_changes_with(dataset: Path, change: str):
    before = open_dataset(dataset, split_part="train").fingerprint
    split = "split_parts: {train: ['s/x_0.tar', 's/x_1.tar']}\n"
    if change == "order":
        meta(dataset, "split.yaml", "split_parts: {train: ['s/x_1.tar', 's/x_0.tar']}\n")
    elif change == "exclude":
        meta(dataset, "split.yaml", split + "exclude: [s/x_1.tar/d]\n")
    elif change == "subset":
        meta(dataset, "split.yaml", "split_parts: {train: ['s/x_0.tar']}\n")
    elif change == "size":
        with (dataset / "s/x_1.tar").open("ab") as file:
            file.write(bytes(512))
    elif change == "field":
        meta(dataset, "dataset.yaml", (dataset / ".nv-meta/dataset.yaml").read_text().replace("txt", "txt,md"))
    else:
        info = (dataset / ".nv-meta/.info.json").read_text()
        if change == "count":
            info = info.replace(": 2", ": 1")
        else:
            (dataset / "s/x_1.tar").rename(dataset / "s/y_1.tar")
            info = info.replace("x_1", "y_1")
            meta(dataset, "split.yaml", split.replace("x_1", "y_1"))
        meta(dataset, ".info.json", info)
    assert open_dataset(dataset, split_part="train").fingerprint != before


def test_an_exclude_of_another_part_does_not_change_the_fingerprint(dataset: Path):
    before = open_dataset(dataset, split_part="train").fingerprint
    meta(dataset, "split.yaml", "split_parts: {train: ['s/x_{0..1}.tar'], val: []}\nexclude: [other.tar/d]\n")
    assert open_dataset(dataset, split_part="train").fingerprint == before


# --- code that comes with a dataset -------------------------------------------------------------------------------

LOADER = """
def sample_loader(raw):
    return {"text": raw["txt"].upper(), "__key__": "my " + raw["__key__"]}

def part_filter(part):
    return part == "txt"
"""


@pytest.fixture
def with_code(dataset: Path) -> Path:
    """Return the dataset with a sample loader instead of a field map."""
    meta(dataset, "loader.py", LOADER)
    meta(
        dataset,
        "dataset.yaml",
        "sample_type: {__module__: megatron.energon, __class__: TextSample}\n"
        "sample_loader: loader.py:sample_loader\npart_filter: loader.py:part_filter\n",
    )
    return dataset


def test_code_of_a_dataset_runs_only_if_trusted(with_code: Path):
    with pytest.raises(UntrustedCodeError, match=r"sample_loader in .*loader\.py.*trust_remote_code=True"):
        open_dataset(with_code, split_part="train")
    opened = open_dataset(with_code, split_part="train", trust_remote_code=True)
    copy = pickle.loads(pickle.dumps(opened))
    for one in (opened, copy):
        assert one.sample_loader is not None
        assert one.sample_loader({"txt": "a", "__key__": "k"}) == {"text": "A", "__key__": "my k"}
        assert callable(one.part_filter)
        assert (one.part_filter("txt"), one.part_filter("jpg")) == (True, False)
        assert one.field_map is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("sample_loader: gone.py", r"gone\.py: no such file"),
        ("sample_loader: loader.py:nothing", "cannot load the function `nothing`"),
        ("sample_loader: loader.py\npart_filter: [1]", r"field `part_filter\[0\]`"),
        ("sample_loader: loader.py\nfield_map: {text: txt}", "found both"),
        ("sample_loader: [loader.py]", "field `sample_loader`: expected a string"),
    ],
)
def test_broken_references_to_code_are_named(with_code: Path, config: str, message: str):
    meta(with_code, "dataset.yaml", f"sample_type: {{__module__: megatron.energon, __class__: TextSample}}\n{config}\n")
    with pytest.raises(MetadataError, match=message):
        open_dataset(with_code, split_part="train", trust_remote_code=True)


def test_a_part_filter_may_be_a_list(with_code: Path):
    meta(
        with_code,
        "dataset.yaml",
        "sample_type: {__module__: megatron.energon, __class__: TextSample}\n"
        "sample_loader: loader.py\npart_filter: [txt, json]\n",
    )
    assert open_dataset(with_code, split_part="train", trust_remote_code=True).part_filter == {"txt", "json"}
