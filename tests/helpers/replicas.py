"""Forked ranks with megatron-core's groups, for tests of what the ranks of a replica get."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from forked import on_gloo
from megatron.core import parallel_state
from rank_states import rank_file, write_rank_file

from energon_bridge import (
    EnergonDataloader,
    EnergonMultiModalDataModule,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
)
from energon_bridge.core.encoder.task_encoder import DefaultTaskEncoder
from energon_bridge.trainers.replica.structure import encode


def on_ranks(world: int, function: Callable[[int], Any], **parallel: int) -> list[Any]:
    """Call a function on some gloo ranks with megatron's groups; `tp`, `cp` and `pp` say which."""

    def start(rank: int) -> Any:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.get("tp", 1),
            context_parallel_size=parallel.get("cp", 1),
            pipeline_model_parallel_size=parallel.get("pp", 1),
            virtual_pipeline_model_parallel_size=parallel.get("vp"),
        )
        result = function(rank)
        dist.barrier()
        return result

    return on_gloo(world, start)


def place() -> dict[str, int]:
    """Return where this process is."""
    return {
        "dp": parallel_state.get_data_parallel_rank(),
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "cp": parallel_state.get_context_parallel_rank(),
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
    }


def module(dataset: Path, **kwargs: Any) -> EnergonMultiModalDataModule:
    """Return a data module with small settings."""
    settings: dict[str, Any] = {"micro_batch_size": 2, "num_workers": 0, "num_lanes": 8}
    settings |= {"task_encoder": DefaultTaskEncoder()}
    return EnergonMultiModalDataModule(str(dataset), None, None, **(settings | kwargs))


def digest(batch: Any) -> str:
    """Return a hash of everything in a batch: structure, texts, dtypes, shapes and bytes."""
    node, tensors = encode(batch)
    found = hashlib.blake2b(repr(node).encode(), digest_size=12)
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def digests(batches: Any, count: int) -> list[tuple[str, str]]:
    """Return keys and hash of the next batches, as a loop sees them that only calls `next()`."""
    found = (next(batches) for _ in range(count))
    return [(",".join(batch.__key__), digest(batch)) for batch in found]


def save_files(dataset: Path, root: Path, ranks: int, steps: int, iteration: int = 1, **layout: Any) -> None:
    """Write the files of data-parallel ranks after some steps in microbatches of two, with eight lanes."""
    for rank in range(ranks):
        config = WorkerConfig(rank=rank, world_size=ranks, num_workers=0, num_lanes=8)
        loader = EnergonDataloader(get_savable_loader(get_train_dataset(dataset, batch_size=2, worker_config=config)))
        for _ in range(steps):
            next(loader)
        write_rank_file(rank_file(root, iteration, rank, **layout), loader.save_state())
