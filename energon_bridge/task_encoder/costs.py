"""What a microbatch costs to train on, from its shapes: what balance goes by.

    cost = BatchCost(tokens=1.0, attention=1 / (12 * hidden_size), patches=0.3)

Only ratios between microbatches matter, so a cost has no unit but that of its weights. A cost must depend on the batch
alone, for ranks that get the same batch to come to the same result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
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

    Examples:
        >>> cost = BatchCost(tokens=1.0, attention=1e-4)
        >>> cost({"tokens": torch.zeros(2, 100)})
        202.0

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


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedCost:
    """What `fit_cost` found.

    Attributes:
        cost: Seconds that a batch takes beyond those that every batch takes.
        constant: Seconds that every batch takes.
        r_squared: Share of the variance of the seconds that is explained, at most 1. Near 0 the time does not depend on
            tokens, attention and patches, and balance will not help.
    """

    cost: BatchCost
    constant: float
    r_squared: float


def fit_cost(measured: Iterable[tuple[Any, float]], *, patch_size: int = 14) -> FittedCost:
    """Fit the weights of a `BatchCost` to measured times: least squares, no weight below 0.

    Args:
        measured: Microbatches, each with the seconds of its forward and backward pass (on a GPU: between events, or
            after `torch.cuda.synchronize()`). Leave out the first ones. They are counted one by one, not kept.
        patch_size: Side of a patch in pixels, where images are no patches yet.

    Raises:
        ConfigurationError: There are fewer than 8, a time is not a positive number, or no time depends on the batch.
    """
    rows: list[tuple[float, ...]] = []
    seconds: list[float] = []
    for batch, taken in measured:
        if not (math.isfinite(taken) and taken > 0):
            raise ConfigurationError(f"fit_cost: expected seconds above 0 for microbatch {len(rows)}, got {taken!r}")
        rows.append((1.0, num_tokens(batch), attention_pairs(batch), vision_patches(batch, patch_size)))
        seconds.append(taken)
    if len(rows) < 8:
        raise ConfigurationError(
            f"fit_cost: expected 8 measured microbatches or more, of several sizes, got {len(rows)}"
        )
    counts, times = np.array(rows), np.array(seconds)
    scale = counts.max(0)
    weights, error = _least_squares(counts / np.where(scale, scale, 1), times)
    constant, tokens, attention, patches = (weights / np.where(scale, scale, 1)).tolist()
    if not (tokens or attention or patches):
        raise ConfigurationError(
            "fit_cost: the times do not grow with tokens, attention or patches. Measure microbatches of several sizes, "
            "and wait for the GPU before you read the clock"
        )
    variance = float(((times - times.mean()) ** 2).sum())
    cost = BatchCost(tokens=tokens, attention=attention, patches=patches, patch_size=patch_size)
    return FittedCost(cost=cost, constant=constant, r_squared=1 - error / variance if variance else 0.0)


def _least_squares(columns: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]) -> tuple[Any, float]:
    """Return the weights, 0 or more, of the sum of columns that is nearest, and its squared error.

    The best one is an unconstrained solution of some of the columns; with four of them all 15 choices are tried.
    """
    count = columns.shape[1]
    best, least = np.zeros(count), float((wanted**2).sum())
    for size in range(1, count + 1):
        for chosen in map(list, combinations(range(count), size)):
            found, _, rank, _ = np.linalg.lstsq(columns[:, chosen], wanted, rcond=1e-9)
            error = float(((columns[:, chosen] @ found - wanted) ** 2).sum())
            if rank == size and (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(count), error
                best[chosen] = found
    return best, least


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
