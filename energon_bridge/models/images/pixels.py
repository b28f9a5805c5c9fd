"""The native path from images to the pixels of a model, instead of an image processor of transformers.

What a processor does is a program (`programs.py`), drawn by the class of the processor and filled in with its
attributes (`known_programs.py`). Before a program is used, its result is compared with the processor's own on some
images of awkward sizes: one other byte, and the processor itself is called, which is logged once. So a changed
subclass, or another release of transformers, Pillow or torch, never changes pixels in silence.

A profile chooses the values. `pillow`: those of transformers' processors based on Pillow, bit for bit. `torch`: those
of its processors based on torchvision, which scales bytes by torch's `interpolate` with antialiasing. The default is
the profile of the processor's own class, in which its program is proven.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from energon_bridge.core.errors import ConfigurationError, SampleError
from energon_bridge.models.images.images import Alpha, DeferredImage
from energon_bridge.models.images.known_programs import draw_of
from energon_bridge.models.images.programs import PixelSize, Program, Settings, UndrawnError
from energon_bridge.models.images.resampling import FILTERS, Filter, bits_of, torch_filters
from energon_bridge.models.images.visual import as_pil

logger = logging.getLogger(__name__)

Profile = Literal["torch", "pillow", "processor"]
PixelDtype = Literal["float32", "bfloat16", "float16", "uint8"]

_BYTES = np.arange(256)


@dataclass(frozen=True, slots=True, repr=False)
class DeferredPixels(DeferredImage):
    """An image to be decoded straight to the model's pixels.

    Attributes:
        path: Makes the pixels.
        size: Width and height in pixels.
        num_bytes: Bytes of its first pixels.
    """

    path: Program = field(kw_only=True)
    size: tuple[int, int] = field(kw_only=True)
    num_bytes: int = field(kw_only=True)

    @classmethod
    def of(cls, image: DeferredImage, path: Program) -> DeferredImage:
        """Return an undecoded image that is decoded straight to pixels, if there is a program for its size."""
        size = width, height = image.size
        try:
            num_bytes = math.prod(path.shape((height, width))) * path.dtype.itemsize
        except UndrawnError:
            return image
        return cls(image.data, image.form, image.part, path=path, size=size, num_bytes=num_bytes)

    def decoded(self, memory: np.ndarray | None = None) -> MadePixels:
        """Return the pixels. Raises DecodeError."""
        return MadePixels(self.path.image(self.get(), memory), self.size, self.path)


@dataclass(frozen=True, slots=True)
class MadePixels:
    """The processor's result for an image or video, in place of the image or video itself.

    Attributes:
        visual: The result.
        size: Width and height of an image.
        path: What has made it of an image.
    """

    visual: dict[str, Any]
    size: tuple[int, int] = (0, 0)
    path: Program | None = None


def pixel_path(image_processor: Any, profile: Profile | None = None, dtype: PixelDtype = "float32") -> Program | None:
    """Return the program of an image processor; None if the processor itself must be called.

    Args:
        image_processor: An image processor of transformers, or one with the same interface.
        profile: Which values to compute; `processor`: call the processor. None: the profile of its class.
        dtype: Type of the values; uint8: bytes, for `normalise_on_device`.

    Raises:
        ConfigurationError: There is no such profile or type, or `dtype` is uint8 and there is no program.
    """
    check_choices(profile, dtype)
    reason = "pixels='processor'"
    if image_processor is not None and profile != "processor":
        found = program_of(image_processor, profile, dtype)
        if isinstance(found, Program):
            return found
        reason = found
    if dtype == "uint8":
        raise ConfigurationError(
            f"pixels_dtype='uint8' is not available for {type(image_processor).__name__}, which must be called itself: "
            f"{reason}; set pixels_dtype to 'float32', 'bfloat16' or 'float16'"
        )
    if image_processor is not None and profile != "processor":
        say_called(type(image_processor).__name__, reason)
    return None


def check_choices(profile: Profile | None, dtype: PixelDtype) -> None:
    """Raise ConfigurationError if there is no such profile or type."""
    if profile is not None and profile not in get_args(Profile):
        raise ConfigurationError(f"pixels must be one of {', '.join(get_args(Profile))}, or None, got {profile!r}")
    if dtype not in get_args(PixelDtype):
        raise ConfigurationError(f"pixels_dtype must be one of {', '.join(get_args(PixelDtype))}, got {dtype!r}")


def process_image(
    image_processor: Any, image: Any, path: Program | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return the tensors of an image, from the native path or from the processor."""
    if isinstance(image, MadePixels):
        return image.visual
    if path is not None:
        with suppress(UndrawnError):  # the processor itself takes an image of such a size
            return path.image(image)
    image = as_pil(image, alpha_for(image_processor, None))
    try:
        output: Mapping[str, Any] = image_processor(images=[image], return_tensors="pt")
    except ValueError as error:
        raise SampleError(f"{type(image_processor).__name__} cannot take an image of {image.size}: {error}") from error
    return in_dtype({name: value for name, value in output.items() if isinstance(value, Tensor)}, dtype)


