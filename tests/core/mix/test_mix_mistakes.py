"""One named error for each mistake in a metadataset: it says the file, the place and what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from energon_bridge.core.errors import DatasetNotFoundError, MetadataError
from energon_bridge.core.mix import DatasetOpener, Mix, load_mix

HEADER = "__module__: megatron.energon\n__class__: MetadatasetV2\n"


def load(path: Path, text: str, header: str = HEADER) -> Mix:
    path.write_text(header + text)
    return load_mix(path, split_part="train")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file is empty"),
        ("# nothing\n", "the file is empty"),
        ("[1, 2]", "expected a mapping"),
        ("splits: [", "cannot be parsed"),
        ("splts: {}", "unknown key `splts`.*Did you mean 'splits'"),
        ("{}", "the key `splits` is missing"),
        ("splits:", "field `splits`: expected a mapping, found nothing"),
        ("splits: {train: }", "field `splits.train`: expected a mapping, found nothing"),
        ("splits: {train: [a]}", r"field `splits\.train`: expected a mapping"),
        ("splits: {train: {}}", r"field `splits\.train`: expected one of `path`, `join`.*none of them"),
        ("splits: {train: {path: a, blend: []}}", "found `path` and `blend`"),
        ("splits: {train: {bled: []}}", "unknown key `bled`.*Did you mean 'blend'"),
        ("splits: {train: {path: a, weight: 1}}", "unknown key `weight`"),
        ("splits: {train: {path: 3}}", r"field `splits\.train\.path`: expected a string, found 3 \(int\)"),
        ("splits: {train: {path: a, split_prt: b}}", "Did you mean 'split_part'"),
        ("splits: {train: {path: a, split_part: [b]}}", r"splits\.train\.split_part`: expected a string"),
        ("splits: {train: {path: a, subflavors: x}}", r"splits\.train\.subflavors`: expected a mapping"),
        ("splits: {train: {path: a, subflavor: x}}", "Did you mean 'subflavors'"),
        ("splits: {train: {path: a, shuffle_over_epochs_multiplier: 0}}", "whole number of epochs"),
        ("splits: {train: {path: a, shuffle_over_epochs_multiplier: 1.5}}", "whole number of epochs"),
        ("splits: {train: {path: a, subset: {range: [50%, 20%]}}}", r"splits\.train\.subset\.range`"),
        ("splits: {train: {path: a, aux: {cache: x}}}", "`cache` is reserved"),
        ("splits: {train: {path: a, aux: {x: m.yaml}}}", "expected the folder of a prepared dataset"),
        ("splits: {train: {path: a, aux: {x: {path: y, fs_path: z}}}}", "either `path` or `fs_path`"),
        ("splits: {train: {path: a, aux: {x: 1}}}", r"splits\.train\.aux\.x`: expected a string"),
        ("splits: {train: {path: a.jsonl, split_config: s.yaml}}", "a JSONL file has none"),
        ("splits: {train: {blend: []}}", r"splits\.train\.blend`: expected a list of at least one dataset"),
        ("splits: {train: {blend: {path: a}}}", "expected a list of at least one"),
        (
            "splits: {train: {blend: [{path: a}, {path: b}, {path: c, wieght: 2}]}}",
            r"blend\[2\]`.*Did you mean 'weight'",
        ),
        ("splits: {train: {blend: [{path: a, weight: x}]}}", r"blend\[0\]\.weight`: expected a number"),
        ("splits: {train: {blend: [{path: a, weight: -1}]}}", r"blend\[0\]\.weight`: a weight must not be negative"),
        ("splits: {train: {blend: [{path: a, weight: 0}]}}", "all weights are 0"),
        ("splits: {train: {blend: [{path: a, repetitions: 2}]}}", r"blend\[0\]`: unknown key `repetitions`"),
        ("splits: {train: {blend_epochized: [{path: a, weight: 2}]}}", r"epochized\[0\]`: unknown key `weight`"),
        ("splits: {train: {blend_epochized: [{path: a, repetitions: -2}]}}", r"\[0\]\.repetitions`: expected a number"),
        ("splits: {train: {blend_epochized: [{path: a, repetitions: 0}]}}", "all repetitions are 0"),
        ("splits: {train: {concat: [{path: a, weight: 2}]}}", r"concat\[0\]`: unknown key `weight`"),
        ("splits: {train: {blend: [{path: a}], subset: {range: [1, 2]}}}", "only allowed at a dataset or a join"),
        ("splits: {train: {join: [{path: a}]}}", "the key `joiner` is missing"),
        ("splits: {train: {join: [], joiner: {__module__: m, __class__: c}}}", "at least one dataset"),
        ("splits: {train: {join: {}, joiner: {__module__: m, __class__: c}}}", "at least one dataset"),
        ("splits: {train: {join: [{path: a}], joiner: m.f}}", r"splits\.train\.joiner`: expected a mapping"),
        ("splits: {train: {join: [{path: a}], joiner: {__module__: m}}}", "`__class__` is missing"),
        (
            "splits: {train: {join: [{path: a}], joiner: {__module__: m, __function__: f, __class__: c}}}",
            "unknown key `__class__`",
        ),
        (
            "splits: {train: {join: [{path: a, nonmatch: skip}], joiner: {__module__: m, __class__: c}}}",
            "can only be `error`",
        ),
        (
            "splits: {train: {join: {x: {path: a}, y: {path: b, nonmatch: no}}, "
            "joiner: {__module__: m, __class__: c}}}",
            r"join\.y\.nonmatch`: expected one of error, skip, none",
        ),
        (
            "splits: {train: {join: [{path: a.yaml}], joiner: {__module__: m, __class__: c}}}",
            "only prepared datasets can be joined",
        ),
        (
            "splits: {train: {join: [{path: a, filter: n > 1}], joiner: {__module__: m, __class__: c}}}",
            r"join\[0\]`: a join cannot be filtered: leave out `filter`",
        ),
        (
            "splits: {train: {join: [{path: a}], filter: n > 1, joiner: {__module__: m, __class__: c}}}",
            r"splits\.train`: a join cannot be filtered: leave out `filter`, and let the joiner raise SkipSample",
        ),
        ("splits: {train: {path: a}, val: {path: b, splitpart: c}}", r"field `splits\.val`: unknown key `splitpart`"),
    ],
)
def test_mistakes_name_file_and_place(tmp_path, text, words):
    with pytest.raises(MetadataError, match=words) as caught:
        load(tmp_path / "mix.yaml", text, header=HEADER if text and not text.startswith(("[", "{", "#")) else "")
    assert str(tmp_path / "mix.yaml") in str(caught.value)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("__class__: MetadatasetV3\n", "Did you mean 'MetadatasetV2'"),
        ("__class__: 3\n", "expected Metadataset or MetadatasetV2, found 3"),
        ("__module__: os\n__class__: MetadatasetV2\n", "field `__module__`.*megatron.energon"),
        ("", "syntax of version 2, but the file says version 1.*__class__: MetadatasetV2"),
    ],
)
def test_mistakes_in_the_version(tmp_path, header, words):
    with pytest.raises(MetadataError, match=words):
        load(tmp_path / "mix.yaml", "splits: {train: {path: a}}", header=header)


@pytest.mark.parametrize(
    "header", ["", "__class__: Metadataset\n", "__module__: energon_bridge\n__class__: Metadataset\n"]
)
@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("{path: a, subset: {range: [0%, 50%]}}", r"datasets\[0\]`: unknown key `subset`"),
        ("{weight: 1}", "the key `path` is missing"),
        ("{path: a, weight: x}", r"datasets\[0\]\.weight`"),
    ],
)
def test_mistakes_in_version_1(tmp_path, header, item, words):
    with pytest.raises(MetadataError, match=words):
        load(tmp_path / "mix.yaml", f"splits: {{train: {{datasets: [{item}]}}}}", header=header)


@pytest.mark.parametrize(
    "key", ["aux: {x: y}", "dataset_config: d.yaml", "split_config: s.yaml", "subset: {range: [1, 2]}"]
)
def test_what_a_reference_to_another_mix_cannot_say(tmp_path, key):
    load(tmp_path / "in.yaml", "splits: {train: {path: d}}")
    with pytest.raises(MetadataError, match=rf"mix\.yaml, field `splits\.train\.{key.partition(':')[0]}"):
        load(tmp_path / "mix.yaml", f"splits: {{train: {{path: in.yaml, {key}}}}}")


def test_a_dataset_that_cannot_be_opened_is_named_with_its_place(tmp_path):
    mix = load(tmp_path / "mix.yaml", "splits: {train: {blend: [{path: a}, {path: b}]}}")
    with pytest.raises(
        DatasetNotFoundError, match=r"mix\.yaml, field `splits\.train\.blend\[1\]`: .*/b: no such folder"
    ):
        DatasetOpener().open(mix.leaves[1].leaf)


def test_a_nested_file_that_is_not_there(tmp_path):
    with pytest.raises(
        DatasetNotFoundError, match=r"mix\.yaml, field `splits\.train\.blend\[1\]`: .*gone\.yaml: no such"
    ):
        load(tmp_path / "mix.yaml", "splits: {train: {blend: [{path: a}, {path: gone.yaml}]}}")
    (tmp_path / "in.yml").touch()
    with pytest.raises(MetadataError, match=r"must end in \.yaml"):
        load(tmp_path / "mix.yaml", "splits: {train: {path: in.yml}}")


def test_a_dataset_whose_folder_looks_like_a_file(tmp_path):
    (tmp_path / "odd.yaml").mkdir()
    mix = load(tmp_path / "mix.yaml", "splits: {train: {path: odd.yaml}}")
    assert mix.leaves[0].leaf.path == str(tmp_path / "odd.yaml")


def test_a_circle_is_named(tmp_path):
    load(tmp_path / "c.yaml", "splits: {train: {path: d}}")
    (tmp_path / "b.yaml").write_text(HEADER + "splits: {train: {blend: [{path: c.yaml}, {path: a.yaml}]}}")
    with pytest.raises(
        MetadataError, match=r"b\.yaml, field `splits\.train\.blend\[1\]`: .*circle: .*a\.yaml.*b\.yaml.*a\.yaml"
    ):
        load(tmp_path / "a.yaml", "splits: {train: {path: b.yaml}}")


def test_files_nested_without_end(tmp_path):
    for number in range(110):
        (tmp_path / f"{number}.yaml").write_text(HEADER + f"splits: {{train: {{path: {number + 1}.yaml}}}}")
    with pytest.raises(MetadataError, match=r"99\.yaml, field `splits\.train`: .*nested more than 100 deep"):
        load_mix(tmp_path / "0.yaml", split_part="train")
