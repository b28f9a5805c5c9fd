"""Megatron's indexed datasets (`corpus.idx` beside `corpus.bin`) as datasets: documents, or fixed windows of tokens.

A path is `corpus.idx`, or the prefix `corpus` as Megatron names it. A sample is a document: all its sequences in a row.
With `?window=4096` it is 4,096 tokens of all documents in a row; `window=4096+1` adds the first token of the next one,
for labels. The last tokens, which fill no window, are left out and counted in `fields`; `&last=keep` makes a shorter
sample of them. Samples are crude: `tokens` (int64, or the floats of the file), and of a document its number `document`,
`lengths` of its sequences and, in multimodal files, their `modes`.

The .idx has a header, then of each sequence the length (int32) and the byte in the .bin (int64), the borders of
documents in sequences (int64), and in multimodal files the mode of each sequence (int8). A sample costs its own entries
only, however many there are, and nothing of the .bin is read before.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import struct
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from energon_bridge.core.errors import (
    ConfigurationError,
    CorruptShardError,
    DatasetNotFoundError,
    EmptyDatasetError,
    ShardMissingError,
    SourceError,
)
from energon_bridge.core.format.foreign import ForeignDataset, ForeignFormat, ForeignRow, Location
from energon_bridge.core.format.nvmeta import DEFAULT_DATASET_CONFIG
from energon_bridge.core.order.rng import IntArray
from energon_bridge.core.storage import OpenFiles, Store, open_store

_logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\0\0"
_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_OURS = (".tar.idx", ".jsonl.idx")
_WRITE_AGAIN = "Copy or write both files again (IndexedDatasetBuilder, tools/preprocess_data.py)."
_OPTIONS = re.compile(r"window=([1-9]\d*)(\+1)?(&last=keep)?")


class _Window(NamedTuple):
    """Windows of `tokens` tokens in a row, and the first `more` (0 or 1) tokens of the next window, as a label."""

    tokens: int
    more: int
    keeps_last: bool

    def count(self, total: int) -> int:
        usable = max(0, total - self.more)
        return -(-usable // self.tokens) if self.keeps_last else usable // self.tokens

    def bounds(self, numbers: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of the first token of each window, and its number of tokens."""
        first = numbers.astype(np.int64) * self.tokens
        return first, np.minimum(self.tokens + self.more, total - first)

    def described(self, total: int) -> str:
        left = 0 if self.keeps_last else total - self.more - self.count(total) * self.tokens
        following = " and the one that follows" if self.more else ""
        return f"windows of {self.tokens:,}{following} of {total:,}; the last {left:,} are left out"


class _Index(NamedTuple):
    """An .idx file: the places of its arrays, as its header gives them."""

    store: Store
    name: str
    size: int
    dtype: np.dtype[Any]
    sequences: int
    documents: int
    has_modes: bool

    @property
    def path(self) -> str:
        return self.store.url(self.name)

    def read(self, array: str, first: IntArray, count: IntArray) -> list[np.ndarray]:
        """Return parts of an array, each given by its first entry and their number."""
        start = _HEADER.size
        for name, kind, entries in (
            ("lengths", "<i4", self.sequences),
            ("pointers", "<i8", self.sequences),
            ("borders", "<i8", self.documents + 1),
            ("modes", "<i1", self.sequences),
        ):
            size = np.dtype(kind).itemsize
            if name == array:
                break
            start += size * entries
        blocks = self.store.read_ranges(self.name, (start + size * first).tolist(), (size * count).tolist())
        return [np.frombuffer(block, kind) for block in blocks]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedDataset(ForeignDataset):
    """The documents or windows of a .bin; `num_tokens` are those of its index."""

    index: _Index
    window: _Window | None
    num_tokens: int

    @property
    def index_names(self) -> tuple[str, ...]:
        return (self.index.name,)

    def open_rows(self) -> IndexedRows:
        return IndexedRows(self)

    def read_values(self, column: str) -> np.ndarray:
        """Return a column, as `ForeignDataset` says: `tokens`, the number of tokens of each sample; or `document`."""
        numbers = np.arange(self.num_samples)
        if self.window is not None:
            return self.window.bounds(numbers, self.num_tokens)[1]
        if column == "document":
            return numbers
        index = self.index
        whole = {"lengths": index.sequences, "borders": index.documents + 1}
        lengths, borders = (index.read(name, np.array([0]), np.array([count]))[0] for name, count in whole.items())
        if (lengths < 0).any() or (np.diff(borders) < 0).any():
            raise SourceError(
                f"{index.path}: has lengths below 0, or documents that end before they begin. {_WRITE_AGAIN}"
            )
        ends = np.zeros(index.sequences + 1, np.int64)
        np.cumsum(lengths, out=ends[1:])
        return np.diff(ends[borders])


class _TokenRow(ForeignRow):
    """A sample; its parts are tensors and a number."""

    __slots__ = ()

    def __len__(self) -> int:
        return int(self.parts["tokens"].nbytes)


