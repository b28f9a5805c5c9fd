"""The position of a loader: what its rank has delivered, and the state document that records it.

What a loader delivers next depends on its position and nothing else. A position knows nothing about workers or about
microbatches made ahead.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast, get_args

import torch

from energon_bridge.core.errors import ConfigurationError, LoaderError, check_choice, check_number
from energon_bridge.core.loader import document as doc
from energon_bridge.core.loader.bans import (
    banned_of,
    check_left,
    checked_keys,
    leaves_of_path,
    look_up,
    moved_bans,
    named_keys,
    with_found,
)
from energon_bridge.core.loader.fits import check_fits, check_lanes, merge, saved_day
from energon_bridge.core.loader.run_plan import PACKING_BUFFERS, RunPlan, open_pipeline, run_day_of
from energon_bridge.core.mix import parse_weight
from energon_bridge.core.mix.weights import GivenWeights
from energon_bridge.core.order.changes import Ban, new_keys, with_ban
from energon_bridge.core.order.choose import BucketBlend, standing
from energon_bridge.core.order.topology import Ownership, first_microbatch, lane_units, microbatches_before, step_units
from energon_bridge.core.stream.finite import FiniteStream, Listing, drawn_rows, listed_rows, listing_of_pass
from energon_bridge.core.stream.lane import LaneStreams, Stream
from energon_bridge.core.stream.pipeline import Pipeline
from energon_bridge.core.stream.settings import WorkerFacts
from energon_bridge.core.stream.state import COUNTERS, LARGEST, BufferedRefs, Counts, LaneBatch, LaneState, Stage
from energon_bridge.core.stream.watchdog import WatchdogSettings

logger = logging.getLogger(__name__)

OnMismatch = Literal["refuse", "adapt"]


class Position:
    """The position of one rank's loader in a dataset.

    Attributes:
        plan: The data, cut into lanes.
        ownership: Says which lanes belong to this rank.
        microbatches: Microbatches delivered by the whole run; for a finite stream, in this pass.
        epoch: Completed passes of a finite stream.
        epoch_steps: Delivered steps of the virtual epoch.
        lanes: The state of each lane that the mode needs.
        mode: How the microbatches of the rank follow one another.
        counts: The `COLUMNS` of leaves on this rank: restored counts plus what it has delivered since.
    """

    def __init__(self, plan: RunPlan, mode: Mode) -> None:
        self.plan = plan
        self.mode = mode
        self.ownership = Ownership(plan.num_lanes, plan.config.dp_size, 0)
        self._rank = plan.config.dp_rank
        self.microbatches = 0
        self.epoch = 0
        self.epoch_steps = 0
        self.lanes: dict[int, LaneState] = {}
        self._ends: tuple[int, int] = (-1, 0)
        self._listing: tuple[int, Listing, Counts] | None = None
        self.counts = Counts()
        self._bans: tuple[Ban, ...] = ()
        self._parked: list[doc.State] = []
        self._parked_draws: dict[int, tuple[int, ...]] = {}

    # Going on --------------------------------------------------------------------------------------------------------

    @property
    def own_lanes(self) -> range:
        """The lanes of this rank; a finite stream has none."""
        return range(0) if self.plan.data.ends else self.ownership.lanes_of(self.plan.config.dp_rank)

    @property
    def end(self) -> int:
        """The microbatch at which the pass of a finite stream ends."""
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
            pipeline = open_pipeline(self.plan, delivered=self.mode.delivered(self))
            self._listing = epoch, *listing_of_pass(pipeline, self.plan.draws_of_pass(epoch))
        return self._listing[1]

    def advance(self) -> None:
        """Move on by one step."""
        self.microbatches += self.mode.step(self)
        self.epoch_steps += self.plan.data.settings.virtual_epoch_length is not None

    def count_listing(self) -> None:
        """Add the counts of listing the pass: once, though each process that continues the pass lists it again."""
        if self.listing is not None:
            assert self._listing is not None
            self.counts.add(self._listing[2])

    def rewind(self) -> None:
        """Go to the beginning of a finite stream or of its next pass."""
        self.epoch += self.plan.data.shuffled
        self.microbatches = self.epoch_steps = 0

    def stream(self, watchdog: WatchdogSettings | None = None, worker: WorkerFacts | None = None) -> Stream:
        """Return what makes the units of this process from here on (see `open_pipeline`)."""
        delivered = self.mode.delivered(self)
        return self.mode.stream(self, open_pipeline(self.plan, None, delivered, watchdog, worker))

    def copied(self) -> Position:
        """Return an independent copy."""
        other = copy.copy(self)
        other.lanes = dict(self.lanes)
        other.counts = Counts(self.counts)
        return other

    def lane(self) -> int | None:
        """Return the lane that this rank delivers next; None if its next microbatch does not exist."""
        return self.ownership.lane_in_step(self._rank, self.microbatches)

    def waiting(self, item: LaneBatch | None = None) -> Counter[int]:
        """Return how many samples of each leaf the lanes of this rank hold: drawn, and neither delivered nor lost.

        Args:
            item: The microbatch that is delivered next, if its lane is to count as after it.
        """
        lanes = dict(self.lanes)
        if item is not None and item.state is not None and (lane := self.lane()) is not None:
            lanes[lane] = item.state
        counted = Counter[int]()
        for number, state in lanes.items():
            # What waits in a buffer that lanes share counts once.
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
        virtual = self.plan.data.settings.virtual_epoch_length
        self.epoch_steps = step % virtual if virtual else 0
        self.counts = Counts()
        self.mode.seek(self, step)

    # Weights ---------------------------------------------------------------------------------------------------------

    def set_weights(self, weights: Mapping[str, Any] | Sequence[Any], from_draw: int | None) -> int:
        """Change the weights from a global draw on; return that draw."""
        data = self.plan.data
        if data.ends or data.mode != "weights" or data.buckets is not None:
            raise ConfigurationError(
                f"set_weights needs an endless blend by weights, but this loader delivers a {data.kind} stream of mode "
                f"{data.mode!r}{' in buckets (group_by)' if data.buckets is not None else ''}"
            )
        given = self._by_identity(weights)
        lanes = self.plan.num_lanes
        first = self.first_undrawn()
        if from_draw is None or torch.distributed.is_initialized():
            first = self.agreed("set_weights", first, max)  # so that all ranks refuse the same draws
        start = first if from_draw is None else from_draw
        if start < first:
            raise ConfigurationError(
                f"set_weights: global draw {start} is already made; from_draw must be at least {first}"
            )
        schedules = tuple(parse_weight(w, where="set_weights", field=f"weights[{i}]") for i, w in enumerate(given))
        changed = GivenWeights(schedules=schedules)
        if not any(weight for weight in changed.at(start)):
            raise ConfigurationError("set_weights: all weights are 0; at least one must be positive")
        kept = [(draw, weights) for draw, weights in self.plan.changes if draw != start]
        self.plan = self.plan.recut(lanes, tuple(sorted([*kept, (start, changed)], key=lambda change: change[0])))
        return start

    def first_undrawn(self) -> int:
        """Return the global draw after the last one that a lane of this rank has made."""
        states = ((lane, self.lane_state(lane)) for lane in self.own_lanes)
        return max(self.plan.global_draw(lane, s.draw + (s.taken > 0) - 1) + 1 for lane, s in states)

    def agreed(self, what: str, own: int, choose: Callable[[list[int]], int]) -> int:
        """Return the global draw that all ranks agree on: `choose` picks it from the values of all ranks."""
        if self.plan.data.ends or self.plan.config.dp_size == 1:
            return own
        if not torch.distributed.is_initialized():
            raise ConfigurationError(f"{what}: pass the same from_draw on every rank, or initialize torch.distributed")
        found: list[Any] = [None] * self.plan.config.dp_size
        torch.distributed.all_gather_object(found, own, group=self.plan.config.data_parallel_group)
        return choose(found)

    def _by_identity(self, weights: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
        """Return weights given by path or in mix order, in the order of the leaves' identities."""
        leaves = self.plan.data.leaves
        if isinstance(weights, Mapping):
            paths = [leaf.dataset.path for leaf in leaves]
            if len(set(paths)) != len(paths) or set(weights) != set(paths):
                wrong = sorted(set(weights) ^ set(paths)) or [path for path in paths if paths.count(path) > 1]
                raise ConfigurationError(
                    f"set_weights needs one weight for each of the {len(paths)} paths of the mix; missing, unknown "
                    f"or repeated: {', '.join(wrong[:3])}. If a dataset is in the mix twice, pass a list in mix order"
                )
            weights = [weights[path] for path in paths]
        if len(weights) != len(leaves):
            raise ConfigurationError(f"set_weights got {len(weights)} weights for a mix of {len(leaves)} datasets")
        by_identity = {leaf.identity: weight for leaf, weight in zip(leaves, weights, strict=True)}
        return [by_identity[leaf.identity] for leaf in self.plan.data.ordered]

    # Bans ------------------------------------------------------------------------------------------------------------

    def ban(self, keys: Iterable[str], from_draw: int | None, dataset: str | None, ignore_unknown: bool) -> int:
        """Withdraw samples from a global draw on; return that draw."""
        data = self.plan.data
        given = checked_keys(keys)
        path = dataset or ""
        if from_draw is not None and (type(from_draw) is not int or not 0 <= from_draw <= LARGEST):
            raise ConfigurationError(f"ban: from_draw must be an integer of at least 0, got {from_draw!r}")
        fixed = data.kind == "finite" and data.listed and self.microbatches > 0
        if data.kind == "finite" and from_draw is not None:
            raise ConfigurationError("ban: from_draw applies to training only: leave it out for validation")
        if fixed and self.microbatches < self.end:
            raise ConfigurationError(
                "ban: a packed or grouped pass fixes its rows when it begins: ban samples before it begins or after it "
                "ends"
            )
        leaves = leaves_of_path(data.leaves, path)
        start = self.mode.first_banned(self, from_draw)
        ban = Ban(start=start, keys=tuple(given), dataset=path)
        new = new_keys(self._bans, ban)
        if not new:
            return start
        found = look_up(leaves, new)
        known = frozenset().union(*found)
        unknown = [key for key in new if key not in known]
        if unknown:
            where = path or "the datasets of the mix"
            text = f"ban: {len(unknown)} of {len(given)} keys are not in {where}: {named_keys(unknown)}"
            if not ignore_unknown:
                raise ConfigurationError(
                    f"{text}. Nothing was banned. Correct the keys (`energon which` shows them), or pass "
                    "ignore_unknown=True if they belong to datasets that this run does not read"
                )
            logger.warning(text)
        banned = with_found(self.plan.banned, leaves, found, start)
        check_left(banned, data.leaves)
        self._bans, self.plan = with_ban(self._bans, ban), self.plan.with_banned(banned)
        if fixed:
            self.rewind()
        if self._listing is not None and not self.microbatches:  # listed, but nothing of it is delivered
            self._listing = None
            self._ends = (-1, 0)
        return start

    # State -----------------------------------------------------------------------------------------------------------

    def rows(self) -> list[doc.State]:
        """Return a row per leaf as `leaf_rows` describes, plus `encoded_again`, which is not part of the state.

        It counts the samples that were encoded again since this loader was made or restored, because they waited in a
        state, in the listing of a pass, or beyond `WorkerConfig.buffer_bytes`.
        """
        again = [self.counts.of(leaf)[-1] for leaf in range(len(self.plan.leaves))] + [0] * len(self._parked)
        samples = [float(number) for number in self.plan.data.epoch_samples] + [0.0] * len(self._parked)
        rows = zip(doc.leaf_rows(self.saved()), again, samples, strict=True)
        return [row | {"encoded_again": number, "epoch_samples": of_epoch} for row, number, of_epoch in rows]

    def document(self) -> doc.State:
        """Return the state of this rank."""
        return doc.write(self.saved())

    def saved(self) -> doc.SavedRun:
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
        return doc.SavedRun(
            kind=self.plan.data.kind,
            num_lanes=self.plan.num_lanes,
            microbatches=self.microbatches,
            epoch=self.epoch,
            epoch_steps=self.epoch_steps,
            settings=self.plan.settings,
            changes=self.plan.changes,
            bans=self._bans,
            banned=self.plan.banned,
            leaves=[*leaves, *self._parked],
            lanes=lanes,
            ranks=(1, self.plan.config.dp_size) if self.plan.data.ends else None,
        )

    def restore(self, saved: doc.SavedRun, on_mismatch: OnMismatch) -> None:
        """Continue from a state; if it does not fit, nothing changes.

        Raises:
            StateError: One of its subclasses: what does not fit.
        """
        check_choice("on_mismatch", on_mismatch, get_args(OnMismatch))
        config = self.plan.config
        data = self.plan.data
        num_lanes = self.plan.num_lanes if data.ends else saved.num_lanes  # a pass is the same on any ranks
        changes = saved.changes
        blocks = {row["identity"]: row["block"] for row in saved.leaves}
        adapt = on_mismatch == "adapt" and data.kind == "train"
        day = run_day_of(data)
        taken = None if day is None or day.given else saved_day(saved)
        settings = self.plan.settings | ({} if taken is None else {"today": taken.isoformat()})
        difference = check_fits(saved, data.kind, settings, self.plan.table, adapt=adapt)
        microbatches = saved.microbatches
        lanes = saved.lanes
        ownership = Ownership(num_lanes, config.dp_size, microbatches)
        needed = self.mode.needed_lanes(ownership, config.dp_rank)
        check_lanes(lanes, needed, microbatches, num_lanes)
        if config.num_lanes not in (None, num_lanes):
            logger.info("num_lanes=%d comes from the state; the configuration says %s", num_lanes, config.num_lanes)
        if difference:
            logger.warning("the mix has changed; the run continues with the new one:\n  %s", "\n  ".join(difference))
            if changes:
                logger.warning("earlier changes by set_weights do not apply to the new mix and are dropped")
                changes = ()
        bans = moved_bans(saved, data.leaves) if saved.bans else ()
        banned = banned_of(saved, bans, data.leaves) if bans else {}
        buffers = saved.settings.get(PACKING_BUFFERS) or 0
        if buffers and num_lanes % buffers:
            raise doc.damaged(f"settings.{PACKING_BUFFERS}", f"should divide the {num_lanes} lanes, found {buffers}")
        self.plan = self.plan.recut(num_lanes, changes, blocks, buffers).with_banned(banned)
        if taken is not None:
            day.settle(taken)  # workers begin anew, with the encoder as it is then
        self.ownership = ownership
        self._bans = bans
        self.microbatches = microbatches
        self.epoch = saved.epoch
        self.epoch_steps = saved.epoch_steps
        # Counts belong to the run: one rank may carry those of several.
        own = saved.ranks == (1, config.dp_size) if data.ends else len(lanes) == len(self.own_lanes)
        self._take_over(saved.leaves, lanes, counts=own or config.dp_rank == 0, changed=bool(difference))

    def _take_over(self, saved: list[doc.State], lanes: dict[int, LaneState], *, counts: bool, changed: bool) -> None:
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
            # In another mix nobody knows which leaf a half-used draw came from, so it is drawn again.
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
        nothing = dict.fromkeys(COUNTERS, 0)
        self.counts = Counts()
        for leaf, old in enumerate(kept):
            if counts and old is not None:
                self.counts.of(leaf)[: len(COUNTERS)] = saved[old]["counts"].values()
        self._parked = [saved[old] | {"parked": True} | ({} if counts else {"counts": nothing}) for old in gone]


