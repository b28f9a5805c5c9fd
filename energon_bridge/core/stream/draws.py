"""The draws of one lane: from its order to encoded samples.

Nothing here depends on who owns the lane or on how far ahead draws are loaded.
"""

from __future__ import annotations

from collections import deque
from itertools import compress
from typing import Any, NamedTuple

from energon_bridge.core.encoder.hooks import NUMBER
from energon_bridge.core.errors import EmptyDatasetError
from energon_bridge.core.order.choose import AnyBlend, Chooser
from energon_bridge.core.samples.sample import Records
from energon_bridge.core.samples.stacking import Slab
from energon_bridge.core.stream.again import reencode
from energon_bridge.core.stream.lane_state import (
    COLUMNS,
    NOTHING_HELD,
    BufferedRefs,
    Counts,
    LaneState,
    SampleKey,
)
from energon_bridge.core.stream.loading import PendingLoads, SampleColumns
from energon_bridge.core.stream.pipeline import Pipeline
from energon_bridge.core.stream.reader import DrawSpan
from energon_bridge.core.stream.rows import BatchRow, Taken, rows_of
from energon_bridge.core.stream.user_code import BegunDraw
from energon_bridge.core.stream.values import FailedSample

_NOTHING = SampleColumns([], [], [], [])
_BYTES = COLUMNS.index("bytes")
_BARREN = 1000
"""Draws without a result that are always tolerated before the stream counts as barren."""


class _Draw(NamedTuple):
    leaf: int
    size: int
    key: SampleKey
    sample: Any
    begun: BegunDraw | None = None


