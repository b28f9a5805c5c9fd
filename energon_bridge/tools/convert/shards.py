"""Writing tars and their indexes in one pass over the bytes.

    out/.nv-meta.parts/train/00000.tar   a finished shard, until all are finished
    out/.nv-meta.parts/train/00000.rec   what is in it: an encoded `ShardRecord`
    out/train/00000.tar, .tar.idx        where `publish` moves it
    out/.nv-meta/                        info, split, dataset.yaml and key index; `publish` writes .info.json last

Invariants: a shard's bytes depend on its samples alone (owner 0, time 0, mode 644); a name that ends in `.tar` or
`.rec` is complete, because it was renamed; a dataset is readable only when it is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import socket
import tarfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal

from energon_bridge.core.errors import ConfigurationError, DecodeError, SourceError
from energon_bridge.core.format.checksums import ChecksumScan, checksums_path
from energon_bridge.core.format.key_index import KeyIndexWriter
from energon_bridge.core.format.media import HEAD_BYTES, missing_package
from energon_bridge.core.format.nvmeta import (
    DEFAULT_DATASET_CONFIG,
    DEFAULT_SPLIT_CONFIG,
    INDEX_SQLITE,
    INDEX_UUID,
    INFO_JSON,
    PARTS_FOLDER,
    has_checksums,
    meta_path,
    render_info,
    renumbered,
)
from energon_bridge.core.format.tar import split_member_name
from energon_bridge.core.format.tar_index import encode_index, index_name
from energon_bridge.core.prepare.indexing import RECORD_SUFFIX, ShardRecord
from energon_bridge.core.prepare.staging import Staging
from energon_bridge.core.storage import LocalStore, cannot_write, open_store
from energon_bridge.tools.check.media import MediaFilter, add_media, metadata_row, read_media
from energon_bridge.tools.convert.edits import edited_dataset, edited_splits

END_BYTES = 1024
"""Zeros at the end of an archive."""

_BLOCK = 512
_BUFFER_BYTES = 1 << 20
_LOCK_SECONDS = 3.0
_LARGEST_PLAIN = 8 << 30  # the largest number with eleven octal digits
_BEFORE_SIZE = b"0000644\0" + b"0000000\0" * 2
_TIME = b"00000000000\0"
_AFTER_CHECKSUM = b"0" + bytes(100) + b"ustar\x0000" + bytes(247)
_FIXED_SUM = sum(_BEFORE_SIZE + _TIME + b" " * 8 + _AFTER_CHECKSUM)
_MEDIA = MediaFilter(strategy="EXTENSION")

_logger = logging.getLogger(__name__)


def member_size(name: str, size: int) -> int:
    """Return how many bytes a member takes in a tar, its header included."""
    return len(_header(name, size)) + (size + 511 & -512)


def _header(name: str, size: int) -> bytes:
    """Return the header of a member: one block, after a PAX header if the name or the size needs one."""
    raw = name.encode("utf-8", "surrogateescape")
    if len(raw) > 100 or not name.isascii() or size >= _LARGEST_PLAIN:
        info = tarfile.TarInfo(name)
        info.size = size
        return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    digits = b"%011o\0" % size
    checksum = b"%06o\0 " % (_FIXED_SUM + sum(raw) + sum(digits))
    return raw.ljust(100, b"\0") + _BEFORE_SIZE + digits + _TIME + checksum + _AFTER_CHECKSUM


class ShardFile:
    """One tar being written, and its record; `path` appears on `close`.

    With `media`, the headers of media are read; what cannot be opened is only counted, unless `strict`.
    """

    def __init__(self, path: Path, *, media: bool, checksums: bool = False, strict: bool = False) -> None:
        self.path = path
        self.record = ShardRecord()
        self.num_bytes = 0
        self._media = media
        self._strict = strict
        self._checksums = ChecksumScan() if checksums else None
        self._partial = partial_path(path)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._partial, "wb", buffering=_BUFFER_BYTES)  # noqa: SIM115 - `close` closes it

    @property
    def num_samples(self) -> int:
        """Return the number of samples so far."""
        return len(self.record.scan.keys)

    def add(
        self, key: str, parts: Sequence[tuple[str, bytes]], fields: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Add a sample; raises SourceError if its key or a part name cannot be stored in a tar, or for its media.

        `fields` are the accesses of its fields to the parts.
        """
        scan = self.record.scan
        names = [f"{key}.{part}" for part, _ in parts]
        for name, (part, _) in zip(names, parts, strict=True):
            if split_member_name(name) != (key, part) or "\0" in name or name.startswith("/"):
                raise SourceError(
                    f"{name!r} cannot name the part {part!r} of the key {key!r} in a tar. A key has no dot "
                    "after its last slash and does not begin with a slash or __; a part has no slash."
                )
        if not names or len(set(names)) < len(names):
            raise SourceError(f"sample {key!r} has {'a part twice' if names else 'no parts'}: {names}.")
        media = len(self.record.media)
        try:
            for name, (_, data) in zip(names, parts, strict=True) if self._media else ():
                if _MEDIA.may_pass(name):
                    self._look_into(name, data)
        except SourceError:
            del self.record.media[media:]
            raise
        scan.keys.append(key)
        scan.offsets.append(self.num_bytes)
        for name, (part, data) in zip(names, parts, strict=True):
            header = _header(name, len(data))
            scan.part_samples.append(self.num_samples - 1)
            scan.part_names.append(part)
            scan.part_offsets.append(self.num_bytes + len(header))
            scan.part_sizes.append(len(data))
            pieces = header, data, bytes(-len(data) % _BLOCK)
            for start, piece in zip(accumulate(map(len, pieces), initial=self.num_bytes), pieces, strict=False):
                if self._checksums is not None:
                    self._checksums.take(scan, start, piece)
            self._write(*pieces)
        for field, access in fields.items():
            used = self.record.fields.setdefault(field, [])
            if access not in used:
                used.append(access)

    def close(self, *, made_of: str = "") -> ShardRecord:
        """Finish the tar, rename it and write its record. A shard without samples leaves only a record."""
        record = self.record
        size = self.num_bytes + END_BYTES
        if self._checksums is not None and self.num_samples:
            record.checksums = self._checksums.finish(record.scan, size, _unlinked).encode()
        record.scan.offsets.append(self.num_bytes)
        record.made_of = made_of
        self._write(bytes(END_BYTES))
        record.size = self.num_bytes
        with writing(self.path):
            self._file.close()
            if self.num_samples:
                os.replace(self._partial, self.path)
            else:
                os.unlink(self._partial)
            write_record(self.path, record)
        return record

    def abort(self) -> None:
        """Discard what was written."""
        with contextlib.suppress(OSError):  # the disk is full, say
            self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._partial)

    def _write(self, *pieces: bytes) -> None:
        with writing(self.path):
            self._file.writelines(pieces)
        self.num_bytes += sum(map(len, pieces))

    def _look_into(self, name: str, data: bytes) -> None:
        try:
            kind = _MEDIA.kind_of(name, data[:HEAD_BYTES])
            if kind is not None:
                self.record.media.append((name, *metadata_row(read_media(kind, data))))
        except (DecodeError, ConfigurationError) as error:  # the second: PyAV is not installed
            _logger.info("%s: no media metadata: %s", name, error)
            needed = missing_package(data[:HEAD_BYTES], name)
            if self._strict and not needed and isinstance(error, DecodeError):
                raise SourceError(f"{name}: {error}") from error
            if needed and needed not in self.record.needed:
                self.record.needed.append(needed)


