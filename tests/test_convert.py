"""`energon convert`: every source becomes a dataset that is read, byte by byte the same however it came about."""

from __future__ import annotations

import base64
import csv
import importlib.util
import io
import json
import os
import shlex
import signal
import sqlite3
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from PIL import Image

from energon_bridge import WorkerConfig, get_loader, get_val_dataset
from energon_bridge.cli.main import main
from energon_bridge.format.nvmeta import read_info
from energon_bridge.prepare import rebuild_index
from energon_bridge.prepare.convert import split_numbers
from energon_bridge.prepare.split import parse_ratio
from energon_bridge.storage import open_store

ROOT = Path(__file__).resolve().parent.parent


def picture(number: int, form: str = "JPEG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16 + number % 5), (number * 37 % 256, number % 256, 90)).save(buffer, form)
    return buffer.getvalue()


def write_pictures(folder: Path, names: list[str]) -> dict[str, bytes]:
    found = {}
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        found[name] = picture(number, "PNG" if name.endswith(".png") else "JPEG")
        path.write_bytes(found[name])
    return found


def convert(source: Path, out: Path, *flags: object, answers: str = "") -> Result:
    arguments = ["convert", source, out, "--no-progress", "--num-workers", "1", *flags]
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=answers)


def converted(source: Path, out: Path, *flags: object, answers: str = "") -> Path:
    result = convert(source, out, *flags, answers=answers)
    assert result.exit_code == 0, result.output
    return out


def refused(source: Path, out: Path, *flags: object) -> str:
    result = convert(source, out, *flags)
    assert result.exit_code == 1, result.output
    return result.output.partition("Error: ")[2]


def content(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def members(root: Path) -> dict[str, bytes]:
    found = {}
    for shard in read_info(open_store(root)).shard_counts:
        with tarfile.open(root / shard) as archive:
            found |= {member.name: archive.extractfile(member).read() for member in archive}
    return found


def meta(root: Path, name: str = "dataset.yaml") -> Any:
    return yaml.safe_load((root / ".nv-meta" / name).read_text())


def read(path: Path, part: str = "train") -> list[Any]:
    workers = WorkerConfig(num_workers=0)
    dataset = get_val_dataset(path, split_part=part, batch_size=1, worker_config=workers, image_decode="pilrgb")
    return list(get_loader(dataset))


# --- sources: each writes `count` samples with pictures, and returns the path to convert, flags, and all media ------


def llava(folder: Path, count: int) -> tuple[Path, list[object], dict[str, bytes]]:
    pictures = write_pictures(folder / "images", [f"{n % 2}/{n}.{'png' if n % 3 else 'jpg'}" for n in range(count)])
    entries = [
        {
            "id": f"{n // 2}",
            "image": name,
            "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": f"answer {n}"}],
        }
        for n, name in enumerate(pictures)
    ]
    (folder / "llava.json").write_text(json.dumps(entries))
    return folder / "llava.json", ["--media", folder / "images"], pictures


def openai(folder: Path, count: int) -> tuple[Path, list[object], dict[str, bytes]]:
    pictures = write_pictures(folder, [f"{n}.jpg" for n in range(2 * count)])
    with (folder / "chats.jsonl").open("w") as file:
        for n in range(count):
            inside = "data:image/jpeg;base64," + base64.b64encode(pictures[f"{2 * n + 1}.jpg"]).decode()
            pieces = [
                {"type": "image_url", "image_url": {"url": f"{2 * n}.jpg"}},
                {"type": "text", "text": "and"},
                {"type": "image_url", "image_url": {"url": inside}},
            ]
            turns = [{"role": "user", "content": pieces}, {"role": "assistant", "content": f"answer {n}"}]
            file.write(json.dumps({"messages": turns}) + "\n\n")
    return folder / "chats.jsonl", [], pictures


