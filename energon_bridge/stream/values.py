"""Bytes of a sample become a typed sample: parse the tar members, decode the parts, map them to fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from energon_bridge.errors import FatalSampleError
from energon_bridge.format.tar import parse_sample
from energon_bridge.samples import CrudeSample, SourceInfo
from energon_bridge.stream.reader import RoundBuffer

RestoreKey = tuple[str, int, int, int]
"""Identity of the leaf, index of the sample, epoch, and number of the output among those of its draw."""

Columns = tuple[list[RestoreKey], list[Any], list[int]]
"""Of consecutive draws the restore keys, the samples or `Problem`s, and the sizes in bytes."""


class Problem:
    """A draw that gives no sample, and why; `error` is None where the sample is listed in `exclude`."""

    __slots__ = ("error", "where")

    def __init__(self, error: Exception | None, where: str) -> None:
        self.error = error
        self.where = where


class Values:
    """Makes samples of one leaf; runs on any thread.

    Args:
        identity: Identity of the leaf, the first entry of every restore key.
        dataset: What the leaf is: its fields, excludes and subflavors.
        decoder: `SampleDecoder`, or None to leave every part as bytes.
    """

    def __init__(self, identity: str, dataset: Any, decoder: Any) -> None:
        self._identity = identity
        self._dataset = dataset
        self._decode = None if decoder is None else decoder.decode
        self._parts = dataset.part_filter if isinstance(dataset.part_filter, frozenset) else None
        self._accept = dataset.part_filter if callable(dataset.part_filter) else None
        self._crude = dataset.field_map is None and dataset.sample_loader is None

    def load(self, buffer: RoundBuffer, low: int, high: int, *, ahead: bool) -> Columns:
        """Return for each draw [low, high) of a round its key, and its sample or the `Problem` in its place."""
        raws: list[memoryview] = buffer.fetch(low, high, ahead=ahead)
        drawn = buffer.indices[low:high]
        indices, shards = drawn.tolist(), buffer.reader.shards_of(drawn).tolist()
        epochs = buffer.epochs[low:high].tolist()
        identity = self._identity
        keys = [(identity, index, epoch, 0) for index, epoch in zip(indices, epochs, strict=True)]
        samples = self.make(raws, indices, shards, keys)
        return keys, samples, list(map(len, raws))

    def make(
        self,
        raws: Sequence[memoryview],
        indices: Sequence[int],
        shards: Sequence[int],
        restore_keys: Sequence[RestoreKey],
    ) -> list[Any]:
        """Return for the bytes of each sample, with its index and shard, the sample or the `Problem` in its place."""
        dataset = self._dataset
        path, names, excluded = dataset.path, dataset.shard_names, dataset.excluded
        wanted, decode = self._parts, self._decode
        out: list[Any] = []
        for raw, index, shard, restore_key in zip(raws, indices, shards, restore_keys, strict=True):
            key = ""
            try:
                key, parts = parse_sample(raw, parts=wanted)
                if excluded and (names[shard], key) in excluded:
                    out.append(Problem(None, ""))
                    continue
                values: dict[str, Any]
                if self._accept is not None:
                    parts = {name: data for name, data in parts.items() if self._accept(name)}
                if decode is None:
                    values = {name: bytes(data) for name, data in parts.items()}
                else:
                    values = {name: decode(name, data) for name, data in parts.items()}
                source = SourceInfo(path, index, names[shard], tuple([f"{key}.{name}" for name in parts]))
                out.append(self._sample(key, restore_key, source, values))
            except FatalSampleError:
                raise
            except Exception as error:  # the policy of the stream decides what becomes of it
                out.append(Problem(error, self._where(shard, index, key)))
        return out

    def _sample(self, key: str, restore_key: RestoreKey, source: SourceInfo, values: dict[str, Any]) -> Any:
        dataset = self._dataset
        subflavors = dict(dataset.subflavors)
        if self._crude:
            meta = {
                "__key__": key,
                "__shard__": source.shard_name,
                "__restore_key__": restore_key,
                "__subflavors__": subflavors,
                "__sources__": (source,),
            }
            return CrudeSample(meta | values)
        if dataset.sample_loader is not None:
            meta = {"__key__": key, "__restore_key__": restore_key, "__sources__": (source,)}
            values = dataset.sample_loader(values | meta | {"__shard__": source.shard_name})
        else:
            values = dataset.field_map(values)
        if "__key__" in values:
            key = values.pop("__key__")
        return dataset.sample_type(
            __key__=key, __restore_key__=restore_key, __subflavors__=subflavors, __sources__=(source,), **values
        )

    def _where(self, shard: int, index: int, key: str) -> str:
        named = f"key {key!r}" if key else "unreadable key"
        return f"{self._dataset.path}: shard {self._dataset.shard_names[shard]}, sample {index}, {named}"
