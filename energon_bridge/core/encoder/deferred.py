"""Deferred images: `SampleDecoder(defer_images=True)` decodes them when they are needed.

A packing encoder draws many samples long before delivering them. A deferred image keeps the encoded bytes and knows its
size from their header, which is what a packer needs; `get` decodes. Where an encoder has `postencode_sample`, the
engine decodes what is still deferred in a sample's fields right before it, all of a pack at once and on its threads;
what the hook itself gets from stores and lazies is decoded too, so that it never sees a deferred image.

An encoder may put images of a class of its own in their place, which say how many bytes they will be as pixels of the
model (`num_bytes`). Those of a microbatch share one piece of memory, and `decoded` writes there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from energon_bridge.core.samples.sample import field_names
from energon_bridge.core.samples.sample_place import SamplePlace, here, place_in

_SHARED_FROM = 1 << 16
"""Bytes of pixels from which memory in one piece costs less than joining them."""


class Deferred:
    """Something that is decoded when a sample is about to be delivered, on the threads of the engine."""

    __slots__ = ()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of memory that `decoded` can write its pixels to; 0: it brings its own."""
        return 0

    def decoded(self, memory: np.ndarray | None = None) -> Any:
        """Return the decoded value that replaces it before `postencode_sample`, in memory of `num_bytes` if given."""
        raise NotImplementedError


def deferred_in(sample: Any) -> list[tuple[Callable[[Any], None], Deferred]]:
    """Return the deferred values in a sample's fields, or in lists there, each with a function that replaces it."""
    # Pairs of the function that stores the decoded value in its place, and the deferred value.
    entries: list[tuple[Callable[[Any], None], Deferred]] = []
    for name, value in field_items(sample):
        if isinstance(value, Deferred):
            put = sample.__setitem__ if isinstance(sample, dict) else partial(setattr, sample)
            entries.append((partial(put, name), value))
        elif isinstance(value, list):
            places = (place for place, item in enumerate(value) if isinstance(item, Deferred))
            entries += [(partial(value.__setitem__, place), value[place]) for place in places]
    return entries


def field_items(sample: Any) -> list[tuple[str, Any]]:
    """Return the fields of a sample of any kind with their values."""
    if isinstance(sample, dict):
        return list(sample.items())
    if is_dataclass(sample) and not isinstance(sample, type):
        return [(name, getattr(sample, name, None)) for name in field_names(type(sample))]
    return list(getattr(sample, "__dict__", {}).items())


def decode_deferred(
    samples: Iterable[Any],
    over: Callable[..., Iterable[Any]] = map,
    memory_of: Callable[[int], np.ndarray] | None = None,
) -> None:
    """Decode the deferred images and videos of some samples, in place.

    Args:
        samples: Samples of any kind.
        over: Maps a function, possibly on threads.
        memory_of: Returns memory of a number of bytes for all pixels; None: each image gets its own.

    Raises:
        SampleError: An image does not decode; those before it are decoded.
    """
    entries = [(*entry, place_in(sample)) for sample in samples for entry in deferred_in(sample)]
    # All images write side by side into one piece of memory, so that the batch is that piece and nothing is copied.
    waiting = [deferred for _, deferred, _ in entries]
    ends = list(accumulate(deferred.num_bytes for deferred in waiting))
    memory = memory_of(ends[-1]) if memory_of is not None and ends and ends[-1] >= _SHARED_FROM else None
    pieces: list[np.ndarray | None] = [None] * len(waiting)
    if memory is not None:
        pieces = [memory[end - deferred.num_bytes : end] for deferred, end in zip(waiting, ends, strict=True)]
    for (put, _, _), pixels in zip(entries, over(_decode, entries, pieces), strict=True):
        put(pixels)


def _decode(entry: tuple[Any, Deferred, SamplePlace | None], memory: np.ndarray | None) -> Any:
    _, deferred, here.at = entry
    return deferred.decoded(memory)
