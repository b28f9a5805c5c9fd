"""Plans lanes on integers: which samples their next microbatches have and what they cost, before anything is read.

A lane makes microbatches from draws, or from packs if the encoder packs. If every draw gives one sample and columns
have its size, both follow from integers: `PlannedLane` chooses draws (`core/order/choose.py`) and fills packs
(`core/stream/pack_buffer.py`) as a `Lane` does, and reaches the same states. `make_planned` then loads one such
microbatch, on any rank.

A plan is never changed: a sample that fails, or that a hook skips, is counted and left out of its microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_bridge.core.encoder.hooks import Hook
from energon_bridge.core.errors import ConfigurationError, FatalSampleError
from energon_bridge.core.order.choose import AnyBlend, Chooser, Cursors
from energon_bridge.core.order.leaf import Round
from energon_bridge.core.order.rng import IntArray
from energon_bridge.core.stream.conventions import Conventions
from energon_bridge.core.stream.draws import BatchRow, batch_rows, encode_rows
from energon_bridge.core.stream.leaf import Leaf
from energon_bridge.core.stream.pack_buffer import EMPTY_SELECTIONS, PackBuffer, Turn, pack_rows, pack_rules, turn_of
from energon_bridge.core.stream.pipeline import PickedLoad, Pipeline
from energon_bridge.core.stream.state import COUNTERS, NOTHING_HELD, Counts, LaneBatch, LaneState, Stage
from energon_bridge.models.packing.packing import Packer

_FEWEST, _MOST = 32, 256
"""Draws looked up at a time; of a lane few at first, since there are many."""
_BANNED, _SKIPPED, _BYTES = map(COUNTERS.index, ("banned", "skipped", "bytes"))


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
        num_lanes, packs_by_epoch: As in `StreamSettings`.
    """

    leaves: tuple[Leaf, ...]
    blend: AnyBlend | None
    tables: tuple[SampleTable, ...]
    rows: int
    packer: Packer[Any] | None = None
    buffer_size: int = 0
    num_lanes: int = 0
    packs_by_epoch: bool = False

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


class UnbannedDraws:
    """The draws of a lane that are not banned, looked up many at a time.

    Args:
        chooser: Chooses from a position on.
        taken: Outputs taken already of the first draw, which is then under way and not asked for bans.

    Attributes:
        draw, leaf_draws: Those of the position after what was taken.
    """

    def __init__(self, chooser: Chooser[Round], taken: int = 0) -> None:
        self._chooser = chooser
        self._taken = taken
        self._at_once = _FEWEST
        self.draw = chooser.draw
        self.leaf_draws: IntArray = np.array(chooser.leaf_draws, dtype=np.int64)
        # The draws looked up and not taken, and the places of those that are not banned.
        self._members: IntArray = np.zeros((0, 4), dtype=np.int64)
        self._kept: IntArray = np.zeros(0, dtype=np.int64)

    def sums(self) -> tuple[int, ...]:
        """Return the sums of the leaves at the position."""
        return self._chooser.sums(self.draw)

    def take(self, wanted: int, most: int | None = None) -> tuple[IntArray, IntArray | None]:
        """Return the members of the next `wanted` picks, and the banned draws of each leaf before them if any.

        Of `most` draws there may be fewer; then all of these are taken.
        """
        while len(self._kept) < wanted and (most is None or len(self._members) < most):
            self._look_up(wanted)
        places = self._kept[:wanted]
        if most is not None:
            places = places[places < most]
        end = int(places[-1]) + 1 if most is None or len(places) == wanted else most
        members = self._members[places]
        drawn = np.bincount(self._members[:end, 0], minlength=len(self.leaf_draws))
        banned = drawn - np.bincount(members[:, 0], minlength=len(drawn)) if end > len(places) else None
        self.draw += end
        self.leaf_draws += drawn
        self._members, self._kept = self._members[end:], self._kept[len(places) :] - end
        return members, banned

    def _look_up(self, wanted: int) -> None:
        members, banned = self._chooser.picks(max(self._at_once, wanted))
        self._at_once = min(_MOST, 2 * self._at_once)
        if self._taken:
            members[0, 3], self._taken = self._taken, 0
            if banned is not None:
                banned[0] = False
        kept = np.arange(len(members)) if banned is None else np.flatnonzero(~banned)
        self._kept = np.concatenate((self._kept, len(self._members) + kept))
        self._members = np.concatenate((self._members, members))


