"""A loader whose ranks exchange the microbatches of each global batch, so that all of them have the same work.

Every data-parallel rank loads its own microbatches as it does without balance: order, state, number of ranks and
workers stay as they are. Before a global batch is trained on, the ranks tell each other what their microbatches cost,
each of them computes the same assignment (`plan.balance`), and those that move go from the rank that loaded them to the
one that runs them. The set of microbatches of a global batch never changes.

The training thread loads the next global batch, two microbatches for each that it delivers, so that user code and
worker processes stay where they are; a thread exchanges them while the rest of this one is trained on.

A state says that whole global batches were delivered, whatever was loaded ahead. In the middle of one there is none:
what the ranks have delivered there is no beginning of the stream.
"""

from __future__ import annotations

import atexit
import datetime
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from energon_bridge.errors import BalanceError, ConfigurationError, StepMismatchError, WrongUseError
from energon_bridge.loader.document import State, read
from energon_bridge.loader.metrics import flat_metrics
from energon_bridge.loader.run_plan import DatasetSpec
from energon_bridge.loader.savable import SavableDataLoader, merged_state
from energon_bridge.loader.summary import leaf_rows
from energon_bridge.plan.balance import assign_microbatches, imbalance
from energon_bridge.replica.groups import Replica, gathered
from energon_bridge.replica.peers import Move, Peers, pack
from energon_bridge.samples.base import pin_value
from energon_bridge.topology import Ownership, WorkerConfig, data_parallel_group

logger = logging.getLogger(__name__)

Cost = Callable[[Any], float]

