"""The data under Lightning: a callback for its loggers, a progress bar with epochs and waiting time, and weights of a
mix that follow the losses. The report of a run, `RunReport`, is imported from here too.

All read the trainer's training loader, an `EnergonDataloader`; with any other loader they show nothing of the data. The
figures of the loggers and the bar are those of one rank, the one that logs; steps that are not logged cost nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from energon_bridge.core.dataloader import EnergonDataloader
from energon_bridge.core.errors import ConfigurationError, optional_packages
from energon_bridge.core.registry import load
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
        now = time.perf_counter()
        waited = loader.wait_seconds
        passed = now - self._at
        spent = waited - self._waited
        first = not self._at
        self._at = now
        self._waited = waited
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
        loader = training_loader(trainer)
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
        loader = training_loader(trainer)
        if loader is None or not trainer.is_global_zero:
            return
        metrics = loader.metrics() | {"wait_share": self._clock.share(loader)}
        if self.export is not None:
            self.export(metrics)
        for logger in trainer.loggers:
            logger.log_metrics({f"data/{name}": value for name, value in metrics.items()}, step=step)


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
        """Remember at which optimizer step this run begins: it may be resumed."""
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Change the weights if an optimizer step has ended and it is time."""
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            loader = training_loader(trainer)
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


class GlobalBatches(Callback):
    """Keep the optimizer steps of the trainer on the global batches of the data; the data module adds it by itself.

    Lightning counts the microbatches of one rank, and steps where that is a multiple of `accumulate_grad_batches`. A
    checkpoint that goes on with another number of them, as on other ranks, has its count converted: else global batches
    would be cut elsewhere from then on.

    Args:
        data: The data module of the trainer.
    """

    def __init__(self, data: Any) -> None:
        self._data = data

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Convert the count of a checkpoint.

        Raises:
            ConfigurationError: It was saved within an optimizer step.
        """
        here = trainer.accumulate_grad_batches
        there = (checkpoint.get(type(self._data).__qualname__) or {}).get("accumulate_grad_batches", here)
        if here == there or not pl_module.automatic_optimization:
            return
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        if rest := progress["total"]["ready"] % there:
            raise ConfigurationError(
                f"the checkpoint was saved within an optimizer step, after {rest} of {there} microbatches of each "
                f"rank, and here a step has {here}: go on with accumulate_grad_batches={there} on as many ranks as "
                "before, or from a checkpoint between two steps"
            )
        for counts in (progress["total"], progress["current"]):
            under_way = counts["ready"] - counts["completed"]  # one, if it was saved in `on_train_batch_end`
            done = counts["ready"] // there * here
            counts.update(ready=done, started=done, processed=done, completed=done - under_way)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the microbatches of an optimizer step with those of a global batch.

        Raises:
            ConfigurationError: They differ.
        """
        step = microbatches_per_step(trainer, pl_module)
        config = self._data.train_dataloader().loader.config
        wanted = config.microbatches_per_global_batch
        if step is None or wanted is None or step * config.dp_size == wanted:
            return
        sizes = f"global_batch_size={self._data.global_batch_size} and micro_batch_size={self._data.micro_batch_size}"
        raise ConfigurationError(
            f"{sizes} are {wanted} microbatches an optimizer step, but the trainer steps after {step} on each of "
            f"{config.dp_size} data-parallel ranks: Trainer(accumulate_grad_batches={wanted // config.dp_size}), or "
            "leave global_batch_size out"
        )


def microbatches_per_step(trainer: Trainer, module: LightningModule) -> int | None:
    """Return the microbatches of a rank that the trainer takes for an optimizer step; None: the module decides that."""
    if not module.automatic_optimization or "dataloader_iter" in signature(module.training_step).parameters:
        return None
    return int(trainer.accumulate_grad_batches)


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
        loader = training_loader(trainer)
        if loader is not None and trainer.training:
            epochs = loader.metrics().get("epochs")
            if epochs is not None:
                shown["data_epochs"] = f"{epochs:.2f}"
            shown["waiting"] = f"{100 * self._clock.share(loader):.0f}%"
        return shown


def training_loader(trainer: Trainer) -> EnergonDataloader | None:
    """Return the trainer's training loader, if it is one of these."""
    loader = trainer.train_dataloader
    return loader if isinstance(loader, EnergonDataloader) else None


def __getattr__(name: str) -> Any:
    """Import `RunReport` when it is asked for: `tools/report`, which stands above the trainers, has it."""
    if name != "RunReport":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return load("run", "report")
