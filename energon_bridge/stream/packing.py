"""Packing: encoded samples wait in a buffer, the encoder selects some of them into packs, and each pack becomes rows.

`select_samples_to_pack` gets a buffer of S samples. Samples it leaves over stay in the buffer, in their order, ahead of
the samples drawn next. So the selection depends on the draws alone, not on *when* they are made. The lane makes use of
that: after each microbatch it draws a share of what the buffer still needs, so that the buffer is full when the packs
run out and no step waits for a whole buffer. It selects again as soon as fewer packs are left than a microbatch needs,
before the state is taken, so a restored lane has the packs of its first microbatch. When a lane draws depends on its
state alone, never on where the run was stopped: the draw from which a change of weights or a ban holds follows from it.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from energon_bridge.errors import FatalSampleError, OverLongSampleError
from energon_bridge.rng import IntArray
from energon_bridge.stream.draws import SAMPLE, BatchRow, Draws, reencode, rows_of
from energon_bridge.stream.pipeline import Pipeline
from energon_bridge.stream.state import COUNTERS, BufferedRefs, Counts, SampleRef, Stage, as_members
from energon_bridge.task_encoder.packing import LONGEST_WAIT, Packer

logger = logging.getLogger(__name__)

EMPTY_SELECTIONS = 4
_AT_A_TIME = 64
"""Samples drawn between two checks of the byte budget."""
_GOLDEN = 0.6180339887498949
_SKIPPED = COUNTERS.index("skipped")


def first_target(lane: int, size: int) -> int:
    """Return the samples to which a lane fills its buffer, of S in the end, before its first selection."""
    return size - int(size / 2 * (lane * _GOLDEN % 1.0))


def share_of(missing: int, left: int) -> int:
    """Return what to do now of what is missing, if packs for so many more microbatches are left."""
    return -(-max(0, missing) // (left + 1))


@dataclass(slots=True)
class _Pack:
    members: list[BatchRow]
    taken: int = 0


def _refs_of(rows: Iterable[BatchRow]) -> IntArray:
    return as_members([row.members[0] for row in rows])


class _Packs(deque[_Pack]):
    """The packs in turn, and their part of the state as arrays, since every microbatch asks for it."""

    def __init__(self, packs: Iterable[_Pack] = ()) -> None:
        super().__init__()
        self.add(packs)

    def add(self, packs: Iterable[_Pack]) -> None:
        """Append packs."""
        self.extend(packs)
        self._sizes = np.array([len(pack.members) for pack in self], dtype=np.int64)
        self._refs = _refs_of(chain.from_iterable(pack.members for pack in self))

    def done(self) -> None:
        """Remove the first pack."""
        size = len(self.popleft().members)
        self._sizes, self._refs = self._sizes[1:], self._refs[size:]

    def waiting(self) -> BufferedRefs:
        """Return the packs as references."""
        rows = np.zeros((len(self), 3), dtype=np.int64)
        rows[:, 0], rows[:, 1] = Stage.PACK, self._sizes
        if self:  # no outputs of the others have been taken
            rows[0, 2] = self[0].taken
        return BufferedRefs(rows, self._refs)


class Packing:
    """The packs of one lane.

    Lanes begin with buffers of different sizes, from S/2 to S, so that they do not all select in the same step. A
    smaller buffer grows with each selection by half of what that selection delivered, up to S. So between two
    selections a lane draws at most one and a half times what it delivers.

    The state holds references: first those of the packs in turn, then those of the buffer. A restored lane encodes
    a pack when its turn comes, and the buffer in shares after each microbatch.

    With `max_tokens_per_microbatch` microbatches are selected instead of packs: the engine asks the encoder for the
    length of each sample, and the samples of a "pack" stay rows. Everything else is the same, the state too.

    The lanes of a process share a byte budget for contents (`Budget`). A lane over its share drops the
    contents it needs last (the newest of the buffer, then the last packs) and encodes them again when it needs
    them. The encoder always sees a complete buffer, so the buffer of a lane that is selecting may exceed the
    budget.

    Args:
        draws: Where samples come from.
        pipeline: Runs the hooks.
        size: S.
        held: Rows of stage PACK and BUFFER of a state.
        target: Samples in the buffer at which the next selection is made; 0 for a lane that begins.

    Attributes:
        held: Bytes of the contents waiting here.
        target: As above; it grows to S.
    """

    def __init__(
        self, draws: Draws, pipeline: Pipeline, size: int, held: list[tuple[Stage, list[SampleRef], int]], target: int
    ) -> None:
        self._draws = draws
        self._pipeline = pipeline
        self._size = size
        self._outputs: deque[BatchRow] = deque()
        self.held = 0
        pipeline.budget.join(self)
        # As a drop-in, every buffer is full: code for megatron-energon may rely on it.
        self.target = target or (size if pipeline.settings.energon_ranks else first_target(draws.number, size))
        rows = [(stage, [BatchRow((ref,), SAMPLE, None, 0) for ref in refs], number) for stage, refs, number in held]
        self._packs = _Packs(_Pack(members, taken) for stage, members, taken in rows if stage is Stage.PACK)
        self._keep([(members[0], wait) for stage, members, wait in rows if stage is Stage.BUFFER])
        self._to_restore = deque(self._buffer)
        self._lost: set[int] = set()  # ids of rows of the buffer that no longer encode, and are counted

    def waiting(self) -> BufferedRefs:
        """Return what waits here, as references."""
        rows = np.empty((len(self._buffer), 3), dtype=np.int64)
        rows[:, 0], rows[:, 1], rows[:, 2] = Stage.BUFFER, 1, self._waits
        return BufferedRefs.joined((self._packs.waiting(), BufferedRefs(rows, self._refs)))

    def _keep(self, waiting: Sequence[tuple[BatchRow, int]]) -> None:
        """Set the rows of the buffer, each with the number of selections that left it over."""
        self._buffer = [row for row, _ in waiting]
        self._waits = np.array([wait for _, wait in waiting], dtype=np.int64)
        self._refs = _refs_of(self._buffer)

    def take(self, counts: Counts) -> BatchRow:
        """Return the next row; select if no pack is left."""
        first, selections = self._draws.draw, 0
        while not self._outputs:
            if not self._packs:
                if selections > EMPTY_SELECTIONS:
                    self._draws.give_up_if_barren(first)
                selections += 1
                self._select(counts)
                continue
            pack = self._packs[0]
            rows = self._packed(pack, counts)
            self._outputs.extend(rows[pack.taken :])
            if not self._outputs:
                self._packs.done()
        row = self._outputs.popleft()
        self._packs[0].taken += 1
        if not self._outputs:
            self._packs.done()
        return row

    def take_microbatch(self, counts: Counts) -> list[BatchRow]:
        """Return the rows of the next microbatch that was selected by length; selects where none is left."""
        first, selections = self._draws.draw, 0
        while True:
            if self._packs:
                rows = self._with_contents(self._packs[0].members, counts)
                self._hold(-sum(row.size for row in rows))
                self._packs.done()
                if rows := post_encoded(self._pipeline, rows, counts):
                    return rows
                continue
            if selections > EMPTY_SELECTIONS:
                self._draws.give_up_if_barren(first)
            selections += 1
            self._select(counts)

    def settle(self, rows: int, counts: Counts) -> None:
        """Draw this microbatch's share of the next buffer; select if the next microbatch would find too few packs."""
        left = len(self._packs) // rows
        if left and self._to_restore:
            self._restore(share_of(len(self._to_restore), left), counts)
        if left:
            self._fill(len(self._buffer) + share_of(self.target - len(self._buffer), left), counts)
        first, selections = self._draws.draw, 0
        while len(self._packs) < rows:
            if selections > rows + EMPTY_SELECTIONS:
                self._draws.give_up_if_barren(first)
            selections += 1
            self._select(counts)
        self._pipeline.budget.keep(self)

    def _restore(self, share: int, counts: Counts) -> None:
        """Encode some rows of a buffer that came from a state."""
        rows = [self._to_restore.popleft() for _ in range(share)]
        self._with_contents(rows, counts)
        self._lost |= {id(row) for row in rows if row.content is None}
        self._pipeline.budget.keep(self)

    def _fill(self, target: int, counts: Counts) -> None:
        while (missing := target - len(self._buffer)) > 0:
            rows = rows_of(self._draws.collect(min(missing, _AT_A_TIME), counts))
            self._hold(sum(row.size for row in rows))
            self._buffer += rows
            self._refs = np.concatenate([self._refs, _refs_of(rows)])
            self._waits = np.concatenate([self._waits, np.zeros(len(rows), dtype=np.int64)])
            self._pipeline.budget.keep(self)

    def _hold(self, size: int) -> None:
        self._pipeline.budget.hold(self, size)

    def _select(self, counts: Counts) -> None:
        """Fill the buffer and let the encoder select packs; if the hook fails, drop the buffer and make no pack."""
        for attempt in range(EMPTY_SELECTIONS):
            self._fill(self.target + attempt * max(1, self._size // 4), counts)
            before = {id(row): wait for row, wait in zip(self._buffer, self._waits.tolist(), strict=True)}
            rows = self._with_contents([row for row in self._buffer if id(row) not in self._lost], counts)
            self._to_restore.clear()
            self._lost.clear()
            if not rows:
                self._keep([])
                continue
            selected = select_packs(self._pipeline, rows, counts)
            if selected is None:
                self._hold(-sum(row.size for row in rows))
                self._keep([])
                return
            packs, left = selected
            self._packs.add(_Pack(pack) for pack in packs)
            stay = {id(row) for row in chain(left, *packs)}
            self._hold(-sum(row.size for row in rows if id(row) not in stay))
            waits = [(row, before[id(row)] + 1) for row in left]
            self._keep([(row, wait) for row, wait in waits if not self._is_given_up(row, wait, counts)])
            self._pipeline.budget.keep(self)
            if packs:
                self.target = min(self._size, self.target + -(-sum(map(len, packs)) // 2))
                return
        if self._pipeline.own.by_length:
            return  # no sample has a length; `take_microbatch` gives up if it stays so
        raise FatalSampleError(
            f"select_samples_to_pack of {type(self._pipeline.code.encoder).__name__} made no pack from "
            f"{len(self._buffer)} samples, {EMPTY_SELECTIONS} times in a row: return lists of the samples it gets"
        )

    def _is_given_up(self, row: BatchRow, wait: int, counts: Counts) -> bool:
        """Give up a row that too many selections have left over; return whether it was given up."""
        if wait <= LONGEST_WAIT:
            return False
        ref = row.members[0]
        counts.of(ref.leaf)[_SKIPPED] += 1
        self._hold(-row.size)
        where = self._pipeline.source(ref.leaf).where(ref.sample)
        logger.warning("%s: dropped after %d selections left it over; is it too long for a pack?", where, wait)
        return True

    def _packed(self, pack: _Pack, counts: Counts) -> list[BatchRow]:
        """Return the rows of a pack; none if the encoder makes none."""
        rows = self._with_contents(pack.members, counts)
        self._hold(-sum(row.size for row in rows))
        counts = Counts() if pack.taken else counts  # restored: what it skips was counted before
        return pack_rows(self._pipeline, rows, counts)

    def made_again(self, rows: list[BatchRow], counts: Counts) -> list[BatchRow]:
        """Encode the rows of a restored state again; leave out those that no longer encode."""
        out = []
        for row in rows:
            members = reencode(self._pipeline, [BatchRow((ref,), SAMPLE, None, 0) for ref in row.members], counts)
            if self._pipeline.own.by_length:
                out += post_encoded(self._pipeline, members, counts, again=True)
                continue
            packed = pack_rows(self._pipeline, members, counts, again=True)
            if row.output < len(packed):
                out.append(packed[row.output])
        return out

    def _with_contents(self, rows: list[BatchRow], counts: Counts) -> list[BatchRow]:
        gone = [row for row in rows if row.content is None]
        made = reencode(self._pipeline, rows, counts)
        self._hold(sum(row.size for row in gone if row.content is not None))
        return made

    def let_go(self, size: int) -> None:
        """Drop contents of at least `size` bytes, starting with those needed last."""
        least = self.held - size
        for row in chain(reversed(self._buffer), *(pack.members for pack in reversed(self._packs))):
            if self.held <= least:
                return
            if row.content is not None:
                row.content = None
                self._hold(-row.size)


def select_packs(
    pipeline: Pipeline, rows: list[BatchRow], counts: Counts, *, last: bool = False
) -> tuple[list[list[BatchRow]], list[BatchRow]] | None:
    """Return the packs, or the microbatches, that are selected from some rows, and the rows that stay.

    None if the hook fails. `last` says that nothing will join the others. Rows whose length is not known, and are
    counted, are in neither.
    """
    most = pipeline.settings.max_tokens_per_microbatch
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
    packer: Packer[Any] = Packer(limits={"tokens": most}, size_of=int, method="padded_rows")
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
    whole = pipeline.settings.batch_size is None
    with pipeline.lending() if whole else contextlib.nullcontext(), pipeline.adopting():
        outputs = pipeline.code.pack(samples, refs, counts)
    size = sum(row.size for row in members)
    return [BatchRow(refs, number, output, size) for number, output in enumerate(outputs)]


def post_encoded(pipeline: Pipeline, rows: list[BatchRow], counts: Counts, *, again: bool = False) -> list[BatchRow]:
    """Run `postencode_sample` on rows; rows that it refuses are left out and lose their contents.

    With `again`, the hooks' own counts were counted before.
    """
    if not pipeline.own.posts:
        return rows
    members: list[BatchRow] = []
    pipeline.decode_deferred([row.content for row in rows])
    for row in rows:
        content, row.content = row.content, None
        with pipeline.adopting():
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