def _unlinked(start: int, size: int) -> bytes:
    raise AssertionError("nothing that is written here is a hard link")


def partial_path(path: Path) -> Path:
    """Return the path that a file is written to before it is renamed, unique to a process of a machine."""
    return path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.partial")


def record_path(shard: Path) -> Path:
    """Return the path of a shard's record."""
    return shard.with_suffix(RECORD_SUFFIX)


def num_unread(record: ShardRecord) -> Counter[str]:
    """Return by extension how many media files of a shard, written with `media`, could not be opened."""
    unread: Counter[str] = Counter()
    for name, count in Counter(record.scan.part_names).items():
        unread[_extension(name)] += count * _MEDIA.may_pass(f".{name}")
    unread.subtract(_extension(name) for name, *_ in record.media)
    return +unread


def _extension(name: str) -> str:
    return name.rpartition(".")[2].lower()


def write_record(shard: Path, record: ShardRecord) -> None:
    """Write the record of a shard atomically."""
    path = record_path(shard)
    partial = partial_path(path)
    partial.write_bytes(record.encode())
    os.replace(partial, path)


class PartsFolder:
    """The folder `.nv-meta.parts` of a dataset that is being written.

    The lock "alone" excludes all other holders, "shared" those that take "alone".
    """

    NAME: ClassVar[str] = PARTS_FOLDER

    def __init__(self, root: Path, *, lock: Literal["alone", "shared"] | None = None) -> None:
        store = open_store(root)
        if not isinstance(store, LocalStore) or re.match(r"[a-z][\w+.-]+:/", str(root)):  # `Path` leaves one slash
            raise ConfigurationError(
                f"{root}: shards can only be written to a local folder; write there, and copy it when it is done."
            )
        self.root = Path(store.root)
        self.path = self.root / PARTS_FOLDER
        self._lock = -1
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if lock is not None:
                self._lock = os.open(self.path, os.O_RDONLY)
                self._claim(alone=lock == "alone")

    def remove(self) -> None:
        """Remove the folder and its content."""
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Release the lock, and remove the folder if it is empty."""
        with contextlib.suppress(OSError):
            self.path.rmdir()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> PartsFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _claim(self, *, alone: bool) -> None:
        """Take the lock, waiting a moment for the workers of a run that was just killed."""
        wanted = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._lock, wanted | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.05)
                    continue
                self.close()
                raise ConfigurationError(
                    f"{self.root}: another conversion is writing here. Wait for it to finish."
                ) from None
            except OSError:
                return  # a file system without locks
            break
        if not alone:
            return
        for partial in self.path.rglob("*.partial"):
            partial.unlink(missing_ok=True)


def publish(
    parts: PartsFolder,
    shards: Sequence[str],
    *,
    load: Callable[[str], ShardRecord],
    sample_type: str,
    split_parts: Mapping[str, Sequence[str]],
    extra: Mapping[str, bytes] | None = None,
    before: Collection[str] | None = None,
) -> dict[str, int]:
    """Move finished shards into place and write `.nv-meta`; returns the samples by shard.

    `load` returns the record of a shard. A shard that is not among the parts is already in place. `extra` are further
    files of the dataset. `before` are the shards that it had, and what hands changed in its files stays (`edits.py`);
    with None, the dataset is a new one. If a shard replaces another one, the dataset is unprepared until everything is
    written, so that no reader sees tars and indexes that do not match.
    """
    root = parts.root
    counts: dict[str, int] = {}
    fields: dict[str, dict[str, None]] = {}
    fields_before: dict[str, dict[str, None]] = {}
    identity = hashlib.blake2b(digest_size=16)
    store = open_store(root)
    checksums = has_checksums(store)
    with Staging(store) as staging:
        with KeyIndexWriter(staging.path(meta_path(INDEX_SQLITE)), shards) as writer:
            for number, shard in enumerate(shards):
                record = load(shard)
                writer.add(number, record.scan)
                with writer.writing():
                    add_media(writer.connection, record.media)
                counts[shard] = len(record.scan.keys)
                index = encode_index(record.scan.offsets)
                identity.update(f"{shard}\0{record.scan.keys}\0{record.scan.part_names}".encode())
                identity.update(index + record.scan.part_sizes.tobytes())
                staging.add(index_name(shard), index)
                if record.checksums:
                    checksums = True
                    staging.add(checksums_path(shard), record.checksums)
                for of in (fields, fields_before) if shard in (before or ()) else (fields,):
                    for name, accesses in record.fields.items():
                        of.setdefault(name, {}).update(dict.fromkeys(accesses))
            writer.finish()
        for rel, data in (extra or {}).items():
            staging.add(rel, data)
        again = [shard for shard in before or () if record_path(parts.path / shard).exists()]
        splits = edited_splits(store, split_parts, before, again, lambda shard: load(shard).scan.keys)
        staging.add(meta_path(DEFAULT_SPLIT_CONFIG), splits)
        maps = _field_map(fields), None if before is None else _field_map(fields_before)
        staging.add(meta_path(DEFAULT_DATASET_CONFIG), edited_dataset(store, sample_type, *maps))
        staging.add(meta_path(INDEX_UUID), str(uuid.UUID(bytes=identity.digest())).encode())
        staging.add(meta_path(INFO_JSON), render_info(counts, checksums=checksums))
        with writing(root):
            moved = [shard for shard in shards if (parts.path / shard).exists()]
            if any((root / shard).exists() for shard in moved):
                (root / meta_path(INFO_JSON)).unlink(missing_ok=True)
            for shard in moved:
                (root / checksums_path(shard)).unlink(missing_ok=True)  # of another tar of this name
                (root / shard).parent.mkdir(parents=True, exist_ok=True)
                os.replace(parts.path / shard, root / shard)
        staging.commit(withdraw=renumbered(store, counts))
    return counts


def _field_map(fields: Mapping[str, Iterable[str]]) -> dict[str, str]:
    return {name: ",".join(sorted(accesses)) for name, accesses in fields.items()}


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn file system errors into StorageError."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from error
