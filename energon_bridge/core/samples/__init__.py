"""Sample and batch types.

`sample` has the two base classes, `types` the sample types that a `dataset.yaml` can name, `stacking` the collation of
tensors. Importing this package imports neither torch nor numpy.
"""

from __future__ import annotations

from energon_bridge.core.samples import types
from energon_bridge.core.samples.sample import (
    META_FIELDS,
    Batch,
    CrudeSample,
    Sample,
    Segment,
    SourceInfo,
    add_source_info,
    edataclass,
    field_names,
    init_field_names,
    required_field_names,
    segments_of,
)
from energon_bridge.core.samples.types import *  # noqa: F403 - listed once, there

__all__ = [
    "META_FIELDS",
    "Batch",
    "CrudeSample",
    "Sample",
    "Segment",
    "SourceInfo",
    "add_source_info",
    "edataclass",
    "field_names",
    "init_field_names",
    "required_field_names",
    "segments_of",
]
__all__ += types.__all__
