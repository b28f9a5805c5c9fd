"""Bytes by (name, offset, length), wherever they live.

`open_store` binds a folder or URL to a `Store`; everything above this layer names files by POSIX paths relative to it.
"""

from __future__ import annotations

import os

from energon_bridge.storage.base import Store
from energon_bridge.storage.local import LocalStore

__all__ = ["LocalStore", "Store", "open_store"]


def open_store(url_or_path: str | os.PathLike[str]) -> Store:
    """Bind a folder (`path` or `file://path`) or any fsspec URL (`proto://...`) to a store.

    Nothing is read yet: a root that does not exist is reported by the first access (DatasetNotFoundError).
    """
    text = os.fspath(url_or_path)
    protocol, separator, rest = text.partition("://")
    if not separator:
        return LocalStore(text)
    if protocol == "file":
        return LocalStore(rest)
    from energon_bridge.storage.fsspec_store import FsspecStore  # fsspec costs 20 ms that local data need not pay

    return FsspecStore(text)
