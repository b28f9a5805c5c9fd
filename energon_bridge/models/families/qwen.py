"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: images and videos as patches, at their own resolution.

An image is scaled so that both sides are multiples of `patch_size * merge_size` and its area lies between bounds
(`smart_resize`); a video likewise, by frame, in Qwen3-VL over all of its frames together. `merge_size`^2 patches are
one token, `temporal_patch_size` frames one temporal patch. In Qwen3-VL, each temporal patch of a video is preceded by
its time as text. Source: the image and video processors of transformers (smart_resize, get_number_of_image_patches),
its Qwen3-VL processor (replace_video_token).

Pixels have the values of the image processor, computed by the native path if it is a known one (`images.pixels`).
Frames of videos are scaled like images: in the Pillow profile by Pillow, although the video processors of transformers,
which need torchvision, scale by torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from energon_bridge.core.encoder.deferred import Deferred
from energon_bridge.core.errors import ConfigurationError, SampleError
from energon_bridge.core.samples.stacking import concat_pad
from energon_bridge.models.families.video import FramesToDecode, frames_shape
from energon_bridge.models.families.vision import Plan, VideoFrames, check_tokens
from energon_bridge.models.images.pixels import (
    MadePixels,
    PixelDtype,
    Profile,
    alpha_for,
    in_dtype,
    pixel_path,
    process_image,
)
from energon_bridge.models.images.programs import Program
from energon_bridge.models.images.resize import smart_resize, smart_resize_video
from energon_bridge.models.images.visual import as_pil, concat_visual

