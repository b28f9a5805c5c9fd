"""Packed sequences: several samples in one row, without attention, positions, labels or loss across their borders.

`pack_sequences` makes one row of a pack, `batch_packs` a microbatch of packs, and `unpack_batch` one row of each sample
again. Rows laid end to end are what variable-length attention kernels take (`thd` in Megatron). Labels are shifted
before packing, so the label of a sample's last token is its own; `position_ids` begin at 0 in every sample; images
stand in the order of their samples.

A sample may be padded to a multiple (context parallelism splits every sample into 2 * cp equal chunks), and the last
one up to a fixed length of the row. Padding carries no loss, continues the positions of its sample, and is not counted
in `cu_seqlens`, only in `cu_seqlens_padded`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from energon_bridge.core.errors import ConfigurationError, OverLongSampleError, optional_packages
from energon_bridge.core.samples import Sample, Segment, edataclass, segments_of
from energon_bridge.core.samples.stacking import batch_meta, batch_stack, concat_pad
from energon_bridge.models.conversations.sequences import (
    TOKEN_INPUTS,
    MultiModalBatch,
    MultiModalSample,
    PaddingValues,
    join_visual,
    pad_rows,
    pad_to,
    row_inputs,
)
from energon_bridge.models.images.visual import concat_visual

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


NO_PACKS_ACROSS = (
    "the model sees images through cross-attention, where each row of a batch has images of its own: train unpacked "
    "(without packing_buffer_size; data.packing_buffer_size=null)"
)


@edataclass
class MultiModalPack(Sample):
    """The samples of one pack as one sequence of T tokens; its key is those of the samples, joined by commas.

    `tokens`, `labels`, `position_ids`, `attention_mask` (int64) and `loss_mask` (float32) have shape (T,). `lengths`,
    `padded_lengths`, `num_images`, `answers`, `sample_keys` and `segments` have an entry for each sample.
    `mm_token_type_ids`, (T,), and `mrope_position_ids`, (3, T), are there for models that take them. `visual_rows` has
    the tensors of the images of each sample: they are joined once, for the whole microbatch.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    attention_mask: Tensor
    visual_rows: list[dict[str, Tensor]]
    lengths: list[int]
    padded_lengths: list[int]
    num_images: list[int]
    answers: list[str]
    sample_keys: list[str]
    mm_token_type_ids: Tensor | None = None
    mrope_position_ids: Tensor | None = None
    segments: tuple[Segment, ...] = ()

    @property
    def visual(self) -> dict[str, Tensor]:
        """Return the tensors of the images of all samples, joined again each time."""
        return concat_visual(self.visual_rows)


