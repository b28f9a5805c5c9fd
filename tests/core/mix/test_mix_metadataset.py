"""Metadataset files of both versions: what they say, how it combines along the path, and where paths lead."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import fsspec
import pytest

from energon_bridge.core.errors import MetadataError, UnknownSplitError
from energon_bridge.core.mix import JoinRef, LeafRef, Mix, evaluate_subset, load_mix

HEADER = "__module__: megatron.energon\n__class__: MetadatasetV2\n"


def load(path: Path, text: str, header: str = HEADER) -> Mix:
    path.write_text(header + text)
    return load_mix(path, split_part="train")


def leaf(mix: Mix, number: int = 0) -> LeafRef:
    found = mix.leaves[number].leaf
    assert isinstance(found, LeafRef)
    return found


def join(mix: Mix) -> JoinRef:
    found = mix.leaves[0].leaf
    assert isinstance(found, JoinRef)
    return found


# --- the fixtures of energon 7.4.1 --------------------------------------------------------------------------------


def test_version_1(fixtures):
    mix = load_mix(fixtures / "mix_v1.yaml", split_part="train")
    assert mix.mode == "weights"
    assert [(entry.leaf.path, entry.weight) for entry in mix.leaves] == [
        (str(fixtures / "captioning"), Fraction(2, 3)),
        (str(fixtures / "vqa"), Fraction(1, 3)),
    ]
    assert [leaf(mix, number).subflavors for number in (0, 1)] == [{"source": "cap"}, {"source": "vqa"}]
    assert leaf(load_mix(fixtures / "mix_v1.yaml", split_part="val")).split_part == "val"


def test_version_2_with_a_nested_file(fixtures):
    mix = load_mix(fixtures / "mix_v2.yaml", split_part="train")
    assert mix.mode == "weights"
    found = [(Path(entry.leaf.path).name, entry.leaf.split_part, entry.weight) for entry in mix.leaves]
    assert found == [
        ("captioning", "train", Fraction(5, 8)),
        ("vqa", "train", Fraction(1, 4)),
        ("captioning", "val", Fraction(3, 32)),
        ("vqa", "val", Fraction(1, 32)),
    ]
    assert evaluate_subset(leaf(mix).subsets, 12) == (3, 9)
    for split_part in ("val", "test"):
        single = load_mix(fixtures / "mix_v2.yaml", split_part=split_part)
        assert (single.mode, leaf(single).split_part) == ("single", split_part)


def test_a_nested_file_on_its_own(fixtures):
    mix = load_mix(fixtures / "nested.yaml", split_part="train")
    assert [entry.weight for entry in mix.leaves] == [Fraction(3, 4), Fraction(1, 4)]
    with pytest.raises(UnknownSplitError, match=r"nested\.yaml: no split part 'val'\. Known split parts: train"):
        load_mix(fixtures / "nested.yaml", split_part="val")


def test_a_join(fixtures):
    mix = load_mix(fixtures / "joined.yaml", split_part="train")
    found = join(mix)
    assert mix.mode == "single"
    assert found.is_named
    assert (found.joiner.module, found.joiner.name, found.joiner.is_function) == (
        "joiners",
        "join_caption_and_text",
        True,
    )
    assert [
        (entry.name, Path(entry.leaf.path).name, entry.leaf.split_part, entry.nonmatch) for entry in found.entries
    ] == [("image", "captioning", "train", "error"), ("extra", "captioning_extra", "train", "error")]


def test_aux(fixtures):
    found = leaf(load_mix(fixtures / "aux.yaml", split_part="train"))
    assert found.subflavors == {"kind": "chat"}
    assert {name: (aux.path, aux.is_filesystem) for name, aux in found.aux.items()} == {
        "pictures": (str(fixtures / "aux_images"), False),
        "files": (str(fixtures / "files"), True),
    }


# --- settings and how they combine --------------------------------------------------------------------------------


def test_what_a_reference_can_say(tmp_path):
    mix = load(
        tmp_path / "mix.yaml",
        """
splits:
  train:
    path: data
    split_part: other
    subflavors: {a: 1, deep: {b: [1, 2]}}
    shuffle_over_epochs_multiplier: 3
    dataset_config: d.yaml
    split_config: s.yaml
    aux: {x: {path: ./x}, y: {fs_path: ../y}, z: "filesystem+s3://bucket/z", w: "s3://bucket/w"}
    subset: {range: ["20%", end]}
