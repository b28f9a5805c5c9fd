"""Preparing a folder of tars: the index of each tar, `.nv-meta`, and the key index.

Invariant: either all of it is written or nothing changes. Files are staged, then moved in this order: `.tar.idx` files,
`index.sqlite`, `split.yaml`, `dataset.yaml`, `index.uuid`, and `.info.json`, which declares the dataset prepared, last.
A run that was stopped can be repeated.
"""

from __future__ import annotations

import logging
import os
import tempfile
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

from energon_bridge.errors import ConfigurationError, MetadataError
from energon_bridge.format.documents import dump_yaml, read_document
from energon_bridge.format.key_index import KeyIndexWriter
from energon_bridge.format.media_kinds import MediaFilter
from energon_bridge.format.nvmeta import (
    DEFAULT_DATASET_CONFIG,
    DEFAULT_SPLIT_CONFIG,
    FORMAT_VERSION,
    INDEX_SQLITE,
    INDEX_UUID,
    INFO_JSON,
    INFO_YAML,
    meta_path,
    read_info,
    render_info,
    render_splits,
)
from energon_bridge.format.parallel import map_shards
from energon_bridge.format.tar_index import encode_index, index_name
from energon_bridge.format.tar_scan import scan_tar
from energon_bridge.prepare.discover import find_shards
from energon_bridge.prepare.media import IndexedMedia, index_dataset_media
from energon_bridge.prepare.split import SplitRule, split_shards
from energon_bridge.prepare.staging import Staging
from energon_bridge.storage import LocalStore, Store, open_store

