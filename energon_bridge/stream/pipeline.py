"""What all streams of one process share: how draws of a leaf are loaded, encoded and made into microbatches."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from energon_bridge.plan.leaf import LeafOrder, Round
from energon_bridge.rng import fold
from energon_bridge.stream.reader import LeafReader, RoundBuffer
from energon_bridge.stream.state import COUNTERS
from energon_bridge.stream.user_code import UserCode, generators_put_back
from energon_bridge.stream.values import Loaded, Problem, RestoreKey, Values

_USER_CODE = 4
_THREADS = "energon"


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One dataset of a stream: what it is and in which order it is read."""

    identity: str
    dataset: Any
    order: LeafOrder


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """What a stream needs besides its leaf.

    Args:
        batch_size: Samples in a microbatch; None delivers samples instead of batches.
        encoder: The task encoder.
        threads: Threads that read and decode ahead; 0 does everything in the calling thread.
        reads_rounds: Read whole rounds at a time, the next one ahead of need; False reads draws as they are needed.
        background_reads: Read ahead on a thread of its own.
        restore_generators: Put the global random generators back after each microbatch.
    """

    batch_size: int | None
    encoder: Any
    threads: int = 0
    reads_rounds: bool = True
    background_reads: bool = False
    restore_generators: bool = False


