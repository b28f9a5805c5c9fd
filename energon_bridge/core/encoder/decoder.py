"""Decodes the raw parts of a sample by the extension of each part's name.

    .gz                          unpacked first, up to `max_part_bytes`; then the rest of the name decides
    IMAGE_EXTENSIONS             the image decoder of the registry (`models/images/images.py`)
    txt text transcript          str (UTF-8; a byte-order mark is left out)
    cls cls2 id index inx        int
    json jsn                     json.loads
    npy, npz                     an array, a dict of arrays
    pth                          torch.load(weights_only=True)
    safetensors                  a dict of tensors
    ten tb                       a list of arrays (webdataset's tenbin)
    mp msg, cbor                 msgpack, cbor2 or cbor, if that package is installed
    AV_EXTENSIONS                an AVDecoder, or as `av_decode` says; of unsure ones if the first bytes agree
    anything else                the bytes; where they begin as media do, a log line says so

The extension follows the last dot of the part's name, in upper or lower case; `format/media.py` has those of media.
Pickles (`pkl`, `pickle`, `pyd`) stay bytes, since reading one can run code; with `read_pickles`, pickles of plain
values, arrays and tensors are read, and any other is a DecodeError (`pickled`). A decoder keeps no state and may be
used from many threads; image codecs release the GIL.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, Protocol, Self

from energon_bridge.core.encoder.hooks import DELIVERING
from energon_bridge.core.errors import ConfigurationError, DecodeError, check_choice, check_number
from energon_bridge.core.format.documents import BOM
from energon_bridge.core.format.media import (
    AV_EXTENSIONS,
    HEAD_BYTES,
    IMAGE_EXTENSIONS,
    MAX_PIXELS,
    UNSURE,
    extension_by_head,
    kind_by_head,
)
from energon_bridge.core.registry import load
from energon_bridge.core.samples.sample_place import warn_once
from energon_bridge.core.samples.stacking import Slab
from energon_bridge.core.storage import ByteRange

logger = logging.getLogger(__name__)

MAX_PART_BYTES = 2 << 30
"""Default of `SampleDecoder(max_part_bytes=...)`."""
AV_FORMS = ("AVDecoder", "pyav", "torch")


class ImageCodec(Protocol):
    """What decodes images; the registry has it (`decoder`, `image`), and it is asked for at the first image."""

    DeferredImage: Callable[[bytes | ByteRange, Any, str], Any]

    def image_form(
        self, name: str, target: int | tuple[int, int] | None, *, max_pixels: int | None, backend: str, autorotate: bool
    ) -> Any:
        """Return the form of decoded images that has a name; raises ConfigurationError for an unknown one."""

    def guess_image_extension(self, data: bytes | bytearray | memoryview) -> str | None:
        """Return the extension of an image from its first bytes; None if it is not an image."""

    def decode_image(self, data: bytes | bytearray | memoryview, form: Any, *, part: str) -> Any:
        """Decode an image; raises DecodeError, naming the part."""

    def decode_rows(
        self, images: list[tuple[int, str, Any]], form: Any, slab: Slab, turn: Callable[[int], None] | None
    ) -> dict[int, tuple[str, Any]]:
        """Decode images, given as (row, part, bytes), into rows of a slab; return part and image by row."""


def _images() -> ImageCodec:
    codec: ImageCodec = load("decoder", "image")
    return codec


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleDecoder:
    """Decodes the parts of a sample.

    Examples:
        >>> class Bytes(DefaultTaskEncoder):
        ...     decoder = SampleDecoder(image_decode="torchrgb8")
        >>> dataset = get_train_dataset("data/captions", batch_size=4, task_encoder=Bytes())
        >>> next(iter(get_savable_loader(dataset))).image.dtype
        torch.uint8

    `image_decode` is one of IMAGE_FORMS, or None to leave images as the bytes of their files; `av_decode` is one of
    AV_FORMS; with `guess_content` an image is known by its first bytes, whatever its part is called; with
    `defer_images` it is a `DeferredImage`, decoded when it is needed; with `unread_media` besides, media stay in
    storage until then, and of their files only what tells their sizes is read.
    Videos and sound are an `AVDecoder`, decoded when and where it is asked; `torch` decodes all of it at once into an
    `AVData` (the sound of videos with `video_decode_audio`), and `pyav` opens it for the user to read and to close.
    `image_backend` says what decodes images: `auto`, the fastest for a format, with Pillow's pixels; or `torchcodec`.
    `image_target` declares that images need be no larger than a number of pixels, or `(height, width)`: JPEGs are then
    decoded at 1/2, 1/4 or 1/8 of their size where that is not smaller, which gives other pixels.
    With `autorotate` images are turned as their EXIF says, and videos as their headers say, before anything sees their
    sizes; torchcodec always does that.

    A few bytes can demand any amount of memory, so there are two limits: images of more than `max_pixels` (width times
    height in the file; 89 million by default), and parts that unpack to more than `max_part_bytes` (`.gz`, `.npz` and
    `.pth`; 2 GiB by default) raise DecodeError, so the sample is skipped and counted like any damaged one. None: no
    limit. Pillow's own `Image.MAX_IMAGE_PIXELS` applies besides `max_pixels`: raise both for larger images.

    With `read_pickles`, pickles of plain values are read; otherwise they stay bytes. `av_class` is the class for videos
    and sound: a subclass of AVDecoder, or None for itself.

    A subclass may override `decode` for single parts, or `__call__` for whole samples, which then gets the bytes of all
    parts, by name, with the meta fields, and returns the parts; a sample keeps its meta fields.

    Raises ConfigurationError for an unknown form, or an invalid size or limit.
    """

    image_decode: str | None = "torchrgb"
    av_decode: str = "AVDecoder"
    video_decode_audio: bool = False
    guess_content: bool = False
    defer_images: bool = False
    unread_media: bool = False
    image_target: int | tuple[int, int] | None = None
    image_backend: Literal["auto", "torchcodec"] = "auto"
    autorotate: bool = False
    max_pixels: int | None = MAX_PIXELS
    max_part_bytes: int | None = MAX_PART_BYTES
    read_pickles: bool = False
    av_class: Callable[..., Any] | None = None
    _alpha: str = field(default="drop", init=False, repr=False, compare=False)
    _known_form: Any = field(default=None, init=False, repr=False, compare=False)

    @property
    def unread_from(self) -> int | None:
        """Return the size in bytes from which a sample is not read until its parts are needed; None: read all."""
        if self.av_decode != "AVDecoder" or self.takes_samples:
            return None
        return 0 if self.unread_media else _UNREAD_FROM

    @property
    def turns_images(self) -> bool | None:
        """Return whether images are turned as their EXIF says; None if they stay bytes."""
        return None if self._form is None else self.autorotate or self.image_backend == "torchcodec"

    @property
    def takes_samples(self) -> bool:
        """Return whether `__call__` is a subclass's own."""
        return type(self).__call__ is not _DECODE_PARTS

    def keeps_unread(self, part_name: str) -> bool:
        """Return whether a part is decoded straight from storage, without being read first."""
        if self.unread_from is None:
            return False
        kind = part_name.rpartition(".")[2].lower()
        return kind in AV_EXTENSIONS or (self.unread_media and kind in IMAGE_EXTENSIONS)

    def with_alpha(self, alpha: str) -> Self:
        """Return this decoder with another rule for transparency in forms without alpha."""
        if self.image_decode is None or self._alpha == alpha:
            return self
        made = copy(self)
        object.__setattr__(made, "_alpha", alpha)
        object.__setattr__(made, "_known_form", None)
        return made

    @property
    def _form(self) -> Any:
        """The form to which images are decoded; None: they stay bytes."""
        if self._known_form is None and self.image_decode is not None:
            object.__setattr__(self, "_known_form", self._make_form())
        return self._known_form

    def _make_form(self) -> Any:
        form = _images().image_form(
            str(self.image_decode),
            self.image_target,
            max_pixels=self.max_pixels,
            backend=self.image_backend,
            autorotate=self.autorotate,
        )
        return replace(form, alpha=self._alpha)

    def __post_init__(self) -> None:
        for name in ("max_pixels", "max_part_bytes"):
            limit = check_number(f"SampleDecoder: {name}", getattr(self, name), 1, optional=True)
            object.__setattr__(self, name, limit)
        chosen = (self.image_decode, self.image_target, self.image_backend)
        if self.unread_media and not (self.defer_images and self.av_decode == "AVDecoder"):
            raise ConfigurationError("SampleDecoder: unread_media needs defer_images=True and av_decode='AVDecoder'")
        if self.image_decode is not None and chosen != _DEFAULT_IMAGES:
            # What was chosen is checked now; the default needs no codec before the first image.
            object.__setattr__(self, "_known_form", self._make_form())
            object.__setattr__(self, "image_target", self._known_form.target)
        elif self.image_decode is None and (
            self.defer_images or self.image_target is not None or self.image_backend != "auto"
        ):
            raise ConfigurationError(
                "SampleDecoder(image_decode=None) leaves images as bytes, so defer_images, image_target and "
                "image_backend have no effect: leave them out, or choose a form such as image_decode='torchrgb'"
            )
        check_choice("av_decode", self.av_decode, AV_FORMS)

    def __call__(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Decode all parts; meta fields (`__key__`, …) and values that are no longer bytes pass through."""
        return {
            name: value if name.startswith("__") or not isinstance(value, _RAW) else self.decode(name, value)
            for name, value in parts.items()
        }

    def decode_file(self, name: str, data: bytes | bytearray | memoryview | ByteRange) -> Any:
        """Decode a file of a store, as a sample of one part if a subclass takes whole samples."""
        if not self.takes_samples:
            return self.decode(name, data)
        folder, slash, last = name.rpartition("/")
        key, _, part = last.partition(".")
        return self({"__key__": folder + slash + key, part: data})[part]

    def decode(self, part_name: str, data: bytes | bytearray | memoryview | ByteRange) -> Any:
        """Decode one part, given its bytes, or its range in storage if `keeps_unread` is true for it.

        Raises DecodeError, naming the part and the codec's message.
        """
        if isinstance(data, ByteRange):
            if self.keeps_unread(part_name):
                kind = _kind_of(part_name)
                if kind.is_av or (kind.is_unsure and kind_by_head(data.read(HEAD_BYTES)) == "av"):
                    return self._av(data, part_name)
                if kind.is_image and self._form is not None:
                    return _images().DeferredImage(data, self._form, part_name)
            raw: bytes | bytearray | memoryview = data.read()
        else:
            raw = data
        kind = _kind_of(part_name)
        if kind.zipped:
            raw = _run("gz", partial(_gunzip, most=self.max_part_bytes), part_name, raw)
        if kind.is_image or (self.guess_content and _images().guess_image_extension(raw)):
            form = self._form
            if form is None:
                return bytes(raw)
            if self.defer_images and not DELIVERING.get():
                return _images().DeferredImage(bytes(raw), form, part_name)
            return _images().decode_image(raw, form, part=part_name)
        looked = kind.is_unsure or self.guess_content
        if kind.is_av or (looked and kind_by_head(bytes(raw[:HEAD_BYTES])) == "av"):
            return self._av(bytes(raw), part_name)
        codec = _CODECS.get(kind.extension)
        if self.read_pickles and kind.extension in _PICKLES:
            codec = load("decoder", "pickle")
        elif kind.extension in _ARRAYS:
            codec = load("decoder", "arrays").codec_of(kind.extension, self.max_part_bytes)
        if codec is None:
            _say_if_media(kind.extension, part_name, raw)
        # A memoryview would keep the whole read alive.
        return bytes(raw) if codec is None else _run(kind.extension, codec, part_name, bytes(raw))

    def decode_into(
        self,
        slab: Slab,
        samples: Iterable[tuple[int, Mapping[str, Any]]],
        turn: Callable[[int], None] | None = None,
    ) -> dict[int, tuple[str, Any]]:
        """Decode the first image of each sample, given with the number of its row, into rows of a slab.

        `turn` is called with the number of the row before its image is decoded. Returns the name of the part and the
        image by number. Images left out, possibly all, must go through `decode`.
        """
        changed = self.takes_samples or type(self).decode is not SampleDecoder.decode
        if self.image_decode is None or self.defer_images or changed:
            return {}

        images = []
        for number, parts in samples:
            for name, data in parts.items():
                kind = _kind_of(name)
                if kind.is_image and not kind.zipped:
                    images.append((number, name, data))
                    break
        return _images().decode_rows(images, self._form, slab, turn) if images else {}

    def _av(self, data: bytes | ByteRange, part_name: str) -> Any:
        decoder = (self.av_class or load("decoder", "av"))(data, name=part_name)
        if self.autorotate:
            decoder.autorotate = True
        if self.av_decode == "AVDecoder":
            return decoder
        return decoder.get_frames(self.video_decode_audio) if self.av_decode == "torch" else decoder.open_container()

    def config(self) -> dict[str, Any]:
        """Return the settings as plain values; those that change pixels are also in the state of a run."""
        names = (
            entry.name
            for entry in fields(SampleDecoder)
            if entry.name not in ("read_pickles", "unread_media", "av_class", "_alpha", "_known_form")
        )
        return {"type": type(self).__qualname__} | {name: getattr(self, name) for name in names}


_DECODE_PARTS = SampleDecoder.__call__
_DEFAULT_IMAGES = ("torchrgb", None, "auto")
"""The defaults of `image_decode`, `image_target` and `image_backend`."""
_ARRAYS = frozenset(("npy", "npz", "pth", "safetensors", "ten", "tb", "mp", "msg", "cbor"))
"""What the codecs of arrays decode; the registry has them."""
_PICKLES = ("pkl", "pickle", "pyd")
_PIECE = 1 << 20
"""Bytes that are unpacked at a time where a limit holds."""
_RAW = (bytes, bytearray, memoryview, ByteRange)
_UNREAD_FROM = 1 << 20
"""Bytes of a sample from which its parts are read one by one, videos only as far as they are decoded."""
_INTERPRETER_TRIES = 20


def _run(kind: str, codec: Callable[[Any], Any], part: str, data: bytes | bytearray | memoryview) -> Any:
    tries = 0
    while True:
        try:
            return codec(data)
        except (ImportError, MemoryError):
            raise  # not the data's fault
        except Exception as error:  # codecs raise anything
            tries += 1
            # Python 3.11 raises SystemError where several threads parse literals, which numpy does for its headers.
            if isinstance(error, SystemError) and tries < _INTERPRETER_TRIES:
                continue
            reason = f"{type(error).__name__}: {error}"
            raise DecodeError(f"part {part!r} ({len(data)} bytes) cannot be decoded as {kind}: {reason}") from error


def _text(data: bytes) -> str:
    return data.decode("utf-8").removeprefix(BOM)


def too_large(most: int) -> str:
    """Return what is wrong with a part that unpacks to more bytes than it may."""
    return f"it unpacks to more than {most:,} bytes; allow more with SampleDecoder(max_part_bytes=...)"


def _gunzip(data: bytes | bytearray | memoryview, most: int | None) -> bytes:
    if most is None:
        return gzip.decompress(data)
    unpacker = zlib.decompressobj(16 + zlib.MAX_WBITS)
    with contextlib.suppress(zlib.error):
        unpacked = unpacker.decompress(data, most + 1)
        if unpacker.eof and not unpacker.unused_data and len(unpacked) <= most:
            return unpacked
    # Several members, padding, damage, or too much.
    pieces: list[bytes] = []
    size = 0
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        while piece := file.read(_PIECE):
            pieces.append(piece)
            size += len(piece)
            if size > most:
                raise ValueError(too_large(most))
    return b"".join(pieces)


_CODECS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("cls", "cls2", "id", "index", "inx"), int),
    **dict.fromkeys(("json", "jsn"), json.loads),
}


_looked_at: set[str] = set()


def _say_if_media(extension: str, part_name: str, raw: bytes | bytearray | memoryview) -> None:
    """Log, once for each extension, that a part that stays bytes begins as media do; its first part is looked at."""
    if extension in _looked_at:
        return
    _looked_at.add(extension)
    if (found := extension_by_head(bytes(raw[:HEAD_BYTES]))) is not None:
        warn_once(
            logger,
            f"part {part_name!r} begins as .{found} does, and stays bytes, since its extension is not known as media: "
            f"call it .{found}, or decode with SampleDecoder(guess_content=True)",
        )


class _Kind(NamedTuple):
    """How a part is decoded, by its name; where that is unsure, its first bytes tell whether it is video or sound."""

    zipped: bool
    extension: str
    is_image: bool
    is_av: bool
    is_unsure: bool


@lru_cache(maxsize=4096)  # the same few names for every sample
def _kind_of(part_name: str) -> _Kind:
    lower = part_name.lower()
    name = lower.removesuffix(".gz")
    extension = name.rpartition(".")[2]
    is_unsure = extension in UNSURE
    is_av = extension in AV_EXTENSIONS and not is_unsure
    return _Kind(name != lower, extension, extension in IMAGE_EXTENSIONS, is_av, is_unsure)
