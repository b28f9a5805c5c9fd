"""Small text models of many kinds, whose lengths (windows, blocks, scales) are small too, and their losses in rows and
packs beside those of each sample alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.models.conversations.inputs import model_inputs
from energon_bridge.models.conversations.sequences import MultiModalSample, PaddingValues, batch_sequences
from energon_bridge.models.packing.packed_sequences import batch_packs, pack_sequences

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 64,
}
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
_DSA = {**_MLA, **_ROUTED, "num_key_value_heads": 4, "index_topk": 48, "index_head_dim": 16}
_WINDOWS = {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]}
_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OLD = {name: _SIZES[name] for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}
KINDS: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bloom": {**_OLD, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "cohere": {},
    "cohere2": _WINDOWS,
    "deepseek_v3": {**_MLA, **_ROUTED, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    "deepseek_v32": {**_DSA, "index_n_heads": 64},
    "deepseek_v32 (few index heads)": {**_DSA, "index_n_heads": 4},
    "diffllama": {},
    "doge": {"keep_window_size": 48, "num_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5": {},
    "exaone4": _WINDOWS,
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_chunk_size": 40,
        "mamba_d_state": 16,
    },
    "gemma2": _WINDOWS,
    "gemma3_text": _WINDOWS,
    "gemma4_text": {**_WINDOWS, "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 16},
    "glm4": {},
    "glm4_moe": {**_ROUTED, "first_k_dense_replace": 1},
    "glm_moe_dsa": {**_DSA, "index_n_heads": 32, "first_k_dense_replace": 1},
    "gpt2": {**_OLD, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "gpt_neox": {"num_key_value_heads": 4},
    "gpt_oss": {**_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": {},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "helium": {},
    "hunyuan_v1_dense": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama": {},
    "llama (dynamic rope)": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        "max_position_embeddings": 64,
    },
    "llama (yarn)": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "llama4_text": {
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 64,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "floor_scale": 64,
        "attention_chunk_size": 48,
    },
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 40},
    "minimax_m3_vl_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "dense_intermediate_size": 64,
        "shared_intermediate_size": 64,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 40,
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "mistral": {"sliding_window": 40},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 40},
    "nemotron": {},
    "olmo2": {},
    "olmo3": _WINDOWS,
    "olmoe": {**_EXPERTS},
    "opt": {
        **_OLD,
        "hidden_size": 64,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 64,
    },
    "persimmon": {},
    "phi": {},
    "phi3": {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64, "max_position_embeddings": 1024},
    "phi3 (sliding window)": {"sliding_window": 40},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 40},
    "qwen2": {},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3": {"sliding_window": 40, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3_moe": _EXPERTS,
    "qwen3_next": {
        **_EXPERTS,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {"sliding_window": 40},
}
"""Types of models, with a remark in brackets, and their settings beside the sizes."""

_FILLING = PaddingValues(pad_id=0, ignore=-100)
SHORT = (9, 7, 12)
LONG = (70, 130, 50)
ROW = 300


def text_model(kind: str) -> Any:
    """Return a model in which positions and neighbours matter."""
    settings = KINDS[kind]
    given = settings if "n_embd" in settings or "word_embed_proj_dim" in settings else {**_SIZES, **settings}
    config = transformers.AutoConfig.for_model(kind.partition(" ")[0], **given)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    return model


def _sample(tokens: torch.Tensor) -> MultiModalSample:
    return MultiModalSample(
        __key__="x",
        __restore_key__=(),
        tokens=tokens[:-1],
        labels=tokens[1:],
        loss_mask=torch.ones(len(tokens) - 1),
        visual={},
        answer="",
        num_images=0,
    )


def _rows(samples: Sequence[MultiModalSample], length: int | None) -> Any:
    return batch_sequences(samples, length or max(len(one.tokens) for one in samples), _FILLING)


def _pack(samples: Sequence[MultiModalSample], length: int | None) -> Any:
    return batch_packs([pack_sequences(samples, _FILLING, length=length)], _FILLING)


WAYS: dict[str, tuple[Callable[..., Any], Sequence[int], int | None]] = {
    "rows": (_rows, SHORT, None),
    "rows, long": (_rows, LONG, None),
    "padded rows": (_rows, SHORT, ROW),
    "packs": (_pack, SHORT, None),
    "packs, padded": (_pack, SHORT, ROW),
    "packs, long": (_pack, LONG, None),
    "packs, long, padded": (_pack, LONG, ROW),
}
"""How samples become a batch: of which lengths, and up to which length of a row."""


@torch.no_grad()
def worst_difference(model: Any, way: str) -> float | str:
    """Return how far the loss of a token is from that of its sample alone, at most; or why the batch is refused."""
    make, lengths, row = WAYS[way]
    draw = torch.Generator().manual_seed(1)
    texts = [torch.randint(5, 200, (length,), generator=draw) for length in lengths]
    try:
        inputs = model_inputs(make([_sample(text) for text in texts], row), model)
    except ConfigurationError as error:
        return str(error)
    labels = inputs.pop("labels")
    logits = model(**inputs).logits
    losses = cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="none")
    found = losses[labels[:, 1:].flatten() != -100]  # in the order of the samples, in rows and in packs
    alone = [
        cross_entropy(model(input_ids=one[None, :-1]).logits[0].float(), one[1:], reduction="none") for one in texts
    ]
    return float((found - torch.cat(alone)).abs().max())
