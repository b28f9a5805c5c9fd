"""`EPath`: megatron-energon's class for paths and URLs, on fsspec.

Local paths are absolute and without `..`; URLs keep their protocol (`s3://bucket/key`, `msc://profile/bucket/key`).
`dss://NAME@VERSION/path` keeps its name, and its files are in `$NVDATASET_CACHE_DIR/NAME/VERSION`. Methods raise what
fsspec raises, such as FileNotFoundError.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import posixpath
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Self

import fsspec

from energon_bridge.core.errors import ConfigurationError, MetadataError
from energon_bridge.core.mix.paths import resolve_path

DEFAULT_PROFILE_NAME = "__filesystem__"
"""The profile of multi-storage-client that is this machine's file system."""
_LOCAL_PROFILES = (DEFAULT_PROFILE_NAME, "default")


@dataclass(frozen=True, slots=True)
class FileStat:
    """Metadata of a file.

    Attributes:
        content_length: Size in bytes.
        last_modified: Time of the last change.
    """

    content_length: int
    last_modified: datetime


class NoVersionError(MetadataError, AssertionError):
    """A `dss://` path without a version; programs expect the second class."""


class EPath(os.PathLike[str]):
    """An absolute path or URL.

    Args:
        initial_path: A path, a URL, or another EPath.
    """

    __slots__ = ("_path", "_protocol")

    def __init__(self, initial_path: str | os.PathLike[str]) -> None:
        text = os.fspath(initial_path)
        protocol, separator, rest = text.partition("://")
        if not separator or protocol == "file":
            self._protocol = ""
            self._path = posixpath.normpath(os.path.abspath(rest if separator else text))
            return
        if protocol == "dss":
            if "@" not in rest.partition("/")[0]:
                raise NoVersionError(
                    f"{text}: expected dss://NAME@VERSION/path: DSS paths must include a dataset version separated "
                    "by '@'"
                )
            resolve_path(text, base="/", where="EPath")  # raises without the folder
            self._protocol = protocol
            self._path = posixpath.normpath(rest)
            return
        if protocol == "rclone":
            warnings.warn("rclone:// is deprecated: use its new name, msc://", DeprecationWarning, stacklevel=2)
        self._protocol, _, self._path = resolve_path(text, base="/", where="EPath").partition("://")
        profile, _, inside = self._path.partition("/")
        if self._protocol == "msc" and profile in _LOCAL_PROFILES:
            self._protocol = ""
            self._path = f"/{inside}"

    def _other(self, path: str) -> Self:
        return type(self)(f"{self._protocol}://{path}" if self._protocol else path)

    @property
    def _is_dss(self) -> bool:
        return self._protocol == "dss"

    @property
    def _here(self) -> str:
        """The path in the form its file system expects."""
        return resolve_path(self.url, base="/", where="EPath") if self._is_dss else self._path

    def _fs(self) -> Any:
        if self._protocol == "msc" and importlib.util.find_spec("multistorageclient") is None:
            raise ConfigurationError(f"{self.url}: needs multi-storage-client: pip install 'energon-bridge[msc]'")
        return fsspec.filesystem("file" if self.is_local() else self._protocol)

    @property
    def name(self) -> str:
        """The last component."""
        return posixpath.basename(self._path)

    @property
    def parent(self) -> Self:
        """The parent folder."""
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
        """Whether it is a local path."""
        return not self._protocol or self._is_dss

    def local_path(self) -> Path:
        """Return the local path; raises ConfigurationError for a URL."""
        if not self.is_local():
            raise ConfigurationError(f"{self.url}: not a local path")
        return Path(self._here)

    def is_dir(self) -> bool:
        """Whether it is an existing folder."""
        return bool(self._fs().isdir(self._here))

    def is_file(self) -> bool:
        """Whether it is an existing file."""
        return bool(self._fs().isfile(self._here))

    def mkdir(self, exist_ok: bool = True, parents: bool = False) -> None:
        """Create the folder, if the storage has folders."""
        if not exist_ok and self.is_dir():
            raise FileExistsError(self.url)
        if parents or not self.is_dir():
            self._fs().makedirs(self._here, exist_ok=True)

    def open(self, mode: str = "r", **kwargs: Any) -> IO[Any]:
        """Open the file."""
        opened: IO[Any] = self._fs().open(self._here, mode, **kwargs)
        return opened

    def read_text(self) -> str:
        """Return the file as text (UTF-8)."""
        return self.read_bytes().decode()

    def read_bytes(self) -> bytes:
        """Return the bytes of the file."""
        return bytes(self._fs().cat_file(self._here))

    def write_text(self, text: str) -> None:
        """Write text (UTF-8) as the file."""
        self.write_bytes(text.encode())

    def write_bytes(self, data: bytes) -> None:
        """Write bytes as the file."""
        if self.is_local():
            os.makedirs(posixpath.dirname(self._here), exist_ok=True)
        self._fs().pipe_file(self._here, data)

    def copy(self, target: EPath) -> None:
        """Copy the file to another path, on any storage."""
        target.write_bytes(self.read_bytes())

    def move(self, target: EPath) -> None:
        """Move the file to another path."""
        self.copy(target)
        self.unlink()

    def unlink(self) -> None:
        """Delete the file."""
        self._fs().rm_file(self._here)

    def size(self) -> int:
        """Return the size of the file in bytes."""
        return int(self._fs().size(self._here))

    def stat(self) -> FileStat:
        """Return size and time of the file."""
        info = self._fs().info(self._here)
        written = info.get("mtime", info.get("last_modified", info.get("LastModified")))
        if not isinstance(written, datetime):
            written = datetime.fromtimestamp(written, UTC) if written is not None else self._fs().modified(self._here)
        return FileStat(int(info["size"]), written)

    def walk(self) -> Iterator[Self]:
        """Yield all files below the folder, sorted; local links to folders are followed."""
        if self.is_local():
            here = self._here
            paths = [os.path.join(at, file) for at, _, files in os.walk(here, followlinks=True) for file in files]
            yield from self._below(paths)
            return
        for path in sorted(self._fs().find(self._here)):
            yield self._other(path)

    def glob(self, pattern: str) -> Iterator[Self]:
        """Yield the files that match a pattern below the folder, sorted."""
        if self.is_local():
            files = glob.glob(os.path.join(glob.escape(self._here), pattern), recursive=True)
            yield from self._below(filter(os.path.isfile, files))
            return
        for path in sorted(self._fs().glob(posixpath.join(self._here, pattern))):
            yield self._other(path)

    def _below(self, paths: Iterable[str]) -> Iterator[Self]:
        """Yield local files below this folder."""
        here = self._here
        for path in sorted(paths):
            yield self / os.path.relpath(path, here)

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


NVDATASET_CACHE_DIR = EPath(os.environ["NVDATASET_CACHE_DIR"]) if os.environ.get("NVDATASET_CACHE_DIR") else None
"""The folder of `dss://` at import time; paths read the environment variable each time."""
