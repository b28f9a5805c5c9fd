"""Render conversations with a chat template, and find the text that is learned.

`conversations/templates.py` says what that is. Where the template does not mark it, that takes two renderings per
answer. But conversations of one shape (the same roles, with texts, images and videos in the same places) have the same
text around their own texts, so these renderings are made once per shape, with probe words as texts. A sample is then
rendered once, and the probe gives the places of its answers, provided the rendering is exactly what the probe predicts.
If it is not, because the template depends on the texts, all renderings are made. If it cannot depend on them, because
all it does is write them (`only_written` of `templates`), no sample of that shape is rendered: its texts are put in.

The result is a list of segments: prompts, learned text, and the placeholder of each image and video.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, count
from typing import Any, Literal, NamedTuple

import numpy as np

from energon_bridge.core.errors import ConfigurationError, SampleError
from energon_bridge.models.conversations.conversation import (
    Conversation,
    Document,
    Kind,
    Part,
    Turn,
    check_keys,
    split_places,
    template_keys,
)
from energon_bridge.models.conversations.templates import (
    BEFORE_ALL,
    PROBE,
    ChatTemplate,
    RunDay,
    TextSpan,
    check_markers,
    only_written,
    template_source,
)
from energon_bridge.models.conversations.texts import as_array, is_fast, tokenize, tokens_with_places
from energon_bridge.models.families.vision import AUDIO_TYPE, IMAGE_TYPE, TEXT_TYPE, VIDEO_TYPE, Plan, PlanningFamily

_MOST_OUTLINES = 4096
_ODD = " \t{}. Of <b> \"an\" 'É' & \\n </think> {{{{ odd }}}} %s TEXT\n "
_UNUSED = (
    "the chat template does not use it; set one that does (ChatConfig(chat_template=...), or data.chat_template of the "
    "training script)"
)


class TextPiece(NamedTuple):
    """A piece of text of one kind; with `media`, the placeholder of an image or video, whose plan has the text.

    Of a `marked` piece all tokens are learned that have any of its text; else, white space at its end is not learned.
    """

    text: str
    learned: bool = False
    media: Kind | None = None
    marked: bool = False


class Outline(NamedTuple):
    """The text that a template writes for conversations of one shape.

    `around` is the text before, between and after the conversation's own texts. `answers` has, for the start and end of
    each answer, the number of texts before it and its offset in the following piece of `around`. `exact`: it is the
    text for any texts that are not empty.
    """

    around: tuple[str, ...]
    answers: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    exact: bool = False

    def pieces(self, texts: Sequence[str]) -> list[str]:
        """Return the text of a conversation with these texts, in pieces."""
        return [piece for pair in zip(self.around, texts, strict=False) for piece in pair] + [self.around[-1]]

    def spans(self, whole: str, pieces: Sequence[str]) -> list[TextSpan] | None:
        """Return the answers in a rendering of these pieces; None if one begins behind its end."""
        behind = [0, *accumulate(map(len, pieces))][::2]
        spans = []
        for (start_text, start), (end_text, end) in self.answers:
            begin = behind[start_text] + start
            span = TextSpan(begin, len(whole[: behind[end_text] + end].rstrip()))
            if span.end < begin:
                return None
            spans.append(span)
        return spans


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRenderer:
    """Renders conversations with a tokenizer's chat template.

    Args:
        with_tools: That of conversations with tools.
        family: Has the placeholders of images and videos; None: there are none.
        learn: `all` answers, or the `last`.
    """

    plain: ChatTemplate
    with_tools: ChatTemplate
    family: PlanningFamily | None
    learn: Literal["all", "last"] = "all"
    outlines: dict[Any, Outline | None] = field(default_factory=dict, init=False, repr=False, compare=False)
    named: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    media: dict[Kind, tuple[str, str]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def template(self) -> str:
        """The Jinja template."""
        return self.plain.source

    @property
    def run_day(self) -> RunDay | None:
        """The day of the run; None if nothing depends on it."""
        is_used = self.plain.day.given or self.plain.writes_date or self.with_tools.writes_date
        return self.plain.day if is_used else None

    def segments(self, content: Conversation) -> list[TextPiece]:
        """Return the text of a conversation.

        Raises:
            SampleError: It has no answer to learn, or the template leaves out what one says.
            ConfigurationError: The chat template cannot be used for training.
        """
        answers = self._answers(content)
        template = self.with_tools if content.tools else self.plain
        if unused := [name for name in template_keys(content) if not template.uses(name)]:
            check_keys(content, unused, self.named, _UNUSED)
        if template.marks:
            text, spans = template.answers(self._messages(content.turns, template), content.tools, answers)
        else:
            text, spans = self._compared(content, answers, template)
        if "ends" not in self.named:
            self.named.add("ends")
            template.check_ends(text, spans, placeholder_tokens(self.family).values())
        if not self.media:
            known = placeholder_tokens(self.family).items()
            self.media.update({kind: (media_text(self.family, kind), token) for kind, token in known if token})
        return split_at(text, spans, self.media, template.marks)

    def _answers(self, content: Conversation) -> list[int]:
        """Return the numbers of the messages that are learned."""
        said = [number for number, turn in enumerate(content.turns) if turn.role == "assistant"]
        answers = [number for number in said if content.turns[number].learned]
        if self.learn == "last":
            answers = [number for number in answers if number == said[-1]]
        if not answers:
            flagged = ": keys of its turns (weight, loss, train, …) leave out what would be learned" if said else ""
            raise SampleError(f"the conversation has no answer to learn{flagged}")
        return answers

    def _compared(
        self, content: Conversation, answers: Sequence[int], template: ChatTemplate
    ) -> tuple[str, list[TextSpan]]:
        """Return the text, and the answers: by the outline of the conversation's shape, or else by all renderings."""
        outline = None if content.tools or _is_shaped(content, template) else self._outline(content)
        if outline is not None:
            texts = _texts_in(content)
            pieces = outline.pieces(texts)
            whole = predicted = "".join(pieces)
            if not (outline.exact and all(texts)) or any(turn.keys for turn in content.turns):
                whole = template.text(self._messages(content.turns, template))
            spans = outline.spans(whole, pieces) if whole == predicted else None
            if spans is not None:
                return whole, spans
        return template.answers(self._messages(content.turns, template), content.tools, answers)

    def _outline(self, content: Conversation) -> Outline | None:
        """Return the outline of conversations of this shape; None if the template changes their texts."""
        shape = [(turn.role, turn.learned, tuple([part.kind for part in turn.parts])) for turn in content.turns]
        key = (self.plain.day.today, *shape)  # which the template may write
        if key not in self.outlines:
            if len(self.outlines) >= _MOST_OUTLINES:
                self.outlines.clear()
            self.outlines[key] = self._outlined(content)
        return self.outlines[key]

    def _outlined(self, content: Conversation) -> Outline | None:
        content = _with_texts(content, f"word{{}}of{PROBE.replace(' ', '')}")
        words = _texts_in(content)
        messages = self._messages(content.turns, self.plain)
        try:
            whole, spans = self.plain.answers(messages, None, self._answers(content))
        except (ConfigurationError, SampleError):
            return None  # the sample itself raises the error
        around = []
        rest = whole
        for one in words:
            before, separator, rest = rest.partition(one)
            if not separator:
                return None
            around.append(before)
        around.append(rest)
        if any(one in piece for one in words for piece in around):
            return None  # the template writes a text twice
        begins = [0, *accumulate(len(piece) + len(one) for piece, one in zip(around, words, strict=False))]

        def place(position: int) -> tuple[int, int] | None:
            number = sum(begin <= position for begin in begins) - 1
            offset = position - begins[number]
            return (number, offset) if offset <= len(around[number]) else None

        answers = [(place(span.start), place(span.end)) for span in spans]
        if any(start is None or end is None for start, end in answers):
            return None
        outline = Outline(tuple(around), tuple(answers))  # type: ignore[arg-type]
        return outline._replace(exact=self._is_exact(outline, content))

    def _is_exact(self, outline: Outline, content: Conversation) -> bool:
        """Return whether any texts stand in an outline as they are, the oddest among them."""
        content = _with_texts(content, _ODD)
        messages = self._messages(content.turns, self.plain)
        numbers = self._answers(content)
        if any(turn.keys for turn in content.turns) or not only_written(self.plain, messages, numbers):
            return False
        whole, spans = self.plain.answers(messages, None, numbers)
        pieces = outline.pieces(_texts_in(content))
        return "".join(pieces) == whole and outline.spans(whole, pieces) == spans

    def _messages(self, turns: Sequence[Turn], template: ChatTemplate) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        for turn in turns:
            message = {"role": turn.role, **turn.keys}
            if turn.content is not None:
                message["content"] = self._content(turn, template)
            if "tool_calls" in turn.keys and template.uses("tool_calls"):
                message["tool_calls"] = template.called(turn.keys["tool_calls"])
            messages.append(message)
        return messages

    def _content(self, turn: Turn, template: ChatTemplate) -> Any:
        parts = turn.parts
        if template.takes_parts(turn.role):
            return [{"type": "text", "text": p.text} if p.kind == "text" else {"type": p.kind} for p in parts]
        return "".join(part.text if part.kind == "text" else self._written(part.kind) for part in parts)

    def _written(self, kind: Kind) -> str:
        text = media_text(self.family, kind)
        # On a line of its own, as in conversations written as text.
        return text if text.startswith("<|") else f"{text}\n"


