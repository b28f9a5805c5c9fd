"""Videos whose packets do not tell their frames: decoded from the beginning, so frame n is the n-th that comes out.

They are decoded twice: once to learn how many frames there are and when each is shown, then up to those requested.
Nothing is assumed of the packets, so this is slow, and right for whatever FFmpeg decodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from energon_bridge.core.errors import DecodeError
from energon_bridge.core.order.rng import IntArray
from energon_bridge.models.av.media_file import MediaFile, is_bare, rate_of


class WholeReader:
    """Reads frames of a video by decoding all that come before; has the methods of `VideoReader`.

    Attributes:
        times: When each frame is shown, in ticks. Rising: if the decoder's times are not, frames get those of the
            packets, in order; if they do not rise either, or there is no container, equal distances.
        base: Seconds of a tick.
    """

    def __init__(self, media: MediaFile, times: IntArray | None = None) -> None:
        self._media = media
        stream = media.stream("video")
        self.base: Fraction = stream.time_base
        rate = rate_of(stream)
        self._frame_ticks = round(1 / rate / self.base) if rate else 1
        self.times = self._all_times() if times is None else times
        if not len(self.times):
            raise DecodeError(f"{media.name} has a video stream without frames: leave the sample out")
        if not rate and len(self.times) > 1:
            self._frame_ticks = round(int(self.times[-1] - self.times[0]) / (len(self.times) - 1))
        self._restart()

    def _restart(self) -> None:
        self._decoded = self._frames([])
        self._at = 0
        self._last: Any = None

    def _frames(self, stamps: list[int]) -> Iterator[Any]:
        """Yield all frames, from the beginning of the file; append the dts of each packet (or its pts) to `stamps`."""
        self._media.rewind()
        stream = self._media.stream("video")
        self._media.only(stream)
        packets = self._media.container.demux(stream)
        while True:
            with self._media.refusing("cannot be read"):
                packet = next(packets, None)
            if packet is None:
                self._media.check_end()
                return
            stamp = packet.pts if packet.dts is None else packet.dts
            if packet.size and stamp is not None:
                stamps += [] if packet.is_discard else [stamp]
            elif stamp is not None:
                continue  # an empty packet repeats a frame; the decoder would take it for the end
            with self._media.refusing("cannot be decoded"):
                frames = packet.decode()
            yield from frames

    def _all_times(self) -> IntArray:
        stamps: list[int] = []
        shown = [frame.pts for frame in self._frames(stamps)]
        if is_bare(self._media.stream("video")):
            return self._frame_ticks * np.arange(len(shown), dtype=np.int64)
        # Times must rise, or frames could not be told apart by them: the decoder's own, else those of the packets.
        for times in (shown, sorted(stamps)):
            if len(times) == len(shown) and None not in times and all(a < b for a, b in pairwise(times)):
                return np.array(times, dtype=np.int64)
        begin = min([*stamps, *(time for time in shown if time is not None)], default=0)
        return begin + self._frame_ticks * np.arange(len(shown), dtype=np.int64)

    # As VideoReader --------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Return the number of frames."""
        return len(self.times)

    def length(self) -> Fraction:
        """Return the duration in seconds."""
        return Fraction(int(self.times[-1] - self.times[0]) + self._frame_ticks) * self.base

    def time_of(self, number: int) -> int | None:
        """Return when a frame is shown, None after the last one."""
        return int(self.times[number]) if number < len(self.times) else None

    def times_of(self, numbers: Sequence[int], slack: int = 0) -> list[int | None]:
        """Return when frames are shown, None for those after the last one; exact, so that `slack` is not used."""
        return [self.time_of(number) for number in numbers]

    def frame_at(self, time: int) -> int | None:
        """Return the time of the frame shown at a time, or else of the first one."""
        return int(self.times[max(0, int(np.searchsorted(self.times, time, side="right")) - 1)])

    def after(self, time: int) -> int | None:
        """Return the first frame after a time, None if there is none."""
        return self.time_of(int(np.searchsorted(self.times, time, side="right")))

    def frames(self, first: int) -> Iterator[Any]:
        """Yield the frames from a time on."""
        number = int(np.searchsorted(self.times, first))
        if self._last is not None and number == self._at - 1:
            yield self._last
        elif number < self._at:
            self._restart()
        while self._at < len(self.times) and (frame := next(self._decoded, None)) is not None:
            frame.pts = int(self.times[self._at])
            self._at += 1
            if frame.pts >= first:
                self._last = frame
                yield frame

    def end_of(self, frame: Any) -> int:
        """Return when a frame is no longer shown."""
        after = self.after(frame.pts)
        return int(frame.pts) + int(frame.duration or self._frame_ticks) if after is None else after
