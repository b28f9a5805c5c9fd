"""Plans lanes on integers: which samples their next microbatches have and what they cost, before anything is read.

A lane makes microbatches from draws, or from packs if the encoder packs. If every draw gives one sample and columns
have its size, both follow from integers: `PlannedLane` draws, fills the buffer and selects packs by the rules of
`draws` and `packing`, and reaches the same states. `make_planned` then loads one such microbatch, on any rank.

A plan is never changed: a sample that fails, or that a hook skips, is counted and left out of its microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_bridge.errors import ConfigurationError, FatalSampleError
from energon_bridge.plan.blend import Blend
from energon_bridge.plan.leaf import Round
from energon_bridge.rng import IntArray
from energon_bridge.stream.draws import SAMPLE, BatchRow
from energon_bridge.stream.leaf import Leaf
from energon_bridge.stream.packing import EMPTY_SELECTIONS, first_target, pack_rows, share_of
from energon_bridge.stream.pipeline import DrawRange, PendingLoads, Pipeline
from energon_bridge.stream.reader import RoundBuffer
from energon_bridge.stream.state import (
    COUNTERS,
    NOTHING_HELD,
    BufferedRefs,
    Counts,
    LaneBatch,
    LaneState,
    SampleRef,
    Stage,
)
from energon_bridge.stream.values import FailedSample
from energon_bridge.task_encoder.hooks import Hook
from energon_bridge.task_encoder.packing import LONGEST_WAIT, Packer

_FEWEST, _MOST = 32, 256
"""Draws of a lane looked up at a time; few at first, since there are many lanes."""
_BANNED, _SKIPPED, _BYTES = map(COUNTERS.index, ("banned", "skipped", "bytes"))
_NO_MEMBERS: IntArray = np.zeros((0, 4), dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTable:
    """Costs and sizes of a leaf's samples, one entry per sample of its dataset.

    Attributes:
        added: What a sample adds to the cost of its microbatch, shape (samples,).
        padded: The cost of a row that is padded to the length of this sample, shape (samples,); None: no padding.
        sizes: Its size under each limit of the packer, shape (samples, limits); None: the encoder does not pack.
    """

    added: npt.NDArray[np.signedinteger]
    padded: npt.NDArray[np.signedinteger] | None = None
    sizes: npt.NDArray[np.signedinteger] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRules:
    """The rules by which all lanes of a run are planned.

    Attributes:
        leaves, blend: Those of the run's plan.
        tables: The table of each leaf.
        rows: Rows in a microbatch.
        packer: Packs rows; None: each sample is a row.
        buffer_size: Samples from which packs are selected.
    """

    leaves: tuple[Leaf, ...]
    blend: Blend | None
    tables: tuple[SampleTable, ...]
    rows: int
    packer: Packer[Any] | None = None
    buffer_size: int = 0

    def looked_up(self, members: IntArray, name: str) -> IntArray:
        """Return the entries of some samples, of shape (samples, ...), for members as `PlannedBatch` has them."""
        if len(self.tables) == 1:
            return np.asarray(getattr(self.tables[0], name)[members[:, 1]], dtype=np.int64)
        found: IntArray | None = None
        for leaf in np.flatnonzero(np.bincount(members[:, 0])).tolist():
            here = members[:, 0] == leaf
            entries = getattr(self.tables[leaf], name)[members[here, 1]]
            if found is None:
                found = np.zeros((len(members), *entries.shape[1:]), dtype=np.int64)
            found[here] = entries
        return np.zeros(0, dtype=np.int64) if found is None else found


@dataclass(slots=True, kw_only=True)
class PlannedBatch:
    """A planned microbatch, not loaded yet.

    Attributes:
        lane, number: Its lane, and its number among the microbatches of the lane.
        members: The references of its samples, shape (samples, 4): leaf, sample, epoch, and 0, the only output.
        ends: Where the rows end among the members, if they are packs; None: each sample is a row.
        cost: Its cost, in units of the run.
        lost: Draws before it that gave nothing, by leaf and counter.
    """

    lane: int
    number: int
    members: IntArray
    ends: list[int] | None
    cost: int
    lost: Counts = field(default_factory=Counts)


class _PlannedDraws:
    """The draws of one lane from a state on, without banned ones."""

    def __init__(self, lane: int, rules: PlanRules, state: LaneState) -> None:
        self._lane, self._rules = lane, rules
        self.draw, self.origin = state.draw, state.origin
        self.leaf_draws: IntArray = np.array(state.leaf_draws, dtype=np.int64)
        self._leaf_looked = list(state.leaf_draws)
        self._chunk = _FEWEST
        self._rounds: dict[int, Round] = {}
        self._members, self._at = _NO_MEMBERS, 0
        # Of each member the number of its draw, and the leaves of all draws from number `_base` on.
        self._numbers: IntArray = np.zeros(0, dtype=np.int64)
        self._leaves_of: IntArray = np.zeros(0, dtype=np.int64)
        self._base = state.draw

    def take(self, wanted: int, lost: Counts) -> IntArray:
        """Return the next members, shape (wanted, 4); count the banned ones."""
        while self._at + wanted > len(self._members):
            self._look(wanted)
        members = self._members[self._at : self._at + wanted]
        self._at += wanted
        end = int(self._numbers[self._at - 1]) + 1
        if len(self.leaf_draws) == 1:
            counts = np.array([end - self.draw])
        else:
            leaves_of = self._leaves_of[self.draw - self._base : end - self._base]
            counts = np.bincount(leaves_of, minlength=len(self.leaf_draws))
        if end - self.draw > wanted:
            banned = counts - np.bincount(members[:, 0], minlength=len(counts))
            for leaf in np.flatnonzero(banned).tolist():
                lost.of(leaf)[_BANNED] += int(banned[leaf])
        self.leaf_draws += counts
        self.draw = end
        return members

    def _look(self, wanted: int) -> None:
        """Look more draws up."""
        rules, lane = self._rules, self._lane
        first, count = self._base + len(self._leaves_of), max(self._chunk, wanted)
        self._chunk = min(_MOST, 2 * self._chunk)
        if rules.blend is None:
            leaves = np.zeros(count, dtype=np.int64)
        else:
            leaves = rules.blend.leaves(lane, first - self.origin, count).astype(np.int64)
        members = np.zeros((len(leaves), 4), dtype=np.int64)
        members[:, 0] = leaves
        kept = None
        for leaf in np.flatnonzero(np.bincount(leaves)).tolist():
            places = np.flatnonzero(leaves == leaf)
            self._look_in(leaf, places, members)
            bans = rules.leaves[leaf].bans
            if bans is not None:
                lanes = rules.leaves[leaf].order.num_lanes
                banned = bans.at(members[places, 1], (first + places) * lanes + lane)
                kept = np.ones(len(leaves), dtype=bool) if kept is None else kept
                kept[places] = ~banned
        numbers = first + np.arange(len(leaves), dtype=np.int64)
        if kept is not None:
            members, numbers = members[kept], numbers[kept]
        self._members = np.concatenate((self._members[self._at :], members))
        self._numbers = np.concatenate((self._numbers[self._at :], numbers))
        self._leaves_of = np.concatenate((self._leaves_of[self.draw - self._base :], leaves))
        self._base, self._at = self.draw, 0

    def _look_in(self, leaf: int, places: IntArray, members: IntArray) -> None:
        """Look up the next draws of a leaf, for some places."""
        draw, at = self._leaf_looked[leaf], 0
        while at < len(places):
            part = self._rounds.get(leaf)
            if part is None or not part.first <= draw < part.first + len(part.indices):
                order = self._rules.leaves[leaf].order
                part = self._rounds[leaf] = order.rounds_at(self._lane, draw, len(places) - at)
            low = draw - part.first
            count = min(len(part.indices) - low, len(places) - at)
            here = places[at : at + count]
            members[here, 1], members[here, 2] = part.indices[low : low + count], part.epochs[low : low + count]
            draw, at = draw + count, at + count
        self._leaf_looked[leaf] = draw


class PlannedLane:
    """One lane planned on integers, continued from a state.

    Args:
        number: Lane number.
        rules: The rules of the run.
        state: Where to continue.

    Raises:
        ConfigurationError: The state comes from an encoder that yields several samples per draw.
    """

    def __init__(self, number: int, rules: PlanRules, state: LaneState) -> None:
        self.number = number
        self._rules = rules
        self._microbatches = state.microbatches
        self._draws = _PlannedDraws(number, rules, state)
        self._target = state.buffer or first_target(number, rules.buffer_size)
        # What is drawn and not delivered, as a state has it: packs, then the buffer. Neither array is ever changed in
        # place, so that states share them.
        self._rows, self._refs = state.held.rows, state.held.members
        stages = self._rows[:, 0]
        packs = int(np.count_nonzero(stages == Stage.PACK))
        if (
            state.taken
            or state.batches_taken
            or self._refs[:, 3].any()
            or self._rows[:packs, 2].any()
            or (stages[:packs] != Stage.PACK).any()
            or (stages[packs:] != Stage.BUFFER).any()
            or (len(stages) and rules.packer is None)
        ):
            raise ConfigurationError(
                f"balance: lane {number} of the state is in the middle of the outputs of a sample, pack or batch, so "
                "its microbatches cannot be planned: continue with make_balance(own_share=False)"
            )
        self._next_pack = 0
        self._ends: list[int] = np.cumsum(self._rows[:packs, 1]).tolist()
        self._costs = [self._cost_of(self._refs[first:end]) for first, end in pairwise([0, *self._ends])]

    def next(self) -> PlannedBatch:
        """Return the next microbatch."""
        rules, lost = self._rules, Counts()
        number = self._microbatches
        self._microbatches += 1
        if rules.packer is None:
            members = self._draws.take(rules.rows, lost)
            return PlannedBatch(
                lane=self.number, number=number, members=members, ends=None, cost=self._cost_of(members), lost=lost
            )
        while self._next_pack + rules.rows > len(self._ends):  # only a lane that begins
            self._select(rules.packer, lost)
        begin, first, after = self._begin, self._next_pack, self._next_pack + rules.rows
        self._next_pack = after
        batch = PlannedBatch(
            lane=self.number,
            number=number,
            members=self._refs[begin : self._begin],
            ends=[end - begin for end in self._ends[first:after]],
            cost=sum(self._costs[first:after]),
            lost=lost,
        )
        self._settle(rules.packer, lost)
        return batch

    def state(self) -> LaneState:
        """Return the state after the microbatches planned so far."""
        draws, rows = self._draws, self._rows[self._next_pack :]
        return LaneState(
            self._microbatches,
            draws.draw,
            0,
            tuple(draws.leaf_draws.tolist()),
            draws.origin,
            BufferedRefs(rows, self._refs[self._begin :]) if len(rows) else NOTHING_HELD,
            0,
            self._target if self._rules.packer is not None else 0,
        )

    @property
    def _begin(self) -> int:
        """Where the next pack begins among the references."""
        return self._ends[self._next_pack - 1] if self._next_pack else 0

    def _cost_of(self, members: IntArray) -> int:
        rules = self._rules
        cost = int(rules.looked_up(members, "added").sum())
        if rules.packer is None and rules.tables[0].padded is not None:
            cost += len(members) * int(rules.looked_up(members, "padded").max())
        return cost

    def _settle(self, packer: Packer[Any], lost: Counts) -> None:
        """Draw a share of the next buffer, or select, as `Packing` does after each microbatch."""
        left = (len(self._ends) - self._next_pack) // self._rules.rows
        share = share_of(self._target - (len(self._rows) - len(self._ends)), left)
        if left and share:
            self._refs = np.concatenate((self._refs, self._draws.take(share, lost)))
            self._rows = np.concatenate((self._rows, _waiting(np.zeros(share, dtype=np.int64))))
        while len(self._ends) - self._next_pack < self._rules.rows:
            self._select(packer, lost)

    def _select(self, packer: Packer[Any], lost: Counts) -> None:
        """Fill the buffer and select packs, as `Packing` does."""
        size, last = self._rules.buffer_size, self._ends[-1] if self._ends else 0
        members, waits = self._refs[last:], self._rows[len(self._ends) :, 2]
        for attempt in range(EMPTY_SELECTIONS):
            missing = self._target + attempt * max(1, size // 4) - len(members)
            if missing > 0:
                members = np.concatenate((members, self._draws.take(missing, lost)))
                waits = np.concatenate((waits, np.zeros(missing, dtype=np.int64)))
            packs = packer.pack(self._rules.looked_up(members, "sizes"))
            waits = waits + 1
            chosen = members[:0]
            if packs:
                places = np.array([place for pack in packs for place in pack], dtype=np.int64)
                chosen = members[places]
                left = np.ones(len(members), dtype=bool)
                left[places] = False
                members, waits = members[left], waits[left]
                self._target = min(size, self._target + -(-len(places) // 2))
            if (late := waits > LONGEST_WAIT).any():
                for leaf in members[late, 0].tolist():
                    lost.of(leaf)[_SKIPPED] += 1
                members, waits = members[~late], waits[~late]
            if packs:
                self._add(chosen, [len(pack) for pack in packs], members, waits)
                return
        raise FatalSampleError(
            f"the packer made no pack from {len(members)} samples, {EMPTY_SELECTIONS} times in a row: set a "
            "larger packing_buffer_size, or check the columns of their sizes"
        )

    def _add(self, chosen: IntArray, lengths: list[int], members: IntArray, waits: IntArray) -> None:
        """Add packs after the remaining ones, and replace the buffer after them."""
        begin, first = self._begin, self._next_pack
        costs, ends = self._costs[first:], [end - begin for end in self._ends[first:]]
        kept = ends[-1] if ends else 0
        packed = np.zeros((len(ends) + len(lengths), 3), dtype=np.int64)
        packed[: len(ends), 1] = self._rows[first : len(self._ends), 1]
        packed[len(ends) :, 1] = lengths
        rows = np.concatenate((packed, _waiting(waits)))
        self._rows, self._refs = rows, np.concatenate((self._refs[begin : begin + kept], chosen, members))
        added = list(accumulate(lengths))
        self._costs = costs + np.add.reduceat(self._rules.looked_up(chosen, "added"), [0, *added[:-1]]).tolist()
        self._ends = ends + [kept + end for end in added]
        self._next_pack = 0


def _waiting(waits: IntArray) -> IntArray:
    """Return the rows of a buffer in a state, from the number of selections that left each over."""
    rows: IntArray = np.full((len(waits), 3), (Stage.BUFFER, 1, 0), dtype=np.int64)
    rows[:, 2] = waits
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Loading planned microbatches.


class PlannedLoad:
    """The loads of a planned microbatch.

    Args:
        pipeline: Loads the samples.
        members: Those of the `PlannedBatch`.
    """

    def __init__(self, pipeline: Pipeline, members: IntArray) -> None:
        self._pipeline = pipeline
        self._loads: PendingLoads | None = None
        threads = pipeline.settings.threads
        chunk = max(pipeline.chunk, -(-len(members) // threads)) if threads else max(1, len(members))
        self._size = len(members)
        self._parts = [(low, self._ranges(members[low : low + chunk])) for low in range(0, len(members), chunk)]

    def _ranges(self, members: IntArray) -> list[DrawRange]:
        ranges = []
        for leaf in np.flatnonzero(np.bincount(members[:, 0])).tolist():
            places = np.flatnonzero(members[:, 0] == leaf)
            indices, epochs = (np.ascontiguousarray(members[places, column]) for column in (1, 2))
            buffer = RoundBuffer(self._pipeline.source(leaf).reader, Round(0, indices, epochs))
            ranges.append(DrawRange(leaf, buffer, 0, len(places), places.tolist()))
        return ranges

    def read_ahead(self) -> None:
        """Start reading, if reads are slow."""
        for _, ranges in self._parts:
            for part in ranges:
                self._pipeline.read_ahead(part.buffer)

    def start(self) -> PendingLoads:
        """Start loading, unless it has started."""
        if self._loads is None:
            pipeline = self._pipeline
            self._loads = PendingLoads(pipeline)
            slab = None if pipeline.slabs is None else pipeline.slabs.slab(self._size)
            for low, ranges in self._parts:
                self._loads.schedule(ranges, ahead=False, into=None if slab is None else (slab, low))
        return self._loads


def make_planned(pipeline: Pipeline, planned: PlannedBatch, load: PlannedLoad, rules: PlanRules) -> LaneBatch:
    """Load a planned microbatch; samples that fail or are skipped are counted and left out.

    Raises:
        FatalSampleError: Nothing is left of it, a hook makes several samples of one, or the size of an encoded sample
            differs from its columns.
    """
    counts = Counts()
    counts.add(planned.lost)
    with pipeline.user_code():
        pipeline.begin(planned.lane, planned.number)
        samples, keys = _encoded(pipeline, planned, load.start(), counts)
        leaves: list[int] = planned.members[:, 0].tolist()
        if planned.ends is None:
            there = [sample is not None for sample in samples]
            if not all(there):
                keys, leaves = list(compress(keys, there)), list(compress(leaves, there))
                samples = list(compress(samples, there))
        else:
            rows = _packed(pipeline, planned, samples, rules, counts)
            samples, keys = [row.content for row in rows], [row.key(pipeline) for row in rows]
            leaves = [ref.leaf for row in rows for ref in row.members]
        batches = []
        if samples:
            batches = pipeline.batches(samples, keys, leaves, planned.lane, planned.number, counts)
    if len(batches) > 1:
        raise _several(pipeline, Hook.ENCODE_BATCH, f"{len(batches)} batches from one")
    if not batches:
        leaf, sample, *_ = planned.members[0].tolist()
        raise FatalSampleError(
            f"microbatch {planned.number} of lane {planned.lane} ({len(planned.members)} samples, the first is "
            f"{pipeline.source(leaf).where(sample)}) is empty: its samples failed or were skipped, and ranks "
            "that load their own share cannot replace them. Ban these samples, filter them out by a "
            "column, or use make_balance(own_share=False)"
        )
    return LaneBatch(batches[0], pipeline.rows, None, counts)


def _encoded(
    pipeline: Pipeline, planned: PlannedBatch, loads: PendingLoads, counts: Counts
) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """Return the encoded samples (None for those left out) and the restore keys of all."""
    encodes = pipeline.own.encodes
    samples: list[Any] = []
    keys: list[tuple[Any, ...]] = []
    leaves: list[int] = planned.members[:, 0].tolist()
    while len(loads):
        loaded = loads.take()
        for key, sample, size in zip(loaded.keys, loaded.samples, loaded.sizes, strict=True):
            leaf = leaves[len(samples)]
            counts.of(leaf)[_BYTES] += size
            if encodes or type(sample) is FailedSample:
                outputs = pipeline.encode(leaf, sample, key, counts)
                if len(outputs) > 1:
                    raise _several(pipeline, Hook.ENCODE, f"{len(outputs)} samples from one")
                sample = outputs[0][1] if outputs else None
            else:
                pipeline.steps.worked(pipeline.own.first, (leaf,))
            samples.append(sample)
            keys.append(key)
    return samples, keys


def _packed(
    pipeline: Pipeline, planned: PlannedBatch, samples: Sequence[Any], rules: PlanRules, counts: Counts
) -> list[BatchRow]:
    """Return the packs of encoded samples, without those that fail."""
    assert planned.ends is not None
    there = [number for number, sample in enumerate(samples) if sample is not None]
    _check_sizes(pipeline, planned, samples, there, rules)
    packs: list[BatchRow] = []
    for first, end in pairwise([0, *planned.ends]):
        members = [
            BatchRow((SampleRef(*reference),), SAMPLE, content, 0)
            for reference, content in zip(planned.members[first:end].tolist(), samples[first:end], strict=True)
            if content is not None
        ]
        made = pack_rows(pipeline, members, counts)
        if len(made) > 1:
            raise _several(pipeline, Hook.PACK, f"{len(made)} rows from one pack")
        packs += made
    return packs


def _check_sizes(
    pipeline: Pipeline, planned: PlannedBatch, samples: Sequence[Any], there: list[int], rules: PlanRules
) -> None:
    """Raise if the sizes of encoded samples differ from the planned ones."""
    packer = rules.packer
    assert packer is not None
    planned_sizes = rules.looked_up(planned.members[there], "sizes")
    sizes = packer.sizes([samples[number] for number in there])
    if not len(wrong := np.argwhere(sizes != planned_sizes)):
        return
    place, limit = wrong[0].tolist()
    leaf, sample, *_ = planned.members[there[place]].tolist()
    raise FatalSampleError(
        f"{pipeline.source(leaf).where(sample)}: by its columns it has {planned_sizes[place, limit]} "
        f"{list(packer.limits)[limit]}, but the encoded sample has {sizes[place, limit]}. Packs are planned by "
        "columns: add the column again with this encoder (energon columns add --encoder), or correct the "
        "expressions of ColumnCost (sizes, tokens)"
    )


def _several(pipeline: Pipeline, hook: Hook, what: str) -> FatalSampleError:
    return FatalSampleError(
        f"{hook.title} of {type(pipeline.code.encoder).__name__} made {what}, so columns cannot plan the microbatches: "
        "use make_balance(own_share=False), where ranks exchange microbatches"
    )
