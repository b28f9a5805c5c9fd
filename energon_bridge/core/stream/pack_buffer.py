"""Packing: encoded samples wait in a buffer, the encoder selects some of them into packs, and each pack becomes rows.

`select_samples_to_pack` gets a buffer of S samples. Samples it leaves over stay in the buffer, in their order, ahead of
the samples drawn next. So the selection depends on the draws alone, not on *when* they are made. The lane makes use of
that: after each microbatch it draws a share of what the buffer still needs, so that the buffer is full when the packs
run out and no step waits for a whole buffer. It selects again as soon as fewer packs are left than a microbatch needs,
before the state is taken, so a restored lane has the packs of its first microbatch. When a lane draws depends on its
state alone, never on where the run was stopped: the draw from which a change of weights or a ban holds follows from it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon_bridge.core.encoder.hooks import LONGEST_WAIT
from energon_bridge.core.errors import FatalSampleError, OverLongSampleError
from energon_bridge.core.order.choose import AnyBlend, OrderedLeaf
from energon_bridge.core.order.leaf_order import LeafOrder
from energon_bridge.core.order.rng import IntArray
from energon_bridge.core.registry import load
from energon_bridge.core.stream.again import reencode
from energon_bridge.core.stream.conventions import Conventions
from energon_bridge.core.stream.draws import Draws
from energon_bridge.core.stream.lane_state import COUNTERS, BufferedRefs, Counts, LaneState, Stage, as_members
from energon_bridge.core.stream.pipeline import Pipeline
from energon_bridge.core.stream.rows import BatchRow, Taken, count_read, rows_of, taken_of

# ---------------------------------------------------------------------------------------------------------------------
# Which samples of a lane wait to be packed, and in which packs, as integers.
#
# `Packing` keeps what the samples contain beside it.
#
# Lanes begin with buffers of different sizes, from S/2 to S, so that they do not all select in the same step. A smaller
# buffer grows with each selection by half of what that selection delivered, up to S. So between two selections a lane
# draws at most one and a half times what it delivers.
#
# *A buffer ends with an epoch.* In a run of one dataset, what waits and what is still drawn of an epoch are cut into
# equal parts of at most S samples. No part goes beyond the epoch, and after its last draw the encoder is asked for all
# that waits (`current_buffer_is_last`). So a lane delivers an epoch before the next. A lane with fewer than 8 buffers
# an epoch begins with a whole one.
#
# *No pack has a sample twice.* If an encoder selects a sample together with itself, drawn in another epoch, the later
# one stays in the buffer. That can happen in mixes, with several epochs shuffled as one, and where an encoder leaves
# samples over at the end of an epoch.
#
# A bucket (`group_by`) has a buffer of its own in each lane, which begins whole. It ends with an epoch if it is of one
# dataset, and if a lane's share of an epoch fills it: lanes that share a buffer would have to share all their buckets.
#
# Runs that began with 0.1.0 have neither rule: their states do not say how many buffers there are (`packing_buffers`).


EMPTY_SELECTIONS = 4
"""Selections without a pack, one after the other, after which a lane gives up."""


LEAST_SHARE = 64
"""Samples of an epoch in a packing buffer's share, at least: with fewer, buffers would leave it far apart."""
_ROOMY = 8
"""Buffers in a lane's share of an epoch from which on lanes begin with buffers of different sizes."""


@dataclass(frozen=True, slots=True)
class LaneEpochs:
    """Where the epochs of a lane end, in a run of one dataset or a bucket of one: that of leaf number `leaf`."""

    order: LeafOrder
    lane: int
    leaf: int = 0

    def epoch(self, draw: int) -> int:
        """Return the epoch of a draw."""
        return self.order.epoch_of(self.lane, draw)

    def end(self, draw: int) -> int:
        """Return the first draw after the epoch of one."""
        return self.order.epoch_end(self.lane, draw)

    def holds(self, buffers: int, size: int) -> bool:
        """Whether the lane's share of an epoch fills so many buffers."""
        return self.order.num_samples >= buffers * size * self.order.num_lanes


