"""One leaf of a stream: its description, its reader, and the parser that turns bytes or rows into samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from energon_bridge.core.encoder.cooking import PRIMARY, Cooker, check_call, cook_sample, matching_cooker
from energon_bridge.core.encoder.hooks import Hook
from energon_bridge.core.errors import DecodeError, FatalSampleError, NoCookerError
from energon_bridge.core.format.dataset import PreparedDataset, expect_shard
from energon_bridge.core.format.foreign import ForeignDataset, field_map_of
from energon_bridge.core.format.join import JoinedDataset
from energon_bridge.core.format.jsonl import PART, JsonlDataset, is_jsonl, parse_line
from energon_bridge.core.mix import AuxRef
from energon_bridge.core.order.changes import LeafBans
from energon_bridge.core.order.leaf_order import LeafOrder
from energon_bridge.core.order.rng import IntArray, fold
from energon_bridge.core.samples import META_FIELDS, CrudeSample, SourceInfo
from energon_bridge.core.samples.sample import Records
from energon_bridge.core.samples.sample_place import SamplePlace
from energon_bridge.core.stores import (
    CachePool,
    DecodeFileStore,
    FileStore,
    JsonlFileStore,
    SystemFileStore,
    WebdatasetFileStore,
)
from energon_bridge.core.stream.lane_state import SampleKey
from energon_bridge.core.stream.reader import LeafReader, Reader, ShardReader, Unreadable
from energon_bridge.core.stream.settings import StreamSettings
from energon_bridge.core.stream.user_code import Attempt, Begin, PendingSample
from energon_bridge.core.stream.values import (
    EXCLUDED,
    FailedSample,
    Parser,
    RawDraws,
    Rows,
    SampleParser,
    sample_parser,
)
from energon_bridge.core.stream.watchdog import Activities

# ---------------------------------------------------------------------------------------------------------------------
# Cooking in a stream: finds the cooker of a leaf and opens the stores it needs, once per process.
#
# Loading threads read and decode crude samples like any others. Cookers are user code and run with the hooks.


Cook = Callable[[CrudeSample], Any]


def cooker_of(encoder: Any, dataset: PreparedDataset | JoinedDataset) -> Cooker[Any] | None:
    """Return the cooker for the samples of a dataset; None if they are typed or the encoder has no cookers.

    In a join, it cooks the samples that the joiner leaves crude (dicts, if one of the datasets is crude). An empty list
    is not the default, `()`, but somebody's, who expects that samples are cooked.

    Raises:
        NoCookerError: None of the encoder's cookers takes them.
    """
    cookers = getattr(encoder, "cookers", ())
    if not dataset.is_crude or not (cookers or isinstance(cookers, list)):
        return None
    found = matching_cooker(cookers, dataset.subflavors)
    if found is None and not isinstance(dataset, JoinedDataset):
        raise NoCookerError(_no_cooker(encoder, dataset))
    return found


def _no_cooker(encoder: Any, dataset: PreparedDataset | JoinedDataset) -> str:
    known = "; ".join(f"{one.name} for {dict(one.has_subflavors or {})}" for one in encoder.cookers)
    there_are = (
        f"There are: {known}. Give the dataset the subflavors of one of them, or add a cooker"
        if known
        else "Its list `cookers` is empty: add a cooker, or leave `cookers` out to get the samples as they are"
    )
    return (
        f"{dataset.path}: no cooker of {type(encoder).__name__} takes its samples, whose subflavors are "
        f"{dataset.subflavors}. {there_are}"
    )


def check_cooker(encoder: Any, dataset: PreparedDataset | JoinedDataset, aux: Mapping[str, AuxRef]) -> None:
    """Raise ConfigurationError if it is already clear that the samples of a dataset cannot be cooked."""
    found = cooker_of(encoder, dataset)
    if found is not None:
        check_call(found, aux)


class StorePool:
    """The auxiliary stores of one process: one per location, shared by all leaves that name it."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._stores: dict[AuxRef, FileStore] = {}

    def open(self, ref: AuxRef) -> FileStore:
        """Return a store; it reads nothing until a file is requested."""
        store = self._stores.get(ref)
        if store is None:
            kind: type[WebdatasetFileStore | SystemFileStore | JsonlFileStore] = WebdatasetFileStore
            if ref.is_filesystem:
                kind = SystemFileStore
            elif is_jsonl(ref.path):
                kind = JsonlFileStore
            inner = kind(ref.path)
            store = inner if self._decoder is None else DecodeFileStore(inner, decoder=self._decoder)
            self._stores[ref] = store
        return store


