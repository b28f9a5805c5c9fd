"""Which samples a step delivers: names from arithmetic, without reading any data.

The draws of a microbatch follow from a position of its lane: the beginning of the run, or a saved state. From there on
every draw is taken to give one sample, but those that are banned. Code that skips, packs or yields several moves what
comes later, and so do samples in `exclude`; `assumption` says what an answer rests on.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from energon_bridge.core.errors import ConfigurationError, KeyIndexError, MissingRankError, StorageError
from energon_bridge.core.format.dataset import PreparedDataset
from energon_bridge.core.format.join import JoinedDataset
from energon_bridge.core.format.key_index import KeyIndex, keys_at, keys_of_shard, local_key_index
from energon_bridge.core.format.nvmeta import INDEX_SQLITE, meta_path, read_info
from energon_bridge.core.loader.saved_run import read_leaves
from energon_bridge.core.order.choose import Chooser, blend_position, plain_rounds
from energon_bridge.core.order.leaf_order import Round
from energon_bridge.core.order.rng import IntArray
from energon_bridge.core.order.topology import Ownership, first_microbatch, microbatches_before, step_of
from energon_bridge.core.storage import LocalStore
from energon_bridge.core.stream.lane_state import LaneState, SampleKey
from energon_bridge.core.stream.leaf import Leaf
from energon_bridge.tools.columns.amounts import AmountBlend
from energon_bridge.tools.forecast.planned_run import Run

# ---------------------------------------------------------------------------------------------------------------------
# Keys of samples, looked up by shard and index in the dataset's key index, if it has one. An index at a URL is copied
# to a temporary file first, if it is not too large.


_LOOKUPS_BEFORE_READING = 8
"""Lookups in a shard before all of its keys are read."""
_CACHED_SHARDS = 256
"""Shards whose keys are kept."""
_MOST_COPIED = 1 << 30
"""Bytes of a key index at a URL that are copied for it; copying more would take long, and `unknown` says so."""


class KeyNames:
    """Looks keys up; caches facts about datasets, and the keys of shards that are used often.

    Its `with` block removes copies of key indexes at its end.

    Attributes:
        unknown: Why the keys of a dataset are not known, by its path.
    """

    def __init__(self) -> None:
        self.unknown: dict[str, str] = {}
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._indices: dict[str, tuple[KeyIndex, dict[str, int]] | None] = {}
        self._asked: Counter[tuple[str, str]] = Counter()
        self._shards: dict[tuple[str, str], list[str]] = {}

    def __enter__(self) -> KeyNames:
        return self

    def __exit__(self, *error: object) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()

    def key_of(self, dataset: PreparedDataset, shard: str, index: int) -> str | None:
        """Return the key of a sample; None without a key index: shard and index name the sample, too."""
        shard_key = dataset.path, shard
        keys = self._shards.get(shard_key)
        if keys is not None:
            return keys[index] if index < len(keys) else None
        try:
            if dataset.path not in self._indices:
                self._indices[dataset.path] = None
                self._indices[dataset.path] = self._key_index(dataset)
            key_index = self._indices[dataset.path]
            if key_index is None:
                return None
            self._asked[shard_key] += 1
            if self._asked[shard_key] <= _LOOKUPS_BEFORE_READING:
                return keys_at(key_index[0], key_index[1][shard], [index])[0]
            if len(self._shards) == _CACHED_SHARDS:
                del self._shards[next(iter(self._shards))]
            keys = self._shards[shard_key] = keys_of_shard(key_index[0], key_index[1][shard])
            return keys[index] if index < len(keys) else None
        except (KeyIndexError, StorageError) as error:
            self.unknown.setdefault(dataset.path, str(error))
            return None

    def _key_index(self, dataset: PreparedDataset) -> tuple[KeyIndex, dict[str, int]] | None:
        """Return a dataset's key index and the numbers of its shards in it."""
        store = dataset.store
        if dataset.key_format is not None:
            return None
        rel = meta_path(INDEX_SQLITE)
        if not store.exists(rel):
            self.unknown[dataset.path] = (
                f"{dataset.path} has no key index: `energon prepare --tar-index-only {dataset.path}` writes one"
            )
            return None
        scratch = ""
        if not isinstance(store, LocalStore):
            if (size := store.size(rel)) > _MOST_COPIED:
                self.unknown[dataset.path] = (
                    f"the key index of {dataset.path} is not copied here for its {size:,} bytes: run this on a copy of "
                    "the dataset, or look the shard and the number in it up there"
                )
                return None
            self._scratch = self._scratch or tempfile.TemporaryDirectory(prefix="energon-keys-")
            scratch = str(Path(self._scratch.name) / f"{len(self._indices)}.sqlite")
        numbers = {shard: number for number, shard in enumerate(read_info(store).shard_counts)}
        return local_key_index(store, scratch), numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedSample:
    """One sample of a microbatch.

    Attributes:
        row: Its number in the microbatch.
        path, split_part: The dataset or join.
        shard: Its shard, a path relative to the dataset (of a join: the primary).
        shard_index: Its number in the shard.
        index: Its number in the split part, of a join the row.
        epoch: How often the leaf has been gone through before.
        key: Its key, if it was looked up and the dataset has a key index; else None.
        excluded: Whether `exclude` lists it (None if the key is not known): then it is skipped.
        restore_key: What `restore_sample` takes.
    """

    row: int
    path: str
    split_part: str
    shard: str
    shard_index: int
    index: int
    epoch: int
    key: str | None
    excluded: bool | None
    restore_key: SampleKey


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedMicrobatch:
    """What a rank delivers in a step; a masked microbatch has no number, no lane and no samples of its own."""

    rank: int
    microbatch: int | None
    lane: int | None
    samples: tuple[NamedSample, ...]


