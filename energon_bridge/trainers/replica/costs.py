"""What a microbatch costs to train on, from its shapes: what balance goes by.

    cost = BatchCost(tokens=1.0, attention=1 / (12 * hidden_size), patches=0.3)

Only ratios between microbatches matter, so a cost has no unit but that of its weights. A cost must depend on the batch
alone, for ranks that get the same batch to come to the same result.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.samples.sample import meta_field


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
    ends = meta_field(batch, "cu_seqlens_padded")
    ends = meta_field(batch, "cu_seqlens") if ends is None else ends
    if ends is not None:
        return float(ends.diff().double().square().sum())
    segments = meta_field(batch, "segments")
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
    visual = meta_field(batch, "visual_inputs") or {}
    grids = [meta_field(source, f"{kind}_grid_thw") for kind in ("image", "video") for source in (batch, visual)]
    if any(grid is not None for grid in grids):
        return float(sum(int(grid.prod(-1).sum()) for grid in grids if grid is not None))
    total = 0
    for source in (batch, visual):
        for name in ("pixel_values", "pixel_values_videos"):
            pixels = meta_field(source, name)
            if isinstance(pixels, Tensor) and pixels.ndim >= 4:
                total += math.prod(pixels.shape[:-3]) * math.prod(side // patch_size for side in pixels.shape[-2:])
            elif isinstance(pixels, Tensor) and pixels.ndim >= 2:
                total += math.prod(pixels.shape[:-1])
    return float(total)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchCost:
    """The weighted sum of a batch's tokens, attention and patches.

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
                raise ConfigurationError(f"BatchCost: {name} must be a finite number of at least 0, got {weight!r}")
        if not any(weights.values()):
            raise ConfigurationError(
                "BatchCost: all weights are 0, so all batches would cost the same: set at least one"
            )
        if self.patch_size < 1:
            raise ConfigurationError(f"BatchCost: patch_size must be at least 1, got {self.patch_size!r}")

    @classmethod
    def of_model(cls, config: Any, *, frozen_vision: bool = False, patches_per_image: int | None = None) -> Self:
        """Return the cost of training a model of transformers, by its configuration; a token costs 1.

        Counted are multiplications of matrices, as in appendix B of "Efficient Large-Scale Language Model Training on
        GPU Clusters Using Megatron-LM" (2021): a token takes two operations for each weight that it meets, and a pair
        of tokens, of which causal attention computes half, 2 x heads x head size in each layer. The backward pass takes
        twice as many. Of experts those count that a token goes through.

        Args:
            config: That of a vision-language model, with `text_config` and `vision_config`, or of a language model.
            frozen_vision: The vision encoder is not trained, so that it has a forward pass only.
            patches_per_image: Patches that attend to each other in the vision encoder. None: those of its `image_size`;
                or 1,024, where images have sizes of their own.

        Raises:
            ConfigurationError: The configuration lacks a size that the formula needs.
        """
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        per_token, per_pair = _operations(text, gated=True)
        per_token += 2 * text.hidden_size * text.vocab_size
        vision = getattr(config, "vision_config", None)
        if vision is None:
            return cls(attention=per_pair / 2 / per_token)
        patch_size = int(_size(vision, "patch_size"))
        if patches_per_image is None:
            side = getattr(vision, "image_size", None)
            patches_per_image = (int(side) // patch_size) ** 2 if isinstance(side, int) else 1_024
        operations, pairs = _operations(vision, gated=getattr(vision, "hidden_act", None) == "silu")
        layers = _size(vision, "num_hidden_layers", "depth")
        if whole := getattr(vision, "fullatt_block_indexes", None):  # the others attend within windows
            per_window = (vision.window_size // patch_size) ** 2
            operations += pairs / layers * (len(whole) * patches_per_image + (layers - len(whole)) * per_window)
        else:
            operations += pairs * patches_per_image
        width = _size(vision, "embed_dim", "hidden_size")
        merged = int(getattr(vision, "spatial_merge_size", 1)) ** 2 * width  # values of the patches of a token
        operations += (
            2
            * (merged * (merged if merged > width else text.hidden_size) + merged * text.hidden_size)
            / (merged // width)
        )
        operations += 2 * 3 * patch_size**2 * int(getattr(vision, "temporal_patch_size", 1)) * width
        share = 1 / 3 if frozen_vision else 1.0
        return cls(attention=per_pair / 2 / per_token, patches=share * operations / per_token, patch_size=patch_size)

    def of_sizes(self, tokens: int, patches: int = 0) -> float:
        """Return the cost of a sample in a pack, by its sizes alone: those of a column, or of `preencode_sample`."""
        return self.tokens * tokens + self.attention * tokens**2 + self.patches * patches

    def __call__(self, batch: Any) -> float:
        cost = self.tokens * num_tokens(batch) if self.tokens else 0.0
        if self.attention:
            cost += self.attention * attention_pairs(batch)
        if self.patches:
            cost += self.patches * vision_patches(batch, self.patch_size)
        return cost


def cost_limit(lengths: npt.ArrayLike, costs: npt.ArrayLike, max_tokens: int, *, slack: float = 1.02) -> int:
    """Return a limit for the cost of packs with which they are nearly as costly as each other.

    That is the mean cost of a full pack times `slack`, or the largest cost of a sample, if that is more. Less slack
    makes packs more even and less full.

    Args:
        lengths: Tokens of some samples, as the packer counts them.
        costs: What each costs, in the unit of the packer's sizes, whole numbers: `round(cost.of_sizes(…))`.
        max_tokens: The limit of tokens.
        slack: At least 0.5.

    Raises:
        ConfigurationError: There are no samples, not as many costs, or numbers that make no limit.
    """
    tokens = np.asarray(lengths, np.float64)
    values = np.asarray(costs, np.float64)
    if tokens.ndim != 1 or tokens.shape != values.shape or not tokens.sum() > 0:
        raise ConfigurationError(
            f"cost_limit needs the lengths and costs of some samples, got arrays of shape {tokens.shape} and "
            f"{values.shape}"
        )
    if not (np.isfinite(values).all() and values.min() >= 0 and slack >= 0.5 and max_tokens > 0):
        raise ConfigurationError(
            f"cost_limit needs costs of 0 or more, max_tokens above 0 and slack of at least 0.5, got {max_tokens=}, "
            f"{slack=} and costs from {values.min()} to {values.max()}"
        )
    return max(1, math.ceil(max(values.max(), slack * max_tokens * values.sum() / tokens.sum())))


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
    return fit_counts(((counts_of(batch, patch_size), taken) for batch, taken in measured), patch_size)


def record_time(path: str | os.PathLike[str], batches: Sequence[Any], seconds: float, *, patch_size: int = 14) -> None:
    """Add a line to a file of measured times, for `fit_times` and `energon bench --fit-cost`.

    Args:
        path: The file; it is made if it is not there.
        batches: The microbatches that took the time: one, or those of a step.
        seconds: Of their forward and backward passes, together.
        patch_size: Side of a patch in pixels, where images are no patches yet.
    """
    counts = np.mean([counts_of(batch, patch_size) for batch in batches], 0).tolist()
    line = dict(zip(_COUNTED, counts, strict=True)) | {"seconds": seconds / len(batches), "patch_size": patch_size}
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def fit_times(path: str | os.PathLike[str]) -> FittedCost:
    """Fit the weights of a `BatchCost` to the times that `record_time` wrote.

    Raises:
        ConfigurationError: It cannot be read, or as `fit_cost`.
    """
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{os.fspath(path)}: cannot read measured times: {error}") from error
    patch_size = 14

    def measured() -> Iterator[tuple[tuple[float, ...], float]]:
        nonlocal patch_size
        for number, line in enumerate(lines, 1):
            try:
                values = json.loads(line)
                patch_size = int(values["patch_size"])
                row = *(float(values[name]) for name in _COUNTED), float(values["seconds"])
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigurationError(
                    f"{os.fspath(path)}, line {number}: expected numbers {', '.join(_COUNTED)}, seconds and "
                    f"patch_size, as record_time writes them, got {line[:200]!r}"
                ) from error
            yield row[:-1], row[-1]

    counted = list(measured())
    return fit_counts(counted, patch_size)


_COUNTED = ("tokens", "attention", "patches")


def counts_of(batch: Any, patch_size: int) -> tuple[float, ...]:
    """Return the tokens, pairs of tokens and patches of a microbatch."""
    return num_tokens(batch), attention_pairs(batch), vision_patches(batch, patch_size)


def fit_counts(measured: Iterable[tuple[tuple[float, ...], float]], patch_size: int) -> FittedCost:
    """Fit the weights to the counts (`counts_of`) and seconds of microbatches; raises as `fit_cost`."""
    rows: list[tuple[float, ...]] = []
    seconds: list[float] = []
    for row, taken in measured:
        if not (math.isfinite(taken) and taken > 0):
            raise ConfigurationError(f"fit_cost: expected seconds above 0 for microbatch {len(rows)}, got {taken!r}")
        rows.append((1.0, *row))
        seconds.append(taken)
    if len(rows) < 8:
        raise ConfigurationError(
            f"fit_cost: expected at least 8 measured microbatches of several sizes, got {len(rows)}"
        )
    order = sorted(range(len(rows)), key=lambda row: (rows[row], seconds[row]))  # the same bits in any order
    counts = np.array(rows)[order]
    times = np.array(seconds)[order]
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
    best = np.zeros(count)
    least = float((wanted**2).sum())
    rounding = 1e-20 * least  # of exact fits the one with the fewest columns
    for size in range(1, count + 1):
        for chosen in map(list, combinations(range(count), size)):
            weights, _, rank, _ = np.linalg.lstsq(columns[:, chosen], wanted, rcond=1e-9)
            error = float(((columns[:, chosen] @ weights - wanted) ** 2).sum())
            if rank == size and (weights >= 0).all() and error < least * (1 - 1e-9) - rounding:
                best = np.zeros(count)
                least = error
                best[chosen] = weights
    return best, least


def _operations(config: Any, *, gated: bool) -> tuple[float, float]:
    """Return the operations of the forward pass of a transformer for a token, and for a pair of tokens."""
    width = _size(config, "embed_dim", "hidden_size")
    layers = _size(config, "num_hidden_layers", "depth")
    heads = _size(config, "num_attention_heads", "num_heads")
    head = getattr(config, "head_dim", None) or width // heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, "intermediate_size", None)
    inner = inner or width * _size(config, "mlp_ratio")
    if chosen := getattr(config, "num_experts_per_tok", None):
        inner = chosen * (getattr(config, "moe_intermediate_size", None) or inner)
        inner += getattr(config, "shared_expert_intermediate_size", None) or 0
    weights = 2 * width * heads * head + 2 * width * groups * head + (3 if gated else 2) * width * inner
    return 2.0 * layers * weights, 4.0 * layers * heads * head


def _size(config: Any, *names: str) -> Any:
    for name in names:
        if (value := getattr(config, name, None)) is not None:
            return value
    raise ConfigurationError(
        f"BatchCost.of_model: a {type(config).__name__} has no {' or '.join(names)}: set the weights yourself, or fit "
        "them to measured times (fit_cost)"
    )


def _tokens(batch: Any) -> Tensor:
    for name in ("tokens", "input_ids"):
        tokens = meta_field(batch, name)
        if isinstance(tokens, Tensor):
            return tokens
    if is_dataclass(batch):
        names = [entry.name for entry in fields(batch)]
    else:
        names = list(batch) if isinstance(batch, dict) else []
    raise ConfigurationError(
        f"cannot tell the cost of a batch of type {type(batch).__name__}: expected a tensor tokens or input_ids, got "
        f"{', '.join(map(str, names)) or 'no fields'}. Pass a function that returns the cost of a batch"
    )
