"""Token sequences of one sample, and of a batch.

Of a sequence s of n tokens, `tokens` is s[:-1] and `labels` is s[1:]: labels are shifted here, once, and no model needs
to shift them again. `loss_mask` is 1.0 exactly where the label is a learned token; everywhere else the label is the
one to ignore.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from energon_bridge.core.encoder.hooks import count_over_long
from energon_bridge.core.errors import SampleError, UnfitSampleError, called
from energon_bridge.core.samples import Batch, Sample, Segment, edataclass, segments_of
from energon_bridge.core.samples.sample_place import warn_once
from energon_bridge.core.samples.stacking import batch_stack, copy_numbers, zeros
from energon_bridge.models.conversations.texts import as_array
from energon_bridge.models.images.visual import concat_visual


@edataclass
class MultiModalSample(Sample):
    """One encoded sample, before batching.

    `tokens`, `labels` (int64) and `loss_mask` (float32) have shape (n,); `visual` is what the image processor returned
    for its images, in their order; `answer` is the first text that is learned. Models with positions of three axes have
    `mrope_position_ids`, int64 (3, n), and `mm_token_type_ids`, int64 (n,): 0 for text, 1 for images, 2 for videos.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    visual: dict[str, Tensor]
    answer: str
    num_images: int = 1
    mm_token_type_ids: Tensor | None = None
    mrope_position_ids: Tensor | None = None


@edataclass
class MultiModalBatch(Batch):
    """A microbatch of B sequences, padded on the right to a common length S.

    `tokens`, `labels`, `position_ids`, `attention_mask` (1 on real tokens): int64 (B, S); `loss_mask`: float32 (B, S).
    `pixel_values`: the images of all rows in their order, joined along dimension 0. `visual_inputs`: what else the
    image processor returned, joined likewise, or by token (`TOKEN_INPUTS`). `answers`: the text that each sample should
    produce first; `num_images`: how many images each has; `sample_keys`: its key.

    A pack is one row. Of the rows laid end to end, `tensor.reshape(1, -1)`, sample i has the positions from
    `cu_seqlens_padded[i]` on and `cu_seqlens[i + 1] - cu_seqlens[i]` tokens; the two, int32 (samples + 1,), differ only
    where something is padded. `max_seqlen` is the length of the longest sample, padding included. `position_ids` begin
    at 0 in every sample. `answers`, `num_images` and `sample_keys` have an entry for each sample, not for each row.

    `mm_token_type_ids`, (B, S), and `mrope_position_ids`, (3, B, S), int64, are there for models that take them; the
    latter begin at 0 in every sample, too, and are 0 where something is padded.

    `segments` has the samples of each row: dataset, key, first token and length of each.

    `blank_media` has the names of the inputs that are of blank media (`blank_media.py`), with tokens in the padding.

    `pixel_norm`, float32 (2, 3), is there where pixels are bytes: `normalise_on_device` makes floats of them by it.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    attention_mask: Tensor
    pixel_values: Tensor | None
    visual_inputs: dict[str, Tensor]
    answers: list[str]
    num_images: list[int] = field(default_factory=list)
    sample_keys: list[str] = field(default_factory=list)
    cu_seqlens: Tensor | None = None
    cu_seqlens_padded: Tensor | None = None
    max_seqlen: int | None = None
    mm_token_type_ids: Tensor | None = None
    mrope_position_ids: Tensor | None = None
    pixel_norm: Tensor | None = None
    segments: list[tuple[Segment, ...]] = field(default_factory=list)
    blank_media: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddingValues:
    """The padding values of a sequence."""

    pad_id: int
    ignore: int


@dataclass(kw_only=True, slots=True)
class Sequencer:
    """A sequence in the making: tokens, and which of them are learned.

    Args:
        longest: The most input tokens. One more is kept, since the last input token needs the next one as its label.
        learned: One byte for each token: 1 if it is learned, else 0.
        cut: Whether a part of the sample did not fit.
        left: Tokens of the texts, and of the first image, that were not added for that.
    """

    longest: int
    tokens: list[int] = field(default_factory=list)
    learned: bytearray = field(default_factory=bytearray)
    cut: bool = False
    left: int = 0

    @property
    def full(self) -> bool:
        """Whether further tokens would be cut off: `longest` inputs and the last label are there."""
        return len(self.tokens) > self.longest

    def has_room(self, count: int) -> bool:
        """Return whether `count` more tokens fit among the inputs, as those of an image must."""
        return len(self.tokens) + count <= self.longest

    def add(self, tokens: Sequence[int], *, learned: bool) -> None:
        """Add tokens at the end."""
        self.tokens += tokens
        self.learned += (b"\1" if learned else b"\0") * len(tokens)

    def cut_off(self, left: int) -> None:
        """Note that `left` tokens are not added."""
        self.cut = True
        self.left = left

    def finish(self, ignore: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return tokens, labels and loss mask, cut to the longest length; None if that leaves nothing to learn."""
        end = self.longest + 1
        return finished(as_array(self.tokens[:end]), np.array(self.learned[:end]), ignore)


