"""What JPEGs say without a codec: sizes and modes of plain files, how an image is turned, and where it ends."""

from __future__ import annotations

import re
import struct
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from energon_bridge.core.format.media import ImageMetadata
from energon_bridge.core.storage import ByteRange, as_far

_JPEG_MODES = {1: "L", 3: "RGB", 4: "CMYK"}
_JPEG_FRAMES = (0xC0, 0xC1, 0xC2)
_SCALED_FRAMES = (*_JPEG_FRAMES, 0xC9, 0xCA)
"""Baseline, extended and progressive frames, coded by Huffman or arithmetically: those that libjpeg scales."""
_DHT = 0xC4
_SOS = 0xDA
_DQT = 0xDB
_DRI = 0xDD
_APP0 = 0xE0
_APP1 = 0xE1
_APP2 = 0xE2
_APP14 = 0xEE
_APP15 = 0xEF
_COM = 0xFE
_FRAMES = frozenset((*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0)))
_ENDS = frozenset((0x00, 0x01, *range(0xD0, 0xDA), _SOS))
"""Markers without a length after them, and start of scan (SOS), behind which the image data lie."""
_PARSED = {_APP0: 14, _APP2: 16, _APP14: 14}  # sizes of segments of which Pillow takes the start apart
ORIENTATION, ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)
"""EXIF's tag of orientation, and those of its values that swap width and height."""
_EXIF = b"Exif\0\0"
_ICC = b"ICC_PROFILE\0"  # followed by the number of the segment, and how many there are
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_XMP_ORIENTATION = re.compile(rb"tiff:Orientation(?:=\"|>)([0-9])")
_WHOLE = {3: "H", 4: "I", 8: "h", 9: "i"}  # kinds of entries of EXIF that are whole numbers
_READ = 256
_READ_FAR = 1 << 12
_FRAME_BYTES = 22  # of four colours
_MOST_SEGMENTS = 32
_NO_SCAN = b"\xff\xda\x00\x02"
_MOST_PIXELS = 178_956_970  # from twice as many on, Pillow refuses to open an image


def plain_jpeg(data: bytes) -> ImageMetadata | None:
    """Return what Pillow reads in the header of an ordinary JPEG, in a fifth of its time; None if Pillow must read it.

    Segments up to the first scan: two bytes of marker, two of length, content.
    """
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    at = 2
    end = len(data)
    metadata = None
    while at + 4 <= end and data[at] == 0xFF:
        marker = data[at + 1]
        size = data[at + 2] << 8 | data[at + 3]
        if at + 2 + size > end or size < 2:
            return None
        if marker == _SOS:
            return metadata
        if marker in _JPEG_FRAMES:
            if metadata is not None or size < 8:
                return None
            depth, height, width, parts = data[at + 4], *struct.unpack_from(">HHB", data, at + 5)
            mode = _JPEG_MODES.get(parts)
            if mode is None or depth != 8 or size != 8 + 3 * parts or not 0 < width * height <= _MOST_PIXELS:
                return None
            metadata = ImageMetadata(width=width, height=height, format="JPEG", mode=mode)
        elif marker == _DQT:
            if (size - 2) % 65 or any(data[place] > 15 for place in range(at + 4, at + 2 + size, 65)):
                return None
        elif _APP0 <= marker <= _APP15:
            if size < _PARSED.get(marker, 2):
                return None
            if marker == _APP2 and data.startswith(b"MPF", at + 4):
                return None  # several images in one file
        elif marker not in (_DHT, _DRI, _COM):
            return None
        at += 2 + size
    return None


def frame_in(image: ByteRange) -> ImageMetadata | None:
    """Return what `plain_jpeg` says of an image in storage, reading what leads to its frame; None if it says nothing.

    Segments that go on behind what was read (EXIF with a small picture, a profile) are jumped over; where a request
    costs more than some kilobytes, more is read behind them.
    """
    data = image.read(_READ)
    length = _READ if as_far(image.store) is None else _READ_FAR
    at = 2
    for _ in range(_MOST_SEGMENTS):
        if not data.startswith(b"\xff\xd8\xff") or at + 4 > image.size:
            return None
        if at + _FRAME_BYTES > len(data):
            data = data.ljust(at, b"\0")
            data += replace(image, offset=image.offset + len(data), size=image.size - len(data), head=b"").read(length)
        marker, size = struct.unpack_from(">xBH", data, at)
        at += 2 + size
        if marker in _FRAMES:
            return plain_jpeg(data[:at] + _NO_SCAN) if at <= len(data) else None
    return None


