"""Object stores and web servers as a `Store`: ranges are merged into few large requests, sent concurrently.

Invariant: a read returns exactly the bytes requested, of one version of the object, or raises an error that names the
URL, the range, the server's response and the remedy. A store can be pickled and used after a fork: it holds only its
URL, and looks up the client and bucket of the current process and environment.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

from energon_bridge.cloud.buckets import BUCKETS, Bucket, HttpBucket, server_address, store_settings
from energon_bridge.cloud.http import Body, Client, GaveUp, Refused, RequestedPiece, TooShort, WholeFile, shared_client
from energon_bridge.cloud.node_cache import BLOCK, NeededBytes, RemoteBlock, Version, node_cache
from energon_bridge.core.errors import DatasetNotFoundError, EnergonError, ShardMissingError, StorageError
from energon_bridge.core.format.nvmeta import is_prepared
from energon_bridge.core.storage.forks import PerProcess
from energon_bridge.core.storage.ranges import merged
from energon_bridge.core.storage.stalls import Stalls
from energon_bridge.core.storage.store import Rooted, changed_file, short_read

_log = logging.getLogger(__name__)

PIECE = 4 << 20
"""Most bytes of a request; longer ranges are split into concurrent requests."""
_CHANGES = 3
"""How often a cached read starts again because the object changed."""
_LISTED = 64
"""From this many files on, sizes come from a listing, if there is one."""

_Versions = list[Version]  # in the class `list` is a method
_Bytes = list[bytes]


class RemoteStore(Rooted):
    """A folder of a bucket or of a web server; thread-safe, fork-safe and picklable."""

    __slots__ = ("_bucket_name", "_cache", "_expected", "_here", "_prefix", "_protocol", "_stalls", "root")

    def __init__(self, url: str, stalls: Stalls | None = None) -> None:
        self.root = url.rstrip("/")
        self._protocol, _, rest = self.root.partition("://")
        self._bucket_name, _, prefix = rest.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._stalls = Stalls() if stalls is None else stalls
        self._here: PerProcess[dict[tuple[str | None, ...], tuple[Client, Bucket]]] = PerProcess(dict)
        self._cache = node_cache()
        self._expected: dict[str, tuple[int, str]] = {}  # size and version (ETag; empty before the first read) of files

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteStore, (self.root, self._stalls)

    def check_root(self) -> None:
        """Raise DatasetNotFoundError if there is nothing below the root."""
        client, bucket = self._client_and_bucket()
        with self._naming(""):
            try:
                if isinstance(bucket, HttpBucket):
                    client.fetch([RequestedPiece(bucket, self._prefix, 0, 1, True)], self._stalls)
                    return
                if any(True for _ in bucket.list(self._prefix, 1)):
                    return
            except Exception as error:
                status = _provider_answer(error)[0]
                if status in (403, 405):
                    return  # readable does not imply listable; nginx also answers so for folders
                if status not in (404, 410) or not isinstance(error, Refused):
                    raise
        if isinstance(bucket, HttpBucket) and is_prepared(self):
            return  # some answer so for all folders
        raise DatasetNotFoundError(f"{self.root}: no such folder. Check the URL.")

    def size(self, rel: str) -> int:
        return self._size(rel) if self._cache is None else self.sizes([rel])[0]

    def _size(self, rel: str) -> int:
        with self._naming(rel):
            (body,) = self._fetch([self._piece(rel, 0, 1, upto=True)])
        return _total(body)

    def sizes(self, rels: Sequence[str]) -> list[int]:
        if self._cache is not None:
            versions = zip(rels, self._versions(rels), strict=True)
            return [version.size if version.tag else self._size(rel) for rel, version in versions]
        if len(rels) >= _LISTED and not isinstance(self._client_and_bucket()[1], HttpBucket):
            with contextlib.suppress(StorageError):
                listed = dict(self.list())
                return [listed[rel] if rel in listed else self._size(rel) for rel in rels]
        with self._naming(""):
            try:
                return [_total(body) for body in self._fetch([self._piece(rel, 0, 1, upto=True) for rel in rels])]
            except Refused:
                return [self._size(rel) for rel in rels]  # names the one

    def exists(self, rel: str) -> bool:
        if rel and self._cache is not None:
            return self._versions([rel])[0].size >= 0
        with self._naming(rel):
            try:
                return bool(rel) and bool(self._fetch([self._piece(rel, 0, 1, upto=True)]))
            except Refused as refused:
                if refused.status in (404, 410):
                    return False
                raise

    def read(self, rel: str) -> bytes:
        if self._cache is not None:
            (version,) = self._versions([rel], BLOCK)
            cached = self._read_cached([(rel, (0,), (version.size,))]) if version.tag else None
            if cached is not None:
                return bytes(cached[0][0])
        with self._naming(rel):
            (first,) = self._fetch([self._piece(rel, 0, PIECE, upto=True)])
            total = _total(first)
            if first.got >= total:
                return bytes(first.data)
            rest = self._fetch(
                [self._piece(rel, start, min(PIECE, total - start)) for start in range(first.got, total, PIECE)]
            )
        return self._joined(rel, [first, *rest])

    def expect(self, rel: str, size: int, time: int) -> None:
        self._expected.setdefault(rel, (size, ""))

    def _check(self, rel: str, size: int | None, version: str) -> None:
        """Raise CorruptShardError if a file has another size than expected, or another version than was read first."""
        if (expected := self._expected.get(rel)) is None:
            return
        first_size, first = expected
        if size not in (None, first_size):
            raise changed_file(self.url(rel), f"replaced since the run began: {first_size} bytes then, {size} now")
        if version not in ("", first) and first:
            how = f"replaced since it was first read: its version was {first}, now it is {version}"
            raise changed_file(self.url(rel), f"{how} (all servers of a URL must give a file the same ETag)")
        self._expected[rel] = first_size, first or version

    def read_range(self, rel: str, offset: int, length: int) -> bytes:
        return bytes(self.read_ranges(rel, (offset,), (length,))[0])

    def read_ranges(self, rel: str, offsets: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
        return self.read_all([(rel, offsets, lengths)])[0]

    def read_all(self, wanted: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> list[list[bytes]]:
        """Read ranges of several files at once: for each file its name, offsets and lengths."""
        cached = None if self._cache is None else self._read_cached(wanted)
        return self._read_all(wanted) if cached is None else cached

    def _read_all(self, wanted: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> list[list[bytes]]:
        reads = [merged(offsets, lengths) for _, offsets, lengths in wanted]
        bucket = self._client_and_bucket()[1]
        pieces = [
            RequestedPiece(bucket, self._prefix + rel, start, min(PIECE, high - start), False)
            for (rel, _, _), here in zip(wanted, reads, strict=True)
            for low, high, _ in here
            for start in range(low, high, PIECE)
        ]
        try:
            bodies = iter(self._fetch(pieces))
        except (EnergonError, MemoryError):
            raise
        except Exception as error:
            if len(wanted) > 1:  # one by one, so that the error names the file
                return [self._read_all([one])[0] for one in wanted]
            ((rel, offsets, lengths),) = wanted
            self._raise(rel, offsets, lengths, error)
        out = []
        for (rel, offsets, lengths), here in zip(wanted, reads, strict=True):
            blocks: list[Any] = [b""] * len(offsets)
            for low, high, members in here:
                parts = [next(bodies) for _ in range(low, high, PIECE)]
                for part in parts:
                    self._check(rel, part.total, part.version)
                if len(parts) == 1 and len(members) == 1:
                    blocks[members[0]] = parts[0].data
                    continue
                data = memoryview(parts[0].data if len(parts) == 1 else self._joined(rel, parts))
                for member in members:
                    start = offsets[member] - low
                    blocks[member] = data[start : start + lengths[member]]
            out.append(blocks)
        return out

    # The cache of the node --------------------------------------------------------------------------------------------

    def _forget(self, rel: str) -> None:
        if self._cache is not None:
            self._cache.forget(self._cached_url(rel))

    def _cached_url(self, rel: str) -> str:
        """Return the URL that names a file in the cache, with its server if the environment sets one."""
        server = server_address(self._protocol)
        return f"{server} {self.url(rel)}" if server else self.url(rel)

    def _versions(self, rels: Sequence[str], first: int = 1) -> list[Version]:
        """Return the versions of files; unknown ones are requested, along with their first `first` bytes."""
        assert self._cache is not None
        cache = self._cache
        urls = [self._cached_url(rel) for rel in rels]

        def ask(numbers: list[int]) -> list[Version]:
            try:
                bodies = self._fetch([self._piece(rels[number], 0, first, upto=True) for number in numbers])
            except Refused as refused:
                if len(numbers) > 1:
                    return [ask([number])[0] for number in numbers]
                if refused.status not in (404, 410):
                    raise
                return [Version(urls[numbers[0]], "", -1)]
            versions: _Versions = []
            for number, body in zip(numbers, bodies, strict=True):
                version = Version(urls[number], body.version if body.total else "", _total(body))
                versions.append(version)
                if version.tag and body.got == version.length(0):
                    cache.put((version, 0), bytes(body.data))
            return versions

        with self._naming(rels[0] if len(rels) == 1 else ""):
            return cache.versions(urls, ask)

    def _read_cached(self, wanted: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> list[list[bytes]] | None:
        """Read ranges through the cache; None if that fails, or if the server must report the error."""
        assert self._cache is not None
        rels = [rel for rel, _, _ in wanted]
        for _ in range(_CHANGES):
            versions = self._versions(rels)
            for rel, version in zip(rels, versions, strict=True):
                if version.tag:
                    self._check(rel, version.size, version.tag)
            names = {version.url: rel for version, rel in zip(versions, rels, strict=True)}
            needed: dict[RemoteBlock, list[NeededBytes]] = {}
            for version, (_, offsets, lengths) in zip(versions, wanted, strict=True):
                for offset, length in zip(offsets, lengths, strict=True):
                    if not version.tag or offset < 0 or length < 0 or offset + length > version.size:
                        self._cache.forget(version.url)
                        return None
                    for n in range(offset // BLOCK, -(-(offset + length) // BLOCK) if length else 0):
                        bounds = max(0, offset - n * BLOCK), min(BLOCK, offset + length - n * BLOCK)
                        needed.setdefault((version, n), []).append(bounds)
            try:
                with self._naming(rels[0] if len(rels) == 1 else ""):
                    ordered = {block: needed[block] for block in sorted(needed, key=_where)}
                    blocks = self._cache.blocks(ordered, partial(self._blocks, names=names))
            except _Changed as changed:
                self._cache.forget(changed.url)
                continue
            except StorageError as error:
                if isinstance(error.__cause__, Refused | TooShort):
                    return None
                raise
            return [
                [_cut(blocks, version, *bounds) for bounds in zip(offsets, lengths, strict=True)]
                for version, (_, offsets, lengths) in zip(versions, wanted, strict=True)
            ]
        return None

    def _blocks(self, wanted: Sequence[RemoteBlock], names: dict[str, str]) -> list[bytes]:
        """Fetch blocks; adjacent blocks share a request."""
        runs: list[list[RemoteBlock]] = []
        for version, block in wanted:
            if runs and runs[-1][-1] == (version, block - 1) and len(runs[-1]) < PIECE // BLOCK:
                runs[-1].append((version, block))
            else:
                runs.append([(version, block)])
        bodies = self._fetch(
            [
                self._piece(names[run[0][0].url], run[0][1] * BLOCK, sum(one.length(block) for one, block in run))
                for run in runs
            ]
        )
        contents: _Bytes = []
        for run, body in zip(runs, bodies, strict=True):
            version = run[0][0]
            if body.version != version.tag or body.total not in (None, version.size):
                raise _Changed(version.url)
            data = memoryview(body.data)
            low = run[0][1]
            contents.extend(bytes(data[(n - low) * BLOCK : (n - low) * BLOCK + version.length(n)]) for _, n in run)
        return contents

    # Listing and writing ---------------------------------------------------------------------------------------------

    def list(self, suffix: str | tuple[str, ...] = "") -> list[tuple[str, int]]:
        start = len(self._prefix)
        with self._naming(""):
            files = [(key[start:], size) for key, size, _ in self._client_and_bucket()[1].list(self._prefix)]
        if not files:
            self.check_root()
        return sorted((name, size) for name, size in files if name.endswith(suffix) and not name.endswith("/"))

    def versions(self, most: int) -> dict[str, tuple[int, str]] | None:
        """Return bytes and ETag of all files below the root by one listing, None if there are more than `most`.

        Also None for web servers, for buckets that may not be listed, and for listings without ETags.
        """
        start = len(self._prefix)
        bucket = self._client_and_bucket()[1]
        try:
            files = {key[start:]: (size, tag) for key, size, tag in bucket.list(self._prefix, most + 1)}
        except Exception as error:
            _log.info("%s cannot be listed: %s", self.root, error)
            return None
        return files if len(files) <= most and all(tag for _, tag in files.values()) else None

    def write(self, rel: str, data: bytes) -> None:
        """Write `rel` as a whole: readers see the old content or the new, never a part."""
        with self._naming(rel, f"write {len(data)} bytes"):
            self._client_and_bucket()[1].put(self._prefix + rel, data)
        self._forget(rel)

    def put_file(self, path: str, rel: str) -> None:
        """Write a local file to `rel`, replacing any file there as a whole."""
        with self._naming(rel, "write"):
            self._client_and_bucket()[1].put_file(self._prefix + rel, path)
        self._forget(rel)

    def delete(self, rel: str) -> None:
        with self._naming(rel, "delete"):
            self._client_and_bucket()[1].delete(self._prefix + rel)
        self._forget(rel)

    # Requests --------------------------------------------------------------------------------------------------------

    def _client_and_bucket(self) -> tuple[Client, Bucket]:
        """Return the client of this process, and the bucket under the settings that the environment has now."""
        here = self._here()
        settings = store_settings(self._protocol)
        pair = here.get(settings)
        if pair is None:
            here.clear()
            pair = here[settings] = shared_client(), _bucket(self._protocol, self._bucket_name, settings)
        return pair

    def _piece(self, rel: str, start: int, length: int, *, upto: bool = False) -> RequestedPiece:
        return RequestedPiece(self._client_and_bucket()[1], self._prefix + rel, start, length, upto)

    def _fetch(self, pieces: Sequence[RequestedPiece]) -> Sequence[Body]:
        return self._client_and_bucket()[0].fetch(pieces, self._stalls) if pieces else []

    def _joined(self, rel: str, parts: Sequence[Body]) -> bytes:
        if len({part.version for part in parts}) > 1:
            raise StorageError(f"{self.url(rel)}: changed while it was read. Do not replace files that a run reads.")
        return b"".join([part.data for part in parts])

    # Errors ----------------------------------------------------------------------------------------------------------

    def _raise(self, rel: str, offsets: Sequence[int], lengths: Sequence[int], error: Exception) -> NoReturn:
        """Raise an error that names the first range that it is about."""
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
        """Turn the errors of clients and libraries into ours, with URL, response and remedy."""
        try:
            yield
        except (EnergonError, ImportError, MemoryError):
            raise
        except GaveUp as error:
            raise StorageError(
                f"{self.url(rel)}: cannot {doing}: {error}. Check the host and port, and that server and "
                f"network are up.{_endpoint_advice(str(error))}"
            ) from error
        except Exception as error:
            status, code, said = _provider_answer(error)
            bucket = self._client_and_bucket()[1].name
            if status in (404, 410) and code in _NO_BUCKET:
                raise DatasetNotFoundError(
                    f"{self.url(rel)}: {bucket} does not exist ({said}). Check its name."
                ) from error
            if status == 404 and code == "ResourceNotFound":  # Azure's response without credentials
                raise DatasetNotFoundError(
                    f"{self.url(rel)}: {bucket} does not exist, or needs credentials ({said})."
                ) from error
            if status in (404, 410) and doing != "delete":
                if not rel:
                    raise DatasetNotFoundError(f"{self.root}: no such folder. Check the URL.") from error
                self.check_root()  # tell a missing folder from a missing file
                raise ShardMissingError(f"{self.url(rel)}: no such file.") from error
            said = said.rstrip(".")  # some end their messages themselves
            raise StorageError(
                f"{self.url(rel)}: cannot {doing}: {said}.{_advice(status, code, bucket)}{_endpoint_advice(said)}"
            ) from error


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


def _provider_answer(error: Exception) -> tuple[int, str, str]:
    """Return status, code and message of a provider's response, from whichever library."""
    if isinstance(error, Refused):
        return error.status, error.code, str(error)
    response = getattr(error, "response", None)  # botocore
    if isinstance(response, dict):
        code = str(response.get("Error", {}).get("Code", ""))
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)), code, str(error)
    status = getattr(error, "status_code", None) or getattr(error, "code", None)
    code = getattr(error, "error_code", None) or ""  # azure-core, whose codes are members of an enumeration
    code = str(getattr(code, "value", code))
    words = f"{type(error).__name__}: {error}".partition("\n")[0]
    return (int(status) if isinstance(status, int) else 0), code, words


