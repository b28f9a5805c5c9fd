"""A cache on the node's disk, of blocks of remote objects, which all processes share.

Within its one quota are also the values that processes keep (`kept_values.py`).

`ENERGON_CACHE_DIR` (and `ENERGON_CACHE_BYTES`) turn it on; `use_node_cache` sets both. Files below `<folder>/v2/<2 hex
digits>/`, each named by a SHA-256:

    <hash>.id       the object at a URL: JSON [URL, version (ETag), size]; size -1: there is none. Valid for a minute
    <hash>.block    1 MiB of one version of one object (the last one is shorter), then the CRC-32 of each 64 KiB of it
    <name>.claim    a process fetches it: JSON [host, process]. Void if that process is gone, or after 20 seconds

Invariant: the bytes read from a block are those that were fetched. Files are renamed into place, complete; a block with
the wrong length is ignored, and so is one whose needed pieces fail their checksum. Blocks have no locks: a claim only
saves work, and two processes that fetch the same block write the same bytes. If the disk refuses a write (it is full,
say), reads go to the server.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from energon_bridge.cloud.process_folders import KEPT, files_below, remove_dead
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.storage.forks import PerProcess
from energon_bridge.core.storage.store import MADE

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

BLOCK = 1 << 20
PIECE = 64 << 10
"""Bytes of a block on the disk that are read and checked together, so that a small sample need not read all of it."""
_BELIEVED_SECONDS = 60.0
_MISSING_SECONDS = 5.0
BELIEVED_SINCE = "ENERGON_CACHE_BELIEVED_SINCE"
"""In the environment, a time: versions seen before it are asked for again. Commands that look at what a store holds now
set it to when they began, for their worker processes too."""
_CLAIM_SECONDS = 20.0
_EMPTY_SECONDS = 1.0
_LEFT_SECONDS = 600.0
"""Unfinished files of this age were left behind by a killed process."""
_USED_SECONDS = 30.0
"""Seconds between two updates of a file's time of last use."""
_REFUSED_SECONDS = 10.0
"""Seconds without writes after the disk refused one."""
_POLL = 0.002
_MOST_POLL = 0.05
_CHECKED_PART = 200
"""A process checks what to delete each time it has written this part of the cache's limit: a two-hundredth."""
_FREE_PART = 20
"""The part of the disk that is left free: a twentieth."""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True, slots=True)
class Version:
    """One version of an object: its URL, ETag and size in bytes; -1: it does not exist."""

    url: str
    tag: str
    size: int

    def length(self, block: int) -> int:
        """Return the bytes of a block."""
        return min(BLOCK, self.size - block * BLOCK)

    def name(self, block: int) -> str:
        """Return the name of a block's file."""
        return f"{_hash(f'{self.url} {self.tag} {self.size} {block}')}.block"


RemoteBlock = tuple[Version, int]
"""A block of a version."""
NeededBytes = tuple[int, int]
"""Start and end of the bytes needed within a block."""