class PlannedLane:
    """One lane planned on integers, continued from a state.

    Args:
        number: Lane number.
        rules: The rules of the run.
        cursors: Where lanes are in the leaves.
        state: Where to continue.

    Raises:
        ConfigurationError: The state comes from an encoder that yields several samples per draw.
    """

    def __init__(self, number: int, rules: PlanRules, cursors: Cursors[Round], state: LaneState) -> None:
        self.number = number
        self._rules = rules
        self._microbatches = state.microbatches
        stream = number
        self._turn = Turn()
        if rules.packs_by_epoch:
            stream, self._turn = turn_of(rules.leaves, number, rules.num_lanes)
        chooser = Chooser(cursors, rules.blend, stream, state.standing)
        self._draws = UnbannedDraws(chooser)
        self._origin = state.origin
        size = rules.buffer_size
        held = state.held
        of_packs = pack_rules(rules.leaves, rules.blend, stream, by_epoch=rules.packs_by_epoch)
        target = state.buffer or of_packs.first_target(Conventions(), stream, size)
        self._buffer = PackBuffer(size, held, target, of_packs, state.dealt, self._turn)
        stages = held.rows[:, 0]
        if (
            state.taken
            or state.batches_taken
            or self._buffer.taken
            or held.members[:, 3].any()
            or (stages > Stage.BUFFER).any()
            or (len(stages) and rules.packer is None)
        ):
            raise ConfigurationError(
                f"balance: lane {number} of the state is in the middle of the outputs of a sample, pack or batch, so "
                "its microbatches cannot be planned: continue with make_balance(own_share=False)"
            )

    def next(self) -> PlannedBatch:
        """Return the next microbatch."""
        rules = self._rules
        buffer = self._buffer
        lost = Counts()
        ends: list[int] | None = None
        if rules.packer is None:
            members = self._take(rules.rows, lost)
        else:
            self._fill_packs(rules.packer, lost)  # only a lane that begins has too few
            sizes, members = buffer.take(rules.rows)
            ends = np.cumsum(sizes).tolist()
            self._fill(buffer.share(rules.rows, self._leaf_draw), lost)
            self._fill_packs(rules.packer, lost)
        self._microbatches += 1
        lost = Counts() if self._turn.place else lost  # the lane with the first turn counts what its buffer loses
        return PlannedBatch(
            lane=self.number,
            number=self._microbatches - 1,
            members=members,
            ends=ends,
            cost=self._cost_of(members),
            lost=lost,
        )

    def state(self) -> LaneState:
        """Return the state after the microbatches planned so far."""
        draws = self._draws
        packs = self._rules.packer is not None
        return LaneState(
            self._microbatches,
            draws.draw,
            0,
            tuple(draws.leaf_draws.tolist()),
            self._origin,
            self._buffer.waiting() if packs else NOTHING_HELD,
            0,
            self._buffer.target if packs else 0,
            draws.sums(),
            self._buffer.dealt if self._turn.sharers > 1 else 0,
        )

    @property
    def _leaf_draw(self) -> int:
        """The next draw of the first leaf."""
        return int(self._draws.leaf_draws[0])

    def _fill(self, wanted: int, lost: Counts) -> None:
        """Draw samples into the buffer, as far as they may enter it."""
        if wanted:
            self._buffer.add(self._take(wanted, lost, self._buffer.left(self._leaf_draw)))

    def _take(self, wanted: int, lost: Counts, most: int | None = None) -> IntArray:
        """Return the next members, shape (wanted, 4), or those of `most` draws; count the banned ones."""
        members, banned = self._draws.take(wanted, most)
        if banned is not None:
            for leaf in np.flatnonzero(banned).tolist():
                lost.of(leaf)[_BANNED] += int(banned[leaf])
        return members

    def _cost_of(self, members: IntArray) -> int:
        rules = self._rules
        cost = int(rules.looked_up(members, "added").sum())
        if rules.packer is None and rules.tables[0].padded is not None:
            cost += len(members) * int(rules.looked_up(members, "padded").max())
        return cost

    def _fill_packs(self, packer: Packer[Any], lost: Counts) -> None:
        """Select until there are packs for a microbatch."""
        while len(self._buffer.sizes) < self._rules.rows:
            self._select(packer, lost)

    def _select(self, packer: Packer[Any], lost: Counts) -> None:
        """Fill the buffer and select packs."""
        buffer = self._buffer
        for attempt in range(EMPTY_SELECTIONS):
            self._fill(buffer.missing(attempt, self._leaf_draw), lost)
            while not len(buffer.members):  # an epoch of which all was banned
                self._fill(buffer.missing(attempt, self._leaf_draw), lost)
            sizes = self._rules.looked_up(buffer.members, "sizes")
            packs = buffer.without_repeats(packer.pack(sizes, flush=buffer.is_closed(self._leaf_draw)))
            late = buffer.select(packs)
            if late.any():
                for leaf in buffer.members[late, 0].tolist():
                    lost.of(leaf)[_SKIPPED] += 1
                buffer.keep(~late)
            if packs:
                return
        raise FatalSampleError(
            f"the packer made no pack from {len(buffer.members)} samples, {EMPTY_SELECTIONS} times in a row: set a "
            "larger packing_buffer_size, or check the columns of their sizes"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Loading planned microbatches.


def make_planned(pipeline: Pipeline, planned: PlannedBatch, load: PickedLoad, rules: PlanRules) -> LaneBatch:
    """Load a planned microbatch; samples that fail or are skipped are counted and left out.

    Raises:
        FatalSampleError: Nothing is left of it, a hook makes several samples of one, or the size of an encoded sample
            differs from its columns.
    """
    counts = Counts()
    counts.add(planned.lost)
    with pipeline.user_code():
        pipeline.begin(planned.lane, planned.number)
        draws = list(encode_rows(pipeline, load.start(as_slab=True), counts))
        if (several := max(map(len, draws))) > 1:
            raise _several(pipeline, Hook.ENCODE, f"{several} samples from one")
        rows = list(chain(*draws)) if planned.ends is None else _packed(pipeline, planned, draws, rules, counts)
        batches = batch_rows(pipeline, rows, planned.lane, planned.number, counts)
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


def _packed(
    pipeline: Pipeline, planned: PlannedBatch, draws: Sequence[list[BatchRow]], rules: PlanRules, counts: Counts
) -> list[BatchRow]:
    """Return the packs of encoded samples, without those that fail."""
    assert planned.ends is not None
    _check_sizes(pipeline, planned, draws, rules)
    packs: list[BatchRow] = []
    for first, end in pairwise([0, *planned.ends]):
        made = pack_rows(pipeline, list(chain(*draws[first:end])), counts)
        if len(made) > 1:
            raise _several(pipeline, Hook.PACK, f"{len(made)} rows from one pack")
        packs += made
    return packs


def _check_sizes(pipeline: Pipeline, planned: PlannedBatch, draws: Sequence[list[BatchRow]], rules: PlanRules) -> None:
    """Raise if the sizes of encoded samples differ from the planned ones."""
    packer = rules.packer
    assert packer is not None
    there = [number for number, rows in enumerate(draws) if rows]
    planned_sizes = rules.looked_up(planned.members[there], "sizes")
    sizes = packer.sizes([draws[number][0].content for number in there])
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
