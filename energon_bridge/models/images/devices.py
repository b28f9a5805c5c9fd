"""Normalises the pixels of a batch on the device of the model.

Pixels may cross as bytes, a quarter of the size of floats. Such a batch has a `pixel_norm`, the mean and deviation of
each channel in steps of a byte; `normalise_on_device` turns the bytes into floats on the model's device. The layout
follows from the rank: (images, channels, height, width), patches (n, channels x pixels) as for Qwen-VL, or patches
(images, n, pixels x channels) as for SigLIP2.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from energon_bridge.core.samples.sample import meta_field


def normalise_on_device(batch: Any, device: Any = None, *, dtype: torch.dtype = torch.float32) -> Any:
    """Return a batch with its pixels rescaled and normalised to floats; a batch without byte pixels is returned as is.

    Examples:
        >>> from types import SimpleNamespace
        >>> pixels = torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)
        >>> norm = torch.tensor([[127.5] * 3, [127.5] * 3])  # mean and deviation of each channel
        >>> batch = {"pixel_values": pixels, "pixel_norm": norm}
        >>> normalise_on_device(batch)["pixel_values"].unique()
        tensor([1.])

    The trainer integrations call it. In your own loop, call it on each batch from the loader. The values equal those
    made without `pixels_dtype="uint8"`, within the rounding of floats.

    Args:
        batch: A dataclass or dict with `pixel_norm`, and `pixel_values` or `visual_inputs` or both.
        device: Device to copy the pixels to, as bytes, first; None: they stay where they are.
        dtype: The dtype of the result.
    """
    norm, pixels, extra = (meta_field(batch, name) for name in ("pixel_norm", "pixel_values", "visual_inputs"))
    if norm is None:
        return batch
    around = _entries(extra)
    mask = around.get("pixel_attention_mask")
    changed: dict[str, Any] = {"pixel_norm": None}
    if isinstance(pixels, Tensor):
        changed["pixel_values"] = _normalised(pixels, norm, mask, device, dtype)
    inner = {
        name: _normalised(value, norm, mask, device, dtype)
        for name, value in around.items()
        if name.startswith("pixel_values") and isinstance(value, Tensor)
    }
    if inner:
        changed["visual_inputs"] = {**extra, **inner} if isinstance(extra, dict) else replace(cast(Any, extra), **inner)
    if isinstance(batch, dict):
        return {name: value for name, value in (batch | changed).items() if name != "pixel_norm"}
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
    if values.ndim == 3:  # the channels of a pixel are adjacent
        floats = values.to(torch.float32).view(*shape[:2], -1, channels)
    else:
        floats = values.to(torch.float32).view(shape[0], channels, -1)
        mean = mean[:, None]
        deviation = deviation[:, None]
    floats = floats.sub_(mean).div_(deviation).view(shape)
    if values.ndim == 3 and mask is not None:
        floats *= mask.to(floats)[..., None]  # padding stays 0
    return floats.to(dtype)
