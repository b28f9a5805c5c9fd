"""Mixes: from a metadataset file, a dict or a `Blender` to a tree of leaves with weights.

`load` turns any source (a path, a dict, a `Blender`) into leaves; `metadataset` reads files; `tree` has the nodes,
`flatten` their effective weights, `subset` and `schedule` ranges and changing weights. All of this reads nothing but
YAML files. `opener` opens the datasets, helped by an index of an earlier start; `leaves` and `joins` hold what is open.
"""

from __future__ import annotations

from energon_bridge.mix.expression import AspectTiers
from energon_bridge.mix.flatten import Mix, MixLeaf, MixMode, flatten
from energon_bridge.mix.joins import register_joiner, resolve_joiner
from energon_bridge.mix.load import Blender, MixSource, index_of_datasets, load_mix, load_tree, open_mix_index
from energon_bridge.mix.metadataset import metadataset_splits
from energon_bridge.mix.opener import DatasetOpener, MixIndex
from energon_bridge.mix.paths import resolve_path, user_cache
from energon_bridge.mix.schedule import WeightSchedule, parse_weight
from energon_bridge.mix.tree import (
    AuxRef,
    Blend,
    Concat,
    EpochizedBlend,
    JoinEntry,
    Joiner,
    JoinRef,
    Leaf,
    LeafRef,
    Node,
    SubsetRange,
    combine_multipliers,
    data_identity,
    evaluate_subset,
    merge_subsets,
)

__all__ = [
    "AspectTiers",
    "AuxRef",
    "Blend",
    "Blender",
    "Concat",
    "DatasetOpener",
    "EpochizedBlend",
    "JoinEntry",
    "JoinRef",
    "Joiner",
    "Leaf",
    "LeafRef",
    "Mix",
    "MixIndex",
    "MixLeaf",
    "MixMode",
    "MixSource",
    "Node",
    "SubsetRange",
    "WeightSchedule",
    "combine_multipliers",
    "data_identity",
    "evaluate_subset",
    "flatten",
    "index_of_datasets",
    "load_mix",
    "load_tree",
    "merge_subsets",
    "metadataset_splits",
    "open_mix_index",
    "parse_weight",
    "register_joiner",
    "resolve_joiner",
    "resolve_path",
    "user_cache",
]
