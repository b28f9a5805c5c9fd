"""Samples in tars: splits member names into key and part, and the bytes of a sample into its parts (the hot path).

A tar is a row of 512-byte blocks. A member is a header block (name at 0, size in octal at 124, checksum at 148, type
at 156, magic at 257, name prefix at 345) and its content, padded to whole blocks. GNU `L` members and PAX `x` members
carry a long name (PAX: also the size) for the member that follows. Field meanings are those of Python's `tarfile`,
which Megatron Energon reads with, so that both see the same names.

Plain samples, which are nearly all, are split by `_tar.c` if it was compiled.

Invariant: all members in the range of a sample have the sample's key; otherwise index and tar do not belong together,
and CorruptShardError is raised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat
from operator import concat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon_bridge.core.errors import CorruptShardError
from energon_bridge.core.samples import SourceInfo
from energon_bridge.core.storage import ByteRange

# ---------------------------------------------------------------------------------------------------------------------
# Splitting a member name into sample key and part name.
#
# The key is the folder plus the base name up to its first dot, the part is the rest: `a/b.c/x.seg.png` has key
# `a/b.c/x` and part `seg.png`. Names without a dot in the base name belong to no sample, and neither do names that
# start with a component like `__meta__`. The rules are those of Megatron Energon 7.4, whose pattern defines the format,
# but for what macOS adds to a folder: `._x` beside each `x`, and `.DS_Store`.


_MEMBER = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_IGNORED = re.compile(r"__[^/]*__($|/)")
_OF_MACOS = ("._", ".DS_Store")


def split_member_name(name: str) -> tuple[str, str] | None:
    """Split a member name into (key, part); None if the member belongs to no sample."""
    if name.startswith("__") and _IGNORED.match(name):
        return None
    folder_end = name.rfind("/") + 1
    dot = name.find(".", folder_end)
    if dot < 0:
        return None
    if dot > folder_end and "\n" not in name:
        return name[:dot], name[dot + 1 :]
    if dot == folder_end and name.startswith(_OF_MACOS, dot):
        return None
    match = _MEMBER.match(name)  # hidden files in folders, and names with line ends, go by the pattern itself
    return (match.group(1), match.group(2)) if match else None


# ---------------------------------------------------------------------------------------------------------------------
# The parts of one sample, from the bytes of its range in a tar: the hot path of reading.


try:
    from energon_bridge.core.format import _tar
except ImportError:  # it was not compiled
    _tar = None  # type: ignore[assignment]

BLOCK = 512
HEAD = 256
"""Bytes of a member that are read with its headers: sizes of images stand there, but behind EXIF or a profile."""
_REGULAR = b"0\x007"
_NO_CONTENT = b"123456"
_HARD_LINK = 49  # "1"
_NO_PARTS = b"5DV"  # folders, and the label of a volume
_OTHERS = {49: "a hard link", 50: "a symbolic link", 51: "a device", 52: "a device", 54: "a pipe"}
_LONG_NAME, _LONG_TARGET = _LONG_NAMES = b"LK"
_PAX_EXTENDED = (120, 88)  # "x", and "X" of old Solaris
_SPARSE = 83  # "S"
_NAME_ERRORS = "surrogateescape"
_OFFSETS = "header", "content", "end"  # of a member, as offsets


class Member(NamedTuple):
    """One member of a tar, long names resolved; offsets in bytes. `kind` is its type, `target` what a link links to."""

    name: str
    kind: int
    target: str
    regular: bool
    header: int  # of the first header block that belongs to the member
    content: int
    size: int
    end: int  # of the padded content: where the next member starts

    @property
    def is_hard_link(self) -> bool:
        """Whether its content is that of a member in front of it."""
        return self.kind == _HARD_LINK

    def names(self) -> tuple[str, str] | None:
        """Return key and part of a file, or of a link or device instead of one; None if it belongs to no sample."""
        return None if self.kind in _NO_PARTS else split_member_name(self.name)


Follow = Callable[[Member], ByteRange]
"""Finds the content of a hard link."""


def parse_sample(
    data: bytes | bytearray | memoryview,
    *,
    where: str = "",
    parts: frozenset[str] | None = None,
    follow: Follow | None = None,
) -> tuple[str, dict[str, memoryview]]:
    """Split the bytes of one sample's range into its key and its parts (views of `data`, in the order of the tar).

    `parts` are the names of the parts to return; None: all. `where` names dataset, shard and sample in an error.
    `follow` finds the content of hard links. Raises CorruptShardError if the bytes are no tar members of one sample,
    for a part that is not a file, and for one that is there twice with different content.
    """
    view = memoryview(data)
    if _tar is not None and (plain := _tar.split(view, parts)) is not None:
        return plain
    names = ("", "")
    contents = dict[str, memoryview]()
    for names, member in _members(len(view), lambda at: next_member(view, at, where=where, verify=False), where):
        if parts is None or names[1] in parts:
            if member.regular:
                content = view[member.content : member.content + member.size]
            else:
                content = memoryview(_linked(member, follow, where).read())
            if contents.setdefault(names[1], content) != content:
                raise part_twice(where, member.name)
    return names[0], contents


def parse_samples(
    blocks: list[Any], ranges: NDArray[np.int64], parts: frozenset[str] | None
) -> tuple[list[str], dict[str, list[bytes]]] | None:
    """Split plain samples into their keys and, by its name, each part of all of them.

    Each is a range of its block (bytes), shape of `ranges` (2, samples). None if one is not plain, or no range, or
    has other parts than the first, or in another order.
    """
    return None if _tar is None else _tar.split_all(blocks, np.ascontiguousarray(ranges), parts)


def sources_of(
    path: str, indices: list[int], shards: list[str], keys: list[str], parts: Iterable[str]
) -> list[tuple[SourceInfo]]:
    """Return the sources of samples that have the same parts: of each its only one, as a tuple."""
    files = zip(*(map(concat, keys, repeat(f".{part}")) for part in parts), strict=True)
    values = zip(repeat(path), indices, shards, files, strict=False)
    return list(zip(map(tuple.__new__, repeat(SourceInfo), values)))


def _members(
    size: int, member_at: Callable[[int], Member | None], where: str
) -> Iterator[tuple[tuple[str, str], Member]]:
    """Yield the members in the range of a sample, with key and part of each; `member_at` reads the one at a position.

    Raises CorruptShardError if they are not those of one sample.
    """
    rebuild = "the index does not fit the tar. Rebuild it with `energon prepare --tar-index-only`."
    key = ""
    position = 0
    while position + BLOCK <= size and (member := member_at(position)) is not None:
        position = member.end
        names = member.names()
        if names is None:
            continue
        if member.regular and (end := member.content + member.size) > size:
            raise CorruptShardError(
                f"{where}: member {member.name!r} at byte {member.header} of the range ends at byte {end}, the range "
                f"has {size} bytes: {rebuild}"
            )
        key = key or names[0]
        if names[0] != key:
            raise CorruptShardError(f"{where}: the range of sample {key!r} also contains {member.name!r}: {rebuild}")
        yield names, member
    if not key:
        raise CorruptShardError(f"{where}: no member of a sample in a range of {size} bytes: {rebuild}")


def _linked(member: Member, follow: Follow | None, where: str) -> ByteRange:
    if follow is None or not member.is_hard_link:
        raise not_a_file(member, where)
    return follow(member)


def not_a_file(member: Member, where: str, advice: str = "") -> CorruptShardError:
    """Return the error for a part that is a link, a device or a pipe, so that it has no content of its own."""
    what = _OTHERS.get(member.kind, f"of the type {chr(member.kind)!r}")
    if not member.target:
        return CorruptShardError(
            f"{where}: {member.name!r} is {what}, not a file. Write the tar again without it, or with a file in its "
            "place."
        )
    option = "--hard-dereference" if member.is_hard_link else "--dereference"
    return CorruptShardError(
        f"{where}: {member.name!r} is {what} to {member.target!r}{advice}. Write the tar again with the files "
        f"themselves: tar {option}."
    )


def part_twice(where: str, name: str) -> CorruptShardError:
    """Return the error for a part that a sample has twice."""
    return CorruptShardError(
        f"{where}: {name!r} is there twice in a row, with different content. Which one belongs to the sample? "
        f"Unpacking keeps the last: keep the right one, and write the tar again."
    )


def _sparse(name: str, where: str, offset: int) -> CorruptShardError:
    return CorruptShardError(
        f"{where}: the member {name!r} at byte {offset} is sparse, which cannot be read by range. "
        f"Write the tar again without --sparse."
    )


def _kind_and_name(header: bytes, pax: Mapping[str, str], long_name: str | None) -> tuple[int, str]:
    """Return the kind of a member, and its name, by its header and those in front of it."""
    kind = header[156]
    name = _text(header[:100])
    if kind == 0 and name.endswith("/"):
        kind = 53  # old tars mark folders by the name alone
    if prefix := _text(header[345:500]):
        name = f"{prefix}/{name}"
    return kind, pax.get("path", name if long_name is None else long_name)


def next_member(view: memoryview, position: int, *, where: str, base: int = 0, verify: bool = True) -> Member | None:
    """Read the member that starts at `position`, with the GNU and PAX headers in front of it.

    Returns None at a zero block (end of the archive). `base` is the offset of `view` in the tar: positions count in the
    view, offsets in errors count in the tar. `verify=False` trusts a header with the ustar magic without checking its
    checksum. Raises NeedMoreBytes if headers continue after the view, CorruptShardError for a block that is no header.
    """
    start = position
    long_name: str | None = None
    long_target: str | None = None
    pax: dict[str, str] = {}
    while True:
        content = position + BLOCK
        if content > len(view):
            raise NeedMoreBytes(f"{where}: header at byte {base + position} is cut off", needed=content)
        header = bytes(view[position:content])
        if header[156] == 0 and not any(header):  # a zero block; looking at one byte first spares nearly all others
            if position == start:
                return None
            raise CorruptShardError(
                f"{where}: no member follows the long name at byte {base + start}. The tar is damaged."
            )
        if verify or header[257:262] != b"ustar":
            check_header(header, where=where, offset=base + position)
        kind = header[156]
        size = _number(header[124:136], where=where, offset=base + position)
        padded = size + 511 & -512  # rounded up to whole blocks
        if kind in _LONG_NAMES or kind in _PAX_EXTENDED:
            if content + size > len(view):
                raise NeedMoreBytes(f"{where}: long name at byte {base + position} is cut off", needed=content + padded)
            body = bytes(view[content : content + size])
            if kind == _LONG_NAME:
                long_name = _text(body)
            elif kind == _LONG_TARGET:
                long_target = _text(body)
            else:
                pax.update(_pax_records(body, where=where, offset=base + position))
            position = content + padded
            continue
        if kind == _SPARSE or any(name.startswith("GNU.sparse.") for name in pax):
            name = pax.get("GNU.sparse.name", pax.get("path", long_name or _text(header[:100])))
            raise _sparse(name, where, base + position)
        if kind == 103:  # "g", global PAX records: tarfile counts them as a member of its own
            start = position = content + padded
            continue
        if "size" in pax:
            size = _pax_size(pax["size"], where=where, offset=base + position)
        kind, name = _kind_and_name(header, pax, long_name)
        target = "" if kind not in b"12" else pax.get("linkpath", long_target or _text(header[157:257]))
        return Member(
            name=name,
            kind=kind,
            target=target,
            regular=kind in _REGULAR,
            header=start,
            content=content,
            size=size,
            end=content if kind in _NO_CONTENT else content + (size + 511 & -512),
        )


class NeedMoreBytes(CorruptShardError):  # noqa: N818 - a request to the caller that can read on, an error to others
    """The headers of a member continue after the end of the view; `needed` is the length of view they need."""

    def __init__(self, message: str, *, needed: int = 0) -> None:
        super().__init__(message)
        self.needed = needed


def check_header(header: bytes, *, where: str, offset: int) -> None:
    """Raise CorruptShardError unless the checksum of a header block is right; old tars summed signed bytes."""
    try:
        expected = int(header[148:156].partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        expected = -1
    computed = sum(header) - sum(header[148:156]) + 256
    if expected != computed:
        signed = computed - 256 * sum(byte > 127 for byte in header[:148] + header[156:])
        if expected != signed:
            raise CorruptShardError(
                f"{where}: no tar header at byte {offset} (checksum {header[148:156]!r}, expected {computed:o}). "
                f"The file is damaged, or not an uncompressed tar."
            )


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", _NAME_ERRORS)


def _number(field: bytes, *, where: str, offset: int) -> int:
    """Read a number field: octal text, or big-endian binary if its first byte says so."""
    if field[0] in (0o200, 0o377):
        value = int.from_bytes(field[1:], "big")
        return value - (1 << 8 * (len(field) - 1)) if field[0] == 0o377 else value
    try:
        return int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        raise CorruptShardError(f"{where}: header at byte {offset} has the size {field!r}, expected octal.") from None


def _pax_records(body: bytes, *, where: str, offset: int) -> dict[str, str]:
    """Parse PAX records: each is `<length> <name>=<value>` and a line end; length counts the whole record."""
    records: dict[str, str] = {}
    position = 0
    while position < len(body) and body[position]:
        digits, space, _ = body[position : position + 21].partition(b" ")
        length = int(digits) if space and digits.isdigit() else 0
        name, equals, value = body[position + len(digits) + 1 : position + length - 1].partition(b"=")
        if not equals or length <= len(digits) + 1 or position + length > len(body):
            raise CorruptShardError(f"{where}: PAX header at byte {offset} has a broken record at byte {position}.")
        records[name.decode("utf-8", _NAME_ERRORS)] = value.decode("utf-8", _NAME_ERRORS)
        position += length
    return records


def _pax_size(text: str, *, where: str, offset: int) -> int:
    if not (text.isascii() and text.isdigit()):
        raise CorruptShardError(f"{where}: PAX header before byte {offset} has the size {text!r}, expected a number.")
    return int(text)


# ---------------------------------------------------------------------------------------------------------------------
# The parts of one large sample, without reading all of them: small parts are read, large ones become ranges.
#
# The counterpart of `parse_sample` for samples whose bytes may mostly never be needed, such as videos.


def open_sample(
    sample: ByteRange,
    *,
    parts: frozenset[str] | None = None,
    keep: Callable[[str], bool],
    follow: Follow | None = None,
) -> tuple[str, dict[str, bytes | ByteRange]]:
    """Return key and parts of a sample, in the order of the tar: bytes, or a range for parts that `keep(name)` accepts.

    `parts` and `follow` are those of `parse_sample`. Raises what it raises, and StorageError.
    """
    where = f"{sample.url}, at byte {sample.offset}"
    names = ("", "")
    contents = dict[str, bytes | ByteRange]()
    begun = dict[int, bytes]()
    for names, member in _members(sample.size, lambda at: _member_at(sample, at, begun), where):
        name = names[1]
        if parts is None or name in parts:
            offset = sample.offset + member.content
            head = begun[member.content]
            part = ByteRange(store=sample.store, rel=sample.rel, offset=offset, size=member.size, head=head)
            if not member.regular:
                part = _linked(member, follow, sample.url)
            if name in contents and part.read() != _read(contents[name]):
                raise part_twice(sample.url, member.name)
            contents[name] = part if keep(name) else part.read()
    return names[0], contents


def _read(part: bytes | ByteRange) -> bytes:
    return part.read() if isinstance(part, ByteRange) else part


def _member_at(sample: ByteRange, position: int, begun: dict[int, bytes]) -> Member | None:
    """Return the member whose headers begin at a position of the sample; None at a zero block.

    The beginning of its content is read with them, and put into `begun`: a request more would cost more than its bytes.
    """
    length = BLOCK
    while True:
        length = min(length + HEAD, sample.size - position)
        head = memoryview(sample.store.read_range(sample.rel, sample.offset + position, length))
        try:
            member = next_member(head, 0, where=sample.url, base=sample.offset + position)
            if member is None:
                return None
            # `next_member` counted from `head`; positions of the sample are expected.
            begun[position + member.content] = bytes(head[member.content :][: member.size])
            return member._replace(**{name: position + getattr(member, name) for name in _OFFSETS})
        except NeedMoreBytes as more:
            if more.needed > sample.size - position:
                raise
            length = more.needed
