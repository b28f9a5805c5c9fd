"""The loader of ranks that exchange the microbatches of each global batch, so that all of them have the same work.

Every data-parallel rank loads its own microbatches as without balance: order, state, ranks and workers are not
affected. Before a global batch is trained on, the ranks gather the costs of its microbatches, each computes the same
assignment (`assignment`), and microbatches that move are sent from the rank that loaded them to the one that runs
them. The set of microbatches of a global batch never changes.

The training thread loads the next global batch, two microbatches for each one that it delivers, so that user code and
workers stay in their processes; another thread exchanges them while the rest of the current one is trained on.

States exist after whole global batches only: in the middle of one, the microbatches delivered by the ranks are not a
prefix of the stream.
"""

from __future__ import annotations

import atexit
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from energon_bridge.core.errors import BalanceError, ConfigurationError, StepMismatchError, WrongUseError
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.metrics import flat_metrics
from energon_bridge.core.loader.ranks import merged_state
from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.core.loader.saved_run import State, leaf_rows, read
from energon_bridge.core.order.topology import Ownership
from energon_bridge.core.samples.sample import pin_value
from energon_bridge.core.worker_config import WorkerConfig
from energon_bridge.trainers.replica.assignment import divide
from energon_bridge.trainers.replica.exchange import Move, Peers, pack

Cost = Callable[[Any], float]

FIGURES = ("step_before", "step", "round_before", "round", "moved")
_NOT_COUNTED = ("_seconds", "ready", "worker_restarts")
"""Metrics that only the inner loader can count."""
_PER_DELIVERY = 2
_AT_CLOSE = 5.0
"""Seconds that closing, and the end of the process, wait for an exchange."""


@dataclass(kw_only=True, slots=True)
class _LoadedPart:
    """The microbatches of a global batch that this rank has loaded."""

    number: int
    batches: list[Any] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    error: Exception | None = None
    state: Callable[[], State] | None = None


class _Exchange(threading.Thread):
    """Exchanges one global batch; `outcome` waits for it.

    It may never end if another rank is gone, so it must not keep the process alive. But a normal exit waits for it,
    since stopping a thread inside a call of gloo aborts the process.
    """

    def __init__(self, work: Callable[[], list[Any]]) -> None:
        super().__init__(name="energon-balance", daemon=True)
        self._work = work
        self._batches: list[Any] = []
        self._error: BaseException | None = None
        atexit.register(self.join, _AT_CLOSE)
        self.start()

    def run(self) -> None:
        try:
            self._batches = self._work()
        except BaseException as error:
            self._error = error
        finally:
            atexit.unregister(self.join)

    def outcome(self) -> list[Any]:
        self.join()
        if self._error is not None:
            raise self._error
        return self._batches