class NodeCache:
    """The cache in a folder, shared by all processes that use the same folder. Thread-safe, usable after a fork."""

    def __init__(self, folder: str, limit: int | None) -> None:
        self.folder = os.path.join(os.path.abspath(os.path.expanduser(folder)), "v2")
        self._limit = limit
        self._written = -1
        self._refused = 0.0
        self._told = self._told_size = False
        self._known: dict[str, tuple[float, Version]] = {}
        self._first: set[RemoteBlock] = set()

    def versions(self, urls: Sequence[str], ask: Callable[[list[int]], list[Version]]) -> list[Version]:
        """Return the versions of the objects at some URLs: those seen within the last minute, by any process.

        The others are requested by `ask`, which is given their places in `urls`.
        """
        now = time.monotonic()
        by_number: dict[int, Version] = {}
        for number, url in enumerate(urls):
            until, version = self._known.get(url, (0.0, None))
            if version is not None and until > now:
                by_number[number] = version
        missing = [number for number in range(len(urls)) if number not in by_number]

        def load(number: int) -> bool:
            version = self._load_version(urls[number])
            if version is not None:
                by_number[number] = version
            return version is not None

        def make(numbers: list[int]) -> None:
            for number, version in zip(numbers, ask(numbers), strict=True):
                by_number[number] = version
                self._publish(
                    self._id_name(urls[number]), json.dumps([version.url, version.tag, version.size]).encode()
                )
                self._know(version, time.time())

        self._each(missing, lambda number: self._id_name(urls[number]), load, make)
        return [by_number[number] for number in range(len(urls))]

    def blocks(
        self, wanted: Mapping[RemoteBlock, Sequence[NeededBytes]], fetch: Callable[[list[RemoteBlock]], list[bytes]]
    ) -> dict[RemoteBlock, memoryview]:
        """Return blocks; `fetch` gets those that are not in the cache.

        Args:
            wanted: The blocks in the order to fetch them, with the bytes needed of each. Only these are read from
                disk: the other bytes of a block that comes from there are undefined.
            fetch: Returns complete blocks.
        """
        blocks: dict[RemoteBlock, memoryview] = {}
        fetched: set[RemoteBlock] = set()

        def load(key: RemoteBlock) -> bool:
            data = self._load_block(*key, wanted[key])
            if data is not None:
                blocks[key] = data
            return data is not None

        def make(keys: list[RemoteBlock]) -> None:
            for key, data in zip(keys, fetch(keys), strict=True):
                blocks[key] = memoryview(data)
                fetched.add(key)
                self._put(key, data)

        self._each(list(wanted), lambda key: key[0].name(key[1]), load, make)
        self._count(blocks, fetched)
        return blocks

    def put(self, key: RemoteBlock, data: bytes) -> None:
        """Store a block that came with the response that named the version, if the disk accepts it."""
        self._first.add(key)
        self._put(key, data)

    def _put(self, key: RemoteBlock, data: bytes) -> None:
        version, block = key
        if self._limit is not None and version.size > self._limit and not self._told_size:
            self._told_size = True
            logger.warning(
                "the node cache %s is limited to %d bytes, and %s alone has %d: blocks go before they are read again. "
                "Set ENERGON_CACHE_BYTES to the size of the dataset, or turn the cache off",
                *(self.folder, self._limit, version.url, version.size),
            )
        self._publish(version.name(block), data, _checksums(data))

    def _count(self, blocks: dict[RemoteBlock, memoryview], fetched: set[RemoteBlock]) -> None:
        """Update the counters: blocks that this process fetched are misses, the others hits."""
        hits = misses = hit_bytes = miss_bytes = 0
        for key, data in blocks.items():
            if key in fetched or key in self._first:
                self._first.discard(key)
                misses += 1
                miss_bytes += len(data)
            else:
                hits += 1
                hit_bytes += len(data)
        with _counting():
            MADE.cache_hits += hits
            MADE.cache_hit_bytes += hit_bytes
            MADE.cache_misses += misses
            MADE.cache_miss_bytes += miss_bytes

    def forget(self, url: str) -> None:
        """Forget the version at a URL, so that the server is asked again."""
        self._known.pop(url, None)
        with contextlib.suppress(OSError):
            os.unlink(self._path(self._id_name(url)))

    # Fetched by one of all processes ---------------------------------------------------------------------------------

    def _each(
        self, left: list[_T], name: Callable[[_T], str], load: Callable[[_T], bool], make: Callable[[list[_T]], None]
    ) -> None:
        """Get each thing of `left`: from disk, by making it under a claim, or by waiting for the process that makes it.

        Args:
            name: Returns the name of the file.
            load: Takes it from disk; returns whether it was there.
            make: Fetches some that this process has claimed, and puts them on disk.
        """
        pause = _POLL
        while left:
            mine: list[_T] = []
            others: list[_T] = []
            try:
                for thing in left:
                    if load(thing):
                        continue
                    if not self._claim(name(thing)):
                        others.append(thing)
                        continue
                    mine.append(thing)
                    if load(thing):  # it appeared between the two checks
                        self._release(name(mine.pop()))
                if mine:
                    make(mine)
                    pause = _POLL
            finally:
                for thing in mine:
                    self._release(name(thing))
            if others and not mine:
                time.sleep(pause)
                pause = min(_MOST_POLL, pause * 2)
            left = others

    def _claim(self, name: str) -> bool:
        """Return whether this process should fetch something; True also if the disk accepts no claims."""
        path = f"{self._path(name)}.claim"
        for _ in range(2):
            try:
                self._write(path, [json.dumps([_host(), os.getpid()]).encode()], os.O_EXCL)
                return True
            except FileExistsError:
                if not _is_void(path):
                    return False
                with contextlib.suppress(OSError):
                    os.unlink(path)
            except OSError:
                return True
        return False

    def _release(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(f"{self._path(name)}.claim")

    # Files -----------------------------------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return f"{self.folder}/{name[:2]}/{name[2:]}"

    def _id_name(self, url: str) -> str:
        return f"{_hash(url)}.id"

    def _know(self, version: Version, since: float) -> float:
        """Remember a version seen at a time; return for how many seconds it is still valid."""
        left = (_BELIEVED_SECONDS if version.size >= 0 else _MISSING_SECONDS) - (time.time() - since)
        if 0 < left <= _BELIEVED_SECONDS + 1:
            self._known[version.url] = time.monotonic() + left, version
            return left
        return 0.0

    def _load_version(self, url: str) -> Version | None:
        path = self._path(self._id_name(url))
        try:
            with open(path, "rb") as file:
                since = os.fstat(file.fileno()).st_mtime
                version = Version(*json.loads(file.read()))
        except (OSError, ValueError, TypeError):
            return None
        if since < float(os.environ.get(BELIEVED_SINCE, 0)):
            return None
        return version if version.url == url and self._know(version, since) > 0 else None

    def _load_block(self, version: Version, block: int, ranges: Sequence[NeededBytes]) -> memoryview | None:
        path = self._path(version.name(block))
        length = version.length(block)
        pieces = -(-length // PIECE)
        # Zero-filling would cost more than reading a small sample.
        data: memoryview = np.empty(length, np.uint8).data
        try:
            with open(path, "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                used = status.st_mtime
                sums = os.pread(file.fileno(), 4 * pieces, length)
                whole = status.st_size == length + 4 * pieces and len(sums) == 4 * pieces
                if whole:
                    needed = {n for low, high in ranges for n in range(low // PIECE, -(-high // PIECE))}
                    whole = all(_read_piece(file.fileno(), data, n, sums) for n in sorted(needed))
        except OSError:
            return None
        with contextlib.suppress(OSError):  # another process may have deleted it
            if not whole:
                os.unlink(path)
            elif time.time() - used > _USED_SECONDS:
                os.utime(path)
        return data if whole else None

    def _publish(self, name: str, *parts: bytes) -> None:
        if time.monotonic() < self._refused:
            return
        path = self._path(name)
        writing = f"{path}.{uuid.uuid4().hex}.writing"
        size = sum(map(len, parts))
        try:
            # Without a limit, a check is due after each 256 MiB.
            due = self._written < 0 or self._written + size > (self._limit or _CHECKED_PART << 28) // _CHECKED_PART
            if due and self.make_room(size) < size:
                raise OSError(f"there is no room for {size:,} bytes")
            self._write(writing, parts, os.O_EXCL)
            os.replace(writing, path)
            self._written += size
        except OSError as error:  # the disk is full or read-only
            with contextlib.suppress(OSError):
                os.unlink(writing)
            if not self._told:
                self._told = True
                logger.warning(
                    "the node cache %s cannot be written: %s. Each block is fetched from the server again. Make room, "
                    "or set ENERGON_CACHE_DIR to a folder that can be written",
                    self.folder,
                    error,
                )
            self._written = -1
            self._refused = time.monotonic() + _REFUSED_SECONDS

    def _write(self, path: str, parts: Sequence[bytes], flags: int) -> None:
        try:
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o666)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o666)
        with open(opened, "wb", buffering=0) as file:
            for part in parts:
                view = memoryview(part)
                while len(view):
                    view = view[file.write(view) :]

    # Deleting --------------------------------------------------------------------------------------------------------

    def make_room(self, size: int) -> int:
        """Delete what killed processes left, and the least recently used blocks, until some more bytes fit.

        Return the bytes that there is room for.
        """
        self._written = 0
        os.makedirs(self.folder, exist_ok=True)
        remove_dead(self.folder)
        now = time.time()
        files = list[tuple[float, int, str]]()
        used = 0
        for path, stat in files_below(self.folder):
            if path.endswith(KEPT):
                used += stat.st_size
                continue
            if not path.endswith((".id", ".block")):
                if path.endswith((".writing", ".claim")) and now - stat.st_mtime > _LEFT_SECONDS:
                    with contextlib.suppress(OSError):
                        os.unlink(path)
                continue
            files.append((stat.st_mtime, stat.st_size, path))
            used += stat.st_size
        disk = os.statvfs(self.folder)
        most = used + disk.f_bavail * disk.f_frsize - disk.f_blocks * disk.f_frsize // _FREE_PART
        if self._limit is not None:
            most = min(most, self._limit - self._limit // 10)
        left = most - used
        for _, bytes_, path in sorted(files) if left < size else ():
            with contextlib.suppress(OSError):
                os.unlink(path)
            left += bytes_
            if left >= size:
                break
        return left


def _checksums(data: bytes) -> bytes:
    """Return the CRC-32 of each piece of a block, 4 bytes each."""
    view = memoryview(data)
    return b"".join(zlib.crc32(view[at : at + PIECE]).to_bytes(4, "little") for at in range(0, len(data), PIECE))


def _read_piece(descriptor: int, block: memoryview, number: int, sums: bytes) -> bool:
    """Read a piece of a block's file into the block; return whether its checksum is right."""
    piece = block[number * PIECE : (number + 1) * PIECE]
    got = os.preadv(descriptor, [piece], number * PIECE)
    return got == len(piece) and zlib.crc32(piece).to_bytes(4, "little") == sums[4 * number : 4 * number + 4]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _host() -> str:
    """Return a name of this host and its namespace of process ids."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _is_void(path: str) -> bool:
    """Return whether the process of a claim is gone."""
    try:
        with open(path, "rb") as file:
            age = time.time() - os.fstat(file.fileno()).st_mtime
            said = file.read()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    if abs(age) > _CLAIM_SECONDS:
        return True
    try:
        host, process = json.loads(said)
    except ValueError:
        return abs(age) > _EMPTY_SECONDS  # it is being written, or its process was killed first
    if host == _host():
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
    return False


_caches: dict[tuple[str, int | None], NodeCache] = {}
_counting = PerProcess(threading.Lock)


def node_cache() -> NodeCache | None:
    """Return the cache that the environment configures, if any; raises ConfigurationError for an invalid size."""
    folder = os.environ.get("ENERGON_CACHE_DIR", "")
    if not folder:
        return None
    said = os.environ.get("ENERGON_CACHE_BYTES", "")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", said.strip().upper()) if said else None
    if said and (match is None or match[2] not in _UNITS or not float(match[1])):
        raise ConfigurationError(
            f"ENERGON_CACHE_BYTES must be a number of bytes above 0, such as 500000000000 or 500G, got {said!r}"
        )
    key = folder, int(float(match[1]) * _UNITS[match[2]]) if match else None
    return _caches.setdefault(key, NodeCache(*key))


def use_node_cache(cache_dir: str | os.PathLike[str] | None, cache_bytes: int | None = None) -> None:
    """Cache reads from object stores and web servers on a local disk, for all processes of the node.

    Examples:
        >>> use_node_cache("/tmp/energon-cache", cache_bytes=100 * 10**9)  # before datasets are opened
        >>> use_node_cache(None)

    Call it before opening datasets. It sets ENERGON_CACHE_DIR and ENERGON_CACHE_BYTES, which workers inherit.

    Args:
        cache_dir: A folder of a local disk, the same for all ranks of the node; None: no cache.
        cache_bytes: Limit of the cache; the least recently used blocks are deleted first. None: all but 5 % of
            the disk.

    Raises:
        ConfigurationError: `cache_bytes` is not a number above 0.
    """
    if cache_bytes is not None and (isinstance(cache_bytes, bool) or int(cache_bytes) <= 0):
        raise ConfigurationError(f"use_node_cache: cache_bytes must be above 0, or None, got {cache_bytes!r}")
    for name, value in (("ENERGON_CACHE_DIR", cache_dir), ("ENERGON_CACHE_BYTES", cache_bytes)):
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = os.fspath(value) if isinstance(value, str | os.PathLike) else str(int(value))
