"""A media file while it is open: its container, its streams, and the errors that name it.

Invariant: only `opened` opens a container, and it closes it on exit, even after an error.
Threads are off in every codec: workers are processes, and a decoder thread does not survive a fork.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from fractions import Fraction
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from energon_bridge.core.errors import ConfigurationError, DecodeError, EnergonError
from energon_bridge.core.samples import edataclass
from energon_bridge.models.av.ends import chained, kept_place, size_of_id3, what_is_there, with_size

if TYPE_CHECKING:
    import torch

_LEAST_BUFFER, _MOST_BUFFER = 4 << 10, 32 << 10
"""Bytes read at a time: about a thousandth of a file, since a seek wastes half of what it reads."""
_PCM = (b"\1\0", b"\3\0", b"\xfe\xff")
"""Formats of a WAV with plain samples: integers, floats, and either with the places of its channels."""

_SIZED = (b"FORM", b"riff", b"RF64")
"""How AIFF, Wave64 and RF64 begin."""
_ENDLESS = (bytes(4), b"\xff" * 4)
"""Sizes of an AVI that was written into a pipe; the lengths of its streams are then made up."""


@edataclass
class AVData:
    """Clips of a file: lists of tensors, and for each clip the seconds at which it begins and ends.

    Attributes:
        video_clips: uint8 (frames, channels, height, width), RGB.
        video_timestamps: Begin of the first frame and end of the last one.
        audio_clips: (channels, samples), float32 in [-1, 1] unless the decoder was told otherwise.
        audio_timestamps: Begin and end.
    """

    video_clips: list[torch.Tensor] | None
    video_timestamps: list[tuple[float, float]] | None
    audio_clips: list[torch.Tensor] | None
    audio_timestamps: list[tuple[float, float]] | None


def import_av() -> ModuleType:
    """Return PyAV; raises ConfigurationError, naming the extra, if it is not installed."""
    try:
        import av
    except ImportError as error:
        raise ConfigurationError(
            f"videos and sound need PyAV: pip install 'energon-bridge[video]' ({error})"
        ) from error
    return av


class MediaFile:
    """An open file.

    Attributes:
        name: Name of the file in messages.
        container: PyAV's container.
        video: The stream of moving pictures (no cover art) that is marked as default, or else the first one, or None.
        audio: The stream of sound that is marked as default, or else the first one, or None.
        size: Width and height of the video by its header, (0, 0) if unknown.
        fresh: Whether the container is at its beginning.
        is_moved: Whether packets were read or the file was opened again without its readers, which are invalid then.
        is_pcm_wave: Whether it is known to be a WAV of plain samples.
        is_endless: Whether its header says that its size is unknown, where FFmpeg would take that for a size, or
            lengths beside it for true.
    """

    __slots__ = (
        *("_is_whole", "audio", "container", "file", "fresh"),
        *("is_endless", "is_moved", "is_pcm_wave", "name", "size", "video"),
    )

    def __init__(self, file: BinaryIO, name: str, head: bytes = b"") -> None:
        self.file = with_size(file) if head[:4] in _SIZED else file
        self.is_endless = self.file is not file or (head[:4] + head[8:11] == b"RIFFAVI" and head[4:8] in _ENDLESS)
        self._is_whole = False
        self.is_moved = False
        self.name = name
        self.is_pcm_wave = head[:4] + head[8:16] == b"RIFFWAVEfmt " and head[20:22] in _PCM
        self.open()

    def open(self) -> None:
        """Open the container, or reopen it to read from the beginning. Raises DecodeError."""
        size = self.file.seek(0, io.SEEK_END)
        if not size:
            raise DecodeError(f"{self.name} is empty (0 bytes): copy it again, or leave the sample out")
        self.file.seek(0)
        buffer = min(max(size // 1000, _LEAST_BUFFER), _MOST_BUFFER)
        av = import_av()
        # Titles in odd encodings must not break reading; since PyAV 19 they do not.
        options: dict[str, Any] = {"metadata_errors": "ignore"} if int(av.__version__.partition(".")[0]) < 19 else {}
        if self.is_pcm_wave:  # its header tells all, and libav would read 5 MB of samples to learn more
            options["options"] = {"probesize": str(_LEAST_BUFFER)}
        with self.refusing("cannot be opened as video or sound"):
            self.container: Any = av.open(self.file, mode="r", buffer_size=buffer, **options)
        cover = av.stream.Disposition.attached_pic
        self.video: Any = _chosen([one for one in self.container.streams.video if not one.disposition & cover])
        self.audio: Any = _chosen(self.container.streams.audio)
        for stream in self.container.streams:
            if stream.codec_context is not None:
                stream.codec_context.thread_type = "NONE"
                stream.codec_context.thread_count = 1
        if self.audio is not None and self.audio.codec_context is not None:
            _number_channels(self.audio.codec_context)
        if self.video is None and self.audio is None:
            self.close()
            raise DecodeError(f"{self.name} has neither video nor sound: is it another kind of file?")
        # As the header has it: the codec's is that of the last decoded frame.
        context = None if self.video is None else self.video.codec_context
        self.size = (0, 0) if context is None else (context.width, context.height)
        self.fresh = True

    def check_end(self) -> None:
        """Raise DecodeError if the file ends before its headers say; looks once."""
        if self._is_whole:
            return
        there = what_is_there(self.file, self.container.format.name)
        if there is not None:
            raise self.cut_off(there)
        self._is_whole = True

    def cut_off(self, there: str) -> DecodeError:
        """Return the error for a file that has less than its headers say."""
        return DecodeError(f"{self.name} is cut off: it has {there}. Copy it again, or leave the sample out")

    def rewind(self) -> None:
        """Go back to the beginning, by reopening unless the container is fresh: not every format can seek there."""
        if not self.fresh:
            self.close()
            self.open()

    def close(self) -> None:
        """Close container and codecs; the file stays open."""
        self.container.close()

    def stream(self, kind: str) -> Any:
        """Return the stream of `video` or `audio`; raises DecodeError if there is none, or none that can be decoded."""
        stream = getattr(self, kind)
        if stream is None:
            has = "video" if kind == "audio" else "audio"
            raise DecodeError(
                f"{self.name} has no {kind} stream, only {has}: check has_{kind}_stream() before you read {kind}"
            )
        if stream.codec_context is None:
            raise DecodeError(
                f"{self.name} has {kind} of a codec that PyAV does not support: it is damaged, or needs another codec"
            )
        return stream

    def only(self, stream: Any) -> None:
        """Read the packets of one stream from here on, and skip those of the others."""
        self.fresh = False
        discard = import_av().stream.Discard
        for one in self.container.streams:
            one.discard = discard.default if one.index == stream.index else discard.all

    @contextlib.contextmanager
    def refusing(self, what: str) -> Iterator[None]:
        """Turn PyAV's errors into DecodeError; storage errors pass through."""
        try:
            yield
        except (EnergonError, GeneratorExit):
            raise
        except Exception as error:  # codecs raise anything
            # This is how libav reports absurd sizes in a damaged header.
            if isinstance(error, MemoryError) and not isinstance(error, import_av().FFmpegError):
                raise
            raise DecodeError(
                f"{self.name} {what}: {type(error).__name__}: {error}. It is damaged, cut off, or of a format that "
                "PyAV does not support: encode it again, or leave the sample out"
            ) from error


