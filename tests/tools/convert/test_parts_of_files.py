"""Texts about a part of a file: a region, frames, a page, a channel; and files and labels that share a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from delivered import delivered
from PIL import Image
from sources import convert, picture, refused, write_pictures

from energon_bridge.core.errors import SourceError

ALL = ("--split-ratio", "1,0,0")
ASKED = {"question": "What is it?", "answer": "x"}


def lines(folder: Path, *rows: dict[str, Any]) -> Path:
    write_pictures(folder, ["a.png"])
    pages = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    for name in ("a.tif", "a.gif"):
        pages[0].save(folder / name, save_all=True, append_images=pages[1:])
    for name in ("a.mp4", "a.wav"):
        (folder / name).write_bytes(b"")  # never opened
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def table(folder: Path, *rows: dict[str, Any]) -> Path:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    shown = [{"image": {"bytes": picture(0), "path": "0.jpg"}, **row} for row in rows]
    parquet.write_table(arrow.Table.from_pylist(shown), folder / "rows.parquet")
    return folder / "rows.parquet"


PARTS: list[tuple[str, Any, str, str]] = [
    ("crop", [1, 2, 30, 40], "image", "a.png"),
    ("crop_box", "[1, 2, 30, 40]", "image", "a.png"),
    ("roi", {"x": 1, "y": 2, "w": 3, "h": 4}, "image", "a.png"),
    ("target_region", [[1, 2], [30, 40]], "image", "a.png"),
    ("page", 1, "image", "a.tif"),
    ("pageNumber", "2", "image", "a.tif"),
    ("frame_idx", 1, "image", "a.gif"),
    ("frame_indices", [0, 8, 16], "video", "a.mp4"),
    ("keyframes", [8], "video", "a.mp4"),
    ("sampled_frames", [0, 8], "video", "a.mp4"),
    ("frame", 0, "video", "a.mp4"),
    ("crop", [1, 2, 30, 40], "video", "a.mp4"),
    ("channel", 1, "audio", "a.wav"),
    ("audio_channel", "left", "audio", "a.wav"),
]


@pytest.mark.parametrize("form", ["pair", "turns"])
@pytest.mark.parametrize(("name", "value", "kind", "file"), PARTS)
def test_parts_of_files_are_refused_by_name(
    name: str, value: Any, kind: str, file: str, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    turns = {"messages": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "x"}]}
    row = {kind: file, **(turns if form == "turns" else ASKED), name: value}
    path = lines(tmp_path, row)
    told = refused(path, tmp_path / "out", *ALL)
    assert f"`{name}` is {value}, which seems to be a" in told or (value, form) == ("left", "pair")
    assert f"--ignore {name}" in told
    convert(path, tmp_path / "whole", *ALL, "--ignore", name)
    if kind == "image":
        assert len(delivered(tmp_path / "whole")) == 1
        content = {name: one for name, one in row.items() if name != "image"}
        with pytest.raises(Exception, match="skipped"):
            delivered(_tar(tmp_path / "tars", content, tmp_path / file))
        assert f"`{name}` is {value}, which seems to be a" in caplog.text


def _tar(folder: Path, content: dict[str, Any], image: Path) -> Path:
    from commands import output_of
    from tar_builder import write_tar

    write_tar(folder / "a.tar", [("0.json", json.dumps(content).encode()), (f"0.0{image.suffix}", image.read_bytes())])
    output_of("prepare", folder, *ALL, "--sample-type", "CrudeWebdataset")
    return folder


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, value, kind, file in PARTS if file == "a.png"])
@pytest.mark.parametrize("beside", [{"caption": "A dog."}, ASKED, {"label": 3}])
def test_tables_are_refused_when_they_are_opened(name: str, value: Any, beside: dict[str, Any], tmp_path: Path) -> None:
    path = table(tmp_path, {**beside, name: value})
    with pytest.raises(SourceError, match=f"`{name}` is .*, which seems to be a region of the image"):
        delivered(path)
    assert "which seems to be a region" in refused(path, tmp_path / "out", *ALL)
    convert(path, tmp_path / "whole", *ALL, "--ignore", name)
    assert len(delivered(tmp_path / "whole")) == 1


@pytest.mark.parametrize("beside", [{"query_time": 4.5}, {"frame_idx": 4}])
def test_numbers_in_names_of_files_and_ids_are_not_those_of_texts(tmp_path: Path, beside: dict[str, Any]) -> None:
    """The 4 of `a.mp4`."""
    path = lines(tmp_path, {"id": "7_4.5", "video": "a.mp4", **ASKED, **beside})
    assert f"`{next(iter(beside))}` is" in refused(path, tmp_path / "out", *ALL)


MARKED: list[dict[str, Any]] = [
    {
        "question": "What is <boxes>?",
        "answer": "x<boxes>",
        "boxes": [[1, 2, 3, 4]],
        "boxes_seq": [[0]],
    },  # Shikra
    {"question": "What is <region1>?", "answer": "x", "annotation": [{"bbox": [1, 2, 3, 4]}]},  # Osprey
    {"question": "Where is <ref-object>?", "answer": "<bbox>", "objects": '{"ref": ["dog"], "bbox": [[1, 2, 3, 4]]}'},
    {"caption": "<mask> a dog", "masks": [[1, 2, 3]]},
]


@pytest.mark.parametrize("row", MARKED)
def test_places_that_a_column_is_to_fill_are_not_learned(row: dict[str, Any], tmp_path: Path) -> None:
    path = lines(tmp_path, {"image": "a.png", **row})
    column = next(name for name in row if name in ("boxes", "annotation", "objects", "masks"))
    assert f"has `{column}` for the places" in refused(path, tmp_path / "out", *ALL)
    with pytest.raises(SourceError, match=f"has `{column}` for the places"):
        delivered(table(tmp_path, row))
    others = ["--ignore", "boxes_seq"] * ("boxes_seq" in row)
    convert(path, tmp_path / "out", *ALL, "--ignore", column, *others)
    said = {**ASKED, "answer": "<box>(1,2),(3,4)</box>", "boxes": [[1, 2, 3, 4]]}  # Qwen-VL
    for number, other in enumerate((said, {**ASKED, "question": "What is <region1>?"})):
        convert(lines(tmp_path, {"image": "a.png", **other}), tmp_path / f"said{number}", *ALL)


@pytest.mark.parametrize("key", ["time", "timestamp", "question_time"])
def test_times_of_turns_are_not_seen(key: str, tmp_path: Path) -> None:
    """Questions while a video runs."""
    asked = {"role": "user", "content": "What is it?"}
    said = {"role": "assistant", "content": "It is x."}
    path = lines(tmp_path, {"video": "a.mp4", "messages": [{**asked, key: 1.5}, {**said, key: 2.5}]})
    assert f"a turn has `{key}` '1.5', one time in the video" in refused(path, tmp_path / "out", *ALL)
    for number, time in enumerate((0, "2024-01-01T10:00:00", 1.7e9, None)):
        path = lines(tmp_path, {"video": "a.mp4", "messages": [{**asked, key: time}, said]})
        convert(path, tmp_path / f"out{number}", *ALL)


NO_PARTS: list[tuple[str, dict[str, Any]]] = [
    ("a.png", {"crop": "wheat"}),
    ("a.png", {"region": "Europe"}),
    ("a.png", {"crop_size": [224, 224]}),
    ("a.png", {"region": [1, 2, 30, 40], "question": "What is at [1, 2, 30, 40]?"}),
    ("a.png", {"page": 3, "page_number": 4, "frame_idx": 12}),  # a picture of a page, of a video
    ("a.tif", {"page": 0, "num_pages": 2, "answer_page_idx": 1, "page_ids": ["p1", "p2"]}),
    ("a.png", {"objects": {"bbox": [[1, 2, 3, 4]], "category": [1]}}),  # CPPE-5
    ("a.png", {"words": ["a"], "boxes": [[1, 2, 3, 4]]}),  # FUNSD
    ("a.png", {"bbox": [1.2, 2, 30, 40], "answer": "[1, 2, 30, 40]"}),
    ("a.png", {"bbox": [[1, 2, 3, 4], [5, 6, 7, 8]], "width": 640, "height": 480, "layer": 2}),
    ("a.mp4", {"frames": 120, "num_frames": 120, "frame_count": 120, "channel": "BBC", "channel_id": "UCx1"}),
    ("a.mp4", {"frame": 12, "answer": "In frame 12."}),
    ("a.wav", {"channel": 0, "channels": 2, "num_channels": 2}),
]


@pytest.mark.parametrize(("file", "beside"), NO_PARTS)
def test_what_is_no_part_is_left_beside(
    file: str, beside: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind = {"mp4": "video", "wav": "audio"}.get(file[2:], "image")
    flags = [flag for name in beside if name in ("words",) for flag in ("--ignore", name)]
    convert(lines(tmp_path, *[{kind: file, **ASKED, **beside}] * 4), tmp_path / "out", *ALL, *flags)
    assert "is a place" not in caplog.text


@pytest.mark.parametrize("form", ["pair", "turns"])
def test_the_first_channel_is_named(form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A sound of one channel has it, and of several it is a part; files are not opened for it."""
    turns = {"messages": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "x"}]}
    row = {"audio": "a.wav", **(turns if form == "turns" else ASKED), "channel": 0}
    convert(lines(tmp_path, row, row), tmp_path / "out", *ALL)
    assert caplog.text.count("`channel` of a sample is 0, as the first channel of its audio") == 1
    caplog.clear()
    convert(lines(tmp_path, row), tmp_path / "whole", *ALL, "--ignore", "channel")
    assert "first channel" not in caplog.text


