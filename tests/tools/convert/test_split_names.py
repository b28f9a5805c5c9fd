"""Splits that names of tables and of folders tell: as the datasets library has them, or refused."""

from __future__ import annotations

import json
import logging
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from commands import output_of
from PIL import Image
from sources import convert, converted, members, meta, picture, refused
from tar_builder import write_tar

from energon_bridge import WorkerConfig, get_loader, get_val_dataset
from energon_bridge.core.errors import SourceError, UnknownSplitError
from energon_bridge.tools.convert.rows import LOOKED_AT
from energon_bridge.tools.convert.splits import split_files
from energon_bridge.tools.convert.table_dataset import table_parts

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

FOLDERS: dict[str, tuple[str, ...]] = {
    "training and testing": ("training/0", "testing/0"),
    "words with something around them": ("cats-train", "cats-test"),
    "words in the middle": ("my_train_part", "my_test_part"),
    "eval": ("train", "eval"),
    "evaluation": ("train/0", "evaluation/0"),
    "digits": ("train1", "test1", "train2"),
    "shards beside another file": ("train-00000-of-00001", "test-00000-of-00001", "extra"),
    "shards": ("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001"),
    "folders before files": ("train/a", "valid/train-0", "valid/b"),
    "folders with more": ("set.train 2/a", "set.dev/b", "x/test_part/deep/c"),
    "splits of any name in data": ("data/train-00000-of-00001", "data/odd_ones-00000-of-00001", "extra"),
    "one split alone": ("train/0", "train/1"),
    "one file alone": ("test",),
    "nothing told": ("one", "two", "latest", "contest_1x", "medieval"),
    "hidden ones": ("train/a", ".hidden/b", "train/.c", "__pycache__/train"),
    "both words of one split": ("validation-val", "training"),
}
OURS = {"validation": "val"}


