"""Positions on three axes (time, height, width), as models of the Qwen-VL family take them (M-RoPE).

A text token has the same position on all three axes. The tokens of an image or video are on a grid that begins where
the text before it ended; after it, the text continues at the grid's longer side, so that a picture takes as many
positions as it is wide or high, not as it has tokens. Equal to `get_rope_index` of the models in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from energon_bridge.errors import SampleError


class Grid(NamedTuple):
    """Patches along time, height and width, and how many positions one step in time takes."""

    time: int
    height: int
    width: int
    interval: float = 1.0


def mrope_positions(types: Sequence[int], grids: Mapping[int, Sequence[Grid]], merge_size: int) -> Tensor:
    """Return the positions of a sequence, int64 of shape (3, tokens).

    Args:
        types: The type of each token, 0 for text.
        grids: The grids of each type, in their order, in patches; `merge_size`^2 patches are one token.
        merge_size: Patches along each side of a token.

    Raises:
        SampleError: The tokens of a type are not those of its grids.
    """
    waiting = {kind: iter(found) for kind, found in grids.items()}
    parts: list[Tensor] = []
    position = 0
    for kind, group in groupby(types):
        count = sum(1 for _ in group)
        if kind == 0:
            parts.append((torch.arange(count) + position).expand(3, -1))
            position += count
            continue
        while count > 0:
            grid = next(waiting[kind], None)
            height, width = (0, 0) if grid is None else (grid.height // merge_size, grid.width // merge_size)
            if grid is None or not 0 < grid.time * height * width <= count:
                raise SampleError(f"{count} tokens of type {kind} do not match the grid {grid} merged by {merge_size}")
            # in float32, as in the models, so that both round alike
            times = (torch.arange(grid.time) * torch.tensor(grid.interval)).long()
            axes = torch.meshgrid(times, torch.arange(height), torch.arange(width), indexing="ij")
            parts.append(torch.stack(axes).reshape(3, -1) + position)
            position += max(grid.height, grid.width) // merge_size
            count -= grid.time * height * width
    return torch.cat(parts, dim=1) if parts else torch.zeros(3, 0, dtype=torch.int64)