class IndexedRows:
    """Reads documents or windows by number; thread-safe."""

    def __init__(self, dataset: IndexedDataset) -> None:
        self._dataset = dataset
        self._is_checked = False

    def read(self, indices: IntArray) -> list[ForeignRow | Exception]:
        """Return samples in the order given, or the error of one whose entries are wrong.

        Raises:
            ShardMissingError, CorruptShardError: A file is gone or has another size.
        """
        self._check()
        dataset = self._dataset
        index = self._dataset.index
        if dataset.window is not None:
            first, counts = dataset.window.bounds(indices, dataset.num_tokens)
            return self._rows(indices, [{} for _ in range(indices.size)], first * index.dtype.itemsize, counts)
        borders = np.stack(index.read("borders", indices, np.full(indices.size, 2)))
        first = borders[:, 0]
        count = borders[:, 1] - borders[:, 0]
        wrong = (first < 0) | (count < 0) | (borders[:, 1] > index.sequences)
        first = np.where(wrong, 0, first)
        count = np.where(wrong, 0, count)
        entries = [index.read(name, first, count) for name in ("lengths", "pointers", "modes")[: 2 + index.has_modes]]
        found: list[dict[str, Any] | Exception] = []
        starts, counts = np.zeros((2, indices.size), np.int64)
        for place, (number, lengths, begins, *modes) in enumerate(zip(indices.tolist(), *entries, strict=True)):
            lengths = lengths.astype(np.int64)
            begins = np.append(begins, begins[-1:] + lengths[-1:] * index.dtype.itemsize)
            mistake = ""
            if wrong[place] or (lengths < 0).any() or ((begins < 0) | (begins > dataset.shard_sizes[0])).any():
                mistake = "points outside of the files"
            elif (np.diff(begins) != lengths * index.dtype.itemsize).any():
                mistake = "has sequences that are not one after the other"
            if mistake:
                found.append(SourceError(f"{index.path}, document {number}: {mistake}. {_WRITE_AGAIN}"))
                continue
            if lengths.size:
                starts[place], counts[place] = begins[0], lengths.sum()
            found.append({"document": number, "lengths": lengths} | dict(zip(("modes",), modes, strict=False)))
        return self._rows(indices, found, starts, counts)

    def _rows(
        self, indices: IntArray, found: list[dict[str, Any] | Exception], starts: IntArray, counts: IntArray
    ) -> list[ForeignRow | Exception]:
        """Return samples by the bytes where their tokens start, and what else they have."""
        from torch import from_numpy  # the command line imports no torch before it reads

        dtype = self._dataset.index.dtype
        sizes = counts * dtype.itemsize
        blocks = self._dataset.store.read_ranges(self._dataset.shard_names[0], starts.tolist(), sizes.tolist())
        kind = np.dtype(np.int64) if dtype.kind in "iu" else dtype.newbyteorder("=")
        out: list[ForeignRow | Exception] = []
        for number, parts, block in zip(indices.tolist(), found, blocks, strict=True):
            if isinstance(parts, Exception):
                out.append(parts)
                continue
            arrays = {name: from_numpy(value.copy()) for name, value in parts.items() if name != "document"}
            tokens = from_numpy(np.frombuffer(block, dtype).astype(kind))
            out.append(_TokenRow(f"{number:09d}", {"tokens": tokens, **parts, **arrays}, {}))
        return out

    def _check(self) -> None:
        if self._is_checked:
            return
        dataset = self._dataset
        sizes = {dataset.index.name: dataset.index.size, dataset.shard_names[0]: int(dataset.shard_sizes[0])}
        for name, size in sizes.items():
            if not dataset.store.exists(name):
                raise ShardMissingError(f"{dataset.store.url(name)}: the file is gone.")
            if dataset.store.size(name) != size:
                raise CorruptShardError(
                    f"{dataset.store.url(name)}: has other bytes than when it was opened. Open it again."
                )
        self._is_checked = True


# Opening --------------------------------------------------------------------------------------------------------------


def _split(path: Location) -> tuple[str, str]:
    """Return the prefix of both files, and the options."""
    base, _, options = os.fspath(path).partition("?")
    return base[:-4] if base.endswith((".idx", ".bin")) else base, options


def is_index(path: Location) -> bool:
    """Return whether a path names an index, by its end or by the two local files that it is the prefix of."""
    base = os.fspath(path).partition("?")[0]
    if base.endswith(".idx"):
        return not base.endswith(_OURS)
    prefix = os.path.expanduser(_split(path)[0])
    both = os.path.isfile(f"{prefix}.idx") and os.path.isfile(f"{prefix}.bin")
    return both and not os.path.isdir(base)


