"""The learning rate: a linear warm-up and a cosine decay. A function of the step, so there is no state to save."""

from __future__ import annotations

import math

from energon_bridge.training.config import OptimizerConfig


def learning_rate_factor(settings: OptimizerConfig, step: int, max_steps: int) -> float:
    """Return the learning rate of an optimizer step, counted from 0, as a share of the peak."""
    if step < settings.warmup_steps:
        return (step + 1) / (settings.warmup_steps + 1)
    decay_steps = max(1, max_steps - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / decay_steps)
    floor = settings.min_lr / settings.lr
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
