"""webdataset: shards shuffled, a shuffle buffer, batches made in the workers.

Runs in the environment of scripts/rival-env. It has no slices and saves no state; the address of the shard is the only
source it knows. It decodes only the parts that the other systems read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import webdataset
from braceexpand import braceexpand

from benchmarks.systems.measure import Job, main

DECODERS = {"uint8": "torchrgb8", "float": "torchrgb"}


def collate(samples: list[dict[str, Any]]) -> dict[str, list[Any] | torch.Tensor]:
    batch: dict[str, list[Any] | torch.Tensor] = {}
    for name in ("__key__", "__url__", "jpg", "txt", "json"):
        if name in samples[0]:
            values = [sample[name] for sample in samples]
            batch[name] = torch.stack(values) if isinstance(values[0], torch.Tensor) else values
    return batch


def open_loader(job: Job) -> Any:
    piped = job.path.startswith("pipe:")
    shards = [*braceexpand(job.path)] if piped else sorted(str(path) for path in Path(job.path).glob("*.tar"))
    dataset = webdataset.WebDataset(shards, shardshuffle=len(shards), empty_check=False, seed=0)
    dataset = dataset.repeat().shuffle(job.shuffle_buffer_size)
    if job.mode in DECODERS:
        dataset = dataset.decode(DECODERS[job.mode], only=[job.part, "txt"])
    dataset = dataset.batched(job.batch_size, collation_fn=collate)
    return webdataset.WebLoader(dataset, batch_size=None, num_workers=job.workers)


def touch(batch: dict[str, Any]) -> list[str]:
    payload = batch["jpg"] if "jpg" in batch else batch["json"]
    assert len(payload) == len(batch["__key__"]) == len(batch["__url__"])
    return list(batch["__key__"])


if __name__ == "__main__":
    main(open_loader, touch)
