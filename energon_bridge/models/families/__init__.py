"""Encoders for families of Hugging Face models: from conversations to the model's inputs.

It imports the core and its neighbours in `models/`. Begin with `chat_encoder`, the task encoder and its settings.
`known_families` decides which family a model has, `vision` is the interface of a family, `llava` and `qwen` are two
of them; `processor` is any other model by its transformers processor (`processor_plans` learns how many
tokens it writes, `processor_calls` calls it, `processor_positions` has M-RoPE positions, `known_processors` lists
exceptions). `rendering` replaces placeholders by tokens, `video` chooses frames, `sound` resamples to the model's rate.
"""

from __future__ import annotations

from energon_bridge.models.conversations.conversation import ChatSample
from energon_bridge.models.families.chat_encoder import ChatConfig, ChatTemplateTaskEncoder
from energon_bridge.models.families.known_families import family_of
from energon_bridge.models.families.llava import FixedTokenFamily, TiledFamily, llava_family, llava_next_family
from energon_bridge.models.families.processor import ProcessorFamily
from energon_bridge.models.families.qwen import QwenFamily, qwen_family
from energon_bridge.models.families.rendering import CHATML_TEMPLATE, LLAVA_TEMPLATE, OMNI_TEMPLATE, QWEN_VL_TEMPLATE
from energon_bridge.models.families.vision import Family, Plan, PreparedSample, VideoFrames

__all__ = [
    "CHATML_TEMPLATE",
    "LLAVA_TEMPLATE",
    "OMNI_TEMPLATE",
    "QWEN_VL_TEMPLATE",
    "ChatConfig",
    "ChatSample",
    "ChatTemplateTaskEncoder",
    "Family",
    "FixedTokenFamily",
    "Plan",
    "PreparedSample",
    "ProcessorFamily",
    "QwenFamily",
    "TiledFamily",
    "VideoFrames",
    "family_of",
    "llava_family",
    "llava_next_family",
    "qwen_family",
]
