"""The presets of `model.preset` as models of megatron-core, split over tensor and pipeline ranks, and their attention.

megatron-core's LLaVA expects one token per image and widens the sequence itself. Batches of the `MultiModalTaskEncoder`
already have one token per image embedding. So `Llava` puts the embeddings where those tokens are: tokens, labels and
masks are used unchanged, and every pipeline stage sees sequences of the same length.

After initialisation nothing in these models is random (there is no dropout), so there is no generator state to save.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.multimodal.llava_model import LLaVAModel
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType, ModelType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.order.rng import key_of
from energon_bridge.trainers.context_parallel import zigzag_indices
from energon_bridge.trainers.context_parallel_media import gather_features
from energon_bridge.trainers.roles.encoding import cut
from energon_bridge.training.config import RunConfig

# ---------------------------------------------------------------------------------------------------------------------
# Attention of the language model: causal, within the samples of packs, over the tokens of all context-parallel ranks.
#
# megatron-core's local attention supports neither packs nor context parallelism; both need TransformerEngine, which
# needs a GPU. This one uses torch's `scaled_dot_product_attention`. Under context parallelism a rank has the tokens
# of `zigzag_indices`, as megatron-core's rotary embeddings expect, and needs the keys and values of all ranks: each
# layer gathers them, and scatters their gradients back.


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
    length = position_ids.shape[1]
    device = position_ids.device
    parts = [zigzag_indices(length, rank=peer, size=size).to(device) for peer in range(size)]
    own = parts[rank]
    gathered = torch.cat(parts)
    seen = (gathered <= own[:, None]).unsqueeze(0)
    if packed:
        samples = torch.eq(position_ids, 0).cumsum(dim=1)
        seen = seen & torch.eq(samples[:, own, None], samples[:, None, gathered])
    return seen.unsqueeze(1).expand(len(position_ids), -1, -1, -1)


# ---------------------------------------------------------------------------------------------------------------------
# The presets of `model.preset` as models of megatron-core: the same sizes, split over tensor and pipeline ranks.


_VOCABULARY_MULTIPLE = 128
"""Vocabularies are padded to a multiple of this, whatever tp is, so that checkpoints fit every tp."""


class Llava(LLaVAModel):
    """A vision tower, a projector and a language model; the last pipeline stage returns losses or logits."""

    model_type = ModelType.encoder_or_decoder

    def forward(
        self,
        tokens: Tensor,
        pixel_values: Tensor | None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Run this pipeline stage.

        Args:
            tokens: Shape (B, S), each image token standing for one embedding of its image.
            pixel_values: Shape (images, 3, H, W), in the order of their tokens; None for none.
            attention_mask: See `seen_tokens`.
            labels: Of the tokens of this context-parallel rank, (B, S / cp); None asks for logits.

        Returns:
            On the last stage cross entropies (B, S / cp), or logits (B, S / cp, vocabulary / tp); hidden states on the
            others.
        """
        embedded = None
        if self.pre_process:
            embedded = self.language_model.embedding(input_ids=tokens, position_ids=None)  # (S, B, H)
            cp_group = self.pg_collection.cp
            if pixel_values is not None and len(pixel_values):
                is_image = torch.eq(tokens, self.image_token_index)
                rows = embedded.transpose(0, 1)
                embedded = rows.masked_scatter(is_image.unsqueeze(-1), self._features(pixel_values, rows)).transpose(
                    0, 1
                )
            if cp_group.size() > 1:
                own = zigzag_indices(len(embedded), rank=cp_group.rank(), size=cp_group.size())
                embedded = embedded[own.to(embedded.device)]
            embedded = embedded.contiguous()
        output: Tensor = self.language_model(
            input_ids=None, position_ids=None, attention_mask=attention_mask, decoder_input=embedded, labels=labels
        )
        return output

    def _features(self, pixel_values: Tensor, like: Tensor) -> Tensor:
        """Return the features of all images, (tokens, H); each context-parallel rank encodes its share of the images.

        Gradients of a share go to the rank that encoded it, and data-parallel ranks, which context-parallel ones are
        for the optimizer, add up theirs: the sum is that of ranks that encode all.
        """
        group = self.pg_collection.cp
        per_image = self.vision_model.num_patches
        parts = cut([per_image] * len(pixel_values), group.size())
        own = pixel_values[parts.index(group.rank()) :][: parts.count(group.rank())] if group.rank() in parts else None
        features = like.new_empty(0, like.shape[-1])
        if own is not None:
            encoded = self.vision_model(own)[:, self.vision_model.class_token_len :]
            features = self.vision_projection(encoded.transpose(0, 1).contiguous()).transpose(0, 1).flatten(0, 1)
        return gather_features(features, [parts.count(part) * per_image for part in range(group.size())], group)


