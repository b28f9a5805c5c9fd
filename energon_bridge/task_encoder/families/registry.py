"""Find the family of a model of transformers from its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from energon_bridge.errors import ConfigurationError
from energon_bridge.task_encoder.families.llava import FixedTokenFamily, llava_family, llava_next_family
from energon_bridge.task_encoder.families.qwen import QWEN_MODELS, QwenFamily, qwen_family

_LLAVAS = {"llava": llava_family, "llava_next": llava_next_family}
# Outputs of a vision tower beyond its patches; towers not listed have a class token.
_CLASS_TOKENS = {"siglip_vision_model": 0, "siglip2_vision_model": 0}


def family_of(
    model_config: Any, tokenizer: Any, image_processor: Any, *, video_config: Mapping[str, Any] | None = None
) -> FixedTokenFamily | QwenFamily:
    """Return the family of a model.

    Args:
        model_config: The model's configuration: `model_type` and what its family needs.
        tokenizer: The model's tokenizer, for the text of the image token.
        image_processor: The model's image processor.
        video_config: The configuration of its video processor, for the bounds on the size of videos.

    Raises:
        ConfigurationError: The family is unknown.
    """
    kind = model_config.model_type
    if kind in QWEN_MODELS:
        least, largest = _video_bounds(video_config or {})
        return qwen_family(
            kind,
            image_processor,
            video_min_pixels=least,
            video_max_pixels=largest,
            tokens_per_second=getattr(model_config.vision_config, "tokens_per_second", None),
        )
    if kind in _LLAVAS:
        vision = model_config.vision_config
        token_id = getattr(model_config, "image_token_id", None) or model_config.image_token_index
        if kind == "llava_next":
            _check_pinpoints(model_config.image_grid_pinpoints, image_processor)
        return _LLAVAS[kind](
            image_processor,
            patch_size=vision.patch_size,
            feature_strategy=model_config.vision_feature_select_strategy,
            class_tokens=_CLASS_TOKENS.get(vision.model_type, 1),
            image_token=tokenizer.convert_ids_to_tokens(token_id),
        )
    raise ConfigurationError(
        f"there is no family for models of type {kind!r}; known: {', '.join((*_LLAVAS, *QWEN_MODELS))}. Pass a "
        "FixedTokenFamily, or your own family, to ChatTemplateTaskEncoder"
    )


def _check_pinpoints(of_model: Sequence[Sequence[int]], image_processor: Any) -> None:
    of_processor = getattr(image_processor, "image_grid_pinpoints", None) or []
    if sorted(map(tuple, of_model)) != sorted(map(tuple, of_processor)):
        raise ConfigurationError(
            f"image_grid_pinpoints of the model ({of_model}) and of {type(image_processor).__name__} ({of_processor}) "
            "differ, so the model could not assemble the tiles: set those of the processor to the model's"
        )


def _video_bounds(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    size = config.get("size") or {}
    return (
        config.get("min_pixels") or size.get("shortest_edge"),
        config.get("max_pixels") or size.get("longest_edge"),
    )
