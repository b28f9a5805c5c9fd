"""Preparing a folder of tars: the index of each tar, `.nv-meta`, and the key index.

Invariant: either all of it is written or nothing changes. Files are staged, then moved in this order: `.tar.idx` files,
`index.sqlite`, `split.yaml`, `dataset.yaml`, `index.uuid`, and `.info.json`, which declares the dataset prepared, last.
Where shards get other numbers, the dataset is unprepared meanwhile.

If there are many tars, the scan of each is kept until everything is written, so that a stopped run can continue and
tasks can divide the tars. `.nv-meta/tars.json` lists the tars that the indexes were made from; these are not scanned
again when tars are added. A large key index is not copied then: the new shards get the next numbers, and their keys are
added to it in place, in one transaction before anything is moved (`format/key_index.py`).

    .nv-meta.scans/<shard>.rec    an encoded `ShardRecord`; `made_of` is what `_version` says of the tar
    .nv-meta/tars.json            {"versions": {shard: version}, "part_names": [name]}
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import tempfile
import uuid
import zlib
from array import array
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from energon_bridge.core.errors import ConfigurationError, EnergonError, MetadataError, ShardMissingError
from energon_bridge.core.format.checksums import ChecksumScan, checksums_path
from energon_bridge.core.format.documents import dump_yaml, read_document
from energon_bridge.core.format.key_index import KeyIndexWriter, can_add_keys, find_key_index, local_key_index
from energon_bridge.core.format.nvmeta import (
    DEFAULT_DATASET_CONFIG,
    DEFAULT_SPLIT_CONFIG,
    FORMAT_VERSION,
    INDEX_SQLITE,
    INDEX_UUID,
    INFO_JSON,
    INFO_YAML,
    has_checksums,
    meta_path,
    read_info,
    render_info,
    render_splits,
    renumbered,
)
from energon_bridge.core.format.parallel import Progress, Task, Workers, map_shards, unseen, work_off
from energon_bridge.core.format.tar_index import ShardScan, encode_index, index_name, scan_tar
from energon_bridge.core.prepare.split import SplitRule, find_shards, split_shards
from energon_bridge.core.prepare.staging import Staging, forget
from energon_bridge.core.registry import load
from energon_bridge.core.storage import LocalStore, Store, open_store

RECORD_SUFFIX = ".rec"
_COLUMNS = ("offsets", "part_samples", "part_offsets", "part_sizes")
_SCANS = ".nv-meta.scans"
_TARS = "tars.json"
_MANY = 64
"""From this many tars on, each scan is kept until the preparation is complete."""
_LARGE_BYTES = 256 << 20
"""A key index of this size is not copied to add some shards: that would take a second."""
_PART_ADDED = 8
"""Shards are added in place if there are at most one for so many that are there; more would keep readers waiting."""

_logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class ShardRecord:
    """What is learned of one shard by reading or writing it: all that the indexes need, and what it was made of.

    `media` are rows of the table of media metadata (`format/media.py`); `fields` gives each field of the sample type
    the accesses (`format/field_map.py`) that its samples used; `skipped` says of each skipped sample why, `num_failed`
    of them failed, the others were not wanted; `size` is in bytes; `made_of` identifies the input; `num_rejected`
    answers were not taken because others are preferred to them; `doubts` names samples by what is odd in them; `needed`
    says which packages would open images that cannot be opened; `checksums` are encoded, empty if not asked for.
    """

    scan: ShardScan = field(default_factory=ShardScan)
    media: list[tuple[str, str, str]] = field(default_factory=list)
    fields: dict[str, list[str]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    size: int = 0
    made_of: str = ""
    num_failed: int = 0
    num_rejected: int = 0
    doubts: dict[str, list[str]] = field(default_factory=dict)
    needed: list[str] = field(default_factory=list)
    checksums: bytes = b""

    def encode(self) -> bytes:
        """Write the record: JSON, a zero byte, and the integers of the scan, each column 64 bits little-endian."""
        scan = self.scan
        plain = {name: getattr(self, name) for name in ("media", "fields", "skipped", "size", "made_of")}
        seldom = ("num_failed", "num_rejected", "doubts", "needed")
        plain |= {name: one for name in seldom if (one := getattr(self, name))}
        plain |= {"checksums": base64.b64encode(self.checksums).decode()} if self.checksums else {}
        plain |= {"keys": scan.keys, "part_names": scan.part_names}
        plain |= {"linked": list(scan.linked)} if scan.linked else {}
        columns = [np.asarray(getattr(scan, name), "<i8").tobytes() for name in _COLUMNS]
        return zlib.compress(json.dumps(plain, separators=(",", ":")).encode() + b"\0" + b"".join(columns), 1)

    @classmethod
    def decode(cls, data: bytes) -> ShardRecord:
        """Read a record; raises ValueError if it is not one."""
        try:
            text, end, columns = zlib.decompress(data).partition(b"\0")
            plain = json.loads(text)
            linked = array("q", plain.pop("linked", ()))
            scan = ShardScan(keys=plain.pop("keys"), part_names=plain.pop("part_names"), linked=linked)
            plain["checksums"] = base64.b64decode(plain.get("checksums", ""))
            record = cls(scan=scan, **plain)
        except (zlib.error, KeyError, TypeError) as error:
            raise ValueError(f"not a record of a shard: {error}") from error
        counts = (len(scan.keys) + 1, *[len(scan.part_names)] * 3)
        if not end or len(columns) != 8 * sum(counts):
            raise ValueError(f"not a record of a shard: {len(columns)} bytes of columns, expected {8 * sum(counts)}")
        start = 0
        for name, count in zip(_COLUMNS, counts, strict=True):
            setattr(scan, name, array("q", np.frombuffer(columns, "<i8", count, start).tobytes()))
            start += 8 * count
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What `prepare_dataset` wrote: samples per shard, shards per split part, all part names, `IndexedMedia`."""

    shard_counts: dict[str, int]
    split_parts: dict[str, list[str]]
    part_names: tuple[str, ...]
    media: Any = None

    @property
    def num_samples(self) -> int:
        """Return the number of samples in all shards."""
        return sum(self.shard_counts.values())


