"""Render conversations with a chat template, and find the text that is learned.

If the template marks the answers (`{% generation %}`), the marked text is learned, with an end-of-sequence token right
after it. Otherwise an answer is the text that the template adds after the prompt: the rendering up to the answer minus
the rendering before it with `add_generation_prompt=True`, without trailing white space. Both renderings must be
prefixes of the rendering of the whole conversation, so a template that writes earlier turns differently is an error,
unless only the last answer is learned.

That takes two renderings per answer. But conversations of one shape (the same roles, with texts, images and videos in
the same places) have the same text around their own texts, so these renderings are made once per shape, with probe
words as texts. A sample is then rendered once, and the probe gives the places of its answers, provided the rendering
is exactly what the probe predicts. If it is not, because the template depends on the texts, all renderings are made.

The result is a list of segments: prompts, learned text, and the placeholder of each image and video.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from energon_bridge.errors import ConfigurationError, SampleError, UnfitSampleError
from energon_bridge.task_encoder.conversation import Document
from energon_bridge.task_encoder.families.chat import Chat, Message, Part, parts_of
from energon_bridge.task_encoder.families.vision import IMAGE_TYPE, TEXT_TYPE, VIDEO_TYPE, Family, Kind, Plan
from energon_bridge.task_encoder.texts import is_fast, tokens_of, tokens_with_offsets

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "a text"
_SHOWN = 200
_MOST_OUTLINES = 4096


class Span(NamedTuple):
    """Characters from `start` to before `end`."""

    start: int
    end: int


class Segment(NamedTuple):
    """A piece of text of one kind; with `media`, the placeholder of an image or video, whose plan has the text."""

    text: str
    learned: bool = False
    media: Kind | None = None


class Outline(NamedTuple):
    """The text that a template writes for conversations of one shape.

    `around` is the text before, between and after the conversation's own texts. `answers` has, for the start and end of
    each answer, the number of texts before it and its offset in the following piece of `around`.
    """

    around: tuple[str, ...]
    answers: tuple[tuple[tuple[int, int], tuple[int, int]], ...]

    def spans(self, whole: str, texts: Sequence[str]) -> list[Span] | None:
        """Return the answers in the rendering of a conversation with these texts; None if the rendering differs."""
        pieces = [piece for pair in zip(self.around, texts, strict=False) for piece in pair] + [self.around[-1]]
        if "".join(pieces) != whole:
            return None
        behind = [0, *accumulate(map(len, pieces))][::2]
        spans = []
        for (start_text, start), (end_text, end) in self.answers:
            begin = behind[start_text] + start
            span = Span(begin, len(whole[: behind[end_text] + end].rstrip()))
            if span.end < begin:
                return None
            spans.append(span)
        return spans


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRenderer:
    """Renders conversations with a tokenizer's chat template.

    Args:
        tokenizer: Has `apply_chat_template`.
        template: The Jinja template.
        family: Has the placeholders of images and videos; None: there are none.
        learn: `all` answers, or the `last`.
        options: Further arguments of the template.
    """

    tokenizer: Any
    template: str
    family: Family | None
    learn: Literal["all", "last"] = "all"
    options: Mapping[str, Any]
    takes_parts: bool
    outlines: dict[Any, Outline | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def segments(self, chat: Chat) -> list[Segment]:
        """Return the text of a conversation.

        Raises:
            SampleError: It has no answer to learn.
            ConfigurationError: The chat template cannot be used for training.
        """
        if not any(message.role == "assistant" for message in chat.messages):
            raise SampleError("the conversation has no answer to learn")
        text, spans = self._marked(chat) if _MARKS.search(self.template) else self._compared(chat)
        if self.learn == "last":
            spans = spans[-1:]
        return split_at(text, spans, self.family)

    def _marked(self, chat: Chat) -> tuple[str, list[Span]]:
        """Return the text, and the answers that the template marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        with _template_errors():
            (text,), (marks,) = render_jinja_template(
                conversations=[self._messages(chat.messages)],
                tools=chat.tools,
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **{**getattr(self.tokenizer, "special_tokens_map", {}), **self.options},
            )
        if not marks:
            raise SampleError("the chat template marks no answer in the conversation")
        special = getattr(self.tokenizer, "all_special_tokens", ())
        ends = [token for token in special if token not in self._placeholders()]
        spans = []
        for start, end in marks:
            closing = next((token for token in ends if text.startswith(token, end)), "")
            spans.append(Span(start, end + len(closing)))
        return text, spans

    def _compared(self, chat: Chat) -> tuple[str, list[Span]]:
        """Return the text, and the answers found by comparing renderings."""
        messages = self._messages(chat.messages)
        whole = self._text(messages, chat.tools)
        outline = None if chat.tools else self._outline(chat)
        texts = [part.text for message in chat.messages for part in message.parts if part.kind == "text"]
        spans = None if outline is None else outline.spans(whole, texts)
        return whole, self._by_beginnings(chat, messages, whole) if spans is None else spans

    def _outline(self, chat: Chat) -> Outline | None:
        """Return the outline of conversations of this shape; None if the template changes their texts."""
        shape = tuple((message.role, tuple(part.kind for part in message.parts)) for message in chat.messages)
        key = (shape, date.today())  # templates may write the date
        if key not in self.outlines:
            if len(self.outlines) >= _MOST_OUTLINES:
                self.outlines.clear()
            self.outlines[key] = self._outlined(chat)
        return self.outlines[key]

    def _outlined(self, chat: Chat) -> Outline | None:
        words: list[str] = []

        def word(part: Part) -> Part:
            if part.kind != "text":
                return part
            words.append(f"word{len(words)}of{_PROBE.replace(' ', '')}")
            return replace(part, text=words[-1])

        chat = replace(chat, messages=tuple(replace(one, parts=tuple(map(word, one.parts))) for one in chat.messages))
        messages = self._messages(chat.messages)
        try:
            whole = self._text(messages, None)
            spans = self._by_beginnings(chat, messages, whole)
        except (ConfigurationError, SampleError):
            return None  # the sample itself raises the error
        around, rest = [], whole
        for one in words:
            before, found, rest = rest.partition(one)
            if not found:
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
        return Outline(tuple(around), tuple(answers))  # type: ignore[arg-type]

    def _by_beginnings(self, chat: Chat, messages: list[dict[str, Any]], whole: str) -> list[Span]:
        """Return the answers, with two renderings for each: up to its prompt, and up to its end."""
        spans = []
        answers = [number for number, message in enumerate(chat.messages) if message.role == "assistant"]
        for number in answers if self.learn == "all" else answers[-1:]:
            prompt = self._text(messages[:number], chat.tools, add_generation_prompt=True)
            is_last = number + 1 == len(messages)
            until = whole if is_last else self._text(messages[: number + 1], chat.tools)
            until = until.rstrip()  # white space after a turn is not part of the answer
            if not (until.startswith(prompt) and whole.startswith(until)):
                raise UnfitSampleError(
                    f"the chat template cannot be used for training on answer {answers.index(number) + 1} of "
                    f"{len(answers)}: the rendering of a conversation must start with that of the turns up to the "
                    "answer, and this with the prompt for it (add_generation_prompt=True). The prompt is "
                    f"{_end_of(prompt)!r}, up to the answer {_end_of(until)!r}, the conversation {_end_of(whole)!r}. "
                    "Mark the answers in the template with {% generation %}, or set ChatConfig(learn='last')"
                )
            spans.append(Span(len(prompt), len(until)))
        return spans

    def _text(self, messages: list[dict[str, Any]], tools: Any, **options: Any) -> str:
        with _template_errors():
            text: str = self.tokenizer.apply_chat_template(
                messages,
                chat_template=self.template,
                tokenize=False,
                **({"tools": tools} if tools else {}),
                **{**self.options, **options},
            )
        return text

    def _messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        return [{"role": message.role, "content": self._content(message.parts)} for message in messages]

    def _content(self, parts: Sequence[Part]) -> Any:
        if self.takes_parts:
            return [{"type": "text", "text": p.text} if p.kind == "text" else {"type": p.kind} for p in parts]
        return "".join(part.text if part.kind == "text" else self._written(part.kind) for part in parts)

    def _written(self, kind: Kind) -> str:
        text = media_text(self.family, kind)
        # On a line of its own, as in conversations written as text.
        return text if text.startswith("<|") else f"{text}\n"

    def _placeholders(self) -> tuple[str | None, ...]:
        return (None, None) if self.family is None else (self.family.image_token, self.family.video_token)


