"""A cost of microbatches whose weights are fitted to the times of the first steps of the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from energon_bridge.core.errors import ConfigurationError, StateError
from energon_bridge.trainers.replica.costs import BatchCost, FittedCost, counts_of, fit_counts
from energon_bridge.trainers.replica.groups import all_told

logger = logging.getLogger(__name__)


class CostWarmup:
    """A cost for `make_balance` that times the microbatches of some steps, and then weighs by these times.

    All ranks get the weights that the first one fits to the times of all, and keep them: they are in the state, and are
    fitted again only if `load_state_dict` is asked to, as on another machine.

    Examples:
        >>> cost = CostWarmup(steps=2, skip=0)
        >>> for step in range(2):
        ...     for length in range(10 + step, 60, 10):
        ...         cost.record({"tokens": torch.zeros(2, length)}, 0.1 + 0.002 * length)
        ...     changed = cost.step()
        >>> round(cost.fitted.constant, 6), round(cost.fitted.cost.tokens, 6)
        (0.1, 0.001)

    Args:
        start: The cost until then.
        steps: Steps of the optimizer whose microbatches are timed.
        skip: Steps before them, in which the machine warms up.
        group: The data-parallel process group; default: all processes.

    Attributes:
        weights: The cost of now. In total it weighs the timed microbatches as `start` did.
        fitted: What was found, with seconds for its weights; None before, and if nothing could be fitted.

    Raises:
        ConfigurationError: A number is out of range.
    """

    def __init__(
        self, start: BatchCost | None = None, *, steps: int = 50, skip: int = 5, group: dist.ProcessGroup | None = None
    ) -> None:
        if steps < 1 or skip < 0:
            raise ConfigurationError(f"CostWarmup: steps={steps} must be at least 1, and skip={skip} at least 0")
        self.weights = start or BatchCost()
        self.steps = steps
        self.skip = skip
        self.group = group
        self.fitted: FittedCost | None = None
        self._done = 0
        self._rows: list[list[float]] = []

    @property
    def finished(self) -> bool:
        """Whether the weights are those of the rest of the run."""
        return self._done >= self.skip + self.steps

    def __call__(self, batch: Any) -> float:
        return self.weights(batch)

    @contextmanager
    def timed(self, batch: Any) -> Iterator[None]:
        """Time the forward and backward pass of a microbatch; of no effect once the warm-up is over."""
        if self.finished:
            yield
            return
        start = _now()
        yield
        self.record(batch, _now() - start)

    def record(self, batch: Any, seconds: float) -> None:
        """Record the time of a microbatch, measured in another way."""
        if self.skip <= self._done < self.skip + self.steps:
            self._rows.append([*counts_of(batch, self.weights.patch_size), seconds])

    def step(self) -> bool:
        """Count a step of the optimizer; all ranks must call it. Return whether the weights change with it."""
        last = self.skip + self.steps
        self._done = min(self._done, last) + 1  # one beyond the last: it was fitted
        if self._done != last:
            return False
        rows = self._gathered()
        before = self.weights
        self._rows = []
        answer: list[Any] = [None]
        if not dist.is_initialized() or dist.get_rank(self.group) == 0:
            answer = [_fit(rows, before)]
        if dist.is_initialized():
            source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
            dist.broadcast_object_list(answer, src=source, group=self.group)
        if isinstance(answer[0], str):
            logger.warning("the weights of the cost stay %s: %s", before, answer[0])
            return False
        self.fitted, self.weights = answer[0]
        logger.info(
            "costs of microbatches: %s, fitted to %d times; they explain %.0f%% of their variance",
            *(self.weights, len(rows), 100 * self.fitted.r_squared if self.fitted is not None else 0),
        )
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the weights, and the times so far; all ranks must call this."""
        return {
            "steps": self._done,
            "of_steps": [self.skip, self.steps],
            "weights": asdict(self.weights),
            "fitted": None if self.fitted is None else asdict(self.fitted),
            "times": [] if self.finished else self._gathered(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, refit: bool = False) -> None:
        """Continue from a state, written on any number of ranks.

        Args:
            state: From `state_dict`.
            refit: Time and fit again, beginning with the weights of the state: on another machine.

        Raises:
            StateError: It is no state of this class.
        """
        try:
            weights = BatchCost(**state["weights"])
            found = state["fitted"]
            fitted = found and FittedCost(**found | {"cost": BatchCost(**found["cost"])})
            done, (skip, steps) = int(state["steps"]), map(int, state["of_steps"])
            rows = [[float(number) for number in row] for row in state["times"]]
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"no state of CostWarmup ({type(error).__name__}: {error})") from error
        self.weights = weights
        self._rows = []
        if refit:
            self.fitted = None
            self._done = 0
            return
        self.fitted = fitted or None
        self._done = done
        self.skip = skip
        self.steps = steps
        if not dist.is_initialized() or dist.get_rank(self.group) == 0:  # what was recorded counts once
            self._rows = rows

    def _gathered(self) -> list[list[float]]:
        """Return the times of all ranks."""
        return [row for rows in all_told(self._rows, self.group) for row in rows]


def _fit(rows: list[list[float]], before: BatchCost) -> tuple[FittedCost, BatchCost] | str:
    """Return what is fitted to some times, and it in the unit of the cost before; or why there is nothing."""
    try:
        found = fit_counts(((tuple(counts), seconds) for *counts, seconds in rows), before.patch_size)
    except ConfigurationError as error:
        return str(error)

    def total(cost: BatchCost) -> float:
        return sum(cost.tokens * row[0] + cost.attention * row[1] + cost.patches * row[2] for row in rows)

    # The microbatches of a global batch may be weighed in part before, in part after.
    ratio = total(before) / total(found.cost)
    cost = found.cost
    names = ("tokens", "attention", "patches")
    return found, replace(cost, **{name: getattr(cost, name) * ratio for name in names})


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
