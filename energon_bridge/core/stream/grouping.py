"""Grouping: rows wait in groups, one per criterion, until a group is full and becomes a batch.

The state of a lane holds the waiting rows in order of arrival. After a restore, the encoder gives their groups
again when the first row is drawn. A finite pass is grouped before it begins (`finite.py`); rows left at its end
become smaller batches.

The contents of waiting rows share the byte budget of the process (`stream/budget.py`). Contents that are dropped, the
newest rows first, are encoded again when their group is full. The rows themselves have a bound, too: a lane of which
more wait than `most_waiting` stops the run, since its groups do not fill.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

from energon_bridge.core.errors import EmptyDatasetError, FatalSampleError
from energon_bridge.core.samples.sample_place import pass_on
from energon_bridge.core.stream.draws import Draws
from energon_bridge.core.stream.lane_state import BufferedRefs, Counts, Stage
from energon_bridge.core.stream.pack_buffer import Packing
from energon_bridge.core.stream.pipeline import Pipeline
from energon_bridge.core.stream.returned import shown
from energon_bridge.core.stream.rows import BatchRow, Taken, taken_of

T = TypeVar("T")

logger = logging.getLogger(__name__)

_BARREN = 1000
"""Rows without a group that are always tolerated before the stream counts as barren."""
_FEWEST, _MOST = 1000, 1 << 16
"""Rows of a lane that may wait in any case, and in no case more."""
_WARNING = 4
"""A warning comes at a fourth of them."""
IN_WAITING = 8
"""A warning comes if more than an eighth of an epoch waits in the groups of all lanes."""


def most_waiting(num_samples: int, batch_size: int) -> int:
    """Return the rows of a lane that may wait in groups.

    They are two batches for each sample of the mix, at least 1,000 and at most 65,536: in a small mix, fewer wait even
    if each sample has a group of its own.

    Args:
        num_samples: Samples of all datasets.
        batch_size: Rows of the largest batch that a group waits for.
    """
    return max(_FEWEST, min(_MOST, 2 * num_samples * batch_size))


@dataclass(slots=True)
class _Group(Generic[T]):
    size: int
    rows: list[T] = field(default_factory=list)


class Groups(Generic[T]):
    """The waiting rows by group.

    Args:
        batch_size: Rows of a batch if the criterion gives no size.
    """

    def __init__(self, batch_size: int | None) -> None:
        self._batch_size = batch_size
        self._groups: dict[Hashable, _Group[T]] = {}
        self._order: dict[int, T] = {}
        self._sizes: Counter[int] = Counter()  # of the groups

    @property
    def num_rows(self) -> int:
        """The number of waiting rows."""
        return len(self._order)

    @property
    def largest(self) -> int:
        """The rows of the largest batch that a group waits for."""
        return max((size for size, number in self._sizes.items() if number), default=1)

    def __str__(self) -> str:
        """Say how many rows wait in which groups."""
        some = ", ".join(shown(key) for key in islice(self._groups, 3))
        return f"{self.num_rows:,} rows in {len(self._groups):,} groups that are not full, such as {some}"

    @property
    def waiting(self) -> list[T]:
        """The waiting rows, in order of arrival."""
        return list(self._order.values())

    def left(self) -> list[list[T]]:
        """Return the waiting rows by group, groups ordered by their oldest row."""
        return [group.rows for group in self._groups.values()]

    def add(self, row: T, key: Hashable, size: int | None) -> list[T]:
        """Add a row to its group; return the rows of the group if it is now full.

        Raises:
            FatalSampleError: The batch size of the group is missing, or differs from the one given before.
        """
        size = self._size(key, size)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(size)
            self._sizes[size] += 1
        if group.size != size:
            raise FatalSampleError(
                f"batch_group_criterion returned batch size {size} for the group {shown(key)}, but {group.size} "
                "before: return the same batch size for all samples of a group"
            )
        group.rows.append(row)
        self._order[id(row)] = row
        if len(group.rows) < size:
            return []
        del self._groups[key]
        self._sizes[size] -= 1
        for member in group.rows:
            del self._order[id(member)]
        return group.rows

    def _size(self, key: Hashable, size: int | None) -> int:
        if size is not None and self._batch_size is None:
            return size
        if size is None and self._batch_size is not None:
            return self._batch_size
        found = "both a batch_size and one from" if size is not None else "neither a batch_size nor one from"
        raise FatalSampleError(f"the group {shown(key)} has {found} batch_group_criterion: give exactly one of them")


class Grouping:
    """The groups of one lane.

    Args:
        before: Gives the rows.
        waiting: Rows of a restored state, in order; they are encoded before they are grouped.

    Attributes:
        held: Bytes of the contents waiting here.
    """

    def __init__(self, before: Draws | Packing, pipeline: Pipeline, waiting: list[BatchRow]) -> None:
        self._before = before
        self._pipeline = pipeline
        self._waiting = waiting
        self._groups: Groups[BatchRow] = Groups(pipeline.settings.run.batch_size)
        self._ungrouped = 0  # rows without a group since the last one with a group
        self.held = 0
        pipeline.budget.join(self)

    def waiting(self) -> BufferedRefs:
        """Return the waiting rows as references."""
        return BufferedRefs.of(
            (Stage.GROUP, row.members, row.output) for row in (*self._waiting, *self._groups.waiting)
        )

    def fields(self) -> dict[str, Any]:
        return {}

    def settle(self, counts: Counts) -> None:
        """Do nothing: rows are drawn when a group needs them."""

    def made_again(self, rows: list[BatchRow], counts: Counts) -> list[BatchRow]:
        return self._before.made_again(rows, counts)

    def take(self, counts: Counts) -> Taken:
        """Return the next full group."""
        if self._waiting:
            waiting = self.made_again(self._waiting, counts)
            self._waiting = []
            for row in waiting:
                full = self._add(row, counts)
                assert not full, "a group that waits is not full"
        while True:
            full = self._add(self._before.next_row(counts), counts)
            self._check_waiting()
            self._check_epoch()
            rows = self._with_contents(full, counts)
            if full and len(rows) == len(full):
                return taken_of(self._pipeline, rows)
            for row in rows:  # the others no longer encode, and are counted
                self._add(row, counts)

    def needed_last(self) -> Iterable[BatchRow]:
        """Return the rows whose contents may be dropped, the newest first."""
        return reversed(self._groups.waiting)

    def _with_contents(self, rows: list[BatchRow], counts: Counts) -> list[BatchRow]:
        """Return the rows of a full group with their contents; without rows that no longer encode."""
        made: list[BatchRow] = []
        for row in rows:
            made += [row] if row.content is not None else self.made_again([row], counts)
        return made

    def _add(self, row: BatchRow, counts: Counts) -> list[BatchRow]:
        """Add a row to its group; return the rows of the group if it is now full."""
        found = self._pipeline.code.group(row.content, row.members, counts)
        if found is None:
            self._ungrouped += 1
            self._give_up_if_barren()
            return []
        self._ungrouped = 0
        budget = self._pipeline.budget
        budget.hold(self, row.size)
        full = self._groups.add(row, *found)
        budget.hold(self, -sum(member.size for member in full if member.content is not None))
        if not full:
            budget.keep(self)
        return full

    def _check_waiting(self) -> None:
        """Warn of groups that do not fill, and stop if there are too many.

        What is waiting after a microbatch is in the state, so that a resumed run stops at the same one.
        """
        pipeline = self._pipeline
        rows = self._groups.num_rows
        if rows <= _FEWEST // _WARNING:
            return
        most = most_waiting(pipeline.num_samples, self._groups.largest)
        if rows <= most // _WARNING or (rows <= most and pipeline.warned_of_groups):
            return
        hook = f"batch_group_criterion of {type(pipeline.code.encoder).__name__}"
        todo = (
            "Samples of such a group are in no batch until it is full: return a group that more samples share, such as "
            "a rounded length"
        )
        if rows > most:
            raise FatalSampleError(f"{pipeline.paths}: {hook} keeps {self._groups} waiting in one lane. {todo}")
        pipeline.warned_of_groups = True
        text = (
            f"{pipeline.paths}: {hook} keeps {self._groups} waiting in one lane (`waiting_in_groups` in "
            f"loader.metrics() counts those of all lanes). With more than {most:,} the run stops. {todo}"
        )
        pass_on((logger.name, f"groups, {pipeline.paths}", text))

    def _check_epoch(self) -> None:
        """Warn once if the lanes together keep much of an epoch waiting: other samples come more often meanwhile."""
        pipeline = self._pipeline
        lanes = pipeline.settings.num_lanes
        draws, path = pipeline.settings.shortest_epoch
        waiting = pipeline.waiting_rows
        waiting.looks += 1
        waiting.rows += self._groups.num_rows
        if waiting.warned or lanes == 1 or IN_WAITING * lanes * waiting.rows <= draws * waiting.looks:
            return
        waiting.warned = True
        text = (
            f"{path} is small for batch_group_criterion of {type(pipeline.code.encoder).__name__}: each of {lanes} "
            "lanes waits for groups of its own to fill, and all together keep more than an eighth of its epoch of "
            f"{draws} samples: some samples come late, and others again before them (this lane: {self._groups}). Fewer "
            "lanes (num_lanes of WorkerConfig or the data module, at least one for each rank), fewer groups or "
            "smaller batches avoid it"
        )
        pass_on((logger.name, f"small for groups, {path}", text))

    def _give_up_if_barren(self) -> None:
        if self._ungrouped > _BARREN and self._ungrouped > 10 * self._pipeline.num_samples:
            raise EmptyDatasetError(
                f"{self._pipeline.paths}: batch_group_criterion skipped {self._ungrouped} rows in a row, so none is "
                "left. Check its SkipSample"
            )
