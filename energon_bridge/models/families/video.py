"""Videos in a conversation: given frames, or frames that a decoder gives later.

A decoder of videos (`AVDecoder`) knows the number, size and rate of its frames without decoding any. So a sample's plan
chooses the frames and their times, and they are decoded when the sample is delivered. The choice: `fps` frames for each
second of the video, evenly spaced by number, including the first and the last. Source: `sample_frames` of the video
processor of Qwen3-VL in transformers. It takes a constant rate for granted; here, times are those at which frames are
shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from energon_bridge.core.errors import SampleError
from energon_bridge.core.storage import ByteRange
from energon_bridge.models.av import AVDecoder
from energon_bridge.models.conversations.conversation import MediaWithOptions
from energon_bridge.models.conversations.segments import MediaOptions
from energon_bridge.models.families.vision import VideoFrames
from energon_bridge.models.images.images import DeferredImage
from energon_bridge.models.images.visual import size_of


@runtime_checkable
class VideoDecoder(Protocol):
    """The methods used of a decoder of videos."""

    def get_metadata(self) -> Any:
        """Return `video_num_frames`, `video_fps`, `video_width` and `video_height` without decoding."""

    def get_video_clips(self, video_clip_ranges: Any, video_unit: Any = "seconds") -> Any:
        """Return uint8 tensors (frames, 3, height, width) for ranges of frames, both ends included, and their times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FramesToDecode:
    """Undecoded frames of a video: their numbers, and the size they will have."""

    decoder: VideoDecoder
    numbers: tuple[int, ...]
    height: int
    width: int

    @property
    def alone(self) -> bool:
        """Whether decoding runs no user code and can run on any thread, with a decoder of its own."""
        decoder = self.decoder
        return isinstance(decoder, AVDecoder) and isinstance(decoder.stream, bytes | ByteRange)

    def mapped(self, function: Callable[[np.ndarray], np.ndarray]) -> list[np.ndarray]:
        """Return what a function makes of the pixels of each frame, (height, width, 3). Raises DecodeError."""
        decoder: Any = copy(self.decoder)  # samples may share one
        made: list[np.ndarray] = decoder.map_frames(self.numbers, function)
        return made

    def get(self) -> list[Tensor]:
        """Return the frames, uint8 of shape (3, height, width). Raises DecodeError."""
        decoder = copy(self.decoder) if self.alone else self.decoder  # samples may share one
        clips, _ = decoder.get_video_clips([(number, number) for number in self.numbers], video_unit="frames")
        return [frame for clip in clips for frame in clip]


def video_of(value: Any, *, fps: float, least: int, most: int | None) -> VideoFrames:
    """Return a video with its frames.

    Args:
        value: A VideoFrames, frames alone, or a decoder.
        fps: Frames per second to take from a decoder.
        least: The fewest to take, if there are that many.
        most: The most to take, evenly spaced, of a list too.

    Raises:
        SampleError: A decoder has no video, or its number of frames is unknown.
    """
    if isinstance(value, MediaWithOptions):
        return _with_asked_frames(value, fps, least, most)
    if isinstance(value, VideoDecoder):
        return _sampled(value, fps=fps, least=least, most=most)
    video = value if isinstance(value, VideoFrames) else VideoFrames(frames=value)
    if most is None or isinstance(video.frames, FramesToDecode) or len(video.frames) <= most:
        return video
    return _with_frames(video, most)


def _with_asked_frames(video: MediaWithOptions, fps: float, least: int, most: int | None) -> VideoFrames:
    """Return a video with the frames that the options of its part ask for. Raises SampleError as `video_of` does."""
    options = video.options
    least = options.nframes or options.min_frames or least
    bounds = [bound for bound in (options.nframes or options.max_frames, most) if bound is not None]
    most = min(bounds, default=None)
    if isinstance(video.value, VideoDecoder):
        return _sampled(video.value, fps=options.fps or fps, least=least, most=most, options=options)
    if options.is_segment or options.fps is not None:
        raise SampleError("a segment or fps is given for frames of a video without their file: give a decoder of it")
    return video_of(video.value, fps=fps, least=least, most=most)


def thinned(videos: Sequence[VideoFrames], cost: Callable[[VideoFrames], int], most: int) -> list[VideoFrames]:
    """Return videos with as many of their frames, evenly spaced, as cost no more than a budget together.

    Raises SampleError if a single frame of each costs more.
    """
    videos = list(videos)
    counts = [frames_shape(video.frames)[0] for video in videos]
    while (total := sum(map(cost, videos))) > most:
        if max(counts) == 1:
            raise SampleError(f"the videos of the sample take {total} with a single frame each; their budget is {most}")
        counts = [max(1, min(count - 1, int(count * most / total))) for count in counts]
        videos = [_with_frames(video, count) for video, count in zip(videos, counts, strict=True)]
    return videos


