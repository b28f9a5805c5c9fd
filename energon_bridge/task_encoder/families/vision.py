"""What a family of models does with images and videos: the interface between texts and pixels.

A family says of an image, from its width and height alone, and of a video, from the shape of its frames, what stands
for it in the token sequence: a `Plan`. That needs no pixels, so that samples are filtered, cut and packed before
anything is decoded. Pixels come last, from the image processor of transformers, and `Family.process` compares what came
with what was planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from energon_bridge.errors import SampleError

Kind = Literal["image", "video"]

TEXT_TYPE, IMAGE_TYPE, VIDEO_TYPE = 0, 1, 2
"""Values of `mm_token_type_ids`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What stands for one image or video in the token sequence.

    Attributes:
        kind: `image` or `video`.
        placeholder: The token that the chat template writes.
        text: Written in its place; has the placeholder once for each of `runs`.
        runs: How many tokens each of these placeholder tokens becomes.
        grid: Patches along time, height and width; None for families that have no grid.
        second_per_grid: Seconds from one temporal patch to the next, of a video.
        wrapped: Whether what the template writes around the placeholder stays.
    """

    kind: Kind
    placeholder: str
    text: str
    runs: tuple[int, ...]
    grid: tuple[int, int, int] | None = None
    second_per_grid: float = 1.0
    wrapped: bool = True

    def written(self, text: str) -> str:
        """Return what stands in the sequence for what the template has written."""
        return text.replace(self.placeholder, self.text) if self.wrapped else self.text

    @property
    def tokens(self) -> int:
        """Tokens that the model replaces by what it sees."""
        return sum(self.runs)


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoFrames:
    """Frames of a video with the time at which they stand.

    Attributes:
        frames: A uint8 tensor of shape (frames, channels, height, width), or a list of images.
        fps: Frames per second of these frames, as they were sampled; None if it is not known.
        timestamps: Seconds at which the frames stand. None: the first at 0, the others by `fps`.
    """

    frames: Any = field(repr=False)
    fps: float | None = None
    timestamps: tuple[float, ...] | None = None


class Family(Protocol):
    """A family of vision-language models, as the encoder needs it.

    `image_token` and `video_token` are what the chat template writes once for each image or video (None: the family
    has none); `image_text` and `video_text` are written by the encoder where a text has no template. `merge_size` is 0
    for families whose positions have one axis; else `mrope` positions are made.
    """

    @property
    def image_token(self) -> str: ...
    @property
    def video_token(self) -> str | None: ...
    @property
    def image_text(self) -> str: ...
    @property
    def video_text(self) -> str: ...
    @property
    def merge_size(self) -> int: ...
    @property
    def tokens_per_second(self) -> float: ...
    def plan_image(self, width: int, height: int) -> Plan:
        """Return what stands for an image of this size in pixels."""
        ...

    def plan_video(self, video: VideoFrames) -> Plan:
        """Return what stands for a video."""
        ...

    def process(self, images: Sequence[Any], videos: Sequence[VideoFrames], plans: Sequence[Plan]) -> dict[str, Tensor]:
        """Return the model's visual inputs for decoded images and videos; `plans` are theirs, images first."""
        ...


def check_tokens(found: Sequence[int], plans: Sequence[Plan]) -> None:
    """Compare the tokens that the processed media need with those planned before they were decoded.

    Raises:
        SampleError: They differ.
    """
    planned = [plan.tokens for plan in plans]
    if list(found) != planned:
        raise SampleError(
            f"the processed images and videos take {list(found)} tokens, but their sizes give {planned}: do not change "
            "the image processor after making the encoder, and do not scale images while decoding"
        )
