"""Own shares: every rank computes the costs of all microbatches of a global batch, and loads only those it will run.

Costs and sizes of samples come from columns (`ColumnCost`), so all lanes can be planned on integers (`planned`):
each process does so by itself, all reach the same plan (`assignment`), and no communication is needed. A *unit* is
the number of a microbatch among those of its rank; worker `unit mod W` makes it.

Costs are integers, multiples of 2^-30 of the most costly sample, because sums of floats depend on the processor.

In a *window* of K global batches, the microbatches are sorted by cost and cut into K new global batches
(`assignment.divide`). The positions of the lanes are known at the beginning of a window; a state within a window
has the lanes as they were at its beginning, and the number of microbatches delivered since.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from energon_bridge.core.encoder.hooks import Hook, hook_of
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.format.join import JoinedDataset
from energon_bridge.core.format.jsonl import JsonlDataset
from energon_bridge.core.loader.document import State, sign
from energon_bridge.core.loader.fits import ABSENT, WINDOWS, mismatch, read_all
from energon_bridge.core.loader.position import Mode, Position
from energon_bridge.core.loader.run_plan import DatasetSpec, RunPlan
from energon_bridge.core.order.choose import Picks, plain_cursors
from energon_bridge.core.order.rng import fold, key_of
from energon_bridge.core.order.topology import Ownership
from energon_bridge.core.registry import load
from energon_bridge.core.stream.pipeline import PickedLoad, Pipeline
from energon_bridge.core.stream.state import LaneBatch, LaneState
from energon_bridge.core.worker_config import WorkerConfig
from energon_bridge.models.packing.packing import SAMPLES, Packer
from energon_bridge.trainers.replica.assignment import Integers, divide
from energon_bridge.trainers.replica.costs import ColumnCost
from energon_bridge.trainers.replica.planned import PlannedBatch, PlannedLane, PlanRules, SampleTable, make_planned

_RESOLUTION = 2.0**30
_ONE_OF_ONE = (Hook.ENCODE, Hook.PREENCODE, Hook.PACK, Hook.BATCH, Hook.ENCODE_BATCH)
"""Hooks that must not be generators."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing(Mode):
    """How the microbatches of a run are divided among ranks before they are loaded; each rank plans all lanes.

    Attributes:
        group: Microbatches in a global batch.
        window: Global batches in a window.
        tables: The table of each leaf, in the order of the plan.
        unit: A cost of 1 in the unit of the tables.
        packer: Packs samples; None: the encoder does not pack.
        settings: Its settings in states; empty without windows, since global batches then stay the same.
    """

    by_lane = False
    group: int
    window: int
    tables: tuple[SampleTable, ...] = field(repr=False)
    unit: float
    packer: Packer[Any] | None
    settings: Mapping[str, Any]

    @property
    def span(self) -> int:
        """Microbatches in a window."""
        return self.group * self.window

    def begin(self, microbatches: int) -> int:
        """Return the first microbatch of the window that microbatch `microbatches` is in."""
        return microbatches - microbatches % self.span

    def needed_lanes(self, ownership: Ownership, rank: int) -> range:
        return range(ownership.num_lanes)

    def units(self, at: Position, began: int) -> Iterator[tuple[int, int]]:
        config = at.plan.config
        return ((unit, unit % config.processes) for unit in itertools.count(at.microbatches // config.dp_size))

    def stream(self, at: Position, pipeline: Pipeline) -> SharedStreams:
        return SharedStreams(pipeline, self.batches(at.plan, at.lanes, self.begin(at.microbatches)), at.plan.config)

    def is_masked(self, at: Position) -> bool:
        return False

    def take(self, at: Position, item: LaneBatch) -> None:
        if item.note is not None:  # after a window, with the states of lanes
            at.lanes |= {lane: LaneState.of_plain(state) for lane, state in item.note[1].items()}

    def batches(self, plan: RunPlan, lanes: Mapping[int, LaneState], microbatches: int) -> GlobalBatches:
        """Return the global batches of a run from the beginning of a window on (see `GlobalBatches`)."""
        rules = PlanRules(
            leaves=plan.leaves,
            blend=plan.blend,
            tables=self.tables,
            rows=plan.data.rows,
            packer=self.packer,
            buffer_size=plan.data.settings.packing_buffer_size or 0,
            num_lanes=plan.num_lanes,
            packs_by_epoch=plan.packs_by_epoch,
        )
        ranks = plan.config.dp_size
        seed = plan.config.run_seed
        return GlobalBatches(self, rules, plan.num_lanes, ranks, seed, lanes, microbatches)


def why_unplanned(data: DatasetSpec) -> str | None:
    """Return the reason why a stream cannot be planned from columns; None if it can."""
    encoder = data.settings.task_encoder
    if (other := data.settings.conventions.stands_for) is not None:
        return f"the loader stands in for {other}"
    if data.settings.max_tokens_per_microbatch is not None:
        return "max_tokens_per_microbatch makes microbatches of the lengths of encoded samples"
    if data.buckets is not None:
        return "microbatches come from buckets (group_by), in which they are alike"
    if data.grouped:
        return f"{type(encoder).__name__} batches by groups (batch_group_criterion)"
    for hook in _ONE_OF_ONE:
        if inspect.isgeneratorfunction(inspect.unwrap(hook_of(encoder, hook))):
            return f"{hook.title} of {type(encoder).__name__} is a generator, which may yield several of one"
    for leaf in data.ordered:
        dataset = leaf.dataset
        if isinstance(dataset, JoinedDataset | JsonlDataset):
            kind = "join" if isinstance(dataset, JoinedDataset) else "JSONL file"
            return f"{dataset.path} is a {kind}, which has no columns"
        if dataset.excluded:
            return f"{dataset.path} excludes samples by their keys (`exclude`): filter them out by a column instead"
    return None


def sharing_of(data: DatasetSpec, group: int, cost: ColumnCost, window: int) -> Sharing:
    """Read the columns that a cost names, and return how a run is divided by them.

    Raises:
        ConfigurationError, MetadataError: A column is missing or not numeric, or sizes do not fit the packer.
    """
    packer = None
    if data.settings.packing_buffer_size is not None:
        packer = cost.packer or getattr(data.settings.task_encoder, "packer", None)
        if not isinstance(packer, Packer):
            raise ConfigurationError(
                f"ColumnCost: {type(data.settings.task_encoder).__name__} packs, but has no `packer` to plan packs "
                "with: pass ColumnCost(packer=…), the Packer that its select_samples_to_pack uses"
            )
    drawn: dict[tuple[str, str], list[Any]] = {}
    for leaf in data.ordered:
        samples = np.arange(leaf.start, leaf.stop) if leaf.kept is None else leaf.kept
        drawn.setdefault((leaf.dataset.path, leaf.dataset.split_part), [leaf.dataset]).append(samples)
    known = {
        place: _columns(dataset, np.unique(np.concatenate(samples)), cost, packer)
        for place, (dataset, *samples) in drawn.items()
    }
    most = max(float((row + own).max()) for row, own, _ in known.values())
    tables = {place: _table(*found, most, padded=cost.padded and packer is None) for place, found in known.items()}
    return Sharing(
        group=group,
        window=window,
        tables=tuple(tables[leaf.dataset.path, leaf.dataset.split_part] for leaf in data.ordered),
        unit=_RESOLUTION / (most or 1.0),
        packer=packer,
        settings=window_settings(window, group, cost),
    )


def _columns(dataset: Any, samples: Any, cost: ColumnCost, packer: Packer[Any] | None) -> tuple[Any, Any, Any]:
    """Return the costs of each sample's tokens and patches, and its sizes; 0 of those that no leaf draws."""
    tokens = load("columns", "expressions").numbers_of_samples(
        dataset, cost.tokens, where="ColumnCost(tokens=…)", samples=samples
    )
    patches = load("columns", "expressions").numbers_of_samples(
        dataset, cost.patches, where="ColumnCost(patches=…)", samples=samples
    )
    weights = cost.weights
    row = weights.tokens * tokens + weights.attention * (tokens * tokens)
    own = weights.patches * patches
    if packer is None:
        return row, own, None
    named = [name for name in packer.limits if name != SAMPLES]
    texts = dict(cost.sizes or {}) or (dict.fromkeys(named, cost.tokens) if len(named) == 1 else {})
    if SAMPLES in packer.limits:
        texts.setdefault(SAMPLES, "1")
    if texts.keys() != packer.limits.keys():
        raise ConfigurationError(
            f"ColumnCost: the packer limits {', '.join(packer.limits)}, but sizes are given for "
            f"{', '.join(texts) or 'none of them'}: pass an expression for each, ColumnCost(sizes={{NAME: 'column'}})"
        )
    sizes = np.empty((dataset.num_samples, len(packer.limits)), dtype=np.int32)
    for column, (name, limit) in enumerate(packer.limits.items()):
        found = load("columns", "expressions").numbers_of_samples(
            dataset, texts[name], where=f"ColumnCost(sizes={{{name!r}: …}})", samples=samples
        )
        wrong = np.flatnonzero((found != np.rint(found)) | (found > limit))
        if wrong.size:
            raise ConfigurationError(
                f"ColumnCost: sample {wrong[0]} of {dataset.path} has {found[wrong[0]]:g} {name} by {texts[name]!r}; "
                f"expected a whole number of at most {limit}, the limit of a pack. Leave longer samples out "
                f'(filter="{texts[name]} <= {limit}"), or use make_balance(own_share=False)'
            )
        sizes[:, column] = found
    return row, own, sizes


def _table(row: Any, own: Any, sizes: Any, most: float, *, padded: bool) -> SampleTable:
    def whole(costs: Any) -> Integers:
        return np.rint(costs / (most or 1.0) * _RESOLUTION).astype(np.int32)

    return SampleTable(added=whole(own if padded else row + own), padded=whole(row) if padded else None, sizes=sizes)


def _text(cost: ColumnCost) -> str:
    weights = cost.weights
    return (
        f"{weights.tokens!r} * ({cost.tokens}) + {weights.attention!r} * ({cost.tokens}) ** 2 + {weights.patches!r} * "
        f"({cost.patches})" + ", padded" * cost.padded
    )


# Windows in states ---------------------------------------------------------------------------------------------------

_OF_WINDOWS = (WINDOWS, "balance_window_of", "balance_window_cost")


def window_settings(window: int, group: int, cost: ColumnCost | None = None) -> dict[str, Any]:
    """Return the settings of windows in a state: K, G, and the cost if it is known from columns."""
    if window == 1:
        return {}
    settings: dict[str, Any] = {"balance_window": window, "balance_window_of": group}
    return settings if cost is None else settings | {"balance_window_cost": _text(cost)}


def check_windows(then: State, now: Mapping[str, object]) -> None:
    """Raise for the settings of a state that was saved with other windows of balance, or none.

    Raises:
        SettingMismatchError: They differ.
    """
    for name in _OF_WINDOWS:
        before, after = (of.get(name, ABSENT.get(name)) for of in (then, now))
        if before != after:
            raise mismatch(name, before, after)


def in_window(state: State, done: int) -> State:
    """Return the state within a window, from the state at its beginning and the microbatches delivered since."""
    return sign(state | {"microbatches": state["microbatches"] + done}) if done else state


def at_window(states: Sequence[State], span: int) -> tuple[list[State], int]:
    """Return the states of some or all ranks at the beginning of a window, and the microbatches delivered of it.

    Args:
        states: States of some or all ranks.
        span: Microbatches in a window.
    """
    done = read_all(states).microbatches % span
    return [in_window(state, -done) for state in states], done


# Planning ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedBatch:
    """A global batch before it is loaded.

    Attributes:
        number: Its number in the run.
        runs: The microbatch of each rank in each round.
        figures: How even it is, as `divide` says.
        states: The states of the lanes after its window, if it is the last global batch in it.
    """

    number: int
    runs: list[list[PlannedBatch]]
    figures: tuple[float, ...]
    states: dict[int, LaneState]


class GlobalBatches:
    """The global batches of a run, planned from the positions of its lanes.

    Args:
        sharing: How the run is divided.
        rules: The rules for planning lanes.
        num_lanes, ranks, seed: Of the run.
        lanes: The states of lanes at the beginning of a window; lanes that are missing are at their beginning.
        microbatches: The first microbatch of the window.
    """

    def __init__(
        self,
        sharing: Sharing,
        rules: PlanRules,
        num_lanes: int,
        ranks: int,
        seed: int,
        lanes: Mapping[int, LaneState],
        microbatches: int,
    ) -> None:
        self.sharing = sharing
        self.rules = rules
        self._ranks = ranks
        self._key = key_of("balance window", seed)
        self._num_lanes = num_lanes
        self._fresh = LaneState.fresh(len(rules.leaves))
        self._states = lanes
        self._lanes: dict[int, PlannedLane] = {}
        self._cursors = plain_cursors(rules.leaves, most=num_lanes * len(rules.leaves))
        self._next = microbatches

    @property
    def end(self) -> int:
        """The microbatch at which the next window ends."""
        return self._next + self.sharing.span

    def next_window(self, *, states: bool = True) -> list[SharedBatch]:
        """Return the global batches of the next window, without the states after it if they are not needed."""
        sharing = self.sharing
        first = self._next
        numbers = range(first, first + sharing.span)
        self._next = numbers.stop
        batches = [self._lane(m % self._num_lanes).next() for m in numbers]
        costs: Integers = np.array([batch.cost for batch in batches], dtype=np.int64)
        divided = divide(costs, sharing.group, self._ranks, fold(self._key, first // sharing.span))
        found = [
            SharedBatch(
                number=first // sharing.group + number,
                runs=[[batches[place] for place in turn] for turn in runs.tolist()],
                figures=figures,
                states={},
            )
            for number, (runs, figures) in enumerate(divided)
        ]
        touched = {m % self._num_lanes for m in numbers} if states else ()
        found[-1] = replace(found[-1], states={lane: self._lanes[lane].state() for lane in sorted(touched)})
        return found

    def _lane(self, number: int) -> PlannedLane:
        lane = self._lanes.get(number)
        if lane is None:
            state = self._states.get(number) or self._fresh
            lane = self._lanes[number] = PlannedLane(number, self.rules, self._cursors, state)
        return lane


# Loading -------------------------------------------------------------------------------------------------------------


class SharedStreams:
    """The microbatches that one rank runs, or those of them that one process makes.

    Args:
        pipeline: Loads samples.
        batches: The global batches, from the beginning of a window on.
    """

    def __init__(self, pipeline: Pipeline, batches: GlobalBatches, config: WorkerConfig) -> None:
        self.pipeline = pipeline
        self._batches = batches
        self._rank = config.dp_rank
        self._ranks = config.dp_size
        self._workers = config.processes
        self._planned: dict[int, tuple[PlannedBatch, Any]] = {}
        self._loads: dict[int, PickedLoad] = {}

    def prepare(self, unit: int, count: int) -> None:
        self._load(unit).start(as_slab=True)

    def produce(self, unit: int) -> LaneBatch:
        item = self._make(unit)
        if unit + self._workers in self._planned:  # otherwise it would be planned while a batch is waited for
            self._load(unit + self._workers).read_ahead()
        return item

    def _make(self, unit: int) -> LaneBatch:
        load = self._load(unit)
        planned, note = self._planned[unit]
        item = make_planned(self.pipeline, planned, load, self._batches.rules)
        item.note = note
        for known in [known for known in self._planned if known <= unit]:
            self._planned.pop(known)
            self._loads.pop(known, None)
        return item

    def _load(self, unit: int) -> PickedLoad:
        load = self._loads.get(unit)
        if load is None:
            while unit not in self._planned:
                self._plan(unit % self._workers)
            load = self._loads[unit] = PickedLoad(self.pipeline, Picks(self._planned[unit][0].members))
        return load

    def _plan(self, worker: int) -> None:
        # The worker that makes the last microbatch of a window sends the states of the lanes after it.
        last = self._batches.end // self._ranks - 1
        for shared in self._batches.next_window(states=last % self._workers == worker):
            own = [turn[self._rank] for turn in shared.runs]
            for turn, batch in enumerate(own):
                note = None
                if turn == len(own) - 1:
                    cost = sum([one.cost for one in own]) / self._batches.sharing.unit
                    states = {lane: state.plain() for lane, state in shared.states.items()}
                    note = (*shared.figures, cost), states
                self._planned[shared.number * len(own) + turn] = batch, note
