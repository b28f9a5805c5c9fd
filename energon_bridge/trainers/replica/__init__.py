"""One rank of a replica loads and the others receive its batches: which ranks these are, and how a batch reaches them.

A *replica* is the set of ranks that train on the same batches: the tensor-, context- and pipeline-parallel ranks that
share a pure data-parallel rank. Imports are those of `trainers/`. Begin with `loader`, which every rank holds.
`groups` decides which ranks form a replica, `structure` serialises a batch to plain values and tensors, `exchange`
sends them, with errors and replies. Across replicas, `balance` lets ranks swap microbatches of a global batch:
`balanced` is its loader, `costs` says what a microbatch costs (`warmup` measures it), `assignment` which rank runs it.
"""

from __future__ import annotations

from energon_bridge.trainers.replica.balance import Balance, make_balance
from energon_bridge.trainers.replica.balanced import BalancedLoader
from energon_bridge.trainers.replica.exchange import Exchange
from energon_bridge.trainers.replica.groups import (
    Replica,
    StageKeys,
    check_data_parallel,
    data_parallel_group,
    make_replica,
)
from energon_bridge.trainers.replica.loader import BroadcastLoader, open_loader

__all__ = [
    "Balance",
    "BalancedLoader",
    "BroadcastLoader",
    "Exchange",
    "Replica",
    "StageKeys",
    "check_data_parallel",
    "data_parallel_group",
    "make_balance",
    "make_replica",
    "open_loader",
]
