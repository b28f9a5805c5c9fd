"""What programs written for megatron-energon expect of a loader, for the drop-in.

Microbatches and samples are numbered by rank and worker, no row is masked, and no key is added to a dict.

Passes over validation data are in the order of megatron-energon, where each worker of each rank owns a stretch of every
dataset and makes microbatches from its own samples; the workers of a rank take turns. So the order depends on the
numbers of ranks and workers, ranks may make different numbers of steps, and no row appears twice. A step limit is
divided among the workers, and each worker repeats its own pass. Here all of that is arithmetic on one line: the samples
of worker 0 of rank 0, then of worker 1, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch.utils.data

from energon_bridge.compat.exceptions import FatalSampleError
from energon_bridge.core import errors
from energon_bridge.core.encoder.hooks import UNKNOWN
from energon_bridge.core.errors import ConfigurationError, EmptyDatasetError, StoppedByPolicyError
from energon_bridge.core.order.blend import InTurns
from energon_bridge.core.order.choose import PassDraws
from energon_bridge.core.order.rng import IntArray
from energon_bridge.core.order.topology import Ownership
from energon_bridge.core.stream.conventions import Conventions, PassLeaf
from energon_bridge.core.stream.pipeline import attach

ENDLESS = 1 << 62
"""Number of steps that stands for a pass which repeats without end."""


@dataclass(frozen=True, kw_only=True)
class EnergonConventions(Conventions):
    """Those of megatron-energon.

    Args:
        repeats: A pass starts over until its limit, or without end.
        shown: A command shows the batches, by their meta fields: dicts have them, too.
    """

    stands_for = "megatron-energon"
    masks = listing_has_length = False
    no_number = UNKNOWN
    first_packs = "full"  # code may rely on full buffers

    repeats: bool = False
    shown: bool = False

    def order_of_pass(
        self, leaves: Sequence[PassLeaf], *, ranks: int, workers: int, rows: int, drop_last: bool, limit: int | None
    ) -> Dealt:
        """Return the order of ranks and workers."""
        return Dealt(
            leaves=leaves,
            ranks=ranks,
            workers=workers,
            rows=rows,
            drop_last=drop_last,
            limit=limit,
            repeats=self.repeats,
        )

    def recorded(self, *, ranks: int, workers: int, limit: int | None) -> dict[str, Any]:
        """Return the ranks and workers, and the limit that they divide."""
        return {"dp_size": ranks, "num_workers": workers, "limit": limit}

    def end(self, end: int, *, rank: int, ranks: int, limit: int | None) -> int:
        """Return where a pass is over for a rank: when no microbatch is left for it, unless it repeats."""
        if self.repeats:
            return ENDLESS if limit is None else limit * ranks
        return max(0, end - rank)

    def epoch_samples(self, samples: Iterable[Fraction]) -> Fraction:
        """Return the samples in an epoch, rounded down for each dataset."""
        return Fraction(sum(map(int, samples)))

    def check_ranks(self, ownership: Ownership) -> None:
        """Raise if some microbatches would be masked."""
        if not ownership.even:
            raise ConfigurationError(
                f"{ownership.world_size} data-parallel ranks do not divide the {ownership.num_lanes} lanes, so some "
                "microbatches would be masked, which programs written for megatron-energon do not expect: use "
                f"{ownership.nearest_even_world_size()} ranks, or import energon_bridge and read batch.__valid__"
            )

    def batch_numbers(self, ranks: int) -> Callable[[int], int]:
        """Return a function that numbers microbatches among those of their rank."""
        return lambda number: number // ranks

    def sample_numbers(self, lane: int, *, num_lanes: int, rows: int, ranks: int, workers: int) -> Callable[[int], int]:
        """Return a function that numbers draws as megatron-energon: each worker counts its own, workers take turns."""

        def number_of(draw: int) -> int:
            turn, row = divmod(draw, rows)
            batch, worker = divmod((turn * num_lanes + lane) // ranks, workers)
            return (batch * rows + row) * workers + worker

        return number_of

    def attach(self, batch: Any, name: str, value: Any) -> None:
        """Set a meta field; a dict gets no new keys, for programs that call `model(**batch)`.

        A restore key in a dict is made of lists, as torch's DataLoader delivers it.
        """
        if self.shown or type(batch) is not dict:
            attach(batch, name, value)
        elif name == "__valid__" and batch.get(name, value) is None:  # left by `asdict` of a batch
            del batch[name]
        elif name in batch:
            attach(batch, name, torch.utils.data.default_convert(value) if name == "__restore_key__" else value)

    def raised(self, error: Exception, on_error: Any) -> BaseException:
        """Return the exception to raise: that of the program's hook or handler, which it may catch, or ours."""
        if isinstance(error, StoppedByPolicyError) and on_error != "skip" and error.__cause__ is not None:
            return error.__cause__
        return FatalSampleError(str(error)) if type(error) is errors.FatalSampleError else error

    def delivered(self, batch: Any) -> Any:
        """Return a batch with its arrays as tensors, as torch's DataLoader gives them; records stay as they are."""
        return torch.utils.data.default_convert(batch)


