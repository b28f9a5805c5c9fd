"""Files by key, for cookers: stores over prepared datasets, folders and JSONL files, and caches for files needed later.

`base` has the protocol, `webdataset` the stores, and `cache` and `disk_cache` keep files close until the samples that
need them are delivered.
"""

from __future__ import annotations

from energon_bridge.stores.base import DecodeFileStore, FileStore, PrimaryFileStore
from energon_bridge.stores.cache import CachePool, FileStoreCachePool, Lazy, NoCachePool
from energon_bridge.stores.webdataset import JsonlFileStore, SystemFileStore, WebdatasetFileStore

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
