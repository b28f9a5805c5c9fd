"""What headers say of frames without decoding: whether packets tell the frames of a video, and which are hidden.

Sources: RFC 6386, 9.1 (VP8); VP9 bitstream specification, 6.2 and annex B; AV1 bitstream specification, 5.3 to 5.9;
ITU-T H.264, 7.3.2.1.1, and ISO/IEC 14496-15, 5.3.3 (its place in MP4, Matroska and FLV).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from energon_bridge.models.av.media_file import MediaFile

_PACKET_PER_FRAME = ("h264", "hevc", "vp8", "vp9", "av1", "ffv1", "png")
"""Codecs with a packet for each frame, known decoding times and exact seeks; so have those with key frames alone."""


def tells_frames(media: MediaFile) -> bool:
    """Return whether the packets of a video tell its frames: their number, their times and where they can be decoded.

    Other videos must be decoded from their beginning: VVC, whose decoding times Matroska does not give; MPEG-4 with
    empty or double packets; MPEG-1 and -2, whose frames may lack times; H.264 with fields, each in a packet of its own;
    several edits of an MP4; AVI, which has no presentation times; containers of broadcasts.
    """
    stream = media.stream("video")
    form = media.container.format.name
    codec = stream.codec_context.codec
    if "avi" in form:
        return bool(codec.intra_only)
    if not ("mp4" in form or "matroska" in form or form == "flv"):
        return False
    if codec.canonical_name == "h264":
        return not _may_have_fields(stream.codec_context.extradata or b"") and _has_one_edit(media, stream)
    return bool(codec.intra_only or codec.canonical_name in _PACKET_PER_FRAME) and _has_one_edit(media, stream)


def _has_one_edit(media: MediaFile, stream: Any) -> bool:
    """Whether the edit list of an MP4 plays its packets once, in order, leaving some out at the ends at most."""
    entries = stream.index_entries
    if "mp4" not in media.container.format.name or not len(entries):
        return True
    # Each packet once, in the common case: some places tell.
    every = _some_places(entries) if len(entries) == stream.frames else range(len(entries))
    at = -1
    shown = False
    keys = 0
    for number in every:
        entry = entries[number]
        keys += entry.is_keyframe and shown
        shown = shown or not entry.is_discard
        if entry.pos <= at or (entry.is_discard and keys):
            return False
        at = entry.pos
    return True


def is_counted_otherwise(stream: Any) -> bool:
    """Whether rate and length in the header of an MP4 may not be those of the frames that are shown.

    It adds up the distances of frames as they are coded, of those before and behind an edit, too. That is the same if
    all last equally long, or are coded in the order shown, and all are shown.
    """
    if "mp4" not in stream.container.format.name:
        return False
    entries = stream.index_entries
    is_reordered = bool(stream.codec_context.has_b_frames)
    if not stream.frames or len(entries) < 2:  # of fragments, the index tells some
        return is_reordered and not stream.frames
    first, last = entries[0], entries[len(entries) - 1]
    is_edited = len(entries) != stream.frames or first.is_discard or last.is_discard
    if is_edited and (stream.start_time or 0) > 0:
        return True
    step = Fraction(last.timestamp - first.timestamp, len(entries) - 1)
    return (is_reordered or is_edited) and any(
        abs(entries[place].timestamp - first.timestamp - place * step) > 1 for place in _some_places(entries)
    )


def _some_places(entries: Any) -> range:
    return range(0, len(entries), 1 + len(entries) // _MAX_ENTRIES)


_MAX_ENTRIES = 64
"""Entries of an index that are looked at: looking at all would cost more than decoding a frame."""


# Hidden frames --------------------------------------------------------------------------------------------------------


def shows_frame(codec: str) -> Callable[[Any], bool] | None:
    """Return a function that says whether a packet's frame is shown; None: those of all packets of the codec are."""
    return _SHOWS.get(codec)


def _vp8_shows(data: memoryview) -> bool:
    return bool(data[0] >> 4 & 1)  # the bit show_frame, after one of the type and three of the version (RFC 6386, 9.1)


def _vp9_shows(data: memoryview) -> bool:
    for start in _vp9_frames(data):
        first = data[start]
        profile = first >> 5 & 1 | first >> 3 & 2
        after = 2 if profile == 3 else 3  # the bit show_existing_frame; then frame_type and show_frame
        if first >> after & 1 or first >> (after - 2) & 1:
            return True
    return False


