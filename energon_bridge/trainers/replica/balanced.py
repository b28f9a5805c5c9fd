"""The base class of loaders that divide the microbatches of each global batch among ranks by cost.

With `OwnShareLoader` the ranks know the costs before anything is loaded (`shares`), and each loads only what it
runs. The other loader exchanges loaded microbatches (`balance`).

States exist after whole global batches only: in the middle of one, the microbatches delivered by the ranks are not a
prefix of the stream.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from energon_bridge.core.errors import BalanceError, ConfigurationError, StepMismatchError, WrongUseError
from energon_bridge.core.loader.document import State, leaf_rows, read, write
from energon_bridge.core.loader.fits import read_all
from energon_bridge.core.loader.metrics import flat_metrics
from energon_bridge.core.loader.position import merged_state
from energon_bridge.core.loader.run_plan import DatasetSpec
from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.core.order.topology import Ownership
from energon_bridge.core.worker_config import WorkerConfig
from energon_bridge.trainers.replica.shares import Sharing

_FIGURES = ("step_before", "step", "round_before", "round", "moved")
_NOT_COUNTED = ("_seconds", "ready", "worker_restarts")
"""Metrics that only the inner loader can count."""


class BalancedLoader(ABC):
    """The loader of one data-parallel rank, which runs its share of each global batch by cost.

    Args:
        loader: This rank's loader, over an endless training stream.
        rounds: Microbatches of a global batch per rank.
        window: Global batches in a window; 1: no windows.

    Attributes:
        loader: The inner loader; it may be ahead of what was delivered.
    """

    def __init__(self, loader: SavableDataLoader, rounds: int, window: int) -> None:
        self.loader = loader
        self._rounds = rounds
        self._window = window
        self._global_batches = 0
        self._own_cost = 0.0
        self._sums = [0.0] * len(_FIGURES)

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
    def _span(self) -> int:
        """Microbatches of the run in a window."""
        return self._rounds * self._window * self.config.dp_size

    @property
    @abstractmethod
    def _within(self) -> int:
        """Microbatches that this rank has delivered of the current window."""

    @property
    def unfinished(self) -> str | None:
        """The reason why no state can be saved now, or None."""
        done = self._within % self._rounds
        if not done:
            return None
        return (
            f"{done} of the {self._rounds} microbatches that each rank runs of this global batch were delivered; with "
            "balance there is a state after whole global batches only: save it after an optimizer step"
        )

    # Delivering ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.deliver()

    def __len__(self) -> int:
        """Return this rank's microbatches in an epoch of the data."""
        return len(self.loader)

    @abstractmethod
    def deliver(self) -> Any:
        """Return the next microbatch that this rank runs."""

    def _measured(self, figures: tuple[float, ...], own: float) -> None:
        """Record how even a global batch is, and the cost of this rank's part."""
        self._sums = [total + figure for total, figure in zip(self._sums, figures, strict=True)]
        self._own_cost = own
        self._global_batches += 1

    # State -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _document(self) -> State:
        """Return the state of this rank after the global batches that were delivered."""

    def save_state_rank(self) -> State:
        """Return the state of this rank after the global batches that were delivered. Takes no communication.

        Raises:
            WrongUseError: A global batch was delivered in part.
        """
        if self.unfinished is not None:
            raise WrongUseError(self.unfinished)
        return self._document()

    @abstractmethod
    def restore_state_rank(self, state: Any, **kwargs: Any) -> None:
        """Continue from a state (see `SavableDataLoader.restore_state_rank`), saved with or without balance.

        Raises:
            StateError: It does not fit; a StepMismatchError if it is in the middle of a global batch.
        """

    def state_dict(self) -> State:
        """Return the state of the whole run."""
        state = merged_state(self.save_state_rank(), self.config.dp_size, self.config.data_parallel_group)
        assert state is not None
        return state

    def load_state_dict(self, state: State) -> None:
        """Continue from what `state_dict` returned, on any number of ranks."""
        self.restore_state_rank(state)

    @abstractmethod
    def seek(self, step: int) -> None:
        """Go to a step of the run (see `SavableDataLoader.seek`); a step is a microbatch of each rank."""

    def set_weights(self, weights: Any, *, from_draw: int | None = None) -> int:
        """Change the weights of a blend while it runs (see `SavableDataLoader.set_weights`).

        Raises:
            WrongUseError: A global batch, or a window of them, was delivered in part.
        """
        return self._changed(lambda: self.loader.set_weights(weights, from_draw=from_draw))

    def ban(self, keys: Any, **kwargs: Any) -> int:
        """Withdraw samples during the run (see `SavableDataLoader.ban`).

        Raises:
            WrongUseError: A global batch, or a window of them, was delivered in part.
        """
        return self._changed(lambda: self.loader.ban(keys, **kwargs))

    def _changed(self, change: Callable[[], int]) -> int:
        """Change what comes next."""
        if self.unfinished is not None:
            raise WrongUseError(self.unfinished)
        if self._within:
            raise WrongUseError(
                f"{self._within // self._rounds} of {self._window} global batches of this window were delivered: with "
                f"balance_window={self._window}, change weights and bans after whole windows only, every "
                f"{self._window} optimizer steps"
            )
        return self._change(change)

    @abstractmethod
    def _change(self, change: Callable[[], int]) -> int: ...

    def counters(self) -> list[State]:
        """Return a row for each leaf of what this rank loaded, as `leaf_rows` describes; of whole global batches."""
        return leaf_rows(read(self._document()))

    def metrics(self) -> dict[str, float]:
        """Return what this rank did so far as plain numbers by name.

        Returns:
            The metrics of the inner loader, and `balance_cost`: the cost of this rank in the last global batch. Means
            over all global batches since this object was made: `balance_step`, the largest cost of a rank over the
            mean, and `balance_round`, the sum of the largest costs of the rounds over the mean cost of a rank; both
            without balance, `balance_step_before` and `balance_round_before`; and `balance_moved`, the share of
            microbatches that another rank would have run. `balance_own_share` is 1 if each rank loads what it runs, 0
            if ranks exchange loaded microbatches.
        """
        figures = self.loader.metrics()
        counted = flat_metrics(self.counters())
        figures |= {name: value for name, value in counted.items() if not name.endswith(_NOT_COUNTED)}
        count = max(1, self._global_batches)
        figures |= {f"balance_{name}": total / count for name, total in zip(_FIGURES, self._sums, strict=True)}
        return figures | {"balance_cost": self._own_cost, "balance_own_share": float(isinstance(self, OwnShareLoader))}

    def restore_sample(self, restore_key: tuple[Any, ...]) -> Any:
        """Return the batch or sample with a `__restore_key__`, encoded again: the identical one."""
        return self.loader.restore_sample(restore_key)

    def describe_restore_key(self, restore_key: tuple[Any, ...]) -> str:
        """Name the samples of the `__restore_key__` of a batch or sample."""
        return self.loader.describe_restore_key(restore_key)

    def close(self) -> None:
        """Stop the workers; the next batch starts them again, after the global batches that were delivered."""
        self.loader.close()

    def _check_place(self, microbatches: int) -> None:
        """Raise unless the position is the beginning of a global batch."""
        size = self._rounds * self.config.dp_size
        if microbatches % size:
            raise StepMismatchError(
                f"the data is at microbatch {microbatches}, in the middle of a global batch of {size}: with balance, a "
                "run continues at the start of one. Use a state that was saved after an optimizer step, or set the "
                "global batch size that it was saved with"
            )

    def _check_even(self) -> None:
        """Raise if ranks would get masked microbatches; a state may bring another number of lanes."""
        if not self.ownership.even:
            raise ConfigurationError(uneven(self.ownership))


