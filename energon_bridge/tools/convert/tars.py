"""WebDatasets and mixes as sources of `energon convert`, to be sharded or shuffled again.

Samples keep their keys, parts and bytes.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from energon_bridge.core.errors import CorruptShardError, DuplicateKeyError, SourceError
from energon_bridge.core.format.dataset import PreparedDataset
from energon_bridge.core.format.documents import read_document
from energon_bridge.core.format.nvmeta import DEFAULT_DATASET_CONFIG, is_prepared, meta_path, read_splits
from energon_bridge.core.format.parallel import map_shards
from energon_bridge.core.format.tar import Follow, parse_sample
from energon_bridge.core.format.tar_index import ShardScan, other_parts, scan_tar
from energon_bridge.core.order.rng import key_of
from energon_bridge.core.prepare.split import find_shards
from energon_bridge.core.storage import LocalStore, Store, open_store
from energon_bridge.tools.convert.rows import AskedSample, Layout, Row, SourceSample
from energon_bridge.tools.convert.splits import SPLIT_ORDER, split_files

if TYPE_CHECKING:
    from energon_bridge.core.mix.leaves import OpenLeaf


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
    follow: Follow | None = None
    num_rejected: int = 0

    def sizes(self) -> list[tuple[str, int]]:
        return [(name, len(data)) for name, data in self.read()[0]]

    def row(self) -> Row:
        """Return its parts as columns, for people to look at."""
        parts = ", ".join(f"{name} ({size:,} bytes)" for name, size in self.sizes())
        return Row(where=self.where, values={"parts": parts}, files={}, key=self.key)

    def mark(self) -> str:
        path = Path(self.store.url(self.shard))
        stat = path.stat() if isinstance(self.store, LocalStore) and path.exists() else None
        changed = f"{stat.st_size} {stat.st_mtime_ns}" if stat is not None else ""
        return f"{self.key}\0{self.shard} {self.offset} {self.length} {changed}"

    def read(self) -> tuple[list[tuple[str, bytes]], Mapping[str, str]]:
        """Return its parts unchanged; raises SourceError for one that is not a file, or there twice."""
        data = self.store.read_range(self.shard, self.offset, self.length)
        try:
            _, parts = parse_sample(data, where=self.where, follow=self.follow)
        except CorruptShardError as error:
            raise SourceError(str(error)) from error
        return [(name, bytes(content)) for name, content in parts.items()], self.fields


class _TarSamples:
    """Samples in tars, by number; a subclass says where one lies."""

    left_out: tuple[str, ...] = ()
    _numbered: bool

    def _find(self, number: int) -> tuple[Store, str, str, int, int, Follow | None]:
        """Return of a sample the store, the shard, the key, offset and length, and what follows its links."""
        raise NotImplementedError

    def row(self, number: int) -> Row:
        """Return a sample's parts as columns, for people to look at."""
        return self._sample(number, {}).row()

    def sample(self, number: int, layout: Layout) -> SourceSample:
        """Return a sample, not read yet."""
        return AskedSample.by(layout, self._sample(number, layout.fields))

    def _sample(self, number: int, fields: Mapping[str, str]) -> TarSample:
        store, shard, key, offset, length, follow = self._find(number)
        return TarSample(
            key=f"{number:09d}" if self._numbered else key,
            where=f"{store.url(shard)}, sample {key!r}",
            store=store,
            shard=shard,
            offset=offset,
            length=length,
            fields=fields,
            follow=follow,
        )

    def _key_twice(self, first: int, second: int) -> DuplicateKeyError:
        places = [self.sample(number, _CRUDE).where for number in (first, second)]
        return DuplicateKeyError(f"{' occurs again in '.join(places)}. Give the samples new keys with --keys number.")


_logger = logging.getLogger(__name__)
_CRUDE = Layout(sample_type="CrudeSample")


