"""Media metadata: what prepare and prepare-media find, and what stores say of a file, without decoding it."""

from __future__ import annotations

import io
import json
import sqlite3
import sys
import warnings
import wave
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from crude import prepared
from hypothesis import given, settings, strategies as st
from PIL import Image

from energon_bridge import DecodeFileStore, PrimaryFileStore, SampleDecoder, SystemFileStore
from energon_bridge.core.errors import (
    ConfigurationError,
    EmptyDatasetError,
    FileNotInStoreError,
    KeyIndexError,
    MediaMetadataError,
)
from energon_bridge.core.format.media import AVMetadata, ImageMetadata, kind_by_head, kind_by_name, read_metadata
from energon_bridge.core.prepare import parse_ratio, prepare_dataset
from energon_bridge.core.stores import WebdatasetFileStore
from energon_bridge.models.images.jpeg import plain_jpeg
from energon_bridge.tools.check.media import MediaFilter, metadata_row, prepare_media
from energon_bridge.tools.cli.main import main

EXTENSION, HEADER = MediaFilter(strategy="EXTENSION"), MediaFilter(strategy="HEADER")


def image(width: int, height: int, form: str = "JPEG", mode: str = "RGB", **kwargs: Any) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, form, **kwargs)
    return file.getvalue()


def wav(frames: int = 4000, rate: int = 8000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(2)
        sound.setsampwidth(2)
        sound.setframerate(rate)
        sound.writeframes(bytes(4 * frames))
    return file.getvalue()


CONTENT = {
    "a.jpg": image(20, 30),
    "a.txt": b"no picture",
    "b.PNG": image(7, 5, "PNG", "RGBA"),
    "c.webp": image(9, 11, "WEBP"),
    "d.dat": image(3, 4, "GIF", "P"),
    "e.tif": image(6, 2, "TIFF", "L"),
}
EXPECTED = {
    "a.jpg": ImageMetadata(width=20, height=30, format="JPEG", mode="RGB"),
    "b.PNG": ImageMetadata(width=7, height=5, format="PNG", mode="RGBA"),
    "c.webp": ImageMetadata(width=9, height=11, format="WEBP", mode="RGB"),
    "d.dat": ImageMetadata(width=3, height=4, format="GIF", mode="P"),
    "e.tif": ImageMetadata(width=6, height=2, format="TIFF", mode="L"),
}
FILTERS = [
    (EXTENSION, {"a.jpg", "b.PNG", "c.webp", "e.tif"}),
    (HEADER, {"a.jpg", "b.PNG", "c.webp", "d.dat", "e.tif"}),
    (MediaFilter(strategy="GLOB", patterns="*.png, *.DAT"), {"b.PNG", "d.dat"}),
    (MediaFilter(strategy="GLOB", patterns="a.*"), {"a.jpg"}),
]


def make(kind: str, folder: Path) -> Path:
    """Write the content as a prepared dataset of two shards, or as files of a folder."""
    if kind == "folder":
        folder.mkdir()
        for name, content in CONTENT.items():
            (folder / name).write_bytes(content)
        return folder
    samples: dict[str, dict[str, bytes]] = {}
    for name, content in CONTENT.items():
        key, _, part = name.partition(".")
        samples.setdefault(key, {})[part] = content
    return prepared(folder, {key: samples[key] for key in "abc"}, {key: samples[key] for key in "de"})


def store_of(kind: str, folder: Path) -> Any:
    return SystemFileStore(folder) if kind == "folder" else WebdatasetFileStore(folder)


def rows(folder: Path) -> dict[str, tuple[str, str]]:
    connection = sqlite3.connect(folder / ".nv-meta" / "index.sqlite")
    found = {key: row for key, *row in connection.execute("SELECT * FROM media_metadata")}
    connection.close()
    return {key: (kind, text) for key, (kind, text) in found.items()}


# Finding -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dataset", "folder"])
@pytest.mark.parametrize(("media", "names"), FILTERS)
def test_every_filter_works_on_every_kind(media: MediaFilter, names: set[str], kind: str, tmp_path: Path) -> None:
    """By patterns, and by headers in a folder, megatron-energon finds nothing, or hangs."""
    folder = make(kind, tmp_path / "d")
    found = prepare_media(folder, media, num_workers=2)
    assert (found.num_files, found.failed) == (len(names), ())
    store = store_of(kind, folder)
    assert {name: store.get_media_metadata(name) for name in names} == {name: EXPECTED[name] for name in names}
    for name in CONTENT.keys() - names:
        with pytest.raises(FileNotInStoreError, match=f"{folder}: no media metadata of '{name}'"):
            store.get_media_metadata(name)


def test_the_rows_are_those_of_the_format(tmp_path: Path) -> None:
    folder = make("dataset", tmp_path / "d")
    prepare_media(folder, EXTENSION)
    assert rows(folder)["a.jpg"] == ("image", '{"width":20,"height":30,"format":"JPEG","mode":"RGB"}')
    kind, text = metadata_row(AVMetadata(audio_duration=0.5, audio_channels=2))
    assert (kind, text) == ("av", '{"audio_duration":0.5,"audio_channels":2}')
    assert read_metadata(kind, text, where="x") == AVMetadata(audio_duration=0.5, audio_channels=2)


def test_sound_is_looked_into_with_pyav(tmp_path: Path) -> None:
    pytest.importorskip("av")
    (tmp_path / "a.wav").write_bytes(wav())
    prepare_media(tmp_path, EXTENSION)
    expected = AVMetadata(audio_duration=0.5, audio_channels=2, audio_sample_rate=8000, audio_num_samples=4000)
    assert SystemFileStore(tmp_path).get_media_metadata("a.wav") == expected


def test_video_is_looked_into_with_pyav(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "v.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 24, "yuv420p"
        for _ in range(15):
            container.mux(stream.encode(av.VideoFrame(32, 24, "yuv420p")))
        container.mux(stream.encode())
    prepare_media(tmp_path, HEADER)
    expected = AVMetadata(video_duration=1.5, video_num_frames=15, video_fps=10.0, video_width=32, video_height=24)
    assert SystemFileStore(tmp_path).get_media_metadata("v.mp4") == expected


def test_without_pyav_videos_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "a.wav").write_bytes(wav())
    (tmp_path / "b.jpg").write_bytes(CONTENT["a.jpg"])
    with pytest.raises(
        ConfigurationError, match=r"a\.wav: videos and sound need PyAV: .*pip install 'energon-bridge\[video\]'"
    ):
        prepare_media(tmp_path, EXTENSION)
    assert not (tmp_path / ".nv-meta").exists()
    assert prepare_media(tmp_path, MediaFilter(strategy="GLOB", patterns="*.jpg")).num_files == 1


def test_a_header_behind_a_large_preview_is_found(tmp_path: Path) -> None:
    """More than the first bytes are read where they do not tell."""
    (tmp_path / "a.jpg").write_bytes(image(40, 30, exif=b"Exif\0\0" + bytes(65_000), icc_profile=bytes(200_000)))
    (tmp_path / "b.tif").write_bytes(image(200, 300, "TIFF"))
    assert prepare_media(tmp_path, EXTENSION).num_files == 2
    store = SystemFileStore(tmp_path)
    assert [store.get_media_metadata(name).width for name in ("a.jpg", "b.tif")] == [40, 200]


@cache
def jpegs() -> list[bytes]:
    """JPEGs with all that stands before the first scan."""
    profile, exif = bytes(70_000), Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "turned"
    noise = Image.effect_noise((33, 17), 90)
    found = [image(20, 30), image(9, 8, mode="L"), image(7, 6, mode="CMYK"), image(40, 30, progressive=True)]
    found += [image(8, 8, comment="hello"), image(8, 9, exif=exif), image(12, 8, icc_profile=profile, dpi=(72, 72))]
    found += [image(50, 20, subsampling=2, optimize=True), image(6, 5, restart_marker_blocks=1), image(65_000, 1)]
    both = io.BytesIO()
    noise.save(both, "MPO", save_all=True, append_images=[noise])
    return [*found, both.getvalue(), image(20, 30, "PNG"), b"", b"\xff\xd8\xff"]


@settings(max_examples=400, deadline=None)
@given(
    number=st.integers(0, len(jpegs()) - 1),
    changes=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), max_size=3),
    cut=st.none() | st.integers(0, 800),
)
def test_headers_of_plain_jpegs_are_read_as_pillow_reads_them(
    number: int, changes: list[tuple[int, int]], cut: int | None
) -> None:
    data = bytearray(jpegs()[number])
    for place, value in changes:
        if place < len(data):
            data[place] = value
    check_like_pillow(bytes(data[:cut]))


