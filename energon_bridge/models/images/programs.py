"""A pixel program: what an image processor does to an image of a size, as data, and its run.

    DrawnImage    an image of a size, and the step by which it is made of another: scaled, on a canvas, or cut out
    PatchedImage       a picture whose values are laid out, whole or in patches
    Output     parts one after the other: a tensor of the processor's result
    Drawing    all outputs of an image of one size, and what else the processor returns (sizes, masks, counts)

`known_programs.py` draws for each class of processors; the processor's attributes give the numbers. A drawing is made
once for a size. Running it takes a pass of C for each step and part, straight into the memory of the batch.

Invariant: a value is a function of a byte and its channel, computed once for all 256 bytes by the operations of the
profile, in their order and precision. So float32 adds no rounding; bfloat16 and float16 are rounded from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from energon_bridge.core.samples.stacking import concat_pad
from energon_bridge.models.images.images import Alpha
from energon_bridge.models.images.resampling import (
    Filter,
    PixelLayout,
    bits_of,
    look_up,
    resample,
    resample_as_torch,
    values_in,
)
from energon_bridge.models.images.visual import as_rgb

PixelSize = tuple[int, int]
"""Height and width."""
Colour = tuple[int, int, int]

_BLACK = (0, 0, 0)
_MOST_DRAWINGS = 4096


class UndrawnError(Exception):
    """A program cannot do what its processor does, which then is called; the message is a phrase with the reason."""


@dataclass(frozen=True, slots=True, eq=False)
class DrawnImage:
    """An image of a height and width, uint8 (height, width, 3), and how it is made.

    Attributes:
        size: Height and width.
        of: The picture that it is made of; None: it is the decoded image.
        step: What is done to that.
        at: Where that lies on the canvas, or what is cut out of it: row and column.
        colour: The colour of the canvas.
        by: The filter for scaling; None: the program's.
        smooth: Whether scaling down takes all pixels into account.
    """

    size: PixelSize
    of: DrawnImage | None = None
    step: Literal["scaled", "canvas", "cut"] = "scaled"
    at: PixelSize = (0, 0)
    colour: Colour = _BLACK
    by: Filter | None = None
    smooth: bool = True

    def scaled(self, size: PixelSize, by: Filter | None = None, *, smooth: bool = True) -> DrawnImage:
        """Return this picture in another size. Raises ValueError for one without pixels."""
        size = (int(size[0]), int(size[1]))
        if min(size) < 1:
            raise ValueError(f"an image of {self.size} (height and width) cannot be scaled to {size}")
        return self if size == self.size else DrawnImage(size, self, by=by, smooth=smooth)

    def on_canvas(self, size: PixelSize, at: PixelSize = (0, 0), colour: Colour = _BLACK) -> DrawnImage:
        """Return a canvas of a size with this picture on it. Raises ValueError if it is too small."""
        if size[0] < at[0] + self.size[0] or size[1] < at[1] + self.size[1]:
            raise ValueError(f"an image of {self.size} (height and width) does not fit on {size} at {at}")
        return self if size == self.size else DrawnImage(size, self, "canvas", at, colour)

    def centred(self, size: PixelSize, colour: Colour = _BLACK) -> DrawnImage:
        """Return a canvas with this picture in the middle, rounded to the upper left."""
        return self.on_canvas(size, ((size[0] - self.size[0]) // 2, (size[1] - self.size[1]) // 2), colour)

    def squared(self, colour: Colour) -> DrawnImage:
        """Return a square canvas with this picture in the middle."""
        return self.centred((max(self.size),) * 2, colour)

    def cut(self, at: PixelSize, size: PixelSize) -> DrawnImage:
        """Return what lies at a row and column, as much as there is of the size."""
        size = (min(size[0], self.size[0] - at[0]), min(size[1], self.size[1] - at[1]))
        return self if size == self.size else DrawnImage(size, self, "cut", at)

    def cropped(self, size: PixelSize, *, floor: bool) -> DrawnImage:
        """Return the centre, on black where it is too small. `floor`: round the padding down before, not up."""
        (height, width), (rows, columns) = self.size, size
        missing = max(0, rows - height), max(0, columns - width)
        top, left = (one // 2 if floor else -(-one // 2) for one in missing)
        whole = self.on_canvas((height + missing[0], width + missing[1]), (top, left))
        return whole.cut(((whole.size[0] - rows) // 2, (whole.size[1] - columns) // 2), size)

    def tiles(self, size: PixelSize) -> list[DrawnImage]:
        """Return the tiles of a size, row by row; the last ones may be smaller."""
        corners = ((y, x) for y in range(0, self.size[0], size[0]) for x in range(0, self.size[1], size[1]))
        return [self.cut(corner, size) for corner in corners]


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchedImage:
    """A picture whose values are laid out in patches; see `PixelLayout`.

    Attributes:
        picture: The picture.
        patch: Height and width of a patch; None: the whole picture is one.
        merge: Patches along each side of a group, which are adjacent.
        times: Frames of a patch, in each of which the image is repeated.
        order: Whether a patch has channel by channel (in a channel, frame by frame), pixel by pixel, or frame by frame.
        floats_to: Scale the values, not the bytes, to this size, by torch without antialiasing.
    """

    picture: DrawnImage
    patch: PixelSize | None = None
    merge: int = 1
    times: int = 1
    order: Literal["channels", "pixels", "frames"] = "channels"
    floats_to: PixelSize | None = None

    @property
    def count(self) -> int:
        """Number of patches. Raises ValueError if they do not cover the picture."""
        patch, size = self.patch or self.picture.size, self.picture.size
        if any(side % (one * (self.merge if self.patch else 1)) for side, one in zip(size, patch, strict=True)):
            raise ValueError(f"an image of {size} (height and width) has no whole number of patches of {patch}")
        return size[0] // patch[0] * (size[1] // patch[1])


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor of pixels.

    Attributes:
        parts: What it consists of, one after the other.
        item: The shape of a patch.
        lead: Lengths of axes before that of the patches.
        room: The number of patches, with zeros behind those that are there; None: as many as are there.
        each: The same for each part, which then is one of an axis.
    """

    parts: Sequence[PatchedImage]
    item: tuple[int, ...]
    lead: tuple[int, ...] = ()
    room: int | None = None
    each: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor. Raises ValueError if its patches do not fit the room."""
        counts = [part.count for part in self.parts]
        most, count = (self.room, sum(counts)) if self.each is None else (self.each, max(counts))
        if most is not None and count > most:
            raise ValueError(f"{count} patches do not fit the {most} of the processor")
        parts = () if self.each is None else (len(counts),)
        return (*self.lead, *parts, count if most is None else most, *self.item)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """What becomes of an image of a size.

    Attributes:
        pixels: The tensors of pixels by name; the first one may lie in given memory.
        facts: What else is returned: a list or number (which becomes a tensor), a tuple of lists (which stay lists), a
            function that makes a tensor, or a `Count`, the number of images in the call.
        axis: Along which several images are joined.
        padded: Whether images of different shapes are padded with zeros to be joined; else, they cannot be.
        single: Whether nothing is known of several images in a call.
    """

    pixels: Mapping[str, Output]
    facts: Mapping[str, Any] = field(default_factory=dict)
    axis: int = 0
    padded: bool = False
    single: bool = False


class Count:
    """Stands for the number of images in each sample of a call."""


class Settings:
    """The attributes of an image processor, None where it has none, and how it is used.

    Attributes:
        profile: Whether values and crops are Pillow's or torch's.
        alone: Whether an image is the only one of its sample.
    """

    def __init__(self, processor: Any, profile: Literal["torch", "pillow"], *, alone: bool = True) -> None:
        self.processor = processor
        self.profile = profile
        self.alone = alone

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "processor":
            raise AttributeError(name)
        return getattr(self.processor, name, None)

    @property
    def floor(self) -> bool:
        """How crops are rounded, see `DrawnImage.cropped`."""
        return self.profile == "torch"

    def side(self, *names: str, of: str = "size") -> tuple[int, ...]:
        """Return entries of a size of the processor, 0 for those that it does not have."""
        size = getattr(self, of)
        found = (size.get(name) if isinstance(size, Mapping) else getattr(size, name, None) for name in names)
        return tuple(int(one or 0) for one in found)

    def box(self, of: str = "size") -> PixelSize:
        """Return height and width. Raises UndrawnError if the size has none."""
        height, width = self.side("height", "width", of=of)
        if not height or not width:
            raise UndrawnError(f"its {of} is {getattr(self, of)!r}")
        return height, width


Draw = Callable[[Settings, DrawnImage], Drawing]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Program:
    """The program of a processor.

    Attributes:
        draw: Draws an image.
        settings: Its numbers.
        profile: Which values to compute.
        dtype: Type of the values; uint8: not yet rescaled and normalised.
        table: The value of each byte in each channel, shape (3, 256), as bits if numpy lacks the type.
        norm: Mean and deviation of the channels in steps of a byte, float32 of shape (2, 3).
        by: The filter for scaling.
        alpha: What becomes of transparency: white, but for the key of an RGB image if the processor does not convert.
    """

    draw: Draw
    settings: Settings
    profile: Literal["torch", "pillow"]
    dtype: torch.dtype
    table: np.ndarray = field(repr=False)
    norm: Tensor = field(repr=False)
    by: Filter
    alpha: Alpha = "white"
    drawings: dict[Any, Drawing] = field(default_factory=dict, repr=False)

    @property
    def byte_norm(self) -> Tensor | None:
        """The `norm` that batches of bytes carry along; None for other types."""
        return self.norm if self.dtype == torch.uint8 else None

    def drawing(self, size: PixelSize, *, alone: bool = True) -> Drawing:
        """Return what becomes of an image of a height and width. Raises UndrawnError if only the processor knows."""
        found = self.drawings.get((size, alone))
        if found is None:
            settings = self.settings if alone else Settings(self.settings.processor, self.profile, alone=False)
            try:
                found = self.draw(settings, DrawnImage(size))
                for output in found.pixels.values():
                    _ = output.shape
            except UndrawnError:
                raise
            except Exception as error:  # whatever the processor's functions raise: it will say so itself
                raise UndrawnError(f"{type(error).__name__}: {error}") from error
            if len(self.drawings) >= _MOST_DRAWINGS:
                self.drawings.clear()
            self.drawings[size, alone] = found
        return found

    def shape(self, size: PixelSize) -> tuple[int, ...]:
        """Return the shape of the first pixels of an image of a height and width."""
        return next(iter(self.drawing(size).pixels.values())).shape

    def rgb(self, image: Any) -> np.ndarray:
        """Return an image as bytes, uint8 (height, width, 3). Raises SampleError if it is not an image."""
        return as_rgb(image, self.alpha)

    def image(self, image: Any, memory: np.ndarray | None = None) -> dict[str, Any]:
        """Return the processor's result for one image, decoded in any form that `as_pil` takes.

        The first pixels lie in `memory`, uint8 of shape (bytes,), if its size matches.
        """
        pixels = self.rgb(image)
        drawing = self.drawing(pixels.shape[:2])
        made: dict[int, np.ndarray] = {}
        result: dict[str, Any] = {}
        for name, output in drawing.pixels.items():
            result[name] = _placed(output.shape, self.dtype, memory)
            self._write(output, pixels, made, result[name])
            memory = None
        return result | {name: _fact(value, [1]) for name, value in drawing.facts.items()}

    def images(self, images: Sequence[Any], *, alone: bool = True) -> dict[str, Any]:
        """Return the processor's result for all images of a call, `alone`: each the only one of its sample.

        Raises:
            UndrawnError: They cannot be joined.
        """
        counts = [1] * len(images) if alone else [len(images)]
        decoded = [self.rgb(image) for image in images]
        drawings = [self.drawing(pixels.shape[:2], alone=alone) for pixels in decoded]
        if drawings[0].single and len(images) > 1:
            raise UndrawnError("several images of a call are not independent")
        made: list[dict[int, np.ndarray]] = [{} for _ in images]
        axis = drawings[0].axis
        result: dict[str, Any] = {}
        for name in dict.fromkeys(name for drawing in drawings for name in drawing.pixels):
            outputs = [drawing.pixels.get(name) for drawing in drawings]
            shapes = [output.shape for output in outputs if output is not None]
            if axis == 0 and len({shape[1:] for shape in shapes}) == 1:  # all in one tensor at once
                result[name] = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=self.dtype)
                pieces = list(result[name].split([shape[0] for shape in shapes]))
            else:
                pieces = [torch.empty(shape, dtype=self.dtype) for shape in shapes]
            values = iter(pieces)
            for output, pixels, of_image in zip(outputs, decoded, made, strict=True):
                if output is not None:
                    self._write(output, pixels, of_image, next(values))
            if name not in result:
                result[name] = _joined(pieces, axis, padded=drawings[0].padded)
        for name in dict.fromkeys(name for drawing in drawings for name in drawing.facts):
            facts = [_fact(drawing.facts[name], counts) for drawing in drawings if name in drawing.facts]
            count = isinstance(drawings[0].facts.get(name), Count)
            result[name] = facts[0] if count else _joined(facts, axis, padded=drawings[0].padded)
        return result

    def _write(self, output: Output, pixels: np.ndarray, made: dict[int, np.ndarray], values: Tensor) -> None:
        """Write the values of an output."""
        flat = bits_of(values.view(-1))
        each = math.prod(output.item)
        start = 0
        for part in output.parts:
            end = start + part.count * each
            if part.floats_to is not None:
                values.view(-1)[start:end] = self._as_floats(part, self._made(part.picture, pixels, made)).view(-1)
            else:
                self._lay_out(part, self._made(part.picture, pixels, made), flat[start:end])
            start = end
            if output.each is not None:
                start += (output.each - part.count) * each
                flat[end:start] = 0
        flat[start:] = 0

    def _lay_out(self, part: PatchedImage, pixels: np.ndarray, flat: np.ndarray) -> None:
        if part.order != "frames" or part.times == 1:
            order: Any = "pixels" if part.order == "pixels" else "channels"
            layout = PixelLayout(patch=part.patch, merge=part.merge, times=part.times, order=order)
            look_up(pixels, self.table, layout, flat)
            return
        once = np.empty(flat.size // part.times, flat.dtype)
        look_up(pixels, self.table, PixelLayout(patch=part.patch, merge=part.merge), once)
        flat.reshape(part.count, part.times, -1)[:] = once.reshape(part.count, 1, -1)

    def _as_floats(self, part: PatchedImage, pixels: np.ndarray) -> Tensor:
        """Return values that are scaled as such, (1, 3, height, width)."""
        values = torch.empty((1, 3, *part.picture.size), dtype=self.dtype)
        look_up(pixels, self.table, PixelLayout(), bits_of(values.view(-1)))
        size = cast(PixelSize, part.floats_to)
        return torch.nn.functional.interpolate(values.float(), list(size), mode=self.by, antialias=False)

    def _made(self, picture: DrawnImage, image: np.ndarray, made: dict[int, np.ndarray]) -> np.ndarray:
        """Return a picture of an image, uint8 (height, width, 3); those that are there already are in `made`."""
        if picture.of is None:
            return image
        pixels = made.get(id(picture))
        if pixels is None:
            pixels = made[id(picture)] = self._step(picture, self._made(picture.of, image, made))
        return pixels

    def _step(self, picture: DrawnImage, pixels: np.ndarray) -> np.ndarray:
        top, left = picture.at
        if picture.step == "cut":
            return pixels[top : top + picture.size[0], left : left + picture.size[1]]
        if picture.step == "canvas":
            out = np.empty((*picture.size, 3), np.uint8)
            out[:] = picture.colour
            out[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels
            return out
        return self.scaled(pixels, picture.size, picture.by, smooth=picture.smooth)

    def scaled(
        self, pixels: np.ndarray, size: PixelSize, by: Filter | None = None, *, smooth: bool = True
    ) -> np.ndarray:
        """Return an image in another size, uint8 (height, width, 3) both."""
        if pixels.shape[:2] == size:
            return pixels
        by = by or self.by
        if not smooth:
            floats = torch.from_numpy(pixels).permute(2, 0, 1)[None].float()
            scaled = torch.nn.functional.interpolate(floats, list(size), mode=by, antialias=False)
            return np.ascontiguousarray(scaled[0].round().clamp(0, 255).byte().permute(1, 2, 0).numpy())
        if self.profile == "pillow":
            return resample(pixels, size, by)
        return resample_as_torch(pixels, size, by)

    # Frames of videos as patches, for families whose images are patches of `patch_size`, `merge_size` and
    # `temporal_patch_size`.

    def video_shape(self, frames: int, size: PixelSize) -> tuple[int, int]:
        """Return the shape of the patches of a video whose frames are scaled to a size."""
        side, times = int(self.settings.patch_size), int(self.settings.temporal_patch_size)
        return -(-frames // times) * (size[0] // side) * (size[1] // side), 3 * times * side**2

    def video(self, scaled: list[np.ndarray], size: PixelSize, memory: np.ndarray | None = None) -> Tensor:
        """Return the patches of a video with its frames scaled to a size; the last frame fills up its patch.

        `memory` is as for `image`.
        """
        side, times = int(self.settings.patch_size), int(self.settings.temporal_patch_size)
        layout = PixelLayout(patch=(side, side), merge=int(self.settings.merge_size), times=times)
        scaled = scaled + scaled[-1:] * (-len(scaled) % times)
        out = _placed(self.video_shape(len(scaled), size), self.dtype, memory)
        steps = len(scaled) // times
        for step, values in enumerate(out.split(len(out) // steps)):
            look_up(np.stack(scaled[step * times : (step + 1) * times]), self.table, layout, bits_of(values))
        return out


def _placed(shape: tuple[int, ...], dtype: torch.dtype, memory: np.ndarray | None) -> Tensor:
    """Return an uninitialised tensor, in the given memory if its size matches."""
    if memory is None or memory.nbytes != math.prod(shape) * dtype.itemsize:
        return torch.empty(shape, dtype=dtype)
    return values_in(memory, shape, dtype)


def _fact(value: Any, counts: list[int]) -> Any:
    if isinstance(value, tuple):
        return [list(one) for one in value]
    if isinstance(value, Count):
        return torch.tensor(counts)
    return value() if callable(value) else torch.tensor(value)


def _joined(values: Sequence[Any], axis: int, *, padded: bool) -> Any:
    """Join the results of several images. Raises UndrawnError if their shapes differ and they are not padded."""
    first = values[0]
    if isinstance(first, list):
        return [[entry for one in values for entry in one[0]]]
    if first.ndim == 0:
        return torch.stack(list(values)).max()
    shapes = {(*one.shape[:axis], *one.shape[axis + 1 :]) for one in values}
    if len(shapes) == 1:
        return first if len(values) == 1 else torch.cat(list(values), axis)
    if not padded:
        raise UndrawnError(f"images of shapes {sorted(shapes)} are not joined")
    return concat_pad([one.transpose(0, axis) for one in values]).transpose(0, axis).contiguous()