class TarSource(_TarSamples):
    """The samples of all tars below a folder, or of one tar, in the order of the tars."""

    kind = "WebDataset"

    def __init__(self, path: Path, *, numbered: bool, num_workers: int) -> None:
        self.where = str(path)
        self._store = open_store(path.parent if path.is_file() else path)
        self._numbered = numbered
        shards = [path.name] if path.is_file() else find_shards(self._store)
        self._prepared = not path.is_file() and is_prepared(self._store)
        groups = self._groups(shards)
        excluded = frozenset[tuple[str, str]]()
        if self._prepared:
            excluded = read_splits(self._store).excluded_samples(shards)
        self.empty: list[str] = []
        self._shards: list[str] = []
        self._starts = [0]
        self._samples: list[tuple[list[str], array[int], array[int]]] = []
        self._follow: list[Follow | None] = []
        self._parts = array("q")  # the names of a sample's parts, as a number of `_lists`
        self._lists: dict[tuple[str, ...], int] = {}
        counts = []
        for part, listed in groups:
            before = self._starts[-1]
            scan_one = partial(scan_tar, self._store, may_be_empty=True)
            scans = map_shards(scan_one, listed, num_workers=num_workers)
            for shard, scan in zip(listed, scans, strict=True):
                if scan.keys:
                    self._add(shard, scan, excluded)
                else:
                    self.empty.append(shard)
            counts.append((part, self._starts[-1] - before))
        self.split_parts = tuple(counts) if self._prepared or len(counts) > 1 or counts[0][0] != "train" else ()
        lists = [*self._lists]
        for first, second in equal_keys(key for keys, _, _ in self._samples for key in keys):
            there, here = ((store.url(shard), key) for store, shard, key, *_ in map(self._find, (first, second)))
            names = lists[self._parts[first]], lists[self._parts[second]]
            if there[0] != here[0] and set(names[0]).isdisjoint(names[1]):
                raise other_parts(*there, names[0], here[0], names[1])
            if not numbered:
                raise self._key_twice(first, second)

    def __len__(self) -> int:
        return self._starts[-1]

    def _find(self, number: int) -> tuple[Store, str, str, int, int, Follow | None]:
        at = bisect_right(self._starts, number) - 1
        keys, offsets, lengths = self._samples[at]
        index = number - self._starts[at]
        return self._store, self._shards[at], keys[index], offsets[index], lengths[index], self._follow[at]

    def propose(self) -> Layout:
        """Keep the sample type of a prepared dataset; keep the parts of others as they are."""
        rel = meta_path(DEFAULT_DATASET_CONFIG)
        if self._prepared and self._store.exists(rel):
            config = read_document(self._store, rel).mapping()
            kind = config.get("sample_type")
            fields = config.get("field_map")
            if isinstance(kind, dict) and isinstance(fields, dict) and "__class__" in kind:
                return Layout(sample_type=kind["__class__"], fields=fields)
        return _CRUDE

    def _groups(self, shards: list[str]) -> list[tuple[str, list[str]]]:
        """Return the shards of each split part: of a prepared dataset its own, else those that names tell."""
        if self._prepared:
            splits = read_splits(self._store)
            groups = [(part, splits.shards_of(part)) for part, listed in splits.parts.items() if listed]
        else:
            of = {name.as_posix(): part for part, name in split_files(map(PurePosixPath, shards), self.where).files}
            parts = dict.fromkeys(of.values())
            if [*parts] == [""]:
                return [("train", shards)]
            groups = [(part, [shard for shard in shards if of.get(shard) == part]) for part in parts]
        if left := sorted({*shards}.difference(*(listed for _, listed in groups))):
            _logger.warning(
                "%s: %d of %d tars are left out, such as %s: they are in no split part. If they were added after it "
                "was prepared, prepare it again",
                *(self.where, len(left), len(shards), left[0]),
            )
        return groups

    def _add(self, shard: str, scan: ShardScan, excluded: frozenset[tuple[str, str]]) -> None:
        kept = [n for n, key in enumerate(scan.keys) if (shard, key) not in excluded]
        self._samples.append(
            (
                [scan.keys[n] for n in kept],
                array("q", [scan.offsets[n] for n in kept]),
                array("q", [scan.offsets[n + 1] - scan.offsets[n] for n in kept]),
            )
        )
        scan.check(unseen=True)
        self._follow.append(scan.follow(self._store, shard))
        self._parts.extend(self._lists.setdefault((*scan.parts_of(n),), len(self._lists)) for n in kept)
        self._shards.append(shard)
        self._starts.append(self._starts[-1] + len(kept))


