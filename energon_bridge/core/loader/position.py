"""The positions of a loader: what its rank has delivered, in an endless run or in finite passes.

What a loader delivers next depends on its position and nothing else. A position knows nothing about workers or about
microbatches made ahead; a copy of it goes to each worker. A *unit* is what one microbatch is made from: a lane of a
run, or the number of a microbatch in a pass.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, cast

from energon_bridge.core.errors import ConfigurationError, check_number
from energon_bridge.core.loader import saved_run
from energon_bridge.core.loader.bans import (
    banned_of,
    checked_keys,
    checked_path,
    checked_start,
    moved_bans,
    newly_banned,
    with_new_ban,
)
from energon_bridge.core.loader.fits import check_fits, check_lanes, check_out, saved_day
from energon_bridge.core.loader.opening import open_pipeline
from energon_bridge.core.loader.outstanding import Outstanding
from energon_bridge.core.loader.ranks import agreed
from energon_bridge.core.loader.run_plan import PACKING_BUFFERS, RunPlan
from energon_bridge.core.loader.weights import no_weights, with_new_weights
from energon_bridge.core.order.changes import Ban, LeafBans
from energon_bridge.core.order.choose import BlendOfBuckets, blend_position
from energon_bridge.core.order.topology import Ownership, first_microbatch, lane_units, microbatches_before, step_units
from energon_bridge.core.stream.finite import FiniteStream, Listing, drawn_rows, listed_rows, listing_of_pass
from energon_bridge.core.stream.lane import LaneStreams, Stream
from energon_bridge.core.stream.lane_state import COUNTERS, BufferedRefs, Counts, LaneBatch, LaneState, Stage
from energon_bridge.core.stream.pipeline import Pipeline
from energon_bridge.core.stream.settings import WorkerFacts
from energon_bridge.core.stream.watchdog import WatchdogSettings

logger = logging.getLogger(__name__)

OnMismatch = Literal["refuse", "adapt"]


class Position(ABC):
    """The position of one rank's loader: an `EndlessRun` or a `FinitePass`.

    Attributes:
        by_lane: Whether units are lanes, each of one worker; a worker without a lane then has none, ever.
        plan: The data, cut into lanes.
        ownership: Says which lanes belong to this rank.
        microbatches: Microbatches delivered by the whole run; for a finite stream, in this pass.
        epoch: Completed passes of a finite stream.
        epoch_steps: Delivered steps of the virtual epoch.
        lanes: The state of each lane of this rank; a pass has none.
        counts: The `COLUMNS` of leaves on this rank: restored counts plus what it has delivered since.
        out: What was delivered and is not done; None: that is not kept.
    """

    by_lane: ClassVar[bool]

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self._rank = plan.config.dp_rank
        self._ranks = plan.config.dp_size
        self._in_a_row = plan.config.in_a_row
        self.turn = 0  # of these microbatches of the step, those delivered
        self.ownership = Ownership(plan.num_lanes, self._ranks, 0)
        self.microbatches = 0
        self.epoch = 0
        self.epoch_steps = 0
        self.lanes: dict[int, LaneState] = {}
        self.counts = Counts()
        self.out: Outstanding | None = None
        self._bans: tuple[Ban, ...] = ()
        self._parked: list[saved_run.State] = []
        self._parked_draws: dict[int, tuple[int, ...]] = {}
        self._said: list[str] = []
        # States have the marks of the data as it is now: until the first is saved, it may be written again.
        _ = plan.data.marks

    # Going on --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def units(self, began: int) -> Iterator[tuple[int, int]]:
        """Yield the units of the rank from here on, each with its worker; a pass was divided at microbatch `began`."""

    @abstractmethod
    def _stream(self, pipeline: Pipeline) -> Stream:
        """Return the stream that makes the units of one process; the pipeline is that of the process."""

    @property
    def is_over(self) -> bool:
        """Whether a pass ends here."""
        return False

    @property
    def is_masked(self) -> bool:
        """Whether the rank has no microbatch in the next step, but a masked one."""
        return False

    @abstractmethod
    def take(self, item: LaneBatch) -> None:
        """Note what comes with the next microbatch; the position advances after that."""

    @abstractmethod
    def _step(self) -> int:
        """Return the microbatches that the run delivers in the next step."""

    @property
    def own_lanes(self) -> Sequence[int]:
        """The lanes of this rank; a finite stream has none."""
        return self._lanes_of(self.ownership)

    @abstractmethod
    def _lanes_of(self, ownership: Ownership) -> Sequence[int]:
        """Return the lanes whose states this rank needs to continue."""

    @abstractmethod
    def _delivered(self) -> frozenset[int]:
        """Return the leaves that the run has delivered samples of, as far as the rank can know; none at the start."""

    @abstractmethod
    def _seek(self, step: int) -> None:
        """Go to the beginning of a step."""

    def advance(self) -> None:
        """Move on by one microbatch of this rank: to the next step, after its last one."""
        self.turn = (self.turn + 1) % self._in_a_row
        if self.turn:
            return
        self.microbatches += self._step()
        self.epoch_steps += self.plan.data.settings.virtual_epoch_length is not None

    def stream(self, watchdog: WatchdogSettings | None = None, worker: WorkerFacts | None = None) -> Stream:
        """Return the stream that makes the units of this process from here on (see `open_pipeline`)."""
        return self._stream(open_pipeline(self.plan, None, self._delivered(), watchdog, worker))

    def copied(self) -> Self:
        """Return an independent copy."""
        other = copy.copy(self)
        other.lanes = dict(self.lanes)
        other.counts = Counts(self.counts)
        other.out = None if self.out is None else self.out.copied()
        return other

    def for_worker(self) -> Self:
        """Return a copy for another process; a process group belongs to this one."""
        other = self.copied()
        other.out = None
        other.plan = self.plan.without_group()
        return other

    def waiting(self, item: LaneBatch | None = None) -> Counter[int]:
        """Return how many samples of each leaf the lanes of this rank hold: drawn, and neither delivered nor lost.

        Args:
            item: The microbatch that is delivered next, if its lane is to count as after it.
        """
        lanes = dict(self.lanes)
        if item is not None and item.state is not None:
            lanes[item.unit] = item.state
        counted = Counter[int]()
        for number, state in lanes.items():
            # Samples in a buffer that lanes share count once.
            shared = state.dealt and number >= self.plan.streams
            held = state.held.only(Stage.PACK) if shared else state.held
            counted.update(held.members[:, 0].tolist())
        return counted

    def lane_state(self, lane: int) -> LaneState:
        """Return the state of a lane."""
        return self.lanes.get(lane) or LaneState.fresh(len(self.plan.leaves))

    def seek(self, step: int) -> None:
        """Go to the beginning of a step of the run, assuming that no sample before it was skipped.

        Args:
            step: Steps that each rank has delivered before it.

        Raises:
            ConfigurationError: It is no number of steps, or passes without microbatches never reach it.
        """
        step = check_number("start_at", step, 0)
        if step and (does := self.plan.data.joins_samples):
            logger.warning(
                "start_at=%d: the run %s, so the samples before that step are not known without reading them; it "
                "starts as if each row had been one sample, and some samples repeat. Resume from a state to be exact",
                step,
                does,
            )
        virtual = self.plan.data.settings.virtual_epoch_length
        self.epoch_steps = step % virtual if virtual else 0
        self.turn = 0
        self.counts = Counts()
        if self.out is not None:
            self.out.clear()
        self._seek(step)

    # Weights and bans ------------------------------------------------------------------------------------------------

    @abstractmethod
    def set_weights(self, weights: Mapping[str, Any] | Sequence[Any], from_draw: int | None) -> int:
        """Change the weights from a global draw on; return that draw."""

    def ban(self, keys: Iterable[str], from_draw: int | None, dataset: str | None, ignore_unknown: bool) -> int:
        """Ban samples from a global draw on; return that draw."""
        given = tuple(checked_keys(keys))
        from_draw = checked_start(from_draw)
        path = checked_path(self.plan.data.leaves, dataset or "")
        start = self._first_banned(from_draw)
        ban = Ban(start=start, keys=given, dataset=path)
        bans, plan = with_new_ban(self.plan, self._bans, ban, ignore_unknown=ignore_unknown)
        if bans != self._bans:
            self._set_bans(bans, plan)
        return start

    @abstractmethod
    def _first_banned(self, from_draw: int | None) -> int:
        """Return the global draw from which a ban holds."""

    def _set_bans(self, bans: tuple[Ban, ...], plan: RunPlan) -> None:
        self._bans = bans
        self.plan = plan

    # State -----------------------------------------------------------------------------------------------------------

    def rows(self) -> list[saved_run.State]:
        """Return a row per leaf as `leaf_rows` describes, plus `encoded_again`, which is not part of the state.

        It counts the samples that were encoded again since this loader was made or restored, because they waited in a
        state, in the listing of a pass, or beyond `WorkerConfig.buffer_bytes`.
        """
        again = [self.counts.of(leaf)[-1] for leaf in range(len(self.plan.leaves))] + [0] * len(self._parked)
        samples = [float(number) for number in self.plan.data.epoch_samples] + [0.0] * len(self._parked)
        rows = zip(saved_run.leaf_rows(self.saved()), again, samples, strict=True)
        return [row | {"encoded_again": number, "epoch_samples": of_epoch} for row, number, of_epoch in rows]

    def state(self) -> saved_run.State:
        """Return the state of this rank."""
        return saved_run.write(self.saved())

    def saved(self) -> saved_run.SavedRun:
        """Return the contents of this rank's state."""
        lanes = {lane: self.lane_state(lane) for lane in self.own_lanes}
        if self._parked:
            nothing = (0,) * len(self._parked)
            lanes = {
                lane: dataclasses.replace(
                    s,
                    leaf_draws=s.leaf_draws + self._parked_draws.get(lane, nothing),
                    sums=s.sums + nothing if s.sums else (),
                )
                for lane, s in lanes.items()
            }
        leaves = [
            row | {"counts": dict(zip(COUNTERS, self.counts.of(leaf), strict=False)), "parked": False}
            for leaf, row in enumerate(self.plan.table)
        ]
        leaves += self._parked
        return saved_run.SavedRun(
            kind=self.plan.data.kind,
            num_lanes=self.plan.num_lanes,
            microbatches=self.microbatches,
            epoch=self.epoch,
            epoch_steps=self.epoch_steps,
            settings=self.plan.settings,
            changes=self.plan.changes,
            bans=self._bans,
            banned=self.plan.banned,
            leaves=leaves,
            lanes=lanes,
            out=None if self.out is None else self.out.saved([leaf["identity"] for leaf in leaves]),
            ranks=None if self.by_lane else (1, self._ranks),
        )

    def go_on_from(self, saved: saved_run.SavedRun, on_mismatch: OnMismatch) -> None:
        """Continue from a state; if it does not fit, nothing changes.

        Raises:
            StateError: One of its subclasses: what does not fit.
        """
        data = self.plan.data
        num_lanes = saved.num_lanes if self.by_lane else self.plan.num_lanes  # a pass is the same on any ranks
        changes = saved.changes
        blocks = {row["identity"]: row["block"] for row in saved.leaves}
        adapt = on_mismatch == "adapt" and data.kind == "train"
        day = self.plan.day
        taken = None if day is None or day.given else saved_day(saved)
        settings = self.plan.settings | ({} if taken is None else {"today": taken.isoformat()})
        difference = check_fits(saved, data.kind, settings, self.plan.table, adapt=adapt)
        microbatches = saved.microbatches
        lanes = saved.lanes
        ownership = Ownership(num_lanes, self._ranks, microbatches)
        check_lanes(lanes, self._lanes_of(ownership), microbatches, num_lanes)
        check_out(saved, keeps=self.out is not None)
        out = None if self.out is None else self.out.restored(saved, [leaf["identity"] for leaf in self.plan.table])
        if (configured := self.plan.config.num_lanes) not in (None, num_lanes):
            logger.info("num_lanes=%d comes from the state; the configuration says %s", num_lanes, configured)
        bans: tuple[Ban, ...] = ()
        banned: dict[str, LeafBans] = {}
        if saved.bans:
            bans = moved_bans(saved, data.leaves)
            banned = banned_of(saved, bans, data.leaves)
            difference += newly_banned(saved, banned, data.leaves)
        if difference and difference != self._said:  # trainers may restore a state twice
            self._said = difference
            level = logging.INFO if self.plan.config.dp_rank else logging.WARNING  # of all ranks: said once
            logger.log(level, "the mix has changed; the run continues with the new one:\n  %s", "\n  ".join(difference))
            if saved.sharers > 1:
                logger.log(
                    level,
                    "its lanes share packing buffers and are at different packs in them; the change makes other packs, "
                    "so some samples repeat and others are missed. With fewer lanes or a smaller packing_buffer_size "
                    "none are shared",
                )
            if changes:
                logger.log(level, "earlier changes by set_weights do not apply to the new mix and are dropped")
        changes = () if difference else changes
        buffers = saved.settings.get(PACKING_BUFFERS) or 0
        # Lanes share no buffers of buckets.
        if buffers and (num_lanes % buffers or (data.buckets is not None and buffers < num_lanes)):
            raise saved_run.damaged(
                f"settings.{PACKING_BUFFERS}", f"should divide the {num_lanes} lanes, found {buffers}"
            )
        self.plan = self.plan.recut(num_lanes, changes, blocks, buffers).with_banned(banned)
        if taken is not None:
            day.settle(taken)  # workers begin anew, with the encoder as it is then
        self.ownership = ownership
        self.out = out
        self._bans = bans
        self.microbatches = microbatches
        self.turn = 0
        self.epoch = saved.epoch
        self.epoch_steps = saved.epoch_steps
        # Counts belong to the run: one rank may carry those of several.
        own = len(lanes) == len(self.own_lanes) if self.by_lane else saved.ranks == (1, self._ranks)
        self._take_over(saved.leaves, lanes, counts=own or self._rank == 0, changed=bool(difference))

    def _take_over(
        self, saved: list[saved_run.State], lanes: dict[int, LaneState], *, counts: bool, changed: bool
    ) -> None:
        """Continue each leaf from the saved state; new leaves start fresh, and removed ones are parked."""
        place = {row["identity"]: number for number, row in enumerate(saved)}
        kept = [place.pop(row["identity"], None) for row in self.plan.table]
        gone = list(place.values())
        relative = self.plan.data.mode in ("repetitions", "concat") or self.plan.data.unit is not None
        self.lanes = {}
        self._parked_draws = {}
        for number, state in lanes.items():
            self._parked_draws[number] = tuple([state.leaf_draws[old] for old in gone])
            draws = tuple([0 if old is None else state.leaf_draws[old] for old in kept])
            sums = tuple([0 if old is None else state.sums[old] for old in kept]) if state.sums else ()
            if not changed:
                self.lanes[number] = (
                    state if draws == state.leaf_draws else dataclasses.replace(state, leaf_draws=draws, sums=sums)
                )
                continue
            # In another mix the leaf of a half-used draw is unknown, so the draw is made again.
            draw = state.draw + (state.taken > 0)
            self.lanes[number] = dataclasses.replace(
                state,
                draw=draw,
                taken=0,
                leaf_draws=draws,
                origin=draw if relative else 0,
                held=_renumbered(state.held, kept),
                batches_taken=0,
                sums=(),  # by amounts, lanes begin anew with the new mix
            )
        left = [len(lanes[lane].held.members) - len(state.held.members) for lane, state in self.lanes.items()]
        if dropped := sum(left):
            logger.warning(
                "rank %d: dropping %d samples that waited for a pack or batch in %d of its lanes: their datasets left "
                "the mix or changed",
                *(self.plan.config.dp_rank, dropped, len(left) - left.count(0)),
            )
        nothing = dict.fromkeys(COUNTERS, 0)
        # The last of `COLUMNS` is of this loader alone.
        known = [(leaf, saved[old]["counts"]) for leaf, old in enumerate(kept) if counts and old is not None]
        self.counts = Counts({leaf: [*counted.values(), 0] for leaf, counted in known})
        self._parked = [saved[old] | {"parked": True} | ({} if counts else {"counts": nothing}) for old in gone]


