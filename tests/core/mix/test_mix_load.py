"""Whatever names a mix: paths, dicts, blenders, Megatron's lists; its picture; and a thousand datasets."""

from __future__ import annotations

import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from energon_bridge.core.errors import ConfigurationError, DatasetNotFoundError, MetadataError, NotPreparedError
from energon_bridge.core.mix import Blender, Mix, WeightSchedule, load_mix
from energon_bridge.core.storage import LocalStore
from energon_bridge.tools.cli.plan import describe

V2 = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}


def weights(mix: Mix) -> list[tuple[str, Fraction | None]]:
    return [(entry.leaf.path, entry.weight) for entry in mix.leaves]  # type: ignore[union-attr]


# --- one path -----------------------------------------------------------------------------------------------------


def test_one_dataset(fixtures):
    mix = load_mix(fixtures / "captioning", split_part="val", dataset_config="dataset.yaml", split_config="s.yaml")
    found = mix.leaves[0].leaf
    assert (mix.mode, found.path, found.split_part) == ("single", str(fixtures / "captioning"), "val")
    assert (found.dataset_config, found.split_config) == (None, "s.yaml")
    assert load_mix(str(fixtures / "lines.jsonl"), split_part="x").leaves[0].leaf.is_jsonl


def test_a_relative_path(fixtures, monkeypatch):
    monkeypatch.chdir(fixtures)
    assert load_mix("./captioning", split_part="train").leaves[0].leaf.path == str(fixtures / "captioning")
    assert load_mix("vqa", split_part="train", base="captioning/..").leaves[0].leaf.path == str(fixtures / "vqa")


def test_what_is_no_dataset(fixtures):
    for name in ("mix.yml", "data.tar"):
        (fixtures / name).write_bytes(b"x")
    (fixtures / "media" / ".nv-meta").mkdir(parents=True)
    (fixtures / "media" / ".nv-meta" / "index.sqlite").touch()
    cases = {
        "nowhere": (DatasetNotFoundError, "no such folder"),
        "nowhere.yaml": (DatasetNotFoundError, "no such file"),
        "mix.yml": (MetadataError, r"must end in \.yaml"),
        "data.tar": (MetadataError, "give the folder"),
        "files": (NotPreparedError, "Run `energon prepare"),
        "media": (NotPreparedError, "can only be the `aux`"),
        "captioning/.nv-meta": (MetadataError, "give its folder, .*/captioning$"),
        "captioning/.nv-meta/dataset.yaml": (MetadataError, "dataset.yaml: .* give its folder, .*/captioning$"),
        "": (NotPreparedError, r"captioning.* are prepared datasets.*{train: {datasets: \[{path: "),
    }
    for name, (error, words) in cases.items():
        with pytest.raises(error, match=words):
            load_mix(fixtures / name, split_part="train")


@pytest.mark.parametrize("name", ["mix_v2.yaml", "lines.jsonl"])
def test_names_of_meta_files_go_with_a_dataset_only(fixtures, name):
    with pytest.raises(ConfigurationError, match=r"split_config='s\.yaml' is for the folder of a dataset"):
        load_mix(fixtures / name, split_part="train", split_config="s.yaml")


# --- a dict -------------------------------------------------------------------------------------------------------


def test_a_dict_is_relative_to_the_current_directory_or_a_base(tmp_path, monkeypatch):
    document = {**V2, "splits": {"train": {"path": Path("data"), "subset": {"range": ("0%", "50%")}}}}
    monkeypatch.chdir(tmp_path)
    assert load_mix(document, split_part="train").leaves[0].leaf.path == str(tmp_path / "data")
    assert load_mix(document, split_part="train", base="/b").leaves[0].leaf.path == "/b/data"
    assert load_mix(document, split_part="train", base="s3://b/x").leaves[0].leaf.path == "s3://b/x/data"


def test_a_dict_that_names_a_file(fixtures):
    document = {**V2, "splits": {"train": {"blend": [{"path": "mix_v2.yaml", "weight": np.float32(0.5)}]}}}
    assert len(load_mix(document, split_part="train", base=fixtures).leaves) == 4


def joiner(image: object, text: object) -> object:
    return image, text


