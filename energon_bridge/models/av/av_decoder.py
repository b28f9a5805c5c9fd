"""`AVDecoder`: decodes the requested parts of a video or sound file on demand, and chooses clips of it.

Each call opens and closes the file, so nothing outlives the call; within `with decoder:` all calls share one open file.
A decoder over bytes, or over a range of a file, can be pickled and sent to other processes; its results depend on no
state. Use a decoder from one thread at a time.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Literal, Self, TypeAlias, TypeVar, overload

import numpy as np

from energon_bridge.core.errors import ConfigurationError, DecodeError, UnfitSampleError
from energon_bridge.core.format.media import HEAD_BYTES, AVMetadata
from energon_bridge.core.order.rng import IntArray
from energon_bridge.core.storage import ByteRange, open_store
from energon_bridge.core.storage.ranges import RangeReader
from energon_bridge.models.av.frame_pixels import FrameTurn, Pixels, clip_of, turn_of
from energon_bridge.models.av.headers import tells_frames
from energon_bridge.models.av.media_file import AVData, MediaFile, opened, start_of, tensor_of, ticks
from energon_bridge.models.av.metadata import audio_metadata, claimed_rate, end_of_frames, known_length, video_metadata
from energon_bridge.models.av.sound import AudioReader, as_floats, resample
from energon_bridge.models.av.streams import FrameReader, PacketsDifferError, VideoReader, beyond, is_over
from energon_bridge.models.av.whole import WholeReader

if TYPE_CHECKING:
    import torch


Clips: TypeAlias = "tuple[list[torch.Tensor], list[tuple[float, float]]]"
TimeRanges = Sequence[tuple[float, float]]
T = TypeVar("T")
_TOLD_BY_HEAD = ("wav", "wave", "rf64", "w64", "aif", "aiff", "aifc", "avi")
"""Extensions of files that are opened according to their first bytes."""


class AVDecoder:
    """A video or sound file to take clips from.

    Times are seconds on the file's own time axis, shared by its video and its sound.

    Args:
        stream: The file: bytes, a range of a file in a store, or a binary stream that can seek.
        suppress_warnings: Accepted for compatibility; there is nothing to warn about.
        name: Name of the file in messages.
        audio_format: `float32` in [-1, 1], or `native`: the type of the file.
        autorotate: Turn and mirror frames as the file says, as players do; sizes are those of turned frames. Turns are
            by quarters, of other angles by the nearest.

    Attributes:
        bytes_read: Bytes read from the file so far, if `stream` is bytes or a range.
        leaves_out_beyond: Whether a range that begins beyond the end yields no clip instead of an error.

    Raises:
        ConfigurationError: The stream is a text stream; on the first call: PyAV is not installed.
    """

    leaves_out_beyond: ClassVar[bool] = False

    def __init__(
        self,
        stream: bytes | ByteRange | BinaryIO,
        suppress_warnings: bool = False,
        *,
        name: str = "",
        audio_format: Literal["float32", "native"] = "float32",
        autorotate: bool = False,
    ) -> None:
        if audio_format not in ("float32", "native"):
            raise ConfigurationError(f"audio_format must be float32 or native, got {audio_format!r}")
        text: Any = stream
        if isinstance(text, io.TextIOBase):
            raise ConfigurationError(f"{stream!r} is a text stream: open the file in mode 'rb'")
        self.stream = stream
        self.suppress_warnings = suppress_warnings
        self.audio_format = audio_format
        self.autorotate = autorotate
        self.bytes_read = 0
        self._name = name
        self._open: MediaFile | None = None
        self._video: FrameReader | None = None
        self._tells: bool | None = None  # whether packets tell frames
        self._times: IntArray | None = None  # of all frames, where packets do not
        self._audio: AudioReader | None = None
        self._held: list[contextlib.ExitStack] = []

    @classmethod
    def open(cls, path: str | os.PathLike[str], **kwargs: Any) -> Self:
        """Return a decoder for the file at a path or URL; only the bytes needed are read."""
        folder, _, rel = os.fspath(path).rpartition("/")
        store = open_store(folder or ".")
        return cls(ByteRange(store=store, rel=rel, offset=0, size=store.size(rel)), **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        made = (type(self), self.stream, self.suppress_warnings, self._name, self.audio_format)
        return _made, made, {"_tells": self._tells, "_times": self._times, "autorotate": self.autorotate}

    def __repr__(self) -> str:
        stream = self.stream
        size = len(stream) if isinstance(stream, bytes) else stream.size if isinstance(stream, ByteRange) else "some"
        return f"AVDecoder({self.name}, {size} bytes)"

    @property
    def name(self) -> str:
        """Return the name of the file in messages."""
        if self._name:
            return f"part {self._name!r}"
        return self.stream.url if isinstance(self.stream, ByteRange) else "the file"

    @property
    def suffix(self) -> str:
        """Return the extension of the part or file, in lower case; empty if it has no name."""
        name = self._name or (self.stream.rel if isinstance(self.stream, ByteRange) else "")
        return name.rpartition(".")[2].lower()

    # Opening ---------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        held = contextlib.ExitStack()
        held.enter_context(self._opened())
        self._held.append(held)
        return self

    def __exit__(self, *error: object) -> None:
        self._held.pop().close()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[MediaFile]:
        """Open the file, unless a caller has opened it."""
        if self._open is not None:
            yield self._open
            return
        file = self._file()
        try:
            with opened(file, self.name, self._head()) as media:
                self._open = media
                yield media
        finally:
            self._open = self._video = self._audio = None
            if isinstance(file, RangeReader):
                self.bytes_read += file.bytes_read

    def _video_of(self, media: MediaFile) -> FrameReader:
        self._audio = None  # the readers share the container's one position, and take turns
        if media.is_moved:
            self._video = None
            media.is_moved = False
        if self._video is None and (tells_frames(media) if self._tells is None else self._tells):
            self._video = VideoReader(media)
        elif self._video is None:
            self._video = whole = WholeReader(media, self._times)
            self._times = whole.times
        return self._video

    def _reading(self, media: MediaFile, read: Callable[[Callable[[], FrameReader]], T]) -> T:
        """Call `read` with a reader by packets; if they do not fit the frames, with one that decodes from the start."""
        try:
            return read(lambda: self._video_of(media))
        except PacketsDifferError:
            self._video = None
            self._tells = False
            return read(lambda: self._video_of(media))

    def _audio_of(self, media: MediaFile) -> AudioReader:
        self._video = None
        if self._audio is None:
            self._audio = AudioReader(media)
        return self._audio

    def open_container(self) -> Any:
        """Return the file as PyAV's open container, which the caller closes. Raises DecodeError."""
        return MediaFile(self._file(), self.name).container

    def _head(self) -> bytes:
        """Return the first bytes of the file if reading them is free, or its extension calls for a look at them."""
        stream = self.stream
        if isinstance(stream, bytes):
            return stream[:HEAD_BYTES]
        if isinstance(stream, ByteRange):
            return stream.read(HEAD_BYTES) if self.suffix in _TOLD_BY_HEAD else b""
        stream.seek(0)
        return stream.read(HEAD_BYTES)

    def _file(self) -> BinaryIO:
        stream = self.stream
        return RangeReader(stream) if isinstance(stream, (bytes, ByteRange)) else stream  # type: ignore[return-value]

    # Clips -----------------------------------------------------------------------------------------------------------

    def get_video(self) -> AVData:
        """Return the whole video, without sound. Raises DecodeError."""
        return self.get_clips(video_clip_ranges=[(0, math.inf)], video_unit="frames")

    def get_audio(self) -> AVData:
        """Return all of the sound. Raises DecodeError."""
        return self.get_clips(audio_clip_ranges=[(0, math.inf)], audio_unit="samples")

    def get_video_with_audio(self) -> AVData:
        """Return the whole video with its sound. Raises DecodeError."""
        whole = [(0, math.inf)]
        return self.get_clips(whole, whole, video_unit="frames", audio_unit="samples")

    def get_frames(self, video_decode_audio: bool = False) -> AVData:
        """Return the whole video, with its sound if requested and present; for a sound file, the sound.

        Raises DecodeError.
        """
        with self._opened() as media:
            if media.video is None:
                return self.get_audio()
            if video_decode_audio and media.audio is not None:
                return self.get_video_with_audio()
            return self.get_video()

    def get_clips(
        self,
        video_clip_ranges: TimeRanges | None = None,
        audio_clip_ranges: TimeRanges | None = None,
        video_unit: Literal["frames", "seconds"] = "seconds",
        audio_unit: Literal["samples", "seconds"] = "seconds",
        video_out_frame_size: tuple[int, int] | None = None,
    ) -> AVData:
        """Return clips of the video and of the sound; see get_video_clips and get_audio_clips."""
        video: Clips = ([], [])
        audio: Clips = ([], [])
        with self._opened():
            if video_clip_ranges is not None:
                video = self.get_video_clips(video_clip_ranges, video_unit, video_out_frame_size)
            if audio_clip_ranges is not None:
                audio = self.get_audio_clips(audio_clip_ranges, audio_unit)
        return AVData(video_clips=video[0], video_timestamps=video[1], audio_clips=audio[0], audio_timestamps=audio[1])

    def get_video_clips(
        self,
        video_clip_ranges: TimeRanges,
        video_unit: Literal["frames", "seconds"] = "seconds",
        video_out_frame_size: tuple[int, int] | None = None,
    ) -> Clips:
        """Return a clip for each range, and the seconds at which it begins and ends.

        A range in frames includes both ends; a range in seconds has the frame that is shown at its beginning, and all
        frames that begin up to its end. So each clip has at least one frame. A range may end beyond the video
        (`math.inf`: at its end), but not begin there.

        Args:
            video_clip_ranges: (begin, end) of each clip.
            video_unit: `seconds`, or `frames`, numbered from 0 in the order in which they are shown.
            video_out_frame_size: (width, height) to scale to, bilinear; None: as they are.

        Returns:
            uint8 tensors (frames, 3, height, width), and (begin of the first frame, end of the last one).

        Raises:
            DecodeError: The file is damaged or has no video, or a range begins beyond it.
            ConfigurationError: A range ends before it begins, or the unit does not exist.
        """
        _check(video_clip_ranges, video_unit, ("frames", "seconds"), "video")
        with self._opened() as media:
            pixels_of = self._pixels(media, video_out_frame_size).of
            return self._reading(
                media, lambda reader: self._clips(media, reader(), video_clip_ranges, video_unit, pixels_of, clip_of)
            )

    def map_frames(self, numbers: Sequence[int], function: Callable[[np.ndarray], T]) -> list[T]:
        """Return what a function makes of the pixels of frames, (height, width, 3), as each of them is decoded.

        So only what it returns is held, not the frames. Raises DecodeError as `get_video_clips` does.
        """
        with self._opened() as media:
            pixels = self._pixels(media, None)
            return self._of_frames(media, numbers, lambda frame: function(pixels.of(frame)))

    def _of_frames(self, media: MediaFile, numbers: Sequence[int], made: Callable[[Any], T]) -> list[T]:
        ranges = [(number, number) for number in numbers]
        return self._reading(
            media, lambda reader: self._clips(media, reader(), ranges, "frames", made, lambda rows: rows[0])[0]
        )

    def _pixels(self, media: MediaFile, size: tuple[int, int] | None) -> Pixels:
        return Pixels(media, size, autorotate=self.autorotate)

    def _clips(
        self,
        media: MediaFile,
        reader: FrameReader,
        ranges: TimeRanges,
        unit: str,
        pixels_of: Callable[[Any], Any],
        joined: Callable[[list[Any]], Any],
    ) -> tuple[list[Any], list[tuple[float, float]]]:
        clips: tuple[list[Any], list[tuple[float, float]]] = ([], [])
        for begin, end in ranges:
            number = int(begin) if unit == "frames" else None
            time = reader.time_of(number) if number is not None else ticks(begin, reader.base)
            first = None if time is None else reader.frame_at(time)
            if first is None:
                if self.leaves_out_beyond:
                    continue
                raise beyond(media, f"{unit[:-1]} {begin:g}", f"{reader.count} frames")
            limit = math.inf if number is None or math.isinf(end) else int(end) - number + 1
            last = math.inf if number is not None or math.isinf(end) else ticks(end, reader.base)
            rows = []
            until = first
            start = None
            for frame in reader.frames(first):
                start = frame.pts if start is None else start
                until = reader.end_of(frame)
                rows.append(pixels_of(frame))
                if len(rows) >= limit or until > last or reader.after(frame.pts) is None:
                    break
            if start is None or (number is None and is_over(media, reader, Fraction(begin), until)):
                if self.leaves_out_beyond:
                    continue
                raise beyond(media, f"{unit[:-1]} {begin:g}", f"{float(until * reader.base):g} s")
            clips[0].append(joined(rows))
            clips[1].append((float(start * reader.base), float(until * reader.base)))

        return clips

    def get_audio_clips(
        self,
        audio_clip_ranges: TimeRanges,
        audio_unit: Literal["samples", "seconds"] = "seconds",
        *,
        audio_sample_rate: int | None = None,
    ) -> Clips:
        """Return the samples of each range, its end excluded, and the seconds at which they begin and end.

        A range may end beyond the sound (`math.inf`: at its end), but not begin there. Ranges of equal duration have
        equally many samples.

        Args:
            audio_clip_ranges: (begin, end) of each clip.
            audio_unit: `seconds`, or `samples`, numbered from 0.
            audio_sample_rate: Samples a second to resample the clips to; None: as they are.

        Returns:
            Tensors (channels, samples), float32 in [-1, 1] or in the file's own type, and (begin, end).

        Raises:
            DecodeError: The file is damaged or has no sound, or a range begins beyond it.
            ConfigurationError: A range ends before it begins, or the unit does not exist.
        """
        _check(audio_clip_ranges, audio_unit, ("samples", "seconds"), "audio")
        if audio_sample_rate is not None and self.audio_format == "native":
            raise ConfigurationError("sound is resampled as float32: leave out audio_format='native'")
        clips: Clips = ([], [])
        with self._opened() as media:
            reader = self._audio_of(media)
            for begin, end in audio_clip_ranges:
                first = _sample(begin, audio_unit, reader)
                last = None if math.isinf(end) else first + _samples(begin, end, audio_unit, reader)
                sound = reader.samples(first, last, by_time=audio_unit == "seconds")
                if not sound.shape[1] and last != first:
                    if self.leaves_out_beyond:
                        continue
                    raise DecodeError(
                        f"{self.name}: a clip begins at {audio_unit[:-1]} {begin:g}, after the end of the sound: "
                        "check get_audio_duration() before you choose clips"
                    )
                seconds = [float(reader.start + Fraction(n, reader.rate)) for n in (first, first + sound.shape[1])]
                if self.audio_format == "float32":
                    sound = resample(as_floats(sound), reader.rate, audio_sample_rate or reader.rate)
                clips[0].append(tensor_of(sound))
                clips[1].append((seconds[0], seconds[1]))
        return clips

    def map_sound(self, function: Callable[[int, np.ndarray], T]) -> list[T]:
        """Return what a function makes of each block of sound as it is decoded, so that no more than that is held.

        It gets the number of the first sample and the samples, (channels, samples) in the file's own type. Raises
        DecodeError.
        """
        with self._opened() as media:
            return [function(at, samples) for at, samples in self._audio_of(media).blocks()]

    # What the file is ------------------------------------------------------------------------------------------------

    def has_video_stream(self) -> bool:
        """Return whether there is video. Raises DecodeError."""
        with self._opened() as media:
            return media.video is not None

    def has_audio_stream(self) -> bool:
        """Return whether there is sound. Raises DecodeError."""
        with self._opened() as media:
            return media.audio is not None

    def get_video_fps(self) -> float:
        """Return the mean frame rate, for which all packets are read, unless the index of an MP4 or MOV tells it.

        Raises DecodeError.
        """
        with self._opened() as media:
            media.stream("video")
            rate = self._video_metadata(media, duration=False, frame_count=False, frame_size=False).video_fps
        if rate is None:
            raise DecodeError(f"{self.name} does not give the frame rate of its video")
        return rate

    def get_audio_samples_per_second(self) -> int:
        """Return the sample rate. Raises DecodeError."""
        with self._opened() as media:
            return int(media.stream("audio").codec_context.sample_rate)

    def count_samples(self) -> int:
        """Return the number of samples with those, silent, that a recording left out, decoding all. Raises DecodeError.

        So many `get_audio_clips` gives of the whole sound, asked for by seconds.
        """
        with self._opened() as media:
            return self._audio_of(media).count(by_time=True)

    def get_audio_duration(self) -> float | None:
        """Return the seconds of sound, None if there is none. Raises DecodeError."""
        return self.get_metadata(get_video=False).audio_duration

    def get_video_duration(self, get_frame_count: bool = False) -> tuple[float | None, int | None]:
        """Return the seconds of video, and the number of frames if requested; None without video.

        Counting frames reads the whole file if its index does not list them (Matroska, WebM). Raises DecodeError.
        """
        with self._opened() as media:
            if media.video is None:
                return None, None
            metadata = self._video_metadata(media, frame_count=get_frame_count, frame_size=False, rate=False)
        return metadata.video_duration, metadata.video_num_frames

    def get_time_range(self, *, video: bool, audio: bool) -> tuple[float, float]:
        """Return the time range that has both video and sound, or the one requested. Raises DecodeError."""
        begins = [Fraction(0)]
        ends = []
        with self._opened() as media:
            for kind in [*(["video"] if video else []), *(["audio"] if audio else [])]:
                stream = media.stream(kind)
                self._video = self._audio = None
                begin = start_of(stream)
                length = known_length(media, stream)
                if length is None and kind == "video":
                    length = self._reading(media, lambda reader: reader().length())
                    begin = Fraction(self._video_of(media).time_of(0) or 0) * self._video_of(media).base
                elif length is None:
                    reader = self._audio_of(media)
                    length = Fraction(reader.count(), reader.rate)
                begins.append(begin)
                ends.append(begin + length)
        return float(max(begins)), float(min(ends))

    def get_frame_times(self, numbers: Sequence[int], *, precision: float = 0.0) -> list[float]:
        """Return the seconds at which frames begin to be shown, by their numbers.

        Nothing is decoded, but all packets are read, unless the index of an MP4 or MOV tells the times.

        Args:
            numbers: The frames, numbered from 0 in the order in which they are shown.
            precision: Seconds by which times may be off; some spare reading the packets of a video of constant rate.

        Raises:
            DecodeError: The file is damaged or has no video, or fewer frames.
        """
        with self._opened() as media:

            def times(reader: Callable[[], FrameReader]) -> list[float]:
                base = (frames := reader()).base
                ticks = frames.times_of(numbers, int(precision / base))
                if None in ticks:
                    late = f"{frames.count} frames, and no frame {numbers[ticks.index(None)]}"
                    raise DecodeError(f"{self.name} has {late}: check get_video_duration()")
                return [(tick or 0) * base.numerator / base.denominator for tick in ticks]

            return self._reading(media, times)

    def get_end_of_frames(self) -> float | None:
        """Return when the last frame ends; None if that is unknown, as of a file that is cut off."""
        with self._opened() as media:
            self._video = None
            return self._reading(media, lambda reader: end_of_frames(media, reader))

    def get_metadata(
        self,
        get_video: bool = True,
        get_video_duration: bool = True,
        get_video_frame_count: bool = True,
        get_video_frame_size: bool = True,
        get_audio: bool = True,
        get_audio_duration: bool = True,
        get_audio_num_samples: bool = False,
    ) -> AVMetadata:
        """Return the requested metadata; fields of what the file does not have are None.

        Nothing is decoded, except to count the samples of compressed sound, and the frames of videos whose packets do
        not tell them. Raises DecodeError.
        """
        fields: dict[str, Any] = {}
        with self._opened() as media:
            if get_video and media.video is not None:
                fields |= _known(
                    self._video_metadata(
                        media,
                        duration=get_video_duration,
                        frame_count=get_video_frame_count,
                        frame_size=get_video_frame_size,
                    )
                )
                if get_video_frame_size and self.autorotate and self._turn(media).quarters % 2:
                    fields |= {"video_width": fields["video_height"], "video_height": fields["video_width"]}
            if get_audio and media.audio is not None:
                self._video = self._audio = None
                fields |= _known(audio_metadata(media, duration=get_audio_duration, num_samples=get_audio_num_samples))
        return AVMetadata(**fields)

    def _frame_seconds(self) -> float:
        """Return how long a frame is shown by the header, or else in the mean."""
        with self._opened() as media:
            claimed = claimed_rate(media)
        return float(1 / claimed) if claimed else 1 / self.get_video_fps()

    def _video_metadata(self, media: MediaFile, **asked: bool) -> AVMetadata:
        self._video = self._audio = None
        return self._reading(media, lambda reader: video_metadata(media, reader, **asked))

    def _turn(self, media: MediaFile) -> FrameTurn:
        """Return how the video is to be rotated and mirrored: known from a decoded frame only."""
        self._video = self._audio = None
        made = self._of_frames(media, [0], turn_of)
        return made[0] if made else FrameTurn()


