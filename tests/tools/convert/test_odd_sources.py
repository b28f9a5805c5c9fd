"""Odd lists, folders and tars: what would be lost, or taken for something else, is refused by name or taken."""

from __future__ import annotations

import base64
import io
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sources import convert, converted, members, picture, refused
from tar_builder import write_tar

from energon_bridge.core.errors import DuplicateKeyError
from energon_bridge.core.format.nvmeta import read_info
from energon_bridge.core.format.tar_index import scan_tar
from energon_bridge.core.storage import open_store
from energon_bridge.models.images.images import decode_image, image_form

ALL = ["--split-ratio", "0,1,0"]
PNG = picture(1, "PNG")


def listed(folder: Path, *lines: str, name: str = "list.jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "a.png").write_bytes(PNG)
    (folder / "plain").write_bytes(PNG)
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder / name


@pytest.mark.parametrize(
    "image",
    [
        *({"path": "a.png"}, "plain", "file://a.png", f"data:image/png;base64,{base64.b64encode(PNG).decode()}"),
        base64.encodebytes(PNG).decode(),
    ],
)
def test_images_however_they_are_named(tmp_path: Path, image: object) -> None:
    source = listed(tmp_path / "in", json.dumps({"image": image, "caption": "x"}))
    out = converted(source, tmp_path / "out", *ALL)
    named = next((name for name in ("a.png", "plain") if name in str(image)), None)
    said = {"caption": "x"} | ({"files": [named]} if named else {})
    found = members(out)
    assert (found.pop("000000000.png"), json.loads(found.pop("000000000.json")), found) == (PNG, said, {})


@pytest.mark.parametrize(
    "image", [{"url": "a.png"}, "a", "a.png?x=1", 7, "https://a.b/c", base64.b64encode(PNG).decode()[:40] + "…"]
)
def test_columns_of_images_are_no_texts(tmp_path: Path, image: object) -> None:
    source = listed(tmp_path / "in", json.dumps({"image": image, "caption": "x"}))
    what = "contains base64" if str(image).startswith("iVBOR") else "has no files"
    assert f"the column `image` {what}" in refused(source, tmp_path / "out")
    remedied = converted(source, tmp_path / "out2", *ALL, "--sample-type", "CrudeSample")
    assert json.loads(members(remedied)["000000000.json"]) == {"image": image, "caption": "x"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"image": "a.png", "caption": "\\ud800"}', "half of a surrogate pair"),
        ('{"image": "a.png", "caption": "x"}\n{"image": "\\u0000.png", "caption": "x"}', "embedded null"),
        ('{"image": "a.png", "label": "--5"}', "`label` is '--5', but the field `label` is int"),
        ('{"image": "a.png", "label": "\u00b2"}', "but the field `label` is int"),
        ('{"image": "a.png", "caption": {"en": "x"}}', "but the field `caption` is str"),
        ('{"image": "a.png", "caption": "x", "caption": "y"}', "line 1: not valid JSON: an object has 'caption' twice"),
        ('{"image": ["a.png", null], "caption": "x"}', "`image`: expected the path of a file, found null"),
    ],
)
def test_values_that_do_not_fit(tmp_path: Path, line: str, message: str) -> None:
    assert message in refused(listed(tmp_path / "in", line), tmp_path / "out", *ALL)


@pytest.mark.parametrize(
    ("good", "bad", "field", "kept"),
    [
        ({"caption": "x"}, {"caption": ["x", "y"]}, "caption from caption\n", 5),
        ({"caption": ["x", "y"]}, {"caption": "x"}, "caption from caption[0]\n", 5),
        ({"caption": "x"}, {"image": ["a.png"]}, "caption from caption\n", 6),
        ({"caption": "x"}, {"image": "a.png "}, "caption from caption\n", 6),
        ({"caption": "x"}, {"image": "nowhere/a"}, "caption from caption\n", 5),
        ({"label": 1}, {"label": None}, "label from label\n", 6),
    ],
)
def test_a_bad_row_does_not_decide_for_the_others(
    tmp_path: Path, good: dict[str, object], bad: dict[str, object], field: str, kept: int
) -> None:
    rows = [{"image": "a.png", **good, **(bad if number == 2 else {})} for number in range(6)]
    source = listed(tmp_path / "in", "\n".join(map(json.dumps, rows)))
    shown = convert(source, tmp_path / "out", *ALL, "--on-error", "skip")
    assert f"  image from image\n  {field}" in shown
    assert sum(read_info(open_store(tmp_path / "out")).shard_counts.values()) == kept


def test_columns_without_fields_are_said_and_names_of_fields_suffice(tmp_path: Path) -> None:
    row = {"image": ["a.png", "a.png"], "caption": "x"}
    source = listed(tmp_path / "in", json.dumps(row))
    said = (
        "Sample type: CrudeSample\n  all columns as they are, and no fields: training needs a cooker, or another --sam"
    )
    assert said in convert(source, tmp_path / "out", *ALL)
    shown = convert(source, tmp_path / "out2", *ALL, "--sample-type", "CaptioningSample")
    assert "  image from image[0]\n  caption from caption\n" in shown
    assert "  only the first file of image is used; to keep all: --sample-type CrudeSample\n" in shown
    question = (*ALL, "--question", "What?", "--field", "answers=caption")
    asked = convert(source, tmp_path / "out3", *question)
    assert "  to show image, too: leave out --field, with the answers in a column `answer`\n" in asked
    one = listed(tmp_path / "one", json.dumps({"image": ["a.png"], "caption": "x"}))
    assert "only the first" not in convert(one, tmp_path / "out4", *question)