def cook_of(
    encoder: Any,
    dataset: PreparedDataset | JoinedDataset,
    aux: Mapping[str, AuxRef],
    stores: StorePool,
    cache: CachePool,
) -> Cook | None:
    """Return the function that cooks a leaf's crude samples; None if they stay crude."""
    found = cooker_of(encoder, dataset)
    joined = isinstance(dataset, JoinedDataset)
    if found is None:
        if joined and dataset.is_crude and len(getattr(encoder, "cookers", ())):
            return partial(_refuse_crude, message=_no_cooker(encoder, dataset))
        return None
    given = {name: stores.open(ref) for name, ref in aux.items()}
    if found.need_primary:
        given[PRIMARY] = stores.open(AuxRef(path=dataset.datasets[0].path))
    hook = getattr(encoder, Hook.COOK.title, None)
    cook: Cook = partial(cook_sample, of=found, stores=given, cache=cache)
    if hook is not None:
        cook = lambda sample: hook(sample, found, given)  # noqa: E731
    return partial(_if_crude, cook) if joined else cook


def _if_crude(cook: Cook, sample: Any) -> Any:
    """Cook a sample that a joiner left crude."""
    if not isinstance(sample, dict):
        return sample
    return cook(sample if isinstance(sample, CrudeSample) else CrudeSample(sample))


def _refuse_crude(sample: Any, message: str) -> Any:
    if isinstance(sample, dict):
        raise FatalSampleError(message)
    return sample


_USER_CODE = 4
_NO_PARTS: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One dataset of a stream: its description, its order, the stores of its cooker, its bans and its amounts."""

    identity: str
    dataset: PreparedDataset | JoinedDataset
    order: LeafOrder
    aux: Mapping[str, AuxRef] = field(default_factory=dict)
    bans: LeafBans | None = None
    amounts: Any = field(default=None, repr=False, compare=False)

    @property
    def all_banned(self) -> bool:
        """Whether every sample is banned, from some draw on."""
        return self.bans is not None and self.bans.samples.size == self.order.num_samples


def user_key_of(leaf: Leaf) -> int:
    """Return the key of the hooks' randomness over a leaf's samples; also the leaf's number in `Activity.words`."""
    return fold(leaf.order.key, _USER_CODE)


class LeafSource:
    """A leaf that is open in this process."""

    def __init__(
        self, leaf: Leaf, settings: StreamSettings, decoder: Any, activities: Activities, stores: StorePool
    ) -> None:
        run = settings.run
        dataset = leaf.dataset
        tolerant = run.error_policy.damaged_shards == "skip"
        checksums = run.checksums
        self.leaf = leaf
        self.path = dataset.path
        self.user_key = user_key_of(leaf)
        self.cook = cook_of(run.task_encoder, dataset, leaf.aux, stores, run.cache_pool)
        self.reader: Reader
        self.values: Parser
        if isinstance(dataset, JoinedDataset):
            unread_from = 0 if getattr(decoder, "unread_media", False) else None
            self.reader = reader = JoinReader(dataset, tolerant=tolerant, unread_from=unread_from, checksums=checksums)
            self.values = JoinValues(leaf.identity, dataset, reader, decoder, activities)
        elif isinstance(dataset, ForeignDataset):
            self.reader = ForeignReader(dataset, tolerant=tolerant)
            self.values = RowParser(leaf.identity, dataset, decoder, activities)
        elif isinstance(dataset, JsonlDataset):
            self.reader = LeafReader(dataset, tolerant=tolerant, checksums=checksums)
            self.values = LineParser(leaf.identity, dataset, activities)
        else:
            unread_from = getattr(decoder, "unread_from", None)
            self.reader = LeafReader(dataset, tolerant=tolerant, unread_from=unread_from, checksums=checksums)
            self.values = sample_parser(leaf.identity, dataset, decoder, activities)
        barred = () if settings.worker is None else settings.worker.barred
        self.values.leaf_key = self.user_key
        self.values.barred = frozenset(index for key, index in barred if key == self.user_key)

    def where(self, index: int) -> str:
        """Return the dataset, shard and number of a sample as text, for messages."""
        shard, local = self.reader.place_of(index)
        return f"{self.leaf.dataset.path}: shard {shard}, sample {index} (number {local} of the shard)"

    def place(self, index: int) -> SamplePlace:
        """Name a sample with its key and parts, which are read again for that."""
        shard, _ = self.reader.place_of(index)
        key = ""
        parts = _NO_PARTS
        with contextlib.suppress(Exception):  # the caller already has an error to report
            (raw,) = self.reader.read(np.array([index], dtype=np.int64))
            key, parts = self.values.name_of(raw, index)
        return SamplePlace(self.leaf.dataset.path, shard, index, key, parts)


