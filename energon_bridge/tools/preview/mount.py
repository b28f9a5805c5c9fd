"""A prepared WebDataset as a read-only folder tree, by FUSE: nothing is unpacked or copied.

    train/shard_000.tar/cat.jpg        the parts of a sample beside each other
    train/shard_000.tar/cat/jpg        or a folder for each sample

Shards are folders, and keys with slashes are folders in them. The headers of a shard are read when somebody looks into
it; contents are read by ranges, from disk or a bucket. Names that no file system has (`..`, empty ones) are written
with percent signs, and a name that occurs twice gets `~2`: what is in a tar cannot lead out of the tree.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from energon_bridge.core.errors import ConfigurationError, EnergonError
from energon_bridge.core.format.nvmeta import read_info
from energon_bridge.core.format.tar_index import scan_tar
from energon_bridge.core.storage import Store

_CACHED_SHARDS = 32
"""Shards whose parts are remembered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MountedPart:
    """A file of the tree: a range of bytes of a shard."""

    shard: str
    offset: int
    size: int


Folder: TypeAlias = "dict[str, Folder | MountedPart]"


class DatasetTree:
    """The folders and files of a dataset, by path.

    Args:
        store: The dataset's folder.
        sample_folders: Give each sample a folder, with files named by their parts.

    Raises:
        NotPreparedError: The folder is no prepared dataset.
    """

    def __init__(self, store: Store, *, sample_folders: bool = False) -> None:
        self._store = store
        self._sample_folders = sample_folders
        self._lock = threading.Lock()
        self._scanned: OrderedDict[str, Folder] = OrderedDict()
        self._top: dict[str, Any] = {}
        for shard in read_info(store).shard_counts:
            *folders, name = _names(shard)
            inner = self._top
            for folder in folders:
                inner = inner.setdefault(folder, {})
            inner[name] = shard  # a folder that is read when somebody looks into it

    def find(self, path: str) -> Folder | MountedPart | None:
        """Return the folder or file at a path such as `/train/0.tar/cat.jpg`; None if there is nothing.

        Raises:
            EnergonError: A shard on the way cannot be read.
        """
        node: Any = self._top
        for name in path.split("/"):
            if not name:
                continue
            if not isinstance(node, dict) or name not in node:
                return None
            node = node[name]
            if isinstance(node, str):
                node = self._parts_of(node)
        return node

    def is_shard(self, path: str) -> bool:
        """Whether a path is that of a shard; reads nothing."""
        node: Any = self._top
        for name in filter(None, path.split("/")):
            node = node.get(name) if isinstance(node, dict) else None
        return isinstance(node, str)

    def read(self, part: MountedPart, offset: int, length: int) -> bytes:
        """Return at most `length` bytes of a file from an offset on."""
        length = max(0, min(length, part.size - offset))
        return self._store.read_range(part.shard, part.offset + offset, length) if length else b""

    def _parts_of(self, shard: str) -> Folder:
        with self._lock:
            folder = self._scanned.get(shard)
            if folder is None:
                folder = self._scanned[shard] = self._scan(shard)
                if len(self._scanned) > _CACHED_SHARDS:
                    self._scanned.popitem(last=False)
            self._scanned.move_to_end(shard)
            return folder

    def _scan(self, shard: str) -> Folder:
        scan = scan_tar(self._store, shard)
        root: Folder = {}
        for sample, name, offset, size in zip(
            scan.part_samples, scan.part_names, scan.part_offsets, scan.part_sizes, strict=True
        ):
            key = scan.keys[sample]
            full = f"{key}/{name.replace('/', '%2F')}" if self._sample_folders else f"{key}.{name}"
            *folders, last = _names(full)
            inner = root
            for folder in folders:
                inner = _folder_in(inner, folder)
            inner[_free(inner, last)] = MountedPart(shard=shard, offset=offset, size=size)
        return root


def _names(path: str) -> list[str]:
    """Return the names on a path, none of which leads anywhere else."""
    return [_SAFE.get(name, name).replace("\0", "%00") for name in path.split("/")]