def _chosen(streams: Sequence[Any]) -> Any:
    """Return the stream that players choose of those of one kind; None if there is none."""
    default = import_av().stream.Disposition.default
    return next((one for one in streams if one.disposition & default), next(iter(streams), None))


_listed_layouts: list[Any] = []


def _number_channels(context: Any) -> None:
    """Let a codec number its channels where the file lists where each is heard, in an order of its own (AIFF, MOV).

    PyAV frees such a list with each object that has it, for each decoded block, and so ends the process. The one object
    that is made here is kept, so that the list is not freed.
    """
    layout = context.layout
    if "(" in layout.name:  # of a list, as in "8 channels (FL+FR+…)"
        _listed_layouts.append(layout)
        context.layout = f"{layout.nb_channels} channels"


@contextlib.contextmanager
def opened(file: BinaryIO, name: str, head: bytes = b"") -> Iterator[MediaFile]:
    """Open a file, whose first bytes may be known, for the duration of the `with` block. Raises DecodeError."""
    media = MediaFile(file, name, head)
    try:
        yield media
    finally:
        media.close()


def length_of(media: MediaFile, stream: Any) -> Fraction | None:
    """Return the duration of a stream in seconds, or else that which its file claims; None if it is not in a header."""
    own = own_length(stream)
    if own is not None or media.container.duration is None:
        return own
    return Fraction(media.container.duration, import_av().time_base)


