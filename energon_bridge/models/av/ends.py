"""Where files should end by their headers: claimed sizes, the last page of an Ogg, the files that it is a chain of.

FFmpeg reads what is there: without a look here, a file that is cut off is a shorter sound. Sizes that say "unknown", as
programs write them that cannot go back to the header (into a pipe), claim nothing. Where FFmpeg takes them for sizes,
it is given a view of the file whose header tells the true one (`with_size`).

Sources: RIFF and RF64 (EBU Tech 3306), Sony Wave64, AIFF-C, CAF and QuickTime (Apple), ISO/IEC 14496-12, 4.2 (MP4), RFC
8794, 4 (Matroska), RFC 3533, 6 (Ogg), ASF 3.2 (WMA), FLV 10.1 annex E.5, Xing's header of MP3 as LAME writes it.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import BinaryIO

_MOST_PAGE = 27 + 255 + 255 * 255
"""Bytes of the largest page of Ogg."""
_FIRST_PAGE, _LAST_PAGE = 2, 4
"""Flags of a page: it begins a stream, it ends one."""


@contextmanager
def kept_place(file: BinaryIO) -> Iterator[int]:
    """Yield the size of a file, and leave it at the position at which it was: its container reads on from there."""
    here = file.tell()
    try:
        yield file.seek(0, io.SEEK_END)
    finally:
        file.seek(here)


def what_is_there(file: BinaryIO, form: str) -> str | None:
    """Return how much of a cut-off file is there, as text; None if it is whole, or if its headers claim no size.

    `form` is FFmpeg's name of the format. The position in the file is restored.
    """
    with kept_place(file) as size:
        try:
            end = next((read(file, size) for name, read in _READERS.items() if name in form.split(",")), None)
        except struct.error:  # the header itself is cut off
            end = size + 1
    if end is None or end <= size:
        return None
    return f"{size} bytes, but not its last page" if form == "ogg" else f"{size} of {end} bytes"


def _unpack(file: BinaryIO, at: int, form: str) -> tuple[int, ...]:
    file.seek(at)
    return struct.unpack(form, file.read(struct.calcsize(form)))


def _is_unknown(length: int) -> bool:
    """Whether a length of 32 bits means "until the end": 0, or near the largest signed or unsigned number.

    sox writes 0x7F000000 samples' bytes into an AIFF, and into a WAV 0x7FFFF000 rounded down to whole samples.
    """
    return length == 0 or 0x7F000000 <= length <= 0x80000000 or length >= 0xFFFFF000


def with_size(file: BinaryIO) -> BinaryIO:
    """Return the file; if its header says "size unknown", a view of it whose header has the true size.

    Only AIFF, Wave64 and RF64 need that: FFmpeg reads their 0 as no sound at all, or does not open the file.
    """
    patches: dict[int, bytes] = {}
    with kept_place(file) as size, suppress(struct.error):  # the header itself may be cut off
        patches = _true_sizes(file, size)
    return _PatchedFile(file, patches) if patches else file  # type: ignore[return-value]


def _true_sizes(file: BinaryIO, size: int) -> dict[int, bytes]:
    """Return the bytes to write into the header, by offset; empty if the sizes in it are usable."""
    kind = _read(file, 0, 4)
    if kind == b"FORM" and (at := _chunk(file, size, b"SSND", ">4sI")):
        (length,) = _unpack(file, at + 4, ">I")
        if length <= 8 or _is_unknown(length):  # 8: the chunk's own header, and no sound
            return {4: struct.pack(">I", size - 8), at + 4: struct.pack(">I", size - at - 8)}
    elif kind == b"riff" and (at := _data_of_wave64(file, size)):
        (length,) = _unpack(file, at + 16, "<Q")
        if not 24 < length < 1 << 62:
            return {at + 16: struct.pack("<Q", size - at)}
    elif kind == b"RF64" and (at := _chunk(file, size, b"data", "<4sI")):
        head = _chunk(file, size, b"ds64", "<4sI")
        (length,) = _unpack(file, head + 16, "<Q")
        if head and not 0 < length < 1 << 62:
            return {head + 16: struct.pack("<Q", size - at - 8)}
    return {}


class _PatchedFile(io.RawIOBase):
    """A file, read-only, whose bytes at some offsets are replaced by others when read."""

    def __init__(self, file: BinaryIO, patches: dict[int, bytes]) -> None:
        self._file = file
        self._patches = patches

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def read(self, size: int = -1) -> bytes:
        begin = self._file.tell()
        data = self._file.read(size)
        for at, content in self._patches.items():
            low = max(begin, at)
            high = min(begin + len(data), at + len(content))
            if low < high:
                data = data[: low - begin] + content[low - at : high - at] + data[high - begin :]
        return data


def _chunks(
    file: BinaryIO, size: int, at: int, form: str, whole: Callable[[int], int]
) -> Iterator[tuple[int, bytes, int]]:
    """Yield offset, name and claimed length of each chunk from an offset on.

    `form` is that of a chunk's header, and `whole` makes of the length the bytes from one header to the next.
    """
    head = struct.calcsize(form)
    while at + head <= size:
        name, length = struct.unpack(form, _read(file, at, head))
        yield at, name, length
        at += whole(length)


def _even(length: int) -> int:
    """Return the bytes of a chunk of RIFF or AIFF with its header; they are padded to an even length."""
    return 8 + length + length % 2


def _chunk(file: BinaryIO, size: int, wanted: bytes, form: str) -> int:
    """Return the offset of the first chunk of that name in RIFF or AIFF, whose own header has 12 bytes; 0: none."""
    return next((at for at, name, _ in _chunks(file, size, 12, form, _even) if name == wanted), 0)


def _data_of_wave64(file: BinaryIO, size: int) -> int:
    chunks = _chunks(file, size, 40, "<16sQ", lambda length: max(24, -(-length // 8) * 8))
    return next((at for at, name, _ in chunks if name.startswith(b"data")), 0)


def _end_of_wave(file: BinaryIO, size: int) -> int | None:
    order = ">" if _read(file, 0, 4) == b"RIFX" else "<"
    large = 0
    for at, name, length in _chunks(file, size, 12, order + "4sI", _even):
        if name == b"ds64":
            (large,) = _unpack(file, at + 16, "<Q")
        if name == b"data":
            length = large if large and length == 0xFFFFFFFF else 0 if _is_unknown(length) else length
            # Some programs write the size of the file here, with or without its own eight bytes.
            return at + 8 + length if length not in (0, size, size - 8) else None
    return None


def _end_of_wave64(file: BinaryIO, size: int) -> int | None:
    if not (at := _data_of_wave64(file, size)):
        return None
    (length,) = _unpack(file, at + 16, "<Q")
    return at + length if 24 < length < 1 << 62 else None


def _end_of_aiff(file: BinaryIO, size: int) -> int | None:
    if not (at := _chunk(file, size, b"SSND", ">4sI")):
        return None
    (length,) = _unpack(file, at + 4, ">I")
    return None if _is_unknown(length) else at + 8 + length


def _end_of_caf(file: BinaryIO, size: int) -> int | None:
    chunks = _chunks(file, size, 8, ">4sq", lambda length: 12 + max(0, length))
    ends = (None if length < 0 else at + 12 + length for at, name, length in chunks if name == b"data")
    return next(ends, None)


def _end_of_au(file: BinaryIO, size: int) -> int | None:
    begin, length = _unpack(file, 4, ">II")
    return None if _is_unknown(length) else begin + length


def _end_of_avi(file: BinaryIO, size: int) -> int | None:
    (length,) = _unpack(file, 4, "<I")
    return None if _is_unknown(length) else length  # some programs count these eight bytes, too


_LAST_BOXES = (b"moov", b"moof", b"mdat", b"mfra")
"""Boxes of MP4 that lie at the end of files: the index, samples, and what finds fragments."""


def _end_of_boxes(file: BinaryIO, size: int) -> int | None:
    at = 0
    while at + 8 <= size:
        length, name = struct.unpack(">I4s", _read(file, at, 8))
        if length == 1:
            (length,) = _unpack(file, at + 8, ">Q")
        if length < 8:  # 0: up to the end
            return None
        if at + length > size and name not in _LAST_BOXES:  # cameras and editors append data of their own
            return None
        at += length
    rest = _read(file, at, 8) if at < size else b""
    is_header = len(rest) > 4 and any(name.startswith(rest[4:]) for name in _LAST_BOXES)  # the cut goes through it
    return at + 8 if is_header else at


def _end_of_matroska(file: BinaryIO, size: int) -> int | None:
    at = 0
    for name in (b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"):
        if _read(file, at, 4) != name:
            return None
        (first,) = _unpack(file, at + 4, "B")
        width = 9 - first.bit_length()  # leading zero bits give the width of the size (RFC 8794, 4); all ones: unknown
        if not first:
            return None
        length = int.from_bytes(_read(file, at + 4, width), "big") & ((1 << 7 * width) - 1)
        if length == (1 << 7 * width) - 1:
            return None
        at += 4 + width + length
    return at


def _end_of_asf(file: BinaryIO, size: int) -> int | None:
    head = _read(file, 0, 1 << 13)
    at = head.find(bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365"))  # the properties of the file
    if at < 0 or len(head) < at + 92:
        return None
    (length,), (flags,) = struct.unpack_from("<Q", head, at + 40), struct.unpack_from("<I", head, at + 88)
    return None if flags & 1 or not length else length  # 1: it is a broadcast


def _end_of_flv(file: BinaryIO, size: int) -> int | None:
    head = _read(file, 0, 1 << 13)
    at = head.find(b"\0\x08filesize\0")  # a property of onMetaData, a double
    if at < 0 or len(head) < at + 19:
        return None
    (length,) = struct.unpack_from(">d", head, at + 11)
    return int(length) if 0 < length < 1 << 62 else None


def _end_of_mp3(file: BinaryIO, size: int) -> int | None:
    begin = size_of_id3(file)
    head = _read(file, begin, 64)
    at = max(head.find(b"Xing"), head.find(b"Info"))
    if at < 0 or len(head) < at + 16:
        return None
    flags, _, length = struct.unpack_from(">III", head, at + 4)
    return length if flags & 3 == 3 and length else None  # some programs count the tag before it, too


def size_of_id3(file: BinaryIO) -> int:
    """Return the bytes of an ID3v2 tag at the beginning: a header of 10, and a size in 4 times 7 bits; 0: no tag."""
    tag = _read(file, 0, 10)
    return 10 + sum(byte << 7 * (3 - n) for n, byte in enumerate(tag[6:])) if tag[:3] == b"ID3" else 0


def _end_of_ogg(file: BinaryIO, size: int) -> int | None:
    begin = max(0, size - 2 * _MOST_PAGE)
    pages = list(_pages(_read(file, begin, size - begin)))
    if not pages:
        return size + 1
    at, flags, _, length = pages[-1]
    is_whole = flags & _LAST_PAGE and begin + at + length <= size
    return None if is_whole else size + 1


def _read(file: BinaryIO, at: int, length: int) -> bytes:
    file.seek(at)
    return file.read(length)


_READERS: dict[str, Callable[[BinaryIO, int], int | None]] = {
    "wav": _end_of_wave,
    "w64": _end_of_wave64,
    "aiff": _end_of_aiff,
    "caf": _end_of_caf,
    "au": _end_of_au,
    "avi": _end_of_avi,
    "mp4": _end_of_boxes,
    "matroska": _end_of_matroska,
    "asf": _end_of_asf,
    "flv": _end_of_flv,
    "ogg": _end_of_ogg,
    "mp3": _end_of_mp3,
}


# Pages of Ogg ---------------------------------------------------------------------------------------------------------
#
# 27 bytes (mark, version, flags, time, serial number of its stream, …, number of segments), sizes of segments, those.


def _pages(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yield place, flags, serial number and size of each page in a piece of an Ogg."""
    at = data.find(b"OggS\0")
    while at >= 0:
        head = data[at : at + 27]
        if len(head) < 27 or len(data) < at + 27 + head[26]:
            yield at, 0, 0, _MOST_PAGE
            return
        size = 27 + head[26] + sum(data[at + 27 : at + 27 + head[26]])
        yield at, head[5], int.from_bytes(head[14:18], "little"), size
        at = data.find(b"OggS\0", at + size)


def chained(file: BinaryIO) -> list[tuple[int, int]]:
    """Return begin and end of the files that an Ogg is a chain of: one after another, each with streams of its own.

    A file that is not in memory is read only if its last page belongs to no stream of its beginning.
    """
    with kept_place(file) as size:
        if size > _SMALL:
            opening = takewhile(lambda page: page[1] & _FIRST_PAGE, _pages(_read(file, 0, 2 * _MOST_PAGE)))
            first = {serial for _, _, serial, _ in opening}
            last = [serial for _, _, serial, _ in _pages(_read(file, max(0, size - 2 * _MOST_PAGE), size))]
            if not last or last[-1] in first:
                return [(0, size)]
        begins: list[int] = []
        was_first = False
        for at, flags, _, _ in _pages(_read(file, 0, size)):
            is_first = bool(flags & _FIRST_PAGE)
            if is_first and not was_first:
                begins.append(at)
            was_first = is_first
    return list(zip(begins, [*begins[1:], size], strict=True)) if begins else [(0, size)]


_SMALL = 4 << 20
"""Bytes of a file that is read whole to find its links."""
