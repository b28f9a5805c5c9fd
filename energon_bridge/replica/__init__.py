"""One rank of a replica loads, and the others get its batches: which ranks these are, and how a batch reaches them.

A *replica* is what trains on the same batches: the tensor-, context- and pipeline-parallel ranks that share a pure
data-parallel rank. `groups` finds them, `structure` writes a batch down as plain values and tensors, `channel` moves
it, `exchange` says what is said, `loader` is the loader that every rank of the replica holds. Across replicas,
`balance` shares the microbatches of a global batch out by their costs, and `peers` moves them between their ranks.
"""

from __future__ import annotations

from energon_bridge.replica.balance import Balance, BalancedLoader, make_balance
from energon_bridge.replica.exchange import Exchange
from energon_bridge.replica.groups import Replica, StageKeys, make_replica
from energon_bridge.replica.loader import BroadcastLoader, open_loader

__all__ = [
    "Balance",
    "BalancedLoader",
    "BroadcastLoader",
    "Exchange",
    "Replica",
    "StageKeys",
    "make_balance",
    "make_replica",
    "open_loader",
]