def check_like_pillow(data: bytes) -> None:
    """Check that Pillow finds what we do, if we do."""
    found = plain_jpeg(data)
    if found is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(data)) as opened:
            assert (found.width, found.height, found.format, found.mode) == (*opened.size, opened.format, opened.mode)


def test_jpegs_may_be_cut_off_anywhere() -> None:
    for data in jpegs():
        for cut in range(min(len(data), 800)):
            check_like_pillow(data[:cut])


def test_most_jpegs_are_plain() -> None:
    *plain, both, other, empty, cut = jpegs()
    assert all(plain_jpeg(one) is not None for one in plain)
    assert [plain_jpeg(one) for one in (both, other, empty, cut)] == [None] * 4


def test_files_that_are_no_media_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, content in {"good.jpg": CONTENT["a.jpg"], "bad.jpg": b"text", "empty.png": b"", "bad.wav": b""}.items():
        (tmp_path / name).write_bytes(content)
    found = prepare_media(tmp_path, EXTENSION)
    assert (found.num_files, sorted(found.failed)) == (1, ["bad.jpg", "bad.wav", "empty.png"])
    assert f"{tmp_path}/bad.jpg: not an image that Pillow can read" in caplog.text


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"text that is long enough", None),
        (b"", None),
        (b"BM but a text", None),
        (b"RIFF\0\0\0\0WAVE", "av"),
        (b"xxxx\0\0\0\0WAVE", None),
        (b"\0\0\0\x18ftypmp42", "av"),
        (b"\0\0\0\x18ftypavif", "image"),
        (b"\xff\xfb\x90", "av"),
    ],
)
def test_kinds_by_first_bytes(head: bytes, kind: str | None) -> None:
    assert kind_by_head(head) == kind


