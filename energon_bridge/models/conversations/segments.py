"""What an entry or a part says of its image, video or sound: a segment of it, and the options of qwen-vl-utils.

    clip, segment, timestamps, …: [1.0, 2.5]; start and end, video_start and video_end, …      seconds in the file
    offset, duration                                                                           likewise, as NeMo's
    fps, nframes, min_frames, max_frames                                                       frames of a video
    min_pixels, max_pixels, total_pixels, resized_height, resized_width                        the size of its pictures

In an entry, fps and nframes may be what its file has: a warning names them, and frames are taken by those of parts.

A segment has what is shown or heard from its begin on and before its end. In an entry it is that of its video, or of
its sound if it has no video; beside both, its name must say `video`. `clips` and `segments` give one for each of
several. `Start Time` is `start_time`.

What looks like a span of times under another name (`relevant_windows`, `ts`, a `start` and `end` inside `metadata`) is
an error beside a video or sound, which would be learned whole; but if the texts say these times, it is their answer.
So is another part of a file, which is never cut out:

    crop, roi, region: [x, y, w, h]                                                        beside an image, a video
    boxes, regions, objects, …                                            beside texts with `<boxes>`, `<region1>`, …
    question_time, frame_time, realtime: 12.5                                              beside a video or sound
    frame_indices: [8, 16], frame_idx: 8                                                   beside a video, a GIF
    channel: 1                                                                             beside a sound
    page: 2                                                                                beside a TIFF
    tile_index: 2; image_index: 1                                                          beside an image; several

One `bbox` beside a caption or a question may be what that is about, or its answer: a warning names it. So it does what
would change a medium or how much its sample counts (`rotation`, `flip`, `speed`, a `weight` of 0.5), which is not
applied, and a `label` of 0 beside turns.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise
from shlex import quote
from typing import Any, Literal

from energon_bridge.core.errors import SampleError
from energon_bridge.core.format.media import kind_by_name
from energon_bridge.core.samples.sample_place import warn_once
from energon_bridge.models.conversations.places import Medium, spelled
from energon_bridge.models.conversations.questions import is_metadata, texts_in
from energon_bridge.models.conversations.withheld import is_weight

_Span = tuple[float, float]

_RANGES = (
    *("clip", "segment", "timestamps", "timestamp", "time_range", "span", "clip_range", "video_clip", "interval"),
    *("video_segment", "audio_segment", "moment", "clips", "segments"),
    *(_LOOSE := ("window", "time_window", "trim", "time_span", "time_interval")),  # may be something else, too
)
_NAMES = ("timestamp", "timestamps", "moment", "span", "segment")
"""Ranges whose text may be a date, or the name of a part of the set."""
_ENDS = {
    "start": ("end", "stop", "finish"),
    "begin": ("end", "stop", "finish"),
    "from": ("to",),
    "onset": ("end",),
    "seek": ("to",),
}
_BEGINS = (*_ENDS, "offset")
_ALL_ENDS = ("end", "stop", "finish", "to")
_ONLY_BESIDE = ("stop", "finish", "to")
"""Ends only beside a begin: alone they are stops of a bus, and what a chair is painted with."""
_OPPOSITES = (
    *((one, other) for one, ends in _ENDS.items() for other in ends),
    *(
        ("onset", "offset"),
        ("starting", "ending"),
        ("beginning", "ending"),
        ("first", "last"),
        ("s", "e"),
        ("st", "ed"),
    ),
    *(("st", "et"), ("ss", "se"), ("seek", "to"), ("t0", "t1"), ("t1", "t2"), ("tmin", "tmax"), ("ss", "to")),
    *(("in", "out"), ("since", "until")),
)
_UNITS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("ms", "msec", "millisecond", "milliseconds"), 1e-3),
}
_OF_SEGMENTS = ("clip", "segment", "seg", "timestamp", "ts", "t", "window", "span", "moment")
_SCOPES = frozenset(("video", "audio", "sound", "time", *_OF_SEGMENTS, *_UNITS))
_OF_SPANS = frozenset(
    (*_SCOPES, "range", "interval", "event", "temporal", "trim", "cut", "slice", "period", "frame", "boundary", "scene")
) - {*_UNITS}
_OF_OTHERS = {
    *("size", "resolution", "shape", "dim", "dimension", "bbox", "box", "rect", "point", "coord", "coordinate"),
    *("position", "pos", "indices", "xy", "keypoint", "polygon", "id", "score", "count", "num", "fps", "rate"),
    *("height", "pixel", "ratio", "aspect", "label", "class", "page", "char", "character", "token", "word", "line"),
    *("year", "date", "day", "month", "version", "lat", "lon", "rank", "level", "weight", "channel", "answer"),
    *("option", "choice", "rating", "vote", "volume", "price", "temperature", "byte", "row", "column", "layer"),
    *("prob", "logprob", "embedding", "vector", "feature", "scale", "crop", "age", "speed", "name"),
    *("wh", "hw", "width", "gps", "geo", "latlon", "lonlat", "latlong", "lng", "long"),
}
"""Words of names of pairs of numbers that are no times."""
_LATEST_SECONDS = 1e7
_LONGEST_TEXT = 10_000
"""Longer JSON is no segment, but a transcript or a conversation."""
_PIXELS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
_FRAMES = ("fps", "nframes", *(_OF_VIDEOS := ("min_frames", "max_frames", "total_pixels")))


_MOMENT = re.compile(
    r"(at|question|query|ask|frame|cut|current)_time(_?stamp)?|real_?time|(at_|time_)?second|frame_(ts|sec)"
)
"""Names of one time: that of the question, or of the frame that it is about."""


# Names ----------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _words(name: str) -> tuple[str, ...]:
    """Return the words of a name: `startTime`, `start-time` and `Start Time` are two."""
    return tuple(filter(None, re.split(r"[\W_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())))


@lru_cache(maxsize=4096)
def segment_meaning(name: str) -> Literal["range", "begin", "end", "length", "frames"] | None:
    """Return what a name says of a segment; None: nothing that is known."""
    words = _words(name)
    bounds = [word for word in words if word in _BEGINS or word in _ALL_ENDS]
    if "_".join(words).replace("time_stamp", "timestamp") in _RANGES:
        return "range"
    if not {"frame", "frames"}.isdisjoint(words) and (bounds or "range" in words):
        return "frames"
    others = {*words} - {*bounds}
    if words[:1] == ("duration",) or words[1:2] == ("duration",):
        return "length" if others <= {"duration", "clip", "segment", "seg", *_UNITS} else None
    if len(bounds) != 1 or not others <= _SCOPES or words == ("from",):  # who speaks
        return None
    if bounds[0] == "offset" and not others <= _UNITS.keys():
        return None
    return "begin" if bounds[0] in _BEGINS else "end"


def is_option(name: str, kind: Medium) -> bool:
    """Return whether a key of a part limits its medium: to a segment, a number of frames, a size."""
    if kind == "image":
        return name in _PIXELS
    return (kind == "video" and (name in _PIXELS or name in _FRAMES)) or segment_meaning(name) not in (None, "frames")


def is_used_option(name: str) -> bool:
    """Return whether a field of an entry may limit its media: to a segment, a number of frames, a size."""
    return name in _PIXELS or name in _OF_VIDEOS or segment_meaning(name) is not None


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
    given = {name: value for name, value in part.items() if is_option(name, kind) and not _is_missing(value)}
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


def entry_options(entry: Mapping[str, Any], there: Mapping[Medium, int]) -> dict[Medium, MediaOptions]:
    """Return the options that the fields of an entry give to its images or videos: the number of frames, their size.

    Raises:
        SampleError: They are not understood, or may be those of images as well as of videos.
    """
    of_video = bool(there.get("video"))
    kind: Medium | None = "video" if of_video else "image" if there.get("image") else None
    names = (*_PIXELS, *(_OF_VIDEOS if of_video else ())) if kind else ()
    given = {name: value for name in names if not _is_missing(value := entry.get(name))}
    sizes = [name for name in given if name in _PIXELS]
    if of_video and there.get("image") and sizes:
        raise SampleError(f"`{sizes[0]}` may be that of images or of videos: write it into the parts of those")
    options = part_options(given, kind) if kind and given else None
    return {} if kind is None or options is None else {kind: options}


def entry_segments(
    entry: Mapping[str, Any], there: Mapping[Medium, int], extensions: Iterable[str] = ()
) -> tuple[Medium, list[MediaOptions]] | None:
    """Return the segments that the fields of an entry give to its videos, or to its sounds; None if they give none.

    Args:
        entry: It may have other fields.
        there: How many images, videos and sounds it has.
        extensions: Those of its files.

    Raises:
        SampleError: They are not understood, or it is not clear whose they are.
    """
    check_parts(entry, there, extensions)
    kind: Medium | None = "video" if there.get("video") else "audio" if there.get("audio") else None
    if kind is None:
        return None
    given = {
        name: value for name, value in entry.items() if segment_meaning(name) is not None and not _is_missing(value)
    }
    if name := next((name for name in given if segment_meaning(name) == "frames"), None):
        raise SampleError(f"`{name}` counts frames of the {kind}: write the seconds of its segment, as start and end")
    for name, value in entry.items():
        time = _time(value) if _MOMENT.fullmatch("_".join(_words(name))) else None
        if time and not _are_written([time], entry, [name]):
            raise SampleError(
                f"`{name}` is {str(value)[:100]!r}, one time in the {kind}, and all of it would be learned: cut it, as "
                f"segment: [begin, end], or {_without(name)}"
            )
    for name, value in _of_turns(entry):
        time = _time(value) if name in ("time", "timestamp") or _MOMENT.fullmatch("_".join(_words(name))) else None
        if time and not _is_missing(value) and not _are_written([time], entry, [name]):
            raise SampleError(
                f"a turn has `{name}` {str(value)[:100]!r}, one time in the {kind}, which the model would not see: it "
                "would be shown all of it. Make a sample of each such turn, with its segment: [begin, end], or leave "
                "the key out"
            )
    segments = _listed_segments(given, kind, there[kind])
    if not segments and (found := _segment(given, is_part=False)) is not None:
        if there[kind] > 1:
            raise SampleError(
                f"the segment from {found[0]} s to {found[1]} s may be that of any of {there[kind]} {kind}s: give each "
                "its own, as segments: [[begin, end], …]"
            )
        segments = [found]
    names = [name for name in given if segment_meaning(name) != "length"]
    if segments and kind == "video" and there.get("audio") and not any("video" in _words(name) for name in given):
        raise SampleError(
            f"`{names[0]}` may be of the video, of the sound or of both: for the video alone, write video_start and "
            f"video_end; for both, write it into their parts of a message; or {_without(*given)}"
        )
    if segments and _are_said([(begin, end or begin) for begin, end in segments], entry, names):
        raise SampleError(
            f"`{names[0]}` gives a segment of the {kind}, and the texts say its times: for the whole {kind} to be "
            f"learned, with the times as its answer, {_without(*names)}; if not, write the texts without them"
        )
    used = given if segments else {}
    for name, spans in _spans({name: value for name, value in entry.items() if name not in used or _is_nested(value)}):
        column = name.partition(".")[0]
        if not _are_said(spans, entry, [column]):
            raise SampleError(
                f"`{name}` looks like a segment of the {kind} (from {spans[0][0]:g} to {spans[0][1]:g}), and the whole "
                f"{kind} would be learned: write the seconds beside the {kind}, as segment: [begin, end], or "
                f"{_without(column)}"
            )
    return (kind, [MediaOptions(begin=begin, end=end) for begin, end in segments]) if segments else None


def _of_turns(entry: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys of the turns of an entry, with their values."""
    for name in ("messages", "conversations", "conversation", "texts", "qa_pairs", "qas", "qa"):
        turns = entry.get(name)
        for turn in turns if isinstance(turns, list | tuple) else ():
            yield from turn.items() if isinstance(turn, Mapping) else ()


