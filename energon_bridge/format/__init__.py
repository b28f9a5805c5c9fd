"""The formats on disk: tar members, `.tar.idx`, the files of `.nv-meta`, the field map, JSONL files, join indexes.

Training reads by index and never walks a tar. The formats are those of Megatron Energon 7.4, so both packages can share
a dataset.
"""

from __future__ import annotations

from energon_bridge.format.dataset import PreparedDataset, open_dataset, read_index
from energon_bridge.format.field_map import FieldMap
from energon_bridge.format.tar import parse_sample

__all__ = ["FieldMap", "PreparedDataset", "open_dataset", "parse_sample", "read_index"]
