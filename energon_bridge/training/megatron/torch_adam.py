"""megatron-core's distributed optimizer over torch's AdamW: the state that it takes for granted.

Where neither Apex nor TransformerEngine is installed, megatron-core falls back to torch's AdamW, whose state counts
the steps of each parameter. It saves and restores these counts apart from the rest, but cannot do either before the
first step, looks for them among the tensors of a checkpoint, and gives all parameters one and the same count.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor


def complete_torch_state(optimizer: MegatronOptimizer) -> None:
    """Make an optimizer fit to be saved and restored from the start; a fused one is left as it is."""
    for distributed in optimizer.chained_optimizers:
        inner = distributed.optimizer
        if not isinstance(inner, torch.optim.Adam):  # AdamW is one
            continue
        for group in inner.param_groups:
            for parameter in group["params"]:
                inner.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        _restore_with_steps(distributed)


def _restore_with_steps(distributed: Any) -> None:
    restore = distributed._set_main_param_and_optimizer_states

    def restore_with_steps(model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        group, order = distributed.model_param_group_index_map[model_param]
        state = distributed.optimizer.state[distributed.optimizer.param_groups[group]["params"][order]]
        step = state.pop("step")
        restore(model_param, tensors)
        state["step"] = step.clone()

    distributed._set_main_param_and_optimizer_states = restore_with_steps
