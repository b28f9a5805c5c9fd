"""Summary of a prepared dataset, from its metadata alone: for `energon info`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from energon_bridge.errors import ShardMissingError
from energon_bridge.format.columns import Column, read_columns
from energon_bridge.format.documents import expect_mapping, read_document
from energon_bridge.format.jsonl import is_jsonl, open_jsonl
from energon_bridge.format.nvmeta import (
    DEFAULT_DATASET_CONFIG,
    DEFAULT_SPLIT_CONFIG,
    INDEX_SQLITE,
    meta_path,
    read_info,
    read_splits,
)
from energon_bridge.rows.dataset import is_unprepared_table, open_tables, table_parts
from energon_bridge.storage import Store, open_store

_FIRST_PARTS = ("train", "val", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSummary:
    """One split part; excluded shards are not counted, excluded samples are."""

    name: str
    num_shards: int
    num_samples: int
    num_excluded_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSummary:
    """The numbers of a prepared dataset; `num_bytes` counts the shards, `missing_shards` are listed but not there."""

    path: str
    num_samples: int
    num_shards: int
    num_bytes: int
    missing_shards: tuple[str, ...]
    energon_version: str | None
    sample_type: str
    field_map: dict[str, str]
    subflavors: dict[str, Any]
    has_key_index: bool
    parts: tuple[PartSummary, ...]
    columns: dict[str, Column]


def summarize_dataset(
    path: str | os.PathLike[str],
    *,
    split_config: str = DEFAULT_SPLIT_CONFIG,
    dataset_config: str = DEFAULT_DATASET_CONFIG,
) -> DatasetSummary:
    """Summarize a prepared dataset of any sample type, crude and legacy ones too; runs no code of the dataset.

    Raises DatasetNotFoundError, NotPreparedError or MetadataError.
    """
    if is_jsonl(path):
        return _summarize_jsonl(path)
    if is_unprepared_table(path):
        return _summarize_tables(path)
    store = open_store(path)
    store.check_root()
    info = read_info(store)
    config = _config(store, dataset_config)
    splits = read_splits(store, config.get("split_config") or split_config)
    num_bytes = 0
    missing = []
    for shard in info.shard_counts:
        try:
            num_bytes += store.size(shard)
        except ShardMissingError:
            missing.append(shard)
    parts = []
    for name in sorted(splits.parts, key=lambda part: (part not in _FIRST_PARTS, _rank(part), part)):
        shards = splits.shards_of(name)
        parts.append(
            PartSummary(
                name=name,
                num_shards=len(shards),
                num_samples=sum(info.shard_counts.get(shard, 0) for shard in shards),
                num_excluded_samples=len(splits.excluded_samples(shards)),
            )
        )
    named = config.get("sample_type")
    field_map = config.get("field_map")
    subflavors = config.get("subflavors")
    return DatasetSummary(
        path=store.root,
        num_samples=sum(info.shard_counts.values()),
        num_shards=len(info.shard_counts),
        num_bytes=num_bytes,
        missing_shards=tuple(missing),
        energon_version=info.energon_version,
        sample_type=_type_name(named if isinstance(named, dict) else config),
        field_map=field_map if isinstance(field_map, dict) else {},
        subflavors=subflavors if isinstance(subflavors, dict) else {},
        has_key_index=store.exists(meta_path(INDEX_SQLITE)),
        parts=tuple(parts),
        columns=read_columns(store),
    )


def _summarize_jsonl(path: str | os.PathLike[str]) -> DatasetSummary:
    dataset = open_jsonl(path)
    return DatasetSummary(
        path=dataset.path,
        num_samples=dataset.num_samples,
        num_shards=1,
        num_bytes=int(dataset.shard_sizes[0]),
        missing_shards=(),
        energon_version=None,
        sample_type=dataset.sample_type.__name__,
        field_map={},
        subflavors={},
        has_key_index=False,
        parts=(),
        columns={},
    )


def _summarize_tables(path: str | os.PathLike[str]) -> DatasetSummary:
    parts = [open_tables(path, split_part=part) for part in table_parts(path)]
    first = parts[0]
    return DatasetSummary(
        path=first.path,
        num_samples=sum(part.num_samples for part in parts),
        num_shards=sum(len(part.shard_names) for part in parts),
        num_bytes=sum(int(part.shard_sizes.sum()) for part in parts),
        missing_shards=(),
        energon_version=None,
        sample_type=first.sample_type.__name__,
        field_map=dict(first.layout.fields),
        subflavors={},
        has_key_index=False,
        parts=tuple(
            PartSummary(
                name=part.split_part or "all",
                num_shards=len(part.shard_names),
                num_samples=part.num_samples,
                num_excluded_samples=0,
            )
            for part in parts
        ),
        columns={},
    )


def _rank(part: str) -> int:
    return _FIRST_PARTS.index(part) if part in _FIRST_PARTS else 0


def _config(store: Store, name: str) -> dict[str, Any]:
    rel = meta_path(name)
    if not store.exists(rel):
        return {}
    return expect_mapping(read_document(store, rel), where=store.url(rel))


def _type_name(named: dict[str, Any]) -> str:
    if "__class__" not in named:
        return "none (there is no dataset.yaml)" if not named else "unknown"
    return f"{named.get('__module__', '?')}.{named['__class__']}"