def _renumbered(held: BufferedRefs, kept: Sequence[int | None]) -> BufferedRefs:
    """Return the waiting rows with the leaves' new numbers, without samples of removed leaves."""
    number = {old: new for new, old in enumerate(kept) if old is not None}
    rows = []
    lost = 0
    for stage, refs, extra in held.entries():
        stay = [ref._replace(leaf=number[ref.leaf]) for ref in refs if ref.leaf in number]
        lost += len(refs) - len(stay)
        if stay:
            rows.append((stage, stay, extra))
    if lost:
        logger.warning("dropping %d samples that waited for a pack or batch: their datasets left the mix", lost)
    return BufferedRefs.of(rows)


def merged_state(own: doc.State, ranks: int, group: Any, global_dst_rank: int | None = None) -> doc.State | None:
    """Return the state of the whole run from those of its data-parallel ranks, all of which must call it.

    Args:
        group: The process group of these ranks; None: all processes are.
        global_dst_rank: Only this global rank gets the state (others None); default: every rank gets it.
    """
    if ranks == 1:
        return own
    if not torch.distributed.is_initialized():
        raise LoaderError(
            f"save_state_global needs torch.distributed to reach the other {ranks - 1} ranks: initialize "
            "it, or save save_state_rank() of every rank and pass the list of them to restore_state_rank"
        )
    states: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(states, own, group=group)
    if global_dst_rank is not None and torch.distributed.get_rank() != global_dst_rank:
        return None
    return merge(states)


