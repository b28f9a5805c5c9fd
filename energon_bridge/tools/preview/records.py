"""Records: a sample as text and small pictures of bounded size, for a terminal or a page.

Nothing in the data makes this module raise: a value that cannot be shown is named, a picture that cannot be decoded (or
exceeds the decoder's limits) is replaced by its error.
"""

from __future__ import annotations

import json
import math
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from io import BytesIO
from typing import Any, Literal

from PIL import Image

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.format.media import HEAD_BYTES, extension_by_head
from energon_bridge.core.storage import ByteRange
from energon_bridge.models.av import AVDecoder
from energon_bridge.models.conversations.parts import own_payload, part_kind
from energon_bridge.models.conversations.turns import find_pair
from energon_bridge.models.images.images import DeferredImage
from energon_bridge.tools.preview.notebook import as_image
from energon_bridge.tools.preview.texts import value_text

SIDE = 320
"""Pixels of a picture's longer side."""
_MOST_TEXT = 20_000
_MOST_ITEMS = 64
_MOST_FIELDS = 48
_MOST_NUMBERS = 16
_BRIEF = 240
"""Characters of a question or an answer on a card."""
_ASKED = ("context", "question")
_SAID = ("answers", "answer", "caption", "label_name", "label", "cls")
_LOWEST_RATE = 1000  # a smaller number beside an array is something else
_MOST_BYTES = 32 << 20
"""A larger video or sound, in bytes, is named but not shown."""
_PLAYABLE: dict[str, Literal["video", "audio"]] = {
    **dict.fromkeys(("mp4", "m4v", "mov", "webm"), "video"),
    **dict.fromkeys(("wav", "flac", "mp3", "ogg", "opus", "m4a"), "audio"),
}
_TURNS = ("messages", "conversations", "conversation")
_OWN_KEYS = ("role", "from", "content", "value")
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A small picture, and the size of the original."""

    image: Image.Image
    width: int
    height: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """A video or sound that browsers can play: its bytes, its extension, and what it is."""

    kind: Literal["video", "audio"]
    suffix: str
    stream: bytes | ByteRange
    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """Text from the data, JSON, a note on a value that is not shown, bytes of media left undecoded, or an error."""

    kind: Literal["text", "json", "note", "undecoded", "error"]
    text: str


@dataclass(frozen=True, slots=True)
class ShownTurn:
    """One turn of a conversation."""

    role: str
    items: tuple[Text | Picture | Clip, ...]


ShownItem = Text | Picture | Clip | ShownTurn


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRecord:
    """The displayed content of a sample.

    Attributes:
        dataset: Its path.
        key, shard, index: Of the sample; the index counts in its split part.
        size: Bytes that were read.
        facts: Its position in a run: step, rank, microbatch, row, epoch.
        fields: Its fields, in order.
        asked, said: The first question and its answer, or the caption or class; empty if there is none.
        error: Why it failed to load; empty if it loaded.
    """

    dataset: str
    key: str
    shard: str
    index: int
    size: int = 0
    facts: Mapping[str, int] = field(default_factory=dict)
    fields: Sequence[tuple[str, tuple[ShownItem, ...]]] = ()
    asked: str = ""
    said: str = ""
    error: str = ""

    def items(self) -> list[Text | Picture | Clip]:
        """Return its items, including those of turns."""
        shown = (item for _, items in self.fields for item in items)
        return [part for item in shown for part in (item.items if isinstance(item, ShownTurn) else (item,))]

    def trouble(self) -> Literal["", "error", "broken", "undecoded"]:
        """Return what is wrong: it did not load, a value is broken, or media stayed bytes; empty if nothing is."""
        kinds = {item.kind for item in self.items() if isinstance(item, Text)}
        return "error" if self.error else "broken" if "error" in kinds else "undecoded" if "undecoded" in kinds else ""

    def text(self) -> str:
        """Return its texts, joined by line breaks."""
        return "\n".join(item.text for item in self.items() if isinstance(item, Text) and item.kind == "text")

    def sizes(self) -> dict[str, list[int]]:
        """Return the values for histograms."""
        items = self.items()
        pictures = [item for item in items if isinstance(item, Picture)]
        sizes = {"bytes": [self.size]} if self.size else {}
        if text := sum(len(item.text) for item in items if isinstance(item, Text) and item.kind == "text"):
            sizes["characters of text"] = [text]
        if pictures:
            sizes["width of pictures"] = [picture.width for picture in pictures]
            sizes["height of pictures"] = [picture.height for picture in pictures]
        if turns := sum(isinstance(item, ShownTurn) for _, items in self.fields for item in items):
            sizes["turns"] = [turns]
        return sizes


def plain_record(record: SampleRecord) -> dict[str, Any]:
    """Return a record as JSON has it, with the sizes of pictures in place of these."""
    shown = [{"name": name, "items": [_plain(item) for item in items]} for name, items in record.fields]
    head = {"dataset": record.dataset, "shard": record.shard, "index": record.index, "key": record.key}
    return head | dict(record.facts) | {"error": record.error or None, "fields": shown}


def _plain(item: ShownItem) -> dict[str, Any]:
    if isinstance(item, Picture):
        return {"picture": [item.width, item.height]}
    if isinstance(item, ShownTurn):
        return {"role": item.role, "content": [_plain(part) for part in item.items]}
    return {item.kind: item.text}


def fields_of(sample: Any) -> list[tuple[str, tuple[ShownItem, ...]]]:
    """Return the fields of a sample, without its meta fields and those that are None."""
    shown = list(_values_of(sample).items())
    named = [(name[:200], items_of(value, name)) for name, value in shown[:_MOST_FIELDS]]
    if len(shown) > _MOST_FIELDS:
        named.append(("…", (Text("note", f"and {len(shown) - _MOST_FIELDS:,} more fields"),)))
    return named


def _values_of(sample: Any) -> dict[str, Any]:
    """Return the values of a sample by name, without meta fields and those that are None."""
    if isinstance(sample, Mapping):
        values = list(sample.items())
    elif is_dataclass(sample):
        values = [(entry.name, getattr(sample, entry.name, None)) for entry in fields(sample)]
    else:
        values = [("value", sample)]
    return {str(name): value for name, value in values if value is not None and not str(name).startswith("__")}


def asked_and_said(sample: Any, shown: Sequence[tuple[str, tuple[ShownItem, ...]]]) -> tuple[str, str]:
    """Return the first question of a sample and its answer, or its caption or class; empty texts if there is none.

    Args:
        sample: The sample.
        shown: Its fields.
    """
    turns = [item for _, items in shown for item in items if isinstance(item, ShownTurn)]
    if turns:
        return _said_by(turns, "user"), _said_by(turns, "assistant")
    values = _values_of(sample)
    # What is beside a picture is often one dict, of a part `json`.
    for entry in (values, *(value for value in values.values() if isinstance(value, Mapping))):
        choices = entry.get("choices")
        right = entry.get("correct_choice_idx")
        if isinstance(choices, list) and isinstance(right, int) and 0 <= right < len(choices):
            return _brief(entry.get("context")), _brief(choices[right])
        pair = find_pair(entry)
        asked = pair[0] if pair else next((name for name in _ASKED if name in entry), "")
        said = pair[1] if pair else next((name for name in _SAID if entry.get(name) not in (None, "", [])), "")
        if said:
            return _brief(entry.get(asked)), _brief(entry.get(said))
    return "", ""


def _said_by(turns: Sequence[ShownTurn], role: str) -> str:
    texts = (item.text for turn in turns if turn.role == role for item in turn.items if isinstance(item, Text))
    return next((text[:_BRIEF] for text in texts if text.strip()), "")


def _brief(value: Any) -> str:
    """Return the beginning of a text, of several or of a number; of anything else nothing."""
    if isinstance(value, (list, tuple)):
        return " / ".join(filter(None, map(_brief, value[:_MOST_NUMBERS])))[:_BRIEF]
    return str(value)[:_BRIEF] if isinstance(value, (str, int, float)) else ""


def items_of(value: Any, name: str = "") -> tuple[ShownItem, ...]:
    """Return the items that show a value."""
    try:
        return tuple(_items(value, name))
    except Exception as error:  # data can make a decoder or a property raise anything
        return (Text("error", f"{type(error).__name__}: {error}"[:_MOST_TEXT]),)


def picture_of(value: Any) -> Picture | None:
    """Return a Pillow, numpy, torch or deferred image as a picture; None for anything else."""
    size = value.size if isinstance(value, DeferredImage) else None
    value = value.get() if isinstance(value, DeferredImage) else value
    image = as_image(value)
    if image is None:
        return None
    if size is None:
        size = value.size if isinstance(value, Image.Image) else _extent(tuple(value.shape))
    image = image.copy() if image is value else image
    image.thumbnail((SIDE, SIDE))
    return Picture(image=image, width=int(size[0]), height=int(size[1]))


def _extent(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return width and height of an array of shape (H, W), (H, W, C) or (C, H, W)."""
    height, width = shape[-2:] if len(shape) == 2 or shape[0] in (1, 3, 4) else shape[:2]
    return width, height