def can_scale(data: bytes | bytearray | memoryview) -> bool:
    """Return whether the frame of a JPEG is coded so that libjpeg decodes it at a scale.

    Lossless frames have no scale, and come at their whole size whatever was asked for: a decoder that has been asked
    for less room writes past its end. What this parser does not follow counts as such a frame.
    """
    frames = _segments(data, _FRAMES)
    return len(frames) == 1 and frames[0][0] in _SCALED_FRAMES


def jpeg_orientation(data: bytes | bytearray | memoryview) -> int:
    """Return how a JPEG is turned, 1 to 8, as Pillow finds it: by its EXIF, or else by its XMP. 1: it is not turned."""
    tagged = _segments(data, (_APP1,))
    if not tagged:
        return 1
    exif = b""
    xmp = b""
    for _, begin, end in tagged:
        segment = bytes(data[begin:end])
        if segment.startswith(_EXIF):
            exif += segment[len(_EXIF) :]
        elif segment.startswith(_XMP):
            xmp = segment
    value = _tagged_orientation(exif)
    if value is None and (tag := _XMP_ORIENTATION.search(xmp)):
        value = int(tag[1])
    return value if value is not None and 1 <= value <= 8 else 1


def may_be_cut_off(data: bytes) -> bool:
    """Return whether a JPEG, PNG, GIF or BMP lacks its end; only a decoder knows whether that does harm.

    The end of a JPEG counts behind its frame, for a small picture in its EXIF has one, too; what follows, such as the
    video of a motion photo, does not matter.
    """
    if data.startswith(b"\xff\xd8"):
        frames = _segments(data, _FRAMES)
        return data.rfind(b"\xff\xd9") < (frames[0][2] if frames else 0)
    if data.startswith(b"BM"):
        return int.from_bytes(data[2:6], "little") > len(data)
    return (data.startswith(b"\x89PNG") and b"IEND" not in data[-_READ:]) or (
        data.startswith(b"GIF8") and not data.endswith(b";")
    )


def loaded_size(image: Any) -> tuple[int, int]:
    """Return width and height of an opened Pillow image as they are once it is loaded.

    Pillow then turns a TIFF, but has looked only at its tag before, not at its XMP.
    """
    is_told = image.format != "TIFF" or ORIENTATION in image.tag_v2
    on_its_side = not is_told and image.getexif().get(ORIENTATION) in ON_ITS_SIDE
    size: tuple[int, int] = image.size
    return size[::-1] if on_its_side else size


def jpeg_profile(data: bytes | bytearray | memoryview) -> bytes:
    """Return the beginning of the colour profile in a JPEG; empty: it has none."""
    segments = (bytes(data[begin:end]) for _, begin, end in _segments(data, (_APP2,)))
    return next((one[len(_ICC) + 2 :] for one in segments if one.startswith(_ICC)), b"")


def _segments(data: bytes | bytearray | memoryview, markers: Collection[int]) -> list[tuple[int, int, int]]:
    """Return marker, begin and end of the content of the segments with some markers, up to the first scan.

    Every image that is decoded comes by here: it takes 2 microseconds.
    """
    found = []
    at = 2
    last = len(data) - 4
    while at <= last and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # filling
            at += 1
            continue
        if marker in _ENDS:
            break
        after = at + 2 + (data[at + 2] << 8 | data[at + 3])
        if marker in markers:
            found.append((marker, at + 4, after))
        at = after
    return found


def _tagged_orientation(exif: bytes) -> int | None:
    """Return the value in the first directory of EXIF data: entries of 12 bytes, which begin with their tag.

    None: there is no such entry; 0: it is not a whole number.
    """
    found = None
    order = "<" if exif.startswith(b"II") else ">"
    if exif[:4] not in (b"II*\0", b"MM\0*"):
        return None
    try:
        (directory,) = struct.unpack_from(order + "I", exif, 4)
        (entries,) = struct.unpack_from(order + "H", exif, directory)
        for place in range(directory + 2, directory + 2 + 12 * entries, 12):
            tag, kind, count = struct.unpack_from(order + "HHI", exif, place)
            if tag == ORIENTATION:
                found = _first_number(exif, place + 8, order + _WHOLE[kind], count) if kind in _WHOLE and count else 0
    except struct.error:  # cut off
        pass
    return found


def _first_number(exif: bytes, at: int, form: str, count: int) -> int:
    """Return the first of the numbers of an entry, which lie elsewhere if they take more than four bytes."""
    size = count * struct.calcsize(form)
    if size > 4:
        (at,) = struct.unpack_from(form[0] + "I", exif, at)
    return int(struct.unpack_from(form, exif, at)[0]) if at + size <= len(exif) else 0
