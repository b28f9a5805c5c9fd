"""The report of a run under Lightning: recorded step by step, written when the run ends."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from energon_bridge.core.errors import optional_packages
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.tools.report.page import write_report
from energon_bridge.tools.report.recorder import Curve, RankSummary, RunRecorder, gathered, spec_of, summary
from energon_bridge.trainers.lightning import training_loader

with optional_packages():
    from lightning.pytorch import Callback, LightningModule, Trainer


class RunReport(Callback):
    """Write a page about the run when it ends: losses, waiting, draws of the datasets, what was left out, slow batches.

    The page is one HTML file that needs no server. It covers the run from its beginning, also after a resume, because
    the callback's state is part of Lightning's checkpoints. A run that fails leaves its page, too.

    Args:
        path: The file; default: `report.html` in the trainer's `default_root_dir`.
        title: Of the page.
        losses: Returns the loss of each step, for modules whose `training_step` returns something else than the loss to
            be shown. Default: the mean of what `training_step` returns for the microbatches of a step.
        validations: The same of validations. Default: those that the callback, or its state, has seen.
        stopped: Returns whether the process was asked to stop and has to end soon: the report then has no pages of
            samples, which are read from the data. Default: whether Lightning has received SIGTERM.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        title: str = "Training run",
        losses: Callable[[], Mapping[int, float]] | None = None,
        validations: Callable[[], Mapping[int, float]] | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.title = title
        self.losses = losses
        self.validations = validations
        self.stopped = stopped
        self._recorder = RunRecorder()
        self._step = -1
        self._has_step = False
        self._parts: list[Tensor] = []
        self._rate: float | None = None
        self._at_end: list[RankSummary] | None = None
        self._spec: DatasetSpec | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._step = trainer.global_step
        self._parts.clear()
        self._at_end = None
        self._spec = spec_of(training_loader(trainer))
        self._recorder.start(training_loader(trainer))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the loss of the validation, and exclude it from the time of the step."""
        loss = _validation_loss(trainer, pl_module)
        if loss is not None and math.isfinite(loss) and not trainer.sanity_checking:
            self._recorder.validation.add(trainer.global_step, loss)
            if self._at_end is not None:  # the one after training, whose page is written
                self._write(trainer, self._at_end, {})
        self._recorder.start(training_loader(trainer))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Remember the learning rate: at the end of the step, the scheduler has already set that of the next one."""
        self._rate = _rate(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record a microbatch, and the step that it ends."""
        loader = training_loader(trainer)
        recorder = self._recorder
        step = trainer.global_step
        ended = step != self._step
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            loss = None
        # Lightning divides what training_step returns by the microbatches of a step.
        scale = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        of_batch = getattr(pl_module, "last_row_losses", None)  # of the training script, which returns sums
        of_batch = of_batch if of_batch is not None or loss is None else loss * scale
        recorder.microbatch(loader, batch, step if ended else step + 1, of_batch)
        if loss is not None and self.losses is None:
            self._parts.append(loss.detach())
        if ended:
            self._step = step
            self._has_step = True
            loss = torch.stack(self._parts).mean() * scale if self._parts else None
            recorder.step(loader, step, loss, self._rate)
            self._parts.clear()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the page, with the figures of all ranks."""
        self._at_end = gathered(summary(self._recorder, training_loader(trainer)))
        self._write(trainer, self._at_end, {})

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the page of a run that failed, with the figures of this rank: the others may not be there any more."""
        if not self._has_step:
            return  # a resume that was refused leaves the page of the run as it is
        own = summary(self._recorder, training_loader(trainer))
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
        if self.validations is not None:
            self._recorder.validation = Curve.of(self.validations())
        path = self.path or Path(trainer.default_root_dir) / "report.html"
        hurries = trainer.received_sigterm if self.stopped is None else self.stopped()
        facts = {"ended by": "SIGTERM"} | facts if hurries else facts
        spec = None if hurries else self._spec
        write_report(path, ranks, self._recorder, title=self.title, facts=facts, spec=spec)


def _validation_loss(trainer: Trainer, module: LightningModule) -> float | None:
    """Return the loss of the validation that has ended: `validation_loss` of the module, or what it logged as such."""
    own = getattr(module, "validation_loss", None)
    if own is not None:
        return float(own)
    logged = [name for name in trainer.callback_metrics if name.startswith("val") and "loss" in name]
    return float(trainer.callback_metrics[min(logged, key=len)]) if logged else None


def _rate(trainer: Trainer) -> float | None:
    """Return the learning rate; None without an optimizer."""
    return float(trainer.optimizers[0].param_groups[0]["lr"]) if trainer.optimizers else None
