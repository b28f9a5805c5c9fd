"""Lines of a JSONL file become crude samples: `json` is the parsed object, the key is the number of the sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from energon_bridge.errors import DecodeError
from energon_bridge.format.jsonl import PART, parse_line
from energon_bridge.samples import CrudeSample, SourceInfo
from energon_bridge.stream.reader import Unreadable
from energon_bridge.stream.report import Place
from energon_bridge.stream.values import FailedSample, RestoreKey, Rows, SampleParser


class LineValues(SampleParser):
    """Makes samples of one JSONL file; runs on any thread. The decoder has no say: a line is JSON."""

    def make(
        self,
        raws: Sequence[Any],
        indices: Sequence[int],
        shards: Sequence[int],
        restore_keys: Sequence[RestoreKey],
        into: Rows | None = None,
    ) -> list[Any]:
        """Return for each line, with its index, the sample or the `FailedSample` in its place."""
        path, (shard_name,), subflavors = self._dataset.path, self._dataset.shard_names, self._dataset.subflavors
        out: list[Any] = []
        for raw, index, _, restore_key in zip(raws, indices, shards, restore_keys, strict=True):
            key = str(index)
            try:
                value = parse_line(raw)
            except (DecodeError, TypeError) as error:
                lost = type(raw) is Unreadable
                place = Place(path, shard_name, index, key, (PART,))
                out.append(FailedSample(raw.error if lost else error, "read" if lost else "decode", place))
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

    def name_of(self, raw: Any, index: int) -> tuple[str, tuple[str, ...]]:
        """Return key and parts of a sample."""
        return str(index), (PART,)