def _renumbered(held: BufferedRefs, kept: Sequence[int | None]) -> BufferedRefs:
    """Return the waiting rows with the leaves' new numbers, without samples of removed leaves."""
    number = {old: new for new, old in enumerate(kept) if old is not None}
    rows = []
    for stage, refs, extra in held.entries():
        stay = [ref._replace(leaf=number[ref.leaf]) for ref in refs if ref.leaf in number]
        if stay:
            rows.append((stage, stay, extra))
    return BufferedRefs.of(rows)


# ---------------------------------------------------------------------------------------------------------------------
# An endless run.


class EndlessRun(Position):
    """Goes round the lanes of the rank, with masked microbatches if the ranks do not divide the lanes."""

    by_lane = True

    def units(self, began: int) -> Iterator[tuple[int, int]]:
        processes = self.plan.config.processes
        given = {"ranks": self._in_a_row, "turn": self.turn}
        return lane_units(self.ownership, self._rank, self.microbatches, processes, **given)

    def _stream(self, pipeline: Pipeline) -> Stream:
        worker = pipeline.settings.worker
        own = self.own_lanes
        if worker is not None:
            own = own[worker.number :: self.plan.config.processes]
        return LaneStreams(pipeline, self.plan.blend, self.lanes, own)

    @property
    def is_masked(self) -> bool:
        owned = self.ownership
        return not owned.even and owned.lane_in_step(self._rank, self.microbatches) is None

    def take(self, item: LaneBatch) -> None:
        assert item.state is not None
        self.lanes[item.unit] = item.state

    def _step(self) -> int:
        return self._ranks if self.ownership.even else self.ownership.step_size(self.microbatches)

    def _lanes_of(self, ownership: Ownership) -> Sequence[int]:
        if self._in_a_row > 1 and not ownership.even:
            raise ConfigurationError(
                f"serves={self._in_a_row}: {self._ranks} ranks do not divide the {ownership.num_lanes} lanes of the "
                f"run, so some have no microbatch in some steps: take {ownership.nearest_even_world_size()} ranks"
            )
        return ownership.lanes_of(self._rank, self._in_a_row)

    def _delivered(self) -> frozenset[int]:
        leaves = range(len(self.plan.leaves))
        return frozenset(leaf for leaf in leaves if any(state.leaf_draws[leaf] for state in self.lanes.values()))

    def _seek(self, step: int) -> None:
        plan = self.plan
        lanes = plan.num_lanes
        self.microbatches = first_microbatch(step, num_lanes=lanes, world_size=self._ranks)
        self.ownership = Ownership(lanes, self._ranks, self.microbatches)
        self.lanes = {}
        for lane in self.own_lanes:
            microbatches = microbatches_before(lane, self.microbatches, lanes)
            if plan.data.buckets is not None:
                draws = cast(BlendOfBuckets, plan.blend).leaf_draws(lane, microbatches)
                self.lanes[lane] = LaneState(microbatches, sum(draws), 0, tuple(draws))
                continue
            sharers = lanes // plan.streams
            dealt = self.microbatches // lanes * sharers * plan.data.rows if sharers > 1 else 0
            first = dealt or microbatches * plan.data.rows
            there = blend_position(plan.leaves, plan.blend, lane % plan.streams, first)
            sums = tuple(there.sums)
            self.lanes[lane] = LaneState(microbatches, there.draw, 0, tuple(there.leaf_draws), sums=sums, dealt=dealt)

    def set_weights(self, weights: Mapping[str, Any] | Sequence[Any], from_draw: int | None) -> int:
        start, self.plan = with_new_weights(self.plan, weights, self._first_undrawn(), from_draw)
        return start

    def _first_undrawn(self) -> int:
        """Return the global draw after the last one that a lane of this rank has made."""
        states = ((lane, self.lane_state(lane)) for lane in self.own_lanes)
        return max(self.plan.global_draw(lane, s.draw + (s.taken > 0) - 1) + 1 for lane, s in states)

    def _first_banned(self, from_draw: int | None) -> int:
        """Return the global draw from which a ban holds, by default the first one that some lane has not delivered."""
        plan = self.plan
        if plan.data.buckets is not None:
            if from_draw is not None:
                raise ConfigurationError("ban: draws have no common number with group_by: leave out from_draw")
            return 0  # draws that were made are not taken back
        # Lanes that share a buffer must agree on what it draws.
        shares = plan.streams < plan.num_lanes
        first = (
            self._first_undrawn()
            if shares
            else min(plan.global_draw(lane, self.lane_state(lane).draw) for lane in self.own_lanes)
        )
        if from_draw is None:
            return agreed("ban", first, max if shares else min, self._ranks, plan.config.data_parallel_group)
        if 0 < from_draw < first:
            logger.warning(
                "ban: the lanes of rank %d have made all draws before global draw %d, so from_draw=%d bans from "
                "there on; draws that were made are not taken back",
                *(plan.config.dp_rank, first, from_draw),
            )
        return from_draw


