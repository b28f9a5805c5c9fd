"""The names of the package, each once: type checkers read this file, and `lazy_loader` does at run time."""

__all__: list[str]

from .indexing import (
    Prepared as Prepared,
    prepare_dataset as prepare_dataset,
    rebuild_index as rebuild_index,
)
from .split import (
    SplitRule as SplitRule,
    parse_patterns as parse_patterns,
    parse_ratio as parse_ratio,
)
