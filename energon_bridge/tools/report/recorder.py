"""What happened in a run, for the report at its end (`page.py` makes it).

`RunRecorder` keeps it in memory that does not grow with the run: at most `MOST_POINTS` points of the curves, draws of
the datasets after `MOST_LOOKS` steps and `MOST_SLOW` microbatches. `summary` adds what the loader knows: datasets, what
was left out and why, times. `gathered` brings the summaries of all ranks together.
"""

from __future__ import annotations

import heapq
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice
from operator import itemgetter
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from energon_bridge.core.dataloader import EnergonDataloader
from energon_bridge.core.errors import EnergonError
from energon_bridge.core.format.dataset import PreparedDataset
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.run_data import dataset_names
from energon_bridge.core.loader.saved_run import State, read
from energon_bridge.core.mix.leaves import OpenLeaf
from energon_bridge.core.samples.sample import meta_field
from energon_bridge.core.stream.failures import FailureKind
from energon_bridge.core.stream.lane_state import COUNTERS, BatchKey, SampleKey, read_key
from energon_bridge.trainers.replica.groups import all_told

MOST_POINTS = 1000
"""Points of a curve; beyond them, neighbours become one."""
MOST_LOOKS = 200
"""Most points in the curves of draws per dataset; when there are so many, every second one is deleted."""
MOST_SLOW = 20
"""Microbatches that are named as the slowest ones, and as those with the highest losses."""
USUAL = 20
"""A loss is called high relative to the median of this many before it: the first steps have the highest ones."""
BALANCE = ("step_before", "step", "round_before", "round")
"""The figures of balance on the page, by their names in `BalancedLoader.metrics`; and `cost`, that of this rank."""
_MOST_KEYS = 8
_MOST_KEY = 200
_LOSSES_AT_ONCE = 100
"""Losses that are read from the device together, so that no step waits for it."""


HighLoss = tuple[float, float, int, int, list[str], int, list[SampleKey]]
"""The entry of a microbatch in `RunRecorder.highest`."""


class Curve:
    """A value by step, in at most `MOST_POINTS` points: step, number of values, their sum, smallest and largest."""

    def __init__(self, points: Sequence[Sequence[float]] = (), per_point: int = 1) -> None:
        self.points = [list(point) for point in points]
        self.per_point = per_point

    @classmethod
    def of(cls, values: Mapping[int, float]) -> Self:
        """Return the curve of some values by step; those that are not finite are left out."""
        curve = cls()
        for step, value in values.items():
            if math.isfinite(value):
                curve.add(step, value)
        return curve

    def add(self, step: int, value: float) -> None:
        """Add the value of a step; values that are not finite are left to `write_report` to count."""
        points = self.points
        if points and points[-1][1] < self.per_point:
            last = points[-1]
            points[-1] = [step, last[1] + 1, last[2] + value, min(last[3], value), max(last[4], value)]
            return
        if len(points) >= MOST_POINTS:
            self.per_point *= 2
            pairs = zip(points[::2], [*points[1::2], None], strict=False)
            self.points = points = [_joined(first, second) for first, second in pairs]
            if points[-1][1] < self.per_point:
                self.add(step, value)
                return
        points.append([step, 1, value, value, value])

    def plain(self) -> list[Any]:
        """Return it as plain values."""
        return [self.per_point, self.points]

    @property
    def mean(self) -> float | None:
        """The mean of all values; None if there are none."""
        count = sum(point[1] for point in self.points)
        return sum(point[2] for point in self.points) / count if count else None


def _joined(first: list[float], second: list[float] | None) -> list[float]:
    if second is None:
        return first
    sums = [a + b for a, b in zip(first[1:3], second[1:3], strict=True)]
    return [second[0], *sums, min(first[3], second[3]), max(first[4], second[4])]