def _texts_in(content: Conversation) -> list[str]:
    return [part.text for turn in content.turns for part in turn.parts if part.kind == "text"]


def _with_texts(content: Conversation, form: str) -> Conversation:
    """Return a conversation with other texts, numbered in a form."""
    numbers = count()

    def other(part: Part) -> Part:
        return replace(part, text=form.format(next(numbers))) if part.kind == "text" else part

    return replace(content, turns=[replace(turn, content=tuple(map(other, turn.parts))) for turn in content.turns])


def _is_shaped(content: Conversation, template: ChatTemplate) -> bool:
    """Return whether more than the texts decides about the rendering, or the conversation begins with an answer."""
    if next(turn.role for turn in content.turns if turn.role not in BEFORE_ALL) == "assistant":
        return True
    return any(turn.keys and any(map(template.uses, turn.keys)) for turn in content.turns)


def make_renderer(
    tokenizer: Any,
    family: PlanningFamily | None,
    *,
    template: str | None,
    learn: Literal["all", "last"],
    options: Mapping[str, Any],
    day: RunDay | None = None,
) -> ChatRenderer:
    """Return the renderer for a tokenizer; its own template is the default.

    Raises:
        ConfigurationError: There is no template.
    """
    source = template_source(tokenizer, template)
    if not isinstance(source, str):
        raise ConfigurationError(
            f"{type(tokenizer).__name__} has no chat template (found: {type(source).__name__}): set "
            "ChatConfig(chat_template=...), for example to LLAVA_TEMPLATE of energon_bridge.models.families"
        )
    if source in (CHATML_TEMPLATE, QWEN_VL_TEMPLATE, OMNI_TEMPLATE):
        check_markers("<|im_start|><|im_end|>", tokenizer)
    day = day or RunDay.of(None)
    made = ChatTemplate(tokenizer=tokenizer, source=source, options=options, day=day)
    for_tools = template_source(tokenizer, template, "tool_use")
    with_tools = replace(made, source=for_tools) if isinstance(for_tools, str) and for_tools != source else made
    return ChatRenderer(plain=made, with_tools=with_tools, family=family, learn=learn)


