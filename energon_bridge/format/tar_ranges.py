"""Parts of one large sample in a tar without reading them all: headers and small parts are read, large ones are named.

The counterpart of `parse_sample` for samples of which most bytes may never be needed, such as videos.
"""

from __future__ import annotations

from collections.abc import Callable

from energon_bridge.errors import CorruptShardError
from energon_bridge.format.names import split_member_name
from energon_bridge.format.tar import BLOCK, Member, NeedMoreBytes, next_member
from energon_bridge.storage.ranges import ByteRange


def open_sample(
    sample: ByteRange, *, parts: frozenset[str] | None = None, keep: Callable[[str], bool]
) -> tuple[str, dict[str, bytes | ByteRange]]:
    """Return the key of a sample and its parts, in the order of the tar: bytes, or a range where `keep(name)` says so.

    `parts` limits what is returned to these part names. Raises CorruptShardError if the range holds no tar members of
    one sample, StorageError.
    """
    found: dict[str, bytes | ByteRange] = {}
    key: str | None = None
    position = 0
    while position + BLOCK <= sample.size:
        member = _member_at(sample, position)
        if member is None:
            break
        content, position = position + member.content, position + member.end
        names = split_member_name(member.name) if member.regular else None
        if names is None:
            continue
        key = names[0] if key is None else key
        if names[0] != key or content + member.size > sample.size:
            raise CorruptShardError(
                f"{sample.url}: the range of sample {key!r} at byte {sample.offset} has {sample.size} bytes and does "
                f"not fit its member {member.name!r}. Rebuild the index with `energon prepare --tar-index-only`."
            )
        if parts is None or names[1] in parts:
            part = ByteRange(store=sample.store, rel=sample.rel, offset=sample.offset + content, size=member.size)
            found[names[1]] = part if keep(names[1]) else part.read()
    if key is None:
        raise CorruptShardError(
            f"{sample.url}: no member of a sample in the {sample.size} bytes from {sample.offset}: the index does not "
            f"fit the tar. Rebuild it with `energon prepare --tar-index-only`."
        )
    return key, found


def _member_at(sample: ByteRange, position: int) -> Member | None:
    """Return the member whose headers begin at a position, with offsets from there; None at a zero block."""
    length = BLOCK
    while True:
        length = min(length, sample.size - position)
        head = memoryview(sample.store.read_range(sample.rel, sample.offset + position, length))
        try:
            return next_member(head, 0, where=sample.url, base=sample.offset + position)
        except NeedMoreBytes as more:
            if more.needed > sample.size - position:
                raise
            length = more.needed
