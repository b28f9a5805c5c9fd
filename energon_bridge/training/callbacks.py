"""Lightning callbacks of a run: reports of its progress, and checkpoints.

A log line per interval, and `metrics.jsonl` with one line per optimizer step: an object with `step`, `loss` and `lr`.
One with `step` and `validation_loss` follows each validation. Numbers are written so that reading them back gives the
same bits. A run that was killed and resumed runs some steps again; their lines replace the earlier ones.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import time
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from energon_bridge.core.dataloader import EnergonDataloader
from energon_bridge.core.errors import did_you_mean, optional_packages
from energon_bridge.core.storage import no_room, write_file
from energon_bridge.trainers.replica.costs import record_time
from energon_bridge.trainers.replica.warmup import CostWarmup
from energon_bridge.training.config import CheckpointConfig
from energon_bridge.training.module import VisionLanguageModule

with optional_packages():
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins.io import TorchCheckpointIO

logger = logging.getLogger(__name__)


class ProgressReporter(Callback):
    """Write the training line (loss, speed, part of the time that waited for data), and record losses in metrics.jsonl.

    Losses stay on the device until they are reported, so that no step waits for the accelerator.
    """

    def __init__(self, metrics_path: Path, *, log_interval: int, save_interval: int) -> None:
        self.metrics_path = metrics_path
        self.log_interval = log_interval
        self.save_interval = save_interval
        self._microbatch_losses: list[Tensor] = []
        self._since_line: list[float] = []  # the losses of the next line
        self._steps: list[tuple[int, float, Tensor]] = []
        self._step = 0
        self._started = 0.0
        self._samples = 0
        self._waited = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._step = trainer.global_step
        self._since_line = losses_since_line(self.metrics_path, self._step, self.log_interval)
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
        """Log and write the validation loss; exclude validation from the speed."""
        assert isinstance(pl_module, VisionLanguageModule)
        self._write(trainer)  # the steps before it
        if trainer.is_global_zero and pl_module.validation_loss is not None:
            data = getattr(trainer, "datamodule", None)
            names = getattr(data, "validation_names", [])
            losses = dict(zip(names, pl_module.validation_losses, strict=False))
            append_validation(self.metrics_path, trainer.global_step, pl_module.validation_loss, losses)
            of_each = "".join(f", {name} {loss:.4f}" for name, loss in losses.items())
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
        self._since_line += losses.tolist()
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
                "step %d/%d  loss %.4f  lr %.2e  %s samples/s  waiting for data %.1f %%",
                trainer.global_step,
                trainer.max_steps,
                sum(self._since_line) / len(self._since_line),
                trainer.optimizers[0].param_groups[0]["lr"],
                rate(float(samples) / elapsed),
                100 * (_wait_seconds(trainer) - self._waited) / elapsed,
            )
        self._since_line.clear()
        self._restart_clock(trainer)


TIMES = "microbatches.jsonl"
"""The file of a run folder with the sizes and seconds of some microbatches."""
_WARM_UP = 10


class MicrobatchTimer(Callback):
    """Write what some microbatches of the first rank hold and how long they take, for `fit_times`.

    With gradient accumulation, the last microbatch of a step is left out: it waits for the gradients of other ranks.

    Args:
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


class CostWarmupCallback(Callback):
    """Time microbatches for a `CostWarmup`, whose state is then part of the checkpoints.

    With gradient accumulation, the last microbatch of a step is left out: it waits for the gradients of other ranks.

    Args:
        cost: By which the ranks are balanced.
    """

    def __init__(self, cost: CostWarmup) -> None:
        self.cost = cost

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock."""
        self._step, self._started = trainer.global_step, 0.0 if self.cost.finished else clock()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the time, and after the last microbatch of a step count that."""
        last = trainer.global_step != self._step
        if not self.cost.finished and not (last and trainer.accumulate_grad_batches > 1):
            self.cost.record(batch, clock() - self._started)
        if last:
            self.cost.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the cost, gathered over the ranks."""
        return self.cost.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of the cost."""
        self.cost.load_state_dict(state_dict)


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
    return read_metric(path, "loss")


def read_metric(path: Path, name: str) -> dict[int, float]:
    """Return a number of each step in `metrics.jsonl` that has it: `loss`, `lr` or `validation_loss`."""
    values: dict[int, float] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):  # the line at which a process was killed
            row = json.loads(line)
            if name in row:
                values[row["step"]] = row[name]
    return dict(sorted(values.items()))


def losses_since_line(path: Path, step: int, interval: int) -> list[float]:
    """Return the losses after the last training line, up to a step at which a run is resumed: the next line's mean.

    Lines come every `interval` steps, a positive number.
    """
    return [loss for number, loss in read_losses(path).items() if step - step % interval < number <= step]


def lacks_validation(path: Path, step: int, interval: int) -> bool:
    """Return whether a run was killed between the checkpoint of a step and the validation that was due after it."""
    return step > 0 and interval > 0 and step % interval == 0 and step not in read_metric(path, "validation_loss")


def rate(samples_per_second: float) -> str:
    """Format samples per second for the training line, with enough digits that slow steps are not 0."""
    return f"{samples_per_second:.0f}" if samples_per_second >= 10 else f"{samples_per_second:.2g}"


def append_metrics(path: Path, steps: Sequence[tuple[int, float]], losses: Sequence[float]) -> None:
    """Append a line to `metrics.jsonl` for each step, given as (number, learning rate), with its loss.

    Lines of these and later steps, which a run left that was killed, and a line cut off by the kill are replaced.
    """
    _append(path, [{"step": step, "loss": loss, "lr": lr} for (step, lr), loss in zip(steps, losses, strict=True)])