def placeholder_tokens(family: PlanningFamily | None) -> dict[Kind, str | None]:
    """Return the placeholder tokens of images, videos and sounds."""
    if family is None:
        return {}
    return {"image": family.image_token, "video": family.video_token, "audio": getattr(family, "audio_token", None)}


def document_segments(document: Document, family: PlanningFamily | None, *, eos: str) -> list[TextPiece]:
    """Return the text of a document unchanged, with `<image>` for images in prompts, and its end learned.

    White space is learned like any other text: without a line break before its end, the end would not be reached.
    """
    segments: list[TextPiece] = []
    for piece in document.pieces:
        if piece.learned:
            segments.append(TextPiece(piece.text, learned=True, marked=True))
            continue
        for part in split_places(piece.text):
            kind = part.kind
            segments.append(TextPiece(part.text) if kind == "text" else TextPiece(media_text(family, kind), media=kind))
    return [*segments, TextPiece(eos, learned=True)]


def split_at(
    text: str, spans: Sequence[TextSpan], media: Mapping[Kind, tuple[str, str]], marked: bool
) -> list[TextPiece]:
    """Split a text at the borders of learned text, by marks or not, and at the forms of images, videos and sounds."""
    places: dict[int, tuple[int, Kind | None]] = {}
    for kind, forms in media.items():
        if forms[0] in text or forms[1] in text:
            places |= {match.start(): (match.end(), kind) for match in _pattern(*forms).finditer(text)}
    segments: list[TextPiece] = []
    position = 0
    for start, (end, of_place) in [*sorted(places.items()), (len(text), (len(text), None))]:
        for span in spans:
            if span.end > position and span.start < start:
                begin = max(position, span.start)
                behind = min(start, span.end)
                segments += (TextPiece(text[position:begin]), TextPiece(text[begin:behind], True, None, marked))
                position = behind
        segments += (TextPiece(text[position:start]), TextPiece(text[start:end], media=of_place))
        position = end
    return [segment for segment in segments if segment.text]