@pytest.mark.parametrize(
    ("name", "kind"), [("x.JPG", "image"), ("a.b.mp4", "av"), ("jpg", "image"), ("x.json", None), ("x.jpg.gz", None)]
)
def test_kinds_by_name(name: str, kind: str | None) -> None:
    assert kind_by_name(name) == kind


@pytest.mark.parametrize("patterns", [None, "", " , "])
def test_a_filter_needs_what_it_needs(patterns: str | None) -> None:
    with pytest.raises(ConfigurationError, match="GLOB got the patterns"):
        MediaFilter(strategy="GLOB", patterns=patterns)
    with pytest.raises(ConfigurationError, match="EXTENSION got the patterns"):
        MediaFilter(strategy="EXTENSION", patterns="*.jpg")


# Keeping -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dataset", "folder"])
def test_what_is_known_of_other_files_stays(kind: str, tmp_path: Path) -> None:
    folder = make(kind, tmp_path / "d")
    for _ in range(2):
        prepare_media(folder, MediaFilter(strategy="GLOB", patterns="*.jpg"))
    prepare_media(folder, MediaFilter(strategy="GLOB", patterns="*.png"))
    assert rows(folder).keys() == {"a.jpg", "b.PNG"}
    connection = sqlite3.connect(folder / ".nv-meta" / "index.sqlite")
    filters = connection.execute("SELECT strategy, patterns FROM media_filters ORDER BY filter_id").fetchall()
    connection.close()
    assert filters == [("GLOB", "*.jpg"), ("GLOB", "*.png")]
    if kind == "dataset":
        assert WebdatasetFileStore(folder).get("a.txt") == b"no picture"


def test_preparing_again_keeps_the_metadata_or_makes_it_anew(tmp_path: Path) -> None:
    folder = make("dataset", tmp_path / "d")
    uuid = (folder / ".nv-meta" / "index.uuid").read_text()
    prepare_media(folder, HEADER)
    assert (folder / ".nv-meta" / "index.uuid").read_text() == uuid
    prepare_dataset(folder, split=parse_ratio("1,0,0"))
    assert rows(folder).keys() == EXPECTED.keys()
    prepare_dataset(folder, split=parse_ratio("1,0,0"), media=MediaFilter(strategy="GLOB", patterns="*.jpg"))
    assert rows(folder).keys() == {"a.jpg"}


@pytest.mark.parametrize("kind", ["dataset", "folder"])
def test_without_metadata_the_remedy_is_named(kind: str, tmp_path: Path) -> None:
    folder = make(kind, tmp_path / "d")
    with pytest.raises(MediaMetadataError, match=f"{folder}: no media metadata.*energon prepare-media {folder}"):
        store_of(kind, folder).get_media_metadata("a.jpg")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("sound", "{}"), "unknown type 'sound'"),
        (("image", "{"), "cannot read it"),
        (("image", "[]"), "cannot read it"),
    ],
)
def test_rows_that_make_no_sense_are_refused(row: tuple[str, str], message: str) -> None:
    with pytest.raises(MediaMetadataError, match=f"x: {message}"):
        read_metadata(*row, where="x")


def test_metadata_through_other_stores(tmp_path: Path) -> None:
    folder = make("dataset", tmp_path / "d")
    prepare_media(folder, EXTENSION)
    decoding = DecodeFileStore(WebdatasetFileStore(folder), decoder=SampleDecoder())
    assert decoding.get_media_metadata("a.jpg") == EXPECTED["a.jpg"]
    assert PrimaryFileStore(decoding, "c").get_media_metadata(".webp") == EXPECTED["c.webp"]


