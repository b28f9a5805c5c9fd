"""The task encoder of a run.

A model of a known family that has a chat template, from the configuration or the tokenizer, is trained on conversations
rendered by it (`ChatTemplateTaskEncoder`); any other model on plain sequences of images and text
(`MultiModalTaskEncoder`). Only this module chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.samples import MultiChoiceVQASample, VQAOCRSample, VQASample
from energon_bridge.models.conversations.cooker import COOKERS
from energon_bridge.models.conversations.multimodal import MultiModalSample, MultiModalTaskEncoder
from energon_bridge.models.conversations.parts import Medium
from energon_bridge.models.conversations.sample_encoders import SAMPLE_ENCODERS
from energon_bridge.models.families import (
    CHATML_TEMPLATE,
    LLAVA_TEMPLATE,
    QWEN_VL_TEMPLATE,
    ChatConfig,
    ChatTemplateTaskEncoder,
    Family,
    ProcessorFamily,
    QwenFamily,
)
from energon_bridge.models.families.rendering import placeholder_tokens
from energon_bridge.models.families.vision import PreparedSample
from energon_bridge.models.packing.packing import SAMPLES, Packer
from energon_bridge.training.config import DataConfig
from energon_bridge.training.presets import ModelBundle
from energon_bridge.training.shuffled_images import ShuffledImagesChatEncoder, ShuffledImagesTaskEncoder

CHAT_TEMPLATES: Mapping[str, str] = MappingProxyType(
    {"llava": LLAVA_TEMPLATE, "chatml": CHATML_TEMPLATE, "qwen-vl": QWEN_VL_TEMPLATE}
)

_CHAT_ONLY = (
    "system",
    "min_pixels",
    "max_pixels",
    "max_num_images",
    *("max_num_frames", "max_video_tokens", "video_sound", "max_sound_seconds"),
)
"""Fields of `DataConfig` that only encoders of conversations have."""
_MOST_FRAMES = 768
_OF_MEDIA: Mapping[str, Medium] = {"max_num_frames": "video", "max_video_tokens": "video", "max_sound_seconds": "audio"}
_WITH_TURNS = (MultiChoiceVQASample, VQAOCRSample, VQASample)
_WITHOUT_TURNS = tuple(kind for kind in SAMPLE_ENCODERS if not issubclass(kind, _WITH_TURNS))


def training_task_encoder(config: DataConfig, bundle: ModelBundle) -> MultiModalTaskEncoder | ChatTemplateTaskEncoder:
    """Return the task encoder for a model.

    Raises:
        ConfigurationError: The settings do not fit the model.
    """
    template = chat_template(config.chat_template)
    family = bundle.family
    if isinstance(family, ProcessorFamily) and template is None and bundle.tokenizer.chat_template is None:
        raise ConfigurationError(
            f"models of type {bundle.model.config.model_type!r} are trained with a chat template, and their processor "
            f"has none: set data.chat_template to a file that writes {family.image_token or family.audio_token!r} for "
            "each image, or to one of the templates by name"
        )
    if family is not None and (template is not None or getattr(bundle.tokenizer, "chat_template", None) is not None):
        return _chat_encoder(config, bundle, family, template)
    for name in ("chat_template", *_CHAT_ONLY):
        if getattr(config, name) is not None:
            why = (
                f"models of type {bundle.model.config.model_type!r} are trained without a chat template"
                if family is None
                else "there is no chat template: set data.chat_template too"
            )
            raise ConfigurationError(f"data.{name}={getattr(config, name)!r} has no effect here: {why}")
    kind = ShuffledImagesTaskEncoder if config.shuffle_images else MultiModalTaskEncoder
    encoder = kind(
        bundle.tokenizer,
        bundle.image_processor,
        bundle.sample_config,
        config.seq_length,
        image_tokens_per_image=bundle.image_tokens,
        packer=_packer(config),
        autorotate=config.autorotate,
        today=config.today,
        blank_media=config.blank_media,
    )
    encoder.cookers = COOKERS
    return encoder


def without_effect(
    config: DataConfig, encoder: MultiModalTaskEncoder | ChatTemplateTaskEncoder, sample_types: Callable[[], set[type]]
) -> Iterator[str]:
    """Yield a warning for each setting that changes nothing with this model, or with samples of these types."""
    if not isinstance(encoder, ChatTemplateTaskEncoder):
        return  # it refuses them
    taken = placeholder_tokens(encoder.family)
    for name, kind in _OF_MEDIA.items():
        if getattr(config, name) is not None and taken.get(kind) is None:
            yield f"data.{name}={getattr(config, name)} has no effect: the model takes no {kind}"
    named = [f"data.{name}={value!r}" for name in ("chat_template", "system") if (value := getattr(config, name))]
    types = sample_types() if named else set()
    if types and all(issubclass(one, _WITHOUT_TURNS) for one in types):
        names = ", ".join(sorted(one.__name__ for one in types))
        yield (
            f"{' and '.join(named)} {'has' if len(named) == 1 else 'have'} no effect: {config.path} has samples of "
            f"type {names}, whose texts are learned as they are, without turns. For turns, make them VQASample, or "
            "conversations"
        )


def chat_template(name: str | None) -> str | None:
    """Return a chat template by name or file. Raises ConfigurationError if there is none."""
    if name is None or name in CHAT_TEMPLATES:
        return None if name is None else CHAT_TEMPLATES[name]
    try:
        return Path(name).read_text("utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"data.chat_template={name!r} is neither a readable file ({error.strerror}) nor the name of a template: "
            f"{', '.join(CHAT_TEMPLATES)}"
        ) from error


def _chat_encoder(
    config: DataConfig, bundle: ModelBundle, family: Family | ProcessorFamily, template: str | None
) -> ChatTemplateTaskEncoder:
    if config.shuffle_images and bundle.image_tokens is None:
        raise ConfigurationError(
            "data.shuffle_images=true exchanges images, which take different numbers of tokens in this model: leave it "
            "out"
        )
    kind = ShuffledImagesChatEncoder if config.shuffle_images else ChatTemplateTaskEncoder
    encoder = kind(
        bundle.tokenizer,
        _bounded(family, config),
        ChatConfig(
            seq_length=config.seq_length,
            chat_template=template,
            autorotate=config.autorotate,
            today=config.today,
            system=config.system,
            max_num_images=config.max_num_images,
            max_num_frames=config.max_num_frames or _MOST_FRAMES,
            max_video_tokens=config.max_video_tokens,
            video_sound=bool(config.video_sound),
            max_sound_seconds=config.max_sound_seconds,
            blank_media=config.blank_media,
        ),
        packer=_packer(config),
    )
    encoder.cookers = COOKERS
    return encoder


def _bounded(family: Family | ProcessorFamily, config: DataConfig) -> Family | ProcessorFamily:
    """Return a family with the configured bounds for its images, and for the frames of its videos."""
    if config.min_pixels is None and config.max_pixels is None:
        return family
    if not isinstance(family, QwenFamily):
        name = "max_pixels" if config.min_pixels is None else "min_pixels"
        raise ConfigurationError(
            f"data.{name}={getattr(config, name)} has no effect: all images of this model have the size of its image "
            f"processor. Set data.{name}=null"
        )
    frames = (config.max_num_frames or _MOST_FRAMES) if family.video_timestamps else 1  # bounded together
    return replace(
        family,
        min_pixels=config.min_pixels,
        max_pixels=config.max_pixels,
        video_min_pixels=config.min_pixels or family.video_min_pixels,
        video_max_pixels=(config.max_pixels or 0) * frames or family.video_max_pixels,
    )


def _packer(config: DataConfig) -> Packer[Any] | None:
    if not config.packs:
        return None
    limits = {"tokens": config.seq_length, SAMPLES: config.packing_max_samples, "images": config.packing_max_images}
    return Packer(limits={name: limit for name, limit in limits.items() if limit is not None}, size_of=_sizes)


def _sizes(sample: MultiModalSample | PreparedSample) -> dict[str, int]:
    images = len(sample.plans) if isinstance(sample, PreparedSample) else sample.num_images
    return {"tokens": len(sample.tokens), "images": images}
