"""Mixins for dataclasses of samples and batches, and where the parts of a sample are from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Self

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.samples import SourceInfo
from energon_bridge.core.samples.sample import pin_value


class PinMemoryMixin:
    """Adds `pin_memory` to a dataclass, for custom batch types."""

    def pin_memory(self) -> Self:
        """Return a copy whose tensors, at any depth, are in pinned host memory."""
        values = {entry.name: pin_value(getattr(self, entry.name)) for entry in fields(self) if entry.init}  # type: ignore[arg-type]
        return type(self)(**values)


class ExtendableDataclassMixin:
    """Adds `extend` to a dataclass."""

    @classmethod
    def extend(cls, src: Any, **kwargs: Any) -> Self:
        """Make an object of this class from one of a base class: copies its fields, and sets new ones from `kwargs`."""
        if not issubclass(cls, type(src)):
            raise ConfigurationError(f"{cls.__name__}.extend: {type(src).__name__} is not a base class of it")
        return cls(**{entry.name: getattr(src, entry.name) for entry in fields(src) if entry.init} | kwargs)


def get_source_info(sample: Any) -> list[SourceInfo] | None:
    """Return the sources of a sample's parts, None if it has none."""
    sources = sample.get("__sources__") if isinstance(sample, Mapping) else getattr(sample, "__sources__", None)
    return None if sources is None else list(sources)
