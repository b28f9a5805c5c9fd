"""From conversations and documents to tokens: the renderer of a tokenizer, its tokens, and templates of the families.

`conversations/rendering.py` renders. Images, videos and sounds get as many tokens as their plans say.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np

from energon_bridge.core.errors import ConfigurationError, SampleError
from energon_bridge.models.conversations.conversation import Document, Kind, split_places
from energon_bridge.models.conversations.rendering import ChatRenderer, TextPiece, media_text
from energon_bridge.models.conversations.templates import ChatTemplate, RunDay, check_markers, template_source
from energon_bridge.models.conversations.texts import as_array, is_fast, tokenize, tokens_with_places
from energon_bridge.models.families.vision import AUDIO_TYPE, IMAGE_TYPE, TEXT_TYPE, VIDEO_TYPE, Plan, PlanningFamily


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
            "ChatConfig(chat_template=...), for example to LLAVA_TEMPLATE of energon_bridge.models.families, or "
            "data.chat_template of the training script (llava)"
        )
    if source in (CHATML_TEMPLATE, QWEN_VL_TEMPLATE, OMNI_TEMPLATE):
        check_markers("<|im_start|><|im_end|>", tokenizer)
    day = day or RunDay.of(None)
    made = ChatTemplate(tokenizer=tokenizer, source=source, options=options, day=day)
    for_tools = template_source(tokenizer, template, "tool_use")
    with_tools = replace(made, source=for_tools) if isinstance(for_tools, str) and for_tools != source else made
    media = {kind: (getattr(family, f"{kind}_text", ""), token) for kind, token in placeholder_tokens(family).items()}
    return ChatRenderer(plain=made, with_tools=with_tools, media=media, learn=learn)


def placeholder_tokens(family: PlanningFamily | None) -> dict[Kind, str | None]:
    """Return the placeholder tokens of images, videos and sounds."""
    if family is None:
        return {}
    return {"image": family.image_token, "video": family.video_token, "audio": getattr(family, "audio_token", None)}


def document_segments(document: Document, media: Mapping[Kind, tuple[str, str | None]], *, eos: str) -> list[TextPiece]:
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
            segments.append(TextPiece(part.text) if kind == "text" else TextPiece(media_text(media, kind), media=kind))
    return [*segments, TextPiece(eos, learned=True)]


# Tokens ---------------------------------------------------------------------------------------------------------------
#
# From segments of text to one token sequence, with images and videos in place. The text is tokenised as a whole, so
# that the tokens equal those of the model's own processor. A token is learned if it lies in a learned segment, even if
# it starts with white space before the segment; white space at the end of a segment is not learned. Tokenizers without
# offsets (those that are not fast) tokenise segment by segment. Marked text is learned to the last of its characters.


_TYPES = {"image": IMAGE_TYPE, "video": VIDEO_TYPE, "audio": AUDIO_TYPE}
_Found = tuple[np.ndarray, list[int], np.ndarray]
"""Tokens (n,) of all segments; n_segments + 1 borders between those of each; and whether each is learned, bool (n,)."""


class MediumTokens(NamedTuple):
    """The tokens of a medium in a sequence, from `start` to before `end`."""

    plan: Plan
    start: int
    end: int


class Tokens(NamedTuple):
    """A token sequence: `rows` is int64 (3, n), of tokens, whether they are learned, and their types; and its media."""

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
    segments: Sequence[TextPiece],
    plans: Sequence[Plan],
    tokenizer: Any,
    placeholders: Mapping[str, int],
    *,
    apart: bool = False,
) -> Tokens:
    """Return the tokens of segments, up to the last one that is learned.

    Args:
        plans: The plans of its images and videos, in the order of their placeholders.
        tokenizer: Of the transformers interface.
        placeholders: The placeholder tokens of images and videos, by kind.
        apart: Whether each segment is tokenised alone; else, the text as a whole.

    Raises:
        SampleError: The numbers of placeholders and plans differ, or a text contains a placeholder token.
    """
    if [segment.media for segment in segments if segment.media] != [plan.kind for plan in plans]:
        raise SampleError(_mismatch(segments, plans))
    waiting = iter(plans)
    planned = [next(waiting) if segment.media else None for segment in segments]
    texts = [one.text if plan is None else plan.written(one.text) for one, plan in zip(segments, planned, strict=True)]
    tokenise = _by_offsets if is_fast(tokenizer) and not apart else _by_segment
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
    begins = np.maximum.accumulate(starts)  # several tokens of one character share its offsets, or come before it
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
    rows[0], rows[1], rows[3] = tokens, learned, 1  # row 3: how often each token is repeated
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

QUESTION_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role != ['user', 'assistant'][loop.index0] -%}{{ raise_exception("
    "'the model reads one question and learns one answer: make a sample of each question, with what its system prompt "
    "or earlier turns say in it') }}{%- endif -%}"
    "{%- if message.role == 'user' -%}"
    "{%- set seen = namespace(text=false, behind=false, between=false, images=0) -%}"
    "{%- for part in message.content -%}{%- if part.type == 'image' -%}"
    "{%- set seen.images = seen.images + 1 -%}{%- set seen.behind = seen.text -%}"
    "{%- elif part.text | trim -%}"
    "{%- set seen.between = seen.between or seen.behind -%}{%- set seen.text = true -%}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if not seen.between -%}{{ '<image>' * seen.images + bos_token }}{%- endif -%}"
    "{%- for part in message.content -%}{%- if part.type == 'text' -%}{{ part.text }}{%- elif seen.between -%}"
    "{%- set seen.images = seen.images - 1 -%}{{ '<image>' + ('' if seen.images else bos_token) }}"
    "{%- endif -%}{%- endfor -%}{{ '\n' }}"
    "{%- else -%}{%- generation -%}{%- for part in message.content -%}{{ part.text }}{%- endfor -%}{{ eos_token }}"
    "{%- endgeneration -%}{%- endif -%}{%- endfor -%}"
)
"""Images, the begin token, a question, a line break, then the answer and its end. Images between words stay there, and
the begin token follows the last one, as `PaliGemmaProcessor` puts it."""