def _made(cls: type[AVDecoder], stream: Any, suppress_warnings: bool, name: str, audio_format: Any) -> AVDecoder:
    return cls(stream, suppress_warnings, name=name, audio_format=audio_format)


def _known(metadata: AVMetadata) -> dict[str, Any]:
    return {name: value for name, value in asdict(metadata).items() if value is not None}


def _check(ranges: TimeRanges, unit: str, units: tuple[str, str], kind: str) -> None:
    if unit not in units:
        raise ConfigurationError(f"there is no {kind}_unit {unit!r}; known: {', '.join(units)}")
    for begin, end in ranges:
        if not (0 <= begin <= end) or math.isinf(begin):
            raise UnfitSampleError(f"a clip must have 0 <= begin <= end, got {begin!r} to {end!r} {unit}")


def _sample(value: float, unit: str, reader: AudioReader) -> int:
    """Return the index of the sample at a time."""
    return int(value) if unit == "samples" else max(0, round((Fraction(value) - reader.start) * reader.rate))


def _samples(begin: float, end: float, unit: str, reader: AudioReader) -> int:
    """Return how many samples a range has; for seconds this depends on its length alone."""
    if unit == "samples":
        return int(end) - int(begin)
    return max(0, round((Fraction(end) - max(Fraction(begin), reader.start)) * reader.rate))


