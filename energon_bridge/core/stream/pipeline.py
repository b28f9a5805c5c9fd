"""What all streams of one process share: loading, encoding and batching of draws."""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from energon_bridge.core.encoder.base import decoder_of
from energon_bridge.core.encoder.deferred import decode_deferred
from energon_bridge.core.encoder.hooks import BATCH, NUMBER, UNKNOWN, Hook, Setting
from energon_bridge.core.errors import SampleError
from energon_bridge.core.order.choose import Cursors, Picks, Span, by_leaf
from energon_bridge.core.order.leaf import Round
from energon_bridge.core.samples import Batch, Sample
from energon_bridge.core.samples.base import SentSources
from energon_bridge.core.samples.stacking import LENDER, SLABS, Lender, Slab, SlabPool
from energon_bridge.core.storage.base import MADE, values_of
from energon_bridge.core.storage.helpers import Threads
from energon_bridge.core.stream.conventions import attach
from energon_bridge.core.stream.leaf import Leaf, LeafSource, StorePool, cooker_of
from energon_bridge.core.stream.policy import FailureTracker
from energon_bridge.core.stream.reader import DrawSpan, RoundBuffer
from energon_bridge.core.stream.settings import Budget, StreamSettings
from energon_bridge.core.stream.state import COUNTERS, Counts
from energon_bridge.core.stream.steps import PendingSample, Steps, running_hooks
from energon_bridge.core.stream.user_code import AS_IT_IS, BegunDraw, HookRunner, OwnHooks
from energon_bridge.core.stream.values import BANNED, Columns, FailedSample, RestoreKey, has_code
from energon_bridge.core.stream.watchdog import Activities, Watchdog

_LEAVES_TOGETHER = 32
"""Leaves of which a load reads draws at the same time if storage answers slowly."""
_TOGETHER = 8
"""Draws per load, at least, if there are no loading threads: about as many as a pack of single draws takes."""
_SAMPLES, _SKIPPED, _EXCLUDED, _BANNED = map(COUNTERS.index, ("samples", "skipped", "excluded", "banned"))


class SampleColumns(NamedTuple):
    """Samples in order, loaded (or `FailedSample`) or encoded: the restore key, sample, bytes and leaf of each."""

    keys: list[RestoreKey]
    samples: list[Any]
    sizes: list[int]
    leaves: list[int]


@dataclass(slots=True)
class WaitingRows:
    """Rows that waited in groups, summed over looks at the lanes of a process: one lane has many only at times."""

    looks: int = 0
    rows: int = 0
    warned: bool = False


class Sources:
    """The leaves of a process, each opened on first use. They know no pipeline: in a circle, a loader that is dropped
    would keep its files open.
    """

    def __init__(self, leaves: Sequence[Leaf], settings: StreamSettings, activities: Activities) -> None:
        self.decoder = decoder_of(settings.run.task_encoder)
        self._leaves = leaves
        self._settings = settings
        self._activities = activities
        self._stores = StorePool(self.decoder)
        self._open: list[LeafSource | None] = [None] * len(leaves)

    def source(self, leaf: int) -> LeafSource:
        """Return a leaf, which is opened on first use."""
        source = self._open[leaf]
        if source is None:
            source = LeafSource(self._leaves[leaf], self._settings, self.decoder, self._activities, self._stores)
            self._open[leaf] = source
        return source

    def buffer(self, leaf: int, found: Round) -> RoundBuffer:
        """Return the buffer of a round of a leaf."""
        bans = self._leaves[leaf].bans
        return RoundBuffer(self.source(leaf).reader, found, None if bans is None else bans.among(found.indices))


