"""A conversation with its images, videos and sounds: one record, whatever a dataset has, before any tokenizer.

`read_conversation` makes it of a `ChatSample`, and of any sample or crude sample with `messages`, `conversations` or
`conversation` (also inside a `json` part); `sample_encoders` of the other types. Text is made of it by `rendering`,
with a chat template, or by `layout`, with texts around the turns, which only `MultiModalTaskEncoder` has.

A turn of a dataset is `{"role": …, "content": …}` or `{"from": …, "value": …}`; `human` and `gpt` mean `user` and
`assistant`, and `turns` knows the other forms. Its content is a text with the placeholders `<image>`, `<video>`
and `<audio>`, or a list of parts `{"type": "text", "text": …}`, `{"type": "image"}`, `{"type": "video"}`,
`{"type": "audio"}`. Images, videos and sounds come in order from the sample's own fields (`images`, `image`, `imgs`;
`videos`, `video`; `audios`, `audio`, `sounds`), from the parts, or, in a crude sample, from its own files. The sound
track of a video stays with its video.

All other keys of a turn (`tool_calls`, `reasoning_content`, `name`, …) go to the chat template as they are. Those that
`withheld.learned_if` knows also say whether an answer is learned. `system` and `tools` may stand beside the turns.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from torch import Tensor

from energon_bridge.core.errors import SampleError
from energon_bridge.core.format.media import AV_EXTENSIONS, IMAGE_EXTENSIONS, UNSURE
from energon_bridge.core.samples import Sample, edataclass
from energon_bridge.core.samples.sample_place import warn_once
from energon_bridge.models.conversations.parts import (
    MAPPING,
    Medium,
    av_medium_by_name,
    is_against_names,
    is_drawn,
    medium_by_name,
    natural_order,
    own_payload,
    part_kind,
    part_text,
)
from energon_bridge.models.conversations.segments import MediaOptions, entry_options, entry_segments, part_options
from energon_bridge.models.conversations.templates import parsed
from energon_bridge.models.conversations.turn_media import mismatch, placed
from energon_bridge.models.conversations.turns import (
    CONVERSATIONS as _TURNS,
    ROLES,
    SYSTEMS,
    is_learned,
    known_turns,
    listed_tools,
    read_tools,
    read_turns,
    system_prompt,
)
from energon_bridge.models.conversations.unused import name_order, name_unused
from energon_bridge.models.conversations.withheld import is_weight, learned_if

_logger = logging.getLogger(__name__)

Kind = Medium
IMAGE = "<image>"
VIDEO = "<video>"
AUDIO = "<audio>"
_PLACEHOLDERS = re.compile(rf"\n?({IMAGE}|{VIDEO}|{AUDIO})\n?")
_SEQUENCE = (list, Sequence)
_OWN_KEYS = frozenset({"role", "from", "content", "value"})
_SAYING = ("tool_calls", "function_call", "reasoning_content", "thinking", "reasoning", "refusal", "audio")
"""Keys of an assistant's turn that may stand in place of its `content`."""
_FIELDS: Mapping[Kind, Sequence[str]] = {
    "image": ("images", "image", "imgs"),
    "video": ("videos", "video"),
    "audio": ("audios", "audio", "sounds"),
}


@edataclass
class ChatSample(Sample):
    """A conversation with its images, videos and sounds in the order of their placeholders.

    `messages` is a list of turns, or JSON of one; a video is a `VideoFrames`, frames alone, a list of images, or a
    decoder of videos; a sound is one of the forms of `families.sound.sound_of`. `tools` is a list of JSON schemas, or
    JSON of one; `system` is the system prompt, if no turn is.
    """

    messages: Any
    images: Any = None
    videos: Any = None
    tools: Any = None
    system: Any = None
    audios: Any = None


@dataclass(frozen=True, slots=True)
class Part:
    """A text, or the place of an image, video or sound."""

    kind: Literal["text"] | Kind
    text: str = ""


