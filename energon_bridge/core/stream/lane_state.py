"""What a lane remembers, in plain integers: references to samples that wait, its state, what it counted.

`LaneBatch` travels with all of it from a worker. Restore keys name what was delivered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from energon_bridge.core.order.choose import BlendPosition
from energon_bridge.core.order.rng import IntArray
from energon_bridge.core.samples.sample_place import Warned
from energon_bridge.core.stream.failures import Report


class SampleRef(NamedTuple):
    """Names an encoded sample: enough to read and encode it again."""

    leaf: int
    sample: int
    epoch: int
    output: int


class Stage(IntEnum):
    """Where a row waits that was drawn and is not delivered yet."""

    PACK = 0  # selected for a pack; `number`: outputs of the pack already delivered
    BUFFER = 1  # waiting to be selected; `number`: selections that left it over
    GROUP = 2  # in a group that is not full; `number`: output of its pack, -1 for a sample
    BATCH = 3  # in a batch that is not fully delivered; `number` as for a group


def as_members(refs: Sequence[SampleRef]) -> IntArray:
    """Return references as an array of shape (references, 4)."""
    return np.array(refs, dtype=np.int64).reshape(-1, 4)


@dataclass(frozen=True, slots=True)
class BufferedRefs:
    """The rows of a lane that were drawn and are not delivered yet, as references.

    Attributes:
        rows: Stage, number of members, and `number` of each row, shape (rows, 3).
        members: The references of their members, row after row, shape (members, 4).
    """

    rows: IntArray = field(default_factory=lambda: np.zeros((0, 3), dtype=np.int64))
    members: IntArray = field(default_factory=lambda: np.zeros((0, 4), dtype=np.int64))

    @classmethod
    def of(cls, rows: Iterable[tuple[Stage, Iterable[SampleRef], int]]) -> BufferedRefs:
        """Build from rows given as (stage, references, number)."""
        heads: list[tuple[int, int, int]] = []
        members: list[SampleRef] = []
        for stage, refs, number in rows:
            before = len(members)
            members.extend(refs)
            heads.append((stage, len(members) - before, number))
        if not heads:
            return NOTHING_HELD
        return cls(np.array(heads, dtype=np.int64), as_members(members))

    @classmethod
    def joined(cls, parts: Sequence[BufferedRefs]) -> BufferedRefs:
        """Concatenate several."""
        parts = [part for part in parts if len(part.rows)]
        if len(parts) < 2:
            return parts[0] if parts else NOTHING_HELD
        return cls(np.concatenate([part.rows for part in parts]), np.concatenate([part.members for part in parts]))

    def entries(self) -> list[tuple[Stage, list[SampleRef], int]]:
        """Return the rows as (stage, references, number)."""
        refs = [SampleRef(*member) for member in self.members.tolist()]
        out = []
        at = 0
        for stage, size, number in self.rows.tolist():
            out.append((Stage(stage), refs[at : at + size], number))
            at += size
        return out

    def only(self, stage: Stage) -> BufferedRefs:
        """Return the rows of a stage."""
        return self.part(self.rows[:, 0] == stage)

    def part(self, rows: NDArray[np.bool_]) -> BufferedRefs:
        """Return some of the rows."""
        return BufferedRefs(self.rows[rows], self.members[np.repeat(rows, self.rows[:, 1])])

    def samples(self, stage: Stage, leaves: int) -> IntArray:
        """Return the samples of each leaf that wait in a stage, shape (leaves,)."""
        waiting = self.members[np.repeat(self.rows[:, 0] == stage, self.rows[:, 1]), 0]
        return np.bincount(waiting, minlength=leaves)

    def plain(self) -> tuple[bytes, ...]:
        """Return the rows as bytes: arrays would be views of the batch's shared memory and keep it in use."""
        return (self.rows.tobytes(), self.members.tobytes()) if len(self.rows) else ()

    @classmethod
    def of_plain(cls, values: tuple[bytes, ...]) -> BufferedRefs:
        """Rebuild what `plain` wrote."""
        if not values:
            return NOTHING_HELD
        rows, members = (np.frombuffer(value, dtype=np.int64) for value in values)
        return cls(rows.reshape(-1, 3), members.reshape(-1, 4))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BufferedRefs):
            return NotImplemented
        return np.array_equal(self.rows, other.rows) and np.array_equal(self.members, other.members)

    __hash__ = None  # type: ignore[assignment]


