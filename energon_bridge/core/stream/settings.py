"""The settings of a run, and those of the streams of a process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from energon_bridge.core.encoder.hooks import MAX_LIMIT
from energon_bridge.core.errors import ConfigurationError, check_choice, check_number
from energon_bridge.core.format.checksums import Checksums
from energon_bridge.core.order.leaf_order import DEFAULT_PARALLEL_SHARD_ITERS
from energon_bridge.core.stores import CachePool, NoCachePool
from energon_bridge.core.stream.conventions import Conventions
from energon_bridge.core.stream.failures import FailureLog
from energon_bridge.core.stream.policy import ErrorPolicy
from energon_bridge.core.stream.watchdog import WatchdogSettings, Words
from energon_bridge.core.worker_config import WorkerConfig

StreamKind = Literal["train", "passes", "finite"]
"""Endless training, training that ends with each pass, and validation; states have these words."""
SelectionKind = Literal["packs", "microbatches"] | None
"""What is selected of a buffer of samples: packs, by the encoder; microbatches of similar length; None: nothing is."""

_LEAST = {
    "batch_size": 1,
    "packing_buffer_size": 1,
    "max_tokens_per_microbatch": 1,
    "shuffle_buffer_size": 0,
    "max_samples_per_sequence": 1,
    "parallel_shard_iters": 1,
    "virtual_epoch_length": 1,
    "limit": 1,
}
"""Settings that are whole numbers (or None), with the least of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """How the data of a run is opened, ordered and made into microbatches; checked.

    `get_train_dataset` and `get_val_dataset` make it of their arguments, and say what these mean; plans and streams
    carry it. Those two have no arguments for the following.

    Args:
        kind: What is delivered.
        cache_pool: Where files that are needed later are cached.
        conventions: What the program expects besides samples: ours, or those of a loader that this one stands in for.
    """

    kind: StreamKind = "train"
    # Opening datasets.
    split_part: str = "train"
    dataset_config: str = "dataset.yaml"
    split_config: str = "split.yaml"
    trust_remote_code: bool = False
    filter: str | None = None
    checksums: Checksums = "sampled"
    # Their order.
    shuffle_over_epochs_multiplier: int | None = 1
    shuffle_buffer_size: int = 0
    max_samples_per_sequence: int | None = None
    parallel_shard_iters: int = DEFAULT_PARALLEL_SHARD_ITERS
    virtual_epoch_length: int | None = None
    limit: int | None = None
    # Samples and microbatches.
    group_by: tuple[str, ...] = ()
    bucket_batch_size: str | Mapping[str, float] | None = None
    task_encoder: Any
    batch_size: int | None
    batch_drop_last: bool = False
    packing_buffer_size: int | None = None
    max_tokens_per_microbatch: int | None = None
    error_policy: ErrorPolicy = field(default_factory=ErrorPolicy)
    cache_pool: CachePool = field(default_factory=NoCachePool)
    conventions: Conventions = field(default_factory=Conventions)

    def __post_init__(self) -> None:
        check_choice("checksums", self.checksums, get_args(Checksums))
        for name, number in check_numbers({name: getattr(self, name) for name in _LEAST}).items():
            object.__setattr__(self, name, number)
        if self.shuffle_over_epochs_multiplier != -1:
            epochs = check_number(
                "shuffle_over_epochs_multiplier", self.shuffle_over_epochs_multiplier, 1, optional=True
            )
            object.__setattr__(self, "shuffle_over_epochs_multiplier", epochs)
        if self.bucket_batch_size is not None and not self.group_by:
            raise ConfigurationError("bucket_batch_size is for the buckets of group_by, which is not given")
        packs = self.packing_buffer_size is not None
        if self.group_by and not packs and self.batch_size is None:
            raise ConfigurationError(
                "group_by makes microbatches of the samples of a bucket: batch_size=None does not fit"
            )
        if self.group_by and packs and self.bucket_batch_size is None and self.max_tokens_per_microbatch is None:
            raise ConfigurationError(
                "group_by with packing_buffer_size needs bucket_batch_size, about how many samples a microbatch of "
                "packs has, for the shares of the buckets: an expression of what one sample takes, such as "
                "bucket_batch_size='4096 / tokens' for packs of 4,096 tokens (`energon columns add --processor` or "
                "--encoder makes the column), or a number for each bucket. blank_media does without buckets"
            )
        if (most := self.max_tokens_per_microbatch) is None:
            return
        if self.group_by:
            raise ConfigurationError("group_by and max_tokens_per_microbatch both choose the samples of a microbatch")
        if most > MAX_LIMIT:
            raise ConfigurationError(f"max_tokens_per_microbatch={most} must be at most {MAX_LIMIT}")
        if self.batch_size not in (None, 1):
            raise ConfigurationError(
                f"max_tokens_per_microbatch={most} with batch_size={self.batch_size}: a microbatch has as many "
                "samples as fit into the tokens, and batch_size counts microbatches: pass batch_size=1 or None "
                "(micro_batch_size=1 of a data module, whose global_batch_size then counts microbatches)"
            )

    @property
    def rows(self) -> int:
        """Samples in a full microbatch."""
        return self.batch_size or 1

    @property
    def selects(self) -> SelectionKind:
        """What is selected of a buffer of samples."""
        if self.packing_buffer_size is None:
            return None
        return "packs" if self.max_tokens_per_microbatch is None else "microbatches"


def check_numbers(settings: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the whole numbers among settings. Raises ConfigurationError if one is something else, or too small."""
    names = settings.keys() & _LEAST.keys()
    return {name: check_number(name, settings[name], _LEAST[name], optional=True) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a worker process knows about itself.

    Attributes:
        number: Its number among the workers of its rank.
        words: Where the thread that runs hooks, then each loading thread, write their activity (`Activity.words`).
        said: Called after each message of its watchdog.
        barred: Samples that must not be tried again, by `user_key` of their leaf and index.
        careful: Whether it does one thing at a time, so that it is certain what kills it.
    """

    number: int
    words: Sequence[Words]
    said: Callable[[], None]
    barred: frozenset[tuple[int, int]]
    careful: bool


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """What the streams of a process are given besides their leaves.

    Args:
        lanes: Lanes of the process.
        num_lanes: Lanes of the run.
        threads: Threads that read and decode ahead; 0 does everything in the calling thread.
        reads_rounds: Read whole rounds at a time, and the next round ahead; False reads draws as they are needed.
        read_together: Samples of a leaf that a lane reads at once, over several rounds if one has fewer.
        background_reads: Threads that read ahead.
        draws_ahead: Draws of each lane to read ahead if rounds are not read.
        failure_log: Logs failures that no microbatch carries.
        delivered: Leaves that the run has delivered samples of; empty at its start.
        shortest_epoch: Draws of all lanes in an epoch of the dataset that comes round first, and its path.
        packs_by_epoch: Whether packing buffers end with epochs, and no pack has a sample twice (`pack_buffer.py`).
        watchdog: How long a microbatch may take; None: as long as it likes.
        worker: What a worker process knows about itself; None: this is the training process.
    """

    run: RunSettings
    config: WorkerConfig
    lanes: int
    num_lanes: int
    threads: int
    reads_rounds: bool
    read_together: int
    background_reads: int
    draws_ahead: int
    failure_log: FailureLog
    delivered: Collection[int]
    shortest_epoch: tuple[int, str]
    packs_by_epoch: bool
    watchdog: WatchdogSettings | None
    worker: WorkerFacts | None
