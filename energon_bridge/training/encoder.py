"""The task encoder of a run, and the control experiment that shows whether the model uses its images.

A model of a known family that has a chat template, from the configuration or the tokenizer, is trained on conversations
rendered by it (`ChatTemplateTaskEncoder`); any other model on plain sequences of images and text
(`MultiModalTaskEncoder`). Only this module chooses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from energon_bridge.errors import ConfigurationError
from energon_bridge.task_encoder.families import (
    CHATML_TEMPLATE,
    LLAVA_TEMPLATE,
    QWEN_VL_TEMPLATE,
    ChatConfig,
    ChatSample,
    ChatTemplateTaskEncoder,
    Family,
    QwenFamily,
)
from energon_bridge.task_encoder.families.prepared import PreparedSample
from energon_bridge.task_encoder.multimodal import MultiModalBatch, MultiModalSample, MultiModalTaskEncoder
from energon_bridge.task_encoder.packing import SAMPLES, Packer
from energon_bridge.training.config import DataConfig
from energon_bridge.training.conversations import COOKERS, encode_chat
from energon_bridge.training.presets import ModelBundle

CHAT_TEMPLATES: Mapping[str, str] = MappingProxyType(
    {"llava": LLAVA_TEMPLATE, "chatml": CHATML_TEMPLATE, "qwen-vl": QWEN_VL_TEMPLATE}
)

ENCODER_SETTINGS = (
    "shuffle_images",
    "packing_max_samples",
    "packing_max_images",
    "chat_template",
    "system",
    "min_pixels",
    "max_pixels",
    "max_num_images",
)
"""Fields of `DataConfig` that are for the encoder, not for the data module."""

_CHAT_ONLY = ("system", "min_pixels", "max_pixels", "max_num_images")


class _ShuffledImages:
    """Give each sample of a microbatch the image of the one before it.

    The order of the stream is random, so these images say nothing about the texts; a model that still gets the texts
    right does not need its images. A microbatch of one sample keeps its image.
    """

    def batch(self, samples: Sequence[Any]) -> MultiModalBatch:
        """Rotate the images by one row, then batch as usual."""
        images = [sample.visual for sample in samples]
        for sample, visual in zip(samples, images[-1:] + images[:-1], strict=True):
            sample.visual = visual
        batch: MultiModalBatch = super().batch(samples)  # type: ignore[misc]
        return batch


class ShuffledImagesTaskEncoder(_ShuffledImages, MultiModalTaskEncoder):
    """The control of `MultiModalTaskEncoder`."""


class ShuffledImagesChatEncoder(_ShuffledImages, ChatTemplateTaskEncoder):
    """The control of `ChatTemplateTaskEncoder`."""


def training_task_encoder(config: DataConfig, bundle: ModelBundle) -> MultiModalTaskEncoder | ChatTemplateTaskEncoder:
    """Return the task encoder for a model.

    Raises:
        ConfigurationError: The settings do not fit the model.
    """
    template = chat_template(config.chat_template)
    family = bundle.family
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
    )
    encoder.cookers = COOKERS
    encoder.register_encoder(ChatSample, encode_chat)
    return encoder


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
    config: DataConfig, bundle: ModelBundle, family: Family, template: str | None
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
            system=config.system,
            max_num_images=config.max_num_images,
        ),
        packer=_packer(config),
    )
    encoder.cookers = COOKERS
    return encoder


def _bounded(family: Family, config: DataConfig) -> Family:
    """Return a family with the configured bounds for its images."""
    if config.min_pixels is None and config.max_pixels is None:
        return family
    if not isinstance(family, QwenFamily):
        name = "max_pixels" if config.min_pixels is None else "min_pixels"
        raise ConfigurationError(
            f"data.{name}={getattr(config, name)} has no effect: all images of this model have the size of its image "
            f"processor. Set data.{name}=null"
        )
    return replace(family, min_pixels=config.min_pixels, max_pixels=config.max_pixels)


def _packer(config: DataConfig) -> Packer[Any] | None:
    if not config.packs:
        return None
    limits = {"tokens": config.seq_length, SAMPLES: config.packing_max_samples, "images": config.packing_max_images}
    return Packer(limits={name: limit for name, limit in limits.items() if limit is not None}, size_of=_sizes)


def _sizes(sample: MultiModalSample | PreparedSample) -> dict[str, int]:
    images = len(sample.plans) if isinstance(sample, PreparedSample) else sample.num_images
    return {"tokens": len(sample.tokens), "images": images}