def _items(value: Any, name: str) -> list[ShownItem]:
    if isinstance(value, str):
        return [_text(value)]
    if (sound := _sound(value)) is not None:
        return [sound]
    picture = picture_of(value) if not isinstance(value, (list, tuple, Mapping)) else None
    if picture is not None:
        return [picture]
    if isinstance(value, Mapping):
        return _items_of_dict(value)
    if isinstance(value, (list, tuple)):
        return _items_of_list(value, name)
    if is_dataclass(value) and not isinstance(value, type):
        return [item for _, items in fields_of(value) for item in items]
    if isinstance(value, bytes) and (kind := extension_by_head(value[:HEAD_BYTES])) is not None:
        return [Text("undecoded", f"not decoded: {_note(value)} of .{kind}, which no decoder took for {name!r}")]
    return [Text("note", _note(value))]


def _items_of_list(value: Sequence[Any], name: str) -> list[ShownItem]:
    if turns := _turns(value):
        return turns
    if len(value) and all(_is_shown(entry) for entry in value[:_MOST_ITEMS]):
        listed = [item for entry in value[:_MOST_ITEMS] for item in items_of(entry, name)]
        more = len(value) - _MOST_ITEMS
        return [*listed, Text("note", f"and {more:,} more")] if more > 0 else listed
    return [_json(value)]


