"""Forms of public sets: pairs (the_cauldron, FineVision, Docmatix), conversations as JSON text, imagefolders."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import output_of, refusal_of
from delivered import delivered
from PIL import Image, ImageColor

from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.testing import write_shard

Rows = Sequence[Mapping[str, Any]]


def png(color: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (6, 4), color).save(file, "PNG")
    return file.getvalue()


def convert(source: Path, out: Path, *flags: object) -> str:
    return output_of("convert", source, out, "--no-progress", *flags)


COLORS = (["red", "blue"], ["green"], [])
TEXTS = (
    [{"user": "One?", "assistant": "Red.", "source": "x"}, {"user": "Two?", "assistant": "Blue.", "source": "x"}],
    [{"user": "What?", "assistant": "Green.", "source": "y"}],
    [{"user": "Hello", "assistant": "Hi", "source": "z"}],
)


def of_nanovlm(texts: Rows) -> list[dict[str, str]]:
    """Return messages as nanoVLM's `_get_messages` makes them of a row, before it puts the images first."""
    messages = []
    for text in texts:
        messages.append({"role": "user", "content": text["user"]})
        messages.append({"role": "assistant", "content": text["assistant"]})
    return messages


def as_table(folder: Path) -> Path:
    images = [[{"bytes": png(color), "path": None} for color in colors] for colors in COLORS]
    ratings = [[4] * len(texts) for texts in TEXTS]
    table = pa.table({"images": images, "texts": TEXTS, "source": ["s"] * 3, "relevance_ratings": ratings})
    pq.write_table(table, folder / "train-00000-of-00001.parquet")
    return folder / "train-00000-of-00001.parquet"


def as_list(folder: Path) -> Path:
    for color in {color for colors in COLORS for color in colors}:
        (folder / f"{color}.png").write_bytes(png(color))
    rows = [
        {"images": [f"{color}.png" for color in colors], "texts": texts}
        for colors, texts in zip(COLORS, TEXTS, strict=True)
    ]
    (folder / "list.json").write_text(json.dumps(rows))
    return folder / "list.json"


def as_tars(folder: Path) -> Path:
    samples = {
        str(number): {
            **{f"{at}.png": png(color) for at, color in enumerate(colors)},
            "json": json.dumps({"texts": texts}).encode(),
        }
        for number, (colors, texts) in enumerate(zip(COLORS, TEXTS, strict=True))
    }
    (folder / "tars").mkdir()
    write_shard(folder / "tars/0.tar", samples)
    yaml = render_dataset_yaml("CrudeWebdataset", {})
    prepare_dataset(folder / "tars", split=parse_patterns(["train:.*"]), dataset_yaml=yaml)
    return folder / "tars"


@pytest.mark.parametrize("write", [as_table, as_list, as_tars])
def test_pairs_of_texts_are_conversations(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    source = write(tmp_path)
    paths = [source] if write is not as_list else []  # a list must be converted
    if write is not as_tars:
        convert(source, tmp_path / "out", "--split-ratio", "1,0,0")
        paths.append(tmp_path / "out")
    for path in paths:
        talks = delivered(path)
        assert [list(map(dict, talk.messages)) for talk in talks] == [of_nanovlm(texts) for texts in TEXTS]
        shown = [[(255 * image[:, 0, 0]).round().tolist() for image in talk.images or ()] for talk in talks]
        assert shown == [[list(ImageColor.getrgb(color)) for color in colors] for colors in COLORS]


def test_texts_that_are_no_pairs_stay_texts(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png("red"))
    (tmp_path / "list.json").write_text(json.dumps([{"image": "a.png", "texts": ["one", "two"], "caption": "c"}] * 2))
    assert "caption from caption" in convert(tmp_path / "list.json", tmp_path / "out", "--split-ratio", "1,0,0")


TURNS = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "Red."}]


def csv_of(path: Path, rows: Rows) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("column", ["messages", "conversations", "conversation"])
def test_conversations_as_json_text(tmp_path: Path, form: str, column: str) -> None:
    (tmp_path / "a.png").write_bytes(png("red"))
    rows = [
        {"images": '["a.png"]', column: json.dumps(TURNS)},
        {"images": '["a.png"]', column: json.dumps({"messages": [{"role": "user", "content": "What?"}, TURNS[1]]})},
    ]
    path = tmp_path / f"rows.{form}"
    if form == "csv":
        csv_of(path, rows)
    elif form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        image = [{"bytes": png("red"), "path": None}]
        pq.write_table(pa.table({"images": [image, image], column: [row[column] for row in rows]}), path)
    convert(path, tmp_path / "out", "--split-ratio", "1,0,0")
    for source in (tmp_path / "out", path) if form == "parquet" else (tmp_path / "out",):
        talks = delivered(source)
        assert [[turn.get("value") or turn["content"] for turn in talk.messages] for talk in talks] == [
            ["<image>\nWhat?", "Red."],
            ["What?", "Red."],
        ]
        assert [len(talk.images) for talk in talks] == [1, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [("[{", "`messages`: expected JSON, found '[{'"), ("Q: hi", "expected a list of turns"), ("[]", "turns")],
)
def test_text_that_is_no_conversation_is_refused(tmp_path: Path, text: str, message: str) -> None:
    good = {"messages": json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])}
    path = csv_of(tmp_path / "rows.csv", [good, {"messages": text}])
    told = refusal_of("convert", path, tmp_path / "out", "--split-ratio", "1,0,0")
    assert "row 3" in told
    assert message in told


