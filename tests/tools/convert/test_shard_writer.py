"""ShardWriter: what it writes can be read, byte by byte the same each time, and nothing is half there."""

from __future__ import annotations

import io
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from forked import run_forked
from PIL import Image

from energon_bridge import (
    CaptioningSample,
    CrudeSample,
    ImageClassificationSample,
    InterleavedSample,
    ShardWriter,
    VQASample,
    WorkerConfig,
    finish_shards,
    get_loader,
    get_val_dataset,
)
from energon_bridge.core.errors import ConfigurationError, DuplicateKeyError, NotPreparedError, SourceError
from energon_bridge.core.format.nvmeta import read_info
from energon_bridge.core.format.tar_index import scan_tar
from energon_bridge.core.prepare import prepare_dataset, rebuild_index
from energon_bridge.core.prepare.split import parse_patterns
from energon_bridge.core.storage import open_store
from energon_bridge.tools.check.media import MediaFilter, prepare_media


def picture(number: int, side: int = 8, form: str = "JPEG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side + number), (number * 20 % 256, 80, 10)).save(buffer, form)
    return buffer.getvalue()


def captions(count: int) -> list[dict[str, object]]:
    return [
        {"__key__": f"k{n}", "image": picture(n, form="PNG" if n % 3 else "JPEG"), "caption": f"picture {n}"}
        for n in range(count)
    ]


def write(path: Path, samples: list[dict[str, object]], **options: object) -> Path:
    with ShardWriter(path, sample_type=CaptioningSample, **options) as out:
        for sample in samples:
            out.write(sample)
    return path


def content(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def read(path: Path, part: str = "train", **options: object) -> list[object]:
    dataset = get_val_dataset(path, split_part=part, batch_size=1, worker_config=WorkerConfig(num_workers=0), **options)
    return list(get_loader(dataset))


def test_what_is_written_is_read(tmp_path):
    samples = captions(7)
    path = write(tmp_path / "out", samples, samples_per_shard=3)
    batches = read(path, image_decode="pilrgb")
    assert [batch.__key__[0] for batch in batches] == [f"k{n}" for n in range(7)]
    assert [batch.caption[0] for batch in batches] == [f"picture {n}" for n in range(7)]
    assert [batch.image[0].size for batch in batches] == [(8, 8 + n) for n in range(7)]
    stored: dict[str, bytes] = {}
    for shard in sorted((path / "train").glob("*.tar")):
        with tarfile.open(shard) as archive:
            assert all((m.mtime, m.uid, m.gid, m.mode, m.uname) == (0, 0, 0, 0o644, "") for m in archive)
            stored |= {member.name: archive.extractfile(member).read() for member in archive}
    for n, sample in enumerate(samples):
        assert stored[f"k{n}.{'png' if n % 3 else 'jpg'}"] == sample["image"]


def test_the_same_files_as_preparing_afterwards(tmp_path):
    path = write(tmp_path / "out", captions(7), samples_per_shard=3)
    written = content(path)
    rows = "SELECT * FROM {} ORDER BY 1, 2, 3"

    def tables() -> list[object]:
        with closing(sqlite3.connect(path / ".nv-meta/index.sqlite")) as index:
            return [
                index.execute(rows.format(name)).fetchall() for name in ("samples", "sample_parts", "media_metadata")
            ]

    before = tables()
    assert len(before[2]) == 7
    prepare_dataset(path, split=parse_patterns(["train:train/.*"]), media=MediaFilter(strategy="EXTENSION"))
    prepare_media(path, MediaFilter(strategy="EXTENSION"))
    assert tables() == before
    for name, data in content(path).items():
        if "index." not in name and name != ".nv-meta/tars.json":
            assert data == written[name], name


@pytest.mark.parametrize("options", [{"samples_per_shard": 4}, {"bytes_per_shard": 10_240}])
def test_the_same_bytes_every_time(tmp_path, options):
    first, second = (content(write(tmp_path / name, captions(11), **options)) for name in "ab")
    assert first == second
    assert len([name for name in first if name.endswith(".tar")]) > 1


@pytest.mark.parametrize("limit", [1, 5_000, 9_216, 9_217, 20_000])
def test_shards_are_filled_and_never_larger(tmp_path, limit):
    path = write(tmp_path / "out", captions(9), bytes_per_shard=limit)
    shards = sorted((path / "train").glob("*.tar"))
    scans = [scan_tar(open_store(path), shard.relative_to(path).as_posix()) for shard in shards]
    assert sum(len(scan.keys) for scan in scans) == 9
    for number, (shard, scan) in enumerate(zip(shards, scans, strict=True)):
        assert shard.stat().st_size <= limit or len(scan.keys) == 1
        if number + 1 < len(shards):
            following = scans[number + 1].offsets
            assert shard.stat().st_size + following[1] - following[0] > limit


def test_fields_of_every_kind(tmp_path):
    with ShardWriter(tmp_path / "vqa", sample_type=VQASample) as out:
        for n in range(3):
            weights = np.array([0.5, n], np.float32)
            out.write({"image": picture(n), "context": f"what? {n}", "answers": ["a", "ß"], "answer_weights": weights})
    batch = read(tmp_path / "vqa")[2]
    assert (batch.context, batch.answers) == (["what? 2"], [["a", "ß"]])
    assert batch.answer_weights[0].tolist() == [0.5, 2.0]
    with ShardWriter(tmp_path / "classes", sample_type=ImageClassificationSample, split_part="val") as out:
        source = tmp_path / "x.PNG"
        source.write_bytes(picture(1, form="PNG"))
        out.write(ImageClassificationSample(__key__="a/b", image=source, label=3))
        out.write({"__key__": "a/c", "image": source, "label_name": "cat"})
    batches = read(tmp_path / "classes", "val")
    assert [(b.__key__[0], b.label[0], b.label_name[0]) for b in batches] == [("a/b", 3, None), ("a/c", None, "cat")]
    with ShardWriter(tmp_path / "crude", sample_type=CrudeSample) as out:
        out.write({"json": {"messages": []}, "0.jpg": picture(0), "1.jpg": source, "txt": "hello", "w.npy": weights})
    assert (tmp_path / "crude/.nv-meta/dataset.yaml").read_text().count("CrudeWebdataset") == 1


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"image": picture(0)}, "sample 1 ('000000001'): CaptioningSample requires the field `caption`"),
        ({"image": picture(0), "captoin": "x"}, "has no field `captoin`; it has image, caption. Did you mean 'capt"),
        ({"image": np.zeros((3, 4, 4)), "caption": "x"}, "is a ndarray, expected the encoded file: bytes, or a Path"),
        ({"image": b"what is it", "caption": "x"}, "unknown format of the bytes"),
        ({"image": b"", "caption": "x"}, "field `image`: is empty"),
        ({"image": Path("/no/where.jpg"), "caption": "x"}, "cannot read /no/where.jpg: No such file"),
        ({"image": picture(0), "caption": 5}, "field `caption`: is a int, expected text"),
        ({"__key__": "a.b", "image": picture(0), "caption": "x"}, "cannot name the part"),
        ({"__key__": "/a", "image": picture(0), "caption": "x"}, "cannot name the part"),
        (VQASample(__key__="v", image=b"", context=""), "is a VQASample, expected a CaptioningSample or a mapping"),
    ],
)
def test_samples_that_do_not_fit(tmp_path, sample, message):
    with pytest.raises(SourceError) as caught:
        write(tmp_path / "out", [{"image": picture(0), "caption": "good"}, sample])
    assert message in str(caught.value)
    assert content(tmp_path / "out") == {}, "nothing is left of what was begun"
    write(tmp_path / "out", captions(1))


