"""How conversations become training samples: the declarative configuration of `ChatTemplateTaskEncoder`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from energon_bridge.errors import ConfigurationError
from energon_bridge.task_encoder.packing import OverLong
from energon_bridge.task_encoder.pixels import PixelDtype, Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatConfig:
    """How conversations are rendered, learned, limited and padded.

    Examples:
        >>> config = ChatConfig(seq_length=8192, learn="last")
        >>> ChatTemplateTaskEncoder.from_pretrained("Qwen/Qwen2.5-VL-7B-Instruct", config)  # doctest: +SKIP

    Args:
        seq_length: Longest sequence that the model is shown, image tokens included.
        chat_template: A Jinja template in place of the tokenizer's own.
        template_kwargs: What else the template is given, for example `{"enable_thinking": False}`.
        system: Put in front of every conversation that does not bring a system prompt of its own.
        learn: `all` answers, or the `last` one only, for templates that write earlier turns in another way.
        over_long: What becomes of a conversation longer than `seq_length`: `truncate` cuts it on the right, never
            inside an image or a video; `drop` leaves it out as SkipSample does; `raise` stops the run.
        max_num_images: Most images and videos of a sample; None: any number.
        max_visual_tokens: Most image and video tokens of a sample.
        video_fps: Frames to take of each second of a video that is given as a decoder (`AVDecoder`).
        min_num_frames: Fewest frames of such a video, where it has as many.
        max_num_frames: Most frames of a video; of frames that are given, what follows is cut off.
        over_limit: The same choices for samples over `max_num_images` or `max_visual_tokens`: `truncate` cuts in front
            of the first image or video over the limit.
        place_images: Where a conversation has no placeholder, its images go `before` or `after` its first question.
        add_bos: Begin with the begin-of-sequence token. None: where the tokenizer itself does, unless it is there.
        pad_to_multiple_of: Batches, and the samples of packs, are padded to a multiple of this length.
        pad_to_max_length: Pad every batch, and every pack, to `seq_length`: one shape for all batches.
        ignore_index: Label of every position that carries no loss.
        pixels: Whose values the pixels of images have: `torch` or `pillow`, those of transformers' processors that go
            by torchvision or by Pillow; `processor` calls the image processor. None: what the family says.
        pixels_dtype: Of the pixels: `float32`, `bfloat16`, `float16`, or `uint8`, which `normalise_on_device` makes
            floats of. None: what the family says.

    Raises:
        ConfigurationError: A number is not positive, or there is no such choice.
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
