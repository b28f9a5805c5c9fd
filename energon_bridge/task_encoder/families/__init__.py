"""Encoders for families of Hugging Face models: from conversations to the model's inputs.

`config` has the settings, `chat` brings samples into one form, `rendering` applies the chat template and finds the
learned text, `tokens` makes token sequences, `prepared` is a sample without its pixels, `vision` the interface of a
family, `llava` and `qwen` are families (`resize` and `video` choose the sizes of images and the frames of videos),
`templates` has their chat templates; `registry` and `pretrained` find the family of a model, and `encoder` is the task
encoder for all of them.
"""

from __future__ import annotations

from energon_bridge.task_encoder.families.chat import ChatSample
from energon_bridge.task_encoder.families.config import ChatConfig
from energon_bridge.task_encoder.families.encoder import ChatTemplateTaskEncoder
from energon_bridge.task_encoder.families.llava import FixedTokenFamily, TiledFamily, llava_family, llava_next_family
from energon_bridge.task_encoder.families.prepared import PreparedSample
from energon_bridge.task_encoder.families.qwen import QwenFamily, qwen_family
from energon_bridge.task_encoder.families.registry import family_of
from energon_bridge.task_encoder.families.templates import CHATML_TEMPLATE, LLAVA_TEMPLATE, QWEN_VL_TEMPLATE
from energon_bridge.task_encoder.families.vision import Family, Plan, VideoFrames

__all__ = [
    "CHATML_TEMPLATE",
    "LLAVA_TEMPLATE",
    "QWEN_VL_TEMPLATE",
    "ChatConfig",
    "ChatSample",
    "ChatTemplateTaskEncoder",
    "Family",
    "FixedTokenFamily",
    "Plan",
    "PreparedSample",
    "QwenFamily",
    "TiledFamily",
    "VideoFrames",
    "family_of",
    "llava_family",
    "llava_next_family",
    "qwen_family",
]
