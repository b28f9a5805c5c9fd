"""Parts of a message, and files beside it: which kind of medium, or text, each is, and what it has in it."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

from energon_bridge.core.errors import SampleError
from energon_bridge.core.format.media import is_base64, kind_by_name
from energon_bridge.models.conversations.places import Medium as Medium
from energon_bridge.models.conversations.segments import is_option
from energon_bridge.models.conversations.withheld import learned_if

MEDIA: tuple[Medium, ...] = ("image", "video", "audio")
RawTurn = Mapping[str, Any]
"""A turn as the sample has it, in any dialect; `conversation.Turn` is what is read from it."""

PARTS: Mapping[str, Literal["text"] | Medium] = MappingProxyType(
    {
        **dict.fromkeys(("text", "input_text", "output_text"), "text"),
        **dict.fromkeys(("image", "image_url", "input_image"), "image"),
        **dict.fromkeys(("video", "video_url", "input_video"), "video"),
        **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    }
)
"""The kind of medium, or text, that each `type` of a message's part stands for."""
_PAYLOADS = ("url", "path", "src", "value", "source", "data", "bytes")
_HINTS = ("type", "index", "detail", "format", "media_type", "mime_type", "cache_control")
PLACES = re.compile(r"<(image|video|audio)>")
_SOUNDS = {
    *("aac", "ac3", "adts", "aif", "aifc", "aiff", "amr", "ape", "au", "awb", "caf", "dts"),
    *("eac3", "ec3", "flac", "m4a", "m4b", "mka", "mp2", "mp3", "oga", "ogg", "opus", "ra"),
    *("snd", "sph", "spx", "tta", "w64", "wav", "wave", "weba", "wma", "wv"),
}
_SHOWN = 200
MAPPING = (dict, Mapping)  # in this order: an abstract class takes long to say what is one


def short(value: Any) -> str:
    """Return the beginning of a value, for messages."""
    return repr(value)[:_SHOWN]


def medium_by_name(name: str) -> Medium | None:
    """Return the kind of medium in a part of a sample, by its name: `0.jpg`, `videos.0.mp4`, `audios.0.mp4`."""
    kind = kind_by_name(name)
    return av_medium_by_name(name) if kind == "av" else kind


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return the key by which the media of a sample are sorted: `2.jpg` before `10.jpg`."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)]


def is_against_names(names: Sequence[str]) -> bool:
    """Return whether names in the order in which their media are shown tell another one: `after.png`, `before.png`."""
    words = [re.split(r"[\W_\d]+", name.lower()) for name in names]
    ranks = ([order.index(word) for of in words for word in of if word in order] for order in _ORDERS)
    return any(found != sorted(found) for found in ranks)


_ORDERS = (
    *(("before", "after"), ("pre", "post"), ("initial", "final"), ("start", "end"), ("begin", "end"), ("old", "new")),
    *(("previous", "current", "next"), ("prev", "current", "next"), ("past", "present", "future"), ("top", "bottom")),
    *(("earlier", "later"), ("front", "back"), ("front", "rear"), ("upper", "lower"), ("start", "middle", "end")),
    ("beginning", "middle", "end"),
    ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"),
    ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
)
"""Words in the order that they tell, which often is not that of the alphabet."""


@lru_cache(maxsize=4096)
def is_drawn(name: str) -> bool:
    """Return whether a column or part may be drawn from an image that is asked about, or be the answer: `mask.png`."""
    return not _DRAWN.isdisjoint(re.split(r"[\W_\d]+", name.lower()))


@lru_cache(maxsize=4096)
def is_of_answer(name: str) -> bool:
    """Return whether a column of media seems to belong to the answer, which the question must not show."""
    return not _OF_ANSWER.isdisjoint(re.split(r"[\W_\d]+", name.lower()))


_OF_ANSWER = frozenset(("answer", "solution", "explanation", "rationale", "output", "edited", "target", "response"))
_DRAWN = {
    *_OF_ANSWER,
    *("mask", "masks", "depth", "normals", "edges", "canny", "seg", "segmentation", "heatmap", "saliency"),
    *("overlay", "annotated", "annotation", "label", "gt", "result", "negative", "rejected", "thumbnail", "thumb"),
    "preview",
}


def av_medium_by_name(name: str) -> Medium:
    """Return `video` or `audio` for a part of a sample with such a name, else None."""
    first, _, rest = name.lower().partition(".")
    return (
        "audio"
        if first in ("audio", "audios", "sound", "sounds") or (rest or first).rpartition(".")[2] in _SOUNDS
        else "video"
    )


def part_kind(part: Any) -> Literal["text"] | Medium | None:
    """Return the kind of a message's part: text or a medium; None if it is not understood."""
    if isinstance(part, str):
        return "text"
    if not isinstance(part, Mapping):
        return None
    if part.get("type") is not None:
        return PARTS.get(part["type"]) if isinstance(part["type"], str) else None
    return next((PARTS[name] for name in part if name in PARTS and part[name] is not None), None)


