"""Buffers that several lanes share, where data is small: each lane takes its turn of the packs.

A lane that packs by itself draws its own part of an epoch, an L-th of the samples. Where that is less than a buffer, or
than a few dozen samples, packs are badly filled, and the lanes leave an epoch at very different times. Then the run has
fewer buffers than lanes, K of them (`packing_buffers` in `loader/run_plan.py`): lane l follows buffer `l mod K`, which
draws as lane `l mod K` of K does, and takes every (L/K)-th pack that is selected of it, from pack `l div K` on.

What a lane delivers still follows from its own state: it has the position of the buffer after the last selection that
the lane has seen. So a lane can always select by itself, wherever the others are. Lanes of one process that come to the
same selection share its work; lanes of several processes each do it, and lane `l < K` counts what was left out on the
way.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from energon_bridge.core.order.choose import AnyBlend
from energon_bridge.core.samples.sample_place import pass_on
from energon_bridge.core.stream.draws import Draws
from energon_bridge.core.stream.lane_state import Counts, LaneState, Stage, as_members
from energon_bridge.core.stream.pack_buffer import ByLength, Packing, PackRules, pack_rules
from energon_bridge.core.stream.pipeline import Pipeline
from energon_bridge.core.stream.rows import BatchRow

logger = logging.getLogger(__name__)

Key = tuple[int, int, int, bytes]
"""The position of a buffer: packs dealt, draws, outputs taken of the current draw, and the references that wait, with
what each leaf has drawn: lanes that saw it before a ban and after one may have drawn as much, but not the same."""


@dataclass(slots=True)
class Selection:
    """What was selected of a shared buffer.

    Attributes:
        packs: By turn; only those that lanes of this process take.
        after: The buffer after it.
        counts: Draws that gave nothing on the way.
    """

    packs: dict[int, list[list[BatchRow]]]
    after: LaneState
    counts: Counts

    def rows(self) -> list[BatchRow]:
        """Return the samples in the packs."""
        return [row for packs in self.packs.values() for pack in packs for row in pack]


class FollowedDraws(Draws):
    """The position of a shared buffer, as one lane has seen it; the buffer draws."""

    def __init__(self, pipeline: Pipeline, number: int, state: LaneState) -> None:
        super().__init__(number, pipeline, None, state)
        self._sums = state.sums

    def follow(self, state: LaneState) -> None:
        """Go to another position."""
        self.draw = state.draw
        self.taken = state.taken
        self._sums = state.sums
        self.leaf_draws = list(state.leaf_draws)

    def sums(self) -> tuple[int, ...]:
        return self._sums

    def prepare(self, microbatches: int) -> None:
        """Do nothing: a selection loads what it needs."""


class SharedBuffer:
    """One buffer in one process, and its selections that lanes may still ask for.

    Args:
        number: Its number.
        state: That of a lane: where the buffer is.
        turns: Those of the lanes of the process.
        reading: By number of a buffer, the one that chose draws last: lanes may be at different positions of it, which
            one `SharedBuffer` each follows, and they share the open rounds.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        blend: AnyBlend | None,
        number: int,
        state: LaneState,
        turns: Collection[int],
        reading: dict[int, SharedBuffer],
    ) -> None:
        self._pipeline = pipeline
        self._turns = turns
        self._number = number
        self._reading = reading
        self._sharers = pipeline.settings.num_lanes // pipeline.leaves[0].order.num_lanes
        self._origin = state.origin
        self._draws = Draws(number, pipeline, blend, state)
        rules = pack_rules(pipeline.leaves, blend, number, by_epoch=True)
        waiting = replace(state, held=state.held.only(Stage.BUFFER))
        kind = ByLength if pipeline.own.by_length else Packing
        self._packing = kind(self._draws, pipeline, waiting, rules)
        self._at = self._state()
        self._found: dict[Key, Selection] = {}
        self.held = 0
        pipeline.budget.join(self)

    def find(self, key: Key) -> Selection | None:
        """Return the selection from a position on; None if the buffer does not come to it."""
        while key not in self._found:
            if key[:3] <= progress_of(self._at) and key_of(self._at) != key:
                return None
            self._select()
        return self._found[key]

    def forget(self, before: tuple[int, ...]) -> None:
        """Drop the selections that all lanes of the process have seen."""
        for key in [key for key in self._found if key[:3] < before]:
            self._hold(self._found.pop(key).rows(), -1)

    def needed_last(self) -> chain[BatchRow]:
        """Return the rows whose contents may be dropped, the newest selection first."""
        return chain.from_iterable(reversed(found.rows()) for found in reversed(self._found.values()))

    def give(self, selection: Selection, turn: int) -> list[list[BatchRow]]:
        """Remove the packs of a turn from a selection; return them."""
        packs = selection.packs.pop(turn, [])
        self._hold([row for pack in packs for row in pack], -1)
        return packs

    def _hold(self, rows: list[BatchRow], sign: int) -> None:
        self._pipeline.budget.hold(self, sign * sum(row.size for row in rows if row.content is not None))

    def _select(self) -> None:
        if self._reading.get(self._number, self) is not self:
            self._pipeline.loading.round_cache.drop(self._number)
        self._reading[self._number] = self
        counts = Counts()
        judge = self._pipeline.judge
        before = self._at
        reported = judge.taken()
        first = before.dealt
        self._packing.select(counts)
        if 0 not in self._turns:
            judge.taken()  # the process of the lane with the first turn says what failed
        judge.pending[:0] = reported
        packs: dict[int, list[list[BatchRow]]] = {}
        for number, pack in enumerate(self._packing.give_up_packs(), first):
            turn = number % self._sharers
            if turn in self._turns:
                packs.setdefault(turn, []).append(pack)
        self._at = self._state()
        found = self._found[key_of(before)] = Selection(packs, self._at, counts)
        self._hold(found.rows(), 1)
        self._pipeline.budget.keep(self)

    def _state(self) -> LaneState:
        draws = self._draws
        packing = self._packing
        return LaneState(
            0,
            draws.draw,
            draws.taken,
            tuple(draws.leaf_draws),
            self._origin,
            packing.waiting(),
            0,
            packing.target,
            draws.sums(),
            packing.selected,
        )


