"""Reading a join: each row's bytes from all its datasets, and one sample made of theirs.

The datasets are read and turned into samples one after the other, each by what reads a dataset on its own, so that
neighbours are one read in each of them. The joiner is user code, and runs with the hooks.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from energon_bridge.errors import FatalSampleError
from energon_bridge.format.join import JoinedDataset
from energon_bridge.rng import IntArray
from energon_bridge.samples import META_FIELDS, SourceInfo
from energon_bridge.stream.activity import Activities
from energon_bridge.stream.dataset_code import JOINER, Begin, PendingSample, sample_parser
from energon_bridge.stream.reader import LeafReader, RoundBuffer
from energon_bridge.stream.report import Place
from energon_bridge.stream.values import EXCLUDED, Barred, Columns, FailedSample, RestoreKey, Rows

RawRow = tuple[Any, ...]
"""The bytes (a memoryview) that each dataset of a join has for a row, None where it has no sample for it."""


class JoinReader:
    """Reads the bytes of rows of a join; safe to use from several threads."""

    def __init__(self, dataset: JoinedDataset, *, tolerant: bool = False) -> None:
        self.dataset = dataset
        self.readers = [LeafReader(part.dataset, tolerant=tolerant) for part in dataset.parts]

    @property
    def slow(self) -> bool:
        """Whether reading ahead on a thread pays for one of the datasets."""
        return any(reader.slow for reader in self.readers)

    def columns(self, indices: IntArray) -> IntArray:
        """Return for each dataset the places of its samples in some rows, -1 where it has none."""
        return np.ascontiguousarray(self.dataset.rows[indices].T)

    def shards_of(self, indices: IntArray) -> IntArray:
        """Return the shard number of each row's sample in the primary."""
        return self.readers[0].shards_of(self.dataset.rows[indices, 0])

    def place_of(self, index: int) -> tuple[str, int]:
        """Return shard name and index within the shard of a row's sample in the primary."""
        return self.readers[0].place_of(int(self.dataset.rows[index, 0]))

    def read(self, indices: IntArray) -> list[RawRow]:
        """Return the bytes of each row, in the order given; errors are those of `LeafReader.read`."""
        columns: list[list[memoryview | None]] = []
        for reader, places in zip(self.readers, self.columns(indices), strict=True):
            column: list[memoryview | None] = [None] * places.size
            present = np.flatnonzero(places >= 0)
            if present.size:
                for row, raw in zip(present.tolist(), reader.read(places[present]), strict=True):
                    column[row] = raw
            columns.append(column)
        return list(zip(*columns, strict=True))


