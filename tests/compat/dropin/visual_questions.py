"""Training code for megatron-energon on a dataset that brings its own `sample_loader.py`.

Arguments: the dataset. Prints a line of JSON: the validation batches as they come, and the samples of one epoch.
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch
from megatron.energon import VQASample, WorkerConfig, get_loader, get_savable_loader, get_train_dataset, get_val_dataset


def digest(image: torch.Tensor) -> str:
    return hashlib.sha1(image.contiguous().numpy().tobytes()).hexdigest()


def rows(batch: VQASample) -> list:
    assert isinstance(batch, VQASample)
    values = zip(batch.__key__, batch.image, batch.context, batch.answers, strict=True)
    return [[key, digest(image), context, answers] for key, image, context, answers in values]


def main(path: str) -> None:
    config = WorkerConfig.default_worker_config(num_workers=1)
    loader = get_loader(get_val_dataset(path, batch_size=3, worker_config=config))
    validation = [rows(batch) for batch in loader]
    train = get_train_dataset(
        path, batch_size=4, shuffle_buffer_size=None, max_samples_per_sequence=4, worker_config=config
    )
    epoch = []
    for batch in get_savable_loader(train):
        epoch += rows(batch)
        if len(epoch) >= 40:
            break
    print(json.dumps({"val": validation, "train": sorted(epoch)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
