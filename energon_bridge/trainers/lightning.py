"""The data under Lightning: a callback for its loggers, a progress bar with epochs and waiting time, a report at the
end of a run, and weights of a mix that follow the losses.

All read the trainer's training loader, an `EnergonDataloader`; with any other loader they show nothing of the data. The
figures of the loggers and the bar are those of one rank, the one that logs; steps that are not logged cost nothing.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from energon_bridge.core.dataloader import EnergonDataloader
from energon_bridge.core.errors import ConfigurationError, optional_packages
from energon_bridge.tools.report.page import write_report
from energon_bridge.tools.report.recorder import RankSummary, RunRecorder, gathered, summary
from energon_bridge.trainers.feedback import MixFeedback

with optional_packages():
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import TQDMProgressBar


class _Clock:
    """Measures the share of time spent waiting for data since the last call."""

    def __init__(self) -> None:
        self._at = self._waited = 0.0

    def share(self, loader: EnergonDataloader) -> float:
        """Return the share since the last call, in [0, 1]; 0 at the first one."""
        now, waited = time.perf_counter(), loader.wait_seconds
        passed, spent = now - self._at, waited - self._waited
        first = not self._at
        self._at, self._waited = now, waited
        return 0.0 if first or passed <= 0 else min(1.0, max(0.0, spent / passed))


class DataMonitor(Callback):
    """Log the data loader's metrics to the trainer's loggers, as `data/…`.

    These are all of `EnergonDataloader.metrics()`, and `data/wait_share`: the share of the time since the last log that
    the training loop spent waiting for data.

    Args:
        every_n_steps: Optimizer steps between two logs; None: the trainer's `log_every_n_steps`.
        export: Called with the same numbers, by their own names, as `PrometheusExporter(port=9400).update` is.

    Raises:
        ConfigurationError: every_n_steps is below 1.
    """

    def __init__(
        self, *, every_n_steps: int | None = None, export: Callable[[Mapping[str, float]], object] | None = None
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigurationError(f"DataMonitor: every_n_steps must be at least 1, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self.export = export
        self._clock = _Clock()
        self._step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._step = trainer.global_step
        loader = _loader(trainer)
        if loader is not None:
            self._clock.share(loader)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log at the end of an interval."""
        step = trainer.global_step
        every = self.every_n_steps or trainer.log_every_n_steps
        if step == self._step or step % max(1, every):
            return
        self._step = step
        loader = _loader(trainer)
        if loader is None or not trainer.is_global_zero:
            return
        metrics = loader.metrics() | {"wait_share": self._clock.share(loader)}
        if self.export is not None:
            self.export(metrics)
        for logger in trainer.loggers:
            logger.log_metrics({f"data/{name}": value for name, value in metrics.items()}, step=step)


