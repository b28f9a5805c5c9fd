"""Marks of content: hashes that show, at the cost of a few reads, whether data was written again since a run began.

A fingerprint (names, counts and sizes of shards) keys the order, so that it is the same wherever the data lies. Beside
it, a state has the mark of each dataset, taken when the loader was made. Data whose mark differs is other data,
although names, counts and sizes fit.

The mark of a table hashes the last 64 KiB of each parquet file: all of a small one, and the footer, which has the least
and greatest value of each column in each row group. That of arrow and JSONL files and indexes of Megatron hashes the
first 64 KiB, too. That of prepared tars hashes the offsets of samples in their indexes, of local ones only, and only in
mixes of at most 1,000 such shards. What a mark does not cover (the middle of a large file, a tar with samples of the
same sizes) only checksums tell.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

from energon_bridge.core.errors import DatasetError
from energon_bridge.core.format.dataset import PreparedDataset
from energon_bridge.core.format.foreign import ForeignDataset
from energon_bridge.core.format.join import JoinedDataset
from energon_bridge.core.format.jsonl import JsonlDataset
from energon_bridge.core.format.tar_index import index_name
from energon_bridge.core.storage import LocalStore, Store, as_far

END_BYTES = 64 << 10
_MOST_SHARDS = 1000
_AT_ONCE = 32
_MARK_BYTES = 8


def marks_of(datasets: Sequence[PreparedDataset | JoinedDataset]) -> list[str]:
    """Return the mark of each dataset of a mix, empty if it has none."""
    parts = {id(one): one for dataset in datasets for one in dataset.datasets}
    reads_indexes = sum(len(one.shard_names) for one in parts.values() if _is_tars(one)) <= _MOST_SHARDS
    marked = [one for one in parts.values() if reads_indexes or not _is_tars(one)]
    with ThreadPoolExecutor(_AT_ONCE, "energon-marks") as pool:
        # Where storage answers slowly, each takes a request or two.
        over = pool.map if any(as_far(one.store) is not None for one in marked) else map
        marks = dict(zip(map(id, marked), over(_mark, marked), strict=True))
    return [_joined([marks.get(id(one), "") for one in dataset.datasets]) for dataset in datasets]


def _is_tars(dataset: PreparedDataset) -> bool:
    return not isinstance(dataset, ForeignDataset | JsonlDataset)


def _joined(marks: Sequence[str]) -> str:
    return marks[0] if len(marks) == 1 else _digest(mark.encode() for mark in marks) if all(marks) else ""


def _mark(dataset: PreparedDataset) -> str:
    """Return the mark of a dataset; empty if a file cannot be read: reading its samples raises the error."""
    try:
        if not _is_tars(dataset):
            names = dataset.shard_names
            seen: tuple[int, ...] = ()
            if isinstance(dataset, ForeignDataset):
                seen = dataset.seen_ends
                ends = zip_longest(dataset.shard_names, seen, fillvalue=0)
                names = (*[str(name) for name, end in ends if not end], *dataset.index_names)
            return _digest([repr(seen).encode(), *_ends(dataset.store, names)])
        if not isinstance(dataset.store, LocalStore):
            return ""
        # The last entry of an index, the end of the archive, is not the same in all programs.
        return _digest(_ends(dataset.store, [index_name(name) for name in dataset.shard_names], without=8))
    except DatasetError:
        return ""


def _ends(store: Store, names: Sequence[str], without: int = 0) -> Iterable[bytes]:
    """Return the first and last 64 KiB of each file, joined, without so many bytes at the very end."""
    far = as_far(store)
    sizes = [store.size(name) for name in names] if far is None else far.sizes(names)
    wanted = []
    for name, size in zip(names, sizes, strict=True):
        length = max(0, size - without)
        starts = [0] if length <= 2 * END_BYTES else [0, length - END_BYTES]
        wanted.append((name, starts, [length] if len(starts) == 1 else [END_BYTES] * 2))
    blocks = [store.read_ranges(*one) for one in wanted] if far is None else far.read_all(wanted)
    return (b"".join(block) for block in blocks)


def _digest(pieces: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=_MARK_BYTES)
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.hexdigest()