@dataclass(frozen=True, slots=True)
class PackRules:
    """What ends a buffer besides its size.

    Attributes:
        epochs: Where the lane's epochs end; None: they do not end a buffer.
        distinct: Whether a pack has no sample twice.
        whole_draws: Whether all samples of a draw enter the buffer at once, so that the state of no draw has a part.
    """

    epochs: LaneEpochs | None = None
    distinct: bool = False
    whole_draws: bool = False

    def first_target(self, conventions: Conventions, lane: int, size: int) -> int:
        """Return the samples in the buffer of a lane at which its first packs are selected."""
        small = self.epochs is not None and not self.epochs.holds(_ROOMY, size)
        return size if small else conventions.first_target(lane, size)


def pack_rules(leaves: Sequence[OrderedLeaf], blend: AnyBlend | None, lane: int, *, by_epoch: bool) -> PackRules:
    """Return the rules of a lane; `by_epoch`: the run has rules besides the size at all."""
    order = leaves[0].order
    alone = by_epoch and blend is None and order.epochs_per_shuffle == 1
    return PackRules(LaneEpochs(order, lane) if alone else None, distinct=by_epoch)


def share_of(missing: int, left: int) -> int:
    """Return the share of the missing samples to draw or encode now, if packs for `left` more microbatches wait."""
    return -(-max(0, missing) // (left + 1))


class _Epoch(NamedTuple):
    """An epoch of a lane: its number, one of its draws, and the first draw after it."""

    number: int
    first: int
    end: int


class PackBuffer:
    """The packs of a lane in turn, then the samples from which the next ones are selected.

    Arrays are never changed in place, so that states share them.

    Args:
        size: Samples from which packs are selected, in the end (S).
        held: What waits by the state of the lane.
        target: Samples in the buffer at which the next selection is made.
        rules: What else ends a buffer.
        dealt: As below.

    Attributes:
        sizes: Samples of each pack, shape (packs,).
        taken: Outputs of the first pack already delivered.
        members: References of the samples in the buffer, shape (samples, 4).
        target: As above.
        dealt: Packs selected so far.
    """

    def __init__(self, size: int, held: BufferedRefs, target: int, rules: PackRules, dealt: int = 0) -> None:
        self._size = size
        self.target = target
        self._rules = rules
        self.dealt = dealt
        stages, lengths, numbers = held.rows.T
        packs = stages == Stage.PACK
        waiting = stages == Stage.BUFFER
        self.sizes: IntArray = lengths[packs]
        self.taken = int(numbers[packs][0]) if packs.any() else 0
        self._packed: IntArray = held.members[np.repeat(packs, lengths)]
        self.members: IntArray = held.members[np.repeat(waiting, lengths)]
        self._waits: IntArray = numbers[waiting]
        self._fresh = self._first_fresh()
        self._drawing = _Epoch(0, 0, 0)

    def share(self, rows: int, draw: int) -> int:
        """Return the samples to draw after a microbatch of so many packs; 0 if the next one needs a selection first."""
        left = len(self.sizes) // rows
        return share_of(self.missing(0, draw), left) if left else 0

    def missing(self, attempt: int, draw: int) -> int:
        """Return the samples to draw before a selection, after so many that made no pack.

        Args:
            draw: The next draw of the leaf, if there is one leaf.
        """
        here = len(self.members)
        more = attempt * max(1, self._size // 4)
        left = self.left(draw)
        if left is None:
            return max(0, self.target + more - here)
        # All that waits and is still drawn of the epoch, in equal parts of at most `target`: this one, rounded up.
        parts = -(-(here + left) // self.target)
        return max(0, min(left, -(-(here + left) // max(1, parts)) + more - here))

    def left(self, draw: int) -> int | None:
        """Return the draws that may still enter this buffer; None: any number."""
        epoch = self._epoch(draw)
        if epoch is None:
            return None
        return 0 if self.is_closed(draw) else epoch.end - draw

    def is_closed(self, draw: int) -> bool:
        """Whether the epoch of samples that no selection was offered yet ends before a draw."""
        epoch = self._epoch(draw)
        return epoch is not None and self._fresh is not None and self._fresh < epoch.number

    def _epoch(self, draw: int) -> _Epoch | None:
        """Return the epoch of a draw, if epochs end the buffer; it is asked for after each microbatch."""
        epochs = self._rules.epochs
        if epochs is None:
            return None
        if not self._drawing.first <= draw < self._drawing.end:
            self._drawing = _Epoch(epochs.epoch(draw), draw, epochs.end(draw))
        return self._drawing

    def _first_fresh(self) -> int | None:
        """Return the first epoch of samples that no selection was offered yet; None if all were."""
        fresh = self.members[self._waits == 0, 2]
        return int(fresh.min()) if len(fresh) else None

    def without_repeats(self, packs: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return packs, given by places, without samples that they have from another epoch already."""
        if not self._rules.distinct or (self.members[:, 2] == self.members[:1, 2]).all():
            return packs
        members = self.members.tolist()
        return [_distinct(pack, members) for pack in packs]

    def add(self, members: IntArray) -> None:
        """Append samples to the buffer."""
        self.members = np.concatenate((self.members, members))
        self._waits = np.concatenate((self._waits, np.zeros(len(members), dtype=np.int64)))
        if self._fresh is None and len(members):
            self._fresh = int(members[:, 2].min())  # if epochs end a buffer, later samples are of no earlier epoch

    def select(self, packs: Sequence[Sequence[int]]) -> NDArray[np.bool_]:
        """Move samples into packs, by their places; return which of the others have now been left over too often."""
        self._waits = self._waits + 1
        self._fresh = None
        if packs:
            places = np.array(list(chain(*packs)), dtype=np.int64)
            self._append([len(pack) for pack in packs], self.members[places])
            self.dealt += len(packs)
            left = np.ones(len(self.members), dtype=bool)
            left[places] = False
            self.keep(left)
            self.target = min(self._size, self.target + -(-len(places) // 2))
        return self._waits > LONGEST_WAIT

    def _append(self, sizes: Sequence[int], *members: IntArray) -> None:
        self.sizes = np.concatenate((self.sizes, np.array(sizes, dtype=np.int64)))
        self._packed = np.concatenate((self._packed, *members))

    def follow(self, packs: Sequence[IntArray], waiting: BufferedRefs, *, target: int, dealt: int) -> None:
        """Append packs of a shared buffer; what waits there waits here from now on."""
        self._append([len(pack) for pack in packs], *packs)
        self.members = waiting.members
        self._waits = waiting.rows[:, 2]
        self._fresh = self._first_fresh()
        self.target = target
        self.dealt = dealt

    def keep(self, kept: NDArray[np.bool_]) -> None:
        """Drop the other samples of the buffer."""
        self.members = self.members[kept]
        self._waits = self._waits[kept]
        self._fresh = None if self._fresh is None else self._first_fresh()

    def take(self, packs: int) -> tuple[IntArray, IntArray]:
        """Remove the first packs; return their sizes, and the references of their samples."""
        sizes = self.sizes[:packs]
        self.sizes = self.sizes[packs:]
        end = int(sizes.sum())
        members = self._packed[:end]
        self._packed = self._packed[end:]
        self.taken = 0
        return sizes, members

    def waiting(self) -> BufferedRefs:
        """Return the packs and the buffer as references, as a state has them."""
        packs = len(self.sizes)
        rows = np.zeros((packs + len(self.members), 3), dtype=np.int64)
        rows[:packs, 0], rows[packs:, 0] = Stage.PACK, Stage.BUFFER
        rows[:packs, 1], rows[packs:, 1] = self.sizes, 1
        rows[packs:, 2] = self._waits
        if packs:
            rows[0, 2] = self.taken  # no outputs of the others have been taken
        return BufferedRefs(rows, np.concatenate((self._packed, self.members)))


def _distinct(pack: Sequence[int], members: Sequence[Sequence[int]]) -> list[int]:
    """Return the places of a pack without samples that it already has from another epoch."""
    epochs: dict[tuple[int, int], int] = {}
    kept = []
    for place in pack:
        leaf, sample, epoch, _ = members[place]
        if epochs.setdefault((leaf, sample), epoch) == epoch:
            kept.append(place)
    return kept


logger = logging.getLogger(__name__)

_AT_A_TIME = 64
"""Samples drawn between two checks of the byte budget."""
_SKIPPED = COUNTERS.index("skipped")


class Packing:
    """The packs of one lane.

    `PackBuffer` says which samples wait, and for which pack; the rows with their contents are kept here beside it.

    The state holds references: first those of the packs in turn, then those of the buffer. A restored lane encodes
    a pack when its turn comes, and the buffer in shares after each microbatch.

    The lanes of a process share a byte budget for contents (`Budget`). A lane over its share drops the
    contents it needs last (the newest of the buffer, then the last packs) and encodes them again when it needs
    them. The encoder always sees a complete buffer, so the buffer of a lane that is selecting may exceed the
    budget.

    Args:
        state: What waits, and the samples in the buffer at which the next selection is made.
        rules: What else ends a buffer.

    Attributes:
        held: Bytes of the contents waiting here.
        target: As above; it grows to S.
    """

    def __init__(self, draws: Draws, pipeline: Pipeline, state: LaneState, rules: PackRules) -> None:
        self._draws = draws
        self._pipeline = pipeline
        self._outputs: deque[BatchRow] = deque()
        self.held = 0
        pipeline.budget.join(self)
        size = pipeline.settings.run.packing_buffer_size or 0
        target = state.buffer or rules.first_target(pipeline.conventions, draws.number, size)
        self._waiting = PackBuffer(size, state.held, target, rules, state.dealt)
        self._rules = rules
        rows = [(stage, [BatchRow((ref,)) for ref in refs]) for stage, refs, _ in state.held.entries()]
        # The rows of each pack and of the buffer, as they wait.
        self._packs = deque(members for stage, members in rows if stage is Stage.PACK)
        self._buffer = [members[0] for stage, members in rows if stage is Stage.BUFFER]
        self._to_restore = deque(self._buffer)
        self._failed: set[int] = set()  # ids of rows of the buffer that no longer encode, and are counted

    @property
    def target(self) -> int:
        """Samples in the buffer at which the next selection is made."""
        return self._waiting.target

    def fields(self) -> dict[str, Any]:
        return {"buffer": self._waiting.target}

    @property
    def _leaf_draw(self) -> int:
        """The next draw of the leaf whose epochs end the buffer, if they do."""
        epochs = self._rules.epochs
        return self._draws.leaf_draws[0 if epochs is None else epochs.leaf]

    @property
    def selected(self) -> int:
        """The packs selected so far."""
        return self._waiting.dealt

    def waiting(self) -> BufferedRefs:
        """Return what waits here, as references."""
        return self._waiting.waiting()

    def give_up_packs(self) -> list[list[BatchRow]]:
        """Remove the packs; return them."""
        packs = list(self._packs)
        self._packs.clear()
        self._waiting.take(len(packs))
        self._hold(-sum(row.size for pack in packs for row in pack if row.content is not None))
        return packs

    def _keep(self, kept: NDArray[np.bool_]) -> None:
        """Drop the other rows of the buffer."""
        self._buffer = list(compress(self._buffer, kept))
        self._waiting.keep(kept)

    def _done(self) -> None:
        """Remove the first pack."""
        self._packs.popleft()
        self._waiting.take(1)

    def take(self, counts: Counts) -> Taken:
        return taken_of(self._pipeline, [self.next_row(counts) for _ in range(self._pipeline.rows)])

    def next_row(self, counts: Counts) -> BatchRow:
        """Return the next row; select if no pack is left."""
        first = self._draws.draw
        selections = 0
        while not self._outputs:
            if not self._packs:
                if selections > EMPTY_SELECTIONS:
                    self._draws.give_up_after(first)
                selections += 1
                self.select(counts)
                continue
            pack = self._packs[0]
            rows = self._packed(pack, counts)
            self._outputs.extend(rows[self._waiting.taken :])
            if not self._outputs:
                self._done()
        row = self._outputs.popleft()
        self._waiting.taken += 1
        if not self._outputs:
            self._done()
        return row

    def settle(self, counts: Counts) -> None:
        """Draw this microbatch's share of the next buffer; select if the next microbatch would find too few packs."""
        rows = self._pipeline.rows
        left = len(self._packs) // rows
        if left and self._to_restore:
            self._restore(share_of(len(self._to_restore), left), counts)
        self._fill(self._waiting.share(rows, self._leaf_draw), counts)
        self._select_for(rows, counts)
        self._pipeline.budget.keep(self)

    def _select_for(self, rows: int, counts: Counts) -> None:
        """Select until there are packs for a microbatch."""
        first = self._draws.draw
        selections = 0
        while len(self._packs) < rows:
            if selections > rows + EMPTY_SELECTIONS:
                self._draws.give_up_after(first)
            selections += 1
            self.select(counts)

    def _restore(self, share: int, counts: Counts) -> None:
        """Encode some rows of a buffer that came from a state."""
        rows = [self._to_restore.popleft() for _ in range(share)]
        self._with_contents(rows, counts)
        self._failed |= {id(row) for row in rows if row.content is None}
        self._pipeline.budget.keep(self)

    def _fill(self, missing: int, counts: Counts) -> None:
        """Draw samples into the buffer, as far as they may enter it."""
        left = self._waiting.left(self._leaf_draw)
        stop = None if left is None else self._draws.draw + left
        while missing > 0 and (stop is None or self._draws.draw < stop):
            rows = rows_of(self._draws.collect(min(missing, _AT_A_TIME), counts, stop, waits=True))
            while self._rules.whole_draws and self._draws.taken:
                rows += rows_of(self._draws.collect(1, counts, stop, waits=True))
            missing -= len(rows)
            self._hold(sum(row.size for row in rows))
            self._buffer += rows
            self._waiting.add(as_members([row.members[0] for row in rows]))
            self._pipeline.budget.keep(self)

    def _hold(self, size: int) -> None:
        self._pipeline.budget.hold(self, size)

    def select(self, counts: Counts) -> None:
        """Fill the buffer and let the encoder select packs; if the hook fails, drop the buffer and make no pack."""
        for attempt in range(EMPTY_SELECTIONS):
            closed = self._fill_for(attempt, counts)
            rows = self._with_contents([row for row in self._buffer if id(row) not in self._failed], counts)
            self._to_restore.clear()
            self._failed.clear()
            if not rows:
                self._keep(np.zeros(len(self._buffer), dtype=bool))
                continue
            selected = select_packs(self._pipeline, rows, counts, last=closed)
            if selected is None:
                self._hold(-sum(row.size for row in rows))
                self._keep(np.zeros(len(self._buffer), dtype=bool))
                return
            packs, left = selected
            stay = {id(row) for row in chain(left, *packs)}
            self._hold(-sum(row.size for row in rows if id(row) not in stay))
            self._keep(np.array([id(row) in stay for row in self._buffer], dtype=bool))
            self._moved(packs, left, counts)
            self._pipeline.budget.keep(self)
            if packs:
                return
        self._selected_nothing()

    def _selected_nothing(self) -> None:
        raise FatalSampleError(
            f"select_samples_to_pack of {type(self._pipeline.code.encoder).__name__} made no pack from "
            f"{len(self._buffer)} samples, {EMPTY_SELECTIONS} times in a row: return lists of the samples it gets"
        )

    def _fill_for(self, attempt: int, counts: Counts) -> bool:
        """Draw what a selection needs; return whether all that waits should leave, since an epoch ends."""
        first = self._draws.draw
        waiting = self._waiting
        while True:
            self._fill(waiting.missing(attempt, self._leaf_draw), counts)
            if len(waiting.members) or waiting.left(self._leaf_draw) is None:
                return waiting.is_closed(self._leaf_draw)
            self._draws.give_up_after(first)  # an epoch gave nothing

    def _moved(self, packs: list[list[BatchRow]], left: list[BatchRow], counts: Counts) -> None:
        """Move rows of the buffer into packs; give up those that too many selections have left over."""
        rows = self._buffer
        places = {id(row): place for place, row in enumerate(rows)}
        wanted = [[places[id(row)] for row in pack] for pack in packs]
        chosen = self._waiting.without_repeats(wanted)
        if chosen is not wanted:
            selected = set(chain(*chosen))
            packs = [[rows[place] for place in pack] for pack in chosen]
            left = [row for place, row in enumerate(rows) if place not in selected]
        late = self._waiting.select(chosen)
        self._packs.extend(packs)
        self._buffer = left
        if not late.any():
            return
        for row in compress(left, late):
            ref = row.members[0]
            counts.of(ref.leaf)[_SKIPPED] += 1
            self._hold(-row.size)
            where = self._pipeline.source(ref.leaf).where(ref.sample)
            logger.warning(
                "%s: dropped after %d selections left it over; is it too long for a pack?", where, LONGEST_WAIT + 1
            )
        self._keep(~late)

    def _packed(self, pack: list[BatchRow], counts: Counts) -> list[BatchRow]:
        """Return the rows of the first pack; none if the encoder makes none."""
        rows = self._with_contents(pack, counts)
        self._hold(-sum(row.size for row in rows))
        counts = Counts() if self._waiting.taken else counts  # restored: what it skips and reads was counted before
        count_read(self._pipeline, rows, counts)
        return pack_rows(self._pipeline, rows, counts)

    def made_again(self, rows: list[BatchRow], counts: Counts) -> list[BatchRow]:
        """Encode the rows of a restored state again; return them without those that no longer encode."""
        out = []
        for row in rows:
            members = reencode(self._pipeline, [BatchRow((ref,)) for ref in row.members], counts)
            packed = pack_rows(self._pipeline, members, counts, again=True)
            if row.output < len(packed):
                out.append(packed[row.output])
        return out

    def _with_contents(self, rows: list[BatchRow], counts: Counts) -> list[BatchRow]:
        gone = [row for row in rows if row.content is None]
        made = reencode(self._pipeline, rows, counts)
        self._hold(sum(row.size for row in gone if row.content is not None))
        return made

    def needed_last(self) -> Iterable[BatchRow]:
        """Return the rows whose contents may be dropped: of the buffer from its end on, then of the last packs."""
        return chain(reversed(self._buffer), *reversed(self._packs))


class ByLength(Packing):
    """The microbatches of one lane that are selected by length (`max_tokens_per_microbatch`).

    The engine asks the encoder for the length of each sample, and what is selected like a pack is a microbatch, whose
    samples stay rows. Everything else is as for packs, the state too.
    """

    def take(self, counts: Counts) -> Taken:
        """Return the next microbatch; select where none is left."""
        first = self._draws.draw
        selections = 0
        while True:
            if self._packs:
                rows = self._with_contents(self._packs[0], counts)
                self._hold(-sum(row.size for row in rows))
                self._done()
                count_read(self._pipeline, rows, counts)
                if rows := post_encoded(self._pipeline, rows, counts):
                    return taken_of(self._pipeline, rows)
                continue
            if selections > EMPTY_SELECTIONS:
                self._draws.give_up_after(first)
            selections += 1
            self.select(counts)

    def made_again(self, rows: list[BatchRow], counts: Counts) -> list[BatchRow]:
        made = reencode(self._pipeline, [BatchRow(row.members) for row in rows], counts)
        return post_encoded(self._pipeline, made, counts, again=True)

    def _selected_nothing(self) -> None:
        """Go on: no sample has a length; `take` gives up if it stays so."""


def select_packs(
    pipeline: Pipeline, rows: list[BatchRow], counts: Counts, *, last: bool = False
) -> tuple[list[list[BatchRow]], list[BatchRow]] | None:
    """Return the packs, or the microbatches, that are selected from some rows, and the rows that stay.

    None if the hook fails. `last` says that nothing will join the others. Rows whose length is not known, and are
    counted, are in neither.
    """
    most = pipeline.settings.run.max_tokens_per_microbatch
    if most is not None:
        return _select_microbatches(pipeline, rows, counts, most, last=last)
    refs = [row.members[0] for row in rows]
    groups = pipeline.code.select([row.content for row in rows], refs, counts, last=last)
    if groups is None:
        return None
    packs = _as_rows(groups, rows, type(pipeline.code.encoder).__name__)
    selected = {id(row) for pack in packs for row in pack}
    return packs, [row for row in rows if id(row) not in selected]


def _select_microbatches(
    pipeline: Pipeline, rows: list[BatchRow], counts: Counts, most: int, *, last: bool
) -> tuple[list[list[BatchRow]], list[BatchRow]]:
    """Select microbatches of at most so many tokens, padding included, by the lengths of samples alone."""
    measured: list[tuple[BatchRow, int]] = []
    for row in rows:
        ref = row.members[0]
        length = pipeline.code.length(row.content, ref, counts)
        if length is None:
            continue
        if length > most:
            where = pipeline.source(ref.leaf).where(ref.sample)
            raise OverLongSampleError(
                f"{where} has {length} tokens, but max_tokens_per_microbatch={most}: raise the limit, or shorten "
                "or skip the sample in encode_sample"
            )
        measured.append((row, length))
    packer = load("packing", "padded_rows")(limits={"tokens": most}, size_of=int, method="padded_rows")
    sizes = np.array([[length] for _, length in measured], dtype=np.int64).reshape(-1, 1)
    places = packer.pack(sizes, flush=last)
    selected = {place for microbatch in places for place in microbatch}
    return (
        [[measured[place][0] for place in microbatch] for microbatch in places],
        [row for place, (row, _) in enumerate(measured) if place not in selected],
    )


def pack_rows(pipeline: Pipeline, rows: list[BatchRow], counts: Counts, *, again: bool = False) -> list[BatchRow]:
    """Encode a pack and return its rows, if any; the members lose their contents.

    With `again`, the hooks' own counts were counted before.
    """
    members = post_encoded(pipeline, rows, counts, again=again)
    if not members:
        return []
    samples = [row.content for row in members]
    for row in members:
        row.content = None
    refs = tuple(row.members[0] for row in members)
    # Without a batch size a pack is the microbatch.
    whole = pipeline.settings.run.batch_size is None
    with pipeline.stacking(lends=whole):
        outputs = pipeline.code.pack(samples, refs, counts)
    size = sum(row.size for row in members)
    return [BatchRow(refs, number, output, size) for number, output in enumerate(outputs)]


def post_encoded(pipeline: Pipeline, rows: list[BatchRow], counts: Counts, *, again: bool = False) -> list[BatchRow]:
    """Run `postencode_sample` on rows; return them without those that it skips, whose contents are dropped.

    With `again`, the hooks' own counts were counted before.
    """
    if not pipeline.own.posts:
        return rows
    members: list[BatchRow] = []
    pipeline.decode_deferred([row.content for row in rows])
    for row in rows:
        content = row.content
        row.content = None
        with pipeline.stacking(lends=False):
            row.content = pipeline.code.post(content, row.members[0], counts, again=again)
        if row.content is not None:
            members.append(row)
    return members


def _as_rows(groups: Any, rows: list[BatchRow], encoder: str) -> list[list[BatchRow]]:
    """Return the rows whose contents the encoder put into groups."""
    places: dict[int, list[BatchRow]] = {}
    for row in reversed(rows):
        places.setdefault(id(row.content), []).append(row)
    packs = []
    for group in groups:
        pack = []
        for sample in group:
            if not places.get(id(sample)):
                raise FatalSampleError(
                    f"select_samples_to_pack of {encoder} returned a {type(sample).__name__} that it did not get, or "
                    "returned one twice: return lists of the same sample objects, each at most once"
                )
            pack.append(places[id(sample)].pop())
        if pack:
            packs.append(pack)
    return packs
