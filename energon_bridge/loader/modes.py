"""The modes of a loader: how the microbatches of its rank follow one another (`position.Mode`).

An endless run goes round the lanes of its rank, with masked microbatches if the ranks do not divide the lanes. A pass
ends, and begins again. Other rooms bring further modes (`loader.shares`).

A *unit* is what one microbatch is made from: a lane of a run, or the number of a microbatch in a pass.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from energon_bridge.errors import ConfigurationError
from energon_bridge.loader.position import Mode, Position
from energon_bridge.plan.buckets import BucketBlend
from energon_bridge.plan.choose import standing
from energon_bridge.stream.finite import DrawnRows, FiniteStream, ListedRows
from energon_bridge.stream.lane import LaneStreams, Stream
from energon_bridge.stream.pipeline import Pipeline
from energon_bridge.stream.state import LaneBatch, LaneState
from energon_bridge.topology import Ownership, first_microbatch, lane_units, microbatches_before, step_units

logger = logging.getLogger(__name__)

_EMPTY_PASSES = 100
"""Passes without a microbatch, one after the other, after which a seek gives up."""


class LaneMode(Mode):
    """An endless run: each rank loads its own lanes."""

    def units(self, at: Position, began: int) -> Iterator[tuple[int, int]]:
        config = at.plan.config
        return lane_units(at.ownership, config.dp_rank, at.microbatches, config.processes)

    def stream(self, at: Position, pipeline: Pipeline) -> Stream:
        return LaneStreams(pipeline, at.plan.blend, at.lanes)

    def is_masked(self, at: Position) -> bool:
        return not at.ownership.even and at.lane() is None

    def take(self, at: Position, item: LaneBatch) -> None:
        lane = at.lane()
        assert lane is not None
        assert item.state is not None
        at.lanes[lane] = item.state

    def seek(self, at: Position, step: int) -> None:
        ranks, lanes = at.plan.config.dp_size, at.plan.num_lanes
        at.microbatches = first_microbatch(step, num_lanes=lanes, world_size=ranks)
        at.ownership = Ownership(lanes, ranks, at.microbatches)
        begin = self.begin(at.microbatches)
        at.lanes = {}
        for lane in self.needed_lanes(at.ownership, at.plan.config.dp_rank):
            microbatches = microbatches_before(lane, begin, lanes)
            if isinstance(at.plan.blend, BucketBlend):
                draws = at.plan.blend.leaf_draws(lane, microbatches)
                at.lanes[lane] = LaneState(microbatches, sum(draws), 0, tuple(draws))
                continue
            draw = microbatches * at.plan.data.rows
            leaf_draws, sums = standing(at.plan.leaves, at.plan.blend, lane, draw)
            at.lanes[lane] = LaneState(microbatches, draw, 0, tuple(leaf_draws), sums=sums)

    def delivered(self, at: Position) -> frozenset[int]:
        leaves = range(len(at.plan.leaves))
        return frozenset(leaf for leaf in leaves if any(state.leaf_draws[leaf] for state in at.lanes.values()))

    def first_banned(self, at: Position, from_draw: int | None) -> int:
        lanes = at.plan.num_lanes
        if at.plan.data.buckets is not None:
            if from_draw is not None:
                raise ConfigurationError("ban: draws have no common number with group_by: leave out from_draw")
            return 0  # draws that were made are not taken back
        first = min(at.lane_state(lane).draw * lanes + lane for lane in at.own_lanes)
        if from_draw is None:
            return at.agreed("ban", first, min)
        if 0 < from_draw < first:
            logger.warning(
                "ban: the lanes of this rank have made all draws before global draw %d, so from_draw=%d bans from "
                "there on; draws that were made are not taken back",
                *(first, from_draw),
            )
        return from_draw


class PassMode(Mode):
    """A pass over the data: validation, which begins again each time, or training that ends."""

    def needed_lanes(self, ownership: Ownership, rank: int) -> range:
        return range(0)

    def units(self, at: Position, began: int) -> Iterator[tuple[int, int]]:
        config = at.plan.config
        ranks, workers = config.dp_size, config.processes
        steps, turn = range(at.microbatches, at.end, ranks), (at.microbatches - began) // ranks
        return ((unit, (number + turn) % workers) for unit, number in step_units(steps, config.dp_rank, workers))

    def stream(self, at: Position, pipeline: Pipeline) -> Stream:
        listing, order = at.listing, at.plan.order_of_pass
        draws = at.plan.draws_of_pass(at.epoch) if order is None else order.draws
        number_of = None if order is None else order.sample_number
        rows = DrawnRows(pipeline, draws, number_of) if listing is None else ListedRows(pipeline, listing)
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
            at.epoch, step, empty = at.epoch + 1, step - steps, 0 if steps else empty + 1
            if empty == _EMPTY_PASSES:
                at.epoch = at.microbatches = at.epoch_steps = 0
                raise ConfigurationError(
                    f"start_at: the run has no {step} steps more: {empty} passes in a row have no microbatch. Set "
                    "batch_drop_last=False, or a smaller batch_size"
                )
        at.microbatches = min(step * ranks, at.end)

    def delivered(self, at: Position) -> frozenset[int]:
        # After a run on other ranks, another rank may hold these counts.
        begins = not (at.microbatches or at.epoch or any(map(any, at.counts)))
        return frozenset() if begins else frozenset(range(len(at.plan.leaves)))

    def first_banned(self, at: Position, from_draw: int | None) -> int:
        data, draws = at.plan.data, at.plan.draws_of_pass(at.epoch)
        if not data.shuffled:  # nothing depends on earlier microbatches, so it may hold from the beginning
            return draws.first
        if data.listed:  # the rows of a pass that has begun are fixed
            return max(from_draw or 0, draws.first + (draws.num_draws if at.microbatches else 0))
        first = draws.first + min(at.microbatches * data.rows, draws.num_draws)
        return first if from_draw is None else from_draw