""",
    )
    found = leaf(mix)
    assert (mix.mode, found.path, found.split_part) == ("single", str(tmp_path / "data"), "other")
    assert found.subflavors == {"a": 1, "deep": {"b": [1, 2]}}
    assert (found.dataset_config, found.split_config) == ("d.yaml", "s.yaml")
    assert found.shuffle_over_epochs_multiplier == 3
    assert {name: (aux.path, aux.is_filesystem) for name, aux in found.aux.items()} == {
        "x": (str(tmp_path / "x"), False),
        "y": (str(tmp_path.parent / "y"), True),
        "z": ("s3://bucket/z", True),
        "w": ("s3://bucket/w", False),
    }
    assert evaluate_subset(found.subsets, 10) == (2, 10)
    assert found.where == f"{tmp_path}/mix.yaml, field `splits.train`"


def test_empty_values_are_absent_where_there_is_a_default(tmp_path):
    keys = ("split_part", "subflavors", "dataset_config", "split_config", "aux", "subset")
    text = "splits:\n  train:\n    path: data\n" + "".join(f"    {key}:\n" for key in keys)
    assert leaf(load(tmp_path / "mix.yaml", text)) == LeafRef(path=str(tmp_path / "data"), split_part="train")


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [("2", "3", 6), ("null", "-1", None), ("-1", "5", -1), ("4", "null", None), ("1", "-1", -1)],
)
def test_shuffle_multipliers_combine_along_the_path(tmp_path, outer, inner, expected):
    load(tmp_path / "in.yaml", f"splits: {{train: {{path: d, shuffle_over_epochs_multiplier: {inner}}}}}")
    mix = load(tmp_path / "mix.yaml", f"splits: {{train: {{path: in.yaml, shuffle_over_epochs_multiplier: {outer}}}}}")
    assert leaf(mix).shuffle_over_epochs_multiplier == expected


def test_the_outermost_subflavor_wins_and_all_reach_the_leaf(tmp_path):
    load(tmp_path / "c.yaml", "splits: {train: {path: d, subflavors: {x: c, y: c, z: c}}}")
    load(tmp_path / "b.yaml", "splits: {train: {blend: [{path: c.yaml, subflavors: {x: b, y: b}}]}}")
    mix = load(tmp_path / "a.yaml", "splits: {train: {path: b.yaml, subflavors: {x: a}}}")
    assert leaf(mix).subflavors == {"x": "a", "y": "b", "z": "c"}


def test_subsets_collect_from_the_innermost_to_the_outermost(tmp_path):
    load(
        tmp_path / "in.yaml",
        "splits: {train: {subset: {range: [0%, 50%]}, blend: [{path: d, subset: {range: [10, 90]}}]}}",
    )
    mix = load(tmp_path / "mix.yaml", 'splits: {train: {path: in.yaml, subset: {range: ["50%", end]}}}')
    assert evaluate_subset(leaf(mix).subsets, 100) == (30, 50)
    assert [subset.is_absolute for subset in leaf(mix).subsets] == [True, False, False]


def test_the_old_subflavor(tmp_path):
    text = "splits: {train: {datasets: [{path: a, subflavor: x}, {path: b, subflavor: x, subflavors: {k: 1}}]}}"
    mix = load(tmp_path / "mix.yaml", text, header="")
    assert leaf(mix, 0).subflavors == {"__subflavor__": "x"}
    assert leaf(mix, 1).subflavors == {"__subflavor__": "x", "k": 1}


def test_the_split_of_a_nested_file(tmp_path):
    load(tmp_path / "in.yaml", "splits: {train: {path: t}, other: {path: o, split_part: deep}}")
    mix = load(
        tmp_path / "mix.yaml", "splits: {train: {concat: [{path: in.yaml}, {path: in.yaml, split_part: other}]}}"
    )
    assert [(entry.leaf.path, entry.leaf.split_part) for entry in mix.leaves] == [
        (str(tmp_path / "t"), "train"),
        (str(tmp_path / "o"), "deep"),
    ]


def test_one_split_may_use_another_of_the_same_file(tmp_path):
    mix = load(tmp_path / "mix.yaml", "splits: {train: {path: mix.yaml, split_part: val}, val: {path: d}}")
    assert leaf(mix).split_part == "val"


def test_files_of_other_splits_are_not_read(tmp_path):
    assert leaf(load(tmp_path / "mix.yaml", "splits: {train: {path: d}, val: {path: gone.yaml}}")).split_part == "train"


def test_anchors_aliases_and_merge_keys(tmp_path):
    """Defect 19: energon 7.4 reads an alias as a text."""
    text = """
splits:
  train:
    blend:
      - &first {path: a, weight: 2, subflavors: &flavors {k: 1}}
      - {path: b, subflavors: *flavors}
      - {<<: *first, path: c}
