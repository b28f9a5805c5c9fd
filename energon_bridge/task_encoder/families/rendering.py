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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from energon_bridge.errors import ConfigurationError, SampleError, UnfitSampleError
from energon_bridge.task_encoder.conversation import Document
from energon_bridge.task_encoder.families.chat import Chat, Message, Part, parts_of
from energon_bridge.task_encoder.families.vision import Family, Kind

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
            "ChatConfig(chat_template=...), for example to one of energon_bridge.task_encoder.families.templates"
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
