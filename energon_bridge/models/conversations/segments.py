"""What an entry or a part says of its image, video or sound: a segment of it, and the options of qwen-vl-utils.

    clip, segment, timestamps, …: [1.0, 2.5]; start and end, video_start and video_end, …      seconds in the file
    offset, duration                                                                           likewise, as NeMo's
    fps, nframes, min_frames, max_frames                                                       frames of a video
    min_pixels, max_pixels, total_pixels, resized_height, resized_width                        the size of its pictures

A segment has what is shown or heard from its begin on and before its end. In an entry it is that of its video, or of
its sound if it has no video; `clips` and `segments` give one for each of several.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from energon_bridge.core.errors import SampleError
from energon_bridge.models.conversations.places import Medium

_RANGES = (
    *("clip", "segment", "timestamps", "timestamp", "time_range", "span", "clip_range", "video_clip", "interval"),
    *("video_segment", "audio_segment", "moment", "clips", "segments"),
    *(_LOOSE := ("window", "time_window", "trim", "time_span", "time_interval")),  # may be something else, too
)
_STARTS = (
    *("start", "video_start", "audio_start", "clip_start", "segment_start", "start_time", "t_start", "time_start"),
    *("start_timestamp", "timestamp_start", "start_ts"),
)
_BEGINS = tuple(
    f"{name}{unit}"
    for name in (*_STARTS, "begin", "begin_time", "begin_timestamp", "from", "from_time", "onset", "offset")
    for unit in ("", "_sec", "_secs", "_second", "_seconds", "_s", "_ms")
    if f"{name}{unit}" != "from"  # who speaks
)
_OPPOSITES = (
    *(("start", "end"), ("start", "stop"), ("start", "finish")),
    *(("begin", "end"), ("begin", "stop"), ("begin", "finish"), ("from", "to")),
)
_ENDS = tuple(dict.fromkeys(name.replace(one, other) for name in _BEGINS for one, other in _OPPOSITES if one in name))
_ONLY_BESIDE = ("stop", "finish")
"""Ends only beside a begin: alone they are stops of a bus, and what a chair is painted with."""
_LENGTHS = ("duration", "duration_sec", "duration_seconds", "duration_ms")
_IN_FRAMES = ("start_frame", "end_frame", "frame_start", "frame_end", "frame_range", "video_start_frame")
_PIXELS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
_FRAMES = ("fps", "nframes", "min_frames", "max_frames", "total_pixels")

OPTIONS: Mapping[Medium, frozenset[str]] = {
    "image": frozenset(_PIXELS),
    "video": frozenset((*_PIXELS, *_FRAMES, *_RANGES, *_BEGINS, *_ENDS, *_LENGTHS)),
    "audio": frozenset((*_RANGES, *_BEGINS, *_ENDS, *_LENGTHS)),
}
"""Keys by which a part of a message limits its medium: to a segment, a number of frames, a size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaOptions:
    """Options of an image, video or sound: its segment in seconds, the number of frames, and their size in pixels."""

    begin: float = 0.0
    end: float | None = None
    fps: float | None = None
    nframes: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None

    @property
    def is_segment(self) -> bool:
        """Whether it is a part of its file only."""
        return self.begin > 0 or self.end is not None

    @property
    def resizes(self) -> bool:
        """Whether the size of pictures is given."""
        return any(getattr(self, name) is not None for name in (*_PIXELS, "total_pixels"))


def part_options(part: Mapping[str, Any], kind: Medium) -> MediaOptions | None:
    """Return the options in a part or turn for its medium; None without any. Raises SampleError."""
    given = {name: part[name] for name in OPTIONS[kind] if part.get(name) is not None}
    if not given:
        return None
    begin, end = _segment(given, is_part=True) or (0.0, None)
    numbers: dict[str, Any] = {}
    for name in (*_PIXELS, *_FRAMES):
        if name in given:
            value = _number(given[name])
            if value is None or value <= 0 or (name != "fps" and not value.is_integer()):
                raise SampleError(f"a part of a message has {name}={given[name]!r}: expected a positive number")
            numbers[name] = value if name == "fps" else int(value)
    if "fps" in numbers and "nframes" in numbers:
        raise SampleError("a part of a message has both fps and nframes: give one of them")
    if len({"resized_height", "resized_width"} & numbers.keys()) == 1:
        raise SampleError("a part of a message has one of resized_height and resized_width: give both")
    assert {*numbers} <= {entry.name for entry in fields(MediaOptions)}
    return MediaOptions(begin=begin, end=end, **numbers)


