"""Files by key, for cookers: stores over prepared datasets, folders and JSONL files, and caches for files needed later.

`file_store` has the protocol and the stores; `cache` the lazies (the pool that keeps their files on a local disk until
the samples that need them are delivered is `cloud/file_cache.py`).

The names are those of `__init__.pyi`, imported on first use.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
