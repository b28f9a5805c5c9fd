"""Balance where encoders have ranks of their own: each global batch is dealt by texts, alike on all grids.

A *block* is language ranks that each encoder serves with one rank. All its processes make the texts of the whole block,
so they know the costs of its microbatches, and deal those of a global batch alike, without a word: a language rank
keeps what it runs, an encoder rank gives the media in the order in which the language ranks run them. No medium moves,
and each is still decoded once. Between blocks nothing is dealt.

The next global batch is loaded while one is delivered, two rounds for each one. States exist after whole global batches
only, as in `replica/balanced.py`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.core.loader.saved_run import State
from energon_bridge.trainers.replica.assignment import divide
from energon_bridge.trainers.replica.balanced import FIGURES, Cost, check_place, check_size
from energon_bridge.trainers.replica.warmup import CostWarmup
from energon_bridge.trainers.roles.encoding import LaneMedia

logger = logging.getLogger(__name__)

_ROUNDS_AHEAD = 2
"""Rounds of the next global batch that are loaded for each one that is delivered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deal:
    """How a global batch is dealt.

    Args:
        cost: Returns the cost of a microbatch of texts, as `make_balance` takes it.
        ranks: Language ranks of a block.
        rounds: Microbatches of each of them in a global batch.
    """

    cost: Cost
    ranks: int
    rounds: int


def make_deal(dataset: DatasetSpec, cost: Cost, *, language: int, block: int) -> Deal:
    """Return how the global batches of a dataset are dealt in blocks of language ranks.

    Raises:
        ConfigurationError: They cannot be dealt.
    """
    if not callable(cost) or isinstance(cost, CostWarmup):
        raise ConfigurationError(
            f"roles: balance takes a function of a batch, such as BatchCost(), got {type(cost).__name__}; all grids "
            "must know it from the beginning, so it cannot be fitted while the run goes on"
        )
    if dataset.ends or dataset.settings.virtual_epoch_length is not None:
        raise ConfigurationError("roles: balance needs an endless training stream: leave it out for validation")
    if block == 1:
        raise ConfigurationError(
            "roles: balance deals microbatches between the language ranks that an encoder rank serves, and here each "
            "has an encoder rank of its own: use fewer encoder ranks, or leave balance out"
        )
    size = dataset.worker_config.microbatches_per_global_batch
    rounds = check_size(size, language, f"roles: {language} language ranks")
    if rounds == 1:
        logger.warning("roles: balance has no effect, because each language rank runs one microbatch of a global batch")
    return Deal(cost=cost, ranks=block, rounds=rounds)


class DealtStream:
    """What a process delivers of the microbatches of some blocks.

    Args:
        loader: Gives the microbatches of these blocks, round after round.
        deal: How they are dealt.
        own: The places of a round that are delivered.

    Attributes:
        figures: The sums behind the metrics of balance, over `global_batches`.
    """

    def __init__(self, loader: SavableDataLoader, deal: Deal, own: Sequence[int]) -> None:
        self.figures = np.zeros(len(FIGURES))
        self.global_batches = 0
        self._loader = loader
        self._deal = deal
        self._own = own
        self._served = loader.config.in_a_row
        self.restart()

    def restart(self) -> None:
        """Begin where the loader stands. Raises StepMismatchError in the middle of a global batch."""
        check_place(self._loader.microbatches, self._deal.rounds * self._loader.config.dp_size)
        self._loaded: list[Any] = []
        self._ready: deque[Any] = deque()
        self.state: Callable[[], State] = self._loader.snapshot()
        self._state_after = self.state

    @property
    def ahead(self) -> int:
        """Rounds that were loaded and are not delivered."""
        return len(self._loaded) // self._served + len(self._ready) // len(self._own)

    def take(self, stream: Iterator[Any]) -> Any:
        """Return the next microbatch; `stream` is of the loader. An error while it loads loses nothing."""
        if not self._ready:
            self._load(stream, self._deal.rounds * self._served)
            self._ready.extend(self._dealt())
            self._loaded = []
            self.state = self._state_after
        self._load(stream, _ROUNDS_AHEAD * self._served // len(self._own))
        return self._ready.popleft()

    def _load(self, stream: Iterator[Any], count: int) -> None:
        missing = self._deal.rounds * self._served - len(self._loaded)
        for _ in range(min(count, missing)):
            self._loaded.append(next(stream))
            if len(self._loaded) == self._deal.rounds * self._served:
                self._state_after = self._loader.snapshot()

    def _dealt(self) -> list[Any]:
        """Return the microbatches of a global batch that are delivered, in order."""
        deal = self._deal
        places = np.arange(len(self._loaded)).reshape(deal.rounds, -1, deal.ranks)
        costs = np.array([self._cost_of(batch) for batch in self._loaded])[places]
        dealt = np.empty_like(places)
        for block in range(places.shape[1]):
            runs, figures = divide(costs[:, block].ravel(), deal.ranks)
            dealt[:, block] = places[:, block].ravel()[runs]
            self.figures += np.array(figures) / places.shape[1]
        self.global_batches += 1
        return [self._loaded[place] for place in dealt.reshape(deal.rounds, -1)[:, self._own].ravel().tolist()]

    def _cost_of(self, batch: Any) -> float:
        return batch.cost if isinstance(batch, LaneMedia) else float(self._deal.cost(batch))
