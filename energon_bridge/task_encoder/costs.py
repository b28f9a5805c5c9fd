"""What a microbatch costs to train on, from its shapes: what balance goes by.

    cost = BatchCost(tokens=1.0, attention=1 / (12 * hidden_size), patches=0.3)

Only ratios between microbatches matter, so a cost has no unit but that of its weights. A cost must depend on the batch
alone, for ranks that get the same batch to come to the same result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from energon_bridge.errors import ConfigurationError


def num_tokens(batch: Any) -> float:
    """Return the tokens of a batch, padding included, since models compute padding, too.

    Raises:
        ConfigurationError: The batch has neither `tokens` nor `input_ids`.
    """
    return float(_tokens(batch).numel())


def attention_pairs(batch: Any) -> float:
    """Return the pairs of tokens that attend to each other: the sum of the squared lengths of its sequences.

    These are the sequences of `cu_seqlens_padded` (or `cu_seqlens`); without them the `segments` of rows that hold
    several samples; and otherwise whole rows, padding included. Causal attention computes half of the pairs.

    Raises:
        ConfigurationError: The batch has neither these nor `tokens` or `input_ids`.
    """
    ends = _field(batch, "cu_seqlens_padded")
    ends = _field(batch, "cu_seqlens") if ends is None else ends
    if ends is not None:
        return float(ends.diff().double().square().sum())
    segments = _field(batch, "segments")
    if segments and any(len(row) > 1 for row in segments):
        return float(sum(segment.length**2 for row in segments for segment in row))
    shape = _tokens(batch).shape
    return float(math.prod(shape) * shape[-1])


def vision_patches(batch: Any, patch_size: int = 14) -> float:
    """Return the patches that the vision encoder sees in a batch; 0 without images.

    Args:
        batch: Counted are the grids `image_grid_thw` and `video_grid_thw` where it has them, else its `pixel_values`:
            images (n, channels, height, width), or patches, (n, values) or (images, n, values).
        patch_size: Side of a patch in pixels, for images.
    """
    visual = _field(batch, "visual_inputs") or {}
    grids = [_field(source, f"{kind}_grid_thw") for kind in ("image", "video") for source in (batch, visual)]
    if any(grid is not None for grid in grids):
        return float(sum(int(grid.prod(-1).sum()) for grid in grids if grid is not None))
    total = 0
    for source in (batch, visual):
        for name in ("pixel_values", "pixel_values_videos"):
            pixels = _field(source, name)
            if isinstance(pixels, Tensor) and pixels.ndim >= 4:
                total += math.prod(pixels.shape[:-3]) * math.prod(side // patch_size for side in pixels.shape[-2:])
            elif isinstance(pixels, Tensor) and pixels.ndim >= 2:
                total += math.prod(pixels.shape[:-1])
    return float(total)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchCost:
    """The weighted sum of what a batch has of tokens, attention and patches.

    Args:
        tokens: Cost of a token (`num_tokens`).
        attention: Cost of a pair of tokens (`attention_pairs`). In a transformer of hidden size h with causal attention
            a pair takes about 1 / (12 h) of the operations of a token.
        patches: Cost of a patch (`vision_patches`): about the ratio of the parameters of the vision encoder and of the
            language model, if both are trained.
        patch_size: Side of a patch in pixels, where images are no patches yet.

    Raises:
        ConfigurationError: A weight is negative or not finite, or all are 0.
    """

    tokens: float = 1.0
    attention: float = 0.0
    patches: float = 0.0
    patch_size: int = 14

    def __post_init__(self) -> None:
        weights = {name: getattr(self, name) for name in ("tokens", "attention", "patches")}
        for name, weight in weights.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise ConfigurationError(f"BatchCost: {name} must be a finite number, 0 or more, got {weight!r}")
        if not any(weights.values()):
            raise ConfigurationError("BatchCost: all weights are 0, so all batches cost the same: give one of them")
        if self.patch_size < 1:
            raise ConfigurationError(f"BatchCost: patch_size must be at least 1, got {self.patch_size!r}")

    def __call__(self, batch: Any) -> float:
        cost = self.tokens * num_tokens(batch) if self.tokens else 0.0
        if self.attention:
            cost += self.attention * attention_pairs(batch)
        if self.patches:
            cost += self.patches * vision_patches(batch, self.patch_size)
        return cost


def _field(batch: Any, name: str) -> Any:
    return batch.get(name) if isinstance(batch, dict) else getattr(batch, name, None)


def _tokens(batch: Any) -> Tensor:
    for name in ("tokens", "input_ids"):
        found = _field(batch, name)
        if isinstance(found, Tensor):
            return found
    if is_dataclass(batch):
        names = [entry.name for entry in fields(batch)]
    else:
        names = list(batch) if isinstance(batch, dict) else []
    raise ConfigurationError(
        f"the cost of a batch of type {type(batch).__name__} is not known: expected a tensor tokens or input_ids, got "
        f"{', '.join(map(str, names)) or 'no fields'}. Give a function of the batch that returns its cost"
    )
