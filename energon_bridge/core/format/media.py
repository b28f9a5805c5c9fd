"""Media: which files are images, and which video or sound; and their sizes and lengths, known without decoding them.

Decoders, `energon convert`, `prepare-media`, lists and pages of samples all ask the one table of formats here. What an
extension says comes from the name alone; first bytes are a pattern, or unknown for formats that have none (TGA, PPM).

Metadata is stored in `index.sqlite`, in the table `media_metadata(entry_key PRIMARY KEY, metadata_type,
metadata_json)`. The key is `<sample key>.<part>` in a dataset and the path in a folder of files, the type is `image` or
`av`, and the JSON is compact and omits unknown values. `media_filters(filter_id, strategy, patterns, created_at_utc)`
has the filters by which the files were chosen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from types import MappingProxyType
from typing import Literal, NamedTuple

from energon_bridge.core.errors import MediaMetadataError, MissingCodecError

MediaKind = Literal["image", "av"]

HEAD_BYTES = 400
"""The first bytes of a file needed to find out its kind: three packets of a transport stream begin there."""
MAX_PIXELS = 89_478_485
"""Default of `SampleDecoder(max_pixels=...)`: Pillow's own limit for its warning; 1.1 GB as floats."""


class MediaFormat(NamedTuple):
    """A format of media files.

    Attributes:
        kind: `image`, or `av` for video and sound.
        extensions: In lower case; the first is the usual one.
        head: What a file begins with; None: nothing certain.
        codec: What Pillow calls an image of the format.
        is_named: Whether an image is decoded only if its name or its first bytes say that it has the format.
        unsure: Those of its extensions that other files have, too, such as TypeScript's `.ts`: a part is decoded only
            if its first bytes say so, too.
    """

    kind: MediaKind
    extensions: tuple[str, ...]
    head: re.Pattern[bytes] | None
    codec: str = ""
    is_named: bool = False
    unsure: tuple[str, ...] = ()


def _image(codec: str, extensions: str, head: bytes | None = None, *, is_named: bool = False) -> MediaFormat:
    pattern = None if head is None else re.compile(head, re.DOTALL)
    return MediaFormat("image", tuple(extensions.split()), pattern, codec, is_named)


def _av(extensions: str, head: bytes, unsure: str = "") -> MediaFormat:
    pattern = re.compile(head, re.DOTALL)
    return MediaFormat("av", (*extensions.split(), *unsure.split()), pattern, unsure=(*unsure.split(),))