def prepare_dataset(
    path: str | os.PathLike[str],
    *,
    split: SplitRule,
    exclude: str | None = None,
    num_workers: Workers = 1,
    key_index: bool = True,
    dataset_yaml: bytes | None = None,
    dataset_yaml_name: str = DEFAULT_DATASET_CONFIG,
    media: Any = None,
    finish: bool = False,
    checksums: bool = False,
    progress: Progress = unseen,
) -> Prepared:
    """Index all tars below a folder (or URL) and write `.nv-meta`; an earlier preparation is replaced.

    Tars of an earlier preparation that have not changed since are not read again. With `finish` no tar is read at all:
    tasks have done so (`scan_task`), and a tar that none of them has seen is a ConfigurationError.

    With `checksums` the tars are read whole, and CRC-32 of their samples and parts kept; from then on also of tars that
    are added.

    `dataset_yaml` is the content of the file of that name; None keeps the existing one. `progress(done, total)` counts
    shards. The excludes of an earlier split.yaml are kept, and so is media metadata, unless `media`, a `MediaFilter`,
    selects files to read again. Raises NoShardsError, UnsupportedShardError, CorruptShardError, DuplicateKeyError or
    StorageError, and then leaves the dataset unchanged.
    """
    if "/" in dataset_yaml_name or not dataset_yaml_name.endswith(".yaml"):
        raise ConfigurationError(f"--dataset-yaml-name {dataset_yaml_name!r}: expected the name of a .yaml file.")
    if media is not None and not key_index:
        raise ConfigurationError("media metadata is stored in the key index: leave out --no-key-index.")
    store = open_store(path)
    store.check_root()
    shards = find_shards(store, exclude=exclude)
    split_parts = split_shards(shards, split)
    for part, listed in split_parts.items():
        if not listed:
            _logger.info("%s: the split part %r gets none of the %d shards.", store.root, part, len(shards))
    checksums = checksums or has_checksums(store)
    with Staging(store) as staging:
        counts, part_names, indexed = _index(
            store,
            shards,
            staging,
            num_workers=num_workers,
            key_index=key_index,
            media=media,
            earlier=_earlier(store, key_index=key_index),
            finish=finish,
            checksums=checksums,
            progress=progress,
        )
        staging.add(meta_path(DEFAULT_SPLIT_CONFIG), render_splits(split_parts, exclude=_old_excludes(store)))
        if dataset_yaml is not None:
            staging.add(meta_path(dataset_yaml_name), dataset_yaml)
        _commit(store, staging, counts, key_index=key_index, checksums=checksums)
    forget(store, _SCANS, RECORD_SUFFIX)
    return Prepared(shard_counts=counts, split_parts=split_parts, part_names=part_names, media=indexed)


def scan_task(
    path: str | os.PathLike[str],
    task: Task,
    *,
    exclude: str | None = None,
    num_workers: Workers = 1,
    checksums: bool = False,
    progress: Progress = unseen,
) -> int:
    """Scan the tars of one task, for `prepare_dataset(..., finish=True)`, and return their number.

    Tasks may run at the same time, anywhere where the dataset has the same path, and again at any time. Raises what
    `prepare_dataset` raises for a tar.
    """
    store = open_store(path)
    store.check_root()
    shards = task.of(find_shards(store, exclude=exclude))
    scan = partial(_scan, store, True, False, checksums or has_checksums(store))
    return work_off(scan, shards, num_workers=num_workers, progress=progress)