class DrawCounts:
    """How much of each dataset a rank had drawn after every `every`-th optimizer step, `MOST_LOOKS` of them at most."""

    def __init__(self, looks: Sequence[tuple[int, Mapping[str, int]]] = (), every: int = 1) -> None:
        self.looks = [(step, dict(draws)) for step, draws in looks]
        self.every = every

    def look(self, loader: Any, step: int) -> None:
        """Record the draws of each dataset after every `every`-th step; `loader` is that inside `EnergonDataloader`."""
        counters = getattr(loader, "counters", None)
        if step % self.every or counters is None:
            return
        try:
            rows = counters()
        except EnergonError:  # no state within a balanced global batch
            return
        self.looks.append((step, {row["identity"]: row["draws"] or 0 for row in rows}))
        if len(self.looks) >= MOST_LOOKS:
            self.every *= 2
            self.looks = [(step, draws) for step, draws in self.looks if not step % self.every]


class RunRecorder:
    """What one rank sees of its run.

    Attributes:
        loss, waiting: Curves of the losses, and of the share of each step that was spent waiting for data.
        draws: How much of each dataset was drawn, by step.
        balance: With balance, curves of how uneven global batches are (`BALANCE`), and of this rank's cost (`cost`).
        not_finite: Steps whose loss was not a finite number.
        seconds, waited: Time spent training, and that spent waiting for data.
        slowest: The slowest microbatches: seconds, whether these are what it took to make it (else: to wait for it),
            the step, its number since this process began, its keys, and the rank that ran it; as a heap.
        highest: The rows, or microbatches, with the highest losses for their time: how far the loss lies above the
            median of the `USUAL` microbatches before it, the loss, the step, the microbatch's number, its keys, the
            rank, and restore keys of its samples.
        validation, rate: Curves of the losses of validations, and of the learning rate.
    """

    def __init__(self) -> None:
        self.loss = Curve()
        self.waiting = Curve()
        self.draws = DrawCounts()
        self.validation = Curve()
        self.rate = Curve()
        self.balance: dict[str, Curve] = {}
        self._balanced: tuple[int, list[float]] = (0, [0.0] * len(BALANCE))
        self.not_finite = 0
        self.seconds = self.waited = 0.0
        self.slowest: list[tuple[float, bool, int, int, list[str], int]] = []
        self.highest: list[HighLoss] = []
        self._before: deque[float] = deque(maxlen=USUAL)
        self._microbatches = self._rank = 0
        self._leaves: dict[str, tuple[str, OpenLeaf]] = {}  # the datasets by identity, with their names in a mix
        self._of_other = (0.0, 0.0)  # seconds and waiting that a restored state of another rank had
        self._pending: list[tuple[int, Tensor]] = []
        self._pending_batches: list[tuple[Tensor, int, int, list[str], Any]] = []
        self._marks = (0.0, 0.0)
        self._seen = (0.0, 0.0)

    def start(self, loader: EnergonDataloader | None) -> None:
        """Start the clock, at the beginning and after whatever is no training."""
        waited = 0.0 if loader is None else loader.wait_seconds
        self._marks = (time.perf_counter(), waited)
        self._seen = (waited, _make_seconds(loader) or 0.0)
        config = None if loader is None else getattr(_inner(loader), "config", None)
        rank = 0 if config is None else config.dp_rank
        if rank != self._rank:  # a state was of another rank, perhaps of one of fewer
            self._of_other = (self.seconds, self.waited)
        self._rank = rank
        spec = spec_of(loader)
        if spec is not None:
            datasets = [leaf.dataset for leaf in spec.leaves]
            named = dataset_names([one.path for one in datasets], [one.split_part for one in datasets])
            named = named if len(named) > 1 else [""]
            self._leaves = {leaf.identity: (name, leaf) for leaf, name in zip(spec.leaves, named, strict=True)}

    def microbatch(self, loader: EnergonDataloader | None, batch: Any, step: int, loss: Tensor | None = None) -> None:
        """Record the microbatch that the loader has just delivered, for the optimizer step with this number.

        Its loss, or those of its rows, may be on a device.
        """
        if loader is None:
            return
        if loss is not None:
            self.microbatch_loss(batch, step, loss, self._microbatches + 1)
        made = _make_seconds(loader)
        before = self._seen
        self._seen = (loader.wait_seconds, made or 0.0)
        took = self._seen[0] - before[0] if made is None else made - before[1]
        self._microbatches += 1
        slowest = self.slowest
        if len(slowest) < MOST_SLOW or took > slowest[0][0]:
            keys = self._named(_keys(batch), meta_field(batch, "__restore_key__"))
            entry = (took, made is not None, step, self._microbatches, keys, self._rank)
            (heapq.heappush if len(slowest) < MOST_SLOW else heapq.heapreplace)(slowest, entry)

    def step_losses(self, batches: Sequence[Any], step: int, losses: Sequence[Tensor]) -> None:
        """Record the losses of the microbatches of a step, of which the loader has delivered none since."""
        first = self._microbatches - len(batches) + 1
        for number, (batch, loss) in enumerate(zip(batches, losses, strict=True), first):
            self.microbatch_loss(batch, step, loss, number)

    def microbatch_loss(self, batch: Any, step: int, loss: Tensor, number: int) -> None:
        """Record the loss of a microbatch of a step, the `number`-th of this process, or of each row; NaN: none."""
        losses = loss.detach().reshape(-1)
        keys = _keys(batch, most=_MOST_KEYS if losses.numel() == 1 else losses.numel())
        self._pending_batches.append((losses, step, number, keys, meta_field(batch, "__restore_key__")))
        if len(self._pending_batches) >= _LOSSES_AT_ONCE:
            self._flush_batches()

    def step(
        self, loader: EnergonDataloader | None, step: int, loss: Tensor | float | None, rate: float | None = None
    ) -> None:
        """Record the end of an optimizer step, with its loss, which may be on a device, and its learning rate."""
        if rate is not None:
            self.rate.add(step, rate)
        now = time.perf_counter()
        waited = 0.0 if loader is None else loader.wait_seconds
        passed = now - self._marks[0]
        spent = waited - self._marks[1]
        self._marks = (now, waited)
        self.seconds += passed
        self.waited += spent
        if loader is not None and passed > 0:
            self.waiting.add(step, min(1.0, max(0.0, spent / passed)))
        if loader is not None:
            self.draws.look(loader.loader, step)
            self._look_at_balance(loader, step)
        if isinstance(loss, Tensor):
            self._pending.append((step, loss.detach().reshape(())))
            if len(self._pending) >= _LOSSES_AT_ONCE:
                self.flush()
        elif loss is not None:
            self.add_loss(step, loss)

    def _look_at_balance(self, loader: EnergonDataloader, step: int) -> None:
        """Note how uneven the global batches were that were exchanged since the last step."""
        balance_sums = getattr(_inner(loader), "balance_sums", None)
        if balance_sums is None:
            return
        count = balance_sums[0]
        own = balance_sums[1]
        sums = list(balance_sums[2][: len(BALANCE)])
        before = self._balanced
        self._balanced = (count, sums)
        if count <= before[0]:
            return
        values = [(after - earlier) / (count - before[0]) for after, earlier in zip(sums, before[1], strict=True)]
        for name, value in zip((*BALANCE, "cost"), (*values, own), strict=True):
            self.balance.setdefault(name, Curve()).add(step, value)

    def add_loss(self, step: int, loss: float) -> None:
        """Record a loss."""
        if math.isfinite(loss):
            self.loss.add(step, loss)
        else:
            self.not_finite += 1

    def set_losses(self, losses: Mapping[int, float]) -> None:
        """Replace the losses by those given for each step."""
        self._pending.clear()
        self.loss = Curve()
        self.not_finite = 0
        for step, loss in losses.items():
            self.add_loss(step, loss)

    def _flush_batches(self) -> None:
        """Keep those of the last microbatches that have the highest losses."""
        pending = self._pending_batches
        self._pending_batches = []
        if pending:
            values = iter(torch.cat([losses.float() for losses, *_ in pending]).tolist())
            latest: list[Any] = []
            for losses, step, number, keys, key in pending:
                rows = list(islice(values, losses.numel()))
                if finite := [value for value in rows if math.isfinite(value)]:
                    usual = statistics.median(self._before or finite)
                    for row, value in enumerate(rows):
                        if math.isfinite(value):
                            place = row if len(rows) > 1 else None
                            latest.append((value - usual, value, step, number, keys, self._rank, (key, place)))
                    self._before.append(statistics.fmean(finite))
            highest = heapq.nlargest(MOST_SLOW, [*self.highest, *latest], key=itemgetter(slice(6)))
            # Only of these few is the key read.
            self.highest = [one if isinstance(one[6], list) else self._read(one) for one in highest]

    def _read(self, entry: Any) -> HighLoss:
        """Return an entry with the samples of its microbatch, or of its row."""
        *before, keys, rank, (key, row) = entry
        part = slice(None) if row is None else slice(row, row + 1)
        return (*before, self._named(keys, key)[part], rank, _samples(key, part))

    def _named(self, keys: list[str], key: Any) -> list[str]:
        """Return the keys of the rows of a batch, in a mix with the datasets that their samples are of.

        A batch without keys gets what its restore key tells: dataset, shard and number of each sample.
        """
        try:
            named = read_key(key)
        except LookupError:
            return keys
        rows = named.rows if isinstance(named, BatchKey) else (named,)
        if not keys:
            return ["; ".join(map(self._place, row.samples[:_MOST_KEYS])) for row in rows[:_MOST_KEYS]]
        of_rows = (dict.fromkeys(self._leaves.get(sample[0], ("",))[0] for sample in row.samples) for row in rows)
        texts = (", ".join(filter(None, names)) for names in of_rows)
        said = [f"{text}: {one}" if text else one for text, one in zip(texts, keys, strict=False)]
        return said + keys[len(said) :]

    def _place(self, sample: SampleKey) -> str:
        """Return dataset, shard and number of a sample without a key."""
        identity, index, *_ = sample
        name, leaf = self._leaves.get(identity, ("", None))
        dataset = None if leaf is None else leaf.dataset
        shard = dataset.place_of(index)[0] if isinstance(dataset, PreparedDataset) else ""
        return ", ".join(filter(None, (name, shard, f"sample {index}")))

    def flush(self) -> None:
        """Read the losses that are still on the device."""
        self._flush_batches()
        if self._pending:
            values = torch.stack([loss.float() for _, loss in self._pending]).tolist()
            for (step, _), value in zip(self._pending, values, strict=True):
                self.add_loss(step, value)
            self._pending.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return what was recorded as plain values."""
        self.flush()
        curves: dict[str, Any] = {"loss": self.loss.plain(), "waiting": self.waiting.plain()}
        curves |= {"validation": self.validation.plain(), "rate": self.rate.plain(), "rank": self._rank}
        curves["high"] = [list(entry) for entry in self.highest]
        curves["balance"] = {name: curve.plain() for name, curve in self.balance.items()}
        figures = {"not_finite": self.not_finite, "seconds": self.seconds, "waited": self.waited}
        draws = {"every": self.draws.every, "looks": [[step, dict(draws)] for step, draws in self.draws.looks]}
        return curves | figures | {"slowest": [list(entry) for entry in self.slowest], "draws": draws}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.loss, self.waiting = (Curve(state[name][1], state[name][0]) for name in ("loss", "waiting"))
        self.balance = {name: Curve(points, per) for name, (per, points) in state["balance"].items()}
        self.not_finite = state["not_finite"]
        self.seconds = state["seconds"]
        self.waited = state["waited"]
        # A state from before they were recorded has no curves, and the slowest of the first rank without its number.
        self.validation, self.rate = (Curve(*state.get(name, (1, ()))[::-1]) for name in ("validation", "rate"))
        self._rank = state.get("rank", 0)
        self.highest = [
            (
                above,
                value,
                step,
                number,
                list(keys),
                rank,
                [(one[0], one[1], one[2], one[3]) for one in (samples or [[]])[0]],
            )
            for above, value, step, number, keys, rank, *samples in state.get("high", ())
        ]
        self.slowest = [
            (took, made, step, number, list(keys), *(rank or [0]))
            for took, made, step, number, keys, *rank in state["slowest"]
        ]
        self.draws = DrawCounts([(step, drawn) for step, drawn in state["draws"]["looks"]], state["draws"]["every"])
        self._pending.clear()


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetRow:
    """What a rank delivered of one dataset.

    `planned` is its part of the draws in percent, None if nothing says it; `epoch_samples` are its samples in an epoch
    of the mix. `is_gone`: it left the mix, or its content changed since.
    """

    path: str
    split_part: str
    planned: float | None
    num_samples: int
    draws: int
    counts: dict[str, int]
    identity: str = ""
    epoch_samples: float = 0.0
    is_gone: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSummary:
    """What one data-parallel rank knows at the end of its run.

    Attributes:
        rank, ranks: The data-parallel rank, and how many there are.
        seconds, waited: Time spent training, and that spent waiting for data.
        datasets: A row for each dataset of the mix, and then for those that are gone from it.
        failures: The samples that failed since the process began.
        metrics: Of the loader.
        slowest, highest: As of `RunRecorder`; those of a state that all ranks have restored are in the summary of each.
        draws: Draws of each dataset by its identity, after some steps.
        withdrawn: Those of the samples in `highest` that are banned by now: identity and index.
        cost: With balance, the mean cost of what it ran in a global batch.
    """

    rank: int
    ranks: int
    seconds: float
    waited: float
    datasets: tuple[DatasetRow, ...] = ()
    failures: tuple[FailureKind, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    slowest: tuple[tuple[float, bool, int, int, list[str], int], ...] = ()
    highest: tuple[HighLoss, ...] = ()
    draws: tuple[tuple[int, dict[str, int]], ...] = ()
    withdrawn: frozenset[tuple[str, int]] = frozenset()
    cost: float | None = None


def summary(recorder: RunRecorder, loader: EnergonDataloader | None) -> RankSummary | None:
    """Return what this rank knows; None on a rank of a replica that another rank loads for."""
    recorder.flush()
    inner = None if loader is None else _inner(loader)
    if loader is not None and inner is None:
        return None
    spec = getattr(inner, "spec", None)
    config = getattr(inner, "config", None)
    return RankSummary(
        rank=0 if config is None else config.dp_rank,
        ranks=1 if config is None else config.dp_size,
        seconds=recorder.seconds - recorder._of_other[0],
        waited=recorder.waited - recorder._of_other[1],
        datasets=() if spec is None else tuple(_datasets(inner, spec)),
        failures=() if spec is None else tuple(spec.failure_log.kinds()),
        metrics={} if loader is None else loader.metrics(),
        slowest=tuple(sorted(recorder.slowest, reverse=True)),
        highest=tuple(recorder.highest),
        draws=tuple(recorder.draws.looks),
        withdrawn=frozenset() if spec is None else _withdrawn(inner, recorder.highest),
        cost=recorder.balance["cost"].mean if recorder.balance else None,
    )


def gathered(own: RankSummary | None) -> list[RankSummary]:
    """Return the summaries of all data-parallel ranks, in order; every process of the run must call it."""
    by_rank = {one.rank: one for one in reversed(all_told(own)) if one is not None}
    return [by_rank[rank] for rank in sorted(by_rank)]


def spec_of(loader: EnergonDataloader | None) -> DatasetSpec | None:
    """Return the data of a loader; None on a rank of a replica that another rank loads for."""
    return None if loader is None else getattr(_inner(loader), "spec", None)


def _inner(loader: EnergonDataloader) -> Any:
    """Return the loader that loads; None on a rank of a replica that another rank loads for."""
    inner: Any = loader.loader
    replica = getattr(inner, "replica", None)
    if replica is None:
        return inner
    return inner.source if replica.is_source else None


def _make_seconds(loader: EnergonDataloader | None) -> float | None:
    return None if loader is None else getattr(loader.loader, "make_seconds", None)


def _keys(batch: Any, most: int = _MOST_KEYS) -> list[str]:
    keys = meta_field(batch, "__key__")
    if keys is None:
        return []
    keys = [keys] if isinstance(keys, str) else list(keys)
    more = [f"and {len(keys) - most} more"] if len(keys) > most else []
    return [str(key)[:_MOST_KEY] for key in keys[:most]] + more


def _samples(key: Any, part: slice) -> list[SampleKey]:
    """Return the keys of the first samples in rows of a batch by its restore key; none if it is of something else."""
    try:
        named = read_key(key)
    except LookupError:
        return []
    rows = named.rows[part] if isinstance(named, BatchKey) else (named,)
    return [sample for row in rows for sample in row.samples][:_MOST_KEYS]


def _datasets(loader: Any, spec: DatasetSpec) -> Iterator[DatasetRow]:
    """Yield a row for each dataset of the run; those that left the mix, or that grew since, come last."""
    rows = loader.counters()
    for row, planned in zip(rows, _planned(loader, spec, rows), strict=True):
        yield DatasetRow(
            **{name: row[name] for name in ("path", "split_part", "num_samples", "epoch_samples")},
            planned=planned,
            draws=row["draws"] or 0,
            counts={name: row[name] for name in COUNTERS},
            identity=row["identity"],
            is_gone=row["parked"],
        )


def _planned(loader: Any, spec: DatasetSpec, rows: Sequence[State]) -> list[float | None]:
    """Return the part of the draws that the mix gives each dataset, in percent."""
    if _moves(loader, spec):
        # Draws follow weights that move towards the last ones; fewer of them may be delivered.
        drawn = [0 if row["parked"] else row["draws"] or 0 for row in rows]
        total = sum(drawn)
        return [None if row["parked"] or not total else 100 * one / total for row, one in zip(rows, drawn, strict=True)]
    weighs = spec.mode in ("weights", "single")
    shares = {leaf.identity: leaf.weight if weighs else leaf.weight * leaf.num_samples for leaf in spec.leaves}
    if spec.unit is not None:  # an amount: the larger the samples, the fewer are drawn
        means = {leaf.identity: leaf.amounts.mean(leaf.num_samples) for leaf in spec.leaves if leaf.amounts is not None}
        shares = {identity: share / Fraction(means[identity]) for identity, share in shares.items()}
    total = sum(shares.values())
    return [float(100 * shares[row["identity"]] / total) if row["identity"] in shares else None for row in rows]


def _withdrawn(loader: Any, highest: Sequence[HighLoss]) -> frozenset[tuple[str, int]]:
    """Return those of some samples that are banned by now."""
    try:
        banned = read(loader.save_state_rank()).banned
    except EnergonError:  # no state within a balanced global batch
        return frozenset()
    shown = {one[:2] for *_, samples in highest for one in samples if one[0] in banned}
    return frozenset(one for one in shown if banned[one[0]].among(np.array([one[1]])).any())


def _moves(loader: Any, spec: DatasetSpec) -> bool:
    """Whether the weights change during the run: by a schedule, or because somebody has changed them."""
    if spec.mix.is_scheduled:
        return True
    try:
        return bool(read(loader.save_state_rank()).changes)
    except EnergonError:  # no state within a balanced global batch
        return False
