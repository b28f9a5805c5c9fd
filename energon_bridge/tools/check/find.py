"""Finding samples by a text that they hold: the name of a file, an id, a value of a column. Reads all shards."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from energon_bridge.core.errors import EnergonError
from energon_bridge.core.format.dataset import PreparedDataset
from energon_bridge.core.format.foreign import ForeignDataset
from energon_bridge.core.format.jsonl import JsonlDataset
from energon_bridge.core.format.media import kind_by_name
from energon_bridge.core.format.parallel import Workers, map_shards
from energon_bridge.core.format.tar import parse_sample
from energon_bridge.core.stores.file_store import follow_links
from energon_bridge.tools.check.lint import read_rows, read_samples

_AROUND = 30
"""Characters shown on each side of what was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSample:
    """A sample that holds a text; `part` is the first that does, or `key`, and `excerpt` what stands around it."""

    path: str
    split_part: str
    shard: str
    shard_index: int
    key: str
    part: str
    excerpt: str
    excluded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What a shard gave: the samples found, how many samples cannot be read, and why the first cannot."""

    found: list[FoundSample]
    num_unreadable: int
    why: str


def find_samples(
    datasets: Sequence[PreparedDataset], texts: Sequence[str], *, num_workers: Workers = 1
) -> Iterator[Searched]:
    """Yield what each shard of some datasets gives of texts, in order; one of a texts is enough.

    A text is found in keys and in all parts but media, where neither a letter nor a digit is beside it: `A-17` is not
    found in `A-170`. Raises CorruptShardError or ShardMissingError for a shard that cannot be read.
    """
    ends = "|".join(rf"(?<!\w){re.escape(text)}(?!\w)" for text in texts)
    shards = [(number, shard) for number, dataset in enumerate(datasets) for shard in range(len(dataset.shard_names))]
    with closing(map_shards(partial(_search, datasets, ends), shards, num_workers=num_workers)) as searched:
        yield from searched


def _search(datasets: Sequence[PreparedDataset], pattern: str, place: tuple[int, int]) -> Searched:
    dataset, shard = datasets[place[0]], place[1]
    found: list[FoundSample] = []
    unreadable: list[str] = []
    for index, sample in enumerate(_samples(dataset, shard)):
        if isinstance(sample, Exception):
            unreadable.append(str(sample))
        elif said := _said(re.compile(pattern), *sample):
            key = sample[0]
            name = dataset.shard_names[shard]
            found.append(
                FoundSample(
                    path=dataset.path,
                    split_part=dataset.split_part,
                    shard=name,
                    shard_index=index,
                    key=key,
                    part=said[0],
                    excerpt=said[1],
                    excluded=(name, key) in dataset.excluded,
                )
            )
    return Searched(found=found, num_unreadable=len(unreadable), why=unreadable[0] if unreadable else "")


def _samples(dataset: PreparedDataset, shard: int) -> Iterator[tuple[str, dict[str, Any]] | Exception]:
    """Yield key and parts of all samples of a shard, or the error of one that cannot be read."""
    if isinstance(dataset, ForeignDataset):
        yield from (row if isinstance(row, Exception) else (row.key, row.parts) for row in read_rows(dataset, shard))
        return
    follow = follow_links(dataset.path)
    for index, data in read_samples(dataset, shard):
        if isinstance(dataset, JsonlDataset):
            yield str(index), {"json": data}
            continue
        try:
            yield parse_sample(
                data, where=f"{dataset.store.url(dataset.shard_names[shard])}, sample {index}", follow=follow
            )
        except EnergonError as error:
            yield error


def _said(pattern: re.Pattern[str], key: str, parts: dict[str, Any]) -> tuple[str, str] | None:
    """Return the first part in which a pattern is found, and the text around it."""
    for part, value in ({"key": key} | parts).items():
        text = _text(part, value)
        if hit := pattern.search(text):
            return part, " ".join(text[max(hit.start() - _AROUND, 0) : hit.end() + _AROUND].split())
    return None


def _text(part: str, value: Any) -> str:
    """Return a part as the text that is searched; nothing of media and other bytes that are no text."""
    if not isinstance(value, bytes | memoryview):
        return str(value)
    if kind_by_name(part if "." in part else f".{part}") is not None:
        return ""
    try:
        text = bytes(value).decode()
    except UnicodeDecodeError:
        return ""
    if "\\u" in text:  # of a JSON that was written in ASCII
        with contextlib.suppress(ValueError):
            return json.dumps(json.loads(text), ensure_ascii=False)
    return text