Progress = Callable[[int, int], None]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What `prepare_dataset` wrote: samples per shard, shards per split part, all part names, and media."""

    shard_counts: dict[str, int]
    split_parts: dict[str, list[str]]
    part_names: tuple[str, ...]
    media: IndexedMedia | None = None

    @property
    def num_samples(self) -> int:
        """Return the number of samples in all shards."""
        return sum(self.shard_counts.values())


def prepare_dataset(
    path: str | os.PathLike[str],
    *,
    split: SplitRule,
    exclude: str | None = None,
    num_workers: int = 1,
    key_index: bool = True,
    dataset_yaml: bytes | None = None,
    dataset_yaml_name: str = DEFAULT_DATASET_CONFIG,
    media: MediaFilter | None = None,
    progress: Progress | None = None,
) -> Prepared:
    """Index all tars below a folder (or URL) and write `.nv-meta`; an earlier preparation is replaced.

    `dataset_yaml` is the content for the file of that name, None leaves what is there. `progress(done, total)` counts
    shards. The excludes of an earlier split.yaml are kept, and its media metadata, unless `media` says which files to
    look into anew. Raises NoShardsError, UnsupportedShardError,
    CorruptShardError, DuplicateKeyError or StorageError, and then leaves the dataset unchanged.
    """
    if "/" in dataset_yaml_name or not dataset_yaml_name.endswith(".yaml"):
        raise ConfigurationError(f"--dataset-yaml-name {dataset_yaml_name!r}: expected the name of a .yaml file.")
    if media is not None and not key_index:
        raise ConfigurationError("media metadata stands in the key index: it cannot be had with --no-key-index.")
    store = open_store(path)
    store.check_root()
    shards = find_shards(store, exclude=exclude)
    split_parts = split_shards(shards, split)
    for part, listed in split_parts.items():
        if not listed:
            _logger.info("%s: the split part %r gets none of the %d shards.", store.root, part, len(shards))
    with Staging(store) as staging:
        counts, part_names, found = _index(
            store, shards, staging, num_workers=num_workers, key_index=key_index, media=media, progress=progress
        )
        staging.add(meta_path(DEFAULT_SPLIT_CONFIG), render_splits(split_parts, exclude=_old_excludes(store)))
        if dataset_yaml is not None:
            staging.add(meta_path(dataset_yaml_name), dataset_yaml)
        _commit(store, staging, counts, key_index=key_index)
    return Prepared(shard_counts=counts, split_parts=split_parts, part_names=part_names, media=found)


def rebuild_index(
    path: str | os.PathLike[str],
    *,
    num_workers: int = 1,
    key_index: bool = True,
    progress: Progress | None = None,
) -> Prepared:
    """Write the `.tar.idx` files and the key index of a prepared dataset again, for the shards of its `.info.json`.

    The sample counts in `.info.json` follow the tars. Raises the errors of `prepare_dataset`, and NotPreparedError.
    """
    store = open_store(path)
    store.check_root()
    shards = list(read_info(store).shard_counts)
    with Staging(store) as staging:
        counts, part_names, _ = _index(
            store, shards, staging, num_workers=num_workers, key_index=key_index, progress=progress
        )
        _commit(store, staging, counts, key_index=key_index)
    return Prepared(shard_counts=counts, split_parts={}, part_names=part_names)


def _index(
    store: Store,
    shards: Sequence[str],
    staging: Staging,
    *,
    num_workers: int,
    key_index: bool,
    media: MediaFilter | None = None,
    progress: Progress | None,
) -> tuple[dict[str, int], tuple[str, ...], IndexedMedia | None]:
    """Stage the indexes of all shards; return samples per shard, all part names, sorted, and the media found."""
    counts: dict[str, int] = {}
    part_names: set[str] = set()
    with ExitStack() as stack:
        scans = stack.enter_context(closing(map_shards(partial(scan_tar, store), shards, num_workers=num_workers)))
        writer, found = None, None
        if key_index:
            index = staging.path(meta_path(INDEX_SQLITE))
            writer = stack.enter_context(KeyIndexWriter(index, shards))
        for number, (shard, scan) in enumerate(zip(shards, scans, strict=True)):
            if writer is not None:
                writer.add(number, scan)
            staging.add(index_name(shard), encode_index(scan.offsets))
            counts[shard] = len(scan.keys)
            part_names.update(scan.part_names)
            if progress is not None:
                progress(number + 1, len(shards))
        if writer is not None:
            if media is None:
                _keep_media(store, writer)
            writer.finish()
            if media is not None:
                found = index_dataset_media(store, shards, index, media, num_workers=num_workers, progress=progress)
    return counts, tuple(sorted(part_names)), found


def _commit(store: Store, staging: Staging, counts: dict[str, int], *, key_index: bool) -> None:
    staging.add(meta_path(INDEX_UUID), str(uuid.uuid4()).encode())
    if store.exists(meta_path(INFO_YAML)):  # old readers look there: keep it up to date
        staging.add(meta_path(INFO_YAML), dump_yaml({"energon_version": FORMAT_VERSION, "shard_counts": counts}))
    staging.add(meta_path(INFO_JSON), render_info(counts))
    staging.commit()
    if not key_index:
        store.delete(meta_path(INDEX_SQLITE))  # it describes the old shards


def _old_excludes(store: Store) -> list[str]:
    """Return the excludes of the split file that is about to be replaced; braces stay as they are."""
    rel = meta_path(DEFAULT_SPLIT_CONFIG)
    if not store.exists(rel):
        return []
    try:
        document = read_document(store, rel)
    except MetadataError:
        return []
    exclude = document.get("exclude") if isinstance(document, dict) else None
    return [entry for entry in exclude if isinstance(entry, str)] if isinstance(exclude, list) else []


def _keep_media(store: Store, writer: KeyIndexWriter) -> None:
    rel = meta_path(INDEX_SQLITE)
    if not store.exists(rel):
        return
    if isinstance(store, LocalStore):
        writer.keep_media_tables(store.url(rel))
        return
    with tempfile.TemporaryDirectory(prefix="energon-prepare-") as folder:
        copy = os.path.join(folder, INDEX_SQLITE)
        with open(copy, "wb") as file:
            file.write(store.read(rel))
        writer.keep_media_tables(copy)
