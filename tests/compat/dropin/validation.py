"""Validation of a metadataset by ranks and workers, limited and repeated, and the numbers that hooks ask for.

Argument: a metadataset. Prints a line of JSON: for each case and rank the batches' keys and numbers.
"""

from __future__ import annotations

import json
import sys
from itertools import islice

from megatron.energon import (
    CaptioningSample,
    DefaultTaskEncoder,
    LimitDataset,
    RepeatDataset,
    SkipSample,
    WorkerConfig,
    get_loader,
    get_train_dataset,
    get_val_dataset,
)
from megatron.energon.task_encoder.base import stateless


class Encoder(DefaultTaskEncoder):
    def __init__(self, skips: str = "") -> None:
        super().__init__()
        self.skips = skips

    @stateless
    def encode_sample(self, sample: CaptioningSample) -> CaptioningSample:
        if self.skips and sample.__key__.startswith(self.skips):
            raise SkipSample()
        sample.caption = f"{self.current_batch_index} {self.current_sample_index}"
        return sample

    @stateless
    def encode_batch(self, batch):
        return {"keys": batch.__key__, "numbers": batch.caption, "batch": self.current_batch_index}


def delivered(dataset, config, most: int = 1000) -> list:
    return [
        [b["keys"], b["numbers"], b["batch"]] for b in islice(iter(get_loader(dataset, worker_config=config)), most)
    ]


def main(path: str) -> None:
    out = {}
    for ranks, workers in ((1, 0), (1, 3), (2, 2)):
        for rank in range(ranks):
            config = WorkerConfig(rank=rank, world_size=ranks, num_workers=workers)

            def val(skips="", config=config, **settings):
                return get_val_dataset(
                    path, worker_config=config, batch_size=3, task_encoder=Encoder(skips), **settings
                )

            name = f"{ranks} {workers} {rank}"
            out[f"{name} whole"] = delivered(val(), config)
            if ranks == 1:
                continue
            out[f"{name} dropped"] = delivered(val(batch_drop_last=True), config)
            out[f"{name} limit"] = delivered(val(limit=3), config)
            out[f"{name} gone"] = sorted(key for keys, _, _ in delivered(val("val-0000"), config) for key in keys)
            repeated = RepeatDataset(val(), worker_config=config)
            out[f"{name} repeated"] = [
                keys
                for keys, _, _ in delivered(
                    LimitDataset(repeated, length=11, worker_config=config, reset_after_epoch=True), config
                )
            ]
            train = get_train_dataset(
                path,
                worker_config=config,
                batch_size=2,
                task_encoder=Encoder(),
                shuffle_buffer_size=None,
                max_samples_per_sequence=None,
            )
            out[f"{name} train"] = [[numbers, batch] for _, numbers, batch in delivered(train, config, 12)]
    print(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
