"""WebDatasets, to be sharded or shuffled again: samples keep their keys, parts and bytes."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from energon_bridge.errors import DuplicateKeyError
from energon_bridge.format.documents import expect_mapping, read_document
from energon_bridge.format.nvmeta import (
    DEFAULT_DATASET_CONFIG,
    INFO_JSON,
    INFO_YAML,
    meta_path,
    read_splits,
)
from energon_bridge.format.parallel import map_shards
from energon_bridge.format.tar import parse_sample
from energon_bridge.format.tar_index import ShardScan, scan_tar
from energon_bridge.prepare.discover import find_shards
from energon_bridge.rng import key_of
from energon_bridge.rows.base import Layout, Row
from energon_bridge.storage import LocalStore, Store, open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class TarSample:
    """The bytes of a sample in a tar."""

    key: str
    where: str
    store: Store
    shard: str
    offset: int
    length: int
    fields: Mapping[str, str]

    def sizes(self) -> list[tuple[str, int]]:
        """Return its parts with their sizes."""
        return [(name, len(data)) for name, data in self.read()[0]]

    def row(self) -> Row:
        """Return its parts as columns, for people to look at."""
        parts = ", ".join(f"{name} ({size:,} bytes)" for name, size in self.sizes())
        return Row(where=self.where, values={"parts": parts}, files={}, key=self.key)

    def mark(self) -> str:
        """Return a text that changes if the sample does."""
        path = Path(self.store.url(self.shard))
        stat = path.stat() if isinstance(self.store, LocalStore) and path.exists() else None
        changed = f"{stat.st_size} {stat.st_mtime_ns}" if stat is not None else ""
        return f"{self.key}\0{self.shard} {self.offset} {self.length} {changed}"

    def read(self) -> tuple[list[tuple[str, bytes]], Mapping[str, str]]:
        """Return its parts unchanged."""
        data = self.store.read_range(self.shard, self.offset, self.length)
        _, parts = parse_sample(data, where=self.where)
        return [(name, bytes(content)) for name, content in parts.items()], self.fields


class TarSource:
    """The samples of all tars below a folder, or of one tar, in the order of the tars."""

    kind = "WebDataset"

    def __init__(self, path: Path, *, numbered: bool, num_workers: int) -> None:
        self.where = str(path)
        self._store = open_store(path.parent if path.is_file() else path)
        self._numbered = numbered
        shards = [path.name] if path.is_file() else find_shards(self._store)
        self._prepared = not path.is_file() and any(self._store.exists(meta_path(n)) for n in (INFO_JSON, INFO_YAML))
        groups = self._groups(shards)
        excluded = frozenset[tuple[str, str]]()
        if self._prepared:
            excluded = read_splits(self._store).excluded_samples(shards)
        self._shards: list[str] = []
        self._starts = [0]
        self._samples: list[tuple[list[str], array[int], array[int]]] = []
        counts = []
        for part, listed in groups:
            before = self._starts[-1]
            scans = map_shards(partial(scan_tar, self._store), listed, num_workers=num_workers)
            for shard, scan in zip(listed, scans, strict=True):
                self._add(shard, scan, excluded)
            counts.append((part, self._starts[-1] - before))
        self.split_parts = tuple(counts) if self._prepared else ()
        if not numbered:
            check_keys((key for keys, _, _ in self._samples for key in keys), self.sample)

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, number: int) -> Row:
        """Return a sample's parts as columns, for people to look at."""
        return self.sample(number, Layout(sample_type="CrudeSample")).row()

    def sample(self, number: int, layout: Layout) -> TarSample:
        """Return a sample to be read."""
        at = bisect_right(self._starts, number) - 1
        keys, offsets, lengths = self._samples[at]
        index = number - self._starts[at]
        return TarSample(
            key=f"{number:09d}" if self._numbered else keys[index],
            where=f"{self._store.url(self._shards[at])}, sample {keys[index]!r}",
            store=self._store,
            shard=self._shards[at],
            offset=offsets[index],
            length=lengths[index],
            fields=layout.fields,
        )

    def propose(self) -> Layout:
        """Keep the sample type of a prepared dataset; keep the parts of others as they are."""
        rel = meta_path(DEFAULT_DATASET_CONFIG)
        if self._prepared and self._store.exists(rel):
            config: dict[str, Any] = expect_mapping(read_document(self._store, rel), where=self._store.url(rel))
            kind, fields = config.get("sample_type"), config.get("field_map")
            if isinstance(kind, dict) and isinstance(fields, dict) and "__class__" in kind:
                return Layout(sample_type=kind["__class__"], fields=fields)
        return Layout(sample_type="CrudeSample")

    def _groups(self, shards: list[str]) -> list[tuple[str, list[str]]]:
        if not self._prepared:
            return [("train", shards)]
        splits = read_splits(self._store)
        return [(part, splits.shards_of(part)) for part, listed in splits.parts.items() if listed]

    def _add(self, shard: str, scan: ShardScan, excluded: frozenset[tuple[str, str]]) -> None:
        kept = [n for n, key in enumerate(scan.keys) if (shard, key) not in excluded]
        self._samples.append(
            (
                [scan.keys[n] for n in kept],
                array("q", [scan.offsets[n] for n in kept]),
                array("q", [scan.offsets[n + 1] - scan.offsets[n] for n in kept]),
            )
        )
        self._shards.append(shard)
        self._starts.append(self._starts[-1] + len(kept))


def check_keys(keys: Iterable[str], sample: Callable[[int, Layout], TarSample]) -> None:
    """Raise DuplicateKeyError if a key occurs twice; `sample` returns a sample by its number."""
    hashes = np.array([key_of(key) for key in keys], np.uint64)
    order = np.argsort(hashes, kind="stable")
    same = np.flatnonzero(np.diff(hashes[order]) == 0)
    if len(same):
        first, second = (sample(int(order[same[0] + step]), Layout(sample_type="CrudeSample")) for step in (0, 1))
        raise DuplicateKeyError(
            f"{first.where} occurs again in {second.where}. Give the samples new keys with --keys number."
        )
