"""`EPath`: a path or URL as megatron-energon's scripts use it, by fsspec.

Local paths are absolute and without `..`; URLs keep their protocol (`s3://bucket/key`). Methods raise what fsspec
raises, such as FileNotFoundError.
"""

from __future__ import annotations

import glob
import os
import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self

import fsspec

from energon_bridge.compat.refused import not_provided
from energon_bridge.errors import ConfigurationError

DEFAULT_PROFILE_NAME = "default"
_OTHER_PROTOCOLS = ("msc", "rclone", "dss")


class EPath(os.PathLike[str]):
    """An absolute path or URL.

    Args:
        initial_path: A path, a URL, or another EPath.
    """

    __slots__ = ("_path", "_protocol")

    def __init__(self, initial_path: str | os.PathLike[str]) -> None:
        text = os.fspath(initial_path)
        protocol, separator, rest = text.partition("://")
        if protocol in _OTHER_PROTOCOLS and separator:
            raise not_provided(
                f"EPath({text!r})", "use the URL that fsspec knows the storage by, such as s3:// or gs://"
            )
        self._protocol = protocol if separator and protocol != "file" else ""
        path = (rest if separator else text) if self._protocol else os.path.abspath(rest if separator else text)
        self._path = posixpath.normpath(path)

    def _other(self, path: str) -> Self:
        return type(self)(f"{self._protocol}://{path}" if self._protocol else path)

    def _fs(self) -> Any:
        return fsspec.filesystem(self._protocol or "file")

    @property
    def name(self) -> str:
        """The last part."""
        return posixpath.basename(self._path)

    @property
    def parent(self) -> Self:
        """The folder it is in."""
        return self._other(posixpath.dirname(self._path) or self._path)

    @property
    def url(self) -> str:
        """The path, or the URL."""
        return f"{self._protocol}://{self._path}" if self._protocol else self._path

    @property
    def display_name(self) -> str:
        """The path for people."""
        return self.url

    def is_local(self) -> bool:
        """Whether it is a path of this machine."""
        return not self._protocol

    def local_path(self) -> Path:
        """Return the path of this machine; raises ConfigurationError for a URL."""
        if self._protocol:
            raise ConfigurationError(f"{self.url}: not a path of this machine")
        return Path(self._path)

    def is_dir(self) -> bool:
        """Whether there is a folder."""
        return bool(self._fs().isdir(self._path))

    def is_file(self) -> bool:
        """Whether there is a file."""
        return bool(self._fs().isfile(self._path))

    def mkdir(self, exist_ok: bool = True, parents: bool = False) -> None:
        """Make the folder, where the storage has folders."""
        if not exist_ok and self.is_dir():
            raise FileExistsError(self.url)
        if parents or not self.is_dir():
            self._fs().makedirs(self._path, exist_ok=True)

    def open(self, mode: str = "r", **kwargs: Any) -> IO[Any]:
        """Open the file."""
        opened: IO[Any] = self._fs().open(self._path, mode, **kwargs)
        return opened

    def read_text(self) -> str:
        """Return the file as text (UTF-8)."""
        return self.read_bytes().decode()

    def read_bytes(self) -> bytes:
        """Return the bytes of the file."""
        return bytes(self._fs().cat_file(self._path))

    def write_text(self, text: str) -> None:
        """Write text (UTF-8) as the file."""
        self.write_bytes(text.encode())

    def write_bytes(self, data: bytes) -> None:
        """Write bytes as the file."""
        if not self._protocol:
            os.makedirs(posixpath.dirname(self._path), exist_ok=True)
        self._fs().pipe_file(self._path, data)

    def copy(self, target: EPath) -> None:
        """Copy the file to another path, on any storage."""
        target.write_bytes(self.read_bytes())

    def move(self, target: EPath) -> None:
        """Move the file to another path."""
        self.copy(target)
        self.unlink()

    def unlink(self) -> None:
        """Delete the file."""
        self._fs().rm_file(self._path)

    def size(self) -> int:
        """Return the bytes of the file."""
        return int(self._fs().size(self._path))

    def walk(self) -> Iterator[Self]:
        """Yield all files below the folder, sorted; links to folders of this machine are followed."""
        if not self._protocol:
            found = [os.path.join(at, file) for at, _, files in os.walk(self._path, followlinks=True) for file in files]
            yield from map(self._other, sorted(found))
            return
        for path in sorted(self._fs().find(self._path)):
            yield self._other(path)

    def glob(self, pattern: str) -> Iterator[Self]:
        """Yield the files that match a pattern below the folder, sorted."""
        if not self._protocol:
            found = glob.glob(os.path.join(glob.escape(self._path), pattern), recursive=True)
            yield from map(self._other, sorted(filter(os.path.isfile, found)))
            return
        for path in sorted(self._fs().glob(posixpath.join(self._path, pattern))):
            yield self._other(path)

    def with_suffix(self, suffix: str) -> Self:
        """Return the path with another suffix."""
        return self._other(posixpath.splitext(self._path)[0] + suffix)

    def relative_to(self, other: EPath) -> str:
        """Return the path below another one; raises ConfigurationError if it is not."""
        if self._protocol != other._protocol or not f"{self._path}/".startswith(f"{other._path}/"):
            raise ConfigurationError(f"{self.url} is not below {other.url}")
        return posixpath.relpath(self._path, other._path)

    def __truediv__(self, other: str | os.PathLike[str]) -> Self:
        text = os.fspath(other)
        if "://" in text:
            return type(self)(text)
        return self._other(posixpath.join(self._path, text))

    def __fspath__(self) -> str:
        return self.url

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"EPath({self.url!r})"

    def __hash__(self) -> int:
        return hash(self.url)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EPath) and self.url == other.url

    def __lt__(self, other: EPath) -> bool:
        return self.url < other.url
