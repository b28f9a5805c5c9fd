"""A store over any file system of fsspec, for the schemes of URLs that no other store has (`memory://` in tests).

Invariant: the file system object belongs to one process. After a fork or in a spawned process it is made again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import fsspec

from energon_bridge.core.errors import (
    ConfigurationError,
    DatasetNotFoundError,
    EnergonError,
    ShardMissingError,
    ShortReadError,
    StorageError,
)
from energon_bridge.core.storage.forks import PerProcess
from energon_bridge.core.storage.ranges import merged
from energon_bridge.core.storage.stalls import Stalls
from energon_bridge.core.storage.store import Rooted, short_read

_LARGE = 64 << 20
"""Ranges from this size on are first compared with the file's size: a damaged index may claim any."""


class FsspecStore(Rooted):
    """A folder in an fsspec file system; fork-safe and picklable."""

    def __init__(self, url: str, stalls: Stalls | None = None) -> None:
        self.root = url.rstrip("/")
        self._stalls = Stalls() if stalls is None else stalls
        self._opened = PerProcess(functools.partial(_opened, self.root))
        self._opened()
        # of the hub's file system, which reads 5 MiB more along
        self._exactly = {"cache_type": "none"} if url.startswith("hf://") else {}

    def __reduce__(self) -> tuple[Any, ...]:
        return FsspecStore, (self.root, self._stalls)

    def check_root(self) -> None:
        fs, path = self._locate("")
        with self._naming(""):
            if fs.isdir(path):
                return
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                fs.info(path)  # `isdir` also returns False if the server is unreachable
        raise DatasetNotFoundError(f"{self.root}: no such folder. Check the URL.")

    def size(self, rel: str) -> int:
        fs, path = self._locate(rel)
        with self._naming(rel):
            return int(self._stalls.run(lambda: fs.size(path), lambda: self.url(rel)))

    def exists(self, rel: str) -> bool:
        fs, path = self._locate(rel)
        with self._naming(rel):
            return bool(fs.isfile(path))

    def read(self, rel: str) -> bytes:
        fs, path = self._locate(rel)
        with self._naming(rel):
            return bytes(self._stalls.run(lambda: fs.cat_file(path), lambda: self.url(rel)))

    def read_range(self, rel: str, offset: int, length: int) -> bytes:
        fs, path = self._locate(rel)
        with self._naming(rel):
            if length > _LARGE and length > (left := max(0, int(fs.size(path)) - offset)):
                raise short_read(self.url(rel), offset=offset, expected=length, got=left)
            data = bytes(
                self._stalls.run(
                    lambda: fs.cat_file(path, start=offset, end=offset + length, **self._exactly),
                    lambda: f"{self.url(rel)}: {length} bytes at offset {offset}",
                )
            )
        if len(data) != length:
            raise short_read(self.url(rel), offset=offset, expected=length, got=len(data))
        return data

    def read_ranges(self, rel: str, offsets: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
        blocks = [b""] * len(offsets)
        for low, high, members in merged(offsets, lengths):
            try:
                data = self.read_range(rel, low, high - low)
            except ShortReadError:
                for member in members if len(members) > 1 else ():  # the error names the range that is cut short
                    self.read_range(rel, offsets[member], lengths[member])
                raise
            for member in members:
                blocks[member] = data[offsets[member] - low : offsets[member] - low + lengths[member]]
        return blocks

    def list(self, suffix: str | tuple[str, ...] = "") -> list[tuple[str, int]]:
        fs, path = self._locate("")
        with self._naming(""):
            files = fs.find(path, detail=True)
        if not files:
            self.check_root()
        start = len(path.rstrip("/")) + 1
        return sorted((name[start:], int(entry["size"])) for name, entry in files.items() if name.endswith(suffix))

    def write(self, rel: str, data: bytes) -> None:
        fs, path = self._locate(rel)
        with self._naming(rel, f"write {len(data)} bytes"):
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            fs.pipe_file(path, data)

    def put_file(self, path: str, rel: str) -> None:
        """Write a local file to `rel`."""
        fs, target = self._locate(rel)
        with self._naming(rel, "write"):
            fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            fs.put_file(path, target)

    def delete(self, rel: str) -> None:
        fs, path = self._locate(rel)
        with self._naming(rel, "delete"):
            if fs.isfile(path):
                fs.rm_file(path)

    def _locate(self, rel: str) -> tuple[Any, str]:
        fs, base = self._opened()
        return fs, f"{base.rstrip('/')}/{rel}" if rel else base

    @contextlib.contextmanager
    def _naming(self, rel: str, doing: str = "read") -> Iterator[None]:
        """Turn the errors of a file system (OSError, aiohttp's, the hub's) into ours, which name the URL."""
        try:
            yield
        except (EnergonError, ImportError, MemoryError):
            raise
        except (FileNotFoundError, NotADirectoryError) as error:
            if doing != "read":
                raise StorageError(f"{self.url(rel)}: cannot {doing}: {error}") from error
            if rel:  # tell a missing folder from a missing file
                self.check_root()
                raise ShardMissingError(f"{self.url(rel)}: no such file.") from error
            raise DatasetNotFoundError(f"{self.root}: no such folder. Check the URL.") from error
        except Exception as error:
            kind = "" if isinstance(error, OSError) and str(error) else f"{type(error).__name__}: "
            raise StorageError(f"{self.url(rel)}: cannot {doing}: {kind}{error}") from error


def _opened(root: str) -> tuple[Any, str]:
    try:
        fs, base = fsspec.core.url_to_fs(root)
    except (ValueError, ImportError) as error:
        raise ConfigurationError(f"{root}: no storage backend for this kind of URL: {error}") from error
    except Exception as error:  # file systems may check the URL, and define their own errors
        raise StorageError(f"{root}: cannot open: {type(error).__name__}: {error}") from error
    return fs, base