@lru_cache
def _pattern(*forms: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, forms)))


def media_text(family: PlanningFamily | None, kind: Kind) -> str:
    """Return the text for an image, video or sound if no template writes it. Raises SampleError if there are none."""
    text: str = getattr(family, f"{kind}_text", "")
    if not text:
        raise SampleError(f"the sample has {_MANY[kind]}, but the model's family does not support them")
    return text


# Tokens ---------------------------------------------------------------------------------------------------------------
#
# From segments of text to one token sequence, with images and videos in place. The text is tokenised as a whole, so
# that the tokens equal those of the model's own processor. A token is learned if it lies in a learned segment, even if
# it starts with white space before the segment; white space at the end of a segment is not learned. Tokenizers without
# offsets (those that are not fast) tokenise segment by segment. Marked text is learned to the last of its characters.


_TYPES = {"image": IMAGE_TYPE, "video": VIDEO_TYPE, "audio": AUDIO_TYPE}
_MANY = {"image": "images", "video": "videos", "audio": "sounds"}
_Found = tuple[np.ndarray, list[int], np.ndarray]
"""The tokens of all segments; where those of each begin, and the last end; and whether they are learned (bool)."""


class MediumTokens(NamedTuple):
    """The tokens of a medium in a sequence, from `start` to before `end`."""

    plan: Plan
    start: int
    end: int


class Tokens(NamedTuple):
    """A token sequence: in three rows, int64, its tokens, whether they are learned, and their types; and its media."""

    rows: np.ndarray
    media: Sequence[MediumTokens]

    def until(self, end: int) -> Tokens:
        """Return the first tokens, and the media that end with them."""
        return Tokens(self.rows[:, :end], [place for place in self.media if place.end <= end])

    def after(self, token: int) -> Tokens:
        """Return the sequence behind a token of text, which is not learned."""
        media = [MediumTokens(plan, start + 1, end + 1) for plan, start, end in self.media]
        return Tokens(np.insert(self.rows, 0, (token, 0, TEXT_TYPE), axis=1), media)


def tokenize_segments(
    segments: Sequence[TextPiece], plans: Sequence[Plan], tokenizer: Any, placeholders: Mapping[str, int]
) -> Tokens:
    """Return the tokens of segments, up to the last one that is learned.

    Args:
        plans: The plans of its images and videos, in the order of their placeholders.
        tokenizer: Of the transformers interface.
        placeholders: The placeholder tokens of images and videos, by kind.

    Raises:
        SampleError: The numbers of placeholders and plans differ, or a text contains a placeholder token.
    """
    if [segment.media for segment in segments if segment.media] != [plan.kind for plan in plans]:
        raise SampleError(_mismatch(segments, plans))
    waiting = iter(plans)
    planned = [next(waiting) if segment.media else None for segment in segments]
    texts = [one.text if plan is None else plan.written(one.text) for one, plan in zip(segments, planned, strict=True)]
    tokenise = _by_offsets if is_fast(tokenizer) else _by_segment
    found = _expanded(tokenise(segments, texts, tokenizer), planned, placeholders)
    last = found.rows[1].nonzero()[0][-1:].tolist()
    return found.until(last[0] + 1) if last else found