def progress_of(state: LaneState) -> tuple[int, int, int]:
    """Return how far a shared buffer has come, by the state of a lane or of the buffer itself."""
    return state.dealt, state.draw, state.taken


def key_of(state: LaneState) -> Key:
    """Return the position of the shared buffer in the state of a lane, or of the buffer itself."""
    waiting = state.held.only(Stage.BUFFER)
    drawn = np.array((*state.leaf_draws, *(state.sums or [0] * len(state.leaf_draws))), dtype=np.int64)
    return *progress_of(state), waiting.rows.tobytes() + waiting.members.tobytes() + drawn.tobytes()


class SharedBuffers:
    """The shared buffers of one process.

    Args:
        lanes: Those of the process.
        states: Of the lanes that have delivered something.
    """

    def __init__(
        self, pipeline: Pipeline, blend: AnyBlend | None, lanes: Collection[int], states: Mapping[int, LaneState]
    ) -> None:
        self._pipeline = pipeline
        self._blend = blend
        self._streams = pipeline.leaves[0].order.num_lanes
        fresh = LaneState.fresh(len(pipeline.leaves))
        self._seen = {lane: states.get(lane) or fresh for lane in lanes}
        self._buffers: dict[int, list[SharedBuffer]] = {}
        self._reading: dict[int, SharedBuffer] = {}
        self._warned = False

    def packs(self, lane: int, counts: Counts) -> tuple[list[list[BatchRow]], LaneState]:
        """Return a lane's packs of the next selection, and the buffer after it."""
        stream = lane % self._streams
        turn = lane // self._streams
        key = key_of(self._seen[lane])
        buffer, selection = self._found(stream, lane, key)
        if turn == 0:
            counts.add(selection.counts)
        packs = buffer.give(selection, turn)
        self._seen[lane] = selection.after
        least = min(progress_of(seen) for other, seen in self._seen.items() if other % self._streams == stream)
        for each in self._buffers[stream]:
            each.forget(least)
        return packs, selection.after

    def _found(self, stream: int, lane: int, key: Key) -> tuple[SharedBuffer, Selection]:
        buffers = self._buffers.setdefault(stream, [])
        for buffer in buffers:
            if (selection := buffer.find(key)) is not None:
                return buffer, selection
        if buffers and not self._warned:
            self._warned = True
            text = (
                "lanes that share a packing buffer disagree about its packs: since the state was saved, the mix has "
                "changed (on_mismatch='adapt'), or select_samples_to_pack chooses differently. So some samples repeat "
                "and others are missed. Resume with the mix and the encoder that saved it, or start a new run"
            )
            pass_on((logger.name, f"shared buffers, {self._pipeline.paths}", text))
        sharing = [other for other in self._seen if other % self._streams == stream]
        turns = {other // self._streams for other in sharing}
        seen = self._seen[lane] if buffers else min((self._seen[other] for other in sharing), key=progress_of)
        buffers.append(SharedBuffer(self._pipeline, self._blend, stream, seen, turns, self._reading))
        return self._found(stream, lane, key)


class DealtPacking(Packing):
    """The packs of one lane that shares its buffer.

    Args:
        draws: Follows the buffer.
        lane: Its number.
        buffers: Those of the process.
    """

    def __init__(
        self,
        draws: FollowedDraws,
        pipeline: Pipeline,
        state: LaneState,
        rules: PackRules,
        lane: int,
        buffers: SharedBuffers,
    ) -> None:
        super().__init__(draws, pipeline, state, rules)
        self._buffer.clear()  # only as references, in `_waiting`
        self._to_restore.clear()
        self._lane = lane
        self._followed = draws
        self._buffers = buffers

    def settle(self, counts: Counts) -> None:
        """Take packs until there are enough for the next microbatch."""
        self._select_for(self._pipeline.rows, counts)
        self._pipeline.budget.keep(self)

    def select(self, counts: Counts) -> None:
        """Take the lane's packs of the next selection; there may be none."""
        packs, after = self._buffers.packs(self._lane, counts)
        self._followed.follow(after)
        self._packs.extend(packs)
        self._hold(sum(row.size for pack in packs for row in pack if row.content is not None))
        members = [as_members([row.members[0] for row in pack]) for pack in packs]
        self._waiting.follow(members, after.held, target=after.buffer, dealt=after.dealt)

    def fields(self) -> dict[str, Any]:
        """(With the packs that were selected of the shared buffer up to where the lane has seen it.)"""
        return {"buffer": self._waiting.target, "dealt": self._waiting.dealt}


class DealtByLength(DealtPacking, ByLength):
    """The microbatches by length of one lane that shares its buffer."""


def dealt_stages(
    number: int, pipeline: Pipeline, blend: AnyBlend | None, state: LaneState, buffers: SharedBuffers
) -> tuple[FollowedDraws, DealtPacking]:
    """Return the stages of a lane that takes packs, or microbatches by length, of a buffer that lanes share."""
    stream = number % pipeline.leaves[0].order.num_lanes
    draws = FollowedDraws(pipeline, stream, state)
    rules = pack_rules(pipeline.leaves, blend, stream, by_epoch=True)
    kind = DealtByLength if pipeline.own.by_length else DealtPacking
    return draws, kind(draws, pipeline, state, rules, number, buffers)