def test_a_dict_can_hold_what_only_python_has():
    schedule = WeightSchedule.linear([(0, 1), (10, 2)])
    item = {"join": {"image": {"path": "/a"}, "text": {"path": "/b"}}, "joiner": joiner, "weight": schedule}
    mix = load_mix({**V2, "splits": {"train": {"blend": [item, {"path": "/c"}]}}}, split_part="train")
    found = mix.leaves[0].leaf.joiner
    assert (found.target, found.name, found.is_function) == (joiner, "joiner", True)
    assert mix.is_scheduled


def test_mistakes_in_a_dict_name_their_place():
    with pytest.raises(MetadataError, match=r"mix given as a dict, field `splits\.train`: unknown key `pth`.*`path`"):
        load_mix({**V2, "splits": {"train": {"pth": "/a"}}}, split_part="train")
    with pytest.raises(MetadataError, match="expected a string, found 3"):
        load_mix({**V2, "splits": {"train": {"path": 3}}}, split_part="train")
    circle: dict[str, object] = {**V2}
    circle["splits"] = circle
    with pytest.raises(ConfigurationError, match="contain itself"):
        load_mix(circle, split_part="train")


# --- blenders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values", [(0.6, 0.3, 0.1), (60, 30, 10), (6e-7, 3e-7, 1e-7), tuple(np.array([0.6, 0.3, 0.1])), (np.int64(6), 3, 1)]
)
def test_weights_in_any_unit(values):
    mix = load_mix(Blender(list(zip(["/a", "/b", "/c"], values, strict=True))), split_part="train")
    assert weights(mix) == [("/a", Fraction(6, 10)), ("/b", Fraction(3, 10)), ("/c", Fraction(1, 10))]


EQUAL = [
    Blender([("/a", 0.75), ("/b", 0.25)]),
    Blender(pair for pair in [["/a", 3], [Path("/b"), 1]]),
    Blender([0.75, "/a", 0.25, "/b"]),
    Blender(["0.75", "/a", "0.25", "/b"]),
    Blender.from_prefixes(["/a", "/b"], [3, 1]),
    Blender.from_prefixes(("/a", "/b"), np.array([0.75, 0.25])),
    [("/a", 3), ("/b", 1)],
    (("/a", 3), ("/b", 1)),
    (["/a", "/b"], [3, 1]),
    (("/a", "/b"), (0.75, 0.25)),
    [3, "/a", 1, "/b"],
    ["3", "/a", "1", "/b"],
]


@pytest.mark.parametrize("source", EQUAL, ids=str)
def test_all_spellings_say_the_same(source):
    mix = load_mix(source, split_part="train")
    assert (mix.mode, weights(mix)) == ("weights", [("/a", Fraction(3, 4)), ("/b", Fraction(1, 4))])


@pytest.mark.parametrize("source", [["/a", "/b"], (["/a", "/b"], None), Blender.from_prefixes(["/a", "/b"])], ids=str)
def test_without_weights_the_sizes_decide(source):
    mix = load_mix(source, split_part="train")
    assert (mix.mode, weights(mix)) == ("concat", [("/a", None), ("/b", None)])


def test_blenders_hold_blenders_files_and_dicts(fixtures):
    inner = Blender([("/a", 1), ("/b", 3)])
    document = {**V2, "splits": {"train": {"path": "/d"}}}
    mix = load_mix(Blender([(inner, 2), (fixtures / "nested.yaml", 1), (document, 1)]), split_part="train")
    assert [weight for _, weight in weights(mix)] == [
        Fraction(1, 8),
        Fraction(3, 8),
        Fraction(3, 16),
        Fraction(1, 16),
        Fraction(1, 4),
    ]


