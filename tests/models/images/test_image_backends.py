"""Images decoded by torchcodec and pillow-heif, where they are installed; what is said where they are not."""

from __future__ import annotations

import io
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from PIL import Image

from energon_bridge import SampleDecoder
from energon_bridge.core.errors import ConfigurationError, DecodeError
from energon_bridge.core.format.media import load_codec
from energon_bridge.models.images import torchcodec_images
from energon_bridge.models.images.images import IMAGE_FORMS, DeferredImage


def loads(module: str) -> bool:
    """Tell whether a library is there, with all that it needs."""
    if find_spec(module.partition(".")[0]) is None:
        return False
    try:
        __import__(module)
    except (ImportError, OSError, RuntimeError):
        return False
    return True


TORCHCODEC = pytest.mark.skipif(
    not loads("torchcodec.decoders"), reason="torchcodec is not installed, or does not load"
)
PILLOW_HEIF = pytest.mark.skipif(find_spec("pillow_heif") is None, reason="pillow-heif is not installed")
HEIC_HEAD = b"\0\0\0\x18ftypheic" + bytes(40)


def photo(mode: str = "RGB") -> Image.Image:
    ramp = np.linspace(0, 255, 24 * 36 * 3).reshape(24, 36, 3).astype(np.uint8)
    return Image.fromarray(ramp).convert(mode)


def encoded(kind: str, image: Image.Image | None = None, **options: Any) -> bytes:
    out = io.BytesIO()
    (image or photo()).save(out, kind, **options)
    return out.getvalue()


@pytest.fixture
def no_torchcodec(monkeypatch):
    forget = torchcodec_images.library.cache_clear
    forget()
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchcodec"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    yield
    forget()


def test_without_torchcodec_the_remedy_is_named(no_torchcodec):
    with pytest.raises(ConfigurationError, match=r"pip install 'energon-bridge\[torchcodec\]'.*CUDA"):
        SampleDecoder(image_backend="torchcodec")


def test_settings_that_do_not_go_together(monkeypatch):
    monkeypatch.setattr(torchcodec_images, "library", lambda: None)
    with pytest.raises(ConfigurationError, match=r"image_backend='nvjpeg' must be one of auto, torchcodec"):
        SampleDecoder(image_backend="nvjpeg")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="which torchcodec cannot do"):
        SampleDecoder(image_backend="torchcodec", image_target=8)
    with pytest.raises(ConfigurationError, match="image_backend have no effect"):
        SampleDecoder(image_backend="torchcodec", image_decode=None)
    assert SampleDecoder(image_backend="torchcodec").config()["image_backend"] == "torchcodec"


def test_torchcodec_says_which_formats_it_decodes(monkeypatch):
    monkeypatch.setattr(torchcodec_images, "library", lambda: None)
    decoder = SampleDecoder(image_backend="torchcodec")
    with pytest.raises(DecodeError, match="torchcodec decodes JPEG, PNG, WebP, GIF, AVIF and HEIC, but this is tif"):
        decoder.decode("tif", encoded("TIFF"))
    with pytest.raises(DecodeError, match="but this is none of them"):
        decoder.decode("jpg", b"nothing")


def test_torchcodec_keeps_the_limit_of_pixels(monkeypatch):
    monkeypatch.setattr(torchcodec_images, "library", lambda: pytest.fail("it was asked to decode a bomb"))
    with pytest.raises(DecodeError, match="36 x 24 pixels, more than the limit of 100"):
        SampleDecoder(image_backend="auto", max_pixels=100).decode("png", encoded("PNG"))
    monkeypatch.setattr(torchcodec_images, "library", lambda: None)
    decoder = SampleDecoder(image_backend="torchcodec", max_pixels=100)
    with pytest.raises(DecodeError, match="36 x 24 pixels, more than the limit of 100"):
        decoder.decode("png", encoded("PNG"))