def test_numbers_are_captions_as_in_a_csv(tmp_path: Path) -> None:
    source = listed(tmp_path / "in", '{"image": "a.png", "caption": 5}')
    assert members(converted(source, tmp_path / "out", *ALL))["000000000.json"] == b'{"caption":"5","files":["a.png"]}'


def test_tables_without_a_header(tmp_path: Path) -> None:
    source = listed(tmp_path / "in", "a.png,x", "a.png,y", name="list.csv")
    assert "the first line has names of columns, but 'a.png' names a file" in refused(source, tmp_path / "out")


def test_splits_in_any_case_are_no_classes(tmp_path: Path) -> None:
    for name in ("Train/cat", "Train/dog", "Testing/cat", "Testing/dog"):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "a.png").write_bytes(PNG)
    out = converted(tmp_path / "in", tmp_path / "out")
    assert {json.loads(data)["label_name"] for name, data in members(out).items() if name.endswith("json")} == {
        "cat",
        "dog",
    }
    assert sorted(one.name for one in out.iterdir() if not one.name.startswith(".")) == ["test", "train"]


@pytest.mark.parametrize(("name", "text"), [("a.txt", "caf\u00e9".encode("latin-1")), ("a.json", b"{bad")])
def test_captions_that_cannot_be_decoded(tmp_path: Path, name: str, text: bytes) -> None:
    listed(tmp_path / "in").unlink()
    (tmp_path / "in/plain").unlink()
    (tmp_path / "in" / name).write_bytes(text)
    assert f"{name}: is not {'JSON' if 'json' in name else 'UTF-8'}" in refused(tmp_path / "in", tmp_path / "out", *ALL)
    (tmp_path / "in/b.png").write_bytes(PNG)
    (tmp_path / "in" / name.replace("a", "b")).write_text('{"caption": "a dog"}')
    assert "Skipped 1 sample" in convert(tmp_path / "in", tmp_path / "out", *ALL, "--on-error", "skip")


def test_names_that_are_not_utf8_and_links_to_folders(tmp_path: Path) -> None:
    listed(tmp_path / "in").unlink()
    (tmp_path / "in/link").symlink_to(tmp_path)
    (tmp_path / "in/b.png").write_bytes(PNG)
    with open(os.fsencode(tmp_path / "in") + b"/\xff.png", "wb") as file:
        file.write(PNG)
    output = convert(tmp_path / "in", tmp_path / "out", *ALL, "--on-error", "skip")
    assert "1 link to folders (not followed)" in output
    assert "\\udcff.png: the name is not UTF-8" in output


def test_names_with_and_without_a_dot_in_front(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("./a.png", PNG), ("a.txt", b"x")])
    with pytest.raises(DuplicateKeyError, match=r"the keys './a' and 'a' are one name in two forms: png, and .* txt"):
        scan_tar(open_store(tmp_path), "a.tar").check()


def test_images_that_learn_their_mode_when_they_load() -> None:
    image = Image.new("RGB", (128, 128), (10, 200, 30))
    stream = io.BytesIO()
    image.save(stream, "ICNS")
    found = decode_image(stream.getvalue(), image_form("rgb8"), part="icns")
    assert (np.asarray(found) == (10, 200, 30)).all()


@pytest.mark.parametrize("form", ["jsonl", "messages", "csv", "coco", "parquet"])
def test_the_folder_that_is_proposed_for_absolute_paths_works(tmp_path, form):
    """Beside relative ones, also of names that the folder above has itself, which are taken first."""
    folders = {"here": tmp_path / "lists/here", "there": tmp_path / "others/there"}
    for name, folder in folders.items():
        (folder / "pictures").mkdir(parents=True)
        for number in range(2):
            (folder / f"pictures/{number}.jpg").write_bytes(picture(10 * len(name) + number, "JPEG"))
    names = ["pictures/0.jpg", str(folders["there"] / "pictures/0.jpg"), "pictures/1.jpg"]
    rows = [{"image": name, "caption": f"a {number}"} for number, name in enumerate(names)]
    source = folders["here"] / f"list.{form}"
    if form == "csv":
        source.write_text("image,caption\n" + "".join(f"{row['image']},{row['caption']}\n" for row in rows))
    elif form == "parquet":
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), source)
    elif form == "coco":
        listed = {
            "images": [{"id": number, "file_name": name} for number, name in enumerate(names)],
            "annotations": [{"image_id": number, "caption": "a"} for number in range(3)],
        }
        source = source.with_suffix(".json")
        source.write_text(json.dumps(listed))
    else:
        said = {"role": "assistant", "content": "a"}
        asked = [{"role": "user", "content": [{"type": "image", "image": name}]} for name in names]
        talks = [{"messages": [one, said]} for one in asked]
        source = source.with_suffix(".jsonl")
        source.write_text("".join(f"{json.dumps(one)}\n" for one in (talks if form == "messages" else rows)))
    flags = ("--split-ratio", "1,0,0", "--samples-per-shard", 1, "--num-workers", 2)
    message = refused(source, tmp_path / "out", *flags)
    proposed = re.search(r"energon convert (--media \S+)\. ", message)
    assert proposed is not None, message
    assert proposed[1] == f"--media {tmp_path}"
    stored = members(converted(source, tmp_path / "out", *flags, *proposed[1].split()))
    wanted = [Path(folders["here"] / name).read_bytes() for name in names]
    assert [stored[name] for name in sorted(stored) if name.endswith("jpg")] == (
        [wanted[number] for number in (1, 0, 2)] if form == "coco" else wanted
    )
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/0.jpg").write_bytes(picture(3, "JPEG"))
    stored = members(converted(source, tmp_path / "two", *flags, *proposed[1].split())).values()
    assert [part in stored for part in (picture(3, "JPEG"), *wanted)] == [True, False, True, True]