_PLACES: Mapping[str, Part] = {IMAGE: Part("image"), VIDEO: Part("video"), AUDIO: Part("audio")}


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation.

    Args:
        role: `system`, `user` or `assistant`; with a chat template also `tool`, or another that the template knows.
        content: A text, whose placeholders are places of images, or parts. None: other keys say all.
        learned: Whether it is learned, if it is an answer.
        keys: Its other keys, for the chat template.
    """

    role: str
    content: str | Sequence[Part] | None
    learned: bool = True
    keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parts(self) -> Sequence[Part]:
        """The content, a text split at its placeholders."""
        return split_places(self.content, self.role) if isinstance(self.content, str) else self.content or ()

    @property
    def text(self) -> str:
        """The texts of the content."""
        return self.content if isinstance(self.content, str) else "".join([part.text for part in self.content or ()])


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Questions and answers, with images, videos and sounds in the order of their places."""

    turns: Sequence[Turn]
    images: Sequence[Any] = ()
    videos: Sequence[Any] = ()
    audios: Sequence[Any] = ()
    tools: Sequence[Any] | None = None

    @property
    def first_answer(self) -> str:
        """The text of the first answer that is learned."""
        return next(turn.text for turn in self.turns if turn.role == "assistant" and turn.learned)

    def with_system(self, system: str | None) -> Conversation:
        """Return the conversation with a system prompt, if it has none."""
        if not system or self.turns[0].role == "system":
            return self
        return replace(self, turns=(Turn("system", (Part("text", system),)), *self.turns))


class Piece(NamedTuple):
    """A piece of text, tokenised separately: shown or learned; with `ends`, the end-of-sequence token belongs to it."""

    text: str
    learned: bool = False
    ends: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """Plain text, each piece shown or learned; each placeholder in a shown piece is an image."""

    pieces: Sequence[Piece]
    images: Sequence[Any] = ()

    @property
    def first_answer(self) -> str:
        """The first text that is learned."""
        return next(piece.text for piece in self.pieces if piece.learned)

    def as_question(self) -> Conversation:
        """Return the document as one question, what is shown, and its answer, the text that is learned behind it.

        Raises:
            SampleError: Something is shown behind text that is learned.
        """
        learned = [piece.learned for piece in self.pieces]
        if any(one and not other for one, other in pairwise(learned)):
            raise SampleError(
                "an image or text stands behind text that is learned, but the model learns one answer, after all "
                "images: make a sample of each image"
            )
        texts = ("".join(piece.text for piece in self.pieces if piece.learned is one) for one in (False, True))
        turns = [Turn(role, text) for role, text in zip(("user", "assistant"), texts, strict=True)]
        return Conversation(turns=turns, images=self.images)


def read_conversation(
    sample: Any, holder: Any = None, *, place_images: Literal["before", "after"] = "before"
) -> Conversation:
    """Return the conversation of a sample that has turns, in a holder (`turn_holder`).

    Raises:
        SampleError: The turns have an unknown shape, a flag that cannot be honoured, or other numbers of placeholders
            than there are images, videos or sounds.
    """
    holder = turn_holder(sample) if holder is None else holder
    name = next(name for name in _TURNS if _value(holder, name) is not None)
    turns = _value(holder, name)
    if isinstance(turns, str | bytes):
        turns = parsed(turns, "turns")
    tools = _value(holder, "tools")
    system = _value(holder, "system")
    if isinstance(holder, MAPPING):
        tools = read_tools(holder)
        system = system_prompt(holder)
    if isinstance(turns, MAPPING):
        tools = read_tools(turns) if tools is None else tools
        system = system_prompt(turns) if system is None else system
        turns = next((turns[name] for name in _TURNS if name in turns), None)
    if not isinstance(turns, _SEQUENCE) or not turns:
        raise SampleError(f"{name} must be a non-empty list of turns, got {turns!r}"[:500])
    if system:
        turns = _with_system(turns, system)
    payloads: dict[Kind, list[Any]] = {kind: [] for kind in _FIELDS}
    listed = {kind: _media(sample, kind) for kind in payloads}
    if isinstance(holder, MAPPING):
        listed = with_segments(holder, listed)
    waiting = {kind: dict(enumerate(media)) for kind, media in listed.items()}
    known = placed(known_turns(turns), {kind: len(media) for kind, media in waiting.items()})
    read = [_read_turn(turn, payloads, waiting) for turn in known]
    return Conversation(
        turns=tuple(_placed(read, payloads, waiting, place_images)),
        images=tuple(payloads["image"]),
        videos=tuple(payloads["video"]),
        audios=tuple(payloads["audio"]),
        tools=listed_tools(tools),
    )