def equal_keys(keys: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yield the numbers of two samples with one key, for each key that occurs again."""
    hashes = np.array([key_of(key) for key in keys], np.uint64)
    order = np.argsort(hashes, kind="stable")
    same = np.flatnonzero(np.diff(hashes[order]) == 0)
    yield from zip(order[same].tolist(), order[same + 1].tolist(), strict=True)


_SCANS = 16


# Mixes ----------------------------------------------------------------------------------------------------------------
#
# The datasets of a mix as one source: merged, with subsets and filters applied, each sample once. Weights and
# repetitions only matter in training and are ignored here. All datasets must have the same sample type and field map,
# or be crude.


class MixedTars(_TarSamples):
    """The samples of the datasets of a mix, split by split, dataset by dataset."""

    kind = "mix"

    def __init__(self, path: Path, *, numbered: bool) -> None:
        from energon_bridge.core.mix import MixIndex, load_mix  # only mixes need to wait for it
        from energon_bridge.core.mix.leaves import open_leaves
        from energon_bridge.core.mix.opener import DatasetOpener

        self.where = str(path)
        self._numbered = numbered
        document = MixIndex().document(str(path))
        named = document.get("splits") if isinstance(document, dict) else None
        self._parts: list[tuple[PreparedDataset, np.ndarray]] = []
        counts: list[tuple[str, int]] = []
        for split in [part for part in SPLIT_ORDER if part in (named or ())]:
            mix = load_mix(path, split_part=split)
            leaves = open_leaves(mix, DatasetOpener(), shuffle_epochs=None)
            samples = [self._leaf_samples(leaf) for leaf in leaves]
            self._parts += samples
            counts.append((split, sum(numbers.size for _, numbers in samples)))
        self.split_parts = tuple(counts)
        self._starts = np.cumsum([0, *(numbers.size for _, numbers in self._parts)]).tolist()
        if not numbered:
            for pair in equal_keys(self.sample(n, _CRUDE).key for n in range(len(self))):
                raise self._key_twice(*pair)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _find(self, number: int) -> tuple[Store, str, str, int, int, Follow | None]:
        at = bisect_right(self._starts, number) - 1
        dataset, numbers = self._parts[at]
        shard, local = dataset.place_of(int(numbers[number - self._starts[at]]))
        scan = _scan(dataset.path, shard)
        start, end = scan.offsets[local : local + 2]
        return dataset.store, shard, scan.keys[local], start, end - start, _links(dataset.path, shard)

    def propose(self) -> Layout:
        """Keep the common sample type of all datasets."""
        first = self._parts[0][0]
        for dataset, _ in self._parts[1:]:
            if _form(dataset) != _form(first):
                raise SourceError(
                    f"{self.where}: {first.path} and {dataset.path} differ in sample type or field map. Convert them "
                    "as crude samples: --sample-type CrudeSample"
                )
        if first.is_crude or first.field_map is None:
            return _CRUDE
        return Layout(sample_type=first.sample_type.__name__, fields=first.field_map.fields)

    def _leaf_samples(self, leaf: OpenLeaf) -> tuple[PreparedDataset, np.ndarray]:
        """Return the dataset of a leaf and the numbers of the leaf's samples, without excluded ones."""
        dataset = leaf.dataset
        if type(dataset) is not PreparedDataset:
            raise SourceError(
                f"{self.where}: {dataset.path} is a join, a JSONL file or a table, but only prepared datasets of tars "
                "can be merged. Convert the others separately, and join during training."
            )
        numbers = np.arange(leaf.start, leaf.stop) if leaf.kept is None else leaf.kept
        if not dataset.excluded:
            return dataset, numbers
        kept = [number for number in numbers.tolist() if _named(dataset, number) not in dataset.excluded]
        return dataset, np.array(kept, dtype=np.int64)


def _form(dataset: PreparedDataset) -> tuple[type, Any]:
    return dataset.sample_type, dataset.field_map and dataset.field_map.fields


def _named(dataset: PreparedDataset, number: int) -> tuple[str, str]:
    """Return shard and key of a sample."""
    shard, local = dataset.place_of(number)
    return shard, _scan(dataset.path, shard).keys[local]


@lru_cache(maxsize=_SCANS)
def _scan(root: str, shard: str) -> ShardScan:
    scan = scan_tar(open_store(root), shard)
    scan.check(unseen=True)
    return scan


@lru_cache(maxsize=_SCANS)
def _links(root: str, shard: str) -> Follow | None:
    return _scan(root, shard).follow(open_store(root), shard)
