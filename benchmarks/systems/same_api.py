"""The calls that this package and megatron-energon share: one code for both, the imported package is the argument."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from benchmarks.systems.measure import Job, StateAt, main

NAMES = (
    *("Cooker", "DefaultTaskEncoder", "InterleavedSample", "SampleDecoder", "WorkerConfig"),
    *("basic_sample_keys", "batch_stack", "get_loader", "get_savable_loader", "get_train_dataset", "stateless"),
)
IMAGE_FORMS = {
    "uint8": "torchrgb8",
    "float": "torchrgb",
    "packed": "torchrgb8",
    "cooked": "torchrgb8",
    "resized": "torchrgb8",
    "scaled": "torchrgb8",
}
PACK = 4
"""Images in a pack of the mode `packed`; a batch has as many images as in the other modes."""
PACKING_BUFFER = 100
SIDE = 224
"""Height and width of the images of the modes `resized` and `scaled`."""


def touch(batch: Any) -> list[str]:
    payload = next(getattr(batch, name) for name in ("image", "text", "sequence") if hasattr(batch, name))
    assert len(payload) == len(batch.__key__)
    assert len(batch.__sources__) >= len(payload)
    keys = list(batch.__key__)
    return " ".join(keys).split(" ") if " " in keys[0] else keys  # of packs


def packing(package: ModuleType) -> type:
    """Return what packs four neighbours of the buffer, in the words of a package."""

    class Packing:
        def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
            return [samples[first : first + PACK] for first in range(0, len(samples) - PACK + 1, PACK)]

        def pack_selected_samples(self, samples: list[Any]) -> Any:
            return type(samples[0]).derive_from(
                samples[0],
                __key__=" ".join(sample.__key__ for sample in samples),
                image=package.batch_stack([sample.image for sample in samples]),
                caption=" ".join(sample.caption for sample in samples),
            )

    return Packing


def resizing(package: ModuleType) -> type:
    """Return what makes images of the size that a model takes: torch's bytes, by our `resize`, or by torch itself."""
    if package.__name__ == "energon_bridge":
        from energon_bridge.models.images.transforms import resize

        def resized(image: Any) -> Any:
            return resize(image, (SIDE, SIDE), "bicubic")
    else:
        from torch.nn.functional import interpolate

        def resized(image: Any) -> Any:
            return interpolate(image[None], (SIDE, SIDE), mode="bicubic", antialias=True)[0]

    class Resizing:
        def encode_sample(self, sample: Any) -> Any:
            sample.image = resized(sample.image)
            return sample

    return Resizing


def cooking(package: ModuleType) -> type:
    """Return what cooks samples of several images and texts, in the words of a package."""

    def cook(sample: dict[str, Any]) -> Any:
        sequence: list[Any] = []
        for number, text in enumerate(sample["json"]["texts"]):
            sequence += sample[f"{number}.jpg"], text
        return package.InterleavedSample(**package.basic_sample_keys(sample), sequence=sequence)

    return type("Cooking", (), {"cookers": [package.Cooker(package.stateless(cook))]})


def open_loader(package: ModuleType, job: Job) -> Any:
    """Return the loader of a job, made by a package that has the interface of megatron-energon."""
    decoder = None
    if job.mode in IMAGE_FORMS:
        more = {"image_target": SIDE} if job.mode == "scaled" else {}
        decoder = package.SampleDecoder(image_decode=IMAGE_FORMS[job.mode], **more)
    packed = job.mode == "packed"
    made = {"packed": packing, "resized": resizing, "scaled": resizing, "cooked": cooking}
    bases = (*([made[job.mode](package)] if job.mode in made else []), package.DefaultTaskEncoder)
    encoder = type("Encoder", bases, {"decoder": decoder})
    dataset = package.get_train_dataset(
        job.path,
        batch_size=job.batch_size // PACK if packed else job.batch_size,
        packing_buffer_size=PACKING_BUFFER if packed else None,
        shuffle_buffer_size=job.shuffle_buffer_size,
        max_samples_per_sequence=job.slice_size,
        task_encoder=encoder(),
        worker_config=package.WorkerConfig(rank=0, world_size=1, num_workers=job.workers),
    )
    # the plain loader is the rival's faster one; saving needs the other
    return package.get_loader(dataset) if job.task == "throughput" else package.get_savable_loader(dataset)


def run(package: ModuleType, state_at: StateAt | None = None) -> None:
    """Do the job of the command line with a package that has the interface of megatron-energon."""
    for name in NAMES:  # a package may import on first use; imports are not what is measured
        getattr(package, name)
    main(lambda job: open_loader(package, job), touch, state_at)