def pairs(folder: Path, count: int) -> tuple[Path, list[object], dict[str, bytes]]:
    pictures = write_pictures(folder, [f"{n % 2}/a.{n}.{'png' if n % 3 else 'JPG'}" for n in range(count)])
    for n, name in enumerate(pictures):
        (folder / name).with_suffix(".txt").write_text(f"caption {n}")
    return folder, [], pictures


def classes(folder: Path, count: int) -> tuple[Path, list[object], dict[str, bytes]]:
    return folder, [], write_pictures(folder, [f"{'cat' if n % 2 else 'dog'}/{n:03d}.jpg" for n in range(count)])


def coco(folder: Path, count: int) -> tuple[Path, list[object], dict[str, bytes]]:
    pictures = write_pictures(folder / "val2017", [f"{n:012d}.jpg" for n in range(count)])
    images = [{"id": n, "file_name": name, "height": 16} for n, name in enumerate(pictures)]
    notes = [{"id": 2 * n + k, "image_id": n, "caption": f"caption {n} {k}"} for k in (0, 1) for n in range(count)]
    (folder / "captions.json").write_text(json.dumps({"info": {}, "images": images, "annotations": notes}))
    return folder / "captions.json", ["--media", folder / "val2017"], pictures


def table(folder: Path, count: int) -> tuple[Path, list[object], dict[str, bytes]]:
    pictures = write_pictures(folder, [f"{n}.png" for n in range(count)])
    with (folder / "list.tsv").open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t")
        writer.writerow(["file", "Caption", "year"])
        writer.writerows([name, f'a "quoted"\nlong caption {n}', 1990 + n] for n, name in enumerate(pictures))
    return folder / "list.tsv", [], pictures


def parquet(folder: Path, count: int) -> tuple[Path, list[object], dict[str, bytes]]:
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    pictures = {f"{n}.jpg": picture(n) for n in range(count)}
    images = [{"bytes": data, "path": name} for name, data in pictures.items()]
    rows = {"image": images, "question": ["what?"] * count, "answer": [f"answer {n}" for n in range(count)]}
    folder.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / "x.parquet", row_group_size=4)
    return folder / "x.parquet", [], pictures


def tars(folder: Path, count: int) -> tuple[Path, list[object], dict[str, bytes]]:
    webdataset = pytest.importorskip("webdataset")
    pictures = {f"{n}.jpg": picture(n) for n in range(count)}
    folder.mkdir(parents=True, exist_ok=True)
    with webdataset.ShardWriter(str(folder / "s-%03d.tar"), maxcount=5, verbose=0) as out:
        for n, data in enumerate(pictures.values()):
            out.write({"__key__": f"key{n}", "jpg": data, "json": {"n": n}, "seg.png": picture(n, "PNG")})
    return folder, [], {**pictures, **{f"{n}.png": picture(n, "PNG") for n in range(count)}}


Make = Callable[[Path, int], tuple[Path, list[object], dict[str, bytes]]]
SOURCES: Mapping[str, Make] = {
    function.__name__: function for function in (llava, openai, pairs, classes, coco, table, parquet, tars)
}


@pytest.fixture(params=SOURCES)
def make(request: pytest.FixtureRequest) -> Make:
    return SOURCES[request.param]


def test_every_byte_of_media_arrives(tmp_path, make):
    source, flags, media = make(tmp_path / "in", 13)
    out = converted(source, tmp_path / "out", *flags, "--samples-per-shard", 4)
    stored = members(out)
    images = [data for name, data in stored.items() if name.lower().endswith((".jpg", ".png"))]
    assert sorted(images) == sorted(media.values())
    assert sum(read_info(open_store(out)).shard_counts.values()) == 13
    assert not (out / ".nv-meta.parts").exists()


def test_the_same_bytes_whatever_the_workers(tmp_path, make):
    source, flags, _ = make(tmp_path / "in", 23)
    flags = [*flags, "--samples-per-shard", 3, "--shuffle", 5]
    first = content(converted(source, tmp_path / "a", *flags))
    assert content(converted(source, tmp_path / "b", *flags, "--num-workers", 3)) == first
    other = content(converted(source, tmp_path / "c", *flags[:-1], 6))
    assert sorted(name for name in other if name.endswith(".tar")) == sorted(n for n in first if n.endswith(".tar"))
    assert other["train/00000.tar"] != first["train/00000.tar"]


