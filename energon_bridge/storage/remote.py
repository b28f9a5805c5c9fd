"""Object stores and web servers behind `Store`: what is asked for becomes few large requests, many of them at once.

Invariant: a read returns exactly the bytes asked for, of one version of the object, or raises an error that names the
URL, the range, what the server said, and what to do. A store can be pickled and used after a fork: it holds nothing but
its URL, and finds the client and the bucket of the process it is in.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from energon_bridge.errors import DatasetNotFoundError, EnergonError, ShardMissingError, StorageError
from energon_bridge.storage.base import short_read
from energon_bridge.storage.buckets import Bucket, GcsBucket, HttpBucket, S3Bucket
from energon_bridge.storage.http import Body, Client, GaveUp, Piece, Refused, TooShort, WholeFile, shared_client
from energon_bridge.storage.stalls import Stalls

_GAP = 32 << 10
"""Bytes between two ranges that are read along: they cost a small part of what a request does."""
_PIECE = 4 << 20
"""Bytes of a request at most: what is longer is read in several at once."""
_LISTED = 64
"""Sizes of so many files are taken from a listing, where there is one."""

_MAKERS: dict[str, Callable[[str], Bucket]] = {
    "http": lambda place: HttpBucket("http", place),
    "https": lambda place: HttpBucket("https", place),
    "s3": S3Bucket,
    "gs": GcsBucket,
    "gcs": GcsBucket,
}
PROTOCOLS = frozenset(_MAKERS)


class RemoteStore:
    """A folder of a bucket or of a web server; thread-safe, fork-safe and picklable."""

    __slots__ = ("_bucket_name", "_here", "_prefix", "_protocol", "_stalls", "root")

    def __init__(self, url: str, stalls: Stalls | None = None) -> None:
        self.root = url.rstrip("/")
        self._protocol, _, rest = self.root.partition("://")
        self._bucket_name, _, prefix = rest.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._stalls = Stalls() if stalls is None else stalls
        self._here: tuple[int, Client, Bucket] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteStore, (self.root, self._stalls)

    def __repr__(self) -> str:
        return f"RemoteStore({self.root!r})"

    def url(self, rel: str) -> str:
        """Return the full URL of `rel`."""
        return f"{self.root}/{rel}" if rel else self.root

    def check_root(self) -> None:
        """Raise DatasetNotFoundError unless there is anything below the root."""
        bucket = self._place()[1]
        if isinstance(bucket, HttpBucket):
            if self._answers(self._prefix):
                return
        else:
            with self._naming(""):
                try:
                    if any(True for _ in bucket.list(self._prefix, 1)):
                        return
                except Exception as error:
                    if _answer_of(error)[0] == 403:
                        return  # who may read need not be allowed to list
                    raise
        raise DatasetNotFoundError(f"{self.root}: no such folder. Check the URL.")

    def size(self, rel: str) -> int:
        """Return the size of `rel` in bytes."""
        with self._naming(rel):
            (body,) = self._fetch([self._piece(rel, 0, 1, upto=True)])
        return _total(body)

    def sizes(self, rels: Sequence[str]) -> list[int]:
        """Return the sizes of several files in bytes; raises what `size` raises."""
        if len(rels) >= _LISTED and not isinstance(self._place()[1], HttpBucket):
            with contextlib.suppress(StorageError):
                known = dict(self.list())
                return [known[rel] if rel in known else self.size(rel) for rel in rels]
        try:
            return [_total(body) for body in self._fetch([self._piece(rel, 0, 1, upto=True) for rel in rels])]
        except Refused:
            return [self.size(rel) for rel in rels]  # names the one
        except Exception:
            with self._naming(""):
                raise

    def exists(self, rel: str) -> bool:
        """Tell whether `rel` is a file."""
        return bool(rel) and self._answers(self._prefix + rel)

    def read(self, rel: str) -> bytes:
        """Read all of `rel`."""
        with self._naming(rel):
            (first,) = self._fetch([self._piece(rel, 0, _PIECE, upto=True)])
            total = _total(first)
            if first.got >= total:
                return bytes(first.data)
            rest = self._fetch(
                [self._piece(rel, start, min(_PIECE, total - start)) for start in range(first.got, total, _PIECE)]
            )
        return self._joined(rel, [first, *rest])

    def read_range(self, rel: str, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes from byte `offset` of `rel`; raises ShortReadError if there are fewer."""
        return bytes(self.read_ranges(rel, (offset,), (length,))[0])

    def read_ranges(self, rel: str, offsets: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
        """Read several ranges of `rel`, each exactly, in the order given; raises what `read_range` raises."""
        return self.read_all([(rel, offsets, lengths)])[0]

    def read_all(self, wanted: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> list[list[bytes]]:
        """Read ranges of several files at once: for each file its name, offsets and lengths."""
        spans = [_spans(offsets, lengths) for _, offsets, lengths in wanted]
        pieces = [
            self._piece(rel, start, min(_PIECE, high - start))
            for (rel, _, _), found in zip(wanted, spans, strict=True)
            for low, high, _ in found
            for start in range(low, high, _PIECE)
        ]
        try:
            bodies = iter(self._fetch(pieces))
        except (EnergonError, MemoryError):
            raise
        except Exception as error:
            if len(wanted) > 1:  # one by one, to name the one that fails
                return [self.read_all([one])[0] for one in wanted]
            ((rel, offsets, lengths),) = wanted
            self._raise(rel, offsets, lengths, error)
        out = []
        for (rel, offsets, lengths), found in zip(wanted, spans, strict=True):
            blocks: list[Any] = [b""] * len(offsets)
            for low, high, members in found:
                parts = [next(bodies) for _ in range(low, high, _PIECE)]
                if len(parts) == 1 and len(members) == 1:
                    blocks[members[0]] = parts[0].data
                    continue
                data = memoryview(parts[0].data if len(parts) == 1 else self._joined(rel, parts))
                for member in members:
                    start = offsets[member] - low
                    blocks[member] = data[start : start + lengths[member]]
            out.append(blocks)
        return out

    def list(self, suffix: str | tuple[str, ...] = "") -> list[tuple[str, int]]:
        """List (name, bytes) of all files below the root whose name ends with `suffix` (or one of them), sorted."""
        start = len(self._prefix)
        with self._naming(""):
            found = [(key[start:], size) for key, size in self._place()[1].list(self._prefix)]
        if not found:
            self.check_root()
        return sorted((name, size) for name, size in found if name.endswith(suffix) and not name.endswith("/"))

    def write(self, rel: str, data: bytes) -> None:
        """Write `rel` as a whole: a reader sees the old content or the new, never a part."""
        with self._naming(rel, f"write {len(data)} bytes"):
            self._place()[1].put(self._prefix + rel, data)

    def put_file(self, path: str, rel: str) -> None:
        """Write a local file to `rel`, replacing what is there as a whole."""
        with self._naming(rel, "write"):
            self._place()[1].put_file(self._prefix + rel, path)

    def delete(self, rel: str) -> None:
        """Delete `rel` if it is there."""
        with self._naming(rel, "delete"):
            self._place()[1].delete(self._prefix + rel)

    # Asking ----------------------------------------------------------------------------------------------------------

    def _place(self) -> tuple[Client, Bucket]:
        here = self._here
        if here is None or here[0] != os.getpid():
            bucket = _bucket(self._protocol, self._bucket_name)
            here = self._here = os.getpid(), shared_client(), bucket
        return here[1], here[2]

    def _piece(self, rel: str, start: int, length: int, *, upto: bool = False) -> Piece:
        return Piece(self._place()[1], self._prefix + rel, start, length, upto)

    def _fetch(self, pieces: Sequence[Piece]) -> Sequence[Body]:
        return self._place()[0].fetch(pieces, self._stalls) if pieces else []

    def _answers(self, key: str) -> bool:
        """Tell whether the server has anything under a key."""
        client, bucket = self._place()
        with self._naming(key[len(self._prefix) :]):
            try:
                client.fetch([Piece(bucket, key, 0, 1, True)], self._stalls)
            except Refused as refused:
                if refused.status in (404, 410):
                    return False
                raise
        return True

    def _joined(self, rel: str, parts: Sequence[Body]) -> bytes:
        if len({part.version for part in parts}) > 1:
            raise StorageError(f"{self.url(rel)}: changed while it was read. Do not replace files that a run reads.")
        return b"".join([part.data for part in parts])

    # Errors ----------------------------------------------------------------------------------------------------------

    def _raise(self, rel: str, offsets: Sequence[int], lengths: Sequence[int], error: Exception) -> NoReturn:
        """Raise what an error means for the first range that has it."""
        ranges = list(zip(offsets, lengths, strict=True))
        if isinstance(error, TooShort):
            short = [one for one in ranges if sum(one) > error.total]
            offset, length = (short or ranges)[0]
            got = (
                error.total if isinstance(error, WholeFile) and not short else min(length, max(0, error.total - offset))
            )
            raise short_read(self.url(rel), offset=offset, expected=length, got=got) from error
        low = min(offsets)
        with self._naming(rel, f"read {max(map(sum, ranges)) - low} bytes at offset {low}"):
            raise error
        raise AssertionError

    @contextlib.contextmanager
    def _naming(self, rel: str, doing: str = "read") -> Iterator[None]:
        """Turn what clients and libraries raise into errors that name the URL, the answer and the remedy."""
        try:
            yield
        except (EnergonError, ImportError, MemoryError):
            raise
        except GaveUp as error:
            raise StorageError(
                f"{self.url(rel)}: cannot {doing}: {error}. The server or the network between fails, or the host or "
                "its port is wrong."
            ) from error
        except Exception as error:
            status, code, said = _answer_of(error)
            bucket = self._place()[1].name
            if status in (404, 410) and code in _NO_BUCKET:
                raise DatasetNotFoundError(
                    f"{self.url(rel)}: {bucket} does not exist ({said}). Check its name."
                ) from error
            if status in (404, 410) and doing != "delete":
                if not rel:
                    raise DatasetNotFoundError(f"{self.root}: no such folder. Check the URL.") from error
                self.check_root()  # say what is missing: the folder, or the file in it
                raise ShardMissingError(f"{self.url(rel)}: no such file.") from error
            raise StorageError(f"{self.url(rel)}: cannot {doing}: {said}.{_advice(status, code, bucket)}") from error


_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_WRONG_CREDENTIALS = {
    "AuthenticationFailed",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidAuthenticationInfo",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
}
_WRONG_REGION = {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect"}


def _answer_of(error: Exception) -> tuple[int, str, str]:
    """Return status, code and words of a provider's answer, however its library wraps them."""
    if isinstance(error, Refused):
        return error.status, error.code, str(error)
    response = getattr(error, "response", None)  # botocore
    if isinstance(response, dict):
        code = str(response.get("Error", {}).get("Code", ""))
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)), code, str(error)
    status = getattr(error, "status_code", None) or getattr(error, "code", None)
    code = str(getattr(error, "error_code", None) or "")
    words = f"{type(error).__name__}: {error}".partition("\n")[0]
    return (int(status) if isinstance(status, int) else 0), code, words


def _advice(status: int, code: str, bucket: str) -> str:
    if code == "RequestTimeTooSkewed":
        return " The clock of this machine is wrong."
    if code in _WRONG_REGION or status == 301:
        return f" {bucket[0].upper()}{bucket[1:]} lies in another region: set AWS_REGION, or AWS_ENDPOINT_URL."
    if code in _WRONG_CREDENTIALS or status == 401:
        return " The credentials are wrong or have expired."
    if status == 403:
        return (
            f" The credentials are known, but may not do this in {bucket}, or there are none. (Some providers say so "
            "of files that are missing, too, if you may not list them.)"
        )
    return ""


def _total(body: Body) -> int:
    return body.got if body.total is None else body.total


def _spans(offsets: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    """Return spans (low, high, numbers of the ranges in it) to be read for some ranges, in the order of the file."""
    spans: list[tuple[int, int, list[int]]] = []
    for number in sorted(range(len(offsets)), key=offsets.__getitem__):
        low, high = offsets[number], offsets[number] + lengths[number]
        if low == high:
            continue
        if spans and low - spans[-1][1] <= _GAP:
            first, last, members = spans[-1]
            members.append(number)
            spans[-1] = first, max(last, high), members
        else:
            spans.append((low, high, [number]))
    return spans


_buckets: weakref.WeakValueDictionary[tuple[str, str], Bucket] = weakref.WeakValueDictionary()
_making = threading.Lock()


def _bucket(protocol: str, name: str) -> Bucket:
    """Return the bucket of a name, one per process: its clients and signatures are for all datasets in it."""
    with _making:
        bucket = _buckets.get((protocol, name))
        if bucket is None:
            bucket = _buckets[protocol, name] = _MAKERS[protocol](name)
        return bucket


def _after_fork() -> None:
    global _making, _buckets
    _making, _buckets = threading.Lock(), weakref.WeakValueDictionary()


os.register_at_fork(after_in_child=_after_fork)
