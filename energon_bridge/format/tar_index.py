"""The `.tar.idx` next to each tar, which has the offsets of its samples, and the header scan that makes it.

Format: unsigned 64-bit little-endian integers without a header: the offset of the first header block of each sample,
then the offset after the last member; n samples take 8 * (n + 1) bytes. Sample i is bytes `[index[i], index[i + 1])`.
"""

from __future__ import annotations

import logging
import re
import sys
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from energon_bridge.errors import CorruptShardError, ShardMissingError, UnsupportedShardError
from energon_bridge.format.tar import BLOCK, Member, NeedMoreBytes, next_member, split_member_name
from energon_bridge.storage import Store

_OFFSET = np.dtype("<u8")


def index_name(shard: str) -> str:
    """Return the name of the index of a shard: `a/x.tar` has `a/x.tar.idx`."""
    return f"{shard}.idx"


def encode_index(offsets: Sequence[int] | array[int] | np.ndarray) -> bytes:
    """Encode offsets (of each sample, and of the end) as the content of an index file."""
    return np.asarray(offsets, dtype=_OFFSET).tobytes()


def load_index(store: Store, shard: str, *, count: int, size: int, remedy: str) -> np.ndarray:
    """Read and check the index of a shard of `count` samples and `size` bytes; `remedy` says what to do if it is wrong.

    Returns uint64 offsets, shape (count + 1,). Raises ShardMissingError if the file is not there and CorruptShardError
    if it does not fit the shard.
    """
    rel = index_name(shard)
    where = store.url(rel)
    try:
        data = store.read(rel)
    except ShardMissingError as error:
        raise ShardMissingError(f"{where}: the index of shard {shard!r} is missing. {remedy}") from error
    if len(data) != 8 * (count + 1):
        raise CorruptShardError(
            f"{where}: {len(data)} bytes, expected {8 * (count + 1)} for the {count} samples in .info.json. {remedy}"
        )
    offsets = np.frombuffer(data, dtype=_OFFSET)
    # Compared directly, since a difference of unsigned numbers would wrap around.
    if count and bool((offsets[1:] <= offsets[:-1]).any()):
        sample = int(np.argmax(offsets[1:] <= offsets[:-1]))
        raise CorruptShardError(
            f"{where}: sample {sample} starts at byte {offsets[sample]} and ends at {offsets[sample + 1]}. {remedy}"
        )
    if int(offsets[-1]) > size:
        raise CorruptShardError(
            f"{where}: the last sample ends at byte {offsets[-1]}, but {store.url(shard)} has {size} bytes. "
            f"The file was cut off or replaced: copy it again, or: {remedy}"
        )
    return offsets


# ---------------------------------------------------------------------------------------------------------------------
# The scan of all headers of a tar, for `energon prepare`; training never scans.
#
# Small members are read in large buffers, large ones are skipped: the window grows and shrinks with the number of
# members in it. Every header's checksum is verified, and a defect is reported with its byte offset.


_MIN_WINDOW = 4 << 10
_START_WINDOW = 256 << 10
_MAX_WINDOW = 2 << 20
_MAX_HEADERS = 64 << 20  # a longer chain of long names is no tar
_ADLER_MODULUS = 65521
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstd

_logger = logging.getLogger(__name__)


def _integers() -> array[int]:
    return array("q")


@dataclass(slots=True, kw_only=True)
class ShardScan:
    """The samples of one tar and their parts; columns of equal length for samples, and for parts.

    The columns are arrays of 64-bit integers, because scans cross from worker processes to the writer.
    """

    keys: list[str] = field(default_factory=list)
    offsets: array[int] = field(default_factory=_integers)  # of each sample's first header, then of the end
    part_samples: array[int] = field(default_factory=_integers)  # index of the sample in this tar
    part_names: list[str] = field(default_factory=list)
    part_offsets: array[int] = field(default_factory=_integers)  # of the content
    part_sizes: array[int] = field(default_factory=_integers)


def scan_tar(store: Store, rel: str) -> ShardScan:
    """Walk all headers of a tar; raises CorruptShardError naming the shard and the byte offset of the defect.

    A tar without samples is an error, too. A compressed one is an UnsupportedShardError.
    """
    try:
        return _scan(store, rel)
    except CorruptShardError as error:
        if store.read_range(rel, 0, min(6, store.size(rel))).startswith(_COMPRESSED):
            raise compressed_shard(store.url(rel), exclude=re.escape(rel)) from error
        raise


