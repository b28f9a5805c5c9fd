"""The settings of `ChatTemplateTaskEncoder`: how conversations become training samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from energon_bridge.errors import ConfigurationError
from energon_bridge.task_encoder.packing import OverLong
from energon_bridge.task_encoder.pixels import PixelDtype, Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatConfig:
    """How to render, mask, limit and pad conversations.

    Examples:
        >>> config = ChatConfig(seq_length=8192, learn="last")
        >>> ChatTemplateTaskEncoder.from_pretrained("Qwen/Qwen2.5-VL-7B-Instruct", config)  # doctest: +SKIP

    Args:
        seq_length: Longest sequence, image tokens included.
        chat_template: A Jinja template instead of the tokenizer's own.
        template_kwargs: Further arguments of the template, for example `{"enable_thinking": False}`.
        system: System prompt for conversations without one.
        learn: `all` answers, or only the `last`, for templates that write earlier turns differently.
        over_long: What to do with a conversation longer than `seq_length`: `truncate` cuts it on the right, never
            inside an image or a video; `drop` leaves it out as SkipSample does; `raise` stops the run.
        max_num_images: Most images and videos of a sample; None: any number.
        max_visual_tokens: Most image and video tokens of a sample.
        video_fps: Frames per second to take from a video given as a decoder (`AVDecoder`).
        min_num_frames: Fewest frames to take from such a video, if it has that many.
        max_num_frames: Most frames of a video; further frames of a list are cut off.
        over_limit: The same choices for samples over `max_num_images` or `max_visual_tokens`: `truncate` cuts before
            the first image or video over the limit.
        place_images: Put images without a placeholder `before` or `after` the first question.
        add_bos: Start with the begin-of-sequence token. None: if the tokenizer does, unless the text already has it.
        pad_to_multiple_of: Batches, and the samples of packs, are padded to a multiple of this length.
        pad_to_max_length: Pad every batch, and every pack, to `seq_length`: one shape for all batches.
        ignore_index: Label of every position that carries no loss.
        pixels: Which values pixels have: `torch` or `pillow`, as from transformers' processors based on torchvision
            or Pillow; `processor` calls the image processor. None: the family's choice.
        pixels_dtype: Type of the pixels: `float32`, `bfloat16`, `float16`, or `uint8`, which `normalise_on_device`
            turns into floats. None: the family's choice.

    Raises:
        ConfigurationError: A number is not positive, or a choice is unknown.
    """

    seq_length: int = 2048
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    learn: Literal["all", "last"] = "all"
    over_long: OverLong | Literal["truncate", "drop", "raise"] = OverLong.TRUNCATE
    max_num_images: int | None = None
    max_visual_tokens: int | None = None
    video_fps: float = 2.0
    min_num_frames: int = 4
    max_num_frames: int | None = 768
    over_limit: OverLong | Literal["truncate", "drop", "raise"] = OverLong.DROP
    place_images: Literal["before", "after"] = "before"
    add_bos: bool | None = None
    pad_to_multiple_of: int = 1
    pad_to_max_length: bool = False
    ignore_index: int = -100
    pixels: Profile | None = None
    pixels_dtype: PixelDtype | None = None

    def __post_init__(self) -> None:
        numbers = ("seq_length", "max_num_images", "max_visual_tokens", "min_num_frames", "max_num_frames")
        for name in (*numbers, "pad_to_multiple_of"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigurationError(f"ChatConfig: {name} must be a positive integer, got {value!r}")
        if not self.video_fps > 0:
            raise ConfigurationError(f"ChatConfig: video_fps must be positive, got {self.video_fps!r}")
        policies = (OverLong.TRUNCATE, OverLong.DROP, OverLong.RAISE)
        for name, choices in (
            ("over_long", policies),
            ("over_limit", policies),
            ("learn", ("all", "last")),
            ("place_images", ("before", "after")),
        ):
            if getattr(self, name) not in choices:
                raise ConfigurationError(
                    f"ChatConfig: {name} must be one of {', '.join(choices)}, got {str(getattr(self, name))!r}"
                )
