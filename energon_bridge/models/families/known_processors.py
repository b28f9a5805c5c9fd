"""Processors of transformers that need a word: what cannot be learned of them, by the names of their classes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from energon_bridge.models.conversations.conversation import Kind
from energon_bridge.models.families.rendering import QUESTION_TEMPLATE


def _settings(processor: Any) -> dict[str, Any]:
    settings: dict[str, Any] = processor._merge_kwargs(tokenizer_init_kwargs={})["images_kwargs"]
    return settings


def patches(processor: Any, height: int, width: int) -> Any:
    return processor.image_processor.get_number_of_image_patches(height, width, _settings(processor))


def _tiles(processor: Any, height: int, width: int) -> Any:
    return processor.image_processor.get_tile_grid(height, width, _settings(processor))


def _resized(processor: Any, height: int, width: int) -> Any:
    part = processor.image_processor
    size = part.size
    patch = processor.patch_size * processor.spatial_merge_size
    return inspect.getmodule(part.resize).get_resize_output_image_size(  # type: ignore[union-attr]
        np.broadcast_to(np.uint8(0), (3, height, width)),
        size=(size["longest_edge"], size["longest_edge"]),
        patch_size=(patch, patch),
        input_data_format="channels_first",
    )


def _slices(processor: Any, height: int, width: int) -> Any:
    part = processor.image_processor
    size = height, width
    grid = part.get_sliced_grid(size, part.max_slice_nums, part.scale_resolution) if part.slice_mode else None
    given = {name: getattr(part, name) for name in ("scale_resolution", "patch_size", "downsample_mode")}
    grows = grid is None and getattr(part, "small_image_upsize", "always") == "always"
    overview = part.find_best_resize(size, **given, allow_upscale=grows)
    return overview, grid and (*grid, *part.get_refine_size(size, grid, **given, allow_upscale=True))


SHAPES: Mapping[str, Callable[..., Any]] = {
    "AyaVisionProcessor": patches,
    "Cohere2VisionProcessor": patches,
    "GraniteDoclingProcessor": _tiles,
    "Idefics3Processor": patches,
    "MiniCPMOcrProcessor": _slices,
    "MiniCPMV4_6Processor": _slices,
    "MiniCPMV4_7Processor": _slices,
    "PixtralProcessor": _resized,
    "SmolVLMProcessor": patches,
}
"""On what the text of an image depends, for processors whose tokens are in several runs."""

BY_SHAPE: Mapping[str, str] = {"PixtralProcessor": "image_sizes"}
"""The name by which a processor writes the text of an image from its shape alone, without a blank one."""

MASKS: Mapping[str, str] = {"audio_input_features": "audio_attention_mask"}
"""Masks of values that are padded in a batch, which a processor leaves out of a call with a single one (Phi 4)."""

WRAPPED: Mapping[str, tuple[str, str]] = {"HunYuanVLProcessor": ("image_start_token", "image_end_token")}
"""Attributes with the text that a processor wants around the token of an image."""

SEVERAL_ALIKE = frozenset({"LlavaOnevisionProcessor"})
"""Processors that write one text for images of any size, where a sample has several."""

_RETRIEVAL = "its model compares texts with images, and takes one of the two at a time"
REFUSED: Mapping[str, str] = {
    "ColModernVBertProcessor": _RETRIEVAL,
    "ColPaliProcessor": _RETRIEVAL,
    "ColQwen2Processor": _RETRIEVAL,
    "Florence2Processor": "its text is a task, not a conversation",
    "FuyuProcessor": "it puts the image before the text and writes the end of the prompt by itself",
    "GlmImageProcessor": "its model makes images, of a size that the processor adds to the text",
    "PocketTTSProcessor": "its model speaks: the sound is a voice, and its prompts come from the processor alone",
    "ShieldGemma2Processor": "its model judges images, by a template of its own",
}
"""Processors that do not read media among the turns of a conversation, with the reason."""


def refused_medium(processor: Any, kind: Kind) -> str | None:
    """Return why the tokens of a kind of media do not follow from a size; None if they do."""
    if kind == "video" and type(processor).__name__ == "VideoLlama3Processor":
        return "how many tokens a video takes depends on what its frames show"
    part = getattr(processor, "image_processor", None)
    if kind == "image" and getattr(part, "small_image_upsize", None) == "adaptive":
        return (
            "how many tokens an image takes depends on what it shows: set small_image_upsize of its image processor "
            "to 'always' or 'never'"
        )
    return None


SUFFIXED: Mapping[str, str] = {"PaliGemmaProcessor": QUESTION_TEMPLATE}
"""Processors that take an answer apart from its question, as its `suffix`, and add tokens between them, with what these
write as a template. Their models read a question in both directions, and are told where it ends."""
