"""Scaled decoding: JPEGs at the DCT scale that a declared size allows, in every form, and in the state of a run."""

from __future__ import annotations

import io
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, strategies as st
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from energon_bridge import DefaultTaskEncoder, SampleDecoder, WorkerConfig, get_savable_loader, get_train_dataset
from energon_bridge.core.errors import ConfigurationError, DecodeError, SettingMismatchError, SourceError
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.models.images.images import IMAGE_FORMS
from energon_bridge.models.images.jpeg import can_scale
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.convert.options import ConvertOptions
from energon_bridge.tools.convert.scaling import reencoded
from energon_bridge.tools.testing import create_captioning_test_dataset, write_shard


def encoded(width: int, height: int, *, mode: str = "RGB", codec: str = "JPEG") -> bytes:
    ramp = np.linspace(0, 255, width * height, dtype=np.float32).reshape(height, width).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(ramp).convert(mode).save(stream, codec)
    return stream.getvalue()


def shape(value: Any) -> tuple[int, int]:
    """Return height and width of a decoded image of any form."""
    if isinstance(value, Image.Image):
        return value.height, value.width
    if not isinstance(value, np.ndarray) and value.ndim == 3:
        return tuple(value.shape[1:])
    return tuple(value.shape[:2])


@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 40), st.integers(1, 40))
def test_no_side_falls_below_the_target_and_no_smaller_scale_would_do(height, width, wanted_height, wanted_width):
    decoder = SampleDecoder(image_decode="rgb8", image_target=(wanted_height, wanted_width))
    got = decoder.decode("jpg", encoded(width, height)).shape[:2]
    fits = [scale for scale in (8, 4, 2, 1) if height >= scale * wanted_height and width >= scale * wanted_width]
    scale = fits[0] if fits else 1
    assert got == (-(-height // scale), -(-width // scale))
    if fits:
        assert got >= (wanted_height, 1)
        assert got[1] >= wanted_width


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("form", sorted(IMAGE_FORMS))
def test_all_forms_give_the_pixels_of_pillows_draft(form, mode):
    data = encoded(120, 90, mode=mode)
    with Image.open(io.BytesIO(data)) as image:
        image.draft(None, (30, 22))
        expected = np.asarray(image.convert(IMAGE_FORMS[form].mode))
    got = SampleDecoder(image_decode=form, image_target=(22, 30)).decode("jpg", data)
    assert shape(got) == expected.shape[:2] == (23, 30)
    pixels = np.asarray(got)
    if IMAGE_FORMS[form].container == "torch" and pixels.ndim == 3:
        pixels = pixels.transpose(1, 2, 0)
    np.testing.assert_array_equal(pixels, expected / np.float32(255) if IMAGE_FORMS[form].scaled else expected)


@pytest.mark.parametrize(
    ("data", "target"),
    [(encoded(64, 64, codec="PNG"), 8), (encoded(64, 64), 33), (encoded(64, 15), 8), (encoded(64, 64), None)],
    ids=["no JPEG", "too small", "too small on one side", "nothing declared"],
)
def test_what_cannot_be_scaled_comes_whole(data, target):
    whole = SampleDecoder(image_decode="rgb8", guess_content=True).decode("bin", data)
    got = SampleDecoder(image_decode="rgb8", guess_content=True, image_target=target).decode("bin", data)
    np.testing.assert_array_equal(got, whole)


# Frames that libjpeg scales, and the others: lossless, hierarchical, lossless and hierarchical (ITU-T T.81, table B.1).
SCALED = (0xC0, 0xC1, 0xC2, 0xC9, 0xCA)
WHOLE = (0xC3, 0xC5, 0xC6, 0xC7, 0xCB, 0xCD, 0xCE, 0xCF)
MARKERS = [(marker, True) for marker in SCALED] + [(marker, False) for marker in WHOLE]


def header(*markers: int, before: bytes = b"") -> bytes:
    """Return the header of a JPEG of 120 x 90 pixels, without pixels: a table, and the frames of markers."""
    frames = [bytes([0xFF, marker]) + bytes.fromhex("0011 08 005a 0078 03 012200 021101 031101") for marker in markers]
    table = bytes.fromhex("ffdb 0043 00") + bytes([1] * 64)
    scan = bytes.fromhex("ffda 000c 03 0100 0211 0311 003f00")
    return b"\xff\xd8" + before + table + b"".join(frames) + scan


@pytest.mark.parametrize(("marker", "scales"), MARKERS)
def test_only_frames_that_can_be_scaled_are_asked_for_a_scale(marker, scales, monkeypatch):
    asked = []

    def decode(data: bytes, colorspace: str, buffer: Any = None, **size: int) -> np.ndarray:
        asked.append((size["min_height"], size["min_width"]))
        return np.zeros((*asked[-1], 3), np.uint8)

    monkeypatch.setattr("simplejpeg.decode_jpeg_header", lambda data: (90, 120, "YCbCr", "4:2:0"))
    monkeypatch.setattr("simplejpeg.decode_jpeg", decode)
    decoder = SampleDecoder(image_decode="rgb8", image_target=(22, 30))
    got = [decoder.decode("jpg", header(marker)), decoder.decode("jpg", header(marker, before=b"\xff"))]
    wanted = (23, 30) if scales else (90, 120)
    assert asked == [wanted] * 2
    assert {shape(image) for image in got} == {wanted}
    assert can_scale(header(marker)) == scales


@pytest.mark.parametrize(("marker", "scales"), MARKERS)
def test_pillow_is_asked_for_a_scale_of_no_other_frames(marker, scales, monkeypatch):
    asked = []

    def load(image: Any) -> None:
        raise OSError("it has no pixels")

    monkeypatch.setattr("simplejpeg.decode_jpeg_header", lambda data: (90, 120, "YCbCr", "4:2:0"))
    monkeypatch.setattr(JpegImageFile, "draft", lambda image, mode, size: asked.append(size))
    monkeypatch.setattr(JpegImageFile, "load", load)
    decoder = SampleDecoder(image_decode="pilrgb", image_target=(22, 30))
    with pytest.raises(DecodeError, match="it has no pixels"):
        decoder.decode("jpg", header(marker))
    with pytest.raises(SourceError, match="it has no pixels"):
        reencoded("jpg", header(marker), ConvertOptions(layout=cast("Any", None), max_pixels=700))
    assert asked == [(30, 22), (60, 44)] * scales


@pytest.mark.parametrize(
    "data",
    [
        header(),
        header(0xC0, 0xC3),
        header(0xC3, 0xC0),
        header(0xC0, before=b"\0"),
        header(0xC0, before=b"\xff\xd8"),
        header(0xC0)[:20],
        b"",
        b"GIF89a",
    ],
)
def test_what_cannot_be_followed_is_not_scaled(data):
    assert not can_scale(data)


def test_a_deferred_image_tells_the_size_in_its_header():
    deferred = SampleDecoder(image_decode="pilrgb", defer_images=True, image_target=16).decode("jpg", encoded(80, 64))
    assert deferred.size == (80, 64)
    assert deferred.get().size == (20, 16)


@pytest.mark.parametrize("target", [0, -1, True, (8,), (8, 0), (8, 8, 8), (8.0, 8), "8"])
def test_a_size_that_is_none_is_refused(target):
    with pytest.raises(ConfigurationError, match="image_target must be pixels"):
        SampleDecoder(image_target=target)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scaled") / "images"
    create_captioning_test_dataset(folder, num_train=24, num_val=0, image_size=8)
    return folder


@pytest.mark.parametrize("form", ["torchrgb8", "torchrgb"])
def test_a_batch_has_the_scaled_pixels(tmp_path: Path, form: str) -> None:
    sources = {f"{n:02d}": encoded(64 + n % 2, 48) for n in range(12)}  # two sizes, which come out as one and another
    write_shard(tmp_path / "s.tar", {key: {"jpg": jpeg, "txt": b""} for key, jpeg in sources.items()})
    yaml = render_dataset_yaml("CaptioningSample", {"image": "jpg", "caption": "txt"})
    prepare_dataset(tmp_path, split=parse_patterns(["train:.*"]), dataset_yaml=yaml, key_index=False)
    encoder = DefaultTaskEncoder()
    encoder.decoder = SampleDecoder(image_decode=form, image_target=(12, 16))
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_train_dataset(tmp_path, batch_size=4, task_encoder=encoder, worker_config=config)
    for batch in islice(get_savable_loader(dataset), 8):
        for key, image in zip(batch.__key__, batch.image, strict=True):
            alone = encoder.decoder.decode("jpg", sources[key])
            assert alone.shape == (3, 12, 16 + int(key) % 2)
            np.testing.assert_array_equal(image[:, :, : alone.shape[2]], alone)


def loader_of(data: Path, target: Any) -> Any:
    encoder = DefaultTaskEncoder()
    encoder.decoder = SampleDecoder(image_decode="rgb8", image_target=target)
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    return get_savable_loader(get_train_dataset(data, batch_size=2, task_encoder=encoder, worker_config=config))


@pytest.mark.parametrize(("then", "now"), [(224, 112), (None, 224), (224, None), ((2, 4), (4, 2))])
def test_a_state_of_another_declared_size_is_refused(data, then, now):
    loader = loader_of(data, then)
    next(iter(loader))
    with pytest.raises(SettingMismatchError, match=r"image_target=.*how images are decoded depends on it"):
        loader_of(data, now).restore_state_rank(loader.save_state_rank())


def test_a_side_is_the_same_as_both(data):
    loader = loader_of(data, 4)
    next(iter(loader))
    loader_of(data, (4, 4)).restore_state_rank(loader.save_state_rank())
    assert SampleDecoder(image_target=4).config()["image_target"] == (4, 4)
