"""The state files of data-parallel ranks, written as Megatron-LM and Megatron-Bridge write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch


def rank_file(
    root: Path,
    iteration: int,
    data_parallel_rank: int,
    *,
    layout: Literal["megatron_lm", "bridge"] = "megatron_lm",
    pipelines: bool = False,
) -> Path:
    """Return the path of one rank's file; Megatron-LM names it differently if there is pipeline parallelism."""
    folder = Path(root) / f"iter_{iteration:07d}"
    if layout == "megatron_lm":
        folder /= "mp_rank_00_000" if pipelines else "mp_rank_00"
    return folder / f"train_dataloader_dprank{data_parallel_rank:03d}.pt"


def write_rank_file(path: Path, state: Any) -> None:
    """Write the state of a rank."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"dataloader_state_dict": state}, path)