def compressed_shard(url: str, *, exclude: str, count: int = 1) -> UnsupportedShardError:
    """Return the error for `count` compressed tars, the first of which is at `url`; the pattern leaves them out."""
    return UnsupportedShardError(
        f"{url}: compressed tars cannot be read by range, and there {'is 1' if count == 1 else f'are {count}'} of "
        f"them. Decompress them (gunzip makes x.tar of x.tgz), or leave them out with --exclude '{exclude}'."
    )


def _scan(store: Store, rel: str) -> ShardScan:
    where = store.url(rel)
    size = store.size(rel)
    scan = ShardScan()
    base = 0
    window = _START_WINDOW
    needed = BLOCK
    while True:
        if size - base < needed:
            if base == size and base > 0:
                _logger.warning("%s: no end-of-archive marker at byte %d; was the copy cut off?", where, base)
                break
            raise CorruptShardError(f"{where}: cut off at byte {base}: {size - base} bytes are too few for a header.")
        buffer = store.read_range(rel, base, min(max(window, needed), size - base))
        before = len(scan.part_names)
        position, needed = _scan_buffer(scan, buffer, base=base, size=size, where=where)
        base += position
        if needed == 0:
            break
        found = len(scan.part_names) - before
        window = min(window * 4, _MAX_WINDOW) if found > 8 else max(window // 4, _MIN_WINDOW) if found < 4 else window
    if not scan.keys:
        raise CorruptShardError(
            f"{where}: no samples before the end of the archive at byte {base}. Leave it out with --exclude "
            f"'{re.escape(rel)}', or write it again."
        )
    scan.offsets.append(base)
    return scan


def _scan_buffer(scan: ShardScan, buffer: bytes, *, base: int, size: int, where: str) -> tuple[int, int]:
    """Take the members that start in `buffer` into `scan`.

    Returns the position (relative to the buffer, possibly after it) where the scan continues, and the number of bytes
    it needs there; 0 means the end of the archive.
    """
    keys, offsets = scan.keys, scan.offsets
    part_samples, part_names = scan.part_samples, scan.part_names
    part_offsets, part_sizes = scan.part_offsets, scan.part_sizes
    view = memoryview(buffer)
    length = len(buffer)
    last_key = keys[-1] if keys else None
    index = len(keys) - 1
    position = 0
    while position + 512 <= length:
        header = buffer[position : position + 512]
        start = position
        if header[156] == 48 and not header[345] and header[257:262] == b"ustar" and _checksum_fits(header):
            end = header.find(0, 0, 100)
            try:
                name = header[: end if end >= 0 else 100].decode()
                content_size = int(header[124:135], 8)
            except ValueError:
                name = ""
        else:
            name = ""
        if name:
            content = position + 512
            position = content + (content_size + 511 & -512)
        else:
            try:
                member = next_member(view, position, where=where, base=base)
            except NeedMoreBytes as request:
                if request.needed - position > _MAX_HEADERS:
                    raise
                return position, request.needed - position
            if member is None:
                return position, 0
            _check_utf8(member, base=base, where=where)
            start, content, position = member.header, member.content, member.end
            if base + position > size:
                raise _cut_off(where, base + start, member.name, base + position, size)
            if not member.regular:
                continue
            name, content_size = member.name, member.size
        if base + position > size:
            raise _cut_off(where, base + start, name, base + position, size)
        names = split_member_name(name)
        if names is None:
            continue
        key, part = names
        if key != last_key:
            last_key = key
            index += 1
            keys.append(key)
            offsets.append(base + start)
        part_samples.append(index)
        part_names.append(sys.intern(part))  # few names, many members: equal strings cross once
        part_offsets.append(base + content)
        part_sizes.append(content_size)
    return position, BLOCK


def _checksum_fits(header: bytes) -> bool:
    """Check the checksum of a header by Adler-32, whose low half is one plus the sum of the bytes."""
    try:
        expected = int(header[148:154], 8)
    except ValueError:
        return False
    return (zlib.adler32(header) & 0xFFFF) == (expected + sum(header[148:156]) - 255) % _ADLER_MODULUS


def _check_utf8(member: Member, *, base: int, where: str) -> None:
    try:
        member.name.encode()
    except UnicodeEncodeError:
        raise CorruptShardError(
            f"{where}: the name {member.name!r} at byte {base + member.header} is not UTF-8. Write the tar again with "
            f"UTF-8 names."
        ) from None


def _cut_off(where: str, offset: int, name: str, end: int, size: int) -> CorruptShardError:
    return CorruptShardError(
        f"{where}: cut off: member {name!r} at byte {offset} ends at byte {end}, the file has {size} bytes."
    )