def placeholder_ids(tokenizer: Any, family: PlanningFamily | None) -> Mapping[str, int]:
    """Return the placeholder tokens of images and videos. Raises ConfigurationError if the tokenizer lacks them."""
    ids: dict[str, int] = {}
    for kind, token in placeholder_tokens(family).items():
        if not token:
            continue
        token_id = tokenizer.convert_tokens_to_ids(token)
        if token_id is None or token_id == getattr(tokenizer, "unk_token_id", None):
            raise ConfigurationError(
                f"the tokenizer does not know the {kind} token {token!r}: add it as a special token, or pass a family "
                f"with another {kind}_token"
            )
        ids[kind] = int(token_id)
    return ids


def bos_to_add(tokenizer: Any, wanted: bool | None) -> int | None:
    """Return the begin-of-sequence token to add, if any."""
    bos: int | None = tokenizer.bos_token_id
    if wanted is None:
        wanted = bos is not None and list(tokenizer.encode("", add_special_tokens=True))[:1] == [bos]
    return bos if wanted else None


def _mismatch(segments: Sequence[TextPiece], plans: Sequence[Plan]) -> str:
    places = [segment.media for segment in segments if segment.media]
    kinds = [plan.kind for plan in plans]
    return (
        f"the rendered text has places for {places or 'nothing'}, but the sample has {kinds or 'nothing'}: the chat "
        "template must write each image and video once, in order, and the texts must not contain their tokens"
    )


def _by_offsets(segments: Sequence[TextPiece], texts: Sequence[str], tokenizer: Any) -> _Found:
    text = "".join(texts)
    tokens, starts, ends = tokens_with_places(tokenizer, text)
    begins = np.maximum.accumulate(starts)
    learned = np.zeros(len(tokens), np.bool_)
    borders = np.fromiter(accumulate(map(len, texts)), np.int64, len(texts))
    cuts = begins.searchsorted(borders)
    behinds = [0, *cuts[:-1].tolist(), len(tokens)]  # that of each segment follows that of the one before it
    # Where the last token of a segment goes on behind it:
    for number in (ends[cuts - 1] > borders).nonzero()[0].tolist() if len(tokens) else ():
        segment = segments[number]
        behind = behinds[number + 1]
        end = borders[number]
        # A token with leading white space still belongs to the segment after it; to marked text, any token does.
        is_marked = number + 1 < len(segments) and segments[number + 1].marked
        while not (segment.learned and texts[number]) and behind > behinds[number] and ends[behind - 1] > end:
            if not (is_marked or text[begins[behind - 1] : end].isspace()):
                break
            behind -= 1
        behinds[number + 1] = behind
    for number, segment in enumerate(segments):
        if segment.learned:
            first, behind = behinds[number : number + 2]
            content = behind
            if not segment.marked:
                said = borders[number] - len(texts[number]) + len(texts[number].rstrip())
                content = min(max(int(begins.searchsorted(said)), first), behind)
                learned[content:behind] = starts[content:behind] == ends[content:behind]
            learned[first:content] = True
    return tokens, behinds, learned


def _by_segment(segments: Sequence[TextPiece], texts: Sequence[str], tokenizer: Any) -> _Found:
    tokens = []
    borders = [0]
    learned = bytearray()
    for segment, text in zip(segments, texts, strict=True):
        content = text.rstrip() if segment.learned and not segment.marked else text
        said, rest = tokenize(tokenizer, (content, text[len(content) :]))
        tokens += [*said, *rest]
        learned += bytes([segment.learned]) * len(said) + bytes(len(rest))
        borders.append(len(tokens))
    return as_array(tokens), borders, np.array(learned, np.bool_)


def _expanded(found: _Found, planned: Sequence[Plan | None], placeholders: Mapping[str, int]) -> Tokens:
    """Return tokens with each placeholder token replaced by the planned number of tokens, and with their types."""
    tokens, borders, learned = found
    rows = np.zeros((4, len(tokens)), np.int64)
    media = []
    more = 0
    rows[0], rows[1], rows[3] = tokens, learned, 1
    reserved = sorted(place for token in placeholders.values() for place in (tokens == token).nonzero()[0].tolist())
    for plan, first, end in zip(planned, borders, borders[1:], strict=False):
        if plan is None:
            continue
        if reserved and reserved[0] < first:
            break
        repeated = plan.token_ids or (placeholders[plan.kind],)
        places = [place for place, token in enumerate(tokens[first:end].tolist(), first) if token in repeated]
        if len(places) != len(plan.runs):
            raise SampleError(
                f"{plan.text!r} has {len(places)} placeholder tokens {repeated} after tokenizing, "
                f"expected {len(plan.runs)}: the placeholder must be a special token of the tokenizer"
            )
        rows[2, places], rows[3, places] = _TYPES[plan.kind], plan.runs
        start = first + more
        more = more + plan.tokens - len(places)
        media += [MediumTokens(plan, start, end + more)] if end > first else []
        reserved = [place for place in reserved if place >= end]
    if reserved:
        number = bisect_right(borders, reserved[0])
        text = tokens[borders[number - 1] : borders[number]]
        kind = next(kind for kind, token in placeholders.items() if token in text)
        raise SampleError(f"a text of the sample contains the token reserved for a {kind}")
    return Tokens(rows[:3].repeat(rows[3], axis=1), media)


