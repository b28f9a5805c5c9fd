"""Runs of `trainer: megatron` in forked processes, and what they saw."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forked import become_rank, free_port, run_forked
from megatron.core import parallel_state
from paths import CONFIGS
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPVisionModel,
    LlamaModel,
    LlavaForConditionalGeneration,
)

from energon_bridge.core.dataloader import EnergonDataloader
from energon_bridge.training.config import RunConfig
from energon_bridge.training.config_file import load_config
from energon_bridge.training.megatron.loop import run
from energon_bridge.training.run import RunResult

IMPORTED = (AutoTokenizer, CLIPImageProcessorPil, CLIPVisionModel, LlamaModel, LlavaForConditionalGeneration)
"""What every rank would import on its first use, which takes seconds: here, once for all of them."""


def configuration(dataset: Path, run_dir: Path, *overrides: str, base: str = "smoke.yaml") -> RunConfig:
    """Return a configuration of a tiny run."""
    settings = ["trainer=megatron", f"data.path={dataset}", f"run_dir={run_dir}", "model.num_layers=2"]
    settings += ["train.log_interval=1", "checkpoint.keep=0"]
    return load_config(CONFIGS / base, [*settings, *overrides])


def train(
    config: RunConfig, count: int, *, resume: bool = False, disturb: Callable[[int], None] | None = None
) -> tuple[list[RunResult], list[list[str]]]:
    """Run on `count` ranks.

    Returns:
        The results by rank, and the keys of each global batch, sorted. That the ranks of a replica have the same
        microbatches is checked.
    """
    port = free_port()

    def start(rank: int) -> tuple[RunResult, int, list[list[str]]]:
        gc.freeze()  # collections of megatron-core's need not look at what was imported
        become_rank(rank, count, port)
        logging.disable(logging.WARNING)
        seen = record_keys()
        if disturb is not None:
            disturb(rank)
        result = run(config, resume=resume)
        torch.use_deterministic_algorithms(False)
        return result, rank_of(seen), [keys for _, keys in seen]

    answers = run_forked(count, start)
    replicas = {dp: keys for _, dp, keys in answers}
    assert all(keys == replicas[dp] for _, dp, keys in answers)
    accumulate = config.accumulate(config.parallel.data_parallel_size(count))
    steps = {dp: [keys[i : i + accumulate] for i in range(0, len(keys), accumulate)] for dp, keys in replicas.items()}
    parts = zip(*steps.values(), strict=True)
    batches = [sorted(key for part in step for keys in part for key in keys) for step in parts]
    return [result for result, _, _ in answers], batches


def record_keys() -> list[tuple[int, list[str]]]:
    """Let the data-parallel rank and the keys of every training microbatch be added to the returned list."""
    original = EnergonDataloader.__next__
    seen: list[tuple[int, list[str]]] = []

    def recorded(self: EnergonDataloader) -> Any:
        batch = original(self)
        seen.append((parallel_state.get_data_parallel_rank(), list(batch.__key__)))
        return batch

    EnergonDataloader.__next__ = recorded  # type: ignore[method-assign]
    return seen


def rank_of(seen: list[tuple[int, list[str]]]) -> int:
    """Return the data-parallel rank that a record is of."""
    ranks = {rank for rank, _ in seen}
    return ranks.pop() if len(ranks) == 1 else -1
