"""Turn segments of text into one token sequence, with images and videos in place.

The text is tokenised as a whole, so that the tokens equal those of the model's own processor. A token is learned if it
lies in a learned segment, even if it starts with white space before the segment; white space at the end of a segment is
not learned. Tokenizers without offsets (those that are not fast) tokenise segment by segment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from energon_bridge.errors import ConfigurationError, SampleError
from energon_bridge.task_encoder.families.rendering import Segment
from energon_bridge.task_encoder.families.vision import IMAGE_TYPE, TEXT_TYPE, VIDEO_TYPE, Family, Plan
from energon_bridge.task_encoder.texts import is_fast, tokens_of, tokens_with_offsets

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