def _endpoint_advice(said: str) -> str:
    """Return what to do about the address of a server that speaks S3, if a failure is about that."""
    if "Invalid endpoint" in said:
        return " AWS_ENDPOINT_URL must begin with http:// or https://, such as http://HOST:PORT."
    if "onnect to" in said and "amazonaws.com" in said:  # our words, and botocore's
        return " This is Amazon's server: for another one that speaks S3, set AWS_ENDPOINT_URL to http://HOST:PORT."
    return ""


def _advice(status: int, code: str, bucket: str) -> str:
    if code == "RequestTimeTooSkewed":
        return " The clock of this machine is wrong: set it."
    if code in _WRONG_REGION or status == 301:
        return f" {bucket[0].upper()}{bucket[1:]} is in another region: set AWS_REGION or AWS_ENDPOINT_URL."
    if code in _WRONG_CREDENTIALS or status == 401:
        return " The credentials are wrong or have expired: renew them."
    if status == 403 or code == "PublicAccessNotPermitted":
        return (
            f" The credentials lack the permission for this in {bucket}, or there are none. (If you may not list "
            "files, some providers answer the same for a missing file.)"
        )
    return ""


class _Changed(EnergonError):  # noqa: N818 - the read starts again
    """The object at a URL has a new version."""

    def __init__(self, url: str) -> None:
        super().__init__(f"{url}: changed while it was read")
        self.url = url


