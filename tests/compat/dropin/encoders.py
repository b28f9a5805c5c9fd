"""Encoders and loops in the ways of public training code for megatron-energon, each on a folder of picture questions.

Arguments: a folder of datasets and one for states. Prints a line of JSON: for each kind what passes deliver.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron import energon
from megatron.energon import (
    Batch,
    CaptioningSample,
    Cooker,
    CrudeSample,
    DefaultTaskEncoder,
    LimitDataset,
    RepeatDataset,
    Sample,
    SkipSample,
    basic_sample_keys,
    edataclass,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_datasets,
)
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.jsonl.ijsonl import IJsonlIndexReader
from megatron.energon.flavors.webdataset.metadata import EnergonDatasetType, get_dataset_info, get_dataset_type
from megatron.energon.metadataset.loader import traverse_metadataset
from megatron.energon.task_encoder.base import get_failure_tolerance, get_stateless, stateless
from megatron.energon.worker import WorkerConfig
from megatron.energon.wrappers import BatchDataset, BlendDataset, MapDataset, PackingDataset  # noqa: F401

SEQUENCE = 60


def handler(error: Exception, key: str | None) -> None:
    print(f"{key}: {error}", file=sys.stderr)


# One: an abstract encoder of packs, whose samples declare their meta fields anew ------------------------------------


@dataclass
class Piece(Sample):
    __key__: str
    __restore_key__: tuple
    __subflavor__: dict
    __subflavors__: dict
    tokens: torch.Tensor
    total_len: int
    labels: torch.Tensor = None
    imgs: list[torch.Tensor] = None


@dataclass
class Pack(Sample):
    __key__: str
    __restore_key__: tuple
    __subflavor__: dict
    __subflavors__: dict
    tokens: torch.Tensor
    max_length: int
    cu_lengths: torch.Tensor
    imgs: list[torch.Tensor] = None


@dataclass
class PackBatch(Batch):
    __key__: list[str]
    __restore_key__: tuple
    __subflavor__: dict
    __subflavors__: list[dict]
    tokens: np.ndarray
    cu_lengths: list[torch.Tensor]
    imgs: torch.Tensor = None


class Packer(DefaultTaskEncoder[CaptioningSample, Piece, PackBatch, dict]):
    def __init__(self) -> None:
        super().__init__()
        self.length = SEQUENCE

    @stateless(restore_seeds=True)
    def encode_sample(self, sample: CaptioningSample | Piece):
        if isinstance(sample, CaptioningSample):
            yield self.encode_captioning(sample)
        else:
            raise NotImplementedError("Sample format not supported", sample)

    @abstractmethod
    def encode_captioning(self, sample: CaptioningSample) -> Piece: ...

    def select_samples_to_pack(self, samples: list[Piece]) -> list[list[Piece]]:
        packs: list[list[Piece]] = []
        for sample in sorted(samples, key=lambda one: (-one.total_len, one.__key__)):
            fits = [pack for pack in packs if sum(one.total_len for one in pack) + sample.total_len <= self.length]
            if fits:
                fits[0].append(sample)
            else:
                packs.append([sample])
        return packs

    @stateless
    def pack_selected_samples(self, samples: list[Piece]) -> Pack:
        lengths = [0, *np.cumsum([sample.total_len for sample in samples]).tolist()]
        assert lengths[-1] <= self.length
        return Pack(
            __key__=",".join(sample.__key__ for sample in samples),
            __restore_key__=(),
            __subflavor__=None,
            __subflavors__=samples[0].__subflavors__,
            tokens=torch.cat([sample.tokens for sample in samples]),
            max_length=max(sample.total_len for sample in samples),
            cu_lengths=torch.tensor(lengths, dtype=torch.int32),
            imgs=[image for sample in samples for image in sample.imgs],
        )

    def batch(self, samples: list[Pack]) -> PackBatch:
        tokens = np.full((len(samples), self.length), -1, dtype=np.int64)
        for row, sample in enumerate(samples):
            tokens[row, : len(sample.tokens)] = sample.tokens
        return PackBatch(
            __key__=[sample.__key__ for sample in samples],
            __restore_key__=[sample.__restore_key__ for sample in samples],
            __subflavor__=None,
            __subflavors__=samples[0].__subflavors__,
            tokens=tokens,
            cu_lengths=[sample.cu_lengths for sample in samples],
            imgs=torch.stack([image for sample in samples for image in sample.imgs]),
        )

    def encode_batch(self, batch: PackBatch) -> dict:
        raw = dataclasses.asdict(batch)
        del raw["__subflavors__"]
        return raw


class CaptionPacker(Packer):
    def encode_captioning(self, sample: CaptioningSample) -> Piece:
        tokens = torch.tensor([ord(letter) for letter in sample.caption])
        return Piece(
            __key__=sample.__key__,
            __restore_key__=sample.__restore_key__,
            __subflavor__=None,
            __subflavors__=sample.__subflavors__,
            tokens=tokens,
            total_len=len(tokens),
            labels=tokens.clone(),
            imgs=[torch.from_numpy(np.array(sample.image))],
        )


class Loop:
    """An endless iterator of a loader, with its state."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iter = iter(self._cycle())

    def _cycle(self):
        while True:
            yield from self._loader

    def __next__(self) -> Any:
        return next(self._iter)

    def save_state(self) -> Any:
        return self._loader.save_state_rank()


