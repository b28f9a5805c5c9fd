"""Rename samples with duplicate keys, in the headers of the tars.

The first sample keeps its key, the next ones become `KEY~2`, `KEY~3`, ... Shards that were prepared before come first,
so existing indexes stay valid. Only the header blocks with the names change; no byte moves.

Invariant: all planned changes are on the disk before the first tar changes, so the next run completes one that was
killed at any moment. It only writes bytes at known places, and can be repeated.

    .nv-meta/renaming.jsonl        the log while tars are being changed: one `Renamed` per line
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b

import numpy as np

from energon_bridge.core.errors import ConfigurationError, DuplicateKeyError, EnergonError, MetadataError, StorageError
from energon_bridge.core.format.nvmeta import meta_path, read_info
from energon_bridge.core.format.parallel import Workers, map_shards
from energon_bridge.core.format.tar import BLOCK, Member, NeedMoreBytes, next_member
from energon_bridge.core.format.tar_index import other_parts, scan_tar
from energon_bridge.core.prepare.split import find_shards
from energon_bridge.core.prepare.staging import Staging
from energon_bridge.core.storage import LocalStore, Store, open_store

RENAMING = "renaming.jsonl"

_WINDOW = 4 << 10
_NAME = slice(0, 100)
_PREFIX = slice(345, 500)


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    """One sample that got another key; `changes` are (offset in the tar, bytes before, bytes after), in hex."""

    shard: str
    key: str
    new_key: str
    changes: tuple[tuple[int, str, str], ...]


def rename_duplicates(
    path: str | os.PathLike[str], *, exclude: str | None = None, num_workers: Workers = 1
) -> list[Renamed]:
    """Give samples with duplicate keys new, unique keys, in the tars of a local folder.

    Holds 8 bytes per sample. A run that was killed is completed first. Returns what was renamed.

    Raises:
        DuplicateKeyError: A name does not fit its header, or a sample's parts are not adjacent; no tar has changed.
        ConfigurationError: The dataset is not in a local folder.
        CorruptShardError: A tar cannot be read.
    """
    store = _local(path)
    with Staging(store):
        _complete(store)
        shards = _prepared_first(store, find_shards(store, exclude=exclude))
        renamed = list(_plan(store, shards, num_workers=num_workers))
        if renamed:
            _write_log(store, renamed)
            _complete(store)
    return renamed


def _local(path: str | os.PathLike[str]) -> LocalStore:
    store = open_store(path)
    if not isinstance(store, LocalStore):
        raise ConfigurationError(f"{store.root}: keys can only be renamed in a local folder. Copy the dataset first.")
    store.check_root()
    return store


def _prepared_first(store: Store, shards: list[str]) -> list[str]:
    try:
        prepared = read_info(store).shard_counts
    except EnergonError:
        return shards
    return sorted(shards, key=lambda shard: shard not in prepared)


# --- the plan -----------------------------------------------------------------------------------------------------


def _plan(store: Store, shards: Sequence[str], *, num_workers: Workers) -> Iterator[Renamed]:
    """Yield the new keys of samples, in the order of the shards."""
    with closing(map_shards(partial(_key_hashes, store), shards, num_workers=num_workers)) as scans:
        by_shard = list(scans)
    known = np.sort(np.concatenate(by_shard)) if by_shard else np.empty(0, np.uint64)
    twice = np.unique(known[1:][known[1:] == known[:-1]])
    seen: dict[str, tuple[str, frozenset[str]]] = {}  # where each key occurred first, and its parts there
    given: set[str] = set()
    for shard, hashes in zip(shards, by_shard, strict=True):
        samples = np.flatnonzero(np.isin(hashes, twice))
        if not samples.size:
            continue
        scan = scan_tar(store, shard)
        scan.check()
        for sample in samples.tolist():
            key = scan.keys[sample]
            own = frozenset(scan.parts_of(sample))
            if key not in seen:  # the first occurrence, or a hash collision
                seen[key] = (shard, own)
                continue
            first, there = seen[key]
            if own.isdisjoint(there):
                raise other_parts(store.url(first), key, there, store.url(shard), own)
            if scan.linked:
                raise DuplicateKeyError(
                    f"{store.url(shard)}: has hard links, which name their targets, so {key!r} is not renamed. Write "
                    "the dataset again with other keys: energon convert SOURCE OUT --keys number."
                )
            new_key = next(
                name
                for name in (f"{key}~{number}" for number in itertools.count(2))
                if name not in given and not _holds(known, _hash(name))
            )
            given.add(new_key)
            start = scan.offsets[sample]
            end = scan.offsets[sample + 1]
            yield Renamed(
                shard=shard, key=key, new_key=new_key, changes=_changes(store, shard, start, end, key, new_key)
            )


def _key_hashes(store: Store, shard: str) -> np.ndarray:
    return np.fromiter(map(_hash, scan_tar(store, shard).keys), np.uint64)


def _hash(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")


def _holds(ordered: np.ndarray, value: int) -> bool:
    place = int(np.searchsorted(ordered, np.uint64(value)))
    return place < ordered.size and int(ordered[place]) == value


def _changes(
    store: Store, shard: str, start: int, end: int, key: str, new_key: str
) -> tuple[tuple[int, str, str], ...]:
    """Return the bytes to change in the headers of a sample at bytes `start` to `end`."""
    where = store.url(shard)
    changes: list[tuple[int, str, str]] = []
    while start < end:
        head, member = _read_member(store, shard, start)
        if member is None:
            break
        if member.regular and member.name.startswith(f"{key}."):
            name = new_key + member.name[len(key) :]
            new = _renamed(head[member.header : member.content], member.name, name)
            if new is None:
                raise DuplicateKeyError(
                    f"{where}: the key {key!r} occurs twice in the dataset, and the header of {member.name!r} at byte "
                    f"{start} has no room for the name {name!r}. Write the dataset again with other keys: energon "
                    "convert SOURCE OUT --keys number."
                )
            old = head[member.header : member.content]
            at = start + member.header
            changes += [
                (at + one, old[one : one + BLOCK].hex(), new[one : one + BLOCK].hex())
                for one in range(0, len(old), BLOCK)
                if old[one : one + BLOCK] != new[one : one + BLOCK]
            ]
        start += member.end
    return tuple(changes)


def _read_member(store: Store, shard: str, start: int) -> tuple[bytes, Member | None]:
    """Return the headers of the member at `start`, raw and parsed; offsets are relative to `start`."""
    wanted = _WINDOW
    size = store.size(shard)
    while True:
        head = store.read_range(shard, start, min(wanted, size - start))
        try:
            return head, next_member(memoryview(head), 0, where=store.url(shard), base=start)
        except NeedMoreBytes as request:
            if start + request.needed > size:
                raise
            wanted = request.needed


# --- headers ------------------------------------------------------------------------------------------------------


def _renamed(headers: bytes, name: str, new_name: str) -> bytes | None:
    """Return the headers of a member with another name, of the same length; None if it does not fit."""
    blocks = bytearray(headers)
    long = False
    at = 0
    while at + BLOCK < len(blocks):  # long names and PAX records, in front of the member's own header
        kind = chr(blocks[at + 156])
        size = int(bytes(blocks[at + 124 : at + 135]).strip(b" \0") or b"0", 8)
        room = size + 511 & -512
        body: bytes | None = None
        if kind == "L":
            body = new_name.encode() + b"\0"
        elif kind in "xX":
            body = _pax_with_path(bytes(blocks[at + BLOCK : at + BLOCK + size]), new_name)
        if body is not None:
            if len(body) > room:
                return None
            long = True
            blocks[at + 124 : at + 136] = b"%011o\0" % len(body)
            blocks[at + BLOCK : at + BLOCK + room] = body.ljust(room, b"\0")
            _sign(blocks, at)
        at += BLOCK + room
    if not long and not _write_name(blocks, at, new_name):
        return None
    member = next_member(memoryview(blocks), 0, where="")
    return bytes(blocks) if member is not None and member.name == new_name and len(blocks) == len(headers) else None


def _write_name(blocks: bytearray, at: int, name: str) -> bool:
    """Write a name into the header at `at`; an existing prefix is kept if the name fits after it."""
    header = blocks[at : at + BLOCK]
    prefix = bytes(header[_PREFIX]).partition(b"\0")[0]
    encoded = name.encode()
    split = len(prefix) + 1 if prefix and encoded.startswith(prefix + b"/") else 0
    if len(encoded) - split > 100:
        if bytes(header[257:263]) != b"ustar\0":
            return False
        places = [place for place, byte in enumerate(encoded) if byte == 47 and place <= 155]
        split = next((place + 1 for place in reversed(places) if len(encoded) - place - 1 <= 100), 0)
        if not split:
            return False
        header[_PREFIX] = encoded[: split - 1].ljust(155, b"\0")
    header[_NAME] = encoded[split:].ljust(100, b"\0")
    blocks[at : at + BLOCK] = header
    _sign(blocks, at)
    return True


def _pax_with_path(body: bytes, name: str) -> bytes | None:
    """Return PAX records with another path; None if they have none."""
    records = []
    at = 0
    found = False
    while at < len(body):
        length = int(body[at : body.index(b" ", at)])
        record = body[at : at + length]
        if record.partition(b" ")[2].startswith(b"path="):
            text = b"path=" + name.encode() + b"\n"
            found = True
            length = len(text) + 2
            while len(b"%d " % length) + len(text) != length:
                length = len(b"%d " % length) + len(text)
            records.append(b"%d " % length + text)
        else:
            records.append(record)
        at += max(1, len(record))
    return b"".join(records) if found else None


def _sign(blocks: bytearray, at: int) -> None:
    blocks[at + 148 : at + 156] = b" " * 8
    blocks[at + 148 : at + 156] = b"%06o\0 " % sum(blocks[at : at + BLOCK])


# --- the log ------------------------------------------------------------------------------------------------------


def _read_log(store: LocalStore) -> list[Renamed]:
    try:
        rows = [json.loads(line) for line in store.read(meta_path(RENAMING)).splitlines()]
        return [
            Renamed(
                shard=str(row["shard"]),
                key=str(row["key"]),
                new_key=str(row["new_key"]),
                changes=tuple((int(at), str(old), str(new)) for at, old, new in row["changes"]),
            )
            for row in rows
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise MetadataError(
            f"{store.url(meta_path(RENAMING))}: damaged ({type(error).__name__}: {error}). It lists keys that a "
            "killed run was renaming. Restore it, or delete it to keep the names as they are."
        ) from error


def _write_log(store: LocalStore, renamed: Iterable[Renamed]) -> None:
    path = store.url(meta_path(RENAMING))
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(f"{path}.partial", "w", encoding="utf-8") as file:
            for one in renamed:
                file.write(json.dumps(asdict(one)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.partial", path)
        folder = os.open(os.path.dirname(path), os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise StorageError(f"{path}: cannot write: {error}. Is the disk full?") from error


def _complete(store: LocalStore) -> None:
    """Write all names of the log into the tars."""
    if not store.exists(meta_path(RENAMING)):
        return
    _patch(store, (one for one in _read_log(store) if store.exists(one.shard)))
    store.delete(meta_path(RENAMING))


def _patch(store: LocalStore, renamed: Iterable[Renamed]) -> None:
    """Write the bytes of all changes; raises MetadataError for another tar."""
    by_shard: dict[str, dict[int, tuple[bytes, ...]]] = {}
    for one in renamed:
        blocks = by_shard.setdefault(one.shard, {})
        for at, old, new in one.changes:
            blocks[at] = (bytes.fromhex(old), bytes.fromhex(new))
    for shard, blocks in by_shard.items():
        with open(store.url(shard), "rb") as file:
            for at, states in blocks.items():
                file.seek(at)
                block = file.read(BLOCK)
                if block not in states and not _torn(block, states):
                    raise MetadataError(
                        f"{store.url(shard)}: was replaced while keys were renamed in it: the header at byte {at} "
                        f"differs. Restore the tar, or delete {store.url(meta_path(RENAMING))} to keep the names as "
                        "they are."
                    )
    for shard, blocks in by_shard.items():
        _write_blocks(store.url(shard), {at: states[-1] for at, states in blocks.items()})


def _torn(block: bytes, states: tuple[bytes, ...]) -> bool:
    """Return whether a block mixes two states, as after a power loss in the middle of a write."""
    return len(block) == BLOCK and all(byte in known for byte, *known in zip(block, *states, strict=True))


def _write_blocks(path: str, blocks: dict[int, bytes]) -> None:
    try:
        before = os.stat(path)
        with open(path, "r+b") as file:
            for at, block in blocks.items():
                file.seek(at)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        after = os.stat(path)
        if (
            after.st_mtime_ns == before.st_mtime_ns
        ):  # with a coarse clock, `prepare` must still see that the tar changed
            os.utime(path, ns=(after.st_atime_ns, after.st_mtime_ns + 1))
    except OSError as error:
        raise StorageError(f"{path}: cannot change it: {error}. Run this again.") from error