def own_length(stream: Any) -> Fraction | None:
    """Return the duration that the headers give for a stream itself, in seconds."""
    if stream.duration is not None and stream.time_base is not None:
        own = Fraction(stream.duration * stream.time_base) - _opus_preskip(stream) - _before_zero(stream)
        told = _without_padding(stream)
        return own if told is None or not 0 <= own - told < _MOST_PADDING else told
    tag = next((value for name, value in stream.metadata.items() if name.upper() == "DURATION"), None)
    end = None if tag is None else _seconds(tag)
    return None if end is None else end - start_of(stream)


def _opus_preskip(stream: Any) -> Fraction:
    """Return the seconds at the beginning of Opus in Ogg that are not heard, but counted; 0 of others (RFC 7845)."""
    head = (stream.codec_context and stream.codec_context.extradata) or b""
    is_counted = head[:8] == b"OpusHead" and stream.container.format.name == "ogg"
    return Fraction(int.from_bytes(head[10:12], "little"), 48000) if is_counted else Fraction(0)


_MOST_PADDING = Fraction(1, 2)
"""Seconds that encoders put before and behind a sound at most; a tag that tells more is wrong."""


def _without_padding(stream: Any) -> Fraction | None:
    """Return the seconds of a sound that iTunes' tag tells, in samples after those of the beginning and end."""
    if stream.type != "audio" or (tag := stream.container.metadata.get("iTunSMPB")) is None:
        return None
    try:
        return Fraction(int(tag.split()[3], 16), stream.codec_context.sample_rate)
    except (IndexError, ValueError, ZeroDivisionError):
        return None


def _before_zero(stream: Any) -> Fraction:
    """Return the time of the first sample of a sound in Ogg that begins before 0, from where its length is counted."""
    return min(start_of(stream), Fraction(0)) if stream.container.format.name == "ogg" else Fraction(0)


def is_estimate(media: MediaFile) -> bool:
    """Whether libav only estimates a duration, by the rate of the first packets: AAC, AMR, and MP3 without a count."""
    file = media.file
    form = media.container.format.name
    if form != "mp3":
        return form in ("aac", "amr", "gsm")
    with kept_place(file):
        file.seek(size_of_id3(file))
        frame = file.read(64)
    return not any(name in frame for name in (b"Xing", b"Info", b"VBRI"))


def links_of(media: MediaFile) -> list[tuple[int, int]]:
    """Return begin and end of the files that a sound is a chain of: several in some Oggs, else one."""
    if media.container.format.name != "ogg" or media.video is not None:
        return [(0, 0)]
    return chained(media.file)


def has_all_packets(media: MediaFile) -> bool:
    """Return whether headers show that the file is not cut off: an MP4's index, or the size that an AVI gives."""
    file = media.file
    form = media.container.format.name
    with kept_place(file) as size:
        file.seek(4)
        end = int.from_bytes(file.read(4), "little") + 8
    if "mp4" in form:
        end = max((one.pos + one.size for one in media.stream("video").index_entries), default=size + 1)
    return end <= size and ("mp4" in form or "avi" in form)


def _seconds(text: str) -> Fraction | None:
    """Return the seconds in a duration as Matroska's tags write it, `00:00:04.040000000`."""
    try:
        hours, minutes, seconds = text.split(":")
        return 3600 * int(hours) + 60 * int(minutes) + Fraction(seconds)
    except ValueError:
        return None


def start_of(stream: Any) -> Fraction:
    """Return the time of the first frame or sample of a stream, in seconds."""
    return Fraction(0) if stream.start_time is None else Fraction(stream.start_time * stream.time_base)


BARE_VIDEO = ("h264", "hevc", "vvc", "m4v", "mpegvideo", "obu", "mjpeg", "h261", "h263", "vc1", "dirac", "cavsvideo")
"""Videos without a container (FFmpeg's names of formats): their frames have no times."""


def is_bare(stream: Any) -> bool:
    """Return whether a video has no container, and so no times but those that FFmpeg makes up, 25 frames a second."""
    return stream.type == "video" and stream.container.format.name in BARE_VIDEO


def rate_of(stream: Any) -> Fraction | None:
    """Return the mean frame rate of a video by its header; of one without a container, that of its codec."""
    rate: Fraction | None = (stream.codec_context.framerate if is_bare(stream) else None) or stream.average_rate
    return rate or None


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """Return an array as a tensor over the same memory."""
    import torch  # `energon prepare-media` runs without torch

    return torch.from_numpy(array)


def ticks(seconds: float | Fraction, base: Fraction) -> int:
    """Return seconds in whole ticks of a time base, rounded down with a tolerance of a thousandth of a tick."""
    return (Fraction(seconds) / base + Fraction(1, 1000)) // 1
