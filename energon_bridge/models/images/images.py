"""Decode images from bytes to an array, a tensor or a Pillow image.

A form names the container (numpy, torch, Pillow), the mode (grey, RGB, RGBA) and, with a trailing 8, bytes instead of
floats (the bytes divided by 255, exactly). All forms give the same pixels as Pillow. With `autorotate` images lie as
viewers show them (`ImageOps.exif_transpose`), else as in their files, and a log line says once that some are turned.
Ordinary JPEGs are decoded by libjpeg-turbo through simplejpeg, three times faster; everything else, and any JPEG that
it rejects, is left to Pillow. `fastrgb` is the cheapest form: uint8 in numpy for ordinary JPEGs, a Pillow image for
anything else.

Shapes: grey (height, width); colour (height, width, channels) in numpy, (channels, height, width) in torch. The colour
tensor is a view over the memory of the decoder, because a contiguous copy would cost a quarter of the decode.

Forms without alpha drop it, as Pillow's `convert` does; `alpha` of a form says otherwise. Encoders for models set it,
so that a model gets what its image processor makes of the file: white behind what is transparent.

A form may have a target size: a JPEG is then decoded at 1/2, 1/4 or 1/8 of its size, by computing fewer pixels from its
DCT blocks, as long as neither side falls below that of the target; a lossless one, which has no blocks, comes whole. A
form may choose torchcodec instead, which gives other pixels for some images (it applies the EXIF orientation, and keeps
the range of 16 bits), and decodes HEIC with libheif. Otherwise pillow-heif decodes HEIC, if it is installed.
"""

from __future__ import annotations

import io
import logging
import struct
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Integral
from typing import Any, Literal, get_args

import numpy as np
import simplejpeg
import torch
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from energon_bridge.core.encoder.deferred import Deferred
from energon_bridge.core.encoder.hooks import DELIVERING
from energon_bridge.core.errors import ConfigurationError, DecodeError, MissingCodecError, did_you_mean, is_whole
from energon_bridge.core.format.media import (
    BY_EXTENSION,
    FORMATS,
    HEAD_BYTES,
    IMAGE_EXTENSIONS,
    MAX_PIXELS,
    MediaFormat,
    format_by_head,
    load_codec,
)
from energon_bridge.core.registry import load
from energon_bridge.core.samples import streaming
from energon_bridge.core.samples.sample_place import warn_once, warned
from energon_bridge.core.samples.stacking import Slab
from energon_bridge.core.storage import ByteRange
from energon_bridge.models.images.jpeg import (
    ON_ITS_SIDE,
    ORIENTATION,
    can_scale,
    frame_in,
    jpeg_orientation,
    jpeg_profile,
    loaded_size,
    plain_jpeg,
)
from energon_bridge.models.images.resampling import thread_buffer

# An image over the limit is an error that names it; Pillow's warning, of the same limit, names nothing.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning, append=True)

logger = logging.getLogger(__name__)