def test_fields_that_come_and_go_are_refused(tmp_path):
    question = {"image": picture(0), "context": "a"}
    with ShardWriter(tmp_path / "vqa", sample_type=VQASample) as out:
        out.write({**question, "answer_weights": np.ones(2)})
        with pytest.raises(SourceError, match="the field answer_weights is not given here"):
            out.write(question)
    with (
        pytest.raises(SourceError, match="field `label`: is a str, expected int"),
        ShardWriter(tmp_path / "out", sample_type=ImageClassificationSample) as out,
    ):
        out.write({"image": picture(0), "label": "cat"})


def test_duplicate_keys_are_named(tmp_path):
    with pytest.raises(DuplicateKeyError, match=r"'k0' is in 'train/00000.tar' and again in 'train/00001.tar'"):
        write(tmp_path / "out", [*captions(2), *captions(1)], samples_per_shard=2)
    with pytest.raises(NotPreparedError):
        read_info(open_store(tmp_path / "out"))


def test_wrong_uses(tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match="InterleavedSample holds images and texts in a row"):
        ShardWriter(tmp_path / "x", sample_type=InterleavedSample)
    with pytest.raises(ConfigurationError, match="samples_per_shard=0: expected at least 1"):
        ShardWriter(tmp_path / "x", sample_type=CaptioningSample, samples_per_shard=0)
    with pytest.raises(ConfigurationError, match="writer='a/b': expected letters"):
        ShardWriter(tmp_path / "x", sample_type=CaptioningSample, writer="a/b")
    with (
        pytest.raises(ConfigurationError, match="no sample was written"),
        ShardWriter(tmp_path / "x", sample_type=CaptioningSample),
    ):
        pass
    write(tmp_path / "out", captions(1))
    with pytest.raises(ConfigurationError, match="is a prepared dataset already"):
        ShardWriter(tmp_path / "out", sample_type=CaptioningSample)
    monkeypatch.setattr("energon_bridge.tools.convert.shards._LOCK_SECONDS", 0.1)
    with ShardWriter(tmp_path / "two", sample_type=CaptioningSample) as out:
        out.write(captions(1)[0])
        with pytest.raises(ConfigurationError, match="another conversion is writing here"):
            ShardWriter(tmp_path / "two", sample_type=CaptioningSample)


