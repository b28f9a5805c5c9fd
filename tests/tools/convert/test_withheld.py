"""Rows that their own columns hold out or reject: never learned in silence, wherever they stand, through each door."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from clips import write_video
from commands import energon, output_of
from delivered import delivered
from object_server import serving
from sources import convert, members, picture, refused, write_pictures
from tar_builder import write_tar

from energon_bridge.core.errors import EmptyDatasetError, SourceError, UnknownSplitError
from energon_bridge.training.config import DataConfig
from energon_bridge.training.run_model import dataset_captions

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ALL = ("--split-ratio", "1,0,0")
IMAGE = {"bytes": picture(0), "path": "0.jpg"}


def talk(number: int, **beside: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": f"a{number}"}]
    return {"messages": turns, **beside}


def table(path: Path, rows: Any, group: int = 1) -> Path:
    path.parent.mkdir(exist_ok=True)
    rows = arrow.Table.from_pylist(rows) if isinstance(rows, list) else rows
    if path.suffix == ".parquet":
        parquet.write_table(rows, path, row_group_size=group)
    else:
        with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_stream(file, rows.schema) as out:
            out.write_table(rows)
    return path


def learned(path: Path, **settings: Any) -> list[Any]:
    """Return the samples of a pass, each once: where some are left out, it has others again, masked."""
    return list({one.__key__: one for one in delivered(path, **settings)}.values())


def remedies(error: BaseException | str) -> list[str]:
    """Return the filters that a message names."""
    return [piece.partition('"')[0] for piece in str(error).split('filter="')[1:]]


# Held out -------------------------------------------------------------------------------------------------------------

COLUMNS: list[tuple[str, list[Any], int]] = [
    ("split", ["train", "train", "test", "train"], 2),
    ("Phase", ["train", "minival", "train", "train"], 1),
    ("subset", ["math", "math", "test_a", "math"], 2),
    ("is_test", [False, False, True, False], 2),
    ("in_train", [1, 1, 0, 1], 2),
    ("split_name", ["train", None, "dev", "train"], 2),
    ("Karpathy split", ["train", "restval", "test", "train"], 2),
    ("train_test", ["Train", "Train", "Test", "Train"], 2),
    ("held_out", [False, False, True, False], 2),
    ("test", [False, False, True, False], 2),
    ("is_training_image", [1, 1, 1, 0], 3),
    ("use_for_training", [True, False, True, True], 1),
    ("partition", [0, 0, 1, 0], 2),
]
"""A column, its values, and which row is held out."""


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("form", ["texts", "conversations"])
@pytest.mark.parametrize(("column", "values", "held_out"), COLUMNS)
def test_tables_with_rows_of_several_splits_ask_which(
    column: str, values: list[Any], held_out: int, form: str, suffix: str, tmp_path: Path
) -> None:
    """The row is in the middle, in a row group of its own; each remedy that the message names is followed."""
    texts = [{"text": f"t{number}", column: value} for number, value in enumerate(values)]
    rows = [talk(n, **{column: value}) for n, value in enumerate(values)] if form == "conversations" else texts
    path = table(tmp_path / f"rows{suffix}", rows)
    for part in ("train", "val"):
        with pytest.raises(
            UnknownSplitError, match=f"the column `{column}` says that rows are of several splits"
        ) as told:
            delivered(path, part)
    chosen, every = remedies(told.value)
    there = [number for number, value in enumerate(values) if value is not None]
    wanted = [number for number in there if number != held_out]
    assert [int(one.__key__) for one in delivered(path, filter=chosen)] == wanted
    assert [int(one.__key__) for one in delivered(path, filter=every)] == there


def test_labels_of_splits_have_names(tmp_path: Path) -> None:
    """A ClassLabel of the `datasets` library is a number, and its names are in the metadata."""
    feature = {"_type": "ClassLabel", "names": ["train", "test"]}
    features = {"info": {"features": {"text": {"dtype": "string", "_type": "Value"}, "split": feature}}}
    rows = arrow.table({"text": ["a", "b", "c"], "split": [0, 1, 0]})
    path = table(tmp_path / "rows.parquet", rows.replace_schema_metadata({"huggingface": json.dumps(features)}))
    with pytest.raises(UnknownSplitError, match=r"several splits \(test, train\)") as told:
        delivered(path)
    assert [one.text for one in delivered(path, filter=remedies(told.value)[0])] == ["a", "c"]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("name", ["metadata", "extra_info"])
def test_tables_may_say_it_inside_of_metadata(name: str, suffix: str, tmp_path: Path) -> None:
    """As MathVista's and verl's do; a row without metadata says nothing."""
    says: list[Any] = [{"split": "train", "id": 0}, {"split": "test", "id": 1}, None, {"split": "train", "id": 3}]
    rows = [{"text": f"t{number}", name: inner} for number, inner in enumerate(says)]
    path = table(tmp_path / f"rows{suffix}", rows)
    with pytest.raises(UnknownSplitError, match=f"the column `{name}.split` says that rows are of several") as told:
        delivered(path)
    chosen, every = remedies(told.value)
    assert [one.text for one in delivered(path, filter=chosen)] == ["t0", "t3"]
    assert [one.text for one in delivered(path, filter=every)] == ["t0", "t1", "t3"]


def test_tables_some_of_whose_metadata_says_nothing_are_taken(tmp_path: Path) -> None:
    """Files whose metadata have other fields, or are texts; rows of splits in files of their names."""
    inner = {"test": {"split": "test"}, "train": {"source": "web"}}
    for number, metadata in enumerate([{"split": "train"}, {"source": "web"}]):
        table(tmp_path / "some" / f"{number}.parquet", [{"text": f"t{number}", "metadata": metadata}])
    assert len(delivered(tmp_path / "some")) == 2
    assert [one.text for one in delivered(tmp_path / "some", filter="`metadata.split` == 'train'")] == ["t0"]
    for split, metadata in inner.items():
        table(tmp_path / "named" / f"{split}.parquet", [{"text": split, "metadata": metadata}] * 2)
    assert [one.text for one in delivered(tmp_path / "named", "test")] == ["test"] * 2
    path = table(tmp_path / "texts.parquet", [{"text": "a", "metadata": "split"}, {"text": "b", "metadata": "test"}])
    assert len(delivered(path)) == 2


@pytest.mark.parametrize("splits", [["test", "test"], ["train", "extra"], [None, None], ["a long text " * 9, "test"]])
def test_tables_that_say_nothing_of_several_splits_are_taken(splits: list[Any], tmp_path: Path) -> None:
    rows = arrow.table({"text": ["a", "b"], "split": arrow.array(splits, arrow.string())})
    assert [one.text for one in delivered(table(tmp_path / "rows.parquet", rows))] == ["a", "b"]


def test_files_that_are_split_by_their_names_ask_nothing(tmp_path: Path) -> None:
    for split in ("train", "test"):
        table(tmp_path / f"{split}.parquet", [{"text": split, "split": name} for name in (split, "test", "train")])
    assert [one.text for one in delivered(tmp_path, "test")] == ["test"] * 3


def test_tables_behind_urls_are_looked_at_too(tmp_path: Path) -> None:
    rows = [{"text": f"t{number}", "split": "test" if number == 5 else "train"} for number in range(9)]
    table(tmp_path / "rows.parquet", rows)
    with serving(tmp_path) as server, pytest.raises(UnknownSplitError, match=r"several splits \(test, train\)"):
        delivered(f"{server.url}/rows.parquet")


def test_lint_names_them(tmp_path: Path) -> None:
    path = table(
        tmp_path / "rows.parquet", [talk(number, split=split) for number, split in enumerate(("train", "dev"))]
    )
    assert "Warning: " + str(path) + ": the column `split` says that rows are of several splits" in output_of(
        "lint", path
    )
    mix = tmp_path / "mix.yaml"
    mix.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n"
        f"    path: {path}\n    filter: split == 'train'\n"
    )
    assert "several splits" not in output_of("lint", mix)
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(talk(n, split="test" if n == 30 else "train")) + "\n" for n in range(40)))
    assert "key '30', part 'json': SampleError: `split` is 'test', and other rows" in energon("lint", lines).output


def test_the_training_script_opens_them_by_its_filter(tmp_path: Path) -> None:
    """`data.filter` reaches what is opened beside the loaders, too: the texts of which a tokenizer is made."""
    rows = [{"question": f"q{n}", "answer": f"a{n}", "split": "test" if n == 1 else "train"} for n in range(3)]
    data = DataConfig(path=str(table(tmp_path / "rows.parquet", rows)), settings={"filter": "split == 'train'"})
    assert dataset_captions(data.path, limit=9, **data.opening) == ["q0", "a0", "q2", "a2"]


def test_metadata_may_say_it(tmp_path: Path) -> None:
    """MathVista's `metadata.split`."""
    lines = tmp_path / "rows.jsonl"
    rows = [talk(n, metadata={"split": "test" if n == 1 else "train"}) for n in range(3)]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = refused(lines, tmp_path / "out", *ALL)
    assert "`metadata.split` is 'test', and other rows are to be learned" in told
    assert [one.messages[0]["content"] for one in learned(lines)] == ["q0", "q2"]
    assert "3 samples" in convert(lines, tmp_path / "out", *ALL, "--ignore", "metadata")


