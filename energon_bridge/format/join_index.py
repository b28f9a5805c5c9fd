"""The file that keeps the rows of a join, so that they are looked up once.

Format, little-endian: a header of 64 bytes (magic `EBJOIN01`, the 32 bytes of the key, then as int64 the number of
datasets, the number of rows and the CRC-32 of what follows), then the rows, int64, shape (rows, datasets): what `rows`
in `format.join` is. The name of the file has the key: a hash over everything that the rows depend on (content, split
part and key index of each dataset in turn, and its nonmatch). So a join in another split, or of data that changed, has
a file of its own.

Invariant: a file has its final name only when it is whole, and it is checked before it is used; one that is damaged is
written again. Processes that need the same one wait for the first where the file system has locks, and otherwise do the
work twice. It is mapped, not read: the processes of a machine share its pages.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from energon_bridge.errors import EmptyDatasetError, StorageError
from energon_bridge.format.join import JoinPart
from energon_bridge.format.join_rows import Progress, find_rows
from energon_bridge.format.key_lookup import key_index_version
from energon_bridge.rng import IntArray

_MAGIC = b"EBJOIN01"
_HEADER = struct.Struct("<8s32sqqq")
_ROW = np.dtype("<i8")
_CHUNK = 1 << 20
_PREFIX = "join_rows_"
_OLD_SECONDS = 86400

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinIndex:
    """The rows of a join, how many of them each shard of the primary has, and the checksum of the rows.

    `path` is the file that holds them, None if no folder could be written to.
    """

    rows: IntArray
    shard_counts: IntArray
    checksum: int
    path: str | None


def open_index(
    parts: Sequence[JoinPart],
    folders: Sequence[str],
    *,
    num_workers: int = 1,
    progress: Progress = lambda done, total: None,
) -> JoinIndex:
    """Return the rows of a join, from a file in one of the folders, or looked up and written to the first that can be.

    Raises:
        EmptyDatasetError: No row is left.
        KeyIndexError, UnmatchedKeyError: The rows cannot be found.
    """
    key = _key(parts)
    name = f"{_PREFIX}{key.hex()[:32]}.bin"
    for folder in folders:
        found = _load(os.path.join(folder, name), key, parts)
        if found is not None:
            return found
    for folder in folders:
        path = os.path.join(folder, name)
        with contextlib.ExitStack() as stack:
            try:
                os.makedirs(folder, exist_ok=True)
                stack.enter_context(_locked(f"{path}.lock"))
                temporary = f"{path}.{os.getpid()}.{threading.get_ident()}.tmp"
                file = stack.enter_context(open(temporary, "w+b"))
            except OSError as error:
                _log.info("%s: cannot write here (%s)", folder, error)
                continue
            stack.callback(_unlink, temporary)
            found = _load(path, key, parts)
            if found is not None:
                return found
            _write(file, key, parts, num_workers=num_workers, progress=progress)
            os.replace(temporary, path)
            found = _load(path, key, parts)
            if found is None:
                raise StorageError(f"{path}: was written just now and is damaged already. Check the disk.")
            return found
    _log.warning(
        "the rows of a join cannot be kept in any of %s, and are looked up by every process. Make one of them writable",
        ", ".join(folders),
    )
    with tempfile.TemporaryFile() as file:
        _write(file, key, parts, num_workers=num_workers, progress=progress)
        found = _mapped(file, key, parts, path=None)
    if found is None:
        raise StorageError("the rows of a join were damaged in a temporary file. Check the disk.")
    return found


def remove_others(folder: str, keep: set[str]) -> list[str]:
    """Remove the files of joins in a folder but those to `keep`, and what killed processes left; return their names."""
    if not os.path.isdir(folder):
        return []
    kept = {os.path.basename(path) for path in keep}
    gone = []
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if name.startswith(_PREFIX) and name not in kept and (name.endswith(".bin") or _is_old(path)):
            _unlink(path)
            gone.append(name)
    return gone


def _key(parts: Sequence[JoinPart]) -> bytes:
    content = [
        [part.dataset.fingerprint, part.dataset.split_part, part.nonmatch, *key_index_version(part.dataset.store)]
        for part in parts
    ]
    return hashlib.sha256(_MAGIC + json.dumps(content, separators=(",", ":")).encode()).digest()


def _write(file: BinaryIO, key: bytes, parts: Sequence[JoinPart], *, num_workers: int, progress: Progress) -> None:
    file.write(bytes(_HEADER.size))
    checksum = count = 0
    for rows in find_rows(parts, num_workers=num_workers, progress=progress):
        data = np.ascontiguousarray(rows, dtype=_ROW).tobytes()
        checksum = zlib.crc32(data, checksum)
        count += len(rows)
        _append(file, data)
    if not count:
        names = " and ".join(f"{part.dataset.path} ({part.dataset.split_part})" for part in parts)
        raise EmptyDatasetError(f"the join of {names} has no rows: no key is in all of them. Check the keys.")
    file.seek(0)
    _append(file, _HEADER.pack(_MAGIC, key, len(parts), count, checksum))
    file.flush()


def _append(file: BinaryIO, data: bytes) -> None:
    try:
        file.write(data)
    except OSError as error:
        raise StorageError(f"{file.name}: cannot write the rows of a join: {error}") from error


def _load(path: str, key: bytes, parts: Sequence[JoinPart]) -> JoinIndex | None:
    """Return the rows in a file, None if it is not there or damaged."""
    try:
        with open(path, "rb") as file:
            found = _mapped(file, key, parts, path=path)
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("%s: cannot be read (%s); the rows of the join are looked up again", path, error)
        return None
    if found is None:
        _log.warning("%s: damaged; the rows of the join are looked up again", path)
    return found


def _mapped(file: BinaryIO, key: bytes, parts: Sequence[JoinPart], *, path: str | None) -> JoinIndex | None:
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    header = file.read(_HEADER.size)
    if len(header) != _HEADER.size:
        return None
    magic, its_key, width, count, checksum = _HEADER.unpack(header)
    if (magic, its_key, width) != (_MAGIC, key, len(parts)):
        return None
    if count < 1 or size != _HEADER.size + count * width * _ROW.itemsize:
        return None
    mapped = np.memmap(file, dtype=_ROW, mode="r", offset=_HEADER.size, shape=(count, width))
    rows = mapped.view(np.ndarray)
    ends = np.cumsum(parts[0].dataset.shard_counts)
    counts = np.zeros(ends.size, dtype=np.int64)
    found = 0
    for start in range(0, count, _CHUNK):  # one pass, without a copy of the whole
        chunk = rows[start : start + _CHUNK]
        found = zlib.crc32(chunk.data, found)
        counts += np.bincount(np.searchsorted(ends, chunk[:, 0], side="right"), minlength=ends.size)[: ends.size]
    return JoinIndex(rows=rows, shard_counts=counts, checksum=checksum, path=path) if found == checksum else None


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold a lock on a file of its own; where the file system has none, hold nothing."""
    with open(path, "wb") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            _unlink(path)


def _is_old(path: str) -> bool:
    """Tell whether nobody can be writing a file any more."""
    try:
        return time.time() - os.stat(path).st_mtime > _OLD_SECONDS
    except OSError:
        return False


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
