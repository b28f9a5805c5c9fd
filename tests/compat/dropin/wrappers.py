"""Wrappers around datasets that a program builds itself, as public programs do, saved and restored on the way.

Arguments: a dataset of captions and a number of workers. Prints a line of JSON: for each kind what a pass or a
stretch holds, sorted where the order is each package's own.
"""

from __future__ import annotations

import json
import sys
from itertools import islice

import torch
from megatron.energon import (
    BatchDataset,
    BlendDataset,
    ConcatDataset,
    FilterDataset,
    GroupBatchDataset,
    IterMapDataset,
    LimitDataset,
    LogSampleDataset,
    MapDataset,
    MixBatchDataset,
    PackingDataset,
    ShuffleBufferDataset,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    homogeneous_concat_mix,
)
from megatron.energon.task_encoder.base import stateless
from megatron.energon.wrappers.gc_dataset import GcDataset
from megatron.energon.wrappers.watchdog_dataset import WatchdogDataset


@stateless
def record(sample):
    return {
        "__key__": sample.__key__,
        "__restore_key__": sample.__restore_key__,
        "text": torch.tensor(list(sample.caption.encode())),
    }


def pieces(sample):
    """Yield a record of each half; of samples that end with a 7, nothing."""
    if sample["__key__"].endswith("7"):
        return
    middle = len(sample["text"]) // 2
    for part in (sample["text"][:middle], sample["text"][middle:]):
        yield {**sample, "text": part}


def collate(samples):
    lengths = [len(one["text"]) for one in samples]
    text = torch.zeros(len(samples), max(lengths), dtype=torch.int64)
    for row, one in zip(text, samples):
        row[: len(one["text"])] = one["text"]
    return {"keys": [one["__key__"] for one in samples], "text": text, "lengths": lengths}


def summed(batch):
    return {**batch, "sum": int(batch["text"].sum())}


def kinds(batches):
    """Return the samples of batches, each once, sorted."""
    return sorted(
        {
            (key, bytes(text[:length].tolist()).decode())
            for batch in batches
            for key, text, length in zip(batch["keys"], batch["text"], batch["lengths"])
        }
    )


