"""Checksums of a prepared dataset: CRC-32 of every sample and part, which `energon prepare --checksums` keeps.

    .nv-meta/checksums/<shard>.crc    magic `NVCRC32\\1`; bytes of the shard, samples, parts, bytes of names, uint64;
                                      of each sample: checksum of its range in the tar, checksum of its key, number of
                                      its first part (uint32, that one once more than samples); of each part: number of
                                      its name, checksum of its content (uint32); the names as a JSON list; checksum of
                                      all that (uint32). Numbers are little-endian.
    .nv-meta/.info.json               its `energon_version` ends in `.checksums`

The checksum of a range covers headers and padding too, and is compared first: one number for a sample. If it differs,
key, names of parts and their contents decide. So whatever changes what is delivered is found, and a change of a time or
an owner in a header is none.
"""

from __future__ import annotations

import json
import logging
import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from energon_bridge.core.errors import CorruptShardError, MetadataError, ShardMissingError
from energon_bridge.core.format.dataset import PreparedDataset
from energon_bridge.core.format.nvmeta import meta_path
from energon_bridge.core.format.tar_index import ShardScan
from energon_bridge.core.order.rng import IntArray
from energon_bridge.core.storage import Store

try:
    from energon_bridge.core.format import _tar
except ImportError:  # it was not compiled
    _tar = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

Checksums = Literal["always", "sampled", "never"]
"""Which samples are verified as they are read."""

SAMPLED = 16
"""One of this many samples, a power of two, is verified in an epoch, and another one in the next: in time, all."""
_MAGIC = b"NVCRC32\1"
_HEAD = struct.Struct("<8s4Q")
_U32 = np.dtype("<u4")
_compiled: Callable[[list[Any]], bytes | None] | None = getattr(_tar, "crc32s", None)


def crc32s(pieces: list[Any]) -> np.ndarray:
    """Return the CRC-32 of each of some buffers, uint32."""
    computed = _compiled(pieces) if _compiled is not None else None
    if computed is None:
        return np.fromiter(map(zlib.crc32, pieces), np.uint32, len(pieces))
    return np.frombuffer(computed, np.uint32)


def checksums_path(shard: str) -> str:
    """Return the path of the checksums of a shard in its dataset."""
    return meta_path(f"checksums/{shard}.crc")


@dataclass(slots=True, kw_only=True)
class ShardChecksums:
    """The checksums of one shard, CRC-32 each.

    Attributes:
        size: Bytes of the shard.
        samples: Of the range of each sample, shape (samples,).
        keys: Of the key of each sample, shape (samples,).
        firsts: Number of the first part of each sample, and the number of parts, shape (samples + 1,).
        codes: Number of each part's name in `names`, shape (parts,).
        parts: Of the content of each part, shape (parts,).
        names: The different names of parts.
    """

    size: int
    samples: np.ndarray
    keys: np.ndarray
    firsts: np.ndarray
    codes: np.ndarray
    parts: np.ndarray
    names: tuple[str, ...]

    def encode(self) -> bytes:
        """Write the file."""
        names = json.dumps(self.names).encode()
        head = _HEAD.pack(_MAGIC, self.size, self.samples.size, self.parts.size, len(names))
        columns = (self.samples, self.keys, self.firsts, self.codes, self.parts)
        body = b"".join((head, *(np.asarray(column, _U32).tobytes() for column in columns), names))
        return body + struct.pack("<I", zlib.crc32(body))

    def differences(self, sample: int, key: str, parts: Mapping[str, Any], *, complete: bool) -> list[str]:
        """Return how a sample differs from its checksums, a text for each difference; parts that are no bytes pass.

        Args:
            sample: Its number in the shard.
            complete: Whether `parts` should be all of its parts; otherwise some may be missing.
        """
        low = int(self.firsts[sample])
        high = int(self.firsts[sample + 1])
        expected = {
            self.names[code]: int(crc) for code, crc in zip(self.codes[low:high], self.parts[low:high], strict=True)
        }
        differences = []
        if (crc := zlib.crc32(key.encode("utf-8", "surrogateescape"))) != self.keys[sample]:
            differences.append(f"key {key!r}: checksum {crc:08x}, expected {int(self.keys[sample]):08x}")
        for name, content in parts.items():
            if name not in expected:
                differences.append(f"part {name!r}: not there when the checksums were made, but {', '.join(expected)}")
            elif isinstance(content, bytes | bytearray | memoryview) and (crc := zlib.crc32(content)) != expected[name]:
                differences.append(f"part {name!r}: checksum {crc:08x}, expected {expected[name]:08x}")
        missing = expected.keys() - parts.keys() if complete else set()
        return differences + [
            f"part {name!r}: missing, expected checksum {expected[name]:08x}" for name in sorted(missing)
        ]


