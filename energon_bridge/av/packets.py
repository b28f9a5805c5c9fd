"""Walk the packets of a video stream to find which frames exist and where decoding must start for each.

A frame is named by its presentation time (pts), in ticks of the stream. Packets come in decoding order; a packet's
decoding time (dts) is never after its pts and never falls, so once a dts beyond a time has been seen, every frame shown
up to that time is known. That is what makes seeking exact with B-frames and variable frame rates, without decoding.

A seek may land anywhere. `Packets` checks where it landed, and goes back further if needed. After a seek, frames that
precede a key frame they do not belong to (leading pictures of an open GOP) are never used.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from energon_bridge.av.media import Media
from energon_bridge.errors import DecodeError
from energon_bridge.rng import IntArray

_NEVER = -(1 << 62)
_MOST_REORDERED = 20
"""The most packets by which any codec delays a frame; for streams without decoding times."""


class Packets:
    """The packets of the video stream of an open file.

    Attributes:
        queue: Packets that were read but not taken, in decoding order.
        ahead: The pts of the known frames after the last position, sorted.
        counted: Whether the container has no presentation times, so that frames must be counted: in decoding order,
            each gets the time of the packet with its number.
        landings: Number of jumps; frames that were decoded before a jump are not neighbours of those after it.
    """

    def __init__(self, media: Media) -> None:
        self._media = media
        self.landings = 0
        self.counted = False
        self._end = _NEVER
        self.restart()
        self.counted = "avi" in media.container.format.name and bool(self.stream.codec_context.has_b_frames)
        self._is_vp8 = self.stream.codec_context.name in ("vp8", "libvpx")
        self._look()
        if not self.queue or self.queue[0].size == 0:
            raise DecodeError(f"{media.name} has a video stream without frames: leave the sample out")
        self._first = _place(self.queue[0])
        self._times: IntArray | None = None
        self._listed: tuple[IntArray, Any, IntArray] | None = None
        self._sought = False

    def _begin(self, *, at_start: bool) -> None:
        self.landings += 1
        self.queue: deque[Any] = deque()
        self.ahead: list[int] = []
        self._leading: list[int] = []
        self._demuxed: Iterator[Any] = self._media.container.demux(self.stream)
        self._at_start = at_start
        self._floor = _NEVER  # frames before it cannot be decoded from here
        self._dts = _NEVER
        self._ended = False
        self._landed: Any = None

    def restart(self) -> None:
        """Go to the beginning of the file."""
        self._media.rewind()
        self.stream = self._media.stream("video")
        self._media.only(self.stream)
        self._begin(at_start=True)

    def _seek(self, timestamp: int) -> bool:
        """Go to the last known key frame before a time; return whether there are packets."""
        self._sought = True
        with self._media.refusing("cannot be read"):
            try:
                self._media.container.seek(timestamp, stream=self.stream, backward=True)
            except OSError:  # the container has no index, or the time is before its first entry
                self.restart()
                return self._look()
        self._begin(at_start=False)
        if not self._look() or self._landed is None:
            return False
        if _place(self._landed) == self._first:
            self._at_start = True
        else:
            self._floor = self._landed.pts
        return True

    def take(self) -> Any:
        """Return the next packet for the decoder, None after the last one."""
        if not self.queue and not self._look():
            return None
        return self.queue.popleft()

    def _look(self) -> bool:
        """Read one more packet; return False at the end of the stream."""
        if self._ended:
            return False
        with self._media.refusing("cannot be read"):
            packet = next(self._demuxed, None)
            while self._landed is None and not self._at_start and packet is not None and not packet.is_keyframe:
                packet = next(self._demuxed, None)  # some containers land between key frames
        if packet is None:
            self._ended = True
            return False
        self.queue.append(packet)
        if not packet.size:  # tells the decoder that there are no more
            self._ended = True
            return True
        if self.counted:
            packet.pts = packet.dts
        if packet.pts is None:
            raise DecodeError(
                f"{self._media.name} has a video packet without a presentation time, so frames cannot be identified: "
                "remux it into MP4 or Matroska"
            )
        if packet.dts is not None:
            self._dts = max(self._dts, packet.dts)
        self._end = max(self._end, packet.pts + (packet.duration or 0))
        if self._landed is None:
            self._landed = packet
            self._floor = _NEVER if self._at_start else packet.pts
        if self._is_shown(packet):
            insort(self.ahead if packet.pts >= self._floor else self._leading, packet.pts)
        return True

    def _is_shown(self, packet: Any) -> bool:
        """Whether a packet yields a visible frame: neither cut off by an edit list nor a hidden reference of VP8."""
        return not packet.is_discard and not (self._is_vp8 and not memoryview(packet)[0] >> 4 & 1)

    # Frames by time --------------------------------------------------------------------------------------------------

    def shown_at(self, time: int) -> int | None:
        """Return the last frame up to a time, after reading as far as needed to know it."""
        while self._dts <= time and (len(self.ahead) - bisect_right(self.ahead, time)) < _MOST_REORDERED:
            if not self._look():
                break
        place = bisect_right(self.ahead, time)
        return self.ahead[place - 1] if place else None

    def after(self, time: int) -> int | None:
        """Return the first frame after a time, None if there is none."""
        while True:
            place = bisect_right(self.ahead, time)
            found = self.ahead[place] if place < len(self.ahead) else None
            if found is not None and (self._dts >= found or len(self.ahead) - place > _MOST_REORDERED):
                return found
            if not self._look():
                return found

    def go_to(self, time: int) -> int | None:
        """Go to where the frame shown at a time (or else the first one) can be decoded, and return it.

        Returns None if there are no frames, as in a damaged file.
        """
        aim, further = time, 0
        while aim > self._first[1] or aim == time:
            reached = self._seek(aim)
            found = self.shown_at(time) if reached else None
            if found is not None:
                return found
            if self._at_start:
                return self.after(time)
            # Landed too late: by the reordering of frames, or by a whole group.
            landed = min(self._landed.pts, self._landed.dts or self._landed.pts) if reached else aim
            aim, further = min(aim, landed) - 1 - further, 2 * further + 1
        self.restart()
        found = self.shown_at(time)
        return self.after(time) if found is None else found

    def is_near(self, time: int, decoded: int | None) -> bool:
        """Whether it is faster to decode on than to seek, from a frame or from the last jump to a time."""
        if decoded is None:
            decoded = max(self._floor, self._first[1])
        if time < decoded:
            return False
        if self._dts >= time:
            return True
        if not self._sought:  # some containers read their index only then
            return (time - decoded) * self.stream.time_base < 1
        entries = self.stream.index_entries
        place = entries.search_timestamp(time, backward=True)
        return place < 0 or entries[place].timestamp <= decoded

    # Frames by number ------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Return the number of frames; reads the whole file if its index does not list them all."""
        index = self._index()
        return len(self._all_times()) if index is None else int(index[2][-1])

    def length(self) -> Fraction:
        """Return the duration of the video in seconds; reads the whole file."""
        times = self._all_times()
        return Fraction(self._end - int(times[0])) * self.stream.time_base if len(times) else Fraction(0)

    def time_of(self, number: int) -> int | None:
        """Return the pts of a frame by its number, None after the last one; the packets are left anywhere."""
        index = self._index()
        if index is None:
            times = self._all_times()
            return int(times[number]) if number < len(times) else None
        stamps, keys, shown = index
        if number >= shown[-1]:
            return None
        groups = np.flatnonzero(keys)
        group = int(groups[np.searchsorted(shown[groups], number, side="right") - 1])
        begin = self._number_landed(stamps, shown)
        if not begin <= number or shown[group] > begin + len(self._leading) + len(self.ahead):
            self._seek(int(stamps[group] - stamps[0]) + self._first[1])  # containers count from the first frame
            begin = self._number_landed(stamps, shown)
        while True:
            rank = number - begin - len(self._leading)
            known = self._leading[rank:] if rank < 0 else self.ahead[rank : rank + 1]
            if (known and self._dts >= known[0]) or not self._look():
                return known[0] if known else None

    def _number_landed(self, stamps: IntArray, shown: IntArray) -> int:
        """Return how many frames are shown before the group of frames at which the packets start."""
        return int(shown[np.searchsorted(stamps, self._landed.dts)]) if self._landed is not None else 0

    def _index(self) -> tuple[IntArray, Any, IntArray] | None:
        """Return each packet's dts, whether it is a key, and the frames shown before it; None: not in the index."""
        if self._listed is not None:
            return self._listed
        stream = self.stream
        if "mp4" not in self._media.container.format.name or not stream.frames:
            return None
        entries = stream.index_entries
        if len(entries) < stream.frames:  # fragments that have not been read
            return None
        rows = [(one.timestamp, one.is_keyframe, not one.is_discard) for one in entries]
        stamps, keys, shown = np.array(rows, dtype=np.int64).T
        if not keys.any() or not keys[0]:
            return None
        self._listed = stamps, keys.astype(bool), np.concatenate([[0], np.cumsum(shown)])
        return self._listed

    def _all_times(self) -> IntArray:
        """Return the pts of all frames, sorted, from the packets of the whole file."""
        if self._times is None:
            self.restart()
            while self._look():
                self.queue.clear()
            self._times = np.array(self.ahead, dtype=np.int64)
            self.restart()
        return self._times


def _place(packet: Any) -> tuple[int | None, int]:
    """Return what identifies a packet within its stream."""
    return packet.pos, packet.pts