def _write_some(path: Path, number: int) -> None:
    with ShardWriter(path, sample_type=CaptioningSample, samples_per_shard=3, writer=str(number)) as out:
        for n in range(5):
            out.write({"image": picture(n), "caption": f"{number} {n}"})


def test_several_writers_and_one_finish(tmp_path):
    def run(path: Path, processes: int) -> dict[str, bytes]:
        if processes == 1:
            for number in range(3):
                _write_some(path, number)
        else:
            run_forked(3, lambda number: _write_some(path, number))
        with pytest.raises(NotPreparedError):
            read_info(open_store(path))
        counts = finish_shards(path)
        assert counts == {f"train/{n}-0000{s}.tar": 3 - s for n in range(3) for s in range(2)}
        return content(path)

    assert run(tmp_path / "a", 3) == run(tmp_path / "b", 1)
    assert not (tmp_path / "a/.nv-meta.parts").exists()
    assert [batch.caption[0] for batch in read(tmp_path / "a")] == [f"{w} {n}" for w in range(3) for n in range(5)]


def test_a_writer_that_has_not_ended_is_noticed(tmp_path):
    _write_some(tmp_path, 0)
    out = ShardWriter(tmp_path, sample_type=CaptioningSample, writer="1")
    out.write(captions(1)[0])
    with pytest.raises(ConfigurationError, match="a writer is still running, or was killed"):
        finish_shards(tmp_path)
    out.__exit__(None, None, None)
    assert sum(finish_shards(tmp_path).values()) == 6


def test_long_and_foreign_names(tmp_path):
    keys = ["ä/ö", "x" * 300, "日本/語 1", "a b"]
    with ShardWriter(tmp_path / "out", sample_type=CrudeSample) as out:
        for key in keys:
            out.write({"__key__": key, "txt": key})
    written = content(tmp_path / "out")
    rebuild_index(tmp_path / "out")
    assert content(tmp_path / "out")["train/00000.tar.idx"] == written["train/00000.tar.idx"]
    with tarfile.open(tmp_path / "out/train/00000.tar") as archive:
        assert {member.name: archive.extractfile(member).read().decode() for member in archive} == {
            f"{key}.txt": key for key in keys
        }