def read_checksums(store: Store, shard: str, *, count: int, size: int) -> ShardChecksums | None:
    """Read the checksums of a shard of `count` samples and `size` bytes; None if it has none.

    Raises MetadataError if the file is damaged, or of another tar.
    """
    rel = checksums_path(shard)
    try:
        data = store.read(rel)
    except ShardMissingError:
        return None
    where = f"{store.url(rel)}: "
    remedy = f"Make it again: energon prepare {store.root} --checksums"
    if len(data) < _HEAD.size + 4 or zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise MetadataError(f"{where}damaged. {remedy}")
    magic, of_bytes, samples, parts, length = _HEAD.unpack_from(data)
    lengths = (samples, samples, samples + 1, parts, parts)
    if magic != _MAGIC or len(data) != _HEAD.size + 4 * sum(lengths) + length + 4:
        raise MetadataError(f"{where}of another format. {remedy}, or upgrade energon_bridge")
    if (samples, of_bytes) != (count, size):
        raise MetadataError(
            f"{where}made of a tar with {samples} samples in {of_bytes} bytes, but {shard} has {count} in {size}. "
            f"{remedy}"
        )
    columns = []
    at = _HEAD.size
    for number in lengths:
        columns.append(np.frombuffer(data, _U32, number, at))
        at += 4 * number
    names = tuple(json.loads(data[at : at + length]))
    return ShardChecksums(
        size=of_bytes,
        samples=columns[0],
        keys=columns[1],
        firsts=columns[2],
        codes=columns[3],
        parts=columns[4],
        names=names,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Verifying what is read.


class Verifier:
    """Compares the bytes of samples with the checksums of their dataset; safe to use from several threads.

    Args:
        parse: Returns key and parts of a sample from its bytes.
    """

    def __init__(
        self,
        dataset: PreparedDataset,
        which: Checksums,
        parse: Callable[[Any], tuple[str, Mapping[str, Any]]],
    ) -> None:
        self._dataset = dataset
        self._all = which == "always"
        self._parse = parse
        self._shards: dict[int, ShardChecksums | None] = {}

    def chosen(self, indices: IntArray, epochs: IntArray | None) -> IntArray:
        """Return the places of the samples to verify: by their number and epoch alone, so the same on any ranks.

        Args:
            indices: Numbers of the samples in the dataset, shape (n,).
            epochs: Their epochs, shape (n,); None: all 0.
        """
        if self._all:
            return np.arange(indices.size)
        mixed = indices if epochs is None else indices + epochs
        places: IntArray = (mixed & (SAMPLED - 1) == 0).nonzero()[0]
        return places

    def verify(
        self, raws: list[memoryview], shards: Sequence[int], local: IntArray
    ) -> list[tuple[int, CorruptShardError]]:
        """Return the places of samples whose bytes differ from their checksums, with an error for each.

        Args:
            raws: The bytes of each sample.
            shards: The shard of each, ascending.
            local: The number of each in its shard.
        """
        computed = crc32s(raws)
        expected = computed.copy()
        low = 0
        while low < len(shards):
            high = bisect_right(shards, shards[low], low)
            checksums = self.of_shard(shards[low])
            if checksums is not None:
                expected[low:high] = checksums.samples[local[low:high]]
            low = high
        if computed.tobytes() == expected.tobytes():  # numpy takes several times as long to compare a few numbers
            return []
        rows = np.flatnonzero(computed != expected).tolist()
        errors = [(row, self._error(raws[row], shards[row], int(local[row]))) for row in rows]
        return [(row, error) for row, error in errors if error is not None]

    def _error(self, raw: Any, shard: int, sample: int) -> CorruptShardError | None:
        try:
            key, parts = self._parse(raw)
        except CorruptShardError as error:
            return error
        return self.error(shard, sample, key, parts, complete=True)

    def error(
        self, shard: int, sample: int, key: str, parts: Mapping[str, Any], *, complete: bool
    ) -> CorruptShardError | None:
        """Return the error for a sample, by its number in its shard; None if its key and parts fit their checksums."""
        checksums = self.of_shard(shard)
        differences = [] if checksums is None else checksums.differences(sample, key, parts, complete=complete)
        if not differences:
            return None
        name = self._dataset.shard_names[shard]
        return CorruptShardError(
            f"{self._dataset.store.url(name)}: sample {sample}, key {key!r}: {'; '.join(differences)}. The bytes are "
            "not those that the checksums were made of: copy the shard again. If it was changed on purpose: energon "
            f"prepare {self._dataset.path} --checksums"
        )

    def of_shard(self, shard: int) -> ShardChecksums | None:
        """Return the checksums of a shard; None, and a warning, if it has none that fit."""
        if shard not in self._shards:
            dataset = self._dataset
            name = dataset.shard_names[shard]
            count = int(dataset.shard_counts[shard])
            size = int(dataset.shard_sizes[shard])
            checksums = None
            why = f"no checksums: energon prepare {dataset.path} --checksums"
            try:
                checksums = read_checksums(dataset.store, name, count=count, size=size)
            except MetadataError as error:
                why = str(error)
            if checksums is None and None not in self._shards.values():
                logger.warning("%s: shards are read unverified, the first is %s: %s", dataset.path, name, why)
            self._shards[shard] = checksums
        return self._shards[shard]


# ---------------------------------------------------------------------------------------------------------------------
# Making the checksums of a shard while its tar is scanned.


class ChecksumScan:
    """Makes the checksums of samples and parts of a tar, whose bytes it gets in order, in pieces of any length."""

    def __init__(self) -> None:
        self._samples: list[int] = []
        self._parts: list[int] = []
        self._sample = self._part = 0  # checksums so far of the sample and the part that these bytes cut through

    def take(self, scan: ShardScan, offset: int, data: bytes) -> None:
        """Take the bytes that begin at `offset` of the tar; `scan` knows the samples and parts that begin in them."""
        view = memoryview(data)
        end = offset + len(data)
        at = offset
        while at < end and scan.offsets and end > scan.offsets[0]:
            number = len(self._samples)
            at = max(at, scan.offsets[number])
            stop = scan.offsets[number + 1] if number + 1 < len(scan.offsets) else end + 1
            self._sample = zlib.crc32(view[at - offset : min(stop, end) - offset], self._sample)
            at = min(stop, end)
            if stop <= end:
                self._samples.append(self._sample)
                self._sample = 0
        while len(self._parts) < len(scan.part_offsets):
            number = len(self._parts)
            begin = scan.part_offsets[number]
            stop = scan.part_offsets[number] + scan.part_sizes[number]
            self._part = zlib.crc32(view[max(begin - offset, 0) : max(min(stop, end) - offset, 0)], self._part)
            if stop > end:
                break
            self._parts.append(self._part)
            self._part = 0

    def finish(self, scan: ShardScan, size: int, read: Callable[[int, int], bytes]) -> ShardChecksums:
        """Return the checksums of a tar of `size` bytes after all were taken; targets of hard links are read again."""
        samples = [*self._samples, self._sample]
        for number in scan.linked:
            self._parts[number] = zlib.crc32(read(scan.part_offsets[number], scan.part_sizes[number]))
        names = tuple(dict.fromkeys(scan.part_names))
        codes = {name: code for code, name in enumerate(names)}
        firsts = np.searchsorted(np.asarray(scan.part_samples), np.arange(len(scan.keys) + 1))
        return ShardChecksums(
            size=size,
            samples=np.array(samples, _U32),
            keys=np.array([zlib.crc32(key.encode("utf-8", "surrogateescape")) for key in scan.keys], _U32),
            firsts=firsts.astype(_U32),
            codes=np.array([codes[name] for name in scan.part_names], _U32),
            parts=np.array(self._parts, _U32),
            names=names,
        )
