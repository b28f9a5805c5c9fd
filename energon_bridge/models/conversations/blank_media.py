"""Blank media: what a microbatch gets of each kind of media that it lacks, so that every rank runs the whole model.

Under FSDP, ZeRO and DDP all ranks must use the same parts of a model, or they wait for each other forever. A blank
picture stands in columns of its own behind all rows, in the padding: no token sees it, it sees no label, and the loss
and its gradients are those without it. The vision tower runs and gets a gradient of zeros.

Of `Blank.tokens`, the first is padding: a row that is full may need it for its last label (`model_inputs`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.models.conversations.sequences import TOKEN_INPUTS, MultiModalBatch, PaddingValues

BlankMedia = bool | str | Sequence[str]
"""Which kinds of media are blank where a microbatch lacks them: True: all that the model takes; or their names."""


def blank_kinds(given: BlankMedia, taken: Collection[str]) -> tuple[str, ...]:
    """Return the kinds of blank media. Raises ConfigurationError for one that the model does not take."""
    if isinstance(given, bool):
        return tuple(sorted(taken)) if given else ()
    kinds = (given,) if isinstance(given, str) else tuple(given)
    if unknown := sorted(set(kinds) - set(taken)):
        raise ConfigurationError(
            f"blank_media={given!r}: the model takes no {unknown[0]}, but {', '.join(sorted(taken)) or 'texts only'}"
        )
    return tuple(sorted(kinds))


@dataclass(frozen=True, kw_only=True, slots=True)
class Blank:
    """A blank medium of n tokens.

    `tokens` has the values of its tokens by the names of a model's arguments, each (1, n); `media`, what the image
    processor makes of it; `repeated`, the tokens that the model replaces.
    """

    tokens: Mapping[str, Tensor]
    media: Mapping[str, Tensor]
    repeated: frozenset[int] = frozenset()

    @property
    def length(self) -> int:
        """Tokens that it takes, with the padding in front."""
        return 1 + self.tokens["input_ids"].shape[1]

    @classmethod
    def of(cls, tokens: Tensor, types: Tensor | None, visual: Mapping[str, Tensor], is_medium: Tensor) -> Blank:
        """Return the medium of a sample, with a token on each side; tokens, types and `is_medium` (bool) are (n,).

        Raises ConfigurationError for a model that sees images through cross-attention.
        """
        if "cross_attention_mask" in visual:
            raise ConfigurationError(
                "blank_media: the model sees images through cross-attention, where a blank one would change the texts "
                "of its row; leave it out, and give every microbatch an image (group_by)"
            )
        places = is_medium.nonzero().flatten()
        kept = slice(max(0, int(places[0]) - 1), int(places[-1]) + 2)
        of_tokens = {name: value[0] for name, value in visual.items() if name in TOKEN_INPUTS}
        of_tokens |= {} if types is None else {"mm_token_type_ids": types}
        return cls(
            tokens={name: value[None, kept] for name, value in {"input_ids": tokens, **of_tokens}.items()},
            media={name: value for name, value in visual.items() if name not in TOKEN_INPUTS},
            repeated=frozenset(tokens[is_medium].tolist()),
        )


def blank_image() -> Any:
    """Return a white image: some models leave out black ones, as padding."""
    return Image.new("RGB", (64, 64), "white")


def room_of(blanks: Sequence[Blank], multiple_of: int = 1) -> int:
    """Return the tokens that all of them take together, a multiple of a number."""
    length = sum(blank.length for blank in blanks)
    return length + -length % multiple_of


def lacking(blanks: Sequence[Blank], media: Collection[str], tokens: Tensor | None = None) -> list[Blank]:
    """Return those of which a microbatch has none: neither media inputs of their names, nor tokens.

    Kinds that a model reads by the same inputs (InternVL) or tokens (GLM-4V) are one: it runs the same module for them.
    """
    found: list[Blank] = []
    seen: set[str | int] = {*media, *([] if tokens is None else tokens.unique().tolist())}
    for blank in blanks:
        if seen.isdisjoint({*blank.media, *blank.repeated}):
            found.append(blank)
            seen |= {*blank.media, *blank.repeated}
    return found


def add_blanks(
    batch: MultiModalBatch, blanks: Sequence[Blank], filling: PaddingValues, *, multiple_of: int, room: int | None
) -> MultiModalBatch:
    """Return a batch with those of some blank media that it lacks, `room` columns longer than without them.

    Args:
        batch: Rows or packs.
        blanks: One of each kind.
        filling: Of the padding.
        multiple_of: The columns are padded to a multiple of it.
        room: As many columns are added in any case; None: as many as are needed, if any.
    """
    media = {} if batch.pixel_values is None else {"pixel_values": batch.pixel_values}
    media |= {name: value for name, value in batch.visual_inputs.items() if name not in TOKEN_INPUTS}
    given = lacking(blanks, media, batch.tokens)
    extra = room_of(given, multiple_of) if room is None else room
    if not extra:
        return batch
    names = ("labels", "loss_mask", "position_ids", "attention_mask", "mm_token_type_ids")
    fields = {name: value for name in names if (value := getattr(batch, name)) is not None}
    fields |= {name: value for name, value in batch.visual_inputs.items() if name in TOKEN_INPUTS}
    fills = {"input_ids": filling.pad_id, "labels": filling.ignore}
    fields = with_columns({"input_ids": batch.tokens, **fields}, given, extra, fills, restart=False)
    mrope = batch.mrope_position_ids
    if mrope is None and any(name.endswith("_grid_thw") for blank in given for name in blank.media):
        mrope = batch.position_ids.expand(3, -1, -1)
    for blank in given:
        media |= {name: value.to(batch.tokens.device) for name, value in blank.media.items()}
    of_tokens: dict[str, Any] = {name: fields.pop(name) for name in names if name in fields}
    width = batch.tokens.shape[1]
    borders = batch.cu_seqlens_padded
    borders = None if borders is None else borders + extra * (borders // width)  # the rows before each are longer
    return replace(
        batch,
        tokens=fields.pop("input_ids"),
        **of_tokens,
        pixel_values=media.pop("pixel_values", None),
        visual_inputs={**media, **fields},
        mrope_position_ids=None if mrope is None else torch.nn.functional.pad(mrope, (0, extra)),
        cu_seqlens_padded=borders,
        max_seqlen=None if borders is None else int(borders.diff().max()),
        blank_media=sorted({name for blank in given for name in blank.media}),
    )


def with_columns(
    fields: Mapping[str, Tensor], blanks: Sequence[Blank], extra: int, fills: Mapping[str, float], *, restart: bool
) -> dict[str, Tensor]:
    """Return values of tokens, (…, B, S), with `extra` columns: blank media in the last row, else padding.

    Positions go on, or begin again (`restart`) and stay below the largest one.
    """
    tokens = fields["input_ids"]
    made: dict[str, Tensor] = {}
    for name in {**fields, **dict.fromkeys(name for blank in blanks for name in blank.tokens)}:
        fill = fills.get(name, TOKEN_INPUTS.get(name, 0))
        old = fields[name] if name in fields else torch.full_like(tokens, int(fill))
        new = old.new_full((*old.shape[:-1], extra), fill)
        if name == "position_ids":
            steps = torch.arange(extra, device=old.device)
            new[:] = steps % (old.max() + 1) if restart else old[..., -1:] + 1 + steps
        end = 0
        for blank in blanks:
            end += blank.length
            if name in blank.tokens:
                new[-1, end - blank.length + 1 : end] = blank.tokens[name][0].to(old)
        made[name] = torch.cat([old, new], dim=-1)
    return made


def without_blanks(batch: MultiModalBatch, pad_id: int) -> MultiModalBatch:
    """Return a batch whose blank media are padding, as prompts need it."""
    blank = set(batch.blank_media)
    if not blank:
        return batch
    return replace(
        batch,
        tokens=batch.tokens.masked_fill(batch.attention_mask == 0, pad_id),
        pixel_values=None if "pixel_values" in blank else batch.pixel_values,
        visual_inputs={name: value for name, value in batch.visual_inputs.items() if name not in blank},
        blank_media=[],
    )


def add_to_inputs(inputs: Mapping[str, Any], made: Mapping[str, Tensor], *, pad_id: int, ignore: int) -> dict[str, Any]:
    """Return a model's arguments with a blank medium, if they have none of its kind.

    Args:
        inputs: The arguments by name.
        made: What the processor returns for the text of one such medium.
        pad_id: Token of the padding.
        ignore: Its label.

    Raises:
        ConfigurationError: `made` has no tokens, or the arguments tell samples by their lengths.
    """
    if "input_ids" not in made:
        raise ConfigurationError("blank_media: expected what a processor returns for a text with one blank medium")
    written = {"input_ids", "mm_token_type_ids", *TOKEN_INPUTS}
    fields = {*written, "attention_mask", "position_ids", "labels"}
    tokens = {name: value for name, value in inputs.items() if name in fields}
    blank = Blank(
        tokens={name: made[name] for name in tokens if name in written and name in made},
        media={name: value for name, value in made.items() if name not in fields},
    )
    if not lacking([blank], inputs.keys()):
        return dict(inputs)
    if any(name.startswith("cu_seq") for name in inputs):
        raise ConfigurationError(
            "blank_media: the batch tells its samples by cu_seq_lens_…, which have no place for a blank one: tell them "
            "by position_ids alone, or make the batch with a ChatTemplateTaskEncoder that has blank_media"
        )
    media = {name: value.to(tokens["input_ids"].device) for name, value in blank.media.items()}
    fills = {"input_ids": pad_id, "labels": ignore}
    return {**inputs, **media, **with_columns(tokens, [blank], blank.length, fills, restart=True)}