def uneven(ownership: Ownership) -> str:
    """Return the error for masked microbatches."""
    return (
        f"balance: {ownership.world_size} data-parallel ranks do not divide the {ownership.num_lanes} lanes of the "
        f"run, so that some microbatches would be masked: use {ownership.nearest_even_world_size()} ranks"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Own shares.


class OwnShareLoader(BalancedLoader):
    """The loader of one data-parallel rank, which loads only the microbatches that it runs.

    No rank waits for another. Before the first microbatch, and after a restore, the ranks compare the data of their
    plans; if each restores only its own rank's state, they exchange these, since every rank plans all lanes.

    Args:
        loader: This rank's loader, over an endless training stream; if it has moved, all ranks go on from there.
        sharing: How the run is divided.
        group: A gloo group of the data-parallel ranks; None: no communication.
    """

    def __init__(self, loader: SavableDataLoader, sharing: Sharing, group: Any) -> None:
        super().__init__(loader, sharing.group // loader.config.dp_size, sharing.window)
        self._sharing = sharing
        self._group = group
        self._agreed = False
        moved = loader.save_state_rank() if loader.microbatches else None  # its own lanes; every rank plans all
        loader.follow(sharing, sharing.settings)
        if moved is not None:
            self.restore_state_rank(moved)
        self._check_even()

    @property
    def _within(self) -> int:
        return self.loader.microbatches % self._span // self.config.dp_size

    def deliver(self) -> Any:
        """Return the next microbatch that this rank runs.

        Raises:
            BalanceError: The ranks plan from different data.
        """
        if not self._agreed:
            self._compare()
        batch = self.loader.deliver()
        if self.loader.note is not None:  # the last microbatch of a global batch
            *figures, own = self.loader.note[0]
            self._measured(tuple(figures), own)
        return batch

    def _document(self) -> State:
        return self.loader.save_state_rank()

    def counters(self) -> list[State]:
        return self.loader.counters()

    def restore_state_rank(self, state: Any, **kwargs: Any) -> None:
        """Continue from a state (see `BalancedLoader.restore_state_rank`); all ranks must call it."""
        saved = read_all(state if isinstance(state, (list, tuple)) else [state])
        self._check_place(saved.microbatches)
        if len(saved.lanes) < saved.num_lanes and self._group is not None:
            states: list[Any] = [None] * self.config.dp_size
            dist.all_gather_object(states, write(saved), group=self._group)
            state = states
        self.loader.restore_state_rank(state, **kwargs)
        self._check_even()
        self._agreed = False

    def seek(self, step: int) -> None:
        self._check_place(step * self.config.dp_size)
        self.loader.seek(step)
        self._agreed = False

    def _change(self, change: Callable[[], int]) -> int:
        return change()

    def _compare(self) -> None:
        """Compare the ranks' positions and a hash of the costs of all samples."""
        self._agreed = True
        sharing = self._sharing
        if self._group is None:
            return
        digest = hashlib.blake2b(repr((sharing.group, sharing.window, sharing.settings)).encode(), digest_size=8)
        for table in sharing.tables:
            for column in (table.added, table.padded, table.sizes):
                digest.update(b"-" if column is None else np.ascontiguousarray(column).data)
        own = (self.loader.microbatches, digest.hexdigest())
        places: list[Any] = [None] * self.config.dp_size
        dist.all_gather_object(places, own, group=self._group)
        if len({place for place, _ in places}) > 1:
            raise StepMismatchError(
                "the data-parallel ranks are at different microbatches of the run "
                f"({', '.join(str(place) for place, _ in places)}): restore the same state on all of them, and take "
                "the same number of microbatches on each"
            )
        other = next((rank for rank, (_, hashed) in enumerate(places) if hashed != places[0][1]), None)
        if other is not None:
            raise BalanceError(
                f"data-parallel ranks 0 and {other} read different columns or have different costs, so they would "
                "not run the same global batches: use the same ColumnCost and dataset on all ranks"
            )
