"""Reports of a run: a log line per interval, and `metrics.jsonl` with one line per optimizer step.

Each line of `metrics.jsonl` is an object with `step`, `loss` and `lr`. Numbers are written so that reading them back
gives the same bits. A run that was killed and resumed has some steps twice; the later line counts.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from energon_bridge.dataloader import EnergonDataloader
from energon_bridge.task_encoder.costs import record_time
from energon_bridge.training.module import VisionLanguageModule

logger = logging.getLogger(__name__)


class ProgressReporter(Callback):
    """Log loss, speed and the share of time spent waiting for data, and record the losses.

    Losses stay on the device until they are reported, so that no step waits for the accelerator.
    """

    def __init__(self, metrics_path: Path, *, log_interval: int, save_interval: int) -> None:
        self.metrics_path = metrics_path
        self.log_interval = log_interval
        self.save_interval = save_interval
        self._microbatch_losses: list[Tensor] = []
        self._steps: list[tuple[int, float, Tensor]] = []
        self._step = 0
        self._started = 0.0
        self._samples = 0
        self._waited = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._step = trainer.global_step
        self._restart_clock(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the loss of a microbatch; report at the end of an interval."""
        assert isinstance(pl_module, VisionLanguageModule)
        assert pl_module.last_loss is not None
        self._microbatch_losses.append(pl_module.last_loss)
        self._samples += len(batch.answers)
        step = trainer.global_step
        if step == self._step:
            return
        self._step = step
        loss = torch.stack(self._microbatch_losses).mean() * pl_module.step_scale
        self._microbatch_losses.clear()
        self._steps.append((step, trainer.optimizers[0].param_groups[0]["lr"], loss))
        last = step == trainer.max_steps
        due = step % self.log_interval == 0
        if last or due or (self.save_interval and step % self.save_interval == 0):
            self._write(trainer)
        if last or due:
            self._log(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the validation loss; exclude validation from the speed."""
        assert isinstance(pl_module, VisionLanguageModule)
        if trainer.is_global_zero and pl_module.validation_loss is not None:
            data = getattr(trainer, "datamodule", None)
            names = getattr(data, "validation_names", [])
            losses = zip(names, pl_module.validation_losses, strict=False)
            of_each = "".join(f", {name} {loss:.4f}" for name, loss in losses)
            logger.info(
                "validation after step %d  loss %.4f%s", trainer.global_step, pl_module.validation_loss, of_each
            )
        self._restart_clock(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the rest after an early stop."""
        self._write(trainer)

    def _restart_clock(self, trainer: Trainer) -> None:
        self._started = time.perf_counter()
        self._samples = 0
        self._waited = _wait_seconds(trainer)

    def _write(self, trainer: Trainer) -> None:
        if not self._steps:
            return
        losses = torch.stack([loss for _, _, loss in self._steps])
        if trainer.world_size > 1:
            dist.all_reduce(losses)
            losses /= trainer.world_size
        self.last_loss = float(losses.mean())
        if trainer.is_global_zero:
            append_metrics(self.metrics_path, [(step, lr) for step, lr, _ in self._steps], losses.tolist())
        self._steps.clear()

    def _log(self, trainer: Trainer) -> None:
        # Packs hold different numbers of samples, so ranks differ.
        samples = torch.tensor(float(self._samples), device=trainer.strategy.root_device)
        if trainer.world_size > 1:
            dist.all_reduce(samples)
        if trainer.is_global_zero:
            elapsed = max(1e-9, time.perf_counter() - self._started)
            logger.info(
                "step %d/%d  loss %.4f  lr %.2e  %.0f samples/s  waiting for data %.1f %%",
                trainer.global_step,
                trainer.max_steps,
                self.last_loss,
                trainer.optimizers[0].param_groups[0]["lr"],
                float(samples) / elapsed,
                100 * (_wait_seconds(trainer) - self._waited) / elapsed,
            )
        self._restart_clock(trainer)


TIMES = "microbatches.jsonl"
"""The file of a run folder with the sizes and seconds of some microbatches."""
_WARM_UP = 10


class MicrobatchTimer(Callback):
    """Write what some microbatches of the first rank hold and how long they take, for `fit_times`.

    With gradient accumulation, the last microbatch of a step is left out: it waits for the gradients of other ranks.

    Args:
        path: The file.
        count: Microbatches to write, after ten; 0: none.
    """

    def __init__(self, path: Path, *, count: int) -> None:
        self.path = path
        self._left = count
        self._seen = 0
        self._started = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock."""
        if self._left:
            self._started = clock()
            self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write a line."""
        if not self._left or not trainer.is_global_zero:
            return
        self._seen += 1
        last = trainer.global_step != self._step and trainer.accumulate_grad_batches > 1
        if self._seen > _WARM_UP and not last:
            self._left -= 1
            record_time(self.path, [batch], clock() - self._started)


def clock() -> float:
    """Return the time after the device has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _wait_seconds(trainer: Trainer) -> float:
    loader = trainer.train_dataloader
    return loader.wait_seconds if isinstance(loader, EnergonDataloader) else 0.0


def read_losses(path: Path) -> dict[int, float]:
    """Return the loss of each step in `metrics.jsonl`, the later one of a step that was run again; none without it."""
    losses: dict[int, float] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):  # the line at which a process was killed
            row = json.loads(line)
            losses[row["step"]] = row["loss"]
    return dict(sorted(losses.items()))


def append_metrics(path: Path, steps: Sequence[tuple[int, float]], losses: Sequence[float]) -> None:
    """Append a line to `metrics.jsonl` for each step, given as (number, learning rate), with its loss."""
    with path.open("a") as file:
        for (step, lr), loss in zip(steps, losses, strict=True):
            file.write(json.dumps({"step": step, "loss": loss, "lr": lr}) + "\n")