def _note(value: Any) -> str:
    """Return a note on a number or array, or on what is not shown."""
    if isinstance(value, (bool, int, float)):
        return repr(value)
    if not (hasattr(value, "tolist") and hasattr(value, "shape")):
        return value_text(value)
    shape = tuple(value.shape)
    few = 0 < math.prod(map(int, shape)) <= _MOST_NUMBERS
    return f"{value_text(value)}{f' = {value.tolist()}' if few else ''}"


def _is_shown(value: Any) -> bool:
    """Whether an entry of a list is shown by itself: text, and anything that may be a picture."""
    return (
        isinstance(value, (str, DeferredImage, AVDecoder, Image.Image))
        or hasattr(value, "shape")
        or _samples(value) is not None
    )


def _items_of_dict(value: Mapping[Any, Any]) -> list[ShownItem]:
    for name in _TURNS:
        turns = _turns(value.get(name))
        if turns:
            rest = {key: entry for key, entry in value.items() if key != name}
            return [*turns, _json(rest)] if rest else turns
    return [_json(value)]


def _turns(value: Any) -> list[ShownItem]:
    """Return the turns of a conversation, nothing if it is not one: `role` and `content`, or `from` and `value`."""
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(turn, Mapping) for turn in value):
        return []
    turns: list[ShownItem] = []
    for turn in value[:_MOST_ITEMS]:
        role = turn.get("role", turn.get("from"))
        content = turn.get("content", turn.get("value"))
        beside = {name: said for name, said in turn.items() if name not in _OWN_KEYS and said is not None}
        if not isinstance(role, str) or (content is None and not beside):
            return []
        items = [*([] if content is None else _content(content)), *([_json(beside)] if beside else [])]
        turns.append(ShownTurn(_ROLES.get(role, role)[:40], tuple(items)))
    if len(value) > _MOST_ITEMS:
        turns.append(ShownTurn("…", (Text("note", f"and {len(value) - _MOST_ITEMS:,} more turns"),)))
    return turns


