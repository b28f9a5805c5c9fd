"""How far a run gets in every leaf: closed forms of the order, nothing is simulated or read.

Draws are those of a run in which no sample is skipped; a skipped sample makes its lane draw one more. In a blend by
amounts they are about those: as if each dataset's samples had their mean amount.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set as AbstractSet
from dataclasses import dataclass
from fractions import Fraction
from operator import attrgetter

import numpy as np

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.mix import TreeNode
from energon_bridge.core.mix.schedule import plain_number
from energon_bridge.core.mix.tree import BlendNode, EpochizedNode, JoinRef, LeafRef
from energon_bridge.core.order.choose import OpenRounds, OrderedLeaf, blend_position
from energon_bridge.core.order.leaf_order import LeafOrder
from energon_bridge.core.order.rng import FloatArray, IntArray
from energon_bridge.core.order.topology import Ownership, first_microbatch, microbatches_before, step_of
from energon_bridge.tools.columns.amounts import AmountBlend
from energon_bridge.tools.forecast.planned_run import Run

_FAR = 1 << 40
"""Steps beyond which nobody asks when a dataset ends."""
_LANES_LOOKED_AT = 64
"""Lanes, over all leaves, whose draws are looked at to tell how well a leaf is shuffled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeafForecast:
    """How far a run gets in one leaf.

    Attributes:
        identity, path, split_part, subset: The leaf; `subset` is "start:stop", or empty.
        num_samples: Samples of it.
        written: Its weight or repetitions as the mix has them, from the outermost blend inwards.
        share: Its part of all draws at the beginning of the run.
        amount, amount_share: In a blend by amounts: about how much of its unit is drawn, and its weight when the run
            begins; None otherwise.
        draws: Samples of it that are drawn.
        epochs: How often it is gone through.
        bytes: About how many bytes of it are read.
        mixing: How well its samples are shuffled, from 0 to 1 (`mixing`); None if it keeps its own order.
    """

    identity: str
    path: str
    split_part: str
    subset: str
    num_samples: int
    written: str
    share: float
    draws: int
    epochs: float
    bytes: int
    mixing: float | None
    amount: float | None = None
    amount_share: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SharePoint:
    """The weights of the leaves, in order of the mix and with sum 1, at a global draw and the step that it falls in."""

    global_draw: int
    step: int
    shares: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """How far a run gets in some steps.

    Attributes:
        steps, per_step, world_size, num_lanes, batch_size: Of the run; `per_step` microbatches of a rank are a step.
        lanes_because: Why it has so many lanes.
        masked_share: Share of the delivered microbatches that are masked, as the ranks do not divide the lanes.
        even_world_size: The nearest number of ranks that would mask none.
        mode: How the leaves are combined.
        unit: What weights are shares of, such as `tokens`; None: draws.
        microbatches: Real ones, all ranks together.
        draws: Samples drawn, all ranks together.
        num_samples: Samples of all leaves, each once.
        leaves: In order of the mix.
        mix_epoch: Draws in an epoch of a mix by repetitions or of a concatenation (on average, where repetitions
            are fractions); None in the other modes.
        schedule: The shares at the beginning, at the points of schedules and at the end; empty if they never change.
        first_end: Step after which the first leaf has been gone through, None if that is too far ahead.
        ends_first: The leaves that end there, as places in `leaves`.
        mixing: That of the shuffled leaves on average, by their draws; None if none is shuffled.
    """

    steps: int
    per_step: int
    world_size: int
    num_lanes: int
    lanes_because: str
    masked_share: float
    even_world_size: int
    batch_size: int | None
    mode: str
    unit: str | None
    microbatches: int
    draws: int
    num_samples: int
    leaves: tuple[LeafForecast, ...]
    mix_epoch: float | None
    schedule: tuple[SharePoint, ...]
    first_end: int | None
    ends_first: tuple[int, ...]
    mixing: float | None