def in_parts(content: Conversation) -> Conversation:
    """Return a conversation whose texts are split at their places.

    Raises:
        SampleError: They have other numbers of places than there are images, videos or sounds.
    """
    if not any(isinstance(turn.content, str) for turn in content.turns):
        return content
    there: dict[Kind, int] = {
        "image": len(content.images),
        "video": len(content.videos),
        "audio": len(content.audios),
    }
    known = placed([{"role": turn.role, "content": turn.content} for turn in content.turns], there)
    turns = []
    for turn, said in zip(content.turns, known, strict=True):
        if isinstance(said["content"], list) and not isinstance(turn.content, list):
            raise SampleError(f"a text has its places in another spelling, {turn.text!r}: write '<image>'"[:500])
        turns.append(replace(turn, content=replace(turn, content=said["content"]).parts))
    for kind, count in there.items():
        places = sum(part.kind == kind for turn in turns for part in turn.parts)
        if places != count:
            raise SampleError(mismatch(kind, places, count))
    return replace(content, turns=turns)


def split_places(content: str, role: str = "user") -> tuple[Part, ...]:
    """Split a text at its placeholders; a line break next to one belongs to it. In an answer they are text."""
    if role == "assistant" or (type(content) is str and "<" not in content):
        return (Part("text", content),) if content else ()
    parts: list[Part] = []
    for number, piece in enumerate(_PLACEHOLDERS.split(content)):
        if number % 2:
            parts.append(_PLACES[piece])
        elif piece:
            parts.append(Part("text", piece))
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class MediaWithOptions:
    """An image, video or sound, with the options of its part or entry: a segment, frames a second, a size."""

    value: Any
    options: MediaOptions


def with_segments(
    entry: Mapping[str, Any], media: Mapping[Kind, list[Any]], extensions: Iterable[str] = ()
) -> dict[Kind, list[Any]]:
    """Return the media of an entry, cut and limited as its fields say (`clip`, `max_frames`, …). Raises SampleError.

    `extensions` are those of its files.
    """
    there = {kind: len(values) for kind, values in media.items()}
    found = entry_segments(entry, there, extensions)
    for_all = entry_options(entry, there)
    made = {kind: [_with_options(value, for_all.get(kind)) for value in values] for kind, values in media.items()}
    if found is None:
        return made
    kind, segments = found
    return {**made, kind: [_with_options(value, one) for value, one in zip(made[kind], segments, strict=True)]}


def _with_options(value: Any, options: MediaOptions | None) -> Any:
    if options is None:
        return value
    if not isinstance(value, MediaWithOptions):
        return MediaWithOptions(value, options)
    if value.options.is_segment and options.is_segment:
        raise SampleError("a part of a message gives a segment, and so does the entry: give one of them")
    said = {one.name: getattr(options, one.name) for one in fields(options) if one.name not in ("begin", "end")}
    given = {name: number for name, number in said.items() if number is not None}
    if options.is_segment:
        given |= {"begin": options.begin, "end": options.end}
    return replace(value, options=replace(value.options, **given))


def list_images(value: Any) -> list[Any]:
    """Return the images of a field: one, several (a list, or a tensor or array of four dimensions), or None."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) or getattr(value, "ndim", 0) == 4 else [value]


def _media(sample: Any, kind: Kind) -> list[Any]:
    """Return the images, videos or sounds in a sample's own fields."""
    value = next((one for name in _FIELDS[kind] if (one := _value(sample, name)) is not None), None)
    if value is None and isinstance(sample, MAPPING):
        return own_media(sample, kind)
    if kind == "image":
        return list_images(value)
    if value is None:
        return []
    if kind == "audio":  # a pair of samples and their rate is one sound
        is_pair = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], int)
        return list(value) if isinstance(value, list | tuple) and not is_pair else [value]
    # A list of images is one video, a list of videos several.
    several = isinstance(value, list | tuple) and not _is_frame(value[0] if value else None)
    return list(value) if several else [value]


def own_media(sample: Mapping[str, Any], kind: Medium) -> list[Any]:
    """Return a crude sample's own images, videos or sounds: `2.jpg` before `10.jpg`.

    Raises SampleError if one of several may be no part of the question, as a mask.
    """
    names = [name for name in sample if not name.startswith("__") and _medium(name, sample[name]) == kind]
    if len(names) > 1 and (drawn := next(filter(is_drawn, names), None)):
        raise SampleError(
            f"the sample has the {kind}s {', '.join(names)}, and all of them would be shown: name those that the texts "
            f"are about, as {kind}s: [PART, …] in its json, or leave out {drawn!r} (part_filter)"
        )
    shown = sorted(names, key=natural_order)
    is_told = any(one.isdigit() for name in names for one in name.rpartition(".")[0])
    if (names != shown and not is_told) or is_against_names(shown):
        raise SampleError(
            f"the sample has the {kind}s {', '.join(names)}, and they would be shown in the order of their names, "
            f"{', '.join(shown)}: list them in the right order, as {kind}s: [PART, …] in its json"
        )
    name_order(sample, kind, shown)
    return [sample[name] for name in shown]