def renderer_of(
    tokenizer: Any,
    family: Family | None,
    *,
    template: str | None,
    learn: Literal["all", "last"],
    options: Mapping[str, Any],
) -> ChatRenderer:
    """Return the renderer for a tokenizer; its own template is the default.

    Raises:
        ConfigurationError: There is no template.
    """
    template = template or getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("default")
    if not isinstance(template, str):
        raise ConfigurationError(
            f"{type(tokenizer).__name__} has no chat template (found: {type(template).__name__}): set "
            "ChatConfig(chat_template=...), for example to CHATML_TEMPLATE of energon_bridge.task_encoder.families"
        )
    draft = ChatRenderer(
        tokenizer=tokenizer, template=template, family=family, learn=learn, options=options, takes_parts=True
    )
    question = Message(role="user", parts=(Part("text", _PROBE),))
    try:
        text = draft._text(draft._messages([question]), None, add_generation_prompt=True)
    except Exception:  # a template that takes no lists may raise anything
        text = ""
    takes_parts = _PROBE in text and "'text'" not in text
    return ChatRenderer(
        tokenizer=tokenizer, template=template, family=family, learn=learn, options=options, takes_parts=takes_parts
    )


def document_segments(document: Document, family: Family | None, *, eos: str) -> list[Segment]:
    """Return the text of a document unchanged, with `<image>` for images in prompts, and its end learned.

    Raises:
        SampleError: There is nothing to learn.
    """
    if not any(piece.learned for piece in document.pieces):
        raise SampleError("the sample has no text to learn")
    segments: list[Segment] = []
    for piece in document.pieces:
        if piece.learned:
            segments.append(Segment(piece.text, learned=True))
            continue
        for part in parts_of(piece.text):
            kind = part.kind
            segments.append(Segment(part.text) if kind == "text" else Segment(media_text(family, kind), media=kind))
    return [*segments, Segment(eos, learned=True)]


