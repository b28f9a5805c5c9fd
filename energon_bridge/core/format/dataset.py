"""Opens a prepared dataset: everything that training needs before it reads the first sample.

Opening reads `.info.json`, the split file and `dataset.yaml`, and looks up the sizes of the shards; it reads no tar, no
`.tar.idx` and no sqlite index. The shards keep energon's order, that of the split file.

The fingerprint hashes shard names, counts and sizes in split order, the excluded samples and the content of
dataset.yaml. It does not change if a tar is edited without changing its size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from energon_bridge.core.errors import DatasetError, EmptyDatasetError, MetadataError, ShardMissingError, did_you_mean
from energon_bridge.core.format.dataset_config import DatasetConfig, DatasetConfigs, PartFilter
from energon_bridge.core.format.field_map import FieldMap
from energon_bridge.core.format.nvmeta import (
    DEFAULT_DATASET_CONFIG,
    DEFAULT_SPLIT_CONFIG,
    INFO_JSON,
    NOTHING,
    DatasetInfo,
    leads_out,
    meta_path,
    read_info,
    read_splits,
)
from energon_bridge.core.format.tar_index import index_name, load_index
from energon_bridge.core.samples import CrudeSample
from energon_bridge.core.storage import FileTimes, LocalStore, Store, as_far, open_store

FINGERPRINT_VERSION = 1
_MOST_CHECKED = 1000
"""Shards of a dataset whose index sizes are checked against `.info.json` when it is opened, one stat each."""
_ENCODER = json.JSONEncoder(separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDataset:
    """One split part of a prepared dataset; arrays have one entry per shard of `shard_names`.

    `source_path` is its path in the `SourceInfo` of its samples; None: its own path. `key_format` makes keys from the
    numbers of samples, for datasets whose samples have no keys. `config_name` is the name of its dataset.yaml.
    `shard_times` are the modification times when it was opened; None: the storage has none.
    """

    key_format: ClassVar[str | None] = None

    path: str
    store: Store
    split_part: str
    shard_names: tuple[str, ...]
    shard_counts: np.ndarray = field(repr=False, compare=False)
    shard_sizes: np.ndarray = field(repr=False, compare=False)
    shard_times: FileTimes | None = field(default=None, repr=False, compare=False)
    excluded: frozenset[tuple[str, str]] = NOTHING
    sample_type: type = CrudeSample
    field_map: FieldMap | None = None
    sample_loader: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    part_filter: PartFilter | None = None
    subflavors: dict[str, Any] = field(default_factory=dict)
    fingerprint: str
    num_samples: int
    has_checksums: bool = False
    config_name: str = DEFAULT_DATASET_CONFIG
    source_path: Any = field(default=None, repr=False, compare=False)

    @property
    def datasets(self) -> tuple[PreparedDataset, ...]:
        """The datasets that it is read from: itself (those of a join, see `JoinedDataset`)."""
        return (self,)

    @property
    def is_crude(self) -> bool:
        """Whether its samples have no type, so that a cooker makes them."""
        return issubclass(self.sample_type, CrudeSample)

    def place_of(self, number: int) -> tuple[str, int]:
        """Return the shard of a sample, and its number in the shard."""
        ends = np.cumsum(self.shard_counts)
        shard = int(np.searchsorted(ends, number, side="right"))
        return self.shard_names[shard], number - int(ends[shard] - self.shard_counts[shard])

    @property
    def index_remedy(self) -> str:
        """Return what to do about a wrong index of a shard."""
        return f"Rebuild it with `energon prepare --tar-index-only {self.path}`."

    def missing_field(self, parts: Mapping[str, Any], there: Iterable[str]) -> Exception | None:
        """Return the error for the first field of the field map that `parts` lack; the sample has the parts `there`."""
        where = self.store.url(meta_path(self.config_name))
        return None if self.field_map is None else self.field_map.missing(parts, there, where=where)


def open_dataset(
    path: str | os.PathLike[str],
    *,
    split_part: str,
    dataset_config: str = DEFAULT_DATASET_CONFIG,
    split_config: str = DEFAULT_SPLIT_CONFIG,
    trust_remote_code: bool = False,
) -> PreparedDataset:
    """Open one split part of a prepared dataset in a folder or at a URL.

    Raises DatasetNotFoundError, NotPreparedError, UnknownSplitError, EmptyDatasetError, ShardMissingError,
    MetadataError, FieldMapError or UntrustedCodeError, each naming the file and what to do.
    """
    configs = DatasetConfigs(trust_remote_code=trust_remote_code)
    return read_prepared(
        open_store(path), configs, split_part=split_part, dataset_config=dataset_config, split_config=split_config
    )[0]


def read_prepared(
    store: Store,
    configs: DatasetConfigs,
    *,
    split_part: str,
    dataset_config: str,
    split_config: str,
    warn: Callable[[str], None] | None = None,
) -> tuple[PreparedDataset, DatasetConfig]:
    """Read one split part of the dataset in a store; return it with the content of its dataset.yaml.

    `warn` is called with what is doubtful in the split file. Errors are those of `open_dataset`.
    """
    info = read_info(store)
    config = configs.read(store, dataset_config)
    splits = read_splits(store, config.split_config or split_config)
    shards = splits.shards_of(split_part)
    if warn is not None:
        for doubt in splits.doubts(info.shard_counts, store.exists):
            warn(doubt)
    counts = [_count(store, info, shard, where=splits.where, split_part=split_part) for shard in shards]
    if sum(counts) == 0:
        raise EmptyDatasetError(
            f"{splits.where}: the split part {split_part!r} of {store.root} has no samples "
            f"({len(shards)} shards). Prepare the dataset with another split, or choose another part."
        )
    sizes, times = _stamps(store, shards, where=splits.where, split_part=split_part)
    excluded = splits.excluded_samples(shards)
    fingerprint = _fingerprint(shards, counts, sizes, excluded, config.canonical)
    facts = SplitFacts(shards, counts, sizes, excluded, fingerprint, info.has_checksums, times)
    return prepared(store, config, facts, split_part=split_part, config_name=dataset_config), config


class SplitFacts(NamedTuple):
    """What opening finds out of a split part: per shard, samples, bytes and modification time (ns; None: no times).

    `excluded` has (shard, key) of each excluded sample.
    """

    shards: Sequence[str]
    counts: Sequence[int]
    sizes: Sequence[int]
    excluded: frozenset[tuple[str, str]]
    fingerprint: str
    has_checksums: bool
    times: Sequence[int] | None = None


def prepared(
    store: Store, config: DatasetConfig, facts: SplitFacts, *, split_part: str, config_name: str
) -> PreparedDataset:
    """Build a dataset from its parts."""
    return PreparedDataset(
        path=store.root,
        store=store,
        split_part=split_part,
        shard_names=tuple(facts.shards),
        shard_counts=np.array(facts.counts, dtype=np.int64),
        shard_sizes=np.array(facts.sizes, dtype=np.int64),
        shard_times=None if facts.times is None else FileTimes(facts.times),
        excluded=facts.excluded,
        sample_type=config.form.sample_type,
        field_map=config.form.field_map,
        sample_loader=config.form.sample_loader,
        part_filter=config.form.part_filter,
        subflavors=config.subflavors,
        fingerprint=facts.fingerprint,
        num_samples=sum(facts.counts),
        has_checksums=facts.has_checksums,
        config_name=config_name,
    )


_Dataset = TypeVar("_Dataset", bound=PreparedDataset)


def with_times(dataset: _Dataset) -> _Dataset:
    """Return a dataset that was just opened with the modification times of its shards, if its storage has them."""
    store = dataset.store
    if dataset.shard_times is not None or not isinstance(store, LocalStore):
        return dataset
    return dataclasses.replace(dataset, shard_times=FileTimes(store.stamp(name)[1] for name in dataset.shard_names))


def expect_shard(dataset: PreparedDataset, shard: int) -> None:
    """Have reads of a shard raise CorruptShardError if it is not the file that was there when the dataset was opened.

    Call it before the shard is read for the first time.
    """
    time = 0 if dataset.shard_times is None else dataset.shard_times[shard]
    dataset.store.expect(dataset.shard_names[shard], int(dataset.shard_sizes[shard]), time)


def read_index(dataset: PreparedDataset, shard: int, *, cut_off: bool = False) -> np.ndarray:
    """Read the index of shard number `shard`: uint64 offsets of its samples and of the end, shape (count + 1,).

    With `cut_off` the shard may be shorter than its index says. Raises ShardMissingError or CorruptShardError, naming
    the file and the remedy.
    """
    return load_index(
        dataset.store,
        dataset.shard_names[shard],
        count=int(dataset.shard_counts[shard]),
        size=2**63 if cut_off else int(dataset.shard_sizes[shard]),
        remedy=dataset.index_remedy,
    )


def check_counts(dataset: PreparedDataset) -> None:
    """Raise MetadataError if `.info.json` counts fewer samples than an index has: they would silently never be read.

    (An index with fewer samples is found when it is read.) In a dataset of many shards, only shards with a count of 0
    are checked, since nothing else will ever read their indexes.
    """
    if not isinstance(dataset.store, LocalStore):
        return
    counts = dataset.shard_counts
    shards = range(len(counts)) if len(counts) <= _MOST_CHECKED else np.flatnonzero(counts == 0).tolist()
    for shard in shards:
        name = dataset.shard_names[shard]
        count = int(counts[shard])
        try:
            indexed = dataset.store.size(index_name(name)) // 8 - 1
        except DatasetError:
            continue  # reading it will raise
        if indexed > count:
            raise MetadataError(
                f"{dataset.store.url(meta_path(INFO_JSON))}: counts {count} samples in {name!r}, but its index has "
                f"{indexed}, so {indexed - count} would never be read. Count again: `energon prepare --tar-index-only "
                f"{dataset.path}`."
            )


def _count(store: Store, info: DatasetInfo, shard: str, *, where: str, split_part: str) -> int:
    """Return the number of samples of a shard; raises MetadataError if the dataset has none of that name."""
    if leads_out(shard):
        raise MetadataError(f"{where}, field `split_parts.{split_part}`: {shard!r} is outside of the dataset.")
    count = info.shard_counts.get(shard)
    if count is None:
        hint = did_you_mean(shard, info.shard_counts) or (
            f" If it was added, prepare again, which writes the split anew: energon prepare {store.root} "
            "--non-interactive --split-ratio 8,1,1 --force-overwrite"
        )
        raise MetadataError(
            f"{where}, field `split_parts.{split_part}`: the shard {shard!r} is not in "
            f"{store.url(meta_path('.info.json'))}.{hint}"
        )
    return count


def _stamps(store: Store, shards: Sequence[str], *, where: str, split_part: str) -> tuple[list[int], list[int] | None]:
    """Return the sizes of shards, and their modification times if the storage has them."""
    far = as_far(store)
    if far is not None:
        with contextlib.suppress(ShardMissingError):  # the loop below finds out which one
            return list(far.sizes(shards)), None
    stamps = []
    for shard in shards:
        try:
            stamps.append(store.stamp(shard) if isinstance(store, LocalStore) else (store.size(shard), 0))
        except ShardMissingError as error:
            raise ShardMissingError(
                f"{store.url(shard)}: no such shard, but {where} lists it in {split_part!r}. Restore it, or run "
                f"`energon prepare {store.root}` again."
            ) from error
    times = [time for _, time in stamps] if isinstance(store, LocalStore) else None
    return [size for size, _ in stamps], times


def _fingerprint(
    shards: list[str], counts: list[int], sizes: list[int], excluded: frozenset[tuple[str, str]], config: str
) -> str:
    content = [FINGERPRINT_VERSION, list(zip(shards, counts, sizes, strict=True)), sorted(excluded), config]
    return hashlib.sha256(_ENCODER.encode(content).encode()).hexdigest()
