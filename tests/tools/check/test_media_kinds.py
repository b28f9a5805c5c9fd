"""One table says what is an image, and what is video or sound: for decoders, `convert`, `prepare-media` and lists."""

from __future__ import annotations

import csv
import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import answer
from PIL import Image
from sources import QUIETLY, convert, converted, members, refused

from energon_bridge import SampleDecoder, get_loader, get_train_dataset
from energon_bridge.core.errors import DecodeError
from energon_bridge.core.format.media import (
    AV_EXTENSIONS,
    BY_EXTENSION,
    FORMATS,
    HEAD_BYTES,
    IMAGE_EXTENSIONS,
    UNSURE,
    extension_by_head,
    format_by_head,
    kind_by_head,
    kind_by_name,
)
from energon_bridge.core.format.nvmeta import read_info
from energon_bridge.core.storage import ByteRange, open_store
from energon_bridge.models.conversations.conversation import own_media
from energon_bridge.models.conversations.parts import names_medium
from energon_bridge.tools.check.media import MediaFilter, prepare_media
from energon_bridge.tools.columns.making import image_size

HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(40)
ALL = ("--split-ratio", "1,0,0")
WRITTEN = ("JPEG", "PNG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "JPEG2000", "AVIF", "ICO", "DDS", "TGA", "PCX", "SGI")


def picture(codec: str, color: str = "red", size: tuple[int, int] = (16, 16)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, color).save(out, codec)
    return out.getvalue()


def psd(width: int, height: int) -> bytes:
    """Return a picture of Photoshop: three channels, not packed."""
    pixels = np.arange(3 * height * width, dtype=np.uint8).tobytes()
    return struct.pack(">4sH6xHIIHH", b"8BPS", 1, 3, height, width, 8, 3) + bytes(12) + b"\0\0" + pixels


def as_csv(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def as_jsonl(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def type_of(out: Path) -> str:
    return (out / ".nv-meta/dataset.yaml").read_text().partition("__class__:")[2].split()[0]


def images_of(out: Path, count: int) -> dict[str, np.ndarray]:
    dataset = get_train_dataset(out, batch_size=1, image_decode="rgb8", shuffle_buffer_size=None)
    loader = iter(get_loader(dataset))
    return {batch.__key__[0]: np.asarray(batch.image[0]) for batch in (next(loader) for _ in range(count))}


# --- the table ----------------------------------------------------------------------------------------------------


def test_no_extension_has_two_kinds() -> None:
    names = [name for one in FORMATS for name in one.extensions]
    assert len(names) == len(set(names))
    assert not IMAGE_EXTENSIONS & AV_EXTENSIONS
    assert BY_EXTENSION.keys() == IMAGE_EXTENSIONS | AV_EXTENSIONS
    assert all(
        kind_by_name(f"x.{name}") == (None if name in UNSURE else one.kind) for name, one in BY_EXTENSION.items()
    )
    assert {"gif", "ico", "j2k", "jpx", "tiff", "aac", "avi", "m4v", "webm"} < BY_EXTENSION.keys()  # megatron-energon's


@pytest.mark.parametrize("codec", WRITTEN)
def test_first_bytes_say_the_format_or_nothing(codec: str) -> None:
    found = format_by_head(picture(codec)[:HEAD_BYTES])
    assert (None if found is None else found.codec) in (codec, None)
    assert (found is None) == (codec in ("PPM", "TGA", "PCX", "SGI"))


@pytest.mark.parametrize(
    ("head", "extension"),
    [
        (HEIC, "heic"),
        (b"\0\0\0\x1cftypmif1\0\0\0\0mif1avifmiaf", "avif"),
        (b"\0\0\0\x1cftypavis\0\0\0\0", "avif"),
        (b"\0\0\0\x18ftypmp42", "mp4"),
        (b"\0\0\0\x18ftypM4A ", "mp4"),
        (psd(2, 2), "psd"),
        (b"FLV\x01\x05\0\0\0\x09", "flv"),
        (b"\xff\xf1\x50\x80", "aac"),
        (b"\xff\xfb\x90\x00", "mp3"),
        (b"\0\0\x01\xba", "mpg"),
        (b"BM is a text", None),
        (b"\0\0\x01\0" + bytes(30), None),
        (b"text", None),
        (b"", None),
    ],
)
def test_extensions_by_first_bytes(head: bytes, extension: str | None) -> None:
    assert extension_by_head(head) == extension
    assert kind_by_head(head) == (None if extension is None else kind_by_name(f"x.{extension}"))


# --- decoding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extension", "data"),
    [
        *((name, picture(BY_EXTENSION[name].codec)) for name in ("tga", "ico", "dds", "pcx", "sgi", "avif", "apng")),
        *((name, picture("TGA")) for name in ("TGA", "vst")),
        ("psd", psd(5, 4)),
        ("jfif", picture("JPEG")),
        ("pnm", picture("PPM")),
        ("tga", picture("PNG")),  # whatever its name
        ("png", picture("ICO")),
    ],
)
def test_pictures_of_each_extension_decode(extension: str, data: bytes) -> None:
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(SampleDecoder(image_decode="rgb8").decode(extension, data), expected)
    deferred = SampleDecoder(image_decode="pilrgb", defer_images=True).decode(extension, data)
    assert deferred.size == deferred.get().size == expected.shape[1::-1]


def test_what_is_recognised_by_nothing_is_decoded_by_its_name_alone() -> None:
    with pytest.raises(DecodeError, match="the content is none of JPEG"):
        SampleDecoder().decode("jpg", picture("TGA"))
    with pytest.raises(DecodeError, match=r"none of JPEG.*TGA"):
        SampleDecoder().decode("tga", b"nothing of the kind" * 9)


SOUNDS = [
    *(("caf", "caf", "pcm_s16be"), ("au", "au", "pcm_s16be"), ("snd", "au", "pcm_mulaw"), ("w64", "w64", "pcm_s16le")),
    *(("wv", "wv", "wavpack"), ("tta", "tta", "tta"), ("mp2", "mp2", "mp2"), ("ac3", "ac3", "ac3")),
    *(("eac3", "eac3", "eac3"), ("m4b", "ipod", "aac"), ("3gp", "3gp", "aac"), ("3g2", "3g2", "aac")),
    *(("aifc", "aiff", "pcm_s16be"), ("weba", "webm", "libopus"), ("ra", "rm", "ac3"), ("adts", "adts", "aac")),
    *(("ts", "mpegts", "aac"), ("mts", "mpegts", "mp2"), ("m2ts", "mpegts", "aac"), ("opus", "ogg", "libopus")),
    ("sph", "", ""),
]
"""Extension, FFmpeg's muxer, codec."""


def sound(form: str, codec: str) -> bytes:
    """Return a second of a tone at 48 kHz; without a format, in one of NIST, as speech corpora have them."""
    av = pytest.importorskip("av")
    tone = (9000 * np.sin(np.arange(48000) / 20)).astype("i2")[None]
    if not form:
        says = (
            "NIST_1A\n   1024\nchannel_count -i 1\nsample_count -i 48000\nsample_rate -i 48000\nsample_n_bytes -i 2\n"
            "sample_byte_format -s2 01\nsample_coding -s3 pcm\nend_head\n"
        )
        return says.ljust(1024).encode() + tone.astype("<i2").tobytes()
    out = io.BytesIO()
    options = {"mpegts_m2ts_mode": "1"} if codec == "mp2" and form == "mpegts" else {}
    with av.open(out, "w", format=form, options=options) as file:
        stream = file.add_stream(codec, rate=48000, layout="mono")
        frame = av.AudioFrame.from_ndarray(tone, format="s16", layout="mono")
        frame.sample_rate = 48000
        resampler = av.AudioResampler(stream.format, "mono", 48000, stream.frame_size or None)
        for block in (*resampler.resample(frame), *resampler.resample(None), None):
            file.mux(stream.encode(block))
    return out.getvalue()


@pytest.mark.parametrize(("extension", "form", "codec"), SOUNDS)
def test_sounds_of_each_extension_decode(tmp_path: Path, extension: str, form: str, codec: str) -> None:
    av = pytest.importorskip("av")
    data = sound(form, codec)
    with av.open(io.BytesIO(data)) as file:
        stream = file.streams.audio[0]
        is_padded = "mp4" in file.format.name and stream.frames
        count = round(stream.duration * stream.time_base * stream.rate) if is_padded else None
        expected = np.concatenate([frame.to_ndarray() for frame in file.decode(audio=0)], axis=1)[:, :count]
    (tmp_path / "shard.tar").write_bytes(data)
    unread = ByteRange(store=open_store(tmp_path), rel="shard.tar", offset=0, size=len(data))
    for given in (data, unread):
        decoder = SampleDecoder().decode(f"sound.{extension}", given)
        decoder.audio_format = "native"
        np.testing.assert_array_equal(decoder.get_audio().audio_clips[0].numpy(), expected)
    assert kind_by_head(data[:HEAD_BYTES]) == "av"
    assert own_media({"__key__": "0", f"0.{extension}": decoder}, "video" if extension in VIDEOS else "audio")
    (tmp_path / "folder").mkdir()
    (tmp_path / f"folder/a.{extension}").write_bytes(data)
    assert prepare_media(tmp_path / "folder", MediaFilter(strategy="EXTENSION")).num_files == 1


VIDEOS = ("ts", "mts", "m2ts", "3gp", "3g2")
"""Extensions of files that may have sound alone, but which are those of videos."""


@pytest.mark.parametrize("extension", sorted(UNSURE))
def test_other_files_of_such_a_name_stay_bytes(tmp_path: Path, extension: str) -> None:
    data = b"Given: a program, or numbers, such as facial action units.\n" * 9
    (tmp_path / "shard.tar").write_bytes(data)
    unread = ByteRange(store=open_store(tmp_path), rel="shard.tar", offset=0, size=len(data))
    for given in (data, unread):
        assert SampleDecoder().decode(f"code.{extension}", given) == data
    assert not own_media({"__key__": "0", f"code.{extension}": data}, "video")
    assert not names_medium(f"look at index.{extension}")


def test_media_of_an_unknown_name_are_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("energon_bridge.core.encoder.decoder._looked_at", set())
    decoder = SampleDecoder()
    for name, data in (("a.img", picture("PNG")), ("b.img", picture("PNG")), ("a.dat", b"numbers"), ("t.snd2", b"")):
        assert decoder.decode(name, data) == data
    assert decoder.decode("a.track", sound("wav", "pcm_s16le")).startswith(b"RIFF")
    assert [message.split(", and stays bytes")[0] for message in caplog.messages] == [
        "part 'a.img' begins as .png does",
        "part 'a.track' begins as .wav does",
    ]


# --- lists and tables ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [as_csv, as_jsonl])
@pytest.mark.parametrize("extension", ["avif", "jfif", "apng", "ppm", "tga", "JPE", "dib", "jpx"])
def test_columns_of_any_image_are_images(tmp_path: Path, extension: str, write: Any) -> None:
    codec = BY_EXTENSION[extension.lower()].codec
    colors = ["red", "green", "blue"]
    for number, color in enumerate(colors):  # two thirds of one format, a third of another
        other = number == 2
        data = picture("JPEG" if other else codec, color)
        (tmp_path / f"{number}.{'jpg' if other else extension}").write_bytes(data)
    rows = [{"image": f"{n}.{'jpg' if n == 2 else extension}", "caption": color} for n, color in enumerate(colors)]
    out = converted(write(tmp_path / f"list.{write.__name__[3:]}", rows), tmp_path / "out", *ALL)
    assert type_of(out) == "CaptioningSample"
    found = images_of(out, 3)
    for number, color in enumerate(colors):
        expected = np.asarray(Image.new("RGB", (1, 1), color))[0, 0].astype(int)
        assert abs(found[f"{number:09d}"][8, 8].astype(int) - expected).max() < 40


@pytest.mark.parametrize("write", [as_csv, as_jsonl])
@pytest.mark.parametrize("extension", ["opus", "flv", "heic", "mpg", "m4a"])
def test_columns_of_other_media_are_files(tmp_path: Path, extension: str, write: Any) -> None:
    (tmp_path / f"a.{extension}").write_bytes(HEIC)
    source = write(tmp_path / f"list.{write.__name__[3:]}", [{"media": f"a.{extension}", "caption": "x"}] * 3)
    out = converted(source, tmp_path / "out", *ALL)
    assert members(out)[f"000000000.{extension}"] == HEIC
    assert type_of(out) == ("CaptioningSample" if extension == "heic" else "CrudeWebdataset")


@pytest.mark.parametrize("name", ["a.dng", "a.npy", "a.txt", "sub/plain"])
def test_columns_of_other_files_are_no_texts(tmp_path: Path, name: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / name).write_bytes(b"something")
    source = as_csv(tmp_path / "list.csv", [{"scan": name, "text": "hello"}] * 3)
    out = converted(source, tmp_path / "out", *ALL)
    assert type_of(out) == "CrudeWebdataset"
    extension = name.rpartition(".")[2] if "." in name else "bin"
    assert members(out)[f"000000000.{extension}"] == b"something"


def test_images_without_an_extension_are_known_by_their_content(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/1").write_bytes(picture("AVIF"))
    source = as_csv(tmp_path / "list.csv", [{"image": "images/1", "caption": "hello"}] * 3)
    out = converted(source, tmp_path / "out", *ALL)
    assert type_of(out) == "CaptioningSample"
    assert "000000000.avif" in members(out)


def test_a_column_of_images_that_are_not_there_is_no_text(tmp_path: Path) -> None:
    source = as_jsonl(tmp_path / "list.jsonl", [{"image": f"{n}.dng", "text": "hello"} for n in range(3)])
    assert "none of the 3 files named in the first rows exists" in refused(source, tmp_path / "out")


def test_a_column_with_few_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(picture("JPEG"))
    rows = [{"image": name, "text": "hello"} for name in ("a.jpg", "n/a", "n/a")]
    message = refused(as_csv(tmp_path / "list.csv", rows), tmp_path / "out")
    assert "the column `image` names files ('a.jpg') in 1 of its first 3 rows, but also has 'n/a'" in message
    assert "Leave it empty in rows without a file" in message


def test_texts_stay_texts(tmp_path: Path) -> None:
    rows = [
        {"text": f"see www.example.com, v1.{n} and cat.jpg there", "source": "x.org", "format": "jpg"} for n in range(3)
    ]
    out = converted(as_jsonl(tmp_path / "list.jsonl", rows), tmp_path / "out", *ALL)
    assert type_of(out) == "TextSample"


@pytest.mark.parametrize(("data", "extension"), [(HEIC, "heic"), (picture("AVIF"), "avif"), (psd(3, 3), "psd")])
def test_bytes_in_parquet_get_their_extension(tmp_path: Path, data: bytes, extension: str) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"image": [data] * 3, "caption": ["x"] * 3}), tmp_path / "t.parquet")
    out = converted(tmp_path / "t.parquet", tmp_path / "out", *ALL)
    assert members(out)[f"000000000.{extension}"] == data
    assert type_of(out) == "CaptioningSample"


