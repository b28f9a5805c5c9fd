"""An image processor of transformers whose pixels its program makes: handed to a model's processor in place of its own.

The model's processor asks it as before: for attributes, numbers of patches, and what it returns beside pixels, so the
text of an image stays the processor's. Arguments of a call are attributes of the program; those of which there is no
program, and images that it does not draw, go to the image processor itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from energon_bridge.core.errors import SampleError
from energon_bridge.models.images.pixels import MadePixels, PixelDtype, Profile, alpha_for, program_of, say_called
from energon_bridge.models.images.programs import Program, UndrawnError
from energon_bridge.models.images.visual import as_pil

_NO_MATTER = frozenset({"return_tensors", "device", "disable_grouping", "data_format", "input_data_format"})


class Handed(Image.Image):
    """Decoded bytes, or pixels that are made already, in the form of the image that they are of.

    A model's processor takes it for an image, whose size it may ask for, and hands it on.
    """

    def __init__(self, held: np.ndarray | MadePixels, size: tuple[int, int]) -> None:
        super().__init__()
        self.held = held
        self._size = size
        self._mode = "RGB"

    @classmethod
    def of(cls, image: Any) -> Any:
        """Return an image in the form that a processor takes, without a copy of its pixels."""
        if isinstance(image, MadePixels):
            return cls(image, image.size)
        if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3:
            return cls(image, (image.shape[1], image.shape[0]))
        return image

    def load(self) -> Any:
        """Raise ValueError: there is no such image."""
        raise ValueError("the processor looks at an image by itself, whose pixels are made already")


class Uncut(Tensor):
    """Pixels whose pieces, joined again in their order, are the memory that they were: InternVL's processor does that.

    So they stay where they were made, in the memory of the batch.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Join pieces of one tensor without copying them, and do anything else as torch does with a plain tensor.

        Processors write numbers into texts, and look at sizes in numpy, which has no bfloat16.
        """
        if func == Tensor.__format__:
            return format(args[0].as_subclass(Tensor), *args[1:])
        if func == Tensor.numpy and args[0].dtype == torch.bfloat16:
            return args[0].as_subclass(Tensor).float().numpy()
        whole = _rejoined(*args, **kwargs or {}) if func is torch.cat else None
        return super().__torch_function__(func, types, args, kwargs or {}) if whole is None else whole.as_subclass(cls)


def _rejoined(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    """Return the rows of one tensor that pieces of it cover, each from where the last ends; None if they do not."""
    pieces = [tensor.as_subclass(Tensor) for tensor in tensors]
    first = pieces[0]
    memory = first.untyped_storage().data_ptr()
    end = first.storage_offset()
    for piece in pieces:
        is_next = piece.storage_offset() == end and piece.untyped_storage().data_ptr() == memory
        if not (
            is_next and piece.is_contiguous() and piece.shape[1:] == first.shape[1:] and piece.dtype == first.dtype
        ):
            return None
        end += piece.numel()
    shape = (sum(map(len, pieces)), *first.shape[1:])
    return first.as_strided(shape, first.stride()) if dim == 0 and shape[0] else None


class NativeImages:
    """An image processor with the interface of another one, and its results.

    Args:
        processor: The image processor.
        profile: Which values to compute; None: those of the processor's class.
        dtype: Type of the pixels.

    Attributes:
        programs: For each form of a call, its program, or the reason why there is none.
    """

    def __init__(self, processor: Any, profile: Profile | None = None, dtype: PixelDtype = "float32") -> None:
        self.processor = processor
        self.profile = profile
        self.dtype: PixelDtype = dtype
        self.programs: dict[str, Program | str] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "processor":
            raise AttributeError(name)
        return getattr(self.processor, name)

    @property
    def only(self) -> Program | None:
        """The program of all calls so far; None if there is none, or several."""
        known = list(self.programs.values())
        return known[0] if len(known) == 1 and isinstance(known[0], Program) else None

    @property
    def reason(self) -> str:
        """Why there is no such program."""
        reasons = (known for known in self.programs.values() if isinstance(known, str))
        return next(reasons, "it is called in several ways")

    def __call__(self, images: Any = None, *args: Any, **options: Any) -> Mapping[str, Any]:
        """Return the processor's result for images, or for those of one sample in a list of their own."""
        nested = isinstance(images, list | tuple) and len(images) == 1 and isinstance(images[0], list | tuple)
        given = list(images[0] if nested else images) if isinstance(images, list | tuple) else []
        program: Program | str = "it is called for something else than images"
        if (
            given
            and not args
            and options.get("return_tensors") == "pt"
            and all(isinstance(one, Image.Image) for one in given)
        ):
            program = self._program(options, nested=nested)
        held = [one.held if isinstance(one, Handed) else one for one in given]
        if isinstance(program, Program):
            try:
                made = _made(program, held, alone=not nested or len(held) == 1)
            except UndrawnError:
                pass
            else:
                from transformers import BatchFeature

                return BatchFeature(
                    {name: one.as_subclass(Uncut) if isinstance(one, Tensor) else one for name, one in made.items()}
                )
        if held:
            alpha = alpha_for(self.processor, None)
            real = [as_pil(one, alpha) for one in held]
            images = [real] if nested else real
        result: Mapping[str, Any] = self.processor(images, *args, **options)
        return result

    preprocess = __call__

    def _program(self, options: Mapping[str, Any], *, nested: bool) -> Program | str:
        """Return the program of a call, or the reason why there is none."""
        own = {name: getattr(self.processor, name, None) for name in options}
        changed = {
            name: value
            for name, value in options.items()
            if name not in _NO_MATTER and not (type(value) is type(own[name]) and value == own[name])
        }
        key = f"{nested} {sorted(changed.items())}"
        found = self.programs.get(key)
        if found is None:
            found = self.programs[key] = program_of(
                self.processor, self.profile, self.dtype, options=changed, nested=nested
            )
            if isinstance(found, str):
                say_called(type(self.processor).__name__, found)
        return found


def _made(program: Program, images: list[Any], *, alone: bool) -> dict[str, Any]:
    """Return the result of a program; pixels that are there already are those of the only image."""
    first = images[0]
    if not isinstance(first, MadePixels):
        return program.images(images, alone=alone)
    if len(images) > 1 or first.path is not program:
        raise SampleError("the processor is called in another way than when its pixels were made")
    return first.visual