def test_preparing_afterwards_changes_nothing(tmp_path, make):
    source, flags, _ = make(tmp_path / "in", 9)
    out = converted(source, tmp_path / "out", *flags, "--samples-per-shard", 4, "--shuffle", 5)
    before = content(out)
    with closing(sqlite3.connect(out / ".nv-meta/index.sqlite")) as index:
        media = index.execute("SELECT count(*) FROM media_metadata").fetchall()
    assert media[0][0] >= 9
    rebuild_index(out)
    for name, data in content(out).items():
        assert data == before[name] or name.startswith(".nv-meta/index."), name


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
import datasets

root = Path(sys.argv[1])
pictures = [path.read_bytes() for path in sorted((root / "pictures").iterdir())]
features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["cat", "dog"]))
rows = {"image": [{"bytes": data, "path": None} for data in pictures], "label": [n % 2 for n in range(5)]}
data = datasets.Dataset.from_dict(rows, features=features)
datasets.DatasetDict(train=data, validation=data.select(range(2))).save_to_disk(str(root / "in"))
(root / "files").mkdir()
data.to_parquet(str(root / "files/train-00000-of-00001.parquet"))
data.select(range(3)).to_parquet(str(root / "files/test-00000-of-00001.parquet"))
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
    assert len(read(out, "val")) == 2
    out = converted(tmp_path / "files", tmp_path / "out2")
    assert [len(read(out, part)) for part in ("train", "test")] == [5, 3]
    assert members(out)["000000004.jpg"] == picture(4)


