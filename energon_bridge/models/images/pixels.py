"""The native path from images to the pixels of a model, instead of an image processor of transformers.

The attributes of a processor that scales, crops, pads, rescales and normalises are read once, and the same is computed
here: images are scaled as bytes, then one table look-up per byte rescales, normalises and lays out the values. This
covers plain processors (those of CLIP, SigLIP and many more), LLaVA's, LLaVA-NeXT's, which makes tiles, and those that
make patches: of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, and of SigLIP2. Any other processor, and any that overrides a
method, is called itself, which is logged once.

A profile chooses the values. `pillow`: those of transformers' processors based on Pillow, bit for bit. `torch`: those
of its processors based on torchvision, which scales bytes by torch's `interpolate` with antialiasing. The default is
the profile of the processor's own class.

Invariant: a value is a function of a byte and its channel, computed once for all 256 bytes by the operations of the
profile, in their order and precision. So float32 adds no rounding; bfloat16 and float16 are rounded from it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.models.images.images import Alpha, DeferredImage
from energon_bridge.models.images.resampling import (
    FILTERS,
    Filter,
    PixelLayout,
    bits_of,
    look_up,
    resample,
    resample_as_torch,
    values_in,
)
from energon_bridge.models.images.resize import best_resolution, fitted, smart_resize
from energon_bridge.models.images.visual import as_pil, as_rgb

logger = logging.getLogger(__name__)

Profile = Literal["torch", "pillow", "processor"]
PixelDtype = Literal["float32", "bfloat16", "float16", "uint8"]

_PLAIN = PixelLayout()
_TORCH_FILTERS = ("bilinear", "bicubic")
_BYTES = np.arange(256)

PixelSize = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """How LLaVA-NeXT cuts images into tiles.

    Attributes:
        resolutions: An image is fitted into the best of these, and padded with zeros.
        side: Side of a tile in pixels.
        overview: Size of the whole image, which comes before its tiles.
    """

    resolutions: tuple[PixelSize, ...]
    side: int
    overview: PixelSize


@dataclass(frozen=True, kw_only=True, slots=True)
class PixelPath:
    """The steps from an image to the pixels of a model.

    Attributes:
        profile: Which values to compute.
        kind: `plain` (channels, height, width), `tiles` of those, or patches of `qwen` or `siglip2`.
        dtype: Type of the values; uint8: not yet rescaled and normalised.
        table: The value of each byte in each channel, shape (3, 256), as bits if numpy lacks the type.
        norm: Mean and deviation of the channels in steps of a byte, float32 of shape (2, 3).
        sized: Returns the size to scale an image of a size to; None: no scaling.
        by: The filter for scaling.
        crop: The size of the centre crop.
        background: The colour that pads an image to a square before scaling; None: no padding.
        patch: Side of a patch.
        merge: Patches along each side of a group.
        times: Frames of a patch.
        alpha: What becomes of transparency: white, but for the key of an RGB image if the processor does not convert.
        most_patches: The number of patches that SigLIP2 pads to.
        tiles: How an image is cut into tiles.
    """

    profile: Literal["torch", "pillow"]
    kind: Literal["plain", "tiles", "qwen", "siglip2"] = "plain"
    dtype: torch.dtype
    table: np.ndarray = field(repr=False)
    norm: Tensor = field(repr=False)
    sized: Callable[[PixelSize], PixelSize] | None
    by: Filter
    crop: PixelSize | None = None
    background: tuple[int, int, int] | None = None
    patch: int = 0
    merge: int = 1
    times: int = 1
    alpha: Alpha = "white"
    most_patches: int = 0
    tiles: Tiles | None = None

    @property
    def byte_norm(self) -> Tensor | None:
        """The `norm` that batches of bytes carry along; None for other types."""
        return self.norm if self.dtype == torch.uint8 else None

    def image(self, image: Any, memory: np.ndarray | None = None) -> dict[str, Tensor]:
        """Return the processor's result for one image, decoded in any form that `as_pil` takes.

        `pixel_values` lie in `memory`, uint8 of shape (bytes,), if its size matches.
        """
        pixels = self.rgb(image)
        shape = self.shape((pixels.shape[0], pixels.shape[1]))
        out = _placed(shape, self.dtype, memory)
        if self.tiles is not None:
            return self._in_tiles(pixels, self.tiles, out)
        if self.background is not None:
            pixels = _squared(pixels, self.background)
        pixels = self.final(pixels)
        if self.kind == "siglip2":
            return self._siglip2(pixels, out)
        height, width, _ = pixels.shape
        if self.kind == "plain":
            look_up(pixels, self.table, _PLAIN, bits_of(out))
            return {"pixel_values": out}
        look_up(pixels, self.table, self._layout, bits_of(out))
        return {"pixel_values": out, "image_grid_thw": torch.tensor([self.grid(height, width)])}

    def shape(self, size: PixelSize) -> tuple[int, ...]:
        """Return the shape of the `pixel_values` of an image of a height and width."""
        if self.tiles is not None:
            room = best_resolution(size, self.tiles.resolutions)
            side = self.tiles.side
            parts = 1 + -(-room[0] // side) * -(-room[1] // side)
            return (1, parts, 3, *self._final(self.tiles.overview))
        if self.background is not None:
            size = (max(size),) * 2
        height, width = self._final(size)
        if self.kind == "siglip2":
            return 1, self.most_patches, 3 * self.patch**2
        if self.kind == "plain":
            return 1, 3, height, width
        return math.prod(self.grid(height, width)), self._patch_values

    def _final(self, size: PixelSize) -> PixelSize:
        """Return the size of an image after scaling and cropping."""
        return self.crop or (size if self.sized is None else self.sized(size))

    def deferred(self, image: DeferredImage) -> DeferredPixels:
        """Return an undecoded image that is decoded straight to pixels."""
        size = width, height = image.size
        num_bytes = math.prod(self.shape((height, width))) * self.dtype.itemsize
        return DeferredPixels(image.data, image.form, image.part, path=self, size=size, num_bytes=num_bytes)

    def final(self, pixels: np.ndarray) -> np.ndarray:
        """Scale and crop an image or tile to its final size, uint8 (height, width, 3) both."""
        if self.sized is not None:
            height, width, _ = pixels.shape
            pixels = self.scaled(pixels, self.sized((height, width)))
        return pixels if self.crop is None else _cropped(pixels, self.crop, floor=self.profile == "torch")

    def _in_tiles(self, pixels: np.ndarray, tiles: Tiles, out: Tensor) -> dict[str, Tensor]:
        """Return `pixel_values`, (1, 1 + tiles, 3, side, side), and `image_sizes`: the overview, then tiles row by row.

        As in LLaVA-NeXT's image processor, the overview is scaled from the original, not from the padded image.
        """
        size = (pixels.shape[0], pixels.shape[1])
        room = best_resolution(size, tiles.resolutions)
        side = tiles.side
        whole = _cropped(self.scaled(pixels, fitted(size, room)), room, floor=True)
        corners = ((y, x) for y in range(0, room[0], side) for x in range(0, room[1], side))
        parts = [self.scaled(pixels, tiles.overview), *(whole[y : y + side, x : x + side] for y, x in corners)]
        parts = [self.final(part) for part in parts]
        for part, values in zip(parts, out[0], strict=True):
            look_up(part, self.table, _PLAIN, bits_of(values))
        return {"pixel_values": out, "image_sizes": torch.tensor([size])}

    def rgb(self, image: Any) -> np.ndarray:
        """Return an image as bytes, uint8 (height, width, 3). Raises SampleError if it is not an image."""
        return as_rgb(image, self.alpha)

    def scaled(self, pixels: np.ndarray, size: PixelSize) -> np.ndarray:
        """Return an image in another size, uint8 (height, width, 3) both."""
        if pixels.shape[:2] == size:
            return pixels
        if self.profile == "pillow":
            return resample(pixels, size, self.by)
        return resample_as_torch(pixels, size, cast(Literal["bilinear", "bicubic"], self.by))

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Return the patches of an image along time, height and width."""
        return 1, height // self.patch, width // self.patch

    def patches(self, images: Sequence[np.ndarray]) -> Tensor:
        """Return the patches of images in their final sizes, one after the other: (patches, values of a patch)."""
        counts = [math.prod(self.grid(*image.shape[:2])) for image in images]
        out = torch.empty((sum(counts), self._patch_values), dtype=self.dtype)
        start = 0
        for image, count in zip(images, counts, strict=True):
            look_up(image, self.table, self._layout, bits_of(out[start : start + count]))
            start += count
        return out

    def video_shape(self, frames: int, size: PixelSize) -> tuple[int, int]:
        """Return the shape of the patches of a video whose frames are scaled to a size."""
        return -(-frames // self.times) * math.prod(self.grid(*size)), self._patch_values

    def video(self, scaled: list[np.ndarray], size: PixelSize, memory: np.ndarray | None = None) -> Tensor:
        """Return the patches of a video with its frames scaled to a size; a patch spans `times` frames.

        The last frame is repeated to fill its patch. `memory` is as for `image`.
        """
        scaled = scaled + scaled[-1:] * (-len(scaled) % self.times)
        out = _placed(self.video_shape(len(scaled), size), self.dtype, memory)
        count = math.prod(self.grid(*size))
        for step in range(len(scaled) // self.times):
            clip = np.stack(scaled[step * self.times : (step + 1) * self.times])
            look_up(clip, self.table, self._layout, bits_of(out[step * count : (step + 1) * count]))
        return out

    @property
    def _patch_values(self) -> int:
        return 3 * self.times * self.patch**2

    @property
    def _layout(self) -> PixelLayout:
        return PixelLayout(patch=(self.patch, self.patch), merge=self.merge, times=self.times)

    def _siglip2(self, pixels: np.ndarray, out: Tensor) -> dict[str, Tensor]:
        side = self.patch
        rows = pixels.shape[0] // side
        columns = pixels.shape[1] // side
        values = torch.empty((3, rows, side, columns, side), dtype=self.dtype)
        look_up(pixels, self.table, _PLAIN, bits_of(values))
        out[0, rows * columns :] = 0
        out[0, : rows * columns] = values.permute(1, 3, 2, 4, 0).reshape(rows * columns, -1)
        mask = torch.zeros((1, self.most_patches), dtype=torch.int32)
        mask[0, : rows * columns] = 1
        shapes = torch.tensor([[rows, columns]])
        return {"pixel_values": out, "pixel_attention_mask": mask, "spatial_shapes": shapes}


@dataclass(frozen=True, slots=True, repr=False)
class DeferredPixels(DeferredImage):
    """An image to be decoded straight to the model's pixels.

    Attributes:
        path: Makes the pixels.
        size: Width and height in pixels.
        num_bytes: Bytes of its `pixel_values`.
    """

    path: PixelPath = field(kw_only=True)
    size: tuple[int, int] = field(kw_only=True)
    num_bytes: int = field(kw_only=True)

    def decoded(self, memory: np.ndarray | None = None) -> MadePixels:
        """Return the pixels. Raises DecodeError."""
        return MadePixels(self.path.image(self.get(), memory))


@dataclass(frozen=True, slots=True)
class MadePixels:
    """The processor's result for an image or video, in place of the image or video itself."""

    visual: dict[str, Tensor]


def _placed(shape: tuple[int, ...], dtype: torch.dtype, memory: np.ndarray | None) -> Tensor:
    """Return an uninitialised tensor, in the given memory if its size matches."""
    if memory is None or memory.nbytes != math.prod(shape) * dtype.itemsize:
        return torch.empty(shape, dtype=dtype)
    return values_in(memory, shape, dtype)


def pixel_path(image_processor: Any, profile: Profile | None = None, dtype: PixelDtype = "float32") -> PixelPath | None:
    """Return the native path of an image processor; None if the processor itself must be called.

    Args:
        image_processor: An image processor of transformers, or one with the same interface.
        profile: Which values to compute; `processor`: call the processor. None: the profile of its class.
        dtype: Type of the values; uint8: bytes, for `normalise_on_device`.

    Raises:
        ConfigurationError: There is no such profile or type, or `dtype` is uint8 and there is no native path.
    """
    if profile is not None and profile not in get_args(Profile):
        raise ConfigurationError(f"pixels must be one of {', '.join(get_args(Profile))}, or None, got {profile!r}")
    if dtype not in get_args(PixelDtype):
        raise ConfigurationError(f"pixels_dtype must be one of {', '.join(get_args(PixelDtype))}, got {dtype!r}")
    path: PixelPath | str = "pixels='processor'"
    if image_processor is not None and profile != "processor":
        path = _read(image_processor, profile, dtype)
    if isinstance(path, PixelPath):
        return path
    if dtype == "uint8":
        raise ConfigurationError(
            f"pixels_dtype='uint8' is not available for {type(image_processor).__name__}, which must be called itself: "
            f"{path}; set pixels_dtype to 'float32', 'bfloat16' or 'float16'"
        )
    if image_processor is not None and profile != "processor":
        _say_called(type(image_processor).__name__, path)
    return None


def process_image(
    image_processor: Any, image: Any, path: PixelPath | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return the tensors of an image, from the native path or from the processor."""
    if isinstance(image, MadePixels):
        return image.visual
    if path is not None:
        return path.image(image)
    image = as_pil(image, alpha_for(image_processor, None))
    output: Mapping[str, Any] = image_processor(images=[image], return_tensors="pt")
    return in_dtype({name: value for name, value in output.items() if isinstance(value, Tensor)}, dtype)


def alpha_for(image_processor: Any, path: PixelPath | None) -> Alpha:
    """Return what becomes of transparency in images that a processor is called with, or that the native path gets.

    A processor that converts images to RGB does so with transparency by its own rule, which the native path computes,
    too. One that does not would fail on an alpha channel, so it gets white behind it.
    """
    if path is not None:
        return path.alpha
    return "keep" if getattr(image_processor, "do_convert_rgb", False) else "white, no key"


def in_dtype(visual: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Convert the pixels in a processor's result to another type."""
    if dtype is torch.float32:
        return dict(visual)
    return {
        name: value.to(dtype) if name.startswith("pixel_values") and value.is_floating_point() else value
        for name, value in visual.items()
    }


def pixel_settings(image_processor: Any, path: PixelPath | None, dtype: PixelDtype) -> dict[str, str]:
    """Return the settings of pixels for the state of a run; empty for Pillow's in float32."""
    if image_processor is None:
        return {}
    profile = profile_of(image_processor) if path is None else path.profile
    settings = {"pixels": profile} if profile != "pillow" else {}
    return settings | ({"pixels_dtype": dtype} if dtype != "float32" else {})


@cache
def _say_called(name: str, reason: str) -> None:
    logger.info("calling %s for images, which takes several times the CPU of the native path: %s", name, reason)


def profile_of(image_processor: Any) -> Literal["torch", "pillow"]:
    """Return the profile of a processor of transformers: based on torchvision or on Pillow."""
    names = [kind.__name__ for kind in type(image_processor).__mro__]
    return "torch" if "TorchvisionBackend" in names or "BaseImageProcessorFast" in names else "pillow"


_MODELS = "transformers.models."
_HOMES: Mapping[str, str] = MappingProxyType(
    {
        "transformers.image_processing_backends.PilBackend": "plain",
        "transformers.image_processing_backends.TorchvisionBackend": "plain",
        f"{_MODELS}llava.image_processing_pil_llava.LlavaImageProcessorPil": "llava",
        f"{_MODELS}llava.image_processing_llava.LlavaImageProcessor": "llava",
        f"{_MODELS}llava_next.image_processing_pil_llava_next.LlavaNextImageProcessorPil": "tiles",
        f"{_MODELS}llava_next.image_processing_llava_next.LlavaNextImageProcessor": "tiles",
        f"{_MODELS}qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil": "qwen",
        f"{_MODELS}qwen2_vl.image_processing_qwen2_vl.Qwen2VLImageProcessor": "qwen",
        f"{_MODELS}siglip2.image_processing_pil_siglip2.Siglip2ImageProcessorPil": "siglip2",
        f"{_MODELS}siglip2.image_processing_siglip2.Siglip2ImageProcessor": "siglip2",
    }
)
"""The classes with known methods, and their kind; subclasses may set attributes."""


def _home_of(image_processor: Any) -> tuple[str, str]:
    """Return the kind of a processor, or "" and the reason why it is unknown."""
    kinds = type(image_processor).__mro__
    place = next((i for i, kind in enumerate(kinds) if f"{kind.__module__}.{kind.__qualname__}" in _HOMES), None)
    if place is None:
        return "", "its class is not a known one of transformers"
    home = kinds[place]
    own: list[tuple[str, Any]] = [entry for kind in kinds[:place] for entry in vars(kind).items()]
    own += vars(image_processor).items()
    for name, value in own:
        method = callable(value) or isinstance(value, property | staticmethod | classmethod)
        if method and name not in _NO_MATTER and callable(getattr(home, name, None)):
            return "", f"it overrides {name}"
    return _HOMES[f"{home.__module__}.{home.__qualname__}"], ""


_NO_MATTER = frozenset({"__init__", "to_dict", "__repr__", "valid_kwargs", "get_number_of_image_patches"})


def _read(processor: Any, profile: str | None, dtype: PixelDtype) -> PixelPath | str:
    """Return the native path of a processor, or the reason why there is none."""
    kind, reason = _home_of(processor)
    if not kind:
        return reason
    whose: Literal["torch", "pillow"] = (
        profile_of(processor) if profile is None else cast(Literal["torch", "pillow"], profile)
    )

    has = partial(_has, processor)
    by = _filter_of(has("resample"))
    if by is None or (whose == "torch" and by not in _TORCH_FILTERS):
        return f"it scales by resample={has('resample')!r}"
    if (unlike := _unlike_all(kind, processor)) is not None:
        return unlike
    try:
        values, norm = _values_of(processor, whose)
    except (TypeError, ValueError):
        return f"its mean {has('image_mean')!r} or deviation {has('image_std')!r} do not have three channels"
    sized = _sized_of(kind, processor) if has("do_resize") else None
    tiles = _tiles_of(processor) if kind == "tiles" else None
    crop = _crop_of(kind, processor)
    if (odd := _odd_sizes(kind, processor, dtype, sized, tiles, crop)) is not None:
        return odd
    made: torch.dtype = getattr(torch, dtype)
    table = np.tile(_BYTES.astype(np.uint8), (3, 1)) if dtype == "uint8" else bits_of(torch.from_numpy(values).to(made))
    return PixelPath(
        profile=whose,
        kind="plain" if kind == "llava" else cast(Any, kind),
        dtype=made,
        table=np.ascontiguousarray(table),
        norm=norm,
        sized=sized,
        by=by,
        crop=crop,
        background=_background_of(processor) if kind == "llava" else None,
        alpha="white" if has("do_convert_rgb") else "white, no key",
        patch=int(has("patch_size") or 0) if kind in ("qwen", "siglip2") else 0,
        merge=int(has("merge_size")) if kind == "qwen" else 1,
        times=int(has("temporal_patch_size")) if kind == "qwen" else 1,
        most_patches=int(has("max_num_patches")) if kind == "siglip2" else 0,
        tiles=tiles,
    )


def _has(processor: Any, name: str) -> Any:
    return getattr(processor, name, None)


def _background_of(processor: Any) -> tuple[int, int, int] | None:
    """Return the colour with which a processor of LLaVA pads images to a square, if it does."""
    if not _has(processor, "do_pad"):
        return None
    colours = [int(one * 255) for one in _three(_has(processor, "image_mean"))]
    return colours[0], colours[1], colours[2]


def _unlike_all(kind: str, processor: Any) -> str | None:
    """Return what a processor does to images that no native path does, None if nothing."""
    if not _has(processor, "do_normalize") and not _has(processor, "do_rescale"):
        return "it neither rescales nor normalises"
    if _has(processor, "do_pad") and kind not in ("llava", "tiles"):
        return "it pads"
    return None


def _crop_of(kind: str, processor: Any) -> tuple[int, int] | None:
    """Return height and width to which a processor crops images, 0 for what it does not say; None: it does not crop."""
    if kind not in ("plain", "llava", "tiles") or not _has(processor, "do_center_crop"):
        return None
    height, width = _sides(_has(processor, "crop_size"), "height", "width")
    return height or 0, width or 0


def _odd_sizes(
    kind: str,
    processor: Any,
    dtype: PixelDtype,
    sized: Callable[[PixelSize], PixelSize] | None,
    tiles: Any,
    crop: tuple[int, int] | None,
) -> str | None:
    """Return why there is no native path for the sizes of a processor's images, None if there is one."""
    size = _has(processor, "size")
    crop_size = _has(processor, "crop_size")
    resizes = _has(processor, "do_resize")
    if resizes and sized is None:
        return f"its size is {size!r}"
    fixed = _has(processor, "do_center_crop") or (resizes and _sides(size, "height")[0])
    if dtype == "uint8" and (kind == "tiles" or (kind in ("plain", "llava") and not fixed)):
        return "its images have different sizes and are padded with zeros after normalising"
    if crop is not None and not all(crop):
        return f"its crop_size is {crop_size!r}"
    if kind == "tiles" and (tiles is None or not fixed):
        return f"its tiles have different sizes: size={size!r}, crop_size={crop_size!r}"
    return None


def _tiles_of(processor: Any) -> Tiles | None:
    """Return the tiles of a processor of LLaVA-NeXT; None if they are unknown."""
    shortest, height, width = _sides(processor.size, "shortest_edge", "height", "width")
    overview = (height, width) if height and width else (shortest, shortest)
    side = _sides(processor.crop_size, "height")[0] or height or shortest
    resolutions = tuple((int(rows), int(columns)) for rows, columns in processor.image_grid_pinpoints)
    if not overview[0] or not overview[1] or not side or not resolutions:
        return None
    return Tiles(resolutions=resolutions, side=side, overview=(overview[0], overview[1]))


def _filter_of(value: Any) -> Filter | None:
    try:
        name = Image.Resampling(int(value)).name.lower()
    except (TypeError, ValueError):
        return None
    return cast(Filter, name) if name in FILTERS else None


def _sides(size: Any, *names: str) -> tuple[int | None, ...]:
    sides = (size.get(name) if isinstance(size, Mapping) else getattr(size, name, None) for name in names)
    return tuple(None if side is None else int(side) for side in sides)


def _sized_of(kind: str, processor: Any) -> Callable[[PixelSize], PixelSize] | None:
    """Return the function from an image's size to its scaled size; None if it is unknown."""
    if kind == "siglip2":
        return partial(_within, int(processor.patch_size), int(processor.max_num_patches))
    shortest, longest, height, width = _sides(processor.size, "shortest_edge", "longest_edge", "height", "width")
    if kind == "qwen":
        if not shortest or not longest:
            return None
        factor = int(processor.patch_size) * int(processor.merge_size)
        return partial(_smart, factor, (shortest, longest))
    if shortest and not longest:
        return partial(_shortest, shortest)
    if height and width and not shortest and not longest:
        return partial(_always, (height, width))
    return None


def _always(wanted: PixelSize, size: PixelSize) -> PixelSize:
    return wanted


def _smart(factor: int, area: tuple[int, int], size: PixelSize) -> PixelSize:
    return smart_resize(*size, factor=factor, area=area)


def _shortest(wanted: int, size: PixelSize) -> PixelSize:
    """Return the size with the shorter side as wanted. Source: `get_resize_output_image_size` of transformers."""
    height, width = size
    short, long = (width, height) if width <= height else (height, width)
    other = int(wanted * long / short)
    return (other, wanted) if width <= height else (wanted, other)


@lru_cache(maxsize=1024)
def _within(patch: int, most: int, size: PixelSize) -> PixelSize:
    """Return the largest size in whole patches, at most `most` of them. Source: transformers' SigLIP2."""

    def side(scale: float, length: int) -> int:
        return max(patch, math.ceil(length * scale / patch) * patch)

    low = 1e-6
    high = 100.0
    while high - low >= 1e-5:
        middle = (low + high) / 2
        if side(middle, size[0]) / patch * (side(middle, size[1]) / patch) <= most:
            low = middle
        else:
            high = middle
    return side(low, size[0]), side(low, size[1])


def _three(value: Any) -> list[float]:
    values = [float(value)] * 3 if isinstance(value, int | float) else [float(one) for one in value]
    if len(values) != 3:
        raise ValueError(values)
    return values


def _values_of(processor: Any, profile: str) -> tuple[np.ndarray, Tensor]:
    """Return the value of each byte in each channel, float32 (3, 256), and mean and deviation in steps of a byte."""
    rescales = bool(processor.do_rescale)
    normalises = bool(processor.do_normalize)
    scale = float(processor.rescale_factor) if rescales else 1.0
    mean = _three(processor.image_mean) if normalises else [0.0] * 3
    std = _three(processor.image_std) if normalises else [1.0] * 3
    norm = torch.tensor([mean, std], dtype=torch.float64) / scale
    if profile == "pillow":
        # numpy rescales bytes in float64, and the processor casts that to float32 before it normalises.
        scaled = (_BYTES.astype(np.float64) * scale).astype(np.float32)
        values = np.stack([scaled] * 3)
        if normalises:
            values = (values - np.array(mean, np.float32)[:, None]) / np.array(std, np.float32)[:, None]
        return values, norm.float()
    whole = torch.arange(256, dtype=torch.float32).repeat(3, 1)
    if normalises:
        # As transformers' fast processors do: rescaling is folded into mean and deviation, which rounds differently.
        by = 1.0 / scale if rescales else 1.0
        whole = whole.sub(torch.tensor(mean).mul(by)[:, None]).div(torch.tensor(std).mul(by)[:, None])
    else:
        whole = torch.arange(256, dtype=torch.uint8).repeat(3, 1) * scale
    return whole.numpy(), norm.float()


def _squared(pixels: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    height, width, _ = pixels.shape
    if height == width:
        return pixels
    side = max(height, width)
    out = np.empty((side, side, 3), np.uint8)
    out[:] = colour
    top = (side - height) // 2
    left = (side - width) // 2
    out[top : top + height, left : left + width] = pixels
    return out


def _cropped(pixels: np.ndarray, size: PixelSize, *, floor: bool) -> np.ndarray:
    """Crop the centre to a size, padding with black. `floor`: round the offset down if the difference is odd."""
    height, width, _ = pixels.shape
    if height < size[0] or width < size[1]:
        missing = max(0, size[0] - height), max(0, size[1] - width)
        top, left = (one // 2 if floor else -(-one // 2) for one in missing)
        whole = np.zeros((height + missing[0], width + missing[1], 3), np.uint8)
        whole[top : top + height, left : left + width] = pixels
        pixels, (height, width) = whole, whole.shape[:2]
    top = (height - size[0]) // 2
    left = (width - size[1]) // 2
    return pixels[top : top + size[0], left : left + size[1]]
