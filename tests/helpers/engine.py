"""What the engine's tests share: small datasets, digests of batches, encoders, and whole topologies in this process.

`InProcessLoader` is the real loader with one thing replaced: its workers are generators of this process, asked in turn
and ahead of need as worker processes are asked. So a matrix of hundreds of topologies needs no fork.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import random
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from energon_bridge import DefaultTaskEncoder, SkipSample, TextSample, WorkerConfig, get_train_dataset
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.delivery import Delivery
from energon_bridge.core.loader.processes import Board
from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.core.loader.saved_run import read_leaves
from energon_bridge.core.loader.transport import Arena, BatchMessage, Outbox, unpack
from energon_bridge.core.loader.workers import Work, outgoing
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.core.stream.lane_state import LaneBatch
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.testing import write_shard

NUM_LANES = 24


# Datasets ------------------------------------------------------------------------------------------------------------


def text_dataset(folder: Path, **parts: Sequence[int]) -> Path:
    """Write a prepared text dataset with the given number of samples in each shard of each split part.

    The samples of a part are keyed `00000`, `00001`, … in the dataset's own order; the text is `text 0` and so on.
    """
    for part, counts in parts.items():
        (folder / part).mkdir(parents=True, exist_ok=True)
        first = 0
        for shard, count in enumerate(counts):
            samples = {f"{n:05d}": {"txt": b"text %d" % n} for n in range(first, first + count)}
            write_shard(folder / part / f"shard_{shard:03d}.tar", samples)
            first += count
    prepare_dataset(
        folder,
        split=parse_patterns([f"{part}:{part}/.*" for part in parts]),
        dataset_yaml=render_dataset_yaml("TextSample", {"text": "txt"}),
        key_index=False,
    )
    return folder


def with_prepared(dataset: DatasetSpec, **changes: Any) -> DatasetSpec:
    """Return a dataset of one leaf with other fields of what was prepared."""
    (leaf,) = dataset.leaves
    prepared = dataclasses.replace(leaf.dataset, **changes)
    leaf = dataclasses.replace(leaf, dataset=prepared, start=0, stop=prepared.num_samples)
    return dataclasses.replace(dataset, leaves=(leaf,))


def counts_of(state: Any) -> dict[str, int]:
    """Return the counters of the only leaf of a saved state."""
    (leaf,) = read_leaves(state)
    counts: dict[str, int] = leaf["counts"]
    return counts


def numbers_of(batch: Any) -> list[int]:
    """Return the numbers of the samples in a batch of a `text_dataset`."""
    return [int(key) for key in batch["__key__"]]


# Encoders ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True)
class Numbers(TextSample):
    """A text with tensors: one that its key decides, and one that chance does."""

    number: torch.Tensor
    noise: torch.Tensor


class TensorEncoder(DefaultTaskEncoder):
    """Makes tensors of varying length, with noise from the global generators."""

    def encode_sample(self, sample: TextSample) -> Any:
        number = int(sample.__key__)
        noise = torch.rand(1 + number % 3, dtype=torch.float64)
        noise[0] += random.random() + np.random.random()
        return Numbers.derive_from(sample, text=sample.text, number=torch.tensor([number]), noise=noise)


class SkippingEncoder(TensorEncoder):
    """Skips 30 % of the draws, by a throw of one of three generators."""

    def encode_sample(self, sample: TextSample) -> Any:
        throw = (random.random, np.random.random, lambda: float(torch.rand(())))[random.randrange(3)]
        if throw() < 0.3:
            raise SkipSample
        return super().encode_sample(sample)


class SeveralEncoder(TensorEncoder):
    """Yields nought to three samples for each."""

    def encode_sample(self, sample: TextSample) -> Iterator[Any]:
        for _ in range(int(torch.randint(4, ()))):
            yield super().encode_sample(sample)


class RefusingEncoder(TensorEncoder):
    """Leaves out whole microbatches by chance, and draws for those that it makes."""

    def batch(self, samples: list[Any]) -> Any:
        if random.random() < 0.3:
            raise SkipSample
        batch = super().batch(samples)
        batch.noise = batch.noise + torch.rand(batch.noise.shape)
        return batch


class PackingEncoder(SkippingEncoder):
    """Packs samples whose tensors fit into 6 numbers, first fit, and leaves the others over."""

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        packs: list[list[Any]] = []
        for sample in samples[: 2 * len(samples) // 3]:
            size = len(sample.noise)
            fitting = (pack for pack in packs if sum(len(one.noise) for one in pack) + size <= 6)
            pack = next(fitting, None)
            if pack is None:
                packs.append([sample])
            else:
                pack.append(sample)
        random.shuffle(packs)
        return packs

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        numbers = torch.cat([sample.number for sample in samples])
        noise = torch.cat([sample.noise for sample in samples]) + torch.rand(())
        return Numbers.derive_from(samples[0], text=" ".join(s.text for s in samples), number=numbers, noise=noise)


class PrePostEncoder(DefaultTaskEncoder):
    """Packs what `preencode_sample` gives, and draws after the packs have been selected."""

    select_samples_to_pack = PackingEncoder.select_samples_to_pack

    def preencode_sample(self, sample: TextSample) -> Any:
        return SkippingEncoder().encode_sample(sample)

    def postencode_sample(self, sample: Any) -> Any:
        if random.random() < 0.1:
            raise SkipSample
        sample.noise = sample.noise + torch.rand(sample.noise.shape)
        return sample

    def pack_selected_samples(self, samples: list[Any]) -> Iterator[Any]:
        yield PackingEncoder().pack_selected_samples(samples)
        if random.random() < 0.5:
            yield PackingEncoder().pack_selected_samples(samples[:1])


class GroupingEncoder(SeveralEncoder):
    """Batches samples of equal length, of each length another number."""

    def batch_group_criterion(self, sample: Any) -> tuple[Any, int | None]:
        return len(sample.noise), 1 + len(sample.noise)


class BatchesEncoder(SkippingEncoder):
    """Makes up to three batches of the samples of one."""

    def encode_batch(self, batch: Any) -> Iterator[Any]:
        for _ in range(random.randrange(4)):
            yield dataclasses.replace(batch, noise=batch.noise + torch.rand(batch.noise.shape))


class LengthsEncoder(PrePostEncoder):
    """Selects microbatches by length, makes up to three of one, and refuses lengths, samples and microbatches."""

    def sample_length(self, sample: Any) -> int:
        if random.random() < 0.05:
            raise SkipSample
        return len(sample.noise)

    def encode_batch(self, batch: Any) -> Iterator[Any]:
        return BatchesEncoder().encode_batch(batch)


ENCODERS: dict[str, type[DefaultTaskEncoder]] = {
    "packing": PackingEncoder,
    "prepost": PrePostEncoder,
    "grouping": GroupingEncoder,
    "lengths": LengthsEncoder,
    "batches": BatchesEncoder,
    "default": DefaultTaskEncoder,
    "tensors": TensorEncoder,
    "skipping": SkippingEncoder,
    "several": SeveralEncoder,
    "refusing": RefusingEncoder,
}


NEEDED: dict[str, dict[str, Any]] = {
    "packing": {"packing_buffer_size": 11},
    "prepost": {"packing_buffer_size": 11},
    "grouping": {"batch_size": None},
    "lengths": {"batch_size": None, "packing_buffer_size": 11, "max_tokens_per_microbatch": 6},
}
"""Settings without which an encoder does not do what it is there for."""


# Digests -------------------------------------------------------------------------------------------------------------


def digest(batch: Any) -> str:
    """Hash everything in a batch: names, types, shapes, keys and the bytes of tensors."""
    state = hashlib.blake2b(digest_size=12)
    _feed(state, batch)
    return state.hexdigest()


def _feed(state: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        state.update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        state.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        state.update(f"array {value.dtype} {value.shape}".encode() + value.tobytes())
    elif dataclasses.is_dataclass(value):
        state.update(type(value).__name__.encode())
        for field in dataclasses.fields(value):
            state.update(field.name.encode())
            _feed(state, getattr(value, field.name))
    elif isinstance(value, Mapping):
        _feed(state, list(value.items()))
    elif isinstance(value, (list, tuple)):
        state.update(f"{len(value)}[".encode())
        for item in value:
            _feed(state, item)
    else:
        state.update(repr(value).encode() + b";")


def comparable(state: Any) -> Any:
    """Return what a state says of the run, whoever ran it."""
    ranks = ("epoch_steps", "checksum", "world_size", "ranks")  # a virtual epoch counts the steps of ranks
    return {name: value for name, value in state.items() if name not in ranks}


def is_masked(batch: Any) -> bool:
    return not bool(batch["__valid__"].any())


# Topologies ----------------------------------------------------------------------------------------------------------


class InProcessPool:
    """Stands in for the worker processes of a loader: the same work, as far ahead, by generators of this process."""

    restarts = ready = 0

    has_workers = False

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = weakref.ref(delivery)
        self._number = delivery.config.num_workers
        self._workers: list[tuple[Iterator[Any], Arena, deque[Any]]] = []

    def begin(self, due: Iterator[tuple[int, int]]) -> None:
        delivery = self._delivery()
        assert delivery is not None
        self._due, self._ahead = due, delivery.config.prefetch_factor
        for number in range(self._number):
            arena = Arena(1 << 20)
            self._workers.append(
                (_messages(delivery.work(number, frozenset(), False), arena, self._ahead), arena, deque())
            )

    def again(self, due: Iterator[tuple[int, int]]) -> bool:
        return False

    def next_is_ready(self) -> bool:
        return True

    def metrics(self) -> dict[str, float]:
        return {"ready": self.ready, "worker_restarts": self.restarts}

    def __next__(self) -> LaneBatch:
        _, number = next(self._due)
        messages, arena, ready = self._workers[number]
        ready.extend(itertools.islice(messages, self._ahead - len(ready)))
        return LaneBatch.of_plain(unpack(ready.popleft(), arena))

    def stop(self) -> None:
        for messages, _, _ in self._workers:
            messages.close()  # type: ignore[attr-defined]
        self._workers = []


def _messages(work: Work, arena: Arena, ahead: int) -> Iterator[BatchMessage]:
    """Yield what a worker sends, with so many messages that were not opened."""
    outbox = Outbox(arena, kept=ahead)
    for item in work.items(arena, Board(), again=False):
        yield outgoing(item, outbox)


class InProcessDelivery(Delivery):
    """Delivers from workers that are generators of this process."""

    def _new_pool(self) -> Any:
        return InProcessPool(self)


class InProcessLoader(SavableDataLoader):
    """The loader, with such workers."""

    _delivery_kind = InProcessDelivery


def slots_of(arena: Arena) -> list[int]:
    """Return the state of each slot of shared memory: 0 is free, 2 with the receiver."""
    return list(arena._map[:256])


def train_dataset(path: Path, encoder: str = "tensors", **kwargs: Any) -> DatasetSpec:
    """Open a dataset for training with small slices and buffers, so that few samples exercise the whole order."""
    settings: dict[str, Any] = {"batch_size": 2, "shuffle_buffer_size": 5, "max_samples_per_sequence": 4}
    settings |= {"parallel_shard_iters": 3, "worker_config": config_of(1, 0), "task_encoder": ENCODERS[encoder]()}
    settings |= NEEDED.get(encoder, {})
    return get_train_dataset(path, **(settings | kwargs))


def config_of(world_size: int, num_workers: int, rank: int = 0, **kwargs: Any) -> WorkerConfig:
    settings: dict[str, Any] = {"num_lanes": NUM_LANES, "prefetch_factor": 1, "persistent_workers": False}
    return WorkerConfig(rank=rank, world_size=world_size, num_workers=num_workers, **(settings | kwargs))


def worker_config_of(data: Any, num_workers: int = 0, split: Any = "train") -> WorkerConfig:
    """Return what a data module makes of its settings and the ranks, for one of its loaders."""
    config: WorkerConfig = data._build_worker_config(num_workers, split)  # the name that trainers override
    return config


def loaders_of(
    dataset: DatasetSpec,
    world_size: int,
    num_workers: int,
    *,
    state: Any = None,
    kind: type[SavableDataLoader] = InProcessLoader,
    **kwargs: Any,
) -> list[SavableDataLoader]:
    """Return the loaders of all ranks of a topology, restored from a state if one is given."""
    loaders = [
        kind(dataset, worker_config=config_of(world_size, num_workers, rank, **kwargs)) for rank in range(world_size)
    ]
    for loader in loaders if state is not None else ():
        loader.restore_state_rank(state)
    return loaders


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delivered:
    """What a topology delivered: digests of the real microbatches in global order, and the states by step."""

    digests: list[str]
    masked: int
    states: dict[int, list[Any]]


def deliver(loaders: Sequence[SavableDataLoader], steps: int, save_at: Sequence[int] = ()) -> Delivered:
    """Let all ranks deliver some steps and save before some of them; rank after rank, since no rank needs another."""
    columns: list[list[tuple[str, bool]]] = []
    states: dict[int, list[Any]] = {step: [] for step in save_at}
    for loader in loaders:
        batches = iter(loader)
        column = []
        for step in range(steps + 1):
            if step in states:
                states[step].append(loader.save_state_rank())
            if step < steps:
                batch = next(batches)
                column.append((digest(batch), is_masked(batch)))
        columns.append(column)
        loader.close()
    rows = [entry for row in zip(*columns, strict=True) for entry in row]
    digests = [found for found, masked in rows if not masked]
    return Delivered(digests=digests, masked=len(rows) - len(digests), states=states)


RESUMES = [((1, 0), 7, (4, 2)), ((4, 1), 3, (3, 0)), ((2, 3), 2, (1, 0))]
"""Ranks and workers, steps, and the ranks and workers on which a run goes on."""


def check_resumes(dataset: DatasetSpec) -> None:
    """Assert that a stream of at least 48 microbatches is the same on some topologies, and over a stop in between."""
    whole = deliver(loaders_of(dataset, 1, 0), 48).digests
    assert len(set(whole)) > 45
    assert deliver(loaders_of(dataset, 2, 0), 24).digests == whole
    for (ranks, workers), steps, (new_ranks, new_workers) in RESUMES:
        before = deliver(loaders_of(dataset, ranks, workers), steps, save_at=[steps])
        after = deliver(loaders_of(dataset, new_ranks, new_workers, state=before.states[steps]), 12 // new_ranks)
        found = before.digests + after.digests
        assert found == whole[: len(found)]
