"""What headers and packets say of a file: sizes, lengths, rates, and how many frames and samples it has.

Sizes, lengths, frame and sample counts come from the headers if possible. A length is that of the stream itself,
wherever it starts on the time axis. What is not in a header is found by walking the packets; only the samples of
compressed sound, and the frames of videos that `whole` reads, must be counted by decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from energon_bridge.core.errors import DecodeError
from energon_bridge.core.format.media import AVMetadata
from energon_bridge.models.av.headers import is_counted_otherwise
from energon_bridge.models.av.media_file import (
    MediaFile,
    has_all_packets,
    is_bare,
    is_estimate,
    length_of,
    links_of,
    own_length,
    rate_of,
    start_of,
    ticks,
)
from energon_bridge.models.av.sound import BARE_FORMATS, BROADCASTS, AudioReader
from energon_bridge.models.av.streams import FrameReader

_EXACT_DURATIONS = ("pcm_", "flac", "alac", "wavpack")
"""Codecs whose packets have exactly the duration of their samples."""
_BROADCAST_SECONDS = 1
"""How much of a broadcast's end is read: after a seek, times are wrong up to the next packet that has one."""
_ROUNDED_FRAMES = Fraction(1, 4)
"""By how much a frame the times of a file may be rounded."""
_CUT_OFF_SECONDS = Fraction(1, 2)
"""If the headers claim this much more than any stream has, the file is cut off."""


def claimed_rate(media: MediaFile) -> Fraction | None:
    """Return the frames a second by the header: the mean in MP4, elsewhere often that of the shortest frames."""
    stream = media.stream("video")
    return rate_of(stream) or stream.guessed_rate or None


def _mean_rate(media: MediaFile, reader: Callable[[], FrameReader]) -> float | None:
    """Return the frames a second of the video: in MP4 by its index, else by its header if all frames agree with it."""
    claimed = claimed_rate(media)
    stream = media.stream("video")
    is_unlike = is_counted_otherwise(stream)
    if claimed and "mp4" in media.container.format.name and stream.frames and not is_unlike:
        return float(claimed)
    frames = reader().count
    length = (known_length(media, stream) if is_unlike else None) or reader().length()
    if not length or (claimed and not is_unlike and abs(frames - length * claimed) <= _ROUNDED_FRAMES):
        return float(claimed) if claimed else None
    return float(frames / length)


def known_length(media: MediaFile, stream: Any) -> Fraction | None:
    """Return the duration of a stream in seconds; None if headers do not tell any.

    A duration that the headers give for the whole file is that of its longest stream. So the last packets are read, or
    all, of sound without a header; readers and streams of the file are invalid afterwards.

    Raises DecodeError if a sound is cut off.
    """
    claimed = length_of(media, stream)
    start = start_of(stream)
    index = stream.index
    form = media.container.format.name
    if media.video is None:
        media.check_end()
    # Times of joined broadcasts begin again.
    if media.is_endless or is_bare(stream) or (form in BROADCASTS and stream.type == "video"):
        return None
    if is_estimate(media):
        return _length_of_packets(media, index)
    if stream.type == "audio" and (form in BARE_FORMATS or _is_unsaid(stream) or len(links_of(media)) > 1):
        return None
    is_unlike = stream.type == "video" and is_counted_otherwise(stream)
    if claimed is None or (own_length(stream) is not None and not is_unlike and not _is_vague(stream)):
        return claimed
    # Some containers count the duration from their start, others from 0.
    least = min(claimed, claimed + start) - _CUT_OFF_SECONDS
    others = [one.index for one in (media.video, media.audio) if one is not None and one.index != index]
    end = _end_of(media, index, claimed)
    if is_unlike and has_all_packets(media):
        return end - start
    if end < least and all(_end_of(media, one, claimed) < least for one in others):
        return claimed
    return end - start


def _is_unsaid(stream: Any) -> bool:
    """Whether the duration of a sound is not in its header, or FFmpeg does not read it from there.

    So it is with compressed CAF and WAV: FFmpeg takes the last packet for a full one, or goes by the rate of bytes.
    """
    is_compressed = stream.container.format.name in ("caf", "wav") and not stream.codec_context.name.startswith("pcm_")
    return is_compressed or stream.duration == 0


def _is_vague(stream: Any) -> bool:
    """Whether a stream's duration is imprecise: broadcasts leave out the last packets, WMV gives the whole file's."""
    form = stream.container.format.name
    return form in (*BROADCASTS, "asf") or (form == "avi" and stream.type == "audio")


def _length_of_packets(media: MediaFile, index: int) -> Fraction:
    media.is_moved = True
    media.rewind()
    stream = media.container.streams[index]
    media.only(stream)
    with media.refusing("cannot be read"):
        return Fraction(sum(packet.duration or 0 for packet in media.container.demux(stream)) * stream.time_base)