def write(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        path = folder / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(arrow.table({"text": [name]}), path)
    return folder


def texts(folder: Path, part: str) -> list[str]:
    config = WorkerConfig(num_workers=0)
    dataset = get_val_dataset(folder, split_part=part, batch_size=None, worker_config=config)
    return sorted(sample.text for sample in get_loader(dataset))


@pytest.mark.parametrize("kind", [*FOLDERS])
def test_splits_are_those_of_load_dataset(kind: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", minversion="5")
    folder = write(tmp_path / "data set", FOLDERS[kind])
    loaded = datasets.load_dataset("parquet", data_dir=str(folder), cache_dir=str(tmp_path / "cache"))
    # The library reads a file as often as words of its split are in its name.
    right = {OURS.get(part, part): sorted({*rows["text"]}) for part, rows in loaded.items()}
    parts = table_parts(folder)
    if parts == [""]:
        assert right == {"train": texts(folder, "train")} == {"train": texts(folder, "val")}
    else:
        assert {part: texts(folder, part) for part in parts} == right


DOUBTFUL: dict[str, tuple[tuple[str, ...], str]] = {
    "other spellings": (("Train", "Test"), "Test.parquet seems to be held out, but it and the other files"),
    "words run together": (("trainset", "testset"), "testset.parquet seems to be held out"),
    "camels": (("myTrain", "myVal"), r"myVal\.parquet"),
    "a file that folders overrule": (("train/0", "my_test_part"), "my_test_part.parquet seems.*is not taken"),
    "shards in data overrule": (("data/train-00000-of-00001", "test/0"), "test/0.parquet seems.*is not taken"),
    "a test file in the folder of train": (("train/0", "train/test_0"), "would be of the split train"),
    "two words": (("train/test/0", "train/0"), "its path tells the splits test and train"),
    "held out": (("train", "held_out"), r"held_out\.parquet seems.*is not taken"),
    "partitions": (("is_test=true/0", "is_test=false/0"), "is_test=true/0.parquet seems to be held out or rejected"),
    "partitions by quality": (
        ("quality=bad/0", "quality=good/0"),
        "quality=bad/0.parquet seems to be held out or",
    ),
    "rejected": (("rejected", "accepted"), "rejected.parquet seems to be held out or rejected"),
}


@pytest.mark.parametrize("kind", [*DOUBTFUL])
def test_names_that_say_test_and_would_not_be_taken_so_are_refused(kind: str, tmp_path: Path) -> None:
    names, message = DOUBTFUL[kind]
    folder = write(tmp_path / "data", names)
    with pytest.raises(SourceError, match=message):
        texts(folder, "train")
    assert "seems to be held out" in refused(folder, tmp_path / "out")


CARD = """---
license: mit
configs:
- config_name: default
  data_files:
  - {split: train, path: "a*.parquet"}
  - split: test
    path: [b.parquet, c.parquet]
---
# A set
"""


def test_splits_that_only_the_card_of_a_dataset_tells_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", ("a", "a2", "b", "c"))
    (folder / "README.md").write_text(CARD)
    with pytest.raises(SourceError, match=r"b\.parquet seems to be held out, but only the README\.md says so"):
        texts(folder, "train")
    assert "only the README.md says so" in refused(folder, tmp_path / "out")
    for name in ("b", "c"):
        (folder / f"{name}.parquet").unlink()
    assert texts(folder, "train") == ["a", "a2"]


@pytest.mark.parametrize("kind", ["pictures", "lists"])
def test_so_are_those_of_folders_of_pictures_and_of_lists(kind: str, tmp_path: Path) -> None:
    """`load_dataset` takes the card's word for them, too."""
    for name in ("a1/0.png", "a2/0.png", "b/0.png"):
        (path := tmp_path / "data" / name).parent.mkdir(parents=True)
        path.write_bytes(picture(0, "PNG"))
        if kind == "lists":
            path.with_name("metadata.jsonl").write_text('{"file_name": "0.png", "caption": "x"}\n')
    assert "only the README.md says so" not in convert(tmp_path / "data", tmp_path / "out", "--split-ratio", "1,0,0")
    card = CARD.replace('"a*.parquet"', '"a*/*"').replace("[b.parquet, c.parquet]", '"b/**"')
    (tmp_path / "data/README.md").write_text(card)
    assert "seems to be held out, but only the README.md says so" in refused(tmp_path / "data", tmp_path / "other")


def test_partitions_that_are_no_columns_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path / "data", ("lang=de/0", "lang=en/year=2024/0"))
    assert len(texts(folder, "train")) == 2
    assert "folders are partitions (lang, year), and rows do not have these as columns" in caplog.text


@pytest.mark.parametrize("card", ["# A set\n", "---\n[\n---\n", "---\nconfigs: 1\n---\n", "---\nlicense: mit\n---\n"])
def test_other_cards_say_nothing(card: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path / "data", ("a", "b"))
    (folder / "README.md").write_text(card)
    assert texts(folder, "train") == ["a", "b"]
    assert not caplog.text


def test_configurations_that_are_read_as_one_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """GSM8K: the same questions with other answers."""
    folder = write(tmp_path / "data", ("main/train-0", "socratic/train-0"))
    names = "".join(f"- {{config_name: {one}, data_files: {one}/train-*}}\n" for one in ("main", "socratic"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{names}---\n")
    assert len(texts(folder, "train")) == 2
    assert "its README.md has 2 configurations (main, socratic), and the files of all are taken" in caplog.text
    caplog.clear()
    assert len(texts(folder / "main", "train")) == 1
    assert not caplog.text


def test_files_of_no_split_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path / "data", ("train", "extra"))
    (folder / "notes.txt").write_text("x")
    with caplog.at_level(logging.WARNING):
        assert texts(folder, "train") == ["train"]
    assert "1 of 2 parquet files is not taken, such as extra.parquet" in caplog.text
    with pytest.raises(UnknownSplitError, match="Known split parts: train"):
        texts(folder, "val")
    said = convert(folder, tmp_path / "out")
    assert "Left out: 1 .parquet (of no split, but others are), 1 .txt (no table)." in said


def test_one_file_by_its_own_path_is_any_part(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", ("train", "test"))
    assert texts(folder / "test.parquet", "train") == ["test"]


def test_files_behind_urls_follow_the_same_rules() -> None:
    found = split_files([PurePosixPath(name) for name in ("b/test-1.parquet", "a/train-0.parquet")], "s3://x")
    assert [(part, str(name)) for part, name in found.files] == [
        ("train", "a/train-0.parquet"),
        ("test", "b/test-1.parquet"),
    ]


def members_of(root: Path, shards: list[str]) -> list[str]:
    found = []
    for shard in shards:
        with tarfile.open(root / shard) as archive:
            found += archive.getnames()
    return found


@pytest.mark.parametrize("names", [("train/0", "val/0"), ("x-train-000", "x-val-000")])
def test_tars_keep_the_split_of_their_names(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        write_tar(tmp_path / f"tars/{name}.tar", [(f"{'val' in name:d}.json", b"{}")])
    assert "train: 1 sample in 1 shard\nval: 1 sample in 1 shard" in convert(tmp_path / "tars", tmp_path / "out")
    parts = meta(tmp_path / "out", "split.yaml")["split_parts"]
    keys = {part: {*members_of(tmp_path / "out", shards)} for part, shards in parts.items()}
    assert {part: names for part, names in keys.items() if names} == {"train": {"0.json"}, "val": {"1.json"}}
    write_tar(tmp_path / "tars/heldout.tar", [("2.json", b"{}")])
    assert "heldout.tar seems to be held out" in refused(tmp_path / "tars", tmp_path / "other")
    ratio = ("--split-ratio", "1,0,0", "--non-interactive", "--sample-type", "CrudeWebdataset")
    assert "Warning: heldout.tar seems to be held out" in output_of("prepare", tmp_path / "tars", *ratio)


def test_tars_whose_names_say_nothing_are_dealt_out(tmp_path: Path) -> None:
    for name in ("train-0", "train-1"):
        write_tar(tmp_path / f"tars/{name}.tar", [(f"{name}.{n}.json", b"{}") for n in range(1)])
    assert "Split: train 9, val 1" in convert(tmp_path / "tars", tmp_path / "out")


# Saved datasets -------------------------------------------------------------------------------------------------------


def test_splits_of_any_name_that_the_library_saved(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", minversion="5")
    names = ("train", "dev", "validation", "extra")
    rows = {name: datasets.Dataset.from_dict({"text": [name]}) for name in names}
    datasets.DatasetDict(rows).save_to_disk(tmp_path / "saved")
    loaded = datasets.load_from_disk(str(tmp_path / "saved"))
    parts = table_parts(tmp_path / "saved")
    assert parts == ["train", "dev", "extra", "validation"]
    assert {part: texts(tmp_path / "saved", part) for part in parts} == {
        name: loaded[name]["text"][:] for name in names
    }


@pytest.mark.parametrize("content", ['{"step": 5}', "[]", "no JSON", ""])
def test_a_state_json_of_another_program_is_no_saved_dataset(content: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "data", ("one",))
    (folder / "state.json").write_text(content)
    assert texts(folder, "train") == ["one"]
    assert "1 sample" in convert(folder, tmp_path / "out")


@pytest.mark.parametrize("content", ['{"step": 5}', "", '{"_data_files": [{"name": "x"}]}'])
def test_a_saved_dataset_with_a_damaged_state_json_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/data-00000-of-00001.arrow").write_bytes(b"x")
    (tmp_path / "data/state.json").write_text(content)
    with pytest.raises(SourceError, match=r"state\.json: has no `_data_files` as `save_to_disk` writes them"):
        texts(tmp_path / "data", "train")


# Folders of pictures --------------------------------------------------------------------------------------------------


def pictures(folder: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / name)
    return folder


def parts_of(out: Path) -> dict[str, Any]:
    return {part: bool(shards) for part, shards in meta(out, "split.yaml")["split_parts"].items()}


@pytest.mark.parametrize(
    "names",
    [
        ("training/a/1.png", "training/b/2.png", "testing/a/3.png"),
        ("cats-train/a/1.png", "cats-train/b/2.png", "cats-test/a/3.png"),
        ("data/train/a/1.png", "data/train/b/2.png", "data/eval/a/3.png"),
        ("Train/a/1.png", "Train/b/2.png", "Test/a/3.png"),
    ],
)
def test_folders_of_classes_are_split_by_such_folders(names: tuple[str, ...], tmp_path: Path) -> None:
    said = convert(pictures(tmp_path / "in", *names), tmp_path / "out")
    assert "folder of classes, 3 samples" in said
    assert parts_of(tmp_path / "out") == {"train": True, "test": True} or parts_of(tmp_path / "out") == {
        "train": True,
        "val": False,
        "test": True,
    }


@pytest.mark.parametrize(
    "names",
    [("train/a/1.png", "train/b/2.png", "test/a/3.png", "extra/a/4.png"), ("trainset/1.png", "testset/2.png")],
)
def test_folders_that_say_test_beside_others_are_refused(names: tuple[str, ...], tmp_path: Path) -> None:
    assert "seems to be held out, but not all files" in refused(pictures(tmp_path / "in", *names), tmp_path / "out")


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    said = convert(pictures(tmp_path / "in", "plane/1.png", "train/2.png"), tmp_path / "out", "--split-ratio", "1,0,0")
    assert "folder of classes, 2 samples" in said


def test_a_stray_picture_does_not_take_the_labels(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "in", "a/1.png", "b/2.png", "3.png")
    assert "1 of 3 files are not in the folder of a class, such as 3.png" in refused(folder, tmp_path / "out")
    assert "3 samples" in convert(folder, tmp_path / "out", "--kind", "pairs")


@pytest.mark.parametrize(
    "names",
    [
        ("test tube/0.png", "beaker/0.png", "valley/0.png"),
        ("test_tube/0.png", "evaluation form/0.png", "training shoes/0.png", "cat/0.png"),
        ("ValidationStamp/0.png", "cat/0.png"),
        ("train/test tube/0.png", "train/cat/0.png"),
    ],
)
def test_classes_may_have_the_word_of_a_split_in_their_names(names: tuple[str, ...], tmp_path: Path) -> None:
    out = converted(pictures(tmp_path / "in", *names), tmp_path / "out", "--kind", "classes")
    found = {json.loads(data)["label_name"] for name, data in members(out).items() if name.endswith(".json")}
    assert found == {name.split("/")[-2] for name in names}
    assert "test" not in parts_of(out) or not parts_of(out)["test"]


@pytest.mark.parametrize(
    "names",
    [
        ("cats-test/0.png", "cats/0.png", "dogs/0.png"),
        ("my_test_images/0.png", "cat/0.png"),
        ("Test2/0.png", "cat/0.png"),
        ("held out cats/0.png", "cats/0.png"),
    ],
)
def test_folders_of_a_held_out_part_are_no_classes(names: tuple[str, ...], tmp_path: Path) -> None:
    assert "seems to be held out" in refused(pictures(tmp_path / "in", *names), tmp_path / "out")


# Columns that tell the split ------------------------------------------------------------------------------------------


def talk(number: int, **beside: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": "a"}]
    return {"messages": turns, **beside}


@pytest.mark.parametrize("column", ["split", "Subset", "usage"])
@pytest.mark.parametrize("held_out", ["test", "PrivateTest", "val2017", "dev"])
@pytest.mark.parametrize("kind", ["list", "table", "texts"])
def test_rows_that_say_that_they_are_held_out_stop_convert(
    column: str, held_out: str, kind: str, tmp_path: Path
) -> None:
    splits = ["train", "restval", "train", held_out, "train"]
    rows = [talk(number, **{column: split}) for number, split in enumerate(splits)]
    source = tmp_path / ("rows.json" if kind == "list" else "rows.parquet")
    if kind == "list":
        source.write_text(json.dumps(rows))
    else:
        texts = {"text": [f"t{number}" for number in range(5)], column: splits}
        parquet.write_table(arrow.Table.from_pylist(rows) if kind == "table" else arrow.table(texts), source)
    message = refused(source, tmp_path / "out", "--split-ratio", "1,0,0")
    assert f"`{column}` is {held_out!r}, and other rows are to be learned." in message
    skipping = convert(source, tmp_path / "without", "--split-ratio", "1,0,0", "--on-error", "skip")
    assert "train: 4 samples" in skipping
    assert "Skipped 1 sample:" in skipping
    assert "train: 5 samples" in convert(source, tmp_path / "all", "--split-ratio", "1,0,0", "--ignore", column)


@pytest.mark.parametrize(
    ("column", "values"),
    [("is_test", [False, True]), ("Is_Train", [1, 0]), ("in_train", ["true", "False"]), ("is_validation_set", [0, 1])],
)
def test_flags_say_which_rows_are_held_out(column: str, values: list[Any], tmp_path: Path) -> None:
    source = tmp_path / "rows.json"
    source.write_text(json.dumps([talk(number, **{column: values[number == 3]}) for number in range(5)]))
    message = refused(source, tmp_path / "out", "--split-ratio", "1,0,0")
    assert f"`{column}` is {values[1]!r}, and other rows are to be learned." in message
    assert "train: 5 samples" in convert(source, tmp_path / "all", "--split-ratio", "1,0,0", "--ignore", column)
    rows = [talk(number, **{column: None, "is_testament": number}) for number in range(5)]
    source.write_text(json.dumps(rows))
    assert "train: 5 samples" in convert(source, tmp_path / "none", "--split-ratio", "1,0,0")


def test_rows_that_are_all_held_out_are_converted(tmp_path: Path) -> None:
    source = tmp_path / "rows.json"
    source.write_text(json.dumps([talk(number, split="dev") for number in range(LOOKED_AT)]))
    assert f"train: {LOOKED_AT:,} samples" in convert(source, tmp_path / "out", "--split-ratio", "1,0,0")
    source.write_text(
        json.dumps([talk(number, split="dev" if number < LOOKED_AT else "train") for number in range(LOOKED_AT + 1)])
    )
    message = refused(source, tmp_path / "other", "--split-ratio", "1,0,0")
    assert "`split` is 'train', and other rows are held out." in message


def test_files_that_are_split_by_their_names_may_say_so_in_a_column(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "test"):
        parquet.write_table(arrow.table({"text": [split], "split": [split]}), folder / f"{split}.parquet")
    assert parts_of(converted(folder, tmp_path / "out")) == {"train": 1, "test": 1}
    source = tmp_path / "other.json"
    source.write_text(json.dumps([talk(0, subset="math"), talk(1, split="train", set="contest")]))
    assert "train: 2 samples" in convert(source, tmp_path / "two", "--split-ratio", "1,0,0")


# Tables that are more than their files --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "of"),
    [
        ("_delta_log/00000000000000000000.json", "Delta"),
        (".hoodie/hoodie.properties", "Hudi"),
        ("metadata/v1.metadata.json", "Iceberg"),
    ],
)
def test_tables_with_a_log_of_changes_are_refused(log: str, of: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "data", ("a", "b"))
    (folder / log).parent.mkdir()
    (folder / log).write_text("{}")
    assert f"is a table of {of}: its log says" in refused(folder, tmp_path / "out")
    with pytest.raises(SourceError, match=f"is a table of {of}: its log says"):
        texts(folder, "train")


@pytest.mark.parametrize(
    ("names", "index", "of"),
    [
        (["_versions/1.manifest", "data/a.lance", "_transactions/0-a.txn"], {}, "Lance"),
        (["index.json", "chunk-0-0.bin"], {"chunks": [], "config": {"data_format": ["pil"]}}, "litdata"),
        (["train/index.json", "train/shard.00000.mds"], {"version": 2, "shards": [{"format": "mds"}]}, "MosaicML"),
        (["meta/info.json", "videos/top/a.mp4"], {"codebase_version": "v3.0", "fps": 10}, "LeRobot"),
    ],
)
def test_sets_that_only_their_library_reads_are_named(
    names: list[str], index: dict[str, Any], of: str, tmp_path: Path
) -> None:
    """Also beside pictures or tables, as LeRobot has them."""
    for name in names:
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text(json.dumps(index) if name.endswith(".json") else "")
    assert f"is of {of}" in refused(tmp_path / "data", tmp_path / "out")
    write(tmp_path / "data", ("a", "b"))
    assert "ShardWriter" in refused(tmp_path / "data", tmp_path / "out")
    with pytest.raises(SourceError, match=f"is of {of}"):
        texts(tmp_path / "data", "train")


def test_half_written_files_are_not_taken_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path / "data", ("part-0", "_temporary/0/part-1", "_spark_metadata/x"))
    assert texts(folder, "train") == ["part-0"]
    assert "2 of 3 parquet files are not taken, such as _spark_metadata/x.parquet" in caplog.text