class LineParser(Parser):
    """Makes crude samples from the lines of one JSONL file: `json` is the parsed object.

    The key is the number of the sample. The encoder's decoder is not used, since a line is JSON.
    """

    def make(self, drawn: RawDraws, into: Rows | None = None) -> list[Any]:
        path, (shard_name,), subflavors = self._dataset.path, self._dataset.shard_names, self._dataset.subflavors
        out: list[Any] = []
        for raw, index, restore_key in zip(drawn.raws, drawn.indices, drawn.restore_keys, strict=True):
            key = str(index)
            try:
                value = parse_line(raw)
            except (DecodeError, TypeError) as error:
                unreadable = type(raw) is Unreadable
                place = SamplePlace(path, shard_name, index, key, (PART,))
                out.append(
                    FailedSample(raw.error if unreadable else error, Hook.READ if unreadable else Hook.DECODE, place)
                )
                continue
            sample: dict[str, Any] = {
                "__key__": key,
                "__shard__": shard_name,
                "__restore_key__": restore_key,
                "__subflavors__": dict(subflavors),
                "__sources__": (SourceInfo(path, index, shard_name, (f"{key}.{PART}",)),),
                PART: value,
            }
            out.append(CrudeSample(sample))
        return out

    def records(self, drawn: RawDraws) -> Records:
        values = {PART: list(map(parse_line, drawn.raws))}
        return Records(CrudeSample, self._meta(drawn, list(map(str, drawn.indices)), values) | values)

    def name_of(self, raw: Any, index: int) -> tuple[str, tuple[str, ...]]:
        return str(index), (PART,)


# Joins ----------------------------------------------------------------------------------------------------------------
#
# A row has bytes in each of its datasets and becomes one sample.
#
# Each dataset is read and parsed by its own reader and parser, one dataset after the other, so that neighbours in it
# are one read. The joiner is user code and runs with the hooks.


RawRow = tuple[Any, ...]
"""The bytes (a memoryview) of a row in each dataset of a join; None if a dataset has no sample for it."""


class JoinReader:
    """Reads the bytes of rows of a join; safe to use from several threads."""

    def __init__(self, dataset: JoinedDataset, **options: Any) -> None:
        self.dataset = dataset
        self.readers = [LeafReader(part.dataset, **options) for part in dataset.parts]

    @property
    def slow(self) -> bool:
        """Whether reading ahead on a thread pays off for one of the datasets."""
        return any(reader.slow for reader in self.readers)

    def columns(self, indices: IntArray) -> IntArray:
        """Return for each dataset the indices of its samples in some rows; -1 if it has none."""
        return np.ascontiguousarray(self.dataset.rows[indices].T)

    def shards_of(self, indices: IntArray) -> IntArray:
        """Return the shard number of each row's sample in the primary."""
        return self.readers[0].shards_of(self.dataset.rows[indices, 0])

    def place_of(self, index: int) -> tuple[str, int]:
        """Return shard name and index within the shard of a row's sample in the primary."""
        return self.readers[0].place_of(int(self.dataset.rows[index, 0]))

    def read(self, indices: IntArray, epochs: IntArray | None = None) -> list[RawRow]:
        """Return the bytes of each row, in the order given; errors are those of `LeafReader.read`."""
        columns: list[list[memoryview | None]] = []
        for reader, places in zip(self.readers, self.columns(indices), strict=True):
            column: list[memoryview | None] = [None] * places.size
            present = np.flatnonzero(places >= 0)
            if present.size:
                raws = reader.read(places[present], None if epochs is None else epochs[present])
                for row, raw in zip(present.tolist(), raws, strict=True):
                    column[row] = raw
            columns.append(column)
        return list(zip(*columns, strict=True))


