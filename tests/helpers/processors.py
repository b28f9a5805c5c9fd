"""Tiny processors of transformers, one of each class, built offline: its own parts with their defaults and a tokenizer
that has the special tokens which the class asks for.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name
from transformers.processing_utils import ProcessorMixin
from transformers.utils import is_torchvision_available

TEXTS = (
    "A question about the picture and what can be seen or heard in it.",
    "The answer names three things: a red square, a blue circle and a green line.",
    "user assistant system <|im_start|> <|im_end|> 0123456789 row col seconds image video audio",
)
_NO_TOKENS = ("convert", "add", "unk", "eos_", "bos_", "pad_", "sep_", "cls_", "mask_")
_VISION = {"patch_size": 14, "vision_feature_select_strategy": "full"}
SETTINGS: dict[str, dict[str, Any]] = {
    "Granite4VisionProcessor": _VISION,
    "LlavaNextProcessor": _VISION,
    "LlavaNextVideoProcessor": _VISION,
    "LlavaOnevisionProcessor": {"num_image_tokens": 729, "vision_feature_select_strategy": "full"},
    "LlavaProcessor": _VISION,
    "PerceptionLMProcessor": {"patch_size": 14},
}
"""Arguments without which a processor takes no image."""
PARTS: dict[str, dict[str, str]] = {
    "ColModernVBertProcessor": {"image_processor": "Idefics3ImageProcessor"},
    "MusicFlamingoProcessor": {"feature_extractor": "WhisperFeatureExtractor"},
    "NemotronH_Omni_Reasoning_V3Processor": {"feature_extractor": "ParakeetFeatureExtractor"},
}
"""Parts that the mappings of transformers do not name."""
ATTRIBUTES: dict[str, dict[str, Any]] = {"PaliGemmaProcessor": {"image_processor.image_seq_length": 16}}
REPLACING = ("replace_image_token", "replace_video_token", "replace_audio_token")


@functools.cache
def processor_classes() -> dict[str, tuple[str, ...]]:
    """Return the names of all processors that take text with media, each with the types of its models."""
    classes: dict[str, tuple[str, ...]] = {}
    for model_type, name in PROCESSOR_MAPPING_NAMES.items():
        classes[name] = (*classes.get(name, ()), model_type)
    return dict(sorted(classes.items()))


def expands(kind: type) -> bool:
    """Return whether a processor writes tokens for media, as models do that read media among text."""
    return any(getattr(kind, name, None) is not getattr(ProcessorMixin, name) for name in REPLACING)


def tiny_tokenizer(kind: type) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with the special tokens in the source of a processor."""
    source = "".join(inspect.getsource(inspect.getmodule(base)) for base in kind.__mro__[:2] if _is_own(base))
    asked = re.findall(r"tokenizer(?:\.|, [\"'])(\w+_token)(?:_id)?\b", source)
    names = sorted({name for name in asked if not name.startswith(_NO_TOKENS)})
    written = set(re.findall(r"[\"'](<[^<>\s\"'{}]+>|\[[A-Z_]+\]|\|[A-Z]+\|)[\"']", source))
    written |= set(re.findall(r"[A-Z]+_TOKEN = [\"'](\S+)[\"']", source))
    tokens = sorted(written | {f"<row_{row}_col_{column}>" for row in range(1, 9) for column in range(1, 9)})
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>", "<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(TEXTS, trainer)
    own = {name: f"<|{name.removesuffix('_token')}|>" for name in names}
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=own,
    )
    made.add_special_tokens({"additional_special_tokens": tokens}, replace_extra_special_tokens=False)
    for name in names:  # as tokenizers of the hub have them
        setattr(made, f"{name}_id", made.convert_tokens_to_ids(own[name]))
    return made


def tiny_processor(name: str) -> ProcessorMixin:
    """Return a processor with small or default parts."""
    kind = processor_class_from_name(name)
    arguments: dict[str, Any] = {}
    for attribute in kind.get_attributes():
        if attribute.endswith("tokenizer"):
            arguments[attribute] = tiny_tokenizer(kind)
            continue
        part = PARTS.get(name, {}).get(attribute)
        arguments[attribute] = getattr(transformers, part)() if part else tiny_part(processor_classes()[name][0], attribute)
    for place, value in ATTRIBUTES.get(name, {}).items():
        attribute, _, field = place.partition(".")
        setattr(arguments[attribute], field, value)
    return kind(**arguments, **SETTINGS.get(name, {}))


def tiny_part(model_type: str, attribute: str) -> Any:
    """Return an image, video or sound processor with the defaults of its class."""
    mapping, names = {
        "image_processor": ("image_processing_auto", "IMAGE_PROCESSOR_MAPPING_NAMES"),
        "video_processor": ("video_processing_auto", "VIDEO_PROCESSOR_MAPPING_NAMES"),
        "feature_extractor": ("feature_extraction_auto", "FEATURE_EXTRACTOR_MAPPING_NAMES"),
        "audio_processor": ("feature_extraction_auto", "FEATURE_EXTRACTOR_MAPPING_NAMES"),
    }[attribute]
    module = importlib.import_module(f"transformers.models.auto.{mapping}")
    found = getattr(module, names)[model_type]
    if isinstance(found, dict):
        found = (is_torchvision_available() and found.get("torchvision")) or found.get("pil") or found["torchvision"]
    return getattr(transformers, found)()


def _is_own(base: type) -> bool:
    return base.__module__.startswith("transformers.models")
