"""The interface of every storage backend: size, ranged reads, listing, writing; a range of a file; counters of reads.

Invariant: names are POSIX paths relative to the root, reads return exactly the bytes asked for or raise, and a store
can be pickled and used after a fork.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Protocol, cast

from energon_bridge.core.errors import CorruptShardError, ShortReadError, StorageError


class Store(Protocol):
    """Files below one root."""

    @property
    def root(self) -> str:
        """Absolute path or URL of the root, without a trailing slash."""

    def url(self, rel: str) -> str:
        """Return the full path or URL of `rel`, for messages and other programs."""

    def expect(self, rel: str, size: int, time: int) -> None:
        """Have ranged reads of `rel` raise CorruptShardError if it has another size or modification time (ns; 0: any).

        Storage that cannot tell does not.
        """

    def check(self, rel: str) -> None:
        """Raise CorruptShardError if a local file, which others have read, is not as expected."""

    def check_root(self) -> None:
        """Raise DatasetNotFoundError unless the root is a folder."""

    def size(self, rel: str) -> int:
        """Return the size of `rel` in bytes; raises ShardMissingError or DatasetNotFoundError."""

    def exists(self, rel: str) -> bool:
        """Return whether `rel` is a file."""

    def read(self, rel: str) -> bytes:
        """Read all of `rel`."""

    def read_range(self, rel: str, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes from byte `offset` of `rel`; raises ShortReadError if there are fewer."""

    def read_ranges(self, rel: str, offsets: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
        """Read several ranges of `rel`, each exactly, in the order given; raises what `read_range` raises."""

    def list(self, suffix: str | tuple[str, ...] = "") -> list[tuple[str, int]]:
        """List (name, bytes) of all files below the root whose name ends with `suffix` (or one of them), sorted."""

    def write(self, rel: str, data: bytes) -> None:
        """Write `rel` as a whole; readers see the old content or the new, if the storage can guarantee that."""

    def put_file(self, path: str, rel: str) -> None:
        """Move or copy the local file `path` to `rel`, replacing any file there as a whole."""

    def delete(self, rel: str) -> None:
        """Delete `rel` if it exists."""


class Rooted:
    """What stores say of themselves by their root."""

    __slots__ = ()
    root: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.root!r})"

    def url(self, rel: str) -> str:
        return f"{self.root}/{rel}" if rel else self.root

    def expect(self, rel: str, size: int, time: int) -> None:
        """Do nothing: of this storage it is not known what a file was."""

    def check(self, rel: str) -> None:
        """Do nothing: reads find out."""


class FarStore(Store, Protocol):
    """A store with a high latency, so that many ranges are requested at once."""

    def read_all(self, wanted: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> Sequence[Sequence[bytes]]:
        """Read ranges of several files: for each file its name, offsets and lengths. As `read_ranges` otherwise."""

    def sizes(self, rels: Sequence[str]) -> Sequence[int]:
        """Return the sizes of several files in bytes; raises what `size` raises."""

    def versions(self, most: int) -> dict[str, tuple[int, str]] | None:
        """Return bytes and ETag of all files below the root, None if the storage cannot tell or there are too many."""


_KEPT = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """`size` bytes from byte `offset` of the file `rel` of a store.

    Attributes:
        head: What was read of its beginning and is kept, a kibibyte at most: it is not read again.
    """

    store: Store
    rel: str
    offset: int
    size: int
    head: bytes = field(default=b"", repr=False, compare=False)

    @property
    def url(self) -> str:
        """Return the path or URL of the file."""
        return self.store.url(self.rel)

    def read(self, size: int | None = None) -> bytes:
        """Return its bytes, or the first `size` of them. Raises StorageError."""
        size = self.size if size is None else min(size, self.size)
        head = self.head[:size]
        if not head or len(head) < size:
            head += self.store.read_range(self.rel, self.offset + len(head), size - len(head))
        if len(self.head) < size <= _KEPT:
            object.__setattr__(self, "head", head)
        return head


def as_far(store: Store) -> FarStore | None:
    """Return the store if it is a `FarStore`, else None."""
    return cast(FarStore, store) if hasattr(store, "read_all") else None


def changed_file(url: str, how: str) -> CorruptShardError:
    """Build the error for a file that is not what it was when the run began, or when it was read first."""
    return CorruptShardError(
        f"{url}: the file was {how}. Its index, and what was read of it before, need not fit any more. Put the old "
        "file back and resume, or run `energon prepare` and begin a new run. If only its time was changed, resume."
    )


def short_read(url: str, *, offset: int, expected: int, got: int) -> StorageError:
    """Build the error for a read that returned the wrong number of bytes: a range cut short, or a whole file."""
    if got > expected:
        return StorageError(
            f"{url}: expected {expected} bytes at offset {offset}, got {got}: the server ignores Range requests and "
            "sends whole files, so single samples cannot be read. Serve the dataset with a server that answers "
            "Range requests with status 206 (nginx, Apache and object stores do; `python -m http.server` does not), "
            "or copy it to a local disk."
        )
    return ShortReadError(
        f"{url}: expected {expected} bytes at offset {offset}, got {got}. The file is shorter than its index says: "
        f"copy it again, or rebuild the index with `energon prepare --tar-index-only`."
    )


@dataclass(slots=True)
class Requests:
    """Counters of reads from storage. Requests; retries; hedges (a second request beside a slow one); bytes received;
    seconds that reads waited.

    Files: attempts to read that took longer than `read_timeout_seconds`. Node cache: hits (blocks on the disk, or
    fetched by another process meanwhile) and their bytes; misses (blocks that this process fetched) and their bytes.
    """

    requests: int = 0
    request_retries: int = 0
    request_hedges: int = 0
    request_bytes: int = 0
    request_seconds: float = 0.0
    stalled_reads: int = 0
    cache_hits: int = 0
    cache_hit_bytes: int = 0
    cache_misses: int = 0
    cache_miss_bytes: int = 0


REQUESTS = tuple(each.name for each in fields(Requests))
values_of = attrgetter(*REQUESTS)
"""Returns the numbers of `Requests` in the order of `REQUESTS`."""
MADE = Requests()
"""The counters of this process; use differences only, since a fork continues its parent's counts."""
