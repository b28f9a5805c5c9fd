"""When the frames of a Matroska or WebM video are shown, read from the headers of its blocks.

Matroska has no index of frames, so their numbers follow from the blocks of the whole file up to them. libav hands out
every block as a packet; here only headers are read, in a fifth of the time, and large blocks are skipped. What is not
plain (laced or encoded blocks, scaled tracks, several videos) raises UnlikeError, and libav reads the packets.

Sources: RFC 8794 (EBML: identifiers and sizes) and RFC 9559 (Matroska: 5.1 elements, 10.1 and 10.2 blocks).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import BinaryIO

_CHUNK = 128 << 10
_MOST_HEADER = 32
"""Bytes that no header of an element, with that of a block, exceeds."""
_MOST_HEAD = 1 << 20
"""Bytes of the description of all tracks that are read at most."""

_WIDTHS = bytes([9]) + bytes(9 - first.bit_length() for first in range(1, 256))
"""Bytes of a number by its first one: its leading zero bits give the width (RFC 8794, 4)."""
_MASKS = tuple((1 << 7 * width) - 1 for width in range(9))
_EBML, _SEGMENT, _INFO, _TRACKS, _CLUSTER = 0x1A45DFA3, 0x18538067, 0x1549A966, 0x1654AE6B, 0x1F43B675
_TIMESTAMP, _SIMPLE_BLOCK, _BLOCK_GROUP, _BLOCK, _ENCRYPTED = 0xE7, 0xA3, 0xA0, 0xA1, 0xAF
_TIMESTAMP_SCALE = 0x2AD7B1
_TRACK, _NUMBER, _TYPE, _CODEC = 0xAE, 0xD7, 0x83, 0x86
_CHANGES: dict[int, tuple[bytes, ...]] = {
    **dict.fromkeys((0x6D80, 0xE2), ()),
    **dict.fromkeys((0x56AA, 0x537F), (b"",)),
    0x23314F: (b"\x3f\x80", b"\x3f\xf0"),
}
"""Elements of a track that change its blocks or their times, and the values that do not, without zeros at their end:
encodings, parts of other tracks; delay, offset; scale (a float, 1)."""
_VIDEO = 1
_CODECS = (b"V_MPEG4/ISO/AVC", b"V_MPEGH/ISO/HEVC", b"V_VP8", b"V_VP9", b"V_AV1")
_LACED = 0x06


class UnlikeError(Exception):
    """The file is not as simple as is read here. Never reaches users."""


def block_times(file: BinaryIO, base: Fraction, shows: Callable[[memoryview], bool] | None) -> Iterator[list[int]]:
    """Yield the times (ticks) of the video's frames in the order of their blocks, some at a time.

    Args:
        file: Its position is kept, since a container reads on from there.
        base: Seconds of a tick, as libav has it.
        shows: Whether the data of a block shows a frame; None: all do.

    Raises:
        UnlikeError: There is something else than plain blocks of one video.
    """
    try:
        yield from _times(file, base, shows)
    except IndexError:  # of a number longer than any, or a file that ends within a header
        raise UnlikeError from None


def _times(file: BinaryIO, base: Fraction, shows: Callable[[memoryview], bool] | None) -> Iterator[list[int]]:
    here = file.tell()
    size = file.seek(0, io.SEEK_END)
    file.seek(here)
    track, start = _video_track(file, size, base)
    clock: int | None = None
    times: list[int] = []
    data = b""  # of the file, from `start` on
    at = end = 0  # where the next element begins in it, and its length
    while start + at < size:
        if at + _MOST_HEADER > end and start + end < size:
            yield times
            start += at
            data = _read(file, start, _CHUNK)
            times = []
            at = 0
            end = len(data)
            if end < min(_MOST_HEADER, size - start):
                raise UnlikeError
        first = data[at]
        if first in (_SIMPLE_BLOCK, _BLOCK):
            body = at + 1 + _WIDTHS[data[at + 1]]
            length = int.from_bytes(data[at + 1 : body], "big") & _MASKS[body - at - 1]
            if data[body] == track:
                time = -1 if clock is None else clock + ((data[body + 1] << 8 | data[body + 2]) ^ 0x8000) - 0x8000
                if time < 0 or data[body + 3] & _LACED:
                    raise UnlikeError
                if shows is None or shows(memoryview(_part(file, start, data, body + 4, body + length))):
                    times.append(time)
            elif data[body] < 0x80:  # the number of the track takes more bytes
                raise UnlikeError
            at = body + length
            continue
        name, at, rest = _header(data, at)
        if name in (_CLUSTER, _BLOCK_GROUP):  # whose elements follow
            clock = None if name == _CLUSTER else clock
            continue
        if name in (_EBML, _SEGMENT, _ENCRYPTED) or rest is None:
            raise UnlikeError
        if name == _TIMESTAMP:
            clock = int.from_bytes(data[at : at + rest], "big")
        at += rest
    if start + at != size:
        raise UnlikeError
    yield times


def _video_track(file: BinaryIO, size: int, base: Fraction) -> tuple[int, int]:
    """Return the number of the only video, as blocks begin with it, and where the first cluster begins."""
    at = 0
    scale = 1_000_000
    numbers: list[int] = []
    while at < size:
        name, body, length = _header(_read(file, at, _MOST_HEADER), 0)
        if name == _CLUSTER:
            if len(numbers) != 1 or not 0 < numbers[0] < 0x7F or Fraction(scale, 10**9) != base:
                break
            return 0x80 | numbers[0], at
        at += body
        if name == _SEGMENT and length in (None, size - at):
            continue
        if length is None or name == _SEGMENT:  # it is cut off, or something follows it
            break
        if name in (_INFO, _TRACKS):
            if length > _MOST_HEAD:
                break
            elements = list(_elements(_read(file, at, length)))
            scale = next((_number(value) for key, value in elements if key == _TIMESTAMP_SCALE), scale)
            tracks = (dict(_elements(value)) for key, value in elements if key == _TRACK)
            numbers += [_plain_number(track) for track in tracks if _number(track.get(_TYPE, b"")) == _VIDEO]
        at += length
    raise UnlikeError


def _plain_number(track: dict[int, bytes]) -> int:
    changes = any(track[key].rstrip(b"\0") not in _CHANGES[key] for key in track.keys() & _CHANGES)
    if changes or track.get(_CODEC, b"").rstrip(b"\0") not in _CODECS:
        raise UnlikeError
    return _number(track.get(_NUMBER, b""))


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the elements in the data of another one."""
    at = 0
    while at < len(data):
        name, body, length = _header(data, at)
        if length is None or body + length > len(data):
            raise UnlikeError
        yield name, data[body : body + length]
        at = body + length


def _header(data: bytes, at: int) -> tuple[int, int, int | None]:
    """Return the identifier of an element, where its data begins, and its length, None if that is unknown."""
    behind = at + _WIDTHS[data[at]]
    body = behind + _WIDTHS[data[behind]]
    mask = _MASKS[body - behind]
    if behind - at > 4 or body > len(data):
        raise UnlikeError
    length = int.from_bytes(data[behind:body], "big") & mask
    return int.from_bytes(data[at:behind], "big"), body, None if length == mask else length


def _part(file: BinaryIO, start: int, data: bytes, begin: int, end: int) -> bytes:
    """Return bytes of a file by their places in data that begins at `start`, read again if it ends before."""
    return data[begin:end] if end <= len(data) else _read(file, start + begin, end - begin)


def _number(data: bytes) -> int:
    return int.from_bytes(data, "big")


def _read(file: BinaryIO, at: int, size: int) -> bytes:
    here = file.tell()
    file.seek(at)
    data = file.read(size)
    file.seek(here)
    return data