class JoinValues(Parser):
    """Makes the samples of the rows of one join."""

    def __init__(
        self, identity: str, dataset: JoinedDataset, reader: JoinReader, decoder: Any, activities: Activities
    ) -> None:
        super().__init__(identity, dataset, activities)
        self._reader = reader
        self._names = dataset.names
        self._values = [
            sample_parser(identity, part.dataset, decoder, activities, number)
            for number, part in enumerate(dataset.parts)
        ]

    def make(self, drawn: RawDraws, into: Rows | None = None) -> list[Any]:
        """Return a `PendingSample` for each row.

        Slab rows stay unused: only the joiner knows which of the images belongs there.
        """
        raws, indices, _, keys = drawn
        columns: list[list[Any]] = []
        for number, places in enumerate(self._reader.columns(np.array(indices, dtype=np.int64))):
            present = np.flatnonzero(places >= 0)
            column: list[Any] = [None] * places.size
            among = present.tolist()
            of_part = RawDraws(
                [raws[row][number] for row in among],
                places[present].tolist(),
                self._reader.readers[number].shards_of(places[present]).tolist(),
                [keys[row] for row in among],
            )
            for row, sample in zip(among, self._values[number].make(of_part), strict=True):
                column[row] = sample
            columns.append(column)
        return [PendingSample(partial(self._joined, parts, key)) for *parts, key in zip(*columns, keys, strict=True)]

    def _sizes(self, raws: Sequence[RawRow]) -> list[int]:
        return [sum(len(raw) for raw in row if raw is not None) for row in raws]

    def _joined(self, parts: list[Any], key: SampleKey, begin: Begin) -> Any:
        _, row, epoch, _ = key
        for number, part in enumerate(parts):
            if type(part) is PendingSample:
                part = parts[number] = part.make(begin)
            if part is EXCLUDED:
                return part
            if type(part) is FailedSample:
                note = f"row {row} of a join, {self._name(number)}"
                return FailedSample(part.error, part.hook, part.place._replace(note=note))
        attempt = Attempt()
        with attempt:
            begin(Hook.JOINER, self._dataset, row, str(parts[0]["__key__"]), row, epoch)
            joiner = self._dataset.joiner
            sample = joiner(*parts) if self._names is None else joiner(**dict(zip(self._names, parts, strict=True)))
            return _completed(sample, parts, key, getattr(joiner, "__qualname__", repr(joiner)))
        of = ", ".join(_of(part) for part in parts if part is not None)
        first: SourceInfo = parts[0]["__sources__"][0]
        note = f"row {row}, joining {of}"
        place = SamplePlace(self._dataset.path, first.shard_name, row, str(parts[0]["__key__"]), (), note)
        return FailedSample(attempt.error, Hook.JOINER, place)

    def name_of(self, raw: RawRow, index: int) -> tuple[str, tuple[str, ...]]:
        return self._values[0].name_of(raw[0], index)

    def _name(self, number: int) -> str:
        return f"dataset {number if self._names is None else repr(self._names[number])}"


def _completed(sample: Any, parts: list[Any], key: SampleKey, joiner: str) -> Any:
    """Set the meta fields of a joined sample that do not depend on its joiner: restore key, sources, subflavors."""
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


# ---------------------------------------------------------------------------------------------------------------------
# Datasets of other formats as leaves: rows by index, and the samples made from them.


_FIELDS = "__fields__"


class ForeignReader(ShardReader):
    """Reads rows by index; `Unreadable` stands for rows that are no samples."""

    dataset: ForeignDataset

    def __init__(self, dataset: ForeignDataset, *, tolerant: bool = False) -> None:
        super().__init__(dataset, tolerant=tolerant)
        self._rows = dataset.open_rows()
        self._expected: set[int] = set()

    def _read(self, indices: IntArray, epochs: IntArray | None) -> list[Any]:
        shards = set(self.shards_of(indices).tolist())
        for shard in shards - self._expected:
            expect_shard(self.dataset, shard)
            self._expected.add(shard)
        rows = [Unreadable(row) if isinstance(row, Exception) else row for row in self._rows.read(indices)]
        for shard in shards:  # pyarrow reads past the store, so the store's own checks are made afterwards
            self.dataset.store.check(self.dataset.shard_names[shard])
        return rows


class RowParser(SampleParser):
    """Makes the samples of rows, each by its own field accesses: one row may have a PNG where others have JPEGs."""

    def _parse(self, raw: Any, wanted: frozenset[str] | None) -> tuple[str, dict[str, Any]]:
        if type(raw) is Unreadable:
            raise raw.error
        return raw.key, _Parts(raw.parts, raw.fields)

    def _values(self, parts: dict[str, Any], image: tuple[str, Any] | None, *meta: Any) -> dict[str, Any]:
        raw = {name: value for name, value in parts.items() if isinstance(value, memoryview)}  # the others are values
        return {**parts, **super()._values(raw, image, *meta), _FIELDS: parts.fields}  # type: ignore[attr-defined]

    def _sample(self, key: str, restore_key: SampleKey, source: SourceInfo, values: dict[str, Any]) -> Any:
        fields = values.pop(_FIELDS)
        dataset = self._dataset
        if dataset.is_crude:
            return super()._sample(key, restore_key, source, values)
        return dataset.sample_type(
            __key__=key,
            __restore_key__=restore_key,
            __subflavors__=dict(dataset.subflavors),
            __sources__=(source,),
            **field_map_of(tuple(fields.items()))(values),
        )


class _Parts(dict[str, Any]):
    """The parts of a row by name; `fields` has the access that makes each field."""

    def __init__(self, parts: dict[str, Any], fields: Any) -> None:
        super().__init__(parts)
        self.fields = fields