ImageMode = Literal["L", "RGB", "RGBA"]
Backend = Literal["auto", "torchcodec"]
Alpha = Literal["drop", "white", "white, no key", "keep"]
"""What becomes of transparency where a form has no alpha: it is dropped; replaced by white, also where one colour of an
RGB image counts as transparent (its key), or not there; or a Pillow image keeps it, as RGBA or as the key of RGB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageForm:
    """The form of a decoded image."""

    container: Literal["numpy", "torch", "pil", "fast"]
    mode: ImageMode
    scaled: bool = False  # float32 in [0, 1] instead of uint8
    target: tuple[int, int] | None = None  # height and width that are enough
    backend: Backend = "auto"
    max_pixels: int = MAX_PIXELS
    alpha: Alpha = "drop"
    autorotate: bool = False  # turned as EXIF or XMP says


def _forms() -> dict[str, ImageForm]:
    modes: tuple[tuple[str, ImageMode], ...] = (("l", "L"), ("rgb", "RGB"), ("rgba", "RGBA"))
    forms: dict[str, ImageForm] = {}
    for suffix, mode in modes:
        forms[suffix] = ImageForm(container="numpy", mode=mode, scaled=True)
        forms[f"{suffix}8"] = ImageForm(container="numpy", mode=mode)
        forms[f"torch{suffix}"] = ImageForm(container="torch", mode=mode, scaled=True)
        forms[f"torch{suffix}8"] = ImageForm(container="torch", mode=mode)
        forms[f"pil{suffix}"] = ImageForm(container="pil", mode=mode)
    forms["fastrgb"] = ImageForm(container="fast", mode="RGB")
    return forms | {"torch": forms["torchrgb"], "pil": forms["pilrgb"]}


IMAGE_FORMS: dict[str, ImageForm] = _forms()

# Only these: Pillow would also run Ghostscript for anything with an EPS header, whatever its name. Its built-in formats
# come first, since any other makes it load all of its plugins (90 ms, once).
_PILLOW_FORMATS = [
    one
    for one in dict.fromkeys(one.codec for one in FORMATS if one.codec and not one.is_named)
    if one not in ("AVIF", "HEIF", "JXL")  # where the first bytes say so: `load_codec` opens them
]

_MOST_SCRATCH = 1 << 19
"""Images of up to this many bytes are decoded into a buffer that stays in the cache."""
# libjpeg-turbo's colours of CMYK JPEGs differ from Pillow's.
_TURBO_COLORSPACES = frozenset({"YCbCr", "RGB", "Gray"})


def image_form(
    name: str,
    target: int | tuple[int, int] | None = None,
    *,
    max_pixels: int | None = MAX_PIXELS,
    backend: Backend = "auto",
    autorotate: bool = False,
) -> ImageForm:
    """Return the form of a name; `target` (one number, or height and width) is a sufficient size.

    Images of more than `max_pixels` raise DecodeError; None: no limit. `autorotate`: images are turned as EXIF says.

    Raises ConfigurationError, naming the nearest match, if there is no such form, if the size is invalid, or if the
    backend does not exist, is not installed or cannot scale.
    """
    if backend not in get_args(Backend):
        raise ConfigurationError(f"image_backend={backend!r} must be one of {', '.join(get_args(Backend))}")
    if backend == "torchcodec":
        if target is not None:
            raise ConfigurationError(
                f"image_target={target!r} scales JPEGs while decoding, which torchcodec cannot do: leave out "
                "image_target or image_backend='torchcodec'"
            )
        _torchcodec()
    if name in IMAGE_FORMS:
        most = sys.maxsize if max_pixels is None else max_pixels
        wanted = None if target is None else _size(target)
        return replace(IMAGE_FORMS[name], target=wanted, max_pixels=most, backend=backend, autorotate=autorotate)
    hint = did_you_mean(name, IMAGE_FORMS)
    raise ConfigurationError(f"unknown image form {name!r}.{hint} Known forms: {', '.join(IMAGE_FORMS)}")


def _size(target: int | tuple[int, int]) -> tuple[int, int]:
    sides = (target, target) if isinstance(target, int | Integral) else tuple(target)
    if len(sides) == 2 and all(is_whole(side) and side > 0 for side in sides):
        return int(sides[0]), int(sides[1])
    raise ConfigurationError(f"image_target must be pixels, or (height, width), both at least 1; got {target!r}")


def guess_image_extension(data: bytes | bytearray | memoryview) -> str | None:
    """Return the extension for an image by its first bytes; None if it is not an image."""
    known = _format_of(data)
    return None if known is None or not IMAGE_EXTENSIONS.issuperset(known.extensions) else known.extensions[0]


def is_heic(data: bytes | bytearray | memoryview) -> bool:
    """Return whether the data starts like a HEIC image."""
    known = _format_of(data)
    return known is not None and known.codec == "HEIF"


def _format_of(data: bytes | bytearray | memoryview) -> MediaFormat | None:
    return format_by_head(bytes(data[:HEAD_BYTES]))


def decode_image(data: bytes | bytearray | memoryview, form: ImageForm, *, part: str) -> Any:
    """Decode one image into a form. Raises DecodeError, naming `part` and the codec's message."""
    try:
        if form.backend == "torchcodec":
            made = _torchcodec().pixels_of(data, form)
            return Image.fromarray(made) if form.container == "pil" else _in_form(made, form)
        if form.container == "pil":
            return _pillow_image(data, form, part)
        pixels = _turbo_pixels(data, form, part)
        if pixels is None and form.container == "fast":
            return _pillow_image(data, form, part)
        if pixels is None:
            # np.array, not asarray: the memory of Pillow is read-only
            pixels = np.array(_pillow_image(data, form, part))
    except (MemoryError, ConfigurationError):
        raise
    except Exception as error:  # the codecs raise OSError, ValueError, SyntaxError, struct.error, zlib.error, …
        raise _refusal(part, data, error) from error
    return _in_form(pixels, form)


