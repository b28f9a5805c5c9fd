"""Files by key, for cookers: stores over prepared datasets, folders and JSONL files, and caches for files needed later.

`file_store` has the protocol and the stores; `cache` has `Lazy`, a file that is read when a later hook asks for it, and
the protocol of a pool that keeps such files meanwhile (`cloud/file_cache.py` is one, on a local disk).

The names are those of `__init__.pyi`, imported on first use.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