def forecast(run: Run, steps: int) -> Forecast:
    """Forecast how far an endless run gets in some steps of the optimizer from its beginning.

    Raises:
        ConfigurationError: The stream is not endless.
    """
    spec = run.spec
    plan = run.plan
    ranks = run.world_size
    if spec.ends:
        raise ConfigurationError(
            "forecasts are for endless training; in a pass, the mix says how often each dataset is read"
        )
    ownership = Ownership(plan.num_lanes, ranks, 0)
    counts = draws_per_leaf(run, steps)
    sizes = np.array([leaf.num_samples for leaf in spec.ordered])
    order = _order_of_mix(run)
    shares = _shares(run, 0)
    weights = _weights(run, 0) if spec.unit else None
    leaves = []
    looked_at = max(1, min(plan.num_lanes, _LANES_LOOKED_AT // len(spec.leaves)))
    for leaf, number, written in zip(spec.leaves, order, _written(run), strict=True):
        row = plan.rows[number]
        drawn = int(counts[number])
        mean = Fraction(int(leaf.dataset.shard_sizes.sum()), leaf.dataset.num_samples)
        leaves.append(
            LeafForecast(
                **{name: row[name] for name in ("identity", "path", "split_part", "subset", "num_samples")},
                written=written,
                share=shares[number],
                draws=drawn,
                epochs=drawn / leaf.num_samples,
                bytes=int(drawn * mean),
                mixing=None if leaf.shuffle_epochs is None else mixing(plan.leaves[number].order, looked_at),
                amount=None if leaf.amounts is None else drawn * leaf.amounts.mean(leaf.num_samples),
                amount_share=None if weights is None else weights[number],
            )
        )
    mixed = [(leaf.share, leaf.mixing) for leaf in leaves if leaf.mixing is not None and leaf.share]
    first_end = _first_end(run, sizes)
    ended = draws_per_leaf(run, first_end) >= sizes if first_end is not None else np.zeros(len(order), dtype=bool)
    return Forecast(
        steps=steps,
        per_step=run.per_step,
        world_size=ranks,
        num_lanes=plan.num_lanes,
        lanes_because=_why(run),
        masked_share=ownership.masked_share,
        even_world_size=ownership.nearest_even_world_size(),
        batch_size=spec.settings.batch_size,
        mode=spec.mode,
        unit=spec.unit,
        microbatches=first_microbatch(steps * run.per_step, num_lanes=plan.num_lanes, world_size=ranks),
        draws=int(counts.sum()),
        num_samples=spec.num_samples,
        leaves=tuple(leaves),
        mix_epoch=float(sum(spec.epoch_samples)) if spec.mix.mode in ("repetitions", "concat") else None,
        schedule=_schedule(run, steps, int(counts.sum()), order),
        first_end=first_end,
        ends_first=tuple(place for place, number in enumerate(order) if ended[number]),
        mixing=sum(share * value for share, value in mixed) / sum(share for share, _ in mixed) if mixed else None,
    )


def draws_per_leaf(run: Run, steps: int) -> IntArray:
    """Return the draws of each leaf, in order of identity, in the first steps of a run, shape (leaves,)."""
    lanes = run.num_lanes
    m = first_microbatch(steps * run.per_step, num_lanes=lanes, world_size=run.world_size)
    draws = [round(microbatches_before(lane, m, lanes) * run.samples_per_batch) for lane in range(lanes)]
    leaves = run.plan.leaves
    blend = run.plan.blend
    if isinstance(blend, AmountBlend):
        ends = np.rint(np.cumsum(expected_draws(blend, leaves, sum(draws)))).astype(np.int64)
        return ends - np.concatenate(([0], ends[:-1]))
    return np.sum([blend_position(leaves, blend, lane, draw).leaf_draws for lane, draw in enumerate(draws)], axis=0)


def _first_end(run: Run, sizes: IntArray) -> int | None:
    """Return the first step after which any leaf has been drawn from as often as it has samples."""
    high = 1
    while not (draws_per_leaf(run, high) >= sizes).any():
        high *= 2
        if high > _FAR:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if (draws_per_leaf(run, middle) >= sizes).any():
            high = middle
        else:
            low = middle
    return high


def _shares(run: Run, global_draw: int) -> list[float]:
    """Return the part of the draws that each leaf gets, in order of identity."""
    spec = run.spec
    if spec.mode == "weights":
        weights = _weights(run, global_draw)
        if spec.unit is None:
            return weights
        means = [leaf.amounts.mean(leaf.num_samples) for leaf in spec.ordered if leaf.amounts is not None]
        draws = [weight / mean for weight, mean in zip(weights, means, strict=True)]
        return [one / math.fsum(draws) for one in draws]
    epoch = sum(spec.epoch_samples)
    return [float(samples / epoch) for samples in spec.epoch_samples]


def _weights(run: Run, global_draw: int) -> list[float]:
    """Return the weights of a blend, in order of identity; they add up to 1."""
    weights = [float(weight) for weight in run.spec.weights.at(global_draw)]
    return [weight / math.fsum(weights) for weight in weights]


def share_curve(run: Run, steps: int) -> tuple[SharePoint, ...]:
    """Return the shares at evenly spaced draws of a run and at the points of its schedules; empty if they never change.

    The leaves are in order of the mix, the points in that of steps, of which global draws are made in another.
    """
    draws = int(draws_per_leaf(run, steps).sum())
    curve = _schedule(run, steps, draws, _order_of_mix(run), {draws * number // 64 for number in range(64)})
    return tuple(sorted((point for point in curve if point.step <= steps), key=attrgetter("step")))


def _order_of_mix(run: Run) -> list[int]:
    """Return for each leaf of the mix its place in order of identity."""
    rank = {leaf.identity: number for number, leaf in enumerate(run.spec.ordered)}
    return [rank[leaf.identity] for leaf in run.spec.leaves]


def _schedule(
    run: Run, steps: int, draws: int, order: list[int], between: AbstractSet[int] = frozenset()
) -> tuple[SharePoint, ...]:
    """Return the shares at the beginning, at each point of a schedule and at the end, and at the draws `between`."""
    if run.spec.mode != "weights" or not run.spec.mix.is_scheduled:
        return ()
    lanes = run.num_lanes
    curve = []
    for point in sorted({0, *(point for point in run.spec.weights.points() if point < draws), draws} | between):
        # Lane point % lanes makes this draw as its draw number point // lanes, for the microbatch m of the run.
        m = int(point // lanes / run.samples_per_batch) * lanes + point % lanes
        shares = _weights(run, point)
        turn = step_of(m, num_lanes=lanes, world_size=run.world_size)
        step = steps if point == draws else turn // run.per_step
        curve.append(SharePoint(global_draw=point, step=step, shares=tuple(shares[number] for number in order)))
    return tuple(curve)


def _written(run: Run) -> list[str]:
    """Return the weights and repetitions of each leaf as the mix has them, from the outermost blend inwards."""

    def below(node: TreeNode, around: tuple[str, ...]) -> list[str]:
        if isinstance(node, (LeafRef, JoinRef)):
            return [" · ".join(around)]
        own = [""] * len(node.children)
        if isinstance(node, BlendNode):
            own = [str(weight) for weight in node.weights]
        elif isinstance(node, EpochizedNode):
            own = [f"× {plain_number(repetitions)}" for repetitions in node.repetitions]
        return [
            text
            for child, note in zip(node.children, own, strict=True)
            for text in below(child, (*around, note) if note else around)
        ]

    return below(run.spec.mix.root, ())


def _why(run: Run) -> str:
    """Return the reason for the run's number of lanes (`default_num_lanes`), as text."""
    config = run.plan.config
    if config.num_lanes is not None:
        return "as given"
    if config.microbatches_per_global_batch is not None:
        group = config.microbatches_per_global_batch
        return f"fits every number of ranks that divides the {group} microbatches of a global batch"
    return f"a multiple of 24 and of the world size {config.dp_size}"


_PARTS = 10
_DRAWS = 32
_TIMES = 8
"""Of `mixing`: parts of a dataset, draws in a row, and how many such rows are looked at in each lane."""


def mixing(order: LeafOrder, lanes: int) -> float:
    """Return how well the order of a leaf mixes, from 0 to 1, looked at in some lanes of the first epoch.

    Cut the dataset into ten equal parts, as if it were sorted by ten classes. Of 32 draws that a lane makes in a row,
    count the parts that they come from, and divide by what 32 independent draws would have on average (9.66 of 10 where
    there are samples enough). 1 is a perfect shuffle; 0.1 means that every microbatch of sorted data comes from one
    class. No sample is read.
    """
    n = order.num_samples
    shares = np.bincount(np.arange(min(n, _PARTS)) * _PARTS // min(n, _PARTS), minlength=_PARTS) / min(n, _PARTS)
    ideal = float((1 - (1 - shares) ** _DRAWS).sum())
    distinct = []
    for lane in range(0, order.num_lanes, -(-order.num_lanes // lanes)):
        rounds, _ = OpenRounds(order, lane, lambda one: one, 1).at(0, _DRAWS * _TIMES)
        samples = rounds.indices[: _DRAWS * _TIMES]
        places = samples - order.first_sample if order.kept is None else np.searchsorted(order.kept, samples)
        parts = places * _PARTS // n
        distinct += [np.unique(drawn).size for drawn in parts.reshape(_TIMES, _DRAWS)]
    return min(1.0, float(np.mean(distinct)) / ideal)


def expected_draws(blend: AmountBlend, leaves: Sequence[OrderedLeaf], draws: int) -> FloatArray:
    """Return about how many of the first global draws come from each leaf, by the mean amounts of their samples."""
    total = np.zeros(len(leaves))
    sizes = np.array([leaf.order.num_samples for leaf in leaves], dtype=np.float64)
    amounts = np.array([leaf.amounts.total for leaf in leaves if leaf.amounts is not None], dtype=np.float64)
    for piece, (start, end) in enumerate(zip(blend.starts, [*blend.starts[1:], draws], strict=True)):
        rates = np.array([float(share) for share in blend.shares[piece]]) * sizes / amounts
        total += max(0, min(end, draws) - start) * rates / rates.sum()
    return total