def split_at(text: str, spans: Sequence[Span], family: Family | None) -> list[Segment]:
    """Split a text at the borders of learned text and at the placeholders of images and videos."""
    places: dict[int, tuple[int, Kind]] = {}
    if family is not None:
        for kind, token in (("image", family.image_token), ("video", family.video_token)):
            if token:
                whole = "|".join(re.escape(form) for form in (media_text(family, kind), token))  # type: ignore[arg-type]
                places |= {found.start(): (found.end(), kind) for found in re.finditer(whole, text)}  # type: ignore[misc]
    segments: list[Segment] = []
    position = 0
    for start, (end, kind) in sorted(places.items()):
        segments += _stretch(text, position, start, spans)
        segments.append(Segment(text[start:end], media=kind))
        position = end
    return segments + _stretch(text, position, len(text), spans)


def media_text(family: Family | None, kind: Kind) -> str:
    """Return the text for an image or video if no template writes it. Raises SampleError if there are none."""
    text = "" if family is None else family.image_text if kind == "image" else family.video_text
    if not text:
        raise SampleError(f"the sample has {kind}s, but the model's family does not support them")
    return text


def _stretch(text: str, start: int, end: int, spans: Sequence[Span]) -> list[Segment]:
    segments: list[Segment] = []
    for span in spans:
        if span.end <= start or span.start >= end:
            continue
        segments.append(Segment(text[start : max(start, span.start)]))
        learned = Span(max(start, span.start), min(end, span.end))
        segments.append(Segment(text[learned.start : learned.end], learned=True))
        start = learned.end
    segments.append(Segment(text[start:end]))
    return [segment for segment in segments if segment.text]


def _end_of(text: str) -> str:
    return text if len(text) <= _SHOWN else f"…{text[-_SHOWN:]}"


@contextmanager
def _template_errors() -> Iterator[None]:
    """Turn the errors of a template into ours."""
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        yield
    except TemplateSyntaxError as error:
        raise ConfigurationError(f"the chat template has an error in line {error.lineno}: {error}") from error
    except TemplateError as error:
        raise SampleError(f"the chat template rejects the conversation: {error}") from error


# Tokens ---------------------------------------------------------------------------------------------------------------
#
# From segments of text to one token sequence, with images and videos in place. The text is tokenised as a whole, so
# that the tokens equal those of the model's own processor. A token is learned if it lies in a learned segment, even if
# it starts with white space before the segment; white space at the end of a segment is not learned. Tokenizers without
# offsets (those that are not fast) tokenise segment by segment.


