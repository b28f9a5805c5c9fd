"""What the streams of a process are given: their settings, and the bytes that they share."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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


# ---------------------------------------------------------------------------------------------------------------------
# The byte budget for the contents of waiting samples, shared by the lanes of one process. If it is exceeded, lanes that
# hold more than their share drop the contents they need last, beginning with the lane served last. Dropped contents are
# encoded again when needed. The budget decides nothing else.


logger = logging.getLogger(__name__)


class Holder(Protocol):
    """A stage of a lane that holds contents.

    Attributes:
        held: Bytes of these contents.
    """

    held: int

    def let_go(self, size: int) -> None:
        """Drop contents of at least `size` bytes, or all there are, and report it by `Budget.hold`."""
        ...


class Budget:
    """The byte budget of one process.

    Args:
        most: Bytes allowed.
        lanes: Number of lanes that share it.

    Attributes:
        held: Bytes held by all lanes.
    """

    def __init__(self, most: int, lanes: int) -> None:
        self._most = most
        self._lanes = lanes
        self._holders: list[Holder] = []
        self._said = False
        self.held = 0

    def join(self, holder: Holder) -> None:
        """Share the budget with a further lane."""
        self._holders.append(holder)

    def hold(self, holder: Holder, size: int) -> None:
        """Count bytes that a lane now holds (negative: that it dropped)."""
        holder.held += size
        self.held += size

    def keep(self, served: Holder) -> None:
        """Make lanes over their shares drop what exceeds the budget; `served` is the lane served last."""
        if self.held <= self._most:
            return
        share = self._most // max(self._lanes, len(self._holders))
        for holder in (served, *sorted(self._holders, key=lambda one: -one.held)):
            beyond = min(holder.held - share, self.held - self._most)
            if beyond > 0:
                holder.let_go(beyond)
        if not self._said:
            self._said = True
            logger.warning(
                "samples that wait to be packed or grouped take more than buffer_bytes=%d in this process (%d lanes), "
                "so some are encoded again when needed (`encoded_again` in loader.counters()). Raise "
                "WorkerConfig(buffer_bytes=…), lower packing_buffer_size, or add large fields in postencode_sample",
                self._most,
                max(self._lanes, len(self._holders)),
            )
