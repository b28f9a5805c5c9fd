"""Encoders for families of Hugging Face models: conversations in, what the model trains on out.

`config` declares how, `chat` brings samples into one form, `rendering` writes them with a chat template and finds what
is learned, `tokens` makes token sequences of that, `prepared` is what waits for its pixels, `vision` is what a family
says of its images and videos, `llava` and `qwen` are families (`resize` and `video` have the sizes of images and the
frames of videos), `templates` chat templates of theirs; `registry` and `pretrained` find them for a model, and
`encoder` is the task encoder of all of them.
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
