"""Bytes by (name, offset, length), wherever they live.

`open_store` binds a folder or URL to a `Store`; everything above this layer names files by POSIX paths relative to it.
"""

from __future__ import annotations

import os

from energon_bridge.core.registry import load, registered
from energon_bridge.core.storage.local import FileTimes, LocalStore, OpenFiles, cannot_write, no_room, write_file
from energon_bridge.core.storage.stalls import READ_TIMEOUT_SECONDS, Stalls
from energon_bridge.core.storage.store import ByteRange, FarStore, Store, as_far

__all__ = [
    "READ_TIMEOUT_SECONDS",
    "ByteRange",
    "FarStore",
    "FileTimes",
    "LocalStore",
    "OpenFiles",
    "Stalls",
    "Store",
    "as_far",
    "cannot_write",
    "no_room",
    "open_store",
    "write_file",
]


def open_store(url_or_path: str | os.PathLike[str], *, files: OpenFiles | None = None, confined: bool = False) -> Store:
    """Bind a folder (`path` or `file://path`) or a URL (of a scheme in `registry.toml`, anything else by fsspec) to
    a store.

    Stores that are given the same `files` keep no more files open together than it allows. Nothing is read yet: a root
    that does not exist is reported by the first access (DatasetNotFoundError). A store that is `confined` to a local
    folder reads nothing that symbolic links in it lead out to.
    """
    text = os.fspath(url_or_path)
    protocol, separator, rest = text.partition("://")
    if not separator or protocol == "file":
        path = rest if separator else text
        return LocalStore(path, files=OpenFiles(inside=os.path.expanduser(path)) if confined else files)
    is_known = protocol in registered("store") and "::" not in rest
    store: Store = load("store", protocol if is_known else "any")(text, None if files is None else files.stalls)
    return store