# ---------------------------------------------------------------------------------------------------------------------
# Choosing clips of equal length at equal distances.


def get_clips_uniform(
    av_decoder: AVDecoder,
    clip_duration_seconds: float,
    num_clips: int,
    request_video: bool = False,
    request_audio: bool = False,
    video_out_frame_size: tuple[int, int] | None = None,
) -> AVData:
    """Return clips of equal length at equal distances, the first at the beginning, the last at the end.

    With length 0 the clips are single frames: those shown half a frame after the beginning, half a frame before the
    end, and between them. If you request both, clips lie where the file has both video and sound.

    Raises ConfigurationError if neither is requested or a number makes no sense; DecodeError.
    """
    if not (request_video or request_audio):
        raise ConfigurationError("no clips requested: pass request_video=True or request_audio=True")
    if num_clips < 1 or clip_duration_seconds < 0:
        raise UnfitSampleError(
            f"expected at least 1 clip of at least 0 s, got {num_clips} of {clip_duration_seconds} s"
        )
    with av_decoder as decoder:
        begin, end = decoder.get_time_range(video=request_video, audio=request_audio)

        def clips_until(end: float) -> AVData:
            if clip_duration_seconds == 0:
                half = decoder._frame_seconds() / 2 if request_video else 0.0
                first = begin + half
                last = max(begin, end - half)
            else:
                first = begin
                last = max(begin, end - clip_duration_seconds)
            ranges = [(float(at), float(at + clip_duration_seconds)) for at in np.linspace(first, last, num_clips)]
            return decoder.get_clips(
                video_clip_ranges=ranges if request_video else None,
                audio_clip_ranges=ranges if request_audio else None,
                video_out_frame_size=video_out_frame_size,
            )

        try:
            return clips_until(end)
        except DecodeError:
            shown = decoder.get_end_of_frames() if request_video else None
            if shown is None or shown >= end:
                raise
        return clips_until(shown)  # the headers claim more frames than there are