def main(path: str, workers: str) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=int(workers))
    alike = {"worker_config": config}

    def train(**settings):
        return get_train_dataset(
            path,
            batch_size=None,
            worker_config=config,
            shuffle_buffer_size=None,
            max_samples_per_sequence=None,
            **settings,
        )

    def mapped(dataset=None):
        return MapDataset(dataset or train(), record, stateless_map_fn=True, **alike)

    def batched(dataset, size=4):
        return BatchDataset(dataset, size, collate, batcher_stateless=True, **alike)

    out = {}

    def stretch(build, count):
        """Return what comes first; what comes after it must come again from a state."""
        loader = get_savable_loader(build())
        batches = iter(loader)
        first = list(islice(batches, count))
        state = loader.save_state_rank()
        ahead = [one["text"].tolist() for one in islice(batches, 5)]
        again = get_savable_loader(build())
        again.restore_state_rank(state)
        assert [one["text"].tolist() for one in islice(iter(again), 5)] == ahead
        return first

    # A map, a filter, a batch, a map of batches.
    def short():
        kept = FilterDataset(mapped(), filter_fn=lambda one: not one["__key__"].endswith("3"), **alike)
        return MapDataset(batched(kept), summed, stateless_map_fn=True, **alike)

    epochs = stretch(short, 80)
    out["filtered"] = [kinds(epochs), sorted({len(batch["keys"]) for batch in epochs})]
    assert all(batch["sum"] == batch["text"].sum() for batch in epochs)

    # Generators, an iterator's function, and wrappers that change nothing.
    def watched():
        halves = MapDataset(mapped(), pieces, stateless_map_fn=True, **alike)
        long = IterMapDataset(
            halves, lambda samples: (one for one in samples if len(one["text"]) > 6), stateless_iter_fn=True, **alike
        )
        return WatchdogDataset(GcDataset(LogSampleDataset(batched(long), mode="train", **alike), **alike), **alike)

    out["pieces"] = kinds(stretch(watched, 120))

    # A pass that ends, its last batch shorter or left out.
    for drop in (False, True):
        once = BatchDataset(mapped(train(repeat=False)), 6, collate, drop_last=drop, **alike)
        batches = list(get_loader(once))
        out[f"once {drop}"] = [sum(len(one["keys"]) for one in batches), len(kinds(batches))]

    # Packs of samples, each encoded after it was selected, and batches of packs.
    def select(samples):
        ordered = sorted(samples, key=lambda one: one["__key__"])
        return [ordered[at : at + 2] for at in range(0, len(ordered), 2)]

    def upper(sample):
        return {**sample, "text": sample["text"] - 32 * (sample["text"] >= 97)}

    def pack(samples):
        return {
            "__key__": "+".join(one["__key__"] for one in samples),
            "text": torch.cat([one["text"] for one in samples]),
        }

    packs = PackingDataset(
        mapped(),
        8,
        select,
        pack,
        final_packer_stateless=True,
        sample_encoder=upper,
        sample_encoder_stateless=True,
        **alike,
    )
    several = list(islice(iter(get_loader(batched(packs, 2))), 80))
    out["packed"] = (
        sorted({key for batch in several for keys in batch["keys"] for key in keys.split("+")}),
        sorted({len(keys.split("+")) for batch in several for keys in batch["keys"]}),
    )

    # Groups with batch sizes of their own.
    def group(sample):
        return len(sample["text"]) % 2, 2 + len(sample["text"]) % 2

    grouped = GroupBatchDataset(mapped(), None, group, collate, batcher_stateless=True, **alike)
    groups = list(islice(iter(get_loader(grouped)), 30))
    out["grouped"] = sorted({(len(one["keys"]), *(length % 2 for length in one["lengths"])) for one in groups})

    # Datasets mixed after they were built, each with its own function.
    def marked(mark):
        return MapDataset(
            mapped(),
            lambda one: {**one, "text": torch.cat([torch.tensor([mark]), one["text"]])},
            stateless_map_fn=True,
            **alike,
        )

    def blended():
        blend = BlendDataset((marked(1), 3), (marked(2), 1), **alike)
        return batched(ShuffleBufferDataset(blend, 10, **alike))

    blend = stretch(blended, 200)
    share = sum(int((one["text"][:, 0] == 1).sum()) for one in blend) / 800
    out["blended"] = [abs(share - 0.75) < 0.06, len(kinds(blend))]
    mixed = MixBatchDataset(
        (batchless(marked(1), alike), 1),
        (batchless(marked(2), alike), 1),
        batch_size=3,
        batch_mix_fn=homogeneous_concat_mix,
        **alike,
    )
    out["mixed"] = sorted({tuple(one["text"].shape[:1]) for one in islice(iter(get_loader(mixed)), 10)})

    # Validation, in its order, limited.
    val = get_val_dataset(path, batch_size=None, worker_config=config)
    val = LimitDataset(batched(MapDataset(val, record, **alike), 3), length=3, reset_after_epoch=True, **alike)
    loader = get_loader(val)
    out["val"] = [[batch["keys"] for batch in loader] for _ in range(2)]
    both = ConcatDataset(*(get_val_dataset(path, batch_size=None, worker_config=config) for _ in range(2)), **alike)
    out["both"] = [batch["keys"] for batch in get_loader(batched(MapDataset(both, record, **alike), 4))]
    print(json.dumps(out))


def batchless(dataset, alike):
    """Return a dataset whose samples have a first dimension, as batches of one."""
    return MapDataset(
        dataset, lambda one: {"text": one["text"][None, :1], "__key__": one["__key__"]}, stateless_map_fn=True, **alike
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