"""
    mix = load(tmp_path / "mix.yaml", text)
    assert [entry.weight for entry in mix.leaves] == [Fraction(2, 5), Fraction(1, 5), Fraction(2, 5)]
    assert [leaf(mix, number).subflavors for number in range(3)] == [{"k": 1}] * 3


def test_items_in_place(tmp_path):
    mix = load(
        tmp_path / "mix.yaml",
        "splits: {train: {blend: [{weight: 3, path: a}, {subset: {range: [0%, 50%]}, blend: [{path: b}, {path: c}]}]}}",
    )
    assert [entry.weight for entry in mix.leaves] == [Fraction(3, 4), Fraction(1, 8), Fraction(1, 8)]
    assert evaluate_subset(leaf(mix, 2).subsets, 10) == (0, 5)


def test_a_join_of_a_list_with_settings_for_all_its_entries(tmp_path):
    """Defect 4: energon 7.4 refuses `split_config` of a join, which its documentation shows."""
    mix = load(
        tmp_path / "mix.yaml",
        """
splits:
  train:
    blend:
      - weight: 2
        join:
          - {path: a, subflavors: {x: entry, y: entry}}
          - {path: b, nonmatch: skip, split_part: own, split_config: own.yaml}
          - {path: c, nonmatch: none}
        joiner: {__module__: megatron.energon, __class__: CaptioningSample}
        split_part: joined
        split_config: split_v2.yaml
        dataset_config: data_v2.yaml
        subflavors: {x: join}
        shuffle_over_epochs_multiplier: -1
        subset: {range: [5, 10]}
""",
    )
    found = join(mix)
    assert not found.is_named
    assert (found.joiner.name, found.joiner.is_function, found.split_part) == ("CaptioningSample", False, "joined")
    assert (found.subflavors, found.shuffle_over_epochs_multiplier) == ({"x": "join"}, -1)
    assert evaluate_subset(found.subsets, 20) == (5, 10)
    assert [entry.nonmatch for entry in found.entries] == ["error", "skip", "none"]
    assert [entry.leaf.split_part for entry in found.entries] == ["joined", "own", "joined"]
    assert [entry.leaf.split_config for entry in found.entries] == ["split_v2.yaml", "own.yaml", "split_v2.yaml"]
    assert {entry.leaf.dataset_config for entry in found.entries} == {"data_v2.yaml"}
    assert found.entries[0].leaf.subflavors == {"x": "join", "y": "entry"}
    assert all(entry.leaf.subsets == () for entry in found.entries)


def test_settings_of_an_entry_that_energon_ignores_are_reported(tmp_path, caplog):
    load(
        tmp_path / "mix.yaml",
        "splits: {train: {join: [{path: a}, {path: b, subset: {range: [0%, 9%]}}], "
        "joiner: {__module__: m, __function__: f}}}",
    )
    assert "splits.train.join[1].subset`: has no effect inside a join" in caplog.text


# --- paths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("./a/../b/", "{base}/b"),
        ("/abs/x", "/abs/x"),
        ("file:///abs/x", "/abs/x"),
        ("s3://bucket/a/./b", "s3://bucket/a/b"),
        ("gs://bucket", "gs://bucket"),
        ("msc://profile/x/../y", "msc://profile/y"),
        ("rclone://profile/y", "msc://profile/y"),
        ("dss://coco@1.2/sub", "/cache/coco/1.2/sub"),
    ],
)
def test_paths(tmp_path, monkeypatch, text, expected):
    monkeypatch.setenv("NVDATASET_CACHE_DIR", "/cache")
    mix = load(tmp_path / "mix.yaml", f'splits: {{train: {{path: "{text}"}}}}')
    assert leaf(mix).path == expected.format(base=tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty string"),
        ("../" * 50 + "x", "above the root"),
        ("s3://bucket/../x", "above the root"),
        ("dss://coco/x", "NAME@VERSION"),
        ("dss://coco@1/x", "NVDATASET_CACHE_DIR"),
    ],
)
def test_bad_paths_name_the_place(tmp_path, monkeypatch, text, words):
    monkeypatch.delenv("NVDATASET_CACHE_DIR", raising=False)
    with pytest.raises(MetadataError, match=rf"mix\.yaml, field `splits\.train\.path`: .*{words}"):
        load(tmp_path / "mix.yaml", f'splits: {{train: {{path: "{text}"}}}}')


def test_a_mix_behind_a_url():
    files = fsspec.filesystem("memory")
    files.pipe_file(
        "/mixes/a/mix.yaml", b"splits: {train: {datasets: [{path: ../b/in.yaml}, {path: x}, {path: /local}]}}"
    )
    files.pipe_file("/mixes/b/in.yaml", (HEADER + "splits: {train: {path: ./y}}").encode())
    try:
        mix = load_mix("memory://mixes/a/mix.yaml", split_part="train")
    finally:
        files.rm("/mixes", recursive=True)
    assert [entry.leaf.path for entry in mix.leaves] == ["memory://mixes/b/y", "memory://mixes/a/x", "/local"]