def test_without_pyarrow_the_extra_is_named(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    script = (
        "import sys; sys.modules['pyarrow'] = None\n"
        f"sys.argv = ['energon', 'convert', {str(tmp_path / 'x.parquet')!r}, {str(tmp_path / 'out')!r}]\n"
        "from energon_bridge.cli.main import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 1
    assert result.stderr.endswith("read with pyarrow: pip install 'energon-bridge[parquet]'\n")


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
    from energon_bridge.testing import create_captioning_test_dataset

    source = create_captioning_test_dataset(tmp_path / "in", num_train=9, num_val=4)
    out = converted(source, tmp_path / "out", "--samples-per-shard", 5)
    assert meta(out) == meta(source)
    for part in ("train", "val"):
        assert [b.caption for b in read(out, part)] == [b.caption for b in read(source, part)]


def test_duplicate_keys_of_tars(tmp_path):
    from energon_bridge.testing import write_shard

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
    result = convert(source, tmp_path / "c", "--ask", answers="ImageSample\n\n1,0,0\n5\n")
    assert result.exit_code == 0, result.output
    assert "Column of image (torch.Tensor) [image]" in result.output
    assert list(read_info(open_store(tmp_path / "c")).shard_counts.values()) == [5, 5, 2]
    assert meta(tmp_path / "c")["sample_type"]["__class__"] == "ImageSample"


def test_a_dry_run_shows_and_writes_nothing(tmp_path):
    source, flags, _ = coco(tmp_path / "in", 12)
    result = convert(source, tmp_path / "out", *flags, "--dry-run")
    assert result.exit_code == 0
    for text in ("COCO captions, 12 samples", "caption from captions[0]", "Sample 000000000001: jpg (", "caption 1 1"):
        assert text in result.output
    assert not (tmp_path / "out").exists()


def test_it_runs_with_stdin_closed(tmp_path):
    source, flags, _ = llava(tmp_path / "in", 3)
    line = 'exec "$0" -c "from energon_bridge.cli.main import main; main()" convert "$@" <&-'
    arguments = [sys.executable, str(source), str(tmp_path / "out"), *map(str, flags)]
    result = subprocess.run(["bash", "-c", line, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "Done: 3 samples" in result.stdout


def test_prepare_points_to_convert(tmp_path):
    source, _, _ = llava(tmp_path, 1)
    for path, hint in ((source, f"energon convert {source} OUT"), (tmp_path, f"energon convert {tmp_path} OUT")):
        result = CliRunner().invoke(main, ["prepare", str(path)])
        assert result.exit_code == 1
        assert hint in result.output


# --- mistakes -----------------------------------------------------------------------------------------------------


def test_the_wrong_media_folder_is_named_with_the_right_one(tmp_path):
    source, _, _ = llava(tmp_path / "in", 3)
    message = refused(source, tmp_path / "out")
    assert f"none of the 3 files that the first rows name is there, such as {tmp_path}/in/0/0.jpg" in message
    assert f"It is in {tmp_path}/in/images: --media {tmp_path}/in/images." in message


def test_a_missing_image_is_named_or_skipped(tmp_path):
    source, flags, _ = llava(tmp_path / "in", 6)
    (tmp_path / "in/images/0/4.png").unlink()
    flags = [*flags, "--split-ratio", "1,0,0", "--samples-per-shard", 2]
    message = refused(source, tmp_path / "out", *flags)
    assert f"{source}, entry 4 (id 2): {tmp_path}/in/images/0/4.png cannot be read: No such file" in message
    result = convert(source, tmp_path / "out", *flags, "--on-error", "skip")
    assert result.exit_code == 0
    assert "Skipped 1 sample:" in result.output
    assert "0/4.png cannot be read" in result.output
    assert "Left as they were: 2 shards." in result.output
    assert list(read_info(open_store(tmp_path / "out")).shard_counts.values()) == [2, 2, 1]
    (tmp_path / "in/images/0/4.png").write_bytes(picture(4, "PNG"))
    converted(source, tmp_path / "out", *flags, "--on-error", "skip")
    assert content(tmp_path / "out") == content(converted(source, tmp_path / "other", *flags, "--on-error", "skip"))


def test_broken_lines_are_named_or_skipped(tmp_path):
    source, _, _ = openai(tmp_path / "in", 3)
    lines = source.read_text().splitlines()
    lines[2] = lines[2][:-5]
    source.write_text("\n".join(lines))
    message = refused(source, tmp_path / "out", "--split-ratio", "1,0,0")
    assert f"{source}, line 3: is no JSON: " in message
    result = convert(source, tmp_path / "out", "--split-ratio", "1,0,0", "--on-error", "skip")
    assert "Skipped 1 sample:" in result.output
    assert "Done: 2 samples" in result.output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--field", "caption=text"], "--field caption=text: the first rows have no such column; they have Caption, "),
        (["--field", "title=Caption"], "--field title: CaptioningSample has no such field; it has image, caption."),
        (["--sample-type", "VQASample"], "VQASample requires the fields context, too: add --field context=COLUMN."),
        (["--sample-type", "Captioning"], "there is no sample type 'Captioning'; did you mean Captio"),
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
        ("x.json", "[{", "x.json: is no JSON: "),
        ("x.json", '{"a": 1}', "x.json: an object with a; expected a list of objects, or COCO's"),
        ("x.json", "[1]", "x.json, entry 0: expected an object, found '1'."),
        ("x.json", "[]", "x.json: has no samples (JSON list)."),
        ("x.jsonl", "", "x.jsonl: has no samples (JSON lines)."),
        ("x.csv", "a,b\n1\n", "x.csv, row 2: has fewer fields than the 2 columns of the header (a, b)."),
        ("x.csv", "url,caption\nhttp://a.b/c.jpg,x\n", "the column `url` holds URLs (http://a.b/c.jpg)"),
        ("x.csv", "image,caption\n../../secret.png,x\n", "row 2: the path '../../secret.png' leads out of"),
        ("x.xls", "", "what is a .xls? Known are .json, .jsonl"),
        ("x.json", '{"images": [], "annotations": [{"image_id": 1, "bbox": []}]}', "these are no COCO captions"),
        ("x.json", '[{"conversations": "hi"}]', "entry 0: `conversations`: expected a list of turns, found 'hi'."),
    ],
)
def test_wrong_files(tmp_path, name, text, message):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_text(text)
    assert message in refused(tmp_path / "in" / name, tmp_path / "out")


def test_wrong_folders(tmp_path):
    assert "no such file or folder. Check the path." in refused(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    assert "no images, videos or sound below this folder" in refused(tmp_path / "empty", tmp_path / "out")
    source, _, _ = table(tmp_path / "in", 3)
    assert f"Give the file, {source}" in refused(tmp_path / "in", tmp_path / "out")
    assert "is the source itself" in refused(tmp_path / "in", tmp_path / "in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/precious.txt").write_text("mine")
    assert "holds precious.txt, which no conversion wrote." in refused(source, tmp_path / "out")
    out = converted(source, tmp_path / "other")
    before = content(out)
    message = refused(source, out, "--shuffle", 3)
    assert "holds a conversion with other options: shuffle was None and is 3." in message
    assert content(out) == before
    converted(source, out, "--shuffle", 3, "--overwrite")
    assert content(out) == content(converted(source, tmp_path / "fresh", "--shuffle", 3))


# --- again, and killed --------------------------------------------------------------------------------------------


def test_a_source_that_grew_costs_what_is_new(tmp_path):
    flags = ["--samples-per-shard", 3, "--split-ratio", "9,1,0"]
    source, media, _ = llava(tmp_path / "in", 25)
    out = converted(source, tmp_path / "out", *media, *flags)
    kept = {path: path.stat().st_mtime_ns for path in sorted((out / "train").glob("*.tar"))[:-1]}
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "in/images").rglob("*.*")}
    llava(tmp_path / "in", 35)
    for path, stamp in stamps.items():
        os.utime(path, ns=(stamp, stamp))
    result = convert(source, out, *media, *flags)
    assert result.exit_code == 0, result.output
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert content(out) == content(converted(source, tmp_path / "fresh", *media, *flags))
    again = convert(source, out, *media, *flags)
    assert "Left as they were: 13 shards." in again.output


def test_killed_at_any_moment_and_started_again(tmp_path):
    source, media, _ = llava(tmp_path / "in", 600)
    flags = [*media, "--samples-per-shard", 8, "--shuffle", 1, "--num-workers", 2]
    whole = content(converted(source, tmp_path / "whole", *flags))
    script = "from energon_bridge.cli.main import main; main()"
    line = [sys.executable, "-c", script, "convert", str(source), str(tmp_path / "out"), *map(str, flags)]
    seen = set()
    for kill_at in (1, 5, 20, 40, 70, 75):
        process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while process.poll() is None:
            finished = len(list((tmp_path / "out").rglob("*.tar"))) + len(list((tmp_path / "out").rglob("*.rec")))
            if finished >= 2 * kill_at:
                process.send_signal(signal.SIGKILL)
                break
            assert not (tmp_path / "out/.nv-meta/.info.json").exists() or finished >= 150
            time.sleep(0.001)
        process.communicate()
        seen.add(process.returncode)
    assert -signal.SIGKILL in seen
    time.sleep(0.2)  # workers see within that time that their parent is gone
    converted(source, tmp_path / "out", *flags)
    assert content(tmp_path / "out") == whole


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava", "pairs", "parquet"])
def test_it_trains_by_the_line_that_is_shown(tmp_path, name):
    source, flags, _ = SOURCES[name](tmp_path / "in", 40)
    result = convert(source, tmp_path / "out", *flags, "--split-ratio", "4,1,0")
    line = next(line for line in result.output.splitlines() if line.startswith("Try it")).partition(": ")[2]
    arguments = [*shlex.split(line)[1:], f"run_dir={tmp_path / 'run'}", "train.max_steps=3", "validation.interval=3"]
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "loss" in (done.stdout + done.stderr)