def _vp9_frames(data: memoryview) -> Iterator[int]:
    """Yield where the frames of a packet begin: several are a superframe, whose index is at its end (VP9, annex B).

    The index is the mark (bits 110, size of an entry - 1 in two bits, frames - 1 in three), sizes, and the mark again.
    """
    mark = data[-1]
    count = (mark & 7) + 1
    width = (mark >> 3 & 3) + 1
    index = 2 + count * width
    if mark & 0xE0 != 0xC0 or len(data) < index or data[-index] != mark:
        yield 0
        return
    start = 0
    for at in range(len(data) - index + 1, len(data) - 1, width):
        size = int.from_bytes(data[at : at + width], "little")
        if size and start < len(data):
            yield start
        start += size


_SEQUENCE, _FRAME_HEADER, _FRAME = 1, 3, 6
"""Types of units (OBUs) of AV1."""


def _av1_shows(data: memoryview) -> bool:
    at = 0
    while at < len(data):
        header = data[at]
        at += 1
        kind = header >> 3 & 15
        at += header >> 2 & 1
        size = len(data) - at
        if header >> 1 & 1:
            size = shift = 0
            while at < len(data):
                byte = data[at]
                at += 1
                size |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    break
        if size and at < len(data):
            first = data[at]
            if kind == _SEQUENCE and first >> 3 & 1:  # reduced_still_picture_header
                return True
            if kind in (_FRAME_HEADER, _FRAME) and (first >> 7 or first >> 4 & 1):  # show_existing_frame, show_frame
                return True
        at += size
    return False


_SHOWS: Mapping[str, Callable[[memoryview], bool]] = {"vp8": _vp8_shows, "vp9": _vp9_shows, "av1": _av1_shows}


# Fields ---------------------------------------------------------------------------------------------------------------

_HIGH_PROFILES = (100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135)
"""Profiles of H.264 whose parameter sets contain the chroma format, and perhaps scaling lists (7.3.2.1.1)."""


def _may_have_fields(extradata: bytes) -> bool:
    """Whether the first sequence parameter set of H.264 allows fields (frame_mbs_only_flag 0), or is not there."""
    # As MP4 has them (avcC, ISO/IEC 14496-15): a count in five bits, then each with its length; else by start codes.
    if extradata[:1] == b"\1" and len(extradata) > 8 and extradata[5] & 31:
        unit = extradata[8 : 8 + int.from_bytes(extradata[6:8], "big")]
    else:
        units = (unit for unit in extradata.split(b"\0\0\1") if unit and unit[0] & 31 == 7)
        unit = next(units, b"")
    try:
        # Without the bytes 3 that keep start codes out of the data (emulation prevention, H.264 7.4.1).
        return not _frames_alone(_Bits(unit[1:].replace(b"\0\0\3", b"\0\0")))
    except IndexError:
        return True


class _Bits:
    """Reads bits, and numbers in Exp-Golomb codes (H.264, 9.1)."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int = 1) -> int:
        """Return the next bits as a number; raises IndexError at the end."""
        value = 0
        for at in range(self._at, self._at + count):
            value = value << 1 | self._data[at >> 3] >> (7 - (at & 7)) & 1
        self._at += count
        return value

    def unsigned(self) -> int:
        """Return the next unsigned number: n zeros, a one, and n bits, less one."""
        zeros = 0
        while not self.take():
            zeros += 1
        return (1 << zeros) - 1 + self.take(zeros)

    def signed(self) -> int:
        """Return the next signed number: 0, 1, -1, 2, -2, ... for the unsigned 0, 1, 2, 3, 4, ..."""
        value = self.unsigned()
        return (value + 1) // 2 if value & 1 else -(value // 2)


def _frames_alone(bits: _Bits) -> int:
    profile = bits.take(24) >> 16
    bits.unsigned()
    if profile in _HIGH_PROFILES:
        chroma = bits.unsigned()
        if chroma == 3:
            bits.take()
        bits.unsigned()
        bits.unsigned()
        bits.take()
        if bits.take():
            for number in range(12 if chroma == 3 else 8):
                _skip_scaling_list(bits, 16 if number < 6 else 64)
    bits.unsigned()
    order = bits.unsigned()
    if order == 0:
        bits.unsigned()
    elif order == 1:
        bits.take()
        bits.signed()
        bits.signed()
        for _ in range(bits.unsigned()):
            bits.signed()
    bits.unsigned()
    bits.take()
    bits.unsigned()
    bits.unsigned()
    return bits.take()


def _skip_scaling_list(bits: _Bits, size: int) -> None:
    if not bits.take():
        return
    last = following = 8
    for _ in range(size):
        if following:
            following = (last + bits.signed()) % 256
        last = following or last
