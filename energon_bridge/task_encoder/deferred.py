"""Deferred images: `SampleDecoder(defer_images=True)` decodes them when they are needed.

With packing, most samples wait long before they are delivered. A deferred image keeps the encoded bytes and knows its
size from their header, which is enough for a packer; `get` decodes. If an encoder has `postencode_sample`, the engine
decodes the deferred images in a sample's fields right before it, all of a pack at once and on its threads. Images that
the hook gets from stores and lazies are decoded, too, so it never sees a deferred image.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any

from PIL import Image, UnidentifiedImageError

from energon_bridge.errors import DecodeError
from energon_bridge.samples.base import field_names
from energon_bridge.task_encoder.current import DELIVERING
from energon_bridge.task_encoder.images import ImageForm, decode_image


@dataclass(frozen=True, slots=True, repr=False)
class DeferredImage:
    """An image that has not been decoded.

    Attributes:
        data: The encoded bytes.
        form: The form of the decoded image.
        part: Name of the part, for errors.
    """

    data: bytes
    form: ImageForm
    part: str

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, read from the header.

        Raises:
            DecodeError: The header cannot be read.
        """
        try:
            with Image.open(io.BytesIO(self.data)) as image:
                return image.size
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
            raise DecodeError(
                f"part {self.part!r} ({len(self.data)} bytes) is no image whose size can be read: {error}"
            ) from error

    def get(self) -> Any:
        """Decode and return the pixels; each call decodes again. Raises DecodeError."""
        return decode_image(self.data, self.form, part=self.part)

    def with_data(self, data: bytes) -> DeferredImage:
        """Return an image of other bytes with the same form and name."""
        return replace(self, data=data)

    def when_got(self) -> Any:
        """Return what `Lazy.get` hands out: the pixels if samples will be delivered next. Raises DecodeError."""
        return self.get() if DELIVERING.get() else self

    def __repr__(self) -> str:
        return f"DeferredImage({self.part!r}, {len(self.data)} bytes)"


def deferred_in(sample: Any) -> list[tuple[Callable[[Any], None], DeferredImage]]:
    """Return the deferred images in a sample's fields (or lists there), each with a function that replaces it."""
    found: list[tuple[Callable[[Any], None], DeferredImage]] = []
    for name, value in sample_parser(sample):
        if isinstance(value, DeferredImage):
            put = sample.__setitem__ if isinstance(sample, dict) else partial(setattr, sample)
            found.append((partial(put, name), value))
        elif isinstance(value, list):
            places = (place for place, one in enumerate(value) if isinstance(one, DeferredImage))
            found += [(partial(value.__setitem__, place), value[place]) for place in places]
    return found


def sample_parser(sample: Any) -> list[tuple[str, Any]]:
    """Return the fields of a sample of any kind with their values."""
    if isinstance(sample, dict):
        return list(sample.items())
    if is_dataclass(sample) and not isinstance(sample, type):
        return [(name, getattr(sample, name, None)) for name in field_names(type(sample))]
    return list(getattr(sample, "__dict__", {}).items())


def decode_deferred(samples: Iterable[Any], over: Callable[..., Iterable[Any]] = map) -> None:
    """Decode the deferred images of some samples, in place; `over` maps, possibly on threads. Raises DecodeError."""
    found = [entry for sample in samples for entry in deferred_in(sample)]
    for (put, _), pixels in zip(found, over(DeferredImage.get, [image for _, image in found]), strict=True):
        put(pixels)