NOTHING_HELD = BufferedRefs()


LARGEST = 1 << 48
"""No run reaches so many microbatches, draws or samples."""


class LaneColumn(NamedTuple):
    """A column of a state: its name, the largest value, and whether states of 0.1.0 have it; if not, it is 0 there."""

    name: str
    most: int
    since_0_1_0: bool


def _column(name: str, *, most: int = LARGEST, since_0_1_0: bool = True) -> dict[str, LaneColumn]:
    """Declare a field of a lane's state that is a column of states."""
    return {"column": LaneColumn(name, most, since_0_1_0)}


@dataclass(frozen=True, slots=True)
class LaneState:
    """The position of a lane: everything needed to continue it.

    The fields are the schema: a number added here with `_column` crosses from the workers and is written to states,
    read from them and checked, without further code.

    Attributes:
        microbatches: Microbatches delivered by the lane.
        draw: Number of the next draw (of the current one while `taken` is not 0).
        taken: Samples already taken of the current draw, if its encoder yields several.
        leaf_draws: Draws made so far in each leaf, in the order of the leaves.
        origin: Draw at which the first epoch of a blend by repetitions began (0 unless the mix has changed).
        held: Rows that were drawn and are not delivered yet, if the encoder packs or groups.
        batches_taken: Batches already delivered of those that batch hooks made from the rows of stage BATCH.
        buffer: Samples in the packing buffer at which the next selection is made; 0 for a lane that begins.
        sums: In a blend by amounts: the sums of the leaves (`tools/columns/amounts.py`); empty for a lane that begins.
        dealt: Packs selected so far of a buffer that the lane shares with others (`stream/dealt_packs.py`), else 0.
    """

    microbatches: int = field(metadata=_column("microbatches"))
    draw: int = field(metadata=_column("draws"))
    taken: int = field(metadata=_column("taken", most=1 << 32))
    leaf_draws: tuple[int, ...]
    origin: int = field(default=0, metadata=_column("origins"))
    held: BufferedRefs = NOTHING_HELD
    batches_taken: int = field(default=0, metadata=_column("batches_taken", most=1 << 32))
    buffer: int = field(default=0, metadata=_column("buffers", most=1 << 32))
    sums: tuple[int, ...] = ()
    dealt: int = field(default=0, metadata=_column("dealt", since_0_1_0=False))

    @property
    def blend_position(self) -> BlendPosition:
        """The position of the lane in its blend."""
        return BlendPosition(self.draw, self.leaf_draws, self.sums, self.origin)

    def plain(self) -> tuple[Any, ...]:
        """Return the values as plain tuples, to cross to the training process with a microbatch."""
        values = _values(self)
        return *values[:_HELD], self.held.plain(), *values[_HELD + 1 :]

    @classmethod
    def of_plain(cls, values: tuple[Any, ...]) -> LaneState:
        """Rebuild what `plain` wrote."""
        held = BufferedRefs.of_plain(values[_HELD])
        return cls(*(*values[:_HELD], held, *values[_HELD + 1 :]))

    @classmethod
    def fresh(cls, leaves: int) -> LaneState:
        """Return the state of a lane that has delivered nothing."""
        return cls(0, 0, 0, (0,) * leaves)


_FIELDS = [each.name for each in fields(LaneState)]
_HELD = _FIELDS.index("held")
_values = attrgetter(*_FIELDS)
LANE_COLUMNS: dict[str, LaneColumn] = {
    each.name: each.metadata["column"] for each in fields(LaneState) if "column" in each.metadata
}
"""The columns of a state with a number per lane, by field of `LaneState`."""