def image_size(data: bytes | bytearray | memoryview, form: ImageForm, *, part: str) -> tuple[int, int]:
    """Return width and height of an image in its file, turned if the form or the backend turns it.

    Raises DecodeError for what `decode_image` refuses by its header: a format, a size.
    """
    header = plain_jpeg(bytes(data)) if form.backend == "auto" else None
    if header is not None and header.width * header.height <= _most_pixels(form):
        size = header.width, header.height
        return size[::-1] if form.autorotate and jpeg_orientation(data) in ON_ITS_SIDE else size
    try:
        if form.backend == "torchcodec":
            _torchcodec().kind_of(data)
        with io.BytesIO(data) as stream, _opened(stream, data, form, part) as image:
            turns = form.autorotate or form.backend == "torchcodec"
            size = loaded_size(image)
            return size[::-1] if turns and _orientation(image) in ON_ITS_SIDE else size
    except MemoryError:
        raise
    except Exception as error:
        raise _refusal(part, data, error, "has no readable image size") from error


def is_turned(data: bytes | bytearray | memoryview) -> bool:
    """Return whether viewers rotate or mirror an image, by its EXIF or XMP; False for what is no readable image."""
    if bytes(data[:2]) == b"\xff\xd8":
        return jpeg_orientation(data) != 1
    content = bytes(data)
    if guess_image_extension(data) is None or not any(mark in content for mark in _MARKS_OF_TURNS):
        return False
    try:
        with io.BytesIO(data) as stream, _opened(stream, data, IMAGE_FORMS["rgb8"], "") as image:
            return _orientation(image) != 1
    except Exception:  # `decode_image` reports the error
        return False


_ZIPPED_XMP = b"XML:com.adobe.xmp\0\1"
"""How a compressed text of a PNG begins."""
_MARKS_OF_TURNS = (b"eXIf", b"EXIF", b"Exif", b"Raw profile type", b"tiff:Orientation", _ZIPPED_XMP, b"irot", b"imir")
"""One of them is in each file, other than a JPEG, that is turned: PNG, WebP, AVIF."""


def _refusal(
    part: str, data: bytes | bytearray | memoryview, error: Exception, what: str = "cannot be decoded as an image"
) -> DecodeError:
    reason = str(error) or type(error).__name__
    if isinstance(error, Image.DecompressionBombError):
        reason = f"{reason} Scale it down with another program, or raise Pillow's limit, PIL.Image.MAX_IMAGE_PIXELS"
    if isinstance(error, UnidentifiedImageError):
        own = _format_of(data)
        reason = f"the content is none of {', '.join(_formats_for(data, part))}"
        if own is not None and own.codec in _PILLOW_FORMATS:
            reason = f"it begins as {own.codec}, but its header is cut off or damaged"
    kind = MissingCodecError if isinstance(error, MissingCodecError) else DecodeError
    return kind(f"part {part!r} ({len(data)} bytes) {what}: {reason}")


def is_transparent(image: Image.Image, *, keys: bool = True) -> bool:
    """Return whether transformers' processors find transparency in an image; without `keys`, but for a key of RGB."""
    if "A" in image.getbands():
        return True
    return image.info.get("transparency") is not None and (keys or image.mode != "RGB")


