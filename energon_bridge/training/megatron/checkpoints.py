"""Checkpoints of a megatron-core run: model, optimizer and data together, written atomically.

They are folders `RUN/checkpoints/step-0000200`::

    *.distcp, .metadata, common.pt, metadata.json   model and optimizer, in megatron-core's distributed format
    run.pt                                          step, state of the data of all ranks, the sizes of the model
    complete.json                                   the name and size of every other file; written last

A checkpoint is written to `.step-0000200.part`, flushed to disk and renamed. So a folder with the final name that lacks
files listed in its `complete.json` was damaged later, for example by an incomplete copy, and is skipped.

The format has whole tensors, whatever ranks wrote their parts: a checkpoint can be read on any number of data-parallel
ranks, and with other tp and pp. Learning rate and random numbers are functions of the step, and have no state.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from energon_bridge.core.errors import ConfigurationError, StorageError
from energon_bridge.core.storage import no_room, write_file
from energon_bridge.training.config import SIZES
from energon_bridge.training.megatron.ranks import Ranks
from energon_bridge.training.megatron.step import Training

logger = logging.getLogger(__name__)

_MANIFEST = "complete.json"
_RUN = "run.pt"
_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first; a warning names incomplete ones."""
    complete = []
    for path in sorted(folder.glob("step-*")):
        if missing := _missing(path):
            logger.warning("skipping the incomplete checkpoint %s: %s", path, missing)
        else:
            complete.append(path)
    return complete


def save_checkpoint(
    training: Training,
    folder: Path,
    step: int,
    data: dict[str, Any],
    *,
    keep: int,
    feedback: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint and remove old ones; all ranks must call this.

    Args:
        training: The model and optimizer to save.
        folder: The folder of the checkpoints.
        step: Optimizer steps done.
        data: The state of the data of the whole run.
        keep: Number of checkpoints to keep, the latest ones; 0 keeps all.
        feedback: The state of the weights that follow the losses.

    Raises:
        StorageError: The disk of a rank is full. What was written of the checkpoint is removed; earlier ones stay.
    """
    target = folder / f"step-{step:07d}"
    part = target.with_name(f".{target.name}.part")
    if training.ranks.main:
        for leftover in folder.glob(".step-*.part"):
            shutil.rmtree(leftover)
        part.mkdir(parents=True)
    dist.barrier()
    with _full_disk_said(part):
        dist_checkpointing.save(
            _parts(training, is_loading=False), str(part), SynchronousSave(), content_metadata=_SHARDING
        )
        if training.ranks.main:
            run = {"step": step, "data": data, "feedback": feedback, "model": _sizes(training)}
            torch.save(run, part / _RUN)
            _finish(part, target)
    if training.ranks.main:
        for old in complete_checkpoints(folder)[:-keep] if keep else []:
            shutil.rmtree(old)
    dist.barrier()


@contextmanager
def _full_disk_said(part: Path) -> Iterator[None]:
    """Raise what a full disk caused on any rank as StorageError, without what was written so far."""
    try:
        yield
    except (CheckpointException, OSError, RuntimeError) as error:
        failures = [one for one, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
        full = next((one for one in failures if isinstance(one, StorageError)), None)
        full = full or no_room(error, [part]) or _probed(part)
        if full is None:
            raise
        shutil.rmtree(part, ignore_errors=True)
        raise full from error


def _probed(part: Path) -> StorageError | None:
    """Return the error of a disk that takes no further file, which `torch.save` does not say; None if it takes one."""
    try:
        write_file(part / "room", (bytes(1 << 16),))
    except OSError as error:
        return no_room(error, [part], " the checkpoint")
    return None


def load_checkpoint(training: Training, path: Path) -> tuple[int, dict[str, Any], dict[str, Any] | None]:
    """Load a checkpoint; all ranks must call this. Return its step, and the states of its data and its feedback.

    Raises:
        ConfigurationError: The model has other sizes than the one in the checkpoint.
    """
    run = torch.load(path / _RUN, weights_only=True)
    sizes = _sizes(training)
    if different := [name for name in sizes if run["model"].get(name) != sizes[name]]:
        told = ", ".join(f"{name}={sizes[name]} (there: {run['model'].get(name)})" for name in different)
        raise ConfigurationError(
            f"the checkpoint {path} belongs to another model: {told}. Set model.* as when the run started; tp, pp, cp "
            "and the number of processes may change"
        )
    state = dist_checkpointing.load(_parts(training, is_loading=True), str(path))
    training.part.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    return int(run["step"]), run["data"], run.get("feedback")


def _sizes(training: Training) -> dict[str, str | int]:
    model = training.config.model
    return {f"model.{name}": getattr(model, name) for name in SIZES}


def _parts(training: Training, *, is_loading: bool) -> dict[str, Any]:
    model = training.part.sharded_state_dict(metadata=_metadata(training.ranks))
    optimizer = training.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=_metadata(training.ranks))
    return {"model": model, "optimizer": optimizer}


def _metadata(ranks: Ranks) -> dict[str, Any]:
    return {**_SHARDING, "dp_cp_group": ranks.groups.dp_cp}


def _finish(part: Path, target: Path) -> None:
    """Flush the files to disk, list them, and rename the folder."""
    files = sorted(path for path in part.rglob("*") if path.is_file())
    for path in files:
        _flush(path)
    manifest = part / _MANIFEST
    manifest.write_text(json.dumps({path.relative_to(part).as_posix(): path.stat().st_size for path in files}))
    _flush(manifest)
    _flush(part)
    if target.exists():  # from a run that went back to an earlier checkpoint
        shutil.rmtree(target)
    os.replace(part, target)
    _flush(target.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _missing(path: Path) -> str | None:
    """Return the missing part of a checkpoint; None if it is complete."""
    try:
        listed: dict[str, int] = json.loads((path / _MANIFEST).read_text())
    except (OSError, ValueError):
        return f"no readable {_MANIFEST}"
    for name, size in listed.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, expected {size}"
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Writing.
#
# megatron-core's own strategy writes in the background: for each checkpoint, every rank spawns a process that imports
# the training program again and forks others. This one writes the same format before it returns.


class SynchronousSave(TorchDistSaveShardedStrategy):
    """Save the parts of all ranks, one file each."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Write; all ranks must call this."""
        parts, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        save(
            mcore_to_pyt_state_dict(parts, False),
            storage_writer=_Writer(checkpoint_dir, single_file_per_rank=True, sync_files=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


class _Writer(FileSystemWriter):
    """Says on the rank itself that its disk is full, since other ranks get an exception without its cause."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            count = sum(item.tensor_storage_size() or 0 for item in plan.items)
            if (full := no_room(error, [self.path], f" {count:,} bytes of the checkpoint")) is None:
                raise
            raise full from error
