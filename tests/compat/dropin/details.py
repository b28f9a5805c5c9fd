"""What programs rely on beside the samples: the version, tensors of arrays, handlers, exceptions, threads, keywords.

Arguments: a prepared dataset of captions, and a folder to prepare a copy of it in. Prints a line of JSON.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    WorkerConfig,
    batch_list,
    batch_pad_stack,
    cooker,
    generic_batch,
    get_loader,
    get_train_dataset,
    get_val_dataset,
)
from megatron.energon.errors import FatalSampleError, SampleException
from megatron.energon.flavors.webdataset import BaseWebdatasetFactory
from megatron.energon.task_encoder.base import stateless


class Arrays(DefaultTaskEncoder):
    @stateless
    def encode_batch(self, batch):
        lengths = np.array([len(caption) for caption in batch.caption], dtype=np.int32)
        named = {"scalar": np.float32(0.5), "pair": (lengths, 1), "text": np.array(["a", "b"])}
        return {"lengths": lengths, "named": named, "captions": list(batch.caption), "none": None}


class Fails(DefaultTaskEncoder):
    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which

    @stateless(failure_tolerance=3)
    def encode_sample(self, sample):
        if sample.__key__.endswith(self.which):
            raise KeyError(f"no {sample.__key__}")
        return sample


def kinds(value):
    """Return the types of a structure, and of tensors their dtypes."""
    if isinstance(value, dict):
        return {name: kinds(one) for name, one in value.items() if not name.startswith("__")}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(kinds, value)]
    return str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__


def cook(sample, primary, cache): ...


def main(path: str, folder: str) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    out = {"version": version("megatron-energon").partition("+")[0]}

    dataset = get_val_dataset(path, batch_size=2, worker_config=config, task_encoder=Arrays())
    out["arrays"] = kinds(next(iter(get_loader(dataset))))

    wants = Cooker(cooker(need_cache=True, need_primary=True)(cook))
    out["cookers"] = [wants.need_cache, wants.need_primary, Cooker(cook=cook).need_cache, Cooker(cook).need_primary]

    seen = []

    def handler(error, sample, sources):
        seen.append([type(error).__name__, sample.__key__, [list(one.file_names) for one in sources]])

    of_run = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=handler)
    dataset = get_val_dataset(path, batch_size=1, worker_config=of_run, task_encoder=Fails("3"))
    out["delivered"] = sum(1 for _ in get_loader(dataset))
    out["handled"] = seen[:1]

    for workers in (0, 1):
        of_run = WorkerConfig(rank=0, world_size=1, num_workers=workers, global_error_handler=lambda *_: None)
        dataset = get_train_dataset(
            path,
            batch_size=2,
            worker_config=of_run,
            task_encoder=Fails(""),
            shuffle_buffer_size=None,
            max_samples_per_sequence=None,
        )
        try:
            next(iter(get_loader(dataset)))
        except ValueError as error:
            out[f"stopped {workers}"] = [isinstance(error, SampleException), isinstance(error, FatalSampleError)]

    rows = [torch.tensor([1, 2]), torch.tensor([3])]
    out["keywords"] = [
        batch_list(batch=[1, 2]),
        batch_pad_stack(batch=rows).tolist(),
        generic_batch(batch=[{"a": row} for row in rows])["a"].tolist(),
    ]

    # A thread runs while a dataset is prepared, as that of a progress bar does.
    shutil.copytree(path, folder)
    shutil.rmtree(Path(folder) / ".nv-meta")
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, daemon=True)
    thread.start()
    parts = BaseWebdatasetFactory.prepare_dataset(
        folder,
        sorted(str(one.relative_to(folder)) for one in Path(folder).rglob("*.tar")),
        split_parts_ratio=[("train", 1.0)],
        workers=2,
    )
    ended.set()
    thread.join()
    out["prepared"] = sorted(parts)
    print(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
