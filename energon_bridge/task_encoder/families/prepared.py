"""Tokenised samples without pixels, as they wait in a packing buffer, and their positions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from energon_bridge.samples import Sample, edataclass
from energon_bridge.task_encoder.families.vision import IMAGE_TYPE, VIDEO_TYPE, Family, Plan
from energon_bridge.task_encoder.mrope import Grid, mrope_positions


@edataclass
class PreparedSample(Sample):
    """A tokenised sample whose images are not processed yet, with the tensors of MultiModalSample.

    `plans` belong to the images and videos in `images` and `videos`, in the order of their placeholders.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    mm_token_type_ids: Tensor
    plans: tuple[Plan, ...]
    images: list[Any]
    videos: list[Any]
    answer: str

    @property
    def visual_tokens(self) -> int:
        """Number of image and video tokens."""
        return sum(plan.tokens for plan in self.plans)


def positions_of(sample: PreparedSample, family: Family | None) -> Tensor | None:
    """Return the positions on three axes, int64 of shape (3, tokens); None for models without them."""
    if family is None or not family.merge_size:
        return None
    grids: dict[int, list[Grid]] = {IMAGE_TYPE: [], VIDEO_TYPE: []}
    for plan in sample.plans:
        time, height, width = plan.grid or (1, 0, 0)
        if plan.kind == "image":
            grids[IMAGE_TYPE].append(Grid(time, height, width))
            continue
        interval = family.tokens_per_second * plan.second_per_grid if family.tokens_per_second else 1.0
        # Separate runs, with times between them, are separate grids.
        grids[VIDEO_TYPE] += [Grid(time // len(plan.runs), height, width, interval)] * len(plan.runs)
    return mrope_positions(sample.mm_token_type_ids.tolist(), grids, family.merge_size)
