"""Attention of the language model: causal, within the samples of packs, over the tokens of all context-parallel ranks.

megatron-core's local attention supports neither packs nor context parallelism; both need TransformerEngine, which needs
a GPU. This one uses torch's `scaled_dot_product_attention`. Under context parallelism a rank has the tokens of
`zigzag_indices`, as megatron-core's rotary embeddings expect, and needs the keys and values of all ranks: each layer
gathers them, and scatters their gradients back.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from energon_bridge.integrations.context_parallel import zigzag_indices


class SharedAttention(MegatronModule):
    """A `core_attention` for the layer specs of megatron-core."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.cp_group = pg_collection.cp

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any) -> Tensor:
        """Attend.

        Args:
            query: Shape (S, B, heads, width), with S tokens on this rank.
            key: The same.
            value: The same.
            attention_mask: What `seen_tokens` returns.

        Returns:
            Shape (S, B, heads * width).
        """
        if self.cp_group.size() > 1:
            key, value = (gather_from_sequence_parallel_region(part, group=self.cp_group) for part in (key, value))
        q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        out = scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, is_causal=attention_mask is None)
        return out.permute(2, 0, 1, 3).flatten(2)


def seen_tokens(position_ids: Tensor, *, packed: bool, rank: int, size: int) -> Tensor | None:
    """Return which tokens of a row attend to which.

    Args:
        position_ids: Shape (B, S), starting at 0 in every sample.
        packed: Whether rows may hold several samples.
        rank: The context-parallel rank.
        size: The context-parallel size.

    Returns:
        True where the query of this rank sees the key, bool (B, 1, S / size, S), keys in the order in which the ranks'
        are gathered; None if every token sees all before it.
    """
    if size == 1 and not packed:
        return None
    length, device = position_ids.shape[1], position_ids.device
    parts = [zigzag_indices(length, rank=peer, size=size).to(device) for peer in range(size)]
    own, gathered = parts[rank], torch.cat(parts)
    seen = (gathered <= own[:, None]).unsqueeze(0)
    if packed:
        samples = torch.eq(position_ids, 0).cumsum(dim=1)
        seen = seen & torch.eq(samples[:, own, None], samples[:, None, gathered])
    return seen.unsqueeze(1).expand(len(position_ids), -1, -1, -1)
