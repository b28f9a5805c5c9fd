"""`energon convert`: mistakes are named with file, line, key and remedy, or counted where they may be skipped."""

from __future__ import annotations

import csv
import hashlib
import http.server
import io
import json
import os
import re
import shlex
import tarfile
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import energon, output_of, refusal_of
from forked import run_afresh
from full_disk import no_room
from paths import REPOSITORY
from PIL import Image
from sources import (
    coco,
    content,
    convert,
    converted,
    llava,
    members,
    meta,
    openai,
    parquet,
    picture,
    refused,
    table,
    write_pictures,
)

from energon_bridge import ShardWriter, TextSample, WorkerConfig, get_savable_loader, get_val_dataset
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.format.nvmeta import read_info
from energon_bridge.core.prepare.split import parse_ratio
from energon_bridge.core.storage import open_store
from energon_bridge.tools.convert.group_splits import split_groups

# --- mistakes -----------------------------------------------------------------------------------------------------


def test_the_wrong_media_folder_is_named_with_the_right_one(tmp_path):
    source, _, _ = llava(tmp_path / "in", 3)
    message = refused(source, tmp_path / "out")
    assert f"none of the 3 files named in the first rows exists, such as {tmp_path}/in/0/0.jpg" in message
    assert f"It is in {tmp_path}/in/images: pass --media {tmp_path}/in/images." in message


@pytest.mark.parametrize("out", ["s3://lake/pics", "gs://lake/pics", "file:///lake/pics", "nowhere://pics"])
def test_a_url_is_no_folder_to_write_to(tmp_path, monkeypatch, out):
    source, flags, _ = llava(tmp_path / "in", 3)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert "can only be written to a local folder; write there, and copy it" in refused(source, out, *flags)
    with pytest.raises(ConfigurationError, match="can only be written to a local folder"):
        ShardWriter(out, sample_type=TextSample)
    assert not list((tmp_path / "here").iterdir())


def test_a_missing_image_is_named_or_skipped(tmp_path):
    source, flags, _ = llava(tmp_path / "in", 6)
    (tmp_path / "in/images/0/4.png").unlink()
    flags = [*flags, "--split-ratio", "1,0,0", "--samples-per-shard", 2]
    message = refused(source, tmp_path / "out", *flags)
    assert f"{source}, entry 4 (id 2): {tmp_path}/in/images/0/4.png: cannot read: No such file" in message
    output = convert(source, tmp_path / "out", *flags, "--on-error", "skip")
    assert "Skipped 1 sample:" in output
    assert "0/4.png: cannot read" in output
    assert "Unchanged: 2 shards." in output
    assert list(read_info(open_store(tmp_path / "out")).shard_counts.values()) == [2, 2, 1]
    (tmp_path / "in/images/0/4.png").write_bytes(picture(4, "PNG"))
    before = content(tmp_path / "out")
    flags += ["--on-error", "skip"]
    message = refused(source, tmp_path / "out", *flags)
    said = f"begins to differ at the key '000000005', where '000000004' is now ({source}, entry 4 (id 2))"
    assert f"train/00002.tar {said}" in message
    assert content(tmp_path / "out") == before
    assert "Unchanged: 2 shards." in convert(source, tmp_path / "out", *flags, "--overwrite")
    assert content(tmp_path / "out") == content(converted(source, tmp_path / "other", *flags))


@pytest.mark.parametrize("mark", [", ", ";", "|"])
def test_several_files_in_a_field_are_a_list(tmp_path: Path, mark: str) -> None:
    """As JSON or as Python prints it, in a CSV as in JSON; with anything else between them, the error says so."""
    names = ["photos/a.jpg", "b.jpg"]
    write_pictures(tmp_path, names)
    source = tmp_path / "list.csv"
    said = f"These are 2 files with '{mark.strip()}' between them: write a JSON list, "
    for more, is_told in (("", True), (f"{mark}gone.jpg", False)):
        source.write_text(f'image,caption\n"{mark.join(names)}{more}",one\nb.jpg,two\n')
        assert (said in refused(source, tmp_path / "out")) == is_told
    rows = [
        {"image": names, "caption": "[1]"},
        {"image": [], "caption": "[]"},
        {"image": names[1:], "caption": "['x']"},
    ]
    (tmp_path / "list.json").write_text(json.dumps(rows))
    wanted = members(converted(tmp_path / "list.json", tmp_path / "json", "--split-ratio", "1,0,0"))
    assert [name for name in wanted if name.endswith("jpg")] == [
        f"00000000{name}.jpg" for name in ("0.0", "0.1", "2.0")
    ]
    for dumps in (json.dumps, str):
        with source.open("w", newline="") as file:
            table = csv.writer(file)
            table.writerows([["image", "caption"], *([dumps(row["image"]), row["caption"]] for row in rows)])
        out = converted(source, tmp_path / dumps.__name__, "--split-ratio", "1,0,0")
        assert members(out) == wanted


@pytest.mark.parametrize("named", ["photos\\a.JPG", "photos/a.jpg", "photos/A.JPG"])
def test_a_file_of_another_spelling_is_named(tmp_path, named):
    (tmp_path / "photos").mkdir()
    for name in ("a.JPG", "b.jpg"):
        (tmp_path / "photos" / name).write_bytes(picture(1, "JPEG"))
    (tmp_path / "list.csv").write_text(f"image,caption\nphotos/b.jpg,one\n{named},two\n")
    message = refused(tmp_path / "list.csv", tmp_path / "out")
    assert f"There is {tmp_path}/photos/a.JPG: slashes and capitals count" in message


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_blanks_around_a_path_belong_to_the_list(tmp_path, form):
    for name in ("a.jpg", " b.jpg"):
        (tmp_path / name).write_bytes(picture(1 if name == "a.jpg" else 2, "JPEG"))
    rows = [{"image": " a.jpg ", "caption": "one"}, {"image": " b.jpg", "caption": "two"}]  # the second is there so
    source = tmp_path / f"list.{form}"
    if form == "csv":
        source.write_text("image, caption\n a.jpg , one\na.jpg, two\n")
    else:
        source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = members(converted(source, tmp_path / "out", "--split-ratio", "1,0,0")).values()
    assert picture(1, "JPEG") in found
    assert (picture(2, "JPEG") in found) is (form == "jsonl")


