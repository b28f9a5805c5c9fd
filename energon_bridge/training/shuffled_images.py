"""A control experiment: encoders that give each sample the image of another one.

The order of the stream is random, so these images say nothing about the texts; a model that still gets the texts right
does not need its images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from energon_bridge.models.conversations.multimodal import MultiModalBatch, MultiModalTaskEncoder
from energon_bridge.models.families import ChatTemplateTaskEncoder


class _ShuffledImages:
    """Give each sample of a microbatch the image of the one before it; a microbatch of one sample keeps its image."""

    def batch(self, samples: Sequence[Any]) -> MultiModalBatch:
        """Rotate the images by one row, then batch as usual."""
        images = [sample.visual for sample in samples]
        for sample, visual in zip(samples, images[-1:] + images[:-1], strict=True):
            sample.visual = visual
        batch: MultiModalBatch = super().batch(samples)  # type: ignore[misc]
        return batch


class ShuffledImagesTaskEncoder(_ShuffledImages, MultiModalTaskEncoder):
    """The control of `MultiModalTaskEncoder`."""


class ShuffledImagesChatEncoder(_ShuffledImages, ChatTemplateTaskEncoder):
    """The control of `ChatTemplateTaskEncoder`."""