def test_a_box_without_a_text_is_a_label(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """COCO; CUB-200."""
    for label in ({"category_id": 3}, {"label": 3}):
        convert(lines(tmp_path, {"image": "a.png", "bbox": [1, 2, 30, 40], **label}), tmp_path / str(label), *ALL)
    assert not caplog.text


@pytest.mark.parametrize(
    ("beside", "named"),
    [
        ({"bbox": [1, 2, 30, 40]}, "`bbox`"),
        ({"x": 1, "y": 2, "w": 3, "h": 40}, "`x, y, w, h`"),
        ({"point": {"x": 3, "y": 4.5}}, "`point`"),
    ],
)
@pytest.mark.parametrize("door", ["lists", "tables", "captions"])
def test_one_box_beside_a_text_is_named(
    beside: dict[str, Any], named: str, door: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As lmms-lab's RefCOCO: the question is about the region, or the box is a label; nobody can know."""
    said = {"caption": "A dog."} if door == "captions" else {**ASKED, "context": "It is a dog."}
    if door == "lists":
        convert(lines(tmp_path, *[{"image": "a.png", **said, **beside}] * 2), tmp_path / "out", *ALL)
    else:
        delivered(table(tmp_path, *[{**said, **beside}] * 2))
    assert caplog.text.count(f"{named} of a sample is a place") == 1


# Texts that a label, or two files, share ------------------------------------------------------------------------------


def judged(column: str, **beside: Any) -> list[dict[str, Any]]:
    return [{column: f"Two women number {n} are talking.", "label": n % 2, **beside} for n in range(4)]


@pytest.mark.parametrize("column", ["hypothesis", "premise", "sentence", "text"])
def test_a_text_that_a_label_may_be_about_is_named(column: str, tmp_path: Path) -> None:
    """SNLI-VE, Hateful Memes: an image and a text, and what they are together."""
    path = table(tmp_path, *judged(column))
    told = refused(path, tmp_path / "out", *ALL)
    assert f"`label` may be about the image and the text in `{column}` ('Two women number 0 are talking.')" in told
    with pytest.raises(SourceError, match=f"the text in `{column}`"):
        delivered(path)
    convert(path, tmp_path / "labels", *ALL, "--ignore", column)
    assert [int(one.label) for one in delivered(tmp_path / "labels")] == [0, 1, 0, 1]
    convert(path, tmp_path / "asked", *ALL, "--question", f"Is it true? {{{column}}}")
    turns = [[turn["content"] for turn in one.messages] for one in delivered(tmp_path / "asked")]
    assert turns == [[f"Is it true? Two women number {n} are talking.", str(n % 2)] for n in range(4)]
    assert ("--ignore label" in told) is (column == "text")
    if column == "text":
        convert(path, tmp_path / "captions", *ALL, "--ignore", "label")
        assert [one.caption for one in delivered(tmp_path / "captions")] == [row["text"] for row in judged("text")]
        meta = tmp_path / ".nv-meta"
        meta.mkdir()
        kind = "sample_type: {__module__: megatron.energon, __class__: CaptioningSample}\n"
        (meta / "dataset.yaml").write_text(f"{kind}field_map: {{image: image, caption: text}}\n")
        assert len(delivered(path)) == 4


def test_a_caption_that_a_label_calls_wrong_is_named(tmp_path: Path) -> None:
    """VSR: `The cat is under the bed.`, label 0."""
    path = table(tmp_path, *[{"caption": "The cat is under the bed.", "label": label} for label in (0, 1, 0)])
    assert "`label` may be about the image and the text in `caption`" in refused(path, tmp_path / "out", *ALL)
    with pytest.raises(SourceError, match="the text in `caption`"):
        delivered(path)
    convert(path, tmp_path / "out", *ALL, "--ignore", "label")
    assert len(delivered(tmp_path / "out")) == 3


def test_names_of_labels_are_the_answers_of_a_template(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    names = {"label": {"_type": "ClassLabel", "names": ["no", "yes"]}}
    rows = [{"image": {"bytes": picture(0), "path": None}, **row} for row in judged("hypothesis")]
    meta = {"huggingface": json.dumps({"info": {"features": names}})}
    parquet.write_table(arrow.Table.from_pylist(rows).replace_schema_metadata(meta), tmp_path / "rows.parquet")
    convert(tmp_path / "rows.parquet", tmp_path / "out", *ALL, "--question", "{hypothesis}")
    assert [one.messages[1]["content"] for one in delivered(tmp_path / "out")] == ["no", "yes", "no", "yes"]


@pytest.mark.parametrize(
    "beside",
    [
        {"label_name": "Siamese cat", "wnid": "n02123597", "filename": "a b c d.jpg"},
        {"url": "http://a.b/c d e f", "licence": "Attribution Share Alike 4.0", "source": "a set of some name"},
        {"artist": "Vincent"},
        {"hypothesis": ""},
    ],
)
def test_what_says_nothing_of_a_label_is_left_beside(beside: dict[str, Any], tmp_path: Path) -> None:
    path = table(tmp_path, *[{"label": n, **beside} for n in range(3)])
    assert len(delivered(path)) == 3
    convert(path, tmp_path / "out", *ALL)


def test_a_text_of_the_class_is_no_text_of_the_picture(tmp_path: Path) -> None:
    rows = [{"label": n % 2, "gloss": f"a domesticated mammal of kind {n % 2}"} for n in range(4)]
    assert len(delivered(table(tmp_path, *rows))) == 4
    captions = [{"caption": f"A thing, number {n}.", "label": n, "category": "x"} for n in range(4)]
    assert delivered(table(tmp_path, *captions))[3].caption == "A thing, number 3."


@pytest.mark.parametrize("other", ["a.jpg", "a.mp4", "a.PNG"])
@pytest.mark.parametrize("text", ["a.txt", "a.json"])
def test_a_caption_beside_two_files_is_neither_of_theirs(other: str, text: str, tmp_path: Path) -> None:
    write_pictures(tmp_path / "in", ["a.png", "b.png", "c.png"])
    (tmp_path / "in" / other).write_bytes(picture(1))
    for name in (text, "b" + text[1:], "c" + text[1:]):
        (tmp_path / "in" / name).write_text('{"caption": "One."}' if text.endswith("json") else "One.")
    told = refused(tmp_path / "in", tmp_path / "out", *ALL)
    assert "has the same caption beside it" in told
    assert {"a.png", other} <= {word.rpartition("/")[2].strip(":") for word in told.split()}
    said = convert(tmp_path / "in", tmp_path / "out", *ALL, "--on-error", "skip")
    assert "train: 2 samples" in said
    assert "Skipped 2 samples:" in said
    (tmp_path / "in" / other).unlink()
    assert "train: 3 samples" in convert(tmp_path / "in", tmp_path / "whole", *ALL)


def test_classes_may_have_files_of_one_name(tmp_path: Path) -> None:
    write_pictures(tmp_path / "in", ["x/a.png", "x/a.jpg", "y/a.png"])
    assert "train: 3 samples" in convert(tmp_path / "in", tmp_path / "out", *ALL)
