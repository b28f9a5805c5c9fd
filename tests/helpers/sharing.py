"""What tests of own-share loading share: texts of known sizes with columns, encoders, and all ranks in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from engine import InProcessLoader, Numbers, TensorEncoder, config_of, digest, loaders_of, text_dataset
from mixing import metadataset

from energon_bridge import BatchCost, ColumnCost, Packer, TextSample, get_train_dataset
from energon_bridge.core.loader.run_plan import DatasetSpec
from energon_bridge.tools.columns.making import add_column
from energon_bridge.trainers.replica.balance import Balance, balanced

G, LANES, LIMIT = 8, 24, 20
COST = ColumnCost(tokens="size", patches="size // 3", weights=BatchCost(tokens=1.0, attention=0.1, patches=0.5))


def size_of_number(number: int) -> int:
    return 1 + number * 37 % 11 + 5 * (number % 7 == 0)


def _size(sample: TextSample) -> int:
    return size_of_number(int(sample.__key__))


def write_sized(folder: Path) -> Path:
    """Write two datasets of texts, with a column of their sizes."""
    for name, counts in (("a", [40, 27, 33]), ("b", [50, 21])):
        text_dataset(folder / name, train=counts)
        add_column(folder / name, "size", _size)
    return folder


class Sized(TensorEncoder):
    """Makes tensors of the size of a sample; `bad` samples fail, `skipped` ones are skipped."""

    def __init__(self, bad: Sequence[int] = (), wrong: int = -1) -> None:
        super().__init__()
        self.bad, self.wrong = frozenset(bad), wrong
        self.packer: Packer[Any] = Packer(limits={"tokens": LIMIT, "samples": 4}, size_of=lambda s: len(s.noise))

    def encode_sample(self, sample: TextSample) -> Any:
        number = int(sample.__key__)
        if number in self.bad:
            raise ValueError("this one is bad")
        noise = torch.rand(size_of_number(number) + (number == self.wrong))
        return Numbers.derive_from(sample, text=sample.text, number=torch.tensor([number]), noise=noise)

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return self.packer.select(samples)

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        numbers, noise = (torch.cat([getattr(sample, name) for sample in samples]) for name in ("number", "noise"))
        return Numbers.derive_from(samples[0], text=" ".join(s.text for s in samples), number=numbers, noise=noise)


def sized_dataset(folder: Path, kind: str, *, bad: Sequence[int] = (), wrong: int = -1, **kwargs: Any) -> DatasetSpec:
    """Open one of `plain`, `mix`, `packed` and `packed mix`."""
    source: Any = folder / "a"
    if "mix" in kind:
        source = metadataset(
            folder, train={"blend": [{"path": "./a", "weight": 2}, {"path": "./b", "weight": 1, "filter": "size > 2"}]}
        )
    settings: dict[str, Any] = {"batch_size": 2, "shuffle_buffer_size": 5, "max_samples_per_sequence": 4}
    settings |= {"parallel_shard_iters": 3, "task_encoder": Sized(bad, wrong)}
    settings |= {"worker_config": config_of(1, 0, microbatches_per_global_batch=G, num_lanes=LANES)}
    settings |= {"packing_buffer_size": 12} if "packed" in kind else {}
    return get_train_dataset(source, **(settings | kwargs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A microbatch that was delivered: its digest and what its samples cost."""

    digest: str
    numbers: tuple[int, ...]


def seen(batch: Any) -> Seen:
    return Seen(digest=digest(batch), numbers=numbers_of(batch))


def numbers_of(batch: Any) -> tuple[int, ...]:
    """Return the numbers of the samples in a batch, those of packs, too."""
    return tuple(int(word) for text in batch.text for word in text.split()[1::2])


def open_shared(
    dataset: DatasetSpec, ranks: int, workers: int = 0, *, window: int = 1, state: Any = None, **kwargs: Any
) -> list[Any]:
    """Open the loaders of all ranks, each of which loads its own share."""
    config = {"num_lanes": LANES, "microbatches_per_global_batch": G} | kwargs
    loaders = loaders_of(dataset, ranks, workers, kind=InProcessLoader, **config)
    balance = Balance(cost=COST, group=None, window=window, own_share=True)
    found = [balanced(loader, balance) for loader in loaders]
    for loader in found if state is not None else ():
        loader.restore_state_rank(state)
    return found


def run_shared(loaders: list[Any], global_batches: int) -> list[list[list[Seen]]]:
    """Let all ranks run some global batches; return what each rank ran, shape (global batches, ranks, rounds)."""
    rounds = G // len(loaders)
    return [[[seen(loader.deliver()) for _ in range(rounds)] for loader in loaders] for _ in range(global_batches)]


def sets_of(found: list[list[list[Seen]]]) -> list[list[str]]:
    """Return the microbatches of each global batch, sorted."""
    return [sorted(batch.digest for rank in ranks for batch in rank) for ranks in found]


def as_it_comes(dataset: DatasetSpec, global_batches: int, state: Any = None) -> list[list[str]]:
    """Return the sets of the global batches on one rank without balance."""
    (loader,) = loaders_of(dataset, 1, 0, state=state, num_lanes=LANES, microbatches_per_global_batch=G)
    found = [sorted(digest(loader.deliver()) for _ in range(G)) for _ in range(global_batches)]
    loader.close()
    return found
