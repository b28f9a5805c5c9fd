"""Batches on another device: their tensors are copied there, and nothing else is.

Pixels may cross as bytes, a quarter of their floats. A batch of such has a `pixel_norm`, the mean and the deviation of
each channel in steps of a byte; `normalise_on_device` makes floats of it where the model is. Their layout is told by
their rank: (images, channels, height, width), patches (n, channels x pixels) as those of Qwen-VL, or patches (images,
n, pixels x channels) as those of SigLIP2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import torch
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


def cuda_in_use() -> bool:
    """Tell whether this process has set up a GPU; asking does not set one up."""
    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())


def normalise_on_device(batch: Any, device: Any = None, *, dtype: torch.dtype = torch.float32) -> Any:
    """Return a batch with its pixels as floats, rescaled and normalised; one that has no bytes to normalise, as it is.

    Trainers' integrations call it. In a loop of your own, call it with what the loader delivers: the values are those
    that the task encoder makes without `pixels_dtype="uint8"`, within the rounding of floats.

    Args:
        batch: A dataclass or a dict with `pixel_norm`, and `pixel_values` and `visual_inputs`, or one of them.
        device: Where the pixels are copied, as bytes, before; None: they stay where they are.
        dtype: Of the pixels.
    """
    if isinstance(batch, dict):
        if batch.get("pixel_norm") is None:
            return batch
        found: Mapping[str, Any] = batch
    elif getattr(batch, "pixel_norm", None) is None:
        return batch
    else:
        found = {name: getattr(batch, name, None) for name in ("pixel_values", "visual_inputs", "pixel_norm")}
    norm, extra = found["pixel_norm"], found.get("visual_inputs")
    around = _entries(extra)
    mask = around.get("pixel_attention_mask")
    changed: dict[str, Any] = {"pixel_norm": None}
    if isinstance(found.get("pixel_values"), Tensor):
        changed["pixel_values"] = _normalised(found["pixel_values"], norm, mask, device, dtype)
    inner = {
        name: _normalised(value, norm, mask, device, dtype)
        for name, value in around.items()
        if name.startswith("pixel_values") and isinstance(value, Tensor)
    }
    if inner:
        changed["visual_inputs"] = {**extra, **inner} if isinstance(extra, dict) else replace(cast(Any, extra), **inner)
    if isinstance(batch, dict):
        rest = {name: value for name, value in (batch | changed).items() if name != "pixel_norm"}
        return rest
    return replace(batch, **changed)


def _entries(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    return {f.name: getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else {}


def _normalised(values: Tensor, norm: Tensor, mask: Tensor | None, device: Any, dtype: torch.dtype) -> Tensor:
    if device is not None:
        values = values.to(device, non_blocking=True)
    if values.dtype != torch.uint8:
        return values
    mean, deviation = norm.to(values.device)
    channels = len(mean)
    shape = values.shape
    if values.ndim == 3:  # the channels of a pixel stand together
        floats = values.to(torch.float32).view(*shape[:2], -1, channels)
    else:
        floats = values.to(torch.float32).view(shape[0], channels, -1)
        mean, deviation = mean[:, None], deviation[:, None]
    floats = floats.sub_(mean).div_(deviation).view(shape)
    if values.ndim == 3 and mask is not None:
        floats *= mask.to(floats)[..., None]  # what is padded stays 0
    return floats.to(dtype)