def check_unseen(said: Mapping[str, Any], what: str) -> None:
    """Raise SampleError if an object has what looks like a segment where none is read, in a turn or beside a path."""
    if name := next((name for name, _ in _spans(said)), None):
        raise SampleError(
            f"{what} has `{name}`, which looks like a segment and would not be seen: write it into the part of its "
            'video or sound, as {"type": "video", "video": PATH, "segment": [begin, end]}, or beside the turns'
        )


# Parts that are never cut out -----------------------------------------------------------------------------------------

_Part = Literal["region", "box", "frame", "page", "channel", "tile", "choice"]
_REGIONS = frozenset(("crop", "roi", "region"))
_BOXES = frozenset(("bbox", "box", "bndbox", "rect", "rectangle"))
_OF_REGIONS = _BOXES | {"xyxy", "xywh", "coord", "coordinate", "image", "img", "bounding", "norm", "target"}
_TEXTS = (
    *("caption", "captions", "text", "description", "question", "query", "instruction", "prompt"),
    *("messages", "conversations"),
)
_CORNERS = (
    *(("x", "y", "w", "h"), ("x", "y", "width", "height"), ("x1", "y1", "x2", "y2"), ("xmin", "ymin", "xmax", "ymax")),
    *(("left", "top", "right", "bottom"), ("left", "top", "width", "height"), ("x0", "y0", "x1", "y1")),
)
_PLACES = {
    *("idx", "index", "indice", "id", "number", "no", "selector"),
    *("video", "audio", "image", "key", "sampled", "selected"),
}
_WHICH = re.compile(
    r"(?:target|correct|main|query)?_?(?:image|img|picture|photo|video|audio|sound)s?_(?:index|idx|indices|indexes)"
)
"""Names of the number of one of several files."""
_SIDES = ("left", "right", "a", "b")


