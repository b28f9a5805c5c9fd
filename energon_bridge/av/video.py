"""Frames of an open file, by time or by number, identical to those from decoding the whole file.

Frames before the first one requested are decoded only if others refer to them. Clips that follow each other closely are
decoded in one go; the last decoded frames are kept, since two clips may share a frame.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from energon_bridge.av.media import Media, import_av, length_of, start_of, tensor_of
from energon_bridge.av.packets import Packets
from energon_bridge.errors import DecodeError

if TYPE_CHECKING:
    import torch

_SKIPPABLE = ("h264", "hevc")
"""Codecs whose packets show, before decoding, whether other frames refer to them."""


class VideoReader:
    """Reads frames of the video stream of an open file; times are ticks of the stream."""

    def __init__(self, media: Media) -> None:
        self._media = media
        self.packets = Packets(media)
        self.base = self.packets.stream.time_base
        self._ready: deque[Any] = deque()
        self._labels: deque[int] = deque()
        self._last: Any = None
        self._landings = 0

    def frame_at(self, time: int) -> int | None:
        """Return the pts of the frame shown at a time, or else of the first one; None if there are no frames."""
        packets = self.packets
        self._settle()
        decoded = None if self._last is None else int(self._last.pts)
        if not packets.is_near(time, decoded):
            found = packets.go_to(time)
            self._settle()
            return found
        found = packets.shown_at(time)
        if found is None:
            return packets.after(time) if decoded is None else decoded
        return found

    def _settle(self) -> None:
        """Forget the frames decoded before the packets jumped."""
        if self._landings != self.packets.landings:
            self._landings = self.packets.landings
            self._ready.clear()
            self._labels.clear()
            self._last = None

    def frames(self, first: int) -> Iterator[Any]:
        """Yield the frames from the pts on that `frame_at` has just returned."""
        if self._last is not None and self._last.pts == first:
            yield self._last
        while (frame := self._next(first)) is not None:
            if frame.pts >= first:
                self._last = frame
                yield frame

    def _next(self, first: int) -> Any:
        packets, context = self.packets, self.packets.stream.codec_context
        skips = context.name in _SKIPPABLE and not packets.counted
        while not self._ready:
            packet = packets.take()
            if packet is None:
                return None
            if packet.size and packets.counted:
                self._labels.append(packet.pts)
            elif skips and packet.size:
                context.skip_frame = "NONREF" if packet.pts < first else "DEFAULT"
            with self._media.refusing("cannot be decoded"):
                self._ready.extend(packet.decode())
        frame = self._ready.popleft()
        if packets.counted:
            frame.pts = self._labels.popleft()
        return frame

    def end_of(self, frame: Any) -> int:
        """Return when a frame is no longer shown."""
        after = self.packets.after(frame.pts)
        return int(frame.pts + self.duration_of(frame)) if after is None else after

    def duration_of(self, frame: Any) -> int:
        """Return the duration of the last frame of a file: its own, or else the mean frame duration."""
        rate = self.packets.stream.average_rate
        return int(frame.duration or (round(1 / rate / self.base) if rate else 0))


class Pixels:
    """Turns frames into uint8 RGB pixels of the requested size, or else of the size of the first frame."""

    def __init__(self, size: tuple[int, int] | None) -> None:
        self._size = size
        self._reformatter = import_av().video.reformatter.VideoReformatter()

    def of(self, frame: Any) -> np.ndarray:
        """Return the pixels of a frame, (height, width, 3)."""
        width, height = self._size or (frame.width, frame.height)
        self._size = (width, height)
        # One thread: more would slow down the decode threads, and must not exist at a fork.
        out = self._reformatter.reformat(frame, width, height, "rgb24", interpolation="BILINEAR", threads=1)
        pixels: np.ndarray = out.to_ndarray()
        return pixels.copy() if out is frame else pixels  # the frame may be requested twice


def clip_of(frames: list[np.ndarray]) -> torch.Tensor:
    """Return frames as a tensor (frames, 3, height, width), a view over memory with the channels last."""
    stacked = frames[0][None] if len(frames) == 1 else np.stack(frames)
    return tensor_of(stacked).permute(0, 3, 1, 2)


def is_over(media: Media, reader: VideoReader, begin: Fraction, until: int) -> bool:
    """Return whether a video ends before a clip begins; `until` is the end of the last frame found.

    Headers may claim up to one frame more than there is; if more is missing, the file was cut off.
    """
    if begin < until * reader.base:
        return False
    stream = media.stream("video")
    length = length_of(media, stream)
    frame = 1 / (stream.average_rate or 1)
    return length is None or begin >= start_of(stream) + length or begin > until * reader.base + frame


def beyond(media: Media, asked: str, there: str) -> DecodeError:
    """Return the error for a clip that begins after the end of a video."""
    stream = media.stream("video")
    length = length_of(media, stream)
    says = "" if length is None else f" (its headers say {float(start_of(stream) + length):g} s)"
    return DecodeError(
        f"{media.name}: a clip begins at {asked}, but the video ends after {there}{says}: check get_video_duration() "
        "before you choose clips; if the headers claim a longer video, the file is cut off"
    )