def _end_of(media: MediaFile, index: int, claimed: Fraction) -> Fraction:
    """Return when the last packet of a stream ends, in seconds, from the last packets of the file."""
    media.is_moved = True
    for seeks in (True, False):
        if not seeks:
            media.rewind()
        stream = media.container.streams[index]
        media.only(stream)
        base = stream.time_base
        rate = rate_of(stream) if stream.type == "video" else None
        usual = round(1 / rate / base) if rate else 0
        end = None
        aim = start_of(stream) + claimed - (_BROADCAST_SECONDS if _is_vague(stream) else 0)
        with media.refusing("cannot be read"):
            try:
                if seeks:
                    media.container.seek(int(aim / base), stream=stream, backward=True)
            except OSError:
                continue
            for packet in media.container.demux(stream):
                if packet.size and packet.pts is not None and not packet.is_discard:
                    end = max(end or 0, packet.pts + (packet.duration or usual))
        if end is not None:
            return Fraction(end * base)
    return Fraction(0)


def end_of_frames(media: MediaFile, reader: Callable[[], FrameReader]) -> float | None:
    """Return when the last frame of a video ends, by its mean duration; None if the file may be cut off."""
    stream = media.stream("video")
    end = start_of(stream) + (length_of(media, stream) or 0)
    frame = 1 / (rate_of(stream) or 1)
    if not has_all_packets(media):
        return None
    last = reader().frame_at(ticks(end, reader().base))
    return None if last is None else float(last * reader().base + frame)


def video_metadata(
    media: MediaFile,
    reader: Callable[[], FrameReader],
    *,
    duration: bool = True,
    frame_count: bool = True,
    frame_size: bool = True,
    rate: bool = True,
) -> AVMetadata:
    """Return the requested metadata of the video; asks its reader only for what is not in a header."""
    width, height = _size_of(media) if frame_size else (None, None)
    if frame_size and not (width and height):
        raise DecodeError(f"{media.name} has video without a size in its headers: is it cut off?")
    # The length comes last: what reads all packets would have to open the file again after the seeks for it.
    frames = reader().count if frame_count else None
    fps = _mean_rate(media, reader) if rate else None
    seconds = known_length(media, media.stream("video")) if duration else None
    if duration and seconds is None:
        seconds = reader().length()
    return AVMetadata(
        video_duration=None if seconds is None else float(seconds),
        video_num_frames=frames,
        video_fps=fps,
        video_width=width,
        video_height=height,
    )


def _size_of(media: MediaFile) -> tuple[int, int]:
    """Return the size of the first frame: FFmpeg knows it from there, but of VP8, for which it takes the container's.

    Its frame begins with a tag of three bytes, a mark of three, and the size in 14 bits each (RFC 6386, 9.1).
    """
    context = media.stream("video").codec_context
    if context.codec.canonical_name == "vp8":
        data = _first_packet(media)
        if data[3:6] == b"\x9d\x01\x2a" and len(data) >= 10:
            return int.from_bytes(data[6:8], "little") & 0x3FFF, int.from_bytes(data[8:10], "little") & 0x3FFF
    return context.width, context.height


def _first_packet(media: MediaFile) -> bytes:
    media.is_moved = True
    media.rewind()
    stream = media.stream("video")
    media.only(stream)
    with media.refusing("cannot be read"):
        return next((bytes(packet) for packet in media.container.demux(stream) if packet.size), b"")


def audio_metadata(media: MediaFile, *, duration: bool = True, num_samples: bool = False) -> AVMetadata:
    """Return the requested metadata of the sound."""
    stream = media.stream("audio")
    context = stream.codec_context
    rate = context.sample_rate
    channels = context.channels
    counted = stream.time_base * rate <= 1 and context.name.startswith(_EXACT_DURATIONS)
    seconds = known_length(media, stream) if duration or num_samples else None
    count = None
    if num_samples or (duration and seconds is None):
        if seconds is not None and counted:
            count = round(seconds * rate)
            if num_samples and media.container.format.name == "flac":  # its header counts samples, but no bytes
                there = _length_of_packets(media, stream.index)
                if there < seconds - _CUT_OFF_SECONDS:
                    raise media.cut_off(f"{float(there):.2f} of {float(seconds):.2f} s")
        else:
            count = AudioReader(media).count()
            seconds = Fraction(count, rate) if seconds is None or num_samples else seconds
    return AVMetadata(
        audio_duration=float(seconds) if duration and seconds is not None else None,
        audio_channels=channels,
        audio_sample_rate=rate,
        audio_num_samples=count if num_samples else None,
    )