@lru_cache(maxsize=4096)
def part_meaning(name: str) -> _Part | None:
    """Return which part of a file a name may give; None: nothing known."""
    words = _words(name)
    stems = {word.removesuffix("s") for word in words}
    if stems & _REGIONS and stems <= _REGIONS | _OF_REGIONS:
        return "region"
    if stems & _BOXES or words in (("point",), ("click",), ("coordinate",), ("coordinates",)):
        return "box"
    if words in (("tile",), ("tile", "index"), ("tile", "idx")):
        return "tile"
    if _WHICH.fullmatch("_".join(words)):
        return "choice"
    if not stems - {"frame", "keyframe", "page", "channel"} <= _PLACES:
        return None
    known: Sequence[tuple[str, _Part]] = (("frame", "frame"), ("keyframe", "frame"), ("page", "page"))
    return next((part for word, part in (*known, ("channel", "channel")) if word in stems), None)


@lru_cache(maxsize=256)
def _parts_named(columns: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], _Part], ...]:
    """Return what may be parts of files, judging by the names; the sides of a box may be columns of their own."""
    found: list[tuple[tuple[str, ...], _Part]] = []
    found += [((name,), part) for name in columns if (part := part_meaning(name)) is not None]
    corners = next((names for names in _CORNERS if {*names} <= {*columns}), None)
    return (*found, *([(corners, "box")] if corners is not None else ()))


