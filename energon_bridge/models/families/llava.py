"""Families with a fixed number of tokens per image (LLaVA and similar models), and LLaVA-NeXT, which adds tiles.

LLaVA's tokens are the patches of the vision tower, H // P * W // P for a processed image of H x W pixels and patches of
P pixels, and one for the class token; the feature strategy `default` leaves out the first.
Source: the processor of LLaVA in transformers.

LLaVA-NeXT sees an image twice: as a whole, and scaled into the best of several resolutions, cut into tiles of the size
of the whole. The model assembles the tiles, removes the padding, and ends each row with an extra token; so the tokens
of an image follow from its height and width. Source: the processor of LLaVA-NeXT in transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from energon_bridge.core.errors import ConfigurationError, SampleError
from energon_bridge.models.families.vision import Plan, VideoFrames, check_tokens
from energon_bridge.models.images.pixels import PixelDtype, Profile, pixel_path, process_image
from energon_bridge.models.images.programs import Program
from energon_bridge.models.images.resize import best_resolution
from energon_bridge.models.images.visual import concat_visual


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedTokenFamily:
    """A family of models with a fixed number of tokens per image and without videos.

    Args:
        image_processor: Called as `image_processor(images=[image], return_tensors="pt")`.
        image_tokens: Tokens of an image.
        image_token: The placeholder token in the chat template.
        patch_size: Side of a patch in the processed pixels, to check the plans. None: no check.
        extra_tokens: Tokens of an image beyond its patches.
        pixels: Which values pixels have, `torch` or `pillow`, or `processor` to call the processor; None: those of the
            processor's class, without calling it if it is a known one.
        pixels_dtype: Type of the pixels: `float32`, `bfloat16`, `float16`, or `uint8`, for `normalise_on_device`.
    """

    image_processor: Any
    image_tokens: int
    image_token: str = "<image>"
    patch_size: int | None = None
    extra_tokens: int = 0
    video_token: str | None = None
    merge_size: int = 0
    tokens_per_second: float = 0.0
    pixels: Profile | None = None
    pixels_dtype: PixelDtype = "float32"
    path: Program | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.image_tokens < 1:
            raise ConfigurationError(
                f"image_tokens must be positive, since an image needs a token; got {self.image_tokens}"
            )
        object.__setattr__(self, "path", pixel_path(self.image_processor, self.pixels, self.pixels_dtype))

    @property
    def image_text(self) -> str:
        """The text for an image if no template writes it."""
        return self.image_token

    @property
    def video_text(self) -> str:
        """Empty, since there are no videos."""
        return ""

    def plan_image(self, width: int, height: int) -> Plan:
        """Return the plan of an image."""
        tokens = self._tokens(height, width)
        return Plan(kind="image", placeholder=self.image_token, text=self.image_token, runs=(tokens,))

    def _tokens(self, height: int, width: int) -> int:
        """Return the tokens of an image of a size."""
        return self.image_tokens

    def plan_video(self, video: VideoFrames) -> Plan:
        """Raise SampleError: videos are not supported."""
        raise SampleError("models with a fixed number of tokens per image take no videos; pass the frames as images")

    def process(self, images: Sequence[Any], videos: Sequence[VideoFrames], plans: Sequence[Plan]) -> dict[str, Tensor]:
        """Return the processed images, joined along dimension 0."""
        processed = self._processed(images)
        if self.patch_size is not None:
            check_tokens(
                [_patches(one["pixel_values"], self.patch_size) + self.extra_tokens for one in processed], plans
            )
        return concat_visual(processed)

    def _processed(self, images: Sequence[Any]) -> list[dict[str, Tensor]]:
        dtype = getattr(torch, self.pixels_dtype)
        return [process_image(self.image_processor, image, self.path, dtype) for image in images]


@dataclass(frozen=True, kw_only=True, slots=True)
class TiledFamily(FixedTokenFamily):
    """LLaVA-NeXT. `image_tokens` counts the whole image; the tokens of its tiles are added.

    Args:
        resolutions: Heights and widths; an image is scaled into the best one.
        tile: Height and width of a processed tile, and of the processed whole image.
    """

    resolutions: tuple[tuple[int, int], ...]
    tile: tuple[int, int]

    def process(self, images: Sequence[Any], videos: Sequence[VideoFrames], plans: Sequence[Plan]) -> dict[str, Tensor]:
        """Return `pixel_values`, padded to the image with the most tiles, and `image_sizes`."""
        processed = self._processed(images)
        check_tokens([self._tokens(*one["image_sizes"][0].tolist()) for one in processed], plans)
        return concat_visual(processed)

    def _tokens(self, height: int, width: int) -> int:
        """Return the tokens of an image: the whole, and for each row of its tiles the part without padding, and one."""
        assert self.patch_size is not None
        room = best_resolution((height, width), self.resolutions)
        rows, columns = (side // self.patch_size * (total // side) for side, total in zip(self.tile, room, strict=True))
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        return self.image_tokens + rows * columns + rows


def llava_family(
    image_processor: Any,
    *,
    patch_size: int,
    feature_strategy: str = "default",
    class_tokens: int = 1,
    image_token: str = "<image>",
) -> FixedTokenFamily:
    """Return the family of LLaVA models; the size of the image processor gives the number of tokens.

    Args:
        image_processor: Has `crop_size` if it crops, else `size`, with height and width.
        patch_size: Side of a patch of the vision tower.
        feature_strategy: `default` leaves out the class token, `full` keeps it.
        class_tokens: Outputs of the vision tower beyond its patches.
        image_token: The placeholder token in the chat template.

    Raises:
        ConfigurationError: The image processor gives images of different sizes.
    """
    height, width = processed_size(image_processor)
    extra = class_tokens - (feature_strategy == "default")
    return FixedTokenFamily(
        image_processor=image_processor,
        image_tokens=height // patch_size * (width // patch_size) + extra,
        image_token=image_token,
        patch_size=patch_size,
        extra_tokens=extra,
    )


def llava_next_family(
    image_processor: Any,
    *,
    patch_size: int,
    feature_strategy: str = "default",
    class_tokens: int = 1,
    image_token: str = "<image>",
) -> TiledFamily:
    """Return the family of LLaVA-NeXT models; arguments and errors are those of `llava_family`."""
    whole = llava_family(
        image_processor,
        patch_size=patch_size,
        feature_strategy=feature_strategy,
        class_tokens=class_tokens,
        image_token=image_token,
    )
    pinpoints = getattr(image_processor, "image_grid_pinpoints", None)
    if not pinpoints:
        raise ConfigurationError(
            f"{type(image_processor).__name__} has no image_grid_pinpoints, so it is not an image processor of "
            "LLaVA-NeXT"
        )
    return TiledFamily(
        image_processor=image_processor,
        image_tokens=whole.image_tokens,
        image_token=image_token,
        patch_size=patch_size,
        extra_tokens=whole.extra_tokens,
        resolutions=tuple((int(rows), int(columns)) for rows, columns in pinpoints),
        tile=processed_size(image_processor),
    )


def processed_size(image_processor: Any) -> tuple[int, int]:
    """Return height and width of processed images. Raises ConfigurationError if they differ between images."""
    cropped = getattr(image_processor, "do_center_crop", False)
    size = getattr(image_processor, "crop_size" if cropped else "size", None)
    height, width = (None, None) if size is None else (size["height"], size["width"])
    if not height or not width:
        raise ConfigurationError(
            f"{type(image_processor).__name__} gives images of different sizes "
            f"({'crop_size' if cropped else 'size'}={size!r}), so the number of tokens of an image is unknown: set "
            "crop_size, or size with height and width"
        )
    return int(height), int(width)


def _patches(pixels: Tensor, patch_size: int) -> int:
    height, width = pixels.shape[-2:]
    return height // patch_size * (width // patch_size)