class RunReport(Callback):
    """Write a page about the run when it ends: losses, waiting, shares of the datasets, what was left out, slow ones.

    The page is one HTML file that needs no server. It covers the run from its beginning, also after a resume, because
    the callback's state is part of Lightning's checkpoints. A run that fails leaves its page, too.

    Args:
        path: The file; default: `report.html` in the trainer's `default_root_dir`.
        title: Of the page.
        losses: Returns the loss of each step, for modules whose `training_step` returns something else than the loss to
            be shown. Default: the mean of what `training_step` returns for the microbatches of a step.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        title: str = "Training run",
        losses: Callable[[], Mapping[int, float]] | None = None,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.title = title
        self.losses = losses
        self._recorder = RunRecorder()
        self._step = -1
        self._parts: list[Tensor] = []
        self._rate: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._step = trainer.global_step
        self._parts.clear()
        self._recorder.start(_loader(trainer))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the loss of the validation, and exclude it from the time of the step."""
        loss = _validation_loss(trainer, pl_module)
        if loss is not None and math.isfinite(loss) and not trainer.sanity_checking:
            self._recorder.validation.add(trainer.global_step, loss)
        self._recorder.start(_loader(trainer))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note the learning rate: at the end of a step it is already that of the next one."""
        self._rate = _rate(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record a microbatch, and the step that it ends."""
        loader, recorder = _loader(trainer), self._recorder
        step = trainer.global_step
        ended = step != self._step
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            loss = None
        # Lightning divides what training_step returns by the microbatches of a step.
        scale = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        of_batch = getattr(pl_module, "last_loss", None)  # of the training script: the mean of the microbatch's tokens
        of_batch = of_batch if of_batch is not None or loss is None else loss * scale
        recorder.microbatch(loader, batch, step if ended else step + 1, of_batch)
        if loss is not None and self.losses is None:
            self._parts.append(loss.detach())
        if ended:
            self._step = step
            loss = torch.stack(self._parts).mean() * scale if self._parts else None
            recorder.step(loader, step, loss, self._rate)
            self._parts.clear()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the page, with the figures of all ranks."""
        self._write(trainer, gathered(summary(self._recorder, _loader(trainer))), {})

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the page of a run that failed, with the figures of this rank: the others may not be there any more."""
        if not self._recorder.seconds:
            return  # there was no step
        own = summary(self._recorder, _loader(trainer))
        self._write(trainer, [] if own is None else [own], {"ended by": type(exception).__name__})

    def state_dict(self) -> dict[str, Any]:
        """Return the recorded state."""
        return self._recorder.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a recorded state."""
        self._recorder.load_state_dict(state_dict)

    def _write(self, trainer: Trainer, ranks: list[RankSummary], facts: dict[str, object]) -> None:
        if not trainer.is_global_zero:
            return
        if self.losses is not None:
            self._recorder.set_losses(self.losses())
        path = self.path or Path(trainer.default_root_dir) / "report.html"
        write_report(path, ranks, self._recorder, title=self.title, facts=facts)


class MixFeedbackCallback(Callback):
    """Let the weights of the training mix follow the losses: `MixFeedback.step` after each optimizer step.

    The module records the losses: `feedback.record(batch, losses)` in `training_step`. The state of the feedback is
    part of Lightning's checkpoints.

    Args:
        feedback: What the module records losses in.
    """

    def __init__(self, feedback: MixFeedback) -> None:
        self.feedback = feedback
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the first step of the run."""
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Change the weights if an optimizer step has ended and it is time."""
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            loader = _loader(trainer)
            if loader is None:
                raise ConfigurationError(
                    "MixFeedbackCallback needs an EnergonDataloader as the trainer's training loader"
                )
            self.feedback.step(loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the feedback, gathered over the ranks."""
        return self.feedback.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of the feedback."""
        self.feedback.load_state_dict(state_dict)


class EnergonProgressBar(TQDMProgressBar):
    """Lightning's progress bar plus the epochs of data so far and the share of time spent waiting for data."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._clock = _Clock()

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return the figures after the bar."""
        shown = super().get_metrics(trainer, pl_module)
        loader = _loader(trainer)
        if loader is not None and trainer.training:
            epochs = loader.metrics().get("epochs")
            if epochs is not None:
                shown["data_epochs"] = f"{epochs:.2f}"
            shown["waiting"] = f"{100 * self._clock.share(loader):.0f}%"
        return shown


def _rate(trainer: Trainer) -> float | None:
    """Return the learning rate; None without an optimizer."""
    return float(trainer.optimizers[0].param_groups[0]["lr"]) if trainer.optimizers else None


def _validation_loss(trainer: Trainer, module: LightningModule) -> float | None:
    """Return the loss of the validation that has ended: `validation_loss` of the module, or what it logged as such."""
    own = getattr(module, "validation_loss", None)
    if own is not None:
        return float(own)
    logged = [name for name in trainer.callback_metrics if name.startswith("val") and "loss" in name]
    return float(trainer.callback_metrics[min(logged, key=len)]) if logged else None


def _loader(trainer: Trainer) -> EnergonDataloader | None:
    loader = trainer.train_dataloader
    return loader if isinstance(loader, EnergonDataloader) else None
