"""Passes over validation data in the order of megatron-energon, for programs that run as its drop-in.

In megatron-energon each worker of each rank owns a stretch of every dataset and makes microbatches from its own
samples; the workers of a rank take turns. So the order depends on the numbers of ranks and workers, ranks may make
different numbers of steps, and no row appears twice. A step limit is divided among the workers, and each worker repeats
its own pass.

Here all of that is arithmetic on one line: the samples of worker 0 of rank 0, then of worker 1, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from energon_bridge.errors import EmptyDatasetError
from energon_bridge.plan.blend import InTurns
from energon_bridge.plan.choose import PassDraws
from energon_bridge.rng import IntArray
from energon_bridge.stream.leaf import Leaf

ENDLESS = 1 << 62
"""Steps of a pass that repeats without end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """How a pass is divided among ranks and workers.

    Attributes:
        ranks, workers: Numbers of ranks, and of workers of each (1 without worker processes).
        batch_size, drop_last: Of each worker's microbatches.
        limit: Steps of a rank, divided among its workers; None: no limit.
        repeats: Whether each worker starts over when it reaches its end, until the limit.
    """

    ranks: int
    workers: int
    batch_size: int
    drop_last: bool
    limit: int | None
    repeats: bool

    def limit_of(self, worker: int) -> int:
        """Return the steps of one worker of a rank."""
        if self.limit is None:
            return ENDLESS
        return self.limit // self.workers + (worker < self.limit % self.workers)


class Dealt:
    """The draws and microbatches of a pass.

    Args:
        leaves: The datasets, each in its own order.
        sizes: Samples of each dataset before its subset is taken; they shift the remainders of the datasets after it.
        deal: How they are divided.

    Attributes:
        draws: The samples on the line.
    """

    def __init__(self, leaves: Sequence[Leaf], sizes: Sequence[int], deal: Deal) -> None:
        self._leaves = leaves
        self._deal = deal
        workers = deal.ranks * deal.workers
        shares = []
        before = 0
        for leaf, size in zip(leaves, sizes, strict=True):
            shares.append(_shares(leaf.order.num_samples, workers, before % workers))
            before += size
        of_workers = np.array(shares, dtype=np.int64).reshape(len(leaves), workers).T
        self._starts: list[int] = [0, *np.cumsum(of_workers.sum(axis=1)).tolist()]
        self.draws = PassDraws(leaves=leaves, blend=InTurns(sizes=of_workers), num_draws=self._starts[-1])
        self._turns: dict[int, tuple[IntArray, IntArray]] = {}

    def _batches(self, rank: int, worker: int) -> int:
        """Return the microbatches that one worker makes in one pass over its own samples."""
        number = rank * self._deal.workers + worker
        samples = self._starts[number + 1] - self._starts[number]
        size = self._deal.batch_size
        return samples // size if self._deal.drop_last else -(-samples // size)

    def _turns_of(self, rank: int) -> tuple[IntArray, IntArray]:
        """Return the worker and microbatch of each step of a rank that does not repeat its pass."""
        found = self._turns.get(rank)
        if found is None:
            counts = [
                min(self._batches(rank, worker), self._deal.limit_of(worker)) for worker in range(self._deal.workers)
            ]
            workers = np.repeat(np.arange(self._deal.workers), counts)
            batches = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])
            order = np.lexsort((workers, batches))
            found = self._turns[rank] = workers[order], batches[order]
        return found

    def steps(self, rank: int) -> int:
        """Return the steps of a rank.

        Raises:
            EmptyDatasetError: A worker would have to repeat an empty pass.
        """
        if not self._deal.repeats:
            return int(self._turns_of(rank)[0].size)
        for worker in range(self._deal.workers):
            if self._deal.limit_of(worker) and not self._batches(rank, worker):
                raise EmptyDatasetError(
                    f"{self._leaves[0].dataset.path}: worker {worker} of rank {rank} has no batch to repeat: "
                    f"{self.draws.num_draws} samples for {self._deal.ranks} ranks of {self._deal.workers} workers. Use "
                    "fewer workers, or a smaller batch_size"
                )
        return ENDLESS if self._deal.limit is None else self._deal.limit

    def span(self, number: int) -> tuple[int, int]:
        """Return the draws [start, stop) of a microbatch; rank r has the numbers r, r + ranks, and so on."""
        step, rank = divmod(number, self._deal.ranks)
        if self._deal.repeats:
            turn, worker = divmod(step, self._deal.workers)
            batch = turn % self._batches(rank, worker)
        else:
            workers, batches = self._turns_of(rank)
            worker, batch = int(workers[step]), int(batches[step])
        owner = rank * self._deal.workers + worker
        start = self._starts[owner] + batch * self._deal.batch_size
        return start, min(start + self._deal.batch_size, self._starts[owner + 1])

    def sample_number(self, draw: int) -> int:
        """Return the number that megatron-energon gives a draw: each worker counts its own, and they take turns."""
        owner = int(np.searchsorted(self._starts, draw, side="right")) - 1
        return (draw - self._starts[owner]) * self._deal.workers + owner % self._deal.workers


def _shares(samples: int, workers: int, rotation: int) -> list[int]:
    """Return the samples of each worker; the remainder of the division goes to workers far apart."""
    least, left = divmod(samples, workers)
    shares = [0] * workers
    for place, worker in enumerate(_spread(list(range(workers)))):
        shares[worker] = least + ((place - rotation) % workers < left)
    return shares


def _spread(numbers: list[int]) -> list[int]:
    """Return numbers ordered so that every prefix is spread evenly: 0, 4, 2, 6, 1, 5, 3, 7."""
    if len(numbers) <= 2:
        return numbers
    middle = len(numbers) // 2
    left, right = _spread(numbers[:middle]), _spread(numbers[middle:])
    mixed = [number for pair in zip(left, right, strict=False) for number in pair]
    return mixed + right[len(left) :]