def check_parts(entry: Mapping[str, Any], there: Mapping[Medium, int], extensions: Iterable[str]) -> None:
    """Raise SampleError if an entry names a part of a file that is learned whole; warn, once, of what may be one.

    `extensions` are those of its files: a page is a part of a TIFF, a frame one of a GIF.
    """
    _check_marks(entry, there)
    _name_changes(entry, there)
    for names, part in _parts_named(tuple(entry)):
        value = entry[names[0]] if len(names) == 1 else [entry[name] for name in names]
        numbers = _box(value, part) or [] if part in ("region", "box") else _whole_numbers(value)
        of_kind: Medium = "audio" if part == "channel" else "image"
        if part == "region" and not there.get("image"):
            of_kind = "video"
        is_count = not isinstance(value, list | tuple) and not {"frames", "channels"}.isdisjoint(_words(names[0]))
        if part == "frame" and there.get("video"):
            of_kind = "video"
            is_part = bool(numbers)
        elif part == "channel":
            is_part = str(value).strip().lower() in _SIDES or max(numbers, default=0) > 0
            if not is_part and numbers and not is_count and there.get(of_kind):  # how many there are is not known here
                _warn(names[0], "0, as the first channel of its audio, which is not cut to it: all are averaged")
        elif part == "tile":
            is_part = bool(numbers)
        elif part == "choice":
            is_part = _chooses(numbers, max(there.values(), default=0))
        elif part in ("frame", "page"):
            is_part = max(numbers, default=0) > 0 and not {*extensions}.isdisjoint(("tif", "tiff", "gif"))
        else:
            is_part = bool(numbers) and (part == "region" or any(entry.get(name) for name in _TEXTS))
        if not is_part or is_count or not there.get(of_kind) or (numbers and _are_written(numbers, entry, names)):
            continue
        if part == "box":
            _warn(
                ", ".join(names),
                f"a place in its image ({', '.join(f'{one:g}' for one in numbers)}), which is learned whole: if the "
                "texts are about that place, cut the images beforehand, or write the numbers into the texts",
            )
            continue
        if part == "choice":
            raise SampleError(
                f"`{names[0]}` is {str(value)[:100]}, which seems to say which of the files the texts are about, and "
                f"all are shown: list only these, or, for all to be shown, {_without(names[0])}"
            )
        raise SampleError(
            f"`{names[0]}` is {str(value)[:100]}, which seems to be a {part} of the {of_kind}, and that is not cut to "
            f"it: do so beforehand; without the column, the texts are learned with the {of_kind} as it is: "
            f"{_without(names[0])}"
        )