def test_bad_rows_are_named_together(tmp_path):
    for number in range(40):
        if number not in (9, *range(20, 40)):
            (tmp_path / f"{number}.jpg").write_bytes(picture(number, "JPEG"))
    source = tmp_path / "list.csv"
    source.write_text("image,caption\n" + "".join(f"{number}.jpg,x\n" for number in range(40)))
    flags = ("--split-ratio", "1,0,0", "--num-workers", 1)
    message = refused(source, tmp_path / "out", *flags)
    assert [int(number) for number in re.findall(r"/(\d+)\.jpg: cannot read", message)] == [9, *range(20, 29)]
    assert message.count("--on-error skip") == 1
    assert "These fail, too (more may):\n" in message
    message = refused(source, tmp_path / "out", *flags, "--dry-run")
    assert [int(number) for number in re.findall(r"/(\d+)\.jpg: cannot read", message)] == [9, *range(20, 29)]
    (tmp_path / "1.jpg").unlink()
    for number in range(20, 40):
        (tmp_path / f"{number}.jpg").write_bytes(picture(number, "JPEG"))
    for more in ((), ("--dry-run",)):
        message = refused(source, tmp_path / "out", *flags, *more)
        assert [int(number) for number in re.findall(r"/(\d+)\.jpg: cannot read", message)] == [1, 9]
        assert "These fail, too:\n" in message
    (tmp_path / "1.jpg").write_bytes(picture(1, "JPEG"))
    for number in (8, 19):
        (tmp_path / f"{number}.jpg").unlink()
    for size, named, told in (
        (15, [8, 9], "These fail, too (more may):\n"),
        (9, [8], "--on-error skip. Others may fail, too."),
        (40, [8, 9, 19], "These fail, too:\n"),
    ):
        message = refused(source, tmp_path / "out", *flags, "--samples-per-shard", size)
        assert [int(number) for number in re.findall(r"/(\d+)\.jpg: cannot read", message)] == named
        assert told in message


def test_paths_of_windows_are_named(tmp_path):
    (tmp_path / "list.csv").write_text("image,caption\nC:\\photos\\b.jpg,one\n")
    message = refused(tmp_path / "list.csv", tmp_path / "out")
    assert "Paths are relative to --media, with / between folders and no drive." in message


def test_all_that_is_skipped_is_named_in_a_file(tmp_path):
    source, flags, _ = llava(tmp_path / "in", 12)
    entries = json.loads(source.read_text())
    for number in range(2, 9):
        entries[number]["image"] = f"gone {number}.jpg"
    entries[9] = "no object"
    source.write_text(json.dumps(entries))
    flags += ["--samples-per-shard", 1]
    output = convert(source, tmp_path / "out", *flags, "--on-error", "skip")
    names = tmp_path / "out/.nv-meta/convert/skipped.txt"
    assert f"and 3 more, all in {names}" in output
    lines = names.read_text().splitlines()
    assert len(lines) == 8
    assert "--on-error" not in names.read_text() + output
    assert [f"entry {number} (id" in line for number, line in zip(range(2, 9), lines, strict=False)] == [True] * 7
    assert lines[-1].startswith(f"{source}, entry 9: expected an object")
    before = members(tmp_path / "out")
    message = refused(source, tmp_path / "out", *flags)
    assert message.startswith(f"{source}, entry 2 (id 1): ")
    assert ". To leave such samples out: --on-error skip. These fail, too:\n" in message
    assert message.count(str(source)) == 8
    assert members(tmp_path / "out") == before
    again = convert(source, tmp_path / "out", *flags, "--on-error", "skip")
    assert "Unchanged: 12 shards." in again
    assert "Skipped 8 samples:" in again


def test_coco_gives_two_images_one_id(tmp_path):
    source, flags, _ = coco(tmp_path / "in", 4)
    listed = json.loads(source.read_text())
    listed["images"][2]["id"] = 1
    source.write_text(json.dumps(listed))
    flags = [*flags, "--split-ratio", "1,0,0"]
    said = "image 1: `images` gives this id to 000000000001.jpg and 000000000002.jpg"
    assert said in refused(source, tmp_path / "out", *flags)
    output = convert(source, tmp_path / "out", *flags, "--on-error", "skip")
    assert "Skipped 2 samples:" in output
    assert said in output
    assert "captions of 1 image that `images` does not list" in output
    assert {name.partition(".")[0] for name in members(tmp_path / "out")} == {"000000000000", "000000000003"}


@pytest.mark.parametrize(
    ("part", "entry", "message"),
    [
        ("images", {"id": 1, "file_name": None}, "`file_name` is null."),
        ("images", {"id": 1, "file_name": 3}, "`file_name` is '3'."),
        ("images", {"id": 1}, "`file_name` is missing."),
        ("images", {"id": [1], "file_name": "a.jpg"}, "`id` is '[1]'."),
        ("images", None, "expected an object, found null."),
        ("annotations", None, "expected an object, found null."),
        ("annotations", {"image_id": [1], "caption": "a"}, "`image_id` is '[1]'."),
        ("annotations", {"image_id": 1, "caption": None}, "`caption` is null."),
        ("annotations", {"image_id": 1, "bbox": []}, "`caption` is missing."),
    ],
)
def test_a_bad_entry_of_coco_is_named_or_skipped(tmp_path: Path, part: str, entry: object, message: str) -> None:
    source, flags, pictures = coco(tmp_path / "in", 4)
    listed = json.loads(source.read_text())
    listed[part][1] = entry
    source.write_text(json.dumps(listed))
    flags = [*flags, "--split-ratio", "1,0,0"]
    said = f"{source}, entry 1 of `{part}`: {message}"
    assert f"{said[:-1]}. To leave such samples out" in refused(source, tmp_path / "out", *flags)
    output = convert(source, tmp_path / "out", *flags, "--on-error", "skip")
    assert (tmp_path / "out/.nv-meta/convert/skipped.txt").read_text().splitlines() == [said]
    assert ("that `images` does not list" in output) == (message in ("`id` is '[1]'.",) or listed["images"][1] is None)
    kept = {n for n in range(4) if part == "annotations" or n != 1}
    assert {name for name in members(tmp_path / "out") if name.endswith("jpg")} == {
        name for n, name in enumerate(pictures) if n in kept
    }