def build_model(config: RunConfig, groups: ProcessGroupCollection, *, vocab_size: int, image_token_id: int) -> Llava:
    """Return this rank's part of the model.

    The weights depend on the seed and the pipeline stage only: they are the same for every tp and dp.

    Raises:
        ConfigurationError: megatron-core has no model of this preset.
    """
    if config.model.preset not in ("tiny-llava",):
        raise ConfigurationError(
            f"trainer=megatron has no model of model.preset={config.model.preset}; it has: tiny-llava"
        )
    stage = groups.pp.rank()
    stages = groups.pp.size()
    torch.manual_seed(key_of("weights", config.seed, stage) >> 1)
    language_spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    language_spec.submodules.self_attention.submodules.core_attention = SharedAttention
    vision_spec = get_vit_layer_with_local_spec()
    vision_spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
    model = config.model
    language = _language_config(config)
    llava = Llava(
        language_transformer_config=language,
        language_transformer_layer_spec=language_spec,
        language_vocab_size=-(-vocab_size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE,
        language_max_sequence_length=config.data.seq_length,
        language_position_embedding_type="rope",
        vision_transformer_config=_vision_config(config),
        vision_transformer_layer_spec=vision_spec,
        drop_vision_class_token=True,
        vision_projection_config=_projection_config(config),
        vision_projection_layer_spec=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        add_encoder=stage == 0,
        img_h=model.image_size,
        img_w=model.image_size,
        patch_dim=model.patch_size,
        image_token_index=image_token_id,
        pg_collection=groups,
    )
    # megatron-core rejects this when it builds a model without TransformerEngine, but its rotary embeddings need it.
    language.context_parallel_size = config.parallel.cp
    return llava


def _language_config(config: RunConfig) -> TransformerConfig:
    return TransformerConfig(
        **_shared(config),
        pipeline_model_parallel_size=config.parallel.pp,
        pipeline_dtype=_parameter_type(config),
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the default one rejects variable lengths, with or without experts
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        calculate_per_token_loss=True,
    )


def _vision_config(config: RunConfig) -> TransformerConfig:
    vision = TransformerConfig(**_shared(config), activation_func=functional.gelu)
    # The kind of the megatron-core vision towers that has no norms before and after its layers.
    vision.vision_model_type = "internvit"
    return vision


def _projection_config(config: RunConfig) -> TransformerConfig:
    shared: dict[str, Any] = _shared(config) | {"num_layers": 1, "ffn_hidden_size": config.model.hidden_size}
    return TransformerConfig(**shared, activation_func=functional.gelu)


def _shared(config: RunConfig) -> dict[str, Any]:
    model = config.model
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": 2 * model.hidden_size,
        "num_attention_heads": model.num_heads,
        "tensor_model_parallel_size": config.parallel.tp,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "params_dtype": _parameter_type(config),
        "bf16": config.train.precision == "bf16-mixed",
        # Draw weights on the CPU, whole, and then cut them: the same for every tp.
        "use_cpu_initialization": True,
        # The local layers are plain torch; fused kernels need TransformerEngine or Apex.
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
    }


def _parameter_type(config: RunConfig) -> torch.dtype:
    return torch.bfloat16 if config.train.precision == "bf16-mixed" else torch.float32
