"""Training code for megatron-energon: crude samples made by two cookers, then grouped or packed.

Arguments: a metadataset and `val`, `train`, `grouped` or `packed`. Prints a line of JSON with what a pass delivers. Or
`saved` and a file: it prints the keys of ten steps, and saves the position after five.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from itertools import islice

import torch
from megatron.energon import (
    Batch,
    Cooker,
    CrudeSample,
    DefaultTaskEncoder,
    FileStore,
    Sample,
    SampleDecoder,
    SkipSample,
    WorkerConfig,
    basic_sample_keys,
    batch_pad_stack,
    cooker,
    edataclass,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from megatron.energon.task_encoder.base import stateless

LENGTH = 24


@edataclass
class Text(Sample):
    text: str
    weight: float


@edataclass
class Tokens(Sample):
    tokens: torch.Tensor
    weight: float
    keys: list[str]


@edataclass
class TokenBatch(Batch):
    tokens: torch.Tensor
    lengths: torch.Tensor
    keys: list[list[str]]


@stateless
def cook_notes(sample: CrudeSample) -> Text:
    return Text(**basic_sample_keys(sample), text=sample["txt"], weight=sample["json"]["weight"])


@stateless
@cooker(need_primary=True)
def cook_references(sample: CrudeSample, primary: FileStore, library: FileStore) -> Text:
    reference = sample["json"]["reference"]
    if reference is None:
        raise SkipSample()
    own = primary.get(".txt", sample)
    return Text(**basic_sample_keys(sample), text=f"{own} {library.get(reference, sample)}", weight=1.0)


class Encoder(DefaultTaskEncoder[Text, Tokens, TokenBatch, dict]):
    cookers = [
        Cooker(cook_notes, has_subflavors={"kind": "notes"}),
        Cooker(cook_references, has_subflavors={"kind": "references"}),
    ]
    decoder = SampleDecoder(image_decode="torchrgb8")

    @stateless(restore_seeds=True, failure_tolerance=3)
    def encode_sample(self, sample: Text) -> Tokens:
        assert WorkerConfig.active_worker_config.rank_worker_id() == 0
        tokens = torch.tensor(list(sample.text.encode())[:LENGTH])
        return Tokens.derive_from(sample, tokens=tokens, weight=sample.weight, keys=[sample.__key__])

    @stateless
    def batch(self, samples: list[Tokens]) -> TokenBatch:
        return TokenBatch.from_samples(
            samples,
            tokens=batch_pad_stack([sample.tokens for sample in samples]),
            lengths=torch.tensor([len(sample.tokens) for sample in samples]),
        )

    @stateless
    def encode_batch(self, batch: TokenBatch) -> dict:
        return {"keys": batch.keys, "tokens": batch.tokens, "lengths": batch.lengths, "__key__": batch.__key__}


class GroupingEncoder(Encoder):
    def batch_group_criterion(self, sample: Tokens) -> tuple[int, int]:
        return len(sample.tokens) // 8, 3


class PackingEncoder(Encoder):
    def select_samples_to_pack(self, samples: list[Tokens]) -> list[list[Tokens]]:
        packs: list[list[Tokens]] = []
        for sample in sorted(samples, key=lambda one: -len(one.tokens)):
            fitting = (pack for pack in packs if sum(len(one.tokens) for one in [*pack, sample]) <= 2 * LENGTH)
            pack = next(fitting, None)
            if pack is None:
                packs.append([sample])
            else:
                pack.append(sample)
        return packs

    @stateless
    def pack_selected_samples(self, samples: list[Tokens]) -> Tokens:
        return Tokens.derive_from(
            samples[0],
            tokens=torch.cat([sample.tokens for sample in samples]),
            weight=sum(sample.weight for sample in samples),
            keys=[key for sample in samples for key in sample.keys],
        )


def delivered(loader: Iterable[dict]) -> list[dict]:
    return [
        {"keys": batch["keys"], "tokens": batch["tokens"].tolist(), "lengths": batch["lengths"].tolist()}
        for batch in loader
    ]


def by_row(batches: list[dict]) -> list:
    """Return the rows of batches in an order of their own: keys and tokens without padding."""
    rows = [row for batch in batches for row in zip(batch["keys"], batch["tokens"], batch["lengths"])]
    return sorted([keys, tokens[:length]] for keys, tokens, length in rows)


def main(path: str, mode: str, state: str = "") -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    if mode == "val":
        dataset = get_val_dataset(path, worker_config=config, batch_size=4, task_encoder=Encoder())
        print(json.dumps(delivered(get_loader(dataset))))
        return
    encoders = {"train": Encoder, "grouped": GroupingEncoder, "packed": PackingEncoder, "saved": PackingEncoder}
    dataset = get_train_dataset(
        path,
        worker_config=config,
        batch_size=None if mode == "grouped" else 2,
        shuffle_buffer_size=8,
        max_samples_per_sequence=5,
        packing_buffer_size=8 if mode in ("packed", "saved") else None,
        task_encoder=encoders[mode](),
        repeat=mode in ("grouped", "saved"),
    )
    if mode == "saved":
        loader = get_savable_loader(dataset)
        batches = delivered(islice(loader, 5))
        torch.save(loader.save_state_rank(), state)
        print(json.dumps([batch["keys"] for batch in [*batches, *delivered(islice(loader, 5))]]))
        return
    if mode == "train":
        print(json.dumps(by_row(delivered(get_loader(dataset)))))
    elif mode == "grouped":
        batches = delivered(islice(get_loader(dataset), 100))
        for batch in batches:
            assert len(batch["keys"]) == 3
            assert len({length // 8 for length in batch["lengths"]}) == 1
        seen = by_row(batches)
        print(json.dumps([row for place, row in enumerate(seen) if row not in seen[:place]]))
    else:
        rows = by_row(delivered(get_loader(dataset)))
        assert max(len(tokens) for _, tokens in rows) <= 2 * LENGTH
        print(json.dumps(sorted(key for keys, _ in rows for key in keys)))


if __name__ == "__main__":
    main(*sys.argv[1:])
