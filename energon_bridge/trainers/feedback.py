"""Weights of a mix that follow the losses of its datasets, decided during the run and exact after a resume.

A policy gets the mean loss of each dataset and the weights that hold, and returns new ones. They hold from the first
draw that no rank has delivered; the loader's state has them, this object's state what was recorded since.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from energon_bridge.core.errors import ConfigurationError, StateError
from energon_bridge.trainers.replica.groups import all_told

logger = logging.getLogger(__name__)

MixPolicy = Callable[[Mapping[str, float], Mapping[str, float]], Mapping[str, float]]
"""`policy(losses, weights)` returns new weights, from the mean loss per token of each dataset that was seen since the
last change, and the weights that hold; all by path of the dataset."""

_Sums = dict[str, tuple[list[float], int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoReMi:
    """Raise the weights of datasets on which the model is worse than a reference model (group DRO, as in DoReMi).

    At each change a weight is multiplied by `exp(step_size * excess)`, the excess being the loss above the reference,
    at least 0. The weights are then scaled to sum to 1 and mixed with equal ones.

    Attributes:
        reference: Loss per token of the reference model, by path of the dataset.
        step_size: How far one update goes.
        smoothing: Share of equal weights in the result, in [0, 1]; above 0, no dataset loses all its weight.

    Raises:
        ConfigurationError: A number is out of its range; or, when called, a dataset has no reference.
    """

    reference: Mapping[str, float]
    step_size: float = 1.0
    smoothing: float = 1e-3

    def __post_init__(self) -> None:
        if not (0 < self.step_size < math.inf and 0 <= self.smoothing <= 1):
            raise ConfigurationError(
                f"DoReMi needs a step_size above 0 and a smoothing in [0, 1], got {self.step_size} and {self.smoothing}"
            )

    def __call__(self, losses: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
        """Return the new weights; a dataset that was not seen has no excess."""
        missing = sorted(set(losses) - set(self.reference))
        if missing:
            raise ConfigurationError(f"DoReMi: reference has no loss for {', '.join(missing)}")
        excess = {name: max(0.0, losses.get(name, -math.inf) - self.reference.get(name, 0.0)) for name in weights}
        drawn = [name for name in weights if weights[name]]
        largest = max(excess[name] for name in drawn)  # taken off every exponent, so that none overflows
        raised = dict.fromkeys(weights, 0.0)
        raised |= {name: weights[name] * math.exp(self.step_size * (excess[name] - largest)) for name in drawn}
        total = math.fsum(raised.values())
        return {
            name: (1 - self.smoothing) * value / total + self.smoothing / len(raised) for name, value in raised.items()
        }


class _Weighable(Protocol):
    def set_weights(self, weights: Mapping[str, float]) -> int: ...


class MixFeedback:
    """Changes the weights of a mix according to the losses on its datasets.

    After each microbatch call `record`, after each optimizer step `step`, on all data-parallel ranks. Save
    `state_dict()` beside the loader's state. The same losses give the same weights on any number of ranks.

    Args:
        policy: Computes new weights from losses: `DoReMi`, or a function of your own. If it has `state_dict` and
            `load_state_dict`, they are part of the state here.
        weights: The weights that the mix begins with, by path of the dataset.
        every: Optimizer steps between two changes.
        group: The data-parallel process group; default: all processes.

    Raises:
        ConfigurationError: every is below 1, or there are no weights.
    """

    def __init__(
        self,
        policy: MixPolicy,
        weights: Mapping[str, float],
        *,
        every: int = 100,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if every < 1 or not weights:
            raise ConfigurationError(
                f"MixFeedback needs weights, and `every` of at least 1; got {dict(weights)} and {every}"
            )
        self.policy = policy
        self.weights = dict(weights)
        self.every = every
        self.group = group
        self.changes: list[tuple[int, dict[str, float]]] = []
        self._steps = 0
        self._sums: _Sums = {}

    def record(self, batch: Any, losses: Tensor) -> None:
        """Record the losses of a microbatch's tokens.

        Args:
            batch: A batch with `segments` and `loss_mask`, as the multimodal and chat-template encoders make them.
            losses: Loss of each token, [rows, tokens], as `loss_mask` is.

        Raises:
            ConfigurationError: The batch has no segments, the shapes differ, or a loss is not finite.
        """
        for name, (total, tokens) in losses_by_dataset(batch, losses).items():
            if not math.isfinite(total):
                raise ConfigurationError(
                    f"MixFeedback: the loss on {name} is {total}, which cannot set weights. Skip the microbatch"
                )
            self._add(name, [total], tokens)

    def step(self, loader: _Weighable) -> int | None:
        """Count an optimizer step and, if it is time, change the weights; returns the global draw they hold from."""
        self._steps += 1
        if self._steps % self.every:
            return None
        sums = self._gathered()
        self._sums = {}
        losses = {name: math.fsum(totals) / tokens for name, (totals, tokens) in sorted(sums.items()) if tokens}
        unknown = sorted(set(losses) - set(self.weights))
        if unknown:
            raise ConfigurationError(
                f"MixFeedback: batches have samples of {', '.join(unknown)}, which have no weight. Add them to the "
                f"weights of {', '.join(sorted(self.weights))}"
            )
        new = {name: float(weight) for name, weight in self.policy(losses, dict(self.weights)).items()}
        draw = loader.set_weights(new)
        self.weights = new
        self.changes.append((draw, new))
        shown = ", ".join(
            f"{name} {weight:.4g} (loss {losses.get(name, math.nan):.4g})" for name, weight in new.items()
        )
        logger.info("weights of the mix from global draw %d on: %s", draw, shown)
        return draw

    def state_dict(self) -> dict[str, Any]:
        """Return weights, changes, and what all ranks have recorded since the last one: all of them must call this."""
        of_policy = getattr(self.policy, "state_dict", None)
        return {
            "steps": self._steps,
            "weights": dict(self.weights),
            "changes": [[draw, dict(weights)] for draw, weights in self.changes],
            "sums": {name: [list(totals), tokens] for name, (totals, tokens) in self._gathered().items()},
            "policy": of_policy() if of_policy is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, written on any number of ranks.

        Raises:
            StateError: It is of other datasets.
        """
        if set(state["weights"]) != set(self.weights):
            raise StateError(
                f"the state of MixFeedback has weights for {', '.join(sorted(state['weights']))}, but this run has "
                f"{', '.join(sorted(self.weights))}. Use the weights that the run started with"
            )
        self._steps = state["steps"]
        self.weights = dict(state["weights"])
        self.changes = [(draw, dict(weights)) for draw, weights in state["changes"]]
        first = not dist.is_initialized() or dist.get_rank(self.group) == 0  # what was recorded counts once
        self._sums = {name: (list(totals), tokens) for name, (totals, tokens) in state["sums"].items()} if first else {}
        load = getattr(self.policy, "load_state_dict", None)
        if load is not None:
            load(state["policy"])

    def _add(self, name: str, totals: list[float], tokens: int) -> None:
        known, before = self._sums.get(name, ([], 0))
        self._sums[name] = ([*known, *totals], before + tokens)

    def _gathered(self) -> _Sums:
        """Return what all ranks have recorded; the single numbers, so that their exact sum has no order."""
        merged: _Sums = {}
        for sums in all_told(self._sums, self.group):
            for name, (totals, tokens) in sums.items():
                known, before = merged.get(name, ([], 0))
                merged[name] = ([*known, *totals], before + tokens)
        return merged