def test_a_folder_without_media_and_a_dataset_without_index_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(EmptyDatasetError, match="no media files match the filter HEADER"):
        prepare_media(tmp_path, HEADER)
    assert not (tmp_path / ".nv-meta").exists()
    folder = make("dataset", tmp_path / "d")
    (folder / ".nv-meta" / "index.sqlite").unlink()
    with pytest.raises(KeyIndexError, match="energon prepare --tar-index-only"):
        prepare_media(folder, HEADER)


# The command line ----------------------------------------------------------------------------------------------------


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (["--media-metadata-by-glob", "*.png,*.webp"], 2),
        (["--media-metadata-by-header"], 5),
        (["--media-metadata-by-extension"], 4),
    ],
)
def test_prepare_media_and_prepare_from_the_command_line(options: list[str], count: int, tmp_path: Path) -> None:
    message = f"Done: stored metadata for {count} files."
    assert message in run("prepare-media", str(make("folder", tmp_path / "f")), "--num-workers", "2", *options)
    folder = make("dataset", tmp_path / "d")
    prepare = ["prepare", str(folder), "--non-interactive", "--force-overwrite", "--split-ratio", "1,0,0"]
    assert message in run(*prepare, "--num-workers", "2", *options)
    assert len(rows(folder)) == count


@pytest.mark.parametrize("kind", ["dataset", "folder"])
def test_tasks_find_what_one_run_finds(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("energon_bridge.tools.check.media._FILES_AT_A_TIME", 2)
    whole, shared = make(kind, tmp_path / "whole"), make(kind, tmp_path / "shared")
    options = ["--media-metadata-by-header", "--num-workers", "1"]
    run("prepare-media", str(whole), *options)
    for task in ("1/3", "0/3", "1/3"):
        run("prepare-media", str(shared), *options, "--task", task)
    if kind == "folder":
        assert "no task has read it" in run("prepare-media", str(shared), *options, "--finish", code=1)
    other = ["--media-metadata-by-extension", "--num-workers", "1"]
    assert "no task has read it" in run("prepare-media", str(shared), *other, "--finish", code=1)
    run("prepare-media", str(shared), *options, "--task", "2/3")
    assert "Done: stored metadata for 5 files." in run("prepare-media", str(shared), *options, "--finish")
    assert rows(shared) == rows(whole)
    assert not list(shared.rglob("*.found"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["prepare-media", "{folder}", "--media-metadata-by-header", "--task", "0/2", "--finish"],
            "exclude each other",
        ),
        (["prepare-media", "{folder}"], "give one of --media-metadata-by-glob"),
        (["prepare-media", "{folder}", "--media-metadata-by-header", "--media-metadata-by-extension"], "exclude each"),
        (["prepare-media", "{folder}/a.jpg", "--media-metadata-by-header"], "is a file, not a folder"),
        (["prepare", "{folder}", "--tar-index-only", "--media-metadata-by-header"], "use `energon prepare-media`"),
        (["prepare", "{folder}/x.jsonl", "--media-metadata-by-header"], "these options are for the folder"),
    ],
)
def test_mistakes_on_the_command_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    folder = make("folder", tmp_path / "f")
    output = run(*(argument.format(folder=folder) for argument in arguments), code=1)
    assert message in output


def test_metadata_needs_a_key_index(tmp_path: Path) -> None:
    folder = make("dataset", tmp_path / "d")
    with pytest.raises(ConfigurationError, match="leave out --no-key-index"):
        prepare_dataset(folder, split=parse_ratio("1,0,0"), key_index=False, media=HEADER)
    assert WebdatasetFileStore(folder).get("a.txt") == b"no picture"


def test_filesystem_stores_of_the_rival_are_read(tmp_path: Path) -> None:
    """What megatron-energon writes for a folder: the tables of section 1.5, and nothing else."""
    folder = make("folder", tmp_path / "f")
    (folder / ".nv-meta").mkdir()
    connection = sqlite3.connect(folder / ".nv-meta" / "index.sqlite")
    connection.execute(
        "CREATE TABLE media_metadata (entry_key TEXT PRIMARY KEY, metadata_type TEXT, metadata_json TEXT)"
    )
    text = json.dumps({"width": 1, "height": 2, "format": "JPEG", "mode": "RGB"}, separators=(",", ":"))
    connection.execute("INSERT INTO media_metadata VALUES ('a.jpg', 'image', ?)", (text,))
    connection.commit()
    connection.close()
    assert SystemFileStore(folder).get_media_metadata("a.jpg") == ImageMetadata(
        width=1, height=2, format="JPEG", mode="RGB"
    )
