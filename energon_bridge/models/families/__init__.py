"""Encoders for families of Hugging Face models: from conversations to the model's inputs.

`rendering` makes tokens of what the tokenizer's chat template writes for a conversation. `vision` has the interface of
a family, `llava` and `qwen` are families, and so is any `processor` of transformers; `video` chooses the frames of
videos, `sound` makes sounds one channel at a model's rate. `known_families` finds the family of a model. `chat_encoder`
is the task encoder for all of them, with its settings.
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
