"""Positions on three axes, by the model's own function for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from energon_bridge.core.errors import SampleError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPositions:
    """A model's own positions.

    Attributes:
        model_config: The model's configuration.
        rope: Its function for positions on three axes.
        takes: The names of what that takes.
    """

    model_config: Any
    rope: Callable[..., Any]
    takes: frozenset[str]

    @classmethod
    def of(cls, model_config: Any) -> ModelPositions | None:
        """Return the positions of a model; None: it has one axis, or is unknown."""
        rope = None if model_config is None else rope_index(model_config)
        if rope is None:
            return None
        takes = frozenset(inspect.signature(rope).parameters)
        return cls(model_config=model_config, rope=rope, takes=takes)

    @property
    def hear_videos(self) -> bool:
        """Whether the positions of a video depend on whether it has sound."""
        return "use_audio_in_video" in self.takes

    def of_sample(self, tokens: Tensor, types: Tensor, visual: Mapping[str, Tensor]) -> Tensor | None:
        """Return the model's own positions on three axes, int64 (3, tokens); None if these are on one axis.

        A model that hears videos takes one word for all of a call: whether they have sound. So the stretches of a
        sample that differ in it are calls of their own, each going on where the one before ended.
        """
        given = {"attention_mask": torch.ones_like(tokens), "mm_token_type_ids": types, **visual}
        if "video_second_per_grid" in visual:
            given["second_per_grids"] = visual["video_second_per_grid"]
        if "feature_attention_mask" in visual:
            given["audio_seqlens"] = visual["feature_attention_mask"].sum(-1)
        given = {name: value for name, value in given.items() if name in self.takes}
        parts: list[Tensor] = []
        for stretch, media, hears in self._stretches(tokens):
            part: dict[str, Any] = {"use_audio_in_video": True} if hears else {}
            for name, value in given.items():
                which = stretch if name in ("attention_mask", "mm_token_type_ids") else media.get(name, slice(None))
                if len(value[which]):
                    part[name] = value[which][None] if which is stretch else value[which]
            try:
                made = torch.as_tensor(self.rope(input_ids=tokens[stretch][None], **part)[0])
            except Exception as error:
                raise SampleError(
                    f"the model has no positions for the sample: {type(error).__name__}: {error}"
                ) from error
            if len(made) != 3:
                return None
            parts.append(made[:, 0].long() + (parts[-1].max() + 1 if parts else 0))
        return torch.cat(parts, dim=1)

    def _stretches(self, tokens: Tensor) -> list[tuple[slice, dict[str, slice], bool]]:
        """Return stretches of a sample: their tokens, the media in each, and whether its videos have sound."""
        if not self.hear_videos:
            return [(slice(len(tokens)), {}, False)]
        config = getattr(self.model_config, "thinker_config", self.model_config)
        (starts,) = torch.where(tokens[:-1] == config.vision_start_token_id)
        behind = tokens[starts + 1]
        are_images = behind == config.image_token_id
        hear = behind == config.audio_start_token_id
        videos = starts[~are_images]
        heard = hear[~are_images]
        changes = [0, *(torch.where(heard[1:] != heard[:-1])[0] + 1).tolist()]  # numbers of videos
        borders = [0, *videos[changes[1:]].tolist(), len(tokens)]
        stretches = []
        (sounds,) = torch.where(tokens == config.audio_start_token_id)
        for number, (start, end) in enumerate(pairwise(borders)):
            ids = (starts[are_images], videos, sounds)
            of_images, of_videos, of_sounds = (
                slice(*torch.searchsorted(one, torch.tensor([start, end]))) for one in ids
            )
            media = {"image_grid_thw": of_images, "audio_seqlens": of_sounds}
            media |= dict.fromkeys(("video_grid_thw", "second_per_grids"), of_videos)
            stretches.append((slice(start, end), media, bool(len(heard)) and bool(heard[changes[number]])))
        return stretches


def rope_index(model_config: Any) -> Callable[..., Any] | None:
    """Return a model's own function for positions on three axes, which needs its configuration only; None: one axis."""
    from transformers import AutoModel
    from transformers.models.auto import modeling_auto

    model_config = getattr(model_config, "thinker_config", model_config)  # the part of omni models that reads

    for mapping in (
        AutoModel._model_mapping,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING,
    ):
        kind = mapping.get(type(model_config), None)
        if kind is not None and hasattr(kind, "get_rope_index"):
            bare = object.__new__(kind)
            torch.nn.Module.__init__(bare)
            bare.__dict__["config"] = model_config
            if (vision := getattr(model_config, "vision_config", None)) is not None:
                bare.__dict__["spatial_merge_size"] = getattr(vision, "spatial_merge_size", None)
            function: Callable[..., Any] = bare.get_rope_index
            return function
    return None