def alpha_for(image_processor: Any, path: Program | None) -> Alpha:
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


def pixel_settings(image_processor: Any, path: Program | None, dtype: PixelDtype) -> dict[str, str]:
    """Return the settings of pixels for the state of a run; empty for Pillow's in float32."""
    if image_processor is None:
        return {}
    profile = profile_of(image_processor) if path is None else path.profile
    settings = {"pixels": profile} if profile != "pillow" else {}
    return settings | ({"pixels_dtype": dtype} if dtype != "float32" else {})


@cache
def say_called(name: str, reason: str) -> None:
    """Log once that a processor is called."""
    logger.info("calling %s for images, which takes several times the CPU of the native path: %s", name, reason)


def profile_of(image_processor: Any) -> Literal["torch", "pillow"]:
    """Return the profile of a processor of transformers: based on torchvision or on Pillow."""
    names = [kind.__name__ for kind in type(image_processor).__mro__]
    return "torch" if "TorchvisionBackend" in names or "BaseImageProcessorFast" in names else "pillow"


# Programs of processors -----------------------------------------------------------------------------------------------


def program_of(
    processor: Any,
    profile: Profile | None = None,
    dtype: PixelDtype = "float32",
    *,
    options: Mapping[str, Any] | None = None,
    nested: bool = False,
) -> Program | str:
    """Return the proven program of an image processor, or the reason why there is none.

    Args:
        options: Arguments of its calls, which differ from its attributes.
        nested: Whether it is called with the images of a sample in a list of their own.
    """
    own = profile_of(processor)
    wanted = own if profile is None else cast(Literal["torch", "pillow"], profile)
    try:
        settings = _with_options(processor, options or {})
        program = _filled_in(settings, own, "float32")
        if reason := _difference(program, processor, options or {}, nested=nested):
            return reason
        return program if (own, "float32") == (wanted, dtype) else _filled_in(settings, wanted, dtype)
    except UndrawnError as error:
        return str(error)


def _with_options(processor: Any, options: Mapping[str, Any]) -> Any:
    """Return a copy of a processor with the arguments of a call as attributes. Raises UndrawnError for unknown ones."""
    if not options:
        return processor
    known = getattr(type(processor), "valid_kwargs", None)
    names = getattr(known, "__annotations__", {})
    if unknown := sorted(options.keys() - names.keys()):
        raise UndrawnError(f"it is called with {', '.join(unknown)}")
    changed = copy(processor)
    given = {name: options.get(name, getattr(processor, name, None)) for name in names}
    for name, value in processor._standardize_kwargs(**given).items():
        setattr(changed, name, value)
    return changed


def _filled_in(processor: Any, profile: Literal["torch", "pillow"], dtype: PixelDtype) -> Program:
    """Return the program of a processor with its attributes. Raises UndrawnError if there is none."""
    draw = draw_of(processor)
    if draw is None:
        raise UndrawnError("its class is not a known one of transformers")
    settings = Settings(processor, profile)
    by = _filter_of(settings.resample)
    if profile == "torch" and by == "lanczos" and by not in torch_filters():
        by = "bicubic"  # as transformers does with such a torch
    if by is None or (profile == "torch" and by not in torch_filters()):
        raise UndrawnError(f"it scales by resample={settings.resample!r}")
    if not settings.do_normalize and not settings.do_rescale:
        raise UndrawnError("it neither rescales nor normalises")
    try:
        values, norm = _values_of(settings)
    except (TypeError, ValueError) as error:
        raise UndrawnError(
            f"its mean {settings.image_mean!r} or deviation {settings.image_std!r} do not have three channels"
        ) from error
    made: torch.dtype = getattr(torch, dtype)
    if dtype == "float32":
        made = values.dtype  # the processor's own
    table = np.tile(_BYTES.astype(np.uint8), (3, 1)) if dtype == "uint8" else bits_of(values.to(made))
    program = Program(
        draw=draw,
        settings=settings,
        profile=profile,
        dtype=made,
        table=np.ascontiguousarray(table),
        norm=norm,
        by=by,
        alpha="white" if settings.do_convert_rgb else "white, no key",
    )
    program.drawing((97, 133))  # raises UndrawnError if there is none for an image of no special size
    if dtype == "uint8" and (reason := _unfit_as_bytes(program)):
        raise UndrawnError(reason)
    return program