def rebuild_index(
    path: str | os.PathLike[str],
    *,
    num_workers: Workers = 1,
    key_index: bool = True,
    progress: Progress = unseen,
) -> Prepared:
    """Write the `.tar.idx` files and the key index of a prepared dataset again, for the shards of its `.info.json`.

    The sample counts in `.info.json` follow the tars. Raises the errors of `prepare_dataset`, and NotPreparedError.
    """
    store = open_store(path)
    store.check_root()
    info = read_info(store)
    shards = list(info.shard_counts)
    checksums = info.has_checksums
    with Staging(store) as staging:
        counts, part_names, _ = _index(
            store,
            shards,
            staging,
            num_workers=num_workers,
            key_index=key_index,
            checksums=checksums,
            progress=progress,
        )
        _commit(store, staging, counts, key_index=key_index, checksums=checksums)
    return Prepared(shard_counts=counts, split_parts={}, part_names=part_names)


def _index(
    store: Store,
    shards: Sequence[str],
    staging: Staging,
    *,
    num_workers: Workers,
    key_index: bool,
    media: Any = None,
    earlier: _Earlier | None = None,
    finish: bool = False,
    checksums: bool = False,
    progress: Progress,
) -> tuple[dict[str, int], tuple[str, ...], Any]:
    """Stage the indexes of all shards; return samples per shard, all part names, sorted, and the `IndexedMedia`."""
    unchanged = _unchanged(store, shards, earlier, checksums)
    new = [shard for shard in shards if shard not in unchanged]
    counts: dict[str, int] = {}
    part_names: set[str] = set(earlier.part_names) if earlier is not None and unchanged else set()
    versions: dict[str, str] = {}
    in_place = None
    if key_index and media is None and earlier is not None and _takes_in_place(store, earlier, unchanged, len(new)):
        shards = [*earlier.counts, *new]  # their numbers stay
        in_place = len(unchanged)
    with ExitStack() as stack:
        scan = partial(_scan, store, len(new) >= _MANY, finish, checksums)
        scans = stack.enter_context(closing(map_shards(scan, new, num_workers=num_workers)))
        writer = None
        indexed = None
        if key_index:
            rel = meta_path(INDEX_SQLITE)
            index = staging.path(rel) if in_place is None else store.url(rel)
            writer = stack.enter_context(KeyIndexWriter(index, shards, in_place=in_place))
            if in_place is None and earlier is not None and unchanged:
                before = find_key_index(store, scratch="")
                writer.take_over(before, list(earlier.counts), unchanged, media=media is None)
        missing: list[str] = []
        for number, shard in enumerate(shards):
            record = None if shard in unchanged else next(scans)
            if shard in unchanged:
                counts[shard] = unchanged[shard]
                versions[shard] = _version(store, shard)
            elif record is None:
                missing.append(shard)
            else:
                if writer is not None:
                    writer.add(number, record.scan)
                else:
                    _refuse_links(store, shard, record)
                staging.add(index_name(shard), encode_index(record.scan.offsets))
                if checksums:
                    staging.add(checksums_path(shard), record.checksums)
                counts[shard] = len(record.scan.keys)
                versions[shard] = record.made_of
                part_names.update(record.scan.part_names)
            progress(number + 1, len(shards))
        _refuse_missing(store, missing, len(shards))
        if writer is not None:
            if media is None and in_place is None:
                _keep_media(store, writer)
            writer.finish()
            if media is not None:
                add = load("prepare", "media")
                indexed = add(store, shards, index, media, num_workers=num_workers, progress=progress)
    staging.add(meta_path(_TARS), json.dumps({"versions": versions, "part_names": sorted(part_names)}).encode())
    return counts, tuple(sorted(part_names)), indexed


def _unchanged(store: Store, shards: Sequence[str], earlier: _Earlier | None, checksums: bool) -> dict[str, int]:
    """Return the samples of the shards that were indexed before, and have not changed since."""
    unchanged = (
        {} if earlier is None else {shard: earlier.counts[shard] for shard in shards if earlier.has(store, shard)}
    )
    return {shard: count for shard, count in unchanged.items() if not checksums or store.exists(checksums_path(shard))}


def _refuse_links(store: Store, shard: str, record: ShardRecord) -> None:
    """Raise ConfigurationError for a tar with hard links, if there is no key index."""
    if record.scan.linked:
        raise ConfigurationError(
            f"{store.url(shard)}: has {len(record.scan.linked):,} hard links, which are looked up in the "
            "key index. Leave out --no-key-index, or write files in their place: energon convert SOURCE OUT"
        )


