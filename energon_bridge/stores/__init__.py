"""Files by key, for cookers: stores over prepared datasets, folders and JSONL files, and caches for files needed later.

`base` has the protocol and the stores; `cache` and `disk_cache` keep files close until the samples that need them are
delivered.
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
from energon_bridge.stores.cache import CachePool, FileStoreCachePool, Lazy, NoCachePool

__all__ = [
    "CachePool",
    "DecodeFileStore",
    "FileStore",
    "FileStoreCachePool",
    "JsonlFileStore",
    "Lazy",
    "NoCachePool",
    "PrimaryFileStore",
    "SystemFileStore",
    "WebdatasetFileStore",
]
