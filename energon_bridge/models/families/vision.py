"""The interface of a family of models: how it takes images and videos.

From the width and height of an image, or the shape of a video's frames, a family makes a `Plan`: its tokens in the
sequence. That needs no pixels, so samples are filtered, cut and packed before anything is decoded. Pixels come last,
from the image processor of transformers, and `Family.process` compares them with the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from energon_bridge.core.errors import SampleError
from energon_bridge.core.samples import Sample, edataclass
from energon_bridge.models.conversations.conversation import Kind
from energon_bridge.models.conversations.sequences import MultiModalSample, PatchGrid, mrope_positions

TEXT_TYPE, IMAGE_TYPE, VIDEO_TYPE, AUDIO_TYPE = 0, 1, 2, 3
"""Values of `mm_token_type_ids`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The tokens of an image, video or sound in the sequence.

    Attributes:
        kind: `image`, `video` or `audio`.
        placeholder: The token in the chat template.
        text: The text that replaces it; contains one of `token_ids` for each of `runs`.
        runs: The number of tokens that each of these becomes.
        grid: Patches along time, height and width; None for families without a grid.
        second_per_grid: Seconds from one temporal patch of a video to the next.
        wrapped: Whether to keep the text that the template writes around the placeholder.
        token_ids: The tokens that are repeated; none: the placeholder's.
    """

    kind: Kind
    placeholder: str
    text: str
    runs: tuple[int, ...]
    grid: tuple[int, int, int] | None = None
    second_per_grid: float = 1.0
    wrapped: bool = True
    token_ids: tuple[int, ...] = ()

    def written(self, text: str) -> str:
        """Return the text of the template with the placeholder replaced."""
        return text.replace(self.placeholder, self.text) if self.wrapped else self.text

    @property
    def tokens(self) -> int:
        """Number of tokens that the model replaces by features of images, videos and sounds."""
        return sum(self.runs)


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoFrames:
    """Frames of a video with their times.

    Attributes:
        frames: A uint8 tensor of shape (frames, channels, height, width), or a list of images.
        fps: Rate of these frames, as they were sampled; None if unknown.
        timestamps: Times of the frames in seconds. None: the first at 0, the others by `fps`.
        sound: What is heard with them, from the first frame on, in a form of `families.sound.sound_of`: for models that
            hear the sound of videos. None: nothing.
        scaled_to: Height and width that the model gets; None: by the bounds of its family.
    """

    frames: Any = field(repr=False)
    fps: float | None = None
    timestamps: tuple[float, ...] | None = None
    sound: Any = field(default=None, repr=False)
    scaled_to: tuple[int, int] | None = None

    @property
    def rate(self) -> float | None:
        """Frames a second: `fps`, or the mean by their times; None if neither says it."""
        times = self.timestamps or ()
        if self.fps or len(times) < 2 or times[-1] <= times[0]:
            return self.fps
        return (len(times) - 1) / (times[-1] - times[0])


class PlanningFamily(Protocol):
    """The part of a family that plans tokens, before anything is decoded.

    The chat template writes `image_token` or `video_token` once for each image or video (None: not supported); the
    encoder writes `image_text` and `video_text` in texts without a template.
    """

    @property
    def image_token(self) -> str: ...
    @property
    def video_token(self) -> str | None: ...
    @property
    def image_text(self) -> str: ...
    @property
    def video_text(self) -> str: ...
    def plan_image(self, width: int, height: int) -> Plan:
        """Return the plan of an image of this size in pixels."""

    def plan_video(self, video: VideoFrames) -> Plan:
        """Return the plan of a video."""


class Family(PlanningFamily, Protocol):
    """The interface of a family of vision-language models that makes its pixels itself.

    `merge_size` is 0 for families with positions on one axis; otherwise `mrope` positions are made.
    """

    @property
    def merge_size(self) -> int: ...
    @property
    def tokens_per_second(self) -> float: ...
    def process(self, images: Sequence[Any], videos: Sequence[VideoFrames], plans: Sequence[Plan]) -> dict[str, Tensor]:
        """Return the model's visual inputs for decoded images and videos; `plans` are theirs, images first."""


def check_tokens(processed: Sequence[int], plans: Sequence[Plan]) -> None:
    """Compare the tokens of the processed media with the planned ones.

    Raises:
        SampleError: They differ.
    """
    planned = [plan.tokens for plan in plans]
    if list(processed) != planned:
        raise SampleError(
            f"the processed images and videos take {list(processed)} tokens, but their sizes give {planned}: do not "
            "change the image processor after making the encoder, and do not scale images while decoding"
        )


# Samples --------------------------------------------------------------------------------------------------------------
#
# Tokenised samples without pixels, as they wait in a packing buffer, and their positions.


@edataclass
class PreparedSample(Sample):
    """A tokenised sample whose images are not processed yet, with the tensors of MultiModalSample.

    `plans` belong to the images, videos and sounds in `images`, `videos` and `sounds`, in the order of their
    placeholders. `text` is the sample as the chat template writes it, up to the first medium that was cut off, and
    `adds_special` says whether the tokenizer adds its begin token: both for families that call a whole processor.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    mm_token_type_ids: Tensor
    plans: tuple[Plan, ...]
    images: list[Any]
    videos: list[Any]
    answer: str
    sounds: list[Any] = field(default_factory=list)
    text: str = ""
    adds_special: bool = False

    @property
    def visual_tokens(self) -> int:
        """Number of image, video and sound tokens."""
        return sum(plan.tokens for plan in self.plans)

    def finished(self, visual: dict[str, Tensor], positions: Tensor | None, *, of_processor: bool) -> MultiModalSample:
        """Return the sample with what its media became, or as much of it as a rank needs.

        Args:
            visual: The tensors of its media.
            positions: Its positions on three axes, if the model takes them.
            of_processor: Its family calls a whole processor, whose models take the types of tokens in any case.
        """
        return MultiModalSample.derive_from(
            self,
            tokens=self.tokens,
            labels=self.labels,
            loss_mask=self.loss_mask,
            visual=visual,
            answer=self.answer,
            num_images=len(self.images),
            mm_token_type_ids=self.mm_token_type_ids if positions is not None or of_processor else None,
            mrope_position_ids=positions,
        )


def positions_of(sample: PreparedSample, family: Family | None) -> Tensor | None:
    """Return the positions on three axes, int64 of shape (3, tokens); None for models without them."""
    if family is None or not family.merge_size:
        return None
    grids: dict[int, list[PatchGrid]] = {IMAGE_TYPE: [], VIDEO_TYPE: []}
    for plan in sample.plans:
        time, height, width = plan.grid or (1, 0, 0)
        if plan.kind == "image":
            grids[IMAGE_TYPE].append(PatchGrid(time, height, width))
            continue
        interval = family.tokens_per_second * plan.second_per_grid if family.tokens_per_second else 1.0
        # Separate runs, with times between them, are separate grids.
        grids[VIDEO_TYPE] += [PatchGrid(time // len(plan.runs), height, width, interval)] * len(plan.runs)
    return mrope_positions(sample.mm_token_type_ids.numpy(), grids, family.merge_size)