def open_index(
    path: Location,
    *,
    split_part: str,  # there are none: any means all samples
    dataset_config: str = DEFAULT_DATASET_CONFIG,
    open_files: OpenFiles | None = None,
) -> IndexedDataset:
    """Open the documents or windows of an index, as `ForeignFormat` says; raises ConfigurationError for options."""
    prefix, options = _split(path)
    folder, slash, name = prefix.rpartition("/")
    store = open_store(folder or slash or ".", files=open_files)
    index, size, total = _read_index(store, name)
    where = index.path + ("?" + options if options else "")
    window = None
    if options:
        given = _OPTIONS.fullmatch(options)
        if given is None:
            raise ConfigurationError(
                f"{where}: expected ?window=TOKENS, ?window=TOKENS+1 (with the token that follows) or either with "
                f"&last=keep, found {options!r}."
            )
        if index.has_modes:
            raise ConfigurationError(f"{where}: windows would lose the modes of its sequences. Leave out `?{options}`.")
        window = _Window(int(given[1]), 1 if given[2] else 0, given[3] is not None)
    count = index.documents if window is None else window.count(total)
    if not count:
        raise EmptyDatasetError(f"{where}: {total} tokens are less than one window. Choose a smaller one.")
    summary = f"{index.documents:,} documents of {total:,}" if window is None else window.described(total)
    head = hashlib.sha256(store.read_range(index.name, 0, min(index.size, 4096))).hexdigest()
    content = json.dumps(["megatron", name, size, index.size, count, window, head], separators=(",", ":"))
    return IndexedDataset(
        path=where,
        store=store,
        split_part="",
        shard_names=(f"{name}.bin",),
        shard_counts=np.array([count], dtype=np.int64),
        shard_sizes=np.array([size], dtype=np.int64),
        fingerprint=hashlib.sha256(content.encode()).hexdigest(),
        num_samples=count,
        columns=("tokens",) if window else ("tokens", "document"),
        group_rows=0,
        fields={"tokens": f"{summary} ({index.dtype.name})"},
        index=index,
        window=window,
        num_tokens=total,
    )


def _read_index(store: Store, name: str) -> tuple[_Index, int, int]:
    """Return the index of a prefix, the bytes of its .bin, and its tokens; raises what `open_index` raises.

    A .bin may go on after the last sequence, as that of a run that was stopped and began again: megatron-core reads
    what the index names, too.
    """
    for suffix in (".idx", ".bin"):
        if not store.exists(name + suffix):
            raise DatasetNotFoundError(f"{store.url(name + suffix)}: no such file. An index is NAME.idx and NAME.bin.")
    path = store.url(f"{name}.idx")
    bin_path = store.url(f"{name}.bin")
    found = store.size(f"{name}.idx")
    size = store.size(f"{name}.bin")
    head = store.read_range(f"{name}.idx", 0, min(found, _HEADER.size)).ljust(_HEADER.size, b"\0")
    magic, version, code, sequences, borders = _HEADER.unpack(head)
    if (magic, version) != (_MAGIC, 1) or code not in _TYPES:
        raise SourceError(
            f"{path}: is not an index of Megatron: it begins with {head[:18].hex(' ')}. Write it with megatron-core's "
            "IndexedDatasetBuilder."
        )
    expected = _HEADER.size + 12 * sequences + 8 * borders
    if found not in (expected, expected + sequences):
        raise SourceError(f"{path}: has {found} bytes, but its header says {expected}: was it cut off? {_WRITE_AGAIN}")
    if not size or not sequences:
        raise EmptyDatasetError(f"{bin_path}: has no tokens.")
    dtype = np.dtype(_TYPES[code])
    index = _Index(store, f"{name}.idx", found, dtype, sequences, borders - 1, found > expected)
    at = np.array([0, max(0, borders - 1)])
    ones = np.array([min(1, borders)] * 2)
    first, last = (entry.tolist() for entry in index.read("borders", at, ones))
    if first != [0] or last != [sequences]:
        raise SourceError(
            f"{path}: has {sequences} sequences, but its documents begin with {first} and end with {last}, so that "
            "some belong to none. Write it again, with end_document() after each document."
        )
    at = np.array([0, sequences - 1])
    ones = np.array([1, 1])
    (start, begin), (_, length) = (
        np.concatenate(index.read(name, at, ones)).tolist() for name in ("pointers", "lengths")
    )
    end = begin + length * dtype.itemsize
    if start or end > size:
        raise SourceError(f"{bin_path}: has {size} bytes, but its index says {end}: was it cut off? {_WRITE_AGAIN}")
    if end < size:
        _warn_of_rest(bin_path, size - end)
    return index, size, end // dtype.itemsize


@cache
def _warn_of_rest(path: str, count: int) -> None:
    _logger.warning("%s: %d bytes after the last sequence of its index are not read", path, count)


class _Indexes:
    """The format, as the core asks for it."""

    is_named = is_at = staticmethod(is_index)
    split_parts = staticmethod(lambda path: [""])
    open = staticmethod(open_index)


INDEXES: ForeignFormat = _Indexes()
