"""The `.tar.idx` next to each tar, which has the offsets of its samples, and the header scan that makes it.

Format: unsigned 64-bit little-endian integers without a header: the offset of the first header block of each sample,
then the offset after the last member; n samples take 8 * (n + 1) bytes. Sample i is bytes `[index[i], index[i + 1])`.
"""

from __future__ import annotations

import logging
import posixpath
import re
import sys
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from unicodedata import normalize

import numpy as np

from energon_bridge.core.errors import (
    CorruptShardError,
    DatasetError,
    DuplicateKeyError,
    ShardMissingError,
    UnsupportedShardError,
)
from energon_bridge.core.format.tar import (
    BLOCK,
    Follow,
    Member,
    NeedMoreBytes,
    next_member,
    not_a_file,
    part_twice,
    split_member_name,
)
from energon_bridge.core.storage import ByteRange, Store

_NOT_IN_FRONT = ", which is not in front of it in this tar"
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
            f"If the tar was cut off, copy it again; if it was replaced: {remedy}"
        )
    return offsets


# ---------------------------------------------------------------------------------------------------------------------
# The scan of all headers of a tar, for `energon prepare`; training never scans.
#
# Small members are read in large buffers; the contents of large ones are not read at all. The bytes of one read grow
# and shrink with the number of members found in the last. Every header's checksum is verified, and a defect is reported
# with its byte offset.


_MIN_READ = 4 << 10
_START_READ = 256 << 10
_MAX_READ = 2 << 20
_MAX_HEADERS = 64 << 20  # bytes of long names in front of one member; more of them is no tar
_ADLER_MODULUS = 65521
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstd

_logger = logging.getLogger(__name__)


def _integers() -> array[int]:
    return array("q")


@dataclass(slots=True, kw_only=True)
class ShardScan:
    """The samples of one tar and their parts; columns of equal length for samples, and for parts.

    The columns are arrays of 64-bit integers, because worker processes send them to the writer. A part that is a hard
    link has offset and size of its target's content; `linked` has the numbers of these parts. `faults` has the samples
    that would lack something if they were read: the number of each, and the error that says what.
    """

    keys: list[str] = field(default_factory=list)
    offsets: array[int] = field(default_factory=_integers)  # of each sample's first header, then of the end
    part_samples: array[int] = field(default_factory=_integers)  # index of the sample in this tar
    part_names: list[str] = field(default_factory=list)
    part_offsets: array[int] = field(default_factory=_integers)  # of the content
    part_sizes: array[int] = field(default_factory=_integers)
    linked: array[int] = field(default_factory=_integers)
    faults: list[tuple[int, DatasetError]] = field(default_factory=list)

    def follow(self, store: Store, rel: str) -> Follow | None:
        """Return a function that finds the content of the hard links of this tar; None if it has none."""
        contents = {
            f"{self.keys[self.part_samples[number]]}.{self.part_names[number]}": ByteRange(
                store=store, rel=rel, offset=self.part_offsets[number], size=self.part_sizes[number]
            )
            for number in self.linked
        }
        return _Links(contents, store.url(rel)) if contents else None

    def check(self, *, unseen: bool = False) -> None:
        """Raise the first fault; with `unseen`, the first that reading the samples one by one would not find."""
        kind = (DuplicateKeyError, UnsupportedShardError) if unseen else DatasetError
        errors = [error for _, error in self.faults if isinstance(error, kind)]
        if errors:
            more = f" The tar has {len(errors) - 1:,} more of such faults." if len(errors) > 1 else ""
            raise type(errors[0])(f"{errors[0]}{more}")

    def parts_of(self, sample: int) -> list[str]:
        """Return the names of a sample's parts."""
        return self.part_names[bisect_left(self.part_samples, sample) : bisect_right(self.part_samples, sample)]


@dataclass(frozen=True, slots=True)
class _Links:
    """Finds the content of a hard link of a tar by the name of the link; a class, since processes pickle it."""

    contents: Mapping[str, ByteRange]
    where: str

    def __call__(self, member: Member) -> ByteRange:
        if member.name not in self.contents:
            raise not_a_file(member, self.where, _NOT_IN_FRONT)
        return self.contents[member.name]


Take = Callable[["ShardScan", int, bytes], None]
"""Called with the scan so far, an offset and the bytes there; what begins in these bytes is in the scan already."""