def on_white(image: Image.Image) -> Image.Image:
    """Return a transparent image as RGB with white behind it. Source: `convert_to_rgb` of transformers."""
    front = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", front.size, (255, 255, 255, 255)), front).convert("RGB")


def as_alpha_says(image: Image.Image, alpha: Alpha) -> Image.Image:
    """Return an image in RGB, its transparency dropped or replaced by white, as `alpha` asks."""
    if alpha == "drop" or not is_transparent(image, keys=alpha != "white, no key"):
        return image if image.mode == "RGB" else image.convert("RGB")
    if alpha == "keep":
        return image if image.mode in ("RGB", "RGBA") else image.convert("RGBA")
    return on_white(image)


def _turbo_header(
    data: bytes | bytearray | memoryview, form: ImageForm, part: str
) -> tuple[dict[str, int], str] | None:
    """Return the arguments to decode an ordinary JPEG, and its colour space; None if Pillow must decode it.

    The arguments ask libjpeg-turbo for a scale; they are the height and width of the result.
    """
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    if colorspace not in _TURBO_COLORSPACES or height * width > _most_pixels(form):
        return None
    if (form.autorotate or _is_news("turned", part)) and jpeg_orientation(data) != 1:
        if form.autorotate:
            return None
        _say("turned", part)
    if _is_news("colours", part) and _is_other_profile(jpeg_profile(data)):
        _say("colours", part)
    target = form.target if form.target is not None and can_scale(data) else None
    return _scaled(height, width, target), colorspace


def _most_pixels(form: ImageForm) -> int:
    """Return up to how many pixels Pillow's limit for decompression bombs does not apply, so Pillow is not asked."""
    return min(form.max_pixels, Image.MAX_IMAGE_PIXELS or form.max_pixels)


def decode_rows(
    images: Iterable[tuple[int, str, Any]], form: ImageForm, slab: Slab, turn: Callable[[int], None] | None = None
) -> dict[int, tuple[str, torch.Tensor]]:
    """Decode ordinary colour JPEGs, each given as number of its row, name and bytes, into rows of a slab.

    `turn` is called with the number of an image before it is decoded. Returns names and images by number, without
    images of another kind or size, and those that do not decode.
    """
    mode = form.mode
    if form.container != "torch" or mode == "L" or form.backend != "auto":
        return {}
    # Everything that needs no pixels comes first: decoding an image evicts the surrounding code from the caches.
    turns: list[tuple[int, str, Any, dict[str, int], np.ndarray, torch.Tensor]] = []
    size = None
    rows = None
    misfits = 0
    for number, name, data in images:
        if turn is not None:
            turn(number)
        header = _turbo_header(data, form, name)
        if header is None:
            continue
        if header[0] is not size:
            size = header[0]
            shape = size["min_height"], size["min_width"], len(mode)
            rows = slab.rows(shape, np.float32 if form.scaled else np.uint8)
        if rows is None:
            misfits += 1
            continue
        turns.append((number, name, data, size, rows[0][number], rows[1][number]))
    decoded: dict[int, tuple[str, torch.Tensor]] = {}
    decode = simplejpeg.decode_jpeg
    write = streaming.divide if form.scaled else streaming.copy
    # The rows of a slab have one size.
    size_of_row = turns[0][4].size if turns else 0
    by_scratch = form.scaled or (streaming.STREAMS and size_of_row <= _MOST_SCRATCH)
    scratch = thread_buffer(size_of_row) if turns and by_scratch else None
    for number, name, data, size, array, tensor in turns:
        if turn is not None:
            turn(number)
        try:
            if scratch is None:
                decode(data, mode, buffer=array, **size)
            else:
                write(decode(data, mode, buffer=scratch, **size), array)
        except Exception:  # `decode_image` reports the error
            continue
        decoded[number] = name, tensor
    slab.fitted(len(decoded), misfits)
    return decoded