def _chooses(numbers: Sequence[float], count: int) -> bool:
    """Return whether numbers, from 0 or 1, are those of some of several files; larger ones are ids."""
    return count > 1 and 0 < len(numbers) < count and min(numbers) >= 0 and max(numbers) <= count


def _check_marks(entry: Mapping[str, Any], there: Mapping[Medium, int]) -> None:
    """Raise SampleError for places in texts that a column is to fill: objects (`<bbox>`), or keys of it (`<s0>`)."""
    columns = {name: mark for name, value in entry.items() if (mark := _marks_of(value)) is not None}
    if there.get("image") or "objects" in entry:  # of ms-swift
        objects = (one for one in entry if _OF_OBJECTS & _kinds(one) and str(entry[one]).startswith(("[", "{", "(")))
        columns = {**dict.fromkeys(objects, _MARK), **columns}
    if not columns:
        return
    beside = [value for name, value in entry.items() if name not in columns]
    texts = [text for text in texts_in(beside) if "<" in text and not _CLOSED.search(text)]
    for name, mark in columns.items():
        if (found := next(filter(None, map(mark.search, texts)), None)) is not None:
            raise SampleError(
                f"has `{name}` for the places {found[0]!r} in its texts, which would be learned as they are: write "
                "what they stand for into the texts, as the model has it; for the texts to be learned as they are, "
                f"{_without(name)}"
            )


def _marks_of(value: Any) -> re.Pattern[str] | None:
    """Return what finds the keys of objects in a value that are places (`{"<s0>": 2.6}`, of VTimeLLM); not of files."""
    if not isinstance(value, Mapping):
        return None
    inner = [pattern.pattern for one in value.values() if (pattern := _marks_of(one)) is not None]
    keys = (str(key) for key in value if _PLACE.fullmatch(str(key)) and not spelled(str(key)))
    found = [*map(re.escape, keys), *inner]
    return re.compile("|".join(found)) if found else None


_PLACE = re.compile(r"<[^<>\s/]+>")
_OF_OBJECTS = frozenset(
    ("object", "bbox", "bboxes", "box", "boxes", "region", "annotation", "mask", "point", "polygon")
)
_MARK = re.compile(r"<(?:ref-object|bbox|bboxes|box|boxes|points?|(?:region|mask|obj|object)s?[ _-]?\d*)>")
_CLOSED = re.compile(r"</(?:bbox|box|points?|region|mask|obj|object)>")  # around the numbers themselves


def _warn(name: str, said: str) -> None:
    """Log what may be meant by a value beside texts, once for a name."""
    warn_once(_logger, f"`{name}` of a sample is {said}; if not, it is not used", f"{name}, beside texts")


_TURNS = frozenset(("rotation", "rotate", "rotated", "flip", "flipped", "hflip", "vflip", "mirror", "mirrored"))
_OF_TURNS = frozenset(("image", "img", "video", "is", "angle", "degree", "degrees", "deg", "horizontal", "vertical"))
_SPEEDS = ("speed", "tempo", "playback_speed", "playback_rate", "speed_factor", "speed_ratio")
_UNTURNED = ("", "0", "0.0", "360", "false", "none", "no", "null", "nan")
_HEAVIEST, _FASTEST = 10, 4
"""Larger numbers are weights in kilograms, and speeds of cars."""
_CHANGES = {
    "turned": "which is not applied: if it should be, turn its file beforehand",
    "faster": "which is not applied: if it should be, change the speed of its file beforehand",
    "sampled": "and may be what its file has: if frames are to be taken by it, write it into the part of the video",
    "weighed": "and all samples count alike: for a weight, repeat them, or weigh datasets in a mix",
    "judged": "beside its turns: if that says their answer is wrong, leave such samples out",
}