# Templates ------------------------------------------------------------------------------------------------------------
#
# Chat templates of the families, for tokenizers without one (those of tiny models, say). A conversation is a list of
# messages; the content of each is a text or a list of parts `{"type": "text", "text": …}`, `{"type": "image"}` and
# `{"type": "video"}`. A template writes the placeholder token once for each image or video.


# No macro: a call of one in transformers' sandbox takes as long as a turn.
_PARTS = (
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}{{ IMAGE }}"
    "{%- elif part.type == 'video' -%}{{ VIDEO }}"
    "{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
)


def _with_parts(template: str, image: str, video: str, audio: str | None = None) -> str:
    """Return a template with the text of a message's content where it says PARTS."""
    parts = _PARTS.replace("IMAGE", repr(image)).replace("VIDEO", repr(video))
    if audio is not None:
        other = "{%- else -%}{{ part.text }}"
        parts = parts.replace(other, "{%- elif part.type == 'audio' -%}{{ AUDIO }}" + other).replace(
            "AUDIO", repr(audio)
        )
    return template.replace("PARTS", parts)


_CHATML = (
    "{%- macro listed(tools) -%}"
    "{{ '<tools>' }}{%- for tool in tools -%}{{ '\n' + (tool | tojson) }}{%- endfor -%}{{ '\n</tools>' }}"
    "{%- endmacro -%}"
    "{%- if tools and (not messages or messages[0].role != 'system') -%}"
    "{{ '<|im_start|>system\n' + listed(tools) + '<|im_end|>\n' }}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\n' }}PARTS"
    "{%- for call in message.tool_calls or [] -%}{%- set function = call.function or call -%}"
    "{{ '' if loop.first and not message.content else '\n' }}"
    '{{ \'<tool_call>\n{"name": "\' + function.name + \'", "arguments": \' }}'
    "{{ function.arguments if function.arguments is string else function.arguments | default({}) | tojson }}"
    "{{ '}\n</tool_call>' }}{%- endfor -%}"
    "{%- if tools and loop.first and message.role == 'system' -%}{{ '\n\n' + listed(tools) }}{%- endif -%}"
    "{{ '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)

CHATML_TEMPLATE = _with_parts(_CHATML, "<image>", "<video>")
"""ChatML: `<|im_start|>role`, a line break, the text, `<|im_end|>`, a line break; `<image>` for an image.
Tools stand in the system prompt, in `<tools>`, and calls of them in answers, in `<tool_call>`."""

QWEN_VL_TEMPLATE = _with_parts(
    _CHATML, "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
)
"""ChatML with the tokens of Qwen2-VL, Qwen2.5-VL and Qwen3-VL around each image and video."""

OMNI_TEMPLATE = _with_parts(
    _CHATML,
    "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "<|vision_bos|><|VIDEO|><|vision_eos|>",
    "<|audio_bos|><|AUDIO|><|audio_eos|>",
)
"""ChatML with the tokens of Qwen2.5-Omni around each image, video and sound."""

LLAVA_TEMPLATE = _with_parts(
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}"
    "{{ 'ASSISTANT:' }}{%- generation -%}{{ ' ' }}PARTS{{ '' + eos_token }}{%- endgeneration -%}"
    "{%- elif message.role == 'system' -%}PARTS{{ ' ' }}"
    "{%- else -%}{{ 'USER: ' }}PARTS{{ ' ' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}",
    "<image>\n",
    "<video>\n",
)
"""LLaVA 1.5: `SYSTEM USER: <image>`, a line break, `question ASSISTANT: answer</s>`; the answers are marked."""