# ---------------------------------------------------------------------------------------------------------------------
# The order of a pass.


@dataclass(kw_only=True, eq=False)
class Dealt:
    """A pass over validation data, divided among workers as megatron-energon does it: draws and microbatches.

    All samples lie on one line, those of an owner (worker `w` of rank `r` is owner `r * workers + w`) side by side.

    Args:
        leaves: The datasets, each in its own order.
        ranks, workers: Number of ranks, and of the workers of each rank.
        rows, drop_last: Rows of a microbatch, and whether a smaller last one of a worker is left out.
        limit: Steps of a rank, divided among its workers; None: no limit.
        repeats: Whether each worker starts over when it reaches its end, until the limit.

    Attributes:
        draws: The samples on the line.
    """

    leaves: Sequence[PassLeaf]
    ranks: int
    workers: int
    rows: int
    drop_last: bool
    limit: int | None
    repeats: bool

    def __post_init__(self) -> None:
        owners = self.ranks * self.workers
        per_owner = []
        before = 0
        for leaf in self.leaves:
            per_owner.append(_divided(leaf.order.num_samples, owners, before % owners))
            # megatron-energon counts all samples of the datasets before, also those outside of their subsets.
            before += leaf.dataset.num_samples
        of_owners = np.array(per_owner, dtype=np.int64).reshape(len(self.leaves), owners).T
        self._starts: list[int] = [0, *np.cumsum(of_owners.sum(axis=1)).tolist()]
        self.draws = PassDraws(leaves=self.leaves, blend=InTurns(sizes=of_owners), num_draws=self._starts[-1])
        self._turns: dict[int, tuple[IntArray, IntArray]] = {}

    def _limit_of(self, worker: int) -> int:
        """Return the steps of one worker of a rank."""
        if self.limit is None:
            return ENDLESS
        return self.limit // self.workers + (worker < self.limit % self.workers)

    def _batches(self, rank: int, worker: int) -> int:
        """Return the microbatches that one worker makes in one pass over its own samples."""
        number = rank * self.workers + worker
        samples = self._starts[number + 1] - self._starts[number]
        size = self.rows
        return samples // size if self.drop_last else -(-samples // size)

    def _turns_of(self, rank: int) -> tuple[IntArray, IntArray]:
        """Return, for each step of a rank, the worker and the number of its microbatch; for a pass without repeats.

        Workers take turns; one that has no more microbatches is skipped.
        """
        turns = self._turns.get(rank)
        if turns is None:
            counts = [min(self._batches(rank, worker), self._limit_of(worker)) for worker in range(self.workers)]
            workers = np.repeat(np.arange(self.workers), counts)
            batches = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])
            order = np.lexsort((workers, batches))
            turns = self._turns[rank] = workers[order], batches[order]
        return turns

    def steps(self, rank: int) -> int:
        """Return the steps of a rank.

        Raises:
            EmptyDatasetError: A worker would have to repeat an empty pass.
        """
        if not self.repeats:
            return int(self._turns_of(rank)[0].size)
        for worker in range(self.workers):
            if self._limit_of(worker) and not self._batches(rank, worker):
                raise EmptyDatasetError(
                    f"{self.leaves[0].dataset.path}: worker {worker} of rank {rank} has no batch to repeat: "
                    f"{self.draws.num_draws} samples for {self.ranks} ranks of {self.workers} workers. Use "
                    "fewer workers, or a smaller batch_size"
                )
        return ENDLESS if self.limit is None else self.limit

    def span(self, number: int) -> tuple[int, int]:
        """Return the first draw of microbatch `number` of all ranks, and the one behind its last."""
        step, rank = divmod(number, self.ranks)
        if self.repeats:
            turn, worker = divmod(step, self.workers)
            batch = turn % self._batches(rank, worker)
        else:
            workers, batches = self._turns_of(rank)
            worker = int(workers[step])
            batch = int(batches[step])
        owner = rank * self.workers + worker
        start = self._starts[owner] + batch * self.rows
        return start, min(start + self.rows, self._starts[owner + 1])

    def sample_number(self, draw: int) -> int:
        """Return the number that megatron-energon gives a draw: each worker counts its own, and they take turns."""
        owner = int(np.searchsorted(self._starts, draw, side="right")) - 1
        return (draw - self._starts[owner]) * self.workers + owner % self.workers


def _divided(samples: int, workers: int, rotation: int) -> list[int]:
    """Return the number of samples of each worker; the remainder goes to workers far apart, from `rotation` on."""
    least, left = divmod(samples, workers)
    numbers = [0] * workers
    for place, worker in enumerate(_spread(list(range(workers)))):
        numbers[worker] = least + ((place - rotation) % workers < left)
    return numbers


def _spread(numbers: list[int]) -> list[int]:
    """Return numbers ordered so that every prefix is spread evenly: 0, 4, 2, 6, 1, 5, 3, 7."""
    if len(numbers) <= 2:
        return numbers
    middle = len(numbers) // 2
    left = _spread(numbers[:middle])
    right = _spread(numbers[middle:])
    mixed = [number for pair in zip(left, right, strict=False) for number in pair]
    return mixed + right[len(left) :]
