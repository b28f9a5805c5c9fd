"""The samples of a dataset that have some keys: looked up in its key index, or in the headers of its shards."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import numpy as np

from energon_bridge.errors import KeyIndexError
from energon_bridge.format.dataset import PreparedDataset
from energon_bridge.format.join import JoinedDataset
from energon_bridge.format.key_index import find_keys, local_key_index
from energon_bridge.format.nvmeta import INDEX_SQLITE, meta_path, read_info
from energon_bridge.format.tar_index import scan_tar
from energon_bridge.rng import IntArray

logger = logging.getLogger(__name__)

_MANY = 100
"""Shards whose search takes long enough to speak of it."""


def samples_by_key(dataset: PreparedDataset | JoinedDataset, keys: Collection[str]) -> dict[str, IntArray]:
    """Return for each key that a dataset has the indices of its samples, rising; of a join, of its rows.

    The key of a row of a join is that of its primary, the key of a line of a JSONL file or of a row of a
    table its number.

    Raises:
        KeyIndexError: The key index cannot be read, or is not that of the dataset.
        CorruptShardError: There is no key index, and a shard is damaged.
    """
    if isinstance(dataset, JoinedDataset):
        key_of = {place: key for key, place in _places(dataset.parts[0].dataset, keys)}
        primary = dataset.rows[:, 0]
        rows = np.flatnonzero(np.isin(primary, np.array(list(key_of), dtype=np.int64)))
        found: Iterable[tuple[str, int]] = ((key_of[int(primary[row])], row) for row in rows.tolist())
    else:
        found = _places(dataset, keys)
    samples: dict[str, list[int]] = {}
    for key, sample in found:
        samples.setdefault(key, []).append(sample)
    return {key: np.unique(np.array(of_key, dtype=np.int64)) for key, of_key in samples.items()}


def _places(dataset: PreparedDataset, keys: Collection[str]) -> Iterator[tuple[str, int]]:
    if dataset.key_format is not None:
        numbers = (key for key in keys if key.isascii() and key.isdecimal() and len(key) < 19)
        known = ((key, int(key)) for key in numbers if dataset.key_format.format(int(key)) == key)
        yield from (place for place in known if place[1] < dataset.num_samples)
        return
    firsts = (np.cumsum(dataset.shard_counts) - dataset.shard_counts).tolist()
    if dataset.store.exists(meta_path(INDEX_SQLITE)):
        yield from _looked_up(dataset, list(keys), firsts)
        return
    logger.log(
        logging.WARNING if len(firsts) > _MANY else logging.INFO,
        "%s has no key index: its %d shards are searched for %d keys, header by header. `energon prepare "
        "--tar-index-only` writes one, which is asked instead",
        dataset.path,
        len(firsts),
        len(keys),
    )
    wanted = {*keys}
    for shard, first in zip(dataset.shard_names, firsts, strict=True):
        found = scan_tar(dataset.store, shard).keys
        yield from ((key, first + number) for number, key in enumerate(found) if key in wanted)


def _looked_up(dataset: PreparedDataset, keys: list[str], firsts: list[int]) -> Iterator[tuple[str, int]]:
    shards = list(read_info(dataset.store).shard_counts)
    with tempfile.TemporaryDirectory(prefix="energon-keys-") as scratch:
        found = find_keys(local_key_index(dataset.store, str(Path(scratch) / INDEX_SQLITE)), keys)
    places: dict[str, list[int]] = {}  # a split may list a shard twice, and leave others out
    for place, shard in enumerate(dataset.shard_names):
        places.setdefault(shard, []).append(place)
    for key, one in zip(keys, found, strict=True):
        if one is None:
            continue
        number, local = one
        of_shard = places.get(shards[number], []) if number < len(shards) else None
        if of_shard is None or any(local >= dataset.shard_counts[place] for place in of_shard):
            raise KeyIndexError(
                f"{dataset.path}: the key index has other samples than `.info.json` counts. Write both again: "
                f"`energon prepare --tar-index-only {dataset.path}`."
            )
        yield from ((key, firsts[place] + local) for place in of_shard)
