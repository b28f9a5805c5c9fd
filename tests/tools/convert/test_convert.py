"""`energon convert`: every source becomes a dataset that is read, byte by byte the same however it came about."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shlex
import sqlite3
import subprocess
import sys
from contextlib import closing
from typing import Any, cast

import pytest
from commands import energon, output_of, refusal_of
from forked import import_for_training, run_program
from keyed import write_mix
from paths import REPOSITORY
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo
from sources import (
    QUIETLY,
    SOURCES,
    Make,
    StopAtMove,
    classes,
    coco,
    content,
    convert,
    converted,
    llava,
    members,
    meta,
    openai,
    pairs,
    parquet,
    picture,
    read,
    refused,
    table,
    tars,
    write_pictures,
)

from energon_bridge.core.format.nvmeta import read_info
from energon_bridge.core.prepare import rebuild_index
from energon_bridge.core.prepare.split import parse_ratio
from energon_bridge.core.storage import open_store
from energon_bridge.tools.convert.options import ConvertOptions
from energon_bridge.tools.convert.scaling import reencoded
from energon_bridge.tools.convert.shard_plan import split_numbers

LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))


@pytest.fixture(params=SOURCES)
def make(request: pytest.FixtureRequest) -> Make:
    return SOURCES[request.param]


def test_every_byte_of_media_arrives_and_preparing_afterwards_changes_nothing(tmp_path, make):
    source, flags, media = make(tmp_path / "in", 13)
    out = converted(source, tmp_path / "out", *flags, "--samples-per-shard", 4, "--shuffle", 5)
    stored = members(out)
    images = [data for name, data in stored.items() if name.lower().endswith((".jpg", ".png"))]
    assert sorted(images) == sorted(media.values())
    assert sum(read_info(open_store(out)).shard_counts.values()) == 13
    assert not (out / ".nv-meta.parts").exists()
    before = content(out)
    with closing(sqlite3.connect(out / ".nv-meta/index.sqlite")) as index:
        media = index.execute("SELECT count(*) FROM media_metadata").fetchall()
    assert media[0][0] >= 13
    rebuild_index(out)
    for name, data in content(out).items():
        assert name == ".nv-meta/tars.json" or data == before[name] or name.startswith(".nv-meta/index."), name


def test_the_same_bytes_whatever_the_workers(tmp_path, make):
    source, flags, _ = make(tmp_path / "in", 23)
    flags = [*flags, "--samples-per-shard", 3, "--shuffle", 5]
    first = content(converted(source, tmp_path / "a", *flags))
    assert content(converted(source, tmp_path / "b", *flags, "--num-workers", 3)) == first
    other = content(converted(source, tmp_path / "c", *flags[:-1], 6))
    assert sorted(name for name in other if name.endswith(".tar")) == sorted(n for n in first if n.endswith(".tar"))
    assert other["train/00000.tar"] != first["train/00000.tar"]


# --- what becomes of each -----------------------------------------------------------------------------------------


def test_llava_becomes_conversations(tmp_path):
    source, flags, pictures = llava(tmp_path / "in", 4)
    out = converted(source, tmp_path / "out", *flags, "--split-ratio", "1,0,0")
    stored = members(out)
    assert meta(out)["__class__"] == "CrudeWebdataset"
    entry = json.loads(stored["000000002.json"])
    assert entry["conversations"][1]["value"] == "answer 2"
    assert entry["files"] == ["0/2.png"]
    assert "image" not in entry
    assert stored["000000002.0.png"] == pictures["0/2.png"]


def test_llava_becomes_captions_if_told(tmp_path):
    source, flags, _ = llava(tmp_path / "in", 4)
    flags = [*flags, "--split-ratio", "1,0,0", "--sample-type", "CaptioningSample"]
    out = converted(source, tmp_path / "out", *flags)
    assert meta(out)["field_map"] == {"image": "0.jpg,0.png", "caption": "json[conversations][1][value]"}
    batches = read(out)
    assert [batch.caption[0] for batch in batches] == [f"answer {n}" for n in range(4)]
    assert batches[3].image[0].size == (16, 19)


def test_messages_with_images_inside(tmp_path):
    source, _, pictures = openai(tmp_path / "in", 2)
    stored = members(converted(source, tmp_path / "out", "--split-ratio", "1,0,0"))
    assert stored["000000001.0.jpg"] == pictures["2.jpg"]
    assert stored["000000001.1.jpg"] == pictures["3.jpg"]
    assert json.loads(stored["000000001.json"])["messages"][0]["content"] == [
        {"type": "image"},
        {"type": "text", "text": "and"},
        {"type": "image"},
    ]


def test_pairs_classes_and_coco(tmp_path):
    source, _, _ = pairs(tmp_path / "pairs", 4)
    batches = read(converted(source, tmp_path / "a", "--split-ratio", "1,0,0"))
    assert [(b.__key__[0], b.caption[0]) for b in batches] == [
        ("0/a_0", "caption 0"),
        ("0/a_2", "caption 2"),
        ("1/a_1", "caption 1"),
        ("1/a_3", "caption 3"),
    ]
    source, _, _ = classes(tmp_path / "classes", 3)
    batches = read(converted(source, tmp_path / "b", "--split-ratio", "1,0,0"))
    assert [(b.__key__[0], b.label[0], b.label_name[0]) for b in batches] == [
        ("cat/001", 0, "cat"),
        ("dog/000", 1, "dog"),
        ("dog/002", 1, "dog"),
    ]
    source, flags, _ = coco(tmp_path / "coco", 3)
    out = converted(source, tmp_path / "c", *flags, "--split-ratio", "1,0,0", "--field", "caption=captions[1]")
    assert [(b.__key__[0], b.caption[0]) for b in read(out)] == [(f"{n:012d}", f"caption {n} 1") for n in range(3)]


def test_tables(tmp_path):
    source, _, _ = table(tmp_path / "in", 3)
    batches = read(converted(source, tmp_path / "out", "--split-ratio", "1,0,0"))
    assert [batch.caption[0] for batch in batches] == [f'a "quoted"\nlong caption {n}' for n in range(3)]
    assert json.loads(members(tmp_path / "out")["000000002.json"]) == {
        "Caption": 'a "quoted"\nlong caption 2',
        "year": "1992",
        "files": ["2.png"],
    }


def test_parquet_questions(tmp_path):
    source, _, _ = parquet(tmp_path / "in", 5)
    batches = read(converted(source, tmp_path / "out", "--split-ratio", "1,0,0"))
    assert [(b.context[0], b.answers[0]) for b in batches] == [("what?", [f"answer {n}"]) for n in range(5)]


def test_splits_of_the_source_stay(tmp_path):
    names = [f"{part}/{kind}/{n}.jpg" for part in ("validation", "train") for kind in "ab" for n in range(3)]
    write_pictures(tmp_path / "in", names)
    out = converted(tmp_path / "in", tmp_path / "out")
    assert {part: len(read(out, part)) for part in ("train", "val")} == {"train": 6, "val": 6}
    assert [batch.label[0] for batch in read(out, "val")] == [0, 0, 0, 1, 1, 1]


SAVE_WITH_DATASETS = """
import sys
from pathlib import Path
import datasets, pyarrow