# --- folders ------------------------------------------------------------------------------------------------------


def test_every_file_of_a_folder_is_taken_or_counted(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    taken = ["a.jpg", "b.jfif", "c.avif", "d.apng", "e.ppm", "f.TGA", "g.ico", "h.webp", "i.heic"]
    for name in taken:
        extension = name.rpartition(".")[2].lower()
        (folder / name).write_bytes(HEIC if extension == "heic" else picture(BY_EXTENSION[extension].codec))
    for name in ("x.dng", "y.dng", "Thumbs.db", "README", ".DS_Store", "z.txt", "a.json"):
        (folder / name).write_bytes(b"{}")
    for name in taken:
        (folder / name).with_suffix(".txt").write_text("a caption")
    output = convert(folder, tmp_path / "out", *ALL)
    assert (
        "Left out: 1 .db (neither media nor a caption), 2 .dng (neither media nor a caption), "
        "1 .json (.txt beside it is taken), 1 .txt (no media beside it), 1 without an extension (neither media nor a "
        "caption), 1 hidden."
    ) in output
    assert sum(read_info(open_store(tmp_path / "out")).shard_counts.values()) == len(taken)
    assert type_of(tmp_path / "out") == "CaptioningSample"
    assert len(answer("convert", folder, tmp_path / "out", *QUIETLY, *ALL)["left_out"]) == 6


def test_captions_in_folders_of_classes_and_files_beside_tars_are_counted(tmp_path: Path) -> None:
    for name in ("cat/a.jpg", "dog/b.avif", "dog/c.raw"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(picture("AVIF" if name.endswith("avif") else "JPEG"))
    (tmp_path / "in/cat/a.txt").write_text("a caption")
    said = convert(tmp_path / "in", tmp_path / "out", *ALL, "--kind", "classes")
    assert "1 .raw (neither media nor a caption), 1 .txt (a folder of classes has no captions)" in said
    (tmp_path / "tars").mkdir()
    shard = next((tmp_path / "out").rglob("*.tar"))
    (tmp_path / "tars/s.tar").write_bytes(shard.read_bytes())
    (tmp_path / "tars/lost.jpg").write_bytes(picture("JPEG"))
    assert "1 .jpg (no tar)" in convert(tmp_path / "tars", tmp_path / "out2", *ALL)


def test_files_of_a_folder_that_its_list_does_not_name_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a.jpg", "b.jpg", "c.avif", "d.jpg"):
        (folder / name).write_bytes(picture("AVIF" if name.endswith("avif") else "JPEG"))
    as_csv(folder / "metadata.csv", [{"file_name": name, "caption": "x"} for name in ("a.jpg", "b.jpg")])
    said = convert(folder, tmp_path / "out", *ALL)
    assert "Left out: 1 .avif (not named in metadata.csv), 1 .jpg (not named in metadata.csv)." in said


def test_a_folder_without_media_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.dng").write_bytes(b"raw")
    message = refused(tmp_path / "in", tmp_path / "out")
    assert "There are 1 .dng (neither media nor a caption)." in message


# --- metadata -----------------------------------------------------------------------------------------------------


def test_sizes_of_all_kinds_are_written_down(tmp_path: Path) -> None:
    for name in ("a.jfif", "b.avif", "c.tga", "d.apng", "e.ppm"):
        codec = BY_EXTENSION[name.rpartition(".")[2]].codec
        (tmp_path / name).write_bytes(picture(codec, size=(7, 5)))
        assert image_size({"txt": b"", name: (tmp_path / name).read_bytes()}) == {"width": 7, "height": 5}
    (tmp_path / "f.heic").write_bytes(HEIC)
    found = prepare_media(tmp_path, MediaFilter(strategy="EXTENSION"))
    assert (found.num_files, found.failed) == (5, ("f.heic",))
