"""Loading picks: samples that are known by leaf, index and epoch, wherever these come from (`plan/choose.py`).

They are the draws of a pass, the references in a state or listing, or a planned microbatch.
"""

from __future__ import annotations

from bisect import bisect_left

from energon_bridge.plan.choose import Picks, Span, by_leaf
from energon_bridge.plan.leaf import Round
from energon_bridge.stream.pipeline import PendingLoads, Pipeline
from energon_bridge.stream.reader import DrawSpan, RoundBuffer


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
            indices, epochs = picks.members[at, 1].copy(), picks.members[at, 2].copy()
            banned = None if picks.banned is None else picks.banned[at]
            buffer = RoundBuffer(pipeline.source(leaf).reader, Round(0, indices, epochs), banned)
            self._buffers.append(buffer)
            for low, spans in self._parts:
                first, end = bisect_left(places, low), bisect_left(places, low + chunk)
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
