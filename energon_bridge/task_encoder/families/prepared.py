"""Samples between tokens and pixels: what waits in a packing buffer, and the positions that follow from it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from energon_bridge.samples import Sample, edataclass
from energon_bridge.task_encoder.families.vision import IMAGE_TYPE, VIDEO_TYPE, Family, Plan
from energon_bridge.task_encoder.mrope import Grid, mrope_positions


@edataclass
class PreparedSample(Sample):
    """A tokenised sample whose images are not processed yet; the tensors are those of MultiModalSample.

    `plans` are those of the images and videos that `images` and `videos` hold, in the order of their places.
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
        """Tokens that stand for images and videos."""
        return sum(plan.tokens for plan in self.plans)


def positions_of(sample: PreparedSample, family: Family | None) -> Tensor | None:
    """Return the positions of three axes, int64 of shape (3, tokens); None for models that have none."""
    if family is None or not family.merge_size:
        return None
    grids: dict[int, list[Grid]] = {IMAGE_TYPE: [], VIDEO_TYPE: []}
    for plan in sample.plans:
        time, height, width = plan.grid or (1, 0, 0)
        if plan.kind == "image":
            grids[IMAGE_TYPE].append(Grid(time, height, width))
            continue
        interval = family.tokens_per_second * plan.second_per_grid if family.tokens_per_second else 1.0
        # Runs that stand apart, with their times in between, are grids of their own.
        grids[VIDEO_TYPE] += [Grid(time // len(plan.runs), height, width, interval)] * len(plan.runs)
    return mrope_positions(sample.mm_token_type_ids.tolist(), grids, family.merge_size)