_SAFE = {"": "%", ".": "%2E", "..": "%2E%2E"}


def _folder_in(folder: Folder, name: str) -> Folder:
    """Return the folder of a name, made if it is not there; a file that has the name keeps it."""
    node = folder.get(name)
    if isinstance(node, MountedPart):
        name = f"{name}~2"
        node = folder.get(name)
    if node is None:
        made: Folder = {}
        folder[name] = made
        return made
    return _folder_in(folder, name) if isinstance(node, MountedPart) else node


def _free(folder: Folder, name: str) -> str:
    """Return a name that nothing in the folder has."""
    names = (name, *(f"{name}~{number}" for number in range(2, len(folder) + 2)))
    return next(free for free in names if free not in folder)


def mount(tree: DatasetTree, mountpoint: Path, *, detach: bool = False) -> None:
    """Show a tree at a folder, until it is unmounted (Ctrl-C, or `fusermount3 -u`).

    Args:
        tree: What to show.
        mountpoint: An empty folder.
        detach: Go on in the background.

    Raises:
        ConfigurationError: mfusepy or the system's FUSE is missing, or the folder cannot be mounted on.
    """
    try:
        import mfusepy
    except (ImportError, OSError) as error:  # OSError: it looks for the system's library
        raise ConfigurationError(
            "`energon mount` needs mfusepy (pip install energon-bridge[mount]) and the system's FUSE (apt-get install "
            f"fuse3): {error}"
        ) from error
    if not mountpoint.is_dir() or any(mountpoint.iterdir()):
        raise ConfigurationError(f"{mountpoint}: not an empty folder. Make one to mount at")
    files = _operations(tree, mfusepy)
    try:
        mfusepy.FUSE(files, str(mountpoint), foreground=not detach, ro=True, fsname="energon")
    except RuntimeError as error:
        if files.mounted:  # Ctrl-C has ended it
            return
        raise ConfigurationError(
            f"{mountpoint}: cannot mount the dataset here: see the message of FUSE above. A container needs "
            "/dev/fuse (docker run --device /dev/fuse --cap-add SYS_ADMIN)"
        ) from error


def _operations(tree: DatasetTree, mfusepy: Any) -> Any:
    """Return the answers of a tree to what the kernel asks."""
    began = time.time_ns()

    def failing(code: int) -> OSError:
        error: OSError = mfusepy.FuseOSError(code)
        return error

    class Files(mfusepy.Operations):
        """The file operations that the kernel asks for, by FUSE's names."""

        use_ns = True
        mounted = False

        def init(self, path: str) -> None:
            self.mounted = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
            node = None if tree.is_shard(path) else self._node(path)
            is_file = isinstance(node, MountedPart)
            return {
                "st_mode": (stat.S_IFREG | 0o444) if is_file else (stat.S_IFDIR | 0o555),
                "st_nlink": 1 if is_file else 2,
                "st_size": node.size if isinstance(node, MountedPart) else 0,
                "st_uid": os.getuid(),
                "st_gid": os.getgid(),
                **dict.fromkeys(("st_atime", "st_mtime", "st_ctime"), began),
            }

        def readdir(self, path: str, fh: int) -> Iterator[str]:
            node = self._node(path)
            if isinstance(node, MountedPart):
                raise failing(errno.ENOTDIR)
            yield from (".", "..", *node)

        def open(self, path: str, flags: int) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR):
                raise failing(errno.EROFS)
            return 0

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            node = self._node(path)
            if not isinstance(node, MountedPart):
                raise failing(errno.EISDIR)
            try:
                return tree.read(node, offset, size)
            except EnergonError as error:
                raise failing(errno.EIO) from error

        def _node(self, path: str) -> Folder | MountedPart:
            try:
                node = tree.find(path)
            except EnergonError as error:  # a damaged shard
                raise failing(errno.EIO) from error
            if node is None:
                raise failing(errno.ENOENT)
            return node

    return Files()