def _unfit_as_bytes(program: Program) -> str:
    """Return why `normalise_on_device` cannot make floats of a program's bytes; empty: it can.

    It tells layouts by their rank, and makes padding 0 where a mask says which patches of an image are there.
    """
    shapes = []
    for size in ((40, 60), (700, 500)):
        drawing = program.drawing(size)
        for name, output in drawing.pixels.items():
            rank, orders = len(output.shape), {part.order for part in output.parts}
            masked = rank == 3 and "pixel_attention_mask" in drawing.facts
            known = (rank == 3 and orders == {"pixels"}) or (rank in (2, 4) and orders == {"channels"})
            floats = any(part.floats_to for part in output.parts)
            if not known or not name.startswith("pixel_values") or floats:
                return "its pixels are laid out, padded with zeros or scaled in a way that bytes cannot be"
            shapes.append(() if masked else (output.room, output.each, *output.shape[1:]))
        if drawing.padded:
            shapes.append((0,))
    if len(set(shapes)) > len(drawing.pixels):
        return "its images have different sizes and are padded with zeros after normalising"
    return ""


def _filter_of(value: Any) -> Filter | None:
    try:
        name = Image.Resampling(int(value)).name.lower()
    except (TypeError, ValueError):
        return None
    return cast(Filter, name) if name in FILTERS else None


def _three(value: Any) -> list[float]:
    values = [float(value)] * 3 if isinstance(value, int | float) else [float(one) for one in value]
    if len(values) != 3:
        raise ValueError(values)
    return values


def _values_of(p: Settings) -> tuple[Tensor, Tensor]:
    """Return the value of each byte in each channel, (3, 256), and mean and deviation in steps of a byte."""
    scale = float(p.rescale_factor) if p.do_rescale else 1.0
    mean = _three(p.image_mean) if p.do_normalize else [0.0] * 3
    std = _three(p.image_std) if p.do_normalize else [1.0] * 3
    norm = (torch.tensor([mean, std], dtype=torch.float64) / scale).float()
    if p.profile == "pillow":
        # numpy rescales bytes in float64, and the processor casts that to float32 before it normalises.
        scaled = (_BYTES.astype(np.float64) * scale).astype(np.float32)
        values = np.stack([scaled] * 3)
        if p.do_normalize:
            values = (values - np.array(mean, np.float32)[:, None]) / np.array(std, np.float32)[:, None]
        return torch.from_numpy(values), norm
    if "rescale_and_normalize" in vars(type(p.processor)):  # a rule of its own
        image = torch.arange(256, dtype=torch.uint8).repeat(1, 3, 1).view(1, 3, 16, 16)
        given = (p.do_rescale, p.rescale_factor, p.do_normalize, p.image_mean, p.image_std)
        return p.processor.rescale_and_normalize(image, *given).reshape(3, 256), norm
    whole = torch.arange(256, dtype=torch.float32).repeat(3, 1)
    if p.do_normalize:
        # As transformers' fast processors do: rescaling is folded into mean and deviation, which rounds differently.
        by = 1.0 / scale if p.do_rescale else 1.0
        whole = whole.sub(torch.tensor(mean).mul(by)[:, None]).div(torch.tensor(std).mul(by)[:, None])
    else:
        whole = torch.arange(256, dtype=torch.uint8).repeat(3, 1) * scale
    return whole, norm


# Proof ----------------------------------------------------------------------------------------------------------------
#
# A program is compared with its processor at its first use in a process tree; what was found is kept by the processor's
# source and attributes and the versions of what it computes with, and travels with an encoder to its workers.

