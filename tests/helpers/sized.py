"""Texts of known sizes with a column of them, and an encoder that makes tensors of these sizes, or packs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from engine import Numbers, TensorEncoder, text_dataset

from energon_bridge import Packer, TextSample
from energon_bridge.tools.columns.making import add_column

LIMIT = 20


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
    """Makes tensors of the size of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.packer: Packer[Any] = Packer(limits={"tokens": LIMIT, "samples": 4}, size_of=lambda s: len(s.noise))

    def encode_sample(self, sample: TextSample) -> Any:
        number = int(sample.__key__)
        noise = torch.rand(size_of_number(number))
        return Numbers.derive_from(sample, text=sample.text, number=torch.tensor([number]), noise=noise)

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return self.packer.select(samples)

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        numbers, noise = (torch.cat([getattr(sample, name) for sample in samples]) for name in ("number", "noise"))
        return Numbers.derive_from(samples[0], text=" ".join(s.text for s in samples), number=numbers, noise=noise)


def sets_of(found: list[list[list[str]]]) -> list[list[str]]:
    """Return the microbatches of each global batch, sorted."""
    return [sorted(batch for rank in ranks for batch in rank) for ranks in found]