@pytest.mark.parametrize(
    "column", [["good", "bad"], [["test"], ["train"]], [{"split": 1}, {"split": 2}], [1.5, float("nan")], [b"x", b"y"]]
)
@pytest.mark.parametrize("name", ["split", "quality", "is_rejected"])
def test_columns_of_other_kinds_are_no_names(name: str, column: list[Any], tmp_path: Path) -> None:
    path = table(tmp_path / "rows.parquet", arrow.table({"text": ["a", "b"], name: column}))
    if (name, column[0]) == ("quality", "good"):
        with pytest.raises(UnknownSplitError, match="rejected rows"):
            delivered(path)
    else:
        assert [one.text for one in delivered(path)] == ["a", "b"]


def test_flags_with_nulls_are_floats_in_pandas(tmp_path: Path) -> None:
    rows = arrow.table({"text": ["a", "b", "c"], "is_rejected": [0.0, 1.0, None]})
    with pytest.raises(UnknownSplitError, match="rejected rows") as told:
        delivered(path := table(tmp_path / "rows.parquet", rows))
    assert [one.text for one in delivered(path, filter=remedies(told.value)[0])] == ["a"]


@pytest.mark.parametrize("door", ["jsonl", "tars"])
def test_lists_and_tars_leave_out_rows_of_tests_by_name(
    door: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Row 30 is held out, the 17th and later ones are not looked at before."""
    rows = [talk(number, is_test=number == 30) for number in range(40)]
    path = tmp_path / "rows.jsonl"
    if door == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path = tmp_path / "tars"
        write_tar(path / "a.tar", [(f"{n:03d}.json", json.dumps(row).encode()) for n, row in enumerate(rows)])
        output_of("prepare", path, *ALL, "--sample-type", "CrudeWebdataset", "--non-interactive", "--no-progress")
    assert [one.messages[0]["content"] for one in learned(path)] == [f"q{n}" for n in range(40) if n != 30]
    assert caplog.text.count("`is_test` is True, and other rows are to be learned") == 1
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps({**row, "is_test": True}) + "\n" for row in rows))
    assert len(delivered(path)) == 40


# Rejected -------------------------------------------------------------------------------------------------------------

MARKS: list[tuple[str, Any, Any]] = [
    ("is_rejected", False, True),
    ("is_precanned", 0, 1),
    ("deleted", False, True),
    ("is_valid", True, False),
    ("review_result", True, False),
    ("is_correct", True, False),
    ("quality", "good", "bad"),
    ("status", "submitted", "discarded"),
    ("exclude", False, True),
    ("was_cancelled", False, True),
    ("keep", True, False),
    ("approved", 1, 0),
    ("is_safe", True, False),
    ("correct", True, False),
    ("is_match", True, False),
    ("foil", False, True),
    ("hallucination", 0, 1),
    ("status_name", "submitted", "rejected"),
]
OF_ROLLOUTS: list[tuple[str, Any, Any]] = [
    ("correct", 1, 0),
    ("correct", 1.0, 0.0),
    ("reward", 1.0, -1.0),
    ("final_reward", 0.5, 0.0),
    ("passed", True, False),
    ("is_success", True, False),
    ("resolved", 1, 0),
    ("feedback", "thumbs_up", "thumbs_down"),
]
"""What verifiers and users say of the answers of a model."""
UNLEARNED: list[tuple[str, Any, Any]] = [
    ("weight", 1.0, 0.0),
    ("sample_weight", 2, 0),
    ("train", True, False),
    ("include_in_loss", True, False),
]


@pytest.mark.parametrize(("column", "good", "bad"), [*MARKS, *OF_ROLLOUTS, *UNLEARNED])
def test_rows_that_are_marked_are_not_learned(
    column: str, good: Any, bad: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marks = [good, bad, good]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(talk(n, **{column: mark})) + "\n" for n, mark in enumerate(marks)))
    assert [one.messages[0]["content"] for one in learned(lines)] == ["q0", "q2"]
    why = "is not to be learned" if (column, good, bad) in UNLEARNED else "was rejected"
    assert f"`{column}` is {bad!r}: the sample {why}" in caplog.text
    assert f"line 2: `{column}` is {bad!r}" in refused(lines, tmp_path / "out", *ALL)
    convert(lines, tmp_path / "all", *ALL, "--ignore", column)
    assert len(delivered(tmp_path / "all")) == 3
    convert(lines, tmp_path / "skip", *ALL, "--on-error", "skip")
    assert [one.messages[0]["content"] for one in learned(tmp_path / "skip")] == ["q0", "q2"]
    captions = [{"image": IMAGE, "caption": f"c{n}", column: mark} for n, mark in enumerate(marks)]
    for rows in (captions, [talk(n, **{column: mark}) for n, mark in enumerate(marks)]):
        path = table(tmp_path / "rows.parquet", rows)
        with pytest.raises(UnknownSplitError, match=f"`{column}` says that annotators rejected rows") as told:
            delivered(path)
        chosen, every = remedies(told.value)
        assert [int(one.__key__) for one in delivered(path, filter=chosen)] == [0, 2]
        assert len(delivered(path, filter=every)) == 3


@pytest.mark.parametrize("images", [False, True])
def test_answers_whose_label_is_0_are_not_learned(images: bool, tmp_path: Path) -> None:
    """WikiQA: of some candidates, those that answer the question have the label 1."""
    rows = [{"question": f"q{n}", "answer": f"a{n}", "label": n % 2} for n in range(4)]
    rows = [{**({"image": IMAGE} if images else {}), **row} for row in rows]
    path = table(tmp_path / "rows.parquet", rows)
    told = refused(path, tmp_path / "out", *ALL)
    assert "`label` is 0 beside `question` and `answer`, so the answer may be wrong" in told
    convert(path, tmp_path / "out", *ALL, "--on-error", "skip")
    convert(path, tmp_path / "all", *ALL, "--ignore", "label")
    assert [len(delivered(tmp_path / name)) for name in ("out", "all")] == [2, 4]
    if images:
        with pytest.raises(SourceError, match="`label` is 0"):
            delivered(path)
        return
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for found in (learned(path), learned(lines), delivered(path, filter="label == 1")):
        assert [one.messages[1]["content"] for one in found] == ["a1", "a3"]
    choices = {"question": "q", "options": ["x", "y"], "answer": "x", "label": 0}
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(choices) + "\n" + json.dumps({"question": "q", "answer": "a", "label": 7}) + "\n")
    assert [one.messages[1]["content"] for one in delivered(other)] == ["A", "a"]


@pytest.mark.parametrize("mark", [{"deleted": True}, {"review_result": False}])
def test_turns_that_were_rejected_are_refused(
    mark: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenAssistant."""
    (name,) = mark
    entry = talk(0)
    lines = {False: tmp_path / "marked.jsonl", True: tmp_path / "others.jsonl"}
    for other, path in lines.items():
        entry["messages"][1][name] = mark[name] is not other
        path.write_text(json.dumps(entry) + "\n")
    said = f"a turn of 'assistant' has {name}={mark[name]}, and was rejected"
    assert said in refused(lines[False], tmp_path / "out", *ALL)
    with pytest.raises(EmptyDatasetError):
        delivered(lines[False])
    assert said in caplog.text
    assert len(delivered(lines[True])) == 1


@pytest.mark.parametrize(
    "beside",
    [
        {"valid": False},
        {"rejected": None},
        {"quality": "low"},
        {"image_quality": 3},
        {"deleted": "no"},
        {"status": "ok"},
        {"weight": 0.5},
        {"loss": 1.25},
        {"correct": 0, "choices": None},
        {"correct": 2},
        {"reward": 0.5},
        {"resolved": None},
        {"fold": 3},
        {"mask": "User"},
        {"val": 1},
    ],
)
def test_other_marks_say_nothing(beside: dict[str, Any], tmp_path: Path) -> None:
    lines = tmp_path / "rows.jsonl"
    lines.write_text(json.dumps(talk(0, **beside)) + "\n")
    assert len(delivered(lines)) == 1
    assert len(delivered(table(tmp_path / "rows.parquet", [talk(0, **beside)]))) == 1


def test_captions_that_annotators_rejected(tmp_path: Path) -> None:
    """VizWiz' captions: the first that is not marked is taken; an image without one is left out and counted."""
    write_pictures(tmp_path, ["a.png", "b.png", "c.png"])
    notes = [
        ("a", "Quality issues are too severe to recognize visual content.", True, False),
        ("a", "A red mug.", False, False),
        ("b", "spam", False, True),
        ("c", "A dog.", False, False),
        ("c", "no", False, True),
    ]
    annotations = [
        {"image_id": image, "caption": text, "is_precanned": precanned, "is_rejected": is_rejected}
        for image, text, precanned, is_rejected in notes
    ]
    images = [{"id": name, "file_name": f"{name}.png"} for name in "abc"]
    (tmp_path / "captions.json").write_text(json.dumps({"images": images, "annotations": annotations}))
    said = convert(tmp_path / "captions.json", tmp_path / "out", *ALL)
    assert "Left out: 3 of 5 captions that annotators rejected" in said
    assert "Skipped 1 sample:" in said
    assert [one.caption for one in delivered(tmp_path / "out")] == ["A red mug.", "A dog."]
    kept = [json.loads(data)["captions"] for name, data in members(tmp_path / "out").items() if name.endswith("json")]
    assert kept == [["A red mug."], ["A dog."]]


def test_captions_that_are_objects(tmp_path: Path) -> None:
    notes = [("Bad.", True), ("Good.", False)]
    captions = [{"caption": text, "is_rejected": is_rejected} for text, is_rejected in notes]
    path = table(tmp_path / "rows.parquet", [{"image": IMAGE, "captions": captions}])
    convert(path, tmp_path / "out", *ALL)
    assert [one.caption for source in (path, tmp_path / "out") for one in delivered(source)] == ["Good."] * 2


@pytest.mark.parametrize(
    ("usual", "other", "told"),
    [
        ({"split": "train"}, {"split": "test"}, "`split` is 'test', and other rows are to be learned"),
        ({"is_rejected": False}, {"is_rejected": True}, "`is_rejected` is True"),
        ({"crop": None}, {"crop": [1, 2, 3, 4]}, "`crop` is [1, 2, 3, 4], which seems to be a region"),
    ],
)
def test_json_beside_pictures_says_it_too(
    usual: dict[str, Any], other: dict[str, Any], told: str, tmp_path: Path
) -> None:
    write_pictures(tmp_path / "in", ["a.png", "b.png", "c.png"])
    for name, said in (("a", usual), ("b", other), ("c", usual)):
        (tmp_path / f"in/{name}.json").write_text(json.dumps({"caption": f"{name}.", **said}))
    assert told in refused(tmp_path / "in", tmp_path / "out", *ALL)
    convert(tmp_path / "in", tmp_path / "out", *ALL, "--on-error", "skip")
    assert [one.caption for one in delivered(tmp_path / "out")] == ["a.", "c."]


@pytest.mark.parametrize("door", ["pairs", "images"])
def test_answers_without_confidence(door: str, tmp_path: Path) -> None:
    """VQAv2 and VizWiz: what most of those say that are sure of it; nothing, if nobody is."""
    sure = [("blue", "no"), ("blue", "no"), ("red", "yes"), ("green", "maybe"), ("red", "maybe")]
    unsure = [("blue", "no")]
    rows = [
        {
            **({"image": IMAGE} if door == "images" else {}),
            "question": "What colour?",
            "answers": [{"answer": text, "answer_confidence": confidence} for text, confidence in said],
        }
        for said in (sure, unsure)
    ]
    path = table(tmp_path / "rows.parquet", rows)
    said = convert(path, tmp_path / "out", *ALL)
    assert "Skipped 1 sample:" in said
    for source in (path, tmp_path / "out"):
        (sample,) = learned(source)
        answer = sample.messages[1]["content"] if door == "pairs" else sample.answers[0]
        assert answer == "red"
    if door == "images":
        assert "blue" not in sample.answers


def test_lint_names_them_beside_the_fields_of_a_field_map(tmp_path: Path) -> None:
    """A tar prepared by hand, whose JSON has more than the caption; a split that all samples are of says nothing."""
    says: list[dict[str, Any]] = [
        {"split": "train"},
        {"split": "test"},
        {"meta": {"split": "val"}},
        {"is_rejected": True},
    ]
    fields = ("--sample-type", "TextSample", "--field-map", '{"text": "json[caption]"}')
    for name, beside in {"mixed": says, "same": [{"split": "test"}] * 2}.items():
        captions = [json.dumps({"caption": f"c{number}", **one}).encode() for number, one in enumerate(beside)]
        write_tar(tmp_path / name / "a.tar", [(f"{number}.json", content) for number, content in enumerate(captions)])
        output_of("prepare", tmp_path / name, "--non-interactive", "--split-ratio", "1,0,0", *fields)
    told = output_of("lint", str(tmp_path / "mixed"))
    assert "2 samples with a key beside its fields that says it is held out" in told
    assert "a.tar/1" in told
    assert "1 sample with a key beside its fields by which annotators rejected it: a.tar/3" in told
    assert "held out" not in output_of("lint", str(tmp_path / "same"))


@pytest.mark.parametrize(
    ("beside", "told"),
    [
        ({"rotation": 90}, 1),
        ({"flip": True}, 1),
        ({"speed": 1.5}, 1),
        ({"rotation": 0, "speed": 1.0}, 0),
        ({"weight": 2}, 0),
    ],
)
def test_lint_names_turns_and_speeds_beside_the_fields_of_a_field_map(
    tmp_path: Path, beside: dict[str, Any], told: int
) -> None:
    content = json.dumps({"question": "what?", "answers": ["a dog"], **beside}).encode()
    video = write_video(tmp_path / "a.mp4", frames=4).read_bytes()
    write_tar(tmp_path / "data/a.tar", [("0.json", content), ("0.mp4", video)])
    places = '{"video": "mp4", "context": "json[question]", "answers": "json[answers]"}'
    fields = ("--sample-type", "VidQASample", "--field-map", places)
    output_of("prepare", tmp_path / "data", "--non-interactive", "--split-ratio", "1,0,0", *fields)
    said = output_of("lint", str(tmp_path / "data"))
    assert said.count("1 sample with a key beside its fields that says its media are turned") == told
    assert "All 1 samples load." in said or "The one sample loads." in said
