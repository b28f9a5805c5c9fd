"""The samples of a validation pass, one by one, conversations cooked as in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from energon_bridge import DefaultTaskEncoder, WorkerConfig, get_loader, get_val_dataset
from energon_bridge.models.conversations.cooker import COOKERS


class _AsLists(DefaultTaskEncoder[Any, Any, Any, Any]):
    cookers = COOKERS

    def batch(self, samples: list[Any]) -> Any:
        return samples


def delivered(path: Path | str, part: str = "train", *, num_workers: int = 0, **settings: Any) -> list[Any]:
    """Return the samples of a split part of a dataset, in order, unbatched."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=num_workers)
    settings |= {"split_part": part, "batch_size": 1, "task_encoder": _AsLists(), "worker_config": config}
    dataset = get_val_dataset(path, **settings)
    return [sample for batch in get_loader(dataset) for sample in batch]