def is_lossless(decoder: AVDecoder) -> bool:
    """Return whether the sound of a file is stored as it was. Raises DecodeError."""
    with decoder.open_container() as container:
        return bool(container.streams.audio[0].codec_context.codec.lossless)


@overload
def get_single_frames_uniform(
    av_decoder: AVDecoder,
    num_frames: int,
    *,
    video_out_frame_size: tuple[int, int] | None = None,
    return_timestamps: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def get_single_frames_uniform(
    av_decoder: AVDecoder,
    num_frames: int,
    *,
    video_out_frame_size: tuple[int, int] | None = None,
    return_timestamps: Literal[True],
) -> tuple[torch.Tensor, list[float]]: ...


def get_single_frames_uniform(
    av_decoder: AVDecoder,
    num_frames: int,
    *,
    video_out_frame_size: tuple[int, int] | None = None,
    return_timestamps: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, list[float]]:
    """Return frames at equal distances, uint8 (frames, 3, height, width), and their times in seconds.

    If the video has fewer frames, some are repeated. Raises ConfigurationError and DecodeError.
    """
    clips = get_clips_uniform(av_decoder, 0, num_frames, request_video=True, video_out_frame_size=video_out_frame_size)
    if not clips.video_clips or clips.video_timestamps is None:
        raise DecodeError(f"{av_decoder.name} has no frames")
    import torch  # callers that want frames have it

    frames = torch.cat(clips.video_clips)
    return (frames, [begin for begin, _ in clips.video_timestamps]) if return_timestamps else frames