def test_a_weight_can_be_a_schedule():
    grammar = {"schedule": "steps", "points": [[0, 1], [100, 4]]}
    for weight in (grammar, WeightSchedule.steps([(0, 1), (100, 4)])):
        mix = load_mix(Blender([("/a", weight), ("/b", 1)]), split_part="train")
        assert (mix.weights_at(99), mix.weights_at(100)) == ((0.5, 0.5), (0.8, 0.2))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Blender([]), "at least one"),
        (lambda: Blender("/a"), "expected a list"),
        (lambda: Blender(["/a", "/b"]), "a flat list"),
        (lambda: Blender([0.5, "/a", 0.5]), "a flat list"),
        (lambda: Blender([("/a", 1), "/b"]), "a flat list"),
        (lambda: Blender([(0.5, "/a")]), r"Blender\[0\].*The path comes first"),
        (lambda: Blender([("/a", 1), ("/b", None)]), r"Blender\[1\], field `weight`"),
        (lambda: Blender([("/a", "1")]), r"Blender\[0\], field `weight`: expected a number"),
        (lambda: Blender([("/a", -1)]), "must not be negative"),
        (lambda: Blender([("/a", float("nan"))]), "expected a number"),
        (lambda: Blender.from_prefixes("/a", [1]), "expected a list of paths"),
        (lambda: Blender.from_prefixes(["/a"], [1, 2]), "1 paths but 2 weights"),
        (lambda: load_mix(3, split_part="train"), "expected a path, a dict"),  # type: ignore[arg-type]
        (lambda: load_mix([], split_part="train"), "at least one"),
    ],
)
def test_mistakes_in_python_are_configuration_errors(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_blending_two_modes_names_both_places(fixtures):
    with pytest.raises(MetadataError, match=r"Blender: `blend` cannot hold.*mix_epochized\.yaml, field `splits"):
        load_mix(Blender([("/a", 1), (fixtures / "mix_epochized.yaml", 1)]), split_part="train")


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 100)), min_size=1, max_size=6), st.integers(1, 5))
def test_a_blender_in_a_blender_of_one_changes_nothing(pairs, depth):
    blender = Blender([(f"/{name}", weight) for name, weight in pairs])
    expected = weights(load_mix(blender, split_part="train"))
    for _ in range(depth):
        blender = Blender([(blender, 7)])
    assert weights(load_mix(blender, split_part="train")) == expected


# --- the picture --------------------------------------------------------------------------------------------------


def test_the_tree_with_effective_weights(fixtures):
    lines = [
        line.replace(str(fixtures), "") for line in describe(load_mix(fixtures / "mix_v2.yaml", split_part="train"))
    ]
    assert lines == [
        "blend  (/mix_v2.yaml, field `splits.train.blend`)",
        "├──  62.50 %  /captioning  train  25% to 75%  [weight 5]",
        "├──  25.00 %  /vqa  train  [weight 2]",
        "└── blend  [weight 1]  (/nested.yaml, field `splits.train.blend`)",
        "    ├──   9.38 %  /captioning  val  [weight 3]",
        "    └──   3.12 %  /vqa  val  [weight 1]",
    ]


def test_the_picture_of_the_other_nodes(fixtures):
    assert describe(load_mix(fixtures / "joined.yaml", split_part="train"))[0].startswith("join image=")
    assert "× 0.5" in describe(load_mix(fixtures / "mix_epochized.yaml", split_part="train"))[2]
    schedule = WeightSchedule.linear([(0, 1), (9, 2)])
    lines = describe(
        load_mix(Blender([("/a", schedule), ("/a", 1), (Blender.from_prefixes(["/b", "/c"]), 2)]), split_part="t")
    )
    assert "[weight linear 0: 1 → 9: 2]" in lines[1]
    assert "again, stream 1" in lines[2]
    assert "shared by size in group 0" in lines[4]


# --- a thousand datasets ------------------------------------------------------------------------------------------


def write_large(path: Path, count: int) -> None:
    items = "".join(
        f"      - weight: {number % 7 + 0.5}\n        path: ./d{number:04d}\n        subflavors: {{source: web}}\n"
        for number in range(count)
    )
    path.write_text(f"__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n{items}")


def test_a_thousand_datasets_are_read_fast_and_not_touched(tmp_path, monkeypatch):
    write_large(tmp_path / "mix.yaml", 1000)
    read: list[str] = []
    monkeypatch.setattr(LocalStore, "read", lambda store, rel: read.append(rel) or Path(store.root, rel).read_bytes())
    seconds = []
    for _ in range(3):
        started = time.process_time()
        mix = load_mix(tmp_path / "mix.yaml", split_part="train")
        seconds.append(time.process_time() - started)
    assert len(mix.leaves) == 1000
    assert read == ["mix.yaml"] * 3
    assert sum(mix.weights_at(0)) == pytest.approx(1)
    assert min(seconds) < 0.3