_PER_DELIVERY = 2
_AT_CLOSE = 5.0
"""Seconds that closing, and the end of the process, wait for an exchange."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """How the microbatches of a global batch are shared by the data-parallel ranks; `make_balance` makes it.

    Args:
        cost: Returns what a microbatch costs to train on, 0 or more, in any unit; `BatchCost` makes one. It must depend
            on the microbatch alone.
        group: A gloo group of the data-parallel ranks that nobody else uses; None: there is one rank, and nothing to
            balance.
    """

    cost: Cost
    group: Any


def make_balance(
    cost: Cost,
    *,
    pg_collection: Any = None,
    data_group: Any = None,
    replica: Replica | None = None,
    timeout_seconds: float | None = None,
) -> Balance:
    """Make the groups on which data-parallel ranks exchange microbatches. Every process of the job must call it.

    Examples:
        >>> balance = make_balance(BatchCost(tokens=1.0, attention=1e-5))  # doctest: +SKIP
        >>> train = EnergonDataloader(loader, balance=balance)  # doctest: +SKIP

    Args:
        cost: See `Balance`.
        pg_collection: megatron-core's `ProcessGroupCollection`, whose `dp` is looked at. Default: the groups of
            `megatron.core.parallel_state`, else all ranks.
        data_group: The data-parallel group of this process, where it is none of these.
        replica: Where one rank of each replica loads: from `make_replica`. These ranks balance.
        timeout_seconds: How long a rank waits for another one; default: that of torch.distributed, 30 minutes.

    Raises:
        ConfigurationError: The cost is no function, or the ranks that load are no data-parallel group.
    """
    if not callable(cost):
        raise ConfigurationError(
            f"make_balance: cost must be a function of a batch, such as BatchCost(), got {type(cost).__name__}"
        )
    if not dist.is_initialized():
        return Balance(cost=cost, group=None)
    group = data_group or data_parallel_group(pg_collection)
    world = range(dist.get_world_size())
    ranks = tuple(world if group is None else dist.get_process_group_ranks(group))
    loads = replica is None or replica.is_source
    found = gathered((int(loads), *ranks))
    timeout = None if timeout_seconds is None else datetime.timedelta(seconds=timeout_seconds)
    own = None
    for members in sorted({entry[1:] for entry in found if entry[0]}):
        if not all(found[member][0] for member in members):
            raise ConfigurationError(
                f"balance: of the data-parallel ranks {list(members)} not all load their data, so that their "
                "microbatches cannot be exchanged before they are broadcast: let every rank load "
                "(replica_loading='every_rank')"
            )
        if len(members) > 1:
            # All processes take part in making every group.
            made = dist.new_group(list(members), backend="gloo", timeout=timeout)
            own = made if ranks == members and loads else own
    return Balance(cost=cost, group=own)


def balanced(loader: Any, balance: Balance | None) -> Any:
    """Return a loader whose ranks balance their microbatches; the loader itself where there is one rank.

    Raises:
        ConfigurationError: The stream is none that can be balanced.
    """
    if balance is None or (balance.group is None and _ranks(loader) == 1):
        return loader
    return BalancedLoader(loader, balance)


def _ranks(loader: Any) -> int:
    config = getattr(loader, "config", None)
    return 1 if config is None else config.dp_size


@dataclass(kw_only=True, slots=True)
class _Share:
    """What this rank has loaded of a global batch."""

    number: int
    batches: list[Any] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    error: Exception | None = None
    state: Callable[[], State] | None = None


@dataclass(kw_only=True, slots=True)
class _Sums:
    """What the metrics are made of."""

    global_batches: int = 0
    own: float = 0.0
    figures: list[float] = field(default_factory=lambda: [0.0] * 5)


class _Exchange(threading.Thread):
    """Exchanges one global batch; `outcome` waits for it.

    Where another rank is gone it may never end, so it must not keep the process; where the process ends as it should,
    it is waited for, since a thread that is stopped within a call of gloo aborts the process.
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
    """The loader of one data-parallel rank, which exchanges microbatches with those of the other ranks.

    All ranks must make the same calls; only `save_state_rank`, `metrics` and `len` ask nobody.

    Args:
        loader: Of this rank, over an endless training stream.
        balance: From `make_balance`.

    Attributes:
        loader: The loader; it is ahead of what was delivered.

    Raises:
        ConfigurationError: The stream is none that can be balanced.
    """

    def __init__(self, loader: Any, balance: Balance) -> None:
        self.loader: SavableDataLoader = loader
        self._rounds = _check(loader, balance)
        self._cost = balance.cost
        self._peers = Peers(balance.group)
        self._stream: Iterator[Any] | None = None
        self._ready: deque[Any] = deque()
        self._exchange: _Exchange | None = None
        self._sums = _Sums()
        self._share = _Share(number=0)
        self._state: Callable[[], State] = loader.snapshot()
        self._state_after = self._state
        self._moved()

    @property
    def spec(self) -> DatasetSpec:
        """What the loader delivers."""
        return self.loader.spec

    @property
    def config(self) -> WorkerConfig:
        """Ranks and workers of the loader."""
        return self.loader.config

    @property
    def ownership(self) -> Ownership:
        """Which rank loads which lane."""
        return self.loader.ownership

    @property
    def unfinished(self) -> str | None:
        """Why there is no state just now, or None."""
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
        """Return what this rank runs of the next global batch; after an error all ranks begin it anew."""
        self._load(self._rounds)
        assert self._exchange is not None
        share = self._share
        try:
            batches = self._exchange.outcome()  # interrupted while it waits, the next call goes on waiting
        except Exception:
            self._drop()
            self.loader.restore_state_rank(self._state())
            raise
        assert share.state is not None
        self._exchange = None
        self._state_after = share.state
        self._share = _Share(number=share.number + 1)
        return batches

    def _load(self, count: int) -> None:
        """Load so many microbatches of the next global batch, and exchange it once it is there; raise nothing."""
        share = self._share
        for _ in range(count):
            if self._exchange is not None:
                return
            try:
                if self._stream is None:
                    self._stream = iter(self.loader)
                batch = next(self._stream)
                share.costs.append(self._cost_of(batch))
                share.batches.append(batch)
                if len(share.batches) == self._rounds:
                    share.state = self.loader.snapshot()
            except Exception as error:
                # The other ranks wait for this one, and what was loaded before can still be trained on.
                share.error = error
            if share.error is not None or share.state is not None:
                self._exchange = _Exchange(lambda: self._exchanged(share))

    def _cost_of(self, batch: Any) -> float:
        cost = float(self._cost(batch))
        if not (math.isfinite(cost) and cost >= 0):
            raise ConfigurationError(f"the cost of a batch must be a finite number, 0 or more, got {cost!r}")
        return cost

    # Exchanging, in a thread -----------------------------------------------------------------------------------------

    def _exchanged(self, share: _Share) -> list[Any]:
        """Return the microbatches of a global batch that this rank runs, in order."""
        peers, rounds = self._peers, self._rounds
        costs = [0.0] * rounds if share.error is not None else share.costs
        table = peers.gather([share.error is not None, share.number, *costs])
        self._raise_failures(share.error, table[:, 0], share.number)
        if len(numbers := sorted(set(table[:, 1].astype(int).tolist()))) > 1:
            raise StepMismatchError(
                f"the data-parallel ranks are at different global batches ({', '.join(map(str, numbers))}): restore "
                "the same state on all of them, and let all take the same number of microbatches"
            )
        # Of round r, rank k has loaded microbatch r R + k.
        found = table[:, 2:].T.ravel()
        assignment = assign_microbatches(found, peers.size)
        moves = [
            Move(number=number, source=number % peers.size, target=target)
            for row in assignment.tolist()
            for target, number in enumerate(row)
            if number % peers.size != target
        ]
        own = {number * peers.size + peers.rank: batch for number, batch in enumerate(share.batches)}
        own |= self._sent_and_received(share, moves, own) if moves else {}
        came = np.arange(len(found)).reshape(-1, peers.size)
        before, after = imbalance(found, came), imbalance(found, assignment)
        sums = self._sums
        sums.own = float(found[assignment[:, peers.rank]].sum())
        figures = (before.step, after.step, before.round, after.round, len(moves) / len(found))
        sums.figures = [total + figure for total, figure in zip(sums.figures, figures, strict=True)]
        sums.global_batches += 1
        return [own[number] for number in assignment[:, peers.rank].tolist()]

    def _sent_and_received(self, share: _Share, moves: Sequence[Move], own: Mapping[int, Any]) -> dict[int, Any]:
        peers = self._peers
        parcels: dict[int, Tensor] = {}
        error = None
        try:
            parcels = {move.number: pack(own[move.number]) for move in moves if move.source == peers.rank}
        except Exception as failure:
            error = failure
        sizes = [len(parcels.get(number * peers.size + peers.rank, ())) for number in range(self._rounds)]
        table = peers.gather([error is not None, *sizes])
        self._raise_failures(error, table[:, 0], share.number)
        received = peers.exchange(moves, parcels, table[:, 1:].T.ravel())
        return pin_value(received) if self.loader.pins else received

    def _raise_failures(self, error: Exception | None, failed: Any, number: int) -> None:
        """Raise the error of this rank, or say which rank has failed and why; return where none has."""
        if not failed.any():
            return
        texts = self._peers.tell("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        rank = int(np.flatnonzero(failed)[0])
        raise BalanceError(
            f"data-parallel rank {rank} could not load its part of global batch {number} of the run, so that no rank "
            f"can train on it. It failed with {texts[rank]}"
        )

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
            StateError: It does not fit; a StepMismatchError if it stands in the middle of a global batch.
        """
        self._drop()
        self.loader.restore_state_rank(state, **kwargs)
        self._moved()

    def state_dict(self) -> State:
        """Return the state of the whole run."""
        state = merged_state(self.save_state_rank(), self.config)
        assert state is not None
        return state

    def load_state_dict(self, state: State) -> None:
        """Continue from what `state_dict` returned, on any number of ranks."""
        self.restore_state_rank(state)

    def seek(self, step: int) -> None:
        """Go to a step of the run (see `SavableDataLoader.seek`); a step is a microbatch of each rank."""
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
        """Withdraw samples while the run goes on (see `SavableDataLoader.ban`).

        Raises:
            WrongUseError: A global batch was delivered in part.
        """
        return self._changed(lambda: self.loader.ban(keys, **kwargs))

    def _changed(self, change: Callable[[], int]) -> int:
        """Let go of what was loaded ahead, change the loader, and go on from where it stands."""
        state = self.save_state_rank()
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
            What the loader's own `metrics` has, and of balance: `balance_cost`, that of this rank in the last global
            batch that was exchanged; and means over all of them since this object was made: `balance_step`, the
            largest cost of a rank over the mean, and `balance_round`, the sum of the largest costs of the rounds over
            the mean cost of a rank; both as they came, `balance_step_before` and `balance_round_before`; and
            `balance_moved`, the share of microbatches that were sent to another rank.
        """
        found = self.loader.metrics()
        counted = flat_metrics(self.counters())
        found |= {name: value for name, value in counted.items() if not name.endswith(_NOT_COUNTED)}
        sums, count = self._sums, max(1, self._sums.global_batches)
        names = ("step_before", "step", "round_before", "round", "moved")
        found |= {f"balance_{name}": total / count for name, total in zip(names, sums.figures, strict=True)}
        return found | {"balance_cost": sums.own}

    def restore_sample(self, restore_key: tuple[Any, ...]) -> Any:
        """Return the batch or sample with a `__restore_key__`, encoded again: the identical one."""
        return self.loader.restore_sample(restore_key)

    def describe_restore_key(self, restore_key: tuple[Any, ...]) -> str:
        """Name the samples behind the `__restore_key__` of a batch or sample."""
        return self.loader.describe_restore_key(restore_key)

    def close(self) -> None:
        """Stop the workers; the next batch starts them again, after the global batches that were delivered."""
        if self._exchange is not None:
            self._exchange.join(_AT_CLOSE)
        self.loader.close()

    def _drop(self) -> None:
        """Forget what was loaded ahead."""
        if self._exchange is not None:
            self._exchange.join()
        self._exchange, self._stream = None, None
        self._ready.clear()
        self._share = _Share(number=self._share.number)

    def _moved(self) -> None:
        """Begin where the loader stands."""
        state = self.loader.save_state_rank()
        size = self._rounds * self._peers.size
        if state["microbatches"] % size:
            raise StepMismatchError(
                f"the data stands after {state['microbatches']} microbatches, in the middle of a global batch of "
                f"{size}: with balance a run goes on at the beginning of one. Take a state that was saved after an "
                "optimizer step, or give the global batch size with which it was saved"
            )
        if not self.loader.ownership.even:
            raise ConfigurationError(_uneven(self.loader.ownership))
        self._state = self._state_after = self.loader.snapshot()
        self._share = _Share(number=state["microbatches"] // size)


_NOT_COUNTED = ("_seconds", "ready", "worker_restarts")
"""What the loader alone knows."""


def _uneven(ownership: Ownership) -> str:
    return (
        f"balance: {ownership.world_size} data-parallel ranks do not divide the {ownership.num_lanes} lanes of the "
        f"run, so that some microbatches would be masked: use {ownership.nearest_even_world_size()} ranks"
    )


def _check(loader: Any, balance: Balance) -> int:
    """Refuse a loader that cannot be balanced; return how many microbatches each rank runs of a global batch."""
    if not isinstance(loader, SavableDataLoader):
        raise ConfigurationError(
            f"balance needs a loader of get_savable_loader, got {type(loader).__name__}: its state says which "
            "microbatches were delivered"
        )
    spec, config = loader.spec, loader.config
    if spec.finite or spec.virtual_epoch_length is not None:
        kind = "a finite stream" if spec.finite else "a virtual epoch"
        raise ConfigurationError(
            f"balance needs an endless training stream, got {kind}, whose last global batch may lack microbatches: "
            "leave balance out for it (validation), or train without repeat=False and virtual_epoch_length"
        )
    size, ranks = config.microbatches_per_global_batch, config.dp_size
    if balance.group is None or (dist.get_rank(balance.group), dist.get_world_size(balance.group)) != (
        config.dp_rank,
        ranks,
    ):
        raise ConfigurationError(
            f"balance: the loader is that of data-parallel rank {config.dp_rank} of {ranks}, but the group that "
            "make_balance has made is another one: initialise torch.distributed before both, and give make_balance the "
            "pg_collection of the data"
        )
    if size is None or size % ranks:
        raise ConfigurationError(
            f"balance: {ranks} data-parallel ranks cannot share a global batch of "
            f"{'an unknown number of' if size is None else size} microbatches: give global_batch_size (or "
            "WorkerConfig(microbatches_per_global_batch=…)), a multiple of micro_batch_size times the number of ranks"
        )
    if size == ranks:
        logger.warning(
            "balance has nothing to do: each rank runs one microbatch of a global batch; it needs two or more (a "
            "smaller micro_batch_size, or a larger global_batch_size)"
        )
    return size // ranks
