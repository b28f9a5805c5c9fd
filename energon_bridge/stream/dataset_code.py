"""Code that comes with a dataset: `sample_loader` and `part_filter` functions, which run where hooks run.

Loading threads read and decode. The rest is left in a `PendingSample`, which the hook thread finishes with the global
generators seeded before each function. So a function may draw random numbers and still gives the same result on any
topology.

Each process calls a `part_filter` once per part name, with generators seeded from that name, so the answer cannot
depend on when it is called. Only samples with a new part name are decoded late.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from energon_bridge.errors import FatalSampleError
from energon_bridge.format.dataset import PreparedDataset
from energon_bridge.format.dataset_config import fields_of
from energon_bridge.format.join import JoinedDataset
from energon_bridge.format.tar import parse_sample
from energon_bridge.registry import load
from energon_bridge.rng import key_of
from energon_bridge.samples import ChatMLSample, SourceInfo
from energon_bridge.samples.stacking import Slab
from energon_bridge.stream.reader import Unreadable
from energon_bridge.stream.report import SamplePlace
from energon_bridge.stream.steps import Attempt, Begin, PendingSample
from energon_bridge.stream.values import EXCLUDED, NO_PARTS, FailedSample, RestoreKey, Rows, SampleParser
from energon_bridge.stream.watchdog import INDEX, Activities
from energon_bridge.task_encoder.decoder import SampleDecoder
from energon_bridge.task_encoder.hooks import Hook

_MOST_NAMES = 10_000


class CodeValues(SampleParser):
    """Makes the samples of a leaf whose dataset has code; `number` is the dataset's place in a join."""

    def __init__(self, identity: str, dataset: Any, decoder: Any, activities: Activities, number: int = 0) -> None:
        super().__init__(identity, dataset, decoder, activities)
        self._number = number
        self._accept = dataset.part_filter if callable(dataset.part_filter) else None
        self._accepted: dict[str, bool] = {}

    def make(
        self,
        raws: Sequence[Any],
        indices: Sequence[int],
        shards: Sequence[int],
        restore_keys: Sequence[RestoreKey],
        into: Rows | None = None,
    ) -> list[Any]:
        """Return for each sample what `SampleParser.make` returns, or a `PendingSample`."""
        now = self._activities.mine()
        now.dataset, now.hook = self._dataset, Hook.DECODE
        out: list[Any] = []
        for one in zip(raws, indices, shards, restore_keys, strict=True):
            row = None if into is None else (into[0], into[1][len(out)])
            out.append(self._read(*one, row))
        return out

    def _read(
        self,
        raw: Any,
        index: int,
        shard: int,
        restore_key: RestoreKey,
        row: tuple[Slab, int] | None = None,
        begin: Begin | None = None,
    ) -> Any:
        dataset, now = self._dataset, self._activities.mine()
        key, hook, parts = "", Hook.READ, NO_PARTS
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
            values = self._values(parts, image)
            source = SourceInfo(dataset.source_path or dataset.path, index, name, tuple(map(f"{key}.".__add__, parts)))
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
        restore_key: RestoreKey,
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