OVER_LONG = ("dropped", "truncated", "split", "pieces")
"""Counters of samples too long for a sequence or pack, as `count_over_long` counts them; `pieces` are what splitting
made, and dropped samples also count as skipped."""
COUNTERS = ("samples", "skipped", "errors", "excluded", "banned", "bytes", *OVER_LONG)
"""Counters per leaf: samples delivered, skipped by `SkipSample`, failed with an error, excluded by `exclude`, banned;
bytes read for samples that were delivered, skipped or failed (of those that wait to be packed, when they leave); and
`OVER_LONG`."""

COLUMNS = (*COUNTERS, "encoded_again")
"""Counters of a process: `COUNTERS`, which the state keeps, and samples encoded again because their contents were
dropped or are not in a state. The last depends on the topology."""


class Counts(dict[int, list[int]]):
    """Increments of `COLUMNS` by leaf."""

    def of(self, leaf: int) -> list[int]:
        """Return the increments of a leaf, to add to."""
        counted = self.get(leaf)
        if counted is None:
            counted = self[leaf] = [0] * len(COLUMNS)
        return counted

    def add(self, more: Counts) -> None:
        """Add other increments."""
        for leaf, counted in more.items():
            self[leaf] = [a + b for a, b in zip(self.of(leaf), counted, strict=True)]


@dataclass(slots=True)
class LaneBatch:
    """A microbatch with the state of its lane after it.

    Attributes:
        batch: The encoder's batch; None if hooks left nothing of it, and no other may take its place.
        rows: Real rows in it.
        state: State of the lane after it; None in finite streams.
        counts: Increments of the counters.
        unit: The lane that it is of, or its number in a pass.
        reports: Failures on the way to it.
        warned: Warnings of its process, to be logged.
        seconds: Time that its process spent on it: in all, waiting for samples to be read and decoded, and in `batch`
            and `encode_batch`; then, if servers were asked, the counters of `network.REQUESTS`.
    """

    batch: Any
    rows: int
    state: LaneState | None
    counts: Counts
    unit: int = -1
    reports: tuple[Report, ...] = ()
    warned: tuple[Warned, ...] = ()
    seconds: tuple[float, ...] = (0.0, 0.0, 0.0)

    def plain(self) -> tuple[Any, ...]:
        """Return everything as nested tuples, which cross to the training process faster than records."""
        state = None if self.state is None else self.state.plain()
        return self.batch, self.rows, state, dict(self.counts), self.unit, self.reports, self.warned, self.seconds

    @classmethod
    def of_plain(cls, values: tuple[Any, ...]) -> LaneBatch:
        """Rebuild what `plain` wrote."""
        batch, rows, state, counts, *others = values
        lane = None if state is None else LaneState.of_plain(state)
        return cls(batch, rows, lane, Counts(counts), *others)


# ---------------------------------------------------------------------------------------------------------------------
# Restore keys: they name a sample, a row or a microbatch by what is needed to make the identical one again.
#
# Samples and batches carry them as `__restore_key__`, in a plain form that JSON and pickle take as it is, though they
# may make lists of its tuples:
#
#     (identity, index, epoch, output)            a sample: identity of the leaf, index of the sample, epoch, and number
#                                                 of the output among the outputs of its draw
#     ("Pack", output, (sample, ...))             a row of a pack of samples: number of the output of the pack
#     ("Batch", lane, number, (row, ...))         a microbatch: its lane (-1: of a pass), its number there, and its rows
#     ("Batch", lane, number, (row, ...), output) one of several that hooks made of the same rows
#
# Only this module knows that form.


SampleKey: TypeAlias = tuple[str, int, int, int]
"""The key of a sample; a plain tuple, since each sample has one."""
PlainKey: TypeAlias = tuple[Any, ...]
"""Any key as samples and batches carry it."""

_PACK = "Pack"
_BATCH = "Batch"