def scan_tar(store: Store, rel: str, take: Take | None = None, *, may_be_empty: bool = False) -> ShardScan:
    """Walk all headers of a tar; raises CorruptShardError naming the shard and the byte offset of the defect.

    A tar without samples is an error, too, unless it has no files at all and `may_be_empty`. A compressed one is an
    UnsupportedShardError. Defects of single samples go to `faults`. With `take`, all bytes of the samples are read,
    once.
    """
    try:
        return _scan(store, rel, take, may_be_empty)
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


def _scan(store: Store, rel: str, take: Take | None, may_be_empty: bool) -> ShardScan:
    where = store.url(rel)
    size = store.size(rel)
    scan = ShardScan()
    others = _Others()
    base = 0
    length = _START_READ
    needed = BLOCK
    while True:
        if size - base < needed:
            if base == size and base > 0:
                _logger.warning("%s: no end-of-archive marker at byte %d; was the copy cut off?", where, base)
                break
            raise CorruptShardError(f"{where}: cut off at byte {base}: {size - base} bytes are too few for a header.")
        buffer = store.read_range(rel, base, min(max(length, needed), size - base))
        before = len(scan.part_names)
        position, needed = _scan_buffer(scan, others, buffer, base=base, size=size, where=where)
        # `position` may lie behind the buffer, after a large member: `take` gets the bytes in between, too.
        if take is not None:
            take(scan, base, buffer[:position])
            for offset in range(base + len(buffer), base + position, _MAX_READ):
                take(scan, offset, store.read_range(rel, offset, min(_MAX_READ, base + position - offset)))
        base += position
        if needed == 0:
            break
        added = len(scan.part_names) - before  # members in this buffer: few of them means that they are large
        if added > 8 or take is not None:
            length = min(length * 4, _MAX_READ)
        elif added < 4:
            length = max(length // 4, _MIN_READ)
    if not scan.keys and not (may_be_empty and not others.files and not others.links):
        raise CorruptShardError(
            f"{where}: no samples before the end of the archive at byte {base}. Leave it out with --exclude "
            f"'{re.escape(rel)}', or write it again."
        )
    scan.offsets.append(base)
    if others.links:
        _follow(scan, others, where)
    _find_faults(scan, store, rel)
    bare = {name for name, _, _ in others.files}.intersection(scan.keys) if others.files else ()
    for name in sorted(bare):
        message = (
            f"{where}: {name!r} has no extension, so it is not a part of the sample {name!r}. Write the tar again "
        )
        scan.faults.append((scan.keys.index(name), UnsupportedShardError(f"{message}with one: {name}.jpg, say.")))
    return scan


@dataclass(slots=True)
class _Others:
    """What is in a tar besides the parts that are files.

    Attributes:
        files: Name, and offset and size of the content, of files that belong to no sample.
        links: Of parts that are no files: number of the part, member, and its offset.
    """

    files: list[tuple[str, int, int]] = field(default_factory=list)
    links: list[tuple[int, Member, int]] = field(default_factory=list)


def _scan_buffer(
    scan: ShardScan, others: _Others, buffer: bytes, *, base: int, size: int, where: str
) -> tuple[int, int]:
    """Take the members that start in `buffer` into `scan` and `others`.

    Returns the position (relative to the buffer, possibly after it) where the scan continues, and the number of bytes
    it needs there; 0 means the end of the archive.
    """
    keys = scan.keys
    offsets = scan.offsets
    part_samples = scan.part_samples
    part_names = scan.part_names
    part_offsets = scan.part_offsets
    part_sizes = scan.part_sizes
    view = memoryview(buffer)
    length = len(buffer)
    last_key = keys[-1] if keys else None
    index = len(keys) - 1
    position = 0
    while position + 512 <= length:
        header = buffer[position : position + 512]
        start = position
        # The usual header (a regular file, a short name without prefix, ustar, octal size) is read right here, which is
        # faster; `next_member` reads all others.
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
            start = member.header
            content = member.content
            position = member.end
            if base + position > size:
                raise _cut_off(where, base + start, member.name, base + position, size)
            name = member.name
            content_size = member.size
            if not member.regular:
                if member.names() is None:
                    continue
                others.links.append((len(part_names), member, base + start))
                content_size = 0
        if base + position > size:
            raise _cut_off(where, base + start, name, base + position, size)
        names = split_member_name(name)
        if names is None:
            others.files.append((name, base + content, content_size))
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


def _follow(scan: ShardScan, others: _Others, where: str) -> None:
    """Give hard links offset and size of their targets, which are in front of them; note all other links as faults."""
    contents: dict[str, list[tuple[int, int]]] = {}
    for name, offset, size in others.files:
        contents.setdefault(_path(name), []).append((offset, size))
    links = {number: (member, start) for number, member, start in others.links}
    dangling: list[int] = []
    for number, sample in enumerate(scan.part_samples):
        name = f"{scan.keys[sample]}.{scan.part_names[number]}"
        if number in links:
            member, start = links[number]
            targets = [content for content in contents.get(_path(member.target), ()) if content[0] <= start]
            if not member.is_hard_link or not targets:
                scan.faults.append((sample, not_a_file(member, where, _NOT_IN_FRONT * member.is_hard_link)))
                dangling.append(number)
                continue
            scan.linked.append(number - len(dangling))  # its number once the dangling links are deleted
            scan.part_offsets[number], scan.part_sizes[number] = targets[-1]
        contents.setdefault(_path(name), []).append((scan.part_offsets[number], scan.part_sizes[number]))
    for number in reversed(dangling):
        del scan.part_samples[number], scan.part_names[number], scan.part_offsets[number], scan.part_sizes[number]


def _path(name: str) -> str:
    return posixpath.normpath(name).lstrip("/")


def _find_faults(scan: ShardScan, store: Store, rel: str) -> None:
    """Note parts that a sample has twice with different content, and samples whose parts are not adjacent."""
    where = store.url(rel)
    # One number for each sample and part name: if all differ, as in nearly all tars, no part is there twice.
    codes = {name: number for number, name in enumerate(set(scan.part_names))}
    parts = np.fromiter(map(codes.__getitem__, scan.part_names), np.int64, len(scan.part_names))
    parts += np.asarray(scan.part_samples) * len(codes)
    if not np.diff(np.sort(parts)).all():
        seen: dict[tuple[int, str], tuple[int, int]] = {}
        for sample, part, *content in zip(
            scan.part_samples, scan.part_names, scan.part_offsets, scan.part_sizes, strict=True
        ):
            first = seen.setdefault((sample, part), (content[0], content[1]))
            if first[1] != content[1] or store.read_range(rel, *first) != store.read_range(rel, *content):
                scan.faults.append((sample, part_twice(where, f"{scan.keys[sample]}.{part}")))
    scan.faults += find_pieces(scan.keys, scan.parts_of, where)


def find_pieces(
    keys: Sequence[str], parts_of: Callable[[int], Collection[str]], where: str
) -> Iterator[tuple[int, DuplicateKeyError]]:
    """Yield the samples of a tar that are further parts of an earlier one: they have its key, and other part names.

    Keys are the same here if unpacking makes one file name of them (`./a` is `a`), or if they differ in their Unicode
    form alone: what one system wrote composed, another has written decomposed.
    """
    if len(set(keys)) == len(keys) and all(key.isascii() and "./" not in key and "//" not in key for key in keys):
        return
    firsts: dict[str, int] = {}
    for number, key in enumerate(keys):
        first = firsts.setdefault(normalize("NFC", posixpath.normpath(key)), number)
        here = parts_of(number)
        there = parts_of(first)
        if first == number or not set(here).isdisjoint(there):
            continue
        if keys[first] == key:
            remedy = "Write the tar again with its members sorted by name: tar --sort=name."
            what = f"the parts of the sample {key!r} are not adjacent"
        elif normalize("NFC", keys[first]) != normalize("NFC", key):
            remedy = "Write the tar again with names of one form: tar -C FOLDER ."
            what = f"the keys {keys[first]!a} and {key!a} are one name in two forms"
        else:
            remedy = "Write the tar again with names of one form (convmv --nfc renames files)."
            what = f"the keys {keys[first]!a} and {key!a} are one name in two Unicode forms"
        yield (
            number,
            DuplicateKeyError(
                f"{where}: {what}: {', '.join(sorted(there))}, and after other samples {', '.join(sorted(here))}. They "
                f"are one sample. {remedy}"
            ),
        )


def other_parts(first: str, key: str, there: Collection[str], second: str, here: Collection[str]) -> DuplicateKeyError:
    """Return the error for a key with these parts in one tar and others in a second one: one sample, or two?"""
    return DuplicateKeyError(
        f"the key {key!r} has the parts {', '.join(sorted(there))} in {first}, and {', '.join(sorted(here))} in "
        f"{second}. Are they one sample? Put the tars with the same parts into a folder of their own, prepare each "
        "folder, and join the datasets in a mix. Are they two? Then do so, and blend them."
    )


def _checksum_fits(header: bytes) -> bool:
    """Check the checksum of a header by Adler-32, whose low half is one plus the sum of the bytes, modulo 65521.

    A tar's checksum counts its own 8 bytes as spaces, which sum to 256. zlib sums faster than Python.
    """
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
