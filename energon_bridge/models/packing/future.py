"""Targets of multi-token prediction: what comes several tokens ahead, and never beyond the end of its sample.

Heads that predict several tokens roll tokens, labels and loss mask of a row to the left. Where a row has several
samples, a plain roll teaches the end of each the beginning of the next, and so does megatron-core (0.16 to 0.19) where
samples are padded: it rolls within `cu_seqlens_q`, although the tokens stand where `cu_seqlens_q_padded` says. For it
there is `packed_seq_params(batch, mtp=True)`; other models take `future_targets`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.models.conversations.sequences import MultiModalBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class FutureTargets:
    """Tensors of a batch so many tokens ahead, (B, S) as there; `mrope_position_ids` (3, B, S) or None.

    Where the sample has no token so far ahead, `tokens` and positions are 0, `labels` the ignored value, `loss_mask` 0.
    """

    ahead: int
    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    mrope_position_ids: Tensor | None


def future_targets(batch: MultiModalBatch, depth: int, *, ignore: int = -100) -> list[FutureTargets]:
    """Return what is 1 to `depth` tokens ahead of each token, in rows of one sample or packs.

    Entry d - 1 has at place i token, position, label and loss mask of token i + d of the same sample: the inputs and
    targets of the d-th head, which predicts the token after that.

    Args:
        batch: Rows or packs, as encoders deliver them: not those of one rank of context parallelism.
        depth: How many heads there are.
        ignore: The label where there is none.

    Raises:
        ConfigurationError: `depth` is not positive.
    """
    if depth < 1:
        raise ConfigurationError(f"future_targets: depth must be 1 or more, got {depth}")
    size = batch.tokens.numel()
    device = batch.tokens.device
    if batch.cu_seqlens_padded is None:
        ends = torch.arange(1, len(batch.tokens) + 1, device=device) * batch.tokens.shape[1]
    else:
        ends = batch.cu_seqlens_padded[1:].long()
    places = torch.arange(size, device=device)
    end_of = ends[torch.searchsorted(ends, places, right=True)]
    is_token = batch.attention_mask.reshape(-1).bool()
    fills = {"tokens": 0, "labels": ignore, "loss_mask": 0.0, "position_ids": 0}
    targets: list[FutureTargets] = []
    for ahead in range(1, depth + 1):
        at = (places + ahead).clamp(max=size - 1)
        is_there = (places + ahead < end_of) & is_token[at]

        def moved(values: Tensor, fill: float, at: Tensor = at, is_there: Tensor = is_there) -> Tensor:
            return torch.where(is_there, values.reshape(-1)[at], fill).to(values.dtype).view(values.shape)

        fields = {name: moved(getattr(batch, name), fill) for name, fill in fills.items()}
        axes = batch.mrope_position_ids
        mrope = None if axes is None else torch.stack([moved(axis, 0) for axis in axes])
        targets.append(FutureTargets(ahead=ahead, mrope_position_ids=mrope, **fields))
    return targets
