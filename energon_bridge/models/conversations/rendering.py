"""Render conversations with a chat template, and find the text that is learned: for all task encoders.

`templates.py` says what that is. Where the template does not mark it, that takes two renderings per
answer. But conversations of one shape (the same roles, with texts, images and videos in the same places) have the same
text around their own texts, so these renderings are made once per shape, with probe words as texts. A sample is then
rendered once, and the probe gives the places of its answers, provided the rendering is exactly what the probe predicts.
If it is not, because the template depends on the texts, all renderings are made. If it cannot depend on them, because
all it does is write them (`only_written` of `templates`), no sample of that shape is rendered: its texts are put in.

The result is a text with the places of its answers, or a list of pieces: prompts, learned text, and the placeholder of
each image and video.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, count
from typing import Any, Literal, NamedTuple

from energon_bridge.core.errors import ConfigurationError, SampleError
from energon_bridge.models.conversations.conversation import (
    Conversation,
    Kind,
    Part,
    Turn,
    check_keys,
    template_keys,
)
from energon_bridge.models.conversations.templates import (
    BEFORE_ALL,
    PROBE,
    ChatTemplate,
    RunDay,
    TextSpan,
    only_written,
)

_MOST_OUTLINES = 4096
_ODD = " \t{}. Of <b> \"an\" 'É' & \\n </think> {{{{ odd }}}} %s TEXT\n "
_UNUSED = (
    "the chat template does not use it; set one that does (ChatConfig(chat_template=...), or data.chat_template of the "
    "training script)"
)
_MANY = {"image": "images", "video": "videos", "audio": "sounds"}


class TextPiece(NamedTuple):
    """A piece of text of one kind; with `media`, the placeholder of an image or video, whose plan has the text.

    Of a `marked` piece all tokens are learned that have any of its text; else, white space at its end is not learned.
    """

    text: str
    learned: bool = False
    media: Kind | None = None
    marked: bool = False


class Outline(NamedTuple):
    """What a template writes around the texts of conversations of one shape (roles and kinds of parts).

    `around` has the template's text before, between and after the n texts of the conversation: n + 1 entries. `answers`
    has (start, end) of each answer, each as (number of texts before it, offset in that entry of `around`). `exact`: the
    template writes any texts, if not empty, unchanged, so that no rendering is needed to know.
    """

    around: tuple[str, ...]
    answers: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    exact: bool = False

    def pieces(self, texts: Sequence[str]) -> list[str]:
        """Return the text of a conversation with these texts, in pieces."""
        return [piece for pair in zip(self.around, texts, strict=False) for piece in pair] + [self.around[-1]]

    def spans(self, whole: str, pieces: Sequence[str]) -> list[TextSpan] | None:
        """Return the answers in a rendering of these pieces; None if one begins behind its end."""
        behind = [0, *accumulate(map(len, pieces))][::2]  # where each entry of `around` begins: every other piece
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
        plain: The template of conversations without tools.
        with_tools: The template of conversations with tools.
        media: By kind, the text for an image, video or sound in texts that no template renders, and its token.
        learn: `all` answers, or the `last`.
        as_text: Pass contents to the template as texts, also if it takes lists of parts.
    """

    plain: ChatTemplate
    with_tools: ChatTemplate
    media: Mapping[Kind, tuple[str, str | None]] = field(default_factory=dict)
    learn: Literal["all", "last"] = "all"
    as_text: bool = False
    outlines: dict[Any, Outline | None] = field(default_factory=dict, init=False, repr=False, compare=False)
    checked: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

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
        """Return the text of a conversation in pieces; raises as `rendered`."""
        text, spans = self.rendered(content)
        forms = {kind: (text or token, token) for kind, (text, token) in self.media.items() if token}
        return split_at(text, spans, forms, (self.with_tools if content.tools else self.plain).marks)

    def rendered(self, content: Conversation) -> tuple[str, list[TextSpan]]:
        """Return the text of a conversation, and what is learned of it.

        Raises:
            SampleError: It has no answer to learn, or the template leaves out what one says.
            ConfigurationError: The chat template cannot be used for training.
        """
        answers = self._answers(content)
        template = self.with_tools if content.tools else self.plain
        if unused := [name for name in template_keys(content) if not template.uses(name)]:
            check_keys(content, unused, _UNUSED)
        if template.marks:
            text, spans = template.answers(self._messages(content.turns, template), content.tools, answers)
        else:
            text, spans = self._compared(content, answers, template)
        if not self.checked:
            self.checked.add(self.template)
            template.check_ends(text, spans, [token for _, token in self.media.values()])
        return text, spans

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
        names = dict(zip(("user", "assistant"), template.roles, strict=True))
        messages: list[dict[str, Any]] = []
        for turn in turns:
            message = {"role": names.get(turn.role, turn.role), **turn.keys}
            if turn.content is not None:
                message["content"] = self._content(turn, template)
            if "tool_calls" in turn.keys and template.uses("tool_calls"):
                message["tool_calls"] = template.called(turn.keys["tool_calls"])
            messages.append(message)
        return messages

    def _content(self, turn: Turn, template: ChatTemplate) -> Any:
        parts = turn.parts
        if not self.as_text and template.takes_parts(turn.role):
            return [{"type": "text", "text": p.text} if p.kind == "text" else {"type": p.kind} for p in parts]
        return "".join(part.text if part.kind == "text" else self._written(part.kind) for part in parts)

    def _written(self, kind: Kind) -> str:
        text = media_text(self.media, kind)
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


def split_at(
    text: str, spans: Sequence[TextSpan], media: Mapping[Kind, tuple[str, str]], marked: bool
) -> list[TextPiece]:
    """Split a text where learned text (`spans`) begins and ends, and around each placeholder of a medium.

    Args:
        media: By kind, both ways in which a medium is written: in full, and its token alone.
        marked: Whether the template itself has marked the spans (`{% generation %}`).
    """
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


def media_text(media: Mapping[Kind, tuple[str, str | None]], kind: Kind) -> str:
    """Return the text for an image, video or sound if no template writes it. Raises SampleError if there are none."""
    text, _ = media.get(kind, ("", None))
    if not text:
        raise SampleError(f"the sample has {_MANY[kind]}, but the model's family does not support them")
    return text