def pack_sequences(
    samples: Sequence[MultiModalSample], filling: PaddingValues, *, multiple_of: int = 1, length: int | None = None
) -> MultiModalPack:
    """Concatenate samples.

    Each is padded to a multiple of a number of tokens, and the last one up to `length` tokens of the row, if given.

    Raises:
        ConfigurationError: There are no samples.
        OverLongSampleError: They are longer than `length`.
    """
    if not samples:
        raise ConfigurationError("nothing to pack: a pack needs at least one sample")
    if any("cross_attention_mask" in sample.visual for sample in samples):
        raise ConfigurationError(NO_PACKS_ACROSS)
    lengths = [len(sample.tokens) for sample in samples]
    padded = [size + -size % multiple_of for size in lengths]
    key = ",".join(sample.__key__ for sample in samples)
    if length is not None:
        if sum(padded) > length:
            raise OverLongSampleError(
                f"the pack of samples {key!r} has {sum(padded)} tokens, each sample padded to a multiple of "
                f"{multiple_of}, but a row holds {length}: return padded lengths from size_of of the packer, or raise "
                "length"
            )
        padded[-1] += length - sum(padded)
    sizes = torch.tensor(padded)
    positions = torch.arange(sum(padded)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return MultiModalPack(
        __key__=key,
        __restore_key__=tuple(sample.__restore_key__ for sample in samples),
        __sources__=batch_meta("__sources__", [sample.__sources__ for sample in samples]),
        position_ids=positions,
        attention_mask=(positions < torch.tensor(lengths).repeat_interleave(sizes)).long(),
        visual_rows=[sample.visual for sample in samples],
        lengths=lengths,
        padded_lengths=padded,
        num_images=[sample.num_images for sample in samples],
        answers=[sample.answer for sample in samples],
        sample_keys=[sample.__key__ for sample in samples],
        segments=segments_of(samples, lengths, padded),
        **row_inputs(samples, filling, lambda parts, value: _joined(parts, padded, value)),
    )


def batch_packs(packs: Sequence[MultiModalPack], filling: PaddingValues) -> MultiModalBatch:
    """Make a microbatch with one row for each pack, the last sample of a shorter row padded to the longest row."""
    length = max(len(pack.tokens) for pack in packs)
    padded: list[int] = []
    positions: list[Tensor] = []
    for pack in packs:
        spare = length - len(pack.tokens)
        padded += [*pack.padded_lengths[:-1], pack.padded_lengths[-1] + spare]
        positions.append(torch.cat([pack.position_ids, pack.position_ids[-1] + 1 + torch.arange(spare)]))
    visual = join_visual([row for pack in packs for row in pack.visual_rows], padded, count=len(packs))
    return MultiModalBatch.from_samples(
        packs,
        position_ids=batch_stack(positions),
        attention_mask=pad_rows([pack.attention_mask for pack in packs], length, 0),
        pixel_values=visual.pop("pixel_values", None),
        visual_inputs=visual,
        answers=[answer for pack in packs for answer in pack.answers],
        num_images=[count for pack in packs for count in pack.num_images],
        sample_keys=[key for pack in packs for key in pack.sample_keys],
        cu_seqlens=cu_seqlens([size for pack in packs for size in pack.lengths]),
        cu_seqlens_padded=cu_seqlens(padded),
        max_seqlen=max(padded),
        segments=[pack.segments for pack in packs],
        **row_inputs(packs, filling, lambda parts, value: pad_rows(parts, length, value)),
    )


def unpack_batch(batch: MultiModalBatch, filling: PaddingValues) -> MultiModalBatch:
    """Make a microbatch with one row for each sample of a batch of packs, as if nothing had been packed.

    The images need no change: they are in the order of the samples. The restore keys stay those of the packs.
    Raises ConfigurationError if the batch is not packed.
    """
    if batch.cu_seqlens is None or batch.cu_seqlens_padded is None:
        raise ConfigurationError("the batch is not packed: it has no cu_seqlens; make it with batch_packs")
    starts = batch.cu_seqlens_padded[:-1].tolist()
    lengths = batch.cu_seqlens.diff().tolist()
    places = [slice(start, start + size) for start, size in zip(starts, lengths, strict=True)]
    longest = max(lengths)
    row_length = batch.tokens.shape[1]

    def rows(packed: Tensor, value: float) -> Tensor:
        flat = packed.reshape(-1)
        return pad_rows([flat[place] for place in places], longest, value)

    # A sample is as real, and of the kind, as its pack is.
    pack_of = [start // row_length for start in starts]
    kinds = batch.__subflavors__
    return replace(
        batch,
        __key__=batch.sample_keys,
        __valid__=None if batch.__valid__ is None else batch.__valid__[pack_of],
        __subflavors__=None if kinds is None else [kinds[pack] for pack in pack_of],
        tokens=rows(batch.tokens, filling.pad_id),
        labels=rows(batch.labels, filling.ignore),
        loss_mask=rows(batch.loss_mask, 0.0),
        position_ids=torch.arange(longest, device=batch.tokens.device).repeat(len(places), 1),
        attention_mask=rows(batch.attention_mask, 0),
        cu_seqlens=None,
        cu_seqlens_padded=None,
        max_seqlen=None,
        segments=[(segment._replace(start=0),) for row in batch.segments for segment in row],
        visual_inputs={
            name: rows(value, TOKEN_INPUTS[name]) if name in TOKEN_INPUTS else value
            for name, value in batch.visual_inputs.items()
        },
        mm_token_type_ids=None if batch.mm_token_type_ids is None else rows(batch.mm_token_type_ids, 0),
        mrope_position_ids=(
            None
            if batch.mrope_position_ids is None
            else batch_stack([rows(positions, 0) for positions in batch.mrope_position_ids])
        ),
    )


def cu_seqlens(lengths: Sequence[int]) -> Tensor:
    """Return the cumulative lengths of sequences from 0 on, int32 of shape (sequences + 1,)."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def packed_seq_params(batch: MultiModalBatch, *, mtp: bool = False) -> PackedSeqParams:
    """Return what megatron-core's attention needs to know of packed sequences, on the device of the batch.

    Args:
        batch: Packs.
        mtp: The model predicts several tokens (`mtp_num_layers`). megatron-core (to 0.19) rolls tokens and labels
            within `cu_seqlens_q`, although padded samples stand where `cu_seqlens_q_padded` says; so both have the
            padded ends. Padding follows its sample and has no loss, so causal attention gives tokens the same values.

    Raises:
        ConfigurationError: The batch is not packed, or megatron-core is not installed.
    """
    ends = ends_of_packs(batch, mtp=mtp)
    with optional_packages():
        from megatron.core.packed_seq_params import PackedSeqParams
    return PackedSeqParams(qkv_format="thd", **ends)


def ends_of_packs(batch: MultiModalBatch, *, mtp: bool) -> dict[str, Any]:
    """Return the ends of the samples in packed rows under megatron-core's names; see `packed_seq_params`."""
    if batch.cu_seqlens is None or batch.max_seqlen is None:
        raise ConfigurationError("the batch is not packed: it has no cu_seqlens; make it with batch_packs")
    padded = batch.cu_seqlens if batch.cu_seqlens_padded is None else batch.cu_seqlens_padded
    values: dict[str, Any] = {}
    for side in ("q", "kv"):
        values[f"cu_seqlens_{side}"] = padded if mtp else batch.cu_seqlens
        # also where nothing is padded: under context parallelism megatron-core reads it in any case
        values[f"cu_seqlens_{side}_padded"] = padded
        values[f"max_seqlen_{side}"] = batch.max_seqlen
    return values


def _joined(parts: Sequence[Tensor], padded: Sequence[int], value: float) -> Tensor:
    return concat_pad([pad_to(part, size, value) for part, size in zip(parts, padded, strict=True)])
