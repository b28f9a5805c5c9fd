"""What the data-parallel ranks of a run tell each other: a draw from which a change holds, and their states."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from energon_bridge.core.errors import ConfigurationError, LoaderError
from energon_bridge.core.loader.fits import merge
from energon_bridge.core.loader.saved_run import State
from energon_bridge.core.worker_config import distributed

logger = logging.getLogger(__name__)


def agreed(what: str, own: int, choose: Callable[[list[int]], int], ranks: int, group: Any) -> int:
    """Return the global draw that all ranks of a group agree on: `choose` picks it from the values of all of them."""
    return choose(gathered(f"{what}: pass the same from_draw on every rank", own, ranks, group))


def gathered(instead: str, own: Any, ranks: int, group: Any) -> list[Any]:
    """Return the values of all ranks of a group, all of which must call this; `instead` is what else a user can do."""
    if ranks == 1:
        return [own]
    if not torch.distributed.is_initialized():
        raise ConfigurationError(f"{instead}, or initialize torch.distributed")
    found: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(found, own, group=group)
    return found


def first_told(what: str, own: str) -> str:
    """Return what the first rank that asked this said; no collective, since ranks ask when they like, and some not.

    Without a store of the process group (older torch, MPI), it is the rank's own.
    """
    ranks = distributed()
    store_of = None if ranks is None else getattr(ranks.group.WORLD, "get_group_store", None)
    store = None if store_of is None else store_of()
    first = b"" if store is None else store.compare_set(f"energon_bridge/{what}", "", own)
    return first.decode() or own


_begun: Counter[str] = Counter()


def warn_of_other_beginnings(run: str, microbatches: int, rank: int) -> None:
    """Warn if a training run begins on this rank at another microbatch than on the first rank that began it."""
    _begun[run] += 1  # a process may open a run several times: ranks open it as often
    first = first_told(f"begins/{run}/{_begun[run]}", str(microbatches))
    if first != str(microbatches):
        logger.warning(
            "data-parallel rank %d begins at microbatch %d of the run, another one at %s: some samples will repeat "
            "and others will be missed. Pass the states of all ranks, as a list, to restore_state_rank on every rank",
            rank,
            microbatches,
            first,
        )


def merged_state(own: State, ranks: int, group: Any, global_dst_rank: int | None = None) -> State | None:
    """Return the state of the whole run from those of its data-parallel ranks, all of which must call it.

    Args:
        own: The state of this rank.
        ranks: How many there are.
        group: Their process group; None: that of all processes.
        global_dst_rank: Only this global rank gets the state (others None); default: every rank gets it.
    """
    if ranks == 1:
        return own
    if not torch.distributed.is_initialized():
        raise LoaderError(
            f"save_state_global needs torch.distributed to reach the other {ranks - 1} ranks: initialize "
            "it, or save save_state_rank() of every rank and pass the list of them to restore_state_rank"
        )
    states: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(states, own, group=group)
    if global_dst_rank is not None and torch.distributed.get_rank() != global_dst_rank:
        return None
    return merge(states)
