"""A loader whose ranks exchange the microbatches of each global batch, so that all of them have the same work.

Every data-parallel rank loads its own microbatches as without balance: order, state, ranks and workers are not
affected. Before a global batch is trained on, the ranks gather the costs of its microbatches, each computes the same
assignment (`assignment`), and microbatches that move are sent from the rank that loaded them to the one that runs
them. The set of microbatches of a global batch never changes.

The training thread loads the next global batch, two microbatches for each one that it delivers, so that user code and
workers stay in their processes; another thread exchanges them while the rest of the current one is trained on.

If costs are known before anything is loaded (`ColumnCost`), each rank loads only what it runs (`balanced`), and nothing
is exchanged.

In a *window* of K global batches, the microbatches of all of them are loaded and exchanged together, cut into K new
global batches (`assignment.divide`). A state within a window has the lanes as they were at its beginning, the
number of microbatches delivered, and K in its settings; a resume loads the window again.
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

from energon_bridge.core.errors import BalanceError, ConfigurationError, StepMismatchError, is_whole
from energon_bridge.core.loader.document import State
from energon_bridge.core.loader.position import Mode
from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.core.order.rng import fold, key_of
from energon_bridge.core.samples.base import pin_value
from energon_bridge.trainers.replica.assignment import divide
from energon_bridge.trainers.replica.balanced import BalancedLoader, OwnShareLoader
from energon_bridge.trainers.replica.costs import ColumnCost
from energon_bridge.trainers.replica.exchange import Move, Peers, pack
from energon_bridge.trainers.replica.groups import Replica, data_parallel_group, gathered
from energon_bridge.trainers.replica.shares import at_window, in_window, sharing_of, why_unplanned, window_settings

logger = logging.getLogger(__name__)

Cost = Callable[[Any], float]

LONGEST_WINDOW = 1 << 16
_PER_DELIVERY = 2
_AT_CLOSE = 5.0
"""Seconds that closing, and the end of the process, wait for an exchange."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """How the data-parallel ranks divide the microbatches of a global batch; made by `make_balance`.

    Args:
        cost: Returns the cost of training on a microbatch, 0 or more, in any unit, such as a `BatchCost`. It must
            depend on the microbatch alone.
        group: A gloo group of the data-parallel ranks for this purpose only; None: there is one rank, and nothing to
            balance.
        window: Global batches whose microbatches are cut into new global batches by cost; 1: each keeps its own.
        own_share: Whether each rank loads only what it runs; None: if the cost is a `ColumnCost` and the stream can be
            planned by it.
    """

    cost: Cost
    group: Any
    window: int = 1
    own_share: bool | None = None


def make_balance(
    cost: Cost,
    *,
    pg_collection: Any = None,
    data_group: Any = None,
    replica: Replica | None = None,
    timeout_seconds: float | None = None,
    window: int = 1,
    own_share: bool | None = None,
) -> Balance:
    """Make the groups on which data-parallel ranks exchange microbatches. Every process of the job must call it.

    Examples:
        >>> balance = make_balance(BatchCost(tokens=1.0, attention=1e-5))  # doctest: +SKIP
        >>> train = EnergonDataloader(loader, balance=balance)  # doctest: +SKIP

    Args:
        cost: See `Balance`.
        pg_collection: megatron-core's `ProcessGroupCollection` with the data-parallel group. Default: the groups of
            `megatron.core.parallel_state`, else all ranks.
        data_group: The data-parallel group of this process, if it is none of these.
        replica: From `make_replica`, if one rank of each replica loads. These ranks balance.
        timeout_seconds: How long a rank waits for another; default: that of torch.distributed, 30 minutes.
        window: Cut the microbatches of this many global batches into as many new ones of about equal microbatches, for
            ranks that run one microbatch of each global batch. This changes the samples of a global batch; a run keeps
            its window.
        own_share: False: ranks exchange microbatches even if a `ColumnCost` would let each load its own share. True:
            raise an error if own shares are not possible.

    Raises:
        ConfigurationError: The cost is not a function, or the ranks that load are not a data-parallel group.
    """
    if not callable(cost):
        raise ConfigurationError(
            f"make_balance: cost must be a function of a batch, such as BatchCost(), got {type(cost).__name__}"
        )
    if not is_whole(window) or not 1 <= window <= LONGEST_WINDOW:
        raise ConfigurationError(
            f"make_balance: window must be a number of global batches, from 1 to {LONGEST_WINDOW}, got {window!r}"
        )
    window = int(window)  # as states hold it
    if own_share and not isinstance(cost, ColumnCost):
        raise ConfigurationError(
            f"make_balance: own_share=True needs a ColumnCost, which is known before loading, got {type(cost).__name__}"
        )
    if not dist.is_initialized():
        return Balance(cost=cost, group=None, window=window, own_share=own_share)
    group = data_group or data_parallel_group(pg_collection)
    world = range(dist.get_world_size())
    ranks = tuple(world if group is None else dist.get_process_group_ranks(group))
    loads = replica is None or replica.is_source
    entries = gathered((int(loads), *ranks))
    timeout = None if timeout_seconds is None else datetime.timedelta(seconds=timeout_seconds)
    own = None
    for members in sorted({entry[1:] for entry in entries if entry[0]}):
        if not all(entries[member][0] for member in members):
            raise ConfigurationError(
                f"balance: some of the data-parallel ranks {list(members)} get their data by broadcast, so "
                "microbatches cannot be exchanged before: let every rank load (replica_loading='every_rank')"
            )
        if len(members) > 1:
            # All processes take part in making every group.
            made = dist.new_group(list(members), backend="gloo", timeout=timeout)
            own = made if ranks == members and loads else own
    return Balance(cost=cost, group=own, window=window, own_share=own_share)


def balanced(loader: Any, balance: Balance | None) -> Any:
    """Return a loader whose ranks balance their microbatches; the loader itself if there is nothing to balance.

    Raises:
        ConfigurationError: The stream cannot be balanced.
    """
    if balance is None:
        return loader
    alone = balance.group is None and _ranks(loader) == 1
    size = getattr(getattr(loader, "config", None), "microbatches_per_global_batch", None)
    planned = isinstance(balance.cost, ColumnCost) and balance.own_share is not False
    if alone and (size is None or not planned) and balance.window == 1:
        return loader
    if balance.window > 1 and getattr(loader, "spec", None) is not None and loader.spec.buckets is not None:
        raise ConfigurationError(
            f"balance: window={balance.window} makes new global batches of several, which come from different buckets "
            "(group_by): leave out the window"
        )
    if balance.window > 1 and not getattr(balance.cost, "finished", True):
        raise ConfigurationError(
            f"balance: with window={balance.window} the cost decides which samples a global batch has, and a "
            "CostWarmup changes it during the run: fit first, then start a run with its weights"
        )
    size = _check(loader, balance, asks=not planned)
    if isinstance(balance.cost, ColumnCost):
        why = "own_share=False" if balance.own_share is False else why_unplanned(loader.spec)
        if why is None:
            sharing = sharing_of(loader.spec, size, balance.cost, balance.window)
            _say(loader, "every rank loads only the microbatches that it runs, planned from columns")
            return OwnShareLoader(loader, sharing, balance.group)
        if balance.own_share:
            raise ConfigurationError(f"balance: ranks cannot load their own share, since {why}")
        _say(loader, f"ranks exchange the microbatches that they have loaded; own shares are not planned: {why}")
        _check(loader, balance, asks=True)
    if alone and balance.window == 1:
        return loader
    return ExchangingLoader(loader, balance)


def _say(loader: Any, how: str) -> None:
    if loader.config.dp_rank == 0:
        logger.info("balance: %s", how)


def _ranks(loader: Any) -> int:
    config = getattr(loader, "config", None)
    return 1 if config is None else config.dp_size


@dataclass(kw_only=True, slots=True)
class _Share:
    """The microbatches of a global batch (or window) that this rank has loaded."""

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


class ExchangingLoader(BalancedLoader):
    """The loader of one data-parallel rank, which exchanges microbatches with the other ranks.

    All ranks must make the same calls; only `save_state_rank`, `metrics` and `len` need no communication.

    Args:
        loader: This rank's loader, over an endless training stream.
        balance: From `make_balance`.
    """

    def __init__(self, loader: SavableDataLoader, balance: Balance) -> None:
        size = loader.config.microbatches_per_global_batch
        assert size is not None
        super().__init__(loader, size // loader.config.dp_size, balance.window)
        self._cost = balance.cost
        self._peers = Peers(balance.group)
        self._key = key_of("balance window", loader.config.run_seed)
        loader.follow(Mode(), window_settings(balance.window, size))
        self._stream: Iterator[Any] | None = None
        self._ready: deque[Any] = deque()
        self._exchange: _Exchange | None = None
        self._share = _Share(number=0)
        self._skipped = 0
        self._state: Callable[[], State] = loader.snapshot()
        self._state_after = self._state
        self._moved()

    @property
    def _turns(self) -> int:
        """Microbatches of this rank that are exchanged together."""
        return self._rounds * self._window

    @property
    def _within(self) -> int:
        return self._turns - len(self._ready) if self._ready else self._skipped

    # Delivering ------------------------------------------------------------------------------------------------------

    def deliver(self) -> Any:
        """Return the next microbatch that this rank runs.

        Raises:
            BalanceError: Another rank could not load its part of the global batch.
        """
        if not self._ready:
            self._ready.extend(self._next_window()[self._skipped :])
            self._skipped = 0
        batch = self._ready.popleft()
        if not self._ready:
            self._state = self._state_after
        self._load(_PER_DELIVERY)
        return batch

    def _next_window(self) -> list[Any]:
        """Return the microbatches of the next window that this rank runs; after an error all ranks begin it again."""
        self._load(self._turns)
        assert self._exchange is not None
        share = self._share
        skipped = self._skipped
        try:
            batches = self._exchange.outcome()  # if interrupted here, the next call waits again
        except Exception:
            self._drop()
            self.loader.restore_state_rank(self._state())
            self._skipped = skipped
            raise
        assert share.state is not None
        self._exchange = None
        self._state_after = share.state
        self._share = _Share(number=share.number + 1)
        return batches

    def _load(self, count: int) -> None:
        """Load microbatches of the next window, and start the exchange when it is complete; raises nothing."""
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
                if len(share.batches) == self._turns:
                    share.state = self.loader.snapshot()
            except Exception as error:
                # Other ranks wait for this one, and batches loaded earlier can still be trained on.
                share.error = error
            if share.error is not None or share.state is not None:
                self._exchange = _Exchange(lambda: self._exchanged(share))

    def _cost_of(self, batch: Any) -> float:
        cost = float(self._cost(batch))
        if not (math.isfinite(cost) and cost >= 0):
            raise ConfigurationError(f"the cost of a batch must be a finite number of at least 0, got {cost!r}")
        return cost

    # Exchanging, in a thread -----------------------------------------------------------------------------------------

    def _exchanged(self, share: _Share) -> list[Any]:
        """Return the microbatches of a window that this rank runs, in order."""
        peers = self._peers
        costs = [0.0] * self._turns if share.error is not None else share.costs
        table = peers.gather([share.error is not None, share.number, *costs])
        self._raise_failures(share.error, table[:, 0], share.number)
        if len(numbers := sorted(set(table[:, 1].astype(int).tolist()))) > 1:
            raise StepMismatchError(
                f"the data-parallel ranks are at different global batches ({', '.join(map(str, numbers))}): restore "
                "the same state on all of them, and take the same number of microbatches on each"
            )
        # Of turn r, rank k has loaded microbatch r R + k.
        all_costs = table[:, 2:].T.ravel()
        group = self._rounds * peers.size
        divided = divide(all_costs, group, peers.size, fold(self._key, share.number))
        parts = [runs for runs, _ in divided]
        moves = [
            Move(number=number, source=number % peers.size, target=target)
            for row in np.concatenate(parts).tolist()
            for target, number in enumerate(row)
            if number % peers.size != target
        ]
        own = {number * peers.size + peers.rank: batch for number, batch in enumerate(share.batches)}
        own |= self._sent_and_received(share, moves, own) if moves else {}
        for runs, figures in divided:
            self._measured(figures, float(all_costs[runs[:, peers.rank]].sum()))
        return [own[number] for part in parts for number in part[:, peers.rank].tolist()]

    def _sent_and_received(self, share: _Share, moves: Sequence[Move], own: Mapping[int, Any]) -> dict[int, Any]:
        peers = self._peers
        parcels: dict[int, Tensor] = {}
        error = None
        try:
            parcels = {move.number: pack(own[move.number]) for move in moves if move.source == peers.rank}
        except Exception as failure:
            error = failure
        sizes = [len(parcels.get(number * peers.size + peers.rank, ())) for number in range(self._turns)]
        table = peers.gather([error is not None, *sizes])
        self._raise_failures(error, table[:, 0], share.number)
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

    # State -----------------------------------------------------------------------------------------------------------

    def _document(self) -> State:
        # In the middle of a global batch, only complete ones are counted.
        done = self._within // self._rounds
        return in_window(self._state(), done * self._rounds * self._peers.size)

    def restore_state_rank(self, state: Any, **kwargs: Any) -> None:
        self._drop()
        done = 0
        if self._window > 1:
            states = state if isinstance(state, (list, tuple)) else [state]
            state, done = at_window(states, self._span)
            self._check_place(done)
        self.loader.restore_state_rank(state, **kwargs)
        self._moved()
        self._skipped = done // self._peers.size

    def seek(self, step: int) -> None:
        self._drop()
        skipped = step % self._turns
        self._check_place(skipped * self._peers.size)
        self.loader.seek(step - skipped)
        self._moved()
        self._skipped = skipped

    def _change(self, change: Callable[[], int]) -> int:
        """Drop the batches loaded ahead, change the loader, and continue from its position."""
        state = self._state()
        self._drop()
        self.loader.restore_state_rank(state)
        try:
            return change()
        finally:
            self._moved()

    def close(self) -> None:
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
        self._skipped = 0
        self._share = _Share(number=self._share.number)

    def _moved(self) -> None:
        """Begin at the loader's position."""
        self._check_place(self.loader.microbatches)
        self._check_even()
        self._state = self._state_after = self.loader.snapshot()
        self._share = _Share(number=self.loader.microbatches // self._span)


def _check(loader: Any, balance: Balance, *, asks: bool) -> int:
    """Raise if a loader cannot be balanced; return the microbatches of a global batch.

    `asks`: the ranks exchange microbatches, and need a group for that.
    """
    if not isinstance(loader, SavableDataLoader):
        raise ConfigurationError(
            f"balance needs a loader from get_savable_loader, whose state counts microbatches, got "
            f"{type(loader).__name__}"
        )
    spec = loader.spec
    config = loader.config
    if spec.ends or spec.settings.virtual_epoch_length is not None:
        kind = "a finite stream" if spec.ends else "a virtual epoch"
        raise ConfigurationError(
            f"balance needs an endless training stream, got {kind}, whose last global batch may lack microbatches: "
            "leave balance out (for validation), or train without repeat=False and virtual_epoch_length"
        )
    size = config.microbatches_per_global_batch
    ranks = config.dp_size
    peers = Peers(balance.group)
    if (asks or balance.group is not None) and (peers.rank, peers.size) != (config.dp_rank, ranks):
        raise ConfigurationError(
            f"balance: the loader is that of data-parallel rank {config.dp_rank} of {ranks}, but make_balance "
            "found another group: initialise torch.distributed before both, and pass make_balance the pg_collection "
            "of the data"
        )
    if size is None or size % ranks:
        raise ConfigurationError(
            f"balance: {ranks} data-parallel ranks cannot divide a global batch of "
            f"{'an unknown number of' if size is None else size} microbatches: set global_batch_size (or "
            "WorkerConfig(microbatches_per_global_batch=…)), a multiple of micro_batch_size times the number of ranks"
        )
    if size == ranks > 1 and balance.window == 1 and not config.dp_rank:
        logger.warning(
            "balance has no effect, because each rank runs one microbatch of a global batch: use a smaller "
            "micro_batch_size, a larger global_batch_size, or a window of several global batches (balance_window)"
        )
    return size