class Pipeline:
    """Loads, encodes and batches the draws that the streams of a process choose.

    The way of a draw, in the order of the methods: `submit` (on the loading threads: `load`, read and decode), `encode`
    (hooks for a sample), and `batches` (collation). If `postencode_sample` is user code and nothing is selected,
    `begin_draw` runs the first hook of all draws of a microbatch before `encode`, so that their images are decoded
    together.
    """

    def __init__(self, leaves: Sequence[Leaf], settings: StreamSettings) -> None:
        self.leaves = leaves
        self.settings = settings
        run = settings.run
        self.rows = run.rows
        self.conventions = run.conventions
        makes = any(has_code(leaf.dataset) or cooker_of(run.task_encoder, leaf.dataset) for leaf in leaves)
        words = () if settings.worker is None else settings.worker.words
        self.activities = Activities(words[1:])
        sources = Sources(leaves, settings, self.activities)
        self.source = sources.source
        self.own = own = OwnHooks(run.task_encoder, selects=run.selects, makes=makes)
        self.judge = FailureTracker(run.error_policy, run.task_encoder, own.all, settings.delivered)
        self.steps = Steps(self.judge, self.source, own.proves, words[0] if words else None)
        self.code = HookRunner(run.task_encoder, own, self.steps)
        self.load_seconds = self.batch_seconds = 0.0
        self._asked: tuple[float, ...] = values_of(MADE)
        self.watchdog = self._new_watchdog()
        self.warned_of_groups = False
        self.waiting_rows = WaitingRows()
        self.budget = Budget(settings.config.buffer_bytes, settings.lanes)
        # Reads of several rounds are longer only where these continue the same slices.
        together = max(1, settings.read_together)
        self.cursors = Cursors(leaves, sources.buffer, together=lambda order: 1 if order.is_dealt else together)
        self._pool = Threads(settings.threads, "energon-load") if settings.threads else None
        readers = settings.background_reads
        self._reading = Threads(readers, "energon-read") if readers else None
        self._openers = Threads(_LEAVES_TOGETHER, "energon-leaves") if readers else None
        self._memory: Lender | None = None
        # If rows are packed or grouped, a slab would stay in use until the last of its images is delivered.
        straight = run.packing_buffer_size is None and not own.groups and self.rows > 1
        self._slab_pool = SlabPool()
        self.slabs = self._slab_pool if straight and getattr(run.task_encoder, "decoder", None) is not None else None
        self.chunk: int = -(-self.rows // settings.threads) if settings.threads else max(self.rows, _TOGETHER)

    def _new_watchdog(self) -> Watchdog | None:
        settings = self.settings
        worker = self.settings.worker
        if settings.watchdog is None:
            return None
        where = f"rank {settings.config.dp_rank}"
        if worker is None:
            return Watchdog(settings.watchdog, self.steps.now, self.activities, where)
        where += f", worker {worker.number}"
        return Watchdog(settings.watchdog, self.steps.now, self.activities, where, worker.said)

    # Loading ---------------------------------------------------------------------------------------------------------

    @cached_property
    def num_samples(self) -> int:
        """Samples of all leaves."""
        return sum(leaf.order.num_samples for leaf in self.leaves)

    @property
    def paths(self) -> str:
        """Paths of the first datasets, for messages."""
        return ", ".join([*dict.fromkeys(leaf.dataset.path for leaf in self.leaves)][:3])

    @property
    def threaded(self) -> bool:
        """Whether draws are loaded on threads of their own."""
        return self._pool is not None

    def load(self, spans: Sequence[DrawSpan], *, ahead: bool, into: tuple[Slab, int] | None = None) -> SampleColumns:
        """Load some draws; with `ahead`, also read the rest of their rounds.

        `into` is the slab for their images and the row of the first one.
        """
        if len(spans) == 1:
            (one,) = spans
            keys, samples, sizes = self._columns(one, ahead, into)
            return SampleColumns(keys, samples, sizes, [one.leaf] * len(keys))
        self._read_together(spans, ahead)
        total = sum(span.high - span.low for span in spans)
        loaded = SampleColumns([("", 0, 0, 0)] * total, [None] * total, [0] * total, [0] * total)
        for span in spans:
            columns = self._columns(span, ahead, into)
            for place, key, sample, size in zip(span.places, *columns, strict=True):
                loaded.keys[place], loaded.samples[place] = key, sample
                loaded.sizes[place], loaded.leaves[place] = size, span.leaf
        return loaded

    def _read_together(self, spans: Sequence[DrawSpan], ahead: bool) -> None:
        """Read the draws of several leaves at once if storage answers slowly; loading them says what cannot be read."""
        if self._openers is None:
            return
        unread = [span for span in spans if not span.banned and span.round.is_unread(span.low, span.high)]
        if len(unread) < 2:
            return

        def read(span: DrawSpan) -> None:
            with contextlib.suppress(Exception):
                span.round.read_ahead(span.low, None if ahead else span.high)

        for _ in self._openers.map(read, unread):
            pass

    def _columns(self, of: DrawSpan, ahead: bool, into: tuple[Slab, int] | None) -> Columns:
        if of.banned:
            identity = self.leaves[of.leaf].identity
            buffer = of.round
            drawn = zip(
                buffer.indices[of.low : of.high].tolist(), buffer.epochs[of.low : of.high].tolist(), strict=True
            )
            keys = [(identity, index, epoch, 0) for index, epoch in drawn]
            return keys, [BANNED] * len(keys), [0] * len(keys)
        rows = None if into is None else (into[0], [into[1] + place for place in of.places])
        return self.source(of.leaf).values.load(of.round, of.low, of.high, ahead=ahead, into=rows)

    def submit(
        self, spans: Sequence[DrawSpan], *, ahead: bool, into: tuple[Slab, int] | None
    ) -> Future[SampleColumns] | SampleColumns:
        """Load some draws on the loading threads, or right now if there are none."""
        if self._pool is not None:
            return self._pool.submit(self.load, spans, ahead=ahead, into=into)
        start = time.perf_counter()
        loaded = self.load(spans, ahead=ahead, into=into)
        self.load_seconds += time.perf_counter() - start
        return loaded

    def read_ahead(self, buffer: RoundBuffer) -> None:
        """Start reading a round that will be needed, if reads are slow enough to pay for a thread."""
        if self._reading is not None and buffer.reader.slow:
            self._reading.submit(buffer.read_ahead)

    def read_some_ahead(self, buffer: RoundBuffer, low: int) -> bool:
        """Start reading some draws of a round from `low` on; return whether that covers the round to its end."""
        some = self.settings.draws_ahead
        if self._reading is not None and buffer.asked < min(low + some // 2, len(buffer)):
            low, buffer.asked = max(low, buffer.asked), low + some
            self._reading.submit(buffer.read_ahead, low, buffer.asked)
        return buffer.asked >= len(buffer)

    def write_into(self, memory: Lender) -> None:
        """Decode images into, and stack other fields in, the memory of a lender."""
        self._memory = memory
        self._slab_pool.lender = memory

    def lending(self) -> Setting:
        """Allocate the microbatch that is stacked in this context from the lender's memory."""
        return Setting(LENDER, self._slab_pool if self._memory is None else self._memory)

    def seconds_since(self, start: float) -> tuple[float, ...]:
        """Return the seconds since `start`, and those of them spent on loading and on batching; reset both.

        The requests to servers and to the node cache since the last call follow, if there were any.
        """
        found: tuple[float, ...] = (time.perf_counter() - start, self.load_seconds, self.batch_seconds)
        now = values_of(MADE)
        if now != self._asked:
            found += tuple(after - before for before, after in zip(self._asked, now, strict=True))
            self._asked = now
        self.load_seconds = self.batch_seconds = 0.0
        return found

    def close(self, *, wait: bool = True) -> None:
        """Stop the threads.

        Args:
            wait: Whether to wait for their end. The garbage collector may run on any thread, also with one of
                `threading`'s locks held, which threads need to end: what it calls must not wait.
        """
        if self.watchdog is not None:
            self.watchdog.close(wait=wait)
        for pool in (self._pool, self._reading, self._openers):
            if pool is not None:
                pool.shutdown(wait=wait, cancel_futures=True)

    # Encoding and batching -------------------------------------------------------------------------------------------

    def encode(
        self,
        leaf: int,
        sample: Any,
        key: RestoreKey,
        counts: Counts,
        *,
        again: bool = False,
        begun: BegunDraw | None = None,
    ) -> list[tuple[RestoreKey, Any]]:
        """Return the encoded samples of one draw with their restore keys; count a draw that gives none.

        With `again`, the hooks' own counts were counted before. `begun` is what `begin` made of the draw.
        """
        identity, index, epoch, _ = key
        ref = (leaf, index, epoch, 0)
        source = self.source(leaf)
        if type(sample) is PendingSample:
            sample = self.steps.made(sample, ref, counts)
        if type(sample) is FailedSample:
            if sample.error is None:
                counts.of(leaf)[_BANNED if sample is BANNED else _EXCLUDED] += 1
            else:
                self.steps.failed(sample.error, [(leaf, index)], counts, hook=sample.hook, place=sample.place)
            return []
        if begun is None:
            encoded = self.code.encode(sample, source, ref, counts, again=again)
        else:
            with self.adopting():
                encoded = self.code.encode(sample, source, ref, counts, again=again, begun=begun)
        return [((identity, index, epoch, number), one) for number, one in enumerate(encoded)]

    def begin_draw(self, leaf: int, sample: Any, key: RestoreKey) -> BegunDraw | None:
        """Run the first hook on a draw, before its images are decoded; None if the draw has no sample yet."""
        if type(sample) in (PendingSample, FailedSample):
            return None
        return self.code.begin(sample, self.source(leaf), (leaf, *key[1:]))

    def adopting(self) -> Setting:
        """Join tensors in this context without a copy, if they are already adjacent."""
        return Setting(SLABS, self._slab_pool)

    def collate(
        self,
        samples: list[Any],
        keys: Sequence[tuple[Any, ...]],
        leaves: Sequence[int],
        lane: int,
        number: int,
        counts: Counts | None,
    ) -> list[Any] | None:
        """Return the microbatch of some rows (several if a batch hook is a generator), with mask and restore key.

        None if a hook fails; without `counts`, what it raises is raised.
        """
        if self.settings.run.batch_size is None and not self.own.groups:
            batches = [self.conventions.delivered(samples[0])]
            self.steps.worked(Hook.BATCH, leaves)
            self.conventions.attach(batches[0], "__restore_key__", keys[0])
        else:
            _, index, epoch, output = keys[0][2][0] if keys[0][0] == "Pack" else keys[0]
            ref = (leaves[0], index, epoch, output)
            whole = self._shown(lane, number)
            start = time.perf_counter()
            try:
                with self.lending(), self.adopting():
                    made = self.code.collate(samples, ref, counts, lambda: members_of_rows(leaves, keys), number=whole)
            finally:
                self.batch_seconds += time.perf_counter() - start
            if made is None:
                return None
            batches = [self.conventions.delivered(batch) for batch in made]
            for output, batch in enumerate(batches):
                which = (output,) if len(batches) > 1 else ()
                self.conventions.attach(batch, "__restore_key__", ("Batch", lane, number + output, tuple(keys), *which))
        for batch in batches:
            if not (self.settings.worker is not None and isinstance(batch, Batch | Sample | dict)):
                self.conventions.attach(batch, "__valid__", real_rows(len(samples)))
                continue
            self.conventions.attach(batch, "__valid__", RealRows(len(samples)))
            sources = batch.get("__sources__") if isinstance(batch, dict) else getattr(batch, "__sources__", None)
            if type(sources) is tuple:
                attach(batch, "__sources__", SentSources(sources))
        return batches

    def begin(self, lane: int, number: int) -> None:
        """Set the microbatch that hooks see, by its number in its lane (lane -1: in its pass)."""
        if not self.own.present:
            return
        BATCH.set(UNKNOWN if self.own.waits else self._shown(lane, number))
        NUMBER.set(self.conventions.no_number)

    def begin_unknown(self) -> None:
        """Tell hooks that the microbatch of the next sample is unknown."""
        BATCH.set(UNKNOWN)
        NUMBER.set(self.conventions.no_number)

    @property
    def shares_buffers(self) -> bool:
        """Whether several lanes pack from one buffer (`dealt_packs.py`)."""
        return self.settings.packs_by_epoch and self.leaves[0].order.num_lanes < self.settings.num_lanes

    def _shown(self, lane: int, number: int) -> int:
        """Return the number of a microbatch as hooks see it."""
        # In a lane, `number` counts its own microbatches; a pass has no lanes.
        whole = number if lane < 0 else number * self.settings.num_lanes + lane
        return self.conventions.batch_number(whole, self.settings.config)

    def sample_numbers(self, lane: int) -> Callable[[int], int] | None:
        """Return what numbers the draws of a lane for hooks; None: they are not numbered."""
        if self.own.waits:
            return None
        num_lanes = self.leaves[0].order.num_lanes
        return self.conventions.sample_numbers(lane, num_lanes, self.rows, self.settings.config)

    def batches(
        self,
        samples: list[Any],
        keys: Sequence[tuple[Any, ...]],
        leaves: list[int],
        lane: int,
        number: int,
        counts: Counts,
    ) -> list[Any]:
        """Return the microbatches of some rows; none if a hook refuses them.

        Counts the samples of each leaf as delivered or skipped.
        """
        batches = self.collate(samples, keys, leaves, lane, number, counts)
        if batches is None:
            return []
        column = _SAMPLES if batches else _SKIPPED
        for leaf in set(leaves):
            counts.of(leaf)[column] += leaves.count(leaf)
        if batches:
            self.judge.delivered.update(leaves)
        return batches

    def decode_deferred(self, samples: Sequence[Any]) -> None:
        """Decode the deferred images of samples that are about to be packed or batched, on the loading threads."""
        if self.own.posts:
            self.steps.now.hook, self.steps.now.sample = Hook.DECODE_DEFERRED, None
            # On an error the members are decoded one by one later, so that only the broken one is lost.
            with contextlib.suppress(SampleError):
                decode_deferred(samples, map if self._pool is None else self._pool.map, self._slab_pool.lend)

    def flush_reports(self) -> None:
        """Flush failure reports that no later microbatch will carry."""
        reports = self.judge.taken()
        failure_log = self.settings.failure_log
        if reports and failure_log is not None:
            failure_log.write(reports, self.settings.config.dp_rank, self.settings.config.dp_size)

    def user_code(self, *, restoring: bool = False) -> contextlib.AbstractContextManager[None]:
        """Set up the hook context and restore the global generators afterwards; a no-op without user hooks."""
        if not (restoring or self.own.present):
            return AS_IT_IS
        run = self.settings.run
        config = self.settings.config
        put_back = restoring or not config.num_workers  # a worker's generators are its own
        return running_hooks(run.cache_pool, self.steps.tally, put_back=put_back, config=config)


def members_of_rows(leaves: Sequence[int], keys: Iterable[tuple[Any, ...]]) -> Iterator[tuple[int, int]]:
    """Return leaf and index of the samples of some rows."""
    return zip(leaves, (one[1] for key in keys for one in (key[2] if key[0] == "Pack" else (key,))), strict=True)


def real_rows(rows: int) -> torch.Tensor:
    """Return the mask of rows that are all real."""
    valid = np.empty(rows, np.bool_)
    valid.fill(True)
    return torch.from_numpy(valid)


class RealRows:
    """Stands for such a mask in a worker: pickled it is the tensor, which is made only where it arrives."""

    __slots__ = ("_rows",)

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __reduce__(self) -> tuple[Any, ...]:
        return real_rows, (self._rows,)


class PendingLoads:
    """Loads of consecutive draws that are under way, oldest first."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._loads: deque[Future[SampleColumns] | SampleColumns] = deque()

    def schedule(self, spans: Sequence[DrawSpan], *, ahead: bool, into: tuple[Slab, int] | None = None) -> None:
        """Start loading some draws; `into` is the slab for their images and the row of the first one."""
        self._loads.append(self._pipeline.submit(spans, ahead=ahead, into=into))

    def take(self) -> SampleColumns:
        """Return the oldest load."""
        load = self._loads.popleft()
        if isinstance(load, SampleColumns):
            return load
        start = time.perf_counter()
        loaded = load.result()
        self._pipeline.load_seconds += time.perf_counter() - start
        return loaded

    def __len__(self) -> int:
        return len(self._loads)


# ---------------------------------------------------------------------------------------------------------------------
# Loading picks: samples that are known by leaf, index and epoch, wherever these come from (`order/choose.py`).
#
# They are the draws of a pass, the references in a state or listing, or a planned microbatch.


class PickedLoad:
    """The loads of some picks, in their order.

    Args:
        pipeline: Loads the samples.
        picks: The samples; banned ones are not read.
    """

    def __init__(self, pipeline: Pipeline, picks: Picks) -> None:
        self._pipeline = pipeline
        self._loads: PendingLoads | None = None
        self._size = len(picks.members)
        threads = pipeline.settings.threads
        chunk = max(pipeline.chunk, -(-self._size // threads)) if threads else max(1, self._size)
        self._parts: list[tuple[int, list[DrawSpan]]] = [(low, []) for low in range(0, self._size, chunk)]
        self._buffers: list[RoundBuffer] = []
        for leaf, places in by_leaf(picks.members[:, 0]):
            at = slice(None) if len(places) == self._size else places
            indices = picks.members[at, 1].copy()
            epochs = picks.members[at, 2].copy()
            banned = None if picks.banned is None else picks.banned[at]
            buffer = RoundBuffer(pipeline.source(leaf).reader, Round(0, indices, epochs), banned)
            self._buffers.append(buffer)
            for low, spans in self._parts:
                first = bisect_left(places, low)
                end = bisect_left(places, low + chunk)
                if first < end:
                    here = [place - low for place in places[first:end]]
                    span = Span(leaf, buffer, first, end, here)
                    spans += [span] if banned is None else span.split(banned[first:end])

    def read_ahead(self) -> None:
        """Start reading, if reads are slow."""
        for buffer in self._buffers:
            self._pipeline.read_ahead(buffer)

    def start(self, *, as_slab: bool = False) -> PendingLoads:
        """Start loading, unless it has started; `as_slab` puts the images of all into one slab."""
        if self._loads is None:
            pipeline = self._pipeline
            self._loads = PendingLoads(pipeline)
            slab = pipeline.slabs.slab(self._size) if as_slab and pipeline.slabs is not None else None
            for low, spans in self._parts:
                self._loads.schedule(spans, ahead=True, into=None if slab is None else (slab, low))
        return self._loads