def _name_changes(entry: Mapping[str, Any], there: Mapping[Medium, int]) -> None:
    """Warn of what would change a medium, or the weight of its sample, and is not applied; and of a label of 0."""
    for name, change in changes_beside(entry, there):
        _warn(name, f"{str(entry[name])[:100]}, {_CHANGES[change]}")


def changes_beside(entry: Mapping[str, Any], there: Mapping[Medium, int]) -> Iterator[tuple[str, str]]:
    """Yield the keys of an entry that would change its media (`turned`, `faster`) or its weight, with what they do."""
    for name, change in _changing(tuple(entry)):
        value = entry[name]
        number = _number(value)
        is_one = number is not None and number > 0 and number != 1
        is_meant = {
            "turned": bool(there.get("image") or there.get("video")) and str(value).strip().lower() not in _UNTURNED,
            "faster": bool(there.get("audio") or there.get("video"))
            and is_one
            and 1 / _FASTEST <= (number or 0) <= _FASTEST,
            "sampled": bool(there.get("video")) and number is not None,
            "weighed": is_one and (number or 0) <= _HEAVIEST,
            "judged": number == 0 and any(isinstance(entry.get(one), list) for one in ("messages", "conversations")),
        }[change]
        is_said = number is not None and _are_written([number], entry, [name])
        if is_meant and not is_said and not isinstance(value, list | tuple | Mapping):
            yield name, change