def _medium(name: str, value: Any) -> Medium | None:
    extension = name.rpartition(".")[2].lower()
    if extension in IMAGE_EXTENSIONS:
        return "image"
    is_av = extension in AV_EXTENSIONS and not (extension in UNSURE and isinstance(value, bytes))
    return av_medium_by_name(name) if is_av else medium_by_name(name)


def _is_frame(value: Any) -> bool:
    return getattr(value, "ndim", None) == 3 or (hasattr(value, "size") and not hasattr(value, "ndim"))


def _medium_of_part(kind: Kind, given: Any, waiting: dict[int, Any]) -> Any:
    """Return the medium of a part: its own, or one of those that wait for a place; None if there is none yet."""
    payload = _payload(given)
    said = given if isinstance(given, MAPPING) else {}
    if payload is None and waiting:
        payload = waiting.pop(said["index"] if said.get("index") in waiting else min(waiting))
    if payload is not None and said:
        payload = _with_options(payload, part_options(said, kind))
    return payload


def _read_turn(turn: Any, payloads: dict[Kind, list[Any]], waiting: dict[Kind, dict[int, Any]]) -> Turn:
    said = turn if isinstance(turn, MAPPING) else {}
    role = said.get("role", said.get("from"))
    content = said.get("content", said.get("value")) if role is not None else None
    keys: dict[str, Any] = {}
    if not said.keys() <= _OWN_KEYS:
        keys = {name: value for name, value in said.items() if value is not None and name not in _OWN_KEYS}
    if content is None and isinstance(role, str) and any(name in keys for name in _SAYING):
        role = _known_role(role)
        return Turn(role, None, _is_learned(role, keys), keys)
    if not isinstance(role, str) or not isinstance(content, str | list | tuple):
        raise SampleError(f"a turn must have role and content, or from and value, got {turn!r}"[:500])
    role = _known_role(role)
    parts = split_places(content, role) if isinstance(content, str) else tuple(_part(part) for part in content)
    for part, given in zip(parts, parts if isinstance(content, str) else content, strict=True):
        if part.kind != "text":
            payloads[part.kind].append(_medium_of_part(part.kind, given, waiting[part.kind]))
    return Turn(role, parts, not keys or _is_learned(role, keys), keys)


def _known_role(name: str) -> str:
    return ROLES.get(name.strip().lower(), name)


def _is_learned(role: str, keys: Mapping[str, Any]) -> bool:
    """Return whether the keys of a turn leave it to be learned. Raises SampleError for what cannot be honoured."""
    learned = is_learned(role, keys)
    if role != "assistant" and (
        name := next((one for one in keys if keys[one] and is_weight(one)), None)
    ):  # it asks for nothing
        warn_once(_logger, f"turns of {role!r} have {name}={keys[name]!r}; only answers are learned", f"{name}, turns")
    return learned


def _with_system(turns: Sequence[Any], system: Any) -> list[Any]:
    """Return turns that begin with a system prompt: their own, or the one beside them."""
    first = turns[0]
    own = None
    if isinstance(first, Mapping) and ROLES.get(str(first.get("role", first.get("from")))) == "system":
        own = first.get("content", first.get("value"))
    if own is None:
        return [{"role": "system", "content": system}, *turns]
    if own != system:
        warn_once(
            _logger,
            "a sample has a turn with a system prompt and another `system` beside its turns: the turn is used, and so "
            "in all such samples",
        )
    return list(turns)


def template_keys(content: Conversation) -> list[str]:
    """Return the names of what only a chat template can use: further keys of turns, and `tools`."""
    names = dict.fromkeys([name for turn in content.turns for name in turn.keys if learned_if(name) is None])
    return [*names, *(["tools"] if content.tools else [])]


def check_keys(content: Conversation, unused: Sequence[str], why: str) -> None:
    """Warn of unused keys, each once.

    Raises:
        SampleError: An answer has no text but such keys: it would be learned as an empty one.
    """
    for name in unused:
        warn_once(_logger, f"`{name}` of the samples is not seen by the model: {why}")
    for turn in content.turns:
        saying = [name for name in _SAYING if turn.keys.get(name)]
        is_empty = turn.role == "assistant" and turn.learned and not turn.text
        if is_empty and saying and all(name in unused for name in saying):
            raise SampleError(f"an answer has no text but {' and '.join(saying)}, not seen by the model: {why}")


