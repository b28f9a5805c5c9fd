"""The calls that this package and megatron-energon share: one code for both, the imported package is the argument."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from benchmarks.systems.measure import Job, main

NAMES = (
    *("DefaultTaskEncoder", "SampleDecoder", "WorkerConfig"),
    *("get_loader", "get_savable_loader", "get_train_dataset"),
)
IMAGE_FORMS = {"uint8": "torchrgb8", "float": "torchrgb"}


def touch(batch: Any) -> list[str]:
    payload = batch.image if hasattr(batch, "image") else batch.text
    assert len(payload) == len(batch.__key__)
    assert len(batch.__sources__) >= len(payload)
    return list(batch.__key__)


def run(package: ModuleType) -> None:
    """Do the job of the command line with a package that has the interface of megatron-energon."""
    for name in NAMES:  # a package may import on first use; imports are not what is measured
        getattr(package, name)

    def open_loader(job: Job) -> Any:
        decoder = package.SampleDecoder(image_decode=IMAGE_FORMS[job.mode]) if job.mode in IMAGE_FORMS else None
        encoder = type("Encoder", (package.DefaultTaskEncoder,), {"decoder": decoder})
        dataset = package.get_train_dataset(
            job.path,
            batch_size=job.batch_size,
            shuffle_buffer_size=job.shuffle_buffer_size,
            max_samples_per_sequence=job.slice_size,
            task_encoder=encoder(),
            worker_config=package.WorkerConfig(rank=0, world_size=1, num_workers=job.workers),
        )
        # the plain loader is the rival's faster one; saving needs the other
        return package.get_loader(dataset) if job.task == "throughput" else package.get_savable_loader(dataset)

    main(open_loader, touch)