def part_text(part: Any) -> str | None:
    """Return the text of a part that is one."""
    text = part if isinstance(part, str) else part["text"] if part.get("text") is not None else part.get("value")
    return text if isinstance(text, str) else None


def part_payload(part: Mapping[str, Any], kind: Medium) -> Any:
    """Return the content, path or URL in a part of an image, video or sound; None for a placeholder.

    Raises:
        SampleError: It has several, or something that is not understood.
    """
    names = (f"{kind}_url", kind, f"input_{kind}", *_PAYLOADS)
    given = {name: value for name, value in part.items() if value is not None and not (name == "text" and not value)}
    payloads = [name for name in names if name in given]
    other = [name for name in given if name not in (*names, *_HINTS) and not is_option(name, kind)]
    if len(payloads) > 1 or other:
        raise SampleError(
            f"a part of a message is not understood, for its {', '.join(other or payloads)}: {short(part)}. Write it "
            f'as {{"type": "{kind}", "{kind}": PATH}}'
        )
    return given[payloads[0]] if payloads else None


def unknown_part(part: Any) -> SampleError:
    """Return the error for a part of a message that is neither a text nor a file, or for what it has of a file."""
    return SampleError(
        f'a part of a message is not understood: {short(part)}. Write texts as {{"type": "text", "text": TEXT}}, files '
        f'as {{"type": "image", "image": PATH}} (likewise video, audio), and leave others out. {KEYS}'
    )


KEYS = "Calls are `tool_calls` of an answer, their results turns of the role `tool`, thoughts `reasoning_content`"
URIS = ("data:image/", "data:video/", "data:audio/")
_OF_FILE = re.compile(
    r"(?:.*_)?(?:image|img|picture|photo|video|audio|sound|speech|wav|frame|screenshot)s?(?:_?\d+)?(?:_.*|(?:path|name|file|url)s?)?"
    r"|file_?(?:path|name)?|attachments?|media|files"
)


@lru_cache(maxsize=4096)
def names_file(key: str) -> bool:
    """Return whether a key may have the name of an image, video or sound: `image_2`, `image_left`, `video_path`."""
    return _OF_FILE.fullmatch(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower()) is not None


def check_text_part(part: Any) -> None:
    """Raise SampleError for a text part that says whether it is learned, as of Axolotl, or has a file, too."""
    said: Mapping[str, Any] = part if isinstance(part, MAPPING) else {}
    if flag := next((one for one in said if learned_if(one) is not None), None):
        raise SampleError(
            f"a text part has {flag}={part[flag]!r}, but turns are learned as a whole or not: make turns of its parts"
        )
    if said.get("thought") is True:
        raise unknown_part(part)  # of Gemini
    if name := next((one for one in said if names_file(one) and is_file(said[one])), None):
        raise SampleError(
            f"a text part has a file in `{name}` ({short(part[name])}), which would not be seen: write it as a part of "
            'its own, {"type": "image", "image": PATH}, before the text or behind it'
        )


def check_no_file(name: str, value: Any, role: str) -> None:
    """Raise SampleError for a key of a turn, or of a pair, with an image, video or sound, which would not be seen."""
    if value and names_file(name) and is_file(value):
        raise SampleError(
            f"a turn of {role!r} has a file in `{name}` ({short(value)}), which would not be seen: list the files of "
            f"all turns in `images`, `videos` or `audios` beside them, or write it as a part of its content"
        )


def is_file(value: Any) -> bool:
    """Return whether a value names a medium, or has one: a path, a URL, base64, bytes; of a list or object, any."""
    if isinstance(value, list | tuple | Mapping):
        return any(map(is_file, value.values() if isinstance(value, Mapping) else value))
    if not isinstance(value, str):
        return isinstance(value, bytes)
    return value.startswith(URIS) or is_base64(value) or names_medium(value.partition("?")[0])


def names_medium(text: object) -> bool:
    """Return whether a text names an image, video or sound by its extension; `png` alone is no name."""
    return isinstance(text, str) and "." in text and kind_by_name(text) is not None


def own_payload(part: Mapping[str, Any]) -> Any:
    """Return the image, video or sound that a part has itself; None for a placeholder, or the path or URL of one.

    Sounds may be in base64, as in OpenAI's `input_audio`, or samples with their rate.

    Raises:
        SampleError: The base64 is damaged.
    """
    payload = part.get(part.get("type", ""))
    if isinstance(payload, Mapping) and part_kind(part) == "audio":
        data = payload.get("data") or payload.get("bytes")
        if isinstance(data, str):
            try:
                return base64.b64decode(data, validate=True)
            except binascii.Error as error:
                raise SampleError(f"a part of a message has a sound whose base64 is damaged: {error}") from error
        return payload if "array" in payload else data
    return None if isinstance(payload, str | Mapping) else payload