def losses_by_dataset(batch: Any, losses: Tensor) -> dict[str, tuple[float, int]]:
    """Return the sum of the losses of the learned tokens of each dataset in a batch, and how many tokens these are.

    Args:
        batch: A batch with `segments` and `loss_mask` ([rows, tokens]), packed or not.
        losses: Loss of each token, [rows, tokens].

    Raises:
        ConfigurationError: The batch has no segments, or the shapes differ.
    """
    segments = getattr(batch, "segments", None)
    mask = getattr(batch, "loss_mask", None)
    if segments is None or mask is None or losses.shape != mask.shape:
        raise ConfigurationError(
            "losses by dataset need a batch with segments and loss_mask, and a loss for each token: got a "
            f"{type(batch).__name__} with loss_mask {None if mask is None else tuple(mask.shape)} and losses "
            f"{tuple(losses.shape)}"
        )
    learned = mask.to(device=losses.device, dtype=torch.float64)
    sums = torch.cumsum(torch.where(learned > 0, losses.detach().double() * learned, 0.0), 1)
    both = torch.stack([sums, torch.cumsum(learned, 1)]).cpu()
    losses_by_name: dict[str, tuple[float, int]] = {}
    for row, parts in enumerate(segments):
        for part in parts:
            first = part.start
            last = part.start + part.length - 1
            total, tokens = (both[:, row, last] - (both[:, row, first - 1] if first else 0.0)).tolist()
            known, before = losses_by_name.get(part.dataset, (0.0, 0))
            losses_by_name[part.dataset] = known + total, before + round(tokens)
    return losses_by_name
