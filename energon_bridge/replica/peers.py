"""The data-parallel ranks that share a global batch: what they tell each other, and the microbatches that they send.

All of it runs on a gloo group of its own, from one thread: a collective of the training loop can never come in between,
and GPUs and their streams have no part in it. A microbatch travels as one uint8 tensor: eight bytes with the length of
the text of `structure`, the text, and the flat tensor of each dtype, each from a multiple of 64 bytes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from energon_bridge.errors import BalanceError
from energon_bridge.replica.exchange import read, written

_ALIGNED = 64
_CPU = torch.device("cpu")
_TEXT = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A microbatch on its way.

    Args:
        number: Its place in the global batch.
        source: The data-parallel rank that has loaded it.
        target: The one that runs it.
    """

    number: int
    source: int
    target: int


class Peers:
    """The data-parallel ranks, as one of them sees them. All must make the same calls in the same order.

    Args:
        group: A gloo group of the data-parallel ranks that nobody else uses; None: there is one.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def gather(self, values: Sequence[float]) -> npt.NDArray[np.float64]:
        """Return the numbers of all ranks, shape (ranks, numbers)."""
        own = torch.tensor(values, dtype=torch.float64)
        return torch.stack(self._gathered(own)).numpy()

    def tell(self, text: str) -> list[str]:
        """Return the texts of all ranks, cut to 4,096 bytes."""
        raw = text.encode()[:_TEXT]
        own = torch.frombuffer(bytearray(raw.ljust(_TEXT, b"\0")), dtype=torch.uint8)
        return [bytes(entry.numpy()).rstrip(b"\0").decode(errors="replace") for entry in self._gathered(own)]

    def exchange(
        self, moves: Sequence[Move], parcels: Mapping[int, Tensor], sizes: npt.NDArray[np.float64]
    ) -> dict[int, Any]:
        """Send and receive microbatches.

        Args:
            moves: All moves of the global batch, the same on every rank.
            parcels: What `pack` made of those that this rank sends, by number.
            sizes: Bytes of each microbatch that moves, by number.

        Returns:
            The microbatches that this rank receives, by number.
        """
        received = {
            move.number: torch.empty(int(sizes[move.number]), dtype=torch.uint8)
            for move in moves
            if move.target == self.rank
        }
        with self._reaching():
            works = [
                dist.irecv(received[move.number], self._global(move.source), self.group, move.number)
                for move in moves
                if move.target == self.rank
            ]
            works += [
                dist.isend(parcels[move.number], self._global(move.target), self.group, move.number)
                for move in moves
                if move.source == self.rank
            ]
            for work in works:
                assert work is not None  # every rank is in the group
                work.wait()
        return {number: unpack(parcel) for number, parcel in received.items()}

    def _gathered(self, own: Tensor) -> list[Tensor]:
        if self.group is None:
            return [own]
        found = [torch.empty_like(own) for _ in range(self.size)]
        with self._reaching():
            dist.all_gather(found, own, group=self.group)
        return found

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Turn gloo's failures to reach another rank into an error with the cause."""
        try:
            yield
        except RuntimeError as error:
            raise BalanceError(
                f"data-parallel rank {self.rank} of {self.size} cannot reach another one to balance microbatches: that "
                "rank has ended, or took fewer batches than this one within the timeout of the group. Look at the "
                f"first error of the other ranks ({error})"
            ) from error

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)


def pack(value: Any) -> Tensor:
    """Write a microbatch down as one uint8 tensor.

    Raises:
        ConfigurationError: Something in it cannot be sent.
    """
    text, flats = written(value, _CPU)
    head = len(text).to_bytes(8, "little") + text
    starts = [_aligned(len(head))]
    for flat in flats:
        starts.append(_aligned(starts[-1] + len(flat)))
    parcel = torch.empty(starts[-1], dtype=torch.uint8)
    parcel[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    for start, flat in zip(starts, flats, strict=False):
        parcel[start : start + len(flat)] = flat
    return parcel


def unpack(parcel: Tensor) -> Any:
    """Build the microbatch again; its tensors are views of the parcel."""
    length = int.from_bytes(bytes(parcel[:8].numpy()), "little")
    place = _aligned(8 + length)

    def take(size: int) -> Tensor:
        nonlocal place
        flat = parcel[place : place + size]
        place = _aligned(place + size)
        return flat

    return read(bytes(parcel[8 : 8 + length].numpy()), take, _CPU)


def _aligned(size: int) -> int:
    return size + -size % _ALIGNED