class Draws:
    """The draws of one lane, continued from a state.

    Args:
        rows: Rows of a microbatch that is made of the draws; default: those of the pipeline.
        bucket: Name of the bucket that the draws are of, if microbatches come from buckets.

    Attributes:
        rows: Rows of a microbatch.
        draw: Number of the next draw, or of the current one while samples are left of it.
        taken: Samples already taken of the current draw.
        leaf_draws: Draws made in each leaf.
    """

    def __init__(
        self,
        number: int,
        pipeline: Pipeline,
        blend: AnyBlend | None,
        state: LaneState,
        rows: int | None = None,
        bucket: str = "",
    ) -> None:
        self.number = number
        self._pipeline = pipeline
        self.rows = rows or pipeline.rows
        self._of_bucket = bucket
        self._number_of = pipeline.sample_numbers(number)
        self.draw = state.draw
        self.taken = state.taken
        self.origin = state.origin
        self.leaf_draws = list(state.leaf_draws)
        # `_chooser` is ahead of `draw` by what is loading (`_loading`), loaded (`_loaded`) and encoded (`_outputs`).
        self._loader = pipeline.loading
        self._chooser = Chooser(self._loader.round_cache, blend, number, state.blend_position)
        self._first = state.draw
        self._since = state.draw
        self._settled = 0
        self._slab: Slab | None = None
        self._loading = PendingLoads(self._loader)
        self._loaded = _NOTHING
        self._at = 0  # of the next draw in `_loaded`
        self._begun: deque[_Draw] = deque()
        self._outputs: deque[tuple[SampleKey, Any]] = deque()
        self._outputs_of = self._outputs_size = 0
        # The first microbatch reads only its own draws, so that a resume costs no more than a fresh start.
        self._ahead = False

    def sums(self) -> tuple[int, ...]:
        """Return the sums of the leaves at the position, in a blend by amounts."""
        return self._chooser.sums(self.draw)

    # The first stage of a lane (`lane.py`) ---------------------------------------------------------------------------

    def prepare(self, microbatches: int) -> None:
        """Start loading the draws that the next microbatches will probably need."""
        draws = self.rows
        if self._settled and self._pipeline.own.waits:
            draws = max(1, (self.draw - self._first) // self._settled)
        self._schedule_up_to(self.draw + microbatches * draws)

    def take(self, counts: Counts) -> Taken:
        drawn = self.collect(self.rows, counts)
        return Taken(drawn.samples, drawn.keys, drawn.leaves, lambda: rows_of(drawn))

    def next_row(self, counts: Counts) -> BatchRow:
        return rows_of(self.collect(1, counts))[0]

    def made_again(self, rows: list[BatchRow], counts: Counts) -> list[BatchRow]:
        return reencode(self._pipeline, rows, counts)

    def waiting(self) -> BufferedRefs:
        return NOTHING_HELD

    def fields(self) -> dict[str, Any]:
        return {
            "draw": self.draw,
            "taken": self.taken,
            "leaf_draws": tuple(self.leaf_draws),
            "origin": self.origin,
            "sums": self.sums(),
        }

    def settle(self, counts: Counts) -> None:
        self._ahead = True
        self._since = self.draw
        self._settled += 1

    def give_up_if_barren(self) -> None:
        """Raise if the draws since the last microbatch gave nothing, and the loop would never end."""
        self.give_up_after(self._since)

    def collect(self, wanted: int, counts: Counts, stop: int | None = None, *, waits: bool = False) -> SampleColumns:
        """Return the next encoded samples, fewer if draw `stop` is reached; count the draws that give none.

        With `waits` the samples wait to be packed: their bytes are counted when they leave (`BatchRow.read`).
        """
        out = SampleColumns([], [], [], [])
        since = self.draw
        while len(out.samples) < wanted and (stop is None or self.draw < stop):
            if self._outputs:
                key, sample = self._outputs.popleft()
                out.samples.append(sample)
                out.keys.append(key)
                out.leaves.append(self._outputs_of)
                out.sizes.append(self._outputs_size)
                if not waits and not self.taken:  # else it was counted with the first output, perhaps before a resume
                    counts.of(self._outputs_of)[_BYTES] += self._outputs_size
                self._drawn(self._outputs_of, left=bool(self._outputs))
                since = self.draw
                continue
            if not self._begun and self._at == len(self._loaded.keys):
                self.give_up_after(since)
                self._load(wanted - len(out.samples))
            if self._pipeline.own.encodes:
                if not self._begun and self._pipeline.own.posts_alone:
                    self._begin(wanted - len(out.samples))
                self._encode_draw(counts)
            else:
                most = wanted - len(out.samples)
                taken = self._take(most if stop is None else min(most, stop - self.draw), counts, waits=waits)
                if taken.keys:
                    since = self.draw
                    out += taken
            if self._at == len(self._loaded.keys):
                self._loaded, self._at = _NOTHING, 0  # what was taken must not stay until this lane's next turn
        return out

    def give_up_after(self, since: int) -> None:
        """Raise if so many draws since one gave nothing that the loop would never end."""
        draws = self.draw - since
        pipeline = self._pipeline
        if draws > _BARREN and draws > 10 * pipeline.num_samples:
            where = ""
            left = "nothing is left to train on"
            if self._of_bucket:
                where = f" from bucket {self._of_bucket}"
                left = (
                    "nothing is left of the bucket. Ban its samples or leave them out by a filter, to go on without it"
                )
            raise EmptyDatasetError(
                f"{pipeline.paths}: {draws} samples in a row{where}, of a split of {pipeline.num_samples}, were "
                f"skipped, excluded, banned or failed: {left}. Check `exclude`, bans, and SkipSample in hooks"
            )

    def _load(self, draws: int) -> None:
        """Wait for the next loaded draws; load them now if nothing is under way."""
        if not len(self._loading):
            self._schedule_up_to(self.draw + len(self._begun) + draws)
        self._loaded = self._loading.take()
        self._at = 0

    def _next(self) -> _Draw:
        """Take the next of the loaded draws."""
        loaded = self._loaded
        at = self._at
        self._at += 1
        return _Draw(loaded.leaves[at], loaded.sizes[at], loaded.keys[at], loaded.samples[at])

    def _begin(self, wanted: int) -> None:
        """Run the first hook on draws until they give `wanted` samples, and decode their images together.

        The number of samples of a draw is known before images are decoded, so no draw begins that is not needed now.
        """
        outputs = -self.taken
        for _ in range(wanted):
            if self._at == len(self._loaded.keys):
                self._load(wanted - outputs)
            draw = self._next()
            if self._number_of is not None:
                NUMBER.set(self._number_of(self.draw + len(self._begun)))
            begun = self._pipeline.begin_draw(draw.leaf, draw.sample, draw.key)
            self._begun.append(draw._replace(begun=begun))
            if begun is not None:
                outputs += len(begun.encoded)
            if outputs >= wanted or (begun is None and type(draw.sample) is not FailedSample):
                break
        self._pipeline.decode_deferred([one for draw in self._begun if draw.begun for one in draw.begun.encoded])

    def _encode_draw(self, counts: Counts) -> None:
        """Encode the next draw into `_outputs`."""
        leaf, size, key, sample, begun = self._begun.popleft() if self._begun else self._next()
        self._outputs_of = leaf
        self._outputs_size = size
        again = bool(self.taken)
        if self._number_of is not None:
            NUMBER.set(self._number_of(self.draw))
        self._outputs.extend(self._pipeline.encode(leaf, sample, key, counts, again=again, begun=begun))
        for _ in range(min(self.taken, len(self._outputs))):
            self._outputs.popleft()
        if not self._outputs:
            counts.of(leaf)[_BYTES] += 0 if again else size
            self._drawn(leaf, left=False)

    def _drawn(self, leaf: int, *, left: bool) -> None:
        """Count one output of the current draw as taken; advance to the next draw if none is left."""
        if left:
            self.taken += 1
            return
        self.draw += 1
        self.taken = 0
        self.leaf_draws[leaf] += 1

    def _take(self, wanted: int, counts: Counts, *, waits: bool) -> SampleColumns:
        """Take up to `wanted` loaded draws without encoding them: no user code sees single samples."""
        low = self._at
        high = min(low + wanted, len(self._loaded.keys))
        self._at = high
        self.draw += high - low
        taken = self._loaded
        if high - low != len(taken.keys):
            taken = taken.changed(lambda column: column[low:high])
        keys, samples, sizes, leaves = taken
        drawn = set(leaves)
        for leaf in drawn:
            self.leaf_draws[leaf] += leaves.count(leaf)
        if not waits:
            for leaf, size in zip(leaves, sizes, strict=True) if len(drawn) != 1 else [(leaves[0], sum(sizes))]:
                counts.of(leaf)[_BYTES] += size
        if type(samples) is Records or FailedSample not in set(map(type, samples)):
            self._pipeline.code.worked(self._pipeline.own.first, leaves)
            return taken
        good = [bool(self._pipeline.encode(*draw, counts)) for draw in zip(leaves, samples, keys, strict=True)]
        return taken.changed(lambda column: list(compress(column, good)))

    # Scheduling ------------------------------------------------------------------------------------------------------

    def _schedule_up_to(self, draw: int) -> None:
        pipeline = self._pipeline
        chooser = self._chooser
        while chooser.draw < draw:
            count = min(self._loader.chunk, draw - chooser.draw)
            into = self._slab_row() if self._loader.slabs is not None else None
            if into is not None:
                count = min(count, self.rows - into[1])  # a load stays within one microbatch's slab
            spans = chooser.spans(count)
            if (chooser.draw - self._first) % self.rows == 0:
                self._slab = None  # full; only its images keep it
            rounds = self._ahead and pipeline.settings.reads_rounds
            self._loading.schedule(spans, ahead=rounds, into=into)
            if rounds:
                self._read_ahead(spans)
            elif self._ahead and pipeline.settings.draws_ahead:
                self._read_some_ahead(spans)

    def _slab_row(self) -> tuple[Slab, int] | None:
        """Return the slab of the microbatch that the next draw probably belongs to, and its row there."""
        row = (self._chooser.draw - self._first) % self.rows
        if not row and self._loader.slabs is not None:
            self._slab = self._loader.slabs.slab(self.rows)
        return None if self._slab is None else (self._slab, row)

    def _read_ahead(self, spans: list[DrawSpan]) -> None:
        for span in spans:
            open_rounds = self._loader.round_cache.of(self.number, span.leaf)
            current = open_rounds.current is span.round and open_rounds.upcoming is None
            if current and (span.round.reader.slow or 2 * span.high > len(span.round)):
                self._loader.read_ahead(open_rounds.following())

    def _read_some_ahead(self, spans: list[DrawSpan]) -> None:
        for span in spans:
            open_rounds = self._loader.round_cache.of(self.number, span.leaf)
            if open_rounds.current is span.round and self._loader.read_some_ahead(span.round, span.high):
                self._loader.read_some_ahead(open_rounds.upcoming or open_rounds.following(), 0)