def entry_segments(entry: Mapping[str, Any], there: Mapping[Medium, int]) -> tuple[Medium, list[MediaOptions]] | None:
    """Return the segments that the fields of an entry give to its videos, or to its sounds; None if they give none.

    Args:
        entry: It may have other fields.
        there: How many videos and sounds it has.

    Raises:
        SampleError: They are not understood, or it is not clear whose they are.
    """
    kind: Medium | None = "video" if there.get("video") else "audio" if there.get("audio") else None
    if kind is None:
        return None
    if name := next((name for name in _IN_FRAMES if entry.get(name) is not None), None):
        raise SampleError(f"`{name}` counts frames of the {kind}: write the seconds of its segment, as start and end")
    count = there[kind]
    for name in _RANGES:
        value = entry.get(name)
        if isinstance(value, list | tuple) and value and all(_range(one) is not None for one in value):
            if len(value) != count:
                raise SampleError(f"`{name}` has {len(value)} segments for {count} {kind}s: give one for each")
            ranges = [_range(one) for one in value]
            return kind, [MediaOptions(begin=one[0], end=one[1]) for one in ranges if one is not None]
    found = _segment(entry, is_part=False)
    if found is None:
        return None
    if count > 1:
        raise SampleError(
            f"the segment from {found[0]} s to {found[1]} s may be that of any of {count} {kind}s: give each its own, "
            "as segments: [[begin, end], …]"
        )
    return kind, [MediaOptions(begin=found[0], end=found[1])]


def _segment(given: Mapping[str, Any], *, is_part: bool) -> tuple[float, float | None] | None:
    """Return begin and end of a segment. Raises SampleError for one that is not understood, or is given twice."""
    found = _given_ranges(given) + _given_ends(given, is_part=is_part)
    if not found:
        return None
    if len({one for _, one in found}) > 1:
        raise SampleError(f"a segment is given twice, by {' and by '.join(name for name, _ in found)}: give it once")
    name, (begin, end) = found[0]
    if begin < 0 or (end is not None and end <= begin):
        raise SampleError(f"`{name}` gives a segment from {begin:g} s to {end} s: it must end behind its begin")
    return begin, end


def _given_ranges(given: Mapping[str, Any]) -> list[tuple[str, tuple[float, float | None]]]:
    """Return the segments that are given by one key, such as `span`, with the names of these."""
    found: list[tuple[str, tuple[float, float | None]]] = []
    for name in _RANGES:
        value = given.get(name)
        is_list = isinstance(value, list | tuple) and all(isinstance(one, Mapping) for one in value)
        if value is None or value == "" or is_list:  # of a transcript
            continue
        if (one := _range(value)) is None:
            if name in _LOOSE or (
                isinstance(value, str) and name in ("timestamp", "timestamps", "moment", "span", "segment")
            ):
                continue  # a date, or the name of a part of the set
            raise SampleError(f"`{name}` is {str(value)[:100]!r}: expected the seconds of a segment, [begin, end]")
        found.append((name, one))
    return found


def _given_ends(given: Mapping[str, Any], *, is_part: bool) -> list[tuple[str, tuple[float, float | None]]]:
    """Return the segment that is given by a begin, an end or a length, with their names; an empty list: none is."""
    begins = [name for name in _BEGINS if given.get(name) is not None]
    ends = [name for name in _ENDS if given.get(name) is not None and (begins or name not in _ONLY_BESIDE)]
    lengths = [name for name in _LENGTHS if given.get(name) is not None] if begins or is_part else []
    lengths = [] if ends else lengths
    if not (begins or ends or lengths):
        return []
    names = (*begins[:1], *ends[:1], *lengths[:1])
    values = {name: _seconds(name, given[name]) for name in names}
    begin = values[begins[0]] if begins else 0.0
    end = values[ends[0]] if ends else begin + values[lengths[0]] if lengths else None
    if len(begins) > 1 or len(ends) > 1:
        raise SampleError(f"a segment is given twice, by {', '.join((*begins, *ends))}: give begin and end once")
    return [(" and ".join(names), (begin, end))]


def _range(value: Any) -> tuple[float, float] | None:
    if isinstance(value, str):
        value = re.split(r"\s*(?:-|–|,|to)\s*", value.strip("[]() "))
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    begin, end = map(_time, value)
    return None if begin is None or end is None or end <= begin or begin < 0 else (begin, end)


def _seconds(name: str, value: Any) -> float:
    time = _time(value)
    if time is None:
        raise SampleError(f"`{name}` is {str(value)[:100]!r}: expected seconds, or hours:minutes:seconds")
    return time / 1000 if name.endswith("_ms") else time


def _time(value: Any) -> float | None:
    if isinstance(value, str) and re.fullmatch(r"(\d+:)?\d{1,2}:\d{1,2}([.,]\d+)?", value.strip()):
        seconds = 0.0
        for piece in value.strip().replace(",", ".").split(":"):
            seconds = 60 * seconds + float(piece)
        return seconds
    return _number(value)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if number == number and abs(number) != float("inf") else None
