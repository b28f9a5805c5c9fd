"""The inputs of a rank's part of the model: the batch on its device, and the labels of its own tokens.

Every rank of a replica has the whole batch. Images and tokens stay whole, since the first stage inserts the image
embeddings before the sequence is split; labels and their mask are those of this context-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from energon_bridge.integrations.context_parallel import zigzag_indices
from energon_bridge.samples.devices import normalise_on_device
from energon_bridge.task_encoder.multimodal import MultiModalBatch
from energon_bridge.training.megatron.attention import seen_tokens
from energon_bridge.training.megatron.ranks import Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """One microbatch; see `Llava.forward`. `loss_mask` has the shape of `labels`, float32 of zeros and ones."""

    tokens: Tensor
    pixel_values: Tensor | None
    attention_mask: Tensor | None
    labels: Tensor | None
    loss_mask: Tensor


def training_inputs(batch: MultiModalBatch, ranks: Ranks) -> Inputs:
    """Return the inputs for the loss of a batch; invalid rows carry no loss."""
    mask = batch.loss_mask
    if batch.__valid__ is not None:
        mask = mask * batch.__valid__.to(mask)[:, None]
    tokens, positions, labels, mask = (
        _even(value.to(ranks.device, non_blocking=True), ranks.groups.cp.size())
        for value in (batch.tokens, batch.position_ids, batch.labels.clamp(min=0), mask)
    )
    own = own_tokens(tokens, ranks)
    return Inputs(
        tokens=tokens,
        pixel_values=_pixels(normalise_on_device(batch, ranks.device).pixel_values, ranks),
        attention_mask=_mask(positions, ranks, packed=batch.cu_seqlens is not None),
        labels=labels[:, own],
        loss_mask=mask[:, own],
    )


def writing_inputs(tokens: Tensor, pixel_values: Tensor | None, ranks: Ranks) -> Inputs:
    """Return the inputs for the logits of rows with one sample each, padded on the right."""
    tokens = _even(tokens, ranks.groups.cp.size())
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return Inputs(
        tokens=tokens,
        pixel_values=_pixels(pixel_values, ranks),
        attention_mask=_mask(positions, ranks, packed=False),
        labels=None,
        loss_mask=torch.zeros_like(tokens),
    )


def own_tokens(tokens: Tensor, ranks: Ranks) -> Tensor:
    """Return the positions of this context-parallel rank's tokens."""
    group = ranks.groups.cp
    return zigzag_indices(tokens.shape[1], rank=group.rank(), size=group.size()).to(tokens.device)


def _even(values: Tensor, context_parallel: int) -> Tensor:
    """Pad rows on the right, to a multiple of the number of pieces they are cut into."""
    return pad(values, (0, -values.shape[1] % (2 * context_parallel)))


def _pixels(pixel_values: Tensor | None, ranks: Ranks) -> Tensor | None:
    if pixel_values is None or ranks.groups.pp.rank() > 0:
        return None
    return pixel_values.to(ranks.device, non_blocking=True)


def _mask(positions: Tensor, ranks: Ranks, *, packed: bool) -> Tensor | None:
    return seen_tokens(positions, packed=packed, rank=ranks.groups.cp.rank(), size=ranks.groups.cp.size())