def finished(sequence: np.ndarray, learned: np.ndarray, ignore: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return inputs, labels and loss mask, each (n - 1,), of n int64 tokens; None if no label is learned.

    `learned` is 0 or 1 for each token. Label i is token i + 1, so that models need no shift.
    """
    mask = learned[1:].astype(np.float32)
    if not np.count_nonzero(mask):
        return None
    labels = np.where(mask, sequence[1:], ignore)
    return torch.from_numpy(sequence[:-1].copy()), torch.from_numpy(labels), torch.from_numpy(mask)


def nothing_learned(learned: Sequence[int], limit: int, longest: int, why: str = "") -> str:
    """Return what to say of a sample that is cut before the first token to learn.

    Args:
        learned: 0 or 1 for each token of the whole sample, as `finished` takes it.
        limit: `seq_length`.
        longest: The tokens of it that samples may have.
        why: What else to say of the cut.
    """
    first = next((place for place, one in enumerate(learned) if one and place), None)
    if first is None:
        return "nothing to learn: the sample has no text to learn"
    beside = limit - longest
    return (
        f"nothing to learn: seq_length={limit} ends before the text to learn begins{why}; set seq_length"
        f"{called('seq_length')} to at least {first + beside} ({len(learned) - 1 + beside} for all of the sample)"
    )


def count_truncated(key: object, whole: int | str, kept: int, limit: int | None) -> None:
    """Count a sample of `whole` tokens of which `kept` are left, and say so, once, of the first.

    `limit` is `seq_length`; None: a limit on images cuts it.
    """
    count_over_long("truncated")
    name = "a limit on images" if limit is None else f"seq_length={limit}{called('seq_length')}"
    warn_once(
        _logger,
        f"sample {key!r} has {whole} tokens and is cut to {kept} by {name}: the rest is not learned. "
        "`truncated` of metrics(), and the report, count such samples",
        "truncated",
    )


_logger = logging.getLogger(__name__)

TOKEN_INPUTS: Mapping[str, int] = {"cross_attention_mask": 0, "moe_mm_token_type_ids": 0, "token_type_ids": 1}
"""Inputs with an entry per token instead of per image: (1, tokens, …) in a sample, (B, S, …) in a batch; and their
padding, which is that of an answer where questions have type 0 and are read in both directions."""

_ALONG_WIDTH: Mapping[str, str] = {"pixel_values": "target_sizes", "pixel_values_videos": "target_sizes_videos"}
"""Patches of all media in one row, (1, channels, height, patches * width), and what has the sizes of these media."""


def join_visual(rows: Sequence[Mapping[str, Tensor]], padded: Sequence[int], *, count: int) -> dict[str, Tensor]:
    """Join the media inputs of samples: pixels and the like end to end, inputs per token where the samples' tokens are.

    Args:
        rows: The inputs of each sample.
        padded: Tokens that each sample takes, padding included.
        count: Rows of the batch; together they have sum(padded) tokens.
    """
    if any("cross_attention_mask" in row for row in rows):  # then each row looks at images of its own, if only at none
        (shown, *_) = filter(None, rows)
        blank = {name: value.new_zeros(1, *[0] * (value.ndim - 1)) for name, value in shown.items()}
        rows = [row or blank for row in rows]
    wide = {name for row in rows for name, sizes in _ALONG_WIDTH.items() if sizes in row}
    visual = concat_visual([{name: row[name] for name in row if name not in {*TOKEN_INPUTS, *wide}} for row in rows])
    visual |= {name: _side_by_side([row[name] for row in rows if name in row]) for name in sorted(wide)}
    if "aspect_ratio_mask" in visual:  # 1 for the first tile, also of padding images: as MLlama's processor does
        visual["aspect_ratio_mask"][..., 0] = 1
    for name, padding in TOKEN_INPUTS.items():
        given = [row.get(name) for row in rows]
        values = [value for value in given if value is not None]
        if not values:
            continue
        shape = [max(sizes) for sizes in zip(*(value.shape[2:] for value in values), strict=True)]
        joined = zeros((sum(padded), *shape), values[0].dtype, values[0].device)
        if padding:
            copy_numbers(values[0].new_tensor(padding).expand_as(joined), joined)
        for start, value in zip(accumulate(padded, initial=0), given, strict=False):
            if value is not None:
                sides = (start + value.shape[1], *value.shape[2:])
                copy_numbers(value[0], joined[(slice(start, sides[0]), *map(slice, sides[1:]))])
        visual[name] = joined.reshape(count, -1, *shape)
    return visual


def _side_by_side(values: Sequence[Tensor]) -> Tensor:
    """Join tensors along their last dimension."""
    first = values[0]
    ends = list(accumulate(value.shape[-1] for value in values))
    joined = zeros((*first.shape[:-1], ends[-1]), first.dtype, first.device)
    for value, end in zip(values, ends, strict=True):
        copy_numbers(value, joined[..., end - value.shape[-1] : end])
    return joined


def batch_sequences(samples: Sequence[MultiModalSample], length: int, filling: PaddingValues) -> MultiModalBatch:
    """Pad sequences on the right to a length and join their images."""
    visual = join_visual([sample.visual for sample in samples], [length] * len(samples), count=len(samples))
    lengths = [sample.tokens.shape[0] for sample in samples]
    return MultiModalBatch.from_samples(
        samples,
        position_ids=torch.from_numpy(np.tile(np.arange(length), (len(samples), 1))),
        attention_mask=torch.from_numpy((np.arange(length) < np.array(lengths)[:, None]).astype(np.int64)),
        pixel_values=visual.pop("pixel_values", None),
        visual_inputs=visual,
        answers=[sample.answer for sample in samples],
        num_images=[sample.num_images for sample in samples],
        sample_keys=[sample.__key__ for sample in samples],
        segments=[segments_of((sample,), (count,)) for sample, count in zip(samples, lengths, strict=True)],
        **row_inputs(samples, filling, lambda parts, value: pad_rows(parts, length, value)),
    )


def with_norm(batch: MultiModalBatch, norm: Tensor | None) -> MultiModalBatch:
    """Set `pixel_norm` of a batch with pixels to the mean and deviation for them; `norm` is None for float pixels."""
    names = [name for name in batch.visual_inputs if name.startswith("pixel_values")]
    if norm is not None and (names or batch.pixel_values is not None):
        batch.pixel_norm = norm
    return batch


def row_inputs(
    rows: Sequence[Any], filling: PaddingValues, join: Callable[[list[Tensor], float], Tensor]
) -> dict[str, Any]:
    """Return the inputs of samples or packs that have a value for each token, put together by `join`, which pads.

    Token types and M-RoPE positions, three rows of them, are None if no row has them; a row without them among others
    that have some (a text among images) gets those of a text.
    """
    out: dict[str, Any] = {"mm_token_type_ids": None, "mrope_position_ids": None}
    for name, value in (("tokens", filling.pad_id), ("labels", filling.ignore), ("loss_mask", 0.0)):
        out[name] = join([getattr(row, name) for row in rows], value)
    if any(row.mm_token_type_ids is not None for row in rows):
        types = [row.tokens.new_zeros(0) if row.mm_token_type_ids is None else row.mm_token_type_ids for row in rows]
        out["mm_token_type_ids"] = join(types, 0)
    if any(row.mrope_position_ids is not None for row in rows):
        positions = [mrope_of(row) for row in rows]
        out["mrope_position_ids"] = batch_stack([join([row[axis] for row in positions], 0) for axis in range(3)])
    return out


def mrope_of(row: Any) -> Tensor:
    """Return the M-RoPE positions of a sample, (3, n); without any, those of a text: 0 to n - 1 on each axis."""
    if row.mrope_position_ids is not None:
        positions: Tensor = row.mrope_position_ids
        return positions
    return torch.arange(len(row.tokens)).expand(3, -1)


_IN_NUMPY = {torch.int64, torch.int32, torch.float32, torch.float64, torch.uint8, torch.bool}


def pad_rows(rows: Sequence[Tensor], length: int, value: float) -> Tensor:
    """Stack n tensors of shape (…) into (n, length), a value where they are shorter.

    Raises UnfitSampleError if one is longer.
    """
    if not all(
        row.dtype in _IN_NUMPY
        and row.is_cpu
        and not row.requires_grad
        and len(row.shape) == 1
        and row.shape[0] <= length
        for row in rows
    ):
        return pad_to(pad_sequence(list(rows), batch_first=True, padding_value=value), length, value)
    padded = np.full((len(rows), length), value, rows[0].numpy().dtype)  # in a third of the time that torch takes
    for row, place in zip(rows, padded, strict=True):
        place[: row.shape[0]] = row.numpy()
    return torch.from_numpy(padded)


def pad_to(row: Tensor, length: int, value: float) -> Tensor:
    """Pad the last dimension of a tensor on the right, up to a length; raises UnfitSampleError if it is longer."""
    missing = length - row.shape[-1]
    if missing < 0:
        raise UnfitSampleError(
            f"a sequence has {row.shape[-1]} values, but there is room for {length}: every field of a sample needs "
            "one value per token, and no sample may be longer than the batch"
        )
    return pad(row, (0, missing), value=value) if missing else row


# Positions on three axes ----------------------------------------------------------------------------------------------
#
# Time, height, width, as models of the Qwen-VL family take them (M-RoPE). A text token has the same position on all
# three axes. The tokens of an image or video are on a grid that begins where the text before it ended; after it, the
# text continues at the grid's longer side, so that a picture takes as many positions as it is wide or high, not as it
# has tokens. Equal to `get_rope_index` of the models in transformers.


class PatchGrid(NamedTuple):
    """Patches along time, height and width, and how many positions one step in time takes."""

    time: int
    height: int
    width: int
    interval: float = 1.0


def mrope_positions(types: np.ndarray, grids: Mapping[int, Sequence[PatchGrid]], merge_size: int) -> Tensor:
    """Return the positions of a sequence, int64 of shape (3, tokens).

    Args:
        types: The type of each token, shape (tokens,), 0 for text.
        grids: The grids of each type, in their order, in patches; `merge_size`^2 patches are one token.
        merge_size: Patches along each side of a token.

    Raises:
        SampleError: The tokens of a type are not those of its grids.
    """
    waiting = {kind: iter(of_kind) for kind, of_kind in grids.items()}
    made = np.empty((3, len(types)), np.int64)  # by way of numpy: each step of torch takes several times as long
    position = first = 0
    ends = [*(np.flatnonzero(types[1:] != types[:-1]) + 1).tolist(), len(types)]
    while first < len(types):
        kind = int(types[first])
        count = ends.pop(0) - first
        if kind == 0:
            made[:, first : first + count] = np.arange(position, position + count)
            position += count
            first += count
            continue
        while count > 0:
            grid = next(waiting[kind], None)
            height, width = (0, 0) if grid is None else (grid.height // merge_size, grid.width // merge_size)
            if grid is None or not 0 < grid.time * height * width <= count:
                raise SampleError(f"{count} tokens of type {kind} do not match the grid {grid} merged by {merge_size}")
            # In float32, as `get_rope_index` computes them, so that fractional seconds round to the same positions.
            times = (np.arange(grid.time, dtype=np.float32) * np.float32(grid.interval)).astype(np.int64)
            size = grid.time * height * width
            for axis, steps in enumerate((times[:, None, None], np.arange(height)[:, None], np.arange(width))):
                made[axis, first : first + size].reshape(grid.time, height, width)[:] = steps + position
            position += max(grid.height, grid.width) // merge_size  # the next text begins behind the longer side
            first += size
            count -= size
    return torch.from_numpy(made)
