"""Batches on another device: their tensors are copied there, and nothing else is."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def to_device(value: Any, device: Any, *, non_blocking: bool = True) -> Any:
    """Return a batch, or a value in it, with all tensors on a device; keys, sources and texts are not copied."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=non_blocking)
    if is_dataclass(value) and not isinstance(value, type):
        names = (f.name for f in fields(value) if f.init)
        return replace(
            value, **{name: to_device(getattr(value, name), device, non_blocking=non_blocking) for name in names}
        )
    if isinstance(value, dict):
        return {name: to_device(entry, device, non_blocking=non_blocking) for name, entry in value.items()}
    if isinstance(value, list) and any(isinstance(entry, Tensor) for entry in value):
        return [to_device(entry, device, non_blocking=non_blocking) for entry in value]
    return value