class BalancedLoader:
    """The loader of one data-parallel rank, which exchanges microbatches with the other ranks.

    All ranks must make the same calls; only `save_state_rank`, `metrics` and `len` need no communication.

    Args:
        loader: This rank's loader, over an endless training stream.
        cost: See `Balance`.
        group: A gloo group of the data-parallel ranks.

    Attributes:
        loader: The inner loader; it may be ahead of what was delivered.
    """

    def __init__(self, loader: SavableDataLoader, cost: Cost, group: Any) -> None:
        size = loader.config.microbatches_per_global_batch
        assert size is not None
        self.loader = loader
        self._rounds = size // loader.config.dp_size
        self._cost = cost
        self._peers = Peers(group)
        self._global_batches = 0
        self._own_cost = 0.0
        self._sums = [0.0] * len(FIGURES)
        self._stream: Iterator[Any] | None = None
        self._ready: deque[Any] = deque()
        self._exchange: _Exchange | None = None
        self._part = _LoadedPart(number=0)
        self._state: Callable[[], State] = loader.snapshot()
        self._state_after = self._state
        self._moved()

    @property
    def spec(self) -> DatasetSpec:
        """The dataset of the loader."""
        return self.loader.spec

    @property
    def config(self) -> WorkerConfig:
        """Ranks and workers of the loader."""
        return self.loader.config

    @property
    def ownership(self) -> Ownership:
        """Says which rank keeps the state of which lane."""
        return self.loader.ownership

    @property
    def balance_sums(self) -> tuple[int, float, Sequence[float]]:
        """The global batches balanced so far, this rank's cost of the last one, and the sums behind `metrics`."""
        return self._global_batches, self._own_cost, self._sums

    @property
    def unfinished(self) -> str | None:
        """The reason why no state can be saved now, or None."""
        if not self._ready:
            return None
        return (
            f"{self._rounds - len(self._ready)} of the {self._rounds} microbatches that each rank runs of this global "
            "batch were delivered; with balance there is a state after whole global batches only: save it after an "
            "optimizer step"
        )

    # Delivering ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.deliver()

    def __len__(self) -> int:
        """Return this rank's microbatches in an epoch of the data."""
        return len(self.loader)

    def deliver(self) -> Any:
        """Return the next microbatch that this rank runs.

        Raises:
            BalanceError: Another rank could not load its part of the global batch.
        """
        if not self._ready:
            self._ready.extend(self._next_global_batch())
        batch = self._ready.popleft()
        if not self._ready:
            self._state = self._state_after
        self._load(_PER_DELIVERY)
        return batch

    def _next_global_batch(self) -> list[Any]:
        """Return what this rank runs of the next global batch; after an error all ranks begin it again."""
        self._load(self._rounds)
        assert self._exchange is not None
        part = self._part
        try:
            batches = self._exchange.outcome()  # if interrupted here, the next call waits again
        except Exception:
            self._drop()
            self.loader.restore_state_rank(self._state())
            raise
        assert part.state is not None
        self._exchange = None
        self._state_after = part.state
        self._part = _LoadedPart(number=part.number + 1)
        return batches

    def _load(self, count: int) -> None:
        """Load microbatches of the next global batch, and start the exchange when it is complete; raises nothing."""
        part = self._part
        for _ in range(count):
            if self._exchange is not None:
                return
            try:
                if self._stream is None:
                    self._stream = iter(self.loader)
                batch = next(self._stream)
                part.costs.append(self._cost_of(batch))
                part.batches.append(batch)
                if len(part.batches) == self._rounds:
                    part.state = self.loader.snapshot()
            except Exception as error:
                # Other ranks wait for this one, and batches loaded earlier can still be trained on.
                part.error = error
            if part.error is not None or part.state is not None:
                self._exchange = _Exchange(lambda: self._exchanged(part))

    def _cost_of(self, batch: Any) -> float:
        cost = float(self._cost(batch))
        if not (math.isfinite(cost) and cost >= 0):
            raise ConfigurationError(f"the cost of a batch must be a finite number of at least 0, got {cost!r}")
        return cost

    # Exchanging, in a thread -----------------------------------------------------------------------------------------

    def _exchanged(self, part: _LoadedPart) -> list[Any]:
        """Return the microbatches of a global batch that this rank runs, in order."""
        peers = self._peers
        costs = [0.0] * self._rounds if part.error is not None else part.costs
        table = peers.gather([part.error is not None, part.number, *costs])
        self._raise_failures(part.error, table[:, 0], part.number)
        if len(numbers := sorted(set(table[:, 1].astype(int).tolist()))) > 1:
            raise StepMismatchError(
                f"the data-parallel ranks are at different global batches ({', '.join(map(str, numbers))}): restore "
                "the same state on all of them, and take the same number of microbatches on each"
            )
        # Of turn r, rank k has loaded microbatch r R + k.
        all_costs = table[:, 2:].T.ravel()
        runs, figures = divide(all_costs, peers.size)
        moves = [
            Move(number=number, source=number % peers.size, target=target)
            for row in runs.tolist()
            for target, number in enumerate(row)
            if number % peers.size != target
        ]
        own = {number * peers.size + peers.rank: batch for number, batch in enumerate(part.batches)}
        own |= self._sent_and_received(part, moves, own) if moves else {}
        self._measured(figures, float(all_costs[runs[:, peers.rank]].sum()))
        return [own[number] for number in runs[:, peers.rank].tolist()]

    def _sent_and_received(self, part: _LoadedPart, moves: Sequence[Move], own: Mapping[int, Any]) -> dict[int, Any]:
        peers = self._peers
        parcels: dict[int, Tensor] = {}
        error = None
        try:
            parcels = {move.number: pack(own[move.number]) for move in moves if move.source == peers.rank}
        except Exception as failure:
            error = failure
        sizes = [len(parcels.get(number * peers.size + peers.rank, ())) for number in range(self._rounds)]
        table = peers.gather([error is not None, *sizes])
        self._raise_failures(error, table[:, 0], part.number)
        received = peers.exchange(moves, parcels, table[:, 1:].T.ravel())
        return pin_value(received) if self.loader.pins else received

    def _raise_failures(self, error: Exception | None, failed: Any, number: int) -> None:
        """Raise the error of this rank, or a BalanceError that names the rank that failed; return if none did."""
        if not failed.any():
            return
        texts = self._peers.tell("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        rank = int(np.flatnonzero(failed)[0])
        raise BalanceError(
            f"data-parallel rank {rank} could not load its part of global batch {number} of the run, so no rank "
            f"can train on it. It failed with {texts[rank]}"
        )

    def _measured(self, figures: tuple[float, ...], own: float) -> None:
        """Record how even a global batch is, and the cost of this rank's part."""
        self._sums = [total + figure for total, figure in zip(self._sums, figures, strict=True)]
        self._own_cost = own
        self._global_batches += 1

    # State -----------------------------------------------------------------------------------------------------------

    def save_state_rank(self) -> State:
        """Return the state of this rank after the global batches that were delivered. Takes no communication.

        Raises:
            WrongUseError: A global batch was delivered in part.
        """
        if self.unfinished is not None:
            raise WrongUseError(self.unfinished)
        return self._state()

    def restore_state_rank(self, state: Any, **kwargs: Any) -> None:
        """Continue from a state (see `SavableDataLoader.restore_state_rank`), saved with or without balance.

        Raises:
            StateError: It does not fit; a StepMismatchError if it is in the middle of a global batch.
        """
        self._drop()
        self.loader.restore_state_rank(state, **kwargs)
        self._moved()

    def state_dict(self) -> State:
        """Return the state of the whole run."""
        state = merged_state(self.save_state_rank(), self.config.dp_size, self.config.data_parallel_group)
        assert state is not None
        return state

    def load_state_dict(self, state: State) -> None:
        """Continue from what `state_dict` returned, on any number of ranks."""
        self.restore_state_rank(state)

    def seek(self, step: int) -> None:
        """Go to a step of the run (see `SavableDataLoader.seek`); a step is a microbatch of each rank."""
        check_place(step * self._peers.size, self._rounds * self.config.dp_size)
        self._drop()
        self.loader.seek(step)
        self._moved()

    def set_weights(self, weights: Any, *, from_draw: int | None = None) -> int:
        """Change the weights of a blend while it runs (see `SavableDataLoader.set_weights`).

        Raises:
            WrongUseError: A global batch was delivered in part.
        """
        return self._changed(lambda: self.loader.set_weights(weights, from_draw=from_draw))

    def ban(self, keys: Any, **kwargs: Any) -> int:
        """Withdraw samples during the run (see `SavableDataLoader.ban`).

        Raises:
            WrongUseError: A global batch was delivered in part.
        """
        return self._changed(lambda: self.loader.ban(keys, **kwargs))

    def _changed(self, change: Callable[[], int]) -> int:
        """Drop the batches loaded ahead, change what comes next, and continue from the loader's position."""
        if self.unfinished is not None:
            raise WrongUseError(self.unfinished)
        state = self._state()
        self._drop()
        self.loader.restore_state_rank(state)
        try:
            return change()
        finally:
            self._moved()

    def counters(self) -> list[State]:
        """Return a row for each leaf of what this rank loaded, as `leaf_rows` describes; of whole global batches."""
        return leaf_rows(read(self._state()))

    def metrics(self) -> dict[str, float]:
        """Return what this rank did so far as plain numbers by name.

        Returns:
            The metrics of the inner loader, and `balance_cost`: the cost of this rank in the last global batch. Means
            over all global batches since this object was made: `balance_step`, the largest cost of a rank over the
            mean, and `balance_round`, the sum of the largest costs of the rounds over the mean cost of a rank; both
            without balance, `balance_step_before` and `balance_round_before`; and `balance_moved`, the share of
            microbatches that another rank would have run.
        """
        figures = self.loader.metrics()
        counted = flat_metrics(self.counters())
        figures |= {name: value for name, value in counted.items() if not name.endswith(_NOT_COUNTED)}
        count = max(1, self._global_batches)
        figures |= {f"balance_{name}": total / count for name, total in zip(FIGURES, self._sums, strict=True)}
        return figures | {"balance_cost": self._own_cost}

    def restore_sample(self, restore_key: tuple[Any, ...]) -> Any:
        """Return the batch or sample with a `__restore_key__`, encoded again: the identical one."""
        return self.loader.restore_sample(restore_key)

    def describe_restore_key(self, restore_key: tuple[Any, ...]) -> str:
        """Name the samples of the `__restore_key__` of a batch or sample."""
        return self.loader.describe_restore_key(restore_key)

    def close(self) -> None:
        """Stop the workers; the next batch starts them again, after the global batches that were delivered."""
        if self._exchange is not None:
            self._exchange.join(_AT_CLOSE)
        self.loader.close()

    def _drop(self) -> None:
        """Drop the batches loaded ahead."""
        if self._exchange is not None:
            self._exchange.join()
        self._exchange = None
        self._stream = None
        self._ready.clear()
        self._part = _LoadedPart(number=self._part.number)

    def _moved(self) -> None:
        """Begin at the loader's position."""
        check_place(self.loader.microbatches, self._rounds * self.config.dp_size)
        if not self.ownership.even:  # a state may bring another number of lanes
            raise ConfigurationError(_uneven(self.ownership))
        self._state = self._state_after = self.loader.snapshot()
        self._part = _LoadedPart(number=self.loader.microbatches // (self._rounds * self._peers.size))


def check_place(microbatches: int, size: int) -> None:
    """Raise StepMismatchError unless a position is the beginning of a global batch of a size."""
    if microbatches % size:
        raise StepMismatchError(
            f"the data is at microbatch {microbatches}, in the middle of a global batch of {size}: with balance, a "
            "run continues at the start of one. Use a state that was saved after an optimizer step, or set the "
            "global batch size that it was saved with"
        )


def check_size(size: int | None, ranks: int, who: str) -> int:
    """Return the microbatches that each rank runs of a global batch, or raise ConfigurationError."""
    if size is None or size % ranks:
        raise ConfigurationError(
            f"{who} cannot divide a global batch of "
            f"{'an unknown number of' if size is None else size} microbatches: set global_batch_size (or "
            "WorkerConfig(microbatches_per_global_batch=…)), a multiple of micro_batch_size times the number of ranks"
        )
    return size // ranks


def _uneven(ownership: Ownership) -> str:
    """Return the error for masked microbatches."""
    return (
        f"balance: {ownership.world_size} data-parallel ranks do not divide the {ownership.num_lanes} lanes of the "
        f"run, so that some microbatches would be masked: use {ownership.nearest_even_world_size()} ranks"
    )