FORMATS: tuple[MediaFormat, ...] = (
    # In the order in which Pillow tries them.
    _image("JPEG", "jpg jpeg jpe jfif", rb"\xff\xd8\xff"),
    _image("PNG", "png apng", rb"\x89PNG\r\n\x1a\n"),
    _image("GIF", "gif", rb"GIF8[79]a"),
    _image("BMP", "bmp dib", rb"BM.{4}\0{4}"),  # two letters alone would match plain text
    _image("PPM", "ppm pgm pbm pnm"),
    _image("DIB", ""),
    _image("WEBP", "webp", rb"RIFF.{4}WEBP"),
    _image("TIFF", "tif tiff", rb"II[*+]\0|MM\0[*+]"),
    _image("JPEG2000", "jp2 jpf jpx", rb"\0\0\0\x0cjP  \r\n\x87\n"),
    _image("JPEG2000", "j2k j2c jpc", rb"\xff\x4f\xff\x51"),
    _image("AVIF", "avif avifs", rb".{4}ftyp(avi[fs]|m[is]f1.{4}(.{4})*?avi[fs])"),
    _image("HEIF", "heic heif", rb".{4}ftyp(hei[cmsx]|hev[cmsx]|m[is]f1)"),
    _image("JXL", "jxl", rb"\xff\x0a|\0\0\0\x0cJXL \r\n\x87\n"),
    # Decoded only if they are named, since Pillow recognises some of them by almost nothing.
    _image("PSD", "psd", rb"8BPS\0\x01", is_named=True),
    _image("ICO", "ico", rb"\0\0\x01\0[^\0]\0.{3}\0", is_named=True),
    _image("CUR", "cur", rb"\0\0\x02\0[^\0]\0.{3}\0", is_named=True),
    _image("ICNS", "icns", rb"icns\0", is_named=True),
    _image("DDS", "dds", rb"DDS \x7c\0\0\0", is_named=True),
    _image("TGA", "tga icb vda vst", is_named=True),
    _image("PCX", "pcx", is_named=True),
    _image("DCX", "dcx", is_named=True),
    _image("SGI", "sgi", is_named=True),
    _image("SUN", "ras", is_named=True),
    _image("XBM", "xbm", is_named=True),
    _image("XPM", "xpm", is_named=True),
    _av("mp4 m4v mov m4a m4b 3gp 3g2 f4v", rb".{4}ftyp", "qt"),  # images with this head come before
    _av("mkv webm mka mk3d weba", rb"\x1aE\xdf\xa3"),
    _av("avi divx", rb"RIFF.{4}AVI "),
    _av("wav wave", rb"(RIFF|RF64|RIFX).{4}WAVE"),
    _av("flac", rb"fLaC"),
    _av("ogg opus oga ogv spx", rb"OggS"),
    _av("aac adts", rb"\xff[\xf1\xf9]"),
    _av("mp3", rb"ID3|\xff[\xf2\xf3\xfa\xfb]"),
    _av("mp2", rb"\xff[\xf4\xf5\xfc\xfd]"),
    _av("flv", rb"FLV\x01"),
    _av("mpg mpeg mpe vob", rb"\0\0\x01\xba"),
    _av("m2v m1v", rb"\0\0\x01\xb3"),
    _av("wmv wma asf", rb"0&\xb2u\x8ef\xcf\x11"),
    _av("aiff aif aifc", rb"FORM.{4}AIF[CF]"),
    _av("amr awb", rb"#!AMR"),
    _av("m2ts m2t", rb"(.{4})?G.{187}(.{4})?G.{187}(.{4})?G", "ts mts"),
    _av("ac3", rb"\x0bw.{3}[\0-\x57]"),  # the version is in five bits (ATSC A/52, 5.3.2 and E.2.3)
    _av("eac3 ec3", rb"\x0bw.{3}[\x58-\x87]"),
    _av("caf", rb"caff\0\x01"),
    _av("w64", rb"riff\x2e\x91\xcf\x11"),
    _av("wv", rb"wvpk"),
    _av("tta", rb"TTA[12]"),
    _av("rmvb", rb"\.RMF|\.ra\xfd", "rm ra"),
    _av("mxf", rb"\x06\x0e\x2b\x34\x02\x05\x01\x01\x0d\x01\x02"),
    _av("ivf", rb"DKIF"),
    _av("y4m", rb"YUV4MPEG2 "),
    _av("hevc h265", rb"\0?\0\0\x01[\x40\x46]\x01", "265"),
    _av("h264", rb"\0?\0\0\x01[\x09\x27\x67]", "264"),
    _av("", rb"\.snd\0", "au snd"),
    _av("", rb"NIST_1A\n", "sph"),
    _av("", rb"MAC ", "ape"),
    _av("", rb"\x7f\xfe\x80\x01", "dts"),
    _av("", rb"\x1f\x07\0", "dv"),
)

BY_EXTENSION: Mapping[str, MediaFormat] = MappingProxyType({name: one for one in FORMATS for name in one.extensions})
_PACKAGES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "HEIF": ("pillow_heif", "HEIC needs pillow-heif: pip install 'energon-bridge[heic]'"),
        "AVIF": ("PIL._avif", "AVIF needs a Pillow with libavif: pip install -U 'pillow>=11.3'"),
        "JXL": ("pillow_jxl", "JPEG XL needs pillow-jxl-plugin: pip install pillow-jxl-plugin"),
    }
)
"""Formats that Pillow opens with a module that may not be installed: the module, and how to get it."""


def format_by_head(head: bytes) -> MediaFormat | None:
    """Return the format of a file by its first bytes; None if unknown."""
    return next((one for one in FORMATS if one.head is not None and one.head.match(head)), None)