@TORCHCODEC
@pytest.mark.parametrize("form", sorted(IMAGE_FORMS))
@pytest.mark.parametrize(
    ("kind", "mode"), [("JPEG", "RGB"), ("JPEG", "CMYK"), ("PNG", "RGB"), ("PNG", "P"), ("PNG", "RGBA")]
)
def test_torchcodec_gives_the_pixels_of_pillow_in_every_form(form, kind, mode):
    data = encoded(kind, photo(mode))
    got, expected = (
        SampleDecoder(image_decode=form, image_backend=backend).decode("file.jpg", data)
        for backend in ("torchcodec", "auto")
    )
    assert np.asarray(got).shape == np.asarray(expected).shape
    assert np.asarray(got).dtype == np.asarray(expected).dtype
    scale = 255 if np.asarray(got).dtype == np.float32 else 1
    far = 2 if IMAGE_FORMS[form].mode == "L" else 0
    assert np.abs(np.asarray(got, np.float64) - np.asarray(expected, np.float64)).max() * scale <= far + 1e-4


@TORCHCODEC
@pytest.mark.parametrize("kind", ["WEBP", "AVIF"])
def test_torchcodec_decodes_what_is_lossy_like_pillow(kind):
    data = encoded(kind, quality=90)
    got, expected = (
        SampleDecoder(image_decode="rgb8", image_backend=backend).decode("file.jpg", data).astype(int)
        for backend in ("torchcodec", "auto")
    )
    assert np.abs(got - expected).max() <= 2


@TORCHCODEC
def test_torchcodec_turns_images_as_exif_says():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded("JPEG", exif=exif)
    decoder = SampleDecoder(image_decode="rgb8", image_backend="torchcodec")
    assert decoder.decode("jpg", data).shape == (36, 24, 3)
    assert SampleDecoder(image_decode="rgb8").decode("jpg", data).shape == (24, 36, 3)
    deferred = SampleDecoder(image_decode="rgb8", image_backend="torchcodec", defer_images=True).decode("jpg", data)
    assert deferred.size == (24, 36)


@TORCHCODEC
def test_torchcodec_keeps_the_range_of_sixteen_bits():
    grey = np.linspace(0, 65535, 30 * 20).reshape(20, 30).astype(np.uint16)
    data = encoded("PNG", Image.fromarray(grey))
    got = SampleDecoder(image_decode="l8", image_backend="torchcodec").decode("png", data).astype(int)
    assert np.abs(got - grey / 257).max() <= 1


@TORCHCODEC
def test_torchcodec_takes_the_first_frame():
    frames = [photo(), photo().rotate(180)]
    data = encoded("GIF", frames[0], save_all=True, append_images=frames[1:])
    got, expected = (
        SampleDecoder(image_decode="rgb8", image_backend=backend).decode("gif", data)
        for backend in ("torchcodec", "auto")
    )
    assert np.array_equal(got, expected)


@TORCHCODEC
def test_what_torchcodec_cannot_decode_is_a_decode_error():
    with pytest.raises(DecodeError, match=r"part 'a.jpg' .* cannot be decoded as an image"):
        SampleDecoder(image_backend="torchcodec").decode("a.jpg", encoded("JPEG")[:200])


@PILLOW_HEIF
@pytest.mark.parametrize("backend", ["auto", pytest.param("torchcodec", marks=TORCHCODEC)])
def test_heic(backend):
    load_codec("HEIF")
    data = encoded("HEIF", quality=95)
    decoder = SampleDecoder(image_decode="rgb8", image_backend=backend)
    got = decoder.decode("heic", data).astype(int)
    assert got.shape == (24, 36, 3)
    assert np.abs(got - np.asarray(photo())).mean() < 6
    assert np.array_equal(SampleDecoder(image_decode="rgb8", guess_content=True).decode("x", data).shape, got.shape)
    deferred = SampleDecoder(defer_images=True, image_backend=backend).decode("heic", data)
    assert isinstance(deferred, DeferredImage)
    assert deferred.size == (36, 24)