def append_validation(path: Path, step: int, loss: float, losses: Mapping[str, float]) -> None:
    """Append the line of a validation after a step; `losses` has those of several datasets, by name."""
    row = {"step": step, "validation_loss": loss}
    _append(path, [row | ({"validation_losses": losses} if losses else {})])


def _append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append lines in place of those of the same steps and of later ones."""
    lines = [f"{json.dumps(row)}\n".encode() for row in rows]
    text = b"".join(lines)
    first = _step(lines[0])
    with path.open("ab+") as file:
        file.seek(max(0, file.tell() - _TAIL))
        tail = file.read().splitlines(keepends=True)
        if not tail or (tail[-1].endswith(b"\n") and _step(tail[-1]) < first):
            file.write(text)
            return
    kept = [
        line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n") and _step(line) < first
    ]
    write_file(path, [*kept, text])
    logger.info("%s: the earlier lines from step %d on are replaced by those of this run", path, rows[0]["step"])


_TAIL = 4096
"""Bytes that hold at least one line of `metrics.jsonl`."""


def _step(line: bytes) -> float:
    """Return the step of a line of `metrics.jsonl`, of a validation a half more; one that cannot be read is later."""
    with suppress(ValueError, KeyError, TypeError):
        row = json.loads(line)
        return float(row["step"]) + ("validation_loss" in row) / 2
    return math.inf


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints.
#
# Written atomically, the latest ones kept. They are Lightning's own, in `RUN/checkpoints/step-0000200.ckpt`: weights,
# optimizer, schedule, loops, and the state of the data. They hold only plain types and load with `weights_only=True`.


_SUFFIX = ".ckpt"


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, oldest first."""
    return sorted(folder.glob(f"step-*{_SUFFIX}"))


def say_complete(step: int, max_steps: int) -> None:
    """Warn that a run has no step left after this one."""
    if step >= max_steps:
        logger.warning("the run is complete at step %d: to go on, raise train.max_steps (%d)", step, max_steps)


def say_fresh_start(run_dir: Path) -> None:
    """Warn that there is nothing to resume, and name a run folder of a like name beside it that has a checkpoint."""
    begun = {path.parent.parent.name for path in run_dir.parent.glob("*/checkpoints/step-*")} - {run_dir.name}
    hint = did_you_mean(run_dir.name, begun)
    logger.warning("no checkpoint in %s: starting at step 0.%s", run_dir, hint)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write a checkpoint next to its final path, flush it to disk, and rename it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint; if the process dies meanwhile, the earlier ones stay intact.

        Raises StorageError, with the name of the file, if the disk is full.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        for leftover in target.parent.glob(f".step-*{_SUFFIX}.part"):
            leftover.unlink()
        temporary = target.with_name(f".{target.name}.part")
        try:
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
        except Exception as error:
            if (full := no_room(error, [temporary])) is None:
                raise
            temporary.unlink(missing_ok=True)  # the run's report may fit then
            raise full from error
        os.replace(temporary, target)


class DueValidation(Callback):
    """Validate before the first step of a resumed run if the earlier one was killed before it came to that.

    Args:
        metrics_path: `metrics.jsonl`, which has the validations that were done.
        interval: Steps between two validations; 0: none during training.
    """

    def __init__(self, metrics_path: Path, *, interval: int) -> None:
        self.metrics_path = metrics_path
        self.interval = interval

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate as Lightning does between two steps."""
        step = trainer.global_step
        due = trainer.is_global_zero and lacks_validation(self.metrics_path, step, self.interval)
        if step >= trainer.max_steps or not trainer.strategy.broadcast(due):
            return
        loop = trainer.fit_loop.epoch_loop.val_loop
        loop.restarting = False  # its counts in the checkpoint are those of the validation before
        trainer.validating = True
        loop.run()
        trainer.training = True


class Checkpointer(Callback):
    """Save at intervals, at the end, and when the process is asked to stop (SIGTERM).

    All ranks save at the same step: the state of the data is gathered from all of them.

    Attributes:
        stopped: Whether the run left on SIGTERM.
    """

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        self.folder = folder
        self.config = config
        self.stopped = False
        self._asked_to_stop = False
        self._saved_step = -1
        self._earlier_handler: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace Lightning's handler of SIGTERM, which raises between two steps, before anything is saved."""
        self._saved_step = trainer.global_step
        self._earlier_handler = signal.signal(signal.SIGTERM, self._ask_to_stop)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if a step is complete and a save is due."""
        step = trainer.global_step
        if step == self._saved_step or (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        stop = self._agree_to_stop(trainer)
        due = self.config.interval > 0 and step % self.config.interval == 0
        if due or stop or step == trainer.max_steps:
            self._save(trainer, step)
        if stop and step < trainer.max_steps:
            logger.warning("received SIGTERM: saved step %d, exiting", step)
            self.stopped = True
            trainer.should_stop = True
            trainer.limit_val_batches = 0  # or Lightning validates before it stops

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give SIGTERM back to Lightning, which restores the handler before its own."""
        signal.signal(signal.SIGTERM, self._earlier_handler)

    def _ask_to_stop(self, signum: int, frame: types.FrameType | None) -> None:
        self._asked_to_stop = True

    def _agree_to_stop(self, trainer: Trainer) -> bool:
        if trainer.world_size == 1:
            return self._asked_to_stop
        # Ranks may receive the signal during different steps, so they agree on one.
        flag = torch.tensor([float(self._asked_to_stop)], device=trainer.strategy.root_device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _save(self, trainer: Trainer, step: int) -> None:
        trainer.save_checkpoint(self.folder / f"step-{step:07d}{_SUFFIX}")
        self._saved_step = step
        if self.config.keep and trainer.is_global_zero:
            for old in list_checkpoints(self.folder)[: -self.config.keep]:
                old.unlink()