class Pipeline:
    """Loads, encodes and batches draws of one leaf; streams decide which."""

    def __init__(self, leaf: Leaf, settings: StreamSettings) -> None:
        self.leaf = leaf
        self.settings = settings
        self.rows = settings.batch_size or 1
        self.code = UserCode(settings.encoder)
        self.reader = LeafReader(leaf.dataset)
        self._values = Values(leaf.identity, leaf.dataset, settings.encoder.decoder)
        self._leaf_key = fold(leaf.order.key, _USER_CODE)
        self._pool = ThreadPoolExecutor(settings.threads, f"{_THREADS}-load") if settings.threads else None
        self._reading = ThreadPoolExecutor(1, f"{_THREADS}-read") if settings.background_reads else None
        self._bytes_told = 0
        self.chunk = -(-self.rows // settings.threads) if settings.threads else self.rows

    @property
    def threaded(self) -> bool:
        """Whether loading ahead of need runs beside the calling thread."""
        return self._pool is not None

    def buffer(self, of: Round) -> RoundBuffer:
        return RoundBuffer(self.reader, of)

    def load(self, buffer: RoundBuffer, low: int, high: int, *, ahead: bool) -> Loaded:
        """Load the draws [low, high) of a round."""
        return self._values.load(buffer, low, high, ahead=ahead)

    def submit(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call on the loading threads, or now where there are none."""
        if self._pool is not None:
            return self._pool.submit(call, *args, **kwargs)
        future: Future[Any] = Future()
        future.set_result(call(*args, **kwargs))
        return future

    def read_ahead(self, buffer: RoundBuffer) -> None:
        """Start reading a round that will be needed, where that is worth a thread."""
        if self._reading is not None and self.reader.slow:
            self._reading.submit(buffer.read_ahead)

    def close(self) -> None:
        """Stop the threads."""
        # The garbage collector may run this on one of the threads themselves, which cannot wait for its own end.
        wait = not threading.current_thread().name.startswith(_THREADS)
        for pool in (self._pool, self._reading):
            if pool is not None:
                pool.shutdown(wait=wait, cancel_futures=True)

    def encode(self, loaded: Any, key: RestoreKey, counts: list[int]) -> list[tuple[RestoreKey, Any]]:
        """Return the encoded samples of one draw with their restore keys; count a draw that gives none."""
        if type(loaded) is Problem:
            if loaded.error is None:
                counts[COUNTERS.index("excluded")] += 1
            else:
                counts[COUNTERS.index(self.code.failed(loaded.error, loaded.where))] += 1
            return []
        identity, index, epoch, _ = key
        try:
            encoded = self.code.encode(loaded, self._leaf_key, index, epoch)
        except Exception as error:  # the policy decides
            counts[COUNTERS.index(self.code.failed(error, self.where(index)))] += 1
            return []
        self.code.succeeded()
        return [((identity, index, epoch, number), sample) for number, sample in enumerate(encoded)]

    def where(self, index: int) -> str:
        shard, local = self.reader.place_of(index)
        return f"{self.leaf.dataset.path}: shard {shard}, sample {index} (number {local} of the shard)"

    def collate(self, samples: list[Any], keys: list[RestoreKey], lane: int, number: int) -> Any:
        """Return the microbatch of some encoded samples, with its row mask and restore key."""
        if self.settings.batch_size is None:
            batch = samples[0]
            attach(batch, "__restore_key__", keys[0])
        else:
            batch = self.code.collate(samples, self._leaf_key, *keys[0][1:])
            attach(batch, "__restore_key__", ("Batch", lane, number, tuple(keys)))
        attach(batch, "__valid__", torch.ones(len(samples), dtype=torch.bool))
        return batch

    def batches(
        self, samples: list[Any], keys: list[RestoreKey], lane: int, number: int, counts: list[int]
    ) -> list[Any]:
        """Return the microbatch of some encoded samples in a list, an empty one where a hook refuses to make it."""
        try:
            batch = self.collate(samples, keys, lane, number)
        except Exception as error:  # the policy decides
            indices = ", ".join(str(key[1]) for key in keys[:8]) + (", …" if len(keys) > 8 else "")
            where = f"{self.leaf.dataset.path}: the microbatch of samples {indices}"
            counts[COUNTERS.index(self.code.failed(error, where, "microbatches"))] += len(samples)
            return []
        self.code.succeeded("microbatches")
        return [batch]

    def user_code(self) -> contextlib.AbstractContextManager[None]:
        """Enter wherever hooks may run."""
        if self.settings.restore_generators and self.code.present:
            return generators_put_back()
        return contextlib.nullcontext()

    def bytes_since(self) -> int:
        """Return the bytes read since the last call."""
        total = self.reader.bytes_read
        delta, self._bytes_told = total - self._bytes_told, total
        return delta

    def restore(self, key: tuple[Any, ...]) -> Any:
        """Return the microbatch or sample with a restore key, encoded again.

        Raises:
            LookupError: The key belongs to another dataset, or its sample gives no output any more.
        """
        if key and key[0] == "Batch":
            lane, number, keys = key[1:]
            samples = [self._restore_one(tuple(one)) for one in keys]
            with generators_put_back():
                return self.collate(samples, [tuple(one) for one in keys], lane, number)
        sample = self._restore_one(key)
        return self.collate([sample], [key], 0, 0) if self.settings.batch_size is None else sample

    def _restore_one(self, key: tuple[Any, ...]) -> Any:
        identity, index, epoch, output = key
        if identity != self.leaf.identity:
            raise LookupError(f"restore key {key!r}: no leaf of this dataset has the identity {identity!r}")
        one = Round(0, np.array([index], dtype=np.int64), np.array([epoch], dtype=np.int64))
        _, loaded = self.load(self.buffer(one), 0, 1, ahead=False)
        with generators_put_back():
            encoded = self.encode(loaded[0], (identity, index, epoch, 0), [0] * len(COUNTERS))
        if output >= len(encoded):
            raise LookupError(f"restore key {key!r}: {self.where(index)} gives {len(encoded)} encoded samples now")
        return encoded[output][1]


def attach(batch: Any, name: str, value: Any) -> None:
    """Set a meta field of a batch: an entry of a dict, else an attribute where the type has or takes one."""
    if isinstance(batch, dict):
        batch[name] = value
        return
    with contextlib.suppress(AttributeError):  # tensors, tuples and foreign slotted types carry no meta fields
        if not isinstance(batch, torch.Tensor):
            setattr(batch, name, value)


class Ahead:
    """Loads of consecutive draws that are under way, oldest first."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._chunks: deque[Future[Loaded]] = deque()

    def schedule(self, buffer: RoundBuffer, low: int, high: int, *, ahead: bool) -> None:
        """Load the draws [low, high) of a round."""
        self._chunks.append(self._pipeline.submit(self._pipeline.load, buffer, low, high, ahead=ahead))

    def take(self) -> Loaded:
        """Return the oldest load."""
        return self._chunks.popleft().result()

    def __len__(self) -> int:
        return len(self._chunks)
