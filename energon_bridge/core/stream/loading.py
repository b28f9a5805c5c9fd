"""Loading: draws that are chosen are read, parsed and decoded, on threads if there are some.

Draws of lanes are chosen by round (`Loading.round_cache`); picks are samples given by leaf, index and epoch
(`load_picks`).
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from energon_bridge.core.encoder.task_encoder import decoder_of
from energon_bridge.core.order.choose import Picks, RoundCache, Span, by_leaf
from energon_bridge.core.order.leaf_order import Round
from energon_bridge.core.samples.sample import Records
from energon_bridge.core.samples.stacking import Lender, Slab, SlabPool
from energon_bridge.core.storage.forks import Threads
from energon_bridge.core.stream.lane_state import SampleKey
from energon_bridge.core.stream.leaf import Leaf, LeafSource, StorePool
from energon_bridge.core.stream.reader import DrawSpan, RoundBuffer
from energon_bridge.core.stream.settings import StreamSettings
from energon_bridge.core.stream.values import BANNED
from energon_bridge.core.stream.watchdog import Activities

_LEAVES_TOGETHER = 32
"""Leaves of which a load reads draws at the same time if storage answers slowly."""
_TOGETHER = 8
"""Draws per load, at least, if there are no loading threads: about as many as a pack of single draws takes."""


class SampleColumns(NamedTuple):
    """Samples in order, loaded (or `FailedSample`) or encoded: the restore key, sample, bytes and leaf of each.

    Samples are a list, or `Records` where nothing needs a single one.
    """

    keys: list[SampleKey]
    samples: Any
    sizes: list[int]
    leaves: list[int]

    def __add__(self, other: SampleColumns) -> SampleColumns:  # type: ignore[override]
        if not self.keys:
            return other
        more = other.samples
        samples = self.samples + (more if type(self.samples) is Records else list(more))
        return SampleColumns(self.keys + other.keys, samples, self.sizes + other.sizes, self.leaves + other.leaves)

    def changed(self, change: Callable[[Any], Any]) -> SampleColumns:
        """Return the columns, each of which was changed in the same way."""
        samples = self.samples
        samples = samples.changed(change) if type(samples) is Records else change(samples)
        return SampleColumns(change(self.keys), samples, change(self.sizes), change(self.leaves))


_NOTHING = SampleColumns([], [], [], [])


class Sources:
    """The leaves of a process, each opened on first use. They know no pipeline: in a circle, a loader that is dropped
    would keep its files open.
    """

    def __init__(
        self, leaves: Sequence[Leaf], settings: StreamSettings, activities: Activities, *, singly: bool
    ) -> None:
        self.decoder = decoder_of(settings.run.task_encoder)
        self._leaves = leaves
        self._settings = settings
        self._activities = activities
        self._stores = StorePool(self.decoder)
        self._singly = singly
        self._open: list[LeafSource | None] = [None] * len(leaves)

    def source(self, leaf: int) -> LeafSource:
        """Return a leaf, which is opened on first use."""
        source = self._open[leaf]
        if source is None:
            source = LeafSource(self._leaves[leaf], self._settings, self.decoder, self._activities, self._stores)
            source.values.singly = self._singly
            self._open[leaf] = source
        return source

    def buffer(self, leaf: int, found: Round) -> RoundBuffer:
        """Return the buffer of a round of a leaf."""
        bans = self._leaves[leaf].bans
        source = self.source(leaf)
        split = None if self._singly else source.values.split
        return RoundBuffer(source.reader, found, None if bans is None else bans.among(found.indices), split)


class Loading:
    """Loads the draws that the streams of a process choose.

    Args:
        slabs: Whether the images of a microbatch may be decoded into one slab.
        singly: Whether samples are needed one by one, and not only batches of them.

    Attributes:
        source: Returns a leaf, which is opened on first use.
        round_cache: The rounds that lanes have open in the leaves.
        chunk: Draws of a load.
        slab_pool: Gives memory for images, and for what is stacked.
        slabs: The same, if images are decoded into slabs.
        seconds: Time spent on loading, or on waiting for it, since it was last reset.
    """

    def __init__(
        self, leaves: Sequence[Leaf], settings: StreamSettings, activities: Activities, *, slabs: bool, singly: bool
    ) -> None:
        sources = Sources(leaves, settings, activities, singly=singly)
        rows = settings.run.rows
        self._leaves = leaves
        self._draws_ahead = settings.draws_ahead
        self.source = sources.source
        self.threads = settings.threads
        # Reads of several rounds are longer only where these continue the same slices.
        together = max(1, settings.read_together)
        self.round_cache = RoundCache(leaves, sources.buffer, together=lambda order: 1 if order.is_dealt else together)
        self._pool = Threads(settings.threads, "energon-load") if settings.threads else None
        readers = settings.background_reads
        self._reading = Threads(readers, "energon-read") if readers else None
        self._openers = Threads(_LEAVES_TOGETHER, "energon-leaves") if readers else None
        self.slab_pool = SlabPool()
        decodes = getattr(settings.run.task_encoder, "decoder", None) is not None
        self.slabs = self.slab_pool if slabs and decodes and rows > 1 else None
        self.chunk: int = -(-rows // settings.threads) if settings.threads else max(rows, _TOGETHER)
        self.seconds = 0.0

    def write_into(self, memory: Lender) -> None:
        """Decode images into, and stack other fields in, the memory of a lender."""
        self.slab_pool.lender = memory

    @property
    def map(self) -> Callable[..., Iterator[Any]]:
        """`map`, on the loading threads if there are any."""
        return map if self._pool is None else self._pool.map

    def load(self, spans: Sequence[DrawSpan], *, ahead: bool, into: tuple[Slab, int] | None = None) -> SampleColumns:
        """Load some draws; with `ahead`, also read the rest of their rounds.

        `into` is the slab for their images and the row of the first one.
        """
        if len(spans) == 1:
            return self._columns(spans[0], ahead, into)
        self._read_together(spans, ahead)
        loaded = _NOTHING
        places: list[int] = []
        for span in spans:
            loaded += self._columns(span, ahead, into)
            places += span.places
        # Spans are by leaf; their draws go back to the places at which they were chosen.
        order = sorted(range(len(places)), key=places.__getitem__)
        return loaded.changed(lambda column: list(map(column.__getitem__, order)))

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

    def _columns(self, of: DrawSpan, ahead: bool, into: tuple[Slab, int] | None) -> SampleColumns:
        leaves = [of.leaf] * (of.high - of.low)
        if of.banned:
            identity = self._leaves[of.leaf].identity
            buffer = of.round
            drawn = zip(
                buffer.indices[of.low : of.high].tolist(), buffer.epochs[of.low : of.high].tolist(), strict=True
            )
            keys = [(identity, index, epoch, 0) for index, epoch in drawn]
            return SampleColumns(keys, [BANNED] * len(keys), [0] * len(keys), leaves)
        rows = None if into is None else (into[0], [into[1] + place for place in of.places])
        return SampleColumns(
            *self.source(of.leaf).values.load(of.round, of.low, of.high, ahead=ahead, into=rows), leaves
        )

    def submit(
        self, spans: Sequence[DrawSpan], *, ahead: bool, into: tuple[Slab, int] | None
    ) -> Future[SampleColumns] | SampleColumns:
        """Load some draws on the loading threads, or right now if there are none."""
        if self._pool is not None:
            return self._pool.submit(self.load, spans, ahead=ahead, into=into)
        start = time.perf_counter()
        loaded = self.load(spans, ahead=ahead, into=into)
        self.seconds += time.perf_counter() - start
        return loaded

    def read_ahead(self, buffer: RoundBuffer) -> None:
        """Start reading a round that will be needed, if reads are slow enough to pay for a thread."""
        if self._reading is not None and buffer.reader.slow:
            self._reading.submit(buffer.read_ahead)

    def read_some_ahead(self, buffer: RoundBuffer, low: int) -> bool:
        """Start reading some draws of a round from `low` on; return whether that covers the round to its end."""
        some = self._draws_ahead
        if self._reading is not None and buffer.asked < min(low + some // 2, len(buffer)):
            low, buffer.asked = max(low, buffer.asked), low + some
            self._reading.submit(buffer.read_ahead, low, buffer.asked)
        return buffer.asked >= len(buffer)

    def close(self, *, wait: bool) -> None:
        """Stop the threads."""
        for pool in (self._pool, self._reading, self._openers):
            if pool is not None:
                pool.shutdown(wait=wait, cancel_futures=True)


class PendingLoads:
    """Loads of consecutive draws that are under way, oldest first."""

    def __init__(self, loading: Loading) -> None:
        self._loading = loading
        self._loads: deque[Future[SampleColumns] | SampleColumns] = deque()

    def schedule(self, spans: Sequence[DrawSpan], *, ahead: bool, into: tuple[Slab, int] | None = None) -> None:
        """Start loading some draws; `into` is the slab for their images and the row of the first one."""
        self._loads.append(self._loading.submit(spans, ahead=ahead, into=into))

    def take(self) -> SampleColumns:
        """Return the oldest load."""
        load = self._loads.popleft()
        if isinstance(load, SampleColumns):
            return load
        start = time.perf_counter()
        loaded = load.result()
        self._loading.seconds += time.perf_counter() - start
        return loaded

    def __len__(self) -> int:
        return len(self._loads)


# ---------------------------------------------------------------------------------------------------------------------
# Loading picks: samples that are known by leaf, index and epoch, wherever these come from (`order/choose.py`).
#
# They are the draws of a pass, or the references in a state or listing.


def load_picks(loading: Loading, picks: Picks) -> PendingLoads:
    """Start loading some picks, in their order; banned ones are not read."""
    size = len(picks.members)
    threads = loading.threads
    chunk = max(loading.chunk, -(-size // threads)) if threads else max(1, size)
    parts: list[tuple[int, list[DrawSpan]]] = [(low, []) for low in range(0, size, chunk)]
    for leaf, places in by_leaf(picks.members[:, 0]):
        at = slice(None) if len(places) == size else places
        indices = picks.members[at, 1].copy()
        epochs = picks.members[at, 2].copy()
        banned = None if picks.banned is None else picks.banned[at]
        buffer = RoundBuffer(loading.source(leaf).reader, Round(0, indices, epochs), banned)
        for low, spans in parts:
            first = bisect_left(places, low)
            end = bisect_left(places, low + chunk)
            if first < end:
                here = [place - low for place in places[first:end]]
                span = Span(leaf, buffer, first, end, here)
                spans += [span] if banned is None else span.split(banned[first:end])
    loads = PendingLoads(loading)
    for _, spans in parts:
        loads.schedule(spans, ahead=True)
    return loads