def _where(block: RemoteBlock) -> tuple[str, int]:
    return block[0].url, block[1]


def _cut(blocks: dict[RemoteBlock, memoryview], version: Version, offset: int, length: int) -> Any:
    """Return a range from the blocks that contain it."""
    if not length:
        return b""
    first = offset // BLOCK
    last = (offset + length - 1) // BLOCK
    at = offset - first * BLOCK
    if first == last:
        return blocks[version, first][at : at + length]
    return b"".join(blocks[version, number] for number in range(first, last + 1))[at : at + length]


def _total(body: Body) -> int:
    return body.got if body.total is None else body.total


class _Buckets:
    """The buckets in use in this process, by protocol, name and settings; one that nothing refers to is forgotten."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.in_use: weakref.WeakValueDictionary[tuple[str, str, tuple[str | None, ...]], Bucket]
        self.in_use = weakref.WeakValueDictionary()


_buckets = PerProcess(_Buckets)


def _bucket(protocol: str, name: str, settings: tuple[str | None, ...]) -> Bucket:
    """Return the bucket of a name and settings, one object per process: all its datasets share clients and
    signatures."""
    buckets = _buckets()
    with buckets.lock:
        bucket = buckets.in_use.get((protocol, name, settings))
        if bucket is None:
            bucket = buckets.in_use[protocol, name, settings] = BUCKETS[protocol](name)
        return bucket