def packed(path: str, states: str) -> dict:
    config = energon.WorkerConfig(
        rank=0, world_size=1, num_workers=0, data_parallel_group=None, worker_debug_path=None, worker_log_level=0
    )

    def loop(state: Any = None) -> Loop:
        dataset = energon.get_train_dataset(
            path,
            batch_size=2,
            task_encoder=CaptionPacker(),
            worker_config=config,
            max_samples_per_sequence=None,
            shuffle_buffer_size=None,
            packing_buffer_size=10,
            handler=handler,
            image_decode="pil",
        )
        loader = energon.get_savable_loader(dataset)
        if state is not None:
            loader.restore_state_rank(state)
        return Loop(loader)

    def seen(batch: dict) -> list:
        assert batch["imgs"].shape[1:] == (16, 16, 3)
        return [batch["__key__"], [lengths.tolist() for lengths in batch["cu_lengths"]], batch["tokens"].tolist()]

    first = loop()
    batches = [seen(next(first)) for _ in range(8)]
    file = os.path.join(states, "train_dataloader_dprank000.pt")
    torch.save({"dataloader_state_dict": first.save_state()}, file)
    ahead = [seen(next(first)) for _ in range(4)]
    again = loop(torch.load(file, map_location="cpu", weights_only=False)["dataloader_state_dict"])
    assert [seen(next(again)) for _ in range(4)] == ahead
    last = next(again)
    assert last["__restore_key__"]
    counts = [len(pack.split(",")) == len(lengths) - 1 for batch in batches for pack, lengths in zip(*batch[:2])]
    return {"fields": sorted(last), "rows": sorted({len(batch[0]) for batch in batches}), "packs": all(counts)}


# Two: a generator of plain records, validation data limited and repeated one by one ----------------------------------


@dataclass
class Record:
    __key__: str
    __subflavors__: dict
    text: np.ndarray


@dataclass
class RecordBatch(Batch):
    __keys__: list[str]
    text: torch.Tensor


class Recorder(DefaultTaskEncoder[CaptioningSample, Record, RecordBatch, dict]):
    def __init__(self) -> None:
        super().__init__()

    def encode_sample(self, sample: CaptioningSample):
        if isinstance(sample, CaptioningSample):
            yield Record(sample.__key__, sample.__subflavors__, np.frombuffer(sample.caption.encode(), np.uint8))
        else:
            raise NotImplementedError("Sample format not supported")

    def batch(self, samples: list[Record]) -> RecordBatch:
        text = np.zeros((len(samples), 40), dtype=np.int64)
        for row, sample in enumerate(samples):
            text[row, : len(sample.text)] = sample.text
        return RecordBatch(
            __key__=[sample.__key__ for sample in samples],
            __restore_key__=(),
            __keys__=[sample.__key__ for sample in samples],
            __subflavors__=[sample.__subflavors__ for sample in samples],
            text=torch.from_numpy(text),
        )

    def encode_batch(self, batch: RecordBatch) -> dict:
        raw = dataclasses.asdict(batch)
        del raw["__subflavors__"]
        return raw


def limited(path: str) -> list:
    config = WorkerConfig(rank=0, world_size=1, num_workers=2)
    found = get_val_datasets(
        path, batch_size=3, task_encoder=Recorder(), worker_config=config, handler=handler, image_decode="pil"
    )
    out = []
    for dataset, _ in found:
        repeated = RepeatDataset(dataset, worker_config=config)
        limit = LimitDataset(repeated, length=5, worker_config=config, reset_after_epoch=True)
        loader = get_loader(limit, worker_config=config)
        out += [[[batch["__keys__"], batch["text"].sum().item()] for batch in loader] for _ in range(2)]
    return out


# Three: cookers that are objects, and what is asked of files before they are opened ----------------------------------


@edataclass
class Raw(Sample):
    data: dict


class Cook:
    __stateless__ = True

    def __init__(self, function) -> None:
        self.function = function

    @stateless(failure_tolerance=1000)
    def __call__(self, sample: CrudeSample) -> Raw:
        data = self.function(sample)
        if data is None:
            raise SkipSample()
        return Raw(**basic_sample_keys(sample), data={**data, "key": sample.get("__key__")})


class Mapped(DefaultTaskEncoder):
    decoder = None

    def __init__(self, cooker: Cook) -> None:
        super().__init__()
        self.cookers = [Cooker(cook=cooker)]
        self.decoder = None


def count(path: str) -> int:
    kind = get_dataset_type(EPath(path))
    if kind == EnergonDatasetType.METADATASET:
        return sum(count(str(ref.path)) for ref in traverse_metadataset(EPath(path), split_part="train"))
    if kind == EnergonDatasetType.JSONL:
        return IJsonlIndexReader.count_samples(EPath(path))
    assert kind == EnergonDatasetType.WEBDATASET
    return int(sum((get_dataset_info(EPath(path)).get("shard_counts") or {}).values()))


def cooked(folder: str) -> dict:
    def process(sample: CrudeSample) -> dict | None:
        assert isinstance(sample["txt"], bytes)
        return None if sample["txt"] == b"r4" else {"input_ids": np.frombuffer(sample["txt"], np.uint8)}

    cook = Cook(process)
    assert get_stateless(cook.__call__)
    assert get_failure_tolerance(cook.__call__) == 1000
    config = WorkerConfig(rank=0, world_size=1, num_workers=1)
    dataset = get_train_dataset(
        f"{folder}/references",
        batch_size=None,
        task_encoder=Mapped(cook),
        worker_config=config,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        repeat=False,
    )
    loader = get_savable_loader(dataset)
    return {
        "keys": sorted(sample.data["key"] for sample in loader),
        "counts": [count(f"{folder}/{name}") for name in ("references", "mix.yaml")],
    }


if __name__ == "__main__":
    folder, states = sys.argv[1:]
    print(
        json.dumps(
            {
                "packed": packed(f"{folder}/captions", states),
                "limited": limited(f"{folder}/captions"),
                "cooked": cooked(folder),
            }
        )
    )
