"""The names of the package, each once: type checkers read this file, and `lazy_loader` does at run time."""

__all__: list[str]

from .cache import (
    CachePool as CachePool,
    Lazy as Lazy,
    NoCachePool as NoCachePool,
)
from .file_store import (
    DecodeFileStore as DecodeFileStore,
    FileStore as FileStore,
    JsonlFileStore as JsonlFileStore,
    PrimaryFileStore as PrimaryFileStore,
    SystemFileStore as SystemFileStore,
    WebdatasetFileStore as WebdatasetFileStore,
)