class JoinValues:
    """Makes samples of the rows of one join; runs on any thread. Arguments are those of `SampleParser`."""

    def __init__(
        self, identity: str, dataset: JoinedDataset, reader: JoinReader, decoder: Any, activities: Activities
    ) -> None:
        self._activities = activities
        self._identity = identity
        self._dataset = dataset
        self._reader = reader
        self._names = dataset.names
        self.barred = Barred()
        self._values = [
            sample_parser(identity, part.dataset, decoder, activities, number)
            for number, part in enumerate(dataset.parts)
        ]

    def load(self, buffer: RoundBuffer, low: int, high: int, *, ahead: bool, into: Rows | None = None) -> Columns:
        """Return for each draw [low, high) of a round its key, and a `PendingSample` or a `FailedSample`.

        The rows are left empty: which of the images of a row would go there, only the joiner knows.
        """
        indices = buffer.indices[low:high]
        now = self._activities.mine()
        now.dataset, now.index, now.hook = self._dataset, int(indices[0]), "read"
        raws: list[RawRow] = buffer.fetch(low, high, ahead=ahead)
        epochs = buffer.epochs[low:high].tolist()
        rows = indices.tolist()
        if self.barred.indices:
            raws = [self.barred.instead_of(raw, row) for raw, row in zip(raws, rows, strict=True)]
        now.at(self.barred.leaf_key, rows[0])
        keys: list[RestoreKey] = [(self._identity, row, epoch, 0) for row, epoch in zip(rows, epochs, strict=True)]
        columns: list[list[Any]] = []
        for number, places in enumerate(self._reader.columns(indices)):
            present = np.flatnonzero(places >= 0)
            column: list[Any] = [None] * places.size
            among = present.tolist()
            made = self._values[number].make(
                [raws[row][number] for row in among],
                places[present].tolist(),
                self._reader.readers[number].shards_of(places[present]).tolist(),
                [keys[row] for row in among],
            )
            for row, sample in zip(among, made, strict=True):
                column[row] = sample
            columns.append(column)
        samples = [PendingSample(partial(self._joined, parts, key)) for *parts, key in zip(*columns, keys, strict=True)]
        now.rest()
        return keys, samples, [sum(len(raw) for raw in row if raw is not None) for row in raws]

    def _joined(self, parts: list[Any], key: RestoreKey, begin: Begin) -> Any:
        _, row, epoch, _ = key
        for number, part in enumerate(parts):
            if type(part) is PendingSample:
                part = parts[number] = part.make(begin)
            if part is EXCLUDED:
                return part
            if type(part) is FailedSample:
                note = f"row {row} of a join, {self._name(number)}"
                return FailedSample(part.error, part.hook, part.place._replace(note=note))
        try:
            begin("joiner", self._dataset, row, str(parts[0]["__key__"]), (JOINER, row, epoch))
            joiner = self._dataset.joiner
            sample = joiner(*parts) if self._names is None else joiner(**dict(zip(self._names, parts, strict=True)))
            return _completed(sample, parts, key, getattr(joiner, "__qualname__", repr(joiner)))
        except FatalSampleError:
            raise
        except Exception as error:  # the policy of the stream decides what becomes of it
            of = ", ".join(_of(part) for part in parts if part is not None)
            first: SourceInfo = parts[0]["__sources__"][0]
            of_key = str(parts[0]["__key__"])
            note = f"row {row}, joining {of}"
            return FailedSample(error, "joiner", Place(self._dataset.path, first.shard_name, row, of_key, (), note))

    def name_of(self, raw: RawRow, index: int) -> tuple[str, tuple[str, ...]]:
        """Return key and parts of a row's sample in the primary."""
        return self._values[0].name_of(raw[0], index)

    def _name(self, number: int) -> str:
        return f"dataset {number if self._names is None else repr(self._names[number])}"


def _completed(sample: Any, parts: list[Any], key: RestoreKey, joiner: str) -> Any:
    """Give a joined sample the meta fields that do not depend on its joiner: restore key, sources, subflavors."""
    if sample is None:
        raise FatalSampleError(f"the joiner {joiner} returned None: return the sample, or raise SkipSample")
    is_dict = isinstance(sample, dict)
    if not is_dict and not hasattr(sample, "__restore_key__"):
        raise TypeError(f"the joiner returned {type(sample).__name__}, expected a sample")
    own: dict[str, Any] = sample if is_dict else {name: getattr(sample, name, None) for name in META_FIELDS}
    given = list(chain.from_iterable(part["__sources__"] for part in parts if part is not None))
    more = [source for source in own.get("__sources__") or () if source not in given]
    meta: dict[str, Any] = {"__restore_key__": key, "__sources__": (*given, *more)}
    if own.get("__subflavors__") is None:
        meta["__subflavors__"] = parts[0]["__subflavors__"]
    if is_dict:
        own.setdefault("__key__", parts[0]["__key__"])
        own.update(meta)
    else:
        for name, value in meta.items():
            setattr(sample, name, value)
    return sample


def _of(part: Any) -> str:
    source = part["__sources__"][0]
    return f"key {part['__key__']!r} of {source.dataset_path} (shard {source.shard_name})"