def name_steps(run: Run, steps: Iterable[int], keys: KeyNames | None = None) -> Iterator[list[NamedMicrobatch]]:
    """Name the samples of steps of the optimizer, for every rank.

    Args:
        steps: Numbers of steps, from 0: steps of the optimizer since the beginning of the run, as if on this number of
            ranks; of validation, microbatches of each rank since the beginning of the pass.
        keys: Looks keys up, which takes most of the time; None: they are not named.

    Raises:
        ConfigurationError: There is no such step, or the state was saved between two steps of this number of ranks.
        MissingRankError: The state has not the lanes that are needed.
    """
    if run.spec.ends:
        of_pass = _SampleNames(run.plan.leaves, keys)
        for step in steps:
            yield _finite_step(run, step, of_pass)
        return
    names = _RunNames(run, keys)
    for step in steps:
        turns = range(step * run.per_step, (step + 1) * run.per_step)
        yield [one for turn in turns for one in _endless_turn(run, turn, names)]


def _endless_turn(run: Run, turn: int, names: _RunNames) -> list[NamedMicrobatch]:
    """Name the microbatch of each rank in turn `turn`, from 0: a turn is one microbatch on every rank."""
    lanes = run.num_lanes
    ranks = run.world_size
    m = first_microbatch(turn, num_lanes=lanes, world_size=ranks)
    saved = run.microbatches
    if first_microbatch(step_of(saved, num_lanes=lanes, world_size=ranks), num_lanes=lanes, world_size=ranks) != saved:
        raise ConfigurationError(
            f"the state is at microbatch {saved}, where no step of {ranks} ranks starts ({lanes} lanes): the run has "
            "changed its number of ranks. Ask for a microbatch of the run (--microbatch), or give the number of ranks "
            "that it was saved with (--world-size)"
        )
    ownership = Ownership(lanes, ranks, m)
    delivered = []
    for rank in range(ranks):
        lane = ownership.lane_in_step(rank, m)
        if lane is None:
            delivered.append(NamedMicrobatch(rank=rank, microbatch=None, lane=None, samples=()))
        else:
            delivered.append(names.microbatch(m + (lane - m) % lanes, rank))
    return delivered


def name_microbatch(run: Run, m: int, keys: KeyNames | None = None) -> NamedMicrobatch:
    """Name the samples of microbatch m of an endless run, whichever rank delivers it (given as the rank -1)."""
    if run.spec.ends:
        raise ConfigurationError("only endless training has microbatches of a run; give a step")
    return _RunNames(run, keys).microbatch(m, -1)


_EXACT = "`energon preview --step N --encoder …` gives the exact answer: it runs the task encoder, and reads the data."