def _refuse_missing(store: Store, missing: Sequence[str], total: int) -> None:
    """Raise ConfigurationError if the tasks have not scanned all tars."""
    if missing:
        raise ConfigurationError(
            f"{store.root}: {len(missing)} of {total} tars were not scanned by any task, or changed since; "
            f"the first is {missing[0]}. Run their tasks again, or run this without --finish."
        )


def _scan(store: Store, keep: bool, find_only: bool, checksums: bool, shard: str) -> ShardRecord | None:
    """Scan a tar, or load the scan of an earlier run; with `find_only`, return None if there is none."""
    version = _version(store, shard)
    name = f"{_SCANS}/{shard}{RECORD_SUFFIX}"
    if store.exists(name):
        with contextlib.suppress(ValueError):
            record = ShardRecord.decode(store.read(name))
            if record.made_of == version and (record.checksums or not checksums):
                return record
    if find_only:
        return None
    checksum_scan = ChecksumScan() if checksums else None
    scan = scan_tar(store, shard, None if checksum_scan is None else checksum_scan.take)
    scan.check()
    record = ShardRecord(scan=scan, made_of=version)
    if checksum_scan is not None:
        record.checksums = checksum_scan.finish(scan, store.size(shard), partial(store.read_range, shard)).encode()
    if keep:
        store.write(name, record.encode())
    return record


def _version(store: Store, shard: str) -> str:
    """Identify the content of a tar: by its size and, in a local folder, its modification time."""
    if isinstance(store, LocalStore):
        status = os.stat(store.url(shard))
        return f"{status.st_size} {status.st_mtime_ns}"
    return f"{store.size(shard)}"


@dataclass(frozen=True, slots=True)
class _Earlier:
    """An earlier preparation: numbers of samples by shard, versions of the tars (`_version`), and names of parts."""

    counts: dict[str, int]
    versions: dict[str, str]
    part_names: tuple[str, ...]

    def has(self, store: Store, shard: str) -> bool:
        """Whether a shard's index exists and its tar has not changed since."""
        if shard not in self.counts or self.versions.get(shard) != _version(store, shard):
            return False
        index = index_name(shard)
        return store.exists(index) and store.size(index) == 8 * (self.counts[shard] + 1)


def _earlier(store: Store, *, key_index: bool) -> _Earlier | None:
    """Return the earlier preparation of a local folder, if its indexes can be reused."""
    if not isinstance(store, LocalStore) or not store.exists(meta_path(_TARS)):
        return None  # elsewhere, a new tar of the same size would go unnoticed
    if key_index and not store.exists(meta_path(INDEX_SQLITE)):
        return None
    try:
        made_of = json.loads(store.read(meta_path(_TARS)))
        return _Earlier(read_info(store).shard_counts, dict(made_of["versions"]), tuple(made_of["part_names"]))
    except (EnergonError, ValueError, KeyError, TypeError):
        return None


def _takes_in_place(store: Store, earlier: _Earlier, unchanged: Mapping[str, int], num_new: int) -> bool:
    """Whether a few new shards come to a large key index whose shards are all as they were; raises KeyIndexError."""
    path = store.url(meta_path(INDEX_SQLITE))
    if unchanged.keys() != earlier.counts.keys() or _PART_ADDED * num_new > len(unchanged):
        return False
    if os.path.getsize(path) < _LARGE_BYTES or not can_add_keys(path):
        return False
    local_key_index(store, scratch="")
    return True


def _commit(store: Store, staging: Staging, counts: dict[str, int], *, key_index: bool, checksums: bool) -> None:
    staging.add(meta_path(INDEX_UUID), str(uuid.uuid4()).encode())
    if store.exists(meta_path(INFO_YAML)):  # older readers use it, so keep it up to date
        staging.add(meta_path(INFO_YAML), dump_yaml({"energon_version": FORMAT_VERSION, "shard_counts": counts}))
    staging.add(meta_path(INFO_JSON), render_info(counts, checksums=checksums))
    staging.commit(withdraw=renumbered(store, counts))
    if not key_index:
        store.delete(meta_path(INDEX_SQLITE))  # it describes the old shards


def _old_excludes(store: Store) -> list[str]:
    """Return the excludes of the split file that is about to be replaced; braces stay as they are."""
    rel = meta_path(DEFAULT_SPLIT_CONFIG)
    if not store.exists(rel):
        return []
    try:
        document = read_document(store, rel).plain
    except MetadataError:
        return []
    exclude = document.get("exclude") if isinstance(document, dict) else None
    return [entry for entry in exclude if isinstance(entry, str)] if isinstance(exclude, list) else []


def _keep_media(store: Store, writer: KeyIndexWriter) -> None:
    with tempfile.TemporaryDirectory(prefix="energon-prepare-") as folder, contextlib.suppress(ShardMissingError):
        writer.keep_media_tables(find_key_index(store, os.path.join(folder, INDEX_SQLITE)).path)
