"""Bring conversations from the shapes found in datasets into one form.

A `ChatSample`, any sample or crude sample with `messages`, `conversations` or `conversation` (also inside a `json`
part), and the types that `MultiModalTaskEncoder` encodes. A turn is `{"role": …, "content": …}` or `{"from": …,
"value": …}`; `human` and `gpt` mean `user` and `assistant`, and `rows.turns` knows the other forms. Its content is a
text with the placeholders `<image>` and `<video>`, or a list of parts `{"type": "text", "text": …}`, `{"type":
"image"}`, `{"type": "video"}`. Images and videos come in order from the sample's own fields (`images`, `image`, `imgs`;
`videos`, `video`), from the parts, or, in a crude sample, from its own files.

All other keys of a turn (`tool_calls`, `reasoning_content`, `name`, …) go to the chat template as they are. Those of
`FLAGS` in `rows.turns` also say whether an answer is learned. `system` and `tools` may stand beside the turns.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from energon_bridge.av import AV_EXTENSIONS
from energon_bridge.errors import SampleError
from energon_bridge.rows.turns import (
    CONVERSATIONS as _TURNS,
    FLAGS,
    ROLES,
    WEIGHTS,
    Medium,
    has_own,
    is_learned,
    known_turns,
    listed_tools,
    medium_of,
    medium_of_av,
    mismatch,
    part_kind,
    part_text,
    placed,
    system_of,
    tools_of,
    turns_of,
)
from energon_bridge.samples import Sample, VidQASample, edataclass
from energon_bridge.task_encoder.conversation import Conversation
from energon_bridge.task_encoder.families.vision import Kind
from energon_bridge.task_encoder.images import IMAGE_EXTENSIONS
from energon_bridge.task_encoder.sample_encoders import images_of
from energon_bridge.task_encoder.templates import parsed

_logger = logging.getLogger(__name__)
IMAGE, VIDEO = "<image>", "<video>"
_PLACEHOLDERS = re.compile(r"\n?(<image>|<video>)\n?")
_OWN_KEYS = frozenset({"role", "from", "content", "value"})
_SAYING = ("tool_calls", "function_call", "reasoning_content", "thinking", "reasoning", "refusal", "audio")
"""Keys that an assistant can say something with in place of a content."""
_FIELDS: Mapping[Kind, Sequence[str]] = {"image": ("images", "image", "imgs"), "video": ("videos", "video")}


@edataclass
class ChatSample(Sample):
    """A conversation with its images and videos in the order of their placeholders.

    `messages` is a list of turns, or JSON of one; a video is a `VideoFrames`, frames alone, a list of images, or a
    decoder of videos. `tools` is a list of JSON schemas, or JSON of one; `system` is the system prompt, if no turn is.
    """

    messages: Any
    images: Any = None
    videos: Any = None
    tools: Any = None
    system: Any = None


@dataclass(frozen=True, slots=True)
class Part:
    """A text, or the placeholder of an image or video."""

    kind: Literal["text", "image", "video"]
    text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn of a conversation: whether it is learned if it is an answer, and its other keys."""

    role: str
    parts: tuple[Part, ...]
    learned: bool = True
    has_content: bool = True
    keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The texts of the turn."""
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """A conversation with its images and videos in the order of their placeholders."""

    messages: tuple[Message, ...]
    images: tuple[Any, ...] = ()
    videos: tuple[Any, ...] = ()
    tools: Sequence[Any] | None = None


def has_turns(sample: Any) -> bool:
    """Return whether a sample contains turns."""
    return _turns_of(sample) is not None


def chat_of(sample: Any, *, place_images: Literal["before", "after"] = "before") -> Chat:
    """Return the conversation of a sample that has turns.

    Raises:
        SampleError: The turns have an unknown shape, a flag that cannot be honoured, or other numbers of placeholders
            than there are images and videos.
    """
    holder = _turns_of(sample)
    name = next(name for name in _TURNS if _value(holder, name) is not None)
    turns = _value(holder, name)
    if isinstance(turns, str | bytes):
        turns = parsed(turns, "turns")
    tools, system = _value(holder, "tools"), _value(holder, "system")
    if isinstance(holder, Mapping):
        tools, system = tools_of(holder), system_of(holder)
    if isinstance(turns, Mapping):
        tools = tools_of(turns) if tools is None else tools
        system = system_of(turns) if system is None else system
        turns = next((turns[name] for name in _TURNS if name in turns), None)
    if not isinstance(turns, Sequence) or not turns:
        raise SampleError(f"{name} must be a non-empty list of turns, got {turns!r}"[:500])
    if system:
        turns = _with_system(turns, system)
    payloads: dict[Kind, list[Any]] = {"image": [], "video": []}
    waiting = {kind: media_of(sample, kind) for kind in payloads}
    there: dict[Medium, int] = {kind: len(found) for kind, found in waiting.items()}
    if isinstance(sample, Mapping):
        there["audio"] = len(own_media(sample, "audio"))
    known = placed(known_turns(turns), there)
    messages = [_message(turn, payloads, waiting) for turn in known]
    return Chat(
        messages=tuple(_placed(messages, payloads, waiting, place_images)),
        images=tuple(payloads["image"]),
        videos=tuple(payloads["video"]),
        tools=listed_tools(tools),
    )


def chat_of_conversation(content: Conversation) -> Chat:
    """Return the conversation that a sample encoder made, with `<image>` for each image."""
    placed([{"role": turn.role, "content": turn.text} for turn in content.turns], {"image": len(content.images)})
    messages = tuple(
        Message(role=turn.role, parts=parts_of(turn.text, turn.role), learned=turn.learned) for turn in content.turns
    )
    places = sum(part.kind == "image" for message in messages for part in message.parts)
    if places != len(content.images):
        raise SampleError(mismatch("image", places, len(content.images)))
    return Chat(messages=messages, images=tuple(content.images))


def chat_of_video(sample: VidQASample, *, place_images: Literal["before", "after"] = "before") -> Chat:
    """Return the question about a video and the answer with the largest weight. Raises SampleError without answers."""
    answers: Any = sample.answers
    if not answers:
        raise SampleError("a VidQASample needs answers for training")
    weights = sample.answer_weights
    best = 0 if weights is None else max(range(len(weights)), key=lambda number: float(weights[number]))
    answer = answers if isinstance(answers, str) else answers[best]
    turns = [{"role": "user", "content": sample.context}, {"role": "assistant", "content": answer}]
    return chat_of(ChatSample(__key__=sample.__key__, messages=turns, videos=[sample.video]), place_images=place_images)


def parts_of(content: str, role: str = "user") -> tuple[Part, ...]:
    """Split a text at its placeholders; a line break next to one belongs to it. In an answer they are text."""
    if role == "assistant":
        return (Part("text", content),) if content else ()
    parts: list[Part] = []
    for number, piece in enumerate(_PLACEHOLDERS.split(content)):
        if number % 2:
            parts.append(Part("image" if piece == IMAGE else "video"))
        elif piece:
            parts.append(Part("text", piece))
    return tuple(parts)


def media_of(sample: Any, kind: Kind) -> list[Any]:
    """Return the images or videos in a sample's own fields."""
    value = next((found for name in _FIELDS[kind] if (found := _value(sample, name)) is not None), None)
    if value is None and isinstance(sample, Mapping):
        return own_media(sample, kind)
    if kind == "image":
        return images_of(value)
    if value is None:
        return []
    # A list of images is one video, a list of videos several.
    several = isinstance(value, list | tuple) and not _is_frame(value[0] if value else None)
    return list(value) if several else [value]


