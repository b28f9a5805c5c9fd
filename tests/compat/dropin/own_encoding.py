"""Samples that a program encodes by wrappers of its own; iterators used in turn; seeds; keys of dicts."""

import json
import random
import sys
from itertools import chain, islice
from types import SimpleNamespace

import numpy as np
import torch
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    FilterDataset,
    MapDataset,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)

DATA = sys.argv[1]
CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)


@stateless
def cook(sample):
    return TextSample(**basic_sample_keys(sample), text=sample["txt"])


def shout(sample):
    sample.text = sample.text.upper() + "!"
    return sample


class Batched(DefaultTaskEncoder):
    cookers = [Cooker(cook)]

    @stateless
    def batch(self, samples):
        return {"text": [one.text for one in samples], "__restore_key__": [one.__restore_key__ for one in samples]}


class Encoder(Batched):
    @stateless
    def encode_sample(self, sample):
        sample.text += " (encoded)"
        return sample


class Instead(Encoder):
    def build_encode_sample(self, dataset, *, worker_config):
        return MapDataset(dataset, shout, worker_config=worker_config, stateless_map_fn=True)


class Several(Encoder):
    def build_encode_sample(self, dataset, *, worker_config):
        even = FilterDataset(dataset, filter_fn=lambda one: int(one.__key__[-1]) % 2 == 0, worker_config=worker_config)
        loud = MapDataset(even, shout, worker_config=worker_config, stateless_map_fn=True)
        return MapDataset(loud, self.encode_sample, worker_config=worker_config, stateless_map_fn=True)


class Around(Encoder):
    def build_encode_sample(self, dataset, *, worker_config):
        loud = MapDataset(dataset, shout, worker_config=worker_config, stateless_map_fn=True)
        encoded = super().build_encode_sample(loud, worker_config=worker_config)
        return MapDataset(encoded, shout, worker_config=worker_config, stateless_map_fn=True)


class Packs(Batched):
    def build_encode_sample(self, dataset, *, worker_config):
        return MapDataset(dataset, shout, worker_config=worker_config, stateless_map_fn=True)

    @stateless
    def postencode_sample(self, sample):
        sample.text += " (packed)"
        return sample

    def select_samples_to_pack(self, samples):
        return [samples[at : at + 2] for at in range(0, len(samples), 2)]

    @stateless
    def pack_selected_samples(self, samples):
        samples[0].text = " + ".join(one.text for one in samples)
        return samples[0]


def texts(encoder, **settings):
    settings = {"batch_size": 2, "split_part": "val", "worker_config": CONFIG, "task_encoder": encoder, **settings}
    return [batch["text"] for batch in get_savable_loader(get_val_dataset(DATA, **settings))]


def in_turn():
    """Return which of two iterators over one loader with a virtual epoch gives a batch, or ends."""
    settings = {"batch_size": 2, "shuffle_buffer_size": None, "max_samples_per_sequence": None}
    settings |= {"worker_config": CONFIG, "virtual_epoch_length": 5, "task_encoder": Encoder()}
    loader = get_savable_loader(get_train_dataset(DATA, **settings))
    first, second = iter(loader), iter(loader)
    seen = [len(next(one, {"text": ()})["text"]) for one in [first, first, first, second] * 4]
    third = iter(loader)
    return [*seen, *(len(next(third, {"text": ()})["text"]) for _ in range(7))]


def kinds(key):
    """Return the types within a key, to the depth that both packages have."""
    return [type(key).__name__, sorted({type(one).__name__ for one in key})]


class Seeded(DefaultTaskEncoder):
    @stateless(restore_seeds=True)
    def encode_sample(self, sample):
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    @stateless(restore_seeds=True)
    def each(self, sample):
        for _ in range(3):
            yield [random.random(), float(np.random.rand()), float(torch.rand(()))]


def seeds():
    """Return what hooks draw that a program calls itself, and what it draws between."""
    random.seed(1)
    torch.manual_seed(1)
    seen = []
    for index in (7, 8):
        own = SimpleNamespace(worker_seed=lambda: 42, active_worker_sample_index=index)
        WorkerConfig.active_worker_config = own
        seen += [Seeded().encode_sample({}), random.random()]
        for value in Seeded().each({}):
            seen += [value, random.random(), float(torch.rand(()))]
    WorkerConfig.active_worker_config = None
    return seen


def main():
    seen = {kind.__name__: texts(kind()) for kind in (Instead, Around)}
    seen["Several"] = list(chain(*texts(Several())))  # how many to a batch is each package's own
    seen["Packs"] = texts(Packs(), packing_buffer_size=4)
    seen["in turn"] = in_turn()
    loader = get_savable_loader(
        get_val_dataset(DATA, split_part="val", batch_size=2, worker_config=CONFIG, task_encoder=Encoder())
    )
    seen["keys"] = [kinds(batch["__restore_key__"]) for batch in islice(loader, 2)]
    seen["seeds"] = seeds()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
