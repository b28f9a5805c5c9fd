"""The video of an open file, decoded exactly where its packets tell its frames: packets and frames.

A frame is named by its presentation time (pts), in ticks of the stream. Packets come in decoding order; a packet's
decoding time (dts) is never after its pts and never falls, so once a dts beyond a time has been seen, every frame shown
up to that time is known. That is what makes seeking exact with B-frames and variable frame rates, without decoding.

A seek may land anywhere. `Packets` checks where it landed, and goes back further if needed. After a seek, frames that
precede a key frame they do not belong to (leading pictures of an open GOP) are never used.

`headers` says of which videos all this holds. Should packets or decoded frames show that it does not,
`PacketsDifferError` is raised, and the video is read by `whole`.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from energon_bridge.core.errors import DecodeError
from energon_bridge.core.order.rng import IntArray
from energon_bridge.models.av.headers import shows_frame
from energon_bridge.models.av.matroska import UnlikeError, block_times
from energon_bridge.models.av.media_file import MediaFile, length_of, rate_of, start_of
from energon_bridge.models.av.whole import WholeReader

if TYPE_CHECKING:
    pass

_NEVER = -(1 << 62)
_MOST_REORDERED = 20
"""The most packets by which any codec delays a frame; for streams without decoding times."""


class PacketsDifferError(Exception):
    """Packets and frames of a video do not agree. Never reaches users: the video is decoded from its beginning."""


class Packets:
    """The packets of the video stream of an open file.

    Attributes:
        queue: Packets that were read but not taken, in decoding order.
        ahead: The pts of the known frames after the last position, sorted.
        opening: The first packet of the file.
        landings: Number of jumps; frames that were decoded before a jump are not neighbours of those after it.
    """

    def __init__(self, media: MediaFile) -> None:
        self._media = media
        self.landings = 0
        self._end = _NEVER
        self._times: IntArray | None = None
        self._blocks: Iterator[list[int]] | None = None  # the times of a Matroska's frames, in the order of its blocks
        self._seen: list[int] = []  # those so far, sorted
        self._listed: tuple[IntArray, Any, IntArray] | None = None
        self._sought = False
        self.restart()
        self._shows = shows_frame(self.stream.codec_context.codec.canonical_name)
        self._look()
        if not self.queue or self.queue[0].size == 0:
            raise DecodeError(f"{media.name} has a video stream without frames: leave the sample out")
        self.opening = self.queue[0]
        self._first = _place(self.opening)
        if self._comes_undelayed() and not self._comes_as_shown():
            raise PacketsDifferError
        if "matroska" in media.container.format.name:
            self._blocks = block_times(media.file, self.stream.time_base, self._shows)

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

    def _comes_undelayed(self) -> bool:
        """Whether no packet of a codec that reorders frames is shown later than it is decoded, as far as times tell."""
        opening = self.opening
        if not self.stream.codec_context.has_b_frames or opening.dts not in (None, opening.pts):
            return False
        while opening.dts is None and len(self.queue) < _MOST_REORDERED and self._look():
            pass
        return all(one.pts < other.pts for one, other in pairwise(one for one in self.queue if one.size))

    def _comes_as_shown(self) -> bool:
        """Whether the first frames come out of the decoder in the order of their times: those of the packets are true.

        Programs that copy frames without their delays (from AVI) give each the time of its place in the file.
        """
        shown: list[Any] = []
        with self._media.refusing("cannot be decoded"):
            while len(shown) < _MOST_REORDERED and (packet := self.take()) is not None:
                shown += [frame.pts for frame in packet.decode()]
        self.restart()
        return None not in shown and shown == sorted(shown)

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
        """Read one more packet into the queue, and note the pts of its frame; return False at the end of the stream."""
        if self._ended:
            return False
        with self._media.refusing("cannot be read"):
            packet = next(self._demuxed, None)
            while self._landed is None and not self._at_start and packet is not None and not packet.is_keyframe:
                packet = next(self._demuxed, None)  # some containers land between key frames
        if packet is None:
            self._media.check_end()
            self._ended = True
            return False
        if not packet.size and packet.dts is None:  # tells the decoder that there are no more
            self._media.check_end()
            self.queue.append(packet)
            self._ended = True
            return True
        self.queue.append(packet)
        dts = self._dts if packet.dts is None else packet.dts
        # All that is known of frames without decoding rests on this: dts never falls, and never exceeds the pts.
        if packet.pts is None or not packet.size or not self._dts <= dts <= packet.pts:
            raise PacketsDifferError
        self._dts = dts
        self._end = max(self._end, packet.pts + (packet.duration or 0))
        if self._landed is None:
            self._landed = packet
            self._floor = _NEVER if self._at_start else packet.pts
        shows = self._shows is None or self._shows(memoryview(packet))
        if not shows and self._listed is not None:
            raise PacketsDifferError  # the index counts hidden frames, too
        if shows and not packet.is_discard:  # an MP4's edit list may leave frames out of the presentation
            # After a seek, frames before the key frame are leading pictures of an open GOP, which cannot be decoded.
            insort(self.ahead if packet.pts >= self._floor else self._leading, packet.pts)
        return True

    # Frames by time --------------------------------------------------------------------------------------------------

    def shown_at(self, time: int) -> int | None:
        """Return the pts of the last frame up to a time (ticks), after reading until no earlier frame can follow."""
        while self._dts <= time and (len(self.ahead) - bisect_right(self.ahead, time)) < _MOST_REORDERED:
            if not self._look():
                break
        place = bisect_right(self.ahead, time)
        return self.ahead[place - 1] if place else None

    def after(self, time: int) -> int | None:
        """Return the pts of the first frame after a time (ticks), None if there is none."""
        while True:
            place = bisect_right(self.ahead, time)
            next_time = self.ahead[place] if place < len(self.ahead) else None
            if next_time is not None and (self._dts >= next_time or len(self.ahead) - place > _MOST_REORDERED):
                return next_time
            if not self._look():
                return next_time

    def go_to(self, time: int) -> int | None:
        """Go to where the frame shown at a time (or else the first one) can be decoded, and return it.

        Returns None if there are no frames, as in a damaged file.
        """
        aim = time
        further = 0
        while aim > self._first[1] or aim == time:
            reached = self._seek(aim)
            shown = self.shown_at(time) if reached else None
            if shown is not None:
                return shown
            if self._at_start:
                return self.after(time)
            # Landed too late: by the reordering of frames, or by a whole group.
            landed = min(self._landed.pts, self._landed.dts or self._landed.pts) if reached else aim
            aim = min(aim, landed) - 1 - further
            further = 2 * further + 1  # by 1, 2, 4, ... ticks more each time, so that few seeks pass long groups
        self.restart()
        shown = self.shown_at(time)
        return self.after(time) if shown is None else shown

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
        """Return the number of frames that are shown; reads the whole file unless its index lists them all."""
        index = self._index()
        return len(self._all_times()) if index is None else int(index[2][-1])

    def length(self) -> Fraction:
        """Return the duration of the video in seconds; reads the whole file."""
        if self._blocks is not None:  # packets alone tell when the last frame ends
            self._blocks = self._times = None
        times = self._all_times()
        if not len(times):
            return Fraction(0)
        span = int(times[-1] - times[0])
        if self._end <= times[-1] and len(times) > 1:  # containers without durations: the last frame as all others
            return Fraction(span * len(times), len(times) - 1) * self.stream.time_base
        return Fraction(self._end - int(times[0])) * self.stream.time_base

    def time_of(self, number: int) -> int | None:
        """Return the pts of a frame by its number, None after the last one; the packets are left anywhere."""
        index = self._index()
        if index is None:
            times = self._first_times(number)
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

    def times_of(self, numbers: Sequence[int], slack: int = 0) -> list[int | None]:
        """Return the pts of frames by their numbers, None for those after the last one; they may be off by some ticks.

        Reads the whole file (a Matroska: up to the last of them), unless the index shows that frames are decoded in the
        order in which they are shown, or are shown at equal distances.
        """
        index = self._index()
        opening = self.opening
        if index is None:
            times = self._first_times(max(numbers, default=0))
        else:
            stamps, _, shown = index
            line = np.linspace(stamps[0], stamps[-1], len(stamps))
            if opening.dts == opening.pts == stamps[0]:  # frames that are shown earlier would need an earlier dts
                times = stamps[np.diff(shown) > 0]
            elif np.abs(stamps - line).max() <= slack:
                times = (self.time_of(0) or 0) - stamps[0] + line[: shown[-1]].round().astype(np.int64)
            else:
                times = self._all_times()
        return [int(times[number]) if number < len(times) else None for number in numbers]

    def _number_landed(self, stamps: IntArray, shown: IntArray) -> int:
        """Return the number (from 0) of the first frame of the group of pictures at which the packets start."""
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
        if not keys[0] or (self._shows is not None and not _are_even(stamps)):
            return None
        self._listed = stamps, keys.astype(bool), np.concatenate([[0], np.cumsum(shown)])
        return self._listed

    def _first_times(self, last: float) -> Sequence[int] | IntArray:
        """Return the pts of frames, sorted: of all, or by the blocks of a Matroska, of those up to a number."""
        with self._media.refusing("cannot be read"):
            try:
                while self._blocks is not None and self._times is None:
                    if len(self._seen) > last + _MOST_REORDERED:  # none that is still to come is shown before
                        return self._seen
                    times = next(self._blocks, None)
                    if times is None:
                        self._media.check_end()
                        self._times = np.array(self._seen, dtype=np.int64)
                    else:
                        self._seen += times
                        self._seen.sort()
            except UnlikeError:
                self._blocks = None
        return self._all_times()

    def _all_times(self) -> IntArray:
        """Return the pts of all frames, sorted, from the blocks or packets of the whole file."""
        if self._times is None and self._blocks is not None:
            self._first_times(math.inf)
        if self._times is None:
            self.restart()
            while self._look():
                self.queue.clear()
            self._times = np.array(self.ahead, dtype=np.int64)
            self.restart()
        return self._times


def _are_even(stamps: IntArray) -> bool:
    """Whether all frames last equally long, but for rounding. If not, hidden frames may have packets of their own."""
    steps = np.diff(stamps)
    return len(steps) == 0 or int(np.ptp(steps)) <= min(1, int(steps.min()) // 16)


def _place(packet: Any) -> tuple[int | None, int]:
    """Return byte position and pts of a packet: equal if the same packet is read again after a seek."""
    return packet.pos, packet.pts


# Frames ---------------------------------------------------------------------------------------------------------------
#
# Identical to those from decoding the whole file. Frames before the first one requested are decoded only if others
# refer to them. Clips that follow each other closely are decoded in one go; the last decoded frames are kept, since two
# clips may share a frame.


_SKIPPABLE = ("h264", "hevc")
"""Codecs whose packets show, before decoding, whether other frames refer to them."""
_X264 = re.compile(rb"x264 - core (\d+)")
_X264_HEADER_BYTES = 2048
"""Bytes of the first packet that are searched for the version of x264."""


class VideoReader:
    """Reads frames of the video stream of an open file; times are ticks of the stream."""

    def __init__(self, media: MediaFile) -> None:
        self._media = media
        self.packets = packets = Packets(media)
        self.base: Fraction = packets.stream.time_base
        self.time_of = packets.time_of
        self.times_of = packets.times_of
        self.after = packets.after
        self.length = packets.length
        self._ready: deque[Any] = deque()
        self._last: Any = None
        self._landings = 0

    @property
    def count(self) -> int:
        """Return the number of frames; reads the whole file if its index does not list them all."""
        return self.packets.count

    def frame_at(self, time: int) -> int | None:
        """Return the pts of the frame shown at a time, or else of the first one; None if there are no frames."""
        packets = self.packets
        self._settle()
        decoded = None if self._last is None else int(self._last.pts)
        if not packets.is_near(time, decoded):
            shown = packets.go_to(time)
            self._settle()
            return shown
        shown = packets.shown_at(time)
        if shown is None:
            return packets.after(time) if decoded is None else decoded
        return shown

    def _settle(self) -> None:
        """Forget decoded frames if the packets have jumped since: they are no neighbours of those to come."""
        if self._landings != self.packets.landings:
            self._landings = self.packets.landings
            self._ready.clear()
            self._last = None
            self._prime()

    def _prime(self) -> None:
        """Give the decoder of H.264 the version of x264 that encoded the file, which only the first packet has.

        FFmpeg reproduces faults of some versions, as of 4:4:4 before 151: else frames after a seek are garbage.
        """
        context = self.packets.stream.codec_context
        if context.name == "h264" and not context.is_open:
            version = _X264.search(memoryview(self.packets.opening)[:_X264_HEADER_BYTES])
            context.options = {"x264_build": version[1].decode()} if version else {}

    def frames(self, first: int) -> Iterator[Any]:
        """Yield the frames from the pts on that `frame_at` has just returned."""
        expected: int | None = first
        if self._last is not None and self._last.pts == first:
            yield self._last
            expected = self.packets.after(first)
        while (frame := self._next(first)) is not None:
            if frame.pts is None or frame.pts >= first:
                if frame.pts != expected:
                    raise PacketsDifferError
                self._last = frame
                yield frame
                expected = self.packets.after(frame.pts)
        if expected is not None:
            raise PacketsDifferError

    def _next(self, first: int) -> Any:
        packets = self.packets
        context = self.packets.stream.codec_context
        skips = context.name in _SKIPPABLE
        while not self._ready:
            packet = packets.take()
            if packet is None:
                return None
            if skips and packet.size:
                context.skip_frame = "NONREF" if packet.pts < first else "DEFAULT"
            with self._media.refusing("cannot be decoded"):
                self._ready.extend(packet.decode())
        return self._ready.popleft()

    def end_of(self, frame: Any) -> int:
        """Return when a frame is no longer shown."""
        after = self.packets.after(frame.pts)
        return int(frame.pts + self.duration_of(frame)) if after is None else after

    def duration_of(self, frame: Any) -> int:
        """Return the duration of the last frame of a file: its own, or else the mean frame duration."""
        rate = rate_of(self.packets.stream)
        return int(frame.duration or (round(1 / rate / self.base) if rate else 0))


FrameReader = VideoReader | WholeReader


def is_over(media: MediaFile, reader: FrameReader, begin: Fraction, until: int) -> bool:
    """Return whether a video ends before a clip begins; `until` is the end of the last frame found.

    Headers may claim up to one frame more than there is; if more is missing, the file was cut off.
    """
    if begin < until * reader.base:
        return False
    stream = media.stream("video")
    length = length_of(media, stream)
    frame = 1 / (rate_of(stream) or 1)
    return length is None or begin >= start_of(stream) + length or begin > until * reader.base + frame


def beyond(media: MediaFile, asked: str, there: str) -> DecodeError:
    """Return the error for a clip that begins after the end of a video."""
    stream = media.stream("video")
    length = length_of(media, stream)
    says = "" if length is None else f" (its headers say {float(start_of(stream) + length):g} s)"
    return DecodeError(
        f"{media.name}: a clip begins at {asked}, but the video ends after {there}{says}: check get_video_duration() "
        "before you choose clips; if the headers claim a longer video, the file is cut off"
    )
