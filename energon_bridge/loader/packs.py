"""The packs of a pass that ends: a list that all ranks agree on before its first step.

The draws of the pass are cut into blocks of `packing_buffer_size`, whatever the number of ranks. Each rank encodes the
blocks that are its share and lets the encoder select packs; the lists of references are gathered. From then on a pack
is a row like any other: every topology sees the same microbatches, and every rank makes the same number of steps.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import torch

from energon_bridge.stream.finite import packs_of
from energon_bridge.stream.state import Counts, Held, Ref, Stage
from energon_bridge.topology import WorkerConfig

if TYPE_CHECKING:
    from energon_bridge.loader.spec import DatasetSpec, Units

logger = logging.getLogger(__name__)


def packs_of_pass(spec: DatasetSpec, units: Units, config: WorkerConfig, epoch: int) -> tuple[list[list[Ref]], Counts]:
    """Return the packs of a pass in order, and what this rank counted in making them.

    All ranks must call it where torch.distributed is initialised; where it is not, each makes the whole list itself.
    """
    assert spec.packing_buffer_size is not None
    plan = spec.plan(units, epoch)
    block = spec.packing_buffer_size
    shared = config.dp_size > 1 and torch.distributed.is_initialized()
    ranks = config.dp_size if shared else 1
    rank = config.dp_rank if shared else 0
    enough = math.inf if spec.limit is None else spec.limit * config.dp_size * spec.rows
    logger.info("packing %d samples before the pass begins", plan.num_draws)
    packs: list[list[Ref]] = []
    counts = Counts()
    pipeline = spec.pipeline(units, config)
    try:
        for first in range(0, plan.num_draws, block * ranks):
            start = first + rank * block
            own: list[list[Ref]] = []
            if start < plan.num_draws:
                counted = Counts()
                own = packs_of(pipeline, plan, start, min(start + block, plan.num_draws), counted)
                # Of several ranks that each make the whole list, one counts it.
                if shared or config.dp_rank == 0:
                    _add(counts, counted)
            for found in _gathered(own, config) if shared else [own]:
                packs += found
            if len(packs) >= enough:
                break
    finally:
        pipeline.say_pending()
        pipeline.close()
    return packs, counts


def _gathered(own: list[list[Ref]], config: WorkerConfig) -> list[list[list[Ref]]]:
    found: list[Any] = [None] * config.dp_size
    written = Held.of((Stage.PACK, pack, 0) for pack in own)
    torch.distributed.all_gather_object(found, (written.rows, written.members), group=config.data_parallel_group)
    return [[refs for _, refs, _ in Held(*arrays).entries()] for arrays in found]


def _add(counts: Counts, more: Counts) -> None:
    for leaf, counted in more.items():
        counts[leaf] = [a + b for a, b in zip(counts.of(leaf), counted, strict=True)]