@lru_cache(maxsize=256)
def _changing(columns: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the columns that `_name_changes` knows by their names, each with its change."""
    known = {"label": "judged", "fps": "sampled", "nframes": "sampled", **dict.fromkeys(_SPEEDS, "faster")}
    known |= {name: "weighed" for name in columns if "weight" in name.lower() and is_weight(name)}
    known |= {name: "turned" for name in columns if _TURNS & {*_words(name)} and {*_words(name)} <= _TURNS | _OF_TURNS}
    return [(name, known[name]) for name in columns if name in known]


def may_change(name: str) -> bool:
    """Return whether a field of an entry is one of those whose effect on the sample is named, if it has any."""
    return bool(_changing((name,)))


def may_be_box(name: str, value: Any) -> bool:
    """Return whether a field of an entry with images is one that `check_parts` names as a place in one."""
    return part_meaning(name) == "box" and bool(_box(value, "box"))


_logger = logging.getLogger(__name__)


def _box(value: Any, part: _Part) -> list[float] | None:
    """Return the four numbers of one box: a list, two points, an object, or one of these as text; None: it is none.

    Where only a warning names it, a point is one, too.
    """
    if isinstance(value, str) and len(value) < _LONGEST_TEXT:
        with suppress(ValueError, RecursionError):
            value = json.loads(value if value.lstrip()[:1] in ("[", "{") else f"[{value}]")
    if isinstance(value, Mapping):
        known = (*_CORNERS, ("x", "y"))
        value = next(([value[one] for one in names] for names in known if {*names} <= {*value}), None)
    if isinstance(value, list | tuple) and len(value) in (1, 2) and isinstance(value[0], list | tuple):
        value = [one for point in value if isinstance(point, list | tuple) for one in point]
    if not isinstance(value, list | tuple) or any(isinstance(one, str) for one in value):
        return None
    numbers = [number for one in value if (number := _number(one)) is not None]
    return numbers if len(numbers) == len(value) in ((4,) if part == "region" else (2, 4)) and any(numbers) else None


def _whole_numbers(value: Any) -> list[float]:
    """Return the number, or the numbers of a list, if they are whole ones; nothing for anything else."""
    ones = value if isinstance(value, list | tuple) else [value]
    numbers = [None if isinstance(one, str) and not one.isdigit() else _number(one) for one in ones]
    return [one for one in numbers if one is not None and one.is_integer()] if None not in numbers else []


_ID = re.compile(r"(?:.*_)?(?:[qu]?id|idx|index|key|uuid|hash|source|url|path|files?)")


def _are_written(numbers: list[float], entry: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Return whether all of some numbers stand in the texts of an entry beside those names; no ids, no files."""
    beside = (one for one in entry if one not in names and not _ID.fullmatch(one.lower()))
    texts = [text for text in texts_in([entry[one] for one in beside]) if kind_by_name(text) is None]
    found = {float(one) for text in texts for one in re.findall(r"\d+(?:\.\d+)?", text)}
    rounded = 0.5 if max(numbers) > 1 else 0.005  # shares of the width and height
    return all(any(abs(one - other) <= rounded for other in found) for one in numbers)


# Segments -------------------------------------------------------------------------------------------------------------


def _listed_segments(given: Mapping[str, Any], kind: Medium, count: int) -> list[tuple[float, float | None]]:
    """Return the segments of a list of them, one for each medium; an empty list: there is none. Raises SampleError."""
    for name, value in given.items():
        if segment_meaning(name) == "range" and isinstance(value, list | tuple):
            ranges = [one for one in map(_range, value) if one is not None]
            if ranges and len(ranges) == len(value):
                if len(value) != count:
                    found = f"`{name}` has {len(value)} segments for {count} {kind}s"
                    raise SampleError(f"{found}: give one for each, or {_without(name)}")
                return [*ranges]
    return []


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
    for name, value in given.items():
        if segment_meaning(name) != "range" or _is_nested(value):  # of a transcript
            continue
        if (one := _range(value)) is None:
            known = "_".join(_words(name)).replace("time_stamp", "timestamp")
            is_text = isinstance(value, str) and known in _NAMES and len(_WRITTEN.findall(value)) != 2
            if known in _LOOSE or is_text:
                continue  # a date, or the name of a part of the set
            wanted = "expected the seconds of a segment, [begin, end]; if it is something else"
            raise SampleError(f"`{name}` is {str(value)[:100]!r}: {wanted}, {_without(name)}")
        found.append((name, one))
    return found


def _given_ends(given: Mapping[str, Any], *, is_part: bool) -> list[tuple[str, tuple[float, float | None]]]:
    """Return the segment that is given by a begin, an end or a length, with their names; an empty list: none is."""
    begins = [name for name in given if segment_meaning(name) == "begin"]
    ends = [
        name for name in given if segment_meaning(name) == "end" and (begins or _words(name)[0] not in _ONLY_BESIDE)
    ]
    lengths = [name for name in given if segment_meaning(name) == "length"] if begins or is_part else []
    lengths = [] if ends else lengths
    if not (begins or ends or lengths):
        return []
    names = (*begins[:1], *ends[:1], *lengths[:1])
    values = {name: _seconds(name, given[name]) for name in names}
    begin = values[begins[0]] if begins else 0.0
    end = values[ends[0]] if ends else begin + values[lengths[0]] if lengths else None
    if len(begins) > 1 or len(ends) > 1:
        raise SampleError(f"a segment is given twice, by {', '.join((*begins, *ends))}: give begin and end once")
    if len(names) == 1 and not is_part:
        if begins and not begin:
            return []
        other = "an end" if begins else "a begin"
        remedy = f"write both, as start and end, or {_without(names[0])}"
        raise SampleError(f"`{names[0]}` seems to cut the file, without {other}: {remedy}")
    return [(" and ".join(names), (begin, end))]


# What may be a segment ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _kinds(name: str) -> frozenset[str]:
    """Return the words of a name, each also without a plural; `id` for `qid`."""
    words = _words(name)
    return frozenset(
        (*words, *(word.removesuffix("s") for word in words), *(w[-2:] for w in words if w.endswith("id")))
    )


@lru_cache(maxsize=4096)
def _opposites(name: str) -> tuple[tuple[str, ...], ...]:
    """Return the words of the names that would give the end to a name with a begin."""
    words = _words(name)
    if not (_OF_OTHERS - {"point"}).isdisjoint(_kinds(name)):
        return ()
    return tuple(tuple(other if word == one else word for word in words) for one, other in _OPPOSITES if one in words)


def _spans(entry: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, list[_Span]]]:
    """Yield what looks like spans of times, by pairs of names or by values, also inside of objects, with its name."""
    named = {_words(name): name for name in entry if isinstance(name, str)}
    for name in named.values():
        value = entry[name]
        for other in _opposites(name):
            begin, end = _time(value), _time(entry.get(named.get(other, ""), None))
            if begin is not None and end is not None and 0 <= begin < end < _LATEST_SECONDS:
                yield f"{before}{name}", [(begin, end)]
        if not _OF_OTHERS.isdisjoint(_kinds(name)):
            continue
        if isinstance(value, str) and value[:1] in ("[", "{") and len(value) < _LONGEST_TEXT:
            with suppress(ValueError, RecursionError):
                value = json.loads(value)
        is_named = not _OF_SPANS.isdisjoint(_kinds(name)) or (
            name == "split" and not isinstance(value, str)
        )  # VTimeLLM
        if spans := _spans_of(value, has_texts=is_named):
            if is_named or not (is_metadata(name) or _are_ids(name, value)):
                yield f"{before}{name}", spans
        elif before.count(".") < 3 and _is_nested(value):
            inner = [value] if isinstance(value, Mapping) else value
            if isinstance(value, Mapping) or not any(re.search(r"[^\W\d]", text) for text in texts_in(value)):
                for one in inner[:3]:
                    yield from _spans(one, f"{before}{name}.")