# ---------------------------------------------------------------------------------------------------------------------
# A finite pass.


_EMPTY_PASSES = 100
"""Passes without a microbatch, one after the other, after which a seek gives up."""


class FinitePass(Position):
    """Goes through a pass over the data: validation, which begins again each time, or training that ends."""

    by_lane = False

    def __init__(self, plan: RunPlan) -> None:
        super().__init__(plan)
        self._ends: tuple[int, int] = (-1, 0)
        self._listing: tuple[int, Listing, Counts] | None = None

    @property
    def end(self) -> int:
        """The microbatch at which the pass ends."""
        if self._ends[0] != self.epoch:
            self._ends = self.epoch, self.plan.end_of_pass(self.epoch, self.listing)
        return self._ends[1]

    @property
    def listing(self) -> Listing | None:
        """The rows of a packed or grouped pass, else None; all ranks make the list together, once per pass."""
        if not self.plan.data.listed:
            return None
        epoch = self.epoch if self.plan.data.shuffled else 0
        if self._listing is None or self._listing[0] != epoch:
            pipeline = open_pipeline(self.plan, delivered=self._delivered())
            self._listing = epoch, *listing_of_pass(pipeline, self.plan.draws_of_pass(epoch))
        return self._listing[1]

    @property
    def is_over(self) -> bool:
        return self.microbatches >= self.end

    def units(self, began: int) -> Iterator[tuple[int, int]]:
        workers = self.plan.config.processes
        steps = range(self.microbatches, self.end, self._ranks)
        gone = (self.microbatches - began) // self._ranks * self._in_a_row
        units = step_units(steps, self._rank, workers, ranks=self._in_a_row, turn=self.turn)
        return ((unit, (number + gone) % workers) for unit, number in units)

    def _stream(self, pipeline: Pipeline) -> Stream:
        listing = self.listing
        order = self.plan.order_of_pass
        draws = self.plan.draws_of_pass(self.epoch) if order is None else order.draws
        number_of = None if order is None else order.sample_number
        rows = drawn_rows(pipeline, draws, number_of) if listing is None else listed_rows(pipeline, listing)
        return FiniteStream(pipeline, rows, drop_last=self.plan.data.settings.batch_drop_last, order=order)

    def take(self, item: LaneBatch) -> None:
        return

    def _step(self) -> int:
        if not self.microbatches and self.listing is not None:
            # Once, though each process that continues the pass lists it again.
            assert self._listing is not None
            self.counts.add(self._listing[2])
        return self._ranks

    def rewind(self) -> None:
        """Go to the beginning of the stream or of its next pass."""
        self.epoch += self.plan.data.shuffled
        self.microbatches = self.epoch_steps = self.turn = 0

    def _lanes_of(self, ownership: Ownership) -> range:
        return range(0)

    def _delivered(self) -> frozenset[int]:
        # After a run on other ranks, another rank may hold these counts.
        begins = not (self.microbatches or self.epoch or any(map(any, self.counts.values())))
        return frozenset() if begins else frozenset(range(len(self.plan.leaves)))

    def _seek(self, step: int) -> None:
        self.epoch = empty = 0
        while self.plan.data.shuffled and step and step >= (steps := -(-self.end // self._ranks)):
            self.epoch += 1
            step -= steps
            empty = 0 if steps else empty + 1
            if empty == _EMPTY_PASSES:
                self.epoch = self.microbatches = self.epoch_steps = 0
                raise ConfigurationError(
                    f"start_at: the run has no {step} steps more: {empty} passes in a row have no microbatch. Set "
                    "batch_drop_last=False, or a smaller batch_size"
                )
        self.microbatches = min(step * self._ranks, self.end)

    def set_weights(self, weights: Mapping[str, Any] | Sequence[Any], from_draw: int | None) -> int:
        raise no_weights(self.plan.data)

    @property
    def _is_fixed(self) -> bool:
        """Whether the rows of the pass are listed and have begun, in validation."""
        data = self.plan.data
        return data.listed and not data.shuffled and self.microbatches > 0

    def _first_banned(self, from_draw: int | None) -> int:
        data = self.plan.data
        draws = self.plan.draws_of_pass(self.epoch)
        if not data.shuffled:  # nothing depends on earlier microbatches, so it may hold from the beginning
            if from_draw is not None:
                raise ConfigurationError("ban: from_draw applies to training only: leave it out for validation")
            if self._is_fixed and not self.is_over:
                raise ConfigurationError(
                    "ban: a packed or grouped pass fixes its rows when it begins: ban samples before it begins or "
                    "after it ends"
                )
            return draws.first
        if data.listed:  # the rows of a pass that has begun are fixed
            return max(from_draw or 0, draws.first + (draws.num_draws if self.microbatches else 0))
        first = draws.first + min(self.microbatches * data.rows, draws.num_draws)
        return first if from_draw is None else from_draw

    def _set_bans(self, bans: tuple[Ban, ...], plan: RunPlan) -> None:
        super()._set_bans(bans, plan)
        if self._is_fixed:
            self.rewind()
        if self._listing is not None and not self.microbatches:  # listed, but nothing of it is delivered
            self._listing = None
            self._ends = (-1, 0)