def assumption(run: Run, m: int) -> str:
    """Return in one line what the names of microbatch m and its step assume."""
    datasets = (leaf.dataset for leaf in run.spec.leaves)
    excluded = sum(len(one.excluded) for one in datasets if not isinstance(one, JoinedDataset))
    listed = f" ({excluded:,} samples are listed in `exclude`)" if excluded else ""
    if run.spec.ends:
        return f"Exact: nothing moves in a pass, samples that are skipped{listed} are missing from their batch."
    if run.state is None:
        return (
            f"As if no sample had been skipped, and each gave one: skipping, packing or generators move them{listed}. "
            f"{_EXACT}"
        )
    counts = [leaf["counts"] for leaf in read_leaves(run.state)]
    skipped = sum(count["skipped"] + count["errors"] + count["excluded"] for count in counts)
    banned = sum(count["banned"] for count in counts)
    moves = [int(s.draw - s.microbatches * run.spec.rows) for s in run.lanes.values()]
    moved = sum(moves) - banned
    bans = any(leaf.bans is not None for leaf in run.plan.leaves)
    sofar = f"until the state {skipped:,} were skipped"
    if m >= run.microbatches:
        return (
            f"From where the lanes of the state stand; as if no sample from there on is skipped{listed}; {sofar}. "
            f"{_EXACT}"
        )
    even = not moved and min(moves, default=0) >= 0 and not any(s.taken for s in run.lanes.values())
    if not skipped and even and bans:
        return (
            f"Exact, but for banned samples that had come already where lanes were ahead of a ban: until the state "
            f"{banned:,} draws were banned, no other sample was skipped, and each other draw gave one."
        )
    if not skipped and even:
        return "Exact: until the state no sample was skipped, and each draw gave one."
    return (
        f"By arithmetic from the beginning, as if no sample had been skipped, and each gave one; {sofar}, and "
        f"its lanes have made {moved:,} draws more than rows: what was really delivered lies up to that far off. "
        f"{_EXACT}"
    )


class _RunNames:
    """Names samples of an endless run."""

    def __init__(self, run: Run, keys: KeyNames | None) -> None:
        self._run = run
        self._sample_names = _SampleNames(run.plan.leaves, keys)
        self._round_cache = plain_rounds(run.plan.leaves)
        # By lane, where draws depend on those before (bans, amounts): the microbatch from which the draws were counted,
        # the next one that they give, and the draws. So microbatches asked for in order are counted once.
        self._walks: dict[int, tuple[int, int, UnbannedDraws]] = {}
        bans = any(leaf.bans is not None for leaf in run.plan.leaves)
        self._is_walked = bans or isinstance(run.plan.blend, AmountBlend)

    def _moved(self, lane: int, start: LaneState, m: int) -> LaneState:
        """Return the position of a lane before microbatch m, by arithmetic from an earlier one."""
        number = microbatches_before(lane, m, self._run.num_lanes)
        blend = self._run.plan.blend
        draw = start.draw + (number - start.microbatches) * self._run.spec.rows
        if draw == start.draw:
            return replace(start, microbatches=number, taken=0)
        leaves = self._run.plan.leaves
        before, after = (blend_position(leaves, blend, lane, at - start.origin).leaf_draws for at in (start.draw, draw))
        leaf_draws = np.array(start.leaf_draws) + after - np.array(before)
        return LaneState(number, draw, 0, tuple(leaf_draws.tolist()), start.origin)

    def microbatch(self, m: int, rank: int) -> NamedMicrobatch:
        lane = m % self._run.num_lanes
        rows = self._run.spec.rows
        start = self._start(lane, m)
        number = microbatches_before(lane, m, self._run.num_lanes)
        if self._is_walked:
            first, at, draws = self._walks.get(lane) or (-1, 0, None)
            if draws is None or first != start.microbatches or at > number:
                first = at = start.microbatches
                draws = self._draws(lane, start, start.taken)
            for _ in range(at, number):
                draws.take(rows)
            self._walks[lane] = first, number + 1, draws
        else:
            draws = self._draws(lane, self._moved(lane, start, m), 0 if number > start.microbatches else start.taken)
        members = draws.take(rows)
        samples = (self._sample_names.of(row, *member) for row, member in enumerate(members.tolist()))
        return NamedMicrobatch(rank=rank, microbatch=m, lane=lane, samples=tuple(samples))

    def _draws(self, lane: int, at: LaneState, taken: int) -> UnbannedDraws:
        blend = self._run.plan.blend
        chooser = Chooser(self._round_cache, blend, lane, at.blend_position)
        return UnbannedDraws(chooser, taken)

    def _start(self, lane: int, m: int) -> LaneState:
        """Return a position of a lane not after microbatch m, to count from: that of the state, or the beginning."""
        run = self._run
        if m >= run.microbatches and run.state is not None:
            if lane not in run.lanes:
                raise MissingRankError(
                    f"the state holds {len(run.lanes)} of {run.num_lanes} lanes, but not lane {lane}, which delivers "
                    f"microbatch {m}: give the states of all ranks"
                )
            return run.lanes[lane]
        if not self._is_one_mix:
            raise ConfigurationError(
                f"microbatch {m} is before the state (microbatch {run.microbatches}), and the mix changed in between: "
                "use a state from before the change, or the mix that the run had then"
            )
        return LaneState.fresh(len(run.plan.leaves))

    @cached_property
    def _is_one_mix(self) -> bool:
        """Whether the lanes of the state have drawn from each leaf as often as under this mix from the beginning on."""
        leaves = self._run.plan.leaves
        blend = self._run.plan.blend
        return all(
            not state.origin and [*state.leaf_draws] == blend_position(leaves, blend, lane, state.draw).leaf_draws
            for lane, state in self._run.lanes.items()
        )