@dataclass(frozen=True, slots=True)
class RowKey:
    """The key of a row: of a sample, or of a pack's output.

    Attributes:
        samples: The sample, or those of the pack.
        output: Number of the output of the pack; None: the row is the sample.
    """

    samples: tuple[SampleKey, ...]
    output: int | None = None

    @property
    def plain(self) -> PlainKey:
        """The key as rows carry it."""
        return self.samples[0] if self.output is None else pack_key(self.output, self.samples)


@dataclass(frozen=True, slots=True)
class BatchKey:
    """The key of a microbatch.

    Attributes:
        lane, number: Its lane and its number there.
        rows: Its rows.
        output: Its number among those that hooks made of the rows.
    """

    lane: int
    number: int
    rows: tuple[RowKey, ...]
    output: int = 0

    @property
    def samples(self) -> tuple[SampleKey, ...]:
        """The keys of the samples of all rows."""
        return tuple(chain.from_iterable(row.samples for row in self.rows))


def pack_key(output: int, samples: Sequence[SampleKey]) -> PlainKey:
    """Return the key of an output of a pack."""
    return _PACK, output, tuple(samples)


def batch_key(lane: int, number: int, rows: Sequence[PlainKey], output: int | None) -> PlainKey:
    """Return the key of a microbatch; `output` is None if it is the only one of its rows."""
    key = _BATCH, lane, number, tuple(rows)
    return key if output is None else (*key, output)


def samples_of(row: PlainKey) -> Sequence[SampleKey]:
    """Return the keys of the samples of a row that this module made the key of."""
    return row[2] if row[0] == _PACK else (row,)


def read_key(key: Any) -> RowKey | BatchKey:
    """Return what a plain key says, as it was made or with lists instead of tuples.

    Raises:
        LookupError: It is no restore key.
    """
    key = _as_tuples(key)
    if not (_starts_with(key, _BATCH) and len(key) in (4, 5)):
        return _read_row(key)
    lane, number, rows = key[1:4]
    output = key[4] if len(key) == 5 else 0
    if not isinstance(rows, tuple) or not _are_numbers((lane, number, output)):
        raise _no_key(key)
    return BatchKey(lane, number, tuple(map(_read_row, rows)), output)


def read_keys(keys: Any) -> list[SampleKey]:
    """Return the samples of one plain key, or of several; raises LookupError if one is no restore key."""
    given = _as_tuples(keys) if isinstance(keys, list | tuple) else tuple(keys)
    given = (given,) if given and isinstance(given[0], str) else given
    return [sample for key in given for sample in read_key(key).samples]


def is_of_several(key: Any) -> bool:
    """Whether a plain key is that of one of several microbatches that hooks made of the same rows."""
    return _starts_with(_as_tuples(key), _BATCH) and len(key) == 5


def _read_row(key: Any) -> RowKey:
    if not _starts_with(key, _PACK):
        return RowKey((_read_sample(key),))
    if not (len(key) == 3 and _are_numbers(key[1:2]) and isinstance(key[2], tuple)):
        raise _no_key(key)
    return RowKey(tuple(map(_read_sample, key[2])), key[1])


def _read_sample(key: Any) -> SampleKey:
    if not (isinstance(key, tuple) and len(key) == 4 and isinstance(key[0], str) and _are_numbers(key[1:])):
        raise _no_key(key)
    return key[0], key[1], key[2], key[3]


def _starts_with(key: Any, word: str) -> bool:
    return isinstance(key, tuple) and key[:1] == (word,)


def _are_numbers(values: tuple[Any, ...]) -> bool:
    return all(isinstance(value, int) for value in values)


def _as_tuples(key: Any) -> Any:
    """Return a key as it was made: JSON, and torch's DataLoader, make lists of tuples."""
    return tuple(map(_as_tuples, key)) if isinstance(key, (list, tuple)) else key


def _no_key(key: Any) -> LookupError:
    return LookupError(
        f"{key!r} is not a restore key of this package: expected sample.__restore_key__ or batch.__restore_key__ "
        "as delivered, such as ('0123456789abcdef', 7, 0, 0)"
    )
