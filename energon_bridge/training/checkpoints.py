"""Checkpoints of a run: written atomically, the latest ones kept.

They are Lightning's own, in `RUN/checkpoints/step-0000200.ckpt`: weights, optimizer, schedule, loops, and the state of
the data. They hold only plain types and load with `weights_only=True`.
"""

from __future__ import annotations

import logging
import os
import signal
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO

from energon_bridge.training.config import CheckpointConfig

logger = logging.getLogger(__name__)

_SUFFIX = ".ckpt"


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of an optimizer step."""
    return folder / f"step-{step:07d}{_SUFFIX}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, oldest first."""
    return sorted(folder.glob(f"step-*{_SUFFIX}"))


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write a checkpoint next to its final path, flush it to disk, and rename it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint; if the process dies meanwhile, the earlier ones stay intact."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        for leftover in target.parent.glob(f".step-*{_SUFFIX}.part"):
            leftover.unlink()
        temporary = target.with_name(f".{target.name}.part")
        with temporary.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)


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
        """Take over SIGTERM: Lightning's handler raises between two steps, before anything is saved."""
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
        trainer.save_checkpoint(checkpoint_path(self.folder, step))
        self._saved_step = step
        if self.config.keep and trainer.is_global_zero:
            for old in list_checkpoints(self.folder)[: -self.config.keep]:
                old.unlink()