def _turbo_pixels(data: bytes | bytearray | memoryview, form: ImageForm, part: str) -> np.ndarray | None:
    """Decode an ordinary JPEG; return None if Pillow must decode it."""
    header = _turbo_header(data, form, part)
    if header is None:
        return None
    size, colorspace = header
    try:
        if form.mode != "L":
            return simplejpeg.decode_jpeg(data, form.mode, **size)
        if colorspace == "Gray":
            return simplejpeg.decode_jpeg(data, "GRAY", **size)[..., 0]
        # The file's own luma differs from the one that Pillow computes from RGB.
        return np.array(Image.fromarray(simplejpeg.decode_jpeg(data, "RGB", **size)).convert("L"))
    except ValueError:  # also raised for harmless oddities, such as stray bytes between markers
        return None


@lru_cache(maxsize=4096)  # one dict per size, so that `is` recognises images of equal size
def _scaled(height: int, width: int, target: tuple[int, int] | None) -> dict[str, int]:
    """Return the arguments that ask libjpeg-turbo for the smallest scale that Pillow's `draft` would choose."""
    scale = 1
    if target is not None:
        fits = (scale for scale in (8, 4, 2) if height >= scale * target[0] and width >= scale * target[1])
        scale = next(fits, 1)
    return {"min_height": -(-height // scale), "min_width": -(-width // scale)}


def _pillow_image(data: bytes | bytearray | memoryview, form: ImageForm, part: str) -> Image.Image:
    with io.BytesIO(data) as stream, _opened(stream, data, form, part) as opened:
        image: Image.Image = opened
        orientation = _orientation(image) if form.autorotate else 1
        if form.target is not None and image.format == "JPEG" and can_scale(data):
            height, width = form.target[::-1] if orientation in ON_ITS_SIDE else form.target
            opened.draft(None, (width, height))
        if _is_news("several", part) and _has_several(image, data):
            _say("several", part)
        if _is_news("colours", part) and _has_other_colours(image, data):
            _say("colours", part)
        image.load()  # only now does an ICNS image know whether it has alpha
        if orientation != 1:
            image = ImageOps.exif_transpose(image)
        elif not form.autorotate and _is_news("turned", part) and _orientation(image) != 1:
            _say("turned", part)
        if image.mode[0] in "IF":
            _say("wide", part)
        if form.mode == "RGBA" or not is_transparent(image):
            return image.convert(form.mode)
        if form.alpha != "drop":
            keeps = form.alpha == "keep" and form.mode == "RGB" and form.container in ("pil", "fast")
            made = as_alpha_says(image, "white" if form.alpha == "keep" and not keeps else form.alpha)
            return made.copy() if keeps else made.convert(form.mode)
        alpha = image if "A" in image.getbands() and image.mode != "LAB" else image.convert("RGBA")
        if alpha.getchannel("A").getextrema()[0] != 255:
            _say("transparent", part)
        if isinstance(image.info.get("transparency"), bytes):
            # Pillow drops it too, with a warning for each image that does not name the image.
            del image.info["transparency"]
        return image.convert(form.mode)


def _opened(
    stream: io.BytesIO, data: bytes | bytearray | memoryview, form: ImageForm, part: str
) -> ImageFile.ImageFile:
    """Open an image of a format and size that are decoded."""
    try:
        image = Image.open(stream, formats=_PILLOW_FORMATS)
    except UnidentifiedImageError:  # of a format that a package of its own decodes, or that only its name tells
        if (known := _format_of(data)) is not None:
            load_codec(known.codec)
        image = Image.open(stream, formats=_formats_for(data, part))
    check_size(image.size, form)
    return image


def _formats_for(data: bytes | bytearray | memoryview, part: str) -> list[str]:
    of_name = BY_EXTENSION.get(part.removesuffix(".gz").rpartition(".")[2].lower())
    own = _format_of(data)
    named = [of_name.codec] if of_name is not None and of_name.is_named else []
    return list(dict.fromkeys([*_PILLOW_FORMATS, *([] if own is None or not own.codec else [own.codec]), *named]))


def check_size(size: tuple[int, int], form: ImageForm) -> None:
    if size[0] * size[1] > form.max_pixels:
        raise ValueError(
            f"it has {size[0]} x {size[1]} pixels, more than the limit of {form.max_pixels:,}; scale it down (energon "
            f"convert with --max-pixels {form.max_pixels}), or give the task encoder another limit: encoder.decoder = "
            "SampleDecoder(max_pixels=...)"
        )


def _torchcodec() -> Any:
    """Return the module that decodes by torchcodec; raises ConfigurationError if that is not installed."""
    module = load("decoder", "torchcodec")
    module.library()
    return module


_NEWS = {
    "transparent": "are transparent, which is dropped: transparent pixels get the colour that lies in the file, often "
    "black. If that matters, decode with an alpha channel, image_decode='torchrgba' or 'pilrgba'",
    "turned": "are turned by their EXIF or XMP orientation, which is not applied; viewers apply it, and so does "
    "transformers to files that it opens itself. If the model shall see them so, set autorotate=True in SampleDecoder, "
    "ChatConfig or MultiModalTaskEncoder (data.autorotate=true in the training script). `energon lint` names them",
    "colours": "have a colour profile, a gamma or a transfer of their own (Adobe RGB, Display P3, HDR), which is not "
    "applied, nor is it by transformers: the model sees their numbers as if they were sRGB. If that matters, convert "
    "them to sRGB before training",
    "several": "have several pages or frames, of which the first is taken. Write the others as images, or as a video",
    "wide": "have values of 16 or 32 bits, which Pillow clips to 0 to 255, so most pixels become white or black. Scale "
    "them to 8 bits before training, or, for PNGs, decode with image_backend='torchcodec', which scales them",
}
"""Warnings that are logged once in a run for all images with one extension."""


def _is_news(what: str, part: str) -> bool:
    return _name_of(what, part) not in warned


def _name_of(what: str, part: str) -> str:
    return f"{what}, images, {part.rpartition('.')[2]}"


def _say(what: str, part: str) -> None:
    warn_once(logger, f"images in part {part!r} {_NEWS[what]}", _name_of(what, part))


def _has_other_colours(image: Image.Image, data: bytes | bytearray | memoryview) -> bool:
    """Return whether an opened image says that its colours are not those of sRGB, nor grey."""
    if image.format == "PNG":
        gamma = image.info.get("gamma")
        is_other = gamma is not None and "srgb" not in image.info and abs(gamma - 1 / 2.2) > 0.01
        transfer = bytes(data[:_HEAD]).partition(b"cICP")[2][1:2]
        if is_other or (transfer and transfer not in _LIKE_SRGB):
            return True
    if image.format in ("AVIF", "HEIF"):
        of_box = bytes(data[:_HEAD]).partition(b"colrnclx")[2][:4]  # primaries and transfer (ISO/IEC 23008-12, 6.5.5)
        if of_box and (of_box[1:2] not in _PRIMARIES or of_box[3:4] not in (*_LIKE_SRGB, b"\2")):
            return True
    return _is_other_profile(image.info.get("icc_profile") or b"")


def _is_other_profile(profile: bytes) -> bool:
    """Return whether a colour profile is neither that of sRGB, by its name, nor of greys."""
    names = (b"sRGB", "sRGB".encode("utf-16-be"))
    is_profile = profile[36:40] == b"acsp"
    return is_profile and profile[16:20] != b"GRAY" and not any(map(profile.__contains__, names))


_HEAD = 1024
_LIKE_SRGB = (bytes([1]), bytes([6]), bytes([13]), bytes([14]), bytes([15]))
"""Transfers of cICP that are near to that of sRGB: BT.709, 601, 2020, and itself (ITU-T H.273, table 3)."""
_PRIMARIES = (bytes([1]), bytes([2]), bytes([5]), bytes([6]), bytes([7]))
"""Primaries of sRGB and of older television, or unknown ones (ITU-T H.273, table 2)."""


def _has_several(image: Image.Image, data: bytes | bytearray | memoryview) -> bool:
    """Return whether an opened image has several pages or frames; looking for those of TIFF and GIF would move it."""
    if image.format in ("WEBP", "PNG", "AVIF", "HEIF"):
        return getattr(image, "n_frames", 1) > 1
    if image.format in ("TIFF", "GIF"):
        with suppress(Exception), Image.open(io.BytesIO(data), formats=(image.format,)) as other:  # damaged further on
            return getattr(other, "n_frames", 1) > 1
    return False


def _orientation(image: Image.Image) -> int:
    """Return how EXIF or XMP turns an image; Pillow turns TIFF itself, and pillow-heif HEIC."""
    if image.format == "TIFF":
        return 1
    try:
        value: Any = image.getexif().get(ORIENTATION, 1)
    except (SyntaxError, struct.error):  # it is no EXIF: viewers show such images as they are
        return 1
    return value if value in range(2, 9) else 1


def _in_form(pixels: np.ndarray, form: ImageForm) -> Any:
    if form.scaled:
        # not torch, whose threads would compete with the decoding threads
        floats = np.empty(pixels.shape, np.float32)
        streaming.divide(np.ascontiguousarray(pixels), floats)
        pixels = floats
    if form.container != "torch":
        return pixels
    tensor = torch.from_numpy(pixels)
    return tensor.permute(2, 0, 1) if tensor.ndim == 3 else tensor


@dataclass(frozen=True, slots=True, repr=False)
class DeferredImage(Deferred):
    """An image that has not been decoded.

    Attributes:
        data: The encoded bytes, or where they are in storage.
        form: The form of the decoded image.
        part: Name of the part, for errors.
    """

    data: bytes | ByteRange
    form: ImageForm
    part: str

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, read from the header.

        Raises:
            DecodeError: The header cannot be read, or has a format or size that `get` refuses.
        """
        if not isinstance(self.data, ByteRange):
            return image_size(self.data, self.form, part=self.part)
        if self.form.backend == "auto" and not self.form.autorotate:
            frame = frame_in(self.data)
            size = _webp_size(self.data.read(_HEADS[0])) if frame is None else (frame.width, frame.height)
            if size is not None and size[0] * size[1] <= _most_pixels(self.form):
                return size
        for head in _HEADS:
            with suppress(DecodeError):  # as a rule: more of it says more
                if head < self.data.size and not self.form.autorotate:
                    return image_size(self.data.read(head), self.form, part=self.part)
        return image_size(self.data.read(), self.form, part=self.part)

    def get(self) -> Any:
        """Decode and return the pixels; each call decodes again. Raises DecodeError, and StorageError."""
        data = self.data.read() if isinstance(self.data, ByteRange) else self.data
        return decode_image(data, self.form, part=self.part)

    def decoded(self, memory: np.ndarray | None = None) -> Any:
        """Return the pixels, which take the image's place before `postencode_sample`."""
        return self.get()

    def with_data(self, data: bytes) -> DeferredImage:
        """Return an image of other bytes with the same form and name."""
        return replace(self, data=data)

    def when_got(self) -> Any:
        """Return what `Lazy.get` hands out: the pixels if samples will be delivered next. Raises DecodeError."""
        return self.get() if DELIVERING.get() else self

    def __repr__(self) -> str:
        size = self.data.size if isinstance(self.data, ByteRange) else len(self.data)
        return f"DeferredImage({self.part!r}, {size} bytes)"


_HEADS = (1 << 8, 1 << 10, 1 << 13, 1 << 16)
"""Bytes at the beginning of an image that are read for its size, one after the other until they tell it."""


def _webp_size(head: bytes) -> tuple[int, int] | None:
    """Return width and height of a WebP, whose beginning Pillow does not open. Source: RFC 9649, 2.5 to 2.7, and VP8's.

    None: it is no WebP, or has another first chunk.
    """
    if len(head) < 30 or head[:4] != b"RIFF" or head[8:12] != b"WEBP":
        return None
    if head[12:16] == b"VP8X":  # the canvas
        return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little")
    if head[12:16] == b"VP8L" and head[20] == 0x2F:
        bits = int.from_bytes(head[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if head[12:16] == b"VP8 " and head[23:26] == b"\x9d\x01\x2a":
        width, height = (int.from_bytes(head[place : place + 2], "little") & 0x3FFF for place in (26, 28))
        return width, height
    return None
