"""Restore keys: they name a sample, a row or a microbatch by what is needed to make the identical one again.

Samples and batches carry them as `__restore_key__`, in a plain form that JSON and pickle take as it is, though they
may make lists of its tuples:

    (identity, index, epoch, output)            a sample: identity of the leaf, index of the sample, epoch, and number
                                                of the output among the outputs of its draw
    ("Pack", output, (sample, ...))             a row of a pack of samples: number of the output of the pack
    ("Batch", lane, number, (row, ...))         a microbatch: its lane (-1: of a pass), its number there, and its rows
    ("Batch", lane, number, (row, ...), output) one of several that hooks made of the same rows

Only this module knows that form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

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