# ---------------------------------------------------------------------------------------------------------------------
# The modes of a loader. A *unit* is what one microbatch is made from: a lane of a run, or the number of a microbatch in
# a pass.


_EMPTY_PASSES = 100
"""Passes without a microbatch, one after the other, after which a seek gives up."""


class Mode:
    """How the microbatches of a rank follow one another, and what of the run the rank needs for that.

    This one is that of an endless run: each rank goes round its own lanes, with masked microbatches if the ranks do not
    divide the lanes. The other one overrides what differs.
    Where the rank is stands in its position, `at`; a copy of both goes to each worker.

    Attributes:
        by_lane: Whether units are lanes, each of one worker; a worker without a lane then has none, ever.
    """

    by_lane = True

    def units(self, at: Position, began: int) -> Iterator[tuple[int, int]]:
        """Give the units of the rank from here on, each with its worker; a pass was divided at microbatch `began`."""
        config = at.plan.config
        return lane_units(at.ownership, config.dp_rank, at.microbatches, config.processes)

    def stream(self, at: Position, pipeline: Pipeline) -> Stream:
        """Return what makes the units of one process, of which the pipeline is."""
        worker = pipeline.settings.worker
        own = at.own_lanes
        if worker is not None:
            own = own[worker.number :: at.plan.config.processes]
        return LaneStreams(pipeline, at.plan.blend, at.lanes, own)

    def is_over(self, at: Position) -> bool:
        """Whether a pass ends here."""
        return False

    def is_masked(self, at: Position) -> bool:
        """Whether the rank has no microbatch in the next step, but a masked one."""
        return not at.ownership.even and at.lane() is None

    def take(self, at: Position, item: LaneBatch) -> None:
        """Note in the position what comes with the next microbatch; the position advances after that."""
        lane = at.lane()
        assert lane is not None
        assert item.state is not None
        at.lanes[lane] = item.state

    def step(self, at: Position) -> int:
        """Return the microbatches that the run delivers in a step."""
        return at.ownership.step_size(at.microbatches)

    def needed_lanes(self, ownership: Ownership, rank: int) -> range:
        """Return the lanes whose states a rank needs to continue."""
        return ownership.lanes_of(rank)

    def seek(self, at: Position, step: int) -> None:
        """Go to the beginning of a step, assuming that no sample before it was skipped."""
        ranks = at.plan.config.dp_size
        lanes = at.plan.num_lanes
        at.microbatches = first_microbatch(step, num_lanes=lanes, world_size=ranks)
        at.ownership = Ownership(lanes, ranks, at.microbatches)
        at.lanes = {}
        for lane in self.needed_lanes(at.ownership, at.plan.config.dp_rank):
            microbatches = microbatches_before(lane, at.microbatches, lanes)
            if at.plan.data.buckets is not None:
                draws = cast(BucketBlend, at.plan.blend).leaf_draws(lane, microbatches)
                at.lanes[lane] = LaneState(microbatches, sum(draws), 0, tuple(draws))
                continue
            sharers = lanes // at.plan.streams
            dealt = at.microbatches // lanes * sharers * at.plan.data.rows if sharers > 1 else 0
            first = dealt or microbatches * at.plan.data.rows
            there = standing(at.plan.leaves, at.plan.blend, lane % at.plan.streams, first)
            sums = tuple(there.sums)
            at.lanes[lane] = LaneState(microbatches, there.draw, 0, tuple(there.leaf_draws), sums=sums, dealt=dealt)

    def delivered(self, at: Position) -> frozenset[int]:
        """Return the leaves that the run has delivered samples of, as far as the rank can know; none at the start."""
        leaves = range(len(at.plan.leaves))
        return frozenset(leaf for leaf in leaves if any(state.leaf_draws[leaf] for state in at.lanes.values()))

    def first_banned(self, at: Position, from_draw: int | None) -> int:
        """Return the global draw from which a ban holds, by default the first one that some lane has not delivered."""
        if at.plan.data.buckets is not None:
            if from_draw is not None:
                raise ConfigurationError("ban: draws have no common number with group_by: leave out from_draw")
            return 0  # draws that were made are not taken back
        # Lanes that share a buffer must agree on what it draws.
        shares = at.plan.streams < at.plan.num_lanes
        first = (
            at.first_undrawn()
            if shares
            else min(at.plan.global_draw(lane, at.lane_state(lane).draw) for lane in at.own_lanes)
        )
        if from_draw is None:
            return at.agreed("ban", first, max if shares else min)
        if 0 < from_draw < first:
            logger.warning(
                "ban: the lanes of this rank have made all draws before global draw %d, so from_draw=%d bans from "
                "there on; draws that were made are not taken back",
                *(first, from_draw),
            )
        return from_draw