root = Path(sys.argv[1])
pictures = [path.read_bytes() for path in sorted((root / "pictures").iterdir())]
features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["cat", "dog"]))
rows = {"image": [{"bytes": data, "path": None} for data in pictures], "label": [n % 2 for n in range(5)]}
table = datasets.table.InMemoryTable(pyarrow.table(rows, schema=features.arrow_schema))
data = datasets.Dataset(table, info=datasets.DatasetInfo(features=features), fingerprint="first")
some = data.select(range(3), new_fingerprint="second")
datasets.DatasetDict(train=data, validation=some).save_to_disk(str(root / "in"))
(root / "files").mkdir()
data.to_parquet(str(root / "files/train-00000-of-00001.parquet"))
some.to_parquet(str(root / "files/test-00000-of-00001.parquet"))
"""


def test_hugging_face_datasets(tmp_path):
    pytest.importorskip("pyarrow")
    if importlib.util.find_spec("datasets") is None:
        pytest.skip("datasets is not installed")
    for n in range(5):
        (tmp_path / "pictures").mkdir(exist_ok=True)
        (tmp_path / "pictures" / f"{n}.jpg").write_bytes(picture(n))
    line = [sys.executable, "-W", "ignore", "-c", SAVE_WITH_DATASETS, str(tmp_path)]
    saved = subprocess.run(line, capture_output=True, text=True)
    assert saved.returncode == 0, saved.stderr
    names = ["cat", "dog"]
    out = converted(tmp_path / "in", tmp_path / "out")
    assert [(b.label[0], b.label_name[0]) for b in read(out)] == [(n % 2, names[n % 2]) for n in range(5)]
    assert len(read(out, "val")) == 3
    out = converted(tmp_path / "files", tmp_path / "out2")
    assert [len(read(out, part)) for part in ("train", "test")] == [5, 3]
    assert members(out)["000000004.jpg"] == picture(4)


def test_without_pyarrow_the_extra_is_named(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    script = (
        "import sys; sys.modules['pyarrow'] = None\n"
        f"sys.argv = ['energon', 'convert', {str(tmp_path / 'x.parquet')!r}, {str(tmp_path / 'out')!r}]\n"
        "from energon_bridge.tools.cli.main import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY)
    assert result.returncode == 1
    assert result.stderr.endswith("need pyarrow: pip install 'energon-bridge[parquet]'\n")


def test_webdatasets_shuffled_anew(tmp_path):
    source, _, _ = tars(tmp_path / "in", 30)
    flags = ["--split-ratio", "1,0,0", "--samples-per-shard", 7]
    plain = converted(source, tmp_path / "plain", *flags)
    keys = [name.removesuffix(".json") for name in members(plain) if name.endswith(".json")]
    assert keys == [f"key{n}" for n in range(30)]
    mixed = converted(source, tmp_path / "mixed", *flags, "--shuffle", 1)
    assert members(mixed) == members(plain)
    shuffled = [name.removesuffix(".json") for name in members(mixed) if name.endswith(".json")]
    assert shuffled != keys
    assert sorted(shuffled) == sorted(keys)
    again = converted(mixed, tmp_path / "again", "--samples-per-shard", 11, "--shuffle", 2)
    assert members(again) == members(plain)
    assert list(read_info(open_store(again)).shard_counts.values()) == [11, 11, 8]


def test_prepared_webdatasets_keep_type_fields_and_split(tmp_path):
    from energon_bridge.tools.testing import create_captioning_test_dataset

    source = create_captioning_test_dataset(tmp_path / "in", num_train=9, num_val=4)
    out = converted(source, tmp_path / "out", "--samples-per-shard", 5)
    assert meta(out) == meta(source)
    for part in ("train", "val"):
        assert [b.caption for b in read(out, part)] == [b.caption for b in read(source, part)]


def test_a_mix_is_merged_cut_and_filtered(tmp_path):
    from tar_builder import write_texts

    from energon_bridge.tools.columns.making import add_column
    from energon_bridge.tools.testing import create_captioning_test_dataset

    first, second = (create_captioning_test_dataset(tmp_path / name, num_train=9, num_val=4) for name in "ab")
    add_column(second, "number", lambda sample: int(sample.__key__[-2:]))
    whole = {"path": "./a"}
    parts = [{**whole, "subset": {"range": [2, 5]}}, {"path": "./b", "filter": "number % 2 == 1", "weight": 7}]
    mix = write_mix(tmp_path / "mix.yaml", train={"blend": parts}, val=whole)
    out = converted(mix, tmp_path / "out", "--keys", "number")
    expected = [read(first)[n].caption for n in (2, 3, 4)] + [read(second)[n].caption for n in (1, 3, 5, 7)]
    assert [batch.caption for batch in read(out)] == expected
    assert [batch.caption for batch in read(out, "val")] == [batch.caption for batch in read(first, "val")]
    assert "occurs again in" in refused(mix, tmp_path / "twice")
    write_texts(tmp_path / "texts", {"s.tar": ["x"]})
    output_of("prepare", tmp_path / "texts", "--sample-type", "CrudeWebdataset", "--split-ratio", "1,0,0")
    write_mix(mix, train={"concat": [whole, {"path": "./texts"}]})
    assert "differ in sample type or field map" in refused(mix, tmp_path / "other")
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n')
    write_mix(mix, train={"path": "./x.jsonl"})
    assert "is a join, a JSONL file or a table" in refused(mix, tmp_path / "lines")


def test_duplicate_keys_of_tars(tmp_path):
    from energon_bridge.tools.testing import write_shard

    for number in range(2):
        (tmp_path / "in").mkdir(exist_ok=True)
        write_shard(tmp_path / "in" / f"{number}.tar", {f"{n}": {"txt": b"x%d" % number} for n in range(3)})
    message = refused(tmp_path / "in", tmp_path / "out")
    assert "/0.tar, sample '" in message
    assert "--keys number" in message
    out = converted(tmp_path / "in", tmp_path / "out", "--keys", "number", "--split-ratio", "1,0,0")
    assert sorted(members(out)) == [f"{n:09d}.txt" for n in range(6)]


def test_shards_by_bytes(tmp_path):
    source, _, _ = classes(tmp_path / "in", 40)
    out = converted(source, tmp_path / "out", "--bytes-per-shard", "12k", "--split-ratio", "1,0,0")
    sizes = [path.stat().st_size for path in sorted(out.rglob("*.tar"))]
    assert max(sizes) <= 12_000
    assert min(sizes[:-1]) > 12_000 - 3 * 1024


@pytest.mark.parametrize(
    ("ratio", "counts"), [("9,1,0", (900, 100, 0)), ("1,1,2", (250, 250, 500)), ("0,3,0", (0, 1000, 0))]
)
def test_splits_are_exact_and_stay_when_the_source_grows(ratio, counts):
    rule = parse_ratio(ratio)
    parts = split_numbers(1000, rule)
    assert tuple(len(parts.get(name, ())) for name in ("train", "val", "test")) == counts
    grown = split_numbers(1700, rule)
    for name, numbers in parts.items():
        assert [n for n in grown[name].tolist() if n < 1000] == numbers.tolist()
    runs = sorted(number for numbers in parts.values() for number in numbers.tolist())
    assert runs == list(range(1000))


# --- asking and showing -------------------------------------------------------------------------------------------


def test_enter_accepts_every_proposal(tmp_path):
    source, _, _ = pairs(tmp_path / "in", 12)
    asked = converted(source, tmp_path / "a", "--ask", answers="\n" * 10)
    assert content(asked) == content(converted(source, tmp_path / "b"))
    output = convert(source, tmp_path / "c", "--ask", answers="ImageSample\n\n1,0,0\n5\n")
    assert "Column of image (torch.Tensor) [image]" in output
    assert list(read_info(open_store(tmp_path / "c")).shard_counts.values()) == [5, 5, 2]
    assert meta(tmp_path / "c")["sample_type"]["__class__"] == "ImageSample"


def noise(size: tuple[int, int], form: str, mode: str = "RGB", **settings: object) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise(size, 60).convert(mode).save(buffer, form, **settings)
    return buffer.getvalue()


@pytest.mark.parametrize("form", ["JPEG", "JPEG beside EXIF", "WEBP", "PNG"])
def test_images_that_become_smaller_stay_turned(form):
    """What says so is their XMP alone."""
    xmp, exif, text = '<x tiff:Orientation="6"/>', Image.Exif(), PngInfo()
    text.add_itxt("XML:com.adobe.xmp", xmp)
    exif[0x010F] = "a maker"
    settings = {"pnginfo": text} if form == "PNG" else {"xmp": xmp.encode()}
    settings |= {"exif": exif} if "beside" in form else {}
    options = ConvertOptions(layout=cast("Any", None), max_pixels=5000)
    made = reencoded("x", noise((400, 200), form.partition(" ")[0], **settings), options)
    with Image.open(io.BytesIO(made)) as image:
        assert image.size == (100, 50)
        assert ImageOps.exif_transpose(image).size == (50, 100)


def test_images_become_smaller_if_asked(tmp_path):
    """Only what has too many pixels is scaled; format, shape and EXIF data stay, and all else does byte for byte."""
    exif = Image.Exif()
    exif[0x0112] = 6  # turned
    frames = [Image.effect_noise((90, 90), 60) for _ in range(2)]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    pictures = {
        "a.jpg": noise((400, 200), "JPEG", quality=95, exif=exif),
        "b.png": noise((90, 160), "PNG", "P"),
        "c.webp": noise((300, 300), "WEBP", "RGBA"),
        "d.jpg": noise((80, 50), "JPEG", quality=95),
        "e.gif": (tmp_path / "moving.gif").read_bytes(),
    }
    source = tmp_path / "in"
    source.mkdir()
    for name, data in pictures.items():
        (source / name).write_bytes(data)
        (source / name).with_suffix(".txt").write_text(name)
    flags = ["--split-ratio", "1,0,0", "--samples-per-shard", 2]
    out = members(converted(source, tmp_path / "small", *flags, "--max-pixels", 5000))
    sizes = {name: Image.open(io.BytesIO(data)).size for name, data in out.items() if not name.endswith("txt")}
    assert sizes == {"a.jpg": (100, 50), "b.png": (53, 94), "c.webp": (70, 70), "d.jpg": (80, 50), "e.gif": (90, 90)}
    assert Image.open(io.BytesIO(out["a.jpg"])).getexif()[0x0112] == 6
    assert [Image.open(io.BytesIO(out[name])).format for name in ("a.jpg", "b.png", "c.webp")] == [
        "JPEG",
        "PNG",
        "WEBP",
    ]
    assert [name for name in pictures if out[name] == pictures[name]] == ["d.jpg", "e.gif"]
    shown = convert(source, tmp_path / "none", *flags, "--max-pixels", 5000, "--dry-run")
    assert "Sizes are before scaling images down." in shown
    again = members(converted(source, tmp_path / "two", *flags, "--max-pixels", 5000, "--num-workers", 2))
    assert again == out
    low = members(converted(source, tmp_path / "low", *flags, "--quality", 30))
    assert [name for name in pictures if len(low[name]) < len(pictures[name])] == ["a.jpg", "c.webp", "d.jpg"]
    assert len(out["a.jpg"]) > len(
        members(converted(source, tmp_path / "both", *flags, "--max-pixels", 5000, "--quality", 30))["a.jpg"]
    )
    high = members(converted(source, tmp_path / "high", *flags, "--quality", 100))
    assert high["d.jpg"] == pictures["d.jpg"]  # it would be larger
    assert "max_pixels was 5000, now 6000" in refused(source, tmp_path / "small", *flags, "--max-pixels", 6000)
    assert "max_pixels was 5000, now None" in refused(source, tmp_path / "small", *flags)


def test_images_that_cannot_become_smaller(tmp_path):
    source, _, _ = pairs(tmp_path / "in", 5)
    (source / "0/a.0.JPG").write_bytes(b"no image")
    message = refused(source, tmp_path / "out", "--quality", 50)
    said = "a.0.JPG: cannot scale down the part 'jpg': UnidentifiedImageError: its 8 bytes are no image that can be"
    assert said in message.replace("\n", " ")
    assert len(read(converted(source, tmp_path / "out", "--quality", 50, "--on-error", "skip"))) == 4
    message = refused(source, tmp_path / "other", "--max-pixels", 50, "--bytes-per-shard", "1M")
    assert "use --samples-per-shard instead" in message.replace("\n", " ")


def test_a_dry_run_shows_and_writes_nothing(tmp_path):
    source, flags, _ = coco(tmp_path / "in", 12)
    output = convert(source, tmp_path / "out", *flags, "--dry-run")
    for text in ("COCO captions, 12 samples", "caption from captions[0]", "Sample 000000000001: jpg (", "caption 1 1"):
        assert text in output
    for text in ("A dry run: it looked only at the first 3 samples, and wrote nothing",):
        assert text in output
    assert not (tmp_path / "out").exists()


def test_json_is_all_that_goes_to_stdout(tmp_path):
    source, flags, _ = coco(tmp_path / "in", 12)
    out = tmp_path / "out"

    def run(*arguments):
        result = energon(*arguments, "--json")
        assert result.exit_code == 0, result.output
        assert result.stderr
        return json.loads(result.stdout)

    done = run("convert", source, out, *flags, "--split-ratio", "9,1,0")
    assert sum(done["shard_counts"].values()) == 12
    assert {part: len(shards) for part, shards in done["split_parts"].items()} == {"train": 1, "val": 1, "test": 0}
    assert run("prepare", out, "--tar-index-only")["shard_counts"] == done["shard_counts"]
    assert run("prepare-media", out, "--media-metadata-by-extension") == {"num_files": 12, "failed": []}


def test_prepare_points_to_convert(tmp_path):
    source, _, _ = llava(tmp_path, 1)
    for path, hint in ((source, f"energon convert {source} OUT"), (tmp_path, f"energon convert {tmp_path} OUT")):
        assert hint in refusal_of("prepare", path)


# --- again, and killed --------------------------------------------------------------------------------------------


def test_stopped_at_each_file_that_is_moved(tmp_path, monkeypatch):
    source, media, _ = llava(tmp_path / "in", 8)
    flags = [*media, "--samples-per-shard", 3, "--split-ratio", "1,0,0"]
    whole = content(converted(source, tmp_path / "whole", *flags))
    stop = StopAtMove(monkeypatch)
    for stop_at in range(1, 100):
        out = tmp_path / str(stop_at)
        stop.after(stop_at)
        result = energon("convert", source, out, *QUIETLY, *flags)
        assert (result.exit_code == 0) == (stop.moved < stop_at)
        if result.exit_code == 0:
            break
        # A stop in the middle leaves no dataset, or all of it: what is read is never half of one.
        if (out / ".nv-meta/.info.json").exists():
            assert {name: data for name, data in content(out).items() if ".nv-meta.parts" not in name} == whole
        stop.after(0)
        converted(source, out, *flags)
        assert content(out) == whole
    assert stop_at > 15


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SOURCES if name != "tars"] if LONG else ["llava"])
def test_it_trains_by_the_line_that_is_shown(tmp_path, name):
    source, flags, _ = SOURCES[name](tmp_path / "in", 40)
    output = convert(source, tmp_path / "out", *flags, "--split-ratio", "4,1,0")
    line = next(line for line in output.splitlines() if line.startswith("Try it")).partition(": ")[2]
    arguments = [*shlex.split(line)[1:], f"run_dir={tmp_path / 'run'}", "train.max_steps=3", "validation.interval=3"]
    import_for_training()
    done = run_program(arguments, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "loss" in (done.stdout + done.stderr)


def test_no_training_is_shown_for_samples_that_need_a_cooker(tmp_path):
    source, flags, _ = tars(tmp_path / "in", 6)
    output = convert(source, tmp_path / "out", *flags)
    assert f"Look at it: energon preview {tmp_path / 'out'}" in output
    assert "Try it" not in output