_TYPES = {"image": IMAGE_TYPE, "video": VIDEO_TYPE}


@dataclass(kw_only=True, slots=True)
class Stretch:
    """The tokens of a segment: which are learned, their types, and the plan of an image or video."""

    tokens: list[int] = field(default_factory=list)
    learned: list[bool] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    plan: Plan | None = None


def stretches_of(
    segments: Sequence[Segment], plans: Sequence[Plan], tokenizer: Any, placeholders: Mapping[str, int]
) -> list[Stretch]:
    """Return the tokens of each segment, up to the last one that is learned.

    Args:
        segments: The text.
        plans: The plans of its images and videos, in the order of their placeholders.
        tokenizer: Of the transformers interface.
        placeholders: The placeholder tokens of images and videos, by kind.

    Raises:
        SampleError: The numbers of placeholders and plans differ, or a text contains a placeholder token.
    """
    written, stretches, waiting = [], [], iter(plans)
    for segment in segments:
        plan = None
        if segment.media is not None:
            plan = next(waiting, None)
            if plan is None or plan.kind != segment.media:
                raise SampleError(_mismatch(segments, plans))
            segment = segment._replace(text=plan.written(segment.text))
        written.append(segment)
        stretches.append(Stretch(plan=plan))
    if next(waiting, None) is not None:
        raise SampleError(_mismatch(segments, plans))
    tokenise = _by_offsets if is_fast(tokenizer) else _by_segment
    tokenise(written, tokenizer, stretches)
    for stretch in stretches:
        _expand(stretch, placeholders)
    return up_to_last_learned([stretch for stretch in stretches if stretch.tokens])


def up_to_last_learned(stretches: Sequence[Stretch]) -> list[Stretch]:
    """Drop everything after the last learned token: it is never learned."""
    last = max((number for number, stretch in enumerate(stretches) if any(stretch.learned)), default=-1)
    if last < 0:
        return list(stretches)
    stretch = stretches[last]
    end = len(stretch.learned) - stretch.learned[::-1].index(True)
    cut = Stretch(tokens=stretch.tokens[:end], learned=stretch.learned[:end], types=stretch.types[:end])
    return [*stretches[:last], cut]


def placeholders_of(tokenizer: Any, family: Family | None) -> Mapping[str, int]:
    """Return the placeholder tokens of images and videos. Raises ConfigurationError if the tokenizer lacks them."""
    if family is None:
        return {}
    tokens = {"image": family.image_token, "video": family.video_token}
    ids: dict[str, int] = {}
    for kind, token in tokens.items():
        if token is None:
            continue
        found = tokenizer.convert_tokens_to_ids(token)
        if found is None or found == getattr(tokenizer, "unk_token_id", None):
            raise ConfigurationError(
                f"the tokenizer does not know the {kind} token {token!r}: add it as a special token, or pass a family "
                f"with another {kind}_token"
            )
        ids[kind] = int(found)
    return ids


def bos_of(tokenizer: Any, wanted: bool | None) -> int | None:
    """Return the begin-of-sequence token to add, if any."""
    bos: int | None = tokenizer.bos_token_id
    if wanted is None:
        wanted = bos is not None and list(tokenizer.encode("", add_special_tokens=True))[:1] == [bos]
    return bos if wanted else None


def _mismatch(segments: Sequence[Segment], plans: Sequence[Plan]) -> str:
    places = [segment.media for segment in segments if segment.media]
    kinds = [plan.kind for plan in plans]
    return (
        f"the rendered text has places for {places or 'nothing'}, but the sample has {kinds or 'nothing'}: the chat "
        "template must write each image and video once, in order, and the texts must not contain their tokens"
    )


