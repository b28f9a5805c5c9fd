"""Samples of equal content: found by a hash of their parts, from the column `hash` if there is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial

import numpy as np

from energon_bridge.format.columns import read_columns, read_numbers
from energon_bridge.format.dataset import PreparedDataset, read_index
from energon_bridge.format.jsonl import JsonlDataset
from energon_bridge.format.parallel import Workers, map_shards
from energon_bridge.format.tar import parse_sample
from energon_bridge.prepare.columns import HASH_MADE_OF, content_hash, groups_of_equal
from energon_bridge.prepare.lint import Problem, read_samples

_Place = tuple[int, int]  # number of a dataset, and of a shard in it


def find_equal_samples(datasets: Sequence[PreparedDataset], *, num_workers: Workers = 1) -> Iterator[Problem]:
    """Yield each sample that equals an earlier one, across all datasets; excluded samples are left out.

    A shard in several split parts is checked once. Hashes that no column contains are computed, and not stored.
    """
    places = _places(datasets)
    kept = [_kept_hashes(dataset) for dataset in datasets]
    missing = [place for place in places if _shard(datasets, place) not in kept[place[0]]]
    hashes: list[np.ndarray] = []
    with closing(map_shards(partial(_hashes, datasets), missing, num_workers=num_workers)) as computed:
        for place in places:
            known = kept[place[0]].get(_shard(datasets, place))
            hashes.append(next(computed) if known is None else known)
    starts = np.cumsum([0, *(len(one) for one in hashes)])
    for group in groups_of_equal(np.concatenate(hashes)):
        first = ""
        for row in group.tolist():
            at = int(np.searchsorted(starts, row, side="right")) - 1
            number, shard = places[at]
            dataset = datasets[number]
            key = sample_key(dataset, shard, int(row - starts[at]))
            if (dataset.shard_names[shard], key) in dataset.excluded:
                continue
            if first:
                yield Problem(
                    dataset=dataset.path,
                    split_part=dataset.split_part,
                    shard=dataset.shard_names[shard],
                    key=key,
                    part=None,
                    message=f"has the content of {first}",
                )
            else:
                first = f"key {key!r} in {dataset.store.url(dataset.shard_names[shard])}"


def sample_key(dataset: PreparedDataset, shard: int, index: int) -> str:
    """Return the key of a sample; in a JSONL file, its number."""
    if isinstance(dataset, JsonlDataset):
        return str(index)
    offsets = read_index(dataset, shard)
    start, end = int(offsets[index]), int(offsets[index + 1])
    data = dataset.store.read_range(dataset.shard_names[shard], start, end - start)
    return parse_sample(data, where=f"{dataset.store.url(dataset.shard_names[shard])}, sample {index}")[0]


def _places(datasets: Sequence[PreparedDataset]) -> list[_Place]:
    places: dict[str, _Place] = {}
    for number, dataset in enumerate(datasets):
        for shard, name in enumerate(dataset.shard_names):
            places.setdefault(dataset.store.url(name), (number, shard))
    return list(places.values())


def _shard(datasets: Sequence[PreparedDataset], place: _Place) -> tuple[str, int, int]:
    dataset, shard = datasets[place[0]], place[1]
    return dataset.shard_names[shard], int(dataset.shard_counts[shard]), int(dataset.shard_sizes[shard])


def _kept_hashes(dataset: PreparedDataset) -> dict[tuple[str, int, int], np.ndarray]:
    """Return the hashes of the shards covered by the column `hash`."""
    column = None if isinstance(dataset, JsonlDataset) else read_columns(dataset.store).get("hash")
    if column is None or column.made_of != HASH_MADE_OF:
        return {}
    numbers = read_numbers(dataset.store, "hash", column)
    ends = np.cumsum([count for _, count, _ in column.shards])
    return {shard: numbers[end - shard[1] : end] for shard, end in zip(column.shards, ends.tolist(), strict=True)}


def _hashes(datasets: Sequence[PreparedDataset], place: _Place) -> np.ndarray:
    dataset, shard = datasets[place[0]], place[1]
    where = dataset.store.url(dataset.shard_names[shard])
    values = []
    for index, data in read_samples(dataset, shard):
        if isinstance(dataset, JsonlDataset):
            values.append(content_hash({"json": bytes(data).strip()}))
            continue
        _, parts = parse_sample(data, where=f"{where}, sample {index}")
        values.append(content_hash({part: bytes(content) for part, content in parts.items()}))
    return np.array(values, dtype=np.int64)