def test_coco_with_absolute_paths_has_the_keys_of_relative_ones(tmp_path: Path) -> None:
    source, flags, pictures = coco(tmp_path / "in", 3)
    listed = json.loads(source.read_text())
    for image in listed["images"]:
        image["file_name"] = str(tmp_path / "in/val2017" / image["file_name"])
    source.write_text(json.dumps(listed))
    found = members(converted(source, tmp_path / "out", *flags, "--split-ratio", "1,0,0"))
    assert {name: data for name, data in found.items() if name.endswith("jpg")} == pictures


def test_coco_lists_an_image_twice_two_by_one_stem_and_captions_of_none(tmp_path):
    source, flags, _ = coco(tmp_path / "in", 4)
    listed = json.loads(source.read_text())
    first = listed["images"][0]
    stem = first["file_name"].rpartition(".")[0]
    folder = next((tmp_path / "in").rglob(first["file_name"])).parent
    (folder / f"{stem}.png").write_bytes(picture(7, "PNG"))
    listed["images"] += [first, {"id": 70, "file_name": f"{stem}.png"}]
    listed["annotations"] += [{"image_id": 70, "caption": "of 70"}, {"image_id": 99, "caption": "of none"}]
    source.write_text(json.dumps(listed))
    flags = [*flags, "--split-ratio", "1,0,0"]
    output = convert(source, tmp_path / "out", *flags)
    assert "Left out: 1 of 6 `images` that lists an image again, captions of 1 image that `images` does not" in output
    found = members(tmp_path / "out")
    assert len(found) == 10
    assert found[f"{stem}-{first['id']}.jpg"] == (folder / first["file_name"]).read_bytes()
    assert found[f"{stem}-70.png"] == picture(7, "PNG")


@pytest.mark.parametrize("quoted", [range(4), range(2, 4)])
def test_coco_ids_with_and_without_quotes_are_equal(tmp_path: Path, quoted: range) -> None:
    source, flags, pictures = coco(tmp_path / "in", 4)
    listed = json.loads(source.read_text())
    flags = [*flags, "--split-ratio", "1,0,0"]
    expected = members(converted(source, tmp_path / "out", *flags))
    for note in listed["annotations"]:
        note["image_id"] = str(note["image_id"]) if note["image_id"] in quoted else note["image_id"]
    source.write_text(json.dumps(listed))
    assert members(converted(source, tmp_path / "out2", *flags)) == expected
    assert len(expected) == 2 * len(pictures)


@pytest.mark.parametrize(("samples_per_shard", "kept"), [(4, 0), (2, 1)])
def test_a_conversion_that_fails_leaves_only_finished_shards(tmp_path: Path, samples_per_shard: int, kept: int) -> None:
    source, flags, _ = table(tmp_path / "in", 5)
    names = [line.partition("\t")[0] for line in source.read_text().splitlines() if ".png" in line]
    (tmp_path / "in" / names[3]).unlink()  # it looks at three samples before it begins
    flags = [*flags, "--split-ratio", "1,0,0", "--samples-per-shard", samples_per_shard]
    assert "cannot read: No such file" in refused(source, tmp_path / "out", *flags)
    assert len([*(tmp_path / "out/.nv-meta.parts").rglob("*.tar")]) == kept
    assert (tmp_path / "out").exists() == bool(kept)


@pytest.mark.parametrize(
    "name", ["captions.json", "annotations/captions_val.json", "lists/all.jsonl", "lists/pairs.json"]
)
def test_a_list_anywhere_in_a_folder_is_not_passed_over(tmp_path: Path, name: str) -> None:
    source, _, pictures = coco(tmp_path / "in", 3)
    folder, listed = tmp_path / "in", source.read_bytes()
    source.unlink()
    (folder / name).parent.mkdir(exist_ok=True)
    pairs = [{"image": image, "caption": "x"} for image in pictures]
    text = {"all.jsonl": "\n".join(map(json.dumps, pairs)), "pairs.json": json.dumps(pairs)}
    (folder / name).write_bytes(text.get(Path(name).name, "").encode() or listed)
    (folder / "info.json").write_text('{"licence": "none"}')
    (folder / "instances.json").write_bytes(listed) if name.startswith("annotations") else None
    message = refused(folder, tmp_path / "out")
    assert f"convert the folder, or the list {name} in it? Pass the file, {folder / name} (--media: " in message
    assert "--kind pairs or --kind classes" in message
    found = members(converted(folder, tmp_path / "out", "--kind", "pairs", "--split-ratio", "1,0,0"))
    assert list(found.values()) == [*pictures.values()]
    if name.startswith("annotations"):
        assert f"It is in {folder}/val2017: pass --media {folder}/val2017." in refused(folder / name, tmp_path / "out2")