def extensions_of(kind: MediaKind) -> frozenset[str]:
    """Return the extensions of a kind."""
    return frozenset(name for one in FORMATS if one.kind == kind for name in one.extensions)


IMAGE_EXTENSIONS = extensions_of("image")
AV_EXTENSIONS = extensions_of("av")
UNSURE = frozenset(name for one in FORMATS for name in one.unsure)


def load_codec(codec: str) -> None:
    """Let Pillow open images of a format; raises MissingCodecError if that needs a package that is not there."""
    if codec not in _PACKAGES:
        return
    module, remedy = _PACKAGES[codec]
    try:
        loaded = import_module(module)
    except ImportError as error:
        raise MissingCodecError(remedy) from error
    if codec == "HEIF":
        loaded.register_heif_opener()


def missing_package(head: bytes, name: str = "") -> str | None:
    """Return the package that an image needs and that is not there, by its first bytes, or else by its name."""
    media_format = format_by_head(head) or BY_EXTENSION.get(name.rpartition(".")[2].lower())
    try:
        load_codec("" if media_format is None else media_format.codec)
    except MissingCodecError as error:
        return str(error)
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Metadata of media files.


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMetadata:
    """Width and height in pixels, the file's format (`JPEG`) and colour mode (`RGB`), as Pillow names them."""

    width: int
    height: int
    format: str = "UNKNOWN"
    mode: str = "UNKNOWN"


@dataclass(frozen=True, slots=True, kw_only=True)
class AVMetadata:
    """Video and sound of one file; durations in seconds, None for what it lacks or does not record."""

    video_duration: float | None = None
    video_num_frames: int | None = None
    video_fps: float | None = None
    video_width: int | None = None
    video_height: int | None = None
    audio_duration: float | None = None
    audio_channels: int | None = None
    audio_sample_rate: int | None = None
    audio_num_samples: int | None = None


MediaMetadata = ImageMetadata | AVMetadata

_TYPES: dict[str, type[ImageMetadata] | type[AVMetadata]] = {"image": ImageMetadata, "av": AVMetadata}


def read_metadata(kind: str, text: str, *, where: str) -> MediaMetadata:
    """Return the metadata of a row; raises MediaMetadataError, beginning with `where`."""
    cls = _TYPES.get(kind)
    if cls is None:
        raise MediaMetadataError(f"{where}: unknown type {kind!r}, expected one of {', '.join(_TYPES)}.")
    try:
        values = json.loads(text)
        names = {field.name for field in fields(cls)}
        # Newer releases may have more fields, which are ignored here.
        return cls(**{name: value for name, value in values.items() if name in names})
    except (ValueError, TypeError, AttributeError) as error:
        raise MediaMetadataError(f"{where}: cannot read it: {error}. Run `energon prepare-media` again.") from error


# ---------------------------------------------------------------------------------------------------------------------
# Which files are media: by the extensions of their names, or by their first bytes.


def kind_by_name(name: str) -> MediaKind | None:
    """Return the kind of a file by the extension of its name; None, too, if the extension is unsure."""
    extension = name.rpartition(".")[2].lower()
    media_format = BY_EXTENSION.get(extension)
    return None if media_format is None or extension in UNSURE else media_format.kind


def kind_by_head(head: bytes) -> MediaKind | None:
    """Return the kind of a file by its first bytes."""
    media_format = format_by_head(head)
    return None if media_format is None else media_format.kind


def extension_by_head(head: bytes) -> str | None:
    """Return the usual extension of a file by its first bytes; None if unknown."""
    media_format = format_by_head(head)
    return None if media_format is None else media_format.extensions[0]


BASE64 = ("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR")
"""How the base64 of JPEG, PNG, GIF and WebP begins."""
_IN_BASE64 = re.compile(r"[A-Za-z0-9+/\r\n]{40,}={0,2}\s*")
_JUDGED = 400
"""Characters of a text that are looked at."""


def is_base64(value: object) -> bool:
    """Return whether a text is the base64 of an image, as MMBench's tables have them, judging by its beginning."""
    return isinstance(value, str) and value.startswith(BASE64) and _IN_BASE64.fullmatch(value[:_JUDGED]) is not None