def _by_offsets(segments: Sequence[Segment], tokenizer: Any, stretches: Sequence[Stretch]) -> None:
    text = "".join(segment.text for segment in segments)
    tokens, offsets = tokens_with_offsets(tokenizer, text)
    begins = list(accumulate((begin for begin, _ in offsets), max))
    first = start = 0
    for number, (segment, stretch) in enumerate(zip(segments, stretches, strict=True), 1):
        end = start + len(segment.text)
        behind = len(tokens) if number == len(segments) else bisect_left(begins, end, first)
        if not (segment.learned and segment.text):
            # A token with leading white space still belongs to the segment after it.
            while behind > first and offsets[behind - 1][1] > end and text[begins[behind - 1] : end].isspace():
                behind -= 1
        stretch.tokens = tokens[first:behind]
        if segment.learned:
            content = bisect_left(begins, start + len(segment.text.rstrip()), first, behind)
            stretch.learned = [True] * (content - first) + [begin == end for begin, end in offsets[content:behind]]
        else:
            stretch.learned = [False] * len(stretch.tokens)
        first, start = behind, end


def _by_segment(segments: Sequence[Segment], tokenizer: Any, stretches: Sequence[Stretch]) -> None:
    for segment, stretch in zip(segments, stretches, strict=True):
        content = segment.text.rstrip() if segment.learned else segment.text
        parts = tokens_of(tokenizer, (content, segment.text[len(content) :]))
        for tokens, learned in zip(parts, (segment.learned, False), strict=True):
            stretch.tokens += tokens
            stretch.learned += [learned] * len(tokens)


def _expand(stretch: Stretch, placeholders: Mapping[str, int]) -> None:
    """Replace each placeholder token by the planned number of tokens, and set their types."""
    if stretch.plan is None:
        if found := [kind for kind, token in placeholders.items() if token in stretch.tokens]:
            raise SampleError(f"a text of the sample contains the token reserved for a {found[0]}")
        stretch.types = [TEXT_TYPE] * len(stretch.tokens)
        return
    token, kind = placeholders[stretch.plan.kind], _TYPES[stretch.plan.kind]
    if stretch.tokens.count(token) != len(stretch.plan.runs):
        raise SampleError(
            f"{stretch.plan.text!r} has {stretch.tokens.count(token)} placeholder tokens {token} after tokenizing, "
            f"expected {len(stretch.plan.runs)}: the placeholder must be a special token of the tokenizer"
        )
    runs = iter(stretch.plan.runs)
    tokens: list[int] = []
    types: list[int] = []
    for one in stretch.tokens:
        count = next(runs) if one == token else 1
        tokens += [one] * count
        types += [kind if one == token else TEXT_TYPE] * count
    stretch.tokens, stretch.types, stretch.learned = tokens, types, [False] * len(tokens)


# Templates ------------------------------------------------------------------------------------------------------------
#
# Chat templates of the families, for tokenizers without one (those of tiny models, say). A conversation is a list of
# messages; the content of each is a text or a list of parts `{"type": "text", "text": …}`, `{"type": "image"}` and
# `{"type": "video"}`. A template writes the placeholder token once for each image or video.


_PARTS = (
    "{%- macro parts(content) -%}"
    "{%- if content is string -%}{{ content }}{%- else -%}{%- for part in content -%}"
    "{%- if part.type == 'image' -%}{{ IMAGE }}"
    "{%- elif part.type == 'video' -%}{{ VIDEO }}"
    "{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{%- endmacro -%}"
)


def _with_parts(template: str, image: str, video: str) -> str:
    return _PARTS.replace("IMAGE", repr(image)).replace("VIDEO", repr(video)) + template


_CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\n' + parts(message.content) + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)

CHATML_TEMPLATE = _with_parts(_CHATML, "<image>", "<video>")
"""ChatML: `<|im_start|>role`, a line break, the text, `<|im_end|>`, a line break; `<image>` for an image."""

QWEN_VL_TEMPLATE = _with_parts(
    _CHATML, "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
)
"""ChatML with the tokens of Qwen2-VL, Qwen2.5-VL and Qwen3-VL around each image and video."""

LLAVA_TEMPLATE = _with_parts(
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}"
    "{{ 'ASSISTANT:' }}{%- generation -%}{{ ' ' + parts(message.content) + eos_token }}{%- endgeneration -%}"
    "{%- elif message.role == 'system' -%}{{ parts(message.content) + ' ' }}"
    "{%- else -%}{{ 'USER: ' + parts(message.content) + ' ' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}",
    "<image>\n",
    "<video>\n",
)
"""LLaVA 1.5: `SYSTEM USER: <image>`, a line break, `question ASSISTANT: answer</s>`; the answers are marked."""