# Imagefolders --------------------------------------------------------------------------------------------------------


def rows_of(part: str, count: int) -> list[dict[str, str]]:
    return [{"file_name": f"{n}.png", "caption": f"{part} {n}"} for n in range(count)]


def written(folder: Path, form: str, rows: list[dict[str, str]]) -> None:
    (folder / "sub").mkdir(parents=True)
    rows[0]["file_name"] = f"sub/{rows[0]['file_name']}"
    for row in rows:
        (folder / row["file_name"]).write_bytes(png("red"))
    (folder / "extra.png").write_bytes(png("blue"))
    if form == "csv":
        csv_of(folder / "metadata.csv", rows)
    elif form == "jsonl":
        (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), folder / "metadata.parquet")


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("names", [("train", "validation", "test"), ("data/train", "data/dev", "data/test")])
def test_imagefolders_with_metadata_for_each_split(tmp_path: Path, form: str, names: tuple[str, ...]) -> None:
    """As `load_dataset("imagefolder", data_dir=...)` reads them."""
    counts = (3, 2, 1)
    for name, count in zip(names, counts, strict=True):
        written(tmp_path / "photos" / name, form, rows_of(name, count))
    told = convert(tmp_path / "photos", tmp_path / "out")
    assert "Split: train 3, val 2, test 1" in told
    assert f"{names[1]}: 1 .png (not named in metadata.{form})" in told
    for part, name, count in zip(("train", "val", "test"), names, counts, strict=True):
        samples = delivered(tmp_path / "out", part)
        assert [sample.caption for sample in samples] == [f"{name} {n}" for n in range(count)]
        assert all(sample.image.shape == (3, 4, 6) for sample in samples)


def test_folders_of_which_some_are_splits_are_refused(tmp_path: Path) -> None:
    for name in ("train", "more"):
        written(tmp_path / "photos" / name, "csv", rows_of(name, 2))
    told = refusal_of("convert", tmp_path / "photos", tmp_path / "out")
    assert "photos/more is of no split" in told
    (tmp_path / "photos/train").rename(tmp_path / "photos/less")
    told = convert(tmp_path / "photos", tmp_path / "out", "--split-ratio", "1,0,0")
    assert [sample.caption for sample in delivered(tmp_path / "out")] == ["train 0", "train 1", "more 0", "more 1"]


@pytest.mark.parametrize(
    ("column", "name"),
    [
        ("filename", "1000092795.jpg"),  # Flickr30k
        ("question_id", "code_reasoning/0020.png"),  # MME
        ("file", "374-180298-0000.flac"),  # LibriSpeech
        ("original_full_path", "audio/podcast/P0001.opus"),  # GigaSpeech
    ],
)
def test_names_of_files_beside_contents_are_texts(tmp_path: Path, column: str, name: str) -> None:
    row = {column: name, "image": {"bytes": png("red"), "path": None}, "caption": "A red square."}
    pq.write_table(pa.Table.from_pylist([row, row]), tmp_path / "train.parquet")
    convert(tmp_path / "train.parquet", tmp_path / "out", "--split-ratio", "1,0,0")
    for path in (tmp_path / "train.parquet", tmp_path / "out"):
        samples = delivered(path)
        assert [sample.caption for sample in samples] == ["A red square."] * 2
        assert [sample.image.shape for sample in samples] == [(3, 4, 6)] * 2


def test_files_that_are_there_are_media_beside_contents_too(tmp_path: Path) -> None:
    (tmp_path / "mask.png").write_bytes(png("blue"))
    row = {"image": {"bytes": png("red"), "path": None}, "annotated": "mask.png", "caption": "A red square."}
    pq.write_table(pa.Table.from_pylist([row, row]), tmp_path / "train.parquet")
    printed = convert(tmp_path / "train.parquet", tmp_path / "out", "--split-ratio", "1,0,0")
    assert "annotated.png" in printed


def test_files_of_a_column_of_media_must_be_there(tmp_path: Path) -> None:
    row = {"image": {"bytes": png("red"), "path": None}, "video": "gone.mp4", "caption": "A red square."}
    pq.write_table(pa.Table.from_pylist([row, row]), tmp_path / "train.parquet")
    assert "gone.mp4" in refusal_of("convert", tmp_path / "train.parquet", tmp_path / "out", "--split-ratio", "1,0,0")


def test_texts_and_pictures_in_turn_are_refused_with_a_remedy(tmp_path: Path) -> None:
    """OBELICS, whose lists have nulls where the other list has something."""
    image = {"bytes": png("red"), "path": None}
    table = pa.table({"images": [[None, image]] * 2, "texts": [["What?", None]] * 2})
    pq.write_table(table, tmp_path / "rows.parquet")
    said = refusal_of("convert", tmp_path / "rows.parquet", tmp_path / "out", "--no-progress")
    assert "found null. Of texts and pictures in turn (OBELICS), make messages" in said