def test_a_full_disk_is_said_by_convert_and_prepare_media(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text('{"text": "one"}\n')
    with no_room():
        said = refusal_of("convert", tmp_path / "lines.jsonl", tmp_path / "out")
    assert re.search(r"out/\S+: cannot write: .*Is the disk full.* bytes free: make room", said)
    output_of("convert", tmp_path / "lines.jsonl", tmp_path / "out")
    with no_room():
        said = refusal_of("prepare-media", tmp_path / "out", "--media-metadata-by-extension")
    assert re.search(r"cannot write the [\d,]+ bytes of \S+index\.sqlite: .*\. Make room\.", said)


def test_a_parquet_row_without_an_image_is_named(tmp_path: Path) -> None:
    pyarrow, files = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    images = [None if n == 1 else {"bytes": picture(n), "path": None} for n in range(3)]
    files.write_table(pyarrow.table({"image": images, "text": ["x"] * 3}), tmp_path / "x.parquet")
    said = (
        "x.parquet, row group 0, row 1: there is no `image` for the field `image`, or it is null. There is text. Fix it"
    )
    assert said in refused(tmp_path / "x.parquet", tmp_path / "out")


def test_a_parquet_row_without_bytes_is_one_sample_that_fails(tmp_path):
    pyarrow, files = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    images = [{"bytes": None if n == 2 else picture(n), "path": f"{n}.jpg"} for n in range(5)]
    table = pyarrow.table({"image": images, "text": [f"text {n}" for n in range(5)]})
    files.write_table(table, tmp_path / "x.parquet")
    message = refused(tmp_path / "x.parquet", tmp_path / "out")
    assert f"x.parquet, row group 0, row 2: {tmp_path}/2.jpg: cannot read: No such file" in message
    output = convert(tmp_path / "x.parquet", tmp_path / "out", "--on-error", "skip")
    assert "Skipped 1 sample:" in output
    assert sum(read_info(open_store(tmp_path / "out")).shard_counts.values()) == 4


def test_damaged_pictures_are_counted(tmp_path):
    folder = tmp_path / "in"
    write_pictures(folder, ["a.jpg", "b.png", "c.jpg", "d.jpg"])
    (folder / "c.jpg").write_bytes(b"no picture")
    (folder / "d.jpg").write_bytes(b"")
    said = f"2 images cannot be opened: energon lint {tmp_path}/out names them."
    assert said in convert(folder, tmp_path / "out")
    assert said in convert(folder, tmp_path / "out")  # nothing is written this time
    assert "cannot be opened" not in convert(folder, tmp_path / "out2", "--no-media-metadata")
    (folder / "d.jpg").unlink()
    (folder / "c.jpg").unlink()
    assert "cannot be opened" not in convert(folder, tmp_path / "out3")


@pytest.mark.parametrize("form", ["JPEG", "JPEG progressive", "PNG", "GIF", "BMP"])
def test_pictures_that_are_cut_off_are_rows_that_fail(tmp_path: Path, form: str) -> None:
    """What Pillow, the loader of these formats, refuses; bytes behind the end, as of motion photos, do no harm."""
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 60, 3), dtype=np.uint8))
    thumbnail = io.BytesIO()
    image.save(thumbnail, "JPEG")
    exif = Image.Exif()
    exif[0x9286] = thumbnail.getvalue()  # a comment that holds a whole JPEG, as previews do
    file = io.BytesIO()
    form, _, way = form.partition(" ")
    image.save(file, form, **({"exif": exif, "progressive": bool(way)} if form == "JPEG" else {}))
    whole = file.getvalue()
    ends = [whole, whole + bytes(5000), *(whole[:-cut] for cut in (1, 2, 9, 12, 40, 400, len(whole) // 3))]
    bad = []
    for number, data in enumerate(ends):
        (tmp_path / f"{number}.{form}").write_bytes(data)
        try:
            with Image.open(io.BytesIO(data)) as opened:
                opened.load()
        except OSError:
            bad.append(number)
    assert {0, 1}.isdisjoint(bad)
    assert {7, 8} <= {*bad}
    source = tmp_path / "list.jsonl"
    source.write_text("".join(f'{{"image": "{n}.{form}", "caption": "text"}}\n' for n in range(len(ends))))
    flags = ("--split-ratio", "1,0,0")
    told = convert(source, tmp_path / "out", *flags, "--on-error", "skip")
    assert f"Skipped {len(bad)} samples:" in told
    skipped = (tmp_path / "out/.nv-meta/convert/skipped.txt").read_text().splitlines()
    assert [line.partition(": ")[0] for line in skipped] == [f"{source}, line {number + 1}" for number in bad]
    assert "All " in output_of("lint", tmp_path / "out", "--no-progress")
    counted = convert(source, tmp_path / "all", *flags)
    assert f"{len(bad)} images cannot be opened: energon lint {tmp_path}/all names them." in counted
    assert refusal_of("lint", tmp_path / "all", "--no-progress").count("DecodeError: ") == len(bad)


def test_broken_lines_are_named_or_skipped(tmp_path):
    source, _, _ = openai(tmp_path / "in", 3)
    lines = source.read_text().splitlines()
    lines[2] = lines[2][:-5]
    source.write_text("\n".join(lines))
    message = refused(source, tmp_path / "out", "--split-ratio", "1,0,0")
    assert f"{source}, line 3: not valid JSON: " in message
    output = convert(source, tmp_path / "out", "--split-ratio", "1,0,0", "--on-error", "skip")
    assert "Skipped 1 sample:" in output
    assert "Done: 2 samples" in output


@pytest.mark.parametrize("form", ["csv", "json", "coco"])
def test_a_caption_in_latin_1_is_one_sample_that_fails(tmp_path: Path, form: str) -> None:
    """In a file whose other captions are UTF-8, and say things that Latin-1 has no letters for."""
    captions = [b"a caf\xc3\xa9", "für 5 €".encode(), b"a caf\xe9 in Orl\xe9ans", b"a cat"]
    names = [f"{number}.png" for number in range(len(captions))]
    write_pictures(tmp_path / "in", names)
    source = tmp_path / "in" / ("x.csv" if form == "csv" else "x.json")
    if form == "csv":
        source.write_bytes(b"image,caption\n" + b"".join(b"%d.png,%b\n" % one for one in enumerate(captions)))
        where = f"{source}, row 4: "
    elif form == "json":
        entries = b",".join(b'{"image":"%d.png","caption":"%b"}' % one for one in enumerate(captions))
        source.write_bytes(b"[%b]" % entries)
        where = f"{source}, entry 2: "
    else:
        images = json.dumps([{"id": number, "file_name": name} for number, name in enumerate(names)]).encode()
        notes = b",".join(b'{"image_id":%d,"caption":"%b"}' % one for one in enumerate(captions))
        source.write_bytes(b'{"images":%b,"annotations":[%b]}' % (images, notes))
        where = f"{source}, image 2: no captions: entry 2 of `annotations`: "
    flags = (tmp_path / "out", "--split-ratio", "1,0,0")
    message = refused(source, *flags)
    assert where in message
    assert "Orl\\xe9ans" in message
    assert "write it as UTF-8 (iconv -f WINDOWS-1252 -t UTF-8)" in message
    output = convert(source, *flags, "--on-error", "skip")
    assert where in output
    assert f"Done: {len(captions) - 1} samples" in output
    entries = [json.loads(data) for name, data in members(tmp_path / "out").items() if name.endswith(".json")]
    texts = [one.get("captions", [one.get("caption")])[0] for one in entries]
    assert texts == [captions[number].decode() for number in (0, 1, 3)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--field", "caption=text"], "--field caption=text: the first rows have no such column; they have Caption, "),
        (["--field", "title=Caption"], "--field title: CaptioningSample has no such field; it has image, caption."),
        (
            ["--sample-type", "ImageSample", "--field", "caption=Caption"],
            "no such field; it has image. To make another type: --sample-type CaptioningSample.",
        ),
        (["--sample-type", "VQASample"], "VQASample also requires the fields context: add --field context=COLUMN."),
        (["--sample-type", "Captioning"], "unknown sample type 'Captioning'. Did you mean 'Captio"),
        (["--field", "caption"], "--field 'caption': expected FIELD=COLUMN, like caption=description."),
        (["--bytes-per-shard", "much"], "--bytes-per-shard 'much': expected a size like 500M, 1G or 1Gi."),
        (["--media", "/no/where"], "--media /no/where: no such folder."),
        (["--split-ratio", "1,2"], "split ratio '1,2': expected three numbers"),
    ],
)
def test_wrong_flags(tmp_path, flags, message):
    source, _, _ = table(tmp_path / "in", 3)
    assert message in refused(source, tmp_path / "out", *flags)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.json", '[{"a": 1}, {', "(char 12). Fix it there, or download it again if it is cut off."),
        (
            "x.json",
            "[1]\n[2]",
            "Extra data: line 2 column 1 (char 4). If it has one object per line, rename it",
        ),
        ("x.json", "\udce9", "Write it as UTF-8 (iconv -f WINDOWS-1252 -t UTF-8)."),
        ("x.jsonl", '{"caption": "\udcfc"}', "Write the file as UTF-8 (iconv -f WINDOWS-1252 -t UTF-8)."),
        (
            "x.csv",
            "image,caption\na.png,\udcfc\n",
            "another encoding, write it as UTF-8 (iconv -f WINDOWS-1252 -t UTF-8).",
        ),
        ("x.csv", "image,l\udce9gende\na.png,b\n", "x.csv, header: 'image,l\\xe9gende' is not UTF-8"),
        ("x.csv", "i\0,\0c\0\n\0\udcfc\0", "Write it as UTF-8 (iconv -f UTF-16LE -t UTF-8)."),
        (
            "x.json",
            '{"a": 1}',
            "expected a list of objects, or COCO's `images` and `annotations`, found an object with a.",
        ),
        ("x.json", "[1]", "x.json, entry 0: expected an object, found '1'."),
        ("x.json", "[]", "x.json: has no samples (JSON list)."),
        ("x.jsonl", "", "x.jsonl: has no samples (JSON lines)."),
        ("x.csv", "a,b\n1\n", "x.csv, line 2: has fewer fields than the 2 columns of the header (a, b)."),
        ("x.csv", "url,caption\nhttp://a.b/c.jpg,x\n", "the column `url` contains URLs (http://a.b/c.jpg)"),
        ("x.csv", "image,caption\n../../secret.png,x\n", "row 2: the path '../../secret.png' leads out of"),
        ("x.xls", "", "cannot convert a .xls. Supported are .json, .jsonl"),
        (
            "x.json",
            '{"images": [], "annotations": [{"image_id": 1, "bbox": []}]}',
            "`caption` is missing. Use captions_",
        ),
        ("x.json", '{"annotations": [{"image_id": 1, "caption": "a"}]}', "`annotations` without `images`"),
        (
            "x.json",
            '{"images": [{"id": 1}], "annotations": []}',
            "not COCO captions: entry 0 of `images`: `file_name` is missing. D",
        ),
        (
            "x.json",
            '[{"image": "/9j/4AAQSkZJRg", "caption": "a"}]',
            "`image` contains base64 (/9j/4AAQSkZJRg), and no ",
        ),
        ("x.json", '[{"conversations": "hi"}]', "entry 0: `conversations`: expected a list of turns, found 'hi'."),
    ],
)
def test_wrong_files(tmp_path, name, text, message):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(os.fsencode(text))
    assert message in refused(tmp_path / "in" / name, tmp_path / "out")