_START = "<|vision_start|>"
_END = "<|vision_end|>"
_IMAGE = "<|image_pad|>"
_VIDEO = "<|video_pad|>"
_FPS = 24.0  # what the processors of transformers assume


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenFamily:
    """A family of Qwen vision-language models.

    Args:
        image_processor: Has `size` (`shortest_edge` and `longest_edge`, areas in pixels), `patch_size`, `merge_size`
            and `temporal_patch_size`.
        min_pixels: Smallest area of an image; None: the image processor's.
        max_pixels: Largest area of an image; None: the image processor's.
        video_min_pixels: Smallest area of a frame, or of all frames together with `video_timestamps`.
        video_max_pixels: Largest area, likewise.
        video_timestamps: Write the time before every temporal patch of a video (Qwen3-VL).
        video_wrapper: With timestamps, keep the vision tokens that the template writes around a video, as the processor
            of transformers 5 does; False keeps only those around each temporal patch, as the first releases did.
        tokens_per_second: Temporal positions per second of video; 0: one for each temporal patch.
        pixels: Which values pixels have, `torch` or `pillow`, or `processor` to call the processor; None: those of the
            processor's class, without calling it if it is a known one.
        pixels_dtype: Type of the pixels: `float32`, `bfloat16`, `float16`, or `uint8`, for `normalise_on_device`.
    """

    image_processor: Any
    min_pixels: int | None = None
    max_pixels: int | None = None
    video_min_pixels: int = 128 * 28 * 28
    video_max_pixels: int = 768 * 28 * 28
    video_timestamps: bool = False
    video_wrapper: bool = True
    tokens_per_second: float = 0.0
    image_token: str = _IMAGE
    video_token: str | None = _VIDEO
    pixels: Profile | None = None
    pixels_dtype: PixelDtype = "float32"
    path: Program | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        processor = self.image_processor
        if self.min_pixels or self.max_pixels:  # the bounds of the family
            processor = copy(processor)
            processor.size = {"shortest_edge": self.area[0], "longest_edge": self.area[1]}
        object.__setattr__(self, "path", pixel_path(processor, self.pixels, self.pixels_dtype))

    @property
    def image_text(self) -> str:
        """The text for an image if no template writes it."""
        return f"{_START}{self.image_token}{_END}"

    @property
    def video_text(self) -> str:
        """The text for a video if no template writes it."""
        return f"{_START}{self.video_token}{_END}"

    @property
    def merge_size(self) -> int:
        """Patches along each side of a token."""
        return int(self.image_processor.merge_size)

    @property
    def factor(self) -> int:
        """Pixels along each side of a token."""
        return int(self.image_processor.patch_size) * self.merge_size

    @property
    def temporal_patch_size(self) -> int:
        """Frames of a temporal patch."""
        return int(self.image_processor.temporal_patch_size)

    @property
    def area(self) -> tuple[int, int]:
        """Smallest and largest area of an image."""
        size = self.image_processor.size
        least = self.min_pixels or size["shortest_edge"]
        largest = self.max_pixels or size["longest_edge"]
        return int(least), int(largest)

    def plan_image(self, width: int, height: int) -> Plan:
        """Return the plan of an image. Raises SampleError if one side is more than 200 times the other."""
        rows, columns = self._patches(*smart_resize(height, width, factor=self.factor, area=self.area))
        return Plan(
            kind="image",
            placeholder=self.image_token,
            text=self.image_token,
            runs=(rows * columns // self.merge_size**2,),
            grid=(1, rows, columns),
        )

    def plan_video(self, video: VideoFrames) -> Plan:
        """Return the plan of a video. Raises SampleError if it has no frames, or their shape is invalid."""
        count, _, _ = frames_shape(video.frames)
        rows, columns = self._patches(*self._video_size(video))
        steps = -(-count // self.temporal_patch_size)
        per_step = rows * columns // self.merge_size**2
        token = str(self.video_token)
        text = token
        runs: tuple[int, ...] = (steps * per_step,)
        if self.video_timestamps:
            text = "".join(f"<{time:.1f} seconds>{_START}{token}{_END}" for time in self._times(video, count))
            runs = (per_step,) * steps
        return Plan(
            kind="video",
            placeholder=token,
            text=text,
            runs=runs,
            grid=(steps, rows, columns),
            second_per_grid=self.temporal_patch_size / (video.rate or _FPS),
            wrapped=self.video_wrapper or not self.video_timestamps,
        )

    def process(
        self, images: Sequence[Any], videos: Sequence[VideoFrames | MadePixels], plans: Sequence[Plan]
    ) -> dict[str, Tensor]:
        """Return `pixel_values` and `image_grid_thw`, `pixel_values_videos`, `video_grid_thw`, `second_per_grid_ts`."""
        visual, grids = self._process_images(images)
        clips = [self._process_video(video) for video in videos]
        if clips:
            visual["pixel_values_videos"] = concat_pad([patches for patches, _ in clips])
            visual["video_grid_thw"] = torch.tensor([grid for _, grid in clips])
            seconds = [plan.second_per_grid for plan in plans if plan.kind == "video"]
            visual["second_per_grid_ts"] = torch.tensor(seconds, dtype=torch.float32)
        grids += [grid for _, grid in clips]
        check_tokens([math.prod(grid) // self.merge_size**2 for grid in grids], plans)
        return visual

    def _process_images(self, images: Sequence[Any]) -> tuple[dict[str, Tensor], list[tuple[int, ...]]]:
        """Return the patches of images and their grids, as tensors and as numbers."""
        if self.path is not None and images:
            if any(isinstance(image, MadePixels) for image in images):
                visual = concat_visual([process_image(self.image_processor, image, self.path) for image in images])
            else:
                visual = self.path.images(images)
            return visual, [tuple(grid) for grid in visual["image_grid_thw"].tolist()]
        least, largest = self.area
        size = {"shortest_edge": least, "longest_edge": largest}
        alpha = alpha_for(self.image_processor, None)
        rows = [dict(self._run([as_pil(image, alpha)], size=size)) for image in images]
        visual = concat_visual([{name: row[name] for name in ("pixel_values", "image_grid_thw")} for row in rows])
        return visual, [tuple(row["image_grid_thw"][0].tolist()) for row in rows]

    def _run(self, images: Sequence[Image.Image], **options: Any) -> Mapping[str, Tensor]:
        output: Mapping[str, Tensor] = self.image_processor(images=list(images), return_tensors="pt", **options)
        return in_dtype(output, getattr(torch, self.pixels_dtype))

    def deferred_video(self, video: VideoFrames) -> VideoFrames | DeferredVideo:
        """Return a video whose frames become pixels on the decode threads, if possible."""
        frames = video.frames
        if self.path is None or not isinstance(frames, FramesToDecode) or not frames.alone:
            return video
        size = self._video_size(video)
        num_bytes = math.prod(self.path.video_shape(len(frames.numbers), size)) * self.path.dtype.itemsize
        return DeferredVideo(family=self, video=video, num_bytes=num_bytes)

    def _process_video(
        self, video: VideoFrames | MadePixels, memory: np.ndarray | None = None
    ) -> tuple[Tensor, tuple[int, int, int]]:
        """Return the patches of a video, of shape (patches, values of a patch), and its grid."""
        if isinstance(video, MadePixels):
            time, *rest = video.visual["video_grid_thw"].tolist()
            return video.visual["pixel_values_videos"], (time, rest[0], rest[1])
        count, _, _ = frames_shape(video.frames)
        rows, columns = self._patches(*(size := self._video_size(video)))
        step = self.temporal_patch_size
        if self.path is not None:
            return self.path.video(self._scaled(video.frames, size), size, memory), (-(-count // step), rows, columns)
        resample = Image.Resampling(int(self.image_processor.resample))
        frames = [as_pil(frame).resize((size[1], size[0]), resample) for frame in video.frames]
        frames += frames[-1:] * (-count % step)
        # An image's patch repeats its pixels along time; a frame's patch is used for its own time only.
        patches = self._run(frames, do_resize=False)["pixel_values"]
        side = int(self.image_processor.patch_size)
        patches = patches.reshape(len(frames) // step, step, rows * columns, -1, step, side, side)
        picked = torch.stack([patches[:, time, :, :, time] for time in range(step)], dim=3)
        return picked.reshape(len(frames) // step * rows * columns, -1), (len(frames) // step, rows, columns)

    def _scaled(self, frames: Any, size: tuple[int, int]) -> list[np.ndarray]:
        """Return frames at a size; undecoded ones one by one, so that they are never all held as they are stored."""
        path = self.path
        assert path is not None
        if isinstance(frames, FramesToDecode):
            return frames.mapped(lambda frame: path.scaled(frame, size))
        return [path.scaled(path.rgb(frame), size) for frame in frames]

    def _video_size(self, video: VideoFrames) -> tuple[int, int]:
        if video.scaled_to is not None:
            return video.scaled_to
        count, height, width = frames_shape(video.frames)
        area = (self.video_min_pixels, self.video_max_pixels)
        if not self.video_timestamps:
            return smart_resize(height, width, factor=self.factor, area=area)
        return smart_resize_video(
            count, height, width, factor=self.factor, area=area, temporal_factor=self.temporal_patch_size
        )

    def _times(self, video: VideoFrames, count: int) -> list[float]:
        """Return the time of each temporal patch: midway between its first and last frames."""
        step = self.temporal_patch_size
        times = list(video.timestamps or [number / (video.rate or _FPS) for number in range(count)])
        if len(times) != count:
            raise SampleError(f"a video has {count} frames but {len(times)} timestamps")
        times += times[-1:] * (-count % step)
        return [(times[first] + times[first + step - 1]) / 2 for first in range(0, len(times), step)]

    def _patches(self, height: int, width: int) -> tuple[int, int]:
        side = int(self.image_processor.patch_size)
        return height // side, width // side


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredVideo(Deferred):
    """A video to be decoded straight to the model's pixels.

    Attributes:
        family: Makes the pixels.
        video: The video, with undecoded frames.
        num_bytes: Bytes of its `pixel_values_videos`.
    """

    family: QwenFamily
    video: VideoFrames
    num_bytes: int

    def decoded(self, memory: np.ndarray | None = None) -> MadePixels:
        """Return the pixels. Raises DecodeError."""
        patches, grid = self.family._process_video(self.video, memory)
        return MadePixels({"pixel_values_videos": patches, "video_grid_thw": torch.tensor(grid)})


def qwen_family(
    model_type: str,
    image_processor: Any,
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    video_min_pixels: int | None = None,
    video_max_pixels: int | None = None,
    tokens_per_second: float | None = None,
) -> QwenFamily:
    """Return the family of models of a type in `QWEN_MODELS`, as `qwen2_vl` or `qwen3_5_moe`.

    Bounds of None come from the image processor, and for videos from the family in transformers.

    Raises:
        ConfigurationError: There is no such family, or the image processor is not one of Qwen's.
    """
    if model_type not in QWEN_MODELS:
        raise ConfigurationError(f"unknown Qwen family {model_type!r}; known: {', '.join(QWEN_MODELS)}")
    if not hasattr(image_processor, "merge_size"):
        raise ConfigurationError(
            f"{type(image_processor).__name__} has no merge_size, so it is not an image processor of Qwen"
        )
    family = QwenFamily(image_processor=image_processor, min_pixels=min_pixels, max_pixels=max_pixels)
    settings = {**QWEN_MODELS[model_type]}
    given = {"video_min_pixels": video_min_pixels, "video_max_pixels": video_max_pixels}
    settings |= {name: value for name, value in given.items() if value is not None}
    if tokens_per_second is not None and model_type == "qwen2_5_vl":
        settings["tokens_per_second"] = tokens_per_second
    return replace(family, **settings)


_QWEN3 = {"video_timestamps": True, "video_min_pixels": 128 * 32 * 32, "video_max_pixels": 768 * 32 * 32}

QWEN_MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen2_vl": {},
        "qwen2_5_vl": {"tokens_per_second": 4.0},
        "qwen3_vl": _QWEN3,
        "qwen3_vl_moe": _QWEN3,
        "qwen3_5": _QWEN3,
        "qwen3_5_moe": _QWEN3,
    }
)
"""The families by the `model_type` of transformers, with their differences."""
