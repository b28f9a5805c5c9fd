"""Files by key, for cookers: stores over prepared datasets, folders and JSONL files, and caches for files needed later.

`base` has the protocol and the stores; `cache` the lazies, and `file_cache` the pool that keeps their files on a local
disk until the samples that need them are delivered.
"""

from __future__ import annotations

from energon_bridge.stores.base import (
    DecodeFileStore,
    FileStore,
    JsonlFileStore,
    PrimaryFileStore,
    SystemFileStore,
    WebdatasetFileStore,
)
from energon_bridge.stores.cache import CachePool, Lazy, NoCachePool

__all__ = [
    "CachePool",
    "DecodeFileStore",
    "FileStore",
    "JsonlFileStore",
    "Lazy",
    "NoCachePool",
    "PrimaryFileStore",
    "SystemFileStore",
    "WebdatasetFileStore",
]