@pytest.mark.parametrize("rows", [1, 2])
def test_names_whose_letters_are_composed_otherwise_are_said_to_be_there(tmp_path, rows):
    (tmp_path / "a.png").write_bytes(picture(0))
    (tmp_path / "Stu\u0308hle.png").write_bytes(picture(1))  # as macOS writes it into archives
    if (tmp_path / "St\u00fchle.png").exists():
        pytest.skip("the file system takes both forms for one")
    source = tmp_path / "list.csv"
    source.write_text("file_name,caption\nSt\u00fchle.png,chairs\n" + "a.png,a\n" * (rows - 1))
    message = refused(source, tmp_path / "out")
    assert "The file is there, but the letters of its name are composed otherwise (NFD) than in the list" in message
    assert f"convmv -r -f utf8 -t utf8 --nfc --notest {tmp_path}" in message


def test_wrong_folders(tmp_path):
    assert "no such file or folder. Check the path." in refused(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    assert "no images, videos or sound below this folder" in refused(tmp_path / "empty", tmp_path / "out")
    source, _, _ = table(tmp_path / "in", 3)
    assert f"Pass the file, {source}" in refused(tmp_path / "in", tmp_path / "out")
    assert "is the source itself" in refused(tmp_path / "in", tmp_path / "in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/precious.txt").write_text("mine")
    assert "contains precious.txt, which no conversion wrote." in refused(source, tmp_path / "out")
    out = converted(source, tmp_path / "other")
    before = content(out)
    message = refused(source, out, "--shuffle", 3)
    assert "contains a conversion with other options: shuffle was None, now 3." in message
    assert content(out) == before
    converted(source, out, "--shuffle", 3, "--overwrite")
    assert content(out) == content(converted(source, tmp_path / "fresh", "--shuffle", 3))


# --- datasets of the hub ------------------------------------------------------------------------------------------


def test_a_dataset_of_the_hub_is_downloaded_and_converted(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    source, flags, _ = parquet(tmp_path / "hub/data/x", 5)
    asked = []

    def snapshot(name: str, **options: object) -> str:
        asked.append((name, options))
        return str(tmp_path / "hub")

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    out = converted(Path("hf://some/thing/data/x@v2"), tmp_path / "out", *flags)
    assert asked == [("some/thing", {"repo_type": "dataset", "revision": "v2", "allow_patterns": "data/x/*"})]
    assert content(out) == content(converted(source.parent, tmp_path / "other", *flags))
    assert "has no folder 'none'" in refused(Path("hf://some/thing/none"), tmp_path / "out2")
    assert "expected hf://OWNER/NAME" in refused(Path("hf://some"), tmp_path / "out2")


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as names a commit, lists its files, and gives ranges of them."""

    files: Mapping[str, bytes]
    sent: list[int]
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # the body would wait 40 ms for the answer to the head

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urllib.parse.unquote(self.path.partition("?")[0])
        name = path.rpartition(f"/resolve/{'c' * 40}/")[2]
        if name in self.files and name != path:
            first, last = map(int, self.headers["range"].removeprefix("bytes=").split("-"))
            self.answer(206, self.files[name][first : last + 1])
        elif "/tree/" in path or "/paths-info/" in path:
            found = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.files.items()
            ]
            self.answer(200, json.dumps(found).encode())
        else:
            self.answer(200, json.dumps({"id": "some/thing", "sha": "c" * 40, "siblings": []}).encode())

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["content-length"])).decode()
        found = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in self.files.items()
            if name in urllib.parse.unquote(asked)
        ]
        self.answer(200, json.dumps(found).encode())

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("content-type", "application/json" if status == 200 else "application/octet-stream")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.sent.append(len(body) if status == 206 else 0)


IN_FORKS = """
import json, os, sys
import huggingface_hub.hf_file_system, pyarrow.parquet
from energon_bridge.tools.cli.main import main
for arguments in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        main(arguments)
    assert os.waitpid(child, 0)[1] == 0
"""
"""Runs commands one after the other, each in a process of its own."""


def test_parquet_files_of_the_hub_are_streamed(tmp_path, monkeypatch):
    """Two tasks and a finish, each a process of its own, write what the same files on disk give, and download none."""
    pytest.importorskip("huggingface_hub")
    source, flags, _ = parquet(tmp_path / "in", 40)
    data = source.read_bytes()
    names = ["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"]
    Hub.files, Hub.sent = {**dict.fromkeys(names, data), "README.md": b"text"}, []
    for name in names:
        (tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / name).write_bytes(data)
    flags = [*flags, "--samples-per-shard", 10, "--num-workers", 2]
    expected = members(converted(tmp_path / "files/data", tmp_path / "expected", *flags))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    alone = ["--num-workers", "1"]
    line = ["convert", "hf://some/thing", str(tmp_path / "out"), "--stream", "--no-progress", *map(str, flags)]
    commands = [[*line, *more] for more in (["--task", "0/2"], [*alone, "--task", "1/2"], [*alone, "--finish"])]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    done = run_afresh(IN_FORKS, REPOSITORY, "huggingface_hub", arguments=[json.dumps(commands)])
    assert done.returncode == 0, done.stderr
    server.shutdown()
    server.server_close()
    assert members(tmp_path / "out") == expected
    assert meta(tmp_path / "out", "split.yaml")["split_parts"]["test"]
    # Each command reads the two ends, each of the 20 row groups once to look at it, and one to show it; those that
    # write shards read the groups of each shard, three. All columns of a group are one request, of its bytes only.
    ranges = [size for size in Hub.sent if size]
    assert len(ranges) <= 3 * (2 + 20 + 1) + 8 * 3
    assert sum(ranges) <= 3 * 2 * (64 << 10) + (3 * 21 + 24) * len(data) // 10
    assert not list((tmp_path / "cache").rglob("*.parquet"))


def test_what_cannot_be_streamed(tmp_path):
    source, flags, _ = parquet(tmp_path / "in", 5)
    assert "--stream is for datasets of the hub" in refused(source, tmp_path / "out", *flags, "--stream")
    message = refused(Path("hf://some/thing"), tmp_path / "out", "--stream", "--shuffle", 1)
    assert "reads files in order" in message


def test_without_a_network_the_remedy_is_named(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    script = "from energon_bridge.tools.cli.main import main; main()"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    line = ["convert", "hf://some/thing", str(tmp_path / "out")]
    result = run_afresh(script, REPOSITORY, "huggingface_hub", arguments=line)
    assert result.returncode == 1
    message = " ".join(result.stderr.split())
    assert message.startswith("Error: hf://some/thing: cannot download: LocalEntryNotFoundError: ")
    assert "hf download some/thing --repo-type dataset --local-dir DIR" in message
    assert not (tmp_path / "out").exists()


CAPTIONS = ("a cat", "", "  \n", "a dog", None)


@pytest.mark.parametrize("form", ["pairs", "csv", "jsonl", "json", "parquet"])
def test_empty_captions_are_counted_and_named(tmp_path: Path, form: str) -> None:
    images = tmp_path / "pairs"
    images.mkdir()
    for number, caption in enumerate(CAPTIONS):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(images / f"p{number}.png")
        (images / f"p{number}.txt").write_text(caption or "")
    rows = [{"image": f"pairs/p{number}.png", "caption": caption} for number, caption in enumerate(CAPTIONS)]
    source = images if form == "pairs" else tmp_path / f"list.{form}"
    if form == "csv":
        with source.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["image", "caption"])
            writer.writeheader()
            writer.writerows(rows)
    elif form == "parquet":
        held = [(tmp_path / row["image"]).read_bytes() for row in rows]
        pq.write_table(pa.table({"image": held, "caption": [*CAPTIONS]}), source)
    elif form != "pairs":
        source.write_text(json.dumps(rows) if form == "json" else "".join(f"{json.dumps(row)}\n" for row in rows))
    said = output_of("convert", source, tmp_path / "out", "--split-ratio", "1,0,0", "--no-progress")
    assert "3 samples with an empty caption: training skips and counts" in said
    keys = ["p1", "p2", "p4"] if form == "pairs" else ["000000001", "000000002", "000000004"]
    assert [f"(key {key})" in said for key in keys] == [True] * 3
    lint = energon("lint", tmp_path / "out").output
    named = ", ".join(f"train/00000.tar/{key}" for key in keys)
    assert f"3 samples with an empty text: {named}. Training skips" in lint
    if form in ("parquet", "jsonl"):  # read as they are
        assert f"{3 if form == 'parquet' else 2} samples with an empty text: " in energon("lint", source).output


# What is told of photographs and their captions ----------------------------------------------------------------------


def photographs(folder: Path, count: int = 60, **columns: Callable[[int], object]) -> Path:
    """Write a list of pictures, three to a product, and their files."""
    rows = []
    for number in range(count):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"p{number}.png")
        row = {"image": f"p{number}.png", "product_id": f"s{number // 3}", "caption": f"a cat, {number}"}
        rows.append(row | {name: value(number) for name, value in columns.items()})
    (folder / "list.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder / "list.jsonl"


def test_marks_in_captions_are_counted_and_named(tmp_path: Path) -> None:
    said = {5: "<image> a cat", 7: "a <|endoftext|> cat", 8: "<image> a dog", 9: "a < b, <b>bold</b> and < image>"}
    source = photographs(tmp_path, caption=lambda number: said.get(number, "a cat"))
    told = output_of("convert", source, tmp_path / "out", "--split-ratio", "1,0,0", "--no-progress")
    lines = told.splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("3 samples with tokens of models in a text"))
    assert lines[at + 1 : at + 4] == [f"  {source}, line {n + 1} (key {n:09d})" for n in (5, 7, 8)]
    assert "3 samples with tokens of models in a text" in energon("lint", tmp_path / "out").output


def test_marks_in_conversations_are_no_places(tmp_path: Path) -> None:
    talk = [
        {"from": "human", "value": "<image>\nWhat is it? <|image_1|>"},
        {"from": "gpt", "value": "A <|im_end|> cat."},
    ]
    rows = [{"conversations": [{"from": "human", "value": "Hi"}, turn]} for turn in talk[1:]]
    rows += [{"conversations": [{"from": "human", "value": "Is < s> a tag?"}, {"from": "gpt", "value": "No."}]}]
    (tmp_path / "list.json").write_text(json.dumps(rows))
    told = output_of("convert", tmp_path / "list.json", tmp_path / "out", "--split-ratio", "1,0,0", "--no-progress")
    assert "1 sample with tokens of models in a text" in told


def test_a_caption_can_become_the_answer_to_a_question(tmp_path: Path) -> None:
    source = photographs(tmp_path, count=20)
    flags = ("--split-ratio", "1,0,0", "--no-progress")
    told = output_of("convert", source, tmp_path / "out", *flags)
    hint = told.partition("no question is asked; to ask one: ")[2].split("\n")[0]
    assert hint == "--question 'Describe the picture.' --field answers=caption"
    again = output_of("convert", source, tmp_path / "asked", *flags, *shlex.split(hint))
    assert "to ask one" not in again
    dataset = get_val_dataset(
        tmp_path / "asked", split_part="train", batch_size=20, worker_config=WorkerConfig(num_workers=0)
    )
    with closing(get_savable_loader(dataset)) as loader:
        (batch,) = loader
    assert (batch.context, batch.answers) == (["Describe the picture."] * 20, [[f"a cat, {n}"] for n in range(20)])
    composed = output_of("convert", source, tmp_path / "more", *flags, "--field", "caption={caption} ({product_id})")
    assert "--field 'answers={caption} ({product_id})'" in composed


def test_columns_that_look_like_captions_are_named(tmp_path: Path) -> None:
    source = photographs(tmp_path, caption=lambda number: None, beschreibung=lambda number: f"Eine Katze, {number}")
    source.write_text(source.read_text().replace('"caption": null, ', ""))
    told = output_of("convert", source, tmp_path / "out", "--split-ratio", "1,0,0", "--no-progress")
    flags = told.partition("columns that look like captions: beschreibung; to take one: ")[2].split("\n")[0].split()
    again = output_of("convert", source, tmp_path / "again", "--split-ratio", "1,0,0", "--no-progress", *flags)
    assert "caption from beschreibung" in again
    assert "look like captions" not in again


# Rows that belong together --------------------------------------------------------------------------------------------


def values_of_parts(out: Path, column: str) -> dict[str, set[str]]:
    """Return the values of a column in the rows of each split part."""
    found: dict[str, set[str]] = {}
    for part in ("train", "val", "test"):
        for shard in sorted((out / part).glob("*.tar")):
            with tarfile.open(shard) as tar:
                texts = [tar.extractfile(one).read() for one in tar if one.name.endswith(".json")]  # type: ignore[union-attr]
            found.setdefault(part, set()).update(str(json.loads(text)[column]) for text in texts)
    return found


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_rows_of_one_value_are_in_one_split(tmp_path: Path, form: str) -> None:
    source = photographs(tmp_path)
    if form == "parquet":
        rows = [json.loads(line) for line in source.read_text().splitlines()]
        held = [{**row, "image": (tmp_path / row["image"]).read_bytes()} for row in rows]
        source = tmp_path / "list.parquet"
        pq.write_table(pa.Table.from_pylist(held), source, row_group_size=7)
    flags = ("--split-ratio", "8,1,1", "--no-progress", "--split-by", "product_id")
    told = output_of("convert", source, tmp_path / "out", *flags)
    assert "Split: train 8, val 1, test 1, by 20 values of product_id: none is in two splits" in told
    assert "train: 48 samples" in told
    parts = values_of_parts(tmp_path / "out", "product_id")
    assert {part: len(values) for part, values in parts.items()} == {"train": 16, "val": 2, "test": 2}
    assert len(set.union(*parts.values())) == 20


def test_values_in_several_splits_are_told_with_the_remedy(tmp_path: Path) -> None:
    source = photographs(tmp_path, language_id=lambda number: number % 3, id=lambda number: number)
    told = output_of("convert", source, tmp_path / "out", "--split-ratio", "1,1,0", "--dry-run")
    count, _, rest = told.partition(" values of product_id in several splits: ")
    assert int(count.rpartition(" ")[2]) > 5
    assert rest.startswith("--split-by product_id keeps each in one\n")
    assert told.count("in several splits") == 1
    assert "in several splits" not in output_of(
        "convert", source, tmp_path / "out", "--dry-run", "--split-by", "product_id"
    )
    gone = refusal_of("convert", source, tmp_path / "out", "--split-by", "gone")
    assert "--split-by gone: no row has a value there" in gone


def test_groups_stay_in_their_split_when_a_list_grows(tmp_path: Path) -> None:
    source = photographs(tmp_path, 90)
    text = source.read_text()
    flags = ("--split-ratio", "7,3,0", "--no-progress", "--split-by", "product_id")
    source.write_text("".join(f"{line}\n" for line in text.splitlines()[:40]))
    output_of("convert", source, tmp_path / "out", *flags)
    before = values_of_parts(tmp_path / "out", "product_id")
    source.write_text(text)
    told = output_of("convert", source, tmp_path / "out", *flags)
    assert 'resume on it with on_mismatch="adapt" (training: data.on_mismatch=adapt) only, begin its epoch' in told
    after = values_of_parts(tmp_path / "out", "product_id")
    assert all(before[part] <= after[part] for part in before)
    assert not after["train"] & after["val"]
    assert "train: 63 samples" in told


@pytest.mark.parametrize("sizes", [[1], [5, 5], [90, 1, 1, 1], [1] * 5, [3, 100, 2, 40, 7, 7, 7, 1]])
def test_each_split_gets_a_group_and_about_its_share(sizes: list[int]) -> None:
    groups = [f"g{group}" for group, size in enumerate(sizes) for _ in range(size)]
    parts = split_groups(groups, parse_ratio("9,1,0"), np.zeros(len(groups), int))
    assert sorted(number for numbers in parts.values() for number in numbers.tolist()) == list(range(len(groups)))
    assert len(parts["val"]) > 0 or len(sizes) == 1
    assert len(parts["val"]) <= max(len(groups) // 10 * 2, min(sizes))
    assert len({groups[n] for n in parts["train"]} & {groups[n] for n in parts["val"]}) == 0


@pytest.mark.parametrize("key", ["image", "{product_id}-{n}", "n"])
def test_keys_of_columns_stay_when_rows_are_inserted(tmp_path: Path, key: str) -> None:
    source = photographs(tmp_path, 12, n=lambda number: number)
    flags = ("--split-ratio", "1,0,0", "--no-progress", "--field", f"__key__={key}")
    keys = []
    for name in ("one", "two"):
        output_of("convert", source, tmp_path / name, *flags)
        with tarfile.open(tmp_path / name / "train/00000.tar") as tar:
            jsons = [one for one in tar if one.name.endswith(".json")]
            keys.append({json.loads(tar.extractfile(one).read())["n"]: one.name for one in jsons})  # type: ignore[union-attr]
        lines = source.read_text().splitlines()
        source.write_text("\n".join(lines[3:]) + "\n")
    assert {n: name for n, name in keys[0].items() if n >= 3} == keys[1]
    assert keys[0][5] == {"image": "p5.json", "n": "5.json"}.get(key, "s1-5.json")
    refused = refusal_of("convert", source, tmp_path / "out", "--field", "__key__=product_id")
    assert "line 1 and" in refused
    assert "have one key, 's2'" in refused


def test_rows_that_repeat_others_are_left_out_when_asked(tmp_path: Path) -> None:
    """By a dry run as by the run; so are rows that have the key of an earlier one and differ in a column."""
    source = photographs(tmp_path, 12)
    lines = source.read_text().splitlines()
    flags = ("--split-ratio", "1,0,0", "--samples-per-shard", "5", "--field", "__key__=image")
    source.write_text("\n".join([*lines[:5], lines[1], lines[1], '{"image": "gone.png"}', *lines[5:]]) + "\n")
    skipped = [f"{source}, line {line}: repeats {source}, line {of}." for line, of in ((6, 2), (7, 6))]
    for dry in ([], ["--dry-run"]):
        message = refused(source, tmp_path / "out", *flags, *dry)
        assert "line 2 and" in message
        assert "or delete one of the rows (they are equal). --on-error skip leaves out rows that have" in message
        told = convert(source, tmp_path / "out", *flags, "--on-error", "skip", *dry)
        assert f"Skipped 3 samples:\n  {skipped[0]}\n  {skipped[1]}\n  {source}, line 8: " in told
    assert {name.split(".")[0] for name in members(tmp_path / "out")} == {f"p{number}" for number in range(12)}
    named = (tmp_path / "out/.nv-meta/convert/skipped.txt").read_text().splitlines()
    assert named[:2] == skipped
    with source.open("a") as file:
        file.write(f"{lines[3]}\n")
    told = convert(source, tmp_path / "out", *flags, "--on-error", "skip")
    assert "Skipped 4 samples:" in told
    assert f"  {source}, line 16: repeats {source}, line 4." in told
    other = lines[1].replace("a cat", "a dog")
    source.write_text("\n".join([*lines, other, other, lines[3].replace("a cat", "a cow")]) + "\n")
    for dry in (["--dry-run"], []):
        message = refused(source, tmp_path / "other", *flags, *dry)
        assert "'__key__={image}-{COLUMN}', or delete one of the rows. --on-error skip leaves out rows" in message
        told = convert(source, tmp_path / "other", *flags, "--on-error", "skip", *dry)
        for line, of, key in ((13, 2, "p1"), (15, 4, "p3")):
            assert f"  {source}, line {line}: differs from {source}, line {of}, and has its key, '{key}': make " in told
        assert f"Skipped 3 samples:\n  {source}, line 13: " in told
        assert f"  {source}, line 14: repeats {source}, line 13.\n" in told
    assert {name.split(".")[0] for name in members(tmp_path / "other")} == {f"p{number}" for number in range(12)}
    assert not any(b"a dog" in part or b"a cow" in part for part in members(tmp_path / "other").values())


def test_a_dry_run_names_what_the_run_skips(tmp_path: Path) -> None:
    source = photographs(tmp_path, 12)
    for number in (0, *range(4, 10)):
        (tmp_path / f"p{number}.png").unlink()
    said = []
    for dry in (["--dry-run"], []):
        told = convert(source, tmp_path / "out", "--split-ratio", "1,0,0", "--on-error", "skip", *dry)
        said.append(told.partition("Skipped 7 samples:\n")[2].splitlines()[:5])
        assert ("it looked at all 12 samples, and wrote nothing" in told) == bool(dry)
        assert "\n  … and 2 more, " in told
    assert [line.split(":")[0] for line in said[0]] == [f"  {source}, line {n}" for n in (1, 5, 6, 7, 8)]
    assert said[0] == said[1]


@pytest.mark.parametrize("is_finished", [False, True])
def test_what_an_earlier_run_stored_is_left_out_when_asked(tmp_path: Path, is_finished: bool) -> None:
    """A run with --on-error skip writes shards again that have media which cannot be opened."""
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no picture")
    rows = [{"image": name, "caption": f"picture {name[0]}"} for name in ("a.png", "b.png")]
    source = tmp_path / "list.jsonl"
    missing = [] if is_finished else [{"image": "c.png", "caption": "c"}]
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *missing]))
    out = tmp_path / "out"
    flags = ("--split-ratio", "1,0,0", "--samples-per-shard", "2")
    if is_finished:
        assert "1 image cannot be opened" in convert(source, out, *flags)
        flags += ("--overwrite",)
    else:
        assert "c.png" in refused(source, out, *flags)
    told = convert(source, out, *flags, "--on-error", "skip")
    assert re.search(
        r"list.jsonl, line 2: 000000001\.\w+: not an image that Pillow can read: its 10 bytes begin as none", told
    )
    assert "cannot be opened: energon lint" not in told
    assert sum(read_info(open_store(out)).shard_counts.values()) == 1