def own_media(sample: Mapping[str, Any], kind: Medium) -> list[Any]:
    """Return a crude sample's own images, videos or sounds: `2.jpg` before `10.jpg`."""
    names = (name for name in sample if not name.startswith("__") and _medium(name) == kind)
    return [sample[name] for name in sorted(names, key=_by_number)]


def _medium(name: str) -> Medium | None:
    extension = name.rpartition(".")[2].lower()
    if extension in IMAGE_EXTENSIONS:
        return "image"
    return medium_of_av(name) if extension in AV_EXTENSIONS else medium_of(name)


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)]


def _is_frame(value: Any) -> bool:
    return getattr(value, "ndim", None) == 3 or (hasattr(value, "size") and not hasattr(value, "ndim"))


def _message(turn: Any, payloads: dict[Kind, list[Any]], waiting: dict[Kind, list[Any]]) -> Message:
    role = turn.get("role", turn.get("from")) if isinstance(turn, Mapping) else None
    content = turn.get("content", turn.get("value")) if role is not None else None
    keys: dict[str, Any] = {}
    if isinstance(turn, Mapping):
        keys = {name: value for name, value in turn.items() if value is not None and name not in _OWN_KEYS}
    has_content = content is not None or not any(name in keys for name in _SAYING)
    if not has_content:
        content = ()
    if not isinstance(role, str) or not isinstance(content, str | list | tuple):
        raise SampleError(f"a turn must have role and content, or from and value, got {turn!r}"[:500])
    role = ROLES.get(role.strip().lower(), role)
    parts = parts_of(content, role) if isinstance(content, str) else tuple(_part(part) for part in content)
    given = [None] * len(parts) if isinstance(content, str) else [_payload(part) for part in content]
    for part, payload in zip(parts, given, strict=True):
        if part.kind == "text":
            continue
        if payload is None and waiting[part.kind]:
            payload = waiting[part.kind].pop(0)
        payloads[part.kind].append(payload)
    learned = not keys or _is_learned(role, keys)
    return Message(role=role, parts=parts, learned=learned, has_content=has_content, keys=keys)