def _content(content: Any) -> list[Text | Picture | Clip]:
    """Return the parts of a turn; an image or sound that comes from another field is its placeholder."""
    items: list[Text | Picture | Clip] = []
    for part in content if isinstance(content, (list, tuple)) else [content]:
        if isinstance(part, str):
            items.append(_text(part))
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            items.append(_text(part["text"]))
        elif isinstance(part, Mapping) and part.get("type") in ("image", "video", "audio", "input_audio"):
            held = own_payload(part)
            if isinstance(held, bytes) and part_kind(part) == "audio":
                held = AVDecoder(held, name=f"sound.{extension_by_head(held[:HEAD_BYTES])}")
            shown = None if held is None else picture_of(held) or _sound(held)
            items.append(shown or Text("text", f"<{part_kind(part)}>"))
        else:
            items.append(_json(part))
    return items


def _text(text: str) -> Text:
    cut = len(text) - _MOST_TEXT
    return Text("text", f"{text[:_MOST_TEXT]}… ({cut:,} more characters)" if cut > 0 else text)


def _json(value: Any) -> Text:
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, default=value_text)
    except (TypeError, ValueError, RecursionError):  # keys that JSON does not allow, cycles, thousands of levels
        return Text("note", value_text(value))
    return Text("json", _text(text).text)


def _sound(value: Any) -> Clip | Text | None:
    """Return a decoder, or samples with their rate, as a sound or video; None for anything else."""
    if isinstance(value, AVDecoder):
        return _clip(value)
    pair = _samples(value)
    if pair is None:
        return None
    from energon_bridge.models.families.sound import sound_of  # with transformers

    sound = sound_of(pair, rate=pair[1])
    file = BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(sound.rate)
        out.writeframes((sound.get().clip(-1, 1) * 32767).astype("<i2").tobytes())
    return _clip(AVDecoder(file.getvalue(), name="samples.wav"))


def _samples(value: Any) -> tuple[Any, int] | None:
    """Return samples and their rate: a pair, or as datasets of Hugging Face have them."""
    pair = (value.get("array"), value.get("sampling_rate")) if isinstance(value, Mapping) else value
    if not isinstance(pair, tuple) or len(pair) != 2:
        return None
    samples, rate = pair
    is_sound = type(rate) is int and rate >= _LOWEST_RATE and getattr(samples, "ndim", 0) in (1, 2)
    return (samples, rate) if is_sound else None


def _clip(value: AVDecoder) -> Clip | Text:
    """Return a video or sound, or a note on one that is too large or that browsers cannot play."""
    try:
        metadata = value.get_metadata(get_video_frame_count=False)
        facts = {entry.name.replace("_", " "): getattr(metadata, entry.name) for entry in fields(metadata)}
        said = ", ".join(f"{name} {round(fact, 3):g}" for name, fact in facts.items() if fact is not None)
    except ConfigurationError:  # PyAV is not installed; browsers do not need it
        said = ""
    text = f"{value!r}{': ' if said else ''}{said}"
    stream = value.stream
    suffix = value.suffix
    size = len(stream) if isinstance(stream, bytes) else stream.size if isinstance(stream, ByteRange) else None
    if suffix not in _PLAYABLE or size is None or size > _MOST_BYTES:
        return Text("note", text)
    assert isinstance(stream, bytes | ByteRange)
    return Clip(kind=_PLAYABLE[suffix], suffix=suffix, stream=stream, text=text)
