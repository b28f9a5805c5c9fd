"""Which family a model of transformers belongs to, by its configuration."""

from __future__ import annotations

from typing import Any

from energon_bridge.errors import ConfigurationError
from energon_bridge.task_encoder.families.llava import FixedTokenFamily, llava_family
from energon_bridge.task_encoder.families.qwen import QWEN_MODELS, QwenFamily, qwen_family

# Outputs of a vision tower beyond its patches; towers that are not named have a class token.
_CLASS_TOKENS = {"siglip_vision_model": 0, "siglip2_vision_model": 0}


def family_of(model_config: Any, tokenizer: Any, image_processor: Any) -> FixedTokenFamily | QwenFamily:
    """Return the family of a model.

    Args:
        model_config: The model's configuration: `model_type` and what its family needs.
        tokenizer: Knows the text of the image token.
        image_processor: The model's image processor.

    Raises:
        ConfigurationError: The family is not known.
    """
    kind = model_config.model_type
    if kind in QWEN_MODELS:
        return qwen_family(kind, image_processor, tokens_per_second=_tokens_per_second(model_config))
    if kind == "llava":
        vision = model_config.vision_config
        token_id = getattr(model_config, "image_token_id", None) or model_config.image_token_index
        return llava_family(
            image_processor,
            patch_size=vision.patch_size,
            feature_strategy=model_config.vision_feature_select_strategy,
            class_tokens=_CLASS_TOKENS.get(vision.model_type, 1),
            image_token=tokenizer.convert_ids_to_tokens(token_id),
        )
    raise ConfigurationError(
        f"no family is known for models of type {kind!r}; known: llava, {', '.join(QWEN_MODELS)}. Pass a "
        "FixedTokenFamily, or a family of your own, to ChatTemplateTaskEncoder"
    )


def _tokens_per_second(model_config: Any) -> float:
    return float(getattr(model_config.vision_config, "tokens_per_second", 0) or 0)