def _is_learned(role: str, keys: Mapping[str, Any]) -> bool:
    """Return whether the keys of a turn leave it to be learned. Raises SampleError for what cannot be honoured."""
    learned = is_learned(role, keys)
    if role != "assistant" and (name := next((one for one in WEIGHTS if keys.get(one)), None)):  # it asks for nothing
        _warn_once(name, _named, f"turns of {role!r} have {name}={keys[name]!r}; only answers are learned")
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
        _warn_once(
            "system",
            _named,
            "a sample has a turn with a system prompt and another `system` beside its turns: the turn is used, and so "
            "in all such samples",
        )
    return list(turns)


def keys_of(chat: Chat) -> list[str]:
    """Return what only a template can use of a conversation: keys of its turns, and `tools`."""
    names = dict.fromkeys(name for message in chat.messages for name in message.keys if name not in FLAGS)
    return [*names, *(["tools"] if chat.tools else [])]


def check_keys(chat: Chat, unused: Sequence[str], named: set[str], why: str) -> None:
    """Warn of unused keys, each once for a set of names.

    Raises:
        SampleError: An answer has no text but such keys: it would be learned as an empty one.
    """
    for name in unused:
        _warn_once(name, named, f"`{name}` of the samples is not seen by the model: {why}")
    for message in chat.messages:
        saying = [name for name in _SAYING if message.keys.get(name)]
        is_empty = message.role == "assistant" and message.learned and not message.text
        if is_empty and saying and all(name in unused for name in saying):
            raise SampleError(f"an answer has no text but {' and '.join(saying)}, not seen by the model: {why}")


_named: set[str] = set()


def _warn_once(name: str, named: set[str], message: str) -> None:
    if name not in named:
        named.add(name)
        _logger.warning(message)


def _part(part: Any) -> Part:
    kind, text = part_kind(part), None
    if kind == "text" and (text := part_text(part)) is not None:
        return Part("text", text)
    if kind in ("image", "video"):
        return Part(kind)
    raise SampleError(f"a part of a turn must have the type text, image or video, got {part!r}"[:500])


def _payload(part: Any) -> Any:
    """Return the image or video in a part; None for a path or URL, which is not loaded here."""
    return part[part["type"]] if isinstance(part, Mapping) and has_own(part) else None


def _placed(
    messages: list[Message],
    payloads: dict[Kind, list[Any]],
    waiting: dict[Kind, list[Any]],
    place_images: Literal["before", "after"],
) -> list[Message]:
    """Place images and videos without a placeholder at the first question, and check the numbers."""
    for kind in payloads:
        if waiting[kind] and not payloads[kind]:
            first = next((n for n, message in enumerate(messages) if message.role == "user"), None)
            if first is not None:
                places = (Part(kind),) * len(waiting[kind])
                parts = messages[first].parts
                parts = places + parts if place_images == "before" else parts + places
                messages[first] = replace(messages[first], parts=parts)
                payloads[kind], waiting[kind] = waiting[kind], []
        missing = sum(payload is None for payload in payloads[kind])
        if missing or waiting[kind]:
            wanted = len(payloads[kind])
            raise SampleError(mismatch(kind, wanted, wanted - missing + len(waiting[kind])))
    return messages


def _turns_of(sample: Any) -> Any:
    """Return the holder of the turns: the sample, or its JSON."""
    for holder in (sample, _value(sample, "json")):
        if isinstance(holder, list) and holder:
            return {"messages": holder}
        if holder is not sample and isinstance(holder, Mapping) and (turns := turns_of(holder)) is not None:
            is_pair = all(holder.get(name) is None for name in _TURNS)
            return {**holder, "messages": turns, "system": None, "system_prompt": None} if is_pair else holder
        if holder is not None and any(_value(holder, name) is not None for name in _TURNS):
            return holder
    return None


def _value(holder: Any, name: str) -> Any:
    if isinstance(holder, Mapping):
        return holder.get(name)
    return None if isinstance(holder, list | Tensor) else getattr(holder, name, None)