def _are_ids(name: str, value: Any) -> bool:
    """Return whether two numbers seem to be some of a list: `speakers: [1, 3]`."""
    return name.lower().endswith("s") and isinstance(value, list | tuple) and all(isinstance(one, int) for one in value)


def _is_nested(value: Any) -> bool:
    """Return whether a value is an object, or a list of some."""
    ones = value if isinstance(value, list | tuple) else [value]
    return bool(ones) and all(isinstance(one, Mapping) for one in ones)


def _spans_of(value: Any, *, has_texts: bool) -> list[_Span]:
    """Return the spans in a pair of numbers, a list of pairs or, where the name is of times, a text of both."""
    if isinstance(value, str):
        if has_texts and re.fullmatch(r"\[\d+(\.\d+)?:\d+(\.\d+)?\]", value):  # of How2QA
            value = value.replace(":", ",")
        one = _range(value) if has_texts and re.search(r"[-–,]|to", value) else None
        return [] if one is None or (one[0] > 1900 and one[1] < 2100) else [one]
    if not isinstance(value, list | tuple) or not value:
        return []
    pairs = value if all(isinstance(one, list | tuple) for one in value) else [value]
    spans: list[_Span] = []
    for pair in pairs:
        times = [_time(one) if has_texts or not isinstance(one, str) else None for one in pair]
        begin, end = times if len(times) == 2 else (None, None)
        if begin is None or end is None or not 0 <= begin <= end < _LATEST_SECONDS or (begin == end and pair is value):
            return []
        spans.append((begin, end))
    return spans


_WRITTEN = re.compile(r"\d+(?::\d\d){1,2}(?:[.,]\d+)?|\d+(?:\.\d+)?")


def _are_said(spans: list[_Span], entry: Mapping[str, Any], names: list[str]) -> bool:
    """Return whether all spans stand in the texts of an entry, those of `names` apart; names of files are no texts."""
    texts = texts_in({name: value for name, value in entry.items() if name not in names})
    texts = [text for text in texts if len(text.split()) > 2 or _range(text) is not None]
    written = [[(one.start(), one.end(), one[0]) for one in _WRITTEN.finditer(text)] for text in texts]
    beside = [(one, other) for of in written for one, other in pairwise(of) if other[0] - one[1] < 30]
    return all(
        any(_is_time(one[2], span[0]) and _is_time(other[2], span[1]) for one, other in beside) for span in spans
    )


def _is_time(text: str, seconds: float) -> bool:
    written = _time(text)
    return written is not None and abs(written - seconds) < (1 if ":" in text else 0.06)


def _without(*names: str) -> str:
    return f"leave out {' and '.join(names)} (energon convert with --ignore {' --ignore '.join(map(quote, names))})"


# Values ---------------------------------------------------------------------------------------------------------------


def _is_missing(value: Any) -> bool:
    """Return whether a value says nothing of a segment: null, an empty text, a date or seconds since 1970."""
    if isinstance(value, str):
        return not value.strip() or bool(re.match(r"\d{4}-\d{1,2}-\d{1,2}", value))
    return value is None or value != value or (isinstance(value, int | float) and value > 1e8)


def _range(value: Any) -> _Span | None:
    if isinstance(value, str):
        value = re.split(r"\s*(?:-+>|-|–|—|→|~|,|;|to|until)\s*", value.strip("[]() "))
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    begin, end = map(_time, value)
    return None if begin is None or end is None or end <= begin or begin < 0 else (begin, end)


def _seconds(name: str, value: Any) -> float:
    time = _time(value)
    if time is None:
        raise SampleError(f"`{name}` is {str(value)[:100]!r}: expected seconds, or hours:minutes:seconds")
    return time * next((_UNITS[word] for word in _words(name) if word in _UNITS), 1.0)


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
