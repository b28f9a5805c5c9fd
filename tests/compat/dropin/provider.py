"""A provider of data for Megatron-LM's training loop, as its multimodal example has it, and a loop that calls it.

Arguments: a dataset, a folder for states, and the iteration to go on from. Prints a line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from megatron.energon import (
    Batch,
    CaptioningSample,
    DefaultTaskEncoder,
    LimitDataset,
    RepeatDataset,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_datasets,
)
from megatron.energon.task_encoder.base import stateless

ARGS = Namespace(micro_batch_size=4, num_microbatches=2, eval_iters=3, num_workers=0, seed=0)


class TaskEncoder(DefaultTaskEncoder[CaptioningSample, CaptioningSample, Batch, dict]):
    @stateless(restore_seeds=True)
    def encode_sample(self, sample: CaptioningSample) -> CaptioningSample:
        sample.image = sample.image.mean(dim=0)
        return sample

    def encode_batch(self, batch: Any) -> dict:
        return {"keys": batch.__key__, "imgs": batch.image, "captions": batch.caption}


def datasets_provider(path: str, worker_config: WorkerConfig) -> tuple[Any, list[Any], None]:
    """Create multimodal train, validation and test datasets."""
    train_dataset = get_train_dataset(
        path,
        batch_size=ARGS.micro_batch_size,
        task_encoder=TaskEncoder(),
        virtual_epoch_length=1000,
        max_samples_per_sequence=100,
        shuffle_buffer_size=None,
        worker_config=worker_config,
        packing_buffer_size=None,
    )
    val_datasets = get_val_datasets(
        path, batch_size=ARGS.micro_batch_size, task_encoder=TaskEncoder(), worker_config=worker_config
    )
    val_datasets_without_source_datasets = [
        # Limit the dataset to eval_iters * num_microbatches
        LimitDataset(
            # Repeat the inner dataset in case it's too short
            RepeatDataset(val_ds, worker_config=worker_config),
            length=ARGS.eval_iters * ARGS.num_microbatches,
            worker_config=worker_config,
            reset_after_epoch=True,
        )
        for val_ds, _src_ds in val_datasets
    ]
    return train_dataset, val_datasets_without_source_datasets, None


def train_valid_test_dataloaders_provider(
    train_val_test_num_samples: tuple[int, int, int], *, path: str, states: str, iteration: int
) -> tuple[Any, list[Any], None]:
    """Build multimodal train, validation and test dataloaders."""
    worker_config = WorkerConfig(rank=0, world_size=1, num_workers=ARGS.num_workers, data_parallel_group=None)
    train_ds, valid_ds1, _ = datasets_provider(path, worker_config)
    train_dataloader = get_savable_loader(train_ds, worker_config=worker_config)
    if iteration:
        state = torch.load(state_path(states, iteration), map_location="cpu", weights_only=False)
        train_dataloader.restore_state_rank(state["dataloader_state_dict"])
    valid_dataloader = [EnergonDataloader(get_loader(valid_ds, worker_config=worker_config)) for valid_ds in valid_ds1]
    return EnergonDataloader(train_dataloader), valid_dataloader, None


train_valid_test_dataloaders_provider.is_distributed = True


class EnergonDataloader:
    """A wrapper to use Megatron Energon dataloader with the Megatron-LM training loop."""

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader
        self._iter = iter(cyclic_iter(dataloader))

    def __next__(self) -> Any:
        return self._iter.__next__()

    def __iter__(self) -> Iterator[Any]:
        return self._iter.__iter__()

    def save_state(self) -> Any:
        return self._dataloader.save_state_rank()


def cyclic_iter(iterable: Any) -> Iterator[Any]:
    while True:
        yield from iterable


def digest(images: torch.Tensor) -> str:
    return hashlib.sha1(images.contiguous().numpy().tobytes()).hexdigest()


def state_path(folder: str, iteration: int) -> str:
    return os.path.join(folder, f"iter_{iteration:07d}", "mp_rank_00", "train_dataloader_dprank000.pt")


def main(path: str, states: str, start: str) -> None:
    first = int(start)
    train, valid, test = train_valid_test_dataloaders_provider((80, 24, 0), path=path, states=states, iteration=first)
    assert test is None
    seen = []
    for _iteration in range(first, first + 5):
        for _ in range(ARGS.num_microbatches):
            batch = next(train)
            assert batch["imgs"].shape[0] == ARGS.micro_batch_size
            seen.append([batch["keys"], batch["captions"], digest(batch["imgs"])])
    file = state_path(states, first + 5)
    os.makedirs(os.path.dirname(file))
    torch.save({"dataloader_state_dict": train.save_state()}, file)
    evaluated = [
        [next(iterator)["keys"] for _ in range(ARGS.eval_iters * ARGS.num_microbatches)]
        for _ in range(2)
        for iterator in valid
    ]
    print(json.dumps({"train": seen, "valid": evaluated}))


if __name__ == "__main__":
    main(*sys.argv[1:])
