"""Turns the bytes of a sample into a typed sample: parses tar members, decodes parts, maps them to fields.

Code that comes with a dataset (its sample loader, its part filter) runs here, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

from energon_bridge.core.encoder.collate import records_of
from energon_bridge.core.encoder.decoder import SampleDecoder
from energon_bridge.core.encoder.hooks import Hook
from energon_bridge.core.errors import (
    BarredSampleError,
    CorruptShardError,
    FatalSampleError,
    FieldAccessError,
    StorageError,
)
from energon_bridge.core.format.dataset import PreparedDataset
from energon_bridge.core.format.dataset_config import fields_of
from energon_bridge.core.format.join import JoinedDataset
from energon_bridge.core.format.media import kind_by_name
from energon_bridge.core.format.tar import parse_sample, parse_samples, sources_of
from energon_bridge.core.order.rng import key_of
from energon_bridge.core.registry import load
from energon_bridge.core.samples import ChatMLSample, CrudeSample, SourceInfo
from energon_bridge.core.samples.sample import Records
from energon_bridge.core.samples.sample_place import SamplePlace
from energon_bridge.core.samples.stacking import Slab
from energon_bridge.core.stores.file_store import follow_links
from energon_bridge.core.stream.lane_state import SampleKey
from energon_bridge.core.stream.reader import RoundBuffer, Split, SplitSample, Stored, Unread, Unreadable
from energon_bridge.core.stream.user_code import Attempt, Begin, PendingSample
from energon_bridge.core.stream.watchdog import INDEX, Activities

Rows = tuple[Slab, Sequence[int]]
"""Where the images of consecutive draws may be decoded to: a slab, and the row of each draw."""

LoadedColumns = tuple[list[SampleKey], list[Any], list[int]]
"""The restore keys, samples (or `FailedSample`s) and bytes of consecutive draws."""


class RawDraws(NamedTuple):
    """The stored samples of some draws: bytes, index and number of the shard of each, and its restore key."""

    raws: Any
    indices: list[int]
    shards: list[int]
    restore_keys: Sequence[SampleKey]


NO_PARTS: dict[str, memoryview] = {}


@dataclass(slots=True, eq=False)
class FailedSample:
    """A draw without a sample: the error, the step that failed, and where the sample comes from.

    `EXCLUDED` and `BANNED` have no error.
    """

    error: Exception | None
    hook: Hook
    place: SamplePlace


EXCLUDED = FailedSample(None, Hook.READ, SamplePlace("", "", -1))
"""A draw whose sample is listed in `exclude`."""
BANNED = FailedSample(None, Hook.READ, SamplePlace("", "", -1))
"""A draw whose sample is banned; it is not read."""


def _barred(raw: Any) -> Any:
    """Return an `Unreadable`, which fails, for the bytes of a barred sample (in a join, of each dataset's)."""
    barred = Unreadable(BarredSampleError("it killed or hung its worker several times in a row and is not tried again"))
    return tuple(part if part is None else barred for part in raw) if isinstance(raw, tuple) else barred


class Parser:
    """Makes samples of one leaf; runs on any thread.

    Args:
        identity: Identity of the leaf, the first entry of every restore key.
        activities: Where threads record what they are doing.

    Attributes:
        leaf_key: The leaf's number for the training process (`user_key_of`).
        singly: Whether samples are needed one by one, and not only batches of them.
        barred: Samples that must not be tried again, because they killed their worker several times.
    """

    def __init__(self, identity: str, dataset: Any, activities: Activities) -> None:
        self._activities = activities
        self._identity = identity
        self._dataset = dataset
        self.leaf_key = 0
        self.singly = True
        self.barred = frozenset[int]()

    def load(self, buffer: RoundBuffer, low: int, high: int, *, ahead: bool, into: Rows | None = None) -> LoadedColumns:
        """Return the restore keys, samples (as `make` returns them) and bytes of draws [low, high) of a round."""
        drawn = buffer.indices[low:high]
        indices = drawn.tolist()
        shards = buffer.reader.shards_of(drawn).tolist()
        now = self._activities.mine()
        now.dataset = self._dataset
        now.index = indices[0]
        now.hook = Hook.READ
        raws: Any = buffer.fetch(low, high, ahead=ahead)
        if self.barred:
            raws = [_barred(raw) if index in self.barred else raw for raw, index in zip(raws, indices, strict=True)]
        now.at(self.leaf_key, indices[0])
        epochs = buffer.epochs[low:high].tolist()
        identity = self._identity
        keys = list(zip(repeat(identity), indices, epochs, repeat(0)))
        draws = RawDraws(raws, indices, shards, keys)
        samples: Any = None
        if not self.singly:
            with contextlib.suppress(Exception):  # `make` says which sample it is, and what is wrong
                samples = self.records(draws)
        if samples is None:
            samples = self.make(draws, into)
        now.rest()
        return keys, samples, self._sizes(raws)

    def _sizes(self, raws: Any) -> list[int]:
        return raws.sizes() if type(raws) in (Split, Stored) else list(map(len, raws))

    def make(self, drawn: RawDraws, into: Rows | None = None) -> list[Any]:
        """Return the sample, a `PendingSample` or a `FailedSample` for the bytes of each sample."""
        raise NotImplementedError

    def split(self, stored: Stored) -> Split | None:
        """Return samples that were just read split into their parts, for `records`; None: they wait as they are."""
        return None

    def records(self, drawn: RawDraws) -> Records | None:
        """Return the samples field by field, as `make` makes each; None, or any error, if it must be asked."""
        return None

    def _meta(self, drawn: RawDraws, keys: list[str], parts: Iterable[str]) -> dict[str, list[Any]]:
        """Return the meta fields of the samples of some draws, which have the same parts."""
        names = self._dataset.shard_names
        shards = list(map(names.__getitem__, drawn.shards))
        path = self._dataset.source_path or self._dataset.path
        return {
            "__key__": keys,
            "__shard__": shards,
            "__restore_key__": list(drawn.restore_keys),
            "__subflavors__": list(map(dict.copy, repeat(self._dataset.subflavors, len(keys)))),
            "__sources__": sources_of(path, drawn.indices, shards, keys, parts),
        }

    def name_of(self, raw: Any, index: int) -> tuple[str, tuple[str, ...]]:
        """Return key and parts of a sample, without decoding it."""
        raise NotImplementedError


class SampleParser(Parser):
    """Makes the samples of a dataset from their bytes, with its fields, excludes and subflavors.

    `decoder` is a `SampleDecoder`, or None to leave every part as bytes.
    """

    def __init__(self, identity: str, dataset: Any, decoder: Any, activities: Activities) -> None:
        super().__init__(identity, dataset, activities)
        # A user's decoder is asked once about a sample, and if it guesses, images go by their first bytes.
        self._splits = decoder is None or (type(decoder) is SampleDecoder and not decoder.guess_content)
        # A user's type may have a constructor that does anything.
        self._splits &= dataset.sample_type.__module__.startswith("energon_bridge.")
        self._decode = None if decoder is None else decoder.decode
        self._decode_sample = decoder if getattr(decoder, "takes_samples", False) else None
        self._decode_into = getattr(decoder, "decode_into", None)
        self._keeps: Any = getattr(decoder, "keeps_unread", None)
        self._parts = dataset.part_filter if isinstance(dataset.part_filter, frozenset) else None
        self._follow = follow_links(dataset.path)

    def make(self, drawn: RawDraws, into: Rows | None = None) -> list[Any]:
        dataset, (raws, indices, shards, restore_keys) = self._dataset, drawn
        path = dataset.path
        names = dataset.shard_names
        excluded = dataset.excluded
        source_path = dataset.source_path or path
        now = self._activities.mine()
        now.dataset = dataset
        now.hook = Hook.READ
        attempt = Attempt()
        parsed: list[Any] = []  # key and parts of each, or a `FailedSample`
        each = zip(raws, shards, strict=True)
        while len(parsed) < len(raws):
            # `each` is an iterator: after a failure the next attempt goes on with the sample after it.
            with attempt:
                for raw, shard in each:
                    found = self._parse(raw, self._parts)
                    parsed.append(EXCLUDED if excluded and (names[shard], found[0]) in excluded else found)
                break
            index = indices[len(parsed)]
            error = raw.error if type(raw) is Unreadable else self._located(attempt.error, raw, names[shard], index)
            parsed.append(FailedSample(error, Hook.READ, SamplePlace(path, names[shard], index, "", ())))
        now.hook = Hook.DECODE
        images: dict[int, tuple[str, Any]] = {}
        rows: Sequence[int] = range(len(parsed))
        if into is not None and self._decode_into is not None:
            rows = into[1]
            images = self._decode_into(into[0], *self._turns(parsed, indices, rows))
        out: list[Any] = []
        words, decodes, new = now.words, self._decode is not None, tuple.__new__  # half the time of `SourceInfo(…)`
        decode = Hook.DECODE
        field_map = Hook.FIELD_MAP
        columns = zip(parsed, indices, shards, restore_keys, rows, strict=True)
        while len(out) < len(raws):
            with attempt:
                for one, index, shard, restore_key, row in columns:
                    if type(one) is FailedSample:
                        out.append(one)
                        continue
                    key, parts = one
                    now.index = index
                    now.key = key
                    hook = decode
                    if decodes:
                        words[INDEX] = restore_key[1]  # in a join: its row
                    source = new(SourceInfo, (source_path, index, names[shard], tuple(map(f"{key}.".__add__, parts))))
                    values = self._values(parts, images.get(row), key, restore_key, source)
                    hook = field_map
                    out.append(self._sample(key, restore_key, source, values))
                break
            error = attempt.error
            there = tuple(parts)
            if isinstance(error, FieldAccessError):  # an ignored part may be the one to name
                with contextlib.suppress(StorageError):
                    there = self.name_of(raws[len(out)], index)[1]
                error = dataset.missing_field(values, there) or error
            out.append(FailedSample(error, hook, SamplePlace(path, names[shard], index, key, there)))
        return out

    def split(self, stored: Stored) -> Split | None:
        found = parse_samples(stored.blocks, stored.ranges, self._parts) if self._splits else None
        if found is None or not found[1]:
            return None
        # Images are decoded side by side, by `make`.
        self._splits = self._decode is None or not any(map(kind_by_name, found[1]))
        return Split(*found, stored.sizes()) if self._splits else None

    def records(self, drawn: RawDraws) -> Records | None:
        dataset = self._dataset
        if type(drawn.raws) is not Split:
            return None
        keys = drawn.raws.keys
        parts = drawn.raws.parts
        meta = self._meta(drawn, keys, parts)
        if dataset.excluded and not dataset.excluded.isdisjoint(zip(meta["__shard__"], keys, strict=True)):
            return None
        values = {name: self._decoded(name, column, drawn.indices, keys) for name, column in parts.items()}
        if dataset.field_map is None:
            return Records(CrudeSample, meta | values)
        del meta["__shard__"]
        return records_of(dataset.sample_type, meta | dataset.field_map.columns(values))

    def _decoded(self, name: str, column: list[Any], indices: Sequence[int], keys: Sequence[str]) -> list[Any]:
        """Return a part of all samples, decoded."""
        if self._decode is None:
            return column
        now = self._activities.mine()
        now.hook = Hook.DECODE
        out = []
        for now.key, index, data in zip(keys, indices, column, strict=True):
            now.index = now.words[INDEX] = index
            out.append(self._decode(name, data))
        return out

    def _located(self, error: Exception, raw: Any, shard: str, index: int) -> Exception:
        """Return a parsing error with the name of the file added."""
        if isinstance(error, CorruptShardError) and not isinstance(raw, Unread):
            try:
                parse_sample(
                    raw,
                    where=f"{self._dataset.store.url(shard)}, in the bytes of sample {index}",
                    follow=self._follow,
                )
            except CorruptShardError as located:
                return located
        return error

    def _turns(
        self, parsed: Sequence[Any], indices: Sequence[int], rows: Sequence[int]
    ) -> tuple[list[tuple[int, dict[str, Any]]], Callable[[int], None]]:
        """Return row and parts of each sample, and a function that records which row is being decoded."""
        now = self._activities.mine()
        places: dict[int, tuple[str, int]] = {}
        samples: list[tuple[int, dict[str, Any]]] = []
        for one, index, row in zip(parsed, indices, rows, strict=True):
            if type(one) is not FailedSample:
                key, parts = one
                places[row] = key, index
                samples.append((row, parts))

        def turn(row: int) -> None:
            now.key, now.index = places[row]
            now.words[INDEX] = now.index

        return samples, turn

    def _values(
        self,
        parts: dict[str, Any],
        image: tuple[str, Any] | None,
        key: str,
        restore_key: SampleKey,
        source: SourceInfo,
    ) -> dict[str, Any]:
        """Return the decoded parts of a sample; an image may already be decoded."""
        decode = self._decode
        if decode is None or self._decode_sample is not None:
            raw = {name: bytes(data) for name, data in parts.items()}
            if self._decode_sample is None:
                return raw
            meta = {"__key__": key, "__restore_key__": restore_key, "__sources__": (source,)}
            made = self._decode_sample(meta | {"__shard__": source.shard_name} | raw)
            if made is None:
                raise FatalSampleError("__call__ of the decoder returned None: return the dict of parts")
            return {name: value for name, value in made.items() if not name.startswith("__")}
        if image is None:
            return {name: decode(name, data) for name, data in parts.items()}
        done, pixels = image
        return {name: pixels if name == done else decode(name, data) for name, data in parts.items()}

    def name_of(self, raw: Any, index: int) -> tuple[str, tuple[str, ...]]:
        key, parts = self._parse(raw, None)
        return key, tuple(parts)

    def _parse(self, raw: Any, wanted: frozenset[str] | None) -> tuple[str, dict[str, Any]]:
        """Return key and parts of a sample; videos and sound of an unread sample stay unread."""
        if type(raw) is SplitSample:
            return raw.key, raw.parts
        if type(raw) is Unread:
            return raw.parts(wanted, self._keeps, self._follow)
        return parse_sample(raw, parts=wanted, follow=self._follow)

    def _sample(self, key: str, restore_key: SampleKey, source: SourceInfo, values: dict[str, Any]) -> Any:
        dataset = self._dataset
        subflavors = dict(dataset.subflavors)
        if dataset.field_map is None:
            meta = {
                "__key__": key,
                "__shard__": source.shard_name,
                "__restore_key__": restore_key,
                "__subflavors__": subflavors,
                "__sources__": (source,),
            }
            return CrudeSample(meta | values)
        values = dataset.field_map(values)
        if "__key__" in values:
            key = values.pop("__key__")
        return dataset.sample_type(
            __key__=key, __restore_key__=restore_key, __subflavors__=subflavors, __sources__=(source,), **values
        )


# ---------------------------------------------------------------------------------------------------------------------
# Code that comes with a dataset: `sample_loader` and `part_filter` functions, which run where hooks run.
#
# Loading threads read and decode. The rest is left in a `PendingSample`, which the hook thread finishes with the global
# generators seeded before each function. So a function may draw random numbers and still gives the same result on any
# topology.
#
# Each process calls a `part_filter` once per part name, with generators seeded from that name, so the answer cannot
# depend on when it is called. Only samples with a new part name are decoded late.


_MOST_NAMES = 10_000


class CodeValues(SampleParser):
    """Makes the samples of a leaf whose dataset has code; `number` is the dataset's place in a join."""

    def __init__(self, identity: str, dataset: Any, decoder: Any, activities: Activities, number: int = 0) -> None:
        super().__init__(identity, dataset, decoder, activities)
        self._number = number
        self._accept = dataset.part_filter if callable(dataset.part_filter) else None
        self._accepted: dict[str, bool] = {}

    def make(self, drawn: RawDraws, into: Rows | None = None) -> list[Any]:
        now = self._activities.mine()
        now.dataset = self._dataset
        now.hook = Hook.DECODE
        out: list[Any] = []
        for one in zip(drawn.raws, drawn.indices, drawn.shards, drawn.restore_keys, strict=True):
            row = None if into is None else (into[0], into[1][len(out)])
            out.append(self._read(*one, row))
        return out

    def _read(
        self,
        raw: Any,
        index: int,
        shard: int,
        restore_key: SampleKey,
        row: tuple[Slab, int] | None = None,
        begin: Begin | None = None,
    ) -> Any:
        dataset = self._dataset
        now = self._activities.mine()
        key = ""
        hook = Hook.READ
        parts = NO_PARTS
        name = dataset.shard_names[shard]
        attempt = Attempt()
        with attempt:
            key, parts = parse_sample(raw, parts=self._parts, follow=self._follow)
            if dataset.excluded and (name, key) in dataset.excluded:
                return EXCLUDED
            if self._accept is not None:
                accepted: Mapping[str, bool] = self._accepted
                if not accepted.keys() >= parts.keys():
                    if begin is None:
                        return PendingSample(partial(self._read, raw, index, shard, restore_key, None))
                    hook = Hook.PART_FILTER
                    accepted = self._ask(parts, begin, index, key)
                parts = {part: data for part, data in parts.items() if accepted[part]}
            hook = Hook.DECODE
            if begin is None:
                now.index, now.key, now.words[INDEX] = index, key, restore_key[1]
            else:
                begin(hook, dataset, index, key)
            image = None
            if row is not None and self._decode_into is not None:
                slab, number = row
                image = self._decode_into(slab, [(number, parts)]).get(number)
            source = SourceInfo(dataset.source_path or dataset.path, index, name, tuple(map(f"{key}.".__add__, parts)))
            values = self._values(parts, image, key, restore_key, source)
            if dataset.sample_loader is None:
                return self._sample(key, restore_key, source, values)
            load = partial(self._load, key, index, restore_key, source, values)
            return PendingSample(load) if begin is None else load(begin)
        error = raw.error if type(raw) is Unreadable else self._located(attempt.error, raw, name, index)
        return FailedSample(error, hook, SamplePlace(dataset.path, name, index, key, tuple(parts)))

    def _load(
        self,
        key: str,
        index: int,
        restore_key: SampleKey,
        source: SourceInfo,
        values: dict[str, Any],
        begin: Begin,
    ) -> Any:
        dataset = self._dataset
        _, draw, epoch, _ = restore_key  # in a join the number of the row
        meta = {"__key__": key, "__restore_key__": restore_key, "__sources__": (source,)}
        attempt = Attempt()
        with attempt:
            begin(Hook.SAMPLE_LOADER, dataset, index, key, draw, epoch, self._number)
            made = dataset.sample_loader(values | meta | {"__shard__": source.shard_name})
            if made is None:
                raise FatalSampleError("sample_loader returned None: return a dict of fields, or raise SkipSample")
            made = fields_of(made)
            meta["__key__"] = made.pop("__key__", key)
            return dataset.sample_type(**meta, __subflavors__=dict(dataset.subflavors), **made)
        place = SamplePlace(dataset.path, source.shard_name, index, key, tuple(values))
        return FailedSample(attempt.error, Hook.SAMPLE_LOADER, place)

    def _ask(self, parts: Iterable[str], begin: Begin, index: int, key: str) -> Mapping[str, bool]:
        """Return the filter's answer for each of some part names."""
        assert self._accept is not None
        said = {}
        for name in parts:
            if name not in self._accepted:
                begin(Hook.PART_FILTER, self._dataset, index, key, key_of("part", name), self._number)
                answer = self._accept(name)
                if answer is None:
                    raise FatalSampleError("part_filter returned None: return True or False")
                said[name] = bool(answer)
                if len(self._accepted) < _MOST_NAMES:
                    self._accepted[name] = said[name]
            else:
                said[name] = self._accepted[name]
        return said


def has_code(dataset: PreparedDataset | JoinedDataset) -> bool:
    """Whether making samples of a dataset runs user code: its own, or a joiner."""
    return isinstance(dataset, JoinedDataset) or dataset.sample_loader is not None or callable(dataset.part_filter)


def sample_parser(
    identity: str, dataset: PreparedDataset, decoder: Any, activities: Activities, number: int = 0
) -> SampleParser:
    """Return the parser for a dataset's samples; `number` is the dataset's place in a join."""
    if dataset.sample_type is ChatMLSample:
        # As its own class decodes, which leaves the encoder's decoder aside.
        decoder = load("decoder", "ChatMLSample")(SampleDecoder().decode)
    elif getattr(dataset.sample_loader, "decodes", False):
        decoder = None
    if has_code(dataset):
        return CodeValues(identity, dataset, decoder, activities, number)
    return SampleParser(identity, dataset, decoder, activities)