_PROBES: Sequence[tuple[str, PixelSize]] = (
    *(("RGB", (40, 1)), ("RGB", (1, 41)), ("RGB", (133, 97)), ("L", (97, 133)), ("RGBA", (50, 77))),
    *(("RGB", (480, 640)), ("RGB", (901, 300)), ("P", (224, 224))),
)
"""Modes and sizes (height, width) of the images that a program is tried on."""
_FOUND: dict[str, str] = {}


def probes() -> list[Image.Image]:
    """Return the images that a program is tried on: noise of awkward sizes, grey, or transparent."""
    made = []
    for number, (mode, (height, width)) in enumerate(_PROBES):
        noise = np.random.default_rng(number).integers(0, 256, (height, width, 4), np.uint8)
        image = Image.fromarray(noise).convert("RGB")
        if mode == "P":
            image = image.quantize(16)
            image.info["transparency"] = 3
        elif mode == "L":
            image = image.convert("L")
        elif mode == "RGBA":
            image = Image.fromarray(noise)
        made.append(image)
    return made


def _difference(program: Program, processor: Any, options: Mapping[str, Any], *, nested: bool) -> str:
    """Return how the result of a program differs from that of its processor; empty: in nothing."""
    key = _key(processor, options, nested=nested)
    if key not in _FOUND:
        images = probes()
        calls = [[image] for image in images] + [images[2:4]]
        found = (difference(program, processor, call, options, nested=nested) for call in calls)
        with _muted():
            _FOUND[key] = next(filter(None, found), "")
    return _FOUND[key]


@contextmanager
def _muted() -> Iterator[None]:
    """Do not say what transformers says of images that no user has."""
    said = logging.getLogger("transformers")
    level = said.level
    said.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        said.setLevel(level)


def difference(
    program: Program, processor: Any, images: Sequence[Image.Image], options: Mapping[str, Any], *, nested: bool = False
) -> str:
    """Return a phrase on the first result that differs from the processor's for some images; empty: none."""
    alpha = alpha_for(processor, None)
    given: Any = [as_pil(image, alpha) for image in images]
    theirs: Mapping[str, Any] = {}
    failed = ""
    try:
        theirs = processor(images=[given] if nested else given, return_tensors="pt", **options)
    except Exception as error:  # whatever a processor raises
        failed = f"{type(error).__name__}: {error}"
    try:
        ours = program.images(images, alone=not nested or len(images) == 1)
    except UndrawnError:
        return ""  # it is called for these
    what = " and ".join(f"an image of {image.width} x {image.height} ({image.mode})" for image in images)
    if failed:
        return f"of {what}, it says {failed!r}, and its program nothing"
    if theirs.keys() != ours.keys():
        return f"of {what}, it returns {', '.join(sorted(theirs))}, and its program {', '.join(sorted(ours))}"
    for name, wanted in theirs.items():
        if unlike := _unlike(ours[name], wanted):
            return f"of {what}, its {name} {unlike}"
    return ""


def _unlike(ours: Any, theirs: Any) -> str:
    if not isinstance(theirs, Tensor) or not isinstance(ours, Tensor):
        same = type(ours) is type(theirs) and ours == theirs
        return "" if same else f"is {theirs!r}, but that of its program {ours!r}"[:200]
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return (
            f"is {theirs.dtype} of {tuple(theirs.shape)}, but that of its program {ours.dtype} of {tuple(ours.shape)}"
        )
    if torch.equal(ours, theirs):
        return ""
    return f"differs from its program's in {int((ours != theirs).sum()):,} of {ours.numel():,} values"


def _key(processor: Any, options: Mapping[str, Any], *, nested: bool) -> str:
    """Return a hash of all that a processor's result depends on."""
    from importlib.metadata import version

    import PIL

    parts: list[str] = [torch.__version__, PIL.__version__, version("transformers"), repr(nested)]
    for kind in type(processor).__mro__[:-1]:
        parts.append(f"{kind.__module__}.{kind.__qualname__}")
        if not kind.__module__.startswith("transformers."):
            try:
                parts.append(inspect.getsource(kind))
            except (OSError, TypeError):
                parts.append(str(id(kind)))  # as of a class that was typed in: only this one
        beside = getattr(sys.modules.get(kind.__module__), "__dict__", {})
        parts += [f"{name}={id(one)}" for name, one in [*vars(kind).items(), *beside.items()] if callable(one)]
    parts += [f"{name}={value!r}" for name, value in sorted((vars(processor) | dict(options)).items())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
