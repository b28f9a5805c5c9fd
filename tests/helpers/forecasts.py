"""What the tests of `energon plan`, `which` and `checkpoint` share: mixes on disk, runs of all ranks, the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine import TensorEncoder, config_of, is_masked, loaders_of, text_dataset
from keyed import write_mix

from energon_bridge import get_train_dataset
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.savable import SavableDataLoader

SIZES = {"a": [5, 7], "b": [30], "c": [3, 3, 3, 3]}
LINEAR = {"schedule": "linear", "points": [[0, 1], [200, 3]]}
STEPS = {"schedule": "steps", "points": [[0, 1], [90, 5]]}

MIXES: dict[str, Any] = {
    "single": {"path": "./a"},
    "weights": {"blend": [{"path": "./a", "weight": 3}, {"path": "./b", "weight": 1}, {"path": "./a", "weight": 0.5}]},
    "linear": {"blend": [{"path": "./a", "weight": 2}, {"path": "./b", "weight": LINEAR}]},
    "steps": {"blend": [{"path": "./c", "weight": 2}, {"path": "./b", "weight": STEPS}]},
    "groups": {"blend": [{"path": "./a", "weight": 1}, {"concat": [{"path": "./b"}, {"path": "./c"}], "weight": 2}]},
    "subset": {
        "blend": [
            {"path": "./b", "weight": 1, "subset": {"range": ["20%", "80%"]}},
            {"path": "./c", "weight": 1, "shuffle_over_epochs_multiplier": 2},
        ]
    },
    "repetitions": {
        "blend_epochized": [
            {"path": "./a", "repetitions": 3},
            {"path": "./b", "repetitions": 0.5},
            {"path": "./c", "repetitions": 0.7},
        ]
    },
    "concat": {"concat": [{"path": "./b"}, {"path": "./a"}]},
}
NEEDS_MIX = {"linear", "steps", "groups", "concat"}
"""Mixes that a state does not wholly describe."""

OPTIONS = ("--batch-size", 2, "--shuffle-buffer-size", 4, "--max-samples-per-sequence", 3)


def write_mixes(folder: Path) -> Path:
    """Write the datasets and, for each mix, `NAME.yaml`."""
    for name, counts in SIZES.items():
        text_dataset(folder / name, train=counts, val=counts)
    for name, split in MIXES.items():
        write_mix(folder / f"{name}.yaml", train=split, val=split)
    return folder


def opened(folder: Path, mix: str, encoder: Any = None, **kwargs: Any) -> DatasetSpec:
    """Open a mix with the settings of `OPTIONS`."""
    settings: dict[str, Any] = {"batch_size": 2, "shuffle_buffer_size": 4, "max_samples_per_sequence": 3}
    config = config_of(1, 0)
    encoder = encoder or TensorEncoder()
    return get_train_dataset(folder / f"{mix}.yaml", worker_config=config, task_encoder=encoder, **(settings | kwargs))


Delivered = list[list[list[tuple[tuple[Any, ...], str]] | None]]
"""For each step and rank the restore keys and keys of the rows, None for a masked microbatch."""


def run(loaders: list[SavableDataLoader], steps: int) -> Delivered:
    """Let all ranks deliver some steps."""
    columns = []
    for loader in loaders:
        batches = iter(loader)
        column: list[Any] = []
        for _ in range(steps):
            batch = next(batches)
            keys = batch.__restore_key__[3]
            column.append(None if is_masked(batch) else list(zip(keys, batch.__key__, strict=True)))
        columns.append(column)
        loader.close()
    return [list(row) for row in zip(*columns, strict=True)]


def ranks_of(dataset: DatasetSpec, world_size: int, **kwargs: Any) -> list[SavableDataLoader]:
    """Return the loaders of all ranks, without workers."""
    return loaders_of(dataset, world_size, 0, **kwargs)
