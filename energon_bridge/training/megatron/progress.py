"""What a megatron-core run reports: a log line per interval and `metrics.jsonl`, as the other trainer writes it.

Losses stay on the device until they are reported: until then only the last stages have them.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from energon_bridge.dataloader import EnergonDataloader
from energon_bridge.training.megatron.ranks import Ranks
from energon_bridge.training.megatron.step import over_replicas

logger = logging.getLogger(__name__)


class Progress:
    """Keep the losses of the steps; all ranks report at the same steps."""

    def __init__(self, metrics_path: Path, ranks: Ranks, data: EnergonDataloader, *, max_steps: int) -> None:
        self.metrics_path = metrics_path
        self.ranks = ranks
        self.data = data
        self.max_steps = max_steps
        self._steps: list[tuple[int, float, Tensor]] = []
        self.restart_clock()

    def add(self, step: int, lr: float, sums: Tensor, *, samples: int) -> None:
        """Keep what `train_step` returned for a step, and how many samples this replica had in it."""
        self._steps.append((step, lr, sums))
        self._samples += samples
        self._timed += 1

    def restart_clock(self) -> None:
        """Leave out of the speed what happened since the last report."""
        self._started = time.perf_counter()
        self._waited = self.data.wait_seconds
        self._samples = self._timed = 0

    def write(self) -> float | None:
        """Append the steps that are not written yet; return their mean loss, None if there are none."""
        if not self._steps:
            return None
        sums = over_replicas(torch.stack([sums for _, _, sums in self._steps]), self.ranks)
        losses: list[float] = (sums[:, 0] / sums[:, 1].clamp(min=1.0)).tolist()
        if self.ranks.main:
            with self.metrics_path.open("a") as file:
                for (step, lr, _), loss in zip(self._steps, losses, strict=True):
                    file.write(json.dumps({"step": step, "loss": loss, "lr": lr}) + "\n")
        self._steps.clear()
        return sum(losses) / len(losses)

    def log(self, step: int, lr: float, loss: float, norm: float) -> None:
        """Write a log line about the steps since the last one."""
        samples = torch.tensor(float(self._samples), device=self.ranks.device)
        dist.all_reduce(samples, group=self.ranks.groups.dp)
        if self.ranks.main:
            elapsed = max(1e-9, time.perf_counter() - self._started)
            logger.info(
                "step %d/%d  loss %.4f  lr %.2e  grad norm %.2f  %.0f samples/s  %.0f ms/step  "
                "waiting for data %.1f %%",
                step,
                self.max_steps,
                loss,
                lr,
                norm,
                float(samples) / elapsed,
                1000 * elapsed / max(1, self._timed),
                100 * (self.data.wait_seconds - self._waited) / elapsed,
            )
        self.restart_clock()
