"""The draws of one lane: from its order to encoded samples, and to the rows of microbatches.

Nothing here depends on who owns the lane or on how far ahead draws are loaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from energon_bridge.core.encoder.deferred import Deferred, field_items
from energon_bridge.core.encoder.hooks import NUMBER, Hook
from energon_bridge.core.errors import EmptyDatasetError
from energon_bridge.core.order.choose import AnyBlend, Chooser, Picks
from energon_bridge.core.samples.stacking import Slab
from energon_bridge.core.stream.failures import MAX_MEMBERS, SamplePlace, named
from energon_bridge.core.stream.pipeline import PendingLoads, Pipeline, SampleColumns, load_picks
from energon_bridge.core.stream.reader import DrawSpan
from energon_bridge.core.stream.restore_keys import PlainKey, RowKey, SampleKey, pack_key, read_key
from energon_bridge.core.stream.state import (
    COLUMNS,
    NOTHING_HELD,
    BufferedRefs,
    Counts,
    LaneState,
    SampleRef,
    as_members,
)
from energon_bridge.core.stream.user_code import BegunDraw
from energon_bridge.core.stream.values import FailedSample

_NOTHING = SampleColumns([], [], [], [])
_BYTES = COLUMNS.index("bytes")
_ENCODED_AGAIN = COLUMNS.index("encoded_again")
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
        # What has been chosen, and is loaded or loading.
        self._chooser = Chooser(pipeline.cursors, blend, number, state.standing)
        self._first = state.draw
        self._since = state.draw
        self._settled = 0
        self._slab: Slab | None = None
        self._loading = PendingLoads(pipeline)
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
                taken = len(out.samples)
                most = wanted - taken
                self._take(most if stop is None else min(most, stop - self.draw), out, counts, waits=waits)
                if len(out.samples) > taken:
                    since = self.draw
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

    def _take(self, wanted: int, out: SampleColumns, counts: Counts, *, waits: bool) -> None:
        """Take up to `wanted` draws as they are, since no user code sees single samples."""
        loaded = self._loaded
        low = self._at
        high = min(low + wanted, len(loaded.keys))
        self._at = high
        self.draw += high - low
        keys = loaded.keys[low:high]
        samples = loaded.samples[low:high]
        leaves = loaded.leaves[low:high]
        sizes = loaded.sizes[low:high]
        drawn = set(leaves)
        for leaf in drawn:
            self.leaf_draws[leaf] += leaves.count(leaf)
        if not waits:
            for leaf, size in zip(leaves, sizes, strict=True) if len(drawn) != 1 else [(leaves[0], sum(sizes))]:
                counts.of(leaf)[_BYTES] += size
        if FailedSample in set(map(type, samples)):
            good = [bool(self._pipeline.encode(*draw, counts)) for draw in zip(leaves, samples, keys, strict=True)]
            keys, samples, leaves, sizes = (list(compress(part, good)) for part in (keys, samples, leaves, sizes))
        else:
            self._pipeline.code.worked(self._pipeline.own.first, leaves)
        out.keys.extend(keys)
        out.samples.extend(samples)
        out.leaves.extend(leaves)
        out.sizes.extend(sizes)

    # Scheduling ------------------------------------------------------------------------------------------------------

    def _schedule_up_to(self, draw: int) -> None:
        pipeline = self._pipeline
        chooser = self._chooser
        while chooser.draw < draw:
            count = min(pipeline.chunk, draw - chooser.draw)
            into = self._slab_row() if pipeline.slabs is not None else None
            if into is not None:
                count = min(count, self.rows - into[1])
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
        if not row and self._pipeline.slabs is not None:
            self._slab = self._pipeline.slabs.slab(self.rows)
        return None if self._slab is None else (self._slab, row)

    def _read_ahead(self, spans: list[DrawSpan]) -> None:
        for span in spans:
            cursor = self._pipeline.cursors.of(self.number, span.leaf)
            current = cursor.current is span.round and cursor.upcoming is None
            if current and (span.round.reader.slow or 2 * span.high > len(span.round)):
                self._pipeline.read_ahead(cursor.following())

    def _read_some_ahead(self, spans: list[DrawSpan]) -> None:
        for span in spans:
            cursor = self._pipeline.cursors.of(self.number, span.leaf)
            if cursor.current is span.round and self._pipeline.read_some_ahead(span.round, span.high):
                self._pipeline.read_some_ahead(cursor.upcoming or cursor.following(), 0)


# ---------------------------------------------------------------------------------------------------------------------
# Rows of future microbatches: encoded samples or packs, with the references to encode them again.


_AT_A_TIME = 64
"""Samples read at a time when rows are encoded again."""
_NUMBER = 32
"""Bytes of a Python number in a list, about."""
SAMPLE = -1
"""The `output` of a row that is a single sample, not a pack."""


@dataclass(slots=True)
class BatchRow:
    """One row.

    Attributes:
        members: The sample, or the samples of the pack.
        output: The number of this row among the outputs of its pack; `SAMPLE` for a single sample.
        content: What goes into the batch; None if it must be encoded again.
        size: Its bytes, about.
        read: Of a sample that waits to be packed: the bytes read for it, which are not counted yet.
    """

    members: tuple[SampleRef, ...]
    output: int = SAMPLE
    content: Any = None
    size: int = 0
    read: int = 0

    def key(self, pipeline: Pipeline) -> PlainKey:
        """Return its restore key."""
        keys = [(pipeline.leaves[ref.leaf].identity, ref.sample, ref.epoch, ref.output) for ref in self.members]
        return keys[0] if self.output == SAMPLE else pack_key(self.output, keys)


def encode_rows(
    pipeline: Pipeline, loads: PendingLoads, counts: Counts, numbers: Iterator[int] | None = None
) -> Iterator[list[BatchRow]]:
    """Encode the loads of some picks, and give the rows of each; `numbers` are those that hooks see of the picks."""
    while len(loads):
        loaded = loads.take()
        for leaf, sample, key, size in zip(loaded.leaves, loaded.samples, loaded.keys, loaded.sizes, strict=True):
            counts.of(leaf)[_BYTES] += size
            if numbers is not None:
                NUMBER.set(next(numbers))
            outputs = pipeline.encode(leaf, sample, key, counts)
            yield [BatchRow((SampleRef(leaf, *each[1:]),), SAMPLE, encoded) for each, encoded in outputs]


class Taken(NamedTuple):
    """What a microbatch is made of: the samples or packs, their restore keys, the leaves of all samples in them.

    `rows` gives them as rows, for the state of a lane, where hooks make several batches of them.
    """

    samples: list[Any]
    keys: Sequence[PlainKey]
    leaves: list[int]
    rows: Callable[[], list[BatchRow]]


def taken_of(pipeline: Pipeline, rows: list[BatchRow]) -> Taken:
    """Return what a microbatch of some rows is made of."""
    samples = [row.content for row in rows]
    keys = [row.key(pipeline) for row in rows]
    leaves = [ref.leaf for row in rows for ref in row.members]
    return Taken(samples, keys, leaves, lambda: rows)


def batch_rows(pipeline: Pipeline, rows: list[BatchRow], lane: int, number: int, counts: Counts) -> list[Any]:
    """Return the microbatches of some rows (see `Pipeline.batches`); none of no rows."""
    return pipeline.batches(*taken_of(pipeline, rows)[:3], lane, number, counts)


def count_read(pipeline: Pipeline, rows: Sequence[BatchRow], counts: Counts) -> None:
    """Count the bytes read for samples that have waited and leave now."""
    if len(pipeline.leaves) == 1:
        counts.of(0)[_BYTES] += sum([row.read for row in rows])
        return
    for row in rows:
        counts.of(row.members[0].leaf)[_BYTES] += row.read


def rows_of(encoded: SampleColumns) -> list[BatchRow]:
    """Return encoded samples as rows."""
    columns = zip(encoded.samples, encoded.keys, encoded.leaves, encoded.sizes, strict=True)
    return [
        BatchRow((SampleRef(leaf, index, epoch, output),), SAMPLE, sample, size_of(sample, size), 0 if output else size)
        for sample, (_, index, epoch, output), leaf, size in columns
    ]


def size_of(sample: Any, read: int) -> int:
    """Return the approximate bytes of an encoded sample without its meta fields; at least the bytes read for it."""
    if isinstance(sample, torch.Tensor):
        return max(sample.nbytes, read)
    return max(sum([_bytes_in(value) for name, value in field_items(sample) if not name.startswith("__")]), read)


def _bytes_in(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.nbytes
    if isinstance(value, (bytes, bytearray, str)):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_bytes_in, value.values()))
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], (int, float)):
            return _NUMBER * len(value)
        return sum(map(_bytes_in, value))
    if isinstance(value, Deferred) and hasattr(value, "data"):  # an image
        return len(value.data)
    if isinstance(value, Image.Image):
        return value.width * value.height * len(value.getbands())
    return sum(_bytes_in(one) for _, one in field_items(value)) if is_dataclass(value) else 0


def reencode(
    pipeline: Pipeline, rows: Sequence[BatchRow], counts: Counts, loading: PendingLoads | None = None
) -> list[BatchRow]:
    """Encode the rows whose content is gone; return all rows but those that no longer encode.

    All randomness of a hook is keyed to its sample, so the content is the same as before, in any process. A sample that
    no longer encodes is logged and counted for its leaf. `loading` holds their loads, if they are under way.
    """
    gone = [row for row in rows if row.content is None]
    at_once = _AT_A_TIME if loading is None else max(1, len(gone))
    for low in range(0, len(gone), at_once):
        part = deque(gone[low : low + at_once])
        refs = as_members([row.members[0] for row in part])
        loads = load_picks(pipeline, Picks(refs)) if loading is None else loading
        while len(loads):
            loaded = loads.take()
            for key, sample, size in zip(loaded.keys, loaded.samples, loaded.sizes, strict=True):
                row = part.popleft()
                row.read = 0 if row.members[0].output else size
                _encode_again(pipeline, row, sample, key, counts)
    return [row for row in rows if row.content is not None]


def _encode_again(pipeline: Pipeline, row: BatchRow, sample: Any, key: SampleKey, counts: Counts) -> None:
    ref = row.members[0]
    counts.of(ref.leaf)[_ENCODED_AGAIN] += 1
    encoded = pipeline.encode(ref.leaf, sample, key, Counts(), again=True)
    if ref.output < len(encoded):
        row.content = encoded[ref.output][1]
        row.size = size_of(row.content, 0)
        return
    gone = LookupError(f"waited to be packed or batched, but its encoder no longer gives output {ref.output}")
    pipeline.code.failed(gone, [(ref.leaf, ref.sample)], counts, hook=Hook.RESTORE)


# ---------------------------------------------------------------------------------------------------------------------
# Batches and samples by the restore keys that they were delivered with.


def restore(pipeline: Pipeline, key: PlainKey) -> Any:
    """Return the microbatch or sample with a restore key, encoded again.

    Raises:
        LookupError: The key belongs to another dataset, or its sample no longer gives an output.
    """
    named = read_key(key)
    with pipeline.user_code(restoring=True):
        if isinstance(named, RowKey):
            pipeline.begin_unknown()
            return _row(pipeline, named)[0]
        number = named.number - named.output
        pipeline.begin(named.lane, number)
        rows = [_row(pipeline, row) for row in named.rows]
        leaves = [leaf for _, leaf in rows]
        keys = [row.plain for row in named.rows]
        batches = pipeline.collate([row for row, _ in rows], keys, leaves, named.lane, number, None)
    assert batches is not None, "without counts a hook that fails raises"
    return batches[named.output]


def describe(pipeline: Pipeline, key: PlainKey) -> str:
    """Return the dataset, shard and key of each sample of a restore key.

    Raises:
        LookupError: It is no restore key.
    """
    members = read_key(key).samples
    places = []
    for identity, index, _, _ in members[:MAX_MEMBERS]:
        leaf = _leaf_of(pipeline, identity)
        if leaf is None:
            places.append(SamplePlace(f"another dataset (identity {identity!r})", "unknown", index))
        else:
            places.append(pipeline.source(leaf).place(index))
    return named(places, len(members))


def _leaf_of(pipeline: Pipeline, identity: str) -> int | None:
    return next((number for number, leaf in enumerate(pipeline.leaves) if leaf.identity == identity), None)


def _row(pipeline: Pipeline, key: RowKey) -> tuple[Any, int]:
    """Return the sample or pack with a restore key, and the number of its (first sample's) leaf."""
    code = pipeline.code
    members = [_restore_one(pipeline, one) for one in key.samples]
    refs = [SampleRef(leaf, *one[1:]) for (_, leaf), one in zip(members, key.samples, strict=True)]
    row, leaf = members[0]
    if key.output is not None or pipeline.own.by_length:
        pipeline.decode_deferred([sample for sample, _ in members])
        samples = [code.post(sample, ref, None) for (sample, _), ref in zip(members, refs, strict=True)]
        row = samples[0] if key.output is None else code.pack(samples, refs, None)[key.output]
    if pipeline.settings.run.batch_size is None and not pipeline.own.groups:
        pipeline.collate([row], [key.plain], [leaf], 0, 0, None)
    return row, leaf


def _restore_one(pipeline: Pipeline, key: SampleKey) -> tuple[Any, int]:
    """Return the sample with a restore key and the number of its leaf."""
    identity, index, epoch, output = key
    leaf = _leaf_of(pipeline, identity)
    if leaf is None:
        known = ", ".join(sorted({one.dataset.path for one in pipeline.leaves})[:3])
        raise LookupError(
            f"restore key {key!r}: sample {index} belongs to a dataset that this loader does not read, or whose "
            f"content has changed (identity {identity!r}). It reads {known}"
        )
    loaded = load_picks(pipeline, Picks(as_members([SampleRef(leaf, index, epoch, 0)]))).take()
    encoded = pipeline.encode(leaf, loaded.samples[0], (identity, index, epoch, 0), Counts())
    if output >= len(encoded):
        why = "".join(f": {report}" for report in pipeline.judge.taken())
        where = pipeline.source(leaf).where(index)
        raise LookupError(f"restore key {key!r}: {where} gives {len(encoded)} encoded samples now{why}")
    return encoded[output][1], leaf
