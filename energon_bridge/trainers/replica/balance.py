"""Balance: the data-parallel ranks divide the microbatches of each global batch by cost (`balanced`)."""

from __future__ import annotations

import datetime
import logging
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.trainers.replica.balanced import BalancedLoader, Cost, check_size
from energon_bridge.trainers.replica.exchange import Peers
from energon_bridge.trainers.replica.groups import Replica, data_parallel_group, gathered

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """How the data-parallel ranks divide the microbatches of a global batch; made by `make_balance`.

    Args:
        cost: Returns the cost of training on a microbatch, 0 or more, in any unit, such as a `BatchCost`. It must
            depend on the microbatch alone.
        group: A gloo group of the data-parallel ranks for this purpose only; None: there is one rank, and nothing to
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
        pg_collection: megatron-core's `ProcessGroupCollection` with the data-parallel group. Default: the groups of
            `megatron.core.parallel_state`, else all ranks.
        data_group: The data-parallel group of this process, if it is none of these.
        replica: From `make_replica`, if one rank of each replica loads. These ranks balance.
        timeout_seconds: How long a rank waits for another; default: that of torch.distributed, 30 minutes.

    Raises:
        ConfigurationError: The cost is not a function, or the ranks that load are not a data-parallel group.
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
    return Balance(cost=cost, group=own)


def balanced(loader: Any, balance: Balance | None) -> Any:
    """Return a loader whose ranks balance their microbatches; the loader itself if there is nothing to balance.

    Raises:
        ConfigurationError: The stream cannot be balanced.
    """
    config = getattr(loader, "config", None)
    if balance is None or (balance.group is None and (config is None or config.dp_size == 1)):
        return loader
    _check(loader, balance)
    return BalancedLoader(loader, balance.cost, balance.group)


def _check(loader: Any, balance: Balance) -> None:
    """Raise if a loader cannot be balanced."""
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
    ranks = config.dp_size
    peers = Peers(balance.group)
    if (peers.rank, peers.size) != (config.dp_rank, ranks):
        raise ConfigurationError(
            f"balance: the loader is that of data-parallel rank {config.dp_rank} of {ranks}, but make_balance "
            "found another group: initialise torch.distributed before both, and pass make_balance the pg_collection "
            "of the data"
        )
    rounds = check_size(config.microbatches_per_global_batch, ranks, f"balance: {ranks} data-parallel ranks")
    if rounds == 1 < ranks and not config.dp_rank:
        logger.warning(
            "balance has no effect, because each rank runs one microbatch of a global batch: use a smaller "
            "micro_batch_size or a larger global_batch_size"
        )