def name_empty_answers(content: Conversation) -> None:
    """Warn, once, of an empty answer: the model would learn to end its turn at once."""
    empty = [one for one in content.turns if one.role == "assistant" and one.learned and not one.text.strip()]
    if empty and any(not any(map(one.keys.get, _SAYING)) for one in empty):
        why = 'so the model learns to say nothing there; leave such samples out (energon lint), or give it "weight": 0'
        warn_once(_logger, f"a sample has an empty answer, {why}")


def name_control_tokens(content: Conversation | Document, tokens: re.Pattern[str], key: Any) -> None:
    """Warn of control tokens of the tokenizer in texts, at the 1st, 10th, 100th, … sample with one."""
    texts: Sequence[Piece | Turn] = content.pieces if isinstance(content, Document) else content.turns
    for number, one in enumerate(texts, 1):
        if (token := tokens.search(one.text)) is not None:
            place = f"message {number} ({one.role})" if isinstance(one, Turn) else f"text {number}"
            _counts["control"] += 1
            if str(count := _counts["control"]).strip("0") == "1":
                _logger.warning(
                    f"{place} of sample {key!r} has {token[0]!r} in its text: the model sees a control token there, "
                    "as with transformers, and not these letters. Remove it from the data, or write it with a space "
                    f"inside (samples like this in this process: {count})"
                )
            return


_counts: Counter[str] = Counter()


def name_missing_end() -> None:
    """Warn, once, of a tokenizer without an end-of-sequence token."""
    remedy = "set tokenizer.eos_token, or a template that writes an end of its own (stop_string)"
    warn_once(_logger, f"the tokenizer has no eos_token, so the model does not learn to end: {remedy}")


def _part(part: Any) -> Part:
    kind = part_kind(part)
    text = None
    if kind == "text" and (text := part_text(part)) is not None:
        return Part("text", text)
    if kind is not None and kind != "text":
        return Part(kind)
    raise SampleError(f"a part of a turn must have the type text, image, video or audio, got {part!r}"[:500])


def _payload(part: Any) -> Any:
    """Return the image, video or sound in a part; None for a path or URL, which is not loaded here."""
    return own_payload(part) if isinstance(part, MAPPING) else None


def _placed(
    turns: list[Turn],
    payloads: dict[Kind, list[Any]],
    waiting: dict[Kind, dict[int, Any]],
    place_images: Literal["before", "after"],
) -> list[Turn]:
    """Place media without a placeholder at the first question, and check the numbers."""
    for kind in payloads:
        if not (waiting[kind] or payloads[kind]):
            continue
        if waiting[kind] and not payloads[kind]:
            first = next((n for n, turn in enumerate(turns) if turn.role == "user"), None)
            if first is not None:
                places = (Part(kind),) * len(waiting[kind])
                parts = tuple(turns[first].parts)
                parts = places + parts if place_images == "before" else parts + places
                turns[first] = Turn(turns[first].role, parts, turns[first].learned, turns[first].keys)
                payloads[kind], waiting[kind] = [*waiting[kind].values()], {}
        missing = sum(payload is None for payload in payloads[kind])
        if missing or waiting[kind]:
            wanted = len(payloads[kind])
            raise SampleError(mismatch(kind, wanted, wanted - missing + len(waiting[kind])))
    return turns


def turn_holder(sample: Any) -> Any:
    """Return the holder of the turns: the sample, or its JSON; None if there are no turns."""
    for holder in (sample, _value(sample, "json")):
        if isinstance(holder, list) and holder:
            return {"messages": holder}
        if holder is not sample and isinstance(holder, MAPPING) and (turns := read_turns(holder)) is not None:
            if isinstance(sample, MAPPING):
                name_unused(sample, holder)
            is_pair = all(holder.get(name) is None for name in _TURNS)
            return {**holder, "messages": turns, **dict.fromkeys(SYSTEMS)} if is_pair else holder
        if holder is not None and any(_value(holder, name) is not None for name in _TURNS):
            return holder
    return None


def _value(holder: Any, name: str) -> Any:
    is_other = not isinstance(holder, Sample)
    if is_other and isinstance(holder, MAPPING):
        return holder.get(name)
    return None if is_other and isinstance(holder, list | Tensor) else getattr(holder, name, None)
