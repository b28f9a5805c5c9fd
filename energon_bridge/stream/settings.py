"""The settings of a stream."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from energon_bridge.stores import CachePool, NoCachePool
from energon_bridge.stream.failure_log import FailureLog
from energon_bridge.stream.policy import ErrorPolicy
from energon_bridge.stream.watchdog import Words


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """Everything a stream needs besides its leaves.

    Args:
        batch_size: Samples in a microbatch; None delivers samples instead of batches.
        encoder: The task encoder.
        threads: Threads that read and decode ahead; 0 does everything in the calling thread.
        reads_rounds: Read whole rounds at a time, and the next round ahead; False reads draws as they are needed.
        read_together: Samples of a leaf that a lane reads at once, over several rounds if one has fewer.
        background_reads: Threads that read ahead.
        draws_ahead: Draws of each lane to read ahead if rounds are not read.
        restore_generators: Put the global random generators back after each microbatch.
        packing_buffer_size: Encoded samples from which packs or microbatches are selected; None: neither.
        max_tokens_per_microbatch: Tokens, padding included, of microbatches that are selected by length; None: the
            encoder selects packs.
        buffer_bytes: Bytes for the contents of samples waiting to be packed, all lanes of the process together.
        lanes: Lanes of the process.
        cache: Where cookers and hooks keep files that are needed later.
        policy: Decides about samples that fail.
        failure_log: Logs failures that no microbatch carries.
        delivered: Leaves that the run has delivered samples of; empty at its start.
        rank, ranks: Number of this process, and number of processes, that keep quarantine files.
        words: Where the hook thread and then each loading thread write their activity (`Activity.words`).
        energon_ranks, energon_workers: For the drop-in: the ranks, and workers per rank, by which megatron-energon
            numbers microbatches and samples; 0 ranks: no drop-in.
        config: For the drop-in: the worker configuration, for hooks that ask for it.
        barred: Leaf (`user_key_of`) and index of samples that must not be tried again.
        in_worker: Microbatches are pickled, for another process.
    """

    batch_size: int | None
    encoder: Any
    threads: int = 0
    reads_rounds: bool = True
    read_together: int = 0
    background_reads: int = 0
    draws_ahead: int = 0
    restore_generators: bool = False
    packing_buffer_size: int | None = None
    max_tokens_per_microbatch: int | None = None
    buffer_bytes: int = 1 << 30
    lanes: int = 1
    cache: CachePool = field(default_factory=NoCachePool)
    policy: ErrorPolicy = field(default_factory=ErrorPolicy)
    failure_log: FailureLog | None = None
    delivered: Collection[int] = ()
    rank: int = 0
    ranks: int = 1
    energon_ranks: int = 0
    energon_workers: int = 1
    config: Any = None
    words: Sequence[Words] = ()
    barred: frozenset[tuple[int, int]] = frozenset()
    in_worker: bool = False