class PassMode(Mode):
    """A pass over the data: validation, which begins again each time, or training that ends."""

    by_lane = False

    def needed_lanes(self, ownership: Ownership, rank: int) -> range:
        return range(0)

    def units(self, at: Position, began: int) -> Iterator[tuple[int, int]]:
        config = at.plan.config
        ranks = config.dp_size
        workers = config.processes
        steps = range(at.microbatches, at.end, ranks)
        turn = (at.microbatches - began) // ranks
        return ((unit, (number + turn) % workers) for unit, number in step_units(steps, config.dp_rank, workers))

    def take(self, at: Position, item: LaneBatch) -> None:
        return

    def is_masked(self, at: Position) -> bool:
        return False

    def stream(self, at: Position, pipeline: Pipeline) -> Stream:
        listing = at.listing
        order = at.plan.order_of_pass
        draws = at.plan.draws_of_pass(at.epoch) if order is None else order.draws
        number_of = None if order is None else order.sample_number
        rows = drawn_rows(pipeline, draws, number_of) if listing is None else listed_rows(pipeline, listing)
        return FiniteStream(pipeline, rows, drop_last=at.plan.data.settings.batch_drop_last, order=order)

    def is_over(self, at: Position) -> bool:
        return at.microbatches >= at.end

    def step(self, at: Position) -> int:
        if not at.microbatches:
            at.count_listing()
        return at.plan.config.dp_size

    def seek(self, at: Position, step: int) -> None:
        ranks = at.plan.config.dp_size
        at.epoch = empty = 0
        while at.plan.data.shuffled and step and step >= (steps := -(-at.end // ranks)):
            at.epoch += 1
            step -= steps
            empty = 0 if steps else empty + 1
            if empty == _EMPTY_PASSES:
                at.epoch = at.microbatches = at.epoch_steps = 0
                raise ConfigurationError(
                    f"start_at: the run has no {step} steps more: {empty} passes in a row have no microbatch. Set "
                    "batch_drop_last=False, or a smaller batch_size"
                )
        at.microbatches = min(step * ranks, at.end)

    def delivered(self, at: Position) -> frozenset[int]:
        # After a run on other ranks, another rank may hold these counts.
        begins = not (at.microbatches or at.epoch or any(map(any, at.counts.values())))
        return frozenset() if begins else frozenset(range(len(at.plan.leaves)))

    def first_banned(self, at: Position, from_draw: int | None) -> int:
        data = at.plan.data
        draws = at.plan.draws_of_pass(at.epoch)
        if not data.shuffled:  # nothing depends on earlier microbatches, so it may hold from the beginning
            return draws.first
        if data.listed:  # the rows of a pass that has begun are fixed
            return max(from_draw or 0, draws.first + (draws.num_draws if at.microbatches else 0))
        first = draws.first + min(at.microbatches * data.rows, draws.num_draws)
        return first if from_draw is None else from_draw
