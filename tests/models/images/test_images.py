"""Images: every form, pixel for pixel what Pillow (and webdataset, whose forms they are) makes of the same bytes."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import run_afresh
from hypothesis import given, settings, strategies as st
from PIL import Image, ImageFile, ImageOps, features
from webdataset.autodecode import imagehandler

from energon_bridge import SampleDecoder
from energon_bridge.core.errors import ConfigurationError, DecodeError
from energon_bridge.core.format.media import IMAGE_EXTENSIONS
from energon_bridge.core.samples import streaming
from energon_bridge.core.samples.sample_place import warned
from energon_bridge.core.samples.stacking import Slab, SlabPool
from energon_bridge.models.images.images import (
    IMAGE_FORMS,
    decode_image,
    guess_image_extension,
    image_form,
    image_size,
    is_turned,
)
from energon_bridge.models.images.jpeg import jpeg_orientation
from energon_bridge.tools.check.media import read_image
from energon_bridge.tools.convert.options import ConvertOptions
from energon_bridge.tools.convert.rows import Layout
from energon_bridge.tools.convert.scaling import reencoded

FORMS = "l8 rgb8 rgba8 l rgb rgba torchl8 torchrgb8 torchrgba8 torch torchl torchrgb torchrgba pil pill pilrgb pilrgba"


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Make an image with smooth and rough parts, as photographs have."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / 7 + y / 5), np.cos(x / 11 - y / 3), np.sin(y / 13)], axis=-1)
    noise = generator.normal(0, generator.choice([1, 40]), (height, width, 3))
    pixels = np.clip(waves * 110 + 128 + noise, 0, 255).astype(np.uint8)
    image = Image.fromarray(pixels)
    if mode == "RGBA":
        image.putalpha(Image.fromarray(pixels[..., 0]))
        return image
    return image.convert(mode)


def encoded(image: Image.Image, file_format: str = "JPEG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, file_format, **options)
    return stream.getvalue()


def decode(data: bytes, form: str) -> Any:
    return decode_image(data, image_form(form), part="x.jpg")


def pillow(data: bytes, mode: str) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert(mode))


FILES = {
    "jpeg": encoded(picture(31, 17)),
    "jpeg grey": encoded(picture(31, 17, "L")),
    "jpeg cmyk": encoded(picture(31, 17, "CMYK")),
    "jpeg one pixel": encoded(picture(1, 1)),
    "png": encoded(picture(31, 17), "PNG"),
    "png alpha": encoded(picture(31, 17, "RGBA"), "PNG"),
    "png palette": encoded(picture(31, 17, "P"), "PNG"),
    "png bits": encoded(picture(31, 17, "1"), "PNG"),
    "png 16 bit": encoded(Image.fromarray(np.arange(527, dtype=np.uint16).reshape(17, 31) * 100), "PNG"),
    "gif": encoded(picture(31, 17), "GIF"),
    "webp": encoded(picture(31, 17), "WEBP"),
    "tiff": encoded(picture(31, 17), "TIFF"),
    "bmp": encoded(picture(31, 17), "BMP"),
    "ppm": encoded(picture(31, 17), "PPM"),
}


def test_all_forms_of_energon_are_there():
    assert sorted(IMAGE_FORMS) == sorted([*FORMS.split(), "fastrgb"])


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("form", FORMS.split())
def test_every_form_is_what_webdataset_gives(form, file):
    data = FILES[file]
    expected = imagehandler(form)("x.png", data)
    value = decode(data, form)
    assert type(value) is type(expected)
    if isinstance(value, Image.Image):
        assert (value.mode, value.size, value.tobytes()) == (expected.mode, expected.size, expected.tobytes())
        return
    assert value.dtype == expected.dtype
    assert tuple(value.shape) == tuple(expected.shape)
    assert bytes(np.ascontiguousarray(value)) == bytes(np.ascontiguousarray(expected))


@pytest.mark.parametrize("file", ["jpeg", "jpeg grey", "jpeg cmyk", "png"])
@pytest.mark.parametrize("form", ["torchrgb8", "torchrgb", "torchl8", "rgb8"])
def test_results_can_be_written_to(form, file):
    value = decode(FILES[file], form)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        array = value.numpy() if isinstance(value, torch.Tensor) else value
    assert array.flags.writeable


@pytest.mark.parametrize("form", ["torchrgb8", "torchrgba8", "torchrgb"])
def test_colour_tensors_are_views_over_the_decoders_memory(form):
    value = decode(FILES["jpeg"], form)
    assert value.shape[1:] == (17, 31)
    assert value.permute(1, 2, 0).is_contiguous()


def test_floats_are_exact_quotients():
    ramp = Image.fromarray(np.arange(256, dtype=np.uint8).repeat(33).reshape(64, 132))
    value = decode(encoded(ramp, "PNG"), "torchl")
    expected = [np.float32(level) / np.float32(255) for level in range(256)]
    assert value.dtype == torch.float32
    assert value.flatten()[::33].tolist() == expected
    assert torch.equal(value, value.flatten()[::33].repeat_interleave(33).reshape(64, 132))


@settings(max_examples=60)
@given(
    width=st.integers(1, 70),
    height=st.integers(1, 70),
    quality=st.integers(5, 100),
    subsampling=st.sampled_from([0, 1, 2]),
    progressive=st.booleans(),
    mode=st.sampled_from(["RGB", "L"]),
    form=st.sampled_from(["rgb8", "l8", "rgba8"]),
    seed=st.integers(0, 9),
)
def test_jpegs_have_the_pixels_of_pillow(width, height, quality, subsampling, progressive, mode, form, seed):
    options = {"subsampling": subsampling} if mode == "RGB" else {}
    data = encoded(picture(width, height, mode, seed), quality=quality, progressive=progressive, **options)
    np.testing.assert_array_equal(decode(data, form), pillow(data, form[:-1].upper()), strict=True)


@pytest.mark.parametrize("options", [{"keep_rgb": True}, {"subsampling": "4:1:1"}, {"restart_marker_blocks": 1}])
def test_unusual_jpegs_have_the_pixels_of_pillow(options):
    data = encoded(picture(67, 45), **options)
    for form in ("rgb8", "l8", "rgba8"):
        np.testing.assert_array_equal(decode(data, form), pillow(data, form[:-1].upper()), strict=True)


def test_orientation_is_left_to_the_user(caplog):
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(picture(20, 10), exif=exif)
    warned.clear()
    assert decode(data, "torchrgb8").shape == (3, 10, 20)
    assert decode(data, "pil").getexif()[0x0112] == 6
    assert ["autorotate=True" in message for message in caplog.messages] == [True]
    warned.clear()


@pytest.mark.parametrize(("kind", "file_format"), [(np.uint16, "PNG"), (np.int32, "TIFF"), (np.float32, "TIFF")])
def test_values_that_pillow_cuts_are_said_once(kind, file_format, caplog):
    warned.clear()
    data = encoded(Image.fromarray(np.arange(64).reshape(8, 8).astype(kind) * kind(1000)), file_format)
    for _ in range(2):
        np.testing.assert_array_equal(decode(data, "rgb8"), pillow(data, "RGB"))
    assert ["have values of 16 or 32 bits" in message for message in caplog.messages] == [True]
    warned.clear()


def test_the_a_of_lab_is_no_transparency(caplog):
    warned.clear()
    warned.add("colours, images, jpg")
    data = encoded(picture(20, 10).convert("LAB"), "TIFF")
    np.testing.assert_array_equal(decode(data, "rgb8"), pillow(data, "RGB"))
    assert caplog.messages == []
    warned.clear()


@pytest.mark.parametrize("file_format", ["TIFF", "GIF", "WEBP", "PNG", "AVIF"])
@pytest.mark.parametrize("count", [1, 2])
def test_the_first_of_several_pages_is_taken_and_said_once(file_format, count, caplog):
    warned.clear()
    pages = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")[:count]]
    data = encoded(pages[0], file_format, save_all=True, append_images=pages[1:])
    for _ in range(2):
        np.testing.assert_array_equal(decode(data, "rgb8"), pillow(data, "RGB"))
    assert ["have several pages or frames" in message for message in caplog.messages] == [True] * (count - 1)
    warned.clear()


def xmp_of(orientation: int, form: str = '<x tiff:Orientation="{}"/>') -> bytes:
    return form.format(orientation).encode()


def png_with(kind: bytes, content: bytes, *, before: bytes) -> bytes:
    """Return a PNG with one more chunk before the first of a kind."""
    data = encoded(picture(40, 26), "PNG")
    at = data.index(before) - 4
    chunk = kind + content
    return data[:at] + struct.pack(">I", len(content)) + chunk + struct.pack(">I", zlib.crc32(chunk)) + data[at:]


def app1(content: bytes) -> bytes:
    return b"\xff\xe1" + struct.pack(">H", len(content) + 2) + content


def jpeg_with(segments: bytes, *, before: int = 0xE0) -> bytes:
    """Return a JPEG with more segments before the first of a marker."""
    data = encoded(picture(40, 26))
    at = data.index(bytes([0xFF, before]))
    return data[:at] + segments + data[at:]


def turned(orientation: int, kind: str) -> bytes:
    """Return a file that viewers turn, for a format by its EXIF."""
    exif = Image.Exif()
    exif[0x010F], exif[0x0112] = "a maker", orientation
    bare, xmp = Image.Exif(), xmp_of(orientation)
    bare[0x010F] = "a maker"
    match kind:
        case "XMP":
            return encoded(picture(40, 26), xmp=xmp)
        case "XMP beside EXIF":  # as editors write it
            return encoded(picture(40, 26), xmp=xmp, exif=bare)
        case "XMP element":
            return encoded(picture(40, 26), xmp=xmp_of(orientation, "<tiff:Orientation>{}</tiff:Orientation>"))
        case "XMP in WEBP":
            return encoded(picture(40, 26), "WEBP", xmp=xmp)
        case "XMP in PNG":
            return png_with(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp, before=b"IDAT")
        case "compressed XMP in PNG":
            return png_with(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(xmp), before=b"IDAT")
        case "XMP in TIFF":
            return encoded(picture(40, 26), "TIFF", tiffinfo={700: xmp})
        case "signed":  # numbers of EXIF
            entry = struct.pack("<HHIhh", 0x0112, 8, 1, orientation, 0)
            return jpeg_with(app1(b"Exif\0\0II*\0" + struct.pack("<IH", 8, 1) + entry + bytes(4)), before=0xDA)
        case "late":  # behind other segments of a JPEG
            return encoded(picture(40, 26), exif=exif, icc_profile=bytes(70_000), comment="hello")
        case "last":
            return jpeg_with(app1(exif.tobytes()), before=0xDA)
        case "late in PNG":
            return png_with(b"eXIf", exif.tobytes()[6:], before=b"IEND")
    return encoded(picture(40, 26), kind, exif=exif)


KINDS = ["JPEG", "late", "last", "XMP", "XMP beside EXIF", "XMP element", "XMP in WEBP", "XMP in PNG"]
KINDS += ["PNG", "late in PNG", "WEBP", "TIFF", "AVIF", "compressed XMP in PNG", "XMP in TIFF", "signed"]


@pytest.mark.parametrize("file_format", KINDS)
@pytest.mark.parametrize("orientation", range(10))
def test_upright_images_lie_as_pillow_turns_them(file_format, orientation):
    if file_format == "AVIF" and not features.check("avif"):
        pytest.skip("Pillow without AVIF")
    data = turned(orientation, file_format)
    for form in ("rgb8", "torchrgb8", "pilrgb", "fastrgb", "rgba8"):
        got = decode_image(data, image_form(form, autorotate=True), part="x")
        with Image.open(io.BytesIO(data)) as image:
            expected = np.array(ImageOps.exif_transpose(image).convert("RGBA" if form == "rgba8" else "RGB"))
        pixels = got.permute(1, 2, 0).numpy() if form.startswith("torch") else np.array(got)
        np.testing.assert_array_equal(pixels, expected)
        assert image_size(data, image_form(form, autorotate=True), part="x") == expected.shape[1::-1]
        assert "p" not in form or got.getexif().get(0x0112) not in range(2, 9)
        assert is_turned(data) == ("TIFF" not in file_format and orientation in range(2, 9))
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        assert image_size(data, image_form("rgb8"), part="x") == image.size
        header = read_image(data)
        assert (header.width, header.height) == image.size
    assert decode_image(data, image_form("rgb8", (4, 13), autorotate=True), part="x").shape[0] in (13, 20, 26, 40)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "TIFF" not in kind])
def test_turned_images_are_named_whatever_turns_them(kind, caplog):
    if kind == "AVIF" and not features.check("avif"):
        pytest.skip("Pillow without AVIF")
    for orientation, said in ((1, []), (3, [True])):
        warned.clear()
        decode(turned(orientation, kind), "rgb8")
        assert ["autorotate=True" in message for message in caplog.messages] == said
    warned.clear()


def profile(name: bytes, space: bytes = b"RGB ") -> bytes:
    """Return the head of a colour profile, as ICC.1 lays it out, and its name."""
    return bytes(16) + space + bytes(16) + b"acsp" + bytes(88) + name


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize(
    ("icc", "is_other"),
    [
        (profile(b"Adobe RGB (1998)"), True),
        (profile("Display P3".encode("utf-16-be")), True),
        (profile(b"sRGB IEC61966-2.1"), False),
        (profile("sRGB built-in".encode("utf-16-be")), False),
        (profile(b"Dot Gain 20%", b"GRAY"), False),
        (bytes(300), False),
    ],
)
@pytest.mark.parametrize("form", ["rgb8", "torchrgb8"])
def test_images_with_other_colours_are_named_once(kind, icc, is_other, form, caplog):
    warned.clear()
    for _ in range(2):
        decode(encoded(picture(40, 26), kind, icc_profile=icc), form)
    assert sum("as if they were sRGB" in message for message in caplog.messages) == is_other
    warned.clear()


@pytest.mark.parametrize(
    ("chunk", "content", "is_other"),
    [
        (b"gAMA", struct.pack(">I", 100_000), True),  # linear light
        (b"gAMA", struct.pack(">I", 45_455), False),
        (b"cICP", bytes([9, 16, 0, 1]), True),  # PQ
        (b"cICP", bytes([1, 13, 0, 1]), False),
    ],
)
def test_pngs_with_a_gamma_or_hdr_are_named(chunk, content, is_other, caplog):
    warned.clear()
    decode(png_with(chunk, content, before=b"IDAT"), "rgb8")
    assert sum("as if they were sRGB" in message for message in caplog.messages) == is_other
    warned.clear()


@pytest.mark.skipif(not features.check("avif"), reason="Pillow without AVIF")
@pytest.mark.parametrize(
    ("primaries", "transfer", "is_other"),
    [(1, 13, False), (2, 2, False), (9, 16, True), (9, 18, True), (12, 13, True), (1, 1, False)],
)
def test_avifs_of_hdr_or_another_gamut_are_named(primaries, transfer, is_other, caplog):
    """As the box `colr` tells by the numbers of ITU-T H.273: PQ, HLG, Display P3."""
    data = encoded(picture(40, 26), "AVIF")
    head, box, rest = data.partition(b"colrnclx")
    assert box
    warned.clear()
    decode(head + box + struct.pack(">HH", primaries, transfer) + rest[4:], "rgb8")
    assert sum("as if they were sRGB" in message for message in caplog.messages) == is_other
    warned.clear()


TAGS = st.lists(
    st.tuples(
        st.sampled_from([0x010F, 0x0112]),
        st.sampled_from([(1, "B3x"), (3, "H2x"), (4, "I"), (99, "I")]),
        st.integers(0, 2),
        st.integers(0, 9),
    ),
    max_size=3,
)


@st.composite
def segments(draw: st.DrawFn) -> bytes:
    """Draw segments with EXIF, XMP or neither, whole or cut off."""
    order = draw(st.sampled_from("<>"))
    tags = b"".join(
        struct.pack(f"{order}HHI{form}", tag, kind, count, value) for tag, (kind, form), count, value in draw(TAGS)
    )
    head = b"II*\0" if order == "<" else b"MM\0*"
    exif = head + struct.pack(f"{order}IH", 8, len(tags) // 12) + tags + bytes(4)
    form = draw(st.sampled_from(['tiff:Orientation="{}"', "<tiff:Orientation>{}<", "tiff:Orientation='{}'"]))
    names = [b"http://ns.adobe.com/xap/1.0/\0", b"http://ns.adobe.com/xmp/extension/\0"]
    xmp = draw(st.sampled_from(names)) + xmp_of(draw(st.integers(0, 9)), form)
    return app1(draw(st.sampled_from([b"Exif\0\0" + exif, b"Exif\0\0" + exif[:-5], xmp])))


@given(st.lists(segments(), max_size=3), st.sampled_from([0xE0, 0xDB, 0xDA]))
def test_headers_of_jpegs_tell_what_pillow_finds(found, marker):
    data = jpeg_with(b"".join(found), before=marker)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of EXIF that is cut off
        with Image.open(io.BytesIO(data)) as image:
            expected = image.getexif().get(0x0112, 1)
    assert jpeg_orientation(data) == (expected if expected in range(2, 9) else 1)


def test_what_is_no_exif_turns_nothing():
    files = [jpeg_with(app1(b"Exif\0\0no EXIF at all")), png_with(b"eXIf", b"no EXIF at all", before=b"IDAT")]
    for data in files:
        got = decode_image(data, image_form("rgb8", autorotate=True), part="x")
        np.testing.assert_array_equal(got, pillow(data, "RGB"))
        assert not is_turned(data)


def test_stray_bytes_between_markers_are_forgiven_as_pillow_forgives_them():
    data = encoded(picture(40, 30))
    odd = data[:-2] + b"\0\0" + data[-2:]
    np.testing.assert_array_equal(decode(odd, "rgb8"), pillow(odd, "RGB"))


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("form", ["torchrgb", "torchl8", "pil"])
def test_a_truncated_jpeg_is_an_error_wherever_it_ends(form, progressive):
    data = encoded(picture(64, 48), progressive=progressive)
    for length in (1, 2, 3, 4, 50, 200, 400, *range(600, len(data) - 2, 97), len(data) - 3):
        with pytest.raises(DecodeError, match=rf"'x.jpg' \({length} bytes\)"):
            decode(data[:length], form)


def test_a_user_who_wants_truncated_images_gets_them(monkeypatch):
    data = encoded(picture(64, 48))[:1500]
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    assert decode(data, "torchrgb8").shape == (3, 48, 64)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the content is none of JPEG, PNG"),
        (b"no image", "the content is none of JPEG, PNG"),
        (FILES["png"][:60], "trunc|broken|cannot"),
        (FILES["png"][:12], "it begins as PNG, but its header is cut off or damaged"),
        (encoded(picture(64, 48))[:20], "it begins as JPEG, but its header is cut off or damaged"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 2 2\n", "the content is none of"),
    ],
)
def test_broken_images_are_named(data, message):
    with pytest.raises(DecodeError, match=rf"'x.jpg' \({len(data)} bytes\).*({message})"):
        decode(data, "torchrgb")


def test_a_bomb_is_refused_before_memory_is_spent():
    small = bytearray(encoded(picture(16, 16)))
    frame = small.index(b"\xff\xc0")
    small[frame + 5 : frame + 9] = b"\xff\x00\xff\x00"  # height and width
    with pytest.raises(DecodeError, match="decompression bomb"):
        decode(bytes(small), "torchrgb8")


def test_the_limit_of_a_bomb_is_the_users(monkeypatch):
    data = encoded(picture(40, 30))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40 * 30 // 4)
    with pytest.raises(DecodeError, match="decompression bomb"):
        decode(data, "torchrgb8")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert decode(data, "torchrgb8").shape == (3, 30, 40)


def test_unknown_form_names_the_nearest():
    with pytest.raises(ConfigurationError, match=r"'torchrgb9'\. Did you mean 'torchrgb"):
        image_form("torchrgb9")


@pytest.mark.parametrize("extension", ["jpg", "png", "gif", "webp", "tif", "bmp", "jp2", "avif"])
def test_guess(extension):
    names = {"jpg": "JPEG", "tif": "TIFF", "jp2": "JPEG2000"}
    if extension in ("jp2", "avif") and not features.check({"jp2": "jpg_2000"}.get(extension, extension)):
        pytest.skip(f"this Pillow has no {extension}")
    data = encoded(picture(20, 10), names.get(extension, extension))
    assert guess_image_extension(data) == extension
    assert extension in IMAGE_EXTENSIONS
    assert decode(data, "torchrgb8").shape == (3, 10, 20)


@pytest.mark.parametrize("data", [b"", b"BMW makes cars", b"RIFF1234WAVE", b"{}", b"\0\0\0\x18ftypmp42"])
def test_what_is_no_image_is_not_guessed(data):
    assert guess_image_extension(data) is None


def test_decoding_from_many_threads():
    files = [encoded(picture(60 + n, 50), fmt) for n in range(8) for fmt in ("JPEG", "PNG", "WEBP")]
    alone = [decode(data, "torchrgb8") for data in files]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda data: decode(memoryview(data), "torchrgb8"), files * 4))
    assert all(torch.equal(value, alone[n % len(files)]) for n, value in enumerate(together))


# Into rows of a slab -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["torchrgb8", "torchrgb"])
def test_only_ordinary_images_of_one_size_are_decoded_into_rows(form):
    first = picture(24, 16)
    # Cameras put a small picture in front of theirs, whose header says its own size.
    thumbnail = b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0" + encoded(first)
    fits = {
        "first": encoded(first),
        "again": encoded(picture(24, 16, seed=1)),
        "progressive": encoded(first, progressive=True),
        "grey": encoded(picture(24, 16, "L")),
        "behind much else": encoded(first, comment=b"x" * 5000),
    }
    others = {
        "wide": encoded(picture(48, 16)),
        "small": encoded(picture(8, 8)),
        "png": encoded(first, "PNG"),
        "cmyk": encoded(picture(24, 16, "CMYK")),
        "with a thumbnail like the first": encoded(picture(96, 64), exif=thumbnail),
        "cut off": encoded(first)[:200],
        "nothing": b"",
    }
    files = {**fits, **others}
    # Each of them after one that leaves its size behind.
    names = [name for other in files for name in ("first", other)]
    slab = Slab(SlabPool(), len(names))
    decoder = SampleDecoder(image_decode=form)
    samples = [(row, {"txt": b"a", "jpg": files[name], "1.jpg": files[name]}) for row, name in enumerate(names)]
    found = decoder.decode_into(slab, samples)
    assert sorted(found) == [row for row, name in enumerate(names) if name in fits]
    rows = slab.rows((16, 24, 3), np.uint8 if form == "torchrgb8" else np.float32)
    for row, (part, image) in found.items():
        assert part == "jpg"
        assert image is rows[1][row]
        assert torch.equal(image, decoder.decode(part, files[names[row]]))


@pytest.mark.parametrize("form", ["torchrgb8", "torchrgb"])
def test_rows_are_the_same_without_the_compiled_part(form, monkeypatch):
    files = [encoded(picture(24, 16, seed=number)) for number in range(3)]
    decoder = SampleDecoder(image_decode=form)
    samples = [(row, {"jpg": data}) for row, data in enumerate(files)]
    monkeypatch.setattr(streaming, "STREAMS", False)
    monkeypatch.setattr(streaming, "divide", streaming.divide_with_numpy)
    found = decoder.decode_into(Slab(SlabPool(), 3), samples)
    monkeypatch.undo()
    again = decoder.decode_into(Slab(SlabPool(), 3), samples)
    assert len(found) == len(again) == 3
    assert all(torch.equal(found[row][1], again[row][1]) for row in found)


def test_it_is_said_which_row_is_decoded():
    turns = []
    samples = [(4, {"jpg": encoded(picture(24, 16))}), (2, {"txt": b""}), (0, {"jpg": encoded(picture(24, 16))[:-40]})]
    found = SampleDecoder().decode_into(Slab(SlabPool(), 5), samples, turns.append)
    assert (list(found), turns) == ([4], [4, 0, 4, 0]), "for its header, and for its pixels"


def test_targets_are_met_by_rows_too():
    files = [encoded(picture(64, 48, seed=number)) for number in range(3)]
    decoder = SampleDecoder(image_decode="torchrgb8", image_target=(20, 20))
    found = decoder.decode_into(Slab(SlabPool(), 3), [(row, {"jpg": data}) for row, data in enumerate(files)])
    assert [image.shape for _, image in found.values()] == [(3, 24, 32)] * 3
    assert all(torch.equal(found[row][1], decoder.decode("jpg", data)) for row, data in enumerate(files))


@pytest.mark.parametrize("form", ["rgb8", "torchl8", "pilrgb"])
def test_other_forms_are_not_decoded_into_rows(form):
    data = encoded(picture(24, 16))
    assert not SampleDecoder(image_decode=form).decode_into(Slab(SlabPool(), 1), [(0, {"jpg": data})])


@pytest.mark.parametrize(
    ("side", "remedy"), [(9600, "energon convert with --max-pixels 89478485"), (13500, "Scale it")]
)
def test_an_image_over_the_limit_is_named_and_pillow_warns_of_none(side: int, remedy: str, tmp_path: Path) -> None:
    encoded_image = encoded(Image.new("1", (side, side)), "PNG")
    (tmp_path / "scan.png").write_bytes(encoded_image)
    done = run_afresh(
        "from energon_bridge import SampleDecoder\n"
        "try: SampleDecoder().decode('scan.png', open('scan.png', 'rb').read())\n"
        "except Exception as error: print(error)\n",
        tmp_path,
        "PIL",
    )
    assert done.stderr == ""
    assert done.stdout.startswith(f"part 'scan.png' ({len(encoded_image)} bytes) cannot be decoded as an image: ")
    assert remedy in done.stdout


def test_the_limit_of_pixels_is_the_decoders_and_scaling_keeps_to_it() -> None:
    data = encoded(Image.new("1", (9600, 9600)), "PNG")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = SampleDecoder(image_decode="pil", max_pixels=100_000_000).decode("png", data)
        assert image.size == (9600, 9600)
        scaled = reencoded("png", data, ConvertOptions(layout=Layout(sample_type="ImageSample"), max_pixels=89_478_485))
    assert SampleDecoder(image_decode="pil").decode("png", scaled).size == (9459, 9459)