_FEWEST, _MOST = 32, 256
"""Draws looked up at a time: few at first, since there are many lanes, then twice as many each time."""


class UnbannedDraws:
    """The draws of a lane that are not banned, looked up many at a time.

    Args:
        chooser: Chooses from a position on.
        taken: Outputs taken already of the first draw, which is then under way and not asked for bans.
    """

    def __init__(self, chooser: Chooser[Round], taken: int) -> None:
        self._chooser = chooser
        self._taken = taken
        self._at_once = _FEWEST
        self._members: IntArray = np.zeros((0, 4), dtype=np.int64)  # looked up and not taken

    def take(self, wanted: int) -> IntArray:
        """Return the next `wanted` members, shape (wanted, 4): leaf, sample, epoch, and outputs taken of it."""
        while len(self._members) < wanted:
            self._look_up(wanted)
        members = self._members[:wanted]
        self._members = self._members[wanted:]
        return members

    def _look_up(self, wanted: int) -> None:
        members, banned = self._chooser.picks(max(self._at_once, wanted))
        self._at_once = min(_MOST, 2 * self._at_once)
        if self._taken:
            members[0, 3] = self._taken
            self._taken = 0
            if banned is not None:
                banned[0] = False
        self._members = np.concatenate((self._members, members if banned is None else members[~banned]))


class _SampleNames:
    """Names samples by leaf and index."""

    def __init__(self, leaves: tuple[Leaf, ...], keys: KeyNames | None) -> None:
        self._leaves = leaves
        self._ends = [np.cumsum(leaf.dataset.datasets[0].shard_counts) for leaf in leaves]
        self._keys = keys

    def of(self, row: int, leaf: int, index: int, epoch: int, output: int = 0) -> NamedSample:
        whole = self._leaves[leaf].dataset
        ends = self._ends[leaf]
        dataset = whole.datasets[0]  # of a join the primary
        place = int(whole.rows[index, 0]) if isinstance(whole, JoinedDataset) else index
        number = int(np.searchsorted(ends, place, side="right"))
        shard = dataset.shard_names[number]
        local = place - int(ends[number] - dataset.shard_counts[number])
        key = None
        if dataset.key_format is not None:
            key = dataset.key_format.format(place)
        elif self._keys is not None:
            key = self._keys.key_of(dataset, shard, local)
        return NamedSample(
            row=row,
            path=whole.path,
            split_part=whole.split_part,
            shard=shard,
            shard_index=local,
            index=index,
            epoch=epoch,
            key=key,
            excluded=(shard, key) in dataset.excluded if key is not None or not dataset.excluded else None,
            restore_key=(self._leaves[leaf].identity, index, epoch, output),
        )


def _finite_step(run: Run, step: int, names: _SampleNames) -> list[NamedMicrobatch]:
    """Name the samples of a step of a pass, of training passes counted from the first one on."""
    spec = run.spec
    plan = run.plan
    ranks = run.world_size
    asked = step
    epoch = 0
    if (other := spec.settings.conventions.stands_for) is not None:
        raise ConfigurationError(f"cannot name the steps of a pass for a loader of the drop-in of {other}")
    draws = plan.draws_of_pass(epoch)
    end = spec.end(draws.num_draws, ranks)
    while step >= (steps := -(-end // ranks)):
        if not spec.shuffled or not steps:
            raise ConfigurationError(
                f"a pass has {steps} steps on {ranks} ranks, numbered from 0; there is no step {asked}"
            )
        epoch += 1
        step -= steps
        draws = plan.draws_of_pass(epoch)
        end = spec.end(draws.num_draws, ranks)
    delivered = []
    for rank in range(ranks):
        m = step * ranks + rank
        start = m * spec.rows
        stop = min((m + 1) * spec.rows, draws.num_draws)
        if m >= end:
            delivered.append(NamedMicrobatch(rank=rank, microbatch=None, lane=None, samples=()))
            continue
        members, banned = draws.picks(start, stop)
        members = members if banned is None else members[~banned]
        samples = tuple(names.of(row, *member) for row, member in enumerate(members.tolist()))
        delivered.append(NamedMicrobatch(rank=rank, microbatch=m, lane=None, samples=samples))
    return delivered
