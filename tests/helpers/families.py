"""Tokenizers, image processors and tiny models of each family, built from configurations: for tests of encoders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from conversations import COLORS
from PIL import Image

from energon_bridge.models.families import (
    LLAVA_TEMPLATE,
    QWEN_VL_TEMPLATE,
    ChatConfig,
    ChatSample,
    ChatTemplateTaskEncoder,
    QwenFamily,
    family_of,
)

FAMILIES = ("llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
QWENS = FAMILIES[1:]
QWEN_KIN = ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")  # with the processor of Qwen3-VL
PINPOINTS = [[16, 32], [32, 16], [32, 32]]

_QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|im_start|>", "<|im_end|>"]
_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 4096}


def tokenizer_of(family: str) -> Any:
    """Return a byte-level tokenizer that knows the words of the tests and the family's tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    qwen = family.startswith("qwen")
    special = ["<pad>", "<s>", "</s>", *(_QWEN_TOKENS if qwen else ["<image>"])]
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [f"color? {color} how many? user assistant USER: ASSISTANT:" for color in COLORS]
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token=None if qwen else "<s>",
        eos_token="<|im_end|>" if qwen else "</s>",
        additional_special_tokens=special[3:],
        clean_up_tokenization_spaces=False,
        chat_template=QWEN_VL_TEMPLATE if qwen else LLAVA_TEMPLATE,
    )


def image_processor_of(family: str, **settings: Any) -> Any:
    from transformers import CLIPImageProcessorPil, LlavaNextImageProcessorPil, Qwen2VLImageProcessorPil

    if family == "llava_next":
        size = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
        return LlavaNextImageProcessorPil(**size, image_grid_pinpoints=PINPOINTS)
    if family == "llava":
        return CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    return Qwen2VLImageProcessorPil(
        **{"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 24 * 24, **settings}
    )


def model_config_of(family: str, tokenizer: Any) -> Any:
    import transformers

    special = {"bos_token_id": 1, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    text = {**_SIZES, **_HEADS, **special, "vocab_size": len(tokenizer), "tie_word_embeddings": False}
    if family in ("llava", "llava_next"):
        vision = {**_SIZES, "num_attention_heads": 2, "image_size": 16, "patch_size": 8, "projection_dim": 32}
        settings = {
            "vision_config": transformers.CLIPVisionConfig(**vision),
            "text_config": transformers.LlamaConfig(**text),
            "image_token_index": tokenizer.convert_tokens_to_ids("<image>"),
            "vision_feature_layer": -1,
        }
        if family == "llava":
            return transformers.LlavaConfig(**settings, image_seq_length=4)
        return transformers.LlavaNextConfig(**settings, image_grid_pinpoints=PINPOINTS)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text["rope_parameters"] = rope
    ids = {
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    }
    vision = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 32}
        return transformers.Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    if family == "qwen2_5_vl":
        vision |= {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64, "fullatt_block_indexes": [1]}
        vision |= {"window_size": 16, "tokens_per_second": 4}
        return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    vision |= {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64, "deepstack_visual_indexes": [0]}
    vision |= {"num_position_embeddings": 64}
    text["head_dim"] = 16
    if family.endswith("moe"):
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        text |= {"shared_expert_intermediate_size": 32} if family == "qwen3_5_moe" else {}
    if family.startswith("qwen3_5"):
        vision.pop("deepstack_visual_indexes")
        rope |= {"partial_rotary_factor": 1.0, "mrope_interleaved": True}
        text |= {f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads")}
        text |= {
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        }
    kind = {"qwen3_vl": "Qwen3VL", "qwen3_vl_moe": "Qwen3VLMoe", "qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[
        family
    ]
    return getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=False, **ids
    )


def model_of(config: Any, seed: int = 0) -> Any:
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(seed)
    return AutoModelForImageTextToText.from_config(config)


def encoder_of(family: str, config: ChatConfig | None = None, **settings: Any) -> ChatTemplateTaskEncoder:
    tokenizer = tokenizer_of(family)
    known = family_of(model_config_of(family, tokenizer), tokenizer, image_processor_of(family, **settings))
    if isinstance(known, QwenFamily):
        known = replace(known, video_min_pixels=64, video_max_pixels=24 * 24 * (8 if family.startswith("qwen3") else 1))
    return ChatTemplateTaskEncoder(tokenizer, known, config)


def text_of(encoder: ChatTemplateTaskEncoder, sample: Any) -> str:
    """Return all of the text, the last label with it."""
    return str(encoder.tokenizer.decode([*sample.tokens.tolist(), int(sample.labels[-1])]))


def picture(width: int = 16, height: int = 16, color: str | None = None, seed: int = 0) -> Image.Image:
    if color is not None:
        return Image.new("RGB", (width, height), COLORS[color])
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def chat(*texts: str, images: Any = None, videos: Any = None, system: str | None = None, key: str = "q") -> ChatSample:
    """Return questions and answers in turn."""
    turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    if system is not None:
        turns.insert(0, {"role": "system", "content": system})
    return ChatSample(__key__=key, messages=turns, images=images, videos=videos)
