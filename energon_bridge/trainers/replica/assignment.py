"""Assigns the microbatches of a global batch to ranks so that no rank waits long for another.

A global batch has G microbatches, of which each of R ranks runs A = G / R, one in each of A *rounds*. Two things
should be even: the cost of a rank over the whole step, since ranks wait for each other when gradients are reduced, and
the costs within a round, since they wait after every microbatch with FSDP and pipelines.

All arithmetic is on integers (costs as multiples of 2^-40 of the largest), because sums of floats depend on the
processor and all ranks must get the same result.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from energon_bridge.core.errors import ConfigurationError

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_RESOLUTION = 2.0**40
_GAIN = 200
"""A step lower by at least one part in this many justifies less even rounds."""
_EXCHANGES, _FREE_EXCHANGES = 64, 256
"""Most exchanges within rounds that are tried, and of any microbatches; each looks at all of them."""
_MOST_PAIRS = 1 << 20
"""Pairs of microbatches that are looked at for one exchange; where there are more, steps are even without."""


def assign_microbatches(costs: npt.ArrayLike, ranks: int) -> Integers:
    """Assign the microbatches of a global batch to ranks.

    The microbatches are sorted by cost, and R neighbours make a round: no other rounds have a smaller sum of
    largest costs, the time of a step whose rounds synchronise. Within the rounds they are dealt by Karmarkar and
    Karp's differencing: the two divisions of the widest spread are joined, the largest of one with the smallest of the
    other, until one is left. Exchanges within a round then lower the cost of the most loaded rank. Where
    dealing longest first over all rounds, or no change at all, has a lower step, that is taken, unless its rounds
    were worse than as the microbatches came. If the step is still not even, microbatches of any rounds are
    exchanged, until it is, or no exchange helps; under the same condition. That costs some of the evenness of the
    rounds, whose least sum is that of sorted neighbours.

    Args:
        costs: Costs of the G microbatches, in any unit, 0 or more; shape (G,). Rank `i % ranks` loads microbatch `i`.
        ranks: R, which divides G.

    Returns:
        Shape (G / R, R): the microbatch of each rank in each round, the most costly rounds first. A rank keeps a
        microbatch that it has loaded if that costs nothing.

    Raises:
        ConfigurationError: R does not divide G, or a cost is negative or not finite.
    """
    values = np.asarray(costs, np.float64)
    if ranks < 1 or values.ndim != 1 or not len(values) or len(values) % ranks:
        raise ConfigurationError(
            f"costs of shape {values.shape} cannot be divided between {ranks} ranks: expected one per microbatch "
            "of a global batch, a multiple of the number of ranks"
        )
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(wrong):
        raise ConfigurationError(
            f"microbatch {wrong[0]} of the global batch has cost {values[wrong[0]]}: expected a number of at least 0"
        )
    came = np.arange(len(values)).reshape(-1, ranks)
    if ranks == 1 or len(came) == 1 or not values.max():
        return came
    scaled = np.rint(values / values.max() * _RESOLUTION).astype(np.int64)
    return _relabelled(_best(scaled, came))


@dataclass(frozen=True, kw_only=True, slots=True)
class Imbalance:
    """How uneven a global batch is; 1 is even.

    Attributes:
        step: Cost of the most loaded rank, divided by the mean of the ranks.
        round: Sum of the largest costs of the rounds, divided by the same mean: the time of a step in which all ranks
            wait for each other in every round, relative to even ranks.
    """

    step: float
    round: float


def imbalance(costs: npt.ArrayLike, assignment: Integers) -> Imbalance:
    """Return how uneven the costs of a global batch are under an assignment of shape (rounds, ranks)."""
    table = np.asarray(costs, np.float64)[assignment]
    mean = float(table.sum()) / table.shape[1]
    if not mean:
        return Imbalance(step=1.0, round=1.0)
    return Imbalance(step=float(table.sum(0).max()) / mean, round=float(table.max(1).sum()) / mean)


def divide(costs: npt.ArrayLike, ranks: int) -> tuple[Integers, tuple[float, ...]]:
    """Divide the microbatches of a global batch among ranks, and say how even that is.

    Args:
        costs: Costs of the G microbatches, 0 or more; shape (G,). Rank `i % ranks` loads number `i`.
        ranks: R, which divides G.

    Returns:
        The microbatches of each rank in each round, shape (G / R, R); and figures: the step before and after, the round
        before and after (see `Imbalance`), and the share of microbatches that move.
    """
    values = np.asarray(costs, np.float64)
    before = imbalance(values, np.arange(len(values)).reshape(-1, ranks))
    runs = assign_microbatches(values, ranks)
    after = imbalance(values, runs)
    moved = int(np.count_nonzero(runs % ranks != np.arange(ranks)))
    return runs, (before.step, after.step, before.round, after.round, moved / len(values))


def _best(costs: Integers, came: Integers) -> Integers:
    """Return the assignment with the lowest step, among those whose rounds are no worse than unassigned ones."""
    ranks = came.shape[1]
    order = np.argsort(-costs, kind="stable")  # ties by position
    dealt = _exchanged(costs, _differenced(costs, order.reshape(-1, ranks)))
    limit = _step(costs, came)
    rounds = _rounds(costs, came)
    best = dealt if _step(costs, dealt) <= limit else _sorted(costs, came)
    if best is dealt and _step(costs, dealt) * _GAIN <= _mean(costs, ranks) * (_GAIN + 1):
        return dealt  # no other can be lower by more than that
    greedy = _sorted(costs, _longest_first(costs, order, ranks))
    if _step(costs, greedy) * (_GAIN + 1) < _step(costs, best) * _GAIN and _rounds(costs, greedy) <= rounds:
        best = greedy
    free = _sorted(costs, _freely_exchanged(costs, best))
    return free if _rounds(costs, free) <= rounds else best


def _step(costs: Integers, assignment: Integers) -> int:
    return int(costs[assignment].sum(0).max())


def _rounds(costs: Integers, assignment: Integers) -> int:
    return int(costs[assignment].max(1).sum())


def _mean(costs: Integers, ranks: int) -> int:
    return -(-int(costs.sum()) // ranks)


def _differenced(costs: Integers, rounds: Integers) -> Integers:
    """Assign the microbatches of each round, shape (rounds, ranks), to ranks, without changing the rounds."""
    # Largest differencing first (Karmarkar and Karp): of the two partial divisions with the largest gap between ranks,
    # the costly ranks of one are joined to the cheap ones of the other, so that the gaps cancel.
    divisions = []
    for number, row in enumerate(rounds):
        sums = costs[row]
        divisions.append((int(sums.min() - sums.max()), number, sums, row[None]))
    heapq.heapify(divisions)
    number = len(divisions)
    while len(divisions) > 1:
        _, _, sums, rows = heapq.heappop(divisions)
        _, _, other_sums, other_rows = heapq.heappop(divisions)
        down = np.argsort(-sums, kind="stable")
        up = np.argsort(other_sums, kind="stable")
        sums = sums[down] + other_sums[up]
        rows = np.concatenate([rows[:, down], other_rows[:, up]])
        heapq.heappush(divisions, (int(sums.min() - sums.max()), number, sums, rows))
        number += 1
    return _sorted(costs, divisions[0][3])


def _exchanged(costs: Integers, assignment: Integers) -> Integers:
    """Lower the cost of the most loaded rank by exchanges within rounds, until no single one helps."""
    assignment = assignment.copy()
    table = costs[assignment]
    sums = table.sum(0)
    mean = _mean(costs, table.shape[1])
    for _ in range(_EXCHANGES):
        rank = int(sums.argmax())
        largest = int(sums[rank])
        if largest * 1000 <= mean * 1001:
            break
        # By exchanging round i with rank j both ranks get at least `after[i, j]`.
        moved = table[:, [rank]] - table
        after = np.maximum(largest - moved, sums[None] + moved)
        row, other = divmod(int(after.argmin()), table.shape[1])
        if after[row, other] >= largest:
            break
        change = moved[row, other]
        for grid in (assignment, table):
            grid[row, [rank, other]] = grid[row, [other, rank]]
        sums[rank] -= change
        sums[other] += change
    return assignment


def _freely_exchanged(costs: Integers, assignment: Integers) -> Integers:
    """Lower the cost of the most loaded rank by exchanges of any microbatches with those of other ranks."""
    rounds, ranks = assignment.shape
    if rounds * assignment.size > _MOST_PAIRS:
        return assignment
    assignment = assignment.copy()
    table = costs[assignment]
    sums = table.sum(0)
    mean = _mean(costs, ranks)
    for _ in range(_FREE_EXCHANGES):
        rank = int(sums.argmax())
        largest = int(sums[rank])
        if largest * _GAIN <= mean * (_GAIN + 1):
            break
        # By giving away its microbatch i for microbatch (j, k) both ranks get at least `after[i, j, k]`.
        moved = table[:, rank, None, None] - table
        after = np.maximum(largest - moved, sums + moved)
        own, row, other = (int(place) for place in np.unravel_index(int(after.argmin()), after.shape))
        if after[own, row, other] >= largest:
            break
        change = moved[own, row, other]
        for grid in (assignment, table):
            grid[own, rank], grid[row, other] = grid[row, other], grid[own, rank]
        sums[rank] -= change
        sums[other] += change
    return assignment


def _longest_first(costs: Integers, order: Integers, ranks: int) -> Integers:
    """Give each microbatch, the most costly first, to the least loaded rank that has room for it."""
    rounds = len(order) // ranks
    heap = [(0, rank) for rank in range(ranks)]
    taken: list[list[int]] = [[] for _ in range(ranks)]
    for microbatch, cost in zip(order.tolist(), costs[order].tolist(), strict=True):
        load, rank = heap[0]
        taken[rank].append(microbatch)
        if len(taken[rank]) < rounds:
            heapq.heapreplace(heap, (load + cost, rank))
        else:
            heapq.heappop(heap)
    return np.array(taken).T


def _sorted(costs: Integers, assignment: Integers) -> Integers:
    """Order each rank's microbatches by cost, largest first: no other order has a smaller sum of rounds' maxima."""
    return np.take_along_axis(assignment, np.argsort(-costs[assignment], axis=0, kind="stable"), axis=0)


def _relabelled(assignment: Integers) -> Integers:
    """Permute the columns (ranks), which changes no cost, so that many microbatches stay on the rank that loaded them.

    Greedy: the pair of column and rank with the most microbatches in common first.
    """
    ranks = assignment.shape[1]
    loaders = assignment % ranks
    shared = np.bincount((np.arange(ranks) * ranks + loaders).ravel(), minlength=ranks * ranks)
    pairs = np.flatnonzero(shared)
    pairs = pairs[np.argsort(-shared[pairs], kind="stable")]
    column_of = np.full(ranks, -1)
    free = np.ones(ranks, bool)
    for column, rank in zip((pairs // ranks).tolist(), (pairs % ranks).tolist(), strict=True):
        if free[column] and column_of[rank] < 0:
            column_of[rank], free[column] = column, False
    column_of[column_of < 0] = np.flatnonzero(free)
    return assignment[:, column_of]