def _with_frames(video: VideoFrames, count: int) -> VideoFrames:
    """Return a video with `count` of its frames, evenly spaced, the first and the last among them."""
    frames = video.frames
    total = frames_shape(video.frames)[0]
    kept = np.linspace(0, total - 1, count).round().astype(int).tolist()
    if isinstance(frames, FramesToDecode):
        frames = replace(frames, numbers=tuple(frames.numbers[number] for number in kept))
    else:
        frames = frames[kept] if isinstance(frames, Tensor) else [frames[number] for number in kept]
    times = video.timestamps or (video.rate and [number / video.rate for number in range(total)])
    return replace(
        video,
        frames=frames,
        fps=video.rate and video.rate * count / total,
        timestamps=tuple(times[number] for number in kept) if times else None,
    )


def decoded(video: VideoFrames) -> VideoFrames:
    """Return a video with its frames decoded. Raises DecodeError."""
    if isinstance(video.frames, FramesToDecode):
        return replace(video, frames=video.frames.get())
    if isinstance(video.frames, list | tuple):
        return replace(video, frames=[f.get() if isinstance(f, DeferredImage) else f for f in video.frames])
    return video


def frames_shape(frames: Any) -> tuple[int, int, int]:
    """Return the number of frames, their height and width. Raises SampleError for anything else."""
    if isinstance(frames, FramesToDecode):
        return len(frames.numbers), frames.height, frames.width
    if isinstance(frames, Tensor) and frames.ndim == 4 and len(frames):
        return len(frames), int(frames.shape[2]), int(frames.shape[3])
    if isinstance(frames, list | tuple) and frames and not isinstance(frames[0], str):
        width, height = size_of(frames[0])
        return len(frames), height, width
    what = tuple(frames.shape) if isinstance(frames, Tensor) else repr(frames)[:100]
    raise SampleError(f"frames must be a (frames, channels, height, width) tensor or a list of images, got {what}")


def _sampled(
    decoder: VideoDecoder, *, fps: float, least: int, most: int | None, options: MediaOptions | None = None
) -> VideoFrames:
    with decoder if isinstance(decoder, AVDecoder) else nullcontext():  # one opening for all that is asked
        metadata = decoder.get_metadata(get_audio=False) if isinstance(decoder, AVDecoder) else decoder.get_metadata()
        total = metadata.video_num_frames
        rate = metadata.video_fps
        if not total or not rate or not metadata.video_width or not metadata.video_height:
            raise SampleError(f"{decoder!r} has no video with a known number of frames: {metadata}")
        first, total = (0, total) if options is None else _within(decoder, total, rate, options)
        if (ends := _times_of(decoder, (first, first + total - 1), rate)) is not None:
            rate = (total - 1) / (ends[-1] - ends[0])
        wanted = max(int(total / rate * fps), least)
        count = min(wanted, total, most or total)
        numbers = (first + np.linspace(0, total - 1, count).round().astype(int)).tolist()
        times = _times_of(decoder, numbers, rate)
    return VideoFrames(
        frames=FramesToDecode(
            decoder=decoder, numbers=tuple(numbers), height=int(metadata.video_height), width=int(metadata.video_width)
        ),
        fps=count / total * rate,
        timestamps=tuple((n - first) / rate for n in numbers) if times is None else tuple(t - times[0] for t in times),
    )


_BEYOND_SECONDS = 0.5
"""How far a segment may end beyond its file, whose length lists often round."""


def _within(decoder: VideoDecoder, total: int, rate: float, options: MediaOptions) -> tuple[int, int]:
    """Return the number of the first frame of a segment, and how many are shown from its begin on and before its end.

    Raises:
        SampleError: It lies beyond the video.
    """
    if not options.is_segment:
        return 0, total
    times = np.arange(total) / rate
    if isinstance(decoder, AVDecoder):
        times = np.array(decoder.get_frame_times(range(total)))
    over = float(times[-1]) + 1 / rate
    end = options.end
    if options.begin >= over or (end is not None and end > over + _BEYOND_SECONDS):
        raise SampleError(
            f"a segment from {options.begin:g} s to {end} s lies beyond {decoder!r}, which has {over:g} s"
        )
    first, behind = np.searchsorted(times, [options.begin - _EXACT, (over if end is None else end) - _EXACT])
    if behind <= first:  # the frame that is shown meanwhile
        first = max(0, first - 1)
    return int(first), max(1, int(behind - first))


_EXACT = 1e-6


_ROUNDING_SECONDS = 0.002
"""Tolerance for a constant rate: a container rounds times of frames to its ticks."""


def _times_of(decoder: VideoDecoder, numbers: Sequence[int], rate: float) -> list[float] | None:
    """Return when frames are shown; None if that follows from a constant rate, or the decoder does not tell."""
    if not isinstance(decoder, AVDecoder):
        return None
    times = np.array(decoder.get_frame_times(numbers, precision=_ROUNDING_SECONDS / 2))
    even = times[0] + (np.array(numbers) - numbers[0]) / rate
    return None if np.abs(times - even).max() <= _ROUNDING_SECONDS else times.tolist()
